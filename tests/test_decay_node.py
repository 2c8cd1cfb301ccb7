"""Decay proved on a real node: what the cluster multiplies in is the closed formula, and so is what the answer tells.

The formula is written out here once more, from each spelling, in plain arithmetic; nothing of `app.decay` is called.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from app import decay, queries
from app.answers import RouteHit, SearchResult
from app.asking import Search, Why
from app.collection import Collection
from app.elastic import Cluster
from app.planning import id_of, make_plan, read_route, route_body
from app.ranking import Decay
from app.search import Caller
from app.times import format_instant, from_ms, parse_instant, to_ms
from app.why import why
from tests.nodes import run_once
from tests.searching import (
    DAY,
    NOW,
    NOW_MS,
    PATIENT,
    Asker,
    StandIn,
    drop_collection,
    ids,
    make_collection,
    unit,
)

pytestmark = pytest.mark.node

HOUR = DAY // 24
RELATIVE, ABSOLUTE = 2e-6, 1e-7
"""32-bit floats: two weights, the raw score and the product are each rounded once."""

# --- the closed formula, from the spelling ---------------------------------------------------------------------------


def decayed(kind: str, strength: dict[str, Any], beyond_ms: float) -> float:
    """Return the decay at so many milliseconds beyond the offset."""
    if "hourly_loss" in strength:
        hours = beyond_ms / HOUR
        return float((1 - strength["hourly_loss"]) ** hours)
    if "rate" in strength:
        days = beyond_ms / DAY
        return (
            max(0.0, 1 - strength["rate"] * days) if kind == "linear" else math.exp(-strength["rate"] * days)
        )
    scale = MS[strength.get("half_life") or strength["scale"]]
    d = strength.get("decay", 0.5)
    x = beyond_ms / scale
    if kind == "exp":
        return float(d**x)
    if kind == "gauss":
        return math.exp(math.log(d) * x**2)
    return max(0.0, 1 - (1 - d) * x)


MS = {"7d": 7 * DAY, "10d": 10 * DAY, "36h": 36 * HOUR, "400d": 400 * DAY, None: 0}


def closed(options: dict[str, Any], document: dict[str, Any], *, field: str = "creation_time") -> float:
    """Return the factor of a document under a decay as a caller spells it, its floor given."""
    if document.get("evergreen"):
        return 1.0
    floor = options["floor"]
    read = document.get(field)
    if field == "last_accessed_at" and (
        read is None or (document.get("creation_time") and to_ms(parse_instant(read)) > NOW_MS)
    ):
        field = "creation_time"  # not read yet: as old as it is
    if document.get(field) is None:
        missing = options.get("missing")
        return float(floor if missing is None else missing)
    age_ms = NOW_MS - to_ms(parse_instant(document[field]))
    if age_ms < 0 and options.get("future", "clamp") == "clamp":
        return 1.0
    beyond_ms = max(0, abs(age_ms) - MS[options.get("offset")])
    return float(floor + (1 - floor) * decayed(options.get("kind", "exp"), options, beyond_ms))


# --- the documents ---------------------------------------------------------------------------------------------------

AGES_MS = [
    0, 1, HOUR - 1, HOUR, 35 * HOUR, 36 * HOUR, 36 * HOUR + 1, 37 * HOUR, 3 * DAY, 7 * DAY, 10 * DAY, 20 * DAY,
    30 * DAY, 60 * DAY, 85 * DAY, 86 * DAY, 87 * DAY, 120 * DAY, 365 * DAY, 3650 * DAY,
    -1, -2000, -HOUR, -36 * HOUR, -10 * DAY, -86 * DAY, -400 * DAY,
]  # fmt: skip


def corpus() -> list[dict[str, Any]]:
    """Return documents of many ages, each with its own raw score in both routes; the last points away from the query."""
    dated: list[dict[str, Any]] = [
        {"id": f"age{age}", "creation_time": format_instant(from_ms(NOW_MS - age))} for age in AGES_MS
    ]
    dated += [
        {"id": "y0001", "creation_time": "0001-01-01"},
        {"id": "y1969", "creation_time": "1969-12-31T23:59:59.999Z"},
        {"id": "y9999", "creation_time": "9999-12-31T23:59:59.999Z"},
        {"id": "none"},
        {"id": "none2"},
        {"id": "evergreen-old", "creation_time": "2001-01-01", "evergreen": True},
        {"id": "evergreen-future", "creation_time": "2031-01-01", "evergreen": True},
        {"id": "evergreen-none", "evergreen": True},
        {"id": "away", "creation_time": "2025-01-21"},
        {"id": "away-none"},
    ]
    for at, document in enumerate(dated):
        document["text"] = "hello " + "word " * (at % 7)
        angle = math.pi if document["id"].startswith("away") else 0.07 * at
        document["embedding"] = [math.cos(angle), math.sin(angle), 0.0]
    return dated


DOCUMENTS = {document["id"]: document for document in corpus()}


@pytest.fixture(scope="module")
def documents(node_url: str) -> Iterator[Collection]:
    collection = run_once(
        node_url, lambda cluster: make_collection(cluster, list(DOCUMENTS.values()), dims=3)
    )
    yield collection
    run_once(node_url, lambda cluster: drop_collection(cluster, collection))


@pytest.fixture
async def asker(cluster: Cluster, documents: Collection) -> Asker:
    return Asker(cluster, documents, StandIn(dims=3, vectors={"hello": [1.0, 0.0, 0.0]}))


# --- the table -------------------------------------------------------------------------------------------------------

STRENGTHS: list[tuple[str, dict[str, Any]]] = [
    ("exp", {"half_life": "7d"}),
    ("exp", {"scale": "10d", "decay": 0.2}),
    ("exp", {"rate": 0.03}),
    ("exp", {"hourly_loss": 0}),
    ("exp", {"hourly_loss": 0.01}),
    ("exp", {"hourly_loss": 1e-9}),
    ("exp", {"hourly_loss": 1}),
    ("gauss", {"half_life": "7d"}),
    ("gauss", {"scale": "10d", "decay": 0.2}),
    ("linear", {"half_life": "400d"}),
    ("linear", {"scale": "10d", "decay": 0.2}),
    ("linear", {"rate": 0.03}),
]
REST = [
    {"offset": offset, "floor": floor, "missing": missing, "future": future}
    for offset, floor, missing, future in itertools.product(
        [None, "36h"], [0, 0.3, 1], [None, 0, 0.5, 1], ["clamp", "symmetric"]
    )
]


def close_to(value: float | None, wanted: float) -> bool:
    return value is not None and math.isclose(value, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def wanted_of(options: dict[str, Any]) -> dict[str, float]:
    return {name: closed(options, document) for name, document in DOCUMENTS.items()}


TABLE = pytest.mark.parametrize(
    "kind, strength", STRENGTHS, ids=[f"{kind}-{strength}" for kind, strength in STRENGTHS]
)
WORDS, NEAR = {"kind": "text"}, {"kind": "vector"}


@TABLE
async def test_the_cluster_multiplies_by_the_closed_formula(
    cluster: Cluster, documents: Collection, kind: str, strength: dict[str, Any]
) -> None:
    # 48 policies x text, vector and fused: what is ranked, straight from the cluster's answers.
    asked, searches = [], []
    for rest, placement in itertools.product(REST, ["route", "fused"]):
        options = {"kind": kind, **strength, **rest}
        request = Search.model_validate(
            {
                "collection": documents.name, "query": "hello", "routes": [WORDS, NEAR],
                "decay": {**options, "placement": placement},
            }
        )  # fmt: skip
        plan = make_plan(request, collection=documents, now_ms=NOW_MS)
        for route in plan.routes if placement == "route" else plan.routes[:1]:
            asked.append((options, plan, route))
            body = route_body(plan, route, {"hello": [1.0, 0.0, 0.0]}, size=100)
            searches.append(({"index": f"halflife-{documents.name}"}, body))
    answers = await cluster.msearch(searches, timeout_s=60)
    for (options, plan, route), answer in zip(asked, answers, strict=True):
        assert isinstance(answer, dict), answer
        wanted = wanted_of(options)
        hits = answer["hits"]["hits"]
        assert {id_of(hit) for hit in hits} == set(DOCUMENTS)
        scores = [hit["_score"] for hit in hits]
        assert scores == sorted(scores, reverse=True)
        for hit in hits:
            base, factor = hit["matched_queries"]["base"], wanted[id_of(hit)]
            told = (id_of(hit), options, plan.placement, route.name, factor, hit["_score"], base)
            if plan.placement == "fused":
                assert hit["_score"] == base, told
                assert close_to(hit["matched_queries"]["factor"], factor), told
            else:
                assert math.isclose(hit["_score"], base * factor, rel_tol=RELATIVE, abs_tol=ABSOLUTE), told
                if base > 0.01:
                    assert close_to(hit["_score"] / base, factor), told
        for candidate in read_route(plan, route, answer).candidates:
            assert close_to(candidate.factor, wanted[candidate.id]), (candidate, options)
            assert candidate.factor is not None
            assert 0 <= candidate.factor <= 1


@TABLE
async def test_the_answer_tells_the_closed_formula(asker: Asker, kind: str, strength: dict[str, Any]) -> None:
    sample = [{"kind": kind, **strength, **rest} for rest in REST[::7]]
    fused = [{**options, "placement": "fused"} for options in sample]
    plain, *answers = await asker.batch(
        *({"query": "hello", "top_k": 100, "decay": options} for options in ["off", *sample, *fused])
    )
    assert isinstance(plain, SearchResult)
    sums = {hit.id: hit.score for hit in plain.hits}
    for options, answer in zip([*sample, *fused], answers, strict=True):
        assert isinstance(answer, SearchResult), answer
        wanted = wanted_of(options)
        assert set(ids(answer)) == set(DOCUMENTS)
        for hit in answer.hits:
            told = (hit, options, wanted[hit.id])
            assert close_to(hit.decay, wanted[hit.id]), told
            assert set(hit.routes) == {"text", "vector"}, told
            if options.get("placement") == "fused":
                # The routes stay as they are without decay; the factor multiplies their sum.
                assert hit.fused_score == sums[hit.id], told
                assert hit.score == pytest.approx(
                    sums[hit.id] * wanted[hit.id], rel=RELATIVE, abs=ABSOLUTE
                ), told
                assert all(route.decay is None for route in hit.routes.values()), told
                # The cluster's own number, a 32-bit float, not one computed beside it.
                if wanted[hit.id] > 1e-30:
                    assert hit.decay == float(str(np.float32(hit.decay or 0))), told
                assert all(route.score == route.decayed_score for route in hit.routes.values()), told
                continue
            for route in hit.routes.values():
                assert close_to(route.decay, wanted[hit.id]), told
                assert route.score is not None
                product = route.score * wanted[hit.id]
                assert route.decayed_score == pytest.approx(product, rel=RELATIVE, abs=ABSOLUTE), told
        assert_ranked(answer)


def assert_ranked(answer: SearchResult) -> None:
    scores = [hit.score for hit in answer.hits]
    assert scores == sorted(scores, reverse=True)
    for name in answer.routes:
        held = sorted(
            (hit.routes[name] for hit in answer.hits if name in hit.routes), key=lambda r: r.rank or 0
        )
        assert [route.rank for route in held] == list(range(1, len(held) + 1))
        decayed_scores = [route.decayed_score or 0.0 for route in held]
        assert decayed_scores == sorted(decayed_scores, reverse=True)


async def test_off_leaves_everything_as_it_is(asker: Asker) -> None:
    plain = await asker.ask("hello", top_k=100, decay="off")
    # What is left out is 'auto', which finds nothing here that says the same thing.
    auto = await asker.ask("hello", top_k=100)
    assert auto.recency is not None
    assert (
        auto.model_copy(update={"took_ms": plain.took_ms, "routes": plain.routes, "recency": None}) == plain
    )
    for hit in plain.hits:
        assert hit.decay is None
        for route in hit.routes.values():
            assert (route.decay, route.decayed_score) == (None, route.score)


async def test_routes_decay_by_their_own_floor_strength_and_date(made: Any) -> None:
    given = [
        {
            "id": f"d{at}", "text": "hello", "embedding": [1, 0.1 * at, 0],
            "creation_time": format_instant(from_ms(NOW_MS - at * DAY)),
            "updated_at": format_instant(from_ms(NOW_MS - (9 - at) * HOUR)),
            **({} if at == 4 else {"last_accessed_at": format_instant(from_ms(NOW_MS - at * HOUR))}),
        }
        for at in range(10)
    ]  # fmt: skip
    by_id = {document["id"]: document for document in given}
    asker: Asker = await made(given, {"hello": [1, 0, 0]})
    routes = [
        {"kind": "text"},
        {"kind": "vector"},
        {
            "kind": "text",
            "name": "accessed",
            "decay": {"field": "last_accessed_at", "hourly_loss": 0.1, "floor": 0},
        },
        {
            "kind": "vector",
            "name": "updated",
            "decay": {"field": "updated_at", "half_life": "36h", "floor": 0.2},
        },
        {"kind": "text", "name": "plain", "decay": "off"},
    ]
    # Defaults: half for words, nearly one for vectors, since cosines crowd into a narrow band.
    base = {"scale": "10d", "decay": 0.2}
    wanted: dict[str, tuple[dict[str, Any], str]] = {
        "text": ({**base, "floor": 0.5}, "creation_time"),
        "vector": ({**base, "floor": 0.98}, "creation_time"),
        "accessed": ({"hourly_loss": 0.1, "floor": 0}, "last_accessed_at"),
        "updated": ({"half_life": "36h", "floor": 0.2}, "updated_at"),
    }
    for order in (routes, routes[::-1]):
        answer = await asker.ask("hello", decay=base, routes=order)
        assert len(answer.hits) == 10
        for hit in answer.hits:
            document = by_id[hit.id]
            # The request's own decay, whichever route found the hit first.
            assert close_to(hit.decay, closed({**base, "floor": 0.5}, document)), hit
            for name, (options, field) in wanted.items():
                factor = closed(options, document, field=field)
                assert close_to(hit.routes[name].decay, factor), (name, hit)
            assert hit.routes["plain"].decay is None


async def test_as_of_then_a_later_reading_has_not_been(made: Any) -> None:
    read = {"id": "read", "text": "hello", "creation_time": "2020-01-01", "last_accessed_at": "2025-01-30"}
    never = {"id": "never", "text": "hello", "creation_time": "2020-01-01"}
    asker: Asker = await made([read, never])
    options = {"half_life": "30d", "field": "last_accessed_at", "floor": 0.2}
    for placement in ("route", "fused"):
        decayed = {**options, "placement": placement}
        for as_of, wanted in (("2024-01-01", 0.2), (NOW, 0.2 + 0.8 * 0.5 ** (1 / 30))):
            answer = await asker.ask("hello", routes=[WORDS], as_of=as_of, decay=decayed)
            factors = {hit.id: hit.decay for hit in answer.hits}
            assert factors == {
                "read": pytest.approx(wanted, abs=1e-6),
                "never": pytest.approx(0.2, abs=1e-6),
            }
            asked = Why.model_validate(
                {"collection": asker.collection.name, "query": "hello", "id": "read", "routes": [WORDS],
                 "as_of": as_of, "decay": decayed, **PATIENT}
            )  # fmt: skip
            told = await why(
                asked, collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS
            )
            assert told.decay == pytest.approx(wanted, abs=1e-6)
            [hit] = [hit for hit in answer.hits if hit.id == "read"]
            assert told.age_days == hit.age_days


async def test_a_fresh_route_of_a_memory_takes_in_what_was_never_read(made: Any) -> None:
    dates: dict[str, dict[str, str]] = {
        "new": {"creation_time": "2025-01-30"},
        "old": {"creation_time": "2024-01-01"},
        "read": {"creation_time": "2024-01-01", "last_accessed_at": "2025-01-30"},
        "read-long-ago": {"creation_time": "2025-01-30", "last_accessed_at": "2024-06-01"},
        "read-later": {"creation_time": "2025-01-30", "last_accessed_at": "2025-02-10"},
        "later": {"creation_time": "2025-02-10"},
        "undated": {},
    }
    given = [{"id": name, "text": "hello", **told} for name, told in dates.items()]
    asker: Asker = await made(given)
    fresh: dict[str, Any] = {"kind": "fresh_text", "window": "7d"}
    memory = {"half_life": "30d", "field": "last_accessed_at"}
    for decayed, route, wanted in (
        (memory, fresh, {"new", "read", "read-later"}),
        ({"half_life": "30d"}, {**fresh, "decay": memory}, {"new", "read", "read-later"}),
        (memory, {**fresh, "decay": {"field": "creation_time"}}, {"new", "read-long-ago", "read-later"}),
        (memory, {**fresh, "field": "last_accessed_at"}, {"read"}),
        ({"half_life": "30d"}, fresh, {"new", "read-long-ago", "read-later"}),
    ):
        answer = await asker.ask("hello", top_k=50, routes=[route], decay=decayed)
        assert set(ids(answer)) == wanted, (decayed, route)
        for name in dates:
            asked = Why.model_validate(
                {
                    "collection": asker.collection.name,
                    "query": "hello",
                    "id": name,
                    "routes": [route],
                    "decay": decayed,
                    **PATIENT,
                }
            )
            told = await why(
                asked, collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS
            )
            way = told.routes["fresh_text"]
            assert way.matches == (name in wanted), (decayed, route, name)
            assert way.matches or "date window" in (way.note or ""), way


async def test_what_was_never_read_is_as_old_as_it_is(made: Any) -> None:
    ages: list[int | None] = [None, 0, HOUR, 10 * DAY, 90 * DAY, -DAY, -10 * DAY]
    given: list[dict[str, Any]] = []
    for at, (read, created) in enumerate(itertools.product(ages, ages)):
        dates = {"last_accessed_at": read, "creation_time": created}
        given.append(
            {
                "id": f"m{at:02d}",
                "text": "hello",
                "evergreen": at % 11 == 5,
                **{
                    name: format_instant(from_ms(NOW_MS - age))
                    for name, age in dates.items()
                    if age is not None
                },
            }
        )
    by_id = {document["id"]: document for document in given}
    asker: Asker = await made(given)
    table = [
        {"kind": kind, **strength, **rest, "field": "last_accessed_at", "placement": placement}
        for kind, strength in STRENGTHS
        for rest in REST[::11]
        for placement in ("route", "fused")
    ]
    answers = await asker.batch(
        *({"query": "hello", "top_k": 50, "routes": [WORDS], "decay": options} for options in table)
    )
    for options, answer in zip(table, answers, strict=True):
        assert isinstance(answer, SearchResult), answer
        assert len(answer.hits) == len(given)
        for hit in answer.hits:
            wanted = closed(options, by_id[hit.id], field="last_accessed_at")
            assert close_to(hit.decay, wanted), (hit, options, wanted)
            if options["placement"] == "route":
                assert close_to(hit.routes["text"].decay, wanted), (hit, options, wanted)


async def test_a_nearly_zero_factor_for_undated_documents_is_zero_not_one(asker: Asker) -> None:
    for missing in (1e-46, 5e-324, 1e-44):
        answer = await asker.ask("hello", top_k=100, decay={"half_life": "7d", "missing": missing})
        assert [hit.routes["text"].decay for hit in answer.hits if hit.id == "none"] == [
            pytest.approx(0, abs=1e-43)
        ]


@pytest.mark.parametrize("kind", ["exp", "gauss", "linear"])
@pytest.mark.parametrize(
    "scale", ["1ms", "106751991168d", "9223372036854775807ms", "9223372036854775808ms", "1s"]
)
async def test_decay_params_bc04_the_longest_and_shortest_scales_reach_the_cluster(
    asker: Asker, kind: str, scale: str
) -> None:
    answer = await asker.ask(
        "hello", top_k=100, decay={"kind": kind, "scale": scale, "offset": "0d", "decay": 1e-12, "floor": 0.2}
    )
    assert not answer.degraded, answer.warnings
    assert len(answer.hits) == len(DOCUMENTS)


@pytest.mark.parametrize("kind", ["exp", "gauss", "linear"])
async def test_decay_params_bc04_minutes_are_minutes_in_the_cluster(asker: Asker, kind: str) -> None:
    for text in ("30m", "PT30M", "1800s"):
        answer = await asker.ask("hello", top_k=100, decay={"kind": kind, "half_life": text, "floor": 0})
        by_id = {hit.id: hit for hit in answer.hits}
        x = (HOUR - 1) / (30 * 60_000)
        wanted = {"exp": 0.5**x, "gauss": 0.5 ** (x * x), "linear": max(0.0, 1 - 0.5 * x)}[kind]
        assert by_id[f"age{HOUR - 1}"].decay == pytest.approx(wanted, abs=1e-6)


async def test_an_offset_longer_than_history_spares_everything(asker: Asker) -> None:
    for strength in ({"hourly_loss": 1}, {"hourly_loss": 0.5}, {"half_life": "1d"}):
        answer = await asker.ask(
            "hello", top_k=100,
            decay={**strength, "offset": "106751991168d", "floor": 0, "missing": 1, "future": "symmetric"},
        )  # fmt: skip
        assert {hit.decay for hit in answer.hits} == {1.0}
        assert {route.decay for hit in answer.hits for route in hit.routes.values()} == {1.0}


# --- the cases met elsewhere -----------------------------------------------------------------------------------------


async def scores_of(cluster: Cluster, collection: Collection, query: dict[str, Any]) -> dict[str, float]:
    """Return id -> score of a body's query, straight from the cluster."""
    answer = await cluster.search(
        f"halflife-{collection.name}", {"query": query, "size": 50, "_source": False}, timeout_s=30
    )
    return {hit["_id"]: hit["_score"] for hit in answer["hits"]["hits"]}


