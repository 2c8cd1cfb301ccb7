"""Owns the filter grammar: from a caller's filter to Elasticsearch clauses, and to a verdict on one document.

Closed: a filter is data, never query DSL; what isn't known here is refused with its path. One parsed form feeds
the clauses, the evaluation in Python and the explanation, so that the three can't drift apart. No clock, no
network.

What a test means:

- A field may hold several values (`tags`, lists in metadata). Equality, membership and ranges hold if **any** value
  fits; `ne` is the negation, so it also holds for documents without the field. A range's two bounds must fit one value.
- A reserved keyword field (`lang`, `author`, …) also sees the metadata key of its name, since documents carry such
  facts in either place. `metadata.lang` means the metadata key alone. `id` and `title` mean the document's own.
- A metadata path names values, not objects: for `{"a": {"b": 1}}` the path is `a.b`, and `a` does not exist. A list's
  members all belong to its path.
- Undeclared metadata is compared as JSON text, as the flattened field indexes it: `2`, `2.0` and `"2"` are the same,
  so are `true` and `"true"`. A value longer than 4096 UTF-16 units is stored but not indexed.
- Dates are whole milliseconds on both sides. A day alone is the whole day in UTC: equal means within it, `lte`
  covers it, `gt` starts the day after, as Elasticsearch rounds.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal, TypeAlias

from app import fields
from app.collection import NOT_DECLARABLE, DeclaredType, typed_copy
from app.errors import InvalidRequest, LimitExceeded
from app.times import DAY_MS, format_instant, from_ms, is_day, parse_instant, to_ms
from app.values import MAX_FILTER_DEPTH, MAX_FILTER_TERMS
from app.vocabulary import TIME_NAMES

MAX_VALUE_UNITS = 4_096
"""`ignore_above` of the flattened metadata field, in UTF-16 code units; longer values are not indexed."""

MAX_PATH_UNITS = 4_096
"""A metadata path: 16 levels of keys of up to 256 bytes."""

MAX_FILTER_TEXT = 256 * 1024
"""UTF-8 bytes of a filter's names and values together: each list that a search asks for repeats its filters."""

MAX_CONDITIONS = 256
"""Clauses one filter may become. A small node allows 1024 in a whole query, and up to three filters meet in one
(the key's, the request's, the route's). Values in a list cost none: they are one `terms` clause."""

OPERATORS = ("gt", "gte", "lt", "lte", "in", "ne", "exists")
CONNECTIVES = ("and", "or", "not")
_RANGE = ("gt", "gte", "lt", "lte")
_OPERATORS_TEXT = ", ".join(OPERATORS)
_MIN_LONG, _MAX_LONG = -(2**63), 2**63 - 1
_TIME_LIKE = TIME_NAMES | {"publish_date", "datetime"}
_METADATA_PREFIX = f"{fields.METADATA}."
_DECLARED_PREFIX = f"{fields.DECLARED}."

Kind = Literal["keyword", "date", "boolean", "double", "long", "any"]


@dataclass(frozen=True, slots=True)
class Field:
    """What a name in a filter means: its type and the index fields that may hold its values.

    `any` is undeclared metadata, compared as JSON text. `absent` is the value that a document without the field has.
    """

    name: str
    kind: Kind
    indexed: tuple[str, ...]
    absent: bool | None = None


@dataclass(frozen=True, slots=True)
class OneOf:
    """Hold if a value of the field is among `wanted`; dates are half-open [from, to) spans of milliseconds, in order."""

    path: str
    field: Field
    wanted: tuple[Any, ...]
    members: frozenset[Any] = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", frozenset(self.wanted))


@dataclass(frozen=True, slots=True)
class Within:
    """Hold if one value of the field lies inside all bounds (operator -> value; dates: `gte` and `lt` only)."""

    path: str
    field: Field
    bounds: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Present:
    """Hold if the field has an indexed value."""

    path: str
    field: Field


@dataclass(frozen=True, slots=True)
class Not:
    """Hold if the part does not."""

    path: str
    part: "Condition"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Hold if one part does."""

    path: str
    parts: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """Hold if every part does; without parts it always holds."""

    path: str
    parts: tuple["Condition", ...]


Condition: TypeAlias = OneOf | Within | Present | Not | AnyOf | AllOf


def compile_filter(
    value: Mapping[str, Any], *, declared: Mapping[str, DeclaredType], path: str = "filter"
) -> list[dict[str, Any]]:
    """Return clauses for `bool.filter`, all of which must hold; an empty list only for `{}`.

    Raises InvalidRequest naming the exact path (`filter.and[1].creation_time.gte`) and the remedy.
    """
    return clauses(parse_filter(value, declared=declared, path=path))


class Compiler:
    """Compiles as `compile_filter` does, and what is the very same object as before once only: batches share filters."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {}

    def __call__(
        self, value: Mapping[str, Any], *, declared: Mapping[str, DeclaredType], path: str = "filter"
    ) -> list[dict[str, Any]]:
        """Return the clauses, in a list of the caller's own."""
        last = self._last.get(path)
        if last is None or last[0] is not value or last[1] is not declared:
            last = self._last[path] = (value, declared, compile_filter(value, declared=declared, path=path))
        return list(last[2])


