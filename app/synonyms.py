"""Synonyms: a collection's rules read, found in a query, and made into other wordings of it.

Pure. Rules are written as Elasticsearch's synonym sets write them (the Solr form): `car, automobile` are equivalent,
`k8s => kubernetes` goes one way. Here they act on the query before it is analysed, on tokens that ignore case, width,
accents and the English plural; of Chinese, Japanese, Korean and Thai text each character is a token, so that a term is
found inside a run of text. What the alternatives then match is the index's own analysis.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import Final

from app.answers import Rewrite
from app.asking import Wording
from app.collection import MAX_SYNONYM_RULES, SynonymRule
from app.errors import InvalidRequest

MAX_TERMS: Final = 32
"""Terms on both sides of one rule."""
MAX_TERM_CHARS: Final = 128
MAX_WORDINGS: Final = 8
"""Wordings of one query beside its own; each costs as many clauses as the query itself."""

# Scripts whose words are not set apart by spaces, and Hangul, whose words carry particles. A half-width kana may bring
# its voicing mark along.
_CHARACTER = (
    r"[\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7a3\u1100-\u11ff\u0e00-\u0e7f"
    r"\U00020000-\U0003ffff]|[\uff66-\uff9d][\uff9e\uff9f]?"
)
_TOKEN = re.compile(rf"(?P<character>{_CHARACTER})|(?:(?!{_CHARACTER})[^\W_])+[+#]*")

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A token in its normal form, and where it stands in the text."""

    form: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """A term of the rules in a query: where it stands, and what may stand in its place."""

    start: int
    end: int
    alternatives: tuple[str, ...]
    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Rules:
    by_key: dict[Key, tuple[tuple[str, ...], tuple[str, ...]]]
    """Term -> (alternatives, the rules that they are from)."""
    longest: dict[str, int]
    """First token -> tokens of the longest term that begins with it."""


def tokens(text: str) -> list[Token]:
    """Return the text's tokens in order."""
    return [
        Token(_form(match[0], plural=match["character"] is None), match.start(), match.end())
        for match in _TOKEN.finditer(text)
    ]


def _form(token: str, *, plural: bool) -> str:
    folded = unicodedata.normalize("NFKC", token).casefold()
    if not plural:
        return folded
    parts = unicodedata.normalize("NFD", folded)
    folded = "".join(char for char in parts if not unicodedata.combining(char))
    return _singular(folded) if folded.isascii() and folded.isalpha() else folded


def _singular(word: str) -> str:
    """Return the word without its plural ending: Harman's S stemmer, "How effective is suffixing?", JASIS 42 (1991)."""
    if len(word) < 4:
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word


def check(rules: Sequence[SynonymRule]) -> None:
    """Raise InvalidRequest, naming the rule, for one that can't be read or an id given twice."""
    seen: set[str] = set()
    for at, rule in enumerate(rules):
        field = f"synonyms_set[{at}]"
        if rule.id is not None and rule.id in seen:
            raise InvalidRequest(
                "two rules have the same id", field=f"{field}.id", remedy="give each its own, or none"
            )
        seen.update(() if rule.id is None else (rule.id,))
        try:
            _read(rule.synonyms)
        except InvalidRequest as error:
            raise InvalidRequest(error.detail, field=f"{field}.synonyms", remedy=error.remedy) from None


@lru_cache(maxsize=2 * MAX_SYNONYM_RULES)  # a collection's rules are read whenever it is looked at anew
def _read(line: str) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Return the terms of a rule's left and right side, right None where all are equivalent. Raises InvalidRequest."""

    def wrong(what: str, remedy: str) -> InvalidRequest:
        return InvalidRequest(what, field="synonyms", remedy=remedy)

    sides = [_terms(side) for side in re.split(r"(?<!\\)=>", line)]
    if len(sides) > 2:
        raise wrong("a rule has one `=>` at most", "write two rules")
    left, right = sides[0], sides[1] if len(sides) == 2 else None
    every = [*left, *(right or ())]
    if len(every) > MAX_TERMS:
        raise wrong(f"a rule has at most {MAX_TERMS} terms, this one {len(every)}", "write several rules")
    if right is not None and not (left and right):
        raise wrong("a side of `=>` is empty", "write terms on both sides, such as 'k8s => kubernetes'")
    if right is None and len(left) < 2:
        raise wrong("one term alone has no synonym", "write at least two, such as 'car, automobile'")
    for term in every:
        if len(term) > MAX_TERM_CHARS:
            raise wrong(f"a term has at most {MAX_TERM_CHARS} characters", "shorten it")
        if not tokens(term):
            raise wrong("a term holds no letter and no digit", "write words, with commas between the terms")
    return left, right


