"""The HTTP contract, over real sockets, a real node and a real embedding far end: forms, errors, ids, items."""

import json
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx2
import jsonschema
import pytest

from app import filters
from app.filters import INNER
from app.settings import Settings
from tests.fakes import EmbeddingServer
from tests.service import Running, serving, settings_for

pytestmark = pytest.mark.node
DIMS = 16


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def service(node_url: str, embedding: EmbeddingServer) -> Iterator[Running]:
    settings = settings_for(
        node_url,
        embedding.base_url,
        dims=DIMS,
    )
    with serving(settings) as running:
        yield running


@pytest.fixture
def client(service: Running) -> httpx2.Client:
    return service.client


@pytest.fixture
def collection(client: httpx2.Client) -> Iterator[str]:
    name = f"api_{uuid.uuid4().hex[:10]}"
    assert client.put(f"/v1/collections/{name}").status_code == 200
    yield name
    client.delete(f"/v1/collections/{name}", params={"confirm": name})


def upsert(client: httpx2.Client, collection: str, *documents: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(
        f"/v1/collections/{collection}/documents", json={"documents": list(documents), "refresh": "wait_for"}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def problem(answer: httpx2.Response, status: int, field: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "request_id"} <= body.keys()
    if field is not None:
        assert body["field"] == field
    return body


# --- the design's example --------------------------------------------------------------------------------------------


def test_the_example_of_the_design(client, collection):
    upsert(
        client,
        collection,
        {"id": "leave-2026", "title": "Leave", "text": "carry over five days of leave", "creation_time": "2026-01-02",
         "metadata": {"lang": "en"}, "lang": "en"},
        {"id": "leave-2019", "title": "Leave", "text": "carry over ten days of leave", "creation_time": "2019-01-02",
         "lang": "en"},
        {"id": "urlaub", "title": "Urlaub", "text": "carry over leave", "creation_time": "2026-01-02", "lang": "de"},
        {"id": "later", "title": "Leave", "text": "carry over leave", "creation_time": "2026-02-02", "lang": "en"},
    )  # fmt: skip
    answer = client.post("/v1/search", json={
        "collection": collection, "query": "how long may I carry over leave?", "top_k": 5,
        "as_of": "2026-01-31T00:00:00Z", "filter": {"lang": "en"},
        "decay": {"kind": "exp", "half_life": "180d", "floor": 0.3},
        "routes": [{"kind": "text"}, {"kind": "vector", "weight": 1.0, "decay": {"floor": 0.9}}],
        "fusion": {"method": "rrf", "rank_constant": 60, "window": 100},
    })  # fmt: skip
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["origin"] == "2026-01-31T00:00:00.000Z"
    assert not body["degraded"]
    assert set(body["routes"]) == {"text", "vector"}
    assert body["routes"]["text"]["total"] == {"value": 2, "relation": "eq"}
    assert [hit["id"] for hit in body["hits"]] == ["leave-2026", "leave-2019"]
    first = body["hits"][0]
    assert first["age_days"] == 29.0
    assert first["decay"] == pytest.approx(0.3 + 0.7 * 2 ** (-29 / 180))
    assert first["routes"]["text"]["decay"] == pytest.approx(0.3 + 0.7 * 2 ** (-29 / 180), rel=1e-6)
    assert first["routes"]["vector"]["decay"] == pytest.approx(0.9 + 0.1 * 2 ** (-29 / 180), rel=1e-6)
    assert first["score"] == pytest.approx(sum(1 / (60 + part["rank"]) for part in first["routes"].values()))
    assert first["metadata"] == {"lang": "en"}


def test_the_first_upsert_makes_its_collection(client):
    name = f"api_{uuid.uuid4().hex[:10]}"
    upsert(client, name, {"id": "1", "text": "typed from the start", "creation_time": "2026-01-01"})
    try:
        made = client.get(f"/v1/collections/{name}").json()
        assert (made["dims"], made["similarity"], made["model"]) == (DIMS, "cosine", "far-end")
        answer = client.post("/v1/search", json={"collection": name, "query": "typed"})
        assert [hit["id"] for hit in answer.json()["hits"]] == ["1"]
    finally:
        client.delete(f"/v1/collections/{name}", params={"confirm": name})


# --- what is refused ---------------------------------------------------------------------------------------------------

BAD_SEARCHES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"topk": 3}, "topk"),
    "unknown nested field": ({"decay": {"halflife": "3d"}}, "decay.halflife"),
    "bare number": ({"decay": {"half_life": 5}}, "decay.half_life"),
    "months": ({"decay": {"half_life": "1M"}}, "decay.half_life"),
    "zero": ({"decay": {"scale": "0d"}}, "decay.scale"),
    "decay at scale of one": ({"decay": {"scale": "1d", "decay": 1}}, "decay.decay"),
    "two strengths": ({"decay": {"scale": "1d", "half_life": "1d"}}, "decay"),
    "no strength": ({"decay": {"floor": 0.1}}, "decay"),
    "both placements": ({"decay": {"half_life": "1d", "placement": "both"}}, "decay.placement"),
    "word for a decay": ({"decay": "of"}, "decay"),
    "origin": ({"as_of": "yesterday"}, "as_of"),
    "microseconds": ({"as_of": 1700000000000000}, "as_of"),
    "blank": ({"query": " \n"}, "query"),
    "NUL alone": ({"query": "\0"}, "query"),
    "long": ({"query": "x" * 10_001}, "query"),
    "no hits": ({"top_k": 0}, "top_k"),
    "too many hits": ({"top_k": 10_001}, "top_k"),
    "page past the window": ({"top_k": 50, "fusion": {"window": 10}}, "top_k"),
    "route": ({"routes": [{"kind": "texts"}]}, "routes[0].kind"),
    "no route": ({"routes": []}, "routes"),
    "same names": ({"routes": [{"kind": "text", "name": "a"}, {"kind": "text", "name": "a"}]}, "routes"),
    "window of a plain route": ({"routes": [{"kind": "text", "window": "3d"}]}, "routes[0].window"),
    "rank constant": ({"fusion": {"rank_constant": 0}}, "fusion.rank_constant"),
    "lambda": ({"mmr": {"lambda": 1.5}}, "mmr.lambda"),
    "negative weight": ({"routes": [{"kind": "text", "weight": -1}]}, "routes[0].weight"),
    "filter operator": ({"filter": {"lang": {"like": "e"}}}, "filter.lang"),
    "range on an undeclared key": ({"filter": {"price": {"gte": 3}}}, "filter.price"),
    "raw query language": ({"filter": {"bool": {"must": []}}}, "filter.bool"),
    "dims": ({"query_vector": [1.0, 0.0]}, "query_vector"),
    "zero vector": ({"query_vector": [0.0] * DIMS}, "query_vector"),
    "no reranker": ({"rerank": {}}, "rerank"),
    "collection's name": ({"collection": "../x"}, "collection"),
    "a decay of a route against the request's": (
        {"decay": {"rate": 0.1}, "routes": [{"kind": "text"}, {"kind": "text", "decay": {"kind": "gauss"}}]},
        "routes[1].decay.kind",
    ),
    "gauss of a constant rate": ({"decay": {"kind": "gauss", "rate": 0.1}}, "decay.rate"),
    "a vector beside a route's own words": (
        {"query_vector": [1.0] * DIMS, "routes": [{"kind": "text", "query": "other"}, {"kind": "vector", "query": "other"}]},
        "query_vector",
    ),
    "filter on a version": ({"filter": {"version": 3}}, "filter.version"),
    "filter on a revision": ({"filter": {"not": {"revision": 3}}}, "filter.not.revision"),
    "filter on a vector": ({"filter": {"embedding": {"exists": True}}}, "filter.embedding"),
    "filter on chunks": ({"filter": {"chunks.text": "x"}}, "filter.chunks.text"),
}  # fmt: skip

