"""`touch: true` over HTTP: exactly the returned documents, never back in time, and nothing else of them changed."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import pytest

from app.settings import Settings
from app.times import format_instant
from tests.fakes import EmbeddingServer
from tests.service import Running, serving, settings_for

pytestmark = pytest.mark.node
DIMS = 4
NEAR = {"kind": "vector"}
MEMORY: dict[str, Any] = {
    "fusion": {"method": "additive"},
    "decay": {"hourly_loss": 0.01, "field": "last_accessed_at"},
}


def clock(hours: float = 0) -> str:
    """Return the instant that many hours from now, in whole milliseconds."""
    return format_instant(datetime.now(UTC) + timedelta(hours=hours))


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def settings(node_url: str, embedding: EmbeddingServer) -> Callable[..., Settings]:
    def make(**options: Any) -> Settings:
        return settings_for(node_url, embedding.base_url, dims=DIMS,
            **options,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def service(settings: Callable[..., Settings]) -> Iterator[Running]:
    with serving(settings()) as running:
        yield running


class Memories:
    """A collection of five memories, all last read 48 hours ago, and a marker to wait for touches by."""

    def __init__(self, client: httpx2.Client) -> None:
        self.client = client
        self.name = f"touch_{uuid.uuid4().hex[:10]}"
        self.before = clock(-48)
        memories = [
            {"id": f"m{at}", "text": f"memory number {at}", "embedding": [1, at / 10, 0, 0],
             "creation_time": "2024-01-01T00:00:00.000Z", "last_accessed_at": self.before, "metadata": {"odd": at % 2}}
            for at in range(1, 6)
        ]  # fmt: skip
        marker = {"id": "marker", "text": "marker", "embedding": [0, 0, 0, 1], "lang": "xx"}
        body = {"documents": [*memories, marker], "refresh": "wait_for"}
        answer = client.post(f"/v1/collections/{self.name}/documents", json=body)
        assert answer.json()["failed"] == 0, answer.text

    def search(self, **options: Any) -> httpx2.Response:
        """Ask for the memories, nearest to the first of them."""
        body = {"collection": self.name, "query": "memory", "query_vector": [1, 0, 0, 0], "routes": [NEAR], "filter":
                {"not": {"lang": "xx"}}, **options}  # fmt: skip
        return self.client.post("/v1/search", json=body)

    def stored(self, id_: str) -> dict[str, Any]:
        """Return the document as it is now."""
        answer = self.client.get(f"/v1/collections/{self.name}/documents/{id_}")
        return {"status": answer.status_code, **answer.json()}

    def settled(self) -> None:
        """Wait until every touch that was asked for before has been written: the marker's is the last in its queue."""
        at = clock()
        answer = self.search(filter={"id": "marker"}, touch=True, as_of=at)
        assert [hit["id"] for hit in answer.json()["hits"]] == ["marker"]
        deadline = time.monotonic() + 60
        while self.stored("marker").get("last_accessed_at") != at:
            assert time.monotonic() < deadline, "the touch of the marker was never written"
            time.sleep(0.05)


@pytest.fixture
def memories(service: Running) -> Iterator[Memories]:
    made = Memories(service.client)
    yield made
    service.client.delete(f"/v1/collections/{made.name}", params={"confirm": made.name})


def test_memory_decay_bc55_exactly_what_was_returned_is_touched_and_nothing_else_of_it_changes(
    memories: Memories, settings: Callable[..., Settings]
) -> None:
    whole = {f"m{at}": memories.stored(f"m{at}") for at in range(1, 6)}
    now = clock()
    answer = memories.search(top_k=2, touch=True, as_of=now, include_embedding=True, **MEMORY).json()
    assert [hit["id"] for hit in answer["hits"]] == ["m1", "m2"]
    assert answer["touched"] == 2
    assert "touched" not in memories.search(top_k=2, as_of=now).json()
    for hit in answer["hits"]:
        # The age before the touch counts.
        assert hit["age_days"] == pytest.approx(2, abs=1e-3)
        assert hit["additive"]["recency"] == pytest.approx(0.99**48, abs=1e-4)
    memories.settled()
    for id_, before in whole.items():
        after = memories.stored(id_)
        if id_ in ("m1", "m2"):
            assert after["last_accessed_at"] == now
            assert after["version"] > before["version"]
            unchanged = {"last_accessed_at": before["last_accessed_at"], "version": before["version"]}
            assert {**after, **unchanged} == before, "text, dates and metadata are as they were"
        else:
            assert after == before, "a candidate that was not returned is not touched"
    versions = {id_: memories.stored(id_)["version"] for id_ in whole}
    with serving(settings()) as restarted:
        memories.client = restarted.client
        assert [memories.stored(id_)["last_accessed_at"] for id_ in ("m1", "m3")] == [now, memories.before]
        again = memories.search(top_k=2, include_embedding=True).json()
        assert [hit["id"] for hit in again["hits"]] == ["m1", "m2"], "found by the vectors that they kept"
        assert [hit["embedding"] for hit in again["hits"]] == [hit["embedding"] for hit in answer["hits"]]
        memories.settled()
        assert {id_: memories.stored(id_)["version"] for id_ in whole} == versions, (
            "without `touch` nothing is written"
        )


