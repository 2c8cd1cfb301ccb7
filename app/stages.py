"""The stages after recall: fusion, then reranking, near-duplicate removal and MMR, each if asked for.

Works on a plan and what recall brought; of the outside it calls the reranker alone. Deterministic: ties are broken
by content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from app import decay, diversity, fields, fusion, observing, queries, recency, supersession
from app.answers import HitFeedback, RouteHit, RouteStatus
from app.encoding import unpack_vector
from app.errors import RerankerFailed
from app.intent import read_intent
from app.planning import Candidate, Plan, PlannedRoute, RouteAnswer
from app.ranking import Fusion
from app.recency import Recency
from app.reranking import Reranker, to_probability
from app.supersession import Said

Measured = Mapping[str, tuple[float, float, float]]
"""Candidate key -> (relevance, salience, recency); what is not in it could not be measured."""


@dataclass(slots=True)
class Placed:
    """A candidate in the fused order, with what its hit will say."""

    key: str
    id: str
    chunk: int | None
    score: float
    fused_score: float
    created_ms: int | None
    evergreen: bool
    fused: fusion.Fused
    held: Mapping[str, Candidate]
    """Route -> the candidate in its list."""
    plan: Plan
    tail: bool = False
    """Held only by the lists of a page longer than the window: no stage may let it change the head."""
    aged_ms: int | None = None
    """The date by which the request's decay ages it."""
    auto_factor: float | None = None
    """What decay 'auto' multiplied above the least of the head."""
    rerank_score: float | None = None
    near_duplicates: list[str] | None = None
    additive: dict[str, float] | None = None
    feedback: HitFeedback | None = None
    superseded_by: str | None = None
    supersedes: list[str] | None = None
    recency: str | None = None
    """What decay 'auto' did with it."""

    @property
    def factor(self) -> float | None:
        """The factor of the decay. Like `routes` made when asked for: of a window of hundreds only a page is shown."""
        return _factor(self.plan, self.held) if self.auto_factor is None else self.auto_factor

    @property
    def routes(self) -> dict[str, RouteHit]:
        """What each route gave it."""
        told = self.fused
        decays = self.plan.placement == "route"
        contributions = told.contributions if self.additive is None else {}
        routes = {
            name: RouteHit(
                rank=told.ranks.get(name, part.rank),
                score=part.base,
                decay=part.factor if decays else None,
                decayed_score=part.score,
                contribution=contributions.get(name, 0.0),
                normalized=told.normalized.get(name),
            )
            for name, part in self.held.items()
        }
        counted = "one standard deviation below the least" if told.shares else "the least"
        for name, normalized in told.normalized.items():
            if name not in routes:
                routes[name] = RouteHit(
                    rank=None, score=None, decay=None, decayed_score=None,
                    contribution=told.contributions.get(name, 0.0), normalized=normalized,
                    note=f"not in its list: counted as {counted} in the window",
                )  # fmt: skip
        return routes


def with_share(status: RouteStatus, order: Sequence[Placed], name: str) -> RouteStatus:
    """Return the status with what adaptive fusion made of the route, where it had a say."""
    share = order[0].fused.shares.get(name) if order else None
    if share is None:
        return status
    return status.model_copy(update={"confidence": share.confidence, "weight": share.weight})


def rated(plan: Plan, order: list[Placed]) -> list[Placed]:
    """Return the fused order with each score multiplied by what votes say of the document, where they shall count.

    Scores may be below 0 (z-scores): the least of the head is taken as zero then, as for a decay placed after fusion.
    The tail keeps its order, below the head.
    """
    if plan.feedback is None or plan.ratings is None:
        return order
    head = [item for item in order if not item.tail]
    zero = min([0.0, *(item.score for item in head)])
    for item in head:
        rating = plan.ratings.by_document.get(item.id)
        if rating is not None:
            item.feedback = rating.told(plan.feedback.strength)
            item.score = zero + (item.score - zero) * item.feedback.factor
    head.sort(key=lambda item: -item.score)  # stable: ties keep the fused order
    tail = [item for item in order if item.tail]
    for item in tail:
        item.score = min(item.score, head[-1].score) if head else item.score
    return head + tail


