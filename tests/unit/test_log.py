"""What reaches the log: a line per record, without control characters, whoever chose the words."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import celery_redlock
from celery_redlock import DuplicateTask, LockLost, LockTaken, QuorumUnavailable, events
from celery_redlock.observers.logging import log_event
from celery_redlock.process import log
from celery_redlock.process.log import LONGEST_LINE, get_logger

HOSTILE = "it\x1b[2J\r\n[2026-01-01 00:00:00,000: CRITICAL/MainProcess] forged\u2028\x9b\u202e"
EVENTS = [kind for kind in vars(events).values() if isinstance(kind, type)]
EVENTS = [kind for kind in EVENTS if issubclass(kind, events.Event) and kind is not events.Event]
HOLDER = {"task_id": HOSTILE, "host": HOSTILE, "pid": HOSTILE, "since": 1.0}
VALUES = {"str": HOSTILE, "float": 1.5, "int": 1, "int | None": 1}


def hostile(kind):
    known = {"holder": HOLDER, "votes": {"lock-1:6379/0": HOSTILE}}
    fields = dataclasses.fields(kind)
    return kind(**{it.name: known.get(it.name, VALUES.get(it.type)) for it in fields})


@pytest.fixture
def written():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("celery_redlock")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield stream.getvalue
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("cause", ["conflict", "unavailable"])
def test_every_event_is_one_line(written, kind, cause):
    """Ids, names and reasons come from messages and nodes, which anybody may write to."""
    event = hostile(kind)
    if hasattr(event, "cause"):
        event = dataclasses.replace(event, cause=cause)
    log_event(event)
    assert written().endswith("\n")
    assert written()[:-1].isprintable()


def test_the_words_of_every_module_are_one_line(written):
    """Not only those of the observer: what a node says is told when a worker starts, too."""
    get_logger("celery_redlock.plugin").warning("Lock node %s does not answer: %s", "n", HOSTILE)
    assert written()[:-1].isprintable()
    assert written().startswith("WARNING Lock node n does not answer: it?[2J??[2026")


def test_no_module_has_a_logger_of_another_kind():
    root = Path(celery_redlock.__file__).parent
    others = [path for path in root.rglob("*.py") if "logging.getLogger" in path.read_text()]
    assert others == [root / "process" / "log.py"]


def test_a_record_that_is_printable_stays_as_it_is(caplog):
    """Whoever groups records by their unformatted message still can."""
    with caplog.at_level(logging.INFO, "celery_redlock"):
        get_logger("celery_redlock.x").warning("Task %s comes, naïve or %d", "später", 7)
    (record,) = caplog.records
    assert (record.msg, record.args) == ("Task %s comes, naïve or %d", ("später", 7))


def test_a_long_message_is_cut(written):
    """A lock name may be as long as a message."""
    get_logger("celery_redlock.x").warning("Lock %r", "n" * 1_000_000)
    assert len(written()) < LONGEST_LINE + 100
    assert re.search("nnn~[0-9a-f]{32}\n$", written())


@pytest.mark.parametrize("letter", ["n", "ä", "漢", "\ud800"])
def test_what_is_cut_is_short_and_told_apart(letter):
    for length in (1, 40, 254, 255, 256, 5000):
        text = letter * length
        part = log.cut(text, 255)
        assert (part == text) is (len(text.encode(errors="surrogatepass")) <= 255)
        assert len(part.encode(errors="surrogatepass")) <= 255
        assert log.cut(text + "x", 255) != part


def test_a_traceback_cannot_be_continued_by_its_message(written):
    """The lines of an error's text are set in, so that none passes for a record of its own."""

    def ask():
        try:
            raise OSError(HOSTILE)  # noqa: TRY301
        except OSError as cause:
            raise ValueError(f"of a node: {HOSTILE}") from cause

    try:
        ask()
    except ValueError:
        get_logger("celery_redlock.x").exception("Looking at %s failed", "n")
    lines = written().split("\n")
    begins = {line.split(" ")[0] for line in lines if line[:1].strip()}
    assert begins == {"ERROR", "Traceback", "OSError:", "The", "ValueError:"}
    assert all(line.isprintable() for line in lines)
    assert "    [2026-01-01" in written()
    assert 'raise ValueError(f"of a node: {HOSTILE}") from cause' in written()


