"""The door to Elasticsearch: what it sends, what it makes of each answer and failure, on a real node where it can."""

import asyncio
import gc
import inspect
import json
import socket
import uuid
import warnings
from datetime import UTC, datetime

import elastic_transport
import elasticsearch
import httpx2
import numpy as np
import pytest
from elasticsearch import helpers

from app import catalog, elastic, fields, names
from app.collection import CollectionOptions
from app.elastic import BulkAction, Cluster, translate
from app.encoding import encode, pack_vector, unpack_vector
from app.errors import (
    ClusterOutOfTime,
    ClusterRejected,
    ClusterUnavailable,
    Conflict,
    CursorExpired,
    HalflifeError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    StorageFull,
)
from app.outcomes import BulkOutcome, translate_error
from app.points import PointsInTime
from tests.fakes import FarEnd, Reply
from tests.nodes import written

PRODUCT = {"x-elastic-product": "Elasticsearch"}

# --- the vendor's exceptions ---------------------------------------------------------------------------------------


def is_theirs(kind: type[Exception]) -> bool:
    return kind.__module__.partition(".")[0] in {"elasticsearch", "elastic_transport"} and not issubclass(
        kind, Warning
    )


def vendor_exceptions() -> list[type[Exception]]:
    """Return every exception class that the client's packages define, warnings left out."""
    found: set[type[Exception]] = set()
    for module in (elasticsearch, elasticsearch.exceptions, helpers, helpers.errors, elastic_transport):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Exception) and is_theirs(value):
                found.add(value)
    queue = list(found)
    while queue:
        for child in queue.pop().__subclasses__():
            if (
                child.__module__.partition(".")[0] in {"elasticsearch", "elastic_transport"}
                and child not in found
            ):
                found.add(child)
                queue.append(child)
    return sorted(found, key=lambda cls: cls.__name__)


def make(kind: type[Exception]) -> Exception:
    """Return an exception of the class as the client would raise it."""
    if issubclass(kind, elastic_transport.ApiError):
        meta = elastic_transport.ApiResponseMeta(
            status=400,
            http_version="1.1",
            headers=elastic_transport.HttpHeaders(),
            duration=0.0,
            node=elastic_transport.NodeConfig("http", "localhost", 9200),
        )
        return kind("boom", meta, {"error": {"type": "boom_exception", "reason": "boom"}})
    if kind is helpers.BulkIndexError:
        return helpers.BulkIndexError("boom", [])
    if kind is helpers.ScanError:
        return helpers.ScanError("scroll", "boom")
    return kind("boom")


def test_the_search_for_vendor_exceptions_finds_the_known_ones():
    assert {
        "ApiError",
        "NotFoundError",
        "ConnectionTimeout",
        "TlsError",
        "BulkIndexError",
        "ScanError",
        "SerializationError",
    } <= {kind.__name__ for kind in vendor_exceptions()}


@pytest.mark.parametrize("kind", vendor_exceptions(), ids=lambda kind: kind.__name__)
def test_every_vendor_exception_is_caught_and_translated(kind):
    assert issubclass(kind, elastic.VENDOR_ERRORS)
    error = translate(make(kind), "reading the weather")
    assert isinstance(error, HalflifeError)
    assert "reading the weather" in error.detail


def test_what_is_not_the_vendors_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        translate(ZeroDivisionError(), "dividing")


# --- errors in answers ---------------------------------------------------------------------------------------------


def shard_error(kind: str, reason: str = "why", *, cause: dict | None = None) -> dict:
    """Return a failed search's error as Elasticsearch words it: its own type around the shards' causes."""
    inner = {"type": kind, "reason": reason, **({"caused_by": cause} if cause else {})}
    return {
        "type": "search_phase_execution_exception",
        "reason": "all shards failed",
        "phase": "query",
        "root_cause": [inner],
        "failed_shards": [{"shard": 0, "index": "x", "reason": inner}],
    }


def block(text: str) -> dict:
    return {"type": "cluster_block_exception", "reason": f"index [x] blocked by: [{text}];"}


