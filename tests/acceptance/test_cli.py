"""``celery -A shop redlock ...`` as an operator types it, on real nodes in every state."""

from __future__ import annotations

import json
import os
import re
import socket
import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap, node_statuses
from support.command_line import on_all, urls
from support.stored import clients_of
from support.waiting import eventually

#: A quarantine, and a lease that nobody renews, have to outlast several commands of a slow machine.
RULES = Rules(ttl=60, max_ttl=600)
SHOP = """
    import os, time
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker=os.environ.get("BROKER", "memory://"))
    if "NODES" in os.environ:
        app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_ttl, app.conf.redlock_max_ttl = 60, 600
    app.conf.redlock_node_timeout = 1.0

    @app.task(base=RedlockTask, lock_key="nightly")
    def nap():
        print("held", flush=True)
        time.sleep(600)
"""


@pytest.fixture
def shop(line):
    """Run a process of the shop's: ``shop(nodes, *command, **options of subprocess.Popen)``."""
    return line.start


@pytest.fixture
def redlock(line):
    """Run ``celery -A shop redlock ...`` to its end: returns exit code, stdout and stderr."""
    return line.redlock


def _states(nodes):
    return [status.state for status in node_statuses(urls(nodes), RULES)]


def _plant(node, name):
    """Write a lock onto a node, past the library; its token is 40 times ``e``."""
    with redis.Redis.from_url(node.url) as client:
        client.set(f"redlock:lock:{name}", "e" * 40, px=600_000)


def _quarantined(nodes, index):
    """Restart a node, and have a client find out that it has lost its memory."""
    nodes[index].restart()
    locks = Redlock.from_urls(urls(nodes), ttl=60, max_ttl=600, node_timeout=1.0)

    def is_quarantined():  # a node that was late has not been asked, and is with the next lock
        locks.release(locks.acquire("find out", wait=60))
        return _states(nodes)[index] == "quarantined"

    eventually(is_quarantined, "quarantine", every=0.2)


# -- status ----------------------------------------------------------------------------


def test_status_says_that_all_is_well(redis_nodes, redlock):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    code, out, err = redlock(nodes, "status")
    assert (code, err) == (0, "")
    for node in nodes:
        (line,) = [
            line for line in out.splitlines() if line.startswith(f"127.0.0.1:{node.port}/0 ")
        ]
        assert re.search(r" up +[0-9.]+ ms ", line)
    assert "Quorum: yes. 3 of 3 nodes can vote, 2 are needed." in out


def test_status_tells_the_states_apart(redis_nodes, redlock):
    nodes = redis_nodes(7)
    bootstrap(urls(nodes), RULES)
    nodes[0].kill()
    _quarantined(nodes, 1)
    nodes[2].restart()
    code, out, err = redlock(nodes, "status", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["quorum"], told["voting"], told["needed"]) == (True, 4, 4)
    down, quarantined, unmarked, *rest = told["nodes"]
    assert (down["state"], quarantined["state"], unmarked["state"]) == (
        "down",
        "quarantined",
        "unmarked",
    )
    assert {node["state"] for node in rest} == {"up"}
    assert "refused" in down["problem"].lower()
    assert 0 < quarantined["quarantine"] <= RULES.quarantine
    assert rest[0]["version"]
    assert down["latency"] is None
    assert all(0 < node["latency"] < 5.0 for node in (quarantined, unmarked, *rest))
    code, out, _ = redlock(nodes, "status")
    assert code == 0
    assert " s left" in out


def test_status_fails_without_a_majority(redis_nodes, redlock):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    nodes[0].kill()
    nodes[1].kill()
    code, out, _ = redlock(nodes, "status")
    assert code == 1
    assert "Quorum: NO. 1 of 3 nodes can vote, 2 are needed." in out
    code, out, _ = redlock(nodes, "status", "--json")
    assert (code, json.loads(out)["quorum"]) == (1, False)


def test_status_of_new_nodes_says_what_to_do(redis_nodes, redlock):
    code, out, _ = redlock(redis_nodes(3), "status")
    assert code == 1
    assert out.count("unmarked") >= 3
    assert "redlock bootstrap" in out


