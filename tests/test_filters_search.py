"""Ten thousand searches under random filters find no foreign document, in any route: planned, sent and read as in service.

The routes' own bodies go to the node in bulk, since that is where a filter holds or leaks; several hundred searches go the
whole way over HTTP, with every stage after recall. The verdict on each hit is Python's, which tests/test_filters_node.py
holds together with the cluster's.
"""

import asyncio
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from app import catalog, documents
from app.asking import Search
from app.collection import Collection
from app.elastic import Cluster
from app.errors import InvalidRequest
from app.filters import AllOf, clauses, holds, parse_filter
from app.planning import make_plan, read_route, route_body
from tests.fakes import EmbeddingServer
from tests.searching import NOW_MS
from tests.service import serving, settings_for
from tests.test_filters_node import COLLECTION, random_document, random_filter
from tests.test_filters_node import DECLARED as ALL_DECLARED

pytestmark = [pytest.mark.node, pytest.mark.slow]

SEED = 20_261_130
DOCUMENTS = 200
SEARCHES = 10_000
AT_ONCE = 250
DIMS = 4
OVER_HTTP = 200
QUERY = "carry over leave"
DECLARED = {name: kind for name, kind in ALL_DECLARED.items() if name != "and"}  # The language's own word.

ROUTES: list[list[dict[str, Any]]] = [
    [{"kind": "text"}, {"kind": "vector"}],
    [{"kind": "fresh_text", "window": "36500d"}, {"kind": "fresh_vector", "window": "36500d", "field": "updated_at"}],
    [{"kind": "vector", "num_candidates": 50}, {"kind": "text", "query": "leave"}],
]  # fmt: skip
SHAPES: list[dict[str, Any]] = [
    {},
    {"decay": {"half_life": "365d"}},
    {"decay": {"half_life": "365d", "placement": "fused", "field": "updated_at"}},
    {"min_relevance": 0.2},
    {"collapse": False},
]
STAGES: list[dict[str, Any]] = [
    *SHAPES,
    {"mmr": {"lambda": 0.4}},
    {"dedup": {"threshold": 0.6, "keep": "newer"}},
    {"explain": "cluster", "fusion": {"window": 10}},
    {"top_k": 150},
    {"fusion": {"method": "additive"}, "decay": {"hourly_loss": 0.001}},
    {"highlight": True, "neighbours": 1},
]


@dataclass
class Shelf:
    """A collection made over HTTP, and what stands in it."""

    client: httpx2.Client
    collection: Collection
    sources: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def shelf(node_url: str) -> Iterator[Shelf]:
    async def known(name: str) -> Collection:
        cluster = Cluster.connect(urls=[node_url], request_timeout_s=60)
        try:
            return (await catalog.get(cluster, name)).collection
        finally:
            await cluster.close()

    rng = random.Random(SEED)
    name = f"filters_{uuid.uuid4().hex[:10]}"
    given, sources = [], {}
    for number in range(DOCUMENTS):
        document = random_document(rng, number)
        document["text"] = " ".join(rng.choices(["leave", "carry", "over", "holiday"], k=rng.randint(1, 6)))
        checked, declared = documents.check_document(
            document, COLLECTION.model_copy(update={"declared": DECLARED})
        )
        sources[checked.id] = documents.source(checked, chunks=[], declared=declared, indexed_at="2025-01-31")
        given.append({**document, "embedding": [rng.gauss(0.3, 1) for _ in range(DIMS)]})
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(node_url, embedding.base_url, dims=DIMS,
        )  # fmt: skip
        with serving(settings) as service:
            client = service.client
            made = client.put(f"/v1/collections/{name}", json={"declared": DECLARED})
            assert made.status_code == 200, made.text
            stored = client.post(
                f"/v1/collections/{name}/documents", json={"documents": given, "refresh": "true"}
            )
            assert stored.json()["failed"] == 0, stored.text
            yield Shelf(client, asyncio.run(known(name)), sources)
            client.delete(f"/v1/collections/{name}", params={"confirm": name})


def valid_filter(rng: random.Random, ids: list[str]) -> tuple[dict[str, Any], AllOf]:
    """Return a random filter that is not refused, as written and as parsed."""
    while True:
        value = random_filter(rng, ids)
        if len(str(value)) > 1_000:
            continue  # Long values are for the comparison with Python; here they would only take time.
        try:
            return value, parse_filter(value, declared=DECLARED)
        except InvalidRequest:
            continue


