"""
The demo's story, chapter by chapter. Each claims something, and looks whether it is so.

What is claimed is computed from what the task bodies wrote down (`demo_record`) and from the
results that Celery stored, never from what the library says of itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from celery_redlock.ops.demo_app import TTL
from celery_redlock.ops.demo_orders import Order, Tally
from celery_redlock.ops.demo_record import overlapping
from celery_redlock.ops.demo_screen import Claim
from celery_redlock.ops.demo_stage import Stage

__all__ = ["story"]

#: How long a body takes where its length is not the point [s].
SHORT = 1.2
#: Time to read what a chapter has shown [s].
BREATH = 2.5
#: How long tasks are seen to wait [s].
PATIENCE = 3.0
#: The long body takes longer than three locks live [s].
LONG = 3.3 * TTL
#: How often its job is ordered again meanwhile.
REPEATS = 3
#: A clock may be read this much too early or too late [s].
BLUR = 0.1


def story(stage: Stage) -> Iterator[Claim]:
    """Tell the story on *stage*, and yield every claim as soon as it is known whether it holds."""
    yield too_often(stage)
    yield two_die(stage)
    waiting, claim = third_dies(stage)
    yield claim
    yield from all_come_back(stage, waiting)
    yield from long_task(stage)
    yield numbers_grow(stage)
    yield never_two(stage)
    yield nothing_lost(stage)


def chapter(stage: Stage, number: int, title: str, text: str) -> None:
    """Begin a chapter, a little after the one before."""
    if number > 1:
        stage.pause(BREATH)
    stage.screen.chapter(number, title, text)


def too_often(stage: Stage) -> Claim:
    """Show that many orders of one job are one run."""
    chapter(
        stage,
        1,
        "The same work is ordered too often",
        "20 messages arrive. They order the billing of only 4 invoices, each one 5 times. The "
        "worker takes all of them at once. A task that finds its lock taken is skipped: it ends "
        "without doing the work, and its result says so.",
    )
    orders = stage.orders.bill([1, 2, 3, 4] * 5, SHORT)
    tally = stage.finish(orders, *invoices(1, 4))
    return Claim(
        "20 orders of 4 invoices",
        "4 runs, 16 skipped",
        f"{len(tally.runs)} runs, {tally.skipped} skipped",
        holds=each_once(tally, invoices(1, 4)) and tally.skipped == len(orders) - len(tally.runs),
    )


def two_die(stage: Stage) -> Claim:
    """Show that locks work while most of the servers are there."""
    chapter(
        stage,
        2,
        "Two of the five lock servers die",
        "They are killed, as by a power cut. Three of five are left, which is still most of them. "
        "4 new invoices arrive.",
    )
    stage.kill(1, 2)
    tally = stage.finish(stage.orders.bill([5, 6, 7, 8], SHORT), *invoices(5, 8))
    return Claim(
        "2 of 5 servers dead",
        "4 runs",
        counted(len(tally.runs), "run"),
        holds=each_once(tally, invoices(5, 8)),
    )


def third_dies(stage: Stage) -> tuple[Sequence[Order], Claim]:
    """Show that nothing runs without a majority; returns the orders that wait, too."""
    chapter(
        stage,
        3,
        "A third one dies",
        "Two are left. Nobody can be sure any more who holds a lock, so no task may start. "
        "No task is thrown away either: it is rescheduled, and tries again a little later.",
    )
    stage.kill(3)
    orders = stage.orders.bill([9, 10, 11, 12], SHORT)
    tally = stage.watch(orders, *invoices(9, 12), seconds=PATIENCE)
    waiting = tally.open - tally.running
    return orders, Claim(
        "3 of 5 servers dead",
        "4 orders wait, 0 runs",
        f"{counted(waiting, 'order')} wait, {counted(len(tally.runs), 'run')}",
        holds=waiting == len(orders) and not tally.runs,
    )


def all_come_back(stage: Stage, orders: Sequence[Order]) -> Iterator[Claim]:
    """Show that servers without memory keep silent at first, and that then what waits runs."""
    silence = stage.rules.quarantine
    chapter(
        stage,
        4,
        "The three servers come back",
        "Their memory is empty. One of them may have granted a lock before it died, and must not "
        "grant it to somebody else now. So each keeps silent until every lock that it may have "
        f"forgotten has ended: {silence:.1f} seconds here, about a minute by default.",
    )
    back = time.monotonic()
    stage.restart(1, 2, 3)
    tally = stage.finish(orders, *invoices(9, 12), longest=25.0)
    first = min((run.started - back for run in tally.runs), default=0.0)
    yield Claim(
        "servers back, empty",
        f"no run for {silence:.1f} s",
        f"first run after {first:.1f} s" if first > 0 else "ran without a majority",
        holds=first > silence - BLUR,
    )
    yield Claim(
        "the orders that waited",
        "4 runs, 0 lost",
        f"{tally.done} runs, {tally.open} lost",
        holds=each_once(tally, invoices(9, 12)),
    )


def long_task(stage: Stage) -> Iterator[Claim]:
    """Show that a lock lasts as long as its task."""
    chapter(
        stage,
        5,
        "A task that takes longer than its lock lives",
        f"A lock ends by itself, here after {TTL:g} seconds, so that a worker that crashes blocks "
        f"nobody for long. The next task takes {LONG:.1f} seconds, and its lock is renewed as "
        f"long as it runs. The same job is ordered {REPEATS} more times meanwhile.",
    )
    orders = [stage.orders.count_stock(LONG)]
    stage.wait(lambda: long_line(stage, orders), lambda: has_repeated(stage, orders), LONG + 10)
    tally = stage.finish(orders, "stock")
    yield Claim(
        "one job ordered 4 times",
        f"1 run, {REPEATS} skipped",
        f"{counted(len(tally.runs), 'run')}, {tally.skipped} skipped",
        holds=each_once(tally, ["stock"]) and tally.skipped == REPEATS,
    )
    renewals = max((run.renewals for run in tally.runs), default=0)
    lasted = max((run.lasted for run in tally.runs), default=0.0)
    yield Claim(
        f"{LONG:.1f} s task, {TTL:g} s lock",
        "3 renewals or more",
        counted(renewals, "renewal"),
        holds=lasted > 3 * TTL and renewals >= 3,  # noqa: PLR2004  as said right above
    )


def has_repeated(stage: Stage, orders: list[Order]) -> bool:
    """Order the long job again when it is time to; return whether it is over."""
    runs = stage.orders.runs("stock")
    if not runs:
        return False
    repeats = len(orders) - 1
    if repeats < REPEATS and time.monotonic() > runs[0].started + (repeats + 0.7) * TTL:
        orders.append(stage.orders.count_stock(LONG))
    return runs[0].ended is not None


def long_line(stage: Stage, orders: Sequence[Order]) -> Text:
    """Return what goes on while the long job runs."""
    line = stage.picture(stage.orders.tally(orders, "stock"))
    for run in stage.orders.runs("stock")[:1]:
        line += Text(f"  {run.lasted:.1f} s, lock renewed {run.renewals} times")
    return line


def numbers_grow(stage: Stage) -> Claim:
    """Show that the fencing numbers of a job grow, even over a loss of memory."""
    chapter(
        stage,
        6,
        "Every lock comes with a number",
        "The number only grows. A database that keeps the largest one it has seen can refuse a "
        "writer that was stopped in mid-task and wakes up too late. Invoice 1 is billed twice "
        "again, to compare its numbers from before and after the failures.",
    )
    before = len(stage.orders.runs("invoice 1"))
    for _ in range(2):
        stage.finish(stage.orders.bill([1], SHORT / 3), "invoice 1")
    runs = stage.orders.runs("invoice 1")
    for i, run in enumerate(runs):
        when = "before the failures:" if i < before else "after the failures: "
        stage.screen.happened(f"invoice 1, {when} number {run.fence or '(none)'}")
    numbers = [run.fence for run in runs if run.fence]
    grow = before < len(numbers) == len(runs) and all(a < b for a, b in pairwise(numbers))
    return Claim(
        "locks of invoice 1",
        "numbers grow",
        "numbers grow" if grow else "numbers do not grow" if numbers else "no numbers",
        holds=grow,
    )


def never_two(stage: Stage) -> Claim:
    """Look whether a job ever ran twice at the same time."""
    runs = stage.orders.runs()
    twice = overlapping(runs)
    return Claim(
        "one job twice at once",
        "never",
        f"{counted(twice, 'time')} in {len(runs)} runs" if twice else f"never in {len(runs)} runs",
        holds=bool(runs) and not twice,
    )


def nothing_lost(stage: Stage) -> Claim:
    """Look whether every order has ended in a run or a skip."""
    tally = stage.orders.tally(stage.orders.sent)
    lost = len(stage.orders.sent) - tally.done - tally.skipped
    return Claim(
        "orders lost",
        f"0 of {len(stage.orders.sent)}",
        f"{lost} of {len(stage.orders.sent)}",
        holds=lost == tally.open == tally.failed == 0,
    )


def invoices(first: int, last: int) -> list[str]:
    """Return the jobs of the invoices from *first* to *last*."""
    return [f"invoice {number}" for number in range(first, last + 1)]


def each_once(tally: Tally, jobs: Sequence[str]) -> bool:
    """Return whether all that was ordered has ended, and each of *jobs* has run once."""
    jobs_run = sorted(run.job for run in tally.runs)
    return jobs_run == sorted(jobs) and not (tally.open or tally.running or tally.failed)


def counted(number: int, word: str) -> str:
    """Return so many of what *word* says."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
