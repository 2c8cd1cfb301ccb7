"""What a file says: bytes to text, title, dates and metadata. The only importer of the document parsers.

Owns the formats: which one a file is (by its content first, then its name), its encoding, its own dates. Reads no
network, no clock and no other file, and bounds what it unpacks. A parser may still hang or crash on a hostile file: so
strangers' files are read through `sandbox`, in a process of its own. Refuses to decide what becomes of it: that is
`drafts`.
"""

import csv
import io
import json
import posixpath
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import unquote

from app.errors import UnreadableFile
from app.times import format_instant, parse_instant

if TYPE_CHECKING:
    from lxml.etree import _Element

Kind = Literal["text", "markdown", "html", "pdf", "docx", "epub", "csv", "jsonl"]
Json = dict[str, Any]

SUFFIXES: Final[dict[str, Kind]] = {
    ".txt": "text", ".text": "text", ".rst": "text", ".log": "text", ".md": "markdown", ".markdown": "markdown",
    ".mdx": "markdown", ".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".docx": "docx",
    ".epub": "epub", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip
_TYPES: Final[dict[str, Kind]] = {
    "text/markdown": "markdown", "text/html": "html", "application/xhtml+xml": "html", "text/csv": "csv",
    "text/tab-separated-values": "csv", "application/jsonl": "jsonl", "application/x-ndjson": "jsonl",
    "application/json": "jsonl",
}  # fmt: skip
_INSTALL = "install `halflife[files]` where the file is read"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a file is read; what is larger is refused with its size."""

    max_bytes: int = 32 * 2**20
    max_unpacked_bytes: int = 256 * 2**20
    max_pages: int = 5_000
    max_chars: int = 5_000_000
    max_rows: int = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table or line of JSON Lines; `number` counts from 1, the header included."""

    number: int
    values: Json | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Extracted:
    """What a file says. `fields` are a document's by name (dates printed), `front` is a front matter as written.

    `rows` are set for tables and lines: each is a document of its own.
    """

    kind: Kind
    text: str = ""
    title: str | None = None
    fields: Json = field(default_factory=dict)
    metadata: Json = field(default_factory=dict)
    front: dict[str, str | list[str]] = field(default_factory=dict)
    rows: list[Row] | None = None
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        """Return it as it crosses a pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Return what `to_json` made."""
        rows = value["rows"]
        return cls(**{**value, "rows": None if rows is None else [Row(**row) for row in rows]})


def extract(
    data: bytes, *, name: str = "", content_type: str | None = None, limits: Limits | None = None
) -> Extracted:
    """Return what a file says. Raises UnreadableFile with the reason and the remedy for one that can't be read."""
    limits = limits or Limits()
    if not data:
        raise UnreadableFile("the file is empty", remedy="send one that says something")
    if len(data) > limits.max_bytes:
        raise UnreadableFile(
            f"the file has {len(data)} bytes, and {limits.max_bytes} are read at most",
            remedy="split it, or raise HALFLIFE_FILE_MAX_BYTES",
        )
    kind = kind_of(data, name=name, content_type=content_type)
    try:
        found = _READERS[kind](data, name, limits)
    except ModuleNotFoundError as cause:
        raise UnreadableFile(f"reading {kind} needs the package {cause.name}", remedy=_INSTALL) from cause
    except (
        RecursionError,
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        NotImplementedError,
    ) as cause:
        raise UnreadableFile(
            f"the {kind} file is broken: {str(cause)[:200] or type(cause).__name__}", remedy="repair it"
        ) from cause
    if len(found.text) > limits.max_chars:
        raise UnreadableFile(
            f"the file holds {len(found.text)} characters of text, and a document at most {limits.max_chars}",
            remedy="split it",
        )
    return found


# --- which format ----------------------------------------------------------------------------------------------------


def kind_of(data: bytes, *, name: str, content_type: str | None = None) -> Kind:
    """Return a file's format: by its content where that is plain, then by its name, last by the declared type."""
    head = data[:1024]
    if b"%PDF-" in head:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return _kind_of_zip(data)
    for magic, what, remedy in _FOREIGN:
        if head.startswith(magic):
            raise UnreadableFile(f"the file is {what}, which is not read", remedy=remedy)
    suffix = suffix_of(name)
    by_name = SUFFIXES.get(suffix)
    if by_name in ("pdf", "docx", "epub"):
        raise UnreadableFile(
            f"the file is called {suffix}, but its content is none", remedy="send the original, whole"
        )
    if by_name is not None:
        return by_name
    if re.match(
        rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<(?:!doctype html|html)\b",
        head,
        re.IGNORECASE | re.DOTALL,
    ):
        return "html"
    declared = _TYPES.get((content_type or "").partition(";")[0].strip().lower())
    if declared is not None:
        return declared
    return "markdown" if head.startswith((b"---\n", b"---\r\n", b"# ")) else "text"


def suffix_of(name: str) -> str:
    """Return a file name's ending in lower case, with its dot; empty if it has none."""
    return posixpath.splitext(name.replace("\\", "/"))[1].lower()


_FOREIGN: Final = (
    (b"\xd0\xcf\x11\xe0", "an old or encrypted Office file", "save it as .docx without a password"),
    (b"\x89PNG", "an image", "run text recognition (OCR) over it first"),
    (b"\xff\xd8\xff", "an image", "run text recognition (OCR) over it first"),
    (b"GIF8", "an image", "run text recognition (OCR) over it first"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive", "unpack it first"),
    (b"Rar!", "a RAR archive", "unpack it first"),
    (b"{\\rtf", "RTF", "save it as .docx"),
    (b"\x7fELF", "a program", "send documents"),
    (b"MZ", "a program", "send documents"),
)  # fmt: skip


def _kind_of_zip(data: bytes) -> Kind:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = set(archive.namelist())
    except zipfile.BadZipFile as cause:
        raise UnreadableFile(f"the file is a broken ZIP archive: {cause}", remedy="send it whole") from cause
    if "word/document.xml" in names:
        return "docx"
    if "META-INF/container.xml" in names:
        return "epub"
    if any(name.startswith(("xl/", "ppt/")) for name in names):
        raise UnreadableFile(
            "the file is a spreadsheet or slides, which are not read", remedy="save it as .csv or .pdf"
        )
    raise UnreadableFile("the file is an archive, which is not read", remedy="unpack it and send its files")


# --- text and its encoding -------------------------------------------------------------------------------------------

_BOMS: Final = (
    (b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe\x00\x00", "utf-32-le"), (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"),
)  # fmt: skip
_CANDIDATES: Final = (
    "gb18030", "big5hkscs", "shift_jis", "euc_jp", "euc_kr", "cp1252", "cp1251", "koi8_r",
)  # fmt: skip
_SAMPLE: Final = 65_536


def decode(data: bytes, *, declared: str | None = None) -> tuple[str, str | None]:
    r"""Return the text and, where its encoding had to be guessed, which one was taken.

    In this order: its byte order mark, UTF-8, what the file itself declares, UTF-16 by its zero bytes, the likeliest.
    Line breaks come out as `\n`. Raises UnreadableFile for what is no text.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return _clean(_decoded(data[len(mark) :], encoding)), None
    try:
        return _clean(data.decode("utf-8")), None
    except UnicodeDecodeError:
        pass
    zeros = data[:_SAMPLE].count(0)
    if zeros:
        even, odd = data[:_SAMPLE:2].count(0), data[1:_SAMPLE:2].count(0)
        if max(even, odd) > 4 * min(even, odd) and zeros * 20 > len(data[:_SAMPLE]):
            encoding = "utf-16-le" if odd > even else "utf-16-be"
            return _clean(_decoded(data, encoding)), encoding
        raise UnreadableFile(
            "the file is no text: it holds NUL bytes", remedy="send it in a format that is read"
        )
    if declared is not None:
        try:
            return _clean(data.decode("gb18030" if declared.lower() in ("gb2312", "gbk") else declared)), None
        except (LookupError, UnicodeDecodeError):
            pass
    encoding = _likeliest(data)
    return _clean(data.decode(encoding, "replace")), encoding


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as cause:
        raise UnreadableFile(
            f"the file begins as {encoding} text and is not: {cause.reason} at byte {cause.start}",
            remedy="save it as UTF-8",
        ) from cause


def _likeliest(data: bytes) -> str:
    from charset_normalizer import from_bytes

    # Cut where a character surely begins: after a line break, if there is one.
    sample = data[:_SAMPLE]
    if len(data) > _SAMPLE and (end := sample.rfind(b"\n")) > 0:
        sample = sample[: end + 1]
    if _is_chinese(sample, whole=len(data) <= _SAMPLE):
        return "gb18030"
    best = from_bytes(sample, cp_isolation=list(_CANDIDATES)).best()
    if best is None:
        raise UnreadableFile("the file is no text in any encoding known here", remedy="save it as UTF-8")
    return str(best.encoding)


def _is_chinese(sample: bytes, *, whole: bool) -> bool:
    """Tell whether this is Chinese in GB 2312's rows, which short texts give statistics too little to tell by.

    Its punctuation stands in rows 0xA1 to 0xA3, its common characters in 0xB0 to 0xD7, those of Korean in 0xB0 to 0xC8
    alone; Japanese uses kana, and most of Big5 has second bytes that are none here.
    """
    try:
        text = sample.decode("gb18030", "strict" if whole else "ignore")
    except UnicodeDecodeError:
        return False
    wide = [character.encode("gb18030") for character in text[:4_000] if ord(character) > 0x7F]
    common = [pair for pair in wide if len(pair) == 2 and pair[1] >= 0xA1 and 0xB0 <= pair[0] <= 0xD7]
    marks = [pair for pair in wide if len(pair) == 2 and pair[1] >= 0xA1 and 0xA1 <= pair[0] <= 0xA3]
    return len(common) + len(marks) >= 0.98 * len(wide) and any(pair[0] > 0xC8 for pair in common)


def _clean(text: str) -> str:
    if "\0" in text:
        raise UnreadableFile(
            "the file is no text: it holds NUL characters", remedy="send it in a format that is read"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _guessed(encoding: str | None) -> list[str]:
    return [] if encoding is None else [f"read as {encoding}, which was guessed: save it as UTF-8 to be sure"]


def _read_text(data: bytes, name: str, limits: Limits) -> Extracted:
    text, encoding = decode(data)
    front, body = split_front_matter(text)
    return Extracted(
        "text" if SUFFIXES.get(suffix_of(name)) == "text" else "markdown",
        text=body,
        title=_one_line(first_heading(body)),
        front=front,
        warnings=_guessed(encoding),
    )


# --- tables and lines ------------------------------------------------------------------------------------------------


def _read_csv(data: bytes, name: str, limits: Limits) -> Extracted:
    text, encoding = decode(data)
    rows = list(csv_rows(io.StringIO(text, newline=""), tab=suffix_of(name) == ".tsv", most=limits.max_rows))
    return Extracted("csv", rows=rows, warnings=_guessed(encoding))


def csv_rows(stream: io.TextIOBase, *, tab: bool = False, most: int | None = None) -> Iterator[Row]:
    """Yield the rows of a table whose first line names its columns; empty cells are left out.

    The delimiter is a comma, a semicolon, a tab or a bar: whichever the first line has most of.
    """
    csv.field_size_limit(2**27)
    first = stream.readline()
    delimiter = "\t" if tab else max(",;\t|", key=first.count)
    reader = csv.reader(_chained(first, stream), delimiter=delimiter)
    header = [cell.strip() for cell in next(reader, [])]
    if not any(header):
        raise UnreadableFile("the table has no header", remedy="name the columns in its first line")
    twice = {cell for cell in header if cell and header.count(cell) > 1}
    if twice:
        raise UnreadableFile(f"two columns are called '{min(twice)[:60]}'", remedy="give each its own name")
    number = 1
    while True:
        number += 1
        try:
            cells = next(reader, None)
        except csv.Error as cause:
            yield Row(number, fault=f"can't be read: {cause}")
            return
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if most is not None and number - 1 > most:
            raise UnreadableFile(
                f"the table has more than {most} rows", remedy="split it, or use `halflife load`"
            )
        if len(cells) > len(header):
            yield Row(number, fault=f"has {len(cells)} cells, and the header names {len(header)} columns")
            continue
        yield Row(
            number,
            {
                column: value
                for column, cell in zip(header, cells, strict=False)
                if column and (value := cell.strip())
            },
        )


def _chained(first: str, rest: io.TextIOBase) -> Iterator[str]:
    yield first
    yield from rest


def _read_lines(data: bytes, name: str, limits: Limits) -> Extracted:
    text, encoding = decode(data)
    rows: list[Row] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if len(rows) >= limits.max_rows:
            raise UnreadableFile(
                f"the file has more than {limits.max_rows} lines", remedy="split it, or use `halflife load`"
            )
        try:
            rows.append(Row(number, parse_line(line.encode())))
        except ValueError as fault:
            rows.append(Row(number, fault=str(fault)))
    return Extracted("jsonl", rows=rows, warnings=_guessed(encoding))


def parse_line(line: bytes) -> Json:
    """Return the object that a line of JSON Lines is; ValueError says what else it is."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        value = json.loads(line.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError as cause:
        raise ValueError("the line is not UTF-8") from cause
    except json.JSONDecodeError as cause:
        hint = ""
        if line.lstrip()[:1] == b"[" or line.strip() in {b"{", b"}"}:
            hint = "; write one object a line (`jq -c '.[]'` turns an array into that)"
        raise ValueError(f"not JSON: {cause.msg} at character {cause.pos + 1}{hint}") from cause
    except RecursionError as cause:
        raise ValueError("nested too deeply") from cause
    if not isinstance(value, dict):
        raise ValueError(
            f"a line is one JSON object, this is {'an array' if isinstance(value, list) else type(value).__name__}"
        )
    return value


# --- Markdown --------------------------------------------------------------------------------------------------------

_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(.+?)\s*#*\s*$")
_UNDERLINE = re.compile(r"^\s{0,3}(=+|-{3,})\s*$")
_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:\s*(.*)$")


def split_front_matter(text: str) -> tuple[dict[str, str | list[str]], str]:
    """Split off a `---` block of simple `name: value` lines and lists; deeper YAML in it is left out."""
    lines = text.split("\n")
    if not lines or lines[0].strip() != "---":
        return {}, text
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() in {"---", "..."}), None)
    if end is None:
        return {}, text
    front: dict[str, str | list[str]] = {}
    last: str | None = None
    for line in lines[1:end]:
        if match := _KEY.match(line):
            last = match[1]
            front[last] = _scalar(match[2])
        elif last is not None and line.strip().startswith("- "):
            items = front[last]
            front[last] = [*(items if isinstance(items, list) else []), _plain(line.strip()[2:])]
    return {name: value for name, value in front.items() if value}, "\n".join(lines[end + 1 :])


