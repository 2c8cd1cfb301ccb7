"""Hits that are chunks, on a real node: a least relevance, additive scores and titles hold for each chunk by itself."""

from typing import Any

import pytest

from app.answers import SearchResult
from app.asking import Why
from app.collection import Similarity
from app.planning import CHUNKS_PER_DOCUMENT
from app.search import Caller
from app.why import why
from tests.searching import NOW_MS, PATIENT, Asker

pytestmark = pytest.mark.node

QUERY = "carry over"
TEXT, NEAR = {"kind": "text"}, {"kind": "vector"}
CHUNKS: dict[str, Any] = {"collapse": False, "top_k": 50}
VECTORS = {QUERY: [1, 0, 0], "other words": [0, 1, 0]}


def at(cosine: float) -> list[float]:
    """Return a unit vector of this cosine with the query's."""
    return [cosine, (1 - cosine**2) ** 0.5, 0]


def chunks(answer: SearchResult) -> list[tuple[str, int]]:
    return [(hit.id, (hit.chunk or {})["number"]) for hit in answer.hits]


GIVEN: list[dict[str, Any]] = [
    # Its words stand in a chunk that is far away, beside a near one without them.
    {"id": "apart", "title": "Handbook", "chunks": [("something near", at(0.9)), ("carry over", at(0.5)), ("carry it over", at(0.86))]},
    {"id": "titled", "title": "Carry over of leave", "chunks": [("Five days.", at(0.3)), ("Until March.", at(0.88))]},
    {"id": "far", "title": "Carry over", "chunks": [("carry over", at(0.2))]},
    {"id": "bare", "title": "Notes", "chunks": [("carry over", None)]},
]  # fmt: skip


@pytest.mark.parametrize("similarity", ["cosine", "dot_product", "l2_norm", "max_inner_product"])
async def test_a_least_relevance_holds_for_each_chunk(made: Any, similarity: Similarity) -> None:
    asker: Asker = await made(GIVEN, VECTORS, similarity=similarity)
    for routes in ([TEXT], [NEAR], [TEXT, NEAR]):
        answer = await asker.ask(QUERY, routes=routes, min_relevance=0.84, **CHUNKS)
        assert all(hit.relevance is not None and hit.relevance >= 0.84 for hit in answer.hits)
        # Of "titled" the title alone matches, so its first chunk is judged, which is far away.
        near = set() if routes == [TEXT] else {("apart", 0), ("titled", 1)}
        assert set(chunks(answer)) == {("apart", 2)} | near
        assert not answer.degraded
    # Of 0.9 exactly, which floats write as a little less.
    [hit] = (await asker.ask(QUERY, routes=[NEAR], min_relevance=0.9, **CHUNKS)).hits
    assert hit.relevance == pytest.approx(0.9)
    assert (await asker.ask(QUERY, routes=[TEXT], min_relevance=0.9, **CHUNKS)).hits == []


@pytest.mark.parametrize("collapse", [True, False])
async def test_a_least_relevance_is_that_of_the_query_whatever_a_route_looks_for(
    made: Any, collapse: bool
) -> None:
    # "far" is next to the other words, and nowhere near the query.
    asker: Asker = await made([*GIVEN, {"id": "both", "chunks": [("unlike", at(0.85))]}], VECTORS)
    for kind in ("vector", "text"):
        routes = [{"kind": kind, "query": "other words"}, NEAR]
        answer = await asker.ask(QUERY, routes=routes, min_relevance=0.84, top_k=50, collapse=collapse)
        assert {hit.id for hit in answer.hits} == {"apart", "titled", "both"}
        assert all(hit.relevance is not None and hit.relevance >= 0.84 for hit in answer.hits)
        first = answer.routes[kind if kind == "text" else "vector"]
        assert (first.returned > 0) == (kind == "vector")


