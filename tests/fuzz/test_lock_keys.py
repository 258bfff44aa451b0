"""Templates, callables and arguments of any kind: a name that fits into a key, or a refusal."""

from __future__ import annotations

from string import Formatter

import pytest
from celery import Celery
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from celery_redlock import ConfigurationError, LockKeyError
from celery_redlock.beat.slot_records import slot_key
from celery_redlock.lock.records import Keys, marker_key, probe_key
from celery_redlock.lock.rules import LONGEST_PREFIX, Rules
from celery_redlock.reading.journal import journal_key
from celery_redlock.task.naming import template
from celery_redlock.task.naming.keys import LockName
from celery_redlock.unique.requests import reservation_keys
from fuzz.hostile import ACTING, JSON, TEXTS

LONGEST_KEY = 200


class Trap:
    limit = 7

    def __init__(self):
        self.calls = 0
        self._secret = "hidden"
        self.plain = "shown"

    def __call__(self, *args):
        self.calls += 1

    def delete(self):
        self.calls += 1

    def __getitem__(self, key):
        return {0: "first"}[key]


def task_of(body):
    app = Celery("t", set_as_current=False)
    return app.task(name="shop.task", shared=False)(body)._get_current_object()


def body(order, items=(), *rest, flag=False, **more):
    """Body with parameters of every kind."""


TASK = task_of(body)
ROOTS = st.sampled_from(["order", "items", "rest", "flag", "more", "colour", "__class__", "_x"])
STEPS = (
    st.sampled_from(
        [".plain", ".limit", ".delete", "[0]", "[-1]", "[a]", ".a", "[__class__]", "[__globals__]"]
    )
    | st.sampled_from(
        [
            ".__class__",
            ".__init__",
            ".__globals__",
            "._secret",
            ".__dict__",
            "[_secret]",
            ".__call__",
        ]
    )
    | st.sampled_from(
        [".delete()", "[]", "..", "[9999999999999999999999]", ".\uff3f\uff3fclass", "[ ]", ".mro"]
    )
)
SPECS = st.sampled_from(["", ":>8", ":%Y", ":d", ":x", ":%", ":{flag}", ":\0", "!r", "!s", "!a:d"])
FIELDS = st.builds(
    lambda root, steps, spec: "{" + root + "".join(steps) + spec + "}",
    ROOTS,
    st.lists(STEPS, max_size=3),
    SPECS,
)
TEMPLATES = (
    st.lists(FIELDS | st.text("ab:{}[].!_ü", max_size=5), min_size=1, max_size=4).map("".join)
    | st.text(max_size=20)
    | st.sampled_from(ACTING)
)
ARGUMENTS = JSON | st.builds(Trap) | st.binary(max_size=5) | st.dates() | st.just(object())


def called(names, args, kwargs):
    try:
        return names.name(args, kwargs)
    except LockKeyError as error:
        said = str(error)
    assert "shop.task" in said
    return None


def made(**options):
    try:
        return LockName.of_task(TASK, **options)
    except ConfigurationError as error:
        said = str(error)
    assert "shop.task" in said
    return None


def assert_fits(name):
    assert isinstance(name, str)
    assert name
    rules = Rules(prefix="p" * LONGEST_PREFIX)
    keys = [
        *Keys.of(rules.prefix, name),
        *reservation_keys(rules, name),
        marker_key(rules.prefix, name),
        slot_key(rules, name),
        probe_key(rules.prefix),
        journal_key(rules.prefix),
    ]
    assert max(map(len, keys)) < LONGEST_KEY


def assert_reads_no_more_than_allowed(text, args):
    names = made(lock_key=text)
    if names is None:
        return
    for _, field, spec, conversion in Formatter().parse(text):
        for word in "" if field is None else field.replace("[", ".[").split("."):
            assert word[:1] != "_"
        assert "{" not in (spec or "")
        assert conversion in (None, "s")
    name = called(names, args, {})
    if name is not None:
        assert_fits(name)
        assert "hidden" not in name
    assert not any(arg.calls for arg in args if isinstance(arg, Trap))


@settings(max_examples=150)
@given(text=TEMPLATES, args=st.lists(ARGUMENTS, min_size=1, max_size=3))
@example(text="{order._secret}", args=[Trap()])
@example(text="{order.__class__.__init__.__globals__}", args=[Trap()])
@example(text="{order[__class__]}", args=[Trap()])
@example(text="{order.delete}", args=[Trap()])
@example(text="{order:{flag}}", args=[1])
def test_a_template_reads_no_more_than_it_may(text, args):
    assert_reads_no_more_than_allowed(text, args)


def test_a_template_that_reads_private_names_is_seen(monkeypatch):
    """The twin: the same check, with fields that `str.format` itself would read."""
    monkeypatch.setattr(template, "_field", lambda name, *_: Loose(name))
    with pytest.raises(AssertionError):
        assert_reads_no_more_than_allowed("{order._secret}", [Trap()])


class Loose(template.Field):
    def __init__(self, name):
        super().__init__(name, "order", (), "")

    def render(self, parameters, values):
        return str(Formatter().get_field(self.text, (), values)[0])


@settings(max_examples=100)
@given(
    args=st.lists(ARGUMENTS, max_size=4) | st.none(),
    kwargs=st.dictionaries(TEXTS | st.sampled_from(["order", "flag", "items"]), ARGUMENTS),
    chosen=st.sampled_from([None, (), ("order",), ("flag", "colour")]),
)
def test_a_default_name_fits_and_holds_no_argument(args, kwargs, chosen):
    names = made(unique_on=chosen)
    name = called(names, args, kwargs)
    if name is None:
        return
    assert_fits(name)
    assert name.startswith("shop.task")
    assert len(name) <= len("shop.task:") + 32
    assert name == called(names, args, dict(reversed(kwargs.items())))


@settings(max_examples=60)
@given(value=JSON)
def test_the_kind_of_an_argument_counts(value):
    names = made()
    name = called(names, (value,), {})
    assume(name is not None)
    for other in (str(value), [value], {"a": value}):
        if other != value or type(other) is not type(value):
            assert called(names, (other,), {}) != name
    assert called(names, (), {"order": value}) == name


ODD = [None, [], {}, 7, b"x", "text", [None], ((),), {"order": object()}, {1: 2}, [Trap()], {"": 1}]


@pytest.mark.parametrize("args", ODD)
@pytest.mark.parametrize("kwargs", [None, {}, {1: 2}, {"order": 1}, {"\ud800": 1}], ids=repr)
def test_arguments_that_are_none_are_refused(args, kwargs):
    """A message may bring a number where a list belongs."""
    for options in ({}, {"lock_key": "{order}"}, {"unique_on": ()}):
        name = called(made(**options), args, kwargs)
        if name is not None:
            assert_fits(name)


@settings(max_examples=60)
@given(result=JSON | st.builds(Trap) | st.binary(max_size=4) | st.just("raise"))
def test_a_callable_gives_a_name_or_is_refused(result):
    def key(task, args, kwargs):
        if result == "raise":
            raise RuntimeError(result)
        return result

    name = called(made(lock_key=key), (1,), {})
    if name is not None:
        names = (name,) if isinstance(name, str) else name
        assert names == ((result,) if isinstance(result, str) else tuple(result))
        for one in names:
            assert_fits(one)
