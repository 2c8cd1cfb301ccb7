"""The filter grammar: exact clauses, exact refusals, and the verdict on single documents.

That the cluster's verdict is the same is shown in test_filters_node.py.
"""

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import fields, filters
from app.collection import DeclaredType
from app.errors import InvalidRequest, LimitExceeded
from app.filters import (
    MAX_CONDITIONS,
    MAX_VALUE_UNITS,
    Compiler,
    clauses,
    compile_filter,
    explain_mismatch,
    matches,
    names_metadata,
    parse_filter,
)
from app.values import MAX_FILTER_DEPTH, MAX_FILTER_TERMS

DECLARED: dict[str, DeclaredType] = {
    "year": "long",
    "price": "double",
    "due": "date",
    "code": "keyword",
    "open": "boolean",
    "and": "long",
}
JAN_1, JAN_2 = 1735689600000, 1735776000000
"""2025-01-01 and 2025-01-02, midnight in UTC."""


def either(*options: dict[str, Any]) -> dict[str, Any]:
    return {"bool": {"should": list(options), "minimum_should_match": 1}}


def neither(option: dict[str, Any]) -> dict[str, Any]:
    return {"bool": {"must_not": [option]}}


def date_range(name: str, **bounds: int) -> dict[str, Any]:
    return {"range": {name: {**bounds, "format": "epoch_millis"}}}


