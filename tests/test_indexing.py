"""What happens to documents, on a real node, with a real loopback embedding server: every write, read and refusal."""

import asyncio
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import indexing, names, writes, writing
from app.answers import BulkResult
from app.catalog import Catalog, create, install_templates
from app.chunking import Chunking
from app.collection import Collection, CollectionOptions
from app.elastic import BulkAction, Cluster
from app.embedding import Embedder
from app.encoding import pack_vector, packed, unpack_vector
from app.errors import (
    ClusterUnavailable,
    CursorExpired,
    EmbedderUnavailable,
    HalflifeError,
    InvalidRequest,
    NotFound,
)
from app.indexing import Indexer
from app.targets import CatalogTargets
from app.times import parse_instant
from app.touches import TouchQueue
from app.writes import Patience, Stamper, Target
from tests.fakes import EmbeddingServer, Reply, openai_error, vector_of
from tests.nodes import StandsBefore

pytestmark = pytest.mark.node

DIMS = 8
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)


def now() -> datetime:
    return datetime.now(UTC)


def now_us() -> int:
    return time.time_ns() // 1_000


@dataclass
class World:
    """One collection, what writes to it and what embeds for it."""

    cluster: Cluster
    server: EmbeddingServer
    embedder: Embedder
    catalog: Catalog
    collection: Collection
    indexer: Indexer
    alias: str
    made: list[Indexer] = field(default_factory=list)

    def writer(self, worker: int, *, skew_us: int = 0, patience: Patience | None = None) -> Indexer:
        """Another service on the same collection, its clock wrong by so much."""
        return indexer_of(
            self.cluster, self.catalog, self.embedder, Stamper(worker, lambda: now_us() + skew_us), patience
        )

    async def upsert(self, *items: Any, refresh: writes.RefreshWhen = "false") -> BulkResult:
        return await self.indexer.upsert(items, collection=self.collection, refresh=refresh)

    async def get(self, id_: str) -> Any:
        [found] = await self.indexer.get([id_], collection=self.collection)
        return found

    async def raw(self, id_: str, index: str | None = None) -> dict[str, Any]:
        """The entry as the index has it, vectors as numbers: before a refresh they come as they were sent."""
        index = index or self.collection.index
        [entry] = await self.cluster.mget(index, [id_], source=True, vectors=True, timeout_s=10)
        for chunk in entry.get("_source", {}).get("chunks", ()):
            if isinstance(chunk.get("embedding"), str):
                chunk["embedding"] = unpack_vector(chunk["embedding"]).tolist()
        return entry

    async def ids(self, query: dict[str, Any] | None = None) -> list[str]:
        """Ids that a search finds now."""
        body = {"query": query or {"match_all": {}}, "size": 1_000, "sort": ["document_id"]}
        answer = await self.cluster.search(names.read_alias(self.collection.name), body, timeout_s=10)
        return [hit["_id"] for hit in answer["hits"]["hits"]]

    async def nearest(self, vector: Sequence[float], k: int = 10) -> list[tuple[str, Any]]:
        """Ids and scores of the documents whose chunks are nearest."""
        knn = {"field": "chunks.embedding", "query_vector": list(vector), "k": k, "num_candidates": 100}
        query = {"nested": {"path": "chunks", "query": {"knn": knn}, "score_mode": "max"}}
        answer = await self.cluster.search(
            names.read_alias(self.collection.name), {"query": query, "size": k}, timeout_s=10
        )
        return [(hit["_id"], hit["_score"]) for hit in answer["hits"]["hits"]]

    async def refresh(self) -> None:
        await self.cluster.refresh(names.read_alias(self.collection.name))


def indexer_of(
    cluster: Cluster, catalog: Catalog, embedder: Embedder, stamper: Stamper, patience: Patience | None = None
) -> Indexer:
    return Indexer(
        cluster=cluster,
        targets=lambda name: CatalogTargets(
            name, cluster=cluster, catalog=catalog, embedder=lambda collection: embedder
        ),
        stamper=stamper,
        now=now,
        chunks=Chunking(max_tokens=40, overlap_tokens=0),
        patience=patience,
    )


async def world_on(cluster: Cluster, server: EmbeddingServer, name: str, *, shards: int = 1) -> World:
    embedder = Embedder.connect(
        base_url=server.base_url,
        api_key=None,
        model="fake",
        dims=DIMS,
        retries=1,
        backoff_s=0.01,
        retry_budget_s=2,
    )
    await install_templates(cluster, dims=DIMS)
    options = CollectionOptions(
        declared={"pages": "long", "price": "double", "due": "date", "code": "keyword", "open": "boolean"},
        shards=shards,
    )
    collection = await create(cluster, name, options, dims=DIMS, model="fake", moment=now())
    catalog = Catalog(cluster)
    target = (await catalog.get(name)).target
    assert target is not None
    return World(
        cluster,
        server,
        embedder,
        catalog,
        collection,
        indexer_of(cluster, catalog, embedder, Stamper(1, now_us)),
        target.alias,
    )


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer
) -> AsyncIterator[World]:
    made = await world_on(cluster, server, unique("indexing"))
    yield made
    await made.embedder.close()


def statuses(result: BulkResult) -> list[str]:
    return [item.status for item in result.items]


# --- upsert ----------------------------------------------------------------------------------------------------------


async def test_a_document_comes_back_as_it_was_sent(world: World) -> None:
    sent = {
        "id": "leave-2026",
        "title": "Annual leave",
        "text": "Five days carry over until the end of March.",
        "creation_time": "2026-01-02",
        "updated_at": "2026-01-03T08:00:00+08:00",
        "expires_at": 1_800_000_000,
        "evergreen": True,
        "salience": 0.5,
        "tags": ["hr", "leave"],
        "lang": "en",
        "metadata": {"pages": 3, "note": None, "nested": {"a.b": [1, "x", 1.5]}},
    }
    result = await world.upsert(sent)
    [item] = result.items
    assert result.failed == 0
    assert item.model_dump() == {
        "id": "leave-2026",
        "status": "created",
        "version": item.version,
        "chunks": 1,
    }
    stored = await world.get("leave-2026")
    assert stored.model_dump(mode="json", exclude_unset=True) == {
        "id": "leave-2026",
        "title": "Annual leave",
        "text": "Five days carry over until the end of March.",
        "creation_time": "2026-01-02T00:00:00.000Z",
        "updated_at": "2026-01-03T00:00:00.000Z",
        "expires_at": "2027-01-15T08:00:00.000Z",
        "evergreen": True,
        "salience": 0.5,
        "tags": ["hr", "leave"],
        "lang": "en",
        "metadata": {"pages": 3, "note": None, "nested": {"a.b": [1, "x", 1.5]}},
        "version": item.version,
        "chunks": 1,
        "indexed_at": stored.model_dump(mode="json")["indexed_at"],
    }
    entry = await world.raw("leave-2026")
    assert entry["_source"]["declared"] == {"pages": 3}
    assert world.server.batches == [["Annual leave\nFive days carry over until the end of March."]]


async def test_a_second_upsert_replaces_the_whole_document(world: World) -> None:
    await world.upsert({"id": "a", "text": "one", "lang": "en", "metadata": {"k": "v"}})
    [first] = (await world.upsert({"id": "a", "text": "two"})).items
    assert (first.status, (await world.get("a")).metadata) == ("updated", {})
    await world.indexer.delete_ids(["a"], collection=world.collection)
    [again] = (await world.upsert({"id": "a", "text": "three"})).items
    assert again.status == "created"
    assert again.version is not None
    assert first.version is not None
    assert again.version > first.version


FIRST: dict[str, Any] = {
    "id": "a",
    "title": "T",
    "text": "some words",
    "creation_time": "2026-01-02",
    "tags": ["x"],
    "metadata": {"pages": 3, "k": [1, {"z": None}]},
}
CHANGED = {
    "the text": {"text": "other words"},
    "the title, which is embedded with each chunk": {"title": "U"},
    "a date": {"creation_time": "2026-01-03"},
    "metadata": {"metadata": {"pages": 4}},
    "a tag dropped": {"tags": []},
    "a revision": {"revision": 5},
    "a vector of its own": {"embedding": [0.5] * DIMS},
    "no vector wanted": {"embedding": None},
}


