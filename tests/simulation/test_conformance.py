"""
The simulated node answers and stores what a real server does, whatever it is told.

Both are told the same at the same moment: the server tells its clock right before and right after
each step, and the simulated node's clock stands at the former meanwhile. So replies, values and
what is left of each key are the same but for how long steps took. Leases are of a few
milliseconds, and then waited out, or of a day.

That the comparison sees is shown for each guard that has a part in the Lua: without it on either
side, a story of a few steps is told differently.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from celery_redlock.lock import scripts
from celery_redlock.lock.guard import read_info
from celery_redlock.lock.scripts import Keys, marker_key, probe_key
from simulation.guards import GUARDS, rewritten
from simulation.nodes import SimulatedNode

#: How many random sequences are tried on each kind of server.
SEQUENCES = 150
TOLD_AGAIN = ("ACQUIRE", "RENEW", "RELEASE", "ENROL", "MARK", "INSPECT", "PROBE")

A, B = Keys.of("redlock", "a"), Keys.of("redlock", "b")
BOOT, QUARANTINE = A.boot, A.quarantine
MARKERS = [marker_key("redlock", name) for name in "mn"]
PROBED = probe_key("redlock")
HISTORY = BOOT + b":history"
EVERY_KEY = sorted({*A, *B, *MARKERS, PROBED, HISTORY})

TINY, LONG = b"3", b"86400000"
X, X2, Y = b"a" * 40, b"a" * 32 + b"c" * 8, b"b" * 40  # the first two are of one owner
BOOT_ID = b"r" * 40 + b":" + b"f" * 16
BOOT_IDS = [BOOT_ID, b"s" * 40 + b":" + b"f" * 16, b"r" * 40 + b":" + b"e" * 16]
LIMIT = 2**53
#: How far clocks may be ahead [ms]; with the latter even the largest fence is not.
USUAL, WIDE = b"5000", b"1000000000000"


# -- what can be told ---------------------------------------------------------------------------


class Eval(NamedTuple):
    """A script, by its name: what it says may be changed under it."""

    script: str
    keys: tuple[bytes, ...]
    arguments: tuple[bytes, ...]

    @property
    def is_short(self):
        """Whether something that it writes does not stay."""
        return TINY in self.arguments


class Put(NamedTuple):
    """A value that somebody sets by hand; without *ttl* it has no end."""

    key: bytes
    value: bytes
    ttl: bytes | None = None

    @property
    def is_short(self):
        """Whether it does not stay."""
        return self.ttl == TINY


class Plain(NamedTuple):
    """Something that a server is told by one of its own commands."""

    words: tuple[bytes, ...]
    is_short = False


FLUSH, FORGET = Plain((b"FLUSHALL",)), Plain((b"SCRIPT", b"FLUSH"))
#: A replica of nobody, and a master again.
FOLLOW = [Plain((b"REPLICAOF", b"127.0.0.1", b"1")), Plain((b"REPLICAOF", b"NO", b"ONE"))]


def acquire(token=X, fence=b"0", *, keys=A, marker=None, **how):
    """Return what asks for a lock."""
    rest = {"ttl": LONG, "memory": LONG, "skew": USUAL, "length": LONG, "boot": BOOT_ID, **how}
    names = (keys.lock, keys.fence, marker or keys.lock, keys.boot, keys.quarantine)
    info = how.get("info", b"{}")
    numbers = (rest["ttl"], fence, rest["memory"], rest["skew"], rest["length"], rest["boot"])
    return Eval("ACQUIRE", names, (token, info, *numbers))


def renew(token=X, fence=b"0", *, keys=A, repair=b"1", **how):
    """Return what renews a lock."""
    rest = {"ttl": LONG, "memory": LONG, "skew": USUAL, "length": LONG, "boot": BOOT_ID, **how}
    info = how.get("info", b"{}")
    numbers = (rest["ttl"], fence, rest["memory"], rest["skew"], repair, rest["length"])
    numbers = (*numbers, rest["boot"])
    return Eval("RENEW", tuple(keys), (token, info, *numbers))


def release(token=X, *, keys=A, keep=b"0", marker=None, state=b"done", ttl=LONG):
    """Return what gives a lock back."""
    return Eval("RELEASE", (keys.lock, marker or keys.lock), (token, keep, state, ttl))


def enrol(mode, *, length=LONG, boot=BOOT_ID):
    """Return what asks for a node's enrolment, or changes it."""
    return Eval("ENROL", (BOOT, QUARANTINE), (boot, length, mode))


