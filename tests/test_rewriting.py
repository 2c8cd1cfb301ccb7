"""Rewriting by a chat model: the door against a far end, then searches on a real node that its answers widen."""

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from app.asking import RewriteOptions, Why
from app.elastic import Cluster
from app.errors import InvalidRequest, RewriterFailed, Unavailable
from app.rewriting import MOST_TERMS, Rewriter
from app.search import Caller
from app.settings import Settings
from app.why import why
from tests.fakes import ChatServer, EmbeddingServer, Reply
from tests.searching import NOW_MS, PATIENT, Asker, StandIn, drop_collection, ids, make_collection
from tests.service import serving

ALL = RewriteOptions(keywords=True, expansion=True, queries=2)
SAID = {
    "keywords": ["carry over", "leave"],
    "expansion": ["vacation days", "结转年假"],
    "queries": ["transfer unused vacation", "年假可以结转吗"],
}


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    with ChatServer(SAID) as server:
        yield server


@pytest.fixture
async def rewriter(chat: ChatServer) -> AsyncIterator[Rewriter]:
    door = Rewriter.connect(url=chat.base_url, model="a-model", api_key="sk-1", cache_size=2)
    yield door
    await door.close()


async def test_what_the_model_says_is_read_and_remembered(chat: ChatServer, rewriter: Rewriter) -> None:
    found = await rewriter.rewrite("how long may I carry over leave?", ALL, deadline_s=10)
    assert found.model_dump() == SAID
    [seen] = chat.requests
    assert seen.headers["authorization"] == "Bearer sk-1"
    assert seen.body["model"] == "a-model"
    assert seen.body["messages"][1] == {"role": "user", "content": "how long may I carry over leave?"}
    assert await rewriter.rewrite("how long may I carry over leave?", ALL, deadline_s=10) == found
    assert len(chat.requests) == 1
    for query in ("a", "b", "how long may I carry over leave?"):
        await rewriter.rewrite(query, ALL, deadline_s=10)
    # Two are remembered: the first was pushed out.
    assert len(chat.requests) == 4


async def test_only_what_was_asked_for_is_taken_and_within_bounds(
    chat: ChatServer, rewriter: Rewriter
) -> None:
    chat.said = {
        "keywords": ["Leave", "leave", " ", "x" * 81, *(f"k{n}" for n in range(30))],
        "expansion": ["never asked for"],
        "queries": ["LEAVE  rules", "a", "b", "c"],
        "filter": {"tenant": "other"},
    }
    found = await rewriter.rewrite("leave rules", RewriteOptions(keywords=True, queries=2), deadline_s=10)
    assert found.keywords == ["Leave", *(f"k{n}" for n in range(MOST_TERMS - 1))]
    assert (found.expansion, found.queries) == ([], ["a", "b"])


async def test_a_fenced_answer_is_read(chat: ChatServer, rewriter: Rewriter) -> None:
    chat.said = 'Here you are:\n```json\n{"keywords": ["leave"]}\n```'
    found = await rewriter.rewrite("q", RewriteOptions(keywords=True), deadline_s=10)
    assert found.keywords == ["leave"]


async def test_fields_that_a_server_refuses_are_left_out_from_then_on(
    chat: ChatServer, rewriter: Rewriter
) -> None:
    chat.refuses = ("response_format", "max_tokens")
    assert (await rewriter.rewrite("one", ALL, deadline_s=10)).keywords == SAID["keywords"]
    before = len(chat.requests)
    await rewriter.rewrite("two", ALL, deadline_s=10)
    assert (before, len(chat.requests)) == (3, 4)
    assert "temperature" in chat.requests[-1].body


@pytest.mark.parametrize(
    "reply, said",
    [
        (Reply(500, {"error": "broken"}), "answered 500"),
        (Reply(401, {"error": "wrong key sk-1"}), "answered 401"),
        (Reply(200, b"<html>"), "no chat completion"),
        (Reply(200, {"choices": []}), "no chat completion"),
        (Reply(200, {"choices": [{"message": {"content": None}}]}), "holds no text"),
        (Reply(200, {"choices": [{"message": {"content": "I can't do that"}}]}), "is no JSON"),
        (Reply(200, {"choices": [{"message": {"content": "[]"}}]}), "no JSON object"),
        (Reply(200, {"choices": [{"message": {"content": '{"keywords": "leave"}'}}]}), "no list of strings"),
        (Reply(close_after=1), "can't be reached"),
        (Reply(hang=True), "did not answer within"),
    ],
    ids=["500", "401", "html", "no choices", "null", "prose", "list", "no list", "cut off", "hangs"],
)
async def test_an_answer_that_can_not_be_used_is_one_error(
    chat: ChatServer, rewriter: Rewriter, reply: Reply, said: str
) -> None:
    chat.script = [reply]
    with pytest.raises(RewriterFailed, match=said) as caught:
        await rewriter.rewrite("q", ALL, deadline_s=0.5 if reply.hang else 10)
    assert "sk-1" not in caught.value.detail
    assert caught.value.remedy


