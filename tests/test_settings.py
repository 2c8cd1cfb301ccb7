"""The environment as it is read: blank variables, folders of secrets, errors that name the variable, further models."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.main import check_doors, create_app
from app.settings import EMPTY_IS_A_CHOICE, Settings
from scripts import doctor
from scripts.distribution import said
from scripts.serving import COMMANDS_READ, StartFailed, check_settings, listen, read_settings, without_effect

NAMES = sorted(Settings.model_fields)


def variable(name: str) -> str:
    return f"HALFLIFE_{name.upper()}"


@pytest.mark.parametrize("blank", ["", " ", "\t"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in EMPTY_IS_A_CHOICE])
def test_a_blank_variable_is_one_left_out(name: str, blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), blank)
    assert read_settings() == Settings.model_construct()
    assert not said(variable(name))


def test_an_empty_prefix_is_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EMPTY_IS_A_CHOICE:
        monkeypatch.setenv(variable(name), "")
    read = read_settings()
    assert (read.embedding_query_prefix, read.embedding_document_prefix) == ("", "")
    monkeypatch.setenv("HALFLIFE_EMBEDDING_QUERY_PREFIX", "ask: ")
    assert read_settings().embedding_query_prefix == "ask: "


def test_a_blank_variable_leaves_the_word_to_the_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "halflife_keys").write_text("[]\n")
    (tmp_path / "halflife_embedding_api_key").write_text("\n")
    monkeypatch.setenv("HALFLIFE_KEYS", "")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(tmp_path))
    read = read_settings()
    assert read.keys == "[]"
    assert read.embedding_api_key is None
    monkeypatch.setenv("HALFLIFE_KEYS", '[{"id": "a"}]')
    assert read_settings().keys == '[{"id": "a"}]'
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", "")
    assert read_settings().keyed


def test_names_that_are_no_settings_are_told(tmp_path: Path) -> None:
    (tmp_path / "halflife_embedding_api_kye").write_text("x")
    (tmp_path / "halflife_keys").write_text("[]")
    (tmp_path / "somebody_elses").write_text("x")
    given = {
        "HALFLIFE_EMBEDING_MODEL": "x",
        "HALFLIFE_MOON": "full",
        "HALFLIFE_RATE_PER_S": "1",
        "halflife_host": "::1",
        "HALFLIFE_DATA": ".",
        "HALFLIFE_TEST_CACHE": ".",
        "HALFLIFE_SECRETS_DIR": str(tmp_path),
        # What Kubernetes tells of services called halflife and halflife-api.
        "HALFLIFE_SERVICE_HOST": "10.0.0.1",
        "HALFLIFE_SERVICE_PORT_HTTP": "8080",
        "HALFLIFE_API_PORT": "tcp://10.0.0.1:8080",
        "HALFLIFE_PORT_8080_TCP_ADDR": "10.0.0.1",
        "PATH": "/bin",
    }
    assert without_effect(given) == [
        "HALFLIFE_EMBEDING_MODEL is no setting and has no effect: is HALFLIFE_EMBEDDING_MODEL meant?",
        "HALFLIFE_MOON is no setting and has no effect",
        "the secret halflife_embedding_api_kye is no setting and has no effect: is halflife_embedding_api_key meant?",
        "the secret somebody_elses is no setting and has no effect",
    ]
    assert without_effect({"HALFLIFE_SECRETS_DIR": str(tmp_path / "none")}) == []


SLIPS: dict[str, str | None] = {
    "halflife-max-window": "halflife_max_window",
    "max_window": "halflife_max_window",
    "halfife_cursor_secret": "halflife_cursor_secret",
    "HALFLIFE_ELASTICSEARCH_APIKEY": "halflife_elasticsearch_api_key",
    "halflife_cursor_secret.txt": "halflife_cursor_secret",
    # No setting is like these; that all begin alike is no likeness.
    "halflife_url": None,
    "halflife_data": None,
    "README": None,
}


@pytest.mark.parametrize("name, meant", SLIPS.items(), ids=SLIPS)
def test_a_slip_in_the_folder_of_secrets_is_told(name: str, meant: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "kubernetes.io").mkdir()
    told = f"the secret {name} is no setting and has no effect" + (f": is {meant} meant?" if meant else "")
    assert without_effect({"HALFLIFE_SECRETS_DIR": str(tmp_path)}) == [told]


def test_the_doctors_remedy_is_for_where_the_slip_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def nothing(_: Any) -> list[doctor.Check]:
        return []

    (tmp_path / "slip").write_text("x")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("HALFLIFE_PORTAL", "x")
    monkeypatch.setattr(doctor, "_settings", lambda data: (None, doctor.Check("settings", "ok", "these")))
    monkeypatch.setattr(doctor, "_api_url", lambda data: None)
    monkeypatch.setattr(doctor, "_check_api", lambda url: None)
    monkeypatch.setattr(doctor, "_examine", nothing)
    _, variable, secret = doctor.examine(None)
    assert variable.detail == "HALFLIFE_PORTAL is no setting and has no effect"
    assert "out of the environment" in (variable.remedy or "")
    assert "the secret slip is no setting" in secret.detail
    assert "out of the folder of secrets" in (secret.remedy or "")


def test_every_variable_of_ours_is_known() -> None:
    """What the code, the image and the compose file name is a setting, or in the list of what commands read."""
    root = Path(__file__).resolve().parent.parent
    files = [*root.glob("app/**/*.py"), *root.glob("scripts/**/*.py"), *root.glob("docs/*.md")]
    files += [root / name for name in ("README.md", "Dockerfile", "docker-compose.yml", ".env.example")]
    named = {
        name
        for file in files
        for name in re.findall(r"HALFLIFE_[A-Z0-9_]*[A-Z0-9]\b", file.read_text("utf-8"))
    }
    assert len(named) > 50
    assert without_effect(dict.fromkeys(named, "")) == []
    assert named >= COMMANDS_READ - {
        f"HALFLIFE_KIBANA_{name}" for name in ("API_KEY", "PASSWORD", "USERNAME")
    }


@pytest.mark.parametrize("linked", ["tcp://10.0.0.1:8080", "udp://10.0.0.1:8080"])
def test_the_address_of_a_service_is_not_the_port_to_listen_at(
    linked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_PORT", linked)
    assert read_settings().port == Settings.model_construct().port


UNUSABLE: dict[str, tuple[str, str, str]] = {
    "a number that is none": ("HALFLIFE_PORT", "x", "HALFLIFE_PORT: Input should be a valid integer"),
    "models that are no JSON": ("HALFLIFE_EMBEDDING_MODELS", "{", "HALFLIFE_EMBEDDING_MODELS: this is not JSON"),
    "a model without its address": (
        "HALFLIFE_EMBEDDING_MODELS", '{"m": {}}', "HALFLIFE_EMBEDDING_MODELS: m: url: Field required",
    ),
    "no folder": ("HALFLIFE_SECRETS_DIR", "missing", "HALFLIFE_SECRETS_DIR: there is no folder missing"),
}  # fmt: skip


@pytest.mark.parametrize("name, value, told", UNUSABLE.values(), ids=UNUSABLE)
def test_what_cannot_be_used_is_told_by_its_name(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequest) as refused:
        read_settings()
    assert told in refused.value.detail


def test_settings_that_contradict_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFLIFE_KEYS", "[]")
    monkeypatch.setenv("HALFLIFE_KEYS_FILE", "keys.json")
    with pytest.raises(InvalidRequest, match="used: give HALFLIFE_KEYS or HALFLIFE_KEYS_FILE, not both"):
        read_settings()


def test_a_secret_that_is_no_text_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "halflife_cursor_secret").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(tmp_path))
    with pytest.raises(InvalidRequest, match=r"the file of cursor_secret can't be read \(it is not UTF-8\)"):
        read_settings()


def test_a_secret_that_may_not_be_read_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", "halflife_cursor_secret")

    (tmp_path / "halflife_cursor_secret").write_text("s")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(tmp_path))
    # Who runs as root may read everything.
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(
        InvalidRequest, match=r"the file of cursor_secret can't be read \(Permission denied\)"
    ):
        read_settings()


def _dangling(path: Path) -> None:
    path.symlink_to("..data/halflife_keys")


def _endless(path: Path) -> None:
    path.symlink_to(path.name)


def _outside(path: Path) -> None:
    (path.parent.parent / "elsewhere").write_text("[]")
    path.symlink_to("../elsewhere")


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to nothing": (_dangling, "halflife_keys is a link to ..data/halflife_keys, where nothing is"),
    "a link to itself": (_endless, "halflife_keys is a link that can't be followed"),
    "a link out of the folder": (_outside, "halflife_keys is a link out of the folder"),
    "a folder": (Path.mkdir, "halflife_keys is a folder"),
    "a pipe": (os.mkfifo, "halflife_keys is no file"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make, told", NO_FILES.values(), ids=NO_FILES)
def test_a_secret_that_is_no_file_of_the_folder_is_told_by_its_name(
    make: Callable[[Path], None], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    make(folder / "halflife_keys")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(folder))
    with pytest.raises(InvalidRequest) as refused:
        read_settings()
    assert f"HALFLIFE_SECRETS_DIR: {told}" in refused.value.detail


def test_secrets_are_read_as_kubernetes_mounts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "halflife_keys").write_text("[]")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "halflife_keys").symlink_to("..data/halflife_keys")
    monkeypatch.setenv("HALFLIFE_SECRETS_DIR", str(tmp_path))
    assert read_settings().keys == "[]"
    assert without_effect({"HALFLIFE_SECRETS_DIR": str(tmp_path)}) == []


NO_DOOR: dict[str, tuple[dict[str, str], str]] = {
    "a key with a line end inside": ({"ELASTICSEARCH_API_KEY": "a\nb"}, "HALFLIFE_ELASTICSEARCH_API_KEY: the key holds"),
    "a user that can't be sent": (
        {"ELASTICSEARCH_USERNAME": "é", "ELASTICSEARCH_PASSWORD": "p"}, "HALFLIFE_ELASTICSEARCH_USERNAME: it holds",
    ),
    "a password that can't be sent": (
        {"ELASTICSEARCH_USERNAME": "u", "ELASTICSEARCH_PASSWORD": "é"}, "HALFLIFE_ELASTICSEARCH_PASSWORD: it holds",
    ),
    "a CA that is not there": (
        {"ELASTICSEARCH_URL": "https://a", "ELASTICSEARCH_CA": "missing"}, "HALFLIFE_ELASTICSEARCH_CA: there is no file missing",
    ),
    "a CA that is none": (
        {"ELASTICSEARCH_URL": "https://a", "ELASTICSEARCH_CA": __file__}, "HALFLIFE_ELASTICSEARCH_CA describe can't",
    ),
    "no address": ({"ELASTICSEARCH_URL": "a:9200"}, "HALFLIFE_ELASTICSEARCH_URL: 'a:9200' is not an address"),
    "an embedder's address": ({"EMBEDDING_BASE_URL": "foo"}, "HALFLIFE_EMBEDDING_BASE_URL: the address must start"),
    "dims to ask for that are not said": (
        {"EMBEDDING_SEND_DIMENSIONS": "true"}, "HALFLIFE_EMBEDDING_SEND_DIMENSIONS needs HALFLIFE_EMBEDDING_DIMS",
    ),
    "a rewriter's address": ({"REWRITE_URL": "a", "REWRITE_MODEL": "m"}, "HALFLIFE_REWRITE_URL: the address must"),
    "a rewriter without a model": ({"REWRITE_URL": "http://a/v1"}, "HALFLIFE_REWRITE_MODEL is not"),
    "a space around a key": ({"EMBEDDING_API_KEY": "key "}, "HALFLIFE_EMBEDDING_API_KEY: the key holds"),
    "a reranker's address": ({"RERANK_URL": "a"}, "HALFLIFE_RERANK_URL: the address must start with"),
    "a collector's address": ({"TRACES_ENDPOINT": "a"}, "HALFLIFE_TRACES_ENDPOINT: the address must start with"),
}  # fmt: skip


@pytest.mark.parametrize("given, told", NO_DOOR.values(), ids=NO_DOOR)
async def test_a_setting_that_cannot_work_ends_the_start_in_words(
    given: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(f"HALFLIFE_{name}", value)
    # What `up` asks before it starts anything says the same.
    with pytest.raises(InvalidRequest) as checked:
        await check_doors(read_settings())
    assert told in f"{checked.value.detail}; {checked.value.remedy}"

    async def start() -> None:
        app = create_app(read_settings())
        async with app.router.lifespan_context(app):
            pass

    with pytest.raises(InvalidRequest) as refused:
        await start()
    assert told in f"{refused.value.detail}; {refused.value.remedy}"


async def test_a_further_models_address_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFLIFE_EMBEDDING_MODELS", '{"other": {"url": "foo"}}')
    with pytest.raises(InvalidRequest, match="HALFLIFE_EMBEDDING_MODELS: other: url: the address must start"):
        await check_doors(read_settings())


async def test_traces_that_nothing_can_send_are_told_with_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.setenv("HALFLIFE_TRACES_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(InvalidRequest, match="HALFLIFE_TRACES_ENDPOINT: what sends traces is not installed"):
        await check_doors(read_settings())


@pytest.mark.parametrize("host", ["foo.invalid", "999.1.1.1", ".", "192.0.2.1"])
def test_a_host_that_cannot_be_listened_on_is_told_as_such(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_HOST", host)
    with pytest.raises(StartFailed, match=f"can't listen on {host} ") as refused:
        check_settings()
    assert "HALFLIFE_HOST" in (refused.value.remedy or "")


def test_an_address_to_listen_on_that_cannot_be_had_is_told_with_what_helps() -> None:
    with pytest.raises(StartFailed) as unknown:
        listen("192.0.2.1", 0)  # of no machine: it is for documentation
    assert "HALFLIFE_HOST" in (unknown.value.remedy or "")
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(StartFailed) as busy:
            listen("127.0.0.1", taken.getsockname()[1])
    assert "stop the program" in (busy.value.remedy or "")


def test_chunks_that_a_model_does_not_read_to_their_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().unread_chunks == []
    monkeypatch.setenv("HALFLIFE_CHUNK_TOKENS", "1000")
    models = {
        "long": {"url": "http://a/v1", "max_input_tokens": 8192},
        "short": {"url": "http://b/v1", "max_input_tokens": 256},
    }
    monkeypatch.setenv("HALFLIFE_EMBEDDING_MODELS", json.dumps(models))
    first, second = read_settings().unread_chunks
    assert "multilingual-e5-small reads 512" in first
    assert "short reads 256" in second
    monkeypatch.setenv("HALFLIFE_CHUNK_TOKENS", "256")
    assert read_settings().unread_chunks == []


def test_an_upload_of_the_largest_file_has_room_for_the_form_around_it() -> None:
    assert Settings().file_max_bytes + 2**16 <= Settings().max_body_bytes


def test_a_further_model_has_nothing_of_the_first_but_what_it_cannot_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HALFLIFE_EMBEDDING_API_KEY", "first")
    monkeypatch.setenv("HALFLIFE_EMBEDDING_DIMS", "384")
    monkeypatch.setenv("HALFLIFE_EMBEDDING_MAX_INPUT_TOKENS", "100")
    monkeypatch.setenv("HALFLIFE_EMBEDDING_MAX_BATCH", "7")
    monkeypatch.setenv(
        "HALFLIFE_EMBEDDING_MODELS",
        json.dumps({"other": {"url": "http://a/v1", "api_key": "", "model": " "}}),
    )
    read = read_settings()
    other = read.with_model("other")
    assert other.embedding_base_url == "http://a/v1"
    assert (other.embedding_query_prefix, other.embedding_document_prefix) == ("", "")
    assert (other.embedding_api_key, other.embedding_dims) == (None, None)
    assert (other.embedding_max_input_tokens, other.embedding_max_batch) == (100, 7)
    assert read.embedding_models["other"].model is None