def random_request(
    rng: random.Random, shelf: Shelf, shapes: list[dict[str, Any]]
) -> tuple[dict[str, Any], AllOf, list[AllOf | None]]:
    """Return a search, and what its filter and each route's own filter must hold of every hit."""
    ids = list(shelf.sources)
    given, condition = valid_filter(rng, ids)
    routes: list[dict[str, Any]] = []
    own: list[AllOf | None] = []
    for route in rng.choice(ROUTES):
        value, parsed = valid_filter(rng, ids) if rng.random() < 0.3 else (None, None)
        routes.append({**route, **({"filter": value} if value is not None else {})})
        own.append(parsed)
    request = {
        "collection": shelf.collection.name, "query": QUERY, "valid_time": "any", "paging": False, "timeout_ms": 60_000,
        "filter": given, "routes": routes, **rng.choice(shapes),
    }  # fmt: skip
    return request, condition, own


async def test_ten_thousand_searches_find_nothing_foreign(cluster: Cluster, shelf: Shelf) -> None:
    rng = random.Random(SEED + 1)
    vectors = {QUERY: [0.5, 0.5, 0.5, 0.5], "leave": [1.0, 0.0, 0.0, 0.0]}
    told = asked = full = 0
    while asked < SEARCHES:
        batch: list[tuple[Any, ...]] = []
        while len(batch) < AT_ONCE:
            request, condition, own = random_request(rng, shelf, SHAPES)
            forced, locked = (
                valid_filter(rng, list(shelf.sources)) if rng.random() < 0.3 else ({}, AllOf("", ()))
            )
            plan = make_plan(
                Search.model_validate(request),
                collection=shelf.collection,
                now_ms=NOW_MS,
                forced=clauses(locked),
            )
            for route, mine in zip(plan.routes, own, strict=True):
                must = [part for part in (condition, locked, mine) if part is not None]
                batch.append((plan, route, must, (request, forced)))
        answers = await cluster.msearch(
            [({"index": shelf.collection.index}, route_body(plan, route, vectors, size=12)) for plan, route, _, _ in batch],
            timeout_s=120,
        )  # fmt: skip
        for (plan, route, must, written), answer in zip(batch, answers, strict=True):
            assert isinstance(answer, dict), (written, answer)
            found = {candidate.id for candidate in read_route(plan, route, answer).candidates}
            foreign = [id_ for id_ in found if not all(holds(part, shelf.sources[id_]) for part in must)]
            assert not foreign, (written, route.name, foreign)
            asked += 1
            told += len(found)
            if asked % 20 == 0 and route.kind == "vector" and plan.search.min_relevance is None:
                # A pre-filter: what passes is found by its vector, however far from it, up to the size asked for.
                passing = sum(all(holds(part, source) for part in must) for source in shelf.sources.values())
                assert len(found) == min(passing, 12), written
                assert answer["hits"]["total"]["value"] <= passing
                full += passing > 0
    print(f"{asked} searches found {told} documents, none foreign; {full} were counted in full")
    assert asked >= SEARCHES
    assert told > asked
    assert full > 50


def test_no_stage_over_http_brings_a_foreign_document_back(shelf: Shelf) -> None:
    rng = random.Random(SEED + 2)
    told = 0
    for _ in range(OVER_HTTP // 25):
        requests = [random_request(rng, shelf, STAGES) for _ in range(25)]
        queries = [
            {key: value for key, value in request.items() if key != "collection"}
            for request, _, _ in requests
        ]
        answer = shelf.client.post(
            "/v1/search", json={"collection": shelf.collection.name, "queries": queries}
        )
        assert answer.status_code == 200, answer.text
        for (request, condition, own), result in zip(requests, answer.json()["results"], strict=True):
            assert not result.get("degraded", True), (request, result)
            ids = {hit["id"] for hit in result["hits"]} | {
                id_ for hit in result["hits"] for id_ in hit.get("near_duplicates", ())
            }
            told += len(ids)
            for id_ in ids:
                source = shelf.sources[id_]
                assert holds(condition, source), (request, id_)
                assert any(mine is None or holds(mine, source) for mine in own), (request, id_)
    assert told > OVER_HTTP
