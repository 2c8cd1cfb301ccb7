"""The values that callers send and get: frozen, refusing unknown fields, with units, ranges and defaults.

No clock, no network, no Elasticsearch syntax. Names follow Elasticsearch where it has one.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)

from app import fields
from app.refusals import INTERVAL_PATTERN, KEY_PATTERN, NAME_PATTERN, PROFILE_PATTERN, invalid
from app.times import DAY_MS, MS, Duration, Instant

MAX_ID_BYTES = 512
MAX_QUERY_CHARS = 10_000
MAX_TOP_K = 10_000
MAX_WINDOW = 10_000
MAX_QUERIES = 100
MAX_ITEMS = 10_000
MAX_ROUTES = 16
MAX_FILTER_DEPTH = 8
MAX_FILTER_TERMS = 4_096
MAX_KEYWORD_CHARS = 1_024
MAX_TEXT_CHARS = 5_000_000
MAX_TITLE_CHARS = 2_000
MAX_VECTOR_DIMS = 4_096
MAX_FLOAT = 3.4e38
"""About the largest 32-bit float."""
DEFAULT_WINDOW = 100


class Value(BaseModel):
    """A frozen value that refuses unknown fields, and values of another JSON type: `"5"` is no number, 1 not true."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


def _whole(value: Any) -> Any:
    # JSON has one kind of number: 5.0 is the whole number 5, as JSON Schema's "integer" has it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Behind the range of an `int`, so that the schema tells the range."""


def _clean_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(
            "holds a lone surrogate, which is not valid Unicode", "send well-formed UTF-8"
        ) from None
    return value


Text = Annotated[str, AfterValidator(_clean_text)]


def _check_id(value: str) -> str:
    _clean_text(value)
    size = len(value.encode())
    if size == 0 or size > MAX_ID_BYTES:
        raise invalid(
            f"an id is 1 to {MAX_ID_BYTES} bytes of UTF-8, and this one has {size}", "write another"
        )
    if value == "..":
        raise invalid(
            "'..' can't be an id, since URLs drop it and a DELETE would reach what stands above the document",
            "write another",
        )
    return value


DocumentId = Annotated[
    str,
    AfterValidator(_check_id),
    WithJsonSchema({
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_ID_BYTES,
        "not": {"const": ".."},
        "description": f"1 to {MAX_ID_BYTES} bytes of UTF-8.",
    }),
]  # fmt: skip

_COLLECTION = re.compile(r"[a-z0-9][a-z0-9_]*(?:-[a-z0-9_]+)*")
_RESERVED_COLLECTION = re.compile(r".*-(?:\d{14,}|w-\d+-[ab])|.*-w-\d+-[ab]|w-\d+-[ab]|\d{14,}")


def check_collection(value: str) -> str:
    """Return the name if its alias, indices and write aliases can't be confused with another collection's."""
    if len(value) > 100 or not _COLLECTION.fullmatch(value) or _RESERVED_COLLECTION.fullmatch(value):
        raise invalid(
            "a collection's name is 1 to 100 lower-case letters, digits, '_' and single '-' between them, and does "
            "not end like an index of ours ('-20260131000000', '-w-1-a')",
            "write such a name",
        )
    return value


CollectionName = Annotated[
    str,
    AfterValidator(check_collection),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": 100, "pattern": f"^{_COLLECTION.pattern}$", "not": {"pattern": f"^({_RESERVED_COLLECTION.pattern})$"}, "examples": ["handbook"]}),
]  # fmt: skip

Filter = Annotated[
    dict[str, Any],
    Field(
        description=(
            "Field or metadata key -> a value, a list of values (any of them), or an object of operators "
            "(gt, gte, lt, lte, in, ne, exists); `and` / `or` take lists of filters, `not` takes one. "
            "Ranges need a date field or a field declared for the collection."
        ),
        examples=[{"lang": "en", "creation_time": {"gte": "2025-01-01"}, "not": {"tags": "draft"}}],
    ),
]


# --- decay ---------------------------------------------------------------------------------------------------

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


