"""What users' classes may override, in which order they may stand, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.app import trace
from celery.backends.rpc import RPCBackend
from celery.worker.request import Request

from celery_redlock import ConfigurationError, LockKeyError, RedlockTask, current_lock
from celery_redlock.lock.held import NotLocked
from celery_redlock.plugin import Plugin, plugin_for
from celery_redlock.task import base, overrides
from celery_redlock.task.base import takes_lock
from celery_redlock.task.declared import METHODS
from celery_redlock.task.execution import execution
from celery_redlock.task.naming import task_lock
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.options import OPTIONS
from celery_redlock.task.publish.result import UniqueResult
from celery_redlock.task.publish.trigger import carried
from celery_redlock.task.worker.start_steps import CheckLocks
from celery_redlock.testing import locks_disabled, memory_quorum

NODES = ["redis://one:1/0", "redis://two:2/0", "redis://three:3/0"]


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    return app


@pytest.fixture
def executions(monkeypatch):
    names, run_body = [], execution.run_body

    def noted(claim, *call):
        names.append(claim.name)
        return run_body(claim, *call)

    monkeypatch.setattr(execution, "run_body", noted)
    return names


def declare(app, base=RedlockTask, **options):
    """Declare and register a task that returns its argument and the kind of its lock."""

    @app.task(base=base, name="shop.bill", shared=False, **options)
    def bill(invoice_id=None):
        return invoice_id, type(current_lock())

    return app.tasks["shop.bill"]


# -- __call__ ---------------------------------------------------------------------------


def own_call():
    class Own(RedlockTask):
        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

    return Own


def own_call_that_calls_super():
    class Own(RedlockTask):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    return Own


class Plain(Task):
    abstract = True

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


class Mixin:
    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


class Cooperative:
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def bases(*classes):
    return lambda: type("Mixed", classes, {"abstract": True})


def subclass_of_a_subclass():
    """Two classes, the upper one of which ends the chain of calls."""

    class Lower(own_call()):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    return Lower


def assigned():
    """A ``__call__`` that is put there once the class exists."""

    class Late(RedlockTask):
        pass

    Late.__call__ = Mixin.__call__
    return Late


def an_object():
    """A ``__call__`` that is no function, and is not told of its task."""

    class Teller:
        def __call__(self, *args):
            return (*args, type(current_lock()))

    class Odd(RedlockTask):
        __call__ = Teller()

    return Odd


def decorated_with_ours():
    class Looks(RedlockTask):
        @functools.wraps(RedlockTask.__call__)
        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

    return Looks


FORMS = {
    "none": lambda: RedlockTask,
    "own": own_call,
    "own_super": own_call_that_calls_super,
    "plain_first": bases(Plain, RedlockTask),
    "plain_last": bases(RedlockTask, Plain),
    "mixin_first": bases(Mixin, RedlockTask),
    "mixin_last": bases(RedlockTask, Mixin),
    "cooperative_first": bases(Cooperative, RedlockTask),
    "cooperative_and_plain": bases(Cooperative, Plain, RedlockTask),
    "subclass_of_a_subclass": subclass_of_a_subclass,
    "assigned": assigned,
    "an_object": an_object,
    "decorated_with_ours": decorated_with_ours,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_call_is_one_execution(app, executions, form):
    task = declare(app, base=FORMS[form]())
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert executions == [task.lock_name((7,))]


@pytest.mark.parametrize("form", FORMS)
def test_a_class_that_is_registered_by_itself_is_protected_too(app, executions, form):
    """``app.register_task`` makes no class of its own; that of the user gets the lock."""

    class Bill(FORMS[form]()):
        name = "shop.bill"

        def run(self, invoice_id):
            return invoice_id, type(current_lock())

    task = app.register_task(Bill())
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert executions == [task.lock_name((7,))]


@pytest.mark.parametrize("form", FORMS)
def test_a_direct_call_stays_a_call(app, executions, form):
    @app.task(base=FORMS[form](), name="shop.bill", shared=False)
    def bill(invoice_id):
        return invoice_id

    if form != "an_object":  # which asks for the lock
        assert app.tasks["shop.bill"](7) == 7
        assert executions == []


@pytest.mark.parametrize("form", [form for form in FORMS if form != "an_object"])
def test_a_recursion_is_no_second_execution(app, executions, form):
    @app.task(base=FORMS[form](), name="shop.bill", bind=True, shared=False)
    def bill(self, n):
        return [type(current_lock()), *(self(n - 1) if n else [])]

    with locks_disabled():
        assert app.tasks["shop.bill"].apply((3,)).get() == [NotLocked] * 4
    assert len(executions) == 1


@pytest.mark.parametrize("form", [form for form in FORMS if form != "an_object"])
def test_an_eager_body_sees_its_own_request(app, form):
    """Celery's own ``__call__`` would push a second one; no form of call brings that back."""

    @app.task(base=FORMS[form](), name="shop.bill", bind=True, shared=False)
    def bill(self):
        return self.request.id, self.request.is_eager, len(self.request_stack)

    with locks_disabled():
        result = app.tasks["shop.bill"].apply(task_id="the-id")
    assert result.get() == ("the-id", True, 1)


