"""Uploads over a real socket, a real node behind them: every format found again, dates in their order, faults per file."""

import io
import json
import socket
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx2
import pytest

from app import files
from app.answers import BulkResult
from app.drafts import Names
from app.errors import LimitExceeded, Overloaded, UnreadableFile
from app.extracted import Limits
from app.limits import Limits as RequestLimits
from app.sandbox import Bounds, Line, Sandbox
from app.writing import Document
from tests.fakes import EmbeddingServer
from tests.papers import epub, pdf, word
from tests.service import Running, serving, settings_for, until

DIMS = 16


@pytest.fixture(scope="module")
def service(node_url: str) -> Iterator[Running]:
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(
            node_url,
            embedding.base_url,
            dims=DIMS,
            file_workers=1,
            file_timeout_s=600,
            file_wait_s=300,
            max_concurrent_requests=8,
        )
        with serving(settings) as running:
            yield running


@pytest.fixture
def collection(service: Running) -> Iterator[str]:
    name = f"files_{uuid.uuid4().hex[:10]}"
    yield name
    service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


def upload(service: Running, collection: str, *files: tuple[str, bytes], **form: Any) -> httpx2.Response:
    return service.client.post(
        f"/v1/collections/{collection}/files",
        files=[("file", (name, data, "application/octet-stream")) for name, data in files],
        data={
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in {"refresh": "wait_for", **form}.items()
        },
    )


