"""
A Django project that has nothing of ours but two lines of settings, and a package's tasks.

No module of it imports celery-redlock. Its worker, its web processes and django-celery-beat do what
they do in any project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.events import overlaps, read
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
INSTALLED_APPS = ["django_celery_beat", "vendor"]
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "db.sqlite3",
        "OPTIONS": {"timeout": 20, "transaction_mode": "IMMEDIATE"},
    }
}
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ["BROKER"]
CELERY_BEAT_SCHEDULER = "django_celery_beat.schedulers:DatabaseScheduler"
CELERY_REDLOCK_NODES = os.environ["NODES"].split()
CELERY_REDLOCK_NODE_TIMEOUT = 10.0
if os.environ["PROTECTED"] == "True":
    INSTALLED_APPS += ["celery_redlock.protect"]
    CELERY_REDLOCK_PROTECT = {
        "vendor.tasks.sync": {"unique_on": ["order_id"], "unique_until": "finished"},
        "vendor.*": {},
    }
""",
    "vendor/__init__.py": "",
    "vendor/tasks.py": """
import os, time
from pathlib import Path
from celery import shared_task
from support.events import body

@shared_task
def sync(order_id, force=False):
    with body(os.environ["EVENTS"], "sync"):
        while not Path(os.environ["PUBLISHED"]).exists():
            time.sleep(0.02)
    return f"order {order_id} is in sync"

@shared_task
def tick():
    with body(os.environ["EVENTS"], "tick"):
        time.sleep(1.7)
""",
}
PREPARE = """
import django
django.setup()
from django.core.management import call_command
from django_celery_beat.models import IntervalSchedule, PeriodicTask

call_command("migrate", verbosity=0)
every = IntervalSchedule.objects.create(every=1, period="seconds")
PeriodicTask.objects.create(name="tick", task="vendor.tasks.tick", interval=every)
"""
#: As a view publishes.
PUBLISH = """
import json, os
from pathlib import Path
import mysite, django
django.setup()
from vendor.tasks import sync

results = [sync.delay(7), sync.delay(7, force=True)]
Path(os.environ["PUBLISHED"]).touch()
print(json.dumps([[result.id, result.get(timeout=100)] for result in results]))
"""


@pytest.fixture(params=[True, False], ids=["protected", "twin"])
def project(request, tmp_path, redis_nodes, broker, events):
    """Whether the project has our two lines, and the environment of its processes."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.lstrip())
    # No node is away here, and who publishes without them for once publishes twice.
    patient = "?socket_timeout=20&socket_connect_timeout=20"
    nodes = [node.url + patient for node in redis_nodes(3)]
    enrolled = {"enrolled"}
    eventually(lambda: {*bootstrap(nodes, Rules()).values()} == enrolled, "enrolment of all")
    return request.param, {
        "DJANGO_SETTINGS_MODULE": "mysite.settings",
        "BROKER": broker.url,
        "NODES": " ".join(nodes),
        "PROTECTED": str(request.param),
        "EVENTS": str(events),
        "PUBLISHED": str(tmp_path / "published"),
    }


def run(folder, env, *words, code=0):
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
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


def ended(events, name):
    return sum(event["name"] == name for event in read(events, "end"))


def ticks(events):
    return [event for event in read(events) if event["name"] == "tick"]


def test_a_project_is_protected_by_its_settings_alone(project, tmp_path, start_worker, events):
    is_protected, env = project
    run(tmp_path, env, "-c", PREPARE)
    start_worker("mysite", env=env, concurrency=5)
    beat = CeleryProcess(
        "mysite",
        ["beat", "-l", "INFO", "--pidfile="],
        ready="beat: Starting",
        env=env,
        cwd=tmp_path,
    )
    with beat:
        (first, value), (again, other) = json.loads(run(tmp_path, env, "-c", PUBLISH))
        assert value == other == "order 7 is in sync"
        assert (first == again) is is_protected
        if is_protected:
            eventually(lambda: ended(events, "tick") >= 2, "two ticks")
        else:
            eventually(lambda: overlaps(ticks(events)), "ticks that overlap")
    assert ended(events, "sync") == (1 if is_protected else 2)
    assert bool(overlaps(ticks(events))) is not is_protected
    why = ["-m", "celery", "-A", "mysite", "redlock", "why", "vendor.tasks.sync", "[7]"]
    told = run(tmp_path, env, *why, code=0 if is_protected else 2)
    assert ("takes no lock" in told) is not is_protected
    assert ("vendor.tasks.sync:" in told) is is_protected
