"""`why`, `release`, `doctor`, `tail` and a long `ls`, as an operator types them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import secrets
import signal
import struct
import termios
import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.cli.ls import SORTED
from celery_redlock.reading.nodes import bootstrap, node_statuses
from support.command_line import on_all, stopped, urls
from support.stored import clients_of, do, label
from support.waiting import eventually

#: The quarantine, which is a little longer than max_ttl, outlasts every test.
RULES = Rules(ttl=60, max_ttl=600)
SHOP = """
    import os, time
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker=os.environ.get("BROKER", "memory://"))
    # No node hangs here, so one that is slow is not down.
    patient = "?socket_timeout=20&socket_connect_timeout=20"
    app.conf.redlock_nodes = [url + patient for url in os.environ.get("NODES", "").split()]
    app.conf.redlock_ttl, app.conf.redlock_max_ttl = 60, 600
    app.conf.redlock_node_timeout = 5.0  # no node hangs here: those that are down refuse at once
    app.conf.redlock_web_token = "web-t0ken-web-t0ken"

    @app.task(base=RedlockTask, lock_key="nightly")
    def nap():
        print("held", flush=True)
        time.sleep(600)

    @app.task(base=RedlockTask, unique_until="finished", on_conflict="reschedule", lock_wait=2)
    def bill(order, dry_run=False):
        print("held", flush=True)
        time.sleep(600)

    @app.task(base=RedlockTask, lock_key=("api", "tenant"), lock_limit=(2, 1))
    def call():
        print("held", flush=True)
        time.sleep(600)

    @app.task
    def plain():
        pass
