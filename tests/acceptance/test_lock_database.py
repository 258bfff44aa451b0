"""A database as the lock node: its tables, and all tools and a worker on it."""

from __future__ import annotations

import json
import re
import sqlite3
import urllib.request

import pytest

from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.urls import rules_for
from celery_redlock.reading.nodes import bootstrap
from support.kinds import POSTGRESQL, each, postgres_by_kind
from support.postgres import DURABLE
from support.waiting import eventually

SHOP = """
    import os, time
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ.get("BACKEND"))
    if os.environ.get("NODES"):
        app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_ttl = app.conf.redlock_max_ttl = 60
    app.conf.redlock_node_timeout = 10.0  # no database hangs here
    app.conf.redlock_web_token = "web-t0ken-web-t0ken"

    @app.task(base=RedlockTask, lock_key="invoice:{number}", unique_until="finished")
    def bill(number):
        time.sleep(600)

    @app.task(base=RedlockTask, lock_key="line", on_conflict="queue")
    def line(number, seconds=0.0):
        time.sleep(seconds)
        return number
"""
SECRET = "s3cret"
AWAY = f"postgresql://u:{SECRET}@127.0.0.1:1/app"


@pytest.fixture(scope="module")
def durable():
    with postgres_by_kind(DURABLE) as server_of:
        yield server_of


@pytest.fixture(params=each(POSTGRESQL))
def database(durable, request):
    with durable(request.param).database() as it:
        yield it


def url_of(database, user="redlock"):
    return f"postgresql://{user}@/{database.name}?host={database.folder}"


@pytest.fixture
def url(durable, database_kind, tmp_path):
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'locks.db'}"
        return
    with durable(database_kind).database() as it:
        yield url_of(it)


@pytest.fixture
def redlock(line, broker):
    """Run ``celery -A shop redlock ...`` on the node at a URL: its exit code and its output."""

    def run(url, *words, **env):
        environment = {"BROKER": broker.url, **env}
        code, out, err = line.redlock([url] if url else [], *words, env=environment)
        assert SECRET not in out + err
        return code, out + err

    return run


# -- the tables ---------------------------------------------------------------------------------


def test_init_makes_the_tables_once(redlock, url):
    code, said = redlock(url, "init")
    assert code == 0, said
    assert re.search(r"the tables are made\nLocks are granted from \S+ \S+ on \(in ", said)
    assert "If nobody holds any: celery -A shop redlock bootstrap" in said
    assert "the tables are there\nLocks are granted from" in redlock(url, "init")[1]
    code, said = redlock(url, "init", "--json")
    (node,) = json.loads(said)["nodes"]
    assert (code, node["made"], node["problem"]) == (0, False, "")
    assert 0 < node["quarantine"] <= 70
    assert redlock(url, "bootstrap", "--yes")[0] == 0
    assert redlock(url, "init")[1].endswith("the tables are there; locks are granted\n")


def test_what_init_prints_is_what_it_does(redlock, tmp_path, url):
    code, said = redlock(url, "init", "--print")
    assert (code, said.count(";\n")) == (0, len(address_of(url).tables()))
    if url.startswith("sqlite"):
        assert not (tmp_path / "locks.db").exists()
        with sqlite3.connect(tmp_path / "locks.db") as connection:
            connection.executescript(said)
        connection.close()
        assert "are there" in redlock(url, "init")[1]


def test_with_redis_there_is_nothing_to_make(redlock, redis_nodes):
    (node,) = redis_nodes(1)
    for words in ((), ("--print",)):
        code, said = redlock(node.url, "init", *words)
        assert (code, said[:25]) == (0, "Nothing is to be made: th")


def test_who_may_not_make_tables_is_told_who_may(redlock, database):
    url = url_of(database, "poor")
    database.server.do("DROP ROLE IF EXISTS poor")
    database.server.do("CREATE ROLE poor LOGIN")
    code, said = redlock(url, "init")
    assert code == 1
    assert "permission denied" in said
    assert "celery -A shop redlock init --print" in said
    assert redlock(url_of(database), "init")[0] == 0
    for words in (("status",), ("init",)):
        code, said = redlock(url, *words)
        assert code == 1
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON" in said
        assert "--print" not in said


def test_without_tables_bootstrap_speaks_of_no_command_of_redis(redlock, database):
    code, said = redlock(url_of(database), "bootstrap", "--yes")
    assert code == 1
    assert "celery -A shop redlock init" in said
    assert "see to what it says" in said
    assert "SCAN" not in said


# -- a worker's start, and a publisher ----------------------------------------------------------


def test_without_tables_a_worker_does_not_start(line, broker, database):
    environment = {"BROKER": broker.url}
    worker = line.start([url_of(database)], "-m", "celery", "-A", "shop", "worker", env=environment)
    _, err = worker.communicate(timeout=60)
    assert worker.returncode == 1
    said = [text for text in err.splitlines() if "CRITICAL" in text]
    assert len(said) == 1
    assert "has no tables for locks" in said[0]
    assert "celery -A shop redlock init" in said[0]


def test_without_tables_a_publisher_says_so(line, broker, database):
    code = "import shop; print(shop.bill.delay(7).duplicate)"
    told = line.start([url_of(database)], "-c", code, env={"BROKER": broker.url})
    out, err = told.communicate(timeout=60)
    assert out == "False\n"
    assert "redlock init" in err