def matches(
    document_source: Mapping[str, Any],
    value: Mapping[str, Any],
    *,
    declared: Mapping[str, DeclaredType],
    path: str = "filter",
) -> bool:
    """Tell whether the document, as it stands in `_source`, passes the filter, just as the cluster would."""
    return holds(parse_filter(value, declared=declared, path=path), document_source)


def explain_mismatch(
    document_source: Mapping[str, Any],
    value: Mapping[str, Any],
    *,
    declared: Mapping[str, DeclaredType],
    path: str = "filter",
) -> list[str]:
    """Return a sentence for each clause that excludes the document, in the filter's order; none if it passes."""
    return _mismatches(parse_filter(value, declared=declared, path=path), _Read(document_source))


# --- reading a filter ------------------------------------------------------------------------------------------------


def parse_filter(
    value: Any,
    *,
    declared: Mapping[str, DeclaredType],
    path: str = "filter",
    ranges_anywhere: bool = False,
    max_depth: int = MAX_FILTER_DEPTH,
    max_values: int = MAX_FILTER_TERMS,
) -> AllOf:
    """Return the filter as conditions, to evaluate on many documents; raises as `compile_filter` does.

    `ranges_anywhere` is for reading a filter before its collection is known: a range on a key that may be declared
    passes, as does the name of an inner field, and the conditions are good for nothing but having been read.
    """
    reader = _Reader(declared, ranges_anywhere=ranges_anywhere, max_depth=max_depth, max_values=max_values)
    return reader.read(value, path, depth=1)


