"""
The tasks of the run with Celery: read a register, think, and write it, with a fence and without.

A worker imports this file by its path, as `support.stage` says.
"""

from __future__ import annotations

import os
import time
import uuid
from functools import lru_cache
from pathlib import Path
from typing import Any

from celery import Celery

from celery_redlock import RedlockTask, Reschedule, current_lock
from nemesis.log import Log, now
from nemesis.registers import Registers

__all__ = ["declare"]

AGAIN = Reschedule(0.3, 1.0)


def declare(app: Celery) -> None:
    """
    Declare ``change``, which ends when the fenced register has taken its change.

    It goes on when its lock is lost, as a body does that is stopped between its last look at the
    lock and its write: the fence has to save what the lock cannot.
    """
    app.task(
        name="change",
        base=RedlockTask,
        bind=True,
        lock_key="{name}",
        lock_wait=0.5,
        on_conflict=AGAIN,
        on_unavailable=AGAIN,
        on_lock_lost="warn",
        acks_late=True,
        reject_on_worker_lost=True,
        max_retries=None,
    )(change)


def change(task: Any, name: str, number: int, seconds: float) -> None:
    folder = Path(os.environ["EVENTS"]).parent
    lock, log = current_lock(), log_of(folder, os.getpid())
    assert lock.fence is not None
    at = now()
    until = at + lock.remaining()
    log.write("granted", at, name=name, fence=lock.fence, asked=at, until=until, number=number)
    registers = Registers(folder / "tasks.sqlite")
    try:
        fenced, plain = registers.read(name, lock.fence)
        while True:
            look_at = now()
            left = lock.remaining()
            if left:
                log.write("tick", look_at, until=look_at + left, renewals=lock.renewals)
            if now() >= at + seconds:
                break
            time.sleep(0.01)  # the rhythm of its looks
        registers.write_plain(name, plain)
        taken = fenced is not None and registers.write_fenced(name, lock.fence, fenced)
    finally:
        registers.close()
    ended_at = now()
    if lock.remaining():
        log.write("ended", ended_at)
    else:
        log.write("lost", why=lock.lost_reason)
    if not taken:
        log.write("stale", number=number)
        raise task.retry(countdown=0.2)
    log.write("done", number=number)


@lru_cache(maxsize=1)
def log_of(folder: Path, pid: int) -> Log:
    log = Log(folder / f"client-{pid}-{uuid.uuid4().hex[:6]}.jsonl")
    log.write("born", contender="tasks", client=str(pid))
    return log
