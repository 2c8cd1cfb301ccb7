"""Own `./scripts/chaos`: writers, readers and reindexes on real nodes while things are killed, and the count of what
was lost.

Each writer is a process that runs the service's own write path with a clock of its own that is wrong; it logs what it
is about to ask for and what was acknowledged. Everything that is drawn by lot comes from the seed, though not the
moment at which an operating system runs a process. The oracle reads only those logs and the cluster: every stored
version is at least the highest acknowledged one and has its content, and nothing deleted and acknowledged is back.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app import catalog, copying, moves, names
from app.catalog import Catalog
from app.elastic import BulkAction, Cluster, encode
from app.embedding import Embedded
from app.errors import EmbedderUnavailable, HalflifeError
from app.indexing import Chunking, Indexer
from app.models import Collection, CollectionOptions
from app.reindex import Changes, Reindexer
from app.targets import CatalogTargets
from app.writes import Patience, Stamper
from scripts.distribution import ensure_installed
from scripts.node import LocalCluster, LocalNode
from scripts.stack import end_with_stdin

COLLECTION = "chaos"
DIMS = {"hash-8": 8, "hash-12": 12}
PINNED = 60
"""Documents that are rewritten and never deleted: readers must always find all of them."""
FREE = 240
CLIENTS = 3
SKEW_US = 2_000_000
CALM_S = 7.0
"""How long after a fault has ended its errors may still arrive: an open breaker's probe may be one that still hangs."""
QUICK_DETECTION = {
    "cluster.fault_detection.follower_check.timeout": "2s",
    "cluster.fault_detection.follower_check.retry_count": 2,
    "cluster.fault_detection.leader_check.timeout": "2s",
    "cluster.fault_detection.leader_check.retry_count": 2,
}

Say = Callable[[str], None]


class HashEmbedder:
    """Makes a vector out of a text's digest; fails while the file `outage` is there."""

    def __init__(self, dims: int, outage: Path) -> None:
        self._dims = dims
        self._outage = outage

    async def embed_documents(self, texts: Sequence[str], *, deadline_s: float | None = None) -> Embedded:
        """Return one unit vector per text."""
        if self._outage.exists():
            await asyncio.sleep(0.05)
            raise EmbedderUnavailable("the embedding server is down, as the chaos run wants it")
        vectors: list[np.ndarray | None] = []
        for text in texts:
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            vector = np.random.default_rng(seed).standard_normal(self._dims)
            vectors.append((vector / np.linalg.norm(vector)).astype(np.float32))
        return Embedded(vectors, {}, frozenset())


