"""Options, msprobe's config file and stages: what is checked before training. Nothing here imports msprobe or torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope import ConfigError, DistProfiler, OptionError, load_config
from rankscope_precision_debugger import PrecisionDebuggerOptions, stages
from rankscope_precision_debugger.settings import Settings, read_settings


def problems(**options: Any) -> list[tuple[str, str]]:
    with pytest.raises(OptionError) as caught:
        PrecisionDebuggerOptions(**options)
    return caught.value.problems


def problem(**options: Any) -> tuple[str, str]:
    [only] = problems(**options)
    return only


# Options.


def test_every_key_of_verl_s_block_is_taken(kit: Any, tmp_path: Path) -> None:
    block = {
        "_target_": "verl.utils.profiler.config.PrecisionDebuggerToolConfig",
        "name": "precision_debugger",
        "config_path": kit.msprobe_json(tmp_path / "c.json", level="mix"),
        "steps": [1, 2],
        "stages": ["actor_update", "ref_compute_log_prob"],
        "strict": True,
    }
    profiler = DistProfiler(kit.config(tmp_path, **block), role="actor", rank=0)
    options = profiler.tools[0].backend.options  # type: ignore[attr-defined]
    assert options.stages == ("actor_update", "ref_compute_log_prob")
    assert options.settings() == Settings(file=block["config_path"], level="mix", dump_path="/nowhere")
    profiler.close()


def test_all_defaults_are_msprobe_s_own() -> None:
    assert PrecisionDebuggerOptions().settings() == Settings("", "statistics", "L1")


def test_the_tool_s_own_steps_have_no_effect_and_it_is_said(
    kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DistProfiler(kit.config(tmp_path, steps=[7]), role="actor", rank=0).close()
    assert "steps of precision_debugger has no effect; global_profiler.steps says" in capsys.readouterr().err


@pytest.mark.parametrize("strict", [False, True])
def test_unknown_stages(kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], strict: bool) -> None:
    chosen = {"stages": ["actor_updat", "actor_update"], "strict": strict}
    if strict:
        key, message = problem(**chosen)
        assert key == "stages"
        assert "nobody knows the stage 'actor_updat'. Did you mean 'actor_update'?" in message
        assert "models, or set resolve_model" in message
        with pytest.raises(ConfigError, match=r"precision_debugger\.stages: nobody knows"):
            load_config(kit.config(tmp_path, **chosen), check_tools=True)
        return
    DistProfiler(kit.config(tmp_path, **chosen), role="actor", rank=0).close()
    assert "nobody knows the stage 'actor_updat'" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{"models": {"my_stage": "net"}}, {"resolve_model": "json:loads"}])
def test_a_stage_of_one_s_own_is_known_where_its_model_is(more: dict[str, Any]) -> None:
    options = PrecisionDebuggerOptions(stages=("my_stage",), strict=True, **more)
    assert options.unknown_stages == {}


def test_generation_is_warned_about_where_it_is_listed(
    kit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DistProfiler(kit.config(tmp_path, stages=["rollout_generate"], strict=True), role="actor", rank=0).close()
    assert "stages of rollout generation are never dumped" in capsys.readouterr().err


def test_no_stage_at_all_is_a_mistake() -> None:
    assert problem(stages=()) == ("stages", "is empty, so nothing would be dumped; null means the usual stages")


@pytest.mark.parametrize("value", ["not an attribute", 3, [], ["good", "not good"], {"a": "b"}, ""])
def test_models_must_name_attributes(value: Any) -> None:
    key, message = problem(models={"actor_update": value})
    assert key == "models.actor_update"
    assert repr(value) in message


@pytest.mark.parametrize("value", ["function", "module.function", "a:b:c", "a: b", ":b", "a:"])
def test_resolve_model_must_name_a_function(value: str) -> None:
    assert problem(resolve_model=value) == ("resolve_model", f"must be module:function, got {value!r}")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nowhere.to_be:found", "cannot be imported: ModuleNotFoundError"),
        ("json:nothing", "cannot be imported: AttributeError"),
        ("json:__name__", "not a function"),
        ("gc:collect", "cannot be called with (instance, stage, role)"),
    ],
)
def test_resolve_model_is_imported_before_training(kit: Any, tmp_path: Path, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DistProfiler(kit.config(tmp_path, resolve_model=value), role="actor", rank=0)
    assert words in str(caught.value)


# msprobe's config file.


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    key, message = problem(config_path=str(tmp_path / "confg.json"))
    assert key == "config_path"
    assert f"there is no file {tmp_path / 'confg.json'}. Did you mean 'config.json'?" in message
    monkeypatch.chdir(tmp_path)
    assert PrecisionDebuggerOptions(config_path="config.json").settings().file == str(tmp_path / "config.json")
    monkeypatch.setenv("MSPROBE_CONFIGS", str(tmp_path))
    assert PrecisionDebuggerOptions(config_path="$MSPROBE_CONFIGS/config.json").settings().file
    assert f"A relative path starts at {tmp_path}" in problem(config_path="other.json")[1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.yaml", "{}", "must be a .json file of msprobe"),
        ("c.json", "{", "cannot be read as JSON"),
        ("c.json", b"\xff\xfe{}", "cannot be read as JSON"),
        ("c.json", "[]", "holds list, not a JSON object"),
        ("c d.json", "{}", "msprobe refuses paths with other signs"),
    ],
)
def test_a_file_that_cannot_be_one(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    key, message = problem(config_path=str(file))
    assert key == "config_path"
    assert words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"task": "statistic"},
            "task 'statistic' cannot be used around stages; choices: statistics, tensor, structure",
        ),
        ({"task": "acc_check"}, "task 'acc_check' cannot be used around stages: it checks operators by themselves"),
        ({"task": ["tensor"]}, "task ['tensor'] cannot be used around stages"),
        ({"level": "L3"}, "level 'L3' cannot be used around stages; choices: L0, L1, mix, debug"),
        ({"level": "L2"}, "it dumps the kernels of one NPU operator, not a stage"),
        ({"task": "nan_check", "level": "mix"}, "must be L1 for task nan_check"),
        ({"rank": "0-3"}, "rank is '0-3'; msprobe wants a list"),
        ({"rank": [-1]}, "rank is [-1]"),
        ({"step": ["3-1"]}, "step is ['3-1']"),
        ({"step": [1.5]}, "step is [1.5]"),
        ({"step": [True]}, "step is [True]"),
        ({"load": {}}, "'load' replaces the inputs of modules"),
        ({"dump_enable": "yes"}, "'dump_enable' is 'yes', neither true nor false"),
        ({"statistics": []}, "'statistics' is [], not a mapping"),
        ({"statistics": {"list": "Module"}}, "statistics.list is 'Module', not a list of texts"),
        ({"statistics": {"data_mode": ["inputs"]}}, "has no choice 'inputs'; choices: all, input"),
    ],
)
def test_what_msprobe_would_refuse_or_misread_in_the_middle_of_the_training(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(content))
    assert words in problem(config_path=str(file))[1]


def test_every_problem_comes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"task": "x", "level": "y", "rank": 3}))
    found = problems(config_path=str(file), stages=(), models={"a": 1}, resolve_model="no")
    assert [key for key, _ in found] == [
        "stages",
        "models.a",
        "resolve_model",
        "config_path",
        "config_path",
        "config_path",
    ]


def test_task_and_level_may_be_given_in_place_of_the_file_s(kit: Any, tmp_path: Path) -> None:
    file = kit.msprobe_json(tmp_path / "c.json", task="tensor", level="L1", rank=[0, "2-4"], step=["5-6", 9])
    read = read_settings(file, task="statistics", level="L0")
    assert (read.task, read.level, read.own_task, read.own_level) == ("statistics", "L0", "statistics", "L0")
    assert (read.ranks, read.steps, read.needs_model) == ((0, 2, 3, 4), (5, 6, 9), True)
    assert read_settings(file).level == "L1"
    assert not read_settings(file).needs_model
    assert read_settings(None, task="structure").level == "mix"  # as msprobe has it
    assert problem(level="l0")[0] == "level"
    assert "Did you mean 'tensor'?" in problem(task="tensors")[1]


# What contradicts the rest of the config.


def test_ranks_that_msprobe_s_file_leaves_out_are_a_named_conflict(kit: Any, tmp_path: Path) -> None:
    file = kit.msprobe_json(tmp_path / "c.json", rank=[0, "4-7"])
    values = kit.config(tmp_path, config_path=file)
    DistProfiler(values, role="actor", rank=5).close()
    with pytest.raises(ConfigError) as caught:
        DistProfiler(values, role="actor", rank=1)
    assert f"ranks selects rank 1 of actor, yet {file} excludes it: its rank is 0,4-7." in str(caught.value)
    values["actor"]["profiler"]["ranks"] = [0]
    DistProfiler(values, role="actor", rank=1).close()  # both leave it out


def test_steps_that_msprobe_s_file_leaves_out_are_a_named_conflict(kit: Any, tmp_path: Path) -> None:
    file = kit.msprobe_json(tmp_path / "c.json", step=[2])
    with pytest.raises(ConfigError) as caught:
        DistProfiler(kit.config(tmp_path, config_path=file), role="actor", rank=0)
    assert f"global_profiler.steps has 1,3, yet {file} excludes them: its step is 2." in str(caught.value)
    values = kit.config(tmp_path, common={"steps": [2]}, config_path=file)
    DistProfiler(values, role="actor", rank=0).close()


def test_a_save_path_that_msprobe_refuses(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"letters, digits and _ \. : / -, and save_path is"):
        DistProfiler(kit.config(tmp_path / "mit Leerzeichen"), role="actor", rank=0)


def test_looking_at_a_config_imports_neither_torch_nor_msprobe(kit: Any, tmp_path: Path) -> None:
    values = kit.config(tmp_path, config_path=kit.msprobe_json(tmp_path / "c.json"))
    code = (
        "import json, sys; from rankscope import DistProfiler\n"
        "DistProfiler(json.loads(sys.argv[1]), role='actor', rank=0).close()\n"
        "print([name for name in ('torch', 'msprobe') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, json.dumps(values)], capture_output=True, text=True, timeout=100, check=True
    )
    assert shown.stdout == "[]\n"


# Where models are.


class Module:
    """Looks like one."""

    def forward(self) -> None: ...

    def named_modules(self) -> None: ...


class Worker:
    """Has attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    @property
    def module(self) -> None:
        raise RuntimeError("a property of the user's")


