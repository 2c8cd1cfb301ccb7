"""The edge alone, around small applications: who is let in, how often, for how long, and what is dropped."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from app import observing
from app.api import install_handlers
from app.asking import Search
from app.edge import Edge, Guard
from app.errors import HalflifeError
from app.keys import Keyring, hash_of, parse_keys
from app.limits import Buckets, Limits
from app.metering import Metering
from scripts import serving
from scripts.serving import impatient

Message = dict[str, Any]


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def ring(**more: Any) -> Keyring:
    entry = {"id": "k", "hash": hash_of("secret"), "scopes": ["read"], "collections": ["*"], **more}
    other = {"id": "other", "hash": hash_of("another"), "scopes": ["metrics"], "collections": ["*"]}
    return Keyring(parse_keys(json.dumps([entry, other]), where="keys"))


class Call:
    """One request by hand: its body comes as `chunks`, and the caller hangs up when `hang_up` is set."""

    def __init__(
        self,
        path: str = "/v1/x",
        *,
        headers: dict[str, str] | None = None,
        client: str = "127.0.0.1",
        chunks: list[bytes] | None = None,
        method: str = "POST",
    ) -> None:
        given = {"host": "127.0.0.1:8080", **(headers or {})}
        if chunks is not None:
            given["transfer-encoding"] = "chunked"
        self.scope: Message = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "client": (client, 50_000),
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8080),
        }
        self.hang_up = asyncio.Event()
        self.pause_s = 0.0
        self.sent: list[Message] = []
        self._chunks = [b""] if chunks is None else chunks

    async def receive(self) -> Message:
        if self._chunks:
            await asyncio.sleep(self.pause_s)
            body = self._chunks.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}
        await self.hang_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def to(self, edge: Edge) -> "Call":
        await edge(self.scope, self.receive, self.send)  # type: ignore[arg-type]
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> Any:
        return json.loads(b"".join(message.get("body", b"") for message in self.sent[1:]))

    @property
    def problem(self) -> str:
        return str(self.body["type"]).removeprefix("urn:halflife:problem:")


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def edge(
    app: Callable[..., Awaitable[None]] = hello,
    *,
    keys: Keyring | None = None,
    buckets: Buckets | None = None,
    clock: Clock | None = None,
    **more: Any,
) -> Edge:
    ids = iter(range(10_000))
    options: dict[str, Any] = {"max_body_bytes": 1_000, "max_concurrent": 4, **more}
    guard = Guard(
        keys=lambda: keys,
        now_ms=lambda: 0,
        open_paths=frozenset({"/livez", "/readyz", "/docs"}),
        scoped_paths={"/metrics": "metrics"},
        buckets=buckets,
    )
    if clock is not None:
        options["clock"] = clock
    return Edge(app, new_id=lambda: f"id-{next(ids)}", guard=guard, **options)


BEARER = {"Authorization": "Bearer secret"}

# --- who is let in -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, headers, status", [
    ("/livez", {}, 200), ("/readyz", {}, 200), ("/docs", {}, 200),
    ("/v1/x", {}, 401), ("/", {}, 401), ("/livez/", {}, 401), ("/docsx", {}, 401), ("/metrics", {}, 401),
    ("/v1/x", BEARER, 200), ("/metrics", BEARER, 403), ("/metrics", {"Authorization": "Bearer another"}, 200),
])  # fmt: skip
async def test_paths_and_keys(path, headers, status):
    call = await Call(path, headers=headers, client="10.0.0.9").to(edge(keys=ring()))
    assert call.status == status
    assert call.headers["x-request-id"]


async def test_no_body_is_read_of_who_has_no_key():
    call = Call(chunks=[b"x" * 500] * 10)
    await call.to(edge(keys=ring()))
    assert (call.status, len(call._chunks)) == (401, 10)


async def test_a_key_that_comes_and_goes():
    held: list[Keyring | None] = [ring()]
    guarded = edge()
    guarded._guard = Guard(keys=lambda: held[0], now_ms=lambda: 0)
    assert (await Call(headers=BEARER).to(guarded)).status == 200
    held[0] = Keyring([])
    assert (await Call(headers=BEARER).to(guarded)).status == 401


@pytest.mark.parametrize("client, headers, status", [
    ("127.0.0.1", {}, 200),
    ("::1", {"host": "[::1]:8080"}, 200),
    ("127.0.0.1", {"host": "localhost:8080"}, 200),
    ("127.0.0.1", {"origin": "http://localhost:3000"}, 200),
    ("10.0.0.9", {}, 403),
    ("::ffff:10.0.0.9", {}, 403),
    ("127.0.0.1", {"host": "rebound.example:8080"}, 403),
    ("127.0.0.1", {"origin": "https://evil.example"}, 403),
    ("127.0.0.1", {"origin": "null"}, 403),
    ("127.0.0.1", {"origin": "http://[bad"}, 403),
])  # fmt: skip
async def test_without_keys_this_machine_alone_is_answered(client, headers, status):
    call = await Call(headers=headers, client=client).to(edge())
    assert call.status == status
    if status == 403:
        assert "no keys are configured" in call.body["detail"]
        assert "HALFLIFE_KEYS_FILE" in call.body["remedy"]


async def test_with_keys_it_does_not_matter_where_from():
    headers = {**BEARER, "host": "search.example", "origin": "https://app.example"}
    assert (await Call(headers=headers, client="10.0.0.9").to(edge(keys=ring()))).status == 200


async def test_websockets_are_turned_away():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await edge(keys=ring())({"type": "websocket", "path": "/", "headers": []}, Call().receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- how often ---------------------------------------------------------------------------------------------------------------


async def test_a_caller_over_its_rate_is_told_when_the_next_is_taken():
    clock = Clock()
    limited = edge(keys=ring(), buckets=Buckets(rate_per_s=2, burst=4), clock=clock)

    async def ask(token: str = "secret") -> Call:
        return await Call(headers={"Authorization": f"Bearer {token}"}).to(limited)

    answers = [await ask() for _ in range(6)]
    assert [call.status for call in answers] == [200, 200, 200, 200, 429, 429]
    assert [call.headers["ratelimit"] for call in answers[:5]] == [
        '"requests";r=3;t=1', '"requests";r=2;t=1', '"requests";r=1;t=2', '"requests";r=0;t=2', '"requests";r=0;t=2',
    ]  # fmt: skip
    assert {call.headers["ratelimit-policy"] for call in answers} == {'"requests";q=4;w=2'}
    refused = answers[4]
    assert (refused.problem, refused.headers["retry-after"], refused.body["retry_after_s"]) == (
        "too-many-requests", "1", 0.5,
    )  # fmt: skip
    assert (await ask("another")).status == 200, "each key has a bucket of its own"
    clock.now += 0.4
    assert (await ask()).status == 429
    clock.now += 0.1
    assert (await ask()).status == 200
    assert (await ask()).status == 429
    clock.now += 3_600
    assert [(await ask()).status for _ in range(5)] == [200, 200, 200, 200, 429]


async def test_a_refusal_is_logged_and_counted_by_its_key(caplog):
    caplog.set_level("INFO", "halflife.access")
    clock = Clock()
    guarded = edge(keys=ring(id="teller"), buckets=Buckets(rate_per_s=0.001, burst=1), clock=clock)
    for headers in (BEARER, BEARER, {}):
        call = Call("/v1/x\nforged", headers=headers)
        await Metering(guarded)(call.scope, call.receive, call.send)  # type: ignore[arg-type]
    _, limited, unknown = caplog.records
    assert limited.getMessage().startswith("POST (no route) /v1/x\\nforged 429 in ")
    assert limited.getMessage().endswith(" ms, key teller")
    assert (limited.key, limited.path) == ("teller", "/v1/x\\nforged")
    assert unknown.key is None
    assert " 401 in " in unknown.getMessage()
    assert "secret" not in caplog.text
    told = observing.exposition()[0].decode()
    assert 'halflife_key_refused_requests_total{key="teller",status="429"} 1.0' in told
    assert 'key="teller",status="200"' not in told


def test_keys_past_the_first_share_a_series(monkeypatch):
    monkeypatch.setattr(observing, "_keys_told", {"one"})
    monkeypatch.setattr(observing, "MOST_KEYS", 1)
    for key in ("one", "two", "three"):
        observing.key_refused(key, 418)
    told = observing.exposition()[0].decode()
    assert 'halflife_key_refused_requests_total{key="others",status="418"} 2.0' in told
    assert 'key="two"' not in told


async def test_a_keys_own_rate_outranks_the_services():
    clock = Clock()
    limited = edge(keys=ring(rate_per_s=1), buckets=Buckets(rate_per_s=100, burst=200), clock=clock)
    statuses = [(await Call(headers=BEARER).to(limited)).status for _ in range(4)]
    assert statuses == [200, 200, 429, 429]


async def test_only_who_has_an_expired_keys_token_is_told_so(caplog):
    clock = Clock()
    guarded = edge(keys=ring(expires="1970-01-01T00:00:00Z"), clock=clock)
    for _ in range(3):
        expired = await Call(headers=BEARER).to(guarded)
    assert (expired.status, expired.problem) == (401, "unauthorized")
    assert expired.body["detail"] == "the bearer key expired at 1970-01-01T00:00:00Z"
    assert expired.scope["state"]["key_id"] == "k"
    assert expired.scope["state"]["key"] is None
    wrong = await Call(headers={"Authorization": "Bearer Secret"}).to(guarded)
    assert (wrong.status, wrong.body["detail"]) == (401, "the bearer key is not known here")
    assert wrong.scope["state"]["key_id"] is None
    lines = [record.getMessage() for record in caplog.records if "expired" in record.getMessage()]
    assert lines == ["key k has expired and is still sent"]
    clock.now += 60
    await Call(headers=BEARER).to(guarded)
    assert caplog.text.count("key k has expired") == 2
    assert "secret" not in caplog.text


async def test_without_keys_each_address_is_counted():
    limited = edge(buckets=Buckets(rate_per_s=1, burst=1), clock=Clock())
    assert [(await Call(client=client).to(limited)).status for client in ("127.0.0.1", "127.0.0.1", "127.0.0.2")] == [
        200, 429, 200,
    ]  # fmt: skip
    assert [(await Call("/livez").to(limited)).status for _ in range(3)] == [200] * 3


async def test_who_has_no_key_takes_nothing_from_those_who_have():
    limited = edge(keys=ring(), buckets=Buckets(rate_per_s=1, burst=1), clock=Clock())
    assert [(await Call(headers={"Authorization": "Bearer k"}).to(limited)).status for _ in range(5)] == [
        401
    ] * 5
    assert (await Call(headers=BEARER).to(limited)).status == 200


def test_buckets_are_bounded_and_the_longest_silent_goes_first():
    buckets = Buckets(rate_per_s=1, burst=1, most=2)
    assert buckets.take("a", 0).allowed
    assert buckets.take("b", 0).allowed
    assert not buckets.take("a", 0).allowed
    assert buckets.take("c", 0).allowed
    assert not buckets.take("a", 0).allowed, "a asked after b, so b was forgotten"
    assert buckets.take("b", 0).allowed


def test_a_clock_that_goes_back_gives_nothing():
    buckets = Buckets(rate_per_s=1, burst=2)
    assert buckets.take("a", 100).allowed
    assert buckets.take("a", 50).allowed
    assert not buckets.take("a", 50).allowed
    with pytest.raises(ValueError, match="above 0"):
        Buckets(rate_per_s=0, burst=1)


# --- bodies --------------------------------------------------------------------------------------------------------------------


async def test_bodies_are_bounded_while_they_come():
    assert (await Call(chunks=[b"x" * 500, b"x" * 500]).to(edge())).body == 1_000
    call = Call(chunks=[b"x" * 500] * 10)
    await call.to(edge())
    assert (call.status, call.problem, call.body["limit"]) == (413, "body-too-large", 1_000)
    assert sum(message["type"] == "http.response.start" for message in call.sent) == 1
    assert call.headers["connection"] == "close"


@pytest.mark.parametrize(
    "path, told",
    [
        ("/v1/search", "ask for less at once"),
        ("/v1/collections/c/documents", "fewer documents"),
        ("/v1/collections/c/documents/delete", "fewer documents"),
        ("/v1/collections/c/files", "fewer or smaller files"),
    ],
)
async def test_a_body_over_the_limit_is_told_what_to_send_less_of(path, told):
    for call in (Call(path, chunks=[b"x" * 2_000]), Call(path, headers={"content-length": "2000"})):
        await call.to(edge())
        assert (call.status, call.problem) == (413, "body-too-large")
        assert told in call.body["remedy"]
        assert "HALFLIFE_MAX_BODY_BYTES" in call.body["remedy"]


async def test_a_sender_that_pauses_is_cut_off():
    call = Call(chunks=[b"x", b"y"])
    call.pause_s = 5
    await call.to(edge(most_pause_s=0.05))
    assert (call.status, call.problem) == (408, "body-too-slow")


async def test_a_sender_that_drips_is_cut_off():
    call = Call(chunks=[b"x"] * 900)
    call.pause_s = 0.01
    await call.to(edge(most_pause_s=0.1))
    assert (call.status, call.problem) == (408, "body-too-slow")
    assert len(call._chunks) > 500


async def test_the_frameworks_own_answer_to_a_cut_body_is_not_sent():
    app = FastAPI()

    @app.post("/v1/x")
    async def take(request: Request) -> int:
        return len(await request.body())

    call = await Call(chunks=[b"x" * 900, b"x" * 900]).to(edge(app))
    assert (call.status, call.problem) == (413, "body-too-large")
    assert sum(message["type"] == "http.response.start" for message in call.sent) == 1


# --- how long --------------------------------------------------------------------------------------------------------------------


class Slow:
    """Works until it is let go; notes what became of it."""

    def __init__(self, *, reads: bool) -> None:
        self.reads = reads
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = ""
        self.deadline = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["abandonable"] = self.reads
        self.deadline = scope["state"]["deadline"]
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        self.ended = "finished"
        await hello(scope, receive, send)


@pytest.mark.parametrize("chunks", [None, [b"x", b"y"]], ids=["no body", "a body"])
async def test_work_for_a_caller_who_hangs_up_is_dropped(chunks):
    class Reading(Slow):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            await super().__call__(scope, receive, send)

    work, call = Reading(reads=True), Call(chunks=chunks)
    served = asyncio.create_task(call.to(edge(work)))
    await work.begun.wait()
    call.hang_up.set()
    await asyncio.wait_for(served, 5)
    assert (work.ended, call.sent) == ("cancelled", [])


async def test_a_write_is_finished_though_the_caller_hangs_up():
    work, call = Slow(reads=False), Call(method="POST")
    served = asyncio.create_task(call.to(edge(work)))
    await work.begun.wait()
    call.hang_up.set()
    await asyncio.sleep(0.05)
    assert work.ended == ""
    work.go.set()
    await asyncio.wait_for(served, 5)
    assert work.ended == "finished"


async def test_a_read_past_its_budget_is_ended_with_504():
    work, call = Slow(reads=True), Call(headers={"X-Halflife-Timeout-Ms": "50"})
    await call.to(edge(work, budget_s=10))
    assert (work.ended, call.status, call.problem) == ("cancelled", 504, "deadline-exceeded")


async def test_a_write_past_its_budget_goes_on():
    work, call = Slow(reads=False), Call(headers={"X-Halflife-Timeout-Ms": "50"})
    served = asyncio.create_task(call.to(edge(work, budget_s=0.05)))
    await asyncio.sleep(0.8)
    assert work.ended == ""
    work.go.set()
    await served
    assert call.status == 200


@pytest.mark.parametrize("header, budget_s", [(None, 3.0), ("1500", 1.5), ("60000", 3.0)])
async def test_the_budget_is_the_headers_within_the_services(header, budget_s):
    work, clock = Slow(reads=True), Clock()
    work.go.set()
    headers = {} if header is None else {"X-Halflife-Timeout-Ms": header}
    await Call(headers=headers).to(edge(work, budget_s=3.0, clock=clock))
    assert work.deadline == clock.now + budget_s


@pytest.mark.parametrize("header", ["", "0", "49", "-1", "1.5", "1e3", "soon", "9" * 400, "٣٠٠"])
async def test_a_budget_that_is_none_is_refused(header):
    call = await Call(headers={"X-Halflife-Timeout-Ms": header}).to(edge())
    assert (call.status, call.body["field"]) == (422, "X-Halflife-Timeout-Ms")


async def test_an_answer_that_has_begun_is_not_cut(forward):
    app = FastAPI()

    @app.get("/v1/x")
    async def stream(request: Request) -> StreamingResponse:
        request.state.abandonable = True

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b"1"
                forward(100)
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    call = await Call(method="GET", headers={"X-Halflife-Timeout-Ms": "60000"}).to(edge(app, budget_s=60))
    assert (call.status, call.body) == (200, 11_111_111)


async def test_who_is_cancelled_takes_the_work_along():
    work, call = Slow(reads=False), Call()
    served = asyncio.create_task(call.to(edge(work)))
    await work.begun.wait()
    served.cancel()
    with pytest.raises(asyncio.CancelledError):
        await served
    assert work.ended == "cancelled"


@pytest.mark.parametrize("reads", [False, True], ids=["a write", "a read"])
async def test_what_cannot_be_finished_before_the_service_ends_is_told_so(reads):
    ending = asyncio.Event()
    work, call = Slow(reads=reads), Call()
    guarded = edge(work, ending=ending)
    served = asyncio.create_task(call.to(guarded))
    await work.begun.wait()
    ending.set()
    await asyncio.wait_for(served, 5)
    assert (call.status, call.problem, call.headers["retry-after"]) == (503, "service-ending", "2")
    assert "what was stored of it stays stored" in call.body["remedy"]
    assert (work.ended, guarded.load) == ("cancelled", (0, 0, 0))


async def test_a_body_that_still_arrives_when_the_service_ends_is_not_waited_for():
    ending, call = asyncio.Event(), Call(chunks=[b"x", b"y"])
    call.pause_s = 60
    served = asyncio.create_task(call.to(edge(ending=ending)))
    await asyncio.sleep(0.05)
    ending.set()
    await asyncio.wait_for(served, 5)
    assert (call.status, call.problem) == (503, "service-ending")


async def test_the_server_tells_what_it_cannot_finish_before_it_cuts_it_off(caplog, monkeypatch):
    monkeypatch.setattr(serving, "_ANSWER_WITHIN_S", 0.1)
    app = FastAPI()
    app.state.ending = asyncio.Event()
    begun = asyncio.Event()

    @app.post("/v1/x")
    async def store() -> None:
        begun.set()
        await asyncio.Event().wait()

    guard = Guard(keys=lambda: None, now_ms=lambda: 0)
    app.add_middleware(
        Edge,
        max_body_bytes=1_000,
        max_concurrent=4,
        new_id=lambda: "id",
        guard=guard,
        ending=app.state.ending,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=30)
    server = serving._draining(config, app, 0, serving._Start())
    running = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
    await begun.wait()
    server.should_exit = True
    told = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    await asyncio.wait_for(running, 20)
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"problem+json" in told
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_load_is_shed_and_places_are_given_back():
    work, guarded = Slow(reads=True), edge(max_concurrent=1)
    guarded._app = work
    first = Call()
    served = asyncio.create_task(first.to(guarded))
    await work.begun.wait()
    shed = await Call().to(guarded)
    assert (shed.status, shed.problem, shed.headers["retry-after"]) == (503, "overloaded", "1")
    first.hang_up.set()
    await served
    work.go.set()
    assert (await Call().to(guarded)).status == 200


async def test_a_body_on_its_way_in_takes_nobodys_place():
    guarded = edge(max_concurrent=1, max_body_bytes=100)
    slow = [Call(chunks=[b"x", b"y"]) for _ in range(6)]
    for call in slow:
        call.pause_s = 0.3
    served = [asyncio.create_task(call.to(guarded)) for call in slow]
    await asyncio.sleep(0.05)
    assert (await Call(chunks=[b"whole"]).to(guarded)).status == 200
    assert (await Call(method="GET").to(guarded)).status == 200
    await asyncio.gather(*served)
    assert {call.status for call in slow} <= {200, 503}
    assert guarded.load == (0, 0, 0)


class Aside:
    """Waits aside until it is let go, then answers."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended: list[str] = []
        self.waiting = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].endswith("/files"):
            try:
                await scope["state"]["aside"](self.wait())
            except HalflifeError as error:
                self.ended.append(error.code)
                raise
        await hello(scope, receive, send)

    async def wait(self) -> None:
        self.waiting += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        finally:
            self.waiting -= 1

    async def until(self, waiting: int) -> None:
        async with asyncio.timeout(5):
            while self.waiting != waiting:  # noqa: ASYNC110 - a few turns of the loop
                await asyncio.sleep(0)


