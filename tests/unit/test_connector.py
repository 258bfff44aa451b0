"""In which order nodes are greeted and enrolled, however long each of them takes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from redis.exceptions import ResponseError

from celery_redlock.lock.nodes import connector
from celery_redlock.lock.nodes.guard import Foreign, Greeting, quarantine_of_new, was_flushed
from celery_redlock.lock.rules import Rules
from support.waiting import eventually

OTHERS = "is enrolled by clients with other lock nodes"
#: How long a node takes to answer that is slow, but can be reached [s].
SLOW = 0.8


class Cluster:
    """
    Nodes in the place of servers, and a connector's `nodes` for them.

    A node says its state when it is looked at, and raises it where that is an exception.
    """

    def __init__(self, *states, slow=(), uptime=0.0):
        self.states = list(states)
        self.slow = slow
        self.uptime = uptime
        self.asked, self.left = [], []
        self.nodes = [
            SimpleNamespace(
                position=number,
                label=f"node-{number}",
                connection=None,
                is_connecting=False,
                problem=None,
                address=SimpleNamespace(connection=lambda n=number: Connection(n)),
                fail=lambda error, n=number: setattr(self.nodes[n], "problem", error),
            )
            for number in range(len(states))
        ]

    def greet(self, connection, _nodes):
        number = connection.number
        if number in self.slow:
            threading.Event().wait(SLOW)
        if isinstance(self.states[number], Exception):
            raise self.states[number]
        return Greeting(f"{number:040}", self.uptime, flushed=False, replicas=0, version="x")

    def enrol(self, connection, _rules, _run_id, _fingerprint, mode, *left):
        number = connection.number
        self.left += left
        if self.states[number] == "foreign":
            raise Foreign(OTHERS)
        if mode != "look":
            self.asked.append((number, mode))
            self.states[number] = "enrolled"
        return self.states[number], 5.0 if mode == "quarantine" else 0.0, 0.0

    def problems(self):
        eventually(
            lambda: all(node.connection or node.problem for node in self.nodes), "all settled"
        )
        return [str(node.problem) if node.problem else None for node in self.nodes]


class Connection:
    def __init__(self, number):
        self.number = number

    def connect(self):
        """Connect."""

    def disconnect(self):
        """Hang up."""


@pytest.fixture
def connect(monkeypatch):
    made = []

    def connect(cluster):
        def attach(node, connection, _greeting):
            node.connection = connection

        monkeypatch.setattr(connector, "greet", cluster.greet)
        monkeypatch.setattr(connector, "enrol", cluster.enrol)
        mutex = threading.Lock()
        labels = [node.label for node in cluster.nodes]
        made.append(connector.Connector(Rules(), labels, mutex, attach))
        with mutex:
            for node in cluster.nodes:
                made[-1].reconnect(node)
        return cluster

    yield connect
    for one in made:
        one.stop()


@pytest.mark.parametrize("slow", [(), (0,), (1, 2)], ids=str)
def test_who_meets_a_node_of_others_enrols_none(connect, slow):
    cluster = connect(Cluster("foreign", "unmarked", "unmarked", slow=slow))
    others, *beside = cluster.problems()
    assert cluster.asked == []
    assert others == OTHERS
    assert all("not enrolled: node-0 " in told and "other lock nodes" in told for told in beside)


def test_nodes_that_are_enrolled_already_vote_beside_one_of_others(connect):
    """One node that others have taken is one node less, and no more than that."""
    assert connect(Cluster("foreign", "enrolled", "enrolled")).problems() == [OTHERS, None, None]


def test_once_the_node_is_ours_the_others_are_enrolled(connect):
    """What was seen of a node is forgotten when it says something else."""
    cluster = connect(Cluster("foreign", "unmarked", "unmarked"))
    cluster.problems()
    cluster.states[0] = "enrolled"
    eventually(lambda: all(node.connection for node in cluster.nodes), "all connected")
    assert sorted(cluster.asked) == [(1, "quarantine"), (2, "quarantine")]


def test_a_node_that_went_away_is_still_one_of_others(connect):
    """It was met, and it may come back."""
    cluster = connect(Cluster("foreign", "unmarked", "unmarked"))
    cluster.problems()
    cluster.states[0] = OSError("down")
    eventually(lambda: str(cluster.nodes[0].problem) == "down", "down")
    cluster.nodes[1].problem = None
    eventually(lambda: cluster.nodes[1].problem, "another try")
    assert cluster.asked == []


def test_nodes_are_enrolled_though_one_cannot_be_reached(connect):
    """A new cluster with a node down is a cluster all the same."""
    cluster = connect(Cluster(OSError("down"), "unmarked", "unmarked", slow=(0,)))
    assert cluster.problems() == ["down", None, None]
    assert sorted(cluster.asked) == [(1, "quarantine"), (2, "quarantine")]


@pytest.mark.parametrize(
    ("nodes", "uptime", "mode", "left"),
    [
        (1, 1e6, "trust", []),
        (1, 9.0, "quarantine", [56.0]),
        (1, 0.0, "quarantine", [64.0]),
        (3, 1e6, "quarantine", [64.0] * 3),
    ],
)
def test_the_age_of_a_node_counts_only_where_it_is_the_only_one(connect, nodes, uptime, mode, left):
    """It is told by a wall clock, which may have been set since the node forgot a lease."""
    cluster = connect(Cluster(*["unmarked"] * nodes, uptime=uptime))
    cluster.problems()
    assert sorted(cluster.asked) == [(number, mode) for number in range(nodes)]
    assert cluster.left == left


@pytest.mark.parametrize(
    ("uptime", "flushed", "left"),
    [
        (0, False, 64),
        (1, False, 64),
        (2, False, 63),
        (64, False, 1),
        (65, False, 0),
        (65, True, 64),
    ],
)
def test_a_lone_server_is_quarantined_from_its_start_on(uptime, flushed, left):
    """It may be a second younger than it says, a difference of two whole seconds."""
    greeting = Greeting("1" * 40, float(uptime), flushed=flushed, replicas=0, version="x")
    assert quarantine_of_new(greeting, 1, Rules()) == left


def test_a_connection_that_was_of_no_use_is_made_ever_less_often():
    """One that ends as soon as it is made counts as one that failed, until one is of use."""
    cluster = Cluster("enrolled")
    made = connector.Connector(Rules(), ["node-0"], threading.Lock(), lambda *_: None)
    pauses = [made._pause(cluster.nodes[0]) for _ in range(12)]
    assert pauses[0] == 0.0
    assert 0 < pauses[1] <= connector.SHORTEST_BACKOFF
    assert all(connector.LONGEST_BACKOFF / 2 <= p <= connector.LONGEST_BACKOFF for p in pauses[8:])
    made.forgive(cluster.nodes[0])
    assert made._pause(cluster.nodes[0]) == 0.0


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (b"# Commandstats\r\ncmdstat_info:calls=1,usec=9", False),
        (b"cmdstat_info:calls=1\r\ncmdstat_flushall:calls=1", True),
        (b"cmdstat_info:calls=1\r\ncmdstat_flushdb:calls=1", True),
        (b"cmdstat_info:calls=1\r\ncmdstat_swapdb:calls=1", True),
        (b"cmdstat_config|resetstat:calls=1\r\ncmdstat_info:calls=1", True),
        (b"# Commandstats\r\n", True),
        (b"", True),
        (ResponseError("unknown section"), True),
    ],
)
def test_a_server_that_does_not_show_its_flushes_may_have_been_flushed(stats, expected):
    """Managed ones may show none; each that shows any shows the question itself."""
    assert was_flushed(stats) == expected
