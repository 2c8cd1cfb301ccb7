"""From a request to the bodies sent, whole and with ==; beside them the real node, which takes them and answers as told."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app import decay, planning, queries
from app.answers import Total
from app.asking import SETTLED, Rewriting, Search
from app.collection import Collection
from app.elastic import Cluster
from app.encoding import unpack_vector
from app.errors import InvalidRequest, LimitExceeded
from app.planning import Pinned, fetch_body, make_plan, measure_body, read_route, rewritten, route_body
from app.ranking import Decay, Fusion, Profile, Route
from app.ratings import Ratings
from app.times import parse_instant, to_ms
from tests.nodes import run_once
from tests.searching import DAY, NOW_MS, drop_collection, make_collection

ORIGIN = "2025-01-31T00:00:00.000Z"
COLLECTION = Collection(
    name="handbook", index="halflife-handbook-1", dims=3, similarity="cosine", declared={"year": "long"}, template_version=1
)  # fmt: skip
VECTORS = {"carry over": [1.0, 0.0, 0.0], "another": [0.0, 1.0, 0.0]}


def plan_of(
    collection: Collection = COLLECTION, *, forced: Sequence[dict[str, Any]] = (), **options: Any
) -> planning.Plan:
    request = Search.model_validate({"collection": collection.name, "query": "carry over", **options})
    return make_plan(request, collection=collection, now_ms=NOW_MS, forced=forced)


def bodies(
    plan: planning.Plan, *, size: int | None = None, ids: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    return {
        route.name: route_body(plan, route, VECTORS, size=plan.window if size is None else size, ids=ids)
        for route in plan.routes
    }


# --- the parts of bodies, written out --------------------------------------------------------------------------------

NOT_EXPIRED = {"bool": {"must_not": [{"range": {"expires_at": {"lte": ORIGIN}}}]}}
CREATED_BY = {"bool": {"must_not": [{"range": {"creation_time": {"gt": ORIGIN}}}]}}
TRUE_NOW = {
    "bool": {
        "must_not": [{"range": {"start_date": {"gt": ORIGIN}}}, {"range": {"end_date": {"lte": ORIGIN}}}]
    }
}
STANDING = [NOT_EXPIRED, TRUE_NOW]


def words(text: str = "carry over") -> dict[str, Any]:
    return {
        "bool": {
            "should": [
                {"match": {"text": {"query": text}}},
                {"match": {"text.english": {"query": text, "boost": 1.0}}},
                {"match": {"title": {"query": text, "boost": 1.5}}},
                {"match": {"title.english": {"query": text, "boost": 1.5}}},
                {"match": {"text.thai": {"query": text}}},
                {"match": {"title.thai": {"query": text, "boost": 1.5}}},
                {"match_phrase": {"text": {"query": text, "boost": 1.0}}},
            ],
            "minimum_should_match": 1,
        }
    }


def base(query: dict[str, Any]) -> dict[str, Any]:
    return {"bool": {"must": [query], "_name": "base"}}


def text_part(filters: list[dict[str, Any]], text: str = "carry over") -> dict[str, Any]:
    return {"bool": {"must": [base(words(text))], "filter": filters}}


def near(
    filters: list[dict[str, Any]],
    *,
    k: int = 100,
    num_candidates: int | None = None,
    vector: list[float] | None = None,
    similarity: float | None = None,
    **nested: Any,
) -> dict[str, Any]:
    knn: dict[str, Any] = {
        "field": "chunks.embedding",
        "query_vector": vector or [1.0, 0.0, 0.0],
        "k": k,
        "num_candidates": num_candidates or k,
        "filter": filters,
    }
    if similarity is not None:
        knn["similarity"] = similarity
    return {"nested": {"path": "chunks", "query": {"knn": knn}, "score_mode": "max", **nested}}


def body(
    query: dict[str, Any], *, size: int = 100, dates: Sequence[str] = (), chunks: bool = False
) -> dict[str, Any]:
    stored = {"_source": False} if chunks else {"stored_fields": "_none_"}
    return {
        "size": size,
        "query": query,
        **stored,
        "docvalue_fields": [
            *({"field": name, "format": "epoch_millis"} for name in dates),
            {"field": "evergreen"},
        ],
        "sort": [
            {"_score": {"order": "desc"}},
            {"creation_time": {"order": "desc", "missing": "_last"}},
            {"document_id": {"order": "asc"}},
        ],
    }


def functions(
    scale: str, *, floor: float, kind: str = "exp", field: str = "creation_time", at_scale: float = 0.5
) -> list[dict[str, Any]]:
    evergreen = {"term": {"evergreen": True}}
    aging = {"bool": {"filter": [{"range": {field: {"lte": ORIGIN}}}], "must_not": [evergreen]}}
    curve = {field: {"origin": ORIGIN, "scale": scale, "offset": "0ms", "decay": at_scale}}
    return [
        {"filter": aging, kind: curve, "weight": 1 - floor},
        {"filter": aging, "weight": floor},
        {"filter": {"bool": {"should": [evergreen, {"range": {field: {"gt": ORIGIN}}}]}}, "weight": 1.0},
        {"filter": {"bool": {"must_not": [{"exists": {"field": field}}, evergreen]}}, "weight": floor},
    ]


def decayed(query: dict[str, Any], applied: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "function_score": {
            "query": query,
            "functions": applied,
            "score_mode": "sum",
            "boost_mode": "multiply",
        }
    }


def told(query: dict[str, Any], applied: list[dict[str, Any]]) -> dict[str, Any]:
    teller = {
        "function_score": {
            "query": {"match_all": {}}, "functions": applied, "score_mode": "sum", "boost_mode": "replace", "_name": "factor",
        }
    }  # fmt: skip
    return {"bool": {"must": [query], "should": [{"bool": {"should": [teller], "boost": 0}}]}}


LANG = {
    "bool": {
        "should": [{"term": {"lang": "en"}}, {"term": {"metadata.lang": "en"}}],
        "minimum_should_match": 1,
    }
}
TENANT = {"term": {"metadata.tenant": "a"}}

# --- route bodies: request -> (route -> body, the documents it must find in the corpus below) ------------------------

HALF_YEAR = {"half_life": "180d"}
Case = tuple[str, dict[str, Any], dict[str, dict[str, Any]], dict[str, list[str]]]

CASES: list[Case] = [
    (
        "plain",
        {},
        {"text": body(text_part(STANDING)), "vector": body(base(near(STANDING)))},
        {"text": ["both", "old", "words", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "as_of",
        {"as_of": "2025-01-31T08:00:00+08:00"},
        {
            "text": body(text_part([NOT_EXPIRED, CREATED_BY, TRUE_NOW])),
            "vector": body(base(near([NOT_EXPIRED, CREATED_BY, TRUE_NOW]))),
        },
        {"text": ["both", "old", "words"], "vector": ["both", "near", "old", "words"]},
    ),
    (
        "any valid time",
        {"valid_time": "any"},
        {"text": body(text_part([NOT_EXPIRED])), "vector": body(base(near([NOT_EXPIRED])))},
        {
            "text": ["both", "old", "later", "words", "future"],
            "vector": ["both", "near", "future", "later", "old", "words"],
        },
    ),
    (
        "filters of the request, of a route and of the key",
        {
            "filter": {"lang": "en", "year": {"gte": 2024}},
            "routes": [{"kind": "text", "filter": {"evergreen": False}}, {"kind": "vector"}],
        },
        {
            "text": body(
                text_part(
                    [
                        TENANT, *STANDING, LANG, {"range": {"declared.year": {"gte": 2024}}},
                        {"bool": {"must_not": [{"term": {"evergreen": True}}]}},
                    ]
                )
            ),
            "vector": body(base(near([TENANT, *STANDING, LANG, {"range": {"declared.year": {"gte": 2024}}}]))),
        },
        {"text": ["both"], "vector": ["both", "near"]},
    ),
    (
        "decay in the routes, words falling to a half, vectors to nine tenths",
        {"decay": HALF_YEAR},
        {
            "text": body(decayed(text_part(STANDING), functions("180d", floor=0.5))),
            "vector": body(decayed(base(near(STANDING, k=200)), functions("180d", floor=0.98))),
        },
        {"text": ["both", "words", "old", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "decay of a route's own",
        {
            "decay": HALF_YEAR,
            "routes": [
                {"kind": "text", "decay": {"half_life": "36h", "floor": 0.25, "field": "updated_at"}},
                {"kind": "vector", "decay": "off"},
            ],
        },
        {
            "text": body(
                decayed(text_part(STANDING), functions("36h", floor=0.25, field="updated_at")),
                dates=["updated_at"],
            ),
            "vector": body(base(near(STANDING)), dates=["updated_at"]),
        },
        {"text": ["words", "both", "old", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "decay of the fused score",
        {"decay": {**HALF_YEAR, "placement": "fused"}},
        {
            "text": body(told(text_part(STANDING), functions("180d", floor=0.5))),
            "vector": body(told(base(near(STANDING)), functions("180d", floor=0.5))),
        },
        {"text": ["both", "old", "words", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "decay off",
        {"decay": "off"},
        {"text": body(text_part(STANDING)), "vector": body(base(near(STANDING)))},
        {"text": ["both", "old", "words", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "fresh routes",
        {
            "routes": [{"kind": "fresh_text"}, {"kind": "fresh_vector", "window": "400d", "field": "updated_at"}],
        },
        {
            "fresh_text": body(text_part([*STANDING, {"range": {"creation_time": {"lte": ORIGIN, "gte": "2025-01-01T00:00:00.000Z"}}}])),
            "fresh_vector": body(
                base(near([*STANDING, {"range": {"updated_at": {"lte": ORIGIN, "gte": "2023-12-28T00:00:00.000Z"}}}]))
            ),
        },
        {"fresh_text": ["both"], "fresh_vector": ["words"]},
    ),
    (
        "least relevance",
        {"min_relevance": 0.5},
        {
            "text": body(
                text_part([*STANDING, near([*STANDING, queries.text_query("carry over")], k=10_000, similarity=0.499999)])
            ),
            "vector": body(base(near(STANDING, similarity=0.499999))),
        },
        {"text": ["both", "future"], "vector": ["both", "near", "future"]},
    ),
    (
        "chunks",
        {"collapse": False},
        {
            "text": body(
                {
                    "bool": {
                        "must": [
                            base(
                                {
                                    "bool": {
                                        "minimum_should_match": 1,
                                        "should": [
                                            {
                                                "nested": {
                                                    "path": "chunks",
                                                    "query": {
                                                        "bool": {
                                                            "should": [
                                                                {"match": {"chunks.text": {"query": "carry over"}}},
                                                                {"match": {"chunks.text.english": {"query": "carry over", "boost": 1.0}}},
                                                                {"match": {"chunks.text.thai": {"query": "carry over"}}},
                                                                {"match_phrase": {"chunks.text": {"query": "carry over", "boost": 1.0}}},
                                                            ]
                                                        }
                                                    },
                                                    "score_mode": "max",
                                                    "inner_hits": {"_source": False, "size": 20},
                                                }
                                            },
                                            {"match": {"title": {"query": "carry over", "boost": 1.5}}},
                                            {"match": {"title.english": {"query": "carry over", "boost": 1.5}}},
                                            {"match": {"title.thai": {"query": "carry over", "boost": 1.5}}},
                                        ],
                                    }
                                }
                            )
                        ],
                        "filter": STANDING,
                    }
                },
                chunks=True,
            ),
            "vector": body(base(near(STANDING, inner_hits={"_source": False, "size": 20})), chunks=True),
        },
        {"text": ["both", "old", "words", "future"], "vector": ["both", "near", "future", "old", "words"]},
    ),
    (
        "several of one kind, other words, candidates",
        {
            "routes": [
                {"kind": "vector", "query": "another", "num_candidates": 500},
                {"kind": "vector", "num_candidates": 7},
                {"kind": "text", "query": "another", "name": "vector_2"},
                {"kind": "text"},
            ],
            "fusion": {"window": 30},
        },
        {
            "vector": body(base(near(STANDING, k=30, num_candidates=500, vector=[0.0, 1.0, 0.0])), size=30),
            "vector_3": body(base(near(STANDING, k=30)), size=30),
            "vector_2": body(text_part(STANDING, "another"), size=30),
            "text": body(text_part(STANDING), size=30),
        },
        {
            "vector": ["words", "future", "near", "both", "old"],
            "vector_3": ["both", "near", "future", "old", "words"],
            "vector_2": [],
            "text": ["both", "old", "words", "future"],
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("name, request_, wanted, found", CASES, ids=[case[0] for case in CASES])
def test_route_bodies(name: str, request_: dict[str, Any], wanted: dict[str, Any], found: Any) -> None:
    forced = [TENANT] if "key" in name else []
    assert bodies(plan_of(forced=forced, **request_)) == wanted


CORPUS: list[dict[str, Any]] = [
    # What the routes see of each: words 'carry over', the cosine with (1, 0, 0), dates.
    {"id": "both", "title": "carry", "text": "carry over", "embedding": [1, 0, 0], "creation_time": "2025-01-30", "lang": "en",
     "metadata": {"tenant": "a", "year": 2025}},
    {"id": "old", "title": "carry", "text": "carry over x", "embedding": [0.4, 0, 1], "creation_time": "2020-01-01", "lang": "en",
     "metadata": {"tenant": "b", "year": 2020}},
    {"id": "words", "text": "carry over the things", "embedding": [0, 1, 0], "creation_time": "2024-12-31", "updated_at": "2025-01-31",
     "metadata": {"tenant": "a"}},
    {"id": "near", "text": "something else", "embedding": [1, 0.2, 0], "creation_time": "2024-01-01", "metadata": {"tenant": "a", "lang": "en", "year": 2024}},
    {"id": "future", "text": "over and over it goes on and on for a while", "embedding": [1, 1, 0], "creation_time": "2025-06-01"},
    {"id": "expired", "text": "carry over", "embedding": [1, 0, 0], "expires_at": "2025-01-31T00:00:00Z"},
    {"id": "later", "text": "carry over soon", "embedding": [1, 1.2, 0], "creation_time": "2025-01-01", "start_date": "2025-02-01"},
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(node_url: str) -> Iterator[Collection]:
    collection = run_once(
        node_url, lambda cluster: make_collection(cluster, CORPUS, dims=3, declared={"year": "long"})
    )
    yield collection
    run_once(node_url, lambda cluster: drop_collection(cluster, collection))


@pytest.mark.node
@pytest.mark.parametrize("name, request_, wanted, found", CASES, ids=[case[0] for case in CASES])
async def test_node_route_bodies(
    cluster: Cluster,
    corpus: Collection,
    name: str,
    request_: dict[str, Any],
    wanted: Any,
    found: dict[str, list[str]],
) -> None:
    forced = [TENANT] if "key" in name else []
    plan = plan_of(corpus, forced=forced, **request_)
    searches = [({"index": f"halflife-{corpus.name}"}, each) for each in bodies(plan).values()]
    answers = await cluster.msearch(searches, timeout_s=60)
    got: dict[str, list[str]] = {}
    for route, answer in zip(plan.routes, answers, strict=True):
        assert isinstance(answer, dict), answer
        assert answer["_shards"]["failed"] == 0
        read = read_route(plan, route, answer)
        assert read.total == Total(value=len(answer["hits"]["hits"]), relation="eq")
        assert [each.rank for each in read.candidates] == list(range(1, len(read.candidates) + 1))
        got[route.name] = [each.id for each in read.candidates]
    assert got == found


# --- what a plan settles ---------------------------------------------------------------------------------------------


def test_a_plan_of_defaults() -> None:
    plan = plan_of()
    assert [(route.name, route.kind, route.weight) for route in plan.routes] == [
        ("text", "text", 1.0),
        ("vector", "vector", 1.0),
    ]
    assert (plan.placement, plan.base_decay, plan.window, plan.tails) == ("off", None, 100, ())
    assert (plan.origin_ms, plan.warnings, plan.fusion.rank_constant) == (NOW_MS, (), 60)
    assert plan.texts_to_embed() == ["carry over"]


def test_a_collections_profile_is_used_where_the_request_says_nothing() -> None:
    decayed = Decay.model_validate({"half_life": "90d", "placement": "fused"})
    ranked = COLLECTION.model_copy(
        update={
            "profiles": {
                "current": Profile(decay=decayed, fusion=Fusion(method="linear")),
                "words": Profile(routes=[Route(kind="text", weight=2)]),
            },
            "default_profile": "current",
        }
    )

    def plan(**options: Any) -> planning.Plan:
        request = Search.model_validate({"collection": "handbook", "query": "carry over", **options})
        return make_plan(request, collection=ranked, now_ms=NOW_MS)

    assert (plan().placement, plan().base_decay) == (
        "fused",
        decay.resolve(decayed, default_floor=0.5),
    )
    assert (plan().fusion.method, [route.name for route in plan().routes]) == ("linear", ["text", "vector"])
    assert (plan(decay="off").placement, plan(decay="off").base_decay) == ("off", None)
    assert plan(fusion={"method": "rrf"}).fusion.method == "rrf"
    own = plan(decay={"half_life": "1d"})
    assert own.placement == "route"
    assert own.base_decay is not None
    assert own.base_decay.scale_ms == DAY
    named = plan(profile="words")
    assert (named.placement, named.fusion.method) == ("off", "adaptive")
    assert [(route.name, route.weight) for route in named.routes] == [("text", 2)]
    with pytest.raises(InvalidRequest, match="no profile 'other'") as caught:
        plan(profile="other")
    assert caught.value.remedy == "its profiles are: current, words"


def test_embedded_texts_are_distinct_and_only_those_needed() -> None:
    assert plan_of(routes=[{"kind": "text"}]).texts_to_embed() == []
    assert plan_of(routes=[{"kind": "text"}], min_relevance=0).texts_to_embed() == ["carry over"]
    several = [
        {"kind": "vector"},
        {"kind": "fresh_vector", "query": "another"},
        {"kind": "vector", "query": "another"},
    ]
    assert plan_of(routes=several).texts_to_embed() == ["carry over", "another"]
    additive = plan_of(routes=[{"kind": "text"}], fusion={"method": "additive"}, decay={"hourly_loss": 0.01})
    assert additive.texts_to_embed() == ["carry over"]


def test_a_longer_page_than_the_window_asks_for_a_tail_and_leaves_the_head() -> None:
    short, long = plan_of(top_k=10, decay=HALF_YEAR), plan_of(top_k=300, decay=HALF_YEAR)
    assert (short.tails, long.tails) == ((), (200, 400))
    assert plan_of(top_k=150).tails == plan_of(top_k=200).tails == (200,)
    assert plan_of(top_k=10_000).tails == (200, 400, 800, 1600, 3200, 6400, 10_000)
    assert bodies(short) == bodies(long)
    assert bodies(long, size=400)["vector"]["query"]["function_score"]["query"] == base(near(STANDING, k=800))


@pytest.mark.parametrize(
    "top_k, decay, k",
    [
        (10, "off", 100),
        (10, HALF_YEAR, 200),
        (1, HALF_YEAR, 200),
        (10_000, "off", 10_000),
        (10_000, HALF_YEAR, 10_000),
    ],
)
def test_knn_params_bc27_bc10_k_is_oversampled_and_capped(top_k: int, decay: Any, k: int) -> None:
    plan = plan_of(top_k=top_k, decay=decay, routes=[{"kind": "vector", "num_candidates": 50}])
    sent = bodies(plan, size=[plan.window, *plan.tails][-1])["vector"]["query"]
    inner = sent["function_score"]["query"] if "function_score" in sent else sent
    knn = inner["bool"]["must"][0]["nested"]["query"]["knn"]
    assert (knn["k"], knn["num_candidates"]) == (k, k)


@pytest.mark.parametrize(
    "options, field",
    [
        ({"query_vector": [1, 0]}, "query_vector"),
        ({"fusion": {"method": "additive"}}, "fusion.method"),
        ({"fusion": {"method": "additive"}, "decay": "off"}, "fusion.method"),
        ({"filter": {"price": {"gte": 3}}}, "filter.price.gte"),
        ({"routes": [{"kind": "text", "filter": {"price": {"gte": 3}}}]}, "routes[0].filter.price.gte"),
        (
            {"decay": {"rate": 0.1}, "routes": [{"kind": "text", "decay": {"kind": "gauss"}}]},
            "routes[0].decay.kind",
        ),
        (
            {"query_vector": [1, 0, 0], "routes": [{"kind": "fresh_vector", "query": "other words"}]},
            "query_vector",
        ),
        (
            {
                "decay": {"rate": 9e7},
                "routes": [{"kind": "text"}, {"kind": "vector", "decay": {"kind": "linear"}}],
            },
            "routes[1].decay.kind",
        ),
        (
            {
                "decay": {"kind": "linear", "half_life": "1d"},
                "routes": [{"kind": "text", "decay": {"rate": 9e7}}],
            },
            "routes[0].decay.rate",
        ),
    ],
    ids=str,
)
def test_what_only_the_plan_can_see_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan_of(**options)
    assert caught.value.field == field
    assert caught.value.remedy


def test_a_query_too_long_for_bm25_says_so() -> None:
    many = " ".join(f"w{at}" for at in range(1500))
    assert plan_of(query=many).warnings == (
        "route 'text' reads only the first 512 distinct words of the query",
    )
    assert plan_of(query=many, routes=[{"kind": "vector"}]).warnings == ()


def test_additive_recency_has_no_floor_unless_asked() -> None:
    additive = plan_of(fusion={"method": "additive"}, decay={"hourly_loss": 0.01})
    assert additive.base_decay is not None
    assert additive.base_decay.floor == 0
    assert plan_of(decay={"hourly_loss": 0.01}).base_decay != additive.base_decay


# --- the other bodies ------------------------------------------------------------------------------------------------


def test_ids_confine_a_route() -> None:
    only = {"ids": {"values": ["a", "b"]}}
    assert bodies(plan_of(), size=2, ids=["a", "b"]) == {
        "text": body(text_part([*STANDING, only]), size=2),
        "vector": body(base(near([*STANDING, only], k=2)), size=2),
    }


CHUNK = {"includes": ["chunks.text", "chunks.start", "chunks.end"]}
CHUNK_AND_VECTOR = {"includes": ["chunks.text", "chunks.start", "chunks.end", "chunks.embedding"]}
WORDED = {
    "bool": {
        "should": [
            {"match": {"chunks.text": {"query": "carry over"}}},
            {"match": {"chunks.text.english": {"query": "carry over", "boost": 1.0}}},
            {"match": {"chunks.text.thai": {"query": "carry over"}}},
            {"match_phrase": {"chunks.text": {"query": "carry over", "boost": 1.0}}},
        ]
    }
}


def test_fetch_body_with_a_vector() -> None:
    only = {"ids": {"values": ["both", "near"]}}
    assert fetch_body(
        plan_of(decay="off"), VECTORS["carry over"], ids=["both", "near"], with_embedding=False
    ) == {
        "size": 2,
        "query": {
            "bool": {
                "filter": [only, *STANDING],
                "should": [near([only], k=2, inner_hits={"_source": CHUNK, "size": 1, "name": "nearest"})],
            }
        },
        "_source": {"excludes": ["chunks", "text", "declared"]},
    }


def test_fetch_body_without_a_vector_with_everything_asked_for() -> None:
    only = {"ids": {"values": ["both"]}}
    plan = plan_of(forced=[TENANT], filter={"lang": "en"}, highlight=True, neighbours=2, decay="off")
    any_chunk = {"bool": {"must": [{"match_all": {"boost": 0}}], "should": [WORDED]}}
    best = {
        "_source": CHUNK_AND_VECTOR, "size": 1, "name": "worded", "sort": [{"_score": "desc"}, {"chunks.start": "asc"}],
    }  # fmt: skip
    assert fetch_body(plan, None, ids=["both"], with_embedding=True) == {
        "size": 1,
        "query": {
            "bool": {
                "filter": [only, TENANT, *STANDING, LANG],
                "should": [{"nested": {"path": "chunks", "query": any_chunk, "inner_hits": best}}],
            }
        },
        "_source": {
            "excludes": ["chunks.text", "chunks.hash", "chunks.embedding", "declared"], "exclude_vectors": False,
        },
        "highlight": {
            "type": "unified",
            "encoder": "html",
            "pre_tags": ["<em>"],
            "post_tags": ["</em>"],
            "order": "score",
            "max_analyzed_offset": 1_000_000,
            "require_field_match": True,
            "highlight_query": words(),
            "fields": {
                "title": {"number_of_fragments": 0, "matched_fields": ["title", "title.english", "title.thai"]},
                "text": {
                    "number_of_fragments": 3, "fragment_size": 160, "matched_fields": ["text", "text.english", "text.thai"],
                },
            },
        },
    }  # fmt: skip


def test_fetch_body_of_chunks() -> None:
    """Their texts come with the document, which may show any of them; the nearest ones tell their relevance."""
    only = {"ids": {"values": ["both"]}}
    plan = plan_of(collapse=False)
    nearest = {"_source": CHUNK, "size": 20, "name": "nearest"}
    assert fetch_body(plan, VECTORS["carry over"], ids=["both"], with_embedding=False, chunks=True) == {
        "size": 1,
        "query": {
            "bool": {"filter": [only, *STANDING], "should": [near([only], k=1, inner_hits=nearest)]},
        },
        "_source": {"excludes": ["chunks.hash", "declared", "text", "chunks.embedding"]},
    }
    unseen = fetch_body(plan, None, ids=["both"], with_embedding=False, chunks=True)
    assert unseen["query"] == {"bool": {"filter": [only, *STANDING]}}


@pytest.mark.parametrize(
    "stages, chunk, document",
    [
        ({"mmr": {}}, False, False),
        ({"dedup": {}, "mmr": {}}, {"includes": ["chunks.text"]}, False),
        ({"dedup": {}, "rerank": {}, "highlight": True}, {"includes": ["chunks.text"]}, {"includes": ["title"]}),
    ],
    ids=["mmr", "dedup", "rerank"],
)  # fmt: skip
def test_pool_body_brings_what_the_stages_read(stages: dict[str, Any], chunk: Any, document: Any) -> None:
    only = {"ids": {"values": ["both", "near"]}}
    vectors = {"docvalue_fields": [{"field": "chunks.embedding", "format": "binary"}]}
    inner = {"_source": chunk, "size": 1, "name": "nearest", **vectors}
    asked = planning.pool_body(plan_of(**stages), VECTORS["carry over"], ids=["both", "near"], packed=True)
    assert asked == {
        "size": 2,
        "query": {
            "bool": {"filter": [only, *STANDING], "should": [near([only], k=2, inner_hits=inner)]},
        },
        "_source": document,
    }


def test_pool_body_for_clusters_that_give_numbers_only() -> None:
    asked = planning.pool_body(plan_of(mmr={}), None, ids=["both"], packed=False)
    inner = asked["query"]["bool"]["should"][0]["nested"]["inner_hits"]
    assert inner["_source"] == {"includes": ["chunks.embedding"]}
    assert "docvalue_fields" not in inner
    assert asked["_source"] == {"includes": ["document_id"], "exclude_vectors": False}


def test_measure_body() -> None:
    only = {"ids": {"values": ["a", "b"]}}
    plan = plan_of(
        fusion={"method": "additive"}, decay={"hourly_loss": 0.25, "field": "updated_at", "floor": 0.5}, filter={"lang": "en"}
    )  # fmt: skip
    asked = measure_body(plan, VECTORS["carry over"], ids=["a", "b"])
    relevance = {"bool": {"must": [near([only], k=2)], "_name": "relevance"}}
    measured = {"bool": {"filter": [only, *STANDING, LANG], "should": [relevance]}}
    assert asked == {
        "size": 2,
        "query": told(measured, functions("1h", floor=0.5, field="updated_at", at_scale=0.75)),
        "_source": False,
        "docvalue_fields": [{"field": "salience"}],
    }  # fmt: skip


@pytest.mark.node
async def test_node_fetch_and_measure(cluster: Cluster, corpus: Collection) -> None:
    names = ["both", "near", "old", "expired"]
    plan = plan_of(
        corpus, fusion={"method": "additive"}, decay={"half_life": "30d", "floor": 0}, highlight=True
    )
    sent = [
        fetch_body(plan, VECTORS["carry over"], ids=names, with_embedding=True),
        fetch_body(plan, None, ids=names, with_embedding=False),
        measure_body(plan, VECTORS["carry over"], ids=names),
        planning.pool_body(plan, VECTORS["carry over"], ids=names, packed=True),
        planning.pool_body(plan, VECTORS["carry over"], ids=names, packed=False),
    ]
    answers = await cluster.msearch(
        [({"index": f"halflife-{corpus.name}"}, each) for each in sent], timeout_s=60
    )
    fetched, worded, measured, packed, plain = (
        {hit["_id"]: hit for hit in answer["hits"]["hits"]} for answer in answers if isinstance(answer, dict)
    )
    assert set(fetched) == set(worded) == set(measured) == {"both", "near", "old"}, (
        "'expired' stays out everywhere"
    )
    chunk = fetched["both"]["inner_hits"]["nearest"]["hits"]["hits"][0]
    assert chunk["_source"]["text"] == "carry over"
    assert chunk["_source"]["embedding"] == [1.0, 0.0, 0.0]
    assert chunk["_score"] == pytest.approx(1.0)
    assert fetched["both"]["highlight"] == {
        "title": ["<em>carry</em>"],
        "text": ["<em>carry over</em>"],
    }
    assert "chunks" not in fetched["both"]["_source"]
    [first] = worded["near"]["inner_hits"]["worded"]["hits"]["hits"]
    assert (first["_nested"]["offset"], first["sort"]) == (0, [0.0, 0]), "no word fits: the first chunk"
    assert "embedding" not in worded["both"]["inner_hits"]["worded"]["hits"]["hits"][0]["_source"]
    [chunk] = packed["both"]["inner_hits"]["nearest"]["hits"]["hits"]
    assert unpack_vector(chunk["fields"]["chunks.embedding"][0]).tolist() == [1.0, 0.0, 0.0]
    [chunk] = plain["both"]["inner_hits"]["nearest"]["hits"]["hits"]
    assert chunk["_source"] == {"embedding": [1.0, 0.0, 0.0]}
    told_ = {name: hit["matched_queries"] for name, hit in measured.items()}
    assert told_["both"]["relevance"] == pytest.approx(1.0)
    assert told_["both"]["factor"] == pytest.approx(0.5 ** (1 / 30), rel=1e-6)
    assert told_["old"]["factor"] == pytest.approx(0.5 ** (1857 / 30), abs=1e-7)


# --- what later pages are planned from ------------------------------------------------------------------------------

DECAYS = st.sampled_from([
    "auto", "off", {"half_life": "180d"}, {"half_life": "90d", "placement": "fused", "floor": 0.2}, {"rate": "0.013/h"},
    {"hourly_loss": 0.01, "field": "last_accessed_at", "floor": 0},
])  # fmt: skip
OWN_DECAYS = st.sampled_from(
    [None, "off", {"floor": 0.9}, {"half_life": "36h"}, {"scale": "9d", "kind": "gauss", "floor": 0.1}]
)
ROUTES = st.lists(
    st.builds(
        lambda kind, decay, more: {"kind": kind, **({} if decay is None else {"decay": decay}), **more},
        st.sampled_from(["text", "vector", "fresh_text", "fresh_vector"]), OWN_DECAYS,
        st.fixed_dictionaries({}, optional={
            "weight": st.sampled_from([0, 0.3, 2]), "query": st.just("another"),
            "filter": st.sampled_from([{"lang": "en"}, {"and": [{"year": {"gte": 2020}}, {"tags": {"exists": False}}]}]),
        }),
    ),
    min_size=1, max_size=3,
)  # fmt: skip
FUSIONS = st.sampled_from([
    {}, {"window": 5}, {"window": 150}, {"method": "linear", "normalizer": "minmax"}, {"rank_constant": 7},
    {"method": "additive", "weights": {"salience": 2}},
])  # fmt: skip
RANKED: dict[str, st.SearchStrategy[Any]] = {
    "decay": DECAYS, "routes": ROUTES, "fusion": FUSIONS, "feedback": st.sampled_from(["off", {"strength": 0.1}]),
    "min_relevance": st.just(0.5), "rerank": st.sampled_from([{}, {"top_n": 5, "candidates": 9}]),
    "dedup": st.just({"threshold": 0.8}), "mmr": st.just({"lambda": 0.25}), "fold_superseded": st.booleans(),
}  # fmt: skip
ASKED = {
    **RANKED, "top_k": st.sampled_from([1, 10, 150]), "collapse": st.booleans(), "as_of": st.just("2024-05-06T07:08:09.5Z"),
    "filter": st.just({"lang": ["en", "zh"]}), "query_vector": st.just([0.1, 0.2, 0.3]), "rewrite": st.just({"keywords": True}),
    "min_relevance": st.sampled_from(["off", None, 0.25]), "mmr": st.sampled_from(["off", {"candidates": 5}]),
    "rerank": st.sampled_from(["off", None, {"decay": False}]), "valid_time": st.just("any"),
}  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    profile=st.fixed_dictionaries({}, optional=RANKED),
    asked=st.fixed_dictionaries({}, optional=ASKED),
    by_name=st.booleans(),
    voted=st.booleans(),
)
def test_what_a_first_page_settles_is_planned_alike_without_its_profile(
    profile: dict[str, Any], asked: dict[str, Any], by_name: bool, voted: bool
) -> None:
    try:
        settled = Profile.model_validate(profile)
        named = {"profile": "p"} if by_name else {}
        request = Search.model_validate({"collection": "handbook", "query": "carry over", **asked, **named})
        ranked = COLLECTION.model_copy(
            update={"profiles": {"p": settled}, "default_profile": None if by_name else "p"}
        )
        first = make_plan(request, collection=ranked, now_ms=NOW_MS, forced=[TENANT])
    except (ValidationError, InvalidRequest):
        assume(False)
        return
    if request.rewrite is not None:
        first = rewritten(first, Rewriting(keywords=["another"]), forced=[TENANT], model="m")
    if first.feedback is not None:
        # Votes that could not be had are left out by later pages too.
        ratings = Ratings(as_of_ms=NOW_MS, usual=0.5, by_document={}) if voted else None
        first = replace(first, ratings=ratings)
    again = Search.model_validate(json.loads(json.dumps(first.resolved_request())), context=SETTLED)
    second = make_plan(
        again, collection=COLLECTION, now_ms=first.origin_ms, forced=[TENANT],
        pinned=Pinned(first.wordings, first.rewrites),
    )  # fmt: skip
    told = {each.name for each in dataclass_fields(planning.Plan)} - {
        "search",
        "collection",
        "routes",
        "feedback",
        "ratings",
        "warnings",
    }
    assert {name: getattr(second, name) for name in told} == {name: getattr(first, name) for name in told}
    assert [replace(route, asked=first.routes[0].asked) for route in second.routes] == [
        replace(route, asked=first.routes[0].asked) for route in first.routes
    ]
    assert bodies(second) == bodies(first)
    stages = {"min_relevance", "rerank", "dedup", "mmr", "collapse", "top_k"} | (
        {"fold_superseded"} if first.compares else set()
    )
    assert again.model_dump(include=stages) == first.search.model_dump(include=stages)
    if first.feedback is None or first.ratings is None:
        assert second.feedback is None
    else:
        assert second.feedback == first.feedback.model_copy(
            update={"as_of": datetime.fromtimestamp(NOW_MS / 1000, tz=UTC)}
        )
    assert second.resolved_request()["decay" if "decay" in again.model_fields_set else "routes"]


def test_a_routes_own_strength_counts_instead_of_a_profiles_word() -> None:
    own = [{"kind": "text", "decay": {"half_life": "36h"}}, {"kind": "vector"}]
    for word in ("auto", "off", None):
        profile = Profile.model_validate({} if word is None else {"decay": word})
        ranked = COLLECTION.model_copy(update={"profiles": {"p": profile}, "default_profile": "p"})
        plan = plan_of(ranked, routes=own)
        assert (plan.placement, plan.auto_decay) == ("route", False)
        assert [None if route.decay is None else route.decay.scale_ms for route in plan.routes] == [
            36 * 3_600_000,
            None,
        ]
        assert "decay" not in plan.resolved_request()
    with pytest.raises(ValidationError, match="'auto'"):
        plan_of(routes=own, decay="auto")


# --- reading answers -------------------------------------------------------------------------------------------------


def hit(name: str, score: float, *, base_score: float | None = None, **values: Any) -> dict[str, Any]:
    named = {} if base_score is None else {"matched_queries": {"base": base_score}}
    created = values.pop("creation_time", -(2**63))
    held = {key: [value] for key, value in values.items()}
    return {"_score": score, "sort": [score, created, name, 7], "fields": held, **named}


def answer(*hits: Mapping[str, Any], **rest: Any) -> dict[str, Any]:
    total = {"value": len(hits), "relation": "eq"}
    return {"took": 3, "timed_out": False, "_shards": {"total": 1, "failed": 0}, "hits": {"total": total, "hits": list(hits)}, **rest}  # fmt: skip


def test_reading_a_route() -> None:
    plan = plan_of(decay={"half_life": "10d", "floor": 0})
    ms = to_ms(parse_instant("2025-01-21"))
    read = read_route(
        plan, plan.routes[0],
        answer(
            hit("b", 2.0, base_score=4.0, creation_time=ms, evergreen=False),
            hit("a", 2.0000002, base_score=2.0),
            hit("b", 1.0, base_score=4.0),
            hit("z", 0.0, base_score=0.0, creation_time=ms),
            hit("e", 0.0, base_score=0.0, evergreen=True),
        ),
    )  # fmt: skip
    got = [(each.id, each.rank, each.score, each.base, each.factor, each.aged_ms) for each in read.candidates]
    assert got == [
        ("b", 1, 2.0, 4.0, 0.5, ms),
        # Rounded up by 32-bit floats; a factor lies in [0, 1].
        ("a", 2, 2.0000002, 2.0, 1.0, None),
        # Nothing to divide by: the closed formula.
        ("z", 3, 0.0, 0.0, pytest.approx(0.5), ms),
        ("e", 4, 0.0, 0.0, 1.0, None),
    ]
    assert (read.took_ms, read.partial, read.total) == (3, None, Total(value=5, relation="eq"))


def test_reading_without_decay_and_with_the_factor_told() -> None:
    plain = plan_of()
    [candidate] = read_route(plain, plain.routes[0], answer(hit("a", 2.0, base_score=2.0))).candidates
    assert (candidate.factor, candidate.score, candidate.base) == (None, 2.0, 2.0)
    fused = plan_of(decay={"half_life": "10d", "placement": "fused"})
    shown = hit("a", 2.0, base_score=2.0)
    shown["matched_queries"]["factor"] = 0.25
    [candidate] = read_route(fused, fused.routes[0], answer(shown)).candidates
    assert (candidate.factor, candidate.score) == (0.25, 2.0)


def test_partial_answers_say_why() -> None:
    plan = plan_of()
    failed = answer(_shards={"total": 3, "failed": 1, "failures": [{"reason": {"reason": "disk on fire"}}]})
    assert read_route(plan, plan.routes[0], failed).partial == "1 of 3 shards failed: disk on fire"
    late = read_route(plan, plan.routes[0], answer(timed_out=True)).partial
    assert late is not None
    assert "time budget" in late


def test_reading_chunks() -> None:
    plan = plan_of(collapse=False, decay={"half_life": "10d"})
    one = hit("doc", 3.0, base_score=6.0)
    two = hit("other", 2.9, base_score=2.9)

    def chunks(*scores: float) -> dict[str, Any]:
        return {
            "chunks": {
                "hits": {"hits": [{"_nested": {"offset": at}, "_score": s} for at, s in enumerate(scores)]}
            }
        }

    one["inner_hits"], two["inner_hits"] = chunks(1.0, 4.0, 3.5), chunks(2.0)
    read = read_route(plan, plan.routes[0], answer(one, two))
    # 6.0 is 4.0 for the best chunk and 2.0 for the title, which its chunks share; the factor is one half.
    assert [(each.id, each.chunk, each.score, each.rank) for each in read.candidates] == [
        ("doc", 1, 3.0, 1), ("other", 0, 2.9, 2), ("doc", 2, 2.75, 3), ("doc", 0, 1.5, 4),
    ]  # fmt: skip
    assert len({each.key for each in read.candidates}) == 4


def test_age_is_told_by_the_date_that_decays() -> None:
    source = {"creation_time": "2025-01-30T00:00:00Z", "updated_at": "2025-02-01T12:00:00Z"}
    assert planning.age_days(plan_of(), source) == 1.0
    assert planning.age_days(plan_of(decay={"half_life": "1d", "field": "updated_at"}), source) == -1.5
    assert planning.age_days(plan_of(), {}) is None


def test_building_bodies_changes_no_plan() -> None:
    plan = plan_of(filter={"lang": "en"}, decay=HALF_YEAR, min_relevance=0.1)
    kept = copy.deepcopy((plan.filters, plan.routes))
    assert bodies(plan) == bodies(plan)
    assert (plan.filters, plan.routes) == kept


def test_many_routes_of_long_queries_are_over_a_limit():
    text = " ".join(f"w{number}" for number in range(queries.MAX_LEXICAL_TERMS))

    def search(count: int) -> Search:
        routes = [Route(kind="text", name=f"r{number}") for number in range(count)]
        return Search(collection="c", query=text, routes=[*routes, Route(kind="vector")])

    make_plan(search(4), collection=COLLECTION, now_ms=NOW_MS)
    with pytest.raises(LimitExceeded, match="2560 words") as refused:
        make_plan(search(5), collection=COLLECTION, now_ms=NOW_MS)
    assert refused.value.field == "routes"
