"""How the doors reach a far end over HTTP: its address, its client, its Retry-After, and text fit to be sent.

One place, so that what protects texts and keys on their way (no redirects, no proxy on the way to loopback, no
compression past a bound on bytes) holds for the embedder, the reranker and the rewriter alike.
"""

import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import httpx2

from app.addresses import is_loopback

IDLE_S: Final = 4.0
"""Servers drop idle connections after 5 s (uvicorn's default): we leave before they do."""

ResponseHook = Callable[[httpx2.Response], Awaitable[None]]


def parse_url(text: str, *, what: str) -> httpx2.URL:
    """Return the address of a far end; ValueError says what is wrong with it, `what` naming whose it is."""
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, TypeError) as cause:
        raise ValueError(f"{what} is not a URL: {cause}") from cause
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{what} must start with http:// or https:// and name a host")
    if "%" in url.host or not (url.port is None or 0 < url.port < 65_536):
        raise ValueError(f"the host or port of {what} is not one")
    return url


def with_ending(url: httpx2.URL, ending: str, *others: str) -> httpx2.URL:
    """Return the URL with `ending` behind its path, unless it ends with that or with one of `others` already."""
    path = url.path.rstrip("/")
    return url.copy_with(path=path if path.endswith((ending, *others)) else path + ending)


def shown(url: httpx2.URL) -> str:
    """Return the address as messages may tell it: without password and query."""
    return str(url.copy_with(username=None, password=None, query=None)).rstrip("/")


def check_key(api_key: str | None, *, what: str) -> None:
    """Raise ValueError where the key can't stand in a header, which shows only at the first call otherwise."""
    if api_key is not None and not api_key.strip():
        raise ValueError(f"{what} is blank: leave it out where the server wants none")
    if api_key is not None and not (
        api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()
    ):
        raise ValueError(
            f"{what} holds characters that HTTP headers refuse (a line end or a space around it, perhaps)"
        )


def open_client(
    url: httpx2.URL,
    *,
    timeout_s: float,
    connect_s: float,
    places: int,
    ca_certs: str | None = None,
    headers: Mapping[str, str] | None = None,
    on_response: Sequence[ResponseHook] = (),
) -> httpx2.AsyncClient:
    """Return a client for one far end that has opened no connection yet.

    `timeout_s` bounds each wait for bytes, `connect_s` (at most that) the making of a connection, `places` the number of
    connections.
    """
    # Loading the system's CAs takes 20 ms and is of no use without TLS.
    tls: ssl.SSLContext | bool = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if url.scheme == "https":
        tls = ssl.create_default_context(cafile=ca_certs) if ca_certs else True
    return httpx2.AsyncClient(
        verify=tls,
        # A bound on the bytes read must be a bound on memory, so no compression.
        headers={"accept-encoding": "identity", **(headers or {})},
        timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, connect_s)),
        limits=httpx2.Limits(
            max_connections=places, max_keepalive_connections=places, keepalive_expiry=IDLE_S
        ),
        # Following would send texts and key to where nobody configured.
        follow_redirects=False,
        # A proxy from the environment can't reach this machine's own loopback.
        trust_env=not is_loopback(url.host),
        event_hooks={"response": list(on_response)},
    )


def json_headers(api_key: str | None) -> dict[str, str]:
    """Return what a request for JSON says, and its bearer key where there is one."""
    key = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"accept": "application/json", **key}


def retry_after_s(headers: httpx2.Headers, now: datetime) -> float | None:
    """Return how long the server asks to wait (`retry-after-ms`, then `retry-after`: seconds or a date), ≥ 0."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            wait = float(value) * scale
        except ValueError:
            try:
                moment = parsedate_to_datetime(value)
            except ValueError:
                continue
            wait = (moment.replace(tzinfo=moment.tzinfo or UTC) - now).total_seconds()
        if math.isfinite(wait):
            return max(0.0, wait)
    return None


def sendable(text: str) -> str:
    """Return the text with lone surrogates replaced (they can't be encoded) and NUL as a space (engines stop at it)."""
    return text.encode("utf-8", "replace").decode().replace("\0", " ")


def brief(words: str, most: int = 300) -> str:
    """Return somebody else's words on one line of at most `most` characters, for a message of ours."""
    words = " ".join(words.encode("utf-8", "replace").decode().split())
    return words if len(words) <= most else words[: most - 1] + "…"
