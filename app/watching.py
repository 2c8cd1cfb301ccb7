"""What operators are told of a running service: whether each dependency serves, and counts that only asking tells.

Readiness is asked for when somebody looks, once a second at most; documents and reindexes are counted in the background, so that `/metrics`
never waits for the cluster. A failing dependency is a finding here, never an exception.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from app import catalog, names, observing, turns
from app.elastic import Cluster
from app.embedding import Embedder
from app.errors import ClusterUnavailable, HalflifeError, NotFound
from app.guarding import Guard
from app.reranking import Reranker
from app.rewriting import Rewriter

Json = dict[str, Any]

log = logging.getLogger("halflife")

CHECK_WITHIN_S: Final = 3.0
ANSWERED_WITHIN_S: Final = 5.0
"""An embedder that answered so lately is not asked again: a probe of it costs an embedding."""
LOOKED_WITHIN_S: Final = 1.0
"""What was found so lately is told again: readiness needs no key, so however many ask, the dependencies are asked once."""
CENSUS_EVERY_S: Final = 30.0
TICK_S: Final = 1.0


def embedder_name(model: str) -> str:
    """Return what the embedder of a model beside the first is called, in readiness and in metrics."""
    return f"embedder {model}"


class Watch:
    """Looks after the dependencies of one process."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        embedder: Embedder,
        reranker: Reranker | None,
        touches_waiting: Callable[[], int],
        rewriter: Rewriter | None = None,
        others: Mapping[str, Callable[[], Embedder | None]] | None = None,
    ) -> None:
        """`others` opens the embedders of the models beside the first, by their names."""
        self._cluster = cluster
        self._embedder = embedder
        self._others = others or {}
        self._opened: dict[str, Embedder] = {}
        self._reranker = reranker
        self._rewriter = rewriter
        self._touches_waiting = touches_waiting
        self._lag_s = 0.0
        self._counted: set[str] = set()
        self._moving: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._look: asyncio.Task[list[Json]] | None = None
        self._looked_at = -math.inf

    @property
    def guards(self) -> list[Guard]:
        """The guards of all dependencies."""
        doors = (self._cluster, self._embedder, *self._opened.values(), self._reranker, self._rewriter)
        return [door.guard for door in doors if door is not None]

    def start(self) -> None:
        """Measure and count in the background from now on."""
        self._tasks = [
            asyncio.create_task(self._tick(), name="loop lag"),
            asyncio.create_task(self._count(), name="census"),
        ]

    async def close(self) -> None:
        """Stop."""
        tasks = [*self._tasks, *([] if self._look is None else [self._look])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- readiness

    async def readiness(self, *, serving: bool, keys_usable: bool = True) -> tuple[bool, Json]:
        """Return whether the service can serve, and what of it: ready, degraded, not ready, or stopping.

        Not ready is a cluster that can't be searched. Degraded still answers: without the embedder by words alone,
        without the reranker in the fused order, with a full disk without writes, under the keys before a file of
        keys that can't be used. Collections of a model whose embedder is away are searched by
        words alone too.
        """
        checks: dict[str, Json] = {}
        found = await self._found()
        checks["elasticsearch"] = {**found[0], **self._cluster.guard.told()}
        checks["embedder"] = {**found[1], **self._embedder.guard.told()}
        for name, told in zip(self._others, found[2:], strict=True):
            opened = self._opened.get(name)
            checks[embedder_name(name)] = {**told, **({} if opened is None else opened.guard.told())}
        for name, door in (("reranker", self._reranker), ("rewriter", self._rewriter)):
            if door is not None:
                told = door.guard.told()
                checks[name] = {"status": "ok" if told["breaker"] == "closed" else "failed", **told}
        if not keys_usable:
            # Who asks needs no key, and why it can't be used names forced filters' fields: that is for the log.
            checks["keys"] = {
                "status": "failed",
                "reason": "the file of keys is not usable, and the keys before it stay in force: see the log",
                "remedy": "correct the file; it is read again when it changes",
            }
        ready = serving and checks["elasticsearch"]["status"] == "ok"
        whole = all(check["status"] == "ok" for check in checks.values())
        whole = (
            whole and checks["elasticsearch"]["writable"] and not checks["elasticsearch"]["templates_differ"]
        )
        status = (
            "stopping"
            if not serving
            else "ready"
            if whole and ready
            else "degraded"
            if ready
            else "not ready"
        )
        lag: Json = {
            "event_loop_ms": round(self._lag_s * 1000),
            "touches_waiting": self._touches_waiting(),
            "cluster_tasks": checks["elasticsearch"].pop("pending_tasks", None),
            "cluster_longest_task_ms": checks["elasticsearch"].pop("longest_task_ms", None),
        }
        return ready, {"status": status, "checks": checks, "lag": lag}

    async def _found(self) -> list[Json]:
        """Return what the cluster and the embedders said, at most `LOOKED_WITHIN_S` ago; who asks meanwhile waits with it."""
        if self._look is None or (
            self._look.done() and time.monotonic() - self._looked_at >= LOOKED_WITHIN_S
        ):
            self._look = asyncio.create_task(self._ask(), name="readiness")
        # One of those who wait may hang up.
        return await asyncio.shield(self._look)

    async def _ask(self) -> list[Json]:
        found = await asyncio.gather(
            _checked(self._check_cluster),
            _checked(partial(self._check_embedder, self._embedder)),
            *(_checked(partial(self._check_other, name)) for name in self._others),
        )
        self._looked_at = time.monotonic()
        return found

    async def _check_cluster(self) -> Json:
        info, health, blocked, versions = await asyncio.gather(
            self._cluster.info(timeout_s=CHECK_WITHIN_S),
            self._cluster.health(timeout_s=CHECK_WITHIN_S),
            self._cluster.blocked(f"{names.PREFIX}*", timeout_s=CHECK_WITHIN_S),
            self._cluster.template_versions(f"{names.PREFIX}*", timeout_s=CHECK_WITHIN_S),
        )
        if health.get("status") == "red":
            raise ClusterUnavailable(
                "some shards are not there (the cluster's health is red)",
                remedy="wait for them, or see GET /_cluster/health",
            )
        shipped = {name: catalog.shipped(name)["version"] for name in catalog.COMPONENTS}
        installed = {name: versions.get(name) for name in shipped}
        told: Json = {
            "version": info.version,
            "cluster": info.name,
            "health": health.get("status"),
            "writable": not blocked,
            "templates": installed,
            "templates_differ": installed != shipped,
            "pending_tasks": health.get("number_of_pending_tasks"),
            "longest_task_ms": health.get("task_max_waiting_in_queue_millis"),
        }
        if blocked:
            told["blocked"] = {index: blocked[index] for index in sorted(blocked)[:20]}
            told["remedy"] = (
                "free disk space or add a node; a block that an operator set must be removed by hand"
            )
        return told

    async def _check_other(self, name: str) -> Json:
        if name not in self._opened:
            opened = self._others[name]()
            assert opened is not None  # it is one of the configured ones
            self._opened[name] = opened
        return await self._check_embedder(self._opened[name])

    async def _check_embedder(self, embedder: Embedder) -> Json:
        guard = embedder.guard
        now = time.monotonic()
        fresh = guard.answered_at is not None and now - guard.answered_at < ANSWERED_WITHIN_S
        if fresh and guard.breaker.state == "closed" and embedder.dims is not None:
            return {"dims": embedder.dims, "model": embedder.model}
        return {"dims": await embedder.check(), "model": embedder.model}

    # --- metrics

    def exposition(self) -> tuple[bytes, str]:
        """Return the metrics of now, and their content type."""
        for guard in self.guards:
            observing.breaker_state(guard.dependency, guard.breaker.state)
        observing.TOUCHES.set(self._touches_waiting())
        return observing.exposition()

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag_s = max(0.0, time.monotonic() - due)
            observing.LOOP_LAG.set(self._lag_s)

    async def _count(self) -> None:
        while True:
            try:
                await self.census()
            except HalflifeError:
                pass
            except Exception:
                log.exception("documents and reindexes were not counted")
            await asyncio.sleep(CENSUS_EVERY_S)

    async def census(self) -> None:
        """Count the documents of the collections and how far those that are being copied are, and set the metrics."""
        aliases = await self._cluster.resolve_aliases(f"{names.PREFIX}*")
        found = sorted(name for alias in aliases if (name := names.parse_read_alias(alias)) is not None)
        found = found[: observing.MOST_COLLECTIONS]
        counted = set()
        for name in found:
            with contextlib.suppress(NotFound):
                observing.DOCUMENTS.labels(name).set(await self._cluster.count(names.read_alias(name)))
                counted.add(name)
        for gone in self._counted - counted:
            with contextlib.suppress(KeyError):
                observing.DOCUMENTS.remove(gone)
        self._counted = counted
        moving = await self._reindexes(found, aliases)
        for name, progress in moving.items():
            observing.REINDEX.labels(name).set(progress)
        for ended in self._moving - set(moving):
            with contextlib.suppress(KeyError):
                observing.REINDEX.remove(ended)
        self._moving = set(moving)
        observing.CENSUS_AGE.set(time.time())

    async def _reindexes(
        self, collections: list[str], aliases: Mapping[str, Mapping[str, Json]]
    ) -> Mapping[str, float]:
        if not collections:
            return {}
        try:
            entries = await self._cluster.mget(
                turns.STATE_INDEX,
                [turns.state_id(name, "reindex") for name in collections],
                timeout_s=self._cluster.request_timeout_s,
            )
        except NotFound:
            return {}
        progress: dict[str, float] = {}
        for name, entry in zip(collections, entries, strict=True):
            if entry.get("found"):
                state = entry["_source"]["state"]
                # What was written down of an earlier collection of this name is no progress of this one.
                if state["phase"] != "copying" or state["source"] not in aliases[names.read_alias(name)]:
                    continue
                progress[name] = (
                    1.0 if state["copied"] else state["done"] / max(1, state["total"], state["done"])
                )
        return progress


async def _checked(check: Callable[[], Awaitable[Json]]) -> Json:
    begun = time.monotonic()
    told: Json
    try:
        async with asyncio.timeout(CHECK_WITHIN_S):
            told = {"status": "ok", **await check()}
    except TimeoutError:
        told = {"status": "failed", "reason": f"no answer within {CHECK_WITHIN_S:g} s"}
    except HalflifeError as error:
        told = {"status": "failed", "reason": error.detail, "remedy": error.remedy}
    told["took_ms"] = round((time.monotonic() - begun) * 1000)
    return told
