"""
Text of an argument's value that its journey to a worker does not change.

The canonical text of a value is the JSON that kombu would send for *what a worker
reads*, compact and with sorted keys. JSON alone tells ``1``, ``1.0``, ``"1"``,
``true`` and ``null`` apart and makes tuples lists; kombu's envelopes
``{"__type__": "uuid", "__value__": ...}`` are the tags of all other types. A dict
that merely looks like an envelope is opened by the worker, so it is opened here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from decimal import Decimal
from enum import Enum
from json import JSONEncoder
from typing import Any
from uuid import UUID

from kombu.utils import json as kombu_json

__all__ = ["NotCarried", "canonical", "json_key", "path_step", "plain"]

Plain = str | int | float | Decimal | UUID | date | time | None
"""What a template may print: the same text in every process (datetime is a date)."""

_SCALARS = (str, int, float, type(None))
_PRINTABLE = (*_SCALARS, Decimal, UUID, date, time)
_UNCHANGED = frozenset({int, float, bool, type(None)})
_ENVELOPE = {"__type__", "__value__"}
_SECRET = "*" * 10  # what pydantic writes in place of a SecretStr

_json = JSONEncoder().encode
_in_its_place = kombu_json.JSONEncoder().default


class NotCarried(Exception):
    """
    A value has no canonical text, because no worker could read it.

    Attributes:
        reason: What is wrong, as the end of a sentence; never holds the value.
        path: Where, from the outermost value on, e.g. ``.items[3]``; empty for itself.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def inside(self, step: str) -> NotCarried:
        return NotCarried(self.reason, step + self.path)


def canonical(value: object) -> str:
    """
    Return the ASCII text that stands for *value* in a lock name; raises NotCarried.

    Equal for what kombu's JSON makes equal (tuple and list, ``{1: x}`` and
    ``{"1": x}``, a ``str`` enum and its value), different for all else. Dataclasses and
    pydantic models count as the dict of their fields.
    """
    try:
        return _text(value, ())
    except RecursionError:
        raise NotCarried("is nested too deeply") from None


def plain(value: object) -> Plain:
    """
    Return *value* as a worker reads it, if its ``str()`` is the same everywhere.

    Enums give their value: Python 3.10 to 3.13 do not agree on the text of an enum. Raises
    NotCarried for a container, bytes, or an object.
    """
    # Text with surrogate pairs arrives joined, so only ASCII is sure to stay as it is.
    if type(value) in _UNCHANGED or (type(value) is str and value.isascii()):
        return value  # type: ignore[return-value]
    if isinstance(value, Enum) and not isinstance(value, _SCALARS):
        return plain(value.value)
    read = _read(value)
    if not isinstance(read, _PRINTABLE):
        raise _foreign(value)
    return read


def json_key(key: object) -> str:
    if isinstance(key, str):
        return _json(key)
    if isinstance(key, _SCALARS):
        return f'"{_scalar(key)}"'
    raise NotCarried(f"has a key of type {type(key).__qualname__}")


def path_step(key: object) -> str:
    """
    Write *key* as a step of a path.

    Only what looks like the name of a field or an index is shown; any other key may be
    the caller's data, which error messages must not hold.
    """
    if type(key) is int:
        return f"[{key}]"
    return f".{key}" if isinstance(key, str) and key.isidentifier() else "[...]"


def _text(value: object, above: tuple[int, ...]) -> str:
    """*above* has the ids of the containers around *value*."""
    if isinstance(value, _SCALARS):
        return _scalar(value)
    if id(value) in above:
        raise NotCarried("contains itself")
    above = (*above, id(value))
    if isinstance(value, dict):
        return _dict_text(value, above)
    if isinstance(value, (list, tuple)):
        return _list_text(value, above)
    return _text(_sent(value), above)


def _scalar(value: object) -> str:
    try:
        return int.__repr__(value) if type(value) is int else _json(value)
    except ValueError:  # sys.set_int_max_str_digits
        raise NotCarried("is an integer too long for JSON") from None


def _list_text(value: list[Any] | tuple[Any, ...], above: tuple[int, ...]) -> str:
    texts = [_item_text(item, above, at) for at, item in enumerate(value)]
    return f"[{','.join(texts)}]"


def _dict_text(value: dict[Any, Any], above: tuple[int, ...]) -> str:
    if value.keys() == _ENVELOPE:
        return _opened_text(value, above)
    texts: dict[str, str] = {}
    for key, item in value.items():
        name = json_key(key)
        if name in texts:
            raise NotCarried("has two keys that are one in JSON", path_step(key))
        texts[name] = _item_text(item, above, key)
    return "{" + ",".join([f"{name}:{texts[name]}" for name in sorted(texts)]) + "}"


def _item_text(item: object, above: tuple[int, ...], key: object) -> str:
    try:
        return _text(item, above)
    except NotCarried as error:
        raise error.inside(path_step(key)) from None


def _opened_text(envelope: dict[Any, Any], above: tuple[int, ...]) -> str:
    """
    Return the text of what a worker finds in *envelope*.

    Opened and closed once, because a worker sees the contents: ``" 1.0 "`` in a decimal
    envelope reads ``Decimal("1.0")``, and a type whose decoder gives a plain str *is*
    that str on the worker.
    """
    read = _read(envelope)
    if isinstance(read, (*_SCALARS, dict, list, tuple)):
        return _text(read, above)
    sent = _sent(read)
    if not (isinstance(sent, dict) and sent.keys() == _ENVELOPE):
        return _text(sent, above)
    tag, inner = _scalar(sent["__type__"]), _text(sent["__value__"], above)
    return f'{{"__type__":{tag},"__value__":{inner}}}'


def _read(value: object) -> object:
    try:
        return kombu_json.loads(kombu_json.dumps(value))
    except Exception:  # noqa: BLE001 - encoders and decoders are anybody's code
        raise _foreign(value) from None


def _sent(value: object) -> object:
    """Return what stands in a message for *value*, which JSON itself does not know."""
    try:
        return _in_its_place(value)
    except Exception:  # noqa: BLE001 - __json__ and registered encoders are anybody's code
        return _fields(value)


def _fields(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    # If nobody has imported pydantic, the value cannot be a model.
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    if model is not None and isinstance(value, model):
        return _model_fields(value)
    raise _foreign(value)


def _model_fields(model: Any) -> object:
    try:
        dumped: object = model.model_dump(mode="json")
    except Exception:  # noqa: BLE001 - serializers of a model are anybody's code
        raise NotCarried("is a model that pydantic cannot dump as JSON") from None
    if _SECRET in str(dumped):
        # Two different secrets would share one lock, and one task would be skipped.
        raise NotCarried("is a model with a secret that its JSON form masks")
    return dumped


def _foreign(value: object) -> NotCarried:
    if isinstance(value, Mapping) and value.keys() == _ENVELOPE:
        return NotCarried("is an envelope that kombu cannot open")
    return NotCarried(f"is of type {type(value).__qualname__}")
