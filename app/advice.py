"""What the figures of one document in one search mean: notes on its routes and stages, and what would lift it.

Sentences out of a plan, its lists and the document's stored fields. Asks nobody and decides nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from app import diversity, filters, queries
from app.answers import WhyRoute, WhyStage
from app.fusion import Share
from app.planning import VECTOR_OVERSAMPLE, Plan, PlannedRoute, window_fields
from app.ranking import Dedup, Mmr, Rerank
from app.stages import Placed, passage_of, to_array
from app.times import format_duration, format_instant, from_ms, parse_instant, to_ms

Documents = Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Standing:
    """Where the document is in the list that was fused, and in what each stage made of that."""

    id: str
    fused: Sequence[Placed]
    scores: Sequence[float]
    """The fused scores, in the order of `fused`: a reranker writes its own over them."""
    trace: Mapping[str, Sequence[Placed]] = field(default_factory=dict)
    documents: Documents = field(default_factory=dict)
    final: Sequence[Placed] = ()

    def place(self, order: Sequence[Placed]) -> int | None:
        """Return the document's place in a list, from 1; its best chunk's where hits are chunks."""
        return next((at for at, item in enumerate(order, start=1) if item.id == self.id), None)


# --- routes ----------------------------------------------------------------------------------------------------------


def unmatched(
    plan: Plan, route: PlannedRoute, source: Mapping[str, Any], *, excluded: Sequence[str], has_vector: bool
) -> str:
    """Return why the route does not find the document at all."""
    if excluded:
        return "it is excluded from every route: see `excluded_by`"
    own = route.asked.filter or {}
    mismatches = filters.explain_mismatch(source, own, declared=plan.collection.declared) if own else []
    if mismatches:
        return "the route's own filter keeps it out: " + "; ".join(mismatches)
    if route.kind.startswith("fresh_") and (outside := _outside_dates(plan, route, source)) is not None:
        return outside
    if route.needs_vector:
        if not has_vector:
            return (
                "it has no vector: store it again without `embedding`, or with one, for this route to find it"
            )
        return "it is not near enough"
    if plan.search.min_relevance is not None and not plan.search.collapse:
        return "none of its chunks that `min_relevance` lets through holds a word of the query"
    return "none of the query's words stands in it"


def _outside_dates(plan: Plan, route: PlannedRoute, source: Mapping[str, Any]) -> str | None:
    """Return why the document's date lies outside the window of a fresh route, if it does."""
    dates = window_fields(route.asked, None if plan.base_decay is None else plan.base_decay.field)
    name = next((each for each in dates[:-1] if _is_by(source.get(each), plan.origin_ms)), dates[-1])
    window_ms = queries.DEFAULT_FRESH_MS if route.asked.window is None else route.asked.window
    written = source.get(name)
    if written is None:
        return f"it has no `{name}`, and the date window of this route takes dated documents only"
    at = to_ms(parse_instant(written))
    if at > plan.origin_ms:
        return f"its `{name}` is {written}, after the origin, where the date window of this route ends"
    if at < plan.origin_ms - window_ms:
        return (
            f"its `{name}` is {written}, before the date window of {format_duration(window_ms)} (from "
            f"{format_instant(from_ms(plan.origin_ms - window_ms))}): a longer `window` would take it in"
        )
    return None


def _is_by(written: str | None, origin_ms: int) -> bool:
    return written is not None and to_ms(parse_instant(written)) <= origin_ms


# --- stages ----------------------------------------------------------------------------------------------------------


def stages(plan: Plan, standing: Standing) -> dict[Any, WhyStage]:
    """Return what each stage that was asked for did with the document, in the order in which they ran."""
    told: dict[Any, WhyStage] = {}
    before: Sequence[Placed] = standing.fused
    search = plan.search
    for name, options in (
        ("rerank", search.rerank),
        ("recency", standing.trace.get("recency")),
        ("dedup", search.dedup),
        ("mmr", search.mmr),
    ):
        if options is None:
            continue
        after = standing.trace.get(name)
        place = standing.place(before)
        if after is None:
            told[name] = WhyStage(before=place, after=place, note="it did not run: see `warnings`")
            continue
        now = standing.place(after)
        if place is None:
            told[name] = WhyStage(before=None, after=None, note="it never came to this stage")
        elif name == "rerank":
            told[name] = _reranked(cast(Rerank, options), before[place - 1], place, now)
        elif name == "recency":
            told[name] = _by_recency(before[place - 1], place, now)
        elif name == "dedup":
            told[name] = _deduplicated(plan, cast(Dedup, options), standing, before, after)
        else:
            told[name] = _chosen(plan, cast(Mmr, options), standing, after, place, now)
        before = after
    return told


