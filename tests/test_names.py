"""Names of aliases and indices: written once, read back, and never mistaken for one another."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from app import names
from app.values import CollectionName

MOMENT = datetime(2026, 1, 31, 8, 5, 9, 42_999, tzinfo=UTC)
COLLECTION = TypeAdapter(CollectionName)


def test_names_of_a_collection():
    assert names.read_alias("handbook") == "halflife-handbook"
    assert names.write_alias("handbook", 3) == "halflife-handbook-w-3-a"
    assert names.write_alias("handbook", 3, "b") == "halflife-handbook-w-3-b"
    assert names.index_name("handbook", MOMENT) == "halflife-handbook-20260131080509042"
    assert names.index_pattern("handbook") == "halflife-handbook-*"
    assert names.own_index("state") == "halflife_state"


def test_index_name_is_in_utc_whatever_the_zone_of_the_moment():
    there = MOMENT.astimezone(timezone(timedelta(hours=9)))
    assert names.index_name("handbook", there) == names.index_name("handbook", MOMENT)


def test_index_name_sorts_by_time_also_in_the_first_millennium():
    assert names.index_name("x", datetime(999, 1, 1, tzinfo=UTC)) == "halflife-x-09990101000000000"


def test_a_moment_without_a_zone_is_refused():
    naive = MOMENT.replace(tzinfo=None)
    with pytest.raises(ValueError, match="time zone"):
        names.index_name("x", naive)


@pytest.mark.parametrize("generation", [0, -1])
def test_generations_count_from_one(generation):
    with pytest.raises(ValueError, match="count from 1"):
        names.write_alias("x", generation)


@pytest.mark.parametrize(
    "name,expected",
    [
        ("halflife-handbook-w-1-a", ("handbook", 1, "a")),
        ("halflife-hand-book_2-w-12-b", ("hand-book_2", 12, "b")),
        ("halflife-w-w-1-a", ("w", 1, "a")),
        ("halflife-handbook-w-0-a", None),
        ("halflife-handbook-w-01-a", None),
        ("halflife-handbook-w-1-c", None),
        ("halflife-handbook", None),
        ("halflife-w-1-a", None),
        ("other-handbook-w-1-a", None),
        ("halflife-handbook-w-1-a\n", None),
    ],
)
def test_parse_write_alias(name, expected):
    assert names.parse_write_alias(name) == expected


@pytest.mark.parametrize(
    "name,collection",
    [
        ("halflife-handbook", "handbook"),
        ("halflife-hand-book", "hand-book"),
        ("halflife-handbook-w-1-a", None),
        ("halflife-handbook-20260131080509042", None),
        ("halflife_state", None),
        ("halflife-", None),
    ],
)
def test_parse_read_alias(name, collection):
    assert names.parse_read_alias(name) == collection


def test_the_indices_of_a_collection_are_told_from_those_of_a_longer_name():
    assert names.collection_of("halflife-handbook-20260131080509042") == "handbook"
    assert names.collection_of("halflife-handbook-old-20260131080509042") == "handbook-old"
    assert names.collection_of("halflife-handbook") is None


@given(
    st.from_regex(r"[a-z0-9w][a-z0-9_w]{0,5}(-[a-z0-9_w]{1,3}){0,3}", fullmatch=True),
    st.integers(1, 10**9),
    st.sampled_from("ab"),
)
def test_every_allowed_collection_comes_back_from_all_its_names(collection, generation, slot):
    try:
        COLLECTION.validate_python(collection)
    except ValidationError:
        return
    assert names.parse_read_alias(names.read_alias(collection)) == collection
    assert names.parse_write_alias(names.read_alias(collection)) is None
    write = names.write_alias(collection, generation, slot)
    assert names.parse_write_alias(write) == (collection, generation, slot)
    assert names.parse_read_alias(write) is None
    assert names.collection_of(write) is None
    index = names.index_name(collection, MOMENT)
    assert names.collection_of(index) == collection
    assert names.parse_read_alias(index) is None
