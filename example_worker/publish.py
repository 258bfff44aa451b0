"""Publish more copies than there should be runs, and print what became of each."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from celery.exceptions import TimeoutError as NotInTime
from celery.result import AsyncResult

from example_worker.app import bill, create_item, create_item_unlocked, load, remind, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every task ended in time with a value."""
    options = parser().parse_args(arguments)
    published = publish(options)
    told = [(result, name, outcome(result, options.timeout)) for result, name in published]
    for result, name, (_, words) in told:
        print(f"{result.id[:8]}  {name:<16}  {words}")
    return 0 if all(ended for _, _, (ended, _) in told) else 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m example_worker.publish", description=__doc__)
    made.add_argument("--invoices", type=int, default=3, help="how many invoices (default 3)")
    made.add_argument("--first", type=int, default=int(time.time()), help="number (default: new)")
    made.add_argument("--copies", type=int, default=3, help="of each invoice (default 3)")
    made.add_argument("--seconds", type=float, default=2.0, help="per invoice (default 2)")
    made.add_argument("--loads", type=int, default=2, help="imports of one file (default 2)")
    made.add_argument("--rows", type=int, default=20, help="of that file (default 20)")
    made.add_argument("--reports", type=int, default=0, help="reports at once (default 0)")
    made.add_argument("--reminders", type=int, default=0, help="of an invoice, at once (default 0)")
    made.add_argument("--items", type=int, default=0, help="of a new customer, at once (default 0)")
    made.add_argument("--unlocked", action="store_true", help="create the items without a lock")
    made.add_argument("--timeout", type=float, default=120.0, help="per task [s] (default 120)")
    return made


def publish(options: argparse.Namespace) -> list[tuple[AsyncResult, str]]:
    """Return the results that are to come, and what each is of."""
    bills = [
        (bill.delay(number, seconds=options.seconds), f"bill {number}")
        for _ in range(options.copies)
        for number in range(options.first, options.first + options.invoices)
    ]
    loads = [
        (load.delay("stock.csv", rows=options.rows), "load stock.csv") for _ in range(options.loads)
    ]
    reports = [(report.delay(), "report") for _ in range(options.reports)]
    reminders = [
        (remind.delay(options.first), f"remind {options.first}") for _ in range(options.reminders)
    ]
    create = create_item_unlocked if options.unlocked else create_item
    items = [
        (create.delay(options.first, f"item {number}"), "create item")
        for number in range(1, options.items + 1)
    ]
    return [*bills, *loads, *reports, *reminders, *items]


def outcome(result: AsyncResult, timeout: float) -> tuple[bool, str]:
    """Return whether a task ended with a value in time, and that in words."""
    try:
        value = result.get(timeout=timeout, propagate=False)
    except NotInTime:
        return False, f"still {result.state} after {timeout:g} s"
    if isinstance(value, dict) and "skipped" in value:
        return True, f"skipped ({value['skipped']}): {holder_in_words(value['holder'])}"
    return result.successful(), f"{result.state}: {value}"


def holder_in_words(holder: dict[str, Any]) -> str:
    """Return who was in the way."""
    if not holder:
        return "nobody could tell who"
    return f"task {holder['task_id'][:8]} runs on {holder['host']}, process {holder['pid']}"


if __name__ == "__main__":
    raise SystemExit(main())
