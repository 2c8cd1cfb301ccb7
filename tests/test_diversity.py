"""Near-duplicate removal and MMR against written-out cosines."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diversity import drop_near_duplicates, mmr


def unit(degrees: float) -> np.ndarray:
    """Return the unit vector at that angle, as stored: 32-bit floats."""
    return np.array([np.cos(np.radians(degrees)), np.sin(np.radians(degrees))], dtype=np.float32)


# --- near duplicates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "threshold, expected",
    [
        # cos 60 degrees is 0.5, cos 61 degrees is 0.4848
        pytest.param(0.5, (["a", "c"], {"a": ["b"]}), id="at-the-threshold"),
        pytest.param(0.51, (["a", "b", "c"], {}), id="below"),
        pytest.param(0.48, (["a"], {"a": ["b", "c"]}), id="above"),
    ],
)
def test_the_higher_placed_stays(threshold: float, expected):
    result = drop_near_duplicates("abc", [unit(0), unit(60), unit(-61)], threshold=threshold)

    assert result == expected


def test_length_does_not_matter_and_identical_vectors_reach_one():
    vectors = [unit(10), unit(10) * 7, unit(10) * np.float32(1e-3)]

    assert drop_near_duplicates("abc", vectors, threshold=1.0) == (["a"], {"a": ["b", "c"]})


def test_the_threshold_is_inclusive_at_stored_precision():
    for angle in range(360):
        pair = [unit(angle), unit(angle + 25)]
        assert drop_near_duplicates("ab", pair, threshold=float(np.cos(np.radians(25)))) == (
            ["a"],
            {"a": ["b"]},
        )


def test_a_chain_is_compared_with_kept_ones_only():
    # 0, 20 and 40 degrees: neighbours at 0.9397, the ends at 0.7660
    vectors = [unit(0), unit(20), unit(40)]

    assert drop_near_duplicates("abc", vectors, threshold=0.9) == (["a", "c"], {"a": ["b"]})


def test_a_hit_is_dropped_for_the_one_most_like_it():
    # cos 25 = 0.9063, cos 5 = 0.9962
    vectors = [unit(0), unit(30), unit(25)]

    assert drop_near_duplicates("abc", vectors, threshold=0.9) == (["a", "b"], {"b": ["c"]})


def test_newer_takes_the_higher_place():
    vectors = [unit(0), unit(90), unit(5), unit(180)]
    kept = drop_near_duplicates(
        ["old", "other", "new", "undated"], vectors, threshold=0.9, keep="newer", created_ms=[1, 9, 2, None]
    )

    assert kept == (["new", "other", "undated"], {"new": ["old"]})


@pytest.mark.parametrize(
    "dates, expected",
    [
        pytest.param([5, 5], (["a"], {"a": ["b"]}), id="equal-dates"),
        pytest.param([None, None], (["a"], {"a": ["b"]}), id="undated"),
        pytest.param([None, -1], (["b"], {"b": ["a"]}), id="undated-is-oldest"),
        pytest.param([0, None], (["a"], {"a": ["b"]}), id="zero-is-a-date"),
    ],
)
def test_newer_with_ties(dates: list, expected):
    result = drop_near_duplicates("ab", [unit(0), unit(1)], threshold=0.9, keep="newer", created_ms=dates)

    assert result == expected


def test_newer_drops_only_what_resembles_a_kept_hit():
    # Placed c, b, a; a is newest, then b, then c. b goes with a; c resembles only b, so it stays.
    vectors = [unit(40), unit(20), unit(0)]
    result = drop_near_duplicates("cba", vectors, threshold=0.9, keep="newer", created_ms=[1, 2, 3])

    assert result == (["c", "a"], {"a": ["b"]})


@pytest.mark.parametrize(
    "vectors",
    [
        pytest.param([None, None], id="missing"),
        pytest.param([np.zeros(3), np.zeros(3)], id="zero"),
        pytest.param([None, np.ones(3)], id="one-missing"),
    ],
)
def test_without_direction_nothing_is_alike(vectors: list):
    assert drop_near_duplicates("ab", vectors, threshold=1e-9) == (["a", "b"], {})


def test_equal_texts_are_duplicates_without_vectors():
    texts = ["30 days", "30 days", None, None, "P" * 200 + " net 10", "P" * 200 + " net 90"]
    result = drop_near_duplicates("ABcdEF", [None] * 6, threshold=0.9, texts=texts)

    assert result == (["A", "c", "d", "E", "F"], {"A": ["B"]})


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="vectors has 1 members for 2 keys"):
        drop_near_duplicates("ab", [None], threshold=0.9)
    with pytest.raises(ValueError, match="needs created_ms"):
        drop_near_duplicates("a", [None], threshold=0.9, keep="newer")
    with pytest.raises(ValueError, match="keys must differ"):
        drop_near_duplicates("aa", [None, None], threshold=0.9)
    with pytest.raises(ValueError, match="one length"):
        drop_near_duplicates("ab", [np.ones(2), np.ones(3)], threshold=0.9)


def test_nothing_in_nothing_out():
    assert drop_near_duplicates([], [], threshold=0.9) == ([], {})


@given(
    st.lists(st.tuples(st.integers(0, 359), st.none() | st.integers(0, 5)), max_size=15),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from(["higher", "newer"]),
)
def test_kept_hits_differ_and_dropped_ones_resemble_their_keeper(hits, threshold: float, keep):
    keys = [str(at) for at in range(len(hits))]
    vectors = {key: unit(angle) for key, (angle, _) in zip(keys, hits, strict=True)}
    dates = [date for _, date in hits]
    kept, dropped = drop_near_duplicates(
        keys, list(vectors.values()), threshold=threshold, keep=keep, created_ms=dates
    )

    def cosine(one: str, other: str) -> float:
        return float(vectors[one].astype(float) @ vectors[other].astype(float))

    assert sorted([*kept, *(key for group in dropped.values() for key in group)]) == sorted(keys)
    assert all(cosine(one, other) < threshold + 1e-6 for one in kept for other in kept if one != other)
    assert all(cosine(one, other) > threshold - 2e-6 for one, group in dropped.items() for other in group)
    if keep == "higher":
        assert kept == sorted(kept, key=int)
    else:
        ages = {key: -1 if date is None else date for key, date in zip(keys, dates, strict=True)}
        assert all(ages[one] >= ages[other] for one, group in dropped.items() for other in group)


# --- MMR -------------------------------------------------------------------------------------------------------------

A, A2, D = np.array([0.9848, 0.1736]), np.array([0.9781, -0.2079]), np.array([-0.1736, 0.9848])
RELEVANCE = [0.9848, 0.9781, -0.1736]


@pytest.mark.parametrize(
    "lambda_, expected",
    [
        pytest.param(1, [0, 1], id="relevance-alone: 0.9781 > -0.1736"),
        pytest.param(0.5, [0, 1], id="half: 0.0255 > -0.0868"),
        pytest.param(0, [0, 2], id="difference-alone: 0.0 > -0.9272"),
    ],
)
def test_mmr_second_pick(lambda_: float, expected: list[int]):
    assert mmr(RELEVANCE, [A, A2, D], lambda_=lambda_, k=2) == expected


def test_mmr_lambda_one_is_relevance_with_ties_in_input_order():
    assert mmr([0.5, 0.9, 0.5, 0.9], [unit(0)] * 4, lambda_=1, k=10) == [1, 3, 0, 2]


def test_mmr_compares_with_the_nearest_chosen():
    # 100 degrees has cosine -0.1736 with 0; then 45 has 0.7071 with 0, and 10 has 0.9848 with 0 (but 0 with 100).
    assert mmr([1, 1, 1, 1], [unit(0), unit(10), unit(45), unit(100)], lambda_=0, k=4) == [0, 3, 2, 1]
    # 100: 0.4 + 0.0868 > 90: 0.45 - 0; then 45: 0.4 - 0.3536 > 90: 0.45 - 0.4924.
    vectors = [unit(0), unit(45), unit(90), unit(100)]
    assert mmr([1, 0.8, 0.9, 0.8], vectors, lambda_=0.5, k=3) == [0, 3, 1]


def test_mmr_without_vectors_is_relevance():
    assert mmr([0.1, 0.3, 0.2], [None, None, None], lambda_=0.3, k=3) == [1, 2, 0]
    # 0.5 * 0.9 - 0.5 * 1 = -0.05 for the twin, 0.5 * 0.1 for the one without a vector.
    assert mmr([1.0, 0.9, 0.1], [unit(0), unit(0), None], lambda_=0.5, k=3) == [0, 2, 1]


@pytest.mark.parametrize("k", [0, -1])
def test_mmr_of_nothing(k: int):
    assert mmr([1.0], [None], lambda_=0.5, k=k) == []
    assert mmr([], [], lambda_=0.5, k=3) == []


@pytest.mark.parametrize("lambda_", [-0.1, 1.1, float("nan")])
def test_mmr_refuses_lambda_outside(lambda_: float):
    with pytest.raises(ValueError, match="lambda"):
        mmr([1.0], [None], lambda_=lambda_, k=1)


def test_mmr_refuses_uneven_lists():
    with pytest.raises(ValueError, match="vectors has 1"):
        mmr([1.0, 2.0], [None], lambda_=0.5, k=1)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.none() | st.integers(0, 359)), max_size=12),
    st.floats(0, 1),
    st.integers(0, 15),
)
def test_mmr_is_greedy_and_shorter_lists_are_its_head(hits, lambda_: float, k: int):
    relevance = [value for value, _ in hits]
    vectors = [None if angle is None else unit(angle) for _, angle in hits]
    whole = mmr(relevance, vectors, lambda_=lambda_, k=len(hits))

    assert sorted(whole) == list(range(len(hits)))
    assert mmr(relevance, vectors, lambda_=lambda_, k=k) == whole[:k]
