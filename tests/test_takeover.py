"""A move that is ended anywhere, or taken over by another process, while it ends: on a real node.

Two processes are two reindexers here, and one that stands still is held at a hook, so nothing depends on timing.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partialmethod
from typing import Any

import pytest

from app import catalog, copying, moves, turns
from app.collection import CollectionOptions
from app.elastic import BulkAction, Cluster
from app.errors import ClusterUnavailable, Conflict, CursorExpired, HalflifeError, NotFound, StorageFull
from app.moves import Ledger, State, Taken
from app.purge import Purger
from app.reindex import Changes, Reindexer
from tests.fakes import EmbeddingServer
from tests.moving import DIMS, Killed, World, embedder_of, now, world_on

pytestmark = pytest.mark.node


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], server: EmbeddingServer
) -> AsyncIterator[World]:
    embedder = embedder_of(server)
    made = await world_on(cluster, unique("ending"), {"fake": embedder})
    await made.upsert(*({"id": f"d{i}", "text": f"text {i}"} for i in range(12)))
    yield made
    await embedder.close()


@pytest.fixture
async def apart(cluster: Cluster) -> AsyncIterator[Cluster]:
    """A second connection, of which a test may change a method without changing what it looks with."""
    connection = Cluster.connect(urls=cluster.urls, request_timeout_s=30)
    await connection.check_version()
    yield connection
    await connection.close()


@pytest.fixture
def stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears of the other process: it was stopped, or killed."""

    async def silent(self: Ledger) -> bool:
        await self.load()
        return True

    monkeypatch.setattr(Ledger, "silent", silent)
    monkeypatch.setattr(moves, "HEARTBEAT_S", 3_600)


async def state_of(world: World) -> State:
    state = await Ledger(world.cluster, world.name, owner="test", now=now).load()
    assert state is not None
    return state


async def blocked(world: World, index: str) -> bool:
    return (await world.cluster.get_settings(index))[index].get("index.blocks.write") == "true"


@contextlib.contextmanager
def killed_before(phase: str) -> Iterator[None]:
    """Inside, a process that is about to write that phase down is killed instead."""
    real = Ledger.save

    async def save(self: Ledger, **changes: Any) -> None:
        if changes.get("phase") == phase:
            raise Killed
        await real(self, **changes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "save", save)
        try:
            yield
        except Killed:
            return
        pytest.fail("nothing was killed")


