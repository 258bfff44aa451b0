"""Tasks in every form that users give them: protected, and called as Celery calls them."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
from celery import Task, current_task, signals
from celery.app import trace
from celery.worker.request import Request
from pydantic import BaseModel

from celery_redlock import RedlockTask
from celery_redlock.task import base as task_base
from support.events import body, overlaps, read, record
from support.stage import LASTING, stage
from support.versions import CELERY
from support.waiting import eventually
from support.worker import Worker

pytestmark = pytest.mark.long

# -- the tasks --------------------------------------------------------------------------

FORMS = {}
#: Forms whose ``__call__`` does not lead to ours, so that only the one around it protects them.
ENDS_THE_CALLS = set()


def form(function):
    """Note a function ``(app, base, name)`` that declares a task in one form."""
    FORMS[function.__name__] = function
    return function


def form_that_ends_the_calls(function):
    """Note one whose ``__call__`` is the last."""
    ENDS_THE_CALLS.add(function.__name__)
    return form(function)


#: Forms that the Celery of this run does not have.
NOT_YET = {"pydantic"} if CELERY < (5, 5) else set()


class PlainTask(Task):
    abstract = True


def declare(app):
    mine = RedlockTask if app.conf["protected"] else PlainTask
    if app.conf["mutant"] and "STAGE" in os.environ:  # in a worker, and not in the test run itself
        task_base.protect = lambda *_: None
    if app.conf["default_base"] == "app.Task":
        app.Task = mine
    app.conf.task_annotations = {"annotated": {"@__call__": around_call}}
    for name, declare_form in FORMS.items():
        if name not in NOT_YET:
            declare_form(app, mine, name)
    if app.conf["own_request"]:
        task_of(app, type("Own", (mine,), {"abstract": True, "Request": Request}), "own_request")
    takes_lock = app.conf["protected"] or app.conf.redlock_protect
    for policy in ("retry", "reschedule"):
        more = {"on_conflict": policy} if takes_lock else {}
        for name, kind in {"publishing": publishing(mine), "mixed": mixed(mine)}.items():
            # Long enough for whoever waits for the other to be seen doing so.
            task_of(app, kind, f"{name}_{policy}", default_retry_delay=2, **more)
    if "EVENTS" in os.environ:
        signals.task_postrun.connect(note_end, weak=False)
        trace.build_tracer = monitored(trace.build_tracer)


def note(what, *told):
    request = current_task.request
    ours = {"id": request.id, "retries": request.retries}
    record(os.environ["EVENTS"], "hook", **ours, what=what, told=repr(told))


def note_end(sender, task_id, state, retval, **_):
    ours = {"id": task_id, "retries": sender.request.retries}
    record(os.environ["EVENTS"], "over", **ours, state=state, told=repr(retval))


def work(name, way, request):
    with body(os.environ["EVENTS"], f"{name} {way}", id=request.id, retries=request.retries):
        if way == "hold":
            go = Path(os.environ["EVENTS"]).with_name(f"go {name}")
            eventually(go.exists, "word to go on", timeout=100, every=0.02)
        if way == "fail":
            raise ValueError(name)
        if way == "retry" and not request.retries:
            raise current_task.retry(countdown=0)
    return f"{name} {way}"


def task_of(app, mine, name, **options):
    @app.task(base=mine, name=name, shared=False, **options)
    def task(way):
        return work(name, way, current_task.request)


class Call:
    def __call__(self, *args, **kwargs):
        note("call", args, kwargs)
        return self.run(*args, **kwargs)


class DjangoLike(Task):
    """A base as other packages have it: with methods to publish, and a ``__call__``."""

    abstract = True

    def delay_on_commit(self, *args, **kwargs):
        return self.delay(*args, **kwargs)

    def apply_async(self, args=None, kwargs=None, **options):
        options["headers"] = {**(options.get("headers") or {}), "tenant": "acme"}
        return super().apply_async(args, kwargs, **options)

    def __call__(self, *args, **kwargs):
        note("tenant", self.request.headers and self.request.headers.get("tenant"))
        return self.run(*args, **kwargs)


@form
def function(app, mine, name):
    task_of(app, mine, name)


@form
def default_base(app, mine, name):
    task_of(app, None, name)


@form
def hooks(app, mine, name):
    class Hooks(mine):
        abstract = True

        @classmethod
        def on_bound(cls, app):
            pass

        def before_start(self, task_id, args, kwargs):
            note("before_start", task_id == self.request.id, args, kwargs)

        def on_success(self, retval, task_id, args, kwargs):
            note("on_success", retval, task_id == self.request.id, args, kwargs)

        def on_failure(self, exc, task_id, args, kwargs, einfo):
            note("on_failure", exc, task_id == self.request.id, args, kwargs, type(einfo))

        def on_retry(self, exc, task_id, args, kwargs, einfo):
            note("on_retry", exc, task_id == self.request.id, args, kwargs, type(einfo))

        def after_return(self, status, retval, task_id, args, kwargs, einfo):
            note("after_return", status, retval, task_id == self.request.id, args, kwargs)

    task_of(app, Hooks, name)


@form_that_ends_the_calls
def call_without_super(app, mine, name):
    class Own(mine):
        abstract = True

        def __call__(self, *args, **kwargs):
            note("call", args, kwargs)
            try:
                return self.run(*args, **kwargs)
            finally:
                note("called")

    task_of(app, Own, name)


@form
def call_with_super(app, mine, name):
    class Own(mine):
        abstract = True

        def __call__(self, *args, **kwargs):
            note("call", args, kwargs)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                note("called")

    task_of(app, Own, name)


@form_that_ends_the_calls
def mixin_first(app, mine, name):
    task_of(app, type("Mixed", (Call, mine), {"abstract": True}), name)


@form
def mixin_last(app, mine, name):
    task_of(app, type("Mixed", (mine, Call), {"abstract": True}), name)


def mixed(mine):
    return type("Mixed", (DjangoLike, mine), {"abstract": True})


@form_that_ends_the_calls
def other_base_first(app, mine, name):
    task_of(app, mixed(mine), name)


@form
def other_base_last(app, mine, name):
    task_of(app, type("Mixed", (mine, DjangoLike), {"abstract": True}), name)


@form_that_ends_the_calls
def subclass_of_subclass(app, mine, name):
    class Upper(mine):
        abstract = True

        def __call__(self, *args, **kwargs):
            note("upper")
            return self.run(*args, **kwargs)

    class Lower(Upper):
        abstract = True

        def __call__(self, *args, **kwargs):
            note("lower")
            return super().__call__(*args, **kwargs)

    task_of(app, Lower, name)


@form_that_ends_the_calls
def assigned(app, mine, name):
    task_of(app, mine, name)
    type(app.tasks[name]).__call__ = Call.__call__


@form_that_ends_the_calls
def annotated(app, mine, name):
    task_of(app, mine, name)


def around_call(_inner):
    def call(self, *args, **kwargs):
        note("annotated", args, kwargs)
        return self.run(*args, **kwargs)

    return call


@form
def watched(app, mine, name):
    """Get a ``__call__`` as Sentry does it."""

    class Watched(mine):
        abstract = True

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    task_of(app, Watched, name)


def monitored(build):
    """Return a `build_tracer` that wraps the class of ``watched``."""

    def build_tracer(name, task, *args, **kwargs):
        if name == "watched":
            inner = type(task).__call__

            @functools.wraps(inner)
            def span(*args, **kwargs):
                note("span")
                return inner(*args, **kwargs)

            type(task).__call__ = span
        return build(name, task, *args, **kwargs)

    return build_tracer


class Order(BaseModel):
    way: str


@form
def pydantic(app, mine, name):
    @app.task(base=mine, name=name, shared=False, pydantic=True)
    def task(order: Order):
        return work(name, order.way, current_task.request)


@form
def untyped(app, mine, name):
    task_of(app, mine, name, typing=False)


@form
def bound(app, mine, name):
    @app.task(base=mine, name=name, shared=False, bind=True)
    def task(self, way):
        return work(name, way, self.request)


@form
def ignoring_results(app, mine, name):
    task_of(app, mine, name, ignore_result=True)


@form
def autoretry(app, mine, name):
    @app.task(
        base=mine,
        name=name,
        shared=False,
        bind=True,
        autoretry_for=(KeyError,),
        # Not at once: RETRY is stored when that is published, over a quicker end.
        default_retry_delay=3,
        retry_backoff=False,
    )
    def task(self, way):
        if not self.request.retries:
            raise KeyError(name)
        return work(name, way, self.request)


@form
def registered(app, mine, name):
    run = lambda self, way: work(name, way, self.request)  # noqa: E731  the body of a class
    app.register_task(type("Work", (mine,), {"name": name, "run": run})())


@form_that_ends_the_calls
def registered_with_call(app, mine, name):
    run = lambda self, way: work(name, way, self.request)  # noqa: E731  the body of a class
    app.register_task(type("Work", (Call, mine), {"name": name, "run": run})())


@form_that_ends_the_calls
def without_run(app, mine, name):
    class Work(mine):
        def __call__(self, way):
            return work(name, way, self.request)

    Work.name = name
    app.register_task(Work())


def publishing(mine):
    class Publishing(mine):
        abstract = True

        def apply_async(self, args=None, kwargs=None, **options):
            super().apply_async(args, kwargs, **options)  # and says nothing of its result

        def delay(self, *args, **kwargs):
            return super().apply_async(args, kwargs)

        def signature_from_request(self, request=None, *args, **options):
            note("signature", sorted(options))
            return super().signature_from_request(request, *args, **options)

        def retry(self, *args, **options):
            note("retry", sorted(options))
            return super().retry(*args, **options)

        def replace(self, sig):
            raise NotImplementedError

    return Publishing


@form
def publishing_its_own_way(app, mine, name):
    task_of(app, publishing(mine), name)


# -- the stages -------------------------------------------------------------------------


def set_up(
    folder, *, protected=True, setting=None, mutant=False, default="app.Task", own_request=False
):
    has_nodes = protected or setting is not None
    return stage(
        __file__,
        folder,
        nodes=3 if has_nodes else 0,
        **({} if has_nodes else {"redlock_nodes": []}),
        protected=protected,
        redlock_protect=setting,
        mutant=mutant,
        default_base=default,
        own_request=own_request,
        **{**LASTING, "redlock_node_timeout": 10.0},  # no node is away here
    )


@pytest.fixture(scope="module")
def protected(tmp_path_factory):
    with set_up(tmp_path_factory.mktemp("protected")) as it:
        it.worker(concurrency=3)
        yield it


@pytest.fixture(scope="module")
def by_setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_setting")
    with set_up(folder, protected=False, setting={"*": {}}) as it:
        it.worker(concurrency=3)
        yield it


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The twin: a stage whose tasks have a plain base."""
    with set_up(tmp_path_factory.mktemp("plain"), protected=False) as it:
        it.worker(concurrency=3)
        yield it


