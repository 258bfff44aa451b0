"""
Patience with nodes for every Python that a page starts, which has this folder on its path.

Pages use the default of `redlock_node_timeout`, which is right for servers that have a machine to
themselves. Those of the tests share one with all that runs there, and a late node would be taken
for one that is down.
"""

from __future__ import annotations

from typing import Any

from celery_redlock.lock.rules import Rules

__all__ = ["DEFAULTS", "PATIENT"]

#: The defaults of the lock itself, by name.
DEFAULTS: dict[str, Any] = vars(Rules)["__init__"].__kwdefaults__
#: Instead of 0.05 [s]; less than half of the shortest lease in a page.
PATIENT = {"node_timeout": 0.45}

if __name__ == "sitecustomize":
    DEFAULTS.update(PATIENT)
