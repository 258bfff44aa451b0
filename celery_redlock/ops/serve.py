"""Servers to try things with: a broker and lock nodes on fixed ports, until somebody ends them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from celery_redlock.ops.screen import Stop
from celery_redlock.ops.servers import Server

__all__ = ["serve"]

#: Between two looks at who is alive [s].
LOOK = 0.2


def serve(stop: Stop, *, broker: int | None, nodes: list[int], tell: Callable[[str], None]) -> int:
    """
    Run servers on loopback until somebody asks for the end; return the exit code.

    Args:
        stop: What is asked for.
        broker: Port of the one that is to be a broker; None for none.
        nodes: Ports of the lock nodes.
        tell: Prints a line.

    Raises:
        RuntimeError: A server did not start, for instance because its port is taken.
    """
    with contextlib.ExitStack() as running:
        roles: dict[str, Server] = {}
        wanted = [("broker", broker), *((f"lock node {n}", p) for n, p in enumerate(nodes, 1))]
        for role, port in wanted:
            if port is not None:
                roles[role] = server = Server(port=port)
                running.callback(server.stop)
                server.start()
        for role, server in roles.items():
            tell(f"{role:<12} {server.url}  (process {server.pid})")
        lock_nodes = ",".join(server.url for role, server in roles.items() if role != "broker")
        tell(f"\nredlock_nodes: {lock_nodes}")
        tell("They keep nothing on disk. Ctrl-C ends them all; ready.")
        while not stop.is_wanted:
            for role in [role for role, server in roles.items() if not server.alive]:
                tell(f"{role} has ended")
                del roles[role]
            stop.wait(LOOK)
    return 0
