from __future__ import annotations

from datetime import timedelta

import pytest
from celery import Celery, Task

from celery_redlock import (
    ConfigurationError,
    Fail,
    LockKeyError,
    RedlockTask,
    Reschedule,
    Retry,
    Skip,
)
from celery_redlock.task.naming.task_lock import lock_of

NODES = ["redis://one:1/0", "redis://two:2/0", "redis://three:3/0"]


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    return app


def declare(app, base=RedlockTask, **options):
    @app.task(base=base, name="shop.bill", shared=False, **options)
    def bill(invoice_id, *, dry_run=False):
        return invoice_id

    return app.tasks["shop.bill"]


def another_like(app):
    """Return an app with the same settings, to declare the task there once more."""
    other = Celery("other", broker="memory://", set_as_current=False)
    other.conf.update(dict(app.conf.changes))
    return other


def options_of(task):
    return lock_of(task).options


BAD = {
    "lock_ttl": [0, -1, "30", True, float("inf")],
    "lock_wait": [-0.1, "1", float("nan")],
    "on_conflict": ["skipp", 5, "run_unlocked"],
    "on_unavailable": ["wait", 5],
    "on_lock_lost": ["abrt", True],
    "fence": ["yes", 1],
    "min_hold": [-1, "1"],
    "dedup_ttl": [-1, "1"],
    "chain_on_skip": ["halt", True],
    "lock_key": ["", "{nobody}", "{0}", 7],
    "unique_on": ["invoice_id", ("nobody",), 5],
}


@pytest.mark.parametrize(("option", "value"), [(o, v) for o, vs in BAD.items() for v in vs])
def test_a_value_that_makes_no_sense_is_refused_at_registration(app, option, value):
    with pytest.raises(ConfigurationError) as refused:
        declare(app, **{option: value})
    told = str(refused.value)
    assert "shop.bill" in told
    assert option in told
    assert repr(value) in told


def test_a_time_may_be_a_timedelta(app):
    second = timedelta(seconds=1)
    app.conf.update(redlock_wait=3 * second, redlock_dedup_ttl=timedelta(hours=2))
    app.conf.redlock_on_unavailable = Retry(countdown=timedelta(minutes=1))
    policy = Reschedule(base=2 * second, cap=timedelta(minutes=2))
    once = {"unique_until": "expired", "unique_for": timedelta(days=1)}
    task = declare(app, lock_ttl=45 * second, on_conflict=policy, min_hold=2 * second, **once)
    chosen = options_of(task)
    times = (chosen.ttl, chosen.wait, chosen.min_hold, chosen.dedup_ttl, chosen.unique_for)
    assert times == (45.0, 3.0, 2.0, 7200.0, 86400.0)
    assert chosen.on_conflict == Reschedule(base=2.0, cap=120.0)
    assert chosen.on_unavailable == Retry(countdown=60)
    assert all(type(time) is float for time in (*times, chosen.on_conflict.cap))


@pytest.mark.parametrize(
    ("spelt", "value", "meant"),
    [
        ("lock_tll", 5, "lock_ttl"),
        ("lockttl", 5, "lock_ttl"),
        ("lock_wiat", 5, "lock_wait"),
        ("on_conflct", "fail", "on_conflict"),
        ("on_conflict_", Skip, "on_conflict"),
        ("on_unavailble", Retry(), "on_unavailable"),
        ("on_locklost", "warn", "on_lock_lost"),
        ("lock_kye", lambda task, args, kwargs: "x", "lock_key"),
        ("unique_onn", ("invoice_id",), "unique_on"),
        ("dedupttl", 5, "dedup_ttl"),
        ("chain_onskip", "stop", "chain_on_skip"),
        ("fences", False, "fence"),
        ("redlock_ttl", 5, "lock_ttl"),
        ("redlock_on_conflict", "fail", "on_conflict"),
    ],
)
def test_a_misspelt_option_is_refused_at_registration(app, spelt, value, meant):
    """A lock that silently has its defaults is worse than none: the nearest option is named."""
    with pytest.raises(ConfigurationError, match=rf"shop\.bill.*{spelt}.*{meant}\b"):
        declare(app, **{spelt: value})


