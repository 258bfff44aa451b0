"""What users write, as their type checker sees it. Never run: ``mypy --strict`` reads it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery, Task

import celery_redlock
from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    Fail,
    HeldLock,
    Lease,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    Redlock,
    RedlockError,
    RedlockTask,
    ReleaseOutcome,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    Skipped,
    UniqueResult,
    current_lock,
)
from celery_redlock.task.worker.forced_ends import RedlockRequest
from celery_redlock.testing import assert_locked, locks_disabled, memory_quorum

NODES = ["redis://lock-1/0", "redis://lock-2/0", "redis://lock-3/0"]

version: str = celery_redlock.__version__

app = Celery("shop", broker="redis://broker/0", backend="redis://broker/1")
app.conf.redlock_nodes = NODES
app.conf.update(redlock_ttl=timedelta(seconds=20), redlock_on_conflict="fail")
app.Task = RedlockTask  # type: ignore[misc]  # celery-types takes it for read-only; it is not
everything = Celery("shop", task_cls="celery_redlock:RedlockTask")


@app.task(base=RedlockTask)
def simple(invoice_id: int) -> int:
    """Have nothing but the base."""
    return invoice_id


@app.task(
    base=RedlockTask,
    bind=True,
    lock_key="invoice:{invoice_id}",
    lock_ttl=30,
    lock_wait=2.5,
    on_conflict="skip",
    on_unavailable=Retry(countdown=timedelta(seconds=5)),
    on_lock_lost="warn",
    fence=True,
    min_hold=1.0,
    dedup_ttl=600,
    chain_on_skip="continue",
    unique_until="finished",
    unique_for=600.0,
    on_duplicate="rerun",
)
def bill(self: RedlockTask, invoice_id: int, *, dry_run: bool = False) -> str:
    """Use all options, and the lock."""
    lock: HeldLock = current_lock()
    same: HeldLock = self.lock
    lock.ensure_held()
    fence: int | None = lock.fence
    left: float = lock.remaining()
    lost: bool = lock.is_lost
    merged: int = lock.merged
    why: str | None = lock.lost_reason
    told: tuple[str, str, float, float] = (lock.name, lock.token, lock.ttl, lock.since)
    if self.request.retries > 3:
        raise self.retry(countdown=int(left))
    return f"{same} {fence} {lost} {merged} {why} {told} {dry_run}"


@app.task(
    base=RedlockTask,
    unique_on=("user_id",),
    on_conflict=Reschedule(base=2.0, cap=timedelta(minutes=1)),
)
def report(user_id: int, day: str) -> str:
    """Choose what makes the key."""
    return f"{user_id} {day}"


def tenant_key(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Make a lock name by hand."""
    return f"{task.name}:{args[0]}:{sorted(kwargs)}"


@app.task(base=RedlockTask, lock_key=tenant_key, on_unavailable=RunUnlocked())
def sync(tenant: str) -> None:
    """Have a callable key."""


def publish_once(task: RedlockTask) -> str | None:
    """Publish, and ask whether it was there already."""
    try:
        result: UniqueResult = task.apply_async((7,), countdown=5)
    except DuplicateTask as error:
        return f"{error.holder_id} {error.lock_name}"
    return result.holder_id if result.duplicate else result.lock_name


class Import(RedlockTask):
    """A task written as a class."""

    name = "shop.import"
    lock_key = "import:{path}"
    lock_ttl = 45
    lock_wait = timedelta(seconds=2)
    on_conflict = Fail()
    on_unavailable = "reschedule"
    fence = False
    dedup_ttl = timedelta(hours=2)
    unique_until = "expired"
    unique_for = timedelta(days=1)

    def run(self, path: str) -> int:
        """Import a file."""
        self.lock.ensure_held()
        return len(path)


class Shop(RedlockTask):
    """A base class of one's own."""

    abstract = True
    on_conflict = Skip()
    unique_on = ("tenant",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wrap the body."""
        return super().__call__(*args, **kwargs)


class Elsewhere(Task[..., Any]):
    """A base class of somebody else's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, and nothing else."""
        return self.run(*args, **kwargs)


class Timed:
    """A mixin that is no task."""

    def on_success(
        self, retval: Any, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Override a hook."""


class Both(Elsewhere, RedlockTask):
    """Two bases, ours behind."""

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Override a hook."""

    def lock_name(
        self, args: tuple[Any, ...] | list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> str:
        """Make a lock name by hand."""
        return f"tenant:{super().lock_name(args, kwargs)}"


class BothAgain(Timed, RedlockTask, Elsewhere):
    """Two bases, ours before, and a mixin."""

    lock_ttl = 20.0


class OwnRequest(RedlockRequest):
    """What a worker makes of a delivery."""


class Watched(RedlockTask):
    """A base with a request of its own."""

    Request = "shop:OwnRequest"


def publish() -> None:
    """Publish, and read what comes back."""
    name: str = Import().lock_name(("a.csv",), {})
    other: str = Import().lock_name(["a.csv"])
    value = bill.delay(7).get()
    if "skipped" in value:
        cause: str = Skipped(value)["skipped"]
        print(cause, name, other)  # noqa: T201


def lock_without_celery() -> None:
    """Use the lock by itself."""
    locks: Redlock = Redlock.from_urls(NODES, ttl=30, wait=1.0)
    with locks.hold("nightly-report", wait=5, ttl=timedelta(seconds=20)) as held:
        held.ensure_held()
        fence: int | None = held.fence
        print(fence)  # noqa: T201
    lease: Lease = locks.acquire("name", ttl=10, wait=timedelta(0))
    longer: Lease = locks.extend(lease)
    outcome: ReleaseOutcome = locks.release(longer, wait=True)
    if outcome is not ReleaseOutcome.RELEASED:
        for view in locks.inspect("name"):
            print(view.node, view.holder.get("task_id"), view.ttl)  # noqa: T201


def handle_errors() -> None:
    """Tell the errors apart."""
    try:
        bill.delay(7).get()
    except LockTaken as error:
        holder: dict[str, Any] = error.holder
        votes: dict[str, str] = error.votes
        print(holder, votes)  # noqa: T201
    except QuorumUnavailable as error:
        again: float | None = error.retry_after
        print(again)  # noqa: T201
    except LockNotAcquired as error:
        print(error.name)  # noqa: T201
    except LockLost as error:
        print(error.name, error.reason)  # noqa: T201
    except DuplicateTask as error:
        print(error.holder_id, error.lock_name)  # noqa: T201
    except (ConfigurationError, LockKeyError, RedlockError, ValueError) as error:
        print(error)  # noqa: T201


@locks_disabled()
def test_bill() -> None:
    """Test a body without servers."""
    assert bill.apply((7,)).get()
    with locks_disabled():
        assert simple.apply((7,)).get() == 7
    with memory_quorum(app) as quorum:
        quorum.nodes[0].down()
        quorum.clock.tick(1)
        fence: int | None = assert_locked("invoice:7").fence
        assert fence
