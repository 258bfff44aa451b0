"""
What one delivery of a message is known by, in the worker's parent and in the child that runs it.

Both need the same two words: the id of the execution, which every delivery of a message
shares, and the owner, which no other delivery ever has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_redlock.lock.rounds import new_owner

__all__ = ["REPEATS", "execution_id", "mint_owner", "repeats_of", "take_owner"]

OWNER = "redlock_owner"
#: Header that counts the retries that did not count.
REPEATS = "redlock_repeats"
MOST_REPEATS = 2**31
#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"[0-9a-f]{32}")


def execution_id(task_id: str, retries: int | None, nesting: int | None, repeats: int = 0) -> str:
    """
    Return the id of an execution.

    Args:
        task_id: Of the task.
        retries: How many retries came before it.
        nesting: How many replacements came before it.
        repeats: How many retries came before it that its body did not want to count.
    """
    known = f"{task_id}/{retries or 0}/{nesting or 0}"
    return f"{known}/{repeats}" if repeats else known


def repeats_of(headers: Any) -> int:
    """Return how many uncounted retries *headers* tell of; 0 if they make no sense."""
    told = headers.get(REPEATS) if isinstance(headers, Mapping) else None
    return told if type(told) is int and 0 < told < MOST_REPEATS else 0


def mint_owner(request: dict[str, Any]) -> str:
    """
    Return a new owner and let it travel in *request* from the parent to the child.

    It goes with how the message was delivered, which neither a retry nor ``celery inspect``
    takes from there; anything else that Celery does not know would become a header.
    """
    owner = new_owner()
    request["delivery_info"] = {**(request.get("delivery_info") or {}), OWNER: owner}
    return owner


def take_owner(request: Any) -> str | None:
    """Return the owner that the parent minted and let the body not see it; None if it did not."""
    owner = (request.delivery_info or {}).pop(OWNER, None)
    return owner if isinstance(owner, str) and WELL_FORMED.fullmatch(owner) else None
