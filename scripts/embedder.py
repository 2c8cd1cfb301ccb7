"""The local embedding server: multilingual-e5-small behind OpenAI's embeddings API, in a process of its own.

Owns the HTTP form, its limits and the order of work. Refuses what it cannot honour (other models, other dimensions,
token ids of another vocabulary) rather than answering something else. It adds no prefix: `query: ` and `passage: `
are the client's business. A short request never waits for a long one to end: work is done in slices of some tens of
milliseconds and short requests go first.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from scripts.e5 import (
    DIMENSIONS,
    E5,
    MAX_TOKENS,
    MODEL_NAME,
    SLICE_TOKENS,
    Encoding,
    Floats,
    Ids,
    Kernel,
    ModelError,
    Tokenizer,
    padded_length,
    slices,
)

DEFAULT_PORT = 9400

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one request and the queue may hold. Sizes in bytes, texts and tokens (after cutting to 512 each)."""

    body_bytes: int = 8 * 1024 * 1024
    texts: int = 256
    request_tokens: int = 131_072
    queue_tokens: int = 131_072
    short_tokens: int = 128
    short_queue_tokens: int = 16_384
    body_seconds: float = 30.0


class Refused(Exception):
    """A request not done; becomes an error answer in OpenAI's form."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s


# ------------------------------------------------------------------------------------------------------- scheduler


class Runner(Protocol):
    """What the scheduler needs of the model: vectors (n, 384) for token ids of one padded length."""

    def run(self, texts: Sequence[Ids]) -> Floats: ...


@dataclass(eq=False)
class Job:
    """One request's work: its texts, the slices still to do, and the vectors (n, 384) as they come."""

    texts: Sequence[Ids]
    plan: deque[list[int]]
    vectors: Floats
    short: bool
    waiting_tokens: int
    missing: int
    result: "Future[Floats]" = field(default_factory=Future)

    def tokens_of(self, indexes: Sequence[int]) -> int:
        """Count the tokens of some of the texts, as read."""
        return sum(len(self.texts[index]) for index in indexes)