class _Reader:
    """Reads one filter, counting what it will cost."""

    def __init__(
        self, declared: Mapping[str, DeclaredType], *, ranges_anywhere: bool, max_depth: int, max_values: int
    ) -> None:
        self.declared = declared
        self.ranges_anywhere = ranges_anywhere
        self.max_depth = max_depth
        self.max_values = max_values
        self.values = 0
        self.conditions = 0
        self.bytes = 0

    def read(self, value: Any, path: str, *, depth: int) -> AllOf:
        if not isinstance(value, Mapping):
            raise _refuse(path, f"must be an object, not {_described(value)}", "write {'field': value}")
        if depth > self.max_depth:
            raise LimitExceeded(
                f"`{path}` is nested deeper than {self.max_depth} levels",
                field=path,
                remedy="flatten `and`, `or` and `not`",
            )
        if not value and depth > 1:
            raise _refuse(path, "is empty, so it says nothing", "leave it out, or name a field in it")
        parts: list[Condition] = []
        for key, inner in value.items():
            if not isinstance(key, str):
                raise _refuse(path, f"has a key that is not text: {_described(key)}", "name fields by text")
            inner_path = f"{path}.{shown(key)}"
            self.weigh(inner_path, key)
            if key == "and":
                for group in self.group(inner, inner_path, depth=depth):
                    parts.extend(group.parts)
            elif key == "or":
                parts.append(AnyOf(inner_path, tuple(self.group(inner, inner_path, depth=depth))))
            elif key == "not":
                if isinstance(inner, list | tuple):
                    raise _refuse(inner_path, "takes one filter, not a list", "write {'not': {'or': [ … ]}}")
                parts.append(Not(inner_path, self.read(inner, inner_path, depth=depth + 1)))
            elif (meant := connective(key)) is not None and _holds_filters(inner):
                raise _refuse(
                    inner_path,
                    "is no connective of this language",
                    f"did you mean `{meant}`? A metadata key of that name is written 'metadata.{shown(key)}'",
                )
            else:
                parts.extend(self.test(key, inner, inner_path))
        return AllOf(path, tuple(parts))

    def group(self, value: Any, path: str, *, depth: int) -> list[AllOf]:
        if not isinstance(value, list | tuple):
            raise _refuse(
                path, f"takes a list of filters, not {_described(value)}", "write [{'field': value}, …]"
            )
        if not value:
            raise _refuse(path, "is an empty list", "leave it out, or list filters in it")
        return [self.read(inner, f"{path}[{at}]", depth=depth + 1) for at, inner in enumerate(value)]

    def test(self, name: str, value: Any, path: str) -> Iterator[Condition]:
        field = _field(name, self.declared, path, declared_anywhere=self.ranges_anywhere)
        if isinstance(value, Mapping):
            yield from self.operators(field, value, path)
        elif isinstance(value, list | tuple):
            yield self.one_of(field, value, path, listed=True)
        else:
            yield self.one_of(field, [value], path, listed=False)

    def operators(self, field: Field, value: Mapping[Any, Any], path: str) -> Iterator[Condition]:
        unknown = [shown(str(key)) for key in value if key not in OPERATORS]
        if unknown:
            meant = unknown[0].removeprefix("$").lower()
            raise _refuse(
                path,
                f"has unknown operators: {', '.join(unknown[:5])}",
                (f"did you mean `{meant}`? " if meant in OPERATORS else "")
                + f"the operators are {_OPERATORS_TEXT}; equality is the value itself; a key inside metadata is "
                "written with dots ('a.b')",
            )
        if not value:
            raise _refuse(path, "is an object without operators", f"use {_OPERATORS_TEXT}, or write a value")
        for one, other in (("gt", "gte"), ("lt", "lte")):
            if one in value and other in value:
                raise _refuse(path, f"has both `{one}` and `{other}`", "keep one of them")
        if "exists" in value:
            yield self.present(field, value, path)
        if "in" in value:
            if not isinstance(value["in"], list | tuple):
                raise _refuse(
                    f"{path}.in", f"takes a list, not {_described(value['in'])}", "write [value, …]"
                )
            yield self.one_of(field, value["in"], f"{path}.in", listed=True)
        if "ne" in value:
            unwanted = value["ne"]
            listed = isinstance(unwanted, list | tuple)
            if listed and not unwanted:
                raise _refuse(f"{path}.ne", "is an empty list, which excludes nothing", "leave it out")
            part = self.one_of(field, unwanted if listed else [unwanted], f"{path}.ne", listed=listed)
            yield Not(f"{path}.ne", part)
        if any(operator in value for operator in _RANGE):
            yield self.within(field, {op: value[op] for op in _RANGE if op in value}, path)

    def present(self, field: Field, value: Mapping[str, Any], path: str) -> Condition:
        wanted = value["exists"]
        if not isinstance(wanted, bool):
            raise _refuse(
                f"{path}.exists", f"is true or false, not {_described(wanted)}", "write true or false"
            )
        if not wanted and len(value) > 1:
            others = ", ".join(f"`{key}`" for key in value if key != "exists")
            raise _refuse(
                path, f"has `exists`: false beside {others}", "a missing field has no value: keep one"
            )
        self.spend(path, values=1, conditions=len(field.indexed))
        part = Present(f"{path}.exists", field)
        return part if wanted else Not(f"{path}.exists", part)

    def one_of(self, field: Field, values: Sequence[Any], path: str, *, listed: bool) -> OneOf:
        self.spend(path, values=max(1, len(values)), conditions=0)
        found: list[Any] = []
        for at, value in enumerate(values):
            here = f"{path}[{at}]" if listed else path
            made = _wanted(field, value, here)
            self.weigh(here, *made)
            found.extend(made)
        wanted = _merged(found) if field.kind == "date" else list(dict.fromkeys(found))
        spans = len(wanted) if field.kind == "date" else 1
        self.spend(path, values=0, conditions=max(1, spans) * len(field.indexed))
        return OneOf(path, field, tuple(wanted))

    def within(self, field: Field, bounds: Mapping[str, Any], path: str) -> Within:
        first = next(iter(bounds))
        if field.kind == "any" and self.ranges_anywhere:
            self.spend(path, values=len(bounds), conditions=1)
            self.weigh(path, *bounds.values())
            return Within(path, field, dict(bounds))
        if field.kind == "any":
            key = field.indexed[0].removeprefix(_METADATA_PREFIX)
            remedy = (
                f"declare '{shown(key)}' for the collection as long, double, date or keyword, and index it again "
                "(`halflife reindex COLLECTION --declare KEY=TYPE`)"
            )
            if key.lower() in _TIME_LIKE:
                remedy = f"did you mean `{fields.CREATION_TIME}`? If it is metadata of your own, {remedy}"
            if "." in key or key in fields.RESERVED:
                remedy = (
                    "store it under a top-level metadata key of its own and declare that for the collection"
                )
            raise _refuse(f"{path}.{first}", "is a range on metadata whose type is unknown", remedy)
        if field.kind == "boolean":
            raise _refuse(f"{path}.{first}", "is a range on a boolean", "write true or false")
        if field.kind == "keyword" and not field.indexed[0].startswith(_DECLARED_PREFIX):
            raise _refuse(
                f"{path}.{first}",
                f"is a range, and `{field.name}` holds names without an order",
                "list the values, or declare a metadata key of a type with an order",
            )
        self.spend(path, values=len(bounds), conditions=1)
        normal: dict[str, Any] = {}
        for operator, value in bounds.items():
            normal.update([_bound(field, operator, value, f"{path}.{operator}")])
        self.weigh(path, *normal.values())
        lower, upper = normal.get("gte", normal.get("gt")), normal.get("lte", normal.get("lt"))
        if lower is not None and upper is not None:
            exclusive = "gt" in normal or "lt" in normal
            if lower > upper or (lower == upper and exclusive):
                raise _refuse(
                    path, "is a range that holds nothing", "put the lower bound below the upper one"
                )
        return Within(path, field, normal)

    def weigh(self, path: str, *texts: Any) -> None:
        self.bytes += sum(_bytes(text) for text in texts if isinstance(text, str))
        if self.bytes > MAX_FILTER_TEXT:
            raise LimitExceeded(
                f"`{path}` is one too many: a filter's names and values hold at most {MAX_FILTER_TEXT // 1024} KiB",
                field=path,
                remedy="send fewer or shorter ones, or a field that many documents share",
            )

    def spend(self, path: str, *, values: int, conditions: int) -> None:
        self.values += values
        self.conditions += conditions
        if self.values > self.max_values:
            raise LimitExceeded(
                f"`{path}` is one too many: a filter holds at most {self.max_values} values",
                field=path,
                remedy="send fewer",
            )
        if self.conditions > MAX_CONDITIONS:
            raise LimitExceeded(
                f"`{path}` is one too many: a filter holds at most {MAX_CONDITIONS} conditions",
                field=path,
                remedy="list a field's values ({'field': [ … ]}) instead of many conditions",
                limit=MAX_CONDITIONS,
            )