FILES, DOCUMENTS = "/v1/collections/c/files", "/v1/collections/c/documents"


async def test_who_waits_aside_holds_no_place_and_takes_one_afterwards():
    work = Aside()
    guarded = edge(work, max_concurrent=4)  # three of them writes
    uploads = [Call(FILES) for _ in range(3)]
    served = []
    for number, call in enumerate(uploads):
        served.append(asyncio.create_task(call.to(guarded)))
        await work.until(number + 1)
    assert guarded.load == (0, 3, 0)
    assert (await Call(DOCUMENTS).to(guarded)).status == 200
    work.go.set()
    await asyncio.gather(*served)
    assert [call.status for call in uploads] == [200, 200, 200]
    assert guarded.load == (0, 0, 0)


async def test_who_waited_aside_is_refused_where_no_place_is_free_then():
    work, slow = Aside(), Slow(reads=False)

    async def both(scope: Any, receive: Any, send: Any) -> None:
        await (work if scope["path"] == FILES else slow)(scope, receive, send)

    guarded = edge(install(both), max_concurrent=1)
    upload, other = Call(FILES), Call(DOCUMENTS)
    served = [asyncio.create_task(upload.to(guarded))]
    await work.until(1)
    served.append(asyncio.create_task(other.to(guarded)))
    await slow.begun.wait()
    work.go.set()
    await asyncio.wait_for(served[0], 5)
    assert (upload.status, upload.problem) == (503, "overloaded")
    assert upload.scope["state"]["refused"] == "overloaded"
    slow.go.set()
    await asyncio.wait_for(served[1], 5)
    assert other.status == 200
    assert guarded.load == (0, 0, 0)