"""
HOLDER = {"task_id", "task", "execution", "host", "pid", "since"}
LOCK = HOLDER | {"name", "age", "ttl", "votes", "held", "fence", "waiting", "token", "foreign"}
LOCK |= {"waiting_since"}
HOUR = 3600.0


@pytest.fixture
def nodes(redis_nodes):
    nodes = redis_nodes(3)
    enrol(nodes)
    return nodes


def enrol(nodes):
    """Enrol *nodes*; those that did not answer in time, at another try."""
    enrolled = {"enrolled"}
    eventually(lambda: {*bootstrap(urls(nodes), RULES).values()} == enrolled, "enrolment of all")


def hold(line, nodes, call="nap.apply(task_id='task-1')", on=None, name="nightly"):
    holder = line.start(nodes, "-c", f"import shop; shop.{call}")
    assert holder.stdout.readline() == "held\n"
    if name:
        on_all(on or nodes, name)
    return holder


def refuse(line, nodes):
    code = "import shop; shop.nap.apply(task_id='task-2')"
    line.start(nodes, "-c", code).communicate(timeout=100)
    eventually(
        lambda: all(do(node, "EXISTS", "redlock:journal") for node in nodes if node.alive),
        "record in the journals",
    )


def plain(line, nodes, *words, expected=0):
    """Return what a command with ``--json`` tells, after a look at its exit code."""
    code, out, err = line.redlock(nodes, *words, "--json")
    assert code == expected, out + err
    return json.loads(out)


def token_of(line, nodes, name="nightly"):
    locks = plain(line, nodes, "ls")["locks"]
    return next(lock["token"] for lock in locks if lock["name"] == name)


# -- one scene, all commands -----------------------------------------------------------------


def test_a_bad_day_is_told_rightly_by_all_commands(redis_nodes, line):
    nodes = redis_nodes(5)
    enrol(nodes)
    nodes[1].restart()
    node_statuses(urls(nodes), RULES)
    locks = Redlock.from_urls(urls(nodes), ttl=60, max_ttl=600, node_timeout=10.0)
    locks.release(locks.acquire("find out"))
    locks.close()
    holder = hold(line, nodes, on=[nodes[0], *nodes[2:]])
    nodes[0].kill()
    for node in nodes[2:]:
        value = "f" * 40 + json.dumps({"task": "old", "task_id": "gone", "pid": 1, "host": "h"})
        do(node, "SET", "redlock:lock:leaked", value)
    eventually(lambda: node_statuses(urls(nodes), RULES)[1].state == "quarantined", "a quarantine")

    status = plain(line, nodes, "status")
    states = [node["state"] for node in status["nodes"]]
    assert states == ["down", "quarantined", "up", "up", "up"]

    listed = plain(line, nodes, "ls")
    assert listed["down"] == [label(nodes[0])]
    held, leaked = sorted(listed["locks"], key=lambda lock: lock["name"], reverse=True)
    assert (held["name"], held["pid"], held["held"]) == ("nightly", holder.pid, True)
    assert (leaked["name"], leaked["ttl"], leaked["token"]) == ("leaked", None, "f" * 8)
    _, out, _ = line.redlock(nodes, "ls", "leak")
    assert "never" in out
    assert "nightly" not in out

    why = plain(line, nodes, "why", "shop.nap", expected=1)
    assert (why["state"], why["holder"]["pid"]) == ("held", holder.pid)
    assert len(why["holder"]["votes"]) >= 3
    assert [node["state"] for node in why["nodes"]] == states
    why = plain(line, nodes, "why", "--name", "leaked", expected=1)
    assert (why["holder"]["ttl"], why["holder"]["task_id"]) == (None, "gone")
    _, out, _ = line.redlock(nodes, "why", "--name", "leaked")
    assert "never expires" in out

    found = plain(line, nodes, "doctor", expected=1)
    codes = {(finding["code"], finding["where"]) for finding in found["findings"]}
    assert {("node-down", label(nodes[0])), ("node-quarantined", label(nodes[1]))} <= codes
    assert {("leaked-keys", label(node)) for node in nodes[2:]} <= codes
    assert "no-quorum" not in {code for code, _ in codes}

    code, out, _ = line.redlock(nodes, "release", "leaked", "--token", "f" * 8, "--yes")
    assert (code, out.count(": released")) == (0, 3)
    assert [lock["name"] for lock in plain(line, nodes, "ls")["locks"]] == ["nightly"]
    found = plain(line, nodes, "doctor", expected=1)
    assert "leaked-keys" not in {finding["code"] for finding in found["findings"]}


def test_what_scripts_read_stays_what_it_is(line, nodes):
    """The keys of every JSON document: to take one away breaks somebody's script."""
    holder = hold(line, nodes)
    refuse(line, nodes)
    token = token_of(line, nodes)
    status = plain(line, nodes, "status")
    assert set(status) == {"quorum", "voting", "needed", "nodes"}
    node = {"node", "state", "latency", "version", "uptime", "quarantine", "problem"}
    assert set(status["nodes"][0]) == node
    listed = plain(line, nodes, "ls")
    assert set(listed) == {"locks", "down", "complete"}
    assert set(listed["locks"][0]) == LOCK
    why = plain(line, nodes, "why", "shop.nap", expected=1)
    call = {"another_call", "queued", "next", "burst", "workers", "recent"}
    call |= {"waiting", "waiting_since", "waiters", "places"}
    assert set(why) == {"lock", "task", "state", "holder", "others", "nodes"} | call
    more = {"age", "ttl", "votes", "fence", "renewals", "margin", "token", "foreign"}
    assert set(why["holder"]) == HOLDER | more
    assert set(why["nodes"][0]) == {"node", "state", "token", "ttl", "fence", "problem"}
    assert set(why["places"][0]) == {"lock", "name", "place", "state", "holder"}
    assert set(why["another_call"]) == {"meets", "publish", "run"}
    found = plain(line, nodes, "doctor")
    assert set(found) == {"well", "errors", "warnings", "notes", "findings"}
    refused = plain(line, nodes, "bootstrap", expected=1)
    assert set(refused) == {"refused", "live_locks", "down"}
    assert set(refused["live_locks"][0]) == LOCK
    record = plain(line, nodes, "tail", "--no-follow", "-n", "1")
    assert {"id", "event", "at", "host", "pid", "name", "task", "task_id", "cause"} <= set(record)
    with stopped(holder):
        released = plain(line, nodes, "release", "nightly", "--token", token, "--yes")
        # Not after it: a renewal of the holder's sets keys again for a moment.
        enrolled = plain(line, nodes, "bootstrap", "--yes")
    assert set(released) == {"lock", "released", "reason", "holder", "reservation", "nodes"}
    assert set(released["holder"]) == HOLDER | {"age", "ttl", "votes", "token"}
    assert set(released["nodes"][0]) == {"node", "result"}
    assert set(enrolled) == {"refused", "nodes"}
    assert set(enrolled["nodes"][0]) == {"node", "enrolled", "problem"}


# -- why -----------------------------------------------------------------------------------


def test_why_names_the_holder_and_what_becomes_of_another_call(line, nodes):
    holder = hold(line, nodes)
    refuse(line, nodes)
    code, out, err = line.redlock(nodes, "why", "shop.nap")
    assert (code, err) == (1, "")
    for part in ("'nightly'", "held", "task-1", str(holder.pid), "on 3 of 3 nodes", "fence"):
        assert part in out
    assert "is skipped: its body does not run" in out
    assert "Skipped task shop.nap[task-2]: lock 'nightly' is held by task" in out
    by_name = plain(line, nodes, "why", "--name", "nightly", expected=1)
    by_call = plain(line, nodes, "why", "shop.nap", "[]", "{}", expected=1)
    for volatile in ("holder", "nodes", "places"):
        del by_name[volatile], by_call[volatile]
    assert by_name == by_call


