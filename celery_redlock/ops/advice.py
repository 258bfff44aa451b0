"""
Advice on the options of a task, from figures of what it did: pure functions.

Advice names an option of the task, says what was measured, and what follows. Where another value
is better it has that value, so that an entry of ``redlock_protect`` can be made of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.tally import HOUR, TaskTally
from celery_redlock.task.options import LockOptions
from celery_redlock.task.policies import WORDS, Policy, Skip
from celery_redlock.words import counted, duration, is_forgotten

__all__ = ["DAY", "Advice", "Watched", "advise", "entry_of", "literal", "too_short"]

DAY = 24 * HOUR
#: With so many executions an hour says something; a day does in any case.
ENOUGH = 100
#: Holds that end sooner than this may be waited for in a worker's slot [s].
SHORT = 5.0
#: Nor is less than this worth being advised [s].
SHORTEST_WAIT = 0.1
#: Share of all holds that is planned for; the rest are exceptions.
MOST = 0.99


@dataclass(frozen=True)
class Advice:
    option: str  # its name, or that of a setting
    text: str  # what was measured, and what follows
    value: float | str | None = None  # what to set the option to; None to leave it as it is


@dataclass(frozen=True)
class Watched:
    tally: TaskTally
    options: LockOptions | None  # of its lock; None for a task that this app does not know
    rules: Rules
    visibility_timeout: float | None = None  # of the broker [s]; None for a broker that has none
    acks_late: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)  # its options that are not the defaults
    in_code: Collection[str] = ()  # those that its code sets, over which an entry has no say

    def met(self, cause: str) -> int:
        """Return how often something was refused for this cause, or would have been."""
        return self.tally.refused.get(cause, 0) + self.tally.reported.get(cause, 0)


def too_short(length: float, executions: int) -> str:
    """Return why so much is too little for advice; "" if it is not; *length* in [s]."""
    if length >= DAY or (length >= HOUR and executions >= ENOUGH):
        return ""
    return (
        f"Watched for {duration(length)} and {executions} "
        f"execution{'' if executions == 1 else 's'}: too short to advise; watch for a day."
    )


def advise(watched: Watched) -> list[Advice]:
    checks = (of_ttl, of_wait, of_memory, of_reservation)
    options = watched.options
    return [] if options is None else [it for check in checks for it in check(watched, options)]


def of_ttl(watched: Watched, options: LockOptions) -> Iterator[Advice]:
    holds, ttl, lost = watched.tally.holds, options.ttl, watched.met("lost")
    if not holds.count:
        return
    measured = (
        f"lock_ttl is {ttl:g} s; of {holds.count} holds the longest took "
        f"{duration(holds.longest)}, 99 % up to {duration(holds.quantile(MOST))}."
    )
    if lost and is_forgotten(watched.tally.examples.get("lost", {}).get("votes")):
        what = (
            f"{measured} {counted(lost, 'lease')} lost, the last as its nodes forgot it: they were "
            "restarted or flushed, or evicted keys. A longer one is no help; let nodes keep their "
            "data (appendonly yes, maxmemory-policy noeviction), and flush no server that holds "
            "locks, as cache.clear() does."
        )
        yield Advice("lock_ttl", what)
    elif lost:
        longer = min(2 * ttl, watched.rules.max_ttl)
        what = (
            f"{measured} {lost} lease{' was' if lost == 1 else 's were'} lost: a process stalled, "
            f"or too few nodes answered, for more than {stall(ttl, watched.rules)}. "
        )
        if longer > ttl:
            what += f"lock_ttl={longer:g} survives {stall(longer, watched.rules)}."
            yield Advice("lock_ttl", what, longer)
        else:
            yield Advice("lock_ttl", f"{what}A longer one needs a larger redlock_max_ttl.")
    elif holds.longest > ttl:
        what = "The watchdog renews the lease, so lock_ttl only has to cover stalls: keep it."
        yield Advice("lock_ttl", f"{measured} {what}")
    elif ttl > Rules.ttl:
        what = (
            f"A worker that dies blocks its lock for up to lock_ttl; {Rules.ttl:g} s survive a "
            f"stall of {stall(Rules.ttl, watched.rules)}, and longer holds are renewed."
        )
        yield Advice("lock_ttl", f"{measured} {what}", Rules.ttl)
    else:
        yield Advice("lock_ttl", f"{measured} Keep it.")


def stall(ttl: float, rules: Rules) -> str:
    return duration(ttl * (1 - rules.drift_factor) - ttl / 3)


def of_wait(watched: Watched, options: LockOptions) -> Iterator[Advice]:
    usual, conflicts = watched.tally.holds.quantile(MOST), watched.met("conflict")
    if not conflicts or not usual:
        return
    measured = (
        f"lock_wait is {options.wait:g} s; {conflicts} execution{'' if conflicts == 1 else 's'} "
        f"met a holder, and 99 % of the holds ended within {duration(usual)}."
    )
    if usual <= SHORT and options.wait < max(SHORTEST_WAIT, usual):
        wait = max(SHORTEST_WAIT, round_up(usual))
        what = f"{measured} lock_wait={wait:g} lets most run after it, in a worker's slot meanwhile"
        if isinstance(options.on_conflict, Skip):
            yield Advice("lock_wait", f"{what}. If one run is as good as two, keep it.")
        else:
            yield Advice("lock_wait", f"{what}.", wait)
    elif usual > SHORT and options.wait > 0:
        what = (
            "Waiting takes a worker's slot and seldom helps: with on_conflict='queue' and "
            "lock_wait=0 a task waits as a message."
        )
        yield Advice("lock_wait", f"{measured} {what}")


def round_up(length: float) -> float:
    """Return a time no shorter than *length* [s, > 0], with one digit that is not 0."""
    unit = 10 ** math.floor(math.log10(length))
    return float(f"{math.ceil(length / unit) * unit:.6g}")


def of_memory(watched: Watched, options: LockOptions) -> Iterator[Advice]:
    timeout, longest = watched.visibility_timeout, watched.tally.holds.longest
    copies = watched.met("redelivered") + watched.met("finished")
    if timeout is None or not (copies or watched.acks_late):
        return
    if longest > timeout:
        yield Advice(
            "visibility_timeout",
            f"A hold took {duration(longest)}, longer than the broker's visibility timeout of "
            f"{timeout:g} s: it delivers such a message again beside its run. Raise "
            "broker_transport_options['visibility_timeout'] above that, and redlock_dedup_ttl "
            "with it.",
        )
    measured = f"dedup_ttl is {options.dedup_ttl:g} s, the broker's visibility timeout {timeout:g}"
    seen = f"{copies} cop{'y' if copies == 1 else 'ies'} came" if copies else "no copy came"
    if options.dedup_ttl < timeout:
        what = f"{measured} s, and {seen}: a copy that comes later than dedup_ttl runs again."
        yield Advice("dedup_ttl", what, timeout)
    else:
        yield Advice("dedup_ttl", f"{measured} s, and {seen}. Keep it.")


def of_reservation(watched: Watched, options: LockOptions) -> Iterator[Advice]:
    if options.unique_until in {None, "expired"}:
        return
    timeout, longest = watched.visibility_timeout or 0.0, watched.tally.holds.longest
    needed = float(math.ceil(timeout + longest))
    measured = (
        f"unique_for is {options.unique_for:g} s; the longest hold and the broker's visibility "
        f"timeout are {needed:g} s together, and {watched.met('duplicate')} duplicates were "
        "published."
    )
    if options.unique_for < needed:
        what = "A message that is delivered again so late finds its reservation gone."
        yield Advice("unique_for", f"{measured} {what}", needed)
    else:
        yield Advice("unique_for", f"{measured} Keep it.")


# --- the entry -----------------------------------------------------------------------------


def entry_of(watched: Watched, advice: list[Advice]) -> tuple[dict[str, Any], list[str]]:
    """
    Return the options for an entry of ``redlock_protect``, and the names of those left out.

    An entry stands before all others, so it needs all that these say of the task: what the task has
    of its own, with what *advice* says, and ``lock_mode`` if it only reported. Options that are no
    plain values and not in the task's code are left out; then only what changes is returned. Empty
    for a task that nobody knows.
    """
    if watched.options is None:
        return {}, []
    plain = {option: literal(value) for option, value in watched.own.items()}
    left_out = [it for it, value in plain.items() if value is None and it not in watched.in_code]
    entry = {option: value for option, value in plain.items() if value is not None}
    changes = {it.option: it.value for it in advice if it.value is not None}
    would_fail = "unnamed" in watched.tally.reported
    if (watched.tally.ran_reported or watched.tally.reported) and not would_fail:
        changes["lock_mode"] = "enforce"
    return (changes if left_out else entry | changes), left_out


def literal(value: Any) -> Any:
    if isinstance(value, Enum):  # of words, or numbers
        value = value.value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (list, tuple)):
        items = [literal(it) for it in value]
        return None if None in items else items
    if isinstance(value, type) and value in WORDS.values():
        value = value()
    if isinstance(value, Policy):
        return next((word for word, made in WORDS.items() if made() == value), None)
    return value if isinstance(value, (str, int, float)) else None
