"""
The connections of one process to all nodes: waited for, attached, lost.

Connecting goes on in the background (`celery_redlock.lock.nodes.connector`). An exception may
strike anywhere (a soft time limit, a killed greenlet): a connection in use at that moment is
dropped. After a fork the child starts from nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.nodes.connector import Connector
from celery_redlock.lock.nodes.link import Gone
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.nodes.selector import new_selector
from celery_redlock.process.forks import members
from celery_redlock.process.mutex import is_stuck, new_mutex, run_elsewhere

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.events import Event, Notify
    from celery_redlock.lock.nodes.address import Address
    from celery_redlock.lock.nodes.guard import Greeting
    from celery_redlock.lock.rules import Rules

__all__ = ["EITHER", "READS", "WRITES", "Connections", "Waiter"]

#: Longest wait of a process's first round for nodes to be connected [s].
FIRST_CONNECT = 1.0
READS, WRITES = selectors.EVENT_READ, selectors.EVENT_WRITE
EITHER = READS | WRITES

_all_connections: weakref.WeakSet[Connections] = members("fanout")


class Waiter:
    """Somebody who waits for rounds to be decided, at most until *deadline*."""

    __slots__ = ("deadline", "rounds", "wake")
    #: Whether it can wait for the sockets on behalf of others.
    reads = True

    def __init__(self, rounds: Sequence[Round], deadline: float) -> None:
        self.rounds = rounds
        self.deadline = deadline
        self.wake: threading.Lock | None = None  # held while it sleeps because another reads

    @property
    def is_open(self) -> bool:
        for a_round in self.rounds:  # noqa: SIM110  without a generator, as it is on every task's path
            if a_round.is_open:
                return True
        return False

    @property
    def is_decided(self) -> bool:
        """Whether there is something to wake it up for."""
        return not self.is_open

    def rouse(self) -> None:
        """Wake it up; called with the mutex held."""
        if self.wake is not None and self.wake.locked():
            self.wake.release()


class Connections:
    """The connections to the nodes at *addresses*, whose order is that of every ballot."""

    def __init__(self, addresses: Sequence[Address], rules: Rules, notify: Notify) -> None:
        self._addresses = tuple(addresses)
        self._rules = rules
        self._notify = notify
        self.labels = tuple(address.label for address in addresses)
        self._fingerprint = rules.fingerprint(self.labels)
        self._majority = quorum(len(self.labels))
        self._start_over()
        _all_connections.add(self)

    def _start_over(self) -> None:
        """Start over, and leave what belongs to a parent process alone."""
        self._mutex = new_mutex()
        #: Returns whether the collector runs this amid our own work in this thread.
        self.is_in_use_here: Callable[[], bool] = self._mutex._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self.is_stuck: Callable[[], bool] = partial(is_stuck, self._mutex)
        self._news: deque[Event] = deque()
        self._opened: selectors.BaseSelector | None = None
        self._waiters: list[Waiter] = []
        self._reader: Waiter | None = None
        self._looked = 0.0
        self._disconnected()

    def _disconnected(self) -> None:
        self.nodes = [
            Node(i, address, self._rules, self._news) for i, address in enumerate(self._addresses)
        ]
        self._connector = Connector(self._rules, self.labels, self._mutex, self._attach)
        self._has_settled = False

    @property
    def _selector(self) -> selectors.BaseSelector:
        """
        What waits for the sockets; opened by the first look, with the mutex held.

        Not before: an embedded beat closes all descriptors of its process, after the fork.
        """
        if self._opened is None:
            self._opened = new_selector()
        return self._opened

    @property
    def is_connected(self) -> bool:
        return any(node.connection is not None for node in self.nodes)

    def _has_quorum(self) -> bool:
        connected = 0
        for node in self.nodes:
            connected += node.connection is not None
        return connected >= self._majority

    def after_fork_in_child(self) -> None:
        """Drop our copies of the parent's connections without disturbing them."""
        inherited, selector = self.nodes, self._opened
        self._start_over()
        if selector is not None:
            selector.close()
        for node in inherited:
            if node.connection is not None:
                node.connection.disconnect()  # closes our copy; shuts nothing down: not our pid

    def close(self) -> None:
        if self.is_in_use_here():
            run_elsewhere(self.close)
            return
        with self._mutex:
            self._connector.stop()
            for node in self.nodes:
                if node.connection is not None:
                    self._unregister(node)
                    node.finish()
            self._rouse_decided()
            self._news.clear()
            closed = self.nodes
            self._disconnected()
            for node, before in zip(self.nodes, closed, strict=True):
                node.keep_notes_of(before)

    def publish(self) -> None:
        """Pass the events so far to the observer; never with the mutex held."""
        while self._news:
            try:
                event = self._news.popleft()
            except IndexError:  # another thread was quicker
                return
            self._notify(event)

    # -- waits for connections -----------------------------------------------------

    def settle(self, ends: float | None = None) -> None:
        """
        Wait for nodes that are being connected, if it is the first time or no quorum is there.

        The first time every node is waited for; with a quorum there, the others no longer
        than ``node_timeout``. Later only a quorum is waited for, and no longer than that. With
        *ends* [s, our clock], only for a quorum, and until then at most.
        """
        self._check_clock()
        hurry = self._rules.node_timeout
        if ends is not None:
            self._connect_until(self._has_quorum, ends - clock.now())
        elif not self._has_settled:
            self._connect_until(self._has_quorum, FIRST_CONNECT)
            self.settle_all(hurry)
            self._has_settled = True
            self.publish()
        elif not self._has_quorum():
            self._connect_until(self._has_quorum, hurry)

    #: Raises RuntimeError in a test whose time stands still: no server would ever be late.
    _check_clock = staticmethod(clock.check_not_replaced)

    def settle_all(self, longest: float) -> None:
        """Wait until every node is connected or has failed to be, at most *longest* [s]."""
        self._connect_until(lambda: False, longest)

    def _connect_until(self, suffices: Callable[[], bool], longest: float) -> None:
        deadline = clock.now() + longest
        while not (suffices() or all(node.is_settled for node in self.nodes)):
            left = deadline - clock.now()
            if left <= 0:
                return
            with self._mutex:
                for node in self.nodes:
                    self._connector.reconnect(node)
            time.sleep(min(0.002, left))  # no Event: an exception from outside can jam it

    # -- one node's connection -----------------------------------------------------

    def _attach(self, node: Node, connection: AbstractConnection, greeting: Greeting) -> None:
        node.attach(connection, greeting, self._fingerprint)
        self._selector.register(node.sock, READS, node)
        try:
            node.deliver(clock.now())
            if node.unsent:
                self._watch(node, EITHER)
        except Gone as error:
            self._lose(node, error)

    def _lose(self, node: Node, error: BaseException) -> None:
        """Drop a connection; what the node granted through it and is not decided is void."""
        problem = error if isinstance(error, Gone) else Gone("interrupted")
        if node.connection is not None:
            self._unregister(node)
        node.detach(problem)
        for waiter in self._waiters:
            for a_round in waiter.rounds:
                a_round.withdraw(node.position, str(problem))
        self._rouse_decided()
        node.is_settled = False
        self._connector.reconnect(node)

    def _unregister(self, node: Node) -> None:
        with contextlib.suppress(KeyError, ValueError):  # interrupted here before
            self._selector.unregister(node.sock)

    def _watch(self, node: Node, events: int) -> None:
        try:
            self._selector.modify(node.sock, events, node)
        except (KeyError, ValueError) as error:  # interrupted here before
            msg = "interrupted"
            raise Gone(msg) from error

    def _rouse_decided(self) -> None:
        for other in self._waiters:
            if other is not self._reader and other.is_decided:
                other.rouse()
