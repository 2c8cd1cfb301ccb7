"""Why a document stands where it stands in a search, or is not in it at all.

Runs the search itself, its stages after fusion included, then asks each route about this one document: its score and
factor wherever it ranks, and how many documents stand above it. Stands above `search`, whose parts it calls; what the
figures mean is `advice`.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from app import advice, decay, fields, filters, queries
from app.answers import WhyChunk, WhyResult, WhyRoute
from app.asking import Search, Why
from app.collection import Collection
from app.errors import HalflifeError, Unavailable
from app.measuring import measure, near_enough
from app.planning import (
    Candidate,
    Plan,
    PlannedRoute,
    age_days,
    measure_body,
    moment_of,
    partial,
    read_route,
    route_body,
    route_query,
)
from app.ranking import ResolvedDecay
from app.recall import Run, ask_all, fatal
from app.search import (
    NO_RERANKER,
    Caller,
    Doors,
    budget_s,
    check_reranker,
    check_rewriter,
    fetch,
    fetch_compared,
    plan_of,
    recall_where_it_is,
    rewrite,
    with_votes,
)
from app.stages import Placed, adapted, after_fusion, fuse, needed, rated
from app.times import from_ms, parse_instant, to_ms

VECTOR_NAME: Final = "vector"
"""Name of the clause that tells whether a document has a vector."""


async def why(
    request: Why, *, collection: Collection, doors: Doors, caller: Caller, now_ms: int
) -> WhyResult:
    """Account for one document in one search, as of one point in time.

    The stages after fusion that the search asks for run as they would in it, the reranker included. A document that the
    caller may not see is reported as not existing.
    """
    search = Search.model_validate(request.model_dump(exclude={"id"}, exclude_unset=True, by_alias=True))
    plan = plan_of(search, collection=collection, caller=caller, now_ms=now_ms)
    check_reranker(search, doors)
    check_rewriter(search, doors)
    budget = budget_s(search, doors=doors, caller=caller)
    run = Run(plan=plan, offset=0, deadline=time.monotonic() + budget, pit=None, warnings=list(plan.warnings))
    await rewrite(run, doors=doors, caller=caller)
    run.plan = await with_votes(run.plan, doors=doors, caller=caller)
    pit = await recall_where_it_is([run], doors=doors, caller=caller)
    try:
        failure = fatal(run)
        if failure is not None:
            raise failure
        return await _account(request.id, run, doors=doors, caller=caller)
    finally:
        if pit is not None:
            doors.cluster.close_pit_soon(pit)


async def _account(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> WhyResult:
    plan = run.plan
    told = await measure([run], cluster=doors.cluster, request_id=caller.request_id)
    measured = told.get(id(run), {})
    if isinstance(measured, HalflifeError):
        raise measured
    fused, run.recency = adapted(plan, rated(plan, fuse(plan, run.answers, run.tails, measured)))
    found = await _source(document_id, run, doors=doors, caller=caller)
    if found is None:
        return _absent(document_id, run)
    source, has_vector = found
    standing = advice.Standing(document_id, fused, [item.score for item in fused], final=fused)
    if plan.search.rerank or plan.compares or plan.search.dedup or plan.search.mmr:
        await _run_stages(standing, run, doors=doors, caller=caller)
    seen = await _seen(document_id, run, doors=doors, caller=caller)
    excluded = excluded_by(plan, source)
    cosine = await _cosine(document_id, run, doors=doors, caller=caller)
    relevance = None if cosine is None else queries.relevance_of(cosine)
    excluded += _too_far(plan, cosine, has_vector=has_vector)
    place = standing.place(fused)
    item = None if place is None else fused[place - 1]
    routes: dict[str, WhyRoute] = {}
    # In no list: what adaptive fusion takes off for that.
    shares = fused[0].fused.shares if fused and item is None else {}
    added = {name: share.weight * share.absent for name, share in shares.items()}
    if item is not None:
        added = {name: part.contribution for name, part in item.routes.items()}
    for route in plan.routes:
        if route.name not in run.answers:
            status = run.statuses.get(route.name)
            routes[route.name] = WhyRoute(matches=False, note=None if status is None else status.reason)
            continue
        candidate, above, above_current = seen.get(route.name, (None, None, None))
        if candidate is None:
            note = advice.unmatched(plan, route, source, excluded=excluded, has_vector=has_vector)
            routes[route.name] = WhyRoute(matches=False, contribution=added.get(route.name, 0.0), note=note)
            continue
        listed = next((c for c in run.answers[route.name].candidates if c.id == document_id), None)
        contribution = added.get(route.name, 0.0)
        routes[route.name] = _route(plan, route, candidate, above, above_current, listed, contribution)
    created = source.get(fields.CREATION_TIME)
    page = standing.final[: plan.search.top_k]
    score = _fused_score(plan, routes) if place is None else standing.scores[place - 1]
    factor = _factor(plan, source) if item is None or not plan.auto_decay else item.factor
    undecayed = score if item is None else item.fused_score
    if place is None and plan.placement == "fused" and score is not None and factor is not None:
        score *= factor
    rank = standing.place(standing.final)
    on_page = rank is not None and rank <= plan.search.top_k
    stages = advice.stages(plan, standing)
    takes = []
    if not on_page:
        takes = advice.what_it_takes(
            plan, standing, routes=routes, stages=stages, excluded=excluded, has_vector=has_vector, factor=factor,
            undecayed=undecayed,
        )  # fmt: skip
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
        fused_rank=place,
        fused_score=score,
        stages=stages,
        chunks=None if plan.search.collapse else _chunks(standing),
        rank=rank,
        top_k=plan.search.top_k,
        profile=plan.ranked,
        page_score=page[-1].score if page else None,
        on_page=on_page,
        what_it_takes=takes,
        warnings=list(dict.fromkeys(run.warnings)),
    )


async def _run_stages(standing: advice.Standing, run: Run, *, doors: Doors, caller: Caller) -> None:
    """Run the stages after fusion as the search's first page does, and note what each of them made."""
    plan, fused = run.plan, list(standing.fused)
    wanted = needed(plan, fused, offset=0, decision=run.recency)
    found = (await fetch([(run, wanted)], doors=doors, caller=caller))[id(run)]
    if isinstance(found, HalflifeError):
        raise found
    same = (await fetch_compared([(run, fused)], doors=doors, caller=caller)).get(id(run), found)
    if isinstance(same, HalflifeError):
        raise same
    asked_for = {item.key for item in wanted}
    whole = [item for item in fused if item.key in found or item.key not in asked_for]
    trace: dict[str, list[Placed]] = {}
    final, failure = await after_fusion(
        plan,
        whole,
        found,
        reranker=doors.reranker,
        deadline_s=run.remaining_s(),
        decision=run.recency,
        same=same,
        trace=trace,
    )
    if failure is not None:
        run.degrade(f"not reranked, this is the fused order: {failure.detail}", failure)
    if plan.search.rerank is not None and doors.reranker is None:
        run.warnings.append(NO_RERANKER)
    standing.documents, standing.trace, standing.final = found, trace, final


