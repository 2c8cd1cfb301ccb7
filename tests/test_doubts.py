"""Writes under which something moves: the collection, what it declares, a copy that is out of step, an answer's way.

Each change comes at a certain step of the write, from a door or an embedder that waits for it: no test hopes for a race.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from app import bulks, catalog, documents, moves, writes
from app.answers import BulkResult
from app.catalog import Catalog
from app.collection import Collection, CollectionOptions
from app.elastic import BulkAction, Cluster, SequenceNumbers
from app.embedding import Embedded
from app.errors import ClusterUnavailable, Conflict, CursorExpired, NotFound
from app.filters import parse_filter
from app.indexing import Indexer
from app.purge import Purger
from app.targets import CatalogTargets
from app.writes import Patience, Stamper, Target
from tests.fakes import EmbeddingServer, vector_of
from tests.nodes import StandsBefore, written
from tests.test_indexing import DIMS, World, indexer_of, now, now_us, statuses, world_on

pytestmark = [pytest.mark.node, pytest.mark.usefixtures("patient_fences")]

QUICK = Patience(budget_s=0.5, first_s=0.01)


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer
) -> AsyncIterator[World]:
    made = await world_on(cluster, server, unique("doubts"))
    yield made
    await made.embedder.close()


class Door(StandsBefore):
    """The cluster, with something done before the first bulk of documents goes out."""

    def __init__(self, cluster: Cluster, before: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(cluster)
        self.before: list[Callable[[], Awaitable[Any]]] = [before]

    async def bulk(self, actions: Sequence[BulkAction], **options: Any) -> Any:
        if self.before:
            await self.before.pop()()
        return await self.cluster.bulk(actions, **options)


class Slow:
    """An embedder that answers once it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def embed_documents(self, texts: Sequence[str], **options: Any) -> Embedded:
        self.asked.set()
        await self.go_on.wait()
        return Embedded(
            [np.asarray(vector_of("first", DIMS), dtype=np.float32)] * len(texts), {}, frozenset()
        )


class Fast:
    """Another model."""

    async def embed_documents(self, texts: Sequence[str], **options: Any) -> Embedded:
        return Embedded(
            [np.asarray(vector_of("second", DIMS), dtype=np.float32)] * len(texts), {}, frozenset()
        )


def through(world: World, door: Any, patience: Patience | None = None) -> Indexer:
    """Another service, which remembers the collection as it is now and sees the cluster through `door`."""
    return indexer_of(door, Catalog(world.cluster, ttl_s=3_600), world.embedder, Stamper(2, now_us), patience)


async def make_anew(
    world: World, *, model: str = "fake", declared: dict[str, Any] | None = None
) -> Collection:
    """Delete the collection and make another of its name."""
    await catalog.delete(world.cluster, world.collection.name)
    options = CollectionOptions.model_validate({"declared": declared or {}})
    return await catalog.create(
        world.cluster, world.collection.name, options, dims=DIMS, model=model, moment=now()
    )


async def declare(world: World, **declared: Any) -> Collection:
    options = CollectionOptions.model_validate({"declared": declared})
    found = (await catalog.get(world.cluster, world.collection.name)).collection
    return await catalog.change(world.cluster, found, options, dims=DIMS)


# --- a collection that is deleted, and another made under its name ---------------------------------------------------


async def test_a_writer_of_a_deleted_collection_is_turned_away_by_the_next_of_its_name(world: World) -> None:
    again = await make_anew(world)
    action = BulkAction(world.alias, "a", 1, {"document_id": "a", "indexed_at": "2026-01-01T00:00:00.000Z"})
    [outcome] = await world.cluster.bulk([action], timeout_s=10)
    assert outcome.fate == "fenced"
    assert not (await world.raw("a", again.index))["found"]


