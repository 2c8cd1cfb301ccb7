"""Documents of a collection out to lines of JSON and back in, with their vectors and versions.

Owns the form of a line and what becomes of it. Files are not its business: lines go out in pages that say how to go
on after them, and come in in any batches. A line is the document as it was sent, under the API's names, plus `version`,
`indexed_at` and `chunks` (offsets, hash, vector as base64 of big-endian 32-bit floats). Deleted documents don't go out.
"""

import dataclasses
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal

from app import chunking, copying, documents, fields, names
from app.collection import Collection, CollectionOptions, SynonymRule, SynonymSet
from app.copying import patiently
from app.documents import InvalidItem, Source
from app.elastic import Cluster
from app.encoding import encode, packed, unpack_vector
from app.errors import CursorExpired, HalflifeError, InvalidRequest, Unavailable
from app.ranking import stored_profiles
from app.refusals import parse
from app.times import format_instant
from app.writes import Patience, Stamper, Target, Targets, Write, Writer

Json = dict[str, Any]
Versions = Literal["keep", "new"]

FORMAT: Final = 1
_ANEW: Final = "export the collection again, or take another copy of the file; nothing was stored"
PAGE_DOCUMENTS: Final = 200
PAGE_BYTES: Final = 8 * 2**20
_NOT_SENT: Final = (fields.DOCUMENT_ID, fields.DECLARED, fields.CHUNKS)


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of an export: what the vectors are, and how such a collection is made."""

    collection: str
    dims: int
    model: str | None
    similarity: str
    declared: dict[str, str]
    documents: int
    exported_at: str
    halflife_export: int = FORMAT
    # What exports of earlier releases don't have.
    profiles: Json = field(default_factory=dict)
    default_profile: str | None = None
    experiment: Json | None = None
    synonyms: list[Json] = field(default_factory=list)

    @classmethod
    def parse(cls, line: Mapping[str, Any]) -> "Header":
        """Return it. Raises InvalidRequest if the line is none, or of a form that this version can't read."""
        if line.get("halflife_export") != FORMAT:
            raise InvalidRequest(
                "the first line is not the header of a Halflife export that this version reads",
                remedy="load other JSON Lines with `halflife load`",
            )
        lacking = [
            f"`{each.name}`"
            for each in dataclasses.fields(cls)
            if each.name not in line and each.default is MISSING and each.default_factory is MISSING
        ]
        if lacking:
            raise InvalidRequest(f"the export's header lacks {', '.join(lacking)}", remedy=_ANEW)
        try:
            profiles = line.get("profiles")
            given = {**line, "profiles": stored_profiles(profiles)} if isinstance(profiles, Mapping) else line
            found = cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})
            found.options()
            found.rules()
        except InvalidRequest as fault:
            raise InvalidRequest(
                f"the export's header is damaged: {fault.detail}", field=fault.field, remedy=_ANEW
            ) from fault
        return found

    @property
    def space(self) -> tuple[str | None, int]:
        """Vectors may be taken as they are where this is equal."""
        return self.model, self.dims

    def options(self) -> CollectionOptions:
        """Return how the collection is made anew. Raises InvalidRequest."""
        return parse(
            CollectionOptions,
            {
                "dims": self.dims,
                "similarity": self.similarity,
                "declared": self.declared,
                "profiles": self.profiles,
                "default_profile": self.default_profile,
                "experiment": self.experiment,
            },
        )

    def rules(self) -> list[SynonymRule]:
        """Return the synonyms that it is made with. Raises InvalidRequest."""
        return parse(SynonymSet, {"synonyms_set": self.synonyms}).synonyms_set

    def ranks_as(self, collection: Collection) -> bool:
        """Tell whether searches of the collection rank as those of the exported one did."""
        return _ranking(collection) == (self.profiles, self.default_profile, self.experiment, self.synonyms)


def _ranking(collection: Collection) -> tuple[Json, str | None, Json | None, list[Json]]:
    told = collection.model_dump(
        mode="json", exclude_none=True, include={"profiles", "default_profile", "experiment"}
    )
    rules = [rule.model_dump(mode="json", exclude_none=True) for rule in collection.synonyms]
    return told.get("profiles", {}), told.get("default_profile"), told.get("experiment"), rules


