"""Instants and durations: parsing what callers write, printing what the cluster reads.

An instant is an aware UTC `datetime` in whole milliseconds; a duration is an `int` of milliseconds (a
`timedelta` is too small for the longest one Elasticsearch takes). No clock is read here.
"""

import math
import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DAY_MS = MS["d"]
HOUR_MS = MS["h"]
LONGEST_MS = 106_751_991_168 * DAY_MS
"""The longest duration Elasticsearch's time units express in days; it counts as 2^63 - 1 milliseconds there."""
_LONGEST_EXACT_MS = 2**63 - 1
FIRST_MS = -62_135_596_800_000
LAST_MS = 253_402_300_799_999
"""The years 1 to 9999: the instants that have a date here and in Elasticsearch."""


class Misread(ValueError):
    """What was written is no instant, or no duration: `problem` says of what was sent why, `remedy` how to write it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}")
        self.problem = problem
        self.remedy = remedy


_DURATION = re.compile(r"(\d{1,19})(ms|[sSmhHdD])", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?:(\d{1,12})W)?(?:(\d{1,12})D)?(?:T(?:(\d{1,12})H)?(?:(\d{1,12})M)?(?:(\d{1,12})S)?)?",
    re.ASCII,
)
_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,18}))?)?(Z|z|[+-]\d\d:?\d\d)?)?",
    re.ASCII,
)

# Numbers are taken only where their unit can't be mistaken: as seconds and as milliseconds these two
# ranges both mean 1973-03-03 to 2286-11-20, and nothing outside them is accepted.
_SECONDS = (1e8, 1e10)
_MILLIS = (1e11, 1e13)


def parse_duration(value: Any) -> int:
    """Return milliseconds for `14d`, `36h`, `30m` (minutes), `45s`, `250ms` or ISO 8601 (`P14D`, `PT36H`).

    Raises ValueError for bare numbers, fractions, months and years (no fixed length), and zero is allowed:
    who needs a positive one checks it.
    """
    if isinstance(value, bool) or not isinstance(value, str):
        raise Misread(
            "that is no duration", "write text with a unit, such as '14d', '36h', '30m' (minutes) or 'P14D'"
        )
    text = value.strip()
    if match := _DURATION.fullmatch(text):
        amount, unit = int(match[1]), match[2]
        ms = amount * MS[unit if unit == "ms" else unit.lower()]
    elif (match := _ISO_DURATION.fullmatch(text)) and any(match.groups()) and not text.endswith("T"):
        weeks, days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        ms = (weeks * 7 + days) * DAY_MS + hours * HOUR_MS + minutes * MS["m"] + seconds * MS["s"]
    else:
        raise Misread(
            f"'{text[:40]}' is not a duration",
            "write whole numbers with d, h, m (minutes), s or ms ('14d', "
            "'36h'), or ISO 8601 ('P14D', 'PT36H'); weeks are P2W, years are days ('365d')",
        )
    if ms > LONGEST_MS:
        raise Misread(
            f"'{text[:40]}' is longer than Elasticsearch can express",
            f"write at most '{LONGEST_MS // DAY_MS}d'",
        )
    return cap_duration(ms)


def cap_duration(ms: int) -> int:
    """Return the duration, or the longest one if it is more than 2^63 - 1 milliseconds, which no unit but days can say."""
    return LONGEST_MS if ms > _LONGEST_EXACT_MS else ms


def format_duration(ms: int) -> str:
    """Return the duration in Elasticsearch's time units, in the largest unit that keeps it whole."""
    for unit in ("d", "h", "m", "s"):
        if ms and ms % MS[unit] == 0:
            return f"{ms // MS[unit]}{unit}"
    return f"{ms}ms"


def parse_instant(value: Any) -> datetime:
    """Return the UTC instant in whole milliseconds (finer digits are cut off).

    Takes ISO 8601 (a date alone is its midnight; no offset means UTC, whatever the server's zone), an aware
    `datetime`, seconds since 1970 from 1e8 up to 1e10, or milliseconds from 1e11 up to 1e13; other numbers
    are ambiguous and raise ValueError.
    """
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        try:
            return _whole_ms(moment.astimezone(UTC))
        except OverflowError as cause:
            raise Misread("lies outside the years 1 to 9999 in UTC", "write one within them") from cause
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _from_number(value)
    if not isinstance(value, str):
        raise Misread("that is no instant", "write ISO 8601 text ('2026-01-31T00:00:00Z') or a Unix time")
    match = _INSTANT.fullmatch(value.strip())
    if match is None:
        raise Misread(
            f"'{value[:40]}' is not an instant",
            "write ISO 8601, such as '2026-01-31' or '2026-01-31T08:00:00Z'",
        )
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        moment = datetime(
            int(year), int(month), int(day), int(hour or 0), int(minute or 0), int(second or 0),
            int(((fraction or "") + "000")[:3]) * 1000, tzinfo=_zone(zone),
        )  # fmt: skip
        return moment.astimezone(UTC)
    except (ValueError, OverflowError) as cause:
        raise Misread(
            f"'{value[:40]}' names no real instant ({cause})", "write a day and time that there is"
        ) from cause


