"""Own the reading of what people have, as documents: JSON Lines, and folders of Markdown and text.

Yields one document, or one fault, at a time, so that a file of any length takes little memory. Sends nothing and
judges nothing that the API judges anyway; what it can't read is told with file and line, and the rest goes on.
"""

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from app.models import Document
from app.times import format_instant, parse_instant

TEXT_SUFFIXES = (".md", ".markdown", ".mdx", ".txt", ".text", ".rst")
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_LONGEST_LINE = 64 * 2**20
_LONGEST_FILE = 32 * 2**20

_FIELDS = frozenset(Document.model_fields)
# What a front matter or a line may call our fields.
_DATE_NAMES = ("creation_time", "created_at", "date", "created", "published")
_CHANGED_NAMES = ("updated_at", "updated", "lastmod", "modified")
_DATES = frozenset(
    {"creation_time", "updated_at", "last_accessed_at", "start_date", "end_date", "expires_at"}
)


class Unreadable(Exception):
    """A path that can't be read at all; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the callers' lines call our fields; `time` None means creation_time, else created_at."""

    id: str = "id"
    title: str = "title"
    text: str = "text"
    time: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """One document read, or why not. `where` is file and line; `size` the bytes it took in its file."""

    where: str
    size: int
    document: dict[str, Any] | None = None
    fault: str | None = None
    # Nothing is wrong with it and nothing is in it.
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read, `name` being what its documents are called after where they carry no id themselves."""

    path: Path
    name: str
    size: int
    lines: bool


def find(paths: Sequence[Path], *, prefix: str = "") -> tuple[list[Source], int]:
    """Return the files to read, folders searched in a fixed order, and how many files in them were passed over.

    Hidden files and folders are left out, symbolic links to folders not followed. `-` is standard input. Raises
    Unreadable for a path that isn't there or holds nothing of use.
    """
    found: list[Source] = []
    passed = 0
    for path in paths:
        if str(path) == "-":
            found.append(Source(path, "-", 0, lines=True))
        elif path.is_dir():
            inside, others = _in_folder(path, prefix)
            if not inside:
                raise Unreadable(
                    f"{path} holds no file that ends in {', '.join(TEXT_SUFFIXES)}. "
                    "Name a folder of Markdown or text, or a .jsonl file."
                )
            found += inside
            passed += others
        elif path.is_file():
            lines = _suffix(path) not in TEXT_SUFFIXES
            found.append(Source(path, prefix + path.name, path.stat().st_size, lines=lines))
        else:
            raise Unreadable(f"There is no file or folder {path}.")
    return found, passed


def read(source: Source, names: Names) -> Iterator[Read]:
    """Yield what a file holds, in order. A file that can't be opened is one fault."""
    try:
        if source.lines:
            yield from read_lines(source, names)
        else:
            yield read_text(source)
    except OSError as cause:
        yield Read(str(source.path), source.size, fault=f"can't be read: {cause.strerror or cause}")


def _in_folder(root: Path, prefix: str) -> tuple[list[Source], int]:
    found: list[Source] = []
    passed = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        for name in sorted(files):
            path = Path(folder) / name
            if name.startswith(".") or _suffix(path) not in TEXT_SUFFIXES or not path.is_file():
                passed += 1
                continue
            # Surrogates of a name that is not UTF-8 couldn't be sent; the replacement still tells which file it was.
            relative = (
                path.relative_to(root)
                .as_posix()
                .encode("utf-8", "surrogateescape")
                .decode("utf-8", "replace")
            )
            found.append(Source(path, prefix + relative, path.stat().st_size, lines=False))
    return found, passed


def _suffix(path: Path) -> str:
    return path.suffix.lower()


# ---- JSON Lines -----------------------------------------------------------------------------------------------------


def read_lines(source: Source, names: Names) -> Iterator[Read]:
    """Yield the documents of a JSON Lines file (also gzipped, also standard input); blank lines count as nothing."""
    with _open(source) as stream:
        number = 0
        while line := stream.readline(_LONGEST_LINE + 1):
            number += 1
            size = len(line)
            where = f"{source.path}:{number}"
            if size > _LONGEST_LINE:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_LONGEST_LINE)
                    size += len(line)
                yield Read(where, size, fault=f"the line is longer than {_LONGEST_LINE} bytes")
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield Read(where, size, document=from_line(parse(line), names))
            except ValueError as fault:
                yield Read(where, size, fault=str(fault))


def _open(source: Source) -> IO[bytes] | gzip.GzipFile:
    if str(source.path) == "-":
        return sys.stdin.buffer
    if _suffix(source.path) == ".gz":
        return gzip.open(source.path, "rb")
    return source.path.open("rb")


def parse(line: bytes) -> dict[str, Any]:
    """Return the object that a line is; ValueError says what else it is."""

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


