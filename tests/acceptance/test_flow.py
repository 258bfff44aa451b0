"""
``lock_rate``, ``lock_limit`` by call and ``max_deliveries``, on real workers that are killed.

Who starts is told by a record outside, which no lock has a hand in.
"""

from __future__ import annotations

import os
import signal
import time
from bisect import bisect_left

import pytest
from celery import Task

from celery_redlock import Rate, RedlockTask, TooManyDeliveries
from support.events import body, most_at_once, read, record
from support.redelivery import redelivered_after
from support.stage import stage
from support.stalls import Stalls
from support.waiting import eventually

PER_SECOND = 20
#: Least starts in a second, with enough to do; and on a machine that is busy with other things,
#: where plain tasks may not start so often either.
ENOUGH, ENOUGH_BESIDE_LOAD = 18, 5
#: How many workers there are, and processes of each.
WORKERS, CONCURRENCY = 3, 4
#: Each process starts one at a time, so that many are noted late if the machine stands still
#: between a start and its record.
LATE = WORKERS * CONCURRENCY
SECONDS = 12.0
CUSTOMERS = 10
PUBLISHES = 1000
TTL = 10.0
MOST = 3
#: How often some tasks may start [s].
SPACING = 10.0


def declare(app):
    options = {"shared": False, "acks_late": True, "reject_on_worker_lost": True}
    queued = {"base": RedlockTask, "on_conflict": "queue", **options}

    def start(kind, number):
        record(os.environ["EVENTS"], "begun", name=kind, number=number)

    rate = {"lock_key": "api", "lock_limit": None, "lock_rate": f"{PER_SECOND}/s"}
    app.task(name="limited", **rate, **queued)(start)
    app.task(name="free", base=Task, **options)(start)

    @app.task(
        name="served",
        lock_key="customer:{customer}",
        lock_limit=lambda _task, args, _kwargs: args[1],
        **queued,
    )
    def served(customer, seats, seconds):
        with body(os.environ["EVENTS"], f"{customer} {seats}"):
            time.sleep(seconds)

    @app.task(
        name="from_template", lock_key="plan:{plan[id]}", lock_limit="{plan[seats]}", **queued
    )
    def from_template(plan, seconds):
        with body(os.environ["EVENTS"], f"plan {plan['id']}"):
            time.sleep(seconds)

    @app.task(name="unlimited", base=Task, **options)
    def unlimited(customer, seats, seconds):
        served.run(customer, seats, seconds)

    def poison(kind):
        record(os.environ["EVENTS"], "begun", name=kind)
        os.kill(os.getpid(), signal.SIGKILL)

    declare_rare(app, options)

    app.task(name="poison", base=RedlockTask, max_deliveries=MOST, **options)(poison)
    app.task(name="endless", base=RedlockTask, **options)(poison)
    app.task(name="healthy", base=RedlockTask, max_deliveries=MOST, **options)(start)


def declare_rare(app, options):
    rarely = {"base": RedlockTask, "lock_limit": None, "lock_rate": Rate(1, SPACING), **options}

    def is_first(name):
        record(os.environ["EVENTS"], "begun", name=name)
        return [event["name"] for event in read(os.environ["EVENTS"], "begun")].count(name) == 1

    @app.task(name="retried", autoretry_for=(OSError,), retry_kwargs={"countdown": 1}, **rarely)
    def retried():
        if is_first("retried"):
            raise OSError
        return "ran"

    @app.task(name="killed", **rarely)
    def killed():
        if is_first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return "ran"


def conf_of(**more):
    conf = {"redlock_max_ttl": TTL, "redlock_ttl": TTL, "worker_prefetch_multiplier": 4}
    conf |= {"task_track_started": False, **redelivered_after(5)}
    return conf | more


def begun(it, name):
    return sorted(event["at"] for event in read(it.events, "begun") if event["name"] == name)


def most_within(moments, seconds):
    """Return the largest number of *moments* in any window of so long."""
    return max(bisect_left(moments, first + seconds) - at for at, first in enumerate(moments))


