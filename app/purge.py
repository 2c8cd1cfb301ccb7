"""Tombstones that are old enough not to be needed any more, really deleted.

A tombstone keeps a late repeat of an older write from bringing its document back, so it must outlive the longest that
any client tries again. Refuses to run while a reindex is under way: the old index would keep what the new one lost.
"""

import contextlib
import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from app import copying, fields, moves
from app.copying import patiently
from app.elastic import Cluster
from app.errors import Conflict, HalflifeError, InvalidRequest, NotFound
from app.moves import Ledger, State
from app.times import format_instant

LEAST_AGE: Final = timedelta(hours=1)
DEFAULT_AGE: Final = timedelta(days=7)
PAGE: Final = 500


class Purger:
    """Purges one collection; safe to stop at any moment, and to run again."""

    def __init__(
        self,
        cluster: Cluster,
        collection: str,
        *,
        now: Callable[[], datetime],
        report: Callable[[int], None] = lambda purged: None,
        patience_s: float = 60.0,
    ) -> None:
        self._cluster = cluster
        self._name = collection
        self._now = now
        self._report = report
        self._patience_s = patience_s

    async def count(self, older_than: timedelta = DEFAULT_AGE) -> int:
        """Return how many tombstones would be purged. Raises NotFound without the collection."""
        index = await self._index()
        await self._cluster.refresh(index)
        return await self._cluster.count(index, self._query(older_than))

    async def purge(self, older_than: timedelta = DEFAULT_AGE) -> int:
        """Delete the tombstones written longer ago than that, and return how many were there.

        Raises InvalidRequest for an age below an hour, Conflict while a reindex is under way or an index is kept for
        its rollback.
        """
        query = self._query(older_than)
        index = await self._index()
        ledger = Ledger(
            self._cluster, self._name, owner=secrets.token_hex(8), now=self._now, kind="purge",
            budget_s=self._patience_s,
        )  # fmt: skip
        if (found := await ledger.load()) is not None and found.under_way and not await ledger.silent():
            raise Conflict(
                f"tombstones of `{self._name}` are being purged already",
                remedy="wait until that is over, and run it again if some are left",
            )
        # Written before it looks: a reindex that begins at the same time does so too, and then looks for this one.
        await ledger.begin(State(self._name, "copying", ledger.owner, index, "", started_at=ledger.stamp()))
        try:
            async with ledger.heartbeat():
                purged = await self._purge(ledger, index, query)
        except BaseException:
            # What went wrong is told, not that this could not be noted either.
            with contextlib.suppress(HalflifeError):
                await ledger.save(phase="finished")
            raise
        await ledger.save(phase="finished")
        return purged

    async def _purge(self, ledger: Ledger, index: str, query: dict[str, Any]) -> int:
        purged = 0
        # Else the cluster refuses, for a minute, to write these ids anew under lower versions. Nobody needs that
        # memory: a late repeat of an older write is what the tombstones' age rules out.
        await patiently(
            lambda: self._cluster.put_settings(index, {"index.gc_deletes": "0s"}),
            budget_s=self._patience_s,
            cluster=self._cluster,
        )
        while True:
            await self._refuse_while_moving(index)
            ledger.check()
            await patiently(
                lambda: self._cluster.refresh(index), budget_s=self._patience_s, cluster=self._cluster
            )
            hits = await patiently(
                lambda: self._page(index, query), budget_s=self._patience_s, cluster=self._cluster
            )
            if not hits:
                return purged
            outcomes = await patiently(
                partial(
                    self._cluster.erase,
                    index,
                    [(hit["_id"], hit["_seq_no"], hit["_primary_term"]) for hit in hits],
                ),
                budget_s=self._patience_s,
                cluster=self._cluster,
            )
            gone = sum(outcome.fate == "applied" for outcome in outcomes)
            for outcome in outcomes:
                # A conflict: it is no longer that tombstone, so it is not ours to purge.
                if outcome.fate not in ("applied", "superseded"):
                    error = outcome.error("purging tombstones")
                    assert error is not None
                    raise error
            purged += gone
            self._report(purged)

    async def _refuse_while_moving(self, index: str) -> None:
        reindex = await Ledger(
            self._cluster, self._name, owner="", now=self._now, budget_s=self._patience_s
        ).load()
        if reindex is not None and reindex.under_way and index in (reindex.source, reindex.target):
            raise Conflict(
                f"a reindex of `{self._name}` is under way or can still be rolled back",
                remedy="end it with `halflife reindex --finish`, --rollback or --abort, then purge",
            )

    async def _index(self) -> str:
        standing = await patiently(
            lambda: moves.standing(self._cluster, self._name),
            budget_s=self._patience_s,
            cluster=self._cluster,
        )
        if standing.live is None:
            raise NotFound(f"there is no collection `{self._name}`")
        return standing.live

    def _query(self, older_than: timedelta) -> dict[str, Any]:
        if older_than < LEAST_AGE:
            raise InvalidRequest(
                "tombstones younger than an hour may still be needed: a client that tries again could bring a deleted "
                "document back",
                remedy="give an age of an hour or more",
            )
        cutoff = format_instant(self._now() - older_than)
        return {
            "bool": {
                "filter": [{"term": {fields.DELETED: True}}, {"range": {fields.INDEXED_AT: {"lt": cutoff}}}]
            }
        }

    async def _page(self, index: str, query: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"size": PAGE, "query": query, "_source": False, "seq_no_primary_term": True, "sort": ["_doc"]}
        answer = await self._cluster.search(
            index, body, timeout_s=self._cluster.request_timeout_s, doing="looking for tombstones"
        )
        return list(copying.complete(answer, "looking for tombstones")["hits"]["hits"])