def resolved(**options: Any) -> Any:
    return decay.resolve(Decay.model_validate(options), default_floor=0)


@pytest.fixture(scope="module")
def january(node_url: str) -> Iterator[Collection]:
    days = {f"d{age}": 31 - age for age in (0, 5, 10, 15, 20, 30)}
    given: list[dict[str, Any]] = [
        {"id": name, "text": "hello", "creation_time": f"2025-01-{day:02d}T00:00:00Z"}
        for name, day in days.items()
    ]
    given += [
        {"id": "none", "text": "hello"},
        {"id": "null", "text": "hello", "creation_time": None},
        {"id": "skew2s", "text": "hello", "creation_time": "2025-01-31T00:00:02Z"},
        {"id": "plus10d", "text": "hello", "creation_time": "2025-02-10T00:00:00Z"},
        {"id": "y9999", "text": "hello", "creation_time": "9999-12-31T23:59:59.999Z"},
        {"id": "z", "text": "hello", "creation_time": "2025-01-21T00:00:00Z"},
        {"id": "plus8", "text": "hello", "creation_time": "2025-01-21T08:00:00+08:00"},
        {"id": "naive", "text": "hello", "creation_time": "2025-01-21T00:00:00"},
        {"id": "date", "text": "hello", "creation_time": "2025-01-21"},
        {"id": "frac", "text": "hello", "creation_time": "2025-01-21T00:00:00.1234567Z"},
    ]  # fmt: skip

    collection = run_once(node_url, lambda cluster: make_collection(cluster, given, dims=3))
    yield collection
    run_once(node_url, lambda cluster: drop_collection(cluster, collection))


