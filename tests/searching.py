"""What the search tests share: a collection with exactly the vectors wanted, and an embedder that knows its texts.

The cluster and everything between it and the answer are real; only the embedding server, whose answers are not
what these tests are about, is stood in for.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import httpx2
import numpy as np

from app import catalog, documents, fields, names
from app.answers import SearchResult
from app.asking import Search
from app.collection import Collection, CollectionOptions, DeclaredType, Similarity
from app.elastic import BulkAction, Cluster
from app.embedding import Embedded, Embedder
from app.encoding import pack_vector
from app.errors import EmbedderUnavailable, HalflifeError
from app.reranking import Reranker
from app.search import Caller, Doors, next_page, search
from app.times import parse_instant, to_ms
from tests.nodes import StandsBefore

SECRET = b"the secret of the cursors of these tests"
NOW = "2025-01-31T00:00:00Z"
NOW_MS = to_ms(parse_instant(NOW))
DAY = 86_400_000

PATIENT: dict[str, Any] = {"paging": False, "timeout_ms": 60_000}
"""No point in time unless a test wants pages, and time enough for a busy machine."""

FLOAT_HNSW: dict[str, Any] = {"type": "hnsw", "m": 16, "ef_construction": 100}
"""Full-precision vectors, so that scores can be compared with arithmetic."""


def unit(vector: Sequence[float]) -> list[float]:
    """Return the vector at length one."""
    wide = np.asarray(vector, dtype=np.float64)
    return [float(x) for x in wide / np.linalg.norm(wide)]


def hashed(text: str, dims: int) -> list[float]:
    """Return a unit vector that depends on the words of the text alone, each word pulling its own way."""
    total = np.zeros(dims)
    for word in text.lower().split():
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
        total += np.random.default_rng(seed).normal(size=dims)
    return unit([1.0] * dims) if not total.any() else unit([float(x) for x in total])


class StandIn:
    """Embeds a text as told, else by its words; fails as told; keeps what it was asked."""

    def __init__(
        self,
        *,
        dims: int,
        vectors: Mapping[str, Sequence[float]] | None = None,
        error: HalflifeError | None = None,
        errors: Mapping[str, HalflifeError] | None = None,
        truncated: Sequence[str] = (),
        delay_s: float = 0.0,
    ) -> None:
        self.dims = dims
        self.model = "stand-in"
        self.vectors = dict(vectors or {})
        self.error = error
        self.errors = dict(errors or {})
        self.truncated = set(truncated)
        self.delay_s = delay_s
        self.asked: list[list[str]] = []

    async def embed_queries(
        self, texts: Sequence[str], *, deadline_s: float | None = None, caller: str = ""
    ) -> Embedded:
        self.asked.append(list(texts))
        await asyncio.sleep(min(self.delay_s, self.delay_s if deadline_s is None else deadline_s))
        if deadline_s is not None and self.delay_s > deadline_s:
            raise EmbedderUnavailable("no answer in time")
        if self.error is not None:
            raise self.error
        vectors = [
            None
            if text in self.errors
            else np.asarray(self.vectors.get(text, hashed(text, self.dims)), dtype=np.float32)
            for text in texts
        ]
        return Embedded(
            vectors,
            {at: self.errors[text] for at, text in enumerate(texts) if text in self.errors},
            frozenset(at for at, text in enumerate(texts) if text in self.truncated),
        )


def source_of(given: Mapping[str, Any], collection: Collection, *, normalize: bool = True) -> dict[str, Any]:
    """Return `_source` as the service writes it. `chunks`, where given, is a list of (text, vector or None)."""
    raw = {key: value for key, value in given.items() if key not in ("chunks", "embedding", "raw")}
    pieces = given.get("chunks")
    if pieces is None:
        pieces = [(given.get("text", ""), given.get("embedding"))]
    else:
        raw["text"] = "\n".join(text for text, _ in pieces)
    document, declared = documents.check_document(raw, collection)
    chunks, start = [], 0
    for text, vector in pieces:
        wanted = None if vector is None else unit(vector) if normalize else vector
        packed = None if wanted is None else pack_vector(np.asarray(wanted, dtype=np.float32))
        chunks.append(documents.chunk_source(text, start, start + len(text), digest=None, vector=packed))
        start += len(text) + 1
    body = documents.source(document, chunks=chunks, declared=declared, indexed_at=NOW)
    return {**body, **given.get("raw", {})}


async def make_collection(
    cluster: Cluster,
    given: Sequence[Mapping[str, Any]],
    *,
    dims: int,
    name: str | None = None,
    similarity: Similarity = "cosine",
    declared: Mapping[str, DeclaredType] | None = None,
    index_options: Mapping[str, Any] | None = None,
    shards: int | None = None,
    normalize: bool = True,
) -> Collection:
    """Make a collection of documents under a name of its own, with full-precision vectors unless told otherwise."""
    name = name or f"search_{uuid.uuid4().hex[:10]}"
    options = CollectionOptions.model_validate(
        {
            "similarity": similarity,
            "declared": dict(declared or {}),
            "replicas": 0,
            **({"shards": shards} if shards else {}),
        }
    )
    await catalog.install_templates(cluster, dims=dims)
    # As earlier releases made it: from its first generation on.
    aliases = {names.read_alias(name): catalog.read_alias_properties(), names.write_alias(name, 1): {}}
    body = catalog.index_body(name, options, dims=dims, model="stand-in", slot_aliases=aliases)
    chunks = body["mappings"]["properties"][fields.CHUNKS]["properties"]
    chunks["embedding"]["index_options"] = dict(index_options or FLOAT_HNSW)
    await cluster.create_index(names.index_name(name, datetime.now(UTC)), body)
    collection = (await catalog.get(cluster, name)).collection
    await write(cluster, collection, given, normalize=normalize)
    return collection


async def write(
    cluster: Cluster,
    collection: Collection,
    given: Sequence[Mapping[str, Any]],
    *,
    version: int = 1,
    normalize: bool = True,
) -> None:
    """Write documents and make them visible."""
    alias = names.write_alias(collection.name, 1)
    actions = [
        BulkAction(alias, each["id"], version, source_of(each, collection, normalize=normalize))
        for each in given
    ]
    if not actions:
        return
    outcomes = await cluster.bulk(actions, refresh="true", timeout_s=60)
    failed = [
        (action.id, outcome) for action, outcome in zip(actions, outcomes, strict=True) if outcome.error_type
    ]
    assert not failed, failed[:3]


async def settle(cluster: Cluster, collection: Collection) -> None:
    """Merge the collection's segments into one, so that no merge in the background changes what kNN finds."""
    async with httpx2.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{cluster.urls[0]}/{collection.index}/_forcemerge?max_num_segments=1")
    assert answer.status_code == 200, answer.text
    await cluster.refresh(collection.index)


