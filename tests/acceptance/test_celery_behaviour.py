"""With ``app.Task = RedlockTask`` Celery behaves as ever for tasks that do not meet each other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from celery import chain, chord, current_task, group, signals
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from celery.utils import uuid

from celery_redlock import RedlockTask
from support.events import read, record
from support.stage import stage
from support.versions import CELERY
from support.waiting import eventually

pytestmark = pytest.mark.long


def declare(app):
    """Declare tasks without a word about locks, all of them protected if the app says so."""
    if app.conf.get("everything_protected"):
        app.Task = RedlockTask
    declare_plain(app)
    declare_retrying(app)
    declare_special(app)
    declare_ends(app)
    if "EVENTS" in os.environ:
        tell_of_signals()


def declare_plain(app):
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

    @app.task(name="tell", bind=True, shared=False)
    def tell(self, what):
        return {key: value for key, value in vars(self.request).items() if key in STEADY}


#: What a request has that is the same in every run.
STEADY = {
    "argsrepr",
    "called_directly",
    "delivery_info",
    "expires",
    "headers",
    "ignore_result",
    "is_eager",
    "kwargsrepr",
    "lang",
    "replaced_task_nesting",
    "retries",
    "shadow",
    "soft_time_limit",
    "stamped_headers",
    "stamps",
    "task",
    "tenant",
    "time_limit",
    "timelimit",
}


def declare_ends(app):
    def end(self, way, what):
        record(os.environ["EVENTS"], "note", args=[what, way, self.request.retries])
        is_first = len(notes_of(os.environ["EVENTS"], what)) == 1
        if way in SLEEPING:
            sleep(way)
        elif way in KILLED:
            if is_first or way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        elif way == "hold":
            go = Path(os.environ["EVENTS"]).with_name(f"go {what}")
            eventually(go.exists, "word to go on", timeout=100)
        elif way in ERRORS:
            raise ERRORS[way]
        else:
            by_itself(self, way, what, is_first=is_first)
        return f"{way} over"

    app.task(name="end", bind=True, shared=False)(end)
    app.task(name="end_late", bind=True, shared=False, acks_late=True)(end)
    lost = {"acks_late": True, "reject_on_worker_lost": True}
    app.task(name="end_lost", bind=True, shared=False, **lost)(end)


SLEEPING = ("soft", "soft caught", "hard")
KILLED = ("killed", "killed once")
ERRORS = {
    "fail": ValueError("no"),
    "ignore": Ignore("no"),
    "reject": Reject("no", requeue=False),
    "exit": SystemExit(1),
}


def sleep(way):
    """Sleep until a limit ends it, which only one way survives."""
    try:
        time.sleep(60)  # the limit ends it
    except SoftTimeLimitExceeded:
        if way != "soft caught":
            raise


def by_itself(task, way, what, *, is_first):
    if way == "progress":
        task.update_state(state="PROGRESS", meta={"done": 1})
    if way == "replace":
        raise task.replace(task.app.tasks["total"].si([len(what), 7000]))
    if way == "retry" and not task.request.retries:
        # At once would be too soon: Celery might store RETRY over the result of the next try.
        raise task.retry(countdown=1)
    if way == "requeue" and is_first:
        raise Reject("not now", requeue=True)


TASK_SIGNALS = (
    "before_task_publish",
    "after_task_publish",
    "task_received",
    "task_prerun",
    "task_success",
    "task_failure",
    "task_retry",
    "task_revoked",
    "task_internal_error",
    "task_postrun",
)
MAIN = os.getpid()


def which_run():
    """Return which run of a task this is: after how many retries and replacements."""
    request = current_task.request if current_task else None
    return [request.retries, request.replaced_task_nesting or 0] if request else [0, 0]


def tell_of_signals():
    for name in TASK_SIGNALS:

        def receive(sender=None, name=name, **told):
            told_id = told.get("task_id") or (told.get("headers") or {}).get("id")
            if told_id is None:
                request = told.get("request") or sender.request
                told_id = request.id
            record(
                os.environ["EVENTS"],
                "signal",
                id=told_id,
                name=name,
                where="parent" if os.getpid() == MAIN else "child",
                run=which_run(),
                told=[str(told.get(key)) for key in ("state", "expired", "terminated", "signum")],
            )

        getattr(signals, name).connect(receive, weak=False)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    same = {"result_extended": True, "worker_send_task_events": True, "redlock_ttl": 120.0}
    same |= {"redlock_max_ttl": 120.0, "redlock_node_timeout": 1.0}
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "protected")]
    with (
        stage(__file__, folders[0], nodes=0, redlock_nodes=[], **same) as plain,
        stage(__file__, folders[1], nodes=3, everything_protected=True, **same) as protected,
    ):
        for it in (plain, protected):
            it.worker(concurrency=2)
        assert not isinstance(plain.task("add"), RedlockTask)
        assert isinstance(protected.task("add"), RedlockTask)
        yield plain, protected


def ends(result):
    """Return how *result* ends, in words that are the same in every run."""
    result.get(timeout=100, propagate=False)
    return result.state, repr(result.result)


def ends_of_all(result):
    found = []
    while result is not None:
        found.append(ends(result))
        result = result.parent
    return found


def notes_of(events, what):
    return [event["args"] for event in read(events, "note") if event["args"][0] == what]


def notes(it, what, times):
    return eventually(
        lambda: found if len(found := notes_of(it.events, what)) >= times else None,
        f"{times} notes about {what}",
        timeout=100,
    )


def groups(it):
    add, fail = it.task("add"), it.task("fail")
    whole = group(add.s(n, n) for n in range(5)).apply_async()
    broken = group(add.s(7, 7), fail.s("group")).apply_async()
    return whole.get(timeout=100), [ends(result) for result in broken]


def chords(it):
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
        whole.get(timeout=100),
        (state, error.partition("raised")[2]),
        chains.get(timeout=100),
        len(notes(it, "chord error", 1)),
    )


def chains(it):
    add, total, fail = it.task("add"), it.task("total"), it.task("fail")
    whole = chain(add.s(1, 1), add.s(1), add.si(5, 50), add.s(2)).apply_async()
    broken = chain(add.s(2, 51), fail.s("chain"), add.s(1)).apply_async()
    # The last one never comes to be; whoever waits for it is told by its parent.
    with pytest.raises(ValueError, match="chain") as told:
        broken.get(timeout=100)
    through = chain(add.s(3, 1), group(add.s(n) for n in range(3)), total.s()).apply_async()
    return (
        ends_of_all(whole),
        repr(told.value),
        ends_of_all(broken.parent),
        through.get(timeout=100),
    )


def links(it):
    add, fail, note, note_error = (it.task(n) for n in ("add", "fail", "note", "note_error"))
    # Different arguments, as the same ones would be one lock name, and might rightly conflict.
    linked = add.apply_async((4, 60), link=[note.si("link one"), note.si("link two"), add.s(1)])
    failed = fail.apply_async(("linked",), link_error=note_error.s("link error"))
    silent = add.apply_async((4, 61), link_error=note_error.s("no link error"))
    found = (ends(linked), ends(failed), ends(silent))
    both = notes(it, "link one", 1), notes(it, "link two", 1)
    return found, both, notes(it, "link error", 1), len(linked.children)


def results_ignored(it):
    forgotten = [it.task("forget").delay("ignored")]
    if CELERY >= (5, 6):  # before, the task alone has a say, not its caller
        forgotten.append(it.task("add").apply_async((1, 70), ignore_result=True))
    ran = notes(it, "ignored", 1)
    it.wait_until_quiet()
    stored = [it.meta(result.id) for result in forgotten]
    if CELERY >= (5, 6):
        stored.append(ends(it.task("forget").apply_async(("kept",), ignore_result=False)))
    return ran, stored


def manual_retries(it):
    tries, tries_for = it.task("tries"), it.task("tries_for")
    found = [ends(tries.delay(f"retry {n}", n)) for n in range(4)]
    counted = [notes(it, f"retry {n}", min(n, 2) + 1) for n in range(4)]
    caused = ends(tries_for.delay("retry for"))
    return [(s, r.partition("[")[0]) for s, r in found], counted, caused, notes(it, "retry for", 2)


def automatic_retries(it):
    found = [ends(it.task("retries").delay(f"auto {n}", n)) for n in range(4)]
    return found, [notes(it, f"auto {n}", min(n, 2) + 1) for n in range(4)]


def replacements(it):
    become, add = it.task("become"), it.task("add")
    alone = become.delay(1, 80)
    within = chain(add.s(1, 81), become.s(1), add.s(100)).apply_async()
    return alone.get(timeout=100), within.get(timeout=100)


def maps(it):
    add, total = it.task("add"), it.task("total")
    return (
        add.starmap([(1, 1), (1, 1), (2, 2)]).delay().get(timeout=100),
        total.map([[1, 2], [3, 4]]).delay().get(timeout=100),
        add.chunks([(n, n) for n in range(5)], 2).delay().get(timeout=100),
    )


def requests(it):
    where = it.task("where")
    return (
        where.apply_async(("alone",), headers={"tenant": "acme"}).get(timeout=100),
        chain(where.si("first"), where.si("second")).apply_async().get(timeout=100),
        group(where.si("a"), where.si("b")).apply_async().get(timeout=100),
    )


def expiry(it):
    late = it.task("note").apply_async(("late",), countdown=1, expires=0.5)
    return ends(late), [e for e in read(it.events, "note") if e["args"][0] == "late"]


def told(it, result):
    mine = [event for event in read(it.events, "signal") if event["id"] == result.id]
    mine.sort(key=lambda event: event["run"])  # a retry may begin before its cause is over
    return {
        where: [(e["name"], *e["run"], *e["told"]) for e in mine if e["where"] == where]
        for where in ("parent", "child")
    }


def messages(it):
    tell = it.task("tell")
    stamped = tell.si("stamped")
    stamped.stamp(customer="acme", stamped_headers=["customer"])
    found = [
        tell.apply_async(("headers",), headers={"tenant": "acme"}),
        stamped.apply_async(),
        tell.apply_async(("priority",), priority=3),
        tell.apply_async(("limits",), time_limit=300, soft_time_limit=200, expires=600),
        tell.apply_async(("shadow",), shadow="shown"),
        chain(tell.si("first"), tell.si("second").set(priority=5)).apply_async(priority=2),
    ]
    values = [result.get(timeout=100) for result in found]
    for value in values:
        value["expires"] = bool(value.get("expires"))
    return values


def states(it):
    result = it.task("end").delay("hold", "seen")
    notes(it, "seen", 1)
    started = eventually(lambda: it.meta(result.id), "a state")
    it.events.with_name("go seen").touch()
    found = started["status"], sorted(started["result"]), ends(result)
    progress = it.task("end").delay("progress", "progress")
    return found, ends(progress)


def revocations(it):
    end, control, never = it.task("end"), it.app.control, uuid()
    control.revoke(never)
    waiting = end.apply_async(
        ("return", "revoked"), countdown=12
    )  # long enough to be revoked before
    eventually(lambda: told(it, waiting)["parent"], "sign that it waits", timeout=100)
    waiting.revoke()
    eventually(
        lambda: {never, waiting.id} <= set(*(control.inspect().revoked() or {}).values()),
        "word of the revocations",
        timeout=100,
    )
    early = end.apply_async(("return", "revoked"), task_id=never)
    found = [ends(early), ends(waiting), notes_of(it.events, "revoked")]
    running = end.delay("hold", "terminated")

    def is_known_to_run():
        active = [task for tasks in (control.inspect().active() or {}).values() for task in tasks]
        return any(task["id"] == running.id and task["worker_pid"] for task in active)

    notes(it, "terminated", 1)
    eventually(is_known_to_run, "word that the task runs", timeout=100)
    running.revoke(terminate=True)
    ended, _ = ends(running)  # the word of why is chance: up to Celery 5.6 two places write it
    for result in (early, waiting, running):  # signals are sent once the state is stored
        eventually(
            lambda r=result: any(name == "task_revoked" for name, *_ in told(it, r)["parent"]),
            "signal of the revoke",
        )
    time.sleep(0.5)  # for what more might be sent
    return found, ended, [told(it, result)["parent"] for result in (early, waiting, running)]


def eager_runs(it):
    seen = []
    add, fail, total, tries, retries, become = (
        it.task(name) for name in ("add", "fail", "total", "tries", "retries", "become")
    )

    def apply():
        yield add.apply((1, 90))
        yield fail.apply(("eager",))
        yield from (tries.apply((f"eager {n}", n)) for n in range(4))
        yield from (retries.apply((f"eager auto {n}", n)) for n in range(4))
        yield become.apply((1, 91))
        yield chain(add.s(1, 92), add.s(1), become.s(5)).apply()
        yield from group(add.s(n, 93) for n in range(2)).apply().results
        yield chord([add.s(n, 94) for n in range(2)], total.s()).apply()
        yield add.apply((1, 95), link=add.s(1), link_error=add.s(2))
        yield it.task("tell").apply(("eager",), headers={"tenant": "acme"})

    receivers = {}
    for name in TASK_SIGNALS:
        receivers[name] = lambda sender=None, name=name, **_: seen.append((name, str(sender)))
        getattr(signals, name).connect(receivers[name], weak=False)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EVENTS", str(it.events))
            found = [(r.state, repr(r.result).partition("[")[0]) for r in apply()]
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    return [(name, sender.partition(" ")[0]) for name, sender in seen], found


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
    messages,
    states,
    revocations,
    eager_runs,
]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.__name__)
def test_a_protected_app_does_what_a_plain_one_does(both, workflow):
    plain, protected = both
    expected = workflow(plain)
    assert workflow(protected) == expected


# -- every end of a task ----------------------------------------------------------------

#: Ways to end, and what a task is published with.
ENDS = {
    "return": {},
    "fail": {},
    "retry": {},
    "replace": {},
    "ignore": {},
    "reject": {},
    "requeue": {},
    "exit": {},
    # So long that the body has begun by then.
    "soft": {"soft_time_limit": 4},
    "soft caught": {"soft_time_limit": 4},
    "hard": {"time_limit": 4},
    "killed": {},
}
READY = {"SUCCESS", "FAILURE", "REVOKED"}


class Witness(threading.Thread):
    """Sees the events that a stage's worker sends to whoever monitors it."""

    def __init__(self, it):
        super().__init__(daemon=True)
        self._app, self._seen = it.app, []
        self._receiver = None

    def __enter__(self):
        self.start()
        eventually(lambda: self._seen, "heartbeat of the worker", timeout=100)
        return self

    def __exit__(self, *_):
        self._receiver.should_stop = True
        self.join()

    def run(self):
        with self._app.connection_for_read() as connection:
            self._receiver = self._app.events.Receiver(connection, {"*": self._seen.append})
            self._receiver.capture(wakeup=False)

    def of(self, result):
        """Return the events about a task, in their order, without what differs in each run."""
        steady = ("type", "name", "args", "kwargs", "retries", "result", "exception", "signum")
        return [
            {key: event[key] for key in steady if key in event}
            for event in self._seen
            if event.get("uuid") == result.id and not event["type"].startswith("task-redlock-")
        ]


