"""Indices that this service did not make, brought into a collection on a real node."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app import copying, names
from app.adoption import Adopter
from app.catalog import install_templates
from app.collection import CollectionOptions
from app.elastic import Cluster
from app.embedding import Embedder
from app.encoding import encode
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound
from tests.fakes import EmbeddingServer, vector_of
from tests.moving import DIMS, Killed, World, embedder_of, now

pytestmark = pytest.mark.node

BODY = {
    "settings": {"number_of_shards": 2},
    "mappings": {
        "dynamic": "true",
        "properties": {"body": {"type": "text"}, "vec": {"type": "dense_vector", "dims": DIMS}, "published": {"type": "date"}},
    },
}  # fmt: skip


@dataclass
class Foreign:
    """An index of somebody else's."""

    cluster: Cluster
    index: str

    async def put(self, documents: dict[str, dict[str, Any]], routing: str | None = None) -> list[int | None]:
        """Write them and return their versions."""
        lines = []
        for id_, body in documents.items():
            lines += [encode({"index": self._header(id_, routing)}), encode(body)]
        outcomes = await self.cluster._bulk(lines, len(documents), refresh="false", timeout_s=10)
        assert all(outcome.fate == "applied" for outcome in outcomes), outcomes
        return [outcome.version for outcome in outcomes]

    async def drop(self, id_: str, routing: str | None = None) -> None:
        [outcome] = await self.cluster._bulk(
            [encode({"delete": self._header(id_, routing)})], 1, refresh="true", timeout_s=10
        )
        assert outcome.result == "deleted"

    async def forget(self) -> None:
        """Have the versions forgotten of what was deleted, as they are a minute later."""
        for action in ("_close", "_open"):
            await self.cluster._call("POST", f"/{self.index}/{action}", doing="forgetting")
        await self.cluster.health(self.index, wait_for_status="yellow")

    def _header(self, id_: str, routing: str | None) -> dict[str, str]:
        return {"_index": self.index, "_id": id_} | ({} if routing is None else {"routing": routing})


@pytest.fixture
async def embedder(server: EmbeddingServer) -> AsyncIterator[Embedder]:
    made = embedder_of(server)
    yield made
    await made.close()


@pytest.fixture
async def world(cluster: Cluster, unique: Callable[[str], str], embedder: Embedder) -> World:
    await cluster.check_version()
    await install_templates(cluster, dims=DIMS)
    return World(cluster, unique("adopted"), {"fake": embedder})


@pytest.fixture
async def foreign(cluster: Cluster) -> AsyncIterator[Foreign]:
    index = f"wiki-{uuid.uuid4().hex[:10]}"
    await cluster.create_index(index, BODY)
    made = Foreign(cluster, index)
    await made.put(
        {
            f"a{i}": {"headline": f"Title {i}", "body": f"text {i}", "published": "2026-01-02", "lang": "en",
                      "rank": i, "meta": {"by": "ann", "kind": "page"}}
            for i in range(50)
        }
    )  # fmt: skip
    yield made
    await cluster.delete_indices([index])


MAPPING = {"text": "body", "title": "headline", "creation_time": "published", "author": "meta.by"}


def adopter(world: World, origin: str, mapping: dict[str, str] | None = None) -> Adopter:
    return Adopter(
        world.cluster, world.name, origin, mapping=MAPPING if mapping is None else mapping,
        embedder=world.embedders["fake"], now=now, patience_s=10,
    )  # fmt: skip


async def test_a_foreign_index_becomes_a_collection_and_comes_again(world: World, foreign: Foreign) -> None:
    options = CollectionOptions(declared={"rank": "long"})
    adopted = await adopter(world, foreign.index).run(options, dims=DIMS, model="fake")
    assert (adopted.documents, adopted.stored, adopted.failures) == (50, 50, {})
    found = await world.dump()
    version, source = found["a7"]
    assert version == 1
    assert {key: source[key] for key in ("title", "text", "creation_time", "author", "lang")} == {
        "title": "Title 7", "text": "text 7", "creation_time": "2026-01-02T00:00:00.000Z", "author": "ann", "lang": "en",
    }  # fmt: skip
    assert source["metadata"] == {"rank": 7, "meta": {"kind": "page"}}
    assert source["declared"] == {"rank": 7}
    assert np.allclose(source["chunks"][0]["embedding"], vector_of("Title 7\ntext 7", DIMS), atol=1e-6)
    # What the service writes from now on is newer than anything there; what the origin has changed comes again.
    await world.upsert({"id": "a1", "text": "ours"})
    await foreign.put({"a1": {"body": "theirs"}, "a2": {"body": "theirs"}, "new": {"body": "new"}})
    again = await adopter(world, foreign.index).run(options, dims=DIMS, model="fake")
    found = await world.dump()
    assert again.failures == {}
    assert [found[id_][1]["text"] for id_ in ("a1", "a2", "new")] == ["ours", "theirs", "new"]


