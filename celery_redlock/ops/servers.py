"""
Real Valkey or Redis servers on the loopback interface, for the demo and the tests.

Each server is one process with a folder of its own, keeps nothing on disk, and can be killed,
paused and restarted: what a lock has to survive cannot be tried on a fake. Only processes started
here are ever signalled, by their process id. They end with :meth:`Server.stop`, at the
interpreter's exit, and, by the reaper process, even when this process is killed.

Not for production: no password, no persistence, no replication.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from celery_redlock.ops.ports import HOST, free_port, is_served_by, kept
from celery_redlock.ops.reaper import reaper
from celery_redlock.ops.server_program import find_binary

__all__ = ["PortTaken", "Server", "find_binary", "servers"]

# Settings that make a server forgetful and local; see also _command().
SETTINGS = (
    *("--save", ""),
    *("--appendonly", "no"),
    *("--bind", HOST),
    *("--maxmemory-policy", "noeviction"),
    *("--protected-mode", "yes"),
    *("--daemonize", "no"),
)

START_DEADLINE = 10.0  # [s] from the first launch to an answered PING
STOP_PATIENCE = 2.0  # [s] between SIGTERM and SIGKILL


class PortTaken(RuntimeError):
    """The port that a server has to have is another's."""


class Server:
    """
    One real server process on the loopback interface. Methods may be called from any thread.

    Args:
        binary: The server program; None: whatever :func:`find_binary` finds.
        extra_args: More options of the server; they win over ours.
        port: TCP port that it has to have; None: a free one.

    Attributes:
        port: TCP port; fixed once the server has answered for the first time.
        folder: Its working directory with its log; removed by :meth:`stop`.
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
        self.port = free_port() if port is None else port
        self._must_have_port = port is not None
        self.folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._place: socket.socket | None = None
        self._known = False  # has answered once: others may know the port
        self._lock = threading.RLock()
        self._owner = os.getpid()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.alive else "down"
        return f"<Server {self.url} ({self.binary.name}, {state})>"

    @property
    def url(self) -> str:
        """The URL of its first database."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """
        Process id of the present server process, or of the last one.

        Raises:
            RuntimeError: It was never started, or it was stopped.
        """
        if self._process is None:
            msg = f"the server on port {self.port} was not started"
            raise RuntimeError(msg)
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
                message then has the tail of its log. `PortTaken` if it could not have *port*.
        """
        with self._lock:
            self.launch()
            self.await_answer()

    def kill(self) -> None:
        """End the process with SIGKILL, as a power cut would; it can be started again."""
        with self._lock:
            self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the process with SIGSTOP; on return it no longer runs (Linux)."""
        with self._lock:
            self._signal(signal.SIGSTOP)
            if hasattr(os, "waitid"):  # macOS has it from Python 3.13 on
                # WNOWAIT leaves an exit code to Popen, should the process have died meanwhile.
                os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        with self._lock:
            self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """
        Kill it if it runs, and start it on the same port.

        Its memory is empty then, unless *extra_args* made it keep its data on disk.
        """
        with self._lock:
            self._end(signal.SIGKILL)
            self.start()

    def stop(self) -> None:
        """End the process, paused or not, and remove its folder; doing so again is no error."""
        with self._lock:
            self._end(signal.SIGTERM)
            if self.folder is None or self._owner != os.getpid():
                return
            _running.discard(self)
            shutil.rmtree(self.folder, ignore_errors=True)
            reaper.forget(str(self.folder))
            self.folder = self._process = None
            self._leave_port()

    def log(self) -> str:
        """Return what the server wrote so far; empty after :meth:`stop`."""
        if self.folder is None:
            return ""
        return (self.folder / "server.log").read_text(errors="replace")

    def launch(self) -> None:
        """Start the process and return at once: the first half of :meth:`start`."""
        if self.alive:
            msg = f"{self!r} is running already"
            raise RuntimeError(msg)
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="redlock-server-"))
            _running.add(self)
        self._place = self._place or kept(self.port)
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

    def _command(self, folder: Path) -> list[str]:
        own = ["--port", str(self.port), "--dir", str(folder)]
        return [str(self.binary), *own, *SETTINGS, *self.extra_args]

    def await_answer(self) -> None:
        """Wait until a launched server answers PING: the second half of :meth:`start`."""
        deadline = time.monotonic() + START_DEADLINE
        while not is_served_by(self.port, self.pid):
            if time.monotonic() > deadline:
                self._give_up("did not answer in time")
            elif self.alive:
                time.sleep(0.002)  # a server starts in milliseconds, and says nothing when it has
            elif "Address already in use" in self.log():
                if self._must_have_port and not self._known:
                    self.stop()
                    raise PortTaken(f"port {self.port} is used by another process")
                self._launch_again()
            else:
                self._give_up("ended at once")
        self._known = True

    def ask_to_end(self) -> None:
        """Send SIGTERM and return at once; :meth:`stop` waits, and does all the rest."""
        if self._process is not None and self._owner == os.getpid():
            self._process.send_signal(signal.SIGTERM)

    def _launch_again(self) -> None:
        """Launch after another process took our port: on a new one, if we still may."""
        if self._known:
            time.sleep(0.05)  # the port may be on its way out of another's hands
        else:
            self._leave_port()
            self.port = free_port()
        self.launch()

    def _leave_port(self) -> None:
        if self._place is not None:
            self._place.close()
        self._place = None

    def _give_up(self, what: str) -> None:
        tail = "\n".join(self.log().splitlines()[-15:])
        command = " ".join(self._command(self.folder or Path()))
        self.stop()
        msg = f"server on port {self.port} {what}; its log ends:\n{tail}\ncommand: {command}"
        raise RuntimeError(msg)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._owner != os.getpid() or not self.alive:
            msg = f"the server on port {self.port} is not running in this process's care"
            raise RuntimeError(msg)
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        """Send *number*, and SIGKILL if that was not enough; return when the process is gone."""
        process = self._process
        if process is None or self._owner != os.getpid():
            return
        process.send_signal(number)  # does nothing once the process has been waited for
        process.send_signal(signal.SIGCONT)  # a paused process takes no other signal
        try:
            process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self.folder), None, folder=self.folder)


_running: set[Server] = set()


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
    farm = [Server(binary=binary, extra_args=extra_args) for _ in range(n)]
    try:
        for server in farm:
            server.launch()
        for server in farm:
            server.await_answer()
        yield farm
    finally:
        _stop_all(farm)


def _stop_all(farm: Sequence[Server]) -> None:
    # Told all at once, then waited for: a server takes up to a tenth of a second to go.
    for server in farm:
        server.ask_to_end()
    for server in farm:
        server.stop()


@atexit.register
def _stop_running() -> None:
    _stop_all(tuple(_running))
