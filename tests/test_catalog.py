"""Collections on a real node: made once however many want to, checked, remembered, deleted."""

import asyncio
import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app import catalog, names
from app.catalog import Catalog, WriteTarget
from app.collection import CollectionOptions
from app.elastic import BulkAction, Cluster
from app.errors import ClusterUnavailable, Conflict, InvalidRequest, NotFound, SchemaMismatch
from tests.nodes import written

NODE = pytest.mark.node
PLAIN = CollectionOptions()


def now() -> datetime:
    return datetime.now(UTC)


async def make(
    cluster: Cluster,
    name: str,
    options: CollectionOptions = PLAIN,
    *,
    dims: int = 3,
    model: str | None = "e5",
):
    return await catalog.create(cluster, name, options, dims=dims, model=model, moment=now())


@pytest.fixture
async def templates(cluster: Cluster):
    """The templates as shipped, whatever an earlier test left."""
    await remove_templates(cluster)
    await catalog.install_templates(cluster, dims=384)


async def remove_templates(cluster: Cluster) -> None:
    await cluster.delete_templates(
        index_templates=[catalog.INDEX_TEMPLATE], component_templates=catalog.COMPONENTS
    )


# --- templates


@NODE
async def test_templates_are_installed_once(cluster):
    await remove_templates(cluster)
    assert await catalog.install_templates(cluster, dims=384) == [*catalog.COMPONENTS, catalog.INDEX_TEMPLATE]
    assert await catalog.install_templates(cluster, dims=384) == []


@NODE
async def test_templates_follow_the_configured_dims(cluster, templates):
    assert await catalog.install_templates(cluster, dims=768) == [catalog.MAPPINGS]
    body = await cluster.get_component_template(catalog.MAPPINGS)
    assert body["template"]["mappings"]["properties"]["chunks"]["properties"]["embedding"]["dims"] == 768
    assert await catalog.install_templates(cluster, dims=384) == [catalog.MAPPINGS]


@NODE
@pytest.mark.parametrize("name", [*catalog.COMPONENTS, catalog.INDEX_TEMPLATE])
async def test_an_older_template_is_upgraded_and_a_newer_one_left_alone(cluster, templates, name):
    put = cluster.put_index_template if name == catalog.INDEX_TEMPLATE else cluster.put_component_template
    read = cluster.get_index_template if name == catalog.INDEX_TEMPLATE else cluster.get_component_template
    await put(name, {**catalog.shipped(name), "version": 0})
    assert await catalog.install_templates(cluster, dims=384) == [name]
    await put(name, {**catalog.shipped(name), "version": 99})
    with pytest.raises(SchemaMismatch, match="version 99") as caught:
        await catalog.install_templates(cluster, dims=384)
    assert "newer Halflife" in (caught.value.remedy or "")
    assert (await read(name))["version"] == 99
    await remove_templates(cluster)


@NODE
async def test_an_operators_component_outranks_ours_and_survives(cluster, templates, unique):
    await cluster.put_component_template(
        "halflife@custom", {"template": {"settings": {"index": {"refresh_interval": "7s"}}}}
    )
    try:
        await catalog.install_templates(cluster, dims=384)
        made = await make(cluster, unique())
        assert (await cluster.get_settings(made.index))[made.index]["index.refresh_interval"] == "7s"
    finally:
        await remove_templates(cluster)
        await cluster.delete_templates(component_templates=["halflife@custom"])


@NODE
async def test_verify_sees_a_template_that_shadows_ours(cluster, templates):
    assert isinstance(await catalog.verify(cluster, dims=384), list)
    await cluster.put_index_template(
        "test_shadow", {"index_patterns": ["halflife-verify*"], "priority": 9999, "template": {}}
    )
    try:
        with pytest.raises(SchemaMismatch) as caught:
            await catalog.verify(cluster, dims=384)
    finally:
        await cluster.delete_templates(index_templates=["test_shadow"])
    assert "shadow" in (caught.value.remedy or "")