def wait_for_nightly(node, task_id, since):
    info = json.dumps({"task": "shop.nap", "task_id": task_id, "host": "web-3", "pid": 4711})
    known = f"{'c' * 16}0001{int(since * 1000):013}{int(time.time() * 1000):013}{info}"
    do(node, "HSET", "redlock:waiters:nightly", task_id * 32, known)


def test_who_waits_is_told_the_oldest_first(line, nodes):
    hold(line, nodes)
    assert "Waiting" not in line.redlock(nodes, "why", "shop.nap")[1]
    # Half an hour has to pass before these are told in other words.
    longest, shorter = time.time() - (50 * HOUR + HOUR / 2), time.time() - (26 * HOUR + HOUR / 2)
    wait_for_nightly(nodes[0], "b", shorter)
    wait_for_nightly(nodes[1], "a", longest)
    wait_for_nightly(nodes[2], "b", shorter)
    why = plain(line, nodes, "why", "shop.nap", expected=1)
    assert [it["task_id"] for it in why["waiters"]] == ["a", "b"]
    assert why["waiters"][0]["host"] == "web-3"
    assert why["waiting_since"] == pytest.approx(longest, abs=0.01)
    _, out, _ = line.redlock(nodes, "why", "shop.nap")
    assert "Waiting: 2, the first for 2 d 2 h" in out
    assert re.search(r"(?s)2 d 2 h +a .*1 d 2 h +b ", out), out
    _, out, _ = line.redlock(nodes, "ls")
    assert "OLDEST" in out
    assert "2 d 2 h" in out
    assert "b" * 8 not in out
    (lock,) = plain(line, nodes, "ls")["locks"]
    assert lock["waiting_since"] == why["waiting_since"]


def test_all_names_and_places_of_a_call_are_told_and_released(line, nodes):
    call = "call.apply(task_id='task-1')"
    holder = hold(line, nodes, call, name="tenant")
    eventually(
        lambda: (
            {1} == {do(node, "EXISTS", "redlock:lock:api", "redlock:lock:api#1") for node in nodes}
        ),
        "all places",
    )
    why = plain(line, nodes, "why", "shop.call", expected=1)
    assert [it["lock"] for it in why["places"]] == ["api", "api#1", "tenant"]
    assert sorted(it["state"] for it in why["places"]) == ["free", "held", "held"]
    _, out, _ = line.redlock(nodes, "why", "shop.call")
    assert "Locks 'api', 'tenant' of task shop.call: 2 of 3 locks are held." in out
    tokens = [it["holder"]["token"] for it in why["places"] if it["holder"]]
    tokens = [word for token in tokens for word in ("--token", token)]
    by_name = plain(line, nodes, "why", "--name", "api")
    assert [it["lock"] for it in by_name["places"]] == ["api", "api#1"]
    words = ("release", "api", "tenant", *tokens, "--yes")
    with stopped(holder):
        released = plain(line, nodes, *words)
        # Not after it: a renewal of the holder's sets keys again for a moment.
        after = plain(line, nodes, "why", "shop.call")
    assert released["released"]
    assert [it["lock"] for it in released["others"]] == ["tenant"]
    assert after["state"] == "free"


def test_why_of_a_free_lock(line, nodes):
    code, out, _ = line.redlock(nodes, "why", "shop.bill", "[42]", '{"dry_run": true}')
    assert code == 0
    assert "free." in out
    assert "gets the lock" in out
    same = plain(line, nodes, "why", "shop.bill", "[]", '{"dry_run": true, "order": 42}')
    assert same["lock"] in out


def test_why_without_a_quorum(line, nodes):
    nodes[0].kill()
    nodes[1].kill()
    why = plain(line, nodes, "why", "shop.bill", "[42]", expected=1)
    assert (why["state"], why["holder"]) == ("unavailable", None)
    assert why["another_call"]["meets"] == "unavailable"
    assert "(on_unavailable)" in why["another_call"]["run"]
    _, out, _ = line.redlock(nodes, "why", "shop.bill", "[42]")
    assert "no quorum could say: 1 of 3 nodes vote, 2 needed" in out


