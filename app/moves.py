"""How a collection changes its index: where its aliases lead, the fence, the swap, and what is written down of it.

Every decision is one atomic `_aliases` call that removes something with `must_exist`, so of two who decide at the same
time one wins and the other hears so, however slow or stale either of them is. That holds for deleting an index too: it
takes the newest write alias away and gives it back in the same step, so it happens only while the generation is the one
that was looked at. Whoever fences, swaps or permits filling makes a generation of its own, and so outdates what others
have seen. The document in the state index holds progress only. Copies nothing and knows no document.

A **fence** keeps writers out of an index for a moment. From generation N its write alias `…-w-N-a` is exchanged for
`…-w-(N+1)-b`: a generation that has a `b` and no `a`, which nobody writes to. Then the index is blocked for writes;
when that is confirmed, everything that was under way has been answered. The lone `b` is the permit for what comes
next: the swap takes it away and gives `…-w-(N+2)-a` to the new index; lifting the fence takes it away and gives that
alias back to the old one. Both can't happen. Whoever is kept out long enough may lift it, so that a process that was
killed in there doesn't stop writes. The **copy alias** is the permit to fill an index: aborting takes it away, and
the swap needs it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, Self

from app import names
from app.copying import patiently
from app.elastic import Cluster
from app.errors import ClusterUnavailable, Conflict, HalflifeError, NotFound
from app.times import format_instant
from app.turns import STATE_INDEX, Kind, ensure_state_index, state_id

Json = dict[str, Any]
Phase = Literal["copying", "swapped", "finishing", "returning", "finished", "aborted", "rolled-back"]

UNDER_WAY: Final[frozenset[Phase]] = frozenset({"copying", "swapped", "finishing", "returning"})
"""While a collection's reindex is in one of these, an index other than the live one matters."""

FENCE_TIMEOUT_S: Final = 8.0
"""How long a fence stands at most before its maker gives up; writers wait 20 s before they fail."""
RESCUE_AFTER_S: Final = 12.0
"""How long others see the same fence before they lift it. Longer than any request of a writer waits (10 s): a write
that was sent before the fence and is still on its way can't be acknowledged any more."""
HEARTBEAT_S: Final = 1.0
SILENT_S: Final = 3.5


# --- aliases ---------------------------------------------------------------------------------------------------------


def copy_alias(collection: str) -> str:
    """Return the alias through which a copier fills the index to come."""
    return names.own_index(f"copy-{collection}")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the aliases of a collection lead; None where there is no such alias."""

    live: str | None
    """The index that is read."""
    generation: int
    written: str | None
    """The index that is written, None behind a fence."""
    fenced: str | None
    filling: str | None
    """The index that is being filled."""

    @property
    def in_use(self) -> frozenset[str | None]:
        """The indices that are read, written or fenced."""
        return frozenset({self.live, self.written, self.fenced})


async def standing(cluster: Cluster, collection: str) -> Standing:
    """Return where the collection's aliases lead, all as of one moment."""
    read = names.read_alias(collection)
    found = await cluster.resolve_aliases(read, names.index_pattern(collection), copy_alias(collection))
    writing: dict[int, dict[str, str]] = {}
    for alias, indices in found.items():
        parsed = names.parse_write_alias(alias)
        if parsed is not None and parsed[0] == collection:
            writing.setdefault(parsed[1], {})[parsed[2]] = min(indices)
    generation = max(writing, default=0)
    newest = writing.get(generation, {})
    return Standing(
        live=min(found.get(read, ()), default=None),
        generation=generation,
        written=newest.get("a"),
        fenced=None if "a" in newest else newest.get("b"),
        filling=min(found.get(copy_alias(collection), ()), default=None),
    )


async def fence(cluster: Cluster, collection: str, *, index: str, generation: int) -> int:
    """Keep writers of `generation` out and return the fence's generation; nothing is under way when this returns.

    Raises NotFound if that generation has been taken away meanwhile. If this raises anything else, the fence may
    stand: lift it.
    """
    await cluster.update_aliases(
        [
            _remove(index, names.write_alias(collection, generation, "a")),
            {"add": {"index": index, "alias": names.write_alias(collection, generation + 1, "b")}},
        ]
    )
    await patiently(lambda: cluster.add_write_block(index), budget_s=FENCE_TIMEOUT_S)
    return generation + 1


async def lift(cluster: Cluster, collection: str, *, index: str, generation: int) -> bool:
    """Give the index behind the fence back to writers; False if the fence was no longer there.

    Idempotent, for anyone, at any time. The block goes first: whoever lifts it may die before the second call, and an
    index that has its write alias and a block would stay so.
    """
    try:
        await cluster.clear_write_block(index)
        await cluster.update_aliases(
            [
                _remove(index, names.write_alias(collection, generation, "b")),
                {"add": {"index": index, "alias": names.write_alias(collection, generation + 1, "a")}},
            ]
        )
    except NotFound:
        return False
    return True


