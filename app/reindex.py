"""A collection's move to another index while it is read and written: new mapping, declared fields, shards or model.

The protocol, each step repeatable and the whole resumable after a kill at any point:

1. Write down what is wanted; create the new index, which nobody reads or writes.
2. Note each shard's global checkpoint, then copy everything in id order, with versions and vectors.
3. Copy what came after the checkpoint, round after round, until a round is short.
4. Compare all (id, version) pairs and who has vectors; copy again what is behind; refuse on any mismatch left.
5. Fence the old index (see `moves`), copy the last changes, count again, swap the aliases in one call.
6. Look once more for what a straggler may have put into the old index.

Writers write one index at any time and need neither the new index nor its model before the swap, so a new index that
refuses documents, or an embedding server that is down, stops the reindex and no write. External versions make both
indices a per-id maximum: the order of arrival and repeats don't matter. The old index stays, blocked, until `finish`;
until then a rollback is the same move the other way round, from the checkpoint noted at the swap.

Owns the order of these steps. The aliases are `moves`', a collection's shape is `catalog`'s.
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, TypeVar

from app import catalog, chunking, fields, moves, names, turns
from app.chunking import Chunking
from app.collection import Collection, CollectionOptions, DeclaredType, Similarity
from app.copying import patiently
from app.elastic import Cluster
from app.errors import (
    ClusterUnavailable,
    Conflict,
    HalflifeError,
    InvalidRequest,
    NotFound,
    SchemaMismatch,
    Unavailable,
)
from app.lanes import Carrier, Lane, Mismatch
from app.moves import Ledger, Phase, Standing, State, Taken
from app.turns import Turn
from app.writes import DocumentEmbedder

Json = dict[str, Any]
Hit = dict[str, Any]
T = TypeVar("T")

SHORT_ROUND: Final = 200
"""A round of changes this short can be left to the fence."""
ROUNDS: Final = 12
FENCES: Final = 5
TAKES: Final = 5
"""How often an abort tries to become the owner: whoever works on it writes at most every second or so."""
CHANGEABLE: Final = ("index.refresh_interval", "index.number_of_replicas", "index.auto_expand_replicas")
SAMPLE: Final = 64


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be different afterwards; None leaves it as it is. The mapping always becomes the shipped one."""

    declare: Mapping[str, DeclaredType] = field(default_factory=dict)
    undeclare: frozenset[str] = frozenset()
    shards: int | None = None
    replicas: int | None = None
    model: str | None = None
    dims: int | None = None
    similarity: Similarity | None = None
    rechunk: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """What the new index is to be, nothing left open; `replicas` None: as the templates have it."""

    declared: dict[str, DeclaredType]
    similarity: Similarity
    dims: int
    model: str | None
    shards: int
    replicas: int | None
    rechunk: bool

    def options(self) -> CollectionOptions:
        """Return it as a collection is made from it."""
        given: Json = {"declared": self.declared, "similarity": self.similarity, "shards": self.shards}
        if self.replicas is not None:
            given["replicas"] = self.replicas
        return CollectionOptions(**given)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a reindex would do, and about what it costs; `tokens` and `seconds` are estimates from a sample."""

    collection: str
    source: str
    goal: Goal
    changes: list[str]
    documents: int
    tombstones: int
    chunks: int
    store_bytes: int
    reembeds: bool
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is; `total` grows while writes go on."""

    step: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has done: the state it left, and the documents that the new index refused."""

    state: State
    failures: dict[str, str]


class Reindexer:
    """Moves one collection; every method may be called by any process at any time."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        *,
        embedder: Callable[[Collection], DocumentEmbedder],
        now: Callable[[], datetime],
        chunks: Chunking | None = None,
        rate: float | None = None,
        patience_s: float = 120.0,
        report: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        """`embedder` returns what embeds for an index, or raises InvalidRequest; `rate`: documents a second at most."""
        self._cluster = cluster
        self._name = collection
        self._now = now
        self._rate = rate
        self._patience_s = patience_s
        self._report = report
        self._carrier = Carrier(
            cluster,
            collection,
            embedder=embedder,
            chunks=chunks or Chunking(),
            patience_s=patience_s,
            tell=self._tell,
        )
        self._paced_until = 0.0
        self._restored: dict[str, str | None] | None = None

    # --- what would be done

    async def plan(self, changes: Changes) -> Plan:
        """Return what a reindex would change and cost; changes nothing. Raises NotFound without the collection."""
        standing = await self._standing()
        source = await self._describe(standing.live or "")
        goal = await self._goal(source, changes)
        lane = Lane(source, _shaped(source, goal, source.index), goal.rechunk)
        await self._cluster.refresh(source.index)
        total = await self._cluster.count(source.index)
        tombstones = await self._cluster.count(source.index, {"term": {fields.DELETED: True}})
        stats = await self._cluster.index_stats(source.index)
        reembeds = not lane.same_chunks
        chunks = await self._carrier.count_chunks(source.index)
        begun = asyncio.get_running_loop().time()
        sample = await self._sample(source.index)
        tokens, seconds = 0, 0.0
        live = [hit["_source"] for hit in sample if not hit["_source"].get(fields.DELETED)]
        if live and reembeds:
            counted = [
                chunking.estimate_tokens(chunking.stored_text(one, chunk))
                for one in live
                for chunk in one.get(fields.CHUNKS, ())
            ]
            tokens = round(sum(counted) / len(live) * (total - tombstones))
        if sample:
            # What a page costs to read and to make ready; to index it takes about as long again. A few documents tell
            # how quick the model is.
            tried = sample[:8] if reembeds else sample
            await self._carrier.convert(lane, tried)
            self._carrier.failures.clear()
            seconds = (asyncio.get_running_loop().time() - begun) / len(tried) * total * 2
        return Plan(
            collection=self._name,
            source=source.index,
            goal=goal,
            changes=await self._differences(source, goal),
            documents=total - tombstones,
            tombstones=tombstones,
            chunks=chunks,
            store_bytes=int(stats["_all"]["total"]["store"]["size_in_bytes"]),
            reembeds=reembeds,
            tokens=tokens,
            seconds=seconds,
        )

    async def status(self) -> tuple[State | None, Standing]:
        """Return what is written down of the last reindex, and where the aliases lead.

        What is left of an earlier collection of that name, which was deleted, counts as nothing.
        """
        return await self._loaded(self._ledger())

    async def trial(self, changes: Changes, limit: int) -> dict[str, str]:
        """Copy the first `limit` documents into a new index and delete that again; return what it refused, and why.

        Nothing is swapped and no state is written. Raises Conflict while a reindex is under way, and NotFound.
        """
        state, standing = await self.status()
        if (state is not None and state.under_way) or standing.filling is not None:
            raise Conflict(f"a reindex of `{self._name}` is under way", remedy="end it first: see --status")
        source = await self._describe((await self._standing()).live or "")
        goal = await self._goal(source, changes)
        made = State(
            collection=self._name,
            phase="copying",
            owner="trial",
            source=source.index,
            target=await self._free_name(),
        )
        await self._carrier.refresh(source.index)
        try:
            await self._ensure_target(made, goal)
            lane = await self._lane(source.index, made.target, rechunk=goal.rechunk)
            done = 0
            async with contextlib.aclosing(self._carrier.pages(source.index, whole=True)) as pages:
                async for hits in pages:
                    part = hits[: limit - done]
                    await self._carrier.put(lane, part, moves.copy_alias(self._name))
                    done += len(part)
                    self._tell("trying", done, limit)
                    await self._pace(len(part))
                    if done >= limit:
                        break
        except BaseException:
            # A Ctrl-C must not leave it; one that a kill leaves is removed by the next reindex.
            with contextlib.suppress(HalflifeError):
                await asyncio.shield(asyncio.ensure_future(self._delete(made.target)))
            raise
        await asyncio.shield(asyncio.ensure_future(self._delete(made.target)))
        return dict(self._carrier.failures)

    # --- doing it

    async def run(self, changes: Changes | None, *, allow_missing: int = 0) -> Outcome:
        """Begin the reindex, or go on with the one under way, up to the swap.

        `changes` None: only go on. Raises InvalidRequest if one with other changes is under way, Conflict if one
        waits to be finished or rolled back, Mismatch if more documents than `allow_missing` can't be brought over,
        Taken and moves.Paused at another process' word; then everything so far is kept.
        """
        ledger = self._ledger()
        standing = await self._standing()
        state, _ = await self._loaded(ledger)
        if state is not None and state.phase == "copying":
            if changes is not None and asdict(await self._goal_now(state, changes)) != state.wanted:
                raise InvalidRequest(
                    f"a reindex of `{self._name}` with other changes is under way",
                    remedy="run it without options to go on with it, or end it with --abort",
                )
            await self._make_sure_of_silence(ledger)
            await ledger.take()
        elif state is not None and state.under_way:
            returning = state.phase == "returning"
            raise Conflict(
                f"`{self._name}` was {'being rolled back' if returning else 'reindexed'} and its other index is still there",
                remedy=_ROLLING_BACK if returning else "end it with --finish, or undo it with --rollback",
            )
        elif changes is None:
            raise NotFound(
                f"no reindex of `{self._name}` is under way",
                remedy=f"begin one: `halflife reindex {self._name}` with what is to change",
            )
        else:
            await self._begin(ledger, standing, changes)
        async with self._working(ledger):
            await self._move(ledger, allow_missing)
        return Outcome(ledger.state, dict(self._carrier.failures))

    async def _begin(self, ledger: Ledger, standing: Standing, changes: Changes) -> None:
        source = await self._describe(standing.live or "")
        goal = await self._goal(source, changes)
        if standing.filling is not None:
            # Left by one that was aborted while it was being made: only an index of ours carries that alias.
            left = standing.filling
            await self._again(lambda: moves.give_up_filling(self._cluster, self._name, left))
            if names.collection_of(left) == self._name and left not in standing.in_use:
                await self._delete(left, kept=source.index)
        await ledger.begin(
            State(
                collection=self._name,
                phase="copying",
                owner=ledger.owner,
                source=source.index,
                target=await self._free_name(),
                wanted=asdict(goal),
                started_at=ledger.stamp(),
            )
        )
        purge = Ledger(self._cluster, self._name, owner=ledger.owner, now=self._now, kind="purge")
        if (found := await purge.load()) is not None and found.under_way and not await purge.silent():
            await ledger.save(phase="aborted")
            raise Conflict(f"tombstones of `{self._name}` are being purged", remedy="begin when that is over")

    async def _move(self, ledger: Ledger, allow_missing: int) -> None:
        """Go from wherever the state and the aliases are to a swapped collection."""
        state = ledger.state
        goal = Goal(**state.wanted)
        standing = await self._look()
        if standing.live != state.target:
            await self._ensure_target(state, goal)
            lane = await self._lane(state.source, state.target, rechunk=goal.rechunk)
            if standing.fenced == state.source:
                await self._lift(standing.generation, state.source)
            await self._first_copy(ledger, lane)
            await self._restore_settings(state.target, goal, like=state.source)
            await self._turn(ledger, lane, allow_missing)
        elif not await self._is_there(state.source):
            await ledger.save(phase="finished")  # somebody has deleted it
            return
        else:
            lane = await self._lane(state.source, state.target, rechunk=goal.rechunk)
        await self._sweep(ledger, lane)
        await ledger.save(phase="swapped", missing=len(self._carrier.failures))

    async def roll_back(self) -> Outcome:
        """Bring what was written since the swap back into the old index, make that live again, delete the new one.

        May be called again after it was interrupted. Raises Conflict if there is nothing to roll back, or nothing to go
        back to.
        """
        ledger = self._ledger()
        state, _ = await self._loaded(ledger)
        if state is None or state.phase not in ("swapped", "finishing", "returning"):
            raise Conflict(
                f"`{self._name}` has no reindex to roll back",
                remedy="one that has not been swapped is ended with --abort; one that was finished can't be undone",
            )
        if state.phase != "swapped":
            await self._make_sure_of_silence(ledger)
        await ledger.take(phase="returning")
        async with self._working(ledger):
            if (await self._look()).live == state.target:
                await self._permit(ledger, state.source, live=state.target)
                back = await self._lane(state.target, state.source, rechunk=False)
                await self._turn(ledger, back, 0)
            # It is gone where an earlier try was ended after the deletion.
            if await self._is_there(state.target):
                back = await self._lane(state.target, state.source, rechunk=False)
                await self._sweep(ledger, back)
                await self._drop(ledger, back)
            await ledger.save(phase="rolled-back")
        return Outcome(ledger.state, dict(self._carrier.failures))

    async def finish(self) -> State:
        """Delete the old index, having made sure once more that nothing in it is ahead. Raises Conflict if there is none.

        May be called again after it was interrupted, and where somebody has deleted that index.
        """
        ledger = self._ledger()
        state, _ = await self._loaded(ledger)
        if state is None or state.phase not in ("swapped", "finishing"):
            raise Conflict(
                f"`{self._name}` has no reindex that waits to be finished",
                remedy=_ROLLING_BACK if state is not None and state.phase == "returning" else "see --status",
            )
        if state.phase == "finishing":
            await self._make_sure_of_silence(ledger)
        await ledger.take(phase="finishing")
        async with self._working(ledger):
            if await self._is_there(state.source):
                lane = await self._lane(state.source, state.target, rechunk=bool(state.wanted.get("rechunk")))
                await self._drop(ledger, lane)
            await ledger.save(phase="finished")
        return ledger.state

    async def abort(self) -> State:
        """End a reindex that has not been swapped, whoever works on it, and delete its new index.

        A rollback under way is given up instead: the collection stays with the new index. Raises Conflict if there is
        nothing to abort, or if the swap was quicker.
        """
        ledger, state = await self._taken_to_abort()
        copying_ = state.phase == "copying"
        filled, kept = (state.target, state.source) if copying_ else (state.source, state.target)
        await self._again(lambda: moves.give_up_filling(self._cluster, self._name, filled))
        standing = await self._look()
        if standing.live == filled:
            raise Conflict(
                f"`{self._name}` has been swapped already",
                remedy="run the same command again to bring it to its end, then use --rollback"
                if copying_
                else "run --rollback again to bring it to its end",
            )
        if standing.fenced == kept:
            await self._lift(standing.generation, kept)
        if copying_:
            await self._delete(filled, kept=kept)
            await ledger.save(phase="aborted")
        elif await self._is_there(filled):
            await self._set_aside(ledger, filled)
            await ledger.save(phase="swapped")
        else:
            await ledger.save(phase="finished")
        return ledger.state

    async def _taken_to_abort(self) -> tuple[Ledger, State]:
        """Become the owner of what may be aborted, and return it. Raises Conflict if there is nothing to abort."""
        for tries_left in reversed(range(TAKES)):
            ledger = self._ledger()  # one that was not the quicker is no good any more
            state, _ = await self._loaded(ledger)
            if state is None or state.phase not in ("copying", "returning"):
                raise Conflict(
                    f"`{self._name}` has no reindex to abort",
                    remedy="one that has been swapped is undone with --rollback",
                )
            try:
                await ledger.take()
            except Taken:
                # Who works on it has written meanwhile, a heartbeat most likely: that doesn't end the wish to abort.
                if not tries_left:
                    raise
            else:
                return ledger, state
        raise AssertionError("unreachable")

    async def pause(self) -> State:
        """Ask whoever works on it to stop; running it again goes on. Raises Conflict if nothing is under way."""
        ledger = self._ledger()
        state, _ = await self._loaded(ledger)
        if state is not None and state.phase in _PAUSABLE:
            state = await ledger.ask_to_pause()
        if state is None or state.phase not in _PAUSABLE:
            raise Conflict(f"no reindex of `{self._name}` is under way", remedy="see --status")
        return state

    # --- the steps

    async def _ensure_target(self, state: State, goal: Goal) -> None:
        """Create the new index with the permit to fill it, unless it is there; refuse if someone took that away."""
        body = catalog.index_body(
            self._name,
            goal.options(),
            dims=goal.dims,
            model=goal.model,
            slot_aliases={moves.copy_alias(self._name): {}},
            uid=(await self._describe(state.source)).uid,
        )
        body.setdefault("settings", {}).setdefault("index", {}).update(
            number_of_replicas=0, auto_expand_replicas="false", refresh_interval="-1"
        )

        async def create() -> None:
            with contextlib.suppress(Conflict):
                await self._cluster.create_index(state.target, body)

        await self._again(create)
        if (await self._look()).filling != state.target:
            raise Taken(
                f"the index {state.target} may no longer be filled: the reindex was aborted or swapped",
                remedy="see --status",
            )
        await catalog.read_index(
            self._cluster, self._name, state.target
        )  # raises where it is not what it should be

    async def _first_copy(self, ledger: Ledger, lane: Lane) -> None:
        if ledger.state.copied:
            return
        if not ledger.state.base:
            await ledger.save(
                base=await self._checkpoints(lane.source.index),
                total=await self._again(lambda: self._cluster.count(lane.source.index)),
            )
        await self._carrier.refresh(lane.source.index)
        done = ledger.state.done
        async for hits in self._carrier.pages(lane.source.index, after=ledger.state.after, whole=True):
            ledger.check()
            await self._carrier.put(lane, hits, moves.copy_alias(self._name))
            done += len(hits)
            # The heartbeat writes it down; what it misses is copied again.
            ledger.note(after=hits[-1]["_id"], done=done)
            self._tell("copying", done, max(done, ledger.state.total))
            await self._pace(len(hits))
        await ledger.save(copied=True, after=None, done=done)

    async def _changes_since(self, ledger: Ledger, lane: Lane, via: str, *, keep: bool = True) -> int:
        """Copy what came after `base`, and note how far that was; return how many documents it were."""
        base = ledger.state.base
        reached = await self._checkpoints(lane.source.index)
        await self._carrier.refresh(lane.source.index)
        copied = 0
        for shard in reached:
            query = {"range": {"_seq_no": {"gt": base.get(shard, -1)}}}
            async for hits in self._carrier.pages(
                lane.source.index, query=query, shard=int(shard), whole=True
            ):
                ledger.check()
                await self._carrier.put(lane, hits, via)
                copied += len(hits)
                # Not held back by the rate: it must be quicker than the writers, or it never ends.
                self._tell("catching up", copied, copied)
        if keep:
            ledger.note(base=reached)
        return copied

    async def _restore_settings(self, index: str, goal: Goal, *, like: str) -> None:
        """Give the new index its refresh and replicas, and wait until it is as healthy as the old one."""
        [old] = (await self._again(lambda: self._cluster.get_settings(like))).values()
        template = (await self._again(lambda: self._cluster.simulate_index(index)))["settings"]["index"]
        settings: Json = {
            "index.refresh_interval": old.get("index.refresh_interval", template.get("refresh_interval"))
        }
        if goal.replicas is not None:
            settings["index.auto_expand_replicas"] = "false"
            settings["index.number_of_replicas"] = goal.replicas
        else:
            settings["index.auto_expand_replicas"] = template.get("auto_expand_replicas", "false")
            settings["index.number_of_replicas"] = template.get("number_of_replicas", 1)
        await self._again(lambda: self._cluster.put_settings(index, settings))
        self._restored = {key: old.get(key) for key in CHANGEABLE}
        self._tell("waiting for replicas", 0, 0)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while True:
            health = await self._again(
                lambda: self._cluster.health(index, wait_for_status="green", timeout_s=5)
            )
            if health["status"] == "green":
                return
            if health["status"] == "yellow" and loop.time() > until - self._patience_s + 10:
                before = await self._again(lambda: self._cluster.health(like, timeout_s=5))
                if before["status"] != "green":
                    return
            if loop.time() > until:
                raise ClusterUnavailable(
                    f"the new index {index} is {health['status']}: not all its copies are in place",
                    remedy="see GET /_cluster/allocation/explain, then run the same command again",
                )

    async def _turn(self, ledger: Ledger, lane: Lane, allow_missing: int) -> None:
        """Catch up, compare, fence and swap; again with more rounds if the last changes took too long."""
        via = moves.copy_alias(self._name)
        if lane.target.index == ledger.state.source and ledger.state.phase == "returning":
            ledger.note(base=dict(ledger.state.turned))
        busy: Unavailable | None = None
        for attempt in range(FENCES):
            for _ in range(ROUNDS):
                begun = asyncio.get_running_loop().time()
                copied = await self._changes_since(ledger, lane, via)
                took_s = asyncio.get_running_loop().time() - begun
                if copied <= SHORT_ROUND and took_s < moves.FENCE_TIMEOUT_S / 3:
                    break
            if attempt == 0:
                await self._compare(lane, via, ledger)
                self._carrier.refuse_missing(
                    allow_missing, remedy=_MISSING_BACK if ledger.state.phase == "returning" else _MISSING
                )
            async with contextlib.AsyncExitStack() as held:
                try:
                    # Nobody else changes what the collection's mapping says until the two are exchanged.
                    turn = await held.enter_async_context(turns.turn(self._cluster, self._name))
                except Unavailable as error:
                    busy = error
                    continue
                busy = None
                if await self._exchange(turn, ledger, lane, via, allow_missing):
                    return
        if busy is not None:
            raise busy
        raise Conflict(
            f"`{self._name}` is written to faster than its changes can be brought over",
            remedy="try again when fewer writes come, or with a faster embedding server; nothing was swapped",
        )

    async def _exchange(self, turn: Turn, ledger: Ledger, lane: Lane, via: str, allow_missing: int) -> bool:
        """Fence the source, bring its last changes over, swap, in a turn; False if that could not be done in time."""
        source, target = lane.source.index, lane.target.index
        standing = await self._look()
        if standing.live == target:
            return True
        if standing.written != source or standing.live != source:
            if standing.fenced == source:
                await self._lift(standing.generation, source)
                return False
            raise Taken(f"`{self._name}` is no longer in {source}", remedy="see --status")
        self._tell("fencing", 0, 0)
        written = standing.generation
        generation = written + 1
        try:
            try:
                await self._carry_settings(turn, source, target)
                async with asyncio.timeout(moves.FENCE_TIMEOUT_S):
                    await moves.fence(self._cluster, self._name, index=source, generation=written)
                    await self._changes_since(ledger, lane, via)
                    await self._carrier.refresh(target)
                    await self._carrier.check_counts(
                        lane, allow_missing=allow_missing, spare=_left_behind(ledger.state)
                    )
                    # As late as can be: profiles and synonyms may have changed while documents were copied.
                    await catalog.carry_options(self._cluster, turn, source=source, target=target)
                    await ledger.save(
                        **(
                            {}
                            if ledger.state.phase == "returning"
                            else {"turned": await self._checkpoints(target)}
                        )
                    )
                    ledger.check()
                await moves.swap(
                    self._cluster,
                    self._name,
                    source=source,
                    target=target,
                    generation=generation,
                    read_properties=catalog.read_alias_properties(),
                    timeout_s=turn.call_s(),
                )
            except (TimeoutError, Unavailable, NotFound) as error:
                # What became of the last call is not known; the aliases are.
                if (await self._look()).live == target:
                    return True
                if isinstance(error, NotFound) and (await self._look()).filling != target:
                    raise Taken(
                        f"the reindex of `{self._name}` was aborted by another process", remedy="see --status"
                    ) from error
                return False
        finally:
            # Whatever ends this, a Ctrl-C too: writers must not stay outside. Does nothing after the swap.
            await asyncio.shield(asyncio.ensure_future(self._let_in(source)))
        return True

    async def _carry_settings(self, turn: Turn, source: str, target: str) -> None:
        """Give the target what was changed in the source's settings since it was given them."""
        if self._restored is None:
            return
        [found] = (await self._cluster.get_settings(source)).values()
        now = {key: found.get(key) for key in CHANGEABLE}
        if changed := {key: value for key, value in now.items() if value != self._restored[key]}:
            await self._cluster.put_settings(target, changed, timeout_s=turn.call_s())
            self._restored = now

    async def _let_in(self, source: str) -> None:
        """Give the source back to writers, unless it was swapped. Raises nothing: how the exchange ended is told instead.

        Where this fails, the next exchange does it, or a writer.
        """
        with contextlib.suppress(HalflifeError):
            standing = await self._look()
            if standing.fenced == source:
                await self._lift(standing.generation, source)
            elif standing.written == source:
                # The fence was lifted before its block arrived.
                await self._again(lambda: self._cluster.clear_write_block(source))

    async def _sweep(self, ledger: Ledger, lane: Lane) -> None:
        """Bring over what a straggler put into the source after the last look; the source stays blocked."""
        source = lane.source.index
        await ledger.save()  # raises Taken where another has gone on from here, perhaps back to the source
        await self._set_aside(ledger, source)
        for pause_s in (0.2, 0.5, 1.0, 2.0, 4.0):
            standing = await self._look()
            if standing.live != lane.target.index:
                return
            try:
                via = names.write_alias(self._name, standing.generation, "a")
                await self._changes_since(ledger, lane, via, keep=False)
            except Taken:
                ledger.check()
                # A node that has not heard of the swap yet does not know the new alias.
                await asyncio.sleep(pause_s)
            else:
                return
        raise ClusterUnavailable(
            "looking for stragglers: the new index takes no writes", remedy="run the same command again"
        )

    async def _set_aside(self, ledger: Ledger, index: str) -> None:
        """Block an index that is no longer in use. Raises Taken, and leaves it open, where another has it in use again."""
        if index not in (await self._look()).in_use:
            await self._again(lambda: self._cluster.add_write_block(index))
        seen = await self._look()
        if index in seen.in_use:
            if seen.written == index:
                # A block has no conditions, so this one may have come late.
                await self._again(lambda: self._cluster.clear_write_block(index))
            ledger.check()
            raise Taken(
                f"{index} is in use: another process has swapped `{self._name}`", remedy="see --status"
            )

    async def _permit(self, ledger: Ledger, index: str, *, live: str) -> None:
        """Let the index that was kept be filled again; raise Conflict, the reindex being finished, if it is gone."""
        # In a turn, so that a fence which stands is nobody's any more.
        async with turns.turn(self._cluster, self._name):
            for _ in range(FENCES):
                if not await self._is_there(index):
                    await ledger.save(phase="finished")
                    raise Conflict(
                        f"{index}, which `{self._name}` was to go back to, is gone",
                        remedy=f"the collection stays with {live}, and a new reindex may begin",
                    )
                standing = await self._look()
                if standing.live != live:
                    return
                if standing.fenced == live:
                    await self._lift(standing.generation, live)
                    continue
                if standing.written != live:
                    raise Taken(f"`{self._name}` is no longer written to {live}", remedy="see --status")
                with contextlib.suppress(NotFound):
                    await self._again(partial(self._cluster.clear_write_block, index))
                    if standing.filling == index:
                        return
                    await self._again(
                        partial(moves.permit_filling, self._cluster, self._name, index, seen=standing)
                    )
                    return
        raise _unsettled(self._name)

    async def _drop(self, ledger: Ledger, lane: Lane) -> None:
        """Delete the source of a finished move, having made sure that nothing in it is ahead of the live index."""
        source, target = lane.source.index, lane.target.index
        standing = await self._look()
        if standing.live != target or source in standing.in_use:
            raise Mismatch(f"{source} is in use: the collection is read from {standing.live}")
        for pause_s in (0.2, 0.5, 1.0, 2.0, 4.0):
            via = names.write_alias(self._name, standing.generation, "a")
            try:
                await self._compare(lane, via, ledger, target_moves=True)
            except Taken:
                # Not another process, perhaps, but a new generation of the write alias.
                ledger.check()
                await asyncio.sleep(pause_s)
                standing = await self._look()
            else:
                break
        else:
            raise _unsettled(self._name)
        self._carrier.refuse_missing(ledger.state.missing, remedy=_MISSING_LAST)
        await self._delete(source, kept=target, ledger=ledger)

    async def _delete(self, index: str, *, kept: str | None = None, ledger: Ledger | None = None) -> None:
        """Delete an index that is not in use, by a decision that fails if the aliases change after the look.

        `kept` must be live then, and the `ledger` still ours. Raises Taken if the index is in use or is to be used again.
        """
        for _ in range(FENCES):
            seen = await self._look()
            if (
                index in seen.in_use
                or (kept is not None and seen.live != kept)
                or (ledger is not None and seen.filling == index)
            ):
                raise Taken(
                    f"{index} is not deleted: by now `{self._name}` is read from {seen.live}",
                    remedy="another process has changed it: see --status",
                )
            if ledger is not None:
                await ledger.save()
                ledger.check()
            try:
                await self._again(partial(moves.discard, self._cluster, self._name, index, seen=seen))
            except NotFound:
                # Gone by an earlier try whose answer was lost, or not deleted, since the aliases have changed.
                if not await self._is_there(index):
                    return
            else:
                return
        raise _unsettled(self._name)

    async def _is_there(self, index: str) -> bool:
        return index in await self._again(lambda: self._cluster.resolve_index(index))

    async def _free_name(self) -> str:
        """Return a name for a new index that no index has."""
        taken = await self._again(lambda: self._cluster.resolve_index(names.index_pattern(self._name)))
        moment = self._now()
        while (name := names.index_name(self._name, moment)) in taken:
            moment += timedelta(seconds=1)
        return name

    async def _compare(self, lane: Lane, via: str, ledger: Ledger, *, target_moves: bool = False) -> None:
        await self._carrier.compare(
            lane,
            via,
            check=ledger.check,
            spare=_left_behind(ledger.state),
            target_moves=target_moves,
        )

    async def _sample(self, index: str) -> list[Hit]:
        body = {
            "size": SAMPLE,
            "query": {"bool": {"must_not": [{"term": {fields.DELETED: True}}]}},
            "version": True,
            "_source": {"exclude_vectors": False},
        }
        answer = await self._cluster.search(index, body, timeout_s=self._cluster.request_timeout_s)
        return list(answer["hits"]["hits"])

    # --- small change

    def _ledger(self) -> Ledger:
        return Ledger(
            self._cluster, self._name, owner=secrets.token_hex(8), now=self._now, budget_s=self._patience_s
        )

    async def _loaded(self, ledger: Ledger) -> tuple[State | None, Standing]:
        """Return what is written down, None if that was of another collection of this name, and the aliases."""
        state = await ledger.load()
        standing = await self._look()
        return (state if state is not None and state.concerns(standing) else None), standing

    @contextlib.asynccontextmanager
    async def _working(self, ledger: Ledger) -> AsyncIterator[None]:
        """Show others that this process works on it; where an index is gone that was needed, look who has it now."""
        async with ledger.heartbeat():
            try:
                yield
            except NotFound:
                await ledger.save()  # raises Taken, which says more
                raise

    async def _make_sure_of_silence(self, ledger: Ledger) -> None:
        if not await ledger.silent():
            raise Conflict(
                f"another process works on the reindex of `{self._name}`",
                remedy="see --status; stop it with --pause, or end the reindex with --abort",
            )

    async def _again(self, do: Callable[[], Awaitable[T]]) -> T:
        return await patiently(do, budget_s=self._patience_s, cluster=self._cluster)

    async def _look(self) -> Standing:
        return await self._again(lambda: moves.standing(self._cluster, self._name))

    async def _standing(self) -> Standing:
        found = await self._look()
        if found.live is None:
            raise NotFound(
                f"there is no collection `{self._name}`",
                remedy=f"create it with PUT /v1/collections/{self._name}",
            )
        return found

    async def _lift(self, generation: int, index: str) -> None:
        await self._again(lambda: moves.lift(self._cluster, self._name, index=index, generation=generation))

    async def _checkpoints(self, index: str) -> dict[str, int]:
        found = await self._again(lambda: self._cluster.checkpoints(index))
        return {str(shard): number for shard, number in sorted(found.items())}

    async def _lane(self, source: str, target: str, *, rechunk: bool) -> Lane:
        return Lane(await self._describe(source), await self._describe(target), rechunk)

    async def _describe(self, index: str) -> Collection:
        """Return what an index' mapping says, also where it is too old for this service's checks."""
        mapping = (await self._again(lambda: self._cluster.get_mapping(index)))[index]
        meta = mapping.get("_meta", {}).get("halflife", {})
        try:
            embedding = mapping["properties"][fields.CHUNKS]["properties"]["embedding"]
            return Collection(
                name=self._name,
                index=index,
                uid=meta.get("uid"),
                dims=embedding["dims"],
                similarity=embedding.get("similarity", "cosine"),
                declared=meta.get("declared", {}),
                model=meta.get("model"),
                template_version=meta["template_version"],
            )
        except KeyError as cause:
            raise SchemaMismatch(
                f"the index {index} was not made by Halflife: its mapping lacks {cause}",
                remedy="bring it in with `halflife reindex <collection> --from-index <index>`",
            ) from cause

    async def _goal(self, source: Collection, changes: Changes) -> Goal:
        [settings] = (await self._again(lambda: self._cluster.get_settings(source.index))).values()
        declared = {
            name: kind
            for name, kind in {**source.declared, **changes.declare}.items()
            if name not in changes.undeclare
        }
        replicas = changes.replicas
        if replicas is None and settings.get("index.auto_expand_replicas", "false") == "false":
            replicas = int(settings.get("index.number_of_replicas", 1))
        goal = Goal(
            declared=dict(sorted(declared.items())),
            similarity=changes.similarity or source.similarity,
            dims=changes.dims or source.dims,
            model=changes.model or source.model,
            shards=changes.shards or int(settings["index.number_of_shards"]),
            replicas=replicas,
            rechunk=changes.rechunk,
        )
        if goal.dims != source.dims and goal.model == source.model and not changes.model:
            raise InvalidRequest(
                "other dims need another model or a re-embedding", remedy="give --reembed too"
            )
        return goal

    async def _goal_now(self, state: State, changes: Changes) -> Goal:
        return await self._goal(await self._describe(state.source), changes)

    async def _differences(self, source: Collection, goal: Goal) -> list[str]:
        """Say in words what will be different."""
        told: list[str] = []
        [settings] = (await self._cluster.get_settings(source.index)).values()
        for name in sorted({*source.declared, *goal.declared}):
            before, after = source.declared.get(name), goal.declared.get(name)
            if before != after:
                told.append(f"declared field {name}: {before or 'none'} → {after or 'none'}")
        pairs: list[tuple[str, Any, Any]] = [
            ("model", source.model, goal.model),
            ("dims", source.dims, goal.dims),
            ("similarity", source.similarity, goal.similarity),
            ("shards", int(settings["index.number_of_shards"]), goal.shards),
        ]
        told += [f"{word}: {before} → {after}" for word, before, after in pairs if before != after]
        if goal.replicas is not None and (
            settings.get("index.auto_expand_replicas", "false") != "false"
            or int(settings.get("index.number_of_replicas", 1)) != goal.replicas
        ):
            told.append(f"replicas: {settings.get('index.number_of_replicas')} → {goal.replicas}")
        if goal.rechunk:
            told.append("chunks: texts are cut anew")
        mapping = (await self._cluster.get_mapping(source.index))[source.index]
        shipped = catalog.shipped(catalog.MAPPINGS)["template"]
        changed = sorted(_changed(shipped["mappings"]["properties"], mapping.get("properties", {}), ""))
        if changed:
            told.append(f"mapping: {', '.join(changed)}")
        version = shipped["mappings"]["_meta"]["halflife"]["template_version"]
        if version != source.template_version:
            told.append(f"template version: {source.template_version} → {version}")
        return told

    async def _pace(self, documents_: int) -> None:
        """Keep to the rate asked for."""
        if self._rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._paced_until = max(now, self._paced_until) + documents_ / self._rate
        await asyncio.sleep(max(0.0, self._paced_until - now))

    def _tell(self, step: str, done: int, total: int) -> None:
        self._report(Progress(step, done, total))


