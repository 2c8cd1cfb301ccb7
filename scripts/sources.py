"""Own the reading of what people have, as documents: JSON Lines, tables, and folders of files.

Yields one document, or one fault, at a time, so that a file of lines or rows of any length takes little memory. Sends
nothing and judges nothing that the API judges anyway; what it can't read is told with file and line, and the rest goes
on. What a file says is read by `app.extracting`, as an upload is.
"""

import gzip
import io
import os
import stat
import sys
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from app import extracting
from app.decoding import encoding_of
from app.drafts import Names, drafts_of, from_cells, from_line, given_otherwise, misnamed
from app.errors import UnreadableFile
from app.extracted import SUFFIXES, Limits, guessed
from app.plainfiles import csv_rows
from app.plainfiles import parse_line as parse
from app.sandbox import Sandbox
from app.times import format_instant

__all__ = [
    "LIMITS",
    "Names",
    "Passed",
    "Read",
    "Source",
    "Unreadable",
    "find",
    "from_line",
    "judged_sets",
    "parse",
    "read",
    "read_file",
    "read_lines",
]

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
# A folder of documents holds settings and logs too: those are read where they are named.
_NAMED_ONLY = (".json", ".log")
TABLE_SUFFIXES = (".csv", ".tsv")
FOLDER_SUFFIXES = tuple(suffix for suffix in SUFFIXES if suffix not in _NAMED_ONLY)
_IN_PROCESS = frozenset({"text", "markdown"})
# So much of a file's beginning tells its encoding.
_HEAD = 4 * 2**20
_LONGEST_LINE = 64 * 2**20
LIMITS = Limits(max_bytes=256 * 2**20, max_unpacked_bytes=2**30, max_pages=20_000)
"""People's own files may be larger than what strangers send."""


class Unreadable(Exception):
    """A path that can't be read at all; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Read:
    """One document read, or why not. `where` is file and line; `size` the bytes it took in its file."""

    where: str
    size: int
    document: dict[str, Any] | None = None
    fault: str | None = None
    # Nothing is wrong with it and nothing is in it.
    empty: bool = False
    warnings: tuple[str, ...] = ()
    # It may hold others, by a quote that was opened by mistake.
    doubtful: bool = False
    # Its creation time is the file's own time, since nothing in the file says one.
    by_file_time: bool = False
    # Of a fault: the id that the document would have, and what to do.
    id: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read, `name` being what its documents are called after where they carry no id; `lines`: JSON Lines.

    With a `fault` it is a file or folder that can't be read, and why.
    """

    path: Path
    name: str
    size: int
    lines: bool
    fault: str | None = None

    @property
    def where(self) -> str:
        """The path as messages have it: what isn't UTF-8 in it could be neither printed nor sent."""
        return _spelled(self.path)


@dataclass(frozen=True, slots=True)
class Passed:
    """A file that a folder holds and that is not read, or a link to a folder; `name` as its documents would be called.

    A link's `name` ends in `/`: those of the folder behind it begin so.
    """

    path: Path
    where: str
    name: str


def find(paths: Sequence[Path], *, prefix: str = "") -> tuple[list[Source], list[Passed]]:
    """Return the files to read, folders searched in a fixed order, and which files in them were passed over.

    Hidden files and folders are left out, symbolic links to folders not followed. `-` is standard input. What can't be
    looked into is a source with a fault. Raises Unreadable for a path that isn't there or holds nothing of use.
    """
    found: list[Source] = []
    passed: list[Passed] = []
    for path in paths:
        if str(path) == "-":
            found.append(Source(path, "-", 0, lines=True))
        elif path.is_dir():
            inside, others = _in_folder(path, prefix)
            if not inside:
                raise Unreadable(
                    f"{_spelled(path)} holds no file that ends in {', '.join(FOLDER_SUFFIXES)}. "
                    "Name a folder of such files, or one file."
                )
            found += inside
            passed += others
        elif path.is_file():
            found.append(
                Source(
                    path,
                    prefix + _spelled(Path(path.name)),
                    path.stat().st_size,
                    lines=_is_lines(path, unnamed=True),
                )
            )
        else:
            raise Unreadable(f"There is no file or folder {_spelled(path)}.")
    return found, passed