ONE: dict[str, Any] = {"match_all": {}}


async def test_decay_math_bc01(cluster: Cluster, january: Collection) -> None:
    names = ["d0", "d5", "d10", "d15", "d20", "d30"]
    first = {
        "exp": [1, 1, 0.7071068, 0.5, 0.3535534, 0.1767767],
        "gauss": [1, 1, 0.8408964, 0.5, 0.2102241, 0.0131390],
        "linear": [1, 1, 0.75, 0.5, 0.25, 0],
    }
    second = {"exp": [0.25, 0.0625], "gauss": [0.25, 0.00390625], "linear": [0.25, 0]}
    for kind, wanted in first.items():
        value = resolved(kind=kind, scale="10d", offset="5d", decay=0.5)
        scores = await scores_of(cluster, january, decay.scored(ONE, value, origin_ms=NOW_MS))
        assert [scores[name] for name in names] == pytest.approx(wanted, abs=1e-6)
    for kind, wanted in second.items():
        value = resolved(kind=kind, scale="10d", decay=0.25)
        scores = await scores_of(cluster, january, decay.scored(ONE, value, origin_ms=NOW_MS))
        assert [scores[name] for name in ("d10", "d20")] == pytest.approx(wanted, abs=1e-6)


async def test_decay_math_bc03_decay_multiplies(cluster: Cluster, january: Collection) -> None:
    four = {"constant_score": {"filter": {"match_all": {}}, "boost": 4}}
    value = resolved(kind="exp", scale="10d", decay=0.5)
    scores = await scores_of(cluster, january, decay.scored(four, value, origin_ms=NOW_MS))
    assert (scores["d0"], scores["d10"]) == pytest.approx((4.0, 2.0), abs=1e-6)


