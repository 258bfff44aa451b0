"""How a database is reached: TLS, and a password from wherever libpq takes one; none is shown."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from celery_redlock import ConfigurationError, QuorumUnavailable, Redlock
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.credentials import with_credentials
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.ports import HOST, reserved
from support.certificates import Authority
from support.command_line import command_line
from support.kinds import POSTGRESQL, each
from support.machine import found
from support.postgres import find_postgres, postgres
from support.waiting import eventually

RULES = Rules(ttl=60, max_ttl=60, node_timeout=10.0)
#: What a URL and a password file have to escape, and half of it that no text may have.
PASSWORD, SECRET = "s3cret-w@rd:é/", "s3cret"
WRONG = "s3cret-but-another"
USER, MACHINE = "app", "machine"
#: Whoever comes by the network says a password, or shows a certificate.
HBA = f"""\
local all all trust
hostssl all {MACHINE} {HOST}/32 cert
host all all {HOST}/32 scram-sha-256
"""
SHOP = """
    import os
    from celery import Celery
    from celery_redlock import RedlockTask

    app = Celery("shop", broker="memory://")
    app.conf.redlock_nodes = os.environ["NODES"].split()
    app.conf.redlock_username = os.environ.get("LOCK_USER")
    app.conf.redlock_password = os.environ.get("LOCK_PASSWORD")
    app.conf.redlock_ttl = app.conf.redlock_max_ttl = 60

    @app.task(base=RedlockTask)
    def bill(number):
        pass
