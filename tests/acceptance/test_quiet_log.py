"""What a worker's log says in the first minute of a cluster, of a skip, and of a failure."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.rules import Rules
from support.clients import let_go
from support.waiting import eventually

pytestmark = pytest.mark.long

#: So that the quarantine of a new node lasts 11.5 s, which is waited for.
MAX_TTL = 10.0
EXAMPLE = """
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("quiet", broker={broker!r}, backend={broker!r})
    app.conf.update(redlock_nodes={nodes!r}, redlock_ttl={max_ttl}, redlock_max_ttl={max_ttl})
    app.conf.redlock_node_timeout = 1.0

    @app.task(base=RedlockTask, lock_key="invoice:{{invoice_id}}")
    def bill(invoice_id):
        return f"invoice {{invoice_id}} billed"

    @app.task(base=RedlockTask, lock_key="invoice:{{invoice_id}}", on_conflict="fail")
    def refund(invoice_id):
        return f"invoice {{invoice_id}} refunded"
"""


@pytest.fixture
def quiet(redis_nodes, broker, tmp_path, monkeypatch):
    nodes = [node.url for node in redis_nodes(3)]
    text = EXAMPLE.format(broker=broker.url, nodes=nodes, max_ttl=MAX_TTL)
    (tmp_path / "quiet.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "quiet", raising=False)
    import quiet

    yield quiet
    let_go(quiet.app)


def test_the_log_is_quiet_and_nothing_outlasts_the_quarantine(quiet, start_worker):
    rules = Rules(ttl=MAX_TTL, max_ttl=MAX_TTL)
    worker = start_worker("quiet", concurrency=4)
    results = [quiet.bill.delay(number) for number in range(4)]
    for number, result in enumerate(results):
        assert result.get(timeout=100) == f"invoice {number} billed"
    log = worker.log()
    summary = re.findall(r"No lock can be granted for .*", log)
    assert len(summary) == 1
    assert "all 3 nodes are new or restarted" in summary[0]
    assert summary[0].endswith("celery -A quiet redlock bootstrap")
    assert not re.search(r"Lock node \S+ (is up|does not vote)", log)
    # Put off until the end of the quarantine, and not for ever longer.
    put_off = [int(seconds) for seconds in re.findall(r"Rescheduled task .*\] in (\d+) s", log)]
    assert put_off
    assert max(put_off) <= rules.quarantine + 2.0

    locks = Redlock.from_urls(
        quiet.app.conf.redlock_nodes, ttl=MAX_TTL, max_ttl=MAX_TTL, node_timeout=1.0
    )
    with locks.hold("invoice:7", wait=60.0):  # to connect may take a slow machine a while
        skipped, failed = quiet.bill.delay(7), quiet.refund.delay(7)
        value = skipped.get(timeout=100)
        with pytest.raises(LockTaken, match=r"held by process \d+ on .*, since .*'redlock why'"):
            failed.get(timeout=100)
    locks.close()
    assert list(value) == ["skipped", "lock", "holder"]
    assert value["holder"]["host"]
    # Written once the results are stored, and by another process.
    for line in (
        rf"{skipped.id}\] succeeded in \S+s: {{'skipped': 'conflict', \.\.\.}}",
        rf"{failed.id}\] raised expected: LockTaken\(.Lock 'invoice:7' is held by",
    ):
        eventually(lambda line=line: re.search(line, worker.log()), f"line in the log: {line}")
    log = worker.log()
    assert re.search(rf"INFO.* Skipped task quiet.bill\[{skipped.id}\]: lock 'invoice:7' is", log)
    assert re.search(rf"WARNING.* Failed task quiet.refund\[{failed.id}\]: lock 'invoice:7'", log)
    assert "Traceback" not in log
    worker.terminate()
