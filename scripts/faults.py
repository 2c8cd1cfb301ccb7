"""Own `./scripts/faults`: the table of faults, each brought about on a real node, with what is required and measured.

    ./scripts/faults                    all rows (about 15 minutes)
    ./scripts/faults --only node        the rows whose name begins so; may be given several times
    ./scripts/faults --seed 7           another order of chance
    ./scripts/faults --markdown FILE    the table as docs/faults.md has it
    ./scripts/faults --list             the rows

Ends with `rows=N failed=M`; the exit code is 0 where no row missed its target. All is on loopback and bounded.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import platform
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts import rig as rigs
from scripts.faulty import misbehaving
from scripts.rig import (
    COLLECTION,
    EMBED_WITHIN_S,
    HOST,
    RERANK_WITHIN_S,
    STORED,
    Answer,
    Load,
    Rig,
    exchange,
    memory_of,
    percentile,
    post,
    problem_of,
    seconds,
    shown,
)

Json = dict[str, Any]
DOCUMENTS: Final = f"/v1/collections/{COLLECTION}/documents"
PATIENCE_S: Final = 20.0
"""How long a write is tried, the service's own bound; the last try may take one request's time more."""
BUDGET_S: Final = 10.0
EXPECTED: Final = (200, 503, 504)
"""What a caller may be answered while something is away."""
ROW_WITHIN_S: Final = 1200.0
GRACE_S: Final = 2.0
"""For a machine with few and busy cores, on top of the service's own bounds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    row: str
    required: str
    target: str
    measured: str
    ok: bool


Row = Callable[[Rig], AsyncIterator[Finding]]
ROWS: Final[dict[str, Row]] = {}


def row(name: str) -> Callable[[Row], Row]:
    """Put a function's findings into the table under this name."""

    def enter(work: Row) -> Row:
        ROWS[name] = work
        return work

    return enter


# --- the node ----------------------------------------------------------------------------------------------------------


@row("node-killed")
async def node_killed(rig: Rig) -> AsyncIterator[Finding]:
    """SIGKILL of the node, ten times, under reads and writes."""
    back: list[float] = []
    async with Load(rig) as load:
        load.read(4, rig.search, pause_s=0.05)
        load.write(3, name="killed", pause_s=0.05)
        for _ in range(10):
            await asyncio.sleep(rig.random.uniform(1.0, 2.5))
            await asyncio.to_thread(rig.node.kill)
            await asyncio.sleep(rig.random.uniform(0.1, 1.5))
            await asyncio.to_thread(rig.node.start)
            await _recovered(rig)
            back.append(
                await rig.until(lambda: _answers(rig), within_s=60, what="an answer after the restart")
            )
    missing, other = await rig.stored(load.acknowledged)
    strange = {status: count for status, count in load.statuses.items() if status not in EXPECTED}
    slowest = max(seconds(load.answers)), max(seconds(load.writes))
    yield Finding(
        "node-killed", "no acknowledged write is lost; callers get 200, or 503 or 504 with Retry-After",
        "10 kills, 0 lost, 0 other statuses",
        f"{len(load.acknowledged)} acknowledged, {missing} lost, {other} changed; {shown(load.statuses)}",
        not missing and not other and not strange and len(load.acknowledged) > 100 and _told_to_wait(load),
    )  # fmt: skip
    yield Finding(
        "node-killed", "no answer takes longer than its budget",
        f"searches ≤ {BUDGET_S + GRACE_S:g} s, writes ≤ {PATIENCE_S + BUDGET_S + GRACE_S:g} s",
        f"searches {slowest[0]:.1f} s, writes {slowest[1]:.1f} s",
        slowest[0] <= BUDGET_S + GRACE_S and slowest[1] <= PATIENCE_S + BUDGET_S + GRACE_S,
    )  # fmt: skip
    yield Finding(
        "node-killed", "the service recovers by itself", "≤ 8 s after its shards are back", f"at most {max(back):.1f} s",
        max(back) <= 8,
    )  # fmt: skip


async def _recovered(rig: Rig) -> None:
    """Wait until the node itself has the collection's shards back: what comes after that is the service's time."""
    import httpx2

    async with httpx2.AsyncClient(trust_env=False) as client:
        for _ in range(60):
            with contextlib.suppress(httpx2.HTTPError):
                where = f"{rig.node.url}/_cluster/health/halflife-{COLLECTION}"
                told = await client.get(
                    where, params={"wait_for_status": "yellow", "timeout": "5s"}, timeout=10
                )
                if told.status_code == 200:
                    return
            await asyncio.sleep(0.2)


async def _answers(rig: Rig) -> bool:
    return (await rig.text_search()).status == 200


def _told_to_wait(load: Load) -> bool:
    """Tell whether every 503 and 504 said when to come again."""
    return all("retry-after" in a.headers for a in (*load.answers, *load.writes) if a.status in (503, 504))


