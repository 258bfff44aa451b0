"""
What all tests stand on: a clean environment and real servers.

Servers for a test that kills or pauses them are its own (`redis_nodes`); the others share
a few and find them empty (`five_nodes`, `broker`, `contract_node`). Helpers that are no
fixtures are in `tests/support` and are imported as ``support``.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# What `nohup` or a shell's `&` ignores is inherited: with a handler of ours, started programs
# begin as in a terminal, and this process still ignores it.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

# First of all: what a developer exported for a shop of their own must not reach a test.
for _name in [name for name in os.environ if name.startswith(("REDLOCK_", "CELERY_"))]:
    # How long to search, for whoever wants to search longer; and what a mutant goes without.
    if not _name.startswith(("REDLOCK_SIM_", "REDLOCK_SPREE_", "REDLOCK_GUARDS_OFF")):
        del os.environ[_name]

import hypothesis
import pytest
import redis
from celery import _state
from celery.backends import cache

import celery_redlock.protect  # noqa: F401  before a test forgets what it has Celery call
from celery_redlock.lock.nodes import connections, urls
from celery_redlock.process import deferral
from celery_redlock.testing.servers import Server, find_binary, servers
from support.clients import hang_up
from support.database_server import DatabaseServer, database_server, hashes_by_name, patient
from support.kinds import (
    KINDS_OF_NODE,
    POSTGRESQL,
    SERVERS,
    binaries,
    each,
    marks_of,
    postgres_by_kind,
    those_here,
)
from support.machine import IN_CI, found
from support.postgres import Database, Postgres
from support.proxy import Link, proxied
from support.rabbitmq import RabbitMQ, find_rabbitmq, rabbitmq
from support.worker import Worker

if _off := os.environ.get("REDLOCK_GUARDS_OFF"):  # `simulation.guards` says which there are
    from simulation.guards import switched_off

    _guards = ExitStack()
    _guards.enter_context(switched_off(_off.split(",")))

# A server that does not answer for a few seconds is slow, not down.
urls.OPTIONS.update(socket_timeout=10.0, socket_connect_timeout=10.0)
connections.FIRST_CONNECT = 10.0

# A deadline per example is a coin toss on a loaded machine; pytest-timeout bounds the test.
# So is its complaint that inputs take long to make.
_home = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("home", _home)
hypothesis.settings.register_profile("ci", _home, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if IN_CI else "home")


#: Test files that take longest, the longest first. They start first, so that at the end no
#: process is left with one of them while the others have nothing to do.
LONGEST = (
    *("test_benchmarks", "test_database", "test_struck_tasks", "test_pages", "test_needs"),
    *("test_lead", "test_pools", "test_acl", "test_rerun", "test_web", "test_rabbitmq"),
    *("test_nemesis", "test_redlock", "test_strikes", "test_companions", "test_unique"),
    *("test_async_redlock", "test_lock_database", "test_workflows", "test_processes"),
    *("test_faults", "test_cluster", "test_beat_schedulers", "test_execution", "test_publishers"),
)
#: Kinds of tests, those that take longest first.
KINDS = ("tools", "acceptance", "resources", "integration", "nemesis", "package", "simulation")
#: Kinds that take long, or are about tools of this repository.
LONG_KINDS = ("companions", "exploration", "fuzz", "nemesis", "package", "resources", "tools")
#: Celery's pools beside prefork, its default.
OTHER_POOLS = {"threads", "solo", "gevent", "eventlet"}


def pytest_xdist_auto_num_workers() -> int:
    """
    Two test processes for each core: half of what tests do is waiting.

    Three are no faster, and what is to come within a second then often does not.
    """
    return min(2 * (os.cpu_count() or 1), 24)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the long kinds alone where they are not wanted: they import what is not installed."""
    is_long = collection_path.parent == Path(__file__).parent and collection_path.name in LONG_KINDS
    return True if is_long and config.getoption("markexpr") == "not long" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all tests of the long kinds, of other pools, and with a browser or RabbitMQ."""
    kind = item.path.parent.name
    words = re.findall("[a-z]+", item.callspec.id if hasattr(item, "callspec") else "")
    has_guest = not {"chromium", "rabbit"}.isdisjoint(getattr(item, "fixturenames", ()))
    runs_workers = kind in ("acceptance", "integration")
    if kind in LONG_KINDS or has_guest or (runs_workers and not OTHER_POOLS.isdisjoint(words)):
        item.add_marker("long")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say where a test is that `make test` was asked for and leaves out."""
    none = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if none and config.getoption("markexpr") == "not long":
        terminalreporter.write_line("These take long: run `make test-all ARGS=...`", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kind",
        dest="kinds",
        action="append",
        choices=KINDS_OF_NODE,
        help="of node to run contract tests over, may be given several times (default: those here)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is asked of nodes over each kind, and what needs a server over each of those."""
    if "contract_server" in metafunc.fixturenames:
        kinds = metafunc.config.getoption("kinds") or those_here()
        is_contract = metafunc.definition.path.parent.name == "contract"
        chosen = [
            pytest.param(kind, marks=marks_of(kind, metafunc.function.__name__))
            for kind in kinds
            if kind in SERVERS or is_contract
        ]
        metafunc.parametrize("contract_server", chosen, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the longest files first; apart from that, and from `in_order`, the order is random."""

    def place(item: pytest.Item) -> tuple[int, int]:
        file, kind = item.path.stem, item.path.parent.name
        return (
            LONGEST.index(file) if file in LONGEST else len(LONGEST),
            KINDS.index(kind) if kind in KINDS else len(KINDS),
        )

    items.sort(key=place)
    for file, scenes in in_order(items).items():
        places = [n for n, item in enumerate(items) if item in scenes and item.path == file]
        for n, item in zip(places, scenes, strict=True):
            items[n] = item


def in_order(items: list[pytest.Item]) -> dict[Path, list[pytest.Item]]:
    """Return the tests of the files that are one scene each, as they stand there, by file."""
    marked = [item for item in items if item.get_closest_marker("in_order")]
    stages: dict[tuple[Path, Any], int] = {}

    def place(item: Any) -> tuple[int, int]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        stage = stages.setdefault((item.path, repr(params.get("it"))), len(stages))
        return stage, item.function.__code__.co_firstlineno

    found: dict[Path, list[pytest.Item]] = {}
    for item in sorted(marked, key=place):
        found.setdefault(item.path, []).append(item)
    return found


@pytest.fixture(autouse=True)
def _signals_take_effect_after_a_test() -> Iterator[None]:
    """No test leaves signals held back: those after it would see none of theirs."""
    yield
    left, deferral._Deferral.current = deferral._Deferral.current, None
    assert left is None, "signals are still held back"


@pytest.fixture(autouse=True)
def _apps_of_other_tests_are_forgotten() -> Iterator[None]:
    """
    Neither a test's tasks, results nor current app reach the apps of the next test.

    Celery adds the tasks of one app to every later app of the process, and warns, as an
    error here, when two of them have one name.
    """
    state: Any = _state  # what matters here is not part of its public face
    finalizers, current = set(state._on_app_finalizers), state._tls.current_app
    level = logging.root.level
    yield
    logging.root.setLevel(level)  # a worker in this process sets its own
    state._on_app_finalizers, state._tls.current_app = finalizers, current
    kept_by_process: Any = cache  # results that are kept in memory, by task id
    kept_by_process._DUMMY_CLIENT_CACHE.clear()
    for name in ("CELERY_LOG_FILE", "CELERY_LOG_LEVEL"):  # for the children of a pool
        os.environ.pop(name, None)


BINARIES = binaries()


@pytest.fixture(scope="session")
def some_binary() -> Path:
    """A server program; without one a test is skipped at home and fails in CI."""
    return found(find_binary)


@pytest.fixture
def redis_nodes(some_binary: Path) -> Iterator[Callable[..., list[Server]]]:
    """
    Start servers for this test alone: ``redis_nodes(n, *, binary=None, extra_args=())``.

    For tests that kill, pause or restart them. May be called more than once.
    """
    with ExitStack() as stack:

        def start(
            n: int, *, binary: Path | None = None, extra_args: Sequence[str] = ()
        ) -> list[Server]:
            farm = servers(n, binary=binary or some_binary, extra_args=extra_args)
            return stack.enter_context(farm)

        yield start
        hang_up()


@pytest.fixture(scope="session")
def shared_nodes(some_binary: Path) -> Iterator[list[Server]]:
    """Five servers of the whole run; take `five_nodes`, which finds them empty."""
    with servers(5, binary=some_binary) as farm:
        yield farm


@pytest.fixture
def five_nodes(shared_nodes: list[Server]) -> list[Server]:
    """Five empty servers, which the test must leave running."""
    hang_up()
    for node in shared_nodes:
        _empty(node)
    return shared_nodes


@pytest.fixture(scope="session")
def broker_server(some_binary: Path) -> Iterator[Server]:
    """The server of the whole run for Celery's messages and results; take `broker`."""
    with servers(1, binary=some_binary) as (server,):
        yield server


@pytest.fixture
def broker(broker_server: Server) -> Server:
    """An empty server for Celery's messages and results, which the test must leave running."""
    _empty(broker_server)
    return broker_server


@pytest.fixture(scope="module")
def rabbit() -> Iterator[RabbitMQ]:
    """A RabbitMQ of the module; without one a test is skipped at home and fails in CI."""
    with rabbitmq(found(find_rabbitmq)) as broker:
        yield broker


@pytest.fixture(scope="session")
def postgres_servers() -> Iterator[Callable[[str], Postgres]]:
    """
    The PostgreSQL of the whole run of each kind; take `database` or `database_url`.

    A missing one: as `some_binary`.
    """
    with postgres_by_kind() as server_of:
        yield server_of


@pytest.fixture(scope="session")
def postgres_server(postgres_servers: Callable[[str], Postgres]) -> Postgres:
    """That of the machine."""
    return postgres_servers("postgresql")


@pytest.fixture
def database(postgres_server: Postgres) -> Iterator[Database]:
    """An empty database of this test alone, on a real PostgreSQL."""
    with postgres_server.database() as fresh:
        yield fresh


@pytest.fixture(params=each())
def database_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of database; `database_url` is of it."""
    return str(request.param)


@pytest.fixture
def database_url(
    database_kind: str, tmp_path: Path, postgres_servers: Callable[[str], Postgres]
) -> Iterator[str]:
    """The URL of an empty database of each kind, of this test alone."""
    if database_kind == "sqlite":
        yield f"sqlite:///{tmp_path}/locks.db"
        return
    with postgres_servers(database_kind).database() as fresh:
        yield fresh.url


@pytest.fixture(scope="session")
def contract_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server | DatabaseServer]:
    """One server of a kind in `KINDS_OF_NODE`; of databases, one that is spoken to as such."""
    with ExitStack() as stack:
        kind = request.param
        if kind in BINARIES:
            yield from stack.enter_context(servers(1, binary=BINARIES[kind]))
            return
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('locks')}/locks.db?commit=async"
        elif kind in POSTGRESQL:
            server = request.getfixturevalue("postgres_servers")(kind)
            url = stack.enter_context(server.database()).url
        else:
            found(lambda: find_binary(kind))
        yield stack.enter_context(database_server(url))


@pytest.fixture
def contract_node(
    contract_server: Server | DatabaseServer,
) -> Iterator[Server | DatabaseServer]:
    """An empty server, of each kind in turn, which the test must leave running."""
    _empty(contract_server)
    with ExitStack() as stack:
        if isinstance(contract_server, DatabaseServer):
            stack.enter_context(hashes_by_name())
            stack.enter_context(patient(seconds=60))
        yield contract_server


@pytest.fixture
def proxied_nodes() -> Iterator[Callable[..., list[Link]]]:
    """Put a proxy before each of some servers: ``proxied_nodes(servers, delay=0.0)``."""
    with ExitStack() as stack:

        def start(nodes: Sequence[Server], delay: float = 0.0) -> list[Link]:
            return stack.enter_context(proxied([node.port for node in nodes], delay=delay))

        yield start


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """File of this test's events, for `support.events`; workers have its name as ``EVENTS``."""
    return tmp_path / "events.jsonl"


@pytest.fixture
def start_worker(events: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """
    Start a real worker: ``start_worker(app, **options of support.worker.Worker)``.

    It runs in the test's `tmp_path` unless told otherwise. Its log is printed at the end,
    where pytest shows it if the test failed.
    """
    workers: list[Worker] = []
    with ExitStack() as stack:

        def start(app: str, **options: Any) -> Worker:
            options["env"] = {"EVENTS": str(events), **options.get("env", {})}
            worker = Worker(app, **{"cwd": tmp_path, "name": f"w{len(workers) + 1}", **options})
            workers.append(stack.enter_context(worker))
            return worker

        yield start
        for worker in workers:
            print(f"---- {' '.join(worker.command)}\n{worker.log()}")  # noqa: T201


def _empty(server: Server | DatabaseServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        client.script_flush()
