"""The search log and feedback on it: over real sockets and a real node, with the embedding far end stood in for."""

import asyncio
import json
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from app import catalog, feedback, names, searchlog
from app.asking import Search
from app.collection import Collection
from app.elastic import Cluster
from app.errors import ClusterUnavailable
from app.feedback import JudgedQuery, Votes, counted_from, judgements
from app.keys import hash_of
from app.ratings import Ratings, Vote, rate
from app.searchlog import Asked, SearchLog, entry, index_of, marked, query_hash
from app.settings import Settings
from app.times import to_ms
from scripts.judged import read_set
from scripts.judgements import Written, write
from tests.fakes import EmbeddingServer
from tests.service import Running, serving, settings_for

pytestmark = pytest.mark.node
DIMS = 16
SECRET = b"the secret of the search log of these tests"


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


def lasting(node_url: str, embedding: EmbeddingServer, **more: Any) -> Settings:
    return settings_for(
        node_url,
        embedding.base_url,
        dims=DIMS,
        cursor_secret=SecretStr("a secret that outlives a restart"),
        **more,
    )


@pytest.fixture(scope="module")
def service(node_url: str, embedding: EmbeddingServer) -> Iterator[Running]:
    with serving(lasting(node_url, embedding, search_log_rate=1.0, search_log_texts=True)) as running:
        yield running


@pytest.fixture
def client(service: Running) -> httpx2.Client:
    return service.client


DOCUMENTS = [
    {"id": f"leave-{n}", "title": f"Leave {n}", "text": f"carry over days of leave, rule {n}",
     "creation_time": f"202{n}-01-02"}
    for n in range(6)
]  # fmt: skip


@pytest.fixture
def collection(client: httpx2.Client) -> Iterator[str]:
    name = f"votes_{uuid.uuid4().hex[:10]}"
    assert client.put(f"/v1/collections/{name}").status_code == 200
    stored = client.post(
        f"/v1/collections/{name}/documents", json={"documents": DOCUMENTS, "refresh": "wait_for"}
    )
    assert stored.json()["failed"] == 0, stored.text
    yield name
    client.delete(f"/v1/collections/{name}", params={"confirm": name})


