"""`decay: "auto"`: how much time shall matter for one query, decided from what it says and from what was found.

Pure. Four answers: not at all (the query asks about the past), around a time that the query names, more for what is
new (the best candidates are days old), or only between documents that say the same thing, which is the rule and which
`supersession` finds. The evidence is in docs/relevance.md, "Recency by itself".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from app.answers import RecencyMode
from app.intent import Intent, Span
from app.ranking import ResolvedDecay
from app.times import DAY_MS, format_instant, from_ms

COMPARED: Final = 20
"""Best candidates among which documents that say the same thing are looked for. 50 change nDCG by less than .004."""
COMPARED_CURRENT: Final = 100
"""The same for a query that asks for what is current: the newest edition need not be the best match. With 50 it was out of
reach for 3 of 37 questions about TiDB's releases (.689 for .743); 200 win one of 105 and lose another."""
NEWS_HALF_LIFE_MS: Final = 60 * DAY_MS
"""30 days are as good for chronoqa_zh (.975) and worse for time1963 (.734 for .745), both asked a week after the news."""
NEWS_AGE_MS: Final = 14 * DAY_MS
"""Age at most of what counts as news. With 30 days questions about a past year lose twice as much at its end."""
NEWS_AMONG: Final = 10
"""Best candidates of which one must be as young for a query to count as one about news. Of five, chronoqa_zh asked a week
after the news has 87 % of a fixed decay's gain on 390 questions, of ten 91 %; time1963 then loses .02 at its year's end."""
NEWS_TOLD: Final = f"one of the best {NEWS_AMONG} hits is at most {NEWS_AGE_MS // DAY_MS} days old amid older ones, so newer ones count for more"
NEWS_AMIDST: Final = 1
"""Half-lives that the candidates' median age must reach: where all is new, its newness says nothing about the query."""
NEWS_LEAST: Final = 10
"""Dated candidates below which their ages are no evidence."""
UNCOMPARED: Final = "hits are chunks, and only documents are compared for which of them is the newest"
FLOOR: Final = 0.7
"""Least factor, for a named time, on what a score is above the window's least. With .5 named times win less by RRF."""
NEWS_FLOOR: Final = 0.5
"""The same for news: .7 misses .0006 of a gain of .0143 on chronoqa_zh asked a week after the news, .005 on time1963."""
AHEAD_MS: Final = DAY_MS
"""Beyond the origin: what is dated later holds nowhere yet and replaces nothing, an edition from next year on. A day, since a
date without a time zone may be tomorrow's."""
LEAST_SPREAD_MS: Final = 3 * DAY_MS
"""Distance from a named time at which half of the preference for it is gone, at least; else half of its length."""


@dataclass(frozen=True, slots=True)
class Recency:
    """What was decided for one query. `compared` is the number of best candidates to group, 0 for none.

    Of what says the same thing a document dated after `not_after_ms` comes last and replaces nothing.
    """

    mode: RecencyMode
    reason: str
    compared: int = 0
    current: bool = False
    spans: tuple[Span, ...] = ()
    not_after_ms: int | None = None

    def told(self) -> str:
        """Return the decision in one line."""
        return f"auto → {self.mode}, {self.reason}"


def decide(
    intent: Intent, *, origin_ms: int, created_ms: Sequence[int | None], compares: bool = True
) -> Recency:
    """Return the decision for a query whose candidates, best first, were created then.

    `compares`: they may say the same thing, and are compared for that. Chunks are not, so that only time itself counts.
    """
    decision = _decide(intent, origin_ms=origin_ms, created_ms=created_ms, compares=compares)
    if compares:
        return decision
    if decision.mode == "equals":
        return Recency("off", UNCOMPARED)
    return replace(decision, compared=0)