def stored(service: Running, collection: str, id_: str) -> dict[str, Any]:
    answer = service.client.get(f"/v1/collections/{collection}/documents/{id_}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.node
def test_every_format_is_stored_and_found(service, collection):
    files = {
        "leave.md": b"---\ndate: 2024-01-02\n---\n# Leave\nmarkdown words",
        "notes.txt": "记事 plain words".encode("gb18030"),
        "page.html": b'<html lang="en"><title>Page</title><time datetime="2023-04-05">x</time><p>html words</p></html>',
        "report.pdf": pdf([["pdf words", "年假结转规定"]], created="D:20220101000000Z"),
        "rules.docx": word(created=datetime(2021, 1, 1)),  # noqa: DTZ001 - as Word has it
        "book.epub": epub(),
        "faq.csv": "id,text,created_at,price\nq1,csv words,2020-01-01,5\nq2,更多,,7.5\n".encode(),
        "lines.jsonl": b'{"id": "l1", "text": "jsonl words", "created_at": "2019-01-01"}\n',
    }
    answer = upload(service, collection, *files.items(), fields={"lang": "en", "metadata": {"batch": 7}})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["failed"] == 0
    assert [(item["id"], item["file"], item.get("row")) for item in body["items"]] == [
        *((name, name, None) for name in list(files)[:6]),
        ("q1", "faq.csv", 2),
        ("q2", "faq.csv", 3),
        ("l1", "lines.jsonl", 1),
    ]
    assert all(item["status"] == "created" for item in body["items"])
    dates = {item["id"]: stored(service, collection, item["id"])["creation_time"] for item in body["items"]}
    assert {id_: date and date[:10] for id_, date in dates.items() if id_ != "notes.txt"} == {
        "leave.md": "2024-01-02",
        "page.html": "2023-04-05",
        "report.pdf": "2022-01-01",
        "rules.docx": "2021-01-01",
        "book.epub": "2024-05-01",
        "q1": "2020-01-01",
        "q2": None,
        "l1": "2019-01-01",
    }
    today = datetime.now(UTC).date().isoformat()
    assert dates["notes.txt"] <= f"{today}T23:59:59.999Z"
    [untimed] = [item for item in body["items"] if item["id"] == "notes.txt"]
    assert "time of the upload" in " ".join(untimed["warnings"])
    assert "gb18030" in " ".join(untimed["warnings"])
    report = stored(service, collection, "report.pdf")
    assert report["metadata"] == {"batch": 7, "pages": 1, "path": "report.pdf"}
    assert report["lang"] == "en"
    assert stored(service, collection, "q1")["metadata"] == {"batch": 7, "price": 5}
    found = service.client.post(
        "/v1/search",
        json={"collection": collection, "query": "年假结转", "routes": [{"kind": "text"}], "top_k": 3},
    ).json()
    assert {hit["id"] for hit in found["hits"]} == {"report.pdf", "book.epub"}


@pytest.mark.node
def test_columns_that_are_called_otherwise_are_told(service, collection):
    table = ("news.csv", b"slug,body,published\na,words of it,2024-05-06\n")
    [item] = upload(service, collection, table).json()["items"]
    no_text, undated = item["warnings"]
    assert no_text.startswith("no column is called `text` or `title`: its text is made of all columns")
    assert undated.startswith("it is undated, although `published` looks like its date: name it")
    [item] = upload(
        service, collection, table, names={"text": "body", "creation_time": "published_at"}
    ).json()["items"]
    assert [told.split(";")[0] for told in item["warnings"]] == [
        "it is undated: no column is called `published_at`, there is `published`"
    ]
    for name in ("time", "creation_time"):
        named = {"id": "slug", "text": "body", name: "published"}
        [item] = upload(service, collection, table, names=named).json()["items"]
        assert "warnings" not in item
        assert stored(service, collection, "a")["creation_time"][:10] == "2024-05-06"
    # A column that is there is not called missing in the row that leaves it empty.
    empty = ("news.csv", b"slug,body,published\ne,words of it,2024-05-06\nf,other words,\n")
    named = {"id": "slug", "text": "body", "creation_time": "published"}
    items = upload(service, collection, empty, names=named).json()["items"]
    assert [item.get("warnings") for item in items] == [None, None]
    lines = (
        "news.jsonl",
        b'{"id": "b", "text": "words", "published": "2024-05-06"}\n{"id": "c", "text": "words"}',
    )
    dated, bare = upload(service, collection, lines).json()["items"]
    assert dated["warnings"][0].startswith("it is undated, although `published`")
    assert "warnings" not in bare
    both = upload(service, collection, table, names={"time": "a", "creation_time": "b"})
    assert both.status_code == 422
    assert both.json()["field"].startswith("names.")


@pytest.mark.node
def test_what_the_caller_says_outranks_the_file(service, collection):
    data = b"---\ndate: 2024-01-02\ntitle: Its own\n---\nwords"
    answer = upload(
        service,
        collection,
        ("a.md", data),
        ("b.md", data),
        ("c.md", data),
        fields={"creation_time": "2020-01-01", "author": "all"},
        each=[{"id": "first", "creation_time": "2019-01-01", "title": "Mine"}, None, {"creation_time": None}],
    )
    assert [item["id"] for item in answer.json()["items"]] == ["first", "b.md", "c.md"]
    first, second, third = (stored(service, collection, id_) for id_ in ("first", "b.md", "c.md"))
    assert (first["creation_time"][:4], first["title"], first["author"]) == ("2019", "Mine", "all")
    assert (second["creation_time"][:4], second["title"]) == ("2020", "Its own")
    assert third["creation_time"] is None


@pytest.mark.node
def test_a_broken_file_is_one_items_error_and_the_rest_is_stored(service, collection):
    answer = upload(
        service,
        collection,
        ("good.txt", b"words"),
        ("broken.pdf", b"%PDF-1.4 nothing"),
        ("locked.pdf", pdf([["x"]], encrypted=True)),
        ("empty.txt", b""),
        ("good.txt", b"another of the same name"),
        ("t.csv", b"id,text\na,x\nb,y,z\n"),
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert [item["status"] for item in body["items"]] == [
        "created", "invalid", "invalid", "invalid", "invalid", "created", "invalid",
    ]  # fmt: skip
    assert body["failed"] == 5
    broken = body["items"][1]
    assert broken["file"] == "broken.pdf"
    assert broken["error"]["type"] == "file-unreadable"
    assert broken["error"]["remedy"]
    assert "same id" in body["items"][4]["error"]["detail"]
    assert stored(service, collection, "good.txt")["text"] == "words"


@pytest.mark.node
def test_an_upload_of_nothing_readable_is_refused_and_makes_no_collection(service, collection):
    answer = upload(service, collection, ("a.png", b"\x89PNG...."))
    assert answer.status_code == 422
    assert answer.json()["items"][0]["error"]["type"] == "file-unreadable"
    answer = upload(service, collection, ("a.txt", b"words"), fields={"creation_time": "soon"})
    assert answer.status_code == 422
    assert "creation_time" in answer.json()["items"][0]["error"]["field"]
    assert service.client.get(f"/v1/collections/{collection}").status_code == 404


WRONG = {
    "no file": ([], {}, "body"),
    "JSON that is none": ([("a.txt", b"x")], {"fields": "{nope"}, "fields"),
    "an unknown part": ([("a.txt", b"x")], {"meta": "{}"}, "meta"),
    "the text given beside the file": ([("a.txt", b"x")], {"fields": {"text": "y"}}, "fields.text"),
    "a field that is none": ([("a.txt", b"x")], {"each": [{"colour": 1}]}, "each"),
    "too few for each": ([("a.txt", b"x"), ("b.txt", b"y")], {"each": [{}]}, "each"),
    "a name of no file": ([("a.txt", b"x")], {"each": {"b.txt": {}}}, "each"),
    "a refresh that is none": ([("a.txt", b"x")], {"refresh": "soon"}, "refresh"),
}


@pytest.mark.node
@pytest.mark.parametrize("files, form, field", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_form_is_refused_by_its_field(service, collection, files, form, field):
    answer = upload(service, collection, *files, **form)
    assert answer.status_code == 422, answer.text
    assert answer.json()["field"].startswith(field), answer.text


@pytest.mark.node
def test_a_row_without_an_id_is_told_in_the_words_of_the_form(service, collection):
    lines = b'{"id": true, "text": "x"}\n{"id": "b", "text": "y"}\n'
    answer = upload(service, collection, ("a.jsonl", lines))
    assert answer.status_code == 200, answer.text
    bad, good = answer.json()["items"]
    assert (bad["status"], good["status"]) == ("invalid", "created")
    assert "form's `names`" in bad["error"]["detail"]
    assert "--" not in bad["error"]["detail"]


def test_a_body_that_is_no_form_is_refused(service, collection):
    answer = service.client.post(f"/v1/collections/{collection}/files", json={"file": "x"})
    assert answer.status_code == 422
    assert "multipart" in answer.json()["detail"]


@pytest.mark.node
def test_the_service_answers_while_a_file_is_read(service, collection):
    rows = "".join(f"<tr><td>{n}</td><td>words {n}</td></tr>" for n in range(20_000))
    page = f"<html><table>{rows}</table></html>".encode()
    answered: list[int] = []
    thread = threading.Thread(
        target=lambda: answered.append(upload(service, collection, ("big.html", page)).status_code)
    )
    thread.start()
    while not answered:
        assert service.client.get("/livez").status_code == 200
        time.sleep(0.05)
    thread.join()
    assert answered == [200]


# --- the processes ---------------------------------------------------------------------------------------------------


def bomb(size: int) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(word())) as whole,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name in whole.namelist():
            archive.writestr(name, b" " * size if name == "word/document.xml" else whole.read(name))
    return out.getvalue()


async def test_more_rows_than_one_request_may_hold_is_told_as_that_limit():
    async def refuse(items: Sequence[Any]) -> BulkResult:
        RequestLimits(documents=1).check_items(items)
        raise AssertionError("the limit let them through")

    table = files.Upload("faq.csv", b"id,text\n1,one\n2,two\n", None, {})
    with Sandbox(workers=1) as sandbox:
        readings = await files.read([table], sandbox=sandbox, caller="a")
    with pytest.raises(LimitExceeded, match="2 items at once"):
        await files.store([table], readings, names=Names(), upsert=refuse, now=datetime.now(UTC))


def test_reading_that_takes_too_long_is_ended_and_the_next_file_is_read():
    with Sandbox(workers=1, bounds=Bounds(timeout_s=0.001)) as sandbox:
        with pytest.raises(UnreadableFile, match=r"longer than 0\.001 s"):
            sandbox.extract(b"words", name="a.txt")
        sandbox._bounds = Bounds()
        assert sandbox.extract(b"words", name="a.txt").text == "words"


def test_a_small_file_has_a_part_of_the_time():
    bounds = Bounds(timeout_s=60, small_share=1 / 6)
    assert [bounds.seconds(size) for size in (0, 2**20, 5 * 2**20, 2**30)] == pytest.approx([10, 20, 60, 60])


def test_reading_that_takes_too_much_memory_is_ended_and_the_next_file_is_read():
    limits = Limits(max_unpacked_bytes=2**40)
    with Sandbox(workers=1, bounds=Bounds(memory_bytes=300 * 2**20), limits=limits) as sandbox:
        with pytest.raises(UnreadableFile, match="memory"):
            sandbox.extract(bomb(250 * 2**20), name="a.docx")
        assert sandbox.extract(b"words", name="a.txt").text == "words"


def test_a_clock_that_runs_out_late_ends_no_later_reading():
    with Sandbox(workers=1) as sandbox:
        sandbox.extract(b"words", name="a.txt")
        [process] = sandbox._idle
        process.too_slow(process.asked)  # its answer is here already
        assert process.alive
        assert sandbox.extract(b"more words", name="b.txt").text == "more words"
        assert sandbox._idle == [process]
        assert not process.slow


def test_a_process_that_died_idle_costs_no_file():
    with Sandbox(workers=1) as sandbox:
        sandbox.extract(b"words", name="a.txt")
        [process] = sandbox._idle
        process._process.kill()
        process._process.wait()
        assert sandbox.extract(b"words", name="a.txt").text == "words"


def test_the_processes_see_no_environment_and_end_with_the_sandbox():
    sandbox = Sandbox(workers=1)
    sandbox.extract(b"words", name="a.txt")
    [process] = sandbox._idle
    with open(f"/proc/{process._process.pid}/environ", "rb") as stream:
        seen = stream.read()
    assert b"PATH" not in seen
    sandbox.close()
    assert process._process.poll() is not None


# --- the line --------------------------------------------------------------------------------------------------------

ENDLESS = b"<p " + b" ".join(b"a%d=1" % n for n in range(200_000)) + b">x"
"""A page whose reading takes about a minute: no test waits for its end."""


def test_a_caller_with_long_files_makes_no_other_wait():
    with Sandbox(workers=1) as sandbox, sandbox.batch("a", 1) as mine:
        long = [mine.submit(ENDLESS, name="h.html") for _ in range(3)]
        with sandbox.batch("b", 1) as other:
            assert other.submit(b"words", name="a.txt").result(60).text == "words"
        assert [one.done() for one in long] == [False] * 3


def test_callers_take_turns():
    order: list[str] = []
    with Sandbox(workers=1) as sandbox, sandbox.batch("y", 1) as reserve, sandbox.batch("a", 1) as mine:
        with sandbox.batch("z", 1) as first:
            for busy in (first, reserve):
                busy.submit(ENDLESS, name="h.html")
            other = sandbox.batch("b", 1)
            waiting = {"a1": mine, "a2": mine, "a3": mine, "b1": other}
            read = []
            for name, batch in waiting.items():
                read.append(batch.submit(b"words", name=f"{name}.txt"))
                read[-1].add_done_callback(partial(lambda name, _: order.append(name), name))
            assert sandbox.load == (2, 4)
        for one in read:
            assert one.result(60).text == "words"
    assert order == ["a1", "b1", "a2", "a3"]


def test_an_upload_that_leaves_is_dropped_read_or_not():
    with Sandbox(workers=1) as sandbox:
        with sandbox.batch("a", 1) as batch:
            begun, waiting = (batch.submit(ENDLESS, name="h.html") for _ in range(2))
            assert sandbox.load == (1, 1)
        assert waiting.cancelled()
        assert isinstance(begun.exception(60), UnreadableFile)
        assert sandbox.load == (0, 0)
        assert sandbox._callers == {}
        assert sandbox.extract(b"words", name="a.txt").text == "words"


def test_an_upload_that_waits_too_long_is_turned_away_and_one_that_is_begun_is_not():
    with (
        Sandbox(workers=1) as sandbox,
        sandbox.batch("a", 1) as begun,
        sandbox.batch("b", 1) as reserve,
        sandbox.batch("c", 1) as late,
    ):
        long = [batch.submit(ENDLESS, name="h.html") for batch in (begun, begun, reserve)]
        waiting = late.submit(b"words", name="a.txt")
        for batch in (begun, reserve, late):
            batch.give_up()
        assert isinstance(waiting.exception(60), Overloaded)
        assert [one.done() for one in long] == [False] * 3


async def test_a_whole_upload_is_turned_away_if_none_of_its_files_is_begun_in_time():
    line = Line(wait_s=0.01)
    two = [files.Upload(name, b"words", None, {}) for name in ("a.txt", "b.txt")]
    with (
        Sandbox(workers=1, line=line) as sandbox,
        sandbox.batch("a", 1) as one,
        sandbox.batch("b", 1) as other,
    ):
        for busy in (one, other):
            busy.submit(ENDLESS, name="h.html")
        with pytest.raises(Overloaded, match=r"within 0\.01 s"):
            await files.read(two, sandbox=sandbox, caller="c")
        assert sandbox.load == (2, 0)


FULL = {
    "a caller's uploads": (Line(uploads=4), [("a", 1), ("a", 1)], ("a", 1), "2 of your uploads"),
    "all uploads": (Line(uploads=2), [("a", 1), ("b", 1)], ("c", 1), "2 uploads"),
    "a caller's bytes": (Line(most_bytes=100), [("a", 30)], ("a", 30), "1 of your uploads"),
    "all bytes": (Line(most_bytes=100), [("a", 50), ("b", 50)], ("c", 1), "2 uploads"),
}


@pytest.mark.parametrize("line, held, more, told", FULL.values(), ids=FULL.keys())
def test_the_line_is_bounded_and_a_caller_has_half_of_it(line, held, more, told):
    with Sandbox(line=line) as sandbox:
        held = [sandbox.batch(*one) for one in held]
        with pytest.raises(Overloaded, match=told) as caught:
            sandbox.batch(*more)
        assert caught.value.retry_after_s
        with held[0]:
            pass
        sandbox.batch(*more)


def test_one_upload_is_taken_whatever_its_size():
    with Sandbox(line=Line(most_bytes=10)) as sandbox:
        sandbox.batch("a", 1000)


@pytest.mark.node
def test_uploads_that_take_long_stop_no_write_and_are_dropped_when_their_callers_hang_up(service, collection):
    def holds(*load: int) -> bool:
        return service.server.config.app.state.service.sandbox.load == load

    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="h.html"\r\n\r\n' + ENDLESS
    form += b"\r\n--x--\r\n"
    host, port = service.client.base_url.host, service.client.base_url.port
    head = (
        f"POST /v1/collections/{collection}/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(form)}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    callers = []
    for number in range(12):  # more than requests may be answered at once
        callers.append(socket.create_connection((host, port)))
        callers[-1].sendall(head.encode() + form)
        until(partial(holds, 1, number), within_s=60)
    answer = service.client.post(
        f"/v1/collections/{collection}/documents", json={"documents": [{"id": "d", "text": "words"}]}
    )
    assert answer.status_code == 200, answer.text
    for caller in callers:
        caller.close()
    until(partial(holds, 0, 0), within_s=60)
    assert upload(service, collection, ("a.txt", b"words")).status_code == 200


@pytest.mark.node
@pytest.mark.parametrize(
    "given",
    [{"metadata": "x"}, {"metadata": [1]}, {"metadata": 5}, {"metadata": True}, {"id": 5}, {"id": ["x"]}],
)
def test_what_is_given_of_a_file_is_put_together_only_where_it_fits(service, collection, given):
    [name] = given
    for form in ({"fields": given}, {"each": {"a.txt": given}}, {"each": [given]}):
        answer = upload(service, collection, ("a.txt", b"words"), refresh="false", **form)
        assert answer.status_code == 422, answer.text
        assert f"`{name}` is no" in answer.text


ODD: list[Any] = [None, 5, -1.5, True, "x", [], [None], {}, {"a": {}}]


@pytest.mark.node
def test_whatever_is_given_of_a_file_is_stored_or_told(service, collection):
    files = ("a.txt", b"words"), ("a.jsonl", b'{"id": "r", "text": "words", "metadata": {"k": 1}}')
    for name in sorted(Document.model_fields.keys() - {"text", "embedding"}):
        for value in ODD:
            for file in files:
                answer = upload(service, collection, file, refresh="false", fields={name: value})
                assert answer.status_code in (200, 422), (name, value, answer.text)


@pytest.mark.node
def test_a_null_given_for_an_id_is_as_none_given(service, collection):
    answer = upload(service, collection, ("a.csv", b"text\nwords\n"), fields={"id": None})
    assert [item["id"] for item in answer.json()["items"]] == ["a.csv#2"]