def _scalar(text: str) -> str | list[str]:
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [_plain(item) for item in text[1:-1].split(",") if item.strip()]
    return _plain(text)


def _plain(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    # A comment ends a bare value.
    return re.split(r"\s#", text, maxsplit=1)[0].strip()


def first_heading(text: str) -> str | None:
    """Return the first heading of a Markdown text, outside code blocks; None if it has none."""
    fenced = False
    before = ""
    for line in text.split("\n"):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            if match := _HEADING.match(line):
                return match[1]
            if before.strip() and _UNDERLINE.match(line) and line.lstrip().startswith("="):
                return before.strip()
        before = line
    return None


# --- HTML ------------------------------------------------------------------------------------------------------------

_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]{2,40})", re.IGNORECASE)
_XML_CHARSET = re.compile(rb"<\?xml[^>]{0,100}?encoding\s*=\s*[\"']([A-Za-z0-9_.:-]{2,40})", re.IGNORECASE)
_NO_TEXT = (
    "script",
    "style",
    "noscript",
    "template",
    "nav",
    "svg",
    "form",
    "iframe",
    "object",
    "button",
    "select",
)
# Around the main text only: a header or footer of an article is its own.
_AROUND = ("aside", "footer", "header")
_BORN = (
    "article:published_time", "og:article:published_time", "datepublished", "dc.date.issued", "dcterms.issued",
    "dcterms.created", "dc.date.created", "citation_publication_date", "citation_date", "publishdate", "publish_date",
    "publish-date", "pubdate", "date", "dc.date", "dcterms.date",
)  # fmt: skip
_CHANGED = (
    "article:modified_time",
    "og:updated_time",
    "datemodified",
    "dcterms.modified",
    "last-modified",
    "revised",
)


