"""The local embedding server: as a client meets it over HTTP, in what order it works, and how its process ends."""

import asyncio
import base64
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import openai
import pytest

from scripts import e5, embedder

if importlib.util.find_spec(e5.WEIGHTS_PACKAGE) is None:  # not imported: its engine must not be loaded here
    pytest.skip("the packaged weights are not installed here", allow_module_level=True)

ROOT = Path(embedder.__file__).resolve().parent.parent
MODEL = "multilingual-e5-small"
LONG = "The committee met again in the spring and put off its decision until the new figures arrived. " * 30


class Running(NamedTuple):
    """A server process and its address, without path."""

    process: subprocess.Popen[str]
    url: str


@contextlib.contextmanager
def started(cache_dir: Path, *options: str) -> Iterator[Running]:
    """Run the server on a free port until the block ends; it ends with this process in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.embedder", "--port", "0", "--end-with-stdin", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HALFLIFE_CACHE": str(cache_dir)},
    )
    try:
        assert process.stdout is not None
        yield Running(process, address_in(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


def address_in(line: str) -> str:
    """Read the server's address off the line it prints when it is ready."""
    word = next((word for word in line.split() if word.startswith("http://")), None)
    assert word is not None, f"no address in {line!r}: did the server fail to start?"
    return word.removesuffix("/v1")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def url(cache_dir: Path) -> Iterator[str]:
    with started(cache_dir, "--threads", "2") as server:
        yield server.url


def post(url: str, body: Any, path: str = "/v1/embeddings") -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx2.post(url + path, content=content, timeout=120)


def vectors_of(response: httpx2.Response) -> np.ndarray:
    assert response.status_code == 200, response.text
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


def waiting(url: str) -> int:
    """Ask how many tokens wait in the queue."""
    tokens: int = httpx2.get(url + "/health", timeout=60).json()["waiting_tokens"]
    return tokens


def until(true: Callable[[], bool]) -> None:
    """Wait until something holds; fail after two minutes."""
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "waited for two minutes in vain"
        time.sleep(0.005)


# -- what it answers ---------------------------------------------------------------------------------------------


def test_answers_in_openais_form_with_the_models_vectors(url, cache_dir):
    texts = ["query: how much leave?", "passage: 年假最多可以结转五天。", "passage: " + LONG, "x"]
    answer = post(url, {"input": texts, "model": MODEL, "user": "someone"})
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert {key: body[key] for key in ("object", "model", "truncated")} == {
        "object": "list",
        "model": MODEL,
        "truncated": [2],
    }
    assert answer.headers["x-truncated-inputs"] == "1"
    assert [(item["object"], item["index"]) for item in body["data"]] == [("embedding", n) for n in range(4)]
    wanted = e5.E5(cache_dir=cache_dir).embed(texts)
    assert np.array_equal(vectors_of(answer), wanted.vectors)  # nine digits are enough for every bit
    assert body["usage"] == {"prompt_tokens": sum(wanted.tokens), "total_tokens": sum(wanted.tokens)}


def test_base64_holds_the_same_vectors_little_endian(url):
    body = {"input": ["a", "b"], "model": MODEL}
    plain = vectors_of(post(url, body))
    packed = post(url, {**body, "encoding_format": "base64"}).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in packed]
    assert np.array_equal(plain, np.stack(decoded))


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openais_client_reads_it(form, url):
    options: dict[str, Any] = {} if form is None else {"encoding_format": form}
    with openai.OpenAI(base_url=url + "/v1", api_key="unused") as client:
        answer = client.embeddings.create(input=["a", "b"], model=MODEL, dimensions=384, **options)
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="this server has 'multilingual-e5-small'"):
            client.embeddings.create(input="a", model="text-embedding-3-small")
    if form != "base64":  # asked for by the caller, the client leaves it as it came
        assert len(answer.data[1].embedding) == 384
    assert answer.usage.prompt_tokens == 6


def test_a_single_string_is_one_text(url):
    one = vectors_of(post(url, {"input": "passage: x", "model": MODEL}))
    assert np.array_equal(one, vectors_of(post(url, {"input": ["passage: x"], "model": MODEL})))


