"""docker-compose.yml and the Dockerfile fit the example, the repository and the lock."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml
from sqlalchemy import make_url

from celery_redlock.lock.nodes.address import addresses_of
from celery_redlock.observers.names import FILES

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example_worker"
DOCKERFILE = EXAMPLE / "Dockerfile"
#: Services that only look on, and whose images have no tag for a major version.
WATCHERS = {"prometheus", "grafana"}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.fixture(scope="module")
def services(compose):
    return compose["services"]


def celery_command(service):
    command = service.get("command") or dockerfile_command()
    return shlex.split(command) if isinstance(command, str) else command


def of_celery(services, what):
    ours = [name for name, service in services.items() if "build" in service]
    return [name for name in ours if what in celery_command(services[name])]


def instructions():
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def dockerfile_command():
    (command,) = [rest for word, rest in instructions() if word == "CMD"]
    return ast.literal_eval(command)


def host_of(url):
    return re.fullmatch(r"redis://([^:/]+):6379/\d+", url)[1]


def environment_read_by_example():
    names = set()
    for path in EXAMPLE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
                names.add(ast.literal_eval(node.args[0]))
    return names


def test_the_nodes_named_are_the_nodes_there(services):
    for name in of_celery(services, "worker") + of_celery(services, "beat"):
        environment = services[name]["environment"]
        nodes = environment["REDLOCK_NODES"].split(",")
        assert len(addresses_of(nodes)) == 5  # refuses an even number, and one named twice
        hosts = [host_of(url) for url in nodes]
        assert len(set(hosts)) == 5
        broker = {host_of(environment["BROKER_URL"]), host_of(environment["RESULT_URL"])}
        assert broker == {"broker"}
        assert broker.isdisjoint(hosts)
        others = {n for n, s in services.items() if "build" not in s}
        assert set(hosts) | broker | {"postgres"} == others - WATCHERS


def test_a_lock_node_keeps_what_it_is_told(services):
    volumes = []
    for number in range(1, 6):
        node = services[f"lock-{number}"]
        words = node["command"]
        given = dict(zip(words[1::2], words[2::2], strict=True))
        assert words[0] == "redis-server"
        assert given["--appendonly"] == "yes"
        assert given["--appendfsync"] == "everysec"
        assert given["--maxmemory-policy"] == "noeviction"
        assert not {"--replicaof", "--slaveof", "--cluster-enabled"} & set(words)
        volumes += node["volumes"]
    assert sorted(volumes) == [f"lock-{number}:/data" for number in range(1, 6)]


def test_every_volume_is_declared_and_used(compose):
    mounts = [v.split(":") for s in compose["services"].values() for v in s.get("volumes", ())]
    assert {source for source, *_ in mounts if source[0] != "."} == set(compose["volumes"])
    for source, _target, *mode in mounts:
        assert source[0] != "." or ((ROOT / source).exists() and mode == ["ro"]), source


def test_there_are_two_workers_and_two_beats(services):
    """Two workers to get in each other's way, and two beats, of which one leads."""
    assert of_celery(services, "worker") == ["worker-1", "worker-2"]
    assert of_celery(services, "beat") == ["beat", "beat-2"]
    assert not any("deploy" in s or "scale" in s for s in services.values())
    for name in ("worker-1", "worker-2"):
        assert services[name] == {**services["worker-1"], "hostname": name}
    assert services["beat-2"] == {**services["beat"], "hostname": "beat-2"}
    words = celery_command(services["beat"])
    assert words[words.index("--scheduler") + 1] == "redlock"  # or each would publish every report


def test_the_nodes_are_bootstrapped_before_any_worker_and_never_again(compose, services):
    """At every `up` that would trust nodes which may have forgotten a lock that is held."""
    assert yaml.safe_dump(compose).count("bootstrap --yes") == 1
    first = services["first-start"]
    assert first["command"][2].startswith("test -e /first-start/over && exit\n")
    assert first["volumes"] == ["first-start:/first-start"]
    assert set(first["depends_on"]) == {f"lock-{number}" for number in range(1, 6)}
    assert first["restart"] == "no"
    done = {"condition": "service_completed_successfully"}
    for name in of_celery(services, "worker") + of_celery(services, "beat"):
        assert services[name]["depends_on"]["first-start"] == done
        assert services[name]["environment"] == first["environment"]


def test_commands_name_the_app(services):
    commands = [celery_command(services[n]) for n in of_celery(services, "worker")]
    commands += [celery_command(services["beat"]), dockerfile_command()]
    commands += [shlex.split(services["worker-1"]["healthcheck"]["test"][1])]
    for words in commands:
        assert words[:3] == ["celery", "-A", "example_worker.app"]
    assert "app = Celery(" in (EXAMPLE / "app.py").read_text()


