"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_line import CommandLine, command_line


@pytest.fixture
def line(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CommandLine]:
    """The command line of the app whose source is the test module's ``SHOP``."""
    with command_line(tmp_path, request.module.SHOP) as it:
        yield it
