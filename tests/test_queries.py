"""Bodies, whole: each builder's dict with ==, and beside them the real node, which takes them and answers as told."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import queries
from app.collection import Collection
from app.elastic import Cluster
from app.times import DAY_MS, parse_instant, to_ms
from tests.nodes import run_once
from tests.searching import NOW_MS, Asker, drop_collection, ids, make_collection

AT = "2025-01-31T00:00:00.000Z"
VECTOR = [1.0, 0.0, 0.0]
MEASURES = ["cosine", "dot_product", "l2_norm", "max_inner_product"]

# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words, cut",
    [
        ("how long may I carry over leave?", "how long may I carry over leave?", False),
        ("  a\tb\n\nc  ", "a b c", False),
        ("leave leave Leave", "leave Leave", False),
        ("same " * 20_000, "same", False),
        (" ".join(f"w{at}" for at in range(1000)), " ".join(f"w{at}" for at in range(512)), True),
        ("语" * 600, "语" * 512, True),
        ("a " + "语" * 600, "a " + "语" * 511, True),
        ("x" * 10_000, "x" * 10_000, False),
        ("!!! ???", "!!! ???", False),
        ("/" * 600, "/" * 512, True),
        ("a/b/" * 300, ("a/b/" * 300)[:512], True),
        ("", "", False),
        ("AC/DC", "AC/DC", False),
        ("ｱｲｳ" * 400, ("ｱｲｳ" * 400)[:512], True),
    ],
    ids=lambda value: str(value)[:20],
)
def test_words_that_bm25_reads(text: str, words: str, cut: bool) -> None:
    assert queries.lexical_words(text) == (words, cut)


@pytest.mark.parametrize(
    "text, words",
    [
        ("when are salaries paid", "salaries paid"),
        ("How do I reset the password?", "reset password?"),
        ("the IT department (of the WHO)", "IT department WHO)"),
        ("The Who", "Who"),
        ("To be or not to be", "To be or not to be"),
        ("what is?", "what is?"),
        ("什么时候 发工资", "什么时候 发工资"),
        ("is 2026 a leap year", "2026 leap year"),
        ("what's the carry-over limit", "carry-over limit"),
        ("What’s the carry-over limit?", "carry-over limit?"),
        ("when's payday", "payday"),
        ("Who's in charge and where's the key", "charge key"),
        ("why can't I log in, and it's slow", "log slow"),
        ("I'm ill, how'd they've known", "ill, known"),
        ("'what's' won't build", "build"),
        ("the employee's leave", "employee's leave"),
        ("IT's budget", "IT's budget"),
        ("The Who's albums", "Who's albums"),
        ("IPhone's battery", "IPhone's battery"),
        ("", ""),
    ],
)
def test_function_words_are_left_out_where_others_stand(text: str, words: str) -> None:
    assert queries.content_words(text) == words


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("end to end encryption", "end to end encryption"),
        ("  day\tto day ", "day to day"),
        ("same " * 600, " ".join(["same"] * 512)),
        ("语" * 600, "语" * 512),
        ("", ""),
    ],
    ids=lambda value: value[:20],
)
def test_a_phrase_keeps_what_it_repeats(text: str, phrase: str) -> None:
    assert queries.phrase_words(text) == phrase
    should = queries.text_query(text)["bool"]["should"]
    assert [each["match_phrase"]["text"]["query"] for each in should if "match_phrase" in each] == [phrase]
    chunks = queries.chunk_words(text)["bool"]["should"]
    assert [each["match_phrase"]["chunks.text"]["query"] for each in chunks if "match_phrase" in each] == [
        phrase
    ]
    distinct = queries.content_words(queries.lexical_words(text)[0])
    assert should[0] == {"match": {"text": {"query": distinct}}}


@given(st.text(max_size=3000))
def test_words_never_grow_and_never_repeat(text: str) -> None:
    words, cut = queries.lexical_words(text)
    kept = words.split()
    assert len(words) <= len(text)
    assert len(kept) == len(set(kept)) <= queries.MAX_LEXICAL_TERMS
    assert cut or set(kept) == set(text.split())


# --- bodies ----------------------------------------------------------------------------------------------------------

TEXT_QUERY: dict[str, Any] = {
    "bool": {
        "should": [
            {"match": {"text": {"query": "carry over"}}},
            {"match": {"text.english": {"query": "carry over", "boost": 1.0}}},
            {"match": {"title": {"query": "carry over", "boost": 1.5}}},
            {"match": {"title.english": {"query": "carry over", "boost": 1.5}}},
            {"match": {"text.thai": {"query": "carry over"}}},
            {"match": {"title.thai": {"query": "carry over", "boost": 1.5}}},
            {"match_phrase": {"text": {"query": "carry over", "boost": 1.0}}},
        ],
        "minimum_should_match": 1,
    }
}


def test_text_query() -> None:
    assert queries.text_query("carry over") == TEXT_QUERY


def test_the_weight_of_titles_is_the_callers_to_give() -> None:
    for body in (
        queries.text_query("carry over", title_boost=4),
        queries.chunk_text_query("carry over", inner_hits=None, title_boost=4)["bool"],
    ):
        told = [
            clause["match"][field]["boost"]
            for clause in body.get("bool", body)["should"]
            for field in clause.get("match", {})
            if field.startswith("title")
        ]
        assert told == [4, 4 * queries.STEM_BOOST, 4]


def test_chunk_text_query() -> None:
    chunk: dict[str, Any] = {
        "path": "chunks",
        "query": {
            "bool": {
                "should": [
                    {"match": {"chunks.text": {"query": "carry over"}}},
                    {"match": {"chunks.text.english": {"query": "carry over", "boost": 1.0}}},
                    {"match": {"chunks.text.thai": {"query": "carry over"}}},
                    {"match_phrase": {"chunks.text": {"query": "carry over", "boost": 1.0}}},
                ]
            }
        },
        "score_mode": "max",
    }
    titles = [
        {"match": {"title": {"query": "carry over", "boost": 1.5}}},
        {"match": {"title.english": {"query": "carry over", "boost": 1.5}}},
        {"match": {"title.thai": {"query": "carry over", "boost": 1.5}}},
    ]
    assert queries.chunk_text_query("carry over", inner_hits=None) == {
        "bool": {"should": [{"nested": chunk}, *titles], "minimum_should_match": 1}
    }
    assert queries.chunk_text_query("carry over", inner_hits={"size": 5}) == {
        "bool": {
            "should": [{"nested": {**chunk, "inner_hits": {"size": 5}}}, *titles],
            "minimum_should_match": 1,
        }
    }


def test_vector_query() -> None:
    assert queries.vector_query(VECTOR, k=10, num_candidates=5, filters=[]) == {
        "nested": {
            "path": "chunks",
            "query": {
                "knn": {"field": "chunks.embedding", "query_vector": VECTOR, "k": 10, "num_candidates": 10}
            },
            "score_mode": "max",
        }
    }
    lang = {"term": {"lang": "en"}}
    assert queries.vector_query(
        VECTOR, k=10, num_candidates=50, filters=[lang], similarity=0.0, inner_hits={"_source": False}
    ) == {
        "nested": {
            "path": "chunks",
            "query": {
                "knn": {
                    "field": "chunks.embedding",
                    "query_vector": VECTOR,
                    "k": 10,
                    "num_candidates": 50,
                    "filter": [lang],
                    "similarity": 0.0,
                }
            },
            "score_mode": "max",
            "inner_hits": {"_source": False},
        }
    }


def test_a_named_query_keeps_its_own_score() -> None:
    assert queries.named({"match_all": {}}, "base") == {
        "bool": {"must": [{"match_all": {}}], "_name": "base"}
    }


def test_standing_filters() -> None:
    assert queries.created_by(NOW_MS) == {"bool": {"must_not": [{"range": {"creation_time": {"gt": AT}}}]}}
    assert queries.not_expired(NOW_MS) == {"bool": {"must_not": [{"range": {"expires_at": {"lte": AT}}}]}}
    assert queries.true_at(NOW_MS) == {
        "bool": {"must_not": [{"range": {"start_date": {"gt": AT}}}, {"range": {"end_date": {"lte": AT}}}]}
    }


def test_the_window_of_a_fresh_route() -> None:
    assert queries.within(["updated_at"], origin_ms=NOW_MS, window_ms=30 * DAY_MS) == {
        "range": {"updated_at": {"lte": AT, "gte": "2025-01-01T00:00:00.000Z"}}
    }
    assert queries.within(["updated_at"], origin_ms=NOW_MS, window_ms=10**17) == {
        "range": {"updated_at": {"lte": AT, "gte": "0001-01-01T00:00:00.000Z"}}
    }
    inside = {"lte": AT, "gte": "2025-01-01T00:00:00.000Z"}
    assert queries.within(["last_accessed_at", "creation_time"], origin_ms=NOW_MS, window_ms=30 * DAY_MS) == {
        "bool": {
            "should": [
                {"bool": {"filter": [{"range": {"last_accessed_at": inside}}], "must_not": []}},
                {
                    "bool": {
                        "filter": [{"range": {"creation_time": inside}}],
                        "must_not": [{"range": {"last_accessed_at": {"lte": AT}}}],
                    }
                },
            ]
        }
    }


def test_what_ties_put_first() -> None:
    smaller = {"range": {"document_id": {"lt": "b"}}}
    dated = {"exists": {"field": "creation_time"}}
    assert queries.before(NOW_MS, "b") == {
        "bool": {
            "should": [
                {"range": {"creation_time": {"gt": AT}}},
                {"bool": {"filter": [{"range": {"creation_time": {"gte": AT, "lte": AT}}}, smaller]}},
            ]
        }
    }
    assert queries.before(None, "b") == {
        "bool": {"should": [dated, {"bool": {"must_not": [dated], "filter": [smaller]}}]}
    }


def test_the_factor_is_told_beside_the_score() -> None:
    functions = [{"filter": {"match_all": {}}, "weight": 0.5}]
    assert queries.with_factor({"match_all": {}}, functions) == {
        "bool": {
            "must": [{"match_all": {}}],
            "should": [
                {
                    "bool": {
                        "should": [
                            {
                                "function_score": {
                                    "query": {"match_all": {}},
                                    "functions": functions,
                                    "score_mode": "sum",
                                    "boost_mode": "replace",
                                    "_name": "factor",
                                }
                            }
                        ],
                        "boost": 0,
                    }
                }
            ],
        }
    }


@pytest.mark.parametrize("encoder", ["html", "default"])
def test_highlight(encoder: str) -> None:
    assert queries.highlight("carry over", encoder=encoder) == {
        "type": "unified",
        "encoder": encoder,
        "pre_tags": ["<em>"],
        "post_tags": ["</em>"],
        "order": "score",
        "max_analyzed_offset": 1_000_000,
        "require_field_match": True,
        "highlight_query": TEXT_QUERY,
        "fields": {
            "title": {"number_of_fragments": 0, "matched_fields": ["title", "title.english", "title.thai"]},
            "text": {
                "number_of_fragments": 3,
                "fragment_size": 160,
                "matched_fields": ["text", "text.english", "text.thai"],
            },
        },
    }


# --- measures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "measure, cosine, score",
    [
        ("cosine", 1, 1), ("cosine", 0, 0.5), ("cosine", -1, 0), ("cosine", 0.75, 0.875),
        ("dot_product", 1, 1), ("dot_product", 0, 0.5), ("dot_product", -1, 0),
        ("l2_norm", 1, 1), ("l2_norm", 0, 1 / 3), ("l2_norm", -1, 1 / 5), ("l2_norm", 0.5, 1 / 2),
        ("max_inner_product", 1, 2), ("max_inner_product", 0, 1), ("max_inner_product", -1, 1 / 2),
        ("max_inner_product", 0.5, 1.5), ("max_inner_product", -0.5, 1 / 1.5),
    ],
)  # fmt: skip
def test_the_cosine_behind_a_score(measure: str, cosine: float, score: float) -> None:
    assert queries.cosine_of(score, measure) == pytest.approx(cosine, abs=1e-12)


def test_a_score_of_nothing_is_the_opposite() -> None:
    assert queries.cosine_of(0.0, "l2_norm") == -1


@pytest.mark.parametrize("measure", MEASURES)
def test_the_threshold_rises_with_the_cosine_whatever_the_measure(measure: str) -> None:
    # What is compared is the measure's own number: for L2 a distance, where less is nearer.
    thresholds = [queries.threshold(cosine / 10, measure) for cosine in range(11)]
    nearer = thresholds[::-1] if measure == "l2_norm" else thresholds
    assert nearer == sorted(nearer)
    assert len(set(thresholds)) == 11


def test_the_threshold_takes_in_what_equals_it_up_to_the_stored_precision() -> None:
    assert queries.threshold(0.75, "cosine") == pytest.approx(0.75, abs=2e-6)
    assert queries.threshold(0.75, "cosine") < 0.75
    assert queries.threshold(0.75, "l2_norm") == pytest.approx(math.sqrt(0.5), abs=2e-6)
    assert queries.threshold(0.75, "l2_norm") > math.sqrt(0.5)
    assert queries.threshold(1, "l2_norm") == pytest.approx(0.0, abs=2e-3)


# --- the node takes them ---------------------------------------------------------------------------------------------

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "title": "Leave", "text": "How leave is carried over", "embedding": [1, 0, 0], "creation_time": "2025-01-30"},
    {"id": "b", "title": "Carry", "text": "nothing here", "embedding": [1, 1, 0], "creation_time": "2025-01-30"},
    {"id": "c", "text": "carry over", "embedding": [0, 1, 0], "creation_time": "2024-01-01", "updated_at": "2025-01-20"},
    {"id": "d", "text": "年假可以结转到下一年", "embedding": [-1, 0, 0], "creation_time": "2026-01-01"},
    {"id": "e", "text": "expired carry", "embedding": [1, 0, 1], "expires_at": "2025-01-31"},
    {"id": "f", "text": "not yet carry", "embedding": [1, 0, 2], "start_date": "2025-01-31T00:00:00.001Z"},
    {"id": "g", "text": "no more carry", "embedding": [1, 0, 3], "end_date": "2025-01-31"},
    {"id": "h", "text": "just now carry", "embedding": [1, 0, 4], "start_date": "2025-01-31", "end_date": "2025-02-01"},
    {"id": "i", "chunks": [("first carry", [0, 0, 1]), ("second thing", [0, 1, 1]), ("third", [1, 3, 0])]},
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(node_url: str) -> Iterator[Collection]:
    collection = run_once(node_url, lambda cluster: make_collection(cluster, DOCUMENTS, dims=3))
    yield collection
    run_once(node_url, lambda cluster: drop_collection(cluster, collection))


async def found(
    cluster: Cluster, collection: Collection, query: dict[str, Any], **body: Any
) -> dict[str, Any]:
    """Return id -> hit, in the cluster's order."""
    answer = await cluster.search(
        f"halflife-{collection.name}", {"size": 20, "query": query, "_source": False, **body}, timeout_s=60
    )
    assert answer["_shards"]["failed"] == 0
    return {hit["_id"]: hit for hit in answer["hits"]["hits"]}