def _terms(side: str) -> tuple[str, ...]:
    parts = (
        part.replace("\\,", ",").replace("\\=>", "=>") for part in re.split(r"(?<!\\)[,\uff0c\u3001]", side)
    )
    return tuple(cleaned for part in parts if (cleaned := " ".join(part.split())))


@lru_cache(maxsize=64)
def _compiled(lines: tuple[str, ...]) -> _Rules:
    gathered: dict[Key, tuple[list[str], list[str]]] = {}
    for line in lines:
        left, right = _read(line)
        for term in left:
            key = _key(term)
            alternatives, rules = gathered.setdefault(key, ([], []))
            have = {key, *map(_key, alternatives)}
            for other in left if right is None else right:
                if _key(other) not in have:
                    have.add(_key(other))
                    alternatives.append(other)
            if line not in rules:
                rules.append(line)
    longest: dict[str, int] = {}
    for key in gathered:
        longest[key[0]] = max(longest.get(key[0], 0), len(key))
    return _Rules({key: (tuple(a), tuple(r)) for key, (a, r) in gathered.items() if a}, longest)


def _key(term: str) -> Key:
    return tuple(token.form for token in tokens(term))


def find(text: str, rules: Sequence[SynonymRule]) -> list[Found]:
    """Return the terms of the rules that stand in the text: from left to right, the longest first, none overlapping."""
    if not rules:
        return []
    compiled = _compiled(tuple(rule.synonyms for rule in rules))
    words = tokens(text)
    found: list[Found] = []
    at = 0
    while at < len(words):
        most = min(compiled.longest.get(words[at].form, 0), len(words) - at)
        for length in range(most, 0, -1):
            hit = compiled.by_key.get(tuple(word.form for word in words[at : at + length]))
            if hit is not None:
                found.append(Found(words[at].start, words[at + length - 1].end, *hit))
                at += length
                break
        else:
            at += 1
    return found


def wordings(text: str, found: Sequence[Found], *, most: int = MAX_WORDINGS) -> tuple[list[Wording], bool]:
    """Return the text with terms replaced by their synonyms, those with fewest replacements first, and whether some are left out.

    Each tells the terms that came in: a document must hold them, as a phrase where they are of several words.
    """
    made: list[Wording] = []
    seen = {text}
    for chosen in _choices([len(each.alternatives) for each in found]):
        if len(made) == most:
            return made, True
        parts: list[str] = []
        terms: list[str] = []
        end = 0
        for each, which in zip(found, chosen, strict=True):
            if which:
                term = each.alternatives[which - 1]
                parts += [text[end : each.start], term]
                terms.append(term)
                end = each.end
        worded = "".join([*parts, text[end:]])
        if worded not in seen:
            seen.add(worded)
            made.append(Wording(query=worded, terms=list(dict.fromkeys(terms))))
    return made, False


def _choices(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield which alternative (from 1; 0: the term itself) each place takes: one replacement first, then two, then three.

    More than three at once no wording holds: among eight of them there is no room for it.
    """
    for replaced in range(1, min(len(sizes), 3) + 1):
        for places in combinations(range(len(sizes)), replaced):
            for picks in product(*(range(1, sizes[place] + 1) for place in places)):
                choice = [0] * len(sizes)
                for place, pick in zip(places, picks, strict=True):
                    choice[place] = pick
                yield tuple(choice)


def told(text: str, found: Iterable[Found], searched: Iterable[Wording]) -> list[Rewrite]:
    """Return what the answer says of the terms that were found in the text: those alternatives that a wording searches for."""
    terms = {term for wording in searched for term in wording.terms}
    return [
        Rewrite(
            source="synonyms",
            kind="synonyms",
            of=text[each.start : each.end],
            texts=texts,
            rules=list(each.rules),
        )
        for each in found
        if (texts := [alternative for alternative in each.alternatives if alternative in terms])
    ]