def test_a_database_that_is_away_does_not_keep_a_worker_from_its_start(line, broker, tmp_path):
    log = tmp_path / "log"
    words = ("-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "INFO")
    with log.open("w") as file:
        line.start([AWAY], *words, env={"BROKER": broker.url}, stderr=file)
    eventually(lambda: " ready." in log.read_text(), "the worker is ready")
    assert "Lock node postgresql/app/celery_redlock does not answer" in log.read_text()
    assert SECRET not in log.read_text()


@pytest.mark.parametrize("words", [("doctor",), ("status",), ("init",), ("bootstrap", "--yes")])
def test_no_tool_shows_a_password(redlock, words):
    code, said = redlock(AWAY, *words)
    assert code == 1
    assert "onnection refused" in said


def test_a_missing_package_is_named(line, broker):
    block = "import sys; sys.modules['psycopg'] = None; import shop; shop.bill.delay(7)"
    told = line.start(["postgresql://db/app"], "-c", block, env={"BROKER": broker.url})
    _, err = told.communicate(timeout=60)
    assert "pip install 'celery-redlock[postgresql]'" in err


# -- the tools ----------------------------------------------------------------------------------


def test_the_database_of_the_result_backend_keeps_the_locks(redlock, database):
    backend = url_of(database).replace("postgresql:", "db+postgresql+psycopg2:")
    quiet = {"BACKEND": backend, "BROKER": "memory://"}
    assert redlock(None, "init", **quiet)[0] == 0
    assert redlock(None, "bootstrap", "--yes", **quiet)[0] == 0
    code, said = redlock(None, "doctor", **quiet)
    assert code == 0, said
    assert "The database of the result backend keeps the locks, too." in said


def test_every_tool_works_on_a_database(line, redlock, broker, url, tmp_path):
    address_of(url).make_tables()
    assert bootstrap([url], rules_for([url], ttl=60, max_ttl=60))
    code, said = redlock(url, "doctor")
    assert code == 0, said
    assert "durable" in said
    environment = {"BROKER": broker.url}
    log, words = tmp_path / "log", ("-m", "celery", "-A", "shop", "worker", "-c", "2", "-l", "INFO")
    with log.open("w") as file:
        worker = line.start([url], *words, env=environment, stderr=file)
    eventually(lambda: " ready." in log.read_text(), "the worker is ready")
    publish = "import shop; print([shop.bill.delay(7).duplicate for _ in range(2)])"
    out, err = line.start([url], "-c", publish, env=environment).communicate(timeout=60)
    assert out == "[False, True]\n", err
    eventually(lambda: "invoice:7" in redlock(url, "ls")[1], "the lock in the list", every=0.5)
    again = "import shop; shop.app.send_task('shop.bill', (7,))"
    line.start([url], "-c", again, env=environment).communicate(timeout=60)
    eventually(lambda: "Skipped" in log.read_text(), "the second one is skipped")
    eventually(lambda: "Skipped" in redlock(url, "tail", "--no-follow")[1], "in the journal")
    code, said = redlock(url, "why", "shop.bill", "[7]")
    assert code == 1
    assert "held." in said
    assert "Skipped" in said
    (lock,) = json.loads(redlock(url, "ls", "--json")[1])["locks"]
    assert lock["votes"]
    code, said = redlock(url, "release", "invoice:7", "--token", lock["token"], "--yes")
    assert code == 0, said
    eventually(lambda: "is lost" in log.read_text(), "the holder finds out")
    assert redlock(url, "report")[0] == 0
    code, said = redlock(url, "status", "--json")
    assert (code, json.loads(said)["quorum"]) == (0, True)
    worker.terminate()
    worker.wait(timeout=60)


def test_who_queues_runs_in_turn(line, broker, url, tmp_path):
    address_of(url).make_tables()
    bootstrap([url], rules_for([url], ttl=60, max_ttl=60))
    backend = f"db+sqlite:///{tmp_path / 'results.db'}"
    environment = {"BROKER": broker.url, "BACKEND": backend}
    words = ("-m", "celery", "-A", "shop", "worker", "-c", "2", "-l", "INFO")
    with (tmp_path / "log").open("w") as log:
        line.start([url], *words, env=environment, stderr=log)
    publish = "import shop; r = [shop.line.delay(n, 0.2) for n in range(5)]; "
    publish += "print([it.get(timeout=100) for it in r])"
    out, err = line.start([url], "-c", publish, env=environment).communicate(timeout=120)
    assert out == "[0, 1, 2, 3, 4]\n", err


def test_the_page_shows_a_database(redlock, line, url):
    assert redlock(url, "init")[0] == 0
    page = line.start_redlock([url], "web", "--port", "0", env={"BROKER": "memory://"})
    where = next(text for text in page.stderr if "Serving on http" in text)
    with urllib.request.urlopen(re.search(r"http://\S+", where)[0], timeout=60) as answer:
        shown = answer.read().decode()
    assert "The one node does not vote." in shown  # it is new
    assert ("SQLite" if url.startswith("sqlite") else "PostgreSQL") in shown
