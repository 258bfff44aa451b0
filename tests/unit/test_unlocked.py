"""Options of ours on tasks that take no lock: a forgotten base class is found."""

from __future__ import annotations

import logging
import re
import sys
import types

import pytest
from celery import Celery, Task

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.protect import CheckSetting
from celery_redlock.task.base import RedlockTask as Ours
from celery_redlock.task.option_names import OPTIONS
from celery_redlock.task.unlocked import OURS, check_at_start, unlocked_tasks

#: Where packages are that somebody has installed.
INSTALLED = "/venv/lib/python3.12/site-packages/{}/__init__.py"


def body(invoice):
    pass


@pytest.fixture
def app():
    return Celery("shop", broker="memory://", set_as_current=False)


@pytest.fixture
def library(monkeypatch):
    """Return a function that makes a base class of an installed package."""

    def make(name="celery_singleton", **attributes):
        module = types.ModuleType(name)
        module.__file__ = INSTALLED.format(name)
        monkeypatch.setitem(sys.modules, name, module)
        return type("Singleton", (Task,), {"abstract": True, "__module__": name, **attributes})

    return make


def declare(app, name="shop.bill", **options):
    app.task(name=name, shared=False, **options)(body)


def found(app):
    return [tuple(one) for one in unlocked_tasks(app)]


def start(app):
    """Do what a worker does at its start, whatever the app knows of us."""
    CheckSetting(types.SimpleNamespace(app=app))


@pytest.mark.parametrize("option", OPTIONS)
def test_any_option_without_our_base_keeps_a_worker_from_starting(app, option, caplog):
    """Naming task, option and fix; the twin with the base starts."""
    declare(app, **{option: "x"})
    words = rf"shop.bill: {option} has no effect, .*base=RedlockTask.*redlock_protect"
    with pytest.raises(ConfigurationError, match=words):
        start(app)
    assert option in caplog.text
    twin = Celery("shop", broker="memory://", set_as_current=False)
    declare(twin, base=RedlockTask)
    start(twin)


def test_all_of_its_options_and_other_such_tasks_are_named(app):
    declare(app, lock_key="a", on_conflict="fail")
    for number in range(7):
        declare(app, f"shop.other-{number}", lock_ttl=5)
    with pytest.raises(ConfigurationError) as error:
        start(app)
    assert str(error.value).startswith("shop.bill: lock_key and on_conflict have no effect")
    assert re.search(r"Likewise shop.other-0, .*shop.other-4, \.\.\.$", str(error.value))


def test_a_base_class_of_the_users_is_no_excuse(app):
    """Wherever in it the option stands; a value of None says nothing."""

    class Billing(Task):
        abstract = True
        lock_ttl, lock_wait = 60, None

    declare(app, base=type("Late", (Billing,), {"abstract": True}))
    assert found(app) == [("shop.bill", ("lock_ttl",), "")]


def test_a_class_that_is_registered_is_found(app):
    kind = type("Bill", (Task,), {"name": "shop.bill", "run": body, "unique_until": "started"})
    app.register_task(kind())
    assert found(app) == [("shop.bill", ("unique_until",), "")]


@pytest.mark.parametrize("form", [dict, lambda one: [one]])
def test_an_annotation_is_found(app, form):
    """One for this task; one for all tasks is meant for those that take a lock."""
    given = {"*": {"lock_ttl": 60}, "shop.bill": {"on_conflict": "fail"}}
    app.conf.task_annotations = form(given)
    declare(app)
    declare(app, "shop.other")
    assert found(app) == [("shop.bill", ("on_conflict",), "")]


def test_tasks_that_take_a_lock_and_plain_ones_are_left_alone(app):
    app.Task = RedlockTask
    app.conf.redlock_protect = {"shop.named": {"lock_ttl": 5}, "shop.own": None}
    declare(app, lock_key="a")
    declare(app, "shop.plain", base=Task)
    declare(app, "shop.named", base=Task, lock_wait=5)
    declare(app, "shop.own", base=Task, overlap="a word of the user's")
    assert found(app) == []
    start(app)


def test_what_redlock_protect_leaves_is_meant_so(app):
    """Without that word the same task is found, also beside a setting."""
    app.conf.redlock_protect = {"shop.other": None}
    declare(app, overlap=3)
    with pytest.raises(ConfigurationError, match=re.escape("{'shop.bill': None}")):
        check_at_start(app)
    twin = Celery("shop", broker="memory://", set_as_current=False)
    twin.conf.redlock_protect = {"shop.bill": None}
    declare(twin, overlap=3)
    check_at_start(twin)


@pytest.mark.parametrize("given", [{}, {"unique_on": ["invoice"]}], ids=["inherited", "declared"])
def test_what_another_library_owns_is_a_warning(app, library, caplog, given):
    """Of celery-singleton's ``unique_on``; once, however many tasks there are."""
    base = library(unique_on=None if given else ["invoice"])
    for number in range(3):
        declare(app, f"shop.{number}", base=base, **given)
    with caplog.at_level(logging.WARNING):
        start(app)
    (warning,) = [one for one in caplog.messages if "celery_singleton" in one]
    assert "unique_on of its own" in warning
    assert {library for _, _, library in found(app)} == {"celery_singleton"}


def test_celery_singleton_keeps_its_own(app, caplog):
    """It has two of our names, one as a method; its tasks start as ever."""
    singleton = pytest.importorskip("celery_singleton")
    declare(app, base=singleton.Singleton, unique_on=["invoice"])
    with caplog.at_level(logging.WARNING):
        start(app)
    (warning,) = caplog.messages
    assert warning.startswith("celery_singleton has unique_on and on_duplicate of its own")


def test_an_app_without_us_hears_nothing_of_other_libraries(app, library, caplog, monkeypatch):
    """The package may be installed for another app."""
    monkeypatch.delitem(sys.modules, OURS)
    declare(app, base=library(unique_on=["invoice"]))
    with caplog.at_level(logging.WARNING):
        start(app)
    assert caplog.messages == []


def test_an_option_of_ours_beside_anothers_attribute_is_found(app, library):
    declare(app, base=library(unique_on=None), unique_on=["invoice"], lock_ttl=5)
    assert set(found(app)) == {
        ("shop.bill", ("lock_ttl",), ""),
        ("shop.bill", ("unique_on",), "celery_singleton"),
    }


def test_an_app_that_is_installed_itself_is_no_library(app, library):
    """As in a container: its own classes are known by the app's name."""
    declare(app, base=library("shop.tasks", lock_ttl=5))
    assert found(app) == [("shop.bill", ("lock_ttl",), "")]


def test_the_names_are_those_of_our_base():
    assert {name for name in OPTIONS if not hasattr(Ours, name)} == set()