WRONG_TYPES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"top_k": True}, "top_k", "must be a whole number, not true", "without quotes"),
    ({"top_k": "5"}, "top_k", "must be a whole number, not text", "without quotes"),
    ({"top_k": 5.5}, "top_k", "must be a whole number, not a number", "without a fraction"),
    ({"top_k": None}, "top_k", "must be a whole number, not null", "without quotes"),
    ({"query": 5}, "query", "must be text, not a number", "quotes"),
    ({"query": ["x"]}, "query", "must be text, not a list", "quotes"),
    ({"strict": "true"}, "strict", "must be true or false, not text", "without quotes"),
    ({"touch": 1}, "touch", "must be true or false, not a number", "without quotes"),
    ({"min_relevance": "0.5"}, "min_relevance", "must be a number, not text", "without quotes"),
    ({"min_relevance": True}, "min_relevance", "must be a number, not true", "without quotes"),
    ({"highlight": "yes"}, "highlight", "must be true or false, not text", "without quotes"),
    ({"highlight": {"encoder": True}}, "highlight.encoder", "'html' or 'default'", ""),
    ({"explain": "all"}, "explain", "is neither true, false nor 'cluster'", "one of them"),
    ({"explain": 1}, "explain", "must be true or false, not a number", "without quotes"),
    ({"decay": {"half_life": "30d", "floor": "0.3"}}, "decay.floor", "must be a number, not text", "quotes"),
    ({"decay": {"hourly_loss": True}}, "decay.hourly_loss", "must be a number, not true", "quotes"),
    ({"decay": {"rate": True}}, "decay.rate", "must be a number, not true", "quotes"),
    ({"decay": 5}, "decay", "is neither a decay, 'auto' nor 'off'", '{"half_life": "180d"}, or \'auto\' or \'off\''),
    ({"routes": {"kind": "text"}}, "routes", "must be a list, not an object", "JSON list"),
    ({"routes": ["text"]}, "routes[0]", "must be an object, not text", '{"kind": "text"}'),
    ({"fusion": "rrf"}, "fusion", "must be an object, not text", '{"method": "rrf"}'),
    ({"mmr": True}, "mmr", "must be an object, not true", '{"lambda": 0.7}'),
    ({"routes": [{"kind": "text", "weight": "1"}]}, "routes[0].weight", "must be a number, not text", "quotes"),
    ({"routes": [{"kind": "text", "name": 1}]}, "routes[0].name", "must be text, not a number", "quotes"),
    ({"fusion": {"window": "50"}}, "fusion.window", "must be a whole number, not text", "quotes"),
    ({"mmr": {"lambda": "1"}}, "mmr.lambda", "must be a number, not text", "quotes"),
    ({"rerank": {"decay": "false"}}, "rerank.decay", "must be true or false, not text", "without quotes"),
    ({"fields": "title"}, "fields", "must be a list, not text", "JSON list"),
    ({"fields": [1]}, "fields[0]", "must be text, not a number", "quotes"),
    ({"filter": "lang"}, "filter", "must be an object, not text", '{"lang": "en"}'),
    ({"timeout_ms": "500"}, "timeout_ms", "must be a whole number, not text", "quotes"),
    ({"query_vector": [True] * DIMS}, "query_vector[0]", "must be a number, not true", "quotes"),
]  # fmt: skip


