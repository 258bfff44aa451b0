"""What the demo orders from its worker, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from celery import states

from celery_redlock.ops import demo_app
from celery_redlock.ops.demo_record import Run, read_runs

__all__ = ["Order", "Orders", "Tally"]

#: The id of a task. (Its AsyncResult would call the broker when it is thrown away, which may
#: be when there is no broker any more.)
Order: TypeAlias = str


@dataclass(frozen=True)
class Tally:
    """
    What became of some orders.

    Attributes:
        runs: Of the bodies, as the bodies wrote down.
        skipped: How many orders ended without a run.
        failed: How many orders ended with an error.
        open: How many orders have no result yet.
    """

    runs: list[Run]
    skipped: int
    failed: int
    open: int

    @property
    def running(self) -> int:
        """How many bodies run at this moment."""
        return sum(run.ended is None for run in self.runs)

    @property
    def done(self) -> int:
        """How many bodies have ended."""
        return len(self.runs) - self.running


class Orders:
    """
    All orders.

    Args:
        record: File that the bodies of the tasks write to.

    Attributes:
        sent: The orders, in the order in which they were sent.
    """

    def __init__(self, record: Path) -> None:
        self._record = record
        self.sent: list[Order] = []

    def bill(self, invoices: Sequence[int], seconds: float) -> list[Order]:
        """Order the billing of *invoices*; one takes so many *seconds*."""
        return [self._sent(demo_app.bill.delay(invoice, seconds).id) for invoice in invoices]

    def count_stock(self, seconds: float) -> Order:
        """Order one count of the stock, which takes so many *seconds*."""
        return self._sent(demo_app.count_stock.delay(seconds).id)

    def _sent(self, order: Order) -> Order:
        self.sent.append(order)
        return order

    def runs(self, *jobs: str) -> list[Run]:
        """Return the runs of *jobs*, or of all jobs, by start."""
        return [run for run in read_runs(self._record) if not jobs or run.job in jobs]

    def tally(self, orders: Sequence[Order], *jobs: str) -> Tally:
        """Return what became of *orders*, which are all orders of *jobs* so far."""
        answers = [demo_app.app.backend.get_task_meta(order) for order in orders]
        ready = [answer for answer in answers if answer["status"] in states.READY_STATES]
        results = [answer["result"] for answer in ready]
        skipped = sum(isinstance(result, dict) and "skipped" in result for result in results)
        failed = sum(answer["status"] != states.SUCCESS for answer in ready)
        return Tally(self.runs(*jobs), skipped, failed, len(orders) - len(ready))
