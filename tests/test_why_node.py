"""Why a document stands where it stands: its figures in every route however far down, and what keeps it out."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from app.answers import WhyResult
from app.asking import Why
from app.collection import Collection
from app.elastic import Cluster
from app.errors import EmbedderUnavailable, HalflifeError, InvalidRequest, RerankerFailed, Unavailable
from app.filters import compile_filter
from app.search import Caller
from app.times import format_instant, from_ms, parse_instant
from app.why import why
from tests.nodes import run_once
from tests.searching import (
    DAY,
    NOW,
    NOW_MS,
    PATIENT,
    Asker,
    Lacking,
    StandIn,
    drop_collection,
    ids,
    make_collection,
    settle,
    unit,
)

pytestmark = pytest.mark.node

TEXT, NEAR = {"kind": "text"}, {"kind": "vector"}
DECAY = {"half_life": "30d", "floor": 0}

# 'w000' is best in both routes, and so on down; every third pair ties; the last hundred say another word.
DOCUMENTS: list[dict[str, Any]] = [
    {
        "id": f"w{at:03d}",
        "text": "leave " + "pad " * (at // 3) if at < 200 else "something else",
        "title": f"Number {at}",
        "embedding": [1.0, 0.01 * (at // 2), 0.0],
        "lang": "en" if at % 2 else "zh",
        "metadata": {"tenant": "a" if at % 5 else "b"},
        **({} if at % 7 == 0 else {"creation_time": format_instant(from_ms(NOW_MS - (at % 50) * DAY))}),
    }
    for at in range(300)
]
SPECIAL: list[dict[str, Any]] = [
    {"id": "tomorrow", "text": "leave", "embedding": [1, 0, 0], "creation_time": "2025-02-01"},
    {"id": "expired", "text": "leave", "embedding": [1, 0, 0], "expires_at": "2025-01-01"},
    {"id": "not-yet", "text": "leave", "embedding": [1, 0, 0], "start_date": "2025-02-01"},
    {"id": "over", "text": "leave", "embedding": [1, 0, 0], "end_date": "2025-01-31", "lang": "th"},
    {"id": "bare", "text": "leave leave", "lang": "en"},
    {
        "id": "evergreen",
        "text": "leave leave",
        "embedding": [1, 0, 0],
        "evergreen": True,
        "creation_time": "2001-01-01",
    },
    {"id": "gone", "text": "leave", "raw": {"deleted": True}},
]


@pytest.fixture(scope="module")
def shelf(node_url: str) -> Iterator[Collection]:
    async def make(cluster: Cluster) -> Collection:
        collection = await make_collection(cluster, [*DOCUMENTS, *SPECIAL], dims=3, declared={"year": "long"})
        await settle(cluster, collection)
        return collection

    made = run_once(node_url, make)
    yield made
    run_once(node_url, lambda cluster: drop_collection(cluster, made))


@pytest.fixture
async def asker(cluster: Cluster, shelf: Collection) -> Asker:
    return Asker(cluster, shelf, StandIn(dims=3, vectors={"leave": [1.0, 0.0, 0.0]}))


async def account(
    asker: Asker, document_id: str, *, forced: Any = (), query: str = "leave", **options: Any
) -> WhyResult:
    request = Why.model_validate(
        {"collection": asker.collection.name, "query": query, "id": document_id, **PATIENT, **options}
    )
    return await why(
        request,
        collection=asker.collection,
        doors=asker.doors,
        caller=Caller(forced=tuple(forced)),
        now_ms=NOW_MS,
    )


@pytest.mark.parametrize("decay", ["off", DECAY, {**DECAY, "placement": "fused"}], ids=str)
async def test_figures_far_outside_the_window_are_those_of_a_window_that_holds_all(
    asker: Asker, decay: Any
) -> None:
    whole = await asker.ask("leave", top_k=1000, fusion={"method": "rrf", "window": 1000}, decay=decay)
    places = {hit.id: at for at, hit in enumerate(whole.hits, start=1)}
    truth = {hit.id: hit for hit in whole.hits}
    narrow = {"top_k": 5, "fusion": {"method": "rrf", "window": 10}, "decay": decay}
    shown = await asker.ask("leave", **narrow)
    everything = await asker.ask("leave", **{**narrow, "top_k": 10}, paging=True)
    lists = [*everything.hits]
    while everything.cursor is not None and len(everything.hits) == 10:
        everything = await asker.page(everything.cursor)
        lists += everything.hits
    in_lists = {(hit.id, route): part.rank for hit in lists for route, part in hit.routes.items()}
    for name in (
        "w000",
        "w004",
        "w005",
        "w006",
        "w011",
        "w021",
        "w050",
        "w077",
        "w099",
        "w150",
        "w199",
        "w250",
        "bare",
        "evergreen",
    ):
        told = await account(asker, name, **narrow)
        hit = truth[name]
        assert told.exists
        assert told.excluded_by == []
        assert told.origin == parse_instant(NOW)
        assert (told.title, told.age_days, told.evergreen) == (hit.title, hit.age_days, hit.evergreen)
        assert told.relevance == (None if name == "bare" else pytest.approx(hit.relevance, abs=1e-6))
        assert told.decay == (None if decay == "off" else pytest.approx(hit.decay, rel=1e-6, abs=1e-7))
        for route_name, route in told.routes.items():
            real = hit.routes.get(route_name)
            if real is None:
                assert not route.matches
                assert route.note
                continue
            assert route.matches
            listed_here = in_lists.get((name, route_name))
            assert route.in_window is (listed_here is not None)
            # In its list by the rank it has there, else by the one it has among all.
            assert (route.rank, route.rank_relation) == (listed_here or real.rank, "eq"), (name, route_name)
            assert route.score == pytest.approx(real.score, rel=1e-6)
            assert route.decayed_score == pytest.approx(real.decayed_score, rel=1e-6)
            assert (route.decay is None) == (real.decay is None)
            if real.decay is not None:
                assert route.decay == pytest.approx(real.decay, rel=1e-6)
                assert route.rank_if_current is not None
                assert route.rank_if_current <= (route.rank or 0)
        listed = next((at for at, each in enumerate(shown.hits, start=1) if each.id == name), None)
        assert told.on_page is (listed is not None)
        assert told.what_it_takes == [] or not told.on_page
        assert told.on_page or told.what_it_takes
        assert told.page_score == shown.hits[-1].score
        if all(route.in_window or not route.matches for route in told.routes.values()):
            assert told.fused_rank is not None
        if told.fused_rank is None:
            # As if the window had no end.
            assert told.fused_score == pytest.approx(hit.score, rel=1e-6)
        assert places[name] >= 1


async def test_ranks_count_ties_as_the_route_does(asker: Asker) -> None:
    # Texts tie by threes and vectors by twos: newer first, undated last, then the id.
    whole = await asker.ask("leave", top_k=1000, fusion={"window": 1000}, routes=[TEXT])
    ranks = {hit.id: hit.routes["text"].rank for hit in whole.hits}
    scores = [hit.routes["text"].score for hit in whole.hits]
    assert len(set(scores)) < len(scores) / 2
    for at in range(60, 70):
        name = f"w{at:03d}"
        told = await account(asker, name, routes=[TEXT], fusion={"window": 10})
        assert told.routes["text"].rank == ranks[name]


async def test_without_its_own_decay_it_would_rank_higher(asker: Asker) -> None:
    # 'w049' is 49 days old, half as relevant again as most.
    told = await account(asker, "w049", decay=DECAY, top_k=5, fusion={"window": 10})
    text = told.routes["text"]
    assert text.rank is not None
    assert text.rank_if_current is not None
    assert text.rank_if_current < text.rank
    assert any(
        "without decay of its own" in line and str(text.rank_if_current) in line
        for line in told.what_it_takes
    )
    assert any("outside the window of 10" in line for line in told.what_it_takes)


async def test_a_fresh_document_outside_the_nearest_is_told_of_fresh_routes(asker: Asker) -> None:
    # 'w101' is a day old: by its decayed score it stands high, but it is not among the 20 nearest.
    told = await account(asker, "w101", decay=DECAY, top_k=5, fusion={"window": 10}, routes=[NEAR])
    assert not told.routes["vector"].in_window
    assert told.routes["vector"].rank is not None
    assert told.routes["vector"].rank <= 10
    assert any("add a fresh_vector route" in line for line in told.what_it_takes)


async def test_what_a_fused_factor_costs_is_told(asker: Asker) -> None:
    told = await account(
        asker, "w000", decay={**DECAY, "placement": "fused"}, top_k=5, fusion={"method": "rrf"}
    )
    assert (told.decay, told.fused_score) == (0.0, 0.0)
    assert any(
        "its factor is 0: undecayed its fused score would be 0.03" in line for line in told.what_it_takes
    )


async def test_the_rank_that_is_said_to_reach_the_page_does(asker: Asker) -> None:
    told = await account(asker, "w030", routes=[TEXT], top_k=5, fusion={"method": "rrf"})
    assert told.page_score is not None
    [line] = [line for line in told.what_it_takes if "reach the page" in line]
    needed = int(line.split("rank ")[1].split(" ")[0])
    assert 1 / (60 + needed) > told.page_score >= 1 / (60 + needed + 1)


@pytest.mark.parametrize(
    "name, options, told",
    [
        ("w001", {"filter": {"lang": "zh"}}, "filter.lang"),
        ("w002", {"filter": {"and": [{"tenant": "a"}, {"lang": "en"}]}}, "filter.and[1].lang"),
        ("w003", {"filter": {"not": {"tenant": "a"}}}, "filter.not"),
        ("w007", {"filter": {"creation_time": {"gte": "2025-01-01"}}}, "filter.creation_time"),
        ("tomorrow", {"as_of": NOW}, "as_of"),
        ("expired", {}, "expires_at"),
        ("not-yet", {}, "valid_time"),
        ("over", {}, "valid_time"),
    ],
    ids=str,
)
async def test_what_excludes_it_is_named(asker: Asker, name: str, options: dict[str, Any], told: str) -> None:
    answer = await account(asker, name, **options)
    assert answer.exists
    assert len(answer.excluded_by) == 1
    assert told in answer.excluded_by[0]
    assert not answer.on_page
    assert answer.fused_rank is None
    assert all(
        not route.matches and "see `excluded_by`" in (route.note or "") for route in answer.routes.values()
    )
    assert told in answer.what_it_takes[0]
    assert name not in ids(await asker.ask("leave", top_k=1000, **options))


async def test_what_has_no_vector_is_kept_out_by_a_least_relevance(asker: Asker) -> None:
    told = await account(asker, "bare", min_relevance=0.5)
    assert told.excluded_by == ["min_relevance: it has no vector, so that no relevance is known"]
    assert not told.on_page
    assert "bare" not in ids(await asker.ask("leave", min_relevance=0.5, top_k=400))


@pytest.mark.parametrize("document", ["w002", "w060", "w150"])
async def test_at_the_least_relevance_it_stands_where_the_search_has_it(asker: Asker, document: str) -> None:
    cosine = (await account(asker, document)).relevance
    assert cosine is not None
    for least in (cosine, cosine + 5e-7, cosine + 2e-6, cosine - 2e-6):
        told = await account(asker, document, min_relevance=least, top_k=400)
        found = document in ids(await asker.ask("leave", min_relevance=least, top_k=400))
        assert (told.excluded_by == []) == found, (least - cosine, told.excluded_by)


async def test_a_cosine_below_zero_lies_below_a_least_of_zero(asker: Asker) -> None:
    asker.embedder.vectors["leave"] = [-1.0, 0.0, 0.0]
    told = await account(asker, "w000", min_relevance=0)
    assert told.relevance == 0
    assert told.excluded_by == ["min_relevance: its cosine is -1.0000, 0 is the least"]
    assert "w000" not in ids(await asker.ask("leave", min_relevance=0, top_k=400))


async def test_several_reasons_are_all_told(asker: Asker) -> None:
    answer = await account(asker, "over", filter={"lang": "en", "tenant": "a"})
    assert len(answer.excluded_by) == 3
    free = await account(asker, "over", valid_time="any")
    assert free.excluded_by == []


async def test_what_does_not_match_says_why(asker: Asker) -> None:
    other = await account(asker, "w250", routes=[TEXT])
    assert other.excluded_by == []
    assert "none of the query's words" in (other.routes["text"].note or "")
    assert other.what_it_takes == ["no route matches it: name words that stand in it, or add a vector route"]
    blank = await account(asker, "bare", query="else", routes=[TEXT, NEAR])
    assert blank.what_it_takes == [
        "no route matches it: name words that stand in it, or store it with a vector"
    ]
    bare = await account(asker, "bare")
    assert bare.routes["text"].matches
    assert "has no vector" in (bare.routes["vector"].note or "")
    far = await account(asker, "w299", min_relevance=0.9)
    assert [reason.split(":")[0] for reason in far.excluded_by] == ["min_relevance"]
    assert not far.routes["vector"].matches
    fresh = await account(asker, "w048", routes=[{"kind": "fresh_vector", "window": "7d"}])
    assert "before the date window of 7d" in (fresh.routes["fresh_vector"].note or "")
    [take] = fresh.what_it_takes
    assert take.startswith("fresh_vector: its `creation_time` is 2024-12-14")
    assert "a longer `window` would take it in" in take
    undated = await account(asker, "w007", routes=[{"kind": "fresh_text"}])
    assert "has no `creation_time`" in (undated.routes["fresh_text"].note or "")
    later = await account(asker, "tomorrow", routes=[{"kind": "fresh_text"}])
    assert "after the origin" in (later.routes["fresh_text"].note or "")
    by_access = {"kind": "fresh_text", "field": "last_accessed_at"}
    never = await account(asker, "w008", routes=[by_access])
    assert "has no `last_accessed_at`" in (never.routes["fresh_text"].note or "")
    own = await account(asker, "w001", routes=[{"kind": "vector", "filter": {"lang": "zh"}}])
    assert own.excluded_by == []
    assert "own filter keeps it out" in (own.routes["vector"].note or "")
    assert own.what_it_takes[0].startswith("vector: the route's own filter keeps it out")


async def test_what_is_not_there_or_not_for_the_caller_does_not_exist(asker: Asker) -> None:
    for name in ("nowhere", "gone"):
        answer = await account(asker, name)
        assert not answer.exists
        assert answer.routes == {}
        assert answer.excluded_by == ["no such document in this collection"]
    forced = compile_filter({"tenant": "a"}, declared={})
    hidden = await account(asker, "w005", forced=forced)
    assert hidden == (await account(asker, "nowhere", forced=forced)).model_copy(update={"id": "w005"})
    visible = await account(asker, "w006", forced=forced)
    whole = await asker.ask("leave", top_k=1000, fusion={"window": 1000}, forced=forced)
    truth = next(hit for hit in whole.hits if hit.id == "w006")
    assert {name: route.rank for name, route in visible.routes.items()} == {
        name: route.rank for name, route in truth.routes.items()
    }


async def test_a_page_longer_than_the_window_counts_its_tail(asker: Asker) -> None:
    shown = await asker.ask("leave", top_k=250)
    for at in (0, 99, 150, 249):
        told = await account(asker, shown.hits[at].id, top_k=250)
        assert told.fused_rank == at + 1
        assert told.on_page
        assert told.fused_score == shown.hits[at].score
        assert told.page_score == shown.hits[-1].score


async def test_what_it_takes_with_adaptive_fusion(asker: Asker) -> None:
    wanted: dict[str, Any] = {"fusion": {"method": "adaptive"}, "top_k": 5}
    whole = await asker.ask("leave", **{**wanted, "top_k": 100})
    told = await account(asker, whole.hits[20].id, **wanted)

    assert told.fused_rank == 21
    assert told.fused_score == whole.hits[20].score
    assert not told.on_page
    [line] = [line for line in told.what_it_takes if line.startswith("vector:")]
    assert "standard deviations above the least of its window" in line
    # So many, and its score would be the page's last one.
    share, now = whole.routes["vector"].weight or 0, told.routes["vector"].contribution
    needed = float(line.split()[1])
    assert (told.fused_score or 0) - now + needed * share == pytest.approx(told.page_score, abs=0.02)


async def test_what_no_list_holds_has_the_score_of_its_absence(asker: Asker) -> None:
    wanted: dict[str, Any] = {"fusion": {"method": "adaptive", "window": 5}, "top_k": 5}
    shown = await asker.ask("leave", **wanted)
    whole = await asker.ask("leave", top_k=100)
    told = await account(asker, whole.hits[-1].id, **wanted)

    assert told.fused_rank is None
    assert told.routes["text"].contribution == 0
    assert told.routes["vector"].contribution == pytest.approx(-(shown.routes["vector"].weight or 0))
    assert told.fused_score == sum(route.contribution for route in told.routes.values())
    assert all(hit.score >= (told.fused_score or 0) for hit in shown.hits)


async def test_additive_scores_are_those_of_the_search(asker: Asker) -> None:
    memory: dict[str, Any] = {"fusion": {"method": "additive"}, "decay": {"hourly_loss": 0.001}, "top_k": 5}
    whole = await asker.ask("leave", **{**memory, "top_k": 100})
    for at in (0, 4, 5, 60):
        told = await account(asker, whole.hits[at].id, **memory)
        assert told.fused_rank == at + 1
        assert told.fused_score == pytest.approx(whole.hits[at].score)
        assert told.on_page is (at < 5)


async def test_a_failed_shard_is_no_missing_document(cluster: Cluster, asker: Asker) -> None:
    given: dict[str, Any] = {"query_vector": [1.0, 0.0, 0.0], "decay": "off"}
    lacking = Lacking(cluster, 1, keeps=False)
    asker.doors = replace(asker.doors, cluster=cast(Cluster, lacking))
    with pytest.raises(Unavailable, match="can't be told: 1 of 2 shards failed: disk on fire"):
        await account(asker, "w003", **given)
    lacking.at = lacking.asked + 2
    told = await account(asker, "w003", **given)
    assert any("of a part of the collection: 1 of 2 shards" in warning for warning in told.warnings)


async def test_the_embedder_down(cluster: Cluster, shelf: Collection) -> None:
    asker = Asker(cluster, shelf, StandIn(dims=3, error=EmbedderUnavailable("connection refused")))
    told = await account(asker, "w003")
    assert told.routes["text"].matches
    assert not told.routes["vector"].matches
    assert told.relevance is None
    assert any("connection refused" in warning for warning in told.warnings)
    with pytest.raises(HalflifeError):
        await account(asker, "w003", routes=[NEAR])


async def test_a_route_of_weight_0_is_no_help_and_says_so(asker: Asker) -> None:
    told = await account(
        asker,
        "w150",
        routes=[TEXT, {"kind": "vector", "weight": 0}],
        fusion={"method": "rrf", "window": 10},
        top_k=5,
    )
    vector = told.routes["vector"]
    assert vector.note == "its weight is 0: it adds neither score nor hits"
    lines = [line for line in told.what_it_takes if line.startswith("vector:")]
    assert lines == [
        f"vector: its rank {vector.rank} adds nothing, since the route's weight is 0; give it a weight"
    ]
    assert told.fused_score == pytest.approx(1 / (60 + (told.routes["text"].rank or 0)))
    only = await account(asker, "w000", routes=[{"kind": "vector", "weight": 0}])
    assert only.routes["vector"].in_window
    assert (only.fused_rank, only.on_page) == (None, False)
    assert only.what_it_takes == [
        f"vector: its rank {only.routes['vector'].rank} adds nothing, since the route's weight is 0; give it a weight"
    ]


# --- the stages after fusion -------------------------------------------------------------------------------------------


TWINS: list[dict[str, Any]] = [
    {"id": "first", "text": "leave leave leave", "embedding": [1, 0, 0], "creation_time": "2024-01-01"},
    {"id": "same", "text": "leave leave leave", "embedding": [0.5, 1, 0], "creation_time": "2024-01-01"},
    {"id": "near", "text": "leave leave once", "embedding": [0.94, 0.3412, 0], "creation_time": "2025-01-01"},
    {"id": "far", "text": "leave it", "embedding": [0.6, 0, 0.8]},
    {"id": "last", "text": "leave all of it here", "embedding": [0.1, 0.9, 0.4]},
]


class Scores:
    """Reranks by the document's text, as told."""

    scale = "probability"

    def __init__(self, scores: dict[str, float | None]) -> None:
        self.scores = scores
        self.failing: HalflifeError | None = None

    async def rerank(self, query: str, texts: Any, *, deadline_s: float) -> list[float | None]:
        if self.failing is not None:
            raise self.failing
        return [self.scores[text] for text in texts]