@NODE
async def test_a_template_of_the_same_priority_is_named(cluster):
    await remove_templates(cluster)
    await cluster.put_index_template("test_rival", {"index_patterns": ["halflife-*"], "priority": 500})
    try:
        with pytest.raises(SchemaMismatch) as caught:
            await catalog.install_templates(cluster, dims=384)
    finally:
        await cluster.delete_templates(index_templates=["test_rival"])
    assert "test_rival" in caught.value.detail
    assert "priority" in (caught.value.remedy or "")


# --- making one


@NODE
async def test_a_collection_is_what_its_options_say(cluster, templates, unique):
    name = unique()
    options = CollectionOptions(
        dims=8, similarity="dot_product", declared={"pages": "long", "due": "date"}, shards=2, replicas=0
    )
    made = await make(cluster, name, options, dims=384)
    assert made.model_dump(exclude={"index"}) == {
        "name": name, "dims": 8, "similarity": "dot_product", "declared": {"due": "date", "pages": "long"},
        "model": None, "template_version": catalog.shipped(catalog.MAPPINGS)["version"],
        "profiles": {}, "default_profile": None, "experiment": None, "revision": 0, "uid": made.index,
    }  # fmt: skip
    settings = (await cluster.get_settings(made.index))[made.index]
    assert (settings["index.number_of_shards"], settings["index.number_of_replicas"]) == ("2", "0")
    assert settings["index.auto_expand_replicas"] == "false"
    known = await catalog.get(cluster, name)
    assert known.collection == made
    assert known.target is not None
    assert known.target == WriteTarget(
        names.write_alias(name, known.target.generation), made.index, known.target.generation, "a"
    )
    assert await cluster.resolve_aliases(names.read_alias(name)) == {
        names.read_alias(name): {made.index: {"filter": catalog.TOMBSTONES_HIDDEN, "is_write_index": True}}
    }


@NODE
async def test_making_it_again_returns_it_and_other_options_conflict(cluster, templates, unique):
    name = unique()
    options = CollectionOptions(declared={"pages": "long"})
    made = await make(cluster, name, options)
    assert await make(cluster, name, options) == made
    assert await make(cluster, name) == made
    for other, field in (
        (CollectionOptions(dims=4), "dims"),
        (CollectionOptions(similarity="l2_norm"), "similarity"),
        (CollectionOptions(declared={"pages": "date"}), "declared"),
    ):
        with pytest.raises(Conflict) as caught:
            await make(cluster, name, other)
        assert caught.value.field == field
        assert "reindex" in (caught.value.remedy or "")
    assert len(await cluster.resolve_index(names.index_pattern(name))) == 1


@NODE
@pytest.mark.slow
async def test_startup_of_many_services_on_an_empty_cluster_makes_one_index(node_url, unique):
    services = [Cluster.connect(urls=[node_url], request_timeout_s=60) for _ in range(2)]

    async def start(cluster: Cluster, name: str, moment: datetime) -> str:
        await catalog.install_templates(cluster, dims=3)
        return (await catalog.create(cluster, name, PLAIN, dims=3, model="e5", moment=moment)).index

    try:
        for round_ in range(20):
            name = unique()
            if round_ % 4 == 0:
                await remove_templates(services[0])
            # The moments differ, so the index names do: only the alias can keep them to one.
            moments = [now() + timedelta(milliseconds=number) for number in range(2)]
            made = await asyncio.gather(
                *(start(cluster, name, moment) for cluster, moment in zip(services, moments, strict=True))
            )
            assert made[0] == made[1]
            assert list(await services[0].resolve_index(names.index_pattern(name))) == [made[0]]
    finally:
        for cluster in services:
            await cluster.close()


