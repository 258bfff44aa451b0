"""A child counts as dead when that is proven, and not before."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from celery_redlock.task.worker import death
from celery_redlock.task.worker.death import wait_until_dead

HAS_HANDLES = hasattr(os, "pidfd_open") and sys.platform == "linux"
PATIENCE = 60.0


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(params=["handles", "forbidden", "none"])
def system(request, monkeypatch):
    if request.param == "handles" and not HAS_HANDLES:
        pytest.skip("this system has no pidfd")
    if request.param == "forbidden":

        def refuse(pid):
            raise OSError(errno.EPERM, "not here")

        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    if request.param == "none":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    return request.param


def test_a_child_that_lives_is_not_dead(system, child):
    began = time.monotonic()
    assert not wait_until_dead(child.pid, 0.2)
    assert time.monotonic() - began > 0.19


def test_a_child_that_was_killed_and_reaped_is_dead(system, child):
    child.kill()
    child.wait()
    assert wait_until_dead(child.pid, PATIENCE)


def test_it_wakes_when_the_child_dies(system, child):
    told = []
    waits = threading.Thread(target=lambda: told.append(wait_until_dead(child.pid, PATIENCE)))
    waits.start()
    time.sleep(0.2)  # for it to begin to wait, which cannot be seen
    assert not told
    child.kill()
    child.wait()
    waits.join(PATIENCE)
    assert told == [True]


def test_a_dead_child_that_was_not_reaped(system, child):
    """A handle tells at once that it is dead; its number alone does only when it was reaped."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert wait_until_dead(child.pid, 0.3) is (system == "handles")


def test_a_stopped_child_is_not_dead(system, child):
    """It can go on at any moment."""
    child.send_signal(signal.SIGSTOP)
    assert not wait_until_dead(child.pid, 0.2)


@pytest.mark.skipif(not HAS_HANDLES, reason="this system has no pidfd")
def test_a_number_that_is_anothers_now_means_that_the_child_is_gone():
    """A child keeps its number until it is reaped, so whoever has it then is somebody else."""
    assert wait_until_dead(os.getppid(), 0.1)


def open_handles():
    """Return how many handles on processes are open; other files are other threads' business."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found += "pidfd" in str(link.readlink())
    return found


@pytest.mark.skipif(not HAS_HANDLES, reason="this system has no pidfd")
def test_no_handle_is_left_open(child):
    before = open_handles()
    handle = os.pidfd_open(child.pid)
    assert open_handles() == before + 1  # one that is left would be seen
    os.close(handle)
    wait_until_dead(child.pid, 0.01)
    wait_until_dead(os.getppid(), 0.01)
    child.kill()
    wait_until_dead(child.pid, PATIENCE)
    assert open_handles() == before


@pytest.mark.skipif(not HAS_HANDLES, reason="this system has no pidfd")
def test_only_own_children_are_own(child):
    handles = [os.pidfd_open(pid) for pid in (child.pid, os.getppid(), os.getpid())]
    try:
        assert [death.is_own_child(handle) for handle in handles] == [True, False, False]
    finally:
        for handle in handles:
            os.close(handle)
    child.kill()
    child.wait()


@pytest.mark.skipif(not HAS_HANDLES, reason="this system has no pidfd")
def test_where_a_handle_cannot_be_asked_about_its_number_decides(monkeypatch, child):
    """Linux 5.3 has the handles, and not the question."""

    def refuse(*_):
        raise OSError(errno.EINVAL, "not here")

    monkeypatch.setattr(os, "waitid", refuse)
    assert not wait_until_dead(child.pid, 0.2)
    child.kill()
    child.wait()
    assert wait_until_dead(child.pid, PATIENCE)