INNER = (
    fields.TEXT, fields.DOCUMENT_ID, fields.CHUNKS, fields.DECLARED, fields.DELETED, fields.INDEXED_AT,
    fields.REVISION, "version", "if_version", "embedding",
)  # fmt: skip
"""What the index or the API calls something that a filter does not see; taken for metadata keys they would silently
match nothing. Spelt `metadata.version` they are metadata keys, and so is one that the collection declares."""
INNER_OBJECTS = (f"{fields.CHUNKS}.", _DECLARED_PREFIX)


def _field(
    name: str, declared: Mapping[str, DeclaredType], path: str, *, declared_anywhere: bool = False
) -> Field:
    """Return what a name means: reserved, else declared, else a metadata path.

    `declared_anywhere`: the collection is not known yet, and may declare what is called like an inner field.
    """
    if name in fields.RESERVED:
        kind = fields.RESERVED[name]
        indexed = fields.indexed_name(name)
        if name == fields.EVERGREEN:
            return Field(name, kind, (indexed,), absent=False)
        # What documents say of themselves stands in the field or in metadata of that name: look at both.
        both = (indexed, _METADATA_PREFIX + name) if name in fields.KEYWORDS else (indexed,)
        return Field(name, kind, both)
    may_be_declared = name in declared or (declared_anywhere and name not in NOT_DECLARABLE)
    undeclared = name in INNER and not may_be_declared
    if undeclared or name.startswith(INNER_OBJECTS):
        raise _refuse(
            path,
            "is no field that filters test",
            f"write 'metadata.{shown(name)}' for a metadata key of that name"
            + (", or 'id'" if name == fields.DOCUMENT_ID else ""),
        )
    if name == fields.METADATA:
        raise _refuse(path, "names no metadata key", "write 'metadata.<key>' or just the key")
    key = name.removeprefix(_METADATA_PREFIX)
    if "\0" in key or _units(key) > MAX_PATH_UNITS:
        raise _refuse(path, "holds NUL or is too long, so no stored key is called that", "correct the name")
    _check_unicode(key, path)
    if key in declared and key not in fields.RESERVED:
        return Field(name, declared[key], (_DECLARED_PREFIX + key,))
    return Field(name, "any", (_METADATA_PREFIX + key,))


def _wanted(field: Field, value: Any, path: str) -> list[Any]:
    """Return what an equal value looks like in the index: texts, numbers, booleans, or a span of milliseconds."""
    if value is None:
        raise _refuse(
            path, "is null, which no field holds", "write {'exists': false} for documents without the field"
        )
    if isinstance(value, Mapping | list | tuple):
        raise _refuse(
            path, f"must be text, a number or a boolean, not {_described(value)}", "list plain values"
        )
    if field.kind == "date":
        start, end = _span(value, path)
        return [(start, end)]
    if field.kind == "any":
        return _spellings(value, path)
    return [_typed(field, value, path)]


def _bound(field: Field, operator: str, value: Any, path: str) -> tuple[str, Any]:
    """Return the operator and value that the cluster compares with."""
    if value is None:
        raise _refuse(path, "is null, which bounds nothing", "leave the operator out")
    if isinstance(value, Mapping | list | tuple):
        raise _refuse(path, f"must be one value, not {_described(value)}", "write one bound")
    if field.kind == "date":
        start, end = _span(value, path)
        return {"gt": ("gte", end), "gte": ("gte", start), "lt": ("lt", start), "lte": ("lt", end)}[operator]
    bound = _typed(field, value, path)
    if field.kind == "double" and bound == 0:
        # Lucene puts -0.0 below 0.0, arithmetic does not: choose the zero that keeps the two together.
        bound = -0.0 if operator in ("gte", "lt") else 0.0
    return operator, bound