@pytest.mark.parametrize("options, field, told, remedy", WRONG_TYPES, ids=lambda each: str(each)[:60])
def test_values_of_another_json_type_are_refused(client, options, field, told, remedy):
    # Before the collection is even looked for.
    request = {"collection": "absent", "query": "q", **options}
    body = problem(client.post("/v1/search", json=request), 422, field)
    assert told in body["detail"]
    assert remedy in body.get("remedy", "")
    asked = client.post("/v1/why", json={"id": "x", **request})
    assert problem(asked, 422, field)["detail"] == body["detail"]


NO_JSON: list[tuple[bytes, str, str]] = [
    (b'{"query": ' + b"[" * 300, "recursion limit", "200 levels"),
    (b'{"top_k": ' + b"9" * 5000 + b"}", "number out of range", "fewer digits"),
    (b'{"query": "a", "query": "b"}', "duplicate key", "once"),
    (b'{"query": "\xff"}', "unicode", "UTF-8"),
    (b'{"query": "\\ud800"}', "hex escape", "two escapes"),
    (b'{"query": "a\nb"}', "control character", "\\n"),
    (b'{"query": "a"', "EOF", "whole"),
    (b'{"query": "a",}', "trailing comma", "drop the comma"),
    (b'{"query": "a"} {}', "trailing characters", "nothing after it"),
    ("{}".encode("utf-16"), "expected value", "not UTF-16"),
    (b'{"top_k": NaN}', "expected value", "NaN"),
    (b"{'query': 1}", "key must be a string", "double quotes"),
    (b" ", "empty", "object"),
]


@pytest.mark.parametrize("sent, told, remedy", NO_JSON, ids=lambda each: str(each)[:20])
def test_what_is_no_json_is_told_what_to_do(client, sent, told, remedy):
    body = problem(client.post("/v1/search", content=sent), 422, "body")
    assert told in body["detail"]
    assert remedy in body["remedy"]


def test_a_byte_order_mark_is_read_past(client, collection):
    sent = b"\xef\xbb\xbf" + json.dumps({"collection": collection, "query": "q"}).encode()
    assert client.post("/v1/search", content=sent).status_code == 200
    listed = client.get(f"/v1/collections/{collection}/documents", params={"filter": '{"lang": "en"'})
    assert problem(listed, 422, "filter")["remedy"].endswith('such as {"lang": "en"}')


def test_whole_numbers_may_be_written_with_a_point(client, collection):
    body = {"collection": collection, "query": "q", "top_k": 5.0, "min_relevance": 0, "rerank": None}
    assert client.post("/v1/search", json=body).status_code == 200


BAD_DOCUMENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"id": 5, "text": "x"}, "id", "must be text, not a number"),
    ({"id": "a", "text": 5}, "text", "must be text, not a number"),
    ({"id": "a", "text": "x", "evergreen": "true"}, "evergreen", "must be true or false, not text"),
    ({"id": "a", "text": "x", "salience": "1"}, "salience", "must be a number, not text"),
    ({"id": "a", "text": "x", "salience": True}, "salience", "must be a number, not true"),
    ({"id": "a", "text": "x", "tags": "one"}, "tags", "must be a list, not text"),
    ({"id": "a", "text": "x", "tags": [1]}, "tags.0", "must be text, not a number"),
    ({"id": "a", "text": "x", "lang": 1}, "lang", "must be text, not a number"),
    ({"id": "a", "text": "x", "revision": "1"}, "revision", "must be a whole number, not text"),
    ({"id": "a", "text": "x", "metadata": []}, "metadata", "must be an object, not a list"),
    ({"id": "a", "text": "x", "creation_time": True}, "creation_time", "no instant"),
]


def test_documents_of_another_json_type_fail_alone(client, collection):
    sent = [*(document for document, _, _ in BAD_DOCUMENTS), {"id": "ok", "text": "x"}]
    answer = client.post(f"/v1/collections/{collection}/documents", json={"documents": sent})
    *bad, good = answer.json()["items"]
    assert good["status"] == "created"
    for item, (document, field, told) in zip(bad, BAD_DOCUMENTS, strict=True):
        assert item["status"] == "invalid", document
        assert item["error"]["field"] == field
        assert told in item["error"]["detail"]
        assert item["error"]["remedy"]


@pytest.mark.parametrize(
    "method, path, body, field",
    [
        ("PUT", "", {"dims": "16"}, "dims"),
        ("PUT", "", {"shards": True}, "shards"),
        ("PUT", "", {"declared": {"year": 1}}, "declared.year"),
        ("POST", "/documents/delete", {"ids": "a"}, "ids"),
        ("POST", "/documents/delete", {"ids": [1]}, "ids[0]"),
        ("POST", "/documents/delete", {"delete_all": "true"}, "delete_all"),
        ("POST", "/documents", {"documents": {}}, "documents"),
        ("POST", "/documents", {"documents": [{}], "refresh": 1}, "refresh"),
    ],
    ids=str,
)
def test_other_bodies_of_another_json_type_are_refused(client, method, path, body, field):
    problem(client.request(method, f"/v1/collections/absent{path}", json=body), 422, field)


@pytest.mark.parametrize("name", BAD_SEARCHES)
def test_a_bad_search_names_the_field(client, collection, name):
    change, field = BAD_SEARCHES[name]
    answer = client.post("/v1/search", json={"collection": collection, "query": "x", **change})
    body = problem(answer, 422)
    assert body["field"].startswith(field)


def test_a_misspelt_field_is_told_the_right_one(client, collection):
    answer = client.post("/v1/search", json={"collection": collection, "query": "x", "topk": 3})
    assert problem(answer, 422)["remedy"] == "did you mean `top_k`?"


