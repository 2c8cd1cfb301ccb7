"""What is written out can be read again: profiles and other stored values, through every way in which they travel."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from app import catalog, transfer
from app.asking import Search
from app.collection import Collection, CollectionOptions, SynonymRule
from app.elastic import Cluster
from app.errors import ClusterUnavailable
from app.keys import Key, entry_of
from app.ranking import DecayStrength, Experiment, FeedbackOptions, Profile, ResolvedDecay, stored_profiles
from app.reindex import Changes
from app.writing import Document
from scripts import reindexing
from scripts.collecting import lean
from tests.fakes import EmbeddingServer
from tests.moving import DIMS, World, embedder_of, now, world_on
from tests.service import Running, serving, settings_for

# --- values ----------------------------------------------------------------------------------------------------------


def some(**options: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of the fields, each of which may be left out."""
    return st.fixed_dictionaries({}, optional=options)


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})


FRACTIONS = st.floats(0, 1)
DURATIONS = st.sampled_from(["1ms", "90m", "P1DT1H", "36h", "14d", "365d", "106751991168d"])
FILTERS = st.sampled_from([{"lang": "en"}, {"lang": None}, {"n": {"gte": 1.5}, "not": {"a b": [1, None]}}])
INSTANTS = st.sampled_from(["2026-01-31", "0001-01-01T00:00:00.001Z", 1_700_000_000, "2026-01-31T08:00:00.9999+08:00"])  # fmt: skip
FUSIONS = st.one_of(
    merged(
        st.sampled_from([{}, {"method": "adaptive"}, {"method": "linear"}, {"method": "additive"}, {"method": "rrf"}]),
        some(window=st.integers(1, 10_000)),
    ),
    some(rank_constant=st.floats(1, 1e6)),
    merged(st.just({"method": "rrf"}), some(rank_constant=st.floats(1, 1e6))),
    st.just({"method": "linear", "normalizer": "minmax"}),
    st.just({"method": "additive", "weights": {"relevance": 1, "recency": 0.5}}),
)  # fmt: skip
STRENGTHS = st.one_of(
    some(half_life=DURATIONS),
    merged(st.fixed_dictionaries({"scale": DURATIONS}), some(decay=st.floats(0.001, 0.999))),
    st.fixed_dictionaries({"kind": st.just("exp"), "hourly_loss": FRACTIONS}),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["exp", "linear"]),
            "rate": st.sampled_from([8e7, 1e-27, 0.1, "0.02/h", "3/s"]),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("gauss"), "half_life": DURATIONS}),
)
PARTS = some(
    offset=DURATIONS,
    field=st.sampled_from(["creation_time", "updated_at"]),
    floor=FRACTIONS,
    missing=FRACTIONS,
    future=st.sampled_from(["clamp", "symmetric"]),
)
DECAYS = merged(STRENGTHS.filter(lambda found: bool(set(found) - {"kind"})), PARTS)
ROUTE_DECAYS = st.one_of(st.just("off"), st.none(), merged(STRENGTHS, PARTS))
ROUTE_PARTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "text": {"title_boost": st.floats(0, 100)},
    "vector": {"num_candidates": st.integers(1, 10_000)},
    "fresh_text": {"window": DURATIONS, "title_boost": st.floats(0, 100)},
    "fresh_vector": {"window": DURATIONS, "field": st.just("updated_at")},
}
ROUTES = st.one_of(
    *(
        merged(
            st.just({"kind": kind}),
            some(weight=st.floats(0, 1000), decay=ROUTE_DECAYS, filter=FILTERS, query=st.just("a: b"), **own),
        )
        for kind, own in ROUTE_PARTS.items()
    )
)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "fusion": FUSIONS,
    "feedback": st.one_of(st.just("off"), some(strength=st.floats(0.001, 0.3), as_of=INSTANTS), st.none()),
    "min_relevance": FRACTIONS,
    "dedup": some(threshold=st.floats(0.001, 1), keep=st.just("newer")),
}
STAGES = st.one_of(
    some(rerank=some(top_n=st.integers(1, 50), min_score=st.floats(-9, 9), decay=st.booleans())),
    some(mmr=some(**{"lambda": FRACTIONS, "candidates": st.integers(1, 1000)})),
)
RANKINGS = st.one_of(
    merged(some(decay=DECAYS, **COMMON), STAGES),
    merged(
        some(
            decay=st.sampled_from(["auto", "off"]),
            fold_superseded=st.just(False),
            routes=st.lists(
                ROUTES.filter(lambda route: not isinstance(route.get("decay"), dict)), min_size=1, max_size=3
            ),
            **COMMON,
        ),
        STAGES,
    ),
    merged(some(routes=st.lists(ROUTES, min_size=1, max_size=3), **COMMON), STAGES),
)  # fmt: skip
PROFILES = st.dictionaries(st.sampled_from(["a", "b-c"]), RANKINGS, max_size=2)

