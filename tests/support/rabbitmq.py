"""
A RabbitMQ of the tests' own: on the loopback interface, in a folder of its own, gone at the end.

    with rabbitmq(find_rabbitmq()) as broker:
        ...Celery(broker=broker.url)...
        broker.close_all_connections()  # what a worker has not acknowledged is delivered again
        broker.queues()                 # how many messages wait where

Nothing of it is the machine's: neither its cookie, nor its name server (epmd), nor its ports. It
ends at the end of its ``with``, and, by the reaper process, when the test run itself is killed.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import amqp

from celery_redlock.testing.ports import PORTS, reserved
from celery_redlock.testing.reaper import reaper
from support.waiting import eventually

__all__ = ["Depth", "RabbitMQ", "find_rabbitmq", "rabbitmq"]

HOST = "127.0.0.1"
# Debian's commands on PATH become the user "rabbitmq" before they do anything; these do not.
DEBIAN = Path("/usr/lib/rabbitmq/bin")
LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
CONF = """\
listeners.tcp.1 = {host}:{port}
# How much memory and disk others on this machine have left is not what a test is about.
disk_free_limit.absolute = 1MB
vm_memory_high_watermark.absolute = 1GB
"""

#: Longest wait for the broker to answer a new connection [s].
PATIENCE = 60
# How often a quorum queue counts its messages for those who ask; 5 s if not told [s].
COUNTED_EVERY = 0.25
ADVANCED = f"[{{rabbit, [{{quorum_tick_interval, {round(COUNTED_EVERY * 1000)}}}]}}].\n"


def find_rabbitmq() -> Path:
    """Return the folder with ``rabbitmq-server``."""
    found = shutil.which("rabbitmq-server", path=DEBIAN) or shutil.which("rabbitmq-server")
    missing = [name for name in ("erl", "epmd", "erl_call") if shutil.which(name) is None]
    if found is None or missing:
        what = " and ".join(missing if found else ["rabbitmq-server"])
        msg = (
            f"no {what} found: install RabbitMQ (on Debian and Ubuntu the package rabbitmq-server, "
            "with Homebrew rabbitmq)"
        )
        raise RuntimeError(msg)
    return Path(found).parent


@dataclass(frozen=True)
class Depth:
    """
    How many messages a queue has.

    Attributes:
        ready: They wait in the broker.
        unacked: They were delivered to a worker, which has not acknowledged them.
    """

    ready: int
    unacked: int


class RabbitMQ:
    """One broker with its name server."""

    def __init__(self, commands: Path) -> None:
        self.commands = commands
        self.folder = Path(tempfile.mkdtemp(prefix="redlock-rabbitmq-"))
        # Until it is stopped: nobody else has its ports before it has them, which takes long.
        self._places = [reserved() for _ in range(3)]
        self.port, self._dist, self._epmd = (it.getsockname()[1] for it in self._places)
        self._env = self._environment()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def start(self) -> None:
        """Start it and wait until it serves AMQP."""
        if sys.platform != "linux":  # elsewhere nobody may be bound to a port that is served
            self._let_go_of_ports()
        (self.folder / "rabbitmq.conf").write_text(CONF.format(host=HOST, port=self.port))
        (self.folder / "advanced.config").write_text(ADVANCED)
        (self.folder / "plugins").write_text("[].\n")
        # Ours, as a child: the one that Erlang starts for itself becomes a daemon, and stays.
        self._launch(["epmd", "-port", str(self._epmd), "-address", HOST])
        eventually(lambda: self._listens(self._epmd), "answer of epmd", timeout=60)
        self._launch([str(self.commands / "rabbitmq-server")])
        # Generous, because everything else on the machine may be starting at the same time.
        eventually(self._serves, "sign of readiness of RabbitMQ", timeout=90, every=0.05)

    def _launch(self, command: list[str]) -> None:
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        # The helpers of Erlang's machine are in groups of their own, and end when it has ended.
        reaper.watch(f"{self.folder} {process.pid}", process.pid, group=True, folder=self.folder)

    def _listens(self, port: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return True
        return False

    def _serves(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"{process.args!r} has ended:\n{self.log()}"
        # The port is open a moment before the last step of its start.
        if "Server startup complete" not in self.log():
            return False
        with amqp.Connection(f"{HOST}:{self.port}", connect_timeout=PATIENCE) as connection:
            return bool(connection.connected)

    def stop(self) -> None:
        """End it with everything it started, and remove its folder; may be called again."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                # It keeps nothing that is worth an orderly end, which takes seconds.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reaper.forget(f"{self.folder} {process.pid}")
        self._processes.clear()
        self._let_go_of_ports()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _let_go_of_ports(self) -> None:
        for place in self._places:
            place.close()

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    # -- what a test does to it --------------------------------------------------------

    def close_all_connections(self) -> None:
        """Close every client's connection, as a restart of a load balancer does."""
        # One by one: RabbitMQ's own function for all of them stops, with those after it open, at
        # one that has ended by itself since it was listed.
        connections = "rabbit_networking:connections()"
        one = 'catch rabbit_networking:close_connection(Pid, "closed by a test")'
        self.evaluate(f"[{one} || Pid <- {connections}]")

    def queues(self) -> dict[str, Depth]:
        """Return the depths of all queues that had a message a moment ago, by name."""
        found = {}
        for name, ready, unacked in self.list_queues("messages_ready", "messages_unacknowledged"):
            if int(ready) or int(unacked):
                found[name] = Depth(int(ready), int(unacked))
        return found

    def list_queues(self, *columns: str) -> list[tuple[str, ...]]:
        asked = ", ".join(("name", *columns))
        cell = "case Value of {resource, _, _, Name} -> Name; _ -> io_lib:write(Value) end"
        row = f'[io_lib:format("~s~c", [{cell}, 9]) || {{_, Value}} <- Row]'
        rows = f'[[{row}, 10] || Row <- rabbit_amqqueue:info_all(<<"/">>, [{asked}])]'
        told = str(ast.literal_eval(self.evaluate(f"lists:flatten({rows})") or "[]") or "")
        return [tuple(line.split("\t")[:-1]) for line in told.splitlines()]

    def version(self) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", self.evaluate("rabbit_misc:version()"))))

    def purge(self, queue: str) -> None:
        with amqp.Connection(f"{HOST}:{self.port}", connect_timeout=PATIENCE) as connection:
            connection.channel().queue_purge(queue)

    def delayed(self) -> int:
        # Asked by a client: a program of RabbitMQ's own may take longer to start than they wait.
        found, levels = 0, range(28)  # as many as kombu declares, one for each bit of the delay
        with amqp.Connection(f"{HOST}:{self.port}", connect_timeout=PATIENCE) as connection:
            for level in levels:
                channel = connection.channel()
                with contextlib.suppress(amqp.NotFound):
                    told = channel.queue_declare(f"celery_delayed_{level}", passive=True)
                    found += told[1] if told else 0
                    channel.close()
        return found

    def wait_until_quiet(self, queue: str | None = None, *, timeout: float = 200.0) -> None:
        def left() -> dict[str, Depth]:
            return {k: v for k, v in self.queues().items() if queue in (None, k)}

        def is_quiet() -> bool:
            if left():
                return False
            time.sleep(2 * COUNTED_EVERY)  # what was on its way meanwhile is counted now
            return not left()

        try:
            eventually(is_quiet, "quiet at the broker", timeout=timeout, every=0.1)
        except AssertionError as late:
            raise AssertionError(f"{late}: {left()}") from None

    def evaluate(self, expression: str) -> str:
        """
        Return what an *expression* of Erlang is worth in the broker, as Erlang writes it.

        Asked by Erlang's own client in C, within milliseconds: ``rabbitmqctl`` starts a whole
        machine first, which on a loaded one takes many seconds.
        """
        cookie = (self.folder / ".erlang.cookie").read_text()
        place = f"{HOST}:{self._dist}"
        command = ["erl_call", "-address", place, "-c", cookie, "-e"]
        done = subprocess.run(
            command,
            input=f"Told = {expression}, Told.\n".encode(),
            cwd=self.folder,
            env=self._env,
            capture_output=True,
            check=False,
            timeout=200,
        )
        told = re.fullmatch(r"\{ok, (.*)\}\s*", done.stdout.decode(), re.DOTALL)
        assert told, f"{expression}: {(done.stdout + done.stderr).decode()}"
        return told[1]

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        # Without what the machine's own broker or the developer's Erlang may have been told.
        theirs = ("RABBITMQ_", "ERL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
        return {
            **kept,
            "HOME": str(folder),  # where Erlang keeps its cookie
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self._epmd),
            "ERL_CRASH_DUMP_BYTES": "0",
            "RABBITMQ_NODENAME": f"test-{uuid.uuid4().hex[:12]}@localhost",
            "RABBITMQ_DIST_PORT": str(self._dist),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": LOOPBACK_ONLY,
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-such-file"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(folder / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "config"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "feature_flags"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_LOGS": "-",
        }


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at, and that no outgoing connection is given."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 100):
        if len(found) == count:
            break
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    return found


@contextlib.contextmanager
def rabbitmq(commands: Path) -> Iterator[RabbitMQ]:
    """Run a broker for the body of a ``with``, and end it whatever happens."""
    broker = RabbitMQ(commands)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()
