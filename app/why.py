"""Why a document stands where it stands in a search, or is not in it at all.

Runs the search itself, then asks each route about this one document: its score and factor wherever it ranks, and
how many documents stand above it. Stands above `search`, whose parts it calls.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app import decay, fields, filters, queries
from app.errors import HalflifeError
from app.models import Collection, ResolvedDecay, RouteHit, Search, Why, WhyResult, WhyRoute
from app.planning import (
    VECTOR_OVERSAMPLE,
    Candidate,
    Plan,
    PlannedRoute,
    age_days,
    make_plan,
    measure_body,
    read_route,
    route_body,
    route_query,
)
from app.recall import Run, fatal, in_background, located, recall
from app.search import Caller, Doors, measure, with_votes
from app.stages import Placed, fuse, rated
from app.times import from_ms, parse_instant, to_ms


async def why(
    request: Why, *, collection: Collection, doors: Doors, caller: Caller, now_ms: int
) -> WhyResult:
    """Account for one document in one search, as of one point in time.

    Stages after fusion (rerank, near-duplicate removal, MMR) are not run: they only reorder or drop what is told
    here. A document that the caller may not see is reported as not existing.
    """
    search = Search.model_validate(request.model_dump(exclude={"id"}, exclude_unset=True, by_alias=True))
    plan = make_plan(search, collection=collection, now_ms=now_ms, forced=caller.forced)
    plan = await with_votes(plan, doors=doors)
    budget = doors.timeout_s if search.timeout_ms is None else search.timeout_ms / 1000
    run = Run(plan=plan, offset=0, deadline=time.monotonic() + budget, pit=None, warnings=list(plan.warnings))
    pit = await recall(
        [run],
        cluster=doors.cluster,
        embedder=doors.embedder,
        embed_within_s=doors.embed_within_s,
        request_id=caller.request_id,
    )
    try:
        failure = fatal(run)
        if failure is not None:
            raise failure
        return await _account(request.id, run, doors=doors, caller=caller)
    finally:
        if pit is not None:
            in_background(doors.cluster.close_pit(pit))


async def _account(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> WhyResult:
    plan = run.plan
    measured = (await measure([run], doors=doors, caller=caller)).get(id(run), {})
    if isinstance(measured, HalflifeError):
        raise measured
    order = rated(plan, fuse(plan, run.answers, run.tails, measured))
    source = await _source(document_id, run, doors=doors, caller=caller)
    if source is None:
        return _absent(document_id, run)
    place = next((at for at, item in enumerate(order) if item.id == document_id), None)
    seen = await _seen(document_id, run, doors=doors, caller=caller)
    excluded = excluded_by(plan, source)
    relevance = await _relevance(document_id, run, doors=doors, caller=caller)
    least = plan.search.min_relevance
    if least is not None and relevance is not None and relevance < least:
        excluded.append(f"min_relevance: its relevance is {relevance:.4f}, {least:g} is the least")
    skipped = [name for name in ("rerank", "dedup", "mmr") if getattr(plan.search, name) is not None]
    if skipped:
        run.warnings.append(f"told before {', '.join(skipped)}, which may still move or drop it")
    routes: dict[str, WhyRoute] = {}
    for route in plan.routes:
        if route.name not in run.answers:
            status = run.statuses.get(route.name)
            routes[route.name] = WhyRoute(matches=False, note=None if status is None else status.reason)
            continue
        candidate, above, above_current = seen.get(route.name, (None, None, None))
        listed = order[place].routes.get(route.name) if place is not None else None
        routes[route.name] = _route(plan, route, candidate, above, above_current, listed, source, excluded)
    created = source.get(fields.CREATION_TIME)
    page = order[: plan.search.top_k]
    score = _fused_score(plan, routes) if place is None else order[place].score
    factor = _factor(plan, source)
    undecayed = score if place is None else order[place].fused_score
    if place is None and plan.placement == "fused" and score is not None and factor is not None:
        score *= factor
    on_page = place is not None and place < plan.search.top_k
    return WhyResult(
        id=document_id,
        origin=from_ms(plan.origin_ms),
        exists=True,
        excluded_by=excluded,
        title=source.get(fields.TITLE),
        creation_time=None if created is None else parse_instant(created),
        age_days=age_days(plan, source),
        evergreen=bool(source.get(fields.EVERGREEN, False)),
        relevance=relevance,
        decay=factor,
        routes=routes,
        fused_rank=None if place is None else place + 1,
        fused_score=score,
        top_k=plan.search.top_k,
        page_score=page[-1].score if page else None,
        on_page=on_page,
        what_it_takes=[] if on_page else _what_it_takes(plan, routes, page, excluded, factor, undecayed),
        warnings=run.warnings,
    )


def _absent(document_id: str, run: Run) -> WhyResult:
    return WhyResult(
        id=document_id, origin=from_ms(run.plan.origin_ms), exists=False,
        excluded_by=["no such document in this collection"], routes={}, top_k=run.plan.search.top_k, on_page=False,
        what_it_takes=["store the document"], warnings=run.warnings,
    )  # fmt: skip


async def _source(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> dict[str, Any] | None:
    """Return the stored fields as of the search's point in time; forced filters hold, the request's own do not."""
    body = {
        "size": 1,
        "query": {"bool": {"filter": [{"ids": {"values": [document_id]}}, *caller.forced]}},
        "_source": {"excludes": [fields.CHUNKS, fields.TEXT]},
    }
    [answer] = await doors.cluster.msearch(
        [located(run, body)], timeout_s=run.remaining_s(), opaque_id=caller.request_id
    )
    if isinstance(answer, HalflifeError):
        raise answer
    hits = answer["hits"]["hits"]
    return hits[0]["_source"] if hits else None


def excluded_by(plan: Plan, source: Mapping[str, Any]) -> list[str]:
    """Return what keeps a stored document out of every route: filter clauses, as_of, expiry, valid time."""
    reasons = []
    if plan.search.filter:
        reasons += filters.explain_mismatch(source, plan.search.filter, declared=plan.collection.declared)
    origin = from_ms(plan.origin_ms)

    def at(name: str) -> int | None:
        written = source.get(name)
        return None if written is None else to_ms(parse_instant(written))

    created, expires = at(fields.CREATION_TIME), at(fields.EXPIRES_AT)
    if plan.search.as_of is not None and created is not None and created > plan.origin_ms:
        reasons.append(f"as_of: it was created at {from_ms(created).isoformat()}, after {origin.isoformat()}")
    if expires is not None and expires <= plan.origin_ms:
        reasons.append(f"expires_at: it expired at {from_ms(expires).isoformat()}")
    if plan.search.valid_time == "only":
        start, end = at(fields.START_DATE), at(fields.END_DATE)
        if start is not None and start > plan.origin_ms:
            reasons.append(f"valid_time: it is true only from {from_ms(start).isoformat()}")
        if end is not None and end <= plan.origin_ms:
            reasons.append(f"valid_time: it was true only until {from_ms(end).isoformat()}")
    return reasons


Seen = tuple[Candidate | None, int | None, int | None]


async def _seen(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> dict[str, Seen]:
    """Return, per route, the document as a candidate, how many rank above it, and how many if it did not decay."""
    plan = run.plan
    asked = [route for route in plan.routes if route.name in run.answers]
    bodies = [route_body(plan, route, run.vectors, size=1, ids=[document_id]) for route in asked]
    answers = await _ask(bodies, run, doors=doors, caller=caller)
    candidates: dict[str, Candidate | None] = {}
    for route, answer in zip(asked, answers, strict=True):
        found = [] if isinstance(answer, HalflifeError) else read_route(plan, route, answer).candidates
        candidates[route.name] = found[0] if found else None
    counted: list[tuple[str, int]] = []
    bodies = []
    for route in asked:
        candidate = candidates[route.name]
        if candidate is None:
            continue
        for slot, score in enumerate((candidate.score, candidate.base)):
            counted.append((route.name, slot))
            bodies += _above(plan, route, run, candidate=candidate, score=score)
    counts: dict[str, list[int | None]] = {route.name: [None, None] for route in asked}
    told = await _ask(bodies, run, doors=doors, caller=caller)
    for at, (name, slot) in enumerate(counted):
        totals = [
            int(answer["hits"]["total"]["value"])
            for answer in told[3 * at : 3 * at + 3]
            if not isinstance(answer, HalflifeError)
        ]
        if len(totals) == 3:
            above, above_or_level_and_first, above_and_first = totals
            counts[name][slot] = above + above_or_level_and_first - above_and_first
    return {name: (candidates[name], above, current) for name, (above, current) in counts.items()}


def _above(
    plan: Plan, route: PlannedRoute, run: Run, *, candidate: Candidate, score: float
) -> list[dict[str, Any]]:
    """Return the bodies that count the documents above this score, and those level with it that ties put first.

    Those are: score greater; score greater or equal, and first in a tie; score greater, and first in a tie.
    """
    query = route_query(plan, route, run.vectors, depth=queries.MAX_CANDIDATES)
    first = {"bool": {"must": [query], "filter": [queries.before(candidate.created_ms, candidate.id)]}}
    # Scores are 32-bit floats in the cluster: this is the next one.
    greater = float(np.nextafter(np.float32(score), np.float32(math.inf)))
    return [
        {"size": 0, "query": each, "min_score": least, "track_total_hits": True}
        for each, least in ((query, greater), (first, score), (first, greater))
    ]


async def _ask(
    bodies: Sequence[dict[str, Any]], run: Run, *, doors: Doors, caller: Caller
) -> Sequence[dict[str, Any] | HalflifeError]:
    if not bodies:
        return []
    return await doors.cluster.msearch(
        [located(run, body) for body in bodies], timeout_s=run.remaining_s(), opaque_id=caller.request_id
    )


async def _relevance(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> float | None:
    vector = run.vectors.get(run.plan.search.query)
    if vector is None:
        return None
    body = measure_body(run.plan, vector, ids=[document_id])
    body["query"] = {"bool": {"must": [body["query"]]}}
    [answer] = await _ask([body], run, doors=doors, caller=caller)
    if isinstance(answer, HalflifeError) or not answer["hits"]["hits"]:
        return None
    score = (answer["hits"]["hits"][0].get("matched_queries") or {}).get(queries.RELEVANCE_NAME)
    if score is None:
        return None
    return min(1.0, max(0.0, queries.cosine_of(score, run.plan.collection.similarity)))


def _route(
    plan: Plan,
    route: PlannedRoute,
    candidate: Candidate | None,
    above: int | None,
    above_current: int | None,
    listed: RouteHit | None,
    source: Mapping[str, Any],
    excluded: Sequence[str],
) -> WhyRoute:
    if candidate is None:
        return WhyRoute(matches=False, note=_unmatched(route, excluded))
    rank = listed.rank if listed is not None else None if above is None else above + 1
    capped = route.needs_vector and above is not None and above + 1 >= queries.MAX_CANDIDATES
    decays = plan.placement == "route" and route.decay is not None
    return WhyRoute(
        matches=True,
        rank=rank,
        rank_relation="gte" if capped and listed is None else "eq",
        in_window=listed is not None,
        score=candidate.base,
        decay=candidate.factor if decays else None,
        decayed_score=candidate.score,
        contribution=0.0 if listed is None else listed.contribution,
        rank_if_current=above_current + 1 if decays and above_current is not None else None,
    )


def _unmatched(route: PlannedRoute, excluded: Sequence[str]) -> str:
    if excluded:
        return "a filter keeps it out"
    if route.needs_vector:
        return "it has no vector, lies below min_relevance, or the route's own filter or date window keeps it out"
    return "none of the query's words stands in it, or the route's own filter or date window keeps it out"


def _factor(plan: Plan, source: Mapping[str, Any]) -> float | None:
    resolved: ResolvedDecay | None = plan.base_decay
    if resolved is None:
        return None
    written = next((source[name] for name in decay.times_of(resolved.field) if source.get(name)), None)
    return decay.factor(
        resolved,
        origin_ms=plan.origin_ms,
        moment_ms=None if written is None else to_ms(parse_instant(written)),
        evergreen=bool(source.get(fields.EVERGREEN, False)),
    )


def _fused_score(plan: Plan, routes: Mapping[str, WhyRoute]) -> float | None:
    """Return the RRF sum over its real ranks, as if the window had no end; None for other fusions."""
    if plan.fusion.method != "rrf":
        return None
    weights = {route.name: route.weight for route in plan.routes}
    terms = [
        weights[name] / (plan.fusion.rank_constant + seen.rank)
        for name, seen in routes.items()
        if seen.matches and seen.rank is not None
    ]
    return math.fsum(terms) if terms else None


def _what_it_takes(
    plan: Plan,
    routes: Mapping[str, WhyRoute],
    page: Sequence[Placed],
    excluded: Sequence[str],
    factor: float | None,
    undecayed: float | None,
) -> list[str]:
    if excluded:
        return ["remove what excludes it: " + "; ".join(excluded)]
    if not any(seen.matches for seen in routes.values()):
        return ["no route matches it: name words that stand in it, or store it with a vector"]
    takes = []
    if len(page) < plan.search.top_k:
        takes.append("any route that lists it within the window would put it on the page, which is not full")
    for name, seen in routes.items():
        if seen.rank is not None and not seen.in_window:
            takes.append(_outside(name, seen.rank, plan.window))
        if seen.rank_if_current is not None and seen.rank is not None and seen.rank_if_current < seen.rank:
            takes.append(
                f"{name}: without decay of its own it would rank {seen.rank_if_current} instead of {seen.rank}; "
                "a longer half_life, a higher floor or `evergreen` lifts it"
            )
    if not page:
        return takes
    goal = page[-1].score
    if plan.placement == "fused" and factor is not None and factor < 1 and undecayed is not None:
        takes.append(
            f"its factor is {factor:.3g}: undecayed its fused score would be {undecayed:.4g}, the page's last hit has "
            f"{goal:.4g}; a longer half_life, a higher floor or `evergreen` lifts it"
        )
    elif plan.fusion.method == "rrf" and plan.placement != "fused":
        takes += _ranks_needed(plan, routes, goal)
    return takes or [f"a score above {goal:.4g}, which the page's last hit has"]


def _outside(name: str, rank: int, window: int) -> str:
    if rank <= window:
        return (
            f"{name}: with its decay it would rank {rank}, but decay reorders only the nearest {VECTOR_OVERSAMPLE} x "
            f"{window}, and it is not among them; add a fresh_vector route, or raise `fusion.window`"
        )
    return f"{name}: rank {rank} lies outside the window of {window}; raise `fusion.window`"


def _ranks_needed(plan: Plan, routes: Mapping[str, WhyRoute], goal: float) -> list[str]:
    """Return, per route, the rank that alone would lift its sum above the page's last score."""
    takes = []
    total = math.fsum(seen.contribution for seen in routes.values())
    for route in plan.routes:
        seen = routes[route.name]
        lacking = goal - (total - seen.contribution)
        if route.weight <= 0 or lacking <= 0:
            continue
        rank = math.ceil(route.weight / lacking - plan.fusion.rank_constant) - 1
        if rank >= 1:
            now = "unranked" if seen.rank is None else str(seen.rank)
            takes.append(f"{route.name}: rank {rank} or better would reach the page (now {now})")
    return takes
