"""Lock nodes behind TLS: real servers, certificates of the test's own, and what is refused."""

from __future__ import annotations

import pytest
import redis

from celery_redlock import LockTaken, QuorumUnavailable, Redlock
from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.lock.nodes.guard import greet
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap, connected, node_statuses
from support.certificates import Authority
from support.stored import ROOMY
from support.tls import tls_node
from support.waiting import eventually

RULES = Rules(**ROOMY)
SECRET = "s3cret-of-the-locks"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def nodes(redis_nodes, authority):
    pair = authority.vouch("lock-node", "127.0.0.1", "localhost")

    def start(n=1, pair=pair, **options):
        return [tls_node(redis_nodes, authority, pair, **options) for _ in range(n)]

    return start


@pytest.fixture
def locks():
    opened = []

    def open_locks(*urls):
        opened.append(Redlock(urls, RULES))
        return opened[-1]

    yield open_locks
    for one in opened:
        one.close()


def refusal(locks, url):
    lock = locks(url)
    (problem,) = check(lock).values()
    with pytest.raises(QuorumUnavailable) as unavailable:
        lock.acquire("n")
    (status,) = node_statuses([url], RULES)
    assert (status.state, status.node) == ("down", lock.labels[0])
    said = f"{problem}\n{unavailable.value}\n{unavailable.value!r}\n{status}\n{lock!r}"
    assert lock.labels[0] in str(unavailable.value)
    assert SECRET not in said
    return said


def test_locks_behind_tls(nodes, authority, locks):
    farm = nodes(3)
    urls = [node.url(ssl_ca_certs=authority.file) for node in farm]
    assert set(bootstrap(urls, RULES).values()) == {"enrolled"}
    first, second = locks(*urls), locks(*urls)
    assert check(first) == {}
    lease = first.acquire("n")
    with pytest.raises(LockTaken):
        second.acquire("n")
    assert {one.problem for one in probe(first)} == {""}
    assert [status.state for status in node_statuses(urls, RULES)] == ["up"] * 3
    lease = first.extend(lease)
    assert first.release(lease).name == "RELEASED"
    for node in farm:
        with redis.Redis.from_url(node.server.url) as client:
            ours = [c for c in client.client_list() if c["name"] == "celery-redlock"]
            assert ours
            assert {c["laddr"].rpartition(":")[2] for c in ours} == {str(node.port)}


def test_a_node_restarted_behind_tls_is_quarantined(nodes, authority, locks):
    farm = nodes(3)
    urls = [node.url(ssl_ca_certs=authority.file) for node in farm]
    bootstrap(urls, RULES)
    lock = locks(*urls)
    check(lock)
    farm[0].server.restart()
    lease = lock.acquire("n")
    eventually(  # as soon as the client has connected again, which tells the node to wait
        lambda: [one.state for one in node_statuses(urls, RULES)] == ["quarantined", "up", "up"],
        "quarantine",
    )
    assert lock.release(lease).name == "RELEASED"


@pytest.mark.parametrize("checked", ["required", "none"])
def test_who_vouches_for_the_node(nodes, authority, locks, tmp_path, checked):
    (node,) = nodes()
    bootstrap([node.url(ssl_ca_certs=authority.file)], RULES)
    other = Authority(tmp_path, "other")
    url = node.url(user=f":{SECRET}", ssl_ca_certs=other.file, ssl_cert_reqs=checked)
    if checked == "required":
        assert "certificate verify failed" in refusal(locks, url).lower()
    else:
        with redis.Redis.from_url(node.server.url) as client:
            client.config_set("requirepass", SECRET)
        assert locks(url).acquire("n").fence


def test_without_an_authority_that_of_the_machine_decides(nodes, locks):
    (node,) = nodes()
    assert "certificate verify failed" in refusal(locks, node.url(user=f"u:{SECRET}")).lower()


@pytest.mark.parametrize("checked", [True, False])
def test_whose_name_the_certificate_bears(nodes, authority, locks, checked):
    (node,) = nodes(pair=authority.vouch("elsewhere", "lock-7.example"))
    options = {"ssl_ca_certs": authority.file}
    if checked:
        said = refusal(locks, node.url(user=f"u:{SECRET}", **options))
        assert "127.0.0.1" in said
        assert "not valid for" in said or "mismatch" in said
    else:
        url = node.url(**options, ssl_check_hostname="false")
        bootstrap([url], RULES)
        assert locks(url).acquire("n").fence


def test_a_node_that_wants_to_know_its_clients(nodes, authority, locks, tmp_path):
    (node,) = nodes(wants_clients=True)
    client = authority.vouch("worker")
    known = {"ssl_ca_certs": authority.file}
    shown = {"ssl_certfile": client.certificate, "ssl_keyfile": client.key}
    assert set(bootstrap([node.url(**known, **shown)], RULES).values()) == {"enrolled"}
    assert locks(node.url(**known, **shown)).acquire("n").fence
    assert refusal(locks, node.url(user=f"u:{SECRET}", **known))
    stranger = Authority(tmp_path, "other").vouch("stranger")
    wrong = {"ssl_certfile": stranger.certificate, "ssl_keyfile": stranger.key}
    assert refusal(locks, node.url(user=f"u:{SECRET}", **known, **wrong))


def test_a_file_that_is_not_there(nodes, authority, locks, tmp_path):
    (node,) = nodes()
    for name in ("ssl_ca_certs", "ssl_certfile"):
        options = {"ssl_ca_certs": authority.file, name: tmp_path / "missing.crt"}
        if name == "ssl_certfile":
            options["ssl_keyfile"] = tmp_path / "missing.key"
        assert "No such file" in refusal(locks, node.url(user=f"u:{SECRET}", **options))


@pytest.mark.long
def test_tls_spoken_to_a_plain_port_and_the_reverse(nodes, authority, locks):
    (node,) = nodes()
    plain = node.server.url.removeprefix("redis://")
    assert refusal(locks, f"rediss://u:{SECRET}@{plain}?ssl_ca_certs={authority.file}")
    assert refusal(locks, f"redis://u:{SECRET}@127.0.0.1:{node.port}/0")


def test_one_of_a_names_addresses_is_vouched_for_by_that_name(nodes, authority):
    """The doctor connects to each address of a name; the certificate has the name alone."""
    pair = authority.vouch("by-name", "localhost")
    (node,) = nodes(pair=pair)
    (address,) = addresses_of([node.url(ssl_ca_certs=authority.file, host="localhost")])
    with connected(address, "127.0.0.1") as connection:
        assert greet(connection).run_id
    (address,) = addresses_of([node.url(ssl_ca_certs=authority.file)])
    refused = pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED")
    with refused, connected(address, "127.0.0.1"):
        pytest.fail("nobody has vouched for the address")