def adapted(plan: Plan, order: list[Placed]) -> tuple[list[Placed], Recency | None]:
    """Return the order with what decay 'auto' makes of it by dates alone, and the decision; both depend on the head only.

    What a score is above the head's least is multiplied by the factor, so that one floor fits every fusion.
    """
    if not plan.auto_decay:
        return order, None
    head = [item for item in order if not item.tail]
    # Of each document once, however many of its chunks are hits.
    created_ms = {item.id: item.created_ms for item in head}
    decision = recency.decide(
        read_intent(plan.search.query, origin_ms=plan.origin_ms),
        origin_ms=plan.origin_ms,
        created_ms=list(created_ms.values()),
        compares=plan.compares,
    )
    by = recency.decay_of(decision)
    if by is None and decision.mode != "around":
        return order, decision
    least = min((item.score for item in head), default=0.0)
    for item in head:
        item.auto_factor = (
            recency.nearness(decision, item.created_ms, evergreen=item.evergreen)
            if by is None
            else decay.factor(
                by, origin_ms=plan.origin_ms, moment_ms=item.created_ms, evergreen=item.evergreen
            )
        )
        item.recency = f"{decision.told()}: factor {item.auto_factor:.3g}"
        item.score = least + (item.score - least) * item.auto_factor
    head.sort(key=lambda item: -item.score)  # stable: ties keep the fused order
    return [*head, *(item for item in order if item.tail)], decision


def fuse(
    plan: Plan,
    answers: Mapping[str, RouteAnswer],
    tails: Mapping[int, Mapping[str, RouteAnswer]],
    measured: Measured,
) -> list[Placed]:
    """Return the whole fused order: the head from the windows alone, then the tails that a long page asked for."""
    order = _fused(plan, answers, measured, window=plan.window)
    taken = {placed.key for placed in order}
    for size in plan.tails:
        last = order[-1].score if order else None
        for placed in _fused(plan, tails.get(size, {}), measured, window=size):
            if placed.key in taken:
                continue
            taken.add(placed.key)
            placed.tail = True
            # The head never depends on top_k, so what only the longer lists hold stays below all of it.
            if last is not None:
                placed.score = min(placed.score, last)
            order.append(placed)
    return order


def _fused(
    plan: Plan, answers: Mapping[str, RouteAnswer], measured: Measured, *, window: int
) -> list[Placed]:
    candidates: dict[str, dict[str, Candidate]] = {}
    lists = []
    for route in plan.routes:
        answer = answers.get(route.name)
        if answer is None:
            continue
        for candidate in answer.candidates:
            candidates.setdefault(candidate.key, {})[route.name] = candidate
        lists.append(_ranked(plan, route, answer))
    additive = plan.fusion.method == "additive"
    method = Fusion(method="rrf") if additive else plan.fusion
    fused = fusion.fuse(lists, fusion=method, window=window)
    terms: dict[str, dict[str, float]] = {}
    if additive:
        fused = [item for item in fused if item.key in measured]
        weights = {str(name): weight for name, weight in (plan.fusion.weights or {}).items()}
        sums = {item.key: fusion.additive(*measured[item.key], weights) for item in fused}
        terms = {key: value.terms for key, value in sums.items()}
        fused = fusion.rescore(fused, {key: value.score for key, value in sums.items()})
    elif plan.placement == "fused":
        factors = {item.key: _factor(plan, candidates[item.key]) for item in fused}
        fused = fusion.apply_factor(fused, {key: 1.0 if f is None else f for key, f in factors.items()})
    return [_place(plan, item, candidates[item.key], terms.get(item.key)) for item in fused]


def _ranked(plan: Plan, route: PlannedRoute, answer: RouteAnswer) -> fusion.RankedRoute:
    restricted = route.kind.startswith("fresh_") or bool(route.asked.filter)
    if not route.needs_vector:
        hits = [fusion.RankedHit(c.key, c.score, c.created_ms, c.base) for c in answer.candidates]
        return fusion.RankedRoute(route.name, route.weight, hits, "words", restricted)
    similarity = plan.collection.similarity
    hits = [
        fusion.RankedHit(c.key, c.score, c.created_ms, queries.cosine_of(c.base, similarity))
        for c in answer.candidates
    ]
    return fusion.RankedRoute(route.name, route.weight, hits, "cosine", restricted)


