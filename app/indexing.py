"""What happens to documents, in order: upsert, patch, delete, read, list, touch.

Owns the checks, chunks and vectors of a bulk, and what is told about each item. How a write reaches the cluster and
survives its troubles is `writes`; what a document looks like there is `documents`. Refuses to build queries: filters
come in as clauses, ready.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import numpy as np

from app import bulks, chunking, documents, fields, names, observing
from app.answers import BulkResult, ItemResult, StoredDocument
from app.bulks import Report, conflict, contended, failed, in_slices, in_waves
from app.catalog import read_index
from app.chunking import Chunk, Chunking
from app.collection import Collection
from app.copying import complete, measured_alike
from app.documents import InvalidItem, Source
from app.elastic import Cluster
from app.embedding import Embedded
from app.encoding import encode, pack_vector, packed, unpack_vector
from app.errors import (
    ClusterUnavailable,
    CursorExpired,
    Forbidden,
    HalflifeError,
    NotFound,
    Unavailable,
)
from app.filters import Condition, confined, holds, marks, names_metadata
from app.outcomes import cursor_expired
from app.times import format_instant, parse_instant
from app.writes import Patience, RefreshWhen, Stamper, Stored, Target, Targets, Write, Writer
from app.writing import Document, DocumentPatch

PARALLEL_SLICES: Final = 2
"""While one slice waits for the cluster or the embedder, the next is checked and chunked."""
CHANGE_ITEMS: Final = 32
"""Documents that are read whole, vectors included, and written again at a time."""
SCAN_ITEMS: Final = 1_000
TOLD_FAILURES: Final = 1_000
"""Of the documents that a filter matches and that can't be deleted, so many are told of; all are counted."""
SCAN_KEEP_ALIVE_S: Final = 120.0
CHARS_IN_LOOP: Final = 20_000
"""Longer texts are cut in a thread, so that others are served meanwhile (1,000,000 characters take 0.1 to 1 s)."""


@dataclass(frozen=True, slots=True)
class Page:
    """Documents in id order; `after` and `pit` lead to the next page, both None after the last."""

    documents: list[StoredDocument]
    total: int
    after: str | None
    pit: str | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """How many documents a filter deleted, how many it couldn't, and what became of the first of those."""

    deleted: int
    failed: int
    failures: list[ItemResult]


