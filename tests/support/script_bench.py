"""One server and the scripts of one feature on it, for tests of what the scripts do in there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys, ms
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.testing.servers import Server

__all__ = ["ScriptBench"]


class ScriptBench:
    """
    One server, to which requests are put as a client that saw its run id would.

    Whatever is asked of it, every key has an expiry afterwards. Times are compared by the node's
    own clock, with as much tolerance as the test has taken so far: a slow machine has more.
    """

    def __init__(self, server: Server, rules: Rules) -> None:
        self.client: Any = redis.Redis.from_url(server.url)
        self.rules = rules
        self.run_id = self.client.info("server")["run_id"]
        self.boot = boot_marker(self.run_id, "f" * 16)
        for script in registered():
            self.client.script_load(script.source)
        self._began = self.now_ms()

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def near(self, milliseconds: float, seconds: float) -> bool:
        """Return whether a time that began to run out during this test was *seconds*."""
        passed = self.now_ms() - self._began + 2  # what servers round to, here and there
        return seconds * 1000 - passed <= milliseconds <= seconds * 1000

    def is_of_now(self, told: float) -> bool:
        return self._began <= told * 1000 <= self.now_ms()

    def enrol(self) -> None:
        keys = Keys.of(self.rules.prefix, "")
        quarantine = ms(self.rules.quarantine)
        self.client.evalsha(
            ENROL.sha, 2, keys.boot, keys.quarantine, self.boot, quarantine, "bootstrap"
        )

    def ask(
        self,
        request: Any,
        *,
        boot: str | None = None,
        quarantine: int | None = None,
        eternal: int = 0,
    ) -> Any:
        """
        Return the vote on *request*; *quarantine* [ms] in place of the rules' one.

        So many keys are *eternal*, which the test has set by hand.
        """
        script, arguments = request.script, list(request.arguments)
        if script.guarded:
            arguments[-1] = arguments[-1] if quarantine is None else b"%d" % quarantine
            arguments.append(boot or self.boot)
        reply = self.client.evalsha(script.sha, len(request.keys), *request.keys, *arguments)
        keys = self.client.scan_iter(count=1000)
        assert len([key for key in keys if self.client.pttl(key) == -1]) == eternal
        return script.read(reply)

    def everything(self) -> dict[bytes, Any]:
        read = {b"hash": self.client.hgetall, b"string": self.client.get}
        return {key: read[self.client.type(key)](key) for key in self.client.scan_iter(count=1000)}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.everything()
        yield
        assert self.everything() == before