def _factor(plan: Plan, held: Mapping[str, Candidate]) -> float | None:
    """Return the factor of the request's decay: the cluster's own where it was told, else by the closed formula."""
    if plan.base_decay is None:
        return None
    candidate = next(iter(held.values()))
    if plan.placement == "fused" and candidate.factor is not None:
        return candidate.factor
    return decay.factor(
        plan.base_decay, origin_ms=plan.origin_ms, moment_ms=candidate.aged_ms, evergreen=candidate.evergreen
    )


def _place(
    plan: Plan,
    item: fusion.Fused,
    held: Mapping[str, Candidate],
    terms: dict[str, float] | None,
) -> Placed:
    candidate = next(iter(held.values()))
    return Placed(
        key=item.key, id=candidate.id, chunk=candidate.chunk, score=item.score,
        fused_score=item.score if terms is not None else item.fused_score,
        created_ms=candidate.created_ms, evergreen=candidate.evergreen, fused=item, held=held, plan=plan,
        aged_ms=candidate.aged_ms, additive=terms,
    )  # fmt: skip


def needed(
    plan: Plan, order: Sequence[Placed], *, offset: int, decision: Recency | None = None
) -> list[Placed]:
    """Return the hits whose documents this page and the stages before it read.

    The stages' pool depends on the request alone, never on the page, so that pages fit together.
    """
    search = plan.search
    pool = 0
    if search.rerank is not None:
        pool = search.rerank.candidates
    if search.mmr is not None:
        pool = max(pool, search.mmr.candidates)
    if search.dedup is not None:
        pool = max(pool, _dedup_pool(plan))
    same = 0 if decision is None else decision.compared
    if pool == 0 and not search.fold_superseded:
        # Supersession permutes the first few among themselves: the pages behind them need only their own.
        end = offset + search.top_k
        return list(order[offset:end] if offset >= same else order[: max(same, end)])
    if only_vectors(plan):
        # MMR only changes the order within its pool; what says the same thing is put in order before it, among more hits
        # than that, and what is folded then lets others into it from below.
        return list(order[: pool + same if search.fold_superseded else max(pool, same)])
    pool = max(pool, same)
    # Duplicates and reordering move hits onto the page from below it.
    return list(order[: max(2 * pool, offset + search.top_k + pool)])


def compared(plan: Plan, order: Sequence[Placed], *, decision: Recency | None) -> list[Placed]:
    """Return the hits whose names and words are compared, where the stages' pool brings vectors alone; else none."""
    if decision is None or not decision.compared or not has_pool(plan):
        return []
    rerank = plan.search.rerank
    return list(order[: max(decision.compared, 0 if rerank is None else rerank.candidates)])


def _dedup_pool(plan: Plan) -> int:
    return min(2 * plan.window, MOST_COMPARED)


def pool_of(
    order: list[Placed], size: int, documents: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Placed], list[Placed]]:
    """Return the hits that a stage works on, and the rest, which begins with the tail or a hit whose document is not there.

    Where many documents are gone, those of a failed shard, others move up from beyond what was fetched.
    """
    cut = next((at for at, item in enumerate(order[:size]) if item.tail or item.key not in documents), size)
    return order[:cut], order[cut:]


MOST_COMPARED = 1000
"""Hits whose vectors are compared with each other: a million cosines, and a few megabytes from the cluster."""


def needs_embeddings(plan: Plan) -> bool:
    """Tell whether a stage compares stored vectors."""
    return plan.search.dedup is not None or plan.search.mmr is not None


def has_pool(plan: Plan) -> bool:
    """Tell whether the stages compare vectors of many documents, of which only a page will be shown.

    Where hits are chunks their texts and vectors come with the documents in any case.
    """
    return needs_embeddings(plan) and plan.search.collapse


def only_vectors(plan: Plan) -> bool:
    """Tell whether the stages read nothing of a document but its vector, so that one without a vector has no part."""
    return has_pool(plan) and plan.search.rerank is None and plan.search.dedup is None


