"""Recall: what a search asks the cluster and gets, before anything is fused.

Opens the point in time, embeds what needs embedding (one call), sends the routes (`_msearch`) and reads their
answers. A failing part is noted on the run, not raised, so that the rest can answer.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from app import names, observing, queries
from app.answers import RouteStatus
from app.elastic import Cluster
from app.embedding import Embedder
from app.errors import CursorExpired, EmbedderUnavailable, HalflifeError, SchemaMismatch, Unavailable
from app.outcomes import cursor_expired
from app.planning import Plan, PlannedRoute, RouteAnswer, read_route, route_body
from app.recency import Recency

PIT_KEEP_ALIVE_S = 120.0
ROUTE_SHARE = 0.7
"""Of the time left, what the routes may take: the rest brings the documents of what was found."""
GRACE_S = 0.5
CHANGED = "some hits were changed while this search ran and are left out"
IDS_AT_ONCE = 5_000
"""Documents asked for by id in one search; Elasticsearch answers at most 10,000 hits."""
NO_VOTES = "votes do not count here: feedback is not configured, or its ratings are being read"


@dataclass(slots=True)
class Run:
    """One search under way: its plan, its budget, and what each route gave so far."""

    plan: Plan
    offset: int
    deadline: float
    pit: str | None
    vectors: dict[str, queries.Vector] = field(default_factory=dict)
    """Text -> its vector at length one, as the cluster takes it."""
    answers: dict[str, RouteAnswer] = field(default_factory=dict)
    recency: Recency | None = None
    """What decay 'auto' decided, once the lists are fused."""
    tails: dict[int, dict[str, RouteAnswer]] = field(default_factory=dict)
    statuses: dict[str, RouteStatus] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    degraded: bool = False
    failure: HalflifeError | None = None
    reordered: bool = False
    """What failed may answer the next page, whose order would be another: such a page gets no cursor."""
    index: str | None = None
    """The index that hits came from; another than the plan's where any did."""
    unwritten: HalflifeError | None = None
    """Why the query was not rewritten, where it should be."""
    doomed: HalflifeError | None = None
    """Why no answer of any route could be used."""
    lost: bool = False
    """Its point in time was gone when the cluster was asked: an index was deleted, or a node went with its context."""

    def degrade(self, reason: str, error: HalflifeError | None = None, *, reorders: bool = True) -> None:
        """Note what the answer lacks, and the failure that is to blame; `reorders`: another page may not lack it."""
        self.degraded = True
        self.reordered |= reorders and error is not None
        if reason not in self.warnings:
            self.warnings.append(reason)
        observing.DEGRADED.labels("other" if error is None else error.code).inc()
        if error is not None and self.failure is None:
            self.failure = error

    def begin_again(self, plan: Plan, *, pit: str | None) -> None:
        """Forget all answers, to ask by this plan within the time that is left."""
        fresh = Run(plan=plan, offset=self.offset, deadline=self.deadline, pit=pit)
        fresh.warnings = list(plan.warnings)
        if plan.feedback is not None and plan.ratings is None:
            fresh.warnings.append(NO_VOTES)
        fresh.unwritten = self.unwritten
        for item in fields(Run):
            setattr(self, item.name, getattr(fresh, item.name))
        if self.unwritten is not None:
            self.not_rewritten(self.unwritten)

    def not_rewritten(self, error: HalflifeError) -> None:
        self.unwritten = error
        # Later pages are not rewritten either.
        reason = f"not rewritten, the query's own words are searched: {error.detail}"
        self.degrade(reason, error, reorders=False)

    def remaining_s(self) -> float:
        return max(0.05, self.deadline - time.monotonic())


