"""How hits shall be ranked, as a search says it or a collection's profile: decay, routes, fusion and the stages after it.

No Elasticsearch syntax; names follow Elasticsearch where it has one.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from app.refusals import NAME_PATTERN, PROFILE_PATTERN, invalid
from app.times import DAY_MS, MS, Duration, Instant
from app.values import DEFAULT_WINDOW, MAX_QUERY_CHARS, MAX_ROUTES, MAX_WINDOW, WHOLE, Filter, Text, Value

DecayKind = Literal["exp", "gauss", "linear"]
DecayField = Literal["creation_time", "updated_at", "last_accessed_at"]
Fraction = Annotated[float, Field(ge=0, le=1)]
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*/\s*(d|h|m|s)\s*")


def _rate_per_day(value: Any) -> Any:
    if isinstance(value, str):
        match = _RATE.fullmatch(value)
        if match is None:
            raise invalid("is no rate", "write a number per day, or text with its unit, such as '0.02/h'")
        return float(match[1]) * (DAY_MS / MS[match[2]])
    return value


LEAST_RATE = 1e-27
"""Per day: over the longest duration that the cluster knows this is the least loss that a double tells from none."""
STEEPEST_RAMP = 8.64e7
"""Per day: a linear decay by this rate or a greater one is over within a millisecond, the shortest duration."""

RatePerDay = Annotated[
    float,
    Field(ge=LEAST_RATE, le=1e8),
    BeforeValidator(_rate_per_day),
    WithJsonSchema({
        "anyOf": [
            {"type": "number", "minimum": LEAST_RATE, "maximum": 1e8},
            {"type": "string", "pattern": f"^{_RATE.pattern}$"},
        ],
        "examples": [0.01, "0.02/h"],
    }),
]  # fmt: skip


class DecayStrength(Value):
    """The shape of a decay; every field may be left out, so that a route can override just some of them."""

    kind: DecayKind | None = Field(
        None, description="exp: d^(age/scale); gauss: d^((age/scale)^2); linear: a ramp to 0."
    )
    half_life: Duration | None = Field(
        None, description="Age at which the decay is one half.", examples=["180d"]
    )
    scale: Duration | None = Field(None, description="Age (beyond the offset) at which the decay is `decay`.")
    decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Decay at `scale`; 0.5 if left out."
    )
    rate: RatePerDay | None = Field(
        None,
        description="Per day (or text such as '0.02/h'): exp is exp(-rate*age), linear is 1 - rate*age, for which it is below "
        "8.64e7.",
    )
    hourly_loss: Fraction | None = Field(
        None, description="(1 - hourly_loss)^hours: LangChain's decay_rate; exp only."
    )
    offset: Duration | None = Field(None, description="Age up to which nothing decays.")
    field: DecayField | None = Field(
        None,
        description="The date that ages; `creation_time` if left out. `last_accessed_at` stands for `creation_time` in what was "
        "not read by the origin.",
    )
    floor: Fraction | None = Field(
        None, description="The factor used is floor + (1-floor)*decay; left out: 0.5, on vector routes 0.98."
    )
    missing: Fraction | None = Field(
        None, description="The factor of undated documents; the floor if left out."
    )
    future: Literal["clamp", "symmetric"] | None = Field(
        None,
        description="Dates after the origin: factor 1 (clamp, the default), or as far in the past (symmetric).",
    )

    @model_validator(mode="after")
    def _one_strength(self) -> Self:
        given = [name for name in STRENGTHS if getattr(self, name) is not None]
        if len(given) > 1:
            raise invalid(
                f"gives its strength twice ({', '.join(given)})",
                f"keep exactly one of {', '.join(STRENGTHS)}",
            )
        if self.decay is not None and self.scale is None:
            raise invalid("`decay` is the factor at `scale`", "give `scale` too, or use `half_life`")
        for name in ("half_life", "scale"):
            if getattr(self, name) == 0:
                raise invalid(
                    f"`{name}` must be longer than zero", "write such as '30d', or leave the decay out"
                )
        if self.kind == "gauss" and (self.rate is not None or self.hourly_loss is not None):
            named = "rate" if self.rate is not None else "hourly_loss"
            raise invalid(
                f"`{named}` is a constant rate, which kind 'gauss' does not have",
                "give `half_life`, or `scale` with `decay`, or use kind 'exp'",
            )
        if self.kind == "linear" and (self.rate or 0) >= STEEPEST_RAMP:
            raise invalid(*too_steep(self.rate or 0))
        if self.kind == "linear" and self.hourly_loss is not None:
            raise invalid(
                "`hourly_loss` compounds by the hour, which is exp", "drop `kind`, or use `rate` for a ramp"
            )
        return self


STRENGTHS = ("half_life", "scale", "rate", "hourly_loss")


def unfit(kind: DecayKind | None, *, rate: float | None, hourly_loss: float | None) -> tuple[str, str] | None:
    """Return what is wrong with a route's kind of decay over this strength, and the remedy; None where they fit."""
    if kind == "gauss" and (rate is not None or hourly_loss is not None):
        return (
            "the route's decay is gauss, but the request's strength is a constant rate, which gauss does not have",
            "give the route a `half_life` or a `scale` with `decay`",
        )
    if kind == "linear" and hourly_loss is not None:
        return (
            "the route's decay is linear, but the request's strength is `hourly_loss`, which compounds",
            "give the route a `rate`, a `half_life` or a `scale` with `decay`",
        )
    if kind == "linear" and rate is not None and rate >= STEEPEST_RAMP:
        return too_steep(rate)
    return None