def test_a_usual_traceback_is_left_to_the_handlers(caplog):
    """Those that format it in their own way still do."""
    try:
        int("plain")
    except ValueError:
        get_logger("celery_redlock.x").exception("Looking at the nodes failed")
    (record,) = caplog.records
    assert record.exc_text in {None, logging.Formatter().formatException(record.exc_info)}


class Broken:
    def __str__(self):
        raise ValueError("no text")


def test_an_empty_text_is_left_alone(written):
    for said in ("", "\n", "\n\n\x00"):
        try:
            raise OSError(said)  # noqa: TRY301
        except OSError:
            get_logger("celery_redlock.x").exception("Looking failed")
    assert written().count("Traceback") == 3


def test_what_cannot_be_formatted_is_the_handlers_business(monkeypatch):
    """As with any logger: nothing is raised where it is logged."""
    monkeypatch.setattr(logging, "raiseExceptions", False)
    get_logger("celery_redlock.x").warning("%s", Broken())


@pytest.mark.parametrize(
    "error",
    [
        LockTaken("n", {"lock-1": HOSTILE}),
        QuorumUnavailable("n", {"lock-1": HOSTILE}),
        LockLost("n", "stolen", {"lock-1": HOSTILE}),
        DuplicateTask(HOSTILE, HOSTILE),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_text_of_our_errors_is_one_line(error):
    """Celery logs it with the traceback; the fields keep what was said."""
    assert str(error).isprintable()
    assert HOSTILE in repr(error.args) or repr(HOSTILE)[1:-1] in repr(error.args)


# --- forks -----------------------------------------------------------------------------------

#: Forks while a thread writes to the log, as a worker's parent does; each child writes a line, too.
FORKS = """
import logging, os, sys, threading, time

from celery_redlock.process import log

if sys.argv[2] == "off":
    log.locks_of_handlers = list
log.LONGEST_WRITE = 60.0  # no handler hangs here: a fork waits for one, however slow the machine
logging.getLogger().addHandler(logging.FileHandler(sys.argv[1]))
logger = log.get_logger("celery_redlock.test")

def write():
    while True:
        logger.warning("x" * 200)

threading.Thread(target=write, daemon=True).start()
for number in range(FORKS):
    child = os.fork()
    if child == 0:
        logger.warning("child")
        os._exit(0)
    ends = time.monotonic() + float(sys.argv[3])
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > ends:
            os.kill(child, 9)
            os._exit(3)
        time.sleep(0.001)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(("hooks", "patience", "status"), [("on", 60.0, 0), ("off", 5.0, 3)])
def test_a_child_can_write_to_a_log_that_a_thread_was_writing_to(tmp_path, hooks, patience, status):
    """As a lost child's lock is released, and told, while the pool forks. The twin: it hangs."""
    source = FORKS.replace("FORKS", "100" if hooks == "on" else "5000")
    command = [sys.executable, "-W", "ignore", "-c", source, str(tmp_path / "log"), hooks]
    assert subprocess.run([*command, str(patience)], check=False).returncode == status


def test_a_fork_waits_no_longer_than_a_while_for_a_handler_that_hangs(monkeypatch):
    monkeypatch.setattr(log, "LONGEST_WRITE", 0.1)
    free, hangs = threading.RLock(), threading.RLock()
    monkeypatch.setattr(log, "locks_of_handlers", lambda: [free, hangs])
    taken, go_on = threading.Event(), threading.Event()

    def hang():
        with hangs:
            taken.set()
            go_on.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    assert taken.wait(60)
    log._before_fork()
    assert log._forking.held == [[free]]
    log._after_fork()
    go_on.set()
    thread.join()
    assert log._forking.held == []
    assert not free._is_owned()
