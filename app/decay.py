"""Time decay: from what a caller wrote to what Elasticsearch takes, and the closed formula beside it.

Pure: the origin comes in. The cluster computes every factor that ranks; `factor` says what it must be, for
explanations and for the tests that hold the two together.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from app import fields
from app.errors import InvalidRequest
from app.ranking import STRENGTHS, Decay, DecayStrength, ResolvedDecay, unfit
from app.times import (
    DAY_MS,
    HOUR_MS,
    LONGEST_MS,
    cap_duration,
    format_duration,
    format_instant,
    from_ms,
    within_calendar,
)

DEFAULT_FLOOR: Final = 0.5
DEFAULT_VECTOR_FLOOR: Final = 0.98
"""Cosine scores crowd into a narrow band ((1 + cos)/2, most of it between 0.90 and 0.95), so the factor that
suits BM25 would turn a vector route into a date sort. Over seven dated sets 0.5 and 0.98 are the first pair whose
nDCG@10 is above that without decay (0.50 against 0.48; 0.46 at 0.95, 0.39 at 0.9), while currency rises from 0.35 to
0.49 (0.53, 0.58); see docs/relevance.md, "The floors"."""

SMALL_LOSS: Final = 1e-6
"""1 - p is off by up to 1e-16: below this p, that is more than 1e-10 of it, so the loss is told at a longer scale."""
SMALLEST_WEIGHT: Final = 2.0**-149


def merge(base: Decay, override: DecayStrength | None, *, path: str = "routes.decay") -> Decay:
    """Return the base with the override's given fields laid over it; a given strength replaces the base's.

    Raises InvalidRequest, naming the override's `path`, where the two don't go together.
    """
    if override is None:
        return base
    laid = {
        name: getattr(override, name)
        for name in override.model_fields_set
        if getattr(override, name) is not None
    }
    kept = {name: getattr(base, name) for name in base.model_fields_set if getattr(base, name) is not None}
    if any(name in laid for name in STRENGTHS):
        for name in (*STRENGTHS, "decay"):
            kept.pop(name, None)
    merged = base.model_copy(update={**dict.fromkeys((*STRENGTHS, "decay")), **kept, **laid})
    fault = unfit(merged.kind, rate=merged.rate, hourly_loss=merged.hourly_loss)
    if fault is not None:
        own = "rate" if override.rate is not None and merged.kind == "linear" else "kind"
        raise InvalidRequest(fault[0], field=f"{path}.{own}", remedy=fault[1])
    return merged


def resolve(decay: Decay, *, default_floor: float) -> ResolvedDecay:
    """Return the decay with every spelling turned into scale and decay, without loss.

    `half_life` h is decay 0.5 at scale h. `rate` r per day: exp is e^(-r*s) at a scale s of about 1/r, linear
    is 1 - r*s at a scale of about 0.5/r. `hourly_loss` p is 1-p at a scale of one hour (LangChain's
    `(1 - decay_rate)^hours`), where p is too small for 1-p to hold its digits the same curve at a longer scale; 0
    loses nothing and 1 loses all at once.
    """
    floor = default_floor if decay.floor is None else decay.floor
    shape, scale_ms, at_scale = _strength(decay)
    return ResolvedDecay(
        shape=shape,
        scale_ms=scale_ms,
        decay=at_scale,
        offset_ms=decay.offset or 0,
        field=decay.field or "creation_time",
        floor=floor,
        missing=floor if decay.missing is None else decay.missing,
        future=decay.future or "clamp",
    )


def _strength(decay: Decay) -> tuple[Any, int, float]:
    kind = decay.kind or "exp"
    if decay.half_life is not None:
        return kind, decay.half_life, 0.5
    if decay.scale is not None:
        return kind, decay.scale, 0.5 if decay.decay is None else decay.decay
    if decay.hourly_loss is not None:
        return _hourly(kind, decay.hourly_loss)
    rate = decay.rate or 0.0
    if kind == "linear":
        scale_ms = _whole(0.5 * DAY_MS, per=rate)
        at_scale = 1 - rate * scale_ms / DAY_MS
    else:
        scale_ms = _whole(DAY_MS, per=rate)
        at_scale = math.exp(-rate * scale_ms / DAY_MS)
    assert 0 < at_scale < 1, "rates are checked where they are read"
    return kind, scale_ms, at_scale


def _hourly(kind: str, loss: float) -> tuple[Any, int, float]:
    if loss == 1:
        return "step", HOUR_MS, 0.5
    scale_ms, at_scale = HOUR_MS, 1 - loss
    if 0 < loss < SMALL_LOSS:
        per_hour = -math.log1p(-loss)
        scale_ms = _whole(HOUR_MS, per=per_hour)
        at_scale = math.exp(-per_hour * scale_ms / HOUR_MS)
    return (kind, scale_ms, at_scale) if at_scale < 1 else ("none", HOUR_MS, 0.5)


def _whole(ms: float, *, per: float) -> int:
    """Return ms/per as the cluster takes it: from one millisecond to the longest duration."""
    return cap_duration(max(1, round(ms / per))) if ms < LONGEST_MS * per else LONGEST_MS


def shape_factor(decay: ResolvedDecay, age_ms: int) -> float:
    """Return the decay at an age of zero or more milliseconds, before the floor: 1 at age 0, never below 0.

    With x = max(0, age - offset)/scale and d the decay at scale: exp d^x, gauss d^(x^2), linear
    max(0, 1 - (1-d)*x); the formulas of Elasticsearch's function_score documentation.
    """
    beyond = max(0, age_ms - decay.offset_ms)
    if decay.shape == "none" or beyond == 0:
        return 1.0
    if decay.shape == "step":
        return 0.0
    x = beyond / decay.scale_ms
    if decay.shape == "linear":
        return max(0.0, 1 - (1 - decay.decay) * x)
    return math.exp(math.log(decay.decay) * (x if decay.shape == "exp" else x * x))


def factor(decay: ResolvedDecay, *, origin_ms: int, moment_ms: int | None, evergreen: bool) -> float:
    """Return what time multiplies into a document's score: floor + (1-floor)*decay, in [0, 1]."""
    if evergreen:
        return 1.0
    if moment_ms is None:
        return decay.missing
    age_ms = origin_ms - moment_ms
    if age_ms < 0 and decay.future == "clamp":
        return 1.0
    return decay.floor + (1 - decay.floor) * shape_factor(decay, abs(age_ms))


