"""What a request may say and what is refused, naming the field: the contract before anything reaches the cluster."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from app.answers import Hit, RouteHit, RouteStatus, SearchResult
from app.asking import Search, Why
from app.collection import Collection, CollectionOptions
from app.ranking import STRENGTHS, Decay, DecayStrength, Fusion, Mmr, Rerank, Route
from app.times import parse_instant
from app.values import MAX_ID_BYTES
from app.writing import DeleteDocuments, Document, DocumentPatch, Upsert


def search(**options: Any) -> Search:
    return Search.model_validate({"collection": "handbook", "query": "leave", **options})


def refused(model: Any, value: Any) -> tuple[str, str]:
    """Return where and why the value is refused, as one path and one message."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate(value)
    error = caught.value.errors()[0]
    path = ".".join(str(part) for part in error["loc"] if not str(part).startswith("_"))
    return path, error["msg"]


def search_refused(**options: Any) -> tuple[str, str]:
    return refused(Search, {"collection": "handbook", "query": "leave", **options})


# --- decay -----------------------------------------------------------------------------------------------------------


def test_a_plain_search_has_no_decay_and_no_surprises() -> None:
    plain = search()
    assert plain.decay is None
    assert plain.routes is None
    assert plain.fusion is None
    assert plain.min_relevance is None
    assert (plain.top_k, plain.collapse, plain.valid_time) == (10, True, "only")
    assert (plain.explain, plain.touch, plain.strict, plain.highlight, plain.paging) == (
        False, False, False, False, True,
    )  # fmt: skip
    assert plain.model_dump(mode="json", exclude_unset=True) == {"collection": "handbook", "query": "leave"}


@pytest.mark.parametrize(
    "decay",
    [
        {"half_life": "180d"},
        {"half_life": "P14D", "kind": "gauss", "offset": "0d"},
        {"scale": "10d"},
        {"scale": "10d", "decay": 0.25, "kind": "linear", "offset": "36h"},
        {"rate": 0.01},
        {"rate": "0.02/h"},
        {"rate": 0.1, "kind": "linear"},
        {"hourly_loss": 0},
        {"hourly_loss": 1},
        {"hourly_loss": 0.01, "field": "last_accessed_at", "floor": 0, "missing": 1, "future": "symmetric"},
        {"half_life": "1d", "placement": "fused"},
        "off",
        None,
    ],
    ids=str,
)
def test_decay_in_all_its_spellings(decay: Any) -> None:
    asked = search(decay=decay)
    again = Search.model_validate(json.loads(asked.model_dump_json(exclude_unset=True)))
    assert again == asked


@pytest.mark.parametrize(
    "text, per_day",
    [
        ("0.02/h", 0.48),
        ("1e-3/d", 0.001),
        ("0.5/m", 720.0),
        ("0.001/s", 86.4),
        (" 2 / d ", 2.0),
        (0.25, 0.25),
    ],
)
def test_rate_is_per_day_unless_it_says_otherwise(text: Any, per_day: float) -> None:
    rate = Decay.model_validate({"rate": text}).rate
    assert rate == pytest.approx(per_day, rel=1e-15)


@pytest.mark.parametrize(
    "value", [0, -1, "0.02", "0.02/w", "-1/d", "1/", "x/d", "nan/d", 2e8, math.nan, math.inf]
)
def test_rate_is_refused(value: Any) -> None:
    assert search_refused(decay={"rate": value})[0] == "decay.rate"


KINDS = ("exp", "gauss", "linear")
BAD_DECAY: list[Any] = [0, 1, 1.5, -0.1, "NaN", math.nan]
BAD_SCALE: list[Any] = ["0d", "-1d", "0", "-1", "30", 30, "1w", "1M", "1y", "1.5d", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", BAD_DECAY, ids=str)
def test_decay_params_bc04_bad_decay(kind: str, value: Any) -> None:
    path, _ = search_refused(decay={"kind": kind, "scale": "10d", "decay": value})
    assert path == "decay.decay"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scale", "half_life"])
@pytest.mark.parametrize("value", BAD_SCALE, ids=repr)
def test_decay_params_bc04_bad_scale(kind: str, name: str, value: Any) -> None:
    path, message = search_refused(decay={"kind": kind, name: value})
    assert path == f"decay.{name}" or f"`{name}`" in message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["-1d", "1w", 5, "1.5h"])