def _typed(field: Field, value: Any, path: str) -> Any:
    """Return the value in the field's type; raises rather than coerces."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.kind == "keyword":
        if not isinstance(value, str):
            raise _refuse(path, f"compares text, not {_described(value)}", _as_text(value))
        return _text(value, path)
    if field.kind == "boolean":
        if not isinstance(value, bool):
            raise _refuse(
                path, f"is true or false, not {_described(value)}", "write true or false without quotes"
            )
        return value
    if not number:
        raise _refuse(path, f"compares numbers, not {_described(value)}", "write a number without quotes")
    if field.kind == "long":
        if isinstance(value, float) and not value.is_integer():
            raise _refuse(
                path, f"is not a whole number, and `{field.name}` is a long", "round it, or declare a double"
            )
        whole = int(value)
        if not _MIN_LONG <= whole <= _MAX_LONG:
            raise _refuse(path, "is outside the 64 bits of a long", "declare the field a double or a keyword")
        return whole
    try:
        double = float(value)
    except OverflowError:
        double = math.inf
    if not math.isfinite(double):
        raise _refuse(path, "is not a finite number", "write a finite number, or leave the bound out")
    return double


def _span(value: Any, path: str) -> tuple[int, int]:
    """Return the half-open milliseconds that a date covers: its day if only a day was written, else one."""
    if isinstance(value, str):
        _check_unicode(value, path)
    try:
        start = to_ms(parse_instant(value))
    except (ValueError, OverflowError) as cause:
        raise _refuse(path, f"is not a date: {cause}", "write ISO 8601, such as '2026-01-31'") from cause
    return start, start + (DAY_MS if is_day(value) else 1)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans in order, those that touch joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _spellings(value: Any, path: str) -> list[str]:
    """Return the texts under which a flattened field may hold the value, as `json.dumps` writes them."""
    if isinstance(value, str):
        return [_text(value, path)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if not isinstance(value, int | float):
        raise _refuse(
            path, f"must be text, a number or a boolean, not {_described(value)}", "write a plain value"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise _refuse(path, "is not a finite number", "write a finite number")
    if isinstance(value, int) and value.bit_length() > MAX_VALUE_UNITS:
        raise _refuse(path, "is too large a number to be indexed", "write a smaller one")
    texts = [_json(value)]
    if isinstance(value, float) and value.is_integer():
        texts.append(_json(int(value)))
    elif isinstance(value, int):
        try:
            same = float(value)
        except OverflowError:
            return texts
        if int(same) == value:
            texts.append(_json(same))
    if value == 0:
        texts.append("-0.0" if "0.0" in texts and "-0.0" not in texts else "0.0")
    return list(dict.fromkeys(texts))


def _text(value: str, path: str) -> str:
    _check_unicode(value, path)
    if _units(value) > MAX_VALUE_UNITS:
        raise LimitExceeded(
            f"`{path}` is longer than {MAX_VALUE_UNITS} UTF-16 units, and no such value is indexed",
            field=path,
            remedy="filter by a shorter value",
            limit=MAX_VALUE_UNITS,
        )
    return value


def _check_unicode(value: str, path: str) -> None:
    if value.isascii():
        return
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(
            path, "holds a lone surrogate, which is not valid Unicode", "send well-formed UTF-8"
        ) from None


def _units(text: str) -> int:
    """Return the length as Java counts it, surrogates one each."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: Any) -> str:
    """Return the remedy for a value that should be text; a number may have more digits than can be written."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "write it as text, in quotes"
    return f'write it as text: "{_json(value)}"'


def shown(key: str) -> str:
    """Return the key as an error may carry it: short, and encodable whatever it holds."""
    short = key if len(key) <= 80 else f"{key[:79]}…"
    return short.encode("utf-8", "backslashreplace").decode()


def _described(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "text", Mapping: "an object", list | tuple: "a list", int | float: "a number"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


def _refuse(path: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}` {problem}", field=path, remedy=remedy)


def connective(key: str) -> str | None:
    """Return the connective that a key spells in another language's way: `$and`, `AND`."""
    meant = key.removeprefix("$").lower()
    return meant if meant in CONNECTIVES and key not in CONNECTIVES else None


def _holds_filters(value: Any) -> bool:
    """Tell whether a value can only be meant as filters, or lists nothing: no metadata is tested by it."""
    if isinstance(value, list | tuple):
        return not value or any(isinstance(inner, Mapping) for inner in value)
    return isinstance(value, Mapping) and not any(key in OPERATORS for key in value)