async def swap(
    cluster: Cluster,
    collection: str,
    *,
    source: str,
    target: str,
    generation: int,
    read_properties: Mapping[str, Any],
    timeout_s: float | None = None,
) -> None:
    """Make `target` the collection's index, read and written, in one step, out of the fence of that generation.

    Raises NotFound, and changes nothing, if the fence was lifted, the reindex aborted, or another index is live.
    """
    read = names.read_alias(collection)
    await cluster.update_aliases(
        [
            _remove(source, names.write_alias(collection, generation, "b")),
            _remove(target, copy_alias(collection)),
            _remove(source, read),
            {"add": {"index": target, "alias": read, **read_properties}},
            {"add": {"index": target, "alias": names.write_alias(collection, generation + 1, "a")}},
        ],
        timeout_s=timeout_s,
    )


async def give_up_filling(cluster: Cluster, collection: str, index: str) -> bool:
    """Take the permit to fill `index` away; False if it wasn't there: never given, or the swap has used it."""
    try:
        await cluster.update_aliases([_remove(index, copy_alias(collection))])
    except NotFound:
        return False
    return True


async def permit_filling(cluster: Cluster, collection: str, index: str, *, seen: Standing) -> None:
    """Let a copier fill an index that is there already; the collection's writers go on in a generation of their own.

    Raises NotFound, and permits nothing, if the aliases have changed since `seen`, or if that index is gone: its deletion
    was decided first. In the new generation nobody deletes it who looked before.
    """
    assert seen.written is not None
    await cluster.update_aliases(
        [
            _remove(seen.written, names.write_alias(collection, seen.generation, "a")),
            {
                "add": {
                    "index": seen.written,
                    "alias": names.write_alias(collection, seen.generation + 1, "a"),
                }
            },
            {"add": {"index": index, "alias": copy_alias(collection)}},
        ]
    )


async def discard(cluster: Cluster, collection: str, index: str, *, seen: Standing) -> None:
    """Delete an index that is not in use, if the aliases are as they were `seen`, in one step.

    Raises NotFound, and deletes nothing, if they have changed since, or if the index is gone.
    """
    assert index not in seen.in_use
    actions: list[Json] = [{"remove_index": {"index": index}}]
    holder = seen.written or seen.fenced
    if holder is not None:
        # Without a write alias there is nothing that a swap could begin with either.
        alias = names.write_alias(collection, seen.generation, "a" if seen.written is not None else "b")
        actions += [_remove(holder, alias), {"add": {"index": holder, "alias": alias}}]
    await cluster.update_aliases(actions)


def _remove(index: str, alias: str) -> Json:
    return {"remove": {"index": index, "alias": alias, "must_exist": True}}


# --- what is written down --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """A collection's reindex, as it is written down."""

    collection: str
    phase: Phase
    owner: str
    source: str
    target: str
    wanted: Json = field(default_factory=dict)
    """What the target was asked to be."""
    base: dict[str, int] = field(default_factory=dict)
    """Per shard of the source: what it held up to this sequence number is in the target, or comes with the first copy."""
    turned: dict[str, int] = field(default_factory=dict)
    """The same of the target at the swap: what came later must be brought back by a rollback."""
    after: str | None = None
    """The first copy has come as far as this id."""
    copied: bool = False
    total: int = 0
    done: int = 0
    missing: int = 0
    """Documents that the target does not have, by the user's leave."""
    pause: bool = False
    """Someone asks the owner to stop."""
    started_at: str = ""
    updated_at: str = ""

    @property
    def under_way(self) -> bool:
        """Tell whether an index other than the live one still matters."""
        return self.phase in UNDER_WAY

    def concerns(self, found: Standing) -> bool:
        """Tell whether it is of the collection as it stands, not of one of that name that was deleted since."""
        return found.live in (self.source, self.target)


class Taken(Conflict):
    """Another process has taken the reindex over, aborted it or finished it."""

    code = "reindex-taken"
    title = "Another process works on this reindex"


class Paused(HalflifeError):
    """Someone asked for a pause, and everything done so far is kept."""

    status = 409
    code = "reindex-paused"
    title = "The reindex is paused"


