"""The published schema against the running API: what it describes and what it rules out is sent to a real node.

schemathesis makes the requests, valid ones and broken ones, the same in each run. No answer may be a 5xx; each has a
status, a content type, headers and a body that its operation declares; a body that the schema rules out is refused.
What JSON Schema can't say (the bytes of an id, fields that contradict each other) is refused with a 422 problem, which
is all that a valid request may get beside its answer. `HALFLIFE_TEST_CASES` multiplies the number of requests,
`HALFLIFE_TEST_SEED` chooses others.
"""

import copy
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, Response
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core import NotSet

from app.main import create_app
from app.settings import Settings
from tests.fakes import EmbeddingServer
from tests.service import serving, settings_for

pytestmark = [pytest.mark.node, pytest.mark.slow]
DIMS = 16
TIMES = int(os.environ.get("HALFLIFE_TEST_CASES", "1"))
SEED = os.environ.get("HALFLIFE_TEST_SEED")

CASES = {
    ("POST /v1/search", "Search"): (200, 70),
    ("POST /v1/search", "SearchBatch"): (50, 20),
    ("POST /v1/search", "NextPage"): (10, 10),
    ("POST /v1/why", "Why"): (80, 40),
    ("POST /v1/feedback", "Feedback"): (50, 50),
    ("POST /v1/collections/{collection}/documents", "Upsert"): (120, 120),
    ("PATCH /v1/collections/{collection}/documents", "PatchDocuments"): (100, 100),
    ("GET /v1/collections/{collection}/documents", ""): (80, 30),
    ("POST /v1/collections/{collection}/documents/delete", "DeleteDocuments"): (80, 60),
    ("POST /v1/collections/{collection}/files", ""): (40, 40),
    ("GET /v1/collections/{collection}/documents/{document_id}", ""): (60, 60),
    ("DELETE /v1/collections/{collection}/documents/{document_id}", ""): (60, 60),
    ("GET /v1/collections", ""): (20, 20),
    ("PUT /v1/collections/{collection}", "CollectionOptions"): (60, 50),
    ("GET /v1/collections/{collection}", ""): (30, 30),
    ("DELETE /v1/collections/{collection}", ""): (10, 20),
    ("PUT /v1/collections/{collection}/synonyms", "SynonymSet"): (40, 50),
    ("GET /v1/collections/{collection}/synonyms", ""): (30, 20),
    ("DELETE /v1/collections/{collection}/synonyms", ""): (20, 20),
    ("GET /livez", ""): (1, 0),
    ("GET /readyz", ""): (1, 0),
    ("GET /metrics", ""): (10, 0),
}
"""Operation and the body's schema -> valid requests and broken ones: 2,022 in all."""

MOST_QUERY_CHARS = 5_000
"""The server's parser refuses a head of 64 KB by itself; percent-encoded, a character takes up to 12 bytes."""

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)

load_all_checks()
CHECKED = [
    CHECKS.get_one(name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    )
]
REJECTED: list[Any] = [CHECKS.get_one("negative_data_rejection")]


@dataclass
class Sent:
    """The service, its schema, and what came back so far."""

    document: dict[str, Any]
    whole: Any
    client: httpx2.Client
    url: str
    collection: str
    spare: str


@pytest.fixture(scope="module")
def sent(node_url: str) -> Iterator[Sent]:
    with EmbeddingServer(dims=DIMS) as embedding:
        chosen = settings_for(
            node_url,
            embedding.base_url,
            dims=DIMS,
            request_timeout_s=60,
            auto_create_collections=False,
            search_log_rate=1.0,
        )
        with serving(chosen) as running:
            name = f"conformance_{uuid.uuid4().hex[:8]}"
            spare = f"{name}_spare"
            made = running.client.put(f"/v1/collections/{name}", json={"declared": {"price": "double"}})
            assert made.status_code == 200, made.text
            _store(running.client, name)
            document = running.client.get("/openapi.json").json()
            yield Sent(document, _loaded(document, running.url), running.client, running.url, name, spare)
            for each in (name, spare):
                running.client.delete(f"/v1/collections/{each}", params={"confirm": each})


def _store(client: httpx2.Client, collection: str) -> None:
    documents = [
        {"id": "0", "text": "zero", "creation_time": "2026-01-01", "lang": "en", "metadata": {"price": 3}},
        {"id": "leave-2026", "title": "Annual leave", "text": "Up to five days may be carried over."},
        {"id": "leave-policy-2023", "text": "年假结转", "lang": "zh", "evergreen": True},
    ]
    stored = client.post(
        f"/v1/collections/{collection}/documents", json={"documents": documents, "refresh": True}
    )
    assert stored.json()["failed"] == 0, stored.text


def _loaded(document: dict[str, Any], url: str) -> Any:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    return schema


def _flat(document: dict[str, Any], label: str, model: str) -> dict[str, Any]:
    """Return a copy to generate from: one form of body, filters that don't nest, instants out of a few.

    Filters have their own generated tests; here their nesting would take most of the time.
    """
    method, path = label.lower().split(" ", 1)
    made: dict[str, Any] = copy.deepcopy(document)
    made["paths"] = {path: {method: made["paths"][path][method]}}
    # Without keys, no key is asked for.
    made["paths"][path][method].pop("security", None)
    schemas = made["components"]["schemas"]
    grammar = schemas["Filter"]["properties"]
    for name in ("Filter", "NestedFilter"):
        schemas[name] = {
            "type": "object",
            "properties": {
                each: grammar[each] for each in ("lang", "creation_time", "evergreen", "salience")
            },
            "minProperties": 1 if name == "NestedFilter" else 0,
            "additionalProperties": False,
        }
    if model:
        body = made["paths"][path][method]["requestBody"]["content"]["application/json"]
        body["schema"] = {"$ref": f"#/components/schemas/{model}"}
        body.pop("examples")
    _few_instants(made["paths"], schemas)
    return made