ENROLLED = enrol(b"bootstrap")


def mark(marker, state, ttl=LONG):
    """Return what sets a marker."""
    return Eval("MARK", (marker,), (state, ttl))


def inspect(keys=A):
    """Return what asks who holds a lock."""
    return Eval("INSPECT", (keys.lock, keys.fence), ())


def probe(*, length=LONG, boot=BOOT_ID):
    """Return what asks whether a node votes."""
    return Eval("PROBE", (BOOT, QUARANTINE, PROBED), (length, boot))


some = st.sampled_from
LENGTHS = some([LONG, b"0", b"0", TINY])
TTLS = some([LONG, LONG, LONG, TINY])
SKEWS = some([USUAL, WIDE])
EDGES = [b"%d" % (LIMIT + beyond) for beyond in (-2, -1, 0, 1)]
FENCES = some([b"0", b"0", b"1", b"2", b"7", b"4096", *EDGES])
STORED_FENCES = FENCES | some([b"007", b"2.5", b"1e3", b"", b"no number"])
STATES = some([b"started", b"finishing", b"done"])
TOKENS = some([X, X, X, X, Y, Y, X2, X[:32]])
OWNERS = TOKENS | some([X[:31], X[:39], X + b"{", b""])
VALUES = some([X + b"{}", X2, Y + b"{}", X[:32], X[:39] + b"b{}", b"set by hand", b""])
STORED_BOOTS = some([*BOOT_IDS, b"r" * 40 + b"#" + b"f" * 16, b"r" * 40, b"r" * 41, b"x", b""])
#: Mostly such that nodes vote; else whatever came after one step would be "in quarantine".
GUARDED = {"length": some([LONG, LONG, b"0", TINY, TINY]), "boot": some([BOOT_ID] * 12 + BOOT_IDS)}
ONE_LOCK = some([A, A, A, B])

ACQUIRES = st.builds(
    acquire, TOKENS, FENCES, keys=ONE_LOCK, marker=some([None, *MARKERS]), ttl=TTLS, memory=TTLS,
    skew=SKEWS, info=some([b"", b"{}"]), **GUARDED,
)  # fmt: skip
RENEWALS = st.builds(
    renew, TOKENS, FENCES, keys=ONE_LOCK, ttl=TTLS, memory=TTLS, repair=some([b"1", b"0"]),
    skew=SKEWS, info=some([b"", b"{}"]), **GUARDED,
)  # fmt: skip
RELEASES = st.builds(
    release, OWNERS, keys=ONE_LOCK, keep=LENGTHS, marker=some([None, *MARKERS]), state=STATES,
    ttl=TTLS,
)  # fmt: skip
ENROLMENTS = st.builds(enrol, some([b"look", b"trust", b"quarantine", b"bootstrap"]), **GUARDED)
OTHERS = (
    st.builds(mark, some(MARKERS), STATES, LENGTHS)
    | st.builds(inspect, ONE_LOCK)
    | st.builds(probe, **GUARDED)
)
BY_HAND = st.one_of(
    st.builds(Put, some([A.lock, B.lock]), VALUES, some([None, LONG, TINY])),
    st.builds(Put, some([A.fence, B.fence]), STORED_FENCES, some([None, LONG, TINY])),
    st.builds(Put, some([BOOT]), STORED_BOOTS, some([None, LONG])),
    st.builds(Put, some([QUARANTINE]), some([b"1", b""]), some([None, LONG, TINY])),
    st.builds(Put, some(MARKERS), STATES | some([b""]), some([None, LONG])),
    some([FLUSH, FORGET]),
    some([Plain((b"DEL", key)) for key in EVERY_KEY]),
)
STEPS = st.one_of(ACQUIRES, ACQUIRES, RENEWALS, RENEWALS, RELEASES, ENROLMENTS, OTHERS, BY_HAND)
#: Of any length; lists of their own accord are mostly short.
STORIES = st.integers(1, 24).flatmap(lambda steps: st.lists(STEPS, min_size=steps, max_size=steps))


