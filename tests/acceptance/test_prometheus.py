"""What Prometheus reads from real workers, after something was made to go wrong in each way."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from billiard.util import set_pdeathsig

from celery_redlock import RedlockTask, nodewatch
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.events import body
from support.metrics import address_of, scrape
from support.stage import LASTING, stage
from support.waiting import eventually
from support.worker import CeleryProcess, Worker

pytestmark = pytest.mark.long

#: Of the tasks whose lease is to be renewed, or lost, before long.
TTL = 9.0
ON = {
    **LASTING,
    "redlock_observers": ["logging", "prometheus"],
    "redlock_prometheus_listen": "127.0.0.1:0",
    "redlock_prefix": "redlock",
}


def declare(app):
    """One task per way to fail, and one that holds its lock until it is told to go on."""
    if "STAGE" in os.environ:  # in a worker, which is to notice soon what becomes of nodes
        nodewatch.LOOK_EVERY = 0.5

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
    """Set a stage: ``on_stage(nodes=3, **settings)``."""
    with ExitStack() as stack:

        def made(nodes=3, **conf):
            return stack.enter_context(stage(__file__, tmp_path, nodes=nodes, **{**ON, **conf}))

        yield made


@pytest.fixture
def folder(tmp_path):
    """Where workers make what is temporary; `in_folder` is their environment for that."""
    made = tmp_path / "tmp"
    made.mkdir()
    return made


@pytest.fixture
def in_folder(folder):
    """Return the environment that has a worker, which a test may kill, leave nothing elsewhere."""
    return {"TMPDIR": str(folder)}


@pytest.fixture
def until(tmp_path):
    """File whose coming ends the bodies of ``hold``."""
    file = tmp_path / "until"
    yield file
    file.touch()


def seen(address, condition, what, timeout=100):
    """Return the first scrape that *condition* is true of."""

    def look():
        try:
            told = scrape(address)
        except OSError:  # not yet
            return None
        return told if condition(told) else None

    return eventually(look, what, timeout=timeout, every=0.1)


def free_address():
    """Return an address that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def label(node):
    """Return what a node is called."""
    return f"127.0.0.1:{node.port}/0"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_what_went_wrong_is_counted(on_stage, until, pool, in_folder):
    """A skip, a refusal, grants, a lost lease and renewals; over all children of the worker."""
    it = on_stage()
    worker = it.worker(env=in_folder, pool=pool, concurrency=1 if pool == "solo" else 2)
    address = address_of(worker)
    with it.held("taken"):
        assert it.task("nap").delay("taken").get(timeout=100)["skipped"] == "conflict"
        it.task("refuse").delay("taken").get(timeout=100, propagate=False)
    naps = [it.task("nap").delay(f"free {n}", 0.2) for n in range(8)]
    pids = {nap.get(timeout=100) for nap in naps}
    assert len(pids) == (2 if pool == "prefork" else 1)

    held = it.task("hold").delay("robbed", str(until))
    it.started("robbed")
    seen(address, lambda told: told.sum("redlock_renewals_total", task="hold") >= 1, "a renewal")
    for node in it.nodes:
        with redis.Redis.from_url(node.url) as client:
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


def test_dead_and_quarantined_nodes_are_told_and_get_well(on_stage, in_folder):
    """Down goes to 0 and comes back; a restarted node is quarantined, and that ends by itself."""
    # So that a quarantine lasts 13.6 s: long enough to be seen, and to be waited for.
    it = on_stage(redlock_ttl=12.0, redlock_max_ttl=12.0)
    address = address_of(it.worker(env=in_folder))
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


def test_a_child_that_dies_leaves_its_counts_and_no_gauge(on_stage, until, in_folder):
    """After ``kill -9`` and after a recycled child: sums stay, a dead process's margin goes."""
    it = on_stage()
    worker = it.worker(env=in_folder, concurrency=1, args=["--max-tasks-per-child", "3"])
    address = address_of(worker)
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


def test_the_workers_own_folder_is_removed_and_its_port_is_free_at_the_end(
    on_stage, in_folder, folder
):
    """The worker made it for itself; children that end before it leave it alone."""
    it = on_stage()
    worker = it.worker(env=in_folder, args=["--max-tasks-per-child", "1"])
    address = address_of(worker)
    for n in range(3):
        it.task("nap").delay(f"free {n}").get(timeout=100)
    (own,) = folder.glob("celery-redlock-metrics-*")
    assert own.stat().st_mode & 0o077 == 0
    seen(address, lambda told: told.sum("redlock_acquires_total") == 3, "three grants")
    worker.terminate()
    assert not own.exists()
    with pytest.raises(OSError, match="refused"):
        scrape(address)


