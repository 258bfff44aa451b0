"""Servers of a test that speak TLS, and the program it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from celery_redlock.testing.ports import free_port
from celery_redlock.testing.servers import Server
from support.certificates import Authority, Pair

__all__ = ["TLSNode", "tls_binary", "tls_node"]


def tls_binary() -> Path:
    """
    Return a server program that can speak TLS: `redis-server` or `valkey-server` on PATH.

    The embedded Valkey is built without TLS. Without a program a test is skipped at home and
    fails in CI.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found and speaks_tls(found):
            return Path(found)
    problem = "no redis-server or valkey-server with TLS on PATH"
    if os.environ.get("CI") == "true":
        raise RuntimeError(problem)
    pytest.skip(problem)


def speaks_tls(program: str) -> bool:
    """Return whether *program* was built with TLS, which then misses a certificate at once."""
    options = ["--port", "0", "--tls-port", str(free_port()), "--save", ""]
    told = subprocess.run(
        [program, *options], capture_output=True, text=True, check=False, timeout=60
    )
    return "tls-cert-file" in told.stdout + told.stderr


@dataclass(frozen=True)
class TLSNode:
    """
    A server that speaks TLS.

    Attributes:
        server: To be stopped and restarted; its own port is plain, for the test to look behind.
        port: Where it speaks TLS.
    """

    server: Server
    port: int

    def url(self, *, host: str = "127.0.0.1", user: str = "", **options: Any) -> str:
        """Return where it is; *options* are those of redis-py, *user* is ``name:password``."""
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://{user + '@' if user else ''}{host}:{self.port}/0?{query}"

    @property
    def label(self) -> str:
        return f"127.0.0.1:{self.port}/0"


def tls_node(
    start: Callable[..., list[Server]],
    authority: Authority,
    pair: Pair,
    *,
    wants_clients: bool = False,
    extra_args: Sequence[str] = (),
) -> TLSNode:
    """
    Start a server that shows the certificate of *pair*.

    Args:
        start: The fixture `redis_nodes`.
        authority: Whose word it takes for its clients.
        pair: What it shows.
        wants_clients: Whether its clients have to show a certificate, too.
        extra_args: More options of the server.
    """
    port = free_port()
    options = [
        *("--tls-port", str(port), "--tls-ca-cert-file", str(authority.file)),
        *("--tls-cert-file", str(pair.certificate), "--tls-key-file", str(pair.key)),
        *("--tls-auth-clients", "yes" if wants_clients else "no"),
    ]
    (server,) = start(1, binary=tls_binary(), extra_args=[*options, *extra_args])
    return TLSNode(server, port)
