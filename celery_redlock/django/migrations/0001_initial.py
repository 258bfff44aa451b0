"""Make the tables of a database that keeps the locks."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from celery_redlock.django.tables import MakeTables

__all__ = ["Migration"]


class Migration(migrations.Migration):  # type: ignore[misc]  # Django comes without types
    """The first version of the tables."""

    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar[list[MakeTables]] = [MakeTables()]
