"""
``celery-redlock demo``: real servers, a real worker, failures, and a check of every claim.

This is its beginning and its end; see `demo_story` for what is told, `demo_stage` for what it
happens on, `demo_record` for what is believed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from celery_redlock.ops.demo_app import TTL
from celery_redlock.ops.demo_screen import Claim, Screen
from celery_redlock.ops.demo_stage import LOCK_SERVERS, Broken, Stage, staged
from celery_redlock.ops.demo_stop import Stopped, StopRequests
from celery_redlock.ops.demo_story import story
from celery_redlock.ops.demo_worker import PROCESSES

__all__ = ["run"]


TASK = """\
@app.task(base=RedlockTask, lock_key="invoice:{invoice}")
def bill(invoice):
    ..."""
PLAIN_TASK = TASK.replace('base=RedlockTask, lock_key="invoice:{invoice}"', "")
FAILED, FINE = 1, 0
#: How much of the worker's log is shown when something went wrong.
LOG_LINES = 15


def run(stop: StopRequests, *, without_locks: bool = False) -> int:
    """
    Run the demo and return its exit code.

    Args:
        stop: Asked all the time whether to end early.
        without_locks: Whether to use plain Celery tasks, with which the claims do not hold.

    Returns:
        0 if every claim was seen to hold, 1 if one was not or something broke, 128 and the
        number of the signal if somebody asked for the end.
    """
    screen = Screen()
    began = time.monotonic()
    introduce(screen, without_locks=without_locks)
    try:
        claims = play(screen, stop, with_locks=not without_locks)
    except Stopped as stopped:
        screen.happened("stopped; nothing of it is left behind")
        return stopped.exit_code
    except Broken as broken:
        screen.failure(f"The demo could not go on: {broken}")
        return FAILED
    screen.summary(claims)
    conclude(screen, claims, time.monotonic() - began, without_locks=without_locks)
    return FINE if all(claim.holds for claim in claims) else FAILED


def introduce(screen: Screen, *, without_locks: bool) -> None:
    """Say what is to be seen."""
    screen.title("celery-redlock: Celery tasks that must not run twice")
    if without_locks:
        screen.say("This time WITHOUT locks, to see what they are for. The task:", "bold")
        screen.code(PLAIN_TASK)
        return
    screen.say("A task under a lock:")
    screen.code(TASK)
    screen.say(
        "Five small servers keep the locks. A task runs when most of them, three of five, "
        "agree that it is the only one. All of it is on this machine, and is gone at the end."
    )
    screen.say(
        f"To be quick, a lock here lives {TTL:g} seconds unless it is renewed. The default is 30.",
        "dim",
    )
    screen.console.print()


def play(screen: Screen, stop: StopRequests, *, with_locks: bool) -> list[Claim]:
    """Tell the whole story and return its claims; raises Stopped and Broken."""
    claims = []
    with staged(screen, stop, with_locks=with_locks) as stage:
        try:
            prepare(stage)
            for claim in story(stage):
                screen.claim(claim)
                claims.append(claim)
        except Broken:
            show_log(stage)
            raise
        if with_locks and not all(claim.holds for claim in claims):
            show_log(stage)
    return claims


def prepare(stage: Stage) -> None:
    """Have everything ready, and say so."""
    started = f"{LOCK_SERVERS} lock servers and a message broker are started"
    stage.screen.happened(started)
    stage.prepare()
    stage.screen.happened(f"a Celery worker with {PROCESSES} processes is ready")


def show_log(stage: Stage) -> None:
    """Print the end of the worker's log, which tells why something did not hold."""
    stage.screen.failure("The end of the worker's log:")
    for line in stage.worker.log.splitlines()[-LOG_LINES:]:
        stage.screen.say(line)


def conclude(
    screen: Screen, claims: Sequence[Claim], seconds: float, *, without_locks: bool
) -> None:
    """Say what it comes to."""
    false = sum(not claim.holds for claim in claims)
    if not false:
        screen.say(f"All of it was true. It took {seconds:.0f} s.", "bold green")
        screen.say("A run is counted when a task's own code has written it to a file.", "dim")
        screen.say("See what happens without locks: celery-redlock demo --without-locks", "dim")
        return
    screen.say(f"{false} of {len(claims)} were not true. It took {seconds:.0f} s.", "bold red")
    if without_locks:
        screen.say("That is what the locks are for: celery-redlock demo", "dim")
