"""Searches, whole, on a real node: fusion and ties, pages, filters, thresholds, stages, batches, degraded answers.

Expected values are recomputed here from ranks and vectors in plain arithmetic.
"""

import asyncio
import difflib
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import pytest

from app import names
from app.answers import Hit, SearchResult
from app.asking import Search
from app.collection import Collection
from app.elastic import BulkAction, Cluster
from app.errors import (
    CursorExpired,
    EmbedderRejected,
    EmbedderUnavailable,
    HalflifeError,
    InvalidRequest,
    PastWindow,
    RerankerFailed,
    Unavailable,
)
from app.filters import compile_filter
from app.planning import id_of
from app.ranking import Profile
from app.reranking import Reranker
from app.search import Caller, search
from app.times import format_instant, from_ms, parse_instant, to_ms
from tests.nodes import StandsBefore, run_once
from tests.searching import (
    DAY,
    NOW,
    NOW_MS,
    Asker,
    Lacking,
    StandIn,
    doors_to,
    drop_collection,
    hashed,
    ids,
    make_collection,
    settle,
    unit,
    write,
)

pytestmark = pytest.mark.node

DIMS = 8
HALVING = {"half_life": "30d"}
TEXT, NEAR = {"kind": "text"}, {"kind": "vector"}

# --- one library of 400 documents ------------------------------------------------------------------------------------

WORDS = [
    "leave",
    "carry",
    "over",
    "holiday",
    "payroll",
    "travel",
    "expense",
    "laptop",
    "badge",
    "parking",
    "visitor",
    "security",
]


def library() -> list[dict[str, Any]]:
    rng = random.Random(7)
    vectors = np.random.default_rng(7).normal(size=(400, DIMS))
    made: list[dict[str, Any]] = []
    for at in range(400):
        words = rng.choices(WORDS, weights=[9, 6, 6, 3, 3, 2, 2, 2, 1, 1, 1, 1], k=rng.randint(3, 12))
        vector = vectors[at] + (0.6 if "leave" in words else 0.0)
        if at % 40 == 7:  # Copies of another document: ties in every route.
            words, vector = made[at - 1]["text"].split(), np.asarray(made[at - 1]["embedding"])
        document: dict[str, Any] = {
            "id": f"doc-{at:03d}",
            "title": " ".join(words[:2]),
            "text": " ".join(words),
            "embedding": [float(x) for x in vector],
            "lang": rng.choice(["en", "zh", "th"]),
            "tags": rng.sample(["draft", "final", "hr", "it"], rng.randint(0, 2)),
            "metadata": {"tenant": rng.choice(["a", "b"]), "year": rng.randint(2018, 2025), "note": rng.choice(["x", "y", None])},
        }  # fmt: skip
        if at % 10:
            age = rng.choice([0, 1, 5, 30, 90, 400, 2000]) * DAY + rng.randint(0, 5) * 3_600_000
            document["creation_time"] = format_instant(from_ms(NOW_MS - age))
        if at % 25 == 3:
            document["evergreen"] = True
        if not document["tags"]:
            del document["tags"]
        made.append(document)
    return made


LIBRARY = library()
BY_ID = {document["id"]: document for document in LIBRARY}
QUERY = "carry over leave"
QUERY_VECTOR = unit([1.0] * DIMS)


@pytest.fixture(scope="module")
def shelf(node_url: str) -> Iterator[Collection]:
    async def make(cluster: Cluster) -> Collection:
        collection = await make_collection(cluster, LIBRARY, dims=DIMS, declared={"year": "long"}, shards=1)
        await settle(cluster, collection)
        return collection

    made = run_once(node_url, make)
    yield made
    run_once(node_url, lambda cluster: drop_collection(cluster, made))


@pytest.fixture
async def asker(cluster: Cluster, shelf: Collection) -> Asker:
    return Asker(cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}))


def timeless(answer: SearchResult) -> str:
    """Return the answer as JSON without the times that it took."""

    def clean(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: clean(value) for key, value in node.items() if key != "took_ms"}
        return [clean(each) for each in node] if isinstance(node, list) else node

    return json.dumps(clean(json.loads(answer.model_dump_json())), ensure_ascii=False)


def created_ms(document: dict[str, Any]) -> int | None:
    return to_ms(parse_instant(document["creation_time"])) if "creation_time" in document else None


def in_order(hits: Sequence[Hit]) -> list[str]:
    """Return the ids as the contract orders them: score, best single rank, newer, id."""

    def key(hit: Hit) -> tuple[Any, ...]:
        best = min(route.rank for route in hit.routes.values() if route.rank)
        at = created_ms(BY_ID[hit.id])
        return (-hit.score, best, at is None, -(at or 0), hit.id)

    return [hit.id for hit in sorted(hits, key=key)]


# --- fusion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["off", HALVING, {**HALVING, "placement": "fused", "floor": 0}], ids=str)
@pytest.mark.parametrize("weights, constant", [((1, 1), 60), ((0.7, 0.3), 60), ((1, 1), 1), ((5, 0.25), 7.5)])
async def test_rrf_is_the_sum_over_the_ranks_told(
    asker: Asker, decay: Any, weights: tuple[float, float], constant: float
) -> None:
    routes = [{**TEXT, "weight": weights[0]}, {**NEAR, "weight": weights[1]}]
    answer = await asker.ask(QUERY, top_k=100, decay=decay, routes=routes, fusion={"rank_constant": constant})
    weight = {"text": weights[0], "vector": weights[1]}
    assert len(answer.hits) == 100
    for hit in answer.hits:
        terms = []
        for name, route in hit.routes.items():
            assert route.rank is not None
            terms.append(weight[name] / (constant + route.rank))
            assert route.contribution == terms[-1]
        assert hit.fused_score == pytest.approx(sum(terms), rel=1e-15)
        factor = hit.decay if isinstance(decay, dict) and decay.get("placement") == "fused" else 1.0
        assert factor is not None
        assert hit.score == pytest.approx(hit.fused_score * factor, rel=1e-12)
    assert ids(answer) == in_order(answer.hits)


async def test_route_ranks_follow_score_then_age_then_id(asker: Asker) -> None:
    answer = await asker.ask(QUERY, top_k=300, routes=[TEXT], fusion={"window": 400}, decay="off")
    scores = [hit.routes["text"].score for hit in answer.hits]
    assert len(set(scores)) < len(scores), "the library has ties"
    assert ids(answer) == in_order(answer.hits)
    assert [hit.routes["text"].rank for hit in answer.hits] == list(range(1, len(answer.hits) + 1))


async def test_rrf_bc12_sums_ties_and_weights(made: Any) -> None:
    # Two routes of words: r1 finds [X, a, Y], r2 finds [b, c, Y].
    documents = [
        {"id": "X", "text": "one one one one", "creation_time": "2025-01-01"},
        {"id": "a", "text": "one one pad", "creation_time": "2025-01-02"},
        {"id": "Y", "text": "one two pad pad pad pad", "creation_time": "2025-01-03"},
        {"id": "b", "text": "two two two two", "creation_time": "2025-01-01"},
        {"id": "c", "text": "two two pad", "creation_time": "2025-01-02"},
    ]
    asker = await made(documents, {})
    routes = [{**TEXT, "name": "r1", "query": "one"}, {**TEXT, "name": "r2", "query": "two"}]
    rrf = {"method": "rrf"}
    first = await asker.ask("q", routes=routes, fusion=rrf)
    assert {hit.id: {name: route.rank for name, route in hit.routes.items()} for hit in first.hits} == {
        "X": {"r1": 1}, "a": {"r1": 2}, "Y": {"r1": 3, "r2": 3}, "b": {"r2": 1}, "c": {"r2": 2},
    }  # fmt: skip
    assert [(hit.id, hit.score) for hit in first.hits] == [
        ("Y", pytest.approx(2 / 63)),  # 0.0317460317
        ("X", 1 / 61),  # 0.0163934426; X and b: same best rank and date, then id
        ("b", 1 / 61),
        ("a", 1 / 62),  # 0.0161290323
        ("c", 1 / 62),
    ]
    for at in range(20):
        shuffled = routes if at % 2 else routes[::-1]
        assert ids(await asker.ask("q", routes=shuffled, fusion=rrf)) == ["Y", "X", "b", "a", "c"]
    weighted = [
        {**TEXT, "name": "r1", "query": "one", "weight": 0.7}, {**TEXT, "name": "r2", "query": "one pad", "weight": 0.3},
    ]  # fmt: skip
    [x] = [hit for hit in (await asker.ask("q", routes=weighted, fusion=rrf)).hits if hit.id == "X"]
    ranks = (x.routes["r1"].rank, x.routes["r2"].rank)
    assert x.score == pytest.approx(0.7 / (60 + ranks[0]) + 0.3 / (60 + ranks[1]))
    assert pytest.approx(0.0163141195) == 0.7 / 61 + 0.3 / 62


async def test_ties_newer_first_then_undated_last_then_id(made: Any) -> None:
    same = {"text": "leave", "embedding": [1, 0, 0]}
    documents = [
        {"id": "old", **same, "creation_time": "2020-01-01"},
        {"id": "new", **same, "creation_time": "2025-01-01"},
        {"id": "b-undated", **same},
        {"id": "a-undated", **same},
        {"id": "z-same-day", **same, "creation_time": "2024-01-01"},
        {"id": "a-same-day", **same, "creation_time": "2024-01-01"},
        {"id": "before-1970", **same, "creation_time": "1960-01-01"},
    ]
    asker = await made(documents, {"leave": [1, 0, 0]})
    wanted = ["new", "a-same-day", "z-same-day", "old", "before-1970", "a-undated", "b-undated"]
    for routes in ([TEXT], [NEAR], [TEXT, NEAR], [NEAR, TEXT]):
        answer = await asker.ask("leave", routes=routes)
        assert ids(answer) == wanted
        for hit in answer.hits:
            assert len({route.rank for route in hit.routes.values()}) == 1
    # As fused factors: all the same, so the ties decide again.
    fused = await asker.ask("leave", decay={"hourly_loss": 0, "missing": 1, "placement": "fused"})
    assert ids(fused) == wanted


