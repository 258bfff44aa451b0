"""Every error comes home with its type, fields and text, whatever carries it."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery, states
from celery.backends.base import DisabledBackend
from kombu.utils import json as kombu_json

from celery_redlock import errors
from celery_redlock.words import LOSSES
from support.shown_errors import SHOWN

ERRORS = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
VOTES = {"lock-1:6379/0": "granted", "lock-2:6379/0": "refused", "lock-3:6379/0": "timed out"}
HOLDER = {"token": "3f9a01bc", "task_id": "4", "pid": 7, "since": 1754000000.25, "ttl": 3.5}

# At least one of each, with and without what is optional.
EXAMPLES = [
    errors.RedlockError("something of ours"),
    errors.ConfigurationError("redlock_ttl must be > 0, got -1"),
    errors.LockKeyError("shop.bill: 'order' is of type Order"),
    errors.LockNotAcquired("invoice:7", VOTES),
    errors.LockTaken("invoice:7", VOTES, HOLDER),
    errors.LockTaken("invoice:7", {}),
    errors.RateExceeded("invoice:7", VOTES, HOLDER),
    errors.RateExceeded("invoice:7", {}),
    errors.TooManyDeliveries("shop.bill", "0c1d", 3),
    errors.QuorumUnavailable("invoice:7", VOTES, 12.5),
    errors.QuorumUnavailable("invoice:7", VOTES),
    errors.LockLost("invoice:7", "deadline"),
    errors.LockLost("invoice:7", "stolen", VOTES),
    errors.DuplicateTask("0c1d", "invoice:7"),
    errors.DuplicateTask("0c1d", "invoice:7", VOTES),
    errors.StaleFence("invoice", 1001, 1002),
    errors.StaleFence("invoice", 1001),
]

every_error = pytest.mark.parametrize(
    "error", EXAMPLES, ids=[f"{type(e).__name__}-{len(e.args)}" for e in EXAMPLES]
)


def _same(one: BaseException, other: BaseException) -> bool:
    return (type(one), vars(one), one.args, str(one)) == (
        type(other),
        vars(other),
        other.args,
        str(other),
    )


def test_every_error_has_an_example():
    """A new error cannot be forgotten by the tests below."""
    assert {type(example).__name__ for example in EXAMPLES} == set(errors.__all__)


@pytest.mark.parametrize("heading", SHOWN)
def test_the_page_has_the_message_that_is_met(heading):
    """So that who searches for it lands at its heading, and reads there what to do."""
    text = ERRORS.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    shown = re.findall(r"^```text\n(.+?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert shown == ["\n".join(map(str, SHOWN[heading]))]
    lost = [error.reason for error in SHOWN["LockLost"]]
    assert lost == list(dict.fromkeys(lost))
    assert set(lost) == set(LOSSES)


@every_error
def test_every_error_descends_from_the_one_root(error):
    assert isinstance(error, errors.RedlockError)


@every_error
def test_an_error_survives_pickle(error):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert _same(pickle.loads(pickle.dumps(error, protocol)), error)


@every_error
def test_an_error_is_made_of_plain_json(error):
    """Even a plain JSON encoder, which knows no type of ours, carries all its arguments."""
    assert type(error)(*json.loads(json.dumps(error.args))).args == error.args


@every_error
def test_an_error_survives_celerys_json_form(error):
    backend = DisabledBackend(Celery(set_as_current=False))
    stored = kombu_json.dumps(backend.prepare_exception(error, serializer="json"))
    assert _same(backend.exception_to_python(kombu_json.loads(stored)), error)


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
@every_error
def test_a_caller_gets_the_error_the_task_failed_with(error, serializer):
    app = Celery(backend="cache+memory://", set_as_current=False)
    app.conf.update(result_serializer=serializer, accept_content=[serializer])
    task_id = str(uuid4())  # Celery's memory cache is one for all apps of a process
    app.backend.store_result(task_id, error, states.FAILURE)
    with pytest.raises(type(error)) as raised:
        app.AsyncResult(task_id).get(timeout=60)
    assert _same(raised.value, error)


@every_error
def test_an_error_tells_the_name_of_its_lock(error):
    """Whoever reads only the text knows which lock it is about."""
    name = getattr(error, "name", getattr(error, "lock_name", None))
    assert name is None or name in str(error)


@every_error
def test_an_error_tells_what_each_node_answered(error):
    votes = getattr(error, "votes", {})
    assert all(f"{node}: {vote}" in str(error) for node, vote in votes.items())


def test_what_nodes_answer_alike_is_said_once():
    votes = {"a": "quarantined", "b": "refused", "c": "quarantined"}
    text = str(errors.QuorumUnavailable("invoice:7", votes, 12.4))
    assert text == (
        "Lock 'invoice:7' could not be decided by a quorum of nodes (try again in 12 s) "
        "[a, c: quarantined; b: refused]; see 'redlock status'"
    )


def test_a_taken_lock_tells_its_holder_since_when_and_where():
    holder = {**HOLDER, "task": "shop.bill", "host": "web-1"}
    assert str(errors.LockTaken("invoice:7", {"a": "refused", "b": "refused"}, holder)) == (
        "Lock 'invoice:7' is held by task shop.bill[4], process 7 on web-1, "
        "since 2025-07-31 22:13:20 UTC [a, b: refused]; see 'redlock why'"
    )


def test_a_lost_lock_tells_why():
    votes = {"a": "granted", "b": "unreachable (refused)", "c": "unreachable (refused)"}
    assert str(errors.LockLost("invoice:7", "deadline", votes)) == (
        "Lock 'invoice:7' is lost (deadline): not renewed in time, 2 of 3 nodes unreachable "
        "[a: granted; b, c: unreachable (refused)]; see 'redlock status'"
    )
    some = {"a": "quarantined (9.0 s left)", "b": "granted", "c": "unreachable (refused)"}
    assert "1 of 3 nodes quarantined" in str(errors.LockLost("invoice:7", "deadline", some))
    forgotten = errors.LockLost("invoice:7", "deadline", {"a": "quarantined (9.0 s left)"})
    assert str(forgotten).startswith(
        "Lock 'invoice:7' is lost (deadline): the node forgot it (it was restarted or flushed, it "
        "evicted keys, or its clock was set) [a: quarantined (9.0 s left)]"
    )
    three = {"a": "quarantined (9.0 s left)", "b": "quarantined (8.0 s left)", "c": "granted"}
    assert "(deadline): 2 of 3 nodes forgot it" in str(
        errors.LockLost("invoice:7", "deadline", three)
    )
