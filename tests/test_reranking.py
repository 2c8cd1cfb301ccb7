"""The door to the reranker, against real servers of both forms on loopback, honest and broken ones."""

import asyncio
import inspect
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from app.errors import RerankerFailed
from app.reranking import FAILURES, Reranker, to_probability, translate
from tests.fakes import FarEnd, Reply, RerankServer, Seen, overlap

QUERY = "how long is leave"
DOCUMENTS = ["leave is long", "a cat", "how long", "nothing", "leave"]
SCORES = [overlap(QUERY, document) for document in DOCUMENTS]


@asynccontextmanager
async def reranker_of(server: FarEnd, path: str = "/rerank", **options: Any) -> AsyncIterator[Reranker]:
    reranker = Reranker.connect(url=server.url + path, **options)
    try:
        yield reranker
    finally:
        await reranker.close()


def results(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    return {"results": [{"index": index, "relevance_score": score} for index, score in pairs]}


class TestRerank:
    """Kind rerank."""

    @pytest.mark.parametrize(
        "body,scores",
        [
            (results((2, 0.9), (0, 0.4)), [0.4, None, 0.9]),
            (results((0, 0.119), (1, 0.029), (2, 0.032)), [0.119, 0.029, 0.032]),
        ],
        ids=["two of three", "all, though fewer were asked"],
    )
    async def test_bc20_scores_are_mapped_by_index(self, body, scores):
        with FarEnd(lambda _: Reply(body=body)) as server:
            async with reranker_of(server, form="cohere") as reranker:
                assert await reranker.rerank("q", ["d0", "d1", "d2"]) == scores
            assert server.requests[0].body["top_n"] == 3

    async def test_what_a_score_means_is_configured_and_not_read_from_an_answer(self):
        logits = results((1, -3.5), (0, 7), (2, 0))
        few = results((1, 0.1), (0, 0.9), (2, 0.5))  # Logits that all happen to lie in [0, 1].
        with FarEnd(lambda seen: Reply(body=few if seen.body["query"] == "few" else logits)) as server:
            async with reranker_of(server, form="cohere", scale="logit") as reranker:
                assert reranker.scale == "logit"
                assert await reranker.rerank("q", ["d0", "d1", "d2"]) == [7.0, -3.5, 0.0]
                assert await reranker.rerank("few", ["d0", "d1", "d2"]) == [0.9, 0.1, 0.5]
            async with reranker_of(server, form="cohere") as reranker:
                assert reranker.scale == "probability"
                with pytest.raises(RerankerFailed, match="score 7, and it is configured") as caught:
                    await reranker.rerank("q", ["d0", "d1", "d2"])
                assert "HALFLIFE_RERANK_SCORES" in str(caught.value.remedy)

    async def test_half_precision_may_leave_0_to_1_by_a_hair(self):
        with FarEnd(lambda _: Reply(body=results((0, 1.0004), (1, -0.0004)))) as server:
            async with reranker_of(server, form="cohere") as reranker:
                scores = await reranker.rerank("q", ["d0", "d1"])
        assert [to_probability(score, "probability") for score in scores if score is not None] == [1.0, 0.0]

    @pytest.mark.parametrize(
        "score, scale, wanted",
        [
            (0.3, "probability", 0.3),
            (0.3, "logit", 1 / (1 + math.exp(-0.3))),
            (0, "logit", 0.5),
            (1e308, "logit", 1.0),
            (-1e308, "logit", 0.0),
        ],
    )
    def test_probabilities(self, score, scale, wanted):
        assert to_probability(score, scale) == pytest.approx(wanted, abs=1e-12)

    @pytest.mark.parametrize(
        "reply,words",
        [
            (Reply(body=results((7, 0.5))), "the index 7 among 3"),
            (Reply(400), "answered 400"),
            (Reply(body=results()), "is empty"),
        ],
        ids=["bad index", "400", "no results"],
    )
    async def test_an_answer_that_cannot_be_trusted_is_a_failure(self, reply, words):
        with FarEnd(lambda _: reply) as server:
            async with reranker_of(server, form="cohere") as reranker:
                with pytest.raises(RerankerFailed, match=words):
                    await reranker.rerank("q", ["d0", "d1", "d2"])

    @pytest.mark.parametrize("documents", [[], ["", "  \n", "\0"]])
    async def test_without_candidates_it_is_not_called(self, documents):
        with RerankServer() as server:
            async with reranker_of(server) as reranker:
                assert await reranker.rerank("q", documents) == [None] * len(documents)
            assert server.requests == []


class TestHttpValidation:
    """Kind http-validation: a score that is no number is a failure, and the error is valid JSON."""

    @pytest.mark.parametrize("form,key", [("cohere", "relevance_score"), ("tei", "score")])
    @pytest.mark.parametrize(
        "score", ["NaN", "Infinity", "-1e999", '"0.5"', "null", "true", "[0.5]", "1" * 400]
    )
    async def test_a_score_that_is_no_finite_number_is_a_failure(self, form, key, score):
        items = f'[{{"index": 0, "{key}": 0.5}}, {{"index": 1, "{key}": {score}}}]'
        body = (items if form == "tei" else f'{{"results": {items}}}').encode()
        with FarEnd(lambda _: Reply(body=body)) as server:
            async with reranker_of(server, form=form) as reranker:
                with pytest.raises(RerankerFailed, match="no finite number") as caught:
                    await reranker.rerank("q", ["a", "b"])
        json.dumps(caught.value.problem(), allow_nan=False).encode()


# --- what is sent --------------------------------------------------------------------------------------------


async def test_the_cohere_form_is_sent_whole():
    with RerankServer("cohere") as server:
        async with reranker_of(server, "/v1", model="bge", api_key="k-1") as reranker:
            assert await reranker.rerank(QUERY, DOCUMENTS) == SCORES
    seen = server.requests[0]
    assert (seen.path, seen.headers["authorization"]) == ("/v1/rerank", "Bearer k-1")
    assert seen.body == {
        "model": "bge",
        "query": QUERY,
        "documents": DOCUMENTS,
        "top_n": 5,
        "return_documents": False,
    }


async def test_the_tei_form_is_sent_whole_and_32_at_a_time():
    documents = [f"{n} leave" if n % 3 else f"{n} how long" for n in range(100)]
    with RerankServer("tei", max_batch=32) as server:
        async with reranker_of(server, form="tei", concurrency=2) as reranker:
            assert await reranker.rerank(QUERY, documents) == [
                overlap(QUERY, document) for document in documents
            ]
    assert sorted(map(len, server.batches)) == [4, 32, 32, 32]
    assert server.most_open <= 2
    assert server.requests[0].body == {
        "query": QUERY,
        "texts": server.batches[0],
        "truncate": True,
        "raw_scores": False,
    }
    assert "authorization" not in server.requests[0].headers


async def test_texts_are_cleaned_and_cut_and_blank_ones_left_out():
    with RerankServer("cohere") as server:
        async with reranker_of(server, form="cohere", max_document_chars=5) as reranker:
            assert await reranker.rerank("a\ud800 b", ["", "b\ud800c\0d e f", "b"]) == [None, 0.0, 0.5]
    assert server.requests[0].body["query"] == "a? b"
    assert server.batches == [["b?c d", "b"]]


@pytest.mark.parametrize("form,tries", [("cohere", 1), ("tei", 2)])
async def test_the_form_is_found_out_once(form, tries):
    with RerankServer(form, max_batch=32) as server:
        async with reranker_of(server) as reranker:
            assert reranker.form is None
            calls = [reranker.rerank(QUERY, DOCUMENTS) for _ in range(3)]
            assert await asyncio.gather(*calls) == [SCORES] * 3
            assert reranker.form == form
            assert len(server.requests) == tries + 2
            many = DOCUMENTS * 20
            assert await reranker.rerank(QUERY, many) == SCORES * 20


async def test_a_tei_server_found_out_gets_the_rest_in_its_batches():
    with RerankServer("tei", max_batch=32) as server:
        async with reranker_of(server) as reranker:
            assert await reranker.rerank(QUERY, DOCUMENTS * 20) == SCORES * 20
    assert sorted(map(len, server.batches)) == [4, 32, 32, 32]


@pytest.mark.parametrize(
    "path,form",
    [
        ("/v1/rerank", "cohere"),
        ("/v2", "cohere"),
        ("/api/v1/rerank/", "cohere"),
        ("/rerank", None),
        ("", None),
    ],
)
def test_a_path_with_a_version_is_cohere(path, form):
    assert Reranker.connect(url=f"http://127.0.0.1:1{path}").form == form


async def test_an_outage_teaches_no_form():
    with RerankServer("cohere") as server:
        server.script = [Reply(503), Reply(503)]
        async with reranker_of(server) as reranker:
            with pytest.raises(RerankerFailed, match="503"):
                await reranker.rerank(QUERY, DOCUMENTS)
            assert reranker.form is None
            assert len(server.requests) == 2, "no other form was tried"
            assert await reranker.rerank(QUERY, DOCUMENTS) == SCORES
            assert reranker.form == "cohere"


async def test_other_spellings_of_the_cohere_form_are_read():
    body = {"data": [{"index": 1, "score": 0.5, "document": {"text": "x"}}, {"index": 0, "score": 0.25}]}
    with FarEnd(lambda _: Reply(body=body)) as server:
        async with reranker_of(server) as reranker:
            assert await reranker.rerank("q", ["a", "b"]) == [0.25, 0.5]


async def test_a_server_that_does_not_know_return_documents_is_spared_it():
    def strict(seen: Seen) -> Reply:
        if "return_documents" in seen.body:
            return Reply(422, {"detail": "unknown field `return_documents`"})
        return Reply(body=results((0, 0.5)))

    with FarEnd(strict) as server:
        async with reranker_of(server, form="cohere") as reranker:
            assert await reranker.rerank("q", ["a"]) == [0.5]
            assert await reranker.rerank("q", ["b"]) == [0.5]
        assert len(server.requests) == 3


# --- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body,words",
    [
        (b"", "not JSON"),
        (b"<html>", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b"null", "no list of results"),
        (b"{}", "no list of results"),
        (b'{"results": null}', "no list of results"),
        (b'{"results": {"0": 1}}', "no list of results"),
        (b'{"results": [null]}', "the index None"),
        (b'{"results": [[0, 0.5]]}', "the index None"),
        (b'{"results": [{"relevance_score": 0.5}]}', "the index None"),
        (b'{"results": [{"index": "0", "relevance_score": 0.5}]}', "the index '0'"),
        (b'{"results": [{"index": true, "relevance_score": 0.5}]}', "the index True"),
        (b'{"results": [{"index": -1, "relevance_score": 0.5}]}', "the index -1"),
        (
            b'{"results": [{"index": 0, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.5}]}',
            "index 0 twice",
        ),
        (b'{"results": [{"index": 0}]}', "no finite number"),
    ],
    ids=lambda value: value[:60].decode() if isinstance(value, bytes) else "",
)
async def test_an_answer_of_any_other_shape_is_a_failure(body, words):
    with FarEnd(lambda _: Reply(body=body)) as server:
        async with reranker_of(server, form="cohere") as reranker:
            with pytest.raises(RerankerFailed, match=words) as caught:
                await reranker.rerank("q", ["a", "b"])
        assert len(server.requests) == 1
    assert f"127.0.0.1:{server.port}" in caught.value.detail
    assert caught.value.remedy


