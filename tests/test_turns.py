"""Turns at changing what a collection's mapping says: on a real node, by writers that know nothing of each other."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import pytest

from app import catalog, names, turns
from app.collection import Collection, CollectionOptions, SynonymRule
from app.elastic import Cluster
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound
from tests.fakes import FarEnd, Reply
from tests.nodes import written

pytestmark = [pytest.mark.node, pytest.mark.usefixtures("patient_fences")]


@pytest.fixture
async def other(node_url: str) -> AsyncIterator[Cluster]:
    """A second service's connection."""
    made = Cluster.connect(urls=[node_url], request_timeout_s=60)
    yield made
    await made.close()


@pytest.fixture
async def collection(cluster: Cluster) -> AsyncIterator[Collection]:
    await catalog.install_templates(cluster, dims=3)
    name = f"turns_{uuid.uuid4().hex[:10]}"
    yield await make(cluster, name)
    await catalog.delete(cluster, name)


async def make(cluster: Cluster, name: str) -> Collection:
    options = CollectionOptions(replicas=0)
    return await catalog.create(cluster, name, options, dims=3, model="m", moment=datetime.now(UTC))


def options(**given) -> CollectionOptions:
    return CollectionOptions.model_validate(given)


async def test_of_several_writers_none_undoes_anothers_change(cluster, other, collection):
    rules = [SynonymRule(synonyms="car, automobile")]
    profiles = {"recent": {"decay": {"half_life": "30d"}}}
    await asyncio.gather(
        catalog.put_synonyms(cluster, collection, rules),
        catalog.change(other, collection, options(profiles=profiles), dims=3),
        *(
            catalog.change(at, collection, options(declared={key: "long"}), dims=3)
            for at, key in ((cluster, "a"), (other, "b"), (cluster, "c"), (other, "d"))
        ),
    )
    found = (await catalog.get(cluster, collection.name)).collection
    assert found.synonyms == rules
    assert list(found.profiles) == ["recent"]
    assert found.declared == dict.fromkeys("abcd", "long")
    assert found.revision == 6
    # What changes nothing is no revision.
    await catalog.put_synonyms(other, collection, rules)
    assert (await catalog.get(cluster, collection.name)).collection.revision == 6


async def test_a_key_declared_twice_at_once_has_one_type(cluster, other, collection):
    told = await asyncio.gather(
        catalog.change(cluster, collection, options(declared={"n": "long"}), dims=3),
        catalog.change(other, collection, options(declared={"n": "date"}), dims=3),
        return_exceptions=True,
    )
    assert sorted(type(each).__name__ for each in told) == ["Collection", "Conflict"]


async def test_a_change_can_be_made_to_one_revision_only(cluster, other, collection):
    first = await catalog.put_synonyms(
        cluster, collection, [SynonymRule(synonyms="a, b")], if_revision=collection.revision
    )
    assert first.revision == 1
    with pytest.raises(Conflict, match="revision 1, not 0") as told:
        await catalog.put_synonyms(other, collection, [], if_revision=0)
    assert (told.value.field, told.value.members["revision"]) == ("if_revision", 1)
    with pytest.raises(Conflict):
        await make_again(other, collection, options(refresh_interval="7s", profiles={}, if_revision=0))
    settings = (await cluster.get_settings(collection.index))[collection.index]
    assert settings.get("index.refresh_interval") != "7s"
    done = await make_again(other, collection, options(refresh_interval="7s", if_revision=1))
    assert done.synonyms == first.synonyms
    with pytest.raises(NotFound):
        await catalog.create(
            cluster,
            f"{collection.name}x",
            options(if_revision=0),
            dims=3,
            model="m",
            moment=datetime.now(UTC),
        )


async def make_again(cluster: Cluster, collection: Collection, wanted: CollectionOptions) -> Collection:
    return await catalog.create(cluster, collection.name, wanted, dims=3, model="m", moment=datetime.now(UTC))


async def test_a_profile_taken_away_meanwhile_is_no_default(cluster, other, collection):
    before = await catalog.change(
        cluster, collection, options(profiles={"recent": {"decay": {"half_life": "30d"}}}), dims=3
    )
    await catalog.change(other, before, options(profiles={}), dims=3)
    with pytest.raises(InvalidRequest, match="not among"):
        await catalog.change(cluster, before, options(default_profile="recent"), dims=3)


