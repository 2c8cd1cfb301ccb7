"""What people call the parts of a document, made into a document as upserts take it. Pure.

Owns the names that lines, table rows and front matters use for our fields, and the order in which a document's id,
title and creation time are looked for. Judges nothing that an upsert judges anyway.
"""

import json
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from app.extracted import Extracted, Row, without_space_before_zone
from app.filters import shown
from app.times import format_instant, parse_instant
from app.vocabulary import TIME_NAMES
from app.writing import Document

Json = dict[str, Any]

_FIELDS: Final = frozenset(Document.model_fields)
# What a front matter or a line may call our fields.
_DATE_NAMES: Final = ("creation_time", "created_at", "date", "created", "published")
# What a column of dates may be called that nobody named as such.
_DATE_LIKE: Final = TIME_NAMES | {"creation_time"}
# What a text may be called that nobody named as such.
_TEXT_LIKE: Final = ("content", "body", "page_content")
_CHANGED_NAMES: Final = ("updated_at", "updated", "lastmod", "modified")
_DATES: Final = frozenset(
    {"creation_time", "updated_at", "last_accessed_at", "start_date", "end_date", "expires_at"}
)
_NO_FRONT: Final = frozenset(
    {"id", "text", "metadata", "embedding", "revision", "if_version", "salience", "evergreen"}
)


_EACH_ITS_OWN: Final = frozenset({"id", "title", "text", "embedding", "metadata", "revision", "if_version"})


@dataclass(frozen=True, slots=True)
class Names:
    """What the callers' lines call our fields; `time` None means creation_time, else created_at.

    `given` is how a caller gives another name, as messages say it.
    """

    id: str = "id"
    title: str = "title"
    text: str = "text"
    time: str | None = None
    given: str = 'in the form\'s `names`, such as {"id": "slug"}'


@dataclass(frozen=True, slots=True)
class Draft:
    """A document as an upsert takes it, or why there is none; `row` is its place in a table, from 1."""

    document: Json | None
    fault: str | None = None
    remedy: str | None = None
    row: int | None = None
    warnings: Sequence[str] = field(default_factory=tuple)
    # Nobody said when it was created: it has the fallback's time.
    by_fallback: bool = False


def drafts_of(
    found: Extracted,
    *,
    name: str,
    given: Mapping[str, Any],
    names: Names,
    fallback_time: str | None,
    fallback_told: str | None,
) -> list[Draft]:
    """Return the documents that a file makes: one, or one for each row of a table.

    `given` is what the caller says of it and outranks everything. The creation time is the caller's, else the file's
    own, else `fallback_time`, with `fallback_told` as its warning; null from either means undated. Rows stay
    undated where they carry no date. The id is the caller's, else `name`; a row's its own, else `name#<row>`.
    """
    if found.rows is not None:
        return [_of_row(row, found, name=name, given=given, names=names) for row in found.rows]
    warnings = list(found.warnings)
    try:
        own = {**found.fields, **from_front_matter(found.front)}
    except ValueError as fault:
        return [Draft(None, f"its front matter: {fault}", "correct the date, or leave it out")]
    metadata = {"path": name, **found.metadata, **own.pop("metadata", {}), **_object(given.get("metadata"))}
    document: Json = {
        "id": name,
        "title": found.title or posixpath.splitext(posixpath.basename(name))[0],
        "text": found.text.strip("\n"),
        **own,
        **given,
        "metadata": metadata,
    }
    if not document["text"].strip():
        return [Draft(None, "the file holds no text", "send one that says something")]
    by_fallback = "creation_time" not in document and fallback_time is not None
    if by_fallback:
        document["creation_time"] = fallback_time
        if fallback_told is not None:
            warnings.append(fallback_told)
    elif document.get("creation_time") is None:
        document.pop("creation_time", None)
    return [Draft(document, warnings=warnings, by_fallback=by_fallback)]


def _of_row(row: Row, found: Extracted, *, name: str, given: Mapping[str, Any], names: Names) -> Draft:
    if row.values is None:
        return Draft(None, row.fault or "can't be read", row=row.number)
    try:
        make = from_cells if found.kind == "csv" else from_line
        document = make(row.values, names, default_id=f"{given.get('id', name)}#{row.number}")
    except ValueError as fault:
        return Draft(None, str(fault), row=row.number)
    metadata = {**_object(given.get("metadata")), **document.get("metadata", {})}
    # What a row says of itself is nearer than what is said of all rows.
    document = {**{key: value for key, value in given.items() if key != "id"}, **document}
    if metadata:
        document["metadata"] = metadata
    warnings = [
        *found.warnings,
        *row.warnings,
        *misnamed(row.values, document, names, table=found.kind == "csv", columns=found.columns),
    ]
    return Draft(document, row=row.number, warnings=warnings)