async def test_a_tei_server_owes_every_score():
    with FarEnd(lambda _: Reply(body=[{"index": 1, "score": 0.5}])) as server:
        async with reranker_of(server, form="tei") as reranker:
            with pytest.raises(RerankerFailed, match="1 scores for 2 documents"):
                await reranker.rerank("q", ["a", "b"])


@pytest.mark.parametrize(
    "reply,words",
    [
        (Reply(401, {"error": "bad key s3cret-key"}), "API key"),
        (Reply(403), "API key"),
        (Reply(404), "URL"),
        (Reply(307, b"", {"location": "http://elsewhere.test/rerank"}), "elsewhere.test"),
        (Reply(400, {"error": "no such model"}), "log"),
    ],
    ids=lambda value: str(value.status) if isinstance(value, Reply) else "",
)
async def test_what_no_retry_mends_is_asked_once_and_says_the_remedy(reply, words):
    with FarEnd(lambda _: reply) as server:
        async with reranker_of(server, form="cohere", api_key="s3cret-key") as reranker:
            with pytest.raises(RerankerFailed) as caught:
                await reranker.rerank("q", ["a"])
        assert len(server.requests) == 1
    assert words in (caught.value.remedy or "")
    assert "s3cret" not in str(caught.value.problem())


@pytest.mark.parametrize(
    "reply",
    [
        Reply(429),
        Reply(503, headers={"retry-after": "0.05"}),
        Reply(424, {"error": "inference"}),
        Reply(close_after=0),
    ],
    ids=["429", "503", "424", "closed"],
)
async def test_a_passing_failure_is_tried_once_more(reply):
    with RerankServer("cohere") as server:
        server.script = [reply]
        async with reranker_of(server, form="cohere") as reranker:
            assert await reranker.rerank(QUERY, DOCUMENTS) == SCORES
            server.script = [reply, reply]
            with pytest.raises(RerankerFailed):
                await reranker.rerank(QUERY, DOCUMENTS)
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    "after", ["30", format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)], ids=["s", "date"]
)
async def test_a_retry_after_beyond_the_budget_is_not_waited_for(after):
    with FarEnd(lambda _: Reply(429, headers={"retry-after": after})) as server:
        async with reranker_of(server, form="cohere", timeout_s=60.0) as reranker:
            with pytest.raises(RerankerFailed, match="429") as caught:
                await reranker.rerank("q", ["a"], deadline_s=20.0)
        assert len(server.requests) == 1
    assert (caught.value.retry_after_s or 0) >= 30