def longest(runs: Sequence[Run]) -> float:
    """Return the time budget of what several searches share: one that is in a hurry does not fail the others."""
    return max(run.remaining_s() for run in runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Ask:
    run: Run
    route: PlannedRoute
    tail: int | None


@observing.staged("recall")
async def recall(
    live: list[Run],
    *,
    cluster: Cluster,
    embedder: Embedder,
    embed_within_s: float,
    request_id: str | None,
    owner: str,
) -> str | None:
    """Fill the runs' route answers; return the point in time opened for them, if one was.

    Embedding gets at most `embed_within_s` and half of the time there is, so that a hanging embedder leaves enough
    for the words.
    """
    if not live:
        return None
    unpinned = [run for run in live if run.pit is None and run.plan.search.paging]
    opening: asyncio.Task[str] | None = None
    if unpinned:
        alias = names.read_alias(live[0].plan.collection.name)
        opening = asyncio.create_task(
            cluster.open_pit(alias, keep_alive_s=PIT_KEEP_ALIVE_S, timeout_s=longest(live), owner=owner)
        )
    embedding = asyncio.create_task(
        _embed(
            live,
            cluster=cluster,
            embedder=embedder,
            within_s=min(embed_within_s, longest(live) / 2),
            owner=owner,
        )
    )
    asking: list[asyncio.Task[None]] = []
    try:
        asks = [
            _Ask(run, route, tail)
            for run in live
            for route in run.plan.routes
            for tail in (None, *run.plan.tails)
        ]
        # One turn of the loop: vectors that are given need no more, and the request for the point in time is out.
        await asyncio.sleep(0)
        # While the cluster opens it, the bodies are made.
        bodies = {ask: _body(ask) for ask in asks if _ready(ask)}
        if opening is not None:
            pit = await opening
            for run in unpinned:
                run.pit = pit
        # What can't be asked yet doesn't hold up the rest; where nothing is missing one request asks for all.
        early = [] if embedding.done() else [ask for ask in asks if not _waits(ask)]
        if early:
            asking.append(
                asyncio.create_task(_ask(early, bodies=bodies, cluster=cluster, request_id=request_id))
            )
        await embedding
        late = [ask for ask in asks if ask not in early and _ready(ask)]
        asking.append(asyncio.create_task(_ask(late, bodies=bodies, cluster=cluster, request_id=request_id)))
        await asyncio.gather(*asking)
    except BaseException:
        for task in (embedding, *asking):
            task.cancel()
        if opening is not None:
            _let_go(opening, cluster=cluster)
        raise
    return None if opening is None else opening.result()


def _let_go(opening: "asyncio.Task[str]", *, cluster: Cluster) -> None:
    """See that the point in time is closed which nobody will use; one that could not be opened is no one's."""
    if not opening.done():
        opening.cancel()  # the cluster closes what opens all the same
    elif not opening.cancelled() and opening.exception() is None:
        cluster.close_pit_soon(opening.result())


def _waits(ask: _Ask) -> bool:
    return ask.route.needs_vector or ask.run.plan.search.min_relevance is not None


def _ready(ask: _Ask) -> bool:
    run = ask.run
    if run.plan.search.min_relevance is not None and run.plan.search.query not in run.vectors:
        return False
    return not ask.route.needs_vector or ask.route.text in run.vectors


@observing.staged("embed query")
async def _embed(
    live: list[Run], *, cluster: Cluster, embedder: Embedder, within_s: float, owner: str
) -> None:
    """Give each run its vectors: one call for all texts; a failure marks the routes that needed them."""
    texts: dict[str, None] = {}
    for run in live:
        given = run.plan.search.query_vector
        if given is not None:
            run.vectors[run.plan.search.query] = cluster.query_vector(_unit(given))
        texts.update(dict.fromkeys(text for text in run.plan.texts_to_embed() if text not in run.vectors))
    if not texts:
        return
    ordered = list(texts)
    failures: dict[str, HalflifeError] = {}
    vectors: dict[str, np.ndarray] = {}
    truncated: set[str] = set()
    try:
        embedded = await embedder.embed_queries(ordered, deadline_s=within_s, caller=owner)
    except HalflifeError as error:
        failures = dict.fromkeys(ordered, error)
    else:
        for position, text in enumerate(ordered):
            vector = embedded.vectors[position]
            if vector is None:
                failures[text] = embedded.errors[position]
            else:
                vectors[text] = _unit(vector)
            if position in embedded.truncated:
                truncated.add(text)
    for run in live:
        made_by = run.plan.collection.model
        if made_by is not None and made_by != embedder.model:
            run.degrade(
                f"the collection was embedded with {made_by}, the query with {embedder.model}: their vectors can't be "
                "compared unless these are two names of one model; reindex the collection (`halflife reindex`)"
            )
        for text in run.plan.texts_to_embed():
            if text in run.vectors:
                continue
            if text in vectors and len(vectors[text]) != run.plan.collection.dims:
                _without_vector(
                    run,
                    text,
                    SchemaMismatch(
                        f"the embedder's vectors have {len(vectors[text])} dims, the collection's "
                        f"{run.plan.collection.dims}",
                        remedy="send `query_vector`, or reindex the collection (`halflife reindex`)",
                    ),
                )
            elif text in vectors:
                run.vectors[text] = cluster.query_vector(vectors[text])
            elif text in failures:
                _without_vector(run, text, failures[text])
            if text in truncated:
                run.warnings.append(
                    "the query is longer than the embedding model reads; its end was left out"
                )


def _unit(vector: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the vector at length one: dot_product refuses others, and in l2_norm they would mean something else."""
    wide = np.asarray(vector, dtype=np.float64)
    return wide / math.hypot(*wide.tolist())


def _without_vector(run: Run, text: str, error: HalflifeError) -> None:
    run.degrade(f"the query was not embedded: {error.detail}", error)
    needed = text == run.plan.search.query and (
        run.plan.search.min_relevance is not None or run.plan.fusion.method == "additive"
    )
    if needed:
        run.doomed = EmbedderUnavailable(
            f"relevance can't be told without the embedder: {error.detail}",
            remedy="try again later, or drop `min_relevance` (and additive fusion) to search by words alone",
            retry_after_s=1,
        )
    for route in run.plan.routes:
        if route.needs_vector and route.text == text:
            run.statuses[route.name] = RouteStatus(status="failed", reason=error.detail)


def _body(ask: _Ask) -> dict[str, Any]:
    plan = ask.run.plan
    return route_body(plan, ask.route, ask.run.vectors, size=ask.tail or plan.window)


@observing.staged("routes")
async def _ask(
    asks: Sequence[_Ask],
    *,
    bodies: Mapping[_Ask, dict[str, Any]],
    cluster: Cluster,
    request_id: str | None,
) -> None:
    """Ask for the lists in one request; `bodies` are those that were made ahead."""
    if not asks:
        return
    searches = [located(ask.run, bodies.get(ask) or _body(ask), share=ROUTE_SHARE) for ask in asks]
    # The cluster is to end a slow route by itself, with what it has; the connection waits a little longer.
    timeout_s = longest([ask.run for ask in asks]) * ROUTE_SHARE + GRACE_S
    try:
        answers = await cluster.msearch(searches, timeout_s=timeout_s, opaque_id=request_id)
    except HalflifeError as error:
        answers = [error] * len(asks)
    for ask, answer in zip(asks, answers, strict=True):
        _take(ask, answer)


def located(run: Run, body: dict[str, Any], *, share: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the body with its share of the time left and its point in time (or index)."""
    budget = {"timeout": f"{max(1, int(run.remaining_s() * share * 1000))}ms"}
    if run.pit is None:
        return {"index": names.read_alias(run.plan.collection.name)}, {**body, **budget}
    keep_alive = f"{int(PIT_KEEP_ALIVE_S)}s"
    return {}, {**body, **budget, "pit": {"id": run.pit, "keep_alive": keep_alive}}


def portions(ids: Iterable[str]) -> list[list[str]]:
    """Return the distinct ids in lists that one search can bring."""
    distinct = list(dict.fromkeys(ids))
    return [distinct[start : start + IDS_AT_ONCE] for start in range(0, len(distinct), IDS_AT_ONCE)]


async def ask_all(
    searches: Sequence[tuple[Run, dict[str, Any]]], *, cluster: Cluster, request_id: str | None
) -> Sequence[dict[str, Any] | HalflifeError]:
    """Return the answers of the runs' bodies, all sent in one request."""
    if not searches:
        return []
    answers = await cluster.msearch(
        [located(run, body) for run, body in searches],
        timeout_s=longest([run for run, _ in searches]),
        opaque_id=request_id,
    )
    for (run, _), answer in zip(searches, answers, strict=True):
        run.lost = run.lost or _tells_lost(answer)
    return answers


def _tells_lost(answer: dict[str, Any] | HalflifeError) -> bool:
    return isinstance(answer, CursorExpired) or (
        isinstance(answer, HalflifeError) and cursor_expired(answer, remedy="") is not None
    )


def _take(ask: _Ask, answer: dict[str, Any] | HalflifeError) -> None:
    run, name = ask.run, ask.route.name
    if isinstance(answer, HalflifeError):
        run.lost = run.lost or _tells_lost(answer)
        if run.offset > 0:
            answer = cursor_expired(answer, remedy="search again") or answer
        if isinstance(answer, CursorExpired) and run.offset == 0:
            answer = Unavailable("the point in time of this search was lost on the way", retry_after_s=1)
        if ask.tail is None:
            run.statuses[name] = RouteStatus(status="failed", reason=answer.detail)
        run.degrade(f"route '{name}' failed: {answer.detail}", answer)
        return
    run.pit = answer.get("pit_id", run.pit)
    for hit in answer["hits"]["hits"][:1]:
        if run.index in (None, run.plan.collection.index):
            run.index = hit.get("_index")
    read = read_route(run.plan, ask.route, answer)
    if read.partial is not None:
        run.degrade(f"route '{name}' is partial: {read.partial}", Unavailable(read.partial, retry_after_s=1))
    if ask.tail is not None:
        run.tails.setdefault(ask.tail, {})[name] = read
        return
    run.answers[name] = read
    observing.ROUTES.labels(ask.route.kind).observe((read.took_ms or 0) / 1000)
    run.statuses[name] = RouteStatus(
        status="ok" if read.partial is None else "partial",
        took_ms=read.took_ms,
        total=read.total,
        returned=len(read.candidates),
        reason=read.partial,
    )


def fatal(run: Run) -> HalflifeError | None:
    """Return why this search can't be answered at all, if it can't."""
    if run.doomed is not None:
        return run.doomed
    if not run.answers:
        return run.failure or Unavailable("no route answered", retry_after_s=1)
    return None
