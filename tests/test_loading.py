"""Loading: what people's files become as documents, and how documents travel: order, retries, every item's fate."""

import _thread
import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.errors import UnreadableFile
from app.writing import Document
from scripts import sources
from scripts.client import ApiProblem, ApiUnreachable, Client
from scripts.loading import KEPT_FAILURES, Loader, Tally
from scripts.sources import Names, Read, Source, Unreadable
from tests.fakes import FarEnd, Reply, Seen

LINES = {
    "fields as they are": (
        {
            "id": "a",
            "title": "T",
            "text": "x",
            "creation_time": "2026-01-02",
            "tags": ["p"],
            "evergreen": True,
        },
        {
            "id": "a",
            "title": "T",
            "text": "x",
            "creation_time": "2026-01-02T00:00:00.000Z",
            "tags": ["p"],
            "evergreen": True,
        },
    ),
    "created_at is the creation time": (
        {"id": "a", "text": "x", "created_at": "2019-07-23T00:00:00Z"},
        {"id": "a", "text": "x", "creation_time": "2019-07-23T00:00:00.000Z"},
    ),
    "creation_time wins over created_at, which stays to be seen": (
        {"id": "a", "text": "x", "creation_time": "2026-01-02", "created_at": "2020-01-01"},
        {
            "id": "a",
            "text": "x",
            "creation_time": "2026-01-02T00:00:00.000Z",
            "metadata": {"created_at": "2020-01-01"},
        },
    ),
    "an empty creation_time gives way to created_at": (
        {"id": "a", "text": "x", "creation_time": None, "created_at": "2020-01-01"},
        {
            "id": "a",
            "text": "x",
            "creation_time": "2020-01-01T00:00:00.000Z",
        },
    ),
    "null and empty dates are undated": (
        {"id": "a", "text": "x", "created_at": None, "updated_at": "", "lang": "", "tags": []},
        {"id": "a", "text": "x"},
    ),
    "unknown keys are metadata and never text": (
        {"id": "a", "text": "x", "obsoleted_by": ["b"], "metadata": {"k": 1}, "status": "UNKNOWN"},
        {"id": "a", "text": "x", "metadata": {"obsoleted_by": ["b"], "status": "UNKNOWN", "k": 1}},
    ),
    "a number as id": ({"id": 7, "text": "x"}, {"id": "7", "text": "x"}),
    "one tag": ({"id": "a", "text": "x", "tags": "p"}, {"id": "a", "text": "x", "tags": ["p"]}),
    "seconds since 1970": (
        {"id": "a", "text": "x", "created_at": 1_600_000_000},
        {"id": "a", "text": "x", "creation_time": "2020-09-13T12:26:40.000Z"},
    ),
    "null text beside a title": ({"id": "a", "title": "T", "text": None}, {"id": "a", "title": "T"}),
    "null embedding is a wish": (
        {"id": "a", "text": "x", "embedding": None},
        {"id": "a", "text": "x", "embedding": None},
    ),
}


@pytest.mark.parametrize("line, document", LINES.values(), ids=LINES.keys())
def test_a_line_becomes_a_document(line: dict[str, Any], document: dict[str, Any]) -> None:
    assert sources.from_line(line, Names()) == document


def test_lines_may_name_their_fields_otherwise() -> None:
    line = {"slug": "a", "head": "T", "body": "x", "when": "2026-01-02", "id": 3, "created_at": "2020-01-01"}
    assert sources.from_line(line, Names(id="slug", title="head", text="body", time="when")) == {
        "id": "a",
        "title": "T",
        "text": "x",
        "creation_time": "2026-01-02T00:00:00.000Z",
        "metadata": {"id": 3, "created_at": "2020-01-01"},
    }


