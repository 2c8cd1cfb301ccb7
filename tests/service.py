"""A running API for tests: uvicorn on a free port in a thread, a real node behind it, a far end that embeds.

What is given up for taking long is given far more time than it needs, so that a machine that stands still for seconds
fails no test. Those of the limits themselves set their own.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import httpx2
import uvicorn

from app import watching
from app.main import create_app
from app.settings import Settings


@dataclass(frozen=True)
class Running:
    """A served application and how to reach it."""

    url: str
    client: httpx2.Client
    server: uvicorn.Server


def settings_for(node_url: str, embedding_url: str, *, dims: int, **more: Any) -> Settings:
    """Settings of a service before a node of these tests and a far end that embeds any text, without prefixes."""
    return Settings(
        **{
            "elasticsearch_url": node_url,
            "elasticsearch_timeout_s": 60,
            "elasticsearch_pool_wait_s": 60,
            "embedding_base_url": embedding_url,
            "embedding_model": "far-end",
            "embedding_dims": dims,
            "embedding_query_timeout_s": 60,
            "embedding_query_prefix": "",
            "embedding_document_prefix": "",
            **more,
        }
    )


def until(holds: Callable[[], bool], *, within_s: float = 30) -> None:
    """Wait for what must come true, or fail after a long time."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, "this should have come true"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[Running]:
    """Serve the application until the block ends; raises what start-up raised."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        create_app(settings), log_level="warning", lifespan="on", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)

    def run() -> None:
        # uvicorn leaves by SystemExit when start-up fails; who waits below sees that the thread has ended.
        with contextlib.suppress(SystemExit):
            server.run(sockets=[listener])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 90
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the application did not start: see the log above")
            if time.monotonic() > deadline:
                raise RuntimeError("the application did not start in time")
            time.sleep(0.02)
        url = f"http://127.0.0.1:{port}"
        with (
            patch.object(watching, "CHECK_WITHIN_S", 30.0),
            httpx2.Client(base_url=url, timeout=60) as client,
        ):
            yield Running(url, client, server)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
