"""What the doctor makes of other libraries: each option, what is written for it, and no more."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest
from celery import Celery, Task

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.doctor import peer_facts
from celery_redlock.ops.doctor.check_migration import advise, check_migration, shown
from celery_redlock.ops.doctor.facts import Facts, PeerTask
from celery_redlock.ops.doctor.peers import PEERS, REDBEAT_SCHEDULE, SETTINGS
from celery_redlock.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migration.md"
URLS = ["redis://lock-1/0"]
SETTINGS_OF_OURS = Settings(nodes=URLS, rules=Rules())
WRAPPED = Settings(nodes=URLS, rules=Rules(), beat_scheduler="redbeat.schedulers:RedBeatScheduler")


def facts(*tasks, ours=SETTINGS_OF_OURS, beat="celery.beat:PersistentScheduler", **settings):
    """Return facts with these tasks and settings of other libraries."""
    known = {"settings": ours, "peer_tasks": tasks, "beat_scheduler": beat}
    return Facts(**known, peer_settings=settings)


def theirs(library, options, **known):
    """Return a task that is based on the class of *library*."""
    return PeerTask(
        **{"name": "shop.t", "is_based": True, "is_ours": False, **known},
        library=library,
        options=options,
    )


def finding(*tasks, **known):
    """Return the one finding about these tasks and settings."""
    (found,) = check_migration(facts(*tasks, **known))
    return found


def body(a=1, b=2):
    """Do nothing, as a task."""


# -- what is written -----------------------------------------------------------------------

ONCE = {"once": {"settings": {"default_timeout": 7200}}}
WRITTEN = [
    ("celery-once", {"once": {}}, {}, "unique_until='finished', on_duplicate='fail'"),
    (
        "celery-once",
        {"once": {"graceful": True, "keys": ["a"]}},
        {},
        "unique_on=('a',), unique_until='finished', on_duplicate='join'",
    ),
    (
        "celery-once",
        {"once": {"graceful": False, "keys": [], "timeout": 3600}},
        ONCE,
        "unique_on=(), unique_until='finished', on_duplicate='fail'",
    ),
    (
        "celery-once",
        {"once": {"unlock_before_run": True}},
        ONCE,
        "unique_until='started', unique_for=7200, on_duplicate='fail', on_conflict='reschedule'",
    ),
    ("celery-once", {"once": "nonsense"}, {}, "unique_until='finished', on_duplicate='fail'"),
    (
        "celery-singleton",
        {"unique_on": "a", "raise_on_duplicate": True, "lock_expiry": 60},
        {},
        "unique_on=('a',), unique_until='finished', unique_for=60, on_duplicate='fail'",
    ),
    (
        "celery-singleton",
        {"unique_on": [], "raise_on_duplicate": None, "lock_expiry": None},
        {"singleton_raise_on_duplicate": True, "singleton_lock_expiry": 5},
        "unique_until='finished', unique_for=5, on_duplicate='fail'",
    ),
    (
        "celery-singleton",
        {"raise_on_duplicate": False},
        {"singleton_raise_on_duplicate": True},
        "unique_until='finished', on_duplicate='join'",
    ),
    (
        "celery-heimdall",
        {"heimdall": {"unique": False, "unique_raises": True, "key": "a{b}"}},
        {},
        "lock_key='a{{b}}', unique_until='finished', on_duplicate='fail'",
    ),
    (
        "celery-heimdall",
        {"heimdall": {"unique": True, "unique_wait_for_expiry": True, "key": len}},
        {"heimdall_unique_raises": True},
        (
            "lock_key=lambda task, args, kwargs: KEY(args, kwargs), unique_until='expired', "
            "unique_for=3600, on_duplicate='fail'"
        ),
    ),
    (
        "celery-heimdall",
        {"heimdall": {"unique": True, "unique_timeout": 9}},
        {"heimdall_unique_timeout": 10},
        "unique_until='finished', unique_for=9, on_duplicate='join'",
    ),
    (
        "celery-once-task",
        {"queue_lock": True, "running_lock": True, "queue_lock_timeout": 600},
        {},
        "unique_until='started', unique_for=600, on_duplicate='join', on_conflict='skip'",
    ),
    ("celery-once-task", {"queue_lock": False, "running_lock": True}, {}, "on_conflict='skip'"),
    (
        "celery-once-task",
        {"queue_lock": True, "running_lock": False},
        {"once_queue_lock_timeout": 60},
        "unique_until='started', unique_for=60, on_duplicate='join', on_conflict='reschedule'",
    ),
]


@pytest.mark.parametrize(("library", "options", "settings", "expected"), WRITTEN)
def test_what_to_write_follows_from_the_values(library, options, settings, expected):
    """Of the task, and where it says nothing of the app; a default of ours is not repeated."""
    found, *_ = check_migration(facts(theirs(library, options), **settings))
    assert (found.level, found.code, found.where) == ("note", "migrate-task", "shop.t")
    assert re.match(r"Write base=RedlockTask, (.*?)\.(?= [A-Z]|$)", found.fix)[1] == expected


@pytest.mark.parametrize(("library", "options", "settings", "expected"), WRITTEN)
def test_what_is_to_be_written_can_be_written(library, options, settings, expected):
    """A task of ours takes each of these lines, and makes a lock name."""
    app = Celery("moved", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = URLS
    known = {"KEY": lambda args, kwargs: f"digest:{args[0]}"}
    given = eval(f"dict({expected})", known)
    task = app.task(body, base=RedlockTask, name="t", shared=False, **given)
    app.finalize()
    task.check_lock()
    assert task.lock_name((1,))
    assert advise(theirs(library, options), settings).write.keys() == given.keys()


def test_with_acks_late_the_first_key_of_once_task_stands_until_the_end():
    """Where it is acknowledged late it is unlocked late."""
    task = theirs("celery-once-task", {"queue_lock": True}, acks_late=True)
    assert "unique_until='finished'" in finding(task).fix


def test_each_option_is_explained():
    """Those of the task that the library reads, and that it does not read others."""
    told = finding(theirs("celery-once", {"once": {"graceful": True, "timeout": 60, "x": 1}})).what
    assert "graceful=True: a duplicate is dropped without an error." in told
    assert "timeout=60: the key ends 60 s after the publish at the latest." in told
    assert "x: celery-once does not read it." in told
    shared = finding(theirs("celery-singleton", {"unique_on": ["a"]}))
    assert "our option of this name means the same" in shared.what
    assert "Its key never expires" in shared.fix
    off = finding(theirs("celery-heimdall", {"heimdall": {"unique": False}})).what
    assert "it counts as on" in off


def test_every_key_of_a_dict_has_a_meaning():
    """None is said not to be read that is."""
    for library in ("celery-once", "celery-heimdall"):
        (attribute,) = PEERS[library].attributes
        told = advise(theirs(library, {attribute: dict.fromkeys(PEERS[library].keys, 1)}), {})
        assert len(told.meant) == len(PEERS[library].keys)
        assert not [meaning for meaning in told.meant if "does not read" in meaning]


@pytest.mark.parametrize("options", [{"rate_limit": object()}, {"times": 2, "per": 60}])
def test_rate_limits_have_no_counterpart(options):
    """That is said plainly, and that such a task stays where it is, or is of both."""
    alone = finding(theirs("celery-heimdall", {"heimdall": options}))
    assert (alone.level, alone.code) == ("note", "migrate-task")
    assert alone.fix.startswith("Nothing has to be moved. Rate limits have no counterpart")
    both = finding(theirs("celery-heimdall", {"heimdall": options}, is_ours=True))
    assert (both.level, both.code) == ("note", "migrate-task")


def test_a_task_of_both_is_an_error():
    """Two locks that know nothing of each other; our own options need not be written again."""
    own = frozenset({"unique_until"})
    found = finding(theirs("celery-once", {"once": {"graceful": True}}, is_ours=True, own=own))
    assert (found.level, found.code) == ("error", "migrate-mixed")
    assert found.fix == "Remove QueueOnce: on_duplicate='join'."


def test_an_option_that_is_left_over_is_a_warning():
    """Nothing reads it; what the task says already is not to be written again."""
    left = {"is_based": False, "is_ours": True}
    found = finding(theirs("celery-once", {"once": {"keys": ["a"]}}, **left))
    assert (found.level, found.code) == ("warning", "migrate-option")
    assert found.fix.startswith("Instead of it write unique_on=('a',), unique_until='finished'")
    own = frozenset({"unique_on", "unique_until", "on_duplicate"})
    assert finding(theirs("celery-once", {"once": {"keys": ["a"]}}, own=own, **left)).fix == (
        "Remove it."
    )


# -- how they are known --------------------------------------------------------------------


def base(name, module, **attributes):
    """Return a class as a library has it."""
    return type(name, (Task,), {"abstract": True, "__module__": module, **attributes})


QUEUE_ONCE = base("QueueOnce", "celery_once.tasks", once={"graceful": False})
SINGLETON = base("Singleton", "celery_singleton.singleton", unique_on=None, lock_expiry=None)


def app_with(**tasks):
    """Return an app with these tasks; their options are *tasks*."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = URLS
    for name, options in tasks.items():
        app.task(body, name=name, shared=False, **options)
    return app


