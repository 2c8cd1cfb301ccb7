"""Keys: what a list of them says, which token is which, the file that is read again, the commands that edit it."""

import hmac
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.collection import Collection, DeclaredType
from app.documents import declared_values
from app.errors import InvalidRequest
from app.filters import confined, holds, marks, parse_filter
from app.keyfile import KeyFile, warn_of_none
from app.keys import Keyring, bearer, fence, hash_of, parse_keys
from app.main import create_app
from app.settings import Settings
from scripts import cli
from scripts.client import ApiError, Client
from scripts.serving import StartFailed, refuse_without_keys
from tests.fakes import FarEnd, Reply

NOW = 1_800_000_000_000
COLLECTION = Collection(
    name="c", index="i", dims=8, similarity="cosine", declared={"level": "long"}, template_version=1
)


def entry(**changes: Any) -> dict[str, Any]:
    return {"id": "k", "hash": hash_of("secret"), "scopes": ["read"], "collections": ["a-*"], **changes}


def ring(*entries: dict[str, Any]) -> Keyring:
    return Keyring(parse_keys(json.dumps(list(entries)), where="keys"))


# --- reading a list ----------------------------------------------------------------------------------------------------

BAD_LISTS: dict[str, tuple[Any, str]] = {
    "not json": ("{", "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "a word": ('"x"', "holds no list of keys"),
    "no list": ({"keys": {}}, "holds no list of keys"),
    "no object": (["x"], "key 1"),
    "a token for its hash": ([entry(hash="hlf_secret")], "`hash`"),
    "unknown scope": ([entry(scopes=["root"])], "`scopes.0`"),
    "no scope": ([entry(scopes=[])], "`scopes`"),
    "no collection": ([entry(collections=[])], "`collections`"),
    "a collection's name": ([entry(collections=["A"])], "`collections.0`"),
    "unknown field": ([entry(filters={})], "`filters`"),
    "empty filter": ([entry(filter={})], "would allow everything"),
    "no filter": ([entry(filter={"bool": {"must": []}})], "`filter.bool`"),
    "a query": ([entry(filter={"script": {"source": "true"}})], "`filter.script`"),
    "a filter for an admin": ([entry(scopes=["admin"], filter={"a": "b"})], "reach past the filter"),
    "two of an id": ([entry(), entry(hash=hash_of("other"))], "the same id"),
    "two of a token": ([entry(), entry(id="other")], "the same hash"),
    "an id": ([entry(id="a b")], "`id`"),
    "a date": ([entry(expires="soon")], "`expires`"),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_a_bad_list_is_told_without_what_stands_in_it(name):
    given, told = BAD_LISTS[name]
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(InvalidRequest) as refused:
        parse_keys(text, where="keys")
    assert told in refused.value.detail
    assert refused.value.remedy
    assert "hlf_secret" not in str(refused.value.problem())


def test_a_filter_may_name_what_a_collection_declares():
    [key] = parse_keys(json.dumps([entry(filter={"level": {"gte": 3}})]), where="keys")
    kept = fence(key, COLLECTION)
    assert kept is not None
    # It looks at metadata: in another index, which may declare other keys, it holds for nothing.
    assert kept.clauses == ({"range": {"declared.level": {"gte": 3}}}, {"term": {"_index": "i"}})
    with pytest.raises(InvalidRequest):
        fence(key, COLLECTION.model_copy(update={"declared": {}}))


# --- which key a token is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [
    b"", b"secre", b"secretx", b"Secret", hash_of("secret").encode(), "sécret".encode(), "秘密".encode(), b"\xff\xfe\x00",
    b"secret" * 100_000,
])  # fmt: skip
def test_only_the_token_is_the_token(token):
    keys = ring(entry(), entry(id="other", hash=hash_of("sécret, another")))
    assert keys.find(token, now_ms=NOW) is None
    assert keys.find(b"secret", now_ms=NOW).id == "k"  # type: ignore[union-attr]
    assert keys.find("sécret, another".encode(), now_ms=NOW).id == "other"  # type: ignore[union-attr]


