"""The Django app whose migration makes the tables: in a real project, by Django's own commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import celery_redlock
from celery_redlock import ConfigurationError, Redlock
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.urls import rules_for
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import bootstrap
from support.postgres import USER
from support.waiting import eventually

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("redlock_django.py")
PATH = str(Path(celery_redlock.__file__).parents[1])


class Project:
    """A Django project with one database, which is the node at *url*."""

    def __init__(self, database, url):
        self.databases = {"default": database}
        self.url = url

    def manage(self, *words, **settings):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(PROGRAM), json.dumps(self.databases), *words],
            env={**os.environ, "PYTHONPATH": PATH, "SETTINGS": json.dumps(settings)},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def postgresql(database, more=""):
    return f"{database.url.replace('postgresql+psycopg', 'postgresql')}{more}"


@pytest.fixture(params=["sqlite", "postgresql"])
def project(request, tmp_path):
    if request.param == "postgresql":
        database = request.getfixturevalue("database")
        return Project(database.django, postgresql(database))
    path = tmp_path / "db.sqlite3"
    engine = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    return Project(engine, f"sqlite:///{path}")


def grants(url):
    """Return whether the node at *url* grants a lock, once an operator has given his word."""
    rules = rules_for([url], node_timeout=10.0)  # a commit may take long on a busy disk
    bootstrap([url], rules)
    locks = Redlock([url], rules)
    try:
        eventually(lambda: check(locks) == {}, "a connection")
        return locks.release(locks.acquire("django"))
    finally:
        locks.close()


def test_a_migration_makes_the_tables_and_takes_them_away(project):
    assert "celery_redlock" in project.manage("migrate", "--no-color")
    assert grants(project.url)
    assert not address_of(project.url).make_tables()  # nothing was missing
    project.manage("migrate", "celery_redlock", "zero")
    assert address_of(project.url).make_tables()


def test_tables_that_are_there_are_left_as_they_are(project):
    assert address_of(project.url).make_tables()
    assert grants(project.url)
    project.manage("migrate")
    assert grants(project.url)


def test_who_may_use_a_schema_need_not_be_allowed_to_make_tables_in_it(database):
    """As its owner has made them; PostgreSQL asks for the right even where nothing is missing."""
    url, role = postgresql(database, "&schema=locks"), f"django_{database.name}"
    assert address_of(url).make_tables()
    with psycopg.connect(postgresql(database), autocommit=True) as owner:
        for statement in (
            f"CREATE ROLE {role} LOGIN",
            f"GRANT ALL ON SCHEMA public TO {role}",
            f"GRANT USAGE ON SCHEMA locks TO {role}",
        ):
            owner.execute(statement)
        Project({**database.django, "USER": role}, url).manage(
            "migrate", REDLOCK_TABLE="locks.celery_redlock"
        )
        assert not address_of(url).make_tables()
        owner.execute(f"DROP OWNED BY {role}")
        owner.execute(f"DROP ROLE {role}")


def test_tables_that_another_search_path_finds_are_not_made_twice(database):
    role = f"app_{database.name}"
    with psycopg.connect(postgresql(database), autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN")
        owner.execute(f"CREATE SCHEMA {role} AUTHORIZATION {role}")
        assert address_of(postgresql(database).replace(USER, role, 1)).make_tables()
        project = Project(database.django, postgresql(database))
        with pytest.raises(AssertionError, match=f"REDLOCK_TABLE is then '{role}.celery_redlock'"):
            project.manage("migrate")
        project.manage("migrate", REDLOCK_TABLE=f"{role}.celery_redlock")
        owner.execute(f"DROP OWNED BY {role}")
        owner.execute(f"DROP ROLE {role}")


def test_django_finds_nothing_to_migrate(project):
    assert "No changes" in project.manage("makemigrations", "--check", "--dry-run")
    assert "CREATE TABLE IF NOT EXISTS" in project.manage("sqlmigrate", "celery_redlock", "0001")


def test_another_database_is_left_as_it_is(project, tmp_path):
    other = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.sqlite3")}
    project.databases["locks"] = other
    project.manage("migrate", REDLOCK_DATABASE="locks")
    assert address_of(project.url).make_tables()
    project.manage("migrate", "--database", "locks", REDLOCK_DATABASE="locks")
    assert not address_of(f"sqlite:///{tmp_path / 'other.sqlite3'}").make_tables()


def test_schema_and_table_are_those_of_the_setting(database):
    project = Project(database.django, postgresql(database, "&schema=locks&table=held"))
    project.manage("migrate", REDLOCK_TABLE="locks.held")
    assert not address_of(project.url).make_tables()
    assert grants(project.url)
    with pytest.raises(ConfigurationError, match="no tables"):
        grants(postgresql(database))


def test_a_name_that_is_none_is_refused(project):
    with pytest.raises(AssertionError, match="REDLOCK_TABLE must be like"):
        project.manage("migrate", REDLOCK_TABLE='x"; DROP TABLE y')