@pytest.mark.node
async def test_node_words(cluster: Cluster, corpus: Collection) -> None:
    hits = await found(cluster, corpus, queries.named(queries.text_query("carry over"), "base"))
    assert set(hits) == {"a", "b", "c", "e", "f", "g", "h", "i"}, "'carried' by its stem, 'Carry' by title"
    assert all(hit["matched_queries"]["base"] == hit["_score"] for hit in hits.values())
    assert set(await found(cluster, corpus, queries.text_query("结转"))) == {"d"}
    assert set(await found(cluster, corpus, queries.text_query("!!! ???"))) == set()
    chunks = await found(cluster, corpus, queries.chunk_text_query("carry", inner_hits={"_source": False}))
    assert "i" in chunks
    inner = chunks["i"]["inner_hits"]["chunks"]["hits"]["hits"]
    assert [chunk["_nested"]["offset"] for chunk in inner] == [0]
    # 'b' says it in its title alone, which no chunk tells.
    assert chunks["b"]["inner_hits"]["chunks"]["hits"]["hits"] == []


@pytest.mark.node
async def test_node_a_phrase_with_a_word_twice(made: Any) -> None:
    given = [
        {"id": "apart", "text": "end to encryption", "embedding": [1, 0, 0]},
        {"id": "phrase", "text": "its end to end encryption of mail", "embedding": [1, 0, 0]},
        {"id": "other", "text": "of keys", "embedding": [1, 0, 0]},
    ]
    asker: Asker = await made(given, shards=1)
    for collapse in (True, False):
        answer = await asker.ask(
            "end to end encryption", routes=[{"kind": "text"}], decay="off", collapse=collapse
        )
        assert ids(answer) == ["phrase", "apart"]