async def test_the_same_again_is_unchanged_and_costs_neither_embedding_nor_write(world: World) -> None:
    other = {**FIRST, "id": "b"}
    first = (await world.upsert(FIRST, other)).items
    before, asked = await world.raw("a"), len(world.server.requests)
    again = (await world.upsert({**FIRST, "if_version": first[0].version}, other, {**FIRST, "id": "c"})).items
    assert [item.status for item in again] == ["unchanged", "unchanged", "created"]
    assert [item.version for item in again[:2]] == [item.version for item in first]
    assert again[0].chunks == 1
    assert await world.raw("a") == before
    assert len(world.server.requests) == asked + 1, "only the new one was embedded"


async def test_what_is_unchanged_is_made_visible_where_that_is_asked_for(world: World) -> None:
    await world.cluster.put_settings(world.collection.index, {"index": {"refresh_interval": "-1"}})
    await world.upsert(FIRST)
    assert await world.ids() == []
    [item] = (await world.upsert(FIRST, refresh="wait_for")).items
    assert item.status == "unchanged"
    assert await world.ids() == ["a"]


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
async def test_whatever_differs_is_written(world: World, change: dict[str, Any]) -> None:
    await world.upsert(FIRST)
    before = await world.raw("a")
    [item] = (await world.upsert({**FIRST, **change})).items
    assert item.status == "updated"
    assert (await world.raw("a"))["_seq_no"] > before["_seq_no"]


async def test_a_document_that_came_without_vector_gets_one_when_it_is_wanted(world: World) -> None:
    await world.upsert({**FIRST, "embedding": None})
    [item] = (await world.upsert(FIRST)).items
    assert item.status == "updated"
    assert "embedding" in (await world.raw("a"))["_source"]["chunks"][0]


async def test_what_was_deleted_or_touched_meanwhile_is_no_more_the_same(world: World) -> None:
    await world.upsert(FIRST)
    await world.indexer.delete_ids(["a"], collection=world.collection)
    assert [item.status for item in (await world.upsert(FIRST)).items] == ["created"]
    await world.indexer.touch({"a": NOON}, collection=world.collection)
    assert [item.status for item in (await world.upsert(FIRST)).items] == ["updated"]


async def test_unchanged_is_said_only_when_every_copy_has_it_and_the_primary_still_holds_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.upsert(FIRST)
    writer = world.indexer._writer(world.collection)

    async def read() -> dict[str, writes.Stored]:
        return await writer.read(["a"], source=True)

    seen = await read()
    assert await writer.settled(seen) == {"a"}
    place = seen["a"].place
    assert place is not None
    # What was read is not on all copies yet: another's write, which may still be lost.
    [checkpoint] = (await world.cluster.checkpoints(world.collection.index)).values()
    assert checkpoint == place[0]
    ahead = {"a": replace(seen["a"], place=(place[0] + 1, place[1]))}
    assert await writer.settled(ahead) == set()
    # Somebody was faster between the read and the question.
    await world.upsert({**FIRST, "text": "other words"})
    assert await writer.settled(seen) == set()
    # The index may not be written to: a reindex has fenced it.
    seen = await read()
    await world.cluster.add_write_block(world.collection.index)
    try:
        assert await writer.settled(seen) == set()
    finally:
        await world.cluster.clear_write_block(world.collection.index)
    assert await writer.settled(seen) == {"a"}


async def test_long_text_is_cut_and_only_changed_chunks_are_embedded_again(world: World) -> None:
    sections = [f"# Part {i}\n\n" + f"Sentence about topic number {i}. " * 3 for i in range(6)]
    [first] = (await world.upsert({"id": "long", "text": "\n\n".join(sections)})).items
    assert first.chunks == 6
    before = (await world.raw("long"))["_source"]["chunks"]
    text = (await world.get("long")).text
    assert [text[chunk["start"] : chunk["end"]] for chunk in before] == [chunk["text"] for chunk in before]
    world.server.requests.clear()
    sections[2] = "# Part 2\n\nSomething else entirely."
    [second] = (await world.upsert({"id": "long", "text": "\n\n".join(sections)})).items
    assert (second.status, second.chunks) == ("updated", 6)
    assert world.server.batches == [["# Part 2\n\nSomething else entirely."]]
    after = (await world.raw("long"))["_source"]["chunks"]
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        same = np.allclose(old["embedding"], new["embedding"], atol=1e-6)
        assert same == (number != 2)
    # Shorter: no chunk of before is left, neither in the document nor in the vector index.
    await world.upsert({"id": "long", "text": sections[0]}, refresh="true")
    assert len((await world.raw("long"))["_source"]["chunks"]) == 1
    assert await world.ids({"nested": {"path": "chunks", "query": {"match": {"chunks.text": "topic"}}}}) == [
        "long"
    ]
    assert (
        await world.ids({"nested": {"path": "chunks", "query": {"match": {"chunks.text": "entirely"}}}}) == []
    )


async def test_a_new_title_embeds_anew(world: World) -> None:
    await world.upsert({"id": "a", "title": "Old", "text": "same"})
    world.server.requests.clear()
    await world.upsert({"id": "a", "title": "New", "text": "same"})
    assert world.server.batches == [["New\nsame"]]


async def test_the_callers_vector_is_stored_and_not_taken_for_the_models_own(world: World) -> None:
    mine = vector_of("mine", DIMS)
    await world.upsert({"id": "a", "text": "x " * 500, "embedding": mine}, refresh="true")
    assert world.server.batches == []
    [chunk] = (await world.raw("a"))["_source"]["chunks"]
    assert np.allclose(chunk["embedding"], mine, atol=1e-6)
    assert (await world.nearest(mine))[0] == ("a", pytest.approx(1.0, abs=1e-3))
    await world.upsert({"id": "a", "text": "x"})
    await world.upsert({"id": "b", "text": "y", "embedding": mine})
    await world.upsert({"id": "b", "text": "y"})
    assert world.server.batches == [["x"], ["y"]]


async def test_null_stores_without_a_vector(world: World) -> None:
    [item] = (await world.upsert({"id": "a", "text": "words", "embedding": None}, refresh="true")).items
    assert (item.status, item.chunks, world.server.batches) == ("created", 1, [])
    assert "embedding" not in (await world.raw("a"))["_source"]["chunks"][0]
    assert await world.ids({"match": {"text": "words"}}) == ["a"]
    assert await world.nearest(vector_of("words", DIMS)) == []
    await world.upsert({"id": "a", "text": "words"})
    assert world.server.batches == [["words"]]


async def test_a_title_alone_is_embedded(world: World) -> None:
    await world.upsert({"id": "a", "title": "Only a title"})
    assert world.server.batches == [["Only a title"]]


async def test_texts_cut_by_the_embedder_are_told(world: World) -> None:
    world.server.says_too_long = False
    world.server.max_input_tokens = 3
    result = await world.upsert({"id": "a", "text": "one two three four"}, {"id": "b", "text": "one two"})
    assert [item.truncated for item in result.items] == [True, None]


# --- bad items: BC-21, BC-25, BC-39, BC-45 ---------------------------------------------------------------------------


async def test_blank_texts_are_refused_alone(world: World) -> None:
    """BC-21: the embedding server never sees a blank text."""
    result = await world.upsert(
        {"id": "1", "text": "alpha"},
        {"id": "2", "text": ""},
        {"id": "3", "text": "   \n"},
        {"id": "4", "text": "delta"},
    )
    assert statuses(result) == ["created", "invalid", "invalid", "created"]
    assert world.server.batches == [["alpha", "delta"]]
    world.server.requests.clear()
    with pytest.raises(InvalidRequest, match="blank"):
        await world.upsert({"id": "2", "text": " "})
    assert world.server.batches == []