@pytest.fixture(scope="module")
def witnesses(both):
    with Witness(both[0]) as plain, Witness(both[1]) as protected:
        yield plain, protected


def stored(it, result):
    """Return what the result backend stores, without what differs from run to run."""
    drop = ("date_done", "task_id", "worker", "traceback", "parent_id", "group_id")
    meta = json.loads(re.sub(r"Job: \d+", "Job", json.dumps(it.meta(result.id))))
    found = {key: value for key, value in meta.items() if key not in drop}
    return {**found, "result": None} if found.get("status") == "STARTED" else found


def wait_for_the_end(it, witness, result, what, times):
    """Wait until nothing more can come of a task whose body is to run so many *times*."""
    notes(it, what, times)
    last_word = {"task-succeeded", "task-failed", "task-rejected", "task-revoked"}

    without_state = ["IGNORED", "REJECTED"]
    if CELERY < (5, 7) and what.endswith(" exit"):
        without_state.append("None")  # in words of a signal

    def is_over():
        last = told(it, result)["child"][-1]
        has_no_state = last[0] == "task_postrun" and last[3] in without_state
        return it.meta(result.id).get("status") in READY or has_no_state

    eventually(is_over, f"end of {what}", every=0.1)
    it.wait_until_quiet()
    if it.meta(result.id).get("status") in READY:
        eventually(
            lambda: last_word & {event["type"] for event in witness.of(result)},
            f"event that tells of the end of {what}",
            timeout=100,
        )
    time.sleep(0.5)  # for what more might be sent


