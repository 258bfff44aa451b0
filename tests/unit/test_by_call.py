"""Options whose value a call decides: ``lock_limit`` and ``lock_rate``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery, Task

from celery_redlock import ConfigurationError, LockKeyError, Rate, RedlockTask
from celery_redlock.beat.entries import places_of_run
from celery_redlock.lock.records import rate_name
from celery_redlock.task.naming.task_lock import lock_of, places_of
from celery_redlock.task.options import MOST_BY_CALL
from celery_redlock.testing import memory_quorum

SECRET = "s3cret"


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def declare(app, base=RedlockTask, lock_key="{plan[id]}", **options):
    options = {key: value for key, value in {"lock_key": lock_key, **options}.items() if value}

    @app.task(name="serve", base=base, shared=False, **options)
    def serve(plan, seats=1):
        """Do nothing."""

    app.finalize()
    return app.tasks["serve"]


def limits(task, *args, names=("k",), **kwargs):
    return lock_of(task).options.limits(names, args, kwargs)


def rates(task, *args, names=("k",), **kwargs):
    return lock_of(task).options.rates(names, args, kwargs)


def seats_of(task, args, kwargs):
    assert task.name == "serve"
    assert (type(args), type(kwargs)) == (tuple, dict)
    return kwargs["seats"] if "seats" in kwargs else args[1]


# -- what gives a value ------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [seats_of, "{seats}"])
def test_a_call_says_how_many_places_its_lock_has(app, limit):
    task = declare(app, lock_limit=limit)
    assert limits(task, {}, 3) == {"k": 3}
    assert limits(task, {}, seats=1000) == {"k": 1000}


def test_a_template_has_the_defaults(app):
    assert limits(declare(app, lock_limit="{seats}"), {}) == {"k": 1}


def test_an_item_of_an_argument_is_a_limit(app):
    assert limits(declare(app, lock_limit="{plan[seats]}"), {"seats": 7}) == {"k": 7}


@pytest.mark.parametrize(
    ("rate", "found"),
    [
        ("{seats}/m", Rate(5, 60)),
        ("{seats}", Rate(5, 1)),
        (lambda _task, args, _kwargs: Rate(args[1], 2.0), Rate(5, 2.0)),
        (lambda _task, args, _kwargs: f"{args[1]}/h", Rate(5, 3600)),
    ],
)
def test_a_call_says_its_rate(app, rate, found):
    assert rates(declare(app, lock_rate=rate), {}, 5) == {"k": found}


def test_a_call_may_say_that_it_has_no_rate(app):
    assert rates(declare(app, lock_rate=lambda *_: None), {}) == {}


def test_each_name_has_its_own_and_some_are_said_by_the_call(app):
    task = declare(
        app, lock_key=("{plan[id]}", "all"), lock_limit=("{seats}", 9), lock_rate=(None, "5/s")
    )
    names = ("k", "all")
    assert limits(task, {}, 2, names=names) == {"k": 2, "all": 9}
    assert rates(task, {}, 2, names=names) == {"all": Rate(5, 1)}
    lines = lock_of(task).options.lines(names, ({}, 2), {})
    assert lines == {"k": 2, "all": 9, rate_name("all"): Rate(5, 1).burst}


def test_a_function_may_be_written_in_the_class(app):
    class Served(RedlockTask):
        abstract = True
        lock_limit = seats_of

        def lock_rate(self, args, kwargs):
            return f"{seats_of(self, args, kwargs)}/m"

    task = declare(app, base=Served)
    assert limits(task, {}, 4) == {"k": 4}
    assert rates(task, {}, 4) == {"k": Rate(4, 60)}


@pytest.mark.parametrize("limit", [seats_of, "{seats}"])
def test_annotations_and_redlock_protect_say_it_likewise(app, limit):
    app.conf.task_annotations = {"serve": {"lock_limit": limit}}
    assert limits(declare(app), {}, 4) == {"k": 4}


@pytest.mark.parametrize("limit", [seats_of, "{seats}"])
def test_what_is_protected_from_outside_has_it_too(limit):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_protect = {"serve": {"lock_key": "k", "lock_limit": limit, "lock_rate": "9/m"}}
    with memory_quorum(app):
        task = declare(app, base=Task, lock_key=None)
        assert limits(task, {}, 4) == {"k": 4}
        assert rates(task, {}, 4) == {"k": Rate(9, 60)}
    app.close()


# -- what is no value --------------------------------------------------------------------------


def broken(*_):
    raise ValueError(SECRET)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lock_limit", "{seats}", "gave no whole number from 1 to 1000"),
        ("lock_limit", seats_of, "gave no whole number from 1 to 1000"),
        ("lock_limit", broken, "raised ValueError"),
        ("lock_rate", "{seats}", "gave no rate"),
        ("lock_rate", seats_of, "gave no rate"),
        ("lock_rate", broken, "raised ValueError"),
    ],
)
@pytest.mark.parametrize(
    "given", [SECRET, 0, -1, 1.5, "0", f"1/{SECRET}", "9" * 50, "9" * 9999, True, "²"]
)
def test_what_is_no_value_is_an_error_without_it(app, option, value, words, given):
    """It may be a customer's name; the error says which option of which task."""
    task = declare(app, **{option: value})
    ask = limits if option == "lock_limit" else rates
    with pytest.raises(LockKeyError) as it:
        ask(task, {}, given)
    assert str(it.value) == f"Task 'serve': its {option} {words}"


