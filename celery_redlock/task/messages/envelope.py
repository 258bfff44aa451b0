"""
The header ``redlock`` of a message, a small JSON object.

    publisher --> written by `Envelope.header` --> parsed by `Envelope.of`, in a worker's parent
                                                   process and in the child alike

It is read from the message's own headers. ``request.headers`` may be something else: a library
that nests a dict called ``headers`` in them makes Celery take that for all there is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from celery_redlock.lock.records import is_short_name
from celery_redlock.lock.scripts.scripting import LARGEST
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.messages.slot import Slot
from celery_redlock.task.messages.waiting import Waiting
from celery_redlock.task.naming.keys import MOST_NAMES

__all__ = ["HEADER", "Envelope", "fresh_publish_id"]

HEADER = "redlock"
VERSION = 1
#: Most times a policy may reschedule a task; larger numbers are forged.
MOST_RESCHEDULES = 2**31 - 1
PUBLISH_ID = re.compile(r"[0-9a-f-]{0,36}")
WORKER = re.compile(r".{1,255}")
EXECUTION_ID = re.compile(r"[0-9a-f]{32}")


class Envelope(NamedTuple):
    """
    The fields of the header.

    Attributes:
        publish_id: Of the publish that made the message; a copy that this package publishes in
            its place has the same. None for a message that was not published through the class;
            empty for a copy of one that the broker had delivered again.
        previous: Id of the execution whose body published this one under its own task id.
        reschedules: How often a policy has rescheduled the task.
        worker: Name of the only worker that is to run it: a copy of a broadcast task goes to all of
            them again.
        debounced: Number of a debounced call, which a newer one supersedes; 0 for any other.
        names: Its lock names, as they are in keys, where code of the user's has made them: in a
            worker's main process it may see something else.
        again: Whether it is a copy of a message that the broker had delivered again.
    """

    publish_id: str | None = None
    previous: str | None = None
    reschedules: int = 0
    reservation: Reservation | None = None
    slot: Slot | None = None
    waiting: Waiting | None = None
    worker: str | None = None
    debounced: int = 0
    names: tuple[str, ...] = ()
    again: bool = False

    @classmethod
    def of(cls, header: Any, task_id: Any) -> Envelope:
        """
        Parse the header of a message of the task *task_id*; empty if absent or malformed.

        Also if it names another task: tracing libraries, for example, pass headers on.
        A malformed field counts as absent, alone: anybody can publish.
        """
        if not (type(header) is dict and type(task_id) is str):
            return NOTHING
        if header.get("task_id") != task_id or type(header.get("v")) is not int:
            return NOTHING
        found = {}
        for field, (attribute, parse) in PARSERS.items():
            if field in header:
                found[attribute] = parse(header[field])
        return cls(**found)

    def header(self, task_id: str) -> dict[str, Any]:
        fields = {
            "id": self.publish_id,
            "previous": self.previous,
            "reschedules": self.reschedules or None,
            "reservation": self.reservation and self.reservation.parts,
            "slot": self.slot and self.slot.parts,
            "waiting": self.waiting and self.waiting.parts,
            "worker": self.worker,
            "debounced": self.debounced or None,
            "names": list(self.names) or None,
            "again": self.again or None,
        }
        said = {field: value for field, value in fields.items() if value is not None}
        return {HEADER: {"v": VERSION, "task_id": task_id, **said}}


NOTHING = Envelope()


def fresh_publish_id() -> str:
    return os.urandom(16).hex()


def text(pattern: re.Pattern[str]) -> Callable[[Any], str | None]:
    return lambda value: value if type(value) is str and pattern.fullmatch(value) else None


def count(most: int) -> Callable[[Any], int]:
    return lambda value: value if type(value) is int and 0 < value <= most else 0


def short_names(value: Any) -> tuple[str, ...]:
    if not (isinstance(value, (list, tuple)) and 0 < len(value) <= MOST_NAMES):
        return ()
    return tuple(value) if all(map(is_short_name, value)) else ()


#: Field of the header -> attribute of the envelope, and what parses the one to the other.
PARSERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "id": ("publish_id", text(PUBLISH_ID)),
    "previous": ("previous", text(EXECUTION_ID)),
    "reschedules": ("reschedules", count(MOST_RESCHEDULES)),
    "reservation": ("reservation", Reservation.of),
    "slot": ("slot", Slot.of),
    "waiting": ("waiting", Waiting.of),
    "worker": ("worker", text(WORKER)),
    "debounced": ("debounced", count(LARGEST)),
    "names": ("names", short_names),
    "again": ("again", lambda value: value is True),
}
