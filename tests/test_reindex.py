"""A collection's move to another index on a real node: what is changed, kept, refused, resumed and undone."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app import catalog, moves, names, turns
from app.catalog import Catalog
from app.chunking import Chunking
from app.collection import CollectionOptions, SynonymRule
from app.elastic import BulkAction, Cluster
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound
from app.lanes import Carrier, Lane, Mismatch
from app.moves import Ledger, Paused, Taken
from app.reindex import Changes, Reindexer
from app.targets import CatalogTargets
from tests.fakes import EmbeddingServer, Reply, openai_error, vector_of
from tests.moving import DIMS, World, embedder_of, now, world_on

pytestmark = pytest.mark.node
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def other_server() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=16) as running:
        yield running


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer, other_server: EmbeddingServer
) -> AsyncIterator[World]:
    embedders = {"fake": embedder_of(server), "fake-16": embedder_of(other_server, "fake-16")}
    yield await world_on(cluster, unique("moving"), embedders)
    for embedder in embedders.values():
        await embedder.close()


async def fill(world: World, count: int = 40) -> None:
    """Documents d0 to d<count-1>: of one chunk or several, some with metadata, every tenth deleted."""
    await world.upsert(
        *(
            {
                "id": f"d{i}",
                "text": f"text {i}. " + ("Another sentence with words. " * 20 if i % 5 == 0 else ""),
                "metadata": {"n": i, "when": "2026-01-01", "word": f"w{i}"},
            }
            for i in range(count)
        )
    )
    await world.delete(*(f"d{i}" for i in range(0, count, 10)))


def plain(dump: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Without vectors and declared values."""
    return {
        id_: (
            version,
            {
                key: [{k: v for k, v in chunk.items() if k != "embedding"} for chunk in value]
                if key == "chunks"
                else value
                for key, value in source.items()
                if key != "declared"
            },
        )
        for id_, (version, source) in dump.items()
    }


def vectors(dump: dict[str, tuple[int, dict[str, Any]]]) -> dict[str, np.ndarray]:
    return {
        f"{id_}#{n}": np.array(chunk["embedding"])
        for id_, (_, source) in dump.items()
        for n, chunk in enumerate(source.get("chunks", ()))
        if "embedding" in chunk
    }


async def test_a_reindex_keeps_every_document_version_vector_and_tombstone(world: World) -> None:
    await fill(world)
    before, old = await world.dump(), (await world.collection()).index
    outcome = await world.reindexer().run(Changes(shards=2))
    after, new = await world.dump(), (await world.collection()).index
    assert (outcome.state.phase, outcome.failures, new != old) == ("swapped", {}, True)
    assert plain(after) == plain(before)
    ones, twos = vectors(before), vectors(after)
    assert ones.keys() == twos.keys()
    assert all(np.allclose(ones[key], twos[key], atol=1e-7) for key in ones)
    settings = (await world.cluster.get_settings(new))[new]
    assert settings["index.number_of_shards"] == "2"
    assert settings["index.refresh_interval"] == "1s"
    assert settings["index.auto_expand_replicas"] == "0-1"
    # The service goes on writing and reading without being told.
    await world.upsert({"id": "d1", "text": "changed"}, refresh="true")
    assert (await world.dump(new))["d1"][1]["text"] == "changed"
    assert await world.nearest(vector_of("changed", DIMS), 1) == ["d1"]
    assert (await world.dump(old))["d1"] == before["d1"]


async def test_profiles_experiment_and_uid_move_with_the_collection(world: World) -> None:
    await fill(world)
    given = {
        "profiles": {"recent": {"decay": {"half_life": "30d"}}},
        "default_profile": "recent",
        "experiment": {"name": "e", "arms": [{"profile": "recent", "percent": 100}]},
    }
    before = await world.collection()
    changed = await catalog.change(
        world.cluster, before, CollectionOptions.model_validate(given), dims=before.dims
    )
    await world.reindexer().run(Changes())
    after = (await catalog.get(world.cluster, before.name)).collection
    assert after.index != before.index
    for name in (*given, "uid"):
        assert getattr(after, name) == getattr(changed, name)
    assert after.uid == before.index


