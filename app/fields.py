"""The names of the indexed fields, each written once, and what a filter may do with it.

A test ties this module to `es_mappings/`. Imports nothing of ours.
"""

from typing import Final, Literal

FieldType = Literal["keyword", "date", "boolean", "double", "long"]

DOCUMENT_ID: Final = "document_id"
TITLE: Final = "title"
TEXT: Final = "text"
CHUNKS: Final = "chunks"
CHUNK_TEXT: Final = "chunks.text"
CHUNK_START: Final = "chunks.start"
CHUNK_END: Final = "chunks.end"
CHUNK_HASH: Final = "chunks.hash"
EMBEDDING: Final = "chunks.embedding"
CREATION_TIME: Final = "creation_time"
UPDATED_AT: Final = "updated_at"
LAST_ACCESSED_AT: Final = "last_accessed_at"
EVERGREEN: Final = "evergreen"
SALIENCE: Final = "salience"
START_DATE: Final = "start_date"
END_DATE: Final = "end_date"
EXPIRES_AT: Final = "expires_at"
METADATA: Final = "metadata"
DECLARED: Final = "declared"
DELETED: Final = "deleted"
INDEXED_AT: Final = "indexed_at"
REVISION: Final = "revision"

KEYWORDS: Final[tuple[str, ...]] = (
    "source",
    "source_id",
    "url",
    "author",
    "tags",
    "lang",
    "document_type",
    "department",
    "region",
    "product_version",
)
"""What callers filter by exactly; `tags` may hold several values, as may every keyword in Elasticsearch."""

DATES: Final[tuple[str, ...]] = (
    CREATION_TIME,
    UPDATED_AT,
    LAST_ACCESSED_AT,
    START_DATE,
    END_DATE,
    EXPIRES_AT,
)

RESERVED: Final[dict[str, FieldType]] = {
    "id": "keyword",
    TITLE: "keyword",
    **dict.fromkeys(KEYWORDS, "keyword"),
    **dict.fromkeys(DATES, "date"),
    EVERGREEN: "boolean",
    SALIENCE: "double",
}
"""Name in a filter -> type. Any other name is a metadata key."""

TITLE_EXACT: Final = "title.raw"


def indexed_name(name: str) -> str:
    """Return the index field behind a reserved name of the API."""
    return {"id": DOCUMENT_ID, TITLE: TITLE_EXACT}.get(name, name)