class Scheduler:
    """Runs jobs slice by slice on `workers` threads: short jobs first, long jobs in turns, each bounded.

    Short jobs of one length share a slice (vectors don't depend on company). While short jobs keep coming, every
    ninth slice of a worker still goes to a long one. A slice that runs is not stopped; a cancelled job's other
    slices never run.
    """

    SHORT_IN_A_ROW = 8

    def __init__(self, model: Runner, *, workers: int, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._short: deque[Job] = deque()
        self._long: deque[Job] = deque()
        self._streak = 0
        self._closed = False
        self._changed = threading.Condition()
        self._tokens_per_second = 3000.0 * workers
        self._workers = workers
        self._threads = [
            threading.Thread(target=self._work, name=f"embed-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, texts: Sequence[Ids]) -> Job:
        """Queue token ids of texts; raise Refused (503, with Retry-After) where too much is waiting already."""
        tokens = sum(map(len, texts))
        plan = deque(slices([len(ids) for ids in texts]))
        vectors = np.empty((len(texts), DIMENSIONS), np.float32)
        job = Job(texts, plan, vectors, tokens <= self._limits.short_tokens, tokens, len(texts))
        with self._changed:
            if self._closed:
                raise _shutting_down()
            lane, limit = (
                (self._short, self._limits.short_queue_tokens)
                if job.short
                else (self._long, self._limits.queue_tokens)
            )
            waiting = sum(other.waiting_tokens for other in lane)
            if lane and waiting + tokens > limit:
                raise Refused(
                    f"{waiting} tokens are waiting to be embedded and this request's {tokens} would pass the limit "
                    f"of {limit}. Try again later, or with smaller batches.",
                    status=503,
                    code="overloaded",
                    retry_after_s=min(60, math.ceil(waiting / self._tokens_per_second) or 1),
                )
            lane.append(job)
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """Drop what is left of a job, whose result nobody waits for any more."""
        self._drop(job)
        job.result.cancel()

    def waiting_tokens(self) -> int:
        """Count the tokens no worker has begun with."""
        with self._changed:
            return sum(job.waiting_tokens for job in (*self._short, *self._long))

    def close(self) -> None:
        """Refuse new jobs, fail the waiting ones (503) and let the workers end after their present slice."""
        with self._changed:
            self._closed = True
            left = [*self._short, *self._long]
            self._short.clear()
            self._long.clear()
            self._changed.notify_all()
        for job in left:
            _settle(job, _shutting_down())

    def join(self, timeout_s: float) -> None:
        """Wait for the workers of a closed scheduler, at most so long."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._short or self._long):
                    self._changed.wait()
                if self._closed:
                    return
                batch = self._take()
            begun = time.perf_counter()
            try:
                vectors = self._model.run([job.texts[index] for job, index in batch])
            except Exception as error:  # noqa: BLE001 - a thread that died would leave every later request waiting
                _log.exception("embedding failed")
                for job, _ in batch:
                    self._drop(job)
                    _settle(job, error)
                continue
            tokens = sum(len(job.texts[index]) for job, index in batch)
            speed = self._workers * tokens / max(1e-6, time.perf_counter() - begun)
            self._tokens_per_second += 0.05 * (speed - self._tokens_per_second)
            self._deliver(batch, vectors)

    def _drop(self, job: Job) -> None:
        with self._changed:
            lane = self._short if job.short else self._long
            if job in lane:
                lane.remove(job)

    def _take(self) -> list[tuple[Job, int]]:
        """Return the next slice as (job, index of text). Called with the lock held and some job waiting."""
        take_short = bool(self._short) and (self._streak < self.SHORT_IN_A_ROW or not self._long)
        self._streak = self._streak + 1 if take_short else 0
        lane = self._short if take_short else self._long
        batch = self._take_slice(lane, lane[0])
        if take_short:
            length = padded_length(len(batch[0][0].texts[batch[0][1]]))
            for job in list(lane):
                size = len(batch) + len(job.plan[0])
                if padded_length(len(job.texts[job.plan[0][0]])) == length and size * length <= SLICE_TOKENS:
                    batch += self._take_slice(lane, job)
        return batch

    @staticmethod
    def _take_slice(lane: deque[Job], job: Job) -> list[tuple[Job, int]]:
        lane.remove(job)
        indexes = job.plan.popleft()
        job.waiting_tokens -= job.tokens_of(indexes)
        if job.plan:
            lane.append(job)
        return [(job, index) for index in indexes]

    def _deliver(self, batch: Sequence[tuple[Job, int]], vectors: Floats) -> None:
        for (job, index), vector in zip(batch, vectors, strict=True):
            job.vectors[index] = vector
            with self._changed:
                job.missing -= 1
                done = not job.missing
            if done:
                _settle(job, job.vectors)


def _settle(job: Job, outcome: Floats | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled, or failed by another slice
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)


def _shutting_down() -> Refused:
    return Refused("The server is shutting down.", status=503, code="shutting_down", retry_after_s=1)


# -------------------------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class EmbeddingRequest:
    """A valid body of POST /v1/embeddings."""

    texts: list[str]
    as_base64: bool


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a request body; raise Refused unless it is one JSON object in UTF-8, without NaN or Infinity."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(f"The body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused("The body must be a JSON object.", code="invalid_json")
    return value


def read_texts(value: Any, limits: Limits) -> list[str]:
    """Return `input` as a list of non-empty texts; raise Refused otherwise."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise Refused("'input' must be a string or a list of strings.", param="input")
    if not texts:
        raise Refused("'input' is an empty list: send at least one text.", param="input")
    if all(isinstance(item, (int, list)) for item in texts):
        raise Refused(
            "'input' holds token ids. They belong to another model's vocabulary and would be read as other words "
            "here: send text. (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False.)",
            param="input",
            code="token_ids_unsupported",
        )
    if len(texts) > limits.texts:
        raise Refused(
            f"'input' holds {len(texts)} texts, at most {limits.texts} are taken at once: send smaller batches.",
            param="input",
            code="too_many_inputs",
        )
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise Refused(f"'input[{index}]' must be a string.", param=f"input[{index}]")
        if not text:
            raise Refused(f"'input[{index}]' is an empty string: leave it out.", param=f"input[{index}]")
    return texts


def check_model(name: Any) -> None:
    """Raise Refused (404) unless `name` is the model served here."""
    if not isinstance(name, str):
        raise Refused(f"'model' must be a string; this server has {MODEL_NAME!r}.", param="model")
    if name != MODEL_NAME:
        raise Refused(
            f"The model {name[:80]!r} does not exist here; this server has {MODEL_NAME!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def read_embedding_request(body: bytes, limits: Limits) -> EmbeddingRequest:
    """Check a body of POST /v1/embeddings; raise Refused naming the field and the remedy."""
    fields = read_json(body)
    _refuse_unknown(fields, {"input", "model", "encoding_format", "dimensions", "user"})
    check_model(fields.get("model"))
    texts = read_texts(fields.get("input"), limits)
    encoding_format = "float" if fields.get("encoding_format") is None else fields["encoding_format"]
    if encoding_format not in ("float", "base64"):
        raise Refused("'encoding_format' must be 'float' or 'base64'.", param="encoding_format")
    dimensions = fields.get("dimensions")
    if dimensions is not None and (isinstance(dimensions, bool) or dimensions != DIMENSIONS):
        raise Refused(
            f"'dimensions' must be {DIMENSIONS} or left out: {MODEL_NAME} was not trained to be shortened.",
            param="dimensions",
        )
    return EmbeddingRequest(texts, as_base64=encoding_format == "base64")


def _refuse_unknown(fields: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(fields.keys() - known)
    if unknown:
        name = unknown[0][:80].encode("utf-8", "replace").decode()
        raise Refused(
            f"{name!r} is not a parameter here; known are {', '.join(sorted(known))}. "
            "(Prefixes such as 'query: ' are part of the text.)",
            param=name,
            code="unknown_parameter",
        )


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read a body of bounded size in bounded time."""
    too_large = Refused(
        f"The body is larger than {limits.body_bytes} bytes: send smaller batches.",
        status=413,
        code="request_too_large",
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise Refused("The body did not arrive in time.", status=408, code="timeout") from error
    return bytes(body)


# --------------------------------------------------------------------------------------------------------- answers


def error_answer(refusal: Refused) -> Response:
    """Turn a refusal into OpenAI's error form. Plain ASCII, so that it encodes whatever was in the request."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    error = {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}
    headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    body = json.dumps({"error": error}).encode("ascii")
    return Response(body, refusal.status, headers, media_type="application/json")


async def embedding_answer(vectors: Floats, encodings: Sequence[Encoding], *, as_base64: bool) -> Response:
    """Write the answer, letting other requests run between the vectors: 256 in digits take 25 ms."""
    items: list[str] = []
    for index, vector in enumerate(vectors):
        if as_base64:
            written = f'"{base64.b64encode(vector.astype("<f4").tobytes()).decode()}"'
        else:
            written = (
                f"[{','.join(map('%.9g'.__mod__, vector.tolist()))}]"  # 9 digits give the same float32 again
            )
        items.append(f'{{"object":"embedding","index":{index},"embedding":{written}}}')
        if index % 32 == 31:
            await asyncio.sleep(0)
    tokens = sum(len(encoding.ids) for encoding in encodings)
    truncated = [index for index, encoding in enumerate(encodings) if encoding.truncated]
    rest = {
        "model": MODEL_NAME,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "truncated": truncated,
    }
    body = f'{{"object":"list","data":[{",".join(items)}],{json.dumps(rest)[1:]}'
    headers = {"x-truncated-inputs": str(len(truncated))} if truncated else {}
    return Response(body.encode("ascii"), headers=headers, media_type="application/json")


# --------------------------------------------------------------------------------------------------------- service


class Service:
    """The endpoints, over one tokenizer and one scheduler."""

    # Bodies up to this size are read on the event loop (a millisecond); larger ones in a thread that yields to it.
    SMALL_BODY = 16 * 1024
    OFFSET_CHARS = 200_000

    def __init__(
        self, tokenizer: Tokenizer, scheduler: Scheduler, limits: Limits, about: dict[str, Any]
    ) -> None:
        self._tokenizer, self._scheduler, self._limits, self._about = tokenizer, scheduler, limits, about
        self._created = int(time.time())
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="read")

    async def embeddings(self, request: Request) -> Response:
        body = await read_body(request, self._limits)
        wanted, encodings = await self._read(body, self._encode)
        tokens = sum(len(encoding.ids) for encoding in encodings)
        if tokens > self._limits.request_tokens:
            raise Refused(
                f"'input' has {tokens} tokens, at most {self._limits.request_tokens} are taken at once: "
                "send smaller batches.",
                param="input",
                code="max_tokens_per_request",
            )
        job = self._scheduler.submit([encoding.ids for encoding in encodings])
        vectors = await self._result(job, request)
        return await embedding_answer(vectors, encodings, as_base64=wanted.as_base64)

    async def tokenize(self, request: Request) -> Response:
        body = await read_body(request, self._limits)
        return JSONResponse(await self._read(body, self._count))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        waiting = self._scheduler.waiting_tokens()
        return JSONResponse({"status": "ok", **self._about, "waiting_tokens": waiting})

    def stop(self) -> None:
        """Refuse new work and what is waiting, at once."""
        self._scheduler.close()

    async def close(self) -> None:
        """Wait for the slices under way."""
        self.stop()
        await asyncio.to_thread(self._scheduler.join, 2.0)
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _model(self) -> dict[str, Any]:
        return {
            "id": MODEL_NAME,
            "object": "model",
            "created": self._created,
            "owned_by": "halflife",
            "dimensions": DIMENSIONS,
            "max_tokens": MAX_TOKENS,
        }

    async def _read(self, body: bytes, read: Callable[[bytes], T]) -> T:
        if len(body) <= self.SMALL_BODY:
            return read(body)
        return await asyncio.get_running_loop().run_in_executor(self._readers, read, body)

    def _encode(self, body: bytes) -> tuple[EmbeddingRequest, list[Encoding]]:
        wanted = read_embedding_request(body, self._limits)
        encodings = [self._tokenizer.encode(text) for text in wanted.texts]
        for index, encoding in enumerate(encodings):
            if encoding.blank:
                raise Refused(
                    f"'input[{index}]' holds only spaces or control characters: leave it out.",
                    param=f"input[{index}]",
                    code="blank_input",
                )
        return wanted, encodings

    def _count(self, body: bytes) -> dict[str, Any]:
        fields = read_json(body)
        _refuse_unknown(fields, {"input", "model", "offsets"})
        if "model" in fields:
            check_model(fields["model"])
        value, offsets = fields.get("input"), fields.get("offsets", False)
        if not isinstance(offsets, bool):
            raise Refused("'offsets' must be true or false.", param="offsets")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise Refused("'input' must be a string or a list of strings.", param="input")
        if offsets and sum(map(len, texts)) > self.OFFSET_CHARS:
            raise Refused(
                f"Offsets are told for at most {self.OFFSET_CHARS} characters at once: send less.",
                param="input",
                code="too_many_inputs",
            )
        answer: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": MAX_TOKENS}
        answer["counts"] = [self._tokenizer.count(text) for text in texts]
        if offsets:
            answer["offsets"] = [self._tokenizer.offsets(text) for text in texts]
        return answer

    async def _result(self, job: Job, request: Request) -> Floats:
        """Wait for a job; drop it when the client goes away."""
        result: asyncio.Future[Any] = asyncio.wrap_future(job.result)
        gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise ClientDisconnect
            vectors: Floats = await result
            return vectors
        finally:
            gone.cancel()
            self._scheduler.cancel(job)


def create_app(
    tokenizer: Tokenizer, runner: Runner, *, workers: int, limits: Limits, about: dict[str, Any]
) -> Starlette:
    """Return the ASGI application; `about` is added to what /health tells. The workers start at once."""
    service = Service(tokenizer, Scheduler(runner, workers=workers, limits=limits), limits, about)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await service.close()

    async def on_refused(request: Request, error: Exception) -> Response:
        return error_answer(error if isinstance(error, Refused) else Refused(str(error)))

    async def on_http_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        says = {404: "There is no such path here.", 405: "This path takes another method."}
        where = "POST /v1/embeddings, POST /tokenize, GET /v1/models, GET /health"
        return error_answer(
            Refused(f"{says.get(status, 'The request failed.')} Known: {where}.", status=status)
        )

    async def on_gone(request: Request, error: Exception) -> Response:
        return error_answer(Refused("The client closed the connection.", status=499))  # nobody reads it

    async def on_error(request: Request, error: Exception) -> Response:
        return error_answer(
            Refused("The server failed; its log says why.", status=500, code="internal_error")
        )

    app = Starlette(
        routes=[
            Route("/v1/embeddings", service.embeddings, methods=["POST"]),
            # The same without a version, so that the bare address works as a client's base URL too.
            Route("/embeddings", service.embeddings, methods=["POST"]),
            Route("/tokenize", service.tokenize, methods=["POST"]),
            Route("/v1/tokenize", service.tokenize, methods=["POST"]),
            Route("/v1/models", service.models, methods=["GET"]),
            Route("/v1/models/{name:path}", service.model, methods=["GET"]),
            Route("/health", service.health, methods=["GET"]),
        ],
        lifespan=lifespan,
        exception_handlers={
            Refused: on_refused,
            HTTPException: on_http_error,
            ClientDisconnect: on_gone,
            Exception: on_error,
        },
    )
    app.state.service = service
    return app


# --------------------------------------------------------------------------------------------------------- process


def default_workers() -> int:
    """Return how many slices run at once: all of one or two cores, else one core less, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if cores <= 2 else min(8, cores - 1)


class _Server(uvicorn.Server):
    """uvicorn that says when it listens, and ends when told by `ending`."""

    def __init__(self, config: uvicorn.Config, *, ending: threading.Event, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending, self._ready = ending, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._ending.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # else uvicorn would wait for requests that wait in the queue
        self.config.app.state.service.stop()  # type: ignore[union-attr]  # the config holds the Starlette app
        await super().shutdown(sockets)


def _end_with_stdin(ending: threading.Event, grace_s: float) -> None:
    """Set `ending` once standard input closes, as it does when the process at its other end dies, however it dies."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    ending.set()
    time.sleep(grace_s)
    os._exit(1)


def listen(host: str, port: int) -> socket.socket:
    """Bind a TCP socket (port 0: a free one); raise ModelError where that fails."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise ModelError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
    return sock


def run(
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    threads: int | None = None,
    cache_dir: Path | None = None,
    kernel: Kernel | Literal["auto"] = "auto",
    limits: Limits | None = None,
    end_with_stdin: bool = False,
) -> None:
    """Serve until SIGTERM, SIGINT or (`end_with_stdin`) the end of standard input; then return within seconds.

    Prints `Embedder ready at http://host:port/v1 (…)` once it answers. Raises ModelError when the model or the
    address cannot be had. To be called in the main thread of a process that doesn't fork.
    """
    ending = threading.Event()
    if end_with_stdin:
        threading.Thread(target=_end_with_stdin, args=(ending, 5.0), daemon=True).start()
    with listen(host, port) as sock:
        begun = time.perf_counter()
        model = E5(cache_dir=cache_dir, kernel=kernel)
        workers = threads or default_workers()
        about = {"model": MODEL_NAME, "dimensions": DIMENSIONS, "kernel": model.kernel, "threads": workers}
        app = create_app(model.tokenizer, model, workers=workers, limits=limits or Limits(), about=about)
        name, bound = sock.getsockname()[:2]
        address = f"http://[{name}]:{bound}/v1" if ":" in name else f"http://{name}:{bound}/v1"
        took = time.perf_counter() - begun

        def ready() -> None:
            with contextlib.suppress(OSError):  # nobody reads it: no reason to end
                print(
                    f"Embedder ready at {address} ({MODEL_NAME}, {model.kernel}, {workers} threads, {took:.1f} s)",
                    flush=True,
                )

        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=75,  # longer than clients keep idle connections, lest they write into a closed one
            timeout_graceful_shutdown=3,
            limit_concurrency=512,
        )
        server = _Server(config, ending=ending, ready=ready)
        if threading.current_thread() is threading.main_thread():
            # uvicorn raises the signal again once it has shut down; by then there is nothing left to do
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: ending.set())
        server.run(sockets=[sock])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server from the command line; return the exit status."""
    limits = Limits()
    parser = argparse.ArgumentParser(prog="halflife embedder", description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, help=f"texts in work at once (here: {default_workers()})")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="where the model's graph is kept (default: $HALFLIFE_CACHE, else halflife in $XDG_CACHE_HOME or ~/.cache)",
    )
    parser.add_argument(
        "--kernel", choices=["auto", "int8", "q4"], default="auto", help="q4: slower, closest"
    )
    parser.add_argument(
        "--max-batch", type=int, default=limits.texts, help="texts a request (default: %(default)s)"
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")
    chosen = parser.parse_args(arguments)
    if (
        (chosen.threads is not None and chosen.threads < 1)
        or chosen.max_batch < 1
        or not 0 <= chosen.port < 65536
    ):
        parser.error("--threads and --max-batch begin at 1, --port lies between 0 and 65535")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        run(
            chosen.host,
            chosen.port,
            threads=chosen.threads,
            cache_dir=chosen.cache_dir,
            kernel=chosen.kernel,
            limits=replace(limits, texts=chosen.max_batch),
            end_with_stdin=chosen.end_with_stdin,
        )
    except ModelError as error:
        print(f"halflife embedder: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