PRESSURE = (
    "rejected execution of primary operation [coordinating_and_primary_bytes={0}, replica_bytes=0, all_bytes={0}, "
    "primary_operation_bytes={1}, max_primary_bytes=100]"
)
ANSWERS = {
    # name: (error, status, class, our HTTP status)
    "flood stage": (block("TOO_MANY_REQUESTS/12/disk usage exceeded flood-stage watermark"), 429, StorageFull, 507),
    "write block": (block("FORBIDDEN/8/index write (api)"), 403, ClusterUnavailable, 503),
    "read-only by an operator": (block("FORBIDDEN/5/index read-only (api)"), 403, ClusterRejected, 502),
    "no master": (block("SERVICE_UNAVAILABLE/2/no master"), 503, ClusterUnavailable, 503),
    "state not recovered": (block("SERVICE_UNAVAILABLE/1/state not recovered / initialized"), 503, ClusterUnavailable, 503),
    "full queue": ({"type": "es_rejected_execution_exception", "reason": "queue"}, 429, ClusterUnavailable, 503),
    "full memory": ({"type": "es_rejected_execution_exception", "reason": PRESSURE.format(90, 40)}, 429, ClusterUnavailable, 503),
    "too little memory": ({"type": "es_rejected_execution_exception", "reason": PRESSURE.format(10, 101)}, 429, LimitExceeded, 422),
    "full queue on the shards": (shard_error("es_rejected_execution_exception"), 503, ClusterUnavailable, 503),
    "breaker": ({"type": "circuit_breaking_exception", "reason": "[parent] Data too large"}, 429, ClusterUnavailable, 503),
    "primary missing": ({"type": "unavailable_shards_exception", "reason": "primary"}, 503, ClusterUnavailable, 503),
    "no shard": (shard_error("no_shard_available_action_exception"), 503, ClusterUnavailable, 503),
    "shards without a cause": ({"type": "search_phase_execution_exception", "reason": "", "root_cause": []}, 503, ClusterUnavailable, 503),
    "index missing": ({"type": "index_not_found_exception", "reason": "no such index [x]"}, 404, NotFound, 404),
    "index exists": ({"type": "resource_already_exists_exception", "reason": "x"}, 400, Conflict, 409),
    "older version": ({"type": "version_conflict_engine_exception", "reason": "x"}, 409, Conflict, 409),
    "point in time gone": (shard_error("search_context_missing_exception", "No search context found"), 404, CursorExpired, 410),
    "too many words": (
        shard_error("query_shard_exception", cause={"type": "too_many_nested_clauses", "reason": "maxClauseCount"}), 400, InvalidRequest, 422,
    ),
    "parse error": ({"type": "parsing_exception", "reason": "unknown query [x]"}, 400, ClusterRejected, 502),
    "document refused": ({"type": "document_parsing_exception", "reason": "x"}, 400, ClusterRejected, 502),
    "no such key": ({"type": "security_exception", "reason": "unable to authenticate"}, 401, ClusterRejected, 502),
    "key without rights": ({"type": "security_exception", "reason": "action is unauthorized"}, 403, ClusterRejected, 502),
    "old cluster": ({"type": "media_type_header_exception", "reason": "compatible-with=9"}, 400, ClusterRejected, 502),
    "a proxy's page": (None, 502, ClusterUnavailable, 503),
    "a proxy's failure": (None, 500, ClusterUnavailable, 503),
    "too large": (None, 413, ClusterRejected, 502),
    "a bug of the cluster": ({"type": "null_pointer_exception", "reason": None}, 500, ClusterRejected, 502),
    "words only": ("no handler found for uri", 400, ClusterRejected, 502),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_errors_are_told_apart_by_type(case):
    error, status, kind, ours = ANSWERS[case]
    translated = translate_error(error, status, "testing")
    assert type(translated) is kind
    assert translated.problem()["status"] == ours
    assert translated.detail.startswith("testing")
    json.dumps(translated.problem())


@pytest.mark.parametrize(
    "kind, status",
    [
        ("no_shard_available_action_exception", 503),
        ("unavailable_shards_exception", 503),
        ("index_not_found_exception", 404),
    ],
)
def test_no_node_address_or_index_reaches_callers(kind, status):
    reason = "[node-1][127.0.0.1:30109][indices:data/read/open] no such index [halflife-tmp-20261130]"
    told = translate_error({"type": kind, "reason": reason}, status, "reading documents").problem()
    assert "127.0.0.1" not in json.dumps(told)
    assert "halflife-tmp" not in json.dumps(told)


MISSING = {
    "type": "search_phase_execution_exception",
    "reason": "Search rejected due to missing shards [[halflife-tmp-20261130][0]]. Consider using "
    "`allow_partial_search_results` setting to bypass this error.",
}


@pytest.mark.parametrize("doing", ["searching", "opening a point in time"])
@pytest.mark.parametrize("error", [
    {"type": "search_phase_execution_exception", "reason": "", "root_cause": [], "caused_by": MISSING},
    {**MISSING, "root_cause": []}, shard_error("no_shard_available_action_exception"),
])  # fmt: skip
def test_shards_that_are_not_there_are_told_alike(doing, error):
    told = translate_error(error, 503, doing)
    assert told.detail == f"{doing}: a part of the index is not there for the moment"
    assert (told.status, told.retry_after_s) == (503, 1)
    assert "try again" in (told.remedy or "")


@pytest.mark.node
async def test_a_point_in_time_of_an_index_without_shards_is_told_as_a_search_there(node_url):
    async with httpx2.AsyncClient(base_url=node_url) as by_hand:
        index = f"halflife-nowhere_{uuid.uuid4().hex[:8]}-20260101000000000"
        nowhere = {"settings": {"index.routing.allocation.require._name": "nowhere"}}
        await by_hand.put(f"/{index}", params={"wait_for_active_shards": 0}, json=nowhere)
        cluster = Cluster.connect(urls=[node_url])
        try:
            with pytest.raises(ClusterUnavailable, match="a part of the index is not there") as refused:
                await cluster.open_pit(index, keep_alive_s=5, timeout_s=10)
            assert index not in json.dumps(refused.value.problem())
        finally:
            await cluster.close()
            await by_hand.delete(f"/{index}")


@pytest.mark.parametrize("case", ["full queue", "breaker", "no master", "write block", "a proxy's page"])
def test_what_may_pass_says_when_to_try_again(case):
    error, status, *_ = ANSWERS[case]
    assert translate_error(error, status, "testing").retry_after_s == 1


@pytest.mark.parametrize(
    "case",
    [
        "flood stage",
        "key without rights",
        "no such key",
        "old cluster",
        "too large",
        "read-only by an operator",
    ],
)
def test_what_someone_must_mend_says_how(case):
    error, status, *_ = ANSWERS[case]
    assert translate_error(error, status, "testing").remedy


FATES = {
    "created": (BulkOutcome(201, "created", 7), "applied"),
    "older": (BulkOutcome(409, error_type="version_conflict_engine_exception", reason="x"), "superseded"),
    "alias gone": (BulkOutcome(404, error_type="index_not_found_exception", reason="x"), "fenced"),
    "write block": (BulkOutcome(403, error_type="cluster_block_exception", reason=block("FORBIDDEN/8/index write (api)")["reason"]), "fenced"),
    "flood": (BulkOutcome(429, error_type="cluster_block_exception", reason=block("TOO_MANY_REQUESTS/12/disk")["reason"]), "full"),
    # An index may carry both: no room outranks the fence, and a document id can't fake either.
    "queue": (BulkOutcome(429, error_type="es_rejected_execution_exception", reason="x"), "retry"),
    "primary": (BulkOutcome(503, error_type="unavailable_shards_exception", reason="x"), "retry"),
    "unknown 503": (BulkOutcome(503, error_type="new_exception", reason="x"), "retry"),
    "mapping": (BulkOutcome(400, error_type="document_parsing_exception", reason="[1:5] /12/ /8/"), "refused"),
}  # fmt: skip


@pytest.mark.parametrize("case", FATES)
def test_fate_of_a_write(case):
    outcome, fate = FATES[case]
    assert outcome.fate == fate
    assert (outcome.error("writing") is None) == (fate == "applied")


# --- bytes ---------------------------------------------------------------------------------------------------------


def test_vectors_are_packed_big_endian():
    assert pack_vector(np.array([1.0, -2.5], dtype=np.float32)) == "P4AAAMAgAAA="
    assert unpack_vector("P4AAAMAgAAA=").tolist() == [1.0, -2.5]
    strided = np.arange(6, dtype=np.float64)[::2]
    assert unpack_vector(pack_vector(strided)).tolist() == [0.0, 2.0, 4.0]


def test_json_is_compact_utf8_on_one_line():
    assert encode({"a": "京\n", "b": [1, None]}) == '{"a":"京\\n","b":[1,null]}'.encode()


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "\ud800"], ids=["nan", "infinity", "lone surrogate"]
)
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(ValueError):
        encode({"a": value})


