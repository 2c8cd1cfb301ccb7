"""Own `./scripts/chaos`: a service, callers and reindexes on real nodes while things are killed, and the count of what
was lost.

    ./scripts/chaos --seeds 10                 odd seeds on one node, even ones on three with replicas
    ./scripts/chaos --nodes 3 --first 7        seed 7 on three nodes
    ./scripts/chaos --minutes 30 --seeds 999   as many seeds as begin in half an hour
    ./scripts/chaos --broken                   copy, then swap: the oracle must find losses

In each run two services (`halflife serve`) stand between callers and the nodes, a proxy before each node; `halflife
reindex` moves the collection, and is run again whenever it was ended. One more writer runs the service's own write path
with a clock of its own that is wrong. Everything that is drawn by lot comes from the seed, though not the moment at
which an operating system runs a process.

The oracle reads only the writers' logs and the cluster. Every stored version is at least the highest acknowledged one
and has the content that was acknowledged under it, else that of a write which nobody heard of again; nothing deleted
and acknowledged is back; no revision is older than one acknowledged; a counter has counted every acknowledged step.
Readers find every document that always exists, and meet no error outside of a fault that concerns reads. The last line
reads `acknowledged=N lost=0 resurrected=0 changed=0`; the exit code is 0 where that holds and readers met nothing else.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx2

from app import catalog, copying, moves, names
from app.catalog import Catalog
from app.chunking import Chunking
from app.collection import Collection, CollectionOptions
from app.elastic import BulkAction, Cluster
from app.embedding import Embedder
from app.encoding import encode
from app.errors import HalflifeError
from app.indexing import Indexer
from app.targets import CatalogTargets
from app.writes import Patience, Stamper
from scripts.callers import (
    COLLECTION,
    COUNTERS,
    DIMS,
    DONE,
    FREE,
    NOT_DONE,
    REQUEST_S,
    TIMED,
    Caller,
    Heard,
    Note,
    Notes,
    Seen,
    Service,
    halflife,
    item,
    pinned_ids,
    read,
    said,
)
from scripts.distribution import ensure_installed
from scripts.faulty import Embeddings, Proxy, misbehaving
from scripts.node import LocalCluster, LocalNode
from scripts.stack import end_with_stdin

CLIENTS: Final = 2
"""Of the writer whose clock is wrong."""
CALLERS: Final = 4
READERS: Final = 2
SKEW_US: Final = 2_000_000
CALM_S: Final = 7.0
"""How long after all is well again a fault's errors may still come: an open breaker's probe may be one that hangs."""
RECOVERY_S: Final = 240.0
"""How long all may take to be well again after a fault; far more than it takes on a machine that is not overloaded."""
QUICK_DETECTION: Final = {
    "cluster.fault_detection.follower_check.timeout": "2s",
    "cluster.fault_detection.follower_check.retry_count": 2,
    "cluster.fault_detection.leader_check.timeout": "2s",
    "cluster.fault_detection.leader_check.retry_count": 2,
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a run happens; every process of it is told this. `models`: where each model's embedding server is."""

    urls: list[str]
    folder: Path
    models: dict[str, str]

    def to_json(self) -> str:
        return json.dumps({"urls": self.urls, "folder": str(self.folder), "models": self.models})

    @classmethod
    def from_json(cls, text: str) -> "Place":
        given = json.loads(text)
        return cls(given["urls"], Path(given["folder"]), given["models"])

    @contextlib.asynccontextmanager
    async def cluster(self, timeout_s: float = 5.0) -> AsyncIterator[Cluster]:
        cluster = Cluster.connect(urls=self.urls, request_timeout_s=timeout_s)
        try:
            await copying.patiently(cluster.check_version, budget_s=60)
            yield cluster
        finally:
            await cluster.close()


# ---- a writer whose clock is wrong ------------------------------------------------------------------------------------


