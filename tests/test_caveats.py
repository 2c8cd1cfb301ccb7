"""What an answer warns of, on a real node: mistyped keys, options that did nothing, thresholds that left nothing."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from app import caveats, fields
from app.asking import Search
from app.caveats import likeness
from app.collection import Collection
from app.elastic import Cluster
from app.hints import MOST_LOOKUPS
from app.planning import make_plan
from app.ranking import Profile
from app.times import format_instant, from_ms
from tests.nodes import StandsBefore
from tests.searching import DAY, NOW_MS, Asker, Lacking, StandIn, drop_collection, ids, make_collection, write

pytestmark = [pytest.mark.node]

TEXT = {"kind": "text"}
QUERY = "annual leave"

GIVEN: list[dict[str, Any]] = [
    {"id": "new", "text": "annual leave, now", "creation_time": "2025-01-01", "embedding": [1, 0, 0],
     "metadata": {"team": "a", "place": {"city": "Bern"}, "$cost": "1"}},
    {"id": "old", "text": "annual leave, annual leave", "creation_time": "2023-01-01", "embedding": [0.8, 0.6, 0],
     "metadata": {"team": "b", "secret": "x"}},
    {"id": "older", "text": "annual leave, annual leave, annual leave", "creation_time": "2022-01-01",
     "embedding": [0.6, 0.8, 0], "metadata": {"team": "b"}},
]  # fmt: skip


@pytest.fixture
async def collection(cluster: Cluster) -> AsyncIterator[Collection]:
    made = await make_collection(cluster, GIVEN, dims=3, declared={"grade": "long"})
    yield made
    await drop_collection(cluster, made)


@pytest.fixture
def asker(cluster: Cluster, collection: Collection) -> Asker:
    return Asker(cluster, collection, StandIn(dims=3, vectors={QUERY: [1, 0, 0]}))


# --- keys that no document has ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, told",
    [
        ({"lagn": "zh"}, ["no document of the collection has the metadata key `lagn`; did you mean `lang`?"]),
        ({"taem": "a"}, ["no document of the collection has the metadata key `taem`; did you mean `team`?"]),
        ({"grad": 5}, ["no document of the collection has the metadata key `grad`; did you mean `grade`?"]),
        ({"metadata.xyzzy": "a"}, ["no document of the collection has the metadata key `xyzzy`"]),
        ({"place.ctiy": "Bern"},
         ["no document of the collection has the metadata key `place.ctiy`; did you mean `place.city`?"]),
        ({"$and": "a"}, ["no document of the collection has the metadata key `$and`; did you mean `and`?"]),
        ({"or": [{"not": {"exits": "a"}, "team": "z"}]}, ["no document of the collection has the metadata key `exits`"]),
        ({"team": "z"}, []),
        ({"lang": "zh"}, []),
        ({"$cost": "2"}, []),
        ({"lagn": {"exists": False}}, []),
    ],
    ids=str,
)  # fmt: skip
async def test_a_key_that_no_document_has_is_told_where_nothing_is_found(
    asker: Asker, given: dict[str, Any], told: list[str]
) -> None:
    answer = await asker.ask(QUERY, filter=given)
    assert ids(answer) == ([] if "exists" not in str(given) else ["new", "old", "older"])
    assert answer.warnings == told


async def test_a_failed_shard_tells_of_no_missing_key(cluster: Cluster, asker: Asker) -> None:
    wanted = {"filter": {"tema": "a"}, "routes": [TEXT], "suggest": False}
    assert any("`tema`" in warning for warning in (await asker.ask(QUERY, **wanted)).warnings)
    lacking = Lacking(cluster, -1, larger_than=-1)
    asker.doors = replace(asker.doors, cluster=cast(Cluster, lacking))
    await asker.ask(QUERY, **wanted)
    # The keys are what it asked for last; some may stand in documents of the shard that failed.
    lacking.at = 2 * lacking.asked - 1
    answer = await asker.ask(QUERY, **wanted)
    assert not answer.degraded
    assert answer.warnings == []


async def test_a_routes_own_key_is_told_where_that_route_finds_nothing(asker: Asker) -> None:
    answer = await asker.ask(QUERY, routes=[TEXT, {"kind": "text", "name": "own", "filter": {"taem": "a"}}])
    assert len(answer.hits) == 3
    assert answer.warnings == [
        "no document of the collection has the metadata key `taem`; did you mean `team`?"
    ]


async def test_no_key_of_a_document_beyond_the_callers_filter_is_told(asker: Asker) -> None:
    forced = [{"term": {"metadata.team": "a"}}]
    answer = await asker.ask(QUERY, filter={"secret": "y"}, forced=forced)
    assert answer.warnings == ["no document that this key may see has the metadata key `secret`"]
    answer = await asker.ask(QUERY, filter={"secert": "y"}, forced=forced)
    assert answer.warnings == ["no document that this key may see has the metadata key `secert`"]


async def test_each_search_of_a_batch_is_told_its_own(asker: Asker) -> None:
    answers = await asker.batch(
        {"query": QUERY, "filter": {"lagn": "zh"}}, {"query": QUERY}, {"query": QUERY, "filter": {"xyzzy": 1}}
    )
    assert [len(each.warnings) for each in answers] == [1, 0, 1]  # type: ignore[union-attr]
    assert "`xyzzy`" in answers[2].warnings[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "hidden, options, when",
    [
        ({"expires_at": "2024-06-01"}, {}, ""),
        ({"creation_time": "2025-06-01"}, {"as_of": "2025-01-15T00:00:00Z"}, " as of that time"),
        ({"start_date": "2025-06-01"}, {}, ""),
    ],
    ids=str,
)
async def test_no_key_of_a_document_that_time_hides_is_told(
    asker: Asker, hidden: dict[str, Any], options: dict[str, Any], when: str
) -> None:
    given = [
        {
            "id": "hidden",
            "text": "annual leave",
            "embedding": [1, 0, 0],
            "metadata": {"codename": "x"},
            **hidden,
        }
    ]
    await write(asker.cluster, asker.collection, given)
    for typed in ("codename", "codenmae"):
        answer = await asker.ask(QUERY, filter={typed: "y"}, **options)
        assert answer.warnings == [f"no document of the collection has the metadata key `{typed}`{when}"]


class Counting(StandsBefore):
    """A cluster that keeps how many searches each request held."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.sent: list[int] = []

    async def msearch(self, searches: Any, **options: Any) -> Any:
        self.sent.append(len(searches))
        return await self.cluster.msearch(searches, **options)


