"""What an answer warns of: options that did nothing, and what may be wrong where nothing was found.

Pure: sentences out of a plan, its lists, and for an answer without hits out of one more request, whose bodies are made
here. That request looks within the filters that hold whatever the request's own says: the key's, and those of time. So
it tells of nothing that a search could not find, and counts nothing that has expired or that `as_of` hides.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from app import decay, fields, filters, queries
from app.planning import Plan, RouteAnswer
from app.stages import Placed

MOST_KEYS: Final = 5
"""Metadata keys of a filter that are looked for where it leaves nothing."""
SAMPLED: Final = 5
"""Documents whose metadata is read for the key that may be meant: half of what a page of hits brings."""
MOST_KNOWN: Final = 500
"""Keys of those documents that a mistyped one is compared with, the first ones: a document may have 10,000."""
MOST_READ: Final = 20_000
"""Keys looked at for those."""
LONGEST_KNOWN: Final = 64
"""Characters of a key that is compared; longer ones are not suggested."""
LIKE: Final = 0.6
"""Likeness from which a key is suggested for another, as `Meant.likeness` has it."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is asked where nothing was found: a body for each key, one for keys to suggest, one for the nearest document."""

    keys: tuple[str, ...]
    nearest: bool
    bodies: tuple[dict[str, Any], ...]


def of_options(plan: Plan, order: Sequence[Placed]) -> list[str]:
    """Return warnings of a decay that fits no age among the candidates, and of options that this search leaves idle."""
    told = []
    if plan.base_decay is not None and order:
        # Of the window, not of a page: a decay that sends the old ones off the page has changed a lot.
        aged = [
            (factor, plan.origin_ms - item.aged_ms)
            for item in order
            if item.aged_ms is not None
            and not item.evergreen
            and not item.tail
            and (factor := item.factor) is not None
        ]
        misfit = decay.misfit(
            plan.base_decay,
            [factor for factor, _ in aged],
            oldest_ms=max((age for _, age in aged), default=0),
        )
        if misfit is not None:
            told.append(misfit)
    if plan.search.fold_superseded and not plan.compares:
        told.append(
            "`fold_superseded` does nothing here: the decay of this search is not 'auto' (a profile, or a route of its own, "
            "has another); ask for `decay`: 'auto', or drop it"
        )
    return told


# --- where nothing was found -----------------------------------------------------------------------------------------


def lookup(
    plan: Plan,
    *,
    found: bool,
    answers: Mapping[str, RouteAnswer],
    vectors: Mapping[str, queries.Vector],
) -> Lookup | None:
    """Return what to ask of a search that found nothing, or a route of which did; None if nothing could come of it."""
    declared = plan.collection.declared
    asked = [] if found else [plan.search.filter]
    asked += [
        route.asked.filter
        for route in plan.routes
        if (answer := answers.get(route.name)) is not None and not answer.candidates
    ]
    keys = list(
        dict.fromkeys(
            key
            for each in asked
            if each
            for key in filters.undeclared_keys(filters.parse_filter(each, declared=declared))
        )
    )[:MOST_KEYS]
    visible = list(plan.visible)
    bodies: list[dict[str, Any]] = [
        {"size": 0, "terminate_after": 1, "query": {"bool": {"filter": [*visible, filters.has_key(key)]}}}
        for key in keys
    ]
    if keys:
        bodies.append(
            {
                "size": SAMPLED,
                "track_total_hits": False,
                "query": {"bool": {"filter": visible}},
                "_source": [fields.METADATA],
            }
        )
    vector = vectors.get(plan.search.query)
    nearest = not found and plan.search.min_relevance is not None and vector is not None
    if nearest:
        assert vector is not None
        near = queries.vector_query(vector, k=1, num_candidates=plan.window, filters=plan.filters)
        bodies.append({"size": 1, "track_total_hits": False, "query": near, "_source": False})
    return Lookup(tuple(keys), nearest, tuple(bodies)) if bodies else None


