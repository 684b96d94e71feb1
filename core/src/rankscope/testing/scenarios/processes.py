"""What a backend shares with others: the process's surroundings, its children, and the other ranks."""

from __future__ import annotations

import contextlib
import gc
import os

from rankscope import annotate
from rankscope.testing.life import Life
from rankscope.testing.rules import RuleBroken, rule
from rankscope.testing.state import Held, Quiet, captured_output, draw, require_no_leak, require_same_switches, switches
from rankscope.testing.surroundings import Surroundings, tree
from rankscope.testing.tripwire import lonely_rank, torch_group


@rule(light=True)
def surroundings(life: Life) -> None:
    """No hook changes os.environ, the working directory or signal handlers, not even for a while."""
    life.require_available()
    life.exercise()  # what the training changes by itself is not the tool's doing
    before = Surroundings.now()
    handle = life.handle()
    before.require_same("after the object was made")
    life.start(handle, 1)
    before.require_same("after start()")
    with annotate("actor_update", scheduled=True):
        before.require_same("in a span")
        handle.step()
        before.require_same("after step()")
    life.stop(handle, 1)
    before.require_same("after stop()")
    handle.relocate()
    before.require_same("after relocate()")
    handle.finish()
    before.require_same("after finish()")
    handle.close()
    life.sound(handle, "the end")


@rule
def state(life: Life) -> None:
    """A window leaves the process as it was: streams, random numbers, limits, hooks of others; no file or thread stays.

    The first window may import and set up what then stays; the second and the third are looked at.
    """
    life.exercise()  # what the training changes by itself is not the tool's doing
    handle = life.handle()
    life.step(handle, 1)
    with captured_output(life.folder / "stdout.txt") as output:
        grown = []
        for step in (2, 3):
            draw()
            before, held = switches(), Held.now()
            quiet = Quiet(output)
            life.start(handle, step)
            with annotate("actor_update", scheduled=True):
                quiet.require(f"after the start of window {step}")
                life.exercise()
                quiet.begin()
                handle.step()
            life.stop(handle, step)
            quiet.require(f"after the stop of window {step}")
            require_same_switches(before, f"after the stop of window {step}")
            grown.append(held.settled())
        require_no_leak(*grown)
    life.end(handle)
    life.told()


@rule
def fork(life: Life) -> None:
    """A forked child of a process that captures starts clean and ends in time; the capture goes on in the parent."""
    handle = life.handle()
    life.start(handle, 1)
    with annotate("before"):
        life.exercise()

    seen: set[str] = set()

    def child() -> None:
        with annotate("in_the_child"):
            handle.step()
        handle.stop(last=True)
        handle.close()
        gc.collect()
        new = tree(life.save_path) - seen
        if new:
            raise RuntimeError(f"the child wrote {sorted(new)}")

    with annotate("around"):
        seen |= tree(life.save_path)  # now: a tool may have begun a file when this span began
        ended = life.forked(child)
    if ended.code != 0:
        raise RuleBroken(
            f"the forked child {ended}; its output is below",
            "do nothing in a child: a lock may be held and a thread be gone there (os.register_at_fork tells of one)",
        )
    with annotate("after"):
        life.exercise()
    life.sound(handle, "a fork")
    life.stop(handle, 1)
    life.end(handle)
    life.told()
    foreign = {record["pid"] for record in life.artifacts()} - {os.getpid()}
    if foreign:
        raise RuleBroken("the forked child left a file of its own", "compare os.getpid() with context.pid")


@rule
def collectives(life: Life) -> None:
    """No hook waits for, or speaks to, another rank."""
    with lonely_rank() as calls, contextlib.ExitStack() as stack:
        handle = life.handle(world_size=2)
        life.step(handle, 1)  # by now what the tool imports is imported
        stack.enter_context(torch_group(calls))
        other = life.handle("critic", world_size=2)
        for one, step in ((handle, 2), (other, 3)):
            one.start(step=step)
            life.train(one)
            one.stop()
        for one in (handle, other):
            one.relocate()
            one.finish()
            one.close()
    if calls:
        raise RuleBroken(
            f"a hook used {', '.join(dict.fromkeys(calls))}",
            "a hook runs on profiled ranks only, and an error switches the tool off on one of them: whoever waits "
            "for the others hangs the job. Write a file for each rank",
        )
    for one in (handle, other):
        life.sound(one, "windows in a world of two")