RatePerDay = Annotated[
    float,
    Field(gt=0, le=1e8),
    BeforeValidator(_rate_per_day),
    WithJsonSchema({
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1e8},
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
        description="Per day (or text such as '0.02/h'): exp is exp(-rate*age), linear is 1 - rate*age.",
    )
    hourly_loss: Fraction | None = Field(
        None, description="(1 - hourly_loss)^hours: LangChain's decay_rate; exp only."
    )
    offset: Duration | None = Field(None, description="Age up to which nothing decays.")
    field: DecayField | None = Field(None, description="The date that ages; `creation_time` if left out.")
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
        if self.kind == "linear" and self.hourly_loss is not None:
            raise invalid(
                "`hourly_loss` compounds by the hour, which is exp", "drop `kind`, or use `rate` for a ramp"
            )
        return self


STRENGTHS = ("half_life", "scale", "rate", "hourly_loss")


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


# --- routes, fusion, stages after it -----------------------------------------------------------------------------

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
        None, description="fresh_* only: the date of its window; the decay's if left out."
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
        None, description=f"Ranks of each route that count; {DEFAULT_WINDOW} if left out."
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

    candidates: Annotated[int, Field(ge=1, le=1000), WHOLE] = Field(50, description="Fused hits it reads.")
    top_n: Annotated[int, Field(ge=1, le=1000), WHOLE] | None = Field(
        None, description="Hits kept; all candidates if left out, so that pages go through them."
    )
    min_score: float | None = Field(None, description="Least score kept, on the reranker's own scale.")
    decay: bool = Field(True, description="Multiply the normalised rerank score by the decay factor.")


class Highlight(Value):
    """How marked fragments are written."""

    encoder: Literal["html", "default"] = Field(
        "html",
        description="html: `<`, `>`, `&` and quotes of the document are escaped, so that the marks alone are HTML; "
        "default: as stored.",
    )


def _highlight_form(value: Any) -> str:
    return "_options" if isinstance(value, dict | Highlight) else "_flag"


def _explain_form(value: Any) -> str:
    return "_word" if isinstance(value, str) else "_flag"


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


def _check_routes(routes: list[Route] | None, decay: Decay | DecayWord | None) -> None:
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


def _check_stages(rerank: Rerank | None, mmr: Mmr | None) -> None:
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
    as_of: Instant | None = Field(None, description="Votes up to then count; about now if left out.")


def _feedback_or_off(value: Any) -> str:
    return "_feedback_off" if isinstance(value, str) else "_feedback"


FeedbackOrOff = Annotated[
    Annotated[FeedbackOptions, Tag("_feedback")] | Annotated[Off, Tag("_feedback_off")],
    Discriminator(_feedback_or_off),
]


def _or_off(value: Any) -> Any:
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
        _check_routes(self.routes, self.decay)
        _check_stages(self.rerank, self.mmr)
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
            profile = {**profile, "fusion": kept}  # noqa: PLW2901
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


def _vector(value: list[float]) -> list[float]:
    if not value or len(value) > MAX_VECTOR_DIMS:
        raise invalid(
            f"has not 1 to {MAX_VECTOR_DIMS} numbers",
            "send the vector of the collection's model, or leave it out",
        )
    numbers = np.asarray(value, dtype=np.float64)
    if not (np.abs(numbers) <= MAX_FLOAT).all():  # NaN compares as false
        raise invalid("holds what is no finite 32-bit float", "embed the text anew, or leave the vector out")
    if np.linalg.norm(numbers) < 1e-15:
        raise invalid("is a zero vector, which has no direction and so no cosine", "leave it out")
    return value


Vector = Annotated[
    list[float],
    AfterValidator(_vector),
    WithJsonSchema({
        "type": "array",
        "items": {"type": "number", "minimum": -MAX_FLOAT, "maximum": MAX_FLOAT},
        "minItems": 1,
        "maxItems": MAX_VECTOR_DIMS,
        "contains": {"not": {"const": 0}},
    }),
]  # fmt: skip


NOT_BLANK = r"[^\s\u0000\u001c-\u001f\u0085]"
"""As a pattern in the schema: some character is neither white space nor NUL."""


class Query(Value):
    """What is looked for: the part of a search that differs between the queries of a batch."""

    query: Annotated[Text, Field(max_length=MAX_QUERY_CHARS)] = Field(
        description="The question or keywords, as typed.",
        examples=["how long may I carry over leave?"],
        json_schema_extra={"pattern": NOT_BLANK, "minLength": 1},
    )
    query_vector: Vector | None = Field(
        None,
        description="The embedding of `query`, if the caller has it; of the collection's dims. Vector routes with other "
        "words of their own are refused beside it, since those would be embedded here.",
    )
    filter: Filter | None = None
    as_of: Instant | None = Field(
        None,
        description="The origin of decay and age; now if left out. Where it is given, documents created after it are hidden.",
    )
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K), WHOLE] = Field(10, description="Hits on one page.")

    @model_validator(mode="after")
    def _not_blank(self) -> Self:
        if not self.query.replace("\0", " ").strip():
            raise invalid(
                "`query` is blank",
                "write words, or list documents with GET /v1/collections/{collection}/documents",
            )
        return self


HIT_NAMES = (
    fields.TITLE,
    fields.TEXT,
    fields.METADATA,
    fields.CREATION_TIME,
    *fields.KEYWORDS,
    *fields.DATES[1:],
    fields.SALIENCE,
)
"""What `fields` of a search may name."""
HitName = Annotated[str, Field(max_length=256), WithJsonSchema({"type": "string", "enum": list(HIT_NAMES)})]


MAX_REWRITE_QUERIES = 4