def undeclared_keys(condition: Condition) -> list[str]:
    """Return the metadata keys that a filter names and nobody declared, in its order: what a slip of the pen looks like."""
    match condition:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            return list(dict.fromkeys(key for part in parts for key in undeclared_keys(part)))
        case Not(part=part):
            return undeclared_keys(part)
        case _:
            named = condition.field
            return [named.indexed[0].removeprefix(_METADATA_PREFIX)] if named.kind == "any" else []


def has_key(key: str) -> dict[str, Any]:
    """Return the clause that holds for documents with this metadata key."""
    return _exists(_METADATA_PREFIX + key)


# --- to Elasticsearch --------------------------------------------------------------------------------------------------


def clauses(condition: AllOf) -> list[dict[str, Any]]:
    """Return the clauses, each of which must hold."""
    return [_clause(part) for part in condition.parts]


def _clause(condition: Condition) -> dict[str, Any]:
    match condition:
        case AllOf(parts=parts):
            return (
                _clause(parts[0])
                if len(parts) == 1
                else {"bool": {"filter": [_clause(part) for part in parts]}}
            )
        case AnyOf(parts=parts):
            return _should([_clause(part) for part in parts])
        case Not(part=part):
            return {"bool": {"must_not": [_clause(part)]}}
        case OneOf(field=Field(absent=bool()), wanted=wanted):
            return _flag(condition.field.indexed[0], wanted)
        case OneOf(field=field, wanted=wanted):
            return _should([clause for name in field.indexed for clause in _terms(name, field.kind, wanted)])
        case Within(field=field, bounds=bounds):
            return _range(field.indexed[0], field.kind, bounds)
        case Present(field=Field(absent=bool())):
            return {"match_all": {}}
        case Present(field=field):
            return _should([_exists(name) for name in field.indexed])


def _should(options: list[dict[str, Any]]) -> dict[str, Any]:
    return options[0] if len(options) == 1 else {"bool": {"should": options, "minimum_should_match": 1}}


def _flag(name: str, wanted: tuple[Any, ...]) -> dict[str, Any]:
    """Return the clause for a boolean that a document without it has as false."""
    is_true: dict[str, Any] = {"term": {name: True}}
    if not wanted:
        return {"match_none": {}}
    if len(set(wanted)) == 2:
        return {"match_all": {}}
    return is_true if wanted[0] else {"bool": {"must_not": [is_true]}}


def _terms(name: str, kind: Kind, wanted: tuple[Any, ...]) -> list[dict[str, Any]]:
    if not wanted:
        return [{"match_none": {}}]
    if kind == "date":
        return [_range(name, kind, {"gte": start, "lt": end}) for start, end in wanted]
    if kind == "double" and 0 in wanted:
        # The two zeros are different terms.
        zeros = _range(name, kind, {"gte": -0.0, "lte": 0.0})
        others = tuple(value for value in wanted if value != 0)
        return [zeros, *(_terms(name, kind, others) if others else [])]
    return [{"term": {name: wanted[0]}} if len(wanted) == 1 else {"terms": {name: list(wanted)}}]


def _range(name: str, kind: Kind, bounds: Mapping[str, Any]) -> dict[str, Any]:
    # Elasticsearch 9.5 reads a number as milliseconds but the text "2024" as a year: say which it is, whatever
    # format the field has.
    return {"range": {name: {**bounds, "format": "epoch_millis"} if kind == "date" else dict(bounds)}}


def _exists(name: str) -> dict[str, Any]:
    # `exists` takes its field as a pattern; a prefix of nothing is what it means on a flattened key, by exact name.
    return {"prefix": {name: {"value": ""}}} if "*" in name else {"exists": {"field": name}}


# --- on one document -----------------------------------------------------------------------------------------------


class _Read:
    """One document's values by field, each looked up once however many conditions ask for it."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source
        self._sorted: dict[Field, list[Any]] = {}
        self._distinct: dict[Field, frozenset[Any]] = {}
        self._unheard: dict[Field, bool] = {}
        self._values: dict[Field, list[Any]] = {}

    def values(self, field: Field) -> list[Any]:
        """Return the values in the document's order."""
        if field not in self._values:
            self._values[field] = _values(field, self._source)
        return self._values[field]

    def distinct(self, field: Field) -> frozenset[Any]:
        if field not in self._distinct:
            self._distinct[field] = frozenset(self.values(field))
        return self._distinct[field]

    def sorted(self, field: Field) -> list[Any]:
        if field not in self._sorted:
            self._sorted[field] = sorted(self.values(field))
        return self._sorted[field]

    def unheard(self, field: Field) -> bool:
        if field not in self._unheard:
            self._unheard[field] = _unheard(field, self._source)
        return self._unheard[field]


