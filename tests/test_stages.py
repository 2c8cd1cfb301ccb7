"""The stages after recall without a cluster: what they read, whom votes move, and what is not measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from app import stages
from app.asking import Search
from app.planning import Candidate, Plan, RouteAnswer, make_plan
from app.ratings import Rating, Ratings
from app.recency import UNCOMPARED
from tests.searching import DAY, NOW_MS
from tests.test_planning import COLLECTION

TEXT = {"kind": "text"}


def plan_of(**options: Any) -> Plan:
    asked = {"collection": "handbook", "query": "carry over", "routes": [TEXT], **options}
    return make_plan(Search.model_validate(asked), collection=COLLECTION, now_ms=NOW_MS)


def listed(names: Sequence[str], *, created: Mapping[str, int] = {}, chunked: bool = False) -> RouteAnswer:
    """Return a route's list: scores fall by one from hit to hit; of a chunk the name is its document's."""
    candidates = [
        Candidate(
            f"{name}\0{at}" if chunked else name, name, at, 1000.0 - at, 1000.0 - at, None,
            created.get(name), created.get(name), False, at if chunked else None,
        )
        for at, name in enumerate(names, start=1)
    ]  # fmt: skip
    return RouteAnswer(tuple(candidates), None, 1, None)


def test_votes_are_told_where_they_count() -> None:
    plan = plan_of(top_k=150, fusion={"method": "rrf"}, feedback={"strength": 0.2})
    voted = Rating(lean=1.0, voters=3)
    ratings = Ratings(as_of_ms=NOW_MS, usual=0.5, by_document={"n003": voted, "n120": voted})
    names = [f"n{at:03d}" for at in range(200)]
    order = stages.fuse(plan, {"text": listed(names[:100])}, {200: {"text": listed(names)}}, {})
    rated = {item.id: item for item in stages.rated(replace(plan, ratings=ratings), order)}
    assert next(iter(rated)) == "n003"
    assert rated["n003"].feedback is not None
    assert rated["n003"].score == pytest.approx(1.2 / 64)
    # Behind the window nothing is multiplied, so nothing is told.
    assert rated["n120"].tail
    assert rated["n120"].feedback is None
    assert list(rated)[120] == "n120"


def test_what_could_not_be_measured_has_no_place() -> None:
    plan = plan_of(
        fusion={"method": "additive"}, decay={"hourly_loss": 0.01, "field": "last_accessed_at", "floor": 0}
    )
    measured = {"a": (0.5, 0.0, 0.25), "c": (0.0, 0.0, 0.0)}
    order = stages.fuse(plan, {"text": listed(["a", "b", "c"])}, {}, measured)
    assert [(item.id, item.score) for item in order] == [("a", 0.75), ("c", 0.0)]


@pytest.mark.parametrize(
    "options, query, count",
    [
        ({"mmr": {}}, "carry over", 50),
        # Of a hundred the newest edition may come to the top, and be compared there.
        ({"mmr": {}}, "latest carry over", 100),
        ({"mmr": {"candidates": 5}}, "carry over", 20),
        # Each that is folded lets another one in from below.
        ({"mmr": {}, "fold_superseded": True}, "carry over", 70),
        ({"mmr": {"candidates": 5}, "fold_superseded": True}, "latest carry over", 105),
    ],
    ids=str,
)
def test_mmr_reads_whatever_may_come_into_its_pool(options: dict[str, Any], query: str, count: int) -> None:
    plan = plan_of(query=query, fusion={"method": "rrf", "window": 200}, **options)
    names = [f"n{at:03d}" for at in range(200)]
    created = {name: NOW_MS - (200 + at) * DAY for at, name in enumerate(names)}
    order, decision = stages.adapted(
        plan, stages.fuse(plan, {"text": listed(names, created=created)}, {}, {})
    )
    read = stages.needed(plan, order, offset=0, decision=decision)
    assert [item.id for item in read] == names[:count]


def test_chunks_are_not_compared_and_count_once_for_their_document() -> None:
    plan = plan_of(collapse=False)
    old = {f"old{at}": NOW_MS - (400 + at) * DAY for at in range(3)}
    created = {"news": NOW_MS - DAY, **old}
    # Twelve chunks of one old document are one old document, which is no evidence that the rest is old.
    names = ["news", *["old0"] * 12, "old1", "old2"]
    order, decision = stages.adapted(
        plan, stages.fuse(plan, {"text": listed(names, created=created, chunked=True)}, {}, {})
    )
    assert decision is not None
    assert (decision.mode, decision.compared, decision.reason) == ("off", 0, UNCOMPARED)
    assert [item.auto_factor for item in order] == [None] * 15
    many = {f"old{at}": NOW_MS - (400 + at) * DAY for at in range(12)}
    given = listed(["news", *many], created={"news": NOW_MS - DAY, **many}, chunked=True)
    _, decision = stages.adapted(plan, stages.fuse(plan, {"text": given}, {}, {}))
    assert decision is not None
    assert (decision.mode, decision.compared) == ("news", 0)
    assert "say the same thing" not in decision.reason
