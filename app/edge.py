"""The edge of the service: what holds for every request before any route sees it.

Gives each request an id, refuses bodies over the limit while they arrive, and sheds load rather than queueing
without end. Plain ASGI; knows no route and no search.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app import observing

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._\-]{1,128}")
_UNBOUNDED = frozenset({"/livez", "/readyz", "/metrics"})
"""Paths that are answered under any load: who watches the service must still see it."""


class BodyTooLarge(Exception):
    """The body passed the limit while it was read."""


class Edge:
    """Number, bound and shed requests."""

    def __init__(
        self,
        app: App,
        *,
        max_body_bytes: int,
        max_concurrent: int,
        new_id: Callable[[], str],
        most_pause_s: float = 20.0,
    ) -> None:
        """`most_pause_s`: a sender that pauses longer within a body loses its place."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_concurrent = max_concurrent
        self._new_id = new_id
        self._most_pause_s = most_pause_s
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event; only HTTP requests are looked at."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        observing.request_id.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        if scope["path"] in _UNBOUNDED:
            await self._app(scope, receive, send_with_id)
            return
        if self._under_way >= self._max_concurrent:
            await _refuse(
                send_with_id, 503, "overloaded", "Too many requests at once",
                f"{self._max_concurrent} requests are being answered already", "try again after the pause", request_id,
                headers=[(b"retry-after", b"1")],
            )  # fmt: skip
            return
        self._under_way += 1
        try:
            await self._bounded(scope, receive, send_with_id, request_id)
        finally:
            self._under_way -= 1

    async def _bounded(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._too_large(send, request_id)
            return
        read = 0
        whole = False
        started = False

        async def counting() -> Message:
            nonlocal read, whole
            # Only while the body comes: afterwards this waits for the caller to hang up.
            message = await (receive() if whole else asyncio.wait_for(receive(), self._most_pause_s))
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                if read > self._max_body_bytes:
                    raise BodyTooLarge
            return message

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counting, noting)
        except BodyTooLarge:
            if started:
                raise
            await self._too_large(send, request_id)
        except TimeoutError:
            if started or whole:
                raise
            await _refuse(
                send, 408, "body-too-slow", "The body did not come",
                f"nothing more of the body came for {self._most_pause_s:g} s", "send it again", request_id,
                headers=[(b"connection", b"close")],
            )  # fmt: skip

    async def _too_large(self, send: Send, request_id: str) -> None:
        await _refuse(
            send, 413, "body-too-large", "The body is too large",
            f"the body is larger than {self._max_body_bytes} bytes", "send fewer documents at once", request_id,
            headers=[(b"connection", b"close")],
        )  # fmt: skip

    def _id(self, scope: Scope) -> str:
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        return given.decode() if _REQUEST_ID.fullmatch(given) else self._new_id()


async def _refuse(
    send: Send, status: int, code: str, title: str, detail: str, remedy: str, request_id: str,
    *, headers: list[tuple[bytes, bytes]],
) -> None:  # fmt: skip
    body = json.dumps({
        "type": f"urn:halflife:problem:{code}", "title": title, "status": status, "detail": detail,
        "remedy": remedy, "request_id": request_id,
    }).encode()  # fmt: skip
    await send({
        "type": "http.response.start", "status": status,
        "headers": [
            (b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode()), *headers,
        ],
    })  # fmt: skip
    await send({"type": "http.response.body", "body": body})