@row("node-stopped")
async def node_stopped(rig: Rig) -> AsyncIterator[Finding]:
    """SIGSTOP of the node for 15 s: it holds its connections and answers nothing."""
    alive: list[Answer] = []
    red_after = math.nan
    async with Load(rig) as load:
        load.read(4, rig.search, pause_s=0.05)
        load.write(2, name="stopped", pause_s=0.05)
        await asyncio.sleep(1.5)
        await asyncio.to_thread(rig.node.pause)
        stopped = time.monotonic()
        try:
            while time.monotonic() - stopped < 15:
                alive.append(await rig.ask("GET", "/livez"))
                if math.isnan(red_after) and (await rig.ask("GET", "/readyz")).status == 503:
                    red_after = time.monotonic() - stopped
                await asyncio.sleep(0.3)
        finally:
            await asyncio.to_thread(rig.node.resume)
        back = await rig.until(lambda: _answers(rig), within_s=60, what="an answer after SIGCONT")
        await asyncio.sleep(1)
    missing, other = await rig.stored(load.acknowledged)
    strange = {status: count for status, count in load.statuses.items() if status not in EXPECTED}
    slowest = max(seconds(load.answers))
    yield Finding(
        "node-stopped", "/livez answers at once, /readyz turns red", "livez ≤ 1 s, red ≤ 5 s",
        f"livez {max(seconds(alive)):.2f} s, red after {red_after:.1f} s", max(seconds(alive)) <= 1 and red_after <= 5,
    )  # fmt: skip
    yield Finding(
        "node-stopped", "answers come within their budget, with 200, 503 or 504; nothing acknowledged is lost",
        f"searches ≤ {BUDGET_S + GRACE_S:g} s, 0 lost",
        f"searches {slowest:.1f} s; {len(load.acknowledged)} acknowledged, {missing} lost; {shown(load.statuses)}",
        slowest <= BUDGET_S + GRACE_S and not missing and not other and not strange,
    )  # fmt: skip
    yield Finding(
        "node-stopped", "the service recovers by itself", "≤ 8 s after SIGCONT", f"{back:.1f} s", back <= 8
    )


@row("refused-30")
async def refused_30(rig: Rig) -> AsyncIterator[Finding]:
    """A node, then an embedder, that refuses 30 % of all requests with 429."""
    before = await rig.calls("elasticsearch")
    rig.proxy.refuse = 0.3
    try:
        async with Load(rig) as load:
            load.read(6, rig.search)
            load.write(4, name="refused")
            await _until_called(rig, "elasticsearch", before[0] + 400)
    finally:
        rig.proxy.refuse = 0.0
    after = await rig.calls("elasticsearch")
    calls, retries = after[0] - before[0], after[1] - before[1]
    missing, other = await rig.stored(load.acknowledged)
    strange = {status: count for status, count in load.statuses.items() if status not in EXPECTED}
    ratio = calls / max(1.0, calls - retries)
    yield Finding(
        "refused-30 (node)", "no retry storm; refused callers get 503; nothing acknowledged is lost",
        "calls ≤ 1.2 × those offered, 0 lost",
        f"{calls:.0f} calls, {retries:.0f} of them repeated: {ratio:.3f} ×; {missing} of {len(load.acknowledged)} lost; "
        f"{shown(load.statuses)}",
        ratio <= 1.2 and not missing and not other and not strange,
    )  # fmt: skip
    before = await rig.calls("embedder")
    async with misbehaving(rig.embeddings, refuse=0.3), Load(rig) as load:
        load.read(8, rig.search)
        load.write(2, name="embed")
        await _until_called(rig, "embedder", before[0] + 250)
    after = await rig.calls("embedder")
    calls, retries = after[0] - before[0], after[1] - before[1]
    ratio = calls / max(1.0, calls - retries)
    degraded = sum(bool(answer.body.get("degraded")) for answer in load.answers if answer.status == 200)
    searched = sum(answer.status == 200 for answer in load.answers)
    yield Finding(
        "refused-30 (embedder)", "no retry storm; searches answer, at worst by words alone",
        "calls ≤ 1.2 × those offered, all searches 200",
        f"{calls:.0f} calls, {retries:.0f} of them repeated: {ratio:.3f} ×; {searched} of {len(load.answers)} searches 200, "
        f"{degraded} degraded",
        ratio <= 1.2 and searched == len(load.answers),
    )  # fmt: skip
    await _calm(rig)


async def _until_called(rig: Rig, dependency: str, count: float) -> None:
    """Wait until so many calls have gone to a dependency, at most a minute: what is saved for retries counts less then."""
    until = time.monotonic() + 60
    # Counted by another process, so there is no event to wait for.
    for _ in range(120):
        if (await rig.calls(dependency))[0] >= count or time.monotonic() > until:
            return
        await asyncio.sleep(0.5)


@row("refused-100")
async def refused_100(rig: Rig) -> AsyncIterator[Finding]:
    """A node that refuses everything with 429 for 12 s."""
    before = await rig.calls("elasticsearch")
    rig.proxy.refuse = 1.0
    refused = rig.proxy.refused
    begun = time.monotonic()
    try:
        async with Load(rig) as load:
            load.read(8, rig.search)
            await asyncio.sleep(12)
            load.stop()
    finally:
        rig.proxy.refuse = 0.0
    took = time.monotonic() - begun
    after = await rig.calls("elasticsearch")
    arrived = rig.proxy.refused - refused
    retries = after[1] - before[1]
    p95 = percentile(seconds(load.answers), 0.95)
    back = await rig.until(lambda: _answers(rig), within_s=60, what="an answer after the storm")
    yield Finding(
        "refused-100", "load is shed early: 503 with Retry-After, and the node is left alone",
        "p95 ≤ 1 s, only 503, ≤ 10 calls/s at the node",
        f"p95 {p95:.2f} s; {shown(load.statuses)}; {arrived / took:.1f} calls/s, {retries:.0f} repeated",
        p95 <= 1 and set(load.statuses) == {503} and _told_to_wait(load) and arrived / took <= 10,
    )  # fmt: skip
    yield Finding("refused-100", "the service recovers by itself", "≤ 6 s", f"{back:.1f} s", back <= 6)
    await _calm(rig)