def test_an_eager_recursion_is_a_direct_call_as_ever(app):
    """Only the body that Celery runs has the request; those that it calls get one of their own."""

    def seen(base):
        @app.task(base=base, name=f"shop.{base.__name__}", bind=True, shared=False)
        def bill(self, n):
            mine = self.request.called_directly, len(self.request_stack)
            return [mine, *(self(n - 1) if n else [])]

        return app.tasks[f"shop.{base.__name__}"].apply((2,)).get()

    with locks_disabled():
        assert seen(RedlockTask) == seen(Task)


def test_a_task_without_run_is_protected(app, executions):
    """Celery lets a class have a ``__call__`` in place of ``run``."""

    class Bill(RedlockTask):
        name = "shop.bill"

        def __call__(self, invoice_id):
            return invoice_id, type(current_lock())

    task = app.register_task(Bill())
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert len(executions) == 1


def test_a_call_that_comes_after_registration_is_protected_at_the_workers_start(app, executions):
    """What is put there later is found by the check that every worker begins with."""
    task = declare(app)
    type(task).__call__ = Mixin.__call__
    task.check_lock()
    task.check_lock()
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert len(executions) == 1


@pytest.mark.parametrize("form", ["none", "own", "plain_first"])
def test_monitoring_that_wraps_the_class_leaves_the_lock_in_place(
    app, executions, monkeypatch, form
):
    """Sentry replaces ``__call__`` when Celery builds what runs the task."""
    spans = []
    build = trace.build_tracer

    def monitored(name, task, *args, **kwargs):
        def watch(inner):
            @functools.wraps(inner)
            def watched(*args, **kwargs):
                spans.append(name)
                return inner(*args, **kwargs)

            return watched

        assert trace.task_has_custom(task, "__call__")
        type(task).__call__ = watch(type(task).__call__)
        return build(name, task, *args, **kwargs)

    monkeypatch.setattr(trace, "build_tracer", monitored)
    task = declare(app, base=FORMS[form]())
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
        task.check_lock()  # a second worker in the process
        assert len(executions) == 1
        assert task.apply((8,)).get() == (8, NotLocked)
    assert len(executions) == 2
    assert set(spans) == {"shop.bill"}


def test_an_annotation_of_call_is_protected(app, executions):
    wrapped = []

    def around(inner):
        def call(self, *args, **kwargs):
            wrapped.append(inner)
            return self.run(*args, **kwargs)

        return call

    app.conf.task_annotations = {"shop.bill": {"@__call__": around}}
    task = declare(app)
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert (len(executions), len(wrapped)) == (1, 1)


def test_a_call_is_wrapped_only_once(app):
    """Celery binds a task again when its app is finalized, and for each worker."""
    task = declare(app, base=own_call())
    first = type(task).__call__
    task.bind(app)
    task.check_lock()
    assert type(task).__call__ is first
    assert first.__qualname__.endswith("Own.__call__")


