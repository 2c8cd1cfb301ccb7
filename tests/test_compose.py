"""docker-compose.yml, Dockerfile and .env.example: right by the specification, and in step with each other.

No container is started. The setup script of the compose file runs as it is, against an HTTP server on loopback.
"""

import ast
import base64
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import certifi
import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from app import names
from app.main import open_cluster, open_embedder, open_reranker, open_rewriter
from app.settings import Settings
from scripts import cli
from scripts.serving import StartFailed, read_settings, refuse_without_keys

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
                folder = re.fullmatch(r"/[a-z/]+", str(value))
                assert VARIABLE.fullmatch(str(value)) or folder, f"{name}: {key} carries a literal"


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_watched_and_bounded(name: str) -> None:
    service = SERVICES[name]
    assert "mem_limit" in service
    if one_shot(name):
        assert "healthcheck" not in service
    else:
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}
        assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])


def test_the_api_fits_into_its_memory_with_all_that_it_may_hold() -> None:
    api = SERVICES["api"]
    given = {name.removeprefix("HALFLIFE_").lower(): value for name, value in api["environment"].items()}
    settings = Settings(
        **{name: given[name] for name in ("max_held_bytes", "file_workers", "file_memory_bytes")}
    )
    assert settings.max_held_bytes is not None
    assert settings.max_held_bytes >= settings.max_body_bytes
    # One reader more than `file_workers` serves callers of whom no file is being read.
    readers = (settings.file_workers + 1) * settings.file_memory_bytes
    most = 130 * 2**20 + 4 * settings.max_held_bytes + readers
    assert api["mem_limit"].endswith("m")
    assert most <= int(api["mem_limit"].removesuffix("m")) * 2**20


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
    images = {
        name: service["image"]
        for name, service in SERVICES.items()
        if not service["image"].startswith("halflife:")
    }
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
    for layer in ("http", "transport"):
        assert environment[f"xpack.security.{layer}.ssl.enabled"] == "true"


def test_nobody_speaks_to_elasticsearch_in_the_clear() -> None:
    for name, service in SERVICES.items():
        told = json.dumps(service)
        assert "http://elasticsearch" not in told, name
        if "https://elasticsearch" in told:
            # Nor without knowing whom: each has the CA.
            mounts = {volume.partition(":")[0] for volume in service["volumes"]}
            assert mounts & {"certificates", "authority", "api-secrets"}, name


def test_keys_are_seen_by_those_alone_who_need_them() -> None:
    def holders(volume: str) -> dict[str, str]:
        found = {}
        for name, service in SERVICES.items():
            for mount in service.get("volumes", []):
                source, _, *mode = mount.split(":")
                if source == volume:
                    found[name] = mode[0] if mode else "rw"
        return found

    assert holders("ca") == {"certificates": "rw"}
    assert holders("api-secrets") == {"setup": "rw", "api": "ro"}
    assert holders("certificates") == {"certificates": "rw", "elasticsearch": "ro"}
    assert holders("authority") == {"certificates": "rw", "setup": "ro", "kibana": "ro"}
    # The superuser's password goes to those who run once, and to Elasticsearch itself.
    told = {name for name, service in SERVICES.items() if "ELASTIC_PASSWORD" in json.dumps(service)}
    assert told == {"elasticsearch", "setup", "dashboards"}
    assert all(one_shot(name) for name in told - {"elasticsearch"})


def test_what_is_ours_runs_without_rights() -> None:
    ours = {name: service for name, service in SERVICES.items() if service["image"].startswith("halflife:")}
    assert set(ours) == {"embedder", "api", "dashboards"}
    for name, service in ours.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "user" not in service, name  # the image's own, which is not root


def test_one_service_builds_the_image_that_all_of_ours_run() -> None:
    # Two that build the same tag at once fail, one of them, with "already exists" (BuildKit with containerd's store).
    ours = {name: service for name, service in SERVICES.items() if service["image"].startswith("halflife:")}
    assert len({service["image"] for service in ours.values()}) == 1
    assert [name for name, service in ours.items() if "build" in service] == ["api"]
    # The others take what was built: no registry has it.
    assert {name for name, service in ours.items() if service.get("pull_policy") == "never"} == set(ours) - {
        "api"
    }