@NODE
async def test_startup_twenty_creators_at_once(cluster, templates, unique):
    name = unique()
    moments = [now() + timedelta(milliseconds=number) for number in range(20)]
    made = await asyncio.gather(
        *(catalog.create(cluster, name, PLAIN, dims=3, model=None, moment=moment) for moment in moments)
    )
    assert len({collection.index for collection in made}) == 1
    assert len(await cluster.resolve_index(names.index_pattern(name))) == 1


@NODE
async def test_startup_a_sleeping_creator_cannot_make_a_second_index_after_a_swap(cluster, templates, unique):
    name = unique()
    first = await make(cluster, name)
    second = names.index_name(name, now() + timedelta(seconds=1))
    await cluster.create_index(
        second,
        catalog.index_body(name, PLAIN, dims=3, model=None, slot_aliases={names.write_alias(name, 2): {}}),
    )
    read = names.read_alias(name)
    swap = [
        {"remove": {"index": first.index, "alias": read}},
        {"add": {"index": second, "alias": read, **catalog.read_alias_properties()}},
    ]
    await cluster.update_aliases(swap)
    await cluster.delete_indices([first.index])
    # The creator that slept through all of that sends what it meant to send.
    late = await catalog.create(cluster, name, PLAIN, dims=3, model=None, moment=now())
    assert late.index == second
    assert list(await cluster.resolve_index(names.index_pattern(name))) == [second]


@NODE
async def test_startup_first_upsert_without_templates_still_makes_the_proper_index(cluster, unique):
    await remove_templates(cluster)
    name = unique()
    known = await Catalog(cluster).ensure(name, PLAIN, dims=8, model=None, moment=now())
    target = known.target
    assert target is not None
    [outcome] = await cluster.bulk(
        [
            BulkAction(
                target.alias,
                "1",
                1,
                {
                    "document_id": "1",
                    "text": "x",
                    "chunks": [{"embedding": [1.0] * 8}],
                    "creation_time": "2026-01-01",
                },
            )
        ],
        timeout_s=20,
    )
    assert outcome.fate == "applied"
    mapping = (await cluster.get_mapping(known.collection.index))[known.collection.index]
    assert mapping["properties"]["chunks"]["properties"]["embedding"]["type"] == "dense_vector"


@NODE
async def test_startup_search_right_after_creation_finds_nothing_and_fails_not(cluster, templates, unique):
    name = unique()
    await make(cluster, name)
    answer = await cluster.search(names.read_alias(name), {"query": {"match_all": {}}}, timeout_s=20)
    assert (answer["hits"]["total"]["value"], answer["_shards"]["failed"]) == (0, 0)


@NODE
async def test_an_index_that_has_the_alias_name(cluster, templates, unique):
    name = unique()
    await cluster.create_index(names.read_alias(name), {})
    for attempt in (catalog.get(cluster, name), make(cluster, name)):
        with pytest.raises(SchemaMismatch) as caught:
            await attempt
        assert names.read_alias(name) in caught.value.detail
        assert "delete it" in (caught.value.remedy or "")


async def test_creation_without_a_cluster_says_so():
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"])
    try:
        with pytest.raises(ClusterUnavailable):
            await make(cluster, "x")
    finally:
        await cluster.close()


# --- what does not fit


def good_mapping() -> dict:
    """Return the mapping that a new collection has, as the files say it."""
    mapping = copy.deepcopy(catalog.shipped(catalog.MAPPINGS)["template"]["mappings"])
    mapping["_meta"]["halflife"] |= {
        "collection": "x",
        "dims": 384,
        "similarity": "cosine",
        "model": "e5",
        "declared": {},
    }
    return mapping


def without(*path: str):
    def change(mapping: dict) -> None:
        node = mapping
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return change


def replaced(value, *path: str):
    def change(mapping: dict) -> None:
        node = mapping
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return change