async def test_what_waits_for_its_embedding_is_embedded_anew_for_the_collection_that_is_there_then(
    world: World,
) -> None:
    slow, fast = Slow(), Fast()
    indexer = Indexer(
        cluster=world.cluster,
        targets=lambda name: CatalogTargets(
            name, cluster=world.cluster, catalog=Catalog(world.cluster),
            embedder=lambda collection: slow if collection.model == "fake" else fast,
        ),
        stamper=Stamper(2, now_us), now=now,
    )  # fmt: skip
    item = {"id": "a", "text": "t", "metadata": {"level": 3}}
    waiting = asyncio.create_task(indexer.upsert([item], collection=world.collection))
    await slow.asked.wait()
    again = await make_anew(world, model="other", declared={"level": "long"})
    slow.go_on.set()
    assert statuses(await waiting) == ["created"]
    await world.cluster.refresh(again.index)
    source = (await world.raw("a", again.index))["_source"]
    assert np.allclose(source["chunks"][0]["embedding"], vector_of("second", DIMS), atol=1e-6)
    assert source["declared"] == {"level": 3}


@pytest.mark.parametrize(
    "write, told",
    [
        pytest.param(lambda i, c: i.patch([{"id": "a", "lang": "en"}], collection=c), "not_found", id="patch"),
        pytest.param(lambda i, c: i.touch({"a": now()}, collection=c), "not_found", id="touch"),
        pytest.param(lambda i, c: i.delete_ids(["a"], collection=c), "not_found", id="delete"),
    ],
)  # fmt: skip
async def test_a_change_to_a_document_that_went_with_its_collection_does_not_bring_it_into_the_next(
    world: World, write: Callable[[Indexer, Collection], Awaitable[BulkResult]], told: str
) -> None:
    await world.upsert({"id": "a", "text": "t"})
    indexer = through(world, Door(world.cluster, lambda: make_anew(world)))
    assert statuses(await write(indexer, world.collection)) == [told]
    again = (await catalog.get(world.cluster, world.collection.name)).collection
    assert again.index != world.collection.index
    assert not (await world.raw("a", again.index))["found"]


async def test_if_version_does_not_hold_in_another_collection_of_the_name(world: World) -> None:
    [made] = (await world.upsert({"id": "a", "text": "t"})).items
    indexer = through(world, Door(world.cluster, lambda: make_anew(world)))
    item = {"id": "a", "text": "new", "if_version": made.version}
    assert statuses(await indexer.upsert([item], collection=world.collection)) == ["conflict"]


# --- keys that are declared meanwhile --------------------------------------------------------------------------------

LEVEL = {"id": "a", "text": "t", "metadata": {"level": 3}}


async def test_a_service_that_remembers_the_collection_without_a_key_writes_it_typed(world: World) -> None:
    indexer = through(world, world.cluster)
    await indexer._writer(world.collection).target()  # remembers it
    await declare(world, level="long")
    assert statuses(await indexer.upsert([LEVEL], collection=world.collection)) == ["created"]
    assert (await world.raw("a"))["_source"]["declared"] == {"level": 3}
    assert (await written(world.cluster, world.collection.name)).alias != world.alias


async def test_a_write_and_a_change_that_were_checked_before_a_key_was_declared_come_in_typed(
    world: World,
) -> None:
    await world.upsert({"id": "b", "text": "t"})
    indexer = through(world, Door(world.cluster, lambda: declare(world, level="long")))
    assert statuses(await indexer.upsert([LEVEL], collection=world.collection)) == ["created"]
    assert (await world.raw("a"))["_source"]["declared"] == {"level": 3}
    indexer = through(world, Door(world.cluster, lambda: declare(world, grade="double")))
    change = {"id": "b", "metadata": {"grade": 1.5, "level": 2}}
    assert statuses(await indexer.patch([change], collection=world.collection)) == ["updated"]
    assert (await world.raw("b"))["_source"]["declared"] == {"grade": 1.5, "level": 2}


async def test_a_value_that_does_not_fit_the_key_declared_meanwhile_is_refused(world: World) -> None:
    indexer = through(world, Door(world.cluster, lambda: declare(world, level="long")))
    item = {"id": "a", "text": "t", "metadata": {"level": "high"}}
    with pytest.raises(Exception, match="declared as long"):
        await indexer.upsert([item], collection=world.collection)
    assert await world.get("a") is None


