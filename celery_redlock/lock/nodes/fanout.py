"""
Ask all nodes at once, and return as soon as the answer is decided.

There is no thread per operation and no I/O thread: whoever asks drives the connections.
Of several threads that ask at the same time one, the reader, waits for the sockets and
hands every reply to the round it belongs to; the others sleep until their round is decided
or the reader leaves and another takes its place. The mutex guards the connections; nobody
waits while holding it.

An exception may strike anywhere (a soft time limit, a killed greenlet). A connection in use
at that moment is dropped, and a waiter that never deregistered is ignored after its
deadline.

Connecting goes on in the background (`celery_redlock.lock.nodes.connector`). After a fork the
child starts from nothing.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from celery_redlock.lock import clock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.nodes.connector import Connector
from celery_redlock.lock.nodes.node import Gone, Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.nodes.selector import new_selector
from celery_redlock.lock.nodes.steps import whose
from celery_redlock.lock.scripts.requests import inspect_request
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.process.forks import members
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import new_mutex, run_elsewhere

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.events import Event, Notify
    from celery_redlock.lock.nodes.address import Address
    from celery_redlock.lock.nodes.guard import Greeting
    from celery_redlock.lock.rules import Rules

__all__ = ["Fanout"]

#: Longest wait of a process's first round for nodes to be connected [s].
FIRST_CONNECT = 1.0
#: Shortest time that a node is taken to need for an answer [s].
SHORTEST_ROUND_TRIP = 0.001
#: After this long unread, connections may have ended unnoticed [s].
QUIET = 1.0
READS, WRITES = selectors.EVENT_READ, selectors.EVENT_WRITE
EITHER = READS | WRITES
#: Of each node, for whoever asks from a finaliser that the collector runs amid our own work.
NOBODY_WAITS = Vote(VoteKind.UNREACHABLE, reason="not asked: a finaliser cannot wait for it")
#: How long a waiter that did not deregister is kept after its deadline [s].
INTERRUPTED = 2.0

logger = get_logger(__name__)
_every_fanout: weakref.WeakSet[Fanout] = members("fanout")


class _Waiter:
    """
    Somebody who waits for rounds to be decided, at most until *deadline*.

    Attributes:
        wake: Held while it sleeps because another reads; None for one that reads from the start.
    """

    __slots__ = ("deadline", "rounds", "wake")

    def __init__(self, rounds: Sequence[Round], deadline: float) -> None:
        self.rounds = rounds
        self.deadline = deadline
        self.wake: threading.Lock | None = None

    @property
    def is_open(self) -> bool:
        for a_round in self.rounds:  # noqa: SIM110  without a generator, as it is on every task's path
            if a_round.is_open:
                return True
        return False

    def rouse(self) -> None:
        """Wake the waiter up; called with the mutex held."""
        if self.wake is not None and self.wake.locked():
            self.wake.release()


class Fanout:
    """
    The connections of one process to all configured nodes. Safe from any thread.

    Args:
        addresses: Of the nodes; their order is that of every ballot.
        rules: Of the cluster.
        notify: Called with the events of nodes.
    """

    def __init__(self, addresses: Sequence[Address], rules: Rules, notify: Notify) -> None:
        self._addresses = tuple(addresses)
        self._rules = rules
        self._notify = notify
        self.labels = tuple(address.label for address in addresses)
        self._fingerprint = rules.fingerprint(self.labels)
        self._majority = quorum(len(self.labels))
        self._start_over()
        _every_fanout.add(self)

    def _start_over(self) -> None:
        """Start over, and leave what belongs to a parent process alone."""
        self._mutex = new_mutex()
        #: Returns whether the collector runs this amid our own work in this thread.
        self.is_in_use_here: Callable[[], bool] = self._mutex._is_owned  # type: ignore[attr-defined]  # noqa: SLF001
        self._news: deque[Event] = deque()
        self._opened: selectors.BaseSelector | None = None
        self._waiters: list[_Waiter] = []
        self._reader: _Waiter | None = None
        self._looked = 0.0
        self._disconnected()

    @property
    def _selector(self) -> selectors.BaseSelector:
        """
        What waits for the sockets; opened by the first look, with the mutex held.

        Not before: an embedded beat closes all descriptors of its process, after the fork.
        """
        if self._opened is None:
            self._opened = new_selector()
        return self._opened

    def _disconnected(self) -> None:
        """Begin without connections."""
        self.nodes = [
            Node(i, address, self._rules, self._news) for i, address in enumerate(self._addresses)
        ]
        self._connector = Connector(self._rules, self.labels, self._mutex, self._attach)
        self._has_settled = False

    @property
    def is_connected(self) -> bool:
        """Whether any node is connected."""
        return any(node.connection is not None for node in self.nodes)

    def round_trip(self, position: int) -> float:
        """Return how long the node at *position* takes to answer, by its last answer [s]."""
        latency = self.nodes[position].latency or 0.0
        return min(max(latency, SHORTEST_ROUND_TRIP), self._rules.node_timeout)

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
        """Drop every connection. The next round connects again."""
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
            self._disconnected()

    def ask(self, rounds: Sequence[Round], ends: float | None = None) -> None:
        """
        Put *rounds* to every node and return when all are decided, or after ``node_timeout``.

        Afterwards every ballot is complete: a node that did not answer votes unreachable.

        Args:
            rounds: What is asked.
            ends: Return by then [s, our clock], waits for connections included; None for no
                such limit.
        """
        if self.is_in_use_here():
            self._decline(rounds)
            return
        self._ask(rounds, ends)
        for node in self.nodes:
            if node.clock.doubt is not None:
                self._compare_clocks()
                return

    def _ask(self, rounds: Sequence[Round], ends: float | None = None) -> None:
        if clock.now() - self._looked > QUIET:
            with self._mutex:
                self._look()
        self.settle(ends)
        deadline = clock.now() + self._rules.node_timeout
        waiter = _Waiter(rounds, deadline if ends is None else min(deadline, ends))
        try:
            with self._mutex:
                self._waiters.append(waiter)
                if self._has_reader():
                    waiter.wake = threading.Lock()
                    waiter.wake.acquire()
                else:
                    self._reader = waiter
                self._send(rounds)
            self._wait(waiter)
        finally:
            with self._mutex:
                self._leave(waiter)
            self.publish()

    def _compare_clocks(self) -> None:
        """Find out whether our clock moved or those of the nodes in doubt, and act on it."""
        doubts = [node.clock.doubt for node in self.nodes]  # once: other threads settle them, too
        if any(doubt is not None and not doubt.is_reported for doubt in doubts):
            read = Round(inspect_request(self._rules, ""), len(self.labels), lambda _: False)
            self._ask([read])  # of the clocks of all; it writes nothing
        with self._mutex:
            finding = whose([node.clock for node in self.nodes])
            for node in self.nodes:
                try:
                    node.settle_clock(finding, clock.now())
                except Gone as error:
                    self._lose(node, error)
            if finding.ours is not None and finding.ours > 0:
                clock.make_up_for(finding.ours)
        if finding.ours is not None:
            logger.warning(
                "Our clock fell %+.1f s behind those of most nodes, as after a suspended virtual "
                "machine: their votes do not count, and our leases end that much sooner",
                finding.ours,
            )
        self.publish()

    def tell(self, a_round: Round, skip: frozenset[int] = frozenset()) -> None:
        """Send *a_round* to every node but those at the positions *skip*; wait for nothing."""
        if self.is_in_use_here():
            run_elsewhere(self.tell, a_round, skip)
            return
        with self._mutex:
            self._send((a_round,), skip)
        self.publish()

    def _decline(self, rounds: Sequence[Round]) -> None:
        """Answer for the nodes where nobody can wait for them; what undoes something is sent."""
        for a_round in rounds:
            if a_round.request.script.one_way:
                self.tell(Round(a_round.request, len(self.labels), None))
            for position in range(len(self.labels)):
                a_round.take(position, NOBODY_WAITS)

    def settle(self, ends: float | None = None) -> None:
        """
        Wait for nodes that are being connected, if it is the first time or no quorum is there.

        The first time every node is waited for; with a quorum there, the others no longer
        than ``node_timeout``. Later only a quorum is waited for, and no longer than that.

        Args:
            ends: Wait for a quorum alone, and until then at most [s, our clock]; None: as above.
        """
        self._check_clock()
        hurry = self._rules.node_timeout
        if ends is not None:
            self._connect_until(lambda: self._connected() >= self._majority, ends - clock.now())
        elif not self._has_settled:
            self._connect_until(lambda: self._connected() >= self._majority, FIRST_CONNECT)
            self._connect_until(lambda: False, hurry)
            self._has_settled = True
            self.publish()
        elif self._connected() < self._majority:
            self._connect_until(lambda: self._connected() >= self._majority, hurry)

    #: Raises RuntimeError in a test whose time stands still: no server would ever be late.
    _check_clock = staticmethod(clock.check_not_replaced)

    def settle_all(self, longest: float) -> None:
        """Wait until every node is connected or has failed to be, at most *longest* [s]."""
        self._connect_until(lambda: False, longest)

    def _connect_until(self, suffices: Callable[[], bool], longest: float) -> None:
        """Wait until *suffices* or there is no node left that may still be connected."""
        deadline = clock.now() + longest
        while not (suffices() or all(node.is_settled for node in self.nodes)):
            left = deadline - clock.now()
            if left <= 0:
                return
            with self._mutex:
                for node in self.nodes:
                    self._connector.reconnect(node)
            time.sleep(min(0.002, left))  # no Event: an exception from outside can jam it

    def _connected(self) -> int:
        count = 0
        for node in self.nodes:
            count += node.connection is not None
        return count

    # -- asking ------------------------------------------------------------------

    def _send(self, rounds: Sequence[Round], skip: frozenset[int] = frozenset()) -> None:
        now = clock.now()  # not from before the mutex was had: what is sent now is not late
        if now - self._looked > QUIET:
            self._look()  # the first write to a connection that was ended seems to succeed
        late = now - self._rules.node_timeout
        for node in self.nodes:
            if node.position in skip:
                continue
            if node.quiet_since < late and not self._has_reader(but=rounds):
                self._read(self._selector.select(0))  # or its answers have long been unread
            try:
                node.send(rounds, now)
                if node.connection is None:
                    self._connector.reconnect(node)
                elif node.unsent:
                    self._watch(node, EITHER)
            except BaseException as error:
                self._lose(node, error)
                if not isinstance(error, Gone):
                    raise
                node.send(rounds, now)  # answers for itself, having no connection

    def _has_reader(self, but: Sequence[Round] = ()) -> bool:
        """Return whether a waiter other than *but* drives the connections."""
        reader = self._reader
        return reader is not None and reader.rounds is not but and clock.now() < reader.deadline

    def _look(self) -> None:
        """Read what came while nobody asked, to the end: nodes may have hung up after it."""
        while not self._has_reader() and (ready := self._selector.select(0)):
            self._read(ready)
            if not any(events & READS for _, events in ready):
                return  # what a node takes now was sent; it will be asked again

    def _wait(self, waiter: _Waiter) -> None:
        """Drive the connections, or sleep while somebody else does."""
        while waiter.is_open:
            left = waiter.deadline - clock.now()
            if left <= 0:
                return
            if self._reader is waiter:
                ready = self._selector.select(left)
                with self._mutex:
                    self._read(ready)
            elif waiter.wake is not None:
                waiter.wake.acquire(timeout=left)

    def _read(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        self._looked = clock.now()
        for key, events in ready:
            node: Node = key.data
            if node.connection is None:
                continue  # lost since the selector looked
            try:
                if events & WRITES:
                    node.flush()
                    if not node.unsent:
                        self._watch(node, READS)
                if events & READS:
                    node.read()
                    if node.unsent:
                        self._watch(node, EITHER)
            except BaseException as error:
                self._lose(node, error)
                if not isinstance(error, Gone):
                    raise
        self._rouse_decided()

    def _watch(self, node: Node, events: int) -> None:
        """Have the selector wait for the node to be readable, or writable if data are unsent."""
        try:
            self._selector.modify(node.sock, events, node)
        except (KeyError, ValueError) as error:  # interrupted here before
            msg = "interrupted"
            raise Gone(msg) from error

    def _rouse_decided(self) -> None:
        for other in self._waiters:
            if other is not self._reader and not other.is_open:
                other.rouse()

    def _leave(self, waiter: _Waiter) -> None:
        """Read once more, give up on nodes that did not answer, let another thread read."""
        if waiter.is_open:
            self._read(self._selector.select(0))
        now = clock.now()
        for a_round in waiter.rounds:
            if a_round.is_open:
                self._give_up(a_round, now)
        self._waiters = [
            w for w in self._waiters if w is not waiter and now < w.deadline + INTERRUPTED
        ]
        if self._reader is waiter:
            self._reader = None
            for heir in self._waiters:
                if heir.is_open and now < heir.deadline:
                    self._reader = heir
                    heir.rouse()
                    break

    def _give_up(self, a_round: Round, now: float) -> None:
        for node, vote in zip(self.nodes, tuple(a_round.ballot), strict=True):
            if vote is None:
                a_round.take(node.position, node.overdue(now))
        a_round.is_open = False

    def _lose(self, node: Node, error: BaseException) -> None:
        """Drop a connection; what the node granted through it and is not decided is void."""
        problem = error if isinstance(error, Gone) else Gone("interrupted")
        self._drop(node, problem)
        for waiter in self._waiters:
            for a_round in waiter.rounds:
                a_round.withdraw(node.position, str(problem))
        self._rouse_decided()
        node.is_settled = False
        self._connector.reconnect(node)

    def _drop(self, node: Node, problem: Gone) -> None:
        if node.connection is not None:
            self._unregister(node)
        node.detach(problem)

    def _unregister(self, node: Node) -> None:
        with contextlib.suppress(KeyError, ValueError):  # interrupted here before
            self._selector.unregister(node.sock)

    def _attach(self, node: Node, connection: AbstractConnection, greeting: Greeting) -> None:
        node.attach(connection, greeting, self._fingerprint)
        self._selector.register(node.sock, READS, node)
        try:
            node.deliver(clock.now())
            if node.unsent:
                self._watch(node, EITHER)
        except Gone as error:
            self._lose(node, error)

    def publish(self) -> None:
        """Pass the events so far to the observer; never with the mutex held."""
        while self._news:
            try:
                event = self._news.popleft()
            except IndexError:  # another thread was quicker
                return
            self._notify(event)
