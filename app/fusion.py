"""Owns how ranked lists become one list: adaptive, reciprocal rank and linear fusion, the additive memory score.

Values in, values out; no clock, no network. Sums are correctly rounded (`math.fsum`) and ties are broken by content
alone, so that the order of routes, tasks or dicts never shows in a result.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from app.ranking import Fusion

# Chosen over 16 judged sets and variants of them (docs/relevance.md, "Fusion").
HEAD: Final = 100
"""Hits of a route from which its spread and confidence are read, so that a longer window changes neither."""
HALF: Final = 50
VECTOR_SCALE: Final = 2.0
SHARPNESS: Final = 1.5
LEAST_CONFIDENCE: Final = 0.02
ABSENT: Final = -1.0
"""What a full list of cosines gives to what only words found: it is less like the query than all that is listed, and such
a constant ranks as well as the cosines themselves. What words lack has 0, which is its score where nothing matches."""


# What there is one of for each hit of a window is a named tuple: made in a third of a frozen dataclass's time.
class RankedHit(NamedTuple):
    """One hit of a route: the document's or chunk's key, its score after decay, its creation time if it has one.

    `base` is what adaptive fusion reads confidence from: the score before decay, BM25 or cosine; None: the score.
    """

    key: str
    score: float
    created_ms: int | None = None
    base: float | None = None


@dataclass(frozen=True, slots=True)
class RankedRoute:
    """A route's hits, best first as the cluster gave them. Weight 0: neither scores nor hits come from it.

    `measures` tells what its scores are: `words` (BM25, open above, 0 without a match) or `cosine`. `restricted`: it
    looks at a part of the documents only, as a date window does, to bring up what the other lists have no room for.
    """

    name: str
    weight: float
    hits: Sequence[RankedHit]
    measures: Literal["words", "cosine"] = "words"
    restricted: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """What adaptive fusion makes of a route: its confidence in [0, 1], and its share of the score; shares sum to 1.

    `absent` is the normalised score of what is in no list but of unrestricted words, if that isn't 0.
    """

    confidence: float
    weight: float
    absent: float = 0.0


class Fused(NamedTuple):
    """A hit of the fused list and what it is made of; dicts are keyed by route, in the order of their names.

    `fused_score` is the sum of `contributions`; `score` is what the list is ordered by (the same until a factor or
    another stage rescored it). `ranks` has the routes that returned the hit, ranks past the window too, which add
    nothing. `best_rank` is the best of those that count. `normalized` is filled by linear and adaptive fusion, `shares`
    by the latter.
    `beyond_window`: no route has it within the window, so its score is capped at the last hit inside.
    """

    key: str
    score: float
    fused_score: float
    contributions: dict[str, float]
    ranks: dict[str, int]
    normalized: dict[str, float]
    best_rank: int
    created_ms: int | None = None
    factor: float | None = None
    beyond_window: bool = False
    shares: Mapping[str, Share] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Additive:
    """The additive memory score and its weighted terms."""

    score: float
    terms: dict[str, float]


def fuse(routes: Sequence[RankedRoute], *, fusion: Fusion, window: int) -> list[Fused]:
    """Return the routes' hits as one list, best first.

    Only ranks up to `window` count; hits that lie beyond it in every route follow as a tail ordered by their own
    sums, so that asking for more never reorders the head. Ranks start at 1 and duplicates in a route are dropped
    before ranking (the first stays).

    `adaptive`: sum of share * normalised score; the shares follow each route's confidence in this query, see `shares`.
    Normalised: (score - least of the window) / population standard deviation of the first 100. Absent: 0, but -1 where
    a route of cosines fills the window from all documents and neither another such route nor a restricted one found
    the hit. Where the words match less than the window, what other routes found without a match counts as scored 0. A
    route whose scores are all equal gives each of its hits 1.

    `rrf`: sum of weight / (rank_constant + rank), absent = 0. `linear`: sum of weight * normalised score, absent = the
    least normalised score of that route's window. Normalised over the window: `zscore` is (score - mean) / population
    standard deviation, 0 where all scores are equal; `minmax` is (score - least) / (greatest - least), 1 where all are
    equal: such a route can't tell hits apart and adds the same to every hit, found or not.

    Ties: best single rank, newer creation time (undated last), then key ascending. Raises ValueError for method
    `additive`, which has no ranks: see `additive` and `rescore`.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if fusion.method == "additive":
        raise ValueError(
            "additive scores are not fused from ranks: compute them with `additive`, order with `rescore`"
        )
    names = [route.name for route in routes]
    if len(set(names)) != len(names):
        raise ValueError(f"two routes have the same name: {', '.join(sorted(names))}")
    weighed = [route for route in sorted(routes, key=lambda route: route.name) if route.weight > 0]
    told: Mapping[str, Share] = {}
    counting: Sequence[_Counted]
    if fusion.method == "adaptive":
        told = shares(weighed, window=window)
        others = _distinct([_counting(route, window) for route in weighed])
        counting = [_Adaptive(route, window, told[route.name], others) for route in weighed]
    elif fusion.method == "rrf":
        counting = [_Reciprocal(route, fusion, window) for route in weighed]
    else:
        counting = [_Normalized(route, fusion, window) for route in weighed]
    inside = {hit.key for route in counting for hit in route.hits[:window]}
    beyond = {hit.key for route in counting for hit in route.hits[window:]} - inside
    head = sorted((_sum(key, counting, told, within=window) for key in inside), key=_order)
    tail = sorted((_sum(key, counting, told, within=None) for key in beyond), key=_order)
    return head + _capped(tail, head)


