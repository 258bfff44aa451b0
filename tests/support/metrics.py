"""What a worker exports, read over HTTP as Prometheus would."""

from __future__ import annotations

import urllib.request

from support.worker import CeleryProcess

__all__ = ["Scrape", "address_of", "scrape"]


class Scrape:
    """One answer: its samples by name and labels."""

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
        """Return the sum of `all`; 0 if there is none."""
        return sum(self.all(name, **labels))

    def one(self, name: str, **labels: str) -> float | None:
        """Return the only one of `all`, None if there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, (name, labels, found)
        return found[0] if found else None


def address_of(worker: CeleryProcess) -> str:
    """Return where *worker* says that its metrics are, once it does."""
    return worker.wait_for_log(r"Metrics at (\S+)")[1]


def scrape(address: str) -> Scrape:
    """Ask once; raises OSError."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        return Scrape(answer.read().decode())