def _read_html(data: bytes, name: str, limits: Limits) -> Extracted:
    declared = _META_CHARSET.search(data[:4096]) or _XML_CHARSET.search(data[:200])
    text, encoding = decode(data, declared=declared[1].decode() if declared else None)
    if not text.strip():
        return Extracted("html")
    root = _html_tree(text)
    meta = _meta_of(root)
    linked = list(_json_ld(root))
    title = meta.get("og:title") or _first_text(root, ".//title") or _first_text(root, ".//h1")
    fields: Json = {}
    warnings = _guessed(encoding)
    born = [meta.get(key) for key in _BORN[:2]] + [item.get("datePublished") for item in linked]
    born += [meta.get(key) for key in _BORN[2:]] + [item.get("dateCreated") for item in linked]
    born += [element.get("datetime") for element in root.iter("time") if element.get("datetime")][:1]
    changed = [meta.get(key) for key in _CHANGED] + [item.get("dateModified") for item in linked]
    _put_dates(fields, warnings, born, changed)
    author = (
        meta.get("author")
        or meta.get("article:author")
        or next((a for item in linked if (a := _author(item))), None)
    )
    if author:
        fields["author"] = author[:1024]
    if lang := _language(root.get("lang") or root.get("{http://www.w3.org/XML/1998/namespace}lang")):
        fields["lang"] = lang
    for link in root.iter("link"):
        if "canonical" in (link.get("rel") or "").lower().split() and (
            href := (link.get("href") or "").strip()
        ):
            if len(href) <= 1024 and "://" in href:
                fields["url"] = href
            break
    return Extracted("html", text=_main_text(root), title=_one_line(title), fields=fields, warnings=warnings)


