"""Request bodies: pure functions from a route to what Elasticsearch is sent.

Plain dicts that paste into Kibana's Dev Tools. No clock, no network, no client, no settings.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

from app import fields
from app.asking import Wording
from app.times import DAY_MS, format_instant, from_ms, within_calendar
from app.vocabulary import FUNCTION_WORDS

BASE_NAME: Final = "base"
"""Name of a route's undecayed query: Elasticsearch returns its score beside the decayed one."""
FACTOR_NAME: Final = "factor"
"""Name of the clause that adds nothing to the score and tells the decay factor."""
RELEVANCE_NAME: Final = "relevance"
MEASURED: Final = "measured"
DEFAULT_FRESH_MS: Final = 30 * DAY_MS
MAX_LEXICAL_TERMS: Final = 512
"""Distinct words of a query that reach BM25. Each costs up to five clauses; the cluster allows some 8,000 at a
512 MB heap and answers 400 beyond, so longer queries are cut, and say so."""
MAX_TERMS_OF_ROUTES: Final = 4 * MAX_LEXICAL_TERMS
"""Of all routes of words of one search together."""
MAX_CANDIDATES: Final = 10_000
MAX_HIGHLIGHTED_CHARS: Final = 1_000_000
"""Elasticsearch's own default of `index.highlight.max_analyzed_offset`."""
STORED_PRECISION: Final = 1e-6
"""Vectors are 32-bit floats: of a cosine of 0.381000 the l2_norm index made 0.38099997, and a threshold of just that
cosine lost the document."""

_WORD = re.compile(r"\S+")
_PUNCTUATION: Final = "?!.,;:\"'’()"
_CONTRACTED: Final = re.compile(r"(?<=\w)(?:n['’]t|['’](?:s|re|ll|ve|m|d|t))$", re.IGNORECASE)

# Chosen over 15 judged sets (docs/relevance.md, "The text query"): against a title boost of 2, a stem boost of 0.6 and no
# phrase, nDCG@10 rose on 11 of them (identifiers .50 to .85, abstracts +.015, Chinese +.004 to +.009), the most lost is .013.
TITLE_BOOST: Final = 1.5
STEM_BOOST: Final = 1.0
PHRASE_BOOST: Final = 1.0
SYNONYM_WEIGHT: Final = 0.9
"""Of a wording with synonyms: where all else is equal, the words that were asked for stand first."""
SEARCHED: Final = tuple(
    f"{name}{sub}" for name in (fields.TEXT, fields.TITLE) for sub in ("", ".english", ".thai")
)
"""What words are looked for in: as they are written, by their English stems, and Thai, which has no spaces, word by word."""
CHUNK_SEARCHED: Final = tuple(f"{fields.CHUNK_TEXT}{sub}" for sub in ("", ".english", ".thai"))


def _is_cjk(char: str) -> bool:
    return unicodedata.east_asian_width(char) in "WF" or "\uff66" <= char <= "\uff9f"


def _cost_of(word: str) -> int:
    if word.isascii() and word.isalnum():
        return 1 + len(word) // 255
    # Punctuation splits a "word" into several terms, and 255 characters are the longest term. Thai words have two letters
    # or more.
    thai = sum("\u0e00" <= char <= "\u0e7f" for char in word) // 2
    return thai + sum(map(_is_cjk, word)) + 1 + sum(not char.isalnum() for char in word) + len(word) // 255


@lru_cache(maxsize=64)  # one search asks for its query's words once per route and once for its page
def lexical_words(text: str) -> tuple[str, bool]:
    """Return the text with repeated words dropped and cut to the words BM25 can take, and whether it was cut.

    A run of CJK text counts by its characters, since each begins a bigram.
    """
    return _cut(text, repeats=False)


@lru_cache(maxsize=64)
def phrase_words(text: str) -> str:
    """Return the text cut to as many words, with those that it repeats: "end to end" is no "end to"."""
    return _cut(text, repeats=True)[0]


def _cut(text: str, *, repeats: bool) -> tuple[str, bool]:
    seen: set[str] = set()
    kept: list[str] = []
    budget = MAX_LEXICAL_TERMS
    for match in _WORD.finditer(text):
        word = match[0]
        if not repeats and word in seen:
            continue
        seen.add(word)
        cost = _cost_of(word)
        if cost > budget:
            if budget > 1:
                kept.append(word[:budget])
            return " ".join(kept), True
        budget -= cost
        kept.append(word)
    return " ".join(kept), False