class Indexer:
    """Stores and reads documents of any collection; holds no state of a request.

    `within` is the condition that a caller is kept inside, None for everything. What lies outside it looks like what
    is not there. What is written must lie inside it with every value, before and after; and it is written only over
    exactly what was read, so that nobody's document can be taken over between the look and the write.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        targets: Callable[[str], Targets],
        stamper: Stamper,
        now: Callable[[], datetime],
        chunks: Chunking | None = None,
        patience: Patience | None = None,
    ) -> None:
        """`targets` returns, for a collection's name, where its writes go."""
        self._cluster = cluster
        self._targets = targets
        self._stamper = stamper
        self._now = now
        self._chunks = chunks or Chunking()
        self._patience = patience or Patience()

    # --- upsert

    async def upsert(
        self,
        items: Sequence[Any],
        *,
        collection: Collection,
        refresh: RefreshWhen = "false",
        within: Condition | None = None,
    ) -> BulkResult:
        """Store documents, each checked on its own; the results stand in the order of the items.

        Several items of one id are applied in their order. Raises InvalidRequest if every item is invalid,
        EmbedderUnavailable, ClusterUnavailable or StorageFull if nothing could be stored because of that, and
        NotFound if there is no such collection; each carries `items` and `failed`.
        """
        writer, report = self._writer(collection), Report(len(items))
        waves = [in_slices(items, wave) for wave in in_waves(items, report)]
        slices = sum(map(len, waves))
        try:
            if refresh == "wait_for" and slices == 1 and not await writer.refreshes_soon():
                refresh = "true"
        except HalflifeError as error:
            report.fail_all({position: documents.id_of(item) for position, item in enumerate(items)}, error)
            return report.result()
        for parts in waves:
            gate = asyncio.Semaphore(PARALLEL_SLICES)
            # With one slice the bulk itself can wait for the refresh; with more, one refresh ends them all.
            with_bulk: RefreshWhen = refresh if slices == 1 else "false"

            async def store(
                part: Sequence[int], gate: asyncio.Semaphore = gate, when: RefreshWhen = with_bulk
            ) -> None:
                async with gate:
                    await self._store(writer, items, part, report, when, within)

            await _all(store(part) for part in parts)
        # What was not written anew may have been written a moment ago, without a refresh; and where an earlier try
        # had arrived, the last one waited for none.
        if refresh != "false" and ((slices > 1 and report.stored) or report.unchanged or writer.found_again):
            await self._show(writer, report)
        return report.result()

    async def _store(
        self,
        writer: Writer,
        items: Sequence[Any],
        part: Sequence[int],
        report: Report,
        refresh: RefreshWhen,
        within: Condition | None,
    ) -> None:
        """Check, cut, embed and write one slice of items with distinct ids, whatever becomes of others."""
        try:
            target = await writer.target()
        except HalflifeError as error:
            report.fail_all({position: documents.id_of(items[position]) for position in part}, error)
            return
        pending: list[_Upsert] = []
        for position in part:
            try:
                document, declared = documents.check_document(items[position], target.collection)
                if within is not None:
                    bare = documents.source(document, chunks=(), declared=declared, indexed_at="")
                    if not confined(within, bare):
                        raise _outside()
                cuts = await self._cut(document)
                pending.append(_Upsert(position, document, format_instant(self._now()), cuts))
            except (InvalidItem, Forbidden) as error:
                report.fail(position, documents.id_of(items[position]), error)
        rounds, until = 0, writer.deadline()
        while pending:
            try:
                pending = await self._store_round(writer, pending, target, report, refresh, within)
            except HalflifeError as error:
                report.fail_all({item.position: item.document.id for item in pending}, error)
                return
            if pending and not await writer.pause(rounds, until=until):
                for item in pending:
                    report.fail(item.position, item.document.id, contended())
                return
            rounds += 1

    async def _store_round(
        self,
        writer: Writer,
        pending: Sequence["_Upsert"],
        target: Target,
        report: Report,
        refresh: RefreshWhen,
        within: Condition | None,
    ) -> list["_Upsert"]:
        """Write what is pending and return what must be decided anew, since its document has changed meanwhile."""
        looked_at = () if within is None else documents.FILTERED_FIELDS
        found = await writer.read(
            [item.document.id for item in pending],
            source=[fields.DELETED, fields.REVISION, fields.CHUNK_HASH, *looked_at],
        )
        writes: list[Write] = []
        known: dict[str, tuple[_Upsert, ItemResult]] = {}
        for item in pending:
            item.stored = found.get(item.document.id)
            decision = _decide(item, writer) if within is None else _decide_within(within, item, writer)
            if isinstance(decision, Write):
                writes.append(decision)
            elif isinstance(decision, Forbidden):
                report.fail(item.position, item.document.id, decision)
            elif decision.status == "unchanged":
                known[item.document.id] = (item, decision)
            else:
                report.put(item.position, decision)
        again = []
        for id_, kept in (await self._keep(writer, {id_: found[id_] for id_ in known})).items():
            item, decision = known[id_]
            if kept is None:
                again.append(item)
            elif isinstance(kept, HalflifeError):
                report.fail(item.position, id_, kept)
            else:
                report.put(item.position, decision.model_copy(update={"version": kept}))
        await self._reuse(writer, [write.payload for write in writes], target)
        unchanged = await self._unchanged(writer, [write.payload for write in writes], target)
        for item in unchanged:
            assert item.stored is not None
            report.put(
                item.position,
                ItemResult(
                    id=item.document.id,
                    status="unchanged",
                    version=item.stored.version,
                    chunks=len(item.chunks),
                ),
            )
        writes = [write for write in writes if write.payload not in unchanged]
        await writer.write(writes, self._encode_upserts, refresh=refresh)
        for write in writes:
            item = write.payload
            if write.error is not None:
                report.fail(item.position, write.id, write.error)
            elif write.conflict and item.document.if_version is not None:
                report.put(item.position, conflict(write.id, "it has changed meanwhile", None))
            elif write.conflict:
                again.append(item)
            else:
                report.put(
                    item.position,
                    ItemResult(
                        id=write.id,
                        status="created" if item.stored is None or item.stored.deleted else "updated",
                        version=write.version,
                        chunks=len(item.chunks),
                        truncated=item.truncated or None,
                    ),
                )
        return again

    async def _cut(self, document: Document) -> list[Chunk]:
        if document.embedding is not None:
            return [chunking.whole(document.text, title=document.title)]
        if len(document.text) > CHARS_IN_LOOP:
            cuts = await asyncio.to_thread(self._chunks.cut, document.text, title=document.title)
        else:
            cuts = self._chunks.cut(document.text, title=document.title)
        if len(cuts) > documents.MAX_CHUNKS:
            raise InvalidItem(
                f"the text makes {len(cuts)} chunks, and a document holds {documents.MAX_CHUNKS} at most",
                field="text",
                remedy="split it into several documents, or configure larger chunks",
            )
        return cuts

    async def _reuse(self, writer: Writer, items: Sequence["_Upsert"], target: Target) -> None:
        """Take the stored vectors of chunks that have not changed, where the model would be asked for them again."""
        wanted: dict[str, _Upsert] = {}
        for item in items:
            if item.stored is None or not item.embeds or target.space in item.reusable:
                continue
            hashes = {chunk.get("hash") for chunk in item.stored.source.get(fields.CHUNKS, ())}
            if any(chunk.hash in hashes for chunk in item.chunks):
                wanted[item.document.id] = item
        if not wanted:
            return
        # Whole, since a document whose chunks are all the same may be the same altogether.
        found = await writer.read(list(wanted), source=True, vectors=True)
        for id_, stored in found.items():
            wanted[id_].whole = replace(stored, source=documents.without_vectors(stored.source))
            wanted[id_].reusable[stored.read_from.space] = {
                chunk["hash"]: packed(chunk["embedding"])
                for chunk in stored.source.get(fields.CHUNKS, ())
                if "hash" in chunk and "embedding" in chunk
            }

    async def _unchanged(self, writer: Writer, items: Sequence["_Upsert"], target: Target) -> "set[_Upsert]":
        """Return the items that are stored already as sent, to the last field, so that writing them changes nothing."""
        same: dict[str, _Upsert] = {}
        for item in items:
            stored = item.whole
            known = item.reusable.get(target.space, {})
            if stored is None or stored.deleted or not all(chunk.hash in known for chunk in item.chunks):
                continue
            item.vectors[target.space] = [known[chunk.hash] for chunk in item.chunks]
            body = _source_of(item, target)
            if isinstance(body, HalflifeError):
                continue
            indexed_at = stored.source.get(fields.INDEXED_AT)
            sent = {**documents.without_vectors(json.loads(encode(body))), fields.INDEXED_AT: indexed_at}
            if sent == stored.source:
                same[item.document.id] = item
        settled = await writer.settled({id_: item.whole for id_, item in same.items() if item.whole})
        unchanged = {item for id_, item in same.items() if id_ in settled}
        for item in unchanged:
            item.stored = item.whole
        return unchanged

    async def _encode_upserts(self, target: Target, writes: Sequence[Write]) -> list[bytes | HalflifeError]:
        items: list[_Upsert] = [write.payload for write in writes]
        await self._embed(target, [item for item in items if target.space not in item.vectors])
        return [
            found if isinstance(found := _source_of(item, target), HalflifeError) else self._sent(found)
            for item in items
        ]

    def _sent(self, source: Source) -> bytes:
        """Encode a document as this cluster takes it: vectors in base64 are refused by releases before 9.3."""
        return encode(source if self._cluster.takes_packed_documents else _unpacked(source))

    @observing.staged("embed documents")
    async def _embed(self, target: Target, items: Sequence["_Upsert"]) -> None:
        """Give each item its vectors in the target's space, or the error that kept one of its chunks without."""
        asked: dict[str, int] = {}
        for item in items:
            given = item.document.embedding
            if given is not None and len(given) == target.collection.dims:
                item.vectors[target.space] = [
                    pack_vector(measured_alike(np.asarray(given), target.collection.similarity))
                ]
            elif given is None and not item.embeds:
                item.vectors[target.space] = [None] * len(item.chunks)
            else:
                known = item.reusable.get(target.space, {})
                for chunk in item.chunks:
                    if chunk.hash not in known:
                        asked.setdefault(chunking.embedding_text(item.document.title, chunk.text), len(asked))
        embedded = await self._vectors_of(target, list(asked)) if asked else None
        for item in items:
            if target.space in item.vectors:
                continue
            known = item.reusable.get(target.space, {})
            vectors: list[str | None] = []
            item.vectors[target.space] = vectors
            for chunk in item.chunks:
                if chunk.hash in known:
                    vectors.append(known[chunk.hash])
                    continue
                assert embedded is not None
                at = asked[chunking.embedding_text(item.document.title, chunk.text)]
                vector = embedded.vectors[at]
                if vector is None:
                    item.vectors[target.space] = embedded.errors[at]
                    break
                item.truncated = item.truncated or at in embedded.truncated
                vectors.append(pack_vector(measured_alike(vector, target.collection.similarity)))

    # --- change and delete

    async def patch(
        self,
        items: Sequence[Any],
        *,
        collection: Collection,
        refresh: RefreshWhen = "false",
        within: Condition | None = None,
    ) -> BulkResult:
        """Change fields of stored documents and keep their text and vectors; null clears a field, `metadata` is replaced.

        Raises InvalidRequest if every item is invalid, ClusterUnavailable or StorageFull if nothing could be stored.
        """
        writer, report = self._writer(collection), Report(len(items))
        target = await writer.target()
        for wave in in_waves(items, report):
            changes = []
            for position in wave:
                try:
                    patch = documents.check_patch(items[position], target.collection)
                except InvalidItem as error:
                    report.fail(position, documents.id_of(items[position]), error)
                else:
                    changes.append(_Change(position, patch.id, self._patching(patch), patch.if_version))
            await self._change(writer, changes, report, within=within)
        if refresh != "false" and (report.stored or report.unchanged):
            await self._show(writer, report)
        return report.result()

    def _patching(self, patch: DocumentPatch) -> "_Apply":
        indexed_at = format_instant(self._now())

        def apply(stored: Stored) -> Source:
            return documents.patched(stored.source, patch, indexed_at=indexed_at)

        return apply

    async def touch(
        self,
        instants: Mapping[str, datetime],
        *,
        collection: Collection,
        within: Condition | None = None,
    ) -> BulkResult:
        """Set `last_accessed_at` of documents to the instant given for each, if it is later than what is stored.

        A document that is missing or deleted stays so (`not_found`); one touched later already is `unchanged`.
        """
        writer, report = self._writer(collection), Report(len(instants))

        def touching(at: datetime) -> _Apply:
            text = format_instant(at)

            def apply(stored: Stored) -> Source | None:
                before = stored.source.get(fields.LAST_ACCESSED_AT)
                if before is not None and parse_instant(before) >= parse_instant(text):
                    return None
                return {**stored.source, fields.LAST_ACCESSED_AT: text}

            return apply

        changes = [
            _Change(position, id_, touching(at)) for position, (id_, at) in enumerate(instants.items())
        ]
        # A document that several share may be touched by each: what they see is theirs to have read.
        await self._change(writer, changes, report, within=within, shared=True)
        return report.result()

    async def delete_ids(
        self,
        ids: Sequence[Any],
        *,
        collection: Collection,
        if_versions: Sequence[int | None] | None = None,
        refresh: RefreshWhen = "false",
        within: Condition | None = None,
    ) -> BulkResult:
        """Delete documents by id; what is not there is `not_found`, which is no failure.

        `if_versions`: for each id the version that it must have, else it is a conflict; None for any.
        """
        writer, report = self._writer(collection), Report(len(ids), named="ids")
        for wave in in_waves(ids, report):
            changes = []
            for position in wave:
                try:
                    id_ = documents.check_id(ids[position])
                except InvalidItem as error:
                    report.fail(position, documents.id_of(ids[position]), error)
                else:
                    changes.append(
                        _Change(
                            position,
                            id_,
                            self._burying(id_, within),
                            if_version=None if if_versions is None else if_versions[position],
                            deletes=True,
                        )
                    )
            await self._change(writer, changes, report, whole=False, within=within)
        # What is gone already may have been deleted a moment ago, without a refresh.
        if refresh != "false" and (report.stored or report.missing):
            await self._show(writer, report)
        return report.result()

    def _burying(self, id_: str, within: Condition | None) -> "_Apply":
        indexed_at = format_instant(self._now())

        def apply(stored: Stored) -> Source:
            kept = None if within is None else marks(within, stored.source)
            return documents.tombstone(id_, indexed_at=indexed_at, revision=stored.revision, marks=kept)

        return apply

    async def _change(
        self,
        writer: Writer,
        changes: Sequence["_Change"],
        report: Report,
        *,
        whole: bool = True,
        within: Condition | None = None,
        shared: bool = False,
    ) -> None:
        """Read, change and write documents of distinct ids, each only if it is still what was read; else again.

        `whole`: the document is needed with its vectors; else only what a tombstone keeps of it. `shared`: documents
        that lie inside `within` with some of their values only may be changed too.
        """
        step = CHANGE_ITEMS if whole else bulks.SLICE_ITEMS
        for first in range(0, len(changes), step):
            pending = list(changes[first : first + step])
            rounds, until = 0, writer.deadline()
            while pending:
                try:
                    pending = await self._change_round(
                        writer, pending, report, whole=whole, within=within, shared=shared
                    )
                except HalflifeError as error:
                    report.fail_all({change.position: change.id for change in pending}, error)
                    break
                if pending and not await writer.pause(rounds, until=until):
                    for change in pending:
                        report.fail(change.position, change.id, contended())
                    break
                rounds += 1

    async def _change_round(
        self,
        writer: Writer,
        pending: Sequence["_Change"],
        report: Report,
        *,
        whole: bool,
        within: Condition | None,
        shared: bool,
    ) -> list["_Change"]:
        looked_at = () if within is None else documents.FILTERED_FIELDS
        wanted: bool | list[str] = True if whole else [fields.DELETED, fields.REVISION, *looked_at]
        found = await writer.read([change.id for change in pending], source=wanted, vectors=whole)
        writes = []
        gone: dict[str, _Change] = {}
        for change in pending:
            stored = found.get(change.id)
            if stored is not None and change.deletes and _deleted_for(within, stored):
                gone[change.id] = change
            elif (
                stored is None or stored.deleted or (within is not None and not holds(within, stored.source))
            ):
                report.put(change.position, ItemResult(id=change.id, status="not_found"))
            elif within is not None and not shared and not confined(within, stored.source):
                report.fail(change.position, change.id, _outside())
            elif change.if_version is not None and change.if_version != stored.version:
                report.put(change.position, conflict(change.id, "its version is another", stored.version))
            elif (changed := change.apply(stored)) is None:
                report.put(
                    change.position, ItemResult(id=change.id, status="unchanged", version=stored.version)
                )
            elif within is not None and not (shared or change.deletes or confined(within, changed)):
                report.fail(change.position, change.id, _outside())
            else:
                writes.append(_rewrite(change, stored, changed))
        again = []
        for id_, kept in (await self._keep(writer, {id_: found[id_] for id_ in gone})).items():
            change = gone[id_]
            if kept is None:
                again.append(change)
            elif isinstance(kept, HalflifeError):
                report.fail(change.position, id_, kept)
            elif kept == found[id_].version or (within is not None and not holds(within, found[id_].source)):
                report.put(change.position, ItemResult(id=id_, status="not_found"))
            else:
                # Written again: that is what counts from now on.
                report.put(change.position, ItemResult(id=id_, status="deleted", version=kept))
        await writer.write(writes, self._encode_bodies)
        for write in writes:
            change = write.payload.change
            if write.error is not None:
                report.fail(change.position, write.id, write.error)
            elif write.conflict and change.if_version is not None:
                report.put(change.position, conflict(write.id, "it has changed meanwhile", None))
            elif write.conflict:
                again.append(change)
            else:
                report.put(
                    change.position,
                    ItemResult(
                        id=write.id, status="deleted" if change.deletes else "updated", version=write.version
                    ),
                )
        return again

    async def _keep(
        self, writer: Writer, found: Mapping[str, Stored]
    ) -> dict[str, int | HalflifeError | None]:
        """Make sure that documents last as they were just read, and return id -> version.

        A read acknowledges nothing: it may show a write that is on one copy only and goes with it. What is not known to
        be on all of them is written once more as it is; the error where that fails, None where it has changed since.
        """
        sure = await writer.settled(found)
        told: dict[str, int | HalflifeError | None] = {id_: found[id_].version for id_ in sure}
        doubtful = [id_ for id_ in found if id_ not in sure]
        if doubtful:
            whole = await writer.read(doubtful, source=True, vectors=True)
            writes = []
            for id_ in doubtful:
                stored = whole.get(id_)
                if stored is None or stored.version != found[id_].version:
                    told[id_] = None
                else:
                    writes.append(_rewrite(None, stored, stored.source))
            await writer.write(writes, self._encode_bodies)
            for write in writes:
                told[write.id] = None if write.conflict else write.error or write.version
        return told

    async def _encode_bodies(self, target: Target, writes: Sequence[Write]) -> list[bytes | HalflifeError]:
        """Return changed documents for a target: the values that it declares typed, vectors of its model."""
        bodies: list[_Body] = [write.payload for write in writes]
        await self._translate(target, [body for body in bodies if target.space not in body.sources])
        found = [_typed_for(target, body.sources[target.space]) for body in bodies]
        return [each if isinstance(each, HalflifeError) else self._sent(each) for each in found]

    async def _translate(self, target: Target, bodies: Sequence["_Body"]) -> None:
        texts: dict[str, int] = {}
        for body in bodies:
            source = body.any_source()
            for chunk in source.get(fields.CHUNKS, ()):
                if "embedding" in chunk:
                    texts.setdefault(chunking.stored_text(source, chunk), len(texts))
        embedded = await self._vectors_of(target, list(texts)) if texts else None
        for body in bodies:
            source = body.any_source()
            chunks: list[Source] = []
            error: HalflifeError | None = None
            for chunk in source.get(fields.CHUNKS, ()):
                if "embedding" not in chunk or embedded is None:
                    chunks.append(chunk)
                    continue
                at = texts[chunking.stored_text(source, chunk)]
                vector = embedded.vectors[at]
                if vector is None:
                    error = embedded.errors[at]
                    break
                chunks.append(
                    {**chunk, "embedding": pack_vector(measured_alike(vector, target.collection.similarity))}
                )
            body.sources[target.space] = error or ({**source, fields.CHUNKS: chunks} if chunks else source)

    async def delete_matching(
        self,
        clauses: Sequence[Mapping[str, Any]],
        *,
        collection: Collection,
        refresh: RefreshWhen = "false",
        within: Condition | None = None,
    ) -> Deleted:
        """Delete every document that the filter clauses match, none for all; `within` stands in the clauses too.

        The number counts documents that were there and that this call deleted. One that changes meanwhile is judged
        again as it then is. Raises ClusterUnavailable if the matches can't be read.
        """
        writer = self._writer(collection)
        deleted = missed = 0
        failures: list[ItemResult] = []

        def fail(id_: str, error: HalflifeError) -> None:
            nonlocal missed
            missed += 1
            # A filter may match millions that the caller may not delete.
            if len(failures) < TOLD_FAILURES:
                failures.append(failed(id_, error))

        only: list[str] | None = None
        rounds, until = 0, writer.deadline()
        while True:
            # What is acknowledged must be found, whether or not a refresh came by.
            await writer.refresh()
            changed: list[str] = []
            origin = await writer.target()
            for narrowed in [clauses] if only is None else _by_ids(clauses, only):
                async for hits in self._scan(writer, collection, narrowed, filtered=within is not None):
                    writes = []
                    for hit in hits:
                        if within is None or confined(within, hit["_source"]):
                            writes.append(self._burial(hit, within, origin))
                        else:
                            fail(hit["_id"], _outside())
                    await writer.write(writes, self._encode_bodies)
                    for write in writes:
                        if write.error is not None:
                            fail(write.id, write.error)
                        elif write.conflict:
                            changed.append(write.id)
                        else:
                            deleted += 1
            if not changed:
                break
            if not await writer.pause(rounds, until=until):
                for id_ in changed:
                    fail(id_, contended())
                break
            only, rounds = changed, rounds + 1
        if refresh != "false" and deleted:
            await writer.refresh()
        return Deleted(deleted, missed, failures)

    def _burial(self, hit: Mapping[str, Any], within: Condition | None, origin: Target) -> Write:
        stored = Stored(hit["_version"], hit.get("_source", {}), read_from=origin)
        body = self._burying(hit["_id"], within)(stored)
        assert body is not None
        write = _rewrite(None, stored, body)
        if hit["_index"] != origin.collection.index:
            # Of an index that a reindex has brought or taken away it is not known here whose it is.
            write.over = None
        return write

    async def _scan(
        self,
        writer: Writer,
        collection: Collection,
        clauses: Sequence[Mapping[str, Any]],
        *,
        filtered: bool = False,
    ) -> AsyncIterator[list[Source]]:
        """Yield the matching documents' ids, versions and revisions in id order, in pages, as of one point in time.

        `filtered`: with the fields that a filter may look at. If that is lost on the way, another goes on after the last id.
        """
        pit: str | None = None
        after: str | None = None
        more = {"_source": [fields.REVISION, *(documents.FILTERED_FIELDS if filtered else ())]}
        pauses, until = 0, writer.deadline()
        reads_values = names_metadata(clauses)
        try:
            while True:
                try:
                    pit = pit or await self._open_pit(collection, SCAN_KEEP_ALIVE_S)
                    answer = await self._page_of(pit, clauses, after, SCAN_ITEMS, more, SCAN_KEEP_ALIVE_S)
                except (CursorExpired, ClusterUnavailable) as error:
                    if not await writer.pause(pauses, until=until):
                        raise
                    pauses += 1
                    pit = None if isinstance(error, CursorExpired) else pit
                    continue
                pauses, until = 0, writer.deadline()
                hits = answer["hits"]["hits"]
                pit = answer.get("pit_id", pit)
                if reads_values and await self._elsewhere(answer, pit, collection, SCAN_KEEP_ALIVE_S):
                    # The index now read may declare other keys: a clause on a field that it lacks holds for none,
                    # and negated for all.
                    raise _moved("send the request again: what it has deleted stays deleted")
                if hits:
                    yield hits
                    after = hits[-1]["sort"][0]
                if len(hits) < SCAN_ITEMS:
                    return
        finally:
            if pit is not None:
                await self._cluster.close_pit(pit)

    # --- read

    async def get(
        self, ids: Sequence[str], *, collection: Collection, within: Condition | None = None
    ) -> list[StoredDocument | None]:
        """Return the documents in the order of the ids, in real time; None for what is not there or deleted.

        Raises NotFound if there is no such collection.
        """
        entries = await self._cluster.mget(
            names.read_alias(collection.name),
            ids,
            source=[*documents.STORED_FIELDS, fields.DECLARED],
            timeout_s=self._patience.request_timeout_s,
        )
        return [
            documents.stored(entry["_source"], version=entry["_version"])
            if entry.get("found")
            and not entry["_source"].get(fields.DELETED)
            and (within is None or holds(within, entry["_source"]))
            else None
            for entry in entries
        ]

    async def list_documents(
        self,
        clauses: Sequence[Mapping[str, Any]],
        *,
        collection: Collection,
        size: int,
        after: str | None = None,
        pit: str | None = None,
        keep_alive_s: float = SCAN_KEEP_ALIVE_S,
        owner: str | None = None,
        clauses_in: Callable[[Collection], Sequence[Mapping[str, Any]]] | None = None,
    ) -> Page:
        """Return the matching documents in id order, all for no clauses, as of the first page's point in time.

        That may be of another index than the collection's, which may declare other keys: `clauses_in` returns the
        clauses as an index takes them.
        `owner`: who pages, of those who may not hold many of these.
        The next page takes `after` and `pit` of this one. Raises CursorExpired when the point in time is gone.
        """
        opened = pit is None
        pit = pit or await self._open_pit(collection, keep_alive_s, owner)
        more = {"_source": list(documents.STORED_FIELDS), "track_total_hits": True}
        try:
            answer = await self._page_of(pit, clauses, after, size, more, keep_alive_s)
            if names_metadata(clauses):
                there = await self._elsewhere(answer, pit, collection, keep_alive_s)
                if there is not None:
                    # A clause on a field that this index lacks holds for none, and negated for all.
                    if clauses_in is None:
                        raise _moved("list again without a cursor")
                    answer = await self._page_of(pit, clauses_in(there), after, size, more, keep_alive_s)
        except BaseException as cause:
            if opened:
                # Nobody has heard of it, or will: its caller may have hung up.
                self._cluster.close_pit_soon(pit)
            gone = (
                cursor_expired(cause, remedy="list again without a cursor")
                if isinstance(cause, HalflifeError) and after is not None
                else None
            )
            if gone is None:
                raise
            raise gone from cause
        hits = answer["hits"]["hits"]
        pit = answer.get("pit_id", pit)
        going_on = len(hits) == size
        if not going_on and after is None:
            # A last page after others may be asked for again, its answer being lost on the way.
            self._cluster.close_pit_soon(pit)
        return Page(
            documents=[documents.stored(hit["_source"], version=hit["_version"]) for hit in hits],
            total=answer["hits"]["total"]["value"],
            after=hits[-1]["sort"][0] if going_on else None,
            pit=pit if going_on else None,
        )

    async def _elsewhere(
        self, answer: Mapping[str, Any], pit: str, collection: Collection, keep_alive_s: float
    ) -> Collection | None:
        """Return the collection as the index that answered has it; None where that is the one which is known."""
        hits = answer["hits"]["hits"]
        if not hits:
            looked = await self._page_of(pit, (), None, 1, {"_source": False}, keep_alive_s)
            hits = looked["hits"]["hits"]
        if not hits or (index := hits[0]["_index"]) == collection.index:
            return None
        try:
            return await read_index(self._cluster, collection.name, index)
        except NotFound as cause:
            raise _moved("send the request again, without a cursor") from cause

    async def _open_pit(self, collection: Collection, keep_alive_s: float, owner: str | None = None) -> str:
        return await self._cluster.open_pit(
            names.read_alias(collection.name),
            keep_alive_s=keep_alive_s,
            timeout_s=self._patience.request_timeout_s,
            allow_partial=False,
            owner=owner,
        )

    async def _page_of(
        self,
        pit: str,
        clauses: Sequence[Mapping[str, Any]],
        after: str | None,
        size: int,
        more: Mapping[str, Any],
        keep_alive_s: float,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "pit": {"id": pit, "keep_alive": f"{round(keep_alive_s * 1000)}ms"},
            "size": size,
            "query": {"bool": {"filter": list(clauses)}} if clauses else {"match_all": {}},
            "sort": [{fields.DOCUMENT_ID: "asc"}],
            "version": True,
            "track_total_hits": False,
            **more,
        }
        if after is not None:
            body["search_after"] = [after]
        answer = await self._cluster.search(
            None, body, timeout_s=self._patience.request_timeout_s, doing="listing documents"
        )
        return complete(answer, "listing documents")

    # --- small change

    async def _vectors_of(self, target: Target, texts: list[str]) -> Embedded:
        return await target.embedder.embed_documents(texts, stall_s=self._patience.embedder_stall_s)

    def _writer(self, collection: Collection) -> Writer:
        return Writer(
            self._cluster,
            self._targets(collection.name),
            self._stamper,
            read_alias=names.read_alias(collection.name),
            patience=self._patience,
        )

    async def _show(self, writer: Writer, report: Report) -> None:
        try:
            await writer.refresh()
        except Unavailable as error:
            raise ClusterUnavailable(
                f"the documents are stored, but can't be made visible to searches now: {error.detail}",
                remedy="don't send them again; they appear with the next refresh",
                retry_after_s=1,
                **report.members(),
            ) from error