async def test_threshold_bc18_a_weight_of_zero_adds_nothing(asker: Asker) -> None:
    alone = await asker.ask(QUERY, top_k=50, routes=[TEXT])
    silent = await asker.ask(QUERY, top_k=50, routes=[TEXT, {**NEAR, "weight": 0}])
    assert ids(silent) == ids(alone)
    assert [hit.score for hit in silent.hits] == [hit.score for hit in alone.hits]
    assert silent.routes["vector"].status == "ok"
    nothing = await asker.ask(QUERY, routes=[{**TEXT, "weight": 0}, {**NEAR, "weight": 0}])
    assert nothing.hits == []


async def test_the_window_is_how_many_ranks_count(asker: Asker) -> None:
    whole = await asker.ask(QUERY, top_k=400, fusion={"window": 400})
    for window in (1, 5, 30):
        answer = await asker.ask(QUERY, top_k=window, fusion={"window": window})
        ranks = {name: [] for name in ("text", "vector")}  # type: dict[str, list[int]]
        for hit in answer.hits:
            for name, route in hit.routes.items():
                assert route.rank is not None
                ranks[name].append(route.rank)
        assert all(rank <= window for found in ranks.values() for rank in found)
        assert {
            hit.id
            for hit in whole.hits
            if hit.routes.get("text") and (hit.routes["text"].rank or 0) <= window
        } >= {hit.id for hit in answer.hits if "text" in hit.routes}


@pytest.mark.parametrize("normalizer", ["zscore", "minmax"])
async def test_linear_fusion_is_the_weighted_sum_of_normalised_scores(asker: Asker, normalizer: str) -> None:
    answer = await asker.ask(
        QUERY, top_k=100, routes=[{**TEXT, "weight": 2}, NEAR], fusion={"method": "linear", "normalizer": normalizer},
        decay=HALVING,
    )  # fmt: skip
    everything = [*answer.hits]
    for name in ("text", "vector"):
        shown = [route for hit in everything if (route := hit.routes.get(name)) and route.rank]
        assert (
            max(route.normalized or -9 for route in shown)
            == max(shown, key=lambda route: route.decayed_score or 0).normalized
        )
    for hit in everything:
        terms = {name: route.contribution for name, route in hit.routes.items()}
        assert all(
            terms[name] == pytest.approx((2 if name == "text" else 1) * (route.normalized or 0))
            for name, route in hit.routes.items()
        )
    assert [hit.score for hit in everything] == sorted((hit.score for hit in everything), reverse=True)


@pytest.mark.parametrize("decayed", ["off", HALVING])
async def test_adaptive_fusion_tells_each_routes_confidence_and_weight(asker: Asker, decayed: Any) -> None:
    fusion = {"method": "adaptive"}
    answer = await asker.ask(
        QUERY, top_k=100, routes=[{**TEXT, "weight": 2}, NEAR], fusion=fusion, decay=decayed
    )
    weights = {name: route.weight or 0.0 for name, route in answer.routes.items()}
    assert sum(weights.values()) == pytest.approx(1)
    assert all(0 < (route.confidence or 0) <= 1 for route in answer.routes.values())
    for hit in answer.hits:
        for name, route in hit.routes.items():
            assert route.contribution == pytest.approx(weights[name] * (route.normalized or 0))
        assert hit.score == pytest.approx(sum(route.contribution for route in hit.routes.values()))
    assert [hit.score for hit in answer.hits] == sorted((hit.score for hit in answer.hits), reverse=True)

    near = await asker.ask(QUERY, top_k=100, routes=[NEAR], fusion=fusion, decay=decayed)
    cosines = [2 * (hit.routes["vector"].score or 0) - 1 for hit in near.hits]
    mean = sum(cosines) / len(cosines)
    assert near.routes["vector"].weight == 1
    # Read from cosines before decay, and the same beside another route.
    assert near.routes["vector"].confidence == pytest.approx((max(cosines) - mean) / (1 - mean), abs=1e-5)
    assert near.routes["vector"].confidence == answer.routes["vector"].confidence


