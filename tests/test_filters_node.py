"""The cluster's verdict on random filters and documents is the same as Python's, without exception.

One shipped mapping, documents written as the service writes them, thousands of filters. A difference is a bug: a forced
filter that Python checks on a write and the cluster on a read would let something through.
"""

import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app import documents
from app.collection import Collection, DeclaredType
from app.encoding import encode
from app.errors import InvalidRequest
from app.filters import AllOf, clauses, compile_filter, explain_mismatch, holds, matches, parse_filter

pytestmark = [pytest.mark.node, pytest.mark.slow]

MAPPINGS = Path(__file__).resolve().parent.parent / "es_mappings" / "halflife-mappings.json"
DOCUMENTS = 250
FILTERS = 6_000
SEED = 20_250_131

DECLARED: dict[str, DeclaredType] = {
    "year": "long",
    "price": "double",
    "due": "date",
    "code": "keyword",
    "open": "boolean",
    "and": "long",
}
COLLECTION = Collection(
    name="filters", index="filters-1", dims=384, similarity="cosine", declared=DECLARED, template_version=1
)

WORDS = [
    "en",
    "EN",
    "zh",
    "",
    " ",
    "true",
    "2",
    "2.0",
    "a b",
    "日本/語",
    "e\u0301",
    "é",
    "😀",
    "\uffff",
    "*",
    "a\\b",
    'say "x"',
    "x\0y",
]
NUMBERS = [
    0,
    1,
    2,
    -1,
    2.0,
    2.5,
    0.0,
    -0.0,
    1e16,
    10**16,
    1e-7,
    1e300,
    2**53 + 1,
    float(2**53),
    10**19,
    0.1,
    5e-324,
]
LONG_TEXTS = ["z" * 4096, "z" * 4097, "😀" * 2048, "😀" * 2048 + "z", "語" * 4096]
FREE_KEYS = [
    "page",
    "k",
    "a.b",
    "a",
    "",
    ".",
    "a..b",
    " ",
    "*",
    "a*",
    "k*",
    "or",
    "lang",
    "author",
    "tags",
    "😀",
    'q"',
    "page.x",
]
DAYS = ["2025-01-01", "2025-01-02", "1969-12-31", "1970-01-01", "0001-01-01", "9999-12-31", "2024-02-29"]
INSTANTS = [
    *DAYS, "2025-01-01T00:00:00Z", "2025-01-01T23:59:59.999Z", "2025-01-01T08:00:00+08:00", "2025-01-02T00:00:00.001Z", 1735689600,
    1735689600001, "1970-01-01T00:00:02.024Z", "1969-12-31T23:59:59.999Z", "2025-01-01T00:00:00.0009Z",
]  # fmt: skip
LONGS = [0, 1, 2024, 2025, -1, 2**63 - 1, -(2**63), 2**53 + 1]
DOUBLES = [0.0, -0.0, 0, 1, 2.5, -1e300, 1e300, 5e-324, -5e-324, 0.1, 2**53 + 1]
CODES = ["a", "B", "b", "", "é", "日本", "😀", "\uffff", "10", "9"]


def one_or_list(rng: random.Random, pool: list[Any], *, empty: bool = True) -> Any:
    if rng.random() < 0.7:
        return rng.choice(pool)
    return rng.sample(pool, rng.randint(0 if empty else 1, min(3, len(pool))))


def random_metadata(rng: random.Random) -> dict[str, Any]:
    def value(depth: int) -> Any:
        kind = rng.random()
        if kind < 0.15 and depth < 3:
            return {rng.choice(FREE_KEYS): value(depth + 1) for _ in range(rng.randint(0, 2))}
        if kind < 0.3 and depth < 3:
            return [value(depth + 1) for _ in range(rng.randint(0, 3))]
        return rng.choice([*WORDS, *NUMBERS, True, False, None, rng.choice(LONG_TEXTS)])

    metadata = {key: value(0) for key in rng.sample(FREE_KEYS, rng.randint(0, 8))}
    pools: dict[str, list[Any]] = {
        "year": LONGS,
        "price": DOUBLES,
        "due": INSTANTS,
        "code": [*CODES, 7, True],
        "open": [True, False],
        "and": LONGS,
    }
    for key, pool in pools.items():
        if rng.random() < 0.5:
            metadata[key] = one_or_list(rng, [*pool, None])
    return metadata


