"""Text, Markdown, tables and JSON Lines read."""

import csv
import io
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from app.decoding import decode
from app.errors import UnreadableFile
from app.extracted import SUFFIXES, Extracted, Json, Limits, Row, guessed, one_line, suffix_of


def read_text(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return a text or Markdown file, its front matter apart."""
    text, encoding = decode(data)
    front, body = split_front_matter(text)
    return Extracted(
        "text" if SUFFIXES.get(suffix_of(name)) == "text" else "markdown",
        text=body,
        title=one_line(first_heading(body)),
        front=front,
        warnings=guessed(encoding),
    )


def read_csv(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return the rows of a CSV or TSV file."""
    text, encoding = decode(data)
    columns = set[str]()
    stream = io.StringIO(text, newline="")
    rows = list(csv_rows(stream, tab=suffix_of(name) == ".tsv", most=limits.max_rows, columns=columns))
    return Extracted("csv", rows=rows, columns=sorted(columns), warnings=guessed(encoding))


def csv_rows(
    stream: io.TextIOBase, *, tab: bool = False, most: int | None = None, columns: set[str] | None = None
) -> Iterator[Row]:
    """Yield the rows of a table whose first line names its columns; empty cells are left out.

    `columns` gets the columns' names before the first row comes.
    The delimiter is a comma, a semicolon, a tab or a bar: whichever the first line has most of.
    """
    csv.field_size_limit(_LONGEST_CELL)
    first = stream.readline()
    delimiter = "\t" if tab else max(",;\t|", key=first.count)
    lines = _Lines(first, stream)
    reader = csv.reader(lines, delimiter=delimiter)
    header = [cell.strip() for cell in next(reader, [])]
    if not any(header):
        raise UnreadableFile("the table has no header", remedy="name the columns in its first line")
    if fault := _open_quote(lines.taken, delimiter, at_end=lines.ended):
        raise UnreadableFile(f"the table's header {fault}")
    twice = {cell for cell, times in Counter(header).items() if cell and times > 1}
    if twice:
        raise UnreadableFile(f"two columns are called '{min(twice)[:60]}'", remedy="give each its own name")
    if columns is not None:
        columns.update(header)
    number = 1
    while True:
        number += 1
        lines.taken.clear()
        try:
            cells = next(reader, None)
        except csv.Error:
            yield Row(
                number,
                fault=f"holds a cell of more than {_LONGEST_CELL} characters, and no row after it is read; is a quote "
                "not closed?",
            )
            return
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if most is not None and number - 1 > most:
            raise UnreadableFile(
                f"the table has more than {most} rows", remedy="split it, or use `halflife load`"
            )
        if fault := _open_quote(lines.taken, delimiter, at_end=lines.ended):
            yield Row(number, fault=fault)
            continue
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
            warnings=_rows_within(cells, delimiter, width=len(header)),
        )


_LONGEST_CELL: Final = 2**27


class _Lines:
    """The lines of a table as its reader takes them; `taken` are those since it was emptied, `ended` that none is left."""

    def __init__(self, first: str, rest: io.TextIOBase) -> None:
        self.taken: list[str] = []
        self.ended = False
        self._lines = itertools.chain([first], rest)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.ended = True
            raise StopIteration
        self.taken.append(line)
        return line


def _open_quote(lines: Sequence[str], delimiter: str, *, at_end: bool) -> str | None:
    """Return the fault of a row, given its lines, whose quote was forgotten, so that it takes rows after it for its cell.

    That is one in which the file ends, and one that goes over several lines and is closed in the midst of a cell: where a
    later row opens a quote of its own. Within a line, the same is forgiven, as spreadsheets do.
    """
    more = len(lines) - 1
    if at_end:
        over = (
            "the file's end"
            if more == 0
            else f"the {more} lines after it"
            if more > 1
            else "the line after it"
        )
        return f'has a quote (") that is opened and not closed, and takes {over} for its cell: {_CLOSE}'
    if more < 1:
        return None
    try:
        # Blanks behind a quoted cell are harmless.
        list(csv.reader((_BLANKS.sub('"', line) for line in lines), delimiter=delimiter, strict=True))
    except csv.Error:
        return (
            f'has a quote (") that is opened and closed {more} line{"s" * (more > 1)} later, in the midst of a cell, and takes '
            f"what is between for one: {_CLOSE}"
        )
    return None


_BLANKS: Final = re.compile(r'"[ ]+(?=[,;|\t\r\n]|$)')
_CLOSE: Final = 'close it, or write it twice ("") within a quoted cell'


def _rows_within(cells: Sequence[str], delimiter: str, *, width: int) -> list[str]:
    """Return the warning of a row whose quoted cell holds what looks like the rows after it.

    Each of its later lines has as many cells as the header, and the first of them is written like the row's own.
    """
    for place, cell in enumerate(cells):
        if "\n" not in cell.strip() or width < 2:
            continue
        later = cell.strip().splitlines()[1:]
        # What stands before the cell was cut off from the first line, what stands behind it from the last.
        inner = [each.split(delimiter) for each in later]
        whole = all(len(each) == width for each in inner[:-1]) and len(inner[-1]) == place + 1
        if whole and all(_shape(each[0]) == _shape(cells[0]) for each in inner):
            told = f"a quoted cell holds {len(inner)} lines that look like rows of their own"
            return [f'{told}: if a quote (") was opened by mistake, they are not loaded as rows']
    return []


def _shape(text: str) -> str:
    """Return how a cell is written: digits as 0, letters as a, runs as one."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", text.strip().strip('"')))


def read_lines(data: bytes, name: str, limits: Limits) -> Extracted:
    """Return the objects of JSON Lines, a fault for each line that is none."""
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
    return Extracted("jsonl", rows=rows, warnings=guessed(encoding))


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
    except ValueError as cause:
        if "int_max_str_digits" not in str(cause):
            raise
        # Python's own words speak of its settings.
        most = sys.get_int_max_str_digits()
        raise ValueError(f"holds a number of more than {most} digits: write it as text") from cause
    if not isinstance(value, dict):
        raise ValueError(
            f"a line is one JSON object, this is {'an array' if isinstance(value, list) else type(value).__name__}"
        )
    return value


_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+(\S.*)$")
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
            if not isinstance(items, list):
                items = front[last] = []
            items.append(_plain(line.strip()[2:]))
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
            if (match := _HEADING.match(line)) and (heading := match[1].rstrip().rstrip("#").rstrip()):
                return heading
            if before.strip() and _UNDERLINE.match(line) and line.lstrip().startswith("="):
                return before.strip()
        before = line
    return None