async def test_a_document_that_comes_between_the_count_and_the_key_is_counted(world: World) -> None:
    """What is under way when writers are shut out has ended before the documents are counted again."""

    class Counting(StandsBefore):
        """The door, with an untyped document arriving behind the first count."""

        counted = 0

        async def count(self, *args: Any) -> int:
            found = await self.cluster.count(*args)
            self.counted += 1
            if self.counted == 1:
                assert statuses(await world.upsert(LEVEL)) == ["created"]
            return found

    door: Any = Counting(world.cluster)
    options = CollectionOptions.model_validate({"declared": {"level": "long"}})
    with pytest.raises(Conflict, match="1 documents"):
        await catalog.change(door, world.collection, options, dims=DIMS)
    now_there = await catalog.get(world.cluster, world.collection.name)
    assert now_there.collection == world.collection
    assert now_there.fence is None
    assert statuses(await world.upsert({"id": "b", "text": "t"})) == ["created"]


async def test_a_key_is_taken_back_where_writers_were_let_in_before_it_was_declared(world: World) -> None:
    """Somebody lifts the fence, since it stood too long, and a document comes in untyped before the mapping changes."""
    other = world.writer(2)

    class Late(StandsBefore):
        """The door, whose first change of the mapping comes late."""

        late = True

        async def put_mapping(self, *args: Any, **options: Any) -> None:
            if self.late:
                self.late = False
                standing = await moves.standing(world.cluster, world.collection.name)
                assert standing.fenced == world.collection.index
                await moves.lift(
                    world.cluster,
                    world.collection.name,
                    index=standing.fenced,
                    generation=standing.generation,
                )
                assert statuses(await other.upsert([LEVEL], collection=world.collection)) == ["created"]
            await self.cluster.put_mapping(*args, **options)

    door: Any = Late(world.cluster)
    options = CollectionOptions.model_validate({"declared": {"level": "long"}})
    with pytest.raises(Conflict, match="1 documents"):
        await catalog.change(door, world.collection, options, dims=DIMS)
    found = await catalog.get(world.cluster, world.collection.name)
    assert "level" not in found.collection.declared
    assert found.fence is None
    await other.delete_ids(["a"], collection=world.collection)
    assert "level" in (await declare(world, level="long")).declared


async def test_a_fence_that_was_left_standing_keeps_no_key_from_being_declared(world: World) -> None:
    standing = await moves.standing(world.cluster, world.collection.name)
    await moves.fence(
        world.cluster, world.collection.name, index=world.collection.index, generation=standing.generation
    )
    assert "level" in (await declare(world, level="long")).declared
    assert statuses(await world.upsert(LEVEL)) == ["created"]


# --- what is read of a copy that is out of step ----------------------------------------------------------------------


class Behind(StandsBefore):
    """The door, telling for so many questions that the last operations are on one copy only."""

    def __init__(self, cluster: Cluster, questions: int = 1_000) -> None:
        super().__init__(cluster)
        self.left = questions
        self.lost: list[bool] = []

    async def sequence_numbers(self, index: str) -> dict[int, SequenceNumbers]:
        found = await self.cluster.sequence_numbers(index)
        if self.left <= 0:
            return found
        self.left -= 1
        return {number: SequenceNumbers(-1, shard.highest) for number, shard in found.items()}

    async def bulk(self, actions: Sequence[BulkAction], **options: Any) -> Any:
        if self.lost:
            self.lost.pop()
            await self.cluster.bulk(actions, **{**options, "refresh": "false"})
            raise ClusterUnavailable("the answer was lost")
        return await self.cluster.bulk(actions, **options)


async def test_a_revision_that_is_there_already_is_written_again_unless_it_is_on_all_copies(
    world: World,
) -> None:
    item = {"id": "a", "text": "five", "revision": 5, "metadata": {"pages": 2}}
    await world.upsert(item)
    before = await world.raw("a")
    [sure] = (await world.upsert(item)).items
    assert (sure.status, sure.version, await world.raw("a")) == ("unchanged", 5, before)
    asked = len(world.server.requests)
    [again] = (await through(world, Behind(world.cluster)).upsert([item], collection=world.collection)).items
    after = await world.raw("a")
    assert (again.status, again.version, after["_version"]) == ("unchanged", 6, 6)
    assert after["_seq_no"] > before["_seq_no"]
    assert documents.without_vectors(after["_source"]) == documents.without_vectors(before["_source"])
    [was], [is_] = before["_source"]["chunks"], after["_source"]["chunks"]
    assert np.allclose(was["embedding"], is_["embedding"], atol=1e-6)
    assert len(world.server.requests) == asked, "nothing is embedded for it"


