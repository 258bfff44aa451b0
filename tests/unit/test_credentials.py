"""User and password of the lock nodes: settings of their own, which Celery masks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker import control

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.lock.nodes.address import address_of, addresses_of, shown
from celery_redlock.lock.nodes.credentials import shows_password, with_credentials
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor.check_cluster import check_cluster
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import Settings
from celery_redlock.testing import memory_quorum

NODES = ["redis://one:1/0", "rediss://two:2/1?ssl_cert_reqs=none", "unix:///run/three.sock?db=2"]
SECRET = "hu/sh@:#%?"
SETTINGS = {"redlock_username": "worker", "redlock_password": SECRET}


def login(node):
    (address,) = addresses_of([node])
    connection = address.connection()
    return connection.username, connection.password


def app_with(**conf):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.mark.parametrize("node", NODES)
def test_the_settings_are_for_all_nodes(node):
    """Whatever stands in them needs no quoting, and changes nothing else of the URL."""
    settings = Settings.from_conf({"redlock_nodes": [node], **SETTINGS})
    assert login(settings.nodes[0]) == ("worker", SECRET)
    ((before,), (after,)) = addresses_of([node]), addresses_of(settings.nodes)
    assert after.label == before.label
    connections = [before.connection(), after.connection()]
    assert type(connections[0]) is type(connections[1])
    assert connections[0].db == connections[1].db
    verified = [getattr(connection, "cert_reqs", None) for connection in connections]
    assert verified[0] == verified[1]


def test_a_password_alone_is_the_default_users():
    settings = Settings.from_conf({"redlock_nodes": NODES[:1], "redlock_password": SECRET})
    assert login(settings.nodes[0]) == (None, SECRET)
    assert login(Redlock.from_urls(NODES[:1], password=SECRET).nodes[0]) == (None, SECRET)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("redis://other:own@one:1/0", ("other", "own")),
        ("redis://:own@one:1/0", (None, "own")),
        ("redis://one:1/0?password=own", (None, "own")),
        ("redis://other@one:1/0", ("other", None)),
    ],
)
def test_a_node_with_its_own_keeps_them(node, expected):
    """Both, so that no user goes with another one's password."""
    assert login(with_credentials([node], "worker", SECRET)[0]) == expected


def test_a_master_behind_sentinel_takes_them_and_its_sentinels_do_not():
    """The Sentinels are other servers, and may let in whoever comes."""
    node = {"sentinels": ["redis://s1:26379"], "service": "lock-1"}
    (found,) = with_credentials([node], "worker", SECRET)
    assert found == {**node, "username": "worker", "password": SECRET}
    own = {**node, "password": "own"}
    assert with_credentials([own], "worker", SECRET) == [own]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            "postgresql://db/app?sslmode=require",
            "postgresql://worker:s%40cret@db/app?sslmode=require",
        ),
        ("postgres:///app", "postgres://worker:s%40cret@/app"),
        ("postgresql://own@db/app", "postgresql://own@db/app"),
        ("postgresql://db/app?user=own", "postgresql://db/app?user=own"),
        ("postgresql:///?service=locks", "postgresql:///?service=locks"),
        ("sqlite:////locks.db", "sqlite:////locks.db"),
    ],
)
def test_a_database_takes_them_and_a_file_does_not(node, expected):
    assert with_credentials([node], "worker", "s@cret") == [expected]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:a%s3cret@db/app", "invalid percent-encoded token"),
        ("postgresql://u:a%00s3cret@db/app", "forbidden value %00"),
        ("postgresql://u:a/s3cret@db/app", "write @ / ? % as"),
        ("postgresql://u:a@s3cret@db/app", "write @ / ? % as"),
        ("postgresql://u:a?s3cret@db/app?schema=x", "redlock_nodes"),
        ("postgresql://u:a\u2100s3cret@db/app?nonsense=1", '"nonsense"'),
        ("postgresql://db/app?table=a@s3cret", "must be a name"),
    ],
)
def test_a_password_that_makes_no_url_is_in_no_error(url, expected):
    with pytest.raises(ConfigurationError) as raised:
        address_of(url)
    assert expected in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["postgresql://u:s3cret@db/app", "postgresql://db/a?password=s3cret"]
)
def test_no_text_about_a_database_has_its_password(url):
    assert shows_password(url)
    address = address_of(url)
    assert "s3cret" not in f"{address!r} {address.label} {shown(url)} {vars(address).keys()}"
    assert "s3cret" not in f"{Redlock([url])!r} {Settings(nodes=[url], rules=Rules())!r}"
    more = "&" if "?" in url else "?"
    for wrong in (f"{url}{more}nonsense=1", url.replace("db/", "[db/"), f"{url}{more}table=a;b"):
        with pytest.raises(ConfigurationError) as raised:
            address_of(wrong)
        assert "s3cret" not in str(raised.value)


