"""Why did my task not run? What locks, holders and refusals of a search say about it together."""

from __future__ import annotations

from collections.abc import Sequence

from celery_redlock.ops.web.happened import Happening
from celery_redlock.ops.web.rows import LockRow, sentence

__all__ = ["answer"]

#: How many locks and refusals are told of in sentences; the tables have them all.
TOLD = 3
UNCLEAR = (
    "It cannot be told whether such a lock is held: too few nodes answered. Nothing that the "
    "others told matches."
)
NOTHING = (
    "Nothing matches: no live lock, and nothing in the journal. A task that is not here has run, "
    "waits in its queue, or was refused so long ago that the journal has forgotten."
)


def answer(
    locks: Sequence[LockRow], happenings: Sequence[Happening], *, is_known: bool = True
) -> list[str]:
    """
    Return in sentences what a search has found.

    Args:
        locks: Live locks that match.
        happenings: Records that match, newest first.
        is_known: Whether enough nodes answered to tell that there is no such lock.
    """
    notable = [it for it in happenings if it.mark != "plain"]
    told = [of_happening(it) for it in notable[:TOLD]]
    told += [of_lock(lock) for lock in locks[:TOLD]]
    return told or [NOTHING if is_known else UNCLEAR]


def of_lock(lock: LockRow) -> str:
    """Return who keeps others from *lock*, and for how long."""
    name, who = lock.name.short, sentence(lock.holder)
    if lock.is_leaked:
        return f"Lock {name} never expires, so nobody can take it until it is removed: {who}."
    if lock.is_unclear:
        return (
            f"Lock {name} stands on {lock.votes} of {lock.nodes} nodes, as far as they answered, "
            f"for {who}; too few did to tell whether it is held."
        )
    if not lock.is_held:
        return (
            f"Lock {name} stands on only {lock.votes} of {lock.nodes} nodes: an attempt under way, "
            f"or what is left of one, by {who}."
        )
    return f"Lock {name} is held by {who}; {lock.ttl} of its lease are left."


def of_happening(it: Happening) -> str:
    """Return what happened, when and why."""
    ago = f"{it.at.ago} ago: " if it.at is not None else ""
    return f"{ago}{it.sentence.short}."
