"""What files say: every format in English and Chinese, its own dates, its encoding, and all that is broken or too large."""

import io
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from app import extracting
from app.drafts import Names, from_line
from app.errors import UnreadableFile
from app.extracted import Extracted, Limits, moment_of
from app.extracting import extract
from app.plainfiles import csv_rows, first_heading, split_front_matter
from tests.papers import epub, pdf, word

PAGE = """<!doctype html><html lang="zh-CN"><head><meta charset="utf-8"><title> 差旅
  标准 </title>{meta}</head><body><nav>Home</nav><header>Site</header><main><article><header><h1>住宿标准</h1></header>
<p>一线城市每晚 <b>600</b> 元，见 <a href="http://x.example/a_b">附件</a>。<br>5 * 3</p><ul><li>a</li><li>b</li></ul>
<table><tr><th>city</th><th>fee</th></tr><tr><td>北京</td><td>600</td></tr></table><script>evil()</script></article></main>
<aside>adverts</aside><footer>imprint</footer></body></html>"""


def test_html_gives_its_main_text_and_none_of_its_frame() -> None:
    found = extract(PAGE.format(meta="").encode(), name="a.html")
    assert found.title == "差旅 标准"
    assert found.text.split("\n") == [
        "# 住宿标准",
        "",
        "一线城市每晚 600 元，见 附件。",
        "5 * 3",
        "",
        "- a",
        "- b",
        "",
        "| city | fee |",
        "| --- | --- |",
        "| 北京 | 600 |",
    ]
    assert found.fields == {"lang": "zh"}


def test_html_without_a_main_part_loses_only_what_frames_it() -> None:
    page = b"<html><body><header>Site</header><div><p>One.</p><div>Two.</div></div> tail<footer>x</footer></body></html>"
    assert extract(page, name="a.html").text.split() == ["One.", "Two.", "tail"]


META = {
    "article": '<meta property="article:published_time" content="2025-03-01T08:00:00+08:00">',
    "json-ld": '<script type="application/ld+json">{"@graph": [{"@type": "Article", "datePublished": "2025-03-01"}]}</script>',
    "meta name": '<meta name="DC.date.issued" content="2025-03-01">',
    "itemprop": '<meta itemprop="datePublished" content="2025-03-01">',
    "time": '<time datetime="2025-03-01T00:00">1 March</time>',
    "the published one wins": '<meta name="date" content="2020-01-01">'
    '<meta property="article:published_time" content="2025-03-01">',
    "as mails write it": '<meta name="date" content="Sat, 01 Mar 2025 00:00:00 GMT">',
    "as Chinese write it": '<meta name="pubdate" content="2025年3月1日">',
}


@pytest.mark.parametrize("meta", META.values(), ids=META.keys())
def test_html_tells_when_it_was_published(meta: str) -> None:
    found = extract(PAGE.format(meta=meta).encode(), name="a.html")
    assert found.fields["creation_time"] == "2025-03-01T00:00:00.000Z"


def test_html_tells_author_address_and_change() -> None:
    meta = (
        '<meta name="author" content="Li Wei"><link rel="canonical" href="https://x.example/p">'
        '<meta property="article:modified_time" content="2025-04-01">'
    )
    fields = extract(PAGE.format(meta=meta).encode(), name="a.html").fields
    assert fields == {
        "author": "Li Wei", "lang": "zh", "url": "https://x.example/p", "updated_at": "2025-04-01T00:00:00.000Z",
    }  # fmt: skip


def test_a_date_that_is_none_is_told_and_not_taken() -> None:
    found = extract(PAGE.format(meta='<meta name="date" content="last spring">').encode(), name="a.html")
    assert "creation_time" not in found.fields
    assert "last spring" in found.warnings[0]