@row("disk-full")
async def disk_full(rig: Rig) -> AsyncIterator[Finding]:
    """The block that the flood stage puts on indices."""
    await _flood(rig, block=True)
    try:
        bulks = rig.proxy.asked["_bulk"]
        written = await rig.upsert([rig.document("full-1")])
        sent = rig.proxy.asked["_bulk"] - bulks
        searched = await rig.search()
        ready = await _readiness(rig, lambda told: told.status == 200 and _writable(told) is False)
        writable = _writable(ready)
    finally:
        await _flood(rig, block=None)
    again = await rig.upsert([rig.document("full-1")])
    back = await _readiness(rig, lambda told: told.body.get("status") == "ready")
    yield Finding(
        "disk-full", "writes are 507 and not tried again; searches go on; readiness says that it can't be written",
        "507 after 1 bulk, search 200, writable false",
        f"{written.status} after {sent} bulk in {written.seconds:.2f} s, search {searched.status}, readyz {ready.status} "
        f"{ready.body.get('status')}, writable {writable}",
        written.status == 507 and sent == 1 and searched.status == 200 and ready.status == 200 and writable is False,
    )  # fmt: skip
    yield Finding(
        "disk-full", "afterwards writes are taken again", "200, ready",
        f"{again.status}, {back.body.get('status')}", again.status == 200 and back.body.get("status") == "ready",
    )  # fmt: skip


def _writable(told: Answer) -> Any:
    return told.body.get("checks", {}).get("elasticsearch", {}).get("writable")


async def _readiness(rig: Rig, holds: Callable[[Answer], bool]) -> Answer:
    """Return the first answer of `/readyz` of which this holds, else the last of 30 s: it is told from memory for a while."""
    end = time.monotonic() + 30
    while True:
        told = await rig.ask("GET", "/readyz")
        if holds(told) or time.monotonic() > end:
            return told
        await asyncio.sleep(0.2)


async def _flood(rig: Rig, *, block: bool | None) -> None:
    import httpx2

    async with httpx2.AsyncClient(trust_env=False) as client:
        settings = {"index.blocks.read_only_allow_delete": block}
        answer = await client.put(
            f"{rig.node.url}/halflife-{COLLECTION}/_settings", json=settings, timeout=30
        )
        answer.raise_for_status()


@row("half-bad-bulks")
async def half_bad_bulks(rig: Rig) -> AsyncIterator[Finding]:
    """Bulks of which every second item can't be stored, for four reasons; and a node that refuses every second item."""
    poison = "this text is refused by the embedding server"
    bad: list[Json] = [
        {"id": "..", "text": "no such id"},
        {"id": "bad-date", "text": "x", "creation_time": "yesterday"},
        {"id": "bad-text", "text": 7},
        {"id": "bad-poison", "text": poison},
    ]
    items = [each for n in range(40) for each in (rig.document(f"good-{n}"), {**bad[n % 4]})]
    async with misbehaving(rig.embeddings, poison={poison}):
        answer = await rig.upsert(items)
    told = [item["status"] for item in answer.body.get("items", [])]
    good = sum(status in STORED for status in told[::2])
    missing, other = await rig.stored({item["id"]: item["text"] for item in items[::2]})
    yield Finding(
        "half-bad-bulks (content)", "each item is told; the good ones are stored",
        "40 stored, 40 told as failed", f"{good} stored, {answer.body.get('failed')} failed, {missing + other} missing",
        answer.status == 200 and good == 40 and answer.body["failed"] == 40 and not missing and not other,
    )  # fmt: skip
    rig.proxy.half_bulks = True
    refused = rig.proxy.refused_items
    try:
        batch = [rig.document(f"half-{n}") for n in range(200)]
        answer = await rig.upsert(batch)
    finally:
        rig.proxy.half_bulks = False
    stored = [item["id"] for item in answer.body.get("items", []) if item["status"] in STORED]
    missing, other = await rig.stored({item["id"]: item["text"] for item in batch if item["id"] in stored})
    yield Finding(
        "half-bad-bulks (429 per item)", "refused items alone are sent again; none is acknowledged that is not stored",
        "200 acknowledged, 0 missing",
        f"{len(stored)} acknowledged after {rig.proxy.refused_items - refused} refusals in {answer.seconds:.1f} s, "
        f"{missing + other} missing",
        len(stored) == 200 and not missing and not other,
    )  # fmt: skip


# --- embedder and reranker ---------------------------------------------------------------------------------------------

SPOILT: Final = {
    "hangs": "hang", "drips": "drip", "garbage": "garbage", "wrong count": "wrong count", "NaN": "nan",
    "200 MB": "huge", "429": "refuse",
}  # fmt: skip


@row("embedder")
async def embedder(rig: Rig) -> AsyncIterator[Finding]:
    """An embedding server that misbehaves in each way, under 4 callers; then a write."""
    for name, mode in SPOILT.items():
        async with misbehaving(rig.embeddings, mode=mode):
            with memory_of(rig.pid) as grown:
                async with Load(rig) as load:
                    load.read(4, rig.search)
                    await asyncio.sleep(6)
                written = await rig.upsert([rig.document(f"spoilt-{mode}")])
                growth = grown()
        found = await rig.ask("GET", f"{DOCUMENTS}/spoilt-{mode}")
        back = await rig.until(lambda: _whole(rig), within_s=60, what="whole answers")
        slowest = max(seconds(load.answers))
        whole = [
            answer
            for answer in load.answers
            if answer.status == 200 and answer.body["degraded"] and answer.hits
        ]
        yield Finding(
            f"embedder: {name}", "words alone answer, degraded and said so; a write is refused, not stored halfway",
            f"all 200 and degraded, ≤ {EMBED_WITHIN_S + GRACE_S:g} s; write told as failed, not stored; + ≤ 64 MB; back ≤ 8 s",
            f"{len(whole)} of {len(load.answers)}, slowest {slowest:.1f} s, p95 {percentile(seconds(load.answers), 0.95):.2f} s; "
            f"write {_told_of(written)}; + {growth:.0f} MB; back {back:.1f} s",
            len(whole) == len(load.answers) and slowest <= EMBED_WITHIN_S + GRACE_S and _not_stored(written)
            and found.status == 404 and growth <= 64 and back <= 8,
        )  # fmt: skip


async def _whole(rig: Rig) -> bool:
    answer = await rig.search()
    return answer.status == 200 and not answer.body["degraded"]


