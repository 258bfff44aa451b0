"""
A memory quorum and real servers tell the same story.

Each story is told twice: to nodes in memory whose clock is ticked, and to servers on which that
time is waited for. What comes of its steps is the same, word for word.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

import pytest
import redis
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_redlock import LockLost, LockNotAcquired, Redlock, RedlockTask, current_lock
from celery_redlock.lock.records import Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.reading import nodes as reading
from celery_redlock.reading.health import check, probe
from celery_redlock.testing import MemoryQuorum, memory_quorum, real_servers
from support.stored import RENEWED, ROOMY
from support.waiting import eventually

pytestmark = pytest.mark.long

#: A lease whose end is waited for.
BRIEF = {**ROOMY, "ttl": RENEWED, "max_ttl": RENEWED}

#: How a node looks to its clients after a fault.
STATE_AFTER = {
    "down": "down",
    "hang": "down",
    "fill": "unfit",
    "forget": "quarantined",
    "up": "up",
}


class InMemory:
    def __init__(self, quorum):
        self.quorum = quorum
        self.mine = quorum.locks
        self.theirs = quorum.locks_on((), quorum.rules, (), time.sleep)

    def spoil(self, how, *positions):
        for position in positions:
            getattr(self.quorum.nodes[position], how)()

    def tick(self, seconds):
        self.quorum.clock.tick(seconds)


class OnServers:
    def __init__(self, servers, rules):
        self.servers = servers
        self.rules = rules
        urls = [server.url for server in servers]
        assert set(reading.bootstrap(urls, rules).values()) == {"enrolled"}
        self.mine, self.theirs = Redlock(urls, rules), Redlock(urls, rules)
        for locks in (self.mine, self.theirs):
            assert check(locks) == {}

    def spoil(self, how, *positions):
        """Do it, and wait until both clients have noticed."""
        for position in positions:
            server = self.servers[position]
            if how == "down":
                server.kill()
            elif how == "hang":
                server.pause()
            elif how == "fill":
                self._memory(server, 1)
            elif how == "forget":
                server.restart()
            else:
                server.resume()
                self._memory(server, 0)
        expected = STATE_AFTER[how]
        for locks in (self.mine, self.theirs):
            eventually(
                lambda locks=locks: {probe(locks)[p].state for p in positions} == {expected},
                f"nodes {positions} that are {expected}",
            )

    @staticmethod
    def _memory(server, size):
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", size)

    def tick(self, seconds):
        time.sleep(seconds)


@contextmanager
def in_memory(_redis_nodes, rules):
    with MemoryQuorum(**rules) as quorum:
        yield InMemory(quorum)


@contextmanager
def on_servers(redis_nodes, rules):
    world = OnServers(redis_nodes(5), Rules(**rules))
    try:
        yield world
    finally:
        world.mine.close()
        world.theirs.close()


#: What a node says that votes, and what is said of one whose vote came too late to matter.
VOTES = {"granted", "refused", "not waited for"}


def told(ask, *arguments, **how):
    try:
        answer = ask(*arguments, **how)
    except LockLost as error:
        return f"lost: {error.reason}"
    except LockNotAcquired as error:
        # Which nodes that vote are not waited for depends on who is quicker.
        votes = {vote.partition(" (")[0] for vote in error.votes.values()} - VOTES
        return f"{type(error).__name__}: {', '.join(sorted(votes))}"
    return getattr(answer, "value", "granted")


# -- the stories: what they yield is compared --------------------------------------------------


def taken_and_free_again(world):
    lease = world.mine.acquire("a")
    yield told(world.theirs.acquire, "a").partition(":")[0]
    yield told(world.theirs.release, lease)
    yield told(world.mine.release, lease)
    newer = world.theirs.acquire("a")
    yield newer.fence > lease.fence


def over(world):
    lease = world.mine.acquire("a")
    world.tick(6.6)
    newer = world.theirs.acquire("a")
    yield newer.fence > lease.fence
    yield told(world.mine.extend, lease)
    yield told(world.mine.release, lease)
    yield told(world.theirs.extend, newer)


def extended(world):
    lease = world.mine.acquire("a")
    world.tick(5.0)
    longer = world.mine.extend(lease)
    world.tick(5.0)
    yield told(world.theirs.acquire, "a").partition(":")[0]
    yield longer.remaining() > 0.1
    yield lease.remaining()


def a_minority_is_down(world):
    world.spoil("down", 0, 1)
    lease = world.mine.acquire("a")
    yield told(world.theirs.acquire, "a")
    yield told(world.mine.release, lease)


def a_majority_is_down(world):
    world.spoil("down", 0, 1, 2)
    yield told(world.mine.acquire, "a")


def a_majority_hangs(world):
    """It does what it was asked when it goes on: a release comes behind its lock."""
    world.spoil("hang", 0, 1, 2)
    yield told(world.mine.acquire, "a")
    world.spoil("up", 0, 1, 2)
    lease = world.mine.acquire("a", wait=60)
    yield told(world.theirs.acquire, "a").partition(":")[0]
    yield told(world.mine.release, lease)


def a_majority_is_full(world):
    lease = world.mine.acquire("a")
    world.spoil("fill", 2, 3, 4)
    yield told(world.theirs.acquire, "b")
    yield told(world.mine.release, lease)
    world.spoil("up", 2, 3, 4)
    yield told(world.theirs.acquire, "b")


def a_majority_forgets(world):
    world.mine.acquire("a")
    world.spoil("forget", 0, 1, 2)
    yield told(world.theirs.acquire, "a")
    world.tick(3.2)  # the lease is over, the longest possible one is not
    yield told(world.theirs.acquire, "a")
    world.tick(8.0)
    yield told(world.theirs.acquire, "a")


def a_minority_forgets(world):
    with world.mine.hold("a") as held:
        world.spoil("forget", 0, 1)
        yield told(world.theirs.acquire, "a").partition(":")[0]
        world.tick(7.4)

        def tokens():
            return [view.holder.get("token") for view in world.mine.inspect("a")]

        yield eventually(lambda: tokens() == [held.token[:8]] * 5, "a renewal", every=0.1)
        yield told(world.theirs.acquire, "a").partition(":")[0]


def renewed(world):
    with world.mine.hold("a") as held:
        world.tick(9.0)
        yield eventually(lambda: held.renewals >= 4, "renewals")
        yield held.is_lost
        yield told(world.theirs.acquire, "a").partition(":")[0]


def lost(world):
    held = world.mine.hold("a")
    lock = held.__enter__()
    world.spoil("hang", 0, 1, 2)
    world.tick(6.6)
    yield lock.lost_reason
    yield told(lock.ensure_held)
    world.spoil("up", 0, 1, 2)
    yield told(held.__exit__, None, None, None)


def stolen(world):
    with pytest.raises(LockLost, match="stolen"), world.mine.hold("a") as held:
        key = Keys.of("redlock", "a").lock
        for position in range(5):
            if isinstance(world, InMemory):
                world.quorum.nodes[position].model.ask(b"DEL", key)
            else:
                with redis.Redis.from_url(world.servers[position].url) as client:
                    client.delete(key)
        world.tick(2.1)
        yield eventually(lambda: held.lost_reason, "loss")


STORIES = [
    taken_and_free_again, over, extended, a_minority_is_down, a_majority_is_down, a_majority_hangs,
    a_majority_is_full, a_majority_forgets, a_minority_forgets, renewed, lost, stolen,
]  # fmt: skip


#: Rules of the stories in which time matters.
RULES_OF = {
    over: BRIEF,
    extended: {**ROOMY, "ttl": 10.0, "max_ttl": 10.0},
    a_majority_forgets: {"ttl": 3.0, "max_ttl": 9.0, "node_timeout": 1.0},
    **dict.fromkeys((a_minority_forgets, renewed, lost, stolen), BRIEF),
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_is_the_same_in_memory_and_on_servers(redis_nodes, story):
    outcomes = []
    for world in (in_memory, on_servers):
        with world(redis_nodes, RULES_OF.get(story, ROOMY)) as here:
            outcomes.append(list(story(here)))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) > 0


# -- at random ---------------------------------------------------------------------------------

VERBS = st.tuples(
    st.sampled_from(["acquire", "acquire", "extend", "release"]),
    st.integers(0, 1),
    st.sampled_from("ab"),
)
number = itertools.count()


def play(world, steps, suffix):
    clients, leases, outcomes = (world.mine, world.theirs), {}, []
    for verb, who, name in steps:
        client, mine = clients[who], leases.get((who, name))
        if verb == "acquire":
            try:
                leases[who, name] = client.acquire(name + suffix)
                outcomes.append("granted")
            except LockNotAcquired as error:
                outcomes.append(type(error).__name__)
        elif mine is not None:
            outcomes.append(told(getattr(client, verb), mine))
    held = [world.mine.inspect(name + suffix) for name in "ab"]  # what is decided: on a majority
    return outcomes + [sum(bool(view.holder) for view in views) >= 3 for views in held]


def test_whatever_two_clients_do_comes_to_the_same(five_nodes):
    # Nobody is late, whatever the machine does: only what the clients do is compared.
    patient = {**ROOMY, "node_timeout": 20.0}
    servers = OnServers(five_nodes, Rules(**patient))

    @settings(max_examples=60)
    @given(st.lists(VERBS, max_size=20))
    def tell(steps):
        suffix = f"-{next(number)}"
        with MemoryQuorum(**patient) as quorum:
            here = play(InMemory(quorum), steps, suffix)
        there = play(servers, steps, suffix)
        assert here == there

    tell()
    servers.mine.close()
    servers.theirs.close()


# -- tasks -------------------------------------------------------------------------------------


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(redlock_node_timeout=2.5, redlock_on_unavailable="fail")
    yield app
    app.close()


def test_a_task_does_the_same_in_memory_and_on_servers(app):
    @app.task(base=RedlockTask, name="shop.bill", lock_key="invoice:{n}", shared=False)
    def bill(n):
        inner = task.apply((n,)).get()  # another execution
        return [current_lock().name, current_lock().fence > 0, inner.get("skipped")]

    task = app.tasks["shop.bill"]

    def outcomes():
        for _ in range(2):
            result = task.apply((7,)).result
            yield type(result).__name__ if isinstance(result, Exception) else result

    told_by_both = []
    with memory_quorum(app) as quorum:
        story = list(outcomes())
        for node in quorum.nodes[:3]:
            node.down()
        told_by_both.append([*story, *outcomes()])
    with real_servers(app) as servers:
        story = list(outcomes())
        for server in servers[:3]:
            server.kill()
        told_by_both.append([*story, *outcomes()])
    assert told_by_both[0] == told_by_both[1]
    assert told_by_both[0][0] == ["invoice:7", True, "conflict"]
    assert told_by_both[0][2] == "QuorumUnavailable"
    assert plugin_for(app).servers is None
