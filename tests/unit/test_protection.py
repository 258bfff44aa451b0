"""Tasks that the setting ``redlock_protect`` protects: of any base, registered whenever."""

from __future__ import annotations

import gc
import inspect
import logging
import pickle
import subprocess
import sys
import types
import uuid
import weakref

import pytest
from celery import Celery, Task, _state, shared_task, signals
from celery.app.registry import TaskRegistry
from celery.worker.request import Request

from celery_redlock import ConfigurationError, Fail, RedlockTask
from celery_redlock.plugin import plugin_for
from celery_redlock.protect import CheckSetting
from celery_redlock.task.base import takes_lock
from celery_redlock.task.execution import execution
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.protection import protect_tasks
from celery_redlock.task.publish.result import UniqueResult
from celery_redlock.task.worker.start_steps import CheckLocks
from celery_redlock.testing import locks_disabled

NODES = ["redis://one:1/0", "redis://two:2/0", "redis://three:3/0"]
ORDER = {"vendor.*": {"unique_on": ["order_id"], "on_conflict": "fail"}}


@pytest.fixture(autouse=True)
def _apps_are_closed(monkeypatch):
    """A shared task of one test, or of another file, is not registered in the apps of a test."""
    known = ("celery.app.builtins", "celery_redlock.protect")
    kept = {it for it in _state._on_app_finalizers if it.__module__ in known}
    monkeypatch.setattr(_state, "_on_app_finalizers", kept)
    before = set(_state._get_active_apps())
    yield
    for app in set(_state._get_active_apps()) - before:
        app.close()


def app_with(setting=ORDER, **options):
    options = {"broker": "memory://", "backend": "cache+memory://", **options}
    app = Celery("shop", set_as_current=False, **options)
    app.conf.update(redlock_nodes=NODES, redlock_protect=setting)
    return app


def sync(order_id, how=None):
    """Say which order it is."""
    return order_id


def bound_sync(self, order_id):
    """Say which order it is, as a task that is given itself."""
    return order_id


def other_sync(order_id):
    """Say which order it is."""
    return order_id


def declare(app, name="vendor.sync", run=sync, **options):
    app.task(name=name, shared=False, **options)(run)
    return app.tasks[name]


@pytest.fixture
def executions(monkeypatch):
    names, run_body = [], execution.run_body

    def noted(claim, *call):
        names.append(claim.name)
        return run_body(claim, *call)

    monkeypatch.setattr(execution, "run_body", noted)
    return names


def apply(task, *args):
    with locks_disabled():
        return task.apply(args).get()


class Plain(Task):
    abstract = True
    retry_jitter = False

    def __call__(self, *args, **kwargs):
        return self.run(*args, **kwargs)


# -- whatever the task is ---------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bind": True, "run": bound_sync},
        {"base": Plain},
        {"autoretry_for": (ValueError,)},
        {"lazy": False},
        {"base": RedlockTask},
    ],
    ids=["function", "bound", "base", "autoretry", "eager declaration", "ours"],
)
def test_a_task_is_protected_in_every_form(executions, options, when):
    app = app_with()
    if when == "after":
        app.finalize()
    task = declare(app, **options)
    assert takes_lock(task)
    assert task.lock_name((7,)) == task.lock_name((), {"order_id": 7}) != task.lock_name((8,))
    assert lock_of(task).options.on_conflict == Fail()
    assert apply(task, 7) == 7
    assert executions == [task.lock_name((7,))]


@pytest.mark.parametrize("setting", [None, {}, {"shop.*": {}}, {"vendor.sync": None, **ORDER}])
def test_without_the_setting_it_is_not(executions, setting):
    """The twin: neither without, nor by another pattern, nor where it is left out."""
    task = declare(app_with(setting))
    assert type(task).__mro__[1] is task.app.Task
    assert not isinstance(task, RedlockTask)
    assert apply(task, 7) == 7
    assert executions == []


