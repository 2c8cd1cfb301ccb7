"""The decision of `decay: "auto"`, and the two factors by written-out arithmetic."""

import pytest

from app import recency
from app.decay import factor
from app.intent import read_intent
from app.times import DAY_MS, parse_instant, to_ms

ORIGIN_MS = to_ms(parse_instant("2024-11-12T09:30:00Z"))
OLD = [ORIGIN_MS - days * DAY_MS for days in (400, 500, 600, 700, 800, 900, 1000, 1100, 1200, 1300)]


def decided(query: str, created: list[int | None]) -> recency.Recency:
    return recency.decide(read_intent(query, origin_ms=ORIGIN_MS), origin_ms=ORIGIN_MS, created_ms=created)


def test_the_rule_is_to_compare_what_says_the_same() -> None:
    made = decided("carry over leave", [*OLD])
    assert (made.mode, made.compared, made.current) == ("equals", recency.COMPARED, False)
    assert recency.decay_of(made) is None


def test_a_query_for_what_is_current_compares_more() -> None:
    made = decided("the latest leave policy", [*OLD])
    assert (made.mode, made.compared, made.current) == ("equals", recency.COMPARED_CURRENT, True)
    assert "latest" in made.told()


@pytest.mark.parametrize(
    "query, until",
    [
        ("carry over leave", ORIGIN_MS + DAY_MS),
        ("the latest leave policy", ORIGIN_MS + DAY_MS),
        ("leave policy of this year", ORIGIN_MS + DAY_MS),
        ("leave policy of this week", ORIGIN_MS + DAY_MS),
        ("leave policy of 2020", to_ms(parse_instant("2020-12-31T23:59:59.999Z"))),
    ],
)
@pytest.mark.parametrize("new", [[], [ORIGIN_MS], [ORIGIN_MS - DAY_MS]], ids=len)
def test_what_is_dated_after_the_origin_replaces_nothing(
    query: str, until: int, new: list[int | None]
) -> None:
    made = decided(query, [*new, *OLD])
    assert made.compared > 0
    assert made.not_after_ms == until


def test_a_query_about_the_past_turns_it_off() -> None:
    made = decided("history of the leave policy", [ORIGIN_MS, *OLD])
    assert (made.mode, made.compared) == ("off", 0)
    assert made.told() == "auto → off, the query asks about the past ('history of')"


def test_a_named_time_moves_the_origin_where_hits_are_from_then() -> None:
    then = to_ms(parse_instant("2020-04-02T12:00:00Z"))
    made = decided("what happened on 2020-04-02", [*OLD, then])
    assert (made.mode, made.compared) == ("around", recency.COMPARED)
    assert made.not_after_ms == to_ms(parse_instant("2020-04-02T23:59:59.999Z"))
    # Three days off is half of the way from 1 to the floor of .7, six days a sixteenth.
    for days, expected in ((0, 1.0), (-3.5, 0.85), (3.5, 0.85), (6.5, 0.7 + 0.3 / 16), (4000, 0.7)):
        moment = then + round(days * DAY_MS)
        assert recency.nearness(made, moment, evergreen=False) == pytest.approx(expected, abs=1e-6)
    assert recency.nearness(made, None, evergreen=False) == 0.7
    assert recency.nearness(made, None, evergreen=True) == 1.0
    off = decided("what happened on 2020-04-02", [*OLD])
    assert (off.mode, off.not_after_ms) == ("off", made.not_after_ms)
    assert "2020-04-02" in off.reason


def test_a_time_that_still_runs_asks_for_the_newest_where_none_is_from_then() -> None:
    made = decided("this week's menu", [*OLD])
    assert (made.mode, made.compared, made.current) == ("equals", recency.COMPARED_CURRENT, True)
    assert made.not_after_ms == ORIGIN_MS + DAY_MS
    assert decided("this week's menu", [ORIGIN_MS, *OLD]).mode == "around"
    assert decided("last week's menu", [*OLD]).mode == "off"


def test_a_time_of_late_that_nothing_is_from_says_nothing_where_a_best_hit_is_news() -> None:
    made = decided("what happened last week", [ORIGIN_MS, *OLD])
    assert (made.mode, made.not_after_ms) == ("news", ORIGIN_MS + DAY_MS)
    assert (
        "none of the best 20 hits is from then; one of the best 10 hits is at most 14 days old" in made.reason
    )


@pytest.mark.parametrize("query", ["the strike of May 2019", "March 2020 sales", "2019年的销量"])
def test_a_past_time_that_nothing_is_from_prefers_no_news(query: str) -> None:
    made = decided(query, [ORIGIN_MS - 10 * DAY_MS, *OLD])
    assert made.mode == "off"
    assert made.not_after_ms is not None
    assert made.not_after_ms < ORIGIN_MS - 14 * DAY_MS


def test_news_among_older_candidates_counts_for_more() -> None:
    made = decided("the strike", [OLD[0], ORIGIN_MS - 5 * DAY_MS, *OLD])
    assert made.mode == "news"
    decay = recency.decay_of(made)
    assert decay is not None
    # 60 days: .5 + .5 / 2
    assert factor(
        decay, origin_ms=ORIGIN_MS, moment_ms=ORIGIN_MS - 60 * DAY_MS, evergreen=False
    ) == pytest.approx(0.75)


@pytest.mark.parametrize(
    "query, created",
    [
        ("the strike", [*OLD, ORIGIN_MS - 5 * DAY_MS, *OLD]),
        ("the strike", [ORIGIN_MS - 15 * DAY_MS, *OLD]),
        ("the strike", [ORIGIN_MS - at * DAY_MS for at in range(40)]),
        ("the strike", [ORIGIN_MS, *OLD[:8]]),
        ("the 2019 strike", [ORIGIN_MS, *OLD]),
        ("the strike", [None] * 20),
        ("the strike", []),
    ],
    ids=[
        "not among the best",
        "older than news",
        "all is new",
        "too few",
        "may name a year",
        "undated",
        "none",
    ],
)
def test_no_news(query: str, created: list[int | None]) -> None:
    assert decided(query, created).mode == "equals"


def test_named_versions_are_told() -> None:
    assert "names 3.8" in decided("Python 3.8 walrus", [*OLD]).reason