# --- the head, the same bytes, pages ---------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay in the routes": {"decay": HALVING},
    "adaptive": {"decay": HALVING, "fusion": {"method": "adaptive"}},
    "decay of the fused score": {"decay": {**HALVING, "placement": "fused", "floor": 0.1}},
    "near duplicates, newer kept": {"dedup": {"threshold": 0.9, "keep": "newer"}},
    "near duplicates, higher kept": {"dedup": {"threshold": 0.9}},
    "mmr": {"mmr": {"lambda": 0.5, "candidates": 300}},
    "chunks": {"collapse": False},
    "linear": {"fusion": {"method": "linear"}},
    "additive": {"fusion": {"method": "additive"}, "decay": {"hourly_loss": 0.001}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
async def test_top_k_never_changes_the_head(exact: Asker, shape: dict[str, Any]) -> None:
    answers = await exact.batch(*({"query": QUERY, "top_k": k, **shape} for k in (5, 10, 50, 100, 150, 300)))
    short: list[Any] = []
    for answer, size in zip(answers, (5, 10, 50, 100, 150, 300), strict=True):
        assert isinstance(answer, SearchResult), answer
        rows = [(hit.id, hit.chunk, hit.score, hit.decay) for hit in answer.hits]
        assert rows[: len(short)] == short
        assert len(rows) == size or size == 300
        scores = [hit.score for hit in answer.hits]
        if "mmr" not in shape and "dedup" not in shape:
            assert scores == sorted(scores, reverse=True)
        assert len({(hit.id, str(hit.chunk)) for hit in answer.hits}) == len(rows)
        short = rows
    assert len(short) > 150


COARSE = [{**each, "embedding": [round(64 * x) / 64 for x in unit(each["embedding"])]} for each in LIBRARY]
DYADIC: dict[str, Any] = {
    "dims": DIMS, "declared": {"year": "long"}, "similarity": "max_inner_product", "normalize": False
}  # fmt: skip
HALVES = {
    QUERY: [0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    "holiday payroll": [0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0],
    "travel expense": [0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5],
}


@pytest.fixture(scope="module")
def dyadic(node_url: str) -> Iterator[Collection]:
    """The library with vectors whose products are exact in 32 bits, in whatever order they are summed.

    Other cosines differ in their last digit before and after the node's JVM has compiled the vector loop (measured:
    83 of 400 scores changed at the 98th search), which is nothing that a service above it can mend.
    """

    async def make(cluster: Cluster) -> Collection:
        collection = await make_collection(cluster, COARSE, **DYADIC)
        await settle(cluster, collection)
        return collection

    made = run_once(node_url, make)
    yield made
    run_once(node_url, lambda cluster: drop_collection(cluster, made))


@pytest.fixture
async def exact(cluster: Cluster, dyadic: Collection) -> Asker:
    """Asks where two searches score alike to the last digit."""
    return Asker(cluster, dyadic, StandIn(dims=DIMS, vectors=HALVES))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
async def test_the_same_request_gives_the_same_bytes(exact: Asker, shape: dict[str, Any]) -> None:
    request = {"query": QUERY, "explain": True, "highlight": not shape, **shape}
    first = await exact.ask(**request)
    told = {timeless(first)}
    together = await exact.batch(*[request] * (6 if shape else 14))
    told |= {timeless(each) for each in together if isinstance(each, SearchResult)}
    assert not [each for each in together if isinstance(each, HalflifeError)]
    backwards = await exact.ask(**{**request, "routes": [NEAR, TEXT]})
    for _ in range(3 if shape else 5):
        told.add(timeless(await exact.ask(**request)))
    first_told, *others = (re.split(r"(?<=,) ", each) for each in sorted(told))
    assert not others, list(difflib.unified_diff(first_told, others[0]))
    assert ids(backwards) == ids(first), "the order of the routes is no part of the result"


async def rewrite(cluster: Cluster, collection: Collection, version: int) -> None:
    """Change documents under a search's feet: other words, other vectors, deletions, additions."""
    rng = random.Random(version)
    changed = [
        {**document, "text": "leave " * rng.randint(1, 9), "title": "carry over leave", "embedding": QUERY_VECTOR, "tags": ["x"]}
        for document in rng.sample(LIBRARY, 60)
    ]  # fmt: skip
    changed += [
        {"id": f"new-{version}-{at}", "text": QUERY, "title": QUERY, "embedding": QUERY_VECTOR}
        for at in range(20)
    ]
    await write(cluster, collection, changed, version=version * 10)
    gone = [
        BulkAction(names.write_alias(collection.name, 1), each["id"], version * 10 + 1, {"document_id": each["id"], "deleted": True, "indexed_at": NOW})
        for each in rng.sample(LIBRARY, 40)
    ]  # fmt: skip
    await cluster.bulk(gone, refresh="true", timeout_s=60)


@pytest.mark.parametrize(
    "shape",
    [{}, {"decay": HALVING}, {"mmr": {"lambda": 0.3}, "filter": {"lang": "en"}}, {"dedup": {"threshold": 0.9, "keep": "newer"}}, {"collapse": False}],
    ids=str,
)  # fmt: skip
async def test_the_union_of_pages_is_one_long_page_while_documents_change(
    cluster: Cluster, made: Any, shape: dict[str, Any]
) -> None:
    asker: Asker = await made(COARSE, HALVES, **DYADIC)
    await settle(cluster, asker.collection)
    one = await asker.ask(QUERY, top_k=100, **shape)
    page = await asker.ask(QUERY, top_k=9, paging=True, **shape)
    rows = [hit.model_dump() for hit in page.hits]
    for version in range(1, 40):
        assert page.origin == one.origin
        if page.cursor is None or len(rows) >= 100:
            break
        if version <= 4:
            await rewrite(cluster, asker.collection, version)
        # A cursor is good at a later clock: the origin is its own.
        page = await asker.page(page.cursor, now_ms=NOW_MS + 60_000)
        assert page.hits
        rows += [hit.model_dump() for hit in page.hits]
    wanted = [hit.model_dump() for hit in one.hits]
    assert len(wanted) > 30
    assert rows[: len(wanted)] == wanted
    keys = [(row["id"], str(row["chunk"])) for row in rows]
    assert len(set(keys)) == len(keys)
    # What is there now is something else.
    assert ids(await asker.ask(QUERY, top_k=9, **shape)) != [row["id"] for row in rows[:9]]


async def test_the_end_of_the_window_ends_the_pages_and_says_so(asker: Asker) -> None:
    page = await asker.ask(QUERY, top_k=50, paging=True, routes=[TEXT], fusion={"window": 60})
    assert page.cursor is not None
    assert page.warnings == []
    page = await asker.page(page.cursor)
    assert len(page.hits) == 10
    assert page.cursor is None
    [warning] = page.warnings
    assert "window of 60" in warning
    assert "fusion.window" in warning


async def test_a_page_longer_than_the_window_ends_where_its_longest_lists_end(asker: Asker) -> None:
    everything = await asker.ask(QUERY, top_k=1000, paging=True)
    assert (len(everything.hits), everything.cursor, everything.warnings) == (400, None, [])
    head, tail = everything.hits[:100], everything.hits[-1]
    assert max(part.rank or 0 for part in tail.routes.values()) > 100
    assert tail.score <= min(hit.score for hit in head)
    page = await asker.ask(QUERY, top_k=150, paging=True, routes=[TEXT])
    assert page.warnings == []
    assert page.cursor is not None
    page = await asker.page(page.cursor)
    assert (len(page.hits), page.cursor) == (50, None)
    [warning] = page.warnings
    assert "window of 200" in warning


async def test_the_last_page_has_no_cursor(asker: Asker) -> None:
    page = await asker.ask(QUERY, top_k=300, paging=True, fusion={"window": 400})
    pages = 1
    seen = list(page.hits)
    while page.cursor is not None:
        page = await asker.page(page.cursor)
        seen += page.hits
        pages += 1
    assert pages == 2
    assert len(seen) == 400 == len({hit.id for hit in seen})
    small = await asker.ask(QUERY, paging=True, filter={"id": ["doc-001", "doc-002"]})
    assert small.cursor is None


async def test_a_lost_point_in_time_is_told_apart(cluster: Cluster, asker: Asker) -> None:
    page = await asker.ask(QUERY, paging=True)
    assert page.cursor is not None
    from app.cursor import unseal

    payload = unseal(page.cursor, secrets=asker.doors.cursor_secrets, now_ms=NOW_MS, kind="search", caller="")
    assert payload.pit_id is not None
    await cluster.close_pit(payload.pit_id)
    with pytest.raises(CursorExpired):
        await asker.page(page.cursor)


class Losing(StandsBefore):
    """A cluster that loses the points in time of the chosen requests just before they are asked."""

    def __init__(self, cluster: Cluster, at: Sequence[int]) -> None:
        super().__init__(cluster)
        self.at = at
        self.asked = 0

    async def msearch(self, searches: Any, **options: Any) -> Any:
        if self.asked in self.at:
            for pit in {body["pit"]["id"] for _, body in searches}:
                await self.cluster.close_pit(pit)
        self.asked += 1
        return await self.cluster.msearch(searches, **options)


@pytest.mark.parametrize("at", [[0], [1]], ids=["routes", "documents"])
async def test_a_first_page_outlives_its_point_in_time(exact: Asker, at: list[int]) -> None:
    wanted = await exact.ask(QUERY, paging=True)
    exact.doors = replace(exact.doors, cluster=cast(Cluster, Losing(exact.cluster, at)))
    found = await exact.ask(QUERY, paging=True)
    assert [hit.model_dump() for hit in found.hits] == [hit.model_dump() for hit in wanted.hits]
    assert not found.degraded
    assert found.warnings == wanted.warnings
    assert found.cursor is not None
    assert (await exact.page(found.cursor)).hits


async def test_a_point_in_time_that_is_lost_again_is_told(asker: Asker) -> None:
    losing = Losing(asker.cluster, range(99))
    asker.doors = replace(asker.doors, cluster=cast(Cluster, losing))
    with pytest.raises(Unavailable):
        await asker.ask(QUERY, paging=True)
    assert losing.asked == 2


async def test_the_pages_of_a_batch_end_each_by_itself(asker: Asker) -> None:
    short = {"query": QUERY, "top_k": 2, "filter": {"id": ["doc-001", "doc-002", "doc-003"]}, "paging": True}
    long = {"query": QUERY, "top_k": 3, "paging": True}
    first, other = await asker.batch(short, long)
    assert isinstance(first, SearchResult)
    assert isinstance(other, SearchResult)
    assert first.cursor is not None
    assert other.cursor is not None
    last = await asker.page(first.cursor)
    assert (len(last.hits), last.cursor) == (1, None)
    # What is closed is closed in the background.
    await asyncio.gather(*asker.cluster._background)
    more = await asker.page(other.cursor)
    assert [*ids(other), *ids(more)] == ids(await asker.ask(QUERY, top_k=6))
    # The answer of a last page may be lost on its way, and be asked for again.
    assert ids(await asker.page(first.cursor)) == ids(last)


async def test_a_degraded_page_has_no_cursor(cluster: Cluster, shelf: Collection) -> None:
    embedder = StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}, error=EmbedderUnavailable("asleep"))
    reranker = Scores(lambda text: 0.5, RerankerFailed("answered nonsense"))
    asker = Asker(cluster, shelf, embedder, reranker=reranker)
    for options in ({}, {"routes": [TEXT], "rerank": {}}):
        answer = await asker.ask(QUERY, paging=True, **options)
        assert answer.degraded
        assert len(answer.hits) == 10
        # The page after it would be the second of another order as soon as all is well.
        assert answer.cursor is None
        assert any(warning.startswith("no cursor: what failed here") for warning in answer.warnings)
    # Without a further page there is nothing to tell.
    whole = await asker.ask(QUERY, paging=True, filter={"id": ["doc-001"]})
    assert whole.degraded
    assert not any("no cursor" in warning for warning in whole.warnings)
    embedder.error = None
    assert (await asker.ask(QUERY, paging=True)).cursor is not None


async def test_a_page_goes_on_under_a_profile_whose_window_is_shorter(asker: Asker) -> None:
    profile = Profile.model_validate({"decay": "off", "fusion": {"window": 5, "method": "rrf"}})
    asker.collection = asker.collection.model_copy(
        update={"profiles": {"p": profile}, "default_profile": "p"}
    )
    own = [{"kind": "text", "decay": {"half_life": "400d"}}, {"kind": "vector"}]
    for options in ({}, {"routes": own}):
        first = await asker.ask(QUERY, top_k=6, paging=True, **options)
        assert first.cursor is not None
        second = await asker.page(first.cursor)
        assert len({*ids(first), *ids(second)}) == len([*first.hits, *second.hits]) > 6


ONE_BY_ONE = {"query_vector": QUERY_VECTOR}
"""Nothing is to be embedded: one request brings all lists, the next one what is read of them."""


async def test_what_a_failed_shard_could_not_measure_is_left_out_and_told(asker: Asker) -> None:
    memory = {
        "decay": {"hourly_loss": 0.001, "floor": 0},
        "fusion": {"method": "additive"},
        "top_k": 60,
        **ONE_BY_ONE,
    }
    whole = await asker.ask(QUERY, **memory)
    asker.doors = replace(asker.doors, cluster=cast(Cluster, Lacking(asker.cluster, 1)))
    answer = await asker.ask(QUERY, **memory)
    assert answer.degraded
    assert any(
        "could not be measured" in warning and "disk on fire" in warning for warning in answer.warnings
    )
    scores = {hit.id: hit.score for hit in whole.hits}
    assert all(hit.score == scores.get(hit.id, hit.score) for hit in answer.hits)
    assert len(answer.hits) > 1
    both = set(ids(answer)) & set(ids(whole))
    assert [name for name in ids(whole) if name in both] == [name for name in ids(answer) if name in both]
    assert all(
        hit.additive and hit.additive["relevance"] + hit.additive["recency"] > 0 for hit in answer.hits
    )
    asker.doors = replace(asker.doors, cluster=cast(Cluster, Lacking(asker.cluster, 1)))
    with pytest.raises(Unavailable, match="strict"):
        await asker.ask(QUERY, strict=True, **memory)


async def test_a_failed_shard_in_the_lists_of_a_long_page_is_told(asker: Asker) -> None:
    assert not (await asker.ask(QUERY, top_k=300)).degraded
    lacking = Lacking(asker.cluster, 0, larger_than=100)
    asker.doors = replace(asker.doors, cluster=cast(Cluster, lacking))
    answer = await asker.ask(QUERY, top_k=300, **ONE_BY_ONE)
    assert answer.degraded
    assert any("is partial: 1 of 2 shards failed" in warning for warning in answer.warnings)


@pytest.mark.parametrize(
    "options", [{"mmr": {}}, {"mmr": {}, "fold_superseded": True}, {"dedup": {}}, {"rerank": {}}, {"mmr": {}, "dedup": {}}], ids=str
)  # fmt: skip
async def test_stages_do_without_the_documents_of_a_failed_shard(
    cluster: Cluster, shelf: Collection, options: dict[str, Any]
) -> None:
    embedder = StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR})
    asker = Asker(cluster, shelf, embedder, reranker=Scores(lambda text: 1 / (1 + len(text))))
    asker.doors = replace(asker.doors, cluster=cast(Cluster, Lacking(cluster, 1)))
    answer = await asker.ask(QUERY, fusion={"window": 300}, **ONE_BY_ONE, **options)
    assert answer.hits
    assert answer.degraded