RAW_BODIES = {
    "nan": b'{"collection":"c","query":"x","top_k":NaN}',
    "infinity": b'{"collection":"c","query":"x","min_relevance":Infinity}',
    "overflow": b'{"collection":"c","query":"x","min_relevance":1e999}',
    "duplicate key": b'{"collection":"c","query":"x","query":"y"}',
    "lone surrogate": b'{"collection":"c","query":"\\ud800"}',
    "surrogate as a key": b'{"collection":"c","query":"x","\\udfff":1}',
    "not utf-8": b'{"collection":"c","query":"\xff"}',
    "empty": b"",
    "list": b"[]",
    "text": b'"x"',
    "deep": b'{"filter":' + b'{"not":' * 50_000,
    "cut off": b'{"collection":"c"',
}


@pytest.mark.parametrize("name", RAW_BODIES)
@pytest.mark.parametrize("path", ["/v1/search", "/v1/why", "/v1/collections/raw/documents"])
def test_http_validation_bodies_that_are_not_json(client, name, path):
    problem(client.post(path, content=RAW_BODIES[name]), 422)


def test_a_number_that_the_cluster_can_not_read_is_refused_by_its_field(client, collection):
    def stored(digits: int) -> Any:
        raw = f'{{"documents":[{{"id":"a","text":"x","metadata":{{"v":[{"9" * digits}]}}}}]}}'
        return client.post(f"/v1/collections/{collection}/documents", content=raw)

    assert stored(999).json()["items"][0]["status"] == "created"
    for digits in (1_000, 4_000):
        told = problem(stored(digits), 422)["items"][0]["error"]
        assert (told["field"], told["remedy"]) == ("metadata", "write it as text")
        assert "metadata.v" in told["detail"]


@pytest.mark.parametrize("raw", [
    '{"id":"a","text":"x","embedding":[NaN,1,0]}',
    '{"id":"a","text":"x","embedding":[1e999,1,0]}',
    '{"id":"a","text":"x","embedding":["nan",1,0]}',
    '{"id":"a","text":"x","metadata":{"v":NaN}}',
    '{"id":"a","text":"x","metadata":{"v":1e400}}',
])  # fmt: skip
def test_http_validation_bc32(client, collection, raw):
    answer = client.post(f"/v1/collections/{collection}/documents", content='{"documents":[' + raw + "]}")
    problem(answer, 422)
    problem(client.get(f"/v1/collections/{collection}/documents/a"), 404)


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/nowhere", 404),
    ("DELETE", "/v1/search", 405),
    ("POST", "/v1/collections/absent/documents/delete", 404),
    ("GET", "/v1/collections/absent", 404),
    ("GET", "/v1/collections/UPPER", 422),
    ("GET", "/v1/collections/a-w-1-a", 422),
])  # fmt: skip
def test_every_failure_has_one_form(client, method, path, status):
    problem(client.request(method, path, content=b'{"ids":["a"]}'), status)


def test_chunks_that_the_model_does_not_read_to_their_end_are_told_at_the_start(node_url, embedding, caplog):
    with serving(settings_for(node_url, embedding.base_url, dims=DIMS, chunk_tokens=5000)):
        pass
    assert "chunks of up to 5000 tokens, and the model far-end reads 512" in caplog.text
    assert "lower HALFLIFE_CHUNK_TOKENS" in caplog.text


def test_a_body_over_the_limit_is_refused_while_it_arrives(node_url, embedding):
    settings = settings_for(node_url, embedding.base_url, dims=DIMS, max_body_bytes=2_000)
    with serving(settings) as small:
        body = json.dumps({"collection": "c", "query": "x" * 5_000})
        problem(small.client.post("/v1/search", content=body), 413)

        def dripping() -> Iterator[bytes]:
            for start in range(0, len(body), 500):
                yield body[start : start + 500].encode()

        problem(small.client.post("/v1/search", content=dripping()), 413)
        assert small.client.get("/livez").status_code == 200


# --- documents -----------------------------------------------------------------------------------------------------------

IDS = ["a/b/c", "../x", "a?b#c", "a b", "%2F", "a%2Fb", ".", "*", "a,b", "日本/語", "_x"]


def test_ids_bc38_every_id_round_trips_and_deletes_itself(client, collection):
    base = f"/v1/collections/{collection}/documents/"
    upsert(client, collection, *({"id": id_, "text": f"ordinary words {at}"} for at, id_ in enumerate(IDS)))

    def path(id_: str) -> str:
        # '.' alone is what URL libraries resolve away; escaped it reaches the service.
        return base + ("%2E" if id_ == "." else quote(id_, safe=""))

    reachable = [id_ for id_ in IDS if id_ != "."]
    for id_ in reachable:
        answer = client.get(path(id_))
        assert answer.status_code == 200, (id_, answer.text)
        assert answer.json()["id"] == id_
    found = client.post("/v1/search", json={"collection": collection, "query": "ordinary words", "top_k": 50})
    assert {hit["id"] for hit in found.json()["hits"]} == set(IDS)
    left = set(IDS)
    for id_ in reachable:
        assert client.delete(path(id_)).status_code == 200
        left.remove(id_)
        problem(client.get(path(id_)), 404)
        problem(client.delete(path(id_)), 404)
        listed = client.get(f"/v1/collections/{collection}/documents").json()["documents"]
        assert left <= {document["id"] for document in listed} | {"."}
        for other in left - {"."}:
            assert client.get(path(other)).status_code == 200
    gone = client.post(f"/v1/collections/{collection}/documents/delete", json={"ids": ["."]})
    assert gone.json()["deleted"] == 1


LINE_FEEDS = ["a", "a\n", "\na", "a\nb", "\n", "\n\n", "a\r\n", "a\u2028", "a/\n/b\n", "delete\n"]


