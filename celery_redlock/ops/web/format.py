"""
Filters for templates: foreign text made harmless, bounded and readable, and with links.

Names, hosts and reasons come from the nodes, so anybody who may write there chose them. A
template escapes them for HTML; here they are kept from garbling the page by other means.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from flask import url_for
from markupsafe import Markup, escape

from celery_redlock import words
from celery_redlock.process.log import printable
from celery_redlock.words import duration

__all__ = ["FILTERS", "linked", "moment", "seconds", "text", "visible"]

#: Characters of a text that are shown in a table, of a sentence, and where there is room.
SHORT, SENTENCE, LONG = 80, 600, 1000
#: A later time than this is somebody's mistake [s, Unix time]: the year 2100.
LATEST = 4_102_444_800.0


class Moment(NamedTuple):
    """A time: how long ago in words, and in UTC for people (``exact``) and programs (``iso``)."""

    ago: str
    exact: str
    iso: str


def visible(text: str) -> str:
    r"""
    Return *text* with what cannot be seen written as ``\u202e``.

    So controls, line breaks, marks that turn the direction of writing, and spaces of no width.
    """
    return "".join(char if char.isprintable() else escaped(ord(char)) for char in text)


def escaped(code: int) -> str:
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


def text(value: Any, longest: int = SHORT) -> str:
    """
    Return *value* to be shown; "" for what is no plain value.

    Of a long one its begin and its end are shown: names of one task begin alike.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    # A blank at an end would not be seen, nor a name that is nothing else.
    shown = re.sub("^ +| +$", lambda blanks: r"\u0020" * len(blanks[0]), visible(str(value)))
    end = longest // 3
    return shown if len(shown) <= longest else f"{shown[: longest - end - 1]}…{shown[-end:]}"


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= LATEST else None


def seconds(value: Any) -> str:
    """Return a length of time [s] in words; "" for what is none."""
    length = number(value)
    if length is None:
        return ""
    return f"{max(1, round(length * 1000))} ms" if 0 < length < 1 else duration(length)


def moment(value: Any) -> Moment | None:
    """Return the time *value* [s, Unix time]; None for what is none."""
    at = number(value)
    if at is None:
        return None
    # Clocks of hosts differ a little; nothing is shown as being in the future.
    ago = duration(float(round(max(0.0, time.time() - at))))
    return Moment(ago, words.moment(at), words.iso_moment(at))


def short(count: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 10 * size else f"{count // size}{unit}"
    return str(count)


FILTERS = {
    "counted": words.counted,
    "moment": moment,
    "seconds": seconds,
    "short": short,
    "text": text,
}


def linked(sentence: str, record: Mapping[str, Any]) -> Markup:
    """Return *sentence*, made of *record*, with links where it names what has a page."""
    shown = text(sentence, SENTENCE)
    pages = pages_of(record)
    # Longest first: the name of a task begins the name of its lock.
    names = "|".join(map(re.escape, sorted(pages, key=len, reverse=True)))
    if not names:
        return escape(shown)
    parts = (
        Markup('<a href="{}">{}</a>').format(pages[part], part) if part in pages else part
        for part in re.split(rf"(?<![\w.:-])({names})(?![\w-])", shown)
    )
    return Markup("").join(parts)


def pages_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what of *record* has a page: text in a sentence -> address."""
    holder = record.get("holder")
    found: dict[str, str] = {}
    for it in (record, holder if isinstance(holder, dict) else {}):
        for ident in filter(is_name, (it.get("task_id"), it.get("holder_id"))):
            found[visible(printable(ident))] = url_for("page", q=ident)
        if is_name(task := it.get("task")):
            found[visible(printable(task))] = url_for("task", name=task)
    if "task" in record and is_name(name := record.get("name")):  # else it is a beat's
        found[visible(repr(name)[1:-1])] = url_for("lock", name=name)
    return found


def is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