async def test_a_page_keeps_the_whole_request(exact: Asker) -> None:
    options: dict[str, Any] = {
        "top_k": 3, "mmr": {"lambda": 0.25}, "decay": {"rate": "0.02/h", "offset": "36h"}, "highlight": True,
        "filter": {"lang": ["en", "zh"]}, "fields": ["title", "tags"], "min_relevance": 0.2, "as_of": "2025-01-30T12:00:00+08:00",
    }  # fmt: skip
    one = await exact.ask(QUERY, **{**options, "top_k": 6})
    page = await exact.ask(QUERY, paging=True, **options)
    assert page.cursor is not None
    second = await exact.page(page.cursor, now_ms=NOW_MS + 1)
    assert [hit.model_dump() for hit in [*page.hits, *second.hits]] == [hit.model_dump() for hit in one.hits]
    assert second.origin == parse_instant("2025-01-30T04:00:00Z")


# --- filters ---------------------------------------------------------------------------------------------------------

Predicate = Callable[[dict[str, Any]], bool]
PRIMITIVES: list[tuple[dict[str, Any], Predicate]] = [
    ({"lang": "en"}, lambda d: d["lang"] == "en"),
    ({"lang": ["zh", "th"]}, lambda d: d["lang"] in ("zh", "th")),
    ({"lang": {"ne": "en"}}, lambda d: d["lang"] != "en"),
    ({"tags": "draft"}, lambda d: "draft" in d.get("tags", [])),
    ({"tags": {"exists": False}}, lambda d: "tags" not in d),
    ({"tenant": "a"}, lambda d: d["metadata"]["tenant"] == "a"),
    ({"metadata.tenant": {"in": ["b"]}}, lambda d: d["metadata"]["tenant"] == "b"),
    ({"note": "x"}, lambda d: d["metadata"]["note"] == "x"),
    ({"year": {"gte": 2021, "lt": 2024}}, lambda d: 2021 <= d["metadata"]["year"] < 2024),
    ({"year": 2020}, lambda d: d["metadata"]["year"] == 2020),
    ({"creation_time": {"gte": "2025-01-01"}}, lambda d: "creation_time" in d and d["creation_time"] >= "2025-01-01"),
    ({"creation_time": {"exists": False}}, lambda d: "creation_time" not in d),
    ({"evergreen": True}, lambda d: d.get("evergreen", False)),
    ({"id": ["doc-001", "doc-017", "doc-100", "doc-333"]}, lambda d: d["id"] in ("doc-001", "doc-017", "doc-100", "doc-333")),
]  # fmt: skip


def random_filter(rng: random.Random, depth: int = 2) -> tuple[dict[str, Any], Predicate]:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(PRIMITIVES)
    kind = rng.choice(["and", "or", "not"])
    if kind == "not":
        inner, holds = random_filter(rng, depth - 1)
        return {"not": inner}, lambda d: not holds(d)
    parts = [random_filter(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    every = all if kind == "and" else any
    return {kind: [each for each, _ in parts]}, lambda d: every(holds(d) for _, holds in parts)


STAGES: list[dict[str, Any]] = [
    {},
    {"decay": HALVING},
    {"decay": {**HALVING, "placement": "fused"}},
    {"mmr": {"lambda": 0.4}},
    {"dedup": {"threshold": 0.5, "keep": "newer"}},
    {"explain": True, "fusion": {"window": 10}},
    {"min_relevance": 0.3},
    {"collapse": False},
    {"routes": [{"kind": "fresh_text"}, {"kind": "fresh_vector", "window": "1000d"}, NEAR]},
    {"top_k": 150},
    {"fusion": {"method": "additive"}, "decay": {"hourly_loss": 0.001}},
    {"routes": [{**NEAR, "filter": {"lang": "en"}}, {**TEXT, "filter": {"tags": "hr"}}]},
]


async def test_no_filter_leaks_anywhere(asker: Asker) -> None:
    rng = random.Random(11)
    forced = compile_filter({"tenant": "a"}, declared={})
    for _ in range(6):
        cases = [(*random_filter(rng), stage) for stage in STAGES for _ in range(3)]
        requests = [{"query": QUERY, "top_k": 60 if "fusion" not in stage else 10, "filter": given, **stage} for given, _, stage in cases]  # fmt: skip
        locked = rng.random() < 0.5
        answers = await asker.batch(*requests, forced=forced if locked else ())
        for (given, holds, stage), answer in zip(cases, answers, strict=True):
            assert isinstance(answer, SearchResult), (given, answer)
            allowed = {
                d["id"] for d in LIBRARY if holds(d) and (not locked or d["metadata"]["tenant"] == "a")
            }
            told = {hit.id for hit in answer.hits} | {
                i for hit in answer.hits for i in hit.near_duplicates or []
            }
            assert told <= allowed, (given, stage, told - allowed)
            for name, status in answer.routes.items():
                assert status.total is not None
                assert status.total.value <= len(allowed), (given, stage, name)
            if stage in ({}, {"decay": HALVING}) and len(allowed) <= 60:
                # Pre-filters: whatever passes is found by its vector, however far from it.
                assert {hit.id for hit in answer.hits} == allowed, (given, stage)
                assert answer.routes["vector"].total is not None
                assert answer.routes["vector"].total.value == len(allowed)


async def test_knn_params_bc28_a_hit_of_score_zero_under_a_filter(made: Any) -> None:
    documents = [
        {"id": "x", "text": "one", "embedding": [1, 0, 0], "metadata": {"tenant": "a"}},
        {"id": "x2", "text": "one", "embedding": [2, 0, 0], "metadata": {"tenant": "a"}},
        {"id": "nx", "text": "one", "embedding": [-1, 0, 0], "metadata": {"tenant": "b"}},
    ]
    seen: list[list[str]] = []

    class Reranker:
        scale = "probability"

        async def rerank(self, query: str, texts: Sequence[str], *, deadline_s: float) -> list[float]:
            seen.append(list(texts))
            return [0.5] * len(texts)

    asker: Asker = await made(documents, {"one": [1, 0, 0]}, reranker=Reranker())
    answer = await asker.ask("one", routes=[NEAR], top_k=2, filter={"tenant": "b"}, fusion={"window": 2})
    assert [(hit.id, hit.routes["vector"].score) for hit in answer.hits] == [("nx", 0.0)]
    assert answer.hits[0].relevance == 0.0
    stages: list[dict[str, Any]] = [
        {},
        {"mmr": {}},
        {"dedup": {}},
        {"rerank": {}},
        {"explain": True},
        {"collapse": False},
    ]
    for options in stages:
        assert ids(await asker.ask("one", filter={"tenant": "b"}, **options)) == ["nx"]
    assert seen == [["one"]]


async def test_as_of_expiry_and_valid_time(made: Any) -> None:
    same = {"text": "leave", "embedding": [1, 0, 0]}
    documents = [
        {"id": "now", **same, "creation_time": "2025-01-31T00:00:00Z"},
        {"id": "tomorrow", **same, "creation_time": "2025-02-01"},
        {"id": "undated", **same},
        {"id": "expired", **same, "expires_at": "2025-01-31T00:00:00Z"},
        {"id": "expires-later", **same, "expires_at": "2025-01-31T00:00:00.001Z"},
        {"id": "not-yet", **same, "start_date": "2025-02-01"},
        {"id": "just-begun", **same, "start_date": "2025-01-31"},
        {"id": "over", **same, "end_date": "2025-01-31"},
        {"id": "not-over", **same, "end_date": "2025-02-01"},
    ]
    asker: Asker = await made(documents, {"leave": [1, 0, 0]})
    always = {"now", "undated", "expires-later", "just-begun", "not-over"}
    assert set(ids(await asker.ask("leave"))) == always | {"tomorrow"}
    assert set(ids(await asker.ask("leave", as_of=NOW))) == always
    assert set(ids(await asker.ask("leave", as_of="2025-02-01"))) == {
        "now",
        "undated",
        "tomorrow",
        "not-yet",
        "just-begun",
    }
    assert set(ids(await asker.ask("leave", valid_time="any"))) == always | {"tomorrow", "not-yet", "over"}
    for route in ("text", "vector"):
        assert set(ids(await asker.ask("leave", routes=[{"kind": route}], as_of=NOW))) == always


# --- least relevance -------------------------------------------------------------------------------------------------

COMPASS: dict[str, list[float]] = {
    "x": [1, 0, 0],
    "exact": [0.75, math.sqrt(1 - 0.75**2), 0],
    "xy": [1, 1, 0],
    "half": [0.5, math.sqrt(0.75), 0],
    "odd": [0.3, 0.2, 0.7],
    "y": [0, 1, 0],
    "minus": [-0.1, 1, 0],
    "nx": [-1, 0, 0],
}
COSINES = {name: vector[0] / math.hypot(*vector) for name, vector in COMPASS.items()}


@pytest.mark.parametrize("measure", ["cosine", "dot_product", "l2_norm", "max_inner_product"])
async def test_threshold_bc17_bc18_the_same_cosine_for_every_measure(made: Any, measure: str) -> None:
    documents = [{"id": name, "text": "leave", "embedding": vector} for name, vector in COMPASS.items()]
    asker: Asker = await made(documents, {"leave": [1, 0, 0]}, similarity=measure)
    limits = [0, 0.25, 0.5, 0.75, math.sqrt(0.5), COSINES["odd"], 0.7, 1, None]
    for limit in limits:
        wanted = [name for name, cosine in COSINES.items() if limit is None or cosine >= limit - 1e-9]
        for routes in ([NEAR], [TEXT], [TEXT, NEAR], [{"kind": "text"}, {"kind": "vector", "decay": "off"}]):
            answer = await asker.ask("leave", routes=routes, min_relevance=limit, decay={"half_life": "30d"})
            assert sorted(ids(answer)) == sorted(wanted), (limit, routes)
            for hit in answer.hits:
                # Words alone, without a threshold: nothing was embedded.
                known = routes != [TEXT] or limit is not None
                assert hit.relevance == (
                    pytest.approx(max(0.0, COSINES[hit.id]), abs=1e-6) if known else None
                )
            if routes == [NEAR]:
                assert ids(answer) == sorted(wanted, key=lambda name: -COSINES[name])


async def test_threshold_bc17_cosine_keeps_x_only(made: Any) -> None:
    documents = [{"id": name, "text": name, "embedding": COMPASS[name]} for name in ("x", "xy", "y", "nx")]
    scores = {"x": 0.96, "xy": 0.84, "y": 0.1, "nx": 0.02}

    class Reranker:
        scale = "probability"

        async def rerank(self, query: str, texts: Sequence[str], *, deadline_s: float) -> list[float]:
            return [scores[text] for text in texts]

    asker: Asker = await made(documents, {"q": [1, 0, 0]}, reranker=Reranker())
    assert ids(await asker.ask("q", min_relevance=0.75)) == ["x"]
    assert ids(await asker.ask("q", min_relevance=0)) == ["x", "xy", "y"]
    assert ids(await asker.ask("q", min_relevance=None)) == ["x", "xy", "y", "nx"]
    answer = await asker.ask("q", rerank={"min_score": 0.6})
    assert [(hit.id, hit.rerank_score, hit.score) for hit in answer.hits] == [
        ("x", 0.96, 0.96),
        ("xy", 0.84, 0.84),
    ]
    assert ids(await asker.ask("q", rerank={"min_score": 0.84})) == ["x", "xy"], "boundaries are inclusive"


async def test_query_vectors_of_any_length_mean_the_same(made: Any) -> None:
    documents = [{"id": name, "text": "leave", "embedding": vector} for name, vector in COMPASS.items()]
    for measure in ("cosine", "dot_product", "l2_norm", "max_inner_product"):
        asker: Asker = await made(documents, {"leave": [3, 4, 0]}, similarity=measure)
        plain = await asker.ask("leave", routes=[NEAR])
        given = await asker.ask("leave", routes=[NEAR], query_vector=[300, 400, 0])
        assert not plain.degraded
        assert [(hit.id, hit.relevance) for hit in given.hits] == [
            (hit.id, hit.relevance) for hit in plain.hits
        ]
        for hit in plain.hits:
            v = COMPASS[hit.id]
            assert hit.relevance == pytest.approx(
                max(0.0, (0.6 * v[0] + 0.8 * v[1]) / math.hypot(*v)), abs=1e-6
            )


# --- stages ----------------------------------------------------------------------------------------------------------


async def test_dedup_bc14_equal_texts_once_each_with_its_own_metadata(made: Any) -> None:
    long = "P" * 200
    documents = [
        {"id": "A", "text": "Refund within 30 days", "embedding": [1, 0, 0], "metadata": {"file": "a.txt"}},
        {"id": "B", "text": "Refund within 30 days", "embedding": [1, 0, 0], "metadata": {"file": "b.txt"}},
        {"id": "C", "text": f"{long} net 10", "embedding": [0, 1, 0]},
        {"id": "D", "text": f"{long} net 90", "embedding": [0, 0.5, 1]},
        {"id": "E", "text": "refund of travel", "embedding": [0.2, 0, 1]},
    ]
    asker: Asker = await made(documents, {"refund": [1, 0, 0], "net": [0, 1, 0]})
    off = await asker.ask("refund", routes=[TEXT])
    assert {hit.id: hit.metadata for hit in off.hits if hit.id in "AB"} == {
        "A": {"file": "a.txt"}, "B": {"file": "b.txt"},
    }  # fmt: skip
    on = await asker.ask("refund", top_k=2, dedup={"threshold": 1})
    assert ids(on) == ["A", "E"], "refilled up to top_k"
    assert on.hits[0].metadata == {"file": "a.txt"}
    assert on.hits[0].near_duplicates == ["B"]
    assert {"C", "D"} <= set(ids(await asker.ask("net", routes=[TEXT], dedup={})))


async def test_near_duplicates_by_stored_vectors_keep_the_newer_if_asked(made: Any) -> None:
    documents = [
        {"id": "old", "text": "leave rule", "embedding": [1, 0, 0], "creation_time": "2020-01-01"},
        {"id": "new", "text": "leave rules anew", "embedding": [0.99, 0.1, 0], "creation_time": "2025-01-01"},
        {"id": "other", "text": "leave", "embedding": [0, 1, 0], "creation_time": "2024-01-01"},
    ]
    asker: Asker = await made(documents, {"leave rule": [1, 0, 0]})
    for keep, kept, gone in (("higher", "old", "new"), ("newer", "new", "old")):
        answer = await asker.ask("leave rule", dedup={"threshold": 0.95, "keep": keep})
        assert ids(answer) == [kept, "other"]
        assert answer.hits[0].near_duplicates == [gone]
    assert len(ids(await asker.ask("leave rule", dedup={"threshold": 0.999}))) == 3


@pytest.mark.parametrize("lambda_, wanted", [(1, ["A", "A2"]), (0.5, ["A", "A2"]), (0, ["A", "D"])])
async def test_mmr_bc18(made: Any, lambda_: float, wanted: list[str]) -> None:
    documents = [
        {"id": "A", "text": "one", "embedding": [0.9848, 0.1736]},
        {"id": "A2", "text": "two", "embedding": [0.9781, -0.2079]},
        {"id": "D", "text": "three", "embedding": [-0.1736, 0.9848]},
    ]
    asker: Asker = await made(documents, {"q": [1, 0]}, dims=2)
    assert ids(await asker.ask("q", top_k=2, mmr={"lambda": lambda_})) == wanted


async def test_stored_vectors_on_demand(made: Any) -> None:
    documents = [{"id": "d", "chunks": [("one two", [1, 0, 0]), ("three", [0, 0.6, 0.8]), ("four", None)]}]
    asker: Asker = await made(documents, {"q": [0, 0, 1]})
    for options in ({}, {"neighbours": 1}, {"collapse": False}):
        answer = await asker.ask("q", routes=[NEAR], include_embedding=True, **options)
        assert answer.hits[0].embedding == pytest.approx([0, 0.6, 0.8])
    assert (await asker.ask("q", routes=[NEAR])).hits[0].embedding is None


class Scores:
    """Reranks as told by the text; fails on demand."""

    def __init__(
        self,
        scores: Callable[[str], float | None],
        error: Exception | None = None,
        *,
        scale: str = "probability",
    ) -> None:
        self.scores = scores
        self.error = error
        self.scale = scale
        self.calls: list[int] = []

    async def rerank(self, query: str, texts: Sequence[str], *, deadline_s: float) -> list[float | None]:
        self.calls.append(len(texts))
        if self.error is not None:
            raise self.error
        return [self.scores(text) for text in texts]


async def test_decay_holds_after_a_rerank_unless_asked_not_to(cluster: Cluster, shelf: Collection) -> None:
    reranker = Scores(lambda text: 1 / (1 + len(text)))
    asker = Asker(cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}), reranker=reranker)
    answer = await asker.ask(QUERY, decay={**HALVING, "floor": 0}, rerank={"candidates": 30}, top_k=30)
    assert reranker.calls == [30]
    for hit in answer.hits:
        assert hit.rerank_score is not None
        assert hit.decay is not None
        assert hit.score == pytest.approx(hit.rerank_score * hit.decay)
    assert [hit.score for hit in answer.hits] == sorted((hit.score for hit in answer.hits), reverse=True)
    plain = await asker.ask(QUERY, decay=HALVING, rerank={"candidates": 30, "decay": False}, top_k=30)
    assert all(hit.score == hit.rerank_score for hit in plain.hits)


