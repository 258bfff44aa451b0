"""How an execution begins: granted its locks, refused them, or not to run any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_redlock.errors import LockNotAcquired, LockTaken, TooManyDeliveries
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.records import rate_name
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.plan import Plan, Situation, plan

__all__ = ["Begun", "Finished", "Granted", "Refused", "Superseded", "holder_in"]


class Granted(NamedTuple):
    """
    An execution runs.

    Attributes:
        claim: As it was asked with.
        held: Its lock, or what stands in for one.
        own: The lock that it has to release; None if there is none. In report mode that is its
            note on the nodes, which nobody waits for, and *held* is none.
    """

    claim: Claim
    held: HeldLock
    own: HeldLock | None = None


@dataclass(frozen=True)
class Finished:
    """
    An execution has finished before.

    Attributes:
        claim: As it was asked with.
        is_certain: Whether its result is stored; else it is asked again later.
    """

    claim: Claim
    is_certain: bool


@dataclass(frozen=True)
class Superseded:
    """
    A newer call of a debounced task has come.

    Attributes:
        claim: As it was asked with.
        newest: Task id of that call; empty if nobody knows.
    """

    claim: Claim
    newest: str


@dataclass(frozen=True)
class Refused:
    """
    An execution was not granted its lock.

    Attributes:
        claim: As it was asked with.
        error: Why.
        situation: In which it is then.
        is_full: Whether as many wait for the lock as may.
    """

    claim: Claim
    error: LockNotAcquired | TooManyDeliveries
    situation: Situation
    is_full: bool = False

    @property
    def line(self) -> str:
        """The name for whose line it is, if it waits."""
        name = self.claim.name if isinstance(self.error, TooManyDeliveries) else self.error.name
        return rate_name(name) if self.situation is Situation.OVER_RATE else name

    @property
    def plan(self) -> Plan:
        claim = self.claim
        return plan(
            claim.options,
            self.situation,
            is_eager=claim.request.is_eager,
            reschedules=claim.delivery.envelope.reschedules,
            is_full=self.is_full,
            is_last=bool(claim.delivery.envelope.debounced),
            has_begun=self.has_begun,
        )

    @property
    def has_begun(self) -> bool:
        """Whether its body may have been at work before; the start that it met may be its own."""
        delivery = self.claim.delivery
        comes_from_itself = delivery.comes_again or delivery.envelope.previous is not None
        is_beside_itself = delivery.is_same_execution(holder_in(self))
        return comes_from_itself or is_beside_itself or delivery.is_redelivered


Begun = Granted | Finished | Superseded | Refused


def holder_in(refused: Refused) -> dict[str, Any]:
    """Return who holds the lock, as in `LockTaken.holder`; empty if nobody knows."""
    return refused.error.holder if isinstance(refused.error, LockTaken) else {}
