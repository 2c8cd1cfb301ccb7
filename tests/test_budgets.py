"""What one request may cost and take, on a real node behind a relay that counts, and that can hold requests back.

Nothing here is timed: that a budget holds shows in which call was given up, and in what the answer says of it.
"""

import asyncio
import json
import re
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx2
import pytest

from app import edge, watching
from tests.fakes import EmbeddingServer, Reply, RerankServer
from tests.service import Running, serving, settings_for, until

pytestmark = pytest.mark.node
DIMS = 16
_REQUEST = re.compile(rb"(GET|POST|PUT|DELETE|HEAD) (\S+) HTTP/1\.1\r\n")


class Relay:
    """Stands before the node on a port of its own; use as a context manager.

    `paths` are those of the requests that came and were not closing something. A request whose path holds `hold` is not handed on: `held` counts
    these, `left` those of them whose caller closed the connection. One whose path holds a key of `breaks` is broken off,
    as often as that says.
    """

    def __init__(self, node_url: str) -> None:
        parts = urlsplit(node_url)
        self._host, self._node_port = parts.hostname or "", parts.port or 9200
        self.paths: list[str] = []
        self.hold = ""
        self.breaks: dict[str, int] = {}
        self.held = self.left = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            node_reader, node_writer = await asyncio.open_connection(self._host, self._node_port)
        except OSError:
            self._tasks.discard(task)
            writer.transport.abort()
            return
        back = asyncio.ensure_future(self._pump_back(node_reader, writer))
        try:
            with suppress(ConnectionError, asyncio.CancelledError):
                await self._pump(reader, node_writer)
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            node_writer.transport.abort()
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, node: asyncio.StreamWriter) -> None:
        while part := await reader.read(65_536):
            begun = _REQUEST.match(part)
            if begun:
                path = begun[2].decode()
                # A point in time of a search before is closed behind its answer.
                if (begun[1], path) != (b"DELETE", "/_pit"):
                    self.paths.append(path)
                for broken in [each for each in self.breaks if self.breaks[each] and each in path]:
                    self.breaks[broken] -= 1
                    return
                if self.hold and self.hold in path:
                    self.held += 1
                    while await reader.read(65_536):
                        pass
                    self.left += 1
                    return
            node.write(part)
            await node.drain()

    async def _pump_back(self, node: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while part := await node.read(65_536):
                writer.write(part)
                await writer.drain()
            writer.close()


@pytest.fixture(scope="module")
def relay(node_url: str) -> Iterator[Relay]:
    with Relay(node_url) as relay:
        yield relay


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def reranking() -> Iterator[RerankServer]:
    with RerankServer() as server:
        yield server


@pytest.fixture(scope="module")
def service(relay: Relay, embedding: EmbeddingServer, reranking: RerankServer) -> Iterator[Running]:
    settings = settings_for(
        relay.url,
        embedding.base_url,
        dims=DIMS,
        embedding_query_timeout_s=30,
        rerank_url=reranking.url,
        rerank_timeout_s=30,
        max_query_chars=200,
        max_top_k=50,
        max_window=200,
        max_filter_depth=3,
        max_filter_values=10,
        max_queries=3,
        max_documents=5,
        max_body_bytes=20_000,
    )
    # What it asks by itself would be taken for what a request asks: its census is over when the tests begin.
    with patch.object(watching, "CENSUS_EVERY_S", 3600), serving(settings) as running:
        until(lambda: counted_at(running.client) > 0)
        yield running


def counted_at(client: httpx2.Client) -> float:
    """Return when the service last counted its documents, in seconds from 1970, 0 if never."""
    found = re.search(r"^halflife_census_timestamp_seconds (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def client(service: Running) -> httpx2.Client:
    return service.client


@pytest.fixture(scope="module")
def collection(client: httpx2.Client) -> Iterator[str]:
    name = f"budget_{uuid.uuid4().hex[:8]}"
    documents = [{"id": f"{at}", "text": f"slow words {at}", "lang": "en"} for at in range(5)]
    stored = client.post(
        f"/v1/collections/{name}/documents", json={"documents": documents, "refresh": "true"}
    )
    assert stored.status_code == 200, stored.text
    yield name
    client.delete(f"/v1/collections/{name}", params={"confirm": name})


@pytest.fixture(autouse=True)
def honest(relay: Relay, embedding: EmbeddingServer, reranking: RerankServer) -> Iterator[None]:
    """Everything answers again after a test, and nothing that hung is waited for."""
    yield
    relay.hold = ""
    embedding.poison.clear()
    reranking.script.clear()


# --- a budget over its parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["header", "field"])
def test_an_embedder_that_hangs_leaves_time_for_the_words(client, collection, embedding, how):
    query = f"slow words by {how}"
    embedding.poison[query] = Reply(hang=True)
    abandoned = embedding.abandoned
    body: dict[str, Any] = {"collection": collection, "query": query}
    headers = {}
    if how == "header":
        headers["X-Halflife-Timeout-Ms"] = "8000"
    else:
        body["timeout_ms"] = 8000
    answer = client.post("/v1/search", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["degraded"]
    assert [hit["id"] for hit in told["hits"]]
    assert (told["routes"]["text"]["status"], told["routes"]["vector"]["status"]) == ("ok", "failed")
    until(lambda: embedding.abandoned == abandoned + 1)


@pytest.mark.parametrize("where", ["_pit", "_msearch"])
def test_a_caller_in_a_hurry_is_told_so_and_not_that_the_cluster_is_away(client, collection, relay, where):
    body = {"collection": collection, "query": "slow words", "timeout_ms": 50, "routes": [{"kind": "text"}]}
    relay.hold = where
    try:
        for _ in range(12):
            answer = client.post("/v1/search", json=body)
            assert answer.status_code == 504, answer.text
            assert answer.json()["type"] == "urn:halflife:problem:deadline-exceeded"
            assert "timeout_ms" in answer.json()["remedy"]
    finally:
        relay.hold = ""
    # Twelve of them say nothing of the cluster: others are served as before.
    assert client.post("/v1/search", json={**body, "timeout_ms": 20_000}).status_code == 200


def test_callers_whose_time_is_short_put_nobody_off_a_cluster_that_answers(
    client, collection, relay, service, caplog
):
    body = {"collection": collection, "query": "slow words", "timeout_ms": 6000, "routes": [{"kind": "text"}]}
    relay.hold = "_msearch"
    held, left = relay.held, relay.left
    with ThreadPoolExecutor(12) as callers:
        asked = [callers.submit(client.post, "/v1/search", json=body) for _ in range(12)]
        until(lambda: relay.held - held == 12)
        # The node is up: what others ask is answered meanwhile.
        assert client.get(f"/v1/collections/{collection}/documents").status_code == 200
        answers = [each.result() for each in asked]
    assert {answer.status_code for answer in answers} == {504}
    assert {answer.json()["type"] for answer in answers} == {"urn:halflife:problem:deadline-exceeded"}
    until(lambda: relay.left - left == 12)
    relay.hold = ""
    answer = client.post("/v1/search", json={**body, "timeout_ms": 20_000})
    assert answer.status_code == 200, answer.text
    assert not [record for record in caplog.records if "second timeout" in record.getMessage()]


def test_a_write_gives_up_an_embedder_that_answers_nobody(relay, embedding, collection):
    settings = settings_for(
        relay.url, embedding.base_url, dims=DIMS, embedding_timeout_s=0.5, embedding_stall_s=0.5
    )
    embedding.poison["a text that hangs"] = Reply(hang=True)
    with serving(settings) as running:
        abandoned = embedding.abandoned
        answer = running.client.post(
            f"/v1/collections/{collection}/documents",
            json={"documents": [{"id": "hung", "text": "a text that hangs"}]},
        )
    assert answer.status_code == 503, answer.text
    told = answer.json()
    assert told["type"] == "urn:halflife:problem:embedder-unavailable"
    assert "has answered nobody for 0.5 s" in told["detail"]
    assert "HALFLIFE_EMBEDDING_STALL_S" in told["remedy"]
    assert answer.headers["retry-after"]
    assert [item["status"] for item in told["items"]] == ["failed"]
    until(lambda: embedding.abandoned == abandoned + 1)


def test_a_cluster_that_is_away_for_a_moment_ends_no_start(node_url, embedding):
    parts = ("/halflife-mappings", "/halflife-searches", "/halflife-feedback")
    with Relay(node_url) as shaky:
        settings = settings_for(shaky.url, embedding.base_url, dims=DIMS, search_log_rate=1.0)
        with serving(settings):
            pass
        assert all(any(path.endswith(part) for path in shaky.paths) for part in parts)
        shaky.breaks = dict.fromkeys(parts, 4)
        with serving(settings) as running:
            assert running.client.get("/readyz").json()["status"] == "ready"
        assert shaky.breaks == dict.fromkeys(parts, 0)


def test_a_reranker_that_hangs_leaves_the_fused_order(client, collection, reranking, monkeypatch):
    # All the time that is left goes to the reranker: what comes after it must not be cut off here.
    monkeypatch.setattr(edge, "GRACE_S", 20.0)
    plain = client.post("/v1/search", json={"collection": collection, "query": "slow words 3"}).json()
    reranking.script.append(Reply(hang=True))
    abandoned = reranking.abandoned
    answer = client.post(
        "/v1/search",
        json={"collection": collection, "query": "slow words 3", "rerank": {}},
        headers={"X-Halflife-Timeout-Ms": "1500"},
    )
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["degraded"]
    assert [hit["id"] for hit in told["hits"]] == [hit["id"] for hit in plain["hits"]]
    until(lambda: reranking.abandoned == abandoned + 1)


@pytest.mark.parametrize("path", ["/_msearch", "/_pit"])
def test_a_cluster_that_hangs_is_given_up_within_the_budget(client, collection, relay, path):
    relay.hold = path
    left = relay.left
    answer = client.post(
        "/v1/search",
        json={"collection": collection, "query": "slow words"},
        headers={"X-Halflife-Timeout-Ms": "700"},
    )
    assert answer.status_code in (503, 504), answer.text
    assert answer.headers["retry-after"]
    until(lambda: relay.left > left)


def test_a_list_past_its_budget_is_ended(client, collection, relay):
    relay.hold = "/_search"
    left = relay.left
    answer = client.get(f"/v1/collections/{collection}/documents", headers={"X-Halflife-Timeout-Ms": "3000"})
    assert answer.status_code == 504
    assert answer.json()["type"] == "urn:halflife:problem:deadline-exceeded"
    until(lambda: relay.left > left)


# --- a caller who hangs up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/search", "/v1/why"])
def test_the_clusters_work_is_closed_when_the_caller_hangs_up(service, collection, relay, path):
    relay.hold = "/_msearch"
    held, left = relay.held, relay.left
    body = {"collection": collection, "query": "slow words", **({"id": "1"} if path == "/v1/why" else {})}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(service.url + path, json=body, timeout=httpx2.Timeout(10, read=3))
    until(lambda: relay.left - left == relay.held - held > 0)


def test_a_write_goes_on_when_the_caller_hangs_up(service, client, collection, embedding):
    body = {"documents": [{"id": "late", "text": "written all the same"}]}
    embedding.script.append(lambda seen, honest: Reply(honest.status, honest.body, delay_s=4.0))
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(
            f"{service.url}/v1/collections/{collection}/documents",
            json=body,
            timeout=httpx2.Timeout(10, read=0.3),
        )
    until(lambda: client.get(f"/v1/collections/{collection}/documents/late").status_code == 200)


# --- limits ----------------------------------------------------------------------------------------------------------------------

DEEP: dict[str, Any] = {"lang": "en"}
for _ in range(4):
    DEEP = {"not": DEEP}
OVER: dict[str, tuple[str, dict[str, Any], str]] = {
    "query": ("/v1/search", {"query": "x" * 201}, "query"),
    "top_k": ("/v1/search", {"query": "x", "top_k": 51}, "top_k"),
    "window": ("/v1/search", {"query": "x", "fusion": {"window": 201}}, "fusion.window"),
    "depth": ("/v1/search", {"query": "x", "filter": DEEP}, "filter.not.not.not"),
    "values": ("/v1/search", {"query": "x", "filter": {"lang": list("abcdefghijk")}}, "filter.lang"),
    "why": ("/v1/why", {"query": "x" * 201, "id": "1"}, "query"),
    "queries": ("/v1/search", {"queries": ["x"] * 4}, "queries"),
    "documents": ("documents", {"documents": [{"id": f"{at}", "text": "x"} for at in range(6)]}, "documents"),
    "ids": ("documents/delete", {"ids": list("abcdef")}, "ids"),
    "documents to delete": (
        "documents/delete",
        {"documents": [{"id": id_} for id_ in "abcdef"]},
        "documents",
    ),
    "a delete's filter": ("documents/delete", {"filter": {"lang": list("abcdefghijk")}}, "filter.lang"),
}


@pytest.mark.parametrize("name", OVER)
def test_each_limit_is_told_before_anything_is_asked(client, collection, relay, embedding, name):
    path, body, field = OVER[name]
    asked, embedded = len(relay.paths), len(embedding.batches)
    if path.startswith("/"):
        answer = client.post(path, json={"collection": collection, **body})
    else:
        answer = client.post(f"/v1/collections/{collection}/{path}", json=body)
    assert answer.status_code == 422, answer.text
    told = answer.json()
    assert (told["type"], told["field"]) == ("urn:halflife:problem:limit-exceeded", field)
    assert told["remedy"]
    assert (len(relay.paths), len(embedding.batches)) == (asked, embedded)


def test_a_query_over_the_limit_spoils_its_place_in_a_batch_alone(client, collection):
    answer = client.post("/v1/search", json={"collection": collection, "queries": ["slow words", "x" * 201]})
    first, second = answer.json()["results"]
    assert first["hits"]
    assert (second["status"], second["query"]) == (422, 1)


def test_a_page_whose_length_is_left_open_keeps_to_the_limit(node_url, embedding, collection):
    settings = settings_for(node_url, embedding.base_url, dims=DIMS, max_top_k=2)
    documents = [{"id": f"{at}", "text": f"slow words {at}"} for at in range(5)]
    with serving(settings) as running:
        ask, path = running.client, f"/v1/collections/{collection}/documents"
        assert ask.post(path, json={"documents": documents, "refresh": "true"}).json()["failed"] == 0
        asked = {"collection": collection, "query": "slow words"}
        answer = ask.post("/v1/search", json=asked).json()
        told = [len(answer["hits"])]
        while answer.get("cursor"):
            answer = ask.post("/v1/search", json={"cursor": answer["cursor"]}).json()
            told.append(len(answer["hits"]))
        assert (set(told[:-1]), sum(told) >= 5) == ({2}, True)
        assert len(ask.post("/v1/search", json={**asked, "fusion": {"window": 1}}).json()["hits"]) == 1
        [one] = ask.post("/v1/search", json={"collection": collection, "queries": ["slow words"]}).json()[
            "results"
        ]
        assert len(one["hits"]) == 2
        assert ask.post("/v1/why", json={**asked, "id": "1"}).json()["top_k"] == 2
        refused = ask.post("/v1/search", json={**asked, "top_k": 3})
        assert (refused.status_code, refused.json()["field"]) == (422, "top_k")


def test_a_body_over_the_limit(client, collection):
    answer = client.post("/v1/search", json={"collection": collection, "query": "x" * 21_000})
    assert (answer.status_code, answer.json()["limit"]) == (413, 20_000)


# --- filters are data --------------------------------------------------------------------------------------------------------------

INJECTIONS: dict[str, Any] = {
    "a bool": {"bool": {"must_not": {"term": {"lang": "en"}}}},
    "a script": {"script": {"script": {"source": "true"}}},
    "a query string": {"query_string": {"query": "*"}},
    "match all": {"match_all": {}},
    "a wildcard": {"lang": {"wildcard": "*"}},
    "a regexp": {"lang": {"regexp": ".*"}},
    "a term": {"lang": {"term": "en"}},
    "a join": {"lang": {"terms": {"index": "halflife_state", "id": "1", "path": "x"}}},
    "operators of others": {"lang": {"$ne": "en"}},
    "an or that is no list": {"or": {"lang": "en"}},
    "a field of ours": {"deleted": True},
    "the chunks": {"chunks": {"exists": True}},
    "the typed copies": {"declared": {"exists": True}},
    "an object for a value": {"lang": {"in": [{"x": 1}]}},
    "null": {"lang": None},
    "a list in a list": {"lang": [["en"]]},
    "NUL": {"a\0b": 1},
    "a surrogate's half": None,
}


@pytest.mark.parametrize("where", ["search", "route", "batch", "why", "list", "delete"])
@pytest.mark.parametrize("name", INJECTIONS)
def test_a_query_in_a_filter_is_refused_and_the_cluster_hears_nothing(
    client, collection, relay, embedding, name, where
):
    text = '{"lang": "\\ud800"}' if INJECTIONS[name] is None else json.dumps(INJECTIONS[name])
    documents = f"/v1/collections/{collection}/documents"
    search = f'"collection": "{collection}", "query": "x"'
    method, path, body = {
        "search": ("POST", "/v1/search", f'{{{search}, "filter": {text}}}'),
        "route": ("POST", "/v1/search", f'{{{search}, "routes": [{{"kind": "text", "filter": {text}}}]}}'),
        "batch": (
            "POST",
            "/v1/search",
            f'{{"collection": "{collection}", "filter": {text}, "queries": ["x", "y"]}}',
        ),
        "why": ("POST", "/v1/why", f'{{{search}, "id": "1", "filter": {text}}}'),
        "list": ("GET", documents, ""),
        "delete": ("POST", f"{documents}/delete", f'{{"filter": {text}}}'),
    }[where]
    asked, embedded = len(relay.paths), len(embedding.batches)
    params = {"filter": text} if where == "list" else None
    answer = client.request(method, path, content=body, params=params)
    assert answer.status_code == 422, answer.text
    assert (len(relay.paths), len(embedding.batches)) == (asked, embedded), relay.paths[asked:]
