"""Indices that this service did not make, brought into a collection on a real node."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from app import names
from app.adoption import Adopter
from app.catalog import install_templates
from app.collection import CollectionOptions
from app.elastic import Cluster
from app.embedding import Embedder
from app.encoding import encode
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound
from tests.fakes import EmbeddingServer, vector_of
from tests.moving import DIMS, World, embedder_of, now

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

    async def put(self, documents: dict[str, dict[str, Any]]) -> None:
        lines = []
        for id_, body in documents.items():
            lines += [encode({"index": {"_index": self.index, "_id": id_}}), encode(body)]
        outcomes = await self.cluster._bulk(lines, len(documents), refresh="false", timeout_s=10)
        assert all(outcome.fate == "applied" for outcome in outcomes), outcomes

    async def drop(self, id_: str) -> None:
        await self.cluster._bulk(
            [encode({"delete": {"_index": self.index, "_id": id_}})], 1, refresh="false", timeout_s=10
        )


@pytest.fixture
def server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as running:
        yield running


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
