"""Turns at changing what a collection's mapping says: on a real node, by writers that know nothing of each other."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from app import catalog, turns
from app.elastic import Cluster
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound
from app.models import Collection, CollectionOptions, SynonymRule

pytestmark = pytest.mark.node


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


async def test_nothing_is_sent_late_in_a_turn():
    now = asyncio.get_running_loop().time()
    turns.Turn("handbook", now).check()
    with pytest.raises(ClusterUnavailable, match="nothing was changed"):
        turns.Turn("handbook", now - turns.HELD_S - 0.1).check()


def test_what_a_holder_may_still_have_under_way_is_over_when_others_take_over():
    assert turns.HELD_S + turns.CALL_S < turns.LEFT_AFTER_S < turns.WAIT_S
