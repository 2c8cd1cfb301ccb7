"""A document between the caller and the index: checked, given its typed fields, written as `_source`, read back.

Pure. Owns the shape of `_source`: what stands in it, what is left out, what a tombstone is. Refuses vectors' bytes
(the caller packs them) and versions (the write protocol's).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from app import fields
from app.answers import StoredDocument
from app.collection import Collection, DeclaredType, typed_copy
from app.errors import HalflifeError, InvalidRequest
from app.refusals import explained
from app.times import format_instant, parse_instant
from app.values import MAX_KEYWORD_CHARS, DocumentId, ItemError
from app.writing import Document, DocumentFields, DocumentPatch

MAX_CHUNKS: Final = 9_000
"""Elasticsearch takes 10,000 nested objects in one document."""

Source = dict[str, Any]
T = TypeVar("T", Document, DocumentPatch)

STORED_FIELDS: Final = (
    fields.DOCUMENT_ID, fields.TITLE, fields.TEXT, fields.CHUNK_START, *fields.DATES, fields.EVERGREEN, fields.SALIENCE,
    *fields.KEYWORDS, fields.METADATA, fields.DELETED, fields.INDEXED_AT, fields.REVISION,
)  # fmt: skip
"""What `stored` needs of `_source`: everything but the chunks' texts, hashes and vectors."""

FILTERED_FIELDS: Final = (
    fields.DOCUMENT_ID, fields.TITLE, *fields.DATES, fields.EVERGREEN, fields.SALIENCE, *fields.KEYWORDS, fields.METADATA,
    fields.DECLARED,
)  # fmt: skip
"""What a filter may look at in `_source`."""

_ID = TypeAdapter[str](DocumentId)
_PLAIN = (*fields.KEYWORDS, fields.SALIENCE)


class InvalidItem(InvalidRequest):
    """One item of a bulk does not fit the contract; the others are not touched by it."""


def check_document(raw: Any, collection: Collection) -> tuple[Document, dict[str, Any]]:
    """Return the document and its declared values. Raises InvalidItem naming the field and the remedy."""
    document = _parse(Document, raw)
    _check_vector(document.embedding, collection)
    return document, declared_values(document.metadata, collection.declared)


def check_patch(raw: Any, collection: Collection) -> DocumentPatch:
    """Return the patch. Raises InvalidItem naming the field and the remedy, also for metadata of another declared type."""
    patch = _parse(DocumentPatch, raw)
    declared_values(patch.metadata, collection.declared)
    return patch


def check_id(raw: Any) -> str:
    """Return the id. Raises InvalidItem."""
    try:
        return _ID.validate_python(raw)
    except ValidationError as cause:
        raise _explain(cause, None, default_field="id") from cause


def id_of(raw: Any) -> str | None:
    """Return what the item calls itself, for the answer: shortened where it is too long, always encodable."""
    given = raw.get("id") if isinstance(raw, Mapping) else raw
    if not isinstance(given, str):
        return None
    clean = given[:600].encode("utf-8", "replace").decode()
    return clean if len(given) <= 600 else clean[:80] + "…"


def item_error(error: HalflifeError) -> ItemError:
    """Return the failure as an item of a bulk tells it."""
    return ItemError(type=error.code, detail=error.detail, field=error.field, remedy=error.remedy)


# --- _source ---------------------------------------------------------------------------------------------------------


def source(
    document: Document, *, chunks: Sequence[Source], declared: Mapping[str, Any], indexed_at: str
) -> Source:
    """Return `_source` with the chunks from `chunk_source`; what is null or empty is left out."""
    body: Source = {fields.DOCUMENT_ID: document.id}
    for name, value in ((fields.TITLE, document.title), (fields.TEXT, document.text)):
        if value:
            body[name] = value
    body[fields.CHUNKS] = list(chunks)
    _put_fields(body, document, (*fields.DATES, *_PLAIN, fields.EVERGREEN, fields.METADATA))
    if declared:
        body[fields.DECLARED] = dict(declared)
    body[fields.INDEXED_AT] = indexed_at
    if document.revision is not None:
        body[fields.REVISION] = document.revision
    return body


def chunk_source(text: str, start: int, end: int, *, digest: str | None, vector: str | None) -> Source:
    """Return one entry of `chunks`: its place in the text in code points, its vector packed.

    `digest` is what its vector was made from; None for a vector that the caller brought, which must not be taken for
    the model's own later.
    """
    body: Source = {"text": text, "start": start, "end": end}
    if digest is not None:
        body["hash"] = digest
    if vector is not None:
        body["embedding"] = vector
    return body


def patched(stored: Mapping[str, Any], patch: DocumentPatch, *, indexed_at: str) -> Source:
    """Return the stored `_source` with the fields that the patch names replaced, and cleared where they are null.

    Where metadata is named it has no typed copies yet: which there are is for the index to say that it is written to.
    """
    body = dict(stored)
    named = patch.model_fields_set - {"id", "if_version"}
    for name in named:
        body.pop(name, None)
    _put_fields(body, patch, sorted(named))
    if fields.METADATA in named:
        body.pop(fields.DECLARED, None)
    body[fields.INDEXED_AT] = indexed_at
    return body


def retyped(source: Mapping[str, Any], declared: Mapping[str, DeclaredType]) -> Source:
    """Return a stored `_source` with the typed copies that an index declaring these keys has. Raises InvalidItem."""
    typed = declared_values(source.get(fields.METADATA, {}), declared)
    plain = {name: value for name, value in source.items() if name != fields.DECLARED}
    return {**plain, fields.DECLARED: typed} if typed else plain


