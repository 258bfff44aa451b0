"""
A lock node that lies: a real server, behind something that changes what it answers.

    with lying(node.port, LIES["endless"]) as liar:
        Redlock([liar.url, ...])
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hiredis
import redis

__all__ = ["LIES", "Liar", "far_fences", "honest", "in_time", "late", "lying"]

#: Command and what the server answers -> what is sent in pieces.
Lie = Callable[[list[bytes], Any], Iterator[bytes]]
#: What a connection begins with: a liar that is refused there tells no other lie.
GREETINGS = (b"INFO", b"SCRIPT", b"CLIENT", b"SELECT", b"HELLO", b"AUTH")
SIZE = 2**16
HERE = ("127.0.0.1", 0)


class Liar:
    """
    Listens on the loopback interface, and lies to each who comes.

    Args:
        target: Port of the real server.
        lie: What to say in place of its answers.
        place: Where to listen; port 0 for a free one.

    Attributes:
        port: Where it listens.
        lie: What it says from now on.
    """

    def __init__(self, target: int, lie: Lie, place: tuple[str, int] = HERE) -> None:
        self._target, self.lie = target, lie
        self._listening = socket.create_server(place)
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        commands = hiredis.Reader()
        server = redis.Connection(port=self._target, protocol=2, decode_responses=False)
        with contextlib.suppress(OSError, redis.RedisError), client:
            while data := client.recv(SIZE):
                commands.feed(data)
                while (command := commands.gets()) is not False:
                    server.send_packed_command(server.pack_command(*command))
                    try:
                        answer = server.read_response(disable_decoding=True)
                    except redis.ResponseError as error:
                        answer = error
                    for piece in self.lie(command, answer):
                        client.sendall(piece)
        server.disconnect()


def encoded(answer: Any) -> bytes:
    if isinstance(answer, Exception):
        return b"-%b\r\n" % str(answer).encode()
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if answer is None:
        return b"$-1\r\n"
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(map(encoded, answer))
    return b"$%d\r\n%b\r\n" % (len(answer), answer)


def in_place_of_all(answer: bytes) -> Lie:
    """Return the lie that says *answer* whatever it is asked, but for greetings."""

    def lie(command: list[bytes], truth: Any) -> Iterator[bytes]:
        yield encoded(truth) if command[0].upper() in GREETINGS else answer

    return lie


def honest(_command: list[bytes], truth: Any) -> Iterator[bytes]:
    yield encoded(truth)


def endless(_command: list[bytes], _truth: Any) -> Iterator[bytes]:
    yield b"$4000000000\r\n"
    while True:
        yield bytes(SIZE)


def endless_after_greeting(command: list[bytes], truth: Any) -> Iterator[bytes]:
    """Do so once it is trusted."""
    if command[0].upper() in GREETINGS:
        yield encoded(truth)
    else:
        yield from endless(command, truth)


def endless_to_listeners(command: list[bytes], truth: Any) -> Iterator[bytes]:
    yield encoded(truth)
    if command[0].upper() == b"SUBSCRIBE":
        yield from endless(command, truth)


def dripping(_command: list[bytes], truth: Any) -> Iterator[bytes]:
    """Send the truth a byte at a time, so that no single read takes long."""
    for byte in encoded(truth):
        time.sleep(0.1)  # so that no single read times out, and all of them together would
        yield bytes([byte])


def circles(command: list[bytes], truth: Any) -> Iterator[bytes]:
    yield encoded([b"1", []] if command[0].upper() == b"SCAN" else truth)


def inside_out(command: list[bytes], truth: Any) -> Iterator[bytes]:
    """Put lists for texts, and texts for lists."""
    wrong = encoded(b"text") if isinstance(truth, list) else encoded([truth, [1, None]])
    yield encoded(truth) if command[0].upper() in GREETINGS else wrong


def too_large(command: list[bytes], truth: Any) -> Iterator[bytes]:
    """Put numbers that no server counts to, and texts where numbers belong."""

    def worse(answer: Any) -> Any:
        if isinstance(answer, list):
            return list(map(worse, answer))
        return b"9" * 4000 if isinstance(answer, int) else 2**62

    yield encoded(truth if command[0].upper() in GREETINGS else worse(truth))


def far_fences(_command: list[bytes], truth: Any) -> Iterator[bytes]:
    is_grant = isinstance(truth, list) and len(truth) == 3 and truth[0] == 1 and truth[2] != b"0"
    yield encoded([*truth[:2], b"%d" % 2**53] if is_grant else truth)


def late(_command: list[bytes], truth: Any) -> Iterator[bytes]:
    time.sleep(0.02)  # no wait for something: it is to be late
    yield encoded(truth)


#: How a node may lie, by name.
LIES: dict[str, Lie] = {
    "endless": endless,
    "drips": dripping,
    "endless after its greeting": endless_after_greeting,
    "endless to listeners": endless_to_listeners,
    "circles": circles,
    "inside out": inside_out,
    "too large": too_large,
    "a number": in_place_of_all(b":7\r\n"),
    "nothing": in_place_of_all(b"$-1\r\n"),
    "an empty list": in_place_of_all(b"*0\r\n"),
    "huge lists": in_place_of_all(b"*4294967295\r\n"),
    "deep": in_place_of_all(b"*1\r\n" * 8 + b":1\r\n"),
    "an error": in_place_of_all(b"-ERR \xff\xfe no\r\n"),
}


@contextlib.contextmanager
def lying(target: int, lie: Lie, place: tuple[str, int] = HERE) -> Iterator[Liar]:
    liar = Liar(target, lie, place)
    try:
        yield liar
    finally:
        liar.close()


def in_time(work: Callable[[], Any], seconds: float = 90.0) -> Any:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, "it hangs, or has failed"
    return done[0]
