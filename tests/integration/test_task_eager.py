"""What `RedlockTask` does in one process: ``apply()``, eager mode, direct calls, signals."""

from __future__ import annotations

import contextlib
import itertools
import json
import linecache
import pickle
import signal
import sys
import threading
import time

import pytest
import redis
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from celery_redlock import (
    ConfigurationError,
    HeldLock,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    Redlock,
    RedlockTask,
    Reschedule,
    Retry,
    RunUnlocked,
    Skip,
    Skipped,
    current_lock,
)
from celery_redlock.lock.held import NotLocked
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.task.execution import refused
from celery_redlock.task.execution.interrupt import defer_interrupts
from celery_redlock.testing import locks_disabled
from support.stored import RENEWED, ROOMY, clients_of
from support.waiting import eventually

DEAD = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]  # nobody listens there


def make_app(**conf):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update({**{f"redlock_{name}": value for name, value in ROOMY.items()}, **conf})
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    return app


@pytest.fixture
def app(five_nodes):
    app = make_app(redlock_nodes=[node.url for node in five_nodes])
    plugin = plugin_for(app)
    assert set(bootstrap(app.conf.redlock_nodes, plugin.settings.rules).values()) == {"enrolled"}
    yield app
    plugin.locks.close()
    app.close()


@pytest.fixture
def dead_app():
    app = make_app(redlock_nodes=DEAD)
    yield app
    plugin_for(app).locks.close()
    app.close()


@pytest.fixture
def keys(five_nodes):
    clients = [redis.Redis.from_url(node.url) for node in five_nodes]

    def read():
        return [{key.decode() for key in client.keys("redlock:lock:*")} for client in clients]

    yield read
    for client in clients:
        client.close()


@pytest.fixture
def rival(app):
    rival = Redlock(app.conf.redlock_nodes, plugin_for(app).settings.rules)
    yield rival
    rival.close()