BAD_LINES = {
    "no JSON": (b"{nope", "not JSON"),
    "an array": (b"[1]", "an array"),
    "the start of a pretty-printed array": (b"[", "one object a line"),
    "text": (b'"x"', "one JSON object"),
    "NaN": (b'{"id": "a", "text": "x", "n": NaN}', "NaN"),
    "not UTF-8": (b'{"id": "\xff"}', "not UTF-8"),
    "a list as id": (b'{"id": ["a"], "text": "x"}', "no `id`"),
    "no date": (b'{"id": "a", "text": "x", "created_at": "yesterday"}', "creation_time"),
    "metadata that is none": (b'{"id": "a", "text": "x", "metadata": "k"}', "metadata"),
    "nested without end": (b"[" * 100_000, "nested too deeply"),
    "a number without end": (
        b'{"id": "a", "n": ' + b"9" * 5_000 + b"}",
        "more than 4300 digits: write it as text",
    ),
}


@pytest.mark.parametrize("line, told", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_told_with_its_number_and_the_rest_goes_on(
    tmp_path: Path, line: bytes, told: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": "first", "text": "x"}\n\n' + line + b'\n{"id": "last", "text": "x"}'
    )
    items = list(sources.read(_source(path), Names()))
    assert [item.document and item.document["id"] for item in items] == ["first", None, "last"]
    assert told in str(items[1].fault)
    assert items[1].where == f"{path}:3"
    assert sum(item.size for item in items) == path.stat().st_size - 1  # the blank line is nobody's


def test_gzipped_lines_and_tables_are_read_where_they_are_named_and_in_folders(tmp_path: Path) -> None:
    files = {
        "a.jsonl.gz": b'{"id": "a", "text": "x"}\n', "b.NDJSON.GZ": b'{"id": "b", "text": "x"}\n',
        "c.csv.gz": b"id,text\nc,x\n", "d.tsv.gz": b"id\ttext\nd\tx\n", "e.json.gz": b'{"id": "e", "text": "x"}\n',
        "f.gz": b'{"id": "f", "text": "x"}\n', "g.md.gz": b"words",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(gzip.compress(content))

    def read(paths: Sequence[Path]) -> list[str]:
        found, _ = sources.find(paths)
        items = [item for source in found for item in sources.read(source, Names())]
        return sorted(item.document["id"] if item.document else str(item.fault) for item in items)

    assert read([tmp_path]) == ["a", "b", "c", "d"]
    *ids, refused = read(sorted(tmp_path.iterdir()))
    assert ids == ["a", "b", "c", "d", "e", "f"]
    assert refused.startswith("the file is compressed with gzip")
    assert [each.path.name for each in sources.find([tmp_path])[1]] == ["e.json.gz", "f.gz", "g.md.gz"]


def test_gzipped_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "x"}\n'))
    [source], _ = sources.find([path])
    assert [item.document for item in sources.read(source, Names())] == [{"id": "a", "text": "x"}]


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "utf-16-le", "big5"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.jsonl.gz"])
def test_lines_and_tables_are_read_in_other_encodings(tmp_path: Path, encoding: str, name: str) -> None:
    text = "無人機航拍影像資料集說明" if encoding == "big5" else "差旅报销 (travel expenses) 需要先提交发票。"
    lines = [{"id": str(number), "text": f"{text}{number}"} for number in range(20)]
    if name == "x.csv":
        written = "id,text\r\n" + "".join(f"{line['id']},{line['text']}\r\n" for line in lines)
    else:
        written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    data = written.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    items = list(sources.read(_source(path, lines=name != "x.csv"), Names()))
    assert [item.document for item in items] == lines
    told = [warning for item in items for warning in item.warnings]
    # The mark of UTF-16 tells it; anything else is a guess, told once.
    assert len(told) == (encoding != "utf-16")
    assert all("which was guessed" in warning for warning in told)


def test_a_line_without_an_id_is_called_after_its_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "x"}\n\n{"id": null, "text": "y"}\n', encoding="utf-8")
    ids = [item.document and item.document["id"] for item in sources.read(_source(path), Names())]
    assert ids == ["x.jsonl#1", "x.jsonl#3"]
    # Of a key that was named, none is made up, nor where a file has no name.
    first, *_ = sources.read(_source(path), Names(id="slug"))
    assert "no `slug`" in str(first.fault)


