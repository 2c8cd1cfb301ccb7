"""Own the process that serves the API alone: settings from the environment, uvicorn, an orderly end.

No part of the service is made here: `app.main` is the factory. An error at start-up is told in a sentence with its
remedy, not as a stack trace.
"""

import argparse
import asyncio
import contextlib
import difflib
import errno
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from app.errors import HalflifeError, InvalidRequest
from scripts.stack import end_with_stdin

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from app.settings import Settings

# With the pause before it and the closing of what is open (3 s at most), within the ten seconds that orchestrators wait.
_DRAIN_S = 6
# Before that is over, requests that are not finished are told so: uvicorn would cut them off with a bare 500.
_ANSWER_WITHIN_S = 5
# Longer than clients keep idle connections, lest they write into one that is being closed.
_KEEP_ALIVE_S = 75

COMMANDS_READ = frozenset(
    f"HALFLIFE_{name}"
    for name in (
        "CACHE", "COLLECTION", "DATA", "JAVA_HOME", "KEY", "KIBANA_API_KEY", "KIBANA_CA", "KIBANA_PASSWORD",
        "KIBANA_SPACE", "KIBANA_URL", "KIBANA_USERNAME", "SECRETS_DIR", "URL",
    )
)  # fmt: skip
"""The variables that are no settings of the service: its commands read them, and where secrets lie is one of them."""
# What Kubernetes tells every pod of a service that is called halflife, or halflife-something.
_SERVICE_LINK = re.compile(r"HALFLIFE_(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")


class StartFailed(HalflifeError):
    """The API could not begin to serve."""

    code = "start-failed"
    title = "The API did not start"


class _Start:
    """How the service's start went: the failure, where it is one of ours; and whether it was told to end before."""

    def __init__(self) -> None:
        self.failure: HalflifeError | None = None
        self.told: int | None = None
        """The signal by which it was told to end."""
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def give_up(self, sig: int) -> None:
        """End the start, which may wait long for what it needs; nothing once it is over. For a signal's handler."""
        if self._waiting is not None:
            self.told = sig
            loop, task = self._waiting
            loop.call_soon_threadsafe(task.cancel)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Note the failure of what is started in the block. Raises StartFailed where it was given up."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting = asyncio.get_running_loop(), task
        try:
            yield
        except HalflifeError as failure:
            self.failure = failure
            raise
        except asyncio.CancelledError:
            if self.told is None:
                raise
            task.uncancel()
            logging.getLogger("halflife").info("told to end while it was starting")
            self.failure = StartFailed("it was told to end while it was starting")
            raise self.failure from None
        finally:
            self._waiting = None


def read_settings() -> "Settings":
    """Return the settings in the environment. Raises InvalidRequest naming the variables that can't be used."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from app.settings import Settings

    try:
        return Settings()
    except ValidationError as cause:
        faults = []
        for item in cause.errors(include_url=False, include_input=False, include_context=False):
            variable, *inside = (*item["loc"], "")
            name = f"HALFLIFE_{variable.upper()}: " if isinstance(variable, str) and variable else ""
            where = "".join(f"{part}: " for part in inside if part != "")
            faults.append(f"{name}{where}{item['msg'].removeprefix('Value error, ')}")
        raise _unusable("; ".join(faults)) from cause
    except SettingsError as cause:
        # Around ours pydantic puts one of its own, which says less.
        raise _unusable(str(cause.__cause__ or cause)) from cause


def check_settings() -> "Settings":
    """Return the settings. Raises InvalidRequest or StartFailed for what a service would not start with.

    For whoever starts other things first: what can be told now is not told a minute later. Nobody is asked anything, so
    whether the other services answer is not looked at.
    """
    from app.main import check_doors

    settings = read_settings()
    _check_host(settings.host, settings)
    asyncio.run(check_doors(settings))
    return settings


def _check_host(host: str, settings: "Settings") -> None:
    """Raise StartFailed where the service can't listen on a host, or must not without keys."""
    listen(host, 0).close()
    refuse_without_keys(host, settings)


