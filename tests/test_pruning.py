"""`halflife load --source NAME --prune` before a real service: what goes, what must stay, and what stops it."""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.keys import hash_of
from scripts import cli, sources
from scripts.client import ApiUnreachable, Client
from scripts.loading import Loader, Tally
from scripts.pruning import Pruned, Pruner
from scripts.sources import Names
from tests.fakes import EmbeddingServer, FarEnd, Reply, Seen
from tests.service import Running, serving, settings_for, until

DIMS = 16
ROOT, TENANT, WRITER = "hlf_token-of-root", "hlf_token-of-a", "hlf_token-of-writer"
KEYS = [
    {"id": "root", "hash": hash_of(ROOT), "scopes": ["read", "write", "admin"], "collections": ["*"]},
    {"id": "a", "hash": hash_of(TENANT), "scopes": ["read", "write"], "collections": ["*"], "filter": {"tenant": "a"}},
    {"id": "writer", "hash": hash_of(WRITER), "scopes": ["write"], "collections": ["*"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def service(node_url: str) -> Iterator[Running]:
    with (
        EmbeddingServer(dims=DIMS) as embedding,
        serving(settings_for(node_url, embedding.base_url, dims=DIMS, keys=json.dumps(KEYS))) as running,
    ):
        running.client.headers["Authorization"] = f"Bearer {ROOT}"
        yield running


@pytest.fixture(scope="module")
def emptied(service: Running) -> Iterator[str]:
    name = f"pruned_{uuid.uuid4().hex[:10]}"
    yield name
    service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


@pytest.fixture
def collection(service: Running, emptied: str) -> str:
    """The collection of all these tests, which is not there for the first and holds nothing for the others."""
    wanted = {"delete_all": True, "refresh": "true"}
    assert service.client.post(f"/v1/collections/{emptied}/documents/delete", json=wanted).status_code in (
        200,
        404,
    )
    return emptied


Load = Callable[..., Any]


@pytest.fixture
def load(service: Running, collection: str) -> Load:
    """Run `halflife load … --source docs --prune` and return its result; `facts` are what --json printed."""

    def run(
        *arguments: Any, source: str | None = "docs", prune: bool = True, key: str = ROOT, **more: Any
    ) -> Any:
        options = ["--source", source] if source else []
        return invoke(
            *map(str, arguments), *options, *(["--prune"] if prune else []), "-c", more.pop("into", collection),
            "--url", service.url, "--key", key, **more,
        )  # fmt: skip

    return run


def invoke(*arguments: str, **more: Any) -> Any:
    return CliRunner().invoke(cli.app, ["load", *arguments], prog_name="halflife", **more)


def stored(service: Running, collection: str) -> list[str]:
    answer = service.client.get(f"/v1/collections/{collection}/documents", params={"size": 1000})
    return [document["id"] for document in answer.json()["documents"]]


def put(service: Running, collection: str, *documents: Mapping[str, Any]) -> None:
    body = {"documents": documents, "refresh": "true"}
    assert service.client.post(f"/v1/collections/{collection}/documents", json=body).json()["failed"] == 0


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


TEN = {f"{number}.md": f"words {number}" for number in range(10)}


def test_what_is_renamed_deleted_or_taken_out_of_a_table_goes(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, {
        "a.md": "a", "b.md": "b", "empty.md": "was not", "sub/d.md": "d", "sub/e.md": "e",
        "faq.csv": "title,text\none,1\ntwo,2\nthree,3\n", "table.csv": "id,text\nr1,x\nr2,y\n",
        "lines.jsonl": '{"id": "l1", "text": "x"}\n{"id": "l2", "text": "y"}\n{"id": "l3", "text": "z"}\n',
    })  # fmt: skip
    first = load(tmp_path, "--json")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["prune"]["had"] == 0
    assert len(stored(service, collection)) == 13
    listed = service.client.get(f"/v1/collections/{collection}/documents").json()["documents"]
    assert {document["source"] for document in listed} == {"docs"}

    (tmp_path / "a.md").rename(tmp_path / "a2.md")
    (tmp_path / "sub/d.md").unlink()
    write(tmp_path, {
        "empty.md": "", "faq.csv": "title,text\none,1\nthree,3\n", "table.csv": "id,text\nr2,y\n",
        "lines.jsonl": '{"id": "l1", "text": "x"}\n{"id": "l3", "text": "z"}\n',
    })  # fmt: skip
    gone = ["a.md", "empty.md", "faq.csv#4", "l2", "r1", "sub/d.md"]
    second = load(tmp_path, "--json")
    assert second.exit_code == 0, second.output
    assert json.loads(second.stdout)["prune"] == {
        "source": "docs", "had": 13, "gone": gone, "deleted": 6, "changed": [], "kept": [], "failures": [],
        "refused": None, "remedy": None,
    }  # fmt: skip
    assert stored(service, collection) == [
        "a2.md", "b.md", "faq.csv#2", "faq.csv#3", "l1", "l3", "r2", "sub/e.md",
    ]  # fmt: skip
    third = load(tmp_path)
    assert third.exit_code == 0
    assert "Pruned 0 of the 8 documents that source 'docs' had\n" in third.stdout


def test_the_summary_names_what_went(load: Load, tmp_path: Path) -> None:
    write(tmp_path, TEN)
    load(tmp_path)
    (tmp_path / "3.md").unlink()
    told = load(tmp_path)
    assert told.exit_code == 0
    assert "9 documents in collection" in told.stdout
    assert "Pruned 1 of the 10 documents that source 'docs' had: 3.md\n" in told.stdout


def test_nothing_is_deleted_without_being_asked(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    load(tmp_path, prune=False)
    (tmp_path / "3.md").unlink()
    assert load(tmp_path, prune=False).exit_code == 0
    assert load(tmp_path, source=None, prune=False).exit_code == 0
    assert "3.md" in stored(service, collection)


def _unreadable_line(folder: Path, patch: pytest.MonkeyPatch) -> None:
    write(folder, {"bad.jsonl": '{"id": "x", "te'})


def _refused_document(folder: Path, patch: pytest.MonkeyPatch) -> None:
    write(folder, {"bad.jsonl": '{"id": "x", "text": "x", "salience": -1}'})


def _unclosed_quote(folder: Path, patch: pytest.MonkeyPatch) -> None:
    write(folder, {"bad.csv": 'id,text\n7,"seven\n8,eight\n'})


def _unreadable_file(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "bad.md").write_bytes(b"words\0")


def _unsearchable_folder(folder: Path, patch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    patch.setattr(os, "scandir", refuse)


def _other_source(folder: Path, patch: pytest.MonkeyPatch) -> None:
    write(folder, {"bad.md": "---\nsource: wiki\n---\nwords"})


@pytest.mark.parametrize("harm, told", [
    (_unreadable_line, "not JSON"), (_unclosed_quote, "bad.csv:2: has a quote"), (_refused_document, "salience"), (_unreadable_file, "bad.md"),
    (_unsearchable_folder, "sub: can't be read"), (_other_source, "its own `source` is 'wiki' and not 'docs'"),
])  # fmt: skip
def test_any_failure_stops_it(
    service: Running,
    collection: str,
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path, pytest.MonkeyPatch], None],
    told: str,
) -> None:
    write(tmp_path, {**TEN, "sub/a.md": "a"})
    load(tmp_path)
    (tmp_path / "3.md").unlink()
    harm(tmp_path, monkeypatch)
    done = load(tmp_path)
    assert done.exit_code == cli.FAILED
    assert told in done.stderr
    assert (
        "Not pruned: 1 of what is there could not be read or stored, and must not be taken for gone"
        in done.stderr
    )
    assert stored(service, collection) == sorted([*TEN, "sub/a.md"])


def test_documents_of_which_none_is_valid_are_told_one_by_one_and_the_rest_is_stored(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    wrong: list[dict[str, Any]] = [
        {"text": 5},
        {"title": True},
        {"text": ["x"]},
        {"text": {"a": 1}, "title": 1.5},
        {"text": " "},
    ]
    lines = [{"id": str(number), **fields} for number, fields in enumerate([*wrong, {"text": "fine"}])]
    write(tmp_path, {"lines.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    for batch in (1, 5):
        done = load(tmp_path, "--batch", batch, "--failures", tmp_path / "failures", source=None, prune=False)
        assert done.exit_code == cli.FAILED
        told = [json.loads(line) for line in (tmp_path / "failures").read_text().splitlines()]
        told.sort(key=lambda each: each["where"])
        assert [each["where"] for each in told] == [f"{tmp_path}/lines.jsonl:{n}" for n in range(1, 6)]
        assert [each["reason"] for each in told[:3]] == [
            "`text` must be text, not a number", "`title` must be text, not true", "`text` must be text, not a list",
        ]  # fmt: skip
        assert "blank" in told[4]["reason"]
        assert stored(service, collection) == ["5"]
    tried = load(tmp_path, "--dry-run", source=None, prune=False)
    assert "6 documents read, 0 failed" in tried.stdout
    # What keeps all out for one cause ends the load: none would fare better.
    assert load(tmp_path, "--batch", 1, source=None, prune=False, key="hlf_nobody").exit_code == cli.FAILED


def test_what_is_there_and_passed_over_keeps_its_documents(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    folder, behind = tmp_path / "docs", tmp_path / "behind"
    write(folder, {**TEN, "notes.log": "a log", "sub/a.md": "a"})
    # Named, a log is read.
    assert load(folder, folder / "notes.log").exit_code == 0
    put(service, collection, {"id": "notes.log#2", "text": "a row", "source": "docs"})
    (folder / "sub").rename(behind)
    (folder / "sub").symlink_to(behind)
    (folder / "3.md").unlink()
    done = load(folder)
    assert done.exit_code == 0, done.output
    assert (
        "3 documents were not loaded and stay, since their files are there and passed over: " in done.stderr
    )
    assert f"2 other files in the folders are passed over: {folder}/sub/, {folder}/notes.log" in done.stderr
    assert stored(service, collection) == sorted({*TEN, "notes.log", "notes.log#2", "sub/a.md"} - {"3.md"})


def test_rows_of_what_is_passed_over_stay_and_of_what_cant_be_read_all_do(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, {**TEN, "rows.json": '{"slug": "r1", "text": "x"}\n{"slug": "r2", "text": "y"}\n'})
    write(tmp_path, {"package.json": '{\n  "name": "no document"\n}\n'})
    write(tmp_path, {"dump": '{"slug": "r3", "text": "x"}\n'})
    assert load(tmp_path, tmp_path / "rows.json", tmp_path / "dump", "--id-field", "slug").exit_code == 0
    (tmp_path / "3.md").unlink()
    write(tmp_path, {"rows.json": '{"slug": "r1", "text": "x"}\n'})
    (tmp_path / "away.jsonl").symlink_to(tmp_path / "nowhere")
    done = load(tmp_path, "--id-field", "slug")
    assert done.exit_code == cli.FAILED
    assert f"Not pruned: {tmp_path}/away.jsonl is passed over and can't be read" in done.stderr
    (tmp_path / "away.jsonl").unlink()
    done = load(tmp_path, "--id-field", "slug")
    assert done.exit_code == 0, done.output
    assert (
        "2 documents were not loaded and stay, since their files are there and passed over: r1, r3"
        in done.stderr
    )
    assert stored(service, collection) == sorted({*TEN, "r1", "r3"} - {"3.md"})


def test_rows_that_a_cell_may_hold_stay_until_told_otherwise(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    rows = [f"{number},row {number}" for number in range(10)]
    write(tmp_path, {"t.csv": "id,text\n" + "\n".join(rows) + "\n"})
    assert load(tmp_path).exit_code == 0
    rows[6], rows[8] = '6,"row 6', '8,row 8"'
    write(tmp_path, {"t.csv": "id,text\n" + "\n".join(rows) + "\n"})
    done = load(tmp_path)
    assert done.exit_code == cli.FAILED
    assert f"{tmp_path}/t.csv:8: a quoted cell holds 2 lines that look like rows" in done.stderr
    assert (
        "Not pruned: 1 rows hold lines that look like rows of their own, which may be those: 7, 8"
        in done.stderr
    )
    assert len(stored(service, collection)) == 10
    assert load(tmp_path, "--prune-most").exit_code == 0
    assert len(stored(service, collection)) == 8


def test_more_than_half_is_refused_and_half_is_not(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    load(tmp_path)
    for number in range(6):
        (tmp_path / f"{number}.md").unlink()
    refused = load(tmp_path)
    assert refused.exit_code == cli.FAILED
    assert (
        "Not pruned: 6 of the 10 documents that source 'docs' had were not loaded, which is more than half: "
        "0.md, 1.md, 2.md, 3.md, 4.md and 1 more; --json lists all\n"
        "    check the paths; if those are gone indeed, load again with --prune-most" in refused.stderr
    )
    # Documents that are new don't make the old ones fewer.
    write(tmp_path, {f"new-{number}.md": "new" for number in range(10)})
    assert load(tmp_path).exit_code == cli.FAILED
    assert len(stored(service, collection)) == 20

    write(tmp_path, TEN)
    for name in [f"{number}.md" for number in range(10)]:
        (tmp_path / name).unlink()
    assert load(tmp_path).exit_code == 0
    assert stored(service, collection) == [f"new-{number}.md" for number in range(10)]

    for number in range(9):
        (tmp_path / f"new-{number}.md").unlink()
    assert load(tmp_path, "--prune-most", prune=False).exit_code == 0
    assert stored(service, collection) == ["new-9.md"]


def test_a_load_that_brings_nothing_deletes_nothing(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, {"a.md": "a"})
    load(tmp_path)
    write(tmp_path, {"a.md": ""})
    for arguments, given in (([tmp_path], None), (["-"], b"")):
        done = load(*arguments, "--prune-most", input=given)
        assert done.exit_code == cli.FAILED
        assert "Not pruned: the load brought no document at all: a.md" in done.stderr
    assert stored(service, collection) == ["a.md"]


def test_other_sources_and_collections_are_none_of_its_business(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    other = f"{collection}_other"
    foreign: list[dict[str, Any]] = [
        {"id": "elsewhere", "text": "x", "source": "wiki"},
        {"id": "nowhere", "text": "x"},
        # A filter on `source` finds this one too.
        {"id": "in-metadata", "text": "x", "metadata": {"source": "docs"}},
        {"id": "its-id-is-a-source", "text": "x", "source_id": "docs"},
    ]
    write(tmp_path, TEN)
    try:
        for name in (collection, other):
            load(tmp_path, into=name)
        put(service, collection, *foreign)
        (tmp_path / "3.md").unlink()
        assert "Pruned 1 of the 10" in load(tmp_path).stdout
        assert stored(service, collection) == sorted({*TEN, *(each["id"] for each in foreign)} - {"3.md"})
        assert stored(service, other) == sorted(TEN)
    finally:
        service.client.delete(f"/v1/collections/{other}", params={"confirm": other})


def test_a_document_keeps_a_source_of_its_own(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(
        tmp_path, {"a.md": "---\nsource: wiki\n---\na", "b.jsonl": '{"id": "b", "text": "b", "source": ""}'}
    )
    assert load(tmp_path, prune=False).exit_code == 0
    listed = service.client.get(f"/v1/collections/{collection}/documents").json()["documents"]
    assert [(each["id"], each["source"]) for each in listed] == [("a.md", "wiki"), ("b", "docs")]


def test_what_is_said_of_all_documents_is_taken_where_they_say_nothing_themselves(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, {
        "a.md": "a",
        "b.md": "---\nlang: zh\nteam: sales\ndate: 2024-05-06\n---\nb",
        "c.jsonl": '{"id": "c", "text": "c", "team": "law"}\n{"id": "d", "text": "d", "lang": null, "tags": ["own"]}',
    })  # fmt: skip
    said = (
        *("--set", "lang=en", "--set", "team=search", "--set", "tags=x, y", "--set", "level=3"),
        *("--set", "metadata.region=eu", "--set", "region=north", "--set", "creation_time=2025-01-02"),
    )
    done = load(tmp_path, *said, prune=False)
    assert done.exit_code == 0, done.output
    assert "file's time" not in done.output
    found = {}
    for name in ("a.md", "b.md", "c", "d"):
        document = service.client.get(f"/v1/collections/{collection}/documents/{name}").json()
        metadata = {key: value for key, value in document["metadata"].items() if key != "path"}
        assert (document["source"], document["region"]) == ("docs", "north")
        assert (metadata.pop("region"), metadata.pop("level")) == ("eu", 3)
        found[name] = (document["lang"], metadata, document["tags"], document["creation_time"][:10])
    assert found == {
        "a.md": ("en", {"team": "search"}, ["x", "y"], "2025-01-02"),
        "b.md": ("zh", {"team": "sales"}, ["x", "y"], "2024-05-06"),
        "c": ("en", {"team": "law"}, ["x", "y"], "2025-01-02"),
        "d": ("en", {"team": "search"}, ["own"], "2025-01-02"),
    }


def test_several_paths_with_a_prefix_and_standard_input_are_one_load(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, {f"one/{name}": text for name, text in TEN.items()} | {"two/x.md": "x", "two/y.md": "y"})
    lines = [json.dumps({"id": f"line-{number}", "text": "x"}) for number in range(3)]
    load(tmp_path / "one", tmp_path / "two", "-", "--id-prefix", "p/", input="\n".join(lines))
    (tmp_path / "one/3.md").unlink()
    (tmp_path / "two/y.md").unlink()
    done = load(tmp_path / "one", tmp_path / "two", "-", "--id-prefix", "p/", input="\n".join(lines[1:]))
    assert done.exit_code == 0, done.output
    assert "Pruned 3 of the 15 documents that source 'docs' had: line-0, p/3.md, p/y.md\n" in done.stdout
    assert len(stored(service, collection)) == 12


def test_a_source_of_several_pages_is_pruned_in_batches(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    lines = [json.dumps({"id": f"{number:03d}", "text": "x", "embedding": None}) for number in range(250)]
    write(tmp_path, {"x.jsonl": "\n".join(lines)})
    load(tmp_path)
    write(tmp_path, {"x.jsonl": "\n".join(lines[1::2])})
    done = load(tmp_path, "--batch", "40", "--json")
    assert json.loads(done.stdout)["prune"]["deleted"] == 125
    assert stored(service, collection) == [f"{number:03d}" for number in range(1, 250, 2)]


def test_a_dry_run_says_what_would_go_and_changes_nothing(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    load(tmp_path)
    (tmp_path / "3.md").rename(tmp_path / "new.md")
    told = load(tmp_path, "--dry-run")
    assert told.exit_code == 0, told.output
    assert told.stdout == (
        "Dry run: 10 documents read, 0 failed; nothing is stored or deleted.\n"
        "--prune would delete 1 of the 10 documents that source 'docs' had: 3.md\n"
    )
    facts = json.loads(load(tmp_path, "--dry-run", "--json").stdout)
    assert (facts["dry_run"], facts["read"], facts["stored"], facts["prune"]["gone"]) == (
        True,
        10,
        0,
        ["3.md"],
    )
    assert stored(service, collection) == sorted(TEN)
    plain = load(tmp_path, "--dry-run", source=None, prune=False)
    assert (plain.exit_code, plain.stdout.count("\n")) == (0, 1)
    write(tmp_path, {"bad.jsonl": "{"})
    assert load(tmp_path, "--dry-run").exit_code == cli.FAILED


# ---- others at the same time ----------------------------------------------------------------------------------------


def test_what_somebody_writes_during_the_load_stays(
    service: Running, collection: str, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    with Client(service.url, key=ROOT) as client:
        _around(client, collection, tmp_path)
        for number in range(4):
            (tmp_path / f"{number}.md").unlink()
        before = service.client.get(f"/v1/collections/{collection}/documents/2.md").json()

        def meanwhile() -> None:
            put(
                service, collection,
                {"id": "1.md", "text": "another loader's", "source": "docs"},
                {"id": "2.md", "text": before["text"], "source": "wiki"},
                {"id": "newer", "text": "another loader's", "source": "docs"},
            )  # fmt: skip
            service.client.delete(f"/v1/collections/{collection}/documents/3.md")

        found = _around(client, collection, tmp_path, meanwhile=meanwhile)
    assert (found.had, found.gone) == (10, ["0.md", "1.md", "2.md", "3.md"])
    assert (found.deleted, found.changed, found.failures) == (["0.md", "3.md"], ["1.md", "2.md"], [])
    assert stored(service, collection) == sorted({*TEN, "newer"} - {"0.md", "3.md"})


def test_a_document_that_is_only_read_during_the_load_goes(
    service: Running, collection: str, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    with Client(service.url, key=ROOT) as client:
        _around(client, collection, tmp_path)
        (tmp_path / "3.md").unlink()
        path = f"/v1/collections/{collection}/documents/3.md"
        before = service.client.get(path).json()

        def meanwhile() -> None:
            body = {"collection": collection, "query": "words", "top_k": 10, "touch": True}
            assert service.client.post("/v1/search", json=body).status_code == 200
            until(lambda: service.client.get(path).json()["version"] != before["version"])

        found = _around(client, collection, tmp_path, meanwhile=meanwhile)
    assert (found.deleted, found.changed) == (["3.md"], [])


def test_what_is_left_after_a_deletion_broke_off_goes_with_the_next_load(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    class Breaking(Client):
        left = 1

        def delete(
            self, collection: str, documents: Sequence[Mapping[str, Any]], *, refresh: str = "false"
        ) -> Any:
            answer = super().delete(collection, documents, refresh=refresh)
            self.left -= 1
            if self.left < 0:
                # Done, but nobody hears of it.
                raise ApiUnreachable("the connection broke")
            return answer

    write(tmp_path, TEN)
    load(tmp_path)
    for number in range(5):
        (tmp_path / f"{number}.md").unlink()
    with Breaking(service.url, key=ROOT) as client:
        pruner = Pruner(client, collection, "docs", batch=2, patience_s=0.0)
        with pytest.raises(ApiUnreachable):
            _around(client, collection, tmp_path, pruner=pruner)
        assert pruner.result.deleted == ["0.md", "1.md"]
    # Searches need not see yet what was deleted: it may be asked for twice.
    done = load(tmp_path)
    assert done.exit_code == 0, done.output
    assert stored(service, collection) == [f"{number}.md" for number in range(5, 10)]


def test_an_answer_that_was_lost_is_no_failure(service: Running, collection: str, tmp_path: Path) -> None:
    class Deaf(Client):
        heard = False

        def delete(
            self, collection: str, documents: Sequence[Mapping[str, Any]], *, refresh: str = "false"
        ) -> Any:
            answer = super().delete(collection, documents, refresh=refresh)
            if not self.heard:
                self.heard = True
                raise ApiUnreachable("the connection broke")
            return answer

    write(tmp_path, TEN)
    with Deaf(service.url, key=ROOT) as client:
        _around(client, collection, tmp_path)
        (tmp_path / "3.md").unlink()
        pruner = Pruner(client, collection, "docs", sleep=lambda seconds: None)
        found = _around(client, collection, tmp_path, pruner=pruner)
    assert (found.deleted, found.changed, found.ok) == (["3.md"], [], True)


def test_an_interrupted_load_deletes_nothing(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    write(tmp_path, TEN)
    load(tmp_path)
    (tmp_path / "3.md").unlink()

    class Interrupting(Client):
        def upsert(self, *arguments: Any, **named: Any) -> Any:
            raise KeyboardInterrupt

    with Interrupting(service.url, key=ROOT) as client:
        pruner = Pruner(client, collection, "docs")
        pruner.note()
        loader = Loader(client, collection, prepare=pruner.see)
        with pytest.raises(KeyboardInterrupt):
            loader.load(sources.find([tmp_path])[0], Names())
        found = pruner.judge(loader.tally, brought=loader.tally.stored)
        assert (found.refused, found.gone) == ("the load was interrupted", [])
        assert pruner.prune().deleted == []
    assert stored(service, collection) == sorted(TEN)


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_a_key_with_a_filter_prunes_what_it_sees(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    service.client.put(f"/v1/collections/{collection}", json={})
    theirs = {"id": "theirs", "text": "x", "source": "docs", "metadata": {"tenant": "b"}}
    put(service, collection, theirs)
    lines = [json.dumps({"id": str(number), "text": "x", "metadata": {"tenant": "a"}}) for number in range(4)]
    write(tmp_path, {"x.jsonl": "\n".join(lines)})
    load(tmp_path, key=TENANT)
    write(tmp_path, {"x.jsonl": "\n".join(lines[1:])})
    done = load(tmp_path, key=TENANT)
    assert done.exit_code == 0, done.output
    assert "Pruned 1 of the 4 documents that source 'docs' had: 0\n" in done.stdout
    assert stored(service, collection) == ["1", "2", "3", "theirs"]


def test_a_key_that_must_not_read_is_told_before_anything_is_stored(
    service: Running, collection: str, load: Load, tmp_path: Path
) -> None:
    service.client.put(f"/v1/collections/{collection}", json={})
    write(tmp_path, TEN)
    done = load(tmp_path, key=WRITER)
    assert done.exit_code == cli.FAILED
    assert "read" in done.stderr
    assert stored(service, collection) == []


# ---- without a node -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, told", [
    (["--prune"], "--source"), (["--prune-most"], "--source"), (["--source", " "], "blank"),
    (["--source", "x" * 1025], "1024"), (["--source", "\udcff"], "surrogate"),
    (["--set", "lang"], "KEY=VALUE"), (["--set", "=en"], "KEY=VALUE"), (["--set", "lang= "], "KEY=VALUE"),
    (["--set", "a=2", "--set", "a = 3"], "`a` is given twice"), (["--set", "a=2", "--set", "metadata.a=3"], "one key"),
    (["--set", "id=x"], "`id` is each document's own"), (["--set", "source=x"], "--source NAME"),
    (["--set", "salience=much"], "`salience`: Input should be a valid number"),
    (["--set", "creation_time=soon"], "`creation_time`"), (["--set", "k" * 257 + "=1"], "256 bytes"), (["--set", "metadata.=1"], "KEY=VALUE"),
])  # fmt: skip
def test_wrong_usage_is_told(tmp_path: Path, options: list[str], told: str) -> None:
    write(tmp_path, {"a.md": "a"})
    done = invoke(str(tmp_path), *options, "--url", "http://127.0.0.1:9")
    assert done.exit_code == cli.USAGE
    assert told in done.stderr


def test_a_deletion_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    error = {"type": "forbidden", "detail": "this document is outside", "remedy": "ask for it"}

    def answer(seen: Seen) -> Reply:
        if seen.path.endswith("/delete"):
            return Reply(body={
                "items": [{"id": "0", "status": "failed", "error": error}, {"id": "1", "status": "deleted"}],
                "failed": 1, "deleted": 1,
            })  # fmt: skip
        if seen.method == "GET":
            listed = [{"id": str(number), "version": 1, "source": "docs"} for number in range(4)]
            return Reply(body={"documents": listed, "total": 4, "cursor": None})
        return Reply(
            body={"items": [{"id": each["id"], "status": "unchanged"} for each in seen.body["documents"]]}
        )

    write(tmp_path, {"x.jsonl": '{"id": "2", "text": "x"}\n{"id": "3", "text": "x"}'})
    with FarEnd(answer) as api:
        done = invoke(str(tmp_path), "--source", "docs", "--prune", "-c", "c", "--url", api.url)
        [asked] = [seen for seen in api.requests if seen.path.endswith("/delete")]
        [listed] = [seen for seen in api.requests if "/documents?" in seen.path]
    assert listed.path == "/v1/collections/c/documents?filter=%7B%22source%22%3A+%22docs%22%7D"
    assert done.exit_code == cli.FAILED
    assert "✗ 0 is not deleted: this document is outside\n    ask for it\n" in done.stderr
    assert "Pruned 1 of the 4 documents that source 'docs' had: 1\n" in done.stdout
    assert asked.body == {
        "documents": [{"id": "0", "if_version": 1}, {"id": "1", "if_version": 1}],
        "refresh": "true",
    }


def _around(
    client: Client,
    collection: str,
    folder: Path,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    pruner: Pruner | None = None,
) -> Pruned:
    """Load a folder and prune around it, as the command does, somebody else writing in between."""
    pruner = pruner or Pruner(client, collection, "docs")
    pruner.note()
    meanwhile()
    tally: Tally = Loader(client, collection, prepare=pruner.see).load(sources.find([folder])[0], Names())
    pruner.judge(tally, brought=tally.stored)
    return pruner.prune()
