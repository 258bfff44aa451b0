"""The example does what it is there to show, seen by a recorder that knows nothing of locks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import yaml
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support import events as recording
from support.waiting import eventually
from support.worker import CeleryProcess

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PUBLISH = [sys.executable, "-m", "example_worker.publish"]

# The example as it is, with a record of every body around what the tasks do, leases that outlast a
# stall, and patience with nodes. A body may have to wait until so many tasks have ended (OTHERS),
# and an import until there is a file (GATE) and its lease was renewed.
RECORDED = """
    import functools, inspect, os
    from pathlib import Path
    from celery import signals
    from celery_redlock import current_lock
    from celery_redlock.lock.nodes import connections
    from example_worker.app import app
    from support.events import body, read, record
    from support.waiting import eventually

    connections.FIRST_CONNECT = 20.0  # a server that is slow to answer is not down
    EVENTS, GATE = os.environ["EVENTS"], os.environ.get("GATE")
    app.conf.redlock_ttl = app.conf.redlock_max_ttl
    # A worker that is killed may hold what keeps others from bringing messages back.
    app.conf.broker_transport_options["unacked_mutex_expire"] = 2
    app.conf.redlock_node_timeout = 1.0
    app.tasks["example_worker.app.load"].lock_ttl = min(9.0, app.conf.redlock_max_ttl)

    @signals.task_postrun.connect
    def ended(**_):
        record(EVENTS, "ended")

    def may_begin(name):
        if name == "load" and GATE:
            renewed = lambda: current_lock().renewals >= 2 and Path(GATE).exists()
            eventually(renewed, "gate", timeout=100)

    def may_end():
        others = int(os.environ.get("OTHERS", "0"))
        eventually(lambda: len(read(EVENTS, "ended")) >= others, "end of others", timeout=100)

    def recorded(task):
        run = task.run
        signature = inspect.signature(run)

        @functools.wraps(run)
        def wrapper(*args, **kwargs):
            first = [str(value) for value in signature.bind(*args, **kwargs).args[:1]]
            name = task.name.rpartition(".")[2]
            with body(EVENTS, " ".join([name, *first])):
                may_begin(name)
                done = run(*args, **kwargs)
                may_end()
                return done

        task.run = wrapper

    for name in ("bill", "load", "report", "remind"):
        recorded(app.tasks[f"example_worker.app.{name}"])
"""


@pytest.fixture
def settings(tmp_path, broker):
    (tmp_path / "recorded.py").write_text(textwrap.dedent(RECORDED))

    def made(nodes, **more):
        return {
            "BROKER_URL": broker.url,
            "RESULT_URL": broker.url,
            "REDLOCK_NODES": ",".join(node.url for node in nodes),
            "LEDGER_URL": f"sqlite:///{tmp_path / 'ledger.sqlite3'}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            **more,
        }

    return made


@pytest.fixture
def trusted(five_nodes, settings):
    """The environment with five nodes on which, by the operator's word, no lock is held."""
    made = settings(five_nodes, REDLOCK_MAX_TTL="60", VISIBILITY_TIMEOUT="3")
    urls, rules = [node.url for node in five_nodes], Rules(ttl=60, max_ttl=60)
    enrolled = {"enrolled"}  # of those that did not answer in time, at another try
    eventually(lambda: {*bootstrap(urls, rules).values()} == enrolled, "enrolment of all")
    return made