def known(app):
    """Return what is known of the tasks of *app*: name -> library, based, options."""
    return {t.name: (t.library, t.is_based, t.options) for t in peer_facts.peer_tasks(app)}


def test_tasks_are_known_by_the_names_of_their_classes():
    """Also behind a class of the user's; a class that is called so elsewhere is none of them."""
    own = type("Own", (QUEUE_ONCE,), {"abstract": True, "__module__": "shop"})
    app = app_with(
        once={"base": own, "once": {"keys": ["a"]}},
        single={"base": SINGLETON, "unique_on": ["a"]},
        other={"base": base("QueueOnce", "shop.tasks", once={"graceful": True})},
        plain={"once": {"graceful": True}},
    )
    found = known(app)
    assert found.keys() == {"once", "single"}
    assert found["once"] == ("celery-once", True, {"once": {"keys": ["a"]}})
    assert found["single"][2]["unique_on"] == ["a"]


def test_tasks_of_celery_itself_are_left_out():
    """Where a class of theirs is the base of all tasks, there is nothing to write for these."""
    app = Celery("shop", broker="memory://", set_as_current=False, task_cls=SINGLETON)
    app.task(body, name="mine", shared=False)
    assert base_names(app.tasks["celery.chord_unlock"]) >= {"Singleton"}
    assert known(app).keys() == {"mine"}


