"""What a refused value is told: its field and a remedy, in our words, for every field of every request."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from app import documents, refusals
from app.asking import Feedback, FeedbackItem, NextPage, Search, SearchBatch, Why
from app.collection import Collection, CollectionOptions, SynonymSet
from app.errors import InvalidRequest
from app.writing import (
    DeletedDocument,
    DeleteDocuments,
    Document,
    DocumentPatch,
    FileForm,
    PatchDocuments,
    Upsert,
)

WHOLE: dict[type[BaseModel], dict[str, Any]] = {
    Search: {"collection": "c", "query": "x"},
    Why: {"collection": "c", "query": "x", "id": "a"},
    SearchBatch: {"queries": ["x"]},
    NextPage: {"cursor": "x"},
    Feedback: {"search_id": "x", "items": [{}]},
    FeedbackItem: {"id": "x", "verdict": "clicked"},
    Document: {"id": "x", "text": "x"},
    DocumentPatch: {"id": "x", "lang": "en"},
    PatchDocuments: {"documents": [{}]},
    DeleteDocuments: {"ids": ["x"]},
    DeletedDocument: {"id": "x"},
    Upsert: {"documents": [{}]},
    FileForm: {},
    CollectionOptions: {},
    SynonymSet: {"synonyms_set": []},
}
"""The bodies that callers send, each with what it needs at least."""
JUNK: list[Any] = [
    None, True, -1, 0, 0.5, 10**30, 1e300, "", " ", "x" * 20_000, "180d", "..", "2026-02-30", [], [None], [[]], ["x"],
    [0] * 20_000, {}, {"x": 1}, {"": None},
]  # fmt: skip
RAW = re.compile(
    r"\b[Ii]nput|[Ss]hould|Value error|validat|\w_type\b(?<!document_type)|NoneType|unable to|[Pp]ython"
)
"""What only the validator's own words hold."""


