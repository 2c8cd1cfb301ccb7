"""Where the writes of a collection go, as its aliases in the cluster say. Joins the catalog to the write protocol."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

from app import moves
from app.catalog import Catalog, Known, WriteTarget, read_index
from app.collection import Collection
from app.elastic import Cluster
from app.embedding import Embedded
from app.errors import ClusterUnavailable, SchemaMismatch
from app.writes import DocumentEmbedder, Target

FENCE_WAIT_S: Final = 18.0
"""How long a writer waits for a fence to go: past the rescue, within what clients give a write."""


class OtherModel:
    """Stands in for the embedder where a collection was embedded with another model than the service has.

    Vectors of two models can't be compared, however alike their lengths; so a text is refused rather than mixed in.
    Writes that need no embedding pass: deletes, patches, documents that bring their vectors.
    """

    def __init__(self, collection: Collection, model: str) -> None:
        self._reason = SchemaMismatch(
            f"the collection `{collection.name}` was embedded with {collection.model}, this service embeds with {model}",
            field="text",
            remedy=f"configure {collection.model}, or move the collection: halflife reindex {collection.name} --reembed",
        )

    async def embed_documents(
        self, texts: Sequence[str], *, deadline_s: float | None = None, stall_s: float | None = None
    ) -> Embedded:
        """Return the same refusal for every text."""
        return Embedded([None] * len(texts), dict.fromkeys(range(len(texts)), self._reason), frozenset())


class CatalogTargets:
    """The write target of one collection; see `writes.Targets`."""

    def __init__(
        self,
        name: str,
        *,
        cluster: Cluster,
        catalog: Catalog,
        embedder: Callable[[Collection], DocumentEmbedder],
    ) -> None:
        """`embedder` returns what embeds for an index."""
        self._name = name
        self._cluster = cluster
        self._catalog = catalog
        self._embedder = embedder

    async def current(self) -> Target:
        """Return the target as last read, for a few seconds at most; behind a fence, once it has gone."""
        return await self._target(await self._catalog.get(self._name))

    async def reread(self, seen: Target) -> Target:
        """Return the target as it is now; behind a fence, once it has gone."""
        return await self._target(await self._catalog.get(self._name, fresh=True))

    async def _target(self, known: Known) -> Target:
        while known.target is None:
            assert known.fence is not None
            known = await self._behind(known.fence)
        collection = known.collection
        if known.target.index != collection.index:
            collection = await read_index(self._cluster, self._name, known.target.index)
        return Target(known.target.alias, collection, self._embedder(collection))

    async def _behind(self, first: WriteTarget) -> Known:
        """Wait until there is no fence, and lift one that nobody seems to own any more; see `moves`.

        A fence is told apart by its generation: how long one has stood needs no clock but our own.
        """
        loop = asyncio.get_running_loop()
        fence, since = first, loop.time()
        until = since + FENCE_WAIT_S
        while loop.time() < until:
            await asyncio.sleep(random.uniform(0.03, 0.1))  # noqa: S311 - jitter, no secret
            known = await self._catalog.get(self._name, fresh=True)
            if known.fence is None:
                return known
            if known.fence != fence:
                fence, since = known.fence, loop.time()
            elif loop.time() - since > moves.RESCUE_AFTER_S:
                await moves.lift(self._cluster, self._name, index=fence.index, generation=fence.generation)
        raise ClusterUnavailable(
            f"writing to `{self._name}`: its index is being exchanged",
            remedy="send it again; reads are not affected",
            retry_after_s=1,
        )
