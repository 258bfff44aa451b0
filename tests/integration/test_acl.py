"""
What a user of the lock nodes has to be allowed: no less, as every feature is tried, and no more.

The rights are those that the how-to prints; a page that prints too few, or too many, is noticed.
"""

from __future__ import annotations

import contextlib
import logging
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import redis

from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import registered
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.nodes import node_statuses
from support.everything import HARMLESS, TASKS, TOOLS, Everything
from support.stored import ROOMY

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sentinel-tls-acl.md"
#: The only node is never late: what goes wrong is for want of a right.
RULES = Rules(**{**ROOMY, "node_timeout": 20.0})
SECRET = "s3cret-of-the-locks"


def rights(user):
    (line,) = re.findall(rf"^user {user} on >\S+ ~redlock:\* (.*)$", PAGE.read_text(), re.MULTILINE)
    return line.split()


WORKER, OPERATOR = rights("worker"), rights("operator")


@pytest.fixture
def admin(contract_node):
    with redis.Redis.from_url(contract_node.url) as client:
        yield client
        client.acl_deluser("shop")
        client.acl_log_reset()


def allow(admin, node, allowed, keys="~redlock:*"):
    admin.execute_command("ACL", "SETUSER", "shop", "reset", "on", f">{SECRET}", keys, *allowed)
    admin.acl_log_reset()
    return node.url.replace("redis://", f"redis://shop:{SECRET}@")


def harmless(admin):
    known = []
    for right in HARMLESS[:2]:
        with contextlib.suppress(redis.ResponseError):  # a server that knows no such command
            admin.execute_command("ACL", "SETUSER", "shop", right)
            known.append(right)
    return known


@pytest.fixture
def everything(admin):
    used = []

    def use(url):
        used.append(Everything(url, admin, RULES))
        return used[-1]

    yield use
    for one in used:
        one.locks.close()


def is_refused(right, admin):
    refused = {entry["object"] for entry in admin.acl_log()}
    if right.startswith("&"):
        return any(fnmatch(name, right[1:]) for name in refused)
    return right.removeprefix("+") in refused


def without(rights, right):
    return [other for other in rights if other != right]


def test_a_worker_needs_no_more(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, [*WORKER, *harmless(admin)]))
    assert used.features(TASKS) == {}
    assert admin.acl_log() == []


def test_an_operator_needs_no_more(admin, contract_node, everything):
    allowed = [*OPERATOR, *harmless(admin), "+config|get"]
    used = everything(allow(admin, contract_node, allowed))
    assert used.features(TASKS + TOOLS) == {}
    assert admin.acl_log() == []


def test_what_only_makes_a_line_in_the_log_is_not_needed(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, OPERATOR))
    assert used.features(TASKS + TOOLS) == {}
    refused = {entry["object"] for entry in admin.acl_log()}
    assert refused == {"config|get"} | {right.removeprefix("+") for right in harmless(admin)}


@pytest.mark.parametrize("right", WORKER)
def test_a_worker_needs_every_right(admin, contract_node, everything, right, caplog):
    caplog.set_level(logging.DEBUG)
    used = everything(allow(admin, contract_node, without(WORKER, right)))
    failed = used.features(TASKS)
    assert failed
    assert is_refused(right, admin)
    said = f"{failed}\n{used.said}\n{caplog.text}\n{used.locks!r}"
    assert SECRET not in said
    assert contract_node.url.removeprefix("redis://") in said


@pytest.mark.parametrize("right", OPERATOR)
def test_an_operator_needs_every_right(admin, contract_node, everything, right):
    used = everything(allow(admin, contract_node, without(OPERATOR, right)))
    assert used.features(TASKS + TOOLS)
    assert is_refused(right, admin)


@pytest.mark.parametrize(
    ("right", "missing"),
    [
        ("+subscribe", ["SUBSCRIBE"]),
        ("+publish", ["PUBLISH"]),
        ("+zadd", ["ZADD"]),
        ("+zrange", ["ZRANGE"]),
        ("+zrem", ["ZREM"]),
        ("+hgetall", ["HGETALL"]),
        ("+hlen", ["HLEN"]),
        ("&redlock:*", ["PUBLISH", "SUBSCRIBE"]),
    ],
)
def test_the_doctor_says_who_cannot_be_woken(admin, contract_node, right, missing):
    """Rights that only waking needs are a finding of their own; the twin has them all."""
    url = allow(admin, contract_node, without(OPERATOR, right))
    (facts,) = gather_nodes([url], RULES, lambda _: None)
    assert (facts.problem, facts.denied, facts.denied_to_wake) == ("", [], missing)


def test_only_our_keys_have_to_be_allowed(admin, contract_node, everything):
    used = everything(allow(admin, contract_node, WORKER, keys="~elsewhere:*"))
    failed = used.features(TASKS)
    assert "enrolment" in failed
    assert "key" in failed["enrolment"]


def test_the_page_knows_every_command_of_the_scripts():
    called = {
        name.lower()
        for script in registered()
        for name in re.findall(rb"redis\.p?call\('([A-Z]+)'", script.source)
    }
    assert {name.decode() for name in called} <= {right.removeprefix("+") for right in WORKER}


@pytest.mark.parametrize("password", ["wr0ng-pass", ""])
def test_a_wrong_password(admin, contract_node, everything, password, caplog):
    caplog.set_level(logging.DEBUG)
    url = allow(admin, contract_node, WORKER).replace(SECRET, password)
    used = everything(url)
    failed = used.features(TASKS)
    assert "enrolment" in failed
    said = f"{failed}\n{caplog.text}\n{used.locks!r}\n{node_statuses([url], RULES)}"
    assert "username-password pair" in said
    assert SECRET not in said
    assert "wr0ng-pass" not in said
