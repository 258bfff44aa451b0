"""
``celery-redlock demo``: real servers, a real worker, failures, and a check of every claim.

This is its beginning and its end; see `demo_story` for its story, `demo_stage` for what it
happens on, `demo_app` for what is believed.
"""

from __future__ import annotations

import time

from celery_redlock.ops.demo_app import TTL
from celery_redlock.ops.demo_screen import Claim, Screen
from celery_redlock.ops.demo_stage import LOCK_SERVERS, Broken, Stage, staged
from celery_redlock.ops.demo_story import story
from celery_redlock.ops.screen import Stop, Stopped

__all__ = ["run"]

TASK = """\
@app.task(%s)
def bill(invoice):
    ..."""
LOCK = 'base=RedlockTask, lock_key="invoice:{invoice}"'
FAILED = 1
#: How much of the worker's log is shown when something went wrong.
LOG_LINES = 40


def run(stop: Stop, *, without_locks: bool = False) -> int:
    """
    Run the demo and return its exit code.

    That is 0 if every claim was seen to hold, 1 if one was not or something broke, 128 and the
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
    false = sum(not claim.holds for claim in claims)
    took = f"It took {time.monotonic() - began:.0f} s."
    if not false:
        screen.say(f"All of it was true. {took}", "bold green")
        screen.say("A run is counted when a task's own code has written it to a file.", "dim")
        screen.say("See what happens without locks: celery-redlock demo --without-locks", "dim")
        return 0
    screen.say(f"{false} of {len(claims)} were not true. {took}", "bold red")
    if without_locks:
        screen.say("Every message was delivered, and nobody kept two from running at once.")
        screen.say("The same with locks: celery-redlock demo", "dim")
    return FAILED


def introduce(screen: Screen, *, without_locks: bool) -> None:
    """Say what is to be seen."""
    screen.title("celery-redlock: Celery tasks that must not run twice")
    if without_locks:
        screen.say("This time WITHOUT locks, to see what they are for. A plain task:", "bold")
        screen.code(TASK % "")
        return
    screen.say("A task under a lock:")
    screen.code(TASK % LOCK)
    screen.say(
        "Five small servers keep the locks. A task runs when most of them, three of five, "
        "agree that it is the only one. All of it is on this machine, and is gone at the end."
    )
    screen.say(
        f"To be quick, a lock here lives {TTL:g} seconds unless it is renewed. The default is 30.",
        "dim",
    )
    screen.say("")


def play(screen: Screen, stop: Stop, *, with_locks: bool) -> list[Claim]:
    """Tell the whole story and return its claims; raises Stopped and Broken."""
    claims: list[Claim] = []
    with staged(screen, stop, with_locks=with_locks) as stage:
        try:
            started = f"{LOCK_SERVERS} lock servers and a message broker are started"
            screen.happened(started if with_locks else "a message broker is started")
            stage.enrol()
            stage.start_worker()
            for claim in story(stage):
                screen.claim(claim)
                claims.append(claim)
                if with_locks and not claim.holds:
                    show_log(stage)
        except Broken:
            show_log(stage)
            raise
    return claims


def show_log(stage: Stage) -> None:
    """Print the end of the worker's log, which shows why something did not hold."""
    stage.screen.failure("The end of the worker's log:")
    for line in stage.log.splitlines()[-LOG_LINES:]:
        stage.screen.say(line)