async def test_decay_date_bc05_undated_documents(cluster: Cluster, january: Collection) -> None:
    asker = Asker(cluster, january, StandIn(dims=3))
    base = {"kind": "exp", "scale": "10d", "decay": 0.5}
    for options, none in (
        ({"missing": 0.5}, 0.5),
        ({"floor": 0}, 0.0),
        ({"floor": 0, "missing": 1}, 1.0),
        ({}, 0.5),
    ):
        answer = await asker.ask("hello", top_k=50, routes=[{"kind": "text"}], decay={**base, **options})
        factors = {hit.id: hit.routes["text"].decay for hit in answer.hits}
        floor = options.get("floor", 0.5)
        assert factors["none"] == pytest.approx(none, abs=1e-6)
        assert factors["null"] == factors["none"]
        assert factors["d0"] == pytest.approx(1.0, abs=1e-6)
        assert factors["d10"] == pytest.approx(floor + (1 - floor) * 0.5, abs=1e-6)
        assert ids(answer).index("none") > ids(answer).index("d0")


async def test_decay_date_bc07_the_future(cluster: Cluster, january: Collection) -> None:
    asker = Asker(cluster, january, StandIn(dims=3))
    names = ["d0", "skew2s", "plus10d", "y9999"]
    for future, wanted in (("symmetric", [1.0, 0.9999984, 0.5, 0.0]), ("clamp", [1.0, 1.0, 1.0, 1.0])):
        for placement in ("route", "fused"):
            answer = await asker.ask(
                "hello", top_k=50, routes=[{"kind": "text"}, {"kind": "text", "name": "again"}],
                decay={"scale": "10d", "decay": 0.5, "floor": 0, "future": future, "placement": placement},
            )  # fmt: skip
            hits = {hit.id: hit for hit in answer.hits}
            assert [hits[name].decay for name in names] == pytest.approx(wanted, abs=1e-6)
            if placement == "route":
                for name in names:
                    assert hits[name].routes["text"].decay == hits[name].routes["again"].decay
                    assert hits[name].routes["text"].decay == pytest.approx(hits[name].decay, abs=1e-6)
                    assert hits[name].age_days == pytest.approx(
                        (NOW_MS - to_ms(hits[name].creation_time or from_ms(0))) / DAY
                    )


