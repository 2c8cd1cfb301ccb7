"""The files of es_mappings/: as Elasticsearch takes them, in step with app/fields.py, and what their analysis does."""

import json
import re
from pathlib import Path

import pytest

from app import catalog, fields, names
from app.elastic import BulkAction
from app.errors import ClusterRejected
from tests.nodes import written

FOLDER = Path(__file__).resolve().parent.parent / "es_mappings"
MAPPING = json.loads((FOLDER / "halflife-mappings.json").read_text("utf-8"))["template"]["mappings"]
ANALYSIS = json.loads((FOLDER / "halflife-mappings.json").read_text("utf-8"))["template"]["settings"][
    "analysis"
]


def leaves(properties: dict, prefix: str = "") -> dict[str, str]:
    """Return the full name and type of every field, multi-fields and objects included."""
    found = {}
    for name, body in properties.items():
        found[prefix + name] = body.get("type", "object")
        found |= leaves(body.get("properties", {}), f"{prefix}{name}.")
        found |= leaves(body.get("fields", {}), f"{prefix}{name}.")
    return found


# --- the files and the Python side


def test_every_shipped_template_is_installed_and_nothing_else_lies_there():
    assert {path.stem for path in FOLDER.glob("*.json")} == {
        *catalog.COMPONENTS,
        catalog.INDEX_TEMPLATE,
        *catalog.OWN_TEMPLATES,
    }


@pytest.mark.parametrize("name", [*catalog.COMPONENTS, catalog.INDEX_TEMPLATE, *catalog.OWN_TEMPLATES])
def test_each_file_carries_its_version_and_tells_what_it_is(name):
    body = catalog.shipped(name)
    assert isinstance(body["version"], int)
    assert body["_meta"]["description"].startswith("Halflife: ")
    assert body["_meta"]["halflife"] == {"version": body["version"]}


def test_the_mapping_says_its_own_version():
    shipped = catalog.shipped(catalog.MAPPINGS)
    assert shipped["template"]["mappings"]["_meta"]["halflife"]["template_version"] == shipped["version"]


def test_every_reserved_field_is_mapped_with_its_type():
    mapped = leaves(MAPPING["properties"])
    wanted = {fields.indexed_name(name): kind for name, kind in fields.RESERVED.items()}
    assert {name: mapped.get(name) for name in wanted} == wanted


def test_every_name_written_in_python_is_mapped():
    constants = {value for name, value in vars(fields).items() if name.isupper() and isinstance(value, str)}
    assert constants - set(leaves(MAPPING["properties"])) == set()


def test_every_mapped_field_is_written_in_python():
    known = {
        value for name, value in vars(fields).items() if name.isupper() and isinstance(value, str)
    } | set(fields.KEYWORDS)
    subfields = re.compile(r".*\.(english|thai)")
    assert {name for name in leaves(MAPPING["properties"]) if not subfields.fullmatch(name)} - known == set()


def test_each_level_of_the_mapping_is_closed():
    assert MAPPING["dynamic"] == "strict"
    assert MAPPING["properties"]["chunks"]["dynamic"] == "strict"
    assert MAPPING["properties"]["declared"]["dynamic"] == "strict"


def test_text_fields_are_analyzed_alike():
    title, text, chunk = (
        MAPPING["properties"]["title"],
        MAPPING["properties"]["text"],
        MAPPING["properties"]["chunks"]["properties"]["text"],
    )
    assert text == chunk
    assert {**title, "fields": {k: v for k, v in title["fields"].items() if k != "raw"}} == text


def test_only_components_of_the_stock_distribution_are_used():
    stock = {
        "char_filter": {"pattern_replace"},
        "filter": {
            "cjk_bigram",
            "pattern_capture",
            "keep_types",
            "stemmer",
            "keyword_marker",
            "word_delimiter_graph",
        },
    }
    for kind, allowed in stock.items():
        assert {body["type"] for body in ANALYSIS[kind].values()} <= allowed
    built_in = {
        "cjk_width",
        "lowercase",
        "asciifolding",
        "flatten_graph",
        "remove_duplicates",
        "decimal_digit",
    }
    for analyzer in ANALYSIS["analyzer"].values():
        assert analyzer["tokenizer"] in {"standard", "thai"}
        assert set(analyzer["filter"]) <= built_in | set(ANALYSIS["filter"])


