"""
Answers to the commands of `celery_redlock.ops.control`, in a worker.

Runs in the event loop of the worker's own process. The nodes are those that `NodeWatch` saw at
its last look. Locks of children are not known here; the nodes are asked for the names of the tasks
that run, in one round, which takes no longer than ``redlock_node_timeout``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from celery.worker.state import active_requests

from celery_redlock.errors import RedlockError
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import quorum
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.reading.stored import age_of, renewals_of
from celery_redlock.task.naming.task_lock import lock_of, places_of
from celery_redlock.task.worker.forced_ends import RedlockRequest

__all__ = ["locks_of", "nodes_of"]

#: What is reported of a lock, and of a node; the rest of `NodeStatus` a worker does not ask for.
LOCK = (
    *("name", "task", "task_id", "execution", "pid", "fence", "age", "ttl"),
    *("left", "renewals", "margin", "lost", "unknown"),
)
NODE = ("node", "state", "latency", "clock_offset", "quarantine", "problem")


def locks_of(app: Any) -> dict[str, Any]:
    plugin = plugin_for(app)
    if locking.disabled:
        return {"locks": [], "note": "locks are disabled in this process"}
    try:
        if plugin.has_children:
            return {"locks": held_by_children(plugin, active_requests)}
        return {"locks": [in_hand(held) for held in plugin.locks.held]}
    except RedlockError as error:
        return {"locks": [], "error": str(error)}


def nodes_of(app: Any) -> dict[str, Any]:
    watch = plugin_for(app).node_watch
    seen = [] if watch is None else watch.seen
    return {"nodes": [{field: getattr(node, field) for field in NODE} for node in seen]}


def described(info: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    who = {field: info.get(field) for field in ("task", "task_id", "execution", "pid")}
    return {**dict.fromkeys(LOCK), **who, "unknown": False, **more}


def in_hand(held: HeldLock) -> dict[str, Any]:
    return described(
        held.lease.info,
        name=held.name,
        pid=os.getpid(),
        fence=held.fence,
        age=max(0.0, time.time() - held.since),
        ttl=held.ttl,
        left=held.remaining(),
        renewals=held.renewals,
        margin=round(held.lease.margin, 3) if held.renewals else None,
        lost=held.lost_reason,
    )


def held_by_children(plugin: Plugin, requests: Iterable[Any]) -> list[dict[str, Any]]:
    named = []
    for request in list(requests):
        if isinstance(request, RedlockRequest):
            task: Any = request.task
            try:
                places = places_of(task, request.lock_names, request.args, request.kwargs)
                named += [(request, name) for name, _ in places]
            except RedlockError:  # then it holds none
                continue
    views = plugin.locks.inspect_all([name for _, name in named]) if named else []
    total = len(plugin.locks.labels)
    found = [
        of_child(request, name, of, total) for (request, name), of in zip(named, views, strict=True)
    ]
    return [lock for lock in found if lock is not None]


def of_child(
    request: Any, name: str, views: Sequence[NodeView], total: int
) -> dict[str, Any] | None:
    """
    Return the lock *name* if it is *request*'s, by the *views* of nodes, and None if it is not.

    *total* is how many nodes there are; not all may have answered.
    """
    ours = [view for view in views if request.is_owner(view.holder)]
    silent = total - sum(1 for view in views if not view.problem)
    ttl = lock_of(request.task).options.ttl
    if len(ours) + silent < quorum(total):
        return None
    if len(ours) < quorum(total):  # too few could tell
        info = {"task": request.name, "task_id": request.id, "pid": request.worker_pid}
        return described(info, name=name, ttl=ttl, unknown=True)
    info = max((view.holder for view in ours), key=renewals_of)
    return described(
        info,
        name=name,
        fence=max(view.fence for view in ours) or None,
        age=age_of(info),
        ttl=ttl,
        left=sorted(view.ttl for view in ours)[len(ours) - quorum(total)],
        renewals=renewals_of(info),
        margin=info.get("margin"),
    )
