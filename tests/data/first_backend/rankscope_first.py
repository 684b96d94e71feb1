"""A backend as the first release allowed it. It is never edited: a change of rankscope that breaks it breaks users."""

import contextlib
from dataclasses import dataclass

from rankscope import Availability, Context, Launch, NothingRecorded, OptionError, Span, Window, hookimpl


@dataclass(frozen=True)
class FirstOptions:
    unit: str = "s"
    discrete: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self):
        if self.unit not in {"s", "ms"}:
            raise OptionError([("unit", f"{self.unit!r} is not one of: s, ms")])


class FirstBackend:
    Options = FirstOptions
    owns = frozenset({"first_clock"})
    thread_bound = False
    suffix = ".txt"

    @staticmethod
    def available() -> Availability:
        return Availability(True)

    @staticmethod
    def launch(options: FirstOptions, context: Context) -> Launch:
        return Launch(env={"FIRST_UNIT": options.unit})

    def __init__(self, context: Context, options: FirstOptions) -> None:
        self.context = context
        self.options = options
        self.lines = []
        self.relocated = []

    @hookimpl
    def start(self, window: Window) -> None:
        self.lines = [f"{window.role} {window.step} {window.scope} {window.reason} {window.steps}"]

    @hookimpl
    def step(self, span, window):  # any order
        self.lines.append(f"step in {span.stage if span else None}")

    @hookimpl
    def annotate(self, span: Span):
        @contextlib.contextmanager
        def row():
            self.lines.append(f"enter {span.stage} {span.kind} {span.is_batch}")
            yield
            self.lines.append(f"leave {span.stage}")

        return row()

    @hookimpl
    def stop(self, window: Window) -> None:
        with self.context.store.reserve(window, suffix=".txt") as file:
            file.staged.write_text("\n".join(self.lines))
            file.finish_later("rankscope_first:pack", {"unit": self.options.unit})

    @hookimpl
    def relocate(self, window):
        self.relocated.append(window.step)

    @hookimpl
    def finish(self, artifacts):
        self.context.logger.info("first backend finished", files=len(artifacts), relocated=self.relocated)


def pack(staged, temporary, name, arguments):
    text = staged.read_text()
    if not text:
        raise NothingRecorded("no line")
    temporary.write_text(f"{name} {arguments['unit']}\n{text}")
    return {"events": text.count("\n") + 1}