def before(holder: Any, name: str, act: Callable[[], Awaitable[Any]]) -> None:
    """Hold the next call of a method, this once, until something else is done."""
    real, done = getattr(holder, name), False

    async def held(*args: Any, **given: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            await act()
        return await real(*args, **given)

    setattr(holder, name, held)


# --- ended between the deletion and the note of it --------------------------------------------------------------------


@pytest.mark.usefixtures("stands_still")
@pytest.mark.parametrize("ending", ["finish", "roll_back"])
async def test_a_kill_between_the_deletion_and_its_note_is_gone_on_from(world: World, ending: str) -> None:
    old = (await world.collection()).index
    outcome = await world.reindexer().run(Changes())
    kept, phase = {"finish": (outcome.state.target, "finished"), "roll_back": (old, "rolled-back")}[ending]
    with killed_before(phase):
        await getattr(world.reindexer(), ending)()
    assert await world.indices() == [kept]
    assert (await state_of(world)).under_way
    await getattr(world.reindexer(), ending)()
    assert (await state_of(world)).phase == phase
    assert await world.indices() == [kept]
    assert len(await world.dump()) == 12
    assert (await world.reindexer().run(Changes())).state.phase == "swapped"


@pytest.mark.parametrize("killed", [False, True], ids=["after its note", "before its note"])
async def test_an_old_index_that_somebody_deleted_is_no_dead_end(
    world: World, stands_still: None, killed: bool
) -> None:
    old = (await world.collection()).index
    with killed_before("swapped") if killed else contextlib.nullcontext():
        await world.reindexer().run(Changes())
    await world.cluster.delete_indices([old])
    if killed:
        assert (await world.reindexer().run(None)).state.phase == "finished"
    else:
        assert (await world.reindexer().finish()).phase == "finished"
    assert await Purger(world.cluster, world.name, now=now).purge() == 0
    assert (await world.reindexer().run(Changes())).state.phase == "swapped"


async def test_a_rollback_to_an_index_that_is_gone_says_so_once(world: World) -> None:
    old = (await world.collection()).index
    target = (await world.reindexer().run(Changes())).state.target
    await world.cluster.delete_indices([old])
    with pytest.raises(Conflict, match=f"{old}.* is gone") as told:
        await world.reindexer().roll_back()
    assert target in str(told.value.remedy)
    assert (await state_of(world)).phase == "finished"
    await world.upsert({"id": "d1", "text": "goes on"})


async def test_a_rollback_given_up_after_its_index_was_deleted_is_finished(
    world: World, stands_still: None
) -> None:
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    stopped = world.reindexer()
    before(stopped, "_turn", _kill)
    with pytest.raises(Killed):
        await stopped.roll_back()
    with pytest.raises(Conflict, match="waits to be finished") as told:
        await world.reindexer().finish()
    assert "--abort" in str(told.value.remedy)
    await world.cluster.delete_indices([old])
    assert (await world.reindexer().abort()).phase == "finished"
    await world.upsert({"id": "d1", "text": "goes on"})


async def _kill() -> None:
    raise Killed


# --- taken over meanwhile ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stands_still")
@pytest.mark.parametrize(
    "held_at, far",
    [
        ("_compare", "swapped back"),
        ("_delete", "taken"),
        ("discard", "taken"),
        ("discard", "filling"),
        ("discard", "swapped back"),
    ],
)
async def test_a_finish_that_stood_still_deletes_nothing_that_a_rollback_needs(
    world: World, monkeypatch: pytest.MonkeyPatch, held_at: str, far: str
) -> None:
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    await world.upsert({"id": "d1", "text": "written since"})
    stale, taking = world.reindexer(), world.reindexer()

    async def take_over() -> None:
        if far == "swapped back":
            await taking.roll_back()
        else:
            before(taking, "_permit" if far == "taken" else "_turn", _kill)
            with pytest.raises(Killed):
                await taking.roll_back()

    if held_at == "discard":
        # Past its last look, and past the last time that it made sure of being the owner.
        hold: Any = type("Hold", (), {"discard": staticmethod(moves.discard)})
        before(hold, "discard", take_over)
        monkeypatch.setattr(moves, "discard", hold.discard)
    else:
        before(stale, held_at, take_over)
    with pytest.raises(Taken):
        await stale.finish()
    if far == "taken" and held_at == "discard":
        # Nobody had begun to fill it: this finish was the quicker one, and the rollback says so.
        assert old not in await world.indices()
        with pytest.raises(Conflict, match="is gone"):
            await world.reindexer().roll_back()
    else:
        assert old in await world.indices()
        if far != "swapped back":
            await world.reindexer().roll_back()
        assert (await world.collection()).index == old
    found = await world.dump()
    assert (len(found), found["d1"][1]["text"]) == (12, "written since")
    await world.upsert({"id": "d2", "text": "goes on"})


async def test_a_finish_at_work_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(Ledger, "silent", partialmethod(Ledger.silent, for_s=30.0))
    await world.reindexer().run(Changes())
    one = world.reindexer()
    tried: list[str] = []

    async def others_try() -> None:
        for name in ("roll_back", "finish"):
            with pytest.raises(Conflict, match="another process works"):
                await getattr(world.reindexer(), name)()
            tried.append(name)

    before(one, "_compare", others_try)
    assert (await one.finish()).phase == "finished"
    assert tried == ["roll_back", "finish"]


async def test_a_finish_may_be_paused_before_it_deletes(world: World, stands_still: None) -> None:
    await world.reindexer().run(Changes())
    one = world.reindexer()
    before(one, "_compare", world.reindexer().pause)
    with pytest.raises(moves.Paused):
        await one.finish()
    assert len(await world.indices()) == 2
    assert (await world.reindexer().finish()).phase == "finished"


async def test_a_finish_outlives_new_generations_of_the_write_alias(world: World) -> None:
    """Whoever gives writers a new generation meanwhile is no other reindex."""
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    one = world.reindexer()

    async def next_generation() -> None:
        seen = await moves.standing(world.cluster, world.name)
        fence = await moves.fence(
            world.cluster, world.name, index=seen.live or "", generation=seen.generation
        )
        assert await moves.lift(world.cluster, world.name, index=seen.live or "", generation=fence)

    before(one, "_delete", next_generation)
    assert (await one.finish()).phase == "finished"
    assert old not in await world.indices()


async def test_an_index_is_deleted_under_the_aliases_that_were_seen_or_not_at_all(world: World) -> None:
    old = (await world.collection()).index
    await world.reindexer().run(Changes())
    seen = await moves.standing(world.cluster, world.name)
    assert seen.written is not None
    await moves.permit_filling(world.cluster, world.name, old, seen=seen)
    with pytest.raises(NotFound):
        await moves.discard(world.cluster, world.name, old, seen=seen)
    with pytest.raises(NotFound):
        await moves.permit_filling(world.cluster, world.name, old, seen=seen)
    assert old in await world.indices()
    await world.upsert({"id": "d1", "text": "writers go on in the new generation"})
    now_seen = await moves.standing(world.cluster, world.name)
    await moves.discard(world.cluster, world.name, old, seen=now_seen)
    assert await world.indices() == [seen.live]
    # The look is still true: deleting has not cost writers their alias.
    assert await moves.standing(world.cluster, world.name) == moves.Standing(
        seen.live, seen.generation + 1, seen.written, None, None
    )
    with pytest.raises(NotFound):
        await moves.discard(world.cluster, world.name, old, seen=now_seen)


async def test_an_abort_that_stood_still_deletes_no_live_index(world: World, stands_still: None) -> None:
    first = world.reindexer()
    before(first, "_ensure_target", _kill)
    with pytest.raises(Killed):
        await first.run(Changes())
    stale = world.reindexer()
    before(stale, "_delete", lambda: world.reindexer().run(None))
    with pytest.raises(Taken, match="is not deleted"):
        await stale.abort()
    assert (await world.collection()).index == (await state_of(world)).target
    assert len(await world.dump()) == 12


@pytest.mark.parametrize("held_at", ["_sweep", "_set_aside", "add_write_block"])
async def test_a_block_that_comes_late_does_not_stay_on_a_live_index(
    world: World, apart: Cluster, stands_still: None, monkeypatch: pytest.MonkeyPatch, held_at: str
) -> None:
    old = (await world.collection()).index
    stale = world.reindexer()

    async def take_over() -> None:
        assert (await world.reindexer().run(None)).state.phase == "swapped"
        await world.reindexer().roll_back()

    if held_at == "add_write_block":
        # The second one: the first is the fence's.
        before(stale, "_set_aside", _hold_block(stale, apart, take_over, monkeypatch))
    else:
        before(stale, held_at, take_over)
    with pytest.raises(Taken):
        await stale.run(Changes())
    assert (await world.collection()).index == old
    assert not await blocked(world, old)
    await world.upsert({"id": "d1", "text": "goes on"})


def _hold_block(
    stale: Reindexer, apart: Cluster, act: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Awaitable[None]]:
    async def hold() -> None:
        stale._cluster, real = apart, stale._cluster
        block = apart.add_write_block

        async def late(index: str) -> None:
            await act()
            await block(index)
            stale._cluster = real

        monkeypatch.setattr(apart, "add_write_block", late)

    return hold


async def test_a_fence_that_was_lifted_before_its_block_came_leaves_none(
    world: World, apart: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "HEARTBEAT_S", 3_600)
    old = (await world.collection()).index
    stale = Reindexer(apart, world.name, embedder=world.embedder, now=now, patience_s=30)

    async def rescued_and_taken() -> None:
        seen = await moves.standing(world.cluster, world.name)
        assert await moves.lift(world.cluster, world.name, index=old, generation=seen.generation)
        other = Ledger(world.cluster, world.name, owner="other", now=now)
        await other.load()
        await other.take()

    before(apart, "add_write_block", rescued_and_taken)
    with pytest.raises(Taken):
        await stale.run(Changes())
    assert not await blocked(world, old)


# --- what is written down ---------------------------------------------------------------------------------------------


async def test_a_wish_to_pause_keeps_what_the_owner_has_written_meanwhile(
    world: World, apart: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, asking = (Ledger(world.cluster, world.name, owner=name, now=now) for name in ("one", "two"))
    await owner.load()
    await owner.begin(State(world.name, "copying", "one", "s", "t"))
    monkeypatch.setattr(asking, "_cluster", apart)
    before(apart, "put_document", lambda: owner.save(done=7))
    asked = await asking.ask_to_pause()
    assert asked is not None
    assert (asked.pause, asked.done) == (True, 7)
    await owner.save(done=8)
    with pytest.raises(moves.Paused):
        owner.check()
    await owner.take()
    before(apart, "put_document", lambda: owner.save(phase="finished"))
    asked = await asking.ask_to_pause()
    assert asked is not None
    assert (asked.pause, asked.phase, (await state_of(world)).phase) == (False, "finished", "finished")


@pytest.mark.parametrize(
    "beats, written, ends",
    [(1, {}, "aborted"), (2, {}, "aborted"), (99, {}, "taken"), (1, {"phase": "swapped"}, "too late")],
)
async def test_an_abort_does_not_mind_a_heartbeat_between_its_look_and_its_taking(
    world: World, monkeypatch: pytest.MonkeyPatch, beats: int, written: dict[str, Any], ends: str
) -> None:
    stopped = world.reindexer()
    before(stopped, "_first_copy", _kill)
    with pytest.raises(Killed):
        await stopped.run(Changes())
    # In its place goes on beating what has the name of its owner.
    owner = Ledger(world.cluster, world.name, owner=(await state_of(world)).owner, now=now)
    await owner.load()
    take, beaten = Ledger.take, 0

    async def late(self: Ledger, **changes: Any) -> None:
        nonlocal beaten
        if beaten < beats:
            beaten += 1
            await owner.save(**written)
        await take(self, **changes)

    monkeypatch.setattr(Ledger, "take", late)
    if ends == "aborted":
        assert (await world.reindexer().abort()).phase == "aborted"
        with pytest.raises(Taken):
            await owner.save()
        assert beaten == beats
        assert len(await world.indices()) == 1
    elif ends == "taken":
        with pytest.raises(Taken):
            await world.reindexer().abort()
    else:
        with pytest.raises(Conflict, match="no reindex to abort"):
            await world.reindexer().abort()


async def test_a_heartbeat_that_fails_goes_on_and_does_not_speak_for_the_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "HEARTBEAT_S", 0.001)
    ledger = Ledger(world.cluster, world.name, owner="one", now=now)
    await ledger.load()
    await ledger.begin(State(world.name, "copying", "one", "s", "t"))
    save, beats, last = ledger.save, 0, asyncio.Event()
    errors = [
        StorageFull("a disk is full"),
        ClusterUnavailable("busy"),
        None,
        RuntimeError("a fault of ours"),
    ]

    async def failing(**changes: Any) -> None:
        nonlocal beats
        error = errors[min(beats, 3)]
        beats += 1
        if isinstance(error, RuntimeError):
            last.set()
        if error is not None:
            raise error
        await save(**changes)

    monkeypatch.setattr(ledger, "save", failing)
    async with ledger.heartbeat(), asyncio.timeout(60):
        await last.wait()
    assert beats == 4
    with pytest.raises(Killed):
        async with ledger.heartbeat():
            raise Killed


async def test_a_swap_is_told_although_writers_could_not_be_seen_to(
    world: World, apart: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Reindexer(apart, world.name, embedder=world.embedder, now=now, patience_s=0.1)
    let_in = one._let_in

    async def cut_off(source: str) -> None:
        async def fails(*patterns: str) -> Any:
            raise ClusterUnavailable("no connection")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(apart, "resolve_aliases", fails)
            await let_in(source)

    monkeypatch.setattr(one, "_let_in", cut_off)
    assert (await one.run(Changes())).state.phase == "swapped"


async def test_what_stopped_a_purge_is_told_and_not_that_its_end_could_not_be_noted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    purger = Purger(world.cluster, world.name, now=now, patience_s=0.1)

    async def fails(index: str) -> None:
        raise NotFound("the reason")

    async def save(self: Ledger, **changes: Any) -> None:
        raise ClusterUnavailable("the disguise")

    monkeypatch.setattr(purger, "_refuse_while_moving", fails)
    ledger_begin = Ledger.begin

    async def begin(self: Ledger, state: State) -> None:
        await ledger_begin(self, state)
        monkeypatch.setattr(Ledger, "save", save)

    monkeypatch.setattr(Ledger, "begin", begin)
    with pytest.raises(HalflifeError, match="the reason"):
        await purger.purge()


async def test_a_deleted_collection_leaves_no_reindex_to_its_namesake(world: World) -> None:
    stopped = world.reindexer()
    before(stopped, "_first_copy", _kill)
    with pytest.raises(Killed):
        await stopped.run(Changes())
    left = await state_of(world)
    purge = Ledger(world.cluster, world.name, owner="p", now=now, kind="purge")
    await purge.load()
    await purge.begin(State(world.name, "copying", "p", left.source, ""))
    await catalog.delete(world.cluster, world.name)
    ids = [turns.state_id(world.name, kind) for kind in turns.KINDS]
    assert [entry["found"] for entry in await world.cluster.mget(turns.STATE_INDEX, ids, timeout_s=10)] == [
        False,
        False,
        False,
    ]
    # One that was at work hears of it.
    with pytest.raises(Taken):
        await purge.save()
    await catalog.create(
        world.cluster, world.name, CollectionOptions(), dims=DIMS, model="fake", moment=now()
    )
    # What an earlier release, or a deletion past the service, has left is not of this collection.
    for phase in ("copying", "swapped", "returning"):
        ledger = Ledger(world.cluster, world.name, owner="x", now=now)
        await ledger.load()
        await ledger.begin(State(world.name, phase, "x", left.source, left.target))
        assert (await world.reindexer().status())[0] is None
        for name in ("finish", "roll_back", "abort", "pause"):
            with pytest.raises(Conflict, match="no reindex"):
                await getattr(world.reindexer(), name)()
        assert await world.reindexer().trial(Changes(), 5) == {}
    with pytest.raises(NotFound) as told:
        await world.reindexer().run(None)
    assert "begin one" in str(told.value.remedy)
    assert (await world.reindexer().run(Changes())).state.phase == "swapped"


# --- points in time ---------------------------------------------------------------------------------------------------


class Counted(Cluster):
    """Counts the points in time that are open, and fails searches as it is told to."""

    opened = 0
    held: set[str]
    failures: list[HalflifeError]

    async def open_pit(self, index: str, **given: Any) -> str:
        self.opened += 1
        pit = await super().open_pit(index, **given)
        self.held.add(pit)
        return pit

    async def close_pit(self, pit_id: str) -> None:
        self.held.discard(pit_id)
        await super().close_pit(pit_id)

    async def search(self, index: str | None, body: Any, **given: Any) -> Any:
        if self.failures and "search_after" in body:
            raise self.failures.pop(0)
        return await super().search(index, body, **given)


AWAY: dict[str, Any] = {"elasticsearch": {"type": "no_shard_available_action_exception", "status": 503}}


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize(
    "failures, opened",
    [
        ([ClusterUnavailable("busy")] * 3, 1),
        ([CursorExpired("gone")], 2),
        ([ClusterUnavailable("away", **AWAY)], 2),
        # Somewhere else than where it was asked, nothing may be left of it.
        ([ClusterUnavailable("hangs")] * copying.TRIES_EACH, 2),
    ],
    ids=["a busy cluster has it still", "gone", "its node is away", "no more of it"],
)
async def test_reading_pages_keeps_one_point_in_time_at_most(
    world: World, failures: list[HalflifeError], opened: int, foreign: bool
) -> None:
    await world.upsert(*({"id": f"e{i}", "text": "t"} for i in range(60)), refresh="true")
    counted = Counted.connect(urls=world.cluster.urls, request_timeout_s=30)
    counted.held, counted.failures = set(), list(failures)
    index = (await world.collection()).index
    found: list[str] = []
    async for hits in copying.pages(counted, index, whole=True, foreign=foreign, budget_s=30):
        found += [hit["_id"] for hit in hits]
    assert (len(set(found)), counted.opened, counted.failures) == (72, opened, [])
    if not (foreign and opened > 1):
        assert len(found) == 72
    await asyncio.gather(*counted._background)
    assert counted.held == set()
    await counted.close()


async def test_a_straggler_in_an_index_that_is_rolled_back_from_is_found(world: World) -> None:
    """As for a finish: what a late write left in the index that goes is brought over before."""
    old = (await world.collection()).index
    target = (await world.reindexer().run(Changes())).state.target
    version = (await world.dump())["d1"][0] + 1
    one = world.reindexer()

    async def straggle() -> None:
        await world.cluster.clear_write_block(target)
        alias = f"halflife_late-{world.name}"
        await world.cluster.update_aliases([{"add": {"index": target, "alias": alias}}])
        late = {"document_id": "d1", "text": "late", "chunks": []}
        [outcome] = await world.cluster.bulk([BulkAction(alias, "d1", version, late)], timeout_s=10)
        assert outcome.fate == "applied"

    before(one, "_drop", straggle)
    await one.roll_back()
    assert await world.indices() == [old]
    assert (await world.dump())["d1"][0] == version
