"""
What Redis, as the broker, was told of each message: the only witness of one that a worker dropped.

A worker takes a message off its queue (BRPOP), and notes that it has it (HSET) when the reply has
come: killed in between, it takes the message along. That is kombu's, and happens to any task. What
was lost so was pushed to its queue, is not there any more, and was never noted.
"""

from __future__ import annotations

import contextlib
import re
import threading
import uuid
from collections import defaultdict

import redis

from support.waiting import eventually

__all__ = ["BrokerRecord"]

PAYLOAD = re.compile(r'"id": "([0-9a-f-]{36})"')
TAG = re.compile(r'"delivery_tag": "([0-9a-f-]{36})"')


class BrokerRecord:
    """
    The last of pushed, noted and acknowledged of each message, from the broker's own record.

    Args:
        url: Of the broker.

    Attributes:
        tags: Of each task: delivery tag -> state.
    """

    def __init__(self, url: str) -> None:
        self.tags: dict[str, dict[str, str]] = defaultdict(dict)
        self._of: dict[str, str] = {}
        self._heard = ""
        self._client = redis.Redis.from_url(url)
        self._monitor = self._client.monitor()
        self._monitor.__enter__()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._monitor.connection.disconnect()
        self._client.close()

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # the connection was closed
            for told in self._monitor.listen():
                self._note(*told["command"].partition(" ")[::2])

    def _note(self, verb: str, rest: str) -> None:
        task, tag = PAYLOAD.search(rest), TAG.search(rest)
        if verb == "ECHO":
            self._heard = rest
        if verb in ("LPUSH", "RPUSH", "HSET") and task is not None and tag is not None:
            self._of[tag[1]] = task[1]
            self.tags[task[1]][tag[1]] = "noted" if verb == "HSET" else "pushed"
        elif verb == "HDEL" and (acknowledged := rest.rpartition(" ")[2]) in self._of:
            self.tags[self._of[acknowledged]][acknowledged] = "acknowledged"

    def was_dropped(self, task_id: str) -> bool:
        """Return whether a message of a task that is in no queue was never noted by a worker."""
        self._catch_up()
        return "pushed" in self.tags[task_id].values()

    def _catch_up(self) -> None:
        """Wait until the thread has heard all that the broker was told before."""
        mark = uuid.uuid4().hex
        self._client.echo(mark)
        eventually(lambda: self._heard == mark, "our own word in the broker's record")