async def test_datetime_bc29_a_numeric_origin(cluster: Cluster, january: Collection) -> None:
    asker = Asker(cluster, january, StandIn(dims=3))
    for origin in (1_738_281_600, 1_738_281_600_000, NOW):
        answer = await asker.ask(
            "hello", top_k=50, routes=[{"kind": "text"}], as_of=origin, decay={"half_life": "10d", "floor": 0}
        )
        factors = {hit.id: hit.decay for hit in answer.hits}
        assert format_instant(answer.origin) == "2025-01-31T00:00:00.000Z"
        assert factors["d10"] == pytest.approx(0.5, abs=1e-6)
        assert not {"skew2s", "plus10d", "y9999"} & set(factors), "created after the origin"


async def test_datetime_bc30_spellings_and_day_bounds(cluster: Cluster, january: Collection) -> None:
    asker = Asker(cluster, january, StandIn(dims=3))
    same = {"z", "plus8", "naive", "date", "d10"}

    async def found(bounds: dict[str, Any]) -> dict[str, float | None]:
        answer = await asker.ask(
            "hello", top_k=50, routes=[{"kind": "text"}], filter={"creation_time": bounds},
            decay={"half_life": "10d", "floor": 0},
        )  # fmt: skip
        for hit in answer.hits:
            assert hit.model_dump(mode="json")["creation_time"].endswith("Z")
        return {hit.id: hit.decay for hit in answer.hits}

    inside = await found({"gte": "2025-01-21T00:00:00Z", "lt": "2025-01-21T00:00:01Z"})
    assert set(inside) == {*same, "frac"}
    assert [inside[name] for name in sorted(same)] == pytest.approx([0.5] * 5, abs=1e-6)
    assert inside["frac"] == pytest.approx(0.5, abs=1e-5)
    older = {"d15", "d20", "d30"}
    assert set(await found({"lte": "2025-01-21"})) == {*same, "frac", *older}
    assert set(await found({"gt": "2025-01-21"})) == {"d0", "d5", "skew2s", "plus10d", "y9999"}


