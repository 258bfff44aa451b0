"""
A PostgreSQL of the tests' own: on a socket in a folder of its own, gone at the end.

    with postgres(find_postgres()) as server, server.database() as database:
        sqlalchemy.create_engine(database.url)

It listens at no port. It refuses to run as root, so there it runs as `nobody`. It ends at the
end of its ``with``, and, by the reaper process, when the test run itself is killed; then the
kernel keeps 56 bytes of shared memory for it (``ipcs -m``).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_redlock.testing.reaper import reaper
from support.waiting import eventually

__all__ = ["Database", "Postgres", "find_postgres", "postgres"]

#: Where Debian keeps the programs, one folder per major version, and off PATH.
DEBIAN = Path("/usr/lib/postgresql")
USER = "redlock"
# Nothing of it has to outlive the test run.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
CALM = {"max_connections": "60", "shared_buffers": "16MB", "autovacuum": "off"}


def find_postgres() -> Path:
    """Return the newest folder with ``initdb``, ``postgres`` and ``psql``."""
    on_path = shutil.which("initdb")
    debian = sorted(DEBIAN.glob("*/bin"), key=lambda path: float(path.parent.name))
    for folder in [*([Path(on_path).resolve().parent] if on_path else []), *reversed(debian)]:
        if all((folder / name).exists() for name in ("initdb", "postgres", "psql")):
            return folder
    msg = (
        "no PostgreSQL found: install it (on Debian and Ubuntu the package postgresql, with "
        "Homebrew postgresql)"
    )
    raise RuntimeError(msg)


@dataclass(frozen=True)
class Database:
    """One empty database."""

    folder: Path
    name: str

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://{USER}@/{self.name}?host={self.folder}"

    @property
    def django(self) -> dict[str, Any]:
        engine = "django.db.backends.postgresql"
        return {"ENGINE": engine, "NAME": self.name, "USER": USER, "HOST": str(self.folder)}


class Postgres:
    def __init__(self, programs: Path) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="redlock-postgres-"))
        self._as_whom: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self._as_whom = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        data = str(self.folder / "data")
        how = ["--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
        made = self._launch(
            [str(self.programs / "initdb"), "--pgdata", data, "--username", USER, *how]
        )
        assert made.wait(timeout=60) == 0, self.log()
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder)}
        options = [f"--{name}={value}" for name, value in {**settings, **FAST, **CALM}.items()]
        self._process = self._launch([str(self.programs / "postgres"), "-D", data, *options])
        reaper.watch(str(self.folder), self._process.pid, group=True, folder=self.folder)
        eventually(self._answers, "answer of PostgreSQL", every=0.05)

    def _launch(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self._as_whom,
            )

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it has ended:\n{self.log()}"
        return not self._psql("SELECT 1")

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """Make a database for the body of a ``with``; its connections end with it."""
        name = f"test_{uuid.uuid4().hex}"
        self._do(f"CREATE DATABASE {name}")
        try:
            yield Database(self.folder, name)
        finally:
            self._do(f"DROP DATABASE {name} WITH (FORCE)")

    def _do(self, command: str) -> None:
        assert not (said := self._psql(command)), said

    def _psql(self, command: str) -> str:
        """Return what went wrong; empty if nothing did."""
        program = [str(self.programs / "psql"), "--no-psqlrc", "--quiet", "--output", os.devnull]
        at = ["--host", str(self.folder), "--username", USER, "--dbname", "postgres"]
        done = subprocess.run(
            [*program, *at, "--command", command],
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stderr if done.returncode else ""

    def stop(self) -> None:
        """End it and remove its folder; may be called again."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # At once, and yet in order: killed, it would leave its shared memory behind.
                self._process.send_signal(signal.SIGQUIT)
            try:
                self._process.wait(timeout=60)
            finally:
                self._process.kill()
                self._process.wait()
                self._process = None
        reaper.forget(str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def clean_environment() -> dict[str, str]:
    """Return our environment without what a developer told PostgreSQL's programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


@contextlib.contextmanager
def postgres(programs: Path) -> Iterator[Postgres]:
    """Run a server for the body of a ``with``, and end it whatever happens."""
    server = Postgres(programs)
    try:
        server.start()
        yield server
    finally:
        server.stop()
