"""Fusion against written-out arithmetic."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.fusion import (
    ABSENT,
    Fused,
    RankedHit,
    RankedRoute,
    Share,
    additive,
    apply_factor,
    fuse,
    rescore,
    shares,
)
from app.ranking import Fusion

RRF = Fusion(method="rrf")
ADAPTIVE = Fusion(method="adaptive")
DAY = 86_400_000


def route(
    name: str, keys: str | list[str], *, weight: float = 1.0, scores: list[float] | None = None, dates=None
):
    """Return a route with hits `keys`, scored downwards from 100 unless `scores` are given."""
    values = scores or [100.0 - at for at in range(len(keys))]
    hits = [RankedHit(key, score, (dates or {}).get(key)) for key, score in zip(keys, values, strict=True)]
    return RankedRoute(name, weight, hits)


def keys(fused: list[Fused]) -> list[str]:
    return [hit.key for hit in fused]


def scores(fused: list[Fused]) -> dict[str, float]:
    return {hit.key: hit.score for hit in fused}


# --- RRF -------------------------------------------------------------------------------------------------------------


def test_rrf_ranks_start_at_one_and_absence_is_zero():
    fused = fuse([route("one", "XaY"), route("two", "bcY")], fusion=RRF, window=100)

    assert scores(fused) == {"Y": 1 / 63 + 1 / 63, "X": 1 / 61, "b": 1 / 61, "a": 1 / 62, "c": 1 / 62}
    assert keys(fused) == ["Y", "X", "b", "a", "c"]
    assert fused[0].contributions == {"one": 1 / 63, "two": 1 / 63}
    assert fused[0].ranks == {"one": 3, "two": 3}
    assert fused[1].contributions == {"one": 1 / 61, "two": 0.0}
    assert fused[1].ranks == {"one": 1}


def test_rrf_weights():
    fused = fuse([route("r1", "ab", weight=0.7), route("r2", "ba", weight=0.3)], fusion=RRF, window=10)

    assert scores(fused)["a"] == pytest.approx(0.7 / 61 + 0.3 / 62, rel=1e-15)
    assert scores(fused)["a"] == pytest.approx(0.0163141195, abs=5e-11)
    assert keys(fused) == ["a", "b"]


@pytest.mark.parametrize("constant", [1, 2.5, 1000])
def test_rrf_rank_constant(constant: float):
    fused = fuse([route("r", "ab")], fusion=Fusion(rank_constant=constant), window=10)

    assert scores(fused) == {"a": 1 / (constant + 1), "b": 1 / (constant + 2)}


def test_duplicates_in_a_route_are_dropped_before_ranking():
    fused = fuse([route("r", "aabac")], fusion=RRF, window=3)

    assert scores(fused) == {"a": 1 / 61, "b": 1 / 62, "c": 1 / 63}
    assert [hit.ranks["r"] for hit in fused] == [1, 2, 3]
    assert not any(hit.beyond_window for hit in fused)


@pytest.mark.parametrize(
    "routes, expected",
    [
        # a and b: 1/61 + 1/63 either way; c: 1/62 + 1/62, a little less.
        pytest.param([route("one", "acb"), route("two", "bca")], "abc", id="key"),
        pytest.param([route("one", "b"), route("two", "a")], "ab", id="key-of-different-routes"),
        pytest.param([route("one", "ab", dates={"a": 1, "b": 2}), route("two", "ba", dates={"a": 1, "b": 2})], "ba", id="newer"),
        pytest.param([route("one", "ab", dates={"b": -5}), route("two", "ba", dates={"b": -5})], "ba", id="undated-last"),
        # a: weight 61 at rank 1 of "one" is 61/61; b: 62/62 at rank 2 of "two". The same sum, a has the better rank.
        pytest.param(
            [route("one", "a", weight=61, dates={"a": 1}), route("two", "zb", weight=62, dates={"b": 2})], "zab", id="best-rank"
        ),
    ],
)  # fmt: skip
def test_ties(routes: list[RankedRoute], expected: str):
    assert keys(fuse(routes, fusion=RRF, window=10)) == list(expected)


@pytest.mark.parametrize(
    "fusion", [RRF, ADAPTIVE, Fusion(method="linear"), Fusion(method="linear", normalizer="minmax")]
)
def test_the_order_of_routes_never_shows(fusion: Fusion):
    rng = random.Random(7)
    pool = [f"d{at}" for at in range(60)]
    routes = []
    for at in range(7):
        some = rng.sample(pool, 40)
        values = sorted((rng.choice([0.1, 0.2, 0.3, 1 / 3, 0.7]) for _ in some), reverse=True)
        routes.append(route(f"r{at}", some, weight=rng.choice([0.1, 0.7, 1.3]), scores=values))
    first = repr(fuse(routes, fusion=fusion, window=30))
    for _ in range(100):
        rng.shuffle(routes)
        assert repr(fuse(routes, fusion=fusion, window=30)) == first


def test_equal_ranks_in_other_routes_are_equal_sums():
    # Added from left to right 1/67 + 1/61 + 1/62 comes out lower in its last digit than 1/61 + 1/62 + 1/67.
    columns = {"1": ["a", *"pqrst", "b"], "2": ["b", "a"], "3": ["u", "b", *"vwxy", "a"]}
    routes = [route(name, column, dates={"b": 2, "a": 1}) for name, column in columns.items()]
    fused = fuse(routes, fusion=RRF, window=10)

    assert [hit.ranks for hit in fused[:2]] == [{"1": 7, "2": 1, "3": 2}, {"1": 1, "2": 2, "3": 7}]
    assert [hit.key for hit in fused[:2]] == ["b", "a"]
    assert fused[0].score == fused[1].score == math.fsum([1 / 61, 1 / 62, 1 / 67])


def test_weight_zero_adds_neither_score_nor_hits_nor_ties():
    quiet = route("quiet", "cba", weight=0.0)
    heard = route("heard", "ab")

    assert fuse([quiet, heard], fusion=RRF, window=10) == fuse([heard], fusion=RRF, window=10)
    assert fuse([quiet], fusion=RRF, window=10) == []
    assert fuse([], fusion=RRF, window=10) == []


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="window"):
        fuse([], fusion=RRF, window=0)
    with pytest.raises(ValueError, match="same name"):
        fuse([route("r", "a"), route("r", "b")], fusion=RRF, window=1)
    with pytest.raises(ValueError, match="additive"):
        fuse([], fusion=Fusion(method="additive"), window=1)


# --- the window --------------------------------------------------------------------------------------------------


def test_ranks_beyond_the_window_count_for_nothing_inside():
    fused = fuse([route("one", "abcd"), route("two", "dcxy")], fusion=RRF, window=2)

    # c and d have ranks 3 and 4 in "one": shown, not counted.
    assert keys(fused) == ["a", "d", "b", "c", "x", "y"]
    assert scores(fused)["d"] == 1 / 61
    assert fused[1].ranks == {"one": 4, "two": 1}
    assert fused[1].contributions == {"one": 0.0, "two": 1 / 61}
    assert [hit.beyond_window for hit in fused] == [False] * 4 + [True] * 2


def test_the_tail_is_capped_at_the_heads_last_score_and_keeps_its_own_order():
    # x: 1/62 + 1/62 > 1/61, y: 1/63 + 1/63 < 1/61
    fused = fuse([route("one", "axy"), route("two", "bxy")], fusion=RRF, window=1)

    assert keys(fused) == ["a", "b", "x", "y"]
    assert [hit.score for hit in fused] == [1 / 61, 1 / 61, 1 / 61, 1 / 61]
    assert fused[2].fused_score == 1 / 62 + 1 / 62
    assert fused[3].fused_score == 1 / 63 + 1 / 63 > 1 / 61


def test_linear_tail_may_lie_below_the_window():
    # Window scores 4 and 2: mean 3, deviation 1; the tail's 0 is -3.
    fused = fuse([route("r", "abc", scores=[4, 2, 0])], fusion=Fusion(method="linear"), window=2)

    assert [(hit.key, hit.score, hit.beyond_window) for hit in fused] == [
        ("a", 1, False),
        ("b", -1, False),
        ("c", -3, True),
    ]


@st.composite
def several_routes(draw) -> list[RankedRoute]:
    routes = []
    for at in range(draw(st.integers(1, 4))):
        hit_keys = draw(st.lists(st.sampled_from([f"k{n}" for n in range(25)]), max_size=30))
        values = sorted(
            draw(
                st.lists(
                    st.sampled_from([0.0, 0.5, 0.75, 1.0, 3.0]),
                    min_size=len(hit_keys),
                    max_size=len(hit_keys),
                )
            )
        )
        routes.append(
            route(
                f"r{at}",
                hit_keys,
                weight=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
                scores=values[::-1] or None,
            )
        )
    return routes  # fmt: skip


@given(
    several_routes(),
    st.integers(1, 12),
    st.integers(0, 30),
    st.sampled_from([RRF, ADAPTIVE, Fusion(method="linear"), Fusion(method="linear", normalizer="minmax")]),
)
def test_asking_for_more_never_changes_the_head(
    routes: list[RankedRoute], window: int, more: int, fusion: Fusion
):
    unique = [
        RankedRoute(r.name, r.weight, list({hit.key: hit for hit in reversed(r.hits)}.values()))
        for r in routes
    ]
    short = [RankedRoute(r.name, r.weight, r.hits[:window]) for r in unique]
    longer = [RankedRoute(r.name, r.weight, r.hits[: window + more]) for r in unique]
    head, whole = fuse(short, fusion=fusion, window=window), fuse(longer, fusion=fusion, window=window)

    assert [(hit.key, hit.score, hit.contributions) for hit in whole[: len(head)]] == [
        (hit.key, hit.score, hit.contributions) for hit in head
    ]
    assert all(hit.beyond_window for hit in whole[len(head) :])
    assert len(set(keys(whole))) == len(whole)
    listed = [hit.score for hit in whole]
    assert listed == sorted(listed, reverse=True)


# --- adaptive ----------------------------------------------------------------------------------------------------


def cosines(name: str, keys: str | list[str], scores: list[float], *, weight: float = 1.0) -> RankedRoute:
    hits = [RankedHit(key, (1 + cosine) / 2, base=cosine) for key, cosine in zip(keys, scores, strict=True)]
    return RankedRoute(name, weight, hits, "cosine")


def test_adaptive_against_written_out_arithmetic():
    # Six candidates; the words match three of them, so that d, e and f count as scored 0.
    text = route("text", "abc", scores=[9, 6, 3])
    vector = cosines("vector", "dabef", [0.9, 0.8, 0.7, 0.7, 0.4])
    confidence = {"text": 1.0, "vector": (0.9 - 0.7) / (1 - 0.7)}
    raw = {"text": 1.0, "vector": (2 * confidence["vector"]) ** 1.5}
    weight = {name: value / sum(raw.values()) for name, value in raw.items()}
    # Deviations: of (9, 6, 3, 0, 0, 0) from 3, and of half the cosines from their mean.
    unit = {
        "text": math.sqrt((36 + 9 + 0 + 9 + 9 + 9) / 6),
        "vector": math.sqrt((0.2**2 + 0.1**2 + 0.3**2) / 5) / 2,
    }

    fused = fuse([text, vector], fusion=ADAPTIVE, window=100)

    assert scores(fused) == pytest.approx(
        {
            "a": weight["text"] * 9 / unit["text"] + weight["vector"] * 0.2 / unit["vector"],
            "b": weight["text"] * 6 / unit["text"] + weight["vector"] * 0.15 / unit["vector"],
            "c": weight["text"] * 3 / unit["text"],
            "d": weight["vector"] * 0.25 / unit["vector"],
            "e": weight["vector"] * 0.15 / unit["vector"],
            "f": 0.0,
        }
    )
    first = fused[0]
    assert {name: share.confidence for name, share in first.shares.items()} == pytest.approx(confidence)
    assert {name: share.weight for name, share in first.shares.items()} == pytest.approx(weight)
    assert first.contributions == pytest.approx(
        {name: weight[name] * first.normalized[name] for name in first.normalized}
    )


def test_a_route_that_finds_all_alike_loses_its_say():
    numbers = [str(at) for at in range(100)]
    knows = route("text", numbers, scores=[30.0] + [10 - at / 20 for at in range(99)])
    alike = cosines("vector", numbers[::-1], [0.9 - at / 10_000 for at in range(100)])
    differs = cosines("vector", numbers[::-1], [0.9 - at / 200 for at in range(100)])

    dull, keen = (fuse([knows, other], fusion=ADAPTIVE, window=100) for other in (alike, differs))

    assert dull[0].shares["vector"].weight < 0.1
    assert keen[0].shares["vector"].weight > 0.3
    assert keys(dull)[:3] == ["0", "1", "2"]


def test_confidence_is_read_before_decay():
    fresh = RankedRoute("r", 1.0, [RankedHit("a", 4.0, base=5.0), RankedHit("b", 1.0, base=4.0)])

    assert shares([fresh], window=2)["r"].confidence == pytest.approx(1 - 4 / 5)


def test_weights_of_the_request_hold_beside_confidence():
    words, meaning = route("text", "ab", scores=[2, 1]), cosines("vector", "ba", [0.9, 0.5])
    plain = shares([words, meaning], window=2)
    told = shares([words, replace(meaning, weight=3.0)], window=2)
    none = shares([words, replace(meaning, weight=0.0)], window=2)

    assert told["vector"].weight / told["text"].weight == pytest.approx(
        3 * plain["vector"].weight / plain["text"].weight
    )
    assert none == {"text": Share(0.5, 1.0)}


def test_a_single_match_of_a_word_is_no_flat_list():
    fused = fuse(
        [route("text", "x", scores=[7]), cosines("vector", "abcdx", [0.9, 0.89, 0.88, 0.87, 0.8])],
        fusion=ADAPTIVE,
        window=100,
    )

    assert keys(fused)[0] == "x"


@pytest.mark.parametrize(
    "routes", [[route("r", "a", scores=[3])], [route("none", ""), route("r", "ab", scores=[1, 1])]]
)
def test_adaptive_with_nothing_to_tell_hits_apart(routes: list[RankedRoute]):
    fused = fuse(routes, fusion=ADAPTIVE, window=10)

    assert set(scores(fused).values()) == {1.0}
    assert fused[0].shares["r"] == Share(0.0, 1.0)


def test_a_full_list_of_cosines_holds_against_a_hit_that_it_lacks_it():
    # Best in words is a: with the vectors' window full without it, it lies a deviation below their least.
    text = route("text", "ab", scores=[9, 6])
    vector = cosines("vector", "bcd", [0.9, 0.8, 0.7])

    def told(routes: list[RankedRoute], window: int) -> dict[str, Fused]:
        return {hit.key: hit for hit in fuse(routes, fusion=ADAPTIVE, window=window)}

    full, roomy = told([text, vector], 3), told([text, vector], 4)
    dated = told([text, replace(vector, restricted=True)], 3)
    brought = told([text, vector, replace(route("fresh_text", "a"), restricted=True)], 3)

    assert full["a"].normalized["vector"] == ABSENT
    assert full["a"].contributions["vector"] == pytest.approx(ABSENT * full["a"].shares["vector"].weight)
    assert full["a"].shares["vector"].absent == ABSENT
    # What words don't match is scored 0 as it is; a date window or a list with room says nothing about the rest.
    assert "text" not in full["c"].normalized
    # Nor is a hit pushed down that another list was asked for to bring up.
    for other in (roomy, dated, brought):
        assert "vector" not in other["a"].normalized
        assert other["a"].contributions["vector"] == 0


def test_a_rank_past_the_window_is_no_better_than_its_absence():
    text = route("text", "ab", scores=[9, 6])
    short = cosines("vector", "bcd", [0.9, 0.8, 0.7])
    long = cosines("vector", "bcdae", [0.9, 0.8, 0.7, 0.69, 0.1])

    least, whole = (fuse([text, vector], fusion=ADAPTIVE, window=3) for vector in (short, long))

    assert [(hit.key, hit.score) for hit in whole[: len(least)]] == [(hit.key, hit.score) for hit in least]
    [tail] = whole[len(least) :]
    assert (tail.key, tail.normalized["vector"]) == ("e", ABSENT)


@given(
    st.lists(st.floats(0.1, 50), min_size=2, max_size=8),
    st.lists(st.floats(0.5, 0.99), min_size=2, max_size=8),
    st.integers(1, 10),
    st.sampled_from([0.25, 2.0, 1024.0]),
)
def test_adaptive_scores_add_up_and_words_have_no_scale(
    words: list[float], meanings: list[float], window: int, scale: float
):
    text = route("text", "abcdefgh"[: len(words)], scores=sorted(words, reverse=True))
    vector = cosines("vector", "hgfedcba"[: len(meanings)], sorted(meanings, reverse=True))
    scaled = route("text", "abcdefgh"[: len(words)], scores=[scale * s for s in sorted(words, reverse=True)])

    fused, same = (fuse([first, vector], fusion=ADAPTIVE, window=window) for first in (text, scaled))

    assert [(hit.key, hit.score) for hit in fused] == [(hit.key, hit.score) for hit in same]
    for hit in fused:
        assert math.fsum(hit.contributions.values()) == hit.fused_score
        assert hit.contributions == pytest.approx(
            {name: hit.shares[name].weight * hit.normalized.get(name, 0.0) for name in hit.contributions}
        )
    assert math.fsum(share.weight for share in fused[0].shares.values()) == pytest.approx(1.0)


def test_a_longer_window_changes_neither_spread_nor_confidence():
    long = route("text", [str(at) for at in range(300)], scores=[300.0 - at for at in range(300)])

    short, whole = (fuse([long], fusion=ADAPTIVE, window=window) for window in (100, 250))

    assert short[0].shares == whole[0].shares
    assert short[0].score - short[1].score == pytest.approx(whole[0].score - whole[1].score)


# --- linear ------------------------------------------------------------------------------------------------------


def test_zscore():
    # text: mean 4, population deviation sqrt((9 + 0 + 9) / 3) = sqrt(6); vector: mean 0.7, deviation 0.2.
    text = route("text", "abc", scores=[7, 4, 1])
    vector = route("vector", "bd", scores=[0.9, 0.5], weight=2)
    fused = fuse([text, vector], fusion=Fusion(method="linear"), window=10)

    expected = {
        "a": 3 / math.sqrt(6) + 2 * -1,
        "b": 0 + 2 * 1,
        "c": -3 / math.sqrt(6) + 2 * -1,
        "d": -3 / math.sqrt(6) + 2 * -1,
    }
    assert scores(fused) == pytest.approx(expected, rel=1e-12)
    # c was found at rank 3, d at rank 2.
    assert keys(fused) == ["b", "a", "d", "c"]
    assert fused[2].normalized == pytest.approx({"text": -3 / math.sqrt(6), "vector": -1})
    assert fused[2].ranks == {"vector": 2}
    for hit in fused:
        assert math.fsum(hit.contributions.values()) == hit.score


def test_minmax():
    text = route("text", "abc", scores=[7, 4, 1])
    vector = route("vector", "bd", scores=[0.9, 0.5], weight=0.5)
    fused = fuse([text, vector], fusion=Fusion(method="linear", normalizer="minmax"), window=10)

    assert scores(fused) == {"a": 1 + 0.5 * 0, "b": 0.5 + 0.5 * 1, "c": 0, "d": 0}
    assert keys(fused) == ["a", "b", "d", "c"]


@pytest.mark.parametrize("normalizer, flat", [("zscore", 0.0), ("minmax", 1.0)])
def test_a_route_without_spread_cannot_tell_hits_apart(normalizer, flat: float):
    # Three times 0.1 sums to 0.30000000000000004: a deviation computed naively is not 0 here.
    equal = route("equal", "abc", scores=[0.1, 0.1, 0.1])
    other = route("other", "dcb", scores=[3, 2, 1])
    fused = fuse([equal, other], fusion=Fusion(method="linear", normalizer=normalizer), window=10)

    assert {hit.normalized["equal"] for hit in fused} == {flat}
    assert keys(fused) == ["d", "c", "a", "b"]


def test_linear_with_an_empty_route():
    fused = fuse([route("none", ""), route("r", "ab")], fusion=Fusion(method="linear"), window=10)

    assert scores(fused) == {"a": 1, "b": -1}
    assert fused[0].contributions == {"none": 0.0, "r": 1.0}
    assert fused[0].normalized == {"r": 1.0}


# --- what comes after --------------------------------------------------------------------------------------------


def test_a_factor_multiplies_the_fused_score_and_orders_anew():
    fused = fuse([route("one", "abc")], fusion=RRF, window=10)
    decayed = apply_factor(fused, {"a": 0.5, "b": 1.0, "c": 0.0})

    assert [(hit.key, hit.score, hit.fused_score, hit.factor) for hit in decayed] == [
        ("b", 1 / 62, 1 / 62, 1.0),
        ("a", 1 / 61 * 0.5, 1 / 61, 0.5),
        ("c", 0.0, 1 / 63, 0.0),
    ]


def test_a_factor_of_zero_leaves_ties_to_rank():
    fused = fuse([route("one", "cab")], fusion=RRF, window=10)

    assert keys(apply_factor(fused, dict.fromkeys("abc", 0.0))) == ["c", "a", "b"]


def test_a_factor_never_lifts_a_negative_score():
    # z-scores of 3, 2, 1 are u, 0, -u: the least becomes zero, so b has u above it and a has 2u.
    fused = fuse([route("one", "abc", scores=[3, 2, 1])], fusion=Fusion(method="linear"), window=10)
    u = math.sqrt(3 / 2)
    decayed = apply_factor(fused, {"a": 0.25, "b": 0.75, "c": 0.1})

    assert scores(decayed) == pytest.approx({"b": -u + 0.75 * u, "a": -u + 0.25 * 2 * u, "c": -u})
    assert keys(decayed) == ["b", "a", "c"]


def test_a_factor_keeps_the_tail_behind():
    fused = fuse([route("one", "axy"), route("two", "bxy")], fusion=RRF, window=1)
    decayed = apply_factor(fused, {"a": 0.5, "b": 0.25, "x": 0.1, "y": 1.0})

    assert [(hit.key, hit.score) for hit in decayed] == [
        ("a", 1 / 61 * 0.5),
        ("b", 1 / 61 * 0.25),
        ("y", 1 / 61 * 0.25),
        ("x", (1 / 62 + 1 / 62) * 0.1),
    ]


def test_a_factor_keeps_the_order_of_a_tail_below_zero():
    fused = fuse([route("r", "abcd", scores=[4, 2, 0, -2])], fusion=Fusion(method="linear"), window=2)

    assert keys(apply_factor(fused, {"a": 1, "b": 1, "c": 0.1, "d": 1})) == ["a", "b", "c", "d"]


def test_rescore_orders_by_other_scores():
    fused = fuse([route("one", "abc")], fusion=RRF, window=10)

    assert [(hit.key, hit.score) for hit in rescore(fused, {"a": 0.1, "b": 0.1, "c": 0.9})] == [
        ("c", 0.9),
        ("a", 0.1),
        ("b", 0.1),
    ]


@pytest.mark.parametrize(
    "rate, hours, expected",
    [
        (0.01, 24, 0.8 + 0.7856781),
        (0, 1000, 0.8 + 1),
        (1, 0, 0.8 + 1),
        (1, 5, 0.8),
    ],
)
def test_additive_is_relevance_and_recency_summed(rate: float, hours: float, expected: float):
    assert additive(0.8, None, (1 - rate) ** hours).score == pytest.approx(expected, abs=5e-8)


def test_additive_with_salience_and_weights():
    result = additive(0.5, 3.0, 0.25, {"salience": 0.1, "recency": 2})

    assert result.terms == {"relevance": 0.5, "salience": 3.0 * 0.1, "recency": 0.5}
    assert result.score == pytest.approx(0.5 + 0.3 + 0.5)
    assert additive(None, None, 1.0).score == 1.0