def judged_sets(found: Sequence[Source]) -> list[Path]:
    """Return the folders of which corpus.jsonl and queries.jsonl are both read, as `find` found them.

    Such a folder is a set to judge a search by: its questions would be found in the place of what answers them.
    """
    folders: dict[Path, set[str]] = {}
    for source in found:
        folders.setdefault(source.path.parent, set()).add(source.path.name)
    return [folder for folder, held in folders.items() if {"corpus.jsonl", "queries.jsonl"} <= held]


def ids_passed(
    passed: Sequence[Passed], names: Names, *, among: Container[str]
) -> tuple[set[str], list[str]]:
    """Return the ids, `among` these, of lines and rows of files that were passed over, and the files that can't be read.

    So a `.json` that was once named, and is not read where it lies in a folder. A line without an id has its file's name.
    """
    ids, unread = set[str](), list[str]()
    for each in passed:
        if each.name.endswith("/"):
            continue
        try:
            # Not of a pipe: to open one waits for somebody who writes.
            if not each.path.is_file():
                raise FileNotFoundError
            with each.path.open("rb"):
                lines = _is_lines(each.path, unnamed=True)
        except OSError:
            if _is_lines(each.path) or _is_table(each.path):
                unread.append(each.where)
            continue
        if not lines and not _is_table(each.path):
            continue
        for item in read(Source(each.path, each.name, 0, lines), names):
            if item.document is not None and (id_ := str(item.document["id"])) in among:
                ids.add(id_)
    return ids, unread


def read(
    source: Source, names: Names, *, sandbox: Sandbox | None = None, file_times: bool = True
) -> Iterator[Read]:
    """Yield what a file holds, in order. A file that can't be opened or read, or not to its end, is one fault more.

    One without any line or row is empty.
    Without `file_times`, a file whose content names no creation time is undated.
    """
    if source.fault is not None:
        yield Read(source.where, source.size, fault=source.fault)
        return
    try:
        if source.lines:
            items = read_lines(source, names)
        elif _is_table(source.path):
            items = read_table(source, names)
        else:
            items = read_file(source, names, sandbox=sandbox, file_times=file_times)
        nothing = True
        for item in items:
            nothing = False
            yield item
        if nothing:
            yield Read(source.where, source.size, empty=True)
    except UnreadableFile as error:
        yield Read(source.where, source.size, fault=_told(error))
    except OSError as cause:
        yield Read(source.where, source.size, fault=_denied(cause))
    except (EOFError, zlib.error) as cause:
        yield Read(source.where, source.size, fault=f"is damaged or cut off: {cause}")
    except (ValueError, OverflowError) as cause:
        yield Read(source.where, source.size, fault=f"can't be read: {cause}")


def _denied(cause: OSError) -> str:
    return f"can't be read: {cause.strerror or cause}"


def _in_folder(root: Path, prefix: str) -> tuple[list[Source], list[Passed]]:
    found: list[Source] = []
    passed: list[Passed] = []

    def called(path: Path) -> str:
        return prefix + _spelled(path.relative_to(root))

    def unread(path: Path, size: int, cause: OSError) -> None:
        found.append(Source(path, called(path), size, lines=False, fault=_denied(cause)))

    def pass_over(path: Path, end: str = "") -> None:
        passed.append(Passed(path, _spelled(path) + end, called(path) + end))

    for folder, folders, files in os.walk(root, onerror=lambda cause: unread(Path(cause.filename), 0, cause)):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        for path in (Path(folder) / name for name in folders):
            # Not of the path itself, which raises where it can't be looked at.
            if os.path.islink(path):
                pass_over(path, "/")
        for name in sorted(files):
            path = Path(folder) / name
            if name.startswith(".") or not _is_sought(path):
                pass_over(path)
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                # A link to nothing.
                pass_over(path)
                continue
            except OSError as cause:
                unread(path, 0, cause)
                continue
            if not stat.S_ISREG(status.st_mode):
                pass_over(path)
                continue
            found.append(Source(path, called(path), status.st_size, lines=_is_lines(path)))
    return found, passed


