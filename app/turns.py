"""One writer at a time, where the cluster has no version to guard a change with: a lock in the state index.

Elasticsearch replaces a mapping's `_meta` as a whole, and on no condition: who reads it, changes a part and writes it
back undoes what another wrote in between. So they take turns. Whoever has a turn begins nothing after `HELD_S` of it,
and a turn that has not moved for `LEFT_AFTER_S` is over: its holder was killed. No clocks are compared; each goes by
how long it has watched. Also owns the state index, which every kind of state of ours lies in.
"""

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

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

HELD_S: Final = 10.0
"""How long a turn lasts at most: nothing is sent in it later than that."""
CALL_S: Final = 10.0
"""How long a change may take that was sent in a turn, its wait for the master included."""
LEFT_AFTER_S: Final = 25.0
"""How long others see the same turn before they take it over. Longer than `HELD_S` and `CALL_S` together: by then
nothing of its holder is under way."""
WAIT_S: Final = 35.0


class Turn:
    """A turn under way; times are the event loop's."""

    def __init__(self, collection: str, began: float) -> None:
        self._collection = collection
        self._began = began

    def check(self) -> None:
        """Raise ClusterUnavailable where it has lasted too long for anything more to be sent in it."""
        if asyncio.get_running_loop().time() - self._began > HELD_S:
            raise _busy(self._collection, f"the turn to change it lasted longer than {HELD_S:g} s")


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
    holder = secrets.token_hex(8)
    began: float | None = None
    place: Place | None = None
    seen: Place | None = None
    since = loop.time()
    while True:
        try:
            place, held_by = await _look(cluster, collection)
            if held_by == holder:
                break  # a try of ours arrived without our hearing of it
            if place != seen:
                seen, since = place, loop.time()
            if held_by is None or loop.time() - since > left_after_s:
                began = loop.time() if began is None else began
                place = await _write(cluster, collection, holder, place)
                break
        except Conflict:
            pass  # another was quicker
        except Unavailable:
            if loop.time() > until:
                raise
        if loop.time() > until:
            raise _busy(collection, "others are changing it")
        await asyncio.sleep(random.uniform(0.05, 0.15))  # noqa: S311 - jitter, no secret
    assert began is not None
    try:
        yield Turn(collection, began)
    finally:
        # A caller that leaves must not keep others out; who took it over meanwhile has another place.
        await asyncio.shield(asyncio.ensure_future(_give_back(cluster, collection, place)))


async def _give_back(cluster: Cluster, collection: str, place: Place | None) -> None:
    with contextlib.suppress(HalflifeError):
        await _write(cluster, collection, None, place)


async def _look(cluster: Cluster, collection: str) -> tuple[Place | None, str | None]:
    try:
        [entry] = await cluster.mget(STATE_INDEX, [_id(collection)], timeout_s=CALL_S)
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
        STATE_INDEX, _id(collection), body, create=place is None, if_match=place, timeout_s=CALL_S
    )


def _id(collection: str) -> str:
    return f"turn:{collection}"


def _busy(collection: str, what: str) -> ClusterUnavailable:
    return ClusterUnavailable(
        f"changing the options of `{collection}`: {what}; nothing was changed",
        remedy="send it again",
        retry_after_s=1,
    )