@pytest.mark.node
async def test_node_thai_titles(cluster: Cluster, made: Any) -> None:
    given = [
        {"id": "title", "title": "นโยบายวันลา", "text": "five days", "embedding": [1, 0, 0]},
        {"id": "both", "title": "นโยบายวันลา", "text": "ปรับการปฏิบัติงานโดยรวม", "embedding": [1, 0, 0]},
        {"id": "other", "title": "ที่จอดรถ", "text": "yard", "embedding": [1, 0, 0]},
    ]
    asker: Asker = await made(given, shards=1)
    collection = asker.collection
    body = queries.highlight("วันลา", encoder="default")
    hits = await found(cluster, collection, queries.text_query("วันลา"), highlight=body)
    assert set(hits) == {"title", "both"}
    assert hits["title"]["highlight"] == {"title": ["นโยบาย<em>วัน</em><em>ลา</em>"]}
    assert set(await found(cluster, collection, {"bool": {"should": queries.holding(["วันลา"])}})) == set(hits)
    # Chunks have their document's title.
    chunks = await found(cluster, collection, queries.chunk_text_query("งาน วันลา", inner_hits=None))
    assert list(chunks) == ["both", "title"]
    # A run without spaces costs what its words may be, so that no query has more clauses than a cluster takes.
    long = "นโยบายวันลา" * 2000
    assert queries.lexical_words(long)[1]
    assert set(await found(cluster, collection, queries.text_query(long))) == {"title", "both"}


