"""
Which Celery the tests run with, for what differs between its versions.

A test says from which version on something is so, and, where it can, what was so before.
"""

from __future__ import annotations

import celery
import pytest

__all__ = ["CELERY", "before", "since"]

#: Major and minor version.
CELERY = tuple(int(part) for part in celery.__version__.split(".")[:2])


def since(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Mark a test of *what* is new in this version of Celery."""
    reason = f"since Celery {major}.{minor}: {what}"
    return pytest.mark.skipif((major, minor) > CELERY, reason=reason)


def before(major: int, minor: int, what: str) -> pytest.MarkDecorator:
    """Mark a test of *what* was so up to this version of Celery."""
    reason = f"before Celery {major}.{minor}: {what}"
    return pytest.mark.skipif((major, minor) <= CELERY, reason=reason)
