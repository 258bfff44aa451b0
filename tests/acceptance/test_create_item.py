"""
The classic race: look, count, then insert, with a limit of three and five calls at once.

The window between the look and the insert is as wide as it has to be: whoever has looked goes
on once all five calls are there, or, without a lock, once all five have looked.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support import events as recording

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

# The example as it is. Nothing of its tasks is changed; they only wait for each other after
# the look, and what they do is recorded.
WIDE = """
    import os
    from celery import signals
    from example_worker import ledger
    from example_worker.app import app
    from support.events import read, record
    from support.waiting import eventually

    app.conf.redlock_ttl = 60.0  # lasts though the machine is slow, as does the patience with nodes
    app.conf.redlock_node_timeout = 1.0
    EVENTS = os.environ["EVENTS"]
    count_items = ledger.count_items

    @signals.task_prerun.connect
    def came(**_):
        record(EVENTS, "came")

    def count_and_wait(customer):
        found = count_items(customer)
        record(EVENTS, "looked", found=found)
        everybody = lambda: len(read(EVENTS, os.environ["WAIT_FOR"])) >= 5
        eventually(everybody, "five calls", timeout=100)
        return found

    ledger.count_items = count_and_wait
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("database").url
    return f"sqlite:///{tmp_path / 'ledger.sqlite3'}"


@pytest.fixture
def five_calls(tmp_path, broker, redis_nodes, start_worker, events):
    nodes = redis_nodes(5)
    bootstrap([node.url for node in nodes], Rules(ttl=60, max_ttl=60))
    (tmp_path / "wide.py").write_text(textwrap.dedent(WIDE))

    def calls(ledger_url, *arguments, wait_for="came", dead=()):
        env = {
            "BROKER_URL": broker.url,
            "RESULT_URL": broker.url,
            "REDLOCK_NODES": ",".join(node.url for node in nodes),
            "REDLOCK_MAX_TTL": "60",
            "LEDGER_URL": ledger_url,
            "WAIT_FOR": wait_for,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        }
        for index in dead:
            nodes[index].kill()
        for _ in range(2):
            start_worker("wide", env=env, concurrency=5)
        found = outcomes(env, *arguments), items(ledger_url)
        return *found, [event["found"] for event in recording.read(events, "looked")]

    return calls


def outcomes(env, *arguments):
    words = ["--items", "5", "--first", "1", "--invoices", "0", "--loads", "0", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "example_worker.publish", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.partition("  create item       SUCCESS: ")[2] for line in done.stdout.splitlines()]
    return sorted(" ".join(words.split()[2:]) for words in told)


def items(ledger_url):
    with create_engine(ledger_url, poolclass=NullPool).connect() as db:
        return db.execute(text("SELECT count(*) FROM item WHERE customer = 1")).scalar()


CREATED, REFUSED = "created", "refused: customer 1 has 3 items"


def test_without_a_lock_five_are_created(five_calls, ledger_url):
    """All five see an empty shelf before anybody puts something there."""
    told, there, seen = five_calls(ledger_url, "--unlocked", wait_for="looked")
    assert seen == [0, 0, 0, 0, 0]
    assert told == [CREATED] * 5
    assert there == 5


def test_with_the_lock_three_are_created_and_two_refused(five_calls, ledger_url):
    """The first one looks while four others wait at the lock; then each sees what was created."""
    told, there, seen = five_calls(ledger_url)
    assert seen == [0, 1, 2, 3, 3]
    assert told == [CREATED] * 3 + [REFUSED] * 2
    assert there == 3


def test_and_also_with_two_of_five_lock_nodes_down(five_calls, ledger_url):
    told, there, seen = five_calls(ledger_url, dead=(1, 3))
    assert seen == [0, 1, 2, 3, 3]
    assert told == [CREATED] * 3 + [REFUSED] * 2
    assert there == 3


LATE = """
    import sys
    from celery_redlock.fencing import StaleFence
    from example_worker import ledger

    claim = ledger.claim if sys.argv[1] == "claimed" else lambda lock, fence: None

    def look(fence):
        claim("items:1", fence)
        return ledger.count_items(1)

    def create(fence):
        try:
            ledger.add_item("items:1", fence, 1, f"by {fence}")
        except StaleFence:
            print("refused")

    for fence in (1, 2):
        create(fence)
    assert look(3) == 2  # and then it is paused, until its lease has ended
    assert look(4) == 2
    create(3)
    create(4)
"""


@pytest.mark.parametrize(("what", "there", "told"), [("claimed", 3, "refused"), ("not", 4, "")])
def test_the_lock_may_pass_on_between_look_and_insert(ledger_url, what, there, told):
    """A claim before the look shuts the late one out; without it a fourth item is created."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LATE), what],
        env={**os.environ, "LEDGER_URL": ledger_url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == told
    assert items(ledger_url) == there
