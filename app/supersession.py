"""Which of the best candidates say the same thing, so that of those the newest may stand first.

Pure, and free of any model: names and words are compared, weighed by how rare they are among the candidates, so that
no threshold depends on an embedding's scale. Two documents say the same thing if their names are alike, or if both hold
every word that the query asks for; never if one holds a number, version or month of the query that the other lacks, nor
if a word of the query names the older one and the newer one never says it, nor if that tells much less of what is asked.
The evidence is in docs/relevance.md, "Recency by itself".
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from app.vocabulary import FUNCTION_WORDS, words

ALIKE_TITLES: Final = 0.45
"""Weighed Jaccard likeness of the titles of two documents that hold hardly more than a title: one thing in two editions.
.4 to .5 differ by .003 of nDCG on rfc_en; from .35 on, standards of one family are taken for each other."""
ALIKE_NAMES: Final = 0.7
"""The same where there is a text beside the title, which may be about something else: .45 costs 0.9 % on cranfield."""
RELATED_NAMES: Final = 0.2
"""Likeness of names that is enough where both documents hold all words of the query."""
KEEPS: Final = 0.5
"""A document stands for another only if it covers at least this share of what the other covers of the query."""
EQUAL: Final = 0.9
"""Share of the older one's coverage from which the newer edition of a series answers the query as well."""
COVERS: Final = 0.7
"""Share of the best coverage from which a document answers a question about what is current."""
COVERING: Final = 50
"""Best candidates that may be one thing without being editions of one series, where the query wants what is current."""
STUB: Final = 0.25
"""A short text of less than this share of another does not stand for it: an erratum is not the article. Passages of
longer documents differ in length for no such reason."""
SHORT_TEXT: Final = 80
"""Characters up to which a text adds hardly anything to a title, and its length says nothing."""
FEW_WORDS: Final = 3
"""Words that say something below which all words of a name count: 'Now You See Me' is not 'See for Me'."""
OWN_WORDS: Final = 3
"""Words of a text that its title lacks, from which what it never says is not what it is about. A bare title leaves words
out: of two RFCs the newer is called "Randomness Requirements" for "Randomness Recommendations"."""
LEAST_WORDS: Final = 8
"""Distinct words of an untitled document from which their likeness says that it is another's edition."""
NAME_CHARS: Final = 300
"""Characters of an untitled document that count as its name."""
MOST_TERMS: Final = 32
"""Words of the query that are looked for in each document."""


