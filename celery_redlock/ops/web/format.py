"""
How what others wrote is shown: harmless, bounded, and readable. The templates' filters.

Names, hosts and reasons come from the nodes, so anybody who may write there chose them. A
template escapes them for HTML; here they are kept from garbling the page by other means.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_redlock import words
from celery_redlock.words import duration

__all__ = ["FILTERS", "Moment", "moment", "seconds", "text", "visible"]

#: Characters of a text that are shown in a table, and where there is room.
SHORT, LONG = 80, 1000
#: A later time than this is somebody's mistake [s, Unix time]: the year 2100.
LATEST = 4_102_444_800.0


class Moment(NamedTuple):
    """
    A time.

    Attributes:
        ago: How long ago, in words.
        exact: In UTC, for people.
        iso: In UTC, for programs.
    """

    ago: str
    exact: str
    iso: str


def visible(text: str) -> str:
    r"""
    Return *text* with what cannot be seen written as ``\u202e``.

    So controls, line breaks, marks that turn the direction of writing, and spaces of no width.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else escaped(char) for char in text)


def escaped(char: str) -> str:
    """Return *char* by its number."""
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


def text(value: Any, longest: int = SHORT) -> str:
    """Return *value* to be shown; "" for what is no plain value."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return ""
    return cut(visible(str(value)), longest)


def cut(text: str, longest: int) -> str:
    """Return *text*, or its begin and its end: names of one task begin alike."""
    if len(text) <= longest:
        return text
    end = longest // 3
    return f"{text[: longest - end - 1]}…{text[-end:]}"


def number(value: Any) -> float | None:
    """Return *value* if it is a number that can be a time or a count, None if not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= LATEST else None


def seconds(value: Any) -> str:
    """Return a length of time [s] in words; "" for what is none."""
    length = number(value)
    if length is None:
        return ""
    if 0 < length < 1:
        return f"{max(1, round(length * 1000))} ms"
    return duration(length)


def moment(value: Any, now: float) -> Moment | None:
    """Return the time *value* [s, Unix time] as seen from *now*; None for what is none."""
    at = number(value)
    if at is None:
        return None
    # Clocks of hosts differ a little; nothing is told of before it happened.
    ago = duration(float(round(max(0.0, now - at))))
    iso = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
    return Moment(ago, words.moment(at), iso)


FILTERS = {"text": text, "visible": visible, "seconds": seconds}
