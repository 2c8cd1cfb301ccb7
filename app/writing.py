"""What callers write: documents, changes to them, deletions, and what goes with a file."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from app.refusals import invalid
from app.times import Instant
from app.values import (
    MAX_ITEMS,
    MAX_ITEMS_OF_ONE_ID,
    MAX_KEYWORD_CHARS,
    MAX_TEXT_CHARS,
    MAX_TITLE_CHARS,
    WHOLE,
    DocumentId,
    Filter,
    Text,
    Value,
    Vector,
    clean_text,
)

Keyword = Annotated[Text, Field(min_length=1, max_length=MAX_KEYWORD_CHARS)]
Revision = Annotated[int, Field(ge=1, le=2**62), WHOLE]
"""Half of what Elasticsearch takes as a version: changes that bring none count on from there."""
StoredVersion = Annotated[int, Field(ge=1, le=2**63 - 1), WHOLE]


NUMBERS_BELOW = 10**999
"""Elasticsearch reads no number of more than 1000 characters, its sign included."""


def _check_metadata(value: dict[str, Any]) -> dict[str, Any]:
    stack: list[tuple[Any, int, str]] = [(value, 1, "metadata")]
    seen = 0
    while stack:
        node, depth, path = stack.pop()
        seen += 1
        if seen > 10_000:
            raise invalid(
                "metadata holds more than 10000 values",
                "store what is not filtered by in the text, or elsewhere",
            )
        if isinstance(node, dict):
            if depth > 16:
                raise invalid(f"{path[:80]} is nested deeper than 16 levels", "flatten it")
            for key, child in node.items():
                if "\0" in key or len(key.encode(errors="replace")) > 256:
                    raise invalid(
                        f"the key '{key[:40]!r}' in {path[:80]} holds NUL or is longer than 256 bytes",
                        "rename it",
                    )
                clean_text(key)
                stack.append((child, depth + 1, f"{path}.{key}"))
        elif isinstance(node, list):
            stack.extend((child, depth, path) for child in node)
            if depth > 16:
                raise invalid(f"{path[:80]} is nested deeper than 16 levels", "flatten it")
            depth += 1
        elif isinstance(node, str):
            clean_text(node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise invalid(f"{path[:80]} is not a finite number", "leave it out, or write it as text")
        elif isinstance(node, int) and abs(node) >= NUMBERS_BELOW:
            raise invalid(f"{path[:80]} is a number of 1000 digits or more", "write it as text")
    return value


class DocumentFields(Value):
    """What a caller may say about a document beside its text; each is stored as sent and can be filtered by."""

    creation_time: Instant | None = Field(None, description="When it was made; undated if left out.")
    updated_at: Instant | None = Field(None, description="When it was last changed.")
    last_accessed_at: Instant | None = Field(None, description="When it was last read (memory mode).")
    start_date: Instant | None = Field(None, description="From when on it is true.")
    end_date: Instant | None = Field(None, description="Until when (exclusive) it is true.")
    expires_at: Instant | None = Field(
        None, description="From when on searches skip it and a purge may remove it."
    )
    evergreen: bool = Field(False, description="Never decays.")
    salience: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="Importance, for additive memory scores."
    )
    source: Keyword | None = None
    source_id: Keyword | None = None
    url: Keyword | None = None
    author: Keyword | None = None
    tags: Annotated[list[Keyword], Field(max_length=256)] | None = None
    lang: Keyword | None = Field(None, examples=["en", "zh"])
    document_type: Keyword | None = None
    department: Keyword | None = None
    region: Keyword | None = None
    product_version: Keyword | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_check_metadata)] = Field(
        default_factory=dict, description="Anything; returned as sent, filtered by key."
    )


NOT_EMPTY = r"[^\s\u001c-\u001f\u0085]"
"""As a pattern in the schema: some character is not white space."""


class Document(DocumentFields):
    """A document as upserted."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"pattern": NOT_EMPTY}}}
                for name in ("text", "title")
            ]
        }
    )

    id: DocumentId = Field(examples=["leave-2026"])
    title: Annotated[Text, Field(max_length=MAX_TITLE_CHARS)] = ""
    text: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)] = Field(
        "", description="May be empty where the title is not."
    )
    embedding: Vector | None = Field(
        None,
        description="Its vector, if the caller has it (one chunk then); null: store without one; left out: embed it.",
    )
    revision: Revision | None = Field(
        None, description="The caller's own growing number; an older one than stored is refused (409)."
    )
    if_version: StoredVersion | None = Field(
        None, description="Write only if the stored `version` is this one."
    )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.text.strip() and not self.title.strip():
            raise invalid(
                "`text` and `title` are blank, so that there is nothing to find it by", "write one of them"
            )
        if self.revision is not None and self.if_version is not None:
            raise invalid("`revision` and `if_version` are two ways to guard a write", "choose one")
        if self.start_date is not None and self.end_date is not None and self.end_date <= self.start_date:
            raise invalid(
                "`end_date` is not after `start_date`, so it would never be true", "correct one of them"
            )
        return self


def _clearable(schema: dict[str, Any]) -> None:
    """Say that null clears `evergreen` and `metadata` too, and that a patch names something to change."""
    for name in ("evergreen", "metadata"):
        field = schema["properties"][name]
        field["type"] = [field["type"], "null"]
    schema |= {"minProperties": 2, "dependentSchemas": {"if_version": {"minProperties": 3}}}