async def test_knn_still_finds_all_thirty(world: World) -> None:
    await world.upsert(*({"id": f"v{i}", "text": f"t {i}"} for i in range(30)), refresh="true")
    assert len(await world.nearest(vector_of("t 1", DIMS), 30)) == 30
    await world.reindexer().run(Changes())
    assert len(await world.nearest(vector_of("t 1", DIMS), 30)) == 30


async def test_writes_and_reads_go_on_and_reach_the_new_index(world: World) -> None:
    await fill(world, 200)
    stop, all_had_a_turn = asyncio.Event(), asyncio.Event()
    expected: dict[str, str | None] = {}
    read_ids: list[int] = []
    indexer, collection = world.indexer(3), await world.collection()
    await world.cluster.refresh(world.read)

    async def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            id_ = f"d{number % 50}"
            if number % 4 == 0:
                result = await indexer.delete_ids([id_], collection=collection)
                expected[id_] = None
            else:
                result = await indexer.upsert([{"id": id_, "text": f"new {number}"}], collection=collection)
                expected[id_] = f"new {number}"
            assert result.failed == 0
            if len(expected) == 50:
                all_had_a_turn.set()
            await asyncio.sleep(0.005)

    async def read() -> None:
        while not stop.is_set():
            read_ids.append(await world.cluster.count(world.read, {"range": {"document_id": {"gte": "d5"}}}))
            await asyncio.sleep(0.02)

    async def move() -> None:
        try:
            await world.reindexer(rate=400).run(Changes())
            # On a slow machine not every document had its turn yet.
            await all_had_a_turn.wait()
            await asyncio.sleep(0.3)
        finally:
            stop.set()

    await asyncio.gather(move(), write(), read())
    found = await world.dump()
    assert len(expected) == 50
    for id_, text in expected.items():
        assert found[id_][1].get("text") == text
    assert min(read_ids) > 0


async def test_declared_fields_take_their_values_from_the_metadata(world: World) -> None:
    await fill(world, 20)
    reindexer = world.reindexer()
    plan = await reindexer.plan(Changes(declare={"n": "long", "when": "date"}))
    assert plan.changes == ["declared field n: none → long", "declared field when: none → date"]
    assert (plan.documents, plan.tombstones, plan.reembeds) == (18, 2, False)
    await reindexer.run(Changes(declare={"n": "long", "when": "date"}))
    assert (await world.collection()).declared == {"n": "long", "when": "date"}
    ranged = {"range": {"declared.n": {"gte": 15, "lt": 18}}}
    assert await world.cluster.count(world.read, ranged) == 3
    assert (await world.dump())["d15"][1]["declared"]["when"] == "2026-01-01T00:00:00.000Z"
    await world.reindexer().finish()
    await world.reindexer().run(Changes(undeclare=frozenset({"n"})))
    assert (await world.collection()).declared == {"when": "date"}


async def test_documents_that_do_not_fit_are_named_and_nothing_is_swapped(world: World) -> None:
    await fill(world, 20)
    old = (await world.collection()).index
    await world.upsert({"id": "odd", "text": "t", "metadata": {"n": "seven"}})
    with pytest.raises(Mismatch) as refused:
        await world.reindexer().run(Changes(declare={"n": "long"}))
    assert "odd" in refused.value.detail
    assert "this is text" in refused.value.detail
    assert (await world.collection()).index == old
    assert refused.value.remedy is not None
    for way_out in ("run it again", "--allow-missing", "--abort", "nothing was swapped"):
        assert way_out in refused.value.remedy
    # As the remedy says: it stays under way, and other changes wait for its end.
    with pytest.raises(InvalidRequest, match="with other changes is under way"):
        await world.reindexer().run(Changes(declare={"n": "keyword"}))
    await world.reindexer().abort()
    with pytest.raises(Mismatch):
        await world.reindexer().run(Changes(declare={"n": "long"}))
    # Corrected meanwhile, the same run goes through.
    await world.upsert({"id": "odd", "text": "t", "metadata": {"n": 7}})
    outcome = await world.reindexer().run(None)
    assert (outcome.failures, outcome.state.missing) == ({}, 0)
    assert (await world.dump())["odd"][1]["declared"] == {"n": 7}