@dataclass(slots=True)
class Meant:
    """Which key may be meant by a mistyped one; remembers what it found, since the queries of a batch share their slips."""

    found: dict[tuple[str, tuple[str, ...]], str | None] = field(default_factory=dict)
    known: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """`id` of a sample of documents, which the caller holds -> the keys in it that are compared."""

    def keys_in(self, sample: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of a sample's documents that are compared with a mistyped one."""
        if id(sample) not in self.known:
            every = islice((key for hit in sample["hits"]["hits"] for key in _keys_of(hit)), MOST_READ)
            short = dict.fromkeys(key for key in every if len(key) <= LONGEST_KNOWN)
            self.known[id(sample)] = tuple(islice(short, MOST_KNOWN))
        return self.known[id(sample)]

    def by(self, key: str, known: Iterable[str]) -> str | None:
        """Return the known key that is likest to this one, at least `LIKE`; of equally like ones the first."""
        asked = (key, tuple(known))
        if asked not in self.found:
            like, at = max(
                ((likeness(key, other), -at) for at, other in enumerate(asked[1])), default=(0.0, 0)
            )
            self.found[asked] = asked[1][-at] if like >= LIKE else None
        return self.found[asked]


def likeness(a: str, b: str) -> float:
    """Return 2·L / (len(a) + len(b)), L the length of the longest common subsequence; in [0, 1]. 0 for long keys.

    L is counted bit by bit in parallel (Hyyrö, "Bit-parallel LCS-length computation revisited", 2004), one step per
    character: `difflib` took 0.4 s of the event loop for one key among 500 of the same letters, this takes 0.01 s.
    """
    if not a or not b or max(len(a), len(b)) > LONGEST_KNOWN:
        return 0.0
    if 2 * min(len(a), len(b)) < LIKE * (len(a) + len(b)):
        return 0.0
    places: dict[str, int] = {}
    for at, char in enumerate(a):
        places[char] = places.get(char, 0) | 1 << at
    full = (1 << len(a)) - 1
    unmatched = full
    for char in b:
        matched = unmatched & places.get(char, 0)
        unmatched = (unmatched + matched | unmatched - matched) & full
    return 2 * (len(a) - unmatched.bit_count()) / (len(a) + len(b))


def read(
    plan: Plan, asked: Lookup, answers: Sequence[Mapping[str, Any]], meant: Meant | None = None
) -> list[str]:
    """Return the warnings that the lookup's answers give."""
    told = []
    meant = meant or Meant()
    missing = [
        key for key, answer in zip(asked.keys, answers, strict=False) if answer["hits"]["total"]["value"] == 0
    ]
    if missing:
        sampled = meant.keys_in(answers[len(asked.keys)])
        known = tuple(dict.fromkeys((*fields.RESERVED, *plan.collection.declared, *sampled)))
        told += [_unknown(key, known, plan=plan, among=meant) for key in missing]
    if asked.nearest:
        hits = answers[-1]["hits"]["hits"]
        least = plan.search.min_relevance
        assert least is not None
        cosine = queries.cosine_of(float(hits[0]["_score"]), plan.collection.similarity) if hits else None
        if cosine is not None and cosine < least:
            told.append(
                f"`min_relevance` of {least:g} left nothing: the nearest document within the filters has a relevance of "
                f"{max(0.0, cosine):.3f}; lower it, or leave it out and see the `relevance` of good and bad hits"
            )
    return told


def _unknown(key: str, known: tuple[str, ...], *, plan: Plan, among: Meant) -> str:
    where = "no document that this key may see" if plan.forced else "no document of the collection"
    when = " as of that time" if plan.search.as_of is not None else ""
    told = f"{where} has the metadata key `{filters.shown(key)}`{when}"
    meant = filters.connective(key) or among.by(key, known)
    return told if meant is None else f"{told}; did you mean `{filters.shown(meant)}`?"


def _keys_of(hit: Mapping[str, Any]) -> Iterator[str]:
    """Return the paths of a document's metadata, as filters name them."""
    stack = [("", hit.get("_source", {}).get(fields.METADATA) or {})]
    while stack:
        path, value = stack.pop()
        if isinstance(value, Mapping):
            stack.extend((f"{path}.{key}" if path else key, inner) for key, inner in value.items())
        elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
            stack.extend((path, inner) for inner in value)
        elif path:
            yield path
