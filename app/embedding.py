"""The door to the embedding server, any that speaks the OpenAI API: the only importer of `openai`.

Owns what happens between a list of texts and checked vectors: prefixes, batches, bounded concurrency, retries
within a budget, a breaker that leaves a dead server alone,
splitting a refused batch down to the text at fault, the order of the answer, the checks of each vector, and a
cache for queries. Refuses to send blank texts or empty lists, and to hand on a vector that Elasticsearch could
not compare. Failures of single texts come back beside the vectors of the others; nothing here raises for them.
"""

import asyncio
import base64
import binascii
import json
import math
import random
import re
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self, TypeVar

import httpx2
import numpy as np
import numpy.typing as npt
import openai

from app import observing
from app.breaker import Outcome
from app.dialling import brief, check_key, open_client, parse_url, retry_after_s, sendable, shown
from app.errors import EmbedderRejected, EmbedderUnavailable, HalflifeError, InvalidRequest
from app.guarding import Guard, repeating

Vector = npt.NDArray[np.float32]
_Number = TypeVar("_Number", int, float)

SMALLEST_NORM: Final = 1e-15
"""Below this length Elasticsearch's float32 sum of squares is zero, and it refuses the vector (1e-30 measured)."""

BYTES_PER_NUMBER: Final = 48
"""Room for one number of an answer, as indented JSON text; base64 needs 5.4."""

LARGEST_ANSWER: Final = 256 * 2**20
MOST_DIMS: Final = 8192
CONNECT_S: Final = 5.0
ERROR_BYTES: Final = 64 * 1024
SMALLEST_LEARNED_BATCH: Final = 8
QUERIES_WAITING: Final = 8
"""Requests with queries of one caller that are under way or wait, for each that may be under way; who has more is told at
once that it is too busy. All callers together may have twice as many."""
CUTS: Final = 8
CUT_FACTOR: Final = 0.7


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """What became of the texts, in their order.

    `vectors` are read-only float32 arrays of shape (dims,), None exactly where `errors` has the index.
    `truncated` holds the indexes of texts of which only the beginning was embedded.
    """

    vectors: list[Vector | None]
    errors: dict[int, HalflifeError]
    truncated: frozenset[int]


# --- failures ------------------------------------------------------------------------------------------------

