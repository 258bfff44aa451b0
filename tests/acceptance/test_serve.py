"""``celery-redlock servers``: servers for those who have none, which end with the command."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
import redis

from celery_redlock.testing.ports import HOST, reserved
from celery_redlock.testing.servers import Server
from support.waiting import eventually

SERVE = [sys.executable, "-m", "celery_redlock", "servers"]


@pytest.fixture
def ports():
    """Four ports in a row, of which nobody else is given one while the test runs (Linux)."""
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as places:
            first = places.enter_context(reserved()).getsockname()[1]
            for port in range(first + 1, first + 4):
                place = places.enter_context(socket.socket())
                place.bind((HOST, port))
                # From now on it lets in the server that is to be there, which has it as well.
                place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux":  # elsewhere nobody may be bound to a port that is served
                places.close()
            yield first
            return


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextlib.contextmanager
def serving(folder, *options):
    out = folder / "out"
    with out.open("wb") as sink:
        process = subprocess.Popen([*SERVE, *options], stdout=sink, stderr=sink)
    try:
        yield process, out.read_text
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("ending", ["SIGINT", "SIGTERM"])
def test_servers_run_on_the_ports_asked_for_until_somebody_ends_them(tmp_path, ports, ending):
    options = ["--nodes", "2", "--node-port", str(ports), "--broker-port", str(ports + 3)]
    with serving(tmp_path, *options) as (process, told):
        eventually(lambda: "ready." in told(), "readiness")
        urls = [f"redis://127.0.0.1:{port}/0" for port in (ports, ports + 1)]
        assert f"redlock_nodes = {json.dumps(urls)}\n" in told()
        pids = dict(re.findall(r"(\S.+?) +redis://\S+  \(process (\d+)\)", told()))
        assert list(pids) == ["broker", "lock node 1", "lock node 2"]
        for port in (ports, ports + 1, ports + 3):
            with contextlib.closing(redis.Redis(port=port)) as client:
                assert client.ping()
        os.kill(int(pids["lock node 2"]), signal.SIGKILL)
        eventually(lambda: "lock node 2 has ended" in told(), "word of the one that was killed")
        process.send_signal(signal.Signals[ending])
        assert process.wait(timeout=100) == 0
    assert all(is_free(port) for port in range(ports, ports + 4))


def test_a_port_that_is_taken_is_named(tmp_path, ports):
    options = ["--nodes", "2", "--node-port", str(ports), "--broker-port", "0"]
    other = Server(port=ports + 1)
    other.start()
    try:
        with serving(tmp_path, *options) as (process, told):
            assert process.wait(timeout=100) == 1
            assert f"Error: port {ports + 1} is used by another process; --node-port" in told()
        assert is_free(ports)
    finally:
        other.stop()
