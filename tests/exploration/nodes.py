"""
What a node does with a request, without clocks: pure functions of what it stores.

A node stores whose key it has (0 for nobody's, else the number of a client) and its fence.
Answers are whole numbers, for there are millions of them: see `granted` and `repaired`.
"""

from __future__ import annotations

__all__ = [
    "DEAD",
    "LOST",
    "NOBODY",
    "QUARANTINED",
    "REFUSED",
    "WAITING",
    "acquire",
    "granted",
    "is_positive",
    "renew",
    "repaired",
]

NOBODY = 0

#: Has not come, and still may; has not come and never will; no; does not count; was a yes, on a
#: connection that has died since.
WAITING, LOST, REFUSED, QUARANTINED, DEAD = -1, -2, -3, -4, -5

Off = frozenset[str]
NOTHING: Off = frozenset()


def granted(fence: int) -> int:
    """Return the answer "yes, the key is yours, and this is my fence"."""
    return 2 * fence


def repaired(fence: int) -> int:
    """Return the answer "yes, the key was missing and is set again"."""
    return 2 * fence + 1


def is_positive(answer: int) -> bool:
    """Return whether *answer* is a yes of either kind."""
    return answer >= 0


def acquire(
    owner: int,
    fence: int,
    quarantined: bool,  # noqa: FBT001  what the script reads, in its order
    who: int,
    proposed: int,
    off: Off = NOTHING,
) -> tuple[int, int, int]:
    """Return owner, fence and answer after an ACQUIRE by *who*, as ACQUIRE_LUA."""
    if quarantined:
        return owner, fence, QUARANTINED
    if owner not in (NOBODY, who):
        return owner, fence, REFUSED
    fence = proposed if "growing-fence" in off else max(fence + 1, proposed)
    return who, fence, granted(fence)


def renew(  # noqa: PLR0917
    owner: int,
    fence: int,
    quarantined: bool,  # noqa: FBT001
    who: int,
    least: int,
    repair: bool,  # noqa: FBT001
    off: Off = NOTHING,
) -> tuple[int, int, int]:
    """Return owner, fence and answer after a RENEW by *who*, as RENEW_LUA."""
    answer = granted
    passed = fence > least and "repair-heeds-fence" not in off
    if owner == NOBODY and repair and not passed:
        answer = repaired
    elif owner == NOBODY or (owner != who and "owner-renewal" not in off):
        return owner, fence, REFUSED
    fence = max(fence, least)
    if quarantined and "quarantined-renewal" not in off:
        return who, fence, QUARANTINED
    return who, fence, answer(fence)
