"""
A ``lock_key`` template: parsed once, its fields printed for each call.

A template is written as for ``str.format``, but its fields are named arguments, without
private names, ``!r``, ``!a`` and fields inside format specs; and it prints only values
that have the same text in every process.

Two calls must not share a name by accident: ``{a}:{b}`` would be one for ``x:y`` and ``z``, and
for ``x`` and ``y:z``. So the character that ends a field is percent-encoded where a value holds it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from string import Formatter
from typing import Any

from celery_redlock.errors import LockKeyError
from celery_redlock.task.naming.arguments import Parameters, misfit
from celery_redlock.task.naming.canonical import NotCarried, json_key, plain

__all__ = ["Field", "delimited", "endings", "pieces"]

_FIELD = re.compile(r"([^\W\d]\w*)((?:\.[^\W\d]\w*|\[[^\[\]]+\])*)")
#: Digits that a format spec may write out where the number itself is short, like 1E+100000000.
_LONGEST_NUMBER = 1000
_STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


@dataclass(frozen=True, slots=True)
class Field:
    """
    One ``{...}`` of a template.

    Attributes:
        text: As written, without braces and format spec.
        root: The argument it starts from.
        steps: ``(attribute, "")`` or ``("", item)``, from the argument inwards.
    """

    text: str
    root: str
    steps: tuple[tuple[str, str], ...]
    spec: str
    option: str = "lock_key"

    def render(self, parameters: Parameters, values: Mapping[str, Any]) -> str:
        try:
            value = parameters.validated(self.root, values[self.root])
            for attribute, item in self.steps:
                value = _inner(value, attribute, item)
            value = plain(value)
            if not _grows(value, self.spec):
                return format(value, self.spec)
            why = f"is too large or too small for the format {self.spec!r}"
        except LockKeyError:
            raise
        except NotCarried as error:
            why = f"{error.reason}; pick an attribute or item that is text or a number"
        except Exception as error:  # noqa: BLE001 - properties are anybody's code
            why = f"cannot be read ({type(error).__name__}); is it in every call?"
        raise LockKeyError(
            f"Task {parameters.task!r}: field {{{self.text}}} of {self.option} {why}"
        ) from None


def pieces(task: str, template: str, option: str = "lock_key") -> list[str | Field]:
    """Parse the *template* of *option* into literal text and fields, in their order."""
    if not template:
        raise misfit(task, "lock_key='' is empty; leave it out for task name and arguments")
    found: list[str | Field] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            found.append(literal)
            if name is not None:
                found.append(_field(name, spec or "", conversion, option))
    except ValueError as error:
        raise misfit(task, f"{option}={template!r} is not a template: {error}") from None
    return found


def endings(parts: Sequence[str | Field]) -> list[str | None]:
    """
    Return for each of *parts* the character that tells where it ends.

    None for literal text and for the last field, which nothing can be taken for; "" for a field
    that runs into the next one: what stands between them may as well be a part of its value, or
    of what is encoded in it.
    """
    found: list[str | None] = []
    between, has_next = "", False
    for part in reversed(parts):
        if isinstance(part, str):
            between = part + between
            found.append(None)
        else:
            ends = next((char for char in between if not char.isalnum() and char != "%"), "")
            found.append(ends if has_next else None)
            between, has_next = "", True
    return found[::-1]


def delimited(text: str, end: str | None) -> str:
    """Encode percent signs in *text*, and the character that is to *end* it."""
    if not end or not ("%" in text or end in text):
        return text
    code = "".join(f"%{byte:02X}" for byte in end.encode(errors="surrogatepass"))
    return text.replace("%", "%25").replace(end, code)


def _grows(value: Any, spec: str) -> bool:
    """Whether *spec* writes out a number that is much shorter as it is."""
    is_number = isinstance(value, Decimal) and value.is_finite()
    return bool(spec) and is_number and abs(value.adjusted()) > _LONGEST_NUMBER


def _field(name: str, spec: str, conversion: str | None, option: str) -> Field:
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
    return Field(name, match[1], tuple(steps), spec, option)


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
