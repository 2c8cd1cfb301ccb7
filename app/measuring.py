"""What the lists of a search don't tell of their candidates, asked of the cluster: each one's relevance, salience, recency.

Additive fusion scores by them. Where hits are chunks a least relevance is kept by them too: a kNN clause judges a document
by its best chunk, and words know no relevance.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from app import fields, observing, queries
from app.elastic import Cluster
from app.errors import HalflifeError, Unavailable
from app.planning import Candidate, Plan, RouteAnswer, measure_body, partial
from app.recall import CHANGED, Run, ask_all, portions

Terms = tuple[float, float, float]
"""(relevance, salience, recency)."""

MEASURED_CHUNKS: Final = 100
"""Chunks of a document that are measured at first, where chunks are hits: hardly any document has more."""
MOST_CHUNKS: Final = 10_000
"""Inner hits of a document that the index allows."""


def bounds_chunks(plan: Plan) -> bool:
    """Tell whether each chunk has to have a least relevance."""
    return plan.search.min_relevance is not None and not plan.search.collapse


@observing.staged("measure")
async def measure(
    runs: Sequence[Run], *, cluster: Cluster, request_id: str | None
) -> dict[int, dict[str, Terms] | HalflifeError]:
    """Return, per run with additive fusion and per candidate, its terms as the cluster computes them.

    A run's entry is the error that it met instead, if it did. Candidates that no shard told of, which is noted on their
    run, have no terms, and so no place in the order. Chunks below a least relevance are taken out of their run's lists.
    """
    asked = [
        (run, [c for each in _lists(run) for c in each.candidates])
        for run in runs
        if run.plan.fusion.method == "additive" or bounds_chunks(run.plan)
    ]
    told: dict[int, dict[str, Terms] | HalflifeError] = {}
    found = await _ask(asked, cluster=cluster, request_id=request_id)
    for (run, candidates), of in zip(asked, found, strict=True):
        if isinstance(of, HalflifeError):
            told[id(run)] = of
            continue
        if bounds_chunks(run.plan):
            run.answers = {name: of.near_enough(run.plan, each) for name, each in run.answers.items()}
            run.tails = {
                size: {name: of.near_enough(run.plan, each) for name, each in tail.items()}
                for size, tail in run.tails.items()
            }
            for name, each in run.answers.items():
                returned = {"returned": len(each.candidates)}
                run.statuses[name] = run.statuses[name].model_copy(update=returned)
        if run.plan.fusion.method == "additive":
            terms = ((c.key, of.terms(c)) for c in candidates)
            told[id(run)] = {key: values for key, values in terms if values is not None}
    return told


async def near_enough(
    run: Run, answers: Mapping[str, RouteAnswer], *, cluster: Cluster, request_id: str | None
) -> Mapping[str, RouteAnswer]:
    """Return the routes' answers without the chunks below the run's least relevance. Raises what the cluster answers."""
    if not bounds_chunks(run.plan):
        return answers
    candidates = [c for each in answers.values() for c in each.candidates]
    [of] = await _ask([(run, candidates)], cluster=cluster, request_id=request_id)
    if isinstance(of, HalflifeError):
        raise of
    return {name: of.near_enough(run.plan, each) for name, each in answers.items()}


def _lists(run: Run) -> list[RouteAnswer]:
    return [*run.answers.values(), *(each for tail in run.tails.values() for each in tail.values())]


async def _ask(
    asked: Sequence[tuple[Run, Sequence[Candidate]]], *, cluster: Cluster, request_id: str | None
) -> list["_Measured | HalflifeError"]:
    found: list[_Measured | HalflifeError] = [_Measured(run.plan.collection.similarity) for run, _ in asked]
    # Of documents of many chunks the nearest ones come first, and all of them only where a listed one is not among those.
    for chunks in (MEASURED_CHUNKS, MOST_CHUNKS):
        parts = [
            (at, run, part, None if run.plan.search.collapse else chunks)
            for at, (run, candidates) in enumerate(asked)
            if isinstance(of := found[at], _Measured)
            for part in portions(of.lacking(candidates, first=chunks == MEASURED_CHUNKS))
        ]
        bodies = [
            (run, measure_body(run.plan, run.vectors[run.plan.search.query], ids=part, chunks=size))
            for _, run, part, size in parts
        ]
        answers = await ask_all(bodies, cluster=cluster, request_id=request_id)
        for (at, run, part, size), answer in zip(parts, answers, strict=True):
            of = found[at]
            if isinstance(answer, HalflifeError) or isinstance(of, HalflifeError):
                found[at] = answer if isinstance(answer, HalflifeError) else of
                continue
            lacking = partial(answer)
            if lacking is not None:
                reason = f"some candidates could not be measured and are left out: {lacking}"
                run.degrade(reason, Unavailable(reason, retry_after_s=1))
            elif len(answer["hits"]["hits"]) < len(part):
                run.warnings.append(CHANGED)
            for hit in answer["hits"]["hits"]:
                of.read(hit, chunks=size)
    return found


@dataclass(slots=True)
class _Measured:
    """What was measured of one run's documents, and of their chunks where those are hits."""

    similarity: str
    documents: dict[str, Terms] = field(default_factory=dict)
    """Document id -> its terms, the relevance being that of its best chunk."""
    chunks: dict[str, dict[int, float]] = field(default_factory=dict)
    """Document id -> number of a chunk -> its cosine."""
    whole: set[str] = field(default_factory=set)
    """Documents of which no other chunk has a vector."""

    def lacking(self, candidates: Iterable[Candidate], *, first: bool) -> list[str]:
        """Return the documents to be asked about: at first all, then those of which a listed chunk is not told yet."""
        return [
            each.id
            for each in candidates
            if first
            or (
                each.chunk is not None
                and each.id in self.documents
                and each.id not in self.whole
                and each.chunk not in self.chunks[each.id]
            )
        ]

    def read(self, hit: Mapping[str, Any], *, chunks: int | None) -> None:
        """Note a document's terms, and its nearest chunks where so many were asked for."""
        told = hit.get("matched_queries") or {}
        score = told.get(queries.RELEVANCE_NAME)
        relevance = 0.0 if score is None else queries.relevance_of(queries.cosine_of(score, self.similarity))
        salience = hit.get("fields", {}).get(fields.SALIENCE, [0.0])[0]
        self.documents[hit["_id"]] = (relevance, float(salience), float(told.get(queries.FACTOR_NAME, 0.0)))
        if chunks is None:
            return
        group = hit.get("inner_hits", {}).get(queries.MEASURED, {"hits": {"hits": []}})["hits"]["hits"]
        self.chunks[hit["_id"]] = {
            each["_nested"]["offset"]: queries.cosine_of(each["_score"], self.similarity) for each in group
        }
        if len(group) < chunks:
            self.whole.add(hit["_id"])

    def terms(self, candidate: Candidate) -> Terms | None:
        """Return what was measured of a candidate: of a chunk its own relevance, 0 where it has no vector."""
        terms = self.documents.get(candidate.id)
        if terms is None or candidate.chunk is None:
            return terms
        return (queries.relevance_of(self.chunks[candidate.id].get(candidate.chunk, 0.0)), *terms[1:])

    def near_enough(self, plan: Plan, answer: RouteAnswer) -> RouteAnswer:
        """Return the list without chunks below the least relevance, or without one; the others move up."""
        least = plan.search.min_relevance
        assert least is not None
        kept = [
            each
            for each in answer.candidates
            if (cosine := self.chunks.get(each.id, {}).get(each.chunk or 0)) is not None
            and cosine >= least - queries.STORED_PRECISION
        ]
        return replace(
            answer, candidates=tuple(each._replace(rank=rank) for rank, each in enumerate(kept, start=1))
        )