@dataclass(frozen=True, slots=True)
class Said:
    """One candidate: when it was written, and what it says.

    `text` is its passage for the query. `held` is which of `asked_terms` and `identifiers` the whole document holds.
    """

    created_ms: int | None
    title: str
    text: str
    held: frozenset[str]
    evergreen: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Positions of candidates that say the same thing, in the order in which they were given, and why they do."""

    members: tuple[int, ...]
    why: str


def groups(query: str, candidates: Sequence[Said], *, current: bool = False) -> list[Group]:
    """Return the groups of two or more candidates that say the same thing; the others stand alone.

    Candidates come best first; each is compared with the best of each group only, so that likeness does not run along
    chains. Undated and evergreen documents are in no group. `current`: the query asks for what holds now; then
    editions of one series, whatever their number or date, and all that cover the query about equally well, say the
    same thing too.
    """
    compared = _Compared(query, candidates)
    rest = [at for at, said in enumerate(candidates) if said.created_ms is not None and not said.evergreen]
    found: list[Group] = []
    if current:
        found, rest = compared.series(rest)
        rest = [at for at in rest if at < COVERING]
    leaders: list[tuple[list[int], list[str]]] = []
    for at in rest:
        for members, whys in leaders:
            if why := compared.same(members[0], at, current=current):
                members.append(at)
                whys.append(why)
                break
        else:
            leaders.append(([at], []))
    return [*found, *(Group(tuple(members), whys[0]) for members, whys in leaders if whys)]


def newest_first(
    group: Sequence[int], candidates: Sequence[Said], *, not_after_ms: int | None = None
) -> list[int]:
    """Return the group's positions, newest document first; what was written later than `not_after_ms` comes last.

    Equal dates keep their order.
    """

    def order(at: int) -> tuple[bool, int, int]:
        created = candidates[at].created_ms or 0
        return (not_after_ms is not None and created > not_after_ms, -created, at)

    return sorted(group, key=order)


def asked_terms(query: str) -> tuple[str, ...]:
    """Return the words that a query asks for, in its order, without those by which it asks; `MOST_TERMS` at most.

    Latin words lose a plural s; of Chinese and Japanese they are pairs of characters.
    """
    terms = _terms(_ASKS.sub(" ", _fold(query)))
    wanted = [term for term in terms if not _PARTICLES.search(term)] or terms
    if len(wanted) < 2 and not _CJK.search(query):
        wanted = list(dict.fromkeys(_WORD.findall(_fold(query))))  # "now you see me"
    return tuple(wanted[:MOST_TERMS])


def identifiers(query: str) -> tuple[str, ...]:
    """Return what in a query tells one edition from another: numbers, versions, names of months."""
    folded = _fold(query)
    months = (word for word in _LETTERS.findall(folded) if word in _MONTHS and len(word) > 3)
    return tuple(dict.fromkeys([*_NUMBER.findall(folded), *months]))[:MOST_TERMS]


class _Compared:
    """The candidates taken apart once: names, words and identifiers, and how much each word weighs."""

    def __init__(self, query: str, candidates: Sequence[Said]) -> None:
        self.candidates = candidates
        named = [_fold(said.title or said.text[:NAME_CHARS]) for said in candidates]
        self.names = [_name(name) for name in named]
        self.rarity = _rarity(self.names)
        self.weights = [self._weight(name) for name in self.names]
        self.stems = [_series(said.title) for said in candidates]
        asked = self.asked = frozenset(asked_terms(query))
        self.compounds = _COMPOUND.findall(_fold(query))
        held = [said.held & asked for said in candidates]
        rarity = _rarity(held)
        self.complete = [bool(asked) and asked <= terms for terms in held]
        # What none of them holds weighs the same for all.
        self.coverage = [sum(rarity[term] for term in terms) for terms in held]
        asked_by_name = [name & asked for name in self.names]
        rarity = _rarity(asked_by_name)
        self.named_coverage = [sum(rarity[term] for term in terms) for terms in asked_by_name]
        told = identifiers(query)
        patterns = {name: re.compile(rf"(?<![\d.]){re.escape(name)}(?!\d)") for name in told}
        # The cluster tells of words: the 3 of POP3 is none, and yet the document names it.
        read = (
            f"{name}\n{_fold(said.text) if told else ''}"
            for name, said in zip(named, candidates, strict=True)
        )
        self.identified = [
            frozenset(name for name in told if name in said.held or patterns[name].search(text))
            for said, text in zip(candidates, read, strict=True)
        ]
        self.named = [frozenset(name for name in told if patterns[name].search(text)) for text in named]

    def _weight(self, terms: frozenset[str]) -> float:
        return sum(self.rarity[term] for term in terms)

    def likeness(self, a: int, b: int) -> float:
        """Return the share of what two names say that both say, each word weighed by its rarity; in [0, 1]."""
        common = self._weight(self.names[a] & self.names[b])
        union = self.weights[a] + self.weights[b] - common
        return common / union if union > 0 else 0.0

    def same(self, a: int, b: int, *, current: bool) -> str:
        """Return why two dated candidates say the same thing, "" if they don't."""
        newer, older = (a, b) if self._created(a) >= self._created(b) else (b, a)
        told = self.coverage[newer]
        if self.identified[a] != self.identified[b] or told < KEEPS * self.coverage[older]:
            return ""
        why = ""
        if not self._is_stub(newer, beside=older):
            why = self._by_names(a, b, newer=newer, older=older)
        if not why and current and min(told, self.coverage[older]) >= COVERS * max(self.coverage) > 0:
            why = "both cover what is asked, and the query wants what is current"
        return "" if why and self._asked_by_name(older, newer=newer) else why

    def _asked_by_name(self, older: int, *, newer: int) -> bool:
        """Tell whether a word of the query names the older one and the newer one, which has a text, never says it."""
        said = self.candidates[newer]
        known = said.held | self.names[newer]
        missing = (self.names[older] & self.asked) - known
        if not missing:
            return False
        text = _fold(said.text)
        if said.title and len(frozenset(_terms(text)) - self.names[newer]) < OWN_WORDS:
            return False
        # Pairs of characters run across the borders of words: one whose ends both belong to shared pairs tells nothing.
        shared = frozenset("".join(term for term in self.asked & known if _CJK.match(term)))
        # "E-mail" is "email".
        joined = frozenset(_terms(_HYPHEN.sub("", f"{_fold(said.title)} {text}")))
        for word in self.compounds:
            if not joined.isdisjoint(_terms(_HYPHEN.sub("", word))):
                missing -= frozenset(_terms(word))
        return any(
            not shared.issuperset(term) if _CJK.match(term) else term not in joined for term in missing
        )

    def _by_names(self, a: int, b: int, *, newer: int, older: int) -> str:
        titled = bool(self.candidates[a].title) and bool(self.candidates[b].title)
        likeness = self.likeness(a, b)
        if titled or min(len(self.names[a]), len(self.names[b])) >= LEAST_WORDS:
            bare = titled and not (self._has_body(a) and self._has_body(b))
            if likeness >= (ALIKE_TITLES if bare else ALIKE_NAMES):
                return "alike names"
        series = bool(self.stems[a]) and self.stems[a] == self.stems[b]
        if series and self.coverage[newer] >= EQUAL * self.coverage[older] > 0:
            return "editions of one series, which cover what is asked equally"
        related = titled and (series or likeness >= RELATED_NAMES) and self.complete[a] and self.complete[b]
        # Texts hold many words: what is about the same holds as many of those asked for in its name.
        if related and self.named_coverage[newer] >= self.named_coverage[older] - 1e-9:
            return "related names, and both hold all that is asked"
        return ""

    def series(self, dated: Sequence[int]) -> tuple[list[Group], list[int]]:
        """Return the editions of each series, and those that belong to none.

        A series is titles that are equal but for numbers, versions and dates, as far as the query does not name one.
        """
        by_series: dict[tuple[frozenset[str], frozenset[str]], list[int]] = {}
        for at in dated:
            if self.stems[at]:
                members = by_series.setdefault((self.stems[at], self.named[at]), [])
                if not members or self.coverage[at] >= KEEPS * self.coverage[members[0]]:
                    members.append(at)
        found = [
            Group(tuple(members), "editions of one series, and the query wants what is current")
            for members in by_series.values()
            if len(members) > 1
        ]
        taken = {at for group in found for at in group.members}
        return found, [at for at in dated if at not in taken]

    def _created(self, at: int) -> int:
        return self.candidates[at].created_ms or 0

    def _has_body(self, at: int) -> bool:
        said = self.candidates[at]
        return bool(said.title) and len(said.text) > len(said.title) + SHORT_TEXT

    def _is_stub(self, newer: int, *, beside: int) -> bool:
        told = len(self.candidates[newer].text)
        return told <= SHORT_TEXT and told < STUB * len(self.candidates[beside].text)