@pytest.fixture(scope="module")
def twins(node_url: str) -> Iterator[Collection]:
    collection = run_once(node_url, lambda cluster: make_collection(cluster, TWINS, dims=3))
    yield collection
    run_once(node_url, lambda cluster: drop_collection(cluster, collection))


@pytest.fixture
def pair(cluster: Cluster, twins: Collection) -> Asker:
    scores = {TWINS[0]["text"]: 0.2, "leave leave once": 0.12, "leave it": 0.9, "leave all of it here": None}
    embedder = StandIn(dims=3, vectors={"leave": [1.0, 0.0, 0.0]})
    return Asker(cluster, twins, embedder, reranker=Scores(scores))


async def as_searched(asker: Asker, **options: Any) -> dict[str, WhyResult]:
    """Account for every document, and hold each account against the search itself."""
    page = await asker.ask("leave", **options)
    whole = await asker.ask("leave", **{**options, "top_k": 10})
    places = {hit.id: at for at, hit in enumerate(whole.hits, start=1)}
    told = {each["id"]: await account(asker, each["id"], **options) for each in TWINS}
    for name, answer in told.items():
        assert answer.rank == places.get(name), name
        assert answer.on_page is (name in ids(page))
        assert bool(answer.what_it_takes) is not answer.on_page
        assert answer.page_score == page.hits[-1].score
    return told