async def write(place: Place, worker: int, seed: int) -> None:
    """Write, patch and delete until SIGTERM; log each request before it is sent, and each acknowledgement."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
    skew = rng.randrange(-SKEW_US, SKEW_US)
    opened = {
        model: Embedder.connect(
            base_url=url, api_key=None, model=model, dims=DIMS[model], retries=1, retry_budget_s=2.0
        )
        for model, url in place.models.items()
    }

    def embedder(collection: Collection) -> Embedder:
        return opened[collection.model or ""]

    async with place.cluster(3.0) as cluster:
        known = Catalog(cluster)
        indexer = Indexer(
            cluster=cluster,
            targets=lambda name: CatalogTargets(name, cluster=cluster, catalog=known, embedder=embedder),
            stamper=Stamper(worker, lambda: time.time_ns() // 1000 + skew),
            now=lambda: datetime.now(UTC),
            chunks=Chunking(max_tokens=40, overlap_tokens=0),
            patience=Patience(budget_s=20, request_timeout_s=3),
        )
        with Notes(place.folder / f"log-{worker}-{os.getpid()}.jsonl").open() as note:
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
    for each in opened.values():
        await each.close()


async def _client(
    indexer: Indexer,
    known: Catalog,
    note: Note,
    stop: asyncio.Event,
    rng: random.Random,
    who: str,
) -> None:
    serial = 0
    while not stop.is_set():
        serial += 1
        kind = rng.choices(["upsert", "revise", "delete", "patch"], [45, 15, 28, 12])[0]
        pool = [f"r{i}" for i in range(TIMED)] if kind == "revise" else [f"d{i}" for i in range(FREE)]
        if kind in ("upsert", "patch"):
            pool += pinned_ids()
        elif kind == "delete":
            pool += [f"r{i}" for i in range(TIMED)]
        ids = rng.sample(pool, rng.randint(1, 6))
        texts = {id_: None if kind == "delete" else said(who, serial, id_) for id_ in ids}
        revision = time.time_ns() // 1000 * 64 + rng.randrange(64) if kind == "revise" else None
        note(t="try", kind=kind, who=who, n=serial, texts=texts, rev=revision)
        try:
            collection = (await known.get(COLLECTION)).collection
            if kind == "delete":
                result = await indexer.delete_ids(ids, collection=collection)
            elif kind == "patch":
                result = await indexer.patch(
                    [{"id": id_, "author": who} for id_ in ids], collection=collection
                )
            else:
                more = {} if revision is None else {"revision": revision}
                items = [item(id_, text or "", who, serial, **more) for id_, text in texts.items()]
                result = await indexer.upsert(items, collection=collection)
        except HalflifeError as error:
            note(t="error", who=who, n=serial, code=error.code, at=time.time(), detail=error.detail[:200])
            await asyncio.sleep(0.1)
            continue
        for told in result.items:
            if told.status in DONE:
                note(t="ack", kind=kind, who=who, n=serial, id=told.id, v=told.version, rev=revision)
            elif told.status in NOT_DONE:
                note(t="not", kind=kind, who=who, n=serial, id=told.id)
            else:
                detail = told.error.detail[:200] if told.error else ""
                note(t="error", who=who, n=serial, code=told.status, at=time.time(), detail=detail)
        await asyncio.sleep(rng.uniform(0, 0.03))


# ---- a protocol that loses writes -------------------------------------------------------------------------------------


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
        uid=known.collection.uid,
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
    target = known.target
    assert target is not None
    await cluster.update_aliases(
        [
            {"remove": {"index": old, "alias": target.alias}},
            {"remove": {"index": old, "alias": names.read_alias(COLLECTION)}},
            {"remove": {"index": new, "alias": alias}},
            {"add": {"index": new, "alias": names.read_alias(COLLECTION), **catalog.read_alias_properties()}},
            {"add": {"index": new, "alias": names.write_alias(COLLECTION, target.generation + 1)}},
        ]
    )


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
    heard: Heard = field(default_factory=Heard)
    kinds: Counter[str] = field(default_factory=Counter)
    """Acknowledged writes by kind."""
    faults: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    write_errors: Counter[str] = field(default_factory=Counter)
    write_errors_outside: list[str] = field(default_factory=list)
    refused_items: int = 0
    lost_answers: int = 0
    longest_fault_s: float = 0.0
    took_s: float = 0.0

    @property
    def sound(self) -> bool:
        """Tell whether nothing was lost, back, changed or missing, and readers met trouble in its own window only."""
        return not (
            self.lost
            or self.resurrected
            or self.changed
            or self.invisible
            or self.seen.short
            or self.seen.stale
            or self.seen.errors
        )

    def line(self) -> str:
        """Return the count as the last line of a run has it."""
        return (
            f"acknowledged={self.acknowledged} lost={len(self.lost)} resurrected={len(self.resurrected)} "
            f"changed={len(self.changed)}"
        )

    def figures(self) -> list[str]:
        """Return what else was measured, line by line."""
        seen, heard = self.seen, self.heard
        clock = f"{self.took_s:.0f} s; moves {_shown(self.moves)}; faults {_shown(self.faults)}"
        well = f"the longest fault {self.longest_fault_s:.1f} s until all was well again"
        told = f"acknowledged: {_shown(self.kinds)}; answers: {_shown(heard.statuses)}, the slowest {heard.slowest_s:.1f} s"
        bulks = f"bulk items refused {self.refused_items}, bulk answers lost {self.lost_answers}"
        refused = (
            f"refused writes {_shown(self.write_errors)}, outside of faults {len(self.write_errors_outside)}"
        )
        found = f"reads {seen.reads}, fewest documents seen {seen.fewest} of {len(pinned_ids())}"
        hidden = f"not found at the end {len(self.invisible)}, longest pause {seen.longest_pause_s:.1f} s"
        errors = f"readers' errors within faults {seen.errors_in_faults}, outside {len(seen.errors)}"
        stale = f"stale reads within faults {seen.stale_in_faults}, outside {len(seen.stale)}"
        return [f"{clock}; {well}", f"{told}; {bulks}", refused, f"{found}; {hidden}; {errors}; {stale}"]


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


@dataclass
class Asked:
    """What the logs tell of one document."""

    tries: Counter[str | None] = field(default_factory=Counter)
    """How often each text was asked for; None is a delete."""
    heard: Counter[str | None] = field(default_factory=Counter)
    """How often that was acknowledged."""
    refused: Counter[str | None] = field(default_factory=Counter)
    """How often the answer was that it was not written."""
    patches: int = 0
    """Patches that were asked for and not acknowledged."""
    acknowledged: list["Ack"] = field(default_factory=list)

    def unheard(self) -> set[str | None]:
        """Return what may be there although nobody was told so."""
        return {text for text, count in self.tries.items() if count > self.heard[text] + self.refused[text]}


@dataclass(frozen=True)
class Ack:
    version: int
    kind: str
    text: str | None
    who: str
    revision: int | None
    count: int | None


class Run:
    """One seed on one cluster; to be used once."""

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        *,
        seed: int,
        say: Say,
        rounds: int = 2,
        faults: int = 3,
        script: Sequence[str] = (),
        broken: bool = False,
        rate: float = 60.0,
        change: Mapping[str, str | None] | None = None,
        ending: str | None = None,
    ) -> None:
        """`rounds` reindexes with about so many `faults` each; `broken`: with the protocol that loses writes.

        `script` names the faults of each reindex instead, `change` is what the reindexes change (an option of
        `halflife reindex` -> its value), `ending` is `rollback` or `finish`; without them the seed decides.
        """
        self._nodes = list(cluster.nodes)
        self._folder = folder
        self._rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
        self._seed = seed
        self._say = say
        self._rounds = rounds
        self._faults = faults
        self._script = list(script)
        self._broken = broken
        self._rate = rate
        self._change = change
        self._ending = ending
        self._born = 0
        self._writer: asyncio.subprocess.Process | None = None
        self._mover: asyncio.subprocess.Process | None = None
        self._services: list[Service] = []
        self._proxies: list[Proxy] = []
        self._embedders: list[Embeddings] = []
        self._place: Place
        self._environment: dict[str, str]
        self._client: httpx2.AsyncClient
        self._cluster: Cluster
        self._read_faults = 0
        self._read_fault_ended = -1e9
        self._windows: list[tuple[float, float]] = []
        self.verdict = Verdict()

    async def run(self) -> Verdict:
        """Do it all and return what it showed."""
        begun = time.monotonic()
        async with contextlib.AsyncExitStack() as held:
            self._cluster = await self._open(held)
            await self._prepare()
            stop, still = asyncio.Event(), asyncio.Event()
            urls = [service.url for service in self._services]
            verdict = self.verdict
            readers = [
                asyncio.create_task(
                    read(
                        self._client, urls, verdict.seen, verdict.heard, self.in_fault, stop,
                        seed=self._seed * 77 + n,
                    )
                )
                for n in range(READERS)
            ]  # fmt: skip
            note = held.enter_context(Notes(self._folder / "log-callers.jsonl").open())
            callers = [
                asyncio.create_task(
                    Caller(
                        self._client, urls, note, verdict.heard, name=f"caller-{n}", seed=self._seed * 131 + n
                    ).run(still)
                )
                for n in range(CALLERS)
            ]
            try:
                self._writer = await self._start_writer()
                await asyncio.sleep(1.0)
                for number in range(self._rounds):
                    await self._round(number)
                await asyncio.sleep(0.5)
                still.set()
                await asyncio.gather(*callers)
                await self._end_writer()
                stop.set()
                await asyncio.gather(*readers)
            finally:
                for task in (*callers, *readers):
                    task.cancel()
                await asyncio.gather(*callers, *readers, return_exceptions=True)
                for process in (self._writer, self._mover):
                    if process is not None and process.returncode is None:
                        process.kill()
                        await process.wait()
            await self._judge(self._cluster)
            verdict.refused_items = sum(proxy.refused_items for proxy in self._proxies)
            verdict.lost_answers = sum(proxy.lost_answers for proxy in self._proxies)
        verdict.took_s = time.monotonic() - begun
        return verdict

    # -- what it stands on

    async def _open(self, held: contextlib.AsyncExitStack) -> Cluster:
        """Open the far ends, the services and the clients, all closed at the end."""
        for node in self._nodes:
            assert node.http_port is not None
            self._proxies.append(
                await held.enter_async_context(Proxy(("127.0.0.1", node.http_port), seed=self._seed))
            )
        for dims in DIMS.values():
            self._embedders.append(await held.enter_async_context(Embeddings(dims=dims, seed=self._seed)))
        servers = dict(zip(DIMS, (f"{far.url}/v1" for far in self._embedders), strict=True))
        self._place = Place([node.url for node in self._nodes], self._folder, servers)
        self._client = await held.enter_async_context(
            httpx2.AsyncClient(timeout=httpx2.Timeout(REQUEST_S, connect=3.0), trust_env=False)
        )
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HALFLIFE_")},
            "HALFLIFE_ELASTICSEARCH_URL": ",".join(proxy.url for proxy in self._proxies),
            "HALFLIFE_EMBEDDING_BASE_URL": servers["hash-8"],
            "HALFLIFE_EMBEDDING_MODEL": "hash-8",
            "HALFLIFE_EMBEDDING_DIMS": str(DIMS["hash-8"]),
            "HALFLIFE_EMBEDDING_MODELS": json.dumps({"hash-12": {"url": servers["hash-12"], "dims": DIMS["hash-12"]}}),
            "HALFLIFE_EMBEDDING_QUERY_PREFIX": "",
            "HALFLIFE_EMBEDDING_DOCUMENT_PREFIX": "",
            # Readers wait for what is slow: only what is refused or lacks something is an error.
            "HALFLIFE_REQUEST_TIMEOUT_S": "30",
            "HALFLIFE_EMBEDDING_QUERY_TIMEOUT_S": "10",
            "HALFLIFE_RATE_PER_S": "0",
            "HALFLIFE_LOG_LEVEL": "warning",
        }  # fmt: skip
        for number in (1, 2):
            service = Service(self._folder, number, self._environment)
            held.push_async_callback(asyncio.to_thread, service.stop)
            service.start()
            self._services.append(service)
        for service in self._services:
            await service.ready(self._client)
        return await held.enter_async_context(self._place.cluster(10.0))

    async def _prepare(self) -> None:
        """A collection with all pinned documents, the counters and some of the others in it."""
        url = f"{self._services[0].url}/v1/collections/{COLLECTION}"
        await self._client.delete(url, params={"confirm": COLLECTION}, timeout=RECOVERY_S)
        several = len(self._nodes) > 1
        made = await self._client.put(
            url, json={"shards": 2, "replicas": 1} if several else {"shards": 1}, timeout=RECOVERY_S
        )
        made.raise_for_status()
        ids = [*pinned_ids(), *(f"c{n}" for n in range(COUNTERS)), *(f"d{n}" for n in range(0, FREE, 2))]
        items = [item(id_, said("first", 0, id_), "first", 0) for id_ in ids]
        stored = await self._client.post(
            f"{url}/documents", json={"documents": items, "refresh": "true"}, timeout=RECOVERY_S
        )
        stored.raise_for_status()
        texts = {each["id"]: each["text"] for each in items}
        with Notes(self._folder / "log-first.jsonl").open() as note:
            note(t="try", kind="upsert", who="first", n=0, texts=texts, rev=None)
            for told in stored.json()["items"]:
                if told["status"] not in DONE:
                    raise RuntimeError(f"the first documents were not stored: {told}")
                note(t="ack", kind="upsert", who="first", n=0, id=told["id"], v=told["version"], rev=None)
                self.verdict.heard.raise_to(told["id"], told["version"])

    async def _start_process(
        self, log: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        with (self._folder / log).open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
                cwd=Path(__file__).parent.parent, env=environment,
            )  # fmt: skip

    async def _start_writer(self) -> asyncio.subprocess.Process:
        self._born += 1
        return await self._start_process(
            "writer.log", sys.executable, "-P", "-m", "scripts.chaos", "--role", "writer",
            "--place", self._place.to_json(), "--seed", str(self._seed * 1_000 + self._born),
        )  # fmt: skip

    async def _end_writer(self) -> None:
        assert self._writer is not None
        if self._writer.returncode is None:
            self._writer.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._writer.wait(), 60)
        except TimeoutError:
            self._writer.kill()
            await self._writer.wait()

    # -- a reindex with faults

    async def _round(self, number: int) -> None:
        if self._broken:
            await copy_then_swap(self._cluster, {"shards": 2}, self._rate)
            self.verdict.moves["broken"] += 1
            return
        change = self._change or self._changes(number)
        options = [part for name, value in change.items() for part in (name, *([value] if value else []))]
        await self._until_done("run", options, self._script or self._draw(self._faults))
        await asyncio.sleep(self._rng.uniform(0.2, 1.0))
        ending = self._ending or self._rng.choice(["rollback", "finish"])
        await self._until_done(
            ending, [f"--{ending}"], [] if self._script else self._draw(self._rng.choice([0, 1]))
        )

    def _changes(self, number: int) -> dict[str, str | None]:
        options: list[dict[str, str | None]] = [
            {"--shards": str(self._rng.choice([1, 2, 3]))},
            {"--declare": f"n{number}=long", "--shards": str(self._rng.choice([1, 2]))},
            {"--rechunk": None},
        ]
        options += [{"--embedding-model": model} for model in DIMS]
        return self._rng.choice(options)

    def _draw(self, count: int) -> list[str]:
        return [self._rng.choice(FAULTS) for _ in range(count)]

    async def _until_done(self, action: str, options: Sequence[str], faults: Sequence[str]) -> None:
        """Run `halflife reindex` until it is done, again whenever it was ended, making trouble meanwhile."""
        self._say(f"  reindex {' '.join(options)}")
        trouble: asyncio.Task[None] | None = None
        deadline = time.monotonic() + 600
        wanted = {"run": "swapped", "rollback": "rolled-back", "finish": "finished"}[action]
        try:
            for attempt in itertools.count():
                # One that was ended is gone on with; one that was killed before it wrote anything down begins.
                phase = await self._phase() if attempt else None
                if phase == wanted:
                    break
                chosen = [] if action == "run" and phase == "copying" else options
                rate = ["--rate", str(self._rate)] if action == "run" else []
                self._mover = await self._start_process(
                    "reindex.log", *halflife("reindex", COLLECTION, "--yes", *rate, *chosen),
                    environment=self._environment,
                )  # fmt: skip
                trouble = trouble or asyncio.create_task(self._trouble(faults))
                done = asyncio.ensure_future(self._mover.wait())
                await asyncio.wait({done, trouble}, return_when=asyncio.FIRST_COMPLETED)
                if trouble.done() and trouble.exception() is not None:
                    # A fault that could not be ended: nothing would come of waiting.
                    break
                if await done == 0:
                    break
                self.verdict.moves["stopped"] += 1
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{action} did not come to its end: see {self._folder}/reindex.log")
                await asyncio.sleep(0.5)
        finally:
            if trouble is not None:
                await trouble
            self._mover = None
        self.verdict.moves[action] += 1

    async def _phase(self) -> str | None:
        """Return how far the reindex is, as it is written down."""
        ledger = moves.Ledger(self._cluster, COLLECTION, owner="chaos", now=lambda: datetime.now(UTC))
        state = await ledger.load()
        return None if state is None else state.phase

    async def _trouble(self, faults: Sequence[str]) -> None:
        for name in faults:
            await self._reindexing()
            await asyncio.sleep(self._rng.uniform(0.2, 1.5))
            self.verdict.faults[name] += 1
            self._say(f"    {name}")
            fault: Callable[[], Awaitable[None]] = getattr(self, f"_{name.replace(' ', '_')}")
            concerns_reads = name in CONCERN_READS
            self._read_faults += concerns_reads
            since, begun = time.time(), time.monotonic()
            try:
                await fault()
                await self._recovered()
            finally:
                self._read_faults -= concerns_reads
                if concerns_reads:
                    self._read_fault_ended = time.monotonic()
                self._windows.append((since, time.time() + CALM_S))
            self.verdict.longest_fault_s = max(self.verdict.longest_fault_s, time.monotonic() - begun)

    def in_fault(self, begun: float) -> bool:
        """Tell whether a read that began then may have met a fault that concerns reads."""
        return self._read_faults > 0 or begun < self._read_fault_ended + CALM_S

    async def _recovered(self) -> None:
        """Wait until every primary is back and both services say that they are ready."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            with contextlib.suppress(OSError, ValueError):
                url = f"{self._nodes[0].url}/_cluster/health?wait_for_status=yellow&timeout=2s"
                health = await asyncio.to_thread(_get_json, url)
                if health["status"] != "red" and health["number_of_nodes"] == len(self._nodes):
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the cluster was not well {RECOVERY_S:g} s after a fault")
            await asyncio.sleep(0.2)
        for service in self._services:
            await service.ready(self._client, RECOVERY_S)

    # -- the faults

    async def _kill_node(self) -> None:
        node = await asyncio.to_thread(self._node_of_a_primary)
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(self._rng.uniform(0.2, 3.0))
        await asyncio.to_thread(node.start, RECOVERY_S)

    async def _stop_node(self) -> None:
        node = await asyncio.to_thread(self._node_of_a_primary)
        await asyncio.to_thread(node.pause)
        await asyncio.sleep(self._rng.uniform(1.0, 9.0))
        await asyncio.to_thread(node.resume)

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

    async def _kill_service(self) -> None:
        service = self._rng.choice(self._services)
        await asyncio.to_thread(service.kill)
        await asyncio.sleep(self._rng.uniform(0.0, 1.0))
        await asyncio.to_thread(service.start)

    async def _stop_service(self) -> None:
        service = self._rng.choice(self._services)
        service.signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.5, 3.0, 14.0]))
        service.signal(signal.SIGCONT)

    async def _reindexing(self) -> None:
        """Wait until a reindex is at work, so that a fault meets it and not its start; until one has ended at most."""
        for _ in range(150):
            if self._mover is None or await self._phase() in moves.UNDER_WAY:
                return
            await asyncio.sleep(0.2)

    async def _kill_reindex(self) -> None:
        if self._mover is not None and self._mover.returncode is None:
            self._mover.kill()

    async def _stop_reindex(self) -> None:
        """Stop it, now and then for so long that a fence of its is lifted."""
        mover = self._mover
        if mover is None or mover.returncode is not None:
            return
        mover.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.5, 2.0, 14.0]))
        if mover.returncode is None:
            mover.send_signal(signal.SIGCONT)

    async def _kill_writer(self) -> None:
        assert self._writer is not None
        self._writer.kill()
        await self._writer.wait()
        self._writer = await self._start_writer()

    async def _stop_writer(self) -> None:
        assert self._writer is not None
        self._writer.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.choice([0.5, 3.0, 8.0]))
        self._writer.send_signal(signal.SIGCONT)

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
        async with contextlib.AsyncExitStack() as held:
            mode = self._rng.choice(["refuse", "hang", "garbage"])
            for far in self._embedders:
                await held.enter_async_context(misbehaving(far, mode=mode))
            await asyncio.sleep(self._rng.uniform(0.3, 3.0))

    async def _refuse_items(self) -> None:
        """Let the nodes refuse a share of each bulk's items."""
        await self._with_proxies("refuse_items", self._rng.choice([0.3, 0.7, 1.0]))

    async def _lose_answers(self) -> None:
        """Let connections break after the node has carried a bulk out."""
        await self._with_proxies("lose_answers", self._rng.choice([0.3, 1.0]))

    async def _with_proxies(self, name: str, share: float) -> None:
        for proxy in self._proxies:
            setattr(proxy, name, share)
        try:
            await asyncio.sleep(self._rng.uniform(1.0, 4.0))
        finally:
            for proxy in self._proxies:
                setattr(proxy, name, 0.0)

    # -- the oracle

    async def _judge(self, cluster: Cluster) -> None:
        asked = self._logs()
        ids = sorted(asked)
        known = await copying.patiently(lambda: catalog.get(cluster, COLLECTION), budget_s=30)
        index = known.collection.index
        await copying.patiently(lambda: cluster.refresh(index), budget_s=30)
        found: dict[str, dict[str, Any]] = {}
        for first in range(0, len(ids), 200):
            for entry in await cluster.mget(index, ids[first : first + 200], timeout_s=10):
                found[entry["_id"]] = entry
        shown = await self._shown(cluster)
        for id_ in ids:
            self.verdict.acknowledged += len(asked[id_].acknowledged)
            self.judge_one(id_, asked[id_], found[id_], id_ in shown)

    def judge_one(self, id_: str, asked: Asked, entry: Mapping[str, Any], shown: bool) -> None:
        verdict, source = self.verdict, entry.get("_source", {}) if entry["found"] else {}
        text = source.get("text") if entry["found"] else None
        if text is not None and text not in asked.tries:
            verdict.changed.append(f"{id_}: {text!r}, which nobody wrote")
            return
        if not asked.acknowledged:
            return
        top = max(asked.acknowledged, key=lambda one: one.version)
        if not entry["found"] or entry["_version"] < top.version:
            verdict.lost.append(
                f"{id_}: {top.kind} {top.version} acknowledged, {entry.get('_version')} stored"
            )
            return
        if shown != (text is not None):
            verdict.invisible.append(id_)
        # A patch is acknowledged under a version of its own and keeps the text that it found.
        worded = [one for one in asked.acknowledged if one.kind != "patch"]
        last = max(worded, key=lambda one: one.version, default=None)
        unheard = asked.unheard()
        exact = entry["_version"] == top.version
        if exact and top.kind != "patch":
            # Under just the version that was acknowledged stands just what was acknowledged.
            wrong = text != top.text
        else:
            # A patch, heard of or not, stands on what was acknowledged last or on a write that nobody heard of.
            patched = exact or asked.patches > 0
            wrong = last is not None and text not in unheard and not (patched and text == last.text)
        if exact and top.kind == "patch" and source.get("author") != top.who:
            wrong = True
        if wrong:
            told = f"{id_}: {top.kind} {top.version} {last and last.text!r} acknowledged, {text!r} ({entry['_version']}) stored"
            (verdict.resurrected if last is not None and last.text is None else verdict.changed).append(told)
        self._judge_revision(id_, asked, source)
        if id_.startswith("c"):
            self._judge_counter(id_, asked, source)

    def _judge_revision(self, id_: str, asked: Asked, source: Mapping[str, Any]) -> None:
        """A revision that was acknowledged is there, or a newer one; a tombstone keeps it."""
        highest = max((one.revision for one in asked.acknowledged if one.revision is not None), default=None)
        if highest is not None and (source.get("revision") or 0) < highest:
            self.verdict.lost.append(
                f"{id_}: revision {highest} acknowledged, {source.get('revision')} stored"
            )

    def _judge_counter(self, id_: str, asked: Asked, source: Mapping[str, Any]) -> None:
        """Every acknowledged step counted, each on top of another; what was not heard of may have counted too."""
        steps = [one.count for one in asked.acknowledged if one.count is not None]
        stored = source.get("metadata", {}).get("n", 0)
        most = len(steps) + sum((asked.tries - asked.heard - asked.refused).values())
        if (
            len(set(steps)) != len(steps)
            or not len(steps) <= stored <= most
            or max(steps, default=0) > stored
        ):
            self.verdict.lost.append(
                f"{id_}: {len(steps)} steps acknowledged ({len(set(steps))} different, the highest "
                f"{max(steps, default=0)}), at most {most} taken, {stored} stored"
            )

    def _logs(self) -> dict[str, Asked]:
        """Return what was asked for and acknowledged, by document."""
        found: defaultdict[str, Asked] = defaultdict(Asked)
        for path in sorted(self._folder.glob("log-*.jsonl")):
            tries: dict[tuple[str, int], dict[str, Any]] = {}
            for entry in _lines(path):
                key = (entry["who"], entry["n"])
                if entry["t"] == "try":
                    tries[key] = entry
                    for id_, text in entry["texts"].items():
                        if entry["kind"] == "patch":
                            found[id_].patches += 1
                        else:
                            found[id_].tries[text] += 1
                elif entry["t"] == "not":
                    # It was answered that nothing was written: conflict, or nothing there.
                    text = tries[key]["texts"][entry["id"]]
                    if entry["kind"] == "patch":
                        found[entry["id"]].patches -= 1
                    else:
                        found[entry["id"]].refused[text] += 1
                elif entry["t"] == "ack":
                    asked = found[entry["id"]]
                    text = tries[key]["texts"][entry["id"]]
                    if entry["kind"] == "patch":
                        asked.patches -= 1
                    else:
                        asked.heard[text] += 1
                    self.verdict.kinds[entry["kind"]] += 1
                    asked.acknowledged.append(
                        Ack(entry["v"], entry["kind"], text, entry["who"], entry["rev"], entry.get("count"))
                    )
                else:
                    self.verdict.write_errors[entry["code"]] += 1
                    # Writes are tried for 20 s before they fail.
                    if not any(since <= entry["at"] <= until + 20 for since, until in self._windows):
                        self.verdict.write_errors_outside.append(entry["detail"])
        return found

    async def _shown(self, cluster: Cluster) -> set[str]:
        body = {"size": 10_000, "_source": False, "query": {"match_all": {}}}
        answer = await cluster.search(names.read_alias(COLLECTION), body, timeout_s=10)
        return {hit["_id"] for hit in answer["hits"]["hits"]}