async def test_a_turn_is_one_and_that_of_a_killed_holder_ends(cluster, other, collection):
    name = collection.name
    async with turns.turn(cluster, name):
        with pytest.raises(ClusterUnavailable, match="others are changing it"):
            async with turns.turn(other, name, wait_s=0.3):
                pass
        # Seen without a move for long enough, as that of a process that was killed.
        async with turns.turn(other, name, left_after_s=0.3):
            pass
        async with turns.turn(other, name):
            # Who comes back late ends nobody's turn but its own.
            pass
    async with turns.turn(cluster, name, wait_s=0.3):
        pass


async def test_the_end_of_a_turn_taken_over_ends_no_other(cluster, other, collection):
    late = turns.turn(cluster, collection.name)
    await late.__aenter__()
    async with turns.turn(other, collection.name, left_after_s=0.3):
        await late.__aexit__(None, None, None)
        with pytest.raises(ClusterUnavailable, match="others are changing it"):
            async with turns.turn(cluster, collection.name, wait_s=0.3):
                pass


async def test_a_turn_begins_when_it_is_had_and_not_with_a_try_that_lost(
    cluster, other, collection, monkeypatch
):
    write = turns._write
    looked, go_on, lost = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(at, name, holder, place):
        if at is not other or looked.is_set():
            return await write(at, name, holder, place)
        looked.set()
        await go_on.wait()
        try:
            return await write(at, name, holder, place)
        except Conflict:
            lost.set()
            raise

    async def wait() -> float:
        async with turns.turn(other, collection.name) as turn:
            return turn._began

    monkeypatch.setattr(turns, "_write", late)
    waiting = asyncio.create_task(wait())
    await looked.wait()
    async with turns.turn(cluster, collection.name):
        go_on.set()
        await lost.wait()
        over = asyncio.get_running_loop().time()
    assert await waiting >= over


@pytest.mark.parametrize("arrived", [True, False], ids=["arrived", "on its way"])
@pytest.mark.parametrize("how", ["cancelled", "unanswered"])
async def test_a_try_that_nobody_waits_for_any_more_keeps_nobody_out(
    cluster, other, collection, monkeypatch, arrived, how
):
    write = turns._write
    trying = asyncio.Event()
    held_back: list[asyncio.Task[turns.Place]] = []

    async def hang(at, name, holder, place):
        if at is not other or holder is None:
            return await write(at, name, holder, place)
        if arrived:
            await write(at, name, holder, place)
        else:
            held_back.append(asyncio.create_task(arrive(at, name, holder, place)))
        trying.set()
        if how == "unanswered":
            raise ClusterUnavailable("no answer")
        return await asyncio.Event().wait()

    late = asyncio.Event()

    async def arrive(*args):
        await late.wait()
        return await write(*args)

    async def have() -> None:
        async with turns.turn(other, collection.name, wait_s=-1 if how == "unanswered" else 60):
            pass

    monkeypatch.setattr(turns, "_write", hang)
    waiting = asyncio.create_task(have())
    await trying.wait()
    if how == "cancelled":
        waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    late.set()
    for told in await asyncio.gather(*held_back, return_exceptions=True):
        assert isinstance(told, Conflict)
    assert (await turns._look(cluster, collection.name))[1] is None
    async with turns.turn(cluster, collection.name, wait_s=0):
        pass


async def test_who_left_a_race_that_another_won_ends_no_turn_of_the_winner(
    cluster, other, collection, monkeypatch
):
    write = turns._write
    looked, go_on = asyncio.Event(), asyncio.Event()

    async def late(at, name, holder, place):
        if at is other and holder is not None:
            looked.set()
            await go_on.wait()
        return await write(at, name, holder, place)

    async def have() -> None:
        async with turns.turn(other, collection.name, wait_s=0):
            pass

    monkeypatch.setattr(turns, "_write", late)
    waiting = asyncio.create_task(have())
    await looked.wait()
    async with turns.turn(cluster, collection.name):
        go_on.set()
        with pytest.raises(ClusterUnavailable, match="others are changing it"):
            await waiting
        assert (await turns._look(cluster, collection.name))[1] is not None


async def test_the_note_of_a_turn_goes_with_the_collection(cluster):
    gone = await make(cluster, f"turns_{uuid.uuid4().hex[:10]}")
    await catalog.put_synonyms(cluster, gone, [SynonymRule(synonyms="a, b")])
    assert (await turns._look(cluster, gone.name))[0] is not None
    await catalog.delete(cluster, gone.name)
    assert await turns._look(cluster, gone.name) == (None, None)


