"""
Hints on real nodes: who waits with them has a lock as often as without, whatever is away.

Each crowd contends with hints and without, in turns and in the same run: only the ratio counts.
Whoever waits comes by itself after a second, so a lock that is free for longer than `IDLE` was
free for somebody who did not come; times when the machine stood still are taken off. A hint that
goes astray costs a second, in which a crowd has some forty grants: `FEWER` tells that from a
machine that is busy. `benchmarks/queue.py` measures the ratio itself.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing

import pytest
import redis

from celery_redlock import LockTaken
from celery_redlock.lock.algorithm import acquiring
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.records import place_name
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import servers
from support.contender import RULES, Contender, locks_on, of_any_name
from support.events import now
from support.proxy import proxied
from support.stalls import Stalls
from support.stored import clients_of
from support.waiting import eventually

#: Longest that a lock may be free while somebody waits for it [s].
IDLE = 0.9
#: Grants with hints, at least, of as many without.
FEWER = 0.6
#: For how long a crowd contends at a time [s], and how often: with hints, and without.
LENGTH, TURNS, TURNS_WITHOUT = 1.2, 4, 2
#: Until all wait for a lock that is held [s].
ALL_WAIT = 0.8
#: One way from site to site [s].
FAR = 0.0025


@pytest.fixture
def stack(monkeypatch):
    monkeypatch.setattr(Rules, "fingerprint", of_any_name)
    with ExitStack() as stack:
        yield stack


def two_sites(stack):
    nodes = stack.enter_context(servers(3))
    ways = []
    for number in range(2):
        links = stack.enter_context(proxied([node.port for node in nodes]))
        for place, link in enumerate(links):
            link.delay(0.0 if (place == 2) == (number == 1) else FAR)
        ways.append([link.url for link in links])
    bootstrap(ways[0], Rules(**RULES))
    return nodes, ways


def crowd(stack, ways, modes=(True, False)):
    crew = [stack.enter_context(Contender(urls)) for urls in ways]
    for one, hints in itertools.product(crew, modes):
        eventually(
            lambda: one.ask(name="warm up", ends=now() + 0.1, hints=hints),  # noqa: B023
            "grants of a process that has started",
        )
    return crew


def longest_free(grants, stalls):
    """Return for how long a lock was free at most, while this machine went on [s]."""
    times = [(before[1], after[0]) for before, after in itertools.pairwise(sorted(grants))]
    # What was asked for in a stall is late, or fails, once it is over: so it still counts then.
    free = (ends - begins - stalls.between(begins - IDLE, ends) for begins, ends in times)
    return max(free, default=float("inf"))


def grants_of(crew, ends):
    return [(ends, ends), *(tuple(grant) for one in crew for grant in one.found())]


def going_on(ends, stalls):
    """Return for how long of a turn that ended then this machine went on [s]."""
    return LENGTH - stalls.between(ends - LENGTH, ends)


def with_those_of(crew, stalls):
    """Add the stalls of contenders: one that stands still alone gives no lock back."""
    stalls.found += [(began, ended) for one in crew for began, ended in one.stalls]
    return stalls


def with_and_without(crew, contends):
    """Return the grants in a second, with hints and without, and for how long a lock was free."""
    counts, seconds, idle = Counter(), Counter(), 0.0
    for turn in range(TURNS):
        # Spread over all turns, as the load of a machine comes and goes.
        for hints in (True, False) if turn % (TURNS // TURNS_WITHOUT) == 0 else (True,):
            with Stalls() as stalls:
                grants, ends = contends(f"x {turn} {hints}", hints)
            counts[hints] += len(grants)
            seconds[hints] += going_on(ends, stalls)
            if hints:
                idle = max(idle, longest_free(grants, with_those_of(crew, stalls)))
    return counts[True] / seconds[True], counts[False] / seconds[False], idle


@pytest.mark.parametrize("away", ["down", "restarted empty"])
def test_a_node_that_is_away_costs_no_grants(stack, away):
    nodes, ways = two_sites(stack)
    crew = crowd(stack, ways)
    nodes[1].kill()
    if away == "restarted empty":
        nodes[1].start()

    def contend(name, hints):
        ends = now() + LENGTH
        for one in crew:
            one.begin(name, ends, hints=hints, threads=5)
        return grants_of(crew, ends), ends

    with_hints, without, idle = with_and_without(crew, contend)
    assert with_hints >= FEWER * without
    assert idle < IDLE


def test_a_process_that_stands_still_holds_nobody_up(stack):
    _, ways = two_sites(stack)
    *crew, stopped = crowd(stack, [*ways, ways[0]])
    holder = stack.enter_context(closing(locks_on(ways[0])))

    def contend(name, hints):
        held = holder.take(LockRequest(name, 60.0, wait=10.0))
        ends = now() + ALL_WAIT + LENGTH
        stopped.begin(name, ends, hints=hints, threads=10)
        for one in crew:
            one.begin(name, ends, hints=hints, threads=5)
        time.sleep(ALL_WAIT)
        stopped.stand_still()
        released = now()
        holder.give_back(held)
        found = [(released, released), *grants_of(crew, ends)]
        stopped.go_on()
        assert all(granted > ends for granted, _ in stopped.found()), "it did not wait"
        return found, ends

    with_hints, without, idle = with_and_without(crew, contend)
    assert with_hints >= FEWER * without
    assert idle < IDLE


@pytest.mark.long
@pytest.mark.parametrize("away", [0, 1])
def test_a_process_that_waits_for_the_first_time_is_waited_for_by_nobody(stack, away):
    """Nobody listens there yet when it gets in line, with a node that is down or with none."""
    nodes, ways = two_sites(stack)
    for node in nodes[1 : 1 + away]:
        node.kill()
    idle = []
    for start in range(8):
        with ExitStack() as of_start:
            crew = crowd(of_start, [*ways, *ways], (True,))
            with Stalls() as stalls:
                ends = now() + LENGTH
                for one in crew:
                    one.begin(f"start {start}", ends, threads=2)
                grants = grants_of(crew, ends)
            idle.append(longest_free(grants, with_those_of(crew, stalls)))
    assert max(idle) < IDLE


def test_one_who_has_fewer_places_costs_the_others_none(stack):
    _, ways = two_sites(stack)
    *crew, few = crowd(stack, [*ways, ways[0]])
    counts, seconds, idle = Counter(), Counter(), 0.0
    for turn, with_few in itertools.product(range(2), (True, False)):
        with Stalls() as stalls:
            name, ends = f"places {turn} {with_few}", now() + LENGTH
            for one in crew:
                one.begin(name, ends, threads=5, limit=3)
            if with_few:
                few.begin(name, ends, threads=2, limit=1)
            grants = grants_of([*crew, few] if with_few else crew, ends)
        counts[with_few] += len(grants)
        seconds[with_few] += going_on(ends, stalls)
        if with_few:
            idle = max(idle, longest_free(grants, with_those_of([*crew, few], stalls)))
    assert counts[True] / seconds[True] >= FEWER * counts[False] / seconds[False]
    assert idle < IDLE


def commands(nodes):
    told = [client.info("commandstats") for client in clients_of(nodes)]
    return sum(one["calls"] for stats in told for one in stats.values())


def test_a_lock_of_many_places_costs_who_waits_for_it_no_more_than_one_of_two(stack, monkeypatch):
    """Nor who leaves it: places are looked at together, and nobody hands one on."""
    # It tries as it comes and as it leaves: how often in between is a matter of the machine.
    monkeypatch.setattr(acquiring, "pause_before", lambda client, tries, left, *_: left)
    nodes = stack.enter_context(servers(3))
    urls = [node.url for node in nodes]
    bootstrap(urls, Rules(**RULES))
    locks = stack.enter_context(closing(locks_on(urls)))
    locks.give_back(locks.take(LockRequest("warm up", 60.0, wait=10.0)))
    cost = {}
    for limit in (2, 300):
        keys = [f"redlock:lock:{place_name(f'x {limit}', place)}" for place in range(limit)]
        for client in clients_of(nodes):
            client.mset(dict.fromkeys(keys, "f" * 40 + "{}"))
        before = commands(nodes)
        for _ in range(3):
            with pytest.raises(LockTaken):
                locks.take(LockRequest(f"x {limit}", 60.0, wait=0.5, limit=limit))
        locks.inspect("x")  # on the same connections, so after all that it said
        cost[limit] = commands(nodes) - before
    assert cost[300] <= 2 * cost[2], cost


def test_places_that_nobody_released_are_filled_at_once(stack):
    """By threads of one process: whoever comes by itself and finds several has others come, too."""
    nodes = stack.enter_context(servers(3))
    urls = [node.url for node in nodes]
    bootstrap(urls, Rules(**RULES))
    locks = stack.enter_context(closing(locks_on(urls)))
    locks.give_back(locks.take(LockRequest("warm up", 60.0, wait=10.0)))
    keys = [f"redlock:lock:{place_name('x', place)}" for place in range(8)]
    clients = [stack.enter_context(redis.Redis.from_url(url)) for url in urls]
    for client in clients:
        client.mset(dict.fromkeys(keys, "f" * 40 + "{}"))
    held, granted = [], []

    def wait():
        held.append(locks.take(LockRequest("x", 60.0, wait=60.0, limit=8)))
        granted.append(now())

    threads = [threading.Thread(target=wait) for _ in keys]
    for thread in threads:
        thread.start()
    time.sleep(ALL_WAIT)
    with Stalls() as stalls:
        for client in clients:
            assert client.delete(*keys) == len(keys)
        for thread in threads:
            thread.join()
    for one in held:
        locks.give_back(one)
    assert max(granted) - min(granted) - stalls.total < 2.0
