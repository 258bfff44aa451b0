"""
Workflows in which a task is refused its lock: by every policy, at every place, and all of it ends.

How its results end is written in the form of the workflow: a list for a chain, a tuple for a
group. A value tells what it was made of: ``a>c`` is what task c made of what a returned.

    M, N  what the refused tasks return once they run, or ``~`` where they were skipped
    !     failed, as the lock was not granted
    x     revoked
    #     failed with a ChordError

All workflows of a stage are published at once, each with lock names of its own, and looked at
when nothing moves any more: what is not ready then never will be.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import redis
from celery import Task, chain, chord, group
from celery.canvas import StampingVisitor
from celery.exceptions import Ignore
from celery.exceptions import TimeoutError as NotReadyError
from celery.result import GroupResult

from celery_redlock import LockTaken, RedlockTask, Reschedule, Retry
from celery_redlock.task.options import OPTIONS
from support.events import body, now, overlaps, read, record
from support.stage import LASTING, stage
from support.waiting import eventually

READY = {"SUCCESS", "FAILURE", "REVOKED"}
ERRORS = ("!", "x", "#", "?")

# Setting a stage is to play hundreds of workflows.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ONCE = Reschedule(cap=1.0, max_reschedules=1)
LATER = Reschedule(cap=1.0)
POLICIES = {
    "default": {},
    "skip": {"on_conflict": "skip", "on_unavailable": "skip"},
    "skip_on": {"on_conflict": "skip", "on_unavailable": "skip", "chain_on_skip": "continue"},
    "fail": {"on_conflict": "fail", "on_unavailable": "fail"},
    "retry": {"on_conflict": Retry(1), "on_unavailable": Retry(1), "max_retries": None},
    # Celery stores RETRY when the next try is published, over its FAILURE if that is quicker.
    "retry_once": {"on_conflict": Retry(3), "on_unavailable": Retry(3), "max_retries": 1},
    "reschedule": {"on_conflict": LATER, "on_unavailable": LATER},
    "reschedule_once": {"on_conflict": ONCE, "on_unavailable": ONCE},
    "run_unlocked": {"on_unavailable": "run_unlocked"},
}
#: What becomes of a refused task: it ran at last; its chain was stopped; its Skipped value was
#: passed on; it failed.
BY_CONFLICT = {
    "default": "stopped",
    "skip": "stopped",
    "skip_on": "passed",
    "fail": "failed",
    "retry": "ran",
    "retry_once": "failed",
    "reschedule": "ran",
    "reschedule_once": "failed",
}
BY_OUTAGE = {**BY_CONFLICT, "run_unlocked": "ran"}
del BY_OUTAGE["default"]  # it is to reschedule, with pauses that grow
#: Where Celery polls for the end of a header, as it does with a database.
POLLED = {"skip": "stopped", "fail": "failed"}
#: Where the tasks know nothing of us, and a setting protects them.
BY_SETTING = {policy: BY_CONFLICT[policy] for policy in ("skip", "fail", "reschedule")}
STAGES = {
    "conflict": BY_CONFLICT,
    "outage": BY_OUTAGE,
    "polled": POLLED,
    "by_setting": BY_SETTING,
}


# -- the tasks ---------------------------------------------------------------------------


class Noted(Task):
    abstract = True

    def before_start(self, task_id, args, kwargs):
        record(os.environ["EVENTS"], "attempt", name=lock_of(self, args, kwargs))


def lock_of(_task, args, kwargs):
    return f"{kwargs['flow']} {args[-1]}"


def made_of(values, label):
    return ">".join([*map(shown, values), label])


def shown(value):
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return "~" if isinstance(value, dict) and "skipped" in value else str(value)


def declare(app):
    def work(self, *args, flow, seconds=0.0):
        *values, label = args
        with body(os.environ["EVENTS"], f"{flow} {label}", stamps=self.request.stamps):
            time.sleep(seconds)
            return made_of(values, label)

    app.task(name="step", bind=True, shared=False)(work)
    base = type("LockedAndNoted", (Noted, RedlockTask), {"abstract": True})
    policies = {name: {"lock_key": lock_of, **options} for name, options in POLICIES.items()}
    if app.conf["by_setting"]:
        base = Noted
        app.conf.redlock_protect = {
            name: {option: options.pop(option) for option in OPTIONS if option in options}
            for name, options in policies.items()
        }
    for name, options in policies.items():
        app.task(name=name, base=base, bind=True, shared=False, **options)(work)

    @app.task(name="broken", shared=False)
    def broken():
        raise ValueError

    @app.task(name="become", bind=True, shared=False)
    def become(self, *args, instead):
        raise self.replace(self.app.signature(instead).clone(args))

    @app.task(name="caught", shared=False)
    def caught(request, error, traceback, flow):
        record(os.environ["EVENTS"], "call", flow=flow, name="caught")

    @app.task(name="told", shared=False)
    def told(flow):
        record(os.environ["EVENTS"], "call", flow=flow, name="told")

    declare_naive(app)


def declare_naive(app):  # noqa: C901  they are many, not complex
    """Declare what a few lines without this package would do where a lock is taken."""

    def is_taken(name):
        with redis.Redis.from_url(app.conf.redlock_nodes[0]) as node:
            return bool(node.exists(f"redlock:lock:{name}"))

    def ignore(self, name):
        raise Ignore

    def none(self, name):
        return None

    def value(self, name):
        return {"skipped": "conflict", "lock": name}

    def forget(self, name):
        self.request.chain = None
        return {"skipped": "conflict", "lock": name}

    def fail(self, name):
        raise LockTaken(name, {})

    def twice(self, name):
        if not self.request.headers:
            self.signature_from_request(headers={"again": True}, countdown=1).apply_async()
        with body(os.environ["EVENTS"], name):
            return "m"

    for deed in (ignore, none, value, forget, fail, twice):

        def run(self, *args, flow, deed=deed):
            name = f"{flow} {args[-1]}"
            assert is_taken(name)
            return deed(self, name)

        app.task(name=f"naive_{deed.__name__}", bind=True, shared=False)(run)


# -- the workflows -----------------------------------------------------------------------


class Flow:
    """
    What a workflow is made of.

    Attributes:
        name: Of the workflow; part of all its lock names.
        policy: Name of the task that is to be refused.
    """

    def __init__(self, app, name, policy):
        self.app, self.name, self.policy = app, name, policy

    def s(self, label):
        return self.app.tasks["step"].s(label, flow=self.name)

    def m(self, label="m", **more):
        """Return a task that is to be refused, as often as its policy lets it come again."""
        return self.app.tasks[self.policy].s(label, flow=self.name, **more)

    def becomes_m(self):
        return self.app.tasks["become"].s(instead=dict(self.m()))

    def broken(self):
        return self.app.tasks["broken"].si()

    def caught(self):
        """Return an error callback that is called in the place where the task failed."""
        return self.app.tasks["caught"].s(self.name)

    def told(self):
        """Return an error callback that is a task."""
        return self.app.tasks["told"].si(self.name)


class Shape(NamedTuple):
    """
    A workflow, and how it ends.

    Attributes:
        make: Makes it of a `Flow`.
        done: How its results end if M runs, or is skipped and passed on.
        failed: The same if M fails.
        stopped: The same if M stops its chain; None for as ``done``.
        given: What M is given by the task before it.
        unseen: Tasks that run without a result in the tree, by what becomes of M.
        calls: Error callbacks that are called, by what becomes of M.
    """

    make: Callable[[Flow], Any]
    done: Any
    failed: Any
    stopped: Any = None
    given: str = ""
    unseen: Mapping[str, str] = {}
    calls: Mapping[str, str] = {}


def stamped(canvas):
    class Stamps(StampingVisitor):
        def on_signature(self, sig, **headers):
            return {"tenant": "acme"}

    canvas.stamp(Stamps())
    return canvas


SINGLE = {
    "alone": Shape(lambda f: f.m(), "M", "!"),
    "link": Shape(
        lambda f: f.m().set(link=f.s("l"), link_error=[f.caught(), f.told()]),
        "M",
        "!",
        unseen={"ran": "l", "passed": "l"},
        calls={"failed": "caught told"},
    ),
    "link to a chain": Shape(
        lambda f: f.m().set(link=chain(f.s("b"), f.s("c"))),
        "M",
        "!",
        unseen={"ran": "bc", "passed": "bc"},
    ),
    "as a link": Shape(lambda f: f.s("a").set(link=f.m()), "a", "a", unseen={"ran": "m"}),
    "as an errback": Shape(
        lambda f: f.broken().set(link_error=f.m()), "?", "?", unseen={"ran": "m"}
    ),
}
CHAINS = {
    "first": Shape(
        lambda f: chain(f.m(), f.s("b"), f.s("c")),
        ["M", "M>b", "M>b>c"],
        ["!", "!", "!"],
        ["~", "x", "x"],
    ),
    "middle": Shape(
        lambda f: chain(f.s("a"), f.m(), f.s("c")),
        ["a", "M", "M>c"],
        ["a", "!", "!"],
        ["a", "~", "x"],
        given="a",
    ),
    "last": Shape(
        lambda f: chain(f.s("a"), f.s("b"), f.m()),
        ["a", "a>b", "M"],
        ["a", "a>b", "!"],
        given="a>b",
    ),
    "immutable": Shape(
        lambda f: chain(f.s("a"), f.m().set(immutable=True), f.s("c").set(immutable=True)),
        ["a", "M", "c"],
        ["a", "!", "!"],
        ["a", "~", "x"],
    ),
    "stamped": Shape(
        lambda f: stamped(chain(f.s("a"), f.m(), f.s("c"))),
        ["a", "M", "M>c"],
        ["a", "!", "!"],
        ["a", "~", "x"],
        given="a",
    ),
    "replaced": Shape(
        lambda f: chain(f.s("a"), f.becomes_m(), f.s("c")),
        ["a", "M", "M>c"],
        ["a", "!", "!"],
        ["a", "~", "x"],
        given="a",
    ),
    "chain with an errback": Shape(
        lambda f: chain(f.s("a"), f.m(), f.s("c")).on_error(f.caught()),
        ["a", "M", "M>c"],
        ["a", "!", "!"],
        ["a", "~", "x"],
        given="a",
        calls={"failed": "caught"},
    ),
    "link at the end": Shape(
        lambda f: chain(f.m(), f.s("b").set(link=f.s("l"), link_error=f.caught())),
        ["M", "M>b"],
        ["!", "!"],
        ["~", "x"],
        unseen={"ran": "l", "passed": "l"},
    ),
    "chain of links": Shape(
        lambda f: chain(f.m(), f.s("b"), f.s("c"), use_link=True),
        ["M", "M>b", "M>b>c"],
        ["!", "!", "!"],
        ["~", "x", "x"],
    ),
}
GROUPS = {
    "group": Shape(lambda f: group(f.s("a"), f.m(), f.s("c")), ("a", "M", "c"), ("a", "!", "c")),
    "chain in a group": Shape(
        lambda f: group(chain(f.m(), f.s("b")), f.s("c")),
        (["M", "M>b"], "c"),
        (["!", "!"], "c"),
        (["~", "x"], "c"),
    ),
    "end of a chain in a group": Shape(
        lambda f: group(chain(f.s("a"), f.m()), f.s("c")),
        (["a", "M"], "c"),
        (["a", "!"], "c"),
        given="a",
    ),
    "group at the end": Shape(
        lambda f: chain(f.s("a"), group(f.s("b"), f.m())),
        ["a", ("a>b", "M")],
        ["a", ("a>b", "!")],
        given="a",
    ),
    "before a group": Shape(
        lambda f: chain(f.m(), group(f.s("b"), f.s("c"))),
        ["M", ("M>b", "M>c")],
        ["!", ("!", "!")],
        ["~", ("x", "x")],
    ),
    "before two groups": Shape(
        lambda f: chain(f.m(), group(f.s("a"), f.s("b")), group(f.s("c"), f.s("d"))),
        ["M", ("M>a", "M>b"), ("[M>a,M>b]>c", "[M>a,M>b]>d")],
        ["!", ("!", "!"), ("!", "!")],
        ["~", ("x", "x"), ("x", "x")],
    ),
    "in the first of two groups": Shape(
        lambda f: chain(group(f.s("a"), f.m()), group(f.s("c"), f.s("d"))),
        [("a", "M"), ("[a,M]>c", "[a,M]>d")],
        [("a", "!"), ("!", "!")],  # Celery has a group fail with the cause
    ),
    "chord in a group": Shape(
        lambda f: group(chord([f.s("a"), f.m()], f.s("b")), f.s("c")),
        ([("a", "M"), "[a,M]>b"], "c"),
        ([("a", "!"), "#"], "c"),
    ),
}
HEADERS = {
    "header": Shape(
        lambda f: chord([f.s("a"), f.m()], f.s("z").on_error(f.caught())),
        [("a", "M"), "[a,M]>z"],
        [("a", "!"), "#"],
        calls={"failed": "caught"},
    ),
    "two in a header": Shape(
        lambda f: chord([f.m(), f.s("a"), f.m("n")], f.s("z").on_error(f.caught())),
        [("M", "a", "N"), "[M,a,N]>z"],
        [("!", "a", "!"), "#"],
        calls={"failed": "caught"},
    ),
    "whole header": Shape(
        lambda f: chord([f.m(), f.m("n")], f.s("z").on_error(f.told())),
        [("M", "N"), "[M,N]>z"],
        [("!", "!"), "#"],
        calls={"failed": "told"},
    ),
    "replaced in a header": Shape(
        lambda f: chord([f.s("a"), f.becomes_m()], f.s("z")),
        [("a", "M"), "[a,M]>z"],
        [("a", "!"), "#"],
    ),
    "header and more": Shape(
        lambda f: chain(chord([f.s("a"), f.m()], f.s("z")), f.s("c")),
        [("a", "M"), "[a,M]>z", "[a,M]>z>c"],
        [("a", "!"), "#", "#"],
    ),
    "header before a chain": Shape(
        lambda f: chord([f.s("a"), f.m()], chain(f.s("c"), f.s("d"))),
        [("a", "M"), "[a,M]>c>d"],
        [("a", "!"), "#"],
        unseen={"ran": "c", "passed": "c", "stopped": "c"},
    ),
    "header before a group": Shape(
        lambda f: chord([f.s("a"), f.m()], group(f.s("c"), f.s("d"))),
        [("a", "M"), ("[a,M]>c", "[a,M]>d")],
        [("a", "!"), ("!", "!")],
    ),
    "header before a chord": Shape(
        lambda f: chord([f.s("a"), f.m()], chain(group(f.s("c"), f.s("d")), f.s("e"))),
        [("a", "M"), "[[a,M]>c,[a,M]>d]>e"],
        [("a", "!"), "#"],
        unseen={"ran": "cd", "passed": "cd", "stopped": "cd"},
    ),
    "header, body, group": Shape(
        lambda f: chain(chord([f.s("a"), f.m()], f.s("b")), group(f.s("c"), f.s("d"))),
        [("a", "M"), "[a,M]>b", ("[a,M]>b>c", "[a,M]>b>d")],
        [("a", "!"), "#", ("#", "#")],
    ),
    "group in a chain": Shape(
        lambda f: chain(f.s("a"), group(f.s("b"), f.m()), f.s("d")),
        ["a", ("a>b", "M"), "[a>b,M]>d"],
        ["a", ("a>b", "!"), "#"],
        given="a",
    ),
}
BODIES = {
    "body": Shape(
        lambda f: chord([f.s("a"), f.s("b")], f.m().on_error(f.caught())),
        [("a", "b"), "M"],
        [("a", "b"), "!"],
        given="[a,b]",
        calls={"failed": "caught"},
    ),
    "body and more": Shape(
        lambda f: chain(chord([f.s("a"), f.s("b")], f.m()), f.s("c"), f.s("d")),
        [("a", "b"), "M", "M>c", "M>c>d"],
        [("a", "b"), "!", "!", "!"],
        [("a", "b"), "~", "x", "x"],
        given="[a,b]",
    ),
    "body of a chain": Shape(
        lambda f: chord([f.s("a"), f.s("b")], chain(f.s("c"), f.m(), f.s("d"))),
        [("a", "b"), "M>d"],
        [("a", "b"), "!"],
        [("a", "b"), "x"],
        given="[a,b]>c",
        unseen={"ran": "cm", "passed": "c", "stopped": "c", "failed": "c"},
    ),
    "body of a group in a chain": Shape(
        lambda f: chain(f.s("a"), group(f.s("b"), f.s("c")), f.m()),
        ["a", ("a>b", "a>c"), "M"],
        ["a", ("a>b", "a>c"), "!"],
        given="[a>b,a>c]",
    ),
    "before a chord": Shape(
        lambda f: chain(f.m(), group(f.s("b"), f.s("c")), f.s("d").on_error(f.caught())),
        ["M", ("M>b", "M>c"), "[M>b,M>c]>d"],
        ["!", ("!", "!"), "!"],
        ["~", ("x", "x"), "x"],
    ),
    "before a chord and more": Shape(
        lambda f: chain(
            f.m(), chord([f.s("b"), f.s("c")], chain(f.s("d"), f.s("e"))), f.s("g"), f.s("h")
        ),
        [
            "M",
            ("M>b", "M>c"),
            "[M>b,M>c]>d",
            "[M>b,M>c]>d>e",
            "[M>b,M>c]>d>e>g",
            "[M>b,M>c]>d>e>g>h",
        ],
        ["!", ("!", "!"), "!", "!", "!", "!"],
        ["~", ("x", "x"), "x", "x", "x", "x"],
    ),
    "before two chords": Shape(
        lambda f: chain(
            f.m(), chord([f.s("a"), f.s("b")], f.s("c")), chord([f.s("d"), f.s("e")], f.s("g"))
        ),
        [
            "M",
            ("M>a", "M>b"),
            "[M>a,M>b]>c",
            ("[M>a,M>b]>c>d", "[M>a,M>b]>c>e"),
            "[[M>a,M>b]>c>d,[M>a,M>b]>c>e]>g",
        ],
        ["!", ("!", "!"), "!", ("!", "!"), "!"],
        ["~", ("x", "x"), "x", ("x", "x"), "x"],
    ),
}
NESTED = {
    "chord of chains": Shape(
        lambda f: chord(
            [chain(f.m(), f.s("b")), chain(f.s("c"), f.s("d"))], f.s("e").on_error(f.caught())
        ),
        [(["M", "M>b"], ["c", "c>d"]), "[M>b,c>d]>e"],
        [(["!", "!"], ["c", "c>d"]), "#"],
        [(["~", "x"], ["c", "c>d"]), "#"],
        calls={"failed": "caught", "stopped": "caught"},
    ),
    "chord of chains, at an end": Shape(
        lambda f: chord([chain(f.s("a"), f.m()), f.s("c")], f.s("e")),
        [(["a", "M"], "c"), "[M,c]>e"],
        [(["a", "!"], "c"), "#"],
        given="a",
    ),
    "chord of chains and more": Shape(
        lambda f: chain(chord([chain(f.m(), f.s("b")), f.m("n")], f.s("d")), f.s("e")),
        [(["M", "M>b"], "N"), "[M>b,N]>d", "[M>b,N]>d>e"],
        [(["!", "!"], "!"), "#", "#"],
        [(["~", "x"], "~"), "#", "#"],
    ),
    "replaced in a chord of chains": Shape(
        lambda f: chord([chain(f.becomes_m(), f.s("b")), f.s("c")], f.s("e")),
        [(["M", "M>b"], "c"), "[M>b,c]>e"],
        [(["!", "!"], "c"), "#"],
        [(["~", "x"], "c"), "#"],
    ),
    "chord of a chain with a group": Shape(
        lambda f: chord([chain(f.m(), group(f.s("b"), f.s("c"))), f.s("d")], f.s("e")),
        [(["M", ("M>b", "M>c")], "d"), "[[M>b,M>c],d]>e"],
        [(["!", ("!", "!")], "d"), "#"],
        [(["~", ("x", "x")], "d"), "#"],
    ),
    "chord of a chain with a chord": Shape(
        lambda f: chord([chain(f.m(), group(f.s("b"), f.s("c")), f.s("d")), f.s("e")], f.s("g")),
        [(["M", ("M>b", "M>c"), "[M>b,M>c]>d"], "e"), "[[M>b,M>c]>d,e]>g"],
        [(["!", ("!", "!"), "!"], "e"), "#"],
        [(["~", ("x", "x"), "x"], "e"), "#"],
    ),
    "chord in a chord": Shape(
        lambda f: chord([chord([f.s("a"), f.m()], f.s("b")), f.s("c")], f.s("d")),
        [([("a", "M"), "[a,M]>b"], "c"), "[[a,M]>b,c]>d"],
        [([("a", "!"), "#"], "c"), "#"],
    ),
    "body of a chord in a chord": Shape(
        lambda f: chord([chord([f.s("a"), f.s("b")], f.m()), f.s("c")], f.s("d")),
        [([("a", "b"), "M"], "c"), "[M,c]>d"],
        [([("a", "b"), "!"], "c"), "#"],
        given="[a,b]",
    ),
    "chain in a chord in a chord": Shape(
        lambda f: chord([chord([f.s("a"), chain(f.m(), f.s("b"))], f.s("e")), f.s("c")], f.s("d")),
        [([("a", ["M", "M>b"]), "[a,M>b]>e"], "c"), "[[a,M>b]>e,c]>d"],
        [([("a", ["!", "!"]), "#"], "c"), "#"],
        [([("a", ["~", "x"]), "#"], "c"), "#"],
    ),
    "chord and more in a chord": Shape(
        lambda f: chord(
            [chain(chord([f.s("a"), f.m()], f.s("b")), f.s("e")), f.s("c")],
            f.s("d").on_error(f.caught()),
        ),
        [([("a", "M"), "[a,M]>b", "[a,M]>b>e"], "c"), "[[a,M]>b>e,c]>d"],
        [([("a", "!"), "#", "#"], "c"), "#"],
        calls={"failed": "caught"},
    ),
    "chord and a group in a chord": Shape(
        lambda f: chord(
            [chain(chord([f.s("a"), f.m()], f.s("b")), group(f.s("e"), f.s("g"))), f.s("c")],
            f.s("d"),
        ),
        [([("a", "M"), "[a,M]>b", ("[a,M]>b>e", "[a,M]>b>g")], "c"), "[[[a,M]>b>e,[a,M]>b>g],c]>d"],
        [([("a", "!"), "#", ("#", "#")], "c"), "#"],
    ),
    "three chords deep": Shape(
        lambda f: chord(
            [chord([chord([f.s("a"), f.m()], f.s("b")), f.s("c")], f.s("d")), f.s("e")], f.s("g")
        ),
        [([([("a", "M"), "[a,M]>b"], "c"), "[[a,M]>b,c]>d"], "e"), "[[[a,M]>b,c]>d,e]>g"],
        [([([("a", "!"), "#"], "c"), "#"], "e"), "#"],
    ),
    "everything": Shape(
        lambda f: chain(
            f.s("a"),
            chord([chain(f.m(), f.s("b")), f.s("c")], chain(f.s("d"), group(f.s("e"), f.s("g")))),
            f.s("h"),
        ),
        [
            "a",
            (["M", "M>b"], "a>c"),
            "[M>b,a>c]>d",
            ("[M>b,a>c]>d>e", "[M>b,a>c]>d>g"),
            "[[M>b,a>c]>d>e,[M>b,a>c]>d>g]>h",
        ],
        ["a", (["!", "!"], "a>c"), "#", ("#", "#"), "#"],
        ["a", (["~", "x"], "a>c"), "#", ("#", "#"), "#"],
        given="a",
    ),
}
SHAPES = {**SINGLE, **CHAINS, **GROUPS, **HEADERS, **BODIES, **NESTED}


def played(name):
    """
    Return what is played on a stage: pairs of a policy and a shape.

    Every shape meets every policy, and every stage, and every stage every policy: a conflict takes
    one half of the pairs, an outage the other, and what only one of them has is all its own. With
    a setting, each shape meets one policy.
    """
    pairs = []
    for n, shape in enumerate(SHAPES):
        for policy in STAGES[name]:
            m = list(POLICIES).index(policy)
            if name == "by_setting":
                is_theirs = policy != list(BY_SETTING)[n % len(BY_SETTING)]
            else:
                is_shared = name != "polled" and policy in BY_CONFLICT and policy in BY_OUTAGE
                is_theirs = is_shared and (n + m + (name == "conflict")) % 2
            if not is_theirs or (name == "conflict" and shape == "stamped"):
                pairs.append((policy, shape))
    return pairs


PLAYED = {name: played(name) for name in STAGES}


# -- how a workflow ends -----------------------------------------------------------------


class Outcome(NamedTuple):
    """
    How a workflow ended, or is to end.

    Attributes:
        ends: How every result did, in the form of the workflow.
        ran: How often the body of each task ran.
        calls: Error callbacks, sorted.
        got: What ``get()`` on the last result returns; ``fails`` if it raises what one of the
            results ended with, ``hangs`` if it does neither.
    """

    ends: Any
    ran: dict[str, int]
    calls: list[str]
    got: str


def expected(shape, becomes):
    ends = {
        "ran": filled(shape.done, made_of([shape.given] if shape.given else [], "m"), "n"),
        "passed": filled(shape.done, "~", "~"),
        "stopped": filled(shape.stopped or shape.done, "~", "~"),
        "failed": shape.failed,
    }[becomes]
    labels = [end[-1] for end in leaves(ends) if end != "x" and end[-1].isalpha()]
    return Outcome(
        ends=ends,
        ran=dict(Counter([*labels, *shape.unseen.get(becomes, "")])),
        calls=shape.calls.get(becomes, "").split(),
        got=last_of(ends),
    )


def filled(ends, m, n):
    if isinstance(ends, str):
        return ends.replace("M", m).replace("N", n)
    return type(ends)(filled(end, m, n) for end in ends)


def leaves(ends):
    return [ends] if isinstance(ends, str) else [leaf for end in ends for leaf in leaves(end)]


def last_of(ends):
    if isinstance(ends, list):
        return last_of(ends[-1])
    if isinstance(ends, tuple):
        each = [last_of(end) for end in ends]
        return "fails" if "fails" in each else shown(each)
    return "fails" if ends in ERRORS else ends


class Play:
    """
    Workflows on a stage, published at once and looked at when all of them have ended.

    Attributes:
        it: The stage.
        cause: ``"conflict"`` or ``"unavailable"``.
        results: What a client has in hand, by the name of the workflow.
        released: When locks were to be had [s, as `support.events.now`].
    """

    def __init__(self, it, cause):
        self.it, self.cause = it, cause
        self.results = {}
        self.released = None
        self._events = {}

    def publish(self, name, policy, make):
        self.results[name] = make(Flow(self.it.app, name, policy)).apply_async()

    def wait_until_ready(self, names):
        ids = {name: ids_in(self.results[name]) for name in names}

        def left():
            metas = self.metas([each for mine in ids.values() for each in mine])
            ready = {each for each, meta in metas.items() if meta.get("status") in READY}
            return {name for name, mine in ids.items() if not ready.issuperset(mine)}

        wait_for_all("end of results", left)

    def wait_until_refused(self, names):
        def left():
            attempts = Counter(event["name"] for event in read(self.it.events, "attempt"))
            return {name for name in names if attempts[f"{name} m"] < 2}

        wait_for_all("second attempts", left)

    def wait_until_nothing_moves(self):
        self.it.wait_until_quiet()
        inspect = self.it.app.control.inspect(timeout=1)
        eventually(lambda: not any((inspect.active() or {"nobody": 1}).values()), "idle worker")
        self._events = defaultdict(list)
        for event in read(self.it.events):
            self._events[event.get("flow") or event["name"].rpartition(" ")[0]].append(event)

    def metas(self, ids):
        """Return what is stored of each result, past Celery's own reading of it."""
        backend = self.it.app.backend
        stored = backend.mget([backend.get_key_for_task(each) for each in ids])
        metas = {}
        for each, payload in zip(ids, stored, strict=True):
            metas[each] = {}
            with contextlib.suppress(ValueError):  # a file that is being written
                metas[each] = json.loads(payload or "{}")
        return metas

    def outcome(self, name, patience=60.0):
        result = self.results[name]
        mine = self._events.get(name, [])
        started = Counter(e["name"].rpartition(" ")[2] for e in mine if e["kind"] == "start")
        ends = self.ends_of(name, result, self.metas(ids_in(result)))
        got = self.got(result, patience)
        return Outcome(
            ends=ends,
            ran=dict(started),
            calls=sorted(event["name"] for event in mine if event["kind"] == "call"),
            # The error of an earlier result is told to those who wait for a later one.
            got="fails" if got in ERRORS and got in leaves(ends) else got,
        )

    def ends_of(self, name, result, metas):
        ends = []
        while result is not None:
            if isinstance(result, GroupResult):
                ends.insert(0, tuple(self.ends_of(name, each, metas) for each in result.results))
            else:
                ends.insert(0, self.end_of(name, metas[result.id]))
            result = result.parent
        return ends if len(ends) > 1 else ends[0]

    def end_of(self, name, meta):
        status, value = meta.get("status"), meta.get("result")
        if status == "SUCCESS":
            if isinstance(value, dict) and value["skipped"] != self.cause:
                return str(value)
            is_own = not isinstance(value, dict) or value["lock"] in (f"{name} m", f"{name} n")
            return shown(value) if is_own else str(value)
        if status == "FAILURE":
            return self.error(value["exc_type"])
        return "x" if status == "REVOKED" else status or "PENDING"

    def got(self, result, patience):
        try:
            return shown(result.get(timeout=patience))
        except NotReadyError:
            return "hangs"
        except Exception as error:  # noqa: BLE001  that of the workflow, whatever it is
            return self.error(type(error).__name__)

    def error(self, kind):
        own = {"conflict": "LockTaken", "unavailable": "QuorumUnavailable"}[self.cause]
        known = {own: "!", "ChordError": "#", "TaskRevokedError": "x", "ValueError": "?"}
        return known.get(kind, kind)