MOMENTS = {
    "2024": "2024-01-01", "2024-05": "2024-05-01", "2024/5/6": "2024-05-06", "20240506": "2024-05-06",
    "2024年5月6日": "2024-05-06", "2024年": "2024-01-01", "1601-01-01": None, "1970-01-01T00:00:00Z": None, "soon": None,
    "2024-13-01": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("text, day", MOMENTS.items(), ids=MOMENTS.keys())
def test_dates_as_documents_write_them(text: str, day: str | None) -> None:
    wanted = None if day is None else datetime.fromisoformat(day).replace(tzinfo=UTC)
    assert moment_of(text) == wanted


def test_pdf_of_both_languages_with_its_date_title_and_author() -> None:
    data = pdf(
        [
            ["Annual leave", "Five days may be carried over."],
            ["差旅住宿标准规定如下，一线城市", "每晚六百元，其他城市每晚四百元", "以内。"],
        ],
        created="D:20250301080000+08'00'",
        title="假期规定",
        author="李伟",
    )
    found = extract(data, name="report.bin")
    assert found.kind == "pdf"
    assert found.text == (
        "Annual leave\nFive days may be carried over.\n\n"
        "差旅住宿标准规定如下，一线城市每晚六百元，其他城市每晚四百元以内。"
    )
    assert found.title == "假期规定"
    assert found.fields == {"creation_time": "2025-03-01T00:00:00.000Z", "author": "李伟"}
    assert found.metadata == {"pages": 2}


def test_a_pdf_title_that_a_program_made_up_is_none() -> None:
    assert extract(pdf([["x"]], title="Microsoft Word - draft3.doc"), name="a.pdf").title is None


def test_word_gives_headings_lists_tables_and_its_own_date() -> None:
    data = word(created=datetime(2024, 2, 3, 4, 5, 6), title="Leave", author="People team")  # noqa: DTZ001 - as Word has it
    found = extract(data, name="a.docx")
    assert found.kind == "docx"
    assert found.text == (
        "# Annual leave\n\nFive days may be carried over.\n\n- until March\n- never later\n\n## 差旅住宿标准\n\n"
        "一线城市每晚六百元。\n\n| city | night | note |\n| --- | --- | --- |\n| 北京 | 600 元 |"
    )
    assert found.title == "Leave"
    assert found.fields["creation_time"] == "2024-02-03T04:05:06.000Z"
    assert found.fields["author"] == "People team"


def test_epub_gives_its_chapters_in_reading_order_and_its_date() -> None:
    found = extract(epub(), name="book.epub")
    assert found.kind == "epub"
    assert found.text == "# One\n\nIt began.\n\n# 第二章\n\n年假可以结转五天。"
    assert found.title == "A small book"
    assert found.fields == {
        "creation_time": "2024-05-01T00:00:00.000Z", "updated_at": "2025-06-01T00:00:00.000Z", "author": "Li Wei",
        "lang": "zh",
    }  # fmt: skip


def test_markdown_keeps_its_front_matter_apart() -> None:
    found = extract(b"---\ntitle: Kept\ndate: 2024-01-02\ntags: [a, b]\n---\n# Head\nbody", name="a.md")
    assert found.front == {"title": "Kept", "date": "2024-01-02", "tags": ["a", "b"]}
    assert (found.text, found.title) == ("# Head\nbody", "Head")


TABLES = {
    "commas": (b"id,text,n\na,\"x, y\n2\",5\n,,\nb,z,\n", "t.csv"),
    "semicolons": (b"id;text;n\na;\"x, y\n2\";5\nb;z;\n", "t.csv"),
    "tabs": (b"\xef\xbb\xbfid\ttext\tn\na\t\"x, y\n2\"\t5\nb\tz\t\n", "t.tsv"),
    "UTF-16": ('id,text,n\na,"x, y\n2",5\nb,z,\n'.encode("utf-16"), "t.csv"),
}  # fmt: skip


@pytest.mark.parametrize("data, name", TABLES.values(), ids=TABLES.keys())
def test_tables_give_rows(data: bytes, name: str) -> None:
    rows = extract(data, name=name).rows
    assert rows is not None
    assert [row.values for row in rows] == [
        {"id": "a", "text": "x, y\n2", "n": "5"},
        {"id": "b", "text": "z"},
    ]


def test_a_row_that_does_not_fit_is_its_own_fault() -> None:
    rows = extract(b"id,text\na,b,c\nd,e\n", name="t.csv").rows
    assert rows is not None
    assert [(row.number, row.fault is None) for row in rows] == [(2, False), (3, True)]


QUOTES = {
    "never closed": (b'6,six\n7,"seven\n8,eight\n9,nine\n', ["6", None], "takes the 2 lines after it"),
    "never closed, in the last line": (b'6,six\n7,"seven', ["6", None], "takes the file's end"),
    "closed where a later row opens one": (b'7,"seven\n8,eight\n9,"nine"\n10,ten\n', [None, "10"], "2 lines later"),
    "closed as it should be": (b'7,"se""v,en\nand\n more" \n8,"eight"\n', ["7", "8"], ""),
    "forgiven within a line": (b'7,"seven" of them\n8,5" wide\n', ["7", "8"], ""),
    "an open one in a blank last line": (b'7,seven\n"', ["7"], ""),
}  # fmt: skip


@pytest.mark.parametrize("data, ids, told", QUOTES.values(), ids=QUOTES.keys())
def test_a_row_that_swallows_others_by_a_forgotten_quote_is_a_fault(
    data: bytes, ids: list[str | None], told: str
) -> None:
    rows = extract(b"id,text\n" + data, name="t.csv").rows
    assert rows is not None
    assert [row.values and row.values["id"] for row in rows] == ids
    assert told in "".join(row.fault or "" for row in rows)
    assert [row.warnings for row in rows] == [[]] * len(rows)


def test_a_header_with_a_forgotten_quote_is_refused() -> None:
    with pytest.raises(UnreadableFile, match="header has a quote"):
        extract(b'id,"text\n1,one\n', name="t.csv")


@pytest.mark.parametrize(
    "cell, warned",
    [
        ("seven\n8,eight\n9,nine", True),
        ("seven\n8,eight,8\n9,nine", False),
        ("two offices:\nBerlin, Germany\nParis, France", False),
        ("words\nand words", False),
    ],
)
def test_a_cell_that_looks_like_rows_is_warned_of(cell: str, warned: bool) -> None:
    rows = extract(f'id,text\n7,"{cell}"\n10,ten\n'.encode(), name="t.csv").rows
    assert rows is not None
    assert [row.values["id"] for row in rows if row.values] == ["7", "10"]
    assert ["look like rows" in " ".join(row.warnings) for row in rows] == [warned, False]


def test_lines_of_json_are_rows_and_a_bad_one_its_own_fault() -> None:
    rows = extract(b'{"id": 1}\n\n{nope\n{"id": 2}', name="t.jsonl").rows
    assert rows is not None
    assert [(row.number, row.values) for row in rows] == [(1, {"id": 1}), (3, None), (4, {"id": 2})]


CHINESE = "差旅住宿标准：一线城市每晚六百元，其他城市四百元。\n员工应当提前申请。"
ENCODINGS = {
    "UTF-8": ("utf-8", False),
    "UTF-8 with its mark": ("utf-8-sig", False),
    "UTF-16 with its mark": ("utf-16", False),
    "UTF-16 without": ("utf-16-le", True),
    "UTF-16, big endian, without": ("utf-16-be", True),
    "GB18030": ("gb18030", True),
    "Big5": ("big5", True),
    "EUC-KR": ("euc_kr", True),
    "EUC-JP": ("euc_jp", True),
    "Shift JIS": ("shift_jis", True),
    "Windows-1252": ("cp1252", True),
}
TEXTS = {
    "big5": "差旅住宿標準：一線城市每晚六百元，其他城市四百元。\n員工應當提前申請，並附上收據與發票。" * 3,
    "shift_jis": "出張の宿泊費は一泊一万円までとする。申請は前日までに行うこと。領収書を添付してください。"
    * 3,
    "euc_kr": "출장 숙박비는 하루 십만 원까지 지급한다. 신청은 전날까지 해야 한다. 영수증을 첨부하십시오.\n"
    * 3,
    "euc_jp": "出張の宿泊費は一泊一万円までとする。申請は前日までに行うこと。領収書を添付してください。" * 3,
    "cp1252": "Größere Übernachtungskosten müssen vorher genehmigt werden – café, naïve, “quoted”.\n" * 3,
}


@pytest.mark.parametrize("encoding, guessed", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_encodings_are_told_apart(encoding: str, guessed: bool) -> None:
    text = TEXTS.get(encoding, CHINESE + (" Plain words beside them." if "utf-16-" in encoding else ""))
    found = extract(text.encode(encoding), name="a.txt")
    assert found.text == text
    assert bool(found.warnings) == guessed


@pytest.mark.parametrize("text", ["记事 plain words", "年假结转", "员工手册\n请假"], ids=str)
def test_a_few_chinese_words_are_enough(text: str) -> None:
    assert extract(text.encode("gb18030"), name="a.txt").text == text


def test_html_in_its_declared_encoding() -> None:
    page = PAGE.replace("utf-8", "gb2312").format(meta="").encode("gb18030")
    found = extract(page, name="a.html")
    assert found.title == "差旅 标准"
    assert found.warnings == []


KINDS = {
    "content before name": (b"%PDF-1.4 ...", "a.txt", None, "pdf"),
    "name before declared type": (b"x", "a.md", "text/html", "markdown"),
    "declared type last": (b"a,b", "upload", "text/csv; charset=utf-8", "csv"),
    "HTML by its content": (b"\n<!DOCTYPE html><html>", "page", None, "html"),
    "front matter": (b"---\ntitle: x\n---\n", "note", None, "markdown"),
    "anything else is text": (b"words", "README", None, "text"),
}


@pytest.mark.parametrize("data, name, declared, kind", KINDS.values(), ids=KINDS.keys())
def test_formats_are_known_by_content_then_name_then_word(
    data: bytes, name: str, declared: str | None, kind: str
) -> None:
    assert extracting.kind_of(data, name=name, content_type=declared) == kind


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


ENTITIES = "".join(f'<!ENTITY {chr(98 + n)} "{("&" + chr(97 + n) + ";") * 10}">' for n in range(9))
BOMB = f'<!DOCTYPE package [<!ENTITY a "aaaaaaaaaa">{ENTITIES}]>'
REFUSED = {
    "nothing": (b"", "a.txt", "empty"),
    "larger than allowed": (b"x" * 2_000_001, "a.txt", "2000001 bytes"),
    "a PDF that is none": (b"words", "a.pdf", "content is none"),
    "a PDF cut short": (pdf([["x"]])[:200], "a.pdf", "broken"),
    "an encrypted PDF": (pdf([["x"]], encrypted=True), "a.pdf", "password"),
    "a PDF without text": (pdf([[], []]), "a.pdf", "no text"),
    "a PDF of too many pages": (pdf([["x"]] * 51), "a.pdf", "51 pages"),
    "a Word file cut short": (word()[:4000], "a.docx", "broken"),
    "a Word file without a body": (zipped({"word/document.xml": b"<a/>"}), "a.docx", "broken"),
    "a ZIP bomb": (zipped({"word/document.xml": b"0" * 20_000_000}), "a.docx", "would unpack"),
    "a spreadsheet": (zipped({"xl/workbook.xml": b"<a/>"}), "a.xlsx", "spreadsheet"),
    "an archive": (zipped({"a.txt": b"x"}), "a.zip", "archive"),
    "an EPUB that names nothing": (zipped({"META-INF/container.xml": b"<a/>"}), "a.epub", "package document"),
    "an EPUB under DRM": (
        epub(extra={"META-INF/encryption.xml": '<e><EncryptionMethod Algorithm="http://x.example/drm"/></e>'}),
        "a.epub",
        "protected",
    ),
    "an old Word file": (b"\xd0\xcf\x11\xe0" + b"\0" * 600, "a.doc", "old or encrypted"),
    "an image": (b"\x89PNG\r\n\x1a\n", "a.png", "image"),
    "bytes that are no text": (b"\x00\x01\x02\x03words", "a.txt", "no text"),
    "a table without a header": (b"\n1,2\n", "a.csv", "no header"),
    "a table with a name twice": (b"a,a\n1,2\n", "a.csv", "two columns"),
    "a table of too many rows": (b"id,text\n" + b"a,b\n" * 101, "a.csv", "100 rows"),
    "a text that is too long": (b"x " * 60_000, "a.txt", "characters"),
}  # fmt: skip
SMALL = Limits(
    max_bytes=2_000_000, max_unpacked_bytes=10_000_000, max_pages=50, max_chars=100_000, max_rows=100
)


@pytest.mark.parametrize("data, name, told", REFUSED.values(), ids=REFUSED.keys())
def test_what_can_not_be_read_is_told_with_a_remedy(data: bytes, name: str, told: str) -> None:
    with pytest.raises(UnreadableFile, match=told) as caught:
        extract(data, name=name, limits=SMALL)
    assert caught.value.remedy


def test_entities_are_neither_multiplied_nor_fetched() -> None:
    bomb = epub(date="&i;", opf_head=BOMB)
    with pytest.raises(UnreadableFile, match="amplification"):
        extract(bomb, name="a.epub")
    outside = '<!DOCTYPE package [<!ENTITY i SYSTEM "file:///etc/hostname">]>'
    found = extract(epub(date="&i;2024-05-01", opf_head=outside), name="a.epub")
    assert "hostname" not in str(found.to_json()).lower()


def test_what_crosses_a_pipe_is_what_was_read() -> None:
    for data, name in ((b"id,text\na,b\n", "a.csv"), (epub(), "a.epub")):
        found = extract(data, name=name)
        assert Extracted.from_json(found.to_json()) == found


_GAP = "a" + " " * 300_000 + "b"


@pytest.mark.parametrize(
    "read, told",
    [
        pytest.param(lambda: moment_of(_GAP), None, id="a date of a page"),
        pytest.param(lambda: first_heading("# a" + " " * 5_000 + "b #\n"), "a" + " " * 5_000 + "b", id="a heading"),
        pytest.param(
            lambda: len(split_front_matter("---\nx:\n" + "- a\n" * 300_000 + "---\n")[0]["x"]), 300_000, id="a list"
        ),
        pytest.param(
            lambda: len(extract(("<main>" + "<script></script>ab" * 100_000).encode(), name="a.html").text),
            200_000,
            id="what a page drops",
        ),
        pytest.param(
            lambda: next(csv_rows(io.StringIO(",".join(map(str, range(100_000))) + "\na\n"))).values,
            {"0": "a"},
            id="a table's header",
        ),
    ],
)  # fmt: skip
def test_what_is_read_is_not_read_again_from_each_of_its_characters(
    read: Callable[[], Any], told: Any
) -> None:
    """With the square of its length each takes minutes, which the suite would show; no time is asserted."""
    assert read() == told


def test_a_date_of_a_line_is_read_once_in_the_service_itself() -> None:
    with pytest.raises(ValueError, match="`creation_time`"):
        from_line({"id": "a", "text": "x", "creation_time": _GAP}, Names())
    line = from_line({"id": "a", "text": "x", "creation_time": "2024-01-02 10:00:00  +0800"}, Names())
    assert line["creation_time"] == "2024-01-02T02:00:00.000Z"


@pytest.mark.parametrize(
    "line, heading",
    [("# a #", "a"), ("##  a b  ##  ", "a b"), ("# C#", "C"), ("   # a", "a"), ("#", None), ("# ##", None), ("#a", None)],
)  # fmt: skip
def test_a_heading_is_what_stands_between_its_marks(line: str, heading: str | None) -> None:
    assert first_heading(line) == heading
