"""A process whose lock nodes have all gone ends at once, whatever it held."""

from __future__ import annotations

import os
import subprocess

import pytest

from resources.exits import WAYS, measure_exits

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs signals")

#: The connects of a missing node go on for as long as the process; the watchdog as well.
THREADS = ["MainThread", *["redlock-connect"] * 5, "redlock-watchdog"]


def test_a_process_ends_at_once_though_all_its_nodes_have_gone():
    """
    With the watchdog at work and every node being connected; by return, error and signal.

    Within a minute, of a lease of five. `make proof ARGS=resources` measures how long it takes.
    """
    ends = measure_exits("each its own way")
    assert {end.way for end in ends} == set(WAYS)
    assert [end.threads for end in ends if end.threads != THREADS] == []


def test_a_process_that_waits_for_its_threads_is_found():
    """With threads that are no daemons the same process does not end."""
    waits = """
import threading
began = threading.Thread.start
def start(self):
    self._daemonic = False
    began(self)
threading.Thread.start = start
"""
    with pytest.raises(subprocess.TimeoutExpired):
        measure_exits("killed", before=waits, patience=10.0)