class RewriteOptions(Value):
    """What a chat model shall make of the query; each part becomes routes of its own."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["keywords"], "properties": {"keywords": {"const": True}}},
                {"required": ["expansion"], "properties": {"expansion": {"const": True}}},
                {"required": ["queries"], "properties": {"queries": {"minimum": 1}}},
            ]
        }
    )

    keywords: bool = Field(False, description="A text route of the words that matter.")
    expansion: bool = Field(False, description="A text route of other words that documents may use.")
    queries: Annotated[int, Field(ge=0, le=MAX_REWRITE_QUERIES), WHOLE] = Field(
        0, description="So many other ways to ask, a route of each kind that the search has for each."
    )
    weight: Annotated[float, Field(gt=0, le=1000)] = Field(0.5, description="Of each route that it adds.")

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.keywords or self.expansion or self.queries):
            raise invalid(
                "asks for nothing", "set `keywords` or `expansion` to true, or `queries` to a number"
            )
        return self


class Search(Query):
    """One search, whole."""

    collection: CollectionName
    decay: DecayOrWord | None = Field(
        None,
        description="How age lowers scores. 'auto': only between documents that say the same thing, around a time that the "
        "query names, or, where the best hits are news, for all; the answer's `recency` tells which. Left out: the "
        "collection's ranking profile, else 'auto'.",
    )
    fold_superseded: bool = Field(
        False,
        description="With decay 'auto': leave out the hits that a newer one supersedes, and name them in its `supersedes`. Left "
        "out: the profile's. "
        "Refused beside another `decay`, since nothing is superseded then.",
    )
    profile: ProfileName | None = Field(
        None,
        description="A ranking profile of the collection; that of its experiment's arm, else its default one if left out.",
    )
    subject: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="Whom the search is for, as the caller likes to name them: an experiment by subject gives one subject the "
        "same arm each time. Not stored.",
    )
    routes: Annotated[list[Route], Field(min_length=1, max_length=MAX_ROUTES)] | None = Field(
        None, description="The recall queries; the profile's, else `text` and `vector` if left out."
    )
    fusion: Fusion | None = None
    feedback: FeedbackOrOff | None = Field(
        None,
        description="Whether votes on earlier hits count: an object, or 'off'; left out: the profile's, else off.",
    )
    min_relevance: Annotated[Fraction | None, BeforeValidator(_or_off), CanBeOff] = Field(
        None,
        description="Least cosine of a hit, applied in the cluster. Its scale is the model's. With multilingual-e5-small the "
        "best hit has 0.83 to 0.92 where something answers the question, 0.80 to 0.85 where nothing does: begin with 0.84; "
        "0.5 cuts nothing. To find one, ask a few questions that nothing answers, and take more than the best `relevance` "
        "they get. Left out: the profile's; 'off': none.",
        examples=[0.84],
    )
    rerank: Annotated[Rerank | None, BeforeValidator(_or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    dedup: Annotated[Dedup | None, BeforeValidator(_or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    mmr: Annotated[Mmr | None, BeforeValidator(_or_off), CanBeOff] = Field(
        None, description="Left out: the profile's; 'off': none."
    )
    collapse: bool = Field(True, description="One hit per document (its best chunk); false: one per chunk.")
    neighbours: Annotated[int, Field(ge=0, le=20), WHOLE] = Field(
        0, description="Chunks before and after the best one that `text` includes."
    )
    valid_time: Literal["only", "any"] = Field(
        "only",
        description="only: documents with start_date/end_date must be true at the origin; any: they need not.",
    )
    rewrite: RewriteOptions | None = Field(
        None, description="Let a chat model widen the search; refused where none is configured."
    )
    suggest: bool | None = Field(
        None,
        description="Spelling suggestions: true: always looked for; false: never; left out: where a text route finds nothing.",
    )
    synonyms: bool = Field(
        True, description="Let the collection's synonyms widen what the text routes look for."
    )
    highlight: Annotated[
        Annotated[Highlight, Tag("_options")] | Annotated[bool, Tag("_flag")], Discriminator(_highlight_form)
    ] = Field(
        False,
        description="Mark the text route's terms in title and text with `<em>`; HTML of the document is escaped unless "
        "{'encoder': 'default'} asks for it as stored.",
    )
    fields: Annotated[list[HitName], Field(max_length=64)] | None = Field(
        None,
        description="Which of the document's own fields a hit carries ('title', 'metadata', 'tags', …); all if left out.",
    )
    include_embedding: bool = Field(False, description="Add the stored vector of the hit's chunk.")
    explain: Annotated[
        Annotated[Literal["cluster"], Tag("_word")] | Annotated[bool, Tag("_flag")],
        Discriminator(_explain_form),
    ] = Field(
        False,
        description="true: add what costs more, missed routes' figures and the request bodies for Kibana; 'cluster': "
        "Elasticsearch's own account of each score too, for the page's first 10 documents.",
    )
    touch: bool = Field(
        False,
        description="Set `last_accessed_at` of the returned documents to the origin, in the background and never back in "
        "time; refused for an `as_of` further ahead of the service's clock than HALFLIFE_TOUCH_AHEAD_S (a year).",
    )
    paging: bool = Field(True, description="false: no cursor, and no point in time is held open.")
    strict: bool = Field(False, description="Answer an error rather than a degraded result.")
    timeout_ms: Annotated[int, Field(ge=50, le=60_000), WHOLE] | None = Field(
        None, description="Time budget of this request; the service's own where that is shorter."
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        _check_routes(self.routes, self.decay)
        window = self.fusion.window if self.fusion else None
        if window is not None and self.top_k > window:
            raise invalid(f"`top_k` {self.top_k} is more than `fusion.window` {window}", "raise the window")
        unknown = [name for name in self.fields or [] if name not in HIT_NAMES]
        if unknown:
            raise invalid(
                f"`fields` names '{unknown[0][:40]}', which no hit has", f"choose from {', '.join(HIT_NAMES)}"
            )
        if self.fold_superseded and self.decay not in (None, "auto"):
            raise invalid(
                "`fold_superseded` is set, but only decay 'auto' finds what is superseded",
                "ask for `decay`: 'auto', or drop it",
            )
        if self.fold_superseded and not self.collapse:
            raise invalid("`fold_superseded` compares documents, not chunks", "drop it, or `collapse`: false")
        _check_stages(self.rerank, self.mmr)
        return self


class Rewriting(Value):
    """What a chat model made of a query."""

    keywords: list[str] = Field(default_factory=list)
    expansion: list[str] = Field(default_factory=list)
    queries: list[str] = Field(default_factory=list)


class Suggestion(Value):
    """The query with words spelled as the collection has them."""

    text: str
    score: float = Field(description="How alike the replaced words are, from 0 to 1.")


class Wording(Value):
    """Another wording of a query; a document must hold each of its `terms`, as a phrase where they are of several words."""

    query: str
    terms: list[str]


class Rewrite(Value):
    """What was searched for beside the query's own words, and where it comes from."""

    source: Literal["synonyms", "model"]
    kind: Literal["synonyms", "keywords", "expansion", "query"]
    of: str = Field(description="What it was made of: a term of the query, or the query.")
    texts: list[str] = Field(description="What was searched for too.")
    rules: list[str] | None = Field(None, description="synonyms: the rules that say so.")
    routes: list[str] | None = Field(None, description="model: the routes that it added.")

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class SearchBatch(Value):
    """Several queries of one collection, answered in order; what is common to them stands beside the list."""

    model_config = ConfigDict(extra="allow")

    queries: Annotated[list[Any], Field(min_length=1, max_length=MAX_QUERIES)] = Field(
        description="Objects with `query` and whatever else differs; each may also carry any other search field.",
        json_schema_extra={"items": {"$ref": "#/components/schemas/Query"}},
    )