async def test_a_trial_tells_what_would_not_fit_and_moves_nothing(world: World) -> None:
    """BC-53: a run of a limited number of documents never swaps."""
    await fill(world, 60)
    await world.upsert({"id": "d11", "text": "t", "metadata": {"n": "seven"}})
    before, indices = await world.dump(), await world.indices()
    assert list(await world.reindexer().trial(Changes(declare={"n": "long"}), 10)) == ["d11"]
    assert await world.reindexer().trial(Changes(shards=2, model="fake-16", dims=16), 10) == {}
    assert [step.done for step in world.steps if step.step == "trying"] == [10, 10]
    assert (await world.dump(), await world.indices()) == (before, indices)
    assert (await world.reindexer().status())[0] is None
    outcome = await world.reindexer().run(Changes(shards=2))
    assert outcome.state.phase == "swapped"
    with pytest.raises(Conflict, match="under way"):
        await world.reindexer().trial(Changes(), 10)


async def test_an_index_of_the_new_ones_name_is_left_alone(world: World) -> None:
    """BC-53: the target's name exists already."""
    await fill(world, 20)
    moment = now()
    taken = names.index_name(world.name, moment)
    await world.cluster.create_index(taken, {"settings": {"index.number_of_replicas": 0}})
    there = Reindexer(world.cluster, world.name, embedder=world.embedder, now=lambda: moment, patience_s=30)
    assert (await there.run(Changes())).state.target != taken
    assert len(await world.dump()) == 20
    await there.roll_back()
    assert taken in await world.indices()


async def test_a_document_may_be_left_behind_by_leave_and_a_rollback_has_it(world: World) -> None:
    await fill(world, 20)
    old = (await world.collection()).index
    await world.upsert({"id": "odd", "text": "t", "metadata": {"n": "seven"}})
    outcome = await world.reindexer().run(Changes(declare={"n": "long"}), allow_missing=1)
    assert (list(outcome.failures), outcome.state.missing) == (["odd"], 1)
    assert "odd" not in await world.dump()
    await world.upsert({"id": "since", "text": "written since", "metadata": {"n": 3}})
    await world.delete("d1")
    await world.reindexer().roll_back()
    found = await world.dump()
    assert (await world.collection()).index == old
    assert found["since"][1]["text"] == "written since"
    assert found["d1"][1]["deleted"]
    assert "declared" not in found["since"][1]
    assert found["odd"][1]["text"] == "t"
    assert await world.indices() == [old]


async def test_another_model_embeds_anew(world: World) -> None:
    await fill(world)
    await world.upsert(
        {"id": "own", "text": "vector of the caller", "embedding": vector_of("x", DIMS)},
        {"id": "none", "text": "without", "embedding": None},
    )
    before = await world.dump()
    changes = Changes(model="fake-16", dims=16)
    plan = await world.reindexer().plan(changes)
    assert plan.changes == ["model: fake → fake-16", "dims: 8 → 16"]
    assert plan.reembeds
    assert plan.tokens > 0
    await world.reindexer().run(changes)
    collection, after = await world.collection(), await world.dump()
    assert (collection.dims, collection.model) == (16, "fake-16")
    assert plain(after) == plain(before)
    made = vectors(after)
    assert made.keys() == vectors(before).keys()
    assert np.allclose(made["d1#0"], vector_of(after["d1"][1]["chunks"][0]["text"], 16), atol=1e-6)
    assert np.allclose(made["own#0"], vector_of("vector of the caller", 16), atol=1e-6)
    # Back again: what was written with the new model gets the old one's vectors.
    await world.upsert({"id": "d2", "text": "in between"})
    await world.reindexer().roll_back()
    back = await world.dump()
    assert (await world.collection()).dims == DIMS
    assert np.allclose(vectors(back)["d2#0"], vector_of("in between", DIMS), atol=1e-6)
    assert np.allclose(vectors(back)["own#0"], vectors(before)["own#0"], atol=1e-6)


async def test_a_text_that_cannot_be_embedded_keeps_the_old_index_live(
    world: World, other_server: EmbeddingServer
) -> None:
    await world.upsert({"id": "a", "text": "fine"}, {"id": "b", "text": "poison"})
    other_server.poison["poison"] = openai_error(400, "this text is refused")
    with pytest.raises(Mismatch, match="b: "):
        await world.reindexer().run(Changes(model="fake-16", dims=16))
    assert (await world.collection()).dims == DIMS