async def test_a_longer_page_brings_the_reranker_no_more(cluster: Cluster, shelf: Collection) -> None:
    reranker = Scores(lambda text: -len(text), scale="logit")
    asker = Asker(cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}), reranker=reranker)
    short = await asker.ask(QUERY, top_k=10, rerank={"candidates": 500})
    long = await asker.ask(QUERY, top_k=250, rerank={"candidates": 500})
    assert ids(long)[:10] == ids(short)
    assert len(set(reranker.calls)) == 1
    assert all(0 <= hit.score <= 1 for hit in long.hits), "logits become probabilities"


async def test_the_end_of_what_was_reranked_is_told(cluster: Cluster, shelf: Collection) -> None:
    asker = Asker(
        cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}), reranker=Scores(lambda text: 0.5)
    )

    def told(answer: SearchResult) -> list[str]:
        return [
            warning for warning in answer.warnings if "`rerank.candidates`" in warning or "window" in warning
        ]

    answer = await asker.ask(QUERY, top_k=100, rerank={})
    assert len(answer.hits) == 50
    [warning] = told(answer)
    assert warning.startswith("reranking ends at its 50 candidates, and ")
    assert told(await asker.ask(QUERY, top_k=50, rerank={})) == []
    first = await asker.ask(QUERY, top_k=30, rerank={}, paging=True)
    assert first.cursor is not None
    assert told(first) == []
    last = await asker.page(first.cursor)
    assert (len(last.hits), last.cursor) == (20, None)
    assert told(last) == [warning]
    # As many as were asked for; and where all that was found is reranked, the window is what ends it.
    assert told(await asker.ask(QUERY, top_k=100, rerank={"top_n": 20})) == []
    [warning] = told(await asker.ask(QUERY, top_k=300, rerank={"candidates": 1000}))
    assert "fused window of 100" in warning
    # A reranker of another mind by the second page.
    first = await asker.ask(QUERY, top_k=30, rerank={"min_score": 0.4}, paging=True)
    assert first.cursor is not None
    asker.doors = replace(asker.doors, reranker=cast(Reranker, Scores(lambda text: 0.1)))
    with pytest.raises(PastWindow, match="past the 50 hits that reranking leaves") as caught:
        await asker.page(first.cursor)
    assert "`rerank.candidates`" in (caught.value.remedy or "")
    few = {"id": [f"doc-{at:03d}" for at in range(1, 9)]}
    assert told(await asker.ask(QUERY, top_k=100, rerank={"candidates": 1000}, filter=few)) == []


async def test_a_failed_reranker_leaves_the_fused_order(cluster: Cluster, shelf: Collection) -> None:
    asker = Asker(
        cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}),
        reranker=Scores(lambda text: 0.0, RerankerFailed("answered nonsense")),
    )  # fmt: skip
    plain = await asker.ask(QUERY)
    answer = await asker.ask(QUERY, rerank={})
    assert ids(answer) == ids(plain)
    assert answer.degraded
    assert any("answered nonsense" in warning for warning in answer.warnings)
    with pytest.raises(Unavailable):
        await asker.ask(QUERY, rerank={}, strict=True)


