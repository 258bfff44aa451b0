"""Where nodes are: read from settings, checked before anything connects, told without passwords."""

from __future__ import annotations

import pytest
import redis
from redis.sentinel import Sentinel

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes import urls
from celery_redlock.lock.nodes.address import OPTIONS, address_of, addresses_of, hide_password

THREE = ["redis://a", "redis://b", "redis://c"]


def label(node):
    (address,) = addresses_of([node])
    return address.label


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://lock-1", "lock-1:6379/0"),
        ("redis://Lock-1:7000/2", "lock-1:7000/2"),
        ("rediss://lock-1:7000?db=3", "lock-1:7000/3"),
        ("redis://lock-1/locks?db=3", "lock-1:6379/3"),
        ("redis://user:secret@lock-1/1", "lock-1:6379/1"),
        ("redis://:secret@lock-1", "lock-1:6379/0"),
        ("redis://localhost", "127.0.0.1:6379/0"),
        ("redis://", "127.0.0.1:6379/0"),
        ("unix:///run/redis.sock?db=1", "unix:/run/redis.sock/1"),
        ("unix://user:secret@/run/redis.sock", "unix:/run/redis.sock/0"),
    ],
)
def test_a_url_is_called_by_host_port_and_database(url, expected):
    """The label names the node as every client would, and holds no password."""
    assert label(url) == expected


def test_a_sentinel_service_is_called_by_its_name():
    node = {"sentinels": ["redis://s1:26379", "redis://s2:26379"], "service": "lock-1", "db": 2}
    assert label(node) == "lock-1@sentinel/2"


def test_nodes_keep_their_order():
    """Ballots are in the order of the setting, so addresses are."""
    assert [a.label[0] for a in addresses_of(("redis://c", "redis://a", "redis://b"))] == [*"cab"]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("redis://a", "must be a list of URLs of Redis servers, got str"),
        ([], "must be a list of URLs of Redis servers, got an empty one"),
        ({"sentinels": ["redis://s"], "service": "x"}, "must be a list"),
        (None, "must be a list"),
        ({"redis://a"}, "must be a list"),
        ([7], "a node is a URL or a Sentinel service, got int"),
        (THREE[:2], "must be an odd number of servers, got 2"),
        ([*THREE, "redis://d"], "survives no more failures than 3"),
        ([*THREE[:2], "redis://a:6379/0"], "names a:6379/0 more than once"),
        (["redis://localhost", "redis://127.0.0.1", "redis://b"], "more than once"),
        (["amqp://a"], "'amqp://a' is not a URL of a Redis server"),
        (["mysql://u:p@a/b"], "nor of a database: those begin with one of redis://"),
        (["pgsql://a/b"], "postgresql://, "),
        (["db+postgresql+psycopg2://u:p@a/b"], "without db+ it is one of a database"),
        (["redis+cluster://a/x"], "a Redis Cluster: what follows the host is"),
        (["a:6379"], "is not a URL"),
        (["redis://a:port"], "is not a URL"),
        (["redis://a/locks"], "what follows the host is the number of a database"),
        (["redis://u:p@a/locks"], "what follows the host is the number of a database"),
        (["redis://u:p@a?colour=red"], "unexpected keyword argument 'colour'"),
        (["rediss://a?ssl_cert_reqs=maybe"], "maybe"),
        (["rediss://a/0/1"], "is not a URL"),
        ([{"service": "x"}], "a Sentinel node is"),
        ([{"sentinels": "redis://s", "service": "x"}], "a Sentinel node is"),
        ([{"sentinels": ["redis://s"]}], "a Sentinel node is"),
        ([{"sentinels": ["s:port"], "service": "x"}], "'s:port' is not a Sentinel"),
        ([{"sentinels": [("s", 1, 2)], "service": "x"}], "is not a Sentinel"),
        ([{"sentinels": [""], "service": "x"}], "is not a Sentinel"),
    ],
)
def test_a_wrong_list_of_nodes_is_refused(nodes, message):
    with pytest.raises(ConfigurationError, match="redlock_nodes") as raised:
        addresses_of(nodes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "node",
    [
        "amqp://user:secret@a",
        "user:secret@a:6379",
        "redis://:secret/more@a:6379",
        "redis://:secret#more@a:6379",
        "redis://:my?secret=1@a:6379",
        "redis://:my@b?secret=1@a:6379",
        "redis://a?colour=red&password=my@secret",
        "amqp://a?password=secret",
        "db+postgresql://user:secret@a/b",
        {"sentinels": ["redis://:secret@s:port"], "service": "x"},
    ],
)
def test_an_error_holds_no_password(node):
    with pytest.raises(ConfigurationError) as raised:
        addresses_of([node])
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:p@host:1/0", "redis://host:1/0"),
        ("redis://u:p@p@host", "redis://host"),
        ("redis://host/0", "redis://host/0"),
        ("u:p@host", "host"),
        ("redis://host?password=p", "redis://host"),
        ("redis://host/0?password=p@p", "redis://..."),
        ("redis://u:p?p@host", "redis://..."),
        ("redis://u:p@p?p@host", "redis://..."),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    """Host and database stay, to find the mistake by."""
    assert hide_password(url) == shown