# -- who is told --------------------------------------------------------------------------------


class Both:
    """
    One server and its simulation, told the same at the same moment.

    Attributes:
        client: Of the server.
        node: Its simulation.
        clock: What the node's clock shows [ms].
        slack: By how much times may differ: as long as the longest step took [ms].
        answer: The server's last one.
    """

    def __init__(self, client: redis.Redis, kind: type[SimulatedNode] = SimulatedNode) -> None:
        self.client = client
        self.clock = 0.0
        self.slack = 0.0
        self.node = kind(0, lambda: self.clock / 1000.0)
        self.answer: Any = None
        self.by_hand: set[bytes] = set()
        pipe = client.pipeline(transaction=False).flushall()
        for name in TOLD_AGAIN:  # as every client that connects sees to
            pipe.script_load(getattr(scripts, name).source)
        pipe.execute()
        self._learn_history()

    def _learn_history(self):
        told = read_info(self.client.eval("return redis.call('INFO', 'replication')", 0))
        self.node.history = told["master_replid"].encode()  # which redis-py may take for a number
        self.node.has_followed = set(told["master_replid2"]) != {"0"}

    def tell(self, *steps):
        """Tell both, step by step; their answers must be the same, and all that is stored then."""
        for step in steps:
            self._tell_one(step)
        self.compare()

    def _tell_one(self, step):
        words = self._words(step)
        self._tell_words(step, words)
        if isinstance(self.answer, NoScriptError):  # what a client does then
            self._tell_words(step, (b"EVAL", getattr(scripts, step.script).source, *words[2:]))
        if step.is_short:
            time.sleep((int(TINY) + 2) / 1000.0)

    def _tell_words(self, step, words):
        self.answer = self._tell_server(words)
        assert_same(step, self._tell_node(step, words), self.answer, self.slack)

    def _words(self, step):
        if isinstance(step, Eval):
            sha = getattr(scripts, step.script).sha
            return (b"EVALSHA", sha, b"%d" % len(step.keys), *step.keys, *step.arguments)
        if isinstance(step, Put):
            end = () if step.ttl is None else (b"PX", step.ttl)
            return (b"SET", step.key, step.value, *end)
        return step.words

    def _tell_server(self, words):
        """Return the server's answer; the node's clock stands at when it was asked."""
        pipe = self.client.pipeline(transaction=False).time().execute_command(*words).time()
        before, answer, after = pipe.execute(raise_on_error=False)
        self._set_clock(before, after)
        return answer

    def _set_clock(self, before, after):
        self.clock = in_ms(before)
        self.slack = max(self.slack, in_ms(after) - self.clock)

    def _tell_node(self, step, words):
        node = self.node
        if isinstance(step, Put):
            self.by_hand.add(step.key)
        if isinstance(step, Eval) or (isinstance(step, Put) and step.ttl is not None):
            return node.execute(words)
        if isinstance(step, Put):
            node.store[step.key] = (step.value, float("inf"))
        elif step == FLUSH:
            node.flush()
        elif step == FORGET:
            node.forget_scripts()
        elif step in FOLLOW:
            self._learn_history()
        else:
            was_there = node.get(words[1]) is not None
            node.delete(words[1])
            return int(was_there)
        return b"OK"

    def compare(self):
        """Compare what both store, and for how long yet."""
        pipe = self.client.pipeline(transaction=False).time().keys()
        for key in EVERY_KEY:
            pipe.get(key).pttl(key)
        now, names, *told, after = pipe.time().execute()
        self._set_clock(now, after)
        stored = dict(zip(EVERY_KEY, zip(told[::2], told[1::2], strict=True), strict=True))
        for key, (value, left) in stored.items():
            assert self.node.get(key) == value, f"value of {key!r}"
            assert_near(self.node.pttl(key), left, self.slack, f"rest of {key!r}")
            assert left != -1 or key in self.by_hand, f"{key!r} has no end"
        assert set(names) <= set(EVERY_KEY), "a key that nobody has heard of"