@pytest.mark.parametrize("call", [None, 5, property(lambda self: self.run)])
def test_what_cannot_be_protected_is_refused(app, call):
    with pytest.raises(ConfigurationError, match=r"shop\.bill: __call__ must be a method"):
        declare(app, base=type("Odd", (RedlockTask,), {"__call__": call}))


def test_without_the_protection_a_call_without_super_has_no_lock(app, executions, monkeypatch):
    """The twin: the tests above can see a task without a lock."""
    monkeypatch.setattr(base, "protect", lambda *args: None)
    task = declare(app, base=own_call())
    with locks_disabled(), pytest.raises(RuntimeError, match="No lock is held"):
        task.apply((7,)).get()
    assert executions == []


# -- hooks ------------------------------------------------------------------------------


class Hooks(RedlockTask):
    abstract = True

    @classmethod
    def on_bound(cls, app):
        """Replace ours, if there was one."""

    def before_start(self, task_id, args, kwargs):
        """Replace Celery's."""

    def on_success(self, retval, task_id, args, kwargs):
        """Replace Celery's."""

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        """Replace Celery's."""

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        """Replace Celery's."""

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        """Replace Celery's."""

    def on_replace(self, sig):
        """Replace Celery's."""


def test_hooks_of_the_users_take_nothing_away(app, executions):
    task = declare(app, base=Hooks)
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert len(executions) == 1
    assert CheckLocks in app.steps["worker"]


@pytest.mark.parametrize("bad", [{"lock_tll": 5}, {"on_conflict": "skipp"}, {"lock_key": "{no}"}])
def test_options_beside_hooks_of_the_users_are_checked(app, bad):
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        declare(app, base=Hooks, **bad)


def test_on_bound_of_the_user_is_called_with_the_app(app):
    apps = []
    hooks = type(
        "Told", (RedlockTask,), {"on_bound": classmethod(lambda cls, app: apps.append(app))}
    )
    declare(app, base=hooks)
    assert set(apps) == {app}


# -- the worker's request ------------------------------------------------------------------


class CeleryRequest(Request):
    """A request of the user's that knows nothing of locks."""


def with_request(request):
    return type("Custom", (RedlockTask,), {"abstract": True, "Request": request})


def other_with_request(request):
    other = type("Other", (Task,), {"abstract": True, "Request": request})
    return type("Mixed", (other, RedlockTask), {"abstract": True})


@pytest.mark.parametrize("request_of", [with_request, other_with_request])
@pytest.mark.parametrize(
    "custom",
    [CeleryRequest, "celery.worker.request:Request", lambda *args, **kwargs: None],
    ids=["class", "name", "function"],
)
def test_a_request_that_releases_nothing_is_refused_at_the_workers_start(app, request_of, custom):
    task = declare(app, base=request_of(custom))
    words = r"shop\.bill: (Custom|Other)\.Request.*celery_redlock\.task\.worker\.forced_ends\."
    with pytest.raises(ConfigurationError, match=words):
        task.check_lock()
    with pytest.raises(ConfigurationError, match=words):
        plugin_for(app).check()


@pytest.mark.parametrize("request_of", [with_request, other_with_request])
def test_a_request_derived_from_ours_is_welcome(app, request_of):
    ours = overrides.symbol_by_name(RedlockTask.Request)
    derived = type("Derived", (ours,), {})
    declare(app, base=request_of(derived)).check_lock()
    other = Celery("other", broker="memory://", set_as_current=False)
    other.conf.redlock_nodes = NODES
    declare(other, base=request_of(RedlockTask.Request)).check_lock()


def test_our_own_request_is_not_looked_up(app, monkeypatch):
    """That would import Celery's worker into a client."""
    monkeypatch.setitem(sys.modules, "celery_redlock.task.worker.forced_ends", None)
    declare(app).check_lock()


