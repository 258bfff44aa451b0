"""
Periodic health check of the lock nodes in a worker, for observers and operators.

One thread in the worker's own process, not in its children. It sends one small request per
node and look, and takes no lock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from celery_redlock.errors import RedlockError
from celery_redlock.events import NodeDown, NodeMeasured, NodeUp
from celery_redlock.lock.lease import quorum
from celery_redlock.plugin import Plugin, locking, plugin_for
from celery_redlock.process.forks import around_fork
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex
from celery_redlock.reading.health import connect, probe
from celery_redlock.reading.leaks import Leaks
from celery_redlock.task.worker.waiting_room import room_of
from celery_redlock.words import duration, redlock_command

if TYPE_CHECKING:
    from celery_redlock.reading.nodes import NodeStatus

__all__ = ["NodeWatch", "WatchNodes", "forks_held_off"]

logger = get_logger(__name__)

#: How often a worker looks at the nodes [s].
LOOK_EVERY = 10.0
#: How often a worker goes on counting keys that never expire [s].
COUNT_EVERY = 60.0
#: How long a look waits for nodes that are being connected [s]; what is not by then is down.
LONGEST_CONNECT = 2.5

#: Held while a thread of ours works in a process that may fork. A child would find the locks of
#: libraries (metrics, exporters) as that thread held them, and nobody would release them.
forks_held_off = new_mutex()
#: How long a fork waits for that thread [s]. An observer that hangs must not hang the worker.
LONGEST_HOLD = 2.0


class NodeWatch:
    """
    The health check of one worker's app; *wake* is called when locks can be granted again.

    Attributes:
        seen: Found by the last look; empty before the first.
    """

    def __init__(self, plugin: Plugin, wake: Callable[[], None] = lambda: None) -> None:
        self._plugin = plugin
        self._wake = wake
        self._stopped = threading.Event()
        self.seen: list[NodeStatus] = []
        self._unfit: set[str] = set()
        self._is_quorate: bool | None = None
        self._leaks: Leaks | None = None
        self._leaked: dict[str, int] = {}
        self._count_at = 0.0

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="redlock-nodewatch", daemon=True).start()
        except RuntimeError:  # no more threads; a worker without metrics is still a worker
            logger.warning("No thread left to watch the lock nodes")
            self._plugin.speaks_of_nodes = True

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        said = ""
        while not self._stopped.is_set() and self._plugin.app is not None:
            try:
                self.look()
                said = ""
            except RedlockError as error:
                if str(error) != said:  # once, not with every look
                    said = str(error)
                    logger.warning("Checking the lock nodes failed: %s", said)
            except Exception:
                logger.exception("Checking the lock nodes failed")
            self._stopped.wait(LOOK_EVERY)

    def look(self) -> None:
        # Both may take their time; nobody holds a fork off.
        connect(self._plugin.locks, LONGEST_CONNECT)
        self._count_leaks()
        with forks_held_off:
            self.seen = probe(self._plugin.locks)
            for node in self.seen:
                self._tell_if_unfit(node)
                if node.latency is not None and node.clock_offset is not None:
                    self._plugin.notify(
                        NodeMeasured(
                            node.node,
                            node.latency,
                            node.clock_offset,
                            quarantine=node.quarantine if node.state == "quarantined" else 0.0,
                            leaked=self._leaked.get(node.node),
                        )
                    )
            self._sum_up()

    def _sum_up(self) -> None:
        """Say at the start, and when that changes, whether locks can be granted."""
        self._plugin.speaks_of_nodes = True
        if len(self.seen) < len(self._plugin.locks.labels):
            return  # one was not waited for: the next look shows
        is_quorate, was_quorate = missing_votes(self.seen) <= 0, self._is_quorate
        self._is_quorate = is_quorate
        if is_quorate is was_quorate:
            return
        if not is_quorate:
            logger.warning("%s", no_lock(self.seen))
            return
        words = how_many_vote(self.seen)
        if was_quorate is not None:
            words = f"Locks can be granted again: {words}"
            self._wake()
        is_well = all(node.state == "up" for node in self.seen)
        logger.log(logging.INFO if is_well else logging.WARNING, "%s", words)

    def _count_leaks(self) -> None:
        """Go on counting keys that never expire, on the nodes that answered the last look."""
        # Nodes in memory have no servers to count on.
        if not self.seen or self._plugin.servers or time.monotonic() < self._count_at:
            return
        self._count_at = time.monotonic() + COUNT_EVERY
        locks = self._plugin.locks
        self._leaks = self._leaks or Leaks(locks.nodes, locks.rules)
        self._leaked |= self._leaks.look({node.node for node in self.seen if node.latency})

    def _tell_if_unfit(self, node: NodeStatus) -> None:
        """Report nodes that answer and do not vote: their connections report nothing."""
        if node.state == "unfit" and node.node not in self._unfit:
            self._unfit.add(node.node)
            self._plugin.notify(NodeDown(node.node, node.problem))
        elif node.state in ("up", "quarantined") and node.node in self._unfit:
            self._unfit.discard(node.node)
            self._plugin.notify(NodeUp(node.node))


def missing_votes(nodes: Sequence[NodeStatus]) -> int:
    return quorum(len(nodes)) - sum(node.state == "up" for node in nodes)


def how_many_vote(nodes: Sequence[NodeStatus]) -> str:
    silent = [f"{node.node} is {node.state}" for node in nodes if node.state != "up"]
    if len(nodes) == 1:
        return f"lock node {silent[0] if silent else nodes[0].node + ' votes'}"
    voting = f"{len(nodes) - len(silent)} of {len(nodes)} lock nodes vote"
    return "; ".join([voting, *silent])


def no_lock(nodes: Sequence[NodeStatus]) -> str:
    ends = sorted(node.quarantine for node in nodes if node.state == "quarantined")
    missing = missing_votes(nodes)
    until = f" for {duration(math.ceil(ends[missing - 1]))}" if missing <= len(ends) else ""
    if len(ends) < len(nodes):
        return f"No lock can be granted{until}: {how_many_vote(nodes)}"
    new = "the node is" if len(nodes) == 1 else f"all {len(nodes)} nodes are"
    evicted = next((f", or evicted keys ({node.eviction})" for node in nodes if node.eviction), "")
    return (
        f"No lock can be granted{until}: {new} new or restarted{evicted}. "
        f"If nobody can hold a lock: {redlock_command('bootstrap')}"
    )


class WatchNodes(bootsteps.StartStopStep):
    requires = ("celery.worker.components:Pool",)

    def start(self, worker: Any) -> None:
        if not locking.disabled:
            plugin = plugin_for(worker.app)
            plugin.node_watch = NodeWatch(plugin, room_of(worker.app).wake_rescheduled)
            plugin.node_watch.start()

    def stop(self, worker: Any) -> None:
        watch = plugin_for(worker.app).node_watch
        if watch is not None:
            watch.stop()


class Forking(threading.local):
    """How many forks of a thread, one within the other, hold `forks_held_off`."""

    holds = 0


_forking = Forking()


def _before_fork() -> None:
    if forks_held_off.acquire(timeout=LONGEST_HOLD):
        _forking.holds += 1


def _after_fork() -> None:
    if _forking.holds:
        _forking.holds -= 1
        forks_held_off.release()


def _after_fork_in_child() -> None:
    global forks_held_off
    for _ in range(_forking.holds):  # others may have kept it, and give it back
        forks_held_off.release()
    forks_held_off, _forking.holds = new_mutex(), 0


around_fork("nodewatch", _after_fork_in_child, before=_before_fork, in_parent=_after_fork)