def _few_instants(*nodes: Any) -> None:
    for node in nodes:
        if isinstance(node, list):
            _few_instants(*node)
        elif isinstance(node, dict):
            if "ISO 8601 (no offset" in str(node.get("description", "")):
                node.clear()
                node["enum"] = [
                    "2026-01-31T00:00:00Z",
                    "2025-06-30",
                    1_767_225_600,
                    "2024-02-29T12:30:00.5+08:00",
                ]
            _few_instants(*node.values())


def test_the_table_of_cases_names_every_operation():
    document = create_app(Settings()).openapi()
    named = {f"{method.upper()} {path}" for path, each in document["paths"].items() for method in each}
    assert named == {label for label, _ in CASES}
    assert sum(valid + broken for valid, broken in CASES.values()) >= 2_000


@pytest.mark.parametrize(
    "label, model, mode",
    [
        pytest.param(*each, mode, id=f"{' '.join(each).strip()}-{name}")
        for each, counts in CASES.items()
        for name, mode, count in zip(("valid", "broken"), MODES, counts, strict=True)
        if count
    ],
)
def test_answers_are_what_the_schema_says(sent: Sent, label: str, model: str, mode: GenerationMode):
    method, path = label.split(" ")
    whole = sent.whole[path][method]
    operation = _loaded(_flat(sent.document, label, model), sent.url)[path][method]
    declared = sent.document["paths"][path][method.lower()]
    validator = _validator(sent.document, declared)
    # What makes and deletes collections keeps to one that nothing else uses.
    makes = path == "/v1/collections/{collection}" and method != "GET"
    known = _known(sent, model, makes=makes)
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=CASES[label, model][MODES.index(mode)] * TIMES,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(mode), aimed=st.sampled_from([True, True, True, False]))
    def run(case: Case, aimed: bool) -> None:
        if aimed or makes:
            _aim(case, known)
        if len(str(case.query)) > MOST_QUERY_CHARS:
            return
        answer = case.call(timeout=60)
        if answer.status_code == 204:
            _make(sent)
        statuses[answer.status_code] += 1
        same = whole.Case(
            path_parameters=case.path_parameters, query=case.query, headers=case.headers, body=case.body,
            media_type=case.media_type,
        )  # fmt: skip
        same.validate_response(answer, checks=CHECKED)
        assert str(answer.status_code) in declared["responses"], answer.text
        if validator is not None and not isinstance(case.body, NotSet) and not _fits(validator, case.body):
            assert answer.status_code >= 400 or _told_per_item(answer), (case.as_curl_command(), answer.text)
        elif mode is GenerationMode.NEGATIVE and not (aimed or makes or model):
            case.validate_response(answer, checks=REJECTED)

    (run if SEED is None else seed(int(SEED))(run))()
    print(label, model, mode.value, dict(statuses))
    if mode is GenerationMode.POSITIVE:
        assert any(status < 300 for status in statuses), f"nothing was taken: {statuses}"


def _known(sent: Sent, model: str, *, makes: bool) -> dict[str, Any]:
    """Return values that are there, for the fields that would otherwise hit nothing."""
    known = {"collection": sent.spare if makes else sent.collection, "document_id": "leave-2026"}
    if makes:
        _make(sent)
    if model in ("NextPage", "Feedback"):
        body = {"collection": sent.collection, "query": "leave", "top_k": 1}
        found = sent.client.post("/v1/search", json=body).json()
        known |= {"cursor": found["cursor"], "search_id": found["search_id"]}
    return known


def _make(sent: Sent) -> None:
    made = sent.client.put(f"/v1/collections/{sent.spare}")
    assert made.status_code == 200, made.text


def _validator(document: dict[str, Any], operation: dict[str, Any]) -> Any:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return None
    return jsonschema_rs.Draft202012Validator({**content["schema"], "components": document["components"]})


def _fits(validator: Any, body: Any) -> bool:
    if isinstance(body, bytes):
        # A body that is broken as JSON already.
        try:
            body = json.loads(body)
        except ValueError:
            return False
    return bool(validator.is_valid(body))


def _aim(case: Case, known: dict[str, Any]) -> None:
    """Let a request reach what is there, and not run out of time: under load 50 ms are too few for any answer."""
    case.headers.pop("X-Halflife-Timeout-Ms", None)
    case.query.pop("cursor", None)
    body = case.body if isinstance(case.body, dict) else {}
    body.pop("timeout_ms", None)
    for place in (case.path_parameters, body):
        for name in place.keys() & known.keys():
            place[name] = known[name]
    if "confirm" in case.query:
        case.query["confirm"] = known["collection"]


def _told_per_item(answer: Response) -> bool:
    """Tell whether an answer of 200 refuses items one by one, as bulks and batches do."""
    if answer.status_code != 200:
        return False
    body = answer.json()
    return isinstance(body, dict) and (bool(body.get("failed")) or "results" in body)