async def test_a_bulk_source_with_a_line_break_is_refused():
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"])
    action = BulkAction("halflife-x-w-1-a", "a", 1, b'{"a":1}\n{"delete":{"_index":"halflife-x","_id":"b"}}')
    try:
        with pytest.raises(ValueError, match="one line"):
            await cluster.bulk([action], timeout_s=1)
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "_all", "*", "halflife-*", "a,b", "a/b", "a?b", ".kibana", "a b", "<x-{now/d}>"]
)
async def test_no_call_that_changes_an_index_takes_a_name_for_several(name):
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"])
    try:
        for call in (
            cluster.delete_indices([name]),
            cluster.refresh(name),
            cluster.put_settings(name, {}),
            cluster.add_write_block(name),
        ):
            with pytest.raises(ValueError, match="path"):
                await call
    finally:
        await cluster.close()


# --- connecting ----------------------------------------------------------------------------------------------------

CONTRADICTIONS: dict[str, dict] = {
    "no address": {"urls": []},
    "no scheme": {"urls": ["localhost:9200"]},
    "another scheme": {"urls": ["ftp://localhost:9200"]},
    "port out of range": {"urls": ["http://localhost:99999"]},
    "key and user": {"urls": ["http://localhost:9200"], "api_key": "k", "username": "u", "password": "p"},
    "user without password": {"urls": ["http://localhost:9200"], "username": "u"},
    "CA file missing": {"urls": ["https://localhost:9200"], "ca_certs": "/nonexistent/ca.pem"},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
async def test_settings_that_cannot_work_are_refused(case):
    with pytest.raises(InvalidRequest):
        Cluster.connect(**CONTRADICTIONS[case])


async def test_ports_are_filled_in_and_passwords_left_out_of_what_is_shown():
    cluster = Cluster.connect(urls=["http://localhost", "https://elastic:secret@search.example"])
    assert cluster.urls == ("http://localhost:9200", "https://search.example:443")
    await cluster.close()
    await cluster.close()


async def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        cluster = Cluster.connect(urls=[f"http://127.0.0.1:{taken.getsockname()[1]}"])
        try:
            with pytest.raises(ClusterUnavailable, match="no connection") as caught:
                await cluster.info()
        finally:
            await cluster.close()
    assert "HALFLIFE_ELASTICSEARCH_URL" in (caught.value.remedy or "")
    assert isinstance(caught.value.__cause__, elastic_transport.ConnectionError)


async def test_credentials_are_sent():
    with FarEnd(
        lambda _: Reply(body={"cluster_name": "x", "version": {"number": "9.5.3"}}, headers=PRODUCT)
    ) as far:
        cases: list[tuple[dict, str]] = [
            ({"api_key": "abc"}, "ApiKey abc"),
            ({"username": "u", "password": "p"}, "Basic dTpw"),
        ]
        for options, expected in cases:
            cluster = Cluster.connect(urls=[far.url], **options)
            await cluster.info()
            await cluster.close()
            assert far.requests[-1].headers["authorization"] == expected


async def test_another_product_is_refused():
    with FarEnd(lambda _: Reply(body={"cluster_name": "x", "version": {"number": "2.19.0"}})) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            with pytest.raises(ClusterRejected, match="not Elasticsearch"):
                await cluster.info()
        finally:
            await cluster.close()


@pytest.mark.parametrize(
    "version,fine",
    [("8.19.4", False), ("9.0.1", True), ("9.5.3", True), ("10.0.0-SNAPSHOT", True)],
)
async def test_old_versions_are_refused(version, fine):
    with FarEnd(
        lambda _: Reply(body={"cluster_name": "x", "version": {"number": version}}, headers=PRODUCT)
    ) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            if fine:
                assert (await cluster.check_version()).version == version
            else:
                with pytest.raises(ClusterRejected, match="runs Elasticsearch"):
                    await cluster.check_version()
        finally:
            await cluster.close()


@pytest.mark.parametrize(
    "release,document,query",
    [
        (None, [0.5], [0.5]),
        ((9, 2), [0.5], [0.5]),
        ((9, 3), "PwAAAA==", [0.5]),
        ((9, 4), "PwAAAA==", "PwAAAA=="),
        ((10, 0), "PwAAAA==", "PwAAAA=="),
    ],
)
async def test_vectors_are_sent_as_the_cluster_can_read_them(release, document, query):
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"])
    cluster.release = release
    half = np.array([0.5], dtype=np.float32)
    assert (cluster.document_vector(half), cluster.query_vector(half)) == (document, query)
    await cluster.close()


BROKEN = {
    "garbage": (
        Reply(body=b"<html>", headers={**PRODUCT, "content-type": "application/json"}),
        ClusterRejected,
    ),
    "a page": (Reply(body=b"<html>", headers={**PRODUCT, "content-type": "text/html"}), ClusterRejected),
    "a list": (Reply(body=[1], headers=PRODUCT), ClusterRejected),
    "a proxy's 502": (
        Reply(status=502, body=b"<html>bad gateway", headers={"content-type": "text/html"}),
        ClusterUnavailable,
    ),
    "a proxy's 429": (
        Reply(status=429, body=b"slow down", headers={"content-type": "text/plain"}),
        ClusterUnavailable,
    ),
    "cut off": (
        Reply(body={"count": 1, "filler": "x" * 1000}, headers=PRODUCT, close_after=100),
        ClusterUnavailable,
    ),
    "silence": (Reply(hang=True), ClusterUnavailable),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_broken_answers(case):
    reply, kind = BROKEN[case]
    with FarEnd(lambda _: reply) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            with pytest.raises(kind):
                await cluster.count("halflife-x", timeout_s=0.5 if reply.hang else 20)
        finally:
            await cluster.close()


async def test_a_read_is_tried_once_more_when_the_connection_breaks_and_a_change_is_not():
    cut = Reply(body={"count": 3, "filler": "x" * 1000}, headers=PRODUCT, close_after=10)
    with FarEnd(lambda _: Reply(body={"count": 3, "acknowledged": True}, headers=PRODUCT)) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            far.script = [cut]
            assert await cluster.count("halflife-x") == 3
            assert len(far.requests) == 2
            far.script = [cut]
            with pytest.raises(ClusterUnavailable):
                await cluster.put_settings("halflife-x", {"a": 1})
            assert len(far.requests) == 3
        finally:
            await cluster.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_an_overloaded_cluster_is_not_asked_again(status):
    with FarEnd(
        lambda _: Reply(status=status, body={"error": {"type": "x", "reason": "y"}}, headers=PRODUCT)
    ) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            with pytest.raises(ClusterUnavailable):
                await cluster.count("halflife-x")
        finally:
            await cluster.close()
        assert len(far.requests) == 1


async def test_the_callers_id_travels_and_cannot_break_the_header():
    with FarEnd(lambda _: Reply(body={"hits": {}}, headers=PRODUCT)) as far:
        cluster = Cluster.connect(urls=[far.url])
        await cluster.search("halflife-x", {}, timeout_s=5, opaque_id="req 1\r\nx: y 京")
        await cluster.close()
        assert far.requests[0].headers["x-opaque-id"] == "req_1__x:_y__"


async def test_an_acknowledgement_that_is_missing_is_an_error():
    with FarEnd(lambda _: Reply(body={"acknowledged": False}, headers=PRODUCT)) as far:
        cluster = Cluster.connect(urls=[far.url])
        try:
            with pytest.raises(ClusterUnavailable, match="not every node confirmed"):
                await cluster.update_aliases([])
            with pytest.raises(ClusterUnavailable, match="not every shard"):
                await cluster.add_write_block("halflife-x")
        finally:
            await cluster.close()


# --- a real node ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def place(cluster, unique):
    """(index, read alias, write alias) of a collection with vectors of three dims."""
    name = unique()
    await catalog.install_templates(cluster, dims=384)
    made = await catalog.create(
        cluster, name, CollectionOptions(dims=3), dims=3, model=None, moment=datetime.now(UTC)
    )
    return made.index, names.read_alias(name), (await written(cluster, name)).alias


def vector(*numbers: float) -> str:
    return pack_vector(np.array(numbers, dtype=np.float32))


@pytest.mark.node
async def test_which_cluster_answers(cluster):
    info = await cluster.check_version()
    assert cluster.release == info.release >= (9, 0)
    assert info.uuid
    assert (await cluster.health(wait_for_status="yellow"))["status"] in ("yellow", "green")
    assert abs(next(iter((await cluster.clocks()).values())) / 1000 - datetime.now(UTC).timestamp()) < 60
    assert "nodes" in await cluster.node_stats("fs", "jvm")


@pytest.mark.node
async def test_health_that_is_not_reached_is_an_answer(cluster, place):
    index, *_ = place
    await cluster.put_settings(index, {"auto_expand_replicas": "false", "number_of_replicas": 5})
    health = await cluster.health(index, wait_for_status="green", timeout_s=6)
    assert (health["timed_out"], health["status"]) == (True, "yellow")


@pytest.mark.node
async def test_a_second_node_takes_over_when_the_first_does_not_listen(node_url):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        cluster = Cluster.connect(urls=[f"http://127.0.0.1:{taken.getsockname()[1]}", node_url])
        try:
            for _ in range(4):
                assert (await cluster.info()).version
        finally:
            await cluster.close()


@pytest.mark.node
async def test_bulk_reports_each_item_and_stores_the_rest(cluster, place):
    _, read, write = place
    chunk = [{"text": "x", "start": 0, "end": 1}]
    outcomes = await cluster.bulk(
        [
            BulkAction(
                write, "b1", 1, {"document_id": "b1", "chunks": [{**chunk[0], "embedding": vector(1, 2, 3)}]}
            ),
            BulkAction(
                write, "b2", 1, {"document_id": "b2", "chunks": [{**chunk[0], "embedding": vector(0, 0, 0)}]}
            ),
            BulkAction(
                write, "b3", 1, {"document_id": "b3", "chunks": [{**chunk[0], "embedding": vector(1, 2)}]}
            ),
            BulkAction(write, "b4", 1, {"document_id": "b4", "creation_time": "nope"}),
            BulkAction(write, "b5", 1, b'{"document_id":"b5","text":"fine"}'),
        ],
        refresh="true",
        timeout_s=20,
    )
    assert [outcome.status for outcome in outcomes] == [201, 400, 400, 400, 201]
    assert [outcome.fate for outcome in outcomes] == ["applied", "refused", "refused", "refused", "applied"]
    assert "magnitude" in outcomes[1].reason
    assert await cluster.count(read) == 2


@pytest.mark.node
@pytest.mark.parametrize("share", [0.6, 1.1], ids=["at the primary", "as it is received"])
async def test_what_an_idle_cluster_has_no_memory_for_is_told_at_once(cluster, place, share):
    _, _, write = place
    stats = await cluster.node_stats("indexing_pressure")
    [most] = {node["indexing_pressure"]["memory"]["limit_in_bytes"] for node in stats["nodes"].values()}
    if most > 64 * 2**20:
        pytest.skip("this node has memory for a larger document than the test makes")
    source = encode({"document_id": "big", "text": "x" * int(share * most)})
    with pytest.raises(LimitExceeded, match=f"heap, which leaves {most} bytes") as refused:
        await cluster.bulk([BulkAction(write, "big", 1, source)], timeout_s=30)
    assert refused.value.field == "text"
    assert "split the document" in (refused.value.remedy or "")
    assert cluster.guard.breaker.opened == 0


@pytest.mark.node
async def test_bulk_versions_are_external_and_the_stored_one_is_told(cluster, place):
    _, read, write = place

    async def put(version: int, text: str) -> BulkOutcome:
        [outcome] = await cluster.bulk(
            [BulkAction(write, "a", version, {"document_id": "a", "text": text})], timeout_s=20
        )
        return outcome

    assert (await put(2**61, "new")).version == 2**61
    for version in (1, 2**61):
        outcome = await put(version, "old")
        assert (outcome.fate, outcome.current_version) == ("superseded", 2**61)
    [entry] = await cluster.mget(read, ["a"], timeout_s=20)
    assert (entry["_version"], entry["_source"]["text"]) == (2**61, "new")


@pytest.mark.node
async def test_bulk_needs_the_alias_and_creates_nothing(cluster, place, unique):
    absent = names.write_alias(unique(), 1)
    index, *_ = place
    outcomes = await cluster.bulk(
        [BulkAction(absent, "a", 1, {"document_id": "a"}), BulkAction(index, "a", 1, {"document_id": "a"})],
        timeout_s=20,
    )
    # A concrete index isn't an alias either: nobody writes past a fence.
    assert [outcome.fate for outcome in outcomes] == ["fenced", "fenced"]
    assert await cluster.resolve_index(absent) == {}


@pytest.mark.node
async def test_a_write_block_fences_and_lets_through_again(cluster, place):
    index, _, write = place
    await cluster.add_write_block(index)
    action = BulkAction(write, "a", 1, {"document_id": "a"})
    assert [outcome.fate for outcome in await cluster.bulk([action], timeout_s=20)] == ["fenced"]
    await cluster.clear_write_block(index)
    assert [outcome.fate for outcome in await cluster.bulk([action], timeout_s=20)] == ["applied"]


@pytest.mark.node
async def test_a_full_disk_is_told_from_overload(cluster, place):
    index, _, write = place
    # What the flood stage does to an index.
    await cluster.put_settings(index, {"index.blocks.read_only_allow_delete": True})
    [outcome] = await cluster.bulk([BulkAction(write, "a", 1, {"document_id": "a"})], timeout_s=20)
    assert (outcome.status, outcome.fate) == (429, "full")
    assert isinstance(outcome.error("writing"), StorageFull)
    await cluster.put_settings(index, {"index.blocks.read_only_allow_delete": None})


ODD_IDS = ["a/b/c", "../x", "a?b#c", "a b", "%2F", "a%2Fb", ".", "..", "*", "a,b", "日本/語", "_x", "_all", "a" * 512, "日" * 170, "😀" * 128, "\t\n\""]  # fmt: skip


@pytest.mark.node
async def test_ids_of_every_kind_come_back_unchanged(cluster, place):
    _, read, write = place
    actions = [BulkAction(write, id_, 1, {"document_id": id_}) for id_ in ODD_IDS]
    assert {outcome.fate for outcome in await cluster.bulk(actions, refresh="true", timeout_s=20)} == {
        "applied"
    }
    entries = await cluster.mget(read, [*ODD_IDS, "absent"], timeout_s=20)
    assert [entry["_id"] for entry in entries] == [*ODD_IDS, "absent"]
    assert [entry["found"] for entry in entries] == [True] * len(ODD_IDS) + [False]
    for id_ in ODD_IDS:
        answer = await cluster.search(
            read, {"query": {"ids": {"values": [id_]}}, "_source": False}, timeout_s=20
        )
        assert [hit["_id"] for hit in answer["hits"]["hits"]] == [id_]
    # The same for a delete, which is a write of ours: it touches exactly the one.
    gone = await cluster.bulk(
        [BulkAction(write, "*", 2, {"document_id": "*", "deleted": True})], refresh="true", timeout_s=20
    )
    assert gone[0].fate == "applied"
    assert await cluster.count(read) == len(ODD_IDS) - 1


@pytest.mark.node
@pytest.mark.parametrize("id_", ["a" * 513, "😀" * 129], ids=["513 bytes", "516 bytes"])
async def test_ids_that_elasticsearch_refuses_fail_the_whole_request(cluster, place, id_):
    _, read, write = place
    actions = [
        BulkAction(write, "ok", 1, {"document_id": "ok"}),
        BulkAction(write, id_, 1, {"document_id": id_}),
    ]
    with pytest.raises(ClusterRejected):
        await cluster.bulk(actions, refresh="true", timeout_s=20)
    assert await cluster.count(read) == 0


@pytest.mark.node
async def test_an_empty_id_fails_alone(cluster, place):
    _, read, write = place
    actions = [BulkAction(write, id_, 1, {"document_id": "x"}) for id_ in ("ok", "")]
    outcomes = await cluster.bulk(actions, refresh="true", timeout_s=20)
    assert [outcome.fate for outcome in outcomes] == ["applied", "refused"]
    assert await cluster.count(read) == 1


@pytest.mark.node
async def test_mget_leaves_vectors_out_unless_asked(cluster, place):
    _, read, write = place
    source = {"document_id": "a", "title": "t", "chunks": [{"text": "x", "embedding": vector(0, 3, 4)}]}
    await cluster.bulk([BulkAction(write, "a", 1, source)], timeout_s=20)

    async def read_back(**options) -> dict:
        [entry] = await cluster.mget(read, ["a"], timeout_s=20, **options)
        return entry.get("_source")

    bare = {"document_id": "a", "title": "t", "chunks": [{"text": "x"}]}
    assert await read_back() == bare
    assert await read_back(source=["chunks"]) == {"chunks": [{"text": "x"}]}
    assert await read_back(source=False) is None
    assert (await read_back(vectors=True))["chunks"][0]["embedding"] == pytest.approx([0, 3, 4], rel=1e-6)
    assert (await read_back(source=[fields.EMBEDDING], vectors=True)).keys() == {"chunks"}
    assert (await read_back(source=["chunks"], vectors=True))["chunks"][0]["embedding"] == pytest.approx(
        [0, 3, 4], rel=1e-6
    )


@pytest.mark.node
async def test_mget_of_a_missing_index_says_so(cluster, unique):
    with pytest.raises(NotFound):
        await cluster.mget(names.read_alias(unique()), ["a"], timeout_s=20)


@pytest.mark.node
async def test_tombstones_hide_behind_the_alias_in_every_route_and_point_in_time(cluster, place):
    _, read, write = place
    alive = {
        "document_id": "alive",
        "text": "hello",
        "chunks": [{"text": "hello", "embedding": vector(0, 1, 0)}],
    }
    # No tombstone carries text or vectors; this one does, to be as tempting as can be.
    dead = {
        "document_id": "dead",
        "text": "hello",
        "chunks": [{"text": "hello", "embedding": vector(1, 0, 0)}],
        "deleted": True,
    }
    await cluster.bulk(
        [BulkAction(write, "alive", 1, alive), BulkAction(write, "dead", 1, dead)],
        refresh="true",
        timeout_s=20,
    )
    knn = {"knn": {"field": fields.EMBEDDING, "query_vector": vector(1, 0, 0), "k": 1, "num_candidates": 1}}
    pit = await cluster.open_pit(read, keep_alive_s=30, timeout_s=20)
    target = {"pit": {"id": pit}, "_source": False}
    answers = await cluster.msearch(
        [
            ({}, {**target, "query": {"match": {"text": {"query": "hello", "_name": "raw"}}}}),
            ({}, {**target, "query": {"nested": {"path": "chunks", "query": knn, "_name": "raw"}}}),
            (
                {"index": read},
                {"_source": False, "query": {"nested": {"path": "chunks", "query": knn, "_name": "raw"}}},
            ),
        ],
        timeout_s=20,
    )
    await cluster.close_pit(pit)
    for answer in answers:
        [hit] = answer["hits"]["hits"]
        assert hit["_id"] == "alive"
        assert hit["matched_queries"] == {"raw": pytest.approx(hit["_score"])}


@pytest.mark.node
async def test_msearch_fails_per_search(cluster, place, unique):
    _, read, _ = place
    fine, missing, expired = await cluster.msearch(
        [
            ({"index": read}, {"query": {"match_all": {}}}),
            ({"index": names.read_alias(unique())}, {"query": {"match_all": {}}}),
            (
                {"index": read},
                {"query": {"bool": {"should": [{"term": {"text": f"word{n}"}} for n in range(100_000)]}}},
            ),
        ],
        timeout_s=30,
    )
    assert fine["hits"]["total"]["value"] == 0
    assert isinstance(missing, NotFound)
    assert isinstance(expired, InvalidRequest)
    assert await cluster.msearch([], timeout_s=1) == []


@pytest.mark.node
async def test_a_point_in_time_that_is_gone(cluster, place):
    _, read, _ = place
    pit = await cluster.open_pit(read, keep_alive_s=30, timeout_s=20)
    body = {"pit": {"id": pit}, "query": {"match_all": {}}}
    assert (await cluster.search(None, body, timeout_s=20))["hits"]["total"]["value"] == 0
    await cluster.close_pit(pit)
    await cluster.close_pit(pit)
    await cluster.close_pit("never was one")
    with pytest.raises(CursorExpired):
        await cluster.search(None, body, timeout_s=20)
    [answer] = await cluster.msearch([({}, body)], timeout_s=20)
    assert isinstance(answer, CursorExpired)


@pytest.mark.node
async def test_own_documents_are_written_under_their_sequence_number(cluster):
    index = names.own_index(f"test_{datetime.now(UTC):%H%M%S%f}")
    await cluster.create_index(index, {"mappings": {"dynamic": "false", "properties": {}}})
    try:
        first = await cluster.put_document(index, "state", {"step": 1}, create=True)
        with pytest.raises(Conflict):
            await cluster.put_document(index, "state", {"step": 1}, create=True)
        second = await cluster.put_document(index, "state", {"step": 2}, if_match=first)
        assert second > first
        with pytest.raises(Conflict):
            await cluster.put_document(index, "state", {"step": 3}, if_match=first)
        [entry] = await cluster.mget(index, ["state"], timeout_s=20)
        assert (entry["_source"], (entry["_seq_no"], entry["_primary_term"])) == ({"step": 2}, second)
    finally:
        await cluster.delete_indices([index])


@pytest.mark.node
async def test_indices_and_aliases(cluster, place, unique):
    index, read, write = place
    assert set(await cluster.resolve_aliases(read)) == {read}
    assert set(await cluster.resolve_aliases(read, f"{read}-*")) == {read, write}
    assert await cluster.resolve_aliases(names.read_alias(unique())) == {}
    assert await cluster.resolve_index(index) == {index: [read, write]}
    assert await cluster.resolve_index(read) == {index: [read, write]}
    with pytest.raises(Conflict):
        await cluster.create_index(index, {})
    with pytest.raises(NotFound):
        await cluster.delete_indices([names.index_name(unique(), datetime.now(UTC))])
    with pytest.raises(ClusterRejected):
        await cluster.delete_indices([read])
    with pytest.raises(NotFound):
        await cluster.update_aliases(
            [{"remove": {"index": index, "alias": "halflife-absent", "must_exist": True}}]
        )
    await cluster.refresh(index)
    assert (await cluster.index_stats(index))["_all"]["primaries"]["docs"]["count"] == 0


@pytest.mark.node
async def test_many_requests_at_once_share_the_connections(node_url, place):
    _, read, _ = place
    cluster = Cluster.connect(urls=[node_url], connections=2, pool_wait_s=60)
    try:
        assert await asyncio.gather(*(cluster.count(read, timeout_s=20) for _ in range(40))) == [0] * 40
    finally:
        await cluster.close()


# --- points in time ------------------------------------------------------------------------------------------------


def test_the_longest_unused_point_in_time_of_who_holds_the_most_gives_way():
    points = PointsInTime(most=5, most_each=3)

    def add(owner: str, pit: str, now: float = 0.0) -> list[str]:
        return points.add(owner, pit, keep_alive_s=60, now=now)

    assert [add("a", pit) for pit in ("a1", "a2", "a3")] == [[], [], []]
    points.use({"pit": {"id": "a1", "keep_alive": "60s"}}, now=1.0)
    assert add("a", "a4") == ["a2"]
    assert [add("b", pit) for pit in ("b1", "b2")] == [[], []]
    assert add("c", "c1") == ["a3"]
    points.drop("a4")
    points.drop("a4")
    assert add("c", "c2") == []
    # What has run out by itself needs no closing.
    assert [add("c", pit, now=100.0) for pit in ("c3", "c4", "c5")] == [[], [], []]


async def _open_contexts(cluster: Cluster) -> int:
    stats = await cluster.node_stats("indices")
    return sum(node["indices"]["search"]["open_contexts"] for node in stats["nodes"].values())


@pytest.mark.node
async def test_points_in_time_past_the_bound_are_closed_and_their_readers_told(cluster, place, monkeypatch):
    _, read, _ = place
    monkeypatch.setattr(cluster, "_points", PointsInTime(most_each=2))
    pits = [await cluster.open_pit(read, keep_alive_s=60, timeout_s=10, owner="a key") for _ in range(4)]
    other = await cluster.open_pit(read, keep_alive_s=60, timeout_s=10)
    await asyncio.gather(*cluster._background)
    for pit in pits[:2]:
        with pytest.raises(CursorExpired):
            await cluster.search(None, {"pit": {"id": pit, "keep_alive": "60s"}}, timeout_s=10)
    for pit in (*pits[2:], other):
        await cluster.search(None, {"pit": {"id": pit, "keep_alive": "60s"}}, timeout_s=10)
        await cluster.close_pit(pit)


@pytest.mark.node
async def test_a_point_in_time_that_is_open_too_late_is_closed(cluster, place):
    _, read, _ = place
    before = await _open_contexts(cluster)
    for _ in range(3):
        with pytest.raises(ClusterOutOfTime):
            await cluster.open_pit(read, keep_alive_s=60, timeout_s=0)
    await asyncio.gather(*cluster._background)
    assert await _open_contexts(cluster) <= before


async def test_closing_ends_what_goes_on_behind_answers_and_opens_nothing_anew() -> None:
    with FarEnd(lambda _: Reply(hang=True)) as far:
        cluster = Cluster.connect(urls=[far.url])
        with pytest.raises(ClusterUnavailable):
            await cluster.open_pit("halflife-x", keep_alive_s=60, timeout_s=0.05)
        while not far.requests:  # noqa: ASYNC110 - the far end runs in a thread of its own
            await asyncio.sleep(0.01)
        assert cluster._background
        await cluster.close()
        assert not cluster._background
        asked = len(far.requests)
        with pytest.raises(ClusterUnavailable, match="this service is ending"):
            await cluster.count("halflife-x")
        await cluster.close_pit("a point in time that was found too late")
        await cluster.close()
        assert len(far.requests) == asked


async def test_a_try_that_closing_broke_off_is_not_repeated() -> None:
    with warnings.catch_warnings():
        # What other tests' loops left when they ended is not what this one judges.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    with FarEnd(lambda _: Reply(hang=True)) as far:
        cluster = Cluster.connect(urls=[far.url])
        under_way = [
            asyncio.create_task(cluster.close_pit("one")),
            asyncio.create_task(cluster.count("halflife-x")),
        ]
        while len(far.requests) < len(under_way):  # noqa: ASYNC110 - the far end runs in a thread of its own
            await asyncio.sleep(0.01)
        await cluster.close()
        told = await asyncio.gather(*under_way, return_exceptions=True)
        assert told[0] is None
        assert isinstance(told[1], ClusterUnavailable)
        # A second try would have opened a session that nobody closes: the collector warns of it, which is an error here.
        assert len(far.requests) == len(under_way)
    gc.collect()


async def test_searches_that_ask_in_too_many_bytes_are_refused_before_anything_is_sent():
    # Nothing listens there: what was sent would fail in another way.
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"])
    try:
        body = {"query": {"terms": {"metadata.k": ["x" * 1_000] * 1_000}}}
        with pytest.raises(LimitExceeded, match="64 MiB") as refused:
            await cluster.msearch([({}, body)] * 70, timeout_s=5)
        assert refused.value.remedy
    finally:
        await cluster.close()
