"""
An event as a sentence, for all that show events to a person.

It is made of the event's record (`celery_redlock.observers.records`), in the words of its class. So
the log, ``redlock tail``, the page and Grafana's annotations say the same.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_redlock.events import KINDS, Event
from celery_redlock.events.wording import Record

__all__ = ["Wording", "kind_of", "sentence", "wording"]


class Wording(NamedTuple):
    """How an event is shown: see `celery_redlock.events.Event`."""

    word: str
    mark: str


def kind_of(record: Record) -> type[Event]:
    """Return the event's class; `Event` for one that this version does not know."""
    name = record.get("event")
    return KINDS.get(name, Event) if isinstance(name, str) else Event


def sentence(record: Record) -> str:
    kind = kind_of(record)
    what, why = kind.what(record), kind.why(record)
    if record.get("report"):
        what = f"{kind.would(record) or what} (report mode)"
    return f"{what}: {why}" if why else what


def wording(record: Record) -> Wording:
    kind, name = kind_of(record), record.get("event")
    word = kind.word or (name if isinstance(name, str) and name else "?")
    if not record.get("report"):
        return Wording(word, kind.mark)
    return Wording(f"report: {word}", "warn" if kind.would(record) else "plain")