async def test_a_delete_of_what_is_deleted_writes_the_tombstone_again_unless_it_is_on_all_copies(
    world: World,
) -> None:
    await world.upsert({"id": "a", "text": "t", "revision": 5})
    await world.indexer.delete_ids(["a"], collection=world.collection)
    before = await world.raw("a")
    assert statuses(await world.indexer.delete_ids(["a"], collection=world.collection)) == ["not_found"]
    assert await world.raw("a") == before
    doubtful = through(world, Behind(world.cluster))
    [item] = (await doubtful.delete_ids(["a"], collection=world.collection)).items
    after = await world.raw("a")
    assert (item.status, item.version) == ("deleted", after["_version"])
    assert (after["_version"], after["_source"]) == (before["_version"] + 1, before["_source"])


async def test_a_filtered_key_learns_nothing_of_tombstones_and_leaves_those_of_others_alone(
    world: World,
) -> None:
    def only(team: str) -> Any:
        return parse_filter({"team": team}, declared={})

    items = [
        {"id": id_, "text": "t", "metadata": {"team": team}}
        for id_, team in (("mine", "a"), ("theirs", "b"), ("nobodys", "a"))
    ]
    await world.upsert(*items)
    for ids, within in ((["mine"], only("a")), (["theirs"], only("b")), (["nobodys"], None)):
        result = await world.indexer.delete_ids(ids, collection=world.collection, within=within)
        assert statuses(result) == ["deleted"]
    before = {id_: await world.raw(id_) for id_ in ("mine", "theirs", "nobodys")}
    doubtful = through(world, Behind(world.cluster))
    result = await doubtful.delete_ids(list(before), collection=world.collection, within=only("a"))
    assert statuses(result) == ["deleted", "not_found", "not_found"]
    after = {id_: await world.raw(id_) for id_ in before}
    assert all(after[id_]["_source"] == before[id_]["_source"] for id_ in before)
    raised = {id_: after[id_]["_version"] - before[id_]["_version"] for id_ in before}
    assert raised == {"mine": 1, "theirs": 0, "nobodys": 1}


async def test_a_write_that_is_found_again_counts_once_it_is_on_all_copies(world: World) -> None:
    door = Behind(world.cluster)
    indexer = through(world, door)
    door.lost = [True]
    [item] = (await indexer.upsert([{"id": "a", "text": "t"}], collection=world.collection)).items
    assert (item.status, (await world.raw("a"))["_version"]) == ("created", item.version)
    assert (await world.raw("a"))["_seq_no"] == 1, "written twice, the second time under a higher stamp"
    # A guarded one must not go over what others may have written meanwhile: it is asked about until it is sure.
    door.lost, door.left = [True], 3
    change = {"id": "a", "text": "u", "if_version": item.version}
    [guarded] = (await indexer.upsert([change], collection=world.collection)).items
    assert item.version is not None
    assert (guarded.status, guarded.version, door.left) == ("updated", item.version + 1, 0)
    assert (await world.raw("a"))["_seq_no"] == 2
    door.lost, door.left = [True], 1_000
    impatient = through(world, door, QUICK)
    with pytest.raises(ClusterUnavailable, match="not known to be on all copies"):
        await impatient.upsert(
            [{"id": "a", "text": "v", "if_version": guarded.version}], collection=world.collection
        )


async def test_documents_of_every_shard_are_known_to_be_on_all_copies(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer
) -> None:
    """Shards number their operations each for itself: an empty one says nothing of another's."""
    world = await world_on(cluster, server, unique("doubts"), shards=3)
    items = [{"id": f"n{i}", "text": "t", "embedding": None} for i in range(12)]
    await world.upsert(*items)
    for text in "uvwxyz":
        await world.upsert({**items[0], "text": text})
    writer = world.indexer._writer(world.collection)
    found = await writer.read([str(item["id"]) for item in items], source=False)
    assert await writer.settled(found) == set(found)
    await world.embedder.close()


