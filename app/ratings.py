"""Votes on hits made one rating per document: how far it leans from what its collection's hits usually get.

Pure: the instant of the rating comes in. Votes on hits of the same question say most; where they are too few, the votes
on the document under any question speak for it, at half the weight. Three things keep a rating honest. A hit that was not clicked counts only as
much as it was likely looked at, so that standing low is not held against it. A voter counts once per document, however
often it votes, and the voters of one key together at most `MOST_PER_KEY` times. And only what lies outside the Wilson
interval moves anything, so a handful of votes does not.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from app.answers import HitFeedback
from app.times import DAY_MS

HALF_LIFE_DAYS: Final = 30.0
"""A vote counts half after that long: what was helpful last year says little about today."""
MOST_PER_KEY: Final = 10.0
Z: Final = 1.64
"""The interval holds 90 % of what chance would do."""
USUAL: Final = 0.5
"""The rate that a document must beat where only clicks are reported, and the most it must beat anywhere."""
PRIOR_VOTES: Final = 10.0
CARRY: Final = 0.5
"""What a document's votes under other questions count. With simulated clicks on medline, cranfield and cisi 0.5 was as
good as 1 or better at a strength of 0.3, and lost less to a flood; see DECISIONS.md."""

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
    question: str = ""
    """The hash of the query under which it was shown."""


@dataclass(slots=True)
class Rating:
    """What the votes say about one document; `lean` in [-1, 1] is 0 where they say nothing beyond chance."""

    lean: float = 0.0
    rate: float = 0.0
    voters: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    basis: Literal["question", "document"] = "document"

    def factor(self, strength: float) -> float:
        """Return what multiplies the fused score: within 1 - strength and 1 + strength."""
        return 1.0 + strength * self.lean

    def told(self, strength: float) -> HitFeedback:
        """Return it as a hit tells it."""
        return HitFeedback(
            factor=self.factor(strength),
            voters=self.voters,
            rate=self.rate,
            basis=self.basis,
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
    by_question: Mapping[str, Mapping[str, Rating]] = field(default_factory=dict)

    def under(self, question: str) -> "Ratings":
        """Return the ratings that hold for the hits of one question (its hash)."""
        return replace(
            self, by_document=_Under(self.by_question.get(question, {}), self.by_document), by_question={}
        )


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


class _Under(Mapping[str, Rating]):
    """Ratings under one question: its own where they lean, else those under any at `CARRY` of their lean.

    Made when they are looked up: a search looks up a window of thousands.
    """

    def __init__(self, own: Mapping[str, Rating], any_question: Mapping[str, Rating]) -> None:
        self._own = own
        self._any = any_question

    def __getitem__(self, document: str) -> Rating:
        rating = self._any[document]
        own = self._own.get(document)
        if own is not None and own.lean != 0:
            return own
        return rating if rating.lean == 0 else replace(rating, lean=CARRY * rating.lean)

    def __iter__(self) -> Iterator[str]:
        return iter(self._any)

    def __len__(self) -> int:
        return len(self._any)


def rate(votes: Iterable[Vote], *, as_of_ms: int) -> Ratings:
    """Return the ratings that the votes up to `as_of_ms` give, of documents under any question and under each."""
    counted = [vote for vote in votes if vote.at_ms <= as_of_ms]
    by_question: dict[str, list[Vote]] = {}
    for vote in counted:
        by_question.setdefault(vote.question, []).append(vote)
    usual, by_document = _rated(counted, as_of_ms=as_of_ms, basis="document")
    return Ratings(
        as_of_ms,
        usual,
        by_document,
        {
            question: _rated(given, as_of_ms=as_of_ms, basis="question")[1]
            for question, given in by_question.items()
        },
    )


def _rated(
    votes: Sequence[Vote], *, as_of_ms: int, basis: Literal["question", "document"]
) -> tuple[float, dict[str, Rating]]:
    """Return (usual rate, document -> rating)."""
    # document -> (key, voter) -> [for, against]
    masses: dict[str, dict[tuple[str, str], list[float]]] = {}
    rated: dict[str, Rating] = {}
    for vote in votes:
        faded = 0.5 ** ((as_of_ms - vote.at_ms) / (HALF_LIFE_DAYS * DAY_MS))
        mass = masses.setdefault(vote.document, {}).setdefault((vote.key, vote.voter), [0.0, 0.0])
        if vote.verdict in POSITIVE:
            mass[0] += faded
        elif vote.verdict == "ignored":
            mass[1] += faded * passed_over(vote.rank)
        else:
            mass[1] += faded
        counts = rated.setdefault(vote.document, Rating(basis=basis)).counts
        counts[vote.verdict] = counts.get(vote.verdict, 0) + 1
    sums = {document: _capped(by_voter) for document, by_voter in masses.items()}
    for_all = math.fsum(positive for positive, _ in sums.values())
    against_all = math.fsum(negative for _, negative in sums.values())
    usual = min(USUAL, (for_all + USUAL * PRIOR_VOTES) / (for_all + against_all + PRIOR_VOTES))
    for document, (positive, negative) in sums.items():
        rating = rated[document]
        rating.voters = len(masses[document])
        weight = positive + negative
        if weight <= 0:
            continue
        rating.rate = positive / weight
        low, high = interval(rating.rate, weight)
        if low > usual:
            rating.lean = (low - usual) / (1 - usual)
        elif high < usual:
            rating.lean = (high - usual) / usual
    return usual, rated


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