class NextPage(Value):
    """The page after the one that gave this cursor."""

    cursor: Annotated[str, Field(min_length=1, max_length=65_536)]


class FeedbackItem(Value):
    """What became of one hit."""

    id: DocumentId = Field(description="A document that the search returned.")
    verdict: Literal["clicked", "ignored", "helpful", "unhelpful"] = Field(
        description="clicked, ignored: what was done with it, weighed by its rank; helpful, unhelpful: a judgement."
    )


class Feedback(Value):
    """What a caller made of the hits of one logged search."""

    search_id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")] = Field(
        description="As the search's answer told it.", examples=["20260131-6f1d0c1a9b7e4f5d8a3b2c1d"]
    )
    items: Annotated[list[Any], Field(min_length=1, max_length=1000)] = Field(
        json_schema_extra={"items": {"$ref": "#/components/schemas/FeedbackItem"}},
    )
    user: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description=(
            "Whom the caller speaks for, as it likes to name them; stored as a keyed hash. One vote counts per user "
            "(or caller, if left out), search and document."
        ),
    )


class Why(Search):
    """A search, and a document to account for in it."""

    id: DocumentId = Field(description="The document whose place in this search's result is asked about.")


class WhyRoute(Value):
    """How one route sees the document."""

    matches: bool
    rank: int | None = Field(
        None, description="Its place in the whole collection under this route's filter, from 1."
    )
    rank_relation: Literal["eq", "gte"] = Field(
        "eq", description="gte: it lies at this rank or further down."
    )
    in_window: bool = False
    score: float | None = None
    decay: float | None = None
    decayed_score: float | None = None
    contribution: float = 0.0
    rank_if_current: int | None = Field(
        None, description="The rank it would have if its own decay factor were 1."
    )
    note: str | None = Field(None, description="Why the route does not find it, or adds nothing.")


class WhyStage(Value):
    """What a stage after fusion did with the document."""

    before: int | None = Field(None, description="Its place in the list that the stage was given, from 1.")
    after: int | None = Field(
        None, description="Its place in the stage's result; null where it is not in it."
    )
    score: float | None = Field(None, description="rerank: the reranker's score of it, on its own scale.")
    note: str


class WhyChunk(Value):
    """Where one chunk of the document stands, in a search that does not collapse hits."""

    number: int
    fused_rank: int
    rank: int | None = Field(
        description="Its place after the stages that follow fusion; null if one dropped it."
    )
    score: float
    routes: dict[str, int] = Field(description="Its rank in the routes that list it.")


class WhyResult(Value):
    """Why a document stands where it stands, or is not there."""

    id: str
    origin: Instant
    exists: bool
    excluded_by: list[str] = Field(description="What keeps it out altogether; empty where it can be found.")
    title: str | None = None
    creation_time: Instant | None = None
    age_days: float | None = None
    evergreen: bool = False
    relevance: float | None = None
    decay: float | None = None
    routes: dict[str, WhyRoute]
    fused_rank: int | None = Field(
        None, description="Its place in the fused list; null where it is not in it."
    )
    fused_score: float | None = Field(
        None, description="Its fused score; what it would be without a window if it is not in it."
    )
    stages: dict[Literal["rerank", "recency", "dedup", "mmr"], WhyStage] = Field(
        default_factory=dict, description="What the search's stages after fusion did with it, in their order."
    )
    chunks: list[WhyChunk] | None = Field(
        None, description="With `collapse` false: its chunks in the fused list, best first."
    )
    rank: int | None = Field(
        None, description="Its place in the whole answer, after every stage; null where it is not in it."
    )
    top_k: int
    page_score: float | None = Field(None, description="The score of the last hit on the first page.")
    on_page: bool
    what_it_takes: list[str] = Field(description="What would bring it onto the first page.")
    profile: Ranked | None = Field(
        None, description="Which profile ranks this search, and the arm that chose it; null where none does."
    )
    warnings: list[str] = Field(default_factory=list)


# --- documents ---------------------------------------------------------------------------------------------------

Keyword = Annotated[Text, Field(min_length=1, max_length=MAX_KEYWORD_CHARS)]
Revision = Annotated[int, Field(ge=1, le=2**62), WHOLE]


NUMBERS_BELOW = 10**999
"""Elasticsearch reads no number of more than 1000 characters, its sign included."""


def _check_metadata(value: dict[str, Any]) -> dict[str, Any]:
    stack: list[tuple[Any, int, str]] = [(value, 1, "metadata")]
    seen = 0
    while stack:
        node, depth, path = stack.pop()
        seen += 1
        if seen > 10_000:
            raise invalid(
                "metadata holds more than 10000 values",
                "store what is not filtered by in the text, or elsewhere",
            )
        if isinstance(node, dict):
            if depth > 16:
                raise invalid(f"{path[:80]} is nested deeper than 16 levels", "flatten it")
            for key, child in node.items():
                if "\0" in key or len(key.encode(errors="replace")) > 256:
                    raise invalid(
                        f"the key '{key[:40]!r}' in {path[:80]} holds NUL or is longer than 256 bytes",
                        "rename it",
                    )
                _clean_text(key)
                stack.append((child, depth + 1, f"{path}.{key}"))
        elif isinstance(node, list):
            stack.extend((child, depth, path) for child in node)
            if depth > 16:
                raise invalid(f"{path[:80]} is nested deeper than 16 levels", "flatten it")
            depth += 1
        elif isinstance(node, str):
            _clean_text(node)
        elif isinstance(node, float) and not math.isfinite(node):
            raise invalid(f"{path[:80]} is not a finite number", "leave it out, or write it as text")
        elif isinstance(node, int) and abs(node) >= NUMBERS_BELOW:
            raise invalid(f"{path[:80]} is a number of 1000 digits or more", "write it as text")
    return value


