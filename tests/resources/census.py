"""What this process has at one moment: threads, descriptors, sockets and memory."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from celery_redlock.testing.ports import PORTS

__all__ = ["Census", "take_census"]

#: How the threads begin that connect missing nodes, one each, for as long as they are missing.
CONNECTING = "redlock-connect-"


@dataclass(frozen=True)
class Census:
    """
    What a process has.

    Attributes:
        threads: Without those that connect missing nodes.
        connecting: Threads that connect missing nodes.
        descriptors: That are no sockets.
        sockets: Connected to nodes that answer.
        attempts: All other sockets: each belongs to a connect under way, or has leaked.
        memory: Resident, private [kB].
        allocated: Of it by the C library, and not given back to that [kB]; 0 if it does not tell.
        blocks: Of memory that Python's allocator has given out.
        objects: That the garbage collector knows.
    """

    threads: int
    connecting: int
    descriptors: int
    sockets: int
    attempts: int
    memory: int
    allocated: int
    blocks: int
    objects: int


def take_census(live: Collection[int]) -> Census:
    """Count what this process has; *live* are the ports of the nodes that answer."""
    gc.collect()
    give_free_memory_back()
    names = [thread.name.startswith(CONNECTING) for thread in threading.enumerate()]
    kinds = Counter(kind_of(fd, live) for fd in open_descriptors())
    return Census(
        threads=names.count(False),
        connecting=names.count(True),
        descriptors=kinds["other"],
        sockets=kinds["live"],
        attempts=kinds["attempt"],
        memory=private_memory(),
        allocated=allocated_memory(),
        blocks=sys.getallocatedblocks(),
        objects=len(gc.get_objects()),
    )


def open_descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def kind_of(fd: int, live: Collection[int]) -> str:
    """Return what a descriptor is for; one that was closed by now is for nothing."""
    try:
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("socket:"):
            return "other"
        with socket.socket(fileno=os.dup(fd)) as ours:
            if ours.getsockname()[1] in PORTS:  # keeps the port of one of our servers
                return "other"
            return "live" if ours.getpeername()[1] in live else "attempt"
    except FileNotFoundError:  # the one that listed the others
        return "closed"
    except OSError:  # not connected yet, or no longer
        return "attempt" if Path(f"/proc/self/fd/{fd}").exists() else "closed"


class Mallinfo(ctypes.Structure):
    """What ``mallinfo2`` of the GNU C library answers."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_memory() -> int:
    """Return how much memory the C library has given out [kB]; 0 if it does not tell."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0
    ask.restype = Mallinfo
    told = ask()
    return int(told.uordblks + told.hblkhd) // 1024


def give_free_memory_back() -> None:
    """Have the C library return what is free, where it can: what is left is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def private_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1])