def _moved(remedy: str) -> ClusterUnavailable:
    return ClusterUnavailable(
        "the collection moved to another index while its documents were being matched",
        remedy=remedy,
        retry_after_s=1,
    )


def _source_of(item: "_Upsert", target: Target) -> Source | HalflifeError:
    """Return the document as this target takes it: its vectors, and the values that this index declares."""
    found = item.vectors[target.space]
    if isinstance(found, HalflifeError):
        return found
    try:
        # Not as the index declared them that led when the item was checked: a reindex may have changed them since.
        declared = documents.declared_values(item.document.metadata, target.collection.declared)
    except InvalidItem as error:
        return error
    chunks = [
        documents.chunk_source(
            chunk.text,
            chunk.start,
            chunk.end,
            digest=chunk.hash if item.document.embedding is None else None,
            vector=None if vector is None else _measured_for(target, vector),
        )
        for chunk, vector in zip(item.chunks, found, strict=True)
    ]
    return documents.source(item.document, chunks=chunks, declared=declared, indexed_at=item.indexed_at)


def check_first(items: Sequence[Any], *, collection: str, dims: int) -> None:
    """Raise InvalidRequest, as an upsert does, if not one item would be valid in a new collection of the defaults.

    So that a mistake makes no collection.
    """
    plain = Collection(
        name=collection, index="", dims=dims, similarity="cosine", declared={}, template_version=0
    )
    report = Report(len(items))
    for position, item in enumerate(items):
        try:
            documents.check_document(item, plain)
        except InvalidItem as error:
            report.fail(position, documents.id_of(item), error)
        else:
            return
    report.result()


