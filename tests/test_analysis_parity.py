"""The local node's analysis against what Elasticsearch documents for each component, so that one template serves both.

The texts and outputs are those of the reference pages of the same names, unless a row says otherwise.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elasticsearch import BadRequestError, Elasticsearch

from scripts.node import LocalNode, ensure_installed

pytestmark = pytest.mark.node

FOX = "The 2 QUICK Brown-Foxes jumped over the lazy dog's bone."


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNode]:
    cache = os.environ.get("HALFLIFE_TEST_CACHE")
    distribution = ensure_installed(Path(cache) if cache else None)
    with LocalNode(distribution, tmp_path_factory.mktemp("analysis")) as running:
        (running.data / "config" / "synonyms.txt").write_text("# a file\ndns, domain name system\n")
        yield running


@pytest.fixture(scope="module")
def client(node: LocalNode) -> Iterator[Elasticsearch]:
    with Elasticsearch(node.url) as talking:
        yield talking


def terms(client: Elasticsearch, **request: Any) -> list[str]:
    return [token["token"] for token in client.indices.analyze(**request)["tokens"]]


def parts(text: str) -> list[str]:
    return text.split()


FILTERS: list[tuple[str, str, list[Any], str, list[str]]] = [
    (
        "apostrophe",
        "standard",
        ["apostrophe"],
        "Istanbul'a veya Istanbul'dan",
        parts("Istanbul veya Istanbul"),
    ),
    ("asciifolding", "standard", ["asciifolding"], "açaí à la carte", parts("acai a la carte")),
    (
        "asciifolding, original kept",
        "standard",
        [{"type": "asciifolding", "preserve_original": True}],
        "açaí",
        ["acai", "açaí"],
    ),
    (
        "cjk_bigram",
        "standard",
        ["cjk_bigram"],
        "東京都は、日本の首都であり",
        parts("東京 京都 都は 日本 本の の首 首都 都で であ あり"),
    ),
    (
        "cjk_bigram, scripts and unigrams",
        "standard",
        [
            {
                "type": "cjk_bigram",
                "ignored_scripts": ["hangul", "hiragana", "katakana"],
                "output_unigrams": True,
            }
        ],
        "東京は首都",
        parts("東 東京 京 は 首 首都 都"),
    ),
    ("cjk_width", "standard", ["cjk_width"], "ｼｰｻｲﾄﾞﾗｲﾅｰ", ["シーサイドライナー"]),
    ("cjk_width, full-width latin", "standard", ["cjk_width"], "Ｈａｌｆ ２０２６", ["Half", "2026"]),
    (
        "classic",
        "classic",
        ["classic"],
        "The 2 Q.U.I.C.K. Brown-Foxes jumped over the lazy dog's bone.",
        parts("The 2 QUICK Brown Foxes jumped over the lazy dog bone"),
    ),
    (
        "common_grams",
        "whitespace",
        [{"type": "common_grams", "common_words": ["is", "the"]}],
        "the quick fox is brown",
        parts("the the_quick quick fox fox_is is is_brown brown"),
    ),
    (
        "common_grams, query mode",
        "whitespace",
        [{"type": "common_grams", "common_words": ["is", "the"], "query_mode": True}],
        "the quick fox is brown",
        parts("the_quick quick fox_is is_brown"),
    ),
    ("decimal_digit", "whitespace", ["decimal_digit"], "१-one two-२ ३", ["1-one", "two-2", "3"]),
    (
        "edge_ngram",
        "standard",
        [{"type": "edge_ngram", "min_gram": 1, "max_gram": 2}],
        "the quick brown fox jumps",
        parts("t th q qu b br f fo j ju"),
    ),
    ("edge_ngram, from the back", "standard", [{"type": "edge_ngram", "side": "back"}], "fox", ["x", "ox"]),
    (
        "edge_ngram, original kept",
        "standard",
        [{"type": "edge_ngram", "preserve_original": True}],
        "fox",
        ["f", "fo", "fox"],
    ),
    ("elision", "standard", ["elision"], "j’examine près du wharf", parts("examine près du wharf")),
    (
        "elision, own articles",
        "standard",
        [{"type": "elision", "articles_case": True, "articles": ["l", "m"]}],
        "L'avion m'appelle",
        ["avion", "appelle"],
    ),
    (
        "fingerprint",
        "whitespace",
        ["fingerprint"],
        "zebra jumps over resting resting dog",
        ["dog jumps over resting zebra"],
    ),
    (
        "keep",
        "whitespace",
        [{"type": "keep", "keep_words": ["dog", "elephant", "fox"]}],
        "the quick fox jumps over the lazy dog",
        ["fox", "dog"],
    ),
    (
        "keep_types",
        "standard",
        [{"type": "keep_types", "types": ["<NUM>"]}],
        "1 quick fox 2 lazy dogs",
        ["1", "2"],
    ),
    (
        "keyword_marker",
        "whitespace",
        [{"type": "keyword_marker", "keywords": ["jumping"]}, "stemmer"],
        "fox running and jumping",
        parts("fox run and jumping"),
    ),
    (
        "keyword_marker, pattern",
        "whitespace",
        [{"type": "keyword_marker", "keywords_pattern": "r.*"}, "stemmer"],
        "running jumping",
        ["running", "jump"],
    ),
    (
        "keyword_repeat",
        "whitespace",
        ["keyword_repeat", "stemmer"],
        "fox running and jumping",
        parts("fox fox running run and and jumping jump"),
    ),
    ("kstem", "standard", ["kstem"], "the foxes jumping quickly", parts("the fox jump quick")),
    (
        "length",
        "whitespace",
        [{"type": "length", "min": 0, "max": 4}],
        "the quick brown fox jumps over the lazy dog",
        parts("the fox over the lazy dog"),
    ),
    (
        "limit",
        "standard",
        [{"type": "limit", "max_token_count": 2}],
        "quick fox jumps over",
        ["quick", "fox"],
    ),
    ("limit, as it is", "standard", ["limit"], "quick fox jumps over", ["quick"]),
    ("lowercase", "standard", ["lowercase"], "THE Quick FoX JUMPs", parts("the quick fox jumps")),
    ("lowercase, Greek", "standard", [{"type": "lowercase", "language": "greek"}], "Άγγελος", ["αγγελοσ"]),
    ("lowercase, Turkish", "standard", [{"type": "lowercase", "language": "turkish"}], "ISI", ["ısı"]),
    (
        "multiplexer",
        "standard",
        [{"type": "multiplexer", "filters": ["lowercase", "lowercase, porter_stem"]}],
        "Going HOME",
        parts("Going going go HOME home"),
    ),
    (
        "multiplexer, original dropped",
        "standard",
        [{"type": "multiplexer", "filters": ["lowercase", "uppercase"], "preserve_original": False}],
        "Going",
        ["going", "GOING"],
    ),
    ("ngram", "standard", ["ngram"], "Quick fox", parts("Q Qu u ui i ic c ck k f fo o ox x")),
    (
        "pattern_capture",
        "keyword",
        [{"type": "pattern_capture", "preserve_original": False, "patterns": [r"(\d+)"]}],
        "abc123def456",
        ["123", "456"],
    ),
    (
        "pattern_replace",
        "whitespace",
        [{"type": "pattern_replace", "pattern": "(dog)", "replacement": "watch$1"}],
        "foxes jump lazy dogs",
        parts("foxes jump lazy watchdogs"),
    ),
    (
        "pattern_replace, first only, flags",
        "keyword",
        [{"type": "pattern_replace", "pattern": "A", "flags": "CASE_INSENSITIVE", "all": False}],
        "banana",
        ["bnana"],
    ),
    ("porter_stem", "standard", ["porter_stem"], "the foxes jumping quickly", parts("the fox jump quickli")),
    (
        "remove_duplicates",
        "whitespace",
        ["keyword_repeat", "stemmer", "remove_duplicates"],
        "jumping dog",
        ["jumping", "jump", "dog"],
    ),
    ("reverse", "standard", ["reverse"], "quick fox jumps", ["kciuq", "xof", "spmuj"]),
    (
        "shingle, as it is",
        "whitespace",
        ["shingle"],
        "quick brown fox",
        ["quick", "quick brown", "brown", "brown fox", "fox"],
    ),
    ("snowball", "standard", ["snowball"], "the foxes jumping quickly", parts("the fox jump quick")),
    ("snowball, German", "standard", [{"type": "snowball", "language": "German"}], "katzen", ["katz"]),
    ("stemmer", "standard", ["stemmer"], "the foxes jumping quickly", parts("the fox jump quickli")),
    (
        "stemmer_override",
        "standard",
        [
            {"type": "stemmer_override", "rules": ["running, runs => run", "stemmer => stemmer"]},
            "porter_stem",
        ],
        "running runs stemmer",
        ["run", "run", "stemmer"],
    ),
    (
        "stop",
        "standard",
        ["stop"],
        "a quick fox jumps over the lazy dog",
        parts("quick fox jumps over lazy dog"),
    ),
    ("trim", "keyword", ["trim"], " fox ", ["fox"]),
    (
        "truncate",
        "whitespace",
        ["truncate"],
        "the quinquennial extravaganza carried on",
        parts("the quinquenni extravagan carried on"),
    ),
    ("truncate, length", "whitespace", [{"type": "truncate", "length": 5}], "extravaganza", ["extra"]),
    (
        "unique",
        "whitespace",
        ["unique"],
        "the quick fox jumps the lazy fox",
        parts("the quick fox jumps lazy"),
    ),
    (
        "unique at a position",
        "whitespace",
        ["keyword_repeat", "stemmer", {"type": "unique", "only_on_same_position": True}],
        "dog jumping dog",
        ["dog", "jumping", "jump", "dog"],
    ),
    ("uppercase", "standard", ["uppercase"], "the Quick FoX", ["THE", "QUICK", "FOX"]),
    (
        "word_delimiter_graph",
        "keyword",
        ["word_delimiter_graph"],
        "Neil's-Super-Duper-XL500--42+AutoCoder",
        parts("Neil Super Duper XL 500 42 Auto Coder"),
    ),
    (
        "word_delimiter_graph, catenated",
        "keyword",
        [{"type": "word_delimiter_graph", "catenate_all": True, "split_on_numerics": False}],
        "wi-fi-4000",
        ["wifi4000", "wi", "fi", "4000"],
    ),
    (
        "word_delimiter_graph, protected and typed",
        "whitespace",
        [
            {
                "type": "word_delimiter_graph",
                "protected_words": ["wi-fi"],
                "type_table": ["% => DIGIT", r"\u0024 => DIGIT"],
            }
        ],
        "wi-fi $5% a-b",
        ["wi-fi", "$5%", "a", "b"],
    ),
    (
        "word_delimiter",
        "keyword",
        ["word_delimiter"],
        "Neil's-Super-Duper-XL500--42+AutoCoder",
        parts("Neil Super Duper XL 500 42 Auto Coder"),
    ),
]


@pytest.mark.parametrize(
    "tokenizer, chain, text, expected", [row[1:] for row in FILTERS], ids=[row[0] for row in FILTERS]
)
def test_token_filter(
    client: Elasticsearch, tokenizer: str, chain: list[Any], text: str, expected: list[str]
) -> None:
    assert terms(client, tokenizer=tokenizer, filter=chain, text=text) == expected


STEMMERS = [
    ("english", "foxes jumping quickly", "fox jump quickli"),
    ("light_english", "foxes jumping quickly", "fox jump quick"),
    ("minimal_english", "foxes jumping queries", "foxe jumping query"),
    ("possessive_english", "fox's bones", "fox bones"),
    ("porter2", "foxes jumping quickly", "fox jump quick"),
    ("light_german", "häuser", "haus"),
    ("light_french", "chevaux", "cheval"),
    ("light_spanish", "libros", "libr"),
    ("russian", "книги", "книг"),
    ("arabic", "الكتاب", "كتاب"),
    ("lightEnglish", "foxes", "fox"),
]


@pytest.mark.parametrize("language, text, expected", STEMMERS, ids=[row[0] for row in STEMMERS])
@pytest.mark.parametrize("key", ["language", "name"])
def test_stemmer(client: Elasticsearch, language: str, text: str, expected: str, key: str) -> None:
    chain = [{"type": "stemmer", key: language}]
    assert terms(client, tokenizer="whitespace", filter=chain, text=text) == expected.split()


TOKENIZERS: list[tuple[str, Any, str, list[str]]] = [
    (
        "char_group",
        {"type": "char_group", "tokenize_on_chars": ["whitespace", "-", "\\n"]},
        "The QUICK brown-fox",
        parts("The QUICK brown fox"),
    ),
    ("classic", "classic", FOX, parts("The 2 QUICK Brown Foxes jumped over the lazy dog's bone")),
    ("edge_ngram", "edge_ngram", "Quick Fox", ["Q", "Qu"]),
    (
        "edge_ngram, letters and digits",
        {"type": "edge_ngram", "min_gram": 2, "max_gram": 10, "token_chars": ["letter", "digit"]},
        "2 Quick Foxes.",
        parts("Qu Qui Quic Quick Fo Fox Foxe Foxes"),
    ),
    ("keyword", "keyword", "New York", ["New York"]),
    ("letter", "letter", FOX, parts("The QUICK Brown Foxes jumped over the lazy dog s bone")),
    (
        "ngram",
        "ngram",
        "Quick Fox",
        ["Q", "Qu", "u", "ui", "i", "ic", "c", "ck", "k", "k ", " ", " F", "F", "Fo", "o", "ox", "x"],
    ),
    (
        "ngram, letters and digits",
        {"type": "ngram", "min_gram": 3, "max_gram": 3, "token_chars": ["letter", "digit"]},
        "2 Quick Foxes.",
        parts("Qui uic ick Fox oxe xes"),
    ),
    (
        "ngram, own characters",
        {
            "type": "ngram",
            "min_gram": 2,
            "max_gram": 2,
            "token_chars": ["digit", "custom"],
            "custom_token_chars": "+-",
        },
        "a+1-b",
        ["+1", "1-"],
    ),
    ("path_hierarchy", "path_hierarchy", "/one/two/three", ["/one", "/one/two", "/one/two/three"]),
    (
        "path_hierarchy, replaced and skipped",
        {"type": "path_hierarchy", "delimiter": "-", "replacement": "/", "skip": 2},
        "one-two-three-four-five",
        ["/three", "/three/four", "/three/four/five"],
    ),
    (
        "path_hierarchy, reversed",
        {"type": "path_hierarchy", "delimiter": "-", "replacement": "/", "skip": 2, "reverse": True},
        "one-two-three-four-five",
        ["one/two/three/", "two/three/", "three/"],
    ),
    ("pattern", "pattern", "The foo_bar_size's default is 5.", parts("The foo_bar_size s default is 5")),
    (
        "pattern, a group",
        {"type": "pattern", "pattern": '"((?:\\\\"|[^"]|\\\\")+)"', "group": 1},
        '"value", "value with embedded \\" quote"',
        ["value", 'value with embedded \\" quote'],
    ),
    (
        "simple_pattern",
        {"type": "simple_pattern", "pattern": "[0123456789]{3}"},
        "fd-786-335-514-x",
        ["786", "335", "514"],
    ),
    (
        "simple_pattern_split",
        {"type": "simple_pattern_split", "pattern": "_"},
        "an_underscored_phrase",
        ["an", "underscored", "phrase"],
    ),
    ("thai", "thai", "การที่ได้ต้องแสดงว่างานดี", parts("การ ที่ ได้ ต้อง แสดง ว่า งาน ดี")),
    (
        "uax_url_email",
        "uax_url_email",
        "Email me at john.smith@global-international.com",
        parts("Email me at john.smith@global-international.com"),
    ),
    ("whitespace", "whitespace", FOX, parts(FOX)),
    (
        "whitespace, longest token",
        {"type": "whitespace", "max_token_length": 3},
        "abcde f",
        ["abc", "de", "f"],
    ),
]


@pytest.mark.parametrize(
    "tokenizer, text, expected", [row[1:] for row in TOKENIZERS], ids=[row[0] for row in TOKENIZERS]
)
def test_tokenizer(client: Elasticsearch, tokenizer: Any, text: str, expected: list[str]) -> None:
    assert terms(client, tokenizer=tokenizer, text=text) == expected


CHARACTER_FILTERS: list[tuple[str, str, Any, str, list[str]]] = [
    ("html_strip", "keyword", "html_strip", "<p>I&apos;m so <b>happy</b>!</p>", ["\nI'm so happy!\n"]),
    (
        "html_strip, tag kept",
        "keyword",
        {"type": "html_strip", "escaped_tags": ["b"]},
        "<p>I&apos;m so <b>happy</b>!</p>",
        ["\nI'm so <b>happy</b>!\n"],
    ),
    (
        "mapping",
        "keyword",
        {"type": "mapping", "mappings": [f"{chr(0x660 + digit)} => {digit}" for digit in range(10)]},
        "My license plate is ٢٥٠١٥",
        ["My license plate is 25015"],
    ),
    (
        "mapping, escapes",
        "keyword",
        {"type": "mapping", "mappings": [r"\u0020 => _", "b => "]},
        "a b c",
        ["a__c"],
    ),
    (
        "pattern_replace",
        "standard",
        {"type": "pattern_replace", "pattern": r"(\d+)-(?=\d)", "replacement": "$1_"},
        "My credit card is 123-456-789",
        parts("My credit card is 123_456_789"),
    ),
]


@pytest.mark.parametrize(
    "tokenizer, one, text, expected",
    [row[1:] for row in CHARACTER_FILTERS],
    ids=[row[0] for row in CHARACTER_FILTERS],
)
def test_character_filter(
    client: Elasticsearch, tokenizer: str, one: Any, text: str, expected: list[str]
) -> None:
    assert terms(client, tokenizer=tokenizer, char_filter=[one], text=text) == expected


ANALYZERS = [
    ("english", FOX, parts("2 quick brown fox jump over lazi dog bone")),
    (
        "cjk",
        "東京都は、日本の首都であり the Foxes",
        parts("東京 京都 都は 日本 本の の首 首都 都で であ あり foxes"),
    ),
    ("thai", "การที่ได้ต้องแสดงว่างานดี", parts("แสดง งาน ดี")),
    ("chinese", "东京 the Fox", parts("东 京 fox")),
    (
        "fingerprint",
        "Yes yes, Gödel said this sentence is consistent and.",
        ["and consistent godel is said sentence this yes"],
    ),
    ("pattern", FOX, parts("the 2 quick brown foxes jumped over the lazy dog s bone")),
    ("simple", FOX, parts("the quick brown foxes jumped over the lazy dog s bone")),
    ("stop", FOX, parts("quick brown foxes jumped over lazy dog s bone")),
    ("whitespace", FOX, parts(FOX)),
    ("keyword", FOX, [FOX]),
    ("german", "Die Häuser", ["haus"]),
    ("french", "l'avion des chevaux", ["avion", "cheval"]),
    ("russian", "и книги", ["книг"]),
]


@pytest.mark.parametrize("analyzer, text, expected", ANALYZERS, ids=[row[0] for row in ANALYZERS])
def test_analyzer(client: Elasticsearch, analyzer: str, text: str, expected: list[str]) -> None:
    assert terms(client, analyzer=analyzer, text=text) == expected


LANGUAGES = [
    "arabic",
    "armenian",
    "basque",
    "bengali",
    "brazilian",
    "bulgarian",
    "catalan",
    "cjk",
    "czech",
    "danish",
    "dutch",
    "english",
    "estonian",
    "finnish",
    "french",
    "galician",
    "german",
    "greek",
    "hindi",
    "hungarian",
    "indonesian",
    "irish",
    "italian",
    "latvian",
    "lithuanian",
    "norwegian",
    "persian",
    "portuguese",
    "romanian",
    "russian",
    "sorani",
    "spanish",
    "swedish",
    "thai",
    "turkish",
]


def test_every_language_takes_stop_words_of_its_own(client: Elasticsearch) -> None:
    analysis = {"analyzer": {name: {"type": name, "stopwords": ["kitap"]} for name in LANGUAGES}}
    client.indices.create(index="languages", settings={"analysis": analysis, "number_of_replicas": 0})
    for name in LANGUAGES:
        assert terms(client, index="languages", analyzer=name, text="kitap") == [], name


# ---- synonyms: graphs, sources, and what may stand before them -----------------------------------------------------


def graph(client: Elasticsearch, **request: Any) -> list[tuple[str, int, int]]:
    found = client.indices.analyze(**request)["tokens"]
    return [(token["token"], token["position"], token.get("positionLength", 1)) for token in found]


def test_synonym_graph_spans_positions(client: Elasticsearch) -> None:
    chain = [{"type": "synonym_graph", "synonyms": ["dns, domain name system"]}]
    assert graph(client, tokenizer="standard", filter=chain, text="domain name system is fragile") == [
        ("dns", 0, 3),
        ("domain", 0, 1),
        ("name", 1, 1),
        ("system", 2, 1),
        ("is", 3, 1),
        ("fragile", 4, 1),
    ]
    flat = graph(client, tokenizer="standard", filter=[*chain, "flatten_graph"], text="domain name system is")
    assert sorted(flat) == [("dns", 0, 3), ("domain", 0, 1), ("is", 3, 1), ("name", 1, 1), ("system", 2, 1)]


SYNONYMS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("explicit", {"synonyms": ["i-pod, i pod => ipod"]}, "i pod", ["ipod"]),
    ("equivalent", {"synonyms": ["lol, laughing"]}, "lol", ["lol", "laughing"]),
    ("not expanded", {"synonyms": ["lol, laughing"], "expand": False}, "laughing", ["lol"]),
    ("comments", {"synonyms": ["# no rule", "", "x, y"]}, "x", ["x", "y"]),
    (
        "wordnet",
        {
            "format": "wordnet",
            "synonyms": ["s(100000001,1,'abstain',v,1,0).", "s(100000001,2,'refrain',v,1,0)."],
        },
        "abstain",
        ["abstain", "refrain"],
    ),
    ("a file", {"synonyms_path": "synonyms.txt"}, "dns", ["dns", "domain", "name", "system"]),
    ("lenient", {"synonyms": ["foo, the => bar"], "lenient": True}, "foo", ["bar"]),
]


@pytest.mark.parametrize(
    "settings, text, expected", [row[1:] for row in SYNONYMS], ids=[row[0] for row in SYNONYMS]
)
@pytest.mark.parametrize("kind", ["synonym", "synonym_graph"])
def test_synonyms(
    client: Elasticsearch, kind: str, settings: dict[str, Any], text: str, expected: list[str]
) -> None:
    chain = ["stop", {"type": kind} | settings]
    assert sorted(terms(client, tokenizer="standard", filter=chain, text=text)) == sorted(expected)


def test_rules_are_read_through_the_filters_before_them(client: Elasticsearch) -> None:
    chain = ["lowercase", "porter_stem", {"type": "synonym_graph", "synonyms": ["Foxes, Vulpes"]}]
    assert sorted(terms(client, tokenizer="standard", filter=chain, text="FOX")) == ["fox", "vulp"]


REFUSED: list[tuple[str, list[Any], str]] = [
    ("rules of nothing", [{"type": "synonym"}], "synonym requires either"),
    (
        "a stop word in a rule",
        ["stop", {"type": "synonym", "synonyms": ["the, foo"]}],
        "failed to build synonyms",
    ),
    *(
        (
            f"{name} before synonyms",
            [name, {"type": "synonym", "synonyms": ["a, b"]}],
            "cannot be used to parse synonyms",
        )
        for name in ("keyword_repeat", "word_delimiter_graph", "ngram", "edge_ngram", "fingerprint")
    ),
    ("stemmer", [{"type": "stemmer", "language": "klingon"}], "klingon"),
    ("lowercase", [{"type": "lowercase", "language": "klingon"}], "klingon"),
    ("truncate", [{"type": "truncate"}], "length parameter must be provided"),
    ("keyword_marker", [{"type": "keyword_marker"}], "keyword filter requires either"),
    (
        "ngram sizes",
        [{"type": "ngram", "min_gram": 1, "max_gram": 9}],
        r"less than or equal to: \[1\] but was \[8\]",
    ),
    ("condition", [{"type": "condition", "filter": [], "script": "true"}], "condition"),
    ("multiplexer", [{"type": "multiplexer", "filters": ["nope"]}], "nope"),
]


@pytest.mark.parametrize("chain, reason", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refuses_with_a_reason(client: Elasticsearch, chain: list[Any], reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason):
        client.indices.analyze(tokenizer="standard", filter=chain, text="anything")


# ---- in an index ---------------------------------------------------------------------------------------------------


def test_a_normalizer_may_use_what_acts_on_characters(client: Elasticsearch) -> None:
    folded = {"type": "custom", "filter": ["lowercase", "asciifolding", "cjk_width"]}
    client.indices.create(
        index="normalized",
        settings={"analysis": {"normalizer": {"folded": folded}}, "number_of_replicas": 0},
        mappings={"properties": {"name": {"type": "keyword", "normalizer": "folded"}}},
    )
    client.index(index="normalized", document={"name": "ＧÖDEL"}, refresh=True)
    assert client.count(index="normalized", query={"term": {"name": "Gödel"}})["count"] == 1
    assert client.count(index="normalized", query={"wildcard": {"name": "GÖD*"}})["count"] == 1
    with pytest.raises(BadRequestError, match="may not use filter"):
        client.indices.create(
            index="refused",
            settings={"analysis": {"normalizer": {"stems": {"type": "custom", "filter": ["stemmer"]}}}},
        )


def test_updateable_synonyms_are_reloaded_from_their_file(node: LocalNode, client: Elasticsearch) -> None:
    rules = node.data / "config" / "reloaded.txt"
    rules.write_text("quick, fast\n")
    analysis = {
        "filter": {"rules": {"type": "synonym_graph", "synonyms_path": "reloaded.txt", "updateable": True}},
        "analyzer": {"asked": {"tokenizer": "standard", "filter": ["lowercase", "rules"]}},
    }
    client.indices.create(
        index="reloaded",
        settings={"analysis": analysis, "number_of_replicas": 0},
        mappings={
            "properties": {"text": {"type": "text", "analyzer": "standard", "search_analyzer": "asked"}}
        },
    )
    client.index(index="reloaded", document={"text": "quick fox"}, refresh=True)
    assert client.count(index="reloaded", query={"match": {"text": "fast"}})["count"] == 1
    rules.write_text("fox, vulpes\n")
    client.indices.reload_search_analyzers(index="reloaded")
    client.indices.clear_cache(index="reloaded", request=True)  # or the counts below are the ones from before
    assert client.count(index="reloaded", query={"match": {"text": "fast"}})["count"] == 0
    assert client.count(index="reloaded", query={"match": {"text": "vulpes"}})["count"] == 1


def test_a_phrase_finds_its_synonym_of_several_words(client: Elasticsearch) -> None:
    analysis = {
        "filter": {"rules": {"type": "synonym_graph", "synonyms": ["dns, domain name system"]}},
        "analyzer": {"asked": {"tokenizer": "standard", "filter": ["lowercase", "rules", "porter_stem"]}},
    }
    client.indices.create(
        index="phrases",
        settings={"analysis": analysis, "number_of_replicas": 0},
        mappings={
            "properties": {"text": {"type": "text", "analyzer": "english", "search_analyzer": "asked"}}
        },
    )
    client.index(index="phrases", id="1", document={"text": "the domain name system is fragile"})
    client.index(index="phrases", id="2", document={"text": "a system of name and domain"}, refresh=True)
    found = client.search(index="phrases", query={"match_phrase": {"text": "dns"}})["hits"]["hits"]
    assert [hit["_id"] for hit in found] == ["1"]