def test_memory_decay_bc55_filters_and_pages_touch_what_they_return(memories: Memories) -> None:
    now = clock(-1)
    first = memories.search(filter={"odd": 1}, top_k=1, touch=True, as_of=now).json()
    second = memories.client.post("/v1/search", json={"cursor": first["cursor"]}).json()
    assert [hit["id"] for hit in [*first["hits"], *second["hits"]]] == ["m1", "m3"]
    batch = {
        "queries": [
            {"query": "x", "filter": {"id": "m2"}},
            {"query": "x", "filter": {"id": "m4"}, "touch": False},
        ]
    }
    body = {"collection": memories.name, "routes": [NEAR], "touch": True, "as_of": now, **batch}
    assert memories.client.post("/v1/search", json=body).status_code == 200
    memories.settled()
    times = {id_: memories.stored(id_)["last_accessed_at"] for id_ in ("m1", "m2", "m3", "m4", "m5")}
    assert times == {"m1": now, "m2": now, "m3": now, "m4": memories.before, "m5": memories.before}


def test_a_touch_never_moves_time_back(memories: Memories) -> None:
    later = clock(-1)
    for as_of in (later, clock(-100), clock(-2)):
        memories.search(top_k=1, touch=True, as_of=as_of)
        memories.settled()
        assert memories.stored("m1")["last_accessed_at"] == later
    version = memories.stored("m1")["version"]
    memories.search(top_k=1, touch=True, as_of="2024-06-01")
    memories.settled()
    assert memories.stored("m1")["version"] == version, "nothing was written for it"


def test_a_touch_in_the_far_future_is_refused_and_a_virtual_clock_runs_ahead(
    memories: Memories, settings: Callable[..., Settings]
) -> None:
    for as_of in ("9999-12-31T23:59:59.999Z", clock(24 * 367)):
        answer = memories.search(touch=True, as_of=as_of)
        assert (answer.status_code, answer.json()["field"]) == (422, "touch")
        assert "HALFLIFE_TOUCH_AHEAD_S" in answer.json()["remedy"]
        assert memories.search(as_of=as_of).status_code == 200
    slightly = clock(20 / 3600)
    assert memories.search(top_k=1, touch=True, as_of=slightly).status_code == 200, "clocks differ a little"
    body = {
        "collection": memories.name,
        "queries": [{"query": "x", "as_of": "9999-01-01", "touch": True}, "memory"],
    }
    bad, good = memories.client.post("/v1/search", json=body).json()["results"]
    assert (bad["status"], bad["field"]) == (422, "touch")
    assert good["hits"]
    memories.settled()
    assert memories.stored("m1")["last_accessed_at"] == slightly
    assert memories.stored("m2")["last_accessed_at"] == memories.before
    with serving(settings()) as virtual:
        memories.client = virtual.client
        # Days of reading in a moment: each day's memory has one day's less recency.
        for day in range(1, 4):
            hit = memories.search(filter={"id": "m5"}, touch=True, as_of=clock(24 * day), **MEMORY).json()[
                "hits"
            ][0]
            assert hit["additive"]["recency"] == pytest.approx(0.99 ** (72 if day == 1 else 24), abs=1e-3)
            memories.settled()
            memories.client.post(
                f"/v1/collections/{memories.name}/documents",
                json={"documents": [{"id": "shown", "text": f"day {day}"}], "refresh": "true"},
            )


def test_memory_decay_bc57_forty_parallel_readers_leave_the_latest(memories: Memories) -> None:
    moments = [clock(-24 + at / 10) for at in range(40)]

    def read(at: int) -> httpx2.Response:
        return memories.search(filter={"id": "m1"}, touch=True, as_of=moments[at * 7 % 40])

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(read, range(40)))
    assert [answer.status_code for answer in answers] == [200] * 40
    assert all([hit["id"] for hit in answer.json()["hits"]] == ["m1"] for answer in answers)
    memories.settled()
    assert memories.stored("m1")["last_accessed_at"] == max(moments)
    assert memories.search(filter={"id": "m1"}).json()["hits"][0]["relevance"] == pytest.approx(
        1 / 1.01**0.5, abs=1e-3
    )


def test_memory_decay_bc57_a_deleted_document_stays_deleted_under_touches(memories: Memories) -> None:
    def read(at: int) -> int:
        return memories.search(top_k=5, touch=True, as_of=clock(-20 + at)).status_code

    with ThreadPoolExecutor(6) as pool:
        reading = [pool.submit(read, at) for at in range(5)]
        deleted = memories.client.post(
            f"/v1/collections/{memories.name}/documents/delete", json={"ids": ["m1"], "refresh": "true"}
        )
        assert deleted.json()["items"][0]["status"] == "deleted"
        assert {each.result() for each in reading} == {200}
    memories.settled()
    assert memories.stored("m1")["status"] == 404
    assert [hit["id"] for hit in memories.search().json()["hits"]] == ["m2", "m3", "m4", "m5"]