def test_an_app_without_the_setting_stays_as_celery_made_it():
    """With no registry of ours once its first task is there, and one look at its settings."""
    app = app_with(None)
    declare(app)
    assert type(app._tasks).__module__ == "celery.app.registry"
    assert not app.steps["consumer"]
    (step,) = app.steps["worker"]
    assert step is CheckSetting
    step(Consumer(app))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_that_is_registered_by_itself_is_protected(executions, when):
    """It stays the object that its author has; other instances of its class are not touched."""

    class Sync(Plain):
        name = "vendor.sync"

        def run(self, order_id):
            return order_id

    app, mine, other = app_with(), Sync(), Sync()
    if when == "after":
        app.finalize()
    assert app.register_task(mine) is mine
    app.finalize()
    assert app.tasks["vendor.sync"] is mine
    assert takes_lock(mine)
    assert apply(mine, 7) == 7
    assert len(executions) == 1
    assert isinstance(mine, Sync)
    assert not isinstance(other, RedlockTask)


def test_a_shared_task_is_protected_in_the_apps_that_say_so():
    """Each app has its own copy, by its own setting, also if it was finalized before."""
    first, plain = app_with(), app_with(None)
    first.finalize()
    shared_task(name="vendor.sync")(sync)
    later = app_with({"vendor.sync": {"lock_ttl": 5}})
    tasks = [app.tasks["vendor.sync"] for app in (first, plain, later)]
    assert [takes_lock(task) for task in tasks] == [True, False, True]
    assert lock_of(tasks[2]).options.ttl == 5.0


def test_celerys_own_are_protected_by_their_exact_names_alone():
    for_all = app_with({"*": {}, "celery.*": {}})
    assert not any(takes_lock(task) for task in for_all.tasks.values())
    by_name = app_with({"celery.backend_cleanup": {}})
    locked = [name for name, task in by_name.tasks.items() if takes_lock(task)]
    assert locked == ["celery.backend_cleanup"]
    assert by_name.tasks["celery.backend_cleanup"].lock_name().startswith("celery.backend_cleanup")
    under_ours = app_with({"celery.backend_cleanup": {}}, task_cls=RedlockTask)
    assert takes_lock(under_ours.tasks["celery.backend_cleanup"])
    assert not takes_lock(under_ours.tasks["celery.chord"])


def test_a_protected_task_is_what_it_was_to_everybody_else():
    app, plain = app_with(), app_with(None)
    app.set_current()
    task, before = declare(app, base=Plain), declare(plain, base=Plain)
    for part in (
        "__name__",
        "__module__",
        "__doc__",
        "__qualname__",
        "retry_jitter",
        "max_retries",
    ):
        assert getattr(task, part) == getattr(before, part), part
    assert inspect.signature(task.run) == inspect.signature(before.run)
    assert repr(type(task)) == repr(type(before))
    assert pickle.loads(pickle.dumps(task)) is task
    assert task(7) == 7


# -- which options count ----------------------------------------------------------------


def test_what_a_task_declares_itself_wins():
    class House(RedlockTask):
        abstract = True
        on_conflict = "reschedule"

    setting = {"vendor.*": {"on_conflict": "fail", "lock_ttl": 5, "lock_wait": 2}}
    app = app_with(setting)
    tasks = [
        declare(app, "vendor.a", base=House, lock_wait=1),
        declare(app, "vendor.b", lock_wait=1, on_conflict="reschedule"),
    ]
    for task in tasks:
        options = lock_of(task).options
        assert (options.ttl, options.wait) == (5.0, 1.0)
        assert type(options.on_conflict).__name__ == "Reschedule"


@pytest.mark.parametrize("base", [Task, RedlockTask])
def test_an_option_that_is_none_is_not_declared(base):
    """As another library's base has it, or a class that wants what its app has."""
    kind = type("Kind", (base,), {"abstract": True, "unique_on": None})
    task = declare(app_with(), base=kind)
    assert task.lock_name((7, "now")) == task.lock_name((7, "later"))


def test_a_task_that_has_no_lock_but_a_rate_is_given_none():
    """None is a value of ``lock_limit``, which a setting for all tasks does not take back."""
    app = app_with({"*": {"lock_limit": 3, "lock_ttl": 5}})
    rate = {"lock_limit": None, "lock_rate": "100/m"}
    options = lock_of(declare(app, base=RedlockTask, **rate)).options
    assert (options.limit, options.ttl) == ((), 5.0)
    assert lock_of(declare(app, "vendor.other")).options.limit == (3,)


