"""Check of a fencing number."""

from __future__ import annotations

__all__ = ["checked"]

#: Redis compares numbers as doubles, which hold whole numbers exactly up to here.
LARGEST = 2**53


def checked(fence: int | None) -> int:
    """Return *fence* if a store can compare it; raise TypeError or ValueError if not."""
    if fence is None:
        raise ValueError(
            "fence is None: the task has no fencing number. It runs without a lock (RunUnlocked, "
            "report mode, locks_disabled() in a test), or the option fence is False. Decide what "
            "such a task may write, and write that without a fence"
        )
    if isinstance(fence, bool) or not isinstance(fence, int):
        raise TypeError(f"fence must be an int, got {type(fence).__name__}")
    if not 0 <= fence <= LARGEST:
        raise ValueError(f"fence must be between 0 and 2**53, got {fence}")
    return fence