VALUES: dict[type[BaseModel], st.SearchStrategy[dict[str, Any]]] = {
    Profile: RANKINGS,
    DecayStrength: merged(STRENGTHS, PARTS),
    ResolvedDecay: st.fixed_dictionaries(
        {"shape": st.sampled_from(["exp", "step", "none"]), "scale_ms": st.integers(1, 2**62)}
    ),
    FeedbackOptions: some(strength=st.floats(0.001, 0.3), as_of=INSTANTS),
    Experiment: st.sampled_from(
        [{"name": "e", "by": by, "arms": [{"profile": "a", "percent": 33.3}, {"profile": "a", "percent": 66.7, "name": "x"}]}
         for by in ("subject", "key", "request")]
    ),
    SynonymRule: merged(st.just({"synonyms": "a: b, c => d"}), some(id=st.just("k: 1"))),
    CollectionOptions: merged(
        some(dims=st.integers(1, 4096), declared=st.just({"n": "long"}), refresh_interval=st.just("30s")),
        st.fixed_dictionaries({"profiles": PROFILES}),
    ),
    Collection: merged(
        st.just({"name": "c", "index": "i", "dims": 3, "similarity": "cosine", "declared": {}, "template_version": 1}),
        st.fixed_dictionaries({"profiles": PROFILES, "unreadable": st.sampled_from([{}, {"experiment": "x: y"}])}),
    ),
    Document: merged(
        st.just({"id": "a: b", "text": "t", "metadata": {"a: b": [None, 1e22]}}),
        some(creation_time=INSTANTS, tags=st.just(["x"]), embedding=st.just([1, 0.5]), revision=st.integers(1, 2**62)),
    ),
    Key: merged(
        st.just({"id": "k", "hash": "0" * 64, "scopes": ["read"], "collections": ["team-*"]}),
        some(created=INSTANTS, filter=st.just({"lang": ["en", "de"]}), rate_per_s=st.just(0.5)),
    ),
    Search: merged(st.just({"collection": "c", "query": "a: b"}), RANKINGS.map(
        lambda found: {**found, "fusion": {**found.get("fusion", {}), "window": 10_000}})),
}  # fmt: skip


@pytest.mark.parametrize("model", VALUES, ids=lambda model: model.__name__)
@given(data=st.data())
def test_what_is_written_out_is_read_again_as_the_same(model: type[BaseModel], data: st.DataObject) -> None:
    value = model.model_validate(data.draw(VALUES[model]))
    ways: list[dict[str, Any]] = [{}, {"exclude_none": True}, {"exclude_unset": True}]
    for options in ways:
        told = value.model_dump(mode="json", by_alias=True, **options)
        assert model.model_validate(json.loads(json.dumps(told))) == value, told


def test_a_key_is_listed_as_it_is_read() -> None:
    key = Key.model_validate(
        {"id": "k", "hash": "0" * 64, "scopes": ["read"], "collections": ["*"], "filter": {"lang": "en"}}
    )
    assert Key.model_validate(entry_of(key)) == key


def test_profiles_of_an_earlier_release_are_read() -> None:
    told = {
        "linear": {"fusion": {"method": "linear", "rank_constant": 60.0}},
        "default": {"fusion": {"method": "adaptive", "rank_constant": 60.0, "window": 50}},
        "rrf": {"fusion": {"method": "rrf", "rank_constant": 20.0}},
        "by its part": {"fusion": {"rank_constant": 20.0}},
        "none": {"decay": "off"},
        "damaged": 7,
    }
    found = stored_profiles(told)
    assert found["damaged"] == 7
    del found["damaged"]
    read = {name: Profile.model_validate(profile).fusion for name, profile in found.items()}
    assert {name: fusion and (fusion.method, fusion.rank_constant) for name, fusion in read.items()} == {
        "linear": ("linear", 60), "default": ("adaptive", 60), "rrf": ("rrf", 20), "by its part": ("rrf", 20), "none": None,
    }  # fmt: skip


