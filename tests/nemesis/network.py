"""A bad network before the servers of a run; see `support.proxy` for what it can do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from support import proxy

__all__ = ["Link", "network"]

PROCESS = Path(__file__).with_name("network_process.py")


class Link(proxy.Link):
    def lose_requests(self) -> None:
        self._set("lose_requests")


@contextlib.contextmanager
def network(targets: Sequence[int]) -> Iterator[list[Link]]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROCESS)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        channel = proxy._Channel(process)
        try:
            ports = channel.ask({"targets": list(targets)})["ports"]
            places = enumerate(zip(ports, targets, strict=True))
            yield [Link(channel, number, port, target) for number, (port, target) in places]
        finally:
            process.kill()
