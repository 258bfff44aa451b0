"""``redlock top``: live in a terminal that it leaves as it was, one snapshot elsewhere."""

from __future__ import annotations

import json
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
from celery_redlock.reading.journal import Journal
from celery_redlock.reading.nodes import bootstrap
from support.command_line import urls
from support.waiting import eventually

termios = pytest.importorskip("termios")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no terminals like ours")

#: Nobody renews the locks of these tests.
LASTS = 900.0
RULES = Rules(ttl=LASTS, max_ttl=LASTS)
SHOP = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker="memory://")
    app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_max_ttl = 900
    app.conf.redlock_node_timeout = 1.0

    @app.task(base=RedlockTask, lock_key="invoice:{n}")
    def bill(n):
        pass
"""


class Terminal:
    """A terminal with ``redlock top`` in it."""

    def __init__(self, line, nodes, columns=150):
        self._ours, self.theirs = os.openpty()
        self.before = termios.tcgetattr(self.theirs)
        self.written = ""
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        size = {"COLUMNS": str(columns), "LINES": "30"}
        self.process = line.start_redlock(nodes, "top", **ends, env=size, text=False)

    def press(self, keys):
        """Press *keys*."""
        os.write(self._ours, keys.encode())

    def read_until(self, sign):
        """Read what comes up to *sign*, which is to be on a screen that is drawn from now on."""
        begun = len(self.written)
        deadline = time.monotonic() + 60
        while sign not in self.screen(begun):
            assert time.monotonic() < deadline, f"no {sign!r} in {self.screen(begun)}"
            self._read(0.2)

    def _read(self, seconds):
        if select.select([self._ours], [], [], seconds)[0]:
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")

    def screen(self, begun):
        """Return what was written since without its escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written[begun:])

    def end(self):
        """Wait until it has ended; return the exit code."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        self._read(0.1)
        return self.process.wait(1)  # short: it has ended

    @property
    def is_as_before(self):
        """Whether screen, cursor and settings are as they were."""
        pairs = (("?1049h", "?1049l"), ("?25l", "?25h"))
        shown = [[self.written.count(f"\x1b[{code}") for code in pair] for pair in pairs]
        return shown == [[1, 1], [1, 1]] and termios.tcgetattr(self.theirs) == self.before

    def close(self):
        """Let go of it."""
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def nodes(redis_nodes):
    """Nodes on which two invoices are billed; another one's try was refused a moment ago."""
    nodes = redis_nodes(3)
    bootstrap(urls(nodes), RULES)
    locks = Redlock.from_urls(urls(nodes), ttl=LASTS, max_ttl=LASTS, node_timeout=1.0)
    locks.acquire("invoice:7")
    locks.acquire("invoice:8")
    # By a clock that is ahead of ours, so that it stays within the last minute.
    who = {"task": "shop.bill", "task_id": "t-1", "name": "invoice:8", "holder": {}}
    record = {"event": "TaskSkipped", "at": time.time() + 240, "cause": "conflict", **who}
    Journal.on(locks).put(record)
    keys = ("redlock:journal", "redlock:lock:invoice:7", "redlock:lock:invoice:8")
    for node in nodes:  # nobody waits for all of them
        with redis.Redis.from_url(node.url) as client:
            eventually(lambda client=client: client.exists(*keys) == 3, "all on each node")
    return nodes


@pytest.fixture
def terminal(line, nodes, request):
    """A terminal in which all has been read once."""
    it = Terminal(line, nodes, *getattr(request, "param", []))
    for _ in range(2):  # when it comes again, all that is drawn after it has come, too
        it.read_until("Refused in the last minute: 1")
    yield it
    it.process.kill()
    it.process.wait()
    it.close()


def test_keys_sort_filter_and_open_why(terminal):
    """The busiest comes first; what is chosen is explained, and `q` leaves no trace."""
    screen = terminal.screen(0)
    assert screen.index("invoice:8") < screen.index("invoice:7")
    terminal.press("n")
    terminal.read_until("by name")
    terminal.press("/8\r")
    terminal.read_until("filter: 8")
    terminal.press("\r")
    terminal.read_until("Lock 'invoice:8': held.")
    terminal.press("x")
    terminal.read_until("1 names")
    terminal.press("\x1b")
    terminal.read_until("2 names")
    terminal.press("q")
    assert terminal.end() == 0
    assert terminal.is_as_before


@pytest.mark.parametrize("terminal", [[40], [80]], indirect=True)
def test_a_narrow_terminal_has_all_keys(terminal):
    """Their line is wrapped, and so is what `why` says; nothing is pushed out of the screen."""
    assert "n name" in terminal.screen(0)
    assert "invoice:8" in terminal.screen(0)
    terminal.press("\r")
    terminal.read_until("Any key goes back.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_terminal_as_it_was(terminal, number):
    """So does Ctrl-C."""
    terminal.process.send_signal(number)
    assert terminal.end() == 0
    assert terminal.is_as_before


def test_without_a_terminal_it_is_one_snapshot(line, nodes):
    """As text, or as JSON; without a quorum the exit code says so."""
    code, out, err = line.redlock(nodes, "top")
    assert (code, err) == (0, "")
    assert "Quorum: yes." in out
    assert re.search(r"^invoice:8 +1 .*\ninvoice:7 ", out, re.MULTILINE)
    assert "Skipped task shop.bill[t-1]" in out
    told = json.loads(line.redlock(nodes, "top", "--json")[1])
    counts = {it["name"]: it["refused"] for it in told["names"]}
    assert list(counts.items()) == [("invoice:8", 1), ("invoice:7", 0)]
    assert told["names"][0]["lock"]["held"]
    nodes[0].kill()
    nodes[1].kill()
    code, out, _ = line.redlock(nodes, "top")
    assert code == 1
    assert "Quorum: NO." in out
    assert "These are not all." in out
