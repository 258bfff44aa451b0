"""With ``app.Task = RedlockTask`` Celery behaves as ever for tasks that do not meet each other."""

from __future__ import annotations

import os

import pytest
from celery import chain, chord, group

from celery_redlock import RedlockTask
from support.events import read, record
from support.stage import stage
from support.waiting import eventually


def declare(app):
    """Declare tasks without a word about locks, all of them protected if the app says so."""
    if app.conf.get("everything_protected"):
        app.Task = RedlockTask
    declare_plain(app)
    declare_retrying(app)
    declare_special(app)


def declare_plain(app):
    """Declare tasks that return, fail and take notes."""

    @app.task(name="add", shared=False)
    def add(x, y):
        return x + y

    @app.task(name="total", shared=False)
    def total(values):
        return sum(values)

    @app.task(name="fail", shared=False)
    def fail(*args):
        raise ValueError(*args)

    @app.task(name="note", shared=False)
    def note(*args):
        record(os.environ["EVENTS"], "note", args=[str(arg) for arg in args])

    @app.task(name="note_error", shared=False)
    def note_error(request, error, traceback, what):
        record(os.environ["EVENTS"], "note", args=[what, repr(error), request.args])


def declare_retrying(app):
    """Declare tasks that try again."""

    @app.task(name="tries", bind=True, shared=False, max_retries=2, default_retry_delay=0)
    def tries(self, what, enough):
        record(os.environ["EVENTS"], "note", args=[what, self.request.retries])
        if self.request.retries < enough:
            raise self.retry(countdown=0)
        return self.request.retries

    @app.task(name="tries_for", bind=True, shared=False, max_retries=1)
    def tries_for(self, what):
        record(os.environ["EVENTS"], "note", args=[what, self.request.retries])
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            raise self.retry(exc=error, countdown=0) from None

    @app.task(
        name="retries",
        bind=True,
        shared=False,
        autoretry_for=(KeyError,),
        max_retries=2,
        retry_backoff=False,
        default_retry_delay=0,
    )
    def retries(self, what, enough):
        record(os.environ["EVENTS"], "note", args=[what, self.request.retries])
        if self.request.retries < enough:
            raise KeyError(what)
        return self.request.retries


