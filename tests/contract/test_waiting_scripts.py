"""Who waits for a lock and is told that it may be free, as every server there is does it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import (
    OWNER_LENGTH,
    RELEASE_LENGTH,
    Keys,
    channel,
    line_key,
    marker_key,
    place_name,
    waiters_key,
)
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.scripts import MOST_PASSED
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.lock.waiting.waiting import (
    HEARD_FOR,
    MOST_PLACES,
    InLine,
    leave_request,
    wait_request,
)
from support.fakes import token_of
from support.lua import rewritten
from support.script_bench import ScriptBench
from support.waiting import eventually

RULES = Rules(ttl=200, max_ttl=300)
NAME = "report:7"
LINE, WAITERS = line_key(RULES.prefix, NAME), waiters_key(RULES.prefix, NAME)
LOCK, _, BOOT, QUARANTINE = Keys.of(RULES.prefix, NAME)
HOLDER = token_of("h")
#: Who waits, by letter: the process of each of these listens, and that of another letter does not.
ALIVE, DEAD = "abcdef", "xyz"
YES, NO, QUARANTINED, NO_VOTE = (
    VoteKind.GRANTED,
    VoteKind.REFUSED,
    VoteKind.QUARANTINED,
    VoteKind.UNREACHABLE,
)
#: A claim to have waited since then [s, Unix time].
EVER, FAR = 0.0, 9e9


def one(letter, since=EVER, **options):
    return InLine(NAME, letter * 32, since, {"task": letter}, **{"channel": letter * 16, **options})


def unheard(letter):
    return one(letter, channel="")


class Bench(ScriptBench):
    def __init__(self, server):
        super().__init__(server, RULES)
        self.url = server.url
        self.enrol()
        channels = [channel(RULES.prefix, letter * 16) for letter in (*ALIVE, "!")]
        self.ears = self.client.pubsub(ignore_subscribe_messages=True)
        self.ears.subscribe(*channels)
        eventually(lambda: all(n for _, n in self.client.pubsub_numsub(*channels)), "ears")

    def close(self):
        self.ears.close()
        self.client.close()

    def tick(self):
        """Wait until the node's clock shows another millisecond."""
        now = self.now_ms()
        eventually(lambda: self.now_ms() > now, "tick")

    def acquire(self, token=HOLDER, place=0):
        lease = Lease(place_name(NAME, place), token, 0, 200.0, 0.0, 0.0, {})
        return self.ask(requests.acquire_request(RULES, lease, None)).kind

    def release(self, token=HOLDER, place=0, **options):
        name = place_name(NAME, place)
        request = requests.release_request(RULES, name, token, place=place, **options)
        return self.ask(request).kind

    def wait(self, *ones, most=0, **options):
        """Note that they wait, one after the other; returns the kind of the last vote."""
        for it in ones:
            vote = self.ask(wait_request(RULES, it, most), **options)
            self.tick()
        return vote.kind

    def leave(self, letter):
        return self.ask(leave_request(RULES, NAME, letter * 32)).kind

    def heard(self):
        """Return whose processes were told of the line, in order, since this was asked last."""
        self.client.publish(channel(RULES.prefix, "!" * 16), "all")  # comes after all the others
        letters = ""
        while (message := self._message())["data"] != b"all":
            assert message["data"][RELEASE_LENGTH + OWNER_LENGTH :] == LINE
            self.took = message["data"][RELEASE_LENGTH:][:OWNER_LENGTH].decode()
            letters += message["channel"][-1:].decode()
        return letters

    def _message(self):
        return eventually(lambda: self.ears.get_message(timeout=1.0), "message")

    def line(self):
        """Return who is in the line, the oldest first, by letter."""
        return "".join(member[:1].decode() for member in self.client.zrange(LINE, 0, -1))

    def since(self, letter):
        scores = dict(self.client.zrange(LINE, 0, -1, withscores=True))
        return next(score for who, score in scores.items() if who[:1] == letter.encode()) / 1000

    def known(self):
        """Return who is known to wait, by letter."""
        return "".join(sorted(who[:1].decode() for who in self.client.hkeys(WAITERS)))

    def noted(self):
        return self.client.zrange(LINE, 0, -1, withscores=True), self.client.hgetall(WAITERS)

    def grow_silent(self, letter, seconds):
        """Have the node have heard of one so long ago."""
        record = self.client.hget(WAITERS, letter * 32)
        heard = b"%013d" % (self.now_ms() - seconds * 1000)
        self.client.hset(WAITERS, letter * 32, record[:20] + heard + heard + record[46:])