def _not_stored(answer: Answer) -> bool:
    items = answer.body.get("items", [])
    return answer.status in (200, 502, 503) and len(items) == 1 and items[0]["status"] == "failed"


def _told_of(answer: Answer) -> str:
    items = answer.body.get("items", [])
    return f"{answer.status} ({items[0]['status'] if items else 'no items'}) in {answer.seconds:.1f} s"


@row("reranker")
async def reranker(rig: Rig) -> AsyncIterator[Finding]:
    """A reranker that misbehaves in each way, under 4 callers."""

    async def reranked() -> Answer:
        return await rig.search(rerank={"candidates": 20})

    async def whole() -> bool:
        answer = await reranked()
        return answer.status == 200 and not answer.body["degraded"]

    await rig.until(whole, within_s=30, what="a reranked answer")
    for name, mode in SPOILT.items():
        async with misbehaving(rig.reranks, mode=mode):
            with memory_of(rig.pid) as grown:
                async with Load(rig) as load:
                    load.read(4, reranked)
                    await asyncio.sleep(6)
                growth = grown()
        back = await rig.until(whole, within_s=60, what="reranked answers")
        slowest = max(seconds(load.answers))
        good = [
            answer
            for answer in load.answers
            if answer.status == 200 and answer.body["degraded"] and answer.hits
        ]
        yield Finding(
            f"reranker: {name}", "the fused order answers, degraded and said so",
            f"all 200 and degraded, ≤ {RERANK_WITHIN_S + GRACE_S:g} s; + ≤ 64 MB; back ≤ 8 s",
            f"{len(good)} of {len(load.answers)}, slowest {slowest:.1f} s, p95 {percentile(seconds(load.answers), 0.95):.2f} s; "
            f"+ {growth:.0f} MB; back {back:.1f} s",
            len(good) == len(load.answers) and slowest <= RERANK_WITHIN_S + GRACE_S and growth <= 64 and back <= 8,
        )  # fmt: skip


@row("crowd")
async def crowd(rig: Rig) -> AsyncIterator[Finding]:
    """200 callers while the embedder hangs, half of them asking by words alone; then the same while it is well."""

    async def asked() -> tuple[Load, Load]:
        async with Load(rig) as others, Load(rig) as words:
            others.read(100, rig.search)
            words.read(100, rig.text_search)
            await asyncio.sleep(20)
            others.stop()
            words.stop()
        return others, words

    _, baseline = await asked()
    async with misbehaving(rig.embeddings, mode="hang"):
        others, words = await asked()
    then = [answer.seconds for answer in baseline.answers if answer.status == 200]
    now = [answer.seconds for answer in words.answers if answer.status == 200]
    p95 = percentile(then, 0.95), percentile(now, 0.95)
    strange = {s: n for s, n in (others.statuses + words.statuses).items() if s not in EXPECTED}
    yield Finding(
        "crowd", "text-only searches keep their pace while 100 others want a hung embedder",
        "p95 ≤ 2 × that with a healthy embedder",
        f"{p95[1]:.2f} s against {p95[0]:.2f} s ({p95[1] / p95[0]:.2f} ×), {len(now)} against {len(then)} answered; the "
        f"others: {shown(others.statuses)}",
        p95[1] <= 2 * p95[0] and len(now) >= len(then) / 2 and not strange,
    )  # fmt: skip
    await _calm(rig)


# --- the service itself ------------------------------------------------------------------------------------------------


@row("sigterm")
async def sigterm(rig: Rig) -> AsyncIterator[Finding]:
    """SIGTERM under load."""
    red: list[int] = []
    async with Load(rig) as load:
        load.read(8, rig.search)
        load.write(3, name="term", size=20)
        await asyncio.sleep(3)
        process = rig.process
        assert process is not None
        told = time.monotonic()
        rig.signal(signal.SIGTERM)
        while process.poll() is None and time.monotonic() - told < 30:
            answer = await rig.ask("GET", "/readyz", timeout_s=3)
            red.append(answer.status)
            await asyncio.sleep(0.1)
        took = time.monotonic() - told
        ended = time.monotonic()
        load.stop()
    code = process.poll()
    rig.process = None
    # Whoever asked before the signal must be answered; who asked later may find nobody listening.
    broken = sum(a.status == 0 and a.at <= told for a in (*load.answers, *load.writes))
    answered = sum(
        a.status == 200 and a.at <= told <= a.at + a.seconds for a in (*load.answers, *load.writes)
    )
    later = sum(a.status not in (0, *EXPECTED) for a in (*load.answers, *load.writes))
    await rig.start()
    missing, other = await rig.stored(load.acknowledged)
    yield Finding(
        "sigterm", "/readyz turns red, requests under way are answered, the process ends",
        "≤ 10 s, 0 broken, 503 seen, 0 lost",
        f"{took:.1f} s (code {code}), {answered} under way answered, {broken} broken, readyz {shown_list(red)}; "
        f"{missing + other} of {len(load.acknowledged)} lost",
        took <= 10 and not broken and 503 in red and not later and not missing and not other and ended > told,
    )  # fmt: skip


def shown_list(statuses: Sequence[int]) -> str:
    """Return a sequence of statuses without repetitions."""
    kept = [status for at, status in enumerate(statuses) if at == 0 or statuses[at - 1] != status]
    return " → ".join(str(status or "closed") for status in kept)