async def test_what_near_duplicate_removal_dropped_and_for_what(pair: Asker) -> None:
    told = await as_searched(pair, dedup={"threshold": 0.9}, routes=[NEAR])
    assert told["first"].stages["dedup"].note == "kept, and 2 near duplicates of it dropped: 'near', 'same'"
    near = told["near"].stages["dedup"]
    assert (near.before, near.after) == (2, None)
    assert near.note.startswith(
        "dropped as a near duplicate of 'first' (cosine 0.94; threshold 0.9, the higher of"
    )
    assert "`dedup.threshold`" in told["near"].what_it_takes[0]
    assert (
        told["same"].stages["dedup"].note.startswith("dropped as a near duplicate of 'first' (the same text;")
    )
    assert told["far"].stages["dedup"].note == "kept: nothing kept above it is as alike"
    assert (told["far"].fused_rank, told["far"].rank) == (3, 2)
    newer = await as_searched(pair, dedup={"threshold": 0.9, "keep": "newer"}, routes=[NEAR])
    assert "'near'" in newer["first"].stages["dedup"].note


async def test_what_the_reranker_gave_and_where_that_moved_it(pair: Asker) -> None:
    told = await as_searched(pair, rerank={"decay": False}, routes=[NEAR])
    far, last = told["far"].stages["rerank"], told["last"].stages["rerank"]
    assert (far.before, far.after, far.score) == (3, 1, 0.9)
    assert far.note == "the reranker gave 0.9: it moved from 3 to 1"
    assert last.note == "the reranker gave it no score, so it stands behind those that have one"
    cut = await as_searched(pair, rerank={"decay": False}, routes=[NEAR], top_k=2)
    assert cut["near"].stages["rerank"].note == "the reranker gave 0.12: it moved from 2 to 4"
    [take] = cut["near"].what_it_takes
    assert take.startswith(
        "the reranker gave 0.12: it moved from 2 to 4; the page's last hit has a score of 0.2"
    )
    least = await as_searched(pair, rerank={"min_score": 0.15}, routes=[NEAR])
    assert least["near"].stages["rerank"].note == "dropped: the reranker gave 0.12, and `min_score` is 0.15"
    assert "a lower `rerank.min_score`" in least["near"].what_it_takes[0]
    best = await as_searched(pair, rerank={"top_n": 1}, routes=[NEAR])
    assert "not among its best `top_n` of 1" in best["first"].stages["rerank"].note
    few = await as_searched(pair, rerank={"candidates": 2}, routes=[NEAR])
    assert (
        few["far"].stages["rerank"].note
        == "dropped: the reranker reads the 2 best fused hits, and it is number 3"
    )
    assert "`rerank.candidates` of at least 3" in few["far"].what_it_takes[0]
    assert any("would come before the reranker" in line for line in few["far"].what_it_takes)