def functions(decay: ResolvedDecay, *, origin_ms: int) -> list[dict[str, Any]]:
    """Return function_score functions with disjoint filters, to be summed and multiplied into the score.

    Exactly one kind of document matches each group: dated and decaying, exempt (evergreen, or in a clamped
    future), undated. Elasticsearch alone would give an undated document factor 1, as if brand new, and let a
    future date decay; the filters are what makes both a choice.
    """
    origin = format_instant(from_ms(origin_ms))
    evergreen = {"term": {fields.EVERGREEN: True}}
    groups: list[dict[str, Any]] = []
    exempt: list[dict[str, Any]] = [evergreen]
    dated: list[dict[str, Any]] = []
    for field in times_of(decay.field):
        past = {"range": {field: {"lte": origin}}}
        future = {"range": {field: {"gt": origin}}}
        has: dict[str, Any] = {"exists": {"field": field}}
        later: list[dict[str, Any]] = [future]
        if field == fields.LAST_ACCESSED_AT:
            # It has not been read yet then; only what has no other date is aged by it all the same.
            ahead: dict[str, Any] = {
                "bool": {"filter": [future], "must_not": [{"exists": {"field": fields.CREATION_TIME}}]}
            }
            has = {"bool": {"should": [past, ahead]}}
            later = [ahead]
        decaying = past if decay.future == "clamp" else has
        aging = {"bool": {"filter": [decaying], "must_not": [evergreen, *dated]}}
        groups += _aging(decay, field, origin_ms=origin_ms, aging=aging)
        if decay.future == "clamp":
            exempt += [{"bool": {"filter": later, "must_not": list(dated)}}] if dated else later
        dated.append(has)
    return [
        *groups,
        {"filter": {"bool": {"should": exempt}}, "weight": 1.0},
        _constant({"bool": {"must_not": [*dated, evergreen]}}, decay.missing, field=decay.field),
    ]


def times_of(field: str) -> tuple[str, ...]:
    """Return the date fields that tell a document's age, the first that it has: what was never read is as old as it is.

    So a memory decays from the first search on, whoever stored it, and not only once it has been read.
    """
    return (field, fields.CREATION_TIME) if field == fields.LAST_ACCESSED_AT else (field,)


def moment(field: str, date_of: Callable[[str], int | None], *, origin_ms: int) -> int | None:
    """Return the date by which a decay on `field` ages a document, None for an undated one.

    `date_of` gives the document's own dates. A reading after the origin has not been yet, so that what is asked as of then
    finds what it found then; it counts where there is no other date.
    """
    dates = [at for at in map(date_of, times_of(field)) if at is not None]
    if len(dates) > 1 and dates[0] > origin_ms:
        return dates[1]
    return dates[0] if dates else None


