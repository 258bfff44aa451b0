"""``lock_limit`` on nodes in memory: each place is a lock of its own, granted by a majority."""

from __future__ import annotations

import itertools

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, LockTaken, RedlockTask, current_lock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import place_name, queue_of
from celery_redlock.lock.requests import release_request
from celery_redlock.lock.waiting import Ticket, wait_request
from celery_redlock.lock.wanted import Turn, Wanted
from celery_redlock.testing import memory_quorum

LIMIT = 3


@pytest.fixture
def nodes():
    """Five nodes in memory."""
    with memory_quorum() as nodes:
        yield nodes


def take(nodes, limit=LIMIT, name="api"):
    """Take a place."""
    return nodes.locks.take(Wanted(name, 10.0, limit=limit))


def test_so_many_hold_it_as_there_are_places_and_no_more(nodes):
    """Each on a place of its own; one more is refused, and gets the place that is given back."""
    held = [take(nodes) for _ in range(LIMIT)]
    assert {one.place for one in held} == set(range(LIMIT))
    assert {one.name for one in held} == {"api", "api#1", "api#2"}
    with pytest.raises(LockTaken, match="'api'"):
        take(nodes)
    nodes.locks.give_back(held[1])
    assert take(nodes).place == held[1].place


def test_a_place_has_fencing_numbers_of_its_own(nodes):
    """They grow with each holder of the place."""
    fences = {}
    for _ in range(12):
        held = [take(nodes) for _ in range(LIMIT)]
        for one in held:
            assert one.fence > fences.get(one.place, 0)
            fences[one.place] = one.fence
            nodes.locks.give_back(one)


@pytest.mark.parametrize("silent", [1, 2])
def test_a_dead_minority_costs_no_place(nodes, silent):
    """A majority is asked which places are free, and grants them."""
    for node in nodes.nodes[:silent]:
        node.down()
    assert len({take(nodes).place for _ in range(LIMIT)}) == LIMIT
    with pytest.raises(LockTaken):
        take(nodes)


def test_the_end_of_a_lease_frees_its_place(nodes):
    """As of any lock."""
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
    """So that a release wakes who waits for any of them."""
    names = [place_name(name, place) for place in range(12)]
    assert names[0] == name
    assert len(set(names)) == 12
    assert len({queue_of(one, place) for place, one in enumerate(names) if place}) == 1


def of(execution, **options):
    """Return what a delivery of the task with that id asks for."""
    return Wanted("api", 10.0, info={"execution": execution}, limit=LIMIT, **options)


def test_a_message_that_is_delivered_again_does_not_run_beside_itself(nodes):
    """Whatever places are free: it finds its own; twin: another execution has one of those."""
    locks, one = nodes.locks, "e" * 32
    held = locks.take(of(one))
    for _ in range(10):
        with pytest.raises(LockTaken) as refused:
            locks.take(of(one))
        assert refused.value.holder["execution"] == one
    assert locks.take(of("f" * 32)).place != held.place


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
    other = locks.take(Wanted(first.name, 10.0))
    for node in nodes.nodes[:2]:
        node.up()
    held = locks.take(of(one))
    assert held.place != first.place
    locks.give_back(other)
    for _ in range(10):
        with pytest.raises(LockTaken) as refused:
            locks.take(of(one))
        assert refused.value.holder["execution"] == one


@pytest.mark.parametrize("beyond", [True, False])
def test_one_that_was_woken_and_does_not_take_its_turn_hands_on(nodes, beyond):
    """It runs already; or the place is beyond its limit, as after one that was lowered."""
    locks, place = nodes.locks, LIMIT if beyond else 1
    if not beyond:
        locks.take(Wanted("api", 10.0, info={"execution": "e" * 32}))
    kept = place_name("api", place)
    token = locks.take(Wanted(kept, 1.0)).token
    wanted = of("e" * 32, turn=Turn(token, place))
    if beyond:
        assert locks.take(wanted).place < LIMIT
    else:
        with pytest.raises(LockTaken):
            locks.take(wanted)
    assert locks.take(Wanted(kept, 10.0)).name == kept