def holds(condition: Condition, document_source: Mapping[str, Any]) -> bool:
    """Tell whether the document, as it stands in `_source`, meets the condition."""
    return _holds(condition, _Read(document_source))


def _holds(condition: Condition, read: _Read) -> bool:
    match condition:
        case AllOf(parts=parts):
            return all(_holds(part, read) for part in parts)
        case AnyOf(parts=parts):
            return any(_holds(part, read) for part in parts)
        case Not(part=part):
            return not _holds(part, read)
        case Present(field=field):
            return bool(read.values(field))
        case OneOf(field=field, wanted=wanted, members=members):
            if field.kind == "date":
                ordered = read.sorted(field)
                return any(_some_inside(ordered, {"gte": start, "lt": end}) for start, end in wanted)
            return not members.isdisjoint(read.distinct(field))
        case Within(field=field, bounds=bounds):
            return _some_inside(read.sorted(field), bounds)


def confined(condition: Condition, document_source: Mapping[str, Any]) -> bool:
    """Tell whether the whole document lies inside the condition: every value of a field it names, not just one.

    A document of the tenants `["a", "b"]` holds for a filter on either. Who may write for one of them alone must
    write no such document, since the other would find it.
    """
    return _confined(condition, _Read(document_source))


def _confined(condition: Condition, read: _Read) -> bool:
    match condition:
        case AllOf(parts=parts):
            return all(_confined(part, read) for part in parts)
        case AnyOf(parts=parts):
            return any(_confined(part, read) for part in parts)
        case Within(field=field, bounds=bounds):
            ordered = read.sorted(field)
            return bool(ordered) and _inside(ordered[0], bounds) and _inside(ordered[-1], bounds)
        case OneOf(field=field, wanted=wanted, members=members):
            distinct = read.distinct(field)
            if read.unheard(field) or not distinct:
                return False
            if field.kind == "date":
                starts = [start for start, _ in wanted]
                # The last span that begins by then: they are in order and apart from each other.
                return all(
                    (at := bisect_right(starts, value) - 1) >= 0 and value < wanted[at][1]
                    for value in distinct
                )
            return distinct <= members
        case Not() | Present():
            return _holds(condition, read)


def marks(condition: Condition, document_source: Mapping[str, Any]) -> dict[str, Any]:
    """Return as much of a `_source` inside the condition as tells that it lies inside; empty where that takes more.

    Only values that the condition asks for, so that what remembers them remembers nothing else of the document.
    """
    found = _marks(condition, document_source, _Read(document_source))
    return found if confined(condition, found) else {}


def _marks(condition: Condition, source: Mapping[str, Any], read: _Read) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if not _confined(condition, read):
        return made
    match condition:
        case AllOf(parts=parts) | AnyOf(parts=parts):
            for part in parts:
                more = _marks(part, source, read)
                if fields.METADATA in made and fields.METADATA in more:
                    more[fields.METADATA] |= made[fields.METADATA]
                made |= more
        case OneOf(field=field) | Within(field=field):
            for name in field.indexed:
                key = name.removeprefix(_METADATA_PREFIX).removeprefix(_DECLARED_PREFIX)
                if key == name and name in source:
                    made[name] = source[name]
                elif key != name and key in (given := source.get(fields.METADATA) or {}):
                    made.setdefault(fields.METADATA, {})[key] = given[key]
    return made


def only_in(index: str) -> dict[str, Any]:
    """Return the clause that holds in this index alone, and for nothing in any other."""
    return {"term": {"_index": index}}


