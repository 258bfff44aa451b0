"""A PgBouncer of the tests' own before a PostgreSQL."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

from celery_redlock.testing.ports import free_port
from celery_redlock.testing.reaper import reaper
from support.postgres import USER, Database
from support.waiting import eventually

__all__ = ["find_pgbouncer", "pooled"]


def find_pgbouncer() -> str:
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        msg = "no pgbouncer found: install it (on Debian and Ubuntu the package pgbouncer)"
        raise RuntimeError(msg)
    return found


@contextlib.contextmanager
def pooled(
    program: str, database: Database, size: int = 2, mode: str = "transaction"
) -> Iterator[str]:
    """Run a pooler with *size* connections to *database* for the body of a ``with``; its URL."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="redlock-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "users").write_text(f'"{USER}" ""\n')
        (folder / "pgbouncer.ini").write_text(
            f"[databases]\n{database.name} = host={database.folder} user={USER}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {folder}/users\npool_mode = {mode}\n"
            f"default_pool_size = {size}\nlogfile =\npidfile =\n"
        )
        nobody = ["-u", "nobody"] if os.geteuid() == 0 else []
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [program, "--quiet", *nobody, str(folder / "pgbouncer.ini")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(name, process.pid, group=True, folder=folder)
        try:
            url = f"postgresql://{USER}@127.0.0.1:{port}/{database.name}"
            eventually(lambda: answers(url), f"answer of PgBouncer: {(folder / 'log').read_text()}")
            yield url
        finally:
            process.terminate()
            process.wait(60)
            reaper.forget(name)


def answers(url: str) -> bool:
    with (
        contextlib.suppress(psycopg.Error),
        psycopg.connect(url, connect_timeout=3, autocommit=True) as connection,
    ):
        return connection.execute("SELECT 1").fetchone() == (1,)
    return False