def _reranked(rerank: Rerank, item: Placed, before: int, after: int | None) -> WhyStage:
    score = item.rerank_score
    if before > rerank.candidates:
        note = (
            f"dropped: the reranker reads the {rerank.candidates} best fused hits, and it is number {before}"
        )
    elif score is None:
        note = "the reranker gave it no score, so it stands behind those that have one"
        note = note if after is not None else "dropped: the reranker gave it no score"
    elif after is not None:
        moved = f"it moved from {before} to {after}" if after != before else f"it stays at {before}"
        note = f"the reranker gave {score:.3g}: {moved}"
        if rerank.decay and item.factor is not None and item.factor < 1:
            note += f", its decay factor of {item.factor:.3g} included"
    elif rerank.min_score is not None and score < rerank.min_score:
        note = f"dropped: the reranker gave {score:.3g}, and `min_score` is {rerank.min_score:g}"
    else:
        note = (
            f"dropped: the reranker gave {score:.3g}, which is not among its best `top_n` of {rerank.top_n}"
        )
    return WhyStage(before=before, after=after, score=score, note=note)


def _by_recency(item: Placed, before: int, after: int | None) -> WhyStage:
    note = item.recency or "no other of the best candidates says the same thing"
    if after is None:
        note = f"folded into '{item.superseded_by}', which supersedes it"
    return WhyStage(before=before, after=after, note=note)


def _deduplicated(
    plan: Plan, dedup: Dedup, standing: Standing, before: Sequence[Placed], after: Sequence[Placed]
) -> WhyStage:
    place, now = standing.place(before), standing.place(after)
    assert place is not None
    item = before[place - 1]
    if now is None:
        twin = next((each for each in after if standing.id in (each.near_duplicates or ())), None)
        if twin is None:
            return WhyStage(before=place, after=None, note="dropped as a near duplicate")
        note = (
            f"dropped as a near duplicate of '{twin.id}' ({_likeness(plan, standing, item, twin)}; threshold "
            f"{dedup.threshold:g}, the {dedup.keep} of two is kept)"
        )
        return WhyStage(before=place, after=None, note=note)
    gone = item.near_duplicates or []
    note = "kept: nothing kept above it is as alike"
    if gone:
        shown = ", ".join(f"'{each}'" for each in gone[:3]) + (" and more" if len(gone) > 3 else "")
        note = f"kept, and {len(gone)} near duplicates of it dropped: {shown}"
    return WhyStage(before=place, after=now, note=note)


def _likeness(plan: Plan, standing: Standing, one: Placed, other: Placed) -> str:
    told = [passage_of(each, standing.documents[each.key], plan) for each in (one, other)]
    cosine = diversity.cosine(*(to_array(each["embedding"]) for each in told))
    if told[0]["text"] is not None and told[0]["text"] == told[1]["text"]:
        return "the same text"
    return f"cosine {cosine:.3g}"


def _chosen(
    plan: Plan, mmr: Mmr, standing: Standing, after: Sequence[Placed], before: int, now: int | None
) -> WhyStage:
    if before > mmr.candidates or now is None:
        note = (
            f"mmr chooses among the {mmr.candidates} best hits, and it is number {before}: it keeps its place"
        )
        return WhyStage(before=before, after=now, note=note)
    item = after[now - 1]
    if any(each.key not in standing.documents for each in after[:now]):
        return WhyStage(before=before, after=now, note="mmr could not read all documents up to its place")
    moved = f"mmr moved it from {before} to {now}" if now != before else f"mmr leaves it at {now}"
    above = after[: now - 1]
    if not above:
        return WhyStage(before=before, after=now, note=f"{moved}: it is the most relevant")
    held = standing.documents
    vector = to_array(passage_of(item, held[item.key], plan)["embedding"])
    cosines = [
        diversity.cosine(vector, to_array(passage_of(each, held[each.key], plan)["embedding"]))
        for each in above
    ]
    nearest = int(np.argmax(cosines))
    note = f"{moved}: of those chosen before it '{above[nearest].id}' is most like it (cosine {cosines[nearest]:.3g})"
    return WhyStage(before=before, after=now, note=note)