Then = Literal["retry", "split", "stop", "fail", "away"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A failure told in our words, and what to do: retry later, split the batch, stop the call, fail this batch.

    away: it was not sent, because the breaker is open or the pool full; only who has time tries again.
    """

    error: HalflifeError
    then: Then
    status: int | None = None
    timed_out: bool = False
    retry_after_s: float | None = None


_KEY_REMEDY = "check the embedding API key and what it may use"
_URL_REMEDY = "check the embedding base URL (it usually ends in /v1) and the model's name"
_BUG_REMEDY = "this call should not be reachable: report it with the log"

_STATUSES: Final[dict[int, tuple[Then, str]]] = {
    400: ("split", "check the model's limits, its name and whether it takes `dimensions`"),
    401: ("stop", _KEY_REMEDY),
    402: ("stop", "the account behind the embedding API key needs credit"),
    403: ("stop", _KEY_REMEDY),
    404: ("stop", _URL_REMEDY),
    405: ("stop", _URL_REMEDY),
    408: ("retry", "raise the time limit or send smaller batches"),
    409: ("retry", "try again"),
    410: ("stop", _URL_REMEDY),
    413: ("split", "lower the batch limits of the embedder's settings to the server's"),
    415: ("stop", _URL_REMEDY),
    422: ("split", "check the model's limits, its name and whether it takes `dimensions`"),
    424: ("retry", "look into the embedding server's log"),
    425: ("retry", "try again"),
    429: ("retry", "try later, or lower the embedder's concurrency"),
    501: ("stop", _URL_REMEDY),
}

MAPPED: Final[dict[type[BaseException], tuple[Then, str, str]]] = {
    openai.APITimeoutError: (
        "retry",
        "did not answer in time",
        "raise the time limit or send smaller batches",
    ),
    openai.APIConnectionError: ("retry", "can't be reached", "check that it runs and the embedding base URL"),
    openai.BadRequestError: ("split", "", ""),
    openai.AuthenticationError: ("stop", "", ""),
    openai.OAuthError: ("stop", "", ""),
    openai.PermissionDeniedError: ("stop", "", ""),
    openai.NotFoundError: ("stop", "", ""),
    openai.ConflictError: ("retry", "", ""),
    openai.UnprocessableEntityError: ("split", "", ""),
    openai.RateLimitError: ("retry", "", ""),
    openai.InternalServerError: ("retry", "", ""),
    openai.APIStatusError: ("fail", "", ""),
    openai.APIResponseValidationError: ("fail", "answered something unusable", _URL_REMEDY),
    openai.APIError: ("fail", "answered an error", _URL_REMEDY),
    openai.LengthFinishReasonError: ("fail", "answered as a chat model", _BUG_REMEDY),
    openai.ContentFilterFinishReasonError: ("fail", "answered as a chat model", _BUG_REMEDY),
    openai.InvalidWebhookSignatureError: ("fail", "answered as a webhook", _BUG_REMEDY),
    openai.WebSocketConnectionClosedError: ("fail", "answered as a web socket", _BUG_REMEDY),
    openai.WebSocketQueueFullError: ("fail", "answered as a web socket", _BUG_REMEDY),
    openai.OpenAIError: ("fail", "can't be asked by the client library", _BUG_REMEDY),
    # The body is read here and not by `openai`, so what breaks while it comes arrives as httpx2 raises it.
    httpx2.TimeoutException: (
        "retry",
        "did not answer in time",
        "raise the time limit or send smaller batches",
    ),
    httpx2.DecodingError: ("fail", "answered a body that does not decompress", "look at what stands between"),
    httpx2.LocalProtocolError: (
        "stop",
        "can't be sent this request",
        "the API key or model holds characters HTTP refuses",
    ),
    httpx2.UnsupportedProtocol: ("stop", "has no http or https address", _URL_REMEDY),
    httpx2.TransportError: (
        "retry",
        "broke the connection",
        "try again; look into the embedding server's log",
    ),
    httpx2.HTTPError: ("fail", "can't be spoken to", _URL_REMEDY),
    httpx2.InvalidURL: ("stop", "has no valid address", _URL_REMEDY),
    httpx2.StreamError: ("fail", "answered a body that can't be read", _BUG_REMEDY),
    ssl.SSLCertVerificationError: (
        "stop",
        "shows a certificate that does not verify",
        "give the CA that signed it",
    ),
    ssl.SSLError: ("retry", "broke the TLS connection", "check that its address is meant to be https"),
    OSError: ("retry", "broke the connection", "try again; look into the embedding server's log"),
    TimeoutError: ("retry", "did not answer in time", "raise the time limit or send smaller batches"),
}
"""Every exception that may come out of a request -> (what to do, what happened, remedy); statuses say it themselves."""


def translate(exc: BaseException, *, at: str, secret: str | None = None) -> Verdict:
    """Return what the vendor's exception means; `at` is the server's address, `secret` is kept out of messages.

    An exception whose classes are all missing in MAPPED is raised again: it is a fault of ours.
    """
    cause = exc.__cause__ if isinstance(exc, openai.APIConnectionError) and exc.__cause__ is not None else exc
    if isinstance(exc, openai.APIStatusError):
        verdict = _status_verdict(exc, at=at, secret=secret)
    else:
        # What openai calls a connection error may be a request that can't be sent, or never will be answered.
        told: type[BaseException] = type(exc)
        if isinstance(cause, httpx2.LocalProtocolError | httpx2.UnsupportedProtocol):
            told = type(cause)
        elif "CERTIFICATE_VERIFY_FAILED" in str(cause):
            told = ssl.SSLCertVerificationError
        entry = next((MAPPED[kind] for kind in told.__mro__ if kind in MAPPED), None)
        if entry is None:
            raise exc
        then, what, remedy = entry
        words = _safe(str(cause), secret)
        detail = f"The embedding server at {at} {what}" + (f": {words}" if words else "")
        kind = EmbedderUnavailable if then == "retry" else EmbedderRejected
        timed_out = isinstance(exc, openai.APITimeoutError | httpx2.TimeoutException | TimeoutError)
        verdict = Verdict(kind(detail, remedy=remedy), then, timed_out=timed_out)
    verdict.error.__cause__ = exc
    return verdict


def _status_verdict(exc: openai.APIStatusError, *, at: str, secret: str | None) -> Verdict:
    status = exc.status_code
    then, remedy = _STATUSES.get(
        status, ("retry" if status >= 500 else "fail", "look into the embedding server's log")
    )
    if 300 <= status < 400:
        target = _safe(exc.response.headers.get("location", "elsewhere"), secret)
        then, remedy = "stop", f"set the embedding base URL to where it redirects: {target}"
    # The answer to a wrong key may quote it, so its words are not passed on.
    words = "" if status in (401, 403) else _safe(_words(exc), secret)
    if status == 429 and exc.code == "insufficient_quota":
        then, remedy = "stop", "the account behind the embedding API key has used up its quota"
    elif status in (400, 422) and (exc.code == "model_not_found" or exc.param in ("model", "dimensions")):
        then, remedy = (
            "stop",
            _URL_REMEDY if exc.param != "dimensions" else "this model takes no such `dimensions`",
        )
    detail = f"The embedding server at {at} answered {status}" + (f": {words}" if words else "")
    wait = retry_after_s(exc.response.headers, datetime.now(UTC))
    if status in (429, 402) or (then == "retry"):
        return Verdict(
            EmbedderUnavailable(detail, remedy=remedy, retry_after_s=wait), then, status, retry_after_s=wait
        )
    return Verdict(EmbedderRejected(detail, remedy=remedy), then, status)


def _words(exc: openai.APIStatusError) -> str:
    body = exc.body
    if isinstance(body, dict):
        # openai hands on what stands under "error"; servers of another make say "message" or "detail" at the top.
        said = body.get("message") or body.get("detail") or body.get("error") or body
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    return str(body or "")


def _safe(words: str, secret: str | None) -> str:
    if secret:
        words = words.replace(secret, "…")
    return brief(words)


# --- texts ---------------------------------------------------------------------------------------------------


def most_tokens(text: str) -> int:
    """Return an estimate on the high side, for the sum of a batch.

    Two ASCII characters a token, at least one a word; two bytes a token beyond ASCII (a CJK character is 1.5:
    cl100k averages 1.1, newer vocabularies 0.7). Random ASCII can still exceed it; a refusal then splits the batch.
    """
    ascii_chars = len(text.encode("ascii", "ignore"))
    other_bytes = 0 if ascii_chars == len(text) else len(text.encode()) - ascii_chars
    words = text.count(" ") + text.count("\n") + 1
    return math.ceil(max(ascii_chars / 2, words) + other_bytes / 2) + 2


def cut(text: str, max_tokens: int, chars_per_token: float = 5.0) -> str:
    """Return the beginning that fits by an estimate on the low side, so that nothing is lost needlessly.

    `chars_per_token` ASCII characters, or two CJK ones (five thirds), are a token. What a server then still
    refuses as too long is cut further by the caller.
    """
    if len(text) <= max_tokens:
        return text
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    weights = np.array([1 / chars_per_token, 0.35, 0.6, 1.0])
    costs = weights[np.searchsorted(np.array([0x80, 0x800, 0x10000]), points, side="right")]
    # A sum of many fractions drifts; the last digit must not cost a character.
    fits = int(np.searchsorted(np.cumsum(costs), max_tokens + 1e-6, side="right"))
    return text[:fits]


_TOO_LONG = re.compile(
    r"context[ _]length|too (?:long|large|many tokens)|max\w{0,20} \w{0,20} ?(?:length|tokens)|max_\w{0,40}(?:tokens|length|len)"
    r"|exceed|token limit|input length",
    re.IGNORECASE,
)


# --- answers -------------------------------------------------------------------------------------------------


def read_answer(body: bytes, *, count: int, at: str) -> tuple[list[Any], frozenset[int]]:
    """Return the raw embeddings in the order of the texts sent, and which the server says it truncated.

    Raises EmbedderRejected unless each index from 0 to count-1 is answered exactly once.
    """

    def reject(what: str) -> EmbedderRejected:
        return EmbedderRejected(
            f"The embedding server at {at} {what}", remedy="check that it speaks the OpenAI embeddings API"
        )

    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as cause:
        start = body[:60].decode("utf-8", "replace")
        raise reject(f"answered what is not JSON: {start!r}") from cause
    items = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(items, list):
        start = _safe(body[:300].decode("utf-8", "replace"), None)
        raise reject(f"answered no list of embeddings under `data`: {start}")
    if len(items) != count:
        raise reject(f"answered {len(items)} embeddings for {count} texts")
    ordered: list[Any] = [None] * count
    seen = [False] * count
    for item in items:
        position = item.get("index") if isinstance(item, dict) else None
        if type(position) is not int or not 0 <= position < count:
            raise reject(
                f"answered an embedding with the index {_safe(repr(position), None)} among {count} texts"
            )
        if seen[position]:
            raise reject(f"answered the index {position} twice")
        seen[position] = True
        ordered[position] = item.get("embedding")
    said = answer.get("truncated")
    told = said if isinstance(said, list) else []
    return ordered, frozenset(index for index in told if type(index) is int and 0 <= index < count)


def read_vector(raw: Any, *, dims: int | None) -> Vector:
    """Return the checked vector of a JSON list or of base64 (little-endian float32); ValueError says what is wrong."""
    if isinstance(raw, str):
        try:
            data = base64.b64decode(raw, validate=True)
        except (binascii.Error, ValueError) as cause:
            raise ValueError("is text that is not base64") from cause
        if len(data) % 4:
            raise ValueError(f"is base64 of {len(data)} bytes, which is no whole number of 32-bit floats")
        vector = np.frombuffer(data, dtype="<f4").astype(np.float32)
    elif isinstance(raw, list):
        if not set(map(type, raw)) <= {int, float}:
            raise ValueError("holds something that is not a number")
        try:
            with np.errstate(over="ignore"):
                vector = np.array(raw, dtype=np.float64).astype(np.float32)
        except OverflowError as cause:
            raise ValueError("holds a number beyond 32-bit floats") from cause
    else:
        raise ValueError(f"is {'null' if raw is None else type(raw).__name__}, not a list of numbers")
    if vector.size == 0:
        raise ValueError("is empty")
    if dims is not None and vector.size != dims:
        raise ValueError(f"has {vector.size} dims where {dims} are expected")
    if not np.isfinite(vector).all():
        raise ValueError("holds NaN or a number beyond 32-bit floats")
    if math.sqrt(float(np.dot(wide := vector.astype(np.float64), wide))) < SMALLEST_NORM:
        raise ValueError("has length zero, so no direction")
    vector.setflags(write=False)
    return vector


class _Beginning(httpx2.AsyncByteStream):
    """Only the beginning of an error's body: openai reads it whole, and a broken server may never end it."""

    def __init__(self, whole: httpx2.AsyncByteStream) -> None:
        self._whole = whole

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = ERROR_BYTES
        async for part in self._whole:
            yield part[:left]
            left -= len(part)
            if left <= 0:
                return

    async def aclose(self) -> None:
        await self._whole.aclose()


async def _shorten_errors(response: httpx2.Response) -> None:
    if response.status_code >= 300 and isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Beginning(response.stream)


# --- the door ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Call:
    """The state of one call while its batches are under way; indexes are into `keys` and `texts`.

    `keys` are the unique texts as the caller's, prefix included; `texts` are sent, and cut where they must be.
    """

    keys: list[str]
    texts: list[str]
    pending: deque[int]
    truncated: set[int]
    urgent: bool = False
    """A query: where the server is left alone, it fails at once, since the words can answer without it."""
    vectors: dict[int, Vector] = field(default_factory=dict)
    errors: dict[int, HalflifeError] = field(default_factory=dict)
    deadline: float | None = None
    stall_s: float | None = None
    """How long the server may answer nobody."""
    failing_since: float | None = None
    given_up: int = 0
    refused: int = 0
    stop: HalflifeError | None = None

    @classmethod
    def of(cls, texts: dict[str, bool], deadline: float | None = None, *, urgent: bool = False) -> Self:
        """Return the call for texts -> was cut already."""
        keys = list(texts)
        cut_already = {index for index, key in enumerate(keys) if texts[key]}
        return cls(keys, list(keys), deque(range(len(keys))), cut_already, urgent=urgent, deadline=deadline)

    def bound(self, heard: float) -> float | None:
        """Return when the call ends at the latest, the server having answered somebody at that time."""
        ends = [heard + self.stall_s] if self.stall_s is not None else []
        return min([*ends, *([] if self.deadline is None else [self.deadline])], default=None)

    def fail(self, indexes: Sequence[int], error: HalflifeError) -> None:
        self.errors.update(dict.fromkeys(indexes, error))

    def outcomes(self, missing: HalflifeError) -> "dict[str, _Outcome]":
        """Return each text's vector and whether it was cut, or its error; `missing` where neither has come."""
        found: dict[str, _Outcome] = {}
        for index, key in enumerate(self.keys):
            vector = self.vectors.get(index)
            found[key] = (
                self.errors.get(index, missing) if vector is None else (vector, index in self.truncated)
            )
        return found


_Outcome = tuple[Vector, bool] | HalflifeError


@dataclass(slots=True, eq=False)
class _Flight:
    """One embedding call that several callers wait for; it ends early when the last of them has gone."""

    call: _Call
    task: "asyncio.Task[None]"
    caller: str
    waiters: int = 0

    def requests(self, max_batch: int) -> int:
        """Return how many requests it still takes."""
        return -(-(len(self.call.keys) - len(self.call.vectors) - len(self.call.errors)) // max_batch)


@dataclass(frozen=True, slots=True)
class _Manner:
    """How to embed, as `Embedder.connect` explains it."""

    query_prefix: str
    document_prefix: str
    dimensions: int | None
    max_batch: int
    max_batch_tokens: int
    max_input_tokens: int | None
    truncate: bool
    chars_per_token: float
    concurrency: int
    timeout_s: float
    retries: int
    retry_budget_s: float
    backoff_s: float
    cache_size: int
    jitter: Callable[[], float]


class Embedder:
    """Embeds texts; one per process, so that its concurrency bounds the process's. Bound to one event loop."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        *,
        at: str,
        secret: str | None,
        model: str,
        dims: int | None,
        manner: _Manner,
        called: str | None = None,
        dependency: str = "embedder",
    ) -> None:
        self._client = client
        self._at = at
        self._secret = secret
        self.model = model
        self._called = called or model
        self.dims = dims
        self._manner = manner
        self._max_batch = manner.max_batch
        self.guard = Guard(dependency, places=manner.concurrency, error=self._not_sent)
        # A bulk load may hold all lanes but one, so a query never waits behind its batches.
        self._document_lanes = asyncio.Semaphore(max(1, manner.concurrency - 1))
        # Nor behind those of a batch of queries that takes several requests.
        self._batch_lanes = asyncio.Semaphore(max(1, manner.concurrency - 1))
        self._format: Literal["base64", "float"] = "base64"
        self._answered = False
        self._cache: OrderedDict[str, tuple[Vector, bool]] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stalls: dict[asyncio.Timeout, _Call] = {}
        self._closed = False

    @classmethod
    def connect(
        cls,
        *,
        base_url: str,
        api_key: str | None,
        model: str,
        dims: int | None,
        query_prefix: str = "",
        document_prefix: str = "",
        send_dimensions: bool = False,
        max_batch: int = 32,
        max_batch_tokens: int = 100_000,
        max_input_tokens: int | None = 8192,
        truncate: bool = True,
        chars_per_token: float = 5.0,
        concurrency: int = 4,
        timeout_s: float = 30.0,
        retries: int = 4,
        retry_budget_s: float = 60.0,
        backoff_s: float = 0.25,
        cache_size: int = 1024,
        ca_certs: str | None = None,
        jitter: Callable[[], float] = random.random,
        called: str | None = None,
        dependency: str = "embedder",
    ) -> Self:
        """Return an embedder that has opened no connection yet; ValueError names a setting that can't work.

        `base_url` ends where `/embeddings` is appended. `dims` None takes the first answer's. A batch holds at
        most `max_batch` texts and `max_batch_tokens` tokens by a high estimate. A text beyond `max_input_tokens`
        by a low estimate, or that the server refuses as too long, is cut and told as truncated; with `truncate`
        false it is sent whole and fails alone if refused. `timeout_s` bounds one request, `retry_budget_s` how
        long failing batches are tried again, `retries` how often. `called` is the model's name at the server, where
        that is not `model`; `dependency` its name in metrics. `jitter` returns numbers from 0 up to 1.
        """
        url = parse_url(base_url, what="the embedding base URL")
        check_key(api_key, what="the embedding API key")
        if not model:
            raise ValueError("the embedding model's name is empty")
        if send_dimensions and dims is None:
            raise ValueError("the embedder's `send_dimensions` needs `dims`: it is the number sent")
        manner = _Manner(
            query_prefix=query_prefix,
            document_prefix=document_prefix,
            dimensions=dims if send_dimensions else None,
            max_batch=_positive("max_batch", max_batch),
            max_batch_tokens=_positive("max_batch_tokens", max_batch_tokens),
            max_input_tokens=None
            if max_input_tokens is None
            else _positive("max_input_tokens", max_input_tokens),
            truncate=truncate,
            chars_per_token=_positive("chars_per_token", chars_per_token),
            concurrency=_positive("concurrency", concurrency),
            timeout_s=_positive("timeout_s", timeout_s),
            retries=retries,
            retry_budget_s=retry_budget_s,
            backoff_s=backoff_s,
            cache_size=cache_size,
            jitter=jitter,
        )
        http = open_client(
            url,
            timeout_s=timeout_s,
            connect_s=CONNECT_S,
            places=concurrency,
            ca_certs=ca_certs,
            on_response=[_shorten_errors],
        )
        client = openai.AsyncOpenAI(
            # Without a key the client refuses to be made; the header is then left out of each request.
            api_key=api_key or "unset",
            base_url=base_url,
            timeout=http.timeout,
            max_retries=0,
            http_client=http,
        )
        return cls(
            client,
            at=shown(url),
            secret=api_key,
            model=model,
            dims=None if dims is None else _positive("dims", dims),
            manner=manner,
            called=called,
            dependency=dependency,
        )

    async def check(self) -> int:
        """Return the server's dims, by embedding one word past the cache.

        Raises EmbedderUnavailable or EmbedderRejected with a remedy; other dims than configured are the latter.
        """
        call = _Call.of({self._manner.query_prefix + "halflife": False}, urgent=True)
        await self._run(call, None)
        if call.errors:
            raise call.errors[0]
        return call.vectors[0].size

    async def embed_queries(
        self, texts: Sequence[str], *, deadline_s: float | None = None, caller: str = ""
    ) -> Embedded:
        """Embed with the query prefix, from the cache where possible; equal texts under way are embedded once.

        `deadline_s` from now bounds this caller's wait; what is not there by then is EmbedderUnavailable. `caller` says
        whose queries they are: one has half of the places to wait at most.
        """
        now = asyncio.get_running_loop().time()
        deadline = None if deadline_s is None else now + deadline_s
        keys = [self._prepare(self._manner.query_prefix, text) for text in texts]
        found: dict[str, _Outcome] = {}
        fresh: dict[str, bool] = {}
        flights: set[_Flight] = set()
        for key, was_cut in filter(None, keys):
            if key in self._cache:
                self._cache.move_to_end(key)
                found[key] = self._cache[key]
            elif key in self._flights:
                flights.add(self._flights[key])
            else:
                fresh[key] = was_cut
            observing.CACHE.labels("hit" if key in found else "sent" if key in fresh else "shared").inc()
        if fresh and self._is_full(caller):
            # Further ones would only wait; the words answer at once without them.
            found.update(dict.fromkeys(fresh, self._not_sent("too many queries wait for it already", 1.0)))
        elif fresh:
            flights.add(self._launch(fresh, deadline, caller))
        if flights:
            found.update(await self._wait(flights, deadline, deadline_s))
        return _assemble(keys, found)

    async def embed_documents(
        self, texts: Sequence[str], *, deadline_s: float | None = None, stall_s: float | None = None
    ) -> Embedded:
        """Embed with the document prefix, past the cache; equal texts are sent once.

        `deadline_s` from now bounds the whole, `stall_s` how long the server may answer nobody at all, whoever asks:
        batches answered by then keep their vectors, the rest is EmbedderUnavailable. So a server that hangs is told
        from one that is slow with many texts.
        """
        keys = [self._prepare(self._manner.document_prefix, text) for text in texts]
        now = asyncio.get_running_loop().time()
        call = _Call.of(dict(filter(None, keys)), None if deadline_s is None else now + deadline_s)
        call.stall_s = stall_s
        late = self._late(deadline_s)
        try:
            async with asyncio.timeout_at(call.bound(now)) as bound:
                self._stalls[bound] = call
                try:
                    await self._run(call, self._document_lanes)
                finally:
                    del self._stalls[bound]
        except TimeoutError:
            # Raised by a bound alone: a request's own time limit is a verdict on its batch.
            if call.deadline is None or asyncio.get_running_loop().time() < call.deadline:
                late = self._stalled(stall_s or 0.0)
        return _assemble(keys, call.outcomes(late))

    def _heard(self) -> None:
        """Note that the server has answered somebody."""
        now = asyncio.get_running_loop().time()
        for bound, call in self._stalls.items():
            if not bound.expired():
                bound.reschedule(call.bound(now))

    async def close(self) -> None:
        """Cancel what is under way and close the connections; later calls answer EmbedderUnavailable."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _prepare(self, prefix: str, text: str) -> tuple[str, bool] | None:
        """Return what to send and whether it was cut; None for a blank text."""
        text = sendable(text)
        if not text.strip():
            return None
        whole = prefix + text
        if self._manner.max_input_tokens is None or not self._manner.truncate:
            return whole, False
        part = cut(whole, self._manner.max_input_tokens, self._manner.chars_per_token)
        return part, len(part) < len(whole)

    def _late(self, deadline_s: float | None) -> EmbedderUnavailable:
        time = "in time" if deadline_s is None else f"within the {deadline_s:g} s there were"
        return EmbedderUnavailable(
            f"The embedding server at {self._at} did not answer {time}",
            remedy="raise the time limit or send fewer texts",
        )

    def _stalled(self, stall_s: float) -> EmbedderUnavailable:
        return EmbedderUnavailable(
            f"The embedding server at {self._at} has answered nobody for {stall_s:g} s",
            remedy="send it again after the pause; see whether the server hangs, or give it more time with "
            "HALFLIFE_EMBEDDING_STALL_S",
            retry_after_s=max(1.0, self.guard.breaker.wait_s),
        )

    # --- queries: one flight, several callers ---

    def _is_full(self, caller: str) -> bool:
        """Tell whether no more queries of this caller may wait; no one caller's make it full for the others."""
        each = QUERIES_WAITING * self._manner.concurrency
        waiting: dict[str, int] = {}
        for flight in set(self._flights.values()):
            waiting[flight.caller] = waiting.get(flight.caller, 0) + flight.requests(self._max_batch)
        return waiting.get(caller, 0) >= each or sum(min(each, one) for one in waiting.values()) >= 2 * each

    def _launch(self, fresh: dict[str, bool], deadline: float | None, caller: str) -> _Flight:
        call = _Call.of(fresh, deadline, urgent=True)
        flight = _Flight(call, asyncio.create_task(self._fly(call), name="embed queries"), caller)
        self._flights.update(dict.fromkeys(fresh, flight))
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)
        flight.task.add_done_callback(lambda _: self._forget(flight))
        return flight

    async def _fly(self, call: _Call) -> None:
        await self._run(call, None if self._count(call) == len(call.pending) else self._batch_lanes)
        for index, vector in call.vectors.items():
            self._cache[call.keys[index]] = (vector, index in call.truncated)
        while len(self._cache) > self._manner.cache_size:
            self._cache.popitem(last=False)

    def _forget(self, flight: _Flight) -> None:
        for key in flight.call.keys:
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _wait(
        self, flights: set[_Flight], deadline: float | None, deadline_s: float | None
    ) -> dict[str, _Outcome]:
        for flight in flights:
            flight.waiters += 1
            # A flight may retry for as long as its most patient caller waits.
            if flight.call.deadline is not None:
                flight.call.deadline = None if deadline is None else max(deadline, flight.call.deadline)
        try:
            left = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
            # `wait` leaves the tasks alone when this caller is cancelled: others may be waiting for them.
            done, _ = await asyncio.wait({flight.task for flight in flights}, timeout=left)
        finally:
            for flight in flights:
                flight.waiters -= 1
                if flight.waiters == 0 and not flight.task.done():
                    self._forget(flight)
                    flight.task.cancel()
        for task in done:
            if not task.cancelled():
                task.result()  # a fault of ours must not pass for a missing vector
        late = self._late(deadline_s)
        return {key: outcome for flight in flights for key, outcome in flight.call.outcomes(late).items()}

    # --- batches ---

    async def _run(self, call: _Call, lanes: asyncio.Semaphore | None) -> None:
        """Embed everything pending, several batches at a time; each ends in `vectors` or in `errors`."""
        if self._closed:
            call.fail(list(call.pending), _closed())
            return
        if self._count(call) == len(call.pending):
            await self._work(call, lanes)
            return
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._manner.concurrency, len(call.pending))):
                group.create_task(self._work(call, lanes))

    async def _work(self, call: _Call, lanes: asyncio.Semaphore | None) -> None:
        while call.pending:
            if lanes is None:
                await self._embed(call, self._take(call))
                continue
            async with lanes:
                if call.pending:
                    await self._embed(call, self._take(call))

    def _count(self, call: _Call) -> int:
        """Return how many pending texts fit one batch, at least one."""
        tokens = 0
        for count, index in enumerate(call.pending):
            tokens += most_tokens(call.texts[index])
            if count and (count == self._max_batch or tokens > self._manner.max_batch_tokens):
                return count
        return len(call.pending)

    def _take(self, call: _Call) -> list[int]:
        return [call.pending.popleft() for _ in range(self._count(call))]

    async def _embed(self, call: _Call, batch: list[int], attempt: int = 0) -> None:
        """Bring each text of the batch to a vector or an error."""
        cuts = 0
        while True:
            if call.stop is not None:
                return call.fail(batch, call.stop)
            with repeating(attempt > 0):
                verdict = await self._try(call, batch)
            if verdict is None:
                call.given_up, call.failing_since = 0, None
                return None
            if verdict.then == "split":
                if len(batch) > 1:
                    return await self._split(call, batch, attempt)
                if (
                    self._manner.truncate
                    and cuts < CUTS
                    and len(call.texts[batch[0]]) > 16
                    and _too_long(verdict)
                ):
                    text = call.texts[batch[0]]
                    call.texts[batch[0]] = text[: int(len(text) * CUT_FACTOR)]
                    call.truncated.add(batch[0])
                    cuts += 1
                    continue
                call.fail(batch, verdict.error)
                call.refused += 1
                # Where nothing was ever answered and text after text is refused, it is not the texts.
                if not self._answered and call.refused >= 4:
                    call.stop = verdict.error
                return None
            if verdict.then == "stop" or (verdict.then == "away" and call.urgent):
                call.stop = verdict.error
                return call.fail(batch, verdict.error)
            if verdict.then == "fail":
                return call.fail(batch, verdict.error)
            wait = self._pause(verdict, attempt)
            if (
                attempt >= self._manner.retries
                or call.given_up
                or not self._affords(call, wait)
                or not await self.guard.turn_to_retry(until=self._patience_of(call))
            ):
                call.fail(batch, verdict.error)
                call.given_up += 1
                # One batch may be at fault itself; several in a row are an outage, which more requests won't end.
                if call.given_up >= max(2, self._manner.concurrency):
                    call.stop = verdict.error
                return None
            await asyncio.sleep(wait)
            attempt += 1
            if verdict.timed_out and len(batch) > 1:
                # The same batch would take as long again.
                middle = len(batch) // 2
                await self._embed(call, batch[:middle], attempt)
                return await self._embed(call, batch[middle:], attempt)

    async def _split(self, call: _Call, batch: list[int], attempt: int) -> None:
        """Embed the halves of a refused batch; a server that takes both has a limit, which is remembered."""
        cut_before = len(call.truncated)
        middle = len(batch) // 2
        await self._embed(call, batch[:middle], attempt)
        await self._embed(call, batch[middle:], attempt)
        whole = all(index in call.vectors for index in batch) and len(call.truncated) == cut_before
        if whole and middle >= SMALLEST_LEARNED_BATCH:
            self._max_batch = min(self._max_batch, len(batch) - middle)

    def _pause(self, verdict: Verdict, attempt: int) -> float:
        backoff = min(8.0, self._manner.backoff_s * 2.0**attempt)
        if verdict.retry_after_s is not None:
            return verdict.retry_after_s + backoff * 0.25 * self._manner.jitter()
        return float(backoff * (0.5 + 0.5 * self._manner.jitter()))

    def _affords(self, call: _Call, wait: float) -> bool:
        now = asyncio.get_running_loop().time()
        if call.failing_since is None:
            call.failing_since = now
        if call.deadline is not None and now + wait >= call.deadline:
            return False
        return now + wait <= call.failing_since + self._manner.retry_budget_s

    def _patience_of(self, call: _Call) -> float:
        """Return until when the call may go on trying, by the loop's clock; a query waits for no turn to retry."""
        now = asyncio.get_running_loop().time()
        if call.urgent:
            return now
        since = now if call.failing_since is None else call.failing_since
        until = since + self._manner.retry_budget_s
        return until if call.deadline is None else min(until, call.deadline)

    def _not_sent(self, what: str, wait_s: float) -> HalflifeError:
        return EmbedderUnavailable(
            f"The embedding server at {self._at} was not asked: {what}",
            remedy="try again after the pause; /readyz tells what is wrong",
            retry_after_s=max(1.0, wait_s),
        )

    async def _try(self, call: _Call, batch: list[int]) -> Verdict | None:
        """Send one batch once, and again as plain numbers if the server seems to refuse base64."""
        verdict = await self._send(call, batch, self._format)
        if verdict is None or self._format == "float" or verdict.status not in (400, 415, 422, 500, 501):
            return verdict
        named = "encoding_format" in verdict.error.detail or "base64" in verdict.error.detail
        if not named and self._answered:
            return verdict
        again = await self._send(call, batch, "float")
        if again is None or named:
            self._format = "float"
            return again
        return verdict

    async def _send(
        self, call: _Call, batch: list[int], encoding: Literal["base64", "float"]
    ) -> Verdict | None:
        texts = [call.texts[index] for index in batch]
        try:
            # The caller's deadline, or its patience with documents, bounds the wait for a place.
            async with self.guard.call(wait_s=self._manner.retry_budget_s) as sent:
                verdict, raw, told = await self._send_one(texts, encoding)
                sent.outcome = _outcome_of(verdict)
                sent.late = verdict is not None and verdict.timed_out
                if sent.outcome in ("ok", "refused"):
                    self._heard()
                unusable = 0 if verdict else self._take_vectors(call, batch, raw, told)
                if unusable:
                    sent.outcome = "failed"
        except EmbedderUnavailable as error:
            return Verdict(error, "away", retry_after_s=self.guard.breaker.wait_s)
        return verdict

    async def _send_one(
        self, texts: list[str], encoding: Literal["base64", "float"]
    ) -> tuple[Verdict | None, list[Any], frozenset[int]]:
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.request.model": self.model,
            "texts": len(texts),
        }
        with observing.client_span("embeddings", attributes):
            try:
                # httpx2 bounds each read; a server that drips needs a bound on the whole.
                async with asyncio.timeout(self._manner.timeout_s):
                    body = await self._request(texts, encoding)
                raw, told = read_answer(body, count=len(texts), at=self._at)
            except HalflifeError as error:
                return Verdict(error, "fail"), [], frozenset()
            except Exception as exc:  # noqa: BLE001 - `translate` raises what it does not know
                if self._closed:
                    return Verdict(_closed(), "stop"), [], frozenset()
                return translate(exc, at=self._at, secret=self._secret), [], frozenset()
        return None, raw, told

    def _take_vectors(self, call: _Call, batch: list[int], raw: list[Any], told: frozenset[int]) -> int:
        """Keep the vectors that can be used and return how many can't."""
        unusable = 0
        self._answered = True
        for position, index in enumerate(batch):
            try:
                vector = read_vector(raw[position], dims=self.dims)
            except ValueError as cause:
                error = EmbedderRejected(
                    f"The embedding server at {self._at} answered a vector that {cause}",
                    remedy="check the model and the configured dims",
                )
                error.__cause__ = cause
                call.fail([index], error)
                unusable += 1
                continue
            self.dims = vector.size
            call.vectors[index] = vector
            if position in told:
                call.truncated.add(index)
        return unusable

    async def _request(self, texts: list[str], encoding: Literal["base64", "float"]) -> bytes:
        """Return the body of one answer, read no further than vectors of these texts could reach."""
        most = min(LARGEST_ANSWER, len(texts) * (self.dims or MOST_DIMS) * BYTES_PER_NUMBER + 2**20)
        # The environment's organisation and project belong to one vendor's account, not to any server.
        headers: dict[str, str | openai.Omit] = {
            "OpenAI-Organization": openai.omit,
            "OpenAI-Project": openai.omit,
        }
        if self._secret is None:
            headers["Authorization"] = openai.omit
        async with self._client.embeddings.with_streaming_response.create(
            input=texts,
            model=self._called,
            dimensions=self._manner.dimensions if self._manner.dimensions is not None else openai.omit,
            encoding_format=encoding,
            extra_headers=headers,
        ) as response:
            parts: list[bytes] = []
            size = 0
            async for part in response.iter_bytes():
                size += len(part)
                if size > most:
                    raise EmbedderRejected(
                        f"The embedding server at {self._at} answered more than {most} bytes for {len(texts)} texts",
                        remedy="check that the base URL is an embeddings API",
                    )
                parts.append(part)
        return b"".join(parts)


