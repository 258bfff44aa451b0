"""Who waits for a lock and is woken, as every server there is does it."""

from __future__ import annotations

import json

import pytest
import redis

from celery_redlock.lock import requests
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.records import channel, ready_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import VoteKind
from celery_redlock.lock.waiting import (
    HEARD_FOR,
    Ticket,
    leave_request,
    wait_request,
    waiting_key,
)
from support.fakes import token_of
from support.script_bench import ScriptBench
from support.waiting import eventually

RULES = Rules(ttl=200, max_ttl=300)
NAME = "report:7"
LOCK = b"redlock:lock:" + NAME.encode()
HOLDER = token_of("h")
ALIVE, DEAD = "a" * 16, "d" * 16
#: For how long a lock is kept for who was woken, where a test has to come in time [s].
KEPT = 60.0
YES, NO = VoteKind.GRANTED, VoteKind.REFUSED


def ticket(letter, since, process=ALIVE, limit=1):
    """Return who waits since *since* in a *process*; its token begins with *letter*."""
    info = {"task": letter}
    return Ticket(NAME, letter * 32, since, info, token_of(letter), process, limit)


class Bench(ScriptBench):
    """One server, and a process that listens on it."""

    def __init__(self, server):
        super().__init__(server, RULES)
        self.kept = KEPT
        self.enrol()
        self.ears = self.client.pubsub(ignore_subscribe_messages=True)
        self.ears.subscribe(channel(RULES.prefix, ALIVE))
        eventually(lambda: self.client.pubsub_numsub(channel(RULES.prefix, ALIVE))[0][1], "ears")

    def close(self):
        """Hang up."""
        self.ears.close()
        self.client.close()

    def ask(self, request, client=None):
        """Return the vote on *request*."""
        script, arguments = request.script, list(request.arguments)
        if arguments[-1] == requests.HAND_OVER:
            arguments[-1] = b"%d" % (self.kept * 1000)
        if script.guarded:
            arguments.append(self.boot)
        client = client or self.client
        return script.read(client.evalsha(script.sha, len(request.keys), *request.keys, *arguments))

    def acquire(self, token=HOLDER, ttl=200.0):
        """Ask for the lock; returns the kind of vote."""
        lease = Lease(NAME, token, 0, ttl, 0.0, 0.0, {})
        return self.ask(requests.acquire_request(RULES, lease, None)).kind

    def release(self, token=HOLDER, **options):
        """Give the lock back."""
        client = options.pop("client", None)
        return self.ask(requests.release_request(RULES, NAME, token, **options), client).kind

    def wait(self, *tickets, most=0):
        """Note that they wait; returns the kind of the last vote."""
        return [self.ask(wait_request(RULES, one, most)).kind for one in tickets][-1]

    def leave(self, one, keeps=None):
        """Note that it waits no more; returns the kind of vote."""
        return self.ask(leave_request(RULES, one, keeps=keeps)).kind

    def heard(self):
        """Return which tokens were woken since this was asked last."""
        self.client.publish(channel(RULES.prefix, ALIVE), "all")  # comes after all the others

        def next_one():
            message = self.ears.get_message(timeout=1.0)  # short: it is asked for again
            return message and message["data"]

        return list(iter(lambda: eventually(next_one, "message"), b"all"))

    def tickets(self):
        """Return the first letters of the tokens that the node has tickets of, oldest first."""
        members = self.client.zrange(ready_key(RULES.prefix, NAME), 0, -1)
        return [member[:1].decode() for member in members]

    def waiting(self):
        """Return who waits, by the first letters."""
        members = self.client.zrange(waiting_key(RULES, NAME), 0, -1)
        return {member[:1].decode() for member in members}


@pytest.fixture
def bench(contract_node):
    """A node that votes, and a process that listens on it."""
    bench = Bench(contract_node)
    yield bench
    bench.close()


def woken(letter, place=0):
    """Return what the process of that ticket hears."""
    return token_of(letter).encode() + place_key(place)


def place_key(place):
    """Return the key of a place of the lock."""
    return LOCK + (b"#%d" % place if place else b"")


def test_a_release_wakes_the_oldest_and_keeps_the_lock_for_it(bench):
    """Whenever it came; a newcomer is refused, that one is granted, and the next waits on."""
    bench.acquire()
    bench.wait(ticket("b", 2.0), ticket("c", 3.0), ticket("a", 1.0))
    assert bench.release() is YES
    assert bench.heard() == [woken("a")]
    assert bench.tickets() == ["b", "c"]
    assert bench.near(bench.client.pttl(LOCK), KEPT)
    stored = bench.client.get(LOCK)
    assert stored[:40] == token_of("a").encode()
    assert json.loads(stored[40:])["task"] == "a"
    assert bench.acquire(token_of("n")) is NO
    assert bench.acquire(token_of("a")) is YES
    assert bench.near(bench.client.pttl(LOCK), 200)
    bench.release(token_of("a"))
    assert bench.heard() == [woken("b")]


