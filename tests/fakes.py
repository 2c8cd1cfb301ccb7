"""Far ends for tests: real HTTP servers on loopback that play an embedding server, a reranker, or a broken one.

Each runs its own event loop in a thread, so that plain and async tests alike can use it, and speaks HTTP/1.1 by
hand, so that it can misbehave in ways no framework allows. What it answers is scripted per request; without a
script it behaves as the server it plays. Nothing here is shared between tests.
"""

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np


@dataclass(frozen=True)
class Seen:
    """One request as it arrived; `body` is its JSON, or None. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """One answer, and how badly it is given.

    `body` is sent as JSON unless it is bytes. `delay_s` comes before anything is sent, `hang` sends nothing until
    the test ends (with `hang_in_body`: the head and the first half), `drip_s` pauses after each byte, `close_after`
    cuts the connection after so many bytes of the body, `filler` appends so many spaces to the body.
    """

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang: bool = False
    hang_in_body: bool = False
    drip_s: float = 0.0
    close_after: int | None = None
    filler: int = 0


Answer = Reply | Callable[[Seen, Reply], Reply] | None
"""A scripted answer: a reply, a change to the honest one, or None for the honest one itself."""


class FarEnd:
    """A loopback HTTP server; use as a context manager.

    `script` answers the first requests, one entry each; `answer` the ones after it. `requests` are those that
    arrived, `open_now` and `most_open` count the ones under way, `bytes_sent` what went out as bodies.
    """

    def __init__(self, answer: Callable[[Seen], Reply] | None = None) -> None:
        self.answer: Callable[[Seen], Reply] = answer or (lambda _: Reply())
        self.script: list[Answer] = []
        self.requests: list[Seen] = []
        self.open_now = 0
        self.most_open = 0
        self.abandoned = 0
        self.bytes_sent = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="far end", daemon=True)
        self._released: asyncio.Event
        self._server: asyncio.Server
        self._connections: set[asyncio.Task[None]] = set()
        self._transports: set[asyncio.WriteTransport] = set()

    @property
    def url(self) -> str:
        """The server's address without a path."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def release(self) -> None:
        """Let every hanging answer be given."""
        self._loop.call_soon_threadsafe(self._released.set)

    async def _open(self) -> None:
        self._released = asyncio.Event()
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=2**26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        # A client whose connection is closed may try another at once; one that is accepted while the server is closed is
        # left open by asyncio (3.11), so nobody is accepted first, and those that are being accepted are waited for.
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        while pending := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        self._server.close()
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._transports.add(writer.transport)
        task = asyncio.get_running_loop().create_task(self._connected(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._serve(reader, writer):
                    pass
        finally:
            self._transports.discard(writer.transport)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(method, path, headers, json.loads(raw) if raw else None)
        self.requests.append(seen)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        answering = asyncio.ensure_future(self._reply(seen, writer))
        # A client that leaves shows as an end of file, or as a further byte if it pipelines, which none does.
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.abandoned += 1
                return False
            if leaving.done():
                return False
            return answering.result()
        finally:
            self.open_now -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _choose(self, seen: Seen) -> Reply:
        scripted = self.script.pop(0) if self.script else None
        if isinstance(scripted, Reply):
            return scripted
        honest = self.answer(seen)
        return honest if scripted is None else scripted(seen, honest)

    async def _reply(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        reply = self._choose(seen)
        if reply.delay_s:
            await asyncio.sleep(reply.delay_s)
        if reply.hang:
            await self._released.wait()
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body) + reply.filler),
            **reply.headers,
        }
        lines = [
            f"HTTP/1.1 {reply.status} Scripted",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if reply.hang_in_body:
            writer.write(body[: len(body) // 2])
            await self._released.wait()
            body = body[len(body) // 2 :]
        if reply.close_after is not None:
            writer.write(body[: reply.close_after])
            await writer.drain()
            return False
        for part in _parts(body, reply):
            writer.write(part)
            await writer.drain()
            self.bytes_sent += len(part)
            if reply.drip_s:
                await asyncio.sleep(reply.drip_s)
        return headers.get("connection") != "close"


def _parts(body: bytes, reply: Reply) -> Iterator[bytes]:
    if reply.drip_s:
        yield from (body[at : at + 1] for at in range(len(body)))
    else:
        yield body
    left = reply.filler
    while left > 0:
        yield b" " * min(left, 65_536)
        left -= 65_536


# --- an embedding server -------------------------------------------------------------------------------------


def vector_of(text: str, dims: int) -> list[float]:
    """Return the unit vector that every embedding server here gives this text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    vector = np.random.default_rng(seed).standard_normal(dims)
    return [float(x) for x in (vector / np.linalg.norm(vector)).astype(np.float32)]


def to_base64(vector: Sequence[float], order: Literal["<", ">"] = "<") -> str:
    """Return the vector as servers of the OpenAI API encode it, or big-endian."""
    return base64.b64encode(np.array(vector, dtype=f"{order}f4").tobytes()).decode()


def openai_error(
    status: int, message: str, *, code: str | None = None, param: str | None = None, **headers: str
) -> Reply:
    """Return an error in OpenAI's form; header names are written with `_` for `-`."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return Reply(status, {"error": error}, {name.replace("_", "-"): value for name, value in headers.items()})


class EmbeddingServer(FarEnd):
    """Plays an OpenAI-compatible server: refuses blank inputs, too many, too long ones, and texts in `poison`.

    A token is a word between spaces. `encoding` says whether base64 is honoured, ignored (numbers come), or refused.
    Without `says_too_long` an over-long input is cut and told in the non-standard `truncated`.
    """

    def __init__(
        self,
        *,
        dims: int = 8,
        max_inputs: int = 2048,
        max_request_tokens: int = 300_000,
        max_input_tokens: int = 8192,
        says_too_long: bool = True,
        encoding: Literal["honour", "ignore", "refuse"] = "honour",
        shuffle: bool = False,
    ) -> None:
        super().__init__(self._embed)
        self.dims = dims
        self.max_inputs = max_inputs
        self.max_request_tokens = max_request_tokens
        self.max_input_tokens = max_input_tokens
        self.says_too_long = says_too_long
        self.encoding = encoding
        self.shuffle = shuffle
        self.poison: dict[str, Reply] = {}

    @property
    def base_url(self) -> str:
        """What an embedder is configured with."""
        return self.url + "/v1"

    @property
    def batches(self) -> list[list[str]]:
        """The inputs of each request that arrived."""
        return [seen.body["input"] for seen in self.requests]

    def _embed(self, seen: Seen) -> Reply:
        if seen.path != "/v1/embeddings" or seen.method != "POST":
            return openai_error(404, f"no such path: {seen.path}")
        texts = seen.body["input"]
        if (
            not isinstance(texts, list)
            or not texts
            or any(not isinstance(t, str) or not t.strip() for t in texts)
        ):
            return openai_error(400, "'$.input' is invalid: it holds a blank string or is empty")
        if self.encoding == "refuse" and seen.body.get("encoding_format") == "base64":
            return openai_error(400, "encoding_format must be float", param="encoding_format")
        if len(texts) > self.max_inputs:
            return openai_error(400, f"batch of {len(texts)} is more than {self.max_inputs}")
        counts = [len(text.split()) for text in texts]
        if sum(counts) > self.max_request_tokens:
            return openai_error(
                400, f"requested {sum(counts)} tokens, max {self.max_request_tokens} per request"
            )
        for text in texts:
            if text in self.poison:
                return self.poison[text]
        if self.says_too_long and max(counts) > self.max_input_tokens:
            return openai_error(
                400, f"maximum context length is {self.max_input_tokens} tokens, got {max(counts)}"
            )
        data = [
            {"object": "embedding", "index": i, "embedding": self._encode(t, seen)}
            for i, t in enumerate(texts)
        ]
        if self.shuffle:
            data.reverse()
        cut = [i for i, count in enumerate(counts) if count > self.max_input_tokens]
        return Reply(body={"object": "list", "data": data, "model": seen.body["model"], "truncated": cut})

    def _encode(self, text: str, seen: Seen) -> Any:
        vector = vector_of(text, seen.body.get("dimensions") or self.dims)
        return (
            to_base64(vector)
            if seen.body.get("encoding_format") == "base64" and self.encoding == "honour"
            else vector
        )


# --- a reranker ----------------------------------------------------------------------------------------------


def overlap(query: str, document: str) -> float:
    """Return the score every reranker here gives: the share of the query's words that the document holds."""
    words = set(query.lower().split())
    return len(words & set(document.lower().split())) / max(1, len(words))


class RerankServer(FarEnd):
    """Plays a rerank server of either form: results sorted by score, as the real ones answer.

    A cohere one honours `top_n`; a tei one refuses what lacks `texts`, and more than `max_batch` of them.
    """

    def __init__(self, form: Literal["cohere", "tei"] = "cohere", *, max_batch: int = 1000) -> None:
        super().__init__(self._rerank)
        self.form = form
        self.max_batch = max_batch
        self.max_chars = 10_000_000

    @property
    def batches(self) -> list[list[str]]:
        """The documents of each request that arrived in this server's own form."""
        name = "texts" if self.form == "tei" else "documents"
        return [seen.body[name] for seen in self.requests if name in seen.body]

    def _rerank(self, seen: Seen) -> Reply:
        name, key = ("texts", "score") if self.form == "tei" else ("documents", "relevance_score")
        documents = seen.body.get(name)
        if not seen.path.endswith("/rerank"):
            return Reply(404, {"detail": "Not Found"})
        if not isinstance(documents, list):
            return Reply(422, {"error": f"missing field `{name}`", "error_type": "Validation"})
        if len(documents) > self.max_batch:
            return Reply(
                422, {"error": f"batch size {len(documents)} > maximum allowed batch size {self.max_batch}"}
            )
        if max(map(len, documents)) > self.max_chars:
            return Reply(413, {"error": "input is too long"})
        scored = [(overlap(seen.body["query"], text), index) for index, text in enumerate(documents)]
        ranked = [
            {"index": index, key: score} for score, index in sorted(scored, key=lambda s: (-s[0], s[1]))
        ]
        if self.form == "tei":
            return Reply(body=ranked)
        return Reply(body={"id": "r", "results": ranked[: seen.body.get("top_n") or len(ranked)]})


# --- a chat model --------------------------------------------------------------------------------------------


class ChatServer(FarEnd):
    """Plays an OpenAI-compatible chat server whose model says `said` (JSON unless text); refuses fields in `refuses`."""

    def __init__(self, said: Any, *, refuses: Sequence[str] = ()) -> None:
        super().__init__(self._complete)
        self.said = said
        self.refuses = tuple(refuses)

    @property
    def base_url(self) -> str:
        """What a rewriter is configured with."""
        return self.url + "/v1"

    def _complete(self, seen: Seen) -> Reply:
        if seen.path != "/v1/chat/completions" or seen.method != "POST":
            return openai_error(404, f"no such path: {seen.path}")
        for name in self.refuses:
            if name in seen.body:
                return openai_error(400, f"Unsupported parameter: '{name}'", param=name)
        content = self.said if isinstance(self.said, str) else json.dumps(self.said, ensure_ascii=False)
        message = {"role": "assistant", "content": content}
        return Reply(body={"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