def in_ms(told):
    """Return what TIME has told [ms]."""
    seconds, micros = told
    return seconds * 1000.0 + micros / 1000.0


def assert_near(ours, theirs, slack, what):
    """Compare two times [ms], one of which may be none."""
    assert (ours < 0) == (theirs < 0), f"{what}: {ours} and {theirs}"
    assert abs(ours - theirs) <= (0 if ours < 0 else 2 * slack + 2), f"{what}: {ours} and {theirs}"


def assert_same(step, ours, theirs, slack):
    """Compare two replies; errors by their kind, and times [ms] nearly."""
    what = f"{step}: {ours!r} and {theirs!r}"
    assert type(ours) is type(theirs), what
    if isinstance(theirs, list):
        assert (len(ours), ours[0]) == (len(theirs), theirs[0]), what
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            if isinstance(one, int) and isinstance(other, int):
                assert_near(one, other, slack, what)
            else:
                assert one == other, what
    elif not isinstance(theirs, Exception):
        assert ours == theirs, what


# -- at random ----------------------------------------------------------------------------------


@pytest.fixture
def client(contract_node):
    """A client of an empty server, of each kind in turn."""
    with redis.Redis.from_url(contract_node.url) as client:
        yield client


@pytest.mark.parametrize("protocol", [2, 3])
def test_whatever_they_are_told_both_do_the_same(contract_node, protocol):
    """Random steps are answered alike, in RESP2 and RESP3, and leave the same behind as long."""
    with redis.Redis.from_url(contract_node.url, protocol=protocol) as client:

        @settings(max_examples=SEQUENCES // 2)
        @given(STORIES, st.sampled_from([(), (ENROLLED,), (ENROLLED,)]))
        def tell(steps, before):
            Both(client).tell(*before, *steps)

        tell()


# -- one by one ---------------------------------------------------------------------------------

FAR = b"%d" % (LIMIT - 1)
OTHER_SETTINGS = BOOT_IDS[2]
#: Guard -> what is told differently without it, by the script that is then another.
STORIES_OF = {
    ("owner-release", "RELEASE"): [ENROLLED, acquire(X), release(Y), inspect()],
    ("owner-renewal", "RENEW"): [ENROLLED, acquire(X), renew(Y), inspect()],
    ("expiry", "ACQUIRE"): [ENROLLED, acquire(X, ttl=TINY), inspect()],
    ("quarantined-renewal", "RENEW"): [enrol(b"quarantine"), renew(X)],
    ("other-settings", "ACQUIRE"): [ENROLLED, acquire(X, boot=OTHER_SETTINGS)],
    ("other-settings", "RENEW"): [ENROLLED, acquire(X), renew(X, boot=OTHER_SETTINGS)],
    ("other-settings", "ENROL"): [ENROLLED, enrol(b"look", boot=OTHER_SETTINGS)],
    ("other-settings", "PROBE"): [ENROLLED, probe(boot=OTHER_SETTINGS)],
    ("was-replica", "ENROL"): [ENROLLED, *FOLLOW, enrol(b"look"), acquire(X)],
    ("was-replica", "PROBE"): [ENROLLED, *FOLLOW, probe(), acquire(X)],
    ("probe-remembers", "PROBE"): [Put(BOOT, BOOT_ID, LONG), probe()],
    ("repair-heeds-fence", "RENEW"): [ENROLLED, acquire(X, b"7"), release(X), renew(Y, b"2")],
    ("growing-fence", "ACQUIRE"): [ENROLLED, acquire(X, b"7"), acquire(Y, b"2", keys=B),
                                   acquire(X, b"2")],
    ("near-fence", "ACQUIRE"): [ENROLLED, acquire(X, FAR)],
    ("bounded-fence", "ACQUIRE"): [ENROLLED, Put(A.fence, FAR, LONG), acquire(X, b"7")],
    ("bounded-fence", "RENEW"): [ENROLLED, acquire(X, b"7"), Put(A.fence, FAR, LONG),
                                 renew(X, b"7")],
    ("done-stays-done", "RELEASE"): [mark(MARKERS[0], b"done"),
                                     release(X, marker=MARKERS[0], state=b"finishing")],
}  # fmt: skip


@pytest.mark.parametrize(("guard", "script"), STORIES_OF)
def test_what_a_guard_prevents_is_told_alike(client, guard, script):
    """With all guards on the story is the same on both sides."""
    Both(client).tell(*STORIES_OF[guard, script])


@pytest.mark.parametrize(("guard", "script"), STORIES_OF)
def test_a_script_that_has_lost_a_guard_is_found_out(client, guard, script):
    """A server that says yes where the simulated node says no is another one."""
    with ExitStack() as stack:
        for changed, text, without in GUARDS[guard].lua:
            if changed is getattr(scripts, script):
                stack.enter_context(rewritten(changed, text, without))
        with pytest.raises(AssertionError):
            Both(client).tell(*STORIES_OF[guard, script])


@pytest.mark.parametrize(("guard", "script"), STORIES_OF)
def test_a_simulated_node_that_has_lost_a_guard_is_found_out(client, guard, script):
    """The same the other way round: whatever the simulated node does not do is missed."""
    with ExitStack() as stack:
        for owner, name, stand_in in GUARDS[guard].patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        with pytest.raises(AssertionError):
            Both(client).tell(*STORIES_OF[guard, script])


def test_every_guard_in_the_lua_has_a_story():
    """A guard without one could be another in the simulation than on servers."""
    names = {getattr(scripts, name): name for name in TOLD_AGAIN}
    assert set(STORIES_OF) == {
        (guard.name, names[script]) for guard in GUARDS.values() for script, _, _ in guard.lua
    }


# -- servers that are not well -------------------------------------------------------------------

#: All that a node can be asked when x holds a, with a fence and a marker, and nobody b.
QUESTIONS = [
    acquire(X, b"7"), acquire(Y), acquire(Y, keys=B), acquire(X, b"7", keys=B),
    acquire(Y, keys=B, marker=MARKERS[0]), acquire(Y, b"2", keys=B, boot=BOOT_IDS[1]),
    acquire(Y, boot=OTHER_SETTINGS), acquire(Y, FAR, keys=B),
    renew(Y), renew(Y, keys=B), renew(X, b"7"), renew(X, b"4096"), renew(X, boot=BOOT_IDS[1]),
    renew(Y, keys=B, repair=b"0"),
    release(Y), release(X, keep=LONG), release(Y, marker=MARKERS[1]),
    release(X, marker=MARKERS[1], state=b"finishing"), release(X), release(Y, marker=MARKERS[0]),
    enrol(b"look"), enrol(b"quarantine", boot=BOOT_IDS[1]), enrol(b"trust"), enrol(b"bootstrap"),
    mark(MARKERS[0], b"done"), mark(MARKERS[0], b"done", b"0"), mark(MARKERS[1], b"done", b"0"),
    inspect(), inspect(B), probe(), probe(boot=OTHER_SETTINGS), Put(QUARANTINE, b"1", LONG),
]  # fmt: skip
BEFORE = [ENROLLED, acquire(X, b"4096"), mark(MARKERS[0], b"started")]


class ReadOnlyNode(SimulatedNode):
    """A simulated node that can be made a replica: it refuses to write."""

    is_replica = False

    def put(self, *arguments):
        """As `SimulatedNode.put`."""
        self._refuse()
        super().put(*arguments)

    def expire(self, *arguments):
        """As `SimulatedNode.expire`."""
        self._refuse()
        super().expire(*arguments)

    def delete(self, key):
        """As `SimulatedNode.delete`."""
        self._refuse()
        super().delete(key)

    def execute(self, command):
        """As `SimulatedNode.execute`."""
        try:
            return super().execute(command)
        except ReadOnlyError as error:
            return error

    def _refuse(self):
        if self.is_replica:
            raise ReadOnlyError("You can't write against a read only replica.")


@pytest.fixture
def unwell(redis_nodes, contract_server):
    """A server of each kind in turn that may be spoilt."""
    (server,) = redis_nodes(1, binary=contract_server.binary)
    with redis.Redis.from_url(server.url) as client:
        yield client


#: What chance seldom brings about.
ODD = [
    [ENROLLED, Put(A.lock, X), renew(X, b"1")],  # a lock without a fence
    [ENROLLED, acquire(X, b"7"), release(X), renew(X)],  # a repair without one
    *([Put(BOOT, BOOT_ID, LONG), Put(A.lock, X), *ask] for ask in (
        [acquire()], [acquire(length=b"0")], [renew()], [renew(length=b"0")],
    )),
    *([ENROLLED, Put(A.fence, far), acquire(X, b"1"), acquire(X), renew(X, b"1"), renew(Y)]
      for far in (b"1e300", b"inf", b"-inf", b"nan")),  # fences that nobody gave
    [ENROLLED, acquire(X, b"7"), renew(X, FAR), inspect()],  # or was given here
    *([enrol(mode, length=length)] for mode in (b"look", b"trust", b"quarantine")
      for length in (LONG, b"0")),
]  # fmt: skip


@pytest.mark.parametrize("story", ODD)
def test_odd_stories_are_told_alike(client, story):
    """Keys that are missing or about to lapse, and nodes that nobody has enrolled."""
    Both(client).tell(*story)


def test_any_two_questions_are_answered_alike(client):
    """One after the other, in either order, on a node where one lock is held and another free."""
    for first, second in product(QUESTIONS, repeat=2):
        Both(client).tell(*BEFORE, first, second)


def test_a_full_server_refuses_to_write_as_the_simulated_one(unwell):
    """Without memory a script ends at its first write, unless that was to delete or to expire."""
    answers = set()
    for question in QUESTIONS:
        both = Both(unwell)
        both.tell(*BEFORE)
        unwell.config_set("maxmemory", 1)
        both.node.is_full = True
        both.tell(question)
        answers.add(type(both.answer))
        unwell.config_set("maxmemory", 0)
    assert answers == {OutOfMemoryError, list}


def test_a_replica_refuses_to_write(unwell):
    """What would change nothing is answered as ever; all else is refused and changes nothing."""
    answers = set()
    for question in QUESTIONS:
        both = Both(unwell, ReadOnlyNode)
        both.tell(*BEFORE)
        unwell.replicaof("127.0.0.1", "1")
        both.node.is_replica = True
        both.tell(question)
        answers.add(type(both.answer))
        unwell.replicaof("NO", "ONE")
    assert answers == {ReadOnlyError, list}


def test_a_fence_that_is_no_number_is_an_error(client):
    """Whoever sets a fence by hand to what is none stops grants of that lock, and of no other."""
    both = Both(client)
    for value in (b"no number", b""):
        both.tell(ENROLLED, Put(A.fence, value), acquire(X, b"7"))
        assert isinstance(both.answer, ResponseError)
        both.tell(acquire(X), inspect(), renew(X, b"7"))
        assert isinstance(both.answer, ResponseError)
        both.tell(acquire(Y, b"7", keys=B), FLUSH)


def test_no_number_is_rounded_on_either_side(client):
    """Fences are told to the last digit up to 2^53, and beyond that as wrong as Lua has them."""
    both = Both(client)
    both.tell(ENROLLED)
    for fence in range(LIMIT - 3, LIMIT + 4):
        put = Put(A.fence, b"%d" % fence)
        both.tell(put, acquire(X, b"1", skew=WIDE), renew(X, b"1", skew=WIDE))
        if fence < LIMIT:
            assert both.node.get(A.fence) == b"%d" % (fence + 1)
