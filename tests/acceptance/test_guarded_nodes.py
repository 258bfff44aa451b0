"""
Real workers on nodes that let in only whom they know: TLS, ACL users, a Sentinel service.

The users have the rights that the how-to prints, and no others.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from celery_redlock import RedlockTask, current_lock
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import node_statuses
from support.certificates import Authority
from support.command_line import command_line
from support.events import body, overlaps, read
from support.sentinels import Service, service
from support.stage import Stage, stage
from support.tls import TLSNode, tls_node
from support.waiting import eventually

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sentinel-tls-acl.md"
#: So short that a test may wait for a renewal and for a quarantine, and longer than a stall [s].
TTL = 9.0
PASSWORDS = {"worker": "w0rker-s3cret", "operator": "0perator-s3cret"}


def declare(app):
    @app.task(
        base=RedlockTask, name="nap", shared=False, lock_key="{lock}", on_conflict="reschedule"
    )
    def nap(lock, seconds, renewals=0):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)
            enough = lambda: current_lock().renewals >= renewals  # noqa: E731
            eventually(enough, f"{renewals} renewals", timeout=100)
        return current_lock().renewals

    @app.task(
        base=RedlockTask, name="once", shared=False, lock_key="{lock}", unique_until="finished"
    )
    def once(lock, seconds):
        with body(os.environ["EVENTS"], lock):
            time.sleep(seconds)


class Guarded(NamedTuple):
    it: Stage
    behind_tls: list[TLSNode]
    watched: Service
    nodes: dict[str, list[Any]]

    def admins(self) -> list[redis.Redis]:
        servers = [*(node.server for node in self.behind_tls), self.watched.master()]
        return [redis.Redis.from_url(server.url) for server in servers]

    def refused(self) -> set[str]:
        found = set()
        for admin in self.admins():
            found |= {entry["object"] for entry in admin.acl_log()}
            admin.close()
        return found


def add_users(servers):
    for server in servers:
        with redis.Redis.from_url(server.url) as admin:
            for user, password in PASSWORDS.items():
                (rights,) = re.findall(
                    rf"^user {user} on >\S+ (.*)$", PAGE.read_text(), re.MULTILINE
                )
                rest = [f">{password}", *rights.split()]
                admin.execute_command("ACL", "SETUSER", user, "reset", "on", *rest)


@pytest.fixture
def guarded(redis_nodes, some_binary, tmp_path):
    authority = Authority(tmp_path)
    pair, own = authority.vouch("lock-node", "127.0.0.1"), authority.vouch("worker")
    behind_tls = [tls_node(redis_nodes, authority, pair, wants_clients=True) for _ in range(2)]
    options = {"ssl_ca_certs": authority.file, "ssl_certfile": own.certificate}
    options["ssl_keyfile"] = own.key
    with service("lock-3", some_binary) as watched:
        add_users([*(node.server for node in behind_tls), *watched.servers])
        nodes: dict[str, list[Any]] = {
            user: [
                *(node.url(user=f"{user}:{password}", **options) for node in behind_tls),
                watched.node(username=user, password=password),
            ]
            for user, password in PASSWORDS.items()
        }
        conf = {"redlock_nodes": nodes["worker"], "redlock_ttl": TTL, "redlock_max_ttl": TTL}
        conf["redlock_node_timeout"] = 1.4  # a loaded machine takes its time over TLS, too
        with stage(__file__, tmp_path, nodes=0, **conf) as it:
            it.bootstrap()
            yield Guarded(it, behind_tls, watched, nodes)


def states(guarded):
    rules = plugin_for(guarded.it.app).settings.rules
    return [status.state for status in node_statuses(guarded.nodes["operator"], rules)]


@pytest.mark.timeout(600)
def test_workers_need_no_more_than_the_page_says(guarded):
    it = guarded.it
    asked = [it.task("nap").delay("n", 0.2) for _ in range(5)]
    long = it.task("nap").delay("long", 0.0, renewals=1)
    first = it.task("once").delay("u", 0.5)
    assert it.task("once").delay("u", 0.5).duplicate
    it.start_workers([{}, {"pool": "threads"}])
    for result in [*asked, first]:
        result.get(timeout=120)
    assert long.get(timeout=120) >= 1
    assert overlaps(read(it.events)) == []
    assert len(it.bodies("n")) == 5
    assert guarded.refused() <= {"client|setname", "client|setinfo"}
    for password in PASSWORDS.values():
        assert password not in it.log()


@pytest.mark.timeout(600)  # what is rescheduled comes up to a minute later
def test_a_failover_under_a_running_task(guarded):
    it = guarded.it
    it.worker(concurrency=3)
    long = it.task("nap").delay("n", TTL, renewals=4)
    it.started("n")
    guarded.watched.fail_over()
    other = it.task("nap").delay("n", 0.0)
    eventually(lambda: states(guarded) == ["up", "up", "quarantined"], "quarantine", timeout=100)
    assert long.get(timeout=120) >= 4
    other.get(timeout=120)
    one, two = it.bodies("n")
    assert two.started >= one.ended
    eventually(lambda: states(guarded) == ["up"] * 3, "three votes")
    guarded.behind_tls[0].server.kill()  # from here on the new master's vote is needed
    it.task("nap").delay("m", 0.0).get(timeout=120)
    for password in PASSWORDS.values():
        assert password not in it.log()


def test_tools_need_no_more_than_the_page_says(guarded, tmp_path):
    it = guarded.it
    source = f"""
        from celery import Celery
        from celery_redlock import RedlockTask
        app = Celery("shop", broker={it.broker.url!r})
        app.conf.redlock_nodes = {guarded.nodes["operator"]!r}
        app.conf.redlock_ttl = app.conf.redlock_max_ttl = {TTL}
        app.conf.redlock_node_timeout = 1.0

        @app.task(base=RedlockTask, name="nap", lock_key="{{lock}}")
        def nap(lock, seconds): pass
    """
    (tmp_path / "operators").mkdir()
    with command_line(tmp_path / "operators", source) as line, it.held("kept"):
        said = ""
        for words, code in {
            ("status",): 0,
            ("ls",): 0,
            ("why", "nap", '["kept", 1]'): 1,
            ("doctor",): None,
            ("tail", "--no-follow"): 0,
            ("report",): 0,
        }.items():
            got, out, err = line.redlock([], *words)
            assert code in (None, got), (words, got, out, err)
            said += out + err
        assert "kept" in said
        assert "no-permission" not in said
    for password in PASSWORDS.values():
        assert password not in said
    assert guarded.refused() <= {"client|setname", "client|setinfo", "config|get"}