async def test_what_waits_aside_is_dropped_when_the_caller_hangs_up():
    work = Aside()
    guarded, call = edge(install(work), max_concurrent=1), Call(FILES)
    served = asyncio.create_task(call.to(guarded))
    await work.until(1)
    call.hang_up.set()
    await asyncio.wait_for(served, 5)
    assert work.ended == ["cancelled", "caller-gone"]
    assert guarded.load == (0, 0, 0)


def install(app: Callable[..., Awaitable[None]]) -> FastAPI:
    """Return the application with the service's answers to failures around it."""
    made = FastAPI(redirect_slashes=False)
    made.mount("/", app)
    install_handlers(made)
    return made


async def test_senders_and_their_bytes_are_bounded():
    guarded = edge(max_concurrent=1, max_body_bytes=100)
    slow = [Call(chunks=[b"x" * 90, b"y"]) for _ in range(17)]
    served = []
    for call in slow:
        served.append(asyncio.create_task(call.to(guarded)))
        await asyncio.sleep(0)
        call.pause_s = 0.2
    await asyncio.gather(*served)
    told = [call.problem if call.status != 200 else "" for call in slow]
    assert told.count("overloaded") >= 9, "eight senders are the most, and 400 bytes four bodies"
    assert guarded.load == (0, 0, 0)