@pytest.mark.parametrize(
    "slow",
    [
        Reply(hang=True),
        Reply(body=results((0, 0.5)), hang_in_body=True),
        Reply(body=results((0, 0.5)), drip_s=0.05),
    ],
    ids=["hang", "hang in body", "drip"],
)
async def test_the_time_budget_is_for_the_whole(slow):
    with FarEnd(lambda _: slow) as server:
        async with reranker_of(server, form="cohere") as reranker:
            with pytest.raises(RerankerFailed, match=r"within 0\.3 s"):
                await reranker.rerank("q", ["a"], deadline_s=0.3)


async def test_no_server_at_all_is_a_failure():
    with FarEnd() as gone:
        url = gone.url
    reranker = Reranker.connect(url=url)
    with pytest.raises(RerankerFailed, match="can't be reached"):
        await reranker.rerank("q", ["a"])
    await reranker.close()


async def test_a_failed_batch_fails_the_whole():
    with RerankServer("tei", max_batch=32) as server:
        server.script = [None, Reply(500), Reply(500), Reply(500)]
        async with reranker_of(server, form="tei", concurrency=1) as reranker:
            with pytest.raises(RerankerFailed, match="500"):
                await reranker.rerank(QUERY, ["leave"] * 64)


async def test_a_smaller_batch_limit_of_the_server_is_learned():
    with RerankServer("tei", max_batch=10) as server:
        async with reranker_of(server, form="tei") as reranker:
            assert await reranker.rerank(QUERY, DOCUMENTS * 10) == SCORES * 10
            server.requests.clear()
            assert await reranker.rerank(QUERY, DOCUMENTS * 10) == SCORES * 10
    assert sorted(map(len, server.batches)) == [2, 8, 8, 8, 8, 8, 8]