def test_one_line_that_is_not_utf_8_changes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = '{"id": "%d", "text": "差旅报销"}\n'
    path.write_bytes((good % 1).encode() + (good % 2).encode("gb18030") + (good % 3).encode())
    items = list(sources.read(_source(path), Names()))
    assert [item.document and item.document["text"] for item in items] == ["差旅报销", None, "差旅报销"]
    assert "not UTF-8" in str(items[1].fault)
    path.write_bytes((good % 1).encode() + b"\0\n" + (good % 3).encode())
    items = list(sources.read(_source(path), Names()))
    assert [item.document and item.document["id"] for item in items] == ["1", None, "3"]


NAMED_NOWHERE = {
    "a table": ("x.csv", "slug,question,answer\n1,q,a\n", ["--text-field", "--id-field"], 0),
    "lines": ("x.jsonl", '{"id": "1", "question": "q", "answer": "a"}\n' * 2, ["--text-field"], 2),
}


@pytest.mark.parametrize("name, text, told, stored", NAMED_NOWHERE.values(), ids=NAMED_NOWHERE.keys())
def test_a_column_that_was_named_and_is_nowhere_is_a_fault(
    tmp_path: Path, name: str, text: str, told: list[str], stored: int
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    names = Names(id="slgu" if name == "x.csv" else "id", title="question", text="anwser")
    items = list(sources.read(_source(path, lines=name != "x.csv"), names))
    faults = [item.fault or "" for item in items if item.document is None]
    assert len(faults) == len(told)
    assert all(any(option in fault for fault in faults) for option in told)
    assert len([item for item in items if item.document]) == stored


@pytest.mark.parametrize(
    "row, told", [("2", None), ("2,,", None), ("2,,note", "its `text` is empty: its text is made of all its")]
)
def test_a_row_that_leaves_its_text_empty_is_not_told_that_there_is_no_such_column(
    tmp_path: Path, row: str, told: str | None
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f"id,text,more\n1,a,b,c\n{row}\n3,fine,\n", encoding="utf-8")
    items = list(sources.read(_source(path, lines=False), Names()))
    assert [bool(item.fault) for item in items] == [True, False, False]
    assert [warning[: len(told or "")] for item in items for warning in item.warnings] == (
        [told] if told else []
    )


@pytest.mark.parametrize("key", ["content", "body", "page_content"])
def test_a_text_of_another_name_is_told_once(tmp_path: Path, key: str) -> None:
    lines = [json.dumps({"id": str(number), "title": "T", key: "words"}) + "\n" for number in range(3)]
    (tmp_path / "x.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "x.csv").write_text(f"id,title,{key}\n1,T,words\n2,T,words\n", encoding="utf-8")
    for name in ("x.jsonl", "x.csv"):
        items = list(sources.read(_source(tmp_path / name, lines=name == "x.jsonl"), Names()))
        [warning] = [warning for item in items for warning in item.warnings]
        assert f"--text-field {key}" in warning
        items = list(sources.read(_source(tmp_path / name, lines=name == "x.jsonl"), Names(text=key)))
        assert [item.warnings for item in items] == [()] * len(items)


def test_a_front_matter_gives_a_documents_salience(tmp_path: Path) -> None:
    stored = {}
    for name, value in (("a", "0.7"), ("b", "high")):
        path = tmp_path / f"{name}.md"
        path.write_text(f"---\nsalience: {value}\n---\nwords\n", encoding="utf-8")
        [item] = sources.read(_source(path, lines=False), Names())
        assert item.document is not None
        stored[name] = item.document.get("salience"), item.document["metadata"].get("salience")
    assert stored == {"a": (0.7, None), "b": (None, "high")}


def test_what_is_damaged_is_a_fault_after_what_could_be_read(tmp_path: Path) -> None:
    lines = b"".join(
        b'{"id": "%d", "text": "%s"}\n' % (n, os.urandom(40).hex().encode()) for n in range(3000)
    )
    whole = gzip.compress(lines)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "flipped": bytes(flipped),
        "no-gzip": b"{}",
    }.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        *before, last = sources.read(_source(path), Names())
        assert last.where == str(path)
        assert last.fault
        assert (name == "no-gzip") == (not before)


@pytest.mark.parametrize("seconds", [4e11, -1e11, 1e30])
def test_a_files_time_that_is_no_date_is_told(seconds: float) -> None:
    assert sources.file_time(1_700_000_000.5) == "2023-11-14T22:13:20.500Z"
    with pytest.raises(UnreadableFile, match="is no date") as told:
        sources.file_time(seconds)
    assert "--undated" in (told.value.remedy or "")


def test_names_that_are_not_utf_8_can_be_told_and_sent(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in {
        b"caf\xe9.txt": b"words",
        b"caf\xe8.txt": b"",
        b"caf\xea.jsonl": b"oops\n",
        b"caf\xeb.csv": b"id,text\na,b,c\n",
        b"caf\xec.pdf": b"none",
    }.items():
        (folder / os.fsdecode(name)).write_bytes(content)
    named = [folder / os.fsdecode(b"caf\xe9.txt"), folder / os.fsdecode(b"caf\xea.jsonl")]
    for found, _ in (sources.find([folder]), sources.find(named, prefix="p/")):
        for source in found:
            for item in sources.read(source, Names()):
                (item.where + source.name + str(item.fault) + json.dumps(item.document)).encode()
                if source.name.endswith(".txt") and item.document:
                    assert item.document["id"].removeprefix("p/") == "caf\ufffd.txt"
    with pytest.raises(Unreadable) as told:
        sources.find([folder / os.fsdecode(b"\xe9")])
    str(told.value).encode()


def test_a_folder_that_cant_be_looked_into_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("words")
    # So deep that its path is longer than the system takes: true for every user, as missing rights are not.
    handle = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=handle)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    found, _ = sources.find([tmp_path])
    items = [item for source in found for item in sources.read(source, Names())]
    assert [item.document["id"] for item in items if item.document] == ["a.md"]
    [fault] = [item for item in items if item.fault]
    assert "too long" in str(fault.fault)
    tally = Loader(Store(), "c").load(found, Names())
    assert (tally.created, tally.failed) == (1, 1)


@pytest.mark.parametrize(
    "name, text", [("x.jsonl", ""), ("x.jsonl", "\n \n"), ("x.csv", "id,text\n"), ("x.md", "")]
)
def test_a_file_without_lines_or_rows_is_empty(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    [source], _ = sources.find([tmp_path])
    assert [(item.document, item.fault, item.empty) for item in sources.read(source, Names())] == [
        (None, None, True)
    ]


def test_a_folder_becomes_documents(tmp_path: Path) -> None:
    files = {
        "b.md": "Intro\n\n## A heading\ntext",
        "a/deep/notes.txt": "plain words",
        "a/front.md": "---\ntitle: 'Kept: whole'\ndate: 2024-01-02 10:00:00 +0800\ntags: [x, \"y\"]\nlang: en\nlayout: post\n---\n\n# Other\nbody",
        "fence.md": "```\n# no heading\n```\nTitle below\n====\nwords",
        "empty.md": "---\ntitle: nothing\n---\n  \n",
        "bad.md": "words\0",
        ".hidden/x.md": "no",
        ".x.md": "no",
        "picture.png": "no",
        "中文.md": "# 休假\n正文",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1" if name == "bad.md" else "utf-8"))
        os.utime(path, (1_700_000_000, 1_700_000_000))
    found, passed = sources.find([tmp_path])
    items = {source.name: next(iter(sources.read(source, Names()))) for source in found}
    documents = {name: item.document for name, item in items.items() if item.document}
    at = "2023-11-14T22:13:20.000Z"
    assert documents == {
        "b.md": _text("b.md", "A heading", files["b.md"], at),
        "a/deep/notes.txt": _text("a/deep/notes.txt", "notes", "plain words", at),
        "a/front.md": {
            "id": "a/front.md",
            "title": "Kept: whole",
            "text": "# Other\nbody",
            "creation_time": "2024-01-02T02:00:00.000Z",
            "tags": ["x", "y"],
            "lang": "en",
            "metadata": {"layout": "post", "path": "a/front.md"},
        },
        "fence.md": _text("fence.md", "Title below", files["fence.md"], at),
        "中文.md": _text("中文.md", "休假", "# 休假\n正文", at),
    }
    assert items["empty.md"].empty
    assert "no text" in str(items["bad.md"].fault)
    assert [each.where for each in passed] == [f"{tmp_path}/.x.md", f"{tmp_path}/picture.png"]
    assert [name for name, item in items.items() if item.by_file_time] == [
        "b.md",
        "fence.md",
        "中文.md",
        "a/deep/notes.txt",
    ]
    without = {source.name: next(iter(sources.read(source, Names(), file_times=False))) for source in found}
    assert not any(item.by_file_time for item in without.values())
    dated = [name for name, item in without.items() if "creation_time" in (item.document or {})]
    assert dated == ["a/front.md"]
    for document in documents.values():
        Document.model_validate(document)


def test_a_front_matter_with_a_wrong_date_is_a_fault_and_not_the_files_time(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("---\ndate: last spring\n---\nwords", encoding="utf-8")
    [item] = sources.read_file(_source(path, lines=False), Names())
    assert item.document is None
    assert "last spring" in str(item.fault)


def test_a_path_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="no file that ends in"):
        sources.find([tmp_path])
    with pytest.raises(Unreadable, match="no file or folder"):
        sources.find([tmp_path / "none"])


@pytest.mark.shared
def test_every_shared_set_reads_as_valid_documents(shared_data: Path) -> None:
    found = sorted(shared_data.glob("*/corpus.jsonl"))
    faults = []
    for path in found:
        for number, item in enumerate(sources.read(_source(path), Names())):
            assert item.fault is None, item
            assert item.document is not None
            assert not {"obsoleted_by", "obsoletes", "updated_by"} & item.document.keys()
            # Whole validation of 60,000 documents takes long; every tenth shows every form there is.
            blank = not (item.document.get("text") or item.document.get("title"))
            if number % 10 == 0 and not blank:
                Document.model_validate(item.document)
            faults += [item.where] if blank else []
    assert len(found) == 17
    assert [Path(where).parent.name for where in faults] == ["cranfield", "cranfield"]


# ---- sending --------------------------------------------------------------------------------------------------------


class Store:
    """An API that remembers what it was sent, and fails as told."""

    def __init__(self, fate: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
        self.fate = fate or (lambda document: {"id": document["id"], "status": "created", "chunks": 1})
        self.batches: list[tuple[list[str], str]] = []
        self.under_way: list[set[str]] = []
        self.clashes: list[set[str]] = []
        self.most = 0
        self.lock = threading.Lock()
        self.gate = threading.Semaphore(0)
        self.gated = False

    def upsert(self, collection: str, documents: Sequence[dict[str, Any]], *, refresh: str = "false") -> Any:
        ids = {document["id"] for document in documents}
        with self.lock:
            self.clashes += [ids & other for other in self.under_way if ids & other]
            self.under_way.append(ids)
            self.most = max(self.most, len(self.under_way))
        self.stay()
        with self.lock:
            self.under_way.remove(ids)
            self.batches.append(([document["id"] for document in documents], refresh))
        return {"items": [self.fate(document) for document in documents]}

    def stay(self) -> None:
        """Keep a request under way."""
        if self.gated:
            self.gate.acquire(timeout=2)


def test_batches_are_bounded_by_count_and_bytes_and_the_last_one_refreshes(tmp_path: Path) -> None:
    store = Store()
    documents = [{"id": str(number), "text": "x" * (60 if number == 3 else 10)} for number in range(7)]
    tally = _load(store, documents, tmp_path, batch=3, batch_bytes=64, in_flight=1)
    assert store.batches == [(["0", "1", "2"], "false"), (["3"], "false"), (["4", "5", "6"], "true")]
    assert (tally.created, tally.failed, tally.stored, tally.chunks) == (7, 0, 7, 7)


def test_a_later_version_of_a_document_never_overtakes_an_earlier_one(tmp_path: Path) -> None:
    store = Store()
    store.gated = True
    # Each request stays until another has begun, or for a moment if none may begin: room enough to overtake.
    feeder = threading.Timer(1.0, store.gate.release, [100])
    feeder.start()
    ids = ["a", "a", "b", "c"]
    _load(store, [{"id": name, "text": str(number)} for number, name in enumerate(ids)], tmp_path, batch=1)
    feeder.join()
    assert store.clashes == []
    assert [name for batch, _ in store.batches for name in batch if name == "a"] == ["a", "a"]


def test_versions_of_one_document_are_never_in_one_request(tmp_path: Path) -> None:
    store = Store()
    ids = [f"{number % 3}" for number in range(30)]
    _load(store, [{"id": name, "text": str(number)} for number, name in enumerate(ids)], tmp_path, batch=4)
    assert len(store.batches) == 10
    assert all(len(set(batch)) == len(batch) for batch, _ in store.batches)


def test_an_id_that_two_files_bring_is_a_failure_of_the_second(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "index.md").write_text(f"words of {folder}", encoding="utf-8")
        (tmp_path / folder / "rows.csv").write_text("id,text\n1,x\n1,y\n", encoding="utf-8")
    found, _ = sources.find([tmp_path / "a", tmp_path / "b"])
    store = Store()
    tally = Loader(store, "c").load(found, Names())
    # Rows of one file that have one id are versions of one document.
    assert sorted(id_ for batch, _ in store.batches for id_ in batch) == ["1", "1", "index.md"]
    assert [(each.where, each.id) for each in tally.failures] == [
        (str(tmp_path / "b/index.md"), "index.md"),
        (str(tmp_path / "b/rows.csv:2"), "1"),
        (str(tmp_path / "b/rows.csv:3"), "1"),
    ]
    assert str(tmp_path / "a/index.md") in tally.failures[0].reason
    assert "--id-prefix" in str(tally.failures[0].remedy)
    tally = Loader(Store(), "c").load([found[0], found[0]], Names())
    assert (tally.created, tally.failed) == (2, 0)


def test_reading_never_runs_far_ahead_of_sending(tmp_path: Path) -> None:
    ahead: list[int] = []

    class Slow(Store):
        def upsert(
            self, collection: str, documents: Sequence[dict[str, Any]], *, refresh: str = "false"
        ) -> Any:
            self.gate.acquire(timeout=0.1)
            ahead.append(loader.tally.read_bytes // size - len(ahead))
            return super().upsert(collection, documents, refresh=refresh)

    documents = [{"id": f"{number:02d}", "text": "x"} for number in range(16)]
    source = _write(tmp_path, documents)
    size = source.size // len(documents)
    loader = Loader(Slow(), "c", batch=1)
    loader.load([source], Names())
    assert len(ahead) == 16
    # Two under way, one held back, one being filled, one read.
    assert max(ahead) <= 5


def test_two_requests_are_under_way_at_once_and_no_more(tmp_path: Path) -> None:
    class Pairs(Store):
        pair = threading.Event()

        def stay(self) -> None:
            if len(self.under_way) == 2:
                self.pair.set()
            if not self.pair.wait(60):
                self.pair.set()  # nor will the next ones come in pairs
            # Room for a third.
            time.sleep(0.1)

    store = Pairs()
    _load(store, [{"id": str(number), "text": "x"} for number in range(12)], tmp_path, batch=2)
    assert store.most == 2


def test_failures_are_counted_each_and_told_with_their_reason(tmp_path: Path) -> None:
    def fate(document: dict[str, Any]) -> dict[str, Any]:
        error = {"type": "invalid-request", "detail": "is too long", "field": "title", "remedy": "shorten it"}
        return {"id": document["id"], "status": "invalid", "error": error}

    seen: list[str] = []
    path = tmp_path / "x.jsonl"
    count = KEPT_FAILURES + 5
    path.write_text("".join(json.dumps({"id": str(n), "text": "x"}) + "\n" for n in range(count)) + "oops\n")
    tally = Loader(Store(fate), "c", on_failure=lambda failure: seen.append(failure.where)).load(
        [_source(path)], Names()
    )
    assert tally.failed == count + 1 == len(seen)
    assert len(tally.failures) == KEPT_FAILURES
    first = next(failure for failure in tally.failures if failure.id == "0")
    assert first.to_json() == {
        "where": f"{path}:1",
        "id": "0",
        "reason": "title: is too long",
        "remedy": "shorten it",
    }
    assert tally.to_json()["failed"] == count + 1


UNSENDABLE = {
    "half a surrogate pair": ('"text": "\\ud83d"', "text: holds half of a surrogate pair"),
    "half a pair as a key": ('"text": "x", "\\ud83d": 1', "metadata.\\ud83d: holds half of a surrogate pair"),
    "an infinite number": ('"text": "x", "n": 1e999', "metadata.n: holds a number that is not finite"),
    "one deep inside": ('"text": "x", "metadata": {"k": [{"n": -1e999}]}', "metadata.k: holds a number"),
}


@pytest.mark.parametrize("members, told", UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_what_cant_be_sent_fails_alone(tmp_path: Path, members: str, told: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        f'{{"id": "a", "text": "x"}}\n{{"id": "b", {members}}}\n'
        '{"id": "\\ud83d", "text": "x"}\n{"id": "c", "text": "x"}\n'
    )
    store = Store()
    tally = Loader(store, "c").load([_source(path)], Names())
    assert store.batches == [(["a", "c"], "true")]
    assert [(failure.where, failure.id) for failure in tally.failures] == [
        (f"{path}:2", "b"),
        (f"{path}:3", "\\ud83d"),
    ]
    assert tally.failures[0].reason.startswith(told)
    assert tally.failures[0].remedy
    json.dumps(tally.to_json(), ensure_ascii=False).encode()


def test_items_that_failed_for_a_passing_reason_are_sent_again_alone(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    def fate(document: dict[str, Any]) -> dict[str, Any]:
        name = document["id"]
        tries[name] = tries.get(name, 0) + 1
        if name == "never" or (name == "twice" and tries[name] < 3):
            return {
                "id": name,
                "status": "failed",
                "error": {"type": "embedder-unavailable", "detail": "busy"},
            }
        return {"id": name, "status": "updated"}

    slept: list[float] = []
    documents = [{"id": name, "text": "x"} for name in ("fine", "twice", "never")]
    tally = _load(Store(fate), documents, tmp_path, sleep=slept.append)
    assert tries == {"fine": 1, "twice": 3, "never": 4}
    assert slept == [0.5, 1.5, 4.5]
    assert (tally.updated, tally.failed) == (2, 1)
    assert [failure.id for failure in tally.failures] == ["never"]


def test_a_body_that_is_too_large_is_halved_until_it_fits(tmp_path: Path) -> None:
    class Small(Store):
        def upsert(
            self, collection: str, documents: Sequence[dict[str, Any]], *, refresh: str = "false"
        ) -> Any:
            if sum(len(document["text"]) for document in documents) > 20:
                raise ApiProblem(413, {"title": "The body is too large", "detail": "larger"}, None)
            return super().upsert(collection, documents, refresh=refresh)

    store = Small()
    documents = [{"id": str(number), "text": "x" * (30 if number == 2 else 10)} for number in range(4)]
    tally = _load(store, documents, tmp_path)
    assert sorted(name for batch, _ in store.batches for name in batch) == ["0", "1", "3"]
    assert (tally.created, tally.failed) == (3, 1)
    assert tally.failures[0].id == "2"


def test_an_overloaded_api_is_tried_again_after_what_it_asked_for(tmp_path: Path) -> None:
    with FarEnd(_store_all) as api, Client(api.url) as client:
        busy = Reply(503, {"title": "Too many requests at once"}, {"Retry-After": "7"})
        api.script = [busy, Reply(429, {"title": "Slow down"}), Reply(close_after=0)]
        slept: list[float] = []
        told: list[str] = []
        path = _write(tmp_path, [{"id": "a", "text": "x"}])
        tally = Loader(client, "c d", sleep=slept.append, report=told.append).load([path], Names())
    assert tally.created == 1
    assert len(api.requests) == 4
    assert {request.path for request in api.requests} == {"/v1/collections/c%20d/documents"}
    assert slept[0] == 7.0
    assert len(slept) == 3
    assert "Too many requests at once" in told[0]


def test_what_is_refused_whole_ends_the_loading(tmp_path: Path) -> None:
    problem = {"title": "Not valid", "detail": "no such name", "remedy": "choose another"}
    with FarEnd(lambda _: Reply(422, problem)) as api, Client(api.url) as client:
        loader = Loader(client, "c")
        with pytest.raises(ApiProblem) as caught:
            loader.load([_write(tmp_path, [{"id": "a", "text": "x"}])], Names())
    assert (caught.value.detail, caught.value.remedy) == ("Not valid: no such name", "choose another")
    assert len(api.requests) == 1


def test_an_api_that_stays_away_ends_the_loading(tmp_path: Path) -> None:
    slept: list[float] = []
    with FarEnd() as gone:
        url = gone.url
    with Client(url) as client:
        loader = Loader(client, "c", patience_s=0.0, sleep=slept.append)
        with pytest.raises(ApiUnreachable, match="does not answer"):
            loader.load([_write(tmp_path, [{"id": "a", "text": "x"}])], Names())
    assert slept == []


def test_an_interrupt_waits_for_what_is_under_way_and_counts_it(tmp_path: Path) -> None:
    class Interrupting(Store):
        def upsert(
            self, collection: str, documents: Sequence[dict[str, Any]], *, refresh: str = "false"
        ) -> Any:
            if documents[0]["id"] == "5":
                _thread.interrupt_main()
                self.gate.acquire(timeout=0.5)
            return super().upsert(collection, documents, refresh=refresh)

    told: list[str] = []
    documents = [{"id": str(number), "text": "x"} for number in range(50)]
    loader = Loader(Interrupting(), "c", batch=1, report=told.append)
    with pytest.raises(KeyboardInterrupt):
        loader.load([_write(tmp_path, documents)], Names())
    assert loader.tally.interrupted
    assert not loader.abandoned
    assert 6 <= loader.tally.created < 50
    assert told == ["Waiting for the requests under way; Ctrl-C again ends at once."]


# ---- helpers of these tests -----------------------------------------------------------------------------------------


def _store_all(seen: Seen) -> Reply:
    return Reply(
        body={"items": [{"id": d["id"], "status": "created"} for d in seen.body["documents"]], "failed": 0}
    )


def _source(path: Path, *, lines: bool = True) -> Source:
    return Source(path, path.name, path.stat().st_size, lines=lines)


def _write(folder: Path, documents: Sequence[dict[str, Any]]) -> Source:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return _source(path)


def _load(api: Store, documents: Sequence[dict[str, Any]], folder: Path, **options: Any) -> Tally:
    return Loader(api, "c", **options).load([_write(folder, documents)], Names())


def _text(name: str, title: str, text: str, at: str) -> dict[str, Any]:
    assert datetime.fromisoformat(at).astimezone(UTC).timestamp() == 1_700_000_000
    return {"id": name, "title": title, "text": text, "creation_time": at, "metadata": {"path": name}}


def test_a_read_item_says_where(tmp_path: Path) -> None:
    missing = Source(tmp_path / "gone.jsonl", "gone.jsonl", 10, lines=True)
    [item] = sources.read(missing, Names())
    assert isinstance(item, Read)
    assert "No such file" in str(item.fault)