@row("killed-mid-bulk")
async def killed_mid_bulk(rig: Rig) -> AsyncIterator[Finding]:
    """SIGKILL of the service in the middle of bulks, five times; then the same bulks again."""
    lost = other = kept = 0
    stored: dict[str, str] = {}
    for turn in range(5):
        async with Load(rig) as load:
            load.write(3, name=f"mid-{turn}", size=100)
            await asyncio.sleep(rig.random.uniform(1.5, 3.0))
            await rig.kill()
            load.stop()
        stored |= load.acknowledged
        await rig.start()
    lost, other = await rig.stored(stored)
    batch = [rig.document(f"again-{n}") for n in range(100)]
    first, second = await rig.upsert(batch), await rig.upsert(batch)
    kept = sum(item["status"] in STORED for item in second.body.get("items", []))
    yield Finding(
        "killed-mid-bulk", "what was acknowledged is stored; the same bulk can be sent again",
        "5 kills, 0 lost, 100 of 100 again",
        f"{len(stored)} acknowledged, {lost} lost, {other} changed; {kept} of 100 again ({first.status}, {second.status})",
        not lost and not other and kept == 100 and len(stored) > 100,
    )  # fmt: skip


# --- callers -----------------------------------------------------------------------------------------------------------


@row("big-bodies")
async def big_bodies(rig: Rig) -> AsyncIterator[Finding]:
    """Bodies of 100 MB, with a length and without one."""
    for name, chunked in (("with a length", False), ("without", True)):
        with memory_of(rig.pid) as grown:
            begun = time.monotonic()
            status, body, sent = await _send_100_mb(rig, chunked=chunked)
            took = time.monotonic() - begun
            growth = grown()
        alive = await rig.search()
        yield Finding(
            f"big-bodies ({name})", "413 while it arrives, without taking it in; others go on",
            "413, ≤ 40 MB taken, + ≤ 96 MB, ≤ 10 s",
            f"{status} {problem_of(body).get('title', '')!r} after {sent / 2**20:.0f} MB in {took:.1f} s, + {growth:.0f} MB; "
            f"another search {alive.status}",
            status == 413 and sent <= 40 * 2**20 and growth <= 96 and took <= 10 and alive.status == 200,
        )  # fmt: skip


async def _send_100_mb(rig: Rig, *, chunked: bool) -> tuple[int, bytes, int]:
    total = 100 * 2**20
    part = b'{"documents": ["' + b"x" * 65_000
    head = [f"POST {DOCUMENTS} HTTP/1.1", f"host: {HOST}", "content-type: application/json"]
    head.append("transfer-encoding: chunked" if chunked else f"content-length: {total}")
    sent = 0
    async with rigs.raw(rig.port) as (reader, writer):
        writer.write("\r\n".join([*head, "", ""]).encode())
        answering = asyncio.ensure_future(rigs.read_response(reader))
        try:
            with contextlib.suppress(ConnectionError):
                while sent < total and not answering.done():
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                    await writer.drain()
                    sent += len(part)
                    await asyncio.sleep(0)
            async with asyncio.timeout(20):
                status, body = await answering
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            return 0, b"", sent
        finally:
            answering.cancel()
    return status, body, sent


@row("slow-connections")
async def slow_connections(rig: Rig) -> AsyncIterator[Finding]:
    """200 connections that send a byte a second: half within the head, half within the body."""

    async def measured(for_s: float) -> Load:
        async with Load(rig) as load:
            load.read(4, rig.text_search, pause_s=0.05)
            await asyncio.sleep(for_s)
        return load

    ended: list[float] = []

    async def slow(number: int) -> None:
        begun = time.monotonic()
        head = f"POST /v1/search HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: 1000\r\nx-slow: "
        with contextlib.suppress(OSError):
            async with rigs.raw(rig.port) as (reader, writer):
                writer.write((head if number % 2 else head + "no\r\n\r\n").encode())
                closed = asyncio.ensure_future(reader.read(1))
                try:
                    while not closed.done() and time.monotonic() - begun < 60:
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.wait({closed}, timeout=1.0)
                finally:
                    if closed.done():
                        ended.append(time.monotonic() - begun)
                    closed.cancel()

    before = await measured(6)
    slowly = [asyncio.create_task(slow(number)) for number in range(200)]
    await asyncio.sleep(1)
    during = await measured(12)
    await asyncio.gather(*slowly)
    p95 = percentile(seconds(before.answers), 0.95), percentile(seconds(during.answers), 0.95)
    refused = sum(answer.status != 200 for answer in during.answers)
    yield Finding(
        "slow-connections", "others are answered as before; slow heads and bodies are cut off",
        "0 refused, p95 ≤ 3 ×, 200 cut off ≤ 45 s",
        f"{refused} of {len(during.answers)} refused, p95 {p95[1] * 1000:.0f} ms against {p95[0] * 1000:.0f} ms; "
        f"{len(ended)} cut off after at most {max(ended, default=math.nan):.0f} s",
        not refused and p95[1] <= 3 * p95[0] and len(ended) == 200 and max(ended) <= 45,
    )  # fmt: skip


DEEP: Final = 100_000
HOSTILE_WITHIN_S: Final = 2.0