@dataclass(frozen=True)
class Place:
    """Where a run happens; every process of it is told this."""

    urls: list[str]
    folder: Path

    @property
    def outage(self) -> Path:
        return self.folder / "embedder-is-down"

    def embedder(self, collection: Collection) -> HashEmbedder:
        return HashEmbedder(collection.dims, self.outage)

    def to_json(self) -> str:
        return json.dumps({"urls": self.urls, "folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> "Place":
        given = json.loads(text)
        return cls(given["urls"], Path(given["folder"]))

    @contextlib.asynccontextmanager
    async def cluster(self, timeout_s: float = 5.0) -> AsyncIterator[Cluster]:
        cluster = Cluster.connect(urls=self.urls, request_timeout_s=timeout_s)
        try:
            await copying.patiently(cluster.check_version, budget_s=60)
            yield cluster
        finally:
            await cluster.close()


# ---- a writer's process -----------------------------------------------------------------------------------------------


async def write(place: Place, worker: int, seed: int) -> None:
    """Write, patch and delete until SIGTERM; log each request before it is sent, and each acknowledgement."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
    skew = rng.randrange(-SKEW_US, SKEW_US)
    async with place.cluster(3.0) as cluster:
        known = Catalog(cluster)
        indexer = Indexer(
            cluster=cluster,
            targets=lambda name: CatalogTargets(
                name, cluster=cluster, catalog=known, embedder=place.embedder
            ),
            stamper=Stamper(worker, lambda: time.time_ns() // 1000 + skew),
            now=lambda: datetime.now(UTC),
            chunks=Chunking(max_tokens=40, overlap_tokens=0),
            patience=Patience(budget_s=20, request_timeout_s=3),
        )
        with (place.folder / f"log-{worker}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:

            def note(**entry: Any) -> None:
                # The kernel has it when this returns, so that a kill of this process loses no line.
                log.write(json.dumps(entry) + "\n")
                log.flush()

            await asyncio.gather(
                *(
                    _client(
                        indexer,
                        known,
                        note,
                        stop,
                        random.Random(seed * 31 + n),  # noqa: S311 - repeatable, no secret
                        f"{worker}.{os.getpid()}.{n}",
                    )
                    for n in range(CLIENTS)
                )
            )


async def _client(
    indexer: Indexer,
    known: Catalog,
    note: Callable[..., None],
    stop: asyncio.Event,
    rng: random.Random,
    who: str,
) -> None:
    serial = 0
    while not stop.is_set():
        serial += 1
        kind = rng.choices(["upsert", "revise", "delete", "patch"], [45, 15, 28, 12])[0]
        pool = [f"r{i}" for i in range(30)] if kind == "revise" else [f"d{i}" for i in range(FREE)]
        if kind in ("upsert", "patch"):
            pool += [f"p{i}" for i in range(PINNED)]
        elif kind == "delete":
            pool += [f"r{i}" for i in range(30)]
        ids = rng.sample(pool, rng.randint(1, 6))
        texts = {id_: None if kind == "delete" else f"{who} wrote {serial} of {id_}" for id_ in ids}
        note(t="try", kind=kind, who=who, n=serial, texts=texts)
        try:
            collection = (await known.get(COLLECTION)).collection
            if kind == "delete":
                result = await indexer.delete_ids(ids, collection=collection)
            elif kind == "patch":
                result = await indexer.patch(
                    [{"id": id_, "author": who} for id_ in ids], collection=collection
                )
            else:
                revision = (
                    {"revision": time.time_ns() // 1000 * 64 + rng.randrange(64)} if kind == "revise" else {}
                )
                items = [
                    {"id": id_, "text": text, "metadata": {"n": serial, "who": who}, **revision}
                    for id_, text in texts.items()
                ]
                result = await indexer.upsert(items, collection=collection)
        except HalflifeError as error:
            note(t="error", who=who, n=serial, code=error.code, at=time.time(), detail=error.detail[:200])
            await asyncio.sleep(0.1)
            continue
        for item in result.items:
            if item.status in ("created", "updated", "deleted"):
                note(t="ack", kind=kind, who=who, n=serial, id=item.id, v=item.version)
            elif item.status in ("failed", "invalid"):
                detail = item.error.detail[:200] if item.error else ""
                note(t="error", who=who, n=serial, code=item.status, at=time.time(), detail=detail)
        await asyncio.sleep(rng.uniform(0, 0.03))


# ---- the reindex' process -------------------------------------------------------------------------------------------


async def move(place: Place, action: str, changes: Mapping[str, Any], rate: float) -> None:
    """Run, roll back or finish a reindex; raises what it met."""
    async with place.cluster(5.0) as cluster:
        made = Reindexer(
            cluster,
            COLLECTION,
            embedder=place.embedder,
            now=lambda: datetime.now(UTC),
            rate=rate,
            patience_s=60,
        )
        state, _ = await made.status()
        match action:
            case "run" if state is not None and state.phase == "copying":
                await made.run(None)
            case "run" if state is None or state.phase != "swapped":
                await made.run(Changes(**changes))
            case "rollback" if state is not None and state.phase != "rolled-back":
                await made.roll_back()
            case "finish" if state is not None and state.phase != "finished":
                await made.finish()
            case "broken":
                await copy_then_swap(cluster, changes, rate)


async def copy_then_swap(cluster: Cluster, changes: Mapping[str, Any], rate: float) -> None:
    """The protocol that loses writes: copy what a point in time shows, then move the aliases. To try the oracle with."""
    known = await catalog.get(cluster, COLLECTION)
    old, new = known.collection.index, names.index_name(COLLECTION, datetime.now(UTC))
    options = CollectionOptions(shards=changes.get("shards") or 1)
    alias = moves.copy_alias(COLLECTION)
    body = catalog.index_body(
        COLLECTION,
        options,
        dims=known.collection.dims,
        model=known.collection.model,
        slot_aliases={alias: {}},
    )
    await cluster.create_index(new, body)
    await cluster.refresh(old)
    pit = await cluster.open_pit(old, keep_alive_s=120, timeout_s=10)
    after: list[Any] = []
    while True:
        query: dict[str, Any] = {
            "pit": {"id": pit, "keep_alive": "2m"}, "size": 32, "sort": [{"document_id": "asc"}], "version": True,
            "_source": {"exclude_vectors": False}, **({"search_after": after} if after else {}),
        }  # fmt: skip
        hits = (await cluster.search(None, query, timeout_s=10))["hits"]["hits"]
        if not hits:
            break
        actions = [BulkAction(alias, hit["_id"], hit["_version"], encode(hit["_source"])) for hit in hits]
        await cluster.bulk(actions, timeout_s=10)
        after = hits[-1]["sort"]
        await asyncio.sleep(len(hits) / rate)
    await cluster.close_pit(pit)
    await cluster.refresh(new)
    [target] = known.targets
    await cluster.update_aliases(
        [
            {"remove": {"index": old, "alias": target.alias}},
            {"remove": {"index": old, "alias": names.read_alias(COLLECTION)}},
            {"remove": {"index": new, "alias": alias}},
            {"add": {"index": new, "alias": names.read_alias(COLLECTION), **catalog.read_alias_properties()}},
            {"add": {"index": new, "alias": names.write_alias(COLLECTION, target.generation + 1)}},
        ]
    )


# ---- readers --------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the readers met."""

    reads: int = 0
    short: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    errors_in_faults: int = 0
    longest_pause_s: float = 0.0


async def read(place: Place, seen: Seen, in_fault: Callable[[], bool], stop: asyncio.Event) -> None:
    """Count the pinned documents over and over, through the read alias."""
    query = {"ids": {"values": [f"p{i}" for i in range(PINNED)]}}
    body = {"size": 0, "track_total_hits": True, "query": query}
    async with place.cluster(5.0) as cluster:
        last = time.monotonic()
        while not stop.is_set():
            try:
                answer = await cluster.search(names.read_alias(COLLECTION), body, timeout_s=3)
                if answer["_shards"]["failed"]:
                    raise HalflifeError("not every shard answered")
            except HalflifeError as error:
                if in_fault():
                    seen.errors_in_faults += 1
                else:
                    seen.errors.append(error.detail[:200])
            else:
                seen.reads += 1
                if (count := answer["hits"]["total"]["value"]) != PINNED:
                    seen.short.append(count)
                seen.longest_pause_s = max(seen.longest_pause_s, time.monotonic() - last)
                last = time.monotonic()
            await asyncio.sleep(0.05)


# ---- one run --------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What a run showed."""

    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    resurrected: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    invisible: list[str] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)
    faults: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    write_errors: Counter[str] = field(default_factory=Counter)
    write_errors_outside: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def sound(self) -> bool:
        """Tell whether nothing was lost, back, changed or missing, and readers met errors in faults only."""
        return not (
            self.lost
            or self.resurrected
            or self.changed
            or self.invisible
            or self.seen.short
            or self.seen.errors
        )

    def line(self) -> str:
        """Return the count as the last line of a run has it."""
        return (
            f"acknowledged={self.acknowledged} lost={len(self.lost)} resurrected={len(self.resurrected)} "
            f"changed={len(self.changed)}"
        )

    def figures(self) -> str:
        """Return what else was measured."""
        seen = self.seen
        return (
            f"{self.took_s:.0f} s, moves {dict(self.moves)}, faults {dict(self.faults)}, reads {seen.reads} "
            f"(short {len(seen.short)}, errors outside faults {len(seen.errors)}, within {seen.errors_in_faults}, "
            f"longest pause {seen.longest_pause_s:.1f} s), refused writes {dict(self.write_errors)} "
            f"(outside faults {len(self.write_errors_outside)}), not found by search {len(self.invisible)}"
        )


class Run:
    """One seed on one cluster."""

    def __init__(
        self,
        place: Place,
        nodes: Sequence[LocalNode],
        *,
        seed: int,
        say: Say,
        rounds: int = 2,
        faults: int = 3,
        writers: int = 2,
        broken: bool = False,
        rate: float = 60.0,
    ) -> None:
        """`rounds` reindexes with about so many `faults` each; `broken`: with the protocol that loses writes."""
        self._place = place
        self._nodes = list(nodes)
        self._rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
        self._seed = seed
        self._say = say
        self._rounds = rounds
        self._faults = faults
        self._writers: list[asyncio.subprocess.Process] = []
        self._wanted_writers = writers
        self._broken = broken
        self._rate = rate
        self._born = 0
        self._mover: asyncio.subprocess.Process | None = None
        self._in_fault = 0
        self._fault_ended = 0.0
        self._windows: list[tuple[float, float]] = []
        self.verdict = Verdict()

    async def run(self) -> Verdict:
        """Do it all and return what it showed."""
        begun = time.monotonic()
        stop = asyncio.Event()
        async with self._place.cluster(10.0) as cluster:
            await self._prepare(cluster)
            reader = asyncio.create_task(read(self._place, self.verdict.seen, self.in_fault, stop))
            try:
                for number in range(self._wanted_writers):
                    self._writers.append(await self._writer(number))
                await asyncio.sleep(1.0)
                for number in range(self._rounds):
                    await self._round(number)
                await asyncio.sleep(0.5)
                await self._end_writers()
            finally:
                stop.set()
                await asyncio.gather(reader, return_exceptions=True)
                for process in [*self._writers, *([self._mover] if self._mover else [])]:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
            await self._judge(cluster)
        self.verdict.took_s = time.monotonic() - begun
        return self.verdict

    async def _prepare(self, cluster: Cluster) -> None:
        """A collection with all pinned documents and some of the others in it."""
        await catalog.install_templates(cluster, dims=DIMS["hash-8"])
        with contextlib.suppress(HalflifeError):
            await catalog.delete(cluster, COLLECTION)
        await catalog.create(
            cluster, COLLECTION, CollectionOptions(shards=2 if len(self._nodes) > 1 else 1), dims=8, model="hash-8",
            moment=datetime.now(UTC),
        )  # fmt: skip
        known = Catalog(cluster)
        indexer = Indexer(
            cluster=cluster,
            targets=lambda name: CatalogTargets(
                name, cluster=cluster, catalog=known, embedder=self._place.embedder
            ),
            stamper=Stamper(63, lambda: time.time_ns() // 1000 - 10 * SKEW_US),
            now=lambda: datetime.now(UTC),
        )
        collection = (await known.get(COLLECTION)).collection
        ids = [f"p{i}" for i in range(PINNED)] + [f"d{i}" for i in range(0, FREE, 2)]
        items = [{"id": id_, "text": f"first {id_}", "metadata": {"n": 0}} for id_ in ids]
        result = await indexer.upsert(items, collection=collection, refresh="true")
        with (self._place.folder / "log-first.jsonl").open("w", encoding="utf-8") as log:
            texts = {item["id"]: item["text"] for item in items}
            log.write(
                json.dumps({"t": "try", "kind": "upsert", "who": "first", "n": 0, "texts": texts}) + "\n"
            )
            for item in result.items:
                entry = {
                    "t": "ack",
                    "kind": "upsert",
                    "who": "first",
                    "n": 0,
                    "id": item.id,
                    "v": item.version,
                }
                log.write(json.dumps(entry) + "\n")

    # -- processes

    async def _start(self, role: str, *arguments: str) -> asyncio.subprocess.Process:
        with (self._place.folder / f"{role}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "scripts.chaos", "--role", role, "--place", self._place.to_json(), *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, cwd=Path(__file__).parent.parent,
            )  # fmt: skip

    async def _writer(self, number: int) -> asyncio.subprocess.Process:
        self._born += 1
        seed = self._seed * 1_000 + self._born
        return await self._start("writer", "--worker", str(number), "--seed", str(seed))

    async def _end_writers(self) -> None:
        for process in self._writers:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        for process in self._writers:
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                process.kill()
                await process.wait()

    # -- a reindex with faults

    async def _round(self, number: int) -> None:
        changes = self._changes(number)
        if self._broken:
            await self._until_done("broken", {"shards": 2}, faults=0)
            return
        await self._until_done("run", changes, faults=self._faults)
        await asyncio.sleep(self._rng.uniform(0.2, 1.0))
        ending = self._rng.choice(["rollback", "finish"])
        await self._until_done(ending, {}, faults=self._rng.choice([0, 1]))

    def _changes(self, number: int) -> dict[str, Any]:
        options: list[dict[str, Any]] = [
            {"shards": self._rng.choice([1, 2, 3])},
            {"declare": {f"n{number}": "long"}, "shards": self._rng.choice([1, 2])},
            {"rechunk": True},
        ]
        options += [{"model": model, "dims": dims} for model, dims in DIMS.items()]
        return self._rng.choice(options)

    async def _until_done(self, action: str, changes: Mapping[str, Any], *, faults: int) -> None:
        """Start it again until it is done, making trouble meanwhile."""
        self._say(f"  {action} {changes or ''}")
        trouble = asyncio.create_task(self._trouble(faults))
        deadline = time.monotonic() + 240
        try:
            while True:
                self._mover = await self._start(
                    "mover", "--action", action, "--changes", json.dumps(changes), "--rate", str(self._rate)
                )
                code = await self._mover.wait()
                if code == 0:
                    break
                self.verdict.moves["stopped"] += 1
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{action} did not come to its end: see {self._place.folder}/mover.log"
                    )
                await asyncio.sleep(0.5)
        finally:
            await asyncio.gather(trouble, return_exceptions=False)
            self._mover = None
        self.verdict.moves[action] += 1

    async def _trouble(self, faults: int) -> None:
        for _ in range(faults):
            await asyncio.sleep(self._rng.uniform(0.5, 2.5))
            fault = self._rng.choice(
                [self._kill_node, self._stop_node, self._kill_mover, self._stop_mover, self._kill_writer,
                 self._stop_writer, self._fill_disk, self._embedder_outage, self._kill_mover, self._kill_node]
            )  # fmt: skip
            name = fault.__name__.strip("_").replace("_", " ")
            self.verdict.faults[name] += 1
            self._say(f"    {name}")
            self._in_fault += 1
            since = time.time()
            try:
                await fault()
            finally:
                self._in_fault -= 1
                self._fault_ended = time.monotonic()
                self._windows.append((since, time.time() + CALM_S))

    def in_fault(self) -> bool:
        """Tell whether errors may come now."""
        return self._in_fault > 0 or time.monotonic() - self._fault_ended < CALM_S

    async def _kill_node(self) -> None:
        node = await asyncio.to_thread(self._node_of_a_primary)
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(self._rng.uniform(0.2, 3.0))
        await asyncio.to_thread(node.start)
        await self._healthy()

    async def _stop_node(self) -> None:
        node = await asyncio.to_thread(self._node_of_a_primary)
        await asyncio.to_thread(node.pause)
        await asyncio.sleep(self._rng.uniform(1.0, 9.0))
        await asyncio.to_thread(node.resume)
        await self._healthy()

    async def _healthy(self) -> None:
        """Wait until every primary is back."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                url = f"{self._nodes[0].url}/_cluster/health?wait_for_status=yellow&timeout=2s"
                health = await asyncio.to_thread(_get_json, url)
                if health["status"] != "red" and health["number_of_nodes"] == len(self._nodes):
                    return
            await asyncio.sleep(0.2)

    def _node_of_a_primary(self) -> LocalNode:
        """Return the node that holds the first primary of the collection's live index, else any."""
        for node in self._nodes:
            with contextlib.suppress(OSError, ValueError):
                shards = _get_json(f"{node.url}/_cat/shards/{names.read_alias(COLLECTION)}?format=json")
                held = [
                    shard["node"]
                    for shard in shards
                    if shard["prirep"] == "p" and shard["state"] == "STARTED"
                ]
                return next(n for n in self._nodes if n.name in held)
        return self._rng.choice(self._nodes)

    async def _kill_mover(self) -> None:
        if self._mover is not None and self._mover.returncode is None:
            self._mover.kill()

    async def _stop_mover(self) -> None:
        """Stop it, now and then for so long that a fence of its is lifted."""
        mover = self._mover
        if mover is None or mover.returncode is not None:
            return
        mover.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.5, 2.0, 14.0]))
        if mover.returncode is None:
            mover.send_signal(signal.SIGCONT)

    async def _kill_writer(self) -> None:
        number = self._rng.randrange(len(self._writers))
        self._writers[number].kill()
        await self._writers[number].wait()
        self._writers[number] = await self._writer(number)

    async def _stop_writer(self) -> None:
        writer = self._rng.choice(self._writers)
        writer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.5, 3.0, 8.0]))
        writer.send_signal(signal.SIGCONT)

    async def _fill_disk(self) -> None:
        """Block all indices as the flood stage does, for a moment."""
        await asyncio.to_thread(self._set_flood_block, True)
        await asyncio.sleep(self._rng.uniform(0.3, 1.5))
        await asyncio.to_thread(self._set_flood_block, None)

    def _set_flood_block(self, value: bool | None) -> None:
        body = json.dumps({"index.blocks.read_only_allow_delete": value}).encode()
        request = urllib.request.Request(  # noqa: S310  # our own node  # nosec B310
            f"{self._nodes[0].url}/halflife*/_settings",
            body,
            {"content-type": "application/json"},
            method="PUT",
        )
        for _ in range(20):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(request, timeout=5).close()  # noqa: S310  # nosec B310
                return
            time.sleep(0.5)

    async def _embedder_outage(self) -> None:
        self._place.outage.touch()
        await asyncio.sleep(self._rng.uniform(0.3, 3.0))
        self._place.outage.unlink()

    # -- the oracle

    async def _judge(self, cluster: Cluster) -> None:
        tries, acknowledged = self._logs()
        ids = sorted(tries)
        known = await copying.patiently(lambda: catalog.get(cluster, COLLECTION), budget_s=30)
        index = known.collection.index
        await copying.patiently(lambda: cluster.refresh(index), budget_s=30)
        found: dict[str, dict[str, Any]] = {}
        for first in range(0, len(ids), 200):
            for entry in await cluster.mget(index, ids[first : first + 200], timeout_s=10):
                found[entry["_id"]] = entry
        shown = await self._shown(cluster)
        for id_ in ids:
            entry, heard = found[id_], acknowledged.get(id_, [])
            self.verdict.acknowledged += len(heard)
            text = entry["_source"].get("text") if entry["found"] else None
            if entry["found"] and text is not None and text not in tries[id_]:
                self.verdict.changed.append(id_)
                continue
            if not heard:
                continue
            version, kind, said = max(heard, key=lambda one: one[0])
            if not entry["found"] or entry["_version"] < version:
                self.verdict.lost.append(
                    f"{id_}: {kind} {version} acknowledged, {entry.get('_version')} stored"
                )
                continue
            if (id_ in shown) != (text is not None):
                self.verdict.invisible.append(id_)
            if kind == "patch":
                # A patch is acknowledged under a version of its own and keeps the text it found.
                version, kind, said = max(
                    (one for one in heard if one[1] != "patch"),
                    key=lambda one: one[0],
                    default=(0, "none", text),
                )
            unheard = tries[id_] - {one[2] for one in heard}
            if text != said and text not in unheard:
                (self.verdict.resurrected if said is None else self.verdict.changed).append(
                    f"{id_}: {said!r} ({version}) acknowledged, {text!r} ({entry['_version']}) stored"
                )

    def _logs(self) -> tuple[dict[str, set[str | None]], dict[str, list[tuple[int, str, str | None]]]]:
        """Return id -> what was ever asked for, and id -> (version, kind, text or None) acknowledged."""
        tries: defaultdict[str, set[str | None]] = defaultdict(set)
        acknowledged: defaultdict[str, list[tuple[int, str, str | None]]] = defaultdict(list)
        for path in sorted(self._place.folder.glob("log-*.jsonl")):
            asked: dict[tuple[str, int], dict[str, str | None]] = {}
            for entry in _lines(path):
                key = (entry["who"], entry["n"])
                if entry["t"] == "try":
                    asked[key] = entry["texts"]
                    if entry["kind"] != "patch":
                        for id_, text in entry["texts"].items():
                            tries[id_].add(text)
                elif entry["t"] == "ack":
                    text = None if entry["kind"] == "patch" else asked[key][entry["id"]]
                    acknowledged[entry["id"]].append((entry["v"], entry["kind"], text))
                else:
                    self.verdict.write_errors[entry["code"]] += 1
                    if not any(since <= entry["at"] <= until + 20 for since, until in self._windows):
                        self.verdict.write_errors_outside.append(entry["detail"])
        return tries, acknowledged

    async def _shown(self, cluster: Cluster) -> set[str]:
        body = {"size": 10_000, "_source": False, "query": {"match_all": {}}}
        answer = await cluster.search(names.read_alias(COLLECTION), body, timeout_s=10)
        return {hit["_id"] for hit in answer["hits"]["hits"]}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as log:
        for line in log:
            # The last line of a killed writer may be cut off.
            if line.endswith("\n"):
                yield json.loads(line)