def test_why_tells_of_messages_that_are_queued(line, nodes, broker):
    """The lock is free, and yet another publish would be a duplicate."""
    env = {"BROKER": broker.url}
    publish = "import shop; print(shop.bill.apply_async(['ord3r-4711'], task_id='first').id)"
    out, err = line.start(nodes, "-c", publish, env=env).communicate(timeout=100)
    assert out == "first\n", err
    eventually(lambda: all(do(node, "KEYS", "*queued*") for node in nodes), "markers")
    why = plain(line, nodes, "why", "shop.bill", '["ord3r-4711"]')
    assert why["state"] == "free"
    queued = {"task_id", "task", "host", "pid", "since", "running", "ended", "left", "merged"}
    queued |= {"token", "result", "debounced"}
    assert set(why["queued"]) == queued
    assert (why["queued"]["task_id"], why["queued"]["running"]) == ("first", False)
    assert why["another_call"]["publish"].endswith("returns the result of task first.")
    other = plain(line, nodes, "why", "shop.bill", '["another"]')
    assert (other["queued"], other["next"]) == (None, None)
    assert "none is queued" in other["another_call"]["publish"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["shop.naps"], "did you mean shop.nap"),
        (["shop.plain"], "takes no lock"),
        (["shop.bill", "[s3cret"], "ARGS must be a JSON list"),
        (["shop.bill", '"s3cret"'], "ARGS must be a JSON list"),
        (["shop.bill", "[]", '["s3cret"]'], "KWARGS must be a JSON object"),
        (["shop.bill", "[]"], "missing a required argument: 'order'"),
        (["shop.bill", '["s3cret", 1, 2]'], "too many positional arguments"),
        (["shop.bill", "[]", "{}", "s3cret"], "Give TASK with its ARGS"),
        ([], "Give TASK with its ARGS"),
        (["shop.bill", "--name", "a"], "Give TASK with its ARGS"),
    ],
)
def test_why_of_what_is_no_call(line, words, told):
    code, out, err = line.redlock(["redis://127.0.0.1:1/0"], "why", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert "s3cret" not in err
    assert "Traceback" not in err


# -- release -------------------------------------------------------------------------------


def test_release_takes_the_lock_from_the_holder_that_was_seen(line, nodes):
    holder = hold(line, nodes)
    token = token_of(line, nodes)
    with stopped(holder):  # it might hear of it at once, and give back the last ones itself
        code, out, _ = line.redlock(nodes, "release", "nightly", "--token", token, "--yes")
        # Its next renewal sets the key again, for a moment, before it finds that it has lost it.
        left = plain(line, nodes, "ls")["locks"]
    assert code == 0
    assert str(holder.pid) in out
    assert out.count(": released") == 3
    assert left == []
    eventually(lambda: holder.poll() is not None, "end of a task whose lock is lost", timeout=100)


def test_release_changes_nothing_for_any_other_token(line, nodes):
    hold(line, nodes)
    token = token_of(line, nodes)
    other = "0" * 8 if token != "0" * 8 else "1" * 8
    told = plain(line, nodes, "release", "nightly", "--token", other, "--yes", expected=1)
    assert (told["released"], told["reason"]) == (False, "held by another")
    told = plain(line, nodes, "release", "nothing", "--token", token, "--yes", expected=1)
    assert (told["released"], told["reason"]) == (False, "free")
    code, _, err = line.redlock(nodes, "release", "nightly", "--token", token)
    assert code == 2
    assert "--yes" in err
    code, _, err = line.redlock(nodes, "release", "nightly", "--token", token[:7], "--yes")
    assert code == 2
    assert "8 characters" in err
    assert token_of(line, nodes) == token


def test_release_leaves_alone_what_others_wrote(line, nodes):
    """A value that is no token of ours: its beginning fits, and yet it stays, and is not shown."""
    for node in nodes:
        do(node, "SET", "redlock:lock:theirs", "hunter2-hunter2")
    told = plain(line, nodes, "release", "theirs", "--token", "hunter2-", "--yes", expected=1)
    assert told["reason"] == "not ours"
    _, out, _ = line.redlock(nodes, "release", "theirs", "--token", "hunter2-", "--yes")
    assert "redlock:lock:theirs" in out
    for command in ("ls", "why --name theirs"):
        _, out, _ = line.redlock(nodes, *command.split())
        assert "hunter2" not in out
    assert do(nodes[0], "GET", "redlock:lock:theirs") == b"hunter2-hunter2"


def test_release_says_where_it_could_not(line, nodes):
    """With a node gone in between the key may stand there: exit code 1 if it was seen there."""
    for node in nodes:
        do(node, "SET", "redlock:lock:a", "e" * 40, "PX", "600000")
    nodes[2].kill()
    code, out, _ = line.redlock(nodes, "release", "a", "--token", "e" * 8, "--yes")
    assert code == 0  # nobody saw it there
    assert f"{label(nodes[2])}: Error" in out
    for node in nodes[:2]:
        node.kill()
    told = plain(line, nodes, "release", "a", "--token", "e" * 8, "--yes", expected=1)
    assert told["reason"] == "unavailable"


def test_release_without_a_token_says_where_it_is_to_be_had(line, nodes):
    """It is what the operator has to look for next."""
    code, _, err = line.redlock(nodes, "release", "a")
    assert (code, "'redlock ls' shows it" in err) == (2, True)


BILL = """
import json, shop
result = shop.bill.apply_async((7,), task_id="{task_id}")
print(json.dumps([result.duplicate, result.id, result.lock_name]))
"""


def test_a_reservation_is_shown_and_ended_by_hand(line, nodes):
    """As of a message that is lost: by the token that `ls` and `why` show, and nobody else's."""

    def publish(task_id):
        process = line.start(nodes, "-c", BILL.format(task_id=task_id))
        return json.loads(process.communicate(timeout=100)[0])

    _, _, name = publish("first")
    assert publish("second")[:2] == [True, "first"]
    _, out, err = line.redlock(nodes, "ls")
    assert "No live locks" in out
    assert "1 name reserved" in err
    (found,) = plain(line, nodes, "ls", "--reserved")["reserved"]
    assert (found["name"], found["task_id"], found["ended"]) == (name, "first", False)
    assert (len(found["votes"]), found["reserved"]) == (3, True)
    why = plain(line, nodes, "why", "shop.bill", "[7]")
    assert (why["queued"]["token"], why["queued"]["result"]) == (found["token"], None)
    wrong = "0" * 8 if found["token"] != "0" * 8 else "1" * 8
    told = plain(line, nodes, "release", name, "--token", wrong, "--yes", expected=1)
    assert told["reason"] == "reserved by another"
    assert publish("third")[0]
    code, out, _ = line.redlock(nodes, "release", name, "--token", found["token"], "--yes")
    assert (code, out.count(": released")) == (0, 3)
    assert "is reserved by task shop.bill, id first" in out
    assert publish("fourth")[:2] == [False, "fourth"]


DEBOUNCED = """
import json, shop
results = [shop.nap.apply_async(debounce=600, task_id=f"call-{n}") for n in range(2)]
print(json.dumps([result.id for result in results]))
"""


def test_an_open_burst_is_shown_by_its_newest_call(line, nodes):
    """In `ls --reserved`, `why` and on the terminal; nothing of it is there to be released."""
    process = line.start(nodes, "-c", DEBOUNCED)
    assert json.loads(process.communicate(timeout=100)[0]) == ["call-0", "call-1"]
    _, _, err = line.redlock(nodes, "ls")
    assert "1 name reserved at publish, or debounced" in err

    def newest():
        (found,) = plain(line, nodes, "ls", "--reserved")["reserved"]
        return found if found["task_id"] == "call-1" and found["reserved"] else None

    found = eventually(newest, "the second call on a majority")  # it is told, not waited for
    assert (found["debounced"], found["running"], found["token"]) == (True, False, None)
    assert 600 < found["left"] <= 3600
    _, out, _ = line.redlock(nodes, "ls", "--reserved")
    assert re.search(r"call-1 .* debounced ", out), out
    why = plain(line, nodes, "why", "shop.nap")
    assert (why["burst"]["task_id"], why["queued"]) == ("call-1", None)
    _, out, _ = line.redlock(nodes, "why", "shop.nap")
    assert re.search(r"Debounced: id call-1: the newest call of a burst, which ends in \d+ s", out)


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 1), ("y", 0, 0)])
def test_release_asks_a_person_first(line, nodes, answer, code, left):
    for node in nodes:
        do(node, "SET", "redlock:lock:a", "e" * 40 + '{"task_id": "one"}', "PX", "600000")
    ended, out, err = line.answer(nodes, answer, "release", "a", "--token", "e" * 8)
    assert "held by task one" in out
    assert "[y/N]" in err
    assert ended == code
    assert do(nodes[0], "EXISTS", "redlock:lock:a") == left