def wait_for_all(what, left):
    missing = set()

    def none_left():
        missing.clear()
        missing.update(left())
        return not missing

    try:
        eventually(none_left, what, timeout=200, every=0.5)
    except AssertionError as late:
        raise AssertionError(f"{late}: {sorted(missing)}") from None


def ids_in(result):
    """Return the id of every single result that hangs together with *result*."""
    ids = []
    while result is not None:
        if isinstance(result, GroupResult):
            ids += [each for member in result.results for each in ids_in(member)]
        else:
            ids.append(result.id)
        result = result.parent
    return ids


# -- the stages --------------------------------------------------------------------------


@contextlib.contextmanager
def conflicts(folder, kind, twins=(), **conf):
    """All locks that refused tasks ask for are held, until all is over but for those that wait."""
    conf = {"by_setting": False, **LASTING, "redlock_max_ttl": 900.0, **conf}
    with stage(__file__, folder, nodes=3, **conf) as it:
        it.worker(concurrency=4)
        play, locks = Play(it, "conflict"), it.locks()
        becomes = STAGES[kind]
        names = {f"{shape} {policy}": (shape, policy) for policy, shape in PLAYED[kind]}
        for shape, policy in twins:
            names[f"{shape} {policy}"] = shape, policy
        # Nobody has them; a node may be late for one of so many.
        ask = {"ttl": 900, "wait": 60.0}
        leases = [locks.acquire(f"{name} {task}", **ask) for name in names for task in "mn"]
        for name, (shape, policy) in names.items():
            play.publish(name, policy, SHAPES[shape].make)
        waiting = [name for name, (_, p) in names.items() if becomes.get(p) == "ran"]
        ending = [name for name, (_, policy) in names.items() if policy in becomes]
        play.wait_until_ready([name for name in ending if name not in waiting])
        play.wait_until_refused(waiting)
        play.released = now()
        for lease in leases:
            locks.release(lease)
        locks.close()
        play.wait_until_ready(waiting)
        play.wait_until_nothing_moves()
        yield play


