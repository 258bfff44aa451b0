"""Who is told of events: what ``redlock_observers`` may say, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_redlock.errors import ConfigurationError
from celery_redlock.events import LockReleased
from celery_redlock.observers import prometheus
from celery_redlock.observers.journal import JournalObserver
from celery_redlock.observers.logging import Log
from celery_redlock.observers.names import FILES, READY, observer_of
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import OBSERVERS, Settings

NODES = ["redis://127.0.0.1:1/0"]


def plugin_with(**conf):
    app = Celery("shop", set_as_current=False)
    app.conf.update(redlock_nodes=NODES, **conf)
    plugin = plugin_for(app)
    plugin.of = app  # it knows its app by a weak reference
    return plugin


def settings_with(**conf):
    return Settings.from_conf({"redlock_nodes": NODES, **conf})


def test_by_default_there_is_a_log_and_a_journal():
    """And Celery's events, for a worker that was started with ``-E``."""
    log, journal, _ = plugin_with().observers
    assert OBSERVERS == ("logging", "journal", "celery")
    assert isinstance(log, Log)
    assert isinstance(journal, JournalObserver)


def test_an_observer_is_a_word_a_callable_or_a_name():
    heard = []
    plugin = plugin_with(redlock_observers=[heard.append, "logging", "math:sqrt"])
    assert plugin.observers[0] == heard.append
    assert plugin.observers[2].__name__ == "sqrt"
    event = LockReleased("name", 1.0)
    plugin.notify(event)  # that the third fails at it is logged
    assert heard == [event]


def test_nobody_at_all_is_fine():
    plugin = plugin_with(redlock_observers=[])
    assert plugin.observers == ()
    plugin.notify(LockReleased("name", 1.0))


@pytest.mark.parametrize(
    ("observers", "told"),
    [
        ("logging", "must be a list like"),
        (7, "must be a list like"),
        ([7], "a word, a name like 'shop.alerts:page' or a callable, got 7"),
        ([""], "a word, a name like"),
        ([None], "a word, a name like"),
    ],
)
def test_what_cannot_be_an_observer_is_refused_at_once(observers, told):
    with pytest.raises(ConfigurationError, match=f"redlock_observers.*{told}"):
        settings_with(redlock_observers=observers)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("promtheus", "did you mean 'prometheus'"),
        ("no_such_module:page", "there is no 'no_such_module:page'.*ready ones are logging"),
        ("math:no_such_function", "there is no 'math:no_such_function'"),
        ("math:pi", "'math:pi' is not callable but a float"),
        ("os", "'os' is not callable but a module"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(named, told):
    with pytest.raises(ConfigurationError, match=told):
        observer_of(named, plugin_with())


@pytest.mark.parametrize("word", sorted(READY))
def test_every_ready_observer_takes_an_event(word):
    plugin = plugin_with()
    observer_of(word, plugin)(LockReleased("name", 1.0))


@pytest.mark.parametrize(
    ("word", "package"), [("prometheus", "prometheus_client"), ("otel", "opentelemetry")]
)
def test_an_extra_that_is_missing_is_named(word, package):
    script = f"""
        import sys
        sys.modules[{package!r}] = None
        from celery import Celery
        from celery_redlock.errors import ConfigurationError
        from celery_redlock.plugin import plugin_for
        app = Celery("shop")
        app.conf.update(redlock_nodes={NODES!r}, redlock_observers=[{word!r}])
        try:
            plugin_for(app).observers
        except ConfigurationError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert f"pip install 'celery-redlock[{word}]'" in done.stdout


def test_a_prefork_worker_without_files_is_warned(monkeypatch, caplog):
    """Its children count each for itself; in other pools, and with files, all is well."""
    for has_children, in_files, times in ((False, False, 0), (True, True, 0), (True, False, 1)):
        monkeypatch.setattr(prometheus, "COUNTS_IN_FILES", in_files)
        observer_of("prometheus", SimpleNamespace(has_children=has_children))
        assert caplog.text.count("children are lost") == times


def test_a_missing_directory_for_metrics_is_named(tmp_path):
    """With the variable, before prometheus_client trips over it in a child."""
    script = """
    from celery_redlock import ConfigurationError
    from celery_redlock.observers.names import observer_of

    try:
        observer_of("prometheus", None)
    except ConfigurationError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, FILES: str(tmp_path / "missing")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{FILES}: no metrics can be kept in '{tmp_path}/missing" in done.stdout


def test_changed_settings_have_other_observers():
    plugin = plugin_with(redlock_observers=[])
    assert plugin.observers == ()
    plugin.app.conf.redlock_observers = ["logging"]
    plugin.refresh()
    (log,) = plugin.observers
    assert isinstance(log, Log)


@pytest.mark.parametrize("token", ["", "short", 7, "fifteen-letters"])
def test_a_token_that_can_be_guessed_is_refused_and_not_repeated(token):
    """What an operator typed by mistake may be a real password of something else."""
    with pytest.raises(ConfigurationError, match="redlock_web_token") as refused:
        settings_with(redlock_web_token=token)
    assert not token or str(token) not in str(refused.value).replace("16", "")


def test_the_token_is_not_shown():
    assert "sixteen-letters!" not in repr(settings_with(redlock_web_token="sixteen-letters!"))


def test_observers_that_are_replaced_are_closed():
    """A thread that sends for the old ones would never end."""
    closed = []

    class Closing:
        def __call__(self, event):
            """Take note."""

        def close(self):
            """Let go."""
            closed.append(self)

    observer = Closing()
    plugin = plugin_with(redlock_observers=[observer])
    assert plugin.observers == (observer,)
    plugin.app.conf.redlock_observers = []
    plugin.refresh()
    assert closed == [observer]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
def test_a_soft_time_limit_that_strikes_in_an_observer_is_not_lost():
    """Raised there it would pass for a failure of the observer; it takes effect right after."""

    def limit(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, limit)
    try:
        plugin = plugin_with(redlock_observers=[lambda _: signal.raise_signal(signal.SIGUSR1)])
        with pytest.raises(TimeoutError):
            plugin.notify(LockReleased("name", 1.0))
    finally:
        signal.signal(signal.SIGUSR1, before)