@pytest.mark.parametrize(
    "vector, reason",
    [
        pytest.param([0.0] * 8, "zero vector", id="zero"),
        pytest.param([1e-30] + [0.0] * 7, "zero vector", id="too small"),
        pytest.param([1e39] + [0.0] * 7, "finite 32-bit", id="too large"),
        pytest.param([1.0, None] + [0.0] * 6, "must be a number", id="null inside"),
        pytest.param(["1"] + ["0"] * 7, "must be a number", id="text"),
        pytest.param([[1.0] + [0.0] * 7], "must be a number", id="nested"),
        pytest.param([], "1 to 4096", id="empty"),
        pytest.param([1.0, 0.0, 0.0], "has 3 numbers, and this collection's have 8", id="dims"),
    ],
)
async def test_bad_vectors_fail_alone_and_say_why(world: World, vector: Any, reason: str) -> None:
    """BC-25."""
    good = [1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    result = await world.upsert(
        {"id": "bad", "text": "t", "embedding": vector}, {"id": "ok", "text": "t", "embedding": good}
    )
    assert statuses(result) == ["invalid", "created"]
    error = result.items[0].error
    assert error is not None
    assert reason in error.detail
    assert error.field is not None
    assert error.field.startswith("embedding")
    assert error.remedy


async def test_what_elasticsearch_itself_refuses_is_that_items_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of 1,200 digits, were it let through: what the cluster says is told with its item and stops no other."""
    monkeypatch.setattr(writing, "NUMBERS_BELOW", 10**2_000)
    result = await world.upsert(
        {"id": "a", "text": "t", "metadata": {"k": 10**1_200}}, {"id": "b", "text": "t"}
    )
    assert statuses(result) == ["invalid", "created"]
    error = result.items[0].error
    assert error is not None
    assert error.type == "elasticsearch-rejected"
    assert "1000" in error.detail


async def test_ids_are_measured_in_bytes(world: World) -> None:
    """BC-39."""
    good = ["a" * 512, "日" * 170, "😀" * 128]
    bad = ["z" * 513, "日" * 171, "😀" * 129, "", "..", 7, None]
    result = await world.upsert(
        {"id": "ok1", "text": "t"},
        *({"id": id_, "text": "t"} for id_ in [*good, *bad]),
        {"id": "ok2", "text": "t"},
    )
    assert statuses(result) == ["created"] * 4 + ["invalid"] * 7 + ["created"]
    assert result.failed == 7
    for item in result.items[4:7]:
        assert item.error is not None
        assert "512 bytes" in item.error.detail
        assert item.error.field == "id"
    assert [item.id for item in result.items[4:]] == [
        "z" * 513,
        "日" * 171,
        "😀" * 129,
        "",
        "..",
        None,
        None,
        "ok2",
    ]
    for id_ in good:
        assert (await world.get(id_)).id == id_


async def test_a_bulk_with_bad_items_stores_the_good_ones(world: World) -> None:
    """BC-45."""
    result = await world.upsert(
        {"id": "b1", "text": "t", "embedding": [1.0, 2, 3, 0, 0, 0, 0, 0]},
        {"id": "b2", "text": "t", "embedding": [0.0] * 8},
        {"id": "b3", "text": "t", "embedding": [1.0, 2.0]},
        {"id": "b4", "text": "t", "creation_time": "nope"},
        {"id": "b5", "text": "fine"},
    )
    assert statuses(result) == ["created", "invalid", "invalid", "invalid", "created"]
    assert result.failed == 3
    assert result.items[3].error is not None
    assert result.items[3].error.field == "creation_time"
    assert [
        found.id for found in await world.indexer.get(["b1", "b5"], collection=world.collection) if found
    ] == ["b1", "b5"]


async def test_a_large_bulk_goes_on_past_its_bad_items(world: World) -> None:
    """BC-45: bad items in the first slice, and all slices go out."""
    items: list[Any] = [
        {"id": f"n{i}", "text": f"text {i}", "embedding": vector_of(f"{i}", DIMS)} for i in range(1_000)
    ]
    items[3] = {"id": "n3", "text": "t", "embedding": [1.0]}
    items[7] = "not an object"
    result = await world.upsert(*items, refresh="wait_for")
    assert (result.failed, statuses(result).count("created")) == (2, 998)
    assert await world.cluster.count(names.read_alias(world.collection.name)) == 998


@pytest.mark.parametrize(
    "item, field, words",
    [
        pytest.param({"id": "a", "text": "t", "colour": "red"}, "colour", "unknown field", id="unknown field"),
        pytest.param({"text": "t"}, "id", "missing", id="no id"),
        pytest.param({"id": "a", "text": 5}, "text", "must be text", id="text is a number"),
        pytest.param({"id": "a", "text": "t", "tags": ["x", 3]}, "tags.1", "must be text", id="a tag is a number"),
        pytest.param({"id": "a", "text": "t", "metadata": {"pages": "3"}}, "metadata.pages", "declared as long", id="declared text"),
        pytest.param({"id": "a", "text": "t", "metadata": {"pages": 2.5}}, "metadata.pages", "fraction", id="declared fraction"),
        pytest.param({"id": "a", "text": "t", "metadata": {"pages": 2**63}}, "metadata.pages", "64 bits", id="declared too long"),
        pytest.param({"id": "a", "text": "t", "metadata": {"open": 1}}, "metadata.open", "boolean", id="declared boolean"),
        pytest.param({"id": "a", "text": "t", "metadata": {"due": "soon"}}, "metadata.due", "declared as date", id="declared date"),
        pytest.param({"id": "a", "text": "t", "metadata": {"code": {"x": 1}}}, "metadata.code", "an object", id="declared object"),
        pytest.param({"id": "a", "text": "\ud800"}, "text", "surrogate", id="lone surrogate"),
        pytest.param({"id": "a", "text": "t", "revision": 1, "if_version": 1}, "revision", "two ways", id="two guards"),
        pytest.param("text", None, "JSON object", id="no object"),
    ],
)  # fmt: skip
async def test_an_invalid_item_names_its_field_and_remedy(
    world: World, item: Any, field: str | None, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await world.upsert(item)
    [told] = caught.value.members["items"]
    assert caught.value.field == "documents[0]" + (f".{field}" if field else "")
    assert told["status"] == "invalid"
    assert told["error"].get("field") == field
    assert told["error"]["remedy"]
    assert caught.value.members["failed"] == 1
    json.dumps(caught.value.problem(), ensure_ascii=False).encode()


async def test_what_was_sent_is_not_echoed(world: World) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await world.upsert({"id": "x" * 100_000, "text": ["y" * 100_000], "z" * 100_000: 1})
    assert len(json.dumps(caught.value.problem())) < 3_000


async def test_items_of_one_id_are_applied_in_order(world: World) -> None:
    result = await world.upsert(
        {"id": "a", "text": "first"},
        {"id": "b", "text": "other"},
        {"id": "a", "text": "second"},
        {"id": "a", "text": "third"},
    )
    assert statuses(result) == ["created", "created", "updated", "updated"]
    assert (await world.get("a")).text == "third"
    assert (await world.get("a")).version == result.items[3].version


async def test_an_id_with_more_items_than_may_wait_for_each_other_stays_as_it_was(world: World) -> None:
    """They are done one after another: a request of ten thousand would take minutes of a place for writes."""
    crowd = [{"id": "a", "text": f"state {n}"} for n in range(101)]
    result = await world.upsert({"id": "b", "text": "other"}, *crowd, {"id": "c", "text": "another"})
    assert statuses(result) == ["created", *["invalid"] * 101, "created"]
    error = result.items[1].error
    assert error is not None
    assert error.field == "id"
    assert "101 items" in error.detail
    assert "several requests" in (error.remedy or "")
    assert await world.get("a") is None
    assert sum(len(batch) for batch in world.server.batches) == 2
    assert statuses(await world.upsert(*crowd[:100]))[-1] == "updated"
    with pytest.raises(InvalidRequest, match="none of the 101 items is valid"):
        await world.indexer.patch([{"id": "a", "lang": "en"}] * 101, collection=world.collection)
    with pytest.raises(InvalidRequest, match="none of the 101 items is valid"):
        await world.indexer.delete_ids(["a"] * 101, collection=world.collection)
    assert (await world.get("a")).text == "state 99"


# --- ids: BC-38 ------------------------------------------------------------------------------------------------------

STRANGE = [
    "a/b/c",
    "../x",
    "a?b#c",
    "a b",
    "%2F",
    "a%2Fb",
    ".",
    "*",
    "a,b",
    "日本/語",
    "_x",
    "_all",
    '"',
    "\\",
    "\n",
    "\0",
]


async def test_every_id_names_itself_and_deletes_only_itself(world: World) -> None:
    """BC-38."""
    await world.upsert(
        *({"id": id_, "text": f"text of {id_}"} for id_ in [*STRANGE, "a", "b"]), refresh="true"
    )
    assert sorted(await world.ids()) == sorted([*STRANGE, "a", "b"])
    left = set(STRANGE) | {"a", "b"}
    for id_ in STRANGE:
        assert (await world.get(id_)).id == id_
        result = await world.indexer.delete_ids([id_], collection=world.collection)
        assert statuses(result) == ["deleted"]
        left.remove(id_)
        found = await world.indexer.get(sorted(left | {id_}), collection=world.collection)
        assert {document.id for document in found if document} == left


async def test_deleting_what_is_not_there_is_no_failure(world: World) -> None:
    """BC-45: and does not stop the rest."""
    await world.upsert({"id": "existing", "text": "t"})
    result = await world.indexer.delete_ids(
        ["missing", "existing", "existing", "x" * 513], collection=world.collection
    )
    assert statuses(result) == ["not_found", "deleted", "not_found", "invalid"]
    assert result.failed == 1
    entry = await world.raw("existing")
    assert set(entry["_source"]) == {"document_id", "deleted", "indexed_at"}
    assert not (await world.raw("missing"))["found"]


# --- refresh: BC-47 --------------------------------------------------------------------------------------------------


async def test_refresh(world: World) -> None:
    """BC-47: what is acknowledged is read at once, and is searched when the refresh that was asked for is done."""
    await world.upsert({"id": "v", "text": "t"})
    assert (await world.get("v")).id == "v"
    await world.upsert({"id": "v2", "text": "t"}, refresh="wait_for")
    assert "v2" in await world.ids()
    await world.indexer.delete_ids(["v"], collection=world.collection)
    assert await world.get("v") is None
    await world.indexer.delete_ids(["v2"], collection=world.collection, refresh="wait_for")
    assert await world.ids() == []
    await world.upsert({"id": "v3", "text": "t"}, refresh="true")
    assert await world.ids() == ["v3"]


@pytest.mark.parametrize("interval", ["-1", "60s"])
async def test_who_waits_for_a_refresh_that_is_not_due_soon_gets_one_at_once(
    world: World, interval: str
) -> None:
    await world.cluster.put_settings(world.collection.index, {"index": {"refresh_interval": interval}})
    result = await world.upsert({"id": "v1", "text": "t"}, refresh="wait_for")
    assert statuses(result) == ["created"]
    assert await world.ids() == ["v1"]


# --- dates: BC-29, BC-30 ---------------------------------------------------------------------------------------------


async def test_dates_are_one_instant_however_they_are_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BC-30, in a process that lives in Shanghai."""
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    forms = {
        "z": "2025-01-21T00:00:00Z",
        "plus8": "2025-01-21T08:00:00+08:00",
        "naive": "2025-01-21T00:00:00",
        "date": "2025-01-21",
        "frac": "2025-01-21T00:00:00.1234567Z",
    }
    try:
        await world.upsert(
            *({"id": id_, "text": "t", "creation_time": at} for id_, at in forms.items()), refresh="true"
        )
    finally:
        monkeypatch.undo()
        time.tzset()
    window = {"range": {"creation_time": {"gte": "2025-01-21T00:00:00Z", "lt": "2025-01-21T00:00:01Z"}}}
    assert await world.ids(window) == sorted(forms)
    for id_ in ("z", "plus8", "naive", "date"):
        assert (await world.get(id_)).model_dump(mode="json")["creation_time"] == "2025-01-21T00:00:00.000Z"
    assert (await world.get("frac")).model_dump(mode="json")["creation_time"] == "2025-01-21T00:00:00.123Z"


async def test_numbers_are_dates_only_where_their_unit_is_certain(world: World) -> None:
    """BC-29."""
    values = [
        1700000000,
        1700000000000,
        "1700000000",
        86400000,
        20000000001,
        "20240101",
        "2024",
        1700000000000000,
    ]
    result = await world.upsert(
        *({"id": f"d{i}", "text": "t", "creation_time": value} for i, value in enumerate(values))
    )
    assert statuses(result) == ["created"] * 2 + ["invalid"] * 6
    for id_ in ("d0", "d1"):
        assert (await world.raw(id_))["_source"]["creation_time"] == "2023-11-14T22:13:20.000Z"


# --- metadata: BC-41, BC-42 ------------------------------------------------------------------------------------------


async def test_metadata_of_any_shape_comes_back_as_sent(world: World) -> None:
    """BC-42, one document after the other: none is refused because of an earlier one."""
    sequence: list[dict[str, Any]] = [
        {"page": 1}, {"page": "three"}, {"page": {"n": 1}}, {"page": True}, {"d": "2024-01-01"}, {"d": "n/a"}, {"a": 1},
        {"a.b": 2}, {"": 1}, {".": 1}, {" ": 1}, {"mix": [1, "a"]}, {"big": 10**19}, {"huge": 10**300}, {"f": 1.0},
        {"small": 5e-324}, {"neg": -(10**25)}, {"deep": {"a": {"b": [[1], {"c": None}]}}}, {"text": "\u2028\0\x7f😀"},
        {"e": {}}, {"l": []}, {"float": 0.1234567890123456},
    ]  # fmt: skip
    for number, metadata in enumerate(sequence):
        await world.upsert({"id": f"m{number}", "text": "t", "metadata": metadata})
        stored = (await world.get(f"m{number}")).metadata
        assert (stored, type(next(iter(stored.values())))) == (metadata, type(next(iter(metadata.values()))))
    await world.refresh()
    assert await world.ids({"term": {"metadata.page": "three"}}) == ["m1"]
    page = await world.indexer.list_documents([], collection=world.collection, size=100)
    assert {document.id: document.metadata for document in page.documents} == {
        f"m{number}": metadata for number, metadata in enumerate(sequence)
    }


async def test_metadata_cannot_grow_the_mapping_or_break_another_document(world: World) -> None:
    """BC-41."""
    deep: dict[str, Any] = {"k": 1}
    for _ in range(25):
        deep = {"k": deep}
    before = await world.cluster.get_mapping(world.collection.index)
    result = await world.upsert(
        {"id": "many", "text": "t", "metadata": {f"key{i}": i for i in range(1_001)}},
        {"id": "deep", "text": "t", "metadata": deep},
        {"id": "immense", "text": "t", "metadata": {"k": "z" * 40_000}},
        {"id": "long300", "text": "t", "metadata": {"k": "y" * 300}},
        {"id": "plain", "text": "t", "metadata": {"k": "v"}},
        refresh="true",
    )
    assert statuses(result) == ["created", "invalid", "created", "created", "created"]
    assert result.items[1].error is not None
    assert "16 levels" in result.items[1].error.detail
    assert await world.cluster.get_mapping(world.collection.index) == before
    assert await world.ids({"term": {"metadata.k": "y" * 300}}) == ["long300"]
    assert (await world.get("immense")).metadata == {"k": "z" * 40_000}
    assert statuses(await world.upsert({"id": "plain", "text": "t", "metadata": {"k": "w"}})) == ["updated"]


async def test_declared_values_are_typed_and_the_metadata_stays_as_sent(world: World) -> None:
    metadata = {
        "pages": 3.0,
        "price": 2,
        "due": "2026-01-31T08:00:00+08:00",
        "code": 7,
        "open": False,
        "other": "x",
    }
    await world.upsert(
        {"id": "a", "text": "t", "metadata": metadata},
        {"id": "b", "text": "t", "metadata": {"pages": [1, None, 9]}},
    )
    entry = (await world.raw("a"))["_source"]
    assert entry["declared"] == {
        "pages": 3, "price": 2.0, "due": "2026-01-31T00:00:00.000Z", "code": "7", "open": False
    }  # fmt: skip
    assert (await world.get("a")).metadata == metadata
    await world.refresh()
    assert await world.ids({"range": {"declared.pages": {"gte": 9}}}) == ["b"]


# --- the embedding server's failures: BC-23 --------------------------------------------------------------------------


async def test_a_text_that_cannot_be_embedded_fails_alone(world: World) -> None:
    """BC-23: and what was embedded before is stored."""
    world.server.poison["bad"] = openai_error(400, "this text is not for us")
    result = await world.upsert(*({"id": text, "text": text} for text in ("good", "bad", "fine")))
    assert statuses(result) == ["created", "failed", "created"]
    error = result.items[1].error
    assert error is not None
    assert error.type == "embedder-rejected"
    assert "not for us" in error.detail
    assert await world.get("bad") is None


async def test_one_chunk_without_a_vector_keeps_its_document_out(world: World) -> None:
    text = "\n\n".join(f"# H{i}\n\n" + f"Words about {i}. " * 5 for i in range(3))
    world.server.poison["# H1\n\n" + ("Words about 1. " * 5).strip()] = openai_error(400, "no")
    result = await world.upsert({"id": "long", "text": text}, {"id": "ok", "text": "t"})
    assert statuses(result) == ["failed", "created"]
    assert await world.get("long") is None


async def test_without_the_embedding_server_nothing_is_half_stored(world: World) -> None:
    world.server.answer = lambda seen: Reply(503, {"error": "down"})
    with pytest.raises(EmbedderUnavailable, match="no item was acknowledged") as caught:
        await world.upsert({"id": "a", "text": "t"}, {"id": "b", "text": ""})
    assert [item["status"] for item in caught.value.members["items"]] == ["failed", "invalid"]
    result = await world.upsert({"id": "a", "text": "t"}, {"id": "b", "text": "t", "embedding": None})
    assert statuses(result) == ["failed", "created"]
    assert result.items[0].error is not None
    assert result.items[0].error.type == "embedder-unavailable"


# --- revisions and versions ------------------------------------------------------------------------------------------


async def test_an_older_revision_is_refused(world: World) -> None:
    async def send(revision: int, text: str) -> tuple[str, int | None]:
        result = await world.upsert({"id": "a", "text": text, "revision": revision})
        return result.items[0].status, result.items[0].version

    assert await send(5, "five") == ("created", 5)
    assert await send(4, "four") == ("conflict", 5)
    assert await send(5, "five again") == ("unchanged", 5)
    assert await send(9, "nine") == ("updated", 9)
    stored = await world.get("a")
    assert (stored.text, stored.revision, stored.version) == ("nine", 9, 9)


async def test_touches_patches_and_deletes_neither_swallow_nor_revive_a_revision(world: World) -> None:
    async def send(revision: int) -> str:
        result = await world.upsert({"id": "a", "text": f"r{revision}", "revision": revision})
        return result.items[0].status

    assert await send(5) == "created"
    await world.indexer.touch({"a": NOON}, collection=world.collection)
    await world.indexer.patch([{"id": "a", "lang": "en"}], collection=world.collection)
    assert (await world.get("a")).version == 7
    # Versions 6 and 7 went to the touch and the patch; the caller's next revisions are news all the same.
    assert await send(5) == "unchanged"
    assert await send(6) == "updated"
    assert (await world.get("a")).text == "r6"
    assert statuses(await world.indexer.delete_ids(["a"], collection=world.collection)) == ["deleted"]
    assert await send(6) == "conflict"
    assert await world.get("a") is None
    assert await send(7) == "created"
    assert (await world.get("a")).revision == 7


async def test_racing_revisions_leave_the_highest(world: World) -> None:
    order = list(range(1, 21))
    random.Random(3).shuffle(order)
    results = await asyncio.gather(
        *(world.upsert({"id": "a", "text": f"r{revision}", "revision": revision}) for revision in order)
    )
    told = {revision: result.items[0].status for revision, result in zip(order, results, strict=True)}
    stored = await world.get("a")
    assert (stored.text, stored.revision) == ("r20", 20)
    assert set(told.values()) <= {"created", "updated", "conflict"}
    assert told[20] in ("created", "updated")


async def test_if_version_writes_only_what_was_read(world: World) -> None:
    [made] = (await world.upsert({"id": "a", "text": "one"})).items
    assert made.version is not None
    results = await asyncio.gather(
        *(world.upsert({"id": "a", "text": f"w{i}", "if_version": made.version}) for i in range(8))
    )
    told = [result.items[0].status for result in results]
    assert sorted(told) == ["conflict"] * 7 + ["updated"]
    winner = told.index("updated")
    stored = await world.get("a")
    assert (stored.text, stored.version) == (f"w{winner}", made.version + 1)
    [late] = (await world.upsert({"id": "a", "text": "late", "if_version": made.version})).items
    assert (late.status, late.version) == ("conflict", made.version + 1)
    [missing] = (await world.upsert({"id": "none", "text": "t", "if_version": 1})).items
    assert missing.status == "conflict"
    assert await world.get("none") is None


async def test_a_slow_clock_still_writes_last(world: World) -> None:
    fast, slow = world.writer(2, skew_us=3_600_000_000), world.writer(3, skew_us=-3_600_000_000)
    await fast.upsert([{"id": "a", "text": "fast"}], collection=world.collection)
    [item] = (await slow.upsert([{"id": "a", "text": "slow"}], collection=world.collection)).items
    stored = await world.get("a")
    assert (item.status, stored.text, stored.version) == ("updated", "slow", item.version)
    await slow.delete_ids(["a"], collection=world.collection)
    assert await world.get("a") is None


def test_stamps_grow_and_differ_among_workers() -> None:
    clock = iter([100, 100, 50, 100, 200])
    stamper = Stamper(5, lambda: next(clock))
    assert [stamper.next() for _ in range(4)] == [100 * 64 + 5, 101 * 64 + 5, 102 * 64 + 5, 103 * 64 + 5]
    assert stamper.after(1_000 * 64 + 63) == 1_001 * 64 + 5
    with pytest.raises(ValueError, match="0 to 63"):
        Stamper(64, lambda: 0)


# --- patch -----------------------------------------------------------------------------------------------------------


async def test_a_patch_keeps_text_and_vectors(world: World) -> None:
    text = "\n\n".join(f"# H{i}\n\n" + f"Words about {i}. " * 5 for i in range(3))
    await world.upsert(
        {
            "id": "a",
            "title": "T",
            "text": text,
            "lang": "en",
            "salience": 1.0,
            "metadata": {"pages": 1, "x": 1},
        },
        {"id": "b", "text": "other"},
        refresh="true",
    )
    before = await world.raw("a")
    query = before["_source"]["chunks"][1]["embedding"]
    nearest = await world.nearest(query)
    world.server.requests.clear()
    result = await world.indexer.patch(
        [
            {
                "id": "a",
                "evergreen": True,
                "salience": None,
                "start_date": "2026-01-01",
                "metadata": {"pages": 2},
            },
            {"id": "missing", "lang": "de"},
            {"id": "b", "text": "patched text is refused"},
        ],
        collection=world.collection,
        refresh="true",
    )
    assert statuses(result) == ["updated", "not_found", "invalid"]
    assert result.items[2].error is not None
    assert result.items[2].error.field == "text"
    assert world.server.batches == []
    after = await world.raw("a")
    for old, new in zip(before["_source"]["chunks"], after["_source"]["chunks"], strict=True):
        assert {**new, "embedding": None} == {**old, "embedding": None}
        assert np.allclose(old["embedding"], new["embedding"], atol=1e-6)
    assert await world.nearest(query) == [(id_, pytest.approx(score, abs=1e-5)) for id_, score in nearest]
    stored = await world.get("a")
    assert (stored.evergreen, stored.salience, stored.lang, stored.metadata) == (
        True,
        None,
        "en",
        {"pages": 2},
    )
    assert after["_source"]["declared"] == {"pages": 2}
    assert after["_version"] == before["_version"] + 1


async def test_patches_of_one_document_are_all_kept(world: World) -> None:
    await world.upsert({"id": "a", "text": "t"})
    changes = [
        {"lang": "en"},
        {"author": "x"},
        {"region": "eu"},
        {"source": "s"},
        {"url": "u"},
        {"department": "d"},
    ]
    results = await asyncio.gather(
        *(world.indexer.patch([{"id": "a", **change}], collection=world.collection) for change in changes)
    )
    assert [statuses(result) for result in results] == [["updated"]] * 6
    stored = (await world.get("a")).model_dump(exclude_unset=True)
    assert all(stored[key] == value for change in changes for key, value in change.items())
    [item] = (
        await world.indexer.patch([{"id": "a", "lang": "de", "if_version": 1}], collection=world.collection)
    ).items
    assert (item.status, item.version) == ("conflict", stored["version"])


# --- delete by filter ------------------------------------------------------------------------------------------------


async def test_a_filter_deletes_exactly_what_it_matches(world: World) -> None:
    """BC-44; documents that no refresh has shown yet are found too."""
    await world.upsert(
        {"id": "a1", "text": "t", "metadata": {"author": "Alice Wonderland", "ref": "doc-1"}},
        {"id": "a2", "text": "t", "metadata": {"author": "Alice Cooper", "ref": "doc-2"}},
    )
    clauses = [{"term": {"metadata.ref": "doc-1"}}]
    result = await world.indexer.delete_matching(clauses, collection=world.collection, refresh="true")
    assert (result.deleted, result.failures) == (1, [])
    assert await world.ids() == ["a2"]
    again = await world.indexer.delete_matching(clauses, collection=world.collection)
    assert again.deleted == 0
    everything = await world.indexer.delete_matching([], collection=world.collection, refresh="true")
    assert everything.deleted == 1
    assert await world.ids() == []


async def test_a_delete_of_many_pages_counts_each_once(world: World) -> None:
    items = [
        {"id": f"n{i}", "text": "t", "lang": "en" if i % 3 else "de", "embedding": None} for i in range(2_500)
    ]
    await world.upsert(*items)
    results = await asyncio.gather(
        *(
            indexer.delete_matching([{"term": {"lang": "en"}}], collection=world.collection)
            for indexer in (world.indexer, world.writer(2))
        )
    )
    assert sum(result.deleted for result in results) == sum(1 for i in range(2_500) if i % 3)
    await world.refresh()
    assert len(await world.ids()) == sum(1 for i in range(2_500) if not i % 3)


async def test_documents_that_change_meanwhile_are_judged_as_they_then_are(world: World) -> None:
    await world.upsert(*({"id": f"n{i}", "text": "t", "lang": "en", "embedding": None} for i in range(300)))

    async def rescue() -> None:
        other = world.writer(2)
        for i in range(0, 300, 3):
            await other.upsert(
                [{"id": f"n{i}", "text": "t", "lang": "de", "embedding": None}], collection=world.collection
            )

    rescued = asyncio.create_task(rescue())
    result = await world.indexer.delete_matching([{"term": {"lang": "en"}}], collection=world.collection)
    await rescued
    await world.refresh()
    left = await world.ids()
    # Each rescued document is there in its new form, whether it was deleted before or not; nothing else is.
    assert left == sorted(f"n{i}" for i in range(0, 300, 3))
    assert 200 <= result.deleted <= 300
    assert result.failures == []


# --- list ------------------------------------------------------------------------------------------------------------


async def test_a_list_runs_through_all_documents_in_id_order(world: World) -> None:
    await world.upsert(
        *({"id": f"n{i:03}", "text": f"t{i}", "lang": "en" if i % 2 else "de"} for i in range(25)),
        refresh="true",
    )
    await world.indexer.delete_ids(["n003"], collection=world.collection, refresh="true")
    found: list[str] = []
    after = pit = None
    while True:
        page = await world.indexer.list_documents(
            [{"term": {"lang": "en"}}], collection=world.collection, size=5, after=after, pit=pit
        )
        assert page.total == 11
        found += [document.id for document in page.documents]
        await world.upsert({"id": f"n{len(found):03}x", "text": "new", "lang": "en"}, refresh="true")
        if page.after is None:
            break
        after, pit = page.after, page.pit
    assert found == [f"n{i:03}" for i in range(25) if i % 2 and i != 3]
    assert page.pit is None
    assert pit is not None
    # The last page's answer may be lost on its way.
    again = await world.indexer.list_documents(
        [{"term": {"lang": "en"}}], collection=world.collection, size=5, after=after, pit=pit
    )
    assert again == page
    await world.cluster.close_pit(pit)
    with pytest.raises(CursorExpired):
        await world.indexer.list_documents([], collection=world.collection, size=5, after=after, pit=pit)


# --- touch -----------------------------------------------------------------------------------------------------------


async def test_forty_parallel_touches_leave_the_latest(world: World) -> None:
    await world.upsert({"id": "a", "title": "T", "text": "words"}, {"id": "gone", "text": "t"})
    await world.indexer.delete_ids(["gone"], collection=world.collection)
    before = await world.raw("a")
    moments = [NOON + timedelta(seconds=i) for i in range(40)]
    random.Random(1).shuffle(moments)
    results = await asyncio.gather(
        *(
            world.indexer.touch({"a": at, "gone": at, "never": at}, collection=world.collection)
            for at in moments
        )
    )
    for result in results:
        assert result.failed == 0
        assert statuses(result)[1:] == ["not_found", "not_found"]
        assert statuses(result)[0] in ("updated", "unchanged")
    stored = await world.get("a")
    assert stored.last_accessed_at == NOON + timedelta(seconds=39)
    after = await world.raw("a")
    assert np.allclose(
        before["_source"]["chunks"][0]["embedding"], after["_source"]["chunks"][0]["embedding"], atol=1e-6
    )
    assert {**after["_source"], "chunks": 0, "last_accessed_at": 0} == {
        **before["_source"],
        "chunks": 0,
        "last_accessed_at": 0,
    }
    assert not (await world.raw("never"))["found"]
    assert (await world.raw("gone"))["_source"]["deleted"]


async def test_the_queue_touches_each_document_once_with_its_latest_moment(world: World) -> None:
    await world.upsert({"id": "a", "text": "t"}, {"id": "b", "text": "t"})
    calls: list[dict[str, datetime]] = []

    async def touch(instants: Any, collection: Collection, within: Any) -> BulkResult:
        calls.append(dict(instants))
        return await world.indexer.touch(instants, collection=collection)

    queue = TouchQueue(touch, interval_s=3_600, most=2)
    await queue.start()
    for at in (NOON, LATER, NOON):
        queue.add(world.collection, ["a"], at)
    queue.add(world.collection, ["b", "c"], NOON)
    assert queue.dropped == 1
    await queue.close()
    assert calls == [{"a": LATER, "b": NOON}]
    assert (await world.get("a")).last_accessed_at == LATER
    await queue.flush()
    assert len(calls) == 1


async def test_the_queue_keeps_what_could_not_be_written(world: World) -> None:
    await world.upsert({"id": "a", "text": "t"})
    down = True

    async def touch(instants: Any, collection: Collection, within: Any) -> BulkResult:
        if down:
            raise ClusterUnavailable("down")
        return await world.indexer.touch(instants, collection=collection)

    queue = TouchQueue(touch)
    queue.add(world.collection, ["a"], NOON)
    await queue.flush()
    queue.add(world.collection, ["a"], NOON - timedelta(days=1))
    down = False
    await queue.flush()
    assert (await world.get("a")).last_accessed_at == NOON


# --- a fence, and what goes wrong on the way ---------------------------------------------------------------------------


def later(world: World) -> str:
    """The write alias of the generation after the first."""
    parsed = names.parse_write_alias(world.alias)
    assert parsed is not None
    return names.write_alias(world.collection.name, parsed[1] + 1)


class Moving:
    """The index that is written, as aliases say: the first one, and once the generation has changed the second."""

    def __init__(
        self, world: World, second: Collection, embedder: Any, *, first: Target | None = None
    ) -> None:
        self.world = world
        self.first = first or Target(world.alias, world.collection, world.embedder)
        self.second = second
        self.embedder = embedder
        self.moved = False
        self.rereads = 0

    async def current(self) -> Target:
        if self.moved:
            return Target(later(self.world), self.second, self.embedder)
        return self.first

    async def reread(self, seen: Any) -> Target:
        self.rereads += 1
        for _ in range(400):
            if await self.world.cluster.resolve_aliases(later(self.world)):
                self.moved = True
                break
            await asyncio.sleep(0.05)
        return await self.current()


async def second_index(world: World, *, dims: int, similarity: str = "cosine") -> Collection:
    """A copy of the collection's index with other vectors, and nothing in it."""
    index = names.index_name(world.collection.name, now() + timedelta(seconds=5))
    mapping = (await world.cluster.get_mapping(world.collection.index))[world.collection.index]
    mapping["properties"]["chunks"]["properties"]["embedding"]["dims"] = dims
    mapping["properties"]["chunks"]["properties"]["embedding"]["similarity"] = similarity
    settings = (await world.cluster.get_settings(world.collection.index))[world.collection.index]
    analysis = {key: value for key, value in settings.items() if key.startswith("index.analysis")}
    await world.cluster.create_index(
        index, {"mappings": mapping, "settings": {**analysis, "index.refresh_interval": "-1"}}
    )
    return world.collection.model_copy(
        update={"index": index, "dims": dims, "model": f"fake-{dims}", "similarity": similarity}
    )


async def test_writes_go_on_over_a_fence_and_end_in_the_index_that_is_written_then(world: World) -> None:
    """Another model's index gets vectors of its own; 20 writers run while the generation changes under them."""
    second = await second_index(world, dims=16)
    old = world.collection.index
    ids = [f"n{i}" for i in range(10)]
    with EmbeddingServer(dims=16) as other:
        embedder = Embedder.connect(base_url=other.base_url, api_key=None, model="fake-16", dims=16)
        moving = Moving(world, second, embedder)
        indexer = Indexer(
            cluster=world.cluster, targets=lambda name: moving, stamper=Stamper(4, now_us), now=now,
            chunks=Chunking(max_tokens=40, overlap_tokens=0),
        )  # fmt: skip
        await indexer.upsert([{"id": id_, "text": f"old {id_}"} for id_ in ids], collection=world.collection)

        async def fence() -> None:
            await world.cluster.update_aliases([{"remove": {"index": old, "alias": world.alias}}])
            await world.cluster.add_write_block(old)
            await world.cluster.update_aliases([{"add": {"index": second.index, "alias": later(world)}}])

        fencing = asyncio.create_task(fence())
        results = await asyncio.gather(
            *(
                indexer.upsert([{"id": id_, "text": f"new {id_}"}], collection=world.collection)
                for id_ in ids
                for _ in range(2)
            )
        )
        await fencing
        # Those of before the fence updated the first index, where a reindex would have copied them from.
        assert {status for result in results for status in statuses(result)} <= {
            "created",
            "updated",
            "unchanged",
        }
        await indexer.upsert([{"id": id_, "text": f"last {id_}"} for id_ in ids], collection=world.collection)
        await indexer.patch([{"id": "n0", "lang": "en"}], collection=world.collection)
        await indexer.delete_ids(["n2"], collection=world.collection)
        assert moving.rereads >= 1
        # Vectors come back as numbers out of the index, and as they were sent out of the translog.
        await world.cluster.refresh(second.index)
        stored = await world.cluster.mget(second.index, ids, source=True, vectors=True, timeout_s=10)
        for entry in stored:
            if entry["_id"] == "n2":
                assert entry["_source"]["deleted"]
                continue
            [chunk] = entry["_source"]["chunks"]
            assert np.allclose(chunk["embedding"], vector_of(f"last {entry['_id']}", 16), atol=1e-6)
        assert stored[0]["_source"]["lang"] == "en"
        await embedder.close()


@pytest.mark.parametrize("similarity", ["dot_product", "max_inner_product", "l2_norm"])
async def test_vectors_made_for_one_measure_are_written_as_the_next_index_measures(
    world: World, similarity: Any
) -> None:
    """The generation changes when a bulk and a change have their vectors: those that cosine takes at any length."""
    collection = world.collection.model_copy(update={"model": "fake"})
    second = (await second_index(world, dims=DIMS, similarity=similarity)).model_copy(
        update={"model": "fake"}
    )
    own = [3.0, 4.0, *[0.0] * (DIMS - 2)]

    class Between:
        """Embeds once the index that is written has changed."""

        model = "fake"

        async def embed_documents(self, texts: Sequence[str], **options: Any) -> Any:
            await world.cluster.update_aliases(
                [{"remove": {"index": collection.index, "alias": world.alias}}]
            )
            await world.cluster.add_write_block(collection.index)
            await world.cluster.update_aliases([{"add": {"index": second.index, "alias": later(world)}}])
            return await world.embedder.embed_documents(texts, **options)

    first = Target(world.alias, collection, Between())
    moving = Moving(world, second, world.embedder, first=first)
    indexer = Indexer(
        cluster=world.cluster, targets=lambda name: moving, stamper=Stamper(4, now_us), now=now,
        chunks=Chunking(max_tokens=40, overlap_tokens=0),
    )  # fmt: skip
    result = await indexer.upsert(
        [{"id": "own", "text": "t", "embedding": own}, {"id": "models", "text": "another"}],
        collection=collection,
    )
    assert statuses(result) == ["created", "created"]
    assert moving.rereads == 1
    [entry] = await world.cluster.mget(second.index, ["own"], source=True, vectors=True, timeout_s=10)
    [chunk] = entry["_source"]["chunks"]
    assert np.allclose(unpack_vector(packed(chunk["embedding"])), [0.6, 0.8, *[0.0] * (DIMS - 2)])
    # A change of what was read in the first index.
    source = {"document_id": "own", "text": "t", "chunks": [{"text": "t", "embedding": packed(own)}]}
    changed = indexing._typed_for(await moving.current(), source)
    assert isinstance(changed, dict)
    assert np.allclose(unpack_vector(changed["chunks"][0]["embedding"]), [0.6, 0.8, *[0.0] * (DIMS - 2)])
    assert indexing._typed_for(first, source) == source


async def test_a_stranger_under_our_version_is_not_taken_for_our_own_write(world: World) -> None:
    """An answer is lost; the write that stands there has our version and another content: it is not acknowledged."""
    alias = world.alias
    lost = [True]

    class Lossy(StandsBefore):
        """The door, losing the first answer after another's write of the same version has arrived."""

        async def bulk(self, actions: Sequence[BulkAction], **options: Any) -> Any:
            if lost.pop() if lost else False:
                [action] = actions
                stranger = {"document_id": "a", "text": "stranger"}
                await self.cluster.bulk([BulkAction(alias, "a", action.version, stranger)], timeout_s=5)
                raise ClusterUnavailable("the answer was lost")
            return await self.cluster.bulk(actions, **options)

    lossy: Any = Lossy(world.cluster)
    indexer = indexer_of(lossy, world.catalog, world.embedder, Stamper(1, now_us))
    [item] = (await indexer.upsert([{"id": "a", "text": "ours"}], collection=world.collection)).items
    assert item.status == "created"
    stored = await world.get("a")
    assert (stored.text, stored.version) == ("ours", item.version)
    lost.append(True)
    [guarded] = (
        await indexer.upsert(
            [{"id": "a", "text": "guarded", "if_version": stored.version}], collection=world.collection
        )
    ).items
    assert guarded.status == "conflict"
    assert (await world.get("a")).text == "stranger"


async def test_our_own_write_is_known_again_when_its_answer_was_lost(world: World) -> None:
    lost = [True, True, True]

    class Lossy(StandsBefore):
        """The door, losing the first answers after the write has arrived."""

        async def bulk(self, actions: Sequence[BulkAction], **options: Any) -> Any:
            outcome = await self.cluster.bulk(actions, **options)
            if lost:
                lost.pop()
                raise ClusterUnavailable("the answer was lost")
            return outcome

    lossy: Any = Lossy(world.cluster)
    indexer = indexer_of(lossy, world.catalog, world.embedder, Stamper(1, now_us))
    metadata = {"big": 10**19, "f": 1e22, "s": "é😀\u2028", "x": [1.0, {"y": None}]}
    [item] = (
        await indexer.upsert([{"id": "a", "text": "ours", "metadata": metadata}], collection=world.collection)
    ).items
    assert (await world.raw("a"))["_version"] == item.version
    lost.append(True)
    [guarded] = (
        await indexer.upsert(
            [{"id": "a", "text": "guarded", "if_version": item.version}], collection=world.collection
        )
    ).items
    assert (guarded.status, (await world.get("a")).text) == ("updated", "guarded")
    lost.append(True)
    assert statuses(await indexer.delete_ids(["a"], collection=world.collection)) == ["deleted"]


async def test_without_the_cluster_the_whole_request_says_so(world: World) -> None:
    nobody = Cluster.connect(urls=["http://127.0.0.1:9"], request_timeout_s=1)
    await world.catalog.get(world.collection.name)
    indexer = indexer_of(
        nobody, world.catalog, world.embedder, Stamper(1, now_us), Patience(budget_s=0.3, first_s=0.05)
    )
    with pytest.raises(ClusterUnavailable, match="no item was acknowledged") as caught:
        await indexer.upsert([{"id": "a", "text": "t"}], collection=world.collection)
    assert caught.value.members["failed"] == 1
    await nobody.close()


async def test_a_full_disk_is_told_and_not_retried(world: World) -> None:
    index = world.collection.index
    await world.upsert({"id": "a", "text": "t"})
    await world.cluster.put_settings(index, {"index.blocks.read_only_allow_delete": True})
    try:
        with pytest.raises(HalflifeError, match="no item was acknowledged") as caught:
            await world.upsert({"id": "b", "text": "t"})
    finally:
        await world.cluster.put_settings(index, {"index.blocks.read_only_allow_delete": None})
    assert caught.value.status == 507


async def test_a_collection_that_is_gone_is_not_found(world: World) -> None:
    gone = world.collection.model_copy(update={"name": f"{world.collection.name}_none"})
    with pytest.raises(NotFound):
        await world.indexer.upsert([{"id": "a", "text": "t"}], collection=gone)
    with pytest.raises(NotFound):
        await world.indexer.get(["a"], collection=gone)


@pytest.mark.slow
async def test_a_bulk_larger_than_the_server_takes_is_halved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """110 MB at once, where `http.max_content_length` is 100: the real node answers 413."""
    monkeypatch.setattr(writes, "BULK_BYTES", 2**30)
    bulky = {"k": "z" * 2**20}
    items = [{"id": f"n{i}", "text": "t", "embedding": None, "metadata": bulky} for i in range(110)]
    result = await world.upsert(*items)
    assert set(statuses(result)) == {"created"}


# --- chaos: nothing acknowledged is lost, nothing deleted is back ----------------------------------------------------


@dataclass(frozen=True)
class Logged:
    """What one client asked for and heard."""

    version: int | None
    text: str | None
    acknowledged: bool


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(1, id="seed 1")])
async def test_acknowledged_writes_outlive_a_killed_node(
    tmp_path: Path, server: EmbeddingServer, seed: int
) -> None:
    """Six writers with skewed clocks, a third of their work deletes, and the node killed twice under them."""
    from scripts.node import LocalNode, ensure_installed

    if os.environ.get("HALFLIFE_TEST_SKIP_CHAOS"):
        pytest.skip("HALFLIFE_TEST_SKIP_CHAOS is set")
    with LocalNode(ensure_installed(report=print), tmp_path, cluster_name=f"halflife-chaos-{seed}") as node:
        cluster = Cluster.connect(urls=[node.url], request_timeout_s=30)
        world = await world_on(cluster, server, "chaos")
        log: defaultdict[str, list[Logged]] = defaultdict(list)
        stop, progress = asyncio.Event(), asyncio.Event()
        counts: Counter[str] = Counter()

        async def client(worker: int) -> None:
            rng = random.Random(seed * 100 + worker)
            skew = rng.randrange(-2_000_000, 2_000_000)
            indexer = world.writer(worker, skew_us=skew, patience=Patience(budget_s=60, request_timeout_s=3))
            serial = 0
            while not stop.is_set():
                ids = rng.sample(range(150), rng.randint(1, 8))
                serial += 1
                kind = rng.random()
                texts: dict[str, str | None] = {f"d{i}": f"w{worker} n{serial} d{i}" for i in ids}
                try:
                    if kind < 0.3:
                        texts = dict.fromkeys(texts)
                        result = await indexer.delete_ids(list(texts), collection=world.collection)
                    elif kind < 0.4:
                        await indexer.touch(dict.fromkeys(texts, now()), collection=world.collection)
                        continue
                    else:
                        with_vectors = rng.random() < 0.5
                        items = [
                            {
                                "id": id_,
                                "text": text,
                                **({"embedding": vector_of(id_, DIMS)} if with_vectors else {}),
                            }
                            for id_, text in texts.items()
                        ]
                        result = await indexer.upsert(items, collection=world.collection)
                except HalflifeError:
                    # Nobody heard what became of it: it may be there or not.
                    for id_, text in texts.items():
                        log[id_].append(Logged(None, text, acknowledged=False))
                    continue
                progress.set()
                for item in result.items:
                    assert item.id is not None
                    ok = item.status in ("created", "updated", "deleted")
                    counts["acknowledged" if ok else item.status] += 1
                    if ok or item.status == "failed":
                        log[item.id].append(Logged(item.version, texts[item.id], acknowledged=ok))
                await asyncio.sleep(rng.uniform(0, 0.02))

        async def more(acknowledged: int) -> None:
            wanted = counts["acknowledged"] + acknowledged
            while counts["acknowledged"] < wanted:
                await progress.wait()
                progress.clear()

        async def faults() -> None:
            try:
                for _ in range(2):
                    await more(150)
                    await asyncio.to_thread(node.kill)
                    await asyncio.to_thread(node.start)
                await more(150)
            finally:
                stop.set()

        await asyncio.gather(faults(), *(client(worker) for worker in range(6)))
        ids = [f"d{i}" for i in range(150)]
        lost: list[str] = []
        resurrected: list[str] = []
        changed: list[str] = []
        for entry in await cluster.mget(world.collection.index, ids, source=True, timeout_s=10):
            id_, known = entry["_id"], log[entry["_id"]]
            heard = [one for one in known if one.acknowledged]
            if not heard:
                continue
            highest = max(heard, key=lambda one: one.version or 0)
            if not entry["found"] or entry["_version"] < (highest.version or 0):
                lost.append(id_)
                continue
            text = None if entry["_source"].get("deleted") else entry["_source"]["text"]
            # Touches raise the version of what they found and change no text.
            if text != highest.text and not any(one.text == text and not one.acknowledged for one in known):
                (resurrected if highest.text is None else changed).append(id_)
        print(
            f"seed {seed}: {dict(counts)}, lost={len(lost)} resurrected={len(resurrected)} changed={len(changed)}"
        )
        await world.embedder.close()
        await cluster.close()
        assert counts["acknowledged"] >= 450
        assert (lost, resurrected, changed) == ([], [], [])


