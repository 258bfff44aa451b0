"""The report that the how-to shows: what `redlock report` prints of such a day."""

from __future__ import annotations

import contextlib
import io
from unittest.mock import patch

from celery_redlock.lock.rules import Rules
from celery_redlock.ops.advice import Watched
from celery_redlock.ops.cli import report
from celery_redlock.ops.report import Report, TaskReport, task_report
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds, class_of
from celery_redlock.reading.tally import TaskTally
from celery_redlock.words import iso_moment
from support.options import OPTIONS

__all__ = ["shown"]

BEGUN = 1_795_579_212.0
WATCHED = 23 * 3600.0 + 600.0


def shown() -> str:
    found = Report(BEGUN, BEGUN, WATCHED, [of_bill()], 3, (), has_setting=True)
    out = io.StringIO()
    in_utc = patch.object(report, "local_time", lambda at: iso_moment(at)[:19].replace("T", " "))
    with in_utc, contextlib.redirect_stdout(out):
        report.show(found)
    return out.getvalue()


def of_bill() -> TaskReport:
    counts = [0] * (len(HOLD_BOUNDS) + 1)
    for length, times in ((0.5, 2000), (1.0, 2000), (2.0, 780), (20.0, 40), (48.0, 1)):
        counts[class_of(length)] = times
    first = {"task": "shop.bill", "task_id": "9c1b", "host": "worker-1", "pid": 23}
    at = BEGUN + 79_000.0
    here = {"host": "worker-2", "pid": 17}
    conflict = {"at": at, **here, "task_id": "41d0", "name": "shop.bill:5f2e"}
    copy = {"at": at + 600, **here, "task_id": "77ab", "name": "shop.bill:9a01"}
    tally = TaskTally(
        ran=4852,
        ran_reported=4852,
        reported={"conflict": 19, "redelivered": 12},
        holds=Holds(tuple(counts), 5000.0, 48.0, 30.0),
        examples={
            "conflict": {**conflict, "holder": {**first, "since": at - 2.1}},
            "redelivered": {**copy, "holder": {**first, "task_id": "77ab", "since": at - 3000}},
        },
    )
    own = {"unique_on": ["order_id"]}
    return task_report(
        "shop.bill", Watched(tally, OPTIONS, Rules(), 3600.0, acks_late=True, own=own), WATCHED
    )