def hostile_requests() -> dict[str, bytes]:
    """Return name -> request, each of which must be refused as the caller's fault."""
    search, many = "/v1/search", DOCUMENTS
    start = f'{{"collection": "{COLLECTION}", "query": '
    deep_filter = '{"not":' * DEEP + "1" + "}" * DEEP
    long_id = "x" * 513
    return {
        "NaN": post(search, f'{start}"a", "min_relevance": NaN}}'.encode()),
        "1e400": post(search, f'{start}"a", "min_relevance": 1e400}}'.encode()),
        "-1e400 in a filter": post(search, f'{start}"a", "filter": {{"n": {{"gte": -1e400}}}}}}'.encode()),
        "lone surrogate": post(search, f'{start}"\\ud800"}}'.encode()),
        "raw surrogate": post(search, start.encode() + b'"\xed\xa0\x80"}'),
        "not UTF-8": post(search, start.encode() + b'"\xff\xfe"}'),
        "NUL alone": post(search, f'{start}"\\u0000"}}'.encode()),
        "duplicate keys": post(search, f'{start}"a", "query": "b"}}'.encode()),
        "depth 100,000 of lists": post(search, f"{start}{'[' * DEEP}{']' * DEEP}}}".encode()),
        "depth 100,000 of objects": post(search, ('{"a":' * DEEP + "1" + "}" * DEEP).encode()),
        "depth 100,000 of a filter": post(search, f'{start}"a", "filter": {deep_filter}}}'.encode()),
        "a number of 100,000 digits": post(search, f'{start}"a", "top_k": {"9" * 100_000}}}'.encode()),
        "an empty body": post(search, b""),
        "half a body": post(search, b'{"collection": "faults", "que'),
        "id ..": post(many, b'{"documents": [{"id": "..", "text": "x"}]}'),
        "id of 513 bytes": post(many, json.dumps({"documents": [{"id": long_id, "text": "x"}]}).encode()),
        "id with a lone surrogate": post(many, b'{"documents": [{"id": "\\udfff", "text": "x"}]}'),
        "NaN in metadata": post(many, b'{"documents": [{"id": "a", "text": "x", "metadata": {"n": NaN}}]}'),
        "collection ..": post("/v1/collections/../documents", b'{"documents": []}'),
        "collection %2e%2e": post("/v1/collections/%2e%2e/documents", b'{"documents": []}'),
        "collection _all": post(
            "/v1/collections/_all/documents", b'{"documents": [{"id": "a", "text": "x"}]}'
        ),
        "delete ..": f"DELETE {DOCUMENTS}/.. HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode(),
        "delete %2e%2e": f"DELETE {DOCUMENTS}/%2e%2e HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode(),
        "delete 513 bytes": f"DELETE {DOCUMENTS}/{long_id} HTTP/1.1\r\nhost: {HOST}\r\n\r\n".encode(),
        "non-ASCII token": post(
            search, f'{start}"a", "top_k": "x"}}'.encode(), "authorization: Bearer sch\xfcssel"
        ),
        "token of raw bytes": post(search, b"{}", "authorization: Bearer \udcff\udcfe"),
        "a cursor of junk": post(search, b'{"cursor": "\\u0000../../etc"}'),
    }


@row("hostile-input")
async def hostile_input(rig: Rig) -> AsyncIterator[Finding]:
    """Input that no caller sends by mistake."""
    wrong: dict[str, int] = {}
    slowest = 0.0
    before = await rig.ask("GET", f"{DOCUMENTS}?size=1")
    requests = hostile_requests()
    for name, request in requests.items():
        took: list[float] = []
        # What took long is sent once more: what is slow of itself is slow again, a pause of the machine is not.
        while len(took) < 2 and (not took or took[0] > HOSTILE_WITHIN_S):
            begun = time.monotonic()
            status, body = await exchange(rig.port, request)
            took.append(time.monotonic() - begun)
            # Without a problem's form only the server below the service answers, to what is no HTTP.
            if not 400 <= status < 500 or (problem_of(body).get("status") != status and status != 400):
                wrong[name] = status
        slowest = max(slowest, min(took))
    after = await rig.ask("GET", f"{DOCUMENTS}?size=1")
    alive = await rig.search()
    yield Finding(
        "hostile-input", "a 4xx that names the fault, nothing stored or deleted, and the service goes on",
        f"{len(requests)} of {len(requests)} are 4xx, ≤ {HOSTILE_WITHIN_S:g} s each",
        f"{len(requests) - len(wrong)} of {len(requests)}{': ' if wrong else ''}"
        f"{'; '.join(f'{name}: {status}' for name, status in wrong.items())}, slowest {slowest:.2f} s, "
        f"documents {before.body.get('total')} → {after.body.get('total')}, search {alive.status}",
        not wrong and slowest <= HOSTILE_WITHIN_S and before.body.get("total") == after.body.get("total") and alive.status == 200,
    )  # fmt: skip


INJECTED: Final[dict[str, Any]] = {
    "query_string": {"query_string": {"query": "*"}},
    "script": {"script": {"source": "ctx._source.remove('x')"}},
    "script as an operator": {"lang": {"script": "true"}},
    "match_all": {"match_all": {}},
    "bool": {"bool": {"must_not": {"match_all": {}}}},
    "nested": {"nested": {"path": "chunks", "query": {"match_all": {}}}},
    "percolate": {"lang": {"percolate": {"field": "x"}}},
    "terms lookup": {"lang": {"in": {"index": "halflife_state", "id": "1", "path": "state"}}},
    "wildcard operator": {"lang": {"wildcard": "*"}},
    "regexp operator": {"lang": {"regexp": ".*"}},
    "dollar operator": {"lang": {"$ne": None}},
    "inner field": {"deleted": True},
    "chunk field": {"chunks.text": "x"},
    "source of a list": [{"term": {"lang": "en"}}],
    "text for an object": "lang:en OR *",
    "operator of a list": {"and": {"lang": "en"}},
    "object in a list": {"lang": [{"script": "x"}]},
    "object of an object": {"lang": {"gte": {"script": "x"}}},
}  # fmt: skip


@row("filter-injection")
async def filter_injection(rig: Rig) -> AsyncIterator[Finding]:
    """Filters that carry a piece of Elasticsearch's own query language, into search, why, list and delete."""
    wrong: list[str] = []
    await _quiet(rig)
    before = _questions(rig)
    asked = 0
    for name, injected in INJECTED.items():
        for path, body in (
            ("/v1/search", {"collection": COLLECTION, "query": "leave", "filter": injected}),
            ("/v1/why", {"collection": COLLECTION, "query": "leave", "id": "base-1", "filter": injected}),
            (f"{DOCUMENTS}/delete", {"filter": injected}),
        ):
            asked += 1
            answer = await rig.ask("POST", path, body)
            if answer.status != 422:
                wrong.append(f"{name} at {path}: {answer.status}")
        asked += 1
        listed = await rig.ask("GET", f"{DOCUMENTS}?filter={json.dumps(injected)}")
        if listed.status != 422:
            wrong.append(f"{name} at list: {listed.status}")
    calls = _questions(rig) - before
    yield Finding(
        "filter-injection", "refused with 422 before a search or a write is sent to Elasticsearch",
        "all 422, 0 calls", f"{asked - len(wrong)} of {asked} refused{': ' + '; '.join(wrong[:6]) if wrong else ''}, {calls} calls",
        not wrong and calls == 0,
    )  # fmt: skip


