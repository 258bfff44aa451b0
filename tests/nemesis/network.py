"""A bad network before the servers of a run; see `support.proxy` for what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from support import proxy

__all__ = ["Link", "network"]

PROCESS = Path(__file__).with_name("network_process.py")


class Link(proxy.Link):
    def lose_requests(self) -> None:
        self._set("lose_requests")


def network(targets: Sequence[int]) -> AbstractContextManager[list[Link]]:
    return proxy.proxied(targets, kind=Link, program=PROCESS)
