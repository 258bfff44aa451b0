"""What this machine has, and what a test does where it has not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import pytest

__all__ = ["IN_CI", "found"]

T = TypeVar("T")
IN_CI = os.environ.get("CI") == "true"


def found(find: Callable[[], T]) -> T:
    """Return what *find* does; where that is a RuntimeError, skip at home, and fail in CI."""
    try:
        return find()
    except RuntimeError as failure:
        if IN_CI:
            raise
        pytest.skip(str(failure))
