"""Real ``celery beat`` processes, and what they have published, for the acceptance tests."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import redis

from celery_redlock.beat.slot_records import Slots
from celery_redlock.beat.slot_votes import LastSlot
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import TOKEN_LENGTH
from celery_redlock.plugin import plugin_for
from support.stage import Stage
from support.stored import clients_of
from support.worker import CeleryProcess

__all__ = [
    "Beat",
    "Published",
    "last_slots",
    "published",
    "published_of",
    "stage_beat",
    "stopped_between_slots",
]


class Beat(CeleryProcess):
    """
    ``celery -A app beat -S redlock``.

    Args:
        app: As of :class:`CeleryProcess`, with *env*.
        name: Names its own schedule file, *folder* / ``<name>.schedule``.
        folder: Where it runs.
        args: More options of ``celery beat``; they win over those given here.
    """

    def __init__(
        self,
        app: str,
        *,
        name: str,
        folder: Path,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
    ) -> None:
        options = ["-S", "redlock", "-l", "INFO", "-s", str(folder / f"{name}.schedule")]
        super().__init__(
            app,
            ["beat", *options, "--pidfile=", *args],
            ready=r"beat: Starting",
            env=env,
            cwd=folder,
        )


@dataclass(frozen=True)
class Published:
    """
    A message of a slot.

    Attributes:
        entry: Name of the entry.
        due: When the slot is due [s, Unix time].
        task_id: Id of its task.
        publish_id: Of the publish that it says it is.
        order: Its place in the queue [0, the oldest].
        sent: When it was sent, if the app notes that in a header of this name [s, Unix time].
    """

    entry: str
    due: float
    task_id: str
    publish_id: str
    order: int
    sent: float


def published(broker_url: str) -> list[Published]:
    """Return what waits in the queue ``celery``, oldest first; it stays there."""
    with redis.Redis.from_url(broker_url) as client:
        messages = client.lrange("celery", 0, -1)[::-1]  # kombu puts new ones to the left
    return published_of(json.loads(message)["headers"] for message in messages)


def published_of(messages: Iterable[dict[str, Any]]) -> list[Published]:
    """Return what messages with these headers are, in their order."""
    found = []
    for order, headers in enumerate(messages):
        ours = headers["redlock"]
        (entry, due, _), task_id = ours["slot"], ours["task_id"]
        assert task_id == headers["id"], headers
        moment = datetime.fromisoformat(due).timestamp()
        sent = headers.get("sent", 0.0)
        found.append(Published(entry, moment, task_id, ours["id"], order, sent))
    return found


def stage_beat(it: Stage, name: str, **options: Any) -> Beat:
    env = {"EVENTS": str(it.events), "STAGE": json.dumps([it._file, it.conf])}
    env |= options.pop("env", {})
    beat = Beat("support.stage", name=name, env=env, **{"folder": it._folder, **options})
    return it._stack.enter_context(beat)


def stopped_between_slots(
    it: Stage, beat: CeleryProcess, entries: Sequence[str], *, lease: float = 0.0
) -> bool:
    """
    Stop *beat*, and return whether there is no doubt about what it has published.

    Else it goes on. A moment at which it is quiet would not do: it may be over when it is killed.

    Args:
        it: The stage.
        beat: To be ended, or to be let go on, by the caller.
        entries: Names of entries that may have been published.
        lease: How long the leadership of *beat* has to stand by itself [s]; 0 for not at all.
    """
    beat.signal(signal.SIGSTOP)
    before = last_slots(it, entries)
    time.sleep(0.1)  # what it has sent is with the nodes by then
    found = last_slots(it, entries)
    is_well = found == before and all(last.is_settled for last in found.values())
    if is_well and lease_left(it, beat) >= lease:
        return True
    beat.signal(signal.SIGCONT)
    return False


def last_slots(it: Stage, entries: Sequence[str]) -> dict[str, LastSlot]:
    return Slots.on(plugin_for(it.app).locks).look([f"stage/{entry}" for entry in entries])


def lease_left(it: Stage, beat: CeleryProcess) -> float:
    """Return how long the lease of *beat* lasts on a majority of the nodes [s], 0 without one."""
    left = []
    for client in clients_of(it.nodes):
        for key in client.keys("redlock:lock:*"):
            value = client.get(key) or b""
            info = json.loads(value[TOKEN_LENGTH:] or b"{}")
            left += [client.pttl(key) / 1000.0] if info.get("pid") == beat.pid else []
    return min(left) if len(left) >= quorum(len(it.nodes)) else 0.0
