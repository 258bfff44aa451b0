"""Tables of a database that are there and not to be used: what is said of them."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

import psycopg
import pytest

from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.guard import Unfit
from support.machine import found
from support.postgres import USER, Database, find_postgres, postgres


@pytest.fixture
def made(database):
    """The URL of a database whose tables are made."""
    address_of(database.url).make_tables()
    return database.url


@pytest.fixture
def poor(database, made):
    """The URL of a user there who owns nothing."""
    name = f"poor_{uuid.uuid4().hex}"
    database.server.do(f"CREATE ROLE {name} LOGIN")
    yield made.replace(USER, name, 1)
    database.server.do(f"DROP ROLE {name}")


def do(url, statement):
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute(statement)


def test_who_lacks_rights_to_tables_that_are_there_is_told_which(poor):
    with pytest.raises(Unfit, match="GRANT SELECT, INSERT, UPDATE, DELETE ON"):
        address_of(poor).make_tables()


def test_tables_that_were_emptied_are_made_by_init(made):
    do(made, "DELETE FROM celery_redlock")
    address = address_of(made)
    with pytest.raises(Unfit, match=r"were emptied .*; make them: .* init"):
        address.store()
    assert address.make_tables()
    address.store().close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE celery_redlock SET value = '7' WHERE part = ':version'", "of version 7"),
        ("ALTER TABLE celery_redlock RENAME key TO theirs", "of somebody else"),
    ],
)
def test_tables_with_which_init_does_nothing_do_not_ask_for_it(made, statement, said):
    do(made, statement)
    with pytest.raises(Unfit, match=said) as raised:
        address_of(made).store()
    assert "init" not in str(raised.value)


def test_tables_that_another_search_path_finds_are_not_made_twice(database):
    """The schema of a user's own name comes first in its path: two would hold one lock."""
    name = f"app-{uuid.uuid4().hex}"
    do(database.url, f'CREATE ROLE "{name}" LOGIN')
    do(database.url, f'CREATE SCHEMA "{name}" AUTHORIZATION "{name}"')
    app = database.url.replace(USER, name, 1)
    assert address_of(app).make_tables()
    with pytest.raises(Unfit, match=f"in the schema {name}, .* write schema={name} into all URLs"):
        address_of(database.url).make_tables()
    assert not address_of(f"{database.url}&schema={name}").make_tables()
    assert address_of(f"{database.url}&schema=public").make_tables()
    do(database.url, f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


def test_a_standby_is_refused():
    """It has a copy of the tables, but for what is not logged: that may not even be read there."""
    with ExitStack() as stack:
        server = stack.enter_context(postgres(found(find_postgres)))
        database = stack.enter_context(server.database())
        assert address_of(database.url).make_tables()
        standby = stack.enter_context(postgres(found(find_postgres), copy_of=server))
        with pytest.raises(Unfit, match="is a replica, but a lock node must be the primary"):
            address_of(Database(standby, database.name).url).store()