def publish(env, *arguments):
    done = subprocess.run(
        [*PUBLISH, "--first", "1", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert not done.stderr, done.stderr
    lines = [re.fullmatch(r"[0-9a-f-]{8}  (.{16})  (.+)", x) for x in done.stdout.splitlines()]
    return [(line[1].strip(), line[2]) for line in lines], done.returncode


def ledger(env):
    with create_engine(env["LEDGER_URL"], poolclass=NullPool).connect() as db:
        return {row.name: row.writes for row in db.execute(text("SELECT name, writes FROM entry"))}


@pytest.fixture(params=["sqlite", "postgresql"])
def with_ledger(request, trusted):
    if request.param == "postgresql":
        return {**trusted, "LEDGER_URL": request.getfixturevalue("database").url}
    return trusted


def test_copies_published_together_run_once(with_ledger, start_worker, events):
    trusted = with_ledger
    env = {**trusted, "OTHERS": str(13 - 5)}  # nobody ends before all copies were skipped
    for _ in range(2):  # with a slot for each copy: one that had to wait would run afterwards
        start_worker("recorded", env=env, pool="threads", concurrency=13)
    several = ("--reports", "2", "--reminders", "2")
    lines, code = publish(trusted, "--loads", "0", *several, "--seconds", "0.1")
    assert code == 0
    assert len(lines) == 13
    ran = recording.bodies(recording.read(events))
    assert sorted(body.name for body in ran) == [
        *("bill 1", "bill 2", "bill 3", "remind 1", "report")
    ]
    assert all(body.finished for body in ran)
    for body in ran:
        others = [words for what, words in lines if what == body.name]
        (done,) = [words for words in others if words.startswith("SUCCESS: ")]
        others.remove(done)
        says_who = rf"skipped \(conflict\): task [0-9a-f]{{8}} runs on \S+, process {body.pid}"
        assert all(re.fullmatch(says_who, words) for words in others), others
    assert ledger(trusted) == {
        "invoice 1": 1,
        "invoice 2": 1,
        "invoice 3": 1,
        "reminder 1": 1,
        "report": 1,
    }
    lines, _ = publish(trusted, "--loads", "0", "--copies", "1")
    assert [words for _, words in lines] == [
        f"SUCCESS: invoice {number} was billed before" for number in (1, 2, 3)
    ]


def test_an_import_longer_than_its_lease_is_never_overtaken(
    trusted, start_worker, events, tmp_path
):
    gate = tmp_path / "gate"
    workers = [start_worker("recorded", env={**trusted, "GATE": str(gate)}) for _ in range(2)]

    def is_redelivered():
        log = "".join(worker.log() for worker in workers)
        ids = re.findall(r"load\[(\S+)\] received", log)
        put_off = re.findall(r"Rescheduled task \S*load\[(\S+)\]", log)
        return put_off and any(ids.count(one) > 1 for one in {*ids} - {*put_off})

    with ThreadPoolExecutor(1) as thread:
        published = thread.submit(publish, trusted, "--invoices", "0", "--rows", "4")
        eventually(is_redelivered, "copy that is redelivered", timeout=100)
        gate.touch()
        lines, code = published.result(110)
    assert code == 0
    assert [what for what, _ in lines] == ["load stock.csv"] * 2
    success = r"SUCCESS: 4 rows of stock.csv with fence (\d+), (\d+) renewals"
    told = [re.fullmatch(success, words) for _, words in lines]
    assert all(told), lines
    assert len({match[1] for match in told}) == 2, "each run has a fence of its own"
    assert all(int(match[2]) >= 2 for match in told), "it was not kept by the watchdog"
    happened = recording.read(events)
    assert recording.overlaps(happened) == []
    assert [body.name for body in recording.bodies(happened)] == ["load stock.csv"] * 2
    assert ledger(trusted) == {f"stock.csv row {row}": 2 for row in range(4)}


def test_an_import_is_taken_over_from_a_killed_worker(trusted, start_worker, events):
    first = start_worker("recorded", env=trusted)
    with subprocess.Popen(
        # Ten seconds of them: it is killed amid the import, however slow this process is.
        [*PUBLISH, "--invoices", "0", "--loads", "1", "--rows", "20"],
        cwd=ROOT,
        env={**os.environ, **trusted},
        stdout=subprocess.PIPE,
        text=True,
    ) as publisher:
        eventually(lambda: recording.read(events, "start"), "start of the import")
        first.kill()
        start_worker("recorded", env=trusted)
        told, _ = publisher.communicate(timeout=110)
    assert "SUCCESS: 20 rows" in told
    broken, whole = recording.bodies(recording.read(events))
    assert (broken.finished, whole.finished) == (False, True)
    assert recording.overlaps(recording.read(events)) == []


def test_beat_has_the_report_made(trusted, start_worker, events, tmp_path):
    start_worker("recorded", env=trusted)
    env = {**trusted, "REPORT_EVERY": "3"}
    command = [
        "beat",
        "-S",
        "redlock",
        "-l",
        "INFO",
        "-s",
        str(tmp_path / "schedule"),
        "--pidfile",
        "",
    ]
    with CeleryProcess(
        "example_worker.app", command, ready="beat: Starting", env=env, cwd=tmp_path
    ):
        eventually(lambda: len(recording.read(events, "end")) >= 3, "three reports", timeout=100)
    assert {event["name"] for event in recording.read(events, "start")} == {"report"}
    assert recording.overlaps(recording.read(events)) == []


def test_the_first_up_puts_tasks_off_until_the_quarantine_ends(
    redis_nodes, settings, broker, start_worker, events
):
    """
    Nobody runs bootstrap: nodes as in docker-compose.yml, tasks at once, and none is lost.

    With the example's 20 s this takes 22 s, with the default of 60 s it takes 64 s.
    """
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    own = settings((), REDLOCK_MAX_TTL="15")
    del own["REDLOCK_NODES"]  # a publisher does not ask them
    with ThreadPoolExecutor(1) as thread, redis.Redis.from_url(broker.url) as client:
        # The tasks are there first: a slow start of the publisher would outlast the quarantine.
        words = ("--loads", "0", "--copies", "1", "--seconds", "0.1")
        published = thread.submit(publish, own, *words)
        eventually(lambda: client.llen("celery") == 3, "three messages")
        nodes = redis_nodes(5, extra_args=compose["services"]["lock-1"]["command"][1:])
        started = recording.now()
        worker = start_worker("recorded", env=settings(nodes, REDLOCK_MAX_TTL="15"))
        lines, code = published.result(110)
    rules = Rules(ttl=15, max_ttl=15)
    assert code == 0
    assert all(words.startswith("SUCCESS: invoice") for _, words in lines), lines
    ran = recording.bodies(recording.read(events))
    assert [body.name for body in ran] == ["bill 1", "bill 2", "bill 3"]
    assert rules.quarantine == pytest.approx(16.75)
    assert min(body.started for body in ran) - started > rules.quarantine
    assert "No lock can be granted for" in worker.log()
    assert "Rescheduled task" in worker.log()
