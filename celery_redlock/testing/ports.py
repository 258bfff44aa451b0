"""Ports on the loopback interface for servers, reserved while nobody listens on them."""

from __future__ import annotations

import random
import socket

__all__ = ["HOST", "PORTS", "PortTaken", "free_port", "reserved"]

HOST = "127.0.0.1"
# Below the ports that Linux (32768) and macOS (49152) give to outgoing connections. A client
# that keeps calling a dead server on a port of that range can be connected to *itself*, and the
# server then cannot have its port back.
PORTS = range(10_240, 32_768)


class PortTaken(RuntimeError):
    """The port that a server has to have is another's."""


def reserved(port: int | None = None) -> socket.socket:
    """
    Return a socket that keeps *port* for a server of ours, or a free one.

    Clients go on calling a server that is down, and must not reach one that another process starts
    meanwhile. On Linux a socket that is bound and does not listen keeps out all who look for a free
    port, and lets in our server, which has SO_REUSEADDR.
    """
    # At random, so that test runs side by side seldom meet.
    for candidate in [port] if port else random.SystemRandom().sample(PORTS, 100):
        place = socket.socket()
        try:
            # From the start for a port that has to be: connections that are over may linger there.
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, bool(port))
            place.bind((HOST, candidate))
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            place.close()
        else:
            return place
    raise PortTaken(
        f"port {port} is used by another process" if port else f"no free port in {PORTS}"
    )


def free_port() -> int:
    with reserved() as place:
        port: int = place.getsockname()[1]
    return port