@contextlib.contextmanager
def without_quorum(folder):
    """Two of three lock nodes are dead, until all is over but for those that wait."""
    with stage(__file__, folder, nodes=3, by_setting=False, **LASTING) as it:
        # No threads: whether a join is allowed is a variable of the process in Celery 5.7, and two
        # chords that are joined at once fail with "Never call result.get() within a task".
        it.worker(concurrency=4)
        for node in it.nodes[:2]:
            node.kill()
        play, becomes = Play(it, "unavailable"), BY_OUTAGE
        names = {f"{shape} {policy}": (shape, policy) for policy, shape in PLAYED["outage"]}
        for name, (shape, policy) in names.items():
            play.publish(name, policy, SHAPES[shape].make)
        unlocked = [name for name, (_, p) in names.items() if p == "run_unlocked"]
        waiting = [n for n, (_, p) in names.items() if becomes[p] == "ran" and n not in unlocked]
        play.wait_until_ready([name for name in names if name not in waiting])
        play.wait_until_refused(waiting)
        play.released = now()
        for node in it.nodes[:2]:
            node.start()
        it.bootstrap()
        play.wait_until_ready(waiting)
        play.wait_until_nothing_moves()
        yield play


#: A naive policy, the shape it does not stand, and how that is seen.
TWINS = [
    ("naive_ignore", "alone", "ends", "STARTED"),
    ("naive_ignore", "alone", "got", "hangs"),
    ("naive_ignore", "first", "ends", ["STARTED", "PENDING", "PENDING"]),
    ("naive_ignore", "header", "ends", [("a", "STARTED"), "PENDING"]),
    ("naive_ignore", "header", "got", "hangs"),
    ("naive_none", "alone", "ends", "None"),
    ("naive_none", "header", "got", "[a,None]>z"),
    ("naive_value", "first", "ends", ["~", "~>b", "~>b>c"]),
    ("naive_value", "first", "ran", {"b": 1, "c": 1}),
    ("naive_forget", "first", "ends", ["~", "PENDING", "PENDING"]),
    ("naive_forget", "first", "got", "hangs"),
    ("naive_forget", "chord of chains", "got", "hangs"),
    ("naive_fail", "before a group", "ends", ["!", ("PENDING", "PENDING")]),
    ("naive_fail", "before a group", "got", "hangs"),
    ("naive_fail", "chord in a chord", "ends", [([("a", "!"), "#"], "c"), "PENDING"]),
    ("naive_fail", "chain of links", "ends", ["!", "PENDING", "PENDING"]),
    ("naive_twice", "header", "ran", {"a": 1, "m": 2, "z": 1}),
]