def random_document(rng: random.Random, number: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": rng.choice(["", "a/", "*", "日"]) + str(number),
        "text": "x",
        "metadata": random_metadata(rng),
    }
    for name in ("creation_time", "updated_at", "start_date"):
        if rng.random() < 0.6:
            document[name] = rng.choice(INSTANTS)
    for name in ("lang", "author"):
        if rng.random() < 0.5:
            document[name] = rng.choice([word for word in WORDS if word])
    if rng.random() < 0.5:
        document["tags"] = rng.sample([word for word in WORDS if word], rng.randint(0, 3))
    if rng.random() < 0.5:
        document["title"] = rng.choice(WORDS)
    if rng.random() < 0.5:
        document["salience"] = rng.choice([0, 0.0, -0.0, 1, 2.5, 5e-324, 1e6])
    if rng.random() < 0.5:
        document["evergreen"] = rng.random() < 0.5
    return document


def random_filter(rng: random.Random, ids: list[str], depth: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(rng.choice([1, 1, 1, 2])):
        kind = rng.random()
        if depth < 3 and kind < 0.12:
            value["and"] = [random_filter(rng, ids, depth + 1) for _ in range(rng.randint(1, 3))]
        elif depth < 3 and kind < 0.3:
            value["or"] = [random_filter(rng, ids, depth + 1) for _ in range(rng.randint(1, 3))]
        elif depth < 3 and kind < 0.42:
            value["not"] = random_filter(rng, ids, depth + 1)
        else:
            name, pool, ranges = random_field(rng, ids)
            value[name] = random_test(rng, pool, ranges=ranges)
    return value


def random_field(rng: random.Random, ids: list[str]) -> tuple[str, list[Any], bool]:
    free = [*WORDS, *NUMBERS, True, False, *LONG_TEXTS]
    choices: list[tuple[str, list[Any], bool]] = [
        ("id", rng.sample(ids, 3), False), ("title", WORDS, False), (rng.choice(["lang", "author", "tags"]), WORDS, False),
        (rng.choice(["creation_time", "updated_at", "start_date"]), INSTANTS, True),
        ("salience", DOUBLES, True), ("evergreen", [True, False], False),
        ("year", LONGS, True), ("price", DOUBLES, True), ("due", INSTANTS, True), ("code", CODES, True), ("open", [True, False], False),
        ("metadata.and", LONGS, True), ("metadata.year", LONGS, True), ("year.x", free, False),
    ]  # fmt: skip
    if rng.random() < 0.4:
        key = rng.choice([*FREE_KEYS, "page.page", "a.k", "k.", "..", "none", "a.a.b"])
        prefixed = key in ("or", "lang", "author", "tags") or rng.random() < 0.3
        return ("metadata." if prefixed else "") + key, free, False
    return rng.choice(choices)


def random_test(rng: random.Random, pool: list[Any], *, ranges: bool) -> Any:
    kind = rng.random()
    if kind < 0.35:
        return one_or_list(rng, pool)
    if kind < 0.5:
        return {"ne": one_or_list(rng, pool, empty=False)}
    if kind < 0.6:
        return {"exists": rng.random() < 0.5}
    if kind < 0.7 or not ranges:
        return {"in": rng.sample(pool, rng.randint(0, min(4, len(pool))))}
    bounds = {rng.choice(["gt", "gte"]): rng.choice(pool), rng.choice(["lt", "lte"]): rng.choice(pool)}
    if kind < 0.85:
        del bounds[rng.choice(list(bounds))]
    elif kind > 0.97:
        bounds["ne"] = rng.choice(pool)
    return bounds


def plain_mapping(node: Any) -> Any:
    """Return the mapping without its analyzers: filters touch no analysed field."""
    if not isinstance(node, dict):
        return node
    return {
        key: plain_mapping(value) for key, value in node.items() if key not in ("analyzer", "search_analyzer")
    }


@pytest.fixture(scope="module")
def client(node_url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=node_url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def indexed(client: httpx2.Client) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """An index of its own with random documents: its name, and each document's `_source` by id."""
    rng = random.Random(SEED)
    mapping = plain_mapping(json.loads(MAPPINGS.read_text())["template"]["mappings"])
    mapping["properties"]["declared"]["properties"] = {
        name: {"type": kind} for name, kind in DECLARED.items()
    }
    name = f"test-filters-{uuid.uuid4().hex}"
    answer = client.put(
        f"/{name}", json={"settings": {"number_of_shards": 2, "number_of_replicas": 0}, "mappings": mapping}
    )
    assert answer.status_code == 200, answer.text
    sources: dict[str, dict[str, Any]] = {}
    lines: list[bytes] = []
    for number in range(DOCUMENTS):
        document, declared = documents.check_document(random_document(rng, number), COLLECTION)
        source = documents.source(
            document, chunks=[], declared=declared, indexed_at="2025-01-31T00:00:00.000Z"
        )
        sources[document.id] = source
        lines += [encode({"index": {"_id": document.id}}), encode(source)]
    body = b"\n".join(lines) + b"\n"
    answer = client.post(
        f"/{name}/_bulk?refresh=true", content=body, headers={"content-type": "application/x-ndjson"}
    )
    failed = [item["index"]["error"] for item in answer.json()["items"] if "error" in item["index"]]
    assert not failed, failed[:3]
    yield name, sources
    client.delete(f"/{name}")


def found_by(client: httpx2.Client, index: str, filters: list[list[dict[str, Any]]]) -> list[Any]:
    """Return for each filter's clauses the ids found, or the error."""
    lines = b"".join(
        b"{}\n"
        + encode({"size": DOCUMENTS, "_source": False, "query": {"bool": {"filter": clauses}}})
        + b"\n"
        for clauses in filters
    )
    answer = client.post(
        f"/{index}/_msearch", content=lines, headers={"content-type": "application/x-ndjson"}
    )
    assert answer.status_code == 200, answer.text
    return [
        response.get("error") or sorted(hit["_id"] for hit in response["hits"]["hits"])
        for response in answer.json()["responses"]
    ]


def test_the_cluster_and_python_agree_on_random_filters(client: httpx2.Client, indexed):
    index, sources = indexed
    rng = random.Random(SEED + 1)
    ids = list(sources)
    valid: list[AllOf] = []
    refused = 0
    while len(valid) < FILTERS:
        value = random_filter(rng, ids)
        try:
            valid.append(parse_filter(value, declared=DECLARED))
        except InvalidRequest:
            refused += 1
    differences = []
    telling = 0
    for start in range(0, FILTERS, 250):
        batch = valid[start : start + 250]
        answers = found_by(client, index, [clauses(condition) for condition in batch])
        for condition, found in zip(batch, answers, strict=True):
            expected = sorted(id_ for id_, source in sources.items() if holds(condition, source))
            telling += 0 < len(expected) < DOCUMENTS
            if found != expected:
                differences.append((condition, found, expected))
    print(f"{FILTERS} filters, {refused} refused, {telling} with some but not all documents")
    assert not differences, f"{len(differences)} differ, such as {differences[0]}"
    assert telling > FILTERS / 2
    assert refused < FILTERS


def test_why_names_a_clause_exactly_for_those_left_out(indexed):
    _, sources = indexed
    rng = random.Random(SEED + 2)
    ids = list(sources)
    for _ in range(300):
        value = random_filter(rng, ids)
        try:
            compile_filter(value, declared=DECLARED)
        except InvalidRequest:
            continue
        for source in list(sources.values())[:40]:
            reasons = explain_mismatch(source, value, declared=DECLARED)
            assert (reasons == []) == matches(source, value, declared=DECLARED)
            assert all(reason.startswith("`filter.") for reason in reasons)


@pytest.mark.parametrize(
    "value",
    [
        {"or": [{"a": str(at)} for at in range(256)]},
        {"or": [{"lang": str(at)} for at in range(128)]},
        {"a": [f"{at}" for at in range(4096)]},
        {"page": [at + 0.0 for at in range(4096)]},
        {"due": [f"{year}-01-01" for year in range(1000, 1256)]},
        {"not": {"not": {"not": {"not": {"not": {"not": {"not": {"a": "x"}}}}}}}},
        {"a": "語" * 4096},
    ],
    ids=["conditions", "reserved-conditions", "values", "numbers", "days", "depth", "long"],
)
def test_the_largest_filters_run_three_times_over(client: httpx2.Client, indexed, value: dict[str, Any]):
    index, sources = indexed
    clauses = compile_filter(value, declared=DECLARED)
    [found] = found_by(client, index, [clauses * 3])

    assert found == sorted(
        id_ for id_, source in sources.items() if matches(source, value, declared=DECLARED)
    )