# -- doctor --------------------------------------------------------------------------------


def test_doctor_of_healthy_nodes(line, nodes):
    before = [set(do(node, "KEYS", "*")) for node in nodes]
    code, out, err = line.redlock(nodes, "doctor")
    assert (code, out, err) == (0, "All is well.\n", "")
    assert [set(do(node, "KEYS", "*")) for node in nodes] == before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["redis://:s3cret@lock-1/0"] * 2, "an odd number"),
        (["redis://:s3cret@lock-1/0"] * 3, "more than once"),
        (["redis://:s3cret@lock-1:no/0"], "is not a URL"),
        (["none"], "is not a URL"),
    ],
)
def test_doctor_tells_wrong_settings_as_a_finding(line, given, told):
    if given[:1] == given[1:2] and len(given) == 2:
        given = [given[0], given[1].replace("lock-1", "lock-2")]
    told_json = plain(line, given, "doctor", expected=2)
    (finding,) = told_json["findings"]
    assert (finding["code"], finding["level"]) == ("settings", "error")
    assert told in finding["what"]
    code, out, err = line.redlock(given, "doctor")
    assert code == 2
    assert "s3cret" not in out + err + json.dumps(told_json)


# -- tail ----------------------------------------------------------------------------------


def record(nodes, ident, **fields):
    told = {"id": ident, "event": "TaskSkipped", "at": time.time(), "cause": "conflict"}
    text = json.dumps({**told, "task": "shop.nap", "task_id": ident, "name": "nightly", **fields})
    for node in nodes:
        do(node, "XADD", "redlock:journal", "*", "e", text)