def test_twin_without_a_ticket_a_newcomer_has_the_lock(bench):
    """What is waited for without one, as by those who only count, is not handed over."""
    bench.acquire()
    bench.wait(Ticket(NAME, "a" * 32, 1.0, {}))
    bench.release()
    assert bench.heard() == []
    assert bench.acquire(token_of("n")) is YES


def test_what_was_kept_for_one_that_does_not_come_lapses(bench):
    """Within a second."""
    bench.kept = int(requests.HAND_OVER) / 1000
    assert bench.kept == 1.0
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    bench.release()
    eventually(lambda: not bench.client.exists(LOCK), "end of what was kept")
    assert bench.acquire(token_of("n")) is YES


def test_one_that_was_woken_in_vain_hands_on(bench):
    """By its release, as by any."""
    bench.acquire()
    bench.wait(ticket("a", 1.0), ticket("b", 2.0))
    bench.release()
    bench.release(token_of("a"))
    assert bench.heard() == [woken("a"), woken("b")]
    assert bench.client.get(LOCK)[:40] == token_of("b").encode()


def test_a_dead_process_is_passed_by(bench):
    """Nobody listens on its channel; all its tickets go, and the lock is not kept for them."""
    bench.acquire()
    bench.wait(ticket("x", 1.0, DEAD), ticket("y", 2.0, DEAD), ticket("a", 3.0))
    bench.release()
    assert bench.heard() == [woken("a")]
    assert bench.tickets() == []
    bench.release(token_of("a"))
    bench.acquire()
    bench.wait(ticket("x", 1.0, DEAD))
    bench.release()
    assert not bench.client.exists(LOCK)


@pytest.mark.parametrize("attempt", ["", "0" * 8, "1" * 8], ids=["owner", "ticket", "another"])
def test_nobody_wakes_itself(bench, attempt):
    """A ticket of the one who releases is an old one of its own: the owner is the same."""
    owner = token_of("a")[:32]
    bench.acquire(owner + (attempt or "2" * 8))
    bench.wait(ticket("a", 1.0), ticket("b", 2.0))
    bench.release(owner + attempt)
    assert bench.heard() == [woken("b")]
    assert bench.tickets() == []


def test_who_has_nothing_to_release_wakes_nobody(bench):
    """Nor who keeps the key for a while, nor an attempt that was never granted the lock."""
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    assert bench.release(token_of("n")) is NO
    bench.release(keep=50.0)
    assert bench.heard() == []
    assert bench.client.get(LOCK)[:40] == HOLDER.encode()
    bench.release(wakes=False)
    assert bench.heard() == []
    assert not bench.client.exists(LOCK)
    assert bench.tickets() == ["a"]


@pytest.mark.parametrize("value", ["string", "hash"])
def test_a_key_of_another_kind_breaks_no_release(bench, value):
    """Somebody else's, under the name of ours: nobody is woken, and the lock is free."""
    ready = ready_key(RULES.prefix, NAME)
    bench.acquire()
    if value == "string":
        bench.client.set(ready, "mine")
    else:
        bench.client.hset(ready, "mine", "too")
    assert bench.release() is YES
    assert not bench.client.exists(LOCK)
    assert bench.client.exists(ready)


def test_who_may_not_wake_can_release(bench, contract_node):
    """Nobody is woken without one of the rights; twin: with all of them somebody is."""
    for rights, heard in (
        ("resetchannels", []),
        ("&redlock:* -publish", []),
        ("&redlock:* -zrange", []),
        ("&redlock:* -zrem", [woken("a")]),
        ("&redlock:*", [woken("a")]),
    ):
        bench.client.execute_command(
            "ACL",
            "SETUSER",
            "worker",
            "reset",
            "on",
            ">secret",
            "~redlock:*",
            "+@all",
            *rights.split(),
        )
        bench.client.delete(LOCK, "redlock:ready:" + NAME)  # of the turn before
        bench.acquire()
        bench.wait(ticket("a", 1.0))
        url = contract_node.url.replace("redis://", "redis://worker:secret@")
        with redis.Redis.from_url(url) as client:
            assert bench.release(client=client) is YES
        assert bench.heard() == heard
        assert bench.client.exists(LOCK) == len(heard)
    bench.client.execute_command("ACL", "DELUSER", "worker")


# -- who waits ---------------------------------------------------------------------------------


def test_who_finds_the_lock_free_is_woken_at_once(bench):
    """It was released, or lapsed, before the node heard that somebody waits."""
    bench.wait(ticket("b", 2.0))
    assert bench.heard() == [woken("b")]
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    assert bench.heard() == []


def test_one_that_is_woken_and_does_nothing_is_not_woken_again(bench):
    """Its worker is stopped, and listens all the same: the next one is woken in its place."""
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    bench.client.delete(LOCK)
    bench.wait(ticket("b", 2.0))
    assert bench.heard() == [woken("a")]
    assert bench.tickets() == ["b"]
    bench.wait(ticket("b", 2.0))
    assert bench.heard() == [woken("b")]
    assert bench.tickets() == []