@pytest.fixture
def bench(contract_node):
    bench = Bench(contract_node)
    yield bench
    bench.close()


# -- the release ---------------------------------------------------------------------------------


def test_a_release_tells_the_oldest_and_keeps_nothing_for_it(bench):
    bench.acquire()
    bench.wait(one("b"), one("c"), one("a"))
    assert bench.heard() == ""
    assert bench.release() is YES
    assert bench.heard() == "b"
    assert not bench.client.exists(LOCK)
    assert (bench.line(), bench.known()) == ("ca", "abc")
    assert bench.acquire(token_of("n")) is YES
    bench.release(token_of("n"))
    assert bench.heard() == "c"


def test_who_was_told_in_vain_is_where_it_was_in_the_line(bench):
    """As soon as it waits again; one that does nothing is told no more, and delays one hint."""
    bench.acquire()
    bench.wait(one("a"), one("b"), one("c"))
    bench.release()
    bench.acquire()
    bench.wait(one("a"))
    assert bench.line() == "abc"
    bench.release()
    bench.release()
    assert bench.heard() == "aab"
    assert bench.line() == "c"


def test_a_lock_that_has_lapsed_is_released_like_any(bench):
    """Whoever had it gives it back late: others may still wait for it."""
    bench.wait(one("a"))
    assert bench.release() is NO
    assert bench.heard() == "a"


def test_who_has_nothing_to_release_tells_nobody(bench):
    """Nor who keeps the key for a while, nor an attempt that was never granted the lock."""
    bench.acquire()
    bench.wait(one("a"))
    assert bench.release(token_of("n")) is NO
    bench.release(keep=50.0)
    assert bench.client.get(LOCK)[:40] == HOLDER.encode()
    bench.release(wakes=False)
    assert not bench.client.exists(LOCK)
    assert bench.heard() == ""
    assert bench.line() == "a"


def test_those_are_passed_whose_process_does_not_listen(bench):
    """They leave the line, so that nobody passes them twice, and are counted still."""
    bench.acquire()
    bench.wait(one("x"), one("y"), one("a"), one("z"), one("b"))
    bench.release()
    assert bench.heard() == "a"
    assert (bench.line(), bench.known()) == ("zb", "abxyz")
    bench.release()
    assert bench.heard() == "b"
    bench.wait(one("x"))
    assert bench.release() is NO
    assert bench.line() == ""


@pytest.mark.parametrize(("dead", "heard"), [(-1, "a"), (0, "")])
def test_a_release_passes_so_many_at_most(bench, dead, heard):
    """A node does nothing else meanwhile; the next release gets further."""
    bench.acquire()
    bench.wait(one("a"))
    gone = [f"{number:032x}{DEAD[0] * 16}0001" for number in range(MOST_PASSED + dead)]
    bench.client.zadd(LINE, dict.fromkeys(gone, 1))
    bench.release()
    assert bench.heard() == heard
    bench.release()
    assert len(heard) + len(bench.heard()) == 1
    assert bench.line() == ""


def test_a_place_is_offered_to_those_only_who_can_have_it(bench):
    """Tasks with another limit wait for the same lock: a smaller one knows fewer places."""
    for place in range(3):
        bench.acquire(place=place)
    bench.wait(one("a", limit=1), one("b", limit=2), one("c", limit=2), one("d", limit=1))
    bench.release(place=2)
    assert bench.heard() == ""
    bench.release(place=1)
    assert bench.heard() == "b"
    bench.release(place=0)
    assert bench.heard() == "a"
    assert bench.line() == "cd"


@pytest.mark.parametrize("kind", ["text", "hash", "list", "members"])
def test_what_others_write_into_our_keys_breaks_no_release(bench, kind):
    bench.acquire()
    bench.wait(one("a"))
    odd = dict.fromkeys([b"", b"a", b"\xff" * 52, b"z" * 52, b"b" * 48, b"b" * 48 + b"none"], 1)
    for key in (LINE, WAITERS):
        if kind == "members":
            bench.client.zadd(LINE, odd)
            bench.client.hset(WAITERS, "odd", "mine")
            continue
        bench.client.delete(key)
        if kind == "text":
            bench.client.set(key, "mine")
        elif kind == "hash":
            bench.client.hset(key, "mine", "too")
        else:
            bench.client.rpush(key, "mine")
        bench.client.pexpire(key, 100_000)
    assert bench.release(marker=Marker("m", "done", 30.0)) is YES
    assert not bench.client.exists(LOCK)
    assert bench.client.get(marker_key(RULES.prefix, "m")) == b"done"
    assert bench.client.exists(LINE)
    assert bench.heard() == ("a" if kind == "members" else "")


