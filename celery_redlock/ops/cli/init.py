"""``redlock init``: make the tables of a database that is the lock node."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click
from redis.exceptions import RedisError

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.address import WithTables, addresses_of
from celery_redlock.lock.nodes.guard import greet, quarantine_of_new
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.listing import local_time
from celery_redlock.ops.text import one_line, show_json
from celery_redlock.reading.nodes import connected, enrolment
from celery_redlock.words import duration, redlock_command

if TYPE_CHECKING:
    from celery_redlock.lock.nodes.address import Address

__all__ = ["init"]

EXAMPLES = """\b
Examples:
  celery -A shop redlock init
  celery -A shop redlock init --print > tables.sql    for a DBA to run

\b
JSON: statements[], and nodes[]: node, made, quarantine (for how long it
grants no lock yet, in seconds), problem
"""
NOTHING = (
    "Nothing is to be made: the lock nodes are servers of Redis or Valkey, which have no tables."
)


@dataclass
class Made:
    """The outcome for one node."""

    node: str
    made: bool = False
    quarantine: float = 0.0  # for how long it does not vote yet [s]
    problem: str = ""


@operator_command("Make the tables of a database that keeps the locks.", EXAMPLES)
@click.option("--print", "only_shows", is_flag=True, help="Print the statements; do nothing.")
def init(*, only_shows: bool, as_json: bool) -> int:
    """
    Make the tables of a database that keeps the locks.

    Once, before the first worker; where they are it changes nothing. A new table grants no lock
    for redlock_max_ttl and a little more, from when it was made: until then another node, as
    of an older configuration, may have a lock that is held.

    Lock nodes of Redis need nothing, and a file of SQLite gets its table from whoever comes first.

    Exits with 0 if the tables are there, with 1 if not.
    """
    settings = settings_at_hand()
    addresses = addresses_of(settings.nodes, settings.rules.prefix)
    with_tables = [address for address in addresses if isinstance(address, WithTables)]
    statements = [statement for address in with_tables for statement in address.tables()]
    results = [] if only_shows else [make(it, settings.rules) for it in with_tables]
    if as_json:
        show_json({"statements": statements, "nodes": list(map(asdict, results))})
    elif not with_tables:
        click.echo(NOTHING)
    elif only_shows:
        click.echo("".join(f"{statement};\n" for statement in statements), nl=False)
    for result in () if as_json else results:
        click.echo("\n".join(in_words(result)))
    return UNWELL if any(result.problem for result in results) else 0


def make(address: Address, rules: Rules) -> Made:
    result = Made(address.label)
    assert isinstance(address, WithTables)
    try:
        result.made = address.make_tables()
        with connected(address) as connection:
            greeting = greet(connection)
            fingerprint = rules.fingerprint([address.label])
            state, left = enrolment(connection, rules, greeting.run_id, fingerprint)
            new = quarantine_of_new(greeting, 1, rules)
            result.quarantine = left if state == "enrolled" else new
    except (RedisError, OSError, ConfigurationError) as error:
        result.problem = one_line(error) or type(error).__name__
    return result


def in_words(result: Made) -> list[str]:
    if result.problem:
        lines = [f"{result.node}: {result.problem}"]
        if "permission denied" in result.problem and "GRANT" not in result.problem:
            lines.append(f"Have somebody who may do so run: {redlock_command('init --print')}")
        return lines
    lines = [f"{result.node}: {'the tables are made' if result.made else 'the tables are there'}"]
    if not result.quarantine:
        return [f"{lines[0]}; locks are granted"]
    lines.append(
        f"Locks are granted from {local_time(time.time() + result.quarantine)} on (in "
        f"{duration(result.quarantine)}): until then one may be held that was taken elsewhere."
    )
    lines.append(f"If nobody holds any: {redlock_command('bootstrap')}")
    return lines
