"""The decay as a value: every spelling without loss, the closed formula, the functions sent, the warning.

What the cluster makes of the functions is proved in test_decay_node.py.
"""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app import decay
from app.errors import InvalidRequest
from app.ranking import LEAST_RATE, Decay, DecayStrength, Profile, ResolvedDecay
from app.times import parse_instant, to_ms

HOUR, DAY = 3_600_000, 86_400_000
ORIGIN = to_ms(parse_instant("2025-01-31T00:00:00Z"))


def resolved(default_floor: float = 0.0, **options: Any) -> ResolvedDecay:
    return decay.resolve(Decay.model_validate(options), default_floor=default_floor)


def at(value: ResolvedDecay, age_ms: int, *, evergreen: bool = False) -> float:
    return decay.factor(value, origin_ms=ORIGIN, moment_ms=ORIGIN - age_ms, evergreen=evergreen)


# --- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, shape, scale_ms, at_scale",
    [
        ({"half_life": "180d"}, "exp", 180 * DAY, 0.5),
        ({"half_life": "36h", "kind": "gauss"}, "gauss", 36 * HOUR, 0.5),
        ({"scale": "10d"}, "exp", 10 * DAY, 0.5),
        ({"scale": "10d", "decay": 0.25, "kind": "linear"}, "linear", 10 * DAY, 0.25),
        ({"rate": 0.1}, "exp", 10 * DAY, math.exp(-1)),
        ({"rate": 1}, "exp", DAY, math.exp(-1)),
        ({"rate": 0.3}, "exp", 288_000_000, math.exp(-0.3 * 288_000_000 / DAY)),
        ({"rate": 0.1, "kind": "linear"}, "linear", 5 * DAY, 0.5),
        ({"rate": "0.02/h"}, "exp", 50 * HOUR, math.exp(-1)),
        ({"hourly_loss": 0.01}, "exp", HOUR, 0.99),
        ({"hourly_loss": 0}, "none", HOUR, 0.5),
        ({"hourly_loss": 1}, "step", HOUR, 0.5),
        ({"hourly_loss": 1e-30}, "none", HOUR, 0.5),
    ],
    ids=str,
)
def test_every_spelling_becomes_scale_and_decay(
    options: Any, shape: str, scale_ms: int, at_scale: float
) -> None:
    value = resolved(**options)
    assert (value.shape, value.scale_ms) == (shape, scale_ms)
    assert value.decay == pytest.approx(at_scale, rel=1e-12)


@given(
    rate=st.floats(min_value=1e-9, max_value=1e8), days=st.floats(min_value=0, max_value=40_000), linear=st.booleans()
)  # fmt: skip
def test_a_rate_is_kept_without_loss(rate: float, days: float, linear: bool) -> None:
    age_ms = round(days * DAY)
    if linear and rate >= 8.64e7:
        return  # A ramp that ends within a millisecond is refused.
    value = resolved(rate=rate, kind="linear" if linear else "exp")
    lost = rate * age_ms / DAY
    wanted = max(0.0, 1 - lost) if linear else math.exp(-lost)
    assert at(value, age_ms) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@given(
    loss=st.floats(min_value=1e-18, max_value=1, exclude_max=True),
    hours=st.integers(min_value=0, max_value=10**6),
)
def test_an_hourly_loss_is_kept_without_loss(loss: float, hours: int) -> None:
    wanted = math.exp(math.log1p(-loss) * hours)
    assert at(resolved(hourly_loss=loss), hours * HOUR) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss, hours", [(1e-12, 10**11), (3e-10, 10**9), (9.99e-7, 10**6), (1e-16, 10**12)])
def test_an_hourly_loss_too_small_for_one_minus_itself_keeps_its_digits(loss: float, hours: int) -> None:
    # 1 - 1e-12 is off by 2e-5 of the loss, 1 - 1e-16 by a tenth of it.
    wanted = math.exp(math.log1p(-loss) * hours)
    assert at(resolved(hourly_loss=loss), hours * HOUR) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("value", [Decay, DecayStrength])