async def test_an_embedding_server_that_is_down_stops_the_reindex_and_no_write(
    world: World, other_server: EmbeddingServer
) -> None:
    await fill(world, 20)
    other_server.answer = lambda seen: Reply(503, {"error": {"message": "overloaded"}})
    moving = asyncio.create_task(world.reindexer(patience_s=1.0).run(Changes(model="fake-16", dims=16)))
    await world.upsert({"id": "d1", "text": "written meanwhile"})
    with pytest.raises(Exception, match="embedding"):
        await moving
    assert (await world.dump())["d1"][1]["text"] == "written meanwhile"
    other_server.answer = other_server._embed
    await world.reindexer().run(None)
    found = await world.dump()
    assert np.allclose(vectors(found)["d1#0"], vector_of("written meanwhile", 16), atol=1e-6)


async def test_texts_are_cut_anew_and_known_chunks_keep_their_vectors(
    world: World, server: EmbeddingServer
) -> None:
    await world.upsert(
        {"id": "long", "text": "A sentence of some words. " * 30}, {"id": "short", "text": "short"}
    )
    before = await world.dump()
    server.requests.clear()
    outcome = await world.reindexer(chunks=Chunking(max_tokens=80, overlap_tokens=0)).run(
        Changes(rechunk=True)
    )
    after = await world.dump()
    assert 1 < len(after["long"][1]["chunks"]) < len(before["long"][1]["chunks"])
    assert after["short"] == before["short"]
    assert "short" not in [text for batch in server.batches for text in batch]
    assert outcome.failures == {}


async def test_another_similarity_gets_vectors_of_length_one(world: World) -> None:
    """Cosine keeps vectors of any length; an inner product of them would be no cosine, and dot_product refuses them."""
    await world.upsert({"id": "long", "text": "t", "embedding": [3.0, 4.0] + [0.0] * (DIMS - 2)})
    await world.reindexer().run(Changes(similarity="dot_product"))
    assert (await world.collection()).similarity == "dot_product"
    [vector] = vectors(await world.dump()).values()
    assert np.allclose(vector[:2], [0.6, 0.8], atol=1e-6)


# --- stopped, resumed, undone ------------------------------------------------------------------------------------------


async def test_a_stopped_reindex_goes_on_where_it_was(world: World) -> None:
    await fill(world, 400)
    task = asyncio.create_task(world.reindexer(rate=200).run(Changes(shards=2)))
    await world.copied(96)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.delete("d1", "d399")
    await world.upsert({"id": "d2", "text": "changed meanwhile"})
    state, _ = await world.reindexer().status()
    assert state is not None
    assert (state.phase, state.copied) == ("copying", False)
    with pytest.raises(InvalidRequest, match="other changes"):
        await world.reindexer().run(Changes(shards=3))
    world.steps.clear()
    outcome = await world.reindexer().run(Changes(shards=2))
    assert outcome.state.done < 400 + 96
    found = await world.dump()
    assert len(found) == 400
    assert found["d1"][1]["deleted"]
    assert found["d399"][1]["deleted"]
    assert found["d2"][1]["text"] == "changed meanwhile"


async def test_a_second_process_is_refused_and_may_ask_for_a_pause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(world, 200)
    first = asyncio.create_task(world.reindexer(rate=20).run(Changes()))
    await world.copied(1)
    with monkeypatch.context() as patch:
        # Ends with the first heartbeat that is seen.
        patch.setattr(Ledger, "silent", partialmethod(Ledger.silent, for_s=20))
        with pytest.raises(Conflict, match="another process"):
            await world.reindexer().run(None)
    await world.reindexer().pause()
    with pytest.raises(Paused):
        await first
    await world.reindexer().run(None)
    assert len(await world.dump()) == 200