@dataclass(frozen=True, slots=True)
class Page:
    """Some documents in id order; `pit` and `after` lead on from here."""

    lines: list[bytes]
    pit: str
    after: str


def checksum(lines: Iterable[bytes], before: int = 0) -> int:
    """Return the CRC-32 of the lines, each with the line feed at its end, behind lines that had that of `before`."""
    for line_ in lines:
        before = zlib.crc32(b"\n", zlib.crc32(line_, before))
    return before


async def header(cluster: Cluster, collection: Collection, *, now: datetime) -> Header:
    """Return the first line of an export; its count is of now, with everything that was acknowledged visible."""
    await patiently(
        lambda: cluster.refresh(names.read_alias(collection.name), timeout_s=60),
        budget_s=120.0,
        cluster=cluster,
    )
    profiles, default_profile, experiment, synonyms = _ranking(collection)
    return Header(
        collection=collection.name,
        dims=collection.dims,
        model=collection.model,
        similarity=collection.similarity,
        declared=dict(collection.declared),
        documents=await cluster.count(names.read_alias(collection.name)),
        exported_at=format_instant(now),
        profiles=profiles,
        default_profile=default_profile,
        experiment=experiment,
        synonyms=synonyms,
    )


async def export(
    cluster: Cluster,
    collection: Collection,
    *,
    pit: str | None = None,
    after: str | None = None,
    keep_alive_s: float = 1800.0,
    patience_s: float = 120.0,
) -> AsyncIterator[Page]:
    """Yield the collection as of one moment, in id order; what `header` or another refresh made visible before.

    `pit` and `after` of an earlier page go on behind it, as of the same moment. Raises CursorExpired if that point in
    time is gone, which a node that restarted takes with it: then only a new export is consistent.
    """
    timeout_s = max(30.0, cluster.request_timeout_s)
    if pit is None:
        pit = await patiently(
            lambda: cluster.open_pit(
                names.read_alias(collection.name),
                keep_alive_s=keep_alive_s,
                timeout_s=timeout_s,
                allow_partial=False,
            ),
            budget_s=patience_s,
        )
    size = 32
    while True:
        body: Json = {
            "pit": {"id": pit, "keep_alive": f"{round(keep_alive_s * 1000)}ms"},
            "size": size,
            "query": {"match_all": {}},
            "sort": [{fields.DOCUMENT_ID: "asc"}],
            "version": True,
            "track_total_hits": False,
            "_source": {"exclude_vectors": False},
        }
        if after is not None:
            body["search_after"] = [after]
        try:
            answer = await patiently(
                partial(_search, cluster, body, timeout_s),
                budget_s=patience_s,
                cluster=cluster,
            )
        except CursorExpired:
            # Of no use any more; other shards may still hold it.
            cluster.close_pit_soon(pit)
            raise
        hits = answer["hits"]["hits"]
        pit = str(answer.get("pit_id", pit))
        if hits:
            after = hits[-1]["sort"][0]
            lines = [encode(line(hit["_source"], hit["_version"])) for hit in hits]
            yield Page(lines, pit, after)
            size = max(
                8, min(PAGE_DOCUMENTS, size * 2, PAGE_BYTES * len(lines) // max(1, sum(map(len, lines))))
            )
        else:
            await cluster.close_pit(pit)
            return


async def _search(cluster: Cluster, body: Json, timeout_s: float) -> Json:
    answer = await cluster.search(None, body, timeout_s=timeout_s, doing="exporting documents")
    return copying.complete(answer, "exporting documents")


def line(source: Mapping[str, Any], version: int) -> Json:
    """Return a stored document as a line; a chunk's text is left out where it is what its offsets say."""
    body: Json = {"id": source[fields.DOCUMENT_ID], "version": version}
    body |= {name: value for name, value in source.items() if name not in _NOT_SENT}
    text = source.get(fields.TEXT, "")
    chunks = []
    for chunk in source.get(fields.CHUNKS, ()):
        entry = dict(chunk)
        if entry["text"] == text[entry["start"] : entry["end"]]:
            del entry["text"]
        if "embedding" in entry:
            entry["embedding"] = packed(entry["embedding"])
        chunks.append(entry)
    body[fields.CHUNKS] = chunks
    return body


def source_of(entry: Mapping[str, Any]) -> tuple[str, int, Source]:
    """Return (id, version, `_source` without declared values, vectors still packed). Raises InvalidItem."""
    id_ = documents.check_id(entry.get("id"))
    version = entry.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InvalidItem("`version` is not a positive whole number", field="version")
    body: Source = {fields.DOCUMENT_ID: id_}
    body |= {name: value for name, value in entry.items() if name not in ("id", "version", *_NOT_SENT)}
    text = entry.get(fields.TEXT, "")
    chunks = []
    for given in entry.get(fields.CHUNKS, ()):
        try:
            chunk = {"text": text[given["start"] : given["end"]], **given}
        except (KeyError, TypeError) as cause:
            raise InvalidItem(f"`chunks` is not as it was exported: {cause}", field=fields.CHUNKS) from cause
        chunks.append(chunk)
    body[fields.CHUNKS] = chunks
    return id_, version, body


@dataclass(slots=True)
class Tally:
    """What became of the lines so far."""

    stored: int = 0
    newer: int = 0
    """Documents that the collection has in this version or a newer one."""
    failures: dict[str, str] = field(default_factory=dict)


class Importer:
    """Writes lines of an export into a collection, by the path that every write takes."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        *,
        targets: Targets,
        stamper: Stamper,
        header: Header,
        versions: Versions = "keep",
        patience: Callable[[], Patience] = Patience,
    ) -> None:
        """`versions`: keep those of the export, so that a repeat changes nothing, or draw new ones, above all there are."""
        self._cluster = cluster
        self._collection = collection
        self._targets = targets
        self._stamper = stamper
        self._header = header
        self._versions = versions
        self._patience = patience
        self.tally = Tally()

    async def put(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write them and count what became of each. Raises Unavailable if the cluster or the embedder stays away."""
        writer = Writer(
            self._cluster,
            self._targets,
            self._stamper,
            read_alias=names.read_alias(self._collection),
            patience=self._patience(),
        )
        writes: dict[str, Write] = {}
        for entry in entries:
            try:
                id_, version, body = source_of(entry)
            except InvalidItem as error:
                self.tally.failures[str(entry.get("id"))[:80]] = error.detail
                continue
            kept = self._versions == "keep"
            writes[id_] = Write(id_, version if kept else writer.stamp(), guarded=kept, payload=body)
        await writer.write(list(writes.values()), self._encode)
        for write in writes.values():
            if isinstance(write.error, Unavailable):
                raise write.error
            if write.error is not None:
                self.tally.failures[write.id] = write.error.detail
            elif write.conflict:
                self.tally.newer += 1
            else:
                self.tally.stored += 1

    async def _encode(self, target: Target, writes: Sequence[Write]) -> list[bytes | HalflifeError]:
        """Return the documents as the target takes them: its declared values, and vectors of its model."""
        ready: list[Source | HalflifeError] = []
        texts: dict[str, int] = {}
        same = target.space == self._header.space
        for write in writes:
            try:
                body = documents.retyped(write.payload, target.collection.declared)
            except InvalidItem as error:
                ready.append(error)
                continue
            if not same:
                for chunk in body[fields.CHUNKS]:
                    if "embedding" in chunk:
                        texts.setdefault(chunking.stored_text(body, chunk), len(texts))
            ready.append(body)
        embedded = await target.embedder.embed_documents(list(texts)) if texts else None
        made: list[bytes | HalflifeError] = []
        for item in ready:
            if isinstance(item, HalflifeError):
                made.append(item)
                continue
            chunks, failed = [], None
            for chunk in item[fields.CHUNKS]:
                entry = dict(chunk)
                if "embedding" in entry and embedded is not None:
                    at = texts[chunking.stored_text(item, chunk)]
                    vector = embedded.vectors[at]
                    if vector is None:
                        failed = embedded.errors[at]
                        break
                    entry["embedding"] = self._cluster.document_vector(
                        copying.measured_alike(vector, target.collection.similarity)
                    )
                elif "embedding" in entry:
                    # Packed anew: an older cluster takes numbers only, another measure wants length one.
                    given = copying.measured_alike(
                        unpack_vector(entry["embedding"]), target.collection.similarity
                    )
                    entry["embedding"] = self._cluster.document_vector(given)
                chunks.append(entry)
            made.append(failed or encode({**item, fields.CHUNKS: chunks}))
        return made