def test_dims_and_similarity_are_laid_over_and_the_file_stays_as_it_is():
    laid = catalog.templates(dims=1024, similarity="dot_product")[catalog.MAPPINGS]
    vector = laid["template"]["mappings"]["properties"]["chunks"]["properties"]["embedding"]
    assert (vector["dims"], vector["similarity"], vector["index_options"]["type"]) == (
        1024,
        "dot_product",
        "int8_hnsw",
    )
    assert MAPPING["properties"]["chunks"]["properties"]["embedding"]["dims"] == 384


# --- on a real node


@pytest.fixture
async def collection(cluster, unique, now):
    """A collection with vectors of three dims and two declared fields."""
    from app.collection import CollectionOptions

    await catalog.install_templates(cluster, dims=384)
    options = CollectionOptions(
        dims=3,
        declared={"pages": "long", "due": "date", "kind": "keyword", "ratio": "double", "done": "boolean"},
    )
    return await catalog.create(cluster, unique(), options, dims=384, model=None, moment=now)


@pytest.fixture
def now():
    from datetime import UTC, datetime

    return datetime.now(UTC)


@pytest.mark.node
@pytest.mark.parametrize("name", [*catalog.COMPONENTS, catalog.INDEX_TEMPLATE, *catalog.OWN_TEMPLATES])
async def test_kibana_would_take_the_file_as_it_is(cluster, name):
    body = catalog.shipped(name)
    if name not in catalog.COMPONENTS:
        for component in catalog.COMPONENTS:
            await cluster.put_component_template(component, catalog.shipped(component))
        await cluster.put_index_template(name, body)
        assert (await cluster.get_index_template(name))["version"] == body["version"]
    else:
        await cluster.put_component_template(name, body)
        assert (await cluster.get_component_template(name))["version"] == body["version"]


@pytest.mark.node
async def test_settings_of_a_new_index(cluster, collection):
    settings = (await cluster.get_settings(collection.index))[collection.index]
    wanted = {
        "index.number_of_shards": "1",
        "index.auto_expand_replicas": "0-1",
        "index.refresh_interval": "1s",
        "index.translog.durability": "request",
        "index.mapping.nested_objects.limit": "50000",
        "index.max_inner_result_window": "10000",
        "index.search.slowlog.include.user": "true",
        "index.indexing.slowlog.include.user": "true",
        "index.indexing.slowlog.source": "false",
    }
    assert {key: settings.get(key) for key in wanted} == wanted


@pytest.mark.node
async def test_the_whole_mapping_reaches_a_new_index(cluster, collection):
    mapping = (await cluster.get_mapping(collection.index))[collection.index]
    wanted = {**leaves(MAPPING["properties"]), "declared.pages": "long", "declared.due": "date", "declared.kind": "keyword",
              "declared.ratio": "double", "declared.done": "boolean"}  # fmt: skip
    assert leaves(mapping["properties"]) == wanted
    assert (
        mapping["dynamic"]
        == mapping["properties"]["chunks"]["dynamic"]
        == mapping["properties"]["declared"]["dynamic"]
        == "strict"
    )
    assert mapping["properties"]["chunks"]["properties"]["embedding"]["index_options"]["type"] == "int8_hnsw"


