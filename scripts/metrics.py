"""Own the figures by which rankings are judged, and whether two of them differ by more than chance.

nDCG, average precision, reciprocal rank and recall are trec_eval's own, through pytrec_eval; what it lacks, the two
about time, is counted here. Takes ids in rank order; scores play no part, so ties can't be broken a second time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.judged import Question

NDCG, MAP, MRR, RECALL = "ndcg", "map", "mrr", "recall"
CURRENCY, STALE = "currency", "stale@1"

Figures = dict[str, float]


class LibraryMissing(Exception):
    """The package that computes the figures is not installed."""


def names(top_k: int, depth: int) -> tuple[str, ...]:
    """Return the names of all figures, in the order in which they are told."""
    recalls = dict.fromkeys((f"{RECALL}@{top_k}", f"{RECALL}@{depth}"))
    return (f"{NDCG}@{top_k}", MAP, f"{MRR}@{top_k}", *recalls, CURRENCY, STALE)


def judge(
    questions: Sequence[Question], rankings: Mapping[str, Sequence[str]], *, top_k: int, depth: int
) -> dict[str, Figures]:
    """Return each question's figures; all in [0, 1].

    A question without a hit scores 0. `map` is average precision over the first `depth` hits. nDCG's gain is the
    grade, its discount log2(1 + rank), its ideal all that was judged. The figures about time stand only where the
    question has current and superseded documents: `currency` is 1 if the best-ranked current one stands above the
    best-ranked superseded one (absent = below everything; 0 if neither is there), `stale@1` 1 if the first hit is
    superseded.
    """
    try:
        import pytrec_eval
    except ModuleNotFoundError as cause:
        raise LibraryMissing(
            "Judging rankings needs the package pytrec-eval-terrier: install `halflife[evaluate]`."
        ) from cause
    wanted = {f"ndcg_cut.{top_k}", f"map_cut.{depth}", f"recall.{top_k},{depth}", "recip_rank"}
    grades = {question.id: dict(question.grades) for question in questions}
    deep = {question.id: list(rankings.get(question.id, ()))[:depth] for question in questions}
    evaluator = pytrec_eval.RelevanceEvaluator(grades, wanted)
    scored = evaluator.evaluate({name: _scores(ids) for name, ids in deep.items() if ids})
    judged: dict[str, Figures] = {}
    for question in questions:
        found = scored.get(question.id, {})
        reciprocal = found.get("recip_rank", 0.0)
        figures = {
            f"{NDCG}@{top_k}": found.get(f"ndcg_cut_{top_k}", 0.0),
            MAP: found.get(f"map_cut_{depth}", 0.0),
            # trec_eval's has no cutoff: below 1/k the first relevant hit lies beyond it.
            f"{MRR}@{top_k}": reciprocal if reciprocal * top_k > 1 - 1e-6 else 0.0,
            f"{RECALL}@{top_k}": found.get(f"recall_{top_k}", 0.0),
            f"{RECALL}@{depth}": found.get(f"recall_{depth}", 0.0),
        }
        if question.current and question.superseded:
            figures |= _about_time(question, deep[question.id])
        judged[question.id] = figures
    return judged


def _scores(ids: Sequence[str]) -> dict[str, float]:
    return {name: float(len(ids) - place) for place, name in enumerate(ids)}


def _about_time(question: Question, ids: Sequence[str]) -> Figures:
    rank = {name: place for place, name in enumerate(ids, 1)}
    current = min((rank.get(name, math.inf) for name in question.current), default=math.inf)
    superseded = min((rank.get(name, math.inf) for name in question.superseded), default=math.inf)
    return {CURRENCY: float(current < superseded), STALE: float(superseded == 1)}


def mean(judged: Mapping[str, Figures]) -> Figures:
    """Return the mean of each figure over the questions that have it."""
    sums: dict[str, list[float]] = {}
    for figures in judged.values():
        for name, value in figures.items():
            sums.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in sums.items()}


@dataclass(frozen=True, slots=True)
class Difference:
    """How a second ranking differs from a first in one figure, question by question.

    `p` is the chance of a mean difference at least this far from 0 if the two were alike: of a two-sided paired t-test, or,
    where all questions differ by the same so that nothing spreads, of their signs being all alike, 2^(1-n). None where it
    says nothing: fewer than two questions, or no question that differs.
    """

    figure: str
    mean: float
    better: int
    worse: int
    same: int
    p: float | None


def compare(
    first: Mapping[str, Figures], second: Mapping[str, Figures], figures: Sequence[str]
) -> list[Difference]:
    """Return the differences of the second from the first, for the figures that both have."""
    told = []
    for figure in figures:
        pairs = [
            (first[name][figure], second[name][figure])
            for name in first
            if name in second and figure in first[name] and figure in second[name]
        ]
        if not pairs:
            continue
        gaps = [after - before for before, after in pairs]
        better = sum(gap > 1e-9 for gap in gaps)
        worse = sum(gap < -1e-9 for gap in gaps)
        told.append(
            Difference(
                figure, math.fsum(gaps) / len(gaps), better, worse, len(gaps) - better - worse, _chance(gaps)
            )
        )
    return told


def _chance(gaps: Sequence[float]) -> float | None:
    if len(gaps) < 2 or max(map(abs, gaps)) < 1e-12:
        return None
    if max(gaps) - min(gaps) < 1e-12:
        return 2.0 ** (1 - len(gaps))
    # Brought along by pytrec_eval.
    from scipy import stats

    return float(stats.ttest_1samp(list(gaps), 0.0).pvalue)
