"""The claim of an execution to its locks: the task, its message, its options, its lock names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock import clock
from celery_redlock.lock.records import rate_name
from celery_redlock.plugin import Plugin, locking
from celery_redlock.process.log import get_logger
from celery_redlock.task.execution.outcome import Records
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import HEADER
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.naming.task_lock import TaskLock, lock_of
from celery_redlock.task.options import LockOptions
from celery_redlock.unique.reservations import Reservations

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

    from celery_redlock.lock.held import HeldLock
    from celery_redlock.lock.redlock import Redlock
    from celery_redlock.task.rate import Rate

__all__ = ["Claim", "end_reservation"]

logger = get_logger(__name__)


@dataclass(eq=False)
class Claim:
    """
    The claim of an execution to its locks. Written to by the execution alone.

    Attributes:
        task: A `RedlockTask`.
        request: Of this delivery.
        delivery: This delivery.
        lock: What the task asks of its lock.
        plugin: Of its app.
        reservation: That its message was published with; None for none.
        names: Lock names; empty before they are known.
        call: Positional and keyword arguments, by which it has these names.
        starts: Places that its start has taken, by their names: by its rates, and of its message.
        is_report: Whether it is for a note that the execution runs, and not for locks.
    """

    task: Any
    request: Any
    delivery: Delivery
    lock: TaskLock
    plugin: Plugin
    reservation: Reservation | None = None
    names: tuple[str, ...] = ()
    call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    starts: dict[str, HeldLock] = field(default_factory=dict)
    is_report: bool = False

    @classmethod
    def of(cls, task: Any, request: Any) -> Self:
        """Return the claim of what *request* delivers; without names."""
        lock = lock_of(task)
        plugin, fields = lock.plugin, request.__dict__
        if request.is_eager:
            plugin.refresh()
        if request.is_eager or locking.disabled:
            fields = {**fields, HEADER: None}
        delivery = Delivery.of(task, fields, str(request.hostname))
        return cls(task, request, delivery, lock, plugin, delivery.envelope.reservation)

    def of_second_publish(self) -> Self:
        """Return the claim of another execution than the one that has published its task id."""
        return replace(self, delivery=self.delivery.of_second_publish())

    @property
    def name(self) -> str:
        """The first of its names; empty before they are known."""
        return self.names[0] if self.names else ""

    @cached_property
    def options(self) -> LockOptions:
        """The options of the task; not asked for while locks are disabled."""
        options = self.delivery.adjust(self.lock.options_under(self.plugin.settings))
        if options.only_reports:  # nobody writes with the fence, and nothing is aborted
            options = replace(options, fence=False, aborts_on_loss=False)
        if self.request.is_eager:  # nothing delivers it again
            return replace(options, dedup_ttl=0.0, max_deliveries=None)
        return options

    @cached_property
    def limits(self) -> dict[str, int]:
        """Its lock names, and how many places each has; empty if it takes no lock."""
        return self.options.limits(self.names, *self.call)

    @cached_property
    def rates(self) -> dict[str, Rate]:
        """Those of its names that have a rate, and that."""
        return self.options.rates(self.names, *self.call)

    @property
    def counts_deliveries(self) -> bool:
        return bool(self.options.max_deliveries and self.task.acks_late)

    @property
    def only_reports(self) -> bool:
        """Whether the body runs whatever the nodes say."""
        try:
            return not locking.disabled and self.options.only_reports
        except ConfigurationError:  # it is raised where it does not hide how the task fails
            return False

    @property
    def locks(self) -> Redlock:
        return self.plugin.locks_for(report=self.is_report)

    @property
    def reservations(self) -> Reservations:
        is_report = self.reservation is not None and self.reservation.is_report
        return self.plugin.reservations_for(report=is_report)

    def uncount(self, *names: str) -> None:
        """Take back the starts of these *names*; without any, all that were taken."""
        for name in names or tuple(self.starts):
            start = self.starts.pop(name, None)
            if start is not None:
                self.locks.let_go(start.lease)

    def count_from_now(self) -> None:
        """Have the places of a start by rates stand from now on, if it comes late."""
        for name, rate in self.rates.items():
            start = self.starts.get(rate_name(name))
            if start is None:
                continue
            slack = rate.slack + start.lease.ttl - rate.stands_for  # more where nodes are far away
            if clock.wall() - start.since > slack:
                self.locks.let_go(start.lease, keep=start.lease.ttl)

    @property
    def info(self) -> dict[str, Any]:
        return self.delivery.info(self.task.name)

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"


def end_reservation(claim: Claim, records: Records) -> None:
    """End the reservation as *records* say; never fails the task."""
    reservation = claim.reservation
    if reservation is not None:
        try:
            reservation.end(claim.reservations, records.reservation, records.life)
        except Exception:  # it expires; the task's own outcome stands
            logger.exception("Ending the reservation of %r failed", reservation.name)
