"""Documents of an index that this service did not make, brought into a collection.

Each document keeps its id and its version, so that bringing in again only brings what is newer, and a stop loses
nothing. In an index that is to replace its origin nobody else writes, so there a document that is not as the origin has it
is written over, whatever its version: Elasticsearch counts anew what was deleted long enough ago. Which of its fields is what the caller says; all others go into `metadata`. The origin is left as it is, with
one exception that is asked for by its name: an index that is called like the collection's own alias is replaced, in the
same step in which the alias takes its name.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from app import catalog, chunking, copying, documents, fields, moves, names
from app.chunking import Chunking
from app.collection import Collection, CollectionOptions
from app.copying import Hit, patiently
from app.documents import InvalidItem, Source
from app.elastic import BulkAction, Cluster
from app.encoding import encode
from app.errors import ClusterUnavailable, Conflict, HalflifeError, InvalidRequest, NotFound, Unavailable
from app.times import format_instant
from app.writes import DocumentEmbedder
from app.writing import Document

T = TypeVar("T")

SHORT_ROUND: Final = 200
ROUNDS: Final = 12
BATCH: Final = 64
KNOWN: Final = frozenset(Document.model_fields) - {"id", "revision", "if_version", "embedding"}
"""Fields that are taken from the origin under the same name, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Preview:
    """What bringing it in would do: how many documents, one of them as it would be, and what is wrong with some."""

    documents: int
    replaces: bool
    example: dict[str, Any] | None
    metadata_keys: list[str]
    failures: dict[str, str]


@dataclass(slots=True)
class Adopted:
    """What was brought in, and what could not be."""

    documents: int = 0
    stored: int = 0
    failures: dict[str, str] = field(default_factory=dict)