# -- names of ours ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("lock_name", "invoice:{invoice_id}", "lock_name is a method.*did you mean lock_key"),
        ("lock_name", lambda self: "invoice", "lock_name is a method"),
        ("lock_name", property(lambda self: "invoice"), "lock_name is a method"),
        ("lock", "invoice", "lock is what RedlockTask needs"),
        ("check_lock", lambda self: None, "check_lock is what RedlockTask needs"),
    ],
)
@pytest.mark.parametrize("where", ["task", "class", "mixin"])
def test_a_name_of_ours_is_not_taken(app, attribute, value, words, where):
    """What would break us somewhere in a worker is refused at registration."""
    taken = {attribute: value}
    if where == "mixin":
        base = bases(type("Mine", (), taken), RedlockTask)()
    else:
        base = type("Mine", (RedlockTask,), taken if where == "class" else {})
    with pytest.raises(ConfigurationError, match=rf"shop\.bill: {words}"):
        declare(app, base=base, **(taken if where == "task" else {}))


def test_no_other_name_is_ours(app):
    task = declare(app)
    public = {*OPTIONS, *METHODS}
    ours = {name for cls in type(task).__mro__[1:-1] for name in vars(cls)} - set(dir(Task))
    assert ours - {"__annotations__"} == public
    assert {name for name in vars(task) if name.isidentifier()} <= {"__qualname__", *dir(Task)}


@pytest.mark.parametrize("where", ["task", "class", "mixin"])
def test_private_names_are_the_users(app, executions, where):
    theirs = dict.fromkeys(
        ("_lock_name", "_lock", "_options", "_run_locked", "_is_built_in", "_task_lock", "_name"), 5
    )
    if where == "mixin":
        base = bases(type("Mine", (), theirs), RedlockTask)()
    else:
        base = type("Mine", (RedlockTask,), theirs if where == "class" else {})
    task = declare(app, base=base, **(theirs if where == "task" else {}))
    task.check_lock()
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
        assert isinstance(task.delay(7), UniqueResult)
    assert executions == [task.lock_name((7,))]


@pytest.mark.parametrize(
    ("attribute", "value"), [("lock_ttl", 5.0), ("fence", False), ("lock", 5), ("lock_name", "x")]
)
def test_what_has_no_effect_behind_our_class_is_refused(app, attribute, value):
    """``class MyTask(RedlockTask, Shop)``: an option of Shop would be ignored without a word."""
    shop = type("Shop", (Task,), {"abstract": True, attribute: value})
    with pytest.raises(ConfigurationError, match=rf"Shop\.{attribute} has no effect.*before"):
        declare(app, base=bases(RedlockTask, shop)())
    other = Celery("other", broker="memory://", set_as_current=False)
    if attribute.startswith(("lock_ttl", "fence")):
        assert getattr(declare(other, base=bases(shop, RedlockTask)()), attribute) == value


def test_a_class_behind_one_that_celery_made_of_ours_is_checked(app):
    """``app.Task`` is a class between the user's and ours, and hides no mistake behind it."""
    app.task_cls = RedlockTask
    shop = type("Shop", (RedlockTask,), {"abstract": True, "lock_tll": 5})
    with pytest.raises(ConfigurationError, match="lock_tll"):
        declare(app, base=bases(app.Task, shop)())


async def later(invoice_id=None):
    """Runs when somebody waits for it."""


async def piecewise(invoice_id=None):
    yield


def lazily(invoice_id=None):
    yield


@pytest.mark.parametrize(
    ("body", "kind"),
    [(later, "a coroutine"), (piecewise, "an asynchronous generator"), (lazily, "a generator")],
)
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (OSError,)}, {"bind": True}])
def test_a_body_that_has_not_begun_when_it_returns_is_refused(app, body, kind, options):
    """
    The lock would be released before it runs, as by pools that wait for it afterwards.

    What autoretry puts around a body returns what the body does.
    """
    with pytest.raises(
        ConfigurationError, match=f"its body is {kind} .*; make it a plain function"
    ):
        app.task(base=RedlockTask, shared=False, lazy=False, **options)(body)


