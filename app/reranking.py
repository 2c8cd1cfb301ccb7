"""The door to the reranker, a cross-encoder behind HTTP: the only module that speaks its API.

Owns the two forms of that API, batches, one retry, the time budget, and the checks of every answer. Refuses to
guess: scores come back by index, and an answer that can't be trusted is RerankerFailed, never a wrong order.
Documents are never asked back; sorting and cutting are the caller's.

cohere  `{model, query, documents, top_n}` -> `{results: [{index, relevance_score}]}`: Cohere, Jina, vLLM,
        Infinity, llama.cpp and others (some write `data` for `results`, or `score`).
tei     `{query, texts, truncate}` -> `[{index, score}]`: Hugging Face's text-embeddings-inference.

What a score means is configured, never read from an answer's values, so that two pages of one search can't differ in it:

probability  in [0, 1], as Cohere, Jina, vLLM, Infinity and TEI answer (TEI is asked not to send raw scores).
logit        any number, as llama.cpp answers; 0 is a probability of one half.
"""

import asyncio
import json
import math
import random
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self

import httpx2

from app import observing
from app.breaker import Outcome
from app.dialling import (
    brief,
    check_key,
    json_headers,
    open_client,
    parse_url,
    retry_after_s,
    sendable,
    shown,
    with_ending,
)
from app.errors import HalflifeError, RerankerFailed
from app.guarding import Guard, repeating

Form = Literal["cohere", "tei"]
Scale = Literal["probability", "logit"]

SLACK: Final = 1e-3
"""How far outside [0, 1] half-precision arithmetic may put a probability."""

BATCH: Final[dict[Form, int]] = {"cohere": 1000, "tei": 32}
"""Documents a call: Cohere's limit, and the default of a TEI server."""

ANSWER_BYTES_PER_DOCUMENT: Final = 2048
"""Room for one result of an answer, unless the server returns the documents unasked: their bytes come on top."""

CUTS: Final = 4
SMALLEST_LEARNED_BATCH: Final = 8
RETRY_PAUSE_S: Final = 0.2
WAITING: Final = 8
"""Calls that may wait, for each one that may be under way; more are told at once that it is too busy."""
RETRIED: Final = frozenset({408, 409, 424, 425, 429, 500, 502, 503, 504, 529})
_TOO_BIG = re.compile(
    r"batch size|batch_size|too (?:long|large|many)|context[ _]length|exceed|max\w{0,20} \w{0,20} ?(?:length|tokens)",
    re.IGNORECASE,
)

_REMEDIES: Final[dict[int, str]] = {
    401: "check the reranker's API key and what it may use",
    403: "check the reranker's API key and what it may use",
    404: "check the reranker's URL (it usually ends in /rerank) and the model's name",
    405: "check the reranker's URL (it usually ends in /rerank)",
    413: "lower the reranker's batch size or the length of its documents",
    429: "try later, or lower the reranker's concurrency",
}

FAILURES: Final[dict[type[Exception], tuple[bool, str, str]]] = {
    httpx2.TimeoutException: (
        True,
        "did not answer in time",
        "raise its time limit or rerank fewer candidates",
    ),
    httpx2.LocalProtocolError: (
        False,
        "can't be sent this request",
        "its API key holds characters HTTP refuses",
    ),
    httpx2.UnsupportedProtocol: (False, "has no http or https address", "correct the reranker's URL"),
    httpx2.TransportError: (True, "can't be reached", "check that it runs, and the reranker's URL"),
    httpx2.DecodingError: (False, "answered a body that does not decompress", "look at what stands between"),
    httpx2.HTTPError: (False, "can't be spoken to", "check the reranker's URL"),
    httpx2.StreamError: (False, "answered a body that can't be read", "report it with the log"),
    httpx2.InvalidURL: (False, "has no valid address", "correct the reranker's URL"),
    httpx2.CookieConflict: (
        False,
        "answered cookies that contradict each other",
        "look at what stands between",
    ),
    ssl.SSLError: (True, "broke the TLS connection", "check that its address is meant to be https"),
    OSError: (True, "broke the connection", "try again; look into the reranker's log"),
}
"""Every exception that may come out of a request -> (worth a retry, what happened, remedy)."""