# --- clauses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, expected",
    [
        pytest.param({}, [], id="empty"),
        # Reserved keywords: the field, or the metadata key of that name.
        pytest.param({"lang": "en"}, [either({"term": {"lang": "en"}}, {"term": {"metadata.lang": "en"}})], id="keyword"),
        pytest.param(
            {"lang": ["en", "zh", "en"]},
            [either({"terms": {"lang": ["en", "zh"]}}, {"terms": {"metadata.lang": ["en", "zh"]}})],
            id="keyword-list",
        ),
        pytest.param({"metadata.lang": "en"}, [{"term": {"metadata.lang": "en"}}], id="metadata-only"),
        pytest.param(
            {"author": {"exists": True}},
            [either({"exists": {"field": "author"}}, {"exists": {"field": "metadata.author"}})],
            id="keyword-exists",
        ),
        pytest.param({"id": ["a/b", "*"]}, [{"terms": {"document_id": ["a/b", "*"]}}], id="id"),
        pytest.param({"title": "Leave"}, [{"term": {"title.raw": "Leave"}}], id="title"),
        pytest.param({"salience": {"gte": 1, "lt": 2.5}}, [{"range": {"salience": {"gte": 1.0, "lt": 2.5}}}], id="double"),
        pytest.param({"salience": 3}, [{"term": {"salience": 3.0}}], id="double-equal"),
        pytest.param({"evergreen": True}, [{"term": {"evergreen": True}}], id="flag"),
        pytest.param({"evergreen": False}, [neither({"term": {"evergreen": True}})], id="flag-false-is-absent-too"),
        pytest.param({"evergreen": [True, False]}, [{"match_all": {}}], id="flag-both"),
        pytest.param({"evergreen": []}, [{"match_none": {}}], id="flag-none"),
        pytest.param({"evergreen": {"exists": False}}, [neither({"match_all": {}})], id="flag-exists"),
        # Undeclared metadata: text, numbers in both spellings.
        pytest.param({"tenant": "a"}, [{"term": {"metadata.tenant": "a"}}], id="text"),
        pytest.param({"tenant": {"in": ["a", "b"]}}, [{"terms": {"metadata.tenant": ["a", "b"]}}], id="in"),
        pytest.param({"tenant": []}, [{"match_none": {}}], id="member-of-nothing"),
        pytest.param({"page": 2}, [{"terms": {"metadata.page": ["2", "2.0"]}}], id="int"),
        pytest.param({"page": 2.0}, [{"terms": {"metadata.page": ["2.0", "2"]}}], id="float"),
        pytest.param({"page": 2.5}, [{"term": {"metadata.page": "2.5"}}], id="fraction"),
        pytest.param({"page": 0}, [{"terms": {"metadata.page": ["0", "0.0", "-0.0"]}}], id="zero"),
        pytest.param({"page": -0.0}, [{"terms": {"metadata.page": ["-0.0", "0", "0.0"]}}], id="minus-zero"),
        pytest.param({"page": 10**16}, [{"terms": {"metadata.page": ["10000000000000000", "1e+16"]}}], id="1e16"),
        pytest.param({"page": 2**53 + 1}, [{"term": {"metadata.page": "9007199254740993"}}], id="no-double-is-equal"),
        pytest.param({"page": 10**400}, [{"term": {"metadata.page": "1" + "0" * 400}}], id="beyond-double"),
        pytest.param({"page": "2"}, [{"term": {"metadata.page": "2"}}], id="digits"),
        pytest.param({"open_": True}, [{"term": {"metadata.open_": "true"}}], id="boolean-text"),
        pytest.param({"a.b.c": "x"}, [{"term": {"metadata.a.b.c": "x"}}], id="dotted"),
        pytest.param({"": 1}, [{"terms": {"metadata.": ["1", "1.0"]}}], id="empty-key"),
        pytest.param({"a": {"exists": True}}, [{"exists": {"field": "metadata.a"}}], id="exists"),
        pytest.param({"a": {"exists": False}}, [neither({"exists": {"field": "metadata.a"}})], id="exists-not"),
        pytest.param({"a*": {"exists": True}}, [{"prefix": {"metadata.a*": {"value": ""}}}], id="exists-no-pattern"),
        pytest.param({"a": {"ne": "x"}}, [neither({"term": {"metadata.a": "x"}})], id="ne"),
        pytest.param({"a": {"ne": ["x", "y"]}}, [neither({"terms": {"metadata.a": ["x", "y"]}})], id="ne-list"),
        pytest.param({"metadata.or": "y"}, [{"term": {"metadata.or": "y"}}], id="key-called-or"),
        pytest.param({"metadata.and": 1}, [{"term": {"declared.and": 1}}], id="declared-key-called-and"),
        pytest.param({"metadata.metadata.x": "y"}, [{"term": {"metadata.metadata.x": "y"}}], id="key-called-metadata"),
        # Declared.
        pytest.param({"year": 2024}, [{"term": {"declared.year": 2024}}], id="long"),
        pytest.param({"metadata.year": 2024.0}, [{"term": {"declared.year": 2024}}], id="long-as-float"),
        pytest.param({"year": {"gt": -(2**63), "lte": 2**63 - 1}}, [{"range": {"declared.year": {"gt": -(2**63), "lte": 2**63 - 1}}}], id="long-bounds"),
        pytest.param({"price": {"gt": 5}}, [{"range": {"declared.price": {"gt": 5.0}}}], id="declared-double"),
        pytest.param({"code": {"gte": "a", "lt": "b"}}, [{"range": {"declared.code": {"gte": "a", "lt": "b"}}}], id="declared-keyword-range"),
        pytest.param({"open": [True]}, [{"term": {"declared.open": True}}], id="declared-boolean"),
        pytest.param({"open": False}, [{"term": {"declared.open": False}}], id="declared-false-is-not-absent"),
        pytest.param({"year": {"ne": 1, "exists": True}}, [{"exists": {"field": "declared.year"}}, neither({"term": {"declared.year": 1}})], id="combined"),
        pytest.param({"year.x": 1}, [{"terms": {"metadata.year.x": ["1", "1.0"]}}], id="below-a-declared-key"),
        # Dates: whole milliseconds, a day alone is all of it.
        pytest.param({"creation_time": {"gte": "2025-01-01"}}, [date_range("creation_time", gte=JAN_1)], id="gte-day"),
        pytest.param({"creation_time": {"gt": "2025-01-01"}}, [date_range("creation_time", gte=JAN_2)], id="gt-day"),
        pytest.param({"creation_time": {"lte": "2025-01-01"}}, [date_range("creation_time", lt=JAN_2)], id="lte-day"),
        pytest.param({"creation_time": {"lt": "2025-01-01"}}, [date_range("creation_time", lt=JAN_1)], id="lt-day"),
        pytest.param({"creation_time": "2025-01-01"}, [date_range("creation_time", gte=JAN_1, lt=JAN_2)], id="equal-day"),
        pytest.param({"creation_time": {"gt": "2025-01-01T00:00Z"}}, [date_range("creation_time", gte=JAN_1 + 1)], id="gt-instant"),
        pytest.param({"creation_time": {"lte": "2025-01-01T08:00:00+08:00"}}, [date_range("creation_time", lt=JAN_1 + 1)], id="lte-instant-offset"),
        pytest.param({"updated_at": 1735689600}, [date_range("updated_at", gte=JAN_1, lt=JAN_1 + 1)], id="equal-seconds"),
        pytest.param({"due": JAN_1}, [date_range("declared.due", gte=JAN_1, lt=JAN_1 + 1)], id="declared-date-ms"),
        pytest.param({"due": {"gte": "1960-01-01", "lt": "9999-12-31"}}, [date_range("declared.due", gte=-315619200000, lt=253402214400000)], id="far"),
        pytest.param(
            {"due": ["2025-01-05", "2025-01-02", "2025-01-01"]},
            [either(date_range("declared.due", gte=JAN_1, lt=JAN_2 + 86400000), date_range("declared.due", gte=JAN_1 + 4 * 86400000, lt=JAN_1 + 5 * 86400000))],
            id="days-that-touch-are-joined",
        ),
        pytest.param({"creation_time": {"ne": "2025-01-01"}}, [neither(date_range("creation_time", gte=JAN_1, lt=JAN_2))], id="not-that-day"),
        # The two zeros of a double are one number here.
        pytest.param({"price": 0}, [{"range": {"declared.price": {"gte": -0.0, "lte": 0.0}}}], id="zero-equal"),
        pytest.param(
            {"price": [1, -0.0]},
            [either({"range": {"declared.price": {"gte": -0.0, "lte": 0.0}}}, {"term": {"declared.price": 1.0}})],
            id="zero-among-others",
        ),
        # Connectives.
        pytest.param({"and": [{"a": "1"}, {"b": "2", "c": "3"}]}, [{"term": {"metadata.a": "1"}}, {"term": {"metadata.b": "2"}}, {"term": {"metadata.c": "3"}}], id="and"),
        pytest.param({"or": [{"a": "1"}]}, [{"term": {"metadata.a": "1"}}], id="or-of-one"),
        pytest.param(
            {"or": [{"a": "1"}, {"b": "2", "c": "3"}]},
            [either({"term": {"metadata.a": "1"}}, {"bool": {"filter": [{"term": {"metadata.b": "2"}}, {"term": {"metadata.c": "3"}}]}})],
            id="or",
        ),
        pytest.param(
            {"not": {"a": "1", "b": "2"}},
            [neither({"bool": {"filter": [{"term": {"metadata.a": "1"}}, {"term": {"metadata.b": "2"}}]}})],
            id="not",
        ),
        pytest.param({"not": {"not": {"a": "1"}}}, [neither(neither({"term": {"metadata.a": "1"}}))], id="not-not"),
    ],
)  # fmt: skip
def test_clauses(value: dict[str, Any], expected: list[dict[str, Any]]):
    assert compile_filter(value, declared=DECLARED) == expected