def test_a_class_whose_run_is_a_coroutine_is_refused(app):
    class Bill(RedlockTask):
        name = "shop.bill"

        async def run(self, invoice_id=None):
            """Run later."""

    with pytest.raises(ConfigurationError, match=r"shop\.bill: its body is a coroutine"):
        app.register_task(Bill())


def test_a_plain_function_may_wait_for_a_coroutine(app, executions):
    @functools.wraps(later)
    def wait(invoice_id=None):
        asyncio.run(later(invoice_id))

    task = app.task(base=RedlockTask, shared=False, lazy=False)(wait)
    with locks_disabled():
        assert task.apply().get() is None
    assert len(executions) == 1


def test_a_base_may_wait_for_the_end_of_its_bodies(app, executions):
    """Then a coroutine has ended when the call returns, under the lock."""

    class Waiting(RedlockTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            return asyncio.run(self.run(*args, **kwargs))

    task = app.task(base=Waiting, shared=False, lazy=False)(later)
    with locks_disabled():
        assert task.apply().get() is None
    assert len(executions) == 1


@pytest.mark.parametrize("kind", ["coroutine", "generator", "Future"])
def test_a_result_that_has_yet_to_run_fails_the_task(app, kind):
    """A body cannot always be seen to return one."""

    @app.task(base=RedlockTask, shared=False)
    def bill():
        return {"coroutine": later, "generator": lazily, "Future": Future}[kind]()

    with memory_quorum(app), pytest.raises(TypeError, match=f"bill returned a {kind}, which runs"):
        bill.apply(throw=True)


def test_a_lock_name_of_the_users_is_the_name(app, executions):
    class Named(RedlockTask):
        abstract = True

        def lock_name(self, args=None, kwargs=None):
            return f"tenant:{super().lock_name(args, kwargs)}"

    task = declare(app, base=Named)
    with locks_disabled():
        assert task.apply((7,)).get() == (7, NotLocked)
    assert executions == [task.lock_name((7,))]
    assert executions[0].startswith("tenant:shop.bill:")


@pytest.mark.parametrize("name", [None, "", 5])
def test_a_lock_name_of_the_users_that_is_none_fails_the_task(app, executions, name):
    class Named(RedlockTask):
        abstract = True

        def lock_name(self, args=None, kwargs=None):
            return name

    task = declare(app, base=Named)
    with locks_disabled(), pytest.raises(LockKeyError, match=r"shop\.bill.*lock_name"):
        task.apply((7,)).get()
    assert executions == []


# -- the first calls of a process ------------------------------------------------------------


def test_a_thread_waits_while_another_one_binds_the_task(app, monkeypatch):
    """Celery hands out a registered task that is not bound yet: annotations apply all the same."""
    monkeypatch.setattr(task_lock, "BINDING", 60.0)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(RedlockTask):
        @classmethod
        def annotate(cls):
            begun.set()
            assert go_on.wait(60)
            super().annotate()

    def nothing():
        pass

    app.conf.task_annotations = {"shop.bill": {"priority": 7}}
    bill = app.task(base=Slow, name="shop.bill", shared=False)(nothing)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: bill.apply_async())  # noqa: PLW0108  not looked up here
        assert begun.wait(60)  # and it is registered: a second thread is handed it
        second = threads.submit(app._tasks["shop.bill"].apply_async)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.1)
        go_on.set()
        assert {type(one.result(timeout=60)) for one in (first, second)} == {UniqueResult}
    assert app.tasks["shop.bill"].priority == 7


def test_a_task_that_is_never_bound_is_said_to_be(app, monkeypatch):
    """The thread that began to bind it has failed; nobody waits for ever."""
    monkeypatch.setattr(task_lock, "BINDING", 0.05)
    task = declare(app)
    monkeypatch.setattr(type(task), "request_stack", None)
    with pytest.raises(RuntimeError, match=r"'shop.bill' was not bound .* 0\.05 s"):
        task.apply_async()


# -- arguments that do not fit ----------------------------------------------------------------