class Adopter:
    """Brings one index, or the indices behind one alias, into one collection."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        origin: str,
        *,
        mapping: Mapping[str, str],
        embedder: DocumentEmbedder,
        now: Callable[[], datetime],
        chunks: Chunking | None = None,
        patience_s: float = 120.0,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """`mapping`: field of a document -> where the origin has it, dots going deeper; "" leaves it out. Ids stay."""
        unknown = sorted(set(mapping) - KNOWN - {"embedding"})
        if unknown:
            raise InvalidRequest(
                f"a document has no field {unknown[0]}",
                field=unknown[0],
                remedy=f"map one of: embedding, {', '.join(sorted(KNOWN))}; all else goes into the metadata anyway",
            )
        self._cluster = cluster
        self._name = collection
        self._origin = origin
        self._mapping = dict(mapping)
        self._embedder = embedder
        self._now = now
        self._chunks = chunks or Chunking()
        self._patience_s = patience_s
        self._report = report
        self._result = Adopted()
        self._several = False
        self._places: dict[str, tuple[str, str | None]] = {}
        """Where each document lies whose id another one may have too."""

    async def preview(self, collection: Collection) -> Preview:
        """Look at some documents of the origin; changes nothing. `collection` is what they would become part of."""
        await self._concrete()
        await self._cluster.refresh(self._origin)
        total = await self._cluster.count(self._origin)
        body = {"size": 100, "version": True, "_source": {"exclude_vectors": False}}
        answer = await self._cluster.search(self._origin, body, timeout_s=self._cluster.request_timeout_s)
        example: dict[str, Any] | None = None
        keys: set[str] = set()
        failures: dict[str, str] = {}
        for hit in answer["hits"]["hits"]:
            raw = self._document(hit)
            keys |= set(raw.get(fields.METADATA, {}))
            try:
                documents.check_document(raw, collection)
            except InvalidItem as error:
                failures[hit["_id"]] = f"{error.field}: {error.detail}"
            else:
                example = example or {key: value for key, value in raw.items() if key != "embedding"}
        return Preview(total, self._replaces, example, sorted(keys), failures)

    @property
    def _replaces(self) -> bool:
        return self._origin == names.read_alias(self._name)

    async def run(
        self, options: CollectionOptions, *, dims: int, model: str | None, allow_missing: int = 0
    ) -> Adopted:
        """Bring everything in. May be called again: then what is newer, or what was not done yet, comes.

        Raises Conflict if more documents than `allow_missing` can't be brought in; a replaced index is then still there
        and everything else kept. Raises NotFound without the origin.
        """
        origins = await self._concrete()
        self._several = len(origins) > 1
        if self._replaces:
            await self._replace(options, dims=dims, model=model, allow_missing=allow_missing)
        else:
            await catalog.create(
                self._cluster, self._name, options, dims=dims, model=model, moment=self._now()
            )
            target = (await catalog.get(self._cluster, self._name)).collection
            await self._bring(origins, target, partial(self._write_alias, target))
            self._refuse(allow_missing)
        return self._result

    async def _replace(
        self, options: CollectionOptions, *, dims: int, model: str | None, allow_missing: int
    ) -> None:
        """Fill a new index, block the one that has the alias' name, bring its last changes, exchange the two."""
        copy = moves.copy_alias(self._name)
        standing = await self._again(lambda: moves.standing(self._cluster, self._name))
        index = standing.filling
        if index is None:
            index = names.index_name(self._name, self._now())
            body = catalog.index_body(
                self._name, options, dims=dims, model=model, slot_aliases={copy: {}}, uid=index
            )
            await self._cluster.create_index(index, body)
        target = await catalog.read_index(self._cluster, self._name, index)

        async def via() -> str:
            return copy

        base = await self._bring([self._origin], target, via)
        self._refuse(allow_missing)
        replaced = False
        try:
            await self._again(lambda: self._cluster.add_write_block(self._origin))
            await self._round(self._origin, base, target, via)
            await self._drop_deleted(target)
            await self._verify([self._origin], target)
            self._refuse(allow_missing)
            await self._again(lambda: self._cluster.refresh(target.index))
            await self._cluster.update_aliases(
                [
                    {"remove_index": {"index": self._origin}},
                    {"remove": {"index": target.index, "alias": copy, "must_exist": True}},
                    {
                        "add": {
                            "index": target.index,
                            "alias": names.read_alias(self._name),
                            **catalog.read_alias_properties(),
                        }
                    },
                    {
                        "add": {
                            "index": target.index,
                            "alias": names.write_alias(self._name, names.first_generation(self._now())),
                        }
                    },
                ]
            )
            replaced = True
        finally:
            if not replaced:
                with contextlib.suppress(HalflifeError):
                    await self._cluster.clear_write_block(self._origin)

    async def _bring(
        self, origins: Sequence[str], target: Collection, via: Callable[[], Awaitable[str]]
    ) -> dict[str, int]:
        """Copy everything and then what came meanwhile; return how far the last origin is seen."""
        base: dict[str, dict[str, int]] = {}
        for origin in origins:
            base[origin] = await self._checkpoints(origin)
            await self._again(partial(self._cluster.refresh, origin))
            self._result.documents += await self._again(partial(self._cluster.count, origin))
        done = 0
        for origin in origins:
            async for hits in copying.pages(
                self._cluster, origin, whole=True, foreign=True, budget_s=self._patience_s
            ):
                await self._put(hits, target, via)
                done += len(hits)
                self._report(done, max(done, self._result.documents))
        for origin in origins:
            for _ in range(ROUNDS):
                copied, base[origin] = await self._round(origin, base[origin], target, via)
                if copied <= SHORT_ROUND:
                    break
        if not self._replaces:
            await self._verify(origins, target)
        return base[origins[-1]]

    async def _round(
        self, origin: str, base: Mapping[str, int], target: Collection, via: Callable[[], Awaitable[str]]
    ) -> tuple[int, dict[str, int]]:
        reached = await self._checkpoints(origin)
        await self._again(lambda: self._cluster.refresh(origin))
        copied = 0
        for shard in reached:
            query = {"range": {"_seq_no": {"gt": base.get(shard, -1)}}}
            async for hits in copying.pages(
                self._cluster, origin, whole=True, foreign=True, query=query, shard=int(shard), budget_s=self._patience_s
            ):  # fmt: skip
                await self._put(hits, target, via)
                copied += len(hits)
        return copied, reached

    async def _verify(self, origins: Sequence[str], target: Collection) -> None:
        """Raise Conflict naming documents that are neither there nor known to have failed.

        In an index that replaces its origin a tombstone is no document; in a collection it is one that was deleted there.
        """
        missing: list[str] = []
        for origin in origins:
            async for hits in copying.pages(
                self._cluster, origin, whole=False, foreign=True, budget_s=self._patience_s
            ):
                self._note_doubles(hits)
                have = await self._stored(target, [hit["_id"] for hit in hits], [fields.DELETED])
                for hit in hits:
                    found = have.get(hit["_id"])
                    lacks = found is None or found["_version"] < hit["_version"]
                    lost = found is not None and _is_tombstone(found) and self._replaces
                    if (lacks or lost) and hit["_id"] not in self._result.failures:
                        missing.append(hit["_id"])
        if missing and self._replaces:
            raise Conflict(
                f"{len(missing)} documents of {self._origin} are not in the new index: {', '.join(missing[:20])}",
                remedy="run it again; nothing was exchanged",
            )
        # An origin that is still written to is always a little ahead: the next run brings that.
        self._result.stored = max(0, self._result.documents - len(self._result.failures) - len(missing))

    async def _drop_deleted(self, target: Collection) -> None:
        """Remove from the new index what has been deleted from the origin since it was copied.

        The origin is searched for the ids: to be got by its id, a document needs its routing, which may be any.
        """
        await self._again(lambda: self._cluster.refresh(target.index))
        living = {"bool": {"must_not": [{"term": {fields.DELETED: True}}]}}
        async for hits in copying.pages(
            self._cluster, target.index, whole=False, query=living, budget_s=self._patience_s
        ):
            ids = {"ids": {"values": [hit["_id"] for hit in hits]}}
            there: set[str] = set()
            async for found in copying.pages(
                self._cluster, self._origin, whole=False, foreign=True, query=ids, budget_s=self._patience_s
            ):
                there |= {hit["_id"] for hit in found}
            moment = format_instant(self._now())
            actions = [
                BulkAction(
                    moves.copy_alias(self._name),
                    hit["_id"],
                    hit["_version"] + 1,
                    encode(documents.tombstone(hit["_id"], indexed_at=moment, revision=None)),
                )
                for hit in hits
                if hit["_id"] not in there
            ]
            if refused := await copying.fill(self._cluster, actions, budget_s=self._patience_s):
                raise Conflict(
                    f"{len(refused)} documents that {self._origin} no longer has can't be deleted: {refused}",
                    remedy="run it again; nothing was exchanged",
                )

    # --- one page

    async def _put(self, hits: Sequence[Hit], target: Collection, via: Callable[[], Awaitable[str]]) -> None:
        """Write those of a page that the collection does not have in this version yet."""
        for hit in hits:
            if self._several or hit.get("_routing") is not None:
                self._places[hit["_id"]] = _place(hit)
        have = await self._stored(target, [hit["_id"] for hit in hits], self._replaces)
        fresh = []
        for hit in hits:
            found = have.get(hit["_id"])
            if found is None or found["_version"] < hit["_version"]:
                fresh.append(hit)
            elif self._replaces and not self._has(found, hit, target):
                fresh.append({**hit, "_version": found["_version"] + 1})
        for first in range(0, len(fresh), BATCH):
            part = fresh[first : first + BATCH]
            bodies = await self._again(partial(self._convert, part, target))
            until = asyncio.get_running_loop().time() + self._patience_s
            while True:
                alias = await via()
                actions = [BulkAction(alias, id_, version, body) for id_, version, body in bodies]
                refused = await copying.fill(self._cluster, actions, budget_s=self._patience_s)
                if refused is not None:
                    break
                # The collection is being exchanged; its next write alias is known in a moment.
                if asyncio.get_running_loop().time() > until:
                    raise ClusterUnavailable(f"the collection `{self._name}` takes no writes")
                await asyncio.sleep(0.1)
            for id_, _, _ in bodies:
                self._result.failures.pop(id_, None)
            self._result.failures |= refused

    async def _stored(
        self, target: Collection, ids: Sequence[str], source: bool | Sequence[str]
    ) -> dict[str, Hit]:
        """Return id -> what the collection has of it, in real time, with these parts of the document."""
        where = target.index if self._replaces else names.read_alias(self._name)
        return await copying.found(self._cluster, where, ids, source=source, budget_s=self._patience_s)

    def _has(self, found: Hit, hit: Hit, target: Collection) -> bool:
        """Tell whether a document is in the collection as it would be written, its chunks and the time of that aside."""
        if _is_tombstone(found):
            return False
        try:
            document, declared = documents.check_document(self._document(hit), target)
        except InvalidItem:
            return False  # told when it is converted
        if document.embedding is not None:
            return False  # its vector may have changed alone, and costs nothing
        body = documents.source(document, chunks=[], declared=declared, indexed_at="")
        return _compared(json.loads(encode(body))) == _compared(found["_source"])

    def _note_doubles(self, hits: Sequence[Hit]) -> None:
        """Note as failures the ids that two documents of the origin have, of which the collection could keep one."""
        for hit in hits:
            id_ = hit["_id"]
            if self._places.get(id_, _place(hit)) != _place(hit):
                self._result.failures[id_] = (
                    "two documents have this id, in different indices or under different routings"
                )

    async def _write_alias(self, target: Collection) -> str:
        """Return the alias to write through; raise Conflict where documents were made for another kind of collection."""
        known = await self._again(lambda: catalog.get(self._cluster, self._name))
        for fact in ("uid", "model", "dims", "similarity", "declared"):
            if getattr(known.collection, fact) != getattr(target, fact):
                raise Conflict(
                    f"the collection `{self._name}` was changed meanwhile: its `{fact}` is another",
                    remedy="run it again: what was brought in stays",
                )
        leads = known.target or known.fence
        assert leads is not None
        return names.write_alias(self._name, leads.generation, "a")

    async def _convert(self, hits: Sequence[Hit], target: Collection) -> list[tuple[str, int, bytes]]:
        """Return (id, version, document); what does not fit is noted as a failure."""
        ready: list[tuple[Hit, Document, dict[str, Any], list[chunking.Chunk]]] = []
        texts: dict[str, int] = {}
        for hit in hits:
            try:
                document, declared = documents.check_document(self._document(hit), target)
            except InvalidItem as error:
                self._result.failures[hit["_id"]] = f"{error.field}: {error.detail}"
                continue
            if document.embedding is not None:
                cuts = [chunking.whole(document.text, title=document.title)]
            else:
                cuts = self._chunks.cut(document.text, title=document.title)
                for cut in cuts:
                    texts.setdefault(chunking.embedding_text(document.title, cut.text), len(texts))
            ready.append((hit, document, declared, cuts))
        embedded = await self._embedder.embed_documents(list(texts)) if texts else None
        if embedded is not None:
            for failure in embedded.errors.values():
                if isinstance(failure, Unavailable):
                    raise failure
        made = []
        for hit, document, declared, cuts in ready:
            chunks: list[Source] = []
            for cut in cuts:
                if document.embedding is not None:
                    vector = np.asarray(document.embedding, dtype=np.float32)
                else:
                    assert embedded is not None
                    at = texts[chunking.embedding_text(document.title, cut.text)]
                    found = embedded.vectors[at]
                    if found is None:
                        self._result.failures[hit["_id"]] = embedded.errors[at].detail
                        break
                    vector = found
                digest = cut.hash if document.embedding is None else None
                chunk = documents.chunk_source(cut.text, cut.start, cut.end, digest=digest, vector=None)
                chunks.append(
                    {
                        **chunk,
                        "embedding": self._cluster.document_vector(
                            copying.measured_alike(vector, target.similarity)
                        ),
                    }
                )
            else:
                body = documents.source(
                    document, chunks=chunks, declared=declared, indexed_at=format_instant(self._now())
                )
                made.append((document.id, hit["_version"], encode(body)))
        return made

    def _document(self, hit: Hit) -> dict[str, Any]:
        """Return the document that a caller would have sent for this one."""
        source: dict[str, Any] = hit["_source"]
        taken = {name: path for name, path in self._mapping.items() if path}
        taken |= {
            name: name
            for name in KNOWN
            if name != fields.METADATA and name in source and name not in self._mapping
        }
        raw: dict[str, Any] = {"id": hit["_id"]}
        for name, path in taken.items():
            value = _at(source, path)
            if value is not None:
                raw[name] = _fitted(name, value)
        rest = _without(source, set(taken.values()))
        nested = rest.pop(fields.METADATA, None)
        metadata = {**rest, **nested} if isinstance(nested, dict) else rest
        if nested is not None and not isinstance(nested, dict):
            metadata[fields.METADATA] = nested
        if metadata:
            raw[fields.METADATA] = metadata
        return raw

    # --- small change

    async def _concrete(self) -> list[str]:
        """Return the indices behind the origin. Raises NotFound, InvalidRequest for a collection of ours."""
        found = sorted(await self._again(lambda: self._cluster.get_mapping(self._origin)))
        if not found:
            raise NotFound(f"there is no index {self._origin}")
        if self._replaces and found != [self._origin]:
            raise InvalidRequest(
                f"{self._origin} is the collection `{self._name}` itself",
                remedy="run it without --from-index",
            )
        return found

    async def _checkpoints(self, index: str) -> dict[str, int]:
        found = await self._again(lambda: self._cluster.checkpoints(index))
        return {str(shard): number for shard, number in sorted(found.items())}

    def _refuse(self, allowed: int) -> None:
        failures = self._result.failures
        if len(failures) > allowed:
            told = "; ".join(f"{id_}: {failures[id_]}" for id_ in list(failures)[:3])
            raise Conflict(
                f"{len(failures)} documents can't be brought in: {told}",
                remedy="correct the mapping or the documents and run it again, or leave them behind with --allow-missing N",
                ids=list(failures)[:1000],
            )

    async def _again(self, do: Callable[[], Awaitable[T]]) -> T:
        return await patiently(do, budget_s=self._patience_s, cluster=self._cluster)