async def test_rerank_without_a_reranker_is_refused(asker: Asker) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await asker.ask(QUERY, rerank={})
    assert caught.value.field == "rerank"


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate, hours, score",
    [(0.01, 24, 1.5856781), (0, 1000, 1.8), (1, 0, 1.8), (1, 5, 0.8), (0.01, -24, 1.8), (1, -1, 1.8)],
)
async def test_memory_decay_bc54_additive(made: Any, rate: float, hours: int, score: float) -> None:
    at = NOW_MS - hours * 3_600_000
    spellings: list[Any] = [
        at,
        at / 1000,
        at // 1000,
        format_instant(from_ms(at)),
        format_instant(from_ms(at))[:19],
    ]
    documents = [
        {"id": f"m{n}", "text": "leave", "embedding": [0.8, 0.6, 0], "last_accessed_at": spelling}
        for n, spelling in enumerate(spellings)
    ]
    documents.append({**documents[0], "id": "salient", "salience": 0.3})
    documents.append({"id": "never", "text": "leave", "embedding": [0.8, 0.6, 0]})
    asker: Asker = await made(documents, {"leave": [1, 0, 0]})
    memory = {"decay": {"hourly_loss": rate, "field": "last_accessed_at"}, "fusion": {"method": "additive"}}
    answer = await asker.ask("leave", **memory)
    got = {hit.id: hit.score for hit in answer.hits}
    assert got == {
        **{f"m{n}": pytest.approx(score, abs=1e-6) for n in range(5)},
        "salient": pytest.approx(score + 0.3, abs=1e-6),
        "never": pytest.approx(0.8, abs=1e-6),
    }
    assert answer.hits[0].additive == {
        "relevance": pytest.approx(0.8, abs=1e-6), "salience": 0.3, "recency": pytest.approx(score - 0.8, abs=1e-6),
    }  # fmt: skip
    weights = {"relevance": 2, "recency": 0.5, "salience": 0}
    weighted = await asker.ask("leave", **{**memory, "fusion": {"method": "additive", "weights": weights}})
    assert {hit.id: hit.score for hit in weighted.hits}["salient"] == pytest.approx(
        1.6 + 0.5 * (score - 0.8), abs=1e-6
    )


async def test_memory_decay_bc54_orders_by_the_sum(asker: Asker) -> None:
    answer = await asker.ask(
        QUERY,
        top_k=100,
        decay={"hourly_loss": 0.001, "floor": 0, "missing": 0},
        fusion={"method": "additive"},
    )
    for hit in answer.hits:
        document = BY_ID[hit.id]
        cosine = float(np.dot(unit(document["embedding"]), QUERY_VECTOR))
        at = created_ms(document)
        recency = (
            1.0 if document.get("evergreen") else 0.0 if at is None else 0.999 ** ((NOW_MS - at) / 3_600_000)
        )
        assert hit.score == pytest.approx(max(0, cosine) + recency, abs=2e-6)
    assert [hit.score for hit in answer.hits] == sorted((hit.score for hit in answer.hits), reverse=True)


# --- batches ---------------------------------------------------------------------------------------------------------


async def test_a_batch_answers_in_order_and_one_bad_query_spoils_only_itself(exact: Asker) -> None:
    exact.embedder.asked.clear()
    queries = [QUERY, "holiday payroll", QUERY, "travel expense"]
    good: list[dict[str, Any]] = [{"query": query, "top_k": 3 + at} for at, query in enumerate(queries)]
    bad = [
        {"query": QUERY, "filter": {"price": {"gte": 1}}},
        {"query": QUERY, "query_vector": [1.0, 2.0]},
        {"query": QUERY, "fusion": {"method": "additive"}},
        {"query": QUERY, "rerank": {}},
        {"query": QUERY, "decay": {"rate": 9e7}, "routes": [{"kind": "text", "decay": {"kind": "linear"}}]},
    ]
    mixed = [good[0], bad[0], good[1], bad[1], bad[2], good[2], bad[3], good[3], bad[4]]
    answers = await exact.batch(*mixed)
    assert [isinstance(each, InvalidRequest) for each in answers] == [each in bad for each in mixed]
    assert exact.embedder.asked == [[QUERY, "holiday payroll", "travel expense"]], "one call, each text once"
    alone = [await exact.ask(**each) for each in good]
    together = [each for each in answers if isinstance(each, SearchResult)]
    assert [timeless(each) for each in together] == [timeless(each) for each in alone]


async def test_a_query_that_can_not_be_embedded_spoils_only_itself(
    cluster: Cluster, shelf: Collection
) -> None:
    embedder = StandIn(
        dims=DIMS,
        vectors={QUERY: QUERY_VECTOR},
        errors={"odd leave": EmbedderRejected("answered NaN")},
        truncated=[QUERY],
    )
    asker = Asker(cluster, shelf, embedder)
    good, odd, only = await asker.batch(
        {"query": QUERY}, {"query": "odd leave"}, {"query": "odd leave", "routes": [NEAR]}
    )
    assert isinstance(good, SearchResult)
    assert not good.degraded
    assert any("longer than the embedding model reads" in warning for warning in good.warnings)
    assert isinstance(odd, SearchResult)
    assert odd.degraded
    assert (odd.routes["text"].status, odd.routes["vector"].status) == ("ok", "failed")
    assert isinstance(only, EmbedderRejected)


async def test_a_query_in_a_hurry_does_not_fail_the_others(cluster: Cluster, shelf: Collection) -> None:
    asker = Asker(cluster, shelf, StandIn(dims=DIMS, vectors={QUERY: QUERY_VECTOR}, delay_s=0.1))
    patient, hasty = await asker.batch({"query": QUERY}, {"query": QUERY, "timeout_ms": 50})
    assert isinstance(patient, SearchResult)
    assert not patient.degraded
    assert isinstance(hasty, SearchResult | HalflifeError)


# --- degraded answers ------------------------------------------------------------------------------------------------


async def test_without_the_embedder_the_words_still_answer(cluster: Cluster, shelf: Collection) -> None:
    down = StandIn(dims=DIMS, error=EmbedderUnavailable("connection refused"))
    asker = Asker(cluster, shelf, down)
    words = await asker.ask(QUERY, routes=[TEXT])
    assert not words.degraded
    answer = await asker.ask(QUERY)
    assert answer.degraded
    assert any("connection refused" in warning for warning in answer.warnings)
    assert (answer.routes["text"].status, answer.routes["vector"].status) == ("ok", "failed")
    assert ids(answer) == ids(words)
    assert all(hit.relevance is None and hit.text for hit in answer.hits)
    with pytest.raises(Unavailable, match="strict"):
        await asker.ask(QUERY, strict=True)
    with pytest.raises(EmbedderUnavailable):
        await asker.ask(QUERY, routes=[NEAR, {"kind": "fresh_vector"}])
    with pytest.raises(EmbedderUnavailable, match="relevance"):
        await asker.ask(QUERY, min_relevance=0.5)
    for routes in ([TEXT], [TEXT, NEAR]):
        with pytest.raises(EmbedderUnavailable, match="relevance"):
            await asker.ask(QUERY, fusion={"method": "additive"}, decay=HALVING, routes=routes)
    given = await asker.ask(QUERY, query_vector=QUERY_VECTOR, min_relevance=0.5)
    assert not given.degraded, "the caller's own vector needs no embedder"
    stages: list[dict[str, Any]] = [
        {"mmr": {}},
        {"dedup": {}},
        {"explain": True},
        {"collapse": False},
        {"highlight": True},
    ]
    for options in stages:
        assert (await asker.ask(QUERY, **options)).hits


async def test_a_route_that_fails_is_told_and_the_others_answer(cluster: Cluster, shelf: Collection) -> None:
    # The index holds vectors of 8 numbers: the cluster refuses a query vector of 3, for that route alone.
    wrong = shelf.model_copy(update={"dims": 3})
    asker = Asker(cluster, wrong, StandIn(dims=3))
    answer = await asker.ask(QUERY, routes=[TEXT, NEAR])
    assert answer.degraded
    assert answer.routes["text"].status == "ok"
    assert answer.routes["vector"].status == "failed"
    assert answer.routes["vector"].reason
    assert len(answer.hits) == 10
    with pytest.raises(Unavailable):
        await asker.ask(QUERY, strict=True)
    with pytest.raises(HalflifeError):
        await asker.ask(QUERY, routes=[NEAR])


async def test_a_shard_that_fails_makes_the_route_partial(cluster: Cluster, made: Any) -> None:
    asker: Asker = await made([{"id": "a", "text": "leave", "embedding": [1, 0, 0]}], {"leave": [1, 0, 0]})
    other: Asker = await made([{"id": "b", "text": "leave", "embedding": [1, 0, 0, 0]}], {}, dims=4)
    add = {"index": other.collection.index, "alias": names.read_alias(asker.collection.name)}
    await cluster.update_aliases([{"add": add}])
    answer = await asker.ask("leave", routes=[TEXT, NEAR])
    assert answer.degraded
    assert answer.routes["text"].status == "ok"
    assert answer.routes["vector"].status == "partial"
    assert "shards failed" in (answer.routes["vector"].reason or "")
    assert "a" in ids(answer)


async def test_a_missing_collection_is_an_error_not_an_empty_answer(
    cluster: Cluster, shelf: Collection
) -> None:
    nowhere = shelf.model_copy(update={"name": "nowhere_at_all"})
    asker = Asker(cluster, nowhere, StandIn(dims=DIMS))
    for options in ({}, {"paging": True}):
        with pytest.raises(HalflifeError):
            await asker.ask(QUERY, **options)


# --- fresh routes, chunks, words -------------------------------------------------------------------------------------


