"""What the message of a periodic task says of the slot that it was published for."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from celery_redlock.task.options import OVERLAP, LockOptions

__all__ = ["HEADER", "Slot"]

#: Header that carries the name of the entry, the slot, what is done about overlaps, and the id
#: of the task that it was published for.
HEADER = "redlock_slot"
#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
LONGEST_ENTRY = 200
#: How long the marker of a run that waits stands by itself [s]. If its message outlives that, a
#: second one may be published; if it was never published, the next one is after so long.
BUFFERED_FOR = 300.0


@dataclass(frozen=True)
class Slot:
    """
    A moment at which an entry of a schedule is due.

    Attributes:
        entry: Name of the entry.
        due: When [s, Unix time, whole milliseconds].
        overlap: One of `OVERLAP`.
    """

    entry: str
    due: float
    overlap: str = "skip"

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None) -> Slot | None:
        """
        Return what *headers* of a message say; None if it is nothing, or no sense.

        Nor if they speak of another task: headers are handed on, by those who trace for example.
        """
        told = headers.get(HEADER) if isinstance(headers, Mapping) else None
        if not (isinstance(told, (list, tuple)) and len(told) == 4):  # noqa: PLR2004
            return None
        if not all(isinstance(part, str) for part in told):
            return None
        entry, due, overlap, owner = told
        if owner != task_id or overlap not in OVERLAP:
            return None
        if not entry or not WELL_FORMED.fullmatch(due) or re.search("[\ud800-\udfff]", entry):
            return None
        try:
            moment = datetime.fromisoformat(due)
        except ValueError:
            return None
        return cls(entry, moment.timestamp(), overlap)

    @property
    def moment(self) -> datetime:
        """When it is due, in UTC."""
        return datetime.fromtimestamp(self.due, timezone.utc)

    def header(self, task_id: str) -> dict[str, Any]:
        """Return what the message of its task carries along."""
        due = self.moment.isoformat(timespec="milliseconds")
        return {HEADER: [self.entry, due, self.overlap, task_id]}

    @property
    def info(self) -> dict[str, Any]:
        """What the run tells others of itself."""
        return {"slot": [self.entry[:LONGEST_ENTRY], self.due]}

    def is_run_of_entry(self, holder: Mapping[str, Any]) -> bool:
        """Return whether *holder*, as in `LockTaken.holder`, is a run of this entry."""
        told = holder.get("slot")
        return isinstance(told, list) and told[:1] == [self.entry[:LONGEST_ENTRY]]

    def task_id(self, beat: str) -> str:
        """Return the id of its task: the same wherever it is published by schedulers of *beat*."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{beat}\0{self.entry}\0{self.due:.3f}"))

    @property
    def is_buffered(self) -> bool:
        """Whether one run may wait for the one before it."""
        return self.overlap == "buffer_one"

    def adjust(self, options: LockOptions) -> LockOptions:
        """
        Return the *options* of a task for a run of this slot.

        With ``"buffer_one"`` there is one that runs and one that waits for it: what a task has
        whose duplicates are merged into the next run.
        """
        if not self.is_buffered:
            return options
        return replace(
            options, unique_until="finished", on_duplicate="rerun", unique_for=BUFFERED_FOR
        )