async def test_abort_ends_a_running_reindex_and_removes_its_index(world: World) -> None:
    await fill(world, 200)
    old = (await world.collection()).index
    running = asyncio.create_task(world.reindexer(rate=20).run(Changes()))
    await world.copied(1)
    assert (await world.reindexer().abort()).phase == "aborted"
    with pytest.raises(Taken):
        await running
    assert await world.indices() == [old]
    await world.upsert({"id": "d1", "text": "goes on"})
    with pytest.raises(Conflict, match="no reindex"):
        await world.reindexer().abort()
    with pytest.raises(Conflict, match="no reindex"):
        await world.reindexer().roll_back()
    with pytest.raises(NotFound, match="no reindex"):
        await world.reindexer().run(None)


async def test_after_the_swap_it_is_finished_or_rolled_back_once(world: World) -> None:
    await fill(world, 20)
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    with pytest.raises(Conflict, match="other index is still there"):
        await world.reindexer().run(Changes())
    with pytest.raises(Conflict, match="no reindex to abort"):
        await world.reindexer().abort()
    assert len(await world.indices()) == 2
    assert (await world.reindexer().finish()).phase == "finished"
    assert old not in await world.indices()
    with pytest.raises(Conflict, match="waits to be finished"):
        await world.reindexer().finish()
    with pytest.raises(Conflict, match="to roll back"):
        await world.reindexer().roll_back()


async def test_a_straggler_in_the_old_index_is_found_before_it_is_deleted(world: World) -> None:
    """Something writes to the old index past every fence: it is brought over, not deleted with it."""
    await fill(world, 20)
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    version = (await world.dump())["d1"][0] + 1
    await world.cluster.clear_write_block(old)
    await world.cluster.update_aliases(
        [{"add": {"index": old, "alias": f"{names.own_index('late')}-{world.name}"}}]
    )
    late = {"document_id": "d1", "text": "late", "chunks": []}
    [outcome] = await world.cluster.bulk(
        [BulkAction(f"{names.own_index('late')}-{world.name}", "d1", version, late)], timeout_s=10
    )
    assert outcome.fate == "applied"
    await world.reindexer().finish()
    assert (await world.dump())["d1"] == (version, late)


async def test_a_document_that_only_the_new_index_has_forbids_the_swap(world: World) -> None:
    await fill(world, 20)
    old = (await world.collection()).index
    task = asyncio.create_task(world.reindexer(rate=100).run(Changes()))
    await world.copied(1)
    [outcome] = await world.cluster.bulk(
        [BulkAction(moves.copy_alias(world.name), "stranger", 5, {"document_id": "stranger"})], timeout_s=10
    )
    assert outcome.fate == "applied"
    with pytest.raises(Mismatch, match="stranger"):
        await task
    assert (await world.collection()).index == old
    await world.upsert({"id": "d1", "text": "goes on"})


async def test_lost_vectors_forbid_the_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """BC-49: a copy with all documents and versions but without a vector."""
    await fill(world, 20)

    honest = Carrier._reshape

    def careless(self: Carrier, lane: Lane, source: Any) -> Any:
        body = honest(self, lane, source)
        if body["document_id"] == "d3":
            body["chunks"] = [{k: v for k, v in c.items() if k != "embedding"} for c in body["chunks"]]
        return body

    monkeypatch.setattr(Carrier, "_reshape", careless)
    reindexer = Reindexer(world.cluster, world.name, embedder=world.embedder, now=now, patience_s=10)
    with pytest.raises(Mismatch, match=r"lost their vectors.*d3"):
        await reindexer.run(Changes())


# --- the fence ---------------------------------------------------------------------------------------------------------


async def test_a_fence_whose_maker_died_is_lifted_by_a_writer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "RESCUE_AFTER_S", 0.5)
    await fill(world, 20)
    index = (await world.collection()).index
    await world.cluster.refresh(index)
    before = (await moves.standing(world.cluster, world.name)).generation
    generation = await moves.fence(world.cluster, world.name, index=index, generation=before)
    standing = await moves.standing(world.cluster, world.name)
    assert (standing.live, standing.written, standing.fenced) == (index, None, index)
    # Readers notice nothing, writers wait and then help themselves.
    assert await world.cluster.count(world.read) == 18
    await asyncio.gather(*(world.upsert({"id": f"d{i}", "text": "after"}) for i in range(1, 4)))
    assert (await moves.standing(world.cluster, world.name)).written == index
    # Its maker wakes up: neither its swap nor its lifting does anything any more.
    assert not await moves.lift(world.cluster, world.name, index=index, generation=generation)
    with pytest.raises(NotFound):
        await moves.swap(
            world.cluster, world.name, source=index, target=index, generation=generation, read_properties={}
        )


