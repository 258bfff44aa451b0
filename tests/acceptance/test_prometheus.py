"""What Prometheus reads from real workers, after something was made to go wrong in each way."""

from __future__ import annotations

import math
import os
import signal
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from billiard.util import set_pdeathsig

from celery_redlock import RedlockTask
from celery_redlock.lock.rules import Rules
from celery_redlock.observers.names import FILES
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.task.worker import node_watch
from support.events import body
from support.metrics import kept_port, scrape, serve_as_shown
from support.stage import LASTING, stage
from support.stored import clients_of, label
from support.waiting import eventually
from support.worker import CeleryProcess

pytestmark = pytest.mark.long

#: Of the tasks whose lease is to be renewed, or lost, before long.
TTL = 9.0
ON = {
    **LASTING,
    "redlock_observers": ["logging", "prometheus"],
    "redlock_prefix": "redlock",
}


def declare(app):
    if "STAGE" in os.environ:  # in a worker, which is to notice soon what becomes of nodes
        node_watch.LOOK_EVERY = 0.5
        serve_as_shown(os.environ["METRICS_PORT"])

    @app.task(base=RedlockTask, name="nap", lock_key="{name}", shared=False)
    def nap(name, seconds=0.0):
        with body(os.environ["EVENTS"], name):
            time.sleep(seconds)
        return os.getpid()

    @app.task(base=RedlockTask, name="refuse", lock_key="{name}", on_conflict="fail", shared=False)
    def refuse(name):
        pass

    held = {"lock_key": "{name}", "lock_ttl": TTL, "on_lock_lost": "warn"}

    @app.task(base=RedlockTask, name="hold", shared=False, **held)
    def hold(name, until):
        with suppress(OSError):  # Celery has a child die with its parent, where the system can
            set_pdeathsig(0)
        with body(os.environ["EVENTS"], name):
            while not Path(until).exists():
                time.sleep(0.02)

    @app.task(base=RedlockTask, name="need", lock_key="{name}", on_unavailable="fail", shared=False)
    def need(name):
        pass


@pytest.fixture
def on_stage(tmp_path):
    with ExitStack() as stack:

        def made(nodes=3, **conf):
            return stack.enter_context(stage(__file__, tmp_path, nodes=nodes, **{**ON, **conf}))

        yield made


@pytest.fixture
def served(tmp_path):
    """Return a worker's environment, by its pool, and where it serves its metrics."""
    folder = tmp_path / "metrics"
    folder.mkdir()

    with kept_port() as port:

        def made(pool="prefork"):
            env = {"METRICS_PORT": str(port)}
            if pool == "prefork":
                env[FILES] = str(folder)
            return env, f"http://127.0.0.1:{port}/metrics"

        yield made


@pytest.fixture
def until(tmp_path):
    file = tmp_path / "until"
    yield file
    file.touch()


def seen(address, condition, what, timeout=100):
    def look():
        try:
            told = scrape(address)
        except OSError:  # not yet
            return None
        return told if condition(told) else None

    return eventually(look, what, timeout=timeout, every=0.1)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_what_went_wrong_is_counted(on_stage, until, pool, served):
    it = on_stage()
    env, address = served(pool)
    it.worker(env=env, pool=pool, concurrency=1 if pool == "solo" else 2)
    with it.held("taken"):
        assert it.task("nap").delay("taken").get(timeout=100)["skipped"] == "conflict"
        it.task("refuse").delay("taken").get(timeout=100, propagate=False)
    naps = [it.task("nap").delay(f"free {n}", 0.2) for n in range(8)]
    pids = {nap.get(timeout=100) for nap in naps}
    assert len(pids) == (2 if pool == "prefork" else 1)

    held = it.task("hold").delay("robbed", str(until))
    it.started("robbed")
    seen(address, lambda told: told.sum("redlock_renewals_total", task="hold") >= 1, "a renewal")
    for client in clients_of(it.nodes):
        client.delete("redlock:lock:robbed")

    def is_all_told(told):
        return (
            told.sum("redlock_lost_total")
            and told.one("redlock_hold_seconds_count", task="nap") == 8
            and told.sum("redlock_node_up") == len(it.nodes)
            and told.one("redlock_watchdog_lag_seconds_count")
        )

    told = seen(address, is_all_told, "the loss, and all the rest")
    until.touch()
    held.get(timeout=100)

    assert told.sum("redlock_lost_total", task="hold") == 1
    assert told.one("redlock_acquires_total", task="nap", outcome="granted") == 8
    assert told.one("redlock_acquires_total", task="nap", outcome="taken") == 1
    assert told.one("redlock_acquires_total", task="refuse", outcome="taken") == 1
    assert told.one("redlock_skipped_total", task="nap", cause="conflict") == 1
    assert told.one("redlock_refused_total", task="refuse", cause="conflict") == 1
    assert told.one("redlock_wait_seconds_count", task="nap") == 8
    assert told.one("redlock_hold_seconds_count", task="nap") == 8
    assert told.one("redlock_hold_seconds_sum", task="nap") > 8 * 0.2
    assert 0 < told.one("redlock_smallest_lease_margin_seconds", task="hold") < TTL
    assert 0 < told.one("redlock_smallest_lease_margin_ratio", task="hold") < 1
    assert told.one("redlock_watchdog_lag_seconds_count") >= 1
    for node in it.nodes:
        assert told.one("redlock_node_up", node=label(node)) == 1
        assert told.one("redlock_node_quarantined", node=label(node)) == 0
        assert told.one("redlock_node_latency_seconds", node=label(node)) > 0
        # One clock, but a stalled machine measures it badly.
        assert abs(told.one("redlock_node_clock_offset_seconds", node=label(node))) < 60
    assert "taken" not in {
        value for sample in told.samples for key, value in sample.labels.items() if key != "outcome"
    }
    assert "robbed" not in told.text