@pytest.mark.parametrize("typing", [True, False])
def test_arguments_that_do_not_fit_fail_as_those_of_a_plain_task(app, typing):
    """A TypeError, which users of Celery catch, and not an error of ours."""

    def add(x, y):
        return x + y

    errors = []
    for kind in (Task, RedlockTask):
        app.task(base=kind, name=kind.__name__, shared=False, typing=typing)(add)
        errors.append(app.tasks[kind.__name__].apply((1,)).result)
    assert [type(error) for error in errors] == [TypeError, TypeError]
    assert "missing" in str(errors[0])
    assert "missing" in str(errors[1])


def test_arguments_that_make_no_name_end_the_marker(app, monkeypatch):
    """The task fails before it runs; who publishes the next one must not join it for an hour."""
    ended = []

    @app.task(
        base=RedlockTask,
        name="shop.report",
        shared=False,
        lock_key="{when.year}",
        unique_until="finished",
    )
    def report(when):
        pytest.fail("it ran")

    queued = SimpleNamespace(end=lambda name, token, how, **_: ended.append((name, token, how)))
    monkeypatch.setattr(Plugin, "reservations_for", lambda _, report: queued)
    reservation = ["2026", "a" * 40, "finished"]
    header = {"v": 1, "task_id": "me", "id": "0" * 32, "reservation": reservation}
    task = app.tasks["shop.report"]
    task.push_request(id="me", called_directly=False, redlock=header)
    try:
        with pytest.raises(LockKeyError):
            task("no date")
    finally:
        task.pop_request()
    assert ended == [("2026", "a" * 40, "over")]


@pytest.mark.parametrize("backend", ["rpc://", "rpc", "celery.backends.rpc:RPCBackend", RPCBackend])
@pytest.mark.parametrize("on_duplicate", ["join", "rerun", "fail"])
def test_a_duplicate_needs_a_result_that_its_caller_can_read(app, on_duplicate, backend):
    """With ``rpc://`` only the first publisher can: whoever joined would wait for ever."""
    app.conf.result_backend = backend
    task = declare(app, unique_until="finished", on_duplicate=on_duplicate)
    if on_duplicate == "fail":
        task.check_lock()
        return
    with pytest.raises(ConfigurationError, match=r"rpc://.*on_duplicate='fail'"):
        task.check_lock()
    with pytest.raises(ConfigurationError, match="rpc://"):
        task.delay(7)


def test_arguments_that_the_nodes_are_to_keep_have_a_bound(app):
    """They are written to every node, ahead of what other tasks ask it."""
    task = declare(app, unique_until="finished", on_duplicate="rerun", lock_key="report")
    with pytest.raises(
        LockKeyError, match=r"take 65,536 bytes of JSON, not 6,000,\d+; pass the id"
    ):
        task.delay("x" * 6_000_000)
    assert len(carried(task, (["x" * 60_000], {}))) > 60_000


# -- what a task asks of its lock ------------------------------------------------------------


def test_all_threads_have_the_same_lock_of_a_task(app):
    task = declare(app)
    for _ in range(50):
        del vars(task)[task_lock.KEY]
        with ThreadPoolExecutor(4) as threads:
            assert len(set(threads.map(lambda _: lock_of(task), range(8)))) == 1


def test_a_task_that_is_registered_anew_asks_its_new_apps_nodes():
    """A task of its own class may be declared before its app, and be given to another one later."""

    class Pay(RedlockTask):
        name = "shop.pay"

        def run(self) -> None:
            """Do nothing."""

    task = Pay()
    for number in range(2):
        app = Celery(f"shop {number}", broker="memory://", set_as_current=False)
        app.conf.redlock_nodes = NODES
        app.register_task(task)
        assert lock_of(task).plugin is plugin_for(app)