# --- words ---------------------------------------------------------------------------------------------------------------


_WORD: Final = re.compile(r"[^\W_\u3040-\u30ff\u3400-\u9fff]+(?:\.\d+)*|[\u3040-\u30ff\u3400-\u9fff]+")
_CJK: Final = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_TELLS_NOTHING: Final = FUNCTION_WORDS | words(
    "it may some any latest newest current currently recent recently now today"
    # What an apostrophe leaves behind.
    " s ll ve"
)
_ASKS: Final = re.compile(
    r"最新(?:版本|版|的)?|目前|现在|現在|当前|當前|什么|什麼|哪些|多少|怎么|如何|[吗嗎呢哪谁誰]|です|ます"
)
"""Parts of Chinese and Japanese questions that ask, and say nothing of what for."""
_PARTICLES: Final = re.compile(r"[的了是在和与與はがをにの]")
_MONTHS: Final = words(
    "january february march april may june july august september october november december jan feb mar apr jun jul aug"
    " sep sept oct nov dec"
)
_EDITION: Final = words("rc beta alpha ga v q version release draft revised 年 月 日 号 版 第 期")
_NUMBERED: Final = re.compile(r"\d[\w.]*(?:-(?:rc|beta|alpha|ga)[\w.]*)?")
_LETTERS: Final = re.compile(r"[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|[\u3040-\u30ff\u3400-\u9fff]+")
_HYPHEN: Final = re.compile(r"[-\u2010\u2011]")
_COMPOUND: Final = re.compile(r"(?<!\w)\w+(?:[-\u2010\u2011]\w+)+")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)*")


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _terms(folded: str) -> list[str]:
    """Return the distinct words, in order, without plural s and function words; of CJK text the pairs of characters."""
    terms: dict[str, None] = {}
    for word in _WORD.findall(folded):
        if _CJK.match(word):
            pairs = [word] if len(word) == 1 else [word[at : at + 2] for at in range(len(word) - 1)]
            terms.update(dict.fromkeys(pairs))
        elif word not in _TELLS_NOTHING:
            terms[word[:-1] if len(word) > 3 and word.endswith("s") else word] = None
    return list(terms)


def _name(folded: str) -> frozenset[str]:
    """Return a name's words: all of them where hardly any of them says something by itself ("Now You See Me")."""
    terms = frozenset(_terms(folded))
    return terms if len(terms) >= FEW_WORDS else frozenset(_WORD.findall(folded))


def _rarity(held: Sequence[frozenset[str]]) -> dict[str, float]:
    """Return ln((n + 1) / (df + 1/2)) for each term that occurs: above 0, largest where it occurs once."""
    count: dict[str, int] = {}
    for terms in held:
        for term in terms:
            count[term] = count.get(term, 0) + 1
    return {term: math.log((len(held) + 1) / (df + 0.5)) for term, df in count.items()}


def _series(title: str) -> frozenset[str]:
    """Return a title's words without what changes from one edition to the next: numbers, versions, dates."""
    bare = _NUMBERED.sub(" ", _fold(title))
    words = [word for word in _LETTERS.findall(bare) if word not in _MONTHS and word not in _EDITION]
    telling = frozenset(word for word in words if word not in _TELLS_NOTHING)
    return telling if len(telling) >= FEW_WORDS else frozenset(words)