def test_decay_params_bc04_bad_offset(kind: str, value: Any) -> None:
    path, _ = search_refused(decay={"kind": kind, "half_life": "10d", "offset": value})
    assert path == "decay.offset"


@pytest.mark.parametrize("value", ["yesterday", "", "now", 12, True])
def test_decay_params_bc04_bad_origin(value: Any) -> None:
    assert search_refused(as_of=value)[0] == "as_of"


def test_decay_params_bc04_a_null_origin_is_none_given() -> None:
    assert search(as_of=None).as_of is None


@pytest.mark.parametrize(
    "text, ms",
    [("30m", 1_800_000), ("36h", 129_600_000), ("30D", 2_592_000_000), ("106751991168d", 106_751_991_168 * 86_400_000)],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_decay_params_bc04_tricky_but_fine(kind: str, text: str, ms: int) -> None:
    decay = search(decay={"kind": kind, "scale": text, "offset": "0d"}).decay
    assert isinstance(decay, Decay)
    assert (decay.scale, decay.offset) == (ms, 0)


@pytest.mark.parametrize(
    "decay, told",
    [
        ({}, "needs its strength"),
        ({"kind": "exp", "floor": 0.3}, "needs its strength"),
        ({"half_life": "1d", "rate": 1}, "gives its strength twice (half_life, rate)"),
        ({"half_life": "1d", "scale": "1d"}, "gives its strength twice"),
        ({"hourly_loss": 0, "half_life": "1d"}, "gives its strength twice"),
        ({"half_life": "1d", "decay": 0.5}, "give `scale` too"),
        ({"decay": 0.5}, "give `scale` too"),
        ({"kind": "gauss", "rate": 1}, "`rate` is a constant rate, which kind 'gauss' does not have"),
        ({"kind": "gauss", "hourly_loss": 0.1}, "`hourly_loss` is a constant rate"),
        ({"kind": "linear", "hourly_loss": 0.1}, "compounds by the hour"),
        ({"half_life": "1d", "placement": "both"}, "age would count twice"),
    ],
    ids=str,
)
def test_contradictory_decay_is_refused(decay: Any, told: str) -> None:
    path, message = search_refused(decay=decay)
    assert path == "decay"
    assert told in message


@pytest.mark.parametrize(
    "decay, path",
    [
        ({"half_life": "1d", "kind": "step"}, "decay.kind"),
        ({"half_life": "1d", "kind": "EXP"}, "decay.kind"),
        ({"half_life": "1d", "floor": 1.1}, "decay.floor"),
        ({"half_life": "1d", "floor": -0.1}, "decay.floor"),
        ({"half_life": "1d", "missing": 2}, "decay.missing"),
        ({"half_life": "1d", "future": "boost"}, "decay.future"),
        ({"half_life": "1d", "field": "salience"}, "decay.field"),
        ({"half_life": "1d", "placement": "after"}, "decay.placement"),
        ({"half_life": "1d", "origin": "2025-01-31"}, "decay.origin"),
        ({"half_life": "1d", "score_mode": "avg"}, "decay.score_mode"),
        ({"hourly_loss": 1.5}, "decay.hourly_loss"),
        ({"hourly_loss": -0.1}, "decay.hourly_loss"),
        ("on", "decay"),
        ([], "decay"),
        (0.5, "decay"),
    ],
    ids=str,
)
def test_decay_out_of_range_is_refused(decay: Any, path: str) -> None:
    assert search_refused(decay=decay)[0] == path


def test_decay_math_bc03_an_unknown_mode_is_refused() -> None:
    # Decay multiplies; how is not a choice, so naming a mode at all is refused.
    for name in ("boost_mode", "score_mode", "mode"):
        assert search_refused(decay={"half_life": "10d", name: "sum"})[0] == f"decay.{name}"


@pytest.mark.parametrize("rate", [1.5, -0.1])
def test_memory_decay_bc54_a_loss_outside_0_to_1_is_refused(rate: float) -> None:
    path, _ = search_refused(decay={"hourly_loss": rate}, fusion={"method": "additive"})
    assert path == "decay.hourly_loss"


# --- routes and fusion -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route, told",
    [
        ({"kind": "bm25"}, "routes.0.kind"),
        ({}, "routes.0.kind"),
        ({"kind": "text", "weight": -1}, "routes.0.weight"),
        ({"kind": "text", "weight": math.nan}, "routes.0.weight"),
        ({"kind": "text", "name": "Text"}, "routes.0.name"),
        ({"kind": "text", "name": ""}, "routes.0.name"),
        ({"kind": "text", "window": "30d"}, "use kind 'fresh_text'"),
        ({"kind": "vector", "field": "updated_at"}, "`field` belongs to"),
        ({"kind": "fresh_text", "window": "0d"}, "longer than zero"),
        ({"kind": "text", "num_candidates": 100}, "belongs to vector routes"),
        ({"kind": "vector", "num_candidates": 0}, "routes.0.num_candidates"),
        ({"kind": "vector", "title_boost": 2}, "belongs to text routes"),
        ({"kind": "text", "title_boost": -1}, "routes.0.title_boost"),
        ({"kind": "vector", "num_candidates": 10_001}, "routes.0.num_candidates"),
        ({"kind": "vector", "k": 10}, "routes.0.k"),
        ({"kind": "vector", "decay": {"decay": 0.5}}, "give `scale` too"),
        ({"kind": "vector", "decay": {"placement": "fused"}}, "routes.0.decay.placement"),
        ({"kind": "text", "query": ""}, "routes.0.query"),
    ],
    ids=str,
)
def test_routes_are_refused(route: Any, told: str) -> None:
    path, message = search_refused(routes=[route])
    assert told in (path, message) or told in message
    assert path.startswith("routes.0")