def base_names(task):
    """Return the names of all classes of *task*."""
    return {cls.__name__ for cls in type(task).__mro__}


def test_options_of_theirs_on_tasks_of_ours_are_known():
    """Those that only they can mean."""
    app = app_with(
        once={"base": RedlockTask, "once": {"graceful": True}},
        single={"base": RedlockTask, "raise_on_duplicate": True},
        heimdall={"base": RedlockTask, "heimdall": {"unique": True}},
        task={"base": RedlockTask, "running_lock": False},
    )
    assert {name: told[0] for name, told in known(app).items()} == {
        "once": "celery-once",
        "single": "celery-singleton",
        "heimdall": "celery-heimdall",
        "task": "celery-once-task",
    }


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"once": True},
        {"once": {}},
        {"once": {"a": 1}},
        {"once": {"keys": ["a"], "mine": 1}},
        {"heimdall": "a god"},
        {"heimdall": {"horn": 1}},
        {"raise_on_duplicate": "now and then"},
        {"queue_lock": "redis://queue"},
        {"running_lock": object()},
        {"running_lock_timeout": "long"},
        {"unique_on": ("a",), "unique_until": "finished"},
    ],
)
def test_what_is_called_like_theirs_is_left_alone(attributes):
    """No finding for an attribute of the user's own, nor for options of ours."""
    assert known(app_with(mine={"base": RedlockTask, **attributes})) == {}