# --- what is under way -----------------------------------------------------------------------------------------------

_Apply = Callable[[Stored], Source | None]
_Space = tuple[str | None, int]


@dataclass(eq=False, slots=True)
class _Upsert:
    """One document on its way in; `vectors` and `reusable` (by chunk hash) are packed, for each model's space."""

    position: int
    document: Document
    indexed_at: str
    chunks: list[Chunk]
    stored: Stored | None = None
    whole: Stored | None = None
    """The stored document with its text, without vectors, where some of its chunks are the same."""
    vectors: dict[_Space, list[str | None] | HalflifeError] = field(default_factory=dict)
    reusable: dict[_Space, dict[str, str]] = field(default_factory=dict)
    truncated: bool = False

    @property
    def embeds(self) -> bool:
        """Tell whether the model makes the vectors: the caller neither sent one nor refused one."""
        return "embedding" not in self.document.model_fields_set


@dataclass(frozen=True, eq=False, slots=True)
class _Change:
    """What is to happen to a stored document; `apply` returns None where nothing is left to do."""

    position: int
    id: str
    apply: _Apply
    if_version: int | None = None
    deletes: bool = False


@dataclass(eq=False, slots=True)
class _Body:
    """A changed document, for each space of vectors; one without chunks is the same in all."""

    change: _Change | None
    sources: dict[_Space, Source | HalflifeError]

    def any_source(self) -> Source:
        """Return the document in the space it was read in."""
        source = next(iter(self.sources.values()))
        assert not isinstance(source, HalflifeError)
        return source