@pytest.mark.parametrize("operator, text", [("gte", "-0.0"), ("lt", "-0.0"), ("gt", "0.0"), ("lte", "0.0")])
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_zero_bounds_take_both_zeros_to_the_same_side(operator: str, text: str, zero: float):
    [clause] = compile_filter({"salience": {operator: zero}}, declared={})

    assert json.dumps(clause) == f'{{"range": {{"salience": {{"{operator}": {text}}}}}}}'


def test_every_reserved_name_has_its_field():
    for name, kind in fields.RESERVED.items():
        value = {"keyword": "x", "date": "2025-01-01", "boolean": True, "double": 1.0, "long": 1}[kind]
        text = json.dumps(compile_filter({name: value}, declared={}))
        assert f'"{fields.indexed_name(name)}"' in text


# --- refusals --------------------------------------------------------------------------------------------------------


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {"a": "x"}
    for _ in range(levels - 1):
        value = {"not": value}
    return value


@pytest.mark.parametrize(
    "value, path, words",
    [
        pytest.param([], "filter", "must be an object, not a list", id="list"),
        pytest.param("lang:en", "filter", "must be an object, not text", id="text"),
        pytest.param(None, "filter", "must be an object, not null", id="null-filter"),
        pytest.param({1: 2}, "filter", "key that is not text", id="key"),
        pytest.param({"a": None}, "filter.a", "is null", id="null"),
        pytest.param({"a": ["x", None]}, "filter.a[1]", "is null", id="null-in-list"),
        pytest.param({"a": {"ne": None}}, "filter.a.ne", "is null", id="ne-null"),
        pytest.param({"a": {"in": None}}, "filter.a.in", "takes a list, not null", id="in-null"),
        pytest.param({"a": {"in": "x"}}, "filter.a.in", "takes a list, not text", id="in-scalar"),
        pytest.param({"year": {"gte": None}}, "filter.year.gte", "is null", id="bound-null"),
        pytest.param({"a": {}}, "filter.a", "without operators", id="no-operator"),
        pytest.param({"a": {"term": {"b": 1}}}, "filter.a", "unknown operators: term", id="dsl"),
        pytest.param({"a": {"gte": 1, "$where": "x", "eq": 2}}, "filter.a", "unknown operators: $where, eq", id="several"),
        pytest.param({"bool": {"must": []}}, "filter.bool", "unknown operators: must", id="dsl-on-top"),
        pytest.param({"script": {"source": "…"}}, "filter.script", "unknown operators: source", id="script"),
        pytest.param({"a": [["x"]]}, "filter.a[0]", "not a list", id="list-in-list"),
        pytest.param({"a": [{"gte": 1}]}, "filter.a[0]", "not an object", id="object-in-list"),
        pytest.param({"year": {"gte": [1]}}, "filter.year.gte", "must be one value", id="list-bound"),
        pytest.param({"a": {"ne": {"x": 1}}}, "filter.a.ne", "not an object", id="ne-object"),
        pytest.param({"a": {"ne": []}}, "filter.a.ne", "excludes nothing", id="ne-empty"),
        pytest.param({"a": {"exists": "true"}}, "filter.a.exists", "is true or false, not text", id="exists-text"),
        pytest.param({"a": {"exists": None}}, "filter.a.exists", "is true or false, not null", id="exists-null"),
        pytest.param({"a": {"exists": False, "ne": "x"}}, "filter.a", "`exists`: false beside `ne`", id="exists-contradicts"),
        pytest.param({"year": {"gt": 1, "gte": 1}}, "filter.year", "both `gt` and `gte`", id="gt-gte"),
        pytest.param({"year": {"lt": 1, "lte": 1}}, "filter.year", "both `lt` and `lte`", id="lt-lte"),
        pytest.param({"year": {"gte": 2, "lte": 1}}, "filter.year", "range that holds nothing", id="upside-down"),
        pytest.param({"year": {"gte": 2, "lt": 2}}, "filter.year", "range that holds nothing", id="nothing-between"),
        pytest.param({"creation_time": {"gt": "2025-01-01", "lt": "2025-01-02"}}, "filter.creation_time", "holds nothing", id="no-time-between"),
        pytest.param({"and": {"a": 1}}, "filter.and", "takes a list of filters, not an object", id="and-object"),
        pytest.param({"or": []}, "filter.or", "is an empty list", id="or-empty"),
        pytest.param({"and": [{"a": 1}, "x"]}, "filter.and[1]", "must be an object, not text", id="and-text"),
        pytest.param({"and": [{"a": 1}, {}]}, "filter.and[1]", "is empty", id="and-empty-object"),
        pytest.param({"not": {}}, "filter.not", "is empty", id="not-empty"),
        pytest.param({"not": [{"a": 1}]}, "filter.not", "takes one filter, not a list", id="not-list"),
        pytest.param({"and": [{"a": 1}, {"creation_time": {"gte": "soon"}}]}, "filter.and[1].creation_time.gte", "is not a date", id="exact-path"),
        pytest.param({"or": [{"not": {"due": {"in": ["2025-01-01", "x"]}}}]}, "filter.or[0].not.due.in[1]", "is not a date", id="exact-path-in"),
        # Types are not guessed.
        pytest.param({"lang": 5}, "filter.lang", "compares text, not a number", id="number-for-keyword"),
        pytest.param({"id": True}, "filter.id", "compares text, not a boolean", id="boolean-for-keyword"),
        pytest.param({"code": 5}, "filter.code", "compares text, not a number", id="number-for-declared-keyword"),
        pytest.param({"evergreen": "true"}, "filter.evergreen", "is true or false, not text", id="text-for-boolean"),
        pytest.param({"open": 1}, "filter.open", "is true or false, not a number", id="number-for-boolean"),
        pytest.param({"salience": "1"}, "filter.salience", "compares numbers, not text", id="text-for-double"),
        pytest.param({"year": True}, "filter.year", "compares numbers, not a boolean", id="boolean-for-long"),
        pytest.param({"year": 2024.5}, "filter.year", "is not a whole number", id="fraction-for-long"),
        pytest.param({"year": 2**63}, "filter.year", "64 bits", id="large-for-long"),
        pytest.param({"price": 10**400}, "filter.price", "not a finite number", id="large-for-double"),
        pytest.param({"price": float("inf")}, "filter.price", "not a finite number", id="inf"),
        pytest.param({"year": float("nan")}, "filter.year", "is not a whole number", id="nan-for-long"),
        pytest.param({"a": float("nan")}, "filter.a", "not a finite number", id="nan-undeclared"),
        pytest.param({"a": 1 << 5000}, "filter.a", "too large a number", id="huge-int"),
        pytest.param({"creation_time": 86400000}, "filter.creation_time", "ambiguous", id="ambiguous-number"),
        pytest.param({"creation_time": "20240101"}, "filter.creation_time", "is not a date", id="compact-date"),
        pytest.param({"creation_time": True}, "filter.creation_time", "is not a date", id="boolean-for-date"),
        pytest.param({"creation_time": {"lt": 10**400}}, "filter.creation_time.lt", "is not a date", id="huge-date"),
        # Ranges need an order.
        pytest.param({"page": {"gte": 5}}, "filter.page.gte", "type is unknown", id="range-undeclared"),
        pytest.param({"a.b": {"lt": 5}}, "filter.a.b.lt", "type is unknown", id="range-nested"),
        pytest.param({"lang": {"gt": "a"}}, "filter.lang.gt", "names without an order", id="range-keyword"),
        pytest.param({"id": {"lte": "a"}}, "filter.id.lte", "names without an order", id="range-id"),
        pytest.param({"open": {"lt": True}}, "filter.open.lt", "range on a boolean", id="range-boolean"),
        # Another language's words.
        pytest.param({"$and": []}, "filter.$and", "no connective", id="dollar-and"),
        pytest.param({"$or": [{"lang": "en"}]}, "filter.$or", "no connective", id="dollar-or"),
        pytest.param({"NOT": {"lang": "en"}}, "filter.NOT", "no connective", id="capital-not"),
        pytest.param({"lang": {"$gte": 1}}, "filter.lang", "unknown operators", id="dollar-operator"),
        # What can't be in an index.
        pytest.param({"metadata": {"a": 1}}, "filter.metadata", "names no metadata key", id="metadata-object"),
        pytest.param({"metadata": "x"}, "filter.metadata", "names no metadata key", id="metadata-value"),
        pytest.param({"a": "x" * 4097}, "filter.a", "longer than 4096", id="long-text"),
        pytest.param({"a": "😀" * 2049}, "filter.a", "longer than 4096", id="long-in-utf16"),
        pytest.param({"a\0b": 1}, "filter.a\0b", "holds NUL", id="nul"),
        pytest.param({"a": "\ud800"}, "filter.a", "lone surrogate", id="surrogate"),
        pytest.param({"\ud800": "a"}, "filter.\\ud800", "lone surrogate", id="surrogate-key"),
        pytest.param({"creation_time": "\ud800"}, "filter.creation_time", "lone surrogate", id="surrogate-date"),
        # Limits.
        pytest.param(nested(MAX_FILTER_DEPTH + 1), "filter" + ".not" * MAX_FILTER_DEPTH, "deeper than 8", id="deep"),
        pytest.param({"a": ["x"] * (MAX_FILTER_TERMS + 1)}, "filter.a", "at most 4096 values", id="many-values"),
        pytest.param({"a": ["x"] * 4096, "b": "y"}, "filter.b", "at most 4096 values", id="many-values-in-all"),
        pytest.param({"or": [{"a": "x"}] * (MAX_CONDITIONS + 1)}, "filter.or[256].a", "at most 256 conditions", id="many-conditions"),
        pytest.param({"lang": {"ne": "x"}, "and": [{"tags": "x"}] * 128}, "filter.and[127].tags", "at most 256 conditions", id="two-fields-each"),
        pytest.param({"due": [f"{year}-01-01" for year in range(1000, 1300)]}, "filter.due", "at most 256 conditions", id="many-days"),
    ],
)  # fmt: skip
def test_refusals(value: Any, path: str, words: str):
    with pytest.raises(InvalidRequest) as caught:
        compile_filter(value, declared=DECLARED)
    error = caught.value
    assert error.field == path
    assert words in error.detail
    assert f"`{path}`" in error.detail
    assert error.remedy
    over = ("deeper than", "at most", "longer than")
    assert isinstance(error, LimitExceeded) is any(limit in error.detail for limit in over)
    json.dumps(error.problem(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "value, meant",
    [({"$and": []}, "and"), ({"Or": [{"a": 1}]}, "or"), ({"lang": {"$in": ["a"]}}, "in")],
    ids=str,
)
def test_a_word_of_another_language_is_answered_with_ours(value: Any, meant: str):
    error = refusal(value)
    assert error is not None
    assert (error.remedy or "").startswith(f"did you mean `{meant}`?")


def test_metadata_may_be_called_like_an_operator():
    assert compile_filter({"$and": "a"}, declared={}) == compile_filter({"metadata.$and": "a"}, declared={})


@pytest.mark.parametrize(
    "value",
    [
        nested(MAX_FILTER_DEPTH),
        {"a": ["x"] * MAX_FILTER_TERMS},
        {"or": [{"a": "x"}] * MAX_CONDITIONS},
        {"a": "x" * MAX_VALUE_UNITS},
        {"a": "😀" * 2048},
        # Days that touch are one condition, however many.
        {"due": [f"2025-{month:02}-{day:02}" for month in range(1, 13) for day in range(1, 29)]},
    ],
    ids=["deep", "many-values", "many-conditions", "long", "long-in-utf16", "many-days"],
)
def test_limits_are_inclusive(value: dict[str, Any]):
    assert compile_filter(value, declared=DECLARED)


def test_a_number_of_more_digits_than_python_writes_is_refused_like_any_other():
    with pytest.raises(InvalidRequest, match=r"`filter\.lang` compares text, not a number"):
        compile_filter({"lang": 2**20_000}, declared=DECLARED)


def test_the_path_starts_where_the_filter_stands():
    with pytest.raises(InvalidRequest, match=r"`routes\[2\].filter.a`") as caught:
        compile_filter({"a": None}, declared={}, path="routes[2].filter")
    assert caught.value.field == "routes[2].filter.a"


@pytest.mark.parametrize(
    "value, remedy",
    [
        ({"a": None}, "{'exists': false}"),
        ({"created_at": {"gte": "2025-01-01"}}, "did you mean `creation_time`?"),
        ({"page": {"gte": 5}}, "halflife reindex COLLECTION --declare KEY=TYPE"),
        ({"page": {"gte": 5}}, "declare 'page' for the collection"),
        ({"metadata.page": {"gte": 5}}, "declare 'page' for the collection"),
        ({"metadata.lang": {"gte": "a"}}, "metadata key of its own"),
        ({"a.b": {"gte": 5}}, "top-level metadata key"),
        ({"lang": 5}, 'write it as text: "5"'),
        ({"lang": True}, 'write it as text: "true"'),
        ({"metadata": {"a": 1}}, "'metadata.<key>'"),
        ({"a": {"b": 1}}, "written with dots ('a.b')"),
    ],
)
def test_remedies(value: dict[str, Any], remedy: str):
    with pytest.raises(InvalidRequest) as caught:
        compile_filter(value, declared={})
    assert remedy in (caught.value.remedy or "")


# --- on one document -----------------------------------------------------------------------------------------------

ALICE = {
    "document_id": "a1",
    "title": "Leave",
    "creation_time": "2025-01-01T10:00:00.500Z",
    "lang": "en",
    "tags": ["draft", "hr"],
    "salience": 0.0,
    "metadata": {
        "author": "Alice Wonderland",
        "page": 2,
        "ratio": 0.5,
        "signed": True,
        "year": 2024,
        "nested": {"key": ["x", {"deep": "y"}], "dotted.key": 7},
        "nothing": None,
        "long": "z" * 4097,
        "": "unnamed",
        "due": ["2025-02-01", "2025-03-01"],
    },
    "declared": {
        "year": 2024,
        "price": -0.0,
        "due": ["2025-02-01T00:00:00.000Z", "2025-03-01T00:00:00.000Z"],
        "code": ["b"],
        "open": False,
    },
}


@pytest.mark.parametrize(
    "value, expected",
    [
        ({}, True),
        ({"id": "a1"}, True),
        ({"id": ["a2"]}, False),
        ({"title": "Leave"}, True),
        ({"title": "leave"}, False),
        ({"lang": "en"}, True),
        ({"metadata.lang": "en"}, False),
        ({"author": "Alice Wonderland"}, True),
        ({"author": "alice wonderland"}, False),
        ({"author": ["Alice Wonderland", "Bob"]}, True),
        ({"metadata.author": {"exists": True}}, True),
        ({"tags": "hr"}, True),
        ({"tags": {"ne": "hr"}}, False),
        ({"tags": {"ne": "x"}}, True),
        ({"region": {"ne": "x"}}, True),
        ({"region": {"exists": False}}, True),
        ({"page": 2}, True),
        ({"page": 2.0}, True),
        ({"page": "2"}, True),
        ({"page": 2.5}, False),
        ({"ratio": 0.5}, True),
        ({"signed": True}, True),
        ({"signed": "true"}, True),
        ({"signed": 1}, False),
        ({"nested.key": "x"}, True),
        ({"nested.key.deep": "y"}, True),
        ({"nested.dotted.key": 7}, True),
        ({"nested": {"exists": True}}, False),
        ({"nested.key": {"exists": True}}, True),
        ({"nothing": {"exists": False}}, True),
        ({"long": {"exists": True}}, False),
        ({"": "unnamed"}, True),
        ({"evergreen": False}, True),
        ({"evergreen": True}, False),
        ({"evergreen": {"ne": True}}, True),
        ({"evergreen": {"exists": True}}, True),
        ({"creation_time": "2025-01-01"}, True),
        ({"creation_time": {"lte": "2025-01-01"}}, True),
        ({"creation_time": {"gt": "2025-01-01"}}, False),
        ({"creation_time": {"lt": "2025-01-01T10:00:00.500Z"}}, False),
        ({"creation_time": {"lte": "2025-01-01T10:00:00.500Z"}}, True),
        ({"creation_time": {"gt": "2025-01-01T10:00:00.499Z"}}, True),
        ({"updated_at": {"lt": "2030-01-01"}}, False),
        ({"updated_at": {"ne": "2030-01-01"}}, True),
        ({"year": {"gte": 2024, "lt": 2025}}, True),
        ({"year": {"gt": 2024}}, False),
        ({"price": 0}, True),
        ({"price": {"gte": 0}}, True),
        ({"price": {"lt": 0}}, False),
        ({"salience": {"gte": -0.0, "lte": -0.0}}, True),
        ({"code": {"gte": "a", "lt": "c"}}, True),
        ({"code": {"gt": "b"}}, False),
        ({"open": False}, True),
        ({"open": True}, False),
        # One value must fit both bounds: no single date of two lies between them.
        ({"due": {"gt": "2025-02-01", "lt": "2025-03-01"}}, False),
        ({"and": [{"due": {"gt": "2025-02-01"}}, {"due": {"lt": "2025-03-01"}}]}, True),
        ({"due": ["2025-03-01", "2020-01-01"]}, True),
        ({"or": [{"lang": "zh"}, {"tags": "hr"}]}, True),
        ({"or": [{"lang": "zh"}, {"tags": "x"}]}, False),
        ({"not": {"lang": "en", "tags": "x"}}, True),
        ({"not": {"lang": "en", "tags": "hr"}}, False),
        ({"lang": []}, False),
    ],
)
def test_matches(value: dict[str, Any], expected: bool):
    assert matches(ALICE, value, declared=DECLARED) is expected
    assert (explain_mismatch(ALICE, value, declared=DECLARED) == []) is expected


@pytest.mark.parametrize(
    "value, expected",
    [
        ({"lang": "en"}, []),
        ({"lang": "zh", "tags": "hr"}, ['`filter.lang`: the document has lang "en", which is not what is asked for']),
        ({"region": "eu"}, ["`filter.region`: the document has no region, which is not what is asked for"]),
        (
            {"and": [{"tags": {"ne": "hr"}}, {"page": 3}]},
            [
                '`filter.and[0].tags.ne`: the document has tags "draft", "hr", which is excluded',
                '`filter.and[1].page`: the document has page "2", which is not what is asked for',
            ],
        ),
        (
            {"creation_time": {"gt": "2025-01-01"}},
            ["`filter.creation_time`: the document has creation_time 2025-01-01T10:00:00.500Z, which is not within gte 2025-01-02T00:00:00.000Z"],
        ),
        ({"year": {"gte": 2025, "lt": 2030}}, ["`filter.year`: the document has year 2024, which is not within gte 2025, lt 2030"]),
        ({"tags": {"exists": False}}, ['`filter.tags.exists`: the document has tags "draft", "hr", and none may be there']),
        ({"url": {"exists": True}}, ["`filter.url.exists`: the document has no url"]),
        ({"not": {"lang": "en", "title": "Leave"}}, ["`filter.not`: the document meets what is excluded"]),
        (
            {"or": [{"lang": "zh"}, {"url": "x"}]},
            ['`filter.or`: none of its 2 filters holds (`filter.or[0].lang`: the document has lang "en", which is not what is asked for; `filter.or[1].url`: the document has no url, which is not what is asked for)'],
        ),
    ],
)  # fmt: skip
def test_explain_mismatch(value: dict[str, Any], expected: list[str]):
    assert explain_mismatch(ALICE, value, declared=DECLARED) == expected


def test_a_document_without_anything():
    assert matches({}, {"page": {"ne": 1}, "evergreen": False}, declared={})
    assert not matches({}, {"page": 1}, declared={})
    assert not matches({"metadata": None, "declared": None}, {"year": 1}, declared=DECLARED)


# --- laws --------------------------------------------------------------------------------------------------------------

ANY_KEYS = st.sampled_from(["lang", "tags", "id", "title", "page", "nested.key", "year", "price", "due", "code", "open", "evergreen",
                            "creation_time", "salience", "metadata.author", "author", "", "a*"]) | st.text(max_size=5)  # fmt: skip
ANY_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["en", "hr", "x", 2, 2024, 0.5, -0.0, "2025-01-01", "2025-02-01T00:00:00Z", 1735689600, "Leave", "a1"]
    ),
)
OPERATOR_NAMES = st.sampled_from(["gt", "gte", "lt", "lte", "in", "ne", "exists", "term"])
TESTS = (
    ANY_VALUES
    | st.lists(ANY_VALUES, max_size=3)
    | st.dictionaries(OPERATOR_NAMES, ANY_VALUES | st.lists(ANY_VALUES, max_size=3), max_size=3)
)
FILTERS = st.recursive(
    st.dictionaries(ANY_KEYS, TESTS, max_size=3),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"and": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"or": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"not": inner}),
        st.dictionaries(st.sampled_from(["and", "or", "not", "lang"]), inner | st.lists(inner, max_size=2), max_size=2),
    ),
    max_leaves=6,
)  # fmt: skip


