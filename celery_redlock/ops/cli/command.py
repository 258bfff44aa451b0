"""What all commands have in common: the settings of the app, ``--json``, exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import click
from celery.bin.base import CLIContext

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.records import is_text
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import Settings

__all__ = [
    "MISCONFIGURED",
    "TEXT",
    "UNWELL",
    "SettingsError",
    "app_at_hand",
    "app_with_tasks",
    "ends_with_its_reader",
    "finish",
    "json_option",
    "outlives_its_reader",
    "settings_of",
    "with_settings",
    "with_settings_while_read",
]

#: Exit code when something is not as it should be, was refused, or a lock is held.
UNWELL = 1
#: Exit code when the app's settings make no sense; click's own for wrong usage, too.
MISCONFIGURED = 2
#: How Celery calls the app that it makes when ``-A`` is missing.
NO_APP = "default"

#: A command as click calls it.
Command = Callable[..., None]


class SettingsError(click.ClickException):
    """The app's settings make no sense; ends the command with exit code 2."""

    exit_code = MISCONFIGURED


class Text(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """Text that can be encoded; what is none in argv comes as lone surrogates."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        """Return *value*, or say that it is no text."""
        if not is_text(value):
            self.fail("it is no text in the encoding of this terminal", param, ctx)
        return str(value)


TEXT = Text()


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give *command* the option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def with_settings(command: Command) -> Command:
    """Hand the settings of the app at hand to *command*; tell cleanly what is wrong with them."""
    return outlives_its_reader(handed_settings(command))


def with_settings_while_read(command: Command) -> Command:
    """Do as `with_settings`, for a command that does nothing but print."""
    return ends_with_its_reader(handed_settings(command))


def handed_settings(command: Command) -> Command:
    """Return *command* with the settings of the app at hand as its first argument."""

    @wraps(command)
    def run(**options: Any) -> None:
        try:
            command(settings_of(app_at_hand()), **options)
        except ConfigurationError as error:
            raise SettingsError(str(error)) from None

    return run


def ends_with_its_reader(command: Command) -> Command:
    """Let *command* end without a word when nobody reads its output any more (``| head``)."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except BrokenPipeError:
            # Python would try to write the rest at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            finish(0)

    return run


def outlives_its_reader(command: Command) -> Command:
    """Let *command* do its work and keep its exit code, whether anybody reads its output or not."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        with patient_stdout():
            command(*args, **options)

    return run


@contextlib.contextmanager
def patient_stdout() -> Iterator[None]:
    """Have a stdout that nobody reads any more swallow the rest, for the body of a ``with``."""
    before: Any = sys.stdout
    try:
        raw = Patient(before.fileno(), "wb", closefd=False)
    except (AttributeError, OSError, ValueError):  # none, or none of the system's: nobody leaves it
        yield
        return
    before.flush()
    # Like Python's own, but for what becomes of a write that nobody reads.
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=before.line_buffering
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # no space left, for example
            sys.stdout.flush()
        sys.stdout = before


class Patient(io.FileIO):
    """A file whose reader may leave: from then on, what is written goes nowhere."""

    def write(self, data: Any) -> int:
        """Write *data*; returns how much of it was taken."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def finish(code: int) -> None:
    """End the command with exit code *code*."""
    click.get_current_context().exit(code)


def app_at_hand() -> Any:
    """Return the app that ``celery -A`` has named."""
    context: CLIContext = click.get_current_context().obj
    return context.app


def app_with_tasks(app: Any) -> Any:
    """Return *app* with all the tasks that a worker would know; raises ConfigurationError."""
    from celery_redlock.ops.loading import load_tasks  # noqa: PLC0415  not for every worker

    load_tasks(app)
    return app


def settings_of(app: Any) -> Settings:
    """Return the settings of *app*; raises ConfigurationError."""
    try:
        settings = plugin_for(app).settings
    except ConfigurationError as error:
        if app.main != NO_APP:
            raise
        msg = f"{error}. No app was named: celery -A APP redlock ..."
        raise ConfigurationError(msg) from None
    except Exception as error:  # of a configuration module of the app's
        from celery_redlock.ops.loading import AppError  # noqa: PLC0415  not for every worker

        raise AppError.of(error) from error
    if settings.is_fallback:
        click.echo(
            "Note: redlock_nodes is not set, so this is about the one Redis that the app has as "
            "its result backend or broker.",
            err=True,
        )
    return settings
