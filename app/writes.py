"""The one way in which documents are written, so that nothing acknowledged is ever lost.

Owns versions, retries of writes and what an answer of the cluster means. Every write is an
`index` of a whole document with an external version through a write alias that must exist; a delete is such a write of
a tombstone. Each index then keeps the highest version per id, whatever the order of arrival and however often a write
is repeated. Refuses to know what a document is: callers bring ids, versions and bytes.

A version is one of two kinds. A *stamp* (microseconds since 1970 times 64, plus the worker) says "I am the newest": met
by a higher one it is drawn anew, above that. A *guarded* version is computed from what was read, at least the
stored one plus one: at just that the cluster takes it only if the document has not changed since, so it is a
compare-and-set; met by an equal or higher one it is a conflict. One index is written at any time: a reindex copies by itself, and exchanges
the write alias in one step.
"""

import asyncio
import json
import math
import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar

from app import copying, documents, observing
from app.collection import Collection
from app.elastic import BulkAction, Cluster
from app.embedding import Embedded
from app.errors import ClusterUnavailable, Conflict, HalflifeError, NotFound, Unavailable
from app.guarding import repeating
from app.outcomes import BulkOutcome

WORKERS: Final = 64
BULK_BYTES: Final = 8 * 2**20
BULK_ITEMS: Final = 500
READ_ITEMS: Final = 500
READ_ITEMS_WITH_VECTORS: Final = 32
AHEAD_US: Final = 24 * 60 * 60 * 1_000_000
"""Versions further ahead of the clock than this are no other process' stamps: callers' revisions, most likely."""
REFRESH_WAIT_S: Final = 5.0
"""Longest wait for a refresh that an index makes by itself; half the wait for one request to the cluster."""

RefreshWhen = Literal["false", "true", "wait_for"]
T = TypeVar("T")


