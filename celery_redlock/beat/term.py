r"""
Leadership: a term is a lease that the watchdog renews, bid for again and again by all others.

    StandBy --bid: nobody leads, and a quorum grants the lock--> Term
       ^ \--bid: somebody leads, or no quorum--> StandBy until the next bid
       '--step down: the lease is lost, a newer leader was met, or we resign--'

A look comes before a bid: it asks nothing of the nodes but who leads, and is no conflict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.events import LeaderDeposed, LeaderElected, Notify
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import since_of
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.scripts.votes import agreed
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.log import get_logger, printable

__all__ = ["AFTER_FAILURE", "Elector", "StandBy", "Term", "majority_holder"]

logger = get_logger(__name__)

#: Between two bids [s], at random, so that those who stand by do not all bid at once.
BETWEEN_BIDS = 0.4, 1.0
#: Longest wait for a quarantine to end, and shortest for nodes to come back [s].
LONGEST_PAUSE, SHORTEST_PAUSE = 5.0, 1.0
#: After the wrapped scheduler has failed [s]: somebody else may do better.
AFTER_FAILURE = 4.0, 6.0


@dataclass(frozen=True)
class StandBy:
    """Another scheduler leads, or nobody can: bid again at *until* [s, `clock.now`]."""

    until: float
    why: str
    is_led: bool = False


@dataclass(frozen=True)
class Term:
    """We lead since *began* [s, `clock.now`]; *held* is the leadership, renewed by the watchdog."""

    held: HeldLock
    began: float

    @property
    def fence(self) -> int:
        return self.held.fence or 0


def majority_holder(views: Sequence[NodeView]) -> dict[str, Any]:
    named = agreed(views, lambda view: view.holder.get("token"))
    return named[0].holder if named else {}


class Elector:
    """Bids for the leadership of the schedulers called *name*."""

    def __init__(self, locks: Redlock, name: str, notify: Notify) -> None:
        self.name = name
        self._locks = locks
        self._notify = notify

    def bid(self, before: StandBy) -> Term | StandBy:
        """Return a term, or when to bid again; logs what has changed since *before*."""
        with defer_signals():
            result = self._bid(clock.now())
        if isinstance(result, Term):
            self._notify(LeaderElected(self.name, result.held.fence))
        elif result.why != before.why:
            level = logging.INFO if result.is_led else logging.WARNING
            logger.log(level, "beat: Standing by as %r: %s", self.name, result.why)
        return result

    def _bid(self, now: float) -> Term | StandBy:
        views = self._locks.inspect(self.name)
        leader = majority_holder(views)
        if leader:
            return StandBy(now + clock.jitter(*BETWEEN_BIDS), led_by(leader), is_led=True)
        silent = [view.node for view in views if view.problem]
        if len(views) - len(silent) < quorum(len(views)):
            pause = SHORTEST_PAUSE * clock.jitter(0.5, 1.0)
            return StandBy(
                now + pause, f"no quorum of lock nodes: no answer from {', '.join(silent)}"
            )
        rules = self._locks.rules
        info = {"task": "celery beat", "task_id": self.name}
        try:
            held = self._locks.take(LockRequest(self.name, float(rules.ttl), info=info))
        except LockTaken as error:
            return StandBy(now + clock.jitter(*BETWEEN_BIDS), led_by(error.holder), is_led=True)
        except QuorumUnavailable as error:
            pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, error.retry_after or 0.0))
            why = "no quorum of lock nodes could decide"
            if error.retry_after:
                why += "; some are in quarantine after a restart"
            return StandBy(clock.now() + pause, why)
        return Term(held, clock.now())

    def step_down(self, term: Term, reason: str) -> StandBy:
        with defer_signals():
            try:
                self._locks.give_back(term.held)
            except Exception:  # the lease ends by itself
                logger.exception("beat: Could not resign as %r", self.name)
        self._notify(LeaderDeposed(self.name, reason, clock.now() - term.began))
        if reason == "clock":
            logger.warning(
                "beat: The clock of this machine is more than %g s ahead of that of the lock "
                "nodes; correct it, as it cannot lead until then",
                self._locks.rules.longest_skew,
            )
        pause = AFTER_FAILURE if reason in ("failed", "clock") else BETWEEN_BIDS
        return StandBy(clock.now() + clock.jitter(*pause), reason)


def led_by(holder: dict[str, Any]) -> str:
    since = since_of(holder)
    when = time.strftime(" since %H:%M:%S", time.localtime(since)) if since else ""
    pid, host = (printable(holder.get(known, "?")) for known in ("pid", "host"))
    return f"led by process {pid} on {host}{when}"