def ask(client: httpx2.Client, collection: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/search", json={"collection": collection, "query": "carry over leave", **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def vote(client: httpx2.Client, search_id: str, *items: Any, **more: Any) -> httpx2.Response:
    return client.post("/v1/feedback", json={"search_id": search_id, "items": list(items), **more})


async def logged(cluster: Cluster, search_id: str) -> dict[str, Any]:
    index = index_of(search_id)
    assert index is not None
    for _ in range(40):
        try:
            [found] = await cluster.mget(index, [search_id], timeout_s=30)
        except Exception:  # noqa: BLE001 - the day's index is made with its first entry
            found = {}
        if found.get("found"):
            return found["_source"]
        await asyncio.sleep(0.25)
    raise AssertionError(f"{search_id} was not logged")


# --- the log


async def test_a_search_is_logged_with_what_it_showed(client, collection, cluster):
    answer = ask(client, collection, top_k=3, decay={"half_life": "365d"}, as_of="2026-06-30")
    entry = await logged(cluster, answer["search_id"])
    assert entry["collection"] == collection
    assert entry["origin"] == "2026-06-30T00:00:00.000Z"
    assert entry["query"] == "carry over leave"
    assert entry["status"] == "ok"
    assert entry["results"] == 3
    assert entry["top_k"] == 3
    assert [hit["id"] for hit in entry["hits"]] == [hit["id"] for hit in answer["hits"]]
    assert [hit["rank"] for hit in entry["hits"]] == [1, 2, 3]
    assert entry["hit_ages_days"] == [hit["age_days"] for hit in answer["hits"]]
    assert entry["hit_decays"] == [hit["decay"] for hit in answer["hits"]]
    assert entry["decay"] == {"kind": "exp", "half_life_days": 365, "floor": 0.5, "field": "creation_time",
                              "placement": "route"}  # fmt: skip
    assert {route["name"]: route["status"] for route in entry["routes"]} == {"text": "ok", "vector": "ok"}
    assert entry["routes"][0]["total"] == 6
    assert set(entry["route_took_ms"]) == {"text", "vector"}
    assert entry["request_id"]
    assert set(entry["stages"]) >= {"embed_ms", "recall_ms"}


async def test_a_page_is_logged_with_its_ranks(client, collection, cluster):
    first = ask(client, collection, top_k=2)
    second = client.post("/v1/search", json={"cursor": first["cursor"]}).json()
    assert second["search_id"] != first["search_id"]
    entry = await logged(cluster, second["search_id"])
    assert [hit["rank"] for hit in entry["hits"]] == [3, 4]
    assert entry["first_rank"] == 3
    # Rank 3 is no first hit: charts of first hits count first pages.
    assert "first_age_days" not in entry
    assert entry["median_age_days"]
    assert (await logged(cluster, first["search_id"]))["first_age_days"] == first["hits"][0]["age_days"]


async def test_routes_and_decay_are_logged_as_what_they_are(client, collection, cluster):
    routes = [{"kind": "text", "name": "titles"}, {"kind": "fresh_vector", "window": "9000d"}]
    first = ask(client, collection, top_k=2, routes=routes)
    assert {name: route["kind"] for name, route in first["routes"].items()} == {
        "titles": "text", "fresh_vector": "fresh_vector",
    }  # fmt: skip
    second = client.post("/v1/search", json={"cursor": first["cursor"]}).json()
    for answer in (first, second):
        entry = await logged(cluster, answer["search_id"])
        assert {route["name"]: route["kind"] for route in entry["routes"]} == {
            "titles": "text", "fresh_vector": "fresh_vector",
        }  # fmt: skip
        assert set(entry["route_took_ms"]) == {"text", "fresh_vector"}
        assert entry["decay"] == {"kind": "auto"}


async def test_a_batch_is_logged_query_by_query(client, collection, cluster):
    answer = client.post(
        "/v1/search", json={"collection": collection, "queries": ["leave", {"query": "rule"}]}
    )
    told = [await logged(cluster, each["search_id"]) for each in answer.json()["results"]]
    assert [entry["query"] for entry in told] == ["leave", "rule"]


async def test_a_degraded_search_says_why(node_url, embedding, client, collection, cluster):
    embedding.fault = None
    with serving(lasting(node_url, embedding, search_log_rate=1.0, embedding_query_timeout_s=0.5)) as running:
        embedding_url = embedding.base_url
        assert embedding_url
        answer = running.client.post(
            "/v1/search", json={"collection": collection, "query": "rule 3", "query_vector": None}
        ).json()
        entry = await logged(cluster, answer["search_id"])
    assert "query" not in entry  # texts are off unless asked for
    assert entry["query_hash"] == query_hash("  RULE   3 ", _secret())
    assert entry["query_chars"] == 6


def _secret() -> bytes:
    import hmac

    return hmac.digest(b"a secret that outlives a restart", b"halflife search log", "sha256")


def test_off_it_says_nothing(node_url, embedding, collection):
    with serving(lasting(node_url, embedding)) as running:
        answer = ask(running.client, collection)
        assert "search_id" not in answer
        refused = vote(running.client, "20260101-abcdef", {"id": "leave-1", "verdict": "clicked"})
    assert refused.status_code == 404
    assert refused.json()["field"] == "search_id"


class Clock:
    def __init__(self, moment: datetime) -> None:
        self.moment = moment

    def __call__(self) -> datetime:
        return self.moment


def a_log(cluster: Cluster, **more: Any) -> SearchLog:
    given: dict[str, Any] = {
        "rate": 1.0, "with_text": False, "keep_days": 30, "secret": SECRET, "now": Clock(datetime.now(UTC)),
        "chance": lambda: 0.5, "new_id": lambda: uuid.uuid4().hex[:24],
    }  # fmt: skip
    return SearchLog(cluster, **{**given, **more})


def asked(**more: Any) -> Asked:
    search = Search.model_validate({"collection": "handbook", "query": "leave", **more})
    collection = Collection(
        name="handbook", index="i", dims=3, similarity="cosine", declared={}, template_version=1
    )
    return Asked(search, collection)


REFUSED = ClusterUnavailable("searching: no connection to leave", retry_after_s=1)


def test_sampling_draws_each_search(cluster):
    drawn = iter([0.1, 0.3, 0.2, 0.9])
    log = a_log(cluster, rate=0.25, chance=lambda: next(drawn))
    assert [log.note(asked(), REFUSED) is not None for _ in range(4)] == [True, False, True, False]


def test_what_json_has_no_word_for_costs_the_entry_and_not_the_search(cluster):
    log = a_log(cluster)
    assert log.note(replace(asked(), spent={"recall": math.nan}), REFUSED) is None
    assert log.figures.failed == 1


def test_a_full_queue_drops_and_counts(cluster):
    log = a_log(cluster, most_waiting=3)
    assert [log.note(asked(), REFUSED) is not None for _ in range(5)] == [True, True, True, False, False]
    assert log.figures.dropped == 2


class Busy(SearchLog):
    """Notes one more search while each batch is written, as under load."""

    async def _make(self, index: str) -> None:
        await super()._make(index)
        self._made.clear()  # asked again with each batch
        self.note(asked(), REFUSED)


async def test_a_flush_under_load_ends_with_what_was_there(cluster):
    log = Busy(cluster, rate=1.0, with_text=False, keep_days=30, secret=SECRET, now=Clock(datetime.now(UTC)),
               chance=lambda: 0.5, new_id=lambda: uuid.uuid4().hex[:24])  # fmt: skip
    for _ in range(searchlog.MOST_AT_ONCE + 1):
        log.note(asked(), REFUSED)
    async with asyncio.timeout(60):
        await log.flush()
    assert log.figures.written == searchlog.MOST_AT_ONCE + 1
    async with asyncio.timeout(60):
        await log.flush()
    assert log.figures.written == searchlog.MOST_AT_ONCE + 3


def test_a_failed_search_is_told_without_its_text():
    told = entry(
        asked(), REFUSED, search_id="20260101-a", moment=datetime(2026, 1, 1, tzinfo=UTC), secret=SECRET,
        with_text=False,
    )  # fmt: skip
    assert told["status"] == "failed"
    assert told["error"] == "elasticsearch-unavailable"
    assert told["reasons"] == ["searching: no connection to …"]
    assert "query" not in told


async def test_an_unreachable_cluster_costs_entries_and_nothing_else():
    nowhere = Cluster.connect(urls=["http://127.0.0.1:9"], request_timeout_s=1)
    log = a_log(nowhere, interval_s=0.01)
    assert log.note(asked(), REFUSED) is not None
    with pytest.raises(ClusterUnavailable):
        await log.flush()
    assert log.figures.written == 0
    await log.close(within_s=0.5)
    assert log.figures.dropped == 1
    await nowhere.close()


async def test_old_days_go_and_others_stay(cluster):
    await catalog.install_own_templates(cluster, *catalog.OWN_TEMPLATES)
    now = datetime(2001, 3, 15, 12, tzinfo=UTC)  # days that no other test writes to
    days = {
        names.own_dated_index("searches", now - timedelta(days=age)): age for age in (0, 1, 30, 31, 32, 400)
    }
    for index in days:
        await cluster.create_index(index, {})
    month = names.own_dated_index("feedback", now, monthly=True)
    await cluster.create_index(month, {})
    try:
        gone = await searchlog.sweep(cluster, "searches", keep_days=30, now=now)
        assert sorted(gone) == sorted(index for index, age in days.items() if age > 30)
        left = await cluster.resolve_index("halflife_searches-2001*")
        assert sorted(left) == sorted(index for index, age in days.items() if age <= 30)
        assert left[names.own_dated_index("searches", now)] == ["halflife_searches"]
        assert month in await cluster.resolve_index("halflife_feedback-2001*")
    finally:
        rest = [*await cluster.resolve_index("halflife_searches-2001*"), month]
        await cluster.delete_indices([index for index in rest if index in days or index == month])


async def test_a_day_that_an_earlier_release_began_gets_the_new_fields(cluster):
    moment = datetime(2003, 3, 15, 12, tzinfo=UTC)  # a day that no other test writes to
    index = names.own_dated_index("searches", moment)
    older = catalog.shipped(catalog.SEARCHES_TEMPLATE)
    del older["template"]["mappings"]["properties"]["recency_reason"]
    await cluster.put_index_template(catalog.SEARCHES_TEMPLATE, older)
    await cluster.create_index(index, {})
    assert "recency_reason" not in (await cluster.get_mapping(index))[index]["properties"]
    try:
        log = a_log(cluster, now=Clock(moment))
        assert log.note(asked(), REFUSED) is not None
        await log.flush()
        assert log.figures.written == 1
        assert "recency_reason" in (await cluster.get_mapping(index))[index]["properties"]
    finally:
        await cluster.delete_indices([index])


async def test_no_collection_is_seen_where_the_log_lies(cluster, client, collection):
    await logged(cluster, ask(client, collection)["search_id"])
    assert not [c for c in await catalog.list_collections(cluster) if c.name.startswith("searches")]
    assert not await cluster.resolve_index(names.index_pattern("searches"))


@pytest.mark.parametrize(
    "text", ["", "x", "2026013-abc", "20260231-abc", "20260131", "２０２６0131-a", "20260131-" + "a" * 64]
)
def test_what_is_no_search_id(text):
    assert index_of(text) is None


def test_an_id_tells_its_day():
    assert index_of("20260131-abc") == "halflife_searches-2026.01.31"


def test_marks_add_up():
    source = {"hits": [{"id": "a", "rank": 1}, {"id": "b", "rank": 2}]}
    once = marked(source, {"b": "clicked", "a": "ignored"})
    twice = marked(once, {"a": "clicked"})
    assert once == {**source, "clicked": ["b"], "ignored": ["a"], "votes": 2, "first_clicked_rank": 2}
    assert twice == {**once, "clicked": ["a", "b"], "first_clicked_rank": 1}


# --- votes


async def test_votes_are_stored_once_and_noted(client, collection, cluster):
    answer = ask(client, collection, top_k=3)
    first, second, third = (hit["id"] for hit in answer["hits"])
    given = [
        {"id": second, "verdict": "clicked"},
        {"id": first, "verdict": "ignored"},
        {"id": "never-shown", "verdict": "clicked"},
        {"id": third, "verdict": "loved"},
        {"id": second, "verdict": "helpful"},
        "not an object",
    ]
    told = vote(client, answer["search_id"], *given)
    assert told.status_code == 200, told.text
    body = told.json()
    assert [item["status"] for item in body["items"]] == [
        "created", "created", "not_found", "invalid", "invalid", "invalid",
    ]  # fmt: skip
    assert body["failed"] == 4
    assert body["items"][3]["error"]["field"] == "verdict"
    again = vote(client, answer["search_id"], given[0], {"id": first, "verdict": "clicked"}).json()
    assert [item["status"] for item in again["items"]] == ["unchanged", "updated"]
    assert again["counts_from"] > answer["origin"]
    unchanged = vote(client, answer["search_id"], given[0]).json()
    assert unchanged["counts_from"] is None
    other = vote(client, answer["search_id"], given[0], user="u-7").json()
    assert other["items"][0]["status"] == "created"
    entry = await logged(cluster, answer["search_id"])
    assert entry["clicked"] == sorted([first, second])
    assert entry["first_clicked_rank"] == 1
    await cluster.refresh("halflife_feedback")
    body = {"query": {"term": {"search_id": answer["search_id"]}}, "size": 10}
    stored = (await cluster.search("halflife_feedback", body, timeout_s=30))["hits"]["hits"]
    assert len(stored) == 3
    by_voter = {(hit["_source"]["voter"], hit["_source"]["document_id"]): hit["_source"] for hit in stored}
    assert by_voter[("anyone", second)]["rank"] == 2
    assert "u-7" not in json.dumps(stored)


def test_a_search_that_is_not_logged_is_refused(client):
    for search_id in ("20260131-6f1d0c1a9b7e4f5d8a3b2c1d", "nonsense"):
        told = vote(client, search_id, {"id": "a", "verdict": "clicked"})
        assert told.status_code == 404
        assert told.json()["remedy"]
    assert vote(client, "*", {"id": "a", "verdict": "clicked"}).status_code == 422
    assert vote(client, "20260131-a").status_code == 422


async def fill(
    cluster: Cluster,
    collection: str,
    document: str,
    verdict: str,
    *,
    voters: int,
    rank: int = 1,
    key: str | None = None,
    minutes: int = 5,
) -> None:
    """Write votes of many keys, or of users of one, some minutes old so that they are settled."""
    moment = datetime.now(UTC) - timedelta(minutes=minutes)
    index = names.own_dated_index("feedback", moment, monthly=True)
    await searchlog.make_index(cluster, index, template=catalog.FEEDBACK_TEMPLATE)
    uid = (await catalog.get(cluster, collection)).collection.uid
    entries = []
    for number in range(voters):
        id_ = uuid.uuid4().hex
        entries.append((index, id_, {
            "@timestamp": moment.isoformat(), "searched_at": moment.isoformat(), "vote": id_,
            "collection": collection, "search_id": "20260101-x", "query_hash": "q", "document_id": document,
            "rank": rank, "verdict": verdict, "voter": f"v{number}", "key_id": key or f"k{number}", "collection_uid": uid,
        }))  # fmt: skip
    outcomes = await cluster.record(entries)
    assert {outcome.fate for outcome in outcomes} == {"applied"}
    await cluster.refresh("halflife_feedback")


def ranked(client, collection, **more):
    return ask(client, collection, **{"routes": [{"kind": "text"}], "decay": "off", **more})


def with_ratings(client, collection, **more):
    """Ask until the ratings are read: the first search waits for them for half a second at most."""
    for _ in range(30):
        answer = ranked(client, collection, **more)
        if not answer["warnings"]:
            return answer
        time.sleep(0.2)
    raise AssertionError(answer["warnings"])


async def test_votes_lift_a_document_within_bounds(client, collection, cluster):
    before = ranked(client, collection)
    order = [hit["id"] for hit in before["hits"]]
    await fill(cluster, collection, order[3], "clicked", voters=40)
    await fill(cluster, collection, order[0], "unhelpful", voters=40)
    off = ranked(client, collection)
    assert [hit["id"] for hit in off["hits"]] == order
    assert "feedback" not in off["hits"][0]
    on = with_ratings(client, collection, feedback={"strength": 0.1})
    told = {hit["id"]: hit for hit in on["hits"]}
    lifted, lowered = told[order[3]], told[order[0]]
    assert 1 < lifted["feedback"]["factor"] <= 1.1
    assert lifted["feedback"]["clicked"] == lifted["feedback"]["voters"] == 40
    assert 0.9 <= lowered["feedback"]["factor"] < 1
    assert lifted["score"] == pytest.approx(lifted["fused_score"] * lifted["feedback"]["factor"])
    assert on["hits"][0]["id"] == order[3]
    assert [hit["score"] for hit in on["hits"]] == sorted((hit["score"] for hit in on["hits"]), reverse=True)
    assert "feedback" not in told[order[1]]
    why = client.post("/v1/why", json={
        "collection": collection, "query": "carry over leave", "routes": [{"kind": "text"}],
        "feedback": {"strength": 0.1}, "id": order[3], "decay": "off",
    }).json()  # fmt: skip
    assert why["fused_rank"] == 1


async def test_what_is_asked_as_of_a_moment_is_ranked_by_the_votes_up_to_it(client, collection, cluster):
    order = [hit["id"] for hit in ranked(client, collection)["hits"]]
    await fill(cluster, collection, order[3], "clicked", voters=40)
    assert any("feedback" in hit for hit in with_ratings(client, collection, feedback={})["hits"])
    # All documents are older than that, and all votes younger.
    then = with_ratings(client, collection, feedback={}, as_of="2025-06-01")
    assert [hit["id"] for hit in then["hits"]] == order
    assert not any("feedback" in hit for hit in then["hits"])
    now = with_ratings(client, collection, feedback={"as_of": "2100-01-01"}, as_of="2025-06-01")
    assert any("feedback" in hit for hit in now["hits"])


async def test_pages_keep_the_ratings_of_the_first(client, collection, cluster):
    order = [hit["id"] for hit in ranked(client, collection)["hits"]]
    await fill(cluster, collection, order[5], "clicked", voters=60)
    whole = with_ratings(client, collection, feedback={"strength": 0.3})
    pages, answer = [], with_ratings(client, collection, feedback={"strength": 0.3}, top_k=2)
    while True:
        pages += [hit["id"] for hit in answer["hits"]]
        if answer["cursor"] is None:
            break
        await fill(cluster, collection, order[4], "clicked", voters=20)
        answer = client.post("/v1/search", json={"cursor": answer["cursor"]}).json()
    assert pages == [hit["id"] for hit in whole["hits"]]
    assert pages[0] == order[5]


async def test_a_collection_made_again_begins_without_votes(client, collection, cluster):
    answer = ask(client, collection)
    order = [hit["id"] for hit in ranked(client, collection)["hits"]]
    await fill(cluster, collection, order[3], "clicked", voters=40)
    voted = with_ratings(client, collection, feedback={})
    assert any("feedback" in hit for hit in voted["hits"])
    assert (await logged(cluster, answer["search_id"]))["collection"] == collection
    before = (await catalog.get(cluster, collection)).collection
    assert client.delete(f"/v1/collections/{collection}", params={"confirm": collection}).status_code == 204
    made = client.put(f"/v1/collections/{collection}")
    assert made.json()["uid"] not in (None, before.uid)
    sent = {"documents": DOCUMENTS, "refresh": "wait_for"}
    assert client.post(f"/v1/collections/{collection}/documents", json=sent).json()["failed"] == 0
    # Of a search of the collection that is gone: stored, and no vote on this one.
    late = vote(client, answer["search_id"], {"id": answer["hits"][0]["id"], "verdict": "helpful"})
    assert late.status_code == 200
    await cluster.refresh("halflife_feedback")
    await cluster.refresh("halflife_searches")
    again = with_ratings(client, collection, feedback={})
    assert [hit["id"] for hit in again["hits"]] == order
    assert not any("feedback" in hit for hit in again["hits"])
    assert not [
        each async for each in judgements(cluster, (await catalog.get(cluster, collection)).collection)
    ]
    assert [each async for each in judgements(cluster, before)]


class Tables:
    """Makes ratings in threads that wait for leave, and notes what was made."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.begun: list[int] = []
        self.most = 0
        self._under_way = 0
        self._lock = threading.Lock()

    def __call__(self, votes: Any, *, as_of_ms: int) -> Ratings:
        with self._lock:
            self.begun.append(as_of_ms)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        assert self.leave.wait(60)
        with self._lock:
            self._under_way -= 1
        return rate(votes, as_of_ms=as_of_ms)

    def votes(self, cluster: Cluster) -> Votes:
        return Votes(
            cluster, a_log(cluster), secret=SECRET, now=lambda: datetime.now(UTC), keep_days=31, rating=self
        )


async def eventually(holds: Callable[[], object]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")


AS_OF = datetime(2026, 1, 1, tzinfo=UTC)


async def test_tables_of_ratings_are_made_once_and_one_of_a_collection_at_a_time(client, cluster, collection):
    tables = Tables()
    tables.leave.set()
    votes = tables.votes(cluster)
    known = (await catalog.get(cluster, collection)).collection
    others = [known.model_copy(update={"name": f"{collection}_{n}"}) for n in range(3)]
    try:
        for each in (known, *others):
            await eventually_rated(votes, each, None)
        tables.leave.clear()
        asked = [asyncio.create_task(votes.ratings(known, "x", AS_OF, key)) for key in ("a", "b", "a", "b")]
        await eventually(lambda: len(tables.begun) == 5)
        # None of them waits for that: each is answered, without votes.
        assert await asyncio.gather(*asked) == [None] * 4
        assert len(tables.begun) == 5
        tables.most = 0
        tables.leave.set()
        for key in ("a", "b"):
            await eventually_rated(votes, known, AS_OF, key)
    finally:
        tables.leave.set()
        await votes.close()
    assert tables.most <= 1
    assert len(tables.begun) == 6  # four collections as of now, and two keys


async def eventually_rated(
    votes: Votes, collection: Collection, as_of: datetime | None, key: str | None = None
) -> Ratings:
    """Ask until the ratings are there: a busy machine may take longer than a search waits."""
    for _ in range(600):
        found = await votes.ratings(collection, "x", as_of, key)
        if found is not None:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError("the ratings did not come")


async def test_one_collections_tables_hold_up_neither_searches_nor_other_collections(
    client, cluster, collection
):
    tables = Tables()
    tables.leave.set()
    votes = tables.votes(cluster)
    known = (await catalog.get(cluster, collection)).collection
    other = known.model_copy(update={"name": f"{collection}_other"})
    try:
        for each in (known, other):
            await eventually_rated(votes, each, None)
        tables.leave.clear()
        instants = [AS_OF + timedelta(minutes=n) for n in range(20)]
        assert await asyncio.gather(*(votes.ratings(known, "x", each) for each in instants)) == [None] * 20
        # No more are made than may wait, of one collection one at a time; the other has a thread of its own.
        await eventually(lambda: len(tables.begun) == 3)
        assert len(votes._known_of(known).making) == feedback.MOST_MAKING
        assert await votes.ratings(other, "x", AS_OF) is None
        await eventually(lambda: len(tables.begun) == 4)
        # As of about now, older ratings are better than none.
        assert await votes.ratings(known, "x", None) is not None
        tables.leave.set()
        for each in (known, other):
            await eventually_rated(votes, each, AS_OF)
        # What nobody waited for any more was made all the same, and is there for who asks again.
        await eventually(lambda: not votes._known_of(known).making)
    finally:
        tables.leave.set()
        await votes.close()
    assert len(tables.begun) == 3 + feedback.MOST_MAKING
    assert tables.most == 2


async def test_instants_within_a_minute_share_a_table(client, cluster, collection):
    tables = Tables()
    tables.leave.set()
    votes = tables.votes(cluster)
    known = (await catalog.get(cluster, collection)).collection
    try:
        found = [
            await eventually_rated(votes, known, AS_OF + timedelta(milliseconds=7_003 * n)) for n in range(8)
        ]
    finally:
        await votes.close()
    assert {ratings.as_of_ms for ratings in found} == {to_ms(AS_OF)}
    assert tables.begun.count(to_ms(AS_OF)) == 1


async def test_the_votes_of_one_key_push_out_no_other_keys(monkeypatch, client, cluster, collection):
    """Whoever sends many, under however many users, and newer ones: what the others have counts, up to an equal share."""
    monkeypatch.setattr(feedback, "MOST_VOTES", 60)
    await fill(cluster, collection, "a", "helpful", voters=10, key="small", minutes=9)
    await fill(cluster, collection, "b", "helpful", voters=90, key="large", minutes=7)
    await fill(cluster, collection, "c", "helpful", voters=200, key="larger", minutes=5)
    found = (await catalog.get(cluster, collection)).collection
    votes = dict([each async for each in feedback._votes(cluster, found, since_ms=None)])
    expected = {"small": 10, "large": 25, "larger": 25}
    assert Counter(vote.key for vote in votes.values()) == expected
    # What comes later is held beside it by the same rule.
    newest = max(vote.at_ms for vote in votes.values())
    flood = {
        f"f{n}": Vote("d", f"user {n}", "larger", "helpful", 1, newest + 1 + n, "q") for n in range(1_000)
    }
    kept = feedback._newest({**votes, **flood})
    assert Counter(vote.key for vote in kept.values()) == expected
    assert {f"f{n}" for n in range(975, 1_000)} <= kept.keys()
    assert feedback._newest(votes) == votes


def test_one_voter_has_a_bound_in_what_is_held_too(monkeypatch):
    monkeypatch.setattr(feedback, "MOST_PER_VOTER", 3)
    votes = {
        f"{who}{n}": Vote("d", who, "k", "helpful", 1, n, "q") for who in ("often", "rare") for n in range(5)
    }
    assert sorted(feedback._newest(votes)) == [f"{who}{n}" for who in ("often", "rare") for n in (2, 3, 4)]


@pytest.mark.parametrize(
    "counts, most, share",
    [
        ([5, 5], 10, 10),
        ([1, 2], 10, 10),
        ([100, 1], 10, 9),
        ([9, 9, 2], 10, 4),
        ([3, 3, 3], 2, 1),
        ([], 10, 10),
    ],
)
def test_shares_are_equal_as_far_as_there_is_something_to_share(counts, most, share):
    assert feedback._share(counts, most=most) == share


def test_more_keys_than_tables_are_kept_each_keep_theirs():
    known = feedback._Known()
    for n in range(3 * feedback.TABLES_KEPT):
        known.keep((60_000, f"key {n}"), rate([], as_of_ms=60_000), votes=100)
    assert len(known.tables) == 3 * feedback.TABLES_KEPT
    for n in range(3 * feedback.TABLES_KEPT):
        known.keep((n, None), rate([], as_of_ms=n), votes=feedback.MOST_VOTES // 2)
    assert sum(key is None for _, key in known.tables) == feedback.TABLES_KEPT
    assert len(known.tables) == 4 * feedback.TABLES_KEPT
    assert known.latest(None) is known.table(3 * feedback.TABLES_KEPT - 1, None)
    for n in range(40):
        known.keep((n, "heavy"), rate([], as_of_ms=n), votes=feedback.MOST_VOTES)
    assert sum(votes for _, votes in known.tables.values()) <= feedback.TABLES_KEPT * feedback.MOST_VOTES


async def test_a_profile_turns_it_on_and_a_request_off(client, collection, cluster):
    order = [hit["id"] for hit in ranked(client, collection)["hits"]]
    await fill(cluster, collection, order[2], "helpful", voters=60)
    made = client.put(
        f"/v1/collections/{collection}",
        json={"profiles": {"voted": {"feedback": {"strength": 0.2}}}, "default_profile": "voted"},
    )
    assert made.status_code == 200, made.text
    for _ in range(40):  # the catalog remembers a collection for some seconds
        if ranked(client, collection)["hits"][0]["id"] == order[2]:
            break
        await asyncio.sleep(0.25)
    assert ranked(client, collection)["hits"][0]["id"] == order[2]
    assert ranked(client, collection, feedback="off")["hits"][0]["id"] == order[0]


async def test_keys_vote_on_their_own_searches_and_are_ranked_by_their_own_part(
    node_url, embedding, cluster, client, collection
):
    def key(name: str, **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "hash": hash_of(f"hlf_{name}"),
            "scopes": ["read"],
            "collections": [collection],
            **more,
        }

    keys = [
        key("whole"),
        key("part", filter={"title": "Leave 1"}),
        {**key("foreign"), "collections": ["elsewhere"]},
    ]
    with serving(lasting(node_url, embedding, search_log_rate=1.0, keys=json.dumps(keys))) as running:

        def by(name: str) -> httpx2.Client:
            return httpx2.Client(
                base_url=running.url, timeout=60, headers={"Authorization": f"Bearer hlf_{name}"}
            )

        with by("whole") as whole, by("part") as part, by("foreign") as foreign:
            answer = ranked(whole, collection)
            order = [hit["id"] for hit in answer["hits"]]
            item = {"id": order[3], "verdict": "clicked"}
            for other in (part, foreign):
                told = vote(other, answer["search_id"], item)
                assert told.status_code == 404
                assert told.json()["field"] == "search_id"
            assert vote(whole, answer["search_id"], item).json()["items"][0]["status"] == "created"
            assert (await logged(cluster, answer["search_id"]))["key_id"] == "whole"
            await fill(cluster, collection, "leave-1", "clicked", voters=40)
            assert "feedback" in next(
                hit for hit in with_ratings(whole, collection, feedback={})["hits"] if hit["id"] == "leave-1"
            )
            [only] = with_ratings(part, collection, feedback={})["hits"]
            assert only["id"] == "leave-1"
            assert "feedback" not in only


@pytest.mark.parametrize("strength", [0, 0.31, "much"])
def test_a_strength_out_of_bounds_is_refused(client, collection, strength):
    told = client.post(
        "/v1/search", json={"collection": collection, "query": "x", "feedback": {"strength": strength}}
    )
    assert told.status_code == 422
    assert told.json()["field"] == "feedback.strength"


async def test_judgements_come_out_of_the_log(client, collection, cluster, tmp_path):
    answer = ask(client, collection, query="carry over rule", as_of="2026-06-30")
    good, bad = answer["hits"][1]["id"], answer["hits"][0]["id"]
    for user in ("a", "b"):
        vote(client, answer["search_id"], {"id": good, "verdict": "helpful"},
             {"id": bad, "verdict": "ignored"}, user=user)  # fmt: skip
    silent = ask(client, collection, query="nobody judged this")
    assert silent["search_id"]
    await cluster.refresh("halflife_feedback")
    await cluster.refresh("halflife_searches")
    known = (await catalog.get(cluster, collection)).collection
    found = [each async for each in judgements(cluster, known)]
    assert [(each.text, dict(each.grades)) for each in found] == [("carry over rule", {good: 2, bad: 0})]
    assert found[0].as_of == datetime(2026, 6, 30, tzinfo=UTC)
    assert write(found, tmp_path / "judged") == Written(questions=1, judgements=2, left_out=0)
    read = read_set(tmp_path / "judged")
    assert [(each.text, each.grades) for each in read.questions] == [("carry over rule", {good: 2, bad: 0})]


ODD_IDS = ("a\tb", " a", "a\n", "a\rb", "a\u3000")


def test_judgements_of_ids_that_no_line_can_hold_are_left_out_and_counted(tmp_path):
    asked = datetime(2026, 6, 30, tzinfo=UTC)
    good = {"a b": 2, "x\u2028y": 1, "#1": 0}
    found = [
        JudgedQuery("h1", "one", asked, {**good, **dict.fromkeys(ODD_IDS, 1)}),
        JudgedQuery("h2", "two", asked, dict.fromkeys(ODD_IDS, 1)),
    ]
    assert write(found, tmp_path / "judged") == Written(questions=1, judgements=3, left_out=10)
    [question] = read_set(tmp_path / "judged").questions
    assert (question.text, question.grades) == ("one", good)
    assert write(found[1:], tmp_path / "nothing") == Written(questions=0, judgements=0, left_out=5)
    assert not (tmp_path / "nothing").exists()


def test_votes_count_from_the_minute_after_them():
    minute = 60_000
    # As of 10:01:00, which is read once five seconds have settled it.
    assert [counted_from(at) for at in (minute * 10 + 1, minute * 11 - 1, minute * 11)] == [665_000] * 3