def test_a_task_is_forgotten_with_its_app():
    """What we keep of a task keeps neither alive, also with a ``lock_key`` that has the task."""
    app = Celery("gone", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    task = declare(app, lock_key=lambda task, args, kwargs: task.name)
    task.check_lock()
    assert task.lock_name((7,)) == "shop.bill"
    kept = [weakref.ref(one) for one in (app, task, lock_of(task))]
    app.close()
    del app, task
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_a_task_takes_a_lock_if_it_is_ours_and_not_celerys():
    """Under ``task_cls`` Celery's own inherit from us, and take none unless they are told to."""
    app = Celery("x", broker="memory://", task_cls=RedlockTask, set_as_current=False)

    def nothing():
        pass

    app.task(base=Task, name="plain", shared=False)(nothing)
    app.task(name="ours", shared=False)(nothing)
    cleanup = app.tasks["celery.backend_cleanup"]
    assert [takes_lock(app.tasks.get(name)) for name in ("ours", "plain", "none")] == [
        *(True, False, False)
    ]
    assert not takes_lock(cleanup)
    cleanup.lock_key = "cleanup"
    assert takes_lock(cleanup)


@pytest.mark.parametrize(
    ("expires", "options", "warned"),
    [
        (3600, {}, True),
        (timedelta(hours=1), {}, True),
        (86400, {}, False),
        (None, {}, False),
        (3600, {"unique_until": "finished"}, False),
        (3600, {"on_duplicate": "fail"}, False),
        (3600, {"ignore_result": True}, False),
    ],
)
def test_a_window_that_outlasts_results_is_warned_of(app, caplog, expires, options, warned):
    """A duplicate would join what is gone."""
    app.conf.result_expires = expires
    app.conf.redlock_nodes = ["redis://127.0.0.1"]
    task = declare(app, **{"unique_until": "expired", "unique_for": 7200, **options})
    task.check_lock()
    assert ("longer than result_expires (3600 s)" in caplog.text) is warned


@pytest.mark.parametrize(
    ("setting", "options", "warned"),
    [
        (None, {"max_deliveries": 3}, True),
        (None, {"max_deliveries": 3, "acks_late": True}, False),
        (None, {}, False),
        (3, {}, False),  # it is meant for the others
    ],
)
def test_a_count_of_deliveries_that_never_come_is_warned_of(app, caplog, setting, options, warned):
    app.conf.redlock_max_deliveries = setting
    app.conf.redlock_nodes = ["redis://127.0.0.1"]
    task = declare(app, **options)
    task.check_lock()
    assert (f"{task.name}: max_deliveries has no effect" in caplog.text) is warned
    assert ("set acks_late=True" in caplog.text) is warned


@pytest.mark.parametrize("by_setting", [True, False])
@pytest.mark.parametrize("limit", [None, 1])
def test_a_count_of_copies_that_run_beside_each_other_is_warned_of(app, caplog, by_setting, limit):
    app.conf.redlock_max_deliveries = 3 if by_setting else None
    options = {} if by_setting else {"max_deliveries": 3}
    declare(app, acks_late=True, lock_rate="5/s", lock_limit=limit, **options).check_lock()
    words = "max_deliveries counts copies that run beside each other, as lock_limit=None"
    assert (words in caplog.text) is (limit is None)


@pytest.mark.parametrize(
    ("bases", "is_warned"),
    [
        (lambda own: (RedlockTask,), True),
        (lambda own: (own, RedlockTask), False),
        (lambda own: (RedlockTask, own), False),
        (lambda own: (), False),
    ],
    ids=["ours alone", "theirs first", "ours first", "as the app's"],
)
def test_a_class_of_the_app_that_ours_takes_the_place_of_is_said(caplog, bases, is_warned):
    """As Flask's, whose ``__call__`` opens the app context."""

    class WithContext(Task):
        def __call__(self, *args, **kwargs):
            return self.run(*args, **kwargs)

    app = Celery("shop", task_cls=WithContext, broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = NODES
    both = bases(WithContext)
    declare(app, type("Base", both, {"abstract": True}) if both else None)
    base.check_tasks(app)
    assert ("without the __call__ of" in caplog.text) is is_warned
    assert ("WithContext" in caplog.text) is is_warned


def test_an_app_without_a_class_of_its_own_hears_nothing(app, caplog):
    declare(app)
    base.check_tasks(app)
    app.Task = RedlockTask
    base.check_tasks(app)
    assert caplog.text == ""
