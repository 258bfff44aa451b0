"""django-celery-results: results in Django's database, also those that are joined."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from companions import shop
from support.stage import stage

#: Not imported here: it would change this process for other tests.
pytestmark = pytest.mark.skipif(find_spec("django_celery_results") is None, reason="not installed")
SETTINGS = "companions.django_settings"


def declare(app):
    if shop.is_with_companion():
        import django

        django.setup()
        app.conf.update(result_backend="django-db", result_extended=True)
    shop.declare(app)


def test_a_day_with_results_in_django(tmp_path):
    database = str(tmp_path / "results.sqlite")
    known = {"DJANGO_SETTINGS_MODULE": SETTINGS, "DATABASE": database}
    in_django(known, "from django.core.management import call_command; call_command('migrate')")
    with stage(__file__, tmp_path, nodes=3) as it:
        it.worker(env={"COMPANION": "yes", **known})
        found = shop.spend_a_day(it, **known)
    told = in_django(
        known,
        "from django_celery_results.models import TaskResult\n"
        "for one in TaskResult.objects.all(): print(one.task_id, one.task_name, one.status)",
    )
    stored = {tuple(line.split()) for line in told.splitlines()}
    names = ["bill", "bill", "again", "broken", "shy", "remind"]
    states = ["SUCCESS", "SUCCESS", "SUCCESS", "FAILURE", "SUCCESS", "SUCCESS"]
    assert stored == set(zip(found["ids"], names, states, strict=True))


def in_django(known, source):
    path = os.pathsep.join([str(shop.TESTS), os.environ.get("PYTHONPATH", "")])
    source = f"import django; django.setup()\n{source}"
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, **known, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
