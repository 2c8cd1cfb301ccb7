"""The edge of the service: what holds for every request before any route sees it.

Gives each request an id, asks for a key, counts how often each caller asks, refuses bodies over the limit while they
arrive, sheds load rather than queueing without end, and drops work that nobody waits for any more. Plain ASGI; knows
no route and no search.
"""

import asyncio
import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from app import observing
from app.addresses import is_loopback
from app.breaker import Concurrency
from app.errors import (
    DeadlineExceeded,
    Ending,
    Forbidden,
    HalflifeError,
    InvalidRequest,
    Overloaded,
    TooManyRequests,
    Unauthorized,
)
from app.keys import Key, Keyring, Scope, bearer
from app.limits import Buckets, Taken

ConnectionScope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[ConnectionScope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
Result = TypeVar("Result")

log = logging.getLogger("halflife")

OPEN_PATHS = frozenset({"/livez", "/readyz"})
"""Paths that ask for no key and are answered under any load: who watches the service must still see it."""
TIMEOUT_HEADER = b"x-halflife-timeout-ms"
GRACE_S = 0.5
"""How long past its budget a request may still answer with what it has, before it is ended."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._\-]{1,128}")
_LEAST_BODY_RATE = 4_096
ARRIVING = 8
"""Requests whose bodies are still coming, for each one that may be answered at once."""
HELD_BODIES = 4
"""Largest bodies that all requests together may hold unless told otherwise: of text, each takes three to four times its
bytes while it is cut, embedded and written (measured: 1,000 MB with 248 MB of bodies, 128 MB without)."""
_WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE"})
"""Methods whose routes read no body: they have their place at once."""
TELL_EXPIRED_EVERY_S = 60.0
"""A caller whose key has expired may ask many times a second."""
RETURN_S = 2
"""When a service that was told to end may be asked again: another one, or itself started anew."""
SWALLOWED_S = 2.0
SWALLOWED_BYTES = 64 * 2**20
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True, slots=True)
class Guard:
    """Who is let in. `keys` returns the keys in force, None where none are configured: then this machine only."""

    keys: Callable[[], Keyring | None]
    now_ms: Callable[[], int]
    open_paths: frozenset[str] = OPEN_PATHS
    """Paths that need no key."""
    scoped_paths: Mapping[str, Scope] | None = None
    """Paths that need a scope whatever their route says, and are answered under any load."""
    buckets: Buckets | None = None


class Edge:
    """Number, admit, bound and shed requests."""

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int,
        max_concurrent: int,
        new_id: Callable[[], str],
        guard: Guard,
        budget_s: float = 10.0,
        most_pause_s: float = 20.0,
        max_held_bytes: int | None = None,
        ending: asyncio.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`budget_s`: the time budget of a request that reads. `most_pause_s`: a sender that pauses longer is cut off.

        `ending`: set when the service can wait no longer for what is under way, which is then dropped and told so.

        `max_held_bytes`: of the bodies of all requests that arrive or are answered; `HELD_BODIES` largest ones for None.
        """
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._new_id = new_id
        self._guard = guard
        self._budget_s = budget_s
        self._most_pause_s = most_pause_s
        self._told_expired: dict[str, float] = {}
        self._ending = asyncio.Event() if ending is None else ending
        self._clock = clock
        self._room = _Room(
            most=max_concurrent,
            most_held_bytes=HELD_BODIES * max_body_bytes if max_held_bytes is None else max_held_bytes,
            budget_s=budget_s,
            clock=clock,
        )

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that are being answered, requests on their way, and bytes of bodies that all of them hold."""
        return self._room.load

    async def __call__(self, scope: ConnectionScope, receive: Receive, send: Send) -> None:
        """Serve one connection event; only HTTP requests are looked at, and WebSockets are turned away."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = self._id(scope)
        observing.request_id.set(request_id)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["key"] = None
        state["key_id"] = None
        more: list[tuple[bytes, bytes]] = [(b"x-request-id", request_id.encode())]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        try:
            name = self._admit(scope)
            state["caller"] = name
            budget_s = self._budget(scope)
            state["deadline"] = self._clock() + budget_s
            path = scope["path"]
            if path in OPEN_PATHS or path in (self._guard.scoped_paths or ()):
                await self._app(scope, receive, send_with_headers)
                return
            if self._guard.buckets is not None:
                key: Key | None = state["key"]
                taken = self._guard.buckets.take(
                    name, self._clock(), rate_per_s=None if key is None else key.rate_per_s
                )
                more += _rate_headers(taken)
                if not taken.allowed:
                    raise TooManyRequests(
                        f"more than {taken.quota} requests in {taken.window_s} s",
                        remedy="wait as long as Retry-After says, and spread the requests",
                        retry_after_s=round(taken.retry_after_s, 3),
                    )
            self._room.check(writes=_writes(scope))
            self._room.check_arrivals()
        except HalflifeError as error:
            state["refused"] = error.code
            await _refuse(send_with_headers, error, request_id)
            return
        await self._bounded(scope, receive, send_with_headers, request_id, budget_s)

    # --- who asks

    def _admit(self, scope: ConnectionScope) -> str:
        """Return the name that the caller is counted under, having noted their key. Raises Unauthorized or Forbidden."""
        client = scope.get("client")
        host = str(client[0]) if client else "unix"
        path = scope["path"]
        if path in self._guard.open_paths:
            return f"client {host}"
        ring = self._guard.keys()
        if ring is None:
            _check_local(scope, host)
            return f"client {host}"
        token = bearer(scope["headers"])
        key = None if token is None else ring.known(token)
        if key is None:
            raise Unauthorized(
                "no bearer key came with the request"
                if token is None
                else "the bearer key is not known here",
                remedy="send a key as `Authorization: Bearer …`; who runs the service makes one with `halflife keys create`",
            )
        scope["state"]["key_id"] = key.id
        if key.expired(self._guard.now_ms()):
            self._tell_expired(key)
            # Whoever guesses learns nothing by this: it takes the token, of which no other answer is known.
            raise Unauthorized(
                f"the bearer key expired at {key.expires:%Y-%m-%dT%H:%M:%SZ}",
                remedy="ask who runs the service for a new one, which `halflife keys create` makes",
            )
        scope["state"]["key"] = key
        wanted = (self._guard.scoped_paths or {}).get(path)
        if wanted is not None and not key.allows(wanted):
            raise Forbidden(
                f"this needs the scope '{wanted}'", remedy=f"use a key that has the scope '{wanted}'"
            )
        return f"key {key.id}"

    def _tell_expired(self, key: Key) -> None:
        now = self._clock()
        if now - self._told_expired.get(key.tag, -math.inf) >= TELL_EXPIRED_EVERY_S:
            self._told_expired[key.tag] = now
            log.warning("key %s has expired and is still sent", key.id)

    def _budget(self, scope: ConnectionScope) -> float:
        """Return the request's time budget in seconds: the header's where it is shorter than the service's own."""
        given = next((value for name, value in scope["headers"] if name == TIMEOUT_HEADER), None)
        if given is None:
            return self._budget_s
        if not given.isdigit() or len(given) > 9 or int(given) < 50:
            raise InvalidRequest(
                "the time budget is not a whole number of milliseconds from 50 on",
                field="X-Halflife-Timeout-Ms",
                remedy="send one such as 2000, or leave the header out",
            )
        return min(self._budget_s, int(given) / 1000)

    # --- the body and the answer

    async def _bounded(
        self, scope: ConnectionScope, receive: Receive, send: Send, request_id: str, budget_s: float
    ) -> None:
        state = scope["state"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        place = _Place(self._room, state, writes=_writes(scope), budget_s=budget_s)
        intake = _Intake(
            receive,
            empty=b"transfer-encoding" not in headers and declared in (b"", b"0"),
            most_bytes=self._max_body_bytes,
            path=scope["path"],
            most_pause_s=self._most_pause_s,
            place=place,
        )
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            # The framework answers a failed read with an error of its own, which is not what went wrong.
            if intake.failure is None or started:
                started = True
                await send(message)

        if declared.isdigit() and int(declared) > self._max_body_bytes:
            too_large = _too_large(self._max_body_bytes, scope["path"])
            state["refused"] = too_large.code
            await _refuse(send, too_large, request_id, headers=[_CLOSE], unread=receive)
            return
        place.arrive()
        if intake.empty or scope["method"] in _WITHOUT_BODY:
            place.be_answered()  # it was looked at a moment ago, and nothing has run since

        async def aside(doing: Awaitable[Result]) -> Result:
            """Return what is waited for without a place among those that are answered; ended if the caller hangs up.

            For what stores nothing and waits for its own turn. Raises Overloaded where no place is free afterwards.
            """
            place.step_aside()
            task = asyncio.ensure_future(doing)
            try:
                await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    raise _HungUp("the caller hung up before anything was stored")
                result = await task
                place.be_answered()
            except Overloaded as error:
                state["refused"] = error.code
                raise
            finally:
                task.cancel()
                await asyncio.wait({task})
            return result

        state["aside"] = aside
        work = asyncio.ensure_future(self._app(scope, intake.receive, noting))
        left = asyncio.ensure_future(intake.left())
        coming = asyncio.ensure_future(intake.came())
        over = asyncio.ensure_future(self._ending.wait())
        failure: HalflifeError | None = None
        try:
            if not place.answered:
                await asyncio.wait({work, coming, over}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(
                {work, left, over},
                timeout=max(0.0, state["deadline"] + GRACE_S - self._clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if started or not state.get("abandonable"):
                # Writes are finished whatever their callers do: cut off halfway, nobody could say what is stored.
                await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
            else:
                work.cancel()
                await asyncio.wait({work})
                if over.done():
                    failure = Ending(
                        "the service was told to end before the request was finished",
                        remedy="send it again after the pause; what was stored of it stays stored",
                        retry_after_s=RETURN_S,
                    )
                elif not left.done():
                    failure = DeadlineExceeded(
                        "there was no answer within the request's time budget",
                        remedy="ask for less, or give it more time",
                        retry_after_s=1,
                    )
        except (_BodyLarge, _BodySlow, Overloaded):
            pass
        finally:
            place.leave()
            for task in (work, left, coming, over):
                task.cancel()
            await asyncio.gather(work, left, coming, over, return_exceptions=True)
        failure = failure or intake.failure
        if failure is not None and not started:
            cut_off = isinstance(failure, _BodyLarge | _BodySlow)
            if failure is intake.failure:
                state["refused"] = failure.code
            await _refuse(
                send,
                failure,
                request_id,
                headers=[_CLOSE] if cut_off else [],
                unread=receive if isinstance(failure, _BodyLarge) else None,
            )

    def _id(self, scope: ConnectionScope) -> str:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        return given.decode() if _REQUEST_ID.fullmatch(given) else self._new_id()


class _Room:
    """How many requests there are, of which kind and size, and whether one more fits. Counts; knows no request."""

    def __init__(
        self, *, most: int, most_held_bytes: int, budget_s: float, clock: Callable[[], float]
    ) -> None:
        self._most = most
        self._most_held_bytes = most_held_bytes
        self.clock = clock
        # Answers at a quarter of their budget leave room for the slower ones to stay within it.
        self._concurrency = Concurrency(clock, most=most, slow_s=budget_s / 4)
        self._arriving = 0
        self._answered = 0
        self._writing = 0
        self._held_bytes = 0
        observing.ROOM.set(most)

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that are being answered, requests on their way, and bytes of bodies."""
        return self._answered, self._arriving, self._held_bytes

    def check(self, *, writes: bool) -> None:
        """Raise where as many requests are being answered as may be; writes, which may wait long, leave room to others."""
        if self._answered >= self._concurrency.limit:
            raise _overloaded(f"{self._answered} requests are being answered already")
        if writes and self._writing >= max(1, self._most - self._most // 4):
            raise _overloaded(f"{self._writing} writes are being done already")

    def check_arrivals(self) -> None:
        """Raise where as many requests are on their way as may be."""
        if self._arriving >= ARRIVING * self._most:
            raise _overloaded(f"{self._arriving} requests are arriving already")

    def arrive(self) -> None:
        """Count a request whose body is coming."""
        self._arriving += 1

    def turn_back(self) -> None:
        """Count out one that never came to be answered."""
        self._arriving -= 1

    def answer(self, *, writes: bool) -> None:
        """Count one that arrived among those that are being answered. Raises where there is no place."""
        self.check(writes=writes)
        self._arriving -= 1
        self._answered += 1
        self._writing += writes

    def leave(self, took_s: float, *, writes: bool) -> None:
        """Count out one that was answered after so long."""
        if not writes:
            # Writes may wait long for a cluster that is away, which says nothing of how many fit.
            self._concurrency.note(took_s, under_way=self._answered - self._writing)
            observing.ROOM.set(self._concurrency.limit)
        self._answered -= 1
        self._writing -= writes

    def hold(self, count: int) -> None:
        """Count bytes of bodies. Raises where all together are too many; they count all the same."""
        self._held_bytes += count
        if self._held_bytes > self._most_held_bytes:
            raise _overloaded("too many large bodies are arriving")

    def let_go(self, count: int) -> None:
        """Count out so many bytes."""
        self._held_bytes -= count


class _Place:
    """A request's place: among those that arrive while its body comes, among those that are answered afterwards.

    So a sender that is slow takes no place from callers who can be answered at once.
    """

    def __init__(
        self, room: _Room, request: MutableMapping[str, Any], *, writes: bool, budget_s: float
    ) -> None:
        """`request` is its state, whose deadline is put off to when the body is there."""
        self._room = room
        self._request = request
        self._budget_s = budget_s
        self._writes = writes
        self._state: Literal["before", "arriving", "answered", "gone"] = "before"
        self._bytes = 0
        self._begun = 0.0

    @property
    def answered(self) -> bool:
        return self._state == "answered"

    def arrive(self) -> None:
        self._state = "arriving"
        self._room.arrive()

    def hold(self, count: int) -> None:
        """Count bytes that came. Raises where all bodies together hold too many; these no longer do then.

        At once, not when its answer is given: else those that come at the same time would all be refused for one.
        """
        self._bytes += count
        try:
            self._room.hold(count)
        except Overloaded:
            self._room.let_go(self._bytes)
            self._bytes = 0
            raise

    def be_answered(self) -> None:
        """Take a place among those that are answered, and let the time budget begin. Raises where there is none."""
        if self.answered:
            return
        self._room.answer(writes=self._writes)
        self._state = "answered"
        self._begun = self._room.clock()
        # How long the body took on its way is not the service's time.
        self._request["deadline"] = self._begun + self._budget_s

    def step_aside(self) -> None:
        """Give the place back and count among those that arrive, until it is taken again."""
        if self.answered:
            self._room.leave(self._room.clock() - self._begun, writes=self._writes)
            self.arrive()

    def leave(self) -> None:
        if self._state == "arriving":
            self._room.turn_back()
        elif self._state == "answered":
            self._room.leave(self._room.clock() - self._begun, writes=self._writes)
        self._room.let_go(self._bytes)
        self._state, self._bytes = "gone", 0


class _Intake:
    """The body on its way in, bounded in bytes, pauses and pace; afterwards, whether the caller is still there."""

    def __init__(
        self, receive: Receive, *, empty: bool, most_bytes: int, path: str, most_pause_s: float, place: _Place
    ) -> None:
        """`empty`: no body was announced, so that nothing has to be read before the caller can be watched."""
        self._receive = receive
        self._place = place
        self._most_bytes = most_bytes
        self._path = path
        self._most_pause_s = most_pause_s
        self._begun = asyncio.get_running_loop().time()
        self._read = 0
        self._given = False
        self._whole = asyncio.Event()
        self._gone = asyncio.Event()
        self.empty = empty
        self.failure: HalflifeError | None = None
        if empty:
            self._whole.set()

    async def receive(self) -> Message:
        """Return the next message as the application takes it, or raise `failure`, having noted it."""
        if self.empty and not self._given:
            self._given = True
            return {"type": "http.request", "body": b"", "more_body": False}
        if self._whole.is_set():
            await self._gone.wait()
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout(self._most_pause_s):
                message = await self._receive()
        except TimeoutError:
            raise self._failed(_too_slow(self._most_pause_s)) from None
        if message["type"] == "http.disconnect":
            self._whole.set()
            self._gone.set()
            return message
        size = len(message.get("body", b""))
        self._read += size
        if self._read > self._most_bytes:
            raise self._failed(_too_large(self._most_bytes, self._path))
        try:
            self._place.hold(size)
        except HalflifeError as error:
            raise self._failed(error) from None
        if not message.get("more_body", False):
            self._whole.set()
            self._take_place()
        else:
            # A byte every few seconds never pauses long, and would hold a place for hours.
            taken_s = asyncio.get_running_loop().time() - self._begun
            if taken_s > self._most_pause_s + self._read / _LEAST_BODY_RATE:
                raise self._failed(_too_slow(self._most_pause_s))
        return message

    def _take_place(self) -> None:
        try:
            self._place.be_answered()
        except HalflifeError as error:
            raise self._failed(error) from None

    def _failed(self, error: HalflifeError) -> HalflifeError:
        self.failure = error
        return error

    async def came(self) -> None:
        """Return when the body is whole."""
        await self._whole.wait()

    async def left(self) -> None:
        """Return when the caller has hung up."""
        await self._whole.wait()
        while not self._gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._gone.set()


def _check_local(scope: ConnectionScope, host: str) -> None:
    """Raise Forbidden unless the request comes from this machine, and from no web page of elsewhere.

    Without keys, every program on this machine may do everything; a browser on it must not do so on behalf of a
    page: such a request carries that page's origin, or (where its name was pointed at this machine) its host.
    """
    headers = dict(scope["headers"])
    origin = headers.get(b"origin")
    named = headers.get(b"host", b"").decode("latin-1")
    if host != "unix" and not is_loopback(host):
        told = "no keys are configured, so only callers on this machine are answered"
    elif named and not is_loopback(_hostname(f"//{named}")):
        told = "no keys are configured, so only requests to this machine's loopback are answered"
    elif origin is not None and not is_loopback(_hostname(origin.decode("latin-1"))):
        told = "no keys are configured, so no web page of elsewhere is answered"
    else:
        return
    raise Forbidden(
        told,
        remedy="configure keys (`halflife keys create`, HALFLIFE_KEYS_FILE), or ask at http://127.0.0.1",
    )


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


# --- refusals --------------------------------------------------------------------------------------------------------


class _HungUp(HalflifeError):
    status = 499
    code = "caller-gone"
    title = "The caller hung up"


class _BodyLarge(HalflifeError):
    status = 413
    code = "body-too-large"
    title = "The body is too large"


class _BodySlow(HalflifeError):
    status = 408
    code = "body-too-slow"
    title = "The body did not come"


def _overloaded(what: str) -> HalflifeError:
    return Overloaded(what, remedy="try again after the pause", retry_after_s=1)


def _writes(scope: ConnectionScope) -> bool:
    return scope["method"] not in ("GET", "HEAD") and scope["path"].startswith("/v1/collections/")


def _too_large(most_bytes: int, path: str) -> HalflifeError:
    less = "ask for less at once"
    if path.endswith("/files"):
        less = "send fewer or smaller files at once (the form around them counts too)"
    elif "/documents" in path:
        less = "send fewer documents at once"
    return _BodyLarge(
        f"the body is larger than {most_bytes} bytes",
        remedy=f"{less}; HALFLIFE_MAX_BODY_BYTES of the service is the limit",
        limit=most_bytes,
    )


def _too_slow(most_pause_s: float) -> HalflifeError:
    return _BodySlow(
        f"it paused for {most_pause_s:g} s, or came slower than {_LEAST_BODY_RATE} bytes a second",
        remedy="send it again",
    )


def _rate_headers(taken: Taken) -> list[tuple[bytes, bytes]]:
    """Return RateLimit and RateLimit-Policy as draft-ietf-httpapi-ratelimit-headers-10 has them."""
    return [
        (b"ratelimit-policy", f'"requests";q={taken.quota};w={taken.window_s}'.encode()),
        (b"ratelimit", f'"requests";r={taken.remaining};t={taken.full_in_s}'.encode()),
    ]


async def _refuse(
    send: Send, error: HalflifeError, request_id: str, *, headers: Headers = (), unread: Receive | None = None
) -> None:
    """Answer with the error. `unread`: a body is still coming, and the connection is closed behind the answer.

    Closing it at once would reset it, and a caller who is still sending would see that instead of the answer.
    """
    body = json.dumps({**error.problem(), "request_id": request_id}).encode()
    more = [*headers]
    if error.retry_after_s is not None:
        more.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if isinstance(error, Unauthorized):
        more.append((b"www-authenticate", b'Bearer realm="halflife"'))
    await send({
        "type": "http.response.start", "status": error.status,
        "headers": [
            (b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode()), *more,
        ],
    })  # fmt: skip
    if unread is not None:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _swallow(unread)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def _swallow(receive: Receive) -> None:
    """Read what a caller goes on sending, for a moment."""
    left = SWALLOWED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWALLOWED_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))