@pytest.fixture
def clients(five_nodes):
    """
    Clients of the nodes, past the library, that are connected already.

    Use them uninterrupted: a body that is ended in the middle of redis-py leaves half an answer.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(node.url)) for node in five_nodes]
        for client in clients:
            client.ping()
        yield clients


@pytest.fixture
def steal(clients):
    def steal(name):
        with defer_interrupts():
            for client in clients[:3]:
                client.set(f"redlock:lock:{name}", "f" * 40, px=600_000)

    return steal


@pytest.fixture
def forget(clients):
    def forget(name):
        with defer_interrupts():
            for client in clients:
                client.delete(f"redlock:lock:{name}")

    return forget


def task_of(app, base=RedlockTask, **options):
    def declare(function):
        app.task(base=base, name="shop.bill", shared=False, **options)(function)
        return app.tasks["shop.bill"]

    return declare


def free(keys):
    return not any(keys())


def test_apply_takes_a_real_lock_and_gives_it_back(app, keys):
    @task_of(app, lock_key="invoice:{invoice_id}")
    def bill(invoice_id):
        eventually(lambda: sum("redlock:lock:invoice:7" in node for node in keys()) >= 3, "the key")
        return "billed"

    assert bill.apply((7,)).get() == "billed"
    eventually(lambda: free(keys), "release on every node")


@pytest.mark.parametrize("call", ["delay", "apply_async", "apply"])
def test_eager_mode_takes_a_real_lock(app, rival, call):
    app.conf.task_always_eager = True

    @task_of(app, lock_key="invoice:{invoice_id}")
    def bill(invoice_id):
        with pytest.raises(LockTaken):
            rival.acquire("invoice:7")
        return current_lock().fence

    result = {"delay": bill.delay, "apply": lambda n: bill.apply((n,))}.get(
        call, lambda n: bill.apply_async((n,))
    )(7)
    assert result.get() > 0
    rival.release(rival.acquire("invoice:7", wait=60))


def test_the_lock_tells_the_body_what_it_holds(app):
    asked = time.time()

    @task_of(app, bind=True, lock_ttl=60)
    def bill(self, invoice_id):
        lock = current_lock()
        assert lock is self.lock
        assert isinstance(lock, HeldLock)
        assert lock.name == self.lock_name((invoice_id,))
        assert isinstance(lock.fence, int)
        assert len(lock.token) >= 40
        assert (lock.ttl, lock.is_lost, lock.lost_reason) == (60.0, False, None)
        assert 0 < lock.remaining() <= 60
        assert asked <= lock.since <= time.time()
        lock.ensure_held()
        return lock

    lock = bill.apply((7,)).get()
    assert lock.is_lost
    assert lock.lost_reason == "released"
    with pytest.raises(LockLost):
        lock.ensure_held()


def test_fences_grow_from_run_to_run(app):
    @task_of(app, unique_on=())
    def bill(invoice_id):
        return current_lock().fence

    fences = [bill.apply((n,)).get() for n in range(10)]
    assert fences == sorted(set(fences))


def test_a_task_may_do_without_a_fence(app):
    @task_of(app, fence=False)
    def bill():
        return current_lock().fence

    assert bill.apply().get() is None


def test_no_lock_is_held_outside_of_a_body(app):
    found = []

    @task_of(app)
    def bill():
        def look():
            with pytest.raises(RuntimeError):
                found.append(current_lock())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with pytest.raises(RuntimeError, match="No lock is held"):
        current_lock()
    bill.apply().get()
    with pytest.raises(RuntimeError, match="No lock is held"):
        current_lock()
    assert found == []


def test_a_direct_call_takes_no_lock(app, rival, keys):
    @task_of(app, bind=True, lock_key="invoice:{invoice_id}")
    def bill(self, invoice_id):
        with pytest.raises(RuntimeError):
            current_lock()
        with pytest.raises(RuntimeError):
            _ = self.lock
        return invoice_id

    lease = rival.acquire("invoice:7")
    assert bill(7) == 7
    rival.release(lease)
    assert bill(7) == 7
    eventually(lambda: free(keys), "release of the rival's lock")


def test_a_recursion_runs_under_the_lock_of_the_first_call(app):
    @task_of(app, bind=True, unique_on=(), on_conflict="fail")
    def bill(self, n):
        return [current_lock().token, *(self(n - 1) if n else [])]

    assert len(set(bill.apply((5,)).get())) == 1


# -- conflicts ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "fail", "retry", "reschedule", Retry(0), Reschedule()])
def test_a_conflict_ends_at_once_by_policy(app, rival, policy):
    """Skip is a value; all else fails, for nothing can come later; the holder keeps its lock."""
    ran = []

    @task_of(app, lock_key="invoice:{invoice_id}", on_conflict=policy)
    def bill(invoice_id):
        ran.append(invoice_id)

    lease = rival.acquire("invoice:7")
    result = bill.apply((7,))
    assert result.ready()
    if policy == "skip":
        value = result.get()
        assert isinstance(value, Skipped)
        assert (value["skipped"], value["lock"]) == ("conflict", "invoice:7")
        assert value["holder"]["pid"]
        assert json.loads(json.dumps(value)) == value
    else:
        with pytest.raises(LockTaken) as taken:
            result.get()
        assert taken.value.name == "invoice:7"
        assert len(taken.value.votes) == 5
    assert ran == []
    rival.extend(lease)  # raises LockLost if anybody touched it
    rival.release(lease)
    bill.apply((7,)).get()
    assert ran == [7]


@pytest.mark.parametrize("policy", ["skip", "fail", "retry", "reschedule", Skip()])
def test_without_a_quorum_it_ends_at_once_by_policy(dead_app, policy):
    ran = []

    @task_of(dead_app, on_conflict="skip", on_unavailable=policy)
    def bill():
        ran.append(1)

    result = bill.apply()
    if policy in ("skip", Skip()):
        assert result.get()["skipped"] == "unavailable"
        assert result.get()["holder"] == {}
    else:
        with pytest.raises(QuorumUnavailable) as undecided:
            result.get()
        assert set(undecided.value.votes) == {f"127.0.0.1:{port}/0" for port in (1, 2, 3)}
    assert ran == []


def test_without_servers_the_log_names_what_tests_do_without(dead_app, caplog):
    refused.hint_at_tests.cache_clear()

    @task_of(dead_app, on_unavailable="fail")
    def bill():
        """Never run."""

    for _ in range(2):
        assert bill.apply().state == "FAILURE"
    (hint,) = [it for it in caplog.messages if "locks_disabled()" in it]
    assert "memory_quorum()" in hint


@pytest.mark.parametrize("policy", ["run_unlocked", RunUnlocked()])
def test_running_unlocked_says_so(dead_app, policy, caplog):
    @task_of(dead_app, on_unavailable=policy)
    def bill():
        lock = current_lock()
        lock.ensure_held()
        return type(lock), lock.fence, lock.is_lost, lock.why

    kind, fence, is_lost, why = bill.apply().get()
    assert (kind, fence, is_lost) == (NotLocked, None, False)
    assert "no quorum" in why
    assert "WITHOUT its lock" in caplog.text


def test_waiting_for_a_lock_is_worth_it(app, rival):
    @task_of(app, lock_key="invoice", lock_wait=600, on_conflict="fail")
    def bill():
        return "billed"

    lease = rival.acquire("invoice")
    started = time.monotonic()
    threading.Timer(0.3, rival.release, [lease]).start()
    assert bill.apply().get() == "billed"
    assert time.monotonic() - started > 0.2


def test_arguments_that_make_no_key_fail_the_task(app, keys):
    """Nothing runs under a lock that might be somebody else's."""

    @task_of(app)
    def bill(invoice):
        return invoice

    with pytest.raises(LockKeyError, match="invoice"):
        bill.apply((object(),)).get()
    assert free(keys)