def test_a_child_does_not_keep_the_port(on_stage, until, in_folder):
    """A child that outlives a killed worker is no reason why the next one has no metrics."""
    it = on_stage()
    worker = it.worker(env=in_folder, concurrency=1, args=["--max-tasks-per-child", "1"])
    port = int(address_of(worker).split(":")[2].split("/")[0])
    it.task("nap").delay("one").get(
        timeout=100
    )  # the next child is forked after the port was bound
    it.task("hold").delay("two", str(until))
    (started,) = it.started("two")
    worker.kill(children=False)
    os.kill(started.pid, 0)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()


def test_a_port_in_use_is_told_and_tasks_run(on_stage, in_folder):
    """The error names setting and port; the worker works."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        it = on_stage(redlock_prometheus_listen=listen)
        worker = it.worker(env=in_folder)
        it.task("nap").delay("one").get(timeout=100)
        worker.wait_for_log("No metrics.*")
    (line,) = [line for line in worker.log().splitlines() if "No metrics" in line]
    assert "ERROR" in line
    assert f"redlock_prometheus_listen is '{listen}': Address already in use" in line
    assert "Traceback" not in worker.log()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redlock_observers": ["logging"]}, "add 'prometheus' to redlock_observers"),
        ({"imports": ["counts_early"]}, "set PROMETHEUS_MULTIPROC_DIR to an empty directory"),
    ],
)
def test_metrics_that_could_not_be_right_are_refused_at_the_start(
    on_stage, settings, words, in_folder
):
    """The worker does not start, and says what to do."""
    it = on_stage(**settings)
    early = "import prometheus_client\nprometheus_client.Counter('mine', 'as a user has it')\n"
    it.events.with_name("counts_early.py").write_text(early)
    with pytest.raises(AssertionError, match="has ended") as caught:
        it.worker(env=in_folder)
    assert words in str(caught.value)
    if "imports" in settings:  # other pools count in one process: nothing is wrong there
        it.worker(env=in_folder, pool="threads")


def test_a_folder_of_the_environment_is_used_and_kept(on_stage, tmp_path):
    """Also where prometheus_client is imported early; files of workers that died are tidied."""
    folder = tmp_path / "metrics"
    it = on_stage(imports=["prometheus_client"])
    env = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    folder.mkdir()
    worker = it.worker(env=env)
    address = address_of(worker)
    it.task("nap").delay("one").get(timeout=100)
    seen(address, lambda told: told.sum("redlock_acquires_total") == 1, "the grant")
    worker.kill()
    stale = {file.name for file in folder.glob("gauge_live*.db")}
    assert stale
    worker = it.worker(env=env)
    it.task("nap").delay("two").get(timeout=100)
    seen(
        address_of(worker),
        lambda told: told.sum("redlock_acquires_total") == 2 and told.sum("redlock_node_up") == 3,
        "both grants, and all nodes",
    )
    assert stale.isdisjoint({file.name for file in folder.glob("*.db")})
    worker.terminate()
    assert folder.exists()


def test_the_examples_beat_serves_its_own(tmp_path, broker, five_nodes):
    """As its app does it: who leads, and which slots were published."""
    root = Path(__file__).parents[2]
    bootstrap([node.url for node in five_nodes], Rules(ttl=10, max_ttl=20))
    listen = free_address()
    env = {
        "BROKER_URL": broker.url,
        "RESULT_URL": broker.url,
        "REDLOCK_NODES": ",".join(node.url for node in five_nodes),
        "REPORT_EVERY": "1",
        "PROMETHEUS_LISTEN": listen,
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


def test_a_worker_that_replaces_itself_counts_on(on_stage, tmp_path, in_folder, folder):
    """After SIGHUP it has the same id, directory and sums, and gives the port up in between."""
    listen = free_address()
    it = on_stage(redlock_prometheus_listen=listen)
    stage_env = {"EVENTS": str(it.events), "STAGE": json.dumps([__file__, it.conf])}
    worker = Worker("support.stage", cwd=tmp_path, env={**stage_env, **in_folder})
    # As people start it: what was started as `python -m celery` cannot replace itself.
    worker.command[:3] = [str(Path(sys.executable).with_name("celery"))]
    with worker:
        it.task("nap").delay("one").get(timeout=100)
        address = f"http://{listen}/metrics"
        seen(address, lambda told: told.sum("redlock_acquires_total") == 1, "the grant")
        worker.signal(signal.SIGHUP)
        eventually(lambda: worker.log().count("Metrics at") == 2, "a second start", timeout=100)
        it.task("nap").delay("two").get(timeout=100)
        seen(address, lambda told: told.sum("redlock_acquires_total") == 2, "both grants")
        assert len(list(folder.glob("celery-redlock-metrics-*"))) == 1
        worker.terminate()
    assert list(folder.glob("celery-redlock-metrics-*")) == []