class DocumentFields(Value):
    """What a caller may say about a document beside its text; each is stored as sent and can be filtered by."""

    creation_time: Instant | None = Field(None, description="When it was made; undated if left out.")
    updated_at: Instant | None = Field(None, description="When it was last changed.")
    last_accessed_at: Instant | None = Field(None, description="When it was last read (memory mode).")
    start_date: Instant | None = Field(None, description="From when on it is true.")
    end_date: Instant | None = Field(None, description="Until when (exclusive) it is true.")
    expires_at: Instant | None = Field(
        None, description="From when on searches skip it and a purge may remove it."
    )
    evergreen: bool = Field(False, description="Never decays.")
    salience: Annotated[float, Field(ge=0, le=1e6)] | None = Field(
        None, description="Importance, for additive memory scores."
    )
    source: Keyword | None = None
    source_id: Keyword | None = None
    url: Keyword | None = None
    author: Keyword | None = None
    tags: Annotated[list[Keyword], Field(max_length=256)] | None = None
    lang: Keyword | None = Field(None, examples=["en", "zh"])
    document_type: Keyword | None = None
    department: Keyword | None = None
    region: Keyword | None = None
    product_version: Keyword | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_check_metadata)] = Field(
        default_factory=dict, description="Anything; returned as sent, filtered by key."
    )


NOT_EMPTY = r"[^\s\u001c-\u001f\u0085]"
"""As a pattern in the schema: some character is not white space."""


class Document(DocumentFields):
    """A document as upserted."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"pattern": NOT_EMPTY}}}
                for name in ("text", "title")
            ]
        }
    )

    id: DocumentId = Field(examples=["leave-2026"])
    title: Annotated[Text, Field(max_length=MAX_TITLE_CHARS)] = ""
    text: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)] = Field(
        "", description="May be empty where the title is not."
    )
    embedding: Vector | None = Field(
        None,
        description="Its vector, if the caller has it (one chunk then); null: store without one; left out: embed it.",
    )
    revision: Revision | None = Field(
        None, description="The caller's own growing number; an older one than stored is refused (409)."
    )
    if_version: Revision | None = Field(None, description="Write only if the stored `version` is this one.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.text.strip() and not self.title.strip():
            raise invalid(
                "`text` and `title` are blank, so that there is nothing to find it by", "write one of them"
            )
        if self.revision is not None and self.if_version is not None:
            raise invalid("`revision` and `if_version` are two ways to guard a write", "choose one")
        if self.start_date is not None and self.end_date is not None and self.end_date <= self.start_date:
            raise invalid(
                "`end_date` is not after `start_date`, so it would never be true", "correct one of them"
            )
        return self


def _clearable(schema: dict[str, Any]) -> None:
    """Say that null clears `evergreen` and `metadata` too, and that a patch names something to change."""
    for name in ("evergreen", "metadata"):
        field = schema["properties"][name]
        field["type"] = [field["type"], "null"]
    schema |= {"minProperties": 2, "dependentSchemas": {"if_version": {"minProperties": 3}}}


class DocumentPatch(DocumentFields):
    """Fields of a stored document to change without embedding it again; null clears one."""

    model_config = ConfigDict(json_schema_extra=_clearable)

    id: DocumentId
    if_version: Revision | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_clears(cls, value: Any) -> Any:
        cleared = {"metadata": {}, "evergreen": False}
        if isinstance(value, dict) and any(name in value and value[name] is None for name in cleared):
            return {
                **value,
                **{name: empty for name, empty in cleared.items() if name in value and value[name] is None},
            }
        return value

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_fields_set - {"id", "if_version"}:
            raise invalid("changes nothing", "name a field")
        return self


Refresh = Annotated[
    Literal["false", "true", "wait_for"],
    BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value),
    WithJsonSchema({"enum": [False, True, "false", "true", "wait_for"], "default": False}),
]


class PatchDocuments(Value):
    """Documents to change in part."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        json_schema_extra={"items": {"$ref": "#/components/schemas/DocumentPatch"}},
    )
    refresh: Refresh = "false"