@pytest.fixture(scope="module")
def conflict(tmp_path_factory):
    twins = {(shape, policy) for policy, shape, *_ in TWINS}
    with conflicts(tmp_path_factory.mktemp("conflict"), "conflict", twins) as play:
        yield play


@pytest.fixture(scope="module")
def outage(tmp_path_factory):
    with without_quorum(tmp_path_factory.mktemp("outage")) as play:
        yield play


@pytest.fixture(scope="module")
def polled(tmp_path_factory):
    """A result backend that does not count the members of a chord."""
    folder = tmp_path_factory.mktemp("polled")
    with conflicts(folder, "polled", result_backend=f"file://{folder}") as play:
        yield play


@pytest.fixture(scope="module")
def by_setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_setting")
    with conflicts(folder, "by_setting", by_setting=True) as play:
        yield play


@pytest.fixture
def play(request):
    return request.getfixturevalue(request.param)


#: How a refused task ends that does not run.
REFUSED = {"ran": "m", "passed": "~", "stopped": "~", "failed": "!"}

on_every_stage = pytest.mark.parametrize("play", STAGES, indirect=True)
on_a_conflict = pytest.mark.parametrize("play", ["conflict"], indirect=True)


@pytest.mark.parametrize(
    ("play", "policy", "shape"),
    [(name, policy, shape) for name, played in PLAYED.items() for policy, shape in played],
    indirect=["play"],
)
def test_every_workflow_ends_as_its_policy_says(play, request, policy, shape):
    becomes = STAGES[request.node.callspec.params["play"]][policy]
    assert play.outcome(f"{shape} {policy}") == expected(SHAPES[shape], becomes)