def test_every_hash_is_compared_in_constant_time(monkeypatch):
    compared: list[bytes] = []
    honest = hmac.compare_digest

    def noting(given: bytes, held: bytes) -> bool:
        compared.append(held)
        return honest(given, held)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    keys = ring(*(entry(id=f"k{at}", hash=hash_of(f"{at}")) for at in range(5)))
    assert keys.find(b"0", now_ms=NOW) is not None
    assert len(compared) == 5
    assert all(isinstance(each, bytes) for each in compared)


def test_a_key_expires():
    keys = ring(entry(expires="2027-01-15T08:00:00Z"))
    assert keys.find(b"secret", now_ms=NOW - 1) is not None
    assert keys.find(b"secret", now_ms=NOW) is None


@pytest.mark.parametrize("headers, token", [
    ([], None),
    ([(b"authorization", b"Bearer abc")], b"abc"),
    ([(b"Authorization", b"bearer  abc ")], b"abc"),
    ([(b"authorization", b"Bearer")], None),
    ([(b"authorization", b"Bearer  ")], None),
    ([(b"authorization", b"Basic abc")], None),
    ([(b"authorization", b"Bearer \xff")], b"\xff"),
    ([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")], None),
])  # fmt: skip
def test_the_header(headers, token):
    assert bearer(headers) == token


def test_what_a_key_allows():
    [key, metrics, admin] = parse_keys(
        json.dumps([
            entry(collections=["a-*", "exact", "b?"]),
            entry(id="m", hash=hash_of("m"), scopes=["metrics"]),
            entry(id="x", hash=hash_of("x"), scopes=["admin"]),
        ]),
        where="keys",
    )  # fmt: skip
    assert [key.reaches(name) for name in ("a-1", "exact", "b1", "a", "exactly", "b12", "xa-1")] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    assert [key.allows(scope) for scope in ("read", "write", "admin", "metrics")] == [
        True,
        False,
        False,
        False,
    ]
    assert [each.allows("metrics") for each in (metrics, admin)] == [True, True]
    assert not admin.allows("read")
    renewed = ring(entry(hash=hash_of("renewed"))).keys[0]
    assert key.tag != renewed.tag
    assert "secret" not in key.tag


# --- wholly inside a filter ---------------------------------------------------------------------------------------------------

INSIDE: dict[str, tuple[dict[str, Any], dict[str, Any], bool, bool]] = {
    "mine": ({"tenant": "a"}, {"metadata": {"tenant": "a"}}, True, True),
    "another's": ({"tenant": "a"}, {"metadata": {"tenant": "b"}}, False, False),
    "nobody's": ({"tenant": "a"}, {}, False, False),
    "both's": ({"tenant": "a"}, {"metadata": {"tenant": ["a", "b"]}}, True, False),
    "both mine": ({"tenant": ["a", "b"]}, {"metadata": {"tenant": ["a", "b"]}}, True, True),
    "in two places": (
        {"department": "hr"},
        {"department": "hr", "metadata": {"department": "it"}},
        True,
        False,
    ),
    "too long to be found": (
        {"tenant": "a"},
        {"metadata": {"tenant": ["a", "b" * 5_000]}},
        True,
        False,
    ),
    "another field too long": (
        {"tenant": "a"},
        {"metadata": {"tenant": "a", "note": "b" * 5_000}},
        True,
        True,
    ),
    "spelt twice": ({"x.y": "a"}, {"metadata": {"x.y": "a", "x": {"y": "b"}}}, True, False),
    "a range": ({"level": {"lt": 3}}, {"declared": {"level": [1, 5]}}, True, False),
    "not": ({"not": {"tenant": "b"}}, {"metadata": {"tenant": ["a", "b"]}}, False, False),
    "or": ({"or": [{"tenant": "a"}, {"tenant": "b"}]}, {"metadata": {"tenant": ["a", "b"]}}, True, False),
    "exists": ({"tenant": {"exists": True}}, {"metadata": {"tenant": ["a", "b"]}}, True, True),
    "dates": ({"creation_time": "2026-01-02"}, {"creation_time": "2026-01-02T10:00:00Z"}, True, True),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_document_is_marked_by_no_more_than_the_filter_asks_for(name):
    given, source, _, whole = INSIDE[name]
    condition = parse_filter(given, declared=COLLECTION.declared)
    found = marks(condition, {**source, "text": "secret", "tags": ["secret"]})
    assert "secret" not in json.dumps(found)
    assert not found or confined(condition, found)
    assert not found or whole
    assert (name in {"mine", "both mine", "dates", "another field too long"}) == bool(found)
    assert "note" not in found.get("metadata", {})


@pytest.mark.parametrize("name", INSIDE)
def test_a_document_lies_inside_with_all_of_its_values(name):
    given, source, some, whole = INSIDE[name]
    condition = parse_filter(given, declared=COLLECTION.declared)
    assert (holds(condition, source), confined(condition, source)) == (some, whole)


@pytest.mark.parametrize(
    "kind, value, given",
    [
        ("keyword", 5, {"k": "5"}),
        ("keyword", [5, True], {"k": ["5", "true"]}),
        ("keyword", "5", {"k": "5"}),
        ("date", 1_769_817_600, {"k": "2026-01-31"}),
        ("date", 1_769_817_600_000, {"k": {"gte": "2026-01-31"}}),
        ("date", "2026-01-31T08:00:00+08:00", {"k": "2026-01-31"}),
        ("long", 5.0, {"k": 5}),
        ("double", 5, {"k": {"lt": 6}}),
        ("boolean", True, {"k": True}),
    ],
)
def test_a_value_counts_without_its_typed_copy_as_with_it(kind, value, given):
    """What is taken because of the copy must be told to be the owner's by a tombstone too, which has none."""
    condition = parse_filter(given, declared={"k": kind})
    written = {"metadata": {"k": value}}
    written["declared"] = declared_values(written["metadata"], {"k": kind})
    assert holds(condition, written)
    assert confined(condition, written)
    assert confined(condition, {"metadata": {"k": value}})
    assert marks(condition, written) == {"metadata": {"k": value}}


def test_a_value_of_another_type_is_none_of_the_field():
    odd: list[tuple[DeclaredType, Any]] = [
        ("long", 10**400), ("double", 10**400), ("long", 1.5), ("date", 5), ("keyword", {})
    ]  # fmt: skip
    for kind, value in odd:
        condition = parse_filter({"k": {"exists": True}}, declared={"k": kind})
        assert not holds(condition, {"metadata": {"k": value}})


# --- the file ------------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, *entries: dict[str, Any]) -> None:
    path.write_text(json.dumps({"keys": list(entries)}))


def test_the_file_is_read_again_when_it_changes(tmp_path, caplog):
    path, clock = tmp_path / "keys.json", Clock()
    write(path, entry())
    keys = KeyFile(path, clock=clock)

    def known(token: bytes) -> bool:
        return keys().find(token, now_ms=NOW) is not None

    assert known(b"secret")
    write(path, entry(), entry(id="second", hash=hash_of("second")))
    assert not known(b"second"), "it is looked at once a second at most"
    clock.now += 1
    assert known(b"second")
    with caplog.at_level(logging.ERROR):
        for broken in ("{", '{"keys": 3}', '[{"id": "x"}]'):
            path.write_text(broken)
            clock.now += 1
            assert known(b"second")
            assert keys.fault is not None
        path.unlink()
        clock.now += 1
        assert known(b"second")
        assert "can't be read" in (keys.fault or "")
    assert len(caplog.records) == 4
    assert "second" not in caplog.text
    write(path, entry())
    clock.now += 1
    assert not known(b"second")
    assert known(b"secret")
    assert keys.fault is None
    write(path)
    clock.now += 1
    assert not known(b"secret"), "a file without keys lets nobody in"


@pytest.mark.parametrize("entries, told", [
    ([], "nobody can use the service: the list of keys is empty"),
    ([entry(expires="2027-01-15T08:00:00Z")], "each of the 1 keys has expired"),
    ([entry(), entry(id="old", hash=hash_of("old"), expires="2020-01-01T00:00:00Z")], None),
])  # fmt: skip
def test_keys_none_of_which_is_in_force_are_told(entries, told, tmp_path, caplog):
    warn_of_none(ring(*entries), NOW)
    path, clock = tmp_path / "keys.json", Clock()
    write(path, entry(id="first"))
    keys = KeyFile(path, clock=clock, now_ms=lambda: NOW)
    write(path, *entries)
    clock.now += 1
    keys()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (0 if told is None else 2)
    assert all(str(told) in line for line in warnings)


@pytest.mark.parametrize("text", [None, "", "{", b"\xff".decode("latin-1")])
def test_the_first_file_must_be_right(tmp_path, text):
    path = tmp_path / "keys.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequest):
        create_app(Settings(keys_file=str(path)))


def test_the_list_in_the_settings_must_be_right_too():
    with pytest.raises(InvalidRequest, match="HALFLIFE_KEYS"):
        create_app(Settings(keys="{}"))
    with pytest.raises(ValueError, match="not both"):
        Settings(keys="[]", keys_file="x")


@pytest.mark.parametrize("host, served", [
    ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),  # noqa: S104
    ("::", False),
    ("10.0.0.5", False), ("search.example", False), ("", False), ("127.0.0.1.example", False),
])  # fmt: skip
def test_without_keys_only_loopback_is_served(host, served):
    if served:
        refuse_without_keys(host, Settings())
    else:
        with pytest.raises(StartFailed, match="no keys are configured"):
            refuse_without_keys(host, Settings())
    refuse_without_keys(host, Settings(keys="[]"))


# --- the commands -----------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["keys", *arguments], prog_name="halflife")


def test_a_key_is_made_listed_and_revoked(tmp_path):
    path = tmp_path / "keys.json"
    made = run(
        "create", "team-a", "--scopes", "read,write", "--collections", "shared,a-*", "--filter", '{"tenant": "a"}',
        "--days", "30", "--rate", "5", "--file", str(path),
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    token = made.stdout.strip()
    assert token.startswith("hlf_")
    assert len(token) == 47
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token not in path.read_text()
    run("create", "ops", "--scopes", "admin", "--collections", "*", "--file", str(path))
    keys = KeyFile(path)
    key = keys().find(token.encode(), now_ms=0)
    assert key is not None
    assert (key.id, key.scopes, key.filter, key.rate_per_s) == (
        "team-a",
        ["read", "write"],
        {"tenant": "a"},
        5,
    )
    listed = run("list", "--file", str(path)).stdout
    assert "team-a  read,write  shared,a-*" in listed
    assert "sha256" not in listed
    assert [each["id"] for each in json.loads(run("list", "--json", "--file", str(path)).stdout)] == [
        "team-a",
        "ops",
    ]
    assert run("revoke", "team-a", "--file", str(path)).exit_code == 0
    assert KeyFile(path)().find(token.encode(), now_ms=0) is None
    again = run("revoke", "team-a", "--file", str(path))
    assert again.exit_code == 1
    assert f"no key 'team-a' in {path}\nremedy: see `halflife keys list --file {path}`" in again.output
    nowhere = tmp_path / "none" / "keys.json"
    for refused in (run("list", "--file", str(nowhere)), run("revoke", "x", "--file", str(nowhere))):
        assert refused.exit_code == 1
        assert "there is no " in refused.output
        assert "remedy: " in refused.output


@pytest.mark.parametrize("arguments, told", [
    (("x", "--collections", "c"), "no file of keys is named"),
    (("x", "--collections", "C", "--file", "FILE"), "collections.0"),
    (("x", "--collections", "c", "--scopes", "all", "--file", "FILE"), "scopes.0"),
    (("x", "--collections", "c", "--filter", "{", "--file", "FILE"), "not JSON"),
    (("x", "--collections", "c", "--filter", '{"a": {"like": 1}}', "--file", "FILE"), "unknown operators"),
    (("held", "--collections", "c", "--file", "FILE"), "halflife keys revoke held --file FILE"),
    (("über", "--collections", "c", "--file", "FILE"), "'über' can't be a key's id"),
    (("x", "--collections", "", "--file", "FILE"), "--collections names nothing"),
    (("x", "--collections", "c", "--scopes", " ,", "--file", "FILE"), "--scopes names nothing"),
    (("x", "--collections", "C", "--file", "FILE"), "the new key: `collections.0`"),
    (("x", "--collections", "c", "--file", "FILE/nowhere/keys.json"), "there is no folder FILE/nowhere"),
])  # fmt: skip
def test_a_key_that_can_not_be_leaves_the_file_as_it_was(tmp_path, arguments, told):
    path = tmp_path / "keys.json"
    write(path, entry(id="held"))
    before = path.read_bytes()
    refused = run("create", *(part.replace("FILE", str(path)) for part in arguments))
    assert refused.exit_code == 1
    assert told.replace("FILE", str(path)) in refused.output
    assert "remedy: " in refused.output
    for foreign in ("pattern '", "validation", "or make it with `halflife keys create`"):
        assert foreign not in refused.output
    assert path.read_bytes() == before
    assert "hlf_" not in refused.output


@pytest.mark.parametrize(
    "number", [("--days", "1e9"), ("--days", "nan"), ("--rate", "nan"), ("--rate", "inf")]
)
def test_numbers_that_can_not_be_are_wrong_usage(number):
    refused = run("create", "x", "--collections", "*", "--entry", *number)
    assert refused.exit_code == cli.USAGE, refused.output
    assert number[0] in refused.output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("mode, after", [(0o600, 0o600), (0o640, 0o640), (0o644, 0o640)])
def test_the_file_stays_its_owners(tmp_path, mode, after):
    path = tmp_path / "keys.json"
    write(path, entry(id="held"))
    os.chown(path, 12345, 23456)
    path.chmod(mode)
    assert run("create", "new", "--collections", "*", "--file", str(path)).exit_code == 0
    held = path.stat()
    assert (held.st_uid, held.st_gid, stat.S_IMODE(held.st_mode)) == (12345, 23456, after)
    lock = (tmp_path / ".keys.json.lock").stat()
    assert (lock.st_uid, stat.S_IMODE(lock.st_mode)) == (12345, 0o600)


def test_a_file_that_can_not_be_given_back_is_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "keys.json"
    write(path, entry(id="held"))
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "fstat", lambda handle: os.stat_result((0o100600, 0, 0, 1, 54321, 0, 0, 0, 0, 0)))
    refused = run("revoke", "held", "--file", str(path))
    assert refused.exit_code == 1
    assert "as the file's owner or as root" in refused.output
    assert path.read_bytes() == before


def test_an_entry_for_the_settings(tmp_path):
    made = run("create", "x", "--collections", "*", "--entry")
    token, line = made.stdout.strip().splitlines()
    assert create_app(Settings(keys=line)) is not None
    assert ring(*json.loads(line)).find(token.encode(), now_ms=0) is not None


def test_two_editors_lose_neithers_key(tmp_path):
    path = tmp_path / "keys.json"
    command = [
        sys.executable,
        "-m",
        "scripts.cli",
        "keys",
        "create",
        "NAME",
        "--collections",
        "*",
        "--file",
        str(path),
    ]
    editors = [
        subprocess.Popen([part.replace("NAME", f"k{at}") for part in command], stdout=subprocess.PIPE)
        for at in range(4)
    ]
    for editor in editors:
        editor.communicate(timeout=60)
    assert {key.id for key in KeyFile(path)().keys} == {"k0", "k1", "k2", "k3"}


# --- clients ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, environment, sent", [
    (None, None, None), ("one", None, "Bearer one"), (None, "two", "Bearer two"), ("one", "two", "Bearer one"),
])  # fmt: skip
def test_a_client_sends_the_key(monkeypatch, given, environment, sent):
    if environment is not None:
        monkeypatch.setenv("HALFLIFE_KEY", environment)
    with FarEnd(lambda _: Reply(body=[])) as api, Client(api.url, key=given) as client:
        client.collections()
    assert api.requests[0].headers.get("authorization") == sent


@pytest.mark.parametrize("key", ["schlüssel", "two words", "a\nb"])
def test_a_client_says_what_is_no_key(key):
    with pytest.raises(ApiError, match="the key is not one"):
        Client("http://127.0.0.1:1", key=key)


def test_commands_take_the_key():
    told: Callable[..., Any] = CliRunner().invoke
    for command in ("load", "search", "why", "evaluate"):
        assert "--key" in told(cli.app, [command, "--help"], env={"COLUMNS": "140"}).stdout
