"""Documents of one index brought into another of another shape, and the two compared.

What differs is made to fit on the way: values typed as the target declares them, vectors of its model, texts cut anew.
Versions go along, so that bringing a document twice, or late, changes nothing. Knows the order of no steps: `reindex`
says when, and which alias may write.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from app import chunking, copying, documents, fields
from app.chunking import Chunking
from app.collection import Collection
from app.copying import patiently
from app.documents import InvalidItem, Source
from app.elastic import BulkAction, Cluster
from app.encoding import encode
from app.errors import Conflict, Unavailable
from app.moves import Taken
from app.writes import DocumentEmbedder

Json = dict[str, Any]
Hit = dict[str, Any]
T = TypeVar("T")

COMPARED_IN_FENCE: Final = 5_000
"""A collection of up to so many documents is compared pair by pair inside the fence too. Of 8,000 on a busy machine
writers waited 2.8 s; larger ones are compared before it and counted in it.
"""
NAMED_IDS: Final = 20

_WANTED: Final = object()
_WITH_VECTORS: Final[Json] = {
    "nested": {"path": fields.CHUNKS, "query": {"exists": {"field": fields.EMBEDDING}}}
}


class Mismatch(Conflict):
    """The new index does not hold what the old one does; nothing was swapped."""

    code = "reindex-mismatch"
    title = "The new index does not match"


@dataclass(frozen=True, slots=True)
class Lane:
    """From one index to another, as their mappings have it."""

    source: Collection
    target: Collection
    rechunk: bool

    @property
    def same_space(self) -> bool:
        """Tell whether vectors can be handed over."""
        return (self.source.model, self.source.dims) == (self.target.model, self.target.dims)

    @property
    def same_chunks(self) -> bool:
        """Tell whether both have the same chunks with the same vectors."""
        return self.same_space and not self.rechunk


class Carrier:
    """Brings documents over lanes of one collection, and compares their ends."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        *,
        embedder: Callable[[Collection], DocumentEmbedder],
        chunks: Chunking,
        patience_s: float,
        tell: Callable[[str, int, int], None],
    ) -> None:
        """`tell` gets a step's name, how far it is, and of how much."""
        self._cluster = cluster
        self._name = collection
        self._embedder = embedder
        self._chunks = chunks
        self._patience_s = patience_s
        self._tell = tell
        self.failures: dict[str, str] = {}
        """Document id -> why the target does not take it, as of the last try."""

    # --- reading and writing

    def pages(
        self,
        index: str,
        *,
        whole: bool,
        after: str | None = None,
        query: Mapping[str, Any] | None = None,
        shard: int | None = None,
    ) -> AsyncGenerator[list[Hit], None]:
        """Yield an index' documents in id order, `whole` or as id and version alone."""
        return copying.pages(
            self._cluster,
            index,
            whole=whole,
            after=after,
            query=query,
            shard=shard,
            budget_s=self._patience_s,
        )

    async def put(self, lane: Lane, hits: Sequence[Hit], via: str) -> None:
        """Write documents as the target takes them, under the versions they have; what it refuses is noted."""
        actions = [
            BulkAction(via, id_, version, body)
            for id_, version, body in await self._again(lambda: self.convert(lane, hits))
        ]
        refused = await copying.fill(self._cluster, actions, budget_s=self._patience_s)
        if refused is None:
            raise Taken(
                f"the new index of `{self._name}` may no longer be filled",
                remedy="another process has aborted or finished the reindex: see --status",
            )
        for action in actions:
            self.failures.pop(action.id, None)
        self.failures |= refused

    async def convert(self, lane: Lane, hits: Sequence[Hit]) -> list[tuple[str, int, bytes]]:
        """Return (id, version, document) as the target takes it; what can't be converted is noted as a failure."""
        ready: list[tuple[Hit, Source]] = []
        texts: dict[str, int] = {}
        for hit in hits:
            try:
                body = self._reshape(lane, hit["_source"])
                for chunk in body.get(fields.CHUNKS, ()):
                    if chunk.get("embedding") is _WANTED:
                        text = chunking.stored_text(body, chunk)
                        if not text.strip():
                            raise InvalidItem(
                                "it has a vector of its caller's and no text that could be embedded"
                            )
                        texts.setdefault(text, len(texts))
            except InvalidItem as error:
                self.failures[hit["_id"]] = error.detail
            else:
                ready.append((hit, body))
        embedded = None
        if texts:
            embedded = await self._embedder(lane.target).embed_documents(list(texts))
            for failure in embedded.errors.values():
                if isinstance(failure, Unavailable):
                    raise failure
        converted = []
        for hit, body in ready:
            failed: str | None = None
            for chunk in body.get(fields.CHUNKS, ()):
                if chunk.get("embedding") is _WANTED:
                    assert embedded is not None
                    at = texts[chunking.stored_text(body, chunk)]
                    vector = embedded.vectors[at]
                    if vector is None:
                        failed = embedded.errors[at].detail
                        break
                    chunk["embedding"] = self._packed(vector, lane)
            if failed is None:
                converted.append((hit["_id"], hit["_version"], encode(body)))
            else:
                self.failures[hit["_id"]] = failed
        return converted

    def _reshape(self, lane: Lane, source: Source) -> Source:
        """Return the document with the target's declared values and chunks; `_WANTED` stands where a vector is to come."""
        if source.get(fields.DELETED):
            return source
        body = dict(source)
        if lane.source.declared != lane.target.declared:
            body = documents.retyped(source, lane.target.declared)
        chunks: list[Source] = [dict(chunk) for chunk in body.get(fields.CHUNKS, ())]
        if lane.rechunk:
            chunks = self._cut_anew(body, chunks)
        for chunk in chunks:
            vector = chunk.get("embedding")
            if vector is None or vector is _WANTED:
                continue
            if not lane.same_space:
                chunk["embedding"] = _WANTED
            elif not isinstance(vector, str):
                chunk["embedding"] = self._packed(np.asarray(vector, dtype=np.float32), lane)
        if fields.CHUNKS in body:
            body[fields.CHUNKS] = chunks
        return body

    def _packed(self, vector: np.ndarray, lane: Lane) -> str | list[float]:
        return self._cluster.document_vector(copying.measured_alike(vector, lane.target.similarity))

    def _cut_anew(self, body: Source, chunks: list[Source]) -> list[Source]:
        """Return the text's chunks by today's sizes; a vector that the caller brought stays one chunk."""
        if not chunks or any("hash" not in chunk for chunk in chunks):
            return chunks
        known = {chunk["hash"]: chunk.get("embedding") for chunk in chunks}
        embeds = any("embedding" in chunk for chunk in chunks)
        made = []
        for cut in self._chunks.cut(body.get(fields.TEXT, ""), title=body.get(fields.TITLE, "")):
            chunk = documents.chunk_source(cut.text, cut.start, cut.end, digest=cut.hash, vector=None)
            if embeds:
                vector = known.get(cut.hash)
                chunk["embedding"] = _WANTED if vector is None else vector
            made.append(chunk)
        return made

    # --- comparing

    async def check_counts(self, lane: Lane, *, allow_missing: int, spare: int) -> None:
        """Count documents and vectors of both, now that nobody writes; compare all pairs where they are few.

        `spare`: so many documents the target may hold beyond the source.
        """
        source, target = lane.source.index, lane.target.index
        counts = [await self._cluster.count(index) for index in (source, target)]
        if not counts[0] - len(self.failures) <= counts[1] <= counts[0] + spare:
            raise Mismatch(
                f"{source} holds {counts[0]} documents, {target} {counts[1]}",
                remedy="nothing was swapped; run it again to copy what is missing, or --abort",
            )
        if lane.same_chunks and not self.failures and not spare:
            chunks = [await self.count_chunks(index) for index in (source, target)]
            if chunks[0] != chunks[1]:
                raise Mismatch(
                    f"{source} holds {chunks[0]} vectors, {target} {chunks[1]}",
                    remedy="nothing was swapped; --abort and reindex anew",
                )
        if counts[0] <= COMPARED_IN_FENCE:
            behind, ahead = await self._differing(source, target)
            unexpected = [id_ for id_ in behind if id_ not in self.failures]
            unexpected += ahead if len(ahead) > spare else ()
            if unexpected or len(behind) > allow_missing:
                raise _mismatch(source, target, unexpected or list(behind))

    async def compare(
        self,
        lane: Lane,
        via: str,
        *,
        check: Callable[[], None],
        spare: int = 0,
        target_moves: bool = False,
    ) -> None:
        """Compare all (id, version) pairs and who has vectors; copy what is behind. Raises Mismatch for what stays so.

        `target_moves`: the target is the one that is written to, so only what is behind in it matters. `spare`: so many
        documents it may hold that the source lacks. `check` raises where the work is no longer ours.
        """
        source, target = lane.source.index, lane.target.index
        await self.refresh(source)
        await self.refresh(target)
        behind, ahead = await self._differing(source, target)
        if ahead and not target_moves:
            now = await self._versions(source, list(ahead))
            strange = [id_ for id_, version in ahead.items() if now.get(id_, -1) < version]
            if len(strange) > spare:
                raise _mismatch(source, target, strange)
        left = list(behind)
        for pause_s in (0.0, 0.1, 0.5, 1.0, 2.0):
            if not left:
                break
            # A copy of the source may show a change that the copy which is read next has not refreshed yet.
            await asyncio.sleep(pause_s)
            await self.refresh(source)
            for ids in _parts(left, copying.PAGE_DOCUMENTS):
                check()
                async for hits in self.pages(source, query={"ids": {"values": ids}}, whole=True):
                    await self.put(lane, hits, via)
            reached = await self._versions(target, left)
            left = [id_ for id_ in left if reached.get(id_, -1) < behind[id_] and id_ not in self.failures]
        if left:
            raise _mismatch(source, target, left)
        await self.refresh(target)
        await self._compare_vectors(lane)

    async def _compare_vectors(self, lane: Lane) -> None:
        """Raise Mismatch naming documents that have a vector in the source and none, at the same version, in the target."""
        source, target = lane.source.index, lane.target.index
        bare, _ = await self._differing(source, target, _WITH_VECTORS)
        lost: list[str] = []
        for ids in _parts(list(bare), copying.SCAN_IDS):
            now = await self._versions(target, ids)
            lost += [id_ for id_ in ids if now.get(id_) == bare[id_] and id_ not in self.failures]
        if lost:
            # A document that changed between the two scans is judged by what it is now.
            still = set(await self._having_vectors(target, lost))
            lost = [id_ for id_ in lost if id_ not in still]
        if lost:
            raise Mismatch(
                f"{len(lost)} documents have lost their vectors in {target}: {_named(lost)}",
                remedy="nothing was swapped; --abort and reindex anew",
                ids=lost[:1000],
            )

    async def _differing(
        self, source: str, target: str, query: Json | None = None
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return id -> version in the source of what is missing or older in the target, and the other way round."""
        behind: dict[str, int] = {}
        ahead: dict[str, int] = {}
        left = _flat(self.pages(source, query=query, whole=False))
        right = _flat(self.pages(target, query=query, whole=False))
        one, two = await anext(left, None), await anext(right, None)
        compared = 0
        while one is not None or two is not None:
            if two is None or (one is not None and one[0] < two[0]):
                assert one is not None
                behind[one[0].decode()] = one[1]
                one = await anext(left, None)
            elif one is None or two[0] < one[0]:
                ahead[two[0].decode()] = two[1]
                two = await anext(right, None)
            else:
                if one[1] > two[1]:
                    behind[one[0].decode()] = one[1]
                elif one[1] < two[1]:
                    ahead[one[0].decode()] = two[1]
                one, two = await anext(left, None), await anext(right, None)
            compared += 1
            if compared % copying.SCAN_IDS == 0:
                self._tell("comparing", compared, compared)
        return behind, ahead

    async def _versions(self, index: str, ids: Sequence[str]) -> dict[str, int]:
        held = await copying.found(self._cluster, index, ids, budget_s=self._patience_s)
        return {id_: hit["_version"] for id_, hit in held.items()}

    async def _having_vectors(self, index: str, ids: Sequence[str]) -> list[str]:
        found: list[str] = []
        for part in _parts(ids, copying.SCAN_IDS):
            query = {"bool": {"filter": [_WITH_VECTORS, {"ids": {"values": part}}]}}
            async for hits in self.pages(index, query=query, whole=False):
                found += [hit["_id"] for hit in hits]
        return found

    def refuse_missing(self, allowed: int, *, remedy: str) -> None:
        """Raise Mismatch, with what can be done about it now, where the target has refused more documents than that."""
        if len(self.failures) > allowed:
            ids = list(self.failures)
            raise Mismatch(
                f"{len(ids)} documents can't be brought over: "
                + "; ".join(f"{id_}: {self.failures[id_]}" for id_ in ids[:3])
                + ("; …" if len(ids) > 3 else ""),
                remedy=remedy,
                ids=ids[:1000],
            )

    async def count_chunks(self, index: str) -> int:
        """Return how many chunks have a vector."""
        body = {
            "size": 0,
            "aggs": {
                "chunks": {
                    "nested": {"path": fields.CHUNKS},
                    "aggs": {"embedded": {"filter": {"exists": {"field": fields.EMBEDDING}}}},
                }
            },
        }
        answer = await self._again(
            lambda: self._cluster.search(index, body, timeout_s=self._cluster.request_timeout_s)
        )
        return int(answer["aggregations"]["chunks"]["embedded"]["doc_count"])

    async def refresh(self, index: str) -> None:
        """Make what is written visible."""
        await self._again(lambda: self._cluster.refresh(index, timeout_s=60))

    async def _again(self, do: Callable[[], Awaitable[T]]) -> T:
        return await patiently(do, budget_s=self._patience_s, cluster=self._cluster)


# --- pure parts ------------------------------------------------------------------------------------------------------


def _mismatch(source: str, target: str, ids: Sequence[str]) -> Mismatch:
    return Mismatch(
        f"{len(ids)} documents differ between {source} and {target}: {_named(ids)}",
        remedy="nothing was swapped; run it again to copy them, or --abort",
        ids=list(ids[:1000]),
    )


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED_IDS} more" if len(ids) > NAMED_IDS else ""
    return ", ".join(ids[:NAMED_IDS]) + more


async def _flat(pages: AsyncIterator[list[Hit]]) -> AsyncIterator[tuple[bytes, int]]:
    """Yield (id as UTF-8, version): Elasticsearch sorts keywords by their bytes."""
    async for hits in pages:
        for hit in hits:
            yield hit["_id"].encode(), hit["_version"]


def _parts(items: Sequence[str], size: int) -> Iterator[list[str]]:
    for first in range(0, len(items), size):
        yield list(items[first : first + size])
