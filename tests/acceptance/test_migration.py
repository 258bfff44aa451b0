"""Moving over: the doctor on apps with the real libraries, and what happens while both run."""

from __future__ import annotations

import json
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
from support.command_line import command_line, urls
from support.page_names import names_for
from support.page_run import PageRun, run_page
from support.pages import commands_of

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
SETTINGS = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask

    server = os.environ["BROKER"].removesuffix("/0")
    app = Celery("shop", broker=f"{server}/0", backend=f"{server}/1", set_as_current=False)
    app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_node_timeout = 1.0
    app.conf.broker_connection_retry_on_startup = True
"""
ALL = f"""{SETTINGS}
    from celery_heimdall import HeimdallTask, RateLimit
    from celery_once import QueueOnce
    from celery_once_task import OnceTask
    from celery_singleton import Singleton

    app.conf.ONCE = {{
        "backend": "celery_once.backends.Redis", "settings": {{"url": "redis://:s3cret@lock/0"}}
    }}
    app.conf.singleton_backend_url = "redis://:s3cret@lock/0"
    app.conf.redbeat_redis_url = "redis://:s3cret@lock/0"
    app.conf.redbeat_lock_timeout = 60
    app.conf.redlock_beat_scheduler = "redbeat.schedulers:RedBeatScheduler"

    class Ours(QueueOnce):
        abstract = True
        once = {{"graceful": True}}

    class Both(QueueOnce, RedlockTask):
        abstract = True

    class BothSingle(Singleton, RedlockTask):
        abstract = True

    def task(name, base, **options):
        @app.task(base=base, name=name, **options)
        def body(a=1, b=2):
            pass

    task("once", Ours)
    task("single", Singleton, unique_on=["a"])
    task("heimdall", HeimdallTask, heimdall={{"unique": True}})
    task("rate", HeimdallTask, heimdall={{"rate_limit": RateLimit((2, 60))}})
    task("once_task", OnceTask)
    task("left", RedlockTask, once={{"graceful": True, "keys": ["a"]}})
    task("refused", RedlockTask, lock_expiry=60)
    task("both", Both, once={{"graceful": True}})
    task("both_single", BothSingle)
    task("own", RedlockTask, once={{"upon": "a time"}}, unique_on=("a",))
    task("plain", None)
"""
NONE = f"""{SETTINGS}
    @app.task(base=RedlockTask, once="upon a time", unique_until="finished")
    def tale():
        pass
"""


@pytest.fixture
def servers_of(five_nodes, broker):
    """Environment of commands: three nodes that may vote, and the broker."""
    bootstrap(urls(five_nodes[:3]), Rules())
    return {"BROKER": broker.url, "NODES": " ".join(urls(five_nodes[:3]))}


def diagnosis(line, env):
    """Return the exit code and the findings that are about moving over."""
    code, out, err = line.redlock([], "doctor", "--json", env=env)
    assert out, err
    assert "s3cret" not in out + err
    return code, [f for f in json.loads(out)["findings"] if f["code"].startswith("migrate-")]


# -- the doctor ----------------------------------------------------------------------------


def test_the_doctor_knows_the_real_libraries(tmp_path, servers_of):
    """Each task with something of theirs has its finding, whatever else is wrong with it."""
    with command_line(tmp_path, ALL) as line:
        code, found = diagnosis(line, servers_of)
        shown = line.redlock([], "doctor", env=servers_of)[1]
    assert code == 1
    assert "s3cret" not in shown
    assert {(f["level"], f["code"], f["where"]) for f in found} == {
        ("note", "migrate-task", "once"),
        ("note", "migrate-task", "single"),
        ("note", "migrate-task", "heimdall"),
        ("note", "migrate-task", "rate"),
        ("note", "migrate-task", "once_task"),
        ("warning", "migrate-option", "left"),
        ("warning", "migrate-option", "refused"),
        ("error", "migrate-mixed", "both"),
        ("error", "migrate-mixed", "both_single"),
        ("note", "migrate-setting", "ONCE"),
        ("note", "migrate-setting", "singleton_backend_url"),
        ("note", "migrate-beat", "redbeat_lock_timeout"),
    }
    fixes = {f["where"]: f["fix"] for f in found}
    assert fixes["once"] == (
        "Write base=RedlockTask, unique_until='finished', on_duplicate='join'."
    )
    assert fixes["left"] == (
        "Instead of it write unique_on=('a',), unique_until='finished', on_duplicate='join'."
    )


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


def test_an_app_with_none_of_it_has_no_finding_and_imports_none(tmp_path, servers_of):
    """An attribute that happens to be called so is the user's own."""
    look = (
        "import shop, sys\n"
        "from celery_redlock.ops.doctor.diagnosis import findings, gather\n"
        "from celery_redlock.plugin import plugin_for\n"
        "found = findings(gather(shop.app, plugin_for(shop.app).settings, print))\n"
        "assert not [f for f in found if f.code.startswith('migrate-')], found\n"
        "theirs = {'celery_once', 'celery_singleton', 'celery_heimdall', 'celery_once_task'}\n"
        "assert not (theirs | {'redbeat'}) & set(sys.modules)\n"
        "print('none')"
    )
    with command_line(tmp_path, NONE) as line:
        assert diagnosis(line, servers_of) == (0, [])
        out, err = line.start([], "-c", look, env=servers_of).communicate(timeout=60)
    assert out.endswith("none\n"), err


# -- the page ------------------------------------------------------------------------------


def test_the_page_shows_what_the_doctor_says_before_and_nothing_is_left_after(tmp_path):
    """Its apps are run as they stand there, each before and after it is moved."""
    text, apps = PAGE.read_text(), {}
    with names_for(text) as names:

        def take(run, block):
            PageRun.take(run, block)
            name = block.notes.get("file", "").removesuffix(".py")
            if name in apps:  # for the second time: moved
                apps[name] = (tmp_path / f"{name}.py").read_text()
            for command in commands_of(block) if block.language == "console" else ():
                found = re.fullmatch(r"celery -A (\w+) redlock doctor", command.text)
                assert found, command
                assert any("migrate-" in line for line in command.shown)
                apps[found[1]] = None

        with run_page(PAGE, tmp_path, names, take):
            assert sorted(apps) == sorted(re.findall(r"celery -A (\w+_shop) redlock doctor", text))
            assert all(apps.values()), "an app is not shown after it was moved"
            for app, source in apps.items():
                with command_line(tmp_path, source, app) as line:
                    code, out, err = line.redlock([], "doctor", "--json", app=app)
                assert code == 0, out + err
                left = [f["where"] for f in json.loads(out)["findings"] if "migrate" in f["code"]]
                assert left == {"heimdall_shop": ["heimdall_shop.download"]}.get(app, [])


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
    """Either runs the other's messages, and neither ends the other's key or marker."""
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
