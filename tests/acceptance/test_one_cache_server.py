"""
A Django project on the one Redis that it has, which is its cache, too, and may evict keys.

No setting of ours is there: broker, results and cache are what most projects have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.events import overlaps, read
from support.eviction import evict, evicting
from support.waiting import eventually
from support.worker import CeleryProcess

pytestmark = pytest.mark.long

FILES = {
    "mysite/__init__.py": "from mysite.celery import app as celery_app\n",
    "mysite/celery.py": """
import os
from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "mysite.settings")
app = Celery("mysite")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
""",
    "mysite/settings.py": """
import os

SECRET_KEY = "of no use"
USE_TZ = True
INSTALLED_APPS = ["shop"]
REDIS = os.environ["REDIS"]
CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS.replace("127.0.0.1", "localhost") + "/0",
    },
    "pages": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "pages"},
}
CELERY_BROKER_URL, CELERY_RESULT_BACKEND = REDIS + "/1", REDIS + "/0"
CELERY_REDLOCK_TTL = CELERY_REDLOCK_MAX_TTL = 12.0
CELERY_REDLOCK_NODE_TIMEOUT = 1.0
if "PROTECT" in os.environ:
    CELERY_REDLOCK_PROTECT = {os.environ["PROTECT"]: None}
""",
    "shop/__init__.py": "",
    "shop/tasks.py": """
import os, time
from celery import shared_task
from celery_redlock import RedlockTask
from support.events import body

@shared_task(base=RedlockTask, lock_key="report:{day}")
def report(day):
    with body(os.environ["EVENTS"], "report"):
        time.sleep(60)

if os.environ["FORGOTTEN"] == "True":

    @shared_task(lock_key="invoice:{invoice}", on_conflict="fail")
    def bill(invoice):
        with body(os.environ["EVENTS"], f"bill {invoice}"):
            pass
""",
}
PUBLISH = "import mysite, shop.tasks as it; it.{}.delay({!r})"
CLEAR = "import django; django.setup(); from django.core.cache import cache; cache.clear()"


@pytest.fixture
def project(tmp_path, redis_nodes, events):
    """The server, and the environment of the project's processes."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.lstrip())
    (server,) = redis_nodes(1)
    # Not so short that a stall ends a lease before a renewal has told why it cannot be renewed.
    bootstrap([server.url], Rules(ttl=12.0, max_ttl=12.0))
    return server, {
        "DJANGO_SETTINGS_MODULE": "mysite.settings",
        "REDIS": server.url.removesuffix("/0"),
        "EVENTS": str(events),
        "FORGOTTEN": "False",
    }


def run(folder, env, *words):
    """Run Python to its end, and return the code of its exit and what it wrote."""
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def publish(folder, env, task, argument):
    code, _, told = run(folder, env, "-c", PUBLISH.format(task, argument))
    assert code == 0, told


def doctor(folder, env):
    """Return code -> finding."""
    words = ("-m", "celery", "-A", "mysite", "redlock", "doctor", "--json")
    code, told, error = run(folder, env, *words)
    assert code == 1, error
    return {one["code"]: one for one in json.loads(told)["findings"]}


def begun(events, name):
    return [event for event in read(events, "start") if event["name"] == name]


def test_a_cache_that_is_cleared_is_named_before_and_after(project, tmp_path, start_worker, events):
    """In the warning at the start, by what the task fails with, and by the doctor."""
    _, env = project
    worker = start_worker("mysite", env=env, concurrency=1)
    (warning,) = re.findall(r"WARNING.*cache\.clear\(\).*", worker.log())
    assert "Django's cache 'default'" in warning
    publish(tmp_path, env, "report", "monday")
    eventually(lambda: begun(events, "report"), "the body")
    assert run(tmp_path, env, "-c", CLEAR)[0] == 0
    worker.wait_for_log(r"LockLost: .*the node forgot it \(it was restarted or flushed")
    assert "not renewed in time" not in worker.log()
    found = doctor(tmp_path, env)
    assert "Django's cache 'default'" in found["cache-on-node"]["what"]
    assert "cache.clear()" in found["leases-lost"]["fix"]
    assert "larger lock_ttl helps" not in found["leases-lost"]["fix"]


def test_an_eviction_stops_locks_for_a_while_and_no_longer(project, tmp_path, start_worker, events):
    """One warning at the start; the body is told, and the next one waits for the quarantine."""
    server, env = project
    client = evicting(server)
    worker = start_worker("mysite", env=env, concurrency=2)
    assert len(re.findall(r"WARNING.*maxmemory-policy noeviction", worker.log())) == 1
    publish(tmp_path, env, "report", "monday")
    eventually(lambda: begun(events, "report"), "the body")
    evict(client)
    publish(tmp_path, env, "report", "monday")
    worker.wait_for_log(r"LockLost: .*evicted keys")
    eventually(lambda: len(begun(events, "report")) == 2, "the second body", timeout=100)
    assert overlaps([event for event in read(events) if event["name"] == "report"]) == []
    assert "has evicted" in doctor(tmp_path, env)["node-eviction"]["what"]


def test_a_forgotten_base_class_keeps_a_worker_from_starting(project, tmp_path, events):
    """Its twin says in redlock_protect that it is meant so, starts, and runs without a lock."""
    _, env = project
    env |= {"FORGOTTEN": "True"}
    command = ["worker", "-P", "solo", "-l", "INFO", "--without-mingle", "--without-gossip"]
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}

    def worker(**more):
        return CeleryProcess(
            "mysite", command, ready=r"ready\.", env={**env, **path, **more}, cwd=tmp_path
        )

    with pytest.raises(AssertionError, match="has ended") as ended:
        worker().__enter__()
    assert re.search(r"shop\.tasks\.bill: lock_key and on_conflict have no", str(ended.value))
    assert "base=RedlockTask" in str(ended.value)
    assert doctor(tmp_path, env)["option-without-lock"]["where"] == "shop.tasks.bill"
    with worker(PROTECT="shop.tasks.bill"):
        publish(tmp_path, env, "bill", 7)
        eventually(lambda: begun(events, "bill 7"), "the body")
