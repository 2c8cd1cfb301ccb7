"""The door to the embedding server, against real servers on loopback: what it sends, takes, refuses and forgives."""

import asyncio
import base64
import inspect
import json
import math
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from app import embedding
from app.dialling import retry_after_s
from app.embedding import (
    Embedded,
    Embedder,
    cut,
    most_tokens,
    read_answer,
    read_vector,
    translate,
)
from app.errors import EmbedderRejected, EmbedderUnavailable, InvalidRequest
from app.settings import Settings
from tests.fakes import EmbeddingServer, FarEnd, Reply, Seen, openai_error, to_base64, vector_of

ROOT = Path(__file__).resolve().parent.parent


@asynccontextmanager
async def embedder_of(server: FarEnd, **options: Any) -> AsyncIterator[Embedder]:
    quick = {
        "api_key": None,
        "model": "m",
        "dims": None,
        "backoff_s": 0.005,
        "timeout_s": 10.0,
        "base_url": server.url + "/v1",
    }
    embedder = Embedder.connect(**{**quick, **options})
    try:
        yield embedder
    finally:
        await embedder.close()


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what a server's own thread will do soon."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen within 10 s")


def assert_embeds(
    embedded: Embedded, texts: list[str], dims: int = 8, *, failed: set[int] | None = None
) -> None:
    """Each text has its own vector, except those that failed."""
    assert set(embedded.errors) == (failed or set())
    assert len(embedded.vectors) == len(texts)
    for index, text in enumerate(texts):
        vector = embedded.vectors[index]
        if index in embedded.errors:
            assert vector is None
        else:
            assert vector is not None
            assert vector.dtype == np.float32
            assert vector.shape == (dims,)
            np.testing.assert_allclose(vector, vector_of(text, dims), rtol=1e-6)


# --- the cases of real faults met elsewhere ------------------------------------------------------------------


class TestEmbeddingClient:
    """Kind embedding-client."""

    async def test_blank_texts_fail_alone_and_are_never_sent(self, server):
        async with embedder_of(server) as embedder:
            embedded = await embedder.embed_documents(["alpha", "", "   \n", "delta"])
        assert_embeds(embedded, ["alpha", "", "", "delta"], failed={1, 2})
        assert all(isinstance(embedded.errors[index], InvalidRequest) for index in (1, 2))
        assert server.batches == [["alpha", "delta"]]

    @pytest.mark.parametrize("texts", [[], [""], ["", "   ", "\0", "\n\t　"]])
    async def test_nothing_is_sent_when_there_is_nothing_to_say(self, server, texts):
        async with embedder_of(server, query_prefix="query: ") as embedder:
            for embedded in (await embedder.embed_queries(texts), await embedder.embed_documents(texts)):
                assert embedded.vectors == [None] * len(texts)
                assert set(embedded.errors) == set(range(len(texts)))
        assert server.requests == []

    async def test_2100_texts_stay_in_order_within_the_batch_limit(self, server):
        texts = [f"text number {n}" for n in range(2100)]
        async with embedder_of(server, max_batch=2048, max_batch_tokens=300_000) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert_embeds(embedded, texts)
        assert sorted(len(batch) for batch in server.batches) == [52, 2048]

    @pytest.mark.parametrize("word", ["word", "a", "x1"])
    async def test_40_texts_of_8000_tokens_stay_within_the_token_limit(self, server, word):
        texts = [f"{n} " + f"{word} " * 7999 for n in range(40)]
        async with embedder_of(server, max_batch=2048, max_batch_tokens=300_000) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert_embeds(embedded, texts)
        assert embedded.truncated == frozenset()
        assert all(sum(len(text.split()) for text in batch) <= 300_000 for batch in server.batches)
        assert len(server.batches) >= 2

    @pytest.mark.parametrize("word", ["word ", "a "])
    async def test_a_text_that_is_too_long_is_cut_and_told(self, server, word):
        texts = [*(f"short {n}" for n in range(5)), word * 9000, *(f"short {n}" for n in range(5, 9))]
        async with embedder_of(server) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert embedded.errors == {}
        assert embedded.truncated == {5}
        sent = next(text for batch in reversed(server.batches) for text in batch if len(text) > 100)
        assert (word * 9000).startswith(sent)
        assert 4000 < len(sent.split()) <= 8192
        texts[5] = sent
        assert_embeds(embedded, texts)

    async def test_a_text_that_is_too_long_fails_alone_where_cutting_is_off(self, server):
        texts = [*(f"short {n}" for n in range(5)), "word " * 9000, *(f"short {n}" for n in range(5, 9))]
        async with embedder_of(server, truncate=False) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert_embeds(embedded, texts, failed={5})
        assert isinstance(embedded.errors[5], EmbedderRejected)
        assert embedded.truncated == frozenset()

    async def test_a_429_is_waited_out_and_only_its_batch_is_sent_again(self, server):
        server.script = [None, openai_error(429, "slow down", retry_after="1")]
        texts = [f"t{n}" for n in range(6)]
        async with embedder_of(server, max_batch=2, concurrency=1) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert_embeds(embedded, texts)
        assert server.batches == [["t0", "t1"], ["t2", "t3"], ["t2", "t3"], ["t4", "t5"]]

    async def test_a_final_failure_lists_exactly_what_failed(self, server):
        server.poison = {"t2": openai_error(429, "slow down")}
        texts = [f"t{n}" for n in range(8)]
        async with embedder_of(server, max_batch=2, concurrency=2, retries=2) as embedder:
            embedded = await embedder.embed_documents(texts)
        assert_embeds(embedded, texts, failed={2, 3})
        assert isinstance(embedded.errors[2], EmbedderUnavailable)
        assert server.batches.count(["t2", "t3"]) == 3
        assert server.batches.count(["t0", "t1"]) == 1

    async def test_base64_is_read_as_little_endian(self):
        vector, little, big = [0.6, 0.8, 0.1], "mpkZP83MTD/NzMw9", "PxmZmj9MzM09zMzN"
        assert to_base64(vector) == little
        assert to_base64(vector, ">") == big
        reply = Reply(body={"data": [{"index": 0, "embedding": little}]})
        with FarEnd(lambda _: reply) as server:
            async with embedder_of(server) as embedder:
                embedded = await embedder.embed_documents(["x"])
        assert embedded.vectors[0] is not None
        np.testing.assert_allclose(embedded.vectors[0], vector, atol=1e-6)
        # What a second reading as big-endian would store without any error, as measured.
        assert np.frombuffer(base64.b64decode(little), dtype=">f4")[1] == pytest.approx(-428443620, rel=1e-6)

    @pytest.mark.parametrize(
        "raw",
        ["not base64!", "mpkZP83MTD/NzM", "AAA=", "", {"float": [1.0]}, 1.5, True, None],
        ids=repr,
    )
    async def test_what_is_neither_list_nor_base64_is_refused(self, raw):
        reply = Reply(body={"data": [{"index": 0, "embedding": raw}]})
        with FarEnd(lambda _: reply) as server:
            async with embedder_of(server) as embedder:
                embedded = await embedder.embed_documents(["x"])
        assert isinstance(embedded.errors[0], EmbedderRejected)