async def test_a_decay_after_the_reranker_is_part_of_the_note(pair: Asker) -> None:
    told = await as_searched(pair, rerank={}, routes=[NEAR], decay={"half_life": "365d", "floor": 0})
    assert "its decay factor of 0.471 included" in told["first"].stages["rerank"].note


async def test_a_reranker_that_fails_leaves_the_fused_order_and_says_so(pair: Asker) -> None:
    cast(Scores, pair.doors.reranker).failing = RerankerFailed("answered nonsense")
    told = await as_searched(pair, rerank={}, dedup={}, routes=[NEAR])
    assert told["far"].stages["rerank"].note == "it did not run: see `warnings`"
    assert any("answered nonsense" in warning for warning in told["far"].warnings)
    assert told["near"].stages["dedup"].after is None


async def test_without_a_reranker_it_is_refused_as_in_a_search(asker: Asker) -> None:
    with pytest.raises(InvalidRequest, match="no reranker"):
        await account(asker, "w000", rerank={})


async def test_what_mmr_chose_before_it(pair: Asker) -> None:
    told = await as_searched(pair, mmr={"lambda": 0.3}, routes=[NEAR], top_k=2)
    assert told["first"].stages["mmr"].note == "mmr leaves it at 1: it is the most relevant"
    near = told["near"].stages["mmr"]
    assert near.before == 2
    assert near.after == 4
    assert (
        near.note
        == "mmr moved it from 2 to 4: of those chosen before it 'first' is most like it (cosine 0.94)"
    )
    assert "a higher `mmr.lambda` counts likeness less" in told["near"].what_it_takes[0]
    few = await as_searched(pair, mmr={"lambda": 0.3, "candidates": 2}, routes=[NEAR])
    assert (
        few["far"].stages["mmr"].note
        == "mmr chooses among the 2 best hits, and it is number 3: it keeps its place"
    )