@pytest.mark.parametrize("attribute", ["lock_timeout", "lock_expires", "lock_for"])
def test_an_attribute_of_our_prefix_is_never_silently_ignored(app, attribute):
    with pytest.raises(ConfigurationError, match=rf"{attribute}.*lock_ttl"):
        declare(app, **{attribute: 5})


def test_a_misspelt_option_of_a_base_class_is_refused(app):
    class Shop(RedlockTask):
        abstract = True
        lock_tll = 5

    with pytest.raises(ConfigurationError, match="lock_tll"):
        declare(app, base=Shop)


@pytest.mark.parametrize("bad", [{"lock_tll": 5}, {"on_conflict": "skipp"}])
@pytest.mark.parametrize("name", ["shop.bill", None])
def test_a_task_written_as_a_class_is_checked_too(app, bad, name):
    def run(self, invoice_id):
        return invoice_id

    bill = type("Bill", (RedlockTask,), {"run": run, "name": name, **bad})
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        app.register_task(bill())


def test_attributes_of_users_and_of_celery_are_none_of_our_business(app):
    task = declare(
        app, max_retries=7, rate_limit="1/s", owner="accounting", on_error_mail=True, key="x"
    )
    assert (task.owner, task.max_retries) == ("accounting", 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unique_until": "done"}, "unique_until.*'done'.*'started', 'finished'"),
        ({"unique_until": "finishing"}, "did you mean 'finished'"),
        ({"unique_until": "finished", "unique_for": 0}, "unique_for"),
        ({"unique_until": "finished", "unique_for": "60"}, "unique_for"),
        ({"unique_until": "finished", "on_duplicate": "skip"}, "on_duplicate.*'join'"),
        ({"unique_until": "expired"}, "needs unique_for"),
        ({"unique_for": 60}, "unique_for=60 has no effect without unique_until"),
        ({"on_duplicate": "fail"}, "on_duplicate='fail' has no effect without unique_until"),
    ],
)
def test_options_for_uniqueness_that_make_no_sense_are_refused(app, options, words):
    with pytest.raises(ConfigurationError, match=words):
        declare(app, **options)


BOTH = ("a", "bill:{invoice_id}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_key": BOTH, "unique_until": "started"}, "unique_until='started' reserves one name"),
        ({"lock_key": BOTH, "lock_limit": (1, 2, 3)}, r"lock_limit=.* has 3 values .* 2 names"),
        ({"lock_key": "a", "lock_limit": (1, 2)}, "2 values .* 1 names; give one value for each"),
        ({"lock_limit": (1, 2)}, "2 values"),
    ],
)
def test_options_that_do_not_fit_several_names_are_refused(app, options, words):
    """At registration; the reservation, for one, would be of the first name alone."""
    with pytest.raises(ConfigurationError, match=words):
        declare(app, **options)


def test_a_callable_that_makes_several_names_does_not_go_with_unique_until(app):
    """Each call says how many it makes; one is a name as any other."""
    several = {"lock_key": lambda *_: ("a", "b"), "unique_until": "started"}
    with pytest.raises(LockKeyError, match="2 names, and unique_until reserves one"):
        declare(app, **several).lock_name((7,))
    one = {"lock_key": lambda *_: ("a",), "unique_until": "started"}
    assert declare(another_like(app), **one).lock_name((7,)) == "a"


def test_options_for_uniqueness_have_defaults(app):
    chosen = options_of(declare(app))
    assert (chosen.unique_until, chosen.on_duplicate, chosen.reruns) == (None, "join", False)
    other = another_like(app)
    chosen = options_of(declare(other, unique_until="finished", on_duplicate="rerun"))
    assert (chosen.unique_for, chosen.reruns) == (3600.0, True)


