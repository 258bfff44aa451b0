"""A program from the launcher is what `subprocess` would have started, only sooner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.launcher import LOCALE, Launched, is_for_launcher, popen
from support.waiting import eventually

#: Says what a program can see of how it was started, and ends as its last word says.
PROBE = """
import faulthandler, json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "path": sys.path[0],
    "leads": os.getsid(0) == os.getpid(), "stdin": sys.stdin.read(), "name": __name__,
    "streams": [[s.encoding, s.errors, s.line_buffering] for s in (sys.stdout, sys.stderr)],
    "fds": [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")
            and not os.readlink(f"/proc/self/fd/{fd}").startswith("/proc")],
    "threads": len(os.listdir("/proc/self/task")), "faults": faulthandler.is_enabled(),
    "children": os.path.exists("/proc/self/task/1"), "bytecode": sys.dont_write_bytecode,
    "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
}))
print("to the other stream", file=sys.stderr)
how = sys.argv[-1]
if how.isdigit():
    sys.exit(int(how))
if how == "raises":
    raise ValueError("on purpose")
sys.stdout.flush()
os.kill(os.getpid(), getattr(signal, how))
"""
OURS = {name: os.environ[name] for name in ("PATH", *LOCALE) if name in os.environ}
PLAIN = {**OURS, "WORD": "a word"}
KINDS = [popen, subprocess.Popen]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher is for Linux")


def said(kind, how, folder, **options):
    options = {"cwd": folder, "env": PLAIN, "start_new_session": True, **options}
    command = [sys.executable, "-c", PROBE, "one two", how]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with kind(command, text=True, **pipes, **options) as process:
        out, errors = process.communicate("a line\n", timeout=60)
    return json.loads(out), process.returncode, errors.splitlines()[-1]


@pytest.mark.parametrize("how", ["0", "7", "raises", "SIGTERM", "SIGKILL", "SIGINT"])
def test_a_program_sees_and_tells_the_same(how, tmp_path):
    launched, started = (said(kind, how, tmp_path) for kind in KINDS)
    assert launched == started


@pytest.mark.parametrize(
    "env",
    [{"PYTHONUNBUFFERED": "1"}, {"PYTHONFAULTHANDLER": "1"}, {"PYTHONDONTWRITEBYTECODE": "1"}],
)
def test_what_python_reads_first_is_made_up_for(env, tmp_path):
    launched, started = (said(kind, "0", tmp_path, env={**PLAIN, **env}) for kind in KINDS)
    assert launched == started


def test_it_is_in_no_session_of_its_own_unless_asked(tmp_path):
    """It stays in the launcher's, which is not ours: a terminal's Ctrl-C does not reach it."""
    assert not said(popen, "0", tmp_path, start_new_session=False)[0]["leads"]


def test_modules_of_its_path_are_its_own(tmp_path):
    for name, place in (("far", tmp_path / "lib"), ("near", tmp_path)):
        place.mkdir(exist_ok=True)
        (place / f"{name}.py").write_text(f"word = {name!r}")
    command = [sys.executable, "-c", "import far, near; print(far.word, near.word)"]
    env = {**PLAIN, "PYTHONPATH": str(tmp_path / "lib")}
    with popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert isinstance(process, Launched)
        assert process.communicate(timeout=60) == ("far near\n", None)


def test_it_is_watched_killed_and_waited_for_as_any_child(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = popen(command, cwd=tmp_path, env=PLAIN, start_new_session=True)
    assert isinstance(process, Launched)
    assert process.poll() is None
    assert not process.has_ended()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.05)
    os.killpg(process.pid, signal.SIGKILL)
    eventually(process.has_ended, "its end")
    assert os.getpgid(process.pid) == process.pid  # a zombie yet: nobody else gets its id
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.getpgid(process.pid)


def test_it_is_there_before_celery_could_be_imported(tmp_path):
    """What it is for: Celery is imported already. Twin: not by a new Python."""
    command = [sys.executable, "-c", "import sys; print('celery.apps.worker' in sys.modules)"]
    found = []
    for kind in KINDS:
        with kind(command, cwd=tmp_path, env=PLAIN, stdout=subprocess.PIPE, text=True) as process:
            found.append(process.communicate(timeout=60)[0])
    assert found == ["True\n", "False\n"]


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["-m", "celery", "worker", "-P", "gevent"], {}),
        (["-m", "celery", "worker"], {"LD_PRELOAD": "some.so"}),
        (["-m", "celery", "worker"], {"PYTHONHASHSEED": "1"}),
        (["-m", "celery", "worker"], {"LANG": "de_DE.ISO-8859-1"}),
        (["-m", "pytest"], {}),
        (["-X", "dev", "-c", ""], {}),
        (["program.py"], {}),
    ],
)
def test_what_must_be_there_before_the_first_import_gets_a_new_python(words, env):
    """A fork comes too late for it."""
    assert not is_for_launcher([sys.executable, *words], {**PLAIN, **env})


def test_a_sitecustomize_gets_a_new_python(tmp_path):
    """It is run before anything else, and only by a new Python."""
    command, env = [sys.executable, "-c", ""], {**PLAIN, "PYTHONPATH": str(tmp_path)}
    assert is_for_launcher(command, env)
    (tmp_path / "sitecustomize.py").touch()
    assert not is_for_launcher(command, env)


def test_programs_end_with_nobody_left_of_them(tmp_path):
    command = [sys.executable, "-c", "import os; print(os.getppid())"]
    options = {"cwd": tmp_path, "env": PLAIN, "stdout": subprocess.PIPE, "text": True}
    processes = [popen(command, **options) for _ in range(100)]
    parents = {process.communicate(timeout=100)[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 100
    (launcher,) = map(int, parents)
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    assert not {str(process.pid) for process in processes} & set(children)
