"""Bytes to text, title, dates and metadata: which format a file has, and the reader of each.

A format is known by the content first, then the name. No reader uses the network, a clock or another file, and what it
unpacks is bounded. A parser may still hang or crash on a hostile file: so strangers' files are read through `sandbox`, in a
process of its own. What becomes of what they say is for `drafts` to decide.
"""

import io
import re
import zipfile
from collections.abc import Callable
from typing import Final

from app.errors import UnreadableFile
from app.extracted import SUFFIXES, Extracted, Kind, Limits, suffix_of
from app.officefiles import read_docx, read_epub, read_pdf
from app.plainfiles import read_csv, read_lines, read_text
from app.webpages import read_html

_TYPES: Final[dict[str, Kind]] = {
    "text/markdown": "markdown", "text/html": "html", "application/xhtml+xml": "html", "text/csv": "csv",
    "text/tab-separated-values": "csv", "application/jsonl": "jsonl", "application/x-ndjson": "jsonl",
    "application/json": "jsonl",
}  # fmt: skip
_INSTALL = "install `halflife[files]` where the file is read"


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


_READERS: Final[dict[Kind, Callable[[bytes, str, Limits], Extracted]]] = {
    "text": read_text,
    "markdown": read_text,
    "html": read_html,
    "pdf": read_pdf,
    "docx": read_docx,
    "epub": read_epub,
    "csv": read_csv,
    "jsonl": read_lines,
}