CONCERN_READS: Final = (
    "kill node",
    "stop node",
    "kill service",
    "stop service",
    "embedder outage",
    "lose answers",
)
FAULTS: Final = (
    *CONCERN_READS, "kill node", "kill service", "kill reindex", "kill reindex", "stop reindex", "kill writer",
    "stop writer", "fill disk", "refuse items", "refuse items",
)  # fmt: skip
"""What is drawn from; what stands twice is drawn twice as often. Reads may fail in those that concern reads alone."""


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
    return await Run(cluster, folder, seed=seed, say=say, **options).run()


def start_cluster(data: Path, *, nodes: int, say: Say) -> LocalCluster:
    """Return real nodes on `data`, not started yet; several notice soon that one is frozen."""
    return LocalCluster(
        ensure_installed(report=say), data, nodes=nodes, cluster_name=f"halflife-chaos-{os.getpid()}",
        settings=QUICK_DETECTION if nodes > 1 else None,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds asked for; the last line is the sum, and 0 is returned if nothing was lost."""
    parser = argparse.ArgumentParser(
        prog="./scripts/chaos",
        description="Kill things under real writes, and count what was lost. The last line reads "
        "`acknowledged=N lost=N resurrected=N changed=N`; the exit code is 0 if nothing was, and readers met errors only "
        "within faults that concern reads and always found every document that exists.",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="how many runs (default 1)")
    parser.add_argument("--first", type=int, default=1, metavar="SEED", help="the first seed (default 1)")
    parser.add_argument(
        "--nodes",
        type=int,
        choices=(1, 3),
        help="nodes of the cluster; default: odd seeds on 1, even ones on 3",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no further seed after so long")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="reindexes in each run (default 2)"
    )
    parser.add_argument(
        "--faults", type=int, default=3, metavar="N", help="faults in each reindex (default 3)"
    )
    parser.add_argument(
        "--broken", action="store_true", help="copy, then swap: must be found out, and ends with 1"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep all logs there")
    for hidden in ("role", "place", "seed", "arguments"):
        parser.add_argument(f"--{hidden}", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role:
        return _play(given)
    total, sound = Verdict(), True
    until = time.monotonic() + (given.minutes or 1e9) * 60
    seeds = range(given.first, given.first + given.seeds)
    with contextlib.ExitStack() as held:
        folder = given.keep or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="halflife-chaos-")))
        for nodes in (1, 3):
            chosen = [seed for seed in seeds if (given.nodes or (1 if seed % 2 else 3)) == nodes]
            if not chosen or time.monotonic() > until:
                continue
            with start_cluster(folder / f"nodes-{nodes}", nodes=nodes, say=print) as cluster:
                for seed in chosen:
                    if time.monotonic() > until:
                        break
                    print(f"seed {seed}, {nodes} node{'s' if nodes > 1 else ''}", flush=True)
                    verdict = asyncio.run(
                        run_seed(
                            cluster, folder / f"seed-{seed}", seed=seed, say=lambda line: print(line, flush=True),
                            rounds=given.rounds, faults=given.faults, broken=given.broken,
                        )
                    )  # fmt: skip
                    _tell(verdict)
                    sound = sound and verdict.sound
                    total.acknowledged += verdict.acknowledged
                    for name in ("lost", "resurrected", "changed"):
                        getattr(total, name).extend(getattr(verdict, name))
    print(total.line())
    return 0 if sound else 1


def _tell(verdict: Verdict) -> None:
    for name in ("lost", "resurrected", "changed", "invisible"):
        for each in getattr(verdict, name)[:10]:
            print(f"  {name}: {each}")
    for what, found in (
        ("a reader's error outside of faults", verdict.seen.errors),
        ("stale", verdict.seen.stale),
        ("short", verdict.seen.short),
        ("a write refused outside of faults", verdict.write_errors_outside),
    ):
        for each in found[:5]:
            print(f"  {what}: {each}")
    for line in (*verdict.figures(), verdict.line()):
        print(f"  {line}", flush=True)


def _play(given: argparse.Namespace) -> int:
    """Be one of the processes of a run."""
    end_with_stdin(15.0)
    if given.role == "writer":
        asyncio.run(write(Place.from_json(given.place), 1, int(given.seed)))
        return 0
    from scripts import cli

    sys.argv = ["halflife", *json.loads(given.arguments)]
    cli.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