BAD_VECTORS: list[tuple[Any, str]] = [
    ([0, 0, 0], "length zero"),
    ([1e-30, 0, 0], "length zero"),
    ([1e39, 0, 0], "beyond 32-bit"),
    ([10**400, 0, 0], "beyond 32-bit"),
    ([math.nan, 1, 0], "NaN"),
    ([math.inf, 1, 0], "NaN or a number beyond"),
    ([1, None, 0], "not a number"),
    (["1", "0", "0"], "not a number"),
    ([True, 0, 0], "not a number"),
    ([[1, 0, 0]], "not a number"),
    ([], "empty"),
    ([1, 2], "has 2 dims where 3"),
    ([1, 2, 3, 4], "has 4 dims where 3"),
    (None, "null"),
    (to_base64([math.nan, 0, 1]), "NaN"),
    (to_base64([0, 0, 0]), "length zero"),
    (to_base64([1, 2]), "has 2 dims"),
]


class TestVectorValidity:
    """Kind vector-validity."""

    @pytest.mark.parametrize("bad,why", BAD_VECTORS, ids=lambda value: str(value)[:24])
    async def test_a_bad_vector_fails_alone_with_its_reason(self, bad, why):
        reply = Reply(body={"data": [{"index": 0, "embedding": bad}, {"index": 1, "embedding": [1, 2, 3]}]})
        with FarEnd(lambda _: reply) as server:
            async with embedder_of(server, dims=3) as embedder:
                embedded = await embedder.embed_documents(["bad", "ok"])
        assert embedded.vectors[0] is None
        assert isinstance(embedded.errors[0], EmbedderRejected)
        assert why in embedded.errors[0].detail
        assert list(embedded.errors) == [0]
        assert embedded.vectors[1] is not None
        assert embedded.vectors[1].tolist() == [1, 2, 3]
        assert len(server.requests) == 1

    def test_a_vector_cannot_be_changed_by_who_shares_it(self):
        vector = read_vector([1, 2, 3], dims=3)
        with pytest.raises(ValueError, match="read-only"):
            vector[0] = 5


class TestHttpValidation:
    """Kind http-validation: numbers JSON has no words for come in, as a broken server writes them."""

    @pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity", '"nan"'])
    async def test_no_number_that_is_none_gets_through(self, number):
        body = f'{{"data": [{{"index": 0, "embedding": [{number}, 1, 0]}}]}}'.encode()
        with FarEnd(lambda _: Reply(body=body)) as server:
            async with embedder_of(server) as embedder:
                embedded = await embedder.embed_queries(["x"])
        assert isinstance(embedded.errors[0], EmbedderRejected)
        json.dumps(embedded.errors[0].problem(), allow_nan=False)


# --- what is sent --------------------------------------------------------------------------------------------


