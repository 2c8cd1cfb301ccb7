"""docker-compose.yml, Dockerfile and .env.example: right by the specification, and in step with each other.

No container is started. The setup script of the compose file runs as it is, against an HTTP server on loopback.
"""

import base64
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from app.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
# `${NAME}`, `${NAME:-default}`, `${NAME-default}`, `${NAME:?message}`; `$$` is a plain dollar.
VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?:(?P<operator>:?[-?])(?P<rest>[^}]*))?\}")


def one_shot(name: str) -> bool:
    """Whether a service runs once and ends, by its restart policy."""
    return SERVICES[name].get("restart") == "no"


def example_environment() -> dict[str, str]:
    """The variables of .env.example, quotes removed."""
    found = {}
    for line in (ROOT / ".env.example").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found[name] = value.strip('"')
    return found


def interpolate(text: str, environment: dict[str, str]) -> str:
    """Fill variables in as Compose does; raises KeyError for a required one that is missing."""

    def value(match: re.Match[str]) -> str:
        name, operator = match["name"], match["operator"] or ""
        present = name in environment and (environment[name] != "" or not operator.startswith(":"))
        if present:
            return environment[name]
        if "?" in operator:
            raise KeyError(name)
        return match["rest"] or ""

    return VARIABLE.sub(value, text).replace("$$", "$")


def environment_of(name: str, environment: dict[str, str]) -> dict[str, str]:
    """A service's environment as its container sees it."""
    return {key: interpolate(str(value), environment) for key, value in SERVICES[name]["environment"].items()}


@pytest.fixture(scope="module")
def specification() -> dict[str, Any]:
    """The JSON schema of the compose specification, out of a development package."""
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    loaded: dict[str, Any] = json.loads(schema.read_text(encoding="utf-8"))
    return loaded


def test_it_keeps_to_the_compose_specification(specification: dict[str, Any]) -> None:
    jsonschema.validate(COMPOSE, specification)


def test_the_specification_refuses_what_is_wrong(specification: dict[str, Any]) -> None:
    broken = yaml.safe_load(TEXT.replace("depends_on:", "depend_on:", 1))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, specification)


def test_variables_and_example_name_the_same() -> None:
    # Comments speak of variables too; the parsed form has none.
    used = {match["name"] for match in VARIABLE.finditer(json.dumps(COMPOSE))}
    assert used == set(example_environment())


def test_defaults_and_example_agree() -> None:
    example = example_environment()
    for match in VARIABLE.finditer(json.dumps(COMPOSE)):
        if match["operator"] in {":-", "-"}:
            assert match["rest"] == example[match["name"]], match["name"]


def test_without_an_env_file_it_says_what_to_do() -> None:
    required = {
        match["name"]: match["rest"] for match in VARIABLE.finditer(TEXT) if "?" in (match["operator"] or "")
    }
    assert set(required) == {
        name for name in example_environment() if re.search("PASSWORD|ENCRYPTION|SECRET", name)
    }
    assert set(required.values()) == {"copy .env.example to .env"}


def test_no_secret_stands_in_the_file() -> None:
    for name, service in SERVICES.items():
        for key, value in service["environment"].items():
            if re.search("PASSWORD|KEY|SECRET|TOKEN", key):
                assert VARIABLE.fullmatch(str(value)), f"{name}: {key} carries a literal"


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_watched_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert "mem_limit" in service
    if one_shot(name):
        assert "healthcheck" not in service
    else:
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
        assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_waits_for_what_it_needs(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if one_shot(needed) else "service_healthy"
        assert how == {"condition": expected}, f"{name} waits for {needed}"


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_bound_to_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+", port), port


def test_images_are_pinned_short_names() -> None:
    images = {name: service["image"] for name, service in SERVICES.items() if "build" not in service}
    assert all(re.fullmatch(r"[a-z]+:\d+\.\d+\.\d+", image) for image in images.values()), images
    assert len({image.partition(":")[2] for image in images.values()}) == 1, (
        "Elasticsearch and Kibana must match"
    )


def test_the_cluster_is_the_one_that_tests_run_on() -> None:
    head = (ROOT / "scripts" / "jars.lock").read_text(encoding="utf-8").splitlines()[0]
    version = re.search(r"Elasticsearch (\d+\.\d+\.\d+)", head)
    assert version is not None
    assert SERVICES["elasticsearch"]["image"] == f"elasticsearch:{version[1]}"


def test_named_volumes_are_declared_and_used() -> None:
    mounted = {
        volume.partition(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])
    }
    assert mounted == set(COMPOSE["volumes"])


def test_security_is_on() -> None:
    environment = SERVICES["elasticsearch"]["environment"]
    assert environment["xpack.security.enabled"] == "true"
    assert environment["xpack.license.self_generated.type"] == "basic"