def test_a_task_that_is_refused_does_not_hide_the_others():
    """``lock_expiry`` is refused by a task of ours; it is known all the same, as are later ones."""
    app = app_with(
        first={"base": RedlockTask, "lock_expiry": 60},
        second={"base": QUEUE_ONCE},
        third={"base": RedlockTask, "lock_expiry": 60},
    )
    with pytest.raises(ConfigurationError, match="first: unknown option lock_expiry"):
        app.finalize()
    peer_facts.load_the_rest(app)
    assert known(app).keys() == {"first", "second", "third"}


def test_a_task_that_fails_in_another_way_does_not_hide_the_others():
    """What it raises is its own; the doctor goes on."""
    broken = type("Broken", (Task,), {"abstract": True, "on_bound": lambda *_: {}["no key"]})
    app = app_with(
        first={"base": RedlockTask, "lock_expiry": 60},
        second={"base": broken},
        third={"base": QUEUE_ONCE},
    )
    with pytest.raises(ConfigurationError):
        app.finalize()
    peer_facts.load_the_rest(app)
    assert known(app).keys() >= {"first", "third"}


def test_values_are_shown_without_what_may_be_a_password():
    """Nor does one that has no text end the doctor."""

    class Silent:
        def __repr__(self):
            raise ValueError

    assert shown("redis://:s3cret@lock/0") == "str(...)"
    assert shown([Silent()]) == "list(...)"
    assert shown(60) == "60"


def test_an_attribute_that_cannot_be_read_is_as_none():
    """The doctor does not fall ill itself."""

    def fails(_):
        raise RuntimeError("no configuration")

    broken = type("Broken", (SINGLETON,), {"abstract": True, "lock_expiry": property(fails)})
    assert known(app_with(a={"base": broken}))["a"][2]["lock_expiry"] is None


# -- settings ------------------------------------------------------------------------------


def test_settings_of_theirs_are_known_with_and_without_a_namespace():
    """As Celery finds them; a setting ``ONCE`` that is not a dict of theirs is the user's own."""
    app = app_with()
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {}}
    app.conf.singleton_lock_expiry = 60
    assert peer_facts.peer_settings(app).keys() == {"once", "singleton_lock_expiry"}
    app.conf.ONCE = {"upon": "a time"}
    assert peer_facts.peer_settings(app).keys() == {"singleton_lock_expiry"}
    spaced = app_with()
    spaced.config_from_object(
        {"CELERY_ONCE": {"backend": "b"}, "CELERY_SINGLETON_LOCK_EXPIRY": 5}, namespace="CELERY"
    )
    assert peer_facts.peer_settings(spaced) == {
        "once": {"backend": "b"},
        "singleton_lock_expiry": 5,
    }


def test_every_setting_has_its_fix_and_none_shows_a_url():
    """With a value, and with None; passwords stand in URLs."""
    url = "redis://:s3cret@lock/0"
    for name in {*SETTINGS} - {"once"}:
        if name.startswith("redbeat_"):
            continue
        for value in (url if "url" in name or "backend" in name else 5, None):
            found = finding(**{name: value})
            assert (found.level, found.code, found.where) == ("note", "migrate-setting", name)
            assert "s3cret" not in found.what + found.fix
            assert found.fix.endswith("Delete it.")
    once = {"settings": {"url": url, "default_timeout": 60, "blocking": True}}
    found = finding(once=once)
    assert found.where == "ONCE"
    assert "s3cret" not in found.what + found.fix
    assert "Write unique_for=60 on the tasks. blocking and" in found.fix