async def test_prefixes_model_and_dimensions_are_sent(server):
    server.dims = 3
    options = {
        "query_prefix": "query: ",
        "document_prefix": "passage: ",
        "dims": 5,
        "send_dimensions": True,
        "model": "e5",
    }
    async with embedder_of(server, **options, api_key="k-1") as embedder:
        queries = await embedder.embed_queries(["a"])
        documents = await embedder.embed_documents(["a"])
    assert_embeds(queries, ["query: a"], dims=5)
    assert_embeds(documents, ["passage: a"], dims=5)
    body = {"model": "e5", "dimensions": 5, "encoding_format": "base64"}
    assert [seen.body for seen in server.requests] == [
        {**body, "input": ["query: a"]},
        {**body, "input": ["passage: a"]},
    ]
    assert {seen.headers["authorization"] for seen in server.requests} == {"Bearer k-1"}


async def test_without_a_key_none_is_sent_whatever_the_environment_holds(server, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "stranger")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with embedder_of(server) as embedder:
        assert await embedder.check() == 8
    assert "authorization" not in server.requests[0].headers
    assert "stranger" not in str(server.requests[0].headers)


async def test_lone_surrogates_and_nul_are_replaced(server):
    async with embedder_of(server) as embedder:
        embedded = await embedder.embed_documents(["a\ud800b", "c\0d"])
    assert embedded.errors == {}
    assert server.batches == [["a?b", "c d"]]


async def test_equal_texts_are_sent_once(server):
    async with embedder_of(server) as embedder:
        embedded = await embedder.embed_documents(["same", "other", "same"])
    assert_embeds(embedded, ["same", "other", "same"])
    assert server.batches == [["same", "other"]]


@pytest.mark.parametrize("encoding", ["honour", "ignore", "refuse"])
async def test_any_encoding_gives_the_same_vectors(encoding):
    with EmbeddingServer(encoding=encoding, shuffle=True) as server:
        async with embedder_of(server, max_batch=2, concurrency=1) as embedder:
            embedded = await embedder.embed_documents(["a", "b", "c"])
            assert_embeds(embedded, ["a", "b", "c"])
            sent = [seen.body["encoding_format"] for seen in server.requests]
    # A server that refuses base64 is asked for it once.
    assert sent == {"refuse": ["base64", "float", "float"]}.get(encoding, ["base64", "base64"])


async def test_base64_refused_without_naming_it_is_found_out_by_trying():
    def answer(seen):
        if seen.body["encoding_format"] == "base64":
            return Reply(500, b"oops")
        return Reply(body={"data": [{"index": 0, "embedding": [1.0, 0.0]}]})

    with FarEnd(answer) as server:
        async with embedder_of(server) as embedder:
            assert await embedder.check() == 2
            await embedder.embed_queries(["x"])
        assert [seen.body["encoding_format"] for seen in server.requests] == ["base64", "float", "float"]


async def test_truncation_told_by_the_server_is_passed_on():
    with EmbeddingServer(max_input_tokens=3, says_too_long=False) as server:
        async with embedder_of(server) as embedder:
            texts = ["one two", "one two three four", "a b c d", "a"]
            assert (await embedder.embed_documents(texts)).truncated == {1, 2}
            assert (await embedder.embed_queries(texts)).truncated == {1, 2}
            assert (await embedder.embed_queries(texts)).truncated == {1, 2}, "from the cache too"


@pytest.mark.parametrize("told", [None, True, "0", [7, -1, "0", True, None], {"0": 1}])
async def test_a_strange_truncated_is_ignored(told):
    reply = Reply(body={"data": [{"index": 0, "embedding": [1.0]}], "truncated": told})
    with FarEnd(lambda _: reply) as server:
        async with embedder_of(server) as embedder:
            embedded = await embedder.embed_documents(["x"])
    assert embedded.errors == {}
    assert embedded.truncated == frozenset()


# --- refusals and failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_text_fails_alone(server, status):
    texts = [f"t{n}" for n in range(20)]
    server.poison = {"t13": openai_error(status, "I do not like this one")}
    async with embedder_of(server, max_batch=16, concurrency=1) as embedder:
        embedded = await embedder.embed_documents(texts)
    assert_embeds(embedded, texts, failed={13})
    assert isinstance(embedded.errors[13], EmbedderRejected)
    answered = [tuple(batch) for batch in server.batches if "t13" not in batch]
    assert sorted(text for batch in answered for text in batch) == sorted(set(texts) - {"t13"}), "each once"


async def test_a_smaller_batch_limit_of_the_server_is_learned():
    with EmbeddingServer(max_inputs=16) as server:
        texts = [f"t{n}" for n in range(160)]
        async with embedder_of(server, max_batch=64, concurrency=1) as embedder:
            assert_embeds(await embedder.embed_documents(texts), texts)
            refused = sum(len(batch) > 16 for batch in server.batches)
            assert_embeds(await embedder.embed_documents(texts), texts)
            assert sum(len(batch) > 16 for batch in server.batches) == refused, "no refusal the second time"


async def test_a_refusal_of_everything_is_not_tried_text_by_text():
    with FarEnd(lambda _: openai_error(400, "this deployment is disabled")) as server:
        async with embedder_of(server, max_batch=8, concurrency=1) as embedder:
            embedded = await embedder.embed_documents([f"t{n}" for n in range(400)])
        assert len(embedded.errors) == 400
        assert len(server.requests) < 30