def _chunks(standing: advice.Standing) -> list[WhyChunk]:
    final = {item.key: at for at, item in enumerate(standing.final, start=1)}
    return [
        WhyChunk(
            number=item.chunk or 0,
            fused_rank=at,
            rank=final.get(item.key),
            score=item.score,
            routes={name: part.rank for name, part in item.routes.items() if part.rank is not None},
        )
        for at, item in enumerate(standing.fused, start=1)
        if item.id == standing.id
    ]


def _absent(document_id: str, run: Run) -> WhyResult:
    return WhyResult(
        id=document_id, origin=from_ms(run.plan.origin_ms), exists=False,
        excluded_by=["no such document in this collection"], routes={}, top_k=run.plan.search.top_k, on_page=False,
        what_it_takes=["store the document"], profile=run.plan.ranked, warnings=run.warnings,
    )  # fmt: skip


async def _source(
    document_id: str, run: Run, *, doors: Doors, caller: Caller
) -> tuple[dict[str, Any], bool] | None:
    """Return the stored fields as of the search's point in time, and whether a chunk has a vector.

    Forced filters hold, the request's own do not.
    """
    # As the index that answers takes them, which may be another than the caller's were made for.
    forced = run.plan.routes[0].filters[: run.plan.forced]
    vector = {"nested": {"path": fields.CHUNKS, "query": {"exists": {"field": fields.EMBEDDING}}}}
    body = {
        "size": 1,
        "query": {
            "bool": {
                "filter": [{"ids": {"values": [document_id]}}, *forced],
                "should": [queries.named(vector, VECTOR_NAME)],
            }
        },
        "_source": {"excludes": [fields.CHUNKS, fields.TEXT]},
    }
    [answer] = await ask_all([(run, body)], cluster=doors.cluster, request_id=caller.request_id)
    if isinstance(answer, HalflifeError):
        raise answer
    hits = answer["hits"]["hits"]
    if not hits and (lacking := partial(answer)) is not None:
        raise Unavailable(f"whether the document exists can't be told: {lacking}", retry_after_s=1)
    if not hits:
        return None
    return hits[0]["_source"], VECTOR_NAME in (hits[0].get("matched_queries") or ())


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
    read = {
        route.name: read_route(plan, route, answer)
        for route, answer in zip(asked, answers, strict=True)
        if not isinstance(answer, HalflifeError)
    }
    read = dict(await near_enough(run, read, cluster=doors.cluster, request_id=caller.request_id))
    candidates: dict[str, Candidate | None] = {}
    for route in asked:
        found = read[route.name].candidates if route.name in read else ()
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
    answers = await ask_all(
        [(run, body) for body in bodies], cluster=doors.cluster, request_id=caller.request_id
    )
    for answer in answers:
        if not isinstance(answer, HalflifeError) and (lacking := partial(answer)) is not None:
            run.warnings.append(f"these figures are of a part of the collection: {lacking}")
    return answers