@pytest.mark.parametrize(
    ("rights", "heard", "stays"),
    [
        ("resetchannels", False, False),
        ("&redlock:* -publish", False, False),
        ("&redlock:* -zrange", False, True),
        ("&redlock:* -zrem", False, True),
        ("&redlock:*", True, False),
    ],
)
def test_who_may_not_tell_others_can_release(bench, rights, heard, stays):
    """Nobody is told without one of the rights; twin: with all of them somebody is."""
    bench.acquire()
    bench.wait(one("a"), one("b"))
    user = f"reset on >secret ~redlock:* +@all {rights}".split()
    bench.client.execute_command("ACL", "SETUSER", "worker", *user)
    try:
        url = bench.url.replace("redis://", "redis://worker:secret@")
        request = requests.release_request(RULES, NAME, HOLDER, marker=Marker("m", "done", 30.0))
        assert ScriptBench(SimpleNamespace(url=url), RULES).ask(request).kind is YES
    finally:
        bench.client.execute_command("ACL", "DELUSER", "worker")
    assert bench.client.get(marker_key(RULES.prefix, "m")) == b"done"
    assert not bench.client.exists(LOCK)
    assert bench.heard() == "a" * heard
    assert bench.line() == ("ab" if stays else "b")


# -- since when ----------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [EVER, -1.0, 1.7e9, FAR])
def test_nobody_waits_longer_than_the_node_knows_nor_since_later(bench, since):
    """Who claims so passes nobody that way, and is passed by nobody."""
    bench.acquire()
    bench.wait(one("a"), one("b", since), one("c"))
    assert bench.line() == "abc"
    assert all(bench.is_of_now(bench.since(letter)) for letter in "abc")
    bench.wait(one("b", since))
    assert bench.line() == ("abc" if since != FAR else "acb")
    assert bench.is_of_now(bench.since("b"))


def test_one_that_began_to_wait_later_than_the_node_knew_it_waits_since_then(bench):
    """It was there before for something that is over; its age is that of its claim."""
    bench.acquire()
    bench.wait(one("a"), one("b"))
    later = bench.now_ms() / 1000
    bench.tick()
    bench.wait(one("a", later))
    assert bench.since("a") == pytest.approx(later, abs=0.0005)
    assert bench.line() == "ba"


def test_who_cannot_be_told_keeps_its_age_and_is_in_no_line(bench):
    """As a message on its way to a worker: it is known, and is where it was when it is there."""
    bench.acquire()
    bench.wait(unheard("a"), one("b"), one("c"))
    assert (bench.line(), bench.known()) == ("bc", "abc")
    bench.wait(one("a"))
    assert bench.line() == "abc"
    bench.wait(unheard("b"), one("b"), unheard("c"))
    assert (bench.line(), bench.known()) == ("ab", "abc")
    bench.release()
    assert bench.heard() == "a"


@pytest.mark.parametrize("channel", ["a" * 16, ""])
def test_who_waits_is_told_for_how_long(bench, channel):
    """As the node has it, in its line or not: in all processes the oldest is the same one."""
    bench.acquire()
    bench.wait(one("a"))
    bench.grow_silent("a", 100)
    known = bench.now_ms() / 1000 - 100
    for claim, since in ((EVER, known), (known + 90, known + 90), (FAR, None)):
        vote = bench.ask(wait_request(RULES, one("a", claim, channel=channel)))
        if since is None:
            assert vote.ttl == 0
        else:
            assert vote.node_now - vote.ttl == pytest.approx(since, abs=5)  # a slow machine's


def test_another_channel_or_limit_takes_the_place_of_the_old_one(bench):
    """It waits once, where it is now: its message went to another worker, or was deployed anew."""
    bench.acquire()
    bench.wait(one("a"), one("b"), one("a", channel="c" * 16), one("b", limit=3))
    assert bench.line() == "ab"
    bench.release(place=2)
    bench.release()
    assert bench.heard() == "bc"
    assert bench.took == "a" * 32  # as others know it, whatever its channel
    assert bench.line() == ""