@pytest.fixture(scope="module")
def mutant(tmp_path_factory):
    """A stage whose tasks have our base, which leaves their ``__call__`` alone."""
    with set_up(tmp_path_factory.mktemp("mutant"), mutant=True) as it:
        it.worker(concurrency=3)
        yield it


SHOP = """
import json, os
from celery import Celery
from support.stage import declared_in

file, conf = json.loads(os.environ["SHOP"])
app = Celery("stage", task_cls="celery_redlock:RedlockTask")
app.conf.update(conf)
declared_in(file)(app)
"""


@pytest.fixture(scope="module")
def with_task_cls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task_cls")
    (folder / "shop.py").write_text(SHOP)
    with set_up(folder, default="task_cls") as it:
        env = {"EVENTS": str(it.events), "SHOP": json.dumps([__file__, it.conf])}
        with Worker("shop", env=env, cwd=folder, concurrency=3):
            yield it


def publish(it, name, way):
    task = it.task(name)
    argument = {"way": way} if name == "pydantic" else way
    return getattr(task, "delay_on_commit", task.delay)(argument)


def trail(it, task_id):
    def events():
        # A retry may begin before the try before it is over.
        # One that no quorum answered in time is put off, which is no try.
        found = [
            event
            for event in read(it.events)
            if event.get("id") == task_id and event.get("state") != "IGNORED"
        ]
        states = [event["state"] for event in found if event["kind"] == "over"]
        tries = {event["retries"] for event in found}
        is_whole = tries == set(range(len(tries)))  # the last may be told of before the first
        done = is_whole and len(states) == len(tries) and set(states) != {"RETRY"}
        return sorted(found, key=lambda event: event["retries"]) if done else None

    found = eventually(events, f"end of {task_id}", timeout=100, every=0.05)
    parts = ("retries", "kind", "what", "told", "state", "error")
    return [[event[part] for part in parts if part in event] for event in found]