class DeleteDocuments(Value):
    """What to delete: ids, or a filter, or everything."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["ids"], "properties": {"ids": {"type": "array"}}},
                {"required": ["filter"], "properties": {"filter": {"type": "object"}}},
                {"required": ["delete_all"], "properties": {"delete_all": {"const": True}}},
            ]
        }
    )

    ids: Annotated[list[DocumentId], Field(min_length=1, max_length=MAX_ITEMS)] | None = None
    filter: Filter | None = None
    delete_all: bool = Field(False, description="Must be true to delete every document.")
    refresh: Refresh = "false"

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = [
            name
            for name, there in (("ids", self.ids), ("filter", self.filter), ("delete_all", self.delete_all))
            if there
        ]
        if self.filter is not None and not self.filter:
            raise invalid("`filter` is empty and would match everything", "set `delete_all` to true for that")
        if len(given) != 1:
            raise invalid(
                "exactly one of `ids`, `filter` and `delete_all` (as true) must be given", "keep one of them"
            )
        return self


class Upsert(Value):
    """A bulk of documents to store."""

    documents: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)] = Field(
        json_schema_extra={"items": {"$ref": "#/components/schemas/Document"}},
    )
    refresh: Refresh = Field(
        "false",
        description="wait_for: answer when searches see it (where no refresh is due within 5 s, by one at once); "
        "true: refresh now.",
    )


class RowNames(Value):
    """What the rows of uploaded tables and line files call a document's fields."""

    id: Annotated[str, Field(max_length=256)] = "id"
    title: Annotated[str, Field(max_length=256)] = "title"
    text: Annotated[str, Field(max_length=256)] = "text"
    creation_time: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="`creation_time`, else `created_at`, if left out."
    )
    time: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="The same as `creation_time`; give one of them."
    )

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.time is not None and self.creation_time is not None:
            raise invalid("`time` and `creation_time` name the same column", "give one of them")
        return self


def _check_given(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in ("text", "embedding") or name not in Document.model_fields:
            raise invalid(
                f"`{_printable(name)}` can't be given",
                "use the fields of a document, other keys in `metadata`, and let the file give its text",
            )
    return value


def _printable(name: str) -> str:
    return name[:60].encode("ascii", "backslashreplace").decode()


Given = Annotated[dict[str, Any], AfterValidator(_check_given)]


class FileForm(Value):
    """What a caller says about uploaded files, each part JSON; the files themselves stand beside it."""

    fields: Given = Field(
        default_factory=dict,
        description="Fields of the documents of all files, such as `lang` or `metadata`.",
    )
    each: list[Given | None] | dict[str, Given] | None = Field(
        None, description="Fields of each file's document: a list in the order of the files, or by file name."
    )
    names: RowNames = Field(default_factory=RowNames)
    refresh: Refresh = "false"

    def given(self, number: int, name: str, count: int) -> dict[str, Any]:
        """Return what is said about the `number`-th of `count` files, from 0."""
        own = (self.each[number] if isinstance(self.each, list) else (self.each or {}).get(name)) or {}
        shared = {key: value for key, value in self.fields.items() if key != "id" or count == 1}
        metadata = {**(shared.get("metadata") or {}), **(own.get("metadata") or {})}
        return {**shared, **own, **({"metadata": metadata} if metadata else {})}


class ItemError(Value):
    """Why one item of a bulk failed."""

    type: str
    detail: str
    field: str | None = None
    remedy: str | None = None


class ItemResult(Value):
    """What became of one item, in the order sent."""

    id: str | None
    status: Literal[
        "created", "updated", "unchanged", "deleted", "not_found", "conflict", "invalid", "failed"
    ]
    version: int | None = None
    chunks: int | None = None
    truncated: bool | None = None
    error: ItemError | None = None

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None or key == "id"}


class BulkResult(Value):
    """The items' fates and how many of them failed."""

    items: list[ItemResult]
    failed: int


class FeedbackResult(BulkResult):
    """The votes' fates, how many of them failed, and when the others count."""

    counts_from: Instant | None = Field(
        None,
        description="From when on searches with `feedback` count these votes, within 65 seconds; the first search after "
        "it may still be ranked without them, while they are read. Null where none is new.",
    )


class FileItemResult(ItemResult):
    """What became of one document of an upload, or of a file that gave none."""

    file: str = Field(description="The file's name, as sent.")
    row: int | None = Field(None, description="Its row in a table or line file, from 1 with the header.")
    warnings: list[str] | None = None


class FilesResult(Value):
    """The fates of all documents of an upload and how many of them failed."""

    items: list[FileItemResult]
    failed: int


class Deletion(BulkResult):
    """How many documents a delete took away, and the items that were named or failed."""

    deleted: int


class StoredDocument(DocumentFields):
    """A document as stored."""

    id: str
    title: str
    text: str
    version: int
    chunks: int
    indexed_at: Instant | None = None
    revision: int | None = None


class DocumentPage(Value):
    """Documents in the order of their ids, and where the next page begins."""

    documents: list[StoredDocument]
    total: int
    cursor: str | None


# --- collections ---------------------------------------------------------------------------------------------------

DeclaredType = Literal["long", "double", "date", "keyword", "boolean"]
FieldName = Annotated[str, Field(pattern=KEY_PATTERN)]
Similarity = Literal["cosine", "dot_product", "l2_norm", "max_inner_product"]


NOT_DECLARABLE = (
    "and",
    "or",
    "not",
    fields.TEXT,
    fields.METADATA,
    fields.CHUNKS,
    fields.DECLARED,
    fields.DELETED,
    fields.DOCUMENT_ID,
)


IF_REVISION: Final = (
    "Change it only if the collection is at this `revision`, else 409: so of two who read it, change it and write it back, "
    "none undoes the other's change."
)


MOST_DECLARED = 200
"""Keys that a collection declares at most."""


