"""Where the writes of a collection go, as its aliases in the cluster say. Joins the catalog to the write protocol."""

from collections.abc import Awaitable, Callable, Sequence

from app.catalog import Catalog, Known, read_collection
from app.elastic import Cluster
from app.errors import ClusterRejected, HalflifeError
from app.models import Collection
from app.writes import DocumentEmbedder, Target

Abandon = Callable[[str, Target, HalflifeError], Awaitable[None]]


class CatalogTargets:
    """The write targets of one collection; see `writes.Targets`."""

    def __init__(
        self,
        name: str,
        *,
        cluster: Cluster,
        catalog: Catalog,
        embedder: Callable[[Collection], DocumentEmbedder],
        abandon: Abandon | None = None,
    ) -> None:
        """`embedder` returns what embeds for an index; `abandon` marks a reindex as aborted, and returns once it is."""
        self._name = name
        self._cluster = cluster
        self._catalog = catalog
        self._embedder = embedder
        self._abandon = abandon

    async def current(self) -> Sequence[Target]:
        """Return the targets as last read, for a few seconds at most."""
        return await self._targets(await self._catalog.get(self._name))

    async def reread(self, seen: Sequence[Target]) -> Sequence[Target]:
        """Return the targets as they are now."""
        return await self._targets(await self._catalog.get(self._name, fresh=True))

    async def abandon(self, target: Target, reason: HalflifeError) -> None:
        """Mark the reindex as aborted. Raises ClusterRejected where nobody can: then the write is not acknowledged."""
        if self._abandon is None:
            raise ClusterRejected(
                f"the index behind {target.alias} refuses the document: {reason.detail}",
                remedy="abort the reindex that is under way",
            ) from reason
        await self._abandon(self._name, target, reason)

    async def _targets(self, known: Known) -> list[Target]:
        found = []
        for target in known.targets:
            collection = known.collection
            if target.index != collection.index:
                mapping = (await self._cluster.get_mapping(target.index))[target.index]
                collection = read_collection(self._name, target.index, mapping)
            found.append(Target(target.alias, collection, self._embedder(collection)))
        return found