def shares(routes: Sequence[RankedRoute], *, window: int) -> dict[str, Share]:
    """Return each route's confidence in its own list and its share of an adaptive score; weight 0 has none.

    A list that knows the answer has first hits that stand out of the rest; one that knows nothing finds all alike.
    Confidence, in [0, 1], of a route's first 100 hits before decay:
    `words`: 1 - score 50 / score 1, the part of the best score that is lost half-way;
    `cosine`: (best - mean) / (1 - mean), the part of the way from the list's mean to identity that the best hit makes.
    Share: weight * (scale * confidence)^1.5, divided by the sum of all; scale is 2 for `cosine`, else 1.

    Such measures of a list's spread predict how well a query does (normalised query commitment, Shtok et al. 2012).
    """
    lists = {route.name: _counting(route, window) for route in routes if route.weight > 0}
    others = _distinct(lists.values())
    confident = {}
    raw = {}
    absent = {}
    for route in routes:
        if route.weight <= 0:
            continue
        hits = lists[route.name]
        before = [hit.score if hit.base is None else hit.base for hit in hits[:HEAD]]
        confidence = _confidence(_padded(before, route, hits, window, others), route.measures)
        scale = VECTOR_SCALE if route.measures == "cosine" else 1.0
        confident[route.name] = confidence
        full = route.measures == "cosine" and not route.restricted and len(hits) >= window
        absent[route.name] = ABSENT if full else 0.0
        # A route without a hit leaves its share to the others.
        strength = (scale * max(confidence, LEAST_CONFIDENCE)) ** SHARPNESS if hits else 0.0
        raw[route.name] = route.weight * strength
    total = math.fsum(raw.values())
    return {
        name: Share(confidence, raw[name] / total if total > 0 else 0.0, absent[name])
        for name, confidence in confident.items()
    }


def _counting(route: RankedRoute, window: int) -> list[RankedHit]:
    """Return the hits that count: the first of each key, up to the window."""
    first: dict[str, RankedHit] = {}
    for hit in route.hits:
        first.setdefault(hit.key, hit)
    return list(first.values())[:window]


def _distinct(lists: Iterable[Sequence[RankedHit]]) -> int:
    return len({hit.key for hits in lists for hit in hits[:HEAD]})