def refusal(value: Any) -> InvalidRequest | None:
    try:
        compile_filter(value, declared=DECLARED)
    except InvalidRequest as error:
        return error
    return None


@given(FILTERS)
def test_any_filter_compiles_or_is_refused(value: dict[str, Any]):
    error = refusal(value)
    if error is not None:
        assert (error.field or "").startswith("filter")
        assert error.remedy
        json.dumps(error.problem(), ensure_ascii=False, allow_nan=False).encode()
        return
    clauses = compile_filter(value, declared=DECLARED)
    assert bool(clauses) == bool(value)
    json.dumps(clauses, allow_nan=False).encode()
    found = matches(ALICE, value, declared=DECLARED)
    assert (explain_mismatch(ALICE, value, declared=DECLARED) == []) == found


SCALARS = st.sampled_from([
    {"lang": "en"}, {"lang": ["zh", "en"]}, {"tags": {"ne": "hr"}}, {"page": 2}, {"page": {"exists": True}}, {"year": {"gte": 2000}},
    {"creation_time": {"lt": "2025-01-01"}}, {"nothing": "x"}, {"evergreen": True}, {"price": 0}, {"due": "2025-02-01"},
])  # fmt: skip
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "lang": st.sampled_from(["en", "zh"]),
        "tags": st.lists(st.sampled_from(["hr", "x"]), max_size=2),
        "creation_time": st.sampled_from(["2024-12-31T23:59:59.999Z", "2025-01-01T00:00:00.000Z"]),
        "evergreen": st.booleans(),
        "metadata": st.fixed_dictionaries(
            {}, optional={"page": st.sampled_from([1, 2, 2.0, "2", [2, 3], None])}
        ),
        "declared": st.fixed_dictionaries(
            {}, optional={"year": st.sampled_from([1999, 2000]), "price": st.just(0.0)}
        ),
    },
)


