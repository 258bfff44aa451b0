"""The slot that a periodic task was published for, as its message carries it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from celery_redlock.task.options import OVERLAP, LockOptions

__all__ = ["Slot"]

#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00")
LONGEST_ENTRY = 200
LONGEST_NAME = 100_000
#: How long the reservation of a run that waits lasts by itself [s]. If its message outlives that,
#: a second one may be published; if it was never published, the next one is after so long.
BUFFERED_FOR = 300.0


@dataclass(frozen=True)
class Slot:
    """A moment [s, Unix time, whole milliseconds] at which an entry of a schedule is due."""

    entry: str
    due: float
    overlap: str = "skip"

    @classmethod
    def of(cls, parts: Any) -> Slot | None:
        if not (isinstance(parts, (list, tuple)) and len(parts) == 3):  # noqa: PLR2004
            return None
        if not all(isinstance(part, str) for part in parts):
            return None
        entry, due, overlap = parts
        if overlap not in OVERLAP or len(entry) > LONGEST_NAME:
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
        return datetime.fromtimestamp(self.due, timezone.utc)

    @property
    def parts(self) -> list[str]:
        return [self.entry, self.moment.isoformat(timespec="milliseconds"), self.overlap]

    @property
    def info(self) -> dict[str, Any]:
        return {"slot": [self.entry[:LONGEST_ENTRY], self.due]}

    def is_run_of_entry(self, holder: Mapping[str, Any]) -> bool:
        slot = holder.get("slot")
        return isinstance(slot, list) and slot[:1] == [self.entry[:LONGEST_ENTRY]]

    def task_id(self, beat: str) -> str:
        """The same wherever it is published by schedulers of *beat*."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{beat}\0{self.entry}\0{self.due:.3f}"))

    @property
    def is_buffered(self) -> bool:
        return self.overlap == "buffer_one"

    def adjust(self, options: LockOptions) -> LockOptions:
        """
        Adjust the *options* of a task for a run of this slot.

        With ``"buffer_one"`` there is one that runs and one that waits for it: what a task has
        whose duplicates are merged into the next run.
        """
        if not self.is_buffered:
            return options
        return replace(
            options, unique_until="finished", on_duplicate="rerun", unique_for=BUFFERED_FOR
        )
