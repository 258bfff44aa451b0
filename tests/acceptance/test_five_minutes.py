"""The way of docs/example.md to a protected task, command by command, as a stranger types it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.console import PATIENCE_WITH_NODES
from support.page_names import free_ports
from support.pages import blocks_of, commands_of
from support.waiting import eventually

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "example.md"
#: What tests/package does with the built package.
SET_UP = {
    "python3 -m venv .venv",
    ". .venv/bin/activate",
    'pip install -c constraints.txt ".[example]"',
}
#: Does not end by itself -> what it says when others may go on.
STAYS = {
    "celery-redlock servers": "ready.",
    "celery -A example_worker.app worker --concurrency 8 --loglevel INFO": "ready.",
}


def typed():
    text = PAGE.read_text()
    begins = text.count("\n", 0, text.index("## Five minutes to a protected task"))
    ends = text.count("\n", 0, text.index("Three commands show and test more"))
    blocks = [b for b in blocks_of(PAGE) if b.language == "console" and begins < b.line < ends]
    return [command.text for block in blocks for command in commands_of(block)]


@pytest.fixture
def terminals(tmp_path):
    """Run a command as a stranger does, at ports of this test: ``terminals(command)``."""
    places = ExitStack()  # until the end nobody who looks for free ports gets these
    ports = [port for _, port in free_ports(range(6), places)]
    nodes = ",".join(f"redis://127.0.0.1:{ports[1] + n}/0" for n in range(5))
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PATIENCE_WITH_NODES)]),
        "BROKER_URL": f"redis://127.0.0.1:{ports[0]}/0",
        "RESULT_URL": f"redis://127.0.0.1:{ports[0]}/1",
        "REDLOCK_NODES": nodes,
        "LEDGER_URL": f"sqlite:///{tmp_path / 'ledger.db'}",
    }
    left = []

    def run(command):
        if command not in STAYS:
            done = subprocess.run(
                command,
                check=False,
                shell=True,
                cwd=ROOT,
                env=env,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            return done.stdout
        if "servers" in command:
            command_here = f"{command} --broker-port {ports[0]} --node-port {ports[1]}"
        else:
            command_here = command
        out = tmp_path / f"out-{len(left)}"
        with out.open("wb") as sink:
            left.append(
                subprocess.Popen(
                    f"exec {command_here}", shell=True, cwd=ROOT, env=env, stdout=sink, stderr=sink
                )
            )

        def is_ready():
            assert left[-1].poll() is None, out.read_text()
            return STAYS[command] in out.read_text()

        eventually(is_ready, f"readiness of {command!r}", timeout=100)
        return out.read_text()

    yield run
    for process in reversed(left):
        process.terminate()
        process.wait(timeout=100)
    places.close()


@pytest.mark.timeout(600)
def test_from_nothing_to_a_protected_task(terminals):
    commands = typed()
    assert set(commands) >= {*SET_UP, *STAYS}
    told = {command: terminals(command) for command in commands if command not in SET_UP}
    published = told["python -m example_worker.publish"]
    assert len(re.findall(r"SUCCESS: invoice \d+ billed with fence", published)) == 3
    assert len(re.findall(r"skipped \(conflict\)|was billed before", published)) == 6
    assert len(re.findall(r"SUCCESS: 20 rows of stock.csv", published)) == 2
    assert "No live locks" in told["celery -A example_worker.app redlock ls"]