def test_dead_and_quarantined_nodes_are_told_and_get_well(on_stage, served):
    # So that a quarantine lasts 13.6 s: long enough to be seen, and to be waited for.
    it = on_stage(redlock_ttl=12.0, redlock_max_ttl=12.0)
    env, address = served()
    it.worker(env=env)
    first, second, third = map(label, it.nodes)
    it.task("nap").delay("one").get(timeout=100)
    seen(address, lambda told: told.sum("redlock_node_up") == 3, "three nodes")

    for node in it.nodes[:2]:
        node.kill()
    told = seen(
        address,
        lambda told: (
            told.sum("redlock_node_up") == 1
            and told.sum("redlock_node_events_total", node=first, event="down")
            and math.isnan(told.one("redlock_node_latency_seconds", node=first))
        ),
        "two dead nodes",
    )
    assert told.one("redlock_node_up", node=first) == 0
    assert told.one("redlock_node_up", node=third) == 1
    it.task("need").delay("two").get(timeout=100, propagate=False)
    told = seen(address, lambda told: told.sum("redlock_refused_total"), "a refusal")
    assert told.one("redlock_refused_total", task="need", cause="unavailable") == 1
    assert told.one("redlock_acquires_total", task="need", outcome="unavailable") == 1
    assert told.one("redlock_node_up", node=first) == 0

    it.nodes[0].start()
    seen(
        address,
        lambda told: (
            told.one("redlock_node_quarantined", node=first) == 1
            and told.one("redlock_node_up", node=first) == 1
        ),
        "a quarantined node that is up",
    )
    told = seen(
        address,
        lambda told: (
            told.one("redlock_node_quarantined", node=first) == 0
            and told.one("redlock_node_latency_seconds", node=first) > 0
        ),
        "the end of the quarantine",
    )
    assert told.one("redlock_node_up", node=second) == 0

    def is_granted():  # its process may have to connect to the node anew
        return it.task("need").delay("three").get(timeout=100, propagate=False) is None

    eventually(is_granted, "a lock", every=0.2)


def test_a_child_that_dies_leaves_its_counts_and_no_gauge(on_stage, until, served):
    it = on_stage()
    env, address = served()
    it.worker(env=env, concurrency=1, args=["--max-tasks-per-child", "3"])
    pids = {it.task("nap").delay(f"one {n}").get(timeout=100) for n in range(7)}
    assert len(pids) == 3
    it.task("hold").delay("killed", str(until))
    (started,) = it.started("killed")
    margin = "redlock_smallest_lease_margin_seconds"
    seen(address, lambda told: told.one(margin, task="hold"), "a margin")
    it.wait_until_begun(started.pid)
    os.kill(started.pid, signal.SIGKILL)
    told = seen(
        address,
        lambda told: told.one(margin, task="hold") is None and told.sum("redlock_node_up") == 3,
        "no margin, and all nodes",
    )
    assert told.one("redlock_acquires_total", task="nap", outcome="granted") == 7
    assert told.one("redlock_acquires_total", task="hold", outcome="granted") == 1
    it.task("nap").delay("two").get(timeout=100)
    seen(address, lambda told: told.sum("redlock_acquires_total", task="nap") == 8, "the eighth")


@pytest.fixture
def port():
    with kept_port() as it:
        yield it


def test_the_examples_beat_serves_its_own(tmp_path, broker, five_nodes, port):
    root = Path(__file__).parents[2]
    bootstrap([node.url for node in five_nodes], Rules(ttl=10, max_ttl=20))
    listen = f"127.0.0.1:{port}"
    folder = tmp_path / "metrics"
    folder.mkdir()
    env = {
        "BROKER_URL": broker.url,
        "RESULT_URL": broker.url,
        "REDLOCK_NODES": ",".join(node.url for node in five_nodes),
        "REPORT_EVERY": "1",
        "PROMETHEUS_LISTEN": listen,
        FILES: str(folder),
        "PYTHONPATH": str(root),
    }
    words = ["beat", "-S", "redlock", "-l", "INFO", "-s", str(tmp_path / "schedule")]
    command = [*words, "--pidfile", ""]
    with CeleryProcess(
        "example_worker.app", command, ready="beat: Starting", env=env, cwd=tmp_path
    ):
        told = seen(
            f"http://{listen}/metrics",
            lambda told: (
                told.sum("redlock_beat_slots_total", entry="report") >= 2
                and told.one("redlock_beat_slot_delay_seconds_count", entry="report") >= 2
                and told.one("redlock_leader") == 1
                and told.sum("redlock_node_up") == 5
            ),
            "two slots, by the one that leads",
        )
    assert told.one("redlock_leader_elected_total") >= 1
    assert told.one("redlock_beat_slots_total", entry="report", outcome="deadline") == 0