# --- what it takes -----------------------------------------------------------------------------------------------------


def what_it_takes(
    plan: Plan,
    standing: Standing,
    *,
    routes: Mapping[str, WhyRoute],
    stages: Mapping[Any, WhyStage],
    excluded: Sequence[str],
    has_vector: bool,
    factor: float | None,
    undecayed: float | None,
) -> list[str]:
    """Return what would bring a document onto the first page that is not on it."""
    if excluded:
        return ["remove what excludes it: " + "; ".join(excluded)]
    if not any(seen.matches for seen in routes.values()):
        return _unfound(plan, routes, has_vector=has_vector)
    reach, among = _to_reach(plan)
    place = standing.place(standing.fused)
    after_fusion = _stage_advice(plan, standing, stages)
    if after_fusion and place is not None and place <= among:
        return after_fusion
    return after_fusion + _fused_advice(
        plan, standing, routes, reach=reach, among=among, factor=factor, undecayed=undecayed
    )


def _to_reach(plan: Plan) -> tuple[str, int]:
    """Return what a good fused rank is good for, and how many get there."""
    if plan.search.rerank is not None:
        return "come before the reranker", plan.search.rerank.candidates
    return "reach the page", plan.search.top_k


def _unfound(plan: Plan, routes: Mapping[str, WhyRoute], *, has_vector: bool) -> list[str]:
    takes = [
        f"{route.name}: {note}"
        for route in plan.routes
        if (note := routes[route.name].note) and ("date window" in note or "own filter" in note)
    ]
    if not has_vector:
        takes.append("no route matches it: name words that stand in it, or store it with a vector")
    elif not any(route.needs_vector for route in plan.routes):
        takes.append("no route matches it: name words that stand in it, or add a vector route")
    elif not takes:
        takes.append("no route matches it: name words that stand in it")
    return takes


def _stage_advice(plan: Plan, standing: Standing, told: Mapping[Any, WhyStage]) -> list[str]:
    search, takes = plan.search, []
    page = standing.final[: search.top_k]
    rerank, dedup, mmr = told.get("rerank"), told.get("dedup"), told.get("mmr")
    recency = told.get("recency")
    if rerank is not None and rerank.before is not None and search.rerank is not None:
        if rerank.after is None:
            wanted = (
                f"`rerank.candidates` of at least {rerank.before}"
                if rerank.before > search.rerank.candidates
                else "a lower `rerank.min_score`"
                if "min_score" in rerank.note
                else "a larger `rerank.top_n`"
            )
            takes.append(f"{rerank.note}; {wanted} would let it through")
        elif rerank.after > search.top_k and rerank.score is None:
            takes.append(rerank.note)
        elif rerank.after > search.top_k and page:
            takes.append(
                f"{rerank.note}; the page's last hit has a score of {page[-1].score:.3g}. Reranking fewer than "
                f"{rerank.before} `candidates`, or a text that answers the query more plainly, would change that"
            )
    if recency is not None and recency.before is not None:
        if recency.after is None:
            takes.append(f"{recency.note}; drop `fold_superseded` to have it as a hit of its own")
        elif recency.before <= search.top_k < recency.after:
            takes.append(
                f"{recency.note}; with `decay`: 'off', or if it were `evergreen`, it would keep place {recency.before}"
            )
    if dedup is not None and dedup.before is not None and dedup.after is None:
        takes.append(
            f"{dedup.note}; a higher `dedup.threshold`, another `dedup.keep`, or one text less would let it through"
        )
    if mmr is not None and mmr.before is not None and mmr.before <= search.top_k < (mmr.after or 0):
        takes.append(f"{mmr.note}; a higher `mmr.lambda` counts likeness less")
    return takes


