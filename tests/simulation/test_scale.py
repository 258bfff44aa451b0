"""The world of many keeps its books, its nodes queue, and docs/scale.md says what was recorded."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from celery import Celery

from celery_redlock import Redlock
from celery_redlock.errors import LockTaken
from celery_redlock.lock import clock
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import release_request
from celery_redlock.lock.scripts.scripting import pack
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from simulation.guards import switched_off
from simulation.scale import (
    KINDS,
    Load,
    Names,
    ScaleWorld,
    contend,
    group_of,
    kind_of,
    packed,
    quantile,
)
from support.clients import let_go
from support.patience.sitecustomize import DEFAULTS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from proof import scale_page  # noqa: E402

#: A thousand times what it takes in life, so that few locks keep a node busy.
SLOW = {"acquire": 0.002, "refuse": 0.002, "renew": 0.002, "release": 0.002, "undo": 0.002}
CAPACITY = 1 / (SLOW["acquire"] + SLOW["release"])
MANY = Names.zipf(10_000)
#: Leases that are renewed every tenth of a second.
SHORT = Rules(ttl=0.3, max_ttl=0.3)
#: Of clients that wait longer for a node than its queue is.
PATIENT = Rules(node_timeout=5.0)


@pytest.fixture(autouse=True)
def _the_clock_is_given_back():
    """A world that kept the library's clock would have it stand still for all later tests."""
    before = clock.now
    yield
    assert clock.now is before


def served(load, *, seconds=None, begin_full=False, **about):
    """Return a world that has served *load*: to its end, or for *seconds*."""
    world = ScaleWorld(**{"crew": 40, "costs": SLOW, **about})
    world.serve(load, begin_full=begin_full)
    world.run(*(() if seconds is None else (seconds,)))
    return world


def ends(world):
    return sum(world.ends.values(), Counter())


def slow_end(world):
    """Return what one in ten waits longer than [s]."""
    return quantile([wait for waits in world.waits.values() for wait in waits], 0.9)


# -- books -------------------------------------------------------------------------------


@pytest.mark.parametrize("zones", ["ABC", "AABBC"])
def test_a_lock_is_two_commands_of_each_node(zones):
    """An acquire and a release each, and nothing else; the time that they take is all there is."""
    world = served(Load(50.0, 0.01, MANY, until=1.0), zones=zones)
    granted = ends(world)["granted"]
    assert granted > 20
    assert ends(world)["taken"] == ends(world)["unavailable"] == 0
    for tally in world.tallies:
        assert tally.commands == {"acquire": granted, "release": granted}
        assert tally.busy == pytest.approx(granted * (SLOW["acquire"] + SLOW["release"]))
        assert tally.received > tally.sent > 0
    assert not [key for node in world.nodes for key in node.store if b":lock:" in key]


def test_what_is_refused_costs_too_and_nothing_is_left_of_it():
    """Few names: tries that meet a holder are refused, and no two hold one lock."""
    world = served(Load(100.0, 0.1, Names.zipf(5), until=1.0), costs={})
    told = ends(world)
    assert told["taken"] > 20
    assert told["granted"] > 20
    for tally in world.tallies:
        assert tally.commands["acquire"] + tally.commands["refuse"] == told.total()
        assert tally.commands["release"] == told["granted"]
    assert world.overlaps() == []
    assert not [key for node in world.nodes for key in node.store if b":lock:" in key]


def overlapping():
    """Return who held one lock at a time, of many who wanted it while zones were apart."""
    world = ScaleWorld(crew=6, zones="ABC", rules=replace(SHORT, fence=False))
    world.cut("A", 0.3, 2.0)
    for host in world.hosts:
        world.at(0.0, host.run, contend(world, host, "hot", hold=0.2, rest=0.0, until=1.5))
    world.run(1.5)
    return world.overlaps()


def test_exclusion_is_looked_at_by_name():
    """A zone that is cut off grants nothing; where those who answer suffice, it does, and shows."""
    assert overlapping() == []
    with switched_off(["configured-quorum"]):
        assert overlapping()


def test_long_tasks_renew():
    """A lock that is held for long is renewed, and is never lost on the way."""
    world = served(Load(20.0, 0.5, MANY, until=1.0), rules=SHORT, costs={})
    granted = ends(world)["granted"]
    assert ends(world)["lost"] == 0
    for tally in world.tallies:
        assert tally.commands["release"] == granted
        assert tally.commands["renew"] > granted
    assert world.overlaps() == []