@pytest.mark.parametrize("record", [b"", b"mine", b"a" * 200, b"a" * 20 + b"nan".rjust(13) * 2])
def test_a_record_that_others_have_written_is_written_anew(bench, record):
    bench.acquire()
    bench.client.hset(WAITERS, "a" * 32, record)
    assert bench.wait(one("a")) is YES
    assert bench.is_of_now(bench.since("a"))
    bench.leave("a")
    assert not bench.client.exists(LINE, WAITERS)


# -- a lock that is free -------------------------------------------------------------------------


@pytest.mark.parametrize("free", range(5))
def test_who_asks_is_told_how_many_places_nobody_holds(bench, free):
    for place in range(free, 4):
        bench.acquire(place=place)
    bench.wait(one("a", limit=4))
    for who in (one("b", limit=4, asks=True), one("b", limit=4, channel="", asks=True)):
        vote = bench.ask(wait_request(RULES, who))
        assert (vote.kind, vote.amount) == (YES, free)
    assert bench.heard() == ""
    assert bench.line() == "a"


def test_who_knows_fewer_places_is_told_of_those(bench):
    bench.acquire(place=1)
    for limit, free in ((1, 1), (2, 1), (3, 2), (MOST_PLACES, MOST_PLACES - 1)):
        assert bench.ask(wait_request(RULES, one("a", limit=limit, asks=True))).amount == free
        assert bench.ask(wait_request(RULES, one("a", limit=limit))).amount == 0


# -- when one lapses -----------------------------------------------------------------------------

#: For how long who holds a place has it [s]; and from the third place on, nobody holds one.
LIVES = (70.0, 50.0)
#: What finds out when a place lapses, changed.
WITHOUT = {
    "the first of them": ("or left < least)", "or left > least)"),
    "not one without an end": ("if left >= 0 and (least == 0", "if (least == 0"),
    "of places alone": ("for i = first, #keys", "for i = 1, #keys"),
    "of all places": ("for i = first, #keys", "for i = first, #keys - 3"),
}


def lapses_by(node, ask):
    """Return when places lapse by what *node* says: of one, of two, by none, and one by hand."""
    bench, told = Bench(node), []
    try:
        bench.wait(one("z", limit=4))
        for place, ttl in (None, None), (0, LIVES[0]), (1, LIVES[1]):
            if ttl is not None:
                lease = Lease(place_name(NAME, place), HOLDER, 0, ttl, 0.0, 0.0, {})
                bench.ask(requests.acquire_request(RULES, lease, None))
            told.append(bench.ask(ask()).lapses)
        bench.release(place=1)
        bench.client.set(Keys.of(RULES.prefix, place_name(NAME, 2)).lock, "by hand")
        told.append(bench.ask(ask(), eternal=1).lapses)
        return all(
            bench.near(said * 1000, due)
            for said, due in zip(told, (0.0, LIVES[0], LIVES[1], LIVES[0]), strict=True)
        )
    finally:
        bench.close()


def asked_as_who_waits():
    return wait_request(RULES, one("a", limit=4, asks=True, lapses=True))


def asked_as_who_looks():
    return requests.places_request(RULES, NAME, 4, "", lapses=True)


WAYS = (asked_as_who_waits, asked_as_who_looks)


@pytest.mark.parametrize("ask", WAYS)
def test_who_asks_is_told_when_the_first_place_lapses(contract_node, ask):
    assert lapses_by(contract_node, ask)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (ask, what)
        for ask in WAYS
        for what in WITHOUT
        if (ask, what) != (asked_as_who_looks, "of places alone")
    ],  # it has no other keys
)
def test_that_is_found_out_by_the_script(contract_node, ask, what):
    script = ask().script
    with rewritten(script, *WITHOUT[what]):
        assert not lapses_by(contract_node, ask)


def test_who_does_not_ask_is_told_nothing_of_it(bench):
    bench.acquire()
    assert bench.ask(wait_request(RULES, one("a", limit=4, asks=True))).lapses == 0.0
    assert bench.ask(requests.places_request(RULES, NAME, 4, "")).lapses == 0.0


# -- how many ------------------------------------------------------------------------------------


def test_no_more_than_so_many_wait(bench):
    bench.acquire()
    assert bench.wait(one("a"), one("b"), most=2) is YES
    assert bench.wait(one("c"), most=2) is NO
    assert (bench.line(), bench.known()) == ("ab", "ab")
    bench.release()
    assert bench.wait(one("c"), most=2) is NO
    assert bench.wait(one("a"), most=2) is YES
    bench.leave("b")
    assert bench.wait(one("c"), most=2) is YES
    assert (bench.line(), bench.known()) == ("ac", "ac")