@lru_cache(maxsize=64)
def content_words(words: str) -> str:
    """Return the words without `FUNCTION_WORDS`, unless nothing else is left.

    In a big collection their weight is small. In a small one they are rare by chance: of twenty documents the one with an
    "are" in it stood first for "when are salaries paid", being the only one that the words found.
    """
    kept = [
        word
        for number, word in enumerate(words.split())
        if not _is_function_word(word.strip(_PUNCTUATION), first=number == 0)
    ]
    return " ".join(kept) if any(any(map(str.isalnum, word)) for word in kept) else words


def _is_function_word(word: str, *, first: bool) -> bool:
    # A sentence's first word is written with a capital letter, whatever it is.
    if first and word[:1].isupper() and (len(word) == 1 or word[1:].islower()):
        word = word.lower()
    # "what's" is found as "what": the analyzer takes the rest off. "it" alone may be IT, "it's" hardly; "can't" is a "ca".
    contracted = _CONTRACTED.sub("", word)
    return word in FUNCTION_WORDS or (
        contracted != word and (contracted in FUNCTION_WORDS or contracted in ("it", "ca", "wo"))
    )


def text_query(
    text: str, wordings: Sequence[Wording] = (), *, title_boost: float = TITLE_BOOST
) -> dict[str, Any]:
    """Return the BM25 query over title and text: exact forms beside English stems, and a phrase bonus.

    Where there are other wordings, a document's score is its best under any of them, the query's own weighing more.
    """
    make = partial(_plain_text_query, title_boost=title_boost)
    return _best_of(make(text), wordings, make, SEARCHED)


def _best_of(
    own: dict[str, Any],
    wordings: Sequence[Wording],
    make: Callable[[str], dict[str, Any]],
    searched: Sequence[str],
) -> dict[str, Any]:
    if not wordings:
        return own
    others = []
    for wording in wordings:
        # Of a term of several words no part alone will do: "personal" is no computer.
        held = [
            {"multi_match": {"query": term, "type": "phrase", "fields": list(searched)}}
            for term in wording.terms
        ]
        others.append({"bool": {"must": [make(wording.query)], "filter": held, "boost": SYNONYM_WEIGHT}})
    return {"dis_max": {"queries": [own, *others]}}


def affordable(words: str, wordings: Sequence[Wording]) -> list[Wording]:
    """Return the first wordings that fit into what one query may cost beside its own words."""
    left = MAX_LEXICAL_TERMS - cost(words)
    kept: list[Wording] = []
    for wording in wordings:
        left -= cost(wording.query) + sum(map(cost, wording.terms))
        if left < 0:
            break
        kept.append(wording)
    return kept


def cost(text: str) -> int:
    """Return how many words, and characters of CJK runs, the text has."""
    return sum(_cost_of(match[0]) for match in _WORD.finditer(text))


def _plain_text_query(text: str, *, title_boost: float) -> dict[str, Any]:
    content = content_words(lexical_words(text)[0])
    should: list[dict[str, Any]] = [
        {"match": {fields.TEXT: {"query": content}}},
        {"match": {f"{fields.TEXT}.english": {"query": content, "boost": STEM_BOOST}}},
        {"match": {fields.TITLE: {"query": content, "boost": title_boost}}},
        {"match": {f"{fields.TITLE}.english": {"query": content, "boost": title_boost * STEM_BOOST}}},
        {"match": {f"{fields.TEXT}.thai": {"query": content}}},
        {"match": {f"{fields.TITLE}.thai": {"query": content, "boost": title_boost}}},
        # What the analyzer takes apart, an identifier above all, counts for more where its parts stand together.
        {"match_phrase": {fields.TEXT: {"query": phrase_words(text), "boost": PHRASE_BOOST}}},
    ]
    return {"bool": {"should": should, "minimum_should_match": 1}}


Vector = Sequence[float] | str
"""A query vector: its numbers, or base64 of them as big-endian 32-bit floats where the cluster takes that."""