def _fused_advice(
    plan: Plan,
    standing: Standing,
    routes: Mapping[str, WhyRoute],
    *,
    reach: str,
    among: int,
    factor: float | None,
    undecayed: float | None,
) -> list[str]:
    takes = []
    weights = {route.name: route.weight for route in plan.routes}
    if len(standing.fused) < among and any(
        weights[name] > 0 for name, seen in routes.items() if seen.matches
    ):
        takes.append("any route that lists it within the window would put it on the page, which is not full")
    for route in plan.routes:
        seen = routes[route.name]
        if seen.rank is None:
            continue
        if route.weight == 0:
            takes.append(
                f"{route.name}: its rank {seen.rank} adds nothing, since the route's weight is 0; give it a weight"
            )
            continue
        if not seen.in_window:
            takes.append(_outside(plan, route, seen.rank))
        if seen.rank_if_current is not None and seen.rank_if_current < seen.rank:
            takes.append(
                f"{route.name}: without decay of its own it would rank {seen.rank_if_current} instead of {seen.rank}; "
                "a longer half_life, a higher floor or `evergreen` lifts it"
            )
    if not standing.fused:
        return takes
    goal = standing.scores[min(among, len(standing.scores)) - 1]
    if plan.placement == "fused" and factor is not None and factor < 1 and undecayed is not None:
        takes.append(
            f"its factor is {factor:.3g}: undecayed its fused score would be {undecayed:.4g}, the page's last hit has "
            f"{goal:.4g}; a longer half_life, a higher floor or `evergreen` lifts it"
        )
    elif plan.fusion.method == "rrf" and plan.placement != "fused":
        takes += _ranks_needed(plan, routes, goal, reach=reach)
    elif plan.fusion.method == "adaptive" and plan.placement != "fused":
        takes += _scores_needed(plan, routes, standing.fused[0].fused.shares, goal, reach=reach)
    return takes or [f"a score above {goal:.4g}, which the page's last hit has"]


def _outside(plan: Plan, route: PlannedRoute, rank: int) -> str:
    if rank > plan.window:
        return f"{route.name}: rank {rank} lies outside the window of {plan.window}; raise `fusion.window`"
    known = f"{route.name}: with its decay it would rank {rank}, but decay reorders only the nearest"
    if route.kind.startswith("fresh_"):
        return f"{known} of its date window; narrow its `window`, or raise `fusion.window`"
    return (
        f"{known} {VECTOR_OVERSAMPLE} x {plan.window}, and it is not among them; add a fresh_vector route, or raise "
        "`fusion.window`"
    )


def _ranks_needed(plan: Plan, routes: Mapping[str, WhyRoute], goal: float, *, reach: str) -> list[str]:
    """Return, per route, the rank that alone would lift its sum above the last score that is enough."""
    takes = []
    total = math.fsum(seen.contribution for seen in routes.values())
    for route in plan.routes:
        seen = routes[route.name]
        lacking = goal - (total - seen.contribution)
        if route.weight <= 0 or lacking <= 0 or not seen.matches:
            continue
        rank = math.ceil(route.weight / lacking - plan.fusion.rank_constant) - 1
        if rank >= 1:
            takes.append(f"{route.name}: rank {rank} or better would {reach} (now {seen.rank or 'unranked'})")
    return takes


def _scores_needed(
    plan: Plan, routes: Mapping[str, WhyRoute], shares: Mapping[str, Share], goal: float, *, reach: str
) -> list[str]:
    """Return, per route, the normalised score that alone would lift its sum above the last score that is enough."""
    takes = []
    total = math.fsum(seen.contribution for seen in routes.values())
    for route in plan.routes:
        seen, share = routes[route.name], shares.get(route.name)
        lacking = goal - (total - seen.contribution)
        if share is None or share.weight <= 0 or lacking <= 0 or not seen.matches:
            continue
        takes.append(
            f"{route.name}: {lacking / share.weight:.2f} standard deviations above the least of its window would {reach} "
            f"(now {seen.contribution / share.weight:.2f}); its weight here is {share.weight:.2f}, by its confidence of "
            f"{share.confidence:.2f}"
        )
    return takes
