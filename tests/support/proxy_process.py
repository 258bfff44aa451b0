"""
The process behind :mod:`support.proxy`: one thread, one select loop, a heap of due times.

select() and not epoll: its timeout counts in microseconds, that of epoll in milliseconds,
which would be too coarse for delays of a few milliseconds. It serves descriptors below
1024, some three hundred connections; where clients have made more, poll() takes over.

Orders come as JSON lines on stdin and are answered on stdout, one line each; the process
ends when stdin does.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import json
import math
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from itertools import count
from typing import Any

HOST = "127.0.0.1"
# Not from the range of outgoing connections: a refused client could be connected to itself.
PORTS = range(10_240, 32_768)
CHUNK = 1 << 18
PR_SET_TIMERSLACK = 29


class Stream:
    """
    One direction of one connection: bytes read from *source*, due later at *sink*.

    Attributes:
        upward: Whether it leads to the server.
        queue: What is due when [s, monotonic clock]; None stands for the end of the stream.
        is_dropped: Whether nothing arrives any more, whatever the mode.
    """

    def __init__(
        self, link: Link, source: socket.socket, sink: socket.socket, *, upward: bool
    ) -> None:
        self.link = link
        self.source = source
        self.sink = sink
        self.upward = upward
        self.queue: deque[tuple[float, bytes | None]] = deque()
        self.twin: Stream
        self.ended = self.is_dropped = False

    def read(self, now: float) -> None:
        try:
            data = self.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.close(reset=True)
            return
        if not data:
            forget(self.source)
        self.put(now, data or None)

    def put(self, now: float, data: bytes | None) -> None:
        link = self.link
        due = math.inf if self.is_dropped else now + link.wait(upward=self.upward)
        if self.queue:
            due = max(due, self.queue[-1][0])
        if link.mode != "bytes" or data is None:
            self.queue.append((due, data))
        else:
            self.queue.extend(
                (due + place * link.gap, data[place : place + 1]) for place in range(len(data))
            )
        self.plan()

    def plan(self) -> None:
        if self.queue and self.queue[0][0] < math.inf:
            heapq.heappush(due_streams, (self.queue[0][0], next(ticket), self))

    def replan(self, now: float) -> None:
        """Give what is still queued the due times of a new mode."""
        waiting, self.queue = self.queue, deque()
        for _, data in waiting:
            self.put(now, data)

    def write(self, now: float) -> None:
        while self.queue and self.queue[0][0] <= now:
            data = self.queue[0][1]
            if data is None:
                self.queue.popleft()
                self.end()
                return
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.close(reset=True)
                return
            if sent < len(data):
                # The receiver is slow: come back in a moment, keeping the rest at the head.
                self.queue[0] = (now + 0.0005, data[sent:])
                break
            self.queue.popleft()
        self.plan()

    def end(self) -> None:
        """Tell the sink that nothing more comes; close both once the other way is done too."""
        self.ended = True
        if self.twin.ended:
            self.close()
        else:
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)

    def close(self, *, reset: bool = False) -> None:
        for stream in (self, self.twin):
            stream.queue.clear()
            hang_up(stream.source, reset=reset)
        self.link.streams -= {self, self.twin}


class Link:
    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.mode = "delay"
        self.one_way = 0.0
        self.gap = 0.0
        self.streams: set[Stream] = set()
        self.listener: socket.socket | None = None
        self.listen()

    def wait(self, *, upward: bool) -> float:
        """Return how long a segment is under way [s]; infinite where it does not arrive."""
        if self.mode == "blackhole" or (self.mode == "lose_replies" and not upward):
            return math.inf
        return self.one_way if self.mode == "delay" else 0.0

    def listen(self) -> None:
        """Listen, on the port of before if there was one."""
        candidates = [self.port] * 50 if self.port else random.SystemRandom().sample(PORTS, 100)
        for port in candidates:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
                listener.listen(128)
            except OSError:
                listener.close()
                time.sleep(0.01)  # the port may be another's for a moment
            else:
                listener.setblocking(False)
                self.port, self.listener = port, listener
                readers[listener] = self
                return
        raise RuntimeError(f"cannot listen on {candidates[-1]}")

    def read(self, _now: float) -> None:
        assert self.listener is not None
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        server = socket.socket()
        server.settimeout(1.0)
        try:
            if self.mode == "reset":
                raise ConnectionResetError
            server.connect((HOST, self.target))
        except OSError:
            hang_up(client, reset=True)
            server.close()
            return
        self.join(client, server)

    def join(self, client: socket.socket, server: socket.socket) -> None:
        for side in (client, server):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up = Stream(self, client, server, upward=True)
        down = Stream(self, server, client, upward=False)
        up.twin, down.twin = down, up
        for stream in (up, down):
            self.streams.add(stream)
            readers[stream.source] = stream

    def drop(self) -> None:
        """Swallow from now on what comes on the connections that are there; new ones work."""
        now = time.monotonic()
        for stream in self.streams:
            stream.is_dropped = True
            stream.replan(now)

    def change(self, mode: str, *, one_way: float = 0.0, gap: float = 0.0) -> None:
        self.mode, self.one_way, self.gap = mode, one_way, gap
        if mode in ("refuse", "reset"):
            for stream in tuple(self.streams):
                stream.close(reset=mode == "reset")
        if mode == "refuse" and self.listener is not None:
            hang_up(self.listener)
            self.listener = None
        elif mode != "refuse" and self.listener is None:
            self.listen()
        now = time.monotonic()
        for stream in self.streams:
            stream.replan(now)


readers: dict[socket.socket, Stream | Link] = {}
due_streams: list[tuple[float, int, Stream]] = []
ticket = count()  # decides between equal due times, in the order of coming
links: list[Link] = []


def forget(side: socket.socket) -> None:
    readers.pop(side, None)


def hang_up(side: socket.socket, *, reset: bool = False) -> None:
    forget(side)
    with contextlib.suppress(OSError):
        if reset:
            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.close()


def obey(order: dict[str, Any]) -> dict[str, Any]:
    if "targets" in order:
        links.extend(Link(target) for target in order["targets"])
        return {"ports": [link.port for link in links]}
    link = links[order.pop("link")]
    if order:
        link.change(**order)
    else:
        link.drop()
    return {}


def readable(
    watched: list[int | socket.socket], timeout: float | None
) -> list[int | socket.socket]:
    try:
        return select.select(watched, [], [], timeout)[0]
    except ValueError:  # a descriptor beyond 1023
        poll = select.poll()
        for side in watched:
            poll.register(side, select.POLLIN)
        sides = {side if isinstance(side, int) else side.fileno(): side for side in watched}
        found = poll.poll(None if timeout is None else math.ceil(timeout * 1000))
        return [sides[number] for number, _ in found]


def serve() -> None:
    buffer = b""
    while True:
        timeout = max(0.0, due_streams[0][0] - time.monotonic()) if due_streams else None
        watched: list[int | socket.socket] = [0, *readers]
        ready = readable(watched, timeout)
        now = time.monotonic()
        for side in ready:
            if isinstance(side, int):
                chunk = os.read(0, CHUNK)
                if not chunk:
                    return
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    os.write(1, json.dumps(obey(json.loads(line))).encode() + b"\n")
            elif side in readers:
                readers[side].read(now)
        now = time.monotonic()
        while due_streams and due_streams[0][0] <= now:
            heapq.heappop(due_streams)[2].write(now)


if __name__ == "__main__":
    if sys.platform == "linux":
        # Timers of a process may otherwise be 50 us late, to save power.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    serve()