def is_quiet():
    """Return whether nothing else keeps this machine busy, as other tests do."""
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    return is_alone and os.getloadavg()[0] < (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    was_quiet = is_quiet()
    with stage(__file__, tmp_path_factory.mktemp("flow"), **conf_of()) as it:
        it.was_quiet = was_quiet
        it.start_workers([{"concurrency": CONCURRENCY}] * WORKERS)
        yield it


def started(it, name, count, seconds=200):
    return eventually(lambda: len(begun(it, name)) > count, f"{count} starts", timeout=seconds)


@pytest.mark.timeout(700)  # it waits three times, for as long as a slow machine needs
def test_a_rate_holds_over_all_workers_through_a_kill_and_a_nodes_restart(it):
    wanted = int(SECONDS * PER_SECOND)
    with Stalls() as stalls:
        for number in range(int(1.5 * wanted)):
            it.task("limited").delay("limited", number)
        started(it, "limited", 0.25 * wanted)
        it.workers[0].kill()
        it.worker(concurrency=CONCURRENCY)
        started(it, "limited", 0.6 * wanted)
        it.nodes[0].restart()
        started(it, "limited", wanted)
    moments = begun(it, "limited")
    enough = ENOUGH if it.was_quiet and is_quiet() else ENOUGH_BESIDE_LOAD
    late = LATE if stalls.found else 0
    for seconds in (1, 5, 10):  # in ten seconds, the late ones hide no higher rate
        assert most_within(moments, seconds) <= PER_SECOND * seconds + late, (seconds, stalls.found)
    took = moments[-1] - moments[0]
    print(f"{len(moments) / took:.1f} starts in a second")  # noqa: T201  pytest shows it on failure
    assert len(moments) >= enough * took


def test_without_a_rate_more_start(it):
    wanted = 40 * PER_SECOND
    for number in range(wanted):
        it.task("free").delay("free", number)
    started(it, "free", wanted - 1)
    assert most_within(begun(it, "free"), 1) > PER_SECOND + LATE


@pytest.mark.long
def test_each_customer_has_places_as_its_arguments_say(it):
    seats = {customer: (1, 2, 5)[customer % 3] for customer in range(CUSTOMERS)}
    for number in range(PUBLISHES):
        customer = number % CUSTOMERS
        it.task("served").delay(customer, seats[customer], 0.01)

    def all_ran():
        return sum(len(it.bodies(f"{c} {seats[c]}")) for c in seats) == PUBLISHES

    eventually(all_ran, "the end of all", timeout=200, every=0.5)
    for customer, limit in seats.items():
        assert most_at_once(it.bodies(f"{customer} {limit}")) <= limit


def test_a_template_gives_the_places(it):
    results = [it.task("from_template").delay({"id": 7, "seats": 2}, 0.2) for _ in range(8)]
    for result in results:
        result.get(timeout=60)
    assert most_at_once(it.bodies("plan 7")) == 2


def test_without_limits_more_run_at_once(it):
    results = [it.task("unlimited").delay("all", 1, 0.5) for _ in range(8)]
    for result in results:
        result.get(timeout=60)
    assert most_at_once(it.bodies("all 1")) > 1


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def with_broker(request, tmp_path_factory):
    conf = conf_of()
    if request.param == "rabbitmq":
        conf |= {"broker_url": request.getfixturevalue("rabbit").url}
        conf |= {"broker_transport_options": {}, "task_default_queue_type": "quorum"}
        conf |= {"broker_native_delayed_delivery_queue_type": "quorum"}
    with stage(__file__, tmp_path_factory.mktemp("poison"), **conf) as it:
        it.start_workers([{"concurrency": 1}] * 2)
        yield it


@pytest.mark.long
def test_a_task_that_kills_its_worker_ends_and_the_next_one_runs(with_broker):
    it = with_broker
    result = it.task("poison").delay("poison")
    with pytest.raises(TooManyDeliveries, match="was started 3 times"):
        result.get(timeout=100)
    assert len(begun(it, "poison")) == MOST
    it.task("healthy").delay("healthy", 1).get(timeout=100)


@pytest.mark.parametrize("name", ["retried", "killed"])
def test_a_start_of_its_own_leaves_no_task_out(it, name):
    """With `Skip`, which is the default: it ended as a success, and its work was never done."""
    assert it.task(name).delay().get(timeout=100) == "ran"
    first, second = begun(it, name)
    assert second - first >= SPACING - 1.0  # the second one is noted a moment earlier or later


@pytest.mark.long
def test_a_task_without_a_limit_kills_workers_on(with_broker):
    it = with_broker
    result = it.task("endless").delay("endless")
    started(it, "endless", MOST + 1)
    result.revoke()