async def test_a_writer_gives_up_on_a_fence_that_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.targets.FENCE_WAIT_S", 0.3)
    await fill(world, 1)
    index = (await world.collection()).index
    before = (await moves.standing(world.cluster, world.name)).generation
    await moves.fence(world.cluster, world.name, index=index, generation=before)
    targets = CatalogTargets(
        world.name, cluster=world.cluster, catalog=Catalog(world.cluster), embedder=world.embedder
    )
    with pytest.raises(Exception, match="being exchanged"):
        await targets.current()


async def test_only_one_of_swap_and_lift_happens(world: World) -> None:
    """Six times at once: exactly one of the two wins, and the writers have an index in the end."""
    await fill(world, 5)
    for _ in range(6):
        standing = await moves.standing(world.cluster, world.name)
        assert standing.live is not None
        index = standing.live
        target = names.index_name(world.name, now())
        mapping = (await world.cluster.get_mapping(index))[index]
        await world.cluster.create_index(
            target, {"mappings": mapping, "aliases": {moves.copy_alias(world.name): {}}}
        )
        generation = await moves.fence(world.cluster, world.name, index=index, generation=standing.generation)
        swapped, lifted = await asyncio.gather(
            moves.swap(
                world.cluster, world.name, source=index, target=target, generation=generation,
                read_properties={"filter": {"match_all": {}}, "is_write_index": True},
            ),
            moves.lift(world.cluster, world.name, index=index, generation=generation),
            return_exceptions=True,
        )  # fmt: skip
        after = await moves.standing(world.cluster, world.name)
        assert after.generation == generation + 1
        assert after.live == after.written == (index if lifted is True else target)
        assert (lifted is True) == isinstance(swapped, NotFound)
        await world.cluster.delete_indices([target if lifted is True else index])


async def test_states_of_two_owners_do_not_mix(world: World) -> None:
    one, two = (Ledger(world.cluster, world.name, owner=name, now=now) for name in ("one", "two"))
    await one.load()
    await one.begin(moves.State(world.name, "copying", "one", "s", "t"))
    await two.load()
    await two.take()
    with pytest.raises(Taken):
        await one.save(done=5)
    with pytest.raises(Taken):
        one.check()
    assert (await two.load()) == two.state
    assert two.state.done == 0


