"""What a file says, as every reader tells it: text, title, fields, rows, with its dates read one way."""

import posixpath
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, Self

from app.times import format_instant, parse_instant

Kind = Literal["text", "markdown", "html", "pdf", "docx", "epub", "csv", "jsonl"]
Json = dict[str, Any]

SUFFIXES: Final[dict[str, Kind]] = {
    ".txt": "text", ".text": "text", ".rst": "text", ".log": "text", ".md": "markdown", ".markdown": "markdown",
    ".mdx": "markdown", ".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf", ".docx": "docx",
    ".epub": "epub", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a file is read; what is larger is refused with its size."""

    max_bytes: int = 31 * 2**20
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
    warnings: list[str] = field(default_factory=list)


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
    columns: list[str] = field(default_factory=list)
    """A table's, those too that a row leaves empty."""
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        """Return it as it crosses a pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Return what `to_json` made."""
        rows = value["rows"]
        return cls(**{**value, "rows": None if rows is None else [Row(**row) for row in rows]})


def suffix_of(name: str) -> str:
    """Return a file name's ending in lower case, with its dot; empty if it has none."""
    return posixpath.splitext(name.replace("\\", "/"))[1].lower()


def guessed(encoding: str | None) -> list[str]:
    """Return the warnings of a file whose encoding is this: none where it was told or plain."""
    return [] if encoding is None else [f"read as {encoding}, which was guessed: save it as UTF-8 to be sure"]


def one_line(text: Any) -> str | None:
    """Return a title as one line of at most 2,000 characters; None for nothing."""
    line = " ".join(str(text or "").split())[:2_000]
    return line or None


def language(tag: str | None) -> str | None:
    """Return a language tag's first part (`zh` of `zh-CN`), by which documents are filtered."""
    match = re.match(r"\s*([A-Za-z]{2,3})(?:[-_]|\s*$)", tag or "")
    return match[1].lower() if match else None


def put_dates(fields: Json, warnings: list[str], born: Sequence[Any], changed: Sequence[Any]) -> None:
    """Put the first date of each kind that is one into `fields`; tell where some were given and none was."""
    for key, given in (("creation_time", born), ("updated_at", changed)):
        values = [value for value in given if value]
        moment = next((moment for value in values if (moment := moment_of(value)) is not None), None)
        if moment is not None:
            fields[key] = format_instant(moment)
        elif values and key == "creation_time":
            warnings.append(f"its own date '{str(values[0])[:40]}' is none")


def without_space_before_zone(text: str) -> str:
    """Return `2024-01-02 10:00:00 +0800`, as front matters and pages have it, without the space before the offset."""
    # The look behind: white space is looked at once, not again from each of its characters.
    return re.sub(r"(?<!\s)\s+(?=(?:[+-]\d\d:?\d\d|Z)$)", "", text.strip())


def moment_of(value: Any) -> datetime | None:
    """Return the instant that a document's own date means, in the forms that documents use; None if it is none.

    A year or a month alone is its first day. What no document can mean (before 1900, as unset clocks write) is none.
    """
    if not isinstance(value, str):
        found = _instant(value)
    else:
        text = value.strip()
        found = _instant(without_space_before_zone(text))
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