def find(worker: Any, stage: str = "actor_update", **more: Any) -> Any:
    return stages.find_model(worker, stage, "actor", **{"resolver": None, **more})


def test_verl_s_places_in_their_order() -> None:
    engine, other = Module(), Module()
    worker = Worker(actor=Worker(engine=Worker(module=engine), actor_module=other), actor_module=other)
    assert find(worker) is other  # a property that raises counts as none: engine.module is one of Worker
    del worker.actor.actor_module
    assert find(worker) is other
    assert find(Worker(engine=type("Engine", (), {"module": engine})()), "train_batch") is engine
    assert find(Worker(critic_module=engine), "compute_values") is engine
    assert find(Worker(ref_module_fsdp=engine), "ref_compute_log_prob") is engine
    assert find(Worker(model=engine), "compute_rm_score") is engine


def test_lists_of_chunks() -> None:
    one, two = Module(), Module()
    assert find(Worker(actor_module=[one])) is one
    assert find(Worker(actor_module=(one, two))) == [one, two]
    for wrong in ([one, "no module"], [], {"a": one}, 3):
        with pytest.raises(stages.NoModelError, match=r"Worker\.actor_module is .*, not a torch\.nn\.Module"):
            find(Worker(actor_module=wrong))


def test_the_function_comes_first_and_may_leave_it_to_the_usual_places() -> None:
    one, two = Module(), Module()
    worker = Worker(actor_module=one)
    asked = []

    def resolver(*arguments: Any) -> Any:
        asked.append(arguments)
        return answers.pop()

    answers: list[Any] = [[one, two], None, "no module"]
    with pytest.raises(stages.NoModelError, match="resolve_model gave str, not a"):
        find(worker, resolver=resolver)
    assert find(worker, resolver=resolver) is one
    assert find(worker, resolver=resolver) == [one, two]
    assert asked == [(worker, "actor_update", "actor")] * 3
    with pytest.raises(stages.NoModelError, match="resolve_model raised ZeroDivisionError"):
        find(worker, resolver=lambda *_: 1 / 0)


def test_what_was_looked_at_is_said() -> None:
    with pytest.raises(
        stages.NoModelError, match=r"Worker has none of: left, right\.inner; name the attribute in models"
    ):
        find(Worker(), chosen=("left", "right.inner"))
    with pytest.raises(
        stages.NoModelError, match=r"Worker has none of: actor\.engine\.module, .*, module, model; name"
    ):
        find(Worker())
    with pytest.raises(stages.NoModelError, match="no object is bound to the stage"):
        find(None)