async def test_chunks_have_ranks_of_their_own(cluster: Cluster) -> None:
    documents: list[dict[str, Any]] = [
        {"id": "two", "chunks": [("leave one", [0.9, 0.1, 0]), ("other words", [0, 1, 0]), ("leave three", [1, 0, 0])]},
        {"id": "one", "text": "leave leave", "embedding": [0.95, 0.05, 0]},
        {"id": "far", "chunks": [("far away", [0, 0, 1]), ("farther", [0, 0.1, 1])]},
    ]  # fmt: skip
    collection = await make_collection(cluster, documents, dims=3)
    try:
        asker = Asker(cluster, collection, StandIn(dims=3, vectors={"leave": [1.0, 0.0, 0.0]}))
        shown = await asker.ask("leave", collapse=False, routes=[NEAR])
        places = [(hit.id, (hit.chunk or {}).get("number")) for hit in shown.hits]
        told = await account(asker, "two", collapse=False, routes=[NEAR])
        assert told.chunks is not None
        assert [(each.number, each.fused_rank, each.rank, each.routes) for each in told.chunks] == [
            (number, place, place, {"vector": place})
            for place, (name, number) in enumerate(places, start=1)
            if name == "two"
        ]
        assert told.chunks[0].number == 2
        assert (told.fused_rank, told.rank, told.routes["vector"].rank_relation) == (1, 1, "eq")
        far = await account(asker, "far", collapse=False, routes=[NEAR], fusion={"window": 2}, top_k=1)
        assert (far.chunks, far.rank) == ([], None)
        # Documents are counted, not their chunks: so it is at least third.
        assert (far.routes["vector"].rank, far.routes["vector"].rank_relation) == (3, "gte")
        assert (await account(asker, "two")).chunks is None
    finally:
        await drop_collection(cluster, collection)


def test_the_shelf_is_what_the_tests_assume() -> None:
    assert len(DOCUMENTS) == 300
    assert unit(DOCUMENTS[0]["embedding"]) == [1.0, 0.0, 0.0]
