"""
Patience with nodes for every Python that a page starts, which has this folder on its path.

Pages use the default of `redlock_node_timeout`, which is right for servers that have a machine to
themselves. Those of the tests share one with all that runs there, and a late node would be taken
for one that is down.
"""

from __future__ import annotations

import os
import re
from typing import Any

from celery_redlock.lock.rules import Rules

__all__ = ["DEFAULTS", "PATIENCE", "patient_with"]

#: The defaults of the lock itself, by name.
DEFAULTS: dict[str, Any] = vars(Rules)["__init__"].__kwdefaults__
#: The variable that says how patient a Python is [s].
PATIENCE = "REDLOCK_TEST_PATIENCE"
#: Instead of 0.05 [s]: without a word, and at most.
SHORT, LONG = 0.45, 5.0
#: How long a node may take at most, as a part of a lease; the rules want less than half.
PART = 0.45
LEASE = re.compile(r"ttl\W+(\d+(?:\.\d+)?)", re.IGNORECASE)


def patient_with(text: str) -> dict[str, Any]:
    """Return the defaults for *text*: as patient as the leases that it names let one be."""
    leases = [float(lease) for lease in LEASE.findall(text)]
    longest = PART * min((lease for lease in leases if lease), default=LONG / PART)
    return {"node_timeout": max(SHORT, min(LONG, longest))}


if __name__ == "sitecustomize":
    DEFAULTS["node_timeout"] = float(os.environ.get(PATIENCE, SHORT))