async def test_what_a_batch_looks_up_is_asked_once_and_bounded(asker: Asker) -> None:
    counting = Counting(asker.cluster)
    asker.doors = replace(asker.doors, cluster=cast(Cluster, counting))
    same = {"query": QUERY, "filter": {"taem": "a"}, "routes": [TEXT]}
    answers = await asker.batch(*[same] * 50)
    assert {each.warnings[0].split("; ")[1] for each in answers} == {"did you mean `team`?"}  # type: ignore[union-attr]
    assert counting.sent[-1] == 2
    different = [{**same, "filter": {f"taem{at}": "a", f"lagn{at}": "b"}} for at in range(50)]
    answers = await asker.batch(*different)
    assert counting.sent[-1] <= MOST_LOOKUPS
    told = [len(each.warnings) for each in answers]  # type: ignore[union-attr]
    assert told == sorted(told, reverse=True)
    assert (told[0], told[-1]) == (2, 0)


async def test_keys_compared_with_a_mistyped_one_are_bounded(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {
        "id": "wide",
        "text": "annual leave",
        "metadata": {f"k{'abab' * (at % 20)}{at}": 1 for at in range(2_000)},
    }
    await write(asker.cluster, asker.collection, [wide])
    compared: list[str] = []

    def count(a: str, b: str) -> float:
        compared.append(b)
        return likeness(a, b)

    monkeypatch.setattr(caveats, "likeness", count)
    answers = await asker.batch(*[{"query": QUERY, "filter": {"xyzzyplugh": "a"}, "routes": [TEXT]}] * 20)
    assert all(each.warnings for each in answers)  # type: ignore[union-attr]
    # Once for the whole request.
    assert caveats.MOST_KNOWN <= len(compared) <= caveats.MOST_KNOWN + len(fields.RESERVED) + 10
    assert max(map(len, compared)) <= caveats.LONGEST_KNOWN


@pytest.mark.parametrize(
    "a, b, expected",
    [("lang", "lagn", 0.75), ("same", "same", 1.0), ("team", "xyz", 0.0), ("a" * 65, "a" * 65, 0.0), ("", "a", 0.0),
     ("team", "teams in the house", 0.0)],
    ids=str,
)  # fmt: skip
def test_likeness(a: str, b: str, expected: float) -> None:
    assert likeness(a, b) == expected


# --- options that do nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"decay": "off"}, {"decay": {"half_life": "30d"}}, {"collapse": False}],
    ids=str,
)
def test_folding_without_what_finds_the_superseded_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"`fold_superseded` .*drop it"):
        Search.model_validate({"collection": "c", "query": "x", "fold_superseded": True, **options})


