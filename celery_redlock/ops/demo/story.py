"""
The story of the demo, chapter by chapter. Each makes a claim, and checks it.

A claim is computed from what the task bodies wrote down (`app`) and from the results that Celery
stored, never from what the library says of itself. It is the same without locks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import click

from celery_redlock.ops.demo.app import TTL, VISIBILITY, overlapping
from celery_redlock.ops.demo.stage import Broken, Stage, Tally, happened, staged
from celery_redlock.ops.screen import Stop, Stopped, colour
from celery_redlock.words import counted

__all__ = ["run"]

INTRODUCTION = f"""\
celery-redlock: Celery tasks that must not run twice

    @app.task(base=RedlockTask, lock_key="invoice:{{invoice}}")
    def bill(invoice):
        ...

The Redis that is the broker keeps the locks, too; later three servers do. All of it is on this
machine, and is gone at the end. To be quick, a lock here lives {TTL:g} seconds unless it is
renewed. The default is 30.
"""
WITHOUT_LOCKS = """\
This time WITHOUT locks, to see what they are for: a plain task, of which nothing holds that is
said of locks below.
"""
#: How long a body takes where its length is not the point, and one that is killed meanwhile [s].
SHORT, MIDDLING = 2.4, 2.4
#: The long body takes longer than two locks live [s], and is ordered so many more times meanwhile.
LONG, REPEATS = 2.2 * TTL, 3
#: Time to see tasks wait [s].
PATIENCE = 3.0
#: A clock may be read this much too early or too late [s].
BLUR = 0.1
#: Widest text that reads well [columns].
WIDTH = 88


def run(stop: Stop, *, without_locks: bool = False) -> int:
    """
    Run the demo and return its exit code.

    That is 0 if every claim was true, 1 if one was not or something broke, 128 and the number of
    the signal if somebody asked for the end.
    """
    began = time.monotonic()
    click.echo(INTRODUCTION)
    if without_locks:
        click.echo(WITHOUT_LOCKS)
    try:
        with staged(stop, with_locks=not without_locks) as stage:
            stage.start_worker()
            claims = list(_story(stage))
            if not (all(claims) or without_locks):
                click.echo(stage.log_end)
    except Stopped as stopped:
        happened("stopped; nothing of it is left behind")
        return stopped.exit_code
    except Broken as broken:
        click.echo(f"The demo could not go on: {broken}")
        return 1
    false = claims.count(False)
    verdict = f"{false} of {len(claims)} claims were not true." if false else "All of it was true."
    click.echo(f"\n{verdict} It took {time.monotonic() - began:.0f} s.")
    if not without_locks:
        click.echo("See what happens without locks: celery-redlock demo --without-locks")
    return 1 if false else 0


def _claim(what: str, expected: str, seen: str, *, holds: bool | None = None) -> bool:
    """Print and return whether a claim is true; by default, whether *expected* is *seen*."""
    if holds is None:
        holds = expected == seen
    mark = colour("true ", "green") if holds else colour("FALSE", "red")
    click.echo(f"   {mark}  {what}: {seen}" + ("" if holds else f" (expected: {expected})"))
    return holds


def _chapter(title: str, text: str) -> None:
    click.echo("\n" + colour(title, "cyan"))
    _say(text)


def _say(text: str) -> None:
    click.echo(click.wrap_text(text, WIDTH, initial_indent="   ", subsequent_indent="   "))


def _story(stage: Stage) -> Iterator[bool]:
    yield from _too_often(stage)
    yield from _killed_in_mid_task(stage)
    yield from _longer_than_its_lock(stage)
    if stage.with_locks:
        yield from _servers_die(stage)
    yield from _numbers_grow(stage)
    yield from _in_all(stage)


def _too_often(stage: Stage) -> Iterator[bool]:
    _chapter(
        "1. The same work is ordered too often",
        "20 messages arrive. They order the billing of only 4 invoices, each one 5 times. The "
        "worker takes all of them at once. A task that finds its lock taken is skipped: it ends "
        "without doing the work, and its result says so.",
    )
    tally = stage.finish(stage.order([1, 2, 3, 4] * 5, SHORT))
    yield _claim("20 orders of 4 invoices", "4 done, 16 skipped", tally.words)


def _killed_in_mid_task(stage: Stage) -> Iterator[bool]:
    _chapter(
        "2. A worker is killed in mid-task",
        "Invoice 5 is ordered twice, and the process that bills it is killed (kill -9), as when "
        "memory runs out. The worker sees that it is dead, releases its lock, and another process "
        "bills the invoice, once.",
    )
    orders, tally = _ordered_twice(stage, 5)
    stage.kill_process_of(tally.runs[0])
    happened("the process is killed")
    expected = "1 done, 1 killed, 1 skipped"
    yield _claim("process killed", expected, stage.finish(orders).words)
    _say(
        "Now the whole worker, as in a power cut. Nobody is left to release the lock: it ends by "
        f"itself. The broker delivers again what nobody acknowledged in {VISIBILITY:g} seconds (an "
        "hour by default), here to a second worker."
    )
    orders, _ = _ordered_twice(stage, 6)
    stage.end_worker()
    happened("the worker is killed, with all its processes")
    stage.wait(lambda: False, VISIBILITY)
    stage.start_worker()
    yield _claim("whole worker killed", expected, stage.finish(orders).words)


def _ordered_twice(stage: Stage, invoice: int) -> tuple[list[str], Tally]:
    """
    Order the billing of *invoice* twice; return once all runs that will come are under way.

    By then what was skipped is acknowledged: else the broker would deliver it again as well.
    """
    orders = stage.order([invoice] * 2, MIDDLING)
    runs = 1 if stage.with_locks else 2

    def are_under_way(tally: Tally) -> bool:
        return tally.running == tally.open == runs and stage.unacknowledged() == runs

    return orders, stage.watch(orders, are_under_way)


def _longer_than_its_lock(stage: Stage) -> Iterator[bool]:
    _chapter(
        "3. A task that takes longer than its lock lives",
        f"A lock ends by itself, here after {TTL:g} seconds, so that a worker that crashes blocks "
        f"nobody for long. Invoice 7 takes {LONG:.1f} seconds, and its lock is renewed as long as "
        f"that. It is ordered {REPEATS} more times when its first lease would be long over.",
    )
    orders = stage.order([7], LONG)
    stage.watch(orders, lambda tally: any(run.lasted > 1.5 * TTL for run in tally.runs))
    orders += stage.order([7] * REPEATS, LONG)
    tally = stage.finish(orders)
    yield _claim("one job ordered 4 times", "1 done, 3 skipped", tally.words)
    renewals = max(run.renewals for run in tally.runs)
    holds = max(run.lasted for run in tally.runs) > 2 * TTL and renewals >= REPEATS
    what, seen = f"{LONG:.1f} s task, {TTL:g} s lock", counted(renewals, "renewal")
    yield _claim(what, f"{REPEATS} renewals or more", seen, holds=holds)


def _servers_die(stage: Stage) -> Iterator[bool]:
    _chapter(
        "4. Three lock servers, of which one dies",
        "If the one server dies, no task runs until it is back. So now three servers of their own "
        "keep the locks, by one setting more. A task runs when two of them agree that it is the "
        "only one. Then one is killed, as by a power cut. 4 new invoices arrive.",
    )
    stage.grow()
    stage.nodes[0].kill()
    tally = stage.finish(stage.order([8, 9, 10, 11], SHORT))
    yield _claim("1 of 3 servers dead", "4 done", tally.words)
    _chapter(
        "5. A second one dies",
        "One is left. Nobody can be sure any more who holds a lock, so no task may start. "
        "No task is thrown away either: it is rescheduled, and tries again a little later.",
    )
    stage.nodes[1].kill()
    orders = stage.order([12, 13, 14, 15], SHORT)
    tally = stage.watch(orders, lambda _: False, PATIENCE)
    yield _claim("2 of 3 servers dead", "4 waiting", tally.words)
    yield from _servers_come_back(stage, orders)


def _servers_come_back(stage: Stage, orders: list[str]) -> Iterator[bool]:
    silence = stage.rules.quarantine
    _chapter(
        "6. The two servers come back",
        "Their memory is empty. One of them may have granted a lock before it died, and must not "
        "grant it to somebody else now. So each does not vote until every lock that it may have "
        f"forgotten has ended: {silence:.1f} seconds here, about a minute by default.",
    )
    back = time.monotonic()
    for node in stage.nodes[:2]:
        node.restart()
    tally = stage.finish(orders)
    first = min((run.started - back for run in tally.runs), default=0.0)
    expected, seen = f"no run for {silence:.1f} s", f"first run after {first:.1f} s"
    yield _claim("servers back, empty", expected, seen, holds=first > silence - BLUR)
    yield _claim("the orders that waited", "4 done", tally.words)


def _numbers_grow(stage: Stage) -> Iterator[bool]:
    _chapter(
        "Every lock comes with a number",
        "The number only grows. A database that keeps the largest one it has seen can refuse a "
        "writer that was stopped in mid-task and wakes up too late. Invoice 1 is billed twice "
        "again, to compare its numbers from before and after the failures.",
    )
    for _ in range(2):
        stage.finish(stage.order([1], SHORT / 6))
    fences = [run.fence for run in stage.runs() if run.invoice == 1]
    numbers = [fence for fence in fences if fence]
    grow = len(numbers) == len(fences) > 2 and all(a < b for a, b in pairwise(numbers))  # noqa: PLR2004
    seen = " < ".join(map(str, numbers)) if grow else f"{fences}"
    yield _claim("locks of invoice 1", "numbers grow", seen, holds=grow)


def _in_all(stage: Stage) -> Iterator[bool]:
    runs, sent, tally = stage.runs(), len(stage.sent), stage.tally(stage.sent)
    twice = overlapping(runs)
    seen = f"{counted(twice, 'time') if twice else 'never'} in {len(runs)} runs"
    yield _claim("one job twice at once", "never", seen, holds=bool(runs) and not twice)
    lost = max(sent - len(tally.ended) - tally.skipped, tally.open, tally.failed)
    yield _claim("orders lost", f"0 of {sent}", f"{lost} of {sent}")
