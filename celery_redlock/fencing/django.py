"""
Fenced writes with Django: only the newest holder of a lock may write.

Where a row has a field for the fence, `fenced_update` compares and raises it in the UPDATE
itself. Where one lock protects many rows, or rows that are yet to be inserted, a guard row per
lock does it (`raise_fence`), with a model of your own:

    class Guard(models.Model):
        lock = models.CharField(max_length=255, primary_key=True)
        fence = models.BigIntegerField()
"""

from __future__ import annotations

from typing import Any

from django.db import IntegrityError, connections, transaction
from django.db.models import Model, Q, QuerySet

from celery_redlock.errors import StaleFence
from celery_redlock.fencing.number import checked

__all__ = ["fenced_update", "raise_fence"]


def fenced_update(
    queryset: QuerySet[Any], fence: int | None, field: str = "fence", **values: Any
) -> int:
    """
    Update the rows of a query set, unless one of them was written by a later holder.

    Works in a transaction of its own, or within the caller's: all rows or none. The rows' fence
    becomes *fence*. A row without one (NULL) was written by nobody yet. A row that the query set
    does not find (any more) is neither changed nor an error, so let it name the row, not a
    state that another writer may change.

    Args:
        queryset: The rows; not sliced, distinct, grouped or found by a nullable relation.
        fence: The holder's number.
        field: Name of the model's field for the fence; a BigIntegerField that nobody else
            writes to.
        **values: New values of other fields, as of ``QuerySet.update``.

    Returns:
        How many rows were written.

    Raises:
        StaleFence: A later holder has written to at least one of the rows; none is changed.
        ValueError: *fence* is None, negative or too large.
        TypeError: *fence* is not an ``int``.
    """
    number = checked(fence)
    model, rows = queryset.model, queryset.order_by().select_for_update()
    with transaction.atomic(using=rows.db):
        if connections[rows.db].features.has_select_for_update:
            # Locked, and so as committed, before they are compared: where several tables are
            # concerned, Django's UPDATE compares first and waits then.
            keys = list(rows.values_list("pk", flat=True))
            rows = model._base_manager.using(rows.db).filter(pk__in=keys)  # noqa: SLF001
        else:  # SQLite: an UPDATE waits until nobody else writes
            rows = queryset.order_by()
        nobody, earlier = Q(**{f"{field}__isnull": True}), Q(**{f"{field}__lte": number})
        written: int = rows.filter(nobody | earlier).update(**{field: number}, **values)
        newer = rows.filter(**{f"{field}__gt": number}).values_list(field, flat=True)
        refusing = max(newer.select_for_update(), default=None)
        if refusing is not None:
            raise StaleFence(model._meta.db_table, number, refusing)  # noqa: SLF001  documented so
    return written


def raise_fence(
    guards: type[Model] | QuerySet[Any], fence: int | None, field: str = "fence", **lock: Any
) -> None:
    """
    Raise the guard row of a lock; what the same transaction writes afterwards is fenced.

    The row stays locked until the transaction ends, so that holders of one lock write one
    after the other. Call it before the first write. If what is written depends on what was read,
    call it before that is read, in a transaction of its own if need be: what the newest holder
    has seen, no earlier one changes any more.

    Args:
        guards: Model of the guard rows, or a query set of all of them.
        fence: The holder's number.
        field: Name of the model's field for the fence.
        **lock: Which row: a unique field of the model and its value, ``lock=held.name``.

    Raises:
        StaleFence: A later holder has written under this lock.
        TransactionManagementError: It was not called within ``transaction.atomic()``.
        ValueError: *fence* is None, negative or too large, or *lock* is missing.
        TypeError: *fence* is not an ``int``.
    """
    number = checked(fence)
    if not lock:
        raise ValueError('say which row is to be raised, as in raise_fence(Guard, fence, lock="x")')
    manager = guards if isinstance(guards, QuerySet) else guards._default_manager  # noqa: SLF001
    row = manager.filter(**lock)
    database = row.select_for_update().db
    if not transaction.get_connection(database).in_atomic_block:
        raise transaction.TransactionManagementError(
            "raise_fence protects what the same transaction writes: call it in transaction.atomic()"
        )
    try:
        if fenced_update(row, number, field):
            return
        try:
            with transaction.atomic(using=database):
                manager.create(**lock, **{field: number})
        except IntegrityError:
            # Somebody else made the row meanwhile. If it is not seen even so, this transaction
            # looks at an older state of the database, and has to begin again.
            if not fenced_update(row, number, field):
                raise
    except StaleFence as stale:
        name = ", ".join(map(str, lock.values()))
        raise StaleFence(name, stale.fence, stale.newest) from None