ANALYZED = {
    # text -> (index analyzer, search analyzer, english index, english search)
    "chinese": ("京东商城", "京 京东 东 东商 商 商城 城", "京东 东商 商城", "", ""),
    "one character": ("大", "大", "大", "", ""),
    "characters apart": ("大 小", "大 小", "大 小", "", ""),
    "kana": ("データ設計", "デ デー ー ータ タ タ設 設 設計 計", "デー ータ タ設 設計", "", ""),
    "half-width kana": ("ﾃﾞｰﾀ", "デ デー ー ータ タ", "デー ータ", "", ""),
    "hangul": ("검색엔진", "검 검색 색 색엔 엔 엔진 진", "검색 색엔 엔진", "", ""),
    "full width": ("ＡＢＣ１２３", "abc123", "abc123", "abc123", "abc123"),
    "mixed": ("请假policy", "请 请假 假 policy", "请假 policy", "polici", "polici"),
    "emoji": ("launch 😀", "launch 😀", "launch 😀", "launch", "launch"),
    "accents": ("Café naïve", "cafe naive", "cafe naive", "cafe naiv", "cafe naiv"),
    "stems": ("running policies", "running policies", "running policies", "run polici", "run polici"),
    "possessives": (
        "company's firm’s",
        "company's firm's",
        "company's firm's",
        "compani firm",
        "compani firm",
    ),
    "negation": ("don't", "don't", "don't", "don't", "don't"),
    "cve": ("CVE-2021-1234", "cve 2021 1234", "cve 2021 1234", "cve 2021 1234", "cve 2021 1234"),
    "version": ("v7.1.2", "v7.1.2 7.1.2 7.1", "v7.1.2 7.1.2", "v7.1.2", "v7.1.2"),
    "version of two parts": ("7.1", "7.1", "7.1", "7.1", "7.1"),
    "version of four parts": ("10.2.0.1", "10.2.0.1 10.2 10.2.0", "10.2.0.1", "10.2.0.1", "10.2.0.1"),
    "release candidate": ("1.0.0rc1", "1.0.0rc1 1.0.0 1.0", "1.0.0rc1", "1.0.0rc1", "1.0.0rc1"),
    "snake case": (
        "max_connections",
        "max_connections",
        "max_connections",
        "max_connect max connect",
        "max connect",
    ),
    "camel case": (
        "maxConnections",
        "maxconnections",
        "maxconnections",
        "maxconnect max connect",
        "maxconnect",
    ),
    "product name": ("TiDB", "tidb", "tidb", "tidb ti db", "tidb"),
    "slash": ("AC/DC", "ac dc", "ac dc", "ac dc", "ac dc"),
    "host": ("example.com", "example.com", "example.com", "example.com exampl com", "exampl com"),
    "nothing": ("!!! ??? /", "", "", "", ""),
}


@pytest.mark.node
@pytest.mark.parametrize("case", ANALYZED)
async def test_tokenization_table(cluster, shape, case):
    text, *wanted = ANALYZED[case]
    analyzers = ("halflife_text", "halflife_text_search", "halflife_english", "halflife_english_search")
    found = [await cluster.analyze(shape, {"analyzer": name, "text": text}) for name in analyzers]
    assert [" ".join(token["token"] for token in tokens) for tokens in found] == wanted


@pytest.mark.node
async def test_tokenization_thai_words_and_nothing_else(cluster, shape):
    tokens = await cluster.analyze(
        shape, {"analyzer": "halflife_thai", "text": "hello ปรับการปฏิบัติงานโดยรวม 世界"}
    )
    assert [token["token"] for token in tokens] == ["ปรับ", "การ", "ปฏิบัติ", "งาน", "โดย", "รวม"]
    # Offsets point into the text as it was, so that highlights mark the right letters.
    assert (tokens[0]["start_offset"], tokens[0]["end_offset"]) == (6, 10)
    assert await cluster.analyze(shape, {"analyzer": "halflife_thai", "text": "plain words, 世界"}) == []


@pytest.fixture
async def shape(cluster, collection):
    """The read alias of a collection."""
    return names.read_alias(collection.name)


def text_query(query: str) -> dict:
    """The least that a text route must do: all text fields, the best of them counts."""
    spaces = [f"{name}{sub}" for name in (fields.TITLE, fields.TEXT) for sub in ("", ".english", ".thai")]
    return {
        "query": {"multi_match": {"query": query, "fields": spaces, "type": "best_fields"}},
        "size": 10,
        "_source": False,
    }


async def found(cluster, shape: str, query: str) -> list[str]:
    answer = await cluster.search(shape, text_query(query), timeout_s=10)
    return [hit["_id"] for hit in answer["hits"]["hits"]]


async def store(cluster, collection, documents: dict[str, dict]) -> dict:
    """Index documents as they are and return the outcomes by id."""
    alias = (await written(cluster, collection.name)).alias
    actions = [BulkAction(alias, id_, 1, {"document_id": id_, **source}) for id_, source in documents.items()]
    return dict(zip(documents, await cluster.bulk(actions, refresh="true", timeout_s=20), strict=True))