@pytest.mark.parametrize("most, answered", [(None, 4), (100, 1), (1000, 6)])
async def test_the_bytes_of_all_bodies_are_bounded_until_they_are_answered(most, answered):
    go = asyncio.Event()

    async def holding(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = edge(max_concurrent=10, max_body_bytes=100, max_held_bytes=most)
    guarded._app = holding
    # They come bit by bit and at the same time; those that fit are not refused for the others.
    calls = [Call(method="PUT", chunks=[b"x" * 30] * 3) for _ in range(6)]
    served = [asyncio.create_task(call.to(guarded)) for call in calls]
    for _ in range(200):
        if guarded.load == (answered, 0, answered * 90):
            break
        await asyncio.sleep(0.01)
    assert guarded.load == (answered, 0, answered * 90)
    go.set()
    await asyncio.gather(*served)
    assert sorted(call.status for call in calls) == [200] * answered + [503] * (6 - answered)
    assert guarded.load == (0, 0, 0)


async def test_a_body_that_comes_when_all_places_are_taken_is_refused():
    work, guarded = Slow(reads=True), edge(max_concurrent=1)

    async def either(scope: Any, receive: Any, send: Any) -> None:
        await (work if scope["path"] == "/slow" else hello)(scope, receive, send)

    guarded._app = either
    late = Call(chunks=[b"x", b"y"])
    late.pause_s = 0.05
    served = asyncio.create_task(late.to(guarded))
    await asyncio.sleep(0.01)
    first = Call("/slow", method="GET")
    holding = asyncio.create_task(first.to(guarded))
    await served
    assert (late.status, late.problem) == (503, "overloaded")
    work.go.set()
    await holding
    assert guarded.load == (0, 0, 0)


async def test_the_budget_begins_when_the_body_is_whole():
    class Reading(Slow):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            scope["state"]["abandonable"] = True
            while (await receive())["more_body"]:
                pass
            self.deadline = scope["state"]["deadline"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"1"})

    work = Reading(reads=True)
    call = Call(chunks=[b"x", b"y", b"z"], headers={"X-Halflife-Timeout-Ms": "50"})
    call.pause_s = 0.3
    await call.to(edge(work))
    assert call.status == 200