def woken_by(nodes, limit=LIMIT):
    """Have somebody wait for a lock whose places are taken; return what its process hears."""
    heard = []
    for node in nodes.nodes:
        node.model.keyspace.hear = lambda _channel, message: heard.append(message) or 1
    ticket = Ticket("api", "f" * 32, 1.0, {}, "f" * 40, "c" * 16, limit)
    nodes.locks.driver.tell(wait_request(nodes.locks.rules, ticket))
    assert not heard
    return heard


@pytest.mark.parametrize("runs", [True, False])
def test_nothing_is_kept_for_a_turn_of_several_places_and_it_is_handed_on_all_the_same(nodes, runs):
    """The next one is woken for the place that is free; twin: not where the turn is taken."""
    locks, one = nodes.locks, "e" * 32
    held = [locks.take(of(one))] + [take(nodes) for _ in range(LIMIT - 1)]
    heard = woken_by(nodes)
    place = held[1].place
    for node in nodes.nodes:
        node.model.ask(b"DEL", b"redlock:lock:" + held[1].name.encode())  # and woke that execution
    wanted = of(one if runs else "d" * 32, turn=Turn("d" * 40, place))
    if runs:
        with pytest.raises(LockTaken):
            locks.take(wanted)
    else:
        assert locks.take(wanted).place == place
    free = b"f" * 40 + b"redlock:lock:" + held[1].name.encode()
    assert heard == ([free] * len(nodes.nodes) if runs else [])


def test_a_release_without_a_token_takes_nobody_out_of_the_line(nodes):
    """Nobody's token begins with nothing; as an owner's part, it would be that of every ticket."""
    locks = nodes.locks
    held = [take(nodes) for _ in range(LIMIT)]
    heard = woken_by(nodes)
    for node in nodes.nodes:
        node.model.ask(b"DEL", b"redlock:lock:" + held[1].name.encode())
    locks.driver.tell(release_request(locks.rules, held[1].name, "", place=held[1].place))
    assert heard == []
    locks.give_back(held[2])
    assert len(heard) == len(nodes.nodes)


def test_who_has_several_names_hands_on_its_turn_of_several_places(nodes):
    """It is woken for one of them, and refused an earlier one."""
    locks = nodes.locks
    locks.acquire("a")
    held = [take(nodes) for _ in range(LIMIT)]
    heard = woken_by(nodes)
    for node in nodes.nodes:
        node.model.ask(b"DEL", b"redlock:lock:" + held[1].name.encode())
    with pytest.raises(LockTaken, match="'a'"):
        locks.take_all([of("e" * 32, turn=Turn("d" * 40, held[1].place)), Wanted("a", 10.0)])
    assert len(heard) == len(nodes.nodes)


def test_who_is_woken_for_a_place_beyond_its_limit_has_its_own_if_that_is_kept_for_it(nodes):
    """Both were released at once, and each node kept another one for it; twin: for another."""
    for token in ("e" * 40, "d" * 40):
        for node in nodes.nodes:
            node.model.ask(b"SET", b"redlock:lock:api", token.encode() + b"{}", b"PX", b"1000")
        wanted = Wanted("api", 10.0, turn=Turn("e" * 40, 2))
        if token == "e" * 40:
            nodes.locks.give_back(nodes.locks.take(wanted))
        else:
            with pytest.raises(LockTaken):
                nodes.locks.take(wanted)


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


@pytest.mark.parametrize("limit", [0, -1, 1001, 2.0, True, "3", (), (1, 0)])
def test_a_limit_is_a_number_of_places(limit):
    """Anything else is refused when the task is declared, by the option's name."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(ConfigurationError, match="lock_limit must be a whole number"):

        @app.task(base=RedlockTask, name="shop.bill", lock_limit=limit, shared=False)
        def bill():
            """Do nothing."""

        app.tasks["shop.bill"].check_lock()


def test_a_limit_does_not_go_with_unique_until():
    """One lets several run, the other one."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    options = {"lock_limit": 2, "unique_until": "started", "shared": False}
    with pytest.raises(ConfigurationError, match="lock_limit=2 lets several run at once"):

        @app.task(base=RedlockTask, name="shop.bill", **options)
        def bill():
            """Do nothing."""

        app.tasks["shop.bill"].check_lock()