# -- ls --------------------------------------------------------------------------------


def test_ls_names_the_holder_in_another_process(redis_nodes, shop, redlock):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    assert redlock(nodes, "ls") == (0, "No live locks.\n", "")
    assert redlock(nodes, "ls", "invoice") == (0, "No live locks.\n", "")
    began = time.time() - 0.001  # an age is rounded
    holder = shop(nodes, "-c", "import shop; shop.nap.apply(task_id='task-1')")
    assert holder.stdout.readline() == "held\n"
    on_all(nodes, "nightly")
    nodes[2].kill()
    code, out, err = redlock(nodes, "ls")
    assert code == 0
    assert f"127.0.0.1:{nodes[2].port}/0" in err
    (line,) = [line for line in out.splitlines() if "nightly" in line]
    for part in ("task-1", "shop.nap", socket.gethostname(), str(holder.pid), "2/3"):
        assert part in line.split()
    code, out, _ = redlock(nodes, "ls", "--json")
    (lock,) = json.loads(out)["locks"]
    assert (lock["name"], lock["task_id"], lock["pid"]) == ("nightly", "task-1", holder.pid)
    assert (lock["task"], lock["host"]) == ("shop.nap", socket.gethostname())
    assert 0 < lock["ttl"] <= 60
    assert 0 <= lock["age"] <= time.time() - began
    assert len(lock["votes"]) == 2
    assert lock["held"] is True
    assert json.loads(out)["down"] == [f"127.0.0.1:{nodes[2].port}/0"]
    _, out, _ = redlock(nodes, "ls", "shop.nap")
    assert out == "None of the live locks (1) has a name that matches 'shop.nap'.\n"


def test_ls_fails_when_its_list_may_have_gaps(redis_nodes, redlock):
    """With most nodes down an empty list means nothing, and the exit code says so."""
    nodes = redis_nodes(3)
    nodes[0].kill()
    nodes[1].kill()
    code, out, err = redlock(nodes, "ls")
    assert code == 1
    assert "cannot tell whether any lock is held" in out
    assert "No live locks" not in out
    assert f"127.0.0.1:{nodes[0].port}/0, 127.0.0.1:{nodes[1].port}/0" in err


# -- bootstrap -------------------------------------------------------------------------


def test_bootstrap_lets_new_nodes_vote_at_once(redis_nodes, redlock):
    nodes = redis_nodes(3)
    code, out, err = redlock(nodes, "bootstrap")
    assert (code, err) == (0, "")
    assert out.count(": may vote") == 3
    assert _states(nodes) == ["up"] * 3


def test_bootstrap_refuses_while_a_quarantined_node_has_a_lock(redis_nodes, redlock):
    """What it stores is no vote, and yet its holder may go on; `ls` says that it cannot tell."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    for node in nodes[:2]:
        with redis.Redis.from_url(node.url) as client:
            client.set("redlock:lock:hold", "a1" * 20 + "{}", px=600_000)  # outlasts the commands
            client.set("redlock:node:quarantine", "1", px=600_000)
    code, out, _ = redlock(nodes, "ls")
    assert code == 1
    assert "hold" in out
    code, out, _ = redlock(nodes, "ls", "nothing")
    assert code == 1
    assert "cannot tell whether any lock is held" in out
    code, out, err = redlock(nodes, "bootstrap")
    assert code == 1, out + err
    assert "Somebody holds a lock" in out + err


def test_ls_cannot_tell_what_flushed_nodes_have_forgotten(redis_nodes, redlock):
    """Before any client has noticed it, and so before they are quarantined."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    for client in clients_of(nodes):
        client.flushall()
    for words, what in ((["ls"], "lock is held"), (["ls", "--reserved"], "name is reserved")):
        code, out, _ = redlock(nodes, *words)
        assert (code, f"cannot tell whether any {what}" in out) == (1, True)
    assert _states(nodes) == ["unmarked"] * 3  # looking changes nothing