async def test_settings_go_to_the_index_that_a_reindex_gave_and_before_the_revision(
    cluster, other, collection, monkeypatch
):
    moved = f"{collection.index}9"
    body = catalog.index_body(
        collection.name, CollectionOptions(replicas=0), dims=3, model="m", slot_aliases={}, uid=collection.uid
    )
    write = turns._write
    swapped = False

    async def after_the_swap(at, name, holder, place):
        """As a reindex does that had the turn before."""
        nonlocal swapped
        if holder is not None and not swapped:
            swapped = True
            await cluster.create_index(moved, body)
            actions = []
            write_alias = (await written(cluster, collection.name)).alias
            for alias, properties in (
                (names.read_alias(collection.name), catalog.read_alias_properties()),
                (write_alias, {}),
            ):
                actions += [
                    {"remove": {"index": collection.index, "alias": alias}},
                    {"add": {"index": moved, "alias": alias, **properties}},
                ]
            await cluster.update_aliases(actions)
        return await write(at, name, holder, place)

    monkeypatch.setattr(turns, "_write", after_the_swap)
    changes = options(refresh_interval="7s", profiles={"recent": {"decay": {"half_life": "30d"}}})
    changed = await catalog.change(cluster, collection, changes, dims=3)
    assert (changed.index, changed.revision) == (moved, 1)
    assert (await cluster.get_settings(moved))[moved]["index.refresh_interval"] == "7s"
    left = (await cluster.get_settings(collection.index))[collection.index]
    assert left.get("index.refresh_interval") != "7s"

    async def refuse(*args, **given):
        raise ClusterUnavailable("the cluster is busy")

    again = options(refresh_interval="8s", profiles={}, if_revision=1)
    with monkeypatch.context() as patch:
        patch.setattr(other, "put_settings", refuse)
        with pytest.raises(ClusterUnavailable):
            await catalog.change(other, changed, again, dims=3)
    done = await catalog.change(other, changed, again, dims=3)
    assert (done.revision, done.profiles) == (2, {})


async def test_a_change_whose_answer_is_lost_is_read_back_and_one_that_was_undone_is_told(
    cluster, other, collection, monkeypatch
):
    put_mapping = other.put_mapping

    async def lose(*args, **given):
        await put_mapping(*args, **given)
        raise ClusterUnavailable("no answer")

    monkeypatch.setattr(other, "put_mapping", lose)
    done = await catalog.put_synonyms(other, collection, [SynonymRule(synonyms="a, b")], if_revision=0)
    assert done.revision == 1

    async def undo(*args, **given):
        """As by a change of an earlier turn that a node passed on late."""
        before = (await cluster.get_mapping(done.index))[done.index]["_meta"]
        await put_mapping(*args, **given)
        await cluster.put_mapping(done.index, {"_meta": before})

    monkeypatch.setattr(other, "put_mapping", undo)
    with pytest.raises(ClusterUnavailable, match="another change undid it"):
        await catalog.put_synonyms(other, collection, [])


async def test_what_is_sent_late_in_a_turn_has_less_time_and_nothing_is_sent_too_late(monkeypatch):
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    for elapsed in (0.0, 10.0, turns.HELD_S - 2 * turns.LEAST_S - 0.5):
        call_s = turns.Turn("handbook", now - elapsed).call_s()
        # Its way into the cluster, and its wait for the master from then on.
        assert call_s >= turns.LEAST_S
        assert elapsed + 2 * call_s <= turns.HELD_S
    with pytest.raises(ClusterUnavailable, match="nothing was changed"):
        turns.Turn("handbook", now - turns.HELD_S + 2 * turns.LEAST_S - 0.1).call_s()
    assert turns.HELD_S < turns.LEFT_AFTER_S < turns.WAIT_S


async def test_the_bound_of_a_change_is_one_for_its_wait_for_a_connection_and_its_answer(forward):
    with FarEnd() as hanging:
        hanging.answer = lambda seen: Reply(hang=True)
        narrow = Cluster.connect(urls=[hanging.url], connections=1, pool_wait_s=1000)
        async with contextlib.AsyncExitStack() as place:
            await place.enter_async_context(narrow.guard.call(wait_s=1))
            asked = asyncio.create_task(narrow.put_mapping("halflife-x-1", {"_meta": {}}, timeout_s=1000))
            await eventually(lambda: narrow.guard.waiting == 1)
            forward(600)
        await eventually(lambda: len(hanging.requests) == 1)
        forward(600)
        try:
            async with asyncio.timeout(20):
                with pytest.raises(ClusterUnavailable, match="no answer within 1000 s"):
                    await asked
        finally:
            await narrow.close()


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")