def test_routes_of_one_kind_are_several_values() -> None:
    asked = search(
        routes=[
            {"kind": "text"},
            {"kind": "text", "name": "rewritten", "query": "holiday", "weight": 0.5},
            {"kind": "fresh_vector", "window": "P30D", "field": "updated_at", "decay": "off"},
        ]
    )
    assert asked.routes is not None
    assert [route.name for route in asked.routes] == [None, "rewritten", None]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"routes": []}, "routes"),
        ({"routes": [{"kind": "text"}] * 17}, "routes"),
        ({"routes": [{"kind": "text", "name": "a"}, {"kind": "vector", "name": "a"}]}, "the same `name`"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 10_001}, "top_k"),
        ({"top_k": 60, "fusion": {"window": 50}}, "more than `fusion.window` 50"),
        ({"decay": "off", "routes": [{"kind": "text", "decay": {"floor": 0.1}}]}, "`decay` is 'off'"),
        (
            {"decay": {"half_life": "1d", "placement": "fused"}, "routes": [{"kind": "text", "decay": {"floor": 0.1}}]},
            "belongs to placement 'route'",
        ),
        ({"rerank": {}, "mmr": {}}, "both order the head"),
        ({"rerank": {"top_n": 60, "candidates": 50}}, "more than `rerank.candidates`"),
        ({"rerank": {"top_n": 1001}}, "rerank.top_n"),
        ({"query": " \n"}, "`query` is blank"),
        ({"query": ""}, "query"),
        ({"query": "\ud800"}, "lone surrogate"),
        ({"query": "x" * 10_001}, "query"),
        ({"collection": "Handbook"}, "lower-case letters"),
        ({"collection": "handbook-20260131000000"}, "does not end like an index"),
        ({"collection": "handbook-w-1-a"}, "does not end like an index"),
        ({"querry": "x"}, "querry"),
        ({"min_relevance": 1.1}, "min_relevance"),
        ({"min_relevance": -0.1}, "min_relevance"),
        ({"dedup": {"threshold": 0}}, "dedup.threshold"),
        ({"dedup": {"threshold": 1.01}}, "dedup.threshold"),
        ({"dedup": {"keep": "older"}}, "dedup.keep"),
        ({"timeout_ms": 1}, "timeout_ms"),
        ({"neighbours": -1}, "neighbours"),
        ({"query_vector": []}, "1 to 4096 numbers"),
        ({"query_vector": [0, 0, 0]}, "zero vector"),
        ({"query_vector": [1e-30, 0]}, "zero vector"),
        ({"query_vector": [1e39]}, "finite 32-bit"),
        ({"query_vector": ["1"]}, "query_vector.0"),
        ({"query_vector": [[1.0]]}, "query_vector.0"),
        ({"query_vector": [None]}, "query_vector.0"),
    ],
    ids=str,
)  # fmt: skip
def test_searches_are_refused(options: dict[str, Any], told: str) -> None:
    path, message = search_refused(**options)
    assert told in path or told in message


