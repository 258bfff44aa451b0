"""The result that a publish returns: of the task itself, or of the one that was there already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from celery import Task, bootsteps
from celery.result import AsyncResult, EagerResult

__all__ = ["FreeResultsLater", "UniqueResult", "result_of", "unique"]


class FreeResultsLater(bootsteps.Step):
    """
    In a worker with the eventlet pool, keeps a result that is freed from hanging a task.

    Celery unsubscribes from the result then. If the garbage collector frees it while eventlet
    waits for a socket, that I/O leaves the waiting greenlet hanging without end, and with it a task
    of the worker. Here a greenlet of its own unsubscribes. It is Celery's class that is changed:
    results of plain tasks, groups and chords are freed within tasks, too.
    """

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        eventlet = sys.modules.get("eventlet")
        if eventlet is not None and eventlet.patcher.is_monkey_patched("thread"):
            AsyncResult.__del__ = unsubscribe_later  # type: ignore[method-assign]


def unsubscribe_later(result: Any) -> None:
    if result.backend is not None and not sys.is_finalizing():
        sys.modules["eventlet"].spawn_n(result.backend.remove_pending_result, result)


class UniqueResult(AsyncResult):  # type: ignore[type-arg]  # AsyncResult[Any] fails at run time
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

    def __init__(self, id: str, *args: Any, **kwargs: Any) -> None:  # noqa: A002  Celery's name
        super().__init__(id, *args, **kwargs)
        self.holder_id = id

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), fields_of(self)

    def __copy__(self) -> Any:
        copied = super().__copy__()
        vars(copied).update(fields_of(self))
        return copied

    @property
    def supports_native_join(self) -> bool:
        """
        Whether a `ResultSet` that begins with this one may ask for all its results at once.

        Celery then keeps one value for each id, and two results may be of one task here.
        """
        return self.lock_name is None and bool(super().supports_native_join)


def fields_of(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in ("duplicate", "holder_id", "lock_name")}


def kind_of(cls: type[AsyncResult[Any]]) -> type[AsyncResult[Any]]:
    """The class of results that are both *cls*, of another base of the task, and ours."""
    if cls not in _kinds:
        _kinds[cls] = type(f"Unique{cls.__name__}", (UniqueResult, cls), {"__reduce__": reduce})
    return _kinds[cls]


def reduce(self: Any) -> tuple[Any, ...]:
    """Pickle a result of such a class by the class that it was made of."""
    return remake, (type(self).__bases__[1], self.__reduce_args__()), fields_of(self)


def remake(cls: type[AsyncResult[Any]], args: tuple[Any, ...]) -> Any:
    return kind_of(cls)(*args)


_kinds: dict[type[AsyncResult[Any]], type[AsyncResult[Any]]] = {}


class UniqueEagerResult(EagerResult, UniqueResult):  # type: ignore[type-arg]
    def __init__(self, id: str, *args: Any) -> None:  # noqa: A002  Celery's signature
        EagerResult.__init__(self, id, *args)
        self.holder_id = id


def result_of(
    task: Any, inherited: Callable[..., Any], task_id: str, fields: dict[str, Any]
) -> Any:
    """*inherited* is ``AsyncResult`` of the task's next base, which decides the kind."""
    if getattr(inherited, "__func__", None) is Task.AsyncResult:
        known = {"backend": task.backend, "task_name": task.name, "app": task.app}
        return UniqueResult(task_id, **{**known, **fields})
    result = inherited(task_id, **fields)
    result.__class__ = kind_of(type(result))
    result.holder_id = task_id
    return result


def unique(
    result: Any,
    *,
    lock_name: str | None = None,
    duplicate: bool = False,
    holder_id: str | None = None,
) -> UniqueResult:
    if isinstance(result, EagerResult):
        of_celery, result = result, UniqueEagerResult.__new__(UniqueEagerResult)
        vars(result).update(vars(of_celery))
    fields = {"lock_name": lock_name, "duplicate": duplicate, "holder_id": holder_id or result.id}
    vars(result).update(fields)
    return result  # type: ignore[no-any-return]