def _get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=4) as answer:  # noqa: S310  # our own node  # nosec B310
        return json.load(answer)


# ---- the command ----------------------------------------------------------------------------------------------------


async def run_seed(cluster: LocalCluster, folder: Path, *, seed: int, say: Say, **options: Any) -> Verdict:
    """Run one seed on a running cluster, its logs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - nothing else runs yet
    return await Run(Place(cluster.urls, folder), cluster.nodes, seed=seed, say=say, **options).run()


def start_cluster(data: Path, *, nodes: int, say: Say) -> LocalCluster:
    """Return real nodes on `data`, not started yet; several notice soon that one is frozen."""
    return LocalCluster(
        ensure_installed(report=say), data, nodes=nodes, cluster_name=f"halflife-chaos-{os.getpid()}",
        settings=QUICK_DETECTION if nodes > 1 else None,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds asked for; the last line is the sum, and 0 is returned if nothing was lost."""
    parser = argparse.ArgumentParser(
        prog="./scripts/chaos", description="Kill things under real writes, and count what was lost."
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many runs")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1, help="nodes of the cluster")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="reindexes in each run")
    parser.add_argument("--faults", type=int, default=3, metavar="N", help="faults in each reindex")
    parser.add_argument(
        "--broken", action="store_true", help="copy, then swap: must be found out, and ends with 1"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all logs there")
    for hidden in ("role", "place", "worker", "seed", "action", "changes", "rate"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role:
        return _play(given)
    total = Verdict()
    sound = True
    with contextlib.ExitStack() as held:
        folder = given.keep or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="halflife-chaos-")))
        cluster = held.enter_context(start_cluster(folder / "nodes", nodes=given.nodes, say=print))
        for seed in range(given.first, given.first + given.seeds):
            print(f"seed {seed}, {given.nodes} node{'s' if given.nodes > 1 else ''}", flush=True)
            verdict = asyncio.run(
                run_seed(
                    cluster, folder / f"seed-{seed}", seed=seed, say=lambda line: print(line, flush=True),
                    rounds=given.rounds, faults=given.faults, broken=given.broken,
                )
            )  # fmt: skip
            for name in ("lost", "resurrected", "changed", "invisible"):
                for item in getattr(verdict, name)[:10]:
                    print(f"  {name}: {item}")
            for error in (*verdict.seen.errors[:5], *verdict.write_errors_outside[:5]):
                print(f"  outside faults: {error}")
            print(f"  {verdict.line()}\n  {verdict.figures()}", flush=True)
            sound = sound and verdict.sound
            total.acknowledged += verdict.acknowledged
            for name in ("lost", "resurrected", "changed"):
                getattr(total, name).extend(getattr(verdict, name))
    print(total.line())
    return 0 if sound else 1


def _play(given: argparse.Namespace) -> int:
    """Be one of the processes of a run."""
    place = Place.from_json(given.place)
    end_with_stdin()
    if given.role == "writer":
        asyncio.run(write(place, int(given.worker), int(given.seed)))
        return 0
    try:
        asyncio.run(move(place, given.action, json.loads(given.changes), float(given.rate)))
    except HalflifeError as error:
        print(f"{given.action}: {error.code}: {error.detail}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
