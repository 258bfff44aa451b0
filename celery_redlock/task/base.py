"""The base class of tasks that run under a lock: their options, and where Celery calls them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery import Task
from celery.exceptions import Ignore
from celery.utils import uuid

from celery_redlock.errors import LockKeyError
from celery_redlock.lock.held import HeldLock
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.task.current import current_lock, running_execution
from celery_redlock.task.delivery import broadcast_of, serializer_of
from celery_redlock.task.elements import is_element, run_element
from celery_redlock.task.envelope import HEADER, Envelope, fresh_publish_id
from celery_redlock.task.execution import Execution
from celery_redlock.task.keys import LockName
from celery_redlock.task.options import OPTIONS, LockOptions, check_declared
from celery_redlock.task.outcome import DeliveryOver, Outcome
from celery_redlock.task.overrides import check_bases, check_request, protect
from celery_redlock.task.policies import Policy
from celery_redlock.task.publish import is_alone, publish
from celery_redlock.task.redelivery import warn_if_forgetful
from celery_redlock.task.reservation import Reservation
from celery_redlock.task.result import UniqueResult, kind_of, unique

__all__ = ["RedlockTask"]

#: Built-in tasks of Celery; they inherit from us under ``task_cls`` and take no lock.
BUILT_IN = "celery."
#: How long a thread waits while another one binds the task to its app [s].
BINDING = 10.0
#: Of a worker's start, and of each of its connections to the broker; by their names, as only a
#: worker has need of them.
STEPS = (
    "celery_redlock.exposition:ServeMetrics",
    "celery_redlock.nodewatch:WatchNodes",
    "celery_redlock.ops.control:AnswerInspect",
    "celery_redlock.task.result:SpareResults",
)
CONSUMER_STEPS = ("celery_redlock.task.forced_ends:NoteRevokes",)


class RedlockTask(Task):  # type: ignore[type-arg]  # Task[..., Any] fails at run time before 5.4
    """
    A Celery task whose body runs under a quorum lock.

    ``@app.task(base=RedlockTask)`` alone locks on the task's name and all its arguments.
    ``None`` means: as in the app's setting of the same meaning. A ``__call__`` of your own, or
    of another base, runs under the lock, whether or not it calls ours.

    Attributes:
        lock_key: None, a template like ``"invoice:{invoice_id}"``, or a callable
            ``(task, args, kwargs) -> str``; the whole lock name.
        unique_on: Names of the arguments that make the default name; ``()`` for none.
        lock_ttl: Lease written to every node [s]; the watchdog renews it.
        lock_wait: How long to keep trying before the policy applies [s].
        on_conflict: Policy when another execution holds the lock.
        on_unavailable: Policy when no quorum could decide.
        on_lock_lost: ``"abort"`` or ``"warn"``.
        fence: Whether to ask for a fencing number.
        min_hold: Keep the key at least so long after the grant [s].
        dedup_ttl: How long a finished execution is remembered [s]; 0 for not at all.
        chain_on_skip: ``"stop"`` or ``"continue"``.
        unique_until: Keep a second copy out of the queue until this one has ``"started"``, is
            ``"finished"``, has ended in ``"success"``, or until its window has ``"expired"``.
        unique_for: The window, or else the longest life of a marker that nobody ends [s].
        on_duplicate: ``"join"``, ``"fail"`` or ``"rerun"``.
        overlap: What `celery_redlock.beat` does with a slot while the run of an earlier one has not
            ended: ``"skip"``, ``"buffer_one"`` or ``"allow"``.
    """

    abstract = True
    #: What a worker makes of every delivery; it releases for children that were killed.
    Request = "celery_redlock.task.forced_ends:RedlockRequest"

    lock_key: str | Callable[[Any, tuple[Any, ...], dict[str, Any]], str] | None = None
    unique_on: tuple[str, ...] | list[str] | None = None
    lock_ttl: float | None = None
    lock_wait: float | None = None
    on_conflict: Policy | str | None = None
    on_unavailable: Policy | str | None = None
    on_lock_lost: str | None = None
    fence: bool | None = None
    min_hold: float = 0.0
    dedup_ttl: float | None = None
    chain_on_skip: str = "stop"
    unique_until: str | None = None
    unique_for: float | None = None
    on_duplicate: str = "join"
    overlap: str = "skip"

    _lock_name: LockName | None = None
    _tells_started = False

    @classmethod
    def bind(cls, app: Any) -> Any:
        """
        Take the task into *app*: lock its ``__call__`` and check what it declares.

        Celery calls this when a task is registered and when its app is finalized. Users
        override ``on_bound``, which is part of it, and often forget ``super()`` there.
        """
        bound = super().bind(app)
        protect(cls, RedlockTask)
        plugin_for(app).install(STEPS, CONSUMER_STEPS)
        registered = app._tasks.values()  # noqa: SLF001  app.tasks would finalize the app here
        task = next((task for task in reversed(registered) if type(task) is cls), None)
        if task is not None:
            task._check_declared()  # noqa: SLF001  an instance of ours
            task._take_over_started()  # noqa: SLF001
        return bound

    def _check_declared(self) -> None:
        if not self._is_built_in:
            check_bases(self, RedlockTask)
            check_declared(self, RedlockTask)
            self._lock_name = self._make_lock_name()

    def _take_over_started(self) -> None:
        """Have STARTED told by the delivery that has the lock, and by no other; see `Execution`."""
        if self.track_started and not self._is_built_in:
            self.track_started, self._tells_started = False, True

    def lock_name(
        self, args: tuple[Any, ...] | list[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> str:
        """
        Return the lock name of a call with these arguments; the same on client and worker.

        Args:
            args: Positional arguments, without ``self``.
            kwargs: Keyword arguments.

        Raises:
            LockKeyError: They do not fit the signature, or cannot be told apart reliably.
        """
        if self._lock_name is None:
            self._lock_name = self._make_lock_name()
        return self._lock_name.name(args, kwargs)

    @property
    def lock(self) -> HeldLock:
        """The lock that this task holds while its body runs; RuntimeError elsewhere."""
        return current_lock()

    def check_lock(self) -> None:
        """Check this task against the app's settings; raises ConfigurationError."""
        protect(type(self), RedlockTask)  # it may have got another __call__ since
        if not self._is_built_in:
            options = self._lock_options(plugin_for(self.app))
            check_request(self, RedlockTask)
            if self.acks_late:
                warn_if_forgetful(self, options.dedup_ttl)

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

        Members of a workflow, tasks with callbacks, retries and whatever else comes again are
        always published, and meet the lock when they run.

        Returns:
            A `UniqueResult`: the task's own, or that of the one that was there.

        Raises:
            DuplicateTask: It is there already, and ``on_duplicate`` is ``"fail"``.
            QuorumUnavailable: No quorum could tell, and ``on_unavailable`` is ``"fail"``.
            LockKeyError: The arguments make no lock name.
        """
        known = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        options = {**options, **known, "task_id": task_id}
        self._wait_until_bound()
        inherited = super().apply_async
        if self.app.conf.task_always_eager or self._is_built_in:
            return unique(inherited(args, kwargs, **options))
        options["task_id"] = task_id = task_id or uuid()
        envelope = self._envelope_of(options.get("headers"), task_id)

        def send(reservation: Reservation | None, **options: Any) -> Any:
            sent = envelope if reservation is None else replace(envelope, reservation=reservation)
            headers = {**(options.pop("headers", None) or {}), **sent.header(options["task_id"])}
            return inherited(args, kwargs, headers=headers, **options)

        slot, again = envelope.slot, envelope.reservation is not None
        is_unique = self._is_unique or (slot is not None and slot.is_buffered)
        if not is_unique or again or locking.disabled or not is_alone(options):
            return unique(send(None, **options))
        self._check_arguments(args, kwargs)
        plugin = plugin_for(self.app)
        chosen = self._lock_options(plugin)
        if slot is not None:
            chosen = slot.adjust(chosen)
        return publish(self, plugin, chosen, (args, kwargs), options, send)

    def _envelope_of(self, headers: Any, task_id: str) -> Envelope:
        """
        Return what a message that is published with *headers* says of itself.

        Every publish is another execution, but for copies of a message, which say whose.
        """
        envelope = Envelope.of(
            headers.get(HEADER) if isinstance(headers, Mapping) else None, task_id
        )
        if envelope.publish_id is not None:
            return envelope
        running = running_execution()
        previous = None if running is None or running.request.id != task_id else running.id
        return replace(envelope, publish_id=fresh_publish_id(), previous=previous)

    def _wait_until_bound(self) -> None:
        """
        Wait while another thread binds this task to its app, its annotations included.

        Celery registers a task before it binds it, and hands it to a second thread in between.
        """
        ends = time.monotonic() + BINDING
        while (
            self.app and self.request_stack is None
        ):  # the app binds what nobody has begun to bind
            if time.monotonic() > ends:
                msg = f"task {self.name!r} was not bound to its app within {BINDING:g} s"
                raise RuntimeError(msg)
            time.sleep(0.001)

    def AsyncResult(self, task_id: str, **kwargs: Any) -> Any:  # noqa: N802  Celery's name
        """Return the result of the task with this id, of the kind that other bases have."""
        inherited = super().AsyncResult
        if getattr(inherited, "__func__", None) is not Task.AsyncResult:
            result: Any = inherited(task_id, **kwargs)
            result.__class__ = kind_of(type(result))
            result.holder_id = task_id
            return result
        known = {"backend": self.backend, "task_name": self.name, "app": self.app}
        return UniqueResult(task_id, **{**known, **kwargs})

    def signature_from_request(
        self,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: Any = None,
        **extra: Any,
    ) -> Any:
        """Return what comes again; it carries what its message did, whatever its headers."""
        known = self.request if request is None else request
        headers = extra.get("headers", known.headers)
        headers = headers if isinstance(headers, Mapping) else {}
        envelope = Envelope.of(headers.get(HEADER), known.id)
        if envelope.publish_id is None:  # not of a copy: what is published is another execution
            envelope = Envelope.of(vars(known).get(HEADER), known.id)
            envelope = replace(envelope, publish_id=None, previous=None)
        broadcast = broadcast_of(self.app, known.delivery_info)
        if broadcast is not None:
            envelope = replace(envelope, worker=known.hostname)
            # A child process of a worker has never declared it, and Redis would drop the message.
            extra["declare"] = [broadcast]
        if envelope != Envelope():
            extra["headers"] = {**headers, **envelope.header(str(known.id))}
        if args is None and kwargs is None:  # the caller may have hidden what they are
            shown = {name: vars(known).get(name) for name in ("argsrepr", "kwargsrepr")}
            extra = {**{name: value for name, value in shown.items() if value}, **extra}
        written = {
            "serializer": serializer_of(known),
            "compression": vars(known).get("compression"),
            "delivery_mode": (known.properties or {}).get("delivery_mode"),
        }
        extra = {**{option: value for option, value in written.items() if value}, **extra}
        return super().signature_from_request(request, args, kwargs, queue, **extra)

    def on_replace(self, sig: Any) -> Any:
        """Let the replacement have the reservation of this task, if it can end it."""
        running = running_execution()
        is_handed_over = (
            running is not None and running.is_of(self, self.request) and running.hand_over_to(sig)
        )
        try:
            return super().on_replace(sig)
        except Ignore as error:
            if not is_handed_over:
                raise
            raise DeliveryOver(str(error), Outcome.REQUEUED) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock; called directly, without one."""
        return self._run_locked(super().__call__, args, kwargs)

    def _run_locked(
        self, inherited: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the next ``__call__``, under the lock if this is the first one of an execution."""
        if is_element(self) and not (self._is_built_in or locking.disabled):
            return run_element(self, args, kwargs)
        request = self.request
        inner = self._past_celerys(request, inherited)
        if not self._takes_lock(request):
            return inner(*args, **kwargs)
        return Execution(self, request).run(inner, args, kwargs)

    def _name_of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the lock name; TypeError, as of a plain task, if the arguments do not fit."""
        try:
            name = self.lock_name(args, kwargs)
        except LockKeyError:
            inspect.signature(self.run).bind(*args, **kwargs)
            raise
        if not (isinstance(name, str) and name):  # a lock_name() of the user's
            raise LockKeyError(f"Task {self.name!r}: lock_name() returned no name")
        return name

    def _past_celerys(self, request: Any, inherited: Callable[..., Any]) -> Callable[..., Any]:
        """
        Return what runs the body.

        That is the next ``__call__``. Celery's own would push a second request, a copy (up to 5.4
        an empty one), and what the body changes in it is lost; only the command ``celery worker``
        keeps it from that, neither ``celery.contrib.testing`` nor eager mode does.
        """
        is_celerys = getattr(inherited, "__func__", None) is Task.__call__
        if not is_celerys or request.called_directly or request._protected:  # noqa: SLF001
            return inherited
        request._protected = 1  # noqa: SLF001  Celery's own mark, and its own way in a worker
        return self.run

    def _takes_lock(self, request: Any) -> bool:
        """Return whether this call is an execution: not direct, not nested, not a built-in."""
        return not (
            request.called_directly
            or request.id is None
            or self._is_built_in
            or ((running := running_execution()) is not None and running.is_of(self, request))
        )

    @property
    def _is_built_in(self) -> bool:
        return self.name.startswith(BUILT_IN) and self.lock_key is None and self.unique_on is None

    @property
    def _is_unique(self) -> bool:
        return self.unique_until is not None and not self._is_built_in

    def _check_arguments(self, args: Any, kwargs: Any) -> None:
        """Raise TypeError for arguments that do not fit, before they are to make a name."""
        check = getattr(self, "__header__", None)
        if self.typing and check is not None:
            check(*(args or ()), **(kwargs or {}))

    def _make_lock_name(self) -> LockName:
        cls = type(self)  # a callable lock_key is no method: take it from the class, unbound
        return LockName.of_task(self, lock_key=cls.lock_key, unique_on=cls.unique_on)

    def _lock_options(self, plugin: Plugin) -> LockOptions:
        own = [getattr(self, option) for option in OPTIONS]
        known = plugin.options.get(self.name)
        if known is None or known[0] != own:
            known = plugin.options[self.name] = own, LockOptions.of(self, plugin.settings)
        return known[1]
