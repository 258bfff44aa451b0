"""
A TCP proxy on the loopback interface whose network can be made bad while it runs.

One process of its own serves any number of links, so that the process under test
is not slowed down, and the delay does not depend on its GIL:

    with proxied([server.port for server in nodes], delay=0.0025) as links:
        ask(links[0].url)            # a round trip now takes 5 ms more
        links[0].blackhole()         # nothing arrives, until another mode is chosen

Also a script: ``python tests/support/proxy.py`` is the proxy process, see
:mod:`support.proxy_process`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Link", "proxied"]

PROCESS = Path(__file__).with_name("proxy_process.py")


class Link:
    """
    One listening port of the proxy and the server behind it.

    A change of mode is in force when the method returns, also for what is under way:
    bytes held back by the old mode are sent as the new mode says.

    Attributes:
        port: Where the proxy listens.
        target: Port of the server behind it.
    """

    def __init__(self, channel: _Channel, number: int, port: int, target: int) -> None:
        self._channel = channel
        self._number = number
        self.port = port
        self.target = target

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def pass_through(self) -> None:
        self.delay(0.0)

    def delay(self, one_way: float) -> None:
        """Forward everything *one_way* later [s]; a round trip takes twice that."""
        self._set("delay", one_way=one_way)

    def byte_by_byte(self, gap: float = 0.0) -> None:
        """Forward single bytes, each as a segment of its own, *gap* after one another [s]."""
        self._set("bytes", gap=gap)

    def blackhole(self) -> None:
        """Forward nothing; as TCP would, deliver it late if a better mode comes back."""
        self._set("blackhole")

    def lose_replies(self) -> None:
        """Forward what clients say, and hold back what the server says, as :meth:`blackhole`."""
        self._set("lose_replies")

    def refuse(self) -> None:
        self._set("refuse")

    def reset(self) -> None:
        """Reset all connections (RST), and each new one as soon as it is accepted."""
        self._set("reset")

    def _set(self, mode: str, **parameters: float) -> None:
        self._channel.ask({"link": self._number, "mode": mode, **parameters})


class _Channel:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lock = threading.Lock()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            answer = self._process.stdout.readline()
        if not answer:
            msg = f"the proxy process has ended with {self._process.wait()}"
            raise RuntimeError(msg)
        return dict(json.loads(answer))


@contextlib.contextmanager
def proxied(
    targets: Sequence[int],
    *,
    delay: float = 0.0,
    kind: type[Link] | None = None,
    program: Path = PROCESS,
) -> Iterator[list[Any]]:
    """
    Put a proxy before each of the loopback ports *targets*.

    Args:
        targets: Ports of the servers behind.
        delay: One way [s, >= 0]; see :meth:`Link.delay`.
        kind: Of the links, if they can more than `Link`.
        program: What runs them.

    Yields:
        One link per target, in the order of *targets*.
    """
    # The process ends with its stdin, so it cannot outlive us.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(program)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        channel = _Channel(process)
        try:
            ports = channel.ask({"targets": list(targets)})["ports"]
            links = [
                (kind or Link)(channel, number, port, target)
                for number, (port, target) in enumerate(zip(ports, targets, strict=True))
            ]
            for link in links:
                link.delay(delay)
            yield links
        finally:
            process.kill()