@pytest.mark.parametrize("given", [{"decay": "off"}, {"decay": {"half_life": "30d"}}], ids=str)
async def test_folding_beside_a_profiles_decay_is_told_to_do_nothing(asker: Asker, given: Any) -> None:
    profiles = {"plain": Profile.model_validate(given)}
    asker.collection = asker.collection.model_copy(update={"profiles": profiles, "default_profile": "plain"})
    answer = await asker.ask(QUERY, routes=[TEXT], fold_superseded=True, top_k=1, paging=True)
    assert len(answer.hits) == 1
    assert any("`fold_superseded` does nothing here" in warning for warning in answer.warnings)
    assert answer.cursor is not None
    assert len((await asker.page(answer.cursor)).hits) == 1
    folded = await asker.ask(QUERY, routes=[TEXT], fold_superseded=True, decay="auto")
    assert not [warning for warning in folded.warnings if "fold_superseded" in warning]


# --- a decay that does not fit ---------------------------------------------------------------------------------------


async def test_a_decay_that_sent_the_old_off_the_page_is_not_told_to_do_nothing(made: Any) -> None:
    # Of a page that a decay has filled with young documents alone, every factor is 1.
    given = [
        {"id": f"{name}-{at}", "text": "annual leave " * words, "embedding": [1, 0, 0],
         "creation_time": _day(NOW_MS - age * DAY)}
        for name, words, age in (("young", 1, 10), ("old", 3, 800)) for at in range(3)
    ]  # fmt: skip
    asker: Asker = await made(given, {QUERY: [1, 0, 0]})
    strong = {"scale": "30d", "decay": 0.3, "offset": "300d", "kind": "linear", "floor": 0}
    answer = await asker.ask(QUERY, routes=[TEXT], decay=strong, top_k=3)
    assert {hit.id.split("-")[0] for hit in answer.hits} == {"young"}
    assert answer.warnings == []
    weak = await asker.ask(QUERY, routes=[TEXT], decay={"half_life": "36500d"}, top_k=1, filter={"creation_time": {"gte": _day(NOW_MS - 20 * DAY)}})  # fmt: skip
    assert ["changes nothing here: all 3 dated candidates" in each for each in weak.warnings] == [True]
    assert "strengthen it" in weak.warnings[0]
    floored = await asker.ask(
        QUERY,
        routes=[TEXT],
        decay={"kind": "gauss", "scale": "7d"},
        filter={"creation_time": {"lt": "2024-01-01"}},
    )
    assert ["leave `decay` out for 'auto'" in each for each in floored.warnings] == [True]


async def test_a_decay_is_not_to_be_strengthened_for_what_was_written_just_now(made: Any) -> None:
    given = [
        {"id": f"memory-{at}", "text": "annual leave", "embedding": [1, 0, 0],
         "creation_time": format_instant(from_ms(NOW_MS - at * 60_000))}
        for at in range(1, 3)
    ]  # fmt: skip
    asker: Asker = await made(given, {QUERY: [1, 0, 0]})
    answer = await asker.ask(QUERY, routes=[TEXT], decay={"half_life": "365d"})
    assert answer.warnings == [
        "the decay changes nothing here, as it should: all 2 dated candidates were written or touched less than a day ago"
    ]