def test_celery_report_and_inspect_conf_mask_the_password():
    app = app_with(redlock_nodes=NODES, **SETTINGS)
    assert login(plugin_for(app).settings.nodes[0]) == ("worker", SECRET)
    told = app.bugreport() + repr(control.conf(SimpleNamespace(app=app)))
    assert "redlock_password" in told
    assert "one:1" in told
    assert SECRET not in told
    assert "hu%2Fsh" not in told
    assert SECRET not in repr(plugin_for(app).settings)


def test_djangos_settings_are_masked_likewise():
    django = SimpleNamespace(
        CELERY_REDLOCK_NODES=NODES,
        CELERY_REDLOCK_USERNAME="worker",
        CELERY_REDLOCK_PASSWORD=SECRET,
    )
    app = Celery("shop", set_as_current=False)
    app.config_from_object(django, namespace="CELERY")
    assert login(plugin_for(app).settings.nodes[0]) == ("worker", SECRET)
    assert SECRET not in app.bugreport()


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ({"redlock_password": ""}, "redlock_password must be"),
        ({"redlock_password": b"hush"}, "redlock_password must be"),
        ({"redlock_password": "hush\ud800"}, "redlock_password must be"),
        ({"redlock_username": 7, "redlock_password": "hush"}, "redlock_username must be"),
        ({"redlock_username": "worker"}, "redlock_password"),
    ],
)
def test_what_makes_no_sense_is_refused_and_not_repeated(conf, said):
    with pytest.raises(ConfigurationError, match=said) as refused:
        Settings.from_conf({"redlock_nodes": NODES, **conf})
    assert "hush" not in str(refused.value)


def test_mistakes_in_nodes_are_told_as_before():
    for nodes in ("redis://one", [7], ["one:1"], ["redis://[one"], ["redis://a"] * 3):
        with pytest.raises(ConfigurationError, match="redlock_nodes") as refused:
            Settings.from_conf({"redlock_nodes": nodes, **SETTINGS})
        assert SECRET not in str(refused.value)


def test_tests_servers_are_asked_without():
    app = app_with(redlock_nodes=NODES, **SETTINGS)
    with memory_quorum(app):
        assert login(plugin_for(app).settings.nodes[0]) == (None, None)
    assert login(plugin_for(app).settings.nodes[0]) == ("worker", SECRET)


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        ("redis://one:1/0", False),
        ("redis://worker@one:1/0", False),
        ("redis://worker:own@one:1/0", True),
        ("redis://one:1/0?password=own", True),
        ("unix://:own@/run/three.sock", True),
        ({"sentinels": ["redis://s1"], "service": "lock-1"}, False),
        ({"sentinels": ["redis://s1"], "service": "lock-1", "password": "own"}, True),
        ({"sentinels": [("s1", 1), "redis://:own@s1"], "service": "lock-1"}, True),
        ({"sentinels": ["u:own@s1:1"], "service": "lock-1"}, True),
    ],
)
def test_the_doctor_warns_of_passwords_in_nodes(node, shown):
    """Celery masks nothing within a list, and prints it to whoever asks."""
    assert shows_password(node) is shown
    settings = Settings(nodes=NODES, rules=Settings.from_conf({"redlock_nodes": NODES}).rules)
    facts = Facts(settings=settings, shown_passwords=["one:1/0"] if shown else [])
    found = [it for it in check_cluster(facts) if it.code == "password-in-url"]
    assert [it.where for it in found] == (["redlock_nodes"] if shown else [])
    assert all("redlock_password" in it.fix for it in found)
