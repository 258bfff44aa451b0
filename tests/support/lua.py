"""The library's Lua in a test's hand: on a node in memory, and changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys, ms
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.scripting import Script
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.lock.scripts.votes import Vote
from celery_redlock.testing.model import NodeModel

__all__ = ["ScriptNode", "rewritten"]


class ScriptNode(NodeModel):
    """An enrolled node in memory, to which requests are put without any connection."""

    def __init__(self, rules: Rules, wall: Callable[[], float]) -> None:
        super().__init__(0, wall)
        self._rules = rules
        self.keys = Keys.of(rules.prefix, "")
        self.enrol("bootstrap")

    @property
    def _boot(self) -> bytes:
        return boot_marker(self.run_id.decode(), "f" * 16)

    def enrol(self, mode: str) -> None:
        """Enrol it, or have it held back; see `ENROL`."""
        self.greet()
        length = ms(self._rules.quarantine)
        keys = (self.keys.boot, self.keys.quarantine)
        self.ask(b"EVALSHA", ENROL.sha, b"2", *keys, self._boot, length, mode.encode())

    def restart(self) -> None:
        self.crash()
        self.is_up = True
        self.enrol("quarantine")

    def vote(self, request: Request) -> Vote:
        script, boot = request.script, (self._boot,) if request.script.guarded else ()
        count = b"%d" % len(request.keys)
        return script.read(
            self.ask(b"EVALSHA", script.sha, count, *request.keys, *request.arguments, *boot)
        )


@contextmanager
def rewritten(script: Script, text: str, without: str) -> Iterator[None]:
    """Have a script say something else, on servers and in memory."""
    source, sha = script.source, script.sha
    if text.encode() not in source:
        raise LookupError(f"no such text in the script: {text}")
    script.source = source.replace(text.encode(), without.encode())
    script.sha = hashlib.sha1(script.source).hexdigest().encode()
    try:
        yield
    finally:
        script.source, script.sha = source, sha
