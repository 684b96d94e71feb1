"""rankscope's own messages: one line each, to wherever stderr points at that moment.

A library has no business with the application's logging, so neither ``structlog.configure`` nor the ``logging`` module
is touched here. structlog is imported at the first message that passes the level, never before.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from rankscope import environment
from rankscope.randomness import unchanged

if TYPE_CHECKING:
    from rankscope.types import Logger

LEVELS: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""Names of the levels, from the most talkative to the least, with the numbers that ``logging`` gives them."""

FORMATS = ("text", "json")
PREFIX = "[rankscope]"

_HEAD = ("timestamp", "level", "event")
_NEEDS_QUOTES = frozenset("=\"'\\")

_structlog: Any = None
_leaving = False
_said: dict[object, object] = {}


class StderrLogger:
    """A `rankscope.types.Logger`: an event in words, facts as keywords, and facts bound for good."""

    __slots__ = ("_bound",)

    def __init__(self, bound: Mapping[str, Any]) -> None:
        self._bound = dict(bound)

    def debug(self, event: str, **facts: Any) -> None:
        """For who looks for a fault in rankscope or in a backend."""
        _log("debug", event, self._bound, facts)

    def info(self, event: str, **facts: Any) -> None:
        """What a user wants to know once: the plan, the summary."""
        _log("info", event, self._bound, facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Something that was asked for does not happen, or not fully."""
        _log("warning", event, self._bound, facts)

    def error(self, event: str, **facts: Any) -> None:
        """Something went wrong; ``exc_info=error`` adds the traceback."""
        _log("error", event, self._bound, facts)


def get_logger(**bound: Any) -> Logger:
    """A logger with these facts in every line.

    The level comes from ``RANKSCOPE_LOG_LEVEL`` and the format from ``RANKSCOPE_LOG_FORMAT``, read at each message.
    Logging never raises and takes no lock, so it works in ``atexit`` and in signal handlers.
    """
    return StderrLogger(bound)


def make_ready() -> None:
    """Import now what the first message needs: it may come up where a training waits."""
    with contextlib.suppress(Exception):
        _structured()


def import_nothing_more() -> None:
    """The process is on its way out: messages are made without structlog, unless that is there already.

    Importing it would compile code, after which Python forgets that a Ctrl-C is what it ends by, and exits with 1.
    """
    global _leaving
    _leaving = True


def warn_once(logger: Logger, key: object, event: str, **facts: Any) -> bool:
    """Warn unless this ``key`` was warned about before in this process (or in the one it was forked from).

    Args:
        logger: a `rankscope.types.Logger`.
        key: hashable; what makes two warnings the same.
        event: the message.
        **facts: its facts.

    Returns:
        Whether it was said now.
    """
    if not first_time(key):
        return False
    logger.warning(event, **facts)
    return True


def first_time(key: object) -> bool:
    """Whether this key is seen for the first time in this process; of several threads exactly one gets True."""
    ours = object()
    return _said.setdefault(key, ours) is ours


def _log(level: str, event: str, bound: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    try:
        if LEVELS[level] < LEVELS[_choice(environment.LOG_LEVEL, LEVELS, "info")]:
            return
        facts = {**bound, **facts}
        if _leaving and _structlog is None:
            _Stderr().msg(_plainly(level, event, facts))
            return
        try:
            logger = _structured()
        except Exception:  # noqa: BLE001  # late in interpreter shutdown some modules can no longer be imported
            _Stderr().msg(_plainly(level, event, facts))
        else:
            # One keyword holds all facts: their names can then never clash with a parameter of structlog.
            getattr(logger, level)(event, facts=facts)
    except Exception:  # noqa: BLE001, S110  # a message is never worth a training run
        pass


def _structured() -> Any:
    global _structlog
    if _structlog is None:
        with unchanged():
            import structlog

        # Everything is given here, so the application's structlog configuration does not apply, nor is it changed.
        _structlog = structlog.wrap_logger(
            _Stderr(),
            processors=[_unfold, _add_traceback, _render],
            wrapper_class=structlog.BoundLogger,
            context_class=dict,
            cache_logger_on_first_use=False,
        )
    return _structlog


def _plainly(level: str, event: str, facts: Mapping[str, Any]) -> str:
    fields: MutableMapping[str, Any] = {"event": event, "facts": facts}
    return _render(None, level, _add_traceback(None, level, _unfold(None, level, fields)))


def _unfold(_logger: Any, level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    facts = {f"{name}_" if name in _HEAD else name: value for name, value in fields["facts"].items()}
    return {"timestamp": stamp, "level": level, "event": fields["event"], **facts}


def _add_traceback(_logger: Any, _level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    given = fields.pop("exc_info", None)
    error = given[1] if isinstance(given, tuple) else sys.exc_info()[1] if given is True else given
    if isinstance(error, BaseException):
        import traceback

        fields["exception"] = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    return fields


def _render(_logger: Any, _level: str, fields: MutableMapping[str, Any]) -> str:
    if _choice(environment.LOG_FORMAT, FORMATS, "text") == "json":
        fields = {"logger": "rankscope", **fields}
        try:
            return json.dumps(fields, default=_shown, allow_nan=False)
        except (TypeError, ValueError):  # keys that JSON lacks, a loop, not a number
            return json.dumps({name: _shown(value) for name, value in fields.items()})
    timestamp, level, event, exception = (fields.pop(name, None) for name in (*_HEAD, "exception"))
    facts = "".join(f" {name}={_value(value)}" for name, value in fields.items())
    line = f"{PREFIX} {timestamp} {level:<7} {_one_line(_shown(event))}{facts}"
    return f"{line}\n{exception}" if exception else line


def _value(value: Any) -> str:
    text = _shown(value)
    plain = bool(text) and text.isprintable() and " " not in text and not _NEEDS_QUOTES.intersection(text)
    return text if plain else json.dumps(text, ensure_ascii=False)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  # the __str__ is somebody else's
        return f"<{type(value).__name__} without a text>"


def _choice(variable: str, choices: Any, default: str) -> str:
    text = os.environ.get(variable, default)
    if text in choices:
        return text
    text = text.strip().lower()
    if text in choices:
        return text
    if text and first_time(("environment", variable, text)):
        from rankscope.errors import did_you_mean, listing

        problem = (
            f"{variable}={text!r} is not one of {listing(choices)}; {default} is used.{did_you_mean(text, choices)}"
        )
        _Stderr().msg(f"{PREFIX} {problem}")
    return default


class _Stderr:
    """Where lines end up: the current ``sys.stderr``, else the one that the process began with."""

    def msg(self, line: str) -> None:
        for stream in dict.fromkeys((sys.stderr, sys.__stderr__)):
            if stream is not None and self._write(stream, line + "\n"):
                return

    debug = info = warning = error = msg

    @staticmethod
    def _write(stream: Any, text: str) -> bool:
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError:
                encoding = getattr(stream, "encoding", None) or "ascii"
                stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except Exception:  # noqa: BLE001  # closed, full, or gone
            return False
        return True