def _decide(item: _Upsert, writer: Writer) -> Write | ItemResult:
    """Choose the version of an upsert by what is stored, or say why it is not written.

    A caller's revision is compared with the revision stored, not with the version: touches and patches raise that
    too, and must neither swallow the caller's next revision nor be undone by a late repeat of an old one.
    """
    document, stored = item.document, item.stored
    if document.if_version is not None:
        if stored is None:
            return conflict(document.id, "there is no such document", None)
        if stored.version != document.if_version:
            return conflict(document.id, "its version is another", stored.version)
        return Write(document.id, stored.version + 1, guarded=True, payload=item, over=stored)
    if document.revision is not None:
        if stored is None:
            return Write(document.id, document.revision, guarded=True, payload=item)
        if stored.revision is not None and stored.revision >= document.revision:
            if stored.revision == document.revision and not stored.deleted:
                chunks = len(stored.source.get(fields.CHUNKS, ()))
                return ItemResult(id=document.id, status="unchanged", version=stored.version, chunks=chunks)
            what = "deleted" if stored.deleted else "stored"
            return conflict(document.id, f"it is {what} under revision {stored.revision}", stored.version)
        version = max(document.revision, stored.version + 1)
        return Write(document.id, version, guarded=True, payload=item, over=stored)
    return Write(document.id, writer.stamp(stored), guarded=False, payload=item)


