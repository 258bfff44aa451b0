"""
How long processes take to end that held locks whose nodes have gone.

Each holds a lock, with its watchdog at work, until all five nodes are dead, hang, or are
black holes, and until it tries to connect them anew. Then it ends, each in a way of its own.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from celery_redlock.testing.servers import Server, servers
from support.proxy import Link, proxied
from support.script import Script, enrol

__all__ = ["FATES", "WAYS", "Exit", "measure_exits"]

#: A lease outlasts the wait for the end of its process, which must not wait for it.
RULES = {"ttl": 300.0, "max_ttl": 300.0, "node_timeout": 0.2}

#: What a process does once the test has pressed its button, having told when.
WAYS = {
    "end of the main thread": "held = lock.take(LockRequest(NAME, 300.0, 60.0)); wait(); told()",
    "end of a with": "with lock.hold(NAME, wait=60): wait(); told()",
    "sys.exit in a with": "with lock.hold(NAME, wait=60): wait(); told(); sys.exit(0)",
    "an error in a with": "with lock.hold(NAME, wait=60): wait(); told(); raise KeyError",
    "SIGTERM": "held = lock.take(LockRequest(NAME, 300.0, 60.0)); wait(); told(); time.sleep(300)",
}
BODY = """
def wait():
    tell(at="held")
    sys.stdin.readline()                     # now the nodes are gone
    while not all(node.is_connecting for node in lock.fanout.nodes):
        lock.inspect(NAME)                   # finds out, long before the watchdog would
        time.sleep(0.02)
    names = sorted(thread.name.partition("-127")[0] for thread in threading.enumerate())
    tell(at="connecting", threads=names)
    sys.stdin.readline()

def told():
    tell(at=time.monotonic())
"""


@dataclass(frozen=True)
class Exit:
    """How long after its last word a process was gone [s], and the threads that it had."""

    way: str
    took: float
    threads: list[str]


def kill(nodes: Sequence[Server], _links: Sequence[Link]) -> None:
    for node in nodes:
        node.kill()


def stop(nodes: Sequence[Server], _links: Sequence[Link]) -> None:
    for node in nodes:
        node.pause()


def swallow(_nodes: Sequence[Server], links: Sequence[Link]) -> None:
    for link in links:
        link.blackhole()


def scatter(nodes: Sequence[Server], links: Sequence[Link]) -> None:
    kill(nodes[:2], links[:2])
    stop(nodes[2:4], links[2:4])
    swallow(nodes[4:], links[4:])


FATES: dict[str, Callable[[Sequence[Server], Sequence[Link]], None]] = {
    "killed": kill,
    "hung": stop,
    "black-holed": swallow,
    "each its own way": scatter,
}


def measure_exits(
    fate: str,
    *,
    before: str = "",
    patience: float = 60.0,
) -> list[Exit]:
    """
    Return how processes end whose nodes met with *fate*, one for each of `WAYS`.

    Args:
        fate: One of `FATES`.
        before: Put before each process's own lines; a defect, to see that it is found.
        patience: How long to wait for the end of a process [s].

    Raises:
        subprocess.TimeoutExpired: A process did not end.
    """
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(servers(5))
        links = stack.enter_context(proxied([node.port for node in nodes]))
        urls = enrol(links, **RULES)
        scripts = {way: stack.enter_context(_holder(way, urls, before)) for way in WAYS}
        for script in scripts.values():
            assert script.told() == {"at": "held"}
        FATES[fate](nodes, links)
        for script in scripts.values():
            script.press()
        threads = {way: script.told()["threads"] for way, script in scripts.items()}
        return [
            Exit(way, _time_to_end(way, script, patience), threads[way])
            for way, script in scripts.items()
        ]


def _holder(way: str, urls: Sequence[str], before: str) -> Script:
    source = f"{before}\n{BODY}\n{WAYS[way]}\n".replace("NAME", repr(way))
    return Script(source, urls, **RULES)


def _time_to_end(way: str, script: Script, patience: float) -> float:
    script.press()
    began = float(script.told()["at"])
    if way == "SIGTERM":
        began = time.monotonic()
        script.process.send_signal(signal.SIGTERM)
    return script.ended(patience) - began
