"""The published schema: valid by JSON Schema's own letter, and as exact as the checks behind it."""

from typing import Any

import jsonschema
import pytest

from app.filters import INNER
from app.main import create_app
from app.settings import Settings

DOCUMENT = create_app(Settings()).openapi()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def fits(name: str, value: Any) -> bool:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_is_a_schema(name: str):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    "name", ["SearchResult", "Hit", "RouteHit", "RouteStatus", "ItemResult", "FileItemResult"]
)
def test_answers_that_leave_empty_fields_out_are_described_by_their_fields(name: str):
    assert SCHEMAS[name]["properties"]
    assert SCHEMAS[name]["additionalProperties"] is False


@pytest.mark.parametrize(
    "value, expected",
    [
        ("2026-01-31", True),
        ("2026-01-31T08:00:00.5+02:00", True),
        (1_767_225_600, True),
        (1_767_225_600_000, True),
        ("2026-13-01", False),
        ("2026-01-31T25:00:00Z", False),
        ("yesterday", False),
        (5, False),
    ],
)
def test_an_instant_in_the_schema_is_what_is_taken(value: Any, expected: bool):
    assert fits("Query", {"query": "x", "as_of": value}) is expected


@pytest.mark.parametrize(
    "value, expected",
    [
        ({"lang": "en", "creation_time": {"gte": "2025-01-01"}, "not": {"tags": "draft"}}, True),
        ({"or": [{"price": {"gt": 1}}, {"a.b": ["x", 1, True]}]}, True),
        ({"creation_time": "soon"}, False),
        ({"lang": 5}, False),
        ({"lang": {"gte": "a"}}, False),
        ({"n": {"gt": 1, "gte": 2}}, False),
        ({"n": {"script": "1"}}, False),
        ({"n": None}, False),
        ({"not": {}}, False),
        ({"and": []}, False),
        ({"chunks": "x"}, False),
        ({"chunks.text": "x"}, False),
        *[({name: "x"}, False) for name in INNER],
        *[({f"metadata.{name}": "x"}, True) for name in INNER],
        ({"n": {"exists": False}}, True),
        ({"n": {"exists": False, "ne": 1}}, False),
    ],
)
def test_a_filter_in_the_schema_is_what_is_taken(value: Any, expected: bool):
    assert fits("Filter", value) is expected
    assert fits("Search", {"collection": "handbook", "query": "x", "filter": value}) is expected


@pytest.mark.parametrize(
    "value, expected",
    [
        ({"collection": "c", "queries": ["x", {"query": "y", "top_k": 2}], "decay": "off"}, True),
        ({"queries": ["x"]}, False),
        ({"collection": "c", "query": "x", "queries": ["x"]}, False),
        ({"collection": "c", "queries": [{"collection": "d", "query": "x"}]}, False),
    ],
)
def test_a_batch_in_the_schema_is_what_is_taken(value: Any, expected: bool):
    assert fits("SearchBatch", value) is expected


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("Search", {"collection": "c", "query": "x", "top_k": 10_000}, True),
        ("Search", {"collection": "c", "query": "x", "top_k": 10.0}, True),
        ("Search", {"collection": "c", "query": "x", "top_k": 0}, False),
        ("Search", {"collection": "c", "query": "x", "top_k": 10_001}, False),
        ("Search", {"collection": "c", "query": "x", "fields": ["title", "tags"]}, True),
        ("Search", {"collection": "c", "query": "x", "fields": ["titel"]}, False),
        ("Search", {"collection": "c", "query": "x", "query_vector": [0.1, 0]}, True),
        ("Search", {"collection": "c", "query": "x", "query_vector": [0, 0]}, False),
        ("Search", {"collection": "c", "query": "x", "query_vector": []}, False),
        ("Search", {"collection": "c", "query": "x", "decay": {"floor": 0.1}}, False),
        ("Search", {"collection": "c", "query": "x", "rewrite": {"queries": 0}}, False),
        ("Document", {"id": "a", "title": "t"}, True),
        ("Document", {"id": "a", "title": " ", "text": "\n"}, False),
        ("Document", {"id": "a", "text": "t", "revision": 0}, False),
        ("DocumentPatch", {"id": "a", "evergreen": None}, True),
        ("DocumentPatch", {"id": "a", "if_version": 3}, False),
        ("DeleteDocuments", {"ids": ["a"], "filter": None, "delete_all": False}, True),
        ("DeleteDocuments", {"ids": ["a"], "delete_all": True}, False),
        ("DeleteDocuments", {"documents": [{"id": "a"}, {"id": "b", "if_version": 3}]}, True),
        ("DeleteDocuments", {"documents": [{"id": "a"}], "ids": ["a"]}, False),
        ("DeleteDocuments", {"filter": {}}, False),
        ("DeleteDocuments", {}, False),
        ("CollectionOptions", {"declared": {"price": "double"}}, True),
        ("CollectionOptions", {"declared": {"a.b": "double"}}, False),
        ("CollectionOptions", {"declared": {"chunks": "double"}}, False),
        ("CollectionOptions", {"shards": 65}, False),
        ("SynonymSet", {"synonyms_set": ["a, b", {"synonyms": "a => b"}]}, True),
        ("SynonymSet", {"synonyms_set": ["alone"]}, False),
    ],
)
def test_a_body_in_the_schema_is_what_is_taken(name: str, value: Any, expected: bool):
    assert fits(name, value) is expected


def test_refusals_are_declared_with_their_statuses():
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            declared = operation["responses"].keys()
            if path.startswith("/v1/"):
                assert {"401", "403", "422", "429", "502", "503", "default"} <= declared, (method, path)
            assert ("413" in declared) is ("requestBody" in operation)
            writes = operation["tags"][0] in ("documents", "collections") and method != "get"
            assert ("507" in declared) is (writes or path == "/v1/feedback"), (method, path)
            for status in declared - {"200", "204", "default"}:
                reference = operation["responses"][status].get("$ref", "")
                assert reference.endswith(f"/Problem{status}") or (path, status) == ("/readyz", "503")


def test_paths_take_the_names_that_bodies_take():
    [parameter] = DOCUMENT["paths"]["/v1/collections/{collection}"]["get"]["parameters"][:1]
    validator = jsonschema.Draft202012Validator(parameter["schema"])
    assert validator.is_valid("handbook")
    for name in ("Handbook", "", "a--b", "a-20260131000000", "a-w-1-a"):
        assert not validator.is_valid(name), name
