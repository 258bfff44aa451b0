"""The field of a run: five servers, the ways to them, and the clients that use them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.reaper import reaper
from celery_redlock.testing.servers import Server, servers
from nemesis.clocks import server_with_clock, set_clock
from nemesis.contenders import rules_of
from nemesis.leftovers import client_of
from nemesis.log import Log, now
from nemesis.network import Link, network
from nemesis.registers import Registers
from support.waiting import eventually

__all__ = ["CROWD", "ClientProcess", "Field", "field_of"]

NODES = 5
#: How many clients of each contender, and on which locks.
CROWD = {
    "ours": (3, ("a", "b")),
    "unguarded": (3, ("a",)),
    "careless": (2, ("a",)),
    "pottery": (2, ("a",)),
}
TESTS = Path(__file__).parents[1]
#: Keeps all changes of a server's file, to have its data again after a kill -9.
KEEPS_DATA = ("--appendonly", "yes", "--appendfsync", "everysec")


class ClientProcess:
    """
    One client of a contender: the process of now, and those before it that were killed.

    Args:
        contender: Its name.
        number: Among the contender's clients.
        folder: For its log and the contender's registers.
        urls: Of the nodes.
    """

    def __init__(self, contender: str, number: int, folder: Path, urls: Sequence[str]) -> None:
        self.contender = contender
        self.name = f"{contender}-{number}"
        self._is_async = contender == "ours" and number % 2 == 0  # beside others that are not
        self._folder = folder
        self._urls = list(urls)
        self._lives = 0
        self._key = f"{folder}/{self.name}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def _log(self) -> Path:
        return self._folder / f"client-{self.name}-{self._lives}.jsonl"

    @property
    def _output(self) -> Path:
        return self._folder / f"{self.name}.out"

    @property
    def last_words(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "nothing"

    def start(self) -> None:
        self._lives += 1
        config = {
            "contender": self.contender,
            "client": self.name,
            "is_async": self._is_async,
            "log": str(self._log),
            "registers": str(self._folder / f"{self.contender}.sqlite"),
            "names": CROWD[self.contender][1],
            "urls": self._urls,
        }
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nemesis.client", json.dumps(config)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        reaper.watch(self._key, self._process.pid)

    @property
    def is_ready(self) -> bool:
        """
        Whether the present process has come so far as to write something down.

        Raises:
            RuntimeError: It has ended before.
        """
        if not self.alive:
            raise RuntimeError(f"{self.name} ended at once: {self.last_words}")
        return self._log.exists() and self._log.stat().st_size > 0

    @property
    def is_holding(self) -> bool:
        if not self._log.exists():  # started a moment ago
            return False
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - 400))
            last = log.read().rstrip(b"\n").rpartition(b"\n")[2]
        return b'"granted"' in last or b'"tick"' in last

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; one that has ended takes none."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(10.0)  # short: it was killed

    def wait(self, seconds: float) -> None:
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Field:
    """
    What a nemesis can get its hands on.

    Attributes:
        nodes: The servers.
        links: The way to each, where the run has a bad network.
        clients: Of all contenders.
        folder: Where logs, registers and clocks are.
        over: Set when the run is to end.
        past_the_network: Clients of the nodes, for the nemesis itself.
        hits: What the strikes hit -> how often.
    """

    def __init__(
        self, nodes: list[Server], links: list[Link], clocks: list[Path], folder: Path
    ) -> None:
        self.nodes = nodes
        self.links = links
        self._clocks = clocks
        self.folder = folder
        self.over = threading.Event()
        self.hits: Counter[str] = Counter()
        self._strikes = Log(folder / "strikes.jsonl")
        self.past_the_network = [client_of(node) for node in nodes]
        urls = [way.url for way in (links or nodes)]
        for contender in ("ours", "careless"):
            bootstrap(urls, rules_of(contender))
        self.clients = [
            ClientProcess(contender, number, folder, urls)
            for contender, (count, _) in CROWD.items()
            for number in range(count)
        ]

    @contextlib.contextmanager
    def struck(self, what: str, whom: Iterable[int | str]) -> Iterator[None]:
        """Write down that *what* befalls *whom* (nodes or clients) for the body of a ``with``."""
        began = now()
        try:
            yield
        finally:
            self._strikes.write("strike", began, what=what, whom=list(whom), until=now())

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than the run lasts."""
        self.over.wait(seconds)

    def clients_of(self, contender: str) -> list[ClientProcess]:
        return [client for client in self.clients if client.contender == contender]

    def any_number(self, rng: random.Random) -> list[int]:
        """Return the positions of a minority, or as often of a majority."""
        minority = NODES // 2
        return self.some(rng, *rng.choice([(1, minority), (minority + 1, NODES)]))

    def some(self, rng: random.Random, least: int, most: int) -> list[int]:
        return rng.sample(range(NODES), rng.randint(least, most))

    def set_clock(self, position: int, ahead: float) -> None:
        set_clock(self._clocks[position], ahead)

    def start_clients(self) -> None:
        for contender in CROWD:  # before there are many: SQLite does not wait for a first one
            Registers(self.folder / f"{contender}.sqlite").close()
        for client in self.clients:
            client.start()
        eventually(lambda: all(c.is_ready for c in self.clients), "clients", timeout=120.0)

    def stop_clients(self) -> list[str]:
        """Have all clients end after their present hold; tell of those gone before."""
        gone = [f"{c.name} ended by itself: {c.last_words}" for c in self.clients if not c.alive]
        for client in self.clients:
            client.signal(signal.SIGTERM)
        for client in self.clients:
            client.wait(0.0 if self.over.is_set() else 15.0)
        return gone

    def close(self) -> None:
        for mine in self.past_the_network:
            mine.close()
        for client in self.clients:
            client.kill()
            reaper.forget(client._key)
        self._strikes.close()


@contextlib.contextmanager
def field_of(folder: Path, needs: frozenset[str]) -> Iterator[Field]:
    """
    Set up the field of a run, and clear it whatever happens.

    Args:
        folder: An empty one.
        needs: ``"network"``, ``"clocks"`` or ``"data"`` (servers that keep it).

    Raises:
        NoFakeTime: Clocks are needed and cannot be had.
    """
    clocks = [folder / f"clock-{n}" for n in range(NODES)] if "clocks" in needs else []
    with ExitStack() as stack:
        if clocks:
            nodes = [server_with_clock(clock) for clock in clocks]
            for node in nodes:
                stack.callback(node.stop)
                node.start()
        else:
            options = KEEPS_DATA if "data" in needs else ()
            nodes = stack.enter_context(servers(NODES, extra_args=options))
        links = stack.enter_context(network([n.port for n in nodes])) if "network" in needs else []
        field = Field(nodes, links, clocks, folder)
        stack.callback(field.close)
        yield field