def names_metadata(clauses: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether compiled clauses look at metadata, whose fields differ between a collection's indices."""
    prefixes = (_METADATA_PREFIX, _DECLARED_PREFIX)
    left: list[Any] = list(clauses)
    while left:
        for name, inner in left.pop().items():
            if name.startswith(prefixes) or (name == "field" and str(inner).startswith(prefixes)):
                return True
            # A list of values is not walked: it may be long.
            if isinstance(inner, Mapping):
                left.append(inner)
            elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
                left += inner
    return False


def _inside(value: Any, bounds: Mapping[str, Any]) -> bool:
    return (
        ("gt" not in bounds or value > bounds["gt"])
        and ("gte" not in bounds or value >= bounds["gte"])
        and ("lt" not in bounds or value < bounds["lt"])
        and ("lte" not in bounds or value <= bounds["lte"])
    )


def _some_inside(ordered: Sequence[Any], bounds: Mapping[str, Any]) -> bool:
    """Tell whether one of the values, which are in order, lies inside all bounds."""
    at = 0
    if "gt" in bounds:
        at = bisect_right(ordered, bounds["gt"])
    if "gte" in bounds:
        at = max(at, bisect_left(ordered, bounds["gte"]))
    return at < len(ordered) and _inside(ordered[at], bounds)


def _values(field: Field, source: Mapping[str, Any]) -> list[Any]:
    """Return the document's values of the field, as the index holds them."""
    found: list[Any] = []
    for name in field.indexed:
        if name.startswith(_METADATA_PREFIX):
            key = name.removeprefix(_METADATA_PREFIX)
            found.extend(_flattened(source.get(fields.METADATA) or {}, key))
            continue
        if name.startswith(_DECLARED_PREFIX):
            key = name.removeprefix(_DECLARED_PREFIX)
            declared = source.get(fields.DECLARED) or {}
            # One written before the key was declared has no typed copy yet, a tombstone and one on its way in have none.
            stored = (
                declared[key] if key in declared else _copies(field, source.get(fields.METADATA) or {}, key)
            )
        else:
            stored = source.get(fields.TITLE if name == fields.TITLE_EXACT else name)
        for value in stored if isinstance(stored, list) else [stored]:
            found.extend(_as_indexed(field.kind, value))
    return found or ([] if field.absent is None else [field.absent])


def _copies(field: Field, metadata: Mapping[str, Any], key: str) -> list[Any]:
    """Return the typed copies that the document's values of a declared key get, without those of another type."""
    given = metadata.get(key)
    assert field.kind != "any"
    made = []
    for value in given if isinstance(given, list) else [given]:
        with suppress(ValueError):
            made.append(typed_copy(value, field.kind))
    return made


def _as_indexed(kind: Kind, value: Any) -> list[Any]:
    """Return the stored value in the field's type, or nothing where it has no value of that type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "date":
        try:
            return [int(value) if number else to_ms(parse_instant(value))]
        except ValueError:
            return []
    if kind == "double":
        return [float(value)] if number else []
    if kind == "long":
        return [int(value)] if number else []
    wanted = bool if kind == "boolean" else str
    return [value] if isinstance(value, wanted) else []


def _unheard(field: Field, source: Mapping[str, Any]) -> bool:
    """Tell whether the document has values of the field that are too long to be indexed: no filter finds those."""
    return any(
        _units(text) > MAX_VALUE_UNITS
        for name in field.indexed
        if name.startswith(_METADATA_PREFIX)
        for text in _written(source.get(fields.METADATA) or {}, name.removeprefix(_METADATA_PREFIX))
    )


def _flattened(metadata: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the JSON texts that the flattened field indexes at a dotted path: those that are not too long."""
    return (text for text in _written(metadata, path) if _units(text) <= MAX_VALUE_UNITS)


def _written(metadata: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the JSON texts of the values at a dotted path; keys may hold dots themselves."""
    for key, child in metadata.items():
        below = path[len(key) + 1 :] if path.startswith(f"{key}.") else None
        if key != path and below is None:
            continue
        stack = [child]
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack.extend(reversed(value))
            elif isinstance(value, Mapping):
                if below is not None:
                    yield from _written(value, below)
            elif value is not None and key == path:
                yield value if isinstance(value, str) else _json(value)


def _mismatches(condition: Condition, read: _Read) -> list[str]:
    """Return what of the condition fails; nothing exactly where it holds."""
    match condition:
        case AllOf(parts=parts):
            return [reason for part in parts for reason in _mismatches(part, read)]
        case AnyOf(path=path, parts=parts):
            reasons: list[str] = []
            for part in parts:
                own = _mismatches(part, read)
                if not own:
                    return []
                reasons += own
            more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            return [f"`{path}`: none of its {len(parts)} filters holds ({'; '.join(reasons[:5])}{more})"]
        case _ if _holds(condition, read):
            return []
        case Not(path=path, part=OneOf(field=field)):
            return [f"`{path}`: the document has {_listed(field, read)}, which is excluded"]
        case Not(path=path, part=Present(field=field)):
            return [f"`{path}`: the document has {_listed(field, read)}, and none may be there"]
        case Not(path=path):
            return [f"`{path}`: the document meets what is excluded"]
        case OneOf(path=path, field=field):
            return [f"`{path}`: the document has {_listed(field, read)}, which is not what is asked for"]
        case Within(path=path, field=field, bounds=bounds):
            asked = ", ".join(f"{op} {_printed(field, value)}" for op, value in bounds.items())
            return [f"`{path}`: the document has {_listed(field, read)}, which is not within {asked}"]
        case Present(path=path, field=field):
            return [f"`{path}`: the document has {_listed(field, read)}"]


def _listed(field: Field, read: _Read) -> str:
    values = read.values(field)
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    told = ", ".join(_printed(field, value) for value in values[:5])
    return f"{field.name} {told}{more}" if values else f"no {field.name}"


def _printed(field: Field, value: Any) -> str:
    if field.kind == "date":
        try:
            return format_instant(from_ms(value))
        except OverflowError:
            return f"{value} ms"
    text = _json(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