def test_a_lock_may_outlast_its_task(app, rival):
    @task_of(app, lock_key="tick", min_hold=1.0)
    def bill():
        return None

    started = time.monotonic()
    bill.apply().get()
    rival.acquire("tick", wait=60)
    assert time.monotonic() - started > 0.9


# -- the same as plain Celery ------------------------------------------------------------


def note(self, seen):
    request = self.request
    fields = (request.id, request.retries, request.is_eager, request.called_directly)
    seen.append((*fields, len(request.args), request.kwargs))


def retries(self, seen, times):
    note(self, seen)
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return self.request.retries


def retries_for_cause(self, seen, times):
    note(self, seen)
    if self.request.retries < times:
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            raise self.retry(exc=error, countdown=0) from None
    return self.request.retries


def fails(self, seen, times):
    note(self, seen)
    if self.request.retries < times:
        raise KeyError(times)
    return self.request.retries


def changes(self, seen, times):
    note(self, seen)
    if times:
        raise self.retry(args=(seen, times - 1), countdown=0)
    return self.request.retries


def outcome_of(base, body, times, **options):
    app = make_app() if base is Task else base
    task = task_of(app, Task if base is Task else RedlockTask, bind=True, **options)(body)
    seen = []
    result = task.apply((seen, times), task_id="the-id")
    return result.state, result.id, repr(result.result), seen if body is not changes else len(seen)


@pytest.mark.parametrize("times", [0, 2, 5])
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (KeyError,), "retry_backoff": False}])
@pytest.mark.parametrize("body", [retries, retries_for_cause, fails, changes])
def test_an_eager_retry_is_plain_celerys(app, body, options, times):
    options = {**options, "max_retries": 3, "default_retry_delay": 0}
    protected = {**options, "unique_on": (), "on_conflict": "fail"}
    assert outcome_of(app, body, times, **protected) == outcome_of(Task, body, times, **options)


def test_a_base_with_its_own_call_still_works(app):
    order = []

    class Outside(RedlockTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            order.append("outside")
            return super().__call__(*args, **kwargs)

    class Inside(Task):
        abstract = True

        def __call__(self, *args, **kwargs):
            order.append("inside")
            return super().__call__(*args, **kwargs)

    class Both(Outside, Inside):
        abstract = True

    @task_of(app, base=Both)
    def bill():
        order.append(type(current_lock()).__name__)

    bill.apply().get()
    assert order == ["outside", "inside", "HeldLock"]


# -- every way out -----------------------------------------------------------------


def ends():
    def raises(error):
        def end(self):
            raise error

        return end

    def replaces(self):
        raise self.replace(self.app.tasks["shop.other"].si())

    def retries(self):
        raise self.retry(countdown=0)

    errors = [ValueError("no"), Ignore(), Reject(requeue=False), Reject(requeue=True)]
    errors += [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), SoftTimeLimitExceeded()]
    named = {f"{type(e).__name__}{getattr(e, 'requeue', '')}": raises(e) for e in errors}
    return {**named, "replace": replaces, "retry": retries}


@pytest.mark.parametrize("end", ends())
def test_the_lock_is_given_back_on_every_way_out(app, keys, end):
    @app.task(base=RedlockTask, name="shop.other", shared=False)
    def other():
        return None

    @task_of(app, bind=True, max_retries=2)
    def bill(self):
        eventually(lambda: any(keys()), "the key")
        ends()[end](self)

    with contextlib.suppress(BaseException):
        bill.apply()
    eventually(lambda: free(keys), "release on every node")
    assert plugin_for(app).locks.held == []
    with pytest.raises(RuntimeError):
        current_lock()


# -- tasks in tasks -----------------------------------------------------------------