@on_a_conflict
@pytest.mark.parametrize(("policy", "shape", "which", "found"), TWINS)
def test_a_naive_policy_is_found_out(play, policy, shape, which, found):
    """The same look at the same workflows shows what hangs, lies or runs where it must not."""
    becomes = (
        "ran" if policy == "naive_twice" else "failed" if policy == "naive_fail" else "stopped"
    )
    outcome = play.outcome(f"{shape} {policy}", patience=1.0)
    assert getattr(outcome, which) == found
    assert getattr(expected(SHAPES[shape], becomes), which) != found


@on_every_stage
def test_refused_tasks_ran_when_they_were_allowed_to(play):
    began = [e for e in read(play.it.events, "start") if e["name"].rpartition(" ")[2] in ("m", "n")]
    early = [e["name"] for e in began if e["at"] < play.released]
    assert not [name for name in early if not re.search("run_unlocked|naive", name)]
    if play.cause == "unavailable":
        assert [name for name in early if "run_unlocked" in name]


@on_every_stage
def test_nothing_is_left_behind(play):
    play.it.wait_until_quiet()
    assert play.it.keys("redlock:lock:*") == set()
    with redis.Redis.from_url(play.it.broker.url) as client:
        lasting = [key for key in client.scan_iter() if client.ttl(key) == -1]
    assert [key for key in lasting if not key.startswith(b"_kombu.")] == []