def _day(ms: int) -> str:
    return format_instant(from_ms(ms))


# --- thresholds ------------------------------------------------------------------------------------------------------


async def test_a_threshold_that_left_nothing_says_what_it_cut(asker: Asker) -> None:
    beyond = {"team": "b"}
    answer = await asker.ask(QUERY, filter=beyond, min_relevance=0.9)
    assert answer.hits == []
    [warning] = answer.warnings
    assert warning.startswith(
        "`min_relevance` of 0.9 left nothing: the nearest document within the filters has a relevance of 0.800; lower it"
    )
    assert (await asker.ask(QUERY, filter=beyond, min_relevance=0.7)).warnings == []
    nothing = await asker.ask(
        "xyzzy", filter=beyond, min_relevance=0.0, routes=[TEXT], query_vector=[1, 0, 0]
    )
    assert (nothing.hits, nothing.warnings) == ([], [])


# --- what a profile gives ----------------------------------------------------------------------------------------------


async def test_a_profile_gives_the_stages_that_a_request_leaves_out(asker: Asker) -> None:
    tidy = Profile.model_validate({"dedup": {"threshold": 0.7}, "min_relevance": 0.5, "rerank": {}})
    asker.collection = asker.collection.model_copy(
        update={"profiles": {"tidy": tidy}, "default_profile": "tidy"}
    )
    near = [{"kind": "vector"}]
    answer = await asker.ask(QUERY, routes=near, explain=True, paging=True, top_k=1)
    # Cosines: new-old .8, old-older .96, new-older .6; 'older' is near 'old', which is not kept.
    assert (ids(answer), answer.hits[0].near_duplicates) == (["new"], ["old"])
    assert answer.profile is not None
    assert answer.profile.name == "tidy"
    assert answer.explain is not None
    assert answer.explain["stages"]["min_relevance"] == 0.5
    assert answer.explain["stages"]["dedup"]["threshold"] == 0.7
    assert any("this service has no reranker" in warning for warning in answer.warnings)
    # A later page keeps to what the first had, whatever the profile is by now.
    asker.collection = asker.collection.model_copy(update={"profiles": {"tidy": Profile()}})
    assert answer.cursor is not None
    assert ids(await asker.page(answer.cursor)) == ["older"]
    asker.collection = asker.collection.model_copy(update={"profiles": {"tidy": tidy}})
    own = {"dedup": "off", "rerank": "off", "min_relevance": 0.7}
    answer = await asker.ask(QUERY, routes=near, **own)
    assert (ids(answer), answer.warnings) == (["new", "old"], [])
    answer = await asker.ask(QUERY, routes=near, **{**own, "min_relevance": "off"})
    assert ids(answer) == ["new", "old", "older"]


def test_a_profiles_stages_fit_the_request() -> None:
    def planned(profile: dict[str, Any], **options: Any) -> Search:
        collection = Collection(
            name="c", index="i", dims=3, similarity="cosine", declared={}, template_version=1,
            profiles={"p": Profile.model_validate(profile)}, default_profile="p",
        )  # fmt: skip
        search = Search.model_validate({"collection": "c", "query": "x", **options})
        return make_plan(search, collection=collection, now_ms=NOW_MS).search

    fold = {"fold_superseded": True}
    assert planned(fold).fold_superseded
    assert not planned(fold, fold_superseded=False).fold_superseded
    # Idle beside another decay, and chunks are not compared.
    assert not planned(fold, decay="off").fold_superseded
    assert not planned(fold, collapse=False).fold_superseded
    assert planned({"mmr": {"lambda": 0.8}}, rerank={}).mmr is None
    assert planned({"rerank": {}}, mmr={}).rerank is None
    assert planned({"mmr": {}}, mmr=None).mmr is None


@pytest.mark.parametrize(
    "profile",
    [{"rerank": {}, "mmr": {}}, {"fold_superseded": True, "decay": "off"}, {"rerank": {"top_n": 9, "candidates": 5}}],
    ids=str,
)  # fmt: skip
def test_a_profile_that_contradicts_itself_is_refused(profile: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Profile.model_validate(profile)
