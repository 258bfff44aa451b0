"""
Makes the lock name of a task from its arguments: the same on client and worker.

By default a name is the task's name and a digest of its bound arguments; a template or
a callable is the whole name. All checks of what the author of a task wrote happen once,
in :meth:`LockName.of_task`; what is left for each call is binding and encoding.

How one value is encoded does not belong here, see ``canonical``.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import sha256
from string import Formatter
from typing import Any, Protocol

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.task.canonical import NotCarried, canonical, json_key, path_step, plain

__all__ = ["LockKey", "LockName"]

_DIGEST_LENGTH = 32  # hex digits, 128 bits: no two calls meet by chance
_FIELD = re.compile(r"([^\W\d]\w*)((?:\.[^\W\d]\w*|\[[^\[\]]+\])*)")
_STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")
_WAY_OUT = "say with unique_on=(...) which arguments make the key, or give a lock_key"


class Task(Protocol):
    """What this room needs to know of a Celery task."""

    @property
    def name(self) -> str:
        """Registered name."""

    @property
    def run(self) -> Callable[..., Any]:
        """The body, bound."""

    @property
    def app(self) -> Any:
        """The Celery app."""


LockKey = str | Callable[[Any, tuple[Any, ...], dict[str, Any]], str] | None
"""The option ``lock_key``: nothing, a template, or ``(task, args, kwargs) -> str``."""

Maker = Callable[[Sequence[Any], Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class LockName:
    """
    Names the locks of one task; built once for each task class.

    Attributes:
        task: Name of the task.
        make: Positional and keyword arguments -> lock name, not yet checked.
    """

    task: str
    make: Maker

    @classmethod
    def of_task(
        cls,
        task: Task,
        *,
        lock_key: LockKey = None,
        unique_on: Iterable[str] | str | None = None,
    ) -> LockName:
        """
        Return how *task* names its locks.

        Args:
            task: A registered task.
            lock_key: Template or callable that makes the whole name; None: digest.
            unique_on: Names of the arguments that make the digest, ``()`` for none of
                them; None: all.

        Raises:
            ConfigurationError: The options make no sense together or for the parameters
                of this task.
        """
        if lock_key is not None and unique_on is not None:
            raise _misfit(
                task.name,
                f"lock_key={lock_key!r} is the whole name, so unique_on={unique_on!r} "
                "has nothing to choose; drop one of them",
            )
        if lock_key is None:
            return cls(task.name, _digest_maker(task, unique_on))
        if isinstance(lock_key, str):
            return cls(task.name, _template_maker(task, lock_key))
        if callable(lock_key):
            return cls(task.name, _calling_maker(task, lock_key))
        raise _misfit(
            task.name,
            f"lock_key={lock_key!r} is neither a template nor a callable "
            '(task, args, kwargs) -> str; write e.g. lock_key="report:{user_id}"',
        )

    def name(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> str:
        """
        Return the lock name of one call.

        Args:
            args: Positional arguments as published or as received; None: none.
            kwargs: Keyword arguments likewise.

        Returns:
            A name of at least one character, encodable as UTF-8.

        Raises:
            LockKeyError: The arguments do not fit the task, or what makes the name
                cannot be read or encoded.
        """
        name = self.make(args or (), kwargs or {})
        if not name:
            raise LockKeyError(f"Task {self.task!r}: lock_key gave an empty lock name")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise LockKeyError(
                f"Task {self.task!r}: lock_key gave a lock name with lone surrogates"
            ) from None
        return name


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    The parameters of one task, and how arguments are bound to them.

    Attributes:
        task: Name of the task.
        signature: Of the body, without ``self``.
        rest: Name of the ``**kwargs`` parameter, if there is one.
        models: Parameter -> pydantic model, for those that Celery validates.
        context: What Celery hands to the validators of these models.
    """

    task: str
    signature: inspect.Signature
    rest: str | None
    models: Mapping[str, Any]
    context: Mapping[str, Any]

    @classmethod
    def of_task(cls, task: Task) -> Parameters:
        """Return the parameters of *task*, seen through the wrappers Celery puts on it."""
        # A bound method hides `self`; what it wraps does not.
        signature = inspect.signature(inspect.unwrap(task.run, stop=inspect.ismethod))
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        wrapper = inspect.unwrap(task.run, stop=_is_pydantic_wrapper)
        models, context = {}, {}
        if _is_pydantic_wrapper(wrapper):
            models = _models(wrapper, signature)
            context = {"celery_app": task.app, "celery_task_name": task.name}
            context = {**_validation_context(wrapper), **context}
        return cls(task.name, signature, next(iter(rest), None), models, context)

    @property
    def names(self) -> list[str]:
        """Every parameter, in the order of the signature."""
        return list(self.signature.parameters)

    def check(self, name: str, option: str) -> None:
        """
        Make sure that *option* speaks of an argument this task can have.

        Raises:
            ConfigurationError: No parameter has this name, and there is no ``**kwargs``.
        """
        if name in self.signature.parameters or self.rest is not None:
            return
        near = get_close_matches(name, self.names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        told = ", ".join(self.names) or "none"
        raise _misfit(
            self.task,
            f"{option} speaks of {name!r}, which is no parameter; {hint}parameters: {told}",
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return argument values by name, defaults filled in, keywords of ``**kwargs`` too.

        Where a keyword of ``**kwargs`` has the name of a parameter, the parameter wins.

        Raises:
            LockKeyError: The arguments do not fit the signature.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # its text names parameters, never values
            raise LockKeyError(f"Task {self.task!r}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        return values if self.rest is None else {**values[self.rest], **values}

    def validated(self, name: str, value: object) -> object:
        """
        Return *value* as the body will see it: a model, if Celery makes one of it.

        Never stricter than the task: ``pydantic_strict`` is for the body to enforce.

        Raises:
            LockKeyError: The model refuses the value.
        """
        model = self.models.get(name)
        if model is None or value is None:
            return value
        try:
            return model.model_validate(value, strict=False, context=dict(self.context))
        except Exception as error:  # noqa: BLE001 - validators are anybody's code
            where, why = _first_complaint(error)
            raise LockKeyError(
                f"Task {self.task!r}: argument `{name}{where}` is refused by "
                f"{model.__name__} ({why})"
            ) from None


def _misfit(task: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"Task {task!r}: {what}")


# --- the default: task name and digest ----------------------------------------------


def _digest_maker(task: Task, unique_on: Iterable[str] | str | None) -> Maker:
    parameters = Parameters.of_task(task)
    names = sorted(parameters.names if unique_on is None else _chosen(parameters, unique_on))

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        values = parameters.bind(args, kwargs)
        if not names:
            return parameters.task
        texts = [_entry(parameters, name, values[name]) for name in names if name in values]
        digest = sha256(f"{{{','.join(texts)}}}".encode()).hexdigest()
        return f"{parameters.task}:{digest[:_DIGEST_LENGTH]}"

    return make


def _chosen(parameters: Parameters, unique_on: object) -> set[str]:
    """Return the names in *unique_on*, or raise if they are none."""
    option = f"unique_on={unique_on!r}"
    if isinstance(unique_on, str):
        raise _misfit(parameters.task, f"{option} is one str; write ({unique_on!r},)")
    names: list[Any] = list(unique_on) if isinstance(unique_on, Iterable) else [unique_on]
    for name in names:
        if not isinstance(name, str):
            raise _misfit(parameters.task, f"{option} must be a tuple of argument names")
        parameters.check(name, option)
    return set(names)


def _entry(parameters: Parameters, name: str, value: object) -> str:
    """Return the part of the digested text that one argument makes."""
    try:
        return f"{json_key(name)}:{canonical(parameters.validated(name, value))}"
    except NotCarried as error:
        raise LockKeyError(
            f"Task {parameters.task!r}: argument `{name}{error.path}` {error.reason} and "
            f"cannot be part of a lock name; {_WAY_OUT}"
        ) from None


# --- a template ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Field:
    """
    One ``{...}`` of a template.

    Attributes:
        text: As written, without braces and format spec.
        root: The argument it starts from.
        steps: ``(attribute, "")`` or ``("", item)``, from the argument inwards.
        spec: Format spec, as after the colon.
    """

    text: str
    root: str
    steps: tuple[tuple[str, str], ...]
    spec: str

    def render(self, parameters: Parameters, values: Mapping[str, Any]) -> str:
        """
        Return the text of this field for one call.

        Raises:
            LockKeyError: There is no such attribute or item, or it is nothing that has
                the same text in every process.
        """
        try:
            value = parameters.validated(self.root, values[self.root])
            for attribute, item in self.steps:
                value = _inner(value, attribute, item)
            return format(plain(value), self.spec)
        except LockKeyError:
            raise
        except NotCarried as error:
            why = f"{error.reason}; pick an attribute or item that is text or a number"
        except Exception as error:  # noqa: BLE001 - properties are anybody's code
            why = f"cannot be read ({type(error).__name__}); is it in every call?"
        raise LockKeyError(
            f"Task {parameters.task!r}: field {{{self.text}}} of lock_key {why}"
        ) from None


def _template_maker(task: Task, template: str) -> Maker:
    parameters = Parameters.of_task(task)
    pieces = _pieces(task.name, template)
    for piece in pieces:
        if isinstance(piece, Field):
            parameters.check(piece.root, f"lock_key={template!r}")

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        values = parameters.bind(args, kwargs)
        return "".join([p if isinstance(p, str) else p.render(parameters, values) for p in pieces])

    return make


def _pieces(task: str, template: str) -> list[str | Field]:
    """Return *template* in pieces, literal text and fields, in their order."""
    if not template:
        raise _misfit(task, "lock_key='' is empty; leave it out for task name and arguments")
    pieces: list[str | Field] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            pieces.append(literal)
            if name is not None:
                pieces.append(_field(name, spec or "", conversion))
    except ValueError as error:
        raise _misfit(task, f"lock_key={template!r} is no template: {error}") from None
    return pieces


def _field(name: str, spec: str, conversion: str | None) -> Field:
    """Return the parsed field, or raise ValueError that says what to write."""
    if not name or name[0].isdigit():
        raise ValueError(f"{{{name}}} is positional; name an argument")
    if conversion not in (None, "s"):
        raise ValueError(f"!{conversion} differs between processes; drop it")
    if "{" in spec:
        raise ValueError(f"the format spec of {{{name}}} has a field of its own")
    match = _FIELD.fullmatch(name)
    if match is None:
        raise ValueError(f"{{{name}}} is no argument with .attribute and [item] access")
    steps = _STEP.findall(match[2])
    private = [word for word in (match[1], *(step[0] for step in steps)) if word[:1] == "_"]
    if private:
        raise ValueError(f"{private[0]!r} in {{{name}}} is private")
    return Field(name, match[1], tuple(steps), spec)


def _inner(value: Any, attribute: str, item: str) -> Any:
    """
    Return what one step of a field leads to.

    A dict has items only: where a client had a model, the worker has its dict.
    """
    if isinstance(value, Mapping):
        key = attribute or item
        if key in value:
            return value[key]
        return {json_key(key): inner for key, inner in value.items()}[json_key(key)]
    return getattr(value, attribute) if attribute else value[int(item)]


# --- a callable ---------------------------------------------------------------------


def _calling_maker(task: Task, lock_key: Callable[..., object]) -> Maker:
    # A function among a task's class attributes comes back bound to the task.
    if inspect.ismethod(lock_key) and lock_key.__self__ is task:
        lock_key = lock_key.__func__
    _check_callable(task, lock_key)

    def make(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        try:
            name = lock_key(task, tuple(args), dict(kwargs))
        except Exception as error:
            raise LockKeyError(
                f"Task {task.name!r}: its lock_key raised {type(error).__name__}"
            ) from error
        if not isinstance(name, str):
            raise LockKeyError(
                f"Task {task.name!r}: its lock_key returned {type(name).__qualname__}, not str"
            )
        return str.__str__(name)

    return make


def _check_callable(task: Task, lock_key: Callable[..., object]) -> None:
    try:
        inspect.signature(lock_key).bind(task, (), {})
    except TypeError as error:
        raise _misfit(
            task.name, f"lock_key={lock_key!r} must take (task, args, kwargs): {error}"
        ) from None
    except ValueError:
        pass  # written in C, without a signature; the first call will tell


# --- tasks with pydantic=True -------------------------------------------------------


def _is_pydantic_wrapper(function: object) -> bool:
    """Tell whether Celery wrapped this function for ``pydantic=True``."""
    home: dict[str, Any] = getattr(function, "__globals__", {})
    return home.get("__name__") == "celery.app.base"


def _models(wrapper: Any, signature: inspect.Signature) -> dict[str, Any]:
    """Return the parameters that Celery validates, with their models."""
    try:
        hints = typing.get_type_hints(wrapper.__wrapped__)
    except (NameError, AttributeError, TypeError):
        hints = {}  # as Celery does: annotations that cannot be resolved do not count
    found = {
        name: _model(hints.get(name, parameter.annotation))
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    return {name: model for name, model in found.items() if model is not None}


def _model(annotation: Any) -> Any:
    """Return the model that *annotation* is, or is the Optional of; otherwise None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not types.NoneType]
        annotation = inner[0] if len(inner) == 1 else None
    # In Python 3.10 list[int] passes for a type, and issubclass() then trips over it.
    if not isinstance(annotation, type) or typing.get_origin(annotation) is not None:
        return None
    base = sys.modules["pydantic"].BaseModel  # imported by Celery's wrapper
    return annotation if issubclass(annotation, base) else None


def _validation_context(wrapper: Any) -> dict[str, Any]:
    """Return the task's ``pydantic_context``, which Celery keeps in a closure only."""
    cells = inspect.getclosurevars(wrapper).nonlocals
    if "validate_argument" in cells:  # Celery 5.7 and later
        cells = inspect.getclosurevars(cells["validate_argument"]).nonlocals
    return dict(cells.get("context") or {})


def _first_complaint(error: Any) -> tuple[str, str]:
    """Return path and kind of what pydantic found first; neither holds a value."""
    if not hasattr(error, "errors"):
        return "", type(error).__name__
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return "".join(path_step(part) for part in first["loc"]), first["type"]