def test_dashboards_are_loaded_by_a_command_that_there_is() -> None:
    service = SERVICES["dashboards"]
    told = CliRunner().invoke(cli.app, [*service["command"][:2], "--help"], prog_name="halflife")
    assert told.exit_code == 0
    assert service["command"][:2] == ["kibana", "load"]
    assert set(service["environment"]) == {"HALFLIFE_KIBANA_USERNAME", "HALFLIFE_KIBANA_PASSWORD"}


def test_the_api_reaches_its_neighbours() -> None:
    seen = environment_of("api", example_environment())
    [mount] = SERVICES["api"]["volumes"]
    assert mount == f"api-secrets:{seen['HALFLIFE_SECRETS_DIR']}:ro"
    assert seen["HALFLIFE_ELASTICSEARCH_CA"] == f"{seen['HALFLIFE_SECRETS_DIR']}/ca.crt"
    assert seen["HALFLIFE_EMBEDDING_QUERY_PREFIX"] == "query: "
    assert seen["HALFLIFE_EMBEDDING_DOCUMENT_PREFIX"] == "passage: "
    host, port = re.fullmatch(r"http://(\w+):(\d+)/v1", seen["HALFLIFE_EMBEDDING_BASE_URL"]).groups()  # type: ignore[union-attr]
    assert port in SERVICES[host]["expose"]
    assert port in SERVICES[host]["command"]
    assert SERVICES["api"]["ports"][0].endswith(f":{seen['HALFLIFE_PORT']}")
    empty_prefix = environment_of("api", {**example_environment(), "HALFLIFE_EMBEDDING_QUERY_PREFIX": ""})
    assert empty_prefix["HALFLIFE_EMBEDDING_QUERY_PREFIX"] == ""


def test_the_api_understands_its_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = environment_of("api", example_environment())
    folder = given["HALFLIFE_SECRETS_DIR"]
    known = set(Settings.model_fields) | {"secrets_dir"}
    assert {name.removeprefix("HALFLIFE_").lower() for name in given} <= known
    (tmp_path / "halflife_elasticsearch_api_key").write_text("a2V5\n")
    (tmp_path / "ca.crt").write_text("no setting")
    for name, value in given.items():
        monkeypatch.setenv(name, value.replace(folder, str(tmp_path)))
    read = Settings()
    assert (read.port, read.embedding_dims) == (8080, 384)
    assert read.elasticsearch_api_key is not None
    assert read.elasticsearch_api_key.get_secret_value() == "a2V5"
    assert read.elasticsearch_ca == str(tmp_path / "ca.crt")
    assert read.search_log_rate == 0
    assert read.embedding_query_prefix == "query: "


FILLED_IN: dict[str, dict[str, str]] = {
    "as it is shipped": {},
    "a reranker and a rewriter without keys": {
        "HALFLIFE_RERANK_URL": "http://reranker:8002", "HALFLIFE_REWRITE_URL": "http://chat:8003/v1",
        "HALFLIFE_REWRITE_MODEL": "chat",
    },
    "everything blank that may be": {
        name: "" for name in example_environment() if not re.search("PASSWORD|ENCRYPTION|SECRET", name)
    },
}  # fmt: skip


