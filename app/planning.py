"""From one search request to what the cluster is asked, and back from its answers to ranked candidates.

Pure. Composes `decay`, `filters` and `queries` for the use-cases that ask and explain; holds no client and no
clock. Everything sent is a plain dict that pastes into Kibana.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from app import decay, fields, filters, queries, supersession, synonyms
from app.answers import Rewrite, Total
from app.asking import Highlight, Rewriting, Search, Wording
from app.collection import Collection
from app.errors import InvalidRequest, LimitExceeded, SchemaMismatch
from app.ranking import (
    STAGES,
    Decay,
    DecayStrength,
    DecayWord,
    FeedbackOptions,
    Fusion,
    Profile,
    Ranked,
    ResolvedDecay,
    Route,
    RouteKind,
    has_strength,
)
from app.ratings import Ratings
from app.times import DAY_MS, format_instant, from_ms, parse_instant, to_ms
from app.values import DEFAULT_WINDOW, MAX_ROUTES

DEFAULT_DECAY: Final = "auto"
"""What holds where neither the request nor a profile says anything about decay. Over the judged sets it lifts currency
from .46 to .76 (rfc_en) and from .13 to .97 (rust_blog_en), and costs no set that has nothing to supersede more than .3 %
(docs/relevance.md, "Recency by itself")."""
LONGEST_COMPARED: Final = 300
"""Characters of a query up to which its words are looked for in each document; beyond, names alone are compared, since
the clauses of a query of hundreds of words and these together pass what a cluster allows."""
DEFAULT_ROUTES: Final = (Route(kind="text"), Route(kind="vector"))
CHUNKS_PER_DOCUMENT: Final = 20
"""Chunks of one document that may stand in a list when hits are not collapsed."""
VECTOR_OVERSAMPLE: Final = 2
"""With decay on, a vector route asks for this many times its window, since decay reorders only what kNN found."""
THRESHOLD_NEIGHBOURS: Final = 10_000


@dataclass(frozen=True, slots=True)
class PlannedRoute:
    """A route with nothing left open; `asked` is the route as it was asked for, or as a profile has it."""

    asked: Route
    name: str
    kind: RouteKind
    weight: float
    decay: ResolvedDecay | None
    filters: tuple[dict[str, Any], ...]
    text: str
    words: str
    num_candidates: int
    title_boost: float = queries.TITLE_BOOST

    @property
    def needs_vector(self) -> bool:
        return self.kind in ("vector", "fresh_vector")


@dataclass(frozen=True, slots=True)
class Pinned:
    """How a search was worded on its first page."""

    wordings: Mapping[str, Sequence[Wording]]
    rewrites: tuple[Rewrite, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A search with nothing left open but its vectors."""

    search: Search
    collection: Collection
    origin_ms: int
    routes: tuple[PlannedRoute, ...]
    placement: Literal["route", "fused", "off"]
    base_decay: ResolvedDecay | None
    auto_decay: bool
    """Decay is 'auto': decided once the candidates are known."""
    fusion: Fusion
    window: int
    filters: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...]
    ranked: Ranked | None = None
    """Which profile ranks it, as the answer tells."""
    feedback: FeedbackOptions | None = None
    ratings: Ratings | None = None
    """What votes say, where they shall count and are known."""
    forced: int = 0
    """How many of the filters, the first ones, are the key's: they are never shown."""
    given: int = 0
    """How many, the key's counted, hold whatever the request's `filter` says: what they hide no search like it can see."""
    wordings: Mapping[str, Sequence[Wording]] = field(default_factory=dict)
    """A text that words are looked for of -> its other wordings, by the collection's synonyms."""
    rewrites: tuple[Rewrite, ...] = ()
    """What the answer tells of them."""

    def age_days(self, moment_ms: int | None) -> float | None:
        """Return the days from a moment to the origin, negative for the future; None for none."""
        return None if moment_ms is None else (self.origin_ms - moment_ms) / DAY_MS

    @property
    def visible(self) -> tuple[dict[str, Any], ...]:
        """Return the filters that let in what this search could see without its own: the key's, and those of time."""
        return self.filters[: self.given]

    @property
    def compares(self) -> bool:
        """Tell whether documents that say the same thing are looked for; chunks of one document would be."""
        return self.auto_decay and self.search.collapse

    @property
    def tails(self) -> tuple[int, ...]:
        """The sizes of the further lists that fill a page longer than the window: doubled until they hold it.

        A page of 150 and one of 300 share those of 200, so that the shorter is the beginning of the longer.
        """
        sizes: list[int] = []
        size = self.window
        while size < self.search.top_k:
            size = min(2 * size, queries.MAX_CANDIDATES)
            sizes.append(size)
        return tuple(sizes)

    def resolved_request(self) -> dict[str, Any]:
        """Return the request as JSON with what the collection's profile gave written out.

        Later pages are planned from it, so a profile that changes meanwhile can't change their order: read as
        `SETTLED`, without any profile, it gives this plan again.
        """
        chosen = _chosen_decay(self.search, _profile(self.search, self.collection))
        request = self.search.model_dump(mode="json", exclude_unset=True)
        request.pop("profile", None)
        # Also where it was left open: what it is then depends on the window, and on the service's limit.
        request["top_k"] = self.search.top_k
        # Its routes stand among the request's: no page after the first asks the model again.
        request.pop("rewrite", None)
        if not self.compares:
            # Idle beside the profile's decay, and refused beside the one that is written out here.
            request.pop("fold_superseded", None)
        # As planned, not as asked: a decay that the request's own silenced would be refused beside it.
        routes = [route.asked for route in self.routes]
        request["routes"] = [route.model_dump(mode="json", exclude_unset=True) for route in routes]
        request.pop("decay", None)
        if isinstance(chosen, Decay):
            request["decay"] = chosen.model_dump(mode="json", exclude_unset=True)
        elif not any(isinstance(route.decay, DecayStrength) for route in routes):
            # Where routes decay by themselves no word is said: each would silence them.
            request["decay"] = "auto" if self.auto_decay else "off"
        request["fusion"] = self.fusion.model_dump(mode="json", exclude_unset=True)
        request["feedback"] = "off"
        if self.feedback is not None and self.ratings is not None:
            as_of = format_instant(from_ms(self.ratings.as_of_ms))
            request["feedback"] = {"strength": self.feedback.strength, "as_of": as_of}
        return request

    def texts_to_embed(self) -> list[str]:
        """Return the distinct texts whose vectors the bodies need, in a stable order."""
        texts = [route.text for route in self.routes if route.needs_vector]
        search = self.search
        if search.min_relevance is not None or search.mmr is not None or self.fusion.method == "additive":
            texts.append(self.search.query)
        return list(dict.fromkeys(texts))