def test_dates_of_this_file_are_what_they_say() -> None:
    assert parse_instant("2026-01-31T12:00:00Z") == NOON
    assert len(pack_vector(np.zeros(3))) == 16


@pytest.mark.parametrize("release, form", [(None, list), ((9, 2), list), ((9, 3), str)])
async def test_vectors_are_written_in_a_form_that_the_release_takes(
    world: World, release: tuple[int, int] | None, form: type
) -> None:
    world.cluster.release = release
    await world.upsert({"id": "a", "text": "some words"})
    await world.indexer.patch([{"id": "a", "metadata": {"n": 1}}], collection=world.collection)
    # In real time, before a refresh, a document comes as it was sent.
    [entry] = await world.cluster.mget(world.collection.index, ["a"], source=True, vectors=True, timeout_s=10)
    [chunk] = entry["_source"]["chunks"]
    assert isinstance(chunk["embedding"], form)
    again = await world.upsert({"id": "a", "text": "some words", "metadata": {"n": 1}})
    assert [item.status for item in again.items] == ["unchanged"], "either form is compared by its numbers"


async def test_a_filter_compiled_for_another_index_deletes_nothing(world: World) -> None:
    await world.upsert({"id": "a", "text": "x", "metadata": {"level": 1}}, refresh="true")
    elsewhere = world.collection.model_copy(update={"index": f"{world.collection.index}-before"})
    # As a filter `{"level": {"ne": 1}}` reads where `level` is declared: this index lacks the field, so all would match.
    clauses = [{"bool": {"must_not": [{"term": {"declared.level": 1}}]}}]
    with pytest.raises(ClusterUnavailable, match="moved to another index"):
        await world.indexer.delete_matching(clauses, collection=elsewhere)
    assert await world.ids() == ["a"]
    gone = await world.indexer.delete_matching([{"term": {"document_id": "a"}}], collection=elsewhere)
    assert gone.deleted == 1, "what every index has is read alike"