def test_ids_with_line_feeds_are_reached_as_themselves(client, collection):
    base = f"/v1/collections/{collection}/documents"
    upsert(
        client,
        collection,
        *({"id": id_, "text": f"ordinary words {at}"} for at, id_ in enumerate(LINE_FEEDS)),
    )
    for id_ in LINE_FEEDS:
        assert client.get(f"{base}/{quote(id_, safe='')}").json()["id"] == id_
        told = client.post("/v1/why", json={"collection": collection, "query": "ordinary words", "id": id_})
        assert (told.json()["exists"], told.json()["rank"] is not None) == (True, True)
        changed = client.patch(
            base, json={"documents": [{"id": id_, "source": f"of {id_}"}], "refresh": "true"}
        )
        assert changed.json()["items"][0]["status"] == "updated"
    for id_ in reversed(LINE_FEEDS):
        assert client.get(f"{base}/{quote(id_, safe='')}").json()["source"] == f"of {id_}"
    for at, id_ in enumerate(LINE_FEEDS[1:], start=1):
        assert (
            client.delete(f"{base}/{quote(id_, safe='')}", params={"refresh": "true"}).json()["deleted"] == 1
        )
        listed = client.get(base).json()["documents"]
        assert {each["id"] for each in listed} == {"a", *LINE_FEEDS[at + 1 :]}
        problem(client.get(f"{base}/{quote(id_, safe='')}"), 404, "id")