class Candidate(NamedTuple):
    """A document (or chunk) in one route's list, as the cluster scored it.

    `factor` is the route's own, `aged_ms` the date by which the request's decay ages the document.
    """

    key: str
    id: str
    rank: int
    score: float
    base: float
    factor: float | None
    created_ms: int | None
    aged_ms: int | None
    evergreen: bool
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """What one route gave."""

    candidates: tuple[Candidate, ...]
    total: Total | None
    took_ms: int | None
    partial: str | None


def make_plan(
    search: Search,
    *,
    collection: Collection,
    now_ms: int,
    forced: Sequence[dict[str, Any]] = (),
    pinned: Pinned | None = None,
    compiler: filters.Compiler | None = None,
) -> Plan:
    """Return the plan of one search; `forced` clauses hold for every route and every later stage.

    `compiler` is shared by the searches of a batch, which share filters.

    `pinned` is how the first page was worded: later pages keep to it, whatever the synonyms are by now.
    Raises InvalidRequest for filters outside the grammar and vectors of other dims.
    """
    origin_ms = now_ms if search.as_of is None else to_ms(search.as_of)
    profile = _profile(search, collection)
    search = _with_stages(search, profile)
    chosen = _chosen_decay(search, profile)
    base = chosen if isinstance(chosen, Decay) else None
    if search.query_vector is not None and len(search.query_vector) != collection.dims:
        raise InvalidRequest(
            f"the query vector has {len(search.query_vector)} dims, the collection {collection.dims}",
            field="query_vector",
            remedy="embed the query with the collection's model, or leave `query_vector` out",
        )
    fusion = search.fusion or profile.fusion or Fusion()
    if fusion.method == "additive" and base is None:
        raise InvalidRequest(
            "additive scores add recency, but the request has no decay",
            field="fusion.method",
            remedy="give `decay`, such as {'hourly_loss': 0.01, 'field': 'last_accessed_at', 'floor': 0}",
        )
    common = [*forced, *_standing_filters(search, origin_ms=origin_ms)]
    given = len(common)
    compiled = compiler or filters.Compiler()
    if search.filter:
        common += compiled(search.filter, declared=collection.declared)
    warnings: list[str] = []
    wanted = _wanted_routes(search, profile, base)
    _check_words(search, wanted)
    routes: list[PlannedRoute] = []
    for position, route in enumerate(wanted):
        text = route.query or search.query
        if search.query_vector is not None and text != search.query and route.kind.endswith("vector"):
            raise InvalidRequest(
                f"`query_vector` is the embedding of the request's `query`, and route '{route.name}' looks for other words",
                field="query_vector",
                remedy="drop it, so that both are embedded here, or drop the route's `query`",
            )
        words, cut = queries.lexical_words(text)
        if cut and not route.kind.endswith("vector"):
            warnings.append(
                f"route '{route.name}' reads only the first {queries.MAX_LEXICAL_TERMS} distinct words of the query"
            )
        own: list[dict[str, Any]] = []
        if route.filter:
            own = compiled(route.filter, declared=collection.declared, path=f"routes[{position}].filter")
        if route.kind.startswith("fresh_"):
            own.append(
                queries.within(
                    window_fields(route, None if base is None else base.field),
                    origin_ms=origin_ms,
                    window_ms=queries.DEFAULT_FRESH_MS if route.window is None else route.window,
                )
            )
        if route.weight == 0:
            warnings.append(f"route '{route.name}' has weight 0: it adds neither score nor hits")
        routes.append(
            PlannedRoute(
                asked=route,
                name=str(route.name),
                kind=route.kind,
                weight=route.weight,
                decay=_route_decay(base, route, path=f"routes[{position}].decay"),
                filters=(*common, *own),
                text=text,
                words=words,
                num_candidates=route.num_candidates or 0,
                title_boost=queries.TITLE_BOOST if route.title_boost is None else route.title_boost,
            )
        )
    if pinned is None:
        pinned, left_out = _worded(search, collection, routes)
        if left_out:
            warnings.append(
                "the query has more wordings by its synonyms than are searched: the first ones are"
            )
    return Plan(
        search=search,
        collection=collection,
        origin_ms=origin_ms,
        routes=tuple(routes),
        placement=_placement(base, routes),
        auto_decay=_is_auto(search, profile),
        base_decay=None if base is None else decay.resolve(base, default_floor=_base_floor(fusion)),
        fusion=fusion,
        window=fusion.window or DEFAULT_WINDOW,
        filters=tuple(common),
        warnings=tuple(warnings),
        feedback=_feedback(search, profile),
        forced=len(forced),
        given=given,
        wordings=pinned.wordings,
        rewrites=pinned.rewrites,
    )