# --- on their way ----------------------------------------------------------------------------------------------------

PROFILED: dict[str, dict[str, Any]] = {
    "adaptive": {"fusion": {"method": "adaptive"}},
    "window": {"fusion": {"window": 50}},
    "rrf": {"fusion": {"method": "rrf"}},
    "constant": {"fusion": {"rank_constant": 20}},
    "linear": {"fusion": {"method": "linear", "normalizer": "minmax"}},
    "additive": {"fusion": {"method": "additive", "weights": {"recency": 2}}, "decay": {"hourly_loss": 0.01}},
    "rerank": {"rerank": {"candidates": 20}, "dedup": {}},
    "mmr": {"mmr": {"lambda": 0.7}, "feedback": "off", "fold_superseded": True},
    "gauss": {"decay": {"kind": "gauss", "scale": "30d", "decay": 0.4}},
    "hourly": {"decay": {"hourly_loss": 0.01, "floor": 0}},
    "rate": {"decay": {"kind": "linear", "rate": "0.02/h", "placement": "fused"}},
    "routes": {"routes": [{"kind": "fresh_text", "window": "7d"}, {"kind": "vector", "decay": "off"}], "decay": "auto"},
}  # fmt: skip


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def service(node_url: str, embedding: EmbeddingServer) -> Iterator[Running]:
    settings = settings_for(
        node_url,
        embedding.base_url,
        dims=DIMS,
        embedding_model="fake",
    )
    with serving(settings) as running:
        yield running


@pytest.fixture
def client(service: Running) -> httpx2.Client:
    return service.client


@pytest.fixture
async def world(
    cluster: Cluster, unique: Callable[[str], str], embedding: EmbeddingServer
) -> AsyncIterator[World]:
    embedder = embedder_of(embedding)
    yield await world_on(cluster, unique("stored"), {"fake": embedder}, declared={})
    await embedder.close()