PATHS = [
    "/livez",
    "/readyz",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/v1/collections",
    "/v1/collections/{}/documents",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_ends_in_a_line_feed_is_another_one(client, collection, path):
    path = path.format(collection)
    assert client.get(path).status_code == 200
    for added in ("%0A", "%0D%0A", "%0A%0A", "%E2%80%A8"):
        assert client.get(path + added).status_code == 404
    for method, path in (("POST", "/v1/search"), ("PATCH", f"/v1/collections/{collection}/documents")):
        assert client.request(method, path + "%0A", json={}).status_code == 404
    # Names take no line feed; what ends in one can only be a document, which nobody posts to.
    assert client.get(f"/v1/collections/{collection}%0A").status_code == 422
    assert (
        client.post(
            f"/v1/collections/{collection}/documents/delete%0A", json={"delete_all": True}
        ).status_code
        == 405
    )


def test_ids_two_dots_are_refused_and_reach_nothing(client, collection):
    upsert(client, collection, {"id": "kept", "text": "kept"})
    answer = client.post(
        f"/v1/collections/{collection}/documents", json={"documents": [{"id": "..", "text": "x"}]}
    )
    problem(answer, 422)
    for spelling in ("..", "%2e%2e", "%2E%2E", "..%2f..", "%252e%252e"):
        assert client.delete(f"/v1/collections/{collection}/documents/{spelling}").status_code in (
            404,
            405,
            422,
        )
    assert client.get(f"/v1/collections/{collection}/documents/kept").status_code == 200


def test_ids_bc39_a_long_id_fails_alone(client, collection):
    result = upsert(
        client, collection, {"id": "ok1", "text": "x"}, {"id": "z" * 513, "text": "x"}, {"id": "日" * 171, "text": "x"},
        {"id": "ok2", "text": "x"}, {"id": "a" * 512, "text": "x"}, {"id": "😀" * 128, "text": "x"},
    )  # fmt: skip
    statuses = [item["status"] for item in result["items"]]
    assert statuses == ["created", "invalid", "invalid", "created", "created", "created"]
    assert result["failed"] == 2
    assert "512 bytes" in result["items"][1]["error"]["detail"]


def test_embedding_bc21_blank_texts_fail_alone_and_are_never_sent(client, collection, embedding):
    before = len(embedding.batches)
    result = upsert(
        client, collection, {"id": "1", "text": "alpha"}, {"id": "2", "text": ""}, {"id": "3", "text": "   \n"},
        {"id": "4", "text": "delta"},
    )  # fmt: skip
    assert [item["status"] for item in result["items"]] == ["created", "invalid", "invalid", "created"]
    sent = [text for batch in embedding.batches[before:] for text in batch]
    assert sorted(sent) == ["alpha", "delta"]


def test_bulk_bc45_bad_items_are_told_and_the_others_stored(client, collection):
    good = [float(number + 1) for number in range(DIMS)]
    answer = client.post(f"/v1/collections/{collection}/documents", json={"documents": [
        {"id": "b1", "text": "x", "embedding": good},
        {"id": "b2", "text": "x", "embedding": [0] * DIMS},
        {"id": "b3", "text": "x", "embedding": [1, 2]},
        {"id": "b4", "text": "x", "creation_time": "nope"},
        {"id": "b5", "text": "fine"},
    ]})  # fmt: skip
    body = answer.json()
    assert answer.status_code == 200
    assert [item["status"] for item in body["items"]] == [
        "created",
        "invalid",
        "invalid",
        "invalid",
        "created",
    ]
    assert body["failed"] == 3
    assert [item["error"]["field"] for item in body["items"][1:4]] == [
        "embedding",
        "embedding",
        "creation_time",
    ]


def test_metadata_comes_back_as_sent(client, collection):
    metadata = {
        "page": 1,
        "a.b": 2,
        "": 1,
        " ": None,
        "mix": [1, "a"],
        "big": 10**19,
        "f": 1.0,
        "o": {"x": [True]},
    }
    upsert(client, collection, {"id": "m", "text": "x", "metadata": metadata})
    text = client.get(f"/v1/collections/{collection}/documents/m").text
    assert json.loads(text)["metadata"] == metadata
    assert '"f":1.0' in text
    found = client.post("/v1/search", json={"collection": collection, "query": "x", "filter": {"page": 1}})
    assert [hit["id"] for hit in found.json()["hits"]] == ["m"]


def test_listing_goes_through_all_pages(client, collection):
    upsert(
        client,
        collection,
        *({"id": f"d{at:02d}", "text": "x", "lang": "en" if at % 2 else "zh"} for at in range(25)),
    )
    seen: list[str] = []
    params: dict[str, Any] = {"size": 4, "filter": '{"lang": "en"}'}
    for _ in range(10):
        body = client.get(f"/v1/collections/{collection}/documents", params=params).json()
        assert body["total"] == 12
        seen += [document["id"] for document in body["documents"]]
        if body["cursor"] is None:
            break
        params = {"cursor": body["cursor"]}
    assert seen == [f"d{at:02d}" for at in range(25) if at % 2]
    # The answer of the last page may be lost on its way, and be asked for again.
    again = client.get(f"/v1/collections/{collection}/documents", params=params)
    assert (again.status_code, again.json()) == (200, body)


UNKNOWN = {
    "a filter": ("GET", "/documents", "filters={}", "filters", "`filter`"),
    "a delete": ("DELETE", "/documents/kept", "refesh=true", "refesh", "`refresh`"),
    "nothing like it": ("GET", "/documents", "zzz=1", "zzz", "size, filter, cursor"),
    "none are known": ("GET", "/documents/kept", "x=1", "x", "drop it"),
    "what a body says": ("POST", "/documents", "refresh=true", "refresh", "in its body"),
    "twice": ("GET", "/documents", "size=1&size=2", "size", "once"),
    "not ASCII": ("GET", "/documents", "%C3%A9=1", "\\xe9", "size"),
}


@pytest.mark.parametrize("method, path, query, field, remedy", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_query_parameters_that_are_not_known_are_refused(
    client, collection, method, path, query, field, remedy
):
    upsert(client, collection, {"id": "kept", "text": "kept"})
    where = f"/v1/collections/{collection}"
    told = problem(client.request(method, f"{where}{path}?{query}", json=None), 422, field)
    assert remedy in told["remedy"]
    assert client.get(f"{where}/documents/kept").status_code == 200
    assert client.get("/livez?probe=1").status_code == 200


def test_a_cursor_goes_on_by_its_own_size(client, collection):
    upsert(client, collection, *({"id": str(at), "text": "x"} for at in range(4)))
    path = f"/v1/collections/{collection}/documents"
    cursor = client.get(path, params={"size": 2}).json()["cursor"]
    problem(client.get(path, params={"cursor": cursor, "size": 3}), 422, "size")
    problem(client.get(path, params={"cursor": cursor, "filter": "{}"}), 422, "filter")
    assert len(client.get(path, params={"cursor": cursor, "size": 2}).json()["documents"]) == 2


@pytest.mark.parametrize("body, field", [
    ({}, None), ({"filter": {}}, "filter"), ({"ids": ["a"], "delete_all": True}, None), ({"ids": []}, "ids"),
    ({"delete_all": False}, None), ({"delete_all": "yes"}, "delete_all"), ({"documents": [{"id": "kept"}], "ids": ["kept"]}, None),
    ({"documents": [{"id": "kept", "if_versoin": 1}]}, "documents[0].if_versoin"),
])  # fmt: skip
def test_a_delete_says_what_exactly(client, collection, body, field):
    upsert(client, collection, {"id": "kept", "text": "kept"})
    problem(client.post(f"/v1/collections/{collection}/documents/delete", json=body), 422)
    assert client.get(f"/v1/collections/{collection}/documents/kept").status_code == 200


def test_a_delete_may_ask_for_a_version(client, collection):
    upsert(
        client, collection, *({"id": id_, "text": "as read"} for id_ in ("same", "changed", "gone", "any"))
    )
    path = f"/v1/collections/{collection}/documents"
    read = {each["id"]: each["version"] for each in client.get(path).json()["documents"]}
    upsert(client, collection, {"id": "changed", "text": "written since"})
    client.delete(f"{path}/gone")
    wanted = [{"id": id_, "if_version": read[id_]} for id_ in ("same", "changed", "gone")]
    told = client.post(
        f"{path}/delete", json={"documents": [*wanted, {"id": "any"}], "refresh": "true"}
    ).json()
    assert [item["status"] for item in told["items"]] == ["deleted", "conflict", "not_found", "deleted"]
    assert (told["deleted"], told["failed"]) == (2, 1)
    assert told["items"][1]["version"] > read["changed"]
    assert "its version is another" in told["items"][1]["error"]["detail"]
    assert [each["id"] for each in client.get(path).json()["documents"]] == ["changed"]


def test_delete_by_filter_counts_truly(client, collection):
    upsert(
        client,
        collection,
        *({"id": f"{at}", "text": "x", "source": "a" if at < 3 else "b"} for at in range(5)),
    )
    answer = client.post(
        f"/v1/collections/{collection}/documents/delete", json={"filter": {"source": "a"}, "refresh": "true"}
    )
    assert answer.json() == {"items": [], "failed": 0, "deleted": 3}
    left = client.get(f"/v1/collections/{collection}/documents").json()
    assert [document["id"] for document in left["documents"]] == ["3", "4"]


def test_patch_changes_a_field_and_keeps_the_vector(client, collection, embedding):
    upsert(client, collection, {"id": "p", "text": "patched words", "lang": "en"})
    before = len(embedding.batches)
    answer = client.patch(
        f"/v1/collections/{collection}/documents",
        json={"documents": [{"id": "p", "evergreen": True, "lang": None}], "refresh": "wait_for"},
    )
    assert answer.json()["items"][0]["status"] == "updated", answer.text
    assert len(embedding.batches) == before
    stored = client.get(f"/v1/collections/{collection}/documents/p").json()
    assert (stored["evergreen"], stored["lang"]) == (True, None)
    found = client.post("/v1/search", json={"collection": collection, "query": "patched words"}).json()
    assert found["hits"][0]["routes"].keys() == {"text", "vector"}


def test_a_collection_is_deleted_only_when_named_twice(client, collection):
    problem(client.delete(f"/v1/collections/{collection}"), 422, "confirm")
    problem(client.delete(f"/v1/collections/{collection}", params={"confirm": "other"}), 422, "confirm")
    assert client.delete(f"/v1/collections/{collection}", params={"confirm": collection}).status_code == 204
    problem(client.get(f"/v1/collections/{collection}"), 404)


# --- batches, pages, request ids ----------------------------------------------------------------------------------------


def test_the_filter_of_a_batch_is_read_once(client, collection, monkeypatch):
    upsert(
        client, collection, {"id": "a", "text": "leave", "metadata": {"k": "v"}}, {"id": "b", "text": "leave"}
    )
    read: list[str] = []
    spend = filters._Reader.one_of

    def counted(self: Any, field: Any, values: Any, path: str, *, listed: bool) -> Any:
        read.append(path)
        return spend(self, field, values, path, listed=listed)

    monkeypatch.setattr(filters._Reader, "one_of", counted)
    routes = [{"kind": "text", "filter": {"k": ["v", "x"]}}]
    asked = {"collection": collection, "filter": {"k": ["v", "w"]}, "routes": routes}
    queries = ["leave", "Leave", {"query": "leave", "filter": {"k": ["w"]}}, "leave it"]
    answer = client.post("/v1/search", json={**asked, "queries": queries})
    assert answer.status_code == 200, answer.text
    found = [[hit["id"] for hit in each["hits"]] for each in answer.json()["results"]]
    assert found == [["a"], ["a"], [], ["a"]]
    # Before the collection is known, and as it declares its keys; an empty answer's filter once more for its warnings.
    assert read.count("routes[0].filter.k") <= 4 + 1
    assert read.count("filter.k") <= 2 + 2 + 3


def test_a_batch_answers_in_order_and_one_bad_query_spoils_only_itself(client, collection, embedding):
    upsert(client, collection, {"id": "a", "text": "apple"}, {"id": "b", "text": "banana"})
    before = len(embedding.batches)
    answer = client.post("/v1/search", json={
        "collection": collection, "top_k": 1, "queries": [
            {"query": "apple"}, {"query": " "}, {"query": "banana"}, {"query": "x", "filter": {"n": {"gt": 1}}}, "apple",
        ],
    })  # fmt: skip
    results = answer.json()["results"]
    assert [result["hits"][0]["id"] if "hits" in result else result["status"] for result in results] == [
        "a", 422, "b", 422, "a",
    ]  # fmt: skip
    assert [result["query"] for result in results if "query" in result] == [1]
    assert len(embedding.batches) == before + 1


def test_pages_are_one_long_page_while_documents_change(client, collection):
    upsert(client, collection, *({"id": f"{at:03d}", "text": f"the same words {at}"} for at in range(40)))
    request = {"collection": collection, "query": "the same words", "top_k": 40}
    whole = [hit["id"] for hit in client.post("/v1/search", json=request).json()["hits"]]
    body = client.post("/v1/search", json={**request, "top_k": 7}).json()
    origin, seen = body["origin"], [hit["id"] for hit in body["hits"]]
    while body["cursor"]:
        upsert(client, collection, {"id": f"new{len(seen)}", "text": "the same words the same words"})
        client.post(
            f"/v1/collections/{collection}/documents/delete", json={"ids": [whole[-1]], "refresh": "true"}
        )
        body = client.post("/v1/search", json={"cursor": body["cursor"]}).json()
        assert body["origin"] == origin
        seen += [hit["id"] for hit in body["hits"]]
    assert seen == whole


def test_a_given_vector_goes_through_all_pages(client, collection):
    upsert(client, collection, *({"id": f"{at}", "text": "word"} for at in range(5)))
    request = {"collection": collection, "query": "word", "query_vector": [0.5] * DIMS, "top_k": 2}
    body = client.post("/v1/search", json=request).json()
    seen = [hit["id"] for hit in body["hits"]]
    while body["cursor"]:
        answer = client.post("/v1/search", json={"cursor": body["cursor"]})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        seen += [hit["id"] for hit in body["hits"]]
    assert sorted(seen) == list("01234")


def test_a_cursor_stands_alone_and_can_not_be_altered(client, collection):
    upsert(client, collection, *({"id": f"{at}", "text": "word"} for at in range(5)))
    body = client.post("/v1/search", json={"collection": collection, "query": "word", "top_k": 2}).json()
    problem(client.post("/v1/search", json={"cursor": body["cursor"], "top_k": 3}), 422, "top_k")
    problem(client.post("/v1/search", json={"cursor": body["cursor"][:-3] + "AAA"}), 422, "cursor")
    problem(client.post("/v1/search", json={"cursor": ""}), 422, "cursor")


def test_no_path_redirects_to_the_host_that_a_caller_names(client):
    for path in ("/livez/", "/v1/collections/", "/readyz/"):
        answer = client.get(path, headers={"Host": "127.0.0.1:1"}, follow_redirects=False)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert "location" not in answer.headers


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_who_watches_may_ask_for_the_head_alone(client, path):
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_request_keeps_its_id(client):
    assert client.get("/livez", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert client.get("/nowhere", headers={"X-Request-Id": "mine-2"}).json()["request_id"] == "mine-2"
    assert len(client.get("/livez", headers={"X-Request-Id": "no\tgood"}).headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    "profile, field",
    [
        (
            {"routes": [{"kind": "text"}, {"kind": "text", "filter": {"lang": [0]}}]},
            "routes[1].filter.lang[0]",
        ),
        ({"routes": [{"kind": "text", "filter": {"chunks.text": "x"}}]}, "routes[0].filter.chunks.text"),
    ],
)
def test_a_profile_that_no_search_could_use_is_refused(client, collection, profile, field):
    answer = client.put(f"/v1/collections/{collection}", json={"profiles": {"m": profile}})
    problem(answer, 422, f"profiles.m.{field}")
    assert client.get(f"/v1/collections/{collection}").json()["profiles"] == {}


def test_a_delete_sent_again_shows_what_the_first_one_left_unseen(client, collection):
    upsert(client, collection, {"id": "1", "text": "leave"})
    assert client.put(f"/v1/collections/{collection}", json={"refresh_interval": "-1"}).status_code == 200
    path = f"/v1/collections/{collection}/documents"
    for refresh, expected, seen in (("false", "deleted", ["1"]), ("true", "not_found", [])):
        [item] = client.post(f"{path}/delete", json={"ids": ["1"], "refresh": refresh}).json()["items"]
        assert item["status"] == expected
        assert listed(client, collection, {}) == seen


def test_a_cursor_of_a_collection_made_anew_has_expired(client, collection):
    path = f"/v1/collections/{collection}"
    upsert(client, collection, {"id": "1", "text": "leave"}, {"id": "2", "text": "leave"})
    listing = client.get(f"{path}/documents", params={"size": 1}).json()["cursor"]
    searching = client.post(
        "/v1/search", json={"collection": collection, "query": "leave", "top_k": 1}
    ).json()
    assert client.delete(path, params={"confirm": collection}).status_code == 204
    assert client.put(path).status_code == 200
    problem(client.get(f"{path}/documents", params={"cursor": listing}), 410, "cursor")
    problem(client.post("/v1/search", json={"cursor": searching["cursor"]}), 410, "cursor")


# --- metadata keys called like something inner -------------------------------------------------------------------------------


def listed(client: httpx2.Client, collection: str, wanted: dict[str, Any]) -> list[str]:
    answer = client.get(f"/v1/collections/{collection}/documents", params={"filter": json.dumps(wanted)})
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["documents"]]


def test_a_metadata_key_may_be_called_like_an_inner_field(client, collection):
    upsert(
        client,
        collection,
        {"id": "mine", "text": "leave", "metadata": dict.fromkeys(INNER, "mine")},
        {"id": "other", "text": "other", "revision": 7},
    )
    inner = client.get(f"/v1/collections/{collection}/documents/other").json()
    inner |= {"document_id": "other", "deleted": False, "if_version": inner["version"]}
    for name in INNER:
        assert listed(client, collection, {f"metadata.{name}": "mine"}) == ["mine"], name
        assert listed(client, collection, {f"metadata.{name}": {"ne": "mine"}}) == ["other"], name
        assert listed(client, collection, {f"metadata.{name}": {"exists": True}}) == ["mine"], name
        if isinstance(inner.get(name), str | int):
            assert listed(client, collection, {f"metadata.{name}": inner[name]}) == [], name
        answer = client.get(
            f"/v1/collections/{collection}/documents", params={"filter": json.dumps({name: "mine"})}
        )
        assert f"metadata.{name}" in problem(answer, 422, f"filter.{name}")["remedy"]


def test_a_declared_key_called_version_is_the_callers(client):
    name = f"api_{uuid.uuid4().hex[:10]}"
    assert client.put(f"/v1/collections/{name}", json={"declared": {"version": "long"}}).status_code == 200
    try:
        upsert(
            client,
            name,
            {"id": "third", "text": "leave", "metadata": {"version": 3}},
            {"id": "none", "text": "leave"},
        )
        assert client.get(f"/v1/collections/{name}/documents/none").json()["version"] > 2
        for key in ("version", "metadata.version"):
            assert listed(client, name, {key: {"gte": 2}}) == ["third"]
            assert listed(client, name, {key: {"exists": False}}) == ["none"]
    finally:
        client.delete(f"/v1/collections/{name}", params={"confirm": name})


# --- what stands in the documents about it -----------------------------------------------------------------------------------


def test_readiness_names_each_dependency(client, embedding):
    body = client.get("/readyz").json()
    assert body["status"] == "ready"
    assert body["checks"].keys() == {"elasticsearch", "embedder"}
    assert body["checks"]["elasticsearch"]["writable"] is True
    assert body["checks"]["elasticsearch"]["breaker"] == "closed"


def test_every_openapi_example_runs_and_answers_as_described(client, collection):
    document = client.get("/openapi.json").json()
    upsert(client, "handbook_examples", {"id": "leave-policy-2023", "text": "carry over leave", "lang": "en"})
    try:
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
                for name, example in content.get("examples", {}).items():
                    value = json.loads(
                        json.dumps(example["value"]).replace('"handbook"', '"handbook_examples"')
                    )
                    makes = (method, path) == ("put", "/v1/collections/{collection}")
                    target = f"{collection}_{name}" if makes else "handbook_examples"
                    answer = client.request(method, path.replace("{collection}", target), json=value)
                    if path == "/v1/feedback":
                        problem(answer, 404, "search_id")  # an example can't know what was logged here
                        continue
                    assert answer.status_code == 200, (path, name, answer.text)
                    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
                    if "results" not in answer.json():
                        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
                    if makes:
                        client.delete(f"/v1/collections/{target}", params={"confirm": target})
    finally:
        client.delete("/v1/collections/handbook_examples", params={"confirm": "handbook_examples"})


def test_start_up_stops_on_vectors_that_do_not_fit(node_url, client, collection):
    with EmbeddingServer(dims=DIMS + 1) as other:
        settings = Settings(
            elasticsearch_url=node_url, embedding_base_url=other.base_url, embedding_model="far-end",
            elasticsearch_timeout_s=60,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="did not start"), serving(settings):
            pass