def test_an_annotation_wins():
    app = app_with({"vendor.*": {"lock_ttl": 5, "lock_wait": 2}})
    app.conf.task_annotations = {"vendor.sync": {"lock_ttl": 7}}
    options = lock_of(declare(app)).options
    assert (options.ttl, options.wait) == (7.0, 2.0)


def test_a_callable_lock_key_is_no_method():
    app = app_with({"vendor.*": {"lock_key": lambda task, args, kwargs: f"{task.name}:{args[0]}"}})
    assert declare(app).lock_name((7,)) == "vendor.sync:7"


def test_settings_of_django_are_read():
    module = types.ModuleType("settings")
    module.CELERY_BROKER_URL = "memory://"
    module.CELERY_REDLOCK_NODES, module.CELERY_REDLOCK_PROTECT = NODES, ORDER
    module.CELERY_REDLOCK_TTL = 12.0
    app = Celery("shop", set_as_current=False)
    app.config_from_object(module, namespace="CELERY")
    task = declare(app)
    assert lock_of(task).options.ttl == 12.0
    assert plugin_for(app).settings.protect == ORDER


# -- what it brings ---------------------------------------------------------------------


def test_a_publish_is_ours():
    app = app_with()
    result = declare(app).delay(7)
    assert isinstance(result, UniqueResult)
    with app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery", no_ack=True)
    assert message.headers["redlock"]["id"]


def test_a_worker_checks_it_at_its_start():
    """Also where no pattern matches: the setting itself may be what is wrong."""
    app = app_with({"shop.*": {}})
    app.finalize()
    assert CheckLocks in app.steps["worker"]
    app = app_with({"vendor.*": {"lock_ttl": 500}})
    declare(app)
    with pytest.raises(ConfigurationError, match=r"lock_ttl.*redlock_max_ttl"):
        plugin_for(app)._check_tasks(app)


class Consumer:
    def __init__(self, app):
        self.app = app


@pytest.mark.parametrize(
    ("settings", "namespace", "words"),
    [
        ({"redlock_protects": ORDER}, None, "redlock_protects; did you mean redlock_protect?"),
        ({"REDLOCK_PROTECT": ORDER}, "CELERY", "write CELERY_REDLOCK_PROTECT"),
        ({"REDLOCK_PROTECT": ORDER}, None, "write redlock_protect"),
        ({"redlock_protect": ORDER}, None, "redlock_protect was set after"),
        ({"REDLOCK": {}, "redlock_nodes": NODES}, None, None),
    ],
)
def test_a_worker_does_not_start_with_a_setting_that_protects_nothing(settings, namespace, words):
    """Misspelt, or set when the tasks were there, as in Celery's ``celeryd_init``."""
    app = Celery("shop", set_as_current=False, broker="memory://", namespace=namespace)
    app.finalize()
    app.conf.update(settings)
    (step,) = app.steps["worker"]
    if words is None:
        step(Consumer(app))
        return
    with pytest.raises(ConfigurationError, match=words):
        step(Consumer(app))


def test_a_setting_that_is_changed_counts_no_more():
    """A worker refuses it; its twin starts with what was applied."""
    app = app_with({"vendor.*": {}})
    declare(app)
    CheckSetting(Consumer(app))
    app.conf.redlock_protect = ORDER
    with pytest.raises(ConfigurationError, match="redlock_protect was set after"):
        CheckSetting(Consumer(app))


def test_a_worker_reports_patterns_that_match_nothing(caplog):
    app = app_with({"vendor.sink": {}, "vendor.*": {}, "vendor.sync": None, "*": None})
    app.finalize()  # Celery's own are for no pattern
    declare(app)
    with caplog.at_level(logging.WARNING):
        for one in (app, app_with(None)):
            signals.worker_ready.send(sender=Consumer(one))
    told = [record.getMessage() for record in caplog.records if "redlock" in record.name]
    unused = "redlock_protect: 'vendor.sink' matches no task of this worker"
    behind = "put 'vendor.sync' before 'vendor.*', which matches it, too, or it has no effect"
    assert told == [f"{unused}; did you mean 'vendor.sync'?", f"redlock_protect: {behind}"]


# -- what cannot be protected -----------------------------------------------------------


class WithLock(Task):
    """It has a name of ours."""

    abstract = True
    lock = None


class WithRequest(Task):
    """Its parent would not release for a child that was killed."""

    abstract = True
    Request = Request