def _spelled(path: Path) -> str:
    # Surrogates of a name that is not UTF-8 couldn't be sent; the replacement still tells which file it was.
    return path.as_posix().encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _is_lines(path: Path, *, unnamed: bool = False) -> bool:
    """Tell whether a file is JSON Lines: by its name, and (`unnamed`) where that says nothing by its first character."""
    suffix = _suffix(path)
    if suffix in LINE_SUFFIXES or suffix in SUFFIXES or not unnamed:
        return suffix in LINE_SUFFIXES
    if _is_gzipped(path):
        return True
    with path.open("rb") as stream:
        return stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[")


def _is_table(path: Path) -> bool:
    return _suffix(path) in TABLE_SUFFIXES


def _is_sought(path: Path) -> bool:
    """Tell whether a file is read where it lies in a folder: of gzipped ones only lines and tables are."""
    suffix = _suffix(path)
    return suffix in FOLDER_SUFFIXES and (
        not _is_gzipped(path) or suffix in LINE_SUFFIXES or suffix in TABLE_SUFFIXES
    )


def _is_gzipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _suffix(path: Path) -> str:
    """Return a name's ending, of a gzipped file the one before `.gz`."""
    return (Path(path.stem) if _is_gzipped(path) else path).suffix.lower()


# ---- JSON Lines -----------------------------------------------------------------------------------------------------


def read_lines(source: Source, names: Names) -> Iterator[Read]:
    """Yield the documents of a JSON Lines file (also gzipped, also standard input); blank lines count as nothing.

    In UTF-8, or where its beginning tells another encoding in that one; standard input, which is read once, in UTF-8.
    """
    number, parsed = 0, False
    otherwise = given_otherwise(names)
    seen, told = set[str](), set[str]()
    # Standard input has no name by which a line could be found again.
    piped = str(source.path) == "-"
    for line, size in _lines(source, warn := list[str]()):
        number += 1
        where = f"{source.where}:{number}"
        if size > _LONGEST_LINE:
            yield Read(where, size, fault=f"the line is longer than {_LONGEST_LINE} bytes")
            continue
        if not line.strip():
            continue
        warnings, warn[:] = tuple(warn), []
        try:
            values = parse(line)
            seen.update(otherwise.keys() & values.keys())
            parsed = True
            document = from_line(
                values,
                names,
                default_id=None if piped or names.id != "id" else f"{source.name}#{number}",
            )
        except ValueError as fault:
            yield Read(where, size, fault=str(fault), warnings=warnings)
        else:
            # Lines are often alike: each warning once.
            fresh = [each for each in misnamed(values, document, names, table=False) if each not in told]
            told.update(fresh)
            yield Read(where, size, document=document, warnings=(*warnings, *fresh))
    if parsed:
        yield from _nowhere(source, otherwise, seen, "no line has a")


def _nowhere(source: Source, otherwise: Mapping[str, str], seen: Set[str], what: str) -> Iterator[Read]:
    """Yield a fault for each column that the caller named and a file has not."""
    for name, meant in otherwise.items():
        if name not in seen:
            option = {"creation_time": "time"}.get(meant, meant)
            told = f"{what} `{name}`, which --{option}-field named"
            yield Read(source.where, 0, fault=told, remedy="correct its name and load again")


def _lines(source: Source, warn: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yield each line in UTF-8 and the bytes that it took in its file, cut short where it is too long to be read.

    What is to be warned of is put into `warn`.
    """
    encoding, by_guess = ("utf-8-sig", False) if str(source.path) == "-" else _encoding(source)
    warn += guessed(encoding if by_guess else None)
    with _open(source) as stream:
        if not encoding.startswith("utf-8"):
            errors = "replace" if by_guess else "strict"
            with io.TextIOWrapper(stream, encoding, errors=errors) as text:
                while wide := text.readline(_LONGEST_LINE + 1):
                    size = len(wide.encode(encoding, "replace"))
                    while wide and size > _LONGEST_LINE and not wide.endswith("\n"):
                        wide = text.readline(_LONGEST_LINE)
                        size += len(wide.encode(encoding, "replace"))
                    yield wide.encode(), size
            return
        first = True
        while line := stream.readline(_LONGEST_LINE + 1):
            size = len(line)
            while line and size > _LONGEST_LINE and not line.endswith(b"\n"):
                line = stream.readline(_LONGEST_LINE)
                size += len(line)
            yield line.removeprefix(b"\xef\xbb\xbf") if first else line, size
            first = False


def _encoding(source: Source) -> tuple[str, bool]:
    """Return a file's encoding, and whether it had to be guessed."""
    head = b""
    with _open(source) as stream:
        try:
            while len(head) < _HEAD and (more := stream.read(64 * 2**10)):
                head += more
        except (OSError, EOFError, zlib.error):
            # Told when it is read, after what can be.
            return encoding_of(head, whole=False)
    return encoding_of(head, whole=len(head) < _HEAD)


def _open(source: Source) -> IO[bytes] | gzip.GzipFile:
    if str(source.path) == "-":
        return sys.stdin.buffer
    if _is_gzipped(source.path):
        return gzip.open(source.path, "rb")
    return source.path.open("rb")


# ---- tables -----------------------------------------------------------------------------------------------------------


def read_table(source: Source, names: Names) -> Iterator[Read]:
    """Yield the documents of a CSV or TSV file (also gzipped), row by row, in the encoding that its beginning tells."""
    encoding, by_guess = _encoding(source)
    errors = "replace" if by_guess else "strict"
    with _open(source) as raw, io.TextIOWrapper(raw, encoding, errors, newline="") as stream:
        before, told = 0, False
        columns = set[str]()
        try:
            lacking: list[Read] | None = None
            for row in csv_rows(stream, tab=_suffix(source.path) == ".tsv", columns=columns):
                if lacking is None:
                    # Refused before anything is stored: all its rows would lack it.
                    lacking = list(_nowhere(source, given_otherwise(names), columns, "there is no column"))
                    if lacking:
                        yield from lacking
                        return
                after = raw.tell()
                where, size, before = f"{source.where}:{row.number}", after - before, after
                if row.values is None:
                    yield Read(where, size, fault=row.fault)
                    continue
                try:
                    document = from_cells(row.values, names, default_id=f"{source.name}#{row.number}")
                except ValueError as fault:
                    yield Read(where, size, fault=str(fault))
                else:
                    # Of all rows alike: the first one's is enough.
                    warnings = tuple(row.warnings)
                    if not told:
                        unsure = guessed(encoding if by_guess else None)
                        warnings += (
                            *unsure,
                            *misnamed(row.values, document, names, table=True, columns=columns),
                        )
                    told = True
                    yield Read(where, size, document=document, warnings=warnings, doubtful=bool(row.warnings))
        except UnicodeDecodeError as cause:
            raise UnreadableFile(
                f"is not {cause.encoding} text: {cause.reason}", remedy="save it as UTF-8"
            ) from cause


# ---- files ----------------------------------------------------------------------------------------------------------


def read_file(
    source: Source, names: Names, *, sandbox: Sandbox | None = None, file_times: bool = True
) -> Iterator[Read]:
    """Yield the document that a file is.

    Its id is its name, its title its own or its first heading, its creation time its own or else (`file_times`) the
    file's. What needs a parser is read in the sandbox's process, here if there is none.
    """
    where = source.where
    if source.size > LIMITS.max_bytes:
        yield Read(where, source.size, fault=f"the file is larger than {LIMITS.max_bytes} bytes: split it")
        return
    data = source.path.read_bytes()
    if not data:
        yield Read(where, source.size, empty=True)
        return
    name = _spelled(Path(source.path.name))
    try:
        if sandbox is None or extracting.kind_of(data, name=name) in _IN_PROCESS:
            found = extracting.extract(data, name=name, limits=LIMITS)
        else:
            found = sandbox.extract(data, name=name)
    except UnreadableFile as error:
        yield Read(where, source.size, fault=_told(error))
        return
    if found.rows is None and not found.text.strip():
        yield Read(where, source.size, empty=True)
        return
    changed = file_time(source.path.stat().st_mtime) if file_times else None
    size = source.size
    for draft in drafts_of(
        found, name=source.name, given={}, names=names, fallback_time=changed, fallback_told=None
    ):
        at = where if draft.row is None else f"{where}:{draft.row}"
        yield Read(
            at,
            size,
            document=draft.document,
            fault=draft.fault,
            warnings=tuple(draft.warnings),
            by_file_time=draft.by_fallback,
        )
        size = 0


def file_time(seconds: float) -> str:
    """Return a file's time, given in seconds from 1970, as documents have it. Raises UnreadableFile where it is no date."""
    try:
        return format_instant(datetime.fromtimestamp(seconds, tz=UTC))
    except (ValueError, OverflowError, OSError) as cause:
        raise UnreadableFile(
            f"the file's time, {seconds:g} s from 1970, is no date",
            remedy="set it with `touch`, or load with --undated",
        ) from cause


def _told(error: UnreadableFile) -> str:
    return f"{error.detail}; {error.remedy}" if error.remedy else error.detail