def _worded(search: Search, collection: Collection, routes: Sequence[PlannedRoute]) -> tuple[Pinned, bool]:
    """Return the other wordings of all texts that words are looked for of, and whether some are left out."""
    wordings: dict[str, list[Wording]] = {}
    rewrites: dict[tuple[str, ...], Rewrite] = {}
    left_out = False
    if not search.synonyms or not collection.synonyms:
        return Pinned({}, ()), False
    searched = {route.text for route in routes if not route.needs_vector}
    # The request's query too: passages without a vector are chosen, and hits marked, by its words.
    for text in dict.fromkeys([search.query, *(route.text for route in routes if not route.needs_vector)]):
        found = synonyms.find(text, collection.synonyms)
        if not found:
            continue
        made, more = synonyms.wordings(text, found)
        words, _ = queries.lexical_words(text)
        kept = wordings[text] = queries.affordable(words, made)
        if text not in searched:
            continue
        left_out = left_out or more or len(kept) < len(made)
        for told in synonyms.told(text, found, kept):
            rewrites.setdefault((told.of, *told.texts), told)
    return Pinned(wordings, tuple(rewrites.values())), left_out


def rewritten(plan: Plan, found: Rewriting, *, forced: Sequence[dict[str, Any]], model: str) -> Plan:
    """Return the plan with the routes of what a model made of its query, each within what a route of its kind may find."""
    wanted = plan.search.rewrite
    assert wanted is not None
    widened = {kind: _scopes(plan, kind) for kind in ("text", "vector")}
    if plan.search.query_vector is not None:
        # That vector is of other words, and routes that need one of their own are refused.
        widened["vector"] = []
    taken = {route.name for route in plan.routes}
    routes = [route.asked for route in plan.routes]
    left = queries.MAX_TERMS_OF_ROUTES - sum(
        queries.cost(route.words) for route in plan.routes if not route.needs_vector
    )
    rewrites: list[Rewrite] = []
    left_out = False

    def add(
        kind: Literal["keywords", "expansion", "query"],
        texts: list[str],
        *as_kinds: Literal["text", "vector"],
    ) -> None:
        nonlocal left, left_out
        names: list[str] = []
        text = " ".join(texts)
        words = queries.cost(queries.lexical_words(text)[0])
        for like in [like for as_kind in as_kinds for like in widened[as_kind]] if texts else ():
            as_kind = "vector" if like.kind.endswith("vector") else "text"
            cost = words if as_kind == "text" else 0
            if len(routes) == MAX_ROUTES or cost > left:
                left_out = True
                continue
            left -= cost
            stem = f"rewrite_{as_kind}" if kind == "query" else f"rewrite_{kind}"
            name = next(
                each for n in range(1, 100) if (each := stem if n == 1 else f"{stem}_{n}") not in taken
            )
            taken.add(name)
            names.append(name)
            routes.append(like.model_copy(update={"name": name, "weight": wanted.weight, "query": text}))
        if names:
            rewrites.append(
                Rewrite(source="model", kind=kind, of=plan.search.query, texts=texts, routes=names)
            )

    add("keywords", found.keywords, "text")
    add("expansion", found.expansion, "text")
    for query in found.queries:
        add("query", [query], "text", "vector")
    planned = make_plan(
        plan.search.model_copy(update={"routes": routes}),
        collection=plan.collection,
        now_ms=plan.origin_ms,
        forced=forced,
    )
    warnings = (
        [] if rewrites else [f"the model {model} made nothing of this query that could be searched for"]
    )
    if left_out:
        warnings.append(f"a search has at most {MAX_ROUTES} routes: some rewritings are left out")
    return replace(
        planned,
        ranked=plan.ranked,
        rewrites=(*planned.rewrites, *rewrites),
        warnings=(*dict.fromkeys((*planned.warnings, *warnings)),),
    )