def misnamed(
    values: Mapping[str, Any],
    document: Mapping[str, Any],
    names: Names,
    *,
    table: bool,
    columns: Collection[str] = (),
) -> list[str]:
    """Return warnings of a row whose columns are called otherwise than `names` has it: it loses its text or its date.

    `columns` are a table's, of which a row's `values` hold only those that are not empty.
    """
    told = []
    if table and names.text not in values and names.title not in values:
        held = [name for name in (names.text, names.title) if name in columns]
        if held and document.get("text"):
            told.append(f"its `{shown(held[0])}` is empty: its text is made of all its other columns")
        elif not held:
            told.append(
                f"no column is called `{shown(names.text)}` or `{shown(names.title)}`: its text is made of all columns; say "
                "which they are (`names` of an upload, --text-field and --title-field of `halflife load`)"
            )
    elif not document.get("text") and names.text not in values:
        like = [name for name in _TEXT_LIKE if isinstance(values.get(name), str) and values[name].strip()]
        if like:
            told.append(
                f"it has no `{shown(names.text)}`, and `{like[0]}` is metadata, which is not searched by its words; did you "
                f"mean it as the text? Name it (`names.text` of an upload, --text-field {like[0]} of `halflife load`)"
            )
    if document.get("creation_time") is None:
        dated = [name for name in values if name.lower() in _DATE_LIKE and _is_date(values[name])]
        how = "(`names.time` of an upload, --time-field of `halflife load`)"
        if names.time is not None and names.time not in values and names.time not in columns:
            meant = f", there is `{shown(dated[0])}`" if dated else ""
            told.append(
                f"it is undated: no column is called `{shown(names.time)}`{meant}; name its date {how}"
            )
        elif dated and names.time is None:
            told.append(f"it is undated, although `{shown(dated[0])}` looks like its date: name it {how}")
    return told


def given_otherwise(names: Names) -> dict[str, str]:
    """Return the columns that a caller named, with what each was said to be."""
    own = {"id": names.id, "title": names.title, "text": names.text, "creation_time": names.time}
    usual = asdict(Names())
    return {name: what for what, name in own.items() if name is not None and name != usual.get(what)}


def _is_date(value: Any) -> bool:
    try:
        parse_instant(int(value) if isinstance(value, str) and re.fullmatch(r"\d{9,13}", value) else value)
    except ValueError:
        return False
    return True


def _object(value: Any) -> Json:
    return dict(value) if isinstance(value, Mapping) else {}


# --- lines and rows --------------------------------------------------------------------------------------------------


