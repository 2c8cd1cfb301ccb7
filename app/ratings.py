"""Votes on hits made one rating per document: how far it leans from what its collection's hits usually get.

Pure: the instant of the rating comes in. Three things keep a rating honest. A hit that was not clicked counts only as
much as it was likely looked at, so that standing low is not held against it. A voter counts once per document, however
often it votes, and the voters of one key together at most `MOST_PER_KEY` times. And only what lies outside the Wilson
interval moves anything, so a handful of votes does not.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from app.models import HitFeedback
from app.times import DAY_MS

HALF_LIFE_DAYS: Final = 30.0
"""A vote counts half after that long: what was helpful last year says little about today."""
MOST_PER_KEY: Final = 10.0
Z: Final = 1.64
"""The interval holds 90 % of what chance would do."""
USUAL: Final = 0.5
"""The rate that a document must beat where only clicks are reported, and the most it must beat anywhere."""
PRIOR_VOTES: Final = 10.0

POSITIVE: Final = frozenset({"clicked", "helpful"})


@dataclass(frozen=True, slots=True)
class Vote:
    """One voter's verdict on one hit of one search; `rank` is where it was shown, from 1."""

    document: str
    voter: str
    key: str
    verdict: str
    rank: int
    at_ms: int


@dataclass(slots=True)
class Rating:
    """What the votes say about one document; `lean` in [-1, 1] is 0 where they say nothing beyond chance."""

    lean: float = 0.0
    rate: float = 0.0
    voters: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def factor(self, strength: float) -> float:
        """Return what multiplies the fused score: within 1 - strength and 1 + strength."""
        return 1.0 + strength * self.lean

    def told(self, strength: float) -> HitFeedback:
        """Return it as a hit tells it."""
        return HitFeedback(
            factor=self.factor(strength),
            voters=self.voters,
            rate=self.rate,
            clicked=self.counts.get("clicked", 0),
            ignored=self.counts.get("ignored", 0),
            helpful=self.counts.get("helpful", 0),
            unhelpful=self.counts.get("unhelpful", 0),
        )


@dataclass(frozen=True, slots=True)
class Ratings:
    """A collection's ratings as of one instant; `usual` is the rate that they are measured against."""

    as_of_ms: int
    usual: float
    by_document: Mapping[str, Rating]


def passed_over(rank: int) -> float:
    """Return the chance that a hit shown at this rank was looked at, given that it was not clicked.

    The position-based click model with examination 1/rank (Joachims, Swaminathan and Schnabel, WSDM 2017) and a click
    on half of what is looked at: e(1-c) / (1-ec). With it, clicks / (clicks + passed over) estimates how often the hit
    is clicked once seen, whatever its rank.
    """
    examined = 1.0 / max(1, rank)
    return examined * (1 - USUAL) / (1 - examined * USUAL)


def interval(rate: float, weight: float) -> tuple[float, float]:
    """Return the Wilson score interval of a rate that so many votes gave; weights need not be whole."""
    if weight <= 0:
        return 0.0, 1.0
    z2 = Z * Z / weight
    middle = (rate + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(rate * (1 - rate) / weight + z2 / (4 * weight)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def rate(votes: Iterable[Vote], *, as_of_ms: int) -> Ratings:
    """Return the ratings that the votes up to `as_of_ms` give."""
    # document -> (key, voter) -> [for, against]
    masses: dict[str, dict[tuple[str, str], list[float]]] = {}
    rated: dict[str, Rating] = {}
    for vote in votes:
        if vote.at_ms > as_of_ms:
            continue
        faded = 0.5 ** ((as_of_ms - vote.at_ms) / (HALF_LIFE_DAYS * DAY_MS))
        mass = masses.setdefault(vote.document, {}).setdefault((vote.key, vote.voter), [0.0, 0.0])
        if vote.verdict in POSITIVE:
            mass[0] += faded
        elif vote.verdict == "ignored":
            mass[1] += faded * passed_over(vote.rank)
        else:
            mass[1] += faded
        counts = rated.setdefault(vote.document, Rating()).counts
        counts[vote.verdict] = counts.get(vote.verdict, 0) + 1
    sums: dict[str, tuple[float, float]] = {}
    for document, by_voter in masses.items():
        sums[document] = _capped(by_voter)
        rated[document].voters = len(by_voter)
    for_all, against_all = (
        (math.fsum(part) for part in zip(*sums.values(), strict=True)) if sums else (0.0, 0.0)
    )
    usual = min(
        USUAL, (for_all + USUAL * PRIOR_VOTES) / (for_all + against_all + PRIOR_VOTES)
    )  # fmt: skip
    for document, (positive, negative) in sums.items():
        weight = positive + negative
        if weight <= 0:
            continue
        rating = rated[document]
        rating.rate = positive / weight
        low, high = interval(rating.rate, weight)
        if low > usual:
            rating.lean = (low - usual) / (1 - usual)
        elif high < usual:
            rating.lean = (high - usual) / usual
    return Ratings(as_of_ms, usual, rated)


def _capped(by_voter: Mapping[tuple[str, str], list[float]]) -> tuple[float, float]:
    """Return (for, against), a voter weighing at most 1 and the voters of one key at most `MOST_PER_KEY`."""
    by_key: dict[str, list[float]] = {}
    for (key, _), (positive, negative) in sorted(by_voter.items()):
        share = 1 / max(1.0, positive + negative)
        total = by_key.setdefault(key, [0.0, 0.0])
        total[0] += positive * share
        total[1] += negative * share
    shares = [MOST_PER_KEY / max(MOST_PER_KEY, positive + negative) for positive, negative in by_key.values()]
    return (
        math.fsum(total[0] * share for total, share in zip(by_key.values(), shares, strict=True)),
        math.fsum(total[1] * share for total, share in zip(by_key.values(), shares, strict=True)),
    )
