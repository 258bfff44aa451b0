"""What a Sentinel node's options become: for the Sentinels, for the master, and what is refused."""

from __future__ import annotations

import pytest
import redis
from redis.sentinel import Sentinel

from celery_redlock import ConfigurationError
from celery_redlock.lock.nodes.address import OPTIONS, NoAnswer, addresses_of

SECRET = "s3cret"


def address(*sentinels, **options):
    (found,) = addresses_of([{"sentinels": [*sentinels], "service": "lock-1", **options}])
    return found


def asked(found):
    return found._sentinels


@pytest.fixture(autouse=True)
def master(monkeypatch):
    monkeypatch.setattr(Sentinel, "discover_master", lambda self, service: ("10.0.0.1", 6380))


def test_what_the_sentinels_want_stands_in_their_urls():
    urls = [f"redis://u:{SECRET}@s1", "rediss://s2:7?ssl_ca_certs=ca.crt", "s3:8", ("s4", 9)]
    found = [one.connection_pool for one in asked(address(*urls))]
    kwargs = [pool.connection_kwargs for pool in found]
    assert [(k["host"], k["port"]) for k in kwargs] == [
        ("s1", 26379),
        ("s2", 7),
        ("s3", 8),
        ("s4", 9),
    ]
    assert (kwargs[0]["username"], kwargs[0]["password"]) == ("u", SECRET)
    assert [issubclass(pool.connection_class, redis.SSLConnection) for pool in found] == [
        False,
        True,
        False,
        False,
    ]
    assert kwargs[1]["ssl_ca_certs"] == "ca.crt"
    for one in kwargs:
        assert one["retry"]._retries == 0
        assert one["protocol"] == 2
        assert one["socket_timeout"] == one["socket_connect_timeout"] == OPTIONS["socket_timeout"]
        assert one["db"] == 0


def test_what_the_master_wants_stands_beside_them():
    found = address("redis://u:other@s1", username="shop", password=SECRET, db=2)
    connection = found.connection()
    assert not isinstance(connection, redis.SSLConnection)
    assert (connection.host, connection.port, connection.db) == ("10.0.0.1", 6380, 2)
    assert (connection.username, connection.password) == ("shop", SECRET)
    assert connection.retry._retries == 0
    assert asked(found)[0].connection_pool.connection_kwargs["password"] == "other"
    assert found.label == "lock-1@sentinel/2"


#: What a Sentinel says of a master, as far as anything goes by it.
STATE = {"ip": "10.0.0.1", "port": 6380, "num-other-sentinels": 2}


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: None} for name in STATE),
        *({k: v for k, v in STATE.items() if k != name} for name in STATE),
        {**STATE, "ip": 5},
        {**STATE, "port": "6380"},
    ],
    ids=str,
)
def test_a_sentinel_that_says_no_address_has_not_answered(monkeypatch, wrong):
    """So the next one is asked; redis-py would raise where it goes by it, or connect to it."""
    (one,) = asked(address("s1"))
    monkeypatch.setattr(redis.Redis, "sentinel_masters", lambda self: {"lock-1": STATE})
    assert one.sentinel_masters() == {"lock-1": STATE}
    monkeypatch.setattr(redis.Redis, "sentinel_masters", lambda self: {"lock-1": wrong})
    with pytest.raises(NoAnswer, match="not as a Sentinel does"):
        one.sentinel_masters()


def test_a_master_behind_tls():
    connection = address("s1", ssl=True, ssl_ca_certs="ca.crt").connection()
    assert isinstance(connection, redis.SSLConnection)
    assert (connection.ca_certs, connection.check_hostname) == ("ca.crt", True)
    assert not isinstance(address("s1", ssl=False).connection(), redis.SSLConnection)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"passwrd": SECRET}, "'passwrd'"),
        ({"ssl_ca_certs": "ca.crt"}, "'ssl_ca_certs'"),  # without "ssl": nothing would be checked
        ({"ssl": True, "ssl_cert_reqs": "maybe"}, "maybe"),
    ],
)
def test_options_that_redis_py_does_not_take_are_refused_at_once(options, said):
    """Rather than in a thread that tries to connect; without their values."""
    with pytest.raises(ConfigurationError, match="lock-1@sentinel/0 has options") as raised:
        address("s1", **options)
    assert said in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "url", [f"http://u:{SECRET}@s1", f"redis://u:{SECRET}@s1?socket_timeout=soon"]
)
def test_a_url_that_is_none_is_refused_without_its_password(url):
    with pytest.raises(ConfigurationError, match="is not a Sentinel") as raised:
        address(url)
    assert SECRET not in str(raised.value)


def test_a_sentinel_is_shown_without_its_password(monkeypatch):
    """Its text is what redis-py puts into the error when no master is found."""
    (one,) = asked(address(f"redis://u:{SECRET}@s1"))
    assert repr(one) == "s1:26379"

    def refuse(self, *words, **options):
        raise redis.AuthenticationError("wrong")

    monkeypatch.setattr(redis.Redis, "execute_command", refuse)
    with pytest.raises(redis.ConnectionError) as raised:
        one.sentinel_masters()
    assert repr(raised.value) == "wrong"


def test_what_every_connection_has():
    connection = address("s1").connection()
    assert connection.client_name == OPTIONS["client_name"]
    assert connection.protocol == 2
