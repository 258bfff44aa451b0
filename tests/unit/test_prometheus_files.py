"""The files that processes count in: who makes the directory, and who takes the dead out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector

from celery_redlock.errors import ConfigurationError
from celery_redlock.observers import prometheus_files as files


@pytest.fixture
def dead():
    """Return the id of a process that has ended and was reaped."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leave(path, kind, pid, name, value):
    """Write the file that a process leaves behind."""
    stored = MmapedDict(str(path / f"{kind}_{pid}.db"))
    stored.write_value(mmap_key(name, name, [], [], "about"), value, 1.0)
    stored.close()


def exported(path):
    """Return the samples that would be exported."""
    collected = MultiProcessCollector(None, str(path)).collect()
    return {sample.name: sample.value for family in collected for sample in family.samples}


@pytest.fixture
def own(tmp_path):
    """Return a directory that this process made for itself."""
    path = tmp_path / f"{files.PREFIX}{os.getpid()}-x"
    path.mkdir()
    return path


def test_the_dead_are_taken_out_and_their_counts_stay(own, dead):
    """Live gauges of the dead go; sums stay, in one file; the living are left alone."""
    here = os.getpid()
    for pid, count in ((dead, 3.0), (here, 4.0)):
        leave(own, "counter", pid, "c_total", count)
        leave(own, "gauge_livemin", pid, "margin", count)
    (own / f"histogram_{dead}.db").touch()  # killed before it had written anything
    for _ in range(2):
        files.tidy(own)
        assert exported(own) == {"c_total": 7.0, "margin": 4.0}
    assert {file.name for file in own.glob("*.db")} == {
        "counter_ended.db",
        f"counter_{here}.db",
        f"gauge_livemin_{here}.db",
        "histogram_ended.db",
    }


def test_without_it_the_dead_speak_on(own, dead):
    """The twin: the margin of a process that is gone would be shown for ever."""
    leave(own, "gauge_livemin", dead, "margin", 0.5)
    assert exported(own) == {"margin": 0.5}
    files.tidy(own)
    assert exported(own) == {}


def test_sums_of_many_children_stay_right(own, dead):
    """However often it is done, and whatever was there before."""
    for _ in range(3):
        leave(own, "counter", dead, "c_total", 2.0)
        files.tidy(own)
    assert exported(own) == {"c_total": 6.0}


def test_in_a_users_directory_only_live_gauges_are_removed(tmp_path, dead):
    """Somebody else may be reading the counters at this moment."""
    leave(tmp_path, "counter", dead, "c_total", 2.0)
    leave(tmp_path, "gauge_livemin", dead, "margin", 0.5)
    files.tidy(tmp_path)
    assert [file.name for file in tmp_path.glob("*.db")] == [f"counter_{dead}.db"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="nothing tells of zombies here")
def test_a_zombie_is_dead():
    """In a container without an init nobody reaps what a killed worker leaves behind."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not files.is_alive(child.pid)
    child.wait()
    assert files.is_alive(os.getpid())


SHARE = """
    import os, sys
    from celery_redlock.observers import prometheus_files as files
    {before}
    files.share()
    print(files.directory())
    from prometheus_client import values
    print(values.ValueClass.__name__)
    print(files.directory() and files.directory().is_dir())
    sys.stdout.flush()  # or the child would print it once more
    if os.fork() == 0:
        sys.exit(0)  # with its atexit handlers
    os.wait()
    print(files.directory() and files.directory().is_dir())
"""


def share(tmp_path, before="", **env):
    """Run `share` in a process of its own, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHARE.format(before=before))],
        env={**os.environ, "TMPDIR": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_directory_of_our_own_is_made_and_removed(tmp_path):
    """It goes with the process that made it, not with a child of that."""
    where, counts_in, is_there, is_still_there = share(tmp_path)
    assert where.startswith(str(tmp_path / files.PREFIX))
    assert counts_in == "MmapedValue"
    assert (is_there, is_still_there) == ("True", "True")
    assert list(tmp_path.iterdir()) == []


def test_what_counts_in_memory_goes_on_to(tmp_path):
    """An environment that says otherwise would only confuse."""
    told = share(tmp_path, "import prometheus_client as p; p.Counter('users', 'own')")
    assert told == ["None", "MutexValue", "None", "None"]


def test_what_counts_nothing_yet_is_told(tmp_path):
    """Celery's command imports a part of Flower wherever it is installed, and that imports it."""
    where, counts_in, *_ = share(tmp_path, "import prometheus_client")
    assert Path(where).name.startswith(files.PREFIX)
    assert counts_in == "MmapedValue"


def test_a_users_directory_is_made_and_kept(tmp_path):
    """It stays; whoever named it may want to read it."""
    where = tmp_path / "deep" / "metrics"
    told = share(tmp_path, PROMETHEUS_MULTIPROC_DIR=str(where))
    assert told == [str(where), "MmapedValue", "True", "True"]
    assert where.is_dir()


def test_another_workers_own_directory_is_not_taken(tmp_path):
    """A worker that a task of another worker starts inherits its environment."""
    other = tmp_path / f"{files.PREFIX}1-x"
    other.mkdir()
    where, *_ = share(tmp_path, PROMETHEUS_MULTIPROC_DIR=str(other))
    assert where != str(other)
    assert list(tmp_path.iterdir()) == [other]


def test_a_worker_that_replaces_itself_keeps_its_directory(tmp_path):
    """After SIGHUP it is the same process with another program; the last one tidies up."""
    before = f"""
    import pathlib, tempfile
    own = pathlib.Path(tempfile.gettempdir(), f"{files.PREFIX}{{os.getpid()}}-x")
    own.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(own)
    """
    where, counts_in, *_ = share(tmp_path, textwrap.dedent(before).replace("\n", "\n    "))
    assert where.endswith("-x")
    assert counts_in == "MmapedValue"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def left_behind(tmp_path):
    """A directory of a worker that was killed long ago."""
    killed = """
    import os, signal
    from celery_redlock.observers import prometheus_files as files
    files.share()
    os.utime(files.directory(), (0, 0))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(killed)], env=env, check=False)
    (path,) = tmp_path.glob(f"{files.PREFIX}*")
    return path


def test_what_killed_workers_left_is_removed(tmp_path, left_behind):
    """By the next one that makes a directory."""
    share(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_left_alone(tmp_path, left_behind):
    """Whatever its age, and wherever its owner runs: in another container ids mean nothing."""
    file = os.open(left_behind / files.IN_USE, os.O_RDWR)
    files.lock(file)
    share(tmp_path)
    assert list(tmp_path.iterdir()) == [left_behind]
    os.close(file)


def test_a_directory_that_is_being_made_is_left_alone(tmp_path, left_behind):
    """Its owner has not come to lock it yet."""
    os.utime(left_behind)
    share(tmp_path)
    assert list(tmp_path.iterdir()) == [left_behind]


def test_a_directory_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    """With the variable and a way out, before prometheus_client trips over it."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv(files.VARIABLE, str(file))
    with pytest.raises(ConfigurationError, match=r"PROMETHEUS_MULTIPROC_DIR is '.*file'"):
        files.share()