def vector_query(
    vector: Vector,
    *,
    k: int,
    num_candidates: int,
    filters: Sequence[dict[str, Any]],
    similarity: float | None = None,
    inner_hits: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the kNN query: the k documents per shard whose best chunk is nearest, pre-filtered.

    `similarity` is the least similarity in the index's own measure.
    """
    knn: dict[str, Any] = {
        "field": fields.EMBEDDING,
        "query_vector": vector if isinstance(vector, str) else list(vector),
        "k": k,
        "num_candidates": max(k, num_candidates),
    }
    if filters:
        knn["filter"] = list(filters)
    if similarity is not None:
        knn["similarity"] = similarity
    nested: dict[str, Any] = {"path": fields.CHUNKS, "query": {"knn": knn}, "score_mode": "max"}
    if inner_hits is not None:
        nested["inner_hits"] = inner_hits
    return {"nested": nested}


def named(query: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the query under a name, so that its own score comes back with each hit."""
    return {"bool": {"must": [query], "_name": name}}


def created_by(origin_ms: int) -> dict[str, Any]:
    """Return the filter that hides documents created after the origin; undated ones stay."""
    return {
        "bool": {"must_not": [{"range": {fields.CREATION_TIME: {"gt": format_instant(from_ms(origin_ms))}}}]}
    }


def not_expired(origin_ms: int) -> dict[str, Any]:
    """Return the filter that hides documents expired at the origin."""
    return {
        "bool": {"must_not": [{"range": {fields.EXPIRES_AT: {"lte": format_instant(from_ms(origin_ms))}}}]}
    }


def true_at(origin_ms: int) -> dict[str, Any]:
    """Return the filter for valid time: start_date <= origin < end_date, an absent bound being open."""
    at = format_instant(from_ms(origin_ms))
    return {
        "bool": {
            "must_not": [
                {"range": {fields.START_DATE: {"gt": at}}},
                {"range": {fields.END_DATE: {"lte": at}}},
            ]
        }
    }


def before(created_ms: int | None, document_id: str) -> dict[str, Any]:
    """Return the filter for what stands before this document where scores are equal: newer ones, then smaller ids."""
    smaller = {"range": {fields.DOCUMENT_ID: {"lt": document_id}}}
    dated = {"exists": {"field": fields.CREATION_TIME}}
    if created_ms is None:
        return {"bool": {"should": [dated, {"bool": {"must_not": [dated], "filter": [smaller]}}]}}
    at = format_instant(from_ms(created_ms))
    level = {"range": {fields.CREATION_TIME: {"gte": at, "lte": at}}}
    newer = {"range": {fields.CREATION_TIME: {"gt": at}}}
    return {"bool": {"should": [newer, {"bool": {"filter": [level, smaller]}}]}}


def within(dates: Sequence[str], *, origin_ms: int, window_ms: int) -> dict[str, Any]:
    """Return the filter of a fresh route: dated from the origin back to the window, by the first of `dates` that is there.

    A date after the origin is not there yet.
    """
    at = format_instant(from_ms(origin_ms))
    since = format_instant(from_ms(within_calendar(origin_ms - window_ms)))
    inside = [{"range": {name: {"lte": at, "gte": since}}} for name in dates]
    if len(inside) == 1:
        return inside[0]
    return {
        "bool": {
            "should": [
                {
                    "bool": {
                        "filter": [window],
                        "must_not": [{"range": {name: {"lte": at}}} for name in dates[:place]],
                    }
                }
                for place, window in enumerate(inside)
            ]
        }
    }


def with_factor(query: dict[str, Any], functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the query with the decay factor told beside its score, which it leaves as it is."""
    teller = {
        "function_score": {
            "query": {"match_all": {}},
            "functions": list(functions),
            "score_mode": "sum",
            "boost_mode": "replace",
            "_name": FACTOR_NAME,
        }
    }
    return {"bool": {"must": [query], "should": [{"bool": {"should": [teller], "boost": 0}}]}}


def chunk_words(text: str, wordings: Sequence[Wording] = ()) -> dict[str, Any]:
    """Return the BM25 query over one chunk's text, its best score under any of the wordings."""
    return _best_of(_plain_chunk_words(text), wordings, _plain_chunk_words, CHUNK_SEARCHED)


def _plain_chunk_words(text: str) -> dict[str, Any]:
    content = content_words(lexical_words(text)[0])
    return {
        "bool": {
            "should": [
                {"match": {fields.CHUNK_TEXT: {"query": content}}},
                {"match": {f"{fields.CHUNK_TEXT}.english": {"query": content, "boost": STEM_BOOST}}},
                {"match": {f"{fields.CHUNK_TEXT}.thai": {"query": content}}},
                {"match_phrase": {fields.CHUNK_TEXT: {"query": phrase_words(text), "boost": PHRASE_BOOST}}},
            ]
        }
    }


def chunk_text_query(
    text: str,
    *,
    inner_hits: dict[str, Any] | None,
    wordings: Sequence[Wording] = (),
    title_boost: float = TITLE_BOOST,
) -> dict[str, Any]:
    """Return the BM25 query that ranks documents by their best chunk, the title's matches shared by all of them.

    Of a document whose title alone matches no chunk is told.
    """
    content = content_words(lexical_words(text)[0])
    nested: dict[str, Any] = {
        "path": fields.CHUNKS,
        "query": chunk_words(text, wordings),
        "score_mode": "max",
    }
    if inner_hits is not None:
        nested["inner_hits"] = inner_hits
    return {
        "bool": {
            "should": [
                {"nested": nested},
                {"match": {fields.TITLE: {"query": content, "boost": title_boost}}},
                {"match": {f"{fields.TITLE}.english": {"query": content, "boost": title_boost * STEM_BOOST}}},
                {"match": {f"{fields.TITLE}.thai": {"query": content, "boost": title_boost}}},
            ],
            "minimum_should_match": 1,
        }
    }


HOLDS: Final = "holds:"
"""What the names of the clauses begin with that tell which words a document holds."""


def holding(terms: Iterable[str]) -> list[dict[str, Any]]:
    """Return one named clause for each term, to be matched and not to be scored by: the whole document is looked at."""
    return [
        {
            "multi_match": {
                "query": term,
                "fields": list(SEARCHED),
                "operator": "and",
                "_name": f"{HOLDS}{term}",
            }
        }
        for term in terms
    ]


def held(hit: Mapping[str, Any]) -> frozenset[str]:
    """Return the terms of `holding` that a hit's document holds."""
    return frozenset(
        name.removeprefix(HOLDS) for name in hit.get("matched_queries") or () if name.startswith(HOLDS)
    )


def highlight(text: str, *, encoder: str, wordings: Sequence[Wording] = ()) -> dict[str, Any]:
    """Return the highlighter's part: exact forms and stems mark the same field."""
    return {
        "type": "unified",
        "encoder": encoder,
        "pre_tags": ["<em>"],
        "post_tags": ["</em>"],
        "order": "score",
        # Longer texts would fail their whole shard; what lies beyond is not marked.
        "max_analyzed_offset": MAX_HIGHLIGHTED_CHARS,
        "require_field_match": True,
        "highlight_query": text_query(text, wordings),
        "fields": {
            fields.TITLE: {
                "number_of_fragments": 0,
                "matched_fields": [name for name in SEARCHED if name.startswith(fields.TITLE)],
            },
            fields.TEXT: {
                "number_of_fragments": 3,
                "fragment_size": 160,
                "matched_fields": [name for name in SEARCHED if name.startswith(fields.TEXT)],
            },
        },
    }


def threshold(cosine: float, similarity: str) -> float:
    """Return the kNN `similarity` (the index's own measure) that keeps exactly cosines of at least `cosine`.

    Vectors are of unit length whatever the measure (the writer sees to it), so cosine, dot product and inner
    product are one number and the L2 distance is sqrt(2 - 2*cosine): less is nearer, and Elasticsearch keeps
    what is at most that far. What equals `cosine` up to the precision of the stored vectors counts as at least it.
    """
    least = cosine - STORED_PRECISION
    if similarity == "l2_norm":
        return math.sqrt(2 - 2 * least)
    return least


def relevance_of(cosine: float) -> float:
    """Return the relevance that a hit of this cosine is told to have, from 0 to 1."""
    return min(1.0, max(0.0, cosine))


def cosine_of(score: float, similarity: str) -> float:
    """Return the cosine behind a kNN `_score`, unclamped, for unit vectors.

    Elasticsearch scores cosine and dot_product (1 + cos)/2, l2_norm 1/(1 + d^2) with d^2 = 2 - 2*cos, and
    max_inner_product 1/(1 - cos) below zero, cos + 1 from there on.
    """
    if similarity == "l2_norm":
        return 1 - (1 / score - 1) / 2 if score > 0 else -1.0
    if similarity == "max_inner_product":
        return score - 1 if score >= 1 else 1 - 1 / score
    return 2 * score - 1
