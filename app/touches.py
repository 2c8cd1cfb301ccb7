"""Reads that refresh a memory: collected, and written in the background."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from app.answers import BulkResult
from app.collection import Collection
from app.errors import HalflifeError, Unavailable
from app.filters import Condition

log = logging.getLogger("halflife")


@dataclass(eq=False, slots=True)
class _Touches:
    """What one caller read in one collection and is not noted there yet."""

    collection: Collection
    within: Condition | None
    instants: dict[str, datetime] = field(default_factory=dict)


class TouchQueue:
    """Collects touches and writes them later, each document once with its latest instant.

    Touches are worth little: past `most` waiting documents new ones are dropped and counted, and what could not be
    written when the queue closes is lost.
    """

    def __init__(
        self,
        touch: Callable[[Mapping[str, datetime], Collection, Condition | None], Awaitable[BulkResult]],
        *,
        interval_s: float = 1.0,
        most: int = 10_000,
    ) -> None:
        """`touch` writes them, as `Indexer.touch` does."""
        self._touch = touch
        self._interval_s = interval_s
        self._most = most
        self._waiting: dict[tuple[str, str], _Touches] = {}
        self._task: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self.dropped = 0
        self.failed = 0

    @property
    def waiting(self) -> int:
        """How many documents' touches wait to be written."""
        return sum(len(entry.instants) for entry in self._waiting.values())

    def add(
        self,
        collection: Collection,
        ids: Iterable[str],
        at: datetime,
        *,
        tag: str = "",
        within: Condition | None = None,
    ) -> int:
        """Note that these documents were read at that moment, by the caller of this tag who is kept `within`.

        Returns how many of them were taken; the others are dropped.
        """
        taken = 0
        entry = self._waiting.setdefault((collection.name, tag), _Touches(collection, within))
        entry.within = within
        waiting = entry.instants
        room = self._most - self.waiting
        for id_ in ids:
            if id_ in waiting:
                waiting[id_] = max(waiting[id_], at)
                taken += 1
            elif room > 0:
                waiting[id_] = at
                room -= 1
                taken += 1
            else:
                self.dropped += 1
        return taken

    async def start(self) -> None:
        """Write what is waiting every `interval_s` from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="touches")

    async def flush(self) -> None:
        """Write what is waiting now. Never raises for the cluster's troubles: those touches wait for the next time.

        Broken off, whatever was not written waits on: touching a document twice with one instant changes nothing.
        """
        async with self._flushing:
            waiting, self._waiting = self._waiting, {}
            try:
                while waiting:
                    (_, tag), entry = waiting.popitem()
                    await self._write(tag, entry)
            finally:
                for (_, tag), entry in waiting.items():
                    self._put_back(tag, entry, entry.instants)

    async def _write(self, tag: str, entry: "_Touches") -> None:
        instants = entry.instants
        if not instants:
            return
        try:
            result = await self._touch(instants, entry.collection, entry.within)
        except Unavailable:
            self._put_back(tag, entry, instants)
        except asyncio.CancelledError:
            self._put_back(tag, entry, instants)
            raise
        except HalflifeError:
            self.failed += len(instants)
        else:
            lost = [item.id for item in result.items if item.status == "failed" and item.id is not None]
            self._put_back(tag, entry, {id_: instants[id_] for id_ in lost})

    async def close(self) -> None:
        """Stop, once what is being written is, and after one more attempt to write what is waiting."""
        task, self._task = self._task, None
        try:
            await self.flush()
        finally:
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def _put_back(self, tag: str, entry: "_Touches", instants: Mapping[str, datetime]) -> None:
        for id_, at in instants.items():
            self.add(entry.collection, [id_], at, tag=tag, within=entry.within)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.flush()
            except Exception:
                log.exception("touches could not be written")