def test_bootstrap_refuses_while_somebody_holds_a_lock(redis_nodes, redlock):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    _quarantined(nodes, 0)
    locks = Redlock.from_urls(urls(nodes), ttl=60, max_ttl=600, node_timeout=1.0)
    locks.acquire("precious", ttl=600, wait=60)
    for words in ([], ["--yes"]):
        code, out, err = redlock(nodes, "bootstrap", *words)
        assert code == 1
        assert "precious" in out
        assert str(os.getpid()) in out
        assert "nothing was changed" in err
    code, out, _ = redlock(nodes, "bootstrap", "--json")
    assert (code, json.loads(out)["refused"]) == (1, True)
    assert json.loads(out)["live_locks"][0]["name"] == "precious"
    assert _states(nodes) == ["quarantined", "up", "up"]
    code, out, _ = redlock(nodes, "bootstrap", "--force", "--json")
    assert code == 0
    assert [node["enrolled"] for node in json.loads(out)["nodes"]] == [True] * 3
    assert _states(nodes) == ["up"] * 3


def test_bootstrap_fails_if_a_node_does_not_take_part(redis_nodes, redlock):
    """
    It refuses, be the cluster new or not; told to go on, the others may vote.

    The dead one has its reason, and the exit code is 1.
    """
    nodes = redis_nodes(3)
    nodes[1].kill()
    code, out, err = redlock(nodes, "bootstrap", "--yes")
    assert (code, out.count(": may vote")) == (1, 0)
    assert f"could not say whether a lock is held: 127.0.0.1:{nodes[1].port}/0." in err
    code, out, _ = redlock(nodes, "bootstrap", "--yes", "--json")
    told = json.loads(out)
    assert (told["refused"], told["down"]) == (True, [f"127.0.0.1:{nodes[1].port}/0"])
    assert _states(nodes) == ["unmarked", "down", "unmarked"]
    code, out, _ = redlock(nodes, "bootstrap", "--force")
    assert code == 1
    assert out.count(": may vote") == 2
    assert "refused" in out.lower()
    assert _states(nodes) == ["up", "down", "up"]


def test_bootstrap_refuses_where_a_node_cannot_tell(redis_nodes, redlock):
    """A lock that only paused nodes remember is not given to somebody else."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    for node in nodes[:2]:
        _plant(node, "precious")
    nodes[0].restart()
    nodes[1].pause()
    try:
        code, _, err = redlock(nodes, "bootstrap", "--yes")
    finally:
        nodes[1].resume()
    assert (code, "could not say" in err) == (1, True)
    assert _states(nodes)[0] != "up"


def test_bootstrap_refuses_where_a_node_forbids_to_look(redis_nodes, redlock):
    """A user who may not go through the keys cannot know that there are no locks."""
    nodes = redis_nodes(1)
    with redis.Redis.from_url(nodes[0].url) as client:
        client.execute_command("ACL", "SETUSER", "blind", "on", ">x", "~*", "+@all", "-scan")
    blind = [nodes[0].url.replace("redis://", "redis://blind:x@")]
    code, _, err = redlock(blind, "bootstrap", "--yes")
    assert (code, "could not say" in err) == (1, True)
    code, _, err = redlock(blind, "ls")
    assert (code, "could not be read" in err, "down" in err) == (1, True, False)
    assert _states(nodes) == ["unmarked"]


@pytest.mark.parametrize(("answer", "code", "state"), [("n", 1, "unmarked"), ("y", 0, "up")])
def test_bootstrap_asks_a_person_first(redis_nodes, line, answer, code, state):
    nodes = redis_nodes(1)
    ended, _, err = line.answer(nodes, answer, "bootstrap")
    assert "[y/N]" in err
    assert ended == code
    assert _states(nodes) == [state]


# -- streams that are gone --------------------------------------------------------------


def _unread(line, nodes, *words, **options):
    """Run a command whose output nobody reads; return its exit code and stderr."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        process = line.start_redlock(nodes, *words, stdout=theirs, **options)
    finally:
        os.close(theirs)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_what_nobody_reads_is_done_all_the_same(redis_nodes, line):
    nodes = redis_nodes(3)
    assert _unread(line, nodes, "status") == (1, "")
    assert _unread(line, nodes, "doctor") == (1, "")
    assert _unread(line, nodes, "bootstrap", "--yes") == (0, "")
    assert _states(nodes) == ["up"] * 3
    for node in nodes:  # a lock of nobody, who might give it back before the command does
        _plant(node, "nightly")
    words = ("release", "nightly", "--token", "e" * 8, "--yes")
    assert _unread(line, nodes, *words) == (0, "")
    assert line.redlock(nodes, "ls")[1] == "No live locks.\n"
    assert _unread(line, nodes, *words) == (1, "")
    assert _unread(line, nodes, "ls", "--json") == (0, "")


