"""The names of our aliases and indices, and what a name found in the cluster means. No clock, no network.

All of a collection's names start with `halflife-<collection>`; what else the service keeps in the cluster starts
with `halflife_`, which no collection's name can reach.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

PREFIX = "halflife-"
OWN_PREFIX = "halflife_"

Slot = Literal["a", "b"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_INDEX = re.compile(r"halflife-(?P<collection>[a-z0-9][a-z0-9_-]*)-(?P<moment>\d{17})")
_WRITE_ALIAS = re.compile(
    r"halflife-(?P<collection>[a-z0-9][a-z0-9_-]*)-w-(?P<generation>[1-9]\d{0,17})-(?P<slot>[ab])"
)
_DATED = re.compile(r"halflife_(?P<purpose>[a-z]+)-(?P<year>\d{4})\.(?P<month>\d{2})(?:\.(?P<day>\d{2}))?")
_READ_ALIAS = re.compile(r"halflife-(?P<collection>[a-z0-9][a-z0-9_-]*)")


def read_alias(collection: str) -> str:
    """Return the alias that searches address; it hides tombstones."""
    return f"{PREFIX}{collection}"


def write_alias(collection: str, generation: int, slot: Slot = "a") -> str:
    """Return the alias that writes of one generation address: at least 1, later ones are higher."""
    if generation < 1:
        raise ValueError(f"generations count from 1, not {generation}")
    return f"{PREFIX}{collection}-w-{generation}-{slot}"


def first_generation(moment: datetime) -> int:
    """Return the generation that a collection made at `moment` (aware) begins with: microseconds since 1970.

    No two collections of one name have one in common, so a writer of a deleted one never reaches the one made after
    it. Those of earlier releases began with 1.
    """
    return (moment - _EPOCH) // timedelta(microseconds=1)


def index_name(collection: str, moment: datetime) -> str:
    """Return the name of an index made at `moment` (aware): `halflife-handbook-20260131080000000`, to the millisecond."""
    if moment.tzinfo is None:
        raise ValueError("the moment of an index name needs its time zone")
    utc = moment.astimezone(UTC)
    return f"{PREFIX}{collection}-{utc.year:04d}{utc:%m%d%H%M%S}{utc.microsecond // 1000:03d}"


def made_at(index: str) -> datetime:
    """Return the moment in the name of an index of ours. Raises ValueError for other names."""
    match = _INDEX.fullmatch(index)
    if match is None:
        raise ValueError(f"{index} is no index of a collection")
    digits = match["moment"]
    return datetime.strptime(digits[:14], "%Y%m%d%H%M%S").replace(
        tzinfo=UTC, microsecond=int(digits[14:]) * 1000
    )


def index_pattern(collection: str) -> str:
    """Return the wildcard that covers the collection's indices and write aliases.

    `handbook` covers those of `handbook-old` too: filter what comes back with `collection_of`.
    """
    return f"{PREFIX}{collection}-*"


def own_index(purpose: str) -> str:
    """Return the name of an index that holds the service's own state, such as `halflife_state`."""
    return f"{OWN_PREFIX}{purpose}"


def own_dated_index(purpose: str, moment: datetime, *, monthly: bool = False) -> str:
    """Return the index of a day (or month, UTC) behind the alias of `purpose`: `halflife_searches-2026.01.31`."""
    utc = moment.astimezone(UTC)
    return f"{own_index(purpose)}-{utc.year:04d}.{utc:%m}" + ("" if monthly else f".{utc:%d}")


def parse_own_dated_index(name: str) -> tuple[str, datetime] | None:
    """Return (purpose, first moment of its day or month), or None if the name is not one of these."""
    match = _DATED.fullmatch(name)
    if match is None:
        return None
    try:
        moment = datetime(int(match["year"]), int(match["month"]), int(match["day"] or 1), tzinfo=UTC)
    except ValueError:
        return None
    return match["purpose"], moment


def parse_write_alias(name: str) -> tuple[str, int, Slot] | None:
    """Return (collection, generation, slot), or None if the name is not a write alias of ours."""
    match = _WRITE_ALIAS.fullmatch(name)
    if match is None:
        return None
    return match["collection"], int(match["generation"]), "a" if match["slot"] == "a" else "b"


def parse_read_alias(name: str) -> str | None:
    """Return the collection, or None if the name is not a read alias of ours."""
    if parse_write_alias(name) or _INDEX.fullmatch(name):
        return None
    match = _READ_ALIAS.fullmatch(name)
    return match["collection"] if match else None


def collection_of(index: str) -> str | None:
    """Return the collection that a concrete index of ours belongs to, or None."""
    match = _INDEX.fullmatch(index)
    return match["collection"] if match else None
