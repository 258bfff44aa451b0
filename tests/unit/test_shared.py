"""Tasks that share a lock name have to mean the same lock."""

from __future__ import annotations

import re

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.task.base import check_tasks


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    return app


def declare(app, name, **options):
    @app.task(name=name, base=RedlockTask, shared=False, **options)
    def job(customer=0, c=0):
        pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lock_key": "nightly"}, {"lock_key": "nightly", "lock_limit": 3}),
        ({"lock_key": "import:{c}"}, {"lock_key": "import:{c}", "lock_limit": 3}),
        ({"lock_key": ("a", "b:{c}")}, {"lock_key": ("b:{c}", "c"), "lock_limit": (2, 1)}),
    ],
)
def test_other_limits_of_one_lock_are_refused_at_the_workers_start(app, one, other):
    """Whoever asks for the one place would run beside those on the others."""
    declare(app, "shop.one", **one)
    declare(app, "shop.other", **other)
    words = r"shop\.one and shop\.other share the lock .* with lock_limit=1 and lock_limit="
    with pytest.raises(ConfigurationError, match=words):
        check_tasks(app)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lock_key": "import:{c}"}, {"lock_key": "export:{c}", "lock_limit": 3}),
        ({"lock_key": "i:{c}", "lock_limit": 3}, {"lock_key": "i:{customer}", "lock_limit": 3}),
        ({"lock_key": ("a", "b")}, {"lock_key": ("b", "a")}),
        ({}, {"lock_limit": 3}),
        ({"lock_key": "i:{c:%Y}"}, {"lock_key": "i:{c:%Y-%m}", "lock_limit": 3}),
        ({"lock_key": "a", "lock_mode": "report"}, {"lock_key": "a", "lock_limit": 3}),
        ({"lock_key": lambda task, args, kwargs: "a"}, {"lock_key": "a", "lock_limit": 3}),
    ],
)
def test_other_locks_and_equal_limits_are_welcome(app, one, other):
    """Also what a callable makes, which nobody knows before a call."""
    declare(app, "shop.one", **one)
    declare(app, "shop.other", **other)
    check_tasks(app)


@pytest.mark.parametrize(
    ("both", "own", "words"),
    [
        (
            {"lock_key": "sms", "lock_limit": None, "lock_rate": "10/m"},
            {"lock_rate": "100/m"},
            r"share the starts of 'sms' with lock_rate='10/m' and lock_rate='100/m'",
        ),
        ({"lock_key": "i:{c}", "debounce": 5}, {"debounce": 9}, "have both debounce"),
    ],
)
def test_rates_that_differ_and_bursts_of_two_tasks_are_warned_of(app, caplog, both, own, words):
    """What the one may start the other does not count; a call of the one supersedes the other's."""
    declare(app, "shop.one", **both)
    declare(app, "shop.other", **{**both, **own})
    check_tasks(app)
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    "own",
    [
        {"lock_rate": None},
        {"debounce": None},
        {"lock_key": "other:{c}"},
        {"lock_mode": "report"},
        {"lock_key": lambda task, args, kwargs: "i:0"},
    ],
)
def test_a_rate_or_a_burst_of_one_task_alone_is_welcome(app, caplog, own):
    both = {"lock_key": "i:{c}", "lock_rate": "10/m", "debounce": 5}
    differs = {"lock_rate": "20/m"} if "lock_rate" not in own and "debounce" not in own else {}
    declare(app, "shop.one", **both)
    alone = {"debounce": None} if own == {"lock_rate": None} else {}
    alone |= {"lock_rate": "10/m"} if own == {"debounce": None} else {}
    declare(app, "shop.other", **{**both, **differs, **alone, **own})
    check_tasks(app)
    assert "share" not in caplog.text


SEVERAL = {"lock_limit": (1, 10), "lock_rate": ("100/m", None)}


@pytest.mark.parametrize("option", SEVERAL)
@pytest.mark.parametrize(
    "own",
    [
        {"lock_key": ("tenant:{c}", "all"), "lock_mode": "report"},
        {"lock_key": lambda task, args, kwargs: ["tenant", "all"]},
    ],
    ids=["report", "callable"],
)
def test_values_for_names_that_no_template_tells_are_welcome(app, option, own):
    declare(app, "shop.one", **{option: SEVERAL[option]}, **own)
    check_tasks(app)


def test_fields_that_are_called_otherwise_are_warned_of(app, caplog):
    """They may have the same values, or never have."""
    declare(app, "shop.one", lock_key="import:{c}")
    declare(app, "shop.other", lock_key="import:{customer}", lock_limit=3)
    check_tasks(app)
    assert "If the values are the same: shop.one and shop.other share the lock" in caplog.text


@pytest.mark.parametrize("name", ["origin", "shadow", "id"])
def test_headers_of_celerys_own_are_no_part_of_names(app, name):
    """No worker would see them as those of a publisher."""
    app.conf.redlock_key_headers = ["tenant", name]
    with pytest.raises(ConfigurationError, match=rf"redlock_key_headers: '{name}' is what Celery"):
        check_tasks(app)


def test_a_lock_with_and_without_a_fence_is_warned_of(app, caplog):
    """The writes of the one cannot be told from stale ones."""
    declare(app, "shop.one", lock_key="a:{c}")
    declare(app, "shop.other", lock_key="a:{c}", fence=False)
    check_tasks(app)
    assert "shop.one and shop.other share the lock 'a:{c}', and shop.other has fence" in caplog.text
