"""The proxy process of `support.proxy`, which can also hold back requests and let replies pass."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import proxy_process


class OneWay(proxy_process.Link):
    def wait(self, *, upward: bool) -> float:
        """Return how long a segment is under way [s]; infinite where it does not arrive."""
        if self.mode == "lose_requests":
            return math.inf if upward else 0.0
        return super().wait(upward=upward)


if __name__ == "__main__":
    proxy_process.Link = OneWay  # type: ignore[misc]
    proxy_process.serve()