def _decide(intent: Intent, *, origin_ms: int, created_ms: Sequence[int | None], compares: bool) -> Recency:
    spans = tuple(span for span in intent.spans if span.sure)
    ahead = origin_ms + AHEAD_MS
    if spans:
        until = max(span.end_ms for span in spans) - 1
        not_after = min(until, ahead)
        name = ", ".join(
            f"'{span.text}' ({_day(span.start_ms)} to {_day(span.end_ms - 1)})" for span in spans[:2]
        )
        if any(_inside(spans, moment) for moment in created_ms[:COMPARED]):
            return Recency("around", f"the query names {name}", COMPARED, spans=spans, not_after_ms=not_after)
        reason = f"the query names {name}, and none of the best {COMPARED} hits is from then"
        if until >= origin_ms:
            # Of "this week's menu" the newest there is serves, should this week's be missing.
            return Recency(
                "equals",
                f"{reason}: newest first among editions of one thing",
                COMPARED_CURRENT,
                current=True,
                not_after_ms=ahead,
            )
        # A time that ended before any news began is asked about for its own sake, whatever is young among the hits.
        if origin_ms - until <= NEWS_AGE_MS and _is_burst(origin_ms, created_ms):
            return Recency("news", f"{reason}; {NEWS_TOLD}", COMPARED, not_after_ms=ahead)
        return Recency("off", reason, COMPARED, not_after_ms=not_after)
    if intent.wants == "past":
        return Recency("off", f"the query asks about the past ('{intent.cue}')")
    current = intent.wants == "current"
    reason = "newest first among hits that say the same thing"
    if current:
        reason += f", editions of a series too: the query asks for what is current ('{intent.cue}')"
    if intent.versions:
        reason += f"; it names {', '.join(intent.versions[:3])}, which tells editions apart"
    compared = COMPARED_CURRENT if current else COMPARED
    if not intent.spans and _is_burst(origin_ms, created_ms):
        told = f"{NEWS_TOLD}; {reason}" if compares else NEWS_TOLD
        return Recency("news", told, compared, current=current, not_after_ms=ahead)
    return Recency("equals", reason, compared, current=current, not_after_ms=ahead)


def _is_burst(origin_ms: int, created_ms: Sequence[int | None]) -> bool:
    """Tell whether a best candidate is news among candidates that are not."""
    ages = [origin_ms - moment for moment in created_ms if moment is not None]
    best = [origin_ms - moment for moment in created_ms[:NEWS_AMONG] if moment is not None]
    return (
        len(ages) >= NEWS_LEAST
        and any(0 <= age <= NEWS_AGE_MS for age in best)
        and median(ages) >= NEWS_AMIDST * NEWS_HALF_LIFE_MS
    )


def decay_of(decision: Recency) -> ResolvedDecay | None:
    """Return the decay by which age counts, where it counts by itself."""
    if decision.mode != "news":
        return None
    return ResolvedDecay(
        shape="exp", scale_ms=NEWS_HALF_LIFE_MS, decay=0.5, floor=NEWS_FLOOR, missing=NEWS_FLOOR
    )


def nearness(decision: Recency, moment_ms: int | None, *, evergreen: bool) -> float:
    """Return floor + (1 - floor) · 2^-(d/s)^2 for a document at distance d from the nearest of the named times.

    s is half of that time's length, `LEAST_SPREAD_MS` at least. 1 within it and for evergreen documents, the floor for
    undated ones.
    """
    if evergreen:
        return 1.0
    if moment_ms is None:
        return FLOOR
    return FLOOR + (1 - FLOOR) * max(_closeness(span, moment_ms) for span in decision.spans)


def _closeness(span: Span, moment_ms: int) -> float:
    distance = max(span.start_ms - moment_ms, moment_ms - span.end_ms + 1, 0)
    spread = max(LEAST_SPREAD_MS, (span.end_ms - span.start_ms) / 2)
    return float(2.0 ** -min((distance / spread) ** 2, 1000.0))


def _inside(spans: Sequence[Span], moment_ms: int | None) -> bool:
    return moment_ms is not None and any(span.start_ms <= moment_ms < span.end_ms for span in spans)


def _day(ms: int) -> str:
    return format_instant(from_ms(ms))[:10]
