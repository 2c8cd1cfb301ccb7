"""Instants and durations as callers write them: what is read, what is refused, and that nothing depends on a zone."""

import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from app.times import (
    DAY_MS,
    FIRST_MS,
    LAST_MS,
    LONGEST_MS,
    Duration,
    Instant,
    format_duration,
    format_instant,
    from_ms,
    is_day,
    parse_duration,
    parse_instant,
    to_ms,
    within_calendar,
)

ROOT = Path(__file__).resolve().parent.parent
INSTANTS = st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))  # noqa: DTZ001 - the strategy adds it

# --- durations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, ms",
    [
        ("14d", 14 * 86_400_000),
        ("36h", 36 * 3_600_000),
        ("30m", 30 * 60_000),
        ("30D", 30 * 86_400_000),
        ("2H", 7_200_000),
        ("45s", 45_000),
        ("45S", 45_000),
        ("250ms", 250),
        ("0d", 0),
        (" 7d ", 7 * 86_400_000),
        ("007d", 7 * 86_400_000),
        ("P14D", 14 * 86_400_000),
        ("PT36H", 36 * 3_600_000),
        ("P1DT12H", 36 * 3_600_000),
        ("P2W", 14 * 86_400_000),
        ("PT30M", 30 * 60_000),
        ("PT0S", 0),
        ("106751991168d", 106_751_991_168 * 86_400_000),
    ],
)
def test_duration_is_read(text: str, ms: int) -> None:
    assert parse_duration(text) == ms


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "0", "-1", "30", 30, 1.5, True, None, [], "1w", "1M", "30M", "1y", "1.5d", "-1d", "+1d", "1 d", "d",
        "1d2h", "PT", "P", "P1Y", "P1M", "P1.5D", "PT1H30", "p14d", "1Ms", "1MS", "1e3d", "١٤d", "106751991169d",
        "9" * 19 + "d", "9" * 25 + "s", timedelta(days=1),
    ],
)  # fmt: skip
def test_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"duration|longer than"):
        parse_duration(value)


def test_minutes_are_never_months() -> None:
    assert parse_duration("30m") == 30 * 60 * 1000
    assert format_duration(parse_duration("30m")) == "30m"


@pytest.mark.parametrize(
    "ms, text",
    [
        (0, "0ms"), (1, "1ms"), (999, "999ms"), (1000, "1s"), (60_000, "1m"), (90_000, "90s"), (3_600_000, "1h"),
        (129_600_000, "36h"), (86_400_000, "1d"), (LONGEST_MS, "106751991168d"),
    ],
)  # fmt: skip
def test_duration_is_written_in_the_largest_whole_unit(ms: int, text: str) -> None:
    assert format_duration(ms) == text


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_duration_survives_writing_and_reading(ms: int) -> None:
    assert parse_duration(format_duration(ms)) == ms


@pytest.mark.parametrize("text", ["9223372036854775808ms", "9223372036854776s", "106751991168d"])
def test_duration_beyond_64_bits_is_the_longest_that_the_cluster_reads(text: str) -> None:
    # In ms or s the number would be beyond a Java long; in days Elasticsearch takes it for its longest.
    assert format_duration(parse_duration(text)) == "106751991168d"


# --- instants --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, text",
    [
        ("2026-01-31T08:00:00Z", "2026-01-31T08:00:00.000Z"),
        ("2026-01-31T08:00:00z", "2026-01-31T08:00:00.000Z"),
        ("2026-01-31t08:00:00Z".upper(), "2026-01-31T08:00:00.000Z"),
        ("2026-01-31 08:00:00", "2026-01-31T08:00:00.000Z"),
        ("2026-01-31T08:00", "2026-01-31T08:00:00.000Z"),
        ("2026-01-31", "2026-01-31T00:00:00.000Z"),
        ("2026-01-31T08:00:00+08:00", "2026-01-31T00:00:00.000Z"),
        ("2026-01-31T08:00:00-0330", "2026-01-31T11:30:00.000Z"),
        ("2026-01-31T08:00:00.1Z", "2026-01-31T08:00:00.100Z"),
        ("2026-01-31T08:00:00,999999999Z", "2026-01-31T08:00:00.999Z"),
        ("0001-01-01", "0001-01-01T00:00:00.000Z"),
        ("9999-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z"),
        ("2024-02-29", "2024-02-29T00:00:00.000Z"),
        (datetime(2026, 1, 31, 8, 0, 0, 1999), "2026-01-31T08:00:00.001Z"),  # noqa: DTZ001 - one without a zone is UTC
        (datetime(2026, 1, 31, 8, 0, 0, 1999, UTC), "2026-01-31T08:00:00.001Z"),
        (datetime(2026, 1, 31, 8, tzinfo=timezone(timedelta(hours=8))), "2026-01-31T00:00:00.000Z"),
        (date(2026, 1, 31), "2026-01-31T00:00:00.000Z"),
    ],
)
def test_instant_is_read_as_utc(value: object, text: str) -> None:
    assert format_instant(parse_instant(value)) == text


