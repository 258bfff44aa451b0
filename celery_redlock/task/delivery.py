"""
What one delivery of a message is known by, in the worker's parent and in the child that runs it.

Both need the same two words: the id of the execution, which every delivery of a message
shares, and the owner, which no other delivery ever has.
"""

from __future__ import annotations

import re
from typing import Any

from celery_redlock.lock.rounds import new_owner

__all__ = ["execution_id", "mint_owner", "take_owner"]

OWNER = "redlock_owner"
#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"[0-9a-f]{32}")


def execution_id(task_id: str, retries: int | None, nesting: int | None) -> str:
    """
    Return the id of an execution.

    Args:
        task_id: Of the task.
        retries: How many retries came before it.
        nesting: How many replacements came before it.
    """
    return f"{task_id}/{retries or 0}/{nesting or 0}"


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
