"""What is to leave the process: never waited for, kept while it cannot, sent by one thread."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings

import pytest

from celery_redlock.observers import outbox as module
from celery_redlock.observers.outbox import BATCH, Outbox
from support.waiting import eventually


class Receiver:
    def __init__(self):
        self.batches = []
        self.is_away = False
        self.tries = self.hung_up = 0
        self.gate = threading.Event()
        self.gate.set()

    def send(self, batch):
        self.tries += 1
        self.gate.wait()
        if self.is_away:
            raise ConnectionError("redis://:secret@away")
        self.batches.append(list(batch))

    def hang_up(self):
        self.hung_up += 1

    @property
    def got(self):
        return [thing for batch in self.batches for thing in batch]


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(module, "GATHER", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.02)
    receiver = Receiver()
    yield receiver
    receiver.is_away = False
    receiver.gate.set()
    for box in [one for one in module._every_outbox if one._send == receiver.send]:
        box.close()  # what it says at the end is not the next test's
        if box._thread is not None:
            box._thread.join(60)


@pytest.fixture
def box(receiver):
    return Outbox("letters", receiver.send, receiver.hang_up, most=10)


def test_what_is_put_in_is_sent_in_order_and_together(receiver):
    box = Outbox("letters", receiver.send, receiver.hang_up)
    receiver.gate.clear()
    for number in range(3 * BATCH):
        box.put(number)
    receiver.gate.set()
    box.flush(60)
    assert receiver.got == list(range(3 * BATCH))
    assert max(map(len, receiver.batches)) <= BATCH
    assert len(receiver.batches) <= 5


def test_without_a_flush_it_is_sent_soon(receiver, box):
    box.put("one")
    eventually(lambda: receiver.got == ["one"], "the first letter")
    box.put("two")
    eventually(lambda: receiver.got == ["one", "two"], "the second letter")


def test_putting_never_waits_for_the_receiver(receiver, box, caplog):
    """One that hangs costs nothing but the oldest things; how many is known when it is over."""
    receiver.gate.clear()
    box.put(0)
    eventually(lambda: receiver.tries, "a try")
    for number in range(1, 1000):
        box.put(number)
    with caplog.at_level(logging.WARNING):
        receiver.gate.set()
        box.flush(60)
        box.flush(60)
    assert receiver.got == [0, *range(990, 1000)]
    told = [record.getMessage() for record in caplog.records]
    assert told == ["989 letters were dropped, the oldest first"]


def test_an_outage_is_said_once_and_loses_nothing_that_fits(receiver, box, caplog):
    """It is tried again and again, with two lines in the log; neither has an address in it."""
    caplog.set_level(logging.INFO, module.__name__)
    receiver.is_away = True
    for number in range(5):
        box.put(number)
    eventually(lambda: receiver.tries >= 5, "some tries")
    assert receiver.hung_up >= receiver.tries - 1
    receiver.is_away = False
    eventually(lambda: receiver.got == list(range(5)), "all letters")
    eventually(lambda: len(caplog.records) == 2, "two lines")
    begin, end = [record.getMessage() for record in caplog.records]
    assert begin == "letters cannot be sent (ConnectionError); the newest 10 are kept meanwhile"
    assert end.startswith("letters are sent again, after ")


def test_the_end_of_a_process_waits_no_longer_than_it_may(receiver, box, caplog):
    """
    Neither for a receiver that refuses, nor for one that hangs; what is left is counted.

    It may wait for longer than a test may take, but where that is what is tested.
    """
    caplog.set_level(logging.WARNING, module.__name__)
    receiver.is_away = True
    box.put("refused")
    box.flush(3600)
    assert "1 letters were dropped" in caplog.text
    receiver.gate.clear()
    box.put("stuck")
    began = time.monotonic()
    box.flush(0.1)
    assert time.monotonic() - began > 0.09
    box.flush(3600)  # there is nothing left to wait for


def test_a_flush_hangs_up(receiver, box, monkeypatch):
    monkeypatch.setattr(module, "GATHER", 60.0)  # it is sent by the flush, and not before
    box.put("last")
    box.flush(60)
    assert receiver.got == ["last"]
    assert receiver.hung_up == 1


def test_an_idle_line_is_hung_up_and_taken_up_again(receiver, box, monkeypatch):
    monkeypatch.setattr(module, "IDLE", 0.05)
    box.put("one")
    eventually(lambda: receiver.hung_up == 1, "a hang-up")
    box.put("two")
    eventually(lambda: receiver.got == ["one", "two"], "the second letter")


def test_a_closed_outbox_sends_what_is_left_and_has_no_thread(receiver, box):
    """Observers are replaced when settings change; their threads must not pile up."""
    box.put("one")
    eventually(lambda: receiver.got == ["one"], "the letter")
    box.put("last")
    box.close()
    eventually(lambda: not box._thread.is_alive(), "the end of the thread")
    assert receiver.got == ["one", "last"]


def test_one_thread_sends_for_all(receiver, box):
    before = set(threading.enumerate())
    putters = [threading.Thread(target=box.put, args=(n,)) for n in range(8)]
    for putter in putters:
        putter.start()
    for putter in putters:
        putter.join()
    eventually(lambda: sorted(receiver.got) == list(range(8)), "all letters")
    assert set(threading.enumerate()) - before == {box._thread}


def test_without_a_thread_nothing_is_raised_and_the_next_thing_tries_again(
    receiver, box, monkeypatch
):
    """A process that is out of threads still has its locks."""

    def fail(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        box.put("one")
        box.flush(0.01)
        box.put("two")
    box.put("three")
    eventually(lambda: receiver.got == ["two", "three"], "what came after")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_begins_with_nothing_and_with_a_thread_of_its_own(receiver, box):
    """What the parent has not sent, the parent sends; the child's things are the child's."""
    receiver.gate.clear()
    box.put("the parent's")
    box.put("the parent's, too")
    eventually(lambda: receiver.tries, "a try")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork with threads about is what is tried
        child = os.fork()
    if child == 0:
        receiver.gate = threading.Event()
        receiver.gate.set()
        box.put("the child's")
        box.flush(60)
        os._exit(0 if receiver.got == ["the child's"] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    receiver.gate.set()
    box.flush(60)
    assert receiver.got == ["the parent's", "the parent's, too"]