def overlap(it, name):
    first = publish(it, name, "hold")
    it.started(f"{name} hold")
    second = publish(it, name, "hold")
    it.started(f"{name} hold", 2)
    let_go(it, name)
    trail(it, first.id)
    trail(it, second.id)
    return overlaps(event for event in read(it.events) if event.get("name") == f"{name} hold")


def let_go(it, name):
    it.events.with_name(f"go {name}").touch()


def assert_alone(it, name):
    first = publish(it, name, "hold")
    it.started(f"{name} hold")
    assert it.keys(f"redlock:lock:{name}:*")
    second = publish(it, name, "hold")
    over = trail(it, second.id)
    assert over[-1][-1] == "SUCCESS"
    assert "'skipped': 'conflict'" in over[-1][-2]
    let_go(it, name)
    assert trail(it, first.id)[-1][-2:] == [repr(f"{name} hold"), "SUCCESS"]
    it.wait_until_free(f"{name}:*")
    third = publish(it, name, "hold")
    assert trail(it, third.id)[-1][-2:] == [repr(f"{name} hold"), "SUCCESS"]
    assert len(it.bodies(f"{name} hold")) == 2
    held = [event for event in read(it.events) if event.get("name") == f"{name} hold"]
    assert overlaps(held) == []
    it.wait_until_free(f"{name}:*")


