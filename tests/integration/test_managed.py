"""
Servers that forbid what managed ones do, shown by ACL users: each feature works, or it is said.

The page has a table of what was tried here; each of its rows is.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import redis

from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.check_nodes import check_nodes
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.nodes import node_statuses
from celery_redlock.settings import Settings
from support.everything import TASKS, TOOLS, Everything
from support.stored import ROOMY

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "cluster-and-managed.md"
RULES = Rules(**{**ROOMY, "node_timeout": 20.0})  # a node that is late lacks no right
ALL = {*TASKS, *TOOLS}
ESCAPED = "\0"  # in place of a bar in a table
#: What ACL rules take from a user who may do everything -> features that are lost.
LOST = {
    "-config": set(),
    "-client": set(),
    "-cluster": set(),
    "-script|flush": set(),
    "-@admin -@dangerous +info": set(),
    "resetkeys ~redlock:*": set(),
    "-publish -subscribe": {"waiting"},
    "resetchannels": {"waiting"},
    "-scan": {"listing", "leaked_keys", "taking_away"},
    "-xrange -xrevrange": {"reading_the_journal"},
    "-eval": {"explanation", "taking_away", "forgotten_scripts", "leaked_keys"},
    "-script": ALL - {"leaked_keys"},
    "-info": ALL - {"leaked_keys"},
}


def rows():
    """Return the page's table: ACL rules -> what is said of them."""
    text = PAGE.read_text().replace(r"\|", ESCAPED)
    found = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return {rules.replace(ESCAPED, "|"): said.replace(ESCAPED, "|") for rules, said in found}


def test_the_page_has_all_that_is_tried_and_no_more():
    """A row without a test would be a promise."""
    assert [*rows()] == [*LOST]


@pytest.mark.parametrize("taken", LOST)
def test_each_feature_works_or_is_known_to_be_lost(contract_node, taken, caplog):
    """And what is lost is said: by the node's votes, the log or the doctor."""
    caplog.set_level(logging.DEBUG)
    with redis.Redis.from_url(contract_node.url) as admin:
        rules = ["reset", "on", ">s3cret", "~*", "&*", "+@all", *taken.split()]
        admin.execute_command("ACL", "SETUSER", "shop", *rules)
        try:
            url = contract_node.url.replace("redis://", "redis://shop:s3cret@")
            used = Everything(url, admin, RULES)
            failed = used.features((*TASKS, *TOOLS))
            used.locks.close()
            (status,) = node_statuses([url], RULES)
            said = f"{failed} {status.problem} {caplog.text} {doctor(url)}"
        finally:
            admin.acl_deluser("shop")
            admin.acl_log_reset()
    assert set(failed) - {"diagnosis"} == LOST[taken] - {"diagnosis"}
    for words in re.findall("`([^`]+)`", rows()[taken]):
        assert words in said
    assert bool(LOST[taken]) == ("no-permission" in said)
    assert "s3cret" not in said


def doctor(url):
    """Return the codes of what the doctor finds of a node."""
    facts = gather_nodes([url], RULES, lambda _: None)
    found = check_nodes(Facts(settings=Settings(nodes=[url], rules=RULES), nodes=facts))
    return [finding.code for finding in found]