async def test_vectors_of_the_origin_are_taken_where_they_are_mapped(
    world: World, foreign: Foreign, server: EmbeddingServer
) -> None:
    await foreign.cluster.delete_indices([foreign.index])
    await foreign.cluster.create_index(foreign.index, BODY)
    await foreign.put({"v": {"body": "t", "vec": vector_of("its own", DIMS)}, "w": {"body": "without"}})
    await adopter(world, foreign.index, {"text": "body", "embedding": "vec"}).run(
        CollectionOptions(), dims=DIMS, model="fake"
    )
    found = await world.dump()
    assert np.allclose(found["v"][1]["chunks"][0]["embedding"], vector_of("its own", DIMS), atol=1e-6)
    assert "vec" not in found["v"][1].get("metadata", {})
    assert [text for batch in server.batches for text in batch] == ["without"]


async def test_what_does_not_fit_is_named(world: World, foreign: Foreign) -> None:
    await foreign.put({"odd": {"published": "2026-01-02"}})
    preview = await adopter(world, foreign.index).preview(await _shape(world))
    assert preview.documents >= 50
    assert preview.example is not None
    assert preview.example["text"].startswith("text")
    assert set(preview.metadata_keys) == {"rank", "meta"}
    with pytest.raises(Conflict, match="odd: "):
        await adopter(world, foreign.index).run(CollectionOptions(), dims=DIMS, model="fake")
    adopted = await adopter(world, foreign.index).run(
        CollectionOptions(), dims=DIMS, model="fake", allow_missing=1
    )
    assert list(adopted.failures) == ["odd"]
    with pytest.raises(InvalidRequest, match="no field nonsense"):
        adopter(world, foreign.index, {"nonsense": "body"})
    with pytest.raises(NotFound):
        await adopter(world, "not-there-at-all").run(CollectionOptions(), dims=DIMS, model="fake")


async def _shape(world: World) -> Any:
    from app.collection import Collection

    return Collection(
        name=world.name,
        index="-",
        dims=DIMS,
        similarity="cosine",
        declared={},
        model="fake",
        template_version=1,
    )


async def test_an_index_that_has_the_alias_name_is_replaced_in_one_step(world: World) -> None:
    read = names.read_alias(world.name)
    # Our own template would make it strict; the explicit mapping lets this one take anything.
    await world.cluster.create_index(
        read,
        {
            "mappings": {
                "dynamic": "true",
                "_meta": {"halflife": None},
                "properties": {"body": {"type": "text"}},
            }
        },
    )
    foreign = Foreign(world.cluster, read)
    await foreign.put({f"a{i}": {"text": f"text {i}", "rank": i} for i in range(30)} | {"bad": {"rank": 1}})
    with pytest.raises(Conflict, match="bad"):
        await adopter(world, read, {}).run(CollectionOptions(), dims=DIMS, model="fake")
    assert list(await world.cluster.resolve_index(read)) == [read]
    await foreign.drop("bad")
    await foreign.drop("a3")
    await foreign.put({"a4": {"text": "changed"}})

    async def keep_reading() -> int:
        seen = 0
        while not done.is_set():
            # A read that is under way while the old index is deleted may fail, and works again at once; it never
            # finds the name gone.
            with contextlib.suppress(ClusterUnavailable):
                try:
                    assert await world.cluster.count(read) >= 0
                except NotFound:
                    # Of the index that it began with; who asks now is led to the other.
                    assert await world.cluster.count(read) >= 0
                seen += 1
            await asyncio.sleep(0.01)
        return seen

    done = asyncio.Event()
    reader = asyncio.create_task(keep_reading())
    adopted = await adopter(world, read, {}).run(CollectionOptions(), dims=DIMS, model="fake")
    done.set()
    assert await reader > 0
    assert adopted.failures == {}
    found = await world.dump()
    assert found["a4"][1]["text"] == "changed"
    assert found["a3"][1].get("deleted")
    assert (await world.collection()).index != read
    await world.upsert({"id": "a5", "text": "ours"})
    with pytest.raises(InvalidRequest, match="itself"):
        await adopter(world, read, {}).run(CollectionOptions(), dims=DIMS, model="fake")


# --- an origin on several shards, with routings of its own ---------------------------------------------------------------


@pytest.fixture
async def origin(world: World) -> Foreign:
    """An index with the alias' name, on three shards."""
    read = names.read_alias(world.name)
    await world.cluster.create_index(
        read,
        {
            "settings": {"index": {"number_of_shards": 3}},
            "mappings": {
                "dynamic": "true",
                "_meta": {"halflife": None},
                "properties": {"text": {"type": "text"}},
            },
        },
    )
    return Foreign(world.cluster, read)


async def bring(world: World, origin: Foreign, **options: Any) -> Any:
    return await adopter(world, origin.index, {}).run(CollectionOptions(), dims=DIMS, model="fake", **options)


async def texts(world: World) -> dict[str, str | None]:
    """The text of each document, None for a tombstone."""
    return {
        id_: None if source.get("deleted") else source["text"]
        for id_, (_, source) in (await world.dump()).items()
    }