def tombstone(
    id_: str, *, indexed_at: str, revision: int | None, marks: Mapping[str, Any] | None = None
) -> Source:
    """Return `_source` of a deleted document; the caller's revision stays, so that an older one can't bring it back.

    `marks` are what of it lay inside the filter of the key that deleted it: they tell whose it was.
    """
    body: Source = {**(marks or {}), fields.DOCUMENT_ID: id_}
    body |= {fields.DELETED: True, fields.INDEXED_AT: indexed_at}
    if revision is not None:
        body[fields.REVISION] = revision
    return body


def marked(body: Mapping[str, Any]) -> bool:
    """Tell whether a tombstone tells whose document it was."""
    return any(
        name in body for name in FILTERED_FIELDS if name not in (fields.DOCUMENT_ID, fields.INDEXED_AT)
    )


def without_vectors(body: Mapping[str, Any]) -> Source:
    """Return `_source` as it is read back by default."""
    plain = dict(body)
    if fields.CHUNKS in plain:
        plain[fields.CHUNKS] = [
            {key: value for key, value in chunk.items() if key != "embedding"} for chunk in plain["chunks"]
        ]
    return plain


def stored(body: Mapping[str, Any], *, version: int) -> StoredDocument:
    """Return the document as callers get it. Values are taken as stored, also where today's limits are stricter."""
    known: dict[str, Any] = {
        name: parse_instant(body[name])
        for name in (*fields.DATES, fields.INDEXED_AT)
        if body.get(name) is not None
    }
    known |= {
        name: body[name]
        for name in (*_PLAIN, fields.EVERGREEN, fields.REVISION)
        if body.get(name) is not None
    }
    return StoredDocument.model_construct(
        id=body[fields.DOCUMENT_ID],
        title=body.get(fields.TITLE, ""),
        text=body.get(fields.TEXT, ""),
        metadata=body.get(fields.METADATA, {}),
        version=version,
        chunks=len(body.get(fields.CHUNKS, ())),
        **known,
    )


def _put_fields(body: Source, values: DocumentFields, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(values, name)
        if value is None or value in ({}, []):
            continue
        body[name] = format_instant(value) if name in fields.DATES else value


# --- checks ----------------------------------------------------------------------------------------------------------


def declared_values(metadata: Mapping[str, Any], declared: Mapping[str, DeclaredType]) -> dict[str, Any]:
    """Return the typed copies of declared metadata keys; null and absent ones are left out.

    A list gives a list. Nothing is coerced that could change its meaning: "5" is no number, 1 no boolean. Raises
    InvalidItem naming the key.
    """
    typed: dict[str, Any] = {}
    for name, kind in declared.items():
        value = metadata.get(name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        try:
            copies = [typed_copy(each, kind) for each in values if each is not None]
        except ValueError as cause:
            raise InvalidItem(
                f"metadata.{name} is declared as {kind} in this collection: {cause}",
                field=f"metadata.{name}",
                remedy=f"send {_WANTED[kind]}, or leave it out",
            ) from cause
        if copies:
            typed[name] = copies if isinstance(value, list) else copies[0]
    return typed


_WANTED: Final[dict[DeclaredType, str]] = {
    "long": "a whole number of 64 bits",
    "double": "a finite number",
    "date": "an instant such as '2026-01-31T00:00:00Z'",
    "keyword": f"text of at most {MAX_KEYWORD_CHARS} characters",
    "boolean": "true or false",
}


def _check_vector(vector: Sequence[float] | None, collection: Collection) -> None:
    if vector is None:
        return
    if len(vector) != collection.dims:
        raise InvalidItem(
            f"the vector has {len(vector)} numbers, and this collection's have {collection.dims}",
            field="embedding",
            remedy=f"send {collection.dims} numbers from the collection's model, or leave `embedding` out",
        )


def _parse(model: type[T], raw: Any) -> T:
    if not isinstance(raw, Mapping):
        raise InvalidItem("an item is a JSON object", remedy='send {"id": …, "text": …}')
    try:
        return model.model_validate(raw)
    except ValidationError as cause:
        raise _explain(cause, model) from cause


def _explain(
    cause: ValidationError, model: type[DocumentFields] | None, *, default_field: str | None = None
) -> InvalidItem:
    """Return the first fault in our words; what the caller sent is not repeated."""
    faults = cause.errors(include_url=False)
    first = faults[0]
    place = (
        ".".join(str(part)[:80].encode("utf-8", "replace").decode() for part in first["loc"]) or default_field
    )
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted(model.model_fields)) if model else ""
        return InvalidItem(
            f"unknown field{more}", field=place, remedy=f"put it into `metadata`, or use one of: {known}"
        )
    if first["type"] == "missing":
        return InvalidItem(f"`{place}` is missing{more}", field=place, remedy=f"send `{place}`")
    detail, remedy = (_shortened(words) for words in explained(first))
    # Checks of ours often are whole sentences.
    if place is None and (named := re.search(r"`([a-z_]+)`", detail)):
        place = named[1]
    whole = first["type"] == "value_error" and not detail.startswith(("is ", "has ", "holds "))
    subject = "" if whole else f"`{place}` "
    return InvalidItem(f"{subject}{detail}{more}", field=place, remedy=remedy)


def _shortened(words: str) -> str:
    return words[:400].encode("utf-8", "replace").decode()
