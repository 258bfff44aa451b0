"""How often an operator's command connects to each lock node: counted by the nodes."""

from __future__ import annotations

import pytest
import redis

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.command_line import urls

RULES = Rules(ttl=60, max_ttl=60)
SHOP = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker="memory://")
    app.conf.redlock_nodes = os.environ.get("NODES", "").split()
    app.conf.redlock_ttl = app.conf.redlock_max_ttl = 60

    @app.task(base=RedlockTask, lock_key=("api", "tenant"), lock_limit=(2, 1))
    def call():
        pass
"""
COMMANDS = {
    "why, by the call": (["why", "shop.call"], 1),
    "why, by the name": (["why", "--name", "api"], 1),
    "status": (["status"], 1),
    "release, of what nobody holds": (["release", "api", "--token", "f" * 8, "--yes"], 1),
    "doctor, with the journal and the tally": (["doctor"], 3),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_connects_to_each_node_as_often_as_it_must(line, redis_nodes, command):
    words, expected = COMMANDS[command]
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    clients = [redis.Redis.from_url(node.url) for node in nodes]

    def counted():
        return [it.info("stats")["total_connections_received"] for it in clients]

    before = counted()
    code, out, err = line.redlock(nodes, *words)
    assert code in (0, 1), out + err
    made = [after - first for first, after in zip(before, counted(), strict=True)]
    for client in clients:
        client.close()
    assert made == [expected] * len(nodes), out + err