def _scopes(plan: Plan, kind: Literal["text", "vector"]) -> list[Route]:
    """Return the asked routes of a kind, of which between them a rewriting may find all and no more.

    One that finds anything is enough; else each filter, window and decay once.
    """
    asked = [route.asked for route in plan.routes if route.kind.endswith(kind)]
    whole = [route for route in asked if route.kind == kind and not route.filter]
    if whole:
        return whole[:1]
    distinct: dict[str, Route] = {}
    for route in asked:
        scope = route.model_dump_json(include={"kind", "filter", "window", "field", "decay"})
        distinct.setdefault(scope, route)
    return list(distinct.values())


def _feedback(search: Search, profile: Profile) -> FeedbackOptions | None:
    chosen = profile.feedback if search.feedback is None else search.feedback
    return chosen if isinstance(chosen, FeedbackOptions) else None


def shown(plan: Plan, route: PlannedRoute) -> PlannedRoute:
    """Return the route without the key's filter, as an explanation may show it."""
    return replace(route, filters=route.filters[plan.forced :])


def _profile(search: Search, collection: Collection) -> Profile:
    """Return the ranking profile that fills what the request leaves open."""
    name = search.profile or collection.default_profile
    if name is None:
        return Profile()
    if (fault := collection.unreadable.get(f"profiles.{name}")) is not None:
        raise SchemaMismatch(
            f"the profile '{name}' of the collection `{collection.name}` can't be read: {fault}",
            field=f"profiles.{name}",
            remedy=f"write the collection's `profiles` anew with PUT /v1/collections/{collection.name}",
        )
    if name not in collection.profiles:
        raise InvalidRequest(
            f"the collection `{collection.name}` has no profile '{name}'",
            field="profile",
            remedy=f"its profiles are: {', '.join(sorted(collection.profiles)) or 'none'}",
        )
    return collection.profiles[name]


def _with_stages(search: Search, profile: Profile) -> Search:
    """Return the search with the stages that its profile gives and it says nothing of, as far as they fit it."""
    given = {
        name: value
        for name in STAGES
        if (value := getattr(profile, name)) is not None and name not in search.model_fields_set
    }
    if search.rerank is not None or search.mmr is not None:
        # One of them orders the head: the request's.
        given = {name: value for name, value in given.items() if name not in ("rerank", "mmr")}
    if not (search.collapse and _is_auto(search, profile)):
        given.pop("fold_superseded", None)
    return search.model_copy(update=given) if given else search


def _chosen_decay(search: Search, profile: Profile) -> Decay | DecayWord | None:
    """Return the decay that holds: the request's, else the profile's, whose mere word its routes' own strengths overrule."""
    if search.decay is not None:
        return search.decay
    if profile.decay is None or isinstance(profile.decay, Decay):
        return profile.decay
    return None if _routes_decay(search, profile) else profile.decay


def _routes_decay(search: Search, profile: Profile) -> bool:
    """Tell whether a route has a decay of its own; beside 'auto' its age would count twice."""
    routes = search.routes or profile.routes or ()
    return any(isinstance(route.decay, DecayStrength) for route in routes)


def _is_auto(search: Search, profile: Profile) -> bool:
    """Tell whether decay is 'auto': asked for, or by default, which a decay of a route's own or an additive score is not."""
    chosen = _chosen_decay(search, profile)
    if chosen is not None:
        return chosen == "auto"
    fusion = search.fusion or profile.fusion
    additive = fusion is not None and fusion.method == "additive"
    return DEFAULT_DECAY == "auto" and not additive and not _routes_decay(search, profile)


def _base_floor(fusion: Fusion) -> float:
    return 0.0 if fusion.method == "additive" else decay.DEFAULT_FLOOR


def _check_words(search: Search, wanted: Sequence[Route]) -> None:
    """Refuse routes that together look for more words than one search may cost."""
    texts = [route.query or search.query for route in wanted if not route.kind.endswith("vector")]
    words = sum(queries.cost(queries.lexical_words(text)[0]) for text in texts)
    if words > queries.MAX_TERMS_OF_ROUTES:
        raise LimitExceeded(
            f"the routes look for {words} words in all, and {queries.MAX_TERMS_OF_ROUTES} is the most",
            field="routes",
            remedy="give fewer routes of words, or shorter queries",
        )