async def test_a_document_that_is_too_long_is_cut_until_it_fits():
    with RerankServer("cohere") as server:
        server.max_chars = 1000
        async with reranker_of(server, form="cohere") as reranker:
            scores = await reranker.rerank(QUERY, ["leave", "how " * 1500, "long"])
    assert scores == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_without_end_is_not_read_to_its_end(status):
    with FarEnd(lambda _: Reply(status, b"{", filler=200 * 2**20)) as server:
        async with reranker_of(server, form="cohere") as reranker:
            with pytest.raises(RerankerFailed):
                await reranker.rerank("q", ["a"])
        assert server.bytes_sent < 40 * 2**20


async def test_concurrency_is_bounded_over_calls_and_freed_by_cancelling():
    with RerankServer("cohere") as server:
        server.answer = lambda seen: Reply(delay_s=0.05, body=server._rerank(seen).body)
        async with reranker_of(server, form="cohere", concurrency=2) as reranker:
            calls = [asyncio.create_task(reranker.rerank(QUERY, DOCUMENTS)) for _ in range(6)]
            calls[0].cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert outcomes[1:] == [SCORES] * 5
        assert server.most_open == 2


async def test_a_blank_query_is_refused():
    with RerankServer() as server:
        async with reranker_of(server) as reranker:
            with pytest.raises(RerankerFailed, match="blank"):
                await reranker.rerank(" ", ["a"])
        assert server.requests == []


async def test_after_closing_it_says_so():
    with RerankServer() as server:
        async with reranker_of(server) as reranker:
            await reranker.close()
            with pytest.raises(RerankerFailed, match="closed"):
                await reranker.rerank("q", ["a"])


@pytest.mark.parametrize(
    "options,words",
    [
        ({"url": ""}, "http://"),
        ({"url": "localhost:80/rerank"}, "http://"),
        ({"url": "http://["}, "host"),
        ({"url": "http://x:1:2"}, "URL"),
        ({"api_key": "k\n"}, "line end"),
        ({"batch_size": 0}, "batch_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout_s": -1}, "timeout_s"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        Reranker.connect(**{"url": "http://127.0.0.1:1", **options})


def test_every_exception_of_the_transport_is_mapped():
    kinds = [
        value
        for value in list(vars(httpx2).values())
        if inspect.isclass(value) and issubclass(value, Exception) and not issubclass(value, Warning)
    ]
    assert {"ConnectTimeout", "DecodingError", "InvalidURL"} <= {kind.__name__ for kind in kinds}, (
        "the search works"
    )
    assert [kind for kind in kinds if not issubclass(kind, tuple(FAILURES))] == []
    with pytest.raises(ZeroDivisionError):
        translate(ZeroDivisionError(), at="x")