# --- heads ---------------------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(app: Any, **more: Any) -> AsyncIterator[int]:
    """Serve the application until the block ends; gives the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    async with served_on(listener, app, **more):
        yield listener.getsockname()[1]


@asynccontextmanager
async def served_on(listener: socket.socket, app: Any, **more: Any) -> AsyncIterator[uvicorn.Server]:
    """Serve the application on a socket until the block ends, and close that."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **more))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - uvicorn tells it by a flag
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving
        listener.close()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A served application whose patience with heads is short."""
    async with served(hello, log_level="critical", http=impatient(0.3), timeout_keep_alive=30) as port:
        yield port


REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nab"


@pytest.mark.parametrize("first", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nhost: x\r\n", REQUEST + b"POST /"])
async def test_a_head_that_does_not_end_is_not_waited_for(port, first):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    # The end of the stream is what is waited for here: uvicorn alone would wait for ever.
    answered = await asyncio.wait_for(reader.read(), 20)
    assert answered.count(b"HTTP/1.1 200") == first.count(REQUEST)
    writer.close()
    await writer.wait_closed()


async def test_a_connection_between_two_requests_is_kept(forward):
    async with served(hello, log_level="critical", http=impatient(300), timeout_keep_alive=3000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST[:20])
            await asyncio.sleep(0.1)
            writer.write(REQUEST[20:])
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 20)).startswith(b"HTTP/1.1 200")
            await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 20)
            forward(600)
            await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body, as a key that is not known is answered."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


AFTER_A_REFUSAL = {
    "a body that never ends": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n", b"a", b""),
    "a body that ends late": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"a", b"b"),
    "a late end, and half a head": (
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n", b"a", b"bPOST /",
    ),
    "chunks that go wrong": (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n", b"zz\r\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("sent", AFTER_A_REFUSAL.values(), ids=AFTER_A_REFUSAL.keys())
async def test_what_comes_after_a_refusal_is_not_waited_for_without_end(sent, caplog):
    async with served(refuse, log_config=None, http=impatient(2.0), timeout_keep_alive=1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in sent:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.05)
        answered = await asyncio.wait_for(reader.read(), 20)
        assert answered.count(b"HTTP/1.1 401") == 1
        writer.close()
        await writer.wait_closed()
    assert [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info] == []


async def test_a_connection_is_kept_where_a_refused_body_still_came(forward):
    async with served(refuse, log_level="critical", http=impatient(300), timeout_keep_alive=3000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(REQUEST[:-2])
            assert (await asyncio.wait_for(reader.readuntil(b"no"), 20)).startswith(b"HTTP/1.1 401")
            writer.write(REQUEST[-2:])
            await asyncio.sleep(0.05)
            forward(600)
            await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()


PIECE = b"x" * 2**20


class Much:
    """Answers with so many MiB, in one piece or in several, and notes when that is over."""

    def __init__(self, pieces: int, *, close: bool = False) -> None:
        self.over = asyncio.Event()
        self._pieces = pieces
        self._headers = [(b"connection", b"close")] if close else []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            for _ in range(self._pieces):
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.over.set()


def unread(port: int) -> socket.socket:
    """Ask for an answer, with little room for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    return sock


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("pieces", [1, 16])
async def test_an_answer_that_nobody_takes_is_given_up(pieces, close):
    app = Much(pieces, close=close)
    listener = socket.create_server(("127.0.0.1", 0))
    # So that the system takes little of it either.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    more: Any = {"log_level": "critical", "http": impatient(0.3), "timeout_keep_alive": 1}
    async with served_on(listener, app, **more) as server:
        with unread(listener.getsockname()[1]):
            await asyncio.wait_for(app.over.wait(), 20)
            async with asyncio.timeout(20):
                while server.server_state.connections:  # noqa: ASYNC110 - nor does it tell this otherwise
                    await asyncio.sleep(0.01)