def is_day(value: Any) -> bool:
    """Tell whether the caller wrote a date alone, which range filters round as Elasticsearch does."""
    return isinstance(value, str) and len(value.strip()) == 10


def to_ms(moment: datetime) -> int:
    """Return whole milliseconds since 1970."""
    return (moment - EPOCH) // timedelta(milliseconds=1)


def from_ms(ms: int) -> datetime:
    """Return the UTC instant of whole milliseconds since 1970."""
    return EPOCH + timedelta(milliseconds=ms)


def within_calendar(ms: int) -> int:
    """Return the milliseconds, or the first or last instant of the years 1 to 9999 where they lie outside."""
    return min(max(ms, FIRST_MS), LAST_MS)


def format_instant(moment: datetime) -> str:
    """Return `2026-01-31T00:00:00.000Z`."""
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _whole_ms(moment: datetime) -> datetime:
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def _from_number(value: float) -> datetime:
    if _SECONDS[0] <= value < _SECONDS[1]:
        return from_ms(int(value * 1000) if isinstance(value, int) else math.floor(value * 1000 + 1e-4))
    if _MILLIS[0] <= value < _MILLIS[1]:
        return from_ms(int(value))
    shown = str(value) if abs(value) < 1e20 else "that number"
    raise Misread(
        f"{shown} as a time is ambiguous, since numbers are seconds (1e8 to 1e10) or milliseconds (1e11 to 1e13) since 1970",
        "write ISO 8601 ('2026-01-31T00:00:00Z')",
    )


def _zone(text: str | None) -> timezone:
    if text is None or text in "Zz":
        return UTC
    sign = -1 if text[0] == "-" else 1
    digits = text[1:].replace(":", "")
    if int(digits[2:]) > 59:
        raise ValueError(f"an offset of {text}")
    return timezone(sign * timedelta(hours=int(digits[:2]), minutes=int(digits[2:])))


_CLOCK = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d([.,]\d{1,18})?)?"
_OFFSET = r"[Zz]|[+-]([01]\d|2[0-3]):?[0-5]\d"
_INSTANT_PATTERN = (
    r"^\s*\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])" + f"([T ]{_CLOCK}({_OFFSET})?)?" + r"\s*$"
)

INSTANT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "pattern": _INSTANT_PATTERN.replace(r"\d", "[0-9]")},
        {"type": "number", "minimum": _SECONDS[0], "exclusiveMaximum": _SECONDS[1]},
        {"type": "number", "minimum": _MILLIS[0], "exclusiveMaximum": _MILLIS[1]},
    ],
    "description": "ISO 8601 (no offset means UTC; a date alone is its midnight), or a Unix time in seconds or milliseconds",
    "examples": ["2026-01-31T00:00:00Z"],
}
"""What `parse_instant` takes, as JSON Schema."""

Instant = Annotated[
    datetime,
    BeforeValidator(parse_instant),
    PlainSerializer(format_instant, return_type=str, when_used="json"),
    WithJsonSchema(INSTANT_SCHEMA, mode="validation"),
    WithJsonSchema({
        "type": "string",
        "format": "date-time",
        "description": "ISO 8601 in UTC, to the millisecond",
        "examples": ["2026-01-31T00:00:00.000Z"],
    }, mode="serialization"),
]  # fmt: skip

Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({
        "type": "string",
        "description": "whole number with a unit: d, h, m (minutes), s, ms; or ISO 8601",
        "examples": ["14d", "36h", "P14D"],
        "pattern": r"^\s*(\d{1,19}(ms|[sSmhHdD])|P(?=\d|T\d)(\d{1,12}W)?(\d{1,12}D)?(T(?=\d)(\d{1,12}H)?(\d{1,12}M)?(\d{1,12}S)?)?)\s*$".replace(r"\d", "[0-9]"),
    }),
]  # fmt: skip