def too_steep(rate: float) -> tuple[str, str]:
    """Return what is wrong with a linear decay by this rate, and the remedy."""
    return (
        f"a linear decay by a `rate` of {rate:g} per day is over within a millisecond",
        "use a `rate` below 8.64e7 per day",
    )


def _some(*names: str) -> dict[str, Any]:
    """Return a schema: one or more of the fields is there, and not null."""
    return {"anyOf": [_present(name) for name in names]}


def _present(name: str) -> dict[str, Any]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class Decay(DecayStrength):
    """How age lowers a score, and where."""

    model_config = ConfigDict(json_schema_extra=_some(*STRENGTHS))

    placement: Literal["route", "fused"] = Field(
        "route",
        description="route: inside each route in the cluster, before fusion; fused: the fused score times the factor.",
    )

    @model_validator(mode="before")
    @classmethod
    def _not_both(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("placement") == "both":
            raise invalid(
                "`placement` can't be 'both', since age would count twice", "choose 'route' or 'fused'"
            )
        return value

    @model_validator(mode="after")
    def _has_strength(self) -> Self:
        if all(getattr(self, name) is None for name in STRENGTHS):
            raise invalid(
                "needs its strength", f"give one of {', '.join(STRENGTHS)}, such as {{'half_life': '180d'}}"
            )
        return self


class ResolvedDecay(Value):
    """A decay as Elasticsearch takes it: no default left open.

    `shape` "step" is the limit of losing everything at once (1 up to the offset, then 0), "none" is no loss.
    """

    shape: Literal["exp", "gauss", "linear", "step", "none"]
    scale_ms: int = Field(DAY_MS, gt=0)
    decay: float = Field(0.5, gt=0, lt=1)
    offset_ms: int = Field(0, ge=0)
    field: DecayField = "creation_time"
    floor: float = Field(0.0, ge=0, le=1)
    missing: float = Field(0.0, ge=0, le=1)
    future: Literal["clamp", "symmetric"] = "clamp"


RouteKind = Literal["text", "vector", "fresh_text", "fresh_vector"]
Off = Literal["off"]


def _decay_or_off(value: Any) -> str:
    return "_off" if isinstance(value, str) else "_decay"


DecayWord = Literal["auto", "off"]
"""Decays that need no figures: none, or what the query and its candidates ask for."""
DecayOrWord = Annotated[
    Annotated[Decay, Tag("_decay")] | Annotated[DecayWord, Tag("_off")], Discriminator(_decay_or_off)
]
StrengthOrOff = Annotated[
    Annotated[DecayStrength, Tag("_decay")] | Annotated[Off, Tag("_off")], Discriminator(_decay_or_off)
]


class Route(Value):
    """One recall query, ranked in the cluster."""

    kind: RouteKind = Field(description="text: BM25; vector: kNN; fresh_*: the same within a date window.")
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=NAME_PATTERN)] | None = Field(
        None,
        description="Its key in the answer; the kind if left out (numbered from the second of a kind on).",
    )
    weight: Annotated[float, Field(ge=0, le=1000)] = Field(
        1.0, description="Multiplies its term in the fusion."
    )
    decay: StrengthOrOff | None = Field(None, description="Overrides parts of the request's decay, or 'off'.")
    window: Duration | None = Field(
        None, description="fresh_* only: how far back its documents reach; '30d' if left out."
    )
    field: DecayField | None = Field(
        None,
        description="fresh_* only: the date of its window; its decay's if left out, where a document that was never read counts "
        "by its `creation_time`.",
    )
    filter: Filter | None = Field(None, description="A further filter for this route alone.")
    query: Annotated[Text, Field(min_length=1, max_length=MAX_QUERY_CHARS)] | None = Field(
        None, description="Other words for this route, such as a rewritten query; the request's if left out."
    )
    num_candidates: Annotated[int, Field(ge=1, le=10_000), WHOLE] | None = Field(
        None, description="Vector routes: candidates per shard; at least the window."
    )
    title_boost: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None,
        description="Text routes: what a word in the title weighs against one in the text; 1.5 if left out.",
    )

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        fresh = self.kind.startswith("fresh_")
        if not fresh and self.window is not None:
            raise invalid(
                f"`window` belongs to fresh_text and fresh_vector, not to '{self.kind}'",
                f"use kind 'fresh_{self.kind}'",
            )
        if not fresh and self.field is not None:
            raise invalid(
                f"`field` belongs to fresh_text and fresh_vector, not to '{self.kind}'",
                f"drop it, or use kind 'fresh_{self.kind}'",
            )
        if self.window == 0:
            raise invalid("`window` must be longer than zero", "write such as '7d', or leave it out for 30d")
        if self.num_candidates is not None and not self.kind.endswith("vector"):
            raise invalid(f"`num_candidates` belongs to vector routes, not to '{self.kind}'", "drop it")
        if self.title_boost is not None and self.kind.endswith("vector"):
            raise invalid(
                f"`title_boost` belongs to text routes, not to '{self.kind}'",
                "drop it, vectors hold the title already",
            )
        return self