@pytest.mark.parametrize(
    "reply,kind,words",
    [
        (openai_error(401, "Incorrect API key provided: s3cret-key"), EmbedderRejected, "API key"),
        (openai_error(403, "no"), EmbedderRejected, "API key"),
        (openai_error(404, "s3cret-key may not use this"), EmbedderRejected, "model's name"),
        (openai_error(400, "no such model", code="model_not_found"), EmbedderRejected, "model's name"),
        (openai_error(400, "not supported", param="dimensions"), EmbedderRejected, "dimensions"),
        (openai_error(429, "pay first", code="insufficient_quota"), EmbedderUnavailable, "quota"),
        (
            Reply(307, b"", {"location": "https://elsewhere.test/v1/embeddings"}),
            EmbedderRejected,
            "elsewhere.test",
        ),
        (Reply(405, b"<html>no</html>"), EmbedderRejected, "base URL"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Reply) else "",
)
async def test_what_no_retry_mends_is_asked_once_and_says_the_remedy(reply, kind, words):
    with FarEnd(lambda _: reply) as server:
        async with embedder_of(server, max_batch=1, concurrency=1, api_key="s3cret-key") as embedder:
            await embedder.embed_documents(["seen before"])
            server.requests.clear()
            embedded = await embedder.embed_documents([f"t{n}" for n in range(50)])
            with pytest.raises(kind) as caught:
                await embedder.check()
    assert len(embedded.errors) == 50
    error = embedded.errors[49]
    assert isinstance(error, kind)
    assert words in (error.remedy or "")
    assert "s3cret" not in f"{error.problem()} {caught.value.problem()}"
    assert f"127.0.0.1:{server.port}" in error.detail
    assert len(server.requests) <= 4


@pytest.mark.parametrize(
    "reply",
    [
        openai_error(500, "boom"),
        Reply(502, b"<html>bad gateway</html>"),
        openai_error(503, "loading", retry_after="0"),
        openai_error(429, "slow", retry_after_ms="5"),
        openai_error(408, "slow"),
        Reply(424, {"error": "inference failed"}),
        Reply(close_after=0),
        Reply(body={"data": [{"index": 0, "embedding": [1.0] * 8}]}, close_after=20),
    ],
    ids=lambda reply: f"{reply.status}-{reply.close_after}",
)
async def test_a_passing_failure_is_tried_again(server, reply):
    server.script = [reply, reply]
    async with embedder_of(server) as embedder:
        embedded = await embedder.embed_queries(["x"])
    assert_embeds(embedded, ["x"])
    # The first failure of a server never heard before may cost one try without base64.
    assert 3 <= len(server.requests) <= 4


async def test_a_server_that_hangs_or_drips_is_given_up_on(server):
    for slow in (
        Reply(hang=True),
        Reply(hang_in_body=True),
        Reply(body={"data": []}, drip_s=0.05),
        Reply(500, b"x" * 99, drip_s=0.05),
    ):
        # Each with a breaker of its own: five such failures would open it.
        async with embedder_of(server, timeout_s=0.2, retries=1) as embedder:
            server.script = [slow, slow]
            embedded = await embedder.embed_queries(["x"])
            assert isinstance(embedded.errors[0], EmbedderUnavailable)
            assert "did not answer in time" in embedded.errors[0].detail
            server.script = []


async def test_a_batch_that_takes_too_long_is_halved():
    with EmbeddingServer() as server:
        honest = server.answer
        server.answer = lambda seen: Reply(hang=True) if len(seen.body["input"]) > 4 else honest(seen)
        texts = [f"t{n}" for n in range(16)]
        async with embedder_of(server, timeout_s=0.3, max_batch=16) as embedder:
            assert_embeds(await embedder.embed_documents(texts), texts)


async def test_no_server_at_all_fails_every_text_soon():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        embedder = Embedder.connect(
            base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1",
            api_key=None,
            model="m",
            dims=None,
            backoff_s=0.001,
            retry_budget_s=2,
        )
        with pytest.raises(EmbedderUnavailable, match="can't be reached"):
            await embedder.check()
        embedded = await embedder.embed_documents([f"t{n}" for n in range(1000)])
        await embedder.close()
    assert len(embedded.errors) == 1000


async def test_an_outage_is_not_hammered(server):
    server.answer = lambda _: openai_error(503, "down")
    async with embedder_of(server, max_batch=1, concurrency=2, retries=2) as embedder:
        embedded = await embedder.embed_documents([f"t{n}" for n in range(500)])
    assert len(embedded.errors) == 500
    assert all(isinstance(error, EmbedderUnavailable) for error in embedded.errors.values())
    assert len(server.requests) <= 8


async def test_a_retry_after_beyond_the_budget_or_the_deadline_is_not_waited_for(server):
    server.answer = lambda _: openai_error(429, "slow", retry_after="40")
    async with embedder_of(server, retry_budget_s=20.0) as embedder:
        beyond_budget = await embedder.embed_documents(["x"])
    async with embedder_of(server, retry_budget_s=100.0) as embedder:
        beyond_deadline = await embedder.embed_queries(["x"], deadline_s=30.0)
    for embedded in (beyond_budget, beyond_deadline):
        assert embedded.errors[0].retry_after_s == 40
    assert len(server.requests) == 2


async def test_a_deadline_keeps_what_was_embedded_by_then(server, forward):
    server.poison = {"t3": Reply(hang=True)}
    async with embedder_of(server, max_batch=1, concurrency=3, timeout_s=1000) as embedder:

        async def left_at(sent: int) -> None:
            await until(lambda: len(server.requests) == sent and embedder.guard.used == 1)
            forward(500)

        asked = asyncio.create_task(embedder.embed_documents([f"t{n}" for n in range(4)], deadline_s=500))
        await left_at(4)
        embedded = await asked
        assert_embeds(embedded, [f"t{n}" for n in range(4)], failed={3})
        assert isinstance(embedded.errors[3], EmbedderUnavailable)
        assert "500 s" in embedded.errors[3].detail
        asked = asyncio.create_task(embedder.embed_queries(["t3", "x"], deadline_s=500))
        await left_at(6)
        assert_embeds(await asked, ["t3", "x"], failed={0})


async def test_a_server_that_answers_nobody_is_given_up(server, forward):
    server.poison = {"stuck": Reply(hang=True)}
    async with embedder_of(server, max_batch=1, concurrency=1, timeout_s=1000) as embedder:
        texts = ["well", "stuck", "never sent"]
        asked = asyncio.create_task(embedder.embed_documents(texts, stall_s=500))
        await until(lambda: len(server.requests) == 2)
        forward(500)
        embedded = await asked
    assert_embeds(embedded, texts, failed={1, 2})
    for error in embedded.errors.values():
        assert isinstance(error, EmbedderUnavailable)
        assert "answered nobody for 500 s" in error.detail
        assert error.retry_after_s is not None


async def test_a_server_that_is_slow_with_each_is_not_given_up(server, forward):
    honest, leave = server.answer, threading.Semaphore(0)

    def answer(seen):
        leave.acquire()
        return honest(seen)

    def asked_for(count: int) -> bool:
        return len(server.requests) == count

    server.answer = answer
    texts = [f"t{n}" for n in range(5)]
    async with embedder_of(server, max_batch=1, concurrency=1, timeout_s=1000) as embedder:
        asked = asyncio.create_task(embedder.embed_documents(texts, stall_s=500))
        for n in range(1, 6):
            await until(partial(asked_for, n))
            forward(300)
            leave.release()
        embedded = await asked
    assert not embedded.errors


async def test_an_answer_to_another_caller_shows_that_the_server_serves(server, forward):
    server.poison = {"stuck": Reply(hang=True)}
    async with embedder_of(server, max_batch=1, concurrency=4, timeout_s=5000) as embedder:
        waiting = asyncio.create_task(embedder.embed_documents(["stuck"], stall_s=500))
        await until(lambda: len(server.requests) == 1)
        for number in range(4):
            forward(300)
            assert not (await embedder.embed_documents([f"other {number}"])).errors
            assert not waiting.done()
        forward(500)
        assert "answered nobody" in (await waiting).errors[0].detail


def test_the_patience_with_a_write_is_no_shorter_than_the_time_of_a_request():
    assert Settings().embedder_stall_s >= Settings().embedding_timeout_s
    assert Settings(embedding_timeout_s=90, embedding_stall_s=90).embedder_stall_s == 90
    with pytest.raises(ValueError, match=r"EMBEDDING_STALL_S \(15\).*EMBEDDING_TIMEOUT_S \(30\)"):
        Settings(embedding_timeout_s=30, embedding_stall_s=15)


async def test_the_patience_with_a_write_leaves_time_for_halves_of_what_took_too_long(server, forward):
    honest = server.answer
    server.answer = lambda seen: Reply(hang=True) if len(seen.body["input"]) > 1 else honest(seen)
    patience = Settings(embedding_timeout_s=300)
    async with embedder_of(server, timeout_s=patience.embedding_timeout_s) as embedder:
        asked = asyncio.create_task(embedder.embed_documents(["a", "b"], stall_s=patience.embedder_stall_s))
        await until(lambda: len(server.requests) == 1)
        forward(300)
        assert_embeds(await asked, ["a", "b"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>log in</html>",
        b"null",
        b"[]",
        b'"text"',
        b"12",
        b"[" * 100_000,
        b"\xff\xfe\xfd",
        b'{"data": null}',
        b'{"data": "x"}',
        b'{"error": {"message": "upstream"}}',
        b'{"data": [null, null]}',
        b'{"data": [[1], [2]]}',
        b'{"data": [{"index": 0, "embedding": [1]}]}',
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 0, "embedding": [1]}]}',
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 2, "embedding": [1]}]}',
        b'{"data": [{"index": -1, "embedding": [1]}, {"index": 0, "embedding": [1]}]}',
        b'{"data": [{"index": "0", "embedding": [1]}, {"index": "1", "embedding": [1]}]}',
        b'{"data": [{"index": true, "embedding": [1]}, {"index": 0, "embedding": [1]}]}',
        b'{"data": [{"embedding": [1]}, {"embedding": [1]}]}',
        b'{"data": [{"index": 0}, {"index": 1}]}',
        b'{"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1]}, {"index": 2, "embedding": [1]}]}',
        b'{"data": [{"index": ' + b"9" * 5000 + b', "embedding": [1]}]}',
    ],
    ids=lambda body: body[:70].decode("latin-1"),
)
async def test_an_answer_of_any_other_shape_is_rejected(body):
    with FarEnd(lambda _: Reply(body=body)) as server:
        async with embedder_of(server) as embedder:
            embedded = await embedder.embed_documents(["a", "b"])
    assert set(embedded.errors) == {0, 1}
    for error in embedded.errors.values():
        assert type(error) is EmbedderRejected
        json.dumps(error.problem()).encode()
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_without_end_is_not_read_to_its_end(status):
    huge = Reply(status, b'{"data": [', filler=200 * 2**20)
    with FarEnd(lambda _: huge) as server:
        async with embedder_of(server, dims=8, retries=0) as embedder:
            embedded = await embedder.embed_documents(["a"])
        assert 0 in embedded.errors
        # Two megabytes may be read; the rest of what went out stands in socket buffers.
        assert server.bytes_sent < 40 * 2**20
        assert ("more than" in embedded.errors[0].detail) == (status == 200)