MISMATCHES = {
    "not ours": (without("_meta"), None, "not made by Halflife"),
    "newer": (replaced(99, "_meta", "halflife", "template_version"), None, "newer Halflife"),
    "open mapping": (replaced("true", "dynamic"), "dynamic", "not 'strict'"),
    "open chunks": (replaced("true", "properties", "chunks", "dynamic"), "chunks", "dynamic"),
    "no creation time": (without("properties", "creation_time"), "creation_time", "missing"),
    "creation time as text": (replaced({"type": "text"}, "properties", "creation_time"), "creation_time", "'text', not 'date'"),
    "no tombstones": (without("properties", "deleted"), "deleted", "missing"),
    "no chunk vectors": (without("properties", "chunks", "properties", "embedding"), "chunks.embedding", "missing"),
    "vectors as floats": (replaced({"type": "float"}, "properties", "chunks", "properties", "embedding"), "chunks.embedding", "dense_vector"),
    "vectors not indexed": (replaced(False, "properties", "chunks", "properties", "embedding", "index"), "chunks.embedding", "not indexed"),
    "other dims than told": (replaced(8, "properties", "chunks", "properties", "embedding", "dims"), "chunks.embedding", "8 dims"),
    "no stemming": (without("properties", "text", "fields", "english"), "text.english", "missing"),
    "another analyzer": (replaced("standard", "properties", "text", "analyzer"), "text", "halflife_text"),
    "declared not mapped": (replaced({"pages": "long"}, "_meta", "halflife", "declared"), "declared.pages", "not mapped"),
}  # fmt: skip


def test_a_good_mapping_passes():
    collection = catalog.read_collection("x", "halflife-x-20260101000000000", good_mapping())
    assert (collection.dims, collection.model, collection.similarity) == (384, "e5", "cosine")


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mapping_that_does_not_fit_is_refused_with_field_and_remedy(case):
    change, field, words = MISMATCHES[case]
    mapping = good_mapping()
    change(mapping)
    with pytest.raises(SchemaMismatch) as caught:
        catalog.read_collection("x", "halflife-x-20260101000000000", mapping)
    assert caught.value.field == field
    assert words in caught.value.detail
    assert caught.value.remedy


@NODE
async def test_startup_stops_at_an_index_made_by_hand(cluster, templates, unique):
    name = unique()
    index = names.index_name(name, now())
    # The right aliases over a mapping that only looks right.
    body = catalog.index_body(
        name, PLAIN, dims=384, model="e5", slot_aliases=catalog.first_aliases(name, now())
    )
    await cluster.put_index_template(
        "test_hand", {"index_patterns": [f"{index}*"], "priority": 9999, "template": {}}
    )
    try:
        await cluster.create_index(index, body)
        with pytest.raises(SchemaMismatch, match=index):
            await catalog.verify(cluster, dims=384, model="e5")
    finally:
        await cluster.delete_templates(index_templates=["test_hand"])
        await cluster.delete_indices([index])


@NODE
async def test_startup_stops_when_the_model_has_other_dims(cluster, templates, unique):
    name = unique()
    made = await make(cluster, name, dims=3, model="e5-unique")
    assert made in await catalog.verify(cluster, dims=3, model="e5-unique")
    with pytest.raises(SchemaMismatch, match="3 dims, the embedder makes 384") as caught:
        await catalog.verify(cluster, dims=384, model="e5-unique")
    assert "reindex" in (caught.value.remedy or "")
    # A collection whose vectors another model made, or its callers, is not this embedder's business.
    assert made in await catalog.verify(cluster, dims=384, model="another")


def test_vectors_of_another_model_with_the_same_dims_are_a_warning():
    collection = catalog.read_collection("x", "halflife-x-20260101000000000", good_mapping())
    assert catalog.check_compatible(collection, dims=384, model="e5") is None
    assert "e5" in (catalog.check_compatible(collection, dims=384, model="bge") or "")


