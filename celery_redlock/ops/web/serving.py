"""
The server of the page, and its limits for one client.

Connections are few. Whoever opens them all and sends a byte now and then would keep everybody else
out, so only whole requests count as activity, and a new connection takes the place of the one that
has been without the longest.
"""

from __future__ import annotations

from typing import Any

from waitress.channel import HTTPChannel  # type: ignore[import-untyped]
from waitress.server import BaseWSGIServer, create_server  # type: ignore[import-untyped]

__all__ = ["make_server"]

#: How many requests are answered at the same time; a page waits for slow nodes some seconds.
THREADS = 12
#: For how long a connection may bring no whole request and take nothing of an answer [s], and how
#: often that is looked at [s].
SILENCE, CLEANUP = 10, 5
#: Connections to one address; a further one ends the stalest.
CONNECTIONS = 200
#: What is accepted at all: a name may have two addresses, and those that end take a moment.
LIMIT = 2 * CONNECTIONS + 100


class Channel(HTTPChannel):  # type: ignore[misc]  # Waitress has no types
    last_activity: float

    def __init__(self, server: Any, *args: Any, **kwargs: Any) -> None:
        make_room(server)
        super().__init__(server, *args, **kwargs)

    def handle_read(self) -> None:
        """Read what has come; a piece of a request is not what the server waits for."""
        before = self.last_activity
        super().handle_read()
        if self.request is not None:
            self.last_activity = before


def make_room(server: Any) -> None:
    """End the connection that has been idle longest, if there are as many as there may be."""
    idle = [it for it in server.active_channels.values() if not it.requests and not it.will_close]
    if idle and len(server.active_channels) >= CONNECTIONS:
        min(idle, key=lambda channel: channel.last_activity).will_close = True


def make_server(app: Any, host: str, port: int) -> Any:
    sockets: dict[int, Any] = {}
    server = create_server(
        app,
        map=sockets,
        host=host,
        port=port,
        threads=THREADS,
        ident=None,
        connection_limit=LIMIT,
        channel_timeout=SILENCE,
        cleanup_interval=CLEANUP,
        max_request_body_size=64 * 1024,
        max_request_header_size=32 * 1024,
    )
    for listening in sockets.values():
        if isinstance(listening, BaseWSGIServer):
            listening.channel_class = Channel
    return server
