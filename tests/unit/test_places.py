"""``lock_limit`` on nodes in memory: each place is a lock of its own, granted by a majority."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, LockTaken, RedlockTask, current_lock
from celery_redlock.lock.algorithm.acquiring import acquire
from celery_redlock.lock.algorithm.effects import Ask, Send
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import line_key, place_name
from celery_redlock.lock.waiting.waiting import InLine, free_places, has_answered, wait_request
from celery_redlock.testing import memory_quorum

LIMIT = 3


@pytest.fixture
def nodes():
    with memory_quorum() as nodes:
        yield nodes


def take(nodes, limit=LIMIT, name="api"):
    return nodes.locks.take(LockRequest(name, 10.0, limit=limit))


def test_so_many_hold_it_as_there_are_places_and_no_more(nodes):
    held = [take(nodes) for _ in range(LIMIT)]
    assert {one.place for one in held} == set(range(LIMIT))
    assert {one.name for one in held} == {"api", "api#1", "api#2"}
    with pytest.raises(LockTaken, match="'api'"):
        take(nodes)
    nodes.locks.give_back(held[1])
    assert take(nodes).place == held[1].place


def test_a_place_has_fencing_numbers_of_its_own(nodes):
    fences = {}
    for _ in range(12):
        held = [take(nodes) for _ in range(LIMIT)]
        for one in held:
            assert one.fence > fences.get(one.place, 0)
            fences[one.place] = one.fence
            nodes.locks.give_back(one)


@pytest.mark.parametrize("silent", [1, 2])
def test_a_dead_minority_costs_no_place(nodes, silent):
    for node in nodes.nodes[:silent]:
        node.down()
    assert len({take(nodes).place for _ in range(LIMIT)}) == LIMIT
    with pytest.raises(LockTaken):
        take(nodes)


def test_the_end_of_a_lease_frees_its_place(nodes):
    held = [take(nodes) for _ in range(LIMIT)]
    dead = held[2]
    nodes.locks.abandon(dead)
    nodes.clock.tick(10.1)
    assert take(nodes).place == dead.place


def test_a_place_is_not_taken_for_a_lock_of_another_limit(nodes):
    """The first place is the lock itself: tasks of before and after a change exclude each other."""
    alone = take(nodes, limit=1)
    assert (alone.name, alone.place) == ("api", 0)
    assert {take(nodes).place for _ in range(LIMIT - 1)} == {1, 2}
    with pytest.raises(LockTaken):
        take(nodes)


@pytest.mark.parametrize("name", ["api", "x" * 300, "a#1", "\N{SNOWMAN}" * 90])
def test_a_place_says_what_it_is_a_place_of(name):
    """So that a release wakes who waits for any of them: there is one line for all."""
    names = [place_name(name, place) for place in range(12)]
    assert names[0] == name
    assert len(set(names)) == 12
    lines = {line_key("redlock", one, place) for place, one in enumerate(names)}
    assert lines == {line_key("redlock", name)}
    assert line_key("redlock", names[1]) not in lines  # of a lock that is named so


def of(execution):
    return LockRequest("api", 10.0, info={"execution": execution}, limit=LIMIT)


def test_a_message_that_is_delivered_again_does_not_run_beside_itself(nodes):
    """Whatever places are free: it finds its own; twin: another execution has one of those."""
    locks, one = nodes.locks, "e" * 32
    held = locks.take(of(one))
    for _ in range(10):
        with pytest.raises(LockTaken) as refused:
            locks.take(of(one))
        assert refused.value.holder["execution"] == one
    assert locks.take(of("f" * 32)).place != held.place


@pytest.mark.parametrize("looks_at", [0, 1000], ids=["off", "on"])
def test_nor_where_the_lock_had_more_places_when_it_began(nodes, looks_at):
    """As by a plan that was changed; it is found where a majority has it."""
    one, few = "e" * 32, {"limit": 1, "looks_at": looks_at}
    began = nodes.locks.take(replace(of(one), name=place_name("api", 6), limit=1))
    if looks_at:
        with pytest.raises(LockTaken) as refused:
            nodes.locks.take(replace(of(one), **few))
        assert refused.value.holder["execution"] == one
        for node in nodes.nodes[:2]:
            node.deny("DEL")
        nodes.locks.give_back(began)
        for node in nodes.nodes[:2]:
            node.up()
    held = nodes.locks.take(replace(of(one), **few))
    assert held.place == 0
    nodes.locks.give_back(held)
    assert nodes.locks.take(replace(of("f" * 32), **few)).place == 0


def test_where_it_had_a_place_once_that_ends_meanwhile_it_is_granted_none(nodes):
    """Its lease ends between the look at all places and the attempt; another has the only one."""
    locks, one = nodes.locks, "e" * 32
    began = locks.take(replace(of(one), name=place_name("api", 6), limit=1))
    other = locks.take(replace(of("f" * 32), limit=1))
    steps = acquire(locks.participant, replace(of(one), limit=1, looks_at=1000))
    step, asked = next(steps), 0
    with pytest.raises(LockTaken) as refused:
        while True:
            answer = None
            if isinstance(step, Ask):
                answer, asked = locks.driver.ask(step), asked + 1
            elif isinstance(step, Send):
                locks.driver.tell(step.request, step.skip)
            if asked == 1:
                locks.give_back(began)
            step = steps.send(answer)
    assert refused.value.holder["execution"] == other.lease.info["execution"]
    assert nodes.holder(place_name("api", 6)) is None
    locks.give_back(other)
    assert locks.take(replace(of(one), limit=1, looks_at=1000)).place == 0


def test_nor_is_it_refused_for_another_one_where_no_place_is_free(nodes):
    """Its policy would end it, and with it the one that runs."""
    executions = ["d" * 32, "e" * 32, "f" * 32]
    for one in executions:
        nodes.locks.take(of(one))
    for one in executions:
        with pytest.raises(LockTaken) as refused:
            nodes.locks.take(of(one))
        assert refused.value.holder["execution"] == one


def test_what_a_minority_has_of_it_is_nobody(nodes):
    """As a release that has yet to reach a node: another place is taken."""
    held = nodes.locks.take(of("e" * 32))
    for node in nodes.nodes[:2]:
        node.deny("DEL")
    nodes.locks.give_back(held)
    for node in nodes.nodes[:2]:
        node.up()
    assert nodes.locks.take(of("e" * 32)).fence


def test_it_finds_where_it_runs_and_not_what_a_node_missed_the_release_of(nodes):
    """Two nodes say of another place that it has that: it would be granted there."""
    locks, one = nodes.locks, "e" * 32
    first = locks.take(of(one))
    for node in nodes.nodes[:2]:
        node.deny("DEL")
    locks.give_back(first)
    other = locks.take(LockRequest(first.name, 10.0))
    for node in nodes.nodes[:2]:
        node.up()
    held = locks.take(of(one))
    assert held.place != first.place
    locks.give_back(other)
    for _ in range(10):
        with pytest.raises(LockTaken) as refused:
            locks.take(of(one))
        assert refused.value.holder["execution"] == one


def hear_all(nodes):
    heard = []
    for node in nodes.nodes:
        node.model.keyspace.hear = lambda _channel, message: heard.append(message) or 1
    return heard


def wait_in_line(nodes, limit):
    """Have somebody wait for the lock; return how many of its places nobody holds."""
    one = InLine("api", "f" * 32, 1.7e9, {}, "c" * 16, limit, asks=True)
    asked = Ask(wait_request(nodes.locks.rules, one), has_answered)
    return free_places(nodes.locks.driver.ask(asked))


LINE = b"redlock:line:api"


def hint_of(lease):
    """Return what a release of *lease* sends to who waits in `wait_in_line`."""
    return lease.token[-8:].encode() + b"f" * 32 + LINE


@pytest.mark.parametrize("place", range(LIMIT))
def test_whoever_waits_is_told_of_any_place_that_is_free(nodes, place):
    held = {one.place: one for one in (take(nodes) for _ in range(LIMIT))}
    heard = hear_all(nodes)
    wait_in_line(nodes, LIMIT)
    assert heard == []
    nodes.locks.give_back(held[place])
    assert heard == [hint_of(held[place])] * len(nodes.nodes)
    assert take(nodes).place == place


def test_nobody_is_told_of_a_place_beyond_its_limit(nodes):
    """It would try in vain, and be passed for it; twin: it is told of one within its limit."""
    held = {one.place: one for one in (take(nodes) for _ in range(LIMIT))}
    heard = hear_all(nodes)
    wait_in_line(nodes, LIMIT - 1)
    nodes.locks.give_back(held[LIMIT - 1])
    assert heard == []
    nodes.locks.give_back(held[LIMIT - 2])
    assert heard == [hint_of(held[LIMIT - 2])] * len(nodes.nodes)


def test_who_waits_learns_how_many_places_are_free(nodes):
    """They were released before it came, or lapsed; twin: not those beyond its limit."""
    held = {one.place: one for one in (take(nodes) for _ in range(LIMIT))}
    assert wait_in_line(nodes, LIMIT) == 0
    nodes.locks.give_back(held[LIMIT - 1])
    assert wait_in_line(nodes, LIMIT) == 1
    assert wait_in_line(nodes, LIMIT - 1) == 0
    for place in range(LIMIT - 1):
        nodes.locks.give_back(held[place])
    assert wait_in_line(nodes, LIMIT) == LIMIT


def test_a_minority_that_missed_the_grants_frees_no_place(nodes):
    """Whoever waits would try in vain every second; twin: a majority does."""
    for _ in range(LIMIT):
        take(nodes)
    found = []
    for node in nodes.nodes[:3]:
        for place in range(LIMIT):
            node.model.ask(b"DEL", b"redlock:lock:" + place_name("api", place).encode())
        found.append(wait_in_line(nodes, LIMIT))
    assert found == [0, 0, LIMIT]


def test_an_attempt_in_vain_tells_nobody(nodes):
    """Nothing was released: those who wait would have each other try without end."""
    for _ in range(LIMIT):
        take(nodes)
    heard = hear_all(nodes)
    wait_in_line(nodes, LIMIT)
    with pytest.raises(LockTaken):
        take(nodes)
    assert heard == []


def test_a_count_on_each_node_would_let_more_run():
    """
    Why a place is a lock: nodes that count to three can each be right, and four run.

    Each of four holders has the votes of a majority, and no node has granted more than three.
    """
    votes = [(0, 1, 2), (0, 1, 3), (0, 2, 4), (1, 3, 4)]
    assert all(len(one) >= quorum(5) for one in votes)
    assert all(sum(node in one for one in votes) <= LIMIT for node in range(5))
    assert len(votes) > LIMIT
    # One key per place and node: two majorities have a node in common, and it has one token.
    for one, other in itertools.combinations(votes, 2):
        assert set(one) & set(other)


@pytest.mark.parametrize(("min_hold", "most"), [(60, LIMIT), (0, 30)], ids=["on", "off"])
def test_with_min_hold_so_many_start_per_window(min_hold, most):
    """Two seconds lie between calls: as many start in any minute as there are places."""
    app, starts = Celery("shop", broker="memory://", set_as_current=False), []

    @app.task(
        base=RedlockTask,
        shared=False,
        lock_key="sms-api",
        lock_limit=LIMIT,
        min_hold=min_hold,
        on_conflict="fail",
    )
    def send_sms():
        starts.append(current_lock().since)

    with memory_quorum(app) as nodes:
        for _ in range(200):
            send_sms.apply()
            nodes.clock.tick(2.0)
    in_a_minute = [sum(0 <= round(other - one) < 60 for other in starts) for one in starts]
    assert max(in_a_minute) == most
    assert len(starts) > 15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"lock_limit": limit}, "lock_limit must be a whole number")
            for limit in (0, -1, 1001, 2.0, True, "3", (), (1, 0))
        ),
        ({"lock_limit": 2, "unique_until": "started"}, "lock_limit=2 lets several run at once"),
    ],
)
def test_a_limit_is_a_number_of_places(options, words):
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(ConfigurationError, match=words):

        @app.task(base=RedlockTask, name="shop.bill", shared=False, **options)
        def bill():
            """Do nothing."""

        app.tasks["shop.bill"].check_lock()
