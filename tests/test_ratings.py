"""Votes into ratings: the arithmetic, and that neither a flood nor a low rank decides."""

import math

import pytest

from app.ratings import MOST_PER_KEY, Vote, interval, passed_over, rate
from app.times import DAY_MS

NOW = 1_800_000_000_000


def vote(
    document: str, voter: str, verdict: str = "clicked", *, key: str = "k", rank: int = 1, age_d: float = 0
):
    return Vote(document, voter, key, verdict, rank, NOW - int(age_d * DAY_MS))


def lean(votes, document="d"):
    return rate(votes, as_of_ms=NOW).by_document[document].lean


def test_no_votes_no_ratings():
    assert rate([], as_of_ms=NOW).by_document == {}


@pytest.mark.parametrize(
    "rank, chance",
    [
        pytest.param(1, 1.0, id="the first is always looked at"),
        pytest.param(2, 0.25 / 0.75, id="e 1/2, c 1/2: (1/2 * 1/2) / (1 - 1/4)"),
        pytest.param(10, 0.05 / 0.95, id="e 1/10: (1/10 * 1/2) / (1 - 1/20)"),
    ],
)
def test_how_likely_an_unclicked_hit_was_seen(rank, chance):
    assert passed_over(rank) == pytest.approx(chance)


def test_the_interval_is_wilsons():
    # z = 1.64, rate 1, 3 votes: 3 / (3 + 1.64^2) = 0.527
    assert interval(1.0, 3) == pytest.approx((3 / (3 + 1.64**2), 1.0))
    low, high = interval(0.5, 10)
    assert low == pytest.approx(1 - high)
    assert interval(0.5, 0) == (0.0, 1.0)


def test_two_voters_move_nothing_and_three_do():
    assert lean([vote("d", "a"), vote("d", "b")]) == 0
    three = lean([vote("d", "a"), vote("d", "b"), vote("d", "c")])
    assert three == pytest.approx((3 / (3 + 1.64**2) - 0.5) / 0.5)


def test_a_flood_of_one_voter_counts_once():
    flood = [vote("d", "flooder") for _ in range(10_000)]
    assert lean(flood) == 0
    assert lean([*flood, vote("d", "b"), vote("d", "c")]) == pytest.approx(
        lean([vote("d", "a"), vote("d", "b"), vote("d", "c")])
    )


def test_made_up_users_of_one_key_count_ten_times_at_most():
    ten = lean([vote("d", f"u{n}") for n in range(int(MOST_PER_KEY))])
    assert lean([vote("d", f"u{n}") for n in range(5_000)]) == pytest.approx(ten)
    # Against them, the voters of two other keys still weigh twice as much.
    fakes = [vote("d", f"u{n}") for n in range(5_000)]
    honest = [vote("d", f"h{n}", "unhelpful", key=f"k{n % 2}") for n in range(40)]
    assert rate([*fakes, *honest], as_of_ms=NOW).by_document["d"].rate == pytest.approx(1 / 3)


def test_it_stays_within_its_bounds():
    votes = [vote("up", f"u{n}", key=f"k{n}") for n in range(500)]
    votes += [vote("down", f"u{n}", "unhelpful", key=f"k{n}") for n in range(500)]
    ratings = rate(votes, as_of_ms=NOW).by_document
    assert 0.9 < ratings["up"].lean <= 1
    assert -1 <= ratings["down"].lean < -0.9
    assert ratings["up"].factor(0.1) == pytest.approx(1 + 0.1 * ratings["up"].lean)
    assert 0.9 <= ratings["down"].factor(0.1) < 1


def test_a_low_rank_is_not_held_against_a_document():
    # Both are clicked half of the times they are seen; the tenth is seen in one of ten.
    first = [vote("first", f"c{n}", key=f"k{n}") for n in range(50)]
    first += [vote("first", f"i{n}", "ignored", key=f"l{n}") for n in range(50)]
    tenth = [vote("tenth", f"c{n}", key=f"k{n}", rank=10) for n in range(50)]
    tenth += [vote("tenth", f"i{n}", "ignored", key=f"l{n}", rank=10) for n in range(950)]
    ratings = rate([*first, *tenth], as_of_ms=NOW).by_document
    assert ratings["first"].rate == pytest.approx(0.5)
    assert ratings["tenth"].rate == pytest.approx(0.5)


def test_where_most_is_passed_over_the_usual_rate_is_what_counts():
    votes = [
        vote(f"d{d}", f"v{n}", "clicked" if n < 4 else "ignored", key=f"k{n}")
        for d in range(20)
        for n in range(20)
    ]
    ratings = rate(votes, as_of_ms=NOW)
    assert ratings.usual == pytest.approx((80 + 5) / 410)
    assert {rating.lean for rating in ratings.by_document.values()} == {0}


def test_votes_fade():
    fresh = [vote("d", f"v{n}", key=f"k{n}") for n in range(8)]
    old = [vote("d", f"v{n}", key=f"k{n}", age_d=60) for n in range(8)]
    assert lean(fresh) > 0.3
    assert lean(old) == 0  # two half-lives: the weight of two votes
    assert rate(old, as_of_ms=NOW).by_document["d"].rate == 1


def test_later_votes_do_not_count_yet():
    votes = [vote("d", f"v{n}", age_d=-1) for n in range(8)]
    assert rate(votes, as_of_ms=NOW).by_document == {}


def test_the_counts_are_told():
    votes = [
        vote("d", "a"),
        vote("d", "b", "ignored"),
        vote("d", "c", "helpful"),
        vote("d", "e", "unhelpful"),
    ]
    told = rate(votes, as_of_ms=NOW).by_document["d"].told(0.2)
    assert (told.voters, told.clicked, told.ignored, told.helpful, told.unhelpful) == (4, 1, 1, 1, 1)
    assert told.rate == pytest.approx(0.5)
    assert math.isclose(told.factor, 1)


def test_the_order_of_votes_is_no_matter():
    votes = [vote("d", f"v{n % 7}", "clicked" if n % 3 else "ignored", key=f"k{n % 5}", rank=n % 9 + 1, age_d=n)
             for n in range(60)]  # fmt: skip
    one, other = rate(votes, as_of_ms=NOW), rate(votes[::-1], as_of_ms=NOW)
    assert one.by_document["d"].rate == pytest.approx(other.by_document["d"].rate)


def test_votes_under_the_same_question_say_most():
    liked = [Vote("d", f"v{n}", f"k{n}", "clicked", 1, NOW, "q1") for n in range(20)]
    disliked = [Vote("d", f"v{n}", f"k{n}", "unhelpful", 1, NOW, "q2") for n in range(20)]
    ratings = rate([*liked, *disliked], as_of_ms=NOW)
    assert ratings.by_document["d"].lean == 0
    first, second, third = (ratings.under(question).by_document["d"] for question in ("q1", "q2", "q3"))
    assert (first.basis, first.counts) == ("question", {"clicked": 20})
    assert first.lean > 0.5
    assert second.lean < -0.2
    assert (third.basis, third.lean) == ("document", 0)


def test_under_another_question_a_document_carries_half():
    ratings = rate([Vote("d", f"v{n}", f"k{n}", "clicked", 1, NOW, "q1") for n in range(20)], as_of_ms=NOW)
    carried = ratings.under("q2").by_document["d"]
    assert carried.lean == pytest.approx(ratings.by_document["d"].lean / 2)
    assert carried.counts == {"clicked": 20}
    assert "other" not in ratings.under("q2").by_document
    assert ratings.under("q2").by_document.get("other") is None
