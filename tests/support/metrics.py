"""What a worker exports, read over HTTP as Prometheus would."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery import signals

from celery_redlock.observers.names import FILES
from celery_redlock.testing.ports import reserved
from support.pages import blocks_of

__all__ = ["Scrape", "kept_port", "scrape", "serve_as_shown"]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "metrics.md"
#: What the page's block has left, whose functions signals know by weak references.
_shown: dict[str, Any] = {}


class Scrape:
    def __init__(self, text: str) -> None:
        # Not above: a worker imports its tests, and what is imported first decides how it counts.
        from prometheus_client.parser import text_string_to_metric_families

        self.text = text
        self.samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("redlock_")
        ]

    def all(self, name: str, **labels: str) -> list[float]:
        """Return the values of *name* whose labels include *labels*."""
        return [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.all(name, **labels))

    def one(self, name: str, **labels: str) -> float | None:
        """Return the only one of `all`, None if there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else None


def serve_as_shown(port: str) -> None:
    if FILES not in os.environ:

        def serve(**_: object) -> None:
            from prometheus_client import start_http_server

            start_http_server(int(port), "127.0.0.1")

        signals.worker_ready.connect(serve, weak=False)
        return
    shown = next(it for it in blocks_of(PAGE) if it.notes.get("file") == "shop_metrics.py")
    exec(shown.text.replace("9808", port), _shown)


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """Yield a port for a server that starts seconds later; no other test gets it meanwhile."""
    with reserved() as place:
        port: int = place.getsockname()[1]
        if sys.platform != "linux":  # elsewhere nobody may be bound to a port that is served
            place.close()
        yield port


def scrape(address: str) -> Scrape:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return Scrape(answer.read().decode())
