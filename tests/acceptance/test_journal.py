"""What workers leave in the journal, however short their children live."""

from __future__ import annotations

import pytest

from celery_redlock import RedlockTask
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.journal import JournalReader
from support.stage import stage
from support.waiting import eventually


def declare(app):
    """A task that is quickly done."""

    @app.task(base=RedlockTask, name="shop.quick", shared=False)
    def quick(number):
        return number


@pytest.mark.parametrize("per_child", [1, 3])
def test_every_hold_of_a_child_is_counted_also_when_it_ends(tmp_path, per_child):
    """The first at once, the others at the end of the child, or ten seconds later."""
    with stage(__file__, tmp_path) as it:
        it.worker(concurrency=1, args=["--max-tasks-per-child", str(per_child)])
        results = [it.task("shop.quick").delay(number) for number in range(6)]
        assert [result.get(timeout=60) for result in results] == list(range(6))
        rules = plugin_for(it.app).settings.rules
        reader = JournalReader(it.conf["redlock_nodes"], rules)

        def counted():
            records = [record for record in reader.recent() if record["event"] == "Holds"]
            reader._seen.clear()
            return sum(sum(record["counts"]) for record in records)

        eventually(lambda: counted() == 6, "six holds", timeout=100)
        reader.close()
