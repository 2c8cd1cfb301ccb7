"""Spelling suggestions: what Elasticsearch's term suggester knows, counted within the caller's filters, made into queries.

Pure: bodies out, answers in. The suggester looks at a whole index and knows no filter, so its words are only candidates:
a second body counts them, and the words as typed, within the filters of the search, and what occurs there in no document
is neither suggested nor does it keep a word from being corrected. So a suggestion tells of nothing that a search under the
same filters could not find. Text without spaces between its words is left alone: its terms are pairs of characters.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app import fields
from app.answers import Suggestion
from app.vocabulary import AMBIGUOUS, FUNCTION_WORDS, FURTHER

MAX_WORDS: Final = 16
"""Words of one query that are looked up, the first ones."""
MIN_CHARS: Final = 4
MAX_CHARS: Final = 64
CANDIDATES: Final = 10
"""For each word and field: many, since those outside the filters take places too."""
MAX_SUGGESTIONS: Final = 3
SUGGESTED: Final = (fields.TEXT, fields.TITLE)
"""Fields whose terms are words as written; stems are no words to suggest."""


_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
_WELL_SPELLED: Final = FUNCTION_WORDS | AMBIGUOUS | FURTHER
"""Words that hold a question together: documents that lack them say nothing of their spelling, and a collection that has
"dogs" does not make one of "does"."""
# Greek, Cyrillic, Latin and their like: scripts that the suggester's edits make sense in.
_SPELLED = re.compile(r"[a-z\u00c0-\u024f\u0370-\u052f']+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Misspelt:
    """A word of the query, and what may be meant by it, the likeliest first: (word, likeness in [0, 1])."""

    start: int
    end: int
    word: str
    candidates: tuple[tuple[str, float], ...]


def words_of(text: str) -> list[re.Match[str]]:
    """Return the words that can be looked up, the first of each: none of those that only hold a sentence together."""
    found: dict[str, re.Match[str]] = {}
    for match in _WORD.finditer(text):
        word = match[0]
        if _holds_together(word):
            continue
        if MIN_CHARS <= len(word) <= MAX_CHARS and _SPELLED.fullmatch(word):
            found.setdefault(word.casefold(), match)
    return list(found.values())[:MAX_WORDS]


def _holds_together(word: str) -> bool:
    return word.casefold().replace("\u2019", "'") in _WELL_SPELLED


def suggest_body(words: Sequence[re.Match[str]]) -> dict[str, Any]:
    """Return the body that asks for candidates of each word in each field, however often the word itself occurs."""
    suggest: dict[str, Any] = {}
    for at, match in enumerate(words):
        for field in SUGGESTED:
            suggest[f"{at}.{field}"] = {
                "text": match[0],
                "term": {
                    "field": field,
                    "size": CANDIDATES,
                    # Whether a word is known is decided by the count within the filters, not by the whole index.
                    "suggest_mode": "always",
                    "max_term_freq": 2**31 - 1,
                    "sort": "score",
                    "prefix_length": 1,
                    "min_word_length": MIN_CHARS,
                    "max_edits": 2,
                },
            }
    return {"size": 0, "track_total_hits": False, "suggest": suggest}


def read_candidates(words: Sequence[re.Match[str]], answer: Mapping[str, Any]) -> list[Misspelt]:
    """Return the words that have candidates; a word that the analyzer takes apart has none."""
    told = answer.get("suggest", {})
    read: list[Misspelt] = []
    for at, match in enumerate(words):
        likeness: dict[str, float] = {}
        for field in SUGGESTED:
            entries = told.get(f"{at}.{field}", [])
            if len(entries) != 1:
                continue
            for option in entries[0]["options"]:
                if _SPELLED.fullmatch(option["text"]):
                    likeness[option["text"]] = max(likeness.get(option["text"], 0.0), float(option["score"]))
        if likeness:
            ranked = sorted(likeness.items(), key=lambda item: (-item[1], item[0]))
            read.append(Misspelt(match.start(), match.end(), match[0], tuple(ranked)))
    return read


def count_body(
    found: Sequence[Misspelt], *, filters: Sequence[dict[str, Any]], visible: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the body that counts each candidate within the filters, each word as typed among all that is `visible`.

    A word that the caller could find without a filter of their own is spelled well, whatever that filter leaves.
    """
    searched = [name for field in SUGGESTED for name in (field, f"{field}.english")]

    def holds(word: str) -> dict[str, Any]:
        return {"multi_match": {"query": word, "fields": searched, "operator": "and"}}

    candidates = dict.fromkeys(word for each in found for word, _ in each.candidates)
    counted = {word: holds(word) for word in candidates}
    typed = {each.word.casefold(): holds(each.word.casefold()) for each in found}
    return {
        "size": 0,
        "track_total_hits": False,
        "query": {"bool": {"filter": list(visible)}},
        "aggs": {
            # Once for all of the words: filters may be long.
            "within": {
                "filter": {"bool": {"filter": list(filters)}},
                "aggs": {"words": {"filters": {"filters": counted}}},
            },
            "typed": {"filters": {"filters": typed}},
        },
    }


def suggestions(text: str, found: Sequence[Misspelt], answer: Mapping[str, Any]) -> list[Suggestion]:
    """Return the query with words that no document has replaced by words that some have, the likeliest first.

    `score` is the mean likeness of the replaced words. Of equally like words the one in more documents comes first.
    """
    told = answer["aggregations"]
    counts = {word: bucket["doc_count"] for word, bucket in told["within"]["words"]["buckets"].items()}
    typed = {word: bucket["doc_count"] for word, bucket in told["typed"]["buckets"].items()}
    wrong: list[tuple[Misspelt, list[tuple[str, float]]]] = []
    for each in found:
        if typed.get(each.word.casefold(), 0):
            continue
        known = [(word, like) for word, like in each.candidates if counts.get(word, 0)]
        if known:
            known.sort(key=lambda item: (-item[1], -counts[item[0]], item[0]))
            wrong.append((each, known))
    if not wrong:
        return []
    made: dict[str, float] = {}
    best = [options[0] for _, options in wrong]
    choices = [best]
    for at, (_, options) in enumerate(wrong):
        choices += [[*best[:at], option, *best[at + 1 :]] for option in options[1:]]
    for choice in choices:
        spelled = _replaced(
            text, {each.word.casefold(): word for (each, _), (word, _) in zip(wrong, choice, strict=True)}
        )
        score = sum(like for _, like in choice) / len(choice)
        made.setdefault(spelled, score)
    ranked = sorted(made.items(), key=lambda item: -item[1])
    return [Suggestion(text=spelled, score=round(score, 4)) for spelled, score in ranked[:MAX_SUGGESTIONS]]


def _replaced(text: str, by: Mapping[str, str]) -> str:
    return _WORD.sub(lambda match: by.get(match[0].casefold(), match[0]), text)