def test_the_api_reaches_its_neighbours() -> None:
    seen = environment_of("api", example_environment())
    setup = environment_of("setup", example_environment())
    assert seen["HALFLIFE_ELASTICSEARCH_PASSWORD"] == setup["HALFLIFE_PASSWORD"]
    assert seen["HALFLIFE_EMBEDDING_QUERY_PREFIX"] == "query: "
    assert seen["HALFLIFE_EMBEDDING_DOCUMENT_PREFIX"] == "passage: "
    host, port = re.fullmatch(r"http://(\w+):(\d+)/v1", seen["HALFLIFE_EMBEDDING_BASE_URL"]).groups()  # type: ignore[union-attr]
    assert port in SERVICES[host]["expose"]
    assert port in SERVICES[host]["command"]
    assert SERVICES["api"]["ports"][0].endswith(f":{seen['HALFLIFE_PORT']}")
    empty_prefix = environment_of("api", {**example_environment(), "HALFLIFE_EMBEDDING_QUERY_PREFIX": ""})
    assert empty_prefix["HALFLIFE_EMBEDDING_QUERY_PREFIX"] == ""


def test_the_api_understands_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = environment_of("api", example_environment())
    assert {name.removeprefix("HALFLIFE_").lower() for name in given} <= set(Settings.model_fields)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    read = Settings()
    assert (read.port, read.embedding_dims, read.elasticsearch_username) == (8080, 384, "halflife")
    assert read.embedding_query_prefix == "query: "


# The setup service


class Cluster:
    """Stands where Elasticsearch's security API would; keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, Any]] = []
        self.status = 200
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                login = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
                cluster.requests.append((self.command, self.path, login, json.loads(body)))
                self.send_response(cluster.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_PUT = do_POST = answer  # noqa: N815 - the base class's names

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def run_setup(cluster: Cluster, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run the setup service's script as its container would."""
    if not (shutil.which("bash") and shutil.which("curl")):
        pytest.skip("needs bash and curl, which the Elasticsearch image has and this machine has not")
    service = SERVICES["setup"]
    environment = environment_of("setup", {**example_environment(), **changed})
    return subprocess.run(
        ["bash", *service["entrypoint"][1:], *(part.replace("$$", "$") for part in service["command"])],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **environment, "ELASTICSEARCH_URL": cluster.url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_setup_makes_the_users(cluster: Cluster) -> None:
    ended = run_setup(cluster, ELASTIC_PASSWORD="secret-1", HALFLIFE_ELASTICSEARCH_PASSWORD="secret-2")
    assert ended.returncode == 0, ended.stderr
    login = "elastic:secret-1"
    assert cluster.requests == [
        ("POST", "/_security/user/kibana_system/_password", login, {"password": "change-me-kibana"}),
        (
            "PUT",
            "/_security/role/halflife",
            login,
            {
                "cluster": ["monitor", "manage_index_templates"],
                "indices": [{"names": ["halflife-*", "halflife_*"], "privileges": ["all"]}],
            },
        ),
        ("PUT", "/_security/user/halflife", login, {"password": "secret-2", "roles": ["halflife"]}),
    ]


@pytest.mark.parametrize(
    "password, told",
    [("short", "fewer than 6"), ('quo"te-inside', "letters, digits"), ("dollar$sign", "letters, digits")],
)
def test_setup_refuses_a_password_that_would_break(cluster: Cluster, password: str, told: str) -> None:
    ended = run_setup(cluster, KIBANA_PASSWORD=password)
    assert ended.returncode == 1
    assert told in ended.stderr
    assert cluster.requests == []


def test_setup_fails_when_the_cluster_refuses(cluster: Cluster) -> None:
    cluster.status = 401
    ended = run_setup(cluster)
    assert ended.returncode != 0
    assert len(cluster.requests) == 1


# The image


DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def test_the_image_is_built_from_hashes_and_runs_as_nobody() -> None:
    runs = [line for line in DOCKERFILE.splitlines() if line.startswith("RUN ")]
    installs = [part for line in runs for part in line.split("&&") if re.search(r"pip (install|sync)", part)]
    assert len(installs) == 3
    for part in installs:
        assert "--require-hashes" in part or ("--no-deps" in part and "--offline" in part), part
    user = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.MULTILINE)
    assert user == ["halflife"]
    assert re.search(r"^HEALTHCHECK ", DOCKERFILE, flags=re.MULTILINE)


def test_the_image_gets_all_that_it_copies() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, flags=re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, f"{pattern}*") for pattern in allowed), source


def test_compose_and_image_agree_on_the_cache() -> None:
    cache = re.search(r"HALFLIFE_CACHE=(\S+)", DOCKERFILE)
    assert cache is not None
    assert SERVICES["embedder"]["environment"]["HALFLIFE_CACHE"] == cache[1]
    assert SERVICES["embedder"]["volumes"] == [f"embedder-cache:{cache[1]}"]
