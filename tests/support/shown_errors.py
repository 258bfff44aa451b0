"""The errors that ``docs/reference/errors.md`` shows, each as it is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_redlock import RedlockTask, errors
from celery_redlock.lock.rules import Rules

__all__ = ["SHOWN"]

A, B, C = "lock-1:6379/0", "lock-2:6379/0", "lock-3:6379/0"
HELD, LATE = "refused (29.1 s left)", "unreachable (no answer in time)"
BILL = {"task": "shop.bill", "task_id": "41d0", "host": "worker-1", "pid": 17, "since": 1795598377}


def bill() -> Any:
    app = Celery("shop", set_as_current=False)

    @app.task(base=RedlockTask, name="shop.bill", shared=False)
    def bill(invoice: Any) -> Any:
        return invoice

    return bill


def raised_by(call: Callable[[], Any]) -> errors.RedlockError:
    try:
        call()
    except errors.RedlockError as error:
        return error
    raise AssertionError(call)


#: As the page shows them, each below its heading.
SHOWN: dict[str, list[errors.RedlockError]] = {
    "ConfigurationError": [raised_by(lambda: Rules(ttl=0))],
    "LockKeyError": [raised_by(lambda: bill().lock_name((object(),)))],
    "LockTaken": [errors.LockTaken("invoice:7", {A: HELD, B: HELD, C: "not waited for"}, BILL)],
    "RateExceeded": [
        errors.RateExceeded(
            "sms-api", dict.fromkeys((A, B, C), "refused (4.1 s left)"), {**BILL, "ttl": 4.1}
        )
    ],
    "TooManyDeliveries": [errors.TooManyDeliveries("shop.resize", "41d0", 3)],
    "QuorumUnavailable": [
        errors.QuorumUnavailable(
            "invoice:7", {A: "granted", B: "quarantined (44.2 s left)", C: LATE}, 44.2
        )
    ],
    "LockLost": [
        errors.LockLost("invoice:7", "deadline", {A: "granted", B: LATE, C: LATE}),
        errors.LockLost("invoice:7", "stolen", {A: "refused", B: "refused", C: "granted"}),
        errors.LockLost("invoice:7", "released"),
        errors.LockLost("invoice:7", "fork"),
    ],
    "DuplicateTask": [errors.DuplicateTask("41d0", "shop.bill:7")],
    "StaleFence": [errors.StaleFence("invoice", 33, 34)],
}