async def test_a_replaced_origin_may_have_any_routing(
    world: World, origin: Foreign, server: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        await origin.put({f"r{i}": {"text": f"routed {i}"}}, routing=f"tenant-{i % 7}")
    await origin.put({"page": {"text": "a page"}})
    await origin.put({"note": {"text": "a note"}}, routing="page")
    # Twice, so that what is written after a deletion has a lower version.
    for _ in range(2):
        await origin.put({"r1": {"text": "routed 1"}}, routing="tenant-1")
    await origin.put({"gone": {"text": "gone"}}, routing="x")
    await origin.put({"back": {"text": "to be deleted"}}, routing="y")

    # Ended after what was deleted was taken out of the new index, and before the two are exchanged.
    verify, real_put = Adopter._verify, Adopter._put

    async def killed(self: Adopter, *args: Any) -> None:
        raise Killed

    deleted = False

    async def deletes_then_puts(self: Adopter, *args: Any) -> None:
        nonlocal deleted
        await real_put(self, *args)
        if not deleted:
            deleted = True
            await origin.drop("back", routing="y")

    monkeypatch.setattr(Adopter, "_verify", killed)
    monkeypatch.setattr(Adopter, "_put", deletes_then_puts)
    with pytest.raises(Killed):
        await bring(world, origin)
    monkeypatch.setattr(Adopter, "_verify", verify)
    monkeypatch.setattr(Adopter, "_put", real_put)
    assert list(await world.cluster.resolve_index(origin.index)) == [origin.index]

    await origin.drop("r1", routing="tenant-1")
    await origin.forget()
    assert await origin.put({"r1": {"text": "anew"}}, routing="tenant-1") == [1]
    assert await origin.put({"back": {"text": "back again"}}, routing="y") == [1]
    await origin.drop("gone", routing="x")
    before = len(server.batches)
    adopted = await bring(world, origin)
    assert (adopted.failures, adopted.stored) == ({}, 23)
    assert await texts(world) == {
        **{f"r{i}": f"routed {i}" for i in range(20)},
        "r1": "anew", "page": "a page", "note": "a note", "back": "back again", "gone": None,
    }  # fmt: skip
    assert origin.index not in await world.indices()
    # What was there already as the origin has it is not embedded again.
    assert sorted(text for batch in server.batches[before:] for text in batch) == ["anew", "back again"]


async def test_a_tombstone_is_no_document_of_the_origin(
    world: World, origin: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever takes a living document out of the new index, the origin is not deleted then."""
    await origin.put({"a": {"text": "one"}, "b": {"text": "two"}})
    pages = copying.pages

    def misses(cluster: Cluster, index: str, **given: Any) -> Any:
        if index == origin.index and "ids" in (given.get("query") or {}):
            given["query"] = {"ids": {"values": ["a"]}}
        return pages(cluster, index, **given)

    monkeypatch.setattr(copying, "pages", misses)
    with pytest.raises(Conflict, match="are not in the new index: b"):
        await bring(world, origin)
    assert list(await world.cluster.resolve_index(origin.index)) == [origin.index]
    await origin.put({"c": {"text": "it takes writes again"}})
    monkeypatch.undo()
    await bring(world, origin)
    assert await texts(world) == {"a": "one", "b": "two", "c": "it takes writes again"}


async def test_two_documents_of_one_id_are_told(world: World, origin: Foreign) -> None:
    await origin.put({"twin": {"text": "one"}, "other": {"text": "other"}})
    for routing in "abcdefgh":
        await origin.put({"twin": {"text": f"of {routing}"}}, routing=routing)
    await world.cluster.refresh(origin.index)
    assert await world.cluster.count(origin.index) == 4
    with pytest.raises(Conflict, match="twin: two documents have this id"):
        await bring(world, origin)
    assert list(await world.cluster.resolve_index(origin.index)) == [origin.index]
    adopted = await bring(world, origin, allow_missing=1)
    assert list(adopted.failures) == ["twin"]
    assert set(await texts(world)) == {"twin", "other"}


async def test_two_indices_of_one_id_are_told(world: World, foreign: Foreign) -> None:
    second = Foreign(foreign.cluster, f"{foreign.index}-more")
    await foreign.cluster.create_index(second.index, BODY)
    alias = f"{foreign.index}-all"
    await second.put({"a1": {"body": "another"}, "more": {"body": "more"}})
    await foreign.cluster.update_aliases(
        [{"add": {"index": each.index, "alias": alias}} for each in (foreign, second)]
    )
    try:
        with pytest.raises(Conflict, match="a1: two documents have this id"):
            await adopter(world, alias).run(CollectionOptions(), dims=DIMS, model="fake")
    finally:
        await foreign.cluster.delete_indices([second.index])
    again = await adopter(world, foreign.index).run(CollectionOptions(), dims=DIMS, model="fake")
    assert again.failures == {}
