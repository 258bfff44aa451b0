"""Lock names and task ids of any length: tasks run, names are free then, records stay small."""

from __future__ import annotations

import contextlib
import struct

import pytest
from amqp import FrameSyntaxError

from celery_redlock import ConfigurationError, RedlockTask
from celery_redlock.lock.records import shorten
from celery_redlock.plugin import plugin_for
from celery_redlock.process.log import LONGEST_STORED, cut
from celery_redlock.reading.journal import JournalReader
from support.stage import LASTING, stage
from support.stored import clients_of
from support.waiting import eventually

#: Around what a key takes, what AMQP allows an id, and what our header and a frame once held.
LENGTHS = [1, 109, 110, 111, 255, 256, 10_000, 100_100, 140_000, 1_000_000]
#: Of a key with all that is in it [bytes].
SMALL = 4096


def declare(app):
    def job(name):
        return len(name)

    ours = {"base": RedlockTask, "shared": False, "on_conflict": "skip"}
    unique = {"unique_until": "finished", "unique_for": 600}
    app.task(name="by_template", lock_key="{name}", **ours, **unique)(job)
    app.task(name="computed", lock_key=lambda task, args, kwargs: args[0], **ours, **unique)(job)
    app.task(name="locked", lock_key="{name}", **ours)(job)


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def it(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    url = {}
    if request.param == "rabbitmq":
        url = {"broker_url": request.getfixturevalue("rabbit").url}
    with stage(__file__, folder, nodes=3, **LASTING, **url) as it:
        it.worker(concurrency=1)
        yield it


@pytest.mark.parametrize("task", ["by_template", "computed"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_name_of_any_length_is_free_when_its_task_has_ended(it, task, length):
    name = f"{task[0]}{'n' * (length - 1)}"
    result = it.task(task).delay(name)
    assert result.get(timeout=100) == length
    again = eventually(
        lambda: None if (r := it.task(task).delay(name)).duplicate else r, "end of the reservation"
    )
    assert again.get(timeout=100) == length


def largest_value(it):
    sizes = []
    for client in clients_of(it.nodes):
        sizes += [
            client.memory_usage(key)
            for key in client.scan_iter("redlock:*")
            if not key.startswith((b"redlock:journal", b"redlock:tally"))
        ]
    return max(sizes)


def journal_of(it):
    return JournalReader(it.conf["redlock_nodes"], plugin_for(it.app).settings.rules)


@pytest.mark.parametrize("length", [255, 1001, 1_000_000])
def test_a_refusal_of_any_length_is_in_the_journal(it, length):
    name = f"refused{'n' * (length - 7)}"
    with it.held(name):
        refused = it.task("locked").delay(name)
        refused.get(timeout=100)
        assert largest_value(it) < SMALL
    with contextlib.closing(journal_of(it)) as reader:
        (record,) = [r for r in reader.recent() if r.get("task_id") == refused.id]
    assert (record["event"], record["name"]) == ("TaskSkipped", shorten(name))


@pytest.mark.parametrize("length", [LONGEST_STORED + 1, 1_000_000])
def test_an_id_of_any_length_is_stored_as_a_part_of_it(it, length):
    """Redis carries any; a message of RabbitMQ has 255 bytes for it."""
    task_id = "i" * length
    if "redis" not in it.conf["broker_url"]:
        with pytest.raises((FrameSyntaxError, struct.error)):
            it.task("locked").apply_async(("id",), task_id=task_id)
        return
    result = it.task("locked").apply_async(("id",), task_id=task_id)
    assert result.get(timeout=100) == 2
    assert largest_value(it) < SMALL
    with pytest.raises(ConfigurationError, match="task_id"):
        it.task("by_template").apply_async(("id",), task_id=task_id)
    assert cut(task_id) != task_id