async def test_dims_come_from_the_first_answer_and_hold(server):
    async with embedder_of(server) as embedder:
        assert embedder.dims is None
        assert await embedder.check() == 8
        assert embedder.dims == 8
        server.dims = 9
        embedded = await embedder.embed_documents(["x"])
        assert "has 9 dims where 8 are expected" in embedded.errors[0].detail
    async with embedder_of(server, dims=384) as embedder:
        with pytest.raises(EmbedderRejected, match="has 9 dims where 384"):
            await embedder.check()


# --- concurrency, cache, cancellation ------------------------------------------------------------------------


async def test_concurrency_is_bounded_over_calls(server):
    server.answer = lambda seen: Reply(delay_s=0.02, body=server._embed(seen).body)
    async with embedder_of(server, max_batch=1, concurrency=3) as embedder:
        calls = [embedder.embed_documents([f"{call}-{n}" for n in range(8)]) for call in range(3)]
        queries = [embedder.embed_queries([f"q{n}"]) for n in range(8)]
        assert all(not embedded.errors for embedded in await asyncio.gather(*calls, *queries))
    assert server.most_open == 3


async def test_a_query_does_not_wait_behind_a_bulk_load(server):
    server.answer = lambda seen: Reply(
        hang=seen.body["input"][0].startswith("doc"), body=server._embed(seen).body
    )
    async with embedder_of(server, max_batch=1, concurrency=2, timeout_s=600.0) as embedder:
        load = asyncio.create_task(embedder.embed_documents([f"doc {n}" for n in range(20)]))
        await until(lambda: server.requests)
        assert_embeds(await embedder.embed_queries(["query"], deadline_s=10.0), ["query"])
        assert not load.done()
        server.release()
        assert (await load).errors == {}


