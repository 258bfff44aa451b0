"""``celery -A APP redlock web``: serve the page."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand

from celery_redlock.errors import ConfigurationError
from celery_redlock.ops.cli.command import SettingsError, settings_of
from celery_redlock.ops.loading import load_tasks

if TYPE_CHECKING:
    from celery_redlock.ops.web.guard import Door
    from celery_redlock.settings import Settings

__all__ = ["web_command"]

HOST, PORT = "127.0.0.1", 8737
EXAMPLES = """\b
Releasing a lock needs a token of at least 16 characters, from the environment
(REDLOCK_WEB_TOKEN, which wins) or the app's setting redlock_web_token. Without
one the page can only be read.

\b
On 127.0.0.1 everybody on this machine may read. On any other address, or with
an --allow-host of another machine, the token is asked for as the password
(HTTP Basic) before anything is shown, and the command does not start without
one: make it of random characters. The page speaks no TLS: if others than this
machine use it, put a reverse proxy before it, which keeps the Host header, and
name that with --allow-host.

\b
Examples:
  celery -A shop redlock web
  REDLOCK_WEB_TOKEN=$(cat token) celery -A shop redlock web --port 8080
  celery -A shop redlock web --host 0.0.0.0 --allow-host locks.example.com
"""


@click.command("web", cls=CeleryCommand, epilog=EXAMPLES)
@click.option("--host", default=HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=PORT,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 for any that is free.",
)
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="Another name under which browsers may ask for the page; may be given more than once. "
    "Unless it is one of this machine alone, reading needs the token.",
)
@click.pass_context
def web_command(context: click.Context, *, host: str, port: int, names: tuple[str, ...]) -> None:
    """
    Serve a page with nodes, live locks, refusals and hold times.

    Needs the extra "web": pip install 'celery-redlock[web]'.
    """
    check_extra()
    app = context.obj.app
    try:
        settings = settings_of(app)
        door = door_for(settings, host, names)
    except ConfigurationError as error:
        raise SettingsError(str(error)) from None
    try:
        load_tasks(app)
    except ConfigurationError as error:
        click.echo(f"Note: what another call would meet is not known. {error}", err=True)
    serve(app, settings, door, port)


def check_extra() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("flask", "waitress")):
        msg = "the web page needs Flask and Waitress: pip install 'celery-redlock[web]'"
        raise click.ClickException(msg)


def door_for(settings: Settings, host: str, names: tuple[str, ...]) -> Door:
    """Return the door of *host*; raises ConfigurationError if others reach it without a token."""
    from celery_redlock.ops.web.guard import (  # noqa: PLC0415  an extra
        Door,
        configured_token,
        is_loopback,
    )

    door = Door(host, names, configured_token(settings, os.environ))
    if not door.is_private and door.token is None:
        if is_loopback(host):
            name = next(name for name in names if not is_loopback(name))
            cause, help_ = f"with --allow-host {name} the page", "leave that name out"
        else:
            cause, help_ = f"--host {host}", "listen on 127.0.0.1"
        msg = (
            f"{cause} can be reached from other machines, and there is no token that would "
            "keep them out; set REDLOCK_WEB_TOKEN in the environment, or redlock_web_token in the "
            f"app's configuration, or {help_}"
        )
        raise ConfigurationError(msg)
    return door


def serve(celery: Any, settings: Settings, door: Door, port: int) -> None:
    from celery_redlock.ops.web.app import make_app  # noqa: PLC0415  an extra
    from celery_redlock.ops.web.reader import Reader  # noqa: PLC0415
    from celery_redlock.ops.web.serving import make_server  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    reader = Reader(settings.nodes, settings.rules, celery)
    app = make_app(str(celery.main or "celery"), settings, reader, door)
    try:
        server = make_server(app, door.host, port)
    except (OSError, ValueError) as error:
        msg = f"cannot listen on {door.host} port {port}: {error}"
        raise click.ClickException(msg) from None
    try:
        click.echo(f"Serving on {url_of(server, door)} (Ctrl-C ends it)", err=True)
        click.echo(mode(door), err=True)
        server.run()
    finally:
        server.close()
        reader.close()


def url_of(server: Any, door: Door) -> str:
    # A host name with several addresses has a server of servers, which tells them all.
    listens = getattr(server, "effective_listen", None) or [(door.host, server.effective_port)]
    host = f"[{door.host}]" if ":" in door.host else door.host
    return f"http://{host}:{listens[0][1]}/"


def mode(door: Door) -> str:
    if door.token is None:
        return "Read only: without a token (REDLOCK_WEB_TOKEN) no lock can be released."
    who = "Reading is free on this machine, releasing" if door.is_private else "Everything"
    return f"{who} needs the token."