async def test_a_dead_server_is_left_alone(
    rewriter: Rewriter, chat: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewriter.guard.breaker, "_first_open_s", 3_600)
    chat.script = [Reply(200, b"nothing")] * 5
    for n in range(5):
        with pytest.raises(RewriterFailed):
            await rewriter.rewrite(f"q{n}", ALL, deadline_s=10)
    with pytest.raises(RewriterFailed, match="was not asked"):
        await rewriter.rewrite("q6", ALL, deadline_s=10)
    assert len(chat.requests) == 5


@pytest.mark.parametrize(
    "given", [{"url": "ftp://x"}, {"url": "nothing"}, {"model": ""}, {"api_key": "a\nb"}], ids=str
)
def test_settings_that_can_not_work_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rewrit"):
        Rewriter.connect(**{"url": "http://127.0.0.1:1/v1", "model": "m", **given})


# --- in a search -------------------------------------------------------------------------------------------------------

DOCUMENTS: Sequence[dict[str, Any]] = [
    {"id": "leave", "text": "", "chunks": [("carry over leave until March", [1.0, 0.0, 0.0, 0.0])]},
    {"id": "vacation", "text": "", "chunks": [("unused vacation days expire", [0.0, 1.0, 0.0, 0.0])]},
    {"id": "nianjia", "text": "", "chunks": [("年假可以结转到三月", [0.0, 0.0, 1.0, 0.0])]},
    {"id": "other", "text": "", "chunks": [("nothing of the kind", [0.0, 0.0, 0.0, 1.0])]},
]
QUERY = "carry over leave"
ASKED: dict[str, Any] = {"rewrite": {"keywords": True, "expansion": True, "queries": 2}}
TEXT: dict[str, Any] = {"routes": [{"kind": "text"}]}


@pytest.fixture
async def asker(cluster: Cluster, rewriter: Rewriter) -> AsyncIterator[Asker]:
    collection = await make_collection(cluster, DOCUMENTS, dims=4)
    asker = Asker(cluster, collection, StandIn(dims=4))
    asker.doors = replace(asker.doors, rewriter=rewriter)
    yield asker
    await drop_collection(cluster, collection)


@pytest.mark.node
async def test_rewritings_are_routes_and_are_told(asker: Asker) -> None:
    assert ids(await asker.ask(QUERY, **TEXT)) == ["leave"]
    answer = await asker.ask(QUERY, **ASKED, **TEXT)
    assert set(ids(answer)) == {"leave", "vacation", "nianjia"}
    assert ids(answer)[0] == "leave"
    assert answer.rewrites is not None
    assert [(told.kind, told.texts, told.routes) for told in answer.rewrites] == [
        ("keywords", SAID["keywords"], ["rewrite_keywords"]),
        ("expansion", SAID["expansion"], ["rewrite_expansion"]),
        ("query", SAID["queries"][:1], ["rewrite_text"]),
        ("query", SAID["queries"][1:], ["rewrite_text_2"]),
    ]
    assert {"text", "rewrite_keywords", "rewrite_expansion", "rewrite_text", "rewrite_text_2"} == set(
        answer.routes
    )
    both = await asker.ask(QUERY, rewrite={"queries": 1})
    assert {"text", "vector", "rewrite_text", "rewrite_vector"} == set(both.routes)


@pytest.mark.node
async def test_later_pages_do_not_ask_the_model_again(asker: Asker, chat: ChatServer) -> None:
    options: dict[str, Any] = {**PATIENT, "paging": True, **ASKED, **TEXT}
    whole = await asker.ask(QUERY, **options)
    first = await asker.ask(QUERY, **{**options, "top_k": 1})
    chat.said = "something else by now"
    assert first.cursor is not None
    second = await asker.page(first.cursor)
    assert ids(first) + ids(second) == ids(whole)[:2]
    assert second.rewrites == first.rewrites
    assert len(chat.requests) == 1


@pytest.mark.node
async def test_a_failing_model_costs_the_rewriting_alone(asker: Asker, chat: ChatServer) -> None:
    chat.said = "no"
    answer = await asker.ask(QUERY, **ASKED, **TEXT)
    assert (ids(answer), answer.degraded, answer.rewrites) == (["leave"], True, None)
    assert any("not rewritten" in warning for warning in answer.warnings)
    with pytest.raises(Unavailable, match="not rewritten"):
        await asker.ask(QUERY, strict=True, **ASKED, **TEXT)
    # Later pages are not rewritten either, so they fit.
    first = await asker.ask(QUERY, paging=True, top_k=1, rewrite={"keywords": True})
    assert first.degraded
    assert first.cursor is not None
    assert not any("no cursor" in warning for warning in first.warnings)
    assert (await asker.page(first.cursor)).hits


@pytest.mark.node
async def test_without_a_model_it_is_refused(asker: Asker) -> None:
    asker.doors = replace(asker.doors, rewriter=None)
    with pytest.raises(InvalidRequest, match="no chat model") as caught:
        await asker.ask(QUERY, **ASKED)
    assert (caught.value.field, "HALFLIFE_REWRITE_URL" in (caught.value.remedy or "")) == ("rewrite", True)


