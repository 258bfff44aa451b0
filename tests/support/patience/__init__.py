"""On Python's path, this folder makes it patient with nodes; see `sitecustomize`."""

from __future__ import annotations