@pytest.mark.parametrize(
    "options, told",
    [
        ({"rate": 1e-300}, "rate"),
        ({"rate": 5e-324}, "rate"),
        ({"rate": 1e-30}, "rate"),
        ({"rate": "1e-30/d"}, "rate"),
        ({"rate": 2e8}, "rate"),
        ({"rate": 8.64e7, "kind": "linear"}, "below 8.64e7"),
        ({"rate": 1e8, "kind": "linear"}, "below 8.64e7"),
    ],
    ids=str,
)
def test_a_rate_that_no_scale_can_express_is_refused_where_it_is_read(
    value: type[DecayStrength], options: Any, told: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        value.model_validate(options)
    assert told in str(caught.value)


@given(rate=st.floats(min_value=LEAST_RATE, max_value=1e8), kind=st.sampled_from(["exp", "linear"]))
def test_every_rate_that_is_read_is_a_decay(rate: float, kind: str) -> None:
    if kind == "exp" or rate < 8.64e7:
        value = resolved(rate=rate, kind=kind)
        assert at(value, 0) == 1
        assert 0 <= at(value, 10**17) <= 1


@pytest.mark.parametrize(
    "base, override",
    [
        ({"rate": 0.1}, {"kind": "gauss"}),
        ({"hourly_loss": 0.1}, {"kind": "linear"}),
        ({"kind": "gauss", "half_life": "1d"}, {"rate": 0.1}),
        ({"rate": 9e7}, {"kind": "linear"}),
        ({"kind": "linear", "half_life": "1d"}, {"rate": 9e7}),
    ],
    ids=str,
)
def test_a_profile_whose_routes_do_not_fit_its_decay_is_refused(base: Any, override: Any) -> None:
    routes = [{"kind": "text"}, {"kind": "vector", "decay": override}]
    with pytest.raises(ValidationError, match=r"routes\[1\].decay"):
        Profile.model_validate({"decay": base, "routes": routes})
    assert Profile.model_validate({"decay": base, "routes": routes[:1]}).decay is not None
    assert Profile.model_validate(
        {"decay": {"half_life": "1d"}, "routes": [{"kind": "text", "decay": {"kind": "gauss"}}]}
    )


def test_a_profile_with_a_rate_that_no_scale_can_express_is_refused() -> None:
    for options in (
        {"decay": {"rate": 1e-30}},
        {"routes": [{"kind": "text", "decay": {"kind": "linear", "rate": 9e7}}]},
    ):
        with pytest.raises(ValidationError):
            Profile.model_validate(options)


def test_a_half_life_of_the_longest_duration_is_a_decay() -> None:
    value = resolved(half_life="106751991168d")
    assert at(value, 365 * DAY) == pytest.approx(1.0)
    assert decay.functions(value, origin_ms=ORIGIN)[0]["exp"]["creation_time"]["scale"] == "106751991168d"


def test_defaults_are_the_floor_given_and_what_follows_from_it() -> None:
    value = resolved(default_floor=0.7, half_life="1d")
    assert (value.floor, value.missing, value.future, value.field, value.offset_ms) == (
        0.7, 0.7, "clamp", "creation_time", 0,
    )  # fmt: skip
    assert resolved(default_floor=0.7, half_life="1d", floor=0).floor == 0
    assert resolved(default_floor=0.7, half_life="1d", floor=0).missing == 0
    assert resolved(half_life="1d", floor=0.2, missing=0.9).missing == 0.9
    assert resolved(half_life="1d", missing=0).missing == 0


# --- the closed formula ----------------------------------------------------------------------------------------------


def test_decay_math_bc01_the_closed_formula() -> None:
    ages = [0, 5, 10, 15, 20, 30]
    first = {
        "exp": [1, 1, 0.7071068, 0.5, 0.3535534, 0.1767767],
        "gauss": [1, 1, 0.8408964, 0.5, 0.2102241, 0.0131390],
        "linear": [1, 1, 0.75, 0.5, 0.25, 0],
    }
    second = {"exp": [0.25, 0.0625], "gauss": [0.25, 0.00390625], "linear": [0.25, 0]}
    for kind, wanted in first.items():
        value = resolved(kind=kind, scale="10d", offset="5d", decay=0.5)
        assert [at(value, age * DAY) for age in ages] == pytest.approx(wanted, abs=1e-6)
    for kind, wanted in second.items():
        value = resolved(kind=kind, scale="10d", decay=0.25)
        assert [at(value, age * DAY) for age in (10, 20)] == pytest.approx(wanted, abs=1e-6)


def test_the_floor_lifts_and_squeezes() -> None:
    value = resolved(half_life="10d", floor=0.3)
    assert at(value, 0) == 1
    assert at(value, 10 * DAY) == pytest.approx(0.3 + 0.7 * 0.5)
    assert at(value, 10_000 * DAY) == pytest.approx(0.3)
    assert at(resolved(half_life="10d", floor=1), 10 * DAY) == 1


def test_decay_date_bc05_undated_is_a_choice() -> None:
    for options, wanted in (
        ({}, 0.0),
        ({"missing": 0.5}, 0.5),
        ({"floor": 0.4}, 0.4),
        ({"missing": 1}, 1.0),
    ):
        value = resolved(half_life="10d", **options)
        assert decay.factor(value, origin_ms=ORIGIN, moment_ms=None, evergreen=False) == wanted
        assert wanted <= at(value, 0)


def test_decay_date_bc07_the_future_is_a_choice() -> None:
    moments = [
        "2025-01-31T00:00:00Z",
        "2025-01-31T00:00:02Z",
        "2025-02-10T00:00:00Z",
        "9999-12-31T23:59:59.999Z",
    ]
    for future, wanted in (("clamp", [1, 1, 1, 1]), ("symmetric", [1.0, 0.9999984, 0.5, 0.0])):
        value = resolved(scale="10d", decay=0.5, future=future)
        factors = [
            decay.factor(value, origin_ms=ORIGIN, moment_ms=to_ms(parse_instant(moment)), evergreen=False)
            for moment in moments
        ]
        assert factors == pytest.approx(wanted, abs=1e-6)


def test_evergreen_outranks_everything() -> None:
    value = resolved(half_life="1h", floor=0, missing=0, future="symmetric")
    for moment_ms in (None, ORIGIN, ORIGIN - 10**12, ORIGIN + 10**12):
        assert decay.factor(value, origin_ms=ORIGIN, moment_ms=moment_ms, evergreen=True) == 1


@pytest.mark.parametrize(
    "loss, hours, wanted",
    [(0.01, 24, 0.7856781), (0, 1000, 1), (1, 0, 1), (1, 5, 0), (0.01, -24, 1), (1, -1, 1)],
)
def test_memory_decay_bc54_recency(loss: float, hours: int, wanted: float) -> None:
    assert at(resolved(hourly_loss=loss), hours * HOUR) == pytest.approx(wanted, abs=1e-7)


STRENGTHS = st.one_of(
    st.builds(lambda s, k: {"half_life": f"{s}s", "kind": k}, st.integers(1, 10**10), st.sampled_from(["exp", "gauss", "linear"])),
    st.builds(
        lambda s, d, k: {"scale": f"{s}ms", "decay": d, "kind": k},
        st.integers(1, 10**14), st.floats(min_value=1e-12, max_value=1 - 1e-12), st.sampled_from(["exp", "gauss", "linear"]),
    ),
    st.builds(lambda p: {"hourly_loss": p}, st.floats(min_value=0, max_value=1)),
)  # fmt: skip
REST = st.fixed_dictionaries(
    {"floor": st.floats(0, 1), "missing": st.floats(0, 1), "future": st.sampled_from(["clamp", "symmetric"])},
    optional={"offset": st.integers(0, 10**6).map(lambda s: f"{s}s")},
)


@given(strength=STRENGTHS, rest=REST, ages=st.lists(st.integers(0, 10**14), min_size=2, max_size=6))
def test_a_factor_lies_between_floor_and_one_and_never_rises_with_age(
    strength: dict[str, Any], rest: dict[str, Any], ages: list[int]
) -> None:
    value = resolved(**strength, **rest)
    factors = [at(value, age) for age in sorted(ages)]
    assert all(value.floor - 1e-15 <= each <= 1 + 1e-15 for each in factors)
    assert all(later <= earlier + 1e-15 for earlier, later in itertools.pairwise(factors))
    assert at(value, 0) == pytest.approx(1.0)


# --- what is sent ----------------------------------------------------------------------------------------------------

AT = "2025-01-31T00:00:00.000Z"
EVERGREEN = {"term": {"evergreen": True}}
DATED = {"exists": {"field": "creation_time"}}
PAST = {"range": {"creation_time": {"lte": AT}}}
FUTURE = {"range": {"creation_time": {"gt": AT}}}
AGING = {"bool": {"filter": [PAST], "must_not": [EVERGREEN]}}
EXEMPT = {"filter": {"bool": {"should": [EVERGREEN, FUTURE]}}, "weight": 1.0}
UNDATED = {"bool": {"must_not": [DATED, EVERGREEN]}}
NOTHING = {"field": "creation_time", "factor": 0, "missing": 1}


def curve(scale: str, *, offset: str = "0ms", at_scale: float = 0.5) -> dict[str, Any]:
    return {"creation_time": {"origin": AT, "scale": scale, "offset": offset, "decay": at_scale}}


def test_functions_with_a_floor() -> None:
    value = resolved(half_life="14d", floor=0.25)
    assert decay.functions(value, origin_ms=ORIGIN) == [
        {"filter": AGING, "exp": curve("14d"), "weight": 0.75},
        {"filter": AGING, "weight": 0.25},
        EXEMPT,
        {"filter": UNDATED, "weight": 0.25},
    ]


def test_functions_without_a_floor() -> None:
    value = resolved(kind="gauss", scale="36h", decay=0.1, offset="90m")
    assert decay.functions(value, origin_ms=ORIGIN) == [
        {"filter": AGING, "gauss": curve("36h", offset="90m", at_scale=0.1), "weight": 1.0},
        EXEMPT,
        {"filter": UNDATED, "field_value_factor": NOTHING},
    ]


def test_functions_of_a_floor_of_one() -> None:
    value = resolved(half_life="14d", floor=1)
    assert decay.functions(value, origin_ms=ORIGIN) == [
        {"filter": AGING, "weight": 1.0},
        EXEMPT,
        {"filter": UNDATED, "weight": 1.0},
    ]


def test_functions_where_the_future_decays() -> None:
    value = resolved(half_life="14d", future="symmetric", missing=0.5)
    aging = {"bool": {"filter": [DATED], "must_not": [EVERGREEN]}}
    assert decay.functions(value, origin_ms=ORIGIN) == [
        {"filter": aging, "exp": curve("14d"), "weight": 1.0},
        {"filter": {"bool": {"should": [EVERGREEN]}}, "weight": 1.0},
        {"filter": UNDATED, "weight": 0.5},
    ]


def test_functions_of_losing_nothing_and_everything() -> None:
    assert decay.functions(resolved(hourly_loss=0, missing=0.5), origin_ms=ORIGIN) == [
        {"filter": AGING, "weight": 1.0},
        EXEMPT,
        {"filter": UNDATED, "weight": 0.5},
    ]
    inside = {"range": {"creation_time": {"gte": "2025-01-30T00:00:00.000Z"}}}
    assert decay.functions(resolved(hourly_loss=1, offset="1d", floor=0.25), origin_ms=ORIGIN) == [
        {"filter": {"bool": {"filter": [AGING, inside]}}, "weight": 1.0},
        {"filter": {"bool": {"filter": [AGING], "must_not": [inside]}}, "weight": 0.25},
        EXEMPT,
        {"filter": UNDATED, "weight": 0.25},
    ]


def test_an_offset_beyond_the_calendar_ends_with_it() -> None:
    value = resolved(hourly_loss=1, offset="106751991168d", future="symmetric")
    [inside, *_] = decay.functions(value, origin_ms=ORIGIN)
    assert inside["filter"]["bool"]["filter"][1] == {
        "range": {"creation_time": {"gte": "0001-01-01T00:00:00.000Z", "lte": "9999-12-31T23:59:59.999Z"}}
    }


@pytest.mark.parametrize("missing", [0.0, 1e-46, 5e-324])
def test_a_weight_that_is_no_32_bit_float_is_sent_as_nothing(missing: float) -> None:
    # Elasticsearch takes a weight that comes out as 0 for "no function matched" and answers factor 1.
    functions = decay.functions(resolved(half_life="1d", missing=missing), origin_ms=ORIGIN)
    assert functions[-1] == {"filter": UNDATED, "field_value_factor": NOTHING}


def test_the_field_is_used_throughout() -> None:
    functions = decay.functions(resolved(half_life="14d", field="updated_at"), origin_ms=ORIGIN)
    told = repr(functions)
    assert "creation_time" not in told
    assert told.count("updated_at") == 5


@pytest.mark.parametrize("future", ["clamp", "symmetric"])
def test_a_reading_after_the_origin_has_not_been_yet(future: str) -> None:
    past = {"range": {"last_accessed_at": {"lte": AT}}}
    ahead = {"bool": {"filter": [{"range": {"last_accessed_at": {"gt": AT}}}], "must_not": [DATED]}}
    read = {"bool": {"should": [past, ahead]}}
    value = resolved(half_life="14d", field="last_accessed_at", missing=0.5, future=future)
    first, second, exempt, undated = decay.functions(value, origin_ms=ORIGIN)
    own = past if future == "clamp" else read
    assert first["filter"] == {"bool": {"filter": [own], "must_not": [EVERGREEN]}}
    created = PAST if future == "clamp" else DATED
    assert second["filter"] == {"bool": {"filter": [created], "must_not": [EVERGREEN, read]}}
    future_ones = [ahead, {"bool": {"filter": [FUTURE], "must_not": [read]}}] if future == "clamp" else []
    assert exempt["filter"] == {"bool": {"should": [EVERGREEN, *future_ones]}}
    assert undated["filter"] == {"bool": {"must_not": [read, DATED, EVERGREEN]}}


@pytest.mark.parametrize(
    "field, dates, wanted",
    [
        ("last_accessed_at", {"last_accessed_at": ORIGIN, "creation_time": 1}, ORIGIN),
        ("last_accessed_at", {"last_accessed_at": ORIGIN + 1, "creation_time": 1}, 1),
        ("last_accessed_at", {"last_accessed_at": ORIGIN + 1, "creation_time": ORIGIN + 2}, ORIGIN + 2),
        ("last_accessed_at", {"last_accessed_at": ORIGIN + 1}, ORIGIN + 1),
        ("last_accessed_at", {}, None),
        ("last_accessed_at", {"creation_time": 1}, 1),
        ("creation_time", {"creation_time": ORIGIN + 1, "last_accessed_at": 1}, ORIGIN + 1),
        ("updated_at", {"updated_at": ORIGIN + 1, "creation_time": 1}, ORIGIN + 1),
        ("updated_at", {"creation_time": 1}, None),
    ],
)  # fmt: skip
def test_the_date_that_ages(field: str, dates: dict[str, int], wanted: int | None) -> None:
    assert decay.moment(field, dates.get, origin_ms=ORIGIN) == wanted


def test_decay_math_bc03_scored_multiplies() -> None:
    value = resolved(half_life="14d")
    assert decay.scored({"match_all": {}}, value, origin_ms=ORIGIN) == {
        "function_score": {
            "query": {"match_all": {}},
            "functions": decay.functions(value, origin_ms=ORIGIN),
            "score_mode": "sum",
            "boost_mode": "multiply",
        }
    }


# --- overrides -------------------------------------------------------------------------------------------------------

BASE = Decay.model_validate({"scale": "10d", "decay": 0.2, "offset": "1d", "floor": 0.1, "missing": 0.3, "future": "symmetric"})  # fmt: skip


@pytest.mark.parametrize(
    "override, changed",
    [
        ({"floor": 0.9}, {"floor": 0.9}),
        ({"half_life": "5d"}, {"scale_ms": 5 * DAY, "decay": 0.5}),
        ({"scale": "5d"}, {"scale_ms": 5 * DAY, "decay": 0.5}),
        ({"scale": "5d", "decay": 0.4}, {"scale_ms": 5 * DAY, "decay": 0.4}),
        ({"rate": 0.1}, {"scale_ms": 10 * DAY, "decay": math.exp(-1)}),
        ({"kind": "gauss"}, {"shape": "gauss"}),
        ({"offset": "0d"}, {"offset_ms": 0}),
        ({"missing": 0, "future": "clamp", "field": "updated_at"}, {"missing": 0.0, "future": "clamp", "field": "updated_at"}),
        ({}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_route_overrides_what_it_names(override: Any, changed: dict[str, Any]) -> None:
    merged = decay.merge(BASE, DecayStrength.model_validate(override))
    plain = decay.resolve(BASE, default_floor=0.5)
    assert decay.resolve(merged, default_floor=0.5) == plain.model_copy(update=changed)


def test_no_override_is_the_base() -> None:
    assert decay.merge(BASE, None) is BASE


@pytest.mark.parametrize(
    "base, override",
    [
        ({"rate": 0.1}, {"kind": "gauss"}),
        ({"hourly_loss": 0.1}, {"kind": "gauss"}),
        ({"hourly_loss": 0.1}, {"kind": "linear"}),
        ({"kind": "gauss", "half_life": "1d"}, {"rate": 0.1}),
        ({"kind": "linear", "half_life": "1d"}, {"hourly_loss": 0.1}),
    ],
    ids=str,
)
def test_an_override_that_contradicts_the_base_is_refused(base: Any, override: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decay.merge(Decay.model_validate(base), DecayStrength.model_validate(override))
    assert caught.value.field == "routes.decay.kind"
    assert caught.value.remedy


# --- the warning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, ages, told",
    [
        ({"half_life": "36500d"}, [1, 2, 30], "changes nothing"),
        ({"half_life": "36500d", "floor": 0.9}, [1, 2, 30], "changes nothing"),
        ({"kind": "gauss", "scale": "7d"}, [90, 400, 800], "tells no ages apart"),
        ({"kind": "linear", "scale": "7d", "floor": 0.5}, [90, 400], "tells no ages apart"),
        ({"half_life": "30d", "offset": "9000d"}, [1, 400], "none is older than its `offset` of 9000d"),
        (
            {"half_life": "30d", "offset": "400d"},
            [1, 400],
            "`offset` of 400d, before which no age counts; shorten that",
        ),
        (
            {"half_life": "36500d", "offset": "1d"},
            [1, 2, 30],
            "begins at its `offset` of 1d; strengthen it (a shorter `offset`",
        ),
        (
            {"half_life": "36500d"},
            [1, 2, 30],
            "against its scale of 36500d; strengthen it (a shorter `half_life`",
        ),
        ({"half_life": "30d"}, [1, 2, 30], None),
        ({"half_life": "30d"}, [400], None),
        ({"half_life": "30d"}, [], None),
        ({"half_life": "30d", "floor": 1}, [1, 40], None),
        ({"hourly_loss": 0}, [1, 40], None),
        ({"hourly_loss": 1}, [1, 40], None),
    ],
    ids=str,
)
def test_a_scale_that_does_not_fit_the_ages_is_told(options: Any, ages: list[int], told: str | None) -> None:
    value = resolved(**options)
    warning = decay.misfit(
        value, [at(value, age * DAY) for age in ages], oldest_ms=max(ages, default=0) * DAY
    )
    assert (warning is None) if told is None else (warning is not None and told in warning)