def _wanted_routes(search: Search, profile: Profile, base: Decay | None) -> list[Route]:
    """Return the routes under their names, their own decays fitting the request's.

    Raises InvalidRequest where a decay placed after fusion meets a route's own, and for a part of a decay that has
    no whole to lie over. An explicit "off" of the request silences a profile's routes.
    """
    routes = _named_routes(search.routes or profile.routes or DEFAULT_ROUTES)
    if search.decay in ("off", "auto"):
        return [route.model_copy(update={"decay": None}) for route in routes]
    for position, route in enumerate(routes):
        if route.decay is None:
            continue
        if base is not None and base.placement == "fused":
            raise InvalidRequest(
                f"route '{route.name}' has its own decay, but this decay is placed after fusion, where one factor holds",
                field=f"routes[{position}].decay",
                remedy="drop the route's decay, or use placement 'route'",
            )
        if base is None and isinstance(route.decay, DecayStrength) and not has_strength(route.decay):
            raise InvalidRequest(
                f"route '{route.name}' changes a part of a decay, but the request has none",
                field=f"routes[{position}].decay",
                remedy="give the request `decay`, or the route its own strength, such as {'half_life': '180d'}",
            )
    return routes


def _placement(base: Decay | None, routes: Sequence[PlannedRoute]) -> Literal["route", "fused", "off"]:
    if base is not None:
        return base.placement
    return "route" if any(route.decay is not None for route in routes) else "off"


def _route_decay(base: Decay | None, route: Route, *, path: str) -> ResolvedDecay | None:
    if route.decay == "off" or (base is None and route.decay is None):
        return None
    if base is None:
        assert isinstance(route.decay, DecayStrength)
        base = Decay.model_validate(route.decay.model_dump(exclude_none=True))
    override = route.decay if isinstance(route.decay, DecayStrength) else None
    vector = route.kind.endswith("vector")
    floor = decay.DEFAULT_VECTOR_FLOOR if vector else decay.DEFAULT_FLOOR
    return decay.resolve(decay.merge(base, override, path=path), default_floor=floor)


def _named_routes(routes: Iterable[Route]) -> list[Route]:
    taken = {route.name for route in routes if route.name is not None}
    named = []
    for route in routes:
        name, number = route.name or str(route.kind), 2
        if route.name is None:
            while name in taken:
                name, number = f"{route.kind}_{number}", number + 1
            taken.add(name)
        named.append(route.model_copy(update={"name": name}))
    return named


def window_fields(route: Route, base_field: str | None) -> tuple[str, ...]:
    """Return the dates of a fresh route's window: the first that a document has, by the origin, is its own.

    Its own field, else its decay's, else the request's decay's, `base_field`: a new memory that was never read is as new as it is.
    """
    if route.field is not None:
        return (route.field,)
    own = route.decay.field if isinstance(route.decay, DecayStrength) else None
    return decay.times_of(own or base_field or fields.CREATION_TIME)


def _standing_filters(search: Search, *, origin_ms: int) -> list[dict[str, Any]]:
    standing = [queries.not_expired(origin_ms)]
    if search.as_of is not None:
        standing.append(queries.created_by(origin_ms))
    if search.valid_time == "only":
        standing.append(queries.true_at(origin_ms))
    return standing


# --- bodies -------------------------------------------------------------------------------------------------------------


