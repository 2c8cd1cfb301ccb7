"""The outermost layer of the service: how long each request took, and how it ended. Plain ASGI.

It stands around the edge, so that what the edge refuses is counted too.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from app import observing

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

UNWATCHED: Final = frozenset({"/livez", "/readyz", "/metrics"})
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
"""What stands in metrics and logs as it came: any word may be sent as a method, and each would be a series for good."""
REFUSALS: Final = {
    401: "unauthorized", 403: "forbidden", 408: "too slow", 413: "too large", 429: "limited", 503: "shed",
}  # fmt: skip
"""What a status means that the edge answered, before any work was done; others: the request is not valid."""

KEYS_REFUSALS: Final = frozenset({401, 403, 429})
"""What is counted by key, whether the edge refused it or a route: these are about who asks, not about what."""
MOST_PATH: Final = 200

log = logging.getLogger("halflife.access")


class Metering:
    """Measures requests and writes one line for each."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection event; only HTTP requests are looked at."""
        if scope["type"] != "http" or scope["path"] in UNWATCHED:
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        observing.UNDER_WAY.inc()
        try:
            await self._app(scope, receive, noting)
        finally:
            observing.UNDER_WAY.dec()
            took = time.perf_counter() - begun
            route = getattr(scope.get("route"), "path_format", None)
            # Left before an answer: nginx' number for it.
            status = status or 499
            method = scope["method"] if scope["method"] in METHODS else "other"
            observing.REQUESTS.labels(route or "none", method, str(status)).observe(took)
            # The edge says what it refused, a body that was too large or slow on its way to a route included.
            state = scope.get("state", {})
            refused = state.get("refused")
            key_id = state.get("key_id")
            if key_id is not None and (refused is not None or status in KEYS_REFUSALS):
                observing.key_refused(key_id, status)
            if refused is not None:
                observing.REFUSED.labels(REFUSALS.get(status, "invalid"), refused).inc()
            # What reached no route, as all that the edge refuses, is told by its path, without the query.
            path = None if route else scope["path"].encode("unicode_escape").decode("ascii")[:MOST_PATH]
            log.log(
                logging.WARNING if status in (500, 502, 507) else logging.INFO,
                "%s %s %d in %.1f ms%s", method, route or f"(no route) {path}", status, took * 1000,
                "" if key_id is None else f", key {key_id}",
                extra={
                    "method": method, "route": route, "path": path, "status": status, "key": key_id,
                    "took_ms": round(took * 1000, 1), "request_id": state.get("request_id"),
                },
            )  # fmt: skip