def declare_special(app):
    """Declare tasks that become others, or tell of themselves."""

    @app.task(name="become", bind=True, shared=False)
    def become(self, x, y):
        add = self.app.tasks["add"]
        raise self.replace(chain(add.s(x, y), add.s(1)))

    @app.task(name="forget", shared=False, ignore_result=True)
    def forget(what):
        record(os.environ["EVENTS"], "note", args=[what])
        return what

    @app.task(name="where", bind=True, shared=False)
    def where(self, what):
        request = self.request
        return {
            "what": what,
            "has_parent": request.parent_id is not None,
            "is_root": request.root_id == request.id,
            "in_group": request.group is not None,
            "headers": request.headers,
            "called_directly": request.called_directly,
        }


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A plain app and a protected one, each with a worker of its own."""
    with (
        stage(__file__, tmp_path_factory.mktemp("plain"), nodes=0, redlock_nodes=[]) as plain,
        stage(
            __file__, tmp_path_factory.mktemp("protected"), nodes=3, everything_protected=True
        ) as protected,
    ):
        for it in (plain, protected):
            it.worker(concurrency=2)
        assert not isinstance(plain.task("add"), RedlockTask)
        assert isinstance(protected.task("add"), RedlockTask)
        yield plain, protected


def ends(result):
    """Return how *result* ends, in words that are the same in every run."""
    result.get(timeout=30, propagate=False)
    return result.state, repr(result.result)


def ends_of_all(result):
    """Return how a result and all before it end, the last first."""
    found = []
    while result is not None:
        found.append(ends(result))
        result = result.parent
    return found


def notes(it, what, times):
    """Wait for *times* notes about *what*, and return them in their order."""
    found = eventually(
        lambda: (
            matching
            if len(matching := [e for e in read(it.events, "note") if e["args"][0] == what])
            >= times
            else None
        ),
        f"{times} notes about {what}",
        timeout=30,
    )
    return [event["args"] for event in found]


def groups(it):
    """Values, and failures among them."""
    add, fail = it.task("add"), it.task("fail")
    whole = group(add.s(n, n) for n in range(5)).apply_async()
    broken = group(add.s(7, 7), fail.s("group")).apply_async()
    return whole.get(timeout=30), [ends(result) for result in broken]


def chords(it):
    """With values, with a failure in the header, of chains, and with an error callback."""
    add, total, fail, note = (it.task(name) for name in ("add", "total", "fail", "note_error"))
    whole = chord((add.s(n, 10) for n in range(5)), total.s()).apply_async()
    broken = chord([add.s(1, 20), fail.s("chord")], total.s()).apply_async()
    chains = chord(
        [chain(add.s(n, 30), add.s(1)) for n in range(3)], total.s() | add.s(1000)
    ).apply_async()
    told = chord(
        [add.s(1, 40), fail.s("told")], total.s().on_error(note.s("chord error"))
    ).apply_async()
    state, error = ends(broken)
    ends(told)
    return (
        whole.get(timeout=30),
        (state, error.partition("raised")[2]),
        chains.get(timeout=30),
        len(notes(it, "chord error", 1)),
    )


def chains(it):
    """To the end, broken in the middle, and through a group."""
    add, total, fail = it.task("add"), it.task("total"), it.task("fail")
    whole = chain(add.s(1, 1), add.s(1), add.si(5, 50), add.s(2)).apply_async()
    broken = chain(add.s(2, 1), fail.s("chain"), add.s(1)).apply_async()
    # The last one never comes to be; whoever waits for it is told by its parent.
    with pytest.raises(ValueError, match="chain") as told:
        broken.get(timeout=30)
    through = chain(add.s(3, 1), group(add.s(n) for n in range(3)), total.s()).apply_async()
    return (
        ends_of_all(whole),
        repr(told.value),
        ends_of_all(broken.parent),
        through.get(timeout=30),
    )


def links(it):
    """Called with the value of a success, and with the error of a failure."""
    add, fail, note, note_error = (it.task(n) for n in ("add", "fail", "note", "note_error"))
    # Different arguments, as the same ones would be one lock name, and might rightly conflict.
    linked = add.apply_async((4, 60), link=[note.si("link one"), note.si("link two"), add.s(1)])
    failed = fail.apply_async(("linked",), link_error=note_error.s("link error"))
    silent = add.apply_async((4, 61), link_error=note_error.s("no link error"))
    found = (ends(linked), ends(failed), ends(silent))
    both = notes(it, "link one", 1), notes(it, "link two", 1)
    return found, both, notes(it, "link error", 1), len(linked.children)


def results_ignored(it):
    """Nothing is stored; the body runs."""
    forgotten = [
        it.task("forget").delay("ignored"),
        it.task("add").apply_async((1, 70), ignore_result=True),
    ]
    ran = notes(it, "ignored", 1)
    it.wait_until_quiet()
    kept = it.task("forget").apply_async(("kept",), ignore_result=False)
    return ran, [it.meta(result.id) for result in forgotten], ends(kept)


def manual_retries(it):
    """As many as needed, as many as allowed, with and without a cause."""
    tries, tries_for = it.task("tries"), it.task("tries_for")
    found = [ends(tries.delay(f"retry {n}", n)) for n in range(4)]
    counted = [notes(it, f"retry {n}", min(n, 2) + 1) for n in range(4)]
    caused = ends(tries_for.delay("retry for"))
    return [(s, r.partition("[")[0]) for s, r in found], counted, caused, notes(it, "retry for", 2)


def automatic_retries(it):
    """``autoretry_for`` catches what the body raises, and gives up as it does for plain tasks."""
    found = [ends(it.task("retries").delay(f"auto {n}", n)) for n in range(4)]
    return found, [notes(it, f"auto {n}", min(n, 2) + 1) for n in range(4)]


def replacements(it):
    """A task becomes a chain, also in the middle of another one."""
    become, add = it.task("become"), it.task("add")
    alone = become.delay(1, 80)
    within = chain(add.s(1, 81), become.s(1), add.s(100)).apply_async()
    return alone.get(timeout=30), within.get(timeout=30)


def maps(it):
    """``map``, ``starmap`` and ``chunks`` call the body directly."""
    add, total = it.task("add"), it.task("total")
    return (
        add.starmap([(1, 1), (1, 1), (2, 2)]).delay().get(timeout=30),
        total.map([[1, 2], [3, 4]]).delay().get(timeout=30),
        add.chunks([(n, n) for n in range(5)], 2).delay().get(timeout=30),
    )


def requests(it):
    """What the body sees of its request."""
    where = it.task("where")
    return (
        where.apply_async(("alone",), headers={"tenant": "acme"}).get(timeout=30),
        chain(where.si("first"), where.si("second")).apply_async().get(timeout=30),
        group(where.si("a"), where.si("b")).apply_async().get(timeout=30),
    )


def expiry(it):
    """What comes too late is revoked, and does not run."""
    late = it.task("note").apply_async(("late",), countdown=1, expires=0.5)
    return ends(late), [e for e in read(it.events, "note") if e["args"][0] == "late"]


WORKFLOWS = [
    groups,
    chords,
    chains,
    links,
    results_ignored,
    manual_retries,
    automatic_retries,
    replacements,
    maps,
    requests,
    expiry,
]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.__name__)
def test_a_protected_app_does_what_a_plain_one_does(both, workflow):
    """States, values, errors, callbacks and the number of tries are the same."""
    plain, protected = both
    expected = workflow(plain)
    assert workflow(protected) == expected


def test_no_lock_is_left_behind(both):
    """After all that no node knows of a lock."""
    _, protected = both
    protected.wait_until_quiet()
    protected.conf["redlock_ttl"] = 30.0
    protected.wait_until_free()