@pytest.mark.parametrize("option", ["lock_limit", "lock_rate"])
def test_an_argument_that_has_no_such_item_is_an_error_without_it(app, option):
    task = declare(app, **{option: "{plan[seats]}"})
    with pytest.raises(LockKeyError, match=rf"'serve'.*of {option}") as it:
        (limits if option == "lock_limit" else rates)(task, {"id": SECRET})
    assert SECRET not in str(it.value)


@pytest.mark.parametrize("option", ["lock_limit", "lock_rate"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 1, "must take"),
        (lambda _task: 1, "must take"),
        ("{seats", "is not a template"),
        ("{0}", "is positional"),
        ("{nothing}", "names 'nothing'"),
        ("{{}}", "has no field"),
        (int, "must be a"),
    ],
)
def test_what_cannot_give_one_is_refused_before_a_call(app, option, value, words):
    with pytest.raises(ConfigurationError, match=words) as it:
        _ = lock_of(declare(app, **{option: value})).options
    assert "serve" in str(it.value)
    assert option in str(it.value)


def test_one_value_for_each_name_or_one_for_all(app):
    task = declare(app, lock_key=lambda *_: ("a", "b", "c"), lock_limit=(1, seats_of))
    with pytest.raises(LockKeyError, match="lock_limit has 2 values and lock_key made 3 names"):
        limits(task, {}, 1, names=("a", "b", "c"))


# -- who else has to know ------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "places"), [(({}, 3), 3), (({}, SECRET), MOST_BY_CALL)])
def test_all_places_are_known_that_a_call_may_have(app, args, places):
    """Of one that makes no number as many as are looked at: it holds none."""
    found = places_of(declare(app, lock_limit="{seats}"), ("k",), args, {})
    assert [number for _, number in found] == list(range(places))


def test_the_places_of_a_slot_are_those_of_its_call(app):
    entry = SimpleNamespace(args=({"id": "k"}, 3), kwargs={}, options={})
    assert places_of_run(declare(app, lock_limit="{seats}"), entry) == ["k", "k#1", "k#2"]


def test_a_slot_whose_call_makes_no_number_has_none(app):
    entry = SimpleNamespace(args=({"id": "k"}, SECRET), kwargs={}, options={})
    assert places_of_run(declare(app, lock_limit="{seats}"), entry) == []


def test_a_slot_that_only_has_a_rate_has_no_lock(app):
    task = declare(app, lock_rate="1/m")
    task.lock_limit = None
    entry = SimpleNamespace(args=({"id": "k"},), kwargs={}, options={})
    assert places_of_run(task, entry) == []
    assert places_of(task, ("k",), ({"id": "k"},), {}) == []


class Plans:
    """What knows the limits; no task."""

    def limit(self, task, args, kwargs):
        return seats_of(task, args, kwargs)

    @classmethod
    def rate(cls, task, args, kwargs):
        return f"{seats_of(task, args, kwargs)}/m"


def test_a_method_of_something_else_may_say_it(app):
    task = declare(app, lock_limit=Plans().limit, lock_rate=Plans.rate)
    assert limits(task, {"id": "k"}, 3) == {"k": 3}
    assert rates(task, {"id": "k"}, 3) == {"k": Rate(3, 60)}


def test_a_task_that_is_run_has_as_many_places_as_its_call_says(app):
    task = declare(app, lock_limit="{seats}", on_conflict="fail")
    held = [app.quorum.hold(f"k#{n}" if n else "k") for n in range(2)]
    assert len(held) == 2
    assert task.apply(args=({"id": "k"}, 3)).successful()
    assert not task.apply(args=({"id": "k"}, 2)).successful()