async def test_a_query_does_not_wait_behind_others_batches_of_queries(server):
    server.answer = lambda seen: Reply(
        hang=seen.body["input"][0].startswith("batch"), body=server._embed(seen).body
    )
    async with embedder_of(server, max_batch=1, concurrency=2, timeout_s=600.0) as embedder:
        batches = [
            asyncio.create_task(
                embedder.embed_queries([f"batch {each}.{n}" for n in range(40)], caller="many")
            )
            for each in range(2)
        ]
        await until(lambda: server.requests)
        assert_embeds(await embedder.embed_queries(["query"], deadline_s=10.0, caller="one"), ["query"])
        more = await embedder.embed_queries(["one of many's own"], caller="many")
        assert "too many queries wait" in more.errors[0].detail
        assert not batches[0].done()
        server.release()
        # The second batch came when the first had taken all that one caller may have.
        first, second = [await batch for batch in batches]
        assert first.errors == {}
        assert len(second.errors) == 40


async def test_what_waits_is_counted_in_requests_and_not_in_texts(server):
    server.answer = lambda seen: Reply(hang=len(seen.body["input"]) > 1, body=server._embed(seen).body)
    async with embedder_of(server, max_batch=32, concurrency=2, timeout_s=600.0) as embedder:
        batch = asyncio.create_task(embedder.embed_queries([f"batch {n}" for n in range(100)]))
        await until(lambda: server.requests)
        assert_embeds(await embedder.embed_queries(["query"], deadline_s=10.0), ["query"])
        server.release()
        assert (await batch).errors == {}


async def test_queries_are_cached_up_to_a_bound_and_errors_are_not(server):
    async with embedder_of(server, cache_size=2, retries=0) as embedder:
        await embedder.check()
        server.requests.clear()
        for text in ("a", "b", "a", "c", "a", "b"):
            assert_embeds(await embedder.embed_queries([text]), [text])
        assert server.batches == [["a"], ["b"], ["c"], ["b"]], "b was the longest unused when c came"
        server.script = [openai_error(503, "no")]
        assert (await embedder.embed_queries(["d"])).errors
        assert_embeds(await embedder.embed_queries(["d"]), ["d"])
        await embedder.embed_documents(["a"])
        assert server.batches[-1] == ["a"], "documents go past the cache"


