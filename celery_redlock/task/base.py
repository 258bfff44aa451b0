"""The base class of tasks that run under a lock: their options, and where Celery calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from celery import Task, signals
from celery.exceptions import Ignore
from celery.utils.log import get_logger

from celery_redlock.errors import (
    ConfigurationError,
    LockTaken,
    QuorumUnavailable,
    RateExceeded,
    TooManyDeliveries,
)
from celery_redlock.lock.held import HeldLock
from celery_redlock.plugin import plugin_for
from celery_redlock.task.declared import check_declared
from celery_redlock.task.execution.calls import after, call
from celery_redlock.task.execution.execution import current_lock, running_execution
from celery_redlock.task.execution.log_filters import BEAT, TRACER, shorten, without_traceback
from celery_redlock.task.execution.outcome import DeliveryOver, Outcome
from celery_redlock.task.messages.broker import (
    warn_if_acked_early,
    warn_if_debounced_long,
    warn_if_forgetful,
    warn_if_not_alone,
    warn_if_results_expire,
)
from celery_redlock.task.messages.copies import options_of_copy, way_of_copy
from celery_redlock.task.messages.delivery import CELERYS
from celery_redlock.task.naming.shared import check_shared
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.overrides import (
    check_bases,
    check_body,
    check_request,
    protect,
    warn_of_replaced,
)
from celery_redlock.task.policies import Policy
from celery_redlock.task.publish.publish import publish
from celery_redlock.task.publish.result import FreeResultsLater, UniqueResult, result_of
from celery_redlock.task.rate import Rate
from celery_redlock.task.worker.node_watch import WatchNodes
from celery_redlock.task.worker.start_steps import CheckLocks, NoteDeaths

__all__ = ["RedlockTask", "install", "takes_lock"]

#: One of ``lock_limit``, and of ``lock_rate``.
Limit = int | str | Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
StartRate = Rate | str | int | Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None

#: Steps of a worker's start, and of each of its connections to the broker; the latter by its name,
#: as it imports Celery's worker, which a publisher does without.
WORKER_STEPS = (CheckLocks, NoteDeaths, WatchNodes, FreeResultsLater)
CONSUMER_STEPS = (
    "celery_redlock.task.worker.discarded:NoteDiscards",
    "celery_redlock.task.worker.revokes:NoteRevokes",
    "celery_redlock.task.worker.wake_tasks:WakeTasks",
)


class RedlockTask(Task):  # type: ignore[type-arg]  # Task[..., Any] fails at run time before 5.4
    """
    A Celery task whose body runs under a quorum lock.

    ``@app.task(base=RedlockTask)`` alone locks on the task's name and all its arguments.
    ``None`` means: as in the app's setting of the same meaning. A time may be a `timedelta`. A
    ``__call__`` of your own, or of another base, runs under the lock, whether or not it calls ours.

    Attributes:
        lock_key: None, a template like ``"invoice:{invoice_id}"``, or a callable
            ``(task, args, kwargs) -> str``, which may take ``headers``, too; the whole lock name.
            Or a tuple of templates, or a callable that returns a tuple of names, which are taken
            together or not at all.
        unique_on: Names of the arguments that make the default name; ``()`` for none.
        lock_ttl: Lease written to every node [s]; the watchdog renews it.
        lock_wait: How long to keep trying before the policy applies [s].
        lock_limit: How many executions may hold the lock at once [1 to 1000]; each has a place of
            its own, with fencing numbers of its own. Or a callable ``(task, args, kwargs) -> int``,
            or a template over bound arguments. A tuple has one for each name. None, with
            ``lock_rate``, for no lock.
        lock_rate: At most so many starts in any window, over all workers: as Celery writes rates,
            ``"100/m"``, or a `Rate`; by call, and one for each name, as ``lock_limit``.
        max_deliveries: How often a message may be started, whatever killed its worker [1 to 1000].
        lock_mode: ``"enforce"``; or ``"report"`` to run every body, publish every message, and
            report what would have been refused.
        on_conflict: Policy when another execution holds the lock.
        on_unavailable: Policy when no quorum could decide.
        on_lock_lost: ``"abort"`` or ``"warn"``.
        fence: Whether to ask for a fencing number.
        min_hold: Keep the key for at least this long after the grant [s].
        dedup_ttl: How long a finished execution is remembered [s]; 0 for not at all.
        chain_on_skip: ``"stop"`` or ``"continue"``.
        unique_until: Keep a second copy out of the queue until this one has ``"started"``, is
            ``"finished"``, has ended in ``"success"``, or until its window has ``"expired"``.
        unique_for: The window, or else the longest life of a reservation that nobody ends [s].
        on_duplicate: ``"join"``, ``"fail"`` or ``"rerun"``.
        overlap: What `celery_redlock.beat` does with a slot while the run of an earlier one has not
            ended: ``"skip"``, ``"buffer_one"`` or ``"allow"``.
        debounce: Of a burst of calls run the last one, when no other has come for so long [s].
        debounce_max: At the latest so long after the first one [s]; six times ``debounce`` if None.
    """

    abstract = True
    #: What a worker makes of every delivery; it releases for children that were killed.
    Request = "celery_redlock.task.worker.forced_ends:RedlockRequest"

    lock_key: (
        str
        | tuple[str, ...]
        | Callable[[Any, tuple[Any, ...], dict[str, Any]], str | tuple[str, ...]]
        | None
    ) = None
    unique_on: tuple[str, ...] | list[str] | None = None
    lock_ttl: float | timedelta | None = None
    lock_wait: float | timedelta | None = None
    lock_limit: Limit | tuple[Limit, ...] | None = 1
    lock_rate: StartRate | tuple[StartRate, ...] = None
    max_deliveries: int | None = None
    lock_mode: str | None = None
    on_conflict: Policy | str | None = None
    on_unavailable: Policy | str | None = None
    on_lock_lost: str | None = None
    fence: bool | None = None
    min_hold: float | timedelta = 0.0
    dedup_ttl: float | timedelta | None = None
    chain_on_skip: str = "stop"
    unique_until: str | None = None
    unique_for: float | timedelta | None = None
    on_duplicate: str = "join"
    overlap: str = "skip"
    debounce: float | timedelta | None = None
    debounce_max: float | timedelta | None = None

    @classmethod
    def bind(cls, app: Any) -> Any:
        """
        Bind the task to *app*: put the lock around its ``__call__``, check what it declares.

        Celery calls this when a task is registered and when its app is finalized. Users
        override ``on_bound``, which is part of it, and often forget ``super()`` there.
        """
        bound = super().bind(app)
        protect(cls, RedlockTask)
        install(app)
        registered = app._tasks.values()  # noqa: SLF001  app.tasks would finalize the app here
        task = next((task for task in reversed(registered) if type(task) is cls), None)
        if task is not None and not lock_of(task).is_built_in:
            check_bases(task, RedlockTask)
            check_body(task, RedlockTask)
            check_declared(task, RedlockTask)
            lock_of(task).bind(RedlockTask.lock_name)
            cls.throws = expected(cls.throws)
        return bound

    def lock_name(
        self, args: tuple[Any, ...] | list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> str:
        """
        Return the lock name of a call with these arguments; the same on client and worker.

        The first of them where ``lock_key`` makes several, and that of a message without headers
        where those are part of it.

        Args:
            args: Positional arguments, without ``self``.
            kwargs: Keyword arguments.

        Raises:
            LockKeyError: They do not fit the signature, or cannot be distinguished reliably.
        """
        return lock_of(self).names(args, kwargs)[0]

    @property
    def lock(self) -> HeldLock:
        """The lock that this task holds while its body runs; RuntimeError elsewhere."""
        return current_lock()

    def check_lock(self) -> None:
        """Check this task against the app's settings; raises ConfigurationError."""
        protect(type(self), RedlockTask)  # it may have another __call__ by now
        if not lock_of(self).is_built_in:
            options = lock_of(self).options
            check_request(self, RedlockTask)
            if self.acks_late:
                warn_if_forgetful(self, options.dedup_ttl)
            warn_if_acked_early(self)
            warn_if_not_alone(self, options)
            warn_if_results_expire(self, options)
            warn_if_debounced_long(self, options)

    def apply_async(  # noqa: PLR0917  Celery's signature
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> UniqueResult:
        """
        Publish the task; with ``unique_until``, unless it is queued or running already.

        Members of a workflow, tasks with callbacks, retries and copies are always published, and
        meet the lock when they run; none of them is debounced. Of a call, ``debounce=`` takes the
        place of the task's; None or False is for not at all.

        Returns:
            A `UniqueResult`: the task's own, or that of the one that was there.

        Raises:
            DuplicateTask: It is queued or running already, and ``on_duplicate`` is ``"fail"``.
            QuorumUnavailable: No quorum could tell, and ``on_unavailable`` is ``"fail"``.
            LockKeyError: The arguments make no lock name.
            ConfigurationError: It is given a ``debounce`` and a time of its own.
        """
        known = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        options = {**options, **known, "task_id": task_id}
        return publish(self, super().apply_async, args, kwargs, options)

    def AsyncResult(self, task_id: str, **kwargs: Any) -> Any:  # noqa: N802  Celery's name
        """Return the result of the task with this id, of the kind that other bases have."""
        return result_of(self, super().AsyncResult, task_id, kwargs)

    def signature_from_request(
        self,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: Any = None,
        **extra: Any,
    ) -> Any:
        """Return the signature of a retry or copy; it carries what its message did."""
        request = self.request if request is None else request
        has_new_arguments = args is not None or kwargs is not None
        options = options_of_copy(self, request, extra, has_new_arguments=has_new_arguments)
        options = {**way_of_copy(request), **options} if queue is None else options
        queue = options.pop("queue", queue)
        return super().signature_from_request(request, args, kwargs, queue, **options)

    def on_replace(self, sig: Any) -> Any:
        """Pass the reservation of this task on to its replacement, if that is one of ours."""
        running = running_execution()
        is_handed_over = (
            running is not None
            and running.is_of(self, self.request)
            and takes_lock(self.app.tasks.get(sig.get("task")))
            and running.hand_over_to(sig)
        )
        try:
            return super().on_replace(sig)
        except Ignore as error:
            if not is_handed_over:
                raise
            raise DeliveryOver(str(error), Outcome.REQUEUED) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock; called directly, without one."""
        return call(self, super().__call__, args, kwargs)


def expected(throws: Any) -> tuple[type[Exception], ...]:
    """Return *throws* and what a policy fails a task with; Celery logs no traceback of them."""
    given = throws if isinstance(throws, tuple) else (throws,) if throws else ()
    ours = (LockTaken, QuorumUnavailable, RateExceeded, TooManyDeliveries)
    return tuple(dict.fromkeys((*given, *ours)))


def takes_lock(task: Any) -> bool:
    return isinstance(task, RedlockTask) and not lock_of(task).is_built_in


def install(app: Any) -> None:
    plugin_for(app).install(check_tasks, WORKER_STEPS, CONSUMER_STEPS)


def check_tasks(app: Any) -> Sequence[str]:
    """Check the tasks of *app*, and return the names of those that take a lock."""
    tasks = [task for task in app.tasks.values() if isinstance(task, RedlockTask)]
    for task in tasks:
        task.check_lock()
    check_headers(plugin_for(app).key_headers)
    locked = [task for task in tasks if takes_lock(task)]
    check_shared(locked)
    warn_of_replaced(app, locked)
    return [task.name for task in locked if not lock_of(task).options.only_reports]


def check_headers(names: Iterable[str]) -> None:
    """Raise ConfigurationError if one of *names* is no header of the user's to Celery."""
    taken = sorted(CELERYS.intersection(names))
    if taken:
        raise ConfigurationError(
            f"redlock_key_headers: {taken[0]!r} is what Celery calls something of its own in a "
            "message, so that no worker sees the header; give it another name"
        )


get_logger(TRACER).addFilter(shorten)
get_logger(BEAT).addFilter(without_traceback)


@signals.task_postrun.connect(weak=False)
def _after_task(task: Any = None, state: str | None = None, retval: Any = None, **_: Any) -> None:
    if isinstance(task, RedlockTask):
        after(task, state, retval)


# At last, as the first may have tasks to protect at once. Their import is their use.
import celery_redlock.protect  # noqa: E402
import celery_redlock.task.worker.discarded  # noqa: E402, F401