def test_a_world_may_begin_in_the_middle():
    """It then renews and releases as much at once as one that has run for long."""
    load, seconds = Load(200.0, 1.0, MANY), 0.5
    full = served(load, seconds=seconds, begin_full=True, rules=SHORT, costs={})
    empty = served(load, seconds=seconds, rules=SHORT, costs={})
    expected = load.rate * seconds
    assert full.tallies[0].commands["release"] == pytest.approx(expected, rel=0.4)
    assert empty.tallies[0].commands["release"] < expected / 2
    assert full.tallies[0].commands["renew"] > 2 * empty.tallies[0].commands["renew"]
    assert ends(full)["lost"] == 0


def test_every_command_is_known():
    """A command that no kind fits would cost nothing; sizes are those on the wire."""
    world = served(Load(100.0, 0.2, Names.zipf(20), until=0.5), rules=SHORT, costs={})
    seen = set().union(*(tally.commands for tally in world.tallies))
    assert seen <= set(KINDS)
    assert seen >= {"acquire", "refuse", "renew", "release"}
    request = release_request(Rules(), "name", "0" * 40)
    command = [b"EVALSHA", request.script.sha, b"2", *request.keys, *request.arguments]
    assert kind_of(command, [0, 0]) == "undo"
    assert packed([1, 42, b"7"]) == b"*3\r\n:1\r\n:42\r\n$1\r\n7\r\n"
    assert pack(b"a", b"bc") == b"*2\r\n$1\r\na\r\n$2\r\nbc\r\n"


# -- queues ------------------------------------------------------------------------------


def test_waiting_grows_as_a_node_is_nearly_busy():
    """A node at a fifth of what it can do hardly makes anybody wait; one at nine tenths does."""
    idle, busy = (
        served(Load(share * CAPACITY, 0.01, MANY), seconds=4.0, zones="ABC") for share in (0.2, 0.9)
    )
    assert slow_end(busy) > 2 * slow_end(idle)
    assert max(tally.busy for tally in busy.tallies) / 4.0 == pytest.approx(0.9, rel=0.2)
    assert ends(idle)["unavailable"] == 0


def test_nodes_twice_as_slow_can_do_half():
    """What is easy for a node is too much for one that is twice as slow, but half of it is not."""
    slower = {kind: 2 * cost for kind, cost in SLOW.items()}
    easy, about = Load(0.7 * CAPACITY, 0.01, MANY), {"zones": "ABC", "rules": PATIENT}
    well = served(easy, seconds=3.0, **about)
    over = served(easy, seconds=3.0, costs=slower, **about)
    half = served(replace(easy, rate=easy.rate / 2), seconds=3.0, costs=slower, **about)
    for world, others in ((well, 1.0), (half, 0.5)):
        assert ends(world)["granted"] == pytest.approx(3.0 * easy.rate * others, rel=0.2)
        assert max(tally.busy for tally in world.tallies) / 3.0 == pytest.approx(0.7, rel=0.2)
    assert slow_end(half) < 4 * slow_end(well)  # each command takes twice as long
    assert slow_end(over) > 3 * slow_end(half)
    assert ends(over)["granted"] < 0.8 * ends(well)["granted"]


def test_who_is_late_is_of_no_use():
    """Beyond what a node can do, answers come too late, and most locks are unavailable."""
    world = served(Load(1.6 * CAPACITY, 0.01, MANY), seconds=2.0, zones="ABC")
    assert ends(world)["unavailable"] > ends(world)["granted"]
    assert world.overlaps() == []


def test_a_zone_that_is_cut_off_is_missed_by_nobody_else():
    """Workers elsewhere have their locks as before; those within have none."""
    world = ScaleWorld(crew=30, zones="AABBC", costs={})
    world.serve(Load(100.0, 0.05, MANY))
    world.cut("C", 0.0, 9.0)
    world.run(1.0)
    assert world.ends["A"]["unavailable"] == world.ends["B"]["unavailable"] == 0
    assert world.ends["A"]["granted"] > 10
    assert world.ends["C"]["granted"] == 0
    assert world.ends["C"]["unavailable"] > 5


# -- names and groups --------------------------------------------------------------------


def test_groups_share_out_all_names():
    """Each name has one group, about as many in each, and is wanted as often as before."""
    names = Names.zipf(2000, 1.0)
    parts = names.of_groups(4)
    assert sorted(n for part in parts for n in part.numbers) == list(range(2000))
    assert sum(part.weight for part in parts) == pytest.approx(names.weight)
    for group, part in enumerate(parts):
        assert len(part.numbers) == pytest.approx(500, rel=0.2)
        assert group_of(part.draw(random.Random(1)), 4) == group


def test_a_group_is_the_same_in_every_process():
    """Unlike Python's own hash, which is another one in each."""
    assert [group_of(f"order {n}", 3) for n in range(8)] == [2, 1, 1, 0, 2, 2, 2, 2]


