"""Many documents read out of an index and written into one, through whatever troubles the cluster has meanwhile.

Reads are pages of a point in time, writes carry the versions that were read: repeating either changes nothing. Knows
no collection and no reindex.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from app import fields
from app.elastic import BulkAction, Cluster
from app.errors import ClusterUnavailable, CursorExpired, HalflifeError, Unavailable
from app.guarding import repeating
from app.outcomes import AWAY

Json = dict[str, Any]
Hit = dict[str, Any]
T = TypeVar("T")

PAGE_DOCUMENTS: Final = 500
PAGE_BYTES: Final = 8 * 2**20
SCAN_IDS: Final = 5_000
BULK_BYTES: Final = 8 * 2**20
KEEP_ALIVE_S: Final = 300.0
READ_TIMEOUT_S: Final = 30.0
TRIES_EACH: Final = 4
"""Failures in a row after which a point in time is taken for lost. A busy cluster still has it: opening another at each
try would leave it with one for each.
"""


async def patiently(do: Callable[[], Awaitable[T]], *, budget_s: float, cluster: Cluster | None = None) -> T:
    """Do something that may be repeated, again while the cluster is unavailable and the budget lasts.

    With the cluster, within its retry budget.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + budget_s
    pause_s = 0.05
    again = False
    while True:
        try:
            with repeating(again):
                return await do()
        except Unavailable:
            if loop.time() >= until:
                raise
            again = cluster is not None
            if cluster is not None and not await cluster.turn_to_retry(until=until):
                raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, no secret
        pause_s = min(2.0, pause_s * 2)