def test_a_setting_stays_as_long_as_tasks_need_it():
    """It is to be deleted with the last of them."""
    task = theirs("celery-singleton", {"lock_expiry": 5})
    found = list(check_migration(facts(task, singleton_key_prefix="s")))[1]
    assert "Tasks of it: 1." in found.what
    assert found.fix.endswith("Delete it with the last task of celery-singleton.")


# -- beat ----------------------------------------------------------------------------------

REDBEAT = "redbeat.RedBeatScheduler"
KEY, TIMEOUT, URL = (
    "redbeat_lock_key",
    "redbeat_lock_timeout",
    {"redbeat_redis_url": "redis://:p@h"},
)


@pytest.mark.parametrize(
    ("ours", "beat", "settings", "expected"),
    [
        (SETTINGS_OF_OURS, "redlock", {}, []),
        (WRAPPED, "redlock", URL, []),
        (WRAPPED, "redlock", {**URL, KEY: None}, []),
        (WRAPPED, "redlock", {KEY: "mine", TIMEOUT: 60}, [("note", KEY), ("note", TIMEOUT)]),
        (WRAPPED, REDBEAT, URL, [("warning", "beat_scheduler")]),
        (SETTINGS_OF_OURS, REDBEAT, {}, [("note", "beat_scheduler")]),
        (SETTINGS_OF_OURS, base("Mine", "redbeat.schedulers"), {}, [("note", "beat_scheduler")]),
        (SETTINGS_OF_OURS, "celery.beat:PersistentScheduler", {TIMEOUT: 60}, [("note", TIMEOUT)]),
        (SETTINGS_OF_OURS, "redlock", URL, [("note", "redbeat_redis_url")]),
    ],
)
def test_redbeats_lock(ours, beat, settings, expected):
    """Where it leads, where its settings have no effect, and where it could lead beside us."""
    found = list(check_migration(facts(ours=ours, beat=beat, **settings)))
    assert [(f.level, f.where) for f in found] == expected
    assert {f.code for f in found} <= {"migrate-beat"}


def test_what_redbeats_settings_mean_is_told():
    """Its timeout, and that there is no lock at all."""
    told = finding(beat=REDBEAT, redbeat_lock_timeout=60)
    assert "which ends 60 s after its beat has died" in told.what
    assert "beat_scheduler = 'redlock'" in told.fix
    assert "no lock" in finding(beat=REDBEAT, redbeat_lock_key=None).what


def test_an_app_without_any_of_it_has_no_finding():
    """The twin of all of the above."""
    app = app_with(ours={"base": RedlockTask}, plain={})
    assert known(app) == {}
    assert peer_facts.peer_settings(app) == {}
    assert list(check_migration(facts())) == []


def test_none_of_them_is_imported():
    """The doctor knows them by name, wherever it runs."""
    packages = {peer.package for peer in PEERS.values()} | {"redbeat"}
    for file in (ROOT / "celery_redlock" / "ops" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in getattr(node, "names", ())] if hasattr(node, "names") else []
            names.append(getattr(node, "module", None) or "")
            assert not packages & {str(name).partition(".")[0] for name in names}, file


# -- the libraries as they are -------------------------------------------------------------

#: Package -> strings that it looks up, and that are no options.
NOT_OPTIONS = {
    "celery_once": {"self", "retries", "host", "port", "password", "db", "ssl", "socket_timeout"},
    "celery_singleton": {"result_backend", "broker_url"},
    "celery_heimdall": {"result_backend", "broker_url", "heimdall", "task", "args", "kwargs", "id"},
    "celery_once_task": {"task_id", "id", "name", "args", "kwargs", "task"},
    "redbeat": set(),
}
LOOKUPS = ("get", "_from_task_or_app", "either_or")
#: Where options are read.
FILES = {
    "celery_once": ("tasks.py", "helpers.py", "backends/redis.py", "backends/file.py"),
    "celery_singleton": ("singleton.py", "config.py"),
    "celery_heimdall": ("task.py", "config.py"),
    "celery_once_task": ("task.py", "config.py", "django.py", "signals.py"),
    "redbeat": ("schedulers.py",),
}
SECTIONS = {
    "celery_once": "From celery-once",
    "celery_singleton": "From celery-singleton",
    "celery_heimdall": "From celery-heimdall",
    "celery_once_task": "From celery-once-task",
    "redbeat": "From RedBeat's lock",
}