class Ledger:
    """One collection's state in the cluster, written under `if_seq_no`: whoever writes it last owns it."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        *,
        owner: str,
        now: Callable[[], datetime],
        budget_s: float = 60.0,
        kind: Kind = "reindex",
    ) -> None:
        """`owner` is a name that no other process uses; `kind` tells several things of a collection apart."""
        self._cluster = cluster
        self._collection = collection
        self._kind = kind
        self._id = state_id(collection, kind)
        self._owner = owner
        self._now = now
        self._budget_s = budget_s
        self._lock = asyncio.Lock()
        self._place: tuple[int, int] | None = None
        self._lost: HalflifeError | None = None
        self._state: State | None = None

    @property
    def owner(self) -> str:
        """The name under which this process writes."""
        return self._owner

    def stamp(self) -> str:
        """Return the time, as states have it."""
        return format_instant(self._now())

    def note(self, **changes: Any) -> None:
        """Change the state; the next heartbeat writes it down."""
        self._state = replace(self.state, **changes)

    @property
    def state(self) -> State:
        """What is written down, as this process knows it."""
        assert self._state is not None
        return self._state

    async def load(self) -> State | None:
        """Read what is written down; None if nothing is."""
        self._state, self._place = await patiently(self._load, budget_s=self._budget_s, cluster=self._cluster)
        return self._state

    async def _load(self) -> tuple[State | None, tuple[int, int] | None]:
        try:
            [entry] = await self._cluster.mget(
                STATE_INDEX, [self._id], timeout_s=self._cluster.request_timeout_s
            )
        except NotFound:
            return None, None
        if not entry.get("found"):
            return None, None
        return State(**entry["_source"]["state"]), (entry["_seq_no"], entry["_primary_term"])

    async def begin(self, state: State) -> None:
        """Write a new state over what was loaded. Raises Taken if another process was quicker."""
        await patiently(
            lambda: ensure_state_index(self._cluster), budget_s=self._budget_s, cluster=self._cluster
        )
        self._state = state
        await self.save()

    async def take(self, **changes: Any) -> None:
        """Become the owner of what was loaded. Raises Taken if another process was quicker."""
        await self.save(owner=self._owner, pause=False, **changes)

    async def save(self, **changes: Any) -> None:
        """Write the state with these changes. Raises Taken if it is no longer ours."""
        async with self._lock:
            self._state = replace(self.state, **changes, updated_at=format_instant(self._now()))
            await patiently(self._save, budget_s=self._budget_s)

    async def _put(self, state: State) -> None:
        """Write it over what was read last. Raises Conflict if something else is there by now."""
        body = {
            "kind": self._kind,
            "collection": self._collection,
            "phase": state.phase,
            "updated_at": state.updated_at,
            "state": asdict(state),
        }
        self._place = await self._cluster.put_document(
            STATE_INDEX, self._id, body, create=self._place is None, if_match=self._place
        )

    async def _save(self) -> None:
        try:
            await self._put(self.state)
        except Conflict as error:
            found, place = await self._load()
            if found is None or found.owner != self.state.owner:
                self._lost = Taken(
                    f"the reindex of `{self._collection}` has gone over to another process",
                    remedy="see `--status`; what was done so far is kept",
                )
                raise self._lost from error
            # An earlier try of ours arrived without our hearing of it, or someone asked for a pause.
            self._place = place
            self._state = replace(self.state, pause=found.pause)
            raise ClusterUnavailable("the reindex' state changed meanwhile") from error

    async def ask_to_pause(self) -> State | None:
        """Ask whoever works on it to stop, and return what is written down then; None if nothing is.

        Changes nothing but the wish: whatever the owner writes meanwhile is read again and stays.
        """
        async with self._lock:
            await patiently(self._ask_to_pause, budget_s=self._budget_s)
            return self._state

    async def _ask_to_pause(self) -> None:
        self._state, self._place = await self._load()
        if self._state is None or not self._state.under_way or self._state.pause:
            return
        asked = replace(self._state, pause=True)
        try:
            await self._put(asked)
        except Conflict as error:
            raise ClusterUnavailable("the reindex' state changed meanwhile") from error
        self._state = asked

    def check(self) -> None:
        """Raise Taken if it is no longer ours, Paused if a pause was asked for."""
        if self._lost is not None:
            raise self._lost
        if self.state.pause:
            raise Paused(
                f"the reindex of `{self._collection}` was asked to pause",
                remedy="run the same command again to go on",
            )

    async def silent(self, for_s: float = SILENT_S) -> bool:
        """Watch for a while whether anybody works on what was loaded; no clocks are compared."""
        seen = self._place
        for _ in range(max(1, round(for_s / 0.5))):
            await asyncio.sleep(0.5)
            await self.load()
            if self._place != seen:
                return False
        return True

    @contextlib.asynccontextmanager
    async def heartbeat(self) -> AsyncIterator[Self]:
        """Show others that this process works on it."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                try:
                    await self.save()
                except Taken:
                    return
                except HalflifeError:
                    # A full disk, say. It may pass; what is worked on ends by its own errors.
                    continue

        task = asyncio.get_running_loop().create_task(beat(), name="heartbeat")
        try:
            yield self
        finally:
            task.cancel()
            # However the heartbeat ended, it must not stand in for what became of the work.
            await asyncio.gather(task, return_exceptions=True)
