"""What a caller gets for a task that was published, or that was there already."""

from __future__ import annotations

import sys
from typing import Any

from celery import bootsteps
from celery.result import AsyncResult, EagerResult

__all__ = ["SpareResults", "UniqueResult", "unique"]


class SparingResult(AsyncResult):  # type: ignore[type-arg]  # AsyncResult[Any] fails at run time
    """A result that can be freed anywhere, also in the middle of a green wait."""

    def __del__(self) -> None:
        """
        Cancel what waits for this result, as Celery does, but in a greenlet of its own.

        Celery tells Redis so at once. Where the collector of cycles finds a result while
        eventlet waits for a socket, the I/O within that wait leaves its greenlet hanging for
        ever, and with it a task of the worker.
        """
        if sys.is_finalizing():
            return
        eventlet = sys.modules.get("eventlet")
        if eventlet is None or self.backend is None or not is_green(eventlet):
            super().__del__()
        else:
            backend: Any = self.backend
            eventlet.spawn_n(backend.remove_pending_result, self)


class SpareResults(bootsteps.Step):
    """Has all results of a worker be such, in the pool that needs it: not only ours are freed."""

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        eventlet = sys.modules.get("eventlet")
        if eventlet is not None and is_green(eventlet):
            make = worker.app.subclass_with_self
            worker.app.AsyncResult = make(SparingResult, name="AsyncResult", reverse="AsyncResult")


class UniqueResult(SparingResult):
    """
    The result of a `RedlockTask`, as `apply_async` and `delay` return it.

    Attributes:
        duplicate: Whether a task of the same name was queued or running already. With
            ``on_duplicate="join"`` this is that task's result; with ``"rerun"`` that of the run
            which will have the arguments of this call, or newer ones.
        holder_id: Id of the task that was there first; the own id where there was none.
        lock_name: The name that both share; None for a task without ``unique_until``, and where
            nobody asked for it: in a workflow, in eager mode, with locks disabled.
    """

    duplicate: bool = False
    holder_id: str | None = None
    lock_name: str | None = None

    def __reduce_args__(self) -> tuple[Any, ...]:
        return *super().__reduce_args__(), self.duplicate, self.holder_id, self.lock_name

    def __init__(  # noqa: PLR0917  Celery's signature; the last three are for pickle and copy
        self,
        id: str,  # noqa: A002
        backend: Any = None,
        task_name: str | None = None,
        app: Any = None,
        parent: Any = None,
        duplicate: bool = False,  # noqa: FBT001, FBT002
        holder_id: str | None = None,
        lock_name: str | None = None,
    ) -> None:
        super().__init__(id, backend, task_name, app, parent)
        self.duplicate = duplicate
        self.holder_id = holder_id or id
        self.lock_name = lock_name

    @property
    def supports_native_join(self) -> bool:
        """
        Whether a `ResultSet` that begins with this one may ask for all its results at once.

        Celery then keeps one value for each id, and two results may be of one task here.
        """
        return self.lock_name is None and bool(super().supports_native_join)

    def __copy__(self) -> UniqueResult:
        own = self.duplicate, self.holder_id, self.lock_name
        return type(self)(self.id, self.backend, None, self.app, self.parent, *own)


def kind_of(cls: type[AsyncResult[Any]]) -> type[AsyncResult[Any]]:
    """Return *cls*, of another base of the task, with what we say of a publish."""
    if cls not in _kinds:
        _kinds[cls] = type(f"Unique{cls.__name__}", (UniqueResult, cls), {"__reduce__": reduce})
    return _kinds[cls]


def reduce(self: Any) -> tuple[Any, ...]:
    """Pickle a result of such a class by the class that it was made of."""
    return remake, (type(self).__bases__[1], self.__reduce_args__())


def remake(cls: type[AsyncResult[Any]], args: tuple[Any, ...]) -> Any:
    """Return what `reduce` took apart."""
    return kind_of(cls)(*args)


_kinds: dict[type[AsyncResult[Any]], type[AsyncResult[Any]]] = {}


class UniqueEagerResult(EagerResult, UniqueResult):  # type: ignore[type-arg]
    """The same in eager mode, where the task has run already."""

    def __init__(self, id: str, *args: Any) -> None:  # noqa: A002  Celery's signature
        EagerResult.__init__(self, id, *args)
        self.holder_id = id

    __reduce_args__ = EagerResult.__reduce_args__
    __copy__ = EagerResult.__copy__  # type: ignore[assignment]


def is_green(eventlet: Any) -> bool:
    """Return whether threads are greenlets of *eventlet* in this process."""
    return bool(eventlet.patcher.is_monkey_patched("thread"))


def unique(
    result: Any,
    *,
    lock_name: str | None = None,
    duplicate: bool = False,
    holder_id: str | None = None,
) -> UniqueResult:
    """
    Return *result*, which Celery made, with what there is to say of the publish.

    Args:
        result: Of `Task.apply_async`.
        lock_name: As in `UniqueResult`, like the rest.
        duplicate: Likewise.
        holder_id: Likewise; its own id by default.
    """
    if not isinstance(result, EagerResult):
        unique: UniqueResult = result
    else:
        unique = UniqueEagerResult.__new__(UniqueEagerResult)
        vars(unique).update(vars(result))
    unique.duplicate = duplicate
    unique.holder_id = holder_id or unique.id
    unique.lock_name = lock_name
    return unique