def _html_tree(text: str) -> "_Element":
    from lxml import etree, html

    # As bytes with their encoding told: text that declares another one would be refused.
    parser = html.HTMLParser(
        encoding="utf-8", no_network=True, huge_tree=False, remove_comments=True, remove_pis=True
    )
    try:
        root = html.document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except (etree.ParserError, etree.XMLSyntaxError) as cause:
        raise UnreadableFile(f"the HTML can't be read: {str(cause)[:200]}", remedy="repair it") from cause
    assert isinstance(root, etree._Element)
    return root


def _meta_of(root: "_Element") -> dict[str, str]:
    found: dict[str, str] = {}
    for element in root.iter("meta"):
        content = (element.get("content") or "").strip()
        for attribute in ("property", "name", "itemprop", "http-equiv"):
            key = (element.get(attribute) or "").strip().lower()
            if key and content:
                found.setdefault(key, content)
    for element in root.iter():
        if isinstance(element.tag, str) and element.tag != "meta":
            key = (element.get("itemprop") or "").lower()
            if key in ("datepublished", "datemodified") and (
                value := element.get("datetime") or element.get("content")
            ):
                found.setdefault(key, value.strip())
    return found


def _json_ld(root: "_Element") -> Iterator[Json]:
    """Yield the objects of the page's JSON-LD blocks that carry a date or an author."""
    for element in root.iter("script"):
        if (element.get("type") or "").lower() != "application/ld+json" or not element.text:
            continue
        try:
            value = json.loads(element.text)
        except (ValueError, RecursionError):
            continue
        waiting = [value]
        looked = 0
        while waiting and looked < 500:
            node = waiting.pop(0)
            looked += 1
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                if node.keys() & {"datePublished", "dateCreated", "dateModified"}:
                    yield node
                waiting += [
                    inner
                    for key, inner in node.items()
                    if key in ("@graph", "mainEntity", "mainEntityOfPage")
                ]