class CollectionOptions(Value):
    """How a collection is made; what can't change in place needs a reindex."""

    model: Annotated[Text, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="The embedding model, one of those that the service knows; its first one if left out.",
    )
    dims: Annotated[int, Field(ge=1, le=4096), WHOLE] | None = Field(
        None, description="The model's if left out; others are for vectors that callers bring."
    )
    similarity: Similarity = "cosine"
    declared: Annotated[dict[FieldName, DeclaredType], Field(max_length=MOST_DECLARED)] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"not": {"enum": [*fields.RESERVED, *NOT_DECLARABLE]}}},
        description="Metadata keys that are typed, so that ranges work on them. Keys that no stored document has can "
        "be added at any time; those left out stay.",
    )
    shards: Annotated[int, Field(ge=1, le=64), WHOLE] = 1
    replicas: Annotated[int, Field(ge=0, le=5), WHOLE] | None = Field(
        None,
        description="Copies of each shard; one where the cluster has two nodes or more if left out or null. Can be "
        "changed at any time.",
    )
    refresh_interval: Annotated[str, Field(pattern=INTERVAL_PATTERN)] | None = Field(
        None,
        description="How often written documents become visible to searches: 1s if left out, -1 never by itself; can "
        "be changed at any time.",
        examples=["1s", "30s"],
    )
    profiles: Annotated[dict[ProfileName, Profile], Field(max_length=100)] = Field(
        default_factory=dict,
        description="Ranking profiles that searches may name; can be changed at any time.",
    )
    default_profile: ProfileName | None = Field(
        None,
        description="The profile of searches that name none; none: decay 'auto', both routes, adaptive fusion.",
    )
    experiment: Experiment | None = Field(
        None,
        description="Deals searches that name no profile to several; null ends it. Can be changed at any time.",
        examples=[
            {
                "name": "decay-2026-02",
                "arms": [{"profile": "plain", "percent": 50}, {"profile": "recent", "percent": 50}],
                "by": "subject",
            }
        ],
    )
    if_revision: Annotated[int, Field(ge=0), WHOLE] | None = Field(None, description=IF_REVISION)

    @model_validator(mode="after")
    def _no_clash(self) -> Self:
        for name in self.declared:
            if name in fields.RESERVED or name in NOT_DECLARABLE:
                raise invalid(
                    f"`declared.{name}` is taken by the documents' own fields or the filter language",
                    "declare it under another name",
                )
        named = "profiles" in self.model_fields_set
        if named and self.default_profile is not None and self.default_profile not in self.profiles:
            raise invalid(
                f"`default_profile` '{self.default_profile}' is not among `profiles`",
                "name one that is, or add it",
            )
        arms = [] if self.experiment is None else self.experiment.arms
        for at, arm in enumerate(arms):
            if named and arm.profile not in self.profiles:
                raise invalid(
                    f"`experiment.arms[{at}].profile` '{arm.profile}' is not among `profiles`",
                    "name one that is, or add it",
                )
        return self