def _outcome_of(verdict: Verdict | None) -> Outcome:
    """Say what the end of a request tells of the server."""
    if verdict is None:
        return "ok"
    if verdict.status is not None:
        return "refused" if verdict.status in (408, 425, 429) or verdict.status >= 500 else "ok"
    # A closed client and an address that can't be right say nothing of the server; what a timeout says, the guard knows.
    return "unknown" if verdict.then == "stop" or verdict.timed_out else "failed"


def _too_long(verdict: Verdict) -> bool:
    return verdict.status == 413 or _TOO_LONG.search(verdict.error.detail) is not None


def _closed() -> EmbedderUnavailable:
    return EmbedderUnavailable(
        "The embedder is closed", remedy="the service is stopping: ask another instance"
    )


def _assemble(keys: Sequence[tuple[str, bool] | None], found: dict[str, _Outcome]) -> Embedded:
    vectors: list[Vector | None] = []
    errors: dict[int, HalflifeError] = {}
    truncated: set[int] = set()
    for index, prepared in enumerate(keys):
        outcome = _blank() if prepared is None else found[prepared[0]]
        if isinstance(outcome, HalflifeError):
            errors[index] = outcome
            vectors.append(None)
            continue
        vector, was_cut = outcome
        vectors.append(vector)
        if was_cut:
            truncated.add(index)
    return Embedded(vectors, errors, frozenset(truncated))


def _blank() -> InvalidRequest:
    return InvalidRequest("A blank text has no embedding", remedy="write words, or store it without a vector")


def _positive(name: str, value: _Number) -> _Number:
    if not value > 0:
        raise ValueError(f"the embedder's `{name}` must be above zero, not {value}")
    return value