async def test_concurrent_equal_queries_are_embedded_once(server):
    server.answer = lambda seen: Reply(delay_s=0.1, body=server._embed(seen).body)
    async with embedder_of(server) as embedder:
        results = await asyncio.gather(*(embedder.embed_queries(["same", f"own {n}"]) for n in range(5)))
    for n, embedded in enumerate(results):
        assert_embeds(embedded, ["same", f"own {n}"])
    assert sorted(text for batch in server.batches for text in batch) == sorted(
        ["same", *(f"own {n}" for n in range(5))]
    )


async def test_a_cancelled_caller_does_not_cancel_the_others(server):
    server.script = [Reply(hang=True, body=server._embed(_seen(["same"])).body)]
    async with embedder_of(server) as embedder:
        first = asyncio.create_task(embedder.embed_queries(["same"]))
        await until(lambda: server.requests)
        second = asyncio.create_task(embedder.embed_queries(["same"]))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        server.release()
        assert_embeds(await second, ["same"])
    assert len(server.requests) == 1


async def test_a_patient_caller_is_not_failed_by_a_hasty_one(server):
    server.script = [Reply(503, hang=True, headers={"retry-after": "0.5"})]
    async with embedder_of(server) as embedder:
        hasty = asyncio.create_task(embedder.embed_queries(["same"], deadline_s=0.3))
        await asyncio.sleep(0)
        patient = asyncio.create_task(embedder.embed_queries(["same"]))
        await until(lambda: server.requests)
        server.release()
        # The hasty one's deadline comes before the second try, the patient one has none.
        assert (await hasty).errors
        assert_embeds(await patient, ["same"])


async def test_when_the_last_caller_leaves_the_request_ends(server):
    server.script = [Reply(hang=True)]
    async with embedder_of(server, concurrency=1, timeout_s=600.0) as embedder:
        lone = asyncio.create_task(embedder.embed_queries(["same"]))
        await until(lambda: server.requests)
        lone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lone
        assert_embeds(await embedder.embed_queries(["same"], deadline_s=10.0), ["same"])
        await until(lambda: server.abandoned)


async def test_a_cancelled_load_frees_its_lanes(server):
    server.script = [Reply(hang=True)] * 2
    async with embedder_of(server, max_batch=1, concurrency=2) as embedder:
        load = asyncio.create_task(embedder.embed_documents([f"t{n}" for n in range(50)]))
        await until(lambda: server.requests)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        server.script = []
        assert_embeds(await embedder.embed_documents(["a", "b", "c"]), ["a", "b", "c"])


async def test_closing_ends_what_is_under_way(server):
    server.script = [Reply(hang=True)] * 2
    async with embedder_of(server) as embedder:
        query = asyncio.create_task(embedder.embed_queries(["a"]))
        await until(lambda: server.requests)
        await embedder.close()
        assert isinstance((await query).errors[0], EmbedderUnavailable)
        assert isinstance((await embedder.embed_documents(["b"])).errors[0], EmbedderUnavailable)


def _seen(texts):
    return Seen("POST", "/v1/embeddings", {}, {"input": texts, "model": "m", "encoding_format": "base64"})


# --- the pure parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,most",
    [
        ("", 3),
        ("abcd", 2 + 2),
        ("a b c d", 4 + 2),
        ("假期", 3 + 2),
        ("假期ab", 3 + 1 + 2),
        ("приве", 5 + 3),
        ("😀", 2 + 2 + 1),
    ],
)
def test_the_high_estimate_of_tokens(text, most):
    assert most_tokens(text) == pytest.approx(most, abs=1)


@pytest.mark.parametrize(
    "text,tokens,kept",
    [
        ("abc", 3, 3),
        ("a" * 100, 10, 50),
        ("a" * 50, 10, 50),
        ("假" * 100, 12, 20),
        ("é" * 100, 7, 20),
        ("😀" * 100, 7, 7),
        ("假a" * 50, 8, 20),
        ("", 1, 0),
    ],
)
def test_a_cut_keeps_what_fits_the_low_estimate(text, tokens, kept):
    assert cut(text, tokens) == text[:kept]


NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    "headers,wait",
    [
        ({}, None),
        ({"retry-after": "3"}, 3),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": format_datetime(NOW + timedelta(seconds=90), usegmt=True)}, 90),
        ({"retry-after": format_datetime(NOW - timedelta(seconds=90), usegmt=True)}, 0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9),
    ],
)
def test_retry_after(headers, wait):
    assert retry_after_s(httpx2.Headers(headers), NOW) == wait


def test_an_answer_is_put_in_order():
    items = [{"index": 2, "embedding": "c"}, {"index": 0, "embedding": "a"}, {"index": 1, "embedding": "b"}]
    assert read_answer(json.dumps({"data": items}).encode(), count=3, at="x") == (
        ["a", "b", "c"],
        frozenset(),
    )