class SynonymRule(Value):
    """One rule, as in Elasticsearch's synonym sets."""

    synonyms: Annotated[Text, Field(min_length=1, max_length=2_000)] = Field(
        json_schema_extra={"pattern": ",|=>"},
        description="Equivalent terms with commas between them, or one way: `terms => terms`.",
        examples=["电脑, 计算机, computer", "k8s => kubernetes"],
    )
    id: Annotated[Text, Field(min_length=1, max_length=128)] | None = Field(
        None, description="A name of the caller's own for it."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"synonyms": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _lean(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


MAX_SYNONYM_RULES = 2_000
MAX_SYNONYM_CHARS = 100_000


def _rules_or_texts(schema: dict[str, Any]) -> None:
    text = SynonymRule.model_json_schema()["properties"]["synonyms"]
    schema["items"] = {"anyOf": [schema["items"], text]}


class _Synonyms(Value):
    synonyms_set: Annotated[list[SynonymRule], Field(max_length=MAX_SYNONYM_RULES)] = Field(
        json_schema_extra=_rules_or_texts
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        # It is kept in the mapping, which the whole cluster holds in memory.
        size = sum(len(rule.synonyms) + len(rule.id or "") for rule in self.synonyms_set)
        if size > MAX_SYNONYM_CHARS:
            raise invalid(
                f"`synonyms_set` holds {size} characters, {MAX_SYNONYM_CHARS} are the most",
                "keep the rules that queries need",
            )
        return self


class SynonymSet(_Synonyms):
    """The synonyms of a collection, as a body of Elasticsearch's `_synonyms` has them; rules may also be plain text."""

    if_revision: Annotated[int, Field(ge=0), WHOLE] | None = Field(None, description=IF_REVISION)


class StoredSynonyms(_Synonyms):
    """The synonyms of a collection as they are."""

    collection: str
    revision: int = Field(0, description="The collection's, for `if_revision`.")


class Collection(Value):
    """What a collection is, as stored in its index."""

    name: str
    index: str
    uid: str | None = Field(
        None,
        description="Stays with the collection through every reindex, and tells it from an earlier one of its name; "
        "null for one that an earlier release made.",
    )
    dims: int
    similarity: Similarity
    declared: dict[str, DeclaredType]
    model: str | None = None
    template_version: int
    profiles: dict[str, Profile] = Field(default_factory=dict)
    default_profile: str | None = None
    experiment: Experiment | None = None
    revision: int = Field(
        0,
        description="Counts the changes of declared keys, profiles, experiment and synonyms, for `if_revision`.",
    )
    unreadable: dict[str, str] = Field(
        default_factory=dict,
        exclude_if=lambda value: not value,
        description="Stored options that this release can't read -> what is wrong with them; absent where all can be read. "
        "They count as not given, and a search by such a profile is refused; write them anew to mend them.",
    )
    synonyms: list[SynonymRule] = Field(
        default_factory=list, exclude=True, description="Asked for on their own: GET …/synonyms."
    )


class BrokenCollection(Value):
    """A collection whose index or aliases are not as they should be: no request to it is answered until they are."""

    name: str
    error: "ItemError"


class Ages(Value):
    """How old a collection's documents are, by their creation time."""

    oldest: Instant | None
    newest: Instant | None
    undated: int
    evergreen: int


class CollectionDetails(Collection):
    """What a collection is and what it holds."""

    documents: int
    deleted: int | None = Field(
        description="Tombstones of deleted documents, until `halflife purge` removes them; null for a key with a filter."
    )
    chunks: int
    size_bytes: int | None = Field(description="On disk, all copies; null for a key with a filter.")
    shards: int
    replicas: int
    refresh_interval: str
    ages: Ages


# --- the answer ------------------------------------------------------------------------------------------------------


def _is_none(value: Any) -> bool:
    return value is None


# A serialiser of the whole model would do the same, and take two thirds of the time of writing an answer.
Shown = TypeVar("Shown")
IfAny = Annotated[Shown | None, Field(exclude_if=_is_none)]
"""What an answer shows only where there is something to show."""


class Total(Value):
    """How many documents a route matches, as Elasticsearch counts them."""

    value: int
    relation: Literal["eq", "gte"]


class RouteStatus(Value):
    """How one route did."""

    status: Literal["ok", "partial", "failed", "skipped"]
    took_ms: int | None = None
    total: Total | None = None
    returned: int = 0
    reason: IfAny[str] = None
    confidence: IfAny[float] = Field(
        None, description="adaptive fusion: how far its first hits stand out from the rest, from 0 to 1."
    )
    weight: IfAny[float] = Field(
        None, description="adaptive fusion: its share of the score, by weight and confidence; all sum to 1."
    )


class RouteHit(Value):
    """One route's part in a hit: `score` as the query scored it, times `decay` is `decayed_score`.

    With linear and adaptive fusion `contribution` is the route's weight times `normalized`; adaptive weights follow the
    route's confidence and stand in the answer's `routes`.
    """

    rank: int | None
    score: float | None
    decay: float | None
    decayed_score: float | None
    contribution: float
    normalized: IfAny[float] = None
    note: IfAny[str] = None
    explanation: IfAny[dict[str, Any]] = Field(
        None, description="Elasticsearch's own account of `decayed_score`: value, description, details."
    )


class HitFeedback(Value):
    """What votes did to a hit: `factor` multiplied its score; the counts are what it rests on, decayed in `rate`."""

    factor: float
    voters: int
    basis: Literal["question", "document"] = Field(
        description="Whose votes: those on hits of the same question, or (at half the weight) those under any."
    )
    rate: float = Field(
        description="Share of votes for it among those that looked at it, decayed and capped."
    )
    clicked: int
    ignored: int
    helpful: int
    unhelpful: int


RecencyMode = Literal["off", "equals", "around", "news"]


class RecencyDecision(Value):
    """What `decay: "auto"` decided for this query."""

    mode: RecencyMode = Field(
        description="off: time counts for nothing; equals: newest first among hits that say the same thing; around: "
        "nearest first to a time that the query names; news: newer hits count for more."
    )
    reason: str


class Hit(Value):
    """One result, and why it stands where it stands."""

    id: str
    score: float = Field(description="What the list is ordered by; after a rerank the rerank's.")
    fused_score: float
    title: str | None = None
    text: str | None = None
    creation_time: Instant | None = None
    metadata: dict[str, Any] | None = None
    fields: dict[str, Any] = Field(
        default_factory=dict, description="The document's other fields that are set."
    )
    age_days: float | None = Field(
        description="Days from the decay's date to the origin; negative in the future."
    )
    relevance: float | None = Field(description="Cosine of query and chunk, clamped to [0, 1].")
    decay: float | None = Field(description="The factor of the request's decay; null where it is off.")
    evergreen: bool = False
    routes: dict[str, RouteHit]
    chunk: IfAny[dict[str, Any]] = Field(
        None, description="Which chunk: number, start and end in the document's text."
    )
    highlights: IfAny[dict[str, list[str]]] = None
    embedding: IfAny[list[float]] = None
    rerank_score: IfAny[float] = None
    superseded_by: IfAny[str] = Field(
        None, description="The newest hit that says the same thing, by decay 'auto'."
    )
    supersedes: IfAny[list[str]] = Field(
        None, description="The older ones among the best hits that say the same thing, by decay 'auto'."
    )
    recency: IfAny[str] = Field(
        None, description="What decay 'auto' did with this hit; where it did something, or with `explain`."
    )
    near_duplicates: IfAny[list[str]] = Field(None, description="Ids dropped as near duplicates of this hit.")
    additive: IfAny[dict[str, float]] = Field(None, description="The terms of an additive score.")
    feedback: IfAny[HitFeedback] = Field(None, description="What votes on it count, where `feedback` is on.")


class SearchResult(Value):
    """The answer to one search."""

    origin: Instant
    took_ms: int
    degraded: bool
    warnings: list[str]
    cursor: str | None
    routes: dict[str, RouteStatus]
    hits: list[Hit]
    explain: IfAny[dict[str, Any]] = None
    recency: IfAny[RecencyDecision] = Field(
        None, description="What decay 'auto' decided; absent where it is not in use."
    )
    profile: IfAny[Ranked] = Field(
        None, description="Which profile ranked this, and the arm that chose it; absent where none did."
    )
    touched: IfAny[int] = Field(
        None,
        description="With `touch`: of how many returned documents `last_accessed_at` is set to the origin, within about a "
        "second and never back in time; fewer than were returned where too many wait already.",
    )
    search_id: IfAny[str] = Field(None, description="Where the search is logged: what feedback refers to.")
    rewrites: IfAny[list[Rewrite]] = Field(
        None, description="What was searched for beside the query's own words; left out where nothing was."
    )

    suggestions: IfAny[list[Suggestion]] = Field(
        None,
        description="Other spellings of the query that documents within its filters have, the likeliest first.",
    )