# --- refreshes -------------------------------------------------------------------------------------------------------


async def test_a_write_whose_answer_was_lost_is_visible_when_that_was_asked_for(world: World) -> None:
    # Soon enough to wait for it, which the cluster does only with what it applies.
    await world.cluster.put_settings(world.collection.index, {"index": {"refresh_interval": "5s"}})
    door = Behind(world.cluster, questions=0)
    indexer = through(world, door)
    door.lost = [True]
    item = {"id": "a", "text": "t"}
    result = await indexer.upsert([item], collection=world.collection, refresh="wait_for")
    assert statuses(result) == ["created"]
    assert await world.ids() == ["a"]


# --- versions --------------------------------------------------------------------------------------------------------


async def test_a_callers_large_revision_raises_no_other_documents_versions(world: World) -> None:
    [made] = (await world.upsert({"id": "far", "text": "t", "revision": 2**62})).items
    assert made.version == 2**62
    [far] = (await world.upsert({"id": "far", "text": "u"})).items
    assert far.version is not None
    assert far.version > 2**62
    [near] = (await world.upsert({"id": "near", "text": "t"})).items
    assert near.version is not None
    assert near.version < (now_us() + 60_000_000) * writes.WORKERS
    # Every version that is handed out can be sent back.
    assert statuses(await world.upsert({"id": "far", "text": "v", "if_version": far.version})) == ["updated"]
    assert statuses(await world.indexer.patch(
        [{"id": "far", "lang": "en", "if_version": far.version + 1}], collection=world.collection
    )) == ["updated"]  # fmt: skip


def test_stamps_far_ahead_are_unique_and_leave_the_others_where_they_are() -> None:
    stamper = Stamper(5, lambda: 1_000)
    far = 2**62
    assert stamper.next() == 1_000 * 64 + 5
    ahead = [stamper.after(far) for _ in range(3)]
    assert ahead == [far + 64 * n + 5 for n in (1, 2, 3)]
    assert stamper.next() == 1_001 * 64 + 5
    near = 1_000 * 64 + writes.AHEAD_US * 32
    assert stamper.after(near) > near
    assert stamper.next() > near


async def test_an_id_whose_tombstone_was_purged_can_be_written_at_once(world: World) -> None:
    await world.upsert({"id": "a", "text": "t", "revision": 5})
    for lang in ("en", "de"):
        await world.indexer.patch([{"id": "a", "lang": lang}], collection=world.collection)
    await world.indexer.delete_ids(["a"], collection=world.collection)
    assert (await world.raw("a"))["_version"] == 8
    later = Purger(world.cluster, world.collection.name, now=lambda: now() + timedelta(days=8))
    assert await later.purge() == 1
    indexer = through(world, world.cluster, Patience(budget_s=10))
    [item] = (
        await indexer.upsert([{"id": "a", "text": "t", "revision": 6}], collection=world.collection)
    ).items
    assert (item.status, item.version) == ("created", 6)


# --- partial failures ------------------------------------------------------------------------------------------------


class Going(StandsBefore):
    """Where writes go, until something has been written: then the error."""

    def __init__(self, world: World, error: Exception) -> None:
        super().__init__(world.cluster)
        self.error, self.gone = error, False
        self.inner = CatalogTargets(
            world.collection.name, cluster=world.cluster, catalog=world.catalog,
            embedder=lambda collection: world.embedder,
        )  # fmt: skip

    async def bulk(self, actions: Sequence[BulkAction], **options: Any) -> Any:
        found = await self.cluster.bulk(actions, **options)
        self.gone = True
        return found

    async def current(self) -> Target:
        if self.gone:
            raise self.error
        return await self.inner.current()

    async def reread(self, seen: Target) -> Target:
        raise self.error

    def indexer(self) -> Indexer:
        door: Any = self
        return Indexer(
            cluster=door, targets=lambda name: self, stamper=Stamper(2, now_us), now=now, patience=QUICK
        )