def _decide_within(within: Condition, item: _Upsert, writer: Writer) -> Write | ItemResult | Forbidden:
    """Choose as `_decide` does for a caller who is kept within a condition: over a foreign document nothing is written.

    The version is exactly the next after what was read (1 for nothing), so that the cluster refuses the write if
    anyone else's came between.
    """
    document, stored = item.document, item.stored
    # A tombstone that tells whose it was is as the document was: the id is taken, and nothing more is told.
    known = stored is not None and (not stored.deleted or documents.marked(stored.source))
    if stored is not None and known and not confined(within, stored.source):
        if document.if_version is not None and not holds(within, stored.source):
            return conflict(document.id, "there is no such document", None)
        return _outside()
    decision = _decide(item, writer)
    if isinstance(decision, ItemResult) and stored is not None and stored.deleted:
        # Of one that a key without a filter made, it is not known whose it was: neither its version nor its revision is told.
        return conflict(document.id, "it was deleted, under this revision or a newer one", None)
    if isinstance(decision, Write):
        decision.version = 1 if stored is None else stored.version + 1
        decision.guarded, decision.over = True, stored
    return decision


def _rewrite(change: "_Change | None", stored: Stored, source: Source) -> Write:
    """Return the write of `source` over a document as just read."""
    body = _Body(change, {stored.read_from.space: _packed(source)})
    return Write(source[fields.DOCUMENT_ID], stored.version + 1, guarded=True, payload=body, over=stored)