class Fusion(Value):
    """How the routes' lists become one."""

    method: Literal["adaptive", "rrf", "linear", "additive"] = Field(
        "adaptive",
        description=(
            "adaptive: sum of normalised scores, each route's weight times its confidence in this query, and less for what "
            "words alone found while the vectors had no room for it; rrf: sum of "
            "weight/(rank_constant+rank), meant where only `rank_constant` is given; linear: weighted sum of "
            "normalised scores; additive: relevance + salience + recency, the time-weighted memory's score."
        ),
    )
    rank_constant: Annotated[float, Field(ge=1, le=1e6)] = Field(60, description="rrf only.")
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW), WHOLE] | None = Field(
        None,
        description=f"Ranks of each route that count; {DEFAULT_WINDOW} if left out. Where the request leaves it out, "
        "`top_k` may be more: longer lists (twice the window, four times, …) fill the page, each ranked by its own, behind all "
        "that comes before, and no stage after fusion works on these hits. Their `routes` tell ranks beyond the window; their "
        "`score` is what the longer lists give, but no more than the score of the last hit before them.",
    )
    normalizer: Literal["zscore", "minmax"] | None = Field(
        None, description="linear only; 'zscore' if left out."
    )
    weights: (
        dict[Literal["relevance", "salience", "recency"], Annotated[float, Field(ge=0, le=1000)]] | None
    ) = Field(None, description="additive only; 1 each if left out.")

    @model_validator(mode="before")
    @classmethod
    def _told_by_its_parts(cls, given: Any) -> Any:
        # Only one method has a rank constant: whoever names it need not name the method.
        if isinstance(given, dict) and "rank_constant" in given and "method" not in given:
            return {"method": "rrf", **given}
        return given

    @model_validator(mode="after")
    def _fits_method(self) -> Self:
        if "rank_constant" in self.model_fields_set and self.method != "rrf":
            raise invalid(f"`rank_constant` belongs to method 'rrf', not '{self.method}'", "drop one of them")
        if self.normalizer is not None and self.method != "linear":
            raise invalid(f"`normalizer` belongs to method 'linear', not '{self.method}'", "drop one of them")
        if self.weights is not None and self.method != "additive":
            raise invalid(
                "`weights` belongs to method 'additive'",
                f"give each route its own `weight` for '{self.method}'",
            )
        return self

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        # What is written out can be read again: no other method may have a rank constant.
        return {
            key: value
            for key, value in handler(self).items()
            if key != "rank_constant" or self.method == "rrf"
        }


