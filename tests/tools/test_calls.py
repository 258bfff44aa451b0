"""How many Python calls a lock adds to a task: a count that hardly depends on the machine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from benchmarks.calls import LIMITS, added, contestants  # noqa: E402

#: How often it is counted: on a busy machine answers come one by one, which takes more calls, so
#: that the shortest path counts.
LOOKS = 8


def test_a_lock_adds_no_more_calls_than_it_may(five_nodes):
    """Whoever makes the path longer says so here; a path that is not counted is no short one."""
    urls = [node.url for node in five_nodes]
    found: dict[str, list[Counter[str]]] = {name: [] for name in LIMITS}
    for _ in range(LOOKS):
        for name, parts in added(contestants(urls), 200).items():
            found[name].append(parts)
        fewest = {name: min(looks, key=Counter.total) for name, looks in found.items()}
        if all(fewest[name].total() <= limit for name, limit in LIMITS.items()):
            break
    for name, limit in LIMITS.items():
        parts = fewest[name]
        assert parts.total() <= limit, (name, parts.most_common())
        assert all(parts[part] > 10 for part in ("bytes", "votes and leases", "nodes")), name
