"""Names of servers and ports in a page, and the servers of the test that they stand for."""

from __future__ import annotations

import random
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import PORTS
from celery_redlock.testing.servers import Server, servers
from support.pages import ports_of
from support.postgres import DURABLE, find_postgres, postgres

__all__ = ["Names", "names_for"]

LOCK_NODE = re.compile(r"redis://lock-(\d)/0")
UNNAMED = re.compile(r"redis://(?:lock|broker)\b[^\s\"'`]*")
LOCK_NODES = 5
#: A database as pages write it, and the broker of who has one and no Redis.
DATABASE, BROKER = "postgresql://app@db/shop", "amqp://broker//"


class Names:
    """
    What the names in a page stand for.

    Args:
        places: Name as pages write it -> address.
        ports: Number as a page writes it -> one that is free.
    """

    def __init__(self, places: Mapping[str, str], ports: Mapping[int, int] | None = None) -> None:
        self.places = dict(places)
        self.ports = dict(ports or {})

    def replaced(self, text: str) -> str:
        """Return *text* with an address for each name; a name that has none is an error."""
        for number, port in self.ports.items():
            text = re.sub(rf"\b{number}\b", str(port), text)
        for name, place in self.places.items():
            text = text.replace(name, place)
        left = UNNAMED.search(text)
        assert left is None, f"{left and left[0]} stands for no server"
        return text

    def put_back(self, text: str) -> str:
        """Return *text* with names for addresses, also where they are written as labels."""
        for name, place in self.places.items():
            text = text.replace(place, name)
        for name, place in self.places.items():
            if not place.startswith("redis"):
                continue  # its label does not say where it is
            host_and_port, _, _ = place.partition("://")[2].partition("/")
            text = text.replace(host_and_port, f"{name.partition('://')[2].partition('/')[0]}:6379")
        for number, port in self.ports.items():
            text = re.sub(rf"\b{port}\b", str(number), text)
        return text


@contextmanager
def names_for(text: str, given: Sequence[Server] = ()) -> Iterator[Names]:
    """
    Start what the names in *text* stand for: lock nodes that trust each other, and a broker.

    Args:
        text: Of a page.
        given: Lock nodes and, last, the broker; none are started then.
    """
    with ExitStack() as stack:
        is_needed = "redis://lock-" in text or "redis://broker" in text or DATABASE in text
        if not given and is_needed:
            given = stack.enter_context(servers(LOCK_NODES + 1))
        places = {f"redis://lock-{n}/0": node.url for n, node in enumerate(given[:-1], 1)}
        for broker in given[-1:]:
            for n in (0, 1):
                places[f"redis://broker/{n}"] = f"{broker.url.removesuffix('/0')}/{n}"
                bootstrap([places[f"redis://broker/{n}"]], Rules())  # one is the node
            if DATABASE in text:
                places[BROKER] = broker.url  # any will do, and this one is here
        if DATABASE in text:
            places.update(stack.enter_context(database()))
        nodes = [f"redis://lock-{n}/0" for n in sorted(set(LOCK_NODE.findall(text)))]
        if nodes:
            bootstrap([places[name] for name in nodes if name in places], Rules())
        ports = [pair for run in ports_of(text) for pair in free_ports(run, stack)]
        yield Names(places, dict(ports))


@contextmanager
def database() -> Iterator[dict[str, str]]:
    """Start a PostgreSQL, and yield what stands for `DATABASE` as a URL and for Django."""
    with postgres(find_postgres(), DURABLE) as server:
        server.do("CREATE ROLE app LOGIN SUPERUSER")
        server.do("CREATE DATABASE shop OWNER app")
        folder = str(server.folder)
        yield {
            "postgresql://app@db/": f"postgresql://app@{quote(folder, safe='')}/",
            '"HOST": "db"': f'"HOST": "{folder}"',
        }


def free_ports(run: range, stack: ExitStack) -> Iterator[tuple[int, int]]:
    """
    Yield for each port of *run* a free one; they follow each other, too.

    Until the end of *stack* nobody gets them who looks for free ones: a page's servers may come
    late. Those can be bound all the same, as for `celery_redlock.testing.ports.reserved`.
    """
    for begin in random.SystemRandom().sample(PORTS, 100):
        with ExitStack() as probes:
            try:
                for port in range(begin, begin + len(run)):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            except OSError:
                continue
            if sys.platform == "linux":  # elsewhere nobody may be bound to a port that is served
                stack.enter_context(probes.pop_all())
        yield from zip(run, range(begin, begin + len(run)), strict=True)
        return
    raise RuntimeError(f"no {len(run)} free ports in a row")