class Rerank(Value):
    """Let a cross-encoder reorder the head of the fused list."""

    candidates: Annotated[int, Field(ge=1, le=1000), WHOLE] = Field(
        50,
        description="Fused hits it reads; the answer ends with them. If left out, 50, or `top_n` where that is more.",
    )
    top_n: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = Field(
        None, description="Hits kept; all candidates if left out, so that pages go through them."
    )
    min_score: float | None = Field(None, description="Least score kept, on the reranker's own scale.")
    decay: bool = Field(True, description="Multiply the normalised rerank score by the decay factor.")

    @model_validator(mode="before")
    @classmethod
    def _read_what_is_kept(cls, given: Any) -> Any:
        if isinstance(given, dict) and "candidates" not in given and isinstance(given.get("top_n"), int):
            least: int = cls.model_fields["candidates"].default
            if given["top_n"] > least:
                return {**given, "candidates": min(given["top_n"], 1000)}
        return given


class Dedup(Value):
    """Drop hits that say what a kept hit says already."""

    threshold: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="Cosine of stored vectors from which two are one."
    )
    keep: Literal["higher", "newer"] = Field("higher", description="Which of two near duplicates stays.")


class Mmr(Value):
    """Maximal marginal relevance: trade relevance against repetition."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    # Evidence: docs/relevance.md, "MMR". 0.5, which others begin with, costs 38 % of nDCG@10 on medline, 0.8 costs 5 %.
    lambda_: Fraction = Field(
        0.8,
        alias="lambda",
        description="1: relevance alone; 0: difference alone. Cosines lie close together, so that 0.5 brings in what hardly "
        "fits.",
    )
    candidates: Annotated[int, Field(ge=1, le=1000), WHOLE] = Field(
        50, description="Fused hits it chooses from."
    )


def has_strength(decay: DecayStrength) -> bool:
    """Tell whether it says how fast age counts, and so stands by itself."""
    return any(getattr(decay, name) is not None for name in STRENGTHS)


def check_routes(routes: list[Route] | None, decay: Decay | DecayWord | None) -> None:
    names = [route.name for route in routes or [] if route.name is not None]
    if len(names) != len(set(names)):
        raise invalid("two `routes` have the same `name`, which is a key of the answer", "give each its own")
    if isinstance(decay, Decay) and decay.placement == "fused" and any(route.decay for route in routes or []):
        raise invalid(
            "`routes[].decay` belongs to placement 'route', since with 'fused' one factor multiplies the fused score",
            "drop it, or the placement",
        )
    if decay == "auto" and any(isinstance(route.decay, DecayStrength) for route in routes or []):
        raise invalid(
            "`decay` is 'auto', which decides by itself, but a route has a decay of its own",
            "drop one of them",
        )
    if decay == "off" and any(isinstance(route.decay, DecayStrength) for route in routes or []):
        raise invalid(
            "`decay` is 'off' but a route overrides it", "give the request a decay, or drop the route's"
        )


def check_stages(rerank: Rerank | None, mmr: Mmr | None) -> None:
    if rerank and mmr:
        raise invalid("`rerank` and `mmr` both order the head", "choose one")
    if rerank and rerank.top_n is not None and rerank.top_n > rerank.candidates:
        raise invalid("`rerank.top_n` is more than `rerank.candidates`", "lower it, or raise those")


class FeedbackOptions(Value):
    """Let what callers made of earlier hits count; see `POST /v1/feedback`."""

    strength: Annotated[float, Field(gt=0, le=0.3)] = Field(
        0.2,
        description="The fused score is multiplied by a factor within 1 - strength and 1 + strength.",
    )
    as_of: Instant | None = Field(
        None, description="Votes up to then count; up to the search's `as_of`, else about now, if left out."
    )


def _feedback_or_off(value: Any) -> str:
    return "_feedback_off" if isinstance(value, str) else "_feedback"


FeedbackOrOff = Annotated[
    Annotated[FeedbackOptions, Tag("_feedback")] | Annotated[Off, Tag("_feedback_off")],
    Discriminator(_feedback_or_off),
]


def or_off(value: Any) -> Any:
    return None if value == "off" else value


def _with_off(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [*schema.get("anyOf", ()), {"const": "off"}]


CanBeOff = Field(json_schema_extra=_with_off)
"""Of an option that a profile may bring: 'off' or null overrule it."""


class Profile(Value):
    """A named way of ranking, stored with a collection: what a request leaves out is taken from it."""

    decay: DecayOrWord | None = None
    routes: Annotated[list[Route], Field(min_length=1, max_length=MAX_ROUTES)] | None = None
    fusion: Fusion | None = None
    feedback: FeedbackOrOff | None = None
    min_relevance: Fraction | None = None
    rerank: Rerank | None = Field(
        None, description="Skipped, with a warning, by a service that has no reranker."
    )
    dedup: Dedup | None = None
    mmr: Mmr | None = None
    fold_superseded: bool | None = Field(None, description="Where a search's decay is 'auto'.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        check_routes(self.routes, self.decay)
        for at, route in enumerate(self.routes or []):
            if isinstance(self.decay, Decay) and isinstance(route.decay, DecayStrength):
                strength = route.decay if has_strength(route.decay) else self.decay
                kind = route.decay.kind or self.decay.kind
                fault = unfit(kind, rate=strength.rate, hourly_loss=strength.hourly_loss)
                if fault is not None:
                    raise invalid(f"`routes[{at}].decay` does not fit `decay`: {fault[0]}", fault[1])
        check_stages(self.rerank, self.mmr)
        if self.fold_superseded and self.decay not in (None, "auto"):
            raise invalid(
                "`fold_superseded` is set, but only decay 'auto' finds what is superseded",
                "make `decay` 'auto', or drop it",
            )
        return self


def stored_profiles(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return profiles as they were stored or exported, by name, in the form that `Profile` reads.

    Releases up to 0.1 wrote the rank constant of 'rrf' beside every method, which is refused where a caller does so.
    """
    found = {}
    for name, profile in told.items():
        fusion = profile.get("fusion") if isinstance(profile, Mapping) else None
        if isinstance(fusion, Mapping) and fusion.get("method", "rrf") != "rrf":
            kept = {key: value for key, value in fusion.items() if key != "rank_constant"}
            found[name] = {**profile, "fusion": kept}
        else:
            found[name] = profile
    return found


