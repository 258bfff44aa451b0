"""
One execution of a task under a lock, a straight line down and back.

    trace -> RedlockTask.__call__ -> lock name -> acquire -> (policy) -> body -> release

An execution is ``task id / retries / replacements``: a retry is another one, a message
delivered again is the same one. Every acquisition has a token of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from celery import Task, states
from celery.exceptions import Ignore, Reject

from celery_redlock.deferral import signals_deferred
from celery_redlock.errors import LockLost, LockNotAcquired, LockTaken, QuorumUnavailable
from celery_redlock.lock.held import HeldLock, NotLocked
from celery_redlock.lock.requests import Marker
from celery_redlock.lock.rounds import MarkerStands, Wanted
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.task.current import _current, current_lock
from celery_redlock.task.interrupt import Interrupt, LockInterrupt
from celery_redlock.task.keys import LockName
from celery_redlock.task.options import OPTIONS, LockOptions, check_declared
from celery_redlock.task.policies import Policy, RunUnlocked
from celery_redlock.task.redelivery import set_aside, warn_if_forgetful
from celery_redlock.task.refused import policy_for, refuse

__all__ = ["Execution", "RedlockTask"]

logger = logging.getLogger(__name__)

#: How long to wait for the task's own predecessor to give the lock back [s].
PREDECESSOR_GRACE = 2.0
#: How long storing the result may take before the execution counts as unfinished [s].
FINISHING = 30.0
#: After which an unfinished copy looks again whether the result was stored [s].
LOOK_AGAIN = 1.0
#: Built-in tasks of Celery; they inherit from us under ``task_cls`` and take no lock.
BUILT_IN = "celery."


class RedlockTask(Task):  # type: ignore[type-arg]  # Task[..., Any] fails at run time before 5.4
    """
    A Celery task whose body runs under a quorum lock.

    ``@app.task(base=RedlockTask)`` alone locks on the task's name and all its arguments.
    ``None`` means: as in the app's setting of the same meaning.

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
    """

    abstract = True

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

    _lock_name: LockName | None = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the options that the task declares; called by Celery when it is registered."""
        super().on_bound(app)
        plugin_for(app).install()
        registered = app._tasks.values()  # noqa: SLF001  app.tasks would finalize the app here
        task = next((task for task in reversed(registered) if type(task) is cls), None)
        if task is not None:
            task._check_declared()  # noqa: SLF001  an instance of ours

    def _check_declared(self) -> None:
        if not self._is_built_in:
            check_declared(self)
            self._lock_name = self._make_lock_name()

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
        """Check this task's options against the app's settings; raises ConfigurationError."""
        if not self._is_built_in:
            options = self._lock_options(plugin_for(self.app))
            if self.acks_late:
                warn_if_forgetful(self, options.dedup_ttl)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock; called directly, without one."""
        request = self.request
        if not self._is_protected(request):
            return super().__call__(*args, **kwargs)
        execution = Execution(self, request, self.lock_name(args, kwargs))
        return execution.run(self._body(request, super().__call__), args, kwargs)

    def _body(self, request: Any, inherited: Any) -> Callable[..., Any]:
        """
        Return what runs the body.

        In a worker that is the next ``__call__``. In eager mode Celery's own would push a
        second request, and the body would see neither its id nor its retries.
        """
        is_celerys = getattr(inherited, "__func__", None) is Task.__call__
        return self.run if request.is_eager and is_celerys else inherited

    def _is_protected(self, request: Any) -> bool:
        """Return whether this call is an execution: not direct, not nested, not a built-in."""
        return not (
            request.called_directly
            or request.id is None
            or self._is_built_in
            or getattr(request, "_redlock", None) is not None
        )

    @property
    def _is_built_in(self) -> bool:
        return self.name.startswith(BUILT_IN) and self.lock_key is None and self.unique_on is None

    def _make_lock_name(self) -> LockName:
        cls = type(self)  # a callable lock_key is no method: take it from the class, unbound
        return LockName.of_task(self, lock_key=cls.lock_key, unique_on=cls.unique_on)

    def _lock_options(self, plugin: Plugin) -> LockOptions:
        own = [getattr(self, option) for option in OPTIONS]
        known = plugin.options.get(self.name)
        if known is None or known[0] != own:
            known = plugin.options[self.name] = own, LockOptions.of(self, plugin.settings)
        return known[1]


class Execution:
    """
    One execution: what it is called, its lock, and what is remembered of it.

    Args:
        task: A `RedlockTask`.
        request: Of this delivery.
        name: Lock name.
    """

    def __init__(self, task: Any, request: Any, name: str) -> None:
        self.task = task
        self.request = request
        self.name = name
        self.id = f"{request.id}/{request.retries or 0}/{request.replaced_task_nesting or 0}"
        self._plugin = plugin_for(task.app)
        if request.is_eager:
            self._plugin.refresh()
        self._interrupt = Interrupt()
        self._held: HeldLock | None = None
        self._has_ended = self._finishing = False
        request._redlock = self  # noqa: SLF001  tells a nested call, and finds us in task_postrun

    @property
    def options(self) -> LockOptions:
        """The options of the task; not asked for while locks are disabled."""
        return self.task._lock_options(self._plugin)  # type: ignore[no-any-return]  # noqa: SLF001

    def run(self, body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """
        Acquire the lock, run *body*, and give the lock back on every way out.

        Returns:
            What *body* returns, or what the policy says in its place.
        """
        try:
            try:
                held = self.acquire()
            except LockNotAcquired as error:
                return self.refused(error)
            result = self._run_with(held, body, args, kwargs)
            self._has_ended = True
        except Exception as error:
            self._has_ended = has_finished(error)
            raise
        else:
            return result
        finally:
            try:
                self._give_back()
            finally:  # a signal between the body and the line above must not leave the lock behind
                self._give_back()

    # -- before the body -----------------------------------------------------------

    def acquire(self) -> HeldLock:
        """
        Return the lock, or what stands in for one.

        Raises:
            LockTaken, QuorumUnavailable: The policy decides.
            celery.exceptions.Ignore: This delivery is over: the execution has finished
                already, or runs elsewhere and a copy was published for later.
        """
        if locking.disabled:
            return NotLocked(self.name, "locks are disabled in this process", time.time())
        outer = _current.get()
        if outer is not None and self._is_part_of(outer):
            return outer
        try:
            return self._take_or_wait_for_kin()
        except MarkerStands as marker:
            raise self._finished_before(marker.state) from None
        except QuorumUnavailable as error:
            if not isinstance(policy_for(error, self.options), RunUnlocked):
                raise
            logger.warning(
                "Running %s[%s] WITHOUT its lock: %s", self.task.name, self.request.id, error
            )
            return NotLocked(self.name, "no quorum of lock nodes; run_unlocked", time.time())

    def _is_part_of(self, outer: HeldLock) -> bool:
        """Return whether this runs in the body that holds *outer* and has become this one."""
        is_ours = outer.lease.info.get("task_id") == self.request.id
        return bool(self.request.is_eager) and outer.name == self.name and is_ours

    def refused(self, error: LockNotAcquired) -> Any:
        """Act on *error* by policy; returns the result of the task, or raises."""
        skipped = refuse(self.task, self.request, error, self.options, self._plugin.notify)
        return skipped if self.request.is_eager else dict(skipped)  # for every result serializer

    def _take_or_wait_for_kin(self) -> HeldLock:
        """Acquire the lock; a task never loses to itself nor to what came before it."""
        try:
            return self._take(self.options.wait)
        except LockTaken as error:
            kin, taken = self._kinship(error.holder), error
        if kin == "predecessor":
            try:
                return self._take(PREDECESSOR_GRACE)
            except LockTaken as error:
                kin, taken = self._kinship(error.holder), error
        if kin is None:
            raise taken
        raise set_aside(self.task, self.request, taken.holder.get("ttl", LOOK_AGAIN), taken)

    def _take(self, wait: float) -> HeldLock:
        options = self.options
        info = {"task": self.task.name, "task_id": self.request.id, "execution": self.id}
        wanted = Wanted(self.name, options.ttl, wait, options.fence, info, self._marker_name())
        on_lost = self._on_lost if options.aborts_on_loss else None
        with signals_deferred():  # or a lock that was granted might not be given back
            self._held = held = self._plugin.locks.take(wanted, on_lost)
        return held

    def _kinship(self, holder: dict[str, Any]) -> str | None:
        """Return how the holder is related: ``"same"`` execution, ``"predecessor"``, or not."""
        if self.request.is_eager or "task_id" not in holder:
            return None
        if holder.get("execution") == self.id:
            return "same"
        if holder["task_id"] in (self.request.id, self.request.parent_id):
            return "predecessor"
        return None

    def _marker_name(self) -> str | None:
        if not self.options.dedup_ttl or self.request.is_eager:
            return None
        return self.id

    def _finished_before(self, state: str) -> Ignore:
        """Return what ends a copy of an execution that has finished, or is about to."""
        if state == "done":
            logger.info(
                "%s[%s] has finished before; this copy ends", self.task.name, self.request.id
            )
            return Ignore("this execution has finished before")
        return set_aside(self.task, self.request, LOOK_AGAIN)

    # -- the body ---------------------------------------------------------------------

    def _run_with(
        self,
        held: HeldLock,
        body: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run *body*, which can ask for *held*, and which ends when that is lost."""
        outer = _current.set(held)
        try:
            with self._interrupt:
                if self._held is not None and self.options.aborts_on_loss:
                    held.ensure_held()  # it may have been lost before there was a body to interrupt
                return body(*args, **kwargs)
        except LockInterrupt as error:
            if error.interrupt is not self._interrupt:
                raise  # meant for the task that called apply() in its body
            raise LockLost(held.name, held.lost_reason or "deadline") from None
        finally:
            _current.reset(outer)

    def _on_lost(self, _held: HeldLock) -> None:
        self._interrupt.fire()

    # -- after the body -----------------------------------------------------------------

    def _give_back(self) -> None:
        """Release the lock, once, undisturbed by signals; never fails the task."""
        if self._held is None:
            return
        with signals_deferred():
            held, self._held = self._held, None
            keep = held.since + self.options.min_hold - time.time()
            try:
                self._plugin.locks.give_back(held, keep=max(0.0, keep), marker=self._marker())
            except Exception:  # the lease ends by itself; the task's own outcome stands
                logger.exception(
                    "Releasing lock %r failed; it ends within %g s", held.name, held.ttl
                )

    def _marker(self) -> Marker | None:
        """
        Return what is to be remembered of this execution now that its body is over.

        In two steps where the message is acknowledged late: "finishing" now, "done" once the
        result is stored. A death in between leads to another run, never to a lost result.
        """
        name = self._marker_name()
        if name is None or not self._has_ended:
            return None
        if self.task.acks_late:
            self._finishing = True
            return Marker(name, "finishing", FINISHING)
        return Marker(name, "done", self.options.dedup_ttl)

    def stored(self, state: str | None) -> None:
        """Remember that the result is stored; called when Celery is through with the task."""
        if self._finishing:
            is_stored = state in (states.SUCCESS, states.FAILURE, states.RETRY)
            ttl = self.options.dedup_ttl if is_stored else 0.0
            with signals_deferred():
                self._plugin.locks.mark(Marker(self.id, "done", ttl))


def has_finished(error: Exception) -> bool:
    """
    Return whether an execution that ended with *error* must not run when it is delivered again.

    With Ignore and Reject the message may be meant to come again. (What is not an Exception,
    like SystemExit or the end of a greenlet, tore the body apart: that has not finished.)
    """
    return not isinstance(error, (Ignore, Reject))