@row("tenants")
async def tenants(rig: Rig) -> AsyncIterator[Finding]:
    """Two keys with a forced filter each on one collection, one trying every way into the other's documents."""
    tokens = {
        name: f"hlf_{name}_{rig.random.getrandbits(128):032x}" for name in ("admin", "a", "b", "elsewhere")
    }
    keys: list[Json] = [
        {"id": "admin", "scopes": ["read", "write", "admin"], "collections": ["*"]},
        *({"id": who, "scopes": ["read", "write"], "collections": [COLLECTION], "filter": {"tenant": who}} for who in "ab"),
        {"id": "elsewhere", "scopes": ["read", "write", "admin"], "collections": ["other-*"]},
    ]  # fmt: skip
    for key in keys:
        key["hash"] = "sha256:" + hashlib.sha256(tokens[key["id"]].encode()).hexdigest()
    bearer = {name: {"authorization": f"Bearer {token}"} for name, token in tokens.items()}
    await rig.restart(KEYS=json.dumps(keys))
    try:
        mine = [
            {**rig.document(f"{who}-{n}", f"leave {_MARK}{who} {n}"), "metadata": {"tenant": who}}
            for who in "ab" for n in range(5)
        ]  # fmt: skip
        body = {"documents": mine, "refresh": "wait_for"}
        stored = await rig.ask("POST", DOCUMENTS, body, headers=bearer["admin"])
        theirs = await rig.ask("POST", "/v1/search", {**_SEARCH, "top_k": 2}, headers=bearer["a"])
        leaks: list[str] = []
        for name, (method, path, asked) in _ways_in(theirs.body.get("cursor")).items():
            for who in ("b", "elsewhere"):
                answer = await rig.ask(method, path, asked, headers=bearer[who])
                if f"{_MARK}a" in answer.text or any(hit["id"].startswith("a-") for hit in answer.hits):
                    leaks.append(f"{name} by {who}")
        unlike: list[str] = []
        for who in ("b", "elsewhere"):
            for method in ("GET", "DELETE"):
                foreign = await rig.ask(method, f"{DOCUMENTS}/a-0", headers=bearer[who])
                missing = await rig.ask(method, f"{DOCUMENTS}/nothing", headers=bearer[who])
                if (foreign.status, foreign.body.get("detail")) != (
                    missing.status,
                    missing.body.get("detail"),
                ):
                    unlike.append(f"{method} by {who}")
        after = await rig.ask("POST", "/v1/search", {**_SEARCH, "top_k": 50}, headers=bearer["a"])
        kept = {hit["id"]: hit["text"] for hit in after.hits}
        wanted = {item["id"]: item["text"] for item in mine if item["id"].startswith("a-")}
        without = [await rig.ask("POST", "/v1/search", _SEARCH, headers=given) for given in ({}, _FOREIGN)]
    finally:
        await rig.restart()
    ways = 2 * len(_ways_in(None))
    yield Finding(
        "tenants", "neither text nor change crosses; what is another's looks like what is not there",
        "0 of all ways in, nothing changed, 404s alike, 401 without a key",
        f"{len(leaks)} of {ways} ways in{': ' + '; '.join(leaks) if leaks else ''}; {len(kept)} of {len(wanted)} unchanged: "
        f"{kept == wanted}; {len(unlike)} unlike; without a key {[answer.status for answer in without]}",
        stored.status == 200 and not leaks and kept == wanted and not unlike
        and all(answer.status == 401 for answer in without),
    )  # fmt: skip


_MARK: Final = "qzxv"
"""Begins a word of each tenant's texts that no query asks for: an answer that holds it holds a text."""
_FOREIGN: Final = {"authorization": "Bearer hlf_guessed"}
_SEARCH: Final[Json] = {"collection": COLLECTION, "query": "leave", "top_k": 20}