@pytest.mark.node
async def test_filters_hold_for_what_the_model_adds_and_why_sees_it(asker: Asker) -> None:
    hidden = [{"bool": {"must_not": [{"term": {"document_id": "vacation"}}]}}]
    assert "vacation" not in ids(await asker.ask(QUERY, forced=hidden, **ASKED))
    asked = Why.model_validate(
        {"collection": asker.collection.name, "query": QUERY, "id": "vacation", **PATIENT, **ASKED, **TEXT}
    )
    told = await why(asked, collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS)
    assert told.on_page
    assert not told.routes["text"].matches
    assert told.routes["rewrite_expansion"].matches


@pytest.mark.node
async def test_rewritings_keep_to_what_the_routes_asked_for_may_find(made: Any, rewriter: Rewriter) -> None:
    given = [
        {**each, "id": f"{each['id']}-{lang}", "metadata": {"lang": lang}, "creation_time": created}
        for each in DOCUMENTS
        for lang, created in (("en", "2025-01-30"), ("de", "2020-01-01"))
    ]
    asker: Asker = await made(given, dims=4)
    asker.doors = replace(asker.doors, rewriter=rewriter)
    english: dict[str, Any] = {"kind": "text", "filter": {"lang": "en"}}
    german: dict[str, Any] = {"kind": "text", "name": "german", "filter": {"lang": "de"}}
    wanted = {"leave", "vacation", "nianjia"}
    for routes, langs, added in (
        ([english], {"en"}, 1),
        ([{"kind": "fresh_text", "window": "7d"}], {"en"}, 1),
        ([english, german], {"en", "de"}, 2),
        ([english, {**english, "name": "again", "query": "vacation"}], {"en"}, 1),
        ([english, {"kind": "text", "name": "all"}], {"en", "de"}, 1),
    ):
        answer = await asker.ask(
            QUERY, top_k=50, rewrite={"queries": 2, "keywords": True, "expansion": True}, routes=routes
        )
        assert set(ids(answer)) == {f"{name}-{lang}" for name in wanted for lang in langs}, routes
        assert answer.rewrites is not None
        assert [len(told.routes or []) for told in answer.rewrites] == [added] * 4
    # Each kind by its own: the vectors of English ones alone, the words of all.
    vectors: dict[str, Any] = {
        "kind": "vector",
        "filter": {"lang": "en"},
        "decay": {"half_life": "5d", "floor": 0},
    }
    answer = await asker.ask(QUERY, top_k=50, rewrite={"queries": 1}, routes=[{"kind": "text"}, vectors])
    own = {hit.id: hit.routes["rewrite_vector"] for hit in answer.hits if "rewrite_vector" in hit.routes}
    assert {name.rpartition("-")[2] for name in own} == {"en"}
    assert all(way.decay is not None and way.decay < 1 for way in own.values())
    assert {hit.id.rpartition("-")[2] for hit in answer.hits if "rewrite_text" in hit.routes} == {"en", "de"}


@pytest.mark.node
async def test_rewritings_that_no_more_words_are_left_for_are_left_out(asker: Asker) -> None:
    many = " ".join(f"w{at}" for at in range(511))
    routes = [{"kind": "text", "name": f"r{at}", "query": f"{many} r{at}"} for at in range(4)]
    answer = await asker.ask(QUERY, rewrite={"keywords": True}, routes=routes)
    assert (answer.rewrites, len(answer.routes)) == (None, 4)
    assert any("some rewritings are left out" in warning for warning in answer.warnings)


@pytest.mark.node
def test_the_service_is_wired_to_the_configured_model(node_url: str, chat: ChatServer) -> None:
    name = f"rewriting_{uuid.uuid4().hex[:10]}"
    with EmbeddingServer(dims=4) as embedding:
        settings = Settings(
            elasticsearch_url=node_url,
            elasticsearch_timeout_s=60,
            embedding_base_url=embedding.base_url,
            embedding_query_timeout_s=60,
            embedding_model="far-end",
            embedding_dims=4,
            rewrite_url=chat.base_url,
            rewrite_model="a-model",
            rewrite_key=SecretStr("sk-1"),
            rewrite_timeout_s=20,
        )
        with serving(settings) as running:
            documents = [{"id": "vacation", "text": "unused vacation days expire"}]
            running.client.post(
                f"/v1/collections/{name}/documents", json={"documents": documents, "refresh": "wait_for"}
            )
            body = {"collection": name, "query": QUERY, **ASKED, **TEXT}
            answer = running.client.post("/v1/search", json=body).json()
            checks = running.client.get("/readyz").json()["checks"]
            running.client.delete(f"/v1/collections/{name}", params={"confirm": name})
    assert [hit["id"] for hit in answer["hits"]] == ["vacation"]
    assert answer["rewrites"][0]["source"] == "model"
    assert checks["rewriter"]["status"] == "ok"
    assert "sk-1" not in str(checks)
