"""The setting ``redlock_protect``: which options a task's name gets of it, and what is refused."""

from __future__ import annotations

import re

import pytest

from celery_redlock import ConfigurationError
from celery_redlock.task.naming.patterns import Patterns

ORDER = {"unique_on": ["order_id"]}


def is_of_vendor(name):
    return name.startswith("vendor.")


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("vendor.sync", ["vendor.sync"], ["vendor.sync2", "my.vendor.sync", "vendor_sync"]),
        ("vendor.*", ["vendor.sync", "vendor.a.b"], ["vendor", "my.vendor.sync", "Vendor.sync"]),
        ("vendor.?", ["vendor.a"], ["vendor.ab"]),
        ("vendor.[ab]", ["vendor.a"], ["vendor.c", "vendor.[ab]"]),
        ("*", ["vendor.sync", "a"], ["celery.backend_cleanup", "celery.chord"]),
        ("celery.*", [], ["celery.backend_cleanup", "celery.map"]),
        ("celery.backend_cleanup", ["celery.backend_cleanup"], ["celery.chord"]),
        (re.compile(r"vendor\.(sync|load)"), ["vendor.sync", "vendor.loads"], ["a.vendor.sync"]),
        (re.compile(".*"), ["vendor.sync"], ["celery.backend_cleanup"]),
        (is_of_vendor, ["vendor.sync"], ["shop.vendor.sync"]),
        (lambda name: True, ["vendor.sync"], ["celery.backend_cleanup"]),
    ],
)
def test_a_pattern_matches_as_those_of_task_routes_do(pattern, matched, others):
    """Except that Celery's own tasks are only matched by their exact names."""
    patterns = Patterns({pattern: ORDER})
    assert [name for name in (*matched, *others) if patterns.rule_for(name)] == matched
    assert all(patterns.rule_for(name).options == ORDER for name in matched)


def test_the_first_pattern_that_matches_counts():
    setting = {"shop.bill": None, "shop.b*": {"lock_ttl": 5}, "shop.*": ORDER, "shop.bell": {}}
    patterns = Patterns(setting)
    found = [patterns.rule_for(f"shop.{name}") for name in ("bill", "bell", "load")]
    assert [rule and rule.options for rule in found] == [None, {"lock_ttl": 5}, ORDER]


def test_a_pattern_that_looks_like_a_mistake_is_named():
    setting = {"shop.*": ORDER, "shop.bell": None, "shop.b*": {}, "shop.sink": {}, "*": None}
    patterns, names = Patterns(setting), ["shop.bell", "shop.sync"]
    assert all(patterns.rule_for(name) for name in names)
    assert patterns.without_effect(names) == [("shop.bell", "shop.*"), ("shop.sink", None)]


def test_a_callable_may_choose_the_options():
    asked = []

    def choose(name):
        asked.append(name)
        return ORDER if is_of_vendor(name) else None

    patterns = Patterns(choose)
    names = ["vendor.sync", "shop.bill", "celery.backend_cleanup"]
    assert [bool(patterns.rule_for(name)) for name in names] == [True, False, False]
    assert asked == names[:2]
    assert patterns.without_effect(names) == []


@pytest.mark.parametrize("setting", [{}.__getitem__, {{}.__getitem__: ORDER}])
def test_a_callable_that_fails_is_named(setting):
    with pytest.raises(ConfigurationError, match=r"redlock_protect.*'vendor.sync'.*KeyError"):
        Patterns(setting).rule_for("vendor.sync")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (["vendor.*"], r"redlock_protect must map patterns.*got list"),
        ("vendor.*", r"redlock_protect must map patterns.*got str"),
        (0, r"redlock_protect must map patterns.*got int"),
        ({3: {}}, r"redlock_protect: a pattern is a task's name.*got 3"),
        ({"": {}}, r"redlock_protect: a pattern is a task's name.*got ''"),
        ({re.compile(b"a"): {}}, r"redlock_protect: a pattern is.*of str"),
        ({"a.*": ["order_id"]}, r"redlock_protect\['a\.\*'\] must be options like.*got list"),
        ({"a.*": True}, r"redlock_protect\['a\.\*'\] must be options like.*got bool"),
        ({"a": {"lock_tll": 5}}, r"redlock_protect\['a'\]: unknown option lock_tll; .* lock_ttl\?"),
        ({"a": {"redlock_wait": 5}}, r"unknown option redlock_wait; did you mean lock_wait\?"),
        ({"a": {"queue": "x"}}, r"redlock_protect\['a'\]: unknown option queue; known are .*fence"),
        ({"a": {5: "x"}}, r"redlock_protect\['a'\]: unknown option 5; known are"),
        ({"a": {"lock_ttl": 0}}, r"redlock_protect\['a'\]: lock_ttl must"),
        ({"a": {"on_conflict": "quue"}}, r"\['a'\]: on_conflict = 'quue': did you mean 'queue'\?"),
        ({"a": {"on_conflict": "run_unlocked"}}, r"\['a'\]: on_conflict.*beside the holder"),
        ({"a": {"lock_limit": "2"}}, r"\['a'\]: lock_limit must be a whole number"),
    ],
)
def test_what_is_malformed_is_refused_with_its_place_and_the_fix(setting, words):
    with pytest.raises(ConfigurationError, match=words):
        Patterns(setting)


def test_what_a_callable_returns_is_checked_too():
    with pytest.raises(ConfigurationError, match="redlock_protect: unknown option lock_tll"):
        Patterns(lambda name: {"lock_tll": 5}).rule_for("vendor.sync")
    with pytest.raises(ConfigurationError, match="redlock_protect must be options like"):
        Patterns(lambda name: True).rule_for("vendor.sync")