async def test_a_new_document_outside_the_nearest_enters_by_a_fresh_route(made: Any) -> None:
    documents: list[dict[str, Any]] = [
        {
            "id": f"old{at:02d}",
            "text": "leave",
            "embedding": [1, 0.001 * at, 0],
            "creation_time": "2020-01-01",
        }
        for at in range(60)
    ]
    documents.append(
        {"id": "new", "text": "leave pad pad", "embedding": [1, 0.5, 0], "creation_time": "2025-01-30"}
    )
    asker: Asker = await made(documents, {"leave": [1, 0, 0]})
    narrow = {"fusion": {"window": 10}, "decay": {"half_life": "30d", "floor": 0}}
    near = await asker.ask("leave", routes=[NEAR], **narrow)
    assert "new" not in ids(near), "outside the 20 nearest, so no decay can lift it"
    fresh = await asker.ask("leave", routes=[NEAR, {"kind": "fresh_vector", "window": "7d"}], **narrow)
    assert "new" in ids(fresh)
    by_name = {hit.id: hit.routes for hit in fresh.hits}["new"]
    assert set(by_name) == {"fresh_vector"}
    assert by_name["fresh_vector"].rank == 1
    words = await asker.ask(
        "leave", routes=[TEXT, {"kind": "fresh_text", "window": "7d"}], fusion={"window": 10}
    )
    assert "new" in ids(words)
    assert "new" not in ids(await asker.ask("leave", routes=[TEXT], fusion={"window": 10}))
    none = await asker.ask("leave", routes=[{"kind": "fresh_vector", "window": "1h"}])
    assert none.hits == []


CHUNKED: list[dict[str, Any]] = [
    {
        "id": "guide", "title": "Leave guide",
        "chunks": [("intro words", [0, 0, 1]), ("carry over leave", [1, 0, 0]), ("leave again", [0.9, 0.1, 0]), ("outro", [0, 1, 0])],
    },
    {"id": "note", "title": "Note", "chunks": [("carry it over", [0.95, 0, 0.2])]},
    {"id": "zh", "title": "年假规定", "chunks": [("员工手册的第一段", [0, 0.2, 1]), ("年假可以结转到下一年", [0, 0.5, 1])]},
    {"id": "bare", "title": "Leave without a chunk's vector", "chunks": [("leave", None)]},
]  # fmt: skip


async def test_uncollapsed_hits_are_chunks(made: Any) -> None:
    asker: Asker = await made(CHUNKED, {"carry over leave": [1, 0, 0]})
    answer = await asker.ask("carry over leave", collapse=False, top_k=20)
    seen = [(hit.id, (hit.chunk or {}).get("number")) for hit in answer.hits]
    assert len(seen) == len(set(seen))
    assert seen[0] == ("guide", 1)
    assert {
        ("guide", 0),
        ("guide", 1),
        ("guide", 2),
        ("guide", 3),
        ("note", 0),
        ("zh", 0),
        ("zh", 1),
        ("bare", 0),
    } == set(seen)
    for hit in answer.hits:
        source = next(each for each in CHUNKED if each["id"] == hit.id)
        number = (hit.chunk or {})["number"]
        assert hit.text == source["chunks"][number][0]
        terms = [route.contribution for route in hit.routes.values()]
        assert hit.score == pytest.approx(sum(terms))
    best = answer.hits[0]
    assert {name: route.rank for name, route in best.routes.items()} == {"text": 1, "vector": 1}
    vector = sorted(
        (hit.routes["vector"].rank or 0, hit.id, (hit.chunk or {})["number"]) for hit in answer.hits if "vector" in hit.routes
    )  # fmt: skip
    assert [row[1:] for row in vector[:3]] == [("guide", 1), ("guide", 2), ("note", 0)]
    collapsed = await asker.ask("carry over leave", top_k=20)
    assert sorted(ids(collapsed)) == ["bare", "guide", "note", "zh"]
    assert (collapsed.hits[0].chunk or {})["number"] == 1


async def test_a_document_shows_its_best_chunk_and_neighbours(made: Any) -> None:
    asker: Asker = await made(CHUNKED, {"carry over leave": [1, 0, 0]})
    for reach, text in (
        (0, "carry over leave"),
        (1, "intro words\ncarry over leave\nleave again"),
        (20, "intro words\ncarry over leave\nleave again\noutro"),
    ):
        hit = (await asker.ask("carry over leave", neighbours=reach)).hits[0]
        assert (hit.id, hit.text) == ("guide", text)
        assert hit.chunk is not None
        whole = "intro words\ncarry over leave\nleave again\noutro"
        assert whole[hit.chunk["start"] : hit.chunk["end"]] == text
        assert hit.chunk["number"] == 1
    words = (await asker.ask("again", routes=[TEXT])).hits[0]
    assert words.text == "leave again", "without a vector the best worded chunk"
    bare = [hit for hit in (await asker.ask("carry over leave")).hits if hit.id == "bare"]
    assert [(hit.text, hit.relevance) for hit in bare] == [("leave", None)]


async def test_highlights_mark_the_words_in_every_script(made: Any) -> None:
    asker: Asker = await made(CHUNKED, {})
    answer = await asker.ask("结转年假", routes=[TEXT], highlight=True)
    assert ids(answer) == ["zh"]
    marks = answer.hits[0].highlights
    assert marks is not None
    assert "年假" in marks["title"][0].replace("<em>", "").replace("</em>", "")
    told = "".join(marks["text"])
    assert "<em>结转</em>" in told
    assert "<em>年假</em>" in told
    assert "<em>员" not in told
    english = await asker.ask("leaves", routes=[TEXT], highlight=True)
    guide = next(hit for hit in english.hits if hit.id == "guide")
    assert guide.highlights is not None
    assert "<em>Leave</em> guide" in guide.highlights["title"], "by its stem"
    assert (await asker.ask("leaves", routes=[TEXT])).hits[0].highlights is None


def tree_values(tree: dict[str, Any]) -> list[float]:
    """Return the values in an explanation, the whole first."""
    return [tree["value"], *(value for part in tree["details"] for value in tree_values(part))]


@pytest.mark.parametrize("shape", [{}, {"collapse": False}, {"min_relevance": 0.1}], ids=str)
async def test_the_clusters_own_account_of_each_score(exact: Asker, shape: dict[str, Any]) -> None:
    request: dict[str, Any] = {"decay": {**HALVING, "floor": 0.2}, "top_k": 12, **shape}
    plain = await exact.ask(QUERY, **request, explain=True)
    answer = await exact.ask(QUERY, **request, explain="cluster")
    explained = list(dict.fromkeys(ids(answer)))[:10]
    counted = 0
    for hit, without in zip(answer.hits, plain.hits, strict=True):
        for name, part in hit.routes.items():
            expected = without.routes[name]
            if hit.id in explained and part.note != "does not match":
                assert part.explanation is not None
                # A chunk's own score is told beside its document's, whose best chunk the cluster explains.
                if "collapse" not in shape and part.decayed_score is not None:
                    assert part.explanation["value"] == pytest.approx(part.decayed_score, rel=1e-6)
                    assert any(
                        value == pytest.approx(part.score, rel=1e-5)
                        for value in tree_values(part.explanation)
                    )
                counted += 1
            else:
                assert part.explanation is None
            assert part.model_copy(update={"explanation": None}) == expected
    assert counted > 12
    assert any("first 10 documents" in warning for warning in answer.warnings)
    assert answer.explain == plain.explain
    short = await exact.ask(QUERY, **{**request, "top_k": 3}, explain="cluster")
    assert not [warning for warning in short.warnings if "account" in warning]


async def test_the_clusters_account_shows_no_forced_filter(asker: Asker) -> None:
    forced = compile_filter({"tenant": "a"}, declared={})
    answer = await asker.ask(QUERY, forced=forced, filter={"lang": "en"}, explain="cluster")
    told = json.dumps([part.explanation for hit in answer.hits for part in hit.routes.values()])
    assert "lang:en" in told
    assert "tenant" not in told


async def test_highlights_are_html_with_the_documents_own_escaped_unless_asked(made: Any) -> None:
    text = 'The <script>alert("x")</script> & leave'
    asker: Asker = await made([{"id": "a", "title": "<b>Leave</b>", "text": text}], {})
    for highlight in (True, {}, {"encoder": "html"}):
        marks = (await asker.ask("leave", routes=[TEXT], highlight=highlight)).hits[0].highlights
        assert marks is not None
        assert marks["title"] == ["&lt;b&gt;<em>Leave</em>&lt;&#x2F;b&gt;"]
        assert marks["text"][0].startswith("The &lt;script&gt;alert(&quot;x&quot;)")
        assert marks["text"][0].endswith("&amp; <em>leave</em>")
    asked = await asker.ask("leave", routes=[TEXT], highlight={"encoder": "default"})
    assert asked.hits[0].highlights == {
        "title": ["<b><em>Leave</em></b>"],
        "text": [text.replace("leave", "<em>leave</em>")],
    }


async def test_fields_are_chosen(asker: Asker) -> None:
    hit = (await asker.ask(QUERY, fields=["title", "tags"], filter={"tags": "hr"})).hits[0]
    assert (hit.text, hit.metadata, hit.title) == (None, None, BY_ID[hit.id]["title"])
    assert hit.fields == {"tags": BY_ID[hit.id]["tags"]}
    whole = (await asker.ask(QUERY, filter={"tags": "hr"})).hits[0]
    assert whole.metadata == BY_ID[whole.id]["metadata"]
    assert whole.fields["lang"] == BY_ID[whole.id]["lang"]
    assert whole.text == BY_ID[whole.id]["text"]


async def test_totals_are_those_of_the_cluster(asker: Asker) -> None:
    answer = await asker.ask(QUERY)
    expected = sum(
        any(word in f"{d['text']} {d['title']}".split() for word in QUERY.split()) for d in LIBRARY
    )
    total = answer.routes["text"].total
    assert total is not None
    assert (total.value, total.relation) == (expected, "eq")
    assert answer.routes["text"].returned == 100