@NODE
async def test_a_read_alias_without_its_filter_or_over_two_indices_is_refused(cluster, templates, unique):
    name = unique()
    made = await make(cluster, name)
    read = names.read_alias(name)
    await cluster.update_aliases([{"add": {"index": made.index, "alias": read, "is_write_index": True}}])
    with pytest.raises(SchemaMismatch, match="no filter"):
        await catalog.get(cluster, name)
    other = names.index_name(name, now())
    await cluster.create_index(other, {"aliases": {read: {"filter": catalog.TOMBSTONES_HIDDEN}}})
    with pytest.raises(SchemaMismatch, match="2 indices"):
        await catalog.get(cluster, name)


@NODE
async def test_the_target_is_that_of_the_newest_generation(cluster, templates, unique):
    name = unique()
    made = await make(cluster, name)
    second = names.index_name(name, now())
    first = await written(cluster, name)
    newest = first.generation + 1
    aliases: dict[str, dict] = {names.write_alias(name, newest, "b"): {}}
    await cluster.create_index(
        second, catalog.index_body(name, PLAIN, dims=3, model=None, slot_aliases=aliases)
    )
    await cluster.update_aliases([{"add": {"index": made.index, "alias": names.write_alias(name, newest)}}])
    assert await written(cluster, name) == WriteTarget(
        names.write_alias(name, newest), made.index, newest, "a"
    )
    gone = [
        (made.index, first.alias),
        (made.index, names.write_alias(name, newest)),
        (second, names.write_alias(name, newest, "b")),
    ]
    await cluster.update_aliases([{"remove": {"index": index, "alias": alias}} for index, alias in gone])
    with pytest.raises(SchemaMismatch, match="no write alias"):
        await catalog.get(cluster, name)


# --- list and delete


@NODE
async def test_a_collection_is_listed_and_deleted_with_all_it_has_and_nothing_else(
    cluster, templates, unique
):
    name = unique()
    longer = unique(f"{name}-old")
    made, other = await make(cluster, name), await make(cluster, longer)
    spare = names.index_name(name, now() + timedelta(seconds=1))
    await cluster.create_index(spare, {"aliases": {names.write_alias(name, 7): {}}})
    listed = await catalog.list_collections(cluster)
    assert [collection for collection in listed if collection.name in (name, longer)] == sorted(
        [made, other], key=lambda c: c.name
    )
    assert await catalog.delete(cluster, name) == sorted([made.index, spare])
    with pytest.raises(NotFound):
        await catalog.get(cluster, name)
    with pytest.raises(NotFound):
        await catalog.delete(cluster, name)
    assert (await catalog.get(cluster, longer)).collection == other


# --- memory


@NODE
async def test_the_catalog_remembers_for_a_while(cluster, templates, unique):
    time = [100.0]
    remembered = Catalog(cluster, ttl_s=5, clock=lambda: time[0])
    name = unique()
    with pytest.raises(NotFound):
        await remembered.get(name)
    known = await remembered.ensure(name, PLAIN, dims=3, model=None, moment=now())
    assert await remembered.get(name) is known
    await catalog.delete(cluster, name)
    time[0] = 104.9
    assert await remembered.get(name) is known
    with pytest.raises(NotFound):
        await remembered.get(name, fresh=True)
    with pytest.raises(NotFound):
        await remembered.get(name)
    again = await remembered.ensure(name, PLAIN, dims=3, model=None, moment=now())
    time[0] = 111
    assert (await remembered.get(name)) == again
    assert await remembered.delete(name) == [again.collection.index]
    with pytest.raises(NotFound):
        await remembered.get(name)


@NODE
async def test_those_who_ask_at_once_share_one_look(cluster, templates, unique):
    name = unique()
    await make(cluster, name)
    remembered = Catalog(cluster)
    answers = await asyncio.gather(*(remembered.get(name) for _ in range(10)))
    assert all(answer is answers[0] for answer in answers)
    fresh = await asyncio.gather(*(remembered.get(name, fresh=True) for _ in range(10)))
    assert fresh[0] is not answers[0]
    assert fresh[0] == answers[0]