# --- pure parts ------------------------------------------------------------------------------------------------------

_PAUSABLE: Final[frozenset[Phase]] = frozenset({"copying", "finishing", "returning"})
_MISSING: Final = (
    "correct them and run it again, leave them behind with --allow-missing N, or end it with --abort (until then purge and "
    "a reindex with other changes are refused); nothing was swapped"
)
_MISSING_BACK: Final = (
    "correct them and run --rollback again, or stay with the new index with --abort; nothing was swapped"
)
_MISSING_LAST: Final = "correct them and run --finish again, or go back with --rollback; nothing was deleted"
_ROLLING_BACK: Final = "run --rollback again to go on with it, or --abort to stay with the new index"


def _shaped(source: Collection, goal: Goal, index: str) -> Collection:
    return source.model_copy(
        update={"index": index, "dims": goal.dims, "model": goal.model, "declared": goal.declared, "similarity": goal.similarity}
    )  # fmt: skip


def _left_behind(state: State) -> int:
    """Return how many documents the old index may hold that the new one was allowed to lack."""
    return state.missing if state.phase == "returning" else 0


def _unsettled(name: str) -> ClusterUnavailable:
    return ClusterUnavailable(
        f"the aliases of `{name}` keep changing", remedy="run the same command again", retry_after_s=1
    )


def _changed(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of fields whose shipped mapping is not what the index has; vectors and declared fields are told
    elsewhere.
    """
    for name, body in wanted.items():
        full = f"{path}{name}"
        has = found.get(name)
        if has is None:
            yield full
            continue
        if full in (fields.EMBEDDING, fields.DECLARED):
            continue
        # Elasticsearch leaves out what is its default anyway.
        if any(
            str(has.get(key)) != str(value)
            for key, value in body.items()
            if key in has or key in ("analyzer", "search_analyzer")
            if key not in ("properties", "fields")
        ):
            yield full
        for key in ("properties", "fields"):
            yield from _changed(body.get(key, {}), has.get(key, {}), f"{full}.")