@pytest.mark.parametrize(
    "value",
    [
        "", "now", "yesterday", "2026", "2026-01", "2025-02-29", "2026-13-01", "2026-1-1", "2026-01-31T25:00:00Z",
        "2026-01-31T24:00:00Z", "2026-01-31T08:00:60Z", "2026-01-31T08:00:00+24:00", "2026-01-31T08:00:00+01:60",
        "2026-01-31T08:00:00.", "2026-01-31T08:00:00." + "1" * 19, "2026-01-31Z", "2026-01-31T08Z", "0000-01-01",
        "0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00", "20260131T080000Z", "2026-W05-6", "２０２６-01-31",
        "\u0001", "2026-01-31\0", None, True, [], {}, float("nan"), float("inf"), -float("inf"), 10**400, -(10**400),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
    ],
)  # fmt: skip
def test_instant_is_refused_with_a_value_error(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_instant(value)


def test_datetime_bc29_only_unmistakable_numbers_are_times() -> None:
    assert format_instant(parse_instant(1_700_000_000)) == "2023-11-14T22:13:20.000Z"
    assert format_instant(parse_instant(1_700_000_000_000)) == "2023-11-14T22:13:20.000Z"
    assert format_instant(parse_instant(1_738_281_600)) == "2025-01-31T00:00:00.000Z"
    assert format_instant(parse_instant(1_738_281_600_000)) == "2025-01-31T00:00:00.000Z"
    assert format_instant(parse_instant(1_738_281_600.25)) == "2025-01-31T00:00:00.250Z"


@pytest.mark.parametrize(
    "value",
    [86_400_000, 20_000_000_001, 1_700_000_000_000_000, "1700000000", "20240101", "2024", 0, -1, 99_999_999, 10**13, 1e10],
)  # fmt: skip
def test_datetime_bc29_ambiguous_numbers_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"ambiguous|not an instant"):
        parse_instant(value)


SPELLINGS_OF_ONE_INSTANT = [
    "2025-01-21T00:00:00Z",
    "2025-01-21T08:00:00+08:00",
    "2025-01-21T00:00:00",
    "2025-01-21 00:00:00",
    "2025-01-21",
    1_737_417_600,
    1_737_417_600_000,
    1_737_417_600.0,
]


@pytest.mark.parametrize("value", SPELLINGS_OF_ONE_INSTANT, ids=map(str, SPELLINGS_OF_ONE_INSTANT))
def test_datetime_bc30_spellings_of_one_instant(value: object) -> None:
    assert to_ms(parse_instant(value)) == 1_737_417_600_000


def test_datetime_bc30_finer_digits_are_cut() -> None:
    assert format_instant(parse_instant("2025-01-21T00:00:00.1234567Z")) == "2025-01-21T00:00:00.123Z"
    assert (
        format_instant(parse_instant("2025-01-21T00:00:00.999999999999999999Z")) == "2025-01-21T00:00:00.999Z"
    )


def test_datetime_bc30_the_servers_zone_shifts_nothing() -> None:
    told = (
        "from app.times import *; import time; time.tzset();"
        "print([to_ms(parse_instant(v)) for v in ('2025-01-21', '2025-01-21T00:00:00', 1737417600)],"
        "format_instant(from_ms(1737417600000)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", told],
        env={**os.environ, "TZ": "Asia/Shanghai"}, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == "[1737417600000, 1737417600000, 1737417600000] 2025-01-21T00:00:00.000Z"


@given(INSTANTS)
def test_instant_survives_writing_and_reading(moment: datetime) -> None:
    whole = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    assert parse_instant(format_instant(moment)) == whole
    assert from_ms(to_ms(moment)) == whole


@given(st.floats(min_value=1e8, max_value=9_999_999_999, allow_nan=False))
def test_seconds_with_a_fraction_are_within_a_millisecond(seconds: float) -> None:
    assert abs(to_ms(parse_instant(seconds)) - seconds * 1000) < 1.001


def test_milliseconds_before_1970_count_backwards() -> None:
    assert to_ms(parse_instant("1969-12-31T23:59:59.999Z")) == -1
    assert format_instant(from_ms(-1)) == "1969-12-31T23:59:59.999Z"


def test_calendar_ends() -> None:
    assert to_ms(parse_instant("0001-01-01")) == FIRST_MS
    assert to_ms(parse_instant("9999-12-31T23:59:59.999Z")) == LAST_MS
    assert within_calendar(FIRST_MS - 1) == FIRST_MS
    assert within_calendar(LAST_MS + DAY_MS) == LAST_MS
    assert within_calendar(5) == 5


@pytest.mark.parametrize(
    "value, day",
    [("2026-01-31", True), (" 2026-01-31 ", True), ("2026-01-31T00:00", False), (1_700_000_000, False), (date(2026, 1, 31), False)],
)  # fmt: skip
def test_a_day_is_told_from_its_midnight(value: object, day: bool) -> None:
    assert is_day(value) is day


# --- as fields -------------------------------------------------------------------------------------------------------


def test_duration_as_a_field_survives_a_round_trip() -> None:
    adapter = TypeAdapter[int](Duration)
    value = adapter.validate_python("36h")
    assert value == 129_600_000
    assert adapter.dump_python(value) == "36h"
    assert adapter.validate_json(adapter.dump_json(value)) == value


@pytest.mark.parametrize("value", [129_600_000, "129600000", 1.5, None, True])
def test_duration_as_a_field_takes_no_bare_number(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Duration).validate_python(value)


def test_instant_as_a_field_is_written_in_utc_with_milliseconds() -> None:
    adapter = TypeAdapter[datetime](Instant)
    value = adapter.validate_python("2025-01-21T08:00:00+08:00")
    assert adapter.dump_json(value) == b'"2025-01-21T00:00:00.000Z"'
    assert adapter.validate_json(adapter.dump_json(value)) == value
    with pytest.raises(ValidationError):
        adapter.validate_python("yesterday")
