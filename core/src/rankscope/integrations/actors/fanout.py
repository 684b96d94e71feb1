"""One call to many workers: a bounded number in flight, one deadline for all, and who is silent holds up nobody.

Knows no framework: how a call is sent and waited for is given by the caller.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

LOOK_EVERY = 0.5
"""Seconds between two looks at calls that gave up their place to others."""


@dataclasses.dataclass
class Outcome:
    """What became of one call.

    Attributes:
        value: what it returned.
        error: what it raised, or why it could not be sent.
        pending: the call itself, where it was not answered in time; None otherwise.
    """

    value: Any = None
    error: Exception | None = None
    pending: Hashable | None = None


def fan_out(
    items: Sequence[Item],
    *,
    send: Callable[[Item], Hashable],
    wait: Callable[[list[Any], float], Sequence[Any]],
    result: Callable[[Any], Any],
    seconds: float,
    in_flight: int,
) -> list[Outcome]:
    """Call all items, and wait until all have answered or the time is over.

    A call that is not answered for a while gives up its place, and is still listened to: items that hang keep nobody
    else from being called. Even where no item answers at all, all of them are called within half of the time.

    Args:
        items: who is called, in this order.
        send: starts the call of an item.
        wait: gives those of some calls that are done; blocks for the first one, for so many seconds at most.
        result: of a call that is done; may raise.
        seconds: for all calls together.
        in_flight: most calls at once.

    Returns:
        The outcomes, in the order of the items.
    """
    outcomes = [Outcome() for _ in items]
    began = time.monotonic()
    end = began + seconds
    patience = 0.5 * seconds * in_flight / max(len(items), in_flight)
    queue = deque(enumerate(items))
    flying: dict[Hashable, tuple[int, float]] = {}  # in the order in which they were sent
    slow: dict[Hashable, int] = {}
    looked = began

    def settle(calls: Sequence[Any]) -> None:
        for call in calls:
            index = flying.pop(call)[0] if call in flying else slow.pop(call)
            try:
                outcomes[index].value = result(call)
            except Exception as error:  # noqa: BLE001 - whatever one worker raises is told with its own outcome
                outcomes[index].error = error

    while queue or flying or slow:
        while queue and len(flying) < in_flight:
            index, item = queue.popleft()
            try:
                flying[send(item)] = (index, time.monotonic())
            except Exception as error:  # noqa: BLE001 - as above
                outcomes[index].error = error
        now = time.monotonic()
        if now >= end:
            settle(wait([*flying, *slow], 0.0) if flying or slow else ())
            break
        oldest = next(iter(flying.values()))[1] if flying else now
        until = min(end, oldest + patience if queue else end, now + LOOK_EVERY if slow and flying else end)
        settle(wait([*flying] if flying else [*slow], max(0.0, until - now)))
        now = time.monotonic()
        if slow and now - looked >= LOOK_EVERY:
            looked = now
            settle(wait([*slow], 0.0))
        if queue:
            for call, (index, sent) in list(flying.items()):
                if now - sent < patience:
                    break
                del flying[call]
                slow[call] = index
    for call, index in [*((call, index) for call, (index, _) in flying.items()), *slow.items()]:
        outcomes[index].pending = call
    return outcomes