@pytest.mark.parametrize("given", FILLED_IN.values(), ids=FILLED_IN)
async def test_the_api_opens_its_clients_with_what_it_gets(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = environment_of("api", {**example_environment(), **given})
    (tmp_path / "halflife_elasticsearch_api_key").write_text("a2V5\n")
    (tmp_path / "ca.crt").write_text(certifi.contents())
    for name, value in seen.items():
        monkeypatch.setenv(name, value.replace(seen["HALFLIFE_SECRETS_DIR"], str(tmp_path)))
    settings = read_settings()
    await open_cluster(settings).close()
    await open_embedder(settings).close()
    for helper in (open_reranker(settings), open_rewriter(settings)):
        assert (helper is not None) == bool(given.get("HALFLIFE_RERANK_URL"))
        if helper is not None:
            await helper.close()
    assert settings.rerank_model is None
    assert not settings.keyed
    with pytest.raises(StartFailed, match="no keys are configured"):
        refuse_without_keys(settings.host, settings)


# The setup service


class Cluster:
    """Stands where Elasticsearch's security API would; keeps what it was sent."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str, Any]] = []
        self.status = 200
        self.good_keys: set[str] = set()
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                login = self.headers["Authorization"]
                if login.startswith("Basic "):
                    login = base64.b64decode(login.removeprefix("Basic ")).decode()
                cluster.requests.append((self.command, self.path, login, json.loads(body) if body else None))
                key = {"id": "x", "name": "halflife-api", "api_key": "y", "encoded": "bmV3LWtleQ=="}
                told = json.dumps(
                    key if (self.command, self.path) == ("POST", "/_security/api_key") else {}
                ).encode()
                good = login in cluster.good_keys or not login.startswith("ApiKey ")
                self.send_response(cluster.status if good else 401)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 - the base class's names

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


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The volumes of the jobs that run once, and programs that stand in for what only their image or root has."""
    for name in ("ca", "certificates", "authority", "secrets", "snapshots", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "authority" / "ca.crt").write_text("the CA")
    chown = tmp_path / "bin" / "chown"
    chown.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/chown.log\n')
    certutil = tmp_path / "bin" / "certutil"
    certutil.write_text(CERTUTIL.format(python=sys.executable, log=tmp_path / "certutil.log"))
    for program in (chown, certutil):
        program.chmod(0o755)
    return tmp_path


# Answers as elasticsearch-certutil does: a ZIP archive with a folder in it.
CERTUTIL = """#!{python}
import sys, zipfile
arguments = sys.argv[1:]
open("{log}", "a").write(" ".join(arguments) + chr(10))
name = "ca" if arguments[0] == "ca" else "elasticsearch"
with zipfile.ZipFile(arguments[arguments.index("--out") + 1], "w") as archive:
    archive.writestr(name + "/" + name + ".crt", "certificate of " + name)
    archive.writestr(name + "/" + name + ".key", "key of " + name)
"""


def run_job(name: str, folders: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a job as its container would, its volumes and root's programs replaced."""
    if not all(map(shutil.which, ("bash", "curl", "unzip"))):
        pytest.skip("needs bash, curl and unzip, which the Elasticsearch image has and this machine has not")
    service = SERVICES[name]
    places = {
        "CA": "ca", "CERTIFICATES": "certificates", "AUTHORITY": "authority", "SECRETS": "secrets",
        "SNAPSHOTS": "snapshots", "CERTUTIL": "bin/certutil",
    }  # fmt: skip
    environment = environment_of(name, {**example_environment(), **changed})
    environment |= {key: str(folders / place) for key, place in places.items() if key in environment}
    environment |= {key: value for key, value in changed.items() if key == "ELASTICSEARCH_URL"}
    return subprocess.run(
        ["bash", *service["entrypoint"][1:], *(part.replace("$$", "$") for part in service["command"])],
        env={"PATH": f"{folders / 'bin'}:/usr/local/bin:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def run_setup(cluster: Cluster, folders: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    """Run the setup service's script as its container would."""
    return run_job("setup", folders, ELASTICSEARCH_URL=cluster.url, **changed)


API_KEY = {
    "name": "halflife-api",
    "role_descriptors": {
        "halflife-api": {
            "cluster": ["monitor", "manage_index_templates"],
            "indices": [{"names": ["halflife-*", "halflife_*"], "privileges": ["read", "write", "manage"]}],
        }
    },
    "metadata": {"service": "halflife"},
}


def test_setup_gives_kibana_its_password_and_makes_the_key(cluster: Cluster, folders: Path) -> None:
    ended = run_setup(cluster, folders, ELASTIC_PASSWORD="secret-1")
    assert ended.returncode == 0, ended.stderr
    login = "elastic:secret-1"
    assert cluster.requests == [
        ("POST", "/_security/user/kibana_system/_password", login, {"password": "change-me-kibana"}),
        ("DELETE", "/_security/api_key", login, {"name": "halflife-api"}),
        ("POST", "/_security/api_key", login, API_KEY),
    ]
    secrets = folders / "secrets"
    assert (secrets / "halflife_elasticsearch_api_key").read_text() == "bmV3LWtleQ=="
    assert (secrets / "ca.crt").read_text() == "the CA"
    assert (secrets / "halflife_elasticsearch_api_key").stat().st_mode & 0o777 == 0o400
    assert "-R 10001:10001" in (folders / "chown.log").read_text()
    assert "bmV3LWtleQ==" not in ended.stdout + ended.stderr


def test_setup_keeps_a_key_that_is_good(cluster: Cluster, folders: Path) -> None:
    (folders / "secrets" / "halflife_elasticsearch_api_key").write_text("b2xkLWtleQ==")
    cluster.good_keys = {"ApiKey b2xkLWtleQ=="}
    assert run_setup(cluster, folders).returncode == 0
    assert cluster.requests[1:] == [("GET", "/_security/_authenticate", "ApiKey b2xkLWtleQ==", None)]
    assert (folders / "secrets" / "halflife_elasticsearch_api_key").read_text() == "b2xkLWtleQ=="


def test_setup_replaces_a_key_that_is_not(cluster: Cluster, folders: Path) -> None:
    (folders / "secrets" / "halflife_elasticsearch_api_key").write_text("b2xkLWtleQ==")
    assert run_setup(cluster, folders).returncode == 0
    assert [(method, path) for method, path, *_ in cluster.requests[1:]] == [
        ("GET", "/_security/_authenticate"),
        ("DELETE", "/_security/api_key"),
        ("POST", "/_security/api_key"),
    ]
    assert (folders / "secrets" / "halflife_elasticsearch_api_key").read_text() == "bmV3LWtleQ=="


def test_certificates_are_made_once(folders: Path) -> None:
    ended = run_job("certificates", folders)
    assert ended.returncode == 0, ended.stderr
    made = {path.name: path.read_text() for path in (folders / "certificates").iterdir()}
    assert made == {
        "ca.crt": "certificate of ca", "elasticsearch.crt": "certificate of elasticsearch",
        "elasticsearch.key": "key of elasticsearch",
    }  # fmt: skip
    assert {path.name for path in (folders / "ca").iterdir()} == {"ca.crt", "ca.key"}
    [told] = (folders / "authority").iterdir()
    assert (told.name, told.read_text(), told.stat().st_mode & 0o777) == (
        "ca.crt",
        "certificate of ca",
        0o444,
    )
    calls = (folders / "certutil.log").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["ca", "cert"]
    assert run_job("certificates", folders).returncode == 0
    assert (folders / "certutil.log").read_text().splitlines() == calls


def test_a_new_ca_makes_a_new_certificate(folders: Path) -> None:
    assert run_job("certificates", folders).returncode == 0
    for path in (folders / "ca").iterdir():
        path.unlink()
    assert run_job("certificates", folders).returncode == 0
    calls = [line.split()[0] for line in (folders / "certutil.log").read_text().splitlines()]
    assert calls == ["ca", "cert", "ca", "cert"]


# What the API's key may do


ACTIONS = {
    "/": ["cluster:monitor/main"],
    "_cluster": ["cluster:monitor/health"],
    "_nodes": ["cluster:monitor/nodes/stats"],
    "/_msearch": ["indices:data/read/msearch", "indices:data/read/search"],
    "_search": ["indices:data/read/search"],
    "_count": ["indices:data/read/search"],
    "_pit": ["indices:data/read/open_point_in_time"],
    "/_pit": ["indices:data/read/close_point_in_time"],
    "_mget": ["indices:data/read/mget", "indices:data/read/get"],
    "_analyze": ["indices:admin/analyze"],
    "/_bulk": [
        "indices:data/write/bulk", "indices:data/write/index", "indices:data/write/delete",
        "indices:admin/auto_create",
    ],
    "_alias": ["indices:admin/aliases/get"],
    "/_aliases": ["indices:admin/aliases"],
    "_mapping": ["indices:admin/mappings/get", "indices:admin/mapping/put"],
    "_settings": ["indices:monitor/settings/get", "indices:admin/settings/update"],
    "_block": ["indices:admin/block/add"],
    "_refresh": ["indices:admin/refresh"],
    "_stats": ["indices:monitor/stats"],
    "_component_template": [
        "cluster:admin/component_template/get", "cluster:admin/component_template/put",
        "cluster:admin/component_template/delete",
    ],
    "_index_template": [
        "indices:admin/index_template/get", "indices:admin/index_template/put",
        "indices:admin/index_template/delete",
    ],
    "_simulate_index": ["indices:admin/index_template/simulate_index"],
}  # fmt: skip
"""Each API that app/elastic.py calls -> the actions behind it, as Elasticsearch names them in its audit log."""
INDICES = ["indices:admin/create", "indices:admin/delete", "indices:admin/get"]
"""Behind the calls whose path is an index alone."""

GRANTS = {
    "monitor": ["cluster:monitor/*"],
    "manage_index_templates": [
        "indices:admin/template/*", "indices:admin/index_template/*", "cluster:admin/component_template/*",
    ],
    "read": ["indices:data/read/*"],
    "write": ["indices:data/write/*"],
    "manage": ["indices:admin/*", "indices:monitor/*"],
}  # fmt: skip
"""What the named privileges allow, of what concerns us."""


def called_apis() -> set[str]:
    """Return the APIs that the one door to Elasticsearch calls, read from its source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "app" / "elastic.py").read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        texts = [
            each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        if name == "_path":
            found |= {text for text in texts if text.startswith("_")}
        elif name in ("_call", "_read", "_acknowledged"):
            found |= {text for text in texts if text.startswith("/")}
    return found


def test_the_key_may_do_what_the_service_does_and_no_kind_of_thing_more() -> None:
    assert called_apis() == set(ACTIONS), "a call is new or gone: say which actions are behind it"
    role = API_KEY["role_descriptors"]["halflife-api"]  # type: ignore[index]
    granted = [*role["cluster"], *role["indices"][0]["privileges"]]
    wanted = [action for actions in ACTIONS.values() for action in actions] + INDICES
    for action in wanted:
        assert any(fnmatch(action, pattern) for name in granted for pattern in GRANTS[name]), action
    for name in granted:
        assert any(fnmatch(action, pattern) for action in wanted for pattern in GRANTS[name]), (
            f"{name} is not needed"
        )


@pytest.mark.parametrize(
    "index",
    [
        names.index_name("handbook", datetime(2026, 1, 31, tzinfo=UTC)), names.read_alias("handbook"),
        names.write_alias("handbook", 1), names.own_index("state"), names.own_index("searches"),
        names.own_dated_index("searches", datetime(2026, 1, 31, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_the_key_reaches_every_name_that_is_ours(index: str) -> None:
    patterns = API_KEY["role_descriptors"]["halflife-api"]["indices"][0]["names"]  # type: ignore[index]
    assert any(fnmatch(index, pattern) for pattern in patterns)
    assert not any(fnmatch(index.removeprefix("halflife"), pattern) for pattern in patterns)


@pytest.mark.parametrize(
    "password, told",
    [("short", "fewer than 6"), ('quo"te-inside', "letters, digits"), ("dollar$sign", "letters, digits")],
)
def test_setup_refuses_a_password_that_would_break(
    cluster: Cluster, folders: Path, password: str, told: str
) -> None:
    ended = run_setup(cluster, folders, KIBANA_PASSWORD=password)
    assert ended.returncode == 1
    assert told in ended.stderr
    assert cluster.requests == []


def test_setup_fails_when_the_cluster_refuses(cluster: Cluster, folders: Path) -> None:
    cluster.status = 401
    ended = run_setup(cluster, folders)
    assert ended.returncode != 0
    assert "ELASTIC_PASSWORD in .env is not what it has" in ended.stderr
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