def test_tail_shows_what_was_and_picks(line, nodes):
    record(nodes[:1], "one", at=100.0)
    record(nodes[1:], "two", at=200.0, task="other.task", name="invoice:7")
    record(nodes, "three", at=300.0, event="LeaseLost", reason="deadline")

    def told(*words):
        code, out, err = line.redlock(nodes, "tail", "--no-follow", *words, "--json")
        assert (code, err) == (0, "")
        return [json.loads(line)["id"] for line in out.splitlines()]

    assert told() == ["one", "two", "three"]
    assert told("-n", "2") == ["two", "three"]
    assert told("-n", "0") == []
    assert told("-f", "--no-follow", "-n", "1") == ["three"]  # -f: as of the other tail
    assert told("--task", "shop.*") == ["one", "three"]
    assert told("--lock", "invoice:*") == ["two"]
    assert told("--event", "LeaseLost") == ["three"]
    assert told("-n", "1", "--event", "TaskSkipped", "--event", "NodeDown") == ["two"]
    _, out, _ = line.redlock(nodes, "tail", "--no-follow")
    assert (
        "Lock 'nightly' is lost (deadline) by task shop.nap[three]: not renewed in time"
        in out.splitlines()[2]
    )


def test_tail_ends_with_its_reader_though_nothing_happens(line, nodes):
    """As in ``tail | grep -m 1``: nothing is written that could tell it."""
    record(nodes, "first")
    process = line.start_redlock(nodes, "tail")
    assert "[first]" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == ""


def test_tail_says_what_it_cannot_know(line, nodes):
    """An event that there is not, and nodes that do not answer: else it would just be silent."""
    code, _, err = line.redlock(nodes, "tail", "--event", "TaskSkiped")
    assert (code, "'TaskSkipped'" in err) == (2, True)
    nodes[0].kill()
    code, out, err = line.redlock(nodes, "tail", "--no-follow")
    assert (code, out) == (0, "")
    assert f"could not be read: {label(nodes[0])};" in err


def test_tail_follows_through_the_death_of_nodes_until_ctrl_c(line, nodes):
    record(nodes, "old")
    process = line.start_redlock(nodes, "tail")
    assert "[old]" in process.stdout.readline()
    record(nodes, "new")
    assert "[new]" in process.stdout.readline()
    nodes[0].kill()
    nodes[1].kill()
    record(nodes[2:], "few")
    assert "[few]" in process.stdout.readline()
    nodes[0].start()
    nodes[2].kill()
    # Old records of a node that nobody could ask before are not news.
    record(nodes[:1], "ancient", at=time.time() - 3600)
    record(nodes[:1], "back")
    assert "[back]" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("words", [["tail"], ["ls"], ["ls", "--json"], ["tail", "--json"]])
def test_a_reader_that_leaves_is_no_error(line, nodes, words):
    """As with ``| head``: no traceback, no complaint, exit code 0."""
    for number in range(600):
        do(nodes[0], "SET", f"redlock:lock:{'x' * 80}{number}", "e" * 40, "PX", "600000")
    record(nodes, "first")
    ours, theirs = os.pipe()
    process = line.start_redlock(nodes, *words, stdout=theirs)
    os.close(theirs)
    assert os.read(ours, 10)
    os.close(ours)

    def has_ended():
        record(nodes, secrets.token_hex(4))  # what is to be written is how it notices
        return process.poll() is not None

    eventually(has_ended, "end of the command", timeout=100, every=0.3)
    assert (process.returncode, process.stderr.read()) == (0, "")


# -- ls of very many -----------------------------------------------------------------------


def plant(nodes, count):
    info = json.dumps({"task": "shop.bill", "task_id": "id", "host": "web-1", "pid": 7})
    for client in clients_of(nodes):
        for begin in range(0, count, 5000):
            with client.pipeline(transaction=False) as pipe:
                for number in range(begin, min(count, begin + 5000)):
                    pipe.set(f"redlock:lock:a:{number:06}", "e" * 40 + info, px=600_000)
                    pipe.set(f"redlock:fence:a:{number:06}", number + 1, px=600_000)
                pipe.execute()
        client.config_resetstat()


#: Runs `celery` with the words after it, and tells of its own memory on stderr. (What the kernel
#: tells a parent of its child's memory may be that of the parent, from before the exec.)
MEASURED = """
import re, resource, sys
from pathlib import Path
from celery.__main__ import main
try:
    main()
finally:
    status = Path("/proc/self/status")
    if status.exists():
        peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("peak", peak, file=sys.stderr)
"""


def peak(line, nodes, path, *words):
    """Return the most memory that a command had, in kB; its output is in *path*."""
    with path.open("w") as out:
        words = ["-A", "shop", "redlock", *words]
        process = line.start(nodes, "-c", MEASURED, *words, stdout=out)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return int(err.split()[-1])