async def searched(client: httpx2.Client, world: World, *profiles: str) -> None:
    for profile in profiles:
        answer = client.post(
            "/v1/search", json={"collection": world.name, "query": "text", "profile": profile}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.node
async def test_profiles_come_through_every_way_they_travel(
    world: World, client: httpx2.Client, unique: Callable[[str], str], tmp_path: Path
) -> None:
    await world.upsert({"id": "a", "text": "some text", "creation_time": "2026-01-02"})
    wanted = CollectionOptions.model_validate({"profiles": PROFILED}).profiles
    path = f"/v1/collections/{world.name}"
    # PUT, and what GET shows sent back, lean or with every null.
    profiles: Any = PROFILED
    for _ in range(2):
        answer = client.put(path, json={"profiles": profiles})
        assert answer.status_code == 200, answer.text
        assert (await world.collection()).profiles == wanted
        profiles = client.get(path).json()["profiles"]
    assert client.put(path, json={"profiles": lean(profiles)}).status_code == 200
    assert world.name in {item["name"] for item in client.get("/v1/collections").json()}
    await searched(client, world, *PROFILED)
    # Export and import.
    file = tmp_path / "out.jsonl"
    await reindexing.export_to(world.cluster, world.name, file)
    other = World(world.cluster, unique("back"), world.embedders)
    await reindexing.import_from(world.cluster, file, collection=other.name, embedder=world.embedder)
    assert (await other.collection()).profiles == wanted
    # Reindex.
    before = (await world.collection()).index
    await world.reindexer().run(Changes())
    after = await world.collection()
    assert after.index != before
    assert after.profiles == wanted


async def store(world: World, **told: Any) -> None:
    """Write into `_meta` what the API would not."""
    index = (await world.collection()).index
    mapping = (await world.cluster.get_mapping(index))[index]
    meta = {**mapping["_meta"]["halflife"], **told}
    await world.cluster.put_mapping(index, {"_meta": {**mapping["_meta"], "halflife": meta}}, timeout_s=30)


@pytest.mark.node
async def test_stored_profiles_of_an_earlier_release_are_read_and_exported(
    world: World, client: httpx2.Client
) -> None:
    await world.upsert({"id": "a", "text": "some text"})
    await store(
        world, profiles={"p": {"fusion": {"method": "linear", "rank_constant": 60.0}}}, default_profile="p"
    )
    client.get(f"/v1/collections/{world.name}")
    await searched(client, world, "p")
    head = await transfer.header(world.cluster, await world.collection(), now=now())
    assert head.profiles == {"p": {"fusion": {"method": "linear"}}}
    # An export that was made with them is read too.
    line = {name: getattr(head, name) for name in head.__dataclass_fields__}
    line["profiles"] = {"p": {"fusion": {"method": "linear", "rank_constant": 60.0}}}
    older = transfer.Header.parse(line)
    assert older.options().profiles == (await world.collection()).profiles
    assert older.ranks_as(await world.collection())


@pytest.mark.node
async def test_what_can_not_be_read_is_told_of_its_own_collection_and_can_be_mended(
    world: World, client: httpx2.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/v1/collections/{world.name}"
    await world.upsert({"id": "a", "text": "some text"})
    await store(
        world,
        profiles={"newer": {"fusion": {"method": "of tomorrow"}}, "good": {"decay": "off"}},
        default_profile="newer",
        experiment={"name": "e", "arms": 3},
        synonyms=[{"synonyms": "car, automobile"}, {"rule": "of tomorrow"}, {"synonyms": "alone"}],
    )
    shown = client.get(path).json()
    assert set(shown["unreadable"]) == {"profiles.newer", "experiment", "synonyms.1", "synonyms.2"}
    assert "has no synonym" in shown["unreadable"]["synonyms.2"]
    rules = client.get(f"{path}/synonyms").json()["synonyms_set"]
    assert [rule["synonyms"] for rule in rules] == ["car, automobile"]
    assert "fusion.method: must be" in shown["unreadable"]["profiles.newer"]
    assert (list(shown["profiles"]), shown["experiment"]) == (["good"], None)
    listed = {item["name"]: item for item in client.get("/v1/collections").json()}
    assert listed[world.name]["unreadable"] == shown["unreadable"]
    await searched(client, world, "good")
    for more in ({}, {"profile": "newer"}):
        answer = client.post("/v1/search", json={"collection": world.name, "query": "text", **more})
        assert answer.status_code == 503, answer.text
        told = answer.json()
        assert (told["type"], told["field"]) == ("urn:halflife:problem:schema-mismatch", "profiles.newer")
        assert f"PUT {path}" in told["remedy"]
    assert await reindexing.export_to(world.cluster, world.name, tmp_path / "out.jsonl") == 1
    assert "`profiles.newer` of" in capsys.readouterr().err
    answer = client.put(path, json={"profiles": {"newer": {"decay": "off"}}, "experiment": None})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["unreadable"]) == {"synonyms.1", "synonyms.2"}
    answer = client.put(f"{path}/synonyms", json={"synonyms_set": rules})
    assert answer.status_code == 200, answer.text
    assert "unreadable" not in client.get(path).json()
    await searched(client, world, "newer")


@pytest.mark.node
async def test_a_list_of_collections_tells_which_one_is_broken(world: World, client: httpx2.Client) -> None:
    await store(world, template_version=10_000)
    listed = {item["name"]: item for item in client.get("/v1/collections").json()}
    assert set(listed[world.name]) == {"name", "error"}
    error = listed[world.name]["error"]
    assert error["type"] == "schema-mismatch"
    assert "newer Halflife" in error["detail"]
    assert error["remedy"]
    broken: dict[str, Any] = {}
    found = await catalog.list_collections(world.cluster, only=lambda name: name == world.name, broken=broken)
    assert (found, list(broken)) == ([], [world.name])


@pytest.mark.node
async def test_a_change_that_was_taken_and_told_as_failed_is_seen_at_once(
    world: World, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.upsert({"id": "a", "text": "some text"})
    ask = {"collection": world.name, "query": "text", "profile": "p"}
    assert (
        client.post("/v1/search", json=ask).status_code == 422
    )  # the service remembers it without the profile
    create = catalog.create

    async def unconfirmed(*given: Any, **options: Any) -> Collection:
        await create(*given, **options)
        raise ClusterUnavailable("the cluster took the change, but not every node confirmed it")

    monkeypatch.setattr(catalog, "create", unconfirmed)
    answer = client.put(f"/v1/collections/{world.name}", json={"profiles": {"p": {"decay": "off"}}})
    assert answer.status_code == 503
    assert client.post("/v1/search", json=ask).status_code == 200
