"""Objects with the signatures of named engine versions, copied by hand from their wheels; they note what they get."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional


class Noting:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []


class AsyncLLM033(Noting):
    """vllm 0.33.0, ``v1/engine/async_llm.py``."""

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.calls.append(("start", (profile_prefix, delay_iterations, max_iterations, profiler_kwargs)))

    async def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class LLM033(Noting):
    """vllm 0.33.0, ``entrypoints/llm.py``."""

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.calls.append(("start", (profile_prefix, delay_iterations, max_iterations, profiler_kwargs)))

    def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class AsyncLLM013(Noting):
    """vllm 0.12.0 and 0.13.0, ``v1/engine/async_llm.py``."""

    async def start_profile(self) -> None:
        self.calls.append(("start", None))

    async def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class PassesOn(Noting):
    """A server's own method that hands anything on, as verl's does."""

    async def start_profile(self, **kwargs: Any) -> None:
        self.calls.append(("start", kwargs))

    async def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class TokenizerManager0512(Noting):
    """sglang 0.5.12, ``srt/managers/tokenizer_control_mixin.py``."""

    async def start_profile(
        self: TokenizerManager,  # noqa: F821 - as in the original, where nobody can resolve it either
        output_dir: Optional[str] = None,  # noqa: UP045
        start_step: Optional[int] = None,  # noqa: UP045
        num_steps: Optional[int] = None,  # noqa: UP045
        activities: Optional[list[str]] = None,  # noqa: UP045
        with_stack: Optional[bool] = None,  # noqa: UP045
        record_shapes: Optional[bool] = None,  # noqa: UP045
        profile_by_stage: bool = False,
        merge_profiles: bool = False,
        profile_prefix: Optional[str] = None,  # noqa: UP045
        profile_stages: Optional[list[str]] = None,  # noqa: UP045
    ) -> None:
        given = {
            "output_dir": output_dir,
            "start_step": start_step,
            "num_steps": num_steps,
            "activities": activities,
            "with_stack": with_stack,
            "record_shapes": record_shapes,
            "profile_prefix": profile_prefix,
        }
        self.calls.append(("start", given))

    async def stop_profile(self: TokenizerManager) -> None:  # noqa: F821 - as above
        self.calls.append(("stop", None))
        raise RuntimeError("Profiling is not in progress. Call /start_profile first.")


@dataclasses.dataclass(kw_only=True)
class ProfileReq:
    """sglang 0.5.23, ``srt/managers/io_struct.py``, where it is a msgspec struct."""

    req_type: int = 1
    output_dir: Optional[str] = None  # noqa: UP045
    start_step: Optional[int] = None  # noqa: UP045
    num_steps: Optional[int] = None  # noqa: UP045
    activities: Optional[list[str]] = None  # noqa: UP045
    profile_by_stage: bool = False
    with_stack: Optional[bool] = None  # noqa: UP045
    record_shapes: Optional[bool] = None  # noqa: UP045
    profile_id: Optional[str] = None  # noqa: UP045
    merge_profiles: bool = False
    profile_prefix: Optional[str] = None  # noqa: UP045
    profile_stages: Optional[list[str]] = None  # noqa: UP045
    detailed_annotations: bool = False


class TokenizerManager0523(Noting):
    """sglang 0.5.23, ``srt/managers/tokenizer_control_mixin.py``."""

    async def start_profile(
        self: TokenizerManager,  # noqa: F821 - as above
        req: Optional[ProfileReq] = None,  # noqa: UP045
    ) -> None:
        self.calls.append(("start", req))

    async def stop_profile(self: TokenizerManager) -> None:  # noqa: F821 - as above
        self.calls.append(("stop", None))


class SglangEngine0523(Noting):
    """sglang 0.5.23, ``srt/entrypoints/engine.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer_manager = TokenizerManager0523()

    def start_profile(self, **kwargs: Any) -> None:
        self.calls.append(("start", ProfileReq(**kwargs)))

    def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class SglangEngine0512(Noting):
    """sglang 0.5.12, ``srt/entrypoints/engine.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer_manager = TokenizerManager0512()

    def start_profile(self, **kwargs: Any) -> None:
        self.calls.append(("start", kwargs))

    def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class TrtLlm(Noting):
    """TensorRT-LLM, ``llmapi/llm.py`` of 2026."""

    def start_profile(
        self,
        output_dir: Optional[str] = None,  # noqa: UP045
        num_steps: Optional[int] = None,  # noqa: UP045
        start_step: int = 0,
        activities: Optional[list[str]] = None,  # noqa: UP045
    ) -> None:
        self.calls.append(("start", (output_dir, num_steps, start_step, activities)))

    def stop_profile(self) -> None:
        self.calls.append(("stop", None))


class TrtLlmRpc(Noting):
    """Older TensorRT-LLM with a worker extension, as verl drives it."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        self.calls.append((method, (args, kwargs)))