def without_effect(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable and each file of secrets that is meant as a setting and is none."""
    return variables_without_effect(environment) + secrets_without_effect(environment)


def variables_without_effect(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that is called like a setting and is none.

    They are told and no more: on a machine that others use too they may be somebody else's.
    """
    known = _variables() | COMMANDS_READ
    return [
        _mistyped(f"{name} is no setting and has no effect", upper, known)
        for name, upper in sorted((name, name.upper()) for name in environment)
        if upper.startswith("HALFLIFE_")
        and upper not in known
        and not upper.startswith("HALFLIFE_TEST_")
        and not _SERVICE_LINK.fullmatch(upper)
    ]


def secrets_without_effect(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each file in the folder of secrets that is no setting; hidden ones are nobody's."""
    folder = environment.get("HALFLIFE_SECRETS_DIR", "").strip()
    if not folder:
        return []
    settings = {name.lower() for name in _variables()}
    try:
        found = sorted(Path(folder).expanduser().iterdir())
    except OSError:
        return []
    return [
        _mistyped(f"the secret {path.name} is no setting and has no effect", path.name.lower(), settings)
        for path in found
        if not path.name.startswith(".")
        and path.name.lower() not in settings
        and (path.is_file() or path.name.lower().startswith("halflife"))
    ]


def _variables() -> set[str]:
    from app.settings import Settings

    return {f"HALFLIFE_{name.upper()}" for name in Settings.model_fields}


def _mistyped(told: str, name: str, known: Set[str]) -> str:
    """Add the known name that is meant, if one is very like it. What all begin with is no likeness."""
    stems = {_stem(each): each for each in known}
    alike = difflib.get_close_matches(_stem(name), sorted(stems), n=1, cutoff=0.85)
    return f"{told}: is {stems[alike[0]]} meant?" if alike else told


def _stem(name: str) -> str:
    words = re.split(r"[-_. ]+", name.lower())
    # The prefix may be mistyped too.
    of_ours = difflib.SequenceMatcher(None, words[0], "halflife").ratio() > 0.8
    return "_".join(words[1:] if of_ours else words)


def _unusable(faults: str) -> InvalidRequest:
    return InvalidRequest(
        f"the settings can't be used: {faults}",
        remedy="correct the environment variables named; the README lists them all",
    )


def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    log_level: str | None = None,
    access_log: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests under way. What is given overrides the settings.

    At the signal `/readyz` turns red, HALFLIFE_DRAIN_S later the service stops listening, and within 9 s more it ends;
    one that still waits for what it needs ends at once.

    Raises a HalflifeError with the remedy if the service can't start; call in the main thread.
    """
    import uvicorn

    from app import logs
    from app.main import create_app

    settings = read_settings()
    host, port = host or settings.host, settings.port if port is None else port
    _check_host(host, settings)
    start = _Start()
    application = create_app(settings)
    _tell_failures_apart(application, start)
    config = uvicorn.Config(
        application,
        log_config=None,
        # Each request's line is the service's own: by route template, with its id, refused ones too.
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        http=impatient(settings.max_body_pause_s),
    )
    logs.configure(
        settings.log_format,
        log_level or settings.log_level,
        requests=access_log or settings.log_format == "json",
    )
    logging.getLogger("uvicorn.error").addFilter(lambda record: start.failure is None)
    for line in without_effect(os.environ):
        logging.getLogger("halflife").warning("%s", line)
    with listen(host, port) as sock:
        server = _draining(config, application, settings.drain_s, start)
        # uvicorn ends the program by itself where the start failed, having logged why.
        with contextlib.suppress(SystemExit):
            server.run(sockets=[sock])
    if start.told is not None:
        # As uvicorn does after it served: who waits for this process sees that it ended as told.
        signal.raise_signal(start.told)
    if start.failure is not None:
        raise start.failure
    if not server.started:
        raise StartFailed("the service did not start", remedy="its log above says why")


def impatient(patience_s: float) -> "type[asyncio.Protocol]":
    """Return uvicorn's HTTP/1.1 with an end to its patience: no state that only the other side ends lasts for ever.

    Cut off are: a request's head that takes longer; the rest of a body whose request was answered before it came; an
    answer of which nothing is taken for so long. A body that is read is the edge's to bound, and between two requests
    uvicorn's own timer runs, which ends with the first byte of whatever comes.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Impatient(H11Protocol):
        _awaits: Literal["head", "rest"] | None = None
        _timer: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await("head")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._see_off()

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                super().send_400_response(msg)
            else:
                # The request was answered already, and its body goes wrong: there is nothing left to say.
                self.transport.close()
            self._see_off()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_taking()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_watching()
            self._see_off()

        def connection_lost(self, exc: Exception | None) -> None:
            self._await(None)
            self._stop_watching()
            super().connection_lost(exc)

        def _look(self) -> None:
            """Start and end the timers as the state of both sides wants it."""
            theirs, ours = self.conn.their_state, self.conn.our_state
            if self.transport.is_closing():
                self._await(None)
                self._see_off()
            elif theirs is h11.IDLE and self.conn.trailing_data[0]:
                self._await("head")
            elif theirs is h11.SEND_BODY and ours is h11.DONE:
                self._await("rest")
            else:
                self._await(None)
                if theirs is h11.IDLE and ours is h11.IDLE and self.timeout_keep_alive_task is None:
                    self.timeout_keep_alive_task = self.loop.call_later(
                        self.timeout_keep_alive, self.timeout_keep_alive_handler
                    )

        def _await(self, what: Literal["head", "rest"] | None) -> None:
            if what == self._awaits:
                return
            self._awaits = what
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None if what is None else self.loop.call_later(patience_s, self._cut_off)

        def _cut_off(self) -> None:
            self.transport.close()
            self._see_off()

        def _see_off(self) -> None:
            # A closed connection stays until what was written to it has been taken.
            if self.transport.is_closing():
                self._watch_taking()

        def _watch_taking(self) -> None:
            left = self.transport.get_write_buffer_size()
            if left and self._taking is None:
                self._taking = self.loop.call_later(patience_s, self._was_taken, left)

        def _stop_watching(self) -> None:
            if self._taking is not None:
                self._taking.cancel()
                self._taking = None

        def _was_taken(self, before: int) -> None:
            # Nothing is written while this runs: writing is paused, or over.
            self._taking = None
            if self.transport.get_write_buffer_size() < before:
                self._watch_taking()
            else:
                self.transport.abort()

    return Impatient


def _draining(
    config: "uvicorn.Config", application: "FastAPI", pause_s: float, start: _Start
) -> "uvicorn.Server":
    """Return a server that goes on serving for a moment after the signal, so that load balancers see it leave."""
    import uvicorn

    class Draining(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            telling = asyncio.get_running_loop().call_later(_ANSWER_WITHIN_S, application.state.ending.set)
            await super().shutdown(sockets)
            telling.cancel()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service = getattr(application.state, "service", None)
            if service is None or not service.ready or pause_s <= 0:
                # A second signal, or one before it served: at once.
                super().handle_exit(sig, frame)
                start.give_up(sig)
                return
            service.ready = False
            leave = super().handle_exit
            timer = threading.Timer(pause_s, lambda: leave(sig, frame))
            timer.daemon = True
            timer.start()

    return Draining(config)


def refuse_without_keys(host: str, settings: "Settings") -> None:
    """Raise StartFailed where others than this machine could reach a service that asks for no key."""
    from app.addresses import is_loopback

    if not settings.keyed and not is_loopback(host):
        raise StartFailed(
            f"no keys are configured, and {host} can be reached from other machines",
            remedy="make a key (`halflife keys create`): with --file keys.json for HALFLIFE_KEYS_FILE, or with --entry for "
            "HALFLIFE_KEYS; or serve on 127.0.0.1",
        )


def listen(host: str, port: int) -> socket.socket:
    """Bind the address to serve at (port 0: a free one). Raises StartFailed where that is not possible."""
    host = host.strip("[]")
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError, UnicodeError) as cause:
        sock.close()
        remedy = "choose another --port"
        if (
            isinstance(cause, socket.gaierror | UnicodeError)
            or getattr(cause, "errno", None) == errno.EADDRNOTAVAIL
        ):
            remedy = "serve on an address of this machine (--host, HALFLIFE_HOST)"
        elif getattr(cause, "errno", None) == errno.EADDRINUSE:
            remedy = "stop the program that has the port, or choose another --port"
        raise StartFailed(
            f"can't listen on {host}{f':{port}' if port else ''} ({getattr(cause, 'strerror', None) or cause})",
            remedy=remedy,
        ) from cause
    return sock


def _tell_failures_apart(application: "FastAPI", start: _Start) -> None:
    """Note a failure of ours at start-up, so that it can be told as what it is once the server is down."""
    lifespan = application.router.lifespan_context

    @contextlib.asynccontextmanager
    async def noting(app: "FastAPI") -> AsyncIterator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            with start.under_way():
                state = await stack.enter_async_context(lifespan(app))
            yield state

    application.router.lifespan_context = noting


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a part of the local stack; return the exit code. A failure is one line, `error: …`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.serving", description="Serve the API.")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.end_with_stdin:
            end_with_stdin(read_settings().drain_s + _DRAIN_S + 5)
        serve(host=chosen.host, port=chosen.port)
    except HalflifeError as failure:
        print(f"error: {told(failure)}", file=sys.stderr, flush=True)
        return 1
    return 0


def told(failure: HalflifeError) -> str:
    """Return a failure in one line: what went wrong, and the remedy."""
    text = f"{failure.title}: {failure.detail}"
    return f"{text}. Remedy: {failure.remedy}." if failure.remedy else f"{text}."


if __name__ == "__main__":
    sys.exit(main())