class DocumentPatch(DocumentFields):
    """Fields of a stored document to change without embedding it again; null clears one."""

    model_config = ConfigDict(json_schema_extra=_clearable)

    id: DocumentId
    if_version: StoredVersion | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_clears(cls, value: Any) -> Any:
        cleared = {"metadata": {}, "evergreen": False}
        if isinstance(value, dict) and any(name in value and value[name] is None for name in cleared):
            return {
                **value,
                **{name: empty for name, empty in cleared.items() if name in value and value[name] is None},
            }
        return value

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_fields_set - {"id", "if_version"}:
            raise invalid("changes nothing", "name a field")
        return self


Refresh = Annotated[
    Literal["false", "true", "wait_for"],
    BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value),
    WithJsonSchema({"enum": [False, True, "false", "true", "wait_for"], "default": False}),
]


class PatchDocuments(Value):
    """Documents to change in part."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        description=f"Each on its own, those of one id in their order; at most {MAX_ITEMS_OF_ONE_ID} of one id.",
        json_schema_extra={"items": {"$ref": "#/components/schemas/DocumentPatch"}},
    )
    refresh: Refresh = "false"


class DeletedDocument(Value):
    """A document to delete."""

    id: DocumentId
    if_version: StoredVersion | None = Field(
        None, description="Delete only if the stored `version` is this one; else its status is `conflict`."
    )


class DeleteDocuments(Value):
    """What to delete: ids, or documents as they were seen, or a filter, or everything."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["ids"], "properties": {"ids": {"type": "array"}}},
                {"required": ["documents"], "properties": {"documents": {"type": "array"}}},
                {"required": ["filter"], "properties": {"filter": {"type": "object"}}},
                {"required": ["delete_all"], "properties": {"delete_all": {"const": True}}},
            ]
        }
    )

    ids: Annotated[list[DocumentId], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    documents: Annotated[list[DeletedDocument], Field(min_length=1, max_length=MAX_ITEMS)] | None = Field(
        None, description="By id too, each only while nobody has written it since it was read (`if_version`)."
    )
    filter: Filter | None = None
    delete_all: bool = Field(False, description="Must be true to delete every document.")
    refresh: Refresh = "false"

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [
            name
            for name, there in (
                ("ids", self.ids),
                ("documents", self.documents),
                ("filter", self.filter),
                ("delete_all", self.delete_all),
            )
            if there
        ]
        if self.filter is not None and not self.filter:
            raise invalid("`filter` is empty and would match everything", "set `delete_all` to true for that")
        if len(given) != 1:
            raise invalid(
                "exactly one of `ids`, `documents`, `filter` and `delete_all` (as true) must be given",
                "keep one of them",
            )
        return self


class Upsert(Value):
    """A bulk of documents to store."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        description=f"Each on its own, those of one id in their order; at most {MAX_ITEMS_OF_ONE_ID} of one id.",
        json_schema_extra={"items": {"$ref": "#/components/schemas/Document"}},
    )
    refresh: Refresh = Field(
        "false",
        description="wait_for: answer when searches see it (where no refresh is due within 5 s, by one at once); "
        "true: refresh now.",
    )


class RowNames(Value):
    """What the rows of uploaded tables and line files call a document's fields."""

    id: Annotated[str, Field(max_length=256)] = "id"
    title: Annotated[str, Field(max_length=256)] = "title"
    text: Annotated[str, Field(max_length=256)] = "text"
    creation_time: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="`creation_time`, else `created_at`, if left out."
    )
    time: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The same as `creation_time`; give one of them."
    )

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.time is not None and self.creation_time is not None:
            raise invalid("`time` and `creation_time` name the same column", "give one of them")
        return self


def _check_given(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in ("text", "embedding") or name not in Document.model_fields:
            raise invalid(
                f"`{_printable(name)}` can't be given",
                "use the fields of a document, other keys in `metadata`, and let the file give its text",
            )
    # What they make is put together before any document is checked.
    if not isinstance(value.get("metadata"), dict | None):
        raise invalid("`metadata` is no object", 'write {"metadata": {"key": "value"}}, or leave it out')
    if not isinstance(value.get("id"), str | None):
        raise invalid("`id` is no text", "write it in quotes, or leave it out")
    return {name: given for name, given in value.items() if name != "id" or given is not None}


def _printable(name: str) -> str:
    return name[:60].encode("ascii", "backslashreplace").decode()


Given = Annotated[dict[str, Any], AfterValidator(_check_given)]


class FileForm(Value):
    """What a caller says about uploaded files, each part JSON; the files themselves stand beside it."""

    fields: Given = Field(
        default_factory=dict,
        description="Fields of the documents of all files, such as `lang` or `metadata`.",
    )
    each: list[Given | None] | dict[str, Given] | None = Field(
        None, description="Fields of each file's document: a list in the order of the files, or by file name."
    )
    names: RowNames = Field(default_factory=RowNames)
    refresh: Refresh = "false"

    def given(self, number: int, name: str, count: int) -> dict[str, Any]:
        """Return what is said about the `number`-th of `count` files, from 0."""
        own = (self.each[number] if isinstance(self.each, list) else (self.each or {}).get(name)) or {}
        shared = {key: value for key, value in self.fields.items() if key != "id" or count == 1}
        metadata = {**(shared.get("metadata") or {}), **(own.get("metadata") or {})}
        return {**shared, **own, **({"metadata": metadata} if metadata else {})}
