"""The queue of touches alone: what happens to those that are being written when it is closed or broken off."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from app.answers import BulkResult
from app.touches import TouchQueue

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Writer:
    """Takes touches, each time once it may."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.written: list[dict[str, datetime]] = []

    async def __call__(self, instants: Mapping[str, datetime], collection: Any, within: Any) -> BulkResult:
        self.begun.set()
        await self.may.wait()
        if "broken" in instants:
            raise RuntimeError("broken")
        self.written.append(dict(instants))
        return BulkResult(items=[], failed=0)


def queue_of(writer: Writer, **ids: list[str]) -> TouchQueue:
    """A queue that writes soon, in which these ids of these collections wait."""
    queue = TouchQueue(writer, interval_s=0.001)
    for name, those in ids.items():
        queue.add(named(name), those, NOON)
    return queue


def named(name: str) -> Any:
    """A collection of this name, of which the queue asks no more."""
    return SimpleNamespace(name=name)


async def test_what_is_being_written_when_the_queue_closes_is_written() -> None:
    writer = Writer()
    queue = queue_of(writer, a=["1", "2"])
    await queue.start()
    await writer.begun.wait()
    queue.add(named("b"), ["3"], NOON)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    writer.may.set()
    await closing
    assert writer.written == [{"1": NOON, "2": NOON}, {"3": NOON}]
    assert queue.waiting == 0


async def test_a_close_that_is_given_up_ends_the_queue_and_forgets_nothing() -> None:
    writer = Writer()
    queue = queue_of(writer, a=["1", "2"], b=["3"])
    await queue.start()
    await writer.begun.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await queue.close()
    assert queue.waiting == 3
    assert [task for task in asyncio.all_tasks() if task.get_name() == "touches"] == []
    writer.may.set()
    await queue.flush()
    assert sorted(id_ for each in writer.written for id_ in each) == ["1", "2", "3"]


async def test_what_goes_wrong_with_one_collection_costs_no_other() -> None:
    writer = Writer()
    writer.may.set()
    queue = queue_of(writer, a=["1"], b=["broken"], c=["2"])
    with pytest.raises(RuntimeError):
        await queue.flush()
    await queue.flush()
    assert sorted(id_ for each in writer.written for id_ in each) == ["1", "2"]
    assert queue.waiting == 0
