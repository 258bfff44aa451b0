"""Observers are told everything and can harm nothing."""

from __future__ import annotations

import dataclasses
import inspect
import logging

import pytest

from celery_redlock import events
from celery_redlock.events import Event, LockAcquired, LockReleased, broadcast

EVERY_EVENT = [
    kind
    for _, kind in inspect.getmembers(events, inspect.isclass)
    if issubclass(kind, Event) and not kind.__subclasses__()
]
every_event = pytest.mark.parametrize("kind", EVERY_EVENT, ids=lambda kind: kind.__name__)


def test_every_observer_is_told_in_order():
    heard = []
    notify = broadcast([lambda e: heard.append(("one", e)), lambda e: heard.append(("two", e))])
    event = LockReleased("k", 1.5)
    notify(event)
    assert heard == [("one", event), ("two", event)]


def test_an_observer_that_fails_harms_nobody(caplog):
    def fails(event):
        raise ValueError("no disk")

    heard = []
    with caplog.at_level(logging.ERROR):
        broadcast([fails, heard.append])(LockAcquired("k", 7, 0.1))
    assert heard == [LockAcquired("k", 7, 0.1)]
    assert "LockAcquired" in caplog.text
    assert "no disk" in caplog.text


def test_observers_are_those_of_the_beginning():
    heard = []
    notify = broadcast(iter([heard.append]))
    notify(LockReleased("k", 1.0))
    notify(LockReleased("k", 2.0))
    assert len(heard) == 2


def test_without_observers_nothing_happens():
    broadcast(())(LockReleased("k", 1.0))


@every_event
def test_an_event_is_a_frozen_fact(kind):
    """No observer can change what the next one hears."""
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen


@every_event
def test_an_event_has_a_public_name(kind):
    assert kind.__name__ in events.__all__


@every_event
def test_an_event_carries_no_secret(kind):
    fields = {field.name for field in dataclasses.fields(kind)}
    assert not fields & {"token", "args", "kwargs", "arguments", "value", "lease", "url"}


@every_event
def test_an_event_says_what_its_fields_are(kind):
    documented = " ".join(inspect.getdoc(cls) or "" for cls in kind.__mro__)
    assert all(f"{field.name}:" in documented for field in dataclasses.fields(kind))