def from_line(line: Mapping[str, Any], names: Names, *, default_id: str | None = None) -> Json:
    """Return the document that a line describes.

    Fields of a document keep their names, `created_at` is taken as `creation_time`, everything else goes into
    `metadata`, where it can be filtered by and is not searched. Null and empty values are left out.
    """
    rest = dict(line)
    document: Json = {}
    for field_, name in (("id", names.id), ("title", names.title), ("text", names.text)):
        if name in rest:
            document[field_] = rest.pop(name)
    if document.get("id") is None and default_id is not None:
        document["id"] = default_id
    if document.get("id") is None or isinstance(document["id"], bool | list | dict | float):
        raise ValueError(f"has no `{names.id}` that is text or a whole number; name another {names.given}")
    document["id"] = str(document["id"])
    time_name = names.time or ("creation_time" if rest.get("creation_time") else "created_at")
    if time_name in rest:
        rest["creation_time"] = rest.pop(time_name)
    metadata = rest.pop("metadata", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise ValueError("`metadata` is an object")
    others: Json = {}
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


def from_cells(cells: Mapping[str, Any], names: Names, *, default_id: str) -> Json:
    """Return the document that a table's row describes: as a line does, but every value is text there.

    Numbers and booleans are read as such where nothing is lost by it, `tags` are split at `|`, `;` or `,`, lists and
    objects are JSON. A table without a text column makes its text of all columns, one a line.
    """
    values: Json = {}
    for name, cell in cells.items():
        if name in (names.id, names.title, names.text):
            values[name] = cell
        elif name == "tags":
            values[name] = [part for piece in re.split(r"[|;,]", cell) if (part := piece.strip())]
        elif name in _DATES or name == (names.time or "created_at"):
            values[name] = int(cell) if re.fullmatch(r"\d{9,13}", cell) else cell
        elif name in _FIELDS - {"metadata", "embedding", "evergreen", "salience", "revision", "if_version"}:
            values[name] = cell
        else:
            values[name] = _cell(cell)
    if names.text not in cells and names.title not in cells:
        shown = [f"{name}: {cell}" for name, cell in cells.items() if name != names.id]
        values[names.text] = "\n".join(shown)
    return from_line(values, names, default_id=default_id)


def for_all(cells: Mapping[str, str]) -> Json:
    """Return what is said of many documents alike, as a part of each: read as a table's cells are.

    `metadata.KEY` is KEY of the metadata, also where a field is called so. Raises ValueError for what is each
    document's own, and for what an upsert would refuse.
    """
    for name in cells:
        if name in _EACH_ITS_OWN:
            raise ValueError(f"`{name}` is each document's own")
    plain = {name: cell for name, cell in cells.items() if not name.startswith("metadata.")}
    part = from_cells({**plain, "id": "x", "text": "x"}, Names(), default_id="x")
    inner = {name.removeprefix("metadata."): _cell(cell) for name, cell in cells.items() if name not in plain}
    if twice := sorted(part.get("metadata", {}).keys() & inner.keys()):
        raise ValueError(f"`metadata.{twice[0]}` and `{twice[0]}` are one key: give it one value")
    if metadata := {**part.get("metadata", {}), **inner}:
        part["metadata"] = metadata
    try:
        Document.model_validate(part)
    except ValidationError as cause:
        fault = cause.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(step) for step in fault["loc"])
        raise ValueError(f"`{where}`: {fault['msg'].removeprefix('Value error, ')}") from cause
    return {name: value for name, value in part.items() if name not in ("id", "text")}


def completed(document: Mapping[str, Any], part: Mapping[str, Any]) -> Json:
    """Return a document with what is said of all where it says nothing itself, in its metadata key by key."""
    whole = {**part, **document}
    if metadata := {**part.get("metadata", {}), **_object(document.get("metadata"))}:
        whole["metadata"] = metadata
    return whole


def _cell(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if text[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if re.fullmatch(r"-?\d{1,18}", text):
        number = int(text)
        return number if str(number) == text else text
    if re.fullmatch(r"-?\d{1,15}\.\d{1,15}", text):
        value = float(text)
        return value if repr(value) == text else text
    return text


def _instant(name: str, value: Any) -> str:
    """Return the instant as the API takes it; ValueError names the field."""
    if isinstance(value, str):
        # `2024-01-02 10:00:00 +0800`, as front matters have it.
        value = without_space_before_zone(value)
        if not value:
            raise ValueError(f"`{name}` is blank")
    try:
        return format_instant(parse_instant(value))
    except ValueError as cause:
        raise ValueError(f"`{name}`: {cause}") from cause


# --- front matter ----------------------------------------------------------------------------------------------------


def from_front_matter(front: Mapping[str, str | list[str]]) -> Json:
    """Return the fields of a document that a front matter gives; ValueError names a date that is none."""
    rest = dict(front)
    document: Json = {}
    for field_, aliases in (("creation_time", _DATE_NAMES), ("updated_at", _CHANGED_NAMES)):
        for alias in aliases:
            if alias in rest and field_ not in document:
                document[field_] = _instant(alias, rest.pop(alias))
    for name in ("start_date", "end_date", "expires_at"):
        if name in rest:
            document[name] = _instant(name, rest.pop(name))
    metadata: Json = {}
    for name, value in rest.items():
        if name == "tags":
            document["tags"] = (
                value if isinstance(value, list) else [part.strip() for part in value.split(",")]
            )
        elif name == "evergreen" and isinstance(value, str) and value.lower() in {"true", "false"}:
            document["evergreen"] = value.lower() == "true"
        elif name == "salience" and isinstance(value, str) and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
            document["salience"] = float(value)
        elif name in _FIELDS - _NO_FRONT and isinstance(value, str):
            document[name] = value
        else:
            metadata[name] = value
    if metadata:
        document["metadata"] = metadata
    return document