def _ways_in(cursor: str | None) -> dict[str, tuple[str, str, Any]]:
    """Return what tenant b tries: name -> (method, path, body)."""
    foreign: Json = {"id": "a-0", "text": "taken over", "metadata": {"tenant": "b"}}
    search, collection = "/v1/search", f"/v1/collections/{COLLECTION}"
    return {
        "search": ("POST", search, _SEARCH),
        "search with their filter": ("POST", search, {**_SEARCH, "filter": {"tenant": "a"}}),
        "search with or": ("POST", search, {**_SEARCH, "filter": {"or": [{"tenant": "a"}, {"tenant": "b"}]}}),
        "search with not": ("POST", search, {**_SEARCH, "filter": {"not": {"tenant": "b"}}}),
        "search with exists": ("POST", search, {**_SEARCH, "filter": {"tenant": {"exists": True}}}),
        "search with explain": ("POST", search, {**_SEARCH, "explain": True}),
        "search by route filter": (
            "POST", search, {**_SEARCH, "routes": [{"kind": "text", "filter": {"tenant": "a"}}, {"kind": "vector"}]},
        ),
        "search, chunks": ("POST", search, {**_SEARCH, "collapse": False}),
        "search, reranked": ("POST", search, {**_SEARCH, "rerank": {"candidates": 20}}),
        "search, diversified": ("POST", search, {**_SEARCH, "mmr": {"lambda": 0.5}, "dedup": {"threshold": 0.99}}),
        "batch": ("POST", search, {"collection": COLLECTION, "queries": [{"query": "leave"}]}),
        "their cursor": ("POST", search, {"cursor": cursor or "x"}),
        "why": ("POST", "/v1/why", {**_SEARCH, "id": "a-0"}),
        "list": ("GET", f"{DOCUMENTS}?size=1000", None),
        "list with their filter": ("GET", f'{DOCUMENTS}?filter={{"tenant":"a"}}', None),
        "get": ("GET", f"{DOCUMENTS}/a-0", None),
        "overwrite": ("POST", DOCUMENTS, {"documents": [foreign]}),
        "overwrite as theirs": ("POST", DOCUMENTS, {"documents": [{**foreign, "metadata": {"tenant": "a"}}]}),
        "write into theirs": ("POST", DOCUMENTS, {"documents": [{"id": "a-9", "text": "x", "metadata": {"tenant": "a"}}]}),
        "patch": ("PATCH", DOCUMENTS, {"documents": [{"id": "a-0", "metadata": {"tenant": "b"}}]}),
        "patch their title": ("PATCH", DOCUMENTS, {"documents": [{"id": "a-0", "title": "taken"}]}),
        "patch own into theirs": ("PATCH", DOCUMENTS, {"documents": [{"id": "b-0", "metadata": {"tenant": "a"}}]}),
        "delete": ("DELETE", f"{DOCUMENTS}/a-1", None),
        "delete by ids": ("POST", f"{DOCUMENTS}/delete", {"ids": ["a-2", "a-3"]}),
        "delete by filter": ("POST", f"{DOCUMENTS}/delete", {"filter": {"tenant": "a"}}),
        "delete collection": ("DELETE", f"{collection}?confirm={COLLECTION}", None),
        "change collection": ("PUT", collection, {"default_profile": None}),
        "metrics": ("GET", "/metrics", None),
    }  # fmt: skip


def _questions(rig: Rig) -> int:
    """Return how many searches and writes were sent to the node: what a collection is may be looked up at any time."""
    return sum(rig.proxy.asked[call] for call in ("_search", "_msearch", "_pit", "_bulk"))


async def _quiet(rig: Rig) -> None:
    """Wait until nothing has been asked of the node for a second: background work comes every half minute."""
    seen = -1
    while rig.proxy.total != seen:
        seen = rig.proxy.total
        await asyncio.sleep(1.2)


async def _calm(rig: Rig) -> None:
    """Wait until answers are whole again, so that one row's fault is not another's."""
    await rig.until(lambda: _whole(rig), within_s=60, what="whole answers")


# --- a run -------------------------------------------------------------------------------------------------------------


async def run(rig: Rig, names: Sequence[str], *, say: Callable[[str], None]) -> list[Finding]:
    """Bring the rows about, one after the other, and return what was found; a row that breaks off is a failed one."""
    found: list[Finding] = []
    for name in names:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(ROW_WITHIN_S):
                async for finding in ROWS[name](rig):
                    found.append(finding)
                    say(line_of(finding))
        except Exception as error:  # noqa: BLE001 - the next rows are worth having all the same
            told = f"broke off: {type(error).__name__}: {str(error)[:200]}"
            found.append(Finding(name, "the row runs to its end", "", told, False))
            say(line_of(found[-1]))
            with contextlib.suppress(Exception):
                if rig.node.paused:
                    await asyncio.to_thread(rig.node.resume)
                if not rig.node.running:
                    await asyncio.to_thread(rig.node.start)
                await rig.restart()
        say(f"  {name}: {time.monotonic() - begun:.0f} s")
    return found


def line_of(finding: Finding) -> str:
    """Return a finding in one line."""
    return f"{'ok  ' if finding.ok else 'FAIL'} {finding.row}: {finding.measured} (target: {finding.target})"


def table(found: Sequence[Finding]) -> str:
    """Return the findings as a Markdown table."""
    lines = ["| fault | required | target | measured | |", "|---|---|---|---|---|"]
    for finding in found:
        cells = [
            finding.row,
            finding.required,
            finding.target,
            finding.measured,
            "ok" if finding.ok else "**FAIL**",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def chosen_rows(only: Sequence[str]) -> list[str]:
    """Return the rows whose names begin with any of those, all without any; ValueError for one that names none."""
    for given in only:
        if not any(name.startswith(given) for name in ROWS):
            raise ValueError(f"there is no row '{given}': choose from {', '.join(ROWS)}")
    return [name for name in ROWS if not only or any(name.startswith(given) for given in only)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows asked for; the last line is the count, and 0 is returned if none failed."""
    parser = argparse.ArgumentParser(
        prog="./scripts/faults",
        description="Bring faults about on a real node, and measure what the service does.",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="ROW", help="rows whose name begins so"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything that is drawn by lot")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    parser.add_argument("--list", action="store_true", help="only name the rows")
    given = parser.parse_args(arguments)
    try:
        names = chosen_rows(given.only)
    except ValueError as error:
        parser.error(str(error))
    if given.list:
        print("\n".join(f"{name:18} {(ROWS[name].__doc__ or '').strip().splitlines()[0]}" for name in ROWS))
        return 0

    def say(line: str) -> None:
        print(line, flush=True)

    async def work(folder: Path) -> list[Finding]:
        async with Rig(folder, seed=given.seed, say=say) as rig:
            return await run(rig, names, say=say)

    with contextlib.ExitStack() as held:
        folder = given.keep or Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="halflife-faults-"))
        )
        found = asyncio.run(work(folder.absolute()))
    print()
    print(table(found))
    if given.markdown is not None:
        given.markdown.write_text(table(found) + "\n", encoding="utf-8")
    failed = sum(not finding.ok for finding in found)
    print(f"\n{platform.system()} {platform.machine()}, seed {given.seed}")
    print(f"rows={len(found)} failed={failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