def test_a_popular_name_is_drawn_more_often():
    """By Zipf's law the first name is wanted as often as the second and third together, about."""
    chance, names = random.Random(1), Names.zipf(100, 1.0)
    drawn = Counter(names.draw(chance) for _ in range(5000))
    first, second = drawn[names.text(0)], drawn[names.text(1)]
    assert first == pytest.approx(2 * second, rel=0.3)
    assert max(Counter(MANY.draw(chance) for _ in range(5000)).values()) < 10


# -- the page ----------------------------------------------------------------------------


def test_the_page_is_what_was_recorded():
    """`python -m proof.scale_page` would change nothing, and all that was recorded has a place."""
    recorded, places = scale_page.sections(), []
    for page in (scale_page.PAGE, scale_page.TABLES):
        text = page.read_text()
        assert scale_page.filled(text, recorded) == text
        places += re.findall(r"<!-- (\w+: \w+) -->", text)
    tables = [f"{name}: tables" for name, (record, _) in recorded.items() if record.tables]
    plots = [f"{name}: plots" for name, (record, _) in recorded.items() if record.plots]
    assert sorted(places) == sorted(["targets: targets", *tables, *plots])


@pytest.mark.long  # draws them anew with matplotlib
def test_the_pictures_are_of_what_was_recorded():
    """One for each plot, of these very figures, and no other."""
    from benchmarks.pictures import digest, digest_in
    from benchmarks.report import pictures_of

    plots = [plot for record, _ in scale_page.sections().values() for plot in record.plots]
    files = {path.stem: path for path in pictures_of(scale_page.PAGE).glob("*.svg")}
    assert sorted(files) == sorted(plot.name for plot in plots)
    assert [p.name for p in plots if digest_in(files[p.name].read_text()) != digest(p)] == []


@pytest.fixture
def example(redis_nodes, broker, monkeypatch):
    """Run the examples of the page on servers of this test; return what they leave."""
    # The page has the defaults, which are for servers that have a machine to themselves.
    monkeypatch.setitem(DEFAULTS, "node_timeout", 5.0)
    urls = [server.url for server in redis_nodes(4)]
    text = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", scale_page.PAGE.read_text(), re.DOTALL | re.MULTILINE)
    )
    groups = [urls[:1], urls[1:2]]  # of one node each: they differ, which is what this is about
    text = re.sub(r"(?ms)^NODES = .*?^\]\n", f"NODES = {groups}\n", text)
    assert f"NODES = {groups}\n" in text
    for group in groups:
        bootstrap(group, Rules())
    namespace = {"__name__": "page", "RATHER": urls[2:]}
    exec(text.replace("redis://broker/0", broker.url), namespace)
    yield namespace
    with ExitStack() as stack:
        for left in namespace["LOCKS"]:
            stack.callback(left.close)
        for left in (one for one in namespace.values() if isinstance(one, Celery)):
            stack.callback(let_go, left)
            stack.callback(plugin_for(left).locks.close)


def holders(locks, name):
    """Return who holds *name* on the nodes of *locks*, by public token."""
    return [view.holder["token"] for view in locks.inspect(name) if view.holder]


def test_a_name_is_locked_on_its_group_alone(example):
    """The page's rule sends it there, and whoever asks for it goes there, too."""
    locks, of = example["LOCKS"], example["group_of"]
    names = [next(n for n in map("order {}".format, range(99)) if of(n) == g) for g in (0, 1)]
    for group, name in enumerate(names):
        with example["locks_for"](name).hold(name):
            assert holders(locks[group], name)
            assert not holders(locks[1 - group], name)
            with pytest.raises(LockTaken):
                example["locks_for"](name).acquire(name)


def test_a_name_that_moves_while_it_is_held_has_two_holders(example):
    """Hence another number of groups only when no lease of the old one can be alive."""
    name = next(n for n in map("order {}".format, range(99)) if example["group_of"](n) == 1)
    with example["locks_for"](name).hold(name):
        example["NODES"].pop()  # one group less: the rule sends it elsewhere
        with example["locks_for"](name).hold(name):
            assert all(holders(locks, name) for locks in example["LOCKS"])


def test_a_task_of_each_app_locks_on_the_nodes_of_its_group(example):
    """An app per group; whoever publishes chooses it by the name that the task will lock."""
    for order in range(8):
        app = example["app_for"](order)
        assert app.tasks["shop.ship"].apply((100 + order,)).get() == 100 + order
        locks = example["LOCKS"][example["group_of"](f"order {order}")]
        with locks.hold(f"order {order}"):
            assert app.tasks["shop.ship"].apply((order,)).get()["skipped"] == "conflict"


def test_nodes_of_one_group_are_no_nodes_of_another(example):
    """Two lists of nodes that share one would count it twice: the node refuses the second."""
    mixed = [*example["NODES"][0], *example["RATHER"]]
    with closing(Redlock.from_urls(mixed)) as locks, pytest.raises(Exception, match="enrolled"):
        check(locks)
