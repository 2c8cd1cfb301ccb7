"""What operators see: metrics, spans, log lines, readiness, request ids, and the end of a process."""

import asyncio
import http.server
import json
import logging
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from app import logs, moves, observing, watching
from app.errors import InvalidRequest, Overloaded
from app.guarding import Guard
from app.metering import Metering
from app.settings import EmbeddingModel, Settings
from app.watching import Watch
from scripts.stack import python_command
from scripts.supervisor import free_port
from tests.fakes import EmbeddingServer, Reply, RerankServer
from tests.service import Running, serving, settings_for, until

DIMS = 16


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def reranker() -> Iterator[RerankServer]:
    with RerankServer() as server:
        yield server


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def tracing(spans: InMemorySpanExporter) -> Iterator[observing.Tracing]:
    made = observing.trace_with(spans, service="halflife-test", version="0")
    yield made
    made.close()


@pytest.fixture(scope="module")
def service(
    node_url: str, embedding: EmbeddingServer, reranker: RerankServer, tracing: observing.Tracing
) -> Iterator[Running]:
    settings = settings_for(
        node_url,
        embedding.base_url,
        dims=DIMS,
        rerank_url=f"{reranker.url}/rerank",
    )
    with serving(settings) as running:
        yield running


@pytest.fixture
def client(service: Running) -> httpx2.Client:
    return service.client


@pytest.fixture(scope="module")
def collection(service: Running) -> Iterator[str]:
    name = f"seen_{uuid.uuid4().hex[:10]}"
    documents = [{"id": str(n), "text": f"word {n} unspeakable"} for n in range(3)]
    answer = service.client.post(
        f"/v1/collections/{name}/documents", json={"documents": documents, "refresh": "wait_for"}
    )
    assert answer.status_code == 200, answer.text
    yield name
    service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


