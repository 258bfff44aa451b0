"""
``celery -A APP redlock ...``: commands for an operator of the lock nodes.

A plug-in of the ``celery`` command (entry point group ``celery.commands``). It reads the settings
of the app and asks the nodes through `celery_redlock.lock`; it shows no password, no argument of a
task, and no more of a token than its public part. `group` has the list of commands, `command` what
they share; each of the others is one command. As Celery imports this for each of its own commands,
too, ``redlock_protect`` counts in workers, beats and shells without more.
"""

from __future__ import annotations

import celery_redlock.protect  # noqa: F401  its import is its use
from celery_redlock.ops.cli.group import redlock

__all__ = ["redlock"]
