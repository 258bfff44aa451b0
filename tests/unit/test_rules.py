"""Settings that make no sense are refused where they are made, by name and with the way out."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest

from celery_redlock import Redlock
from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import acquire_request

LEASE = Lease("k", "t", 7, 1.0, 0.0, 1.7e9)
URLS = ["lock-1:6379/0", "lock-2:6379/0", "lock-3:6379/0"]

WRONG = [
    ({"ttl": 0}, "redlock_ttl must be > 0, got 0"),
    ({"ttl": -1}, "redlock_ttl must be > 0, got -1"),
    ({"ttl": float("nan")}, "redlock_ttl"),
    ({"ttl": "30"}, "redlock_ttl must be a number of seconds or a timedelta, got '30'"),
    ({"ttl": True}, "redlock_ttl must be a number of seconds or a timedelta, got True"),
    ({"ttl": None}, "redlock_ttl must be a number"),
    ({"ttl": 61}, "redlock_ttl must be at most redlock_max_ttl (60 s), got 61"),
    ({"ttl": 0.1}, "redlock_ttl must be more than twice redlock_node_timeout (0.05 s)"),
    ({"ttl": timedelta(seconds=-1)}, "redlock_ttl must be > 0, got datetime.timedelta"),
    ({"ttl": timedelta(0)}, "redlock_ttl must be > 0"),
    ({"ttl": timedelta(minutes=2)}, "redlock_ttl must be at most redlock_max_ttl (60 s), got 120"),
    ({"drift_factor": timedelta(seconds=0.05)}, "redlock_drift_factor must be a number, got"),
    ({"wait": -0.1}, "redlock_wait must be >= 0"),
    ({"wait": float("inf")}, "redlock_wait must be >= 0 and finite"),
    ({"max_ttl": 0}, "redlock_max_ttl must be > 0"),
    ({"max_ttl": float("inf")}, "redlock_max_ttl"),
    ({"max_ttl": 10}, "redlock_ttl must be at most redlock_max_ttl (10 s)"),
    ({"node_timeout": 0}, "redlock_node_timeout must be > 0"),
    ({"node_timeout": 15}, "redlock_ttl must be more than twice redlock_node_timeout (15 s)"),
    ({"drift_factor": -0.1}, "redlock_drift_factor must be >= 0"),
    ({"drift_factor": 0.5}, "redlock_drift_factor must be below 0.5"),
    ({"drift_factor": 5}, "redlock_drift_factor must be below 0.5, got 5"),
    ({"restart_guard": 1}, "redlock_restart_guard must be True or False, got 1"),
    ({"fence": "yes"}, "redlock_fence must be True or False, got 'yes'"),
    ({"fence_retention": 0}, "redlock_fence_retention must be > 0"),
    ({"prefix": ""}, "redlock_prefix must be a string of 1 to 40 bytes"),
    ({"prefix": "x" * 41}, "redlock_prefix"),
    ({"prefix": "é" * 21}, "redlock_prefix"),
    ({"prefix": b"redlock"}, "redlock_prefix"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(s) for s, _ in WRONG])
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ConfigurationError) as raised:
        Rules(**settings)
    assert message in str(raised.value)


def test_a_time_may_be_a_timedelta():
    given = {"ttl": timedelta(seconds=20), "max_ttl": timedelta(minutes=1.5)}
    given |= {"wait": timedelta(0), "node_timeout": timedelta(milliseconds=40)}
    rules = Rules.of(**given, fence_retention=timedelta(hours=2))
    found = dataclasses.astuple(rules)
    assert found[:4] == (20.0, 0.0, 90.0, 0.04)
    assert rules.fence_retention == 7200.0
    assert rules.fingerprint(URLS) == Rules(max_ttl=90).fingerprint(URLS)
    locks = Redlock.from_urls(["redis://one:1/0"], max_ttl=timedelta(minutes=1))
    assert locks._ttl_and_wait(timedelta(seconds=5), timedelta(milliseconds=1)) == (5.0, 0.001)
    with pytest.raises(ConfigurationError, match=r"ttl must be at most redlock_max_ttl"):
        locks._ttl_and_wait(timedelta(hours=1), None)


def test_the_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(Rules()) == {
        "ttl": 30.0,
        "wait": 0.0,
        "max_ttl": 60.0,
        "node_timeout": 0.05,
        "drift_factor": 0.05,
        "restart_guard": True,
        "fence": True,
        "fence_retention": 3600.0,
        "prefix": "redlock",
    }


@pytest.mark.parametrize("ttl", [0.101, 1, 60, 60.0])
def test_a_ttl_within_bounds_is_returned_as_a_float(ttl):
    checked = Rules().check_ttl(ttl)
    assert (type(checked), checked) == (float, ttl)


@pytest.mark.parametrize("ttl", [0, -1, 60.1, float("nan"), float("inf"), "1", True, None])
def test_a_ttl_out_of_bounds_is_refused_under_the_callers_name(ttl):
    with pytest.raises(ConfigurationError, match="lock_ttl"):
        Rules().check_ttl(ttl, "lock_ttl")


def test_quarantine_outlives_the_longest_lease_anybody_may_have():
    """It is counted from ``max_ttl``, not from our own TTL."""
    assert Rules(ttl=1, max_ttl=60).quarantine == pytest.approx(64.0)


@pytest.mark.parametrize(("max_ttl", "skew"), [(60, 5.0), (1, 0.5125)])
def test_two_skews_fit_into_a_quarantine(max_ttl, skew):
    """Fences stay in order when a node forgets them, as nobody's clock is that far ahead."""
    rules = Rules(ttl=1, max_ttl=max_ttl)
    assert rules.longest_skew == pytest.approx(skew)
    assert 2 * rules.longest_skew < rules.quarantine


@pytest.mark.parametrize("retention", [0.1, 60, 3600, 86400])
@pytest.mark.parametrize("max_ttl", [1, 60, 7200])
def test_a_fence_is_remembered_beyond_any_doubt_about_clocks(retention, max_ttl):
    """For a lease and twice the skew at least: from there on wall clocks keep the order."""
    rules = Rules(ttl=1, max_ttl=max_ttl, fence_retention=retention)
    assert rules.fence_memory >= rules.max_ttl + 2 * rules.longest_skew
    assert rules.fence_memory >= retention
    token, fence, retained = (acquire_request(rules, LEASE, None).arguments[i] for i in (0, 3, 4))
    assert (token, fence, retained) == (b"t", b"7", b"%d" % (rules.fence_memory * 1000))


def test_the_order_of_nodes_is_no_matter_of_agreement():
    rules = Rules()
    assert rules.fingerprint(URLS) == rules.fingerprint(URLS[::-1])


@pytest.mark.parametrize(
    ("rules", "urls"),
    [(Rules(max_ttl=61), URLS), (Rules(), URLS[:1]), (Rules(), [*URLS[:2], "lock-4:6379/0"])],
)
def test_another_quorum_has_another_fingerprint(rules, urls):
    assert rules.fingerprint(urls) != Rules().fingerprint(URLS)


def test_what_each_client_may_choose_is_not_in_the_fingerprint():
    own = Rules(ttl=10, wait=5, node_timeout=0.02)
    assert own.fingerprint(URLS) == Rules().fingerprint(URLS)