@pytest.mark.node
async def test_node_vectors(cluster: Cluster, corpus: Collection) -> None:
    hits = await found(cluster, corpus, queries.vector_query(VECTOR, k=20, num_candidates=20, filters=[]))
    assert len(hits) == 9
    assert [hits["a"]["_score"], hits["b"]["_score"], hits["d"]["_score"]] == pytest.approx(
        [1, (1 + math.sqrt(0.5)) / 2, 0], abs=1e-6
    )
    # The best chunk counts.
    assert hits["i"]["_score"] == pytest.approx((1 + 1 / math.sqrt(10)) / 2, abs=1e-6)
    two = await found(cluster, corpus, queries.vector_query(VECTOR, k=2, num_candidates=2, filters=[]))
    assert (len(two), next(iter(two))) == (2, "a")
    filtered = queries.vector_query(
        VECTOR,
        k=2,
        num_candidates=2,
        filters=[{"ids": {"values": ["d", "g", "c"]}}],
        inner_hits={"_source": False},
    )
    hits = await found(cluster, corpus, filtered)
    assert list(hits) == ["g", "c"], "a pre-filter: two of the three, not what is left of the two nearest"
    assert hits["g"]["inner_hits"]["chunks"]["hits"]["total"]["value"] == 1


@pytest.mark.node
async def test_node_filters(cluster: Cluster, corpus: Collection) -> None:
    everything = set("abcdefghi")

    async def kept(clause: dict[str, Any]) -> set[str]:
        return set(await found(cluster, corpus, {"bool": {"filter": [clause]}}))

    assert await kept(queries.created_by(NOW_MS)) == everything - {"d"}
    assert await kept(queries.not_expired(NOW_MS)) == everything - {"e"}
    assert await kept(queries.true_at(NOW_MS)) == everything - {"f", "g"}
    assert await kept(queries.within(["creation_time"], origin_ms=NOW_MS, window_ms=DAY_MS)) == {"a", "b"}
    assert await kept(queries.within(["updated_at"], origin_ms=NOW_MS, window_ms=30 * DAY_MS)) == {"c"}
    january30 = to_ms(parse_instant("2025-01-30"))
    assert await kept(queries.before(january30, "b")) == {"a", "d"}
    assert await kept(queries.before(january30, "a")) == {"d"}
    assert await kept(queries.before(None, "g")) == {"a", "b", "c", "d", "e", "f"}