@pytest.mark.node
async def test_tokenization_finds_words_of_each_script(cluster, collection, shape):
    texts = {
        "jd": "京东商城发货",
        "tokyo": "东京大学",
        "thai": "ปรับการปฏิบัติงานโดยรวม",
        "ja": "データベースの設計",
        "ko": "검색엔진 최적화",
        "full": "ＫＥＹＢＯＡＲＤ ﾃﾞｰﾀ",
        "version": "TiDB v7.1.2 release notes",
        "other version": "TiDB 7.5.0 release notes",
        "config": "set max_connections to 100",
        "cve": "fixes CVE-2021-1234",
        "other cve": "fixes CVE-2021-9999",
        "en": "Employees may carry over their unused holidays",
    }
    await store(cluster, collection, {key: {"text": value} for key, value in texts.items()})
    assert await found(cluster, shape, "京东") == ["jd"]
    assert await found(cluster, shape, "东京") == ["tokyo"]
    assert await found(cluster, shape, "大") == ["tokyo"]
    assert await found(cluster, shape, "โดยรวม") == ["thai"]
    assert await found(cluster, shape, "ปรับ") == ["thai"]
    assert set(await found(cluster, shape, "データ")) == {"ja", "full"}
    assert await found(cluster, shape, "エンジン") == []
    assert await found(cluster, shape, "검색") == ["ko"]
    assert await found(cluster, shape, "keyboard") == ["full"]
    assert (await found(cluster, shape, "tidb v7.1.2"))[0] == "version"
    assert await found(cluster, shape, "7.1") == ["version"]
    assert await found(cluster, shape, "7.5.0") == ["other version"]
    assert await found(cluster, shape, "connections") == ["config"]
    assert await found(cluster, shape, "MAX_CONNECTIONS") == ["config"]
    assert await found(cluster, shape, "cve-2021-1234") == ["cve", "other cve"]
    assert await found(cluster, shape, "employee holiday") == ["en"]


QUERIES = {
    "AC/DC": ["slash"],
    "a+b AND (": [],
    "foo:bar": [],
    '"unclosed': [],
    "*": [],
    "_exists_:text": [],
    "[1 TO": [],
    "介绍+": [],
    "a~100000": [],
    "NOT plain": ["other"],
    "\\": [],
    "!!! ???": [],
    "😀": ["em"],
    "/": [],
}


@pytest.mark.node
async def test_query_text_is_words_never_syntax(cluster, collection, shape):
    await store(
        cluster,
        collection,
        {
            "slash": {"text": "AC/DC live"},
            "em": {"text": "launch 😀 today"},
            "other": {"text": "plain words"},
        },
    )
    assert {query: await found(cluster, shape, query) for query in QUERIES} == QUERIES


@pytest.mark.node
async def test_query_text_of_one_very_long_run_finds_nothing_and_harms_nothing(cluster, collection, shape):
    await store(cluster, collection, {"x": {"text": "plain words"}})
    assert await found(cluster, shape, "q" * 100_000) == []


@pytest.mark.node
async def test_metadata_mapping_takes_any_order_of_any_types_and_never_grows(cluster, collection, shape):
    sequence = [
        {"page": 1}, {"page": "three"}, {"page": {"n": 1}}, {"page": True}, {"d": "2024-01-01"}, {"d": "n/a"}, {"a": 1}, {"a.b": 2},
        {"": 1}, {".": 1}, {" ": 1}, {"mix": [1, "a"]}, {"big": 10_000_000_000_000_000_000},
    ]  # fmt: skip
    before = await cluster.get_mapping(collection.index)
    outcomes = await store(
        cluster, collection, {f"d{number}": {"metadata": value} for number, value in enumerate(sequence, 1)}
    )
    assert {outcome.fate for outcome in outcomes.values()} == {"applied"}
    hits = await cluster.search(
        shape, {"query": {"term": {"metadata.page": "three"}}, "_source": False}, timeout_s=10
    )
    assert [hit["_id"] for hit in hits["hits"]["hits"]] == ["d2"]
    stored = await cluster.mget(
        shape, [f"d{number}" for number in range(1, 14)], source=["metadata"], timeout_s=10
    )
    assert [entry["_source"]["metadata"] for entry in stored] == sequence
    assert await cluster.get_mapping(collection.index) == before