@NODE
async def test_names_that_callers_make_up_leave_nothing_behind(cluster, unique):
    remembered = Catalog(cluster)
    for name in [unique() for _ in range(3)]:
        with pytest.raises(NotFound):
            await remembered.get(name)
    assert remembered._locks == {}


async def test_ranking_profiles_change_in_place(cluster: Cluster, unique):
    name = unique("profiles")
    made = await catalog.create(
        cluster, name, CollectionOptions(declared={"n": "long"}), dims=8, model="e5", moment=now()
    )
    assert made.default_profile is None
    options = CollectionOptions.model_validate(
        {"profiles": {"current": {"decay": {"half_life": "90d"}}}, "default_profile": "current"}
    )
    for _ in range(2):
        changed = await catalog.create(cluster, name, options, dims=8, model="e5", moment=now())
        assert (changed.index, changed.default_profile, changed.declared) == (
            made.index,
            "current",
            {"n": "long"},
        )
    stored = (await catalog.get(cluster, name)).collection
    assert stored.profiles == options.profiles
    # Options that leave profiles out leave them as they are.
    await catalog.create(cluster, name, CollectionOptions(), dims=8, model="e5", moment=now())
    assert (await catalog.get(cluster, name)).collection.default_profile == "current"


IN_PLACE = {
    "replicas": ({"replicas": 0}, {"number_of_replicas": "0", "auto_expand_replicas": "false"}),
    "replicas as the cluster has nodes": ({"replicas": None}, {"auto_expand_replicas": "0-1"}),
    "refresh interval": ({"refresh_interval": "30s"}, {"refresh_interval": "30s"}),
}


@NODE
@pytest.mark.parametrize("options, settings", IN_PLACE.values(), ids=IN_PLACE.keys())
async def test_settings_change_in_place(cluster, templates, unique, options, settings):
    name = unique()
    made = await make(cluster, name)
    changed = await make(cluster, name, CollectionOptions.model_validate(options))
    assert changed == made
    found = (await cluster.get_settings(made.index))[made.index]
    assert {key: found[f"index.{key}"] for key in settings} == settings
    # What is left out stays.
    await make(cluster, name, CollectionOptions())
    assert (await cluster.get_settings(made.index))[made.index] == found


NEEDS_REINDEX = {
    "dims": ({"dims": 4}, "dims", "halflife reindex {} --reembed"),
    "similarity": ({"similarity": "l2_norm"}, "similarity", "halflife reindex {} --similarity l2_norm"),
    "shards": ({"shards": 3}, "shards", "halflife reindex {} --shards 3"),
    "the type of a key": (
        {"declared": {"pages": "date", "due": "date"}},
        "declared",
        "halflife reindex {} --declare pages=date",
    ),
}


@NODE
@pytest.mark.parametrize("options, field, command", NEEDS_REINDEX.values(), ids=NEEDS_REINDEX.keys())
async def test_what_needs_another_index_says_by_which_command_and_changes_nothing(
    cluster, templates, unique, options, field, command
):
    name = unique()
    made = await make(cluster, name, CollectionOptions(declared={"pages": "long"}))
    before = await cluster.get_settings(made.index)
    asked = CollectionOptions.model_validate({"replicas": 0, "refresh_interval": "9s", **options})
    with pytest.raises(Conflict) as caught:
        await make(cluster, name, asked)
    assert caught.value.field == field
    assert caught.value.members["command"] == command.format(name)
    assert command.format(name) in (caught.value.remedy or "")
    assert await cluster.get_settings(made.index) == before
    assert (await catalog.get(cluster, name)).collection == made