def passage_of(item: Placed, hit: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the hit's chunk: number, text, start, end, relevance, embedding; the nearest or best worded one."""
    inner = hit.get("inner_hits", {})
    for name in ("nearest", "worded"):
        for chunk in inner.get(name, {}).get("hits", {}).get("hits", []):
            number = chunk["_nested"]["offset"]
            if item.chunk is not None and (name != "nearest" or number != item.chunk):
                continue
            source = chunk.get("_source", {})
            held = source.get("chunks", source)
            relevance = None
            if name == "nearest":
                cosine = queries.cosine_of(float(chunk["_score"]), plan.collection.similarity)
                relevance = queries.relevance_of(cosine)
            return {
                "number": number,
                "text": held.get("text"),
                "start": held.get("start"),
                "end": held.get("end"),
                "embedding": _vector_of(chunk, held),
                "relevance": relevance,
            }
    chunks = hit.get("_source", {}).get(fields.CHUNKS, [])
    held = chunks[item.chunk] if item.chunk is not None and item.chunk < len(chunks) else {}
    told = {name: held.get(name) for name in ("text", "start", "end", "embedding")}
    return {"number": item.chunk, **told, "relevance": None}


def _vector_of(chunk: Mapping[str, Any], held: Mapping[str, Any]) -> Any:
    packed = chunk.get("fields", {}).get(fields.EMBEDDING)
    return unpack_vector(packed[0]) if packed else held.get("embedding")


@observing.staged("after fusion")
async def after_fusion(
    plan: Plan,
    order: list[Placed],
    documents: Mapping[str, Mapping[str, Any]],
    *,
    reranker: Reranker | None,
    deadline_s: float,
    decision: Recency | None = None,
    same: Mapping[str, Mapping[str, Any]] | None = None,
    trace: dict[str, list[Placed]] | None = None,
) -> tuple[list[Placed], RerankerFailed | None]:
    """Return the order after reranking, supersession, near-duplicate removal and MMR, and the reranker's failure if any.

    `documents` holds what `needed` named; hits of it that are gone are dropped. `same` holds what `compared` named, where
    it named any. `trace` is given the order after each
    stage that ran, by the stage's name.
    """
    trace = {} if trace is None else trace
    search = plan.search
    failure = None
    if search.rerank is not None and reranker is not None and order:
        try:
            order = await _rerank(plan, order, documents, reranker=reranker, deadline_s=deadline_s)
            trace["rerank"] = order
        except RerankerFailed as error:
            failure = error
    if decision is not None and decision.compared:
        order = trace["recency"] = _newest_first(plan, order, documents if same is None else same, decision)
    if search.dedup is not None:
        order = trace["dedup"] = _without_duplicates(plan, order, documents)
    if search.mmr is not None:
        order = trace["mmr"] = _diversified(plan, order, documents)
    return order, failure


def _newest_first(
    plan: Plan, order: list[Placed], documents: Mapping[str, Mapping[str, Any]], decision: Recency
) -> list[Placed]:
    """Return the order with the best candidates that say the same thing newest first, in the places they held together.

    A hit takes the score of its place. With `fold_superseded` the older ones go.
    """
    pool, rest = pool_of(order, decision.compared, documents)  # empty for a page behind them
    if not pool:
        return order
    said = []
    for item in pool:
        hit = documents[item.key]
        title = hit.get("_source", {}).get(fields.TITLE) or ""
        text = passage_of(item, hit, plan)["text"] or ""
        said.append(Said(item.created_ms, title, text, queries.held(hit), evergreen=item.evergreen))
    placed = list(pool)
    for group in supersession.groups(plan.search.query, said, current=decision.current):
        scores = [pool[at].score for at in group.members]
        ranked = supersession.newest_first(group.members, said, not_after_ms=decision.not_after_ms)
        first = pool[ranked[0]]
        older = [at for at in ranked if (pool[at].created_ms or 0) < (first.created_ms or 0)]
        first.supersedes = [pool[at].id for at in older] or None
        for place, at, score in zip(group.members, ranked, scores, strict=True):
            item = placed[place] = pool[at]
            item.score = score
            item.superseded_by = first.id if at in older else None
            moved = f"from {at + 1} to {place + 1}" if at != place else f"at {place + 1}"
            told = f"one of {len(ranked)} that say the same thing ({group.why}), newest first: {moved}"
            item.recency = f"{item.recency or decision.told()}; {told}"
    if plan.search.fold_superseded:
        placed = [item for item in placed if item.superseded_by is None]
    return [*placed, *rest]


def _without_duplicates(
    plan: Plan, order: list[Placed], documents: Mapping[str, Mapping[str, Any]]
) -> list[Placed]:
    dedup = plan.search.dedup
    assert dedup is not None
    pool, rest = pool_of(order, _dedup_pool(plan), documents)
    kept = _distinct(plan, pool, documents, dedup.threshold, dedup.keep)
    # Further down only the lower of two goes, so that nothing there changes the head.
    if not rest:
        return kept
    known = next((at for at, item in enumerate(rest) if item.key not in documents), len(rest))
    return [*_distinct(plan, [*kept, *rest[:known]], documents, dedup.threshold, "higher"), *rest[known:]]


def _distinct(
    plan: Plan,
    items: list[Placed],
    documents: Mapping[str, Mapping[str, Any]],
    threshold: float,
    keep: Literal["higher", "newer"],
) -> list[Placed]:
    passages = [passage_of(item, documents[item.key], plan) for item in items]
    kept, dropped = diversity.drop_near_duplicates(
        [item.key for item in items],
        [to_array(passage["embedding"]) for passage in passages],
        threshold=threshold,
        keep=keep,
        created_ms=[item.created_ms for item in items],
        texts=[passage["text"] for passage in passages],
    )
    by_key = {item.key: item for item in items}
    for key, gone in dropped.items():
        held = by_key[key].near_duplicates or []
        by_key[key].near_duplicates = [*held, *(by_key[other].id for other in gone)]
    return [by_key[key] for key in kept]


def _diversified(plan: Plan, order: list[Placed], documents: Mapping[str, Mapping[str, Any]]) -> list[Placed]:
    mmr = plan.search.mmr
    assert mmr is not None
    pool, rest = pool_of(order, mmr.candidates, documents)
    passages = [passage_of(item, documents[item.key], plan) for item in pool]
    if all(passage["relevance"] is None for passage in passages):
        # Without relevance to trade against, MMR would put the least alike first.
        return order
    relevance = [
        (passage["relevance"] or 0.0) * (1.0 if item.factor is None else item.factor)
        for passage, item in zip(passages, pool, strict=True)
    ]
    vectors = [to_array(passage["embedding"]) for passage in passages]
    chosen = diversity.mmr(relevance, vectors, lambda_=mmr.lambda_, k=len(pool))
    return [*(pool[position] for position in chosen), *rest]


def to_array(vector: Sequence[float] | np.ndarray | None) -> np.ndarray | None:
    return None if vector is None else np.asarray(vector, dtype=np.float32)


async def _rerank(
    plan: Plan,
    order: list[Placed],
    documents: Mapping[str, Mapping[str, Any]],
    *,
    reranker: Reranker,
    deadline_s: float,
) -> list[Placed]:
    """Return the reranked head: scores as probabilities, times the decay factor."""
    rerank = plan.search.rerank
    assert rerank is not None
    head, _ = pool_of(order, rerank.candidates, documents)
    if not head:
        return order
    texts = []
    for item in head:
        title = documents[item.key].get("_source", {}).get(fields.TITLE) or ""
        text = passage_of(item, documents[item.key], plan)["text"] or ""
        texts.append(f"{title}\n{text}".strip())
    scores = await reranker.rerank(plan.search.query, texts, deadline_s=deadline_s)
    place = {item.key: position for position, item in enumerate(head)}
    kept: list[Placed] = []
    unscored: list[Placed] = []
    for item, score in zip(head, scores, strict=True):
        if score is None:
            unscored.append(item)
            continue
        item.rerank_score = score
        factor = item.factor if rerank.decay and item.factor is not None else 1.0
        if item.feedback is not None:
            factor *= item.feedback.factor
        item.score = to_probability(score, reranker.scale) * factor
        if rerank.min_score is None or score >= rerank.min_score:
            kept.append(item)
    kept.sort(key=lambda item: (-item.score, place[item.key]))
    if rerank.min_score is None:
        for item in unscored:
            item.score = 0.0
        kept += unscored
    return kept if rerank.top_n is None else kept[: rerank.top_n]