class _Refused(Exception):
    """A failure with what may mend it."""

    def __init__(
        self,
        error: RerankerFailed,
        *,
        status: int | None = None,
        retry: bool = False,
        too_big: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(error.detail)
        self.error = error
        self.status = status
        self.retry = retry
        self.too_big = too_big
        self.wait_s = wait_s


def translate(exc: Exception, *, at: str) -> RerankerFailed:
    """Return what the transport's exception means; raise it again if its classes are all missing in FAILURES."""
    return _translated(exc, at).error


def _translated(exc: Exception, at: str) -> _Refused:
    entry = next((FAILURES[kind] for kind in type(exc).__mro__ if kind in FAILURES), None)
    if entry is None:
        raise exc
    retry, what, remedy = entry
    if "CERTIFICATE_VERIFY_FAILED" in str(exc):
        retry, what, remedy = False, "shows a certificate that does not verify", "give the CA that signed it"
    words = brief(str(exc))
    error = RerankerFailed(f"The reranker at {at} {what}" + (f": {words}" if words else ""), remedy=remedy)
    error.__cause__ = exc
    return _Refused(error, retry=retry)


def request_body(form: Form, *, model: str | None, query: str, documents: Sequence[str]) -> dict[str, Any]:
    """Return the body that asks for a score of every document."""
    if form == "tei":
        return {
            "query": query,
            "texts": list(documents),
            "truncate": True,
            "raw_scores": False,
        }
    named = {"model": model} if model is not None else {}
    # Servers answer the best `top_n` alone, some three by default: all are asked for.
    return {**named, "query": query, "documents": list(documents), "top_n": len(documents)}


def read_scores(body: bytes, *, form: Form, count: int) -> list[float | None]:
    """Return the scores in the order of the documents sent; ValueError says what is wrong with the answer.

    In the cohere form a server may leave documents out that it ranks nowhere: None, but at least one must be
    scored. In the tei form every document has a score.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise ValueError(f"is not JSON: {brief(body[:60].decode('utf-8', 'replace'))!r}") from cause
    items = answer
    if form == "cohere":
        items = (answer.get("results", answer.get("data"))) if isinstance(answer, dict) else None
    if not isinstance(items, list):
        raise ValueError(f"holds no list of results: {brief(body[:300].decode('utf-8', 'replace'))}")
    scores: list[float | None] = [None] * count
    for item in items:
        index = item.get("index") if isinstance(item, dict) else None
        if type(index) is not int or not 0 <= index < count:
            raise ValueError(f"has the index {brief(repr(index))} among {count} documents")
        if scores[index] is not None:
            raise ValueError(f"has the index {index} twice")
        score = item.get("relevance_score", item.get("score"))
        if type(score) not in (int, float) or not _is_finite(score):
            raise ValueError(
                f"has {brief(repr(score))} as the score of index {index}, which is no finite number"
            )
        scores[index] = float(score)
    if not items:
        raise ValueError("is empty")
    if form == "tei" and len(items) < count:
        raise ValueError(f"has {len(items)} scores for {count} documents")
    return scores


def to_probability(score: float, scale: Scale) -> float:
    """Return the score in [0, 1]: a probability as it is, a logit through the logistic function."""
    if scale == "probability":
        return min(1.0, max(0.0, score))
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, score))))


def _is_finite(score: float) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer beyond float
        return False


@dataclass(frozen=True, slots=True)
class _Ask:
    """One rerank: its query, and the loop's time at which it ends."""

    query: str
    ends: float


@dataclass(frozen=True, slots=True)
class _Manner:
    """How to rerank, as `Reranker.connect` explains it."""

    model: str | None
    batch_size: int | None
    max_document_chars: int
    timeout_s: float
    scale: Scale
    jitter: Callable[[], float]


class Reranker:
    """Scores documents against a query; one per process, so that its concurrency bounds the process's."""

    def __init__(
        self,
        http: httpx2.AsyncClient,
        *,
        url: str,
        at: str,
        form: Form | None,
        concurrency: int,
        manner: _Manner,
    ) -> None:
        self._http = http
        self._url = url
        self._at = at
        self._form = form
        self._manner = manner
        self._limit: int | None = None
        # Some servers return the documents unless told otherwise, a strict one may not know the field.
        self._refuse_documents = True
        self._closed = False
        self._detecting = asyncio.Lock()
        self.guard = Guard(
            "reranker", places=concurrency, most_waiting=WAITING * concurrency, error=self._not_sent
        )

    @classmethod
    def connect(
        cls,
        *,
        url: str,
        model: str | None = None,
        api_key: str | None = None,
        form: Literal["auto", "cohere", "tei"] = "auto",
        batch_size: int | None = None,
        max_document_chars: int = 20_000,
        concurrency: int = 4,
        timeout_s: float = 10.0,
        scale: Scale = "probability",
        ca_certs: str | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> Self:
        """Return a reranker that has opened no connection yet; ValueError names a setting that can't work.

        `url` is the endpoint, or what `/rerank` is appended to. With `form` "auto" a path with a version in it
        (`/v1/rerank`) is cohere; else the first call finds out, and the answer is remembered. `batch_size` None is
        1000 documents a call, 32 for tei. Longer documents than `max_document_chars` are cut before they are sent.
        `timeout_s` bounds the whole of one `rerank`, retries included. `scale` is what the server's scores are.
        """
        address = with_ending(parse_url(url, what="the reranker's URL"), "/rerank", "/reranking")
        check_key(api_key, what="the reranker's API key")
        limits = {
            "max_document_chars": max_document_chars,
            "concurrency": concurrency,
            "timeout_s": timeout_s,
        }
        for name, value in {**limits, **({} if batch_size is None else {"batch_size": batch_size})}.items():
            if not value > 0:
                raise ValueError(f"the reranker's `{name}` must be above zero, not {value}")
        known: Form | None = None if form == "auto" else form
        if known is None and re.search(r"/v\d+/", address.path):
            known = "cohere"
        http = open_client(
            address,
            timeout_s=timeout_s,
            connect_s=3.0,
            places=concurrency,
            ca_certs=ca_certs,
            headers=json_headers(api_key),
        )
        return cls(
            http,
            url=str(address),
            at=shown(address),
            form=known,
            concurrency=concurrency,
            manner=_Manner(
                model=model,
                batch_size=batch_size,
                max_document_chars=max_document_chars,
                timeout_s=timeout_s,
                scale=scale,
                jitter=jitter,
            ),
        )

    @property
    def form(self) -> Form | None:
        """The API's form, None until the first answer where it is found out."""
        return self._form

    @property
    def scale(self) -> Scale:
        """What the server's scores are, for `to_probability`."""
        return self._manner.scale

    async def rerank(
        self, query: str, documents: Sequence[str], *, deadline_s: float | None = None
    ) -> list[float | None]:
        """Return the documents' scores in their order, higher is better, on the server's own scale.

        None stands for a blank document and for one that the server left out of its answer. Without a document
        that says something nothing is sent. Raises RerankerFailed for every failure, and when `deadline_s` from now
        or the time limit have passed; no part of the scores is returned then.
        """
        query = sendable(query)
        most = self._manner.max_document_chars
        sent = [
            (index, text)
            for index, text in enumerate(sendable(document)[:most] for document in documents)
            if text.strip()
        ]
        scores: list[float | None] = [None] * len(documents)
        if not sent:
            return scores
        if not query.strip():
            raise RerankerFailed(
                "A blank query can't be reranked by", remedy="write words, or leave the reranker out"
            )
        left = (
            self._manner.timeout_s
            if deadline_s is None
            else max(0.0, min(deadline_s, self._manner.timeout_s))
        )
        try:
            ends = asyncio.get_running_loop().time() + left
            async with asyncio.timeout_at(ends):
                found = await self._all(_Ask(query, ends), [text for _, text in sent])
        except TimeoutError as cause:
            raise RerankerFailed(
                f"The reranker at {self._at} did not answer within {left:g} s",
                remedy="raise its time limit or rerank fewer candidates",
            ) from cause
        except _Refused as refused:
            raise refused.error from refused.error.__cause__
        for (index, _), score in zip(sent, found, strict=True):
            scores[index] = score
            if score is not None and self.scale == "probability" and not -SLACK <= score <= 1 + SLACK:
                raise RerankerFailed(
                    f"The reranker at {self._at} answered the score {score:g}, and it is configured to answer probabilities",
                    remedy="set HALFLIFE_RERANK_SCORES to 'logit', which any number is",
                )
        return scores

    async def close(self) -> None:
        """Close the connections."""
        self._closed = True
        await self._http.aclose()

    async def _all(self, ask: _Ask, texts: list[str]) -> list[float | None]:
        if self._form is None:
            # One call finds out, the others wait for what it learns.
            async with self._detecting:
                if self._form is None:
                    first = texts[: self._size("tei")]
                    rest = texts[len(first) :]
                    scores = await self._detect(ask, first)
                    return scores + (await self._all(ask, rest) if rest else [])
        form = self._form
        size = self._size(form)
        batches = [texts[at : at + size] for at in range(0, len(texts), size)]
        if len(batches) == 1:
            return await self._batch(ask, texts, form)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._batch(ask, batch, form)) for batch in batches]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [score for task in tasks for score in task.result()]

    def _size(self, form: Form) -> int:
        size = self._manner.batch_size or BATCH[form]
        return size if self._limit is None else min(size, self._limit)

    async def _detect(self, ask: _Ask, texts: list[str]) -> list[float | None]:
        """Score by the form that the server turns out to speak, and remember it."""
        form: Form = "cohere"
        try:
            scores = await self._batch(ask, texts, form)
        except _Refused as refused:
            # Only a refusal or another shape of answer tells of another form; an outage tells nothing.
            if refused.status not in (200, 400, 415, 422):
                raise
            form = "tei"
            try:
                scores = await self._batch(ask, texts, form)
            except _Refused as second:
                raise (refused if second.status in (400, 415, 422) else second) from None
        self._form = form
        return scores

    async def _batch(self, ask: _Ask, texts: list[str], form: Form) -> list[float | None]:
        """Score one batch: tried twice, halved or cut where the server says it is too much."""
        retried = False
        cuts = 0
        while True:
            try:
                with repeating(retried):
                    return await self._send(ask, texts, form)
            except _Refused as refused:
                # No waiting for a turn: the fused order is there already.
                if refused.retry and not retried and await self.guard.turn_to_retry(until=0):
                    retried = True
                    pause = RETRY_PAUSE_S * (0.5 + 0.5 * self._manner.jitter())
                    pause = max(pause, refused.wait_s or 0.0)
                    if asyncio.get_running_loop().time() + pause >= ask.ends:
                        raise  # the answer would come too late: the caller need not wait for that
                    await asyncio.sleep(pause)
                elif (
                    self._refuse_documents
                    and refused.status in (400, 422)
                    and "return_documents" in str(refused)
                ):
                    self._refuse_documents = False
                elif refused.too_big and len(texts) > 1:
                    middle = (len(texts) + 1) // 2
                    halves = [await self._batch(ask, half, form) for half in (texts[:middle], texts[middle:])]
                    if "batch" in str(refused):
                        self._limit = min(self._limit or middle, max(middle, SMALLEST_LEARNED_BATCH))
                    return halves[0] + halves[1]
                elif refused.too_big and cuts < CUTS and len(texts[0]) > 64:
                    texts = [texts[0][: len(texts[0]) // 2]]
                    cuts += 1
                else:
                    raise

    async def _send(self, ask: _Ask, texts: list[str], form: Form) -> list[float | None]:
        body = request_body(form, model=self._manner.model, query=ask.query, documents=texts)
        if form == "cohere" and self._refuse_documents:
            body["return_documents"] = False
        most = len(texts) * ANSWER_BYTES_PER_DOCUMENT + 6 * sum(map(len, texts)) + 2**16
        wait_s = max(0.0, ask.ends - asyncio.get_running_loop().time())
        try:
            async with self.guard.call(wait_s=wait_s) as sent:
                try:
                    scores = await self._exchange(body, form, most=most, count=len(texts))
                except _Refused as refused:
                    sent.late = isinstance(refused.error.__cause__, httpx2.TimeoutException)
                    sent.outcome = "unknown" if sent.late else _outcome_of(refused)
                    raise
                sent.outcome = "ok"
                return scores
        except RerankerFailed as error:
            raise _Refused(error) from error

    async def _exchange(
        self, body: dict[str, Any], form: Form, *, most: int, count: int
    ) -> list[float | None]:
        try:
            with observing.client_span("rerank", {"documents": count}):
                async with self._http.stream("POST", self._url, json=body) as response:
                    answer = await self._read(response, most if response.status_code == 200 else 2**16)
        except _Refused:
            raise
        except Exception as exc:
            if self._closed:
                error = RerankerFailed(
                    "The reranker is closed", remedy="the service is stopping: ask another instance"
                )
                raise _Refused(error) from exc
            raise _translated(exc, self._at) from exc
        if response.status_code != 200:
            raise self._refusal(response, answer)
        try:
            return read_scores(answer, form=form, count=count)
        except ValueError as cause:
            error = RerankerFailed(
                f"The answer of the reranker at {self._at} {cause}", remedy="check its URL and form"
            )
            error.__cause__ = cause
            raise _Refused(error, status=200) from cause

    def _not_sent(self, what: str, wait_s: float) -> HalflifeError:
        return RerankerFailed(
            f"The reranker at {self._at} was not asked: {what}",
            remedy="try again after the pause; /readyz tells what is wrong",
            retry_after_s=max(1.0, wait_s),
        )

    async def _read(self, response: httpx2.Response, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > most:
                if response.status_code != 200:
                    break
                raise _Refused(
                    RerankerFailed(
                        f"The reranker at {self._at} answered more than {most} bytes",
                        remedy="check that its URL is a rerank API, and that it does not return the documents",
                    )
                )
        return b"".join(parts)

    def _refusal(self, response: httpx2.Response, body: bytes) -> _Refused:
        status = response.status_code
        # The answer to a wrong key may quote it, so its words are not passed on.
        words = "" if status in (401, 403) else brief(body[:2000].decode("utf-8", "replace"))
        remedy = _REMEDIES.get(status, "look into the reranker's log")
        if 300 <= status < 400:
            remedy = f"set the reranker's URL to where it redirects: {brief(response.headers.get('location', '?'))}"
        wait = retry_after_s(response.headers, datetime.now(UTC))
        error = RerankerFailed(
            f"The reranker at {self._at} answered {status}" + (f": {words}" if words else ""),
            remedy=remedy,
            retry_after_s=wait,
        )
        too_big = status == 413 or (status in (400, 422) and _TOO_BIG.search(words) is not None)
        return _Refused(error, status=status, retry=status in RETRIED, too_big=too_big, wait_s=wait)


def _outcome_of(refused: _Refused) -> Outcome:
    """Say what the end of a request tells of the server."""
    if refused.status is None or refused.status == 200:
        return "failed"  # no answer, or one that can't be used
    return "refused" if refused.status in (408, 425, 429) or refused.status >= 500 else "ok"