@given(DOCUMENTS, st.lists(SCALARS, min_size=1, max_size=4))
def test_and_or_not_obey_logic(document: dict[str, Any], parts: list[dict[str, Any]]):
    def verdict(value: dict[str, Any]) -> bool:
        return matches(document, value, declared=DECLARED)

    each = [verdict(part) for part in parts]
    assert verdict({"and": parts}) == all(each)
    assert verdict({"or": parts}) == any(each)
    assert verdict({"not": {"or": parts}}) == verdict({"and": [{"not": part} for part in parts]})
    for part in parts:
        assert verdict({"not": {"not": part}}) == verdict(part)


@given(
    DOCUMENTS,
    st.sampled_from(
        [("lang", "en"), ("tags", "hr"), ("page", 2), ("year", 2000), ("price", 0), ("evergreen", True)]
    ),
)
def test_operators_agree_with_each_other(document: dict[str, Any], test: tuple[str, Any]):
    name, value = test

    def verdict(inner: Any) -> bool:
        return matches(document, {name: inner}, declared=DECLARED)

    assert verdict({"ne": value}) == (not verdict(value))
    assert verdict([value]) == verdict({"in": [value]}) == verdict(value)
    assert verdict({"exists": False}) == (not verdict({"exists": True}))
    assert not verdict(value) or verdict({"exists": True})
    if name in ("year", "price"):
        assert verdict({"gte": value, "lte": value}) == verdict(value)


