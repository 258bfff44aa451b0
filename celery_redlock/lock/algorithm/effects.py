"""Effects that the algorithm yields: ask, send, sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.votes import Ballot

if TYPE_CHECKING:
    from celery_redlock.lock.waiting.room import ThreadWaiting

__all__ = ["Ask", "Send", "Sleep"]


def when_all_are_in(_ballot: Ballot) -> bool:
    return False


@dataclass(frozen=True)
class Ask:
    """Put *request* to every node at once; the answer is the ballot, *decided* or timed out."""

    request: Request
    decided: Callable[[Ballot], bool] = when_all_are_in


@dataclass(frozen=True)
class Send:
    """Send *request* to every node but those at the positions *skip*; wait for nothing."""

    request: Request
    skip: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sleep:
    """Do nothing for *seconds*, or until *waiting* is woken; answered by whether it was."""

    seconds: float
    waiting: ThreadWaiting | None = None
