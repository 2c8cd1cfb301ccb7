"""The guard around a dependency's calls: places, waits, the breaker's leave, turns to retry."""

import asyncio
import contextlib
from functools import partial

import pytest

from app import guarding, observing
from app.copying import patiently
from app.elastic import Cluster
from app.errors import ClusterUnavailable
from app.guarding import Guard, repeating


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def guard_of(clock: Clock, *, places: int = 2, **options) -> Guard:
    return Guard(
        "test",
        places=places,
        error=lambda what, wait: ClusterUnavailable(what, retry_after_s=wait),
        clock=clock,
        **options,
    )


async def hold(guard: Guard, until: asyncio.Event, outcome="ok") -> None:
    async with guard.call(wait_s=5) as call:
        await until.wait()
        call.outcome = outcome


async def test_a_full_pool_makes_wait_and_then_refuses(clock):
    guard = guard_of(clock)
    release = asyncio.Event()
    holding = [asyncio.create_task(hold(guard, release)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (guard.used, guard.waiting) == (2, 0)
    with pytest.raises(ClusterUnavailable, match="2 calls were under way for"):
        async with guard.call(wait_s=0.01):
            pass
    waiting = asyncio.create_task(hold(guard, release))
    await asyncio.sleep(0)
    assert guard.waiting == 1
    release.set()
    await asyncio.gather(*holding, waiting)
    assert (guard.used, guard.waiting) == (0, 0)


async def test_more_than_may_wait_are_refused_at_once(clock):
    guard = guard_of(clock, most_waiting=1)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(guard, release)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ClusterUnavailable, match="1 wait already"):
        async with guard.call(wait_s=60):
            pass
    release.set()
    await asyncio.gather(*tasks)


async def test_an_open_breaker_sends_nothing_and_a_probe_closes_it(clock):
    guard = guard_of(clock)
    for _ in range(5):
        async with guard.call(wait_s=1) as call:
            call.outcome = "failed"
    with pytest.raises(ClusterUnavailable, match="left alone") as refused:
        async with guard.call(wait_s=1):
            pass
    assert refused.value.retry_after_s == 1.0
    clock.now += 1.0
    async with guard.call(wait_s=1) as call:
        call.outcome = "ok"
    assert guard.told() == {"breaker": "closed", "pool": 2, "used": 0, "waiting": 0}


async def test_a_caller_that_left_after_a_long_wait_tells_of_a_hang(clock):
    guard = guard_of(clock)

    async def left(after_s: float) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async with guard.call(wait_s=1):
                clock.now += after_s
                raise asyncio.CancelledError

    for _ in range(20):
        await left(guarding.HANG_S / 2)
    assert guard.told()["breaker"] == "closed"
    for _ in range(5):
        await left(guarding.HANG_S)
    assert guard.told()["breaker"] == "open"


@pytest.mark.parametrize("outcome", ["ok", "refused"])
async def test_calls_given_up_while_others_are_answered_open_nothing(clock, outcome):
    guard = guard_of(clock, places=9)
    never = asyncio.Event()

    async def given_up(answered: bool) -> None:
        waiting = [asyncio.create_task(hold(guard, never)) for _ in range(8)]
        await asyncio.sleep(0)
        clock.now += guarding.HANG_S / 2
        if answered:
            async with guard.call(wait_s=1) as call:
                call.outcome = outcome
        clock.now += guarding.HANG_S
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    for _ in range(3):
        await given_up(answered=True)
    assert guard.told()["breaker"] == "closed"
    await given_up(answered=False)
    assert guard.told()["breaker"] == "open"


async def test_a_doors_own_short_timeout_fails_unless_others_are_answered(clock):
    guard = guard_of(clock)

    async def late(answered: bool) -> None:
        async with guard.call(wait_s=1) as call:
            clock.now += 0.1
            if answered:
                async with guard.call(wait_s=1) as other:
                    other.outcome = "ok"
            call.late = True

    for _ in range(9):
        await late(answered=True)
    assert guard.told()["breaker"] == "closed"
    for _ in range(5):
        await late(answered=False)
    assert guard.told()["breaker"] == "open"


async def test_turns_come_from_the_budget_and_repeated_calls_earn_none(clock):
    guard = guard_of(clock)
    soon = asyncio.get_running_loop().time()
    turns = [await guard.turn_to_retry(until=soon) for _ in range(9)]
    assert turns == [True] * 8 + [False]
    for _ in range(9):
        with repeating():
            async with guard.call(wait_s=1) as call:
                call.outcome = "ok"
    assert not await guard.turn_to_retry(until=soon)
    for _ in range(11):  # 11 × 0.1 > 1
        async with guard.call(wait_s=1) as call:
            call.outcome = "ok"
    assert await guard.turn_to_retry(until=soon)


async def test_who_may_not_wait_for_a_cluster_that_is_away_is_told_when_to_come_back(clock):
    cluster = Cluster.connect(urls=["http://127.0.0.1:9"], connections=2, request_timeout_s=60)
    cluster.guard = guard_of(clock)
    try:
        assert [await cluster.turn_to_retry(until=0) for _ in range(8)] == [True] * 8
        asked = {
            asyncio.create_task(
                patiently(partial(cluster.refresh, "halflife-x"), budget_s=600.0, cluster=cluster)
            )
            for _ in range(6)
        }
        waiting = asked
        while len(waiting) > 2:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # The clock stands still, so these two wait for their turn to retry, which will not come.
        assert cluster.guard._wanting == len(waiting) == 2
        for task in waiting:
            task.cancel()
        told = await asyncio.gather(*(asked - waiting), return_exceptions=True)
        await asyncio.wait(waiting)
    finally:
        await cluster.close()
    for error in told:
        assert isinstance(error, ClusterUnavailable)
        assert error.retry_after_s


async def test_all_who_waited_for_a_recovery_go_then_and_no_more_wait_than_there_are_places(clock):
    guard = guard_of(clock, places=30)
    until = asyncio.get_running_loop().time() + 20
    assert [await guard.turn_to_retry(until=0) for _ in range(8)] == [True] * 8
    for _ in range(5):
        async with guard.call(wait_s=1) as call:
            call.outcome = "failed"
    waiting = [asyncio.create_task(guard.turn_to_retry(until=until)) for _ in range(30)]
    await asyncio.sleep(0)
    told = observing.TURNED_AWAY.labels("test", "retries")
    before = told._value.get()
    assert not await guard.turn_to_retry(until=until)
    assert told._value.get() == before + 1
    clock.now += 1.0
    async with guard.call(wait_s=1) as call:
        call.outcome = "ok"
    assert all(await asyncio.gather(*waiting))