def test_a_task_attribute_wins_over_the_setting(app):
    app.conf.update(
        redlock_ttl=20.0,
        redlock_wait=3.0,
        redlock_on_conflict="retry",
        redlock_on_unavailable="skip",
        redlock_on_lock_lost="warn",
        redlock_fence=False,
        redlock_dedup_ttl=60.0,
    )
    by_setting = options_of(declare(app))
    assert (by_setting.ttl, by_setting.wait) == (20.0, 3.0)
    assert (by_setting.on_conflict, by_setting.on_unavailable) == (Retry(), Skip())
    assert (by_setting.aborts_on_loss, by_setting.fence) == (False, False)
    assert by_setting.dedup_ttl == 60.0

    by_task = options_of(
        declare(
            another_like(app),
            lock_ttl=10,
            lock_wait=0,
            on_conflict="fail",
            on_unavailable=Reschedule(base=2.0),
            on_lock_lost="abort",
            fence=True,
            dedup_ttl=0,
        )
    )
    assert (by_task.ttl, by_task.wait) == (10.0, 0.0)
    assert (by_task.on_conflict, by_task.on_unavailable) == (Fail(), Reschedule(base=2.0))
    assert (by_task.aborts_on_loss, by_task.fence) == (True, True)
    assert by_task.dedup_ttl == 0.0


def test_without_a_word_the_defaults_hold(app):
    options = options_of(declare(app))
    assert (options.ttl, options.wait, options.min_hold, options.dedup_ttl) == (30, 0, 0, 3600)
    assert (options.on_conflict, options.on_unavailable) == (Skip(), Reschedule())
    assert (options.aborts_on_loss, options.fence, options.stops_chain) == (True, True, True)


def test_task_annotations_are_options(app):
    app.conf.task_annotations = {"shop.bill": {"lock_ttl": 7.0, "on_conflict": "fail"}}
    options = options_of(declare(app))
    assert (options.ttl, options.on_conflict) == (7.0, Fail())


def test_task_annotations_are_checked(app):
    app.conf.task_annotations = {"shop.bill": {"on_conflict": "skipp"}}
    with pytest.raises(ConfigurationError, match="on_conflict"):
        declare(app)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_ttl": 61.0}, r"lock_ttl.*redlock_max_ttl"),
        ({"lock_ttl": 0.1}, r"lock_ttl.*redlock_node_timeout"),
        ({"min_hold": 61.0}, r"min_hold.*redlock_max_ttl"),
        ({"lock_key": "x", "unique_on": ("invoice_id",)}, r"lock_key.*unique_on"),
    ],
)
def test_options_that_fit_nothing_else_are_refused_before_a_task_runs(app, options, words):
    """What only the settings can tell is said at the worker's start."""
    with pytest.raises(ConfigurationError, match=words):
        declare(app, **options).check_lock()


@pytest.mark.parametrize(("setting", "value"), [("on_conflict", "skipp"), ("on_unavailable", 5)])
def test_a_bad_setting_is_named_as_the_setting_it_is(app, setting, value):
    """Who wrote a setting is not sent to look for it in a task."""
    app.conf[f"redlock_{setting}"] = value
    with pytest.raises(ConfigurationError, match=f"redlock_{setting}") as refused:
        declare(app).check_lock()
    assert "shop.bill" not in str(refused.value)


def test_our_attributes_shadow_nothing_of_celery():
    """A base class that took a name of Celery's Task would break it silently."""
    ours = {name for name in vars(RedlockTask) if not name.startswith("__")}
    celerys = set(dir(Task)) | set(dir(Celery("x", set_as_current=False).Task))
    overrides = {"AsyncResult", "apply_async", "on_replace", "signature_from_request"}
    assert ours & celerys == {"abstract", "bind", "Request", *overrides}


def test_a_built_in_task_takes_no_lock(app):
    """Under ``task_cls`` Celery's own tasks inherit from us, and must not wait for each other."""
    protected = Celery("x", broker="memory://", task_cls=RedlockTask, set_as_current=False)
    for name in ("celery.chord_unlock", "celery.backend_cleanup", "celery.map"):
        task = protected.tasks[name]
        assert isinstance(task, RedlockTask)
        task.check_lock()  # needs no nodes