def _aging(
    decay: ResolvedDecay, field: str, *, origin_ms: int, aging: dict[str, Any]
) -> list[dict[str, Any]]:
    if decay.shape == "none":
        return [{"filter": aging, "weight": 1.0}]
    if decay.shape == "step":
        return _step(decay, field, origin_ms=origin_ms, aging=aging)
    curve = {
        "origin": format_instant(from_ms(origin_ms)),
        "scale": format_duration(decay.scale_ms),
        "offset": format_duration(decay.offset_ms),
        "decay": decay.decay,
    }
    floor = {"filter": aging, "weight": decay.floor}
    if decay.floor == 1:
        return [floor]
    falling = {"filter": aging, decay.shape: {field: curve}, "weight": 1 - decay.floor}
    return [falling, floor] if decay.floor > 0 else [falling]


def _step(decay: ResolvedDecay, field: str, *, origin_ms: int, aging: dict[str, Any]) -> list[dict[str, Any]]:
    edges = {"gte": format_instant(from_ms(within_calendar(origin_ms - decay.offset_ms)))}
    if decay.future == "symmetric":
        edges["lte"] = format_instant(from_ms(within_calendar(origin_ms + decay.offset_ms)))
    inside = {"range": {field: edges}}
    return [
        {"filter": {"bool": {"filter": [aging, inside]}}, "weight": 1.0},
        _constant({"bool": {"filter": [aging], "must_not": [inside]}}, decay.floor, field=field),
    ]


def _constant(where: dict[str, Any], value: float, *, field: str) -> dict[str, Any]:
    # A weight of 0 is taken by Elasticsearch for "no function matched", which scores 1; a date times 0 is 0. So is a
    # weight below the smallest 32-bit float.
    if value < SMALLEST_WEIGHT:
        return {"filter": where, "field_value_factor": {"field": field, "factor": 0, "missing": 1}}
    return {"filter": where, "weight": value}


def scored(query: dict[str, Any], decay: ResolvedDecay, *, origin_ms: int) -> dict[str, Any]:
    """Return the query wrapped so that its score is multiplied by the decay factor, inside the cluster."""
    return {
        "function_score": {
            "query": query,
            "functions": functions(decay, origin_ms=origin_ms),
            "score_mode": "sum",
            "boost_mode": "multiply",
        }
    }


def misfit(decay: ResolvedDecay, factors: list[float], *, oldest_ms: int) -> str | None:
    """Return a warning if the scale does not fit the candidates' ages: every factor 1, or every one at the floor.

    `factors` are those of all dated candidates: a page may well hold the young ones alone, since that is what decay does.
    `oldest_ms` is the age of the oldest of them.
    """
    if len(factors) < 2 or decay.shape in ("none", "step"):
        return None
    scale = format_duration(decay.scale_ms)
    if min(factors) > 1 - 1e-3 * (1 - decay.floor):
        if 0 <= oldest_ms <= DAY_MS:
            # No sensible scale tells these apart: a memory that was just written, or touched by being found.
            return (
                f"the decay changes nothing here, as it should: all {len(factors)} dated candidates were written or touched "
                "less than a day ago"
            )
        nothing = f"the decay changes nothing here: all {len(factors)} dated candidates have a factor of about 1, since "
        offset = format_duration(decay.offset_ms)
        if 0 < oldest_ms <= decay.offset_ms:
            return f"{nothing}none is older than its `offset` of {offset}, before which no age counts; shorten that"
        beyond, shorter = (
            (f", which begins at its `offset` of {offset}", "a shorter `offset`, `half_life`")
            if decay.offset_ms
            else ("", "a shorter `half_life`")
        )
        return f"{nothing}they are young against its scale of {scale}{beyond}; strengthen it ({shorter} or `scale`, a higher `rate`)"
    if decay.floor < 1 and max(factors) < decay.floor + 1e-6:
        return (
            f"the decay tells no ages apart: all {len(factors)} dated candidates are at its floor of {decay.floor:g}, since they "
            f"are old against its scale of {scale}; weaken it (a longer `half_life` or `scale`, a lower `rate`)"
            + ("" if decay.shape == "exp" else ", or use kind 'exp', which reaches its floor last")
            + ", or leave `decay` out for 'auto'"
        )
    return None
