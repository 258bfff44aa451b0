"""
The lock of one task: its options, and the lock names of a call.

It is kept with the task under a name that no attribute can have, so that a user's class may have
any name that is not an option or a public method of `RedlockTask`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from celery_redlock.errors import LockKeyError
from celery_redlock.lock.records import is_text, own_name, place_name, shorten
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.settings import Settings
from celery_redlock.task.naming.by_call import decided_by_calls
from celery_redlock.task.naming.keys import LockName
from celery_redlock.task.options import BUILT_IN, OPTIONS, LockOptions

__all__ = [
    "NO_HEADERS",
    "TaskLock",
    "lock_of",
    "names_of",
    "names_of_call",
    "names_told",
    "places_of",
    "wait_until_bound",
]

NO_HEADERS: Mapping[str, Any] = MappingProxyType({})

#: Among the attributes of a task; not in a weak dictionary, which would keep the task alive, as
#: a `LockName` refers to its task.
KEY = "celery_redlock.task_lock"
declared_options = attrgetter(*OPTIONS)
#: How long a thread waits while another one binds the task to its app [s].
BINDING = 10.0


class WithHeaders(Protocol):
    """A delivery, as far as names depend on it."""

    @property
    def headers(self) -> dict[str, Any]:
        """The headers that its publisher gave it."""


class TaskLock:
    """
    The lock of one task.

    Attributes:
        own: The ``lock_name`` of its base; None before it is bound.
        stores_started: Whether the delivery that has the lock stores STARTED. Celery would store
            it for every delivery.
        is_named: Whether the setting ``redlock_protect`` names it.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._name: LockName | None = None
        self._options: tuple[Settings, tuple[Any, ...], LockOptions] | None = None
        self._is_celerys = task.name.startswith(BUILT_IN)
        self.stores_started = self.is_named = False
        self.own: Any = None

    def bind(self, own: Any) -> None:
        """
        Read what the task declares, now that it is bound to its app.

        *own* is the class's own ``lock_name``; any other names one lock.
        """
        self._name, self.own = self._make_name(), own
        if self._task.track_started:
            self._task.track_started, self.stores_started = False, True

    @property
    def plugin(self) -> Plugin:
        """That of its app, which may be another one than when it was declared."""
        return plugin_for(self._task.app)

    @property
    def is_built_in(self) -> bool:
        """Whether it is a task of Celery's own, which takes no lock."""
        task = self._task
        has_key = task.lock_key is not None or task.unique_on is not None
        return self._is_celerys and not (has_key or self.is_named)

    @property
    def options(self) -> LockOptions:
        return self.options_under(self.plugin.settings)

    def options_under(self, settings: Settings) -> LockOptions:
        """Its options; checked and put together again when attributes or settings change."""
        own, known = declared_options(self._task), self._options
        if known is None or known[0] is not settings or known[1] != own:
            options = decided_by_calls(self._task, LockOptions.of(self._task, settings))
            known = self._options = settings, own, options
        return known[2]

    @property
    def sees_headers(self) -> bool:
        return bool(self._known_name.is_computed or self.plugin.key_headers)

    @property
    def is_computed(self) -> bool:
        """Whether code of the user's makes the name, which may see more than arguments."""
        return type(self._task).lock_name is not self.own or self._known_name.is_computed

    def names(
        self, args: Any, kwargs: Any, headers: Mapping[str, Any] = NO_HEADERS
    ) -> tuple[str, ...]:
        name = self._known_name
        if name.is_default and headers:
            wanted = self.plugin.key_headers
            headers = {key: headers[key] for key in wanted if headers.get(key) is not None}
        names = name.name(args, kwargs, headers)
        if isinstance(names, str):
            return (names,)
        if len(names) > 1 and self._task.unique_until is not None:
            raise LockKeyError(
                f"Task {self._task.name!r}: lock_key gave {len(names)} names, and unique_until "
                "reserves one; drop unique_until, or give one name"
            )
        return names

    @property
    def _known_name(self) -> LockName:
        if self._name is None:
            self._name = self._make_name()
        return self._name

    def _make_name(self) -> LockName:
        cls = type(self._task)  # a callable lock_key is no method: take it from the class, unbound
        return LockName.of_task(self._task, lock_key=cls.lock_key, unique_on=cls.unique_on)


def names_of(
    task: Any, args: Any, kwargs: Any, headers: Mapping[str, Any] = NO_HEADERS
) -> tuple[str, ...]:
    """
    Return the lock names of a call of *task*, one or several; *headers* are those of the user.

    Raises LockKeyError: the arguments make none, or a ``lock_name`` of the user's returns none.
    """
    lock = lock_of(task)
    if type(task).lock_name is lock.own:
        return lock.names(args, kwargs, headers)
    name = task.lock_name(args, kwargs)
    if not (isinstance(name, str) and name and is_text(name)):
        raise LockKeyError(f"Task {task.name!r}: lock_name() returned no name")
    return (own_name(name),)


def names_of_call(
    task: Any, args: tuple[Any, ...], kwargs: dict[str, Any], delivery: WithHeaders
) -> tuple[str, ...]:
    """Return the lock names; TypeError, as of a plain task, if the arguments do not fit."""
    headers = delivery.headers if lock_of(task).sees_headers else NO_HEADERS
    try:
        return names_of(task, args, kwargs, headers)
    except LockKeyError:
        inspect.signature(task.run).bind(*args, **kwargs)
        raise


def names_told(
    task: Any, args: Any, kwargs: Any, headers: Mapping[str, Any], sent: tuple[str, ...]
) -> tuple[str, ...]:
    """
    Return the names of which a call may hold the locks, where it cannot be asked.

    Those that its arguments make here, and those that its publisher has *sent*: code of the user's
    may see something else there, like a context variable. Raises LockKeyError if there are none.
    """
    try:
        names = names_of(task, args, kwargs, headers)
    except Exception:
        if not sent:
            raise
        names = ()
    known = set(map(shorten, names))
    return (*names, *(name for name in sent if name not in known))


def places_of(task: Any, names: Sequence[str], args: Any, kwargs: Any) -> list[tuple[str, int]]:
    """Return the places, and their numbers, on which a call may hold the locks of its *names*."""
    options = lock_of(task).options
    try:
        limits = options.limits(names, args, kwargs)
    except LockKeyError:  # some were sent, and it is not known which; or the call makes no number
        limits = dict.fromkeys(names, options.most_places)
    return [
        (place_name(name, place), place) for name, limit in limits.items() for place in range(limit)
    ]


def lock_of(task: Any) -> TaskLock:
    """The same object for every thread."""
    attributes: dict[str, Any] = task.__dict__
    found: TaskLock | None = attributes.get(KEY)
    return found or attributes.setdefault(KEY, TaskLock(task))


def wait_until_bound(task: Any) -> None:
    """
    Wait while another thread binds *task* to its app, its annotations included.

    Celery registers a task before it binds it, and hands it to a second thread in between.
    """
    ends = time.monotonic() + BINDING
    while task.app and task.request_stack is None:  # the app binds what no thread has begun to bind
        if time.monotonic() > ends:
            raise RuntimeError(f"task {task.name!r} was not bound to its app within {BINDING:g} s")
        time.sleep(0.001)