STAGES = ("min_relevance", "rerank", "dedup", "mmr", "fold_superseded")
"""What a profile may give beside decay, routes, fusion and feedback."""


ProfileName = Annotated[str, Field(min_length=1, max_length=64, pattern=PROFILE_PATTERN)]


class Arm(Value):
    """One side of an experiment."""

    profile: ProfileName = Field(description="The profile that ranks its searches.")
    percent: Annotated[float, Field(ge=0, le=100)] = Field(description="Its share of the searches.")
    name: ProfileName | None = Field(
        None, description="What answers and log call it; the profile if left out."
    )


class Experiment(Value):
    """Profiles side by side: each subject, key or request gets one of them, the same each time."""

    name: ProfileName = Field(description="Another name deals the arms anew.", examples=["decay-2026-02"])
    arms: Annotated[list[Arm], Field(min_length=1, max_length=16)]
    by: Literal["subject", "key", "request"] = Field(
        "subject",
        description="What is dealt an arm: the request's `subject`, the caller's key, or each request by itself. A search "
        "that lacks it, or names its `profile`, is in no arm.",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        total = math.fsum(arm.percent for arm in self.arms)
        if abs(total - 100) > 1e-6:
            raise invalid(f"the `percent` of `arms` add up to {total:.10g}", "make them 100")
        named = [arm.name or arm.profile for arm in self.arms]
        if len(named) != len(set(named)):
            raise invalid("two `arms` have the same name", "give one a `name` of its own")
        return self


class Ranked(Value):
    """Which profile ranked a search, and as which arm of which experiment, where one chose it."""

    name: ProfileName
    experiment: ProfileName | None = None
    arm: ProfileName | None = None

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}