@pytest.mark.long
def test_many_locks_cost_the_client_no_memory_and_the_nodes_no_time(redis_nodes, line, tmp_path):
    nodes = redis_nodes(3)
    enrol(nodes)
    plant(nodes, 200)
    few = peak(line, nodes, tmp_path / "few", "ls", "--json")
    plant(nodes, 20_000)
    many = peak(line, nodes, tmp_path / "many", "ls", "--json")
    told = json.loads((tmp_path / "many").read_text())
    assert len({lock["name"] for lock in told["locks"]}) == 20_000
    assert told["complete"] is True
    assert many - few < 10_000  # kB; as Python objects they are ten times that
    for node in nodes:
        with redis.Redis.from_url(node.url) as client:
            stats = client.info("commandstats")
        assert "cmdstat_keys" not in stats
        for command in ("cmdstat_evalsha", "cmdstat_scan"):  # a call is for a few of them
            assert stats[command]["calls"] >= 20_000 / 1000


@pytest.mark.long
def test_more_locks_than_are_sorted_are_printed_as_they_come(line, nodes):
    plant(nodes, SORTED + 300)
    code, out, err = line.redlock(nodes, "ls")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    names = [row.split()[0] for row in rows]
    assert head.split()[:3] == ["LOCK", "TASK", "ID"]
    assert sorted(names) == [f"a:{number:06}" for number in range(SORTED + 300)]
    _, out, _ = line.redlock(nodes, "ls", "a:0001*")
    names = [row.split()[0] for row in out.splitlines()[1:]]
    assert names == [f"a:{number:06}" for number in range(100, 200)]
    code, out, err = line.redlock(nodes, "ls", "--limit", "7")
    assert (code, len(out.splitlines())) == (0, 8)
    assert "not all" in err
    told = plain(line, nodes, "ls", "--limit", "7")
    assert (len(told["locks"]), told["complete"]) == (7, False)


