"""What the tests of moving a collection share: one collection on a real node, writers, and embedders by model."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from app import catalog, names
from app.answers import BulkResult
from app.catalog import Catalog, create, install_templates
from app.chunking import Chunking
from app.collection import Collection, CollectionOptions, DeclaredType
from app.elastic import Cluster
from app.embedding import Embedder
from app.indexing import Indexer
from app.reindex import Progress, Reindexer
from app.targets import CatalogTargets
from app.writes import Patience, RefreshWhen, Stamper
from tests.fakes import EmbeddingServer

DIMS = 8


def now() -> datetime:
    return datetime.now(UTC)


def now_us() -> int:
    return time.time_ns() // 1_000


def embedder_of(server: EmbeddingServer, model: str = "fake") -> Embedder:
    return Embedder.connect(
        base_url=server.base_url, api_key=None, model=model, dims=server.dims, retries=1, backoff_s=0.01,
        retry_budget_s=2,
    )  # fmt: skip


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of ours catches it."""


@dataclass
class World:
    """A collection, and what embeds for each model."""

    cluster: Cluster
    name: str
    embedders: dict[str, Embedder]
    steps: list[Progress] = field(default_factory=list)
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def read(self) -> str:
        return names.read_alias(self.name)

    def embedder(self, collection: Collection) -> Embedder:
        return self.embedders[collection.model or "fake"]

    def indexer(self, worker: int = 1, *, skew_us: int = 0, patience: Patience | None = None) -> Indexer:
        """A service of its own, with its own memory of the collection and a clock wrong by so much."""
        known = Catalog(self.cluster)
        return Indexer(
            cluster=self.cluster,
            targets=lambda name: CatalogTargets(
                name, cluster=self.cluster, catalog=known, embedder=self.embedder
            ),
            stamper=Stamper(worker, lambda: now_us() + skew_us),
            now=now,
            chunks=Chunking(max_tokens=40, overlap_tokens=0),
            patience=patience,
        )

    def reindexer(self, **options: Any) -> Reindexer:
        options.setdefault("patience_s", 30.0)
        return Reindexer(
            self.cluster, self.name, embedder=self.embedder, now=now, report=self.report, **options
        )

    def report(self, progress: Progress) -> None:
        self.steps.append(progress)
        self.stepped.set()

    async def copied(self, documents: int) -> None:
        """Wait until a reindex has copied so many."""
        while not any(step.step == "copying" and step.done >= documents for step in self.steps):
            self.stepped.clear()
            await self.stepped.wait()

    async def collection(self) -> Collection:
        return (await catalog.get(self.cluster, self.name)).collection

    async def upsert(self, *items: Any, refresh: RefreshWhen = "false") -> BulkResult:
        result = await self.indexer().upsert(items, collection=await self.collection(), refresh=refresh)
        assert result.failed == 0, result
        return result

    async def delete(self, *ids: str) -> None:
        result = await self.indexer().delete_ids(ids, collection=await self.collection())
        assert result.failed == 0, result

    async def dump(self, index: str | None = None) -> dict[str, tuple[int, dict[str, Any]]]:
        """Everything in an index, tombstones too: id -> (version, source with vectors)."""
        index = index or (await self.collection()).index
        await self.cluster.refresh(index)
        body = {
            "size": 10_000,
            "version": True,
            "query": {"match_all": {}},
            "_source": {"exclude_vectors": False},
        }
        answer = await self.cluster.search(index, body, timeout_s=30)
        return {hit["_id"]: (hit["_version"], hit["_source"]) for hit in answer["hits"]["hits"]}

    async def indices(self) -> list[str]:
        found = await self.cluster.resolve_index(names.index_pattern(self.name))
        return sorted(index for index in found if names.collection_of(index) == self.name)

    async def nearest(self, vector: Sequence[float], k: int = 10) -> list[str]:
        knn = {
            "field": "chunks.embedding",
            "query_vector": list(vector),
            "k": k,
            "num_candidates": max(k, 50),
        }
        query = {"nested": {"path": "chunks", "query": {"knn": knn}, "score_mode": "max"}}
        answer = await self.cluster.search(self.read, {"query": query, "size": k}, timeout_s=30)
        return [hit["_id"] for hit in answer["hits"]["hits"]]


async def world_on(
    cluster: Cluster,
    name: str,
    embedders: Mapping[str, Embedder],
    *,
    declared: Mapping[str, DeclaredType] | None = None,
    shards: int = 1,
    replicas: int | None = None,
) -> World:
    await cluster.check_version()
    await install_templates(cluster, dims=DIMS)
    options = CollectionOptions(
        declared=dict(declared or {}),
        shards=shards,
        replicas=replicas,
    )
    await create(cluster, name, options, dims=DIMS, model="fake", moment=now())
    return World(cluster, name, dict(embedders))