# --- what a filter may cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"a": {"in": [f"{at:04}{'x' * 92}" for at in range(4_096)]}},
        {"a": {"ne": [f"{at:04}{'語' * 30}" for at in range(4_096)]}},
        {"or": [{f"{at}{'k' * 3_000}": 1} for at in range(100)]},
        {"a": [10**1_000 + at for at in range(300)]},
        {"level": {"gte": "x" * 4_000}, "or": [{"level": {"lt": "x" * 4_000}} for _ in range(70)]},
    ],
    ids=["values", "wide values", "names", "numbers", "bounds"],
)
def test_a_filter_is_bounded_in_bytes(given):
    with pytest.raises(LimitExceeded, match="at most 256 KiB") as refused:
        parse_filter(given, declared={"level": "keyword"})
    assert refused.value.field
    assert refused.value.remedy
    with pytest.raises(LimitExceeded):
        parse_filter(given, declared={}, ranges_anywhere=True)


def test_a_filter_of_many_usual_values_is_within_the_bound():
    assert clauses(parse_filter({"id": [str(uuid.uuid4()) for _ in range(MAX_FILTER_TERMS)]}, declared={}))


def test_a_filter_that_a_batch_shares_is_compiled_once():
    declared: dict[str, DeclaredType] = {}
    compiler, given = Compiler(), {"a": ["x", "y"]}
    first = compiler(given, declared=declared)
    assert first == compile_filter(given, declared=declared)
    second = compiler(given, declared=declared)
    assert second[0] is first[0]
    second.append({"match_all": {}})
    assert compiler(given, declared=declared) == first
    # Equal is not the same: true and 1 are.
    assert compiler({"a": 1}, declared=declared) != compiler({"a": True}, declared=declared)
    # The same object, where other keys are declared.
    assert compiler(given, declared={"a": "keyword"}) == compile_filter(given, declared={"a": "keyword"})