def test_the_environment_is_what_the_example_reads(services):
    for name in ("worker-1", "worker-2", "beat", "beat-2"):
        read = {*environment_read_by_example(), FILES}  # the last by prometheus_client
        assert set(services[name]["environment"]) == read
        assert services[name]["tmpfs"] == [services[name]["environment"][FILES]]


def test_every_service_is_looked_after(services):
    for name, service in services.items():
        assert name == "first-start" or service["healthcheck"]["test"], name  # it ends
        assert "container_name" not in service
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert {name for name, service in services.items() if "ports" in service} == WATCHERS


def test_dependencies_are_services(services):
    for name in ("worker-1", "worker-2", "beat", "beat-2"):
        wanted = services[name]["depends_on"]
        assert set(wanted) <= set(services)
        healthy = {n for n, c in wanted.items() if c["condition"] == "service_healthy"}
        assert healthy == {"broker", "postgres"}


def test_images_are_pinned_to_a_major_version(services):
    """Not `latest`, which would change under our feet, and not a patch that nobody renews."""
    images = {s["image"] for n, s in services.items() if "build" not in s and n not in WATCHERS}
    images |= {rest for word, rest in instructions() if word == "FROM"}
    assert all(re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"]) for name in WATCHERS)
    for image in images:
        name, _, tag = image.partition(":")
        wanted = r"3\.\d+(-slim)?" if name == "python" else r"\d+(-alpine)?"
        assert re.fullmatch(wanted, tag), image


def test_the_image_can_be_built_from_this_repository(services):
    built = [service["build"] for service in services.values() if "build" in service]
    assert all(b == {"context": ".", "dockerfile": "example_worker/Dockerfile"} for b in built)
    copied = [rest.split()[:-1] for word, rest in instructions() if word == "COPY"]
    paths = {path for some in copied for path in some}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {"pyproject.toml", "README.md", "LICENSE", "celery_redlock", "example_worker"} <= paths
    (installed,) = [shlex.split(rest) for _, rest in instructions() if "pip install" in rest]
    # kombu's Redis transport wants `packaging`, which only this extra brings.
    assert {"celery[redis]", ".[prometheus]", "sqlalchemy", "psycopg[binary]"} <= set(installed)


def test_the_broker_keeps_messages(services):
    words = services["broker"]["command"]
    assert words[words.index("--maxmemory-policy") + 1] == "noeviction"
    assert services["broker"]["volumes"] == ["broker:/data"]


def test_the_ledger_is_the_database_that_is_there(services):
    told = services["postgres"]["environment"]
    for name in ("worker-1", "worker-2", "beat", "beat-2"):
        url = make_url(services[name]["environment"]["LEDGER_URL"])
        assert url.drivername == "postgresql+psycopg"
        assert url.host == "postgres"
        assert url.username == told["POSTGRES_USER"]
        assert url.password == told["POSTGRES_PASSWORD"]
        assert url.database == told["POSTGRES_DB"]
    assert services["postgres"]["volumes"] == ["postgres:/var/lib/postgresql/data"]
    assert "ports" not in services["postgres"]
    asked = shlex.split(services["postgres"]["healthcheck"]["test"][1])
    assert asked[:3] == ["pg_isready", "--host", "127.0.0.1"]
    assert {told["POSTGRES_USER"], told["POSTGRES_DB"]} <= set(asked)


def test_prometheus_scrapes_every_process_of_celery(services):
    config = yaml.safe_load((ROOT / "ops" / "prometheus" / "prometheus.yml").read_text())
    assert "./ops/prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    targets = {
        job["job_name"]: [target for some in job["static_configs"] for target in some["targets"]]
        for job in config["scrape_configs"]
    }
    ports = {
        service["environment"]["PROMETHEUS_LISTEN"].rpartition(":")[2]
        for service in services.values()
        if "build" in service
    }
    (port,) = ports
    assert targets == {
        "celery-redlock": [f"{name}:{port}" for name in of_celery(services, "worker")],
        "celery-redlock-beat": [f"{name}:{port}" for name in of_celery(services, "beat")],
    }
    for file in config["rule_files"]:
        assert (ROOT / "ops" / "prometheus" / file).exists()


def test_grafana_is_given_the_dashboard_and_its_data(services):
    grafana = services["grafana"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in grafana["volumes"])
    provisioning = ROOT / mounted["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/celery-redlock.yml").read_text())[
        "providers"
    ]
    dashboard = f"{provider['options']['path']}/celery-redlock.json"
    assert (ROOT / mounted[dashboard]).exists()
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == dashboard
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    host, port = re.fullmatch(r"http://([a-z]+):(\d+)", source["url"]).groups()
    assert f"127.0.0.1:{port}:{port}" in services[host]["ports"]


def test_whoever_looks_at_grafana_may_only_look(services):
    """Anonymous viewers, and no account with a password that everybody knows."""
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