def _complete(route: RankedRoute, hits: Sequence[RankedHit], window: int) -> bool:
    """Tell whether the list holds all that its words match."""
    return route.measures == "words" and len(hits) < window


def _padded(
    scores: Sequence[float], route: RankedRoute, hits: Sequence[RankedHit], window: int, others: int
) -> list[float]:
    """Return the scores, best first, with a 0 for each candidate of other routes that the words don't match."""
    lacking = min(others, HEAD) - len(scores) if _complete(route, hits, window) else 0
    return sorted(scores, reverse=True) + [0.0] * lacking


def _confidence(values: Sequence[float], measures: Literal["words", "cosine"]) -> float:
    if len(values) < 2 or values[0] <= 0:
        return 0.0
    if measures == "words":
        return min(1.0, max(0.0, 1 - values[min(HALF, len(values)) - 1] / values[0]))
    mean = math.fsum(values) / len(values)
    return min(1.0, max(0.0, (values[0] - mean) / (1 - mean))) if mean < 1 else 0.0


def rescore(fused: Sequence[Fused], scores: Mapping[str, float]) -> list[Fused]:
    """Return the hits ordered by other scores (key -> score, one for each), with the same ties; the tail stays last."""
    changed = sorted((hit._replace(score=scores[hit.key]) for hit in fused), key=_order)
    head = [hit for hit in changed if not hit.beyond_window]
    return head + _capped([hit for hit in changed if hit.beyond_window], head)


def apply_factor(fused: Sequence[Fused], factors: Mapping[str, float]) -> list[Fused]:
    """Return the hits with their fused score multiplied by their factor (key -> [0, 1], one for each), ordered anew.

    Scores below 0 (z-scores) would rise by a small factor. Where the window holds such scores, its least fused score
    is taken as zero: least + (score - least) * factor.
    """
    zero = min([0.0, *(hit.fused_score for hit in fused if not hit.beyond_window)])
    scores: dict[str, float] = {}
    for hit in fused:
        above = hit.fused_score - zero
        # The tail may lie below that zero, where a factor would lift it: it keeps its score.
        scores[hit.key] = zero + (above * factors[hit.key] if above > 0 else above)
    return rescore([hit._replace(factor=factors[hit.key]) for hit in fused], scores)


def additive(
    relevance: float | None,
    salience: float | None,
    recency: float,
    weights: Mapping[str, float] | None = None,
) -> Additive:
    """Return relevance + salience + recency, each times its weight (1 if not given); None counts as 0.

    The time-weighted memory's score: relevance in [0, 1], salience a stored number, recency the decay factor
    (1 - hourly_loss)^hours in [0, 1].
    """
    values = {"relevance": relevance or 0.0, "salience": salience or 0.0, "recency": recency}
    terms = {name: value * (weights or {}).get(name, 1.0) for name, value in values.items()}
    return Additive(math.fsum(terms.values()), terms)


class _Counted:
    """A route without its duplicates; where each key stands in it, from 1."""

    def __init__(self, route: RankedRoute) -> None:
        self.name = route.name
        self.weight = route.weight
        self.vouches = route.measures == "cosine" or route.restricted
        first: dict[str, RankedHit] = {}
        for hit in route.hits:
            first.setdefault(hit.key, hit)
        self.hits = list(first.values())
        self.ranks = {hit.key: rank for rank, hit in enumerate(self.hits, start=1)}

    def terms(self, rank: int | None, *, vouched: bool) -> tuple[float, float | None]:
        """Return what the route adds at a rank (None: absent), and the normalised score where the method has one.

        `vouched`: a route of cosines, or a restricted one, holds the hit.
        """
        raise NotImplementedError


class _Reciprocal(_Counted):
    def __init__(self, route: RankedRoute, fusion: Fusion, window: int) -> None:
        super().__init__(route)
        self.rank_constant = fusion.rank_constant

    def terms(self, rank: int | None, *, vouched: bool) -> tuple[float, float | None]:
        return 0.0 if rank is None else self.weight / (self.rank_constant + rank), None


