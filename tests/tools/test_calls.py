"""How many Python calls a lock adds to a task: a count that hardly depends on the machine."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from benchmarks.calls import LIMITS, added, contestants  # noqa: E402


def test_a_lock_adds_no_more_calls_than_it_may(five_nodes):
    """Whoever makes the path longer says so here; a path that is not counted is no short one."""
    urls = [node.url for node in five_nodes]
    # On a busy machine answers come one by one, which takes more calls: the shortest path counts.
    looks = [added(contestants(urls), 200) for _ in range(3)]
    for name, limit in LIMITS.items():
        parts = min((found[name] for found in looks), key=lambda parts: sum(parts.values()))
        assert sum(parts.values()) <= limit, (name, parts.most_common())
        assert all(parts[part] > 10 for part in ("bytes", "votes and leases", "nodes")), name