class WithStrategy(Task):
    """As those of celery-batches: its body is not run by Celery's tracer."""

    abstract = True

    def Strategy(self, task, app, consumer):  # noqa: N802  Celery's name
        """Gather messages."""


class WithBind(Task):
    """It never calls the next."""

    abstract = True

    @classmethod
    def bind(cls, app):
        """Keep to itself."""
        cls._app = app


class Final(Task):
    """It has no subclasses but its tasks."""

    abstract = True

    def __init_subclass__(cls):
        """Refuse others."""
        if "name" not in vars(cls):
            raise ValueError("final")


class WithCall(Task):
    """Its ``__call__`` is none."""

    abstract = True
    __call__ = None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("base", "words"),
    [
        (WithLock, "lock is what RedlockTask needs for itself"),
        (WithRequest, r"WithRequest\.Request.*would not release.*derive it from"),
        (WithStrategy, r"WithStrategy\.Strategy runs the task in its own way, past the lock"),
        (WithBind, r"overrides bind\(\)"),
        (Final, "cannot be combined with RedlockTask: final"),
        (WithCall, "__call__ must be a method"),
    ],
)
def test_what_cannot_be_protected_is_refused_by_name(base, words, when):
    app = app_with()
    if when == "after":
        app.finalize()
    app.task(name="other.task", shared=False)(sync)
    refused = rf"(?s)^redlock_protect\['vendor\.\*'\] cannot protect vendor\.sync: .*{words}"
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=refused) as told:
            declare(app, base=base)
    assert str(told.value).endswith("(to leave it as it is, put 'vendor.sync': None first)")
    app = app_with({"vendor.sync": None, **ORDER})
    assert not isinstance(declare(app, base=base), RedlockTask)


def test_one_that_cannot_be_protected_leaves_the_others_protected():
    """A setting that comes late finds all of them at once."""
    app = app_with(None)
    declare(app)
    for name, base in (("vendor.a", WithLock), ("vendor.b", WithBind), ("vendor.load", Task)):
        app.task(name=name, shared=False, lazy=False, base=base)(sync)
    app.conf.redlock_protect = ORDER
    with pytest.raises(ConfigurationError, match=r"cannot protect vendor\.a"):
        protect_tasks(app)
    names = [name for name in app.tasks if name.startswith("vendor.")]
    assert names == ["vendor.sync", "vendor.load"]
    assert all(takes_lock(app.tasks[name]) for name in names)


def test_a_task_that_was_refused_is_refused_again():
    """The same object, not as one that is protected already."""
    app, task = app_with(), WithLock()
    task.name = "vendor.sync"
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="lock is what RedlockTask needs"):
            app.register_task(task)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unique_on": ["order"]}, "names 'order'.*did you mean 'order_id'"),
        ({"lock_key": "order:{order}"}, "order"),
        ({"unique_until": "expired"}, "needs unique_for"),
        ({"on_duplicate": "fail"}, "has no effect without unique_until"),
        ({"lock_key": "a", "unique_on": ["order_id"]}, "drop one of them"),
    ],
)
def test_options_that_do_not_fit_a_task_are_refused_by_name(options, words):
    refused = rf"redlock_protect\['vendor\.\*'\] cannot protect vendor\.sync: .*{words}"
    with pytest.raises(ConfigurationError, match=refused):
        declare(app_with({"vendor.*": options}))


def test_an_app_with_a_malformed_setting_is_never_used_without_it():
    """Whoever uses it next is told again, and nothing is published meanwhile."""
    app = app_with({"vendor.*": {"lock_tll": 5}})
    task = app.task(name="vendor.sync", shared=False)(sync)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="did you mean lock_ttl"):
            task.delay(7)
    app.conf.redlock_protect = ORDER
    assert isinstance(task.delay(7), UniqueResult)


# -- who imports it when ----------------------------------------------------------------