def _author(item: Json) -> str | None:
    value = item.get("author")
    value = value[0] if isinstance(value, list) and value else value
    value = value.get("name") if isinstance(value, dict) else value
    return value.strip() or None if isinstance(value, str) else None


def _main_text(root: "_Element") -> str:
    """Return the main text as Markdown: what stands in the one `main` or `article`, else in the body without its frame."""
    import markdownify
    from lxml import etree

    for element in list(root.iter(*_NO_TEXT)):
        _drop(element)
    for element in [
        node for node in root.iter() if node.get("hidden") is not None or node.get("aria-hidden") == "true"
    ]:
        if element.tag not in ("html", "body", "main", "article"):
            _drop(element)
    mains = [*root.iter("main"), *root.xpath(".//*[@role='main' and not(self::main)]")]
    articles = list(root.iter("article"))
    part = mains[0] if len(mains) == 1 else articles[0] if len(articles) == 1 else None
    if part is None or not "".join(part.itertext()).strip():
        part = next(iter(root.iter("body")), root)
        for element in [
            node
            for node in root.iter(*_AROUND)
            if not any(True for _ in node.iterancestors("article", "main"))
        ]:
            _drop(element)
    source = etree.tostring(part, encoding="unicode", method="html", with_tail=False)
    content = markdownify.markdownify(
        source,
        heading_style="ATX",
        bullets="-",
        # Addresses and emphasis are noise to a reader of passages and to what embeds them.
        strip=["a", "img", "b", "strong", "em", "i"],
        escape_asterisks=False,
        escape_underscores=False,
        bs4_options="lxml",
    )
    return _tidied(content)


def _drop(element: "_Element") -> None:
    parent = element.getparent()
    if parent is None:
        return
    if element.tail:
        before = element.getprevious()
        if before is not None:
            before.tail = (before.tail or "") + element.tail
        else:
            parent.text = (parent.text or "") + element.tail
    parent.remove(element)


