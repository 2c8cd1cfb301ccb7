"""The sample corpus is what its README says: well-formed, dated, judged, and true to its chains of versions.

Ranking is not tested here; that needs a node.
"""

import csv
import json
import re
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.writing import Document

SAMPLE = Path(__file__).resolve().parents[1] / "scripts" / "sample"
SOURCES = {"handbook", "policies", "release-notes", "guides", "incidents"}
QUERY_KEYS = {"id", "text", "as_of", "kind", "current", "superseded", "lang", "note"}
CJK = re.compile(r"[\u4e00-\u9fff]")

Row = dict[str, Any]


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (SAMPLE / name).read_text(encoding="utf-8").splitlines()]


def instant(text: str) -> datetime:
    """Return the moment; a date alone is midnight UTC, as the service reads it."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


DOCUMENTS = rows("corpus.jsonl")
QUERIES = rows("queries.jsonl")
BY_ID = {document["id"]: document for document in DOCUMENTS}
SUCCESSORS = [document for document in DOCUMENTS if "supersedes" in document["metadata"]]
AS_OF = instant("2026-06-30T00:00:00Z")


def versions(newest: Row) -> list[Row]:
    """Return a document and what it supersedes, newest first."""
    chain = [newest]
    while (older := chain[-1]["metadata"].get("supersedes")) is not None:
        chain.append(BY_ID[older])
    return chain


def chains() -> list[list[Row]]:
    """Return each subject's versions, newest first; subjects with one version are left out."""
    replaced = {document["metadata"]["supersedes"] for document in SUCCESSORS}
    return [versions(document) for document in SUCCESSORS if document["id"] not in replaced]


def test_ids_are_unique_and_plain() -> None:
    assert len(BY_ID) == len(DOCUMENTS)
    assert len({query["id"] for query in QUERIES}) == len(QUERIES)
    for row in [*DOCUMENTS, *QUERIES]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["id"]), row["id"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["id"])
def test_each_document_is_accepted_and_of_the_promised_size(document: Row) -> None:
    Document.model_validate(document)
    assert document["source"] in SOURCES
    assert all(document[key] for key in ("title", "author", "tags", "department"))
    assert document.get("evergreen", True) is True, "left out rather than false"
    size, shortest, longest = (
        (len(document["text"].split()), 60, 250)
        if document["lang"] == "en"
        else (len(document["text"]), 100, 350)
    )
    assert shortest <= size <= longest, size
    assert document["lang"] == ("zh" if len(CJK.findall(document["text"])) > 50 else "en")
    assert document["text"] == " ".join(document["text"].split())


def test_dates_lie_in_the_promised_span_oldest_first() -> None:
    dates = [instant(document["creation_time"]) for document in DOCUMENTS]
    assert dates == sorted(dates)
    assert instant("2019-01-01") <= dates[0]
    assert dates[-1] < AS_OF
    assert any("T" in document["creation_time"] for document in DOCUMENTS), "some carry a time of day"


def test_what_supersedes_is_newer_and_says_something_else_in_like_words() -> None:
    assert len(SUCCESSORS) == len({document["metadata"]["supersedes"] for document in SUCCESSORS}), "a fork"
    for chain in chains():
        assert not any(document.get("evergreen") for document in chain)
        for newer, older in pairwise(chain):
            name = f"{newer['id']} over {older['id']}"
            assert instant(newer["creation_time"]) > instant(older["creation_time"]), name
            for same in ("lang", "source", "document_type"):
                assert newer[same] == older[same], name
            assert newer["metadata"]["topic"] == older["metadata"]["topic"], name
            assert set(re.findall(r"\d+", newer["text"])) != set(re.findall(r"\d+", older["text"])), name
            words = [
                set(re.findall(r"[a-z0-9]+|[\u4e00-\u9fff]", text.lower()))
                for text in (newer["text"], older["text"])
            ]
            assert len(words[0] & words[1]) > len(words[1]) / 4, name


def test_counts_are_those_of_the_readme() -> None:
    readme = (SAMPLE / "README.md").read_text(encoding="utf-8")
    languages = Counter(document["lang"] for document in DOCUMENTS)
    asked = Counter(query["lang"] for query in QUERIES)
    kinds = Counter(query["kind"] for query in QUERIES)
    for claim in (
        f"{len(DOCUMENTS)} dated documents",
        f"{languages['en']} in English and {languages['zh']} in Chinese",
        f"{len(chains())} chains of versions on {len({chain[0]['metadata']['topic'] for chain in chains()})} subjects",
        f"{len(QUERIES)} questions ({asked['en']} English, {asked['zh']} Chinese)",
        *(f"`{kind}` ({count})" for kind, count in kinds.items()),
    ):
        assert claim in " ".join(readme.split()), claim
    assert abs(languages["en"] - languages["zh"]) <= 5
    assert {len(chain) for chain in chains()} == {2, 3, 4}
    assert sum(document.get("evergreen", False) for document in DOCUMENTS) == 6
    assert {document["source"] for document in DOCUMENTS} == SOURCES


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query["id"])
def test_each_query_resolves(query: Row) -> None:
    assert query.keys() - {"show", "why", "filter"} == QUERY_KEYS
    assert instant(query["as_of"]) == AS_OF
    assert ("show" in query) == ("why" in query)
    judged = query["current"] + query["superseded"]
    assert query["current"]
    assert len(judged) == len(set(judged))
    assert set(judged) <= BY_ID.keys()
    replaced = {document["metadata"]["supersedes"] for document in SUCCESSORS}
    assert not set(query["current"]) & replaced, "current means the newest version"
    older = [document["id"] for one in query["current"] for document in versions(BY_ID[one])[1:]]
    assert query["superseded"] == older
    answers = {BY_ID[one]["lang"] for one in judged}
    assert (answers == {query["lang"]}) == (query["kind"] != "cross_lingual")
    assert query.get("filter") == ({"lang": answers.pop()} if query["kind"] == "cross_lingual" else None)
    evergreen = {BY_ID[one].get("evergreen", False) for one in query["current"]}
    assert evergreen == {query["kind"] == "evergreen"}


def test_the_tour_shows_one_of_each() -> None:
    tour = [query for query in QUERIES if query.get("show")]
    assert 4 <= len(tour) <= 5
    assert {query["lang"] for query in tour} == {"en", "zh"}
    assert {query["kind"] for query in tour} == {"same_language", "evergreen", "cross_lingual"}
    assert any(BY_ID[one]["source"] == "release-notes" for query in tour for one in query["current"])


def test_judgements_are_those_of_the_queries() -> None:
    with (SAMPLE / "qrels.tsv").open(encoding="utf-8", newline="") as file:
        judged = [
            (query, document, int(grade)) for query, document, grade in csv.reader(file, delimiter="\t")
        ]
    expected = [
        (query["id"], document, grade)
        for query in QUERIES
        for grade, key in ((2, "current"), (1, "superseded"))
        for document in query[key]
    ]
    assert judged == expected
