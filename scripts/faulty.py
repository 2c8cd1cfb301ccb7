"""Own the far ends that misbehave on order: a proxy before a node, an embedding server and a reranker, all on loopback.

They speak HTTP/1.1 by hand, so that they can do what no framework allows: hang, drip, answer too much. What they
refuse is drawn from a seed; what passed is counted. Used by `scripts.faults` and its tests, never by the service.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import math
import random
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Json = dict[str, Any]
Mode = Literal["ok", "refuse", "hang", "drip", "garbage", "wrong count", "nan", "huge", "slow"]
HUGE_BYTES = 200 * 2**20
_PART = b" " * 65_536
_MOST_HEAD = 2**16


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    head: bytes
    body: bytes


class Loopback:
    """A server on a free port of the loopback interface; use as an async context manager."""

    def __init__(self, *, seed: int = 0) -> None:
        self.port = 0
        self.asked: Counter[str] = Counter()
        """Requests that arrived, by the last part of their path."""
        self.open = 0
        self.random = random.Random(seed)  # noqa: S311 - repeatable, no secret
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def total(self) -> int:
        """How many requests arrived."""
        return self.asked.total()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self.converse(reader, writer)
        finally:
            self.open -= 1
            self._connections.discard(task)
            writer.transport.abort()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests until it ends."""
        raise NotImplementedError

    async def read(self, reader: asyncio.StreamReader) -> Asked:
        """Read one request and count it."""
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, path, _ = lines[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.asked[path.partition("?")[0].rpartition("/")[2] or "/"] += 1
        return Asked(method, path, headers, head, body)


def answer(status: int, body: bytes, *more: str) -> bytes:
    """Return a whole response of JSON."""
    head = [
        f"HTTP/1.1 {status} -", "content-type: application/json", f"content-length: {len(body)}",
        "x-elastic-product: Elasticsearch", *more, "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode("latin-1") + body


# --- before a node -----------------------------------------------------------------------------------------------------


class Proxy(Loopback):
    """Stands between the service and a node: passes requests on, or answers 429 as a full queue does.

    `refuse` is the share of requests that are refused. `half_bulks` passes every second item of a bulk on and refuses
    the others one by one, as a node does whose queue fills up meanwhile; an item that comes alone passes.
    `refuse_items` is the share of a bulk's items that are refused, with 429 or 503. `lose_answers` is the share of bulks
    that the node carries out while the connection breaks before its answer is through.
    """

    def __init__(self, upstream: tuple[str, int], *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self._upstream = upstream
        self.refuse = 0.0
        self.half_bulks = False
        self.refuse_items = 0.0
        self.lose_answers = 0.0
        self.lost_answers = 0
        self.refused = 0
        self.refused_items = 0

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass requests on over a connection of their own."""
        node: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                asked = await self.read(reader)
                if self.random.random() < self.refuse:
                    self.refused += 1
                    writer.write(answer(429, _REFUSAL))
                    await writer.drain()
                    continue
                kept: list[bool] = []
                sent = asked.head + asked.body
                bulk = asked.path.startswith("/_bulk")
                if bulk and (self.half_bulks or self.refuse_items):
                    body, kept = self._thinned(asked.body)
                    if not body:
                        self.refused_items += len(kept)
                        told = {"took": 0, "errors": True, "items": []}
                        writer.write(
                            _with_refused_items(answer(200, json.dumps(told).encode()), kept, self._refusal)
                        )
                        await writer.drain()
                        continue
                    sent = _with_length(asked.head, len(body)) + body
                if node is not None and node[0].at_eof():
                    # A node that was killed since the last request is not this one's failure. Its end of file leaves
                    # our half of the connection open.
                    node[1].transport.abort()
                    node = None
                if node is None:
                    node = await asyncio.open_connection(*self._upstream, limit=2**26)
                node[1].write(sent)
                await node[1].drain()
                got = await _read_answer(node[0], head_only=asked.method == "HEAD")
                if kept and not all(kept):
                    self.refused_items += kept.count(False)
                    got = _with_refused_items(got, kept, self._refusal)
                if bulk and self.random.random() < self.lose_answers:
                    self.lost_answers += 1
                    return
                writer.write(got)
                await writer.drain()
        finally:
            if node is not None:
                node[1].transport.abort()

    def _refusal(self) -> "_Refusal":
        return _REFUSED_ITEMS[0] if self.half_bulks else self.random.choice(_REFUSED_ITEMS)

    def _thinned(self, body: bytes) -> tuple[bytes, list[bool]]:
        """Return a bulk of index actions without those that are refused, and which are kept."""
        lines = body.rstrip(b"\n").split(b"\n")
        pairs = [lines[at : at + 2] for at in range(0, len(lines), 2)]
        if self.half_bulks:
            kept = [number % 2 == 0 for number in range(len(pairs))]
        else:
            kept = [self.random.random() >= self.refuse_items for _ in pairs]
        left = [line for pair, keep in zip(pairs, kept, strict=True) if keep for line in pair]
        return b"".join(line + b"\n" for line in left), kept


_REFUSAL = json.dumps({
    "error": {"root_cause": [], "type": "es_rejected_execution_exception", "reason": "rejected execution (the queue is full)"},
    "status": 429,
}).encode()  # fmt: skip


def _with_length(head: bytes, length: int) -> bytes:
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length:")]
    return b"\r\n".join([lines[0], b"content-length: %d" % length, *lines[1:]])


_Refusal = tuple[int, str, str]
_REFUSED_ITEMS: tuple[_Refusal, ...] = (
    (429, "es_rejected_execution_exception", "rejected execution of a primary operation"),
    (503, "unavailable_shards_exception", "primary shard is not active"),
)


def _with_refused_items(got: bytes, kept: Sequence[bool], choose: Callable[[], _Refusal]) -> bytes:
    head, _, body = got.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    told = json.loads(body)
    items = iter(told["items"])

    def refused() -> Json:
        status, type_, reason = choose()
        return {
            "index": {"_index": "-", "_id": "-", "status": status, "error": {"type": type_, "reason": reason}}
        }

    told["items"] = [next(items) if keep else refused() for keep in kept]
    told["errors"] = True
    return answer(200, json.dumps(told).encode())


async def _read_answer(reader: asyncio.StreamReader, *, head_only: bool) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if head_only or b" 204 " in head[:16] or b" 304 " in head[:16]:
        return head
    if b"transfer-encoding: chunked" in lower:
        parts = [head]
        while True:
            line = await reader.readuntil(b"\r\n")
            chunk = await reader.readexactly(int(line, 16) + 2)
            parts += (line, chunk)
            if int(line, 16) == 0:
                return b"".join(parts)
    for line in lower.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.partition(b":")[2]))
    return head


def _unchunked(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


# --- embedders and rerankers -------------------------------------------------------------------------------------------


@dataclass
class Manners:
    """How a far end behaves at the moment."""

    mode: Mode = "ok"
    refuse: float = 0.0
    delay_s: float = 0.0
    poison: set[str] = field(default_factory=set)
    """Texts that are refused with 400 wherever they stand in a batch."""


class FarEnd(Loopback):
    """A server of JSON answers that misbehaves as `manners` say."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.manners = Manners()
        self.sent_bytes = 0

    def honest(self, asked: Json) -> Json:
        """Return the right answer."""
        raise NotImplementedError

    def spoilt(self, told: Json) -> bytes:
        """Return the answer as the mode spoils it."""
        raise NotImplementedError

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests until the connection ends."""
        while True:
            asked = await self.read(reader)
            manners = self.manners
            if manners.delay_s:
                await asyncio.sleep(manners.delay_s)
            if manners.mode == "refuse" or self.random.random() < manners.refuse:
                writer.write(answer(429, b'{"error":{"message":"slow down","type":"rate_limit"}}'))
                await writer.drain()
                continue
            if manners.mode == "hang":
                # Until the other side has enough: it hangs up, or this server is closed.
                await reader.read(1)
                return
            given = json.loads(asked.body)
            if manners.poison and not manners.poison.isdisjoint(given.get("input", ())):
                writer.write(answer(400, b'{"error":{"message":"this input is refused"}}'))
                await writer.drain()
                continue
            told = self.honest(given)
            if manners.mode == "huge":
                await self._huge(writer)
                return
            body = json.dumps(told).encode() if manners.mode in ("ok", "drip") else self.spoilt(told)
            whole = answer(200, body)
            if manners.mode == "drip":
                for at in range(0, len(whole), 8):
                    writer.write(whole[at : at + 8])
                    await writer.drain()
                    await asyncio.sleep(0.1)
                continue
            writer.write(whole)
            await writer.drain()

    async def _huge(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            f"HTTP/1.1 200 -\r\ncontent-type: application/json\r\ncontent-length: {HUGE_BYTES}\r\n\r\n".encode()
        )
        for _ in range(HUGE_BYTES // len(_PART)):
            writer.write(_PART)
            await writer.drain()
            self.sent_bytes += len(_PART)


def vector_of(text: str, dims: int) -> list[float]:
    """Return the unit vector that the text's words add up to, so that texts which share words are near each other."""
    total = [0.0] * dims
    for word in text.lower().split() or [text]:
        digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=dims).digest()
        for at, byte in enumerate(digest):
            total[at] += byte - 127.5
    length = math.sqrt(sum(number * number for number in total)) or 1.0
    return [number / length for number in total]


class Embeddings(FarEnd):
    """An embedding server of the OpenAI form: the sum of hashes of a text's words, at length one."""

    def __init__(self, *, dims: int = 32, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.dims = dims

    def honest(self, asked: Json) -> Json:
        """Return a vector for each input."""
        encoded = asked.get("encoding_format") == "base64"
        data = []
        for index, text in enumerate(asked["input"]):
            vector = vector_of(text, self.dims)
            packed: Any = (
                base64.b64encode(struct.pack(f"<{self.dims}f", *vector)).decode() if encoded else vector
            )
            data.append({"object": "embedding", "index": index, "embedding": packed})
        return {"object": "list", "data": data, "model": asked.get("model", "")}

    def spoilt(self, told: Json) -> bytes:
        """Return an answer that can't be used."""
        match self.manners.mode:
            case "garbage":
                return b"<html>Welcome to nginx!</html>"
            case "wrong count":
                told["data"] = told["data"][:-1] or [*told["data"], *told["data"]]
            case "nan":
                for item in told["data"]:
                    item["embedding"] = base64.b64encode(
                        struct.pack(f"<{self.dims}f", *[math.nan] * self.dims)
                    ).decode()
        return json.dumps(told).encode()


class Reranks(FarEnd):
    """A rerank server of the Cohere form: the share of the query's words that a document holds."""

    def honest(self, asked: Json) -> Json:
        """Return a score for each document."""
        words = set(asked["query"].lower().split())
        results = [
            {"index": index, "relevance_score": len(words & set(text.lower().split())) / max(1, len(words))}
            for index, text in enumerate(asked["documents"])
        ]
        return {"results": sorted(results, key=lambda item: -float(item["relevance_score"]))}

    def spoilt(self, told: Json) -> bytes:
        """Return an answer that can't be used."""
        match self.manners.mode:
            case "garbage":
                return b"<html>Welcome to nginx!</html>"
            case "wrong count":
                told["results"] = [
                    *told["results"],
                    {"index": len(told["results"]) + 7, "relevance_score": 1.0},
                ]
            case "nan":
                for item in told["results"]:
                    item["relevance_score"] = math.nan
        return json.dumps(told).encode()


@contextlib.asynccontextmanager
async def misbehaving(far: FarEnd, **manners: Any) -> AsyncIterator[None]:
    """Let a far end misbehave for the block."""
    before, far.manners = far.manners, Manners(**manners)
    try:
        yield
    finally:
        far.manners = before


Say = Callable[[str], None]
