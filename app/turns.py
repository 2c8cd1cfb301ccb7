"""One writer at a time, where the cluster has no version to guard a change with: a lock in the state index.

Elasticsearch replaces a mapping's `_meta` as a whole, and on no condition: who reads it, changes a part and writes it
back undoes what another wrote in between. So they take turns. Whoever has a turn bounds each change that it sends by
what is left of `HELD_S`, and a turn that has not moved for `LEFT_AFTER_S` is over: its holder was killed. No clocks are
compared; each goes by how long it has watched. What no lock outside of the master can rule out: a change that a node
took in time and passed on late, after a pause as long as what is left. So who changes something reads it back. Also
owns the state index, which every kind of state of ours lies in.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Collection
from typing import Any, Final, Literal, get_args

from app import names
from app.elastic import Cluster
from app.errors import ClusterUnavailable, Conflict, HalflifeError, NotFound, Unavailable

Json = dict[str, Any]
Place = tuple[int, int]

STATE_INDEX: Final = names.own_index("state")
_STATE_BODY: Final[Json] = {
    "settings": {"index": {"number_of_shards": 1, "auto_expand_replicas": "0-1", "hidden": True}},
    "mappings": {
        "dynamic": "strict",
        "properties": {
            "kind": {"type": "keyword"},
            "collection": {"type": "keyword"},
            "phase": {"type": "keyword"},
            "updated_at": {"type": "date"},
            "state": {"type": "object", "enabled": False},
        },
    },
}

Kind = Literal["turn", "reindex", "purge"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""What is noted of a collection, a document each."""

HELD_S: Final = 20.0
"""How long a turn lasts at most: by then what was sent in it is done, or is not begun any more."""
LEAST_S: Final = 1.0
"""How long a change must have at least to be sent."""
LEFT_AFTER_S: Final = 25.0
"""How long others see the same turn before they take it over."""
CALL_S: Final = 10.0
"""Longest wait for one look at the turn, or one move of it."""
WAIT_S: Final = 35.0


def state_id(collection: str, kind: Kind) -> str:
    """Return the id of the document that holds what is noted of a collection."""
    return f"{kind}:{collection}"


class Turn:
    """A turn under way; times are the event loop's."""

    def __init__(self, collection: str, began: float) -> None:
        self._collection = collection
        self._began = began

    def call_s(self) -> float:
        """Return how long a change may take that is sent now; raise ClusterUnavailable where that is too short for any.

        Half of what is left: as long for its way into the cluster, the wait for a connection included, and as long
        again for its wait for the master, which counts from its arrival.
        """
        left = self._began + HELD_S - asyncio.get_running_loop().time()
        if left < 2 * LEAST_S:
            raise _busy(self._collection, f"the turn to change it lasted longer than {HELD_S:g} s")
        return left / 2


async def ensure_state_index(cluster: Cluster) -> None:
    """Make the state index unless it is there."""
    with contextlib.suppress(Conflict):
        await cluster.create_index(STATE_INDEX, _STATE_BODY)


@contextlib.asynccontextmanager
async def turn(
    cluster: Cluster, collection: str, *, wait_s: float = WAIT_S, left_after_s: float = LEFT_AFTER_S
) -> AsyncIterator[Turn]:
    """Have the one turn there is to change what a collection's mapping says of it.

    Raises ClusterUnavailable, with nothing changed, where it is not to be had within `wait_s`.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    tries: dict[str, float] = {}  # each under a name of its own: one may arrive without our hearing of it
    holder = ""
    sent_to: Place | None = None
    seen: Place | None = None
    since = loop.time()
    try:
        while True:
            try:
                place, held_by = await _look(cluster, collection)
                if held_by in tries:
                    holder, sent_to = held_by, place
                    break
                if place != seen:
                    seen, since = place, loop.time()
                if held_by is None or loop.time() - since > left_after_s:
                    holder = secrets.token_hex(8)
                    # Others count from when they see it, so not from a try that was lost.
                    tries[holder], sent_to = loop.time(), place
                    sent_to = await _write(cluster, collection, holder, place)
                    break
            except Conflict:
                pass  # another was quicker
            except Unavailable:
                if loop.time() > until:
                    raise
            if loop.time() > until:
                raise _busy(collection, "others are changing it")
            await asyncio.sleep(random.uniform(0.05, 0.15))  # noqa: S311 - jitter, no secret
        yield Turn(collection, tries[holder])
    finally:
        if tries:
            # A caller that leaves must not keep others out; who took it over meanwhile has another place.
            await asyncio.shield(asyncio.ensure_future(_give_back(cluster, collection, sent_to, tries)))


async def forget(cluster: Cluster, collection: str) -> None:
    """Delete what is noted of a collection that is gone, unless a turn is under way; whoever still writes it hears so."""
    left = [state_id(collection, kind) for kind in KINDS]
    for _ in range(5):
        entries = await cluster.mget(STATE_INDEX, left, timeout_s=CALL_S)
        there = [
            (entry["_id"], entry["_seq_no"], entry["_primary_term"])
            for entry in entries
            if entry.get("found") and entry["_source"]["state"].get("holder") is None
        ]
        outcomes = await cluster.erase(STATE_INDEX, there)
        # A heartbeat may have come in between.
        left = [id_ for (id_, *_), outcome in zip(there, outcomes, strict=True) if outcome.fate != "applied"]
        if not left:
            return


async def _give_back(cluster: Cluster, collection: str, place: Place | None, tries: Collection[str]) -> None:
    """Make the turn free where one of the tries has it, or may get it yet: `place` is what the last one was sent to."""
    with contextlib.suppress(HalflifeError):
        try:
            # Where the try is still on its way, this takes the place that it needs.
            await _write(cluster, collection, None, place)
        except Conflict:
            place, held_by = await _look(cluster, collection)
            if held_by in tries:
                await _write(cluster, collection, None, place)


async def _look(cluster: Cluster, collection: str) -> tuple[Place | None, str | None]:
    try:
        [entry] = await cluster.mget(STATE_INDEX, [state_id(collection, "turn")], timeout_s=CALL_S)
    except NotFound:
        await ensure_state_index(cluster)
        return None, None
    if not entry.get("found"):
        return None, None
    return (entry["_seq_no"], entry["_primary_term"]), entry["_source"]["state"]["holder"]


async def _write(cluster: Cluster, collection: str, holder: str | None, place: Place | None) -> Place:
    body = {
        "kind": "turn",
        "collection": collection,
        "phase": "free" if holder is None else "held",
        "state": {"holder": holder},
    }
    return await cluster.put_document(
        STATE_INDEX,
        state_id(collection, "turn"),
        body,
        create=place is None,
        if_match=place,
        timeout_s=CALL_S,
    )


def _busy(collection: str, what: str) -> ClusterUnavailable:
    return ClusterUnavailable(
        f"changing the options of `{collection}`: {what}; nothing was changed",
        remedy="send it again",
        retry_after_s=1,
    )