@pytest.mark.parametrize("words", ["status", "ls --json", "bootstrap", "doctor"])
def test_closed_streams_are_borne(redis_nodes, line, words):
    """As of a job that was started without stdin and stdout: no traceback."""
    code = (
        "import os, sys\n"
        "os.close(0), os.close(1)\n"
        f"words = ['-m', 'celery', '-A', 'shop', 'redlock', *{words!r}.split()]\n"
        "os.execv(sys.executable, [sys.executable, *words])"
    )
    process = line.start(redis_nodes(1), "-c", code)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    assert process.returncode in (0, 1, 2)


# -- an app that cannot be loaded --------------------------------------------------------


@pytest.mark.parametrize("source", ["app.conf.imports = ['no_such']", "app.task(base=int)(print)"])
def test_an_app_that_cannot_be_loaded_is_a_clean_error(tmp_path, redis_nodes, redlock, source):
    (tmp_path / "broken.py").write_text(f"from shop import app\n{source}\n")
    nodes = redis_nodes(1)
    code, out, err = redlock(nodes, "why", "shop.nap", app="broken")
    assert (code, out) == (2, "")
    assert "could not be loaded" in err
    assert "Traceback" not in err
    code, out, err = redlock(nodes, "doctor", "--json", app="broken")
    assert (code, err) == (2, "")
    assert [finding["code"] for finding in json.loads(out)["findings"]] == ["app-import"]


# -- all of them -----------------------------------------------------------------------


def test_without_nodes_the_broker_is_the_one_that_is_shown(redlock, broker):
    code, out, err = redlock([], "status", env={"BROKER": broker.url})
    assert code == 1
    assert f"127.0.0.1:{broker.port}/0" in out
    assert "redlock_nodes" not in out + err


@pytest.mark.parametrize("state", ["up", "quarantined", "down"])
@pytest.mark.parametrize(
    "command", ["status", "doctor", "ls", "report", "tail --no-follow", "why shop.nap"]
)
def test_who_has_one_server_reads_of_that_server_alone(redis_nodes, redlock, command, state):
    """Whatever its state: of no setting that it left out, and of no other node."""
    (node,) = redis_nodes(1)
    if state != "quarantined":
        bootstrap([node.url], RULES)
    if state == "down":
        node.kill()
    code, out, err = redlock([], *command.split(), env={"BROKER": node.url})
    assert not re.search(r"redlock_nodes|other nodes|the others|three|1 are", out + err)
    if (state, command) == ("up", "doctor"):
        assert code == 0


def test_without_an_app_the_way_to_name_one_is_said(redlock):
    """Forgetting ``-A`` is the likeliest mistake."""
    code, _, err = redlock([], "status", app=None)
    assert code == 2
    assert "celery -A APP redlock" in err


def test_options_that_an_app_adds_to_every_command_do_no_harm(tmp_path, redis_nodes, redlock):
    (tmp_path / "preloading.py").write_text(
        "import click\nfrom shop import app\n"
        "app.user_options['preload'].add(click.Option(['-Z', '--zone'], default='here'))\n"
    )
    nodes = redis_nodes(1)
    code, out, _ = redlock(nodes, "bootstrap", "--yes", app="preloading")
    assert (code, out.count("may vote")) == (0, 1)
