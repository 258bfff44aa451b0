"""The body of an execution, under its lock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from celery_redlock.lock.held import HeldLock
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.interrupt import Interrupt, LockInterrupt

__all__ = ["run_body"]

#: Of what a result backend can store as it is.
PLAIN = frozenset({type(None), bool, int, float, str, bytes, dict, list, tuple})


def run_body(
    claim: Claim,
    held: HeldLock | None,
    interrupt: Interrupt,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run *body*; raises LockLost where it is interrupted because *held* is lost."""
    try:
        with interrupt:
            if held is not None and claim.options.aborts_on_loss:
                held.ensure_held()  # it may have been lost before there was a body to interrupt
            result = body(*args, **kwargs)
            if held is not None and not claim.is_report:
                check_ended(result, claim.task.name)
            return result
    except LockInterrupt as error:
        if held is None or error.interrupt is not interrupt:
            raise  # meant for the task that called apply() in its body
        lost = next((one for one in held.others if one.is_lost), held)
        raise lost.loss() from None
    finally:
        interrupt.disarm()  # a signal may strike before the ``with`` has called __exit__


def check_ended(result: Any, task: str) -> None:
    """Raise TypeError if *result*, of the body of *task*, is something that has yet to run."""
    if type(result) in PLAIN:  # most are
        return
    is_generator = inspect.isgenerator(result) or inspect.isasyncgen(result)
    if not (is_generator or inspect.isawaitable(result) or isinstance(result, Future)):
        return
    if inspect.iscoroutine(result):
        result.close()  # nobody is to wait for it
    raise TypeError(
        f"{task} returned a {type(result).__name__}, which runs after it has returned, without the "
        "lock; wait for its end in the body"
    )