RANK_CONSTANTS: list[Any] = [0, -1, -61, "NaN", math.nan]


@pytest.mark.parametrize("value", RANK_CONSTANTS, ids=str)
def test_rrf_bc12_bad_rank_constants_are_refused(value: Any) -> None:
    assert search_refused(fusion={"rank_constant": value})[0] == "fusion.rank_constant"


def test_rrf_bc12_the_default_is_60() -> None:
    assert Fusion(method="rrf").rank_constant == 60


def test_fusion_is_adaptive_unless_its_parts_tell_another_method() -> None:
    assert Fusion().method == "adaptive"
    assert Fusion(window=10).method == "adaptive"
    assert Fusion(rank_constant=10).method == "rrf"


@pytest.mark.parametrize(
    "fusion, told",
    [
        ({"method": "linear", "rank_constant": 10}, "belongs to method 'rrf'"),
        ({"normalizer": "minmax"}, "belongs to method 'linear'"),
        ({"weights": {"relevance": 1}}, "belongs to method 'additive'"),
        ({"method": "additive", "weights": {"age": 1}}, "fusion.weights.age"),
        ({"method": "additive", "weights": {"recency": -1}}, "fusion.weights.recency"),
        ({"method": "max"}, "fusion.method"),
        ({"window": 0}, "fusion.window"),
        ({"window": 10_001}, "fusion.window"),
    ],
    ids=str,
)
def test_fusion_is_refused(fusion: Any, told: str) -> None:
    path, message = search_refused(fusion=fusion)
    assert told in message or path.startswith(told)


@pytest.mark.parametrize("k", [10_001, 0])
def test_knn_params_bc27_top_k_out_of_range_is_refused(k: int) -> None:
    assert search_refused(top_k=k)[0] == "top_k"


def test_threshold_bc17_a_cut_on_the_fused_score_does_not_exist() -> None:
    for name in ("score_threshold", "min_score"):
        assert search_refused(**{name: 0.6})[0] == name
        assert search_refused(fusion={name: 0.6})[0] == f"fusion.{name}"


def test_threshold_bc18_zero_is_not_none() -> None:
    assert search(min_relevance=0).min_relevance == 0
    assert search(min_relevance=None).min_relevance is None
    assert search(routes=[{"kind": "text", "weight": 0}]).routes == [Route(kind="text", weight=0)]
    assert search(decay={"half_life": "1d", "offset": "0d", "floor": 0}).decay == Decay.model_validate(
        {"half_life": "1d", "offset": "0d", "floor": 0}
    )


@pytest.mark.parametrize("value", [-0.1, 1.1, "NaN", None])
def test_mmr_bc18_lambda_outside_0_to_1_is_refused(value: Any) -> None:
    assert search_refused(mmr={"lambda": value})[0] == "mmr.lambda"


def test_mmr_is_written_as_it_is_read() -> None:
    asked = search(mmr={"lambda": 0.25, "candidates": 20})
    assert asked.mmr == Mmr(lambda_=0.25, candidates=20)
    dumped = asked.model_dump(mode="json", exclude_unset=True)
    assert dumped["mmr"] == {"lambda": 0.25, "candidates": 20}
    assert Search.model_validate(dumped) == asked


def test_rerank_keeps_its_own_scale() -> None:
    assert search(rerank={"min_score": -3.5}).rerank == Rerank(min_score=-3.5)
    assert search_refused(rerank={"min_score": "NaN"})[0] == "rerank.min_score"


