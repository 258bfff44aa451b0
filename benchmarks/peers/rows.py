"""
What the comparison is made of: rows, which happen in production, and columns, whom they happen to.

A time here is that of the run. The scale is short so that a run takes minutes: where a lock has to
outlast the task the others have 10 s, and no task of such a row takes longer; by themselves they
have ten minutes (the recipe), an hour, or no end (celery-singleton).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ONCE, SINGLETON, HEIMDALL = "celery-once", "celery-singleton", "celery-heimdall"
ONCE_TASK, COOKBOOK, OURS = "celery-once-task", "cookbook recipe", "celery-redlock"
COLUMNS = (ONCE, SINGLETON, HEIMDALL, ONCE_TASK, COOKBOOK, OURS)
#: Tasks that have to fail: without a lock, and with one that only a success gives back.
PLAIN, LEAKY = "plain Task", "leaky lock"
CONTROLS = (PLAIN, LEAKY)

#: The longest run of a task whose next call is waited for, as whoever chooses a TTL knows it [s].
LONGEST = 5
#: TTL of a lock that is not renewed: twice the longest run [s].
AMPLE = 2 * LONGEST
#: TTL of a lock that is to lapse beneath a task, and of ours in all rows [s].
SHORT = 3
#: Broker's visibility timeout where a message is to come again [s].
VISIBILITY = 2
#: Between two runs of the entry that two beats have [s].
INTERVAL = 3


@dataclass(frozen=True)
class Row:
    """
    Something that happens in production.

    Attributes:
        name: As the table has it.
        key: Its word on the command line, and the name of its functions.
        asks: What is looked at, in a sentence.
        control: Which of `CONTROLS` has to fail.
        ttl: TTL of the others' locks [s].
        plan: First argument of a task -> how long its first, second ... run takes [s]; the last
            one stands for all that follow.
        task: Options of Celery that all tasks of the row have.
        conf: Settings of Celery that all apps of the row have.
    """

    name: str
    key: str
    asks: str
    control: str = PLAIN
    ttl: int = AMPLE
    plan: dict[str, list[float]] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    conf: dict[str, Any] = field(default_factory=dict)


REDELIVERED = {
    "broker_transport_options": {
        "visibility_timeout": VISIBILITY,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
}

ROWS = (
    Row(
        "worker killed",
        "killed",
        "A worker is killed (SIGKILL) while the task runs: how long is the next call kept out?",
        control=LEAKY,
        plan={"job": [LONGEST, 0.1]},
    ),
    Row(
        "task outlasts TTL",
        "outlasted",
        "The task takes longer than the TTL: does a second call run beside it?",
        ttl=SHORT,
        plan={"job": [2.5 * SHORT, 0.5]},
    ),
    Row(
        "redelivery while running",
        "redelivered",
        "The broker delivers the message again while the task runs: does a copy run beside it, "
        "and what does the caller get?",
        plan={"job": [3.0 * VISIBILITY]},
        task={"acks_late": True},
        conf=REDELIVERED,
    ),
    Row(
        "retry",
        "retried",
        "The task retries, and the same call is made before its retry is due: does the retry "
        "run, and does it run alone?",
        plan={"again": [0.5, 5.0]},
    ),
    Row(
        "revoked while waiting",
        "revoked",
        "The task is revoked while it waits: how long is the next call kept out?",
        control=LEAKY,
        plan={"busy": [2.0], "job": [0.1]},
    ),
    Row(
        "hard time limit",
        "limited",
        "The task exceeds its hard time limit: how long is the next call kept out?",
        control=LEAKY,
        plan={"job": [LONGEST, 0.1]},
        task={"time_limit": 2},
    ),
    Row(
        "chord with a duplicate",
        "chord",
        "Two members of a chord are the same call: does the chord's body run?",
        plan={"job": [1.5], "other": [0.1]},
    ),
    Row(
        "lock server down",
        "down",
        "The lock server is down (two of our five), and the task is called twice: does it run, "
        "and alone?",
        plan={"job": [3.0]},
    ),
    Row(
        "three spellings",
        "spelt",
        'f(1), f(a=1) and f(1, b="x"), which is the default, are called: is it one lock, and '
        'another one for f(1, b="y")?',
        plan={"job": [9.0]},
    ),
    Row(
        "late finisher",
        "late",
        "A worker is paused until its lock has lapsed, and ends after another one began: does "
        "the newer one keep its lock?",
        ttl=SHORT,
        plan={"job": [5.0, 20.0, 0.5]},
    ),
    Row(
        "two beats",
        "beats",
        "Two beats have the same schedule: how often does an entry run?",
        plan={"tick": [0.05]},
    ),
)
BY_KEY = {row.key: row for row in ROWS}


def cells() -> list[tuple[str, str]]:
    """Return the key of the row and the column of each cell; controls come last."""
    return [
        *((row.key, column) for row in ROWS for column in (*COLUMNS, PLAIN)),
        *((row.key, LEAKY) for row in ROWS if row.control == LEAKY),
    ]
