"""Locks, their holders and waiters, and an explanation of them, as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from celery_redlock.ops.text import scalar
from celery_redlock.ops.why import Explanation
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.one_lock import OneLock
from celery_redlock.reading.stored import LockView, ReservationView, StoredLock, StoredReservation
from celery_redlock.reading.waiters import Waiter

__all__ = [
    "explanation_as_json",
    "holder_as_json",
    "lock_as_json",
    "node_as_json",
    "reservation_as_json",
    "reserved_as_json",
    "waiter_as_json",
    "who_as_json",
]

#: What a holder says about itself that is shown.
HOLDER = ("task_id", "task", "execution", "host", "pid", "since")


def lock_as_json(lock: LockView, nodes: int) -> dict[str, Any]:
    return {
        "name": lock.name,
        **holder_as_json(lock),
        "held": lock.is_held(nodes),
        "fence": lock.fence or None,
        "waiting": lock.waiting,
        "waiting_since": lock.waiting_since,
        "foreign": lock.is_foreign,
    }


def holder_as_json(lock: LockView) -> dict[str, Any]:
    return {
        **who_as_json(lock.holder),
        "age": lock.age,
        "ttl": lock.ttl,
        "votes": lock.votes,
        "token": lock.holder.get("token"),
    }


def who_as_json(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {field: scalar(holder.get(field)) for field in HOLDER}


def reservation_as_json(seen: StoredReservation | None) -> dict[str, Any] | None:
    """Return whose message stands for the name; of its token the public part."""
    if seen is None:
        return None
    plain = who_as_json(seen.info)
    del plain["execution"]  # it has none before it runs
    stands = {"running": seen.is_running, "ended": seen.has_run, "debounced": seen.is_burst}
    token = None if seen.is_burst else seen.seen
    return {**plain, **stands, "left": seen.left, "merged": seen.merged, "token": token}


def reserved_as_json(view: ReservationView, nodes: int) -> dict[str, Any]:
    return {
        "name": view.name,
        **(reservation_as_json(view.reservation) or {}),
        "votes": view.votes,
        "reserved": view.is_known(nodes),
    }


def waiter_as_json(waiter: Waiter) -> dict[str, Any]:
    return {**asdict(waiter), "age": waiter.age}


# --- an explanation ------------------------------------------------------------------------


def explanation_as_json(found: Explanation) -> dict[str, Any]:
    holder = found.holder
    return {
        "lock": found.lock.name,
        "task": found.task or None,
        "state": found.state,
        "holder": None if holder is None else full_holder_as_json(holder),
        "others": [full_holder_as_json(each) for each in found.lock.views if each != holder],
        "nodes": [node_as_json(node, found.lock) for node in found.lock.nodes],
        "another_call": {
            "meets": found.places.verdict.value,
            "publish": found.publish,
            "run": found.run or None,
        },
        "queued": reservation_with_result(found.lock.queued, found),
        "next": reservation_with_result(found.lock.next, found),
        "burst": reservation_as_json(found.lock.burst),
        "waiting": found.places.waiting,
        "waiting_since": next((it.since for it in found.places.waiters), None),
        "waiters": [waiter_as_json(it) for it in found.places.waiters],
        "places": [place_as_json(place) for place in found.places.all],
        "workers": [{"worker": name, "has_it": has} for name, has in found.workers.items()],
        "recent": list(found.recent),
    }


def reservation_with_result(
    seen: StoredReservation | None, found: Explanation
) -> dict[str, Any] | None:
    plain = reservation_as_json(seen)
    return plain and {**plain, "result": found.results.get(str(plain["task_id"]))}


def place_as_json(place: OneLock) -> dict[str, Any]:
    holder = place.holder
    return {
        "lock": place.stored_name,
        "name": place.name,
        "place": place.number,
        "state": place.state,
        "holder": None if holder is None else full_holder_as_json(holder),
    }


def full_holder_as_json(view: LockView) -> dict[str, Any]:
    return {
        **holder_as_json(view),
        "fence": view.fence or None,
        "renewals": scalar(view.holder.get("renewals", 0)),
        "margin": scalar(view.holder.get("margin")),
        "foreign": view.is_foreign,
    }


def node_as_json(node: NodeStatus, lock: OneLock) -> dict[str, Any]:
    stored = lock.stored.get(node.node, StoredLock())
    return {
        "node": node.node,
        "state": node.state,
        "token": stored.holder.get("token"),
        "ttl": 0.0 if stored.value is None else stored.ttl,
        "fence": stored.fence or None,
        "problem": node.problem,
    }