def test_counts_tokens_and_tells_offsets(url):
    answer = post(url, {"input": ["two words", ""], "offsets": True}, "/tokenize").json()
    assert answer == {
        "model": MODEL,
        "max_tokens": 512,
        "counts": [4, 2],
        "offsets": [[[0, 3], [3, 9]], []],
    }
    assert post(url, {"input": LONG, "model": MODEL}, "/v1/tokenize").json()["counts"][0] > 512
    refused = post(url, {"input": "x" * 200_001, "offsets": True}, "/tokenize")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


def test_health_says_what_runs(url):
    health = httpx2.get(url + "/health").json()
    assert health["status"] == "ok"
    assert (health["model"], health["dimensions"], health["waiting_tokens"]) == (MODEL, 384, 0)
    assert health["kernel"] in ("int8", "q4")


GOOD: dict[str, Any] = {"input": "x", "model": MODEL}

REFUSED: dict[str, tuple[Any, int, str | None]] = {
    "not json": (b"[", 400, None),
    "empty body": (b"", 400, None),
    "not utf-8": (b'{"input": "\xff"}', 400, None),
    "a list": (b"[]", 400, None),
    "a number": (b"1", 400, None),
    "nested deeply": (b"[" * 100_000, 400, None),
    "nested deeply in input": (b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    "NaN": (b'{"input": NaN}', 400, None),
    "Infinity in a list": (b'{"input": ["a", -Infinity]}', 400, None),
    "huge integer": (b'{"input": ' + b"9" * 10_000 + b"}", 400, None),
    "no input": ({"model": MODEL}, 400, "input"),
    "null input": ({**GOOD, "input": None}, 400, "input"),
    "number input": ({**GOOD, "input": 1}, 400, "input"),
    "object input": ({**GOOD, "input": {"a": 1}}, 400, "input"),
    "empty string": ({**GOOD, "input": ""}, 400, "input[0]"),
    "empty list": ({**GOOD, "input": []}, 400, "input"),
    "one empty": ({**GOOD, "input": ["a", ""]}, 400, "input[1]"),
    "one blank": ({**GOOD, "input": ["a", "b", " \n\u200b"]}, 400, "input[2]"),
    "only NUL": ({**GOOD, "input": "\0"}, 400, "input[0]"),
    "only a surrogate": (b'{"input": "\\ud800", "model": "multilingual-e5-small"}', 400, "input[0]"),
    "one null": ({**GOOD, "input": ["a", None]}, 400, "input[1]"),
    "one number": ({**GOOD, "input": ["a", 1.5]}, 400, "input[1]"),
    "token ids": ({**GOOD, "input": [1, 2, 3]}, 400, "input"),
    "lists of token ids": ({**GOOD, "input": [[1], [2]]}, 400, "input"),
    "too many": ({**GOOD, "input": ["a"] * 257}, 400, "input"),
    "no model": ({"input": "x"}, 400, "model"),
    "number model": ({**GOOD, "model": 5}, 400, "model"),
    "other model": ({**GOOD, "model": "bge-m3"}, 404, "model"),
    "surrogate model": (b'{"input": "x", "model": "\\udfff"}', 404, "model"),
    "unknown format": ({**GOOD, "encoding_format": "int8"}, 400, "encoding_format"),
    "empty format": ({**GOOD, "encoding_format": ""}, 400, "encoding_format"),
    "list format": ({**GOOD, "encoding_format": ["float"]}, 400, "encoding_format"),
    "fewer dimensions": ({**GOOD, "dimensions": 256}, 400, "dimensions"),
    "text dimensions": ({**GOOD, "dimensions": "384"}, 400, "dimensions"),
    "true dimensions": ({**GOOD, "dimensions": True}, 400, "dimensions"),
    "infinite dimensions": (
        b'{"input": "x", "model": "multilingual-e5-small", "dimensions": 1e999}',
        400,
        "dimensions",
    ),
    "misspelt": ({**GOOD, "encodingformat": "float"}, 400, "encodingformat"),
    "surrogate name": (b'{"input": "x", "model": "multilingual-e5-small", "\\ud800": 1}', 400, "?"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_naming_the_field(case, url):
    body, status, param = REFUSED[case]
    answer = post(url, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(answer.content) < 2000  # nothing large is echoed


@pytest.mark.parametrize(
    "body",
    [
        b"[",
        {"input": 5},
        {"input": [1]},
        {"input": "x", "offsets": 1},
        {"input": "x", "model": "y"},
        {"x": 1},
    ],
    ids=["not json", "number", "ids", "offsets", "model", "unknown"],
)
def test_bad_tokenize_requests_are_refused(body, url):
    answer = post(url, body, "/tokenize")
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "a\0b",
        "\ufdfa" * 9,
        "\U0010ffff" * 50,
        "\u202e abc",
        "x\u0301" * 5000,
        "<s></s><pad>",
        "'; DROP TABLE x",
        "a" * 1_000_000,
    ],
    ids=["nul", "u+fdfa", "noncharacters", "bidi", "marks", "specials", "sql", "a megabyte"],
)
def test_hostile_texts_get_a_vector(text, url):
    (vector,) = vectors_of(post(url, {"input": text, "model": MODEL}))
    assert np.isfinite(vector).all()
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-5


def test_surrogates_inside_text_are_read_as_spaces(url):
    lone = post(url, b'{"input": "a\\ud800b", "model": "multilingual-e5-small"}')
    assert np.array_equal(vectors_of(lone), vectors_of(post(url, {"input": "a b", "model": MODEL})))


def test_a_body_past_the_limit_is_refused_and_so_is_one_that_lies(url):
    large = b" " * (8 * 1024 * 1024 + 1)
    assert post(url, large).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * 1024 * 1024

    with httpx2.Client(base_url=url, timeout=60) as client:
        streamed = client.post("/v1/embeddings", content=pieces())
    assert streamed.status_code == 413
    assert streamed.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/v1/embeddings", 405), ("POST", "/v1/models", 405), ("GET", "/", 404), ("POST", "/v2/x", 404)],
)
def test_other_paths_and_methods_say_what_is_there(method, path, status, url):
    answer = httpx2.request(method, url + path)
    assert answer.status_code == status
    assert "POST /v1/embeddings" in answer.json()["error"]["message"]


def test_sixty_four_at_once_get_each_their_own(url):
    texts = [f"query: question number {number} {'about leave ' * (number % 7)}" for number in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(
            pool.map(lambda text: vectors_of(post(url, {"input": text, "model": MODEL}))[0], texts)
        )
    assert np.array_equal(np.stack(answers), vectors_of(post(url, {"input": texts, "model": MODEL})))


def test_a_short_query_is_answered_while_a_big_batch_runs(url):
    order = order_of_answers(url, 20)
    if order != ["short", "short", "big"]:
        # The machine may have paused for as long as that takes.
        order = order_of_answers(url, 100)
    assert order == ["short", "short", "big"]


def order_of_answers(url: str, texts: int) -> list[str]:
    """Send a batch of so many texts, and two short queries while it runs; return which were answered one after the other."""
    order: list[str] = []

    def big() -> None:
        vectors_of(post(url, {"input": [f"{number} {LONG}" for number in range(texts)], "model": MODEL}))
        order.append("big")

    thread = threading.Thread(target=big)
    thread.start()
    until(lambda: bool(order) or waiting(url) > 0)
    for _ in range(2):
        vectors_of(post(url, {"input": "query: short", "model": MODEL}))
        order.append("short")
    thread.join()
    return order


def test_what_a_vanished_client_asked_for_is_dropped(url):
    body = json.dumps({"input": [f"{number} {LONG}" for number in range(200)], "model": MODEL}).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        until(lambda: waiting(url) > 50_000)
    left = [waiting(url)]
    while left[-1]:
        left.append(waiting(url))
    # done rather than dropped, it would have been seen shrinking slice by slice to its end
    assert min([tokens for tokens in left if tokens], default=100_000) > 10_000


def test_a_full_queue_answers_503_and_when_to_come_back(cache_dir):
    limits = embedder.Limits(queue_tokens=1000, request_tokens=3000)
    model = GatedModel()
    tokenizer = e5.E5(cache_dir=cache_dir).tokenizer
    app = embedder.create_app(tokenizer, model, workers=1, limits=limits, about={})

    async def scenario() -> None:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            ask = {"input": [LONG] * 3, "model": MODEL}
            first = asyncio.create_task(client.post("/v1/embeddings", json=ask))
            await asyncio.to_thread(until, lambda: bool(model.seen))
            second = await client.post("/v1/embeddings", json=ask)
            assert second.status_code == 503
            assert second.json()["error"]["code"] == "overloaded"
            assert 1 <= int(second.headers["retry-after"]) <= 60
            too_much = await client.post("/v1/embeddings", json={"input": [LONG] * 6, "model": MODEL})
            assert (too_much.status_code, too_much.json()["error"]["code"]) == (400, "max_tokens_per_request")
            short = asyncio.create_task(client.post("/v1/embeddings", json={**GOOD}))
            model.open()
            assert (await first).status_code == 200
            assert (await short).status_code == 200

    asyncio.run(scenario())
    app.state.service.stop()


# -- in what order it works --------------------------------------------------------------------------------------


class GatedModel:
    """Stands in for the model: notes each slice as the first ids of its texts, and waits to be let through."""

    def __init__(self, fail_on: int | None = None) -> None:
        self.seen: list[list[int]] = []
        self._fail_on = fail_on
        self._gate = threading.Semaphore(0)

    def open(self, slices: int = 1000) -> None:
        """Let so many slices through."""
        for _ in range(slices):
            self._gate.release()

    def run(self, texts: Sequence[e5.Ids]) -> e5.Floats:
        self.seen.append([int(ids[0]) for ids in texts])
        assert self._gate.acquire(timeout=60)
        if self._fail_on is not None and any(ids[0] == self._fail_on for ids in texts):
            raise RuntimeError("broken on purpose")
        return np.stack([np.full(e5.DIMENSIONS, ids[0], np.float32) for ids in texts])


@pytest.fixture
def scheduled() -> Iterator[Callable[..., tuple[embedder.Scheduler, GatedModel]]]:
    """Make schedulers with one worker, already busy with a slice called [0]; they are closed at the end."""
    made: list[tuple[embedder.Scheduler, GatedModel]] = []

    def make(*, fail_on: int | None = None, **limits: int) -> tuple[embedder.Scheduler, GatedModel]:
        model = GatedModel(fail_on)
        scheduler = embedder.Scheduler(model, workers=1, limits=embedder.Limits(**limits))
        made.append((scheduler, model))
        scheduler.submit([ids_of(0, 8)])
        until(lambda: model.seen == [[0]])
        return scheduler, model

    yield make
    for scheduler, model in made:
        scheduler.close()
        model.open()
        scheduler.join(60)


def ids_of(name: int, length: int) -> e5.Ids:
    return np.full(length, name, np.int64)


def test_short_work_overtakes_the_slices_of_long_work(scheduled):
    scheduler, model = scheduled()
    long = scheduler.submit([ids_of(name, 400) for name in (1, 2, 3)])
    model.open(2)
    until(lambda: len(model.seen) == 3)
    short = scheduler.submit([ids_of(9, 12)])
    model.open()
    assert short.result.result(60)[0, 0] == 9
    assert long.result.result(60)[:, 0].tolist() == [1, 2, 3]
    assert model.seen == [[0], [1], [2], [9], [3]]


def test_long_jobs_take_turns(scheduled):
    scheduler, model = scheduled()
    jobs = [scheduler.submit([ids_of(first + step, 400) for step in range(2)]) for first in (10, 20)]
    model.open()
    for job in jobs:
        job.result.result(60)
    assert model.seen == [[0], [10], [20], [11], [21]]


def test_long_work_is_not_starved_by_short_work(scheduled):
    scheduler, model = scheduled()
    # 20 short jobs of different lengths, so that none shares a slice
    shorts = [
        scheduler.submit([ids_of(100 + step, 4 + 4 * step if step < 7 else 8 * step)]) for step in range(15)
    ]
    long = scheduler.submit([ids_of(1, 400)])
    model.open()
    for job in (*shorts, long):
        job.result.result(60)
    assert model.seen.index([1]) == embedder.Scheduler.SHORT_IN_A_ROW


def test_short_jobs_of_one_length_share_a_slice(scheduled):
    scheduler, model = scheduled()
    jobs = [scheduler.submit([ids_of(name, length)]) for name, length in ((1, 9), (2, 30), (3, 12), (4, 10))]
    model.open()
    assert [job.result.result(60)[0, 0] for job in jobs] == [1, 2, 3, 4]
    assert model.seen == [[0], [1, 3, 4], [2]]


def test_results_keep_the_order_of_the_texts(scheduled):
    scheduler, model = scheduled()
    lengths = [40, 8, 300, 9, 41, 8]
    job = scheduler.submit([ids_of(name, length) for name, length in enumerate(lengths, start=1)])
    model.open()
    assert job.result.result(60)[:, 0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_full_queue_refuses_and_takes_again(scheduled):
    scheduler, model = scheduled(queue_tokens=1000)
    first = scheduler.submit([ids_of(1, 400), ids_of(2, 400)])
    with pytest.raises(embedder.Refused, match="800 tokens are waiting") as refused:
        scheduler.submit([ids_of(3, 400)])
    assert refused.value.status == 503
    assert refused.value.retry_after_s is not None
    assert scheduler.waiting_tokens() == 800
    scheduler.submit([ids_of(4, 12)])  # a short one still enters
    model.open()
    first.result.result(60)
    huge = scheduler.submit([ids_of(5, 512)] * 3)  # larger than the limit, but nothing else waits
    assert huge.result.result(60).shape == (3, 384)


def test_cancelled_work_is_not_done(scheduled):
    scheduler, model = scheduled()
    job = scheduler.submit([ids_of(name, 400) for name in (1, 2, 3)])
    model.open(1)
    until(lambda: len(model.seen) == 2)
    scheduler.cancel(job)
    model.open()
    assert scheduler.submit([ids_of(7, 400)]).result.result(60)[0, 0] == 7
    assert model.seen == [[0], [1], [7]]
    assert scheduler.waiting_tokens() == 0


def test_a_failing_slice_fails_its_job_alone(scheduled, caplog):
    scheduler, model = scheduled(fail_on=2)
    bad = scheduler.submit([ids_of(name, 400) for name in (1, 2, 3)])
    good = scheduler.submit([ids_of(7, 400)])
    model.open()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        bad.result.result(60)
    assert good.result.result(60)[0, 0] == 7
    assert [3] not in model.seen
    assert "embedding failed" in caplog.text


def test_closing_fails_what_waits(scheduled):
    scheduler, model = scheduled()
    job = scheduler.submit([ids_of(1, 400)])
    scheduler.close()
    with pytest.raises(embedder.Refused, match="shutting down"):
        job.result.result(60)
    with pytest.raises(embedder.Refused, match="shutting down"):
        scheduler.submit([ids_of(2, 400)])
    model.open()
    scheduler.join(60)
    assert model.seen == [[0]]


# -- how its process ends ----------------------------------------------------------------------------------------


def refuses_connections(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionError:
        return True
    return False


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
def test_sigterm_ends_it_while_it_works_and_waiting_clients_are_told(cache_dir):
    with started(cache_dir) as server, ThreadPoolExecutor(1) as pool:
        ask = {"input": [f"{number} {LONG}" for number in range(200)], "model": MODEL}
        answer = pool.submit(post, server.url, ask)
        until(lambda: waiting(server.url) > 10_000)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert answer.result(60).status_code == 503
        assert answer.result().json()["error"]["code"] == "shutting_down"


def test_it_ends_when_standard_input_closes(cache_dir):
    with started(cache_dir) as server:
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(60) == 0
        server.process.stdin = None


PARENT = """
import os, signal, subprocess, sys
command = [sys.executable, "-m", "scripts.embedder", "--port", "0", "--end-with-stdin"]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_it_ends_when_its_parent_is_killed_hard(cache_dir):
    done = subprocess.run(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HALFLIFE_CACHE": str(cache_dir)},
        check=False,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    url = address_in(done.stdout)
    until(lambda: refuses_connections(url))


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "scripts.embedder", "--port", port],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