@pytest.mark.parametrize(
    "options",
    [{}, {"decay": {"half_life": "30d"}}, {"explain": "cluster"}, {"dedup": {"threshold": 1}}, {"mmr": {}}],
    ids=str,
)
async def test_a_least_relevance_holds_in_every_stage(made: Any, options: dict[str, Any]) -> None:
    asker: Asker = await made(GIVEN, VECTORS)
    answer = await asker.ask(QUERY, min_relevance=0.84, **CHUNKS, **options)
    assert set(chunks(answer)) == {("apart", 0), ("apart", 2), ("titled", 1)}
    request = {
        "collection": asker.collection.name,
        "query": QUERY,
        "min_relevance": 0.84,
        **PATIENT,
        **CHUNKS,
        **options,
    }
    request.pop("explain", None)
    told = await why(
        Why.model_validate({**request, "id": "far", "routes": [TEXT]}),
        collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS,
    )  # fmt: skip
    assert not told.routes["text"].matches
    assert [reason.partition(":")[0] for reason in told.excluded_by] == ["min_relevance"]


async def test_a_document_whose_title_alone_matches_is_listed_by_its_first_chunk(made: Any) -> None:
    asker: Asker = await made([
        {"id": "titled", "title": "Carry over of leave", "chunks": [("Five days.", None), ("Until March.", None)]},
        {"id": "words", "title": "Notes", "chunks": [("unlike", None), ("carry over and more of it", None)]},
        {"id": "none", "title": "Other", "chunks": [("unlike", None)]},
    ], VECTORS)  # fmt: skip
    collapsed = await asker.ask(QUERY, routes=[TEXT])
    answer = await asker.ask(QUERY, routes=[TEXT], **CHUNKS)
    assert set(chunks(answer)) == {("titled", 0), ("words", 1)}
    assert {hit.id for hit in collapsed.hits} == {"titled", "words"}
    assert {hit.id: hit.text for hit in answer.hits}["titled"] == "Five days."
    for of in (answer, collapsed):
        assert of.routes["text"].total is not None
        assert of.routes["text"].total.value == 2
    told = await why(
        Why.model_validate({"collection": asker.collection.name, "query": QUERY, "routes": [TEXT], "id": "none", **PATIENT, **CHUNKS}),
        collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS,
    )  # fmt: skip
    assert told.routes["text"].note == "none of the query's words stands in it"


MEMORY: dict[str, Any] = {
    "decay": {"hourly_loss": 0.001, "field": "last_accessed_at", "floor": 0}, "fusion": {"method": "additive"}, **CHUNKS,
}  # fmt: skip


async def test_additive_scores_take_each_chunks_own_relevance(made: Any) -> None:
    asker: Asker = await made([
        {"id": "long", "chunks": [("about it", at(0.9)), *((f"part {n}", at(0.2 + n / 1000)) for n in range(19))]},
        {"id": "short", "chunks": [("something else", at(0.6))]},
        {"id": "bare", "salience": 0.1, "chunks": [("carry over", None)]},
    ], VECTORS)  # fmt: skip
    answer = await asker.ask(QUERY, **MEMORY)
    assert chunks(answer)[:2] == [("long", 0), ("short", 0)]
    assert len(answer.hits) == 22
    for hit in answer.hits:
        assert hit.additive is not None
        assert hit.additive["relevance"] == pytest.approx(hit.relevance or 0.0, abs=1e-6)
        assert hit.score == pytest.approx(sum(hit.additive.values()))
    told = {(hit.id, (hit.chunk or {})["number"]): hit.additive for hit in answer.hits}
    assert told["long", 3] == {"relevance": pytest.approx(0.202, abs=1e-6), "salience": 0, "recency": 0}
    assert told["bare", 0] == {"relevance": 0, "salience": pytest.approx(0.1), "recency": 0}


async def test_additive_scores_know_the_chunks_beyond_the_nearest_hundred(made: Any) -> None:
    parts = [(f"part {n}", at(0.9 - n / 1000)) for n in range(150)]
    asker: Asker = await made([{"id": "long", "chunks": [*parts, ("carry over", at(0.25))]}], VECTORS)
    answer = await asker.ask(QUERY, **MEMORY)
    assert len(answer.hits) == CHUNKS_PER_DOCUMENT + 1
    [hit] = [hit for hit in answer.hits if (hit.chunk or {})["number"] == 150]
    assert hit.additive is not None
    assert hit.additive["relevance"] == pytest.approx(0.25, abs=1e-6)
    assert chunks(answer)[-1] == ("long", 150)
