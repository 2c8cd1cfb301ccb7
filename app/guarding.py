"""What every call to a dependency passes: a bounded pool, a circuit breaker and a budget for retries.

One `Guard` per dependency and process, so that one that hangs holds its own places only. Knows no dependency's
protocol: the doors say how a call ended, and what their error is called.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from app import observing
from app.breaker import Breaker, Outcome, RetryBudget
from app.errors import HalflifeError

HANG_S: Final = 1.0
"""A caller that gave up after waiting this long says that the dependency hangs, if nobody was answered meanwhile; one in more of a hurry says nothing."""

_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


@contextmanager
def repeating(again: bool = True) -> Iterator[None]:
    """Mark the calls of the block as repeated ones, for which a turn was taken: they earn no further retries."""
    before = _repeating.set(again)
    try:
        yield
    finally:
        _repeating.reset(before)


class Call:
    """One call under way: the door sets how it ended.

    One that was given up keeps "unknown": whether that is a failure depends on the others. `late` says that the door's
    own timeout ended it, however short that is.
    """

    __slots__ = ("_silent", "late", "outcome")

    def __init__(self, silent: Callable[[], bool] | None = None) -> None:
        self.outcome: Outcome = "unknown"
        self.late = False
        self._silent = silent

    @property
    def silent(self) -> bool:
        """Whether the dependency has answered nobody since this call began; a busy one answers somebody."""
        return self._silent is None or self._silent()


class Guard:
    """Bounds and watches the calls to one dependency. Bound to one event loop."""

    def __init__(
        self,
        dependency: str,
        *,
        places: int,
        error: Callable[[str, float], HalflifeError],
        most_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`error` makes the failure of a call that was not sent, of what is wrong and of seconds to wait.

        `most_waiting`: calls beyond those in the pool that may wait; None leaves only their time as the bound.
        """
        self.dependency = dependency
        self.breaker = Breaker(clock)
        self.budget = RetryBudget(clock)
        self.places = places
        self.waiting = 0
        self.used = 0
        self.answered_at: float | None = None
        """The clock's time of the last call that was answered."""
        self._heard_at: float | None = None
        self._wanting = 0
        self._clock = clock
        self._error = error
        self._most_waiting = most_waiting
        self._pool = asyncio.Semaphore(places)
        self._pool_used = observing.POOL_USED.labels(dependency)
        self._pool_waiting = observing.POOL_WAITING.labels(dependency)
        observing.POOL_SIZE.labels(dependency).set(places)
        observing.breaker_state(dependency, "closed")

    def check(self) -> None:
        """Raise the door's error while the breaker admits nothing."""
        if self.breaker.wait_s > 0:
            raise self._open()

    @asynccontextmanager
    async def call(self, *, wait_s: float, retry: bool = False) -> AsyncIterator[Call]:
        """Hold a place for one call; the block sets `outcome`. Raises the door's error where it can't be sent.

        Waits at most `wait_s` for a place. A block that is left by cancellation, or without an outcome, after
        `HANG_S` counts as failed if no other call was answered since it began.
        """
        self.check()
        await self._enter(wait_s)
        try:
            admitted = self.breaker.admit()
            if admitted is None:
                raise self._open()
            if retry or _repeating.get():
                observing.RETRIES.labels(self.dependency).inc()
            else:
                self.budget.offer()
            begun = self._clock()
            call = Call(lambda: self.silent_since(begun))
            try:
                yield call
            finally:
                took = self._clock() - begun
                if call.outcome == "unknown" and (call.late or took >= HANG_S) and call.silent:
                    call.outcome = "failed"
                self._settle(admitted, call.outcome, took)
        finally:
            self._leave()

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()

    def silent_since(self, begun: float) -> bool:
        """Whether the dependency has answered nobody, a refusal included, since that time of the clock."""
        return self._heard_at is None or self._heard_at <= begun

    async def turn_to_retry(self, *, until: float) -> bool:
        """Wait until a retry may go, at most until that time of the event loop's clock; return whether it may.

        As many may wait as there are places, and more are told no at once: a queue without end would hold every request
        there is for its whole patience, and send them all when the dependency is back.
        """
        if self._wanting >= self.places:
            observing.TURNED_AWAY.labels(self.dependency, "retries").inc()
            return False
        loop = asyncio.get_running_loop()
        self._wanting += 1
        try:
            while True:
                wait_s = self.breaker.wait_s
                if wait_s <= 0:
                    if self.budget.take():
                        return True
                    wait_s = 0.25
                left = until - loop.time()
                if left <= 0:
                    return False
                await asyncio.sleep(min(left, wait_s * random.uniform(1.0, 1.5)))  # noqa: S311 - jitter, no secret
        finally:
            self._wanting -= 1

    def told(self) -> dict[str, str | int]:
        """Return the state as readiness tells it."""
        return {
            "breaker": self.breaker.state,
            "pool": self.places,
            "used": self.used,
            "waiting": self.waiting,
        }

    async def _enter(self, wait_s: float) -> None:
        if self._pool.locked():
            if self._most_waiting is not None and self.waiting >= self._most_waiting:
                raise self._full(f"{self.places} calls are under way and {self.waiting} wait already")
            self.waiting += 1
            self._pool_waiting.inc()
            try:
                async with asyncio.timeout(wait_s):
                    await self._pool.acquire()
            except TimeoutError:
                raise self._full(f"{self.places} calls were under way for {wait_s:g} s") from None
            finally:
                self.waiting -= 1
                self._pool_waiting.dec()
        else:
            await self._pool.acquire()
        self.used += 1
        self._pool_used.inc()

    def _leave(self) -> None:
        self.used -= 1
        self._pool_used.dec()
        self._pool.release()

    def _settle(self, admitted: int, outcome: Outcome, took: float) -> None:
        opened, was_closed = self.breaker.opened, self.breaker.state == "closed"
        self.breaker.settle(admitted, outcome)
        if not was_closed and self.breaker.state == "closed":
            # It is back: who waited for that may go, each once, without saving up for it.
            self.budget.grant(self._wanting)
        if outcome in ("ok", "refused"):
            self._heard_at = self._clock()
        if outcome == "ok":
            self.answered_at = self._heard_at
        observing.CALLS.labels(self.dependency, outcome).observe(took)
        if self.breaker.opened > opened:
            observing.OPENED.labels(self.dependency).inc()
        observing.breaker_state(self.dependency, self.breaker.state)

    def _full(self, what: str) -> HalflifeError:
        observing.TURNED_AWAY.labels(self.dependency, "full").inc()
        return self._error(what, 1.0)

    def _open(self) -> HalflifeError:
        observing.TURNED_AWAY.labels(self.dependency, "open").inc()
        return self._error("it has not answered of late and is left alone for a moment", self.breaker.wait_s)