@NODE
@pytest.mark.usefixtures("patient_fences")
async def test_a_key_that_no_document_has_is_declared_in_place_and_one_that_some_have_is_not(
    cluster, templates, unique
):
    name = unique()
    made = await make(cluster, name, CollectionOptions(declared={"pages": "long"}))
    document = {
        "document_id": "a",
        "metadata": {"price": 5, "z": 1},
        "indexed_at": "2026-01-01T00:00:00.000Z",
    }
    action = BulkAction((await written(cluster, name)).alias, "a", 1, document)
    [outcome] = await cluster.bulk([action], timeout_s=10)
    assert outcome.fate == "applied"
    wider = CollectionOptions(declared={"pages": "long", "due": "date"})
    # A key that is left out stays.
    changed = await make(cluster, name, CollectionOptions(declared={"due": "date"}))
    assert await make(cluster, name, CollectionOptions(declared={})) == changed
    many = {f"k{at}": "long" for at in range(199)}
    with pytest.raises(InvalidRequest, match="at most 200"):
        await make(cluster, name, CollectionOptions.model_validate({"declared": many}))
    assert changed.declared == {"pages": "long", "due": "date"}
    assert changed.index == made.index
    mapping = (await cluster.get_mapping(made.index))[made.index]
    assert mapping["properties"]["declared"]["properties"]["due"]["type"] == "date"
    with pytest.raises(Conflict, match="1 documents") as caught:
        await make(cluster, name, CollectionOptions(declared={**wider.declared, "price": "double"}))
    assert f"halflife reindex {name} --declare price=double" in (caught.value.remedy or "")
    assert (await catalog.get(cluster, name)).collection == changed


@NODE
async def test_a_default_profile_must_be_one_of_the_stored_ones(cluster, templates, unique):
    name = unique()
    lone = CollectionOptions.model_validate({"default_profile": "news"})
    with pytest.raises(InvalidRequest, match="not among"):
        await make(cluster, name, lone)
    assert await cluster.resolve_index(names.index_pattern(name)) == {}
    profiles = {"profiles": {"news": {"decay": {"half_life": "7d"}}}}
    await make(cluster, name, CollectionOptions.model_validate(profiles))
    assert (await make(cluster, name, lone)).default_profile == "news"
    with pytest.raises(InvalidRequest, match="not among"):
        await make(cluster, name, CollectionOptions.model_validate({"profiles": {}}))


@NODE
async def test_a_collection_tells_what_it_holds(cluster, templates, unique):
    name = unique()
    made = await make(cluster, name, CollectionOptions(shards=2))
    at = "2026-01-01T00:00:00.000Z"
    sources: list[dict[str, Any]] = [
        {"creation_time": "2020-01-02T00:00:00.000Z", "chunks": [{"text": "a", "start": 0, "end": 1}] * 2},
        {"creation_time": "2024-01-02T00:00:00.000Z", "evergreen": True},
        {"chunks": [{"text": "a", "start": 0, "end": 1}]},
        {"deleted": True},
    ]
    alias = (await written(cluster, name)).alias
    actions = [
        BulkAction(alias, str(n), 1, {"document_id": str(n), "indexed_at": at, **source})
        for n, source in enumerate(sources)
    ]
    await cluster.bulk(actions, refresh="true", timeout_s=10)
    found = await catalog.describe(cluster, made)
    assert (found.documents, found.deleted, found.chunks) == (3, 1, 3)
    assert found.ages.model_dump(mode="json") == {
        "oldest": "2020-01-02T00:00:00.000Z",
        "newest": "2024-01-02T00:00:00.000Z",
        "undated": 1,
        "evergreen": 1,
    }
    assert (found.shards, found.refresh_interval, found.name) == (2, "1s", name)
    assert found.size_bytes
    fenced = await catalog.describe(cluster, made, within=[{"term": {"evergreen": True}}])
    assert (fenced.documents, fenced.deleted, fenced.size_bytes, fenced.ages.undated) == (1, None, None, 0)