def samples(client: httpx2.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of /metrics, as Prometheus' own parser reads it."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(client: httpx2.Client, name: str, **labels: str) -> float:
    return sum(
        value
        for (found, has), value in samples(client).items()
        if found == name and labels.items() <= dict(has).items()
    )


def settled(client: httpx2.Client, name: str, wanted: float, **labels: str) -> float:
    """The sum once it has come so far: a request is counted just after its answer has gone out."""
    deadline = time.monotonic() + 5
    while (found := total(client, name, **labels)) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def search(client: httpx2.Client, collection: str, **more: Any) -> httpx2.Response:
    return client.post("/v1/search", json={"collection": collection, "query": f"word {uuid.uuid4()}", **more})


# --- metrics ---------------------------------------------------------------------------------------------------------


@pytest.mark.node
@pytest.mark.parametrize(
    "name, labels",
    [
        ("halflife_request_seconds_count", {"route": "/v1/search", "method": "POST", "status": "200"}),
        ("halflife_stage_seconds_count", {"stage": "recall"}),
        ("halflife_stage_seconds_count", {"stage": "embed query"}),
        ("halflife_stage_seconds_count", {"stage": "fetch"}),
        ("halflife_recall_route_seconds_count", {"kind": "text"}),
        ("halflife_recall_route_seconds_count", {"kind": "vector"}),
        ("halflife_fused_candidates_count", {}),
        ("halflife_searches_total", {"answer": "whole"}),
        ("halflife_embedding_cache_total", {"result": "sent"}),
        ("halflife_dependency_seconds_count", {"dependency": "embedder", "outcome": "ok"}),
    ],
)  # fmt: skip
def test_one_search_is_counted(client, collection, name, labels):
    before = total(client, name, **labels)
    assert search(client, collection).status_code == 200
    assert settled(client, name, before + 1, **labels) >= before + 1


@pytest.mark.node
def test_refusals_degraded_answers_and_items_are_counted(client, collection, embedding):
    refused = total(client, "halflife_request_seconds_count", route="/v1/search", status="422")
    degraded = total(client, "halflife_searches_total", answer="degraded")
    causes = total(client, "halflife_degraded_total", cause="embedder-rejected")
    invalid = total(client, "halflife_items_total", status="invalid")
    cached = total(client, "halflife_embedding_cache_total", result="hit")
    assert client.post("/v1/search", json={"collection": collection}).status_code == 422
    embedding.script = [Reply(404, {})]
    assert search(client, collection).json()["degraded"]
    documents = [{"id": "3", "text": "word"}, {"id": "..", "text": "word"}]
    client.post(f"/v1/collections/{collection}/documents", json={"documents": documents})
    for _ in range(2):
        client.post("/v1/search", json={"collection": collection, "query": "asked twice"})
    assert (
        settled(client, "halflife_request_seconds_count", refused + 1, route="/v1/search", status="422")
        == refused + 1
    )
    assert total(client, "halflife_searches_total", answer="degraded") == degraded + 1
    assert total(client, "halflife_degraded_total", cause="embedder-rejected") == causes + 1
    assert total(client, "halflife_items_total", status="invalid") == invalid + 1
    assert total(client, "halflife_embedding_cache_total", result="hit") == cached + 1


@pytest.mark.node
def test_pools_breakers_and_documents_are_told(client, collection):
    for dependency, places in (("elasticsearch", 20), ("embedder", 4), ("reranker", 4)):
        assert total(client, "halflife_pool_size", dependency=dependency) == places
        assert total(client, "halflife_pool_used", dependency=dependency) <= places
        assert total(client, "halflife_breaker_state", dependency=dependency) == 0
    assert "halflife_event_loop_lag_seconds" in {name for name, _ in samples(client)}


@pytest.mark.node
async def test_the_census_counts_documents_without_tombstones(cluster, node_url, client, collection):
    from app.embedding import Embedder
    from app.watching import Watch

    client.delete(f"/v1/collections/{collection}/documents/0", params={"refresh": "wait_for"})
    embedder = Embedder.connect(base_url="http://127.0.0.1:9/v1", api_key=None, model="none", dims=DIMS)
    watch = Watch(cluster=cluster, embedder=embedder, reranker=None, touches_waiting=lambda: 0)
    await watch.census()
    await embedder.close()
    listed = client.get(f"/v1/collections/{collection}/documents", params={"size": 1}).json()["total"]
    assert total(client, "halflife_documents", collection=collection) == listed
    assert total(client, "halflife_census_timestamp_seconds") > 1e9


@pytest.mark.node
@pytest.mark.parametrize("its_own", [True, False], ids=["its own", "of an earlier one"])
async def test_a_reindex_of_an_earlier_collection_of_the_name_is_no_progress(
    cluster, client, collection, its_own
):
    from app.embedding import Embedder
    from app.watching import Watch

    source = client.get(f"/v1/collections/{collection}").json()["index"] if its_own else "gone"
    ledger = moves.Ledger(cluster, collection, owner="test", now=lambda: datetime.now(UTC))
    await ledger.load()
    state = moves.State(
        collection=collection, phase="copying", owner="test", source=source, target="t", total=4, done=1
    )
    await ledger.begin(state)
    embedder = Embedder.connect(base_url="http://127.0.0.1:9/v1", api_key=None, model="none", dims=DIMS)
    try:
        watch = Watch(cluster=cluster, embedder=embedder, reranker=None, touches_waiting=lambda: 0)
        await watch.census()
        told = {
            labels.get("collection") for name, labels in watch_labels() if name == "halflife_reindex_progress"
        }
        assert (collection in told) is its_own
    finally:
        await ledger.save(phase="aborted")
        await watch.census()
        await embedder.close()


def watch_labels() -> list[tuple[str, dict[str, str]]]:
    """Return (name, labels) of every sample of this process."""
    text = observing.exposition()[0].decode()
    return [
        (sample.name, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def test_what_was_refused_before_any_route_has_no_path_in_its_labels(client):
    before = total(client, "halflife_request_seconds_count", route="none", status="404")
    assert client.get("/somewhere/else").status_code == 404
    assert (
        settled(client, "halflife_request_seconds_count", before + 1, route="none", status="404")
        == before + 1
    )
    assert not any("somewhere" in value for _, labels in samples(client) for _, value in labels)


@pytest.mark.node
def test_refusals_tell_their_reason(node_url, embedding):
    settings = settings_for(
        node_url, embedding.base_url, dims=DIMS, max_body_bytes=2000, rate_per_s=0.001, rate_burst=4
    )
    with serving(settings) as running:
        asked = {
            ("too large", "body-too-large"): lambda: running.client.post("/v1/search", content=b"x" * 3000),
            # Without a length it is found out on the way, when the route is known already.
            ("too large ", "body-too-large"): lambda: running.client.post(
                "/v1/search", content=iter([b"x" * 1500] * 2)
            ),
            ("forbidden", "forbidden"): lambda: running.client.post(
                "/v1/search", headers={"Origin": "http://elsewhere.example"}
            ),
            ("invalid", "invalid-request"): lambda: running.client.post(
                "/v1/search", headers={"X-Halflife-Timeout-Ms": "soon"}
            ),
            ("limited", "too-many-requests"): lambda: [
                running.client.get("/v1/collections") for _ in range(4)
            ],
        }
        for (cause, reason), refused in asked.items():
            labels = {"cause": cause.strip(), "reason": reason}
            before = total(running.client, "halflife_refused_requests_total", **labels)
            refused()
            now = settled(running.client, "halflife_refused_requests_total", before + 1, **labels)
            assert now >= before + 1, labels


@pytest.mark.node
def test_a_service_that_nobody_can_use_says_so_at_its_start(node_url, embedding, caplog):
    with serving(settings_for(node_url, embedding.base_url, dims=DIMS, keys="[]")) as running:
        assert running.client.get("/v1/collections").status_code == 401
    assert "nobody can use the service: the list of keys is empty" in caplog.text


async def test_methods_that_nobody_knows_make_no_series_of_their_own():
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 405, "headers": []})

    async def nothing() -> dict[str, Any]:
        return {}

    async def nowhere(message: Any) -> None:
        pass

    for method in ("ONE", "TWO"):
        scope: dict[str, Any] = {"type": "http", "method": method, "path": "/", "state": {}}
        await Metering(answer)(scope, nothing, nowhere)
    told = observing.exposition()[0].decode()
    assert 'method="other"' in told
    assert 'method="ONE"' not in told


# --- spans -----------------------------------------------------------------------------------------------------------


@pytest.mark.node
def test_a_search_is_one_trace_down_to_elasticsearch(client, collection, spans, tracing):
    tracing.flush()
    spans.clear()
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    asked = {"collection": collection, "query": "word never heard before", "rerank": {"candidates": 5}}
    assert client.post("/v1/search", json=asked, headers={"traceparent": parent}).status_code == 200
    found: list[Any] = []

    def told_whole() -> bool:
        tracing.flush()
        found[:] = [
            span
            for span in spans.get_finished_spans()
            if span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
        ]
        return any(span.name == "POST /v1/search" for span in found)

    # Its own span ends behind the answer.
    until(told_whole)
    names = {span.name for span in found}
    assert {
        "POST /v1/search",
        "recall",
        "embed query",
        "embeddings",
        "routes",
        "msearch",
        "fetch",
        "rerank",
    } <= names
    [msearch, *_] = [span for span in found if span.name == "msearch"]
    assert msearch.attributes is not None
    assert msearch.attributes["db.system.name"] == "elasticsearch"
    told = json.dumps([dict(span.attributes or {}) for span in found], default=str)
    assert "never heard" not in told
    assert "unspeakable" not in told


def test_health_is_not_traced(client, spans, tracing):
    tracing.flush()
    spans.clear()
    client.get("/livez")
    client.get("/metrics")
    tracing.flush()
    assert [
        span.name for span in spans.get_finished_spans() if "livez" in span.name or "metrics" in span.name
    ] == []


def test_spans_go_to_a_collector_by_otlp():
    arrived: list[tuple[str, str | None]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.append((self.path, self.headers["content-type"]))
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracing = observing.trace_to(
            f"http://127.0.0.1:{server.server_port}/", service="halflife-test", version="0"
        )
        with observing.stage("fetch"):
            pass
        tracing.flush()
        tracing.close()
        server.shutdown()
    assert arrived[0] == ("/v1/traces", "application/x-protobuf")


def test_traces_without_their_packages_are_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(InvalidRequest, match="not installed") as refused:
        observing.trace_to("http://127.0.0.1:4318", service="halflife", version="0")
    assert "halflife[tracing]" in str(refused.value.remedy)


# --- log lines -------------------------------------------------------------------------------------------------------


def line_of(capsys: pytest.CaptureFixture[str], form: logs.Format, **extra: Any) -> str:
    handler = logs.handler(form)
    logger = logging.Logger("halflife.test")
    logger.addHandler(handler)
    token = observing.request_id.set("req-1")
    try:
        logger.warning("it is %d", 7, extra=extra)
    finally:
        observing.request_id.reset(token)
    return capsys.readouterr().err.strip()


def test_a_json_line_has_its_request(capsys):
    line = json.loads(line_of(capsys, "json", took_ms=3))
    assert line.pop("timestamp").endswith("+00:00")
    assert line == {
        "level": "WARNING", "logger": "halflife.test", "message": "it is 7", "request_id": "req-1", "took_ms": 3,
    }  # fmt: skip


def test_a_text_line_is_plain(capsys):
    assert line_of(capsys, "text").endswith("WARNING halflife.test: it is 7")


@pytest.mark.node
def test_queries_are_logged_only_when_allowed(client, service, collection, caplog):
    with caplog.at_level(logging.INFO, logger="halflife"):
        client.post("/v1/search", json={"collection": collection, "query": "a private matter"})
    assert "private matter" not in caplog.text


@pytest.mark.node
def test_the_requests_id_goes_with_every_call_to_elasticsearch(client, collection, monkeypatch):
    import elastic_transport

    seen: set[str | None] = set()
    honest = elastic_transport.AsyncTransport.perform_request

    async def watching(self, method, target, **options):
        seen.add((options.get("headers") or {}).get("x-opaque-id"))
        return await honest(self, method, target, **options)

    monkeypatch.setattr(elastic_transport.AsyncTransport, "perform_request", watching)
    documents = {"documents": [{"id": "traced", "text": "word"}]}
    client.post(f"/v1/collections/{collection}/documents", json=documents, headers={"x-request-id": "mine-7"})
    assert "mine-7" in seen


# --- readiness -------------------------------------------------------------------------------------------------------


@pytest.mark.node
def test_readiness_tells_each_dependency_and_why_not(client, collection, cluster, embedding):
    ready = client.get("/readyz").json()
    assert ready["status"] == "ready"
    elasticsearch = ready["checks"]["elasticsearch"]
    assert elasticsearch["templates"].keys() == {"halflife-settings", "halflife-mappings"}
    assert (elasticsearch["breaker"], elasticsearch["templates_differ"]) == ("closed", False)
    assert ready["lag"].keys() == {
        "event_loop_ms",
        "touches_waiting",
        "cluster_tasks",
        "cluster_longest_task_ms",
    }


@pytest.mark.node
def test_readiness_and_metrics_tell_each_configured_model(node_url, embedding):
    with EmbeddingServer(dims=2 * DIMS) as second:
        settings = Settings(
            elasticsearch_url=node_url,
            elasticsearch_timeout_s=60,
            embedding_base_url=embedding.base_url,
            embedding_model="far-end",
            embedding_query_prefix="",
            embedding_models={
                "far-end": EmbeddingModel(url=embedding.base_url),
                "larger": EmbeddingModel(url=second.base_url),
                "away": EmbeddingModel(url="http://127.0.0.1:9/v1"),
                "wrong": EmbeddingModel(url="ftp://127.0.0.1"),
            },
        )
        with serving(settings) as running:
            answer = running.client.get("/readyz")
            checks = answer.json()["checks"]
            opened = {dict(labels).get("dependency") for _, labels in samples(running.client)}
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert checks["embedder"]["status"] == "ok"
    assert (checks["embedder larger"]["status"], checks["embedder larger"]["dims"]) == ("ok", 2 * DIMS)
    assert checks["embedder larger"]["breaker"] == "closed"
    assert checks["embedder away"]["status"] == checks["embedder wrong"]["status"] == "failed"
    assert checks["embedder away"]["reason"]
    assert "embedder far-end" not in checks
    assert {"embedder", "embedder larger", "embedder away"} <= opened


@pytest.mark.node
async def test_a_full_disk_is_degraded_and_named(client, collection, cluster, monkeypatch):
    # What was found before may be told for as long.
    monkeypatch.setattr(watching, "LOOKED_WITHIN_S", 0.0)
    index = client.get(f"/v1/collections/{collection}").json()["index"]
    await cluster.put_settings(index, {"index.blocks.read_only_allow_delete": True})
    try:
        answer = client.get("/readyz")
        refused = client.post(
            f"/v1/collections/{collection}/documents", json={"documents": [{"id": "x", "text": "x"}]}
        )
    finally:
        await cluster.put_settings(index, {"index.blocks.read_only_allow_delete": None})
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["checks"]["elasticsearch"]["blocked"][index] == ["read_only_allow_delete"]
    assert refused.status_code == 507


class Asked:
    """Stands for a cluster or an embedder that is asked: counts, and answers once it may."""

    def __init__(self, dependency: str) -> None:
        self.guard = Guard(dependency, places=4, error=lambda told, _: Overloaded(told))
        self.may = asyncio.Event()
        self.asked = 0
        self.dims = self.model = None

    async def info(self, **_: Any) -> Any:
        self.asked += 1
        await self.may.wait()
        return SimpleNamespace(version="9.1.0", name="stand-in")

    async def health(self, **_: Any) -> dict[str, Any]:
        return {"status": "green"}

    async def blocked(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    async def template_versions(self, *_: Any, **__: Any) -> dict[str, int]:
        return {}

    async def check(self) -> int:
        self.asked += 1
        await self.may.wait()
        return DIMS


async def test_however_many_ask_the_dependencies_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = Asked("elasticsearch")
    embedder: Any = Asked("embedder")
    watch = Watch(cluster=cluster, embedder=embedder, reranker=None, touches_waiting=lambda: 0)
    monkeypatch.setattr(watching, "LOOKED_WITHIN_S", 3600.0)
    asking = [asyncio.create_task(watch.readiness(serving=True)) for _ in range(50)]
    await asyncio.sleep(0)
    hung_up, *asking = asking
    hung_up.cancel()
    await asyncio.sleep(0)
    cluster.may.set()
    embedder.may.set()
    answers = await asyncio.gather(*asking)
    assert (cluster.asked, embedder.asked) == (1, 1)
    assert all(ready and body["checks"]["elasticsearch"]["cluster"] == "stand-in" for ready, body in answers)
    # What the process knows by itself is told at once all the same.
    ready, body = await watch.readiness(serving=False, keys_usable=False)
    assert (ready, body["status"], "keys" in body["checks"]) == (False, "stopping", True)
    assert (cluster.asked, embedder.asked) == (1, 1)
    await watch.close()


async def test_readiness_looks_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOKED_WITHIN_S", 0.05)
    cluster: Any = Asked("elasticsearch")
    embedder: Any = Asked("embedder")
    cluster.may.set()
    embedder.may.set()
    watch = Watch(cluster=cluster, embedder=embedder, reranker=None, touches_waiting=lambda: 0)
    for _ in range(2):
        await watch.readiness(serving=True)
        await asyncio.sleep(watching.LOOKED_WITHIN_S)
    assert cluster.asked == 2
    await watch.close()


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.node
def test_sigterm_turns_readiness_red_and_answers_what_is_under_way(node_url, embedding):
    port = free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HALFLIFE_")},
        "HALFLIFE_ELASTICSEARCH_URL": node_url, "HALFLIFE_EMBEDDING_BASE_URL": embedding.base_url,
        "HALFLIFE_EMBEDDING_MODEL": "far-end", "HALFLIFE_DRAIN_S": "30", "HALFLIFE_LOG_FORMAT": "json",
    }  # fmt: skip
    process = subprocess.Popen(
        python_command("scripts.serving", "--port", str(port), "--end-with-stdin"),
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    if client.get("/readyz").status_code == 200:
                        break
                except httpx2.TransportError:
                    pass
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            statuses = set()
            while "stopping" not in statuses:
                statuses.add(client.get("/readyz").json()["status"])
            assert client.get("/readyz").status_code == 503
            assert client.get("/livez").status_code == 200
            # Told once more, it does not wait on.
            process.send_signal(signal.SIGTERM)
        process.wait(20)
    finally:
        process.kill()
        _, told = process.communicate()
    lines = [json.loads(line) for line in told.decode().splitlines() if line.startswith("{")]
    assert any(line["message"].startswith("ready: ") for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_is_ended_by_a_signal(number):
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HALFLIFE_")},
        "HALFLIFE_ELASTICSEARCH_URL": f"http://127.0.0.1:{free_port()}", "HALFLIFE_STARTUP_WAIT_S": "600",
    }  # fmt: skip
    process = subprocess.Popen(
        python_command("scripts.cli", "serve", "--port", "0"), stderr=subprocess.PIPE, env=environment
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line.decode())
            if "waiting for Elasticsearch" in lines[-1]:
                break
        process.send_signal(number)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    told = "".join(lines) + rest.decode()
    assert process.returncode == (-signal.SIGTERM if number == signal.SIGTERM else 130)
    assert "told to end while it was starting" in told
    assert "Traceback" not in told


def record(count: int) -> logging.LogRecord:
    told = "Node %r has failed for %i times in a row, putting on %i second timeout"
    return logging.LogRecord(
        "elastic_transport.node_pool", logging.WARNING, "", 0, told, ("node", count, 1), None
    )


def test_a_node_that_stays_away_is_told_once():
    passed = [logs._first_failure(record(count)) for count in (1, 2, 47)]
    assert passed == [True, False, False]