def story_of(it, result, witness, way, what):
    story = {
        "notes": notes_of(it.events, what),
        "stored": stored(it, result),
        "signals": told(it, result),
        "events": witness.of(result),
    }
    if way == "hard":  # whether the child gets to say a last word is chance
        story["signals"]["child"] = [s for s in story["signals"]["child"] if s[0] == "task_prerun"]
    if way in ("retry", "replace"):  # the parent may hear of the next run before this one ends
        story["events"].sort(key=str)
    return story


@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("name", ["end", "end_late"])
def test_every_end_is_the_end_that_celery_makes_of_it(both, witnesses, name, way):
    what = f"{name} {way}"
    results = [it.task(name).apply_async((way, what), **ENDS[way]) for it in both]
    times = 2 if way == "retry" or what == "end_late requeue" else 1
    played = [*zip(both, results, witnesses, strict=True)]
    for it, result, witness in played:
        wait_for_the_end(it, witness, result, what, times)

    def are_the_same():
        stories[:] = [story_of(*one, way, what) for one in played]
        return stories[1] == stories[0]

    stories = []
    with contextlib.suppress(AssertionError):  # how they differ says more
        eventually(are_the_same, "the same story", every=0.1)
    assert stories[1] == stories[0]
    assert stories[0]["events"]
    assert stories[0]["signals"]["parent"]


def test_a_task_whose_process_was_lost_comes_again_as_ever(both):
    results = [it.task("end_lost").delay("killed once", "lost") for it in both]
    found = [(ends(r), notes(it, "lost", 2)) for it, r in zip(both, results, strict=True)]
    assert found[1] == found[0]
    assert found[0][0] == ("SUCCESS", "'killed once over'")


def test_no_lock_is_left_behind(both):
    _, protected = both
    protected.wait_until_quiet()
    protected.wait_until_free()
