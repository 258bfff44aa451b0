"""
Arguments of a call by name, as the body of the task sees them.

That is the body's own signature, seen through the wrappers Celery puts on it, and the
models that Celery makes of arguments of tasks with ``pydantic=True``.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from celery_redlock.errors import ConfigurationError, LockKeyError
from celery_redlock.task.naming.canonical import path_step

__all__ = ["Parameters", "Task", "misfit"]


class Task(Protocol):
    """A Celery task, as far as names depend on it."""

    name: str
    run: Callable[..., Any]
    app: Any


@dataclass(frozen=True, slots=True)
class Parameters:
    """
    The parameters of one task, and how arguments are bound to them.

    Attributes:
        signature: Of the body, without ``self``.
        rest: Name of the ``**kwargs`` parameter, if there is one.
        plain: Its parameters, where each may be given by position or by name; else empty. A call
            that gives every one of them once needs no signature to be bound.
        models: Parameter -> pydantic model, for those that Celery validates.
        context: What Celery hands to the validators of these models.
    """

    task: str
    signature: inspect.Signature
    rest: str | None
    plain: Mapping[str, None]
    models: Mapping[str, Any]
    context: Mapping[str, Any]

    @classmethod
    def of_task(cls, task: Task) -> Parameters:
        # A bound method hides `self`; what it wraps does not.
        signature = inspect.signature(inspect.unwrap(task.run, stop=inspect.ismethod))
        rest = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        wrapper = inspect.unwrap(task.run, stop=_is_pydantic_wrapper)
        models, context = {}, {}
        if _is_pydantic_wrapper(wrapper):
            models = _models(wrapper, signature)
            context = {"celery_app": task.app, "celery_task_name": task.name}
            context = {**_validation_context(wrapper), **context}
        is_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in signature.parameters.values())
        plain = dict.fromkeys(signature.parameters) if is_plain else {}
        return cls(task.name, signature, next(iter(rest), None), plain, models, context)

    @property
    def names(self) -> list[str]:
        return list(self.signature.parameters)

    def check(self, name: str, option: str) -> None:
        """Raise ConfigurationError if *option* names an argument that this task cannot have."""
        if name in self.signature.parameters or self.rest is not None:
            return
        near = get_close_matches(name, self.names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = ", ".join(self.names) or "none"
        raise misfit(
            self.task,
            f"{option} names {name!r}, which is no parameter; {hint}parameters: {names}",
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """
        Return argument values by name, defaults filled in, keywords of ``**kwargs`` too.

        Where a keyword of ``**kwargs`` has the name of a parameter, the parameter wins. Raises
        LockKeyError for arguments that do not fit.
        """
        if self.plain:
            given = {**dict(zip(self.plain, args, strict=False)), **kwargs}
            if given.keys() == self.plain.keys() and len(args) + len(kwargs) == len(given):
                return given
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


def misfit(task: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"Task {task!r}: {what}")


# --- tasks with pydantic=True -------------------------------------------------------


def _is_pydantic_wrapper(function: object) -> bool:
    home: dict[str, Any] = getattr(function, "__globals__", {})
    return home.get("__name__") == "celery.app.base"


def _models(wrapper: Any, signature: inspect.Signature) -> dict[str, Any]:
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
