"""What every request and answer is made of: frozen values, texts, ids, filters and vectors, each checked where it is read."""

import re
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from app.refusals import invalid

MAX_ID_BYTES = 512
MAX_QUERY_CHARS = 10_000
MAX_TOP_K = 10_000
MAX_WINDOW = 10_000
MAX_QUERIES = 100
MAX_ITEMS = 10_000
MAX_ITEMS_OF_ONE_ID = 100
"""In one bulk: they are done one after another, each a read, an embedding and a write, however long that takes."""
MAX_ROUTES = 16
MAX_FILTER_DEPTH = 8
MAX_FILTER_TERMS = 4_096
MAX_KEYWORD_CHARS = 1_024
MAX_TEXT_CHARS = 5_000_000
MAX_TITLE_CHARS = 2_000
MAX_VECTOR_DIMS = 4_096
MAX_FLOAT = 3.4e38
"""About the largest 32-bit float."""
DEFAULT_WINDOW = 100
DEFAULT_TOP_K = 10


class Value(BaseModel):
    """A frozen value that refuses unknown fields, and values of another JSON type: `"5"` is no number, 1 not true."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


def _whole(value: Any) -> Any:
    # JSON has one kind of number: 5.0 is the whole number 5, as JSON Schema's "integer" has it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Behind the range of an `int`, so that the schema tells the range."""


def clean_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(
            "holds a lone surrogate, which is not valid Unicode", "send well-formed UTF-8"
        ) from None
    return value


Text = Annotated[str, AfterValidator(clean_text)]


def _check_id(value: str) -> str:
    clean_text(value)
    size = len(value.encode())
    if size == 0 or size > MAX_ID_BYTES:
        raise invalid(
            f"an id is 1 to {MAX_ID_BYTES} bytes of UTF-8, and this one has {size}", "write another"
        )
    if value == "..":
        raise invalid(
            "'..' can't be an id, since URLs drop it and a DELETE would reach what stands above the document",
            "write another",
        )
    return value


DocumentId = Annotated[
    str,
    AfterValidator(_check_id),
    WithJsonSchema({
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_ID_BYTES,
        "not": {"const": ".."},
        "description": f"1 to {MAX_ID_BYTES} bytes of UTF-8.",
    }),
]  # fmt: skip

_COLLECTION = re.compile(r"[a-z0-9][a-z0-9_]*(?:-[a-z0-9_]+)*")
_RESERVED_COLLECTION = re.compile(r".*-(?:\d{14,}|w-\d+-[ab])|.*-w-\d+-[ab]|w-\d+-[ab]|\d{14,}")


def check_collection(value: str) -> str:
    """Return the name if its alias, indices and write aliases can't be confused with another collection's."""
    if len(value) > 100 or not _COLLECTION.fullmatch(value) or _RESERVED_COLLECTION.fullmatch(value):
        raise invalid(
            "a collection's name is 1 to 100 lower-case letters, digits, '_' and single '-' between them, and does "
            "not end like an index of ours ('-20260131000000', '-w-1-a')",
            "write such a name",
        )
    return value


CollectionName = Annotated[
    str,
    AfterValidator(check_collection),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 100, "pattern": f"^{_COLLECTION.pattern}$", "not": {"pattern": f"^({_RESERVED_COLLECTION.pattern})$"}, "examples": ["handbook"]}),
]  # fmt: skip

Filter = Annotated[
    dict[str, Any],
    Field(
        description=(
            "Field or metadata key -> a value, a list of values (any of them), or an object of operators "
            "(gt, gte, lt, lte, in, ne, exists); `and` / `or` take lists of filters, `not` takes one. "
            "Ranges need a date field or a field declared for the collection. At most 256 KiB of names and values, 256 conditions (a list of values is one, but for dates: each is), and 4096 UTF-16 "
            "units in a value."
        ),
        examples=[{"lang": "en", "creation_time": {"gte": "2025-01-01"}, "not": {"tags": "draft"}}],
    ),
]


def _vector(value: list[float]) -> list[float]:
    if not value or len(value) > MAX_VECTOR_DIMS:
        raise invalid(
            f"has not 1 to {MAX_VECTOR_DIMS} numbers",
            "send the vector of the collection's model, or leave it out",
        )
    numbers = np.asarray(value, dtype=np.float64)
    if not (np.abs(numbers) <= MAX_FLOAT).all():  # NaN compares as false
        raise invalid("holds what is no finite 32-bit float", "embed the text anew, or leave the vector out")
    if np.linalg.norm(numbers) < 1e-15:
        raise invalid("is a zero vector, which has no direction and so no cosine", "leave it out")
    return value


Vector = Annotated[
    list[float],
    AfterValidator(_vector),
    WithJsonSchema({
        "type": "array",
        "items": {"type": "number", "minimum": -MAX_FLOAT, "maximum": MAX_FLOAT},
        "minItems": 1,
        "maxItems": MAX_VECTOR_DIMS,
        "contains": {"not": {"const": 0}},
    }),
]  # fmt: skip


class ItemError(Value):
    """Why one item of a bulk failed."""

    type: str
    detail: str
    field: str | None = None
    remedy: str | None = None