def _interval_s(text: str) -> float:
    """Return a refresh interval in seconds: infinite where an index never refreshes, or in a form not known here."""
    found = re.fullmatch(r"(\d+)(ms|s|m)", text)
    return math.inf if found is None else int(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[found[2]]


class Stamper:
    """Draws versions: unique among up to 64 workers of distinct numbers, and always growing in this process."""

    def __init__(self, worker: int, now_us: Callable[[], int]) -> None:
        if not 0 <= worker < WORKERS:
            raise ValueError(f"a worker's number is 0 to {WORKERS - 1}, not {worker}")
        self._worker = worker
        self._now_us = now_us
        self._last_tick = 0
        self._last_tick_ahead = 0

    def next(self) -> int:
        """Return a stamp above every one drawn here before."""
        return self.after(0)

    def after(self, version: int) -> int:
        """Return a stamp above `version` too, which another clock may have drawn.

        One far ahead of the clock raises no later stamp but those of documents that are as far ahead: what one caller
        numbers its documents by is not to become everybody's versions.
        """
        now, least = self._now_us(), version // WORKERS + 1
        if least > now + AHEAD_US:
            tick = self._last_tick_ahead = max(self._last_tick_ahead + 1, least)
        else:
            tick = self._last_tick = max(now, self._last_tick + 1, least)
        return tick * WORKERS + self._worker


class DocumentEmbedder(Protocol):
    """What makes vectors of documents."""

    async def embed_documents(
        self, texts: Sequence[str], *, deadline_s: float | None = None, stall_s: float | None = None
    ) -> Embedded:
        """Return one vector or error per text; errors once the server has answered nobody for `stall_s`."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """The index that writes go to: its write alias, what its collection is, what embeds for it."""

    alias: str
    collection: Collection
    embedder: DocumentEmbedder

    @property
    def space(self) -> tuple[str | None, int]:
        """Vectors may be handed from one index to another if this is equal."""
        return self.collection.model, self.collection.dims


class Targets(Protocol):
    """Where writes of a collection go now."""

    async def current(self) -> Target:
        """Return it as last read; raise NotFound if there is no such collection."""
        ...

    async def reread(self, seen: Target) -> Target:
        """Read the aliases again because that of `seen` is gone or blocked; raise NotFound without a collection."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it is in the index that is written."""

    version: int
    source: dict[str, Any]
    place: tuple[int, int] | None = None
    """Its (seq_no, primary_term), where it was read by id."""
    read_from: Target = field(kw_only=True)
    """Through which alias, of which collection."""

    @property
    def deleted(self) -> bool:
        """Tell whether it is a tombstone."""
        return bool(self.source.get("deleted"))

    @property
    def revision(self) -> int | None:
        """The caller's revision that it was written under."""
        return self.source.get("revision")


@dataclass(eq=False, slots=True)
class Write:
    """A write under way: what it says, and what has become of it so far."""

    id: str
    version: int
    guarded: bool
    payload: Any = None
    """What the encoder makes the document from."""
    over: Stored | None = None
    """What a guarded version was computed from, None for nothing."""
    tried: bool = False
    """An earlier try of this version may have arrived without our hearing of it."""
    conflict: bool = False
    error: HalflifeError | None = None
    settled: bool = False


Encoder = Callable[[Target, Sequence[Write]], Awaitable[Sequence[bytes | HalflifeError]]]
"""Returns the documents of some writes as JSON for one target, the same at every call, or why there is none."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long and how often writes are tried again: pauses grow from `first_s` to `longest_s`, with jitter.

    `embedder_stall_s`: how long an embedder may answer nobody before its texts fail; None leaves it its own patience.
    """

    budget_s: float = 20.0
    first_s: float = 0.05
    longest_s: float = 2.0
    request_timeout_s: float = 10.0
    embedder_stall_s: float | None = None


class Writer:
    """Writes and reads of one request; its patience is the request's."""

    def __init__(
        self,
        cluster: Cluster,
        targets: Targets,
        stamper: Stamper,
        *,
        read_alias: str,
        patience: Patience | None = None,
    ) -> None:
        self._cluster = cluster
        self._targets = targets
        self._stamper = stamper
        self._read_alias = read_alias
        self._patience = patience or Patience()
        self._trouble_until: float | None = None
        self.found_again = False
        """Whether some write was acknowledged since an earlier try had arrived: no refresh was waited for then."""

    def stamp(self, stored: Stored | None = None) -> int:
        """Return a stamp above what is stored."""
        return self._stamper.after(stored.version if stored else 0)

    async def target(self) -> Target:
        """Return where writes go. Raises NotFound if there is no such collection."""
        return await self._persist(self._targets.current)

    # --- writing

    @observing.staged("write")
    async def write(
        self, writes: Sequence[Write], encode: Encoder, *, refresh: RefreshWhen = "false"
    ) -> None:
        """Bring each write (of distinct ids) to the collection's index and settle it.

        Afterwards `error` says what it failed of, `conflict` that a guarded one met a newer document; else it is
        acknowledged under `version`. Raises NotFound if there is no collection to begin with.
        """
        target = await self._persist(self._targets.current)
        pauses = rounds = 0
        refused = False
        while True:
            rounds += 1
            trouble = _Trouble()
            for write in writes:
                if not write.settled and _of_another(write.over, target):
                    self._overtaken(write, 0)
            batch = [write for write in writes if not write.settled]
            with repeating(refused):
                await self._write_to(target, batch, encode, refresh=refresh, trouble=trouble)
            pending = [write for write in writes if not write.settled]
            if not pending:
                return
            moved = False
            if trouble.fenced:
                try:
                    fresh = await self._persist(partial(self._targets.reread, target))
                except HalflifeError as error:
                    # Others of them are acknowledged: each is told apart.
                    for write in pending:
                        write.error, write.settled = error, True
                    return
                moved = fresh.alias != target.alias
                target = fresh
            # Many writers on one document draw new stamps in turns without waiting; not for ever.
            if (trouble.waits and not moved) or rounds > 50:
                refused = trouble.refused
                if not await self._wait_out(pauses, refused=refused):
                    for write in pending:
                        write.error = write.error or _gave_up()
                        write.settled = True
                    return
                pauses += 1

    async def refreshes_soon(self) -> bool:
        """Tell whether what is written becomes visible by itself within `REFRESH_WAIT_S`."""
        found = await self._persist(partial(self._cluster.get_settings, self._read_alias))
        return all(
            _interval_s(settings.get("index.refresh_interval", "1s")) <= REFRESH_WAIT_S
            for settings in found.values()
        )

    async def refresh(self) -> None:
        """Make everything written so far visible to searches."""
        await self._persist(partial(self._cluster.refresh, self._read_alias))

    async def _write_to(
        self,
        target: Target,
        batch: Sequence[Write],
        encode: Encoder,
        *,
        refresh: RefreshWhen,
        trouble: "_Trouble",
    ) -> None:
        """Send the writes and note in each what became of it."""
        doubtful: list[tuple[Write, int]] = []
        for write, outcome in await self._send(target, batch, encode, refresh):
            if isinstance(outcome, HalflifeError):
                self._note_failure(write, outcome, trouble)
                continue
            match outcome.fate:
                case "applied":
                    self._acknowledge(write)
                    self._trouble_until = None
                case "superseded":
                    current = outcome.current_version or write.version
                    if current == write.version and write.tried:
                        doubtful.append((write, current))
                    else:
                        self._overtaken(write, current)
                case "fenced":
                    write.tried = True
                    write.error = outcome.error("writing")
                    trouble.fenced = trouble.waits = True
                case "retry":
                    write.tried = True
                    write.error = outcome.error("writing")
                    trouble.waits = trouble.refused = True
                case _:
                    write.error = outcome.error("writing")
                    write.settled = True
        if doubtful:
            await self._tell_ours(target, doubtful, encode, trouble=trouble)

    async def _tell_ours(
        self,
        target: Target,
        doubtful: Sequence[tuple[Write, int]],
        encode: Encoder,
        *,
        trouble: "_Trouble",
    ) -> None:
        """Find out whether equal versions are our own earlier tries or strangers, by their content."""
        writes = [write for write, _ in doubtful]
        try:
            found = await self._mget(target, [write.id for write in writes], source=True)
            bodies = await encode(target, writes)
            lasting = await self.settled(found)
        except HalflifeError as error:
            for write in writes:
                self._note_failure(write, error, trouble)
            return
        for (write, current), body in zip(doubtful, bodies, strict=True):
            there = found.get(write.id)
            if isinstance(body, HalflifeError):
                self._note_failure(write, body, trouble)
            elif (
                there is not None
                and there.version == write.version
                and documents.without_vectors(json.loads(body)) == documents.without_vectors(there.source)
            ):
                if write.id in lasting:
                    self.found_again = True
                    self._acknowledge(write)
                elif write.guarded:
                    # It may be on one copy only, which others no longer count. The same again, until it is on all
                    # or that copy is out: a higher version could go over what another has written meanwhile.
                    self._note_failure(write, _not_on_all_copies(), trouble)
                else:
                    self._overtaken(write, current)
            else:
                self._overtaken(write, max(current, there.version if there else 0))

    def _acknowledge(self, write: Write) -> None:
        write.settled, write.error = True, None

    def _overtaken(self, write: Write, current: int) -> None:
        """Another's write stands where this one should: draw a higher stamp, or give up a guarded one."""
        if write.guarded:
            write.conflict = write.settled = True
            write.error = None
        else:
            write.version = self._stamper.after(current)
            write.tried = False

    def _note_failure(self, write: Write, error: HalflifeError, trouble: "_Trouble") -> None:
        write.error = error
        if isinstance(error, ClusterUnavailable):
            write.tried = trouble.waits = trouble.refused = True
        else:
            write.settled = True

    async def _send(
        self, target: Target, writes: Sequence[Write], encode: Encoder, refresh: RefreshWhen
    ) -> list[tuple[Write, BulkOutcome | HalflifeError]]:
        if not writes:
            return []
        bodies = await encode(target, writes)
        found: list[tuple[Write, BulkOutcome | HalflifeError]] = []
        actions: list[tuple[Write, BulkAction]] = []
        for write, body in zip(writes, bodies, strict=True):
            if isinstance(body, HalflifeError):
                found.append((write, body))
            else:
                actions.append((write, BulkAction(target.alias, write.id, write.version, body)))
        for part in copying.in_bulks(
            actions, lambda pair: len(pair[1].source), most=BULK_ITEMS, most_bytes=BULK_BYTES
        ):
            found += await self._bulk(part, refresh)
        return found

    async def _bulk(
        self, part: Sequence[tuple[Write, BulkAction]], refresh: RefreshWhen
    ) -> list[tuple[Write, BulkOutcome | HalflifeError]]:
        try:
            outcomes = await self._cluster.bulk(
                [action for _, action in part], refresh=refresh, timeout_s=self._patience.request_timeout_s
            )
        except HalflifeError as error:
            if len(part) > 1 and error.members.get("elasticsearch", {}).get("status") == 413:
                middle = len(part) // 2
                return [*await self._bulk(part[:middle], refresh), *await self._bulk(part[middle:], refresh)]
            return [(write, error) for write, _ in part]
        return [(write, outcome) for (write, _), outcome in zip(part, outcomes, strict=True)]

    # --- reading

    async def read(
        self, ids: Sequence[str], *, source: bool | Sequence[str], vectors: bool = False
    ) -> dict[str, Stored]:
        """Return the documents that the index has, tombstones too, in real time; `vectors` unpacked."""
        found: dict[str, Stored] = {}
        step = READ_ITEMS_WITH_VECTORS if vectors else READ_ITEMS
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            found |= await self._persist(partial(self._read_current, part, source=source, vectors=vectors))
        return found

    async def _read_current(
        self, ids: Sequence[str], *, source: bool | Sequence[str], vectors: bool
    ) -> dict[str, Stored]:
        target = await self._targets.current()
        try:
            return await self._mget(target, ids, source=source, vectors=vectors)
        except NotFound as gone:
            fresh = await self._targets.reread(target)
            if fresh.alias == target.alias:
                raise ClusterUnavailable(
                    "reading documents: their index is being exchanged", retry_after_s=1
                ) from gone
            try:
                return await self._mget(fresh, ids, source=source, vectors=vectors)
            except NotFound as again:
                # A node that has not heard of the new alias yet.
                raise ClusterUnavailable(
                    "reading documents: their index is being exchanged", retry_after_s=1
                ) from again

    async def settled(self, found: Mapping[str, Stored]) -> set[str]:
        """Return which of these, as just read, are acknowledged and current, as if written just now.

        A read alone proves neither: what it saw may be another's write that is not on all copies yet and may still be
        lost, and it may come from a copy or an index that is out of date. So every copy must have what was read (the
        global checkpoint, asked after the read), and then the primary behind the write alias must still hold it. In
        any doubt the answer is no, and the document is written.
        """
        try:
            sure: set[str] = set()
            sources = {stored.read_from.alias: stored.read_from for stored in found.values()}
            for target in sources.values():
                shards = (await self._cluster.sequence_numbers(target.collection.index)).values()
                asked = [
                    (id_, *stored.place)
                    for id_, stored in found.items()
                    if stored.read_from.alias == target.alias
                    and stored.place is not None
                    # Which shard an id is on is the cluster's business: so of every shard that has such a number.
                    and all(
                        stored.place[0] <= shard.on_all_copies or stored.place[0] > shard.highest
                        for shard in shards
                    )
                ]
                # Through the alias of the read: another index could have another document at the same place.
                confirmed = await self._cluster.confirm(
                    target.alias, asked, timeout_s=self._patience.request_timeout_s
                )
                sure |= {id_ for (id_, _, _), holds in zip(asked, confirmed, strict=True) if holds}
        except HalflifeError:
            return set()
        return sure

    async def _mget(
        self, target: Target, ids: Sequence[str], *, source: bool | Sequence[str], vectors: bool = False
    ) -> dict[str, Stored]:
        entries = await self._cluster.mget(
            target.alias, ids, source=source, vectors=vectors, timeout_s=self._patience.request_timeout_s
        )
        return {
            entry["_id"]: Stored(
                entry["_version"],
                entry.get("_source", {}),
                (entry["_seq_no"], entry["_primary_term"]),
                read_from=target,
            )
            for entry in entries
            if entry.get("found")
        }

    # --- patience

    async def _persist(self, do: Callable[[], Awaitable[T]]) -> T:
        """Do something that changes nothing, again while the cluster is unavailable and the budget lasts."""
        pauses = 0
        refused = False
        while True:
            try:
                with repeating(refused):
                    result = await do()
            except Unavailable as error:
                # An index that is being exchanged refuses nobody.
                refused = not isinstance(error.__cause__, NotFound)
                if not await self._wait_out(pauses, refused=refused):
                    raise
                pauses += 1
            else:
                self._trouble_until = None
                return result

    async def _wait_out(self, number: int, *, refused: bool) -> bool:
        """Pause because of the cluster; False if it has been in trouble for the whole budget, or enough others wait."""
        if self._trouble_until is None:
            self._trouble_until = self.deadline()
        if not await self.pause(number, until=self._trouble_until):
            return False
        return not refused or await self._cluster.turn_to_retry(until=self._trouble_until)

    def deadline(self) -> float:
        """Return the moment of the loop's clock at which patience that begins now ends."""
        return asyncio.get_running_loop().time() + self._patience.budget_s

    async def pause(self, number: int, *, until: float) -> bool:
        """Wait before the `number`-th repetition, from 0; return False, at once, if it is later than `until`."""
        left = until - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        longest = min(self._patience.longest_s, self._patience.first_s * 2 ** min(number, 16))
        await asyncio.sleep(min(left, longest * random.uniform(0.5, 1.0)))  # noqa: S311 - jitter, no secret
        return True


@dataclass(slots=True)
class _Trouble:
    waits: bool = False
    fenced: bool = False
    refused: bool = False
    """The cluster is unavailable or overloaded, so that trying again must keep to the retry budget."""


def _of_another(over: Stored | None, target: Target) -> bool:
    """Tell whether it was read in a collection that was deleted, and another made under its name."""
    return over is not None and over.read_from.collection.uid != target.collection.uid


def _not_on_all_copies() -> HalflifeError:
    return ClusterUnavailable(
        "writing documents: the write has arrived, but it is not known to be on all copies",
        remedy="send it again",
        retry_after_s=1,
    )


def _gave_up() -> HalflifeError:
    return Conflict(
        "writing: other writers kept overtaking this one until its time was over", remedy="send it again"
    )
