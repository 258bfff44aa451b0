"""What nodes have of one lock, without nodes: as `celery_redlock.reading.one_lock` returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.stored import StoredLock

__all__ = ["one_lock", "seen"]


def seen(
    value: bytes | None = None, state: str = "up", **more: Any
) -> tuple[str, StoredLock | None]:
    stored = StoredLock(value, **{"ttl": 9.0 if value else 0.0, **more})
    return state, None if state == "down" else stored


def one_lock(found: Sequence[tuple[str, StoredLock | None]]) -> OneLock:
    nodes = [NodeStatus(f"node-{i}", state) for i, (state, _) in enumerate(found)]
    stored = {f"node-{i}": one for i, (_, one) in enumerate(found) if one is not None}
    return OneLock("a", nodes, stored)