@on_a_conflict
def test_stamps_come_along_however_often_a_task_was_put_off(play):
    for policy in ("retry", "reschedule"):
        (ran,) = [e for e in read(play.it.events, "start") if e["name"] == f"stamped {policy} m"]
        assert ran["stamps"] == {"tenant": "acme"}


@on_a_conflict
@pytest.mark.parametrize("policy", ["skip", "fail"])
@pytest.mark.parametrize(
    "shape",
    [
        "alone",
        "before a group",
        "body and more",
        "chain of links",
        "chord of chains",
        "chord in a chord",
        "header before a chord",
    ],
)
def test_whoever_waits_already_is_told(play, policy, shape):
    """``get()`` that began before the end returns or raises, and does not wait for its timeout."""
    name = f"{shape} {policy} waited for"
    with play.it.held(f"{name} m"):
        play.publish(name, policy, SHAPES[shape].make)
        got = play.got(play.results[name], 100)
    due = expected(SHAPES[shape], BY_CONFLICT[policy]).got
    assert got in ERRORS if due == "fails" else got == due


@on_a_conflict
def test_a_chord_of_equal_members_ends_by_every_policy(play):
    def make(flow):
        return chord([flow.m(seconds=0.5) for _ in range(4)], flow.s("z"))

    names = {f"equal {policy}": becomes for policy, becomes in BY_CONFLICT.items()}
    for name in names:
        play.publish(name, name.split()[1], make)
    play.wait_until_ready(names)
    play.wait_until_nothing_moves()
    assert overlaps(e for e in read(play.it.events) if e.get("name", "").endswith(" m")) == []
    refused = 0
    for name, becomes in names.items():
        outcome = play.outcome(name)
        header, end = outcome.ends
        ran = header.count("m")
        assert ran >= 1
        assert Counter(header) - Counter(m=ran) == Counter({REFUSED[becomes]: 4 - ran})
        assert end == ("#" if "!" in header else f"{shown(header)}>z")
        assert outcome.ran == {"m": ran, **({} if end == "#" else {"z": 1})}
        refused += 4 - ran
    assert refused >= 3, "too few met to prove anything"


@on_a_conflict
@pytest.mark.parametrize(
    ("shape", "chords"), [("chord of a chain with a group", 1), ("chord and a group in a chord", 2)]
)
def test_a_chord_may_learn_its_size_after_its_parts_have_failed(play, monkeypatch, shape, chords):
    """A publisher says it with the last part; those before have ended where it is slow."""
    backend, name, sizes = play.it.app.backend, f"{shape} fail late", []
    say = backend.set_chord_size

    def say_late(group_id, size):
        sizes.append(size)
        if len(sizes) == chords:  # of the outermost one
            play.it.wait_for_log(f"raised (un)?expected: .*{name} m", timeout=100)
        say(group_id, size)

    monkeypatch.setattr(backend, "set_chord_size", say_late)
    with play.it.held(f"{name} m"):
        play.publish(name, "fail", SHAPES[shape].make)
        play.wait_until_ready([name])
    assert play.outcome(name).ends == expected(SHAPES[shape], "failed").ends
