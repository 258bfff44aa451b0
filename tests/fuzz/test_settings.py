"""Settings and task options of any type: accepted, or refused by name and without a password."""

from __future__ import annotations

import math
from urllib.parse import quote

import pytest
from celery import Celery
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_redlock import ConfigurationError, Fail, Redlock, RedlockTask, Reschedule, Retry, Skip
from celery_redlock.lock.nodes.address import hide_password
from celery_redlock.lock.rules import Rules
from celery_redlock.settings import KNOWN, PREFIX, Settings
from celery_redlock.task.options import OPTIONS
from celery_redlock.task.policies import RunUnlocked, policy_of
from fuzz.hostile import JSON, NUMBERS, TEXTS

NODES = ["redis://lock-1/0", "redis://lock-2/0", "redis://lock-3/0"]
WORDS = st.sampled_from(
    ["skip", "fail", "retry", "reschedule", "run_unlocked", "abort", "warn", "stop", "continue"]
) | st.sampled_from(
    ["started", "finished", "success", "expired", "join", "rerun", "buffer_one", "allow", "Skip"]
)
#: Whatever may stand in a configuration module.
VALUES = (
    JSON
    | WORDS
    | st.binary(max_size=5)
    | st.sampled_from(
        [Skip, Fail(), Retry(5), Reschedule, RunUnlocked, int, object(), len, (), set(), {1: 2}, 1j]
    )
    | st.sampled_from([range(3), [None], [[]], math.nan, "h:" + "9" * 5000])
    | st.sampled_from([["logging"], ("celery", print), "127.0.0.1:9808", "h:99999", "\u0663:1"])
)


def body(x=1):
    """Do nothing."""


def refusal(make):
    try:
        make()
    except ConfigurationError as error:
        return str(error)
    return None


@settings(max_examples=100)
@given(
    conf=st.dictionaries(
        st.sampled_from([f"{PREFIX}{name}" for name in KNOWN if name != "nodes"]),
        VALUES,
        min_size=1,
        max_size=3,
    )
)
@example(conf={"redlock_ttl": 10**400})
@example(conf={"redlock_wait": 10**400})
@example(conf={"redlock_prefix": "\ud800"})
def test_a_setting_is_accepted_or_refused_by_name(conf):
    said = refusal(lambda: Settings.from_conf({"redlock_nodes": NODES, **conf}))
    if said is None:
        made = Settings.from_conf({"redlock_nodes": NODES, **conf})
        Redlock(made.nodes, made.rules).close()
    else:
        assert PREFIX in said


@settings(max_examples=100)
@given(name=st.sampled_from(KNOWN), value=VALUES)
def test_a_setting_that_is_refused_is_named(name, value):
    conf = {"redlock_nodes": NODES, f"{PREFIX}{name}": value}
    said = refusal(lambda: Settings.from_conf(conf))
    if said is not None:
        # What follows from it may be what is wrong: the default ttl is that of a small max_ttl.
        assert f"{PREFIX}{name}" in said or (name == "max_ttl" and "redlock_ttl" in said)


@settings(max_examples=60)
@given(name=TEXTS)
def test_an_unknown_setting_is_refused_by_name(name):
    if name in KNOWN:
        return
    said = refusal(lambda: Settings.from_conf({"redlock_nodes": NODES, f"{PREFIX}{name}": 1}))
    assert said is not None
    assert name in said


@settings(max_examples=60)
@given(values=st.dictionaries(st.sampled_from(list(Rules.__dataclass_fields__)), VALUES))
def test_locks_without_celery_take_the_same(values):
    def make():
        Redlock.from_urls(["redis://127.0.0.1:1/0"], **values).close()

    said = refusal(make)
    assert said is None or "redlock_" in said


@settings(max_examples=80)
@given(option=st.sampled_from(["p: on_conflict", "redlock_on_unavailable"]), value=VALUES)
def test_a_policy_is_one_or_is_refused(option, value):
    said = refusal(lambda: policy_of(option, value))
    if said is None:
        is_unlocked = isinstance(policy_of(option, value), RunUnlocked)
        assert not (is_unlocked and option.endswith("on_conflict"))
    else:
        assert option in said


@settings(max_examples=80)
@given(numbers=st.lists(NUMBERS | VALUES, min_size=4, max_size=4))
@example(numbers=[10**400, 10**400, 10**400, 1])
@example(numbers=[1, 10**400, 10**400, 1])
def test_numbers_of_policies_are_checked(numbers):
    base, cap, countdown, most = numbers
    for make, name in (
        (lambda: Reschedule(base, cap, most), "Reschedule"),
        (lambda: Retry(countdown), "Retry"),
    ):
        said = refusal(make)
        assert said is None or name in said


