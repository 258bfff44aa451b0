"""Common parts of all commands: the app and its settings, ``--json``, exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.records import is_text
from celery_redlock.ops.loading import AppError
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import Settings

__all__ = [
    "MISCONFIGURED",
    "TEXT",
    "UNWELL",
    "SettingsError",
    "Text",
    "app_at_hand",
    "operator_command",
    "settings_at_hand",
    "settings_of",
]

#: Exit code when something is not as it should be, was refused, or a lock is held.
UNWELL = 1
#: Exit code when the app's settings are invalid; click's own for wrong usage, too.
MISCONFIGURED = 2


class SettingsError(click.ClickException):
    """The app's settings are invalid; ends the command with exit code 2."""

    exit_code = MISCONFIGURED


class Text(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    """Text that can be encoded; other bytes in argv come as lone surrogates."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not is_text(value):
            self.fail("it is no text in the encoding of this terminal", param, ctx)
        if not value:  # an unset variable, and no lock has such a name
            self.fail("it is empty", param, ctx)
        return str(value)


TEXT = Text()


def operator_command(
    short_help: str, epilog: str, *, only_prints: bool = False
) -> Callable[[Callable[..., int]], click.Command]:
    """
    Make a command, with ``--json``, of a function that returns its exit code.

    One that *only_prints* ends when nobody reads its output any more (``| head``). Any other does
    its work, and keeps its exit code.
    """

    def command(function: Callable[..., int]) -> click.Command:
        @wraps(function)
        def run(**options: Any) -> None:
            with contextlib.ExitStack() as stack:
                if sys.stdout is not None and not only_prints:
                    stack.enter_context(contextlib.redirect_stdout(PatientStdout(sys.stdout)))
                try:
                    code = function(**options)
                except ConfigurationError as error:
                    raise SettingsError(str(error)) from None
                except BrokenPipeError:
                    if not only_prints:
                        raise
                    to_nowhere(sys.stdout)
                    code = 0
            click.get_current_context().exit(code)

        made = click.command(cls=CeleryCommand, epilog=epilog, short_help=short_help)(run)
        made.params.append(click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."))
        return made

    return command


class PatientStdout:
    """A stdout whose reader may leave: from then on, what is written goes nowhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            to_nowhere(self._stream)


def to_nowhere(stream: Any) -> None:
    """Discard what is still to be written to *stream*; Python would complain of it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def app_at_hand() -> Any:
    return click.get_current_context().obj.app


def settings_at_hand() -> Settings:
    return settings_of(app_at_hand())


def settings_of(app: Any) -> Settings:
    try:
        return plugin_for(app).settings
    except ConfigurationError as error:
        if app.main != "default":  # as of the app that Celery makes when -A is missing
            raise
        msg = f"{error}. No app was named: celery -A APP redlock ..."
        raise ConfigurationError(msg) from None
    except Exception as error:  # of a configuration module of the app's
        raise AppError.of(error) from error