class Compared(str):
    """Text that counts how often it is compared."""

    __slots__ = ()
    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def alternatives(leaf: dict[str, Any], deep: int) -> dict[str, Any]:
    for _ in range(deep):
        leaf = {"or": [leaf]}
    return leaf


def test_many_values_against_many_others_are_explained_without_comparing_each_with_each(monkeypatch):
    source = {"metadata": {"k": [Compared(f"v{at}") for at in range(2_000)]}}
    looked_up: list[str] = []
    written = filters._written

    def counted(metadata: Any, path: str) -> Any:
        looked_up.append(path)
        return written(metadata, path)

    monkeypatch.setattr(filters, "_written", counted)
    wanted = {"k": {"in": [f"w{at}" for at in range(MAX_FILTER_TERMS)]}}
    before = Compared.times
    [told] = explain_mismatch(source, alternatives(wanted, MAX_FILTER_DEPTH - 1), declared={})
    assert "and 1995 more, which is not what is asked for" in told
    # Hashes that differ are not compared, but for a few whose places in the table are the same.
    assert Compared.times - before < 2_000
    assert looked_up == ["k"]


def test_many_ranges_look_at_few_of_many_values():
    source = {"declared": {"year": list(range(0, 20_000, 2))}}
    for operators, found in (
        ({"gt": 3, "lt": 5}, True),
        ({"gt": 4, "lt": 6}, False),
        ({"gte": 4, "lt": 6}, True),
        ({"gt": 2, "lte": 4}, True),
        ({"gte": 19_998}, True),
        ({"gt": 19_998}, False),
        ({"lt": 0}, False),
        ({"lte": 0}, True),
    ):
        assert matches(source, {"year": operators}, declared={"year": "long"}) is found, operators
        assert bool(explain_mismatch(source, {"year": operators}, declared={"year": "long"})) is not found


@pytest.mark.parametrize(
    "given, names",
    [
        ({"k": "v"}, True),
        ({"year": {"gte": 3}}, True),
        ({"k": {"exists": True}}, True),
        ({"k*": {"exists": True}}, True),
        ({"or": [{"id": "x"}, {"not": {"and": [{"id": "y"}, {"k": {"ne": "v"}}]}}]}, True),
        ({"lang": "en"}, True),
        ({"id": ["metadata.k", "declared.k"]}, False),
        ({"title": "metadata.k", "creation_time": {"gte": "2026-01-31"}, "not": {"evergreen": True}}, False),
        ({}, False),
    ],
)
def test_what_looks_at_metadata_is_known(given, names):
    assert names_metadata(compile_filter(given, declared=DECLARED)) is names
