"""Keys without an expiry are counted, a few pages of each node at a time."""

from __future__ import annotations

import redis

from celery_redlock.lock.rules import Rules
from celery_redlock.reading import leaks
from celery_redlock.reading.leaks import Leaks
from support.stored import ROOMY

KEYS = 1500


def test_all_keys_are_looked_at_however_many_there_are(redis_nodes, monkeypatch):
    monkeypatch.setattr(leaks, "PAGES", 1)
    nodes = redis_nodes(3)
    for count, node in enumerate(nodes, 1):
        with redis.Redis.from_url(node.url) as client, client.pipeline() as pipe:
            for i in range(KEYS):
                pipe.set(f"redlock:lock:{i}", "x", px=600_000)
            for i in range(count):
                pipe.set(f"redlock:lock:leaked-{i}", "x")
            pipe.set("other:leaked", "x")
            pipe.execute()
    labels = [node.url.removeprefix("redis://") for node in nodes]
    it = Leaks([node.url for node in nodes], Rules(**ROOMY))
    found = [it.look(labels) for _ in range(2 * KEYS // leaks.SCAN_COUNT)]
    assert found[0] == {}
    assert {label: n for each in found for label, n in each.items()} == dict(
        zip(labels, (1, 2, 3), strict=True)
    )
    nodes[0].kill()
    assert labels[0] not in it.look(labels)
    assert it.look([]) == {}