def test_ctrl_c_leaves_a_whole_document(line, nodes):
    plant(nodes, 20_000)
    ours, theirs = os.pipe()
    process = line.start_redlock(nodes, "ls", "--json", stdout=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as reader:
        begin = b""
        while len(begin) < 1000:  # in which there are locks
            begin += reader.read(1000)
        # It waits for its reader: far less than all locks go into a pipe.
        process.send_signal(signal.SIGINT)
        told = json.loads(begin + reader.readall())
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert 0 < len(told["locks"]) < 20_000
    assert told["complete"] is False
    assert "not all" in err


# -- on a terminal -------------------------------------------------------------------------


def on_a_terminal(line, nodes, *words, **env):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    process = line.start_redlock(
        nodes,
        *words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={"TERM": "xterm-256color", "COLUMNS": "200", "NO_COLOR": "", **env},
    )
    os.close(theirs)
    told = b""
    try:
        while chunk := os.read(ours, 65536):
            told += chunk
    except OSError:  # how Linux tells the end of a terminal
        pass
    process.wait(60)
    os.close(ours)
    return told.decode()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")


def test_a_terminal_gets_colours(line, nodes):
    for node in nodes:
        do(node, "SET", "redlock:lock:[red]x[/]", "e" * 40, "PX", "600000")
    told = on_a_terminal(line, nodes, "status")
    assert COLOUR.search(told)
    assert "[red]x[/]" in on_a_terminal(line, nodes, "ls")
    assert not COLOUR.search(on_a_terminal(line, nodes, "status", NO_COLOR="1"))
    assert not COLOUR.search(on_a_terminal(line, nodes, "why", "--name", "x", NO_COLOR="1"))
    assert COLOUR.search(on_a_terminal(line, nodes, "why", "--name", "x"))


def test_control_characters_of_others_do_not_reach_the_terminal(line, nodes):
    """What is in a key or a value may be anybody's."""
    evil = "\x1b]0;pwned\x07\r\n\x1b[31m"
    info = json.dumps({"task": evil, "task_id": evil, "host": [evil], "pid": evil, "since": evil})
    for node in nodes:
        do(node, "SET", f"redlock:lock:x{evil}", "e" * 40 + info, "PX", "600000")
    record(nodes, evil, name=evil, holder={"task_id": evil, "host": evil})
    commands = (["ls"], ["why", "--name", f"x{evil}"], ["tail", "--no-follow"], ["bootstrap"])
    for words in (*commands, ["release", f"x{evil}", "--token", "e" * 8, "--yes"]):
        _, out, err = line.redlock(nodes, *words)
        assert "pwned" in out
        assert "\x1b" not in out + err
        assert "\x07" not in out + err


# -- all of them -----------------------------------------------------------------------------


@pytest.mark.timeout(900)  # some thirty processes, one after the other
def test_secrets_are_told_nobody(line, redis_nodes):
    nodes = redis_nodes(3)
    for node in nodes:
        do(node, "CONFIG", "SET", "requirepass", "p4ssw0rd")
    right = [node.url.replace("redis://", "redis://:p4ssw0rd@") for node in nodes]
    wrong = [*right[:2], right[2].replace("p4ssw0rd", "wr0ngpw")]
    enrol(right)
    hold(line, right, "bill.apply(['4rgument'], task_id='task-1')", name=None)
    for url in right:
        with redis.Redis.from_url(url) as client:
            eventually(lambda client=client: client.keys("redlock:lock:*"), f"lock on {url}")
    refused = "import shop; shop.bill.apply(['4rgument'], task_id='task-2')"
    line.start(right, "-c", refused).communicate(timeout=100)
    with redis.Redis.from_url(right[0]) as client:
        (key,) = client.keys("redlock:lock:*")
        token = client.get(key)[:40].decode()
    name = key.decode().removeprefix("redlock:lock:")
    commands = [
        ["status"],
        ["ls"],
        ["why", "shop.bill", '["4rgument"]'],
        ["why", "--name", name],
        ["why", "shop.bill", '["4rgument"'],
        ["why", "shop.bill", '["4rgument", 2, 3, 4]'],
        ["why", "shop.bill", '["4rgument"]', '{"order": "4rgument"}'],
        ["why", "shop.bill", "[]", "{}", "4rgument"],
        ["doctor"],
        ["tail", "--no-follow"],
        ["report"],
        ["report", "--json"],
        ["bootstrap"],
        ["bootstrap", "--json"],
        ["release", name, "--token", "0" * 8, "--yes"],
        ["release", name, "--token", token, "--yes", "--json"],
        ["bootstrap", "--force"],
    ]
    seen = ""
    for words in commands:
        _, out, err = line.redlock(wrong, *words)
        assert "Traceback" not in err
        assert "127.0.0.1:" in out + err or words[0] not in ("status", "ls", "bootstrap")
        seen += out + err
    for words in (["status"], ["ls"], ["why", "--name", name], ["doctor"]):
        for given in (wrong, [*right, right[0]]):
            _, out, err = line.redlock(given, *words, "--json")
            seen += out + err
    assert token[:8] in seen  # the public part
    for secret in ("p4ssw0rd", "wr0ngpw", "4rgument", "web-t0ken", token[8:]):
        assert secret not in seen


COMMANDS = (
    *("status", "ls", "why", "release", "report"),
    *("doctor", "tail", "bootstrap", "init", "web"),
)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples_and_exit_codes(line, command):
    code, out, _ = line.redlock([], *command.split(), "--help")
    assert code == 0
    assert f"celery -A shop redlock {command}" in out
    assert command in ("", "web") or "Exits with 0" in out


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"why", "release", "doctor", "web"}))
def test_wrong_settings_end_every_command_with_2(line, command):
    code, out, err = line.redlock(["redis://:s3cret@lock-1/0"] * 3, command)
    assert (code, out) == (2, "")
    assert err.startswith("Error: redlock_nodes names lock-1:6379/0 more than once")
    assert "s3cret" not in err


def test_completion_knows_commands_and_options(line):
    env = {"_CELERY_COMPLETE": "bash_complete", "COMP_CWORD": "4"}
    words = {"COMP_WORDS": "celery -A shop redlock "}
    code = "import sys; sys.argv[0] = 'celery'; from celery.__main__ import main; main()"
    out, _ = line.start([], "-c", code, env=env | words).communicate(timeout=100)
    assert {entry.partition(",")[2] for entry in out.split()} == set(COMMANDS)


def test_starting_celery_loads_none_of_it(line):
    """Neither rich nor flask, nor a command: a worker's start waits for this, too."""
    code = (
        "import sys, celery.bin.celery\n"
        "print(sorted(m for m in sys.modules if m.startswith('celery_redlock.ops')))\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('rich', 'flask', 'waitress')])"
    )
    out, err = line.start([], "-c", code).communicate(timeout=100)
    ours, heavy = map(eval, out.splitlines())
    assert err == ""
    assert heavy == []
    assert ours == [
        "celery_redlock.ops",
        "celery_redlock.ops.cli",
        "celery_redlock.ops.cli.group",
        "celery_redlock.ops.control",
    ]


def test_celery_inspect_knows_our_commands(line):
    """They are in its list, whether or not the app declares a task of ours."""
    (line.folder / "bare.py").write_text("from celery import Celery\napp = Celery('bare')\n")
    process = line.start([], "-m", "celery", "-A", "bare", "inspect", "--list")
    out, _ = process.communicate(timeout=100)
    assert "redlock_locks" in out
    assert "redlock_nodes" in out