def test_a_task_in_a_task_has_its_own_lock(app):
    @app.task(base=RedlockTask, name="shop.inner", shared=False)
    def inner():
        return current_lock().name

    @task_of(app)
    def bill():
        before = current_lock()
        name = inner.apply().get()
        assert current_lock() is before
        before.ensure_held()
        return before.name, name

    assert len(set(bill.apply().get())) == 2


def test_a_task_in_a_task_meets_the_outer_lock(app):
    @app.task(base=RedlockTask, name="shop.inner", lock_key="same", shared=False)
    def inner():
        return "ran"

    @task_of(app, lock_key="same")
    def bill():
        refused = inner.apply().get()
        current_lock().ensure_held()
        return refused

    assert bill.apply().get()["skipped"] == "conflict"


# -- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@pytest.mark.parametrize("kind", [LockTaken, QuorumUnavailable, LockLost])
def test_a_real_error_comes_home_with_all_its_fields(app, dead_app, rival, serializer, kind):
    def body():
        raise LockLost("invoice", "deadline")

    def failed(app):
        task = task_of(app, lock_key="invoice", on_conflict="fail", on_unavailable="fail")(body)
        return task.apply().result

    if kind is LockTaken:
        lease = rival.acquire("invoice")
        error = failed(app)
        rival.release(lease)
    else:
        error = failed(dead_app if kind is QuorumUnavailable else app)
    assert type(error) is kind
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), vars(copy), str(copy)) == (kind, vars(error), str(error))
    backend = make_app(result_serializer=serializer, result_accept_content=[serializer]).backend
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    back = backend.exception_to_python(stored)
    assert (type(back), vars(back)) == (kind, vars(error))


# -- without servers ----------------------------------------------------------------


def test_locks_can_be_switched_off():
    app = make_app()

    @task_of(app, bind=True, lock_key="invoice:{invoice_id}")
    def bill(self, invoice_id):
        lock = current_lock()
        assert lock is self.lock
        lock.ensure_held()
        return type(lock), lock.name, lock.fence, lock.is_lost

    with locks_disabled():
        with locks_disabled():
            pass
        assert bill.apply((7,)).get() == (NotLocked, "invoice:7", None, False)
    with pytest.raises(ConfigurationError):
        bill.apply((7,)).get()


def test_locks_can_be_switched_off_for_a_function():
    app = make_app()

    @task_of(app)
    def bill():
        return "billed"

    @locks_disabled()
    def run(*, fail):
        assert bill.apply().get() == "billed"
        assert not fail

    for fail in (False, True, False):
        with pytest.raises(AssertionError) if fail else contextlib.nullcontext():
            run(fail=fail)
    with pytest.raises(ConfigurationError):
        bill.apply().get()


def test_a_worker_in_a_users_suite_needs_no_servers():
    app = make_app()

    @task_of(app)
    def bill():
        return type(current_lock()).__name__

    with locks_disabled(), start_worker(app, pool="solo", perform_ping_check=False):
        assert bill.delay().get(timeout=60) == "NotLocked"


# -- a lock that is lost -------------------------------------------------------------


def spin(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(100))