def folder_of(package):
    """Return where *package* lies; without it a test is skipped at home and fails in CI."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        assert os.environ.get("CI") != "true", f"{package} is not installed"
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def trees(package):
    """Return the syntax trees of the files of *package* that read options."""
    folder = folder_of(package)
    with warnings.catch_warnings():  # their escape sequences are theirs
        warnings.simplefilter("ignore")
        return [ast.parse((folder / name).read_text()) for name in FILES[package]]


def read_by(package):
    """Return the names of all options, settings and attributes that *package* reads."""
    found = set()
    for node in (node for tree in trees(package) for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            index = {"getattr": 1, **dict.fromkeys(LOOKUPS, 0)}.get(name)
            if index is not None and len(node.args) > index:
                found.add(getattr(node.args[index], "value", None))
        elif isinstance(node, ast.Subscript):
            found.add(getattr(node.slice, "value", None))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            found.add(getattr(node.left, "value", None))
    names = {name for name in found if isinstance(name, str) and name.isidentifier()}
    return names - NOT_OPTIONS[package]


def section(package):
    """Return the part of the page about *package*."""
    return PAGE.read_text().partition(f"\n## {SECTIONS[package]}\n")[2].partition("\n## ")[0]


def in_table(package):
    """Return all words in the first column of the tables about *package*."""
    rows = [line for line in section(package).splitlines() if line.startswith("| ")]
    cells = [row.split(" | ")[0] for row in rows]
    return {word for cell in cells for code in re.findall(r"`([^`]+)`", cell)
            for word in re.findall(r"\w+", code)}  # fmt: skip


@pytest.mark.parametrize("package", SECTIONS)
def test_every_option_that_a_library_reads_is_in_the_table(package):
    """What its own source looks up has a row: options, settings, and attributes of its class."""
    options = read_by(package)
    if package == "redbeat":  # those of the connection are redis-py's
        options = {name for name in options if name.startswith("redbeat_")}
        assert options == {KEY, TIMEOUT, *REDBEAT_SCHEDULE}
    assert len(options) > 3
    assert options - in_table(package) == set()


@pytest.mark.parametrize("library", PEERS)
def test_every_attribute_and_method_of_a_class_is_in_the_table(library):
    """What a task of theirs has, and one of Celery's has not, and is not private."""
    peer = PEERS[library]
    (cls,) = (
        node
        for tree in trees(peer.package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == peer.base
    )
    names = set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    own = {n for n in names if not n.startswith("_") and not hasattr(Task, n)}
    assert own
    assert {*peer.attributes} - own <= {"heimdall"}  # which its users define
    assert own - in_table(peer.package) == set()


@pytest.mark.parametrize("library", PEERS)
def test_what_the_doctor_knows_is_what_the_library_reads(library):
    """Its attributes, the keys of its dict and its settings; and their names in the table."""
    peer = PEERS[library]
    source = "\n".join(ast.unparse(tree) for tree in trees(peer.package)).lower()
    old = {"once_redis_url", "once_default_timeout"} if library == "celery-once" else set()
    for name in {*peer.attributes, *peer.keys, *peer.settings} - old:
        plain = name.removeprefix("heimdall_")
        assert re.search(rf"\b\w*{plain}\b", source), name
    words = {word.lower() for word in in_table(peer.package)}
    for name in (*peer.attributes, *peer.keys):
        assert name in words
    for name in peer.settings:
        assert {name, f"celery_{name}"} & words, name