@pytest.mark.node
async def test_node_factor(cluster: Cluster, corpus: Collection) -> None:
    functions = [{"filter": {"term": {"document_id": "a"}}, "weight": 0.25}]
    plain = queries.text_query("carry")
    hits = await found(cluster, corpus, queries.with_factor(plain, functions))
    before = await found(cluster, corpus, plain)
    assert {i: hit["_score"] for i, hit in hits.items()} == {i: hit["_score"] for i, hit in before.items()}
    assert hits["a"]["matched_queries"]["factor"] == 0.25


@pytest.mark.node
@pytest.mark.parametrize("measure", MEASURES)
async def test_node_cosine_of_every_measure(cluster: Cluster, made: Any, measure: Any) -> None:
    rng = np.random.default_rng(5)
    vectors = {f"v{at:02d}": [float(x) for x in rng.normal(size=8)] for at in range(30)}
    given_ = [{"id": name, "text": name, "embedding": vector} for name, vector in vectors.items()]
    asker: Asker = await made(given_, dims=8, similarity=measure)
    query = np.asarray(vectors["v00"]) / np.linalg.norm(vectors["v00"])
    body = queries.vector_query(query.tolist(), k=30, num_candidates=30, filters=[])
    hits = await found(cluster, asker.collection, body, size=30)
    cosines = {name: float(query @ (np.asarray(v) / np.linalg.norm(v))) for name, v in vectors.items()}
    for name, hit in hits.items():
        assert queries.cosine_of(hit["_score"], measure) == pytest.approx(cosines[name], abs=2e-6)
    assert list(hits) == sorted(cosines, key=lambda name: -cosines[name])
