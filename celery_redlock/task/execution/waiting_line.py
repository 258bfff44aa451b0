"""The line of those who wait for a lock as messages: join it, leave it."""

from __future__ import annotations

from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.scripts.votes import VoteKind, has_majority
from celery_redlock.lock.waiting.waiting import has_answered, leave_request, wait_request
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.messages.waiting import Waiting

__all__ = ["is_full", "leave_line", "leave_line_before"]


def is_full(claim: Claim, waiting: Waiting, most: int | None) -> bool:
    """Return whether *most* wait already; if not, the task is one of them now."""
    if most is None:
        return False
    delivery, locks = claim.delivery, claim.plugin.locks
    one = waiting.in_line(claim.task.name, delivery.task_id, delivery.execution)
    ballot = locks.driver.ask(Ask(wait_request(locks.rules, one, most), has_answered))
    is_refused = has_majority(ballot, VoteKind.REFUSED)
    if is_refused:
        leave_line(claim, one.name)  # on some it is noted
    return is_refused


def leave_line_before(claim: Claim, waiting: Waiting) -> None:
    """Leave the line that this delivery was in, unless its copy, which waits so, stays there."""
    before, is_other = claim.delivery.envelope.waiting, claim.delivery.is_second_publish
    if before is not None and before.name != waiting.name:
        leave_line(claim, before.name)
    if is_other:  # its copy has an id
        leave_line(claim, waiting.name)


def leave_line(claim: Claim, name: str) -> None:
    locks = claim.plugin.locks
    locks.driver.tell(leave_request(locks.rules, name, claim.delivery.execution))