class _Normalized(_Counted):
    def __init__(self, route: RankedRoute, fusion: Fusion, window: int) -> None:
        super().__init__(route)
        scores = [hit.score for hit in self.hits[:window]]
        self.least, greatest = min(scores, default=0.0), max(scores, default=0.0)
        # Equal scores have no spread; their computed deviation need not come out as exactly 0.
        self.flat = 0.0 if greatest == self.least else None
        if fusion.normalizer == "minmax":
            self.zero, self.unit = self.least, greatest - self.least
            self.flat = None if self.flat is None else 1.0
        elif self.flat is None:
            self.zero = math.fsum(scores) / len(scores)
            self.unit = math.sqrt(math.fsum((score - self.zero) ** 2 for score in scores) / len(scores))

    def terms(self, rank: int | None, *, vouched: bool) -> tuple[float, float | None]:
        if not self.hits:
            return 0.0, None
        if self.flat is not None:
            return self.weight * self.flat, self.flat
        score = self.least if rank is None else self.hits[rank - 1].score
        normalized = (score - self.zero) / self.unit
        return self.weight * normalized, normalized


class _Adaptive(_Counted):
    def __init__(self, route: RankedRoute, window: int, share: Share, others: int) -> None:
        super().__init__(route)
        self.share = share
        hits = self.hits[:window]
        values = _padded([hit.score for hit in hits[:HEAD]], route, hits, window, others)
        scores = [hit.score for hit in hits]
        self.zero = min(scores, default=0.0)
        if _complete(route, hits, window):
            self.zero = min(0.0, self.zero)
        flat = not values or values[0] == values[-1]
        mean = math.fsum(values) / len(values) if values else 0.0
        # Equal scores have no spread; their computed deviation need not come out as exactly 0.
        self.unit = None if flat else math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))

    def terms(self, rank: int | None, *, vouched: bool) -> tuple[float, float | None]:
        absent = self.share.absent
        if rank is None:
            if vouched or not absent:
                return 0.0, None
            return self.share.weight * absent, absent
        # Ranks past the window lie below its least, where absent hits are.
        normalized = (
            1.0 if self.unit is None else max(absent, (self.hits[rank - 1].score - self.zero) / self.unit)
        )
        return self.share.weight * normalized, normalized


def _sum(key: str, routes: Sequence[_Counted], told: Mapping[str, Share], *, within: int | None) -> Fused:
    ranks: dict[str, int] = {}
    contributions: dict[str, float] = {}
    normalized: dict[str, float] = {}
    best: int | None = None
    created: int | None = None
    counted: dict[str, int] = {}
    vouched = False
    for route in routes:
        rank = route.ranks.get(key)
        if rank is None:
            continue
        ranks[route.name] = rank
        date = route.hits[rank - 1].created_ms
        if date is not None and (created is None or date > created):
            created = date
        if within is None or rank <= within:
            counted[route.name] = rank
            vouched |= route.vouches
            if best is None or rank < best:
                best = rank
    for route in routes:
        contributions[route.name], value = route.terms(counted.get(route.name), vouched=vouched)
        if value is not None:
            normalized[route.name] = value
    assert best is not None, "a key to sum stands in a route"
    total = math.fsum(contributions.values())
    return Fused(
        key=key, score=total, fused_score=total, contributions=contributions, ranks=ranks, normalized=normalized,
        best_rank=best, created_ms=created, beyond_window=within is None, shares=told,
    )  # fmt: skip


def _order(hit: Fused) -> tuple[float, int, bool, int, str]:
    undated = hit.created_ms is None
    return (-hit.score, hit.best_rank, undated, 0 if hit.created_ms is None else -hit.created_ms, hit.key)


def _capped(tail: Sequence[Fused], head: Sequence[Fused]) -> list[Fused]:
    """Return the tail with no score above the head's last."""
    if not head:
        return list(tail)
    return [hit._replace(score=min(hit.score, head[-1].score)) for hit in tail]
