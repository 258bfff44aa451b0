"""
Lock names of a task, made from its arguments: the same on client and worker.

By default a name is the task's name and a digest of its bound arguments; a template or
a callable is the whole name. All checks of what the author of a task wrote happen once,
in :meth:`LockName.of_task`; what is left for each call is binding and encoding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from celery_redlock.errors import LockKeyError
from celery_redlock.lock.records import own_name
from celery_redlock.process.log import get_logger
from celery_redlock.task.naming.arguments import Parameters, Task, misfit
from celery_redlock.task.naming.canonical import NotCarried, canonical, json_key
from celery_redlock.task.naming.template import Field, delimited, endings, pieces

__all__ = ["LockKey", "LockName", "Names"]

logger = get_logger(__name__)

_DIGEST_LENGTH = 32  # hex digits, 128 bits: no two calls meet by chance
#: Most names of one call: each is a round to all nodes before the task begins.
MOST_NAMES = 10
_WAY_OUT = "say with unique_on=(...) which arguments make the key, or give a lock_key"


Names = str | tuple[str, ...]
"""What names the lock of a call: one name, or several that are taken together."""

LockKey = str | tuple[str, ...] | Callable[..., Names] | None
"""
The option ``lock_key``: nothing, a template, several, or ``(task, args, kwargs)`` -> names, which
may take ``headers``, too.
"""

Maker = Callable[[Sequence[Any], Mapping[str, Any], Mapping[str, Any]], Names]


@dataclass(frozen=True, slots=True)
class LockName:
    """
    The lock names of one task; built once for each task class.

    Attributes:
        make: Positional and keyword arguments, headers -> lock name, not yet checked.
        is_computed: Whether code of the user's makes it, which may see more than its arguments.
        is_default: Whether it is the default name, which headers of the app's choice are part of.
    """

    task: str
    make: Maker
    is_computed: bool = False
    is_default: bool = False

    @classmethod
    def of_task(
        cls,
        task: Task,
        *,
        lock_key: LockKey = None,
        unique_on: Iterable[str] | str | None = None,
    ) -> LockName:
        """Check the options of *task*; ConfigurationError if they do not fit together or to it."""
        if lock_key is not None and unique_on is not None:
            raise misfit(
                task.name,
                f"lock_key={lock_key!r} is the whole name, so unique_on={unique_on!r} "
                "has nothing to choose; drop one of them",
            )
        if lock_key is None:
            return cls(task.name, _digest_maker(task, unique_on), is_default=True)
        if isinstance(lock_key, str):
            return cls(task.name, _template_maker(task, lock_key))
        if isinstance(lock_key, (tuple, list)):
            return cls(task.name, _tuple_maker(task, lock_key))
        if callable(lock_key):
            return cls(task.name, _calling_maker(task, lock_key), is_computed=True)
        raise misfit(
            task.name,
            f"lock_key={lock_key!r} is neither a template, nor several, nor a callable "
            '(task, args, kwargs) -> str; write e.g. lock_key="report:{user_id}"',
        )

    def name(
        self,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None = None,
    ) -> Names:
        """
        Return the lock name of one call, or its names; raises LockKeyError.

        *headers* are those of the user alone; of a default name those that are part of it.
        """
        names = self.make(args or (), kwargs or {}, headers or {})
        if isinstance(names, str):
            self._check(names)
            return own_name(names)
        if len(names) > MOST_NAMES:
            raise LockKeyError(
                f"Task {self.task!r}: lock_key gave {len(names)} names; a call may have "
                f"{MOST_NAMES} at most"
            )
        for name in names:
            self._check(name)
        if len(set(names)) < len(names):
            raise LockKeyError(f"Task {self.task!r}: lock_key gave the same name more than once")
        return tuple(map(own_name, names))

    def _check(self, name: str) -> None:
        if not name:
            raise LockKeyError(f"Task {self.task!r}: lock_key gave an empty lock name")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise LockKeyError(
                f"Task {self.task!r}: lock_key gave a lock name with lone surrogates"
            ) from None


def _digest_maker(task: Task, unique_on: Iterable[str] | str | None) -> Maker:
    parameters = Parameters.of_task(task)
    names = sorted(parameters.names if unique_on is None else _chosen(parameters, unique_on))
    keys = [(name, json_key(name)) for name in names]

    def make(args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> str:
        values = parameters.bind(args, kwargs)
        if not names and not headers:
            return parameters.task
        texts = [
            f"{key}:{_entry(parameters, name, values[name])}"
            for name, key in keys
            if name in values
        ]
        digested = f"{{{','.join(texts)}}}{_of_headers(parameters.task, headers)}"
        digest = sha256(digested.encode()).hexdigest()
        return f"{parameters.task}:{digest[:_DIGEST_LENGTH]}"

    return make


def _chosen(parameters: Parameters, unique_on: object) -> set[str]:
    option = f"unique_on={unique_on!r}"
    if isinstance(unique_on, str):
        raise misfit(parameters.task, f"{option} is one str; write ({unique_on!r},)")
    names: list[Any] = list(unique_on) if isinstance(unique_on, Iterable) else [unique_on]
    for name in names:
        if not isinstance(name, str):
            raise misfit(parameters.task, f"{option} must be a tuple of argument names")
        parameters.check(name, option)
    return set(names)


def _of_headers(task: str, headers: Mapping[str, Any]) -> str:
    try:
        return canonical(dict(headers)) if headers else ""
    except NotCarried as error:
        raise LockKeyError(
            f"Task {task!r}: header `{error.path}` {error.reason} and cannot be part of a lock "
            "name; see redlock_key_headers"
        ) from None


def _entry(parameters: Parameters, name: str, value: object) -> str:
    try:
        if name in parameters.models:
            value = parameters.validated(name, value)
        return canonical(value)
    except NotCarried as error:
        raise LockKeyError(
            f"Task {parameters.task!r}: argument `{name}{error.path}` {error.reason} and "
            f"cannot be part of a lock name; {_WAY_OUT}"
        ) from None


def _template_maker(task: Task, template: str) -> Maker:
    parameters = Parameters.of_task(task)
    parts = pieces(task.name, template)
    for part in parts:
        if isinstance(part, Field):
            parameters.check(part.root, f"lock_key={template!r}")
    ends = endings(parts)
    if "" in ends:
        logger.warning(
            "Task %r: nothing in lock_key=%r shows where a field ends and the next begins, so two "
            "calls may share a name; put a character between them, like ':', that is no letter, "
            "digit or percent sign",
            task.name,
            template,
        )

    def make(args: Sequence[Any], kwargs: Mapping[str, Any], _: Mapping[str, Any]) -> str:
        values = parameters.bind(args, kwargs)
        return "".join(
            [
                part if isinstance(part, str) else delimited(part.render(parameters, values), end)
                for part, end in zip(parts, ends, strict=True)
            ]
        )

    return make


def _tuple_maker(task: Task, templates: Sequence[object]) -> Maker:
    if not templates or not all(isinstance(one, str) for one in templates):
        raise misfit(task.name, f"lock_key={templates!r} must be templates, one at least")
    if len(templates) > MOST_NAMES:
        raise misfit(task.name, f"lock_key has {len(templates)} templates, {MOST_NAMES} at most")
    makers = [_template_maker(task, str(one)) for one in templates]

    def make(args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Names:
        return tuple(str(maker(args, kwargs, headers)) for maker in makers)

    return make


def _calling_maker(task: Task, lock_key: Callable[..., object]) -> Maker:
    # A function among a task's class attributes comes back bound to the task.
    if inspect.ismethod(lock_key) and lock_key.__self__ is task:
        lock_key = lock_key.__func__
    takes_headers = _check_callable(task, lock_key)

    def make(args: Sequence[Any], kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> Names:
        more = {"headers": dict(headers)} if takes_headers else {}
        try:
            name = lock_key(task, tuple(args), dict(kwargs), **more)
        except Exception as error:
            raise LockKeyError(
                f"Task {task.name!r}: its lock_key raised {type(error).__name__}"
            ) from error
        if isinstance(name, str):
            return str.__str__(name)
        if isinstance(name, (tuple, list)) and name and all(isinstance(n, str) for n in name):
            return tuple(map(str.__str__, name))
        raise LockKeyError(
            f"Task {task.name!r}: its lock_key returned {type(name).__qualname__}, not str or a "
            "tuple of them"
        )

    return make


def _check_callable(task: Task, lock_key: Callable[..., object]) -> bool:
    """Return whether *lock_key* takes headers, or raise if it cannot be called."""
    try:
        signature = inspect.signature(lock_key)
        takes_headers = "headers" in signature.parameters
        signature.bind(task, (), {}, **({"headers": {}} if takes_headers else {}))
    except TypeError as error:
        raise misfit(
            task.name, f"lock_key={lock_key!r} must take (task, args, kwargs[, headers]): {error}"
        ) from None
    except ValueError:
        return False  # written in C, without a signature; the first call will tell
    return takes_headers
