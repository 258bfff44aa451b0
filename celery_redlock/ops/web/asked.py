"""The address of a page: what it is asked for."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass

from celery_redlock.events import KINDS, kinds_in
from celery_redlock.reading.journal_view import OF_NODES, REFUSALS
from celery_redlock.reading.search import Search

__all__ = ["EVENTS", "TIMES", "Asked"]

#: Longest words that are searched. A name may be longer: a part of it would be another lock.
LONGEST, LONGEST_NAME = 200, 8192
#: In an address -> the events, and in words.
EVENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "": ((), "anything"),
    "refused": (REFUSALS, "what was refused, or lost its lock"),
    "nodes": (OF_NODES, "nodes"),
    **{it: ((it,), KINDS[it].word) for it in kinds_in("refused", "nodes", "beat")},
}
#: In an address -> how long ago [s], and in words.
TIMES: dict[str, tuple[float, str]] = {
    "": (0.0, "any time"),
    "15m": (900.0, "last 15 minutes"),
    "1h": (3600.0, "last hour"),
    "6h": (6 * 3600.0, "last 6 hours"),
    "1d": (86400.0, "last day"),
    "7d": (7 * 86400.0, "last week"),
}


@dataclass(frozen=True)
class Asked:
    """What a page is asked for in its address, which can be bookmarked and shared."""

    q: str = ""  # words that are searched
    event: str = ""  # one of `EVENTS`
    since: str = ""  # one of `TIMES`
    before: str = ""  # id of the record behind which the list of events begins; "" for all
    name: str = ""  # of the task or lock that the page is about; "" for the page of all

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Asked:
        """Return what the arguments of an address ask for; malformed ones are left out."""
        event, since = given.get("event", ""), given.get("since", "")
        return cls(
            q=given.get("q", "")[:LONGEST].strip(),
            event=event if event in EVENTS else "",
            since=since if since in TIMES else "",
            before=given.get("before", "")[:LONGEST],
            name=given.get("name", "")[:LONGEST_NAME],
        )

    @property
    def filters(self) -> dict[str, str]:
        narrow = {"name": self.name, "q": self.q, "event": self.event, "since": self.since}
        return {key: value for key, value in narrow.items() if value}

    def search(self, now: float, task: str = "") -> Search:
        ago = TIMES[self.since][0]
        return Search(
            # The name is a word, too: nodes look for it by themselves.
            words=f"{task} {self.q}".strip(),
            events=EVENTS[self.event][0],
            since=now - ago if ago else 0.0,
            task=glob.escape(task) if task else None,
        )