@pytest.mark.node
async def test_metadata_mapping_has_limits_that_hit_one_document_alone(cluster, collection, shape):
    def nested(levels: int) -> dict:
        value: dict | str = "leaf"
        for _ in range(levels):
            value = {"d": value}
        return value  # type: ignore[return-value]

    before = await cluster.get_mapping(collection.index)
    outcomes = await store(
        cluster,
        collection,
        {
            "many": {"metadata": {f"key{number}": number for number in range(1001)}},
            "deep16": {"metadata": nested(16)},
            "deep25": {"metadata": nested(25)},
            "immense": {"metadata": {"k": "z" * 40_000}},
            "long300": {"metadata": {"k": "y" * 300}},
            "plain": {"metadata": {"k": "v"}},
        },
    )
    assert {key: outcome.fate for key, outcome in outcomes.items()} == {
        "many": "applied", "deep16": "applied", "deep25": "refused", "immense": "applied", "long300": "applied", "plain": "applied",
    }  # fmt: skip
    hits = await cluster.search(
        shape, {"query": {"term": {"metadata.k": "y" * 300}}, "_source": False}, timeout_s=10
    )
    assert [hit["_id"] for hit in hits["hits"]["hits"]] == ["long300"]
    assert await cluster.get_mapping(collection.index) == before


@pytest.mark.node
@pytest.mark.parametrize(
    "source,kind",
    [
        ({"surprise": 1}, "strict_dynamic_mapping_exception"),
        ({"chunks": [{"text": "x", "surprise": 1}]}, "strict_dynamic_mapping_exception"),
        ({"declared": {"surprise": 1}}, "strict_dynamic_mapping_exception"),
        ({"declared": {"pages": "many"}}, "document_parsing_exception"),
        ({"creation_time": "nope"}, "document_parsing_exception"),
        ({"chunks": [{"embedding": [0, 0, 0]}]}, "document_parsing_exception"),
        ({"chunks": [{"embedding": [1, 2]}]}, "document_parsing_exception"),
    ],
    ids=["top level", "chunk", "declared", "declared type", "date", "zero vector", "wrong dims"],
)
async def test_what_does_not_fit_is_refused_per_document(cluster, collection, source, kind):
    outcomes = await store(cluster, collection, {"bad": source, "good": {"text": "fine"}})
    assert (outcomes["bad"].fate, outcomes["bad"].error_type) == ("refused", kind)
    assert outcomes["good"].fate == "applied"
    assert isinstance(outcomes["bad"].error("storing"), ClusterRejected)


@pytest.mark.node
async def test_declared_fields_take_ranges(cluster, collection, shape):
    await store(
        cluster,
        collection,
        {
            "short": {"declared": {"pages": 9, "due": "2026-01-01T00:00:00.000Z"}},
            "long": {"declared": {"pages": 1000, "due": "2026-06-01T00:00:00.000Z"}},
        },
    )
    for clause in ({"declared.pages": {"gt": 9}}, {"declared.due": {"gte": "2026-02-01"}}):
        answer = await cluster.search(shape, {"query": {"range": clause}, "_source": False}, timeout_s=10)
        assert [hit["_id"] for hit in answer["hits"]["hits"]] == ["long"]


@pytest.mark.node
async def test_dates_far_from_now_and_tags_of_several_values(cluster, collection, shape):
    await store(
        cluster,
        collection,
        {
            "old": {"creation_time": "0001-01-01T00:00:00.000Z", "tags": ["a", "b"]},
            "new": {"creation_time": "9999-12-31T23:59:59.999Z"},
        },
    )
    answer = await cluster.search(shape, {"sort": ["creation_time"], "_source": False}, timeout_s=10)
    assert [hit["_id"] for hit in answer["hits"]["hits"]] == ["old", "new"]
    answer = await cluster.search(shape, {"query": {"term": {"tags": "b"}}, "_source": False}, timeout_s=10)
    assert [hit["_id"] for hit in answer["hits"]["hits"]] == ["old"]


@pytest.mark.node
async def test_a_document_of_more_chunks_than_stock_elasticsearch_allows(cluster, collection):
    chunks = [{"text": "x", "start": number, "end": number + 1} for number in range(10_001)]
    outcomes = await store(cluster, collection, {"long": {"chunks": chunks}})
    assert outcomes["long"].fate == "applied"
