"""
Connections to one database that make each of their trips when they are told to.

    with turns(url) as database:
        database.begin(2)
        one, other = database.clients
        one.send([words])
        one.go(Fate.DONE)      # it has begun a transaction
        other.send([words])
        other.go(Fate.DONE)    # and this one waits for it

Each is what a `celery_redlock.lock.database.server.Server` runs, in a thread of its own. The
database's clock is the test's. Whoever waits for a lock is known to wait: PostgreSQL says so, and
in SQLite one who begins does while another is amid a transaction. So a story that is told twice
goes the same way twice, however slow the machine is.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from celery_redlock.lock.database import postgresql, sqlite
from celery_redlock.lock.database.address import DatabaseAddress
from celery_redlock.lock.database.batch import Batches
from celery_redlock.lock.database.rows import Row
from celery_redlock.lock.database.store import META, Broken, Busy
from celery_redlock.lock.scripts.scripting import registered
from support.database_server import patient

__all__ = ["BEGIN", "Client", "Done", "Fate", "Turns", "turns"]

#: What is one trip to the database.
TRIPS = ("begin", "read", "commit", "roll_back", "page")
#: What PostgreSQL reads its clock from.
CLOCK = "clock_of_the_test"
#: The database's clock when a story begins [us, Unix time].
BEGIN = 1_700_000_000_000_000
#: Longer than any story [s].
LONG = 600
#: How long one who is under way is listened to before the database is asked whether it waits [s].
SOON = 0.002


class Fate(enum.Enum):
    """What comes of a trip."""

    DONE = enum.auto()
    BUSY = enum.auto()  # undone, and may be tried again
    CUT = enum.auto()  # the connection breaks before
    LOST = enum.auto()  # it breaks after, with the reply


class Left(BaseException):
    """The story is over."""


@dataclass(eq=False)
class Done:
    """Commands that were done at one moment [us], and their replies, if anybody has got them."""

    commands: Sequence[Sequence[bytes]]
    micros: int
    is_read: bool
    replies: list[Any] | None = None


class Client:
    """
    One connection.

    Attributes:
        trip: That it is about to make, or makes; '' if it has nothing to do.
        is_under_way: Whether it makes it.
        is_amid: Whether it is in a transaction.
        may_wait: Whether what it does may wait for one who is.
        broken: How often its connection has ended.
        pid: Of the process that PostgreSQL has for it.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._commands: Sequence[Sequence[bytes]] = ()
        self._done: Done | None = None
        self.trip, self.is_under_way, self.is_amid = "", False, False
        self.may_wait, self.broken, self.pid = False, 0, 0
        self._connect()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _connect(self) -> None:
        with self._waiting():
            store: Any = self._turns.address.store()
        self.store = store
        if not self._turns.is_sqlite:
            self.pid = self.store._connection.info.backend_pid
        for name in TRIPS:
            setattr(self.store, name, self._in_turn(name, getattr(self.store, name)))
        self._batches = Batches(self.store)
        for script in registered():  # as every client that connects sees to
            self._batches._engine.load(script.source)

    # -- as the test sees it -----------------------------------------------------------

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        """Have it do *commands*, in one transaction, up to its first trip."""
        self._tell(commands)

    def go(self, fate: Fate) -> None:
        """Have it make its trip, and go on up to its next one; unless it waits."""
        if self.is_under_way:
            if fate in (Fate.CUT, Fate.LOST) and not self._turns.is_sqlite:
                self.store.hang_up()
                self._turns.settle()
        elif self.trip:
            self._tell(fate)

    def _tell(self, word: Any) -> None:
        self.is_under_way = True
        self._told.put(word)
        self._turns.settle()

    def listen(self) -> None:
        """Learn where it is, if it says so soon."""
        with contextlib.suppress(queue.Empty):
            heard = self._heard.get(timeout=SOON)
            self.is_under_way, self.trip = False, ""
            if isinstance(heard, BaseException):
                raise heard
            self.trip = heard

    def leave(self) -> None:
        """Leave, whatever it is at."""
        self._told.put(None)

    def join(self) -> None:
        self._thread.join()

    # -- in its thread -----------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (commands := self._told.get()) is not None:
                self._do(commands)
                self._heard.put("")
        except Left:
            pass
        except BaseException as defect:  # noqa: BLE001  it is raised where it is listened to
            self._heard.put(defect)
        finally:
            self.store.close()
            self.is_amid = False

    def _do(self, commands: Sequence[Sequence[bytes]]) -> None:
        """Do what `celery_redlock.lock.database.server.Server` does; connect again if it ends."""
        self._commands, self._done = commands, None
        try:
            replies = self._batches.answers(commands)
            if self._done is not None:
                self._done.replies = replies
            self._commands = ()
            self._batches.sweep()
        except (Broken, Busy):
            self.store.close()
            self.is_amid = False
            self.broken += 1
            self._connect()

    def _in_turn(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def trip(*words: Any) -> Any:
            self._heard.put(name)
            fate = self._told.get()
            if fate is None:
                raise Left
            if fate is Fate.CUT:
                self._break_off()
            if fate is Fate.BUSY:
                self._undo()
                raise Busy(name)
            with self._waiting() if name == "begin" else contextlib.nullcontext():
                found = make(*words)
            self.is_amid = name == "begin"
            if self._commands and name in ("begin", "read", "commit"):
                self._note(name)
            if fate is Fate.LOST:
                self._break_off()
            return found

        return trip

    def _break_off(self) -> NoReturn:
        self.store.close()
        self.is_amid = False
        raise Broken("the connection broke")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self.may_wait = True
        try:
            yield
        finally:
            self.may_wait = False

    def _undo(self) -> None:
        if self.is_amid:
            self.store.run("ROLLBACK")
            self.is_amid = False

    def _note(self, name: str) -> None:
        """Note what is done with this trip: a commit, or a read, unless one is to follow."""
        done = self._turns.done
        if name == "begin":
            self._micros = self._turns.micros
        if self._done is not None:
            assert self._done.is_read, "done twice"
            done.remove(self._done)
            self._done = None
        if name != "begin":
            is_read = name == "read"
            micros = self._turns.micros if is_read else self._micros
            self._done = Done(self._commands, micros, is_read)
            done.append(self._done)


class Turns:
    """
    A database, and who is connected.

    Attributes:
        done: What was done, in the order of the commits.
        micros: What the database's clock shows [us, Unix time].
    """

    def __init__(self, url: str) -> None:
        self.address = DatabaseAddress(url)
        self.address.make_tables()
        self.looking: Any = self.address.store()
        self.is_sqlite = isinstance(self.looking, sqlite.Sqlite)
        if not self.is_sqlite:
            self.looking.run(f"CREATE SEQUENCE {CLOCK}")
        self.done: list[Done] = []
        self.clients: list[Client] = []
        self.micros = BEGIN

    def begin(self, count: int) -> None:
        """Begin a story of so many clients, with an empty database."""
        kept = self.looking.literal(META)
        self.looking.run(f"DELETE FROM {self.looking.table} WHERE key <> {kept}")
        self.set_clock(BEGIN)
        self.done = []
        self.clients = [Client(self) for _ in range(count)]

    def set_clock(self, micros: int) -> None:
        self.micros = micros
        if not self.is_sqlite:  # a sequence is of no transaction: all see it at once
            self.looking.run(f"SELECT setval('{CLOCK}', {micros})")

    def rows(self) -> list[Row]:
        """Return all that is stored, past the package's transactions."""
        (found,) = self.looking.run(
            f"SELECT key, part, kind, value, ends FROM {self.looking.table} "
            f"WHERE key <> {self.looking.literal(META)}"
        )
        return [
            Row(bytes(key), bytes(part), kind, bytes(it), e) for key, part, kind, it, e in found
        ]

    def settle(self) -> None:
        """Listen until nobody is under way who does not wait for somebody else."""
        while not all(map(self._waits, self._under_way())):
            for client in self._under_way():
                client.listen()

    def _under_way(self) -> list[Client]:
        return [client for client in self.clients if client.is_under_way]

    def _waits(self, client: Client) -> bool:
        amid = [str(one.pid) for one in self.clients if one.is_amid and one is not client]
        if not amid or not client.may_wait or self.is_sqlite:
            return bool(amid) and client.may_wait
        asked = f"SELECT pg_blocking_pids({client.pid}) && ARRAY[{', '.join(amid)}]"
        return bool(self.looking.run(asked)[0][0][0])

    def end_story(self) -> None:
        """Have everybody end what was begun, and leave."""
        try:
            while any(one.trip or one.is_under_way for one in self.clients):
                for client in self.clients:
                    if not client.is_under_way:
                        client.go(Fate.DONE)
                self.settle()
        finally:
            clients, self.clients = self.clients, []
            for client in clients:
                client.leave()
            for client in clients:
                client.join()


class AnyTurn(contextlib.nullcontext):  # type: ignore[type-arg]
    """In place of the turns of one process: the two clients are as those of two."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


@contextlib.contextmanager
def turns(url: str) -> Iterator[Turns]:
    with ExitStack() as stack:
        stack.enter_context(patient(LONG))
        stack.enter_context(mock.patch.object(sqlite, "_turn", AnyTurn()))
        clock = f"(SELECT last_value FROM {CLOCK})"
        database = Turns(url)
        stack.callback(database.looking.close)
        stack.enter_context(mock.patch.object(postgresql, "CLOCK", clock))
        now = SimpleNamespace(time_ns=lambda: database.micros * 1000)
        stack.enter_context(mock.patch.object(sqlite, "time", now))
        yield database
