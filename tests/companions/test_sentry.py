"""sentry-sdk with its Celery integration: what it sends, and what it puts into messages."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from companions import shop
from support.stage import stage
from support.waiting import eventually

#: Not imported here: it would change this process for other tests.
pytestmark = pytest.mark.skipif(find_spec("sentry_sdk") is None, reason="not installed")


def declare(app):
    """Declare the tasks, with Sentry's SDK begun before Celery makes anything of them."""
    if shop.is_with_companion():
        begin()
    shop.declare(app)


def begin(**options):
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class File(Transport):
        def capture_envelope(self, envelope):
            told = [item.payload.json for item in envelope.items if item.payload.json]
            with Path(os.environ["EVENTS"]).with_name("sent.jsonl").open("a") as file:
                file.writelines(json.dumps(one, default=str) + "\n" for one in told)

    sentry_sdk.init(
        dsn="http://public@127.0.0.1/1",
        transport=File,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration(propagate_traces=True, **options)],
    )


def sent_in(folder):
    """Return what was sent; a line that is being written is none yet."""
    path = folder / "sent.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def runs_in(told):
    return {one["transaction"] for one in told if one.get("type") == "transaction"}


def test_a_day_with_sentry(tmp_path):
    names = {"bill", "again", "broken", "shy", "remind"}
    with stage(__file__, tmp_path, nodes=3) as it:
        it.worker(env={"COMPANION": "yes"})
        found = shop.spend_a_day(it)
        # It comes after the result, and the worker is killed at the end of this.
        eventually(lambda: names <= runs_in(sent_in(tmp_path)), "all transactions")
    told = sent_in(tmp_path)
    errors = [one for one in told if "exception" in one]
    assert [one["exception"]["values"][-1]["type"] for one in errors] == ["ValueError"]
    assert errors[0]["tags"]["celery_task_id"] == found["ids"][3]
    assert names <= runs_in(told)
