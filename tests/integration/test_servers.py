"""The embedded servers do what is asked of them, and none of them is ever left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import redis

from celery_redlock.testing import servers as module
from celery_redlock.testing.ports import PortTaken
from celery_redlock.testing.reaper import Reaper, reaper
from celery_redlock.testing.servers import Server, find_binary, servers
from support.process import is_gone
from support.waiting import eventually


def _client(server, **options):
    return redis.Redis.from_url(server.url, **options)


def test_servers_answer_at_once_and_are_empty(redis_nodes):
    nodes = redis_nodes(3)
    assert len({node.pid for node in nodes}) == len({node.port for node in nodes}) == 3
    for node in nodes:
        with _client(node) as client:
            assert client.ping()
            assert client.dbsize() == 0


def test_a_server_keeps_nothing_on_disk_and_evicts_nothing(redis_nodes):
    (node,) = redis_nodes(1)
    with _client(node) as client:
        assert client.config_get("save")["save"] == ""
        assert client.config_get("appendonly")["appendonly"] == "no"
        assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        assert client.config_get("bind")["bind"] == "127.0.0.1"


def test_a_killed_server_refuses_connections_and_can_come_back(redis_nodes):
    (node,) = redis_nodes(1)
    url = node.url
    node.kill()
    assert not node.alive
    with _client(node) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    node.start()
    assert node.url == url
    with _client(node) as client:
        assert client.ping()


def test_a_paused_server_is_silent_until_it_is_resumed(redis_nodes):
    (node,) = redis_nodes(1)
    with _client(node) as client, _client(node, socket_timeout=0.5) as impatient:
        client.ping()
        node.pause()
        assert node.alive
        with pytest.raises(redis.TimeoutError):
            impatient.ping()
        node.resume()
        assert client.ping()


def test_a_restarted_server_has_lost_its_memory(redis_nodes):
    (node,) = redis_nodes(1)
    with _client(node) as client:
        client.set("key", "value")
        before, pid = client.info("server")["run_id"], node.pid
    node.restart()
    with _client(node) as client:
        assert client.get("key") is None
        assert client.info("server")["run_id"] != before
        assert node.pid != pid


def test_a_server_with_a_file_remembers_over_a_restart(redis_nodes):
    (node,) = redis_nodes(1, extra_args=("--appendonly", "yes", "--appendfsync", "always"))
    with _client(node) as client:
        client.set("key", "value")
    node.restart()
    with _client(node) as client:
        assert client.get("key") == b"value"


@pytest.mark.parametrize("state", ["running", "paused", "killed", "never started"])
def test_nothing_is_left_after_stop(some_binary, state):
    server = Server(binary=some_binary)
    if state != "never started":
        server.start()
        pid, folder = server.pid, server.folder
    if state == "paused":
        server.pause()
    if state == "killed":
        server.kill()
    server.stop()
    server.stop()
    assert not server.alive
    assert server.folder is None
    if state != "never started":
        assert is_gone(pid)
        assert not folder.exists()


def test_the_reaper_leaves_with_the_last_server(some_binary, monkeypatch):
    monkeypatch.setattr(module, "reaper", Reaper())
    with servers(2, binary=some_binary):
        helper = module.reaper._process.pid
        assert not is_gone(helper)
    assert is_gone(helper)


def test_servers_end_when_the_block_is_left_by_an_error(some_binary):
    pids = []

    def interrupted():
        with servers(2, binary=some_binary) as nodes:
            pids.extend(node.pid for node in nodes)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids)


def test_a_server_outlives_the_thread_that_started_it(some_binary):
    """A short-lived thread may start it, as a chaos script does."""
    server = Server(binary=some_binary)
    try:
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        time.sleep(0.1)  # it would be ended when the thread is
        assert server.alive
    finally:
        server.stop()


def test_a_port_that_another_has_is_refused(redis_nodes, some_binary):
    (other,) = redis_nodes(1)
    with pytest.raises(PortTaken, match=f"port {other.port} is used"):
        Server(binary=some_binary, port=other.port)


def test_somebody_elses_server_is_not_taken_for_ours(redis_nodes, some_binary):
    (other,) = redis_nodes(1)
    server = Server(binary=some_binary)
    server.port = other.port
    with pytest.raises(RuntimeError, match=r"(?s)ended at once.*Address already in use"):
        server.start()
    assert other.alive


def test_a_server_that_does_not_start_shows_its_log(some_binary):
    server = Server(binary=some_binary, extra_args=("--no-such-option", "yes"))
    with pytest.raises(RuntimeError, match=r"(?s)ended at once.*no-such-option"):
        server.start()
    assert server.folder is None


def test_a_running_server_is_not_started_twice(redis_nodes):
    (node,) = redis_nodes(1)
    with pytest.raises(RuntimeError, match="running already"):
        node.start()
    assert node.alive


def test_a_missing_binary_is_explained(monkeypatch):
    monkeypatch.setattr(module, "embedded", lambda: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"celery-redlock\[demo\]"):
        find_binary()


def test_a_forked_child_does_not_end_its_parents_servers(redis_nodes):
    (node,) = redis_nodes(1)
    child = os.fork()
    if child == 0:
        node.kill()
        node.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert node.alive
    with _client(node) as client:
        assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port can be taken meanwhile")
def test_the_port_of_a_server_that_is_down_stays_its_own(redis_nodes):
    """
    Nobody else's server gets it, its clients are refused, and it comes back on it.

    Twin: once it is given up, anybody gets it.
    """
    (node,) = redis_nodes(1)
    node.kill()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", node.port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", node.port))
    node.start()
    with _client(node) as client:
        assert client.ping()
    node.kill()
    node.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", node.port))


PARENT = """
    import sys, time
    from celery_redlock.testing.servers import servers
    with servers(2) as nodes:
        print(*(f"{node.pid} {node.folder}" for node in nodes), sep="\\n", flush=True)
        if "paused" in sys.argv:
            nodes[0].pause()
            print("paused", flush=True)
        while True:
            time.sleep(0.1)  # a signal just before a long sleep would be looked at after it
"""


def _parent(*words):
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    children = []
    for _ in range(2):
        pid, folder = parent.stdout.readline().split()
        children.append((int(pid), Path(folder)))
    return parent, children


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_parent_takes_its_servers_along(how):
    parent, children = _parent()
    with parent:
        assert not any(is_gone(pid) for pid, _ in children)
        parent.send_signal(how)
        parent.wait(60)
    eventually(lambda: all(is_gone(pid) for pid, _ in children), "end of the servers")
    eventually(lambda: not any(folder.exists() for _, folder in children), "removed folders")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_parent_takes_a_paused_server_along():
    parent, children = _parent("paused")
    with parent:
        assert parent.stdout.readline() == "paused\n"
        parent.kill()
    eventually(lambda: all(is_gone(pid) for pid, _ in children), "end of the servers")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_dead_reaper_is_replaced(redis_nodes):
    redis_nodes(1)
    first = reaper._process
    first.kill()
    first.wait()
    redis_nodes(1)
    assert reaper._process is not first
    assert reaper._process.poll() is None
    assert len(reaper._watched) >= 2


def test_folders_are_made_where_temporary_files_belong(redis_nodes):
    (node,) = redis_nodes(1)
    assert node.folder.parent == Path(tempfile.gettempdir())
