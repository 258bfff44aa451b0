"""What the journal tells, in words: why a task did not run, what it lost, how nodes were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.ops.web.words import Moment, Text, moment, text_of
from celery_redlock.reading.sentences import sentence, wording

__all__ = ["Happening", "happening"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Happening:
    """
    One record of the journal.

    Attributes:
        at: When.
        what: In a word or two.
        mark: ``"bad"``, ``"warn"`` or ``"plain"``.
        sentence: What happened, and why.
        name: Lock name, or the node or entry that it is about.
        task: Name of the task.
        task_id: Its id.
        host: Where it was written.
        pid: By which process.
        why: Why it did; "" where there is no more to say.
    """

    at: Moment | None
    what: str
    mark: str
    sentence: Text
    name: Text
    task: Text
    task_id: Text
    host: Text
    pid: Text
    why: Text


def happening(record: Record, now: float) -> Happening:
    """Return *record* as it is shown at the time *now* [s, Unix time]."""
    told = wording(record)
    about = record.get("name") or record.get("node") or record.get("entry")
    return Happening(
        at=moment(record.get("at"), now),
        what=text_of(told.word, 30).short,
        mark=told.mark,
        sentence=text_of(sentence(record), 600),
        name=text_of(about),
        task=text_of(record.get("task")),
        task_id=text_of(record.get("task_id"), 40),
        host=text_of(record.get("host"), 40),
        pid=text_of(record.get("pid"), 20),
        why=text_of(told.why(record), 400),
    )