# -- the tests --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NOT_YET])
def test_two_tasks_of_one_name_do_not_overlap(protected, name):
    assert_alone(protected, name)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NOT_YET])
def test_a_setting_protects_them_as_our_base_does(by_setting, name):
    assert_alone(by_setting, name)


@pytest.mark.parametrize("name", [name for name in FORMS if name not in NOT_YET])
def test_with_a_plain_base_they_overlap(plain, name):
    """The twin: without our base every form is seen to overlap."""
    assert overlap(plain, name)


@pytest.mark.parametrize("name", sorted(ENDS_THE_CALLS))
def test_without_the_lock_around_their_call_they_overlap(mutant, name):
    """The mutant: with our base, but not around a ``__call__`` that does not lead to ours."""
    assert overlap(mutant, name)


@pytest.mark.parametrize("name", ["default_base", "call_without_super", "registered"])
def test_an_app_with_task_cls_is_protected(with_task_cls, name):
    assert_alone(with_task_cls, name)


@pytest.mark.parametrize("by", ["protected", "by_setting"])
@pytest.mark.parametrize("policy", ["retry", "reschedule"])
@pytest.mark.parametrize("kind", ["publishing", "mixed"])
def test_a_policy_gets_along_with_what_users_override(request, by, kind, policy):
    protected = request.getfixturevalue(by)
    name = f"{kind}_{policy}"
    first = publish(protected, name, "hold")
    protected.started(f"{name} hold")
    second = publish(protected, name, "hold")

    def put_off():
        events = [event for event in read(protected.events, "over") if event["id"] == second.id]
        return [event["state"] for event in events]

    met = eventually(put_off, "conflict", timeout=100)
    assert met[0] == ("RETRY" if policy == "retry" else "IGNORED")
    let_go(protected, name)
    assert [r.get(timeout=100) for r in (first, second)] == [f"{name} hold"] * 2
    held = [event for event in read(protected.events) if event.get("name") == f"{name} hold"]
    assert len(protected.bodies(f"{name} hold")) == 2
    assert overlaps(held) == []
    protected.wait_until_free(f"{name}:*")


@pytest.mark.parametrize("way", ["return", "fail", "retry"])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in NOT_YET])
def test_what_users_wrote_is_called_as_ever(protected, plain, name, way):
    results = [publish(it, name, way) for it in (plain, protected)]
    expected, found = (trail(it, r.id) for it, r in zip((plain, protected), results, strict=True))
    assert found == expected
    if name != "ignoring_results":
        ends = [r.get(timeout=100, propagate=False) for r in results]
        assert repr(ends[1]) == repr(ends[0])
        assert results[1].state == results[0].state


def test_a_worker_does_not_start_with_a_request_that_releases_nothing(tmp_path):
    with (
        set_up(tmp_path, own_request=True) as it,
        pytest.raises(AssertionError, match=r"own_request: Own\.Request.*derive it from"),
    ):
        it.worker()