@pytest.mark.parametrize("error", [ClusterUnavailable("down"), NotFound("gone")], ids=["down", "gone"])
async def test_what_was_stored_is_told_when_the_rest_of_a_bulk_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(bulks, "SLICE_ITEMS", 2)
    items = [{"id": f"n{i}", "text": "t", "embedding": None} for i in range(9)]
    result = await Going(world, error).indexer().upsert(items, collection=world.collection)
    told = statuses(result)
    assert told[:2] == ["created", "created"]
    assert set(told) == {"created", "failed"}
    assert result.failed == told.count("failed")
    for item in result.items:
        assert item.id is not None
        assert (await world.get(item.id) is not None) == (item.status == "created")


async def test_changes_that_were_made_are_told_when_the_collection_goes_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulks, "SLICE_ITEMS", 2)
    ids = [f"n{i}" for i in range(4)]
    await world.upsert(*({"id": id_, "text": "t", "embedding": None} for id_ in ids))
    result = await Going(world, NotFound("gone")).indexer().delete_ids(ids, collection=world.collection)
    assert statuses(result) == ["deleted", "deleted", "failed", "failed"]


async def test_a_collection_that_goes_before_anything_is_written_is_not_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = Going(world, NotFound("gone"))

    async def gone(*args: Any, **options: Any) -> Any:
        raise NotFound("gone")

    monkeypatch.setattr(going, "mget", gone, raising=False)
    with pytest.raises(NotFound) as caught:
        await going.indexer().upsert([{"id": "a", "text": "t"}, {"id": "b"}], collection=world.collection)
    assert [item["status"] for item in caught.value.members["items"]] == ["failed", "invalid"]


# --- points in time --------------------------------------------------------------------------------------------------


class Listing(StandsBefore):
    """The door, whose search does not answer as it should."""

    def __init__(self, cluster: Cluster, answer: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(cluster)
        self.answer = answer
        self.opened: list[str] = []

    async def open_pit(self, *args: Any, **options: Any) -> str:
        pit = await self.cluster.open_pit(*args, **options)
        self.opened.append(pit)
        return pit

    async def search(self, *args: Any, **options: Any) -> Any:
        return await self.answer()


async def is_gone(world: World, pit: str) -> None:
    """Look that a point in time is closed, once what goes on behind answers has ended."""
    await asyncio.gather(*world.cluster._background)
    with pytest.raises(CursorExpired):
        await world.indexer.list_documents([], collection=world.collection, size=1, after="", pit=pit)


async def test_a_first_page_that_fails_leaves_no_point_in_time_open(world: World) -> None:
    async def fail() -> Any:
        raise ClusterUnavailable("busy")

    door = Listing(world.cluster, fail)
    with pytest.raises(ClusterUnavailable):
        await through(world, door).list_documents([], collection=world.collection, size=5)
    await is_gone(world, door.opened[0])


async def test_a_caller_who_hangs_up_on_the_first_page_leaves_no_point_in_time_open(world: World) -> None:
    asked = asyncio.Event()

    async def hang() -> Any:
        asked.set()
        await asyncio.Event().wait()

    door = Listing(world.cluster, hang)
    listing = asyncio.create_task(
        through(world, door).list_documents([], collection=world.collection, size=5)
    )
    await asked.wait()
    listing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listing
    await is_gone(world, door.opened[0])


async def test_a_later_page_that_fails_can_be_asked_for_again(world: World) -> None:
    await world.upsert(*({"id": f"n{i}", "text": "t", "embedding": None} for i in range(4)), refresh="true")
    first = await world.indexer.list_documents([], collection=world.collection, size=2)

    async def fail() -> Any:
        raise ClusterUnavailable("busy")

    door = Listing(world.cluster, fail)
    with pytest.raises(ClusterUnavailable):
        await through(world, door).list_documents(
            [], collection=world.collection, size=2, after=first.after, pit=first.pit
        )
    second = await world.indexer.list_documents(
        [], collection=world.collection, size=2, after=first.after, pit=first.pit
    )
    assert [document.id for document in second.documents] == ["n2", "n3"]
