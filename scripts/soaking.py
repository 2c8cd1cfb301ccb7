"""Own `./scripts/soak`: reads and writes for long, with faults now and then, and whether anything creeps.

    ./scripts/soak                   30 minutes
    ./scripts/soak --minutes 3       shorter

Three things are measured: how much memory the service gains in a minute (a line through its samples, the first fifth
left out, while caches fill), how many requests fail outside the windows of faults, and how many connections stay open
at the end. Ends with `slope=… errors=… connections=…`; the exit code is 0 where each is within its target.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.faulty import misbehaving
from scripts.rig import Answer, Load, Rig, percentile, resident_mb, seconds, shown

MOST_SLOPE_MB: float = 1.0
"""A minute. 30 minutes at this rate are 30 MB, below what one large bulk takes for a moment."""
MOST_ERRORS: float = 0.001
MOST_CONNECTIONS = 60
"""The client keeps 20 to the node and some to the far ends; what grows shows far beyond that in half an hour."""
CALM_S = 8.0
"""How long after a fault its errors may still arrive: an open breaker probes every two seconds."""
FAULT_EVERY_S = 60.0


@dataclass
class Soak:
    """What a soak measured."""

    minutes: float = 0.0
    samples: list[tuple[float, float]] = field(default_factory=list)
    """(minutes since the begin, MiB)."""
    windows: list[tuple[float, float]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    connections: int = 0
    lost: int = 0
    acknowledged: int = 0

    @property
    def slope(self) -> float:
        """MiB a minute, by least squares over all but the first fifth."""
        return slope_of([(x, y) for x, y in self.samples if x >= self.minutes / 5])

    @property
    def outside(self) -> list[Answer]:
        """Answers of requests that no fault overlapped."""
        return [
            a
            for a in self.answers
            if not any(a.at <= end and a.at + a.seconds >= begin for begin, end in self.windows)
        ]

    @property
    def errors(self) -> float:
        """Share of those that failed."""
        outside = self.outside
        return sum(answer.status != 200 for answer in outside) / max(1, len(outside))

    @property
    def sound(self) -> bool:
        """Tell whether each measure is within its target."""
        return (
            self.slope <= MOST_SLOPE_MB
            and self.errors <= MOST_ERRORS
            and self.connections <= MOST_CONNECTIONS
            and self.lost == 0
        )

    def line(self) -> str:
        """Return the last line of a run."""
        return (
            f"slope={self.slope:.2f} errors={self.errors:.5f} connections={self.connections} lost={self.lost}"
        )


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line; 0 of fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


async def soak(rig: Rig, minutes: float, *, say: Callable[[str], None]) -> Soak:
    """Ask and write for so long, with a fault a minute, and return what was measured."""
    found = Soak(minutes=minutes)
    begun = time.monotonic()
    until = begun + minutes * 60

    async def variety() -> Answer:
        kinds: list[dict[str, Any]] = [
            {}, {"decay": {"half_life": "30d"}}, {"rerank": {"candidates": 20}}, {"mmr": {"lambda": 0.7}},
            {"explain": True}, {"routes": [{"kind": "text"}]}, {"top_k": 50}, {"touch": True},
            {"dedup": {"threshold": 0.95}},
        ]  # fmt: skip
        more = rig.random.choice(kinds)
        return await rig.search(**more)

    async def sample() -> None:
        while True:
            found.samples.append(((time.monotonic() - begun) / 60, resident_mb(rig.pid)))
            await asyncio.sleep(2)

    async def faults() -> None:
        pause = min(FAULT_EVERY_S, minutes * 60 / 4)
        while time.monotonic() + pause < until - CALM_S:
            await asyncio.sleep(pause)
            name, fault = rig.random.choice(list(_FAULTS.items()))
            since = time.monotonic()
            await fault(rig)
            found.windows.append((since, time.monotonic() + CALM_S))
            say(f"  {(since - begun) / 60:.1f} min: {name}; {resident_mb(rig.pid):.0f} MB")

    async with Load(rig) as load:
        load.read(3, variety, pause_s=0.05)
        load.write(1, name="soak", pause_s=0.5)
        tasks = [asyncio.create_task(sample()), asyncio.create_task(faults())]
        try:
            await asyncio.sleep(max(0.0, until - time.monotonic()))
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    found.answers = [*load.answers, *load.writes]
    found.acknowledged = len(load.acknowledged)
    missing, other = await rig.stored(load.acknowledged)
    found.lost = missing + other
    await asyncio.sleep(6)  # idle connections are given up after 4 s
    found.connections = await asyncio.to_thread(_connections, rig.pid)
    return found


async def _slow_embedder(rig: Rig) -> None:
    async with misbehaving(rig.embeddings, mode="hang"):
        await asyncio.sleep(5)


async def _refusing_node(rig: Rig) -> None:
    rig.proxy.refuse = 0.5
    await asyncio.sleep(5)
    rig.proxy.refuse = 0.0


async def _stopped_node(rig: Rig) -> None:
    await asyncio.to_thread(rig.node.pause)
    await asyncio.sleep(3)
    await asyncio.to_thread(rig.node.resume)


async def _garbage(rig: Rig) -> None:
    async with misbehaving(rig.embeddings, mode="garbage"), misbehaving(rig.reranks, mode="garbage"):
        await asyncio.sleep(5)


_FAULTS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    "the embedder hangs": _slow_embedder,
    "the node refuses half": _refusing_node,
    "the node is stopped": _stopped_node,
    "embedder and reranker answer garbage": _garbage,
}


def _connections(pid: int) -> int:
    """Return how many sockets a process has open, listening one included; 0 where the system does not tell."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += str(entry.readlink()).startswith("socket:")
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak; the last line is what was measured, and 0 is returned where it is within the targets."""
    parser = argparse.ArgumentParser(
        prog="./scripts/soak",
        description="Read and write for long, with faults now and then; measure what creeps.",
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    given = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    async def work(folder: Path) -> Soak:
        async with Rig(folder, seed=given.seed, say=say) as rig:
            return await soak(rig, given.minutes, say=say)

    with contextlib.ExitStack() as held:
        folder = given.keep or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="halflife-soak-")))
        found = asyncio.run(work(folder.absolute()))
    outside = found.outside
    p95 = percentile(seconds(outside), 0.95)
    say(
        f"{found.minutes:g} minutes, {len(found.answers)} requests, {len(found.windows)} faults; outside them "
        f"{len(outside)} requests, p95 {p95:.2f} s, {shown(_statuses(outside))}; {found.acknowledged} documents acknowledged; "
        f"memory {found.samples[0][1]:.0f} to {found.samples[-1][1]:.0f} MB"
    )
    say(
        f"targets: slope ≤ {MOST_SLOPE_MB:g} MB a minute, errors ≤ {MOST_ERRORS:g}, connections ≤ {MOST_CONNECTIONS}, lost 0"
    )
    say(found.line())
    return 0 if found.sound else 1


def _statuses(answers: Sequence[Answer]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for answer in answers:
        counts[answer.status] = counts.get(answer.status, 0) + 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
