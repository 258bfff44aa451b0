"""Moving over from the real libraries: the apps of the page, and what happens while both run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis
from celery import Celery
from kombu.utils.imports import symbol_by_name

import celery_redlock.protect  # noqa: F401  for apps that import nothing of ours
from celery_redlock import ConfigurationError
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.command_line import CommandLine, command_line, urls
from support.page_names import names_for
from support.page_run import PageRun, run_page

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SETTINGS = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask
    from celery_redlock.lock.nodes import connections

    connections.FIRST_CONNECT = 20.0  # a server that is slow to answer is not down
    server = os.environ["BROKER"].removesuffix("/0")
    app = Celery("shop", broker=f"{server}/0", backend=f"{server}/1", set_as_current=False)
    app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_node_timeout = 1.0
    app.conf.broker_connection_retry_on_startup = True
"""


@pytest.fixture
def servers_of(five_nodes, broker):
    bootstrap(urls(five_nodes[:3]), Rules())
    return {"BROKER": broker.url, "NODES": " ".join(urls(five_nodes[:3]))}


def rebuild(user_id):
    """Do nothing."""


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # of theirs
def test_the_page_says_whose_tasks_cannot_be_watched_beside_their_library():
    """All others are watched by the setting, without a change to them."""
    refused = []
    bases = {
        "celery-once": "celery_once:QueueOnce",
        "celery-singleton": "celery_singleton:Singleton",
        "celery-heimdall": "celery_heimdall:HeimdallTask",
        "celery-once-task": "celery_once_task:OnceTask",
    }
    for library, base in bases.items():
        app = Celery("shop", set_as_current=False, broker="memory://")
        app.conf.update(redlock_mode="report", redlock_protect={"shop.*": {}})
        try:
            app.task(
                rebuild, base=symbol_by_name(base), name="shop.rebuild", shared=False, lazy=False
            )
        except ConfigurationError:
            refused.append(library)
    watching = next(line for line in PAGE.read_text().splitlines() if "a day of watching" in line)
    assert refused == re.findall(r"Tasks of (\S+) are refused", watching)


# -- the page ------------------------------------------------------------------------------


def test_each_app_of_the_page_works_before_and_after_it_is_moved(tmp_path):
    told, line = [], CommandLine(tmp_path)
    with names_for(PAGE.read_text()) as names:

        def take(run, block):
            PageRun.take(run, block)
            app = block.notes.get("file", "").removesuffix(".py")
            if app.endswith("_shop"):
                code, out, err = line.redlock([], "doctor", "--json", app=app)
                assert code == 0, f"{block}: {out}{err}"
                told.append(app)

        with run_page(PAGE, tmp_path, names, take):
            pass
    libraries = ("once_shop", "singleton_shop", "heimdall_shop", "once_task_shop", "redbeat_shop")
    assert {app: told.count(app) for app in told} == {**dict.fromkeys(libraries, 2), "own_shop": 1}


# -- while both versions run ---------------------------------------------------------------

OLD = f"""{SETTINGS}
    from celery_once import QueueOnce
    app.conf.ONCE = {{
        "backend": "celery_once.backends.Redis",
        "settings": {{"url": f"{{server}}/2", "default_timeout": 600}},
    }}

    @app.task(base=QueueOnce, once={{"graceful": True}}, name="rebuild")
    def rebuild(a):
        return "old"

    def publish():
        return rebuild.delay(7)
"""
NEW = f"""{SETTINGS}
    @app.task(base=RedlockTask, unique_until="finished", name="rebuild")
    def rebuild(a):
        return "new"

    def publish():
        result = rebuild.delay(7)
        return None if result.duplicate else result
"""


@pytest.mark.parametrize(
    ("by", "at", "is_dropped_afterwards"),
    [("old", "old", False), ("old", "new", True), ("new", "old", True), ("new", "new", False)],
)
def test_while_both_versions_run(by, at, is_dropped_afterwards, tmp_path, servers_of, start_worker):
    for name, source in (("old", OLD), ("new", NEW)):
        with command_line(tmp_path, source, name):
            pass
    worker = start_worker(at, env=servers_of)
    with command_line(tmp_path, "", "empty") as line:

        def told(code):
            process = line.start([], "-c", f"import {by}\n{code}", env=servers_of)
            out, err = process.communicate(timeout=60)
            return out.strip() or err

        assert told(f"print({by}.publish().get(timeout=100))") == at
        worker.terminate()  # with it ends what celery-once does after the result is stored
        with redis.Redis.from_url(servers_of["BROKER"].removesuffix("/0") + "/2") as client:
            left = [key.decode().partition("_")[0] for key in client.scan_iter()]
        assert left == (["qo"] if (by, at) == ("old", "new") else [])
        again = told(f"second = {by}.publish(); print(not (second and second.id))")
        assert again == str(is_dropped_afterwards)


def test_what_a_rate_limit_of_heimdall_puts_off_runs_under_both_bases(
    tmp_path, servers_of, start_worker
):
    """It lowers ``request.retries``, so its copy is an execution that was there before."""
    source = f"""{SETTINGS}
    from celery_heimdall import HeimdallTask, RateLimit

    class Both(RedlockTask, HeimdallTask):
        abstract = True

    @app.task(base=Both, heimdall={{"rate_limit": RateLimit((1, 10)), "key": "k"}}, name="limited")
    def limited(a):
        return a
    """
    with command_line(tmp_path, source) as line:
        worker = start_worker("shop", env=servers_of, concurrency=1)
        publish = "import shop\nprint([shop.limited.delay(n).id for n in range(2)])"
        line.start([], "-c", publish, env=servers_of).communicate(timeout=60)
        worker.wait_for_log(r"limited\[.* retry: ", timeout=100)
        worker.wait_for_log(r"(?s)limited\[\S+ succeeded.+limited\[\S+ succeeded", timeout=100)
        worker.terminate()
