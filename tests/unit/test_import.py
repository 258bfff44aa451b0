"""What comes along with an import, and when the rest does."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import celery
import pytest
from celery.utils.imports import symbol_by_name

import celery_redlock
from celery_redlock import errors

ROOT = Path(celery_redlock.__file__).parents[1]
#: Slow to import, and needed by some processes alone.
SLOW = ("redis", "opentelemetry", "rich", "flask", "prometheus_client", "asyncio")
#: The module that runs tasks brings half a worker along.
TRACE = "celery.app.trace"

APP = """
from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.redlock_nodes = ["redis://one:1/0"]

@app.task(base=RedlockTask)
def bill(invoice_id):
    pass

app.finalize()
"""
LOOK_AT_SETTINGS = """
from celery_redlock import ConfigurationError
from celery_redlock.plugin import plugin_for

try:
    plugin_for(app).settings
except ConfigurationError as error:
    assert "not a URL" in str(error)
else:
    raise SystemExit("taken as they are")
"""


def loaded_by(*programs):
    told = "import sys; print('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*programs, told])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.rpartition("LOADED ")[2].split())


def slow_ones(modules):
    return {name for name in modules if name == TRACE or name.partition(".")[0] in SLOW}


# -- what an import brings along --------------------------------------------------------


def test_the_package_brings_nothing_along():
    """As with celery, whoever names something gets it; a version alone costs nothing."""
    modules = loaded_by("import celery, celery_redlock; celery_redlock.__version__")
    assert slow_ones(modules - loaded_by("import celery")) == set()
    assert {name for name in modules if name.startswith("celery_redlock")} == {"celery_redlock"}


def test_who_only_answers_celery_inspect_imports_no_redis():
    """Every worker loads the commands, and so does the command line."""
    mine, celerys = "import celery_redlock.ops.control", "import celery.worker.control"
    assert slow_ones(loaded_by(mine) - loaded_by(celerys)) == set()


def test_a_worker_that_a_program_starts_knows_the_commands_of_inspect():
    """By the step that checks its configuration; one that ``celery`` starts has loaded them."""
    known = "from celery.worker.control import Panel\nassert {} == ('redlock_locks' in Panel.data)"
    step = """
from types import SimpleNamespace
from celery.concurrency.solo import TaskPool
from celery_redlock.task.worker.start_steps import CheckLocks
from celery_redlock.testing import locks_disabled

with locks_disabled():
    CheckLocks(SimpleNamespace(app=app, pool_cls=TaskPool))
"""
    loaded_by(APP, known.format(False), step, known.format(True))


@pytest.mark.parametrize("use", ["", "bill.delay(1)"], ids=["declared", "published"])
def test_a_task_brings_redis_and_no_more(use):
    plain = APP.replace("celery_redlock", "celery").replace("RedlockTask", "Task")
    more = loaded_by(APP, use) - loaded_by(plain, use, "import redis")
    assert slow_ones(more) == set()


def test_a_first_lock_imports_nothing():
    """A fork in another thread meanwhile would leave the child with half an import, for ever."""
    first = "from celery_redlock.plugin import plugin_for\nplugin_for(app).locks"
    more = loaded_by(APP, first) - loaded_by(APP)
    assert {name for name in more if name.startswith(("celery_redlock", "redis"))} == set()


def test_the_entry_point_of_the_command_line_is_lean():
    """Every `celery` command imports it, a worker without a task of ours, too."""
    modules = loaded_by("import celery_redlock.ops.cli")
    ours = {name for name in modules if name.startswith("celery_redlock.")}
    assert {name for name in ours if not name.startswith("celery_redlock.ops")} == {
        "celery_redlock.protect"
    }
    assert slow_ones(modules - loaded_by("import celery.bin.celery")) == set()


def test_settings_are_checked_before_a_lock_is_taken():
    wrong = APP.replace("redis://one:1/0", "http://one:1/0")
    assert "redis" in loaded_by(wrong, LOOK_AT_SETTINGS)


# -- the names are what they were -------------------------------------------------------


@pytest.mark.parametrize("name", celery_redlock.__all__)
def test_a_public_name_is_what_its_module_has(name):
    found = getattr(celery_redlock, name)
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert found.__module__.startswith("celery_redlock.")
    assert name in dir(celery_redlock)
    assert vars(celery_redlock)[name] is found


def test_every_way_to_a_name_works_in_a_fresh_interpreter():
    loaded_by("from celery_redlock import *; RedlockTask, LockLost, current_lock, Retry")
    loaded_by("import celery_redlock; celery_redlock.errors.LockLost, celery_redlock.task.__doc__")
    shown = "pydoc.render_doc(celery_redlock, renderer=pydoc.plaintext)"
    loaded_by(f"import celery_redlock, pydoc; assert 'class RedlockTask' in {shown}")
    loaded_by(
        "from celery import Celery; app = Celery(task_cls='celery_redlock:RedlockTask')",
        "assert app.Task.__mro__[1].__name__ == 'RedlockTask', app.Task.__mro__",
    )


def test_each_room_of_the_past_is_there():
    """`import celery_redlock` had these imported; whoever relied on it still may."""
    for room in celery_redlock._ROOMS:
        assert getattr(celery_redlock, room) is sys.modules[f"celery_redlock.{room}"]
    named = {name for names in celery_redlock._HOMES.values() for name in names}
    assert named == set(celery_redlock.__all__)


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(AttributeError) as told:
        celery_redlock.RedLockTask  # noqa: B018
    with pytest.raises(AttributeError) as of_any:
        errors.RedLockTask  # noqa: B018
    assert str(told.value) == str(of_any.value).replace("celery_redlock.errors", "celery_redlock")
    with pytest.raises(ImportError, match="cannot import name 'RedLockTask'"):
        exec("from celery_redlock import RedLockTask")
    assert not hasattr(celery_redlock, "__wrapped__")


def test_classes_are_pickled_by_their_modules():
    """A process that has imported nothing yet reads what another one wrote."""
    error = errors.LockTaken("invoice:1", {"one:1/0": "held"}, {"task_id": "a"})
    read = f"import pickle; error = pickle.loads({pickle.dumps(error)!r})"
    known = f"assert (str(error), error.holder) == ({str(error)!r}, {error.holder!r})"
    assert "celery_redlock.errors" in loaded_by(read, known)
    for name in celery_redlock.__all__:
        found = getattr(celery_redlock, name)
        assert pickle.loads(pickle.dumps(found)) is found


def test_the_name_in_task_cls_is_found():
    found = symbol_by_name("celery_redlock:RedlockTask")
    assert issubclass(found, celery.Task)
    assert found is celery_redlock.RedlockTask
