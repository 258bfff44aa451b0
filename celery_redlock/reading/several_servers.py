"""Detection of a node's name that stands for several servers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from redis.exceptions import RedisError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import Address
from celery_redlock.lock.nodes.guard import greet
from celery_redlock.reading.nodes import connected

__all__ = ["SEVERAL", "several_servers"]

#: Of a node whose name stands for several servers.
SEVERAL = (
    "is a name of several servers ({}), and clients that reach different ones would hold one lock "
    "at the same time; give each server a name of its own"
)


def several_servers(addresses: Sequence[Address], longest: float) -> dict[str, list[str]]:
    """
    Return which nodes have a name of several servers: label -> network addresses of these.

    They grant one lock to as many clients, each of which has reached another. Servers that do not
    answer are left out, and so are names that are not resolved within *longest* [s].
    """
    found: dict[str, dict[str, str]] = {address.label: {} for address in addresses}
    looks = [
        threading.Thread(
            target=look_up, args=(one, found[one.label]), name="redlock-look", daemon=True
        )
        for one in addresses
    ]
    for look in looks:
        look.start()
    ends = time.monotonic() + longest
    for look in looks:
        look.join(max(0.0, ends - time.monotonic()))
    several = {label: list(servers.copy().values()) for label, servers in found.items()}
    return {label: places for label, places in several.items() if len(places) > 1}


def look_up(address: Address, found: dict[str, str]) -> None:
    """Add to *found* the servers that a node's name stands for, run id -> network address."""
    try:
        places = address.places()
    except (OSError, UnicodeError):  # the name is not known
        places = []
    for place in places if len(places) > 1 else ():
        silent = contextlib.suppress(RedisError, OSError, ConfigurationError)
        with silent, connected(address, place) as connection:
            found.setdefault(greet(connection).run_id, place)
