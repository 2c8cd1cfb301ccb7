"""Synonyms: rules and texts by themselves, then on a real node, where they find, rank, mark, page and explain."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr

from app import catalog, queries, synonyms
from app.asking import Why
from app.collection import SynonymRule, SynonymSet
from app.elastic import Cluster
from app.errors import InvalidRequest
from app.search import Caller
from app.settings import Settings
from app.why import why
from tests.fakes import EmbeddingServer
from tests.searching import NOW_MS, PATIENT, Asker, StandIn, drop_collection, ids, make_collection
from tests.service import Running, serving

DIMS = 8


def rules(*lines: str) -> list[SynonymRule]:
    return [SynonymRule(synonyms=line) for line in lines]


def worded(text: str, *lines: str) -> list[str]:
    made, _ = synonyms.wordings(text, synonyms.find(text, rules(*lines)))
    return [wording.query for wording in made]


# --- rules and texts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, lines, wanted",
    [
        ("my laptop is slow", ["laptop, notebook"], ["my notebook is slow"]),
        ("my Laptops are slow", ["laptop, notebook"], ["my notebook are slow"]),
        ("ＬＡＰＴＯＰ", ["laptop, notebook"], ["notebook"]),
        ("café opening", ["cafe, coffee shop"], ["coffee shop opening"]),
        ("paid time off rules", ["annual leave, paid time off"], ["annual leave rules"]),
        ("如何维修电脑", ["电脑, 计算机"], ["如何维修计算机"]),
        ("计算机病毒", ["电脑, 计算机"], ["电脑病毒"]),
        ("ｺﾝﾋﾟｭｰﾀの修理", ["コンピュータ, 電算機"], ["電算機の修理"]),
        ("k8s on arm", ["k8s => kubernetes"], ["kubernetes on arm"]),
        ("kubernetes on arm", ["k8s => kubernetes"], []),
        ("c++ arrays", ["c++, cpp"], ["cpp arrays"]),
        ("c arrays", ["c++, cpp"], []),
        ("laptops", ["lap, knee"], []),
        ("nothing here", ["laptop, notebook"], []),
        # The longest term wins, and its parts are not looked at again.
        ("new york times", ["new york, nyc", "new york times, nyt", "times, hours"], ["nyt"]),
        ("a b", ["a, x, y"], ["x b", "y b"]),
        # One replacement first, then both.
        ("red car", ["red, crimson", "car, auto"], ["crimson car", "red auto", "crimson auto"]),
    ],
)
def test_a_query_gets_the_wordings_that_the_rules_say(text: str, lines: list[str], wanted: list[str]) -> None:
    assert worded(text, *lines) == wanted


def test_rules_of_one_term_are_gathered_and_told() -> None:
    [found] = synonyms.find("电脑", rules("电脑, 计算机", "电脑 => computer", "电脑, 计算机, PC"))
    assert found.alternatives == ("计算机", "computer", "PC")
    [told] = synonyms.told("电脑", [found], synonyms.wordings("电脑", [found])[0])
    assert (told.of, told.texts) == ("电脑", ["计算机", "computer", "PC"])
    assert told.rules == ["电脑, 计算机", "电脑 => computer", "电脑, 计算机, PC"]


def test_wordings_are_bounded_in_number_and_in_cost() -> None:
    many = rules("a, " + ", ".join(f"b{n}" for n in range(31)))
    made, more = synonyms.wordings("a", synonyms.find("a", many))
    assert (len(made), more) == (synonyms.MAX_WORDINGS, True)
    long = " ".join(f"w{n}" for n in range(150))
    text = f"{long} a"
    made, _ = synonyms.wordings(text, synonyms.find(text, many))
    # 152 words cost 2 x 151 = 302 of 512; a second wording as long does not fit.
    assert len(queries.affordable(queries.lexical_words(text)[0], made)) < len(made)


@pytest.mark.parametrize(
    "line, said",
    [
        ("alone", "one term alone"),
        ("a => ", "a side of `=>` is empty"),
        ("a => b => c", "one `=>` at most"),
        ("a, !!", "no letter and no digit"),
        (", ".join(f"t{n}" for n in range(33)), "at most 32 terms"),
        ("a, " + "x" * 129, "at most 128 characters"),
    ],
)
def test_a_rule_that_can_not_be_read_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        synonyms.check(rules("fine, good", line))
    assert caught.value.field == "synonyms_set[1].synonyms"
    assert caught.value.remedy


def test_a_comma_may_be_part_of_a_term() -> None:
    assert worded("10,000 steps", r"10\,000, ten thousand") == ["ten thousand steps"]


def test_a_wording_must_hold_its_terms_and_counts_a_little_less() -> None:
    made, _ = synonyms.wordings("my pc", synonyms.find("my pc", rules("pc, personal computer")))
    body = queries.text_query("my pc", made)
    own, other = body["dis_max"]["queries"]
    assert own == queries.text_query("my pc")
    assert other["bool"]["must"] == [queries.text_query("my personal computer")]
    assert other["bool"]["boost"] == 0.9
    [held] = other["bool"]["filter"]
    assert (held["multi_match"]["query"], held["multi_match"]["type"]) == ("personal computer", "phrase")


# --- on a node ---------------------------------------------------------------------------------------------------------

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "diannao", "text": "电脑开不了机怎么办", "chunks": [("电脑开不了机怎么办", [1.0] + [0.0] * 7)]},
    {"id": "jisuanji", "text": "", "chunks": [("计算机开不了机怎么办", [0.0, 1.0] + [0.0] * 6)]},
    {"id": "jisuan", "text": "", "chunks": [("计算机会成本的方法", [0.0, 0.0, 1.0] + [0.0] * 5)]},
    {"id": "pto", "text": "", "chunks": [("paid time off must be asked for", [0.0] * 3 + [1.0] + [0.0] * 4)]},
    {"id": "time", "text": "", "chunks": [("the time that is paid for", [0.0] * 4 + [1.0] + [0.0] * 3)]},
    {"id": "leave", "text": "", "chunks": [("annual leave must be asked for", [0.0] * 5 + [1.0, 0.0, 0.0])]},
    {"id": "other", "text": "", "chunks": [("nothing of the kind", [0.0] * 6 + [1.0, 0.0])]},
]
SET = rules("电脑, 计算机", "annual leave, paid time off", "k8s => kubernetes")
TEXT = {"routes": [{"kind": "text"}]}


@pytest.fixture
async def asker(cluster: Cluster) -> AsyncIterator[Asker]:
    collection = await make_collection(cluster, DOCUMENTS, dims=DIMS)
    collection = await catalog.put_synonyms(cluster, collection, SET)
    yield Asker(cluster, collection, StandIn(dims=DIMS))
    await drop_collection(cluster, collection)


@pytest.mark.node
@pytest.mark.parametrize(
    "query, found, missed",
    [
        ("电脑", {"diannao", "jisuanji"}, {"pto", "other"}),
        ("annual leave", {"leave", "pto"}, {"time", "diannao"}),
    ],
)
async def test_documents_are_found_by_a_synonym(
    asker: Asker, query: str, found: set[str], missed: set[str]
) -> None:
    answer = await asker.ask(query, **TEXT)
    assert found <= set(ids(answer))
    assert not missed & set(ids(answer))
    assert answer.rewrites is not None
    assert [told.of for told in answer.rewrites] == [query]
    without = await asker.ask(query, synonyms=False, **TEXT)
    assert without.rewrites is None
    assert len(set(ids(without)) & found) == 1


@pytest.mark.node
async def test_only_what_is_searched_for_is_told(asker: Asker) -> None:
    vector = {"routes": [{"kind": "vector"}]}
    assert (await asker.ask("annual leave", **vector)).rewrites is None
    other = {"routes": [{"kind": "text", "query": "电脑"}, {"kind": "vector"}]}
    told = (await asker.ask("annual leave", **other)).rewrites
    assert [(each.of, each.texts) for each in told or []] == [("电脑", ["计算机"])]
    before = asker.collection
    many = [f"term{at}" for at in range(20)]
    try:
        asker.collection = await catalog.put_synonyms(asker.cluster, before, rules(", ".join(["pc", *many])))
        answer = await asker.ask("pc", **TEXT)
        quiet = await asker.ask("pc", **vector)
    finally:
        asker.collection = await catalog.put_synonyms(asker.cluster, before, SET)
    [told_of] = answer.rewrites or []
    assert told_of.texts == many[: synonyms.MAX_WORDINGS]
    assert any("more wordings" in warning for warning in answer.warnings)
    assert not any("more wordings" in warning for warning in quiet.warnings)


@pytest.mark.node
async def test_the_words_asked_for_stand_above_their_synonyms(asker: Asker) -> None:
    assert ids(await asker.ask("电脑开不了机", **TEXT))[:2] == ["diannao", "jisuanji"]
    assert ids(await asker.ask("计算机开不了机", **TEXT))[:2] == ["jisuanji", "diannao"]
    assert ids(await asker.ask("annual leave must be asked for", **TEXT))[:2] == ["leave", "pto"]


@pytest.mark.node
@pytest.mark.parametrize("collapse", [True, False])
async def test_synonyms_are_marked_also_where_chunks_are_hits(asker: Asker, collapse: bool) -> None:
    answer = await asker.ask("annual leave", highlight=True, collapse=collapse, **TEXT)
    [pto] = [hit for hit in answer.hits if hit.id == "pto"]
    assert pto.highlights is not None
    assert pto.highlights["text"] == ["<em>paid time off</em> must be asked for"]


@pytest.mark.node
async def test_pages_keep_the_wording_of_the_first_whatever_the_set_becomes(asker: Asker) -> None:
    options: dict[str, Any] = {**PATIENT, "paging": True, "top_k": 1, **TEXT}
    whole = await asker.ask("annual leave", **{**options, "top_k": 10})
    first = await asker.ask("annual leave", **options)
    assert first.cursor is not None
    before = asker.collection
    try:
        asker.collection = await catalog.put_synonyms(asker.cluster, before, [])
        second = await asker.page(first.cursor)
    finally:
        asker.collection = await catalog.put_synonyms(asker.cluster, before, SET)
    assert ids(first) + ids(second) == ids(whole)[:2]
    assert set(ids(whole)) == {"leave", "pto"}
    assert second.rewrites == first.rewrites


@pytest.mark.node
async def test_why_sees_a_document_that_only_a_synonym_finds(asker: Asker) -> None:
    asked = Why.model_validate(
        {"collection": asker.collection.name, "query": "电脑", "id": "jisuanji", **PATIENT, **TEXT}
    )
    told = await why(asked, collection=asker.collection, doors=asker.doors, caller=Caller(), now_ms=NOW_MS)
    assert (told.routes["text"].matches, told.on_page) == (True, True)


@pytest.mark.node
async def test_filters_hold_for_what_synonyms_find(asker: Asker) -> None:
    hidden = [{"bool": {"must_not": [{"term": {"document_id": "pto"}}]}}]
    answer = await asker.ask("annual leave", forced=hidden, **TEXT)
    assert ids(answer) == ["leave"]
    assert answer.routes["text"].total is not None
    assert answer.routes["text"].total.value == 1


# --- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def service(node_url: str, embedding: EmbeddingServer) -> Iterator[Running]:
    settings = Settings(
        elasticsearch_url=node_url,
        elasticsearch_timeout_s=60,
        embedding_base_url=embedding.base_url,
        embedding_model="far-end",
        embedding_dims=DIMS,
        cursor_secret=SecretStr("of these tests"),
    )
    with serving(settings) as running:
        yield running


@pytest.fixture
def named(service: Running) -> Iterator[str]:
    name = f"synonyms_{uuid.uuid4().hex[:10]}"
    assert service.client.put(f"/v1/collections/{name}", json={"replicas": 0}).status_code == 200
    yield name
    service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


@pytest.mark.node
def test_a_set_is_stored_read_used_at_once_and_deleted(service: Running, named: str) -> None:
    client, path = service.client, f"/v1/collections/{named}/synonyms"
    stored = client.post(
        f"/v1/collections/{named}/documents",
        json={"documents": [{"id": "a", "text": "计算机开不了机"}], "refresh": "wait_for"},
    )
    assert stored.json()["failed"] == 0

    def found() -> httpx2.Response:
        body = {"collection": named, "query": "电脑", **TEXT}
        return client.post("/v1/search", json=body)

    assert client.get(path).json() == {"collection": named, "revision": 0, "synonyms_set": []}
    assert found().json()["hits"] == []
    given = {"synonyms_set": [{"id": "pc", "synonyms": "电脑, 计算机"}, "k8s => kubernetes"]}
    put = client.put(path, json=given)
    assert put.status_code == 200, put.text
    assert put.json()["synonyms_set"] == [
        {"synonyms": "电脑, 计算机", "id": "pc"},
        {"synonyms": "k8s => kubernetes"},
    ]
    assert client.get(path).json() == put.json()
    answer = found().json()
    assert [hit["id"] for hit in answer["hits"]] == ["a"]
    assert answer["rewrites"] == [
        {
            "source": "synonyms",
            "kind": "synonyms",
            "of": "电脑",
            "texts": ["计算机"],
            "rules": ["电脑, 计算机"],
        }
    ]
    # The set is asked for on its own: no collection's description carries it.
    assert "synonyms" not in client.get(f"/v1/collections/{named}").json()
    # Other changes to the collection leave it alone.
    profile = {"profiles": {"plain": {"decay": "off"}}}
    assert client.put(f"/v1/collections/{named}", json=profile).status_code == 200
    assert client.get(path).json()["synonyms_set"] == put.json()["synonyms_set"]
    assert client.delete(path).json()["synonyms_set"] == []
    assert found().json()["hits"] == []


@pytest.mark.node
@pytest.mark.parametrize(
    "body, field",
    [
        ({"synonyms_set": ["alone"]}, "synonyms_set[0].synonyms"),
        ({"synonyms_set": [{"id": "x", "synonyms": "a, b"}, {"id": "x", "synonyms": "c, d"}]}, "synonyms_set[1].id"),
        ({"synonyms_set": ["a, b"] * 2001}, "synonyms_set"),
        ({"synonyms": ["a, b"]}, "synonyms_set"),
    ],
)  # fmt: skip
def test_a_set_that_can_not_be_used_changes_nothing(
    service: Running, named: str, body: dict[str, Any], field: str
) -> None:
    answer = service.client.put(f"/v1/collections/{named}/synonyms", json=body)
    assert answer.status_code == 422
    assert answer.json()["field"] == field
    assert service.client.get(f"/v1/collections/{named}/synonyms").json()["synonyms_set"] == []


@pytest.mark.node
def test_a_collection_that_is_not_there_has_no_set(service: Running) -> None:
    for answer in (
        service.client.get("/v1/collections/nowhere/synonyms"),
        service.client.put("/v1/collections/nowhere/synonyms", json={"synonyms_set": []}),
    ):
        assert answer.status_code == 404


def test_a_set_is_bounded_in_characters() -> None:
    with pytest.raises(ValueError, match="100000 are the most"):
        SynonymSet.model_validate({"synonyms_set": ["a, " + "b " * 900] * 60})