async def drop_collection(cluster: Cluster, collection: Collection) -> None:
    """Delete what `make_collection` made."""
    await cluster.delete_indices([collection.index])


def doors_to(cluster: Cluster, embedder: StandIn, *, reranker: Any = None) -> Doors:
    """Return what a search talks to."""
    return Doors(cluster, cast(Embedder, embedder), cast(Reranker | None, reranker), [SECRET])


class Asker:
    """Asks one collection through one set of doors, as of `NOW` unless told otherwise."""

    def __init__(
        self, cluster: Cluster, collection: Collection, embedder: StandIn, *, reranker: Any = None
    ) -> None:
        self.cluster = cluster
        self.collection = collection
        self.embedder = embedder
        self.doors = doors_to(cluster, embedder, reranker=reranker)

    async def batch(
        self, *requests: Any, forced: Any = (), now_ms: Any = NOW_MS
    ) -> list[SearchResult | HalflifeError]:
        """Ask several at once."""
        return await search(
            [
                Search.model_validate({"collection": self.collection.name, **PATIENT, **each})
                for each in requests
            ],
            collection=self.collection,
            doors=self.doors,
            caller=Caller(forced=tuple(forced)),
            now_ms=now_ms,
        )

    async def ask(
        self, query: str, *, forced: Any = (), now_ms: Any = NOW_MS, **options: Any
    ) -> SearchResult:
        """Ask one; raise its error."""
        [answer] = await self.batch({"query": query, **options}, forced=forced, now_ms=now_ms)
        if isinstance(answer, HalflifeError):
            raise answer
        return answer

    async def page(self, cursor: str, *, now_ms: int = NOW_MS) -> SearchResult:
        """Ask for the page after the one that gave the cursor."""
        return await next_page(
            cursor, collection=self.collection, doors=self.doors, caller=Caller(), now_ms=now_ms
        )


def ids(answer: SearchResult) -> list[str]:
    """Return the hits' ids in order."""
    return [hit.id for hit in answer.hits]


class Lacking(StandsBefore):
    """A cluster of which a shard fails at one of its requests: the answers keep every second hit, or none, and say so."""

    def __init__(self, cluster: Cluster, at: int, *, larger_than: int = 0, keeps: bool = True) -> None:
        super().__init__(cluster)
        self.at = at
        self.larger_than = larger_than
        self.keeps = keeps
        self.asked = 0

    async def msearch(self, searches: Any, **options: Any) -> Any:
        """Ask the cluster, and lose a part of its answers at the chosen request."""
        answers = await self.cluster.msearch(searches, **options)
        for (_, body), answer in zip(searches, answers, strict=True):
            assert isinstance(answer, dict)
            if self.asked == self.at and body["size"] > self.larger_than:
                answer["hits"]["hits"] = answer["hits"]["hits"][::2] if self.keeps else []
                failure = {"reason": {"reason": "disk on fire"}}
                answer["_shards"] = {"total": 2, "failed": 1, "failures": [failure]}
        self.asked += 1
        return answers
