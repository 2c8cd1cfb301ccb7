"""Spelling suggestions: made of a real node's own terms, within the filters of the search and of the key."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.elastic import Cluster
from app.spelling import words_of
from tests.searching import PATIENT, Asker, StandIn, drop_collection, ids, make_collection

pytestmark = pytest.mark.node
TEXT: dict[str, Any] = {"routes": [{"kind": "text"}]}


def document(id_: str, text: str, *, lang: str = "en", title: str = "") -> dict[str, Any]:
    return {"id": id_, "title": title, "lang": lang, "chunks": [(text, [1.0, 0.0, 0.0, 0.0])]}


DOCUMENTS = [
    document("k1", "deploying on kubernetes with care"),
    document("k2", "kubernetes upgrades", title="Maintenance"),
    document("e1", "elasticsearch settings for production"),
    document("z1", "如何在生产环境部署"),
    document("d1", "dogs that ware hats, wheat and sold"),
    # Seen by others only.
    document("s1", "the project bluebird is secret", lang="xx"),
    document("s2", "bluebird budget for producton", lang="xx"),
]
HIDDEN_BY_TIME = [{**document("x1", "redbird settigns"), "expires_at": "2024-06-01"}]
VISIBLE = [{"term": {"lang": "en"}}]


@pytest.fixture
async def asker(cluster: Cluster) -> AsyncIterator[Asker]:
    collection = await make_collection(cluster, [*DOCUMENTS, *HIDDEN_BY_TIME], dims=4)
    yield Asker(cluster, collection, StandIn(dims=4))
    await drop_collection(cluster, collection)


def texts(answer: Any) -> list[str] | None:
    return None if answer.suggestions is None else [each.text for each in answer.suggestions]


async def test_misspelt_words_are_spelled_as_documents_have_them(asker: Asker) -> None:
    answer = await asker.ask("Elasticsaerch setings!", suggest=True, **TEXT)
    assert texts(answer) == ["elasticsearch settings!"]
    assert answer.suggestions is not None
    assert 0 < answer.suggestions[0].score < 1
    assert texts(await asker.ask("mantenance", suggest=True, **TEXT)) == ["maintenance"]
    assert texts(await asker.ask("部署 elasticsaerch", suggest=True, **TEXT)) == ["部署 elasticsearch"]


async def test_what_is_spelled_well_or_is_like_nothing_gets_none(asker: Asker) -> None:
    for query in ("kubernetes upgrade", "zzzzyyyy", "部署", "abc"):
        assert texts(await asker.ask(query, suggest=True, **TEXT)) == []


async def test_words_that_hold_a_question_together_are_never_changed(asker: Asker) -> None:
    for query in ("what does the canteen serve", "Where were they", "it doesn\u2019t"):
        assert texts(await asker.ask(query, suggest=True, **TEXT)) == []
    # As a right word is not, which the caller's own filter alone keeps from being found.
    assert texts(await asker.ask("deploying", suggest=True, filter={"id": "d1"}, **TEXT)) == []


async def test_left_out_it_is_looked_for_where_words_find_nothing(asker: Asker) -> None:
    assert texts(await asker.ask("elasticsaerch", **TEXT)) == ["elasticsearch"]
    found = await asker.ask("elasticsaerch production", **TEXT)
    assert (ids(found), texts(found)) == (["e1"], None)
    assert texts(await asker.ask("elasticsaerch", suggest=False, **TEXT)) is None
    assert texts(await asker.ask("zzzzyyyy", **TEXT)) is None


async def test_a_suggestion_tells_nothing_from_beyond_the_filters(asker: Asker) -> None:
    # Everybody's: the secret word, and the rare spelling is known.
    assert texts(await asker.ask("bleubird", suggest=True, **TEXT)) == ["bluebird"]
    assert texts(await asker.ask("producton", suggest=True, **TEXT)) == []
    # A key's filter: neither is the word suggested, nor does the hidden spelling keep its own from being corrected.
    assert texts(await asker.ask("bleubird", forced=VISIBLE, suggest=True, **TEXT)) == []
    assert texts(await asker.ask("bleubird", forced=VISIBLE, **TEXT)) is None
    assert texts(await asker.ask("producton", forced=VISIBLE, suggest=True, **TEXT)) == ["production"]
    # What has expired likewise.
    assert texts(await asker.ask("redbrid", suggest=True, **TEXT)) == []
    assert texts(await asker.ask("settigns", suggest=True, **TEXT)) == ["settings"]
    # The request's own filter likewise.
    assert texts(await asker.ask("bleubird", filter={"lang": "en"}, suggest=True, **TEXT)) == []


async def test_pages_after_the_first_look_for_none_and_points_in_time_do_not_matter(asker: Asker) -> None:
    first = await asker.ask(
        "kubernetes setings", **{**PATIENT, "paging": True}, top_k=1, suggest=True, **TEXT
    )
    assert texts(first) == ["kubernetes settings"]
    assert first.cursor is not None
    assert (await asker.page(first.cursor)).suggestions is None


def test_words_of_spaced_scripts_alone_are_looked_up() -> None:
    assert [match[0] for match in words_of("Größe größe v1.2 ab 电脑维修 naïve user's")] == [
        "Größe",
        "naïve",
        "user's",
    ]
    assert words_of("What does this serve?")[0][0] == "serve"