@pytest.mark.parametrize("free", [1, 2, 3])
def test_as_many_are_woken_as_places_are_free(bench, free):
    """Each for a place of its own; who waits on goes on waiting."""
    for place in range(3):
        bench.client.set(place_key(place), HOLDER, px=200_000)
    four = [ticket(letter, float(since), limit=3) for since, letter in enumerate("abcd")]
    bench.wait(*four)
    assert bench.heard() == []
    bench.client.delete(*map(place_key, range(free)))
    bench.wait(four[-1])
    assert bench.heard() == [woken(letter, place) for place, letter in enumerate("abc"[:free])]
    assert bench.tickets() == list("abcd"[free:])


def test_no_more_than_so_many_wait(bench):
    """Whoever is known already may wait on; one that left makes room."""
    bench.acquire()
    first, second, third = (ticket(letter, 1.0) for letter in "abc")
    assert bench.wait(first, second, most=2) is YES
    assert bench.wait(third, most=2) is NO
    assert bench.wait(first, most=2) is YES
    assert (bench.waiting(), bench.tickets()) == ({"a", "b"}, ["a", "b"])
    bench.ask(leave_request(RULES, first))
    assert bench.wait(third, most=2) is YES
    assert bench.waiting() == {"b", "c"}


def test_a_message_that_is_delivered_twice_is_one_that_waits(bench):
    """Refused a second time, a little later: else its copy would be one too many."""
    bench.acquire()
    assert bench.wait(ticket("a", 1.0), most=1) is YES
    assert bench.wait(ticket("a", 2.0), most=1) is YES
    assert bench.wait(ticket("b", 2.0), most=1) is NO


def test_who_is_not_heard_of_any_more_is_not_counted(bench):
    """A message that was purged takes nobody's place for long."""
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    long_ago = (bench.client.time()[0] - HEARD_FOR - 5) * 1000
    bench.client.zadd(waiting_key(RULES, NAME), {ticket("a", 1.0).waits: long_ago})
    assert bench.wait(ticket("b", 1.0), most=1) is YES
    assert bench.waiting() == {"b"}


def test_all_of_it_expires(bench):
    """If nobody waits any more, nor leaves."""
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    for key in (ready_key(RULES.prefix, NAME), waiting_key(RULES, NAME)):
        assert bench.near(bench.client.pttl(key), HEARD_FOR)


def test_who_leaves_leaves_nothing(bench):
    """Neither note nor ticket, nor an empty key."""
    bench.acquire()
    bench.wait(ticket("a", 1.0))
    assert bench.ask(leave_request(RULES, ticket("a", 1.0))).kind is YES
    assert bench.ask(leave_request(RULES, ticket("a", 1.0))).kind is NO
    assert not bench.client.exists(ready_key(RULES.prefix, NAME), waiting_key(RULES, NAME))


def test_who_leaves_hands_on_what_is_kept_for_it(bench):
    """The next one is woken at once; twin: one that is about to acquire the lock keeps it."""
    a, b = ticket("a", 1.0), ticket("b", 2.0)
    for keeps, heard, holder in ((0, [], "a"), (None, [woken("b")], "b")):
        bench.client.delete(LOCK)
        bench.acquire()
        bench.wait(a, b)
        bench.release()
        assert bench.heard() == [woken("a")]
        bench.leave(a, keeps)
        assert bench.heard() == heard
        assert bench.client.get(LOCK)[:40] == token_of(holder).encode()
        assert bench.near(bench.client.pttl(LOCK), KEPT)
    assert bench.acquire(token_of("b")) is YES


def test_who_leaves_as_the_last_leaves_the_lock_free(bench):
    """And a lock that others hold, or that is kept for others, is theirs."""
    bench.acquire()
    bench.wait(ticket("a", 1.0), ticket("b", 2.0))
    bench.leave(ticket("b", 2.0))
    assert bench.client.get(LOCK)[:40] == HOLDER.encode()
    bench.release()
    bench.leave(ticket("b", 2.0))
    assert bench.client.get(LOCK)[:40] == token_of("a").encode()
    bench.leave(ticket("a", 1.0))
    assert not bench.client.exists(LOCK)
    assert bench.heard() == [woken("a")]


def test_a_place_of_several_is_free_for_whoever_comes(bench):
    """Twin: the only place is kept for the one who is woken."""
    for limit, is_free in ((2, True), (1, False)):
        bench.client.flushall()
        bench.acquire()
        bench.client.set(place_key(1), HOLDER, px=200_000)
        bench.wait(ticket("a", 1.0, limit=limit))
        bench.release()
        assert bench.heard() == [woken("a")]
        assert bench.client.exists(LOCK) is not is_free
        assert bench.client.zcard(ready_key(RULES.prefix, NAME)) == 0


def test_who_was_woken_and_leaves_wakes_the_next(bench):
    """For one place that is free. Twin: one that was not woken has nothing to pass on."""
    a, b, c = (ticket(who, at, limit=3) for who, at in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    for place in range(3):
        bench.client.set(place_key(place), HOLDER, px=200_000)
    bench.wait(a, b, c)
    bench.client.delete(place_key(1), place_key(2))
    bench.leave(a)
    assert bench.heard() == []
    bench.leave(a)  # has no ticket any more, as one that was woken
    assert bench.heard() == [woken("b", 1)]
