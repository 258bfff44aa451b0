"""
A Django project in one file, run by test_fencing_django.py in a process of its own.

    python fencing_django.py CASE DATABASE

Django's settings can be made once in a process, so each case, a function below, has its own.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import django
import pytest
from django.conf import settings

CASE, DATABASE = sys.argv[1], json.loads(sys.argv[2])
settings.configure(DATABASES={"default": DATABASE}, USE_TZ=True)
django.setup()

from django.db import connection, models, transaction  # noqa: E402  models want settings

from celery_redlock.fencing import StaleFence  # noqa: E402
from celery_redlock.fencing.django import fenced_update, raise_fence  # noqa: E402
from support.waiting import eventually  # noqa: E402

OLD, NEW = 7_400_000_000_000_001, 7_400_000_000_000_002
# Not pg_stat_activity: within a transaction that shows what it showed first.
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


class Invoice(models.Model):
    id = models.IntegerField(primary_key=True)
    state = models.CharField(max_length=20, default="open")
    fence = models.BigIntegerField(null=True)

    class Meta:  # noqa: D106
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.id} {self.state}"


class Line(models.Model):
    invoice = models.ForeignKey(Invoice, models.CASCADE)
    state = models.CharField(max_length=20, default="open")
    fence = models.BigIntegerField(null=True)

    class Meta:  # noqa: D106
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk} {self.state}"


class Reminder(Invoice):
    level = models.IntegerField(default=1)

    class Meta:  # noqa: D106
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.pk} {self.level}"


class Guard(models.Model):
    lock = models.CharField(max_length=255, primary_key=True)
    highest = models.BigIntegerField()

    class Meta:  # noqa: D106
        app_label = "shop"

    def __str__(self) -> str:
        return f"{self.lock} {self.highest}"


def refused(*awaited: object, **values: object) -> StaleFence:
    with pytest.raises(StaleFence) as stale:
        fenced_update(*awaited, **values)
    return stale.value


def states() -> dict[int, tuple[str, int | None]]:
    return {row.id: (row.state, row.fence) for row in Invoice.objects.all()}


def in_order() -> None:
    Invoice.objects.create(id=7)
    Invoice.objects.create(id=8, fence=0)
    both = Invoice.objects.filter(id__in=(7, 8)).order_by("state")
    for fence in (OLD, OLD, NEW, NEW):
        assert fenced_update(both, fence, state="paid") == 2
    assert refused(both, OLD, state="open").args == ("shop_invoice", OLD, NEW)
    assert fenced_update(Invoice.objects.filter(id=404), OLD, state="paid") == 0
    assert states() == {7: ("paid", NEW), 8: ("paid", NEW)}


def all_or_none() -> None:
    for number, fence in enumerate((None, NEW, 1)):
        Invoice.objects.create(id=number, fence=fence)
    with transaction.atomic():
        refused(Invoice.objects.all(), OLD, state="paid")
    refused(Invoice.objects.all(), OLD, state="paid")
    assert {state for state, _ in states().values()} == {"open"}


def no_fence() -> None:
    Invoice.objects.create(id=7)
    with pytest.raises(ValueError, match="fence is None"):
        fenced_update(Invoice.objects.all(), None, state="paid")
    with pytest.raises(ValueError, match="fence is None"):
        raise_fence(Guard, None, lock="a")
    assert states() == {7: ("open", None)}


def guard() -> None:
    for lock, fence in (("a", OLD), ("a", OLD), ("a", NEW), ("b", OLD)):
        with transaction.atomic():
            raise_fence(Guard, fence, "highest", lock=lock)
    with pytest.raises(StaleFence) as stale, transaction.atomic():
        Invoice.objects.create(id=1)
        raise_fence(Guard.objects.all(), OLD, "highest", lock="a")
    assert stale.value.args == ("a", OLD, NEW)
    assert states() == {}
    assert dict(Guard.objects.values_list("lock", "highest")) == {"a": NEW, "b": OLD}


def guard_misused() -> None:
    """Outside of a transaction it would protect nothing; without a name, which row?"""
    with pytest.raises(transaction.TransactionManagementError, match="atomic"):
        raise_fence(Guard, NEW, "highest", lock="a")
    with pytest.raises(ValueError, match="which row"):
        raise_fence(Guard, NEW, "highest")
    assert not Guard.objects.exists()


def in_thread(call: object) -> object:
    try:
        return call()
    finally:
        connection.close()


def wait_until_somebody_waits() -> None:
    def waits() -> int:
        with connection.cursor() as cursor:
            cursor.execute(WAITING)
            return cursor.fetchone()[0]

    eventually(waits, "connection that waits")


def race(write: object, row: object = None) -> object:
    if row is None:
        Invoice.objects.create(id=7, fence=OLD)
        row = Invoice.objects.filter(id=7)
    written = threading.Event()

    def come_late() -> object:
        written.wait(60)
        return write(row, OLD, state="open")

    with ThreadPoolExecutor(1) as thread:
        late = thread.submit(in_thread, come_late)
        with transaction.atomic():
            write(row, NEW, state="paid")
            written.set()
            wait_until_somebody_waits()
        return late.exception(60) or late.result()


def waited() -> None:
    assert race(fenced_update).args == ("shop_invoice", OLD, NEW)
    assert states() == {7: ("paid", NEW)}


def waited_by_way_of_another_table() -> None:
    """The UPDATE of Django then finds its rows in a query of its own, before it waits."""
    invoice = Invoice.objects.create(id=7)
    Line.objects.create(id=1, invoice=invoice, fence=OLD)
    error = race(fenced_update, Line.objects.filter(invoice__state="open"))
    assert error.args == ("shop_line", OLD, NEW)
    assert list(Line.objects.values_list("state", "fence")) == [("paid", NEW)]


def waited_inherited() -> None:
    """The fence stands in the parent's table, which is updated by keys that were read before."""
    Reminder.objects.create(id=7, fence=OLD)
    error = race(fenced_update, Reminder.objects.filter(level=1))
    assert error.args == ("shop_reminder", OLD, NEW)
    assert states() == {7: ("paid", NEW)}


def waited_unfenced() -> None:
    """The twin: the newer one's write is lost."""
    assert race(lambda rows, _fence, **values: rows.update(**values)) == 1
    assert states() == {7: ("open", OLD)}


def guard_made_twice() -> None:
    for lock, first, second in (("a", OLD, NEW), ("b", NEW, OLD)):

        def come(lock: str = lock, fence: int = second) -> None:
            with transaction.atomic():
                raise_fence(Guard, fence, "highest", lock=lock)
                Invoice.objects.create(id=fence % 10)

        with ThreadPoolExecutor(1) as thread:
            with transaction.atomic():
                raise_fence(Guard, first, "highest", lock=lock)
                late = thread.submit(in_thread, come)
                wait_until_somebody_waits()
            error = late.exception(60)
        assert (error is None) == (second > first), error
        assert error is None or error.args == (lock, OLD, NEW)
        assert Guard.objects.get(lock=lock).highest == NEW
    assert set(states()) == {NEW % 10}


if __name__ == "__main__":
    with connection.schema_editor() as editor:
        for model in (Invoice, Line, Reminder):
            editor.create_model(model)
        editor.create_model(Guard)
    globals()[CASE]()
    connection.close()