def _tidied(text: str) -> str:
    lines = [line.rstrip() for line in text.replace("\u00a0", " ").split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _first_text(root: "_Element", path: str) -> str | None:
    element = root.find(path)
    return None if element is None else "".join(element.itertext())


def _one_line(text: Any) -> str | None:
    """Return a title as one line of at most 2,000 characters; None for nothing."""
    line = " ".join(str(text or "").split())[:2_000]
    return line or None


def _language(tag: str | None) -> str | None:
    """Return a language tag's first part (`zh` of `zh-CN`), by which documents are filtered."""
    match = re.match(r"\s*([A-Za-z]{2,3})(?:[-_]|\s*$)", tag or "")
    return match[1].lower() if match else None


# --- PDF -------------------------------------------------------------------------------------------------------------

_JUNK_TITLE = re.compile(
    r"(?i)^(?:microsoft \w+ ?-.*|untitled.*|无标题.*|document\d*|.*\.(?:docx?|pdf|tex|dvi|indd|rtf|pptx?|wps))$"
)


def _read_pdf(data: bytes, name: str, limits: Limits) -> Extracted:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as cause:
        if "password" in str(cause).lower():
            raise UnreadableFile(
                "the PDF is encrypted and needs a password", remedy="save it without one"
            ) from cause
        raise UnreadableFile(f"the PDF is broken: {str(cause)[:200]}", remedy="repair it") from cause
    try:
        count = len(document)
        if count > limits.max_pages:
            raise UnreadableFile(
                f"the PDF has {count} pages, and {limits.max_pages} are read at most",
                remedy="split it, or raise HALFLIFE_FILE_MAX_PAGES",
            )
        pages: list[str] = []
        size = broken = 0
        for number in range(count):
            try:
                page = document[number]
                text = _reflowed(page.get_textpage().get_text_range())
                page.close()
            except pypdfium2.PdfiumError:
                broken += 1
                continue
            size += len(text)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the PDF holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            pages.append(text)
        told = document.get_metadata_dict(skip_empty=True)
    finally:
        document.close()
    text = "\n\n".join(page for page in pages if page)
    if not text.strip():
        raise UnreadableFile(
            f"the PDF's {count} pages hold no text: they are pictures, most likely",
            remedy="run text recognition (OCR) over it first",
        )
    warnings = [f"{broken} of {count} pages are broken and were passed over"] if broken else []
    fields: Json = {}
    _put_dates(fields, warnings, [_pdf_date(told.get("CreationDate"))], [_pdf_date(told.get("ModDate"))])
    if author := _one_line(told.get("Author")):
        fields["author"] = author[:1024]
    title = _one_line(told.get("Title"))
    if title and _JUNK_TITLE.match(title):
        title = None
    return Extracted(
        "pdf", text=text, title=title, fields=fields, metadata={"pages": count}, warnings=warnings
    )


_WIDE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WIDE_END = re.compile(rf"[{_WIDE}，、；：]$")
_WIDE_BEGIN = re.compile(rf"^[{_WIDE}，、。；：！？）》」]")


def _reflowed(text: str) -> str:
    """Return a page's text with hyphens at line ends joined, and lines of Chinese and Japanese that go on.

    A line that is nearly as long as the page's longest goes on; a shorter one ends a paragraph or is a heading.
    """
    text = re.sub(r"[\ufffe\x02\u00ad]\r?\n?", "", text.replace("\0", ""))
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    longest = max((len(line) for line in lines), default=0)
    joined: list[str] = []
    full = False
    for line in lines:
        begins = line.lstrip()
        if joined and full and _WIDE_END.search(joined[-1]) and _WIDE_BEGIN.match(begins):
            joined[-1] += begins
        else:
            joined.append(line)
        full = longest >= 12 and len(line) >= 0.8 * longest
    return "\n".join(joined).strip("\n")


def _pdf_date(value: Any) -> str | None:
    """Return a PDF's date (`D:20250301080000+08'00'`) in ISO 8601; None if it is none."""
    match = re.match(
        r"\s*(?:D:)?(\d{4})(\d\d)?(\d\d)?(\d\d)?(\d\d)?(\d\d)?\s*(?:(Z)|([+-])(\d\d)'?(\d\d)?)?",
        str(value or ""),
    )
    if match is None:
        return None
    year, month, day, hour, minute, second, _, sign, hours, minutes = match.groups()
    zone = f"{sign}{hours}:{minutes or '00'}" if sign else "Z"
    return f"{year}-{month or '01'}-{day or '01'}T{hour or '00'}:{minute or '00'}:{second or '00'}{zone}"


# --- Word ------------------------------------------------------------------------------------------------------------


def _open_zip(data: bytes, limits: Limits) -> zipfile.ZipFile:
    """Return the archive. Raises UnreadableFile for one that would unpack to more than the limit, or is encrypted."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    entries = archive.infolist()
    # zipfile never reads more of an entry than it declares.
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > limits.max_unpacked_bytes or len(entries) > 20_000:
        raise UnreadableFile(
            f"the file would unpack to {unpacked} bytes in {len(entries)} parts, and {limits.max_unpacked_bytes} "
            "in 20000 are read at most",
            remedy="split it, or raise HALFLIFE_FILE_MAX_UNPACKED_BYTES",
        )
    if any(entry.flag_bits & 1 for entry in entries):
        raise UnreadableFile("the file is encrypted", remedy="save it without a password")
    return archive


def _read_docx(data: bytes, name: str, limits: Limits) -> Extracted:
    import docx
    from docx.table import Table
    from lxml import etree

    with _open_zip(data, limits) as archive:
        has_properties = "docProps/core.xml" in archive.namelist()
    try:
        document = docx.Document(io.BytesIO(data))
        blocks: list[str] = []
        size = 0
        for block in document.iter_inner_content():
            text = _table(block) if isinstance(block, Table) else _paragraph(block)
            size += len(text)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the file holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            blocks.append(text)
        fields: Json = {}
        warnings: list[str] = []
        title = None
        if has_properties:
            told = document.core_properties
            _put_dates(fields, warnings, [told.created], [told.modified])
            title = _one_line(told.title)
            if author := _one_line(told.author):
                fields["author"] = author[:1024]
            if lang := _language(told.language):
                fields["lang"] = lang
    except UnreadableFile:
        raise
    except (
        KeyError,
        ValueError,
        AttributeError,
        IndexError,
        etree.LxmlError,
        docx.exceptions.PythonDocxError,
    ) as cause:
        raise UnreadableFile(f"the Word file is broken: {str(cause)[:200]}", remedy="repair it") from cause
    text = "\n\n".join(block for block in blocks if block.strip())
    text = re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)
    if title is None or title == "Word Document":
        title = first_heading(text)
    return Extracted("docx", text=text, title=title, fields=fields, warnings=warnings)


def _paragraph(paragraph: Any) -> str:
    text = str(paragraph.text).strip("\n")
    style = str(getattr(paragraph.style, "name", "") or "")
    if not text.strip():
        return ""
    if match := re.match(r"(?i)heading (\d)", style):
        return f"{'#' * min(6, int(match[1]))} {' '.join(text.split())}"
    if style == "Title":
        return f"# {' '.join(text.split())}"
    properties = paragraph._p.pPr
    if style.startswith("List") or (properties is not None and properties.numPr is not None):
        return f"- {text}"
    return text


def _table(table: Any) -> str:
    lines: list[str] = []
    for row in table.rows:
        cells: list[str] = []
        last = None
        for cell in row.cells:
            # A merged cell comes once for each place that it takes.
            if cell._tc is not last:
                cells.append(" ".join(cell.text.split()).replace("|", "\\|"))
            last = cell._tc
        lines.append(f"| {' | '.join(cells)} |")
        if len(lines) == 1:
            lines.append(f"|{' --- |' * len(cells)}")
    return "\n".join(lines)


# --- EPUB ------------------------------------------------------------------------------------------------------------

_DC = "{http://purl.org/dc/elements/1.1/}"
_OPF = "{http://www.idpf.org/2007/opf}"
_FONTS = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")


def _read_epub(data: bytes, name: str, limits: Limits) -> Extracted:
    from lxml import etree

    with _open_zip(data, limits) as archive:
        names = set(archive.namelist())

        def tree(path: str) -> "_Element":
            parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
            try:
                return etree.fromstring(archive.read(path), parser)
            except (KeyError, etree.XMLSyntaxError) as cause:
                raise UnreadableFile(
                    f"the EPUB's {path} is missing or broken: {str(cause)[:200]}", remedy="repair it"
                ) from cause

        if "META-INF/encryption.xml" in names:
            methods = [
                node.get("Algorithm") for node in tree("META-INF/encryption.xml").iter("{*}EncryptionMethod")
            ]
            if any(method not in _FONTS for method in methods):
                raise UnreadableFile("the EPUB is protected (DRM)", remedy="send one without protection")
        package_path = next(
            (node.get("full-path") for node in tree("META-INF/container.xml").iter("{*}rootfile")), None
        )
        if not package_path:
            raise UnreadableFile("the EPUB names no package document", remedy="repair it")
        package = tree(package_path)
        manifest = {
            node.get("id"): (node.get("href") or "", node.get("media-type") or "")
            for node in package.iter("{*}item")
        }
        parts: list[str] = []
        warnings: list[str] = []
        size = 0
        for reference in package.iter("{*}itemref"):
            href, media = manifest.get(reference.get("idref"), ("", ""))
            if reference.get("linear") == "no" or "html" not in media:
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(package_path), unquote(href)))
            if path not in names:
                warnings.append(f"its part {path[:200]} is missing")
                continue
            declared = _XML_CHARSET.search(raw[:200]) if (raw := archive.read(path)) else None
            text, _ = decode(raw, declared=declared[1].decode() if declared else None) if raw else ("", None)
            part = _main_text(_html_tree(text)) if text.strip() else ""
            size += len(part)
            if size > limits.max_chars:
                raise UnreadableFile(
                    f"the EPUB holds more than {limits.max_chars} characters of text", remedy="split it"
                )
            if part:
                parts.append(part)
    fields: Json = {}
    dates = list(package.iter(f"{_DC}date"))
    # The second edition tells what a date is of; the third has only one.
    dates.sort(key=lambda node: {"publication": 0, None: 1, "creation": 2}.get(node.get(f"{_OPF}event"), 3))
    born = [node.text for node in dates if node.get(f"{_OPF}event") != "modification"]
    changed = [node.text for node in package.iter("{*}meta") if node.get("property") == "dcterms:modified"]
    _put_dates(fields, warnings, born, changed)
    if author := _one_line(next((node.text for node in package.iter(f"{_DC}creator")), None)):
        fields["author"] = author[:1024]
    if lang := _language(next((node.text for node in package.iter(f"{_DC}language")), None)):
        fields["lang"] = lang
    title = _one_line(next((node.text for node in package.iter(f"{_DC}title")), None))
    if not parts:
        raise UnreadableFile("the EPUB holds no text", remedy="send one that says something")
    return Extracted(
        "epub",
        text="\n\n".join(parts),
        title=title,
        fields=fields,
        metadata={"parts": len(parts)},
        warnings=warnings,
    )


# --- dates -----------------------------------------------------------------------------------------------------------


def _put_dates(fields: Json, warnings: list[str], born: Sequence[Any], changed: Sequence[Any]) -> None:
    """Put the first date of each kind that is one into `fields`; tell where some were given and none was."""
    for key, given in (("creation_time", born), ("updated_at", changed)):
        values = [value for value in given if value]
        moment = next((moment for value in values if (moment := moment_of(value)) is not None), None)
        if moment is not None:
            fields[key] = format_instant(moment)
        elif values and key == "creation_time":
            warnings.append(f"its own date '{str(values[0])[:40]}' is none")


def moment_of(value: Any) -> datetime | None:
    """Return the instant that a document's own date means, in the forms that documents use; None if it is none.

    A year or a month alone is its first day. What no document can mean (before 1900, as unset clocks write) is none.
    """
    if not isinstance(value, str):
        found = _instant(value)
    else:
        text = value.strip()
        found = _instant(re.sub(r"\s+(?=(?:[+-]\d\d:?\d\d|Z)$)", "", text))
        if found is None and (
            match := re.fullmatch(r"(\d{4})(?:[-/.年](\d{1,2})(?:[-/.月](\d{1,2})日?|月)?|年)?", text)
        ):
            found = _instant(f"{match[1]}-{int(match[2] or 1):02}-{int(match[3] or 1):02}")
        if found is None and (match := re.fullmatch(r"(\d{4})(\d\d)(\d\d)", text)):
            found = _instant("-".join(match.groups()))
        if found is None and re.search(r"[A-Za-z]{3}", text):
            try:
                found = _instant(parsedate_to_datetime(text))
            except (ValueError, IndexError, TypeError, OverflowError):
                found = None
    if found is None or found.year < 1900 or found == datetime(1970, 1, 1, tzinfo=UTC):
        return None
    return found


def _instant(value: Any) -> datetime | None:
    if value is None:
        return None
    try:
        return parse_instant(value)
    except ValueError:
        return None


_READERS: Final[dict[Kind, Callable[[bytes, str, Limits], Extracted]]] = {
    "text": _read_text,
    "markdown": _read_text,
    "html": _read_html,
    "pdf": _read_pdf,
    "docx": _read_docx,
    "epub": _read_epub,
    "csv": _read_csv,
    "jsonl": _read_lines,
}
