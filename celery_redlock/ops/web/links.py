"""Sentences in which the tasks, ids and locks of a record lead to their pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flask import url_for
from markupsafe import Markup, escape

from celery_redlock.log import printable
from celery_redlock.ops.web.format import text, visible

__all__ = ["linked"]

#: A sentence is no longer than that [characters].
LONGEST = 600


def linked(sentence: str, record: Mapping[str, Any]) -> Markup:
    """Return *sentence*, made of *record*, with links where it names what has a page."""
    told = text(sentence, LONGEST)
    pages = pages_of(record)
    # Longest first: the name of a task begins the name of its lock.
    names = "|".join(map(re.escape, sorted(pages, key=len, reverse=True)))
    if not names:
        return escape(told)
    parts = (
        Markup('<a href="{}">{}</a>').format(pages[part], part) if part in pages else part
        for part in re.split(rf"(?<![\w.:-])({names})(?![\w-])", told)
    )
    return Markup("").join(parts)


def pages_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what of *record* has a page, as it stands in a sentence, and the page's address."""
    told = record.get("holder")
    found: dict[str, str] = {}
    for it in (record, told if isinstance(told, dict) else {}):
        for ident in filter(is_name, (it.get("task_id"), it.get("holder_id"))):
            found[visible(printable(ident))] = url_for("page", q=ident)
        if is_name(task := it.get("task")):
            found[visible(printable(task))] = url_for("task", name=task)
    if "task" in record and is_name(name := record.get("name")):  # else it is a beat's
        found[visible(repr(name)[1:-1])] = url_for("lock", name=name)
    return found


def is_name(value: Any) -> bool:
    """Return whether *value* can be looked for."""
    return isinstance(value, str) and bool(value.strip())
