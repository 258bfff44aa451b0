"""
The same tasks and the same day for every companion; also a script: the day as a client has it.

    COMPANION=yes STAGE=... EVENTS=... python -m companions.shop

A companion changes Celery for the whole process, so neither worker nor client is that of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from celery_redlock import RedlockTask, Retry
from support.events import body, read
from support.waiting import eventually

__all__ = ["GATED", "declare", "is_with_companion", "spend_a_day"]

TESTS = Path(__file__).parents[1]
#: The task whose body waits until the second publish was made.
GATED = "bill"


def is_with_companion() -> bool:
    return "COMPANION" in os.environ


def gate() -> Path:
    return Path(os.environ["EVENTS"]).with_name("open")


def declare(app: Any) -> None:
    ours = {"base": RedlockTask, "bind": True, "shared": False}

    @app.task(name=GATED, lock_key="{invoice}", unique_until="finished", unique_for=60.0, **ours)
    def bill(self: Any, invoice: str) -> str:
        with body(os.environ["EVENTS"], invoice, id=self.request.id):
            eventually(gate().exists, "the second publish")
        return f"billed {invoice}"

    patience = {"on_conflict": Retry(countdown=1), "max_retries": None}

    @app.task(name="remind", lock_key="{invoice}", **patience, **ours)
    def remind(self: Any, invoice: str) -> str:
        return f"reminded {invoice}"

    @app.task(name="again", max_retries=3, **ours)
    def again(self: Any) -> int:
        if not self.request.retries:
            raise self.retry(countdown=1)  # not before Celery has stored RETRY, also when slow
        return int(self.request.retries)

    @app.task(name="broken", **ours)
    def broken(self: Any) -> None:
        msg = "as it is meant to be"
        raise ValueError(msg)

    @app.task(name="shy", lock_key="taken", on_conflict="skip", **ours)
    def shy(self: Any) -> None:
        raise AssertionError


def day(app: Any) -> dict[str, Any]:
    """Publish everything, and return what came of it: ids, states and values."""
    tasks, events = app.tasks, os.environ["EVENTS"]
    first = tasks[GATED].apply_async(("7",))
    eventually(lambda: read(events, "start"), "the first body")
    second = tasks[GATED].apply_async(("7",))
    remind = tasks["remind"].delay("7")
    eventually(lambda: remind.state == "RETRY", "conflict", every=0.1)
    gate().touch()
    values = [first.get(timeout=60), second.get(timeout=60)]

    def third() -> Any:
        """Return a publish that is no duplicate: the first one has ended."""
        result = tasks[GATED].apply_async(("7",))
        return None if result.duplicate else result

    fourth = eventually(third, "end of the reservation", every=0.1)
    values.append(fourth.get(timeout=60))
    retried, broken = tasks["again"].delay(), tasks["broken"].delay()
    shy = tasks["shy"].delay()
    values += [retried.get(timeout=60), shy.get(timeout=60)["skipped"], remind.get(timeout=60)]
    eventually(lambda: broken.state == "FAILURE", "failure")
    return {
        "values": values,
        "duplicates": [first.duplicate, second.duplicate, fourth.duplicate],
        "same": first.id == second.id != fourth.id,
        "error": type(broken.result).__name__,
        "ids": [first.id, fourth.id, retried.id, broken.id, shy.id, remind.id],
    }


def spend_a_day(it: Any, **env: str) -> dict[str, Any]:
    """
    Run the day in a client of its own, on a stage with a worker; all must have gone well.

    Args:
        it: The stage.
        **env: More for the client's environment, as the worker has it.

    Returns:
        What `day` found; ``ids`` are of bill, bill, again, broken, shy and remind.
    """
    stage = json.dumps([it._file, it.conf])
    known = {"EVENTS": str(it.events), "STAGE": stage, "COMPANION": "yes", **env}
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    with it.held("taken"):
        done = subprocess.run(
            [sys.executable, "-m", "companions.shop"],
            env={**os.environ, **known, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{it.log()}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["values"] == ["billed 7"] * 3 + [1, "conflict", "reminded 7"]
    assert found["duplicates"] == [False, True, False]
    assert found["same"]
    assert found["error"] == "ValueError"
    assert len(it.bodies("7")) == len(read(it.events, "start")) == 2
    return found


if __name__ == "__main__":
    from celery_redlock.plugin import plugin_for
    from celery_redlock.reading.health import check
    from support.stage import app as of_stage

    # Connecting takes a loaded machine longer than a first publish waits for it.
    eventually(lambda: check(plugin_for(of_stage).locks) == {}, "connections")
    sys.stdout.write(json.dumps(day(of_stage)))
