"""Own what fault and soak runs stand on: a node of their own, far ends that misbehave, the service as a process, callers.

Everything is on loopback and bounded. The service runs as operators run it (`scripts.serving`) with its defaults, but
for the addresses and shorter waits for the embedder and reranker, so that a run ends.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2

from scripts.distribution import ensure_installed
from scripts.faulty import Embeddings, Proxy, Reranks
from scripts.node import KEEPS_DISK_BLOCKS, LocalNode
from scripts.stack import end_process, python_command
from scripts.supervisor import free_port

Json = dict[str, Any]
Say = Callable[[str], None]

HOST = "127.0.0.1"
COLLECTION = "faults"
EMBED_WITHIN_S = 2.0
"""The service's default for a query's embedding."""
RERANK_WITHIN_S = 2.0
STORED = ("created", "updated", "unchanged")
"""What an item is told that is stored as it was sent."""
WORDS = [
    "leave",
    "policy",
    "carry",
    "over",
    "annual",
    "unpaid",
    "travel",
    "expense",
    "receipt",
    "manager",
    "approval",
    "laptop",
    "security",
    "badge",
    "office",
    "remote",
    "salary",
    "payroll",
    "bonus",
    "review",
    "onboarding",
    "training",
    "contract",
    "notice",
    "holiday",
    "sick",
    "parental",
    "pension",
    "insurance",
    "overtime",
]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: `status` 0 is a connection that broke, `at` the time it was asked at."""

    status: int
    seconds: float
    at: float
    body: Json = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    @property
    def hits(self) -> list[Json]:
        return list(self.body.get("hits", []))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share lies (nearest rank); NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def resident_mb(pid: int) -> float:
    """Return how much memory a process holds, in MiB."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    listed = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return int(listed.stdout.strip() or 0) / 1024


class Rig:
    """A node, a proxy before it, far ends, and the service; use as an async context manager."""

    def __init__(self, folder: Path, *, seed: int, say: Say, node: LocalNode | None = None) -> None:
        """`node` is one that runs already and is left running; without it one is started in `folder`."""
        self.folder = folder
        self.say = say
        self.random = random.Random(seed)  # noqa: S311 - repeatable, no secret
        self.seed = seed
        self.node = node or LocalNode(
            ensure_installed(report=say),
            folder / "node",
            cluster_name=f"halflife-faults-{os.getpid()}",
            settings=KEEPS_DISK_BLOCKS,
        )
        self._own_node = node is None
        self.embeddings = Embeddings(seed=seed)
        self.reranks = Reranks(seed=seed)
        self.proxy: Proxy
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.client: httpx2.AsyncClient
        self._opened = contextlib.AsyncExitStack()
        self._serial = 0

    @property
    def url(self) -> str:
        """The service's address."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._own_node:
            await asyncio.to_thread(self.node.start)
            self._opened.push_async_callback(asyncio.to_thread, self.node.stop)
        try:
            assert self.node.http_port is not None
            self.proxy = await self._opened.enter_async_context(
                Proxy((HOST, self.node.http_port), seed=self.seed)
            )
            await self._opened.enter_async_context(self.embeddings)
            await self._opened.enter_async_context(self.reranks)
            self.client = await self._opened.enter_async_context(
                httpx2.AsyncClient(
                    base_url=self.url,
                    timeout=httpx2.Timeout(60.0, connect=5.0),
                    limits=httpx2.Limits(
                        max_connections=400, max_keepalive_connections=400, keepalive_expiry=5.0
                    ),
                    trust_env=False,
                )
            )
            await self.start()
            self._opened.push_async_callback(self.stop)
            await self.load()
        except BaseException:
            await self._opened.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            await self.client.delete(f"/v1/collections/{COLLECTION}", params={"confirm": COLLECTION})
        await self._opened.aclose()

    # --- the service

    def settings(self) -> dict[str, str]:
        """Return the environment's part that the service is configured by."""
        return {
            "HALFLIFE_ELASTICSEARCH_URL": self.proxy.url,
            "HALFLIFE_EMBEDDING_BASE_URL": f"{self.embeddings.url}/v1",
            "HALFLIFE_EMBEDDING_MODEL": "hash-of-words",
            "HALFLIFE_EMBEDDING_QUERY_PREFIX": "",
            "HALFLIFE_EMBEDDING_DOCUMENT_PREFIX": "",
            "HALFLIFE_EMBEDDING_TIMEOUT_S": "3",
            "HALFLIFE_RERANK_URL": f"{self.reranks.url}/v1/rerank",
            "HALFLIFE_RERANK_TIMEOUT_S": str(RERANK_WITHIN_S),
            "HALFLIFE_LOG_FORMAT": "json",
            "HALFLIFE_LOG_LEVEL": "warning",
        }

    async def start(self, **more: str) -> None:
        """Start the service and wait until it is ready. `more` are settings, upper case without their prefix."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HALFLIFE_")}
        chosen = {f"HALFLIFE_{name}": value for name, value in more.items()}
        with (self.folder / "service.log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - takes a few milliseconds
                python_command("scripts.serving", "--host", HOST, "--port", str(self.port), "--end-with-stdin"),
                stdin=subprocess.PIPE, stdout=log, stderr=log, env={**kept, **self.settings(), **chosen},
                start_new_session=True,
            )  # fmt: skip
        await self.until(self._is_ready, within_s=90, what="the service to be ready")

    async def stop(self) -> None:
        """End the service in order, if it runs."""
        if self.process is not None:
            process, self.process = self.process, None
            await asyncio.to_thread(end_process, process, 20.0)

    def signal(self, number: int) -> None:
        """Send the service a signal."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """Kill the service."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self.process.wait, 10)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None

    async def restart(self, **more: str) -> None:
        """Stop and start the service."""
        await self.stop()
        await self.start(**more)

    async def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"the service ended: see {self.folder / 'service.log'}")
        return (await self.ask("GET", "/readyz")).status == 200

    async def until(self, true: Callable[[], Awaitable[bool]], *, within_s: float, what: str) -> float:
        """Wait for something and return how many seconds it took; TimeoutError where it does not come."""
        begun = time.monotonic()
        while not await true():
            if time.monotonic() - begun > within_s:
                raise TimeoutError(f"waited {within_s:g} s in vain for {what}")
            await asyncio.sleep(0.1)
        return time.monotonic() - begun

    # --- callers

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request and return its answer, whatever it is."""
        begun = time.monotonic()
        try:
            response = await self.client.request(
                method, path, json=body, timeout=httpx2.Timeout(timeout_s, connect=5.0), headers=headers
            )
        except httpx2.HTTPError as error:
            return Answer(0, time.monotonic() - begun, begun, {"detail": f"{type(error).__name__}: {error}"})
        taken = time.monotonic() - begun
        try:
            told = response.json()
        except ValueError:
            told = {}
        body = told if isinstance(told, dict) else {}
        return Answer(response.status_code, taken, begun, body, dict(response.headers), response.text)

    def query(self) -> str:
        """Return a question that was not asked before, so that no cache answers it."""
        self._serial += 1
        return f"{' '.join(self.random.sample(WORDS, 3))} {self._serial}"

    async def search(self, **more: Any) -> Answer:
        """Ask a new question; `more` are fields of the search."""
        return await self.ask(
            "POST", "/v1/search", {"collection": COLLECTION, "query": self.query(), "top_k": 5, **more}
        )

    async def text_search(self) -> Answer:
        """Ask by words alone."""
        return await self.search(routes=[{"kind": "text"}])

    async def upsert(self, documents: Sequence[Json], *, refresh: str = "false") -> Answer:
        """Store documents."""
        return await self.ask(
            "POST",
            f"/v1/collections/{COLLECTION}/documents",
            {"documents": list(documents), "refresh": refresh},
        )

    def document(self, id_: str, text: str | None = None) -> Json:
        """Return a document of some words."""
        words = text or " ".join(self.random.choices(WORDS, k=12))
        return {"id": id_, "text": words, "title": words[:20], "creation_time": "2026-01-01T00:00:00Z"}

    async def load(self, count: int = 300) -> None:
        """Give the collection some documents."""
        for first in range(0, count, 100):
            stored = await self.upsert(
                [self.document(f"base-{n}") for n in range(first, min(count, first + 100))],
                refresh="wait_for",
            )
            if stored.status != 200 or stored.body["failed"]:
                raise RuntimeError(
                    f"the first documents were not stored: {stored.status} {str(stored.body)[:300]}"
                )

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        text = (await self.client.get("/metrics")).text
        total = 0.0
        for line in text.splitlines():
            series, _, value = line.rpartition(" ")
            bare, _, told = series.partition("{")
            if bare == name and all(f'{label}="{wanted}"' in told for label, wanted in labels.items()):
                total += float(value)
        return total

    async def calls(self, dependency: str) -> tuple[float, float]:
        """Return how many calls went to a dependency, and how many of them repeated one."""
        return (
            await self.metric("halflife_dependency_seconds_count", dependency=dependency),
            await self.metric("halflife_dependency_retries_total", dependency=dependency),
        )

    async def stored(self, wanted: Mapping[str, str]) -> tuple[int, int]:
        """Return how many documents (id -> text) are missing from the node, and how many have another text."""
        from app import names
        from app.elastic import Cluster

        cluster = Cluster.connect(urls=[self.node.url], request_timeout_s=30)
        missing = other = 0
        try:
            ids = sorted(wanted)
            for first in range(0, len(ids), 500):
                part = ids[first : first + 500]
                for entry in await cluster.mget(names.read_alias(COLLECTION), part, timeout_s=30):
                    if not entry.get("found"):
                        missing += 1
                    elif entry["_source"].get("text") != wanted[entry["_id"]]:
                        other += 1
        finally:
            await cluster.close()
        return missing, other


@dataclass
class Load:
    """Callers that ask over and over, and what they were answered."""

    rig: Rig
    answers: list[Answer] = field(default_factory=list)
    acknowledged: dict[str, str] = field(default_factory=dict)
    writes: list[Answer] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _stop: bool = False

    def read(self, callers: int, ask: Callable[[], Awaitable[Answer]], *, pause_s: float = 0.0) -> None:
        """Ask from so many callers; one that is refused waits as long as it is told."""

        async def caller() -> None:
            while not self._stop:
                answer = await ask()
                self.answers.append(answer)
                wait_s = (
                    float(answer.headers.get("retry-after", 0) or 0) if answer.status in (429, 503) else 0.0
                )
                if answer.status == 0:
                    wait_s = 0.2
                await asyncio.sleep(max(pause_s, min(wait_s, 1.0) * self.rig.random.uniform(0.8, 1.2)))

        self._tasks += [asyncio.create_task(caller()) for _ in range(callers)]

    def write(self, callers: int, *, size: int = 5, pause_s: float = 0.0, name: str = "w") -> None:
        """Write new documents from so many callers, noting what was acknowledged."""

        async def caller(number: int) -> None:
            serial = 0
            while not self._stop:
                serial += 1
                batch = [
                    self.rig.document(f"{name}-{number}-{serial}-{n}", f"{name} {number} wrote {serial} {n}")
                    for n in range(size)
                ]
                answer = await self.rig.upsert(batch)
                self.writes.append(answer)
                texts = {item["id"]: item["text"] for item in batch}
                for item in answer.body.get("items", []):
                    if item["status"] in STORED:
                        self.acknowledged[item["id"]] = texts[item["id"]]
                await asyncio.sleep(
                    0.2 if answer.status == 0 else max(pause_s, 0.5 if answer.status != 200 else 0.0)
                )

        self._tasks += [asyncio.create_task(caller(number)) for number in range(callers)]

    def stop(self) -> None:
        """Ask nothing further."""
        self._stop = True

    async def end(self) -> None:
        """Let every caller have its last answer."""
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    @property
    def statuses(self) -> Counter[int]:
        """How often each status came, of reads and writes."""
        return Counter(answer.status for answer in (*self.answers, *self.writes))


def seconds(answers: Sequence[Answer]) -> list[float]:
    """Return how long each took."""
    return [answer.seconds for answer in answers]


def shown(statuses: Mapping[int, int]) -> str:
    """Return counts of statuses in words."""
    return ", ".join(f"{count}× {status or 'broken'}" for status, count in sorted(statuses.items())) or "none"


@contextlib.contextmanager
def memory_of(pid: int) -> Iterator[Callable[[], float]]:
    """Give a function that tells by how many MiB a process has grown at most since the block began; it samples itself."""
    before = resident_mb(pid)
    most = before
    stop = False

    async def sample() -> None:
        nonlocal most
        while not stop:
            most = max(most, resident_mb(pid))
            await asyncio.sleep(0.1)

    task = asyncio.ensure_future(sample())
    try:
        yield lambda: max(most, resident_mb(pid)) - before
    finally:
        stop = True
        task.cancel()


@contextlib.asynccontextmanager
async def raw(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a plain connection to a port of the loopback interface."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(port: int, request: bytes, *, within_s: float = 30.0) -> tuple[int, bytes]:
    """Send bytes as they are and return status and body; status 0 where the connection is closed without an answer."""
    async with raw(port) as (reader, writer):
        try:
            async with asyncio.timeout(within_s):
                writer.write(request)
                await writer.drain()
                return await read_response(reader)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            return 0, b""


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read a response that has a length; raises IncompleteReadError where there is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    length = next(
        (
            int(line.partition(b":")[2])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        ),
        0,
    )
    return status, await reader.readexactly(length)


def post(path: str, body: bytes, *more: str) -> bytes:
    """Return a POST of bytes as they are."""
    lines = [
        f"POST {path} HTTP/1.1", f"host: {HOST}", "content-type: application/json", f"content-length: {len(body)}",
        *more, "", "",
    ]  # fmt: skip
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


def problem_of(body: bytes) -> Json:
    """Return an error's body, empty where it is not JSON."""
    with contextlib.suppress(ValueError):
        told = json.loads(body)
        if isinstance(told, dict):
            return told
    return {}


if __name__ == "__main__":
    sys.exit("this is a part of ./scripts/faults and ./scripts/soak")
