"""The tests' own PostgreSQL: nothing is shared, nothing stays, and a missing one is told."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.pool import NullPool

import celery_redlock
from support import postgres
from support.waiting import eventually

PATH = [str(Path(celery_redlock.__file__).parents[1]), str(Path(postgres.__file__).parents[1])]


def test_each_test_has_a_database_of_its_own(postgres_server):
    with postgres_server.database() as one, postgres_server.database() as other:
        with create_engine(one.url, poolclass=NullPool).begin() as db:
            db.execute(text("CREATE TABLE mine (id int)"))
        engine = create_engine(other.url, poolclass=NullPool)
        with engine.connect() as db:
            assert inspect(db).get_table_names() == []


def test_it_listens_at_its_socket_alone(database):
    """Nobody else on the machine or the network meets it."""
    with create_engine(database.url, poolclass=NullPool).connect() as db:
        assert db.execute(text("SHOW listen_addresses")).scalar() == ""
    assert database.folder.stat().st_mode & 0o077 == 0


def test_it_ends_with_a_test_run_that_is_killed(postgres_server):
    program = """
        import time
        from support.postgres import find_postgres, postgres
        with postgres(find_postgres()) as server:
            print(server._process.pid, server.folder, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": ":".join(PATH)},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        pid, folder = run.stdout.readline().split()
        shared = (Path(folder) / "data" / "postmaster.pid").read_text().splitlines()[6].split()[1]
        run.send_signal(signal.SIGKILL)
        ended = ["ps", "-o", "state=", "-p", pid]
        eventually(
            lambda: subprocess.run(ended, capture_output=True, check=False).stdout[:1] in b"Z",
            "end of the server",
        )
        eventually(lambda: not Path(folder).exists(), "end of its folder")
    # The kernel keeps 56 bytes for a server that was killed; nobody else will remove them.
    subprocess.run(["ipcrm", "-m", shared], check=True)


def test_a_missing_one_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(postgres, "DEBIAN", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(RuntimeError, match="package postgresql"):
        postgres.find_postgres()
    with pytest.raises(RuntimeError, match="no PostgreSQL 999 found"):
        postgres.find_postgres(999)


@pytest.mark.skipif(os.geteuid() != 0, reason="only for root the server is another user")
def test_programs_that_only_root_gets_to_are_copied(tmp_path):
    programs = tmp_path / "packages" / postgres.WHEEL / "pginstall18" / "bin"
    for folder in (programs, tmp_path / "packages" / f"{postgres.WHEEL}.libs"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    tmp_path.chmod(0o700)
    server = postgres.Postgres(programs)
    try:
        assert server.programs == server.folder / postgres.WHEEL / "pginstall18" / "bin"
        assert (server.programs / "file").exists()
        assert (server.folder / f"{postgres.WHEEL}.libs" / "file").exists()
    finally:
        server.stop()
