"""`ls --watch` and `status --watch`, on a terminal that they leave as it was."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time

import pytest
import redis

from celery_redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.command_line import on_all, urls
from support.stored import clients_of

termios = pytest.importorskip("termios")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no terminals like ours")

#: Nobody renews the locks of these tests.
LASTS = 900.0
RULES = Rules(ttl=LASTS, max_ttl=LASTS)
SHOP = """
    import os
    from celery import Celery

    app = Celery("shop", broker="memory://")
    app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_max_ttl = 900
    app.conf.redlock_node_timeout = 1.0
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HOME = "\x1b[H"


class Terminal:
    def __init__(self, line, nodes, *words, **env):
        self._ours, self.theirs = os.openpty()
        self.before = termios.tcgetattr(self.theirs)
        self.written = ""
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        env = {"COLUMNS": "150", "LINES": "30", **env}
        self.process = line.start_redlock(nodes, *words, **ends, env=env, text=False)

    @property
    def drawings(self):
        """All that was drawn, one after the other, without escape sequences; the last is whole."""
        return [ESCAPE.sub("", part) for part in self.written.split(HOME)[1:]]

    def read_until(self, is_there):
        """Read on until a drawing from now on is as it should be; return it."""
        begun = len(self.drawings)
        deadline = time.monotonic() + 60
        while not (found := [it for it in self.drawings[begun:] if is_there(it)]):
            assert time.monotonic() < deadline, self.written
            self._read(0.2)
        return found[0]

    def _read(self, seconds):
        if select.select([self._ours], [], [], seconds)[0]:
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")

    def end(self, number=0):
        if number:
            self.process.send_signal(number)
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        self._read(0.1)
        return self.process.wait(1)  # short: it has ended

    @property
    def is_as_before(self):
        pairs = (("?1049h", "?1049l"), ("?25l", "?25h"))
        shown = [[self.written.count(f"\x1b[{code}") for code in pair] for pair in pairs]
        return shown == [[1, 1], [1, 1]] and termios.tcgetattr(self.theirs) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def nodes(redis_nodes):
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    Redlock.from_urls(urls(nodes), ttl=LASTS, max_ttl=LASTS, node_timeout=1.0).acquire("invoice:7")
    on_all(nodes, "invoice:7")
    return nodes


@pytest.fixture
def terminal(line, nodes):
    started = []

    def start(*words, **env):
        started.append(Terminal(line, nodes, *words, **env))
        return started[-1]

    yield start
    for one in started:
        one.close()


def words_of(table):
    """Return the words of each line of a table, but for what changes by itself, and its end."""
    lines = [re.sub(r"[0-9.]+ (ms|min|s)\b", "", line).split() for line in table.splitlines()]
    return [line for line in lines if line and "Ctrl-C" not in line]


@pytest.mark.parametrize("command", ["ls", "status"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_printed_once_is_drawn_again_until_ctrl_c(line, nodes, terminal, command, number):
    it = terminal(command, "--watch")
    for _ in range(3):
        drawn = it.read_until(lambda drawing: "Ctrl-C ends it." in drawing)
    assert words_of(drawn) == words_of(line.redlock(nodes, command)[1])
    assert it.end(number) == 0
    assert it.is_as_before
    assert "Traceback" not in it.written


def test_what_changes_meanwhile_is_drawn(nodes, terminal):
    locks, status = terminal("ls", "invoice", "--watch"), terminal("status", "--watch")
    locks.read_until(lambda drawing: "invoice:7" in drawing and "invoice:8" not in drawing)
    status.read_until(lambda drawing: drawing.count(" up ") == 3)
    for client in clients_of(nodes):
        client.set("redlock:lock:invoice:8", "e" * 40, px=600_000)
    locks.read_until(lambda drawing: "invoice:7" in drawing and "invoice:8" in drawing)
    nodes[0].kill()
    status.read_until(lambda drawing: " down " in drawing and "Quorum: yes, without" in drawing)
    locks.read_until(lambda drawing: "could not be read" in drawing and "invoice:8" in drawing)
    nodes[1].kill()
    status.read_until(lambda drawing: "Quorum: NO." in drawing)
    for it in (locks, status):
        assert it.end(signal.SIGINT) == 0
        assert it.is_as_before


def test_a_low_terminal_has_the_first_lines_and_says_of_how_many(nodes, terminal):
    """What is beneath the table is not pushed out of the screen."""
    with redis.Redis.from_url(nodes[0].url) as client:
        for number in range(100, 140):
            client.set(f"redlock:lock:many:{number}", "e" * 40, px=600_000)
    it = terminal("ls", "many", "--watch", LINES="10")
    drawn = it.read_until(lambda drawing: "Ctrl-C ends it." in drawing)
    assert "many:100" in drawn
    assert "many:139" not in drawn
    assert re.search(r"\.\.\. \d+ more lines", drawn)


@pytest.mark.parametrize(("no_colour", "is_coloured"), [("", True), ("1", False)])
def test_colours_are_those_of_the_table(terminal, no_colour, is_coloured):
    it = terminal("status", "--watch", NO_COLOR=no_colour, TERM="xterm-256color")
    it.read_until(lambda drawing: drawing.count(" up ") == 3)
    assert bool(COLOUR.search(it.written)) is is_coloured


@pytest.mark.parametrize("command", ["ls", "status"])
def test_what_cannot_be_watched_is_refused(line, nodes, terminal, command):
    code, out, err = line.redlock(nodes, command, "--watch", "--json")
    assert (code, out) == (2, "")
    assert "--watch draws for people; --json prints once" in err
    code, out, err = line.redlock(nodes, command, "--watch")
    assert (code, out) == (2, "")
    assert "--watch needs a terminal" in err
    dumb = terminal(command, "--watch", TERM="dumb")
    assert dumb.end() == 2
    (line.folder / "rich.py").write_text("raise ImportError('not installed')")
    without = terminal(command, "--watch")
    assert without.end() == 2
    assert "pip install 'celery-redlock[cli]'" in without.written
    assert line.redlock(nodes, command)[0] == 0