KILLED = """
import asyncio, os, sys
from app import moves
from app.elastic import Cluster
from app.reindex import Changes, Reindexer
from datetime import UTC, datetime

async def main(url, name, where):
    cluster = Cluster.connect(urls=[url])
    await cluster.check_version()
    if where == "fence":
        real = moves.swap
        async def swap(*a, **k):
            os.kill(os.getpid(), 9)
        moves.swap = swap
    if where == "swapped":
        real = moves.swap
        async def swap(*a, **k):
            await real(*a, **k)
            os.kill(os.getpid(), 9)
        moves.swap = swap
    if where == "catching up":
        # Somebody writes all the time, but perhaps not just between the copy and the look at what came since.
        changes_since = Reindexer._changes_since
        async def some(self, *a, **k):
            async with asyncio.timeout(120):
                while not await changes_since(self, *a, **k):
                    await asyncio.sleep(0.05)
        Reindexer._changes_since = some
    def report(progress):
        if where == progress.step:
            os.kill(os.getpid(), 9)
    r = Reindexer(cluster, name, embedder=None, now=lambda: datetime.now(UTC), report=report)
    await r.run(Changes(shards=2))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("where", ["copying", "waiting for replicas", "catching up", "fence", "swapped"])
async def test_a_killed_reindex_is_resumed_wherever_it_was(world: World, where: str) -> None:
    await fill(world, 60)
    killed = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, world.cluster.urls[0], world.name, where,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    writer = None
    if where == "catching up":
        writer = asyncio.create_task(keep_writing(world))
    assert await killed.wait() == -signal.SIGKILL
    if writer is not None:
        writer.cancel()
    if where not in ("fence", "swapped"):
        await world.upsert({"id": "d1", "text": "meanwhile"})
    await world.reindexer().run(None)
    if where in ("fence", "swapped"):
        await world.upsert({"id": "d1", "text": "meanwhile"})
    found = await world.dump()
    assert len({id_ for id_ in found if id_.startswith("d")}) == 60
    assert found["d1"][1]["text"] == "meanwhile"
    assert len(await world.indices()) == 2
    await world.reindexer().finish()
    assert len(await world.indices()) == 1


async def keep_writing(world: World) -> None:
    number = 0
    while True:
        number += 1
        await world.upsert({"id": f"w{number % 20}", "text": f"n {number}"})


async def test_profiles_and_synonyms_move_along_also_those_of_the_last_moment(world: World) -> None:
    await fill(world, 12)
    collection = await world.collection()
    options = CollectionOptions.model_validate(
        {"profiles": {"news": {"decay": {"half_life": "7d"}}}, "default_profile": "news"}
    )
    collection = await catalog.change(world.cluster, collection, options, dims=DIMS)

    async def changed_meanwhile() -> None:
        await world.copied(1)
        await catalog.put_synonyms(world.cluster, collection, [SynonymRule(synonyms="car, automobile")])

    changing = asyncio.create_task(changed_meanwhile())
    await world.reindexer().run(Changes(shards=2))
    await changing
    moved = await world.collection()
    assert moved.index != collection.index
    assert (moved.profiles, moved.default_profile) == (collection.profiles, "news")
    assert [rule.synonyms for rule in moved.synonyms] == ["car, automobile"]
    # And back again, with what was changed since.
    await catalog.put_synonyms(world.cluster, moved, [])
    await world.reindexer().roll_back()
    assert (await world.collection()).synonyms == []
    assert (await world.collection()).default_profile == "news"


async def test_a_declared_key_counts_as_a_change_and_settings_of_the_last_moment_move_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await world.collection()
    options = CollectionOptions(refresh_interval="7s")
    fence = moves.fence
    compare = Reindexer._compare

    async def changed(self, *args, **given):
        await catalog.change(world.cluster, before, options, dims=DIMS)
        return await compare(self, *args, **given)

    monkeypatch.setattr(Reindexer, "_compare", changed)
    # The first fence fails: what was counted for it is not counted twice.
    fences = 0

    async def fail_once(*args, **given):
        nonlocal fences
        fences += 1
        if fences == 1:
            raise ClusterUnavailable("busy")
        return await fence(*args, **given)

    monkeypatch.setattr(moves, "fence", fail_once)
    reindexer = world.reindexer()
    await reindexer.run(Changes(declare={"extra": "long"}))
    moved = await world.collection()
    assert moved.index != before.index
    assert moved.revision == before.revision + 1
    with pytest.raises(Conflict, match="revision 1, not 0"):
        await catalog.change(
            world.cluster,
            moved,
            CollectionOptions.model_validate({"profiles": {}, "if_revision": before.revision}),
            dims=DIMS,
        )
    settings = (await world.cluster.get_settings(moved.index))[moved.index]
    assert settings["index.refresh_interval"] == "7s"
    monkeypatch.undo()
    # Going back undeclares it, which is a change again.
    await reindexer.roll_back()
    back = await world.collection()
    assert (back.index, back.revision) == (before.index, before.revision + 2)


async def test_a_turn_that_others_hold_is_waited_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "FENCE_TIMEOUT_S", 60.0)
    turn = turns.turn
    tries = 0

    def busy(cluster, name, **given):
        nonlocal tries
        tries += 1
        return turn(cluster, name, wait_s=-1) if tries == 1 else turn(cluster, name, **given)

    async with contextlib.AsyncExitStack() as others:
        await others.enter_async_context(turn(world.cluster, world.name))
        monkeypatch.setattr(turns, "turn", busy)
        changes_since = Reindexer._changes_since

        async def freed(self, *args, **given):
            if tries == 1:
                await others.aclose()
            return await changes_since(self, *args, **given)

        monkeypatch.setattr(Reindexer, "_changes_since", freed)
        before = (await world.collection()).index
        await world.reindexer().run(Changes())
    assert tries == 2
    assert (await world.collection()).index != before