def _deleted_for(within: Condition | None, stored: Stored) -> bool:
    """Tell whether it is the tombstone of what this caller may delete, or may have been able to."""
    return stored.deleted and (
        within is None or not documents.marked(stored.source) or holds(within, stored.source)
    )


def _typed_for(target: Target, source: Source | HalflifeError) -> Source | HalflifeError:
    """Return a document as this index takes it: typed copies of what it declares, vectors as it measures them.

    Both may have changed since it was read.
    """
    if isinstance(source, HalflifeError) or source.get(fields.DELETED):
        return source
    try:
        typed = documents.retyped(source, target.collection.declared)
    except InvalidItem as error:
        return error
    if fields.CHUNKS in typed:
        typed[fields.CHUNKS] = [
            {**chunk, "embedding": _measured_for(target, chunk["embedding"])}
            if "embedding" in chunk
            else chunk
            for chunk in typed[fields.CHUNKS]
        ]
    return typed


def _measured_for(target: Target, vector: str) -> str:
    """Return a packed vector as the target's index holds it; it may have been made for another measure's."""
    if target.collection.similarity == "cosine":
        return vector
    return pack_vector(measured_alike(unpack_vector(vector), target.collection.similarity))


def _outside() -> Forbidden:
    """Return one refusal for a document that the key may not write and for an id that it may not have."""
    return Forbidden(
        "this document is outside what the key may write",
        remedy="give it the values that the key's filter asks for, and an id that is not taken",
    )


def _by_ids(clauses: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> list[list[Mapping[str, Any]]]:
    return [
        [*clauses, {"ids": {"values": list(ids[first : first + SCAN_ITEMS])}}]
        for first in range(0, len(ids), SCAN_ITEMS)
    ]


def _packed(source: Source) -> Source:
    """Return the document with its vectors packed."""
    if fields.CHUNKS not in source:
        return source
    chunks = [
        {**chunk, "embedding": packed(chunk["embedding"])} if "embedding" in chunk else chunk
        for chunk in source[fields.CHUNKS]
    ]
    return {**source, fields.CHUNKS: chunks}


def _unpacked(source: Source) -> Source:
    """Return the document with its vectors as lists of numbers."""
    chunks = [
        {**chunk, "embedding": unpack_vector(chunk["embedding"]).tolist()}
        if isinstance(chunk.get("embedding"), str)
        else chunk
        for chunk in source.get(fields.CHUNKS, ())
    ]
    return {**source, fields.CHUNKS: chunks} if chunks else source


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Wait for all of it, then raise the first failure: what is under way is never cut off halfway."""
    for outcome in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
