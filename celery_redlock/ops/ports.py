"""Ports on the loopback interface, and how one stays ours while nobody listens on it."""

from __future__ import annotations

import contextlib
import random
import socket
import sys

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

__all__ = ["HOST", "PORTS", "free_port", "is_served_by", "kept"]

HOST = "127.0.0.1"
PING_PATIENCE = 0.5  # [s] for one PING
# Below the ports that Linux (32768) and macOS (49152) give to outgoing connections. A client
# that keeps calling a dead server on a port of that range can be connected to *itself*, and the
# server then cannot have its port back.
PORTS = range(10_240, 32_768)


def kept(port: int) -> socket.socket | None:
    """
    Return what keeps *port* ours while its server is down; None where that cannot be.

    Its clients go on calling, and must not reach a server that another process starts meanwhile.
    On Linux a socket that is bound and does not listen keeps out all who ask for a port of their
    own, and lets our server in.
    """
    if sys.platform != "linux":
        return None
    place = socket.socket()
    try:
        place.bind((HOST, port))
    except OSError:  # somebody else has it; the server will say so
        place.close()
        return None
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return place


def free_port() -> int:
    """Return a port that nobody listens on."""
    # At random, so that test runs side by side seldom meet; when they do, start() notices.
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"no free port on {HOST} between {PORTS.start} and {PORTS.stop}")


def is_served_by(port: int, pid: int) -> bool:
    """Return whether the Redis server that answers at *port* is the process *pid*."""
    client = redis.Redis(
        host=HOST,
        port=port,
        socket_timeout=PING_PATIENCE,
        socket_connect_timeout=PING_PATIENCE,
        retry=Retry(NoBackoff(), 0),
    )
    with client, contextlib.suppress(redis.RedisError):
        client.ping()
        # Somebody else's server may have been faster at this port.
        return bool(client.info("server")["process_id"] == pid)
    return False
