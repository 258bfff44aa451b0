"""A cluster as one node: its URL, the hash tag of its keys, and where its servers send us."""

from __future__ import annotations

import pytest
import redis
from redis.exceptions import AskError, ClusterDownError, MovedError

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.lock.nodes import cluster
from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.cluster import hash_tag, with_hash_tag
from celery_redlock.lock.nodes.credentials import with_credentials
from celery_redlock.lock.rules import Rules
from celery_redlock.settings import Settings, report_prefix

SECRET = "s3cret"
ONE = "redis+cluster://a:7000,b,c:7002/"


def address(url=ONE):
    (found,) = addresses_of([url], "{redlock}")
    return found


@pytest.fixture
def servers(monkeypatch):
    """Answers of servers to whoever asks for our key, by port; each connection that was made."""

    class Servers(dict):
        def __init__(self):
            super().__init__()
            self.made = []

    class Scripted(redis.Connection):
        def connect(self):
            answers.made.append(self)
            self.is_open = True
            if self.port not in answers:
                raise redis.ConnectionError("away")

        def send_command(self, *words):
            assert words == ("EXISTS", b"{redlock}:node:boot")

        def read_response(self, **_):
            if isinstance(answers[self.port], Exception):
                raise answers[self.port]
            return answers[self.port]

        def disconnect(self, *_):
            self.is_open = False

        def asked(self):
            return (self.host, self.port)

    answers = Servers()
    monkeypatch.setattr(cluster, "bounded", lambda _: Scripted)
    return answers


# -- its URL ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "label"),
    [
        (ONE, "a:7000@cluster"),
        ("redis+cluster://a", "a:6379@cluster"),
        ("rediss+cluster://localhost:1/0", "127.0.0.1:1@cluster"),
        (f"redis+cluster://shop:{SECRET}@a,b", "a:6379@cluster"),
        (f"REDIS+CLUSTER://a?password={SECRET}", "a:6379@cluster"),
    ],
)
def test_it_is_called_by_its_first_host(url, label):
    """So the others may change without other workers being of another list."""
    assert address(url).label == label


def test_login_and_options_are_for_all_its_servers():
    found = address(f"rediss+cluster://shop:{SECRET}@a:7000,b:7001/?ssl_ca_certs=ca.crt")
    assert found._seeds == [("a", 7000), ("b", 7001)]
    kwargs = found._pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"]) == ("shop", SECRET)
    assert kwargs["ssl_ca_certs"] == "ca.crt"
    assert issubclass(found._pool.connection_class, redis.SSLConnection)


def test_hosts_may_be_written_with_spaces():
    """As a list is elsewhere."""
    assert address("redis+cluster://a:7000, b:7001")._seeds == [("a", 7000), ("b", 7001)]


def test_login_by_settings():
    (url,) = with_credentials([ONE], "shop", SECRET)
    assert url == f"redis+cluster://shop:{SECRET}@a:7000,b,c:7002/"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([f"redis+cluster://x:{SECRET}@a:port"], "is not a URL of a Redis Cluster"),
        ([f"redis+cluster://x:{SECRET}@a,x:{SECRET}@b"], "stands before the first alone"),
        (["redis+cluster://a/1"], "our keys on a cluster are in its database 0"),
        ([f"redis+cluster://x:{SECRET}@a/1"], "our keys on a cluster are in its database 0"),
        (["redis+cluster://a?colour=red"], "unexpected keyword argument 'colour'"),
        (["redis+cluster://a?db=1"], "our keys on a cluster are in its database 0"),
        (["redis+cluster://a/locks"], "what follows the host is the number of a database"),
        (["redis+cluster://a", "redis://b", "redis://c"], "has clusters and other servers"),
        (["redis+cluster://a", "redis+cluster://a,b", "redis+cluster://c"], "more than once"),
    ],
)
def test_what_is_no_cluster_is_refused(nodes, message):
    with pytest.raises(ConfigurationError, match=message) as refused:
        addresses_of(nodes)
    assert SECRET not in str(refused.value)