def _is_tombstone(found: Hit) -> bool:
    return bool(found.get("_source", {}).get(fields.DELETED))


def _place(hit: Hit) -> tuple[str, str | None]:
    """Return what tells apart the documents of one id that an index or several may have."""
    return hit["_index"], hit.get("_routing")


def _compared(source: Source) -> Source:
    """Return what of a stored document comes from its origin."""
    return {key: value for key, value in source.items() if key not in (fields.CHUNKS, fields.INDEXED_AT)}


def _at(source: Mapping[str, Any], path: str) -> Any:
    """Return what stands at a path, a key that holds the dots itself first; None where nothing does."""
    if path in source:
        return source[path]
    head, _, rest = path.partition(".")
    deeper = source.get(head)
    return _at(deeper, rest) if rest and isinstance(deeper, Mapping) else None


def _without(source: Mapping[str, Any], paths: set[str]) -> dict[str, Any]:
    """Return the source without what stands at these paths."""
    left: dict[str, Any] = {}
    for key, value in source.items():
        if key in paths:
            continue
        below = {path[len(key) + 1 :] for path in paths if path.startswith(f"{key}.")}
        if not below or not isinstance(value, Mapping):
            left[key] = value
        elif rest := _without(value, below):
            left[key] = rest
    return left


def _fitted(name: str, value: Any) -> Any:
    """Return a value in the shape that the field has: texts of several parts joined, one tag as a list."""
    if name in (fields.TEXT, fields.TITLE) and isinstance(value, list):
        return "\n\n".join(_texts(value))
    if name == "tags" and not isinstance(value, list):
        return [value]
    return value


def _texts(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if value is not None:
            yield str(value)
