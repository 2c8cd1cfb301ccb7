"""The door to Elasticsearch: the only importer of its client, and the one place that translates its errors.

Async only. No retries of writes (who owns the version retries with the same one); a read is tried once more, on
another node, when a connection fails. Every call has a timeout, a place in the pool and the breaker's leave. Document
ids travel in bodies only: in a path `..` or an empty id would reach the whole index. No query is built here.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import elastic_transport
import jiter
import numpy as np
from elasticsearch import AsyncElasticsearch, UnsupportedProductError
from elasticsearch.helpers import BulkIndexError, ScanError

from app import observing
from app.addresses import is_loopback
from app.breaker import Outcome
from app.encoding import encode, pack_vector
from app.errors import (
    ClusterOutOfTime,
    ClusterRejected,
    ClusterUnavailable,
    HalflifeError,
    InvalidRequest,
    LimitExceeded,
)
from app.fields import EMBEDDING
from app.guarding import HANG_S, Call, Guard
from app.outcomes import (
    AWAY,
    BUSY_RETRY_S,
    OLDEST,
    OLDEST_VERSION,
    BulkOutcome,
    hopeless,
    judge_bulk,
    judge_msearch,
    outcome_of,
    too_large,
    translate_error,
    types_of,
)
from app.points import PointsInTime

_PACKED_DOCUMENTS = (9, 3)
_PACKED_QUERIES = (9, 4)
"""From which versions on vectors may be base64, which is a fifth of the JSON and much faster to parse."""
_GIVES_PACKED = (9, 5)
"""From which version on doc values of vectors are known to come as base64, which takes a tenth of the time of numbers."""
_EXCLUDES_VECTORS = (9, 2)

MOST_SEARCHED_BYTES = 64 * 2**20
"""What several searches at once may take to ask; Elasticsearch takes 100 MiB unless configured otherwise."""
SET_ASIDE_S = 5.0
"""A node that has not answered for so long is set aside for a while, as the client does with it."""

_T = TypeVar("_T")
Json = dict[str, Any]
Method = Literal["GET", "POST", "PUT", "DELETE"]


class _Json(elastic_transport.JsonSerializer):
    """Reads answers in half the time of the standard library; an answer with a window's hits has some 40 KB."""

    def json_loads(self, data: bytes) -> Any:
        return jiter.from_json(data)


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Which cluster answers."""

    name: str
    uuid: str
    version: str

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor, *_ = (int(part) for part in re.findall(r"\d+", self.version + ".0"))
        return major, minor


@dataclass(frozen=True, slots=True)
class BulkAction:
    """One document to index through an alias with an external version; `source` as JSON without line breaks, or as a dict."""

    alias: str
    id: str
    version: int
    source: bytes | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SequenceNumbers:
    """How far a shard is: up to `on_all_copies` each has every operation, and none has one above `highest`."""

    on_all_copies: int
    highest: int


class Cluster:
    """A connection to one Elasticsearch cluster, through any number of its nodes."""

    def __init__(
        self,
        client: AsyncElasticsearch,
        *,
        urls: Sequence[str],
        request_timeout_s: float,
        connections: int = 20,
        pool_wait_s: float = 2.0,
    ) -> None:
        self._client = client
        places = connections * max(1, len(urls))
        self.guard = Guard("elasticsearch", places=places, error=_not_sent)
        # A load of slow writes must leave places to searches.
        self._write_places = asyncio.Semaphore(max(1, places - places // 4))
        self._pool_wait_s = pool_wait_s
        self._timed: dict[float, AsyncElasticsearch] = {}
        self._points = PointsInTime()
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.urls = tuple(urls)
        """The nodes' addresses without passwords."""
        self.release: tuple[int, int] | None = None
        """Major and minor version of the cluster, once `check_version` has asked."""
        self.request_timeout_s = request_timeout_s

    @classmethod
    def connect(
        cls,
        *,
        urls: Sequence[str],
        api_key: str | None = None,
        username: str | None = None,
        password: str | None = None,
        ca_certs: str | None = None,
        verify_certs: bool = True,
        request_timeout_s: float = 10.0,
        connections: int = 20,
        pool_wait_s: float = 2.0,
    ) -> Self:
        """Make the client; nothing is sent yet. `connections` are kept per node; more requests than that wait.

        They wait at most `pool_wait_s`, then fail as ClusterUnavailable. Writes hold at most three quarters of them.

        A URL without a port means 443 for https and 9200 for http. Raises InvalidRequest for settings that contradict
        each other or can't be read. Call inside the event loop that uses it.
        """
        if not urls:
            raise InvalidRequest(
                "no address of Elasticsearch is given", remedy="set HALFLIFE_ELASTICSEARCH_URL"
            )
        if api_key and (username or password):
            raise InvalidRequest(
                "both an API key and a user are given for Elasticsearch", remedy="keep one of the two"
            )
        if bool(username) != bool(password):
            raise InvalidRequest("a user of Elasticsearch needs its password, and the other way round")
        full = [_with_port(url) for url in urls]
        secure = any(url.startswith("https:") for url in full)
        options: dict[str, Any] = {}
        if secure:
            options["verify_certs"] = verify_certs
            if ca_certs:
                options["ca_certs"] = ca_certs
            if not verify_certs:
                options["ssl_show_warn"] = False
        try:
            client = AsyncElasticsearch(
                full,
                api_key=api_key or None,
                basic_auth=(username, password) if username and password else None,
                request_timeout=request_timeout_s,
                max_retries=0,
                retry_on_timeout=False,
                # Bodies are vectors and text; on loopback compressing them costs more than it saves.
                http_compress=not all(is_loopback(urlsplit(url).hostname or "") for url in full),
                connections_per_node=connections,
                # A node that failed is tried again soon: half a minute is long where there are two of them.
                max_dead_node_backoff=5.0,
                serializers={_Json.mimetype: _Json()},
                **options,
            )
        except (ValueError, OSError) as cause:
            raise InvalidRequest(
                f"the connection that HALFLIFE_ELASTICSEARCH_URL and HALFLIFE_ELASTICSEARCH_CA describe can't be made: {cause}",
                remedy="give addresses such as https://search.example:9200, and a CA file in PEM form",
            ) from cause
        return cls(
            client,
            urls=[_without_password(url) for url in full],
            request_timeout_s=request_timeout_s,
            connections=connections,
            pool_wait_s=pool_wait_s,
        )

    async def close(self) -> None:
        """Close all connections, ending what goes on in the background; closing twice is harmless.

        Later calls raise ClusterUnavailable: the client would open connections anew that nobody closes.
        """
        self._closed = True
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.close()

    # --- the cluster

    async def info(self, *, timeout_s: float | None = None) -> ClusterInfo:
        """Return which cluster answers; asked past pool and breaker, so that a recovery shows."""
        answer = await self._read(
            "GET", "/", doing="asking Elasticsearch for its version", timeout_s=timeout_s, guarded=False
        )
        return ClusterInfo(
            answer["cluster_name"], answer.get("cluster_uuid", ""), answer["version"]["number"]
        )

    async def check_version(self) -> ClusterInfo:
        """Return which cluster answers; raise ClusterRejected if it is older than this service can use."""
        info = await self.info()
        if info.release < OLDEST_VERSION:
            raise ClusterRejected(
                f"the cluster runs Elasticsearch {info.version}",
                remedy=f"upgrade the cluster: Halflife needs {OLDEST} or newer",
            )
        self.release = info.release
        return info

    def document_vector(self, vector: np.ndarray) -> str | list[float]:
        """Return a vector as documents of this cluster take it, base64 if `check_version` saw that it can."""
        return pack_vector(vector) if self.takes_packed_documents else _floats(vector)

    @property
    def takes_packed_documents(self) -> bool:
        """Whether documents may hold vectors in base64; known once `check_version` has asked."""
        return self.release is not None and self.release >= _PACKED_DOCUMENTS

    def query_vector(self, vector: np.ndarray) -> str | list[float]:
        """Return a vector as kNN queries of this cluster take it, base64 if `check_version` saw that it can."""
        return pack_vector(vector) if self.release and self.release >= _PACKED_QUERIES else _floats(vector)

    @property
    def gives_packed_vectors(self) -> bool:
        """Whether stored vectors can be had in base64, as `unpack_vector` reads them."""
        return self.release is not None and self.release >= _GIVES_PACKED

    async def health(
        self, index: str | None = None, *, wait_for_status: str | None = None, timeout_s: float | None = None
    ) -> Json:
        """Return `_cluster/health`; when the status waited for isn't reached in time, `timed_out` is true in it."""
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        # The answer needs time too, more of it where the machine is busy: what is waited for there leaves it that.
        waited_s = max(timeout_s / 2, timeout_s - 5)
        params: Json = {"timeout": f"{max(1, int(waited_s * 1000))}ms"}
        if wait_for_status:
            params["wait_for_status"] = wait_for_status
        path = _path("_cluster", "health") if index is None else _path("_cluster", "health", index)
        # 408 carries the same body as 200.
        return await self._read(
            "GET",
            path,
            params=params,
            doing="asking for the cluster's health",
            timeout_s=timeout_s,
            accept=(408,),
            guarded=False,
        )

    async def blocked(self, *patterns: str, timeout_s: float | None = None) -> dict[str, list[str]]:
        """Return concrete index -> the blocks on it that its operator or a full disk has set; empty when none.

        A plain write block is left out: a reindex fences with it.
        """
        answer = await self._read(
            "GET",
            _path(_several(patterns), "_settings", _Several("index.blocks.*")),
            params={"flat_settings": "true", "ignore_unavailable": "true", "allow_no_indices": "true"},
            doing="asking for blocks",
            timeout_s=timeout_s,
            accept=(404,),
            guarded=False,
        )
        found: dict[str, list[str]] = {}
        for index, entry in answer.items():
            settings = entry.get("settings", {}) if isinstance(entry, dict) else {}
            names = [
                name.removeprefix("index.blocks.")
                for name, value in sorted(settings.items())
                if value == "true"
                and name in ("index.blocks.read_only", "index.blocks.read_only_allow_delete")
            ]
            if names:
                found[index] = names
        return found

    async def turn_to_retry(self, *, until: float) -> bool:
        """Wait until a call may be repeated, at most until that time of the loop's clock; return whether it may.

        No more wait than there are connections.
        """
        return await self.guard.turn_to_retry(until=until)

    async def clocks(self) -> dict[str, int]:
        """Return each node's name and its clock in milliseconds since 1970, as of a moment during this call."""
        answer = await self._read(
            "GET",
            _path("_nodes", "stats", "os"),
            params={"filter_path": "nodes.*.name,nodes.*.os.timestamp"},
            doing="asking the nodes for their time",
        )
        return {node["name"]: node["os"]["timestamp"] for node in answer.get("nodes", {}).values()}

    async def node_stats(self, *metrics: str) -> Json:
        """Return `_nodes/stats` of metrics such as `fs`, `jvm`, `breaker`, `thread_pool`."""
        return await self._read(
            "GET",
            _path("_nodes", "stats", _several(metrics, re.compile("[a-z_]+"))),
            doing="asking for the nodes' figures",
        )

    # --- search

    async def msearch(
        self,
        searches: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
        *,
        timeout_s: float,
        opaque_id: str | None = None,
    ) -> list[Json | HalflifeError]:
        """Run (header, body) pairs in one request; the answer has one entry per pair, in their order.

        An entry is the search's answer, shard failures inside it, or the error that this search alone met. Named
        queries come back with their scores. Raises only when the request as a whole failed.
        """
        if not searches:
            return []
        for _, body in searches:
            self._points.use(body, now=self.guard.now())
        lines: list[bytes] = []
        total = 0
        for header, body in searches:
            lines += encode(header), encode(self._known(body))
            total += len(lines[-1])
            if total > MOST_SEARCHED_BYTES:
                raise LimitExceeded(
                    f"these searches ask the cluster in more than {MOST_SEARCHED_BYTES >> 20} MiB: filters and vectors "
                    "stand in each list that is asked for",
                    remedy="send fewer queries at once, fewer routes, or filters of fewer values",
                )
        answer = await self._read(
            "POST",
            "/_msearch",
            params={"include_named_queries_score": "true"},
            body=lines,
            doing="searching",
            timeout_s=timeout_s,
            opaque_id=opaque_id,
            judge=judge_msearch,
        )
        responses: list[Json] = answer["responses"]
        if len(responses) != len(searches):
            raise ClusterRejected(
                f"searching: {len(searches)} searches were sent and {len(responses)} answers came back"
            )
        return [
            translate_error(item["error"], item.get("status", 500), "searching") if "error" in item else item
            for item in responses
        ]

    async def search(
        self,
        index: str | None,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        opaque_id: str | None = None,
        doing: str = "searching",
    ) -> Json:
        """Run one search; `index` is None where the body carries a point in time."""
        self._points.use(body, now=self.guard.now())
        path = "/_search" if index is None else _path(index, "_search")
        return await self._read(
            "POST",
            path,
            params={"include_named_queries_score": "true"},
            body=self._known(body),
            doing=doing,
            timeout_s=timeout_s,
            opaque_id=opaque_id,
        )

    def _known(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body without what this cluster does not know: `exclude_vectors`, which came with 9.2.

        Older ones return vectors unless they are excluded by name, so that nothing is lost.
        """
        source = body.get("_source")
        if self.release is None or self.release >= _EXCLUDES_VECTORS or not isinstance(source, Mapping):
            return body
        return {**body, "_source": {key: value for key, value in source.items() if key != "exclude_vectors"}}

    async def count(
        self, index: str, query: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Return how many documents match, all of them without a query."""
        body = {"query": query or {"match_all": {}}}
        answer = await self._read(
            "POST", _path(index, "_count"), body=body, doing=f"counting in {index}", timeout_s=timeout_s
        )
        return int(answer["count"])

    async def open_pit(
        self,
        index: str,
        *,
        keep_alive_s: float,
        timeout_s: float,
        allow_partial: bool = True,
        shard: int | None = None,
        owner: str | None = None,
    ) -> str:
        """Open a point in time and return its id; `allow_partial`: also while some shards are missing.

        `shard`: of that shard alone. `owner`: for whom, of those who may not hold many: past the bound their longest unused
        one is closed. One that is open only after `timeout_s` is closed then.
        """
        params = {
            "keep_alive": f"{max(1, round(keep_alive_s * 1000))}ms",
            "allow_partial_search_results": _bool(allow_partial),
        }
        if shard is not None:
            params["preference"] = f"_shards:{shard}"
        doing = "opening a point in time"
        opening = self._in_background(
            self._read(
                "POST",
                _path(index, "_pit"),
                params=params,
                doing=doing,
                # Given up on the way, it would be open and nobody's.
                timeout_s=max(timeout_s, min(self.request_timeout_s, SET_ASIDE_S)),
            )
        )
        begun = self.guard.now()
        try:
            async with asyncio.timeout(timeout_s):
                pit = str((await asyncio.shield(opening))["id"])
        except TimeoutError as cause:
            self._in_background(self._close_when_open(opening))
            error = translate(elastic_transport.ConnectionTimeout("no answer"), doing)
            silent = self.guard.silent_since(begun)
            raise self._late(error, doing, timeout_s=timeout_s, silent=silent) from cause
        except asyncio.CancelledError:
            self._in_background(self._close_when_open(opening))
            raise
        if owner is not None:
            for surplus in self._points.add(owner, pit, keep_alive_s=keep_alive_s, now=self.guard.now()):
                self.close_pit_soon(surplus)
        return pit

    async def _close_when_open(self, opening: "asyncio.Task[Json]") -> None:
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await self.close_pit(str(opening.result()["id"]))

    def _in_background(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def close_pit_soon(self, pit_id: str) -> None:
        """Close a point in time in the background, since that must not lengthen an answer."""
        self._in_background(self.close_pit(pit_id))

    async def close_pit(self, pit_id: str) -> None:
        """Close a point in time. Never raises: the cluster drops it by itself when its time is over."""
        self._points.drop(pit_id)
        try:
            await self._read(
                "DELETE", "/_pit", body={"id": pit_id}, doing="closing a point in time", accept=(404,)
            )
        except HalflifeError:
            return

    async def analyze(self, index: str | None, body: Mapping[str, Any]) -> list[Json]:
        """Return the tokens that an analyzer makes."""
        path = "/_analyze" if index is None else _path(index, "_analyze")
        answer = await self._read("POST", path, body=body, doing="analyzing text")
        return list(answer["tokens"])

    # --- documents

    async def mget(
        self,
        index: str,
        ids: Sequence[str],
        *,
        source: bool | Sequence[str] = True,
        vectors: bool = False,
        timeout_s: float,
    ) -> list[Json]:
        """Return one entry per id, in their order: `found`, `_version`, `_source` and so on, read in real time.

        An alias' filter does not apply here: tombstones come back, look at `deleted`. Vectors are left out unless
        asked for. An entry that carries `error` raises, so what comes back was really looked up.
        """
        if not ids:
            return []
        wanted: Any = source if isinstance(source, bool) else {"includes": list(source)}
        if wanted is True:
            wanted = {"includes": ["*"]}
        if wanted and not vectors:
            wanted["excludes"] = [EMBEDDING]
        docs = [{"_id": id_, "_source": wanted} for id_ in ids]
        pauses = [0.1, 0.3]
        while True:
            answer = await self._read(
                "POST",
                _path(index, "_mget"),
                body={"docs": docs},
                doing="reading documents",
                timeout_s=timeout_s,
            )
            kinds = {kind for entry in answer["docs"] for kind in types_of(entry.get("error"))}
            if AWAY.isdisjoint(kinds) or not pauses or timeout_s < HANG_S:
                break
            # An index that another request is making has its alias before its shards.
            await asyncio.sleep(pauses.pop(0))
        for entry in answer["docs"]:
            if "error" in entry:
                raise translate_error(entry["error"], entry.get("status", 500), "reading documents")
        return list(answer["docs"])

    async def bulk(
        self,
        actions: Sequence[BulkAction],
        *,
        refresh: Literal["false", "true", "wait_for"] = "false",
        timeout_s: float,
    ) -> list[BulkOutcome]:
        """Index documents with external versions, through aliases that must exist; one outcome per action, in order.

        Raises only when the request as a whole failed; then each of its writes may or may not have been applied, and
        sending the same versions again is safe. Raises LimitExceeded where it would need more memory than an idle cluster
        has; several documents may then fit one by one.
        """
        if not actions:
            return []
        lines: list[bytes] = []
        for action in actions:
            header = {
                "_index": action.alias,
                "_id": action.id,
                "version": action.version,
                "version_type": "external",
                "require_alias": True,
            }
            lines += (encode({"index": header}), _line(action.source))
        return await self._bulk(lines, len(actions), refresh=refresh, timeout_s=timeout_s)

    async def confirm(
        self, alias: str, documents: Sequence[tuple[str, int, int]], *, timeout_s: float
    ) -> list[bool]:
        """Ask each document's primary whether it still is at the (seq_no, primary_term) given; writes nothing.

        An update of nothing under `if_seq_no`: the primary compares, the copies only check that it still is one, and a
        fenced alias or a blocked index refuses it as it would a write.
        """
        if not documents:
            return []
        lines: list[bytes] = []
        for id_, seq_no, term in documents:
            header = {
                "_index": alias,
                "_id": id_,
                "if_seq_no": seq_no,
                "if_primary_term": term,
                "require_alias": True,
            }
            lines += (encode({"update": header}), b'{"doc":{},"_source":false}')
        outcomes = await self._bulk(lines, len(documents), refresh="false", timeout_s=timeout_s)
        return [outcome.result == "noop" and not outcome.shards_failed for outcome in outcomes]

    async def put_document(
        self,
        index: str,
        id_: str,
        source: Mapping[str, Any],
        *,
        create: bool = False,
        if_match: tuple[int, int] | None = None,
        refresh: Literal["false", "true", "wait_for"] = "false",
        timeout_s: float | None = None,
    ) -> tuple[int, int]:
        """Write one of the service's own documents and return its (seq_no, primary_term).

        `create`: only if there is none; `if_match`: only if it still is at that (seq_no, primary_term). Raises
        Conflict when that doesn't hold.
        """
        header: Json = {"_index": index, "_id": id_}
        if if_match is not None:
            header["if_seq_no"], header["if_primary_term"] = if_match
        lines = [encode({"create" if create else "index": header}), _line(source)]
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        [outcome] = await self._bulk(lines, 1, refresh=refresh, timeout_s=timeout_s)
        error = outcome.error(f"writing {id_[:80]} to {index}")
        if error is not None:
            raise error
        assert outcome.seq_no is not None
        assert outcome.primary_term is not None
        return outcome.seq_no, outcome.primary_term

    async def record(
        self,
        entries: Sequence[tuple[str, str, bytes | Mapping[str, Any]]],
        *,
        create: bool = False,
        timeout_s: float | None = None,
    ) -> list[BulkOutcome]:
        """Write (index, id, source) of the service's own, such as log entries; one outcome per entry, in order.

        An index that is not there is made by its template. `create`: an entry that is there already stays as it is
        and its outcome is `superseded`.
        """
        if not entries:
            return []
        lines: list[bytes] = []
        for index, id_, source in entries:
            lines += (encode({"create" if create else "index": {"_index": index, "_id": id_}}), _line(source))
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        return await self._bulk(lines, len(entries), refresh="false", timeout_s=timeout_s)

    async def erase(
        self, index: str, documents: Sequence[tuple[str, int, int]], *, timeout_s: float | None = None
    ) -> list[BulkOutcome]:
        """Really delete documents (id, seq_no, primary_term), each only if it still is at that place; outcomes in order.

        `index` is a concrete index that exists: a delete of Elasticsearch has no `require_alias`. For purging
        tombstones only; what callers delete becomes a tombstone.
        """
        if not documents:
            return []
        lines = [
            encode({"delete": {"_index": index, "_id": id_, "if_seq_no": seq_no, "if_primary_term": term}})
            for id_, seq_no, term in documents
        ]
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        return await self._bulk(lines, len(documents), refresh="false", timeout_s=timeout_s)

    async def _bulk(
        self, lines: Sequence[bytes], count: int, *, refresh: str, timeout_s: float
    ) -> list[BulkOutcome]:
        # The cluster counts some hundred bytes more for each.
        sent_bytes = sum(map(len, lines)) + 1024 * count
        answer = await self._call(
            "POST",
            "/_bulk",
            params={"refresh": refresh, "timeout": f"{max(1, int(timeout_s * 900))}ms"},
            body=list(lines),
            doing="writing documents",
            timeout_s=timeout_s,
            writes=True,
            judge=partial(judge_bulk, sent_bytes=sent_bytes),
        )
        items = [next(iter(item.values())) for item in answer["items"]]
        if len(items) != count:
            raise ClusterRejected(f"writing documents: {count} were sent and {len(items)} outcomes came back")
        outcomes = [outcome_of(item) for item in items]
        if count == 1 and hopeless(outcomes[0], sent_bytes):
            raise too_large("writing documents", outcomes[0].reason or "", outcomes[0].error_type)
        return outcomes

    # --- indices and aliases

    async def resolve_aliases(self, *patterns: str) -> dict[str, dict[str, Json]]:
        """Return alias -> index -> the alias' properties, for aliases that match any pattern; empty if none does."""
        answer = await self._read(
            "GET",
            _path("_alias", _several(patterns)),
            doing=f"resolving {', '.join(patterns)}",
            accept=(404,),
        )
        found: dict[str, dict[str, Json]] = {}
        for index, entry in answer.items():
            if isinstance(entry, dict):  # a 404 carries `error` and `status` beside what was found
                for alias, properties in entry.get("aliases", {}).items():
                    found.setdefault(alias, {})[index] = properties
        return found

    async def update_aliases(
        self, actions: Sequence[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> None:
        """Change aliases in one atomic step; `timeout_s` after it arrived it is no longer begun."""
        await self._acknowledged(
            "POST",
            "/_aliases",
            body={"actions": list(actions)},
            doing="changing aliases",
            timeout_s=timeout_s,
        )

    async def resolve_index(self, pattern: str) -> dict[str, list[str]]:
        """Return concrete index -> its aliases, for what the name or pattern matches; empty if nothing does."""
        answer = await self._read(
            "GET",
            _path(_several((pattern,))),
            params={
                "features": "aliases",
                "allow_no_indices": "true",
                "ignore_unavailable": "true",
                "expand_wildcards": "all",
            },
            doing=f"looking for {pattern}",
            accept=(404,),
        )
        return {
            name: sorted(entry.get("aliases", {}))
            for name, entry in answer.items()
            if isinstance(entry, dict) and "aliases" in entry
        }

    async def create_index(
        self, name: str, body: Mapping[str, Any], *, wait_for_active_shards: str = "1"
    ) -> None:
        """Create an index with its aliases in one step, and wait until its primaries have started.

        Raises Conflict if it exists.
        """
        await self._acknowledged(
            "PUT",
            _path(name),
            params={"wait_for_active_shards": wait_for_active_shards},
            body=body,
            doing=f"creating the index {name}",
        )

    async def delete_indices(self, index_names: Sequence[str]) -> None:
        """Delete concrete indices by their exact names, all in one step; none is fine."""
        if index_names:
            path = "/" + ",".join(_path(name)[1:] for name in index_names)
            doing = f"deleting {', '.join(index_names)}"
            await self._acknowledged("DELETE", path, params={"expand_wildcards": "none"}, doing=doing)

    async def get_mapping(self, index: str) -> dict[str, Json]:
        """Return concrete index -> its mapping."""
        answer = await self._read("GET", _path(index, "_mapping"), doing="reading the mapping")
        return {name: entry["mappings"] for name, entry in answer.items()}

    async def put_mapping(
        self, index: str, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> None:
        """Add to the mapping of an index; `_meta` in it replaces the whole `_meta`.

        `timeout_s` after it arrived the change is no longer begun.
        """
        await self._acknowledged(
            "PUT",
            _path(index, "_mapping"),
            body=body,
            doing=f"changing the mapping of {index}",
            timeout_s=timeout_s,
        )

    async def get_settings(self, index: str) -> dict[str, Json]:
        """Return concrete index -> its settings, flat (`index.refresh_interval`)."""
        answer = await self._read(
            "GET",
            _path(index, "_settings"),
            params={"flat_settings": "true"},
            doing=f"reading the settings of {index}",
        )
        return {name: entry["settings"] for name, entry in answer.items()}

    async def put_settings(
        self, index: str, settings: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> None:
        """Change settings of an index; None restores a default. `timeout_s` after it arrived it is no longer begun."""
        await self._acknowledged(
            "PUT",
            _path(index, "_settings"),
            body=settings,
            doing=f"changing the settings of {index}",
            timeout_s=timeout_s,
        )

    async def add_write_block(self, index: str) -> None:
        """Block writes; when this returns, no write that was under way can still be applied.

        An index that is blocked already is opened for a moment: the cluster confirms a new block only.
        """
        path, doing = _path(index, "_block", "write"), f"blocking writes to {index}"
        answer = await self._call("PUT", path, doing=doing)
        if answer.get("acknowledged") and not answer.get("indices"):
            await self.clear_write_block(index)
            answer = await self._call("PUT", path, doing=doing)
        if not (answer.get("acknowledged") and answer.get("shards_acknowledged")):
            raise ClusterUnavailable(
                f"blocking writes to {index}: not every shard confirmed in time",
                remedy="try again; the block may be in force already",
                retry_after_s=1,
            )

    async def clear_write_block(self, index: str) -> None:
        """Let writes through again."""
        await self.put_settings(index, {"index.blocks.write": None})

    async def refresh(self, index: str, *, timeout_s: float | None = None) -> None:
        """Make what was written visible to searches."""
        answer = await self._read(
            "POST", _path(index, "_refresh"), doing=f"refreshing {index}", timeout_s=timeout_s
        )
        if answer["_shards"]["failed"]:
            raise ClusterUnavailable(
                f"refreshing {index}: {answer['_shards']['failed']} shards failed", retry_after_s=1
            )

    async def index_stats(self, index: str) -> Json:
        """Return `_stats` (documents, store, segments) of an index, per index and in all."""
        return await self._read(
            "GET",
            _path(index, "_stats", _Several("docs,store,segments")),
            doing=f"asking for the figures of {index}",
        )

    async def checkpoints(self, index: str) -> dict[int, int]:
        """Return each shard's global checkpoint: every operation up to this sequence number is on all its copies.

        What is written from now on gets a higher number, also after a failover. Raises ClusterUnavailable while a
        shard has no primary.
        """
        found = await self.sequence_numbers(index)
        return {number: shard.on_all_copies for number, shard in found.items()}

    async def sequence_numbers(self, index: str) -> dict[int, SequenceNumbers]:
        """Return how far each shard is. Raises ClusterUnavailable while one has no primary."""
        answer = await self._read(
            "GET",
            _path(index, "_stats"),
            params={
                "level": "shards",
                "filter_path": "_shards,indices.*.shards.*.seq_no,indices.*.shards.*.routing.primary",
            },
            doing=f"asking how far the shards of {index} are",
        )
        [entry] = answer.get("indices", {}).values() or [{}]
        found: dict[int, SequenceNumbers] = {}
        for number, copies in entry.get("shards", {}).items():
            known = [copy["seq_no"] for copy in copies if "seq_no" in copy]
            if known and any(copy["routing"]["primary"] for copy in copies):
                # A replica hears of it later, so the lowest is the surest.
                found[int(number)] = SequenceNumbers(
                    on_all_copies=min(each["global_checkpoint"] for each in known),
                    highest=max(each["max_seq_no"] for each in known),
                )
        settings = await self.get_settings(index)
        [shards] = [int(values["index.number_of_shards"]) for values in settings.values()]
        if set(found) != set(range(shards)):
            raise ClusterUnavailable(
                f"asking how far the shards of {index} are: {len(found)} of {shards} answered",
                retry_after_s=1,
            )
        return found

    # --- templates

    async def get_component_template(self, name: str) -> Json | None:
        """Return `{"template": …, "version": …, "_meta": …}`, or None."""
        answer = await self._read(
            "GET",
            _path("_component_template", name),
            doing=f"reading the component template {name}",
            accept=(404,),
        )
        found = [
            entry["component_template"]
            for entry in answer.get("component_templates", [])
            if entry["name"] == name
        ]
        return found[0] if found else None

    async def put_component_template(self, name: str, body: Mapping[str, Any]) -> None:
        """Create or replace a component template."""
        await self._acknowledged(
            "PUT",
            _path("_component_template", name),
            body=body,
            doing=f"installing the component template {name}",
        )

    async def template_versions(self, pattern: str, *, timeout_s: float) -> dict[str, int | None]:
        """Return name -> version of the component templates that match; asked past pool and breaker."""
        answer = await self._read(
            "GET",
            _path("_component_template", _several((pattern,))),
            params={"filter_path": "component_templates.name,component_templates.component_template.version"},
            doing="asking for the templates' versions",
            timeout_s=timeout_s,
            accept=(404,),
            guarded=False,
        )
        return {
            entry["name"]: entry["component_template"].get("version")
            for entry in answer.get("component_templates", [])
        }

    async def get_index_template(self, name: str) -> Json | None:
        """Return the index template's body, or None."""
        answer = await self._read(
            "GET", _path("_index_template", name), doing=f"reading the index template {name}", accept=(404,)
        )
        found = [
            entry["index_template"] for entry in answer.get("index_templates", []) if entry["name"] == name
        ]
        return found[0] if found else None

    async def put_index_template(self, name: str, body: Mapping[str, Any]) -> None:
        """Create or replace an index template."""
        await self._acknowledged(
            "PUT", _path("_index_template", name), body=body, doing=f"installing the index template {name}"
        )

    async def simulate_index(self, name: str) -> Json:
        """Return the settings, mappings and aliases that the templates would give an index of this name."""
        answer = await self._read(
            "POST", _path("_index_template", "_simulate_index", name), doing="trying the index templates"
        )
        return cast(Json, answer["template"])

    async def delete_templates(
        self, *, index_templates: Sequence[str] = (), component_templates: Sequence[str] = ()
    ) -> None:
        """Delete templates, index templates first; a missing one is fine."""
        for kind, names in (
            ("_index_template", index_templates),
            ("_component_template", component_templates),
        ):
            for name in names:
                await self._call(
                    "DELETE", _path(kind, name), doing=f"deleting the template {name}", accept=(404,)
                )

    # --- one request

    async def _acknowledged(
        self,
        method: Method,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        doing: str,
        timeout_s: float | None = None,
    ) -> None:
        """Send a change of the cluster's state and insist on its acknowledgement.

        `timeout_s` bounds the whole, the wait for a connection included; and, from its arrival, how long the master lets
        it wait for its turn: half a minute otherwise.
        """
        if timeout_s is not None:
            params = {**(params or {}), "master_timeout": f"{round(timeout_s * 1000)}ms"}
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._call(
                    method, path, body=body, params=params, doing=doing, timeout_s=timeout_s
                )
        except TimeoutError:
            raise ClusterUnavailable(
                f"{doing}: no answer within {timeout_s:g} s",
                remedy="look at the cluster's health and try again; the change may be in force already",
                retry_after_s=1,
            ) from None
        if not answer.get("acknowledged"):
            raise ClusterUnavailable(
                f"{doing}: the cluster took the change but not every node confirmed it in time",
                remedy="look at the cluster's health and try again; the change may be in force already",
                retry_after_s=1,
            )

    async def _read(self, method: Method, path: str, *, doing: str, **options: Any) -> Json:
        return await self._call(method, path, doing=doing, again=True, **options)

    async def _call(
        self,
        method: Method,
        path: str,
        *,
        doing: str,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        opaque_id: str | None = None,
        again: bool = False,
        accept: tuple[int, ...] = (),
        writes: bool = False,
        guarded: bool = True,
        judge: "Callable[[Json], Outcome] | None" = None,
    ) -> Json:
        """Send one request and return its body; statuses in `accept` are answers, not errors.

        `again`: the request changes nothing, so a failed connection is tried once more. `guarded` false passes pool and breaker by. `judge` tells how far an answer shows a cluster that serves.
        """
        headers = {"accept": "application/json"}
        if body is not None:
            headers["content-type"] = "application/x-ndjson" if isinstance(body, list) else "application/json"
            body = (
                [part if isinstance(part, bytes) else encode(part) for part in body]
                if isinstance(body, list)
                else encode(body)
            )
        opaque_id = opaque_id or observing.request_id.get()
        if opaque_id:
            headers["x-opaque-id"] = _header_value(opaque_id)
        timeout_s = self.request_timeout_s if timeout_s is None else timeout_s
        # Ended by the client's own timeout, the node would be set aside for all: for that a caller's hurry is no reason.
        hasty = timeout_s < min(self.request_timeout_s, SET_ASIDE_S)
        client = self._client_for(self.request_timeout_s if hasty else timeout_s)
        target = f"{path}?{urlencode(params)}" if params else path
        retry = False
        while True:
            place = self._place(timeout_s, writes=writes, retry=retry) if guarded else nullcontext(Call())
            async with place as call:
                if self._closed:
                    # Also before a second try, which would open connections anew that nobody closes.
                    raise ClusterUnavailable(f"{doing}: this service is ending", retry_after_s=BUSY_RETRY_S)
                try:
                    sent = client.perform_request(
                        method, target, headers=headers, body=body, endpoint_id=_endpoint(method, path)
                    )
                    answer = await (_within(timeout_s, sent) if hasty else sent)
                except VENDOR_ERRORS as cause:
                    if (
                        isinstance(cause, elastic_transport.ApiError)
                        and cause.meta.status in accept
                        and isinstance(cause.body, dict)
                    ):
                        call.outcome = "ok"
                        return cause.body
                    error = translate(cause, doing)
                    if isinstance(cause, elastic_transport.ConnectionTimeout) and not writes:
                        error = self._late(error, doing, timeout_s=timeout_s, silent=call.silent)
                    call.outcome = _outcome_of(cause, error)
                    broken = isinstance(cause, elastic_transport.ConnectionError)
                    if not (again and broken and not retry and self.guard.budget.take()):
                        raise error from cause
                else:
                    body_ = answer.body
                    call.outcome = judge(body_) if judge and isinstance(body_, dict) else "ok"
                    if not isinstance(body_, dict):
                        raise ClusterRejected(
                            f"{doing}: the answer is not a JSON object",
                            remedy="check that the address is Elasticsearch's own and not a proxy's page",
                        )
                    return body_
            retry = True

    def _late(self, error: HalflifeError, doing: str, *, timeout_s: float, silent: bool) -> HalflifeError:
        """Return the caller's own error where its short time is over, else `error`, which blames the cluster.

        A cluster that answers others does not hang; of one that answers nobody, `HANG_S` is long enough to tell.
        """
        if timeout_s >= (HANG_S if silent else self.request_timeout_s):
            return error
        return ClusterOutOfTime(
            f"{doing}: no answer within the request's time budget",
            remedy="give it more time (`timeout_ms`, or the X-Halflife-Timeout-Ms header), or ask for less",
            retry_after_s=BUSY_RETRY_S,
        )

    def _place(self, timeout_s: float, *, writes: bool, retry: bool) -> AbstractAsyncContextManager[Call]:
        wait_s = min(timeout_s, self._pool_wait_s)
        if not writes:
            return self.guard.call(wait_s=wait_s, retry=retry)
        return self._write_place(wait_s, retry=retry)

    @asynccontextmanager
    async def _write_place(self, wait_s: float, *, retry: bool) -> AsyncIterator[Call]:
        self.guard.check()
        try:
            async with asyncio.timeout(wait_s):
                await self._write_places.acquire()
        except TimeoutError:
            raise _not_sent(f"too many writes were under way for {wait_s:g} s", BUSY_RETRY_S) from None
        try:
            async with self.guard.call(wait_s=wait_s, retry=retry) as call:
                yield call
        finally:
            self._write_places.release()

    def _client_for(self, timeout_s: float) -> AsyncElasticsearch:
        """Return a client with this timeout, rounded up a little: making one costs a third of a millisecond."""
        step = 0.05 if timeout_s < 2 else 0.5 if timeout_s < 20 else 5.0
        rounded = max(1, -int(-timeout_s // step)) * step
        if rounded not in self._timed:
            if len(self._timed) >= 256:
                self._timed.clear()
            self._timed[rounded] = self._client.options(
                request_timeout=rounded, max_retries=0, retry_on_status=(), retry_on_timeout=False
            )
        return self._timed[rounded]


def _not_sent(what: str, wait_s: float) -> HalflifeError:
    return ClusterUnavailable(
        f"Elasticsearch was not asked: {what}",
        remedy="try again after the pause; /readyz tells what is wrong",
        retry_after_s=max(BUSY_RETRY_S, wait_s),
    )


async def _within(seconds: float, work: Coroutine[Any, Any, _T]) -> _T:
    """Await within the time; past it the work is cancelled, which closes its connection, and ends as the client's timeout."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as cause:
        raise elastic_transport.ConnectionTimeout("the caller's time is over", errors=(cause,)) from cause


def _outcome_of(cause: Exception, error: HalflifeError) -> Outcome:
    """Say what a failed request tells of the cluster; what a timeout does, the guard knows from the other calls."""
    if isinstance(cause, elastic_transport.ConnectionTimeout):
        return "unknown"
    if isinstance(cause, elastic_transport.ApiError):
        return "refused" if isinstance(error, ClusterUnavailable) else "ok"
    return "failed"


_ENDPOINTS = {
    "_msearch": "msearch", "_search": "search", "_bulk": "bulk", "_mget": "mget", "_count": "count",
    "_analyze": "indices.analyze", "_alias": "indices.get_alias", "_aliases": "indices.update_aliases",
    "_mapping": "indices.mapping", "_settings": "indices.settings", "_refresh": "indices.refresh",
    "_stats": "indices.stats", "_block": "indices.add_block", "_nodes": "nodes.stats",
    "_component_template": "cluster.component_template", "_index_template": "indices.index_template",
}  # fmt: skip


def _endpoint(method: str, path: str) -> str:
    """Return what the client's span is called: the API, without names of indices."""
    parts = path.strip("/").split("/")
    if "_pit" in parts:
        return "close_point_in_time" if method == "DELETE" else "open_point_in_time"
    if parts[:2] == ["_cluster", "health"]:
        return "cluster.health"
    known = next((_ENDPOINTS[part] for part in reversed(parts) if part in _ENDPOINTS), None)
    return known or ("info" if parts == [""] else "indices")


def _floats(vector: np.ndarray) -> list[float]:
    return [float(number) for number in np.asarray(vector, dtype=np.float32)]


VENDOR_ERRORS: tuple[type[Exception], ...] = (
    elastic_transport.ApiError,
    elastic_transport.TransportError,
    BulkIndexError,
    ScanError,
)
"""The roots of everything that the client raises; the last two derive from neither of the first."""


def translate(cause: Exception, doing: str) -> HalflifeError:
    """Return one of our errors for any exception of the client; raise `cause` itself if it is none of those."""
    match cause:
        case UnsupportedProductError():
            return ClusterRejected(
                f"{doing}: the server is not Elasticsearch {OLDEST} or newer",
                remedy="point HALFLIFE_ELASTICSEARCH_URL at an Elasticsearch cluster, not at another product or a proxy's page",
            )
        case elastic_transport.ApiError():
            return _from_answer(cause, doing)
        case elastic_transport.ConnectionTimeout():
            return ClusterUnavailable(
                f"{doing}: no answer in time",
                remedy="try again; if it stays so, look at the cluster's load, or raise the timeout",
                retry_after_s=BUSY_RETRY_S,
            )
        case elastic_transport.TlsError():
            return ClusterUnavailable(
                f"{doing}: the encrypted connection failed: {_brief(cause)}",
                remedy="set HALFLIFE_ELASTICSEARCH_CA to the cluster's CA, and check the host name in its certificate",
            )
        case elastic_transport.ConnectionError() | elastic_transport.SniffingError():
            return ClusterUnavailable(
                f"{doing}: no connection: {_brief(cause)}",
                remedy="check that Elasticsearch runs and that HALFLIFE_ELASTICSEARCH_URL is its address",
                retry_after_s=BUSY_RETRY_S,
            )
        case elastic_transport.SerializationError():
            return ClusterRejected(
                f"{doing}: the answer can't be read: {_brief(cause)}",
                remedy="check that the address is Elasticsearch's own and not a proxy's page",
            )
        case elastic_transport.TransportError():
            return ClusterUnavailable(f"{doing}: {_brief(cause)}", retry_after_s=BUSY_RETRY_S)
        case BulkIndexError() | ScanError():
            return ClusterRejected(f"{doing}: {_brief(cause)}")
        case _:
            raise cause


def _from_answer(cause: elastic_transport.ApiError, doing: str) -> HalflifeError:
    body = cause.body
    error = body.get("error") if isinstance(body, dict) else None
    return translate_error(error, cause.meta.status, doing)


def _brief(cause: Exception) -> str:
    return str(cause)[:300]


def _line(source: bytes | Mapping[str, Any]) -> bytes:
    line = source if isinstance(source, bytes) else encode(source)
    if b"\n" in line or b"\r" in line:
        # A line break would end the document here and turn its rest into further actions.
        raise ValueError("a bulk source is JSON on one line")
    return line


_NAME = re.compile(r"[^\s/\\?#\"<>|*,.:][^\s/\\?#\"<>|*,:]*")
_PATTERN = re.compile(r"halflife[^\s/\\?#\"<>|,:]*")


def _path(*segments: str) -> str:
    """Join path segments; refuse what could reach more than one thing: empty, dotted, `_all`, wildcards, commas."""
    for segment in segments:
        if not isinstance(segment, _Several) and (not _NAME.fullmatch(segment) or segment == "_all"):
            raise ValueError(f"{segment!r} can't stand in a path to Elasticsearch")
    return "/" + "/".join(quote(segment, safe="*,") for segment in segments)


class _Several(str):
    """A list of names or wildcards that may stand in the path of a request that only reads."""

    __slots__ = ()


def _several(patterns: Sequence[str], allowed: re.Pattern[str] = _PATTERN) -> _Several:
    for pattern in patterns:
        if not allowed.fullmatch(pattern):
            raise ValueError(f"{pattern!r} is not a pattern for names of ours")
    return _Several(",".join(patterns))


def _header_value(value: str) -> str:
    """Keep what a header may carry."""
    return re.sub(r"[^\x21-\x7e]", "_", value)[:128]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _with_port(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as cause:
        raise InvalidRequest(
            f"HALFLIFE_ELASTICSEARCH_URL: the address can't be read: {cause}",
            remedy="write it as http://localhost:9200 or https://search.example:9200",
        ) from cause
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(
            f"HALFLIFE_ELASTICSEARCH_URL: '{_without_password(url)[:80]}' is not an address of Elasticsearch",
            remedy="write it as http://localhost:9200 or https://search.example:9200",
        )
    if port is not None:
        return url.strip()
    netloc = f"{parts.netloc.rstrip(':')}:{443 if parts.scheme == 'https' else 9200}"
    return parts._replace(netloc=netloc).geturl()


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