"""


class Site:
    """A database that somebody reaches by the network alone."""

    def __init__(self, database, port, folder, setenv):
        self.database, self.port, self.folder, self.setenv = database, port, folder, setenv
        self.credentials = (None, None)

    def url(self, login="", options=""):
        return f"postgresql://{login}{HOST}:{self.port}/{self.database.name}{options}"

    def file(self, name, text):
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return str(path)

    def nodes(self, url):
        return with_credentials([url], *self.credentials)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    return authority, authority.vouch("database", HOST), authority.vouch(MACHINE)


@pytest.fixture(scope="module")
def server_of(certificates):
    """Return a server of a kind, with TLS if its programs have it, and its port."""
    servers = {}
    with ExitStack() as stack:

        def start(kind):
            if kind not in servers:
                # Kept until the end: the server, which may be bound beside it, comes much later.
                port = stack.enter_context(reserved()).getsockname()[1]
                at = {"listen_addresses": HOST, "port": str(port)}
                server = postgres(found(lambda: find_postgres(POSTGRESQL[kind])), at)
                servers[kind] = guarded(stack.enter_context(server), certificates), port
            return servers[kind]

        yield start


def guarded(server, certificates):
    """Have *server* ask for passwords and certificates."""
    authority, pair, _ = certificates
    files = {"pg_hba.conf": HBA.encode(), "ca.crt": authority.file.read_bytes()}
    files |= {"own.crt": pair.certificate.read_bytes(), "own.key": pair.key.read_bytes()}
    owner = server.folder.stat()
    if not has_tls(server):
        files = {"pg_hba.conf": HBA.replace("hostssl", "# hostssl").encode()}
    for name, text in files.items():
        path = server.folder / "data" / name
        path.write_bytes(text)
        path.chmod(0o600)
        os.chown(path, owner.st_uid, owner.st_gid)
    if has_tls(server):
        for name, value in (("ca", "ca.crt"), ("cert", "own.crt"), ("key", "own.key")):
            server.do(f"ALTER SYSTEM SET ssl_{name}_file = '{value}'")
        server.do("ALTER SYSTEM SET ssl = on")
    server.do(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'")
    server.do(f"CREATE ROLE {MACHINE} LOGIN IN ROLE {USER}")
    server.do("SELECT pg_reload_conf()")
    return server


def has_tls(server):
    return "pixeltable" not in str(server.programs)


@pytest.fixture(params=each(POSTGRESQL))
def site(request, server_of, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    server, port = server_of(request.param)
    with server.database() as database:
        server.do(f"ALTER DATABASE {database.name} OWNER TO {USER}")
        yield Site(database, port, tmp_path, monkeypatch.setenv)


# -- where a password comes from ---------------------------------------------------------------


def in_url(site, password):
    return site.url(f"{USER}:{quote(password, safe='')}@")


def in_options(site, password):
    return site.url(options=f"?user={USER}&password={quote(password, safe='')}")


def in_settings(site, password):
    site.credentials = (USER, password)
    site.setenv("LOCK_USER", USER)
    site.setenv("LOCK_PASSWORD", password)
    return site.url()


def in_environment(site, password):
    site.setenv("PGPASSWORD", password)
    return site.url(f"{USER}@")


def pgpass(site, password, name):
    escaped = password.replace("\\", "\\\\").replace(":", "\\:")
    return site.file(name, f"{HOST}:{site.port}:{site.database.name}:{USER}:{escaped}\n")


def in_named_file(site, password):
    site.setenv("PGPASSFILE", pgpass(site, password, "passwords"))
    return site.url(f"{USER}@")


def in_file_at_home(site, password):
    pgpass(site, password, ".pgpass")
    site.setenv("HOME", str(site.folder))
    return site.url(f"{USER}@")


def in_service(site, password):
    lines = {"host": HOST, "port": site.port, "dbname": site.database.name, "user": USER}
    lines["password"] = password
    text = "".join(f"{name}={value}\n" for name, value in lines.items())
    site.setenv("PGSERVICEFILE", site.file("services", f"[locks]\n{text}"))
    return "postgresql:///?service=locks"


SOURCES = {
    "URL": in_url,
    "options of the URL": in_options,
    "settings": in_settings,
    "PGPASSWORD": in_environment,
    "PGPASSFILE": in_named_file,
    ".pgpass": in_file_at_home,
    "service file": in_service,
}


def works(site, url):
    """Make the tables at *url*, and take a lock and release it; return whether TLS was used."""
    nodes = site.nodes(url)
    address_of(nodes[0]).make_tables()
    assert set(bootstrap(nodes, RULES).values()) == {"enrolled"}
    with closing(Redlock(nodes, RULES)) as locks:
        eventually(lambda: check(locks) == {}, "a connection")
        assert locks.release(locks.acquire("n")).name == "RELEASED"
    with closing(address_of(nodes[0]).store()) as store:
        return bool(store._connection.pgconn.ssl_in_use)


@pytest.mark.parametrize("source", SOURCES)
def test_a_password_is_taken_from_wherever_libpq_takes_it(site, source):
    works(site, SOURCES[source](site, PASSWORD))


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_password_is_refused_and_not_shown(site, source, caplog):
    said = refusal(site, SOURCES[source](site, WRONG), caplog)
    assert f'password authentication failed for user "{USER}"' in said
    assert "Check redlock_password, or its URL, PGPASSWORD, ~/.pgpass or service file." in said


def refusal(site, url, caplog):
    """Return all that is said, by anybody, of a database that does not let us in."""
    caplog.set_level(logging.DEBUG)
    nodes, events = site.nodes(url), []
    with closing(Redlock(nodes, RULES, [events.append])) as locks:
        with pytest.raises(QuorumUnavailable) as raised:
            locks.acquire("n")
        texts = [str(raised.value), repr(raised.value)]
        texts += [repr(locks), str(check(locks)), str(probe(locks)), repr(events)]
        texts += [repr(address_of(nodes[0])), address_of(nodes[0]).label]
    with command_line(site.folder, SHOP) as line:
        for words in (("doctor",), ("status",), ("init",), ("bootstrap", "--yes"), ("ls",)):
            code, out, err = line.redlock([url], *words)
            assert code != 0, words
            texts.append(out + err)
    said = "\n".join([*texts, caplog.text])
    assert SECRET not in said
    return " ".join(said.split())  # lines are as long as a terminal is wide


def test_a_node_by_service_is_called_after_the_service(site):
    """So who names the database itself has another node, and is told."""
    url = in_service(site, PASSWORD)
    works(site, url)
    foreign = pytest.raises(ConfigurationError, match="enrolled by clients with other lock nodes")
    with closing(Redlock([in_url(site, PASSWORD)], RULES)) as locks, foreign:
        eventually(lambda: check(locks) == {}, "a connection")
    assert address_of(url).label == "postgresql/locks/celery_redlock"


# -- TLS ---------------------------------------------------------------------------------------


@pytest.fixture
def safe(site):
    if not has_tls(site.database.server):
        pytest.skip("the package that brings this PostgreSQL has built it without TLS")
    return site


def verified(site, authority):
    options = f"?sslmode=verify-full&sslrootcert={authority.file}"
    return site.url(f"{USER}:{quote(PASSWORD, safe='')}@", options)


def test_a_certificate_is_verified(safe, certificates):
    assert works(safe, verified(safe, certificates[0]))


def test_a_certificate_of_ours_is_as_good_as_a_password(safe, certificates):
    authority, _, ours = certificates
    key = safe.file("key", ours.key.read_text())
    options = f"?sslmode=verify-full&sslrootcert={authority.file}&sslcert={ours.certificate}"
    assert works(safe, safe.url(f"{MACHINE}@", f"{options}&sslkey={key}"))


def test_a_certificate_of_another_authority_is_refused(safe, tmp_path, caplog):
    another = Authority(tmp_path, "another")
    said = refusal(safe, verified(safe, another), caplog)
    assert "certificate verify failed" in said
    assert "sslmode and sslrootcert" in said


def test_who_does_not_verify_is_let_in_whoever_answers(safe, tmp_path):
    """As `psql` is: a certificate is only as good as the mode that asks for it."""
    another = Authority(tmp_path, "another")
    unverified = verified(safe, another).replace("verify-full", "prefer")
    assert works(safe, unverified.partition("&sslrootcert")[0])


def test_a_missing_file_of_the_authority_is_named(safe, tmp_path, caplog):
    url = verified(safe, SimpleNamespace(file=tmp_path / "no.crt"))
    said = refusal(safe, url, caplog)
    assert "no.crt" in said
    assert "sslmode and sslrootcert" in said


@pytest.mark.parametrize("site", ["postgresql-18"], indirect=True)
@pytest.mark.long
def test_a_server_without_tls_is_refused_where_it_is_required(site, certificates, caplog):
    said = refusal(site, verified(site, certificates[0]), caplog)
    assert "server does not support SSL, but SSL was required" in said
    assert "sslmode and sslrootcert" in said