def test_a_list_and_base64_of_it_are_one_vector():
    values = [0.1, -2.5, 3e-5]
    packed = base64.b64encode(struct.pack("<3f", *values)).decode()
    np.testing.assert_array_equal(read_vector(values, dims=3), read_vector(packed, dims=None))


@pytest.mark.parametrize(
    "options,words",
    [
        ({"base_url": ""}, "http://"),
        ({"base_url": "localhost:8000/v1"}, "http://"),
        ({"base_url": "ftp://x/v1"}, "http://"),
        ({"base_url": "http://["}, "URL"),
        ({"api_key": "sk-1\n"}, "line end"),
        ({"api_key": "ключ"}, "characters"),
        ({"model": ""}, "model"),
        ({"dims": 0}, "dims"),
        ({"max_batch": 0}, "max_batch"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_input_tokens": 0}, "max_input_tokens"),
        ({"send_dimensions": True}, "dims"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        Embedder.connect(
            **{"base_url": "http://127.0.0.1:1/v1", "api_key": None, "model": "m", "dims": None, **options}
        )


# --- translation ---------------------------------------------------------------------------------------------

UNREACHABLE = {
    "CookieConflict": "raised where cookies are read by name, which is not done",
    "SubjectTokenProviderError": "raised for workload identities, which are not used",
    "APIRemovedInV1": "raised by attributes of the first API alone",
    "_AmbiguousModuleClientUsageError": "raised by the module's own client, which is not used",
}


def vendor_exceptions() -> list[type[Exception]]:
    found: set[type[Exception]] = set()
    for module in (openai, openai._exceptions, httpx2):
        found |= {
            value
            for value in list(vars(module).values())
            if inspect.isclass(value)
            and issubclass(value, Exception)
            and value.__module__.startswith(("openai", "httpx2"))
            and not issubclass(value, Warning)
        }
    return sorted(found, key=lambda kind: kind.__name__)


def test_every_exception_of_the_vendor_is_mapped():
    names = {kind.__name__ for kind in vendor_exceptions()}
    assert {"APIConnectionError", "RateLimitError", "OAuthError", "DecodingError"} <= names, (
        "the search works"
    )
    # httpx2's are mapped by family: what matters there is the branch, not the leaf.
    families = tuple(kind for kind in embedding.MAPPED if kind.__module__.startswith("httpx2"))
    unmapped = {
        kind.__name__
        for kind in vendor_exceptions()
        if kind not in embedding.MAPPED
        and not issubclass(kind, families)
        and kind.__name__ not in UNREACHABLE
    }
    assert unmapped == set()


def test_an_unknown_exception_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        translate(ZeroDivisionError(), at="x")


@pytest.mark.parametrize("status", [300, 304, 308, *range(400, 430), 451, *range(500, 512)])
def test_every_status_has_a_verdict_and_words(status):
    request = httpx2.Request("POST", "http://x.test/v1/embeddings")
    response = httpx2.Response(status, request=request, content=b'{"error": {"message": "because \\ud800"}}')
    client = openai.OpenAI(api_key="k", base_url="http://x.test/v1")
    verdict = translate(
        client._make_status_error_from_response(response), at="http://x.test/v1", secret="k-1"
    )
    client.close()
    assert verdict.status == status
    assert str(status) in verdict.error.detail
    assert verdict.error.remedy
    assert isinstance(verdict.error, EmbedderUnavailable) == (verdict.then == "retry" or status == 402)
    json.dumps(verdict.error.problem()).encode()


# --- the local embedder --------------------------------------------------------------------------------------


@pytest.fixture
def local_embedder() -> Iterator[str]:
    """The base URL of the project's own embedding server, in its own process."""
    pytest.importorskip(
        "onnxruntime", reason="needs the packages of the local embedder (the extra `embedder`)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.embedder", "--port", "0", "--threads", "1", "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready = re.search(r"http://\S+", process.stdout.readline())
        assert ready is not None, "the local embedder did not start"
        yield ready[0]
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


@pytest.mark.slow
async def test_the_local_embedder_is_spoken_to_in_full(local_embedder):
    options: dict[str, Any] = {
        "query_prefix": "query: ",
        "document_prefix": "passage: ",
        "dims": 384,
        "model": "multilingual-e5-small",
    }
    embedder = Embedder.connect(base_url=local_embedder, api_key=None, **options)
    assert await embedder.check() == 384
    texts = ["Annual leave is 25 days.", "年假为二十五天。", "The cat sleeps.", "word " * 2000, " "]
    documents = await embedder.embed_documents(texts)
    queries = await embedder.embed_queries(["how many days of leave do I get?", "a\ud800\0b"])
    wrong = Embedder.connect(base_url=local_embedder, api_key=None, **{**options, "model": "another"})
    with pytest.raises(EmbedderRejected, match="404"):
        await wrong.check()
    await wrong.close()
    await embedder.close()
    assert documents.truncated == {3}
    assert set(documents.errors) == {4}
    assert queries.errors == {}
    english, chinese, cat = (vector for vector in documents.vectors[:3] if vector is not None)
    question = queries.vectors[0]
    assert question is not None
    assert float(question @ english) > float(question @ cat)
    assert float(question @ chinese) > float(question @ cat)