async def test_an_answer_that_is_taken_slowly_is_given_whole():
    app = Much(20)
    async with served(app, log_level="critical", http=impatient(3.0)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        taken = 0
        while piece := await asyncio.wait_for(reader.read(2**18), 20):
            taken += piece.count(b"x")
            await asyncio.sleep(0.05)
        assert taken == 20 * len(PIECE)
        writer.close()
        await writer.wait_closed()


BROKEN_OFF = {
    "a chunk of no length": b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\nzz\r\n",
    "a negative chunk": b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    "half a body": b"content-length: 9\r\n\r\nab",
    "half a chunked body": b"transfer-encoding: chunked\r\n\r\n9\r\nab",
}


@pytest.mark.parametrize("rest", BROKEN_OFF.values(), ids=BROKEN_OFF.keys())
async def test_a_caller_who_breaks_off_costs_a_line_of_the_log_and_no_traceback(rest, caplog):
    app = FastAPI()
    ended = asyncio.Event()

    @app.post("/v1/x")
    async def take(request: Request) -> int:
        return len(await request.body())

    install_handlers(app)
    counted = Metering(edge(app))

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        try:
            await counted(scope, receive, send)
        finally:
            ended.set()

    caplog.set_level("INFO", "halflife.access")
    async with served(whole, log_config=None) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/x HTTP/1.1\r\nhost: 127.0.0.1\r\n" + rest)
        await writer.drain()
        writer.close()
        await asyncio.wait_for(ended.wait(), 20)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR" or r.exc_info] == []
    [line] = [r for r in caplog.records if r.name == "halflife.access"]
    assert line.getMessage().startswith("POST /v1/x 499 ")


# --- how much ----------------------------------------------------------------------------------------------------------------------

SMALL = Limits(query_chars=10, top_k=5, window=100, filter_depth=2, filter_values=3, queries=2, documents=2)
OVER: dict[str, tuple[dict[str, Any], str, str]] = {
    "query": ({"query": "x" * 11}, "query", "limit-exceeded"),
    "a route's query": ({"routes": [{"kind": "text", "query": "x" * 11}]}, "routes[0].query", "limit-exceeded"),
    "top_k": ({"top_k": 6}, "top_k", "limit-exceeded"),
    "window": ({"fusion": {"window": 101}}, "fusion.window", "limit-exceeded"),
    "depth": ({"filter": {"not": {"not": {"lang": "en"}}}}, "filter.not.not", "limit-exceeded"),
    "values": ({"filter": {"lang": ["a", "b", "c", "d"]}}, "filter.lang", "limit-exceeded"),
    "values in all": ({"filter": {"lang": ["a", "b"], "source": ["c", "d"]}}, "filter.source", "limit-exceeded"),
    "a route's filter": (
        {"routes": [{"kind": "text", "filter": {"lang": list("abcd")}}]}, "routes[0].filter.lang", "limit-exceeded",
    ),
    "a query in a filter": ({"filter": {"bool": {"must": []}}}, "filter.bool", "invalid-request"),
}  # fmt: skip


@pytest.mark.parametrize("name", OVER)
def test_each_limit_has_its_own_error(name):
    from app.errors import InvalidRequest

    change, field, code = OVER[name]
    with pytest.raises(InvalidRequest) as refused:
        SMALL.check_search(Search.model_validate({"collection": "c", "query": "x", "top_k": 5, **change}))
    assert (refused.value.field, refused.value.code, refused.value.status) == (field, code, 422)
    assert refused.value.remedy


def test_a_page_whose_length_is_left_open_is_within_every_limit():
    plain: dict[str, Any] = {"collection": "c", "query": "x"}
    assert SMALL.check_search(Search.model_validate(plain)).top_k == 5
    assert SMALL.check_search(Search.model_validate({**plain, "fusion": {"window": 3}})).top_k == 3
    assert SMALL.check_search(Search.model_validate({**plain, "fusion": {"window": 8}})).top_k == 5
    assert Limits().check_search(Search.model_validate(plain)).top_k == 10


def test_what_is_within_every_limit_passes():
    SMALL.check_search(Search.model_validate({
        "collection": "c", "query": "x" * 10, "top_k": 5, "fusion": {"window": 100},
        "filter": {"not": {"price": {"gte": 1, "lt": 2}}},
    }))  # fmt: skip
    SMALL.check_queries([1, 2])
    SMALL.check_items([1, 2])
    from app.errors import LimitExceeded

    with pytest.raises(LimitExceeded, match="`queries`: 3"):
        SMALL.check_queries([1, 2, 3])
    with pytest.raises(LimitExceeded, match="`ids`: 3"):
        SMALL.check_items([1, 2, 3], field="ids")