def test_a_message_that_is_delivered_twice_is_one_that_waits(bench):
    """Also before it is in a worker that can have it told: else its copy would be one too many."""
    bench.acquire()
    assert bench.wait(unheard("a"), unheard("a"), one("a"), most=1) is YES
    assert bench.wait(unheard("b"), most=1) is NO


def test_who_is_not_heard_of_any_more_is_not_counted(bench):
    """A message that was purged takes nobody's place for long, neither in the count nor in line."""
    bench.acquire()
    bench.wait(one("a"), one("b"), one("c"))
    for letter in "abc":
        bench.grow_silent(letter, HEARD_FOR - 60)
    bench.wait(one("b"))
    bench.client.hset(WAITERS, "z", "of somebody else")
    assert bench.wait(one("d"), most=4) is YES  # in place of what is no record of ours
    assert bench.known() == "abcd"
    for letter in "abc":
        bench.grow_silent(letter, HEARD_FOR + 1)
    bench.wait(one("b"))
    assert bench.wait(one("e"), most=3) is YES
    assert (bench.line(), bench.known()) == ("bde", "bde")


def test_a_node_forgets_now_and_then_also_where_any_number_may_wait(bench):
    """A busy lock's keys never expire as a whole."""
    bench.acquire()
    heard = b"%013d" % (bench.now_ms() - (HEARD_FOR + 1) * 1000)
    record = b"x" * 16 + b"0001" + heard + heard + b"{}"
    gone = [b"%032x" % number for number in range(200)]
    bench.client.hset(WAITERS, mapping=dict.fromkeys(gone, record))
    bench.client.zadd(LINE, {who + record[:20]: 1 for who in gone})
    for number in range(64):
        asked = InLine(NAME, f"f{number:031x}", EVER, {}, "f" * 16)
        bench.ask(wait_request(RULES, asked))
    assert bench.known() == "f" * 64
    assert bench.client.zcard(LINE) == 64


def test_all_of_it_expires(bench):
    bench.acquire()
    bench.wait(one("a"))
    for key in (LINE, WAITERS):
        assert bench.near(bench.client.pttl(key), HEARD_FOR)
        bench.client.pexpire(key, 10_000)
    bench.wait(unheard("b"))
    assert bench.near(bench.client.pttl(WAITERS), HEARD_FOR)
    assert not bench.near(bench.client.pttl(LINE), HEARD_FOR)
    bench.wait(one("a"))
    assert bench.near(bench.client.pttl(LINE), HEARD_FOR)


def test_who_leaves_leaves_nothing(bench):
    bench.acquire()
    bench.wait(one("a"), one("b"), unheard("c"))
    assert bench.leave("a") is YES
    assert bench.leave("a") is NO
    assert (bench.line(), bench.known()) == ("b", "bc")
    bench.release()
    assert bench.heard() == "b"
    assert (bench.leave("b"), bench.leave("c")) == (YES, YES)
    assert not bench.client.exists(LINE, WAITERS)


# -- nodes that do not vote ----------------------------------------------------------------------


@pytest.mark.parametrize("why", ["held back", "restarted", "flushed"])
def test_a_node_in_quarantine_notes_nobody_and_tells_nobody(bench, why):
    """It may have forgotten who holds the lock; what it knew is of no use, and goes."""
    bench.acquire()
    bench.wait(one("a"), one("b"))
    if why == "held back":
        bench.client.set(QUARANTINE, "1", px=100_000)
    elif why == "restarted":
        bench.client.set(BOOT, boot_marker("0" * 40, "f" * 16), px=100_000)
    else:
        bench.client.flushall()
    bench.client.delete(LOCK)
    assert bench.wait(one("c", asks=True)) is QUARANTINED
    assert not bench.client.exists(LINE, WAITERS)
    bench.release()
    assert bench.heard() == ""


def test_a_node_of_another_list_of_nodes_notes_nobody_and_keeps_what_it_has(bench):
    """Those who wait for its own clients' locks are theirs."""
    bench.wait(one("a"))
    before = bench.noted()
    assert bench.wait(one("b", asks=True), boot=boot_marker(bench.run_id, "e" * 16)) is NO_VOTE
    assert bench.noted() == before
    assert bench.heard() == ""