def ask(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _ = current_lock().name, current_lock().ttl


@pytest.mark.parametrize("work", [time.sleep, spin, ask])
def test_a_body_whose_lock_is_lost_is_ended(app, steal, work):
    @task_of(app, bind=True, lock_key="invoice", lock_ttl=RENEWED)
    def bill(self):
        steal("invoice")
        started = time.monotonic()
        try:
            while time.monotonic() - started < 600:  # longer than a test may take
                with contextlib.suppress(Exception):
                    work(600)
                _ = self.lock
        finally:
            assert self.lock.is_lost

    with pytest.raises(LockLost) as lost:
        bill.apply().get()
    assert (lost.value.name, lost.value.reason) == ("invoice", "stolen")


def test_a_body_in_a_thread_is_ended_between_two_bytecodes(app, steal):
    """Where no signal reaches, Python raises as soon as it runs Python again."""

    @task_of(app, lock_key="invoice", lock_ttl=RENEWED)
    def bill():
        steal("invoice")
        spin(600)

    ended = []
    thread = threading.Thread(target=lambda: ended.append(bill.apply().result))
    thread.start()
    thread.join(60)
    assert [type(error) for error in ended] == [LockLost]


def test_a_body_that_asks_for_a_warning_runs_on(app, steal, caplog):
    @task_of(app, lock_key="invoice", lock_ttl=RENEWED, on_lock_lost="warn")
    def bill():
        lock = current_lock()
        steal("invoice")
        eventually(lambda: lock.is_lost, "loss of the lock")
        time.sleep(0.2)  # it would be ended in that time
        with pytest.raises(LockLost):
            lock.ensure_held()
        return "went on"

    assert bill.apply().get() == "went on"
    assert "is lost (stolen)" in caplog.text


def test_a_lost_lock_of_another_is_left_to_them(app, steal, five_nodes):
    @task_of(app, lock_key="invoice", lock_ttl=RENEWED)
    def bill():
        steal("invoice")
        time.sleep(600)  # its end is the test

    with pytest.raises(LockLost):
        bill.apply().get()
    for client in clients_of(five_nodes[:3]):
        assert client.get("redlock:lock:invoice") == b"f" * 40


@pytest.mark.parametrize("work", [time.sleep, spin])
@pytest.mark.parametrize("lost", ["outer", "inner"])
def test_whose_lock_is_lost_is_whose_body_ends(app, steal, lost, work):
    ttls = {"outer": 60.0, "inner": 60.0, lost: RENEWED}
    inner_options = {"name": "shop.inner", "lock_key": "inner", "lock_ttl": ttls["inner"]}

    @app.task(base=RedlockTask, shared=False, **inner_options)
    def inner():
        steal(lost)
        work(600)

    @task_of(app, lock_key="outer", lock_ttl=ttls["outer"])
    def bill():
        result = inner.apply()
        current_lock().ensure_held()
        return str(result.result)

    result = bill.apply()
    if lost == "outer":
        assert str(result.result).startswith("Lock 'outer' is lost (stolen): a majority")
    else:
        assert result.get().startswith("Lock 'inner' is lost (stolen): a majority")


# One may strike in a destructor, or a callback of a weak reference: Python reports it, and goes on.
@pytest.mark.long
@pytest.mark.filterwarnings(
    r"ignore:(?s)Exception ignored.*LockInterrupt:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("where", ["main thread", "thread"])
def test_a_loss_at_the_end_of_a_body_hurts_nobody_after_it(app, steal, forget, where):
    @task_of(app, lock_key="invoice", lock_ttl=1.0)
    def bill(seconds):
        steal("invoice")
        spin(seconds)

    def run():
        seconds = 1 / 3  # when it is renewed, or seen to be lost
        while len(results) < 25 or not kinds() >= {LockLost, type(None)}:
            results.append(bill.apply((seconds,)).result)
            plugin_for(app).locks.inspect("invoice")  # our own I/O, right behind the body
            spin(0.002)
            forget("invoice")
            seconds *= 0.95 if isinstance(results[-1], LockLost) else 1.05  # towards the edge

    def kinds():
        return {type(result) for result in results}

    app.conf.redlock_node_timeout = 0.3
    plugin_for(app).__dict__.pop("settings", None)
    results = []
    if where == "thread":
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert kinds() >= {LockLost, type(None)}


# -- signals --------------------------------------------------------------------------


@pytest.fixture
def soft_limit():
    """Have SIGUSR1 raise SoftTimeLimitExceeded, as in a child of the prefork pool."""

    def handler(_number, _frame):
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, handler)
    yield handler
    assert signal.getsignal(signal.SIGUSR1) is handler, "our deferral did not put it back"
    signal.signal(signal.SIGUSR1, before)


def test_a_time_limit_ends_the_wait_for_a_lock(app, rival, soft_limit, clients):
    """Signals are held back during our I/O only, not while we wait for somebody else."""

    @task_of(app, lock_key="invoice", lock_wait=600)
    def bill():
        return None

    lease = rival.acquire("invoice")

    def kick():
        """Strike once it waits: before, there may be nobody to catch what is raised."""
        eventually(lambda: clients[0].zcard("redlock:line:invoice"), "one that waits")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    kicker = threading.Thread(target=kick)
    kicker.start()
    result = bill.apply()
    kicker.join()
    assert type(result.result) is SoftTimeLimitExceeded
    rival.extend(lease)
    rival.release(lease)


AROUND_BODIES = ("celery_redlock.task", "celery_redlock.lock.locks", "contextlib")


def run_with_signal_at(line, call):
    """Send SIGUSR1 when the *line*-th line of ours is about to run; returns which that is."""
    seen = itertools.count()
    reached = []

    def trace(frame, event, _arg):
        if reached or not frame.f_globals["__name__"].startswith(AROUND_BODIES):
            return None
        if event == "line" and next(seen) == line:
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            reached.append(f"{frame.f_code.co_filename}:{frame.f_lineno}: {text}")
            # Python looks for signals at calls and in loops, so never at a line that is a word.
            if text not in ("try:", "else:"):
                signal.raise_signal(signal.SIGUSR1)
        return trace

    def apart():
        """Call in a generator, which takes along what Python 3.11 leaves of a raising tracer."""
        yield call()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        next(apart())
    except SoftTimeLimitExceeded:
        pass
    finally:
        sys.settrace(before)
    assert sys.exc_info() == (None, None, None)
    return reached


def test_a_time_limit_at_any_moment_leaves_no_lock_behind(app, soft_limit):
    @task_of(app, lock_key="invoice", acks_late=True)
    def bill():
        return None

    def handlers():
        return [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]

    bill.apply().get()
    locks, before = plugin_for(app).locks, handlers()
    for line in itertools.count():
        reached = run_with_signal_at(line, bill.apply)
        if not reached:
            break
        assert locks.held == [], reached
        assert not any(view.holder for view in locks.inspect("invoice")), reached
        assert handlers() == before, reached
    assert line > 100
    assert bill.apply().state == "SUCCESS"


def test_signals_that_arrive_together_all_take_effect(app, soft_limit):
    from celery_redlock.process.deferral import defer_signals

    def work():
        with defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            arrived.append("end of our I/O")

    arrived = []
    before = signal.signal(signal.SIGTERM, lambda *_: arrived.append("SIGTERM"))
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            work()
        assert arrived == ["end of our I/O", "SIGTERM"]
        signal.raise_signal(signal.SIGTERM)
        assert arrived == ["end of our I/O", "SIGTERM", "SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_many_threads_share_one_set_of_locks():
    app = make_app(redlock_nodes=DEAD)
    plugin = plugin_for(app)
    start = threading.Barrier(8)
    found = []

    def look():
        start.wait()
        found.append(plugin.locks)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_lock_not_acquired_in_a_body_is_the_bodys_own_affair(app):
    """Only the task's own lock goes by its policies; what its body raises is its failure."""

    @task_of(app, on_conflict="skip")
    def bill():
        raise LockTaken("another lock", {})

    with pytest.raises(LockNotAcquired, match="another lock"):
        bill.apply().get()


def test_an_eager_replacement_of_the_same_name_runs_under_the_lock_it_stands_in(app, keys):
    @app.task(base=RedlockTask, lock_key="bill", name="second")
    def second():
        return current_lock().fence

    @app.task(base=RedlockTask, lock_key="bill", name="first", bind=True)
    def first(self):
        return self.lock.fence, self.replace(second.s())

    mine, theirs = first.apply().get()
    assert mine == theirs
    eventually(lambda: free(keys), "release on every node")


def test_nor_where_it_stands_in_a_place(app, rival):
    """The other place is taken, and its own is the second one."""
    rival.acquire("bill")
    options = {"base": RedlockTask, "lock_key": "bill", "lock_limit": 2, "on_conflict": "fail"}

    @app.task(name="second", **options)
    def second():
        return current_lock().place, current_lock().fence

    @app.task(name="first", bind=True, **options)
    def first(self):
        return (self.lock.place, self.lock.fence), self.replace(second.s())

    mine, theirs = first.apply().get()
    assert mine == theirs
    assert mine[0] == 1


@pytest.mark.parametrize("second_key", ["other", ("bill", "other")])
def test_nor_does_a_replacement_run_without_a_lock_of_its_own(app, rival, second_key):
    """The one that it stands in is of another name, or not all that it needs."""
    rival.acquire("other")

    @app.task(base=RedlockTask, lock_key=second_key, name="second")
    def second():
        pytest.fail("it ran beside the holder")

    @app.task(base=RedlockTask, lock_key="bill", name="first", bind=True)
    def first(self):
        return self.replace(second.s())

    assert first.apply().get()["skipped"] == "conflict"


def test_an_app_that_is_configured_again_is_believed_in_eager_mode(app, rival):
    @app.task(base=RedlockTask, lock_key="bill", name="bill")
    def bill():
        return "billed"

    assert bill.apply().get() == "billed"
    rival.acquire("bill")
    assert bill.apply().get()["skipped"] == "conflict"
    app.conf.redlock_on_conflict = "fail"
    with pytest.raises(LockTaken):
        bill.apply().get()
    bill.on_conflict = Skip()
    assert bill.apply().get()["skipped"] == "conflict"