async def test_knn_params_bc27_the_pool_is_as_large_as_the_page(made: Any) -> None:
    documents = [{"id": f"v{at:02d}", "text": "leave", "embedding": [1, at / 30]} for at in range(30)]
    asker: Asker = await made(documents, {"leave": [1, 0]}, dims=2)
    for num_candidates in (None, 50):
        near = {**NEAR, **({} if num_candidates is None else {"num_candidates": num_candidates})}
        for top_k in (25, 60, 10_000):
            for routes in ([near], [TEXT, near]):
                answer = await asker.ask("leave", top_k=top_k, routes=routes)
                assert len(answer.hits) == min(top_k, 30)
                assert not answer.degraded
                for status in answer.routes.values():
                    assert status.returned >= min(top_k, 30)
    small = await asker.ask("leave", top_k=25, routes=[TEXT, NEAR], fusion={"window": 25})
    assert all(status.returned == 25 for status in small.routes.values())


async def test_windows_and_pages_as_large_as_they_may_be(asker: Asker) -> None:
    large: list[dict[str, Any]] = [
        {},
        {"dedup": {}},
        {"mmr": {"candidates": 1000}},
        {"fusion": {"window": 10_000}, "dedup": {"keep": "newer"}},
    ]
    for options in large:
        answer = await asker.ask(QUERY, top_k=10_000, **options)
        assert not answer.degraded, answer.warnings
        assert len(answer.hits) > 300 or "dedup" in options
    both = {"fusion": {"method": "additive", "window": 10_000}, "decay": HALVING}
    assert len((await asker.ask(QUERY, top_k=10_000, **both)).hits) == 400


ODD_QUERIES: dict[str, set[str] | None] = {
    "AC/DC": {"slash"},
    "a+b AND (": None,
    "foo:bar": set(),
    '"unclosed': set(),
    "*": set(),
    "_exists_:text": set(),
    "[1 TO": None,
    "介绍+": set(),
    "a~100000": None,
    "NOT plain": {"other"},
    "\\": set(),
    "!!! ???": set(),
    "😀": {"em"},
    "/": set(),
    "-": set(),
    "{{}}": set(),
}


@pytest.mark.parametrize("options", [{}, {"collapse": False}, {"highlight": True, "explain": True}], ids=str)
async def test_query_text_bc34_no_text_is_syntax(made: Any, options: dict[str, Any]) -> None:
    documents = [
        {"id": "slash", "text": "AC/DC live", "embedding": [1, 0, 0]},
        {"id": "em", "text": "launch 😀 today", "embedding": [0, 1, 0]},
        {"id": "other", "text": "plain words", "embedding": [0, 0, 1]},
    ]
    asker: Asker = await made(documents, {})
    for query, wanted in ODD_QUERIES.items():
        answer = await asker.ask(query, routes=[TEXT], **options)
        assert not answer.degraded
        if wanted is not None:
            assert set(ids(answer)) == wanted, query
        both = await asker.ask(query, **options)
        assert len(both.hits) == 3, "the vector route finds what it finds"


@pytest.mark.parametrize(
    "query",
    [
        " ".join(f"t{at}" for at in range(2000))[:10_000],
        ("same " * 2000)[:10_000],
        " ".join(chr(0x4E00 + at) for at in range(4999)),
        "".join(chr(0x4E00 + at) for at in range(10_000)),
        "x" * 10_000,
        "a/b.c-d_e" * 1111,
        "ｱ" * 10_000,
        "ก" * 10_000,
        "😀" * 10_000,
        "\u0301" * 10_000,
    ],
    ids=["distinct", "same", "spaced han", "run of han", "one word", "punctuation", "half-width", "thai", "emoji", "accents"],
)  # fmt: skip
async def test_query_text_bc35_long_queries_never_fail(asker: Asker, query: str) -> None:
    for options in ({"highlight": True}, {"collapse": False}, {"min_relevance": 0, "decay": HALVING}):
        answer = await asker.ask(query, **options)
        assert not answer.degraded, answer.warnings
        assert answer.routes["text"].status == answer.routes["vector"].status == "ok"
    cut = any("reads only the first 512" in warning for warning in (await asker.ask(query)).warnings)
    assert cut == (query[:4] not in ("same", "xxxx"))


# --- explained -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["off", HALVING], ids=str)
async def test_explain_tells_what_missed_routes_would_have_scored(asker: Asker, decay: Any) -> None:
    whole = await asker.ask(QUERY, top_k=400, fusion={"window": 400}, decay=decay)
    truth = {hit.id: hit.routes for hit in whole.hits}
    answer = await asker.ask(QUERY, top_k=20, fusion={"window": 20}, decay=decay, explain=True)
    missed = 0
    for hit in answer.hits:
        assert set(hit.routes) == {"text", "vector"}
        for name, route in hit.routes.items():
            real = truth[hit.id].get(name)
            if route.rank is not None:
                continue
            missed += 1
            assert route.contribution == 0
            if real is None:
                assert (route.note, route.score, route.decayed_score) == ("does not match", None, None)
            else:
                assert route.note == "beyond the window"
                assert route.score == pytest.approx(real.score, rel=1e-6)
                assert route.decayed_score == pytest.approx(real.decayed_score, rel=1e-6)
                if decay == "off":
                    assert route.decay is None
                else:
                    assert route.decay == pytest.approx(real.decay, rel=1e-6)
    assert missed > 5
    plain = await asker.ask(QUERY, top_k=20, fusion={"window": 20}, decay=decay)
    assert ids(plain) == ids(answer)
    assert any(len(hit.routes) == 1 for hit in plain.hits)


async def test_explain_gives_bodies_that_answer_the_same_in_the_cluster(
    cluster: Cluster, asker: Asker
) -> None:
    answer = await asker.ask(QUERY, top_k=100, decay=HALVING, filter={"lang": ["en", "zh"]}, explain=True)
    assert answer.explain is not None
    assert [request["route"] for request in answer.explain["requests"]] == ["text", "vector"]
    for request in answer.explain["requests"]:
        assert (
            request["path"] == f"/halflife-{asker.collection.name}/_search?include_named_queries_score=true"
        )
        pasted = json.loads(json.dumps(request["body"]))
        raw = await cluster.search(names.read_alias(asker.collection.name), pasted, timeout_s=60)
        ranked = sorted(
            (hit.routes[request["route"]].rank or 0, hit.id) for hit in answer.hits if (hit.routes[request["route"]].rank)
        )  # fmt: skip
        found = {rank: id_of(hit) for rank, hit in enumerate(raw["hits"]["hits"], start=1)}
        assert ranked
        assert all(found[rank] == name for rank, name in ranked)
    assert answer.explain["origin"] == format_instant(from_ms(NOW_MS))
    assert answer.explain["route_decay"]["vector"]["floor"] == 0.98
    json.dumps(json.loads(answer.model_dump_json())["explain"])


async def test_an_answer_without_explain_has_none(asker: Asker) -> None:
    answer = await asker.ask(QUERY)
    assert answer.explain is None
    assert "explain" not in json.loads(answer.model_dump_json())


async def test_the_answer_says_how_old_and_how_relevant_each_hit_is(asker: Asker) -> None:
    answer = await asker.ask(QUERY, top_k=100, decay=HALVING)
    assert format_instant(answer.origin) == format_instant(from_ms(NOW_MS))
    for hit in answer.hits:
        document = BY_ID[hit.id]
        at = created_ms(document)
        assert hit.age_days == (None if at is None else pytest.approx((NOW_MS - at) / DAY))
        assert hit.evergreen is document.get("evergreen", False)
        cosine = float(np.dot(unit(document["embedding"]), QUERY_VECTOR))
        assert hit.relevance == pytest.approx(max(0.0, cosine), abs=2e-6)


async def test_a_search_now_and_one_as_of_now_differ_only_in_the_future(made: Any) -> None:
    documents = [
        {"id": "past", "text": "leave", "embedding": [1, 0, 0], "creation_time": "2025-01-30"},
        {"id": "future", "text": "leave", "embedding": [1, 0, 0], "creation_time": "2025-02-10"},
    ]
    asker: Asker = await made(documents, {"leave": [1, 0, 0]})
    now = await asker.ask("leave", decay={"half_life": "10d", "floor": 0})
    assert {hit.id: hit.decay for hit in now.hits} == {"past": pytest.approx(0.5**0.1), "future": 1.0}
    assert [hit.age_days for hit in now.hits if hit.id == "future"] == [-10.0]
    assert ids(await asker.ask("leave", as_of=NOW)) == ["past"]


def test_the_library_is_what_the_tests_assume() -> None:
    assert len(BY_ID) == 400
    assert sum("creation_time" not in document for document in LIBRARY) == 40
    assert hashed("a b", 3) == hashed("b a", 3)
    assert datetime.fromtimestamp(NOW_MS / 1000, tz=UTC) == parse_instant(NOW)


async def test_a_negated_key_filter_holds_in_an_index_that_declares_other_keys(node_url: str) -> None:
    """What is remembered of a collection, and a cursor, may be of before a reindex that declared the key or no longer does."""
    cluster = Cluster.connect(urls=[node_url], request_timeout_s=60)
    key_filter = {"level": {"ne": "secret"}}
    given = [
        {"id": f"{level}-{at}", "text": QUERY, "embedding": [1.0] * DIMS, "metadata": {"level": level}}
        for level in ("open", "secret")
        for at in range(3)
    ]
    collection = await make_collection(cluster, given, dims=DIMS)
    try:
        stale = collection.model_copy(update={"declared": {"level": "keyword"}, "index": "another"})
        answers = await search(
            [
                Search(
                    collection=collection.name,
                    query=QUERY,
                    query_vector=list(QUERY_VECTOR),
                    timeout_ms=60_000,
                )
            ],
            collection=stale,
            doors=doors_to(cluster, StandIn(dims=DIMS)),
            caller=Caller(
                forced=tuple(compile_filter(key_filter, declared=stale.declared)),
                forced_in=lambda there: tuple(compile_filter(key_filter, declared=there.declared)),
            ),
            now_ms=NOW_MS,
        )
        [answer] = answers
        assert isinstance(answer, SearchResult)
        assert sorted(hit.id for hit in answer.hits) == ["open-0", "open-1", "open-2"]
    finally:
        await drop_collection(cluster, collection)
        await cluster.close()