@pytest.mark.parametrize("url", ["redis://u:p@lock-1:7000/2", "unix:///run/redis.sock?db=2"])
def test_a_connection_neither_connects_nor_retries_by_itself(url):
    """What comes out is ours to connect; a request is never sent twice behind our back."""
    (address,) = addresses_of([url])
    connection = address.connection()
    assert connection._sock is None
    assert connection.db == 2
    assert connection.retry._retries == 0
    assert urls.CONNECT_TIMEOUT == 1.0  # tests are more patient
    assert connection.socket_timeout == connection.socket_connect_timeout
    assert connection.socket_timeout == OPTIONS["socket_timeout"]
    assert address.connection() is not connection


@pytest.mark.parametrize(
    "node",
    [
        "redis://lock-1?protocol=3&decode_responses=true",
        {"sentinels": ["redis://s1?protocol=3"], "service": "lock-1", "protocol": 3},
    ],
)
def test_no_url_changes_the_form_of_replies(node, monkeypatch):
    """Ours are read as RESP2 has them; a URL that is copied from elsewhere may ask for another."""
    monkeypatch.setattr(Sentinel, "discover_master", lambda *_: ("10.0.0.1", 6380))
    (address,) = addresses_of([node])
    connection = address.connection()
    assert connection.protocol == 2
    assert not connection.encoder.decode_responses


@pytest.mark.parametrize(
    "sentinel", [("s1", 7), ["s1", "7"], "s1:7", "redis://s1:7", "redis://:secret@s1:7/0"]
)
def test_a_sentinel_can_be_written_in_many_ways(sentinel, monkeypatch):
    asked = []

    def discover_master(self, service):
        asked.append((service, self.sentinels[0].connection_pool.connection_kwargs))
        return "10.0.0.1", 6380

    monkeypatch.setattr(Sentinel, "discover_master", discover_master)
    (address,) = addresses_of([{"sentinels": [sentinel], "service": "lock-1", "username": "u"}])
    assert not asked
    connection = address.connection()
    ((service, where),) = asked
    assert (service, where["host"], where["port"]) == ("lock-1", "s1", 7)
    assert isinstance(connection, redis.Connection)
    assert (connection.host, connection.port, connection.username) == ("10.0.0.1", 6380, "u")
    assert connection.retry._retries == 0


@pytest.mark.parametrize(
    ("sentinel", "host", "port"),
    [("s1", "s1", 26379), ("[::1]:7", "::1", 7), ("redis://[fe80::1]", "fe80::1", 26379)],
)
def test_a_sentinels_port_may_be_left_out(sentinel, host, port):
    (address,) = addresses_of([{"sentinels": [sentinel], "service": "lock-1"}])
    kwargs = address._sentinels[0].connection_pool.connection_kwargs
    assert (kwargs["host"], kwargs["port"]) == (host, port)


@pytest.mark.parametrize(
    ("url", "expected", "table"),
    [
        (
            "postgresql://u@db/app?options=-c%20a%3Db&schema=s&password=a+b%20c",
            "postgresql://u@db/app?options=-c%20a%3Db&password=a+b%20c",
            "s.celery_redlock",
        ),
        (
            "postgresql://u:a#b@db/app?sslmode=require&table=t",
            "postgresql://u:a#b@db/app?sslmode=require",
            "t",
        ),
        ("sqlite:////tmp/a%20b#c.db?commit=async", "sqlite:////tmp/a%20b#c.db", "celery_redlock"),
    ],
)
def test_what_is_not_ours_of_the_url_of_a_database_is_left_as_it_is(url, expected, table):
    address = address_of(url)
    assert address._url == expected
    assert address.label.endswith(f"/{table}")


@pytest.mark.parametrize("option", ["mode=ro", "schema=locks"])
def test_the_url_of_a_file_has_no_options_of_another_program(option):
    with pytest.raises(ConfigurationError, match="none of these options"):
        address_of(f"sqlite:////tmp/a.db?{option}")


def test_a_file_is_one_node_whichever_way_leads_there(tmp_path):
    (tmp_path / "link.db").symlink_to(tmp_path / "locks.db")
    ways = ("locks.db", "link.db", f"../{tmp_path.name}/locks.db")
    assert len({address_of(f"sqlite:///{tmp_path}/{way}").label for way in ways}) == 1


@pytest.mark.parametrize("scheme", ["postgresql+psycopg2", "postgres+asyncpg", "PostgreSQL+x"])
def test_a_driver_of_sqlalchemy_is_none_of_our_business(scheme):
    (address,) = addresses_of([f"{scheme}://u@db/app"])
    assert address.label == "postgresql/app/celery_redlock"