async def pages(
    cluster: Cluster,
    index: str,
    *,
    whole: bool,
    after: str | None = None,
    query: Mapping[str, Any] | None = None,
    shard: int | None = None,
    foreign: bool = False,
    budget_s: float,
) -> AsyncGenerator[list[Hit], None]:
    """Yield documents in id order, in pages, as of one point in time; if that is lost, another goes on.

    `whole`: with everything in them, vectors too, and pages that stay below some MB; else ids and versions. `foreign`:
    of an index that has no `document_id`: then in no order, and what was read is read again if the point in time is
    lost.
    """
    pit: str | None = None
    failures = 0  # in a row, of this point in time
    size = 32 if whole else SCAN_IDS
    loop = asyncio.get_running_loop()
    until: float | None = None
    pause_s = 0.05
    timeout_s = max(READ_TIMEOUT_S, cluster.request_timeout_s)
    place: list[Any] | None = None if after is None else [after]
    try:
        while True:
            body: Json = {
                "size": size,
                "query": query or {"match_all": {}},
                "sort": ["_shard_doc"] if foreign else [{fields.DOCUMENT_ID: "asc"}],
                "version": True,
                "track_total_hits": False,
                "_source": {"exclude_vectors": False} if whole else False,
            }
            if place is not None:
                body["search_after"] = place
            try:
                pit = pit or await cluster.open_pit(
                    index, keep_alive_s=KEEP_ALIVE_S, timeout_s=timeout_s, allow_partial=False, shard=shard
                )
                body["pit"] = {"id": pit, "keep_alive": f"{round(KEEP_ALIVE_S * 1000)}ms"}
                answer = await cluster.search(None, body, timeout_s=timeout_s, doing=f"reading {index}")
                complete(answer, f"reading {index}")
            except (CursorExpired, Unavailable) as error:
                size, failures = max(8, size // 2), failures + 1
                if pit is not None and (failures >= TRIES_EACH or _gone(error)):
                    # It lives on certain nodes and is gone with them. What others still hold of it is let go.
                    cluster.close_pit_soon(pit)
                    pit, failures = None, 0
                    place = None if foreign else place
                until = until or loop.time() + budget_s
                refused = isinstance(error, Unavailable)
                if loop.time() > until or (refused and not await cluster.turn_to_retry(until=until)):
                    raise ClusterUnavailable(f"reading {index}: {error.detail}") from error
                await asyncio.sleep(pause_s)
                pause_s = min(2.0, pause_s * 2)
                continue
            until, pause_s, failures = None, 0.05, 0
            hits: list[Hit] = answer["hits"]["hits"]
            pit = answer.get("pit_id", pit)
            if hits:
                yield hits
                # Past the first value stands what tells equal ones apart in this point in time only.
                place = hits[-1]["sort"][:1]
            if len(hits) < size:
                return
            if whole:
                bytes_ = sum(map(_weight, hits)) / len(hits)
                size = max(8, min(PAGE_DOCUMENTS, size * 2, int(PAGE_BYTES / bytes_)))
    finally:
        if pit is not None:
            await cluster.close_pit(pit)


def complete(answer: Json, doing: str) -> Json:
    """Return a search's answer if every shard gave its part. Raises CursorExpired, ClusterUnavailable."""
    shards = answer.get("_shards", {})
    if "search_context_missing" in str(shards.get("failures", "")):
        raise CursorExpired(
            f"{doing}: a part of the point in time is gone", remedy="start again from the first page"
        )
    if answer.get("timed_out") or shards.get("failed"):
        raise ClusterUnavailable(f"{doing}: not every shard answered", retry_after_s=1)
    return answer


def _gone(error: HalflifeError) -> bool:
    """Tell whether a point in time is lost, or lies on a node that is away."""
    return isinstance(error, CursorExpired) or error.members.get("elasticsearch", {}).get("type") in AWAY


async def fill(cluster: Cluster, actions: Sequence[BulkAction], *, budget_s: float) -> dict[str, str] | None:
    """Write documents under the versions they have and return id -> why of those that the index refuses.

    One that has this version or a newer one is there already. Returns None if the alias is gone or its index is
    blocked: then someone else has decided about it. Raises StorageFull, and ClusterUnavailable past the budget.
    """
    pending = list(actions)
    refused: dict[str, str] = {}
    pause_s = 0.05
    loop = asyncio.get_running_loop()
    until = loop.time() + budget_s
    timeout_s = max(READ_TIMEOUT_S, cluster.request_timeout_s)
    while pending:
        again: list[BulkAction] = []
        for part in in_bulks(
            pending, lambda action: len(action.source), most=PAGE_DOCUMENTS, most_bytes=BULK_BYTES
        ):
            outcomes = await patiently(
                partial(cluster.bulk, part, timeout_s=timeout_s),
                budget_s=budget_s,
                cluster=cluster,
            )
            for action, outcome in zip(part, outcomes, strict=True):
                match outcome.fate:
                    case "applied" | "superseded":
                        pass
                    case "retry":
                        again.append(action)
                    case "fenced":
                        return None
                    case "refused":
                        refused[action.id] = str(outcome.reason)
                    case _:
                        error = outcome.error("filling an index")
                        assert error is not None
                        raise error
        if again:
            if loop.time() > until or not await cluster.turn_to_retry(until=until):
                raise ClusterUnavailable("filling an index: the cluster is overloaded")
            await asyncio.sleep(pause_s)
            pause_s = min(2.0, pause_s * 2)
        pending = again
    return refused


def measured_alike(vector: np.ndarray, similarity: str) -> np.ndarray:
    """Return a vector as an index of that similarity holds it: at length one, unless cosine sees to that itself.

    So that a relevance means one thing whatever the measure: inner products and distances of other lengths don't tell
    a cosine.
    """
    if similarity == "cosine":
        return vector
    length = float(np.linalg.norm(vector))
    return vector if abs(length - 1) < 1e-6 or length == 0 else np.asarray(vector / length, dtype=np.float32)


async def found(
    cluster: Cluster,
    index: str,
    ids: Sequence[str],
    *,
    source: bool | Sequence[str] = False,
    budget_s: float,
) -> dict[str, Hit]:
    """Return id -> what an index has under it, in real time, tombstones too: `_version`, and these parts of `_source`."""
    held: dict[str, Hit] = {}
    for first in range(0, len(ids), 1_000):
        part = list(ids[first : first + 1_000])
        entries = await patiently(
            partial(cluster.mget, index, part, source=source, timeout_s=cluster.request_timeout_s),
            budget_s=budget_s,
            cluster=cluster,
        )
        held |= {entry["_id"]: entry for entry in entries if entry.get("found")}
    return held


def _weight(hit: Hit) -> int:
    """Return about how many bytes a document has as JSON."""
    return 100 + _size(hit["_source"])


def _size(value: Any) -> int:
    match value:
        case str():
            return len(value) + 4
        case dict():
            return sum(len(key) + 4 + _size(each) for key, each in value.items())
        case [float(), *_]:
            return 12 * len(value)
        case list():
            return sum(map(_size, value)) + 2
        case _:
            return 8


def in_bulks(
    items: Sequence[T], size_of: Callable[[T], int], *, most: int, most_bytes: int
) -> Iterator[list[T]]:
    """Cut into bulks of bounded count and bytes; an item larger than the bound goes alone."""
    part: list[T] = []
    size = 0
    for item in items:
        bytes_ = size_of(item)
        if part and (len(part) >= most or size + bytes_ > most_bytes):
            yield part
            part, size = [], 0
        part.append(item)
        size += bytes_
    if part:
        yield part