# -- its keys ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "tag"),
    [("redlock", ""), ("{a}b", "a"), ("x{a}{b}", "a"), ("{}a{b}", ""), ("}{a", ""), ("{a{}", "a{")],
)
def test_the_hash_tag_is_what_servers_take_for_it(key, tag):
    """Between the first brace and the next one that closes it, unless that is nothing."""
    assert hash_tag(key) == tag


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("redlock", "{redlock}"), ("{mine}:locks", "{mine}:locks"), ("a{}", "{a{}}"), ("é", "{é}")],
)
def test_all_keys_on_a_cluster_share_a_hash_tag(prefix, expected):
    """And those of tasks in report mode are in the same slot."""
    rules = with_hash_tag(Rules(prefix=prefix), [ONE])
    assert rules.prefix == expected
    assert with_hash_tag(rules, [ONE]) == rules
    assert hash_tag(report_prefix(rules.prefix)) == hash_tag(rules.prefix) != ""
    assert Redlock([ONE], Rules(prefix=prefix)).rules.prefix == expected
    assert Settings(nodes=[ONE], rules=Rules(prefix=prefix)).rules.prefix == expected


@pytest.mark.parametrize("node", ["redis://a", {"sentinels": ["s"], "service": "x"}])
def test_elsewhere_no_key_changes(node):
    """The twin: workers of before and of now must exclude each other."""
    assert with_hash_tag(Rules(), [node]).prefix == "redlock"
    assert Redlock([node]).rules.prefix == "redlock"
    assert Settings(nodes=[node], rules=Rules()).rules.prefix == "redlock"


def test_a_prefix_that_can_have_no_hash_tag_is_refused():
    with pytest.raises(ConfigurationError, match="must not begin with"):
        with_hash_tag(Rules(prefix="}x"), [ONE])


# -- who has them -----------------------------------------------------------------------


def test_who_has_the_keys_is_followed_to(servers):
    """And is asked first the next time; whoever sent us there is let go."""
    servers.update({7000: MovedError("2639 10.0.0.9:7009"), 7009: 0})
    found = address()
    connection = found.connection()
    assert connection.asked() == ("10.0.0.9", 7009)
    assert connection.in_cluster
    assert [one.is_open for one in servers.made] == [False, True]
    found.connection()
    assert [one.asked() for one in servers.made][2:] == [("10.0.0.9", 7009)]


def test_without_a_host_it_is_that_of_who_was_asked(servers):
    servers.update({7000: MovedError("2639 :7009"), 7009: 1})
    assert address().connection().asked() == ("a", 7009)


def test_who_is_giving_the_keys_away_has_them_until_then(servers):
    servers.update({7000: AskError("2639 b:7001")})
    assert address().connection().asked() == ("a", 7000)


def test_who_does_not_know_is_passed_over(servers):
    """Away, without a whole cluster, or naming no server."""
    servers.update({7000: ClusterDownError("Hash slot not served"), 7002: 0})
    assert address().connection().asked() == ("c", 7002)
    for said in (MovedError("2639 ?:7009"), b"OK", [1], None):
        servers[7000] = said
        assert address().connection().asked() == ("c", 7002)
    assert [one.is_open for one in servers.made if one.asked() != ("c", 7002)] == [False] * 10


def test_nobody_is_sent_around_for_ever(servers):
    """Each server is told by name, with what it said, and as little of it as is shown."""
    servers.update({7000: MovedError("1 a:7000"), 7002: redis.ResponseError("x" * 100_000)})
    with pytest.raises(redis.ConnectionError) as lost:
        address().connection()
    said = str(lost.value)
    assert "a:7000 - each server sends us to another, b:6379 - away, c:7002 - xxx" in said
    assert len(said) < 1000
    assert len(servers.made) == cluster.MOST_MOVES + 2


@pytest.mark.parametrize("said", ["", "1", "1 a", "1 a:", "1 a:x", "1 a:123456", "1 \x00:1"])
def test_a_server_that_is_not_named_is_not_looked_for(said):
    with pytest.raises(redis.ConnectionError, match="does not say which"):
        cluster.place_in(said, cluster.Place("a", 1))


def test_a_connection_is_current_until_another_server_is_the_node(servers):
    """By which who listens to the one before finds the new one."""
    servers.update({7000: 0})
    found = address()
    before = found.connection()
    assert found.is_current(before)
    servers.update({7000: MovedError("1 b:7001"), 7001: 0})
    after = found.connection()
    assert (found.is_current(before), found.is_current(after)) == (False, True)