FOUR = [
    {"id": "x", "embedding": [1, 0, 0], "creation_time": "2025-01-01T00:00:00Z"},
    {"id": "xy", "embedding": [1, 1, 0], "creation_time": "2025-01-31T00:00:00Z"},
    {"id": "y", "embedding": [0, 1, 0], "creation_time": "2025-01-31T00:00:00Z"},
    {"id": "nx", "embedding": [-1, 0, 0], "creation_time": "2025-01-31T00:00:00Z"},
]
VECTOR = [{"kind": "vector"}]
HALVING = {"kind": "exp", "scale": "10d", "decay": 0.5, "floor": 0}


@pytest.mark.parametrize("options, tolerance", [({"type": "hnsw"}, 1e-6), ({"type": "int8_hnsw"}, 1e-3)], ids=["float", "int8"])  # fmt: skip
async def test_decay_pipeline_bc08_bc10_cosines_decay_before_the_cut(
    made: Any, options: dict[str, Any], tolerance: float
) -> None:
    given = [{**each, "text": each["id"]} for each in FOUR]
    asker: Asker = await made(given, {"q": [1, 0, 0]}, index_options=options)
    answer = await asker.ask("q", routes=VECTOR, decay=HALVING)
    assert ids(answer) == ["xy", "y", "x", "nx"]
    scores = [hit.routes["vector"].decayed_score for hit in answer.hits]
    assert scores == pytest.approx([0.8535534, 0.5, 0.125, 0.0], abs=tolerance)
    # BC-10: only the undecayed nearest would come back if no more than top_k were asked for.
    first = await asker.ask("q", routes=VECTOR, decay=HALVING, top_k=1)
    assert ids(first) == ["xy"]
    assert first.hits[0].routes["vector"].decayed_score == pytest.approx(0.8535534, abs=tolerance)


