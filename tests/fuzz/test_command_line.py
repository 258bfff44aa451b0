"""Arguments of any kind to the commands: a code of 0, 1 or 2 and a word, no traceback."""

from __future__ import annotations

import click
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_redlock import RedlockTask
from celery_redlock.ops.cli import redlock
from celery_redlock.ops.cli.group import COMMANDS
from celery_redlock.ops.demo import story
from celery_redlock.ops.main import main
from celery_redlock.ops.web import command
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.nodes import bootstrap
from fuzz.hostile import ACTING

#: As it is in argv: bytes that are no UTF-8 become lone surrogates there.
WORDS = (
    st.sampled_from(
        [
            "--name",
            "--token",
            "--yes",
            "--json",
            "--force",
            "--limit",
            "--lines",
            "-n",
            "--no-follow",
            "--watch",
        ]
    )
    | st.sampled_from(["--help", "--task", "--lock", "--event", "--port", "--host", "--allow-host"])
    | st.sampled_from(
        ["shop.bill", "shop.bil", "celery.chord", "[1]", '{"x": 1}', "[", "{}", "[[[[", "NaN", "*["]
    )
    | st.sampled_from(
        ["a" * 8, "0", "-1", "1e9", "99999999999999999999", "[" * 100_000, "--", "-", "--json=x"]
    )
    | st.sampled_from([text for text in ACTING if text != "\0"])
    | st.text(st.characters(exclude_characters="\0"), max_size=10)
)


@pytest.fixture(scope="module")
def app(shared_nodes):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = [shared_nodes[0].url, "redis://127.0.0.1:1/0", "redis://127.0.0.1:2/0"]
    app.conf.redlock_observers = []

    def bill(x=1):
        """Do nothing."""

    app.task(base=RedlockTask, name="shop.bill", lock_key="n", shared=False)(bill)
    plugin = plugin_for(app)
    bootstrap(app.conf.redlock_nodes, plugin.settings.rules)
    yield app
    plugin.locks.close()
    app.close()


@pytest.fixture
def harmless(monkeypatch):
    monkeypatch.setattr(command, "serve", lambda *_: None)
    monkeypatch.setattr(story, "run", lambda *_, **__: 0)


def assert_ends_well(group, words, context=None):
    result = CliRunner().invoke(group, words, obj=context, color=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{words!r}: {result.exception!r}") from result.exception
    assert result.exit_code in (0, 1, 2), (words, result.output)
    if result.exit_code == 2:
        assert result.stderr.strip()
    assert "Traceback" not in result.output
    return result


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(COMMANDS)), words=st.lists(WORDS, max_size=4))
@example(name="why", words=["--name", "\udcff"])
@example(name="release", words=["\udcff", "--token", "a" * 8, "--yes"])
@example(name="release", words=["n", "--token", "\udcff" * 8, "--yes"])
@example(name="why", words=["shop.bill", "[" * 100_000])
@example(name="why", words=["shop.bill", '["\\ud800"]'])
@example(name="ls", words=["\udcff"])
@example(name="tail", words=["--no-follow", "--task", "["])
@example(name="web", words=["--host", "\udcff"])
@example(name="web", words=["--allow-host", ""])
def test_a_command_bears_any_arguments(app, harmless, name, words):
    if name == "tail":  # which goes on until somebody ends it
        words = ["--no-follow", *(word for word in words if word != "--follow")]
    assert_ends_well(redlock, [name, *words], CLIContext(app, no_color=True, workdir=None))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(WORDS | st.sampled_from(["demo", "--without-locks", "--version"]), max_size=3)
)
def test_the_script_bears_any_arguments(harmless, words):
    assert_ends_well(main, words)


def test_a_command_that_breaks_is_seen():
    """The twin: an error that nobody turned into a word."""

    @click.command()
    @click.argument("number")
    def broken(number):
        int(number)

    with pytest.raises(AssertionError, match="ValueError"):
        assert_ends_well(broken, ["x"])