@settings(max_examples=120)
@given(option=st.sampled_from(sorted(OPTIONS)), value=VALUES)
@example(option="unique_for", value=10**400)
@example(option="lock_ttl", value=10**400)
@example(option="lock_key", value="{x" + "[0]" * 300 + "}")
def test_a_task_option_is_accepted_or_refused_with_its_task(option, value):
    app = Celery("t", set_as_current=False)
    app.conf.redlock_nodes = NODES

    def make():
        own = {"base": RedlockTask, "name": "shop.bill", "shared": False, "lazy": False}
        app.task(**own, **{option: value})(body).check_lock()

    said = refusal(make)
    if said is not None:
        assert "shop.bill" in said
        assert option in said
    app.close()


# --- nodes, and what is secret in them ----------------------------------------------------------

SECRET = "S3cret-Pa55"
HOSTS = st.sampled_from(["lock-1", "127.0.0.1", "[::1]", "[::1", "", "a b", "\ud800", "x" * 300])
PORTS = st.sampled_from(["", ":6379", ":0", ":99999", ":abc", ":-1", ":6379:1", ":٣"])
ENDS = (
    st.sampled_from(
        ["", "/0", "/x", "/1/2", "?db=x", "?db=1", "?db=-1", "#f", "/0?socket_timeout=abc", "/%zz"]
    )
    | st.sampled_from(
        ["?max_connections=x", "?ssl_cert_reqs=maybe", "?host=other", "?port=7", "?health=no"]
    )
    | st.sampled_from(
        [f"?password={SECRET}", f"?password={SECRET}&db=x", f"?username=u&password={SECRET}"]
    )
)
SCHEMES = st.sampled_from(["redis://", "rediss://", "unix://", "valkey://", "http://", "//", ""])
LOGINS = st.sampled_from(
    [f"{user}:{mark}{SECRET}{mark}@" for user in ("", "shop") for mark in ("", "@", ":", "/", "#")]
) | st.sampled_from([f"{user}:{quote('@/' + SECRET)}@" for user in ("", "shop")])
URLS = st.tuples(SCHEMES, LOGINS, HOSTS, PORTS, ENDS).map("".join)
#: What stands after a slash is the path of a socket, and that is no secret.
URLS = URLS.filter(lambda url: not (url.startswith("unix:") and f"/{SECRET}" in url))


def told_of(nodes):
    try:
        made = Settings.from_conf({"redlock_nodes": nodes})
        locks = Redlock(made.nodes, made.rules)
    except ConfigurationError as error:
        return f"{error} {error!r} {error.__cause__!r}"
    locks.close()
    return f"{locks.labels} {locks!r} {made!r}"


@settings(max_examples=100)
@given(nodes=st.lists(URLS, min_size=1, max_size=3))
@example(nodes=["redis://:S3cret-Pa55@\ud800/0"])
@example(nodes=["redis://:S3cret-Pa55@lock-1/0"])
def test_a_url_is_a_node_or_refused_without_its_password(nodes):
    assert SECRET not in told_of(nodes)


def test_a_word_that_shows_the_password_is_seen(monkeypatch):
    """The twin: a refusal that repeats the URL as it is."""
    monkeypatch.setattr("celery_redlock.lock.nodes.address.hide_password", lambda url: url)
    assert hide_password(f"redis://:{SECRET}@h:x/0") == "redis://h:x/0"
    assert SECRET in told_of([f"redis://:{SECRET}@h:x/0"])


SENTINELS = st.fixed_dictionaries(
    {},
    optional={
        "sentinels": VALUES
        | st.lists(
            st.sampled_from(["s-1:26379", "redis://s-1", ("s-1", 1), ("s-1", math.inf), ["s", "x"]])
            | st.sampled_from([f"redis://:{SECRET}@s-1:x", (), ("a",), b"s-1:1", None, 7, "\ud800"])
        ),
        "service": VALUES | st.just("lock-1"),
        "password": st.just(SECRET),
        "db": VALUES,
    },
)


@settings(max_examples=100)
@given(node=SENTINELS)
@example(node={"sentinels": 5, "service": "lock-1"})
@example(node={"sentinels": [("s-1", math.inf)], "service": "lock-1"})
@example(node={"sentinels": ["s-1:1"], "service": "\ud800"})
def test_a_sentinel_service_is_a_node_or_refused(node):
    assert SECRET not in told_of([node])


@settings(max_examples=100)
@given(nodes=VALUES)
def test_nodes_of_any_type_are_accepted_or_refused(nodes):
    said = refusal(lambda: Settings.from_conf({"redlock_nodes": nodes}))
    if nodes is not None:
        assert said is not None
    assert said is None or "redlock_nodes" in said


@pytest.mark.parametrize("token", ["short", "", 7, b"bytes-bytes-bytes-bytes", ["x"] * 20])
def test_a_web_token_that_is_refused_is_not_repeated(token):
    """It may be the beginning of the right one."""
    said = refusal(lambda: Settings.from_conf({"redlock_nodes": NODES, "redlock_web_token": token}))
    assert said is not None
    assert "redlock_web_token" in said
    assert token == "" or str(token) not in said