def _too_far(plan: Plan, cosine: float | None, *, has_vector: bool) -> list[str]:
    """Return how `min_relevance` keeps the document out, if it does: by the cluster's own comparison, on its own side of 0."""
    least = plan.search.min_relevance
    if least is None:
        return []
    if not has_vector:
        return ["min_relevance: it has no vector, so that no relevance is known"]
    if cosine is None or cosine >= least - queries.STORED_PRECISION:
        return []
    return [f"min_relevance: its cosine is {cosine:.4f}, {least:g} is the least"]


async def _cosine(document_id: str, run: Run, *, doors: Doors, caller: Caller) -> float | None:
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
    return queries.cosine_of(score, run.plan.collection.similarity)


def _route(
    plan: Plan,
    route: PlannedRoute,
    candidate: Candidate,
    above: int | None,
    above_current: int | None,
    listed: Candidate | None,
    contribution: float,
) -> WhyRoute:
    """Return how a route sees the document: `candidate` as asked about it alone, `listed` as it stands in its list."""
    inside = listed is not None and listed.rank <= plan.window
    rank = listed.rank if listed is not None else None if above is None else above + 1
    # Of chunks that are hits of their own only documents are counted beyond the list: at least so many stand above.
    rough = not plan.search.collapse or (
        route.needs_vector and above is not None and above + 1 >= queries.MAX_CANDIDATES
    )
    decays = plan.placement == "route" and route.decay is not None
    return WhyRoute(
        matches=True,
        rank=rank,
        rank_relation="gte" if rough and listed is None else "eq",
        in_window=inside,
        score=candidate.base,
        decay=candidate.factor if decays else None,
        decayed_score=candidate.score,
        contribution=contribution,
        rank_if_current=above_current + 1 if decays and above_current is not None else None,
        note="its weight is 0: it adds neither score nor hits" if route.weight == 0 else None,
    )


def _factor(plan: Plan, source: Mapping[str, Any]) -> float | None:
    resolved: ResolvedDecay | None = plan.base_decay
    if resolved is None:
        return None
    return decay.factor(
        resolved,
        origin_ms=plan.origin_ms,
        moment_ms=moment_of(resolved.field, source, origin_ms=plan.origin_ms),
        evergreen=bool(source.get(fields.EVERGREEN, False)),
    )


def _fused_score(plan: Plan, routes: Mapping[str, WhyRoute]) -> float | None:
    """Return the score of what no list holds: with RRF the sum over its real ranks, as if the window had no end.

    None for linear and additive fusion.
    """
    if plan.fusion.method == "adaptive":
        # Below the least of every window, as what is in no list.
        matched = any(seen.matches for seen in routes.values())
        return math.fsum(seen.contribution for seen in routes.values()) if matched else None
    if plan.fusion.method != "rrf":
        return None
    weights = {route.name: route.weight for route in plan.routes}
    terms = [
        weights[name] / (plan.fusion.rank_constant + seen.rank)
        for name, seen in routes.items()
        if seen.matches and seen.rank is not None and weights[name] > 0
    ]
    return math.fsum(terms) if terms else None