LATE = """
import sys, types
from celery import Celery

app = Celery("shop", broker="memory://", set_as_current=False)
settings = types.ModuleType("settings")
settings.redlock_nodes = ["redis://one:1/0"]
settings.redlock_protect = {{"vendor.*": {{}}}}
{}

@app.task(name="vendor.sync", shared=False)
def sync(order_id):
    pass

@app.task(name="vendor.load", shared=False, lazy={})
def load(order_id):
    pass

{}
app.finalize()
{}
tasks = [app.tasks[f"vendor.{{name}}"] for name in ("sync", "load")]
print(*("RedlockTask" in [c.__name__ for c in type(task).__mro__] for task in tasks))
"""
CONF = "app.config_from_object(settings)"
IMPORT = "import celery_redlock.protect"
MODULE = 'sys.path.insert(0, {!r})\napp.config_from_object("late_settings")'


@pytest.mark.parametrize(
    ("lines", "protected"),
    [
        ((f"{IMPORT}\n{CONF}", True, "", ""), True),
        ((CONF, False, IMPORT, ""), True),
        ((CONF, False, "", IMPORT), True),
        ((CONF, True, "import celery_redlock", "from celery_redlock import RedlockTask"), True),
        ((CONF, True, "import celery.bin.celery", ""), True),
        ((CONF, True, "import celery_redlock", ""), False),
    ],
    ids=["first", "before it is finalized", "after", "with the class", "celery", "not at all"],
)
def test_it_counts_from_its_import_on(lines, protected):
    """Also for apps that are there; nothing else of ours makes it count."""
    assert told_by(LATE.format(*lines)) == f"{protected} {protected}"


def test_the_configuration_module_may_import_it(tmp_path):
    """Celery reads that in the midst of finalizing the app."""
    (tmp_path / "late_settings.py").write_text(
        f'{IMPORT}\nredlock_nodes = ["redis://one:1/0"]\nredlock_protect = {{"vendor.*": {{}}}}\n'
    )
    program = LATE.format(MODULE.format(str(tmp_path)), True, "", "")
    assert told_by(program) == "True True"


PARENT = """
import pickle
from celery import Celery

app = Celery("shop", broker="memory://", fixups={})
app.conf.update(redlock_nodes=["redis://one:1/0"], redlock_protect={{"vendor.*": {{}}}})
import celery_redlock.protect
app.finalize()
print(pickle.dumps(app).hex())
"""
CHILD = """
import pickle

app = pickle.loads(bytes.fromhex("{}"))

@app.task(name="vendor.sync", shared=False)
def sync(order_id):
    pass

print("RedlockTask" in [c.__name__ for c in type(app.tasks["vendor.sync"]).__mro__])
"""


@pytest.mark.parametrize("fixups", [None, []])
def test_a_child_that_is_spawned_protects_what_its_parent_does(fixups):
    """The app takes it along, also one that was made before, or has fix-ups of its own."""
    assert told_by(CHILD.format(told_by(PARENT.format(fixups)))) == "True"


def told_by(program):
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_an_app_is_forgotten_with_what_protects_it():
    app = app_with()
    kept = [weakref.ref(one) for one in (app, declare(app), app._tasks)]
    app.close()
    del app
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_an_app_that_is_never_finalized_publishes_protected():
    """As one that only publishes: it looks at no task but the one that it has in hand."""
    app = app_with()
    task = app.task(name="vendor.sync", shared=False)(sync)
    assert isinstance(task.delay(7), UniqueResult)
    assert not app.finalized


def test_a_task_id_may_be_what_celery_takes():
    """As the key of a record of one's own."""
    task_id = uuid.UUID(int=7)
    assert declare(app_with()).apply_async((7,), task_id=task_id).id == str(task_id)


@pytest.mark.parametrize("fixups", [None, []])
def test_a_setting_that_comes_late_counts_once_the_app_is_finalized(fixups):
    """For the tasks that are there, and later ones; also in an app without fix-ups."""
    app = app_with(None, fixups=fixups)
    app.task(name="vendor.sync", shared=False, lazy=False)(sync)
    app.conf.redlock_protect = ORDER
    tasks = declare(app), declare(app, "vendor.load", other_sync)
    assert [takes_lock(task) for task in tasks] == [True, True]


def test_a_registry_of_the_users_stays_one():
    class Noting(TaskRegistry):
        def __setitem__(self, name, task):
            super().__setitem__(name, task)
            vars(self).setdefault("noted", []).append(name)

    for setting in (ORDER, None):
        app = app_with(setting, tasks=Noting())
        declare(app)
        assert isinstance(app.tasks, Noting)
        assert app.tasks.noted.count("vendor.sync") == 1
