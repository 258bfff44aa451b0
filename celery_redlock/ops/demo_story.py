"""
The demo's story, chapter by chapter. Each claims something, and looks whether it is so.

What is claimed is computed from what the task bodies wrote down (`demo_app`) and from the results
that Celery stored, never from what the library says of itself. Without locks the chapters have
other words, and what is looked for is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from celery_redlock.ops.demo_app import TTL, VISIBILITY, Tally, overlapping
from celery_redlock.ops.demo_screen import Claim
from celery_redlock.ops.demo_stage import Stage
from celery_redlock.words import counted

__all__ = ["story"]

#: How long a body takes where its length is not the point, and one that is killed meanwhile [s].
SHORT, MIDDLING = 1.2, 2.4
#: The long body takes longer than two locks live [s], and is ordered so many more times meanwhile.
LONG, REPEATS = 2.2 * TTL, 3
#: Time to read what a chapter has shown, and to see tasks wait [s].
BREATH, PATIENCE = 1.0, 3.0
#: A clock may be read this much too early or too late [s].
BLUR = 0.1


def story(stage: Stage) -> Iterator[Claim]:
    """Tell the story on *stage*, and yield every claim as soon as it is known whether it holds."""
    yield too_often(stage)
    yield from killed_in_mid_task(stage)
    yield from long_task(stage)
    if stage.with_locks:
        yield from servers_die(stage)
    yield numbers_grow(stage)
    yield from in_all(stage)


def chapter(stage: Stage, title: str, text: str, without: str = "") -> None:
    """Begin a chapter, a little after the one before; its text is *without* where no locks are."""
    stage.pause(BREATH)
    stage.screen.chapter(title, text if stage.with_locks else without)


def same(what: str, expected: str, seen: str) -> Claim:
    """Claim that exactly what is *expected* was *seen*."""
    return Claim(what, expected, seen, expected == seen)


def too_often(stage: Stage) -> Claim:
    """Show that many orders of one job are one run."""
    chapter(
        stage,
        "The same work is ordered too often",
        "20 messages arrive. They order the billing of only 4 invoices, each one 5 times. The "
        "worker takes all of them at once. A task that finds its lock taken is skipped: it ends "
        "without doing the work, and its result says so.",
        "20 messages arrive: 4 invoices, each one 5 times. Celery delivers every message and looks "
        "at none of the others, so each invoice is billed five times.",
    )
    tally = stage.finish(stage.order([1, 2, 3, 4] * 5, SHORT))
    return same("20 orders of 4 invoices", "4 done, 16 skipped", tally.words)


def killed_in_mid_task(stage: Stage) -> Iterator[Claim]:
    """Show that a task whose process dies ends elsewhere, once."""
    chapter(
        stage,
        "A worker is killed in mid-task",
        "Invoice 5 is ordered twice, and the process that bills it is killed (kill -9), as when "
        "memory runs out. The worker sees that it is dead, releases its lock, and another process "
        "bills the invoice, once.",
        "Invoice 5 is ordered twice, and the process that runs one order is killed (kill -9). "
        "Celery delivers that message again; the other order runs all the while.",
    )
    orders, tally = ordered_twice(stage, 5)
    stage.kill_process_of(tally.runs[0])
    expected = "1 done, 1 killed, 1 skipped"
    yield same("process killed", expected, stage.finish(orders).words)
    alone = "Nobody is left to release the lock: it ends by itself. " if stage.with_locks else ""
    stage.screen.say(
        f"Now the whole worker, as in a power cut. {alone}The broker delivers again what nobody "
        f"acknowledged in {VISIBILITY:g} seconds (an hour by default), here to a second worker."
    )
    orders, tally = ordered_twice(stage, 6)
    sent = time.monotonic()
    stage.kill_worker(*tally.runs)
    is_due = sent + VISIBILITY
    stage.wait(lambda: "no worker is there", lambda: time.monotonic() > is_due, VISIBILITY)
    stage.start_worker()
    yield same("whole worker killed", expected, stage.finish(orders).words)


def ordered_twice(stage: Stage, invoice: int) -> tuple[list[str], Tally]:
    """
    Order the billing of *invoice* twice; return once all runs that will come are under way.

    By then what was skipped is acknowledged: else the broker would deliver it again as well.
    """
    orders = stage.order([invoice] * 2, MIDDLING)
    runs = 1 if stage.with_locks else 2

    def are_under_way(tally: Tally) -> bool:
        return tally.running == tally.open == runs and stage.unacknowledged() == runs

    return orders, stage.watch(orders, are_under_way)


def long_task(stage: Stage) -> Iterator[Claim]:
    """Show that a lock lasts as long as its task."""
    chapter(
        stage,
        "A task that takes longer than its lock lives",
        f"A lock ends by itself, here after {TTL:g} seconds, so that a worker that crashes blocks "
        f"nobody for long. Invoice 7 takes {LONG:.1f} seconds, and its lock is renewed as long as "
        f"that. It is ordered {REPEATS} more times meanwhile.",
        f"Invoice 7 takes {LONG:.1f} seconds, and is ordered {REPEATS} more times meanwhile. Four "
        "processes bill it side by side.",
    )
    orders = stage.order([7], LONG)
    for part in range(1, REPEATS + 1):
        until = LONG * part / (REPEATS + 1)
        stage.watch(orders, partial(has_lasted, until))
        orders += stage.order([7], LONG)
    tally = stage.finish(orders)
    yield same("one job ordered 4 times", "1 done, 3 skipped", tally.words)
    renewals = max(run.renewals for run in tally.runs)
    lasted = max(run.lasted for run in tally.runs)
    holds = lasted > 2 * TTL and renewals >= REPEATS
    seen = counted(renewals, "renewal")
    yield Claim(f"{LONG:.1f} s task, {TTL:g} s lock", "3 renewals or more", seen, holds)


def has_lasted(seconds: float, tally: Tally) -> bool:
    """Return whether the first run has taken so many *seconds* by now."""
    return bool(tally.runs) and tally.runs[0].lasted > seconds


def servers_die(stage: Stage) -> Iterator[Claim]:
    """Show that locks need most of the servers, and that these need time after their death."""
    chapter(
        stage,
        "Two of the five lock servers die",
        "They are killed, as by a power cut. Three of five are left, which is still most of them. "
        "4 new invoices arrive.",
    )
    stage.kill(1, 2)
    tally = stage.finish(stage.order([8, 9, 10, 11], SHORT))
    yield same("2 of 5 servers dead", "4 done", tally.words)
    chapter(
        stage,
        "A third one dies",
        "Two are left. Nobody can be sure any more who holds a lock, so no task may start. "
        "No task is thrown away either: it is rescheduled, and tries again a little later.",
    )
    stage.kill(3)
    orders = stage.order([12, 13, 14, 15], SHORT)
    tally = stage.watch(orders, lambda _: False, PATIENCE)
    yield same("3 of 5 servers dead", "4 waiting", tally.words)
    silence = stage.rules.quarantine
    chapter(
        stage,
        "The three servers come back",
        "Their memory is empty. One of them may have granted a lock before it died, and must not "
        "grant it to somebody else now. So each does not vote until every lock that it may have "
        f"forgotten has ended: {silence:.1f} seconds here, about a minute by default.",
    )
    back = time.monotonic()
    stage.restart(1, 2, 3)
    tally = stage.finish(orders, longest=25.0)
    first = min((run.started - back for run in tally.runs), default=0.0)
    seen = f"first run after {first:.1f} s"
    expected = f"no run for {silence:.1f} s"
    yield Claim("servers back, empty", expected, seen, first > silence - BLUR)
    yield same("the orders that waited", "4 done", tally.words)


def numbers_grow(stage: Stage) -> Claim:
    """Show that the fencing numbers of a job grow, even over a loss of memory."""
    chapter(
        stage,
        "Every lock comes with a number",
        "The number only grows. A database that keeps the largest one it has seen can refuse a "
        "writer that was stopped in mid-task and wakes up too late. Invoice 1 is billed twice "
        "again, to compare its numbers from before and after the failures.",
        "A writer that is stopped in mid-task and wakes up too late overwrites what others wrote "
        "since. A plain task has no number by which a database could tell.",
    )
    since = time.monotonic()
    for _ in range(2):
        stage.finish(stage.order([1], SHORT / 3))
    runs = [run for run in stage.runs() if run.invoice == 1]
    for run in runs if stage.with_locks else ():
        when = "before the failures:" if run.started < since else "after the failures: "
        stage.screen.happened(f"invoice 1, {when} number {run.fence or '(none)'}")
    numbers = [run.fence for run in runs if run.fence]
    grow = len(numbers) == len(runs) > 2 and all(a < b for a, b in pairwise(numbers))  # noqa: PLR2004
    seen = "numbers grow" if grow else "numbers do not grow" if numbers else "no numbers"
    return same("locks of invoice 1", "numbers grow", seen)


def in_all(stage: Stage) -> Iterator[Claim]:
    """Look whether a job ever ran twice at once, and whether every order has ended."""
    runs, sent, tally = stage.runs(), len(stage.sent), stage.tally(stage.sent)
    twice = overlapping(runs)
    seen = f"{counted(twice, 'time') if twice else 'never'} in {len(runs)} runs"
    yield Claim("one job twice at once", "never", seen, bool(runs) and not twice)
    lost = max(sent - len(tally.ended) - tally.skipped, tally.open, tally.failed)
    yield same("orders lost", f"0 of {sent}", f"{lost} of {sent}")
