"""A server that speaks Redis' protocol, and answers what a test wants."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["FakeServer"]


class FakeServer:
    """
    A server on the loopback interface.

    Args:
        answer: Command, as a list of words, and the connection -> bytes, or None for silence.

    Attributes:
        commands: What it was asked, but for what redis-py sends by itself when it connects.
        wires: All connections that it ever had.
    """

    def __init__(self, answer: Callable[[list[bytes], socket.socket], bytes | None]) -> None:
        self.answer = answer
        self.commands: list[list[bytes]] = []
        self.wires: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = self._listener.accept()
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.wires.append(wire)
                self._start(self._serve, wire)

    def _serve(self, wire: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), wire, wire.makefile("rb") as lines:
            while head := lines.readline():
                words = []
                for _ in range(int(head[1:])):
                    words.append(lines.read(int(lines.readline()[1:])))
                    lines.read(2)
                told = self.greeting(words)
                if told is None:
                    self.commands.append(words)
                    told = self.answer(words, wire)
                if told is not None:
                    wire.sendall(told)

    def greeting(self, words: list[bytes]) -> bytes | None:
        """Return the answer to what is sent by itself when somebody connects."""
        return b"+OK\r\n" if words[0] in {b"CLIENT", b"SELECT", b"HELLO"} else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for wire in self.wires:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
