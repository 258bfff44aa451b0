"""
Publish a call of a debounced task: so late that a newer one can supersede it.

    no burst is open --> in ``debounce`` seconds
    one is           --> likewise, but no later than it ends at last
    no quorum        --> in ``debounce`` seconds, and nothing supersedes it; or fail by policy
    in report mode   --> at once; whom it would have superseded is reported
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_redlock.errors import ConfigurationError, QuorumUnavailable
from celery_redlock.events import TaskSkipped
from celery_redlock.lock import clock
from celery_redlock.plugin import plugin_for
from celery_redlock.task.declared import check_expires
from celery_redlock.task.execution.reporting import warn_once
from celery_redlock.task.options import CHECKS, LockOptions
from celery_redlock.task.policies import Fail
from celery_redlock.task.publish.message import Message
from celery_redlock.unique.bursts import RETENTION, Burst, Bursts, Call

__all__ = ["NOT_AT_ALL", "TASKS_OWN", "check_asked", "debounce_of", "publish_debounced"]

#: What a call says that says nothing.
TASKS_OWN: Any = object()
#: What a call says that is not to be debounced.
NOT_AT_ALL = (None, False)
#: Options of a publish that say when the task is to run.
TIMES = ("countdown", "eta")


def debounce_of(message: Message, asked: Any) -> LockOptions | None:
    """
    Return the options of a call that is debounced, None for one that is not.

    Not debounced are members of a workflow, retries and copies, and a call that says when it is to
    run. *asked* is what the call says of ``debounce``; raises ConfigurationError.
    """
    task, has_time = message.task, any(message.options.get(name) is not None for name in TIMES)
    if asked is TASKS_OWN:
        asked = task.debounce
    elif asked not in NOT_AT_ALL:
        check_asked(task, asked)
        if has_time:
            raise ConfigurationError(
                f"{task.name}: debounce={asked!r} of a call says when it is to run, and so does "
                "its countdown or eta; drop one of them"
            )
    if asked in NOT_AT_ALL or has_time or not message.is_new:
        return None
    chosen = replace(message.lock_options, debounce=CHECKS["debounce"]("debounce", asked))
    if chosen.only_reports:
        return chosen
    check_expires(task.name, expires_in(message), asked)
    if chosen.longest_burst < chosen.debounce:
        raise ConfigurationError(
            f"{task.name}: debounce={asked!r} of a call is longer than debounce_max "
            f"({chosen.debounce_max:g} s) of the task; ask for less, or raise that"
        )
    return chosen


def expires_in(message: Message) -> Any:
    """Return in how long a call expires [s], or what is no number where that is not known."""
    expires = message.options.get("expires", message.task.expires)
    if isinstance(expires, datetime) and expires.tzinfo is not None:
        return round((expires - datetime.now(timezone.utc)).total_seconds(), 3)
    return expires


def check_asked(task: Any, asked: Any) -> None:
    """Raise ConfigurationError if *asked* is no ``debounce`` that a call may have."""
    if asked is not TASKS_OWN and asked not in NOT_AT_ALL:
        CHECKS["debounce"](f"{task.name}: debounce", asked)


def publish_debounced(message: Message, chosen: LockOptions) -> Any:
    if chosen.only_reports:
        report(message, chosen)
        return message.send()
    name, bursts = message.names()[0], Bursts.on(plugin_for(message.task.app).locks)
    try:
        burst = bursts.look(name)
    except QuorumUnavailable:
        if isinstance(chosen.on_unavailable, Fail):
            raise
        return message.send(countdown=math.ceil(chosen.debounce))
    left = burst.left or chosen.longest_burst
    # In whole seconds, as quorum queues take nothing else; where it can be, not beyond its end.
    countdown = min(math.ceil(chosen.debounce), max(1, math.floor(left)))
    result = message.numbered(burst.next_number).send(countdown=countdown)
    kept = RETENTION + chosen.longest_burst  # or one of days would be over before it ends
    note(bursts, name, message, burst, chosen, kept=kept)
    return result


def note(
    bursts: Bursts, name: str, message: Message, burst: Burst, chosen: LockOptions, kept: float
) -> None:
    call = Call(str(message.envelope.publish_id), burst.next_number)
    task_id, begins = message.options["task_id"], not burst.left
    bursts.call(name, call, task_id, chosen.longest_burst, begins=begins, kept=kept)


def report(message: Message, chosen: LockOptions) -> None:
    """Report whom this call would have superseded, one bounded round later; never fails."""
    plugin, task = plugin_for(message.task.app), message.task.name
    try:
        name, bursts = message.names()[0], Bursts.on(plugin.reports)
        burst = bursts.look(name, clock.now() + plugin.settings.rules.node_timeout)
        if burst.newest:
            newer = {"task": task, "task_id": message.options["task_id"]}
            told = {"name": name, "task": task, "task_id": burst.newest}
            plugin.notify(TaskSkipped(**told, cause="debounced", holder=newer, report=True))
        # Nobody claims it, as it runs at once: its burst is over when no other comes for so long.
        note(bursts, name, message, burst, chosen, kept=chosen.debounce)
    except QuorumUnavailable:
        pass  # that is reported where it was asked
    except SoftTimeLimitExceeded:  # of the task that publishes it
        raise
    except Exception:  # noqa: BLE001  with any error the message is published
        warn_once(task, "%s is published, and unreported", task)