def from_line(line: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the document that a line describes.

    Fields of a document keep their names, `created_at` is taken as `creation_time`, everything else goes into
    `metadata`, where it can be filtered by and is not searched. Null and empty values are left out.
    """
    rest = dict(line)
    document: dict[str, Any] = {}
    for field, name in (("id", names.id), ("title", names.title), ("text", names.text)):
        if name in rest:
            document[field] = rest.pop(name)
    if document.get("id") is None or isinstance(document["id"], bool | list | dict | float):
        raise ValueError(f"has no `{names.id}` that is text or a whole number; name another with --id-field")
    document["id"] = str(document["id"])
    time_name = names.time or ("creation_time" if rest.get("creation_time") else "created_at")
    if time_name in rest:
        rest["creation_time"] = rest.pop(time_name)
    metadata = rest.pop("metadata", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` is an object")
    others: dict[str, Any] = {}
    for name, value in rest.items():
        if name not in _FIELDS or name in {"id", "title", "text"}:
            others[name] = value
        elif value is not None or name == "embedding":
            document[name] = value
    for name in ("title", "text"):
        if document.get(name) is None:
            document.pop(name, None)
    # An empty date is an undated document, an empty keyword none.
    for name in [
        name for name, value in document.items() if value in ("", []) and name not in {"id", "title", "text"}
    ]:
        del document[name]
    for name in _DATES & document.keys():
        document[name] = _instant(name, document[name])
    if isinstance(document.get("tags"), str):
        document["tags"] = [document["tags"]]
    if others or metadata:
        document["metadata"] = {**others, **metadata}
    return document


def _instant(name: str, value: Any) -> str:
    """Return the instant as the API takes it; ValueError names the field."""
    if isinstance(value, str):
        # `2024-01-02 10:00:00 +0800`, as front matters have it.
        value = re.sub(r"\s+(?=(?:[+-]\d\d:?\d\d|Z)$)", "", value.strip())
        if not value:
            raise ValueError(f"`{name}` is blank")
    try:
        return format_instant(parse_instant(value))
    except ValueError as cause:
        raise ValueError(f"`{name}`: {cause}") from cause


# ---- Markdown and text ----------------------------------------------------------------------------------------------

_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(.+?)\s*#*\s*$")
_UNDERLINE = re.compile(r"^\s{0,3}(=+|-{3,})\s*$")
_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:\s*(.*)$")


def read_text(source: Source) -> Read:
    """Return the document that a text file is: its name as id, first heading as title, front matter or file time as date."""
    where = str(source.path)
    if source.size > _LONGEST_FILE:
        return Read(where, source.size, fault=f"the file is larger than {_LONGEST_FILE} bytes: split it")
    raw = source.path.read_bytes()
    try:
        text = decode(raw)
    except ValueError as fault:
        return Read(where, source.size, fault=str(fault))
    front, body = split_front_matter(text)
    if not body.strip():
        return Read(where, source.size, empty=True)
    try:
        document = from_front_matter(front)
    except ValueError as fault:
        return Read(where, source.size, fault=f"its front matter: {fault}")
    if "creation_time" not in document:
        changed = datetime.fromtimestamp(source.path.stat().st_mtime, tz=UTC)
        document["creation_time"] = format_instant(changed)
    title = document.get("title") or first_heading(body) or source.path.stem
    document |= {"id": source.name, "title": title, "text": body.strip("\n")}
    document.setdefault("metadata", {})["path"] = source.name
    return Read(where, source.size, document=document)


def decode(raw: bytes) -> str:
    """Return the text of a file in UTF-8, or UTF-16 with its mark; ValueError for anything else."""
    try:
        text = raw.decode("utf-16" if raw[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig")
    except UnicodeDecodeError as cause:
        raise ValueError("is not UTF-8 text; convert it first, with `iconv -t utf-8` say") from cause
    if "\0" in text:
        raise ValueError("holds NUL characters, so it is no text")
    return text.replace("\r\n", "\n")


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


def from_front_matter(front: Mapping[str, str | list[str]]) -> dict[str, Any]:
    """Return the fields of a document that a front matter gives; ValueError names a date that is none."""
    rest = dict(front)
    document: dict[str, Any] = {}
    for field, aliases in (("creation_time", _DATE_NAMES), ("updated_at", _CHANGED_NAMES)):
        for alias in aliases:
            if alias in rest and field not in document:
                document[field] = _instant(alias, rest.pop(alias))
    for name in ("start_date", "end_date", "expires_at"):
        if name in rest:
            document[name] = _instant(name, rest.pop(name))
    metadata: dict[str, Any] = {}
    for name, value in rest.items():
        if name == "tags":
            document["tags"] = (
                value if isinstance(value, list) else [part.strip() for part in value.split(",")]
            )
        elif name == "evergreen" and isinstance(value, str) and value.lower() in {"true", "false"}:
            document["evergreen"] = value.lower() == "true"
        elif name in _FIELDS - {
            "id",
            "text",
            "metadata",
            "embedding",
            "revision",
            "if_version",
            "salience",
            "evergreen",
        } and isinstance(value, str):
            document[name] = value
        else:
            metadata[name] = value
    if metadata:
        document["metadata"] = metadata
    return document


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