def test_a_route_overrides_parts_of_the_strength() -> None:
    route = Route.model_validate({"kind": "vector", "decay": {"floor": 0.9}})
    assert isinstance(route.decay, DecayStrength)
    assert route.decay.model_fields_set == {"floor"}
    assert all(getattr(route.decay, name) is None for name in STRENGTHS)


def test_values_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        search().top_k = 5  # type: ignore[misc]


def test_why_is_a_search_with_an_id() -> None:
    asked = Why.model_validate({"collection": "handbook", "query": "leave", "id": "leave-2026", "top_k": 3})
    assert isinstance(asked, Search)
    assert refused(Why, {"collection": "handbook", "query": "leave"})[0] == "id"


# --- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["creation_time", "updated_at", "last_accessed_at", "start_date", "end_date", "expires_at"])  # fmt: skip
def test_decay_date_bc05_null_is_absent_and_blank_is_refused(name: str) -> None:
    base = {"id": "none", "text": "hello"}
    absent, null = Document.model_validate(base), Document.model_validate({**base, name: None})
    assert getattr(absent, name) is None
    assert getattr(null, name) is None
    assert refused(Document, {**base, name: ""})[0] == name


@pytest.mark.parametrize(
    "value",
    [86_400_000, 20_000_000_001, "1700000000", "20240101", "2024", 1_700_000_000_000_000],
)
def test_datetime_bc29_ambiguous_creation_times_are_refused(value: Any) -> None:
    assert refused(Document, {"id": "a", "text": "hello", "creation_time": value})[0] == "creation_time"


@pytest.mark.parametrize("value", [1_700_000_000, 1_700_000_000_000, "2023-11-14T22:13:20Z"])
def test_datetime_bc29_seconds_and_milliseconds_are_one_instant(value: Any) -> None:
    document = Document.model_validate({"id": "a", "text": "hello", "creation_time": value})
    assert document.model_dump(mode="json")["creation_time"] == "2023-11-14T22:13:20.000Z"


@pytest.mark.parametrize("value", [1_738_281_600, 1_738_281_600_000])
def test_datetime_bc29_a_numeric_origin_means_2025(value: int) -> None:
    assert search(as_of=value).as_of == parse_instant("2025-01-31T00:00:00Z")


@pytest.mark.parametrize("value", [1_738_281_600, 1_738_281_600.0, "2025-01-31T00:00:00", "2025-01-31"])
def test_memory_decay_bc54_spellings_of_one_access_time(value: Any) -> None:
    document = Document.model_validate({"id": "a", "text": "hello", "last_accessed_at": value})
    assert document.last_accessed_at == parse_instant("2025-01-31T00:00:00Z")


@pytest.mark.parametrize(
    "changes, path",
    [
        ({"id": ""}, "id"),
        ({"id": "x" * (MAX_ID_BYTES + 1)}, "id"),
        ({"id": "語" * 171}, "id"),
        ({"id": ".."}, "id"),
        ({"id": "\ud800"}, "id"),
        ({"id": 5}, "id"),
        ({"text": "", "title": " "}, ""),
        ({"text": "\udfff"}, "text"),
        ({"evergreen": "yes"}, "evergreen"),
        ({"salience": -1}, "salience"),
        ({"salience": "NaN"}, "salience"),
        ({"embedding": [0.0, 0.0]}, "embedding"),
        ({"metadata": {"a": math.nan}}, "metadata"),
        ({"metadata": {"a\0": 1}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"tags": "draft"}, "tags"),
        ({"lang": ""}, "lang"),
        ({"creationTime": "2025-01-01"}, "creationTime"),
        ({"revision": 1, "if_version": 1}, ""),
        ({"revision": 0}, "revision"),
        ({"revision": "1"}, "revision"),
    ],
    ids=str,
)
def test_documents_are_refused(changes: dict[str, Any], path: str) -> None:
    assert refused(Document, {"id": "a", "text": "hello", **changes})[0] == path


def test_ids_of_512_bytes_are_fine() -> None:
    for value in ("x" * 512, "語" * 170 + "ab", "a/b?c#d %", ".", "日本"):
        assert Document.model_validate({"id": value, "text": "hello"}).id == value


