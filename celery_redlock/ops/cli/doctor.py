"""``redlock doctor``: look for what is set up wrongly."""

from __future__ import annotations

from dataclasses import asdict

import click

from celery_redlock.errors import ConfigurationError
from celery_redlock.ops.cli.command import (
    MISCONFIGURED,
    UNWELL,
    app_at_hand,
    operator_command,
    settings_of,
)
from celery_redlock.ops.doctor import ERROR, LEVELS, NOTE, Finding
from celery_redlock.ops.doctor.diagnosis import findings, gather
from celery_redlock.ops.loading import AppError
from celery_redlock.ops.screen import Progress, colour
from celery_redlock.ops.text import one_line, paragraph, show_json

__all__ = ["doctor"]

STYLES = {"error": "red", "warning": "yellow", "note": "cyan"}
EXAMPLES = """\b
Levels:
  error     locks cannot be relied upon, or do not work
  warning   it works, until something else happens
  note      good to know

\b
Examples:
  celery -A shop redlock doctor
  celery -A shop redlock doctor --json | jq -r '.findings[].code'
  celery -A shop redlock doctor > /dev/null || page-somebody

\b
JSON: well, errors, warnings, notes, findings[]: level, code, where, what,
fix
"""


@operator_command("Look for what is set up wrongly.", EXAMPLES)
def doctor(*, as_json: bool) -> int:
    """
    Look for what is set up wrongly: nodes, clocks, permissions, settings, tasks.

    Each finding has a code, which does not change, and says what to do. Goes through all keys of
    ours on each node, page by page, and writes one key for a moment to see what it may do.

    Exits with 0 if there is nothing worse than a note, with 1 if there is, with 2 if the settings
    are invalid or the app cannot be loaded, so that nothing else could be checked.
    """
    app, progress = app_at_hand(), Progress("keys looked at on a node")
    try:
        found = findings(gather(app, settings_of(app), progress.tell))
        code = 0 if all(finding.level == NOTE for finding in found) else UNWELL
    except ConfigurationError as error:
        kind, fix = "settings", "As it says."
        if isinstance(error, AppError):
            kind, fix = "app-import", "Fix it: a worker would not start either."
        found, code = [Finding(ERROR, kind, "", str(error), fix)], MISCONFIGURED
    progress.clear()
    counts = {level: sum(1 for f in found if f.level == level) for level in LEVELS}
    if as_json:
        plural = {f"{level}s": count for level, count in counts.items()}
        show_json({"well": code == 0, **plural, "findings": [asdict(finding) for finding in found]})
        return code
    for finding in found:
        show_finding(finding)
    counted = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items() if n)
    click.echo(f"Found: {counted}." if found else "All is well.")
    return code


def show_finding(finding: Finding) -> None:
    where = f"  {one_line(finding.where)}" if finding.where else ""
    click.echo(f"{colour(finding.level, STYLES[finding.level])}  {finding.code}{where}")
    for text in (finding.what, f"Fix: {finding.fix}"):
        click.echo(paragraph(text, "    ", "    "))
    click.echo()