def nested(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from nested(inner)


def is_list(annotation: Any) -> bool:
    return str(annotation).startswith(("list[", "typing.Annotated[list[")) or any(
        is_list(inner) for inner in get_args(annotation)
    )


def requests() -> Iterator[tuple[type[BaseModel], str, Any]]:
    """Yield a model, the path of one of its fields, one level of objects down, and a body with `junk` there."""
    for model, least in WHOLE.items():
        for name, info in model.model_fields.items():
            for junk in JUNK:
                yield model, name, {**least, name: junk}
            for inner in nested(info.annotation):
                for key, part in inner.model_fields.items():
                    for junk in JUNK:
                        value: Any = {part.alias or key: junk}
                        yield model, name, {**least, name: [value] if is_list(info.annotation) else value}


def refusal(check: Callable[..., Any], *given: Any) -> InvalidRequest | None:
    try:
        check(*given)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("model", WHOLE, ids=lambda model: model.__name__)
def test_every_refusal_names_the_field_and_the_remedy(model: type[BaseModel]) -> None:
    refused = 0
    for of, name, body in requests():
        if of is not model:
            continue
        error = refusal(refusals.parse, model, body)
        if error is None:
            continue
        refused += 1
        shown = f"{name}={str(body[name])[:80]}"
        for entry in error.members["errors"]:
            assert entry["field"], shown
            assert not RAW.search(entry["detail"] + entry["remedy"]), (shown, entry)
            assert entry["detail"].strip(), shown
            assert entry["remedy"].strip(), shown
            assert len(entry["detail"]) < 400, shown
    assert refused > 10


COLLECTION = Collection(
    name="c", index="i", dims=3, similarity="cosine", declared={"grade": "long"}, template_version=1
)


@pytest.mark.parametrize("name", Document.model_fields)
def test_every_refusal_of_an_item_does_too(name: str) -> None:
    for junk in JUNK:
        error = refusal(documents.check_document, {"id": "x", "text": "x", name: junk}, COLLECTION)
        if error is not None:
            assert error.field, junk
            assert error.remedy, junk
            assert not RAW.search(error.detail + error.remedy), (junk, error.detail)


@pytest.mark.parametrize(
    "options, field, detail, remedy",
    [
        ({"query": ""}, "query", "`query` is blank", "write words"),
        ({"top_k": 0}, "top_k", "must be at least 1", "write a number of at least 1"),
        ({"top_k": 10_001}, "top_k", "must be at most 10000", "of at most 10000"),
        ({"min_relevance": 1.5}, "min_relevance", "must be at most 1", "of at most 1"),
        ({"valid_time": "onyl"}, "valid_time", "must be 'only' or 'any'", "did you mean 'only'?"),
        ({"timeout_ms": 5}, "timeout_ms", "must be at least 50", "of at least 50"),
        ({"routes": []}, "routes", "is empty", "at least 1 member"),
        ({"decay": "180d"}, "decay", "is neither a decay, 'auto' nor 'off'", '{"half_life": "180d"}'),
        ({"decay": "of"}, "decay", "is neither a decay, 'auto' nor 'off'", "or 'auto' or 'off'"),
        ({"routes": [{"kind": "text", "decay": "30d"}]}, "routes[0].decay", "neither a decay nor 'off'", '{"half_life": "30d"}'),
        ({"routes": [{"kind": "text", "name": "A b"}]}, "routes[0].name", "does not fit the pattern", "small letter"),
    ],
    ids=str,
)  # fmt: skip
def test_the_remedy_is_one(options: dict[str, Any], field: str, detail: str, remedy: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refusals.parse(Search, {"collection": "c", "query": "x", **options})
    assert caught.value.field == field
    assert detail in caught.value.detail
    assert remedy in (caught.value.remedy or "")


DEEP: Any = 1
for _ in range(20):
    DEEP = {"x": DEEP}

ECHOED: dict[str, tuple[type[BaseModel], dict[str, Any], str, str]] = {
    "a name of our own": (
        CollectionOptions, {"declared": {"text": "long"}},
        "`declared.text` is taken by the documents' own fields or the filter language", "declare it under another name",
    ),
    "a field of hits": (
        Search, {"collection": "c", "query": "x", "fields": ["a: b"]}, "`fields` names 'a: b', which no hit has", "choose from title",
    ),
    "metadata nested too deep": (
        Document, {"id": "x", "text": "x", "metadata": {"a: b": DEEP}}, "metadata.a: b.x", "flatten it",
    ),
    "a key with NUL": (
        Document, {"id": "x", "text": "x", "metadata": {"a: b\0": 1}}, "a: b", "rename it",
    ),
    "a field of files": (FileForm, {"fields": {"a: b": 1}}, "`a: b` can't be given", "use the fields of a document"),
    "an instant": (
        Document, {"id": "x", "text": "x", "creation_time": "a: b: c"}, "'a: b: c' is not an instant", "write ISO 8601",
    ),
    "no such day": (
        Document, {"id": "x", "text": "x", "creation_time": "2026-02-30T08:00:00"}, "'2026-02-30T08:00:00' names no real", "write a day",
    ),
    "a duration": (
        Search, {"collection": "c", "query": "x", "decay": {"half_life": "a: b"}}, "'a: b' is not a duration", "write whole numbers",
    ),
    "a remedy with a colon": (
        Search, {"collection": "c", "query": "x", "decay": "off", "fold_superseded": True},
        "`fold_superseded` is set, but only decay 'auto' finds what is superseded", "ask for `decay`: 'auto', or drop it",
    ),
    "a whole number": (
        Document, {"id": "x", "text": "x", "revision": 2**62 + 1}, "must be at most 4611686018427387904",
        "write a number of at most 4611686018427387904",
    ),
    "a number": (
        Search, {"collection": "c", "query": "x", "fusion": {"rank_constant": 1e9}}, "must be at most 1000000",
        "write a number of at most 1000000",
    ),
    "braces": (
        Search, {"collection": "c", "query": "x", "fields": ["{remedy}{problem}"]}, "`fields` names '{remedy}{problem}'", "choose from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ECHOED)
def test_what_is_wrong_and_the_remedy_are_parted_where_we_part_them(name: str) -> None:
    model, body, detail, remedy = ECHOED[name]
    error = refusal(refusals.parse, model, body)
    assert error is not None
    [entry] = error.members["errors"]
    assert detail in entry["detail"]
    assert entry["remedy"].startswith(remedy)
    assert error.remedy == entry["remedy"]


@pytest.mark.parametrize("model, sent, told", [
    (Search, {"query": "x" * 20_000}, "query: has more than 10000 characters"),
    (Search, {"min_relevance": float("inf")}, "min_relevance: must be a finite number, not one that a double can't hold"),
    (Document, {"title": "x" * 3_000_000}, "title: has more than"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_the_right_words(
    model: type[BaseModel], sent: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        refusals.parse(model, WHOLE[model] | sent)
    assert told in refused.value.detail


def test_a_field_of_another_librarys_name_is_told_in_ours():
    with pytest.raises(InvalidRequest) as told:
        refusals.parse(Search, {"collection": "c", "query": "x", "decay": {"decay_rate": 0.01}})
    assert told.value.remedy == "did you mean `hourly_loss`?"


@pytest.mark.parametrize("field, example", refusals._OBJECTS.items())
def test_an_object_given_as_an_example_is_taken(field, example):
    value = json.loads(example)
    if field == "metadata":
        refusals.parse(Document, {"id": "a", "text": "x", field: value})
    else:
        body = {"collection": "c", "query": "x", field: [value] if field == "routes" else value}
        refusals.parse(Search, body)