def test_a_patch_names_what_it_changes() -> None:
    assert refused(DocumentPatch, {"id": "a"})[1].startswith("changes nothing")
    assert DocumentPatch.model_validate({"id": "a", "lang": None}).model_fields_set == {"id", "lang"}
    cleared = DocumentPatch.model_validate({"id": "a", "evergreen": None, "metadata": None})
    assert (cleared.evergreen, cleared.metadata) == (False, {})


@pytest.mark.parametrize(
    "value",
    [
        {}, {"filter": {}}, {"ids": []}, {"ids": ["a"], "filter": {"lang": "en"}}, {"delete_all": False}, {"delete_all": "true"},
        {"documents": []}, {"documents": ["a"]}, {"documents": [{"id": "a"}], "ids": ["a"]}, {"documents": [{"if_version": 1}]},
        {"documents": [{"id": "a", "if_version": 0}]}, {"documents": [{"id": ""}]},
    ],
    ids=str,
)  # fmt: skip
def test_deletes_are_refused(value: Any) -> None:
    refused(DeleteDocuments, value)


def test_refresh_in_its_spellings() -> None:
    for given, wanted in ((True, "true"), (False, "false"), ("wait_for", "wait_for"), ("true", "true")):
        assert Upsert.model_validate({"documents": [1], "refresh": given}).refresh == wanted
    assert refused(Upsert, {"documents": [1], "refresh": "now"})[0] == "refresh"


def test_declared_fields_clash_with_none_of_ours() -> None:
    assert CollectionOptions(declared={"year": "long"}).declared == {"year": "long"}
    for name in ("lang", "metadata", "text", "and"):
        assert "is taken" in refused(CollectionOptions, {"declared": {name: "keyword"}})[1]
    assert refused(CollectionOptions, {"declared": {"a.b": "long"}})[0].startswith("declared")
    assert refused(CollectionOptions, {"declared": {"year": "float"}})[0].startswith("declared")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_an_answer_leaves_out_what_was_not_asked_for() -> None:
    hit = Hit(
        id="a", score=0.5, fused_score=0.5, age_days=None, relevance=None, decay=None,
        routes={"text": RouteHit(rank=1, score=2.0, decay=None, decayed_score=2.0, contribution=0.5)},
    )  # fmt: skip
    answer = SearchResult(
        origin=parse_instant("2025-01-31"), took_ms=3, degraded=False, warnings=[], cursor=None,
        routes={"text": RouteStatus(status="ok", took_ms=1, returned=1)}, hits=[hit],
    )  # fmt: skip
    assert json.loads(answer.model_dump_json()) == {
        "origin": "2025-01-31T00:00:00.000Z",
        "took_ms": 3,
        "degraded": False,
        "warnings": [],
        "cursor": None,
        "routes": {"text": {"status": "ok", "took_ms": 1, "total": None, "returned": 1}},
        "hits": [
            {
                "id": "a", "score": 0.5, "fused_score": 0.5, "title": None, "text": None, "creation_time": None,
                "metadata": None, "fields": {}, "age_days": None, "relevance": None, "decay": None,
                "evergreen": False,
                "routes": {
                    "text": {"rank": 1, "score": 2.0, "decay": None, "decayed_score": 2.0, "contribution": 0.5}
                },
            }
        ],
    }  # fmt: skip


def test_a_collection_is_a_plain_value() -> None:
    made = Collection(name="a", index="i", dims=3, similarity="cosine", declared={}, template_version=1)
    assert Collection.model_validate_json(made.model_dump_json()) == made


def test_what_is_left_open_fits_what_is_given() -> None:
    assert search().top_k == 10
    narrow = search(fusion={"window": 5})
    assert (narrow.top_k, "top_k" in narrow.model_fields_set) == (5, False)
    assert search(fusion={"window": 50}).top_k == 10
    assert search(fusion={"window": 5}, top_k=5).top_k == 5
    for top_n, candidates in ((10, 50), (60, 60), (1000, 1000)):
        kept = search(rerank={"top_n": top_n}).rerank
        assert kept is not None
        assert (kept.top_n, kept.candidates) == (top_n, candidates)