async def test_decay_pipeline_bc10_an_undated_document_takes_its_factor(made: Any) -> None:
    given = [{**each, "text": each["id"]} for each in FOUR]
    given.append({"id": "notime", "text": "notime", "embedding": [0.9, 0.1, 0]})
    asker: Asker = await made(given, {"q": [1, 0, 0]})
    answer = await asker.ask("q", routes=VECTOR, decay={**HALVING, "missing": 1})
    assert [(hit.id, hit.routes["vector"].decayed_score) for hit in answer.hits] == [
        ("notime", pytest.approx(0.9969419, abs=1e-6)), ("xy", pytest.approx(0.8535534, abs=1e-6)),
        ("y", pytest.approx(0.5, abs=1e-6)), ("x", pytest.approx(0.125, abs=1e-6)), ("nx", 0.0),
    ]  # fmt: skip
    assert ids(await asker.ask("q", routes=VECTOR, decay=HALVING, top_k=1)) == ["xy"]


async def test_gauss_over_86_days_is_nothing_and_the_answer_says_so(asker: Asker) -> None:
    old = {"creation_time": {"lte": format_instant(from_ms(NOW_MS - 86 * DAY))}}
    answer = await asker.ask(
        "hello", top_k=50, filter=old, decay={"kind": "gauss", "scale": "7d", "floor": 0},
        routes=[{"kind": "text"}],
    )  # fmt: skip
    scores = [hit.routes["text"].decayed_score for hit in answer.hits if not hit.evergreen]
    assert len(scores) > 5
    assert scores == pytest.approx([0.0] * len(scores), abs=1e-38)
    assert any("tells no ages apart" in warning for warning in answer.warnings)
    undated = await asker.ask(
        "hello", top_k=50, filter={"creation_time": {"exists": False}}, decay={"half_life": "7d"}
    )
    assert not [warning for warning in undated.warnings if "tells no ages apart" in warning]


def test_the_names_under_test_are_those_of_the_formula() -> None:
    # The routes' answers are read by these names: renaming one side would make every factor 1.
    assert (queries.BASE_NAME, queries.FACTOR_NAME) == ("base", "factor")
    assert RouteHit(rank=1, score=1, decay=1, decayed_score=1, contribution=0).decay == 1
    assert unit([3, 4]) == [0.6, 0.8]