def route_query(
    plan: Plan,
    route: PlannedRoute,
    vectors: Mapping[str, queries.Vector],
    *,
    depth: int,
    ids: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the route's whole query; with `ids` only those documents can match, wherever they would rank."""
    where = [*route.filters, *([_ids(ids)] if ids is not None else [])]
    others = plan.wordings.get(route.text, ())
    similarity: float | None = None
    near: dict[str, Any] | None = None
    if plan.search.min_relevance is not None:
        similarity = queries.threshold(plan.search.min_relevance, plan.collection.similarity)
        if not route.needs_vector or route.text != plan.search.query:
            # Only documents that the words match are looked at, so that the neighbours' limit is theirs alone.
            worded = [] if route.needs_vector else [queries.text_query(route.text, others)]
            near = queries.vector_query(
                vectors[plan.search.query], k=THRESHOLD_NEIGHBOURS, num_candidates=THRESHOLD_NEIGHBOURS,
                filters=[*where, *worded], similarity=similarity,
            )  # fmt: skip
    inner = None if plan.search.collapse else {"_source": False, "size": CHUNKS_PER_DOCUMENT}
    if route.needs_vector:
        factor = VECTOR_OVERSAMPLE if plan.placement == "route" and route.decay else 1
        k = min(depth * factor, queries.MAX_CANDIDATES)
        main = queries.vector_query(
            vectors[route.text], k=k, num_candidates=min(max(route.num_candidates, k), queries.MAX_CANDIDATES),
            filters=where, similarity=similarity if near is None else None, inner_hits=inner,
        )  # fmt: skip
        query: dict[str, Any] = queries.named(main, queries.BASE_NAME)
        if near is not None:
            # The nearest to other words, of which those stay that are near to the query: a hit's relevance is that.
            query = {"bool": {"must": [query], "filter": [near]}}
    else:
        main = (
            queries.text_query(route.text, others, title_boost=route.title_boost)
            if plan.search.collapse
            else queries.chunk_text_query(
                route.text, inner_hits=inner, wordings=others, title_boost=route.title_boost
            )
        )
        query = queries.named(main, queries.BASE_NAME)
        where = where if near is None else [*where, near]
        if where:
            query = {"bool": {"must": [query], "filter": where}}
    if route.decay is None:
        return query
    if plan.placement == "route":
        return decay.scored(query, route.decay, origin_ms=plan.origin_ms)
    if plan.placement == "fused" and plan.base_decay is not None:
        return queries.with_factor(query, decay.functions(plan.base_decay, origin_ms=plan.origin_ms))
    return query


def route_body(
    plan: Plan,
    route: PlannedRoute,
    vectors: Mapping[str, queries.Vector],
    *,
    size: int,
    ids: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the body of one route's search: `size` candidates, best first, ties newest first, then by id.

    Date and id come as sort values, not as stored fields: to read a document's `_id` the cluster unpacks its text too.
    """
    # Inner hits need the stored ones.
    stored = {"stored_fields": "_none_"} if plan.search.collapse else {"_source": False}
    return {
        "size": size,
        "query": route_query(plan, route, vectors, depth=size, ids=ids),
        **stored,
        "docvalue_fields": docvalues(plan),
        "sort": [
            {"_score": {"order": "desc"}},
            {fields.CREATION_TIME: {"order": "desc", "missing": "_last"}},
            {fields.DOCUMENT_ID: {"order": "asc"}},
        ],
    }


def docvalues(plan: Plan) -> list[dict[str, str]]:
    """Return the doc values each candidate carries: what ages and explanations are told from, beside its sort values."""
    dates = {route.decay.field for route in plan.routes if route.decay is not None}
    if plan.base_decay is not None:
        dates.add(plan.base_decay.field)
    dates.discard(fields.CREATION_TIME)
    return [
        *({"field": name, "format": "epoch_millis"} for name in sorted(dates)),
        {"field": fields.EVERGREEN},
    ]


def measure_body(
    plan: Plan, vector: queries.Vector, *, ids: Sequence[str], chunks: int | None = None
) -> dict[str, Any]:
    """Return the body that tells each of the documents' relevance and decay factor, exactly, whatever its rank.

    `chunks`: tell the relevance of so many of its chunks too, the nearest ones.
    """
    inner = None if chunks is None else {"name": queries.MEASURED, "_source": False, "size": chunks}
    near = queries.vector_query(
        vector, k=len(ids), num_candidates=len(ids), filters=[_ids(ids)], inner_hits=inner
    )
    should = [queries.named(near, queries.RELEVANCE_NAME)]
    query: dict[str, Any] = {"bool": {"filter": [_ids(ids), *plan.filters], "should": should}}
    if plan.base_decay is not None:
        query = queries.with_factor(query, decay.functions(plan.base_decay, origin_ms=plan.origin_ms))
    return {
        "size": len(ids),
        "query": query,
        "_source": False,
        "docvalue_fields": [{"field": fields.SALIENCE}],
    }


def fetch_body(
    plan: Plan,
    vector: queries.Vector | None,
    *,
    ids: Sequence[str],
    with_embedding: bool,
    chunks: bool = False,
    compares: bool = True,
) -> dict[str, Any]:
    """Return the body that brings the chosen documents with their best chunk.

    With a vector that is the nearest (none where no chunk has a vector), without one the best worded, else the first.
    `chunks`: hits are chunks, so that their nearest ones are told and their texts come with the document. `compares`:
    tell which words of the query each holds, if decay is 'auto'.
    """
    search = plan.search
    others = plan.wordings.get(search.query, ())
    query: dict[str, Any] = {"bool": {"filter": [_ids(ids), *plan.filters]}}
    inner: dict[str, Any] = {"_source": {"includes": _chunk_source(with_embedding)}, "size": 1}
    if vector is not None:
        # Inner hits are most of what this costs: one group of them, never two.
        inner |= {"name": "nearest", "size": CHUNKS_PER_DOCUMENT if chunks else 1}
        near = queries.vector_query(
            vector, k=len(ids), num_candidates=len(ids), filters=[_ids(ids)], inner_hits=inner
        )
        query["bool"]["should"] = [near]
    elif not chunks:
        any_chunk = {"match_all": {"boost": 0}}
        inner |= {"name": "worded", "sort": [{"_score": "desc"}, {fields.CHUNK_START: "asc"}]}
        best = {"bool": {"must": [any_chunk], "should": [queries.chunk_words(search.query, others)]}}
        query["bool"]["should"] = [{"nested": {"path": fields.CHUNKS, "query": best, "inner_hits": inner}}]
    if compares and plan.compares and len(search.query) <= LONGEST_COMPARED:
        told = dict.fromkeys(
            (*supersession.asked_terms(search.query), *supersession.identifiers(search.query))
        )
        query["bool"].setdefault("should", []).extend(queries.holding(told))
    body: dict[str, Any] = {
        "size": len(ids),
        "query": query,
        "_source": {"excludes": _excluded(search, with_embedding=with_embedding)},
    }
    if with_embedding:
        # Elasticsearch reads this for the inner hits too, and only here.
        body["_source"]["exclude_vectors"] = False
    if search.highlight:
        marks = search.highlight if isinstance(search.highlight, Highlight) else Highlight()
        body["highlight"] = queries.highlight(search.query, encoder=marks.encoder, wordings=others)
    return body


def pool_body(
    plan: Plan, vector: queries.Vector | None, *, ids: Sequence[str], packed: bool
) -> dict[str, Any]:
    """Return the body that brings what the stages compare, and no more: each document's best chunk, its vector.

    `packed`: the cluster gives vectors in base64, out of their doc values; else they come with the source, as numbers.
    Texts come where reranking or equal texts need them, titles for the reranker.
    """
    search = plan.search
    body = fetch_body(plan, vector, ids=ids, with_embedding=False, compares=False)
    [group] = body["query"]["bool"]["should"]
    inner = group["nested"]["inner_hits"]
    shown = [fields.CHUNK_TEXT] if search.rerank is not None or search.dedup is not None else []
    titles = [fields.TITLE] if search.rerank is not None else []
    body.pop("highlight", None)
    if packed:
        inner["_source"] = {"includes": shown} if shown else False
        inner["docvalue_fields"] = [{"field": fields.EMBEDDING, "format": "binary"}]
        body["_source"] = {"includes": titles} if titles else False
    else:
        inner["_source"] = {"includes": [*shown, fields.EMBEDDING]}
        body["_source"] = {"includes": titles or [fields.DOCUMENT_ID], "exclude_vectors": False}
    return body


def _chunk_source(with_embedding: bool) -> list[str]:
    shown = [fields.CHUNK_TEXT, fields.CHUNK_START, fields.CHUNK_END]
    return [*shown, fields.EMBEDDING] if with_embedding else shown


def _excluded(search: Search, *, with_embedding: bool) -> list[str]:
    if not search.collapse:
        # Any chunk of a document may be a hit, also one that is neither among the nearest nor the first.
        hidden = [fields.CHUNK_HASH, fields.DECLARED, *([] if search.neighbours else [fields.TEXT])]
        return hidden if with_embedding else [*hidden, fields.EMBEDDING]
    if search.neighbours:
        return [fields.CHUNK_TEXT, fields.CHUNK_HASH, fields.EMBEDDING, fields.DECLARED]
    return [fields.CHUNKS, fields.TEXT, fields.DECLARED]


def _ids(ids: Sequence[str]) -> dict[str, Any]:
    return {"ids": {"values": list(ids)}}


# --- answers ------------------------------------------------------------------------------------------------------------


def read_route(plan: Plan, route: PlannedRoute, answer: Mapping[str, Any]) -> RouteAnswer:
    """Return one route's candidates in the cluster's order, duplicates dropped, ranks from 1."""
    hits = answer["hits"]["hits"]
    seen: set[str] = set()
    ranked: list[Candidate] = []
    if plan.search.collapse:
        for hit in hits:
            if (id_ := id_of(hit)) not in seen:
                seen.add(id_)
                ranked.append(read_candidate(plan, route, hit, rank=len(ranked) + 1))
    else:
        listed = [entry for hit in hits for entry in _entries(plan, route, hit)]
        listed.sort(
            key=lambda c: (
                -c.score,
                -(c.created_ms if c.created_ms is not None else -(2**62)),
                c.id,
                c.chunk or 0,
            )
        )
        for candidate in listed:
            if candidate.key not in seen:
                seen.add(candidate.key)
                ranked.append(candidate._replace(rank=len(ranked) + 1))
    return RouteAnswer(
        candidates=tuple(ranked),
        total=_total(plan, route, answer),
        took_ms=answer.get("took"),
        partial=partial(answer),
    )


def _total(plan: Plan, route: PlannedRoute, answer: Mapping[str, Any]) -> Total | None:
    total = answer["hits"].get("total")
    if total is None:
        return None
    # A kNN route counts what it was asked to bring; as many as that means there may be more.
    capped = route.needs_vector and total["value"] >= plan.window
    return Total(value=total["value"], relation="gte" if capped else total["relation"])


def partial(answer: Mapping[str, Any]) -> str | None:
    """Return why an answer of the cluster lacks something, if it does."""
    if answer.get("timed_out"):
        return "the time budget ran out before every shard had answered"
    shards = answer.get("_shards", {})
    if shards.get("failed"):
        reasons = {
            failure.get("reason", {}).get("reason", "unknown") for failure in shards.get("failures", [])
        }
        return f"{shards['failed']} of {shards['total']} shards failed: {'; '.join(sorted(map(str, reasons)))[:300]}"
    return None


def _entries(plan: Plan, route: PlannedRoute, hit: Mapping[str, Any]) -> list[Candidate]:
    whole = read_candidate(plan, route, hit)
    inner = hit.get("inner_hits", {}).get(fields.CHUNKS)
    if inner is None:
        return [whole]
    chunks = inner["hits"]["hits"]
    if not chunks:
        # Its title alone matches.
        return [whole._replace(key=chunk_key(whole.id, 0), chunk=0)]
    # The nested score of a document is that of its best chunk; what stands above it (title matches) is shared.
    best = max(chunk["_score"] for chunk in chunks)
    multiplier = whole.factor if plan.placement == "route" and whole.factor is not None else 1.0
    entries = []
    for chunk in chunks:
        number = chunk["_nested"]["offset"]
        base = whole.base - best + chunk["_score"]
        score = whole.score if chunk["_score"] == best else base * multiplier
        entries.append(whole._replace(key=chunk_key(whole.id, number), chunk=number, base=base, score=score))
    return entries


def chunk_key(document_id: str, number: int) -> str:
    """Return the key of a chunk among fused candidates; its fixed end lets no two chunks have the same, whatever their ids."""
    return f"{document_id}\0{number:08d}"


def id_of(hit: Mapping[str, Any]) -> str:
    """Return the id of a hit of a `route_body`, out of what it is sorted by: score, date, id."""
    return str(hit["sort"][2])


def read_candidate(plan: Plan, route: PlannedRoute, hit: Mapping[str, Any], *, rank: int = 0) -> Candidate:
    """Return the candidate of one hit; its factor is the quotient of the cluster's own two scores."""
    # Hundreds of hits a search pass here.
    values = hit.get("fields") or {}
    names = hit.get("matched_queries") or {}
    created_ms, id_ = hit["sort"][1:3]
    if created_ms == _UNDATED:
        created_ms = None
    score = float(hit["_score"])
    base = names.get(queries.BASE_NAME, score)
    held = values.get(fields.EVERGREEN)
    evergreen = bool(held and held[0])
    factor: float | None = None
    if plan.placement == "route" and route.decay is not None:
        if base > 0:
            # The two are 32-bit floats, so that a factor of 1 can come out a little above it.
            factor = min(1.0, score / base)
        else:
            moment_ms = _aged(plan, route.decay, values, created_ms)
            factor = decay.factor(
                route.decay, origin_ms=plan.origin_ms, moment_ms=moment_ms, evergreen=evergreen
            )
    elif plan.placement == "fused":
        factor = names.get(queries.FACTOR_NAME)
    aged_ms = created_ms if plan.base_decay is None else _aged(plan, plan.base_decay, values, created_ms)
    return Candidate(id_, id_, rank, score, float(base), factor, created_ms, aged_ms, evergreen)


_UNDATED: Final = -(2**63)
"""What the cluster sorts a missing date by."""


def _aged(plan: Plan, by: ResolvedDecay, values: Mapping[str, Any], created_ms: int | None) -> int | None:
    return decay.moment(by.field, lambda name: _date(values, name, created_ms), origin_ms=plan.origin_ms)


def _date(values: Mapping[str, Any], name: str, created_ms: int | None) -> int | None:
    if name == fields.CREATION_TIME:
        return created_ms
    held = values.get(name)
    return int(held[0]) if held else None


def age_days(plan: Plan, source: Mapping[str, Any]) -> float | None:
    """Return the age that the request's decay sees, in days, negative for the future."""
    field = fields.CREATION_TIME if plan.base_decay is None else plan.base_decay.field
    return plan.age_days(moment_of(field, source, origin_ms=plan.origin_ms))


def moment_of(field: str, source: Mapping[str, Any], *, origin_ms: int) -> int | None:
    """Return the date by which a decay on `field` ages a document, read from what is stored of it."""

    def date_of(name: str) -> int | None:
        written = source.get(name)
        return None if written is None else to_ms(parse_instant(written))

    return decay.moment(field, date_of, origin_ms=origin_ms)
