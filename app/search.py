"""What happens in a search, in order: one origin, a point in time, recall in the cluster, fusion, the stages after it.

Ranking within a route, decay included, is Elasticsearch's; here lists are fused, cut into pages and explained.
Never reads settings or the clock: both come in.
"""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from app import catalog, caveats, experiments, fields, hints, names, observing, queries
from app import cursor as cursors
from app.answers import Hit, RecencyDecision, RouteHit, RouteStatus, SearchResult, Suggestion
from app.asking import SETTLED, Search
from app.collection import Collection
from app.elastic import Cluster
from app.embedding import Embedder
from app.errors import CursorInvalid, HalflifeError, InvalidRequest, PastWindow, Unavailable
from app.filters import Compiler, names_metadata
from app.measuring import measure
from app.planning import (
    Pinned,
    Plan,
    PlannedRoute,
    fetch_body,
    id_of,
    make_plan,
    partial,
    pool_body,
    read_route,
    rewritten,
    route_body,
    shown,
)
from app.ranking import STAGES, Ranked
from app.ratings import Ratings
from app.recall import CHANGED, NO_VOTES, PIT_KEEP_ALIVE_S, Run, ask_all, fatal, portions, recall
from app.reranking import Reranker
from app.rewriting import Rewriter
from app.stages import (
    Placed,
    adapted,
    after_fusion,
    compared,
    fuse,
    has_pool,
    needed,
    needs_embeddings,
    only_vectors,
    passage_of,
    rated,
    with_share,
)
from app.times import format_instant, from_ms, to_ms

DEFAULT_TIMEOUT_S = 10.0
REWRITE_SHARE = 0.5
"""Of a search's time, what rewriting the query may take."""
CLUSTER_EXPLAINED = 10
"""Documents of a page whose explanation by the cluster is asked for: each is a tree of some kilobytes per route."""
MOST_LISTS = 512
"""Searches that one request may send to the cluster at once."""


@dataclass(frozen=True, slots=True)
class Doors:
    """What a search talks to; the reranker may be absent."""

    cluster: Cluster
    embedder: Embedder
    reranker: Reranker | None
    cursor_secrets: Sequence[bytes]
    timeout_s: float = DEFAULT_TIMEOUT_S
    embed_within_s: float = 2.0
    embedder_of: Callable[[Collection], Embedder] | None = None
    """The embedder whose vectors a collection's are; `embedder` for all if left out."""
    rewriter: Rewriter | None = None
    touch_ahead_s: float = 366 * 86_400.0
    votes: Callable[[Collection, str, datetime | None, str | None], Awaitable[Ratings | None]] | None = None
    """A collection's ratings under a query, as of an instant (None: about now), by one key's votes alone if it is named;
    None while they can't be had. Never raises."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: filters that hold for everything they see, and a tag that binds their cursors to them.

    `deadline` is when, on the monotonic clock, their request's time budget ends, where it has one.
    """

    forced: tuple[dict[str, Any], ...] = ()
    tag: str = ""
    request_id: str | None = None
    deadline: float | None = None
    key_id: str | None = None
    forced_in: Callable[[Collection], tuple[dict[str, Any], ...]] | None = None
    """`forced` as another index of the collection takes it, which may declare other keys."""


def budget_s(request: Search, *, doors: Doors, caller: Caller) -> float:
    """Return the seconds that a search may take: its own `timeout_ms`, else the service's, within the caller's budget."""
    wanted = doors.timeout_s if request.timeout_ms is None else request.timeout_ms / 1000
    return wanted if caller.deadline is None else min(wanted, caller.deadline - time.monotonic())


async def search(
    requests: Sequence[Search], *, collection: Collection, doors: Doors, caller: Caller, now_ms: int
) -> list[SearchResult | HalflifeError]:
    """Answer searches of one collection together: one embedding call, one `_msearch` per step, answers in order.

    An entry that is an error spoiled only itself. Raises what fails for all of them alike.
    """
    started = time.monotonic()
    runs: list[Run | HalflifeError] = []
    compiler = Compiler()
    for request in requests:
        try:
            plan = plan_of(request, collection=collection, caller=caller, now_ms=now_ms, compiler=compiler)
            check_reranker(request, doors)
            check_rewriter(request, doors)
            _check_touch(request, doors=doors, now_ms=now_ms)
        except HalflifeError as error:
            runs.append(error)
            continue
        budget = budget_s(request, doors=doors, caller=caller)
        runs.append(
            Run(plan=plan, offset=0, deadline=started + budget, pit=None, warnings=list(plan.warnings))
        )
    await asyncio.gather(*(rewrite(run, doors=doors, caller=caller) for run in runs if isinstance(run, Run)))
    asked = sum(len(run.plan.routes) * (1 + len(run.plan.tails)) for run in runs if isinstance(run, Run))
    if asked > MOST_LISTS:
        raise InvalidRequest(
            f"these searches ask the cluster for {asked} lists, {MOST_LISTS} are the most",
            field="queries",
            remedy="send fewer queries at once, or fewer routes, or a smaller `top_k`",
        )
    planned = [run for run in runs if isinstance(run, Run)]
    voted = await asyncio.gather(*(with_votes(run.plan, doors=doors, caller=caller) for run in planned))
    for run, plan in zip(planned, voted, strict=True):
        run.plan = plan
        if run.plan.feedback is not None and run.plan.ratings is None:
            run.warnings.append(NO_VOTES)
    return await _answer(runs, doors=doors, caller=caller, started=started, now_ms=now_ms)


def plan_of(
    request: Search,
    *,
    collection: Collection,
    caller: Caller,
    now_ms: int,
    compiler: Compiler | None = None,
) -> Plan:
    """Return the plan of a search under the profile that it names, or that its arm of the collection's experiment has."""
    chosen = experiments.ranked(request, collection, key_id=caller.key_id, request_id=caller.request_id)
    planned = make_plan(
        experiments.assigned(request, chosen),
        collection=collection,
        now_ms=now_ms,
        forced=caller.forced,
        compiler=compiler,
    )
    return replace(planned, ranked=chosen)


NO_RERANKER = "not reranked, as the profile asks: this service has no reranker (HALFLIFE_RERANK_URL)"


async def with_votes(plan: Plan, *, doors: Doors, caller: Caller) -> Plan:
    """Return the plan with the ratings of its collection, where votes shall count and their ratings can be had.

    Who sees a part of a collection is ranked by votes of their own: others' would tell of what lies beyond it.
    """
    if plan.feedback is None or doors.votes is None:
        return plan
    own = caller.key_id if caller.forced else None
    # What is asked as of a moment is ranked as it was then: later votes are no more there than later documents.
    until = plan.feedback.as_of or plan.search.as_of
    ratings = await doors.votes(plan.collection, plan.search.query, until, own)
    return replace(plan, ratings=ratings)


def _check_touch(request: Search, *, doors: Doors, now_ms: int) -> None:
    """Raise InvalidRequest if it would set a time that has not come yet: touches never move back, so it would stay."""
    if request.touch and request.as_of is not None:
        ahead_ms = to_ms(request.as_of) - now_ms
        if ahead_ms > doors.touch_ahead_s * 1000:
            raise InvalidRequest(
                "`touch` would set `last_accessed_at` to an `as_of` that lies far in the future, where no later touch could "
                "move it",
                field="touch",
                remedy="drop `touch` or `as_of`; for a virtual clock that runs ahead set HALFLIFE_TOUCH_AHEAD_S",
            )


def check_rewriter(request: Search, doors: Doors) -> None:
    """Raise InvalidRequest if the request shall be rewritten and nothing is there to do it."""
    if request.rewrite is not None and doors.rewriter is None:
        raise InvalidRequest(
            "no chat model is configured to rewrite queries",
            field="rewrite",
            remedy="set HALFLIFE_REWRITE_URL and HALFLIFE_REWRITE_MODEL, or drop `rewrite`",
        )


@observing.staged("rewrite")
async def rewrite(run: Run, *, doors: Doors, caller: Caller) -> None:
    """Widen the run's plan by what the chat model makes of its query; a failing model leaves it as it is, and is told.

    It gets at most `REWRITE_SHARE` of the time left, so that the search itself has the rest.
    """
    wanted = run.plan.search.rewrite
    if wanted is None or doors.rewriter is None:
        return
    try:
        found = await doors.rewriter.rewrite(
            run.plan.search.query, wanted, deadline_s=run.remaining_s() * REWRITE_SHARE
        )
        before = run.plan
        run.plan = rewritten(before, found, forced=caller.forced, model=doors.rewriter.model)
        run.warnings += [warning for warning in run.plan.warnings if warning not in run.warnings]
    except HalflifeError as error:
        run.not_rewritten(error)


def check_reranker(request: Search, doors: Doors) -> None:
    """Raise InvalidRequest if the request needs a reranker and there is none."""
    if request.rerank is not None and doors.reranker is None:
        raise InvalidRequest(
            "no reranker is configured", field="rerank", remedy="set HALFLIFE_RERANK_URL, or drop `rerank`"
        )


async def next_page(
    text: str, *, collection: Collection, doors: Doors, caller: Caller, now_ms: int
) -> SearchResult:
    """Answer the page after the one that gave this cursor, from the same point in time and origin.

    Raises CursorInvalid, CursorExpired or PastWindow.
    """
    payload = cursors.unseal(
        text, secrets=doors.cursor_secrets, now_ms=now_ms, kind="search", caller=caller.tag
    )
    request = request_of(payload)
    # The cursor's request holds all that its profile gave: today's default must fill no gap in it.
    settled = collection.model_copy(update={"default_profile": None})
    plan = make_plan(
        request,
        collection=settled,
        now_ms=payload.origin_ms,
        forced=caller.forced,
        pinned=Pinned(payload.wordings, tuple(payload.rewrites)),
    )
    ranked = None if payload.profile is None else Ranked.model_validate(payload.profile)
    plan = replace(await with_votes(plan, doors=doors, caller=caller), ranked=ranked)
    if plan.feedback is not None and plan.ratings is None:
        raise Unavailable(
            "the ratings that the first page was ordered by can't be read now",
            remedy="ask for this page again later, or search again with `feedback`: 'off'",
            retry_after_s=1,
        )
    started = time.monotonic()
    budget = budget_s(request, doors=doors, caller=caller)
    run = Run(
        plan=plan,
        offset=payload.offset,
        deadline=started + budget,
        pit=payload.pit_id,
        warnings=list(plan.warnings),
    )
    [answer] = await _answer([run], doors=doors, caller=caller, started=started, now_ms=now_ms)
    if isinstance(answer, HalflifeError):
        raise answer
    # Its point in time stays to its end even after the last page: that may be asked for again, its answer being lost on
    # the way, and other queries of a batch may still be read in it.
    return answer


async def _answer(
    entries: list[Run | HalflifeError], *, doors: Doors, caller: Caller, started: float, now_ms: int
) -> list[SearchResult | HalflifeError]:
    live = [entry for entry in entries if isinstance(entry, Run)]
    opened: str | None = None
    keep = False
    try:
        opened = await recall_where_it_is(live, doors=doors, caller=caller)
        finished = await _finish(live, doors=doors, caller=caller)
        if any(run.lost and run.offset == 0 for run in live):
            # Nobody has seen a page of this point in time: its index was dropped (a rollback does), so another is asked.
            if opened is not None:
                doors.cluster.close_pit_soon(opened)
                opened = None
            for run in live:
                run.begin_again(run.plan, pit=None)
            opened = await recall_where_it_is(live, doors=doors, caller=caller)
            finished = await _finish(live, doors=doors, caller=caller)
        found = {id(run): bool(out.order) for run in live if isinstance(out := finished[id(run)], _Outcome)}
        suggested = await hints.given(
            [run for run in live if id(run) in found],
            found=found,
            cluster=doors.cluster,
            request_id=caller.request_id,
        )
        answers: list[SearchResult | HalflifeError] = []
        for entry in entries:
            if isinstance(entry, HalflifeError):
                answers.append(entry)
                continue
            outcome = finished[id(entry)]
            if isinstance(outcome, HalflifeError):
                answers.append(outcome)
                continue
            cursor = _next_cursor(entry, outcome, doors=doors, caller=caller, now_ms=now_ms)
            keep = keep or cursor is not None
            answers.append(
                _result(entry, outcome, cursor=cursor, started=started, suggested=suggested.get(id(entry)))
            )
        return answers
    finally:
        if opened is not None and not keep:
            doors.cluster.close_pit_soon(opened)


async def recall_where_it_is(live: list[Run], *, doors: Doors, caller: Caller) -> str | None:
    """Fill the runs' route answers, once more if the index that answers has another model or declares other keys.

    A collection is remembered for some seconds, and a cursor leads to the index of its first page: where hits come from
    another index, the query is embedded by its model and the filters are read as it declares them, and it is asked
    again. Returns the point in time that was opened.
    """
    opened = await _recall(live, doors=doors, caller=caller)
    moved = await _moved(live, doors=doors, caller=caller)
    if moved is None:
        return opened
    forced = caller.forced if caller.forced_in is None else caller.forced_in(moved)
    compiler = Compiler()
    for run in live:
        old = run.plan
        ranking = {name: getattr(old.collection, name) for name in ("profiles", "default_profile")}
        plan = make_plan(
            old.search,
            collection=moved.model_copy(update=ranking),
            now_ms=old.origin_ms,
            forced=forced,
            pinned=Pinned(old.wordings, old.rewrites),
            compiler=compiler,
        )
        run.begin_again(replace(plan, ratings=old.ratings, ranked=old.ranked), pit=run.pit)
    return await _recall(live, doors=doors, caller=caller) or opened


async def _recall(live: list[Run], *, doors: Doors, caller: Caller) -> str | None:
    if not live:
        return None
    collection = live[0].plan.collection
    return await recall(
        live,
        cluster=doors.cluster,
        embedder=doors.embedder if doors.embedder_of is None else doors.embedder_of(collection),
        embed_within_s=doors.embed_within_s,
        owner=caller.tag,
        request_id=caller.request_id,
    )


async def _moved(live: list[Run], *, doors: Doors, caller: Caller) -> Collection | None:
    """Return what the collection really is, where the index that answered has another model or declares other keys.

    Raises where that can't be told of a caller with a filter; returns None of others.
    """
    if not live:
        return None
    planned = live[0].plan.collection
    surely = bool(caller.forced)
    await _locate(live, doors=doors, caller=caller)
    seen = {run.index for run in live} - {None, planned.index}
    if not seen and not any(run.degraded and run.index is None for run in live):
        return None
    try:
        if seen:
            index = min(name for name in seen if name is not None)
            there = await catalog.read_index(doors.cluster, planned.name, index)
        else:
            # Vectors of other dims are refused by the cluster, and nothing was found that tells the index.
            there = (await catalog.get(doors.cluster, planned.name)).collection
    except HalflifeError:
        if surely and seen:
            raise
        return None
    # A key that only one of the two declares lies in a field that the other lacks, where "not" holds for everything.
    same = (there.model, there.dims, there.declared) == (planned.model, planned.dims, planned.declared)
    # A key's filter on metadata holds in the index alone that it was read for.
    bound = there.index != planned.index and names_metadata(caller.forced)
    return None if same and not bound else there


async def _locate(live: list[Run], *, doors: Doors, caller: Caller) -> None:
    """Learn which index answered where nothing was found there: filters on metadata may have been read for another."""
    if any(run.index is not None for run in live):
        return
    unsure = next(
        (
            run
            for run in live
            if run.answers and any(names_metadata(route.filters) for route in run.plan.routes)
        ),
        None,
    )
    if unsure is None:
        return
    body = {"size": 1, "_source": False, "query": {"match_all": {}}, "track_total_hits": False}
    [answer] = await ask_all([(unsure, body)], cluster=doors.cluster, request_id=caller.request_id)
    if isinstance(answer, HalflifeError):
        if caller.forced and not unsure.lost:
            raise answer
        return
    for hit in answer["hits"]["hits"]:
        unsure.index = hit["_index"]


Found = dict[str, dict[str, Any]]
"""Key of a hit -> its document as the cluster gave it."""


@dataclass(slots=True)
class _Outcome:
    """What a run came to: the whole order, the page of it, and the page's documents."""

    order: list[Placed]
    page: list[Placed]
    documents: dict[str, dict[str, Any]]
    reranked_of: int | None = None
    """How many hits stood in the list of which the reranker read the first ones; None where it read none."""
    missed: dict[str, dict[str, RouteHit]] = field(default_factory=dict)
    explained: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Document id -> route -> Elasticsearch's explanation."""


async def _finish(live: list[Run], *, doors: Doors, caller: Caller) -> dict[int, _Outcome | HalflifeError]:
    outcomes: dict[int, _Outcome | HalflifeError] = {}
    answered: list[Run] = []
    for run in live:
        failure = fatal(run)
        if failure is not None:
            outcomes[id(run)] = failure
        else:
            answered.append(run)
    measured = await measure(answered, cluster=doors.cluster, request_id=caller.request_id)
    going: list[tuple[Run, list[Placed]]] = []
    for run in answered:
        terms = measured.get(id(run), {})
        if isinstance(terms, HalflifeError):
            outcomes[id(run)] = terms
        else:
            fused = rated(run.plan, fuse(run.plan, run.answers, run.tails, terms))
            order, run.recency = adapted(run.plan, fused)
            going.append((run, order))
    documents = await fetch(
        [(run, needed(run.plan, order, offset=run.offset, decision=run.recency)) for run, order in going],
        doors=doors,
        caller=caller,
    )
    beside = await fetch_compared(going, doors=doors, caller=caller)
    for run, fused in going:
        found = documents[id(run)]
        same = beside.get(id(run), found)
        if isinstance(found, HalflifeError) or isinstance(same, HalflifeError):
            outcomes[id(run)] = found if isinstance(found, HalflifeError) else cast(HalflifeError, same)
            continue
        asked_for = {item.key for item in needed(run.plan, fused, offset=run.offset, decision=run.recency)}
        whole = [item for item in fused if item.key in found or item.key not in asked_for]
        order, failure = await after_fusion(
            run.plan,
            whole,
            found,
            reranker=doors.reranker,
            deadline_s=run.remaining_s(),
            decision=run.recency,
            same=same,
        )
        if run.plan.search.mmr is not None and run.plan.search.query not in run.vectors:
            run.degrade("not diversified by mmr, this is the fused order: the query has no vector")
        if failure is not None:
            run.degrade(f"not reranked, this is the fused order: {failure.detail}", failure)
        if run.plan.search.rerank is not None and doors.reranker is None:
            run.warnings.append(NO_RERANKER)
        reranked = run.plan.search.rerank is not None and doors.reranker is not None and failure is None
        if run.offset > 0 and run.offset >= len(order):
            outcomes[id(run)] = _past_window(run.plan, reranked=reranked)
            continue
        page = order[run.offset : run.offset + run.plan.search.top_k]
        outcomes[id(run)] = _Outcome(
            order=order,
            page=page,
            documents=found,
            reranked_of=sum(not item.tail for item in whole) if reranked else None,
        )
    await _fetch_pages(outcomes, [run for run, _ in going if has_pool(run.plan)], doors=doors, caller=caller)
    told = [
        (run, out)
        for run in live
        if isinstance(out := outcomes[id(run)], _Outcome) and run.plan.search.explain
    ]
    await _explain_missed(told, doors=doors, caller=caller)
    in_full = [(run, out) for run, out in told if run.plan.search.explain == "cluster"]
    await _account_of_cluster(in_full, doors=doors, caller=caller)
    for run in live:
        spoiled = run.degraded if run.plan.search.strict else run.offset > 0 and run.failure is not None
        if spoiled and isinstance(outcomes[id(run)], _Outcome):
            cause = run.failure
            outcomes[id(run)] = Unavailable(
                (
                    "the answer would be degraded, and `strict` refuses that: "
                    if run.plan.search.strict
                    else "a page after the first can't be degraded, it would not fit the pages before it: "
                )
                + "; ".join(run.warnings),
                remedy="try again later, or drop `strict` to take what can be had"
                if run.plan.search.strict
                else "ask for this page again later",
                retry_after_s=1 if cause is None or cause.retry_after_s is None else cause.retry_after_s,
            )
    return outcomes


def _past_window(plan: Plan, *, reranked: bool) -> PastWindow:
    rerank = plan.search.rerank
    if reranked and rerank is not None:
        return PastWindow(
            f"the cursor points past the {rerank.top_n or rerank.candidates} hits that reranking leaves",
            field="cursor",
            remedy="search again with larger `rerank.candidates` (up to 1000), and `rerank.top_n` where it is set",
        )
    return PastWindow(
        f"the cursor points past the fused window of {plan.window}",
        field="cursor",
        remedy=f"search again with a larger `fusion.window` (up to 10000) than {plan.window}",
    )


async def fetch_compared(
    going: Sequence[tuple[Run, list[Placed]]], *, doors: Doors, caller: Caller
) -> dict[int, Found | HalflifeError]:
    """Return the documents whose names and words are compared, of runs whose pool brings vectors alone."""
    wanted = [(run, compared(run.plan, order, decision=run.recency)) for run, order in going]
    return await fetch([each for each in wanted if each[1]], doors=doors, caller=caller, whole=True)


async def _fetch_pages(
    outcomes: dict[int, _Outcome | HalflifeError], runs: Sequence[Run], *, doors: Doors, caller: Caller
) -> None:
    """Bring the pages' documents of runs whose stages worked on a pool of which only the vectors came."""
    pages = [(run, out.page) for run in runs if isinstance(out := outcomes[id(run)], _Outcome)]
    for key, found in (await fetch(pages, doors=doors, caller=caller, whole=True)).items():
        outcome = outcomes[key]
        if isinstance(found, HalflifeError):
            outcomes[key] = found
        elif isinstance(outcome, _Outcome):
            outcome.documents = found


async def _search_all(
    searches: Sequence[tuple[Run, dict[str, Any]]], *, doors: Doors, caller: Caller
) -> Sequence[dict[str, Any] | HalflifeError]:
    """Return the answers of the runs' bodies, all sent in one request."""
    return await ask_all(searches, cluster=doors.cluster, request_id=caller.request_id)


@observing.staged("fetch")
async def fetch(
    wanted: Sequence[tuple[Run, list[Placed]]], *, doors: Doors, caller: Caller, whole: bool = False
) -> dict[int, Found | HalflifeError]:
    """Return each run's documents by key, all in one request; a document gone meanwhile is left out.

    `whole`: all that their hits show, after stages that needed less of more documents.
    """
    results: dict[int, Found | HalflifeError] = {id(run): {} for run, _ in wanted}
    asked = [
        (run, placed, _passage_vector(run), part)
        for run, placed in wanted
        for part in portions(item.id for item in placed)
    ]
    answers = await _documents(
        [(run, vector, part) for run, _, vector, part in asked], doors=doors, caller=caller, whole=whole
    )
    bare: list[tuple[Run, list[Placed], list[str]]] = []
    for (run, placed, vector, part), answer in zip(asked, answers, strict=True):
        found = results[id(run)]
        if isinstance(answer, HalflifeError) or isinstance(found, HalflifeError):
            results[id(run)] = answer if isinstance(answer, HalflifeError) else found
            continue
        by_id = {hit["_id"]: hit for hit in answer["hits"]["hits"]}
        found.update((item.key, by_id[item.id]) for item in placed if item.id in by_id)
        if vector is not None and run.plan.search.collapse and (whole or not only_vectors(run.plan)):
            vectorless = [id_ for id_, hit in by_id.items() if not _passages(hit)]
            if vectorless:
                bare.append((run, placed, vectorless))
        if len(by_id) < len(part):
            if answer.get("_shards", {}).get("failed") or answer.get("timed_out"):
                reason = "some hits could not be read from their shard and are missing"
                run.degrade(reason, Unavailable(reason, retry_after_s=1))
            else:
                run.warnings.append(CHANGED)
    # Documents without a vector are few: they alone are asked for once more, for the chunk that the words fit best.
    answers = await _documents(
        [(run, None, ids) for run, _, ids in bare], doors=doors, caller=caller, whole=whole
    )
    for (run, placed, _), answer in zip(bare, answers, strict=True):
        found = results[id(run)]
        if isinstance(answer, HalflifeError) or isinstance(found, HalflifeError):
            results[id(run)] = answer if isinstance(answer, HalflifeError) else found
            continue
        by_id = {hit["_id"]: hit for hit in answer["hits"]["hits"]}
        found.update((item.key, by_id[item.id]) for item in placed if item.id in by_id)
    return results


async def _documents(
    asked: Sequence[tuple[Run, queries.Vector | None, list[str]]],
    *,
    doors: Doors,
    caller: Caller,
    whole: bool,
) -> Sequence[dict[str, Any] | HalflifeError]:
    """Return the cluster's answers about the documents of these ids, with the chunk that fits each best."""
    searches = []
    for run, vector, ids in asked:
        plan = run.plan
        if has_pool(plan) and not whole:
            body = pool_body(plan, vector, ids=ids, packed=doors.cluster.gives_packed_vectors)
        else:
            chunks = not plan.search.collapse
            vectors = plan.search.include_embedding or (chunks and needs_embeddings(plan))
            body = fetch_body(plan, vector, ids=ids, with_embedding=vectors, chunks=chunks)
        searches.append((run, body))
    return await _search_all(searches, doors=doors, caller=caller)


def _passages(hit: Mapping[str, Any]) -> bool:
    return any(group["hits"]["hits"] for group in hit.get("inner_hits", {}).values())


def _passage_vector(run: Run) -> queries.Vector | None:
    """Return the vector that finds each document's best chunk; None where the cluster just refused it in a route."""
    for route in run.plan.routes:
        status = run.statuses.get(route.name)
        if route.needs_vector and status is not None and status.status == "failed":
            return None
    return run.vectors.get(run.plan.search.query)


async def _explain_missed(runs: Sequence[tuple[Run, _Outcome]], *, doors: Doors, caller: Caller) -> None:
    """Tell, for routes that did not list a hit of the page, what they would have scored it."""
    asked: list[tuple[Run, _Outcome, PlannedRoute, list[Placed]]] = []
    for run, outcome in runs:
        for route in run.plan.routes:
            missing = [
                item
                for item in outcome.page
                if route.name not in item.routes or item.routes[route.name].rank is None
            ]
            if missing and route.name in run.answers:
                asked.append((run, outcome, route, missing))
    answers = await _search_all(
        [
            (run, route_body(run.plan, route, run.vectors, size=len(ids), ids=ids))
            for run, _, route, missing in asked
            for ids in [list(dict.fromkeys(item.id for item in missing))]
        ],
        doors=doors,
        caller=caller,
    )
    for (run, outcome, route, missing), answer in zip(asked, answers, strict=True):
        lacking = answer.detail if isinstance(answer, HalflifeError) else partial(answer)
        if isinstance(answer, HalflifeError) or lacking is not None:
            run.warnings.append(f"route '{route.name}' could not be explained: {lacking}")
            continue
        found = {candidate.key: candidate for candidate in read_route(run.plan, route, answer).candidates}
        for item in missing:
            candidate = found.get(item.key)
            counted = item.routes.get(route.name)
            outcome.missed.setdefault(item.key, {})[route.name] = RouteHit(
                rank=None,
                score=None if candidate is None else candidate.base,
                decay=None if candidate is None or run.plan.placement != "route" else candidate.factor,
                decayed_score=None if candidate is None else candidate.score,
                contribution=0.0 if counted is None else counted.contribution,
                normalized=None if counted is None else counted.normalized,
                note="does not match" if candidate is None else "beyond the window",
            )


async def _account_of_cluster(runs: Sequence[tuple[Run, _Outcome]], *, doors: Doors, caller: Caller) -> None:
    """Fetch Elasticsearch's explanation of the page's first hits in each route, the key's own filter left out of it."""
    asked = [
        (run, outcome, route, list(dict.fromkeys(item.id for item in outcome.page))[:CLUSTER_EXPLAINED])
        for run, outcome in runs
        for route in run.plan.routes
        if route.name in run.answers and outcome.page
    ]
    answers = await _search_all(
        [
            (
                run,
                {
                    **route_body(run.plan, shown(run.plan, route), run.vectors, size=len(ids), ids=ids),
                    "explain": True,
                },
            )
            for run, _, route, ids in asked
        ],
        doors=doors,
        caller=caller,
    )
    for (run, outcome, route, _), answer in zip(asked, answers, strict=True):
        if isinstance(answer, HalflifeError):
            run.warnings.append(f"the cluster's account of route '{route.name}' is missing: {answer.detail}")
            continue
        for hit in answer["hits"]["hits"]:
            outcome.explained.setdefault(id_of(hit), {})[route.name] = hit["_explanation"]
    for run, outcome in runs:
        left = len({item.id for item in outcome.page}) - CLUSTER_EXPLAINED
        if left > 0:
            run.warnings.append(
                f"the cluster's account is given for the first {CLUSTER_EXPLAINED} documents of the page, not for the other "
                f"{left}"
            )


def _result(
    run: Run,
    outcome: _Outcome,
    *,
    cursor: str | None,
    started: float,
    suggested: list[Suggestion] | None = None,
) -> SearchResult:
    plan = run.plan
    observing.answered(candidates=len(outcome.order), degraded=run.degraded, hits=len(outcome.page))
    warnings = list(dict.fromkeys(run.warnings))
    warnings += caveats.of_options(plan, outcome.order)
    statuses = {
        route.name: with_share(
            run.statuses.get(route.name, RouteStatus(status="skipped")), outcome.order, route.name
        ).model_copy(update={"kind": route.kind})
        for route in plan.routes
    }
    return SearchResult(
        origin=from_ms(plan.origin_ms),
        took_ms=round((time.monotonic() - started) * 1000),
        degraded=run.degraded,
        warnings=warnings,
        cursor=cursor,
        routes=statuses,
        hits=[_hit(run, item, outcome) for item in outcome.page if item.key in outcome.documents],
        explain=_requests(run) if plan.search.explain else None,
        profile=plan.ranked,
        recency=None
        if run.recency is None
        else RecencyDecision(mode=run.recency.mode, reason=run.recency.reason),
        rewrites=list(plan.rewrites) or None,
        suggestions=suggested,
    )


def _requests(run: Run) -> dict[str, Any]:
    """Return each route's request as Kibana's Dev Tools take it; without the point in time, which is ours."""
    plan = run.plan
    alias = names.read_alias(plan.collection.name)
    bodies = []
    for route in plan.routes:
        if route.needs_vector and route.text not in run.vectors:
            continue
        if plan.search.min_relevance is not None and plan.search.query not in run.vectors:
            continue
        body = route_body(plan, shown(plan, route), run.vectors, size=plan.window)
        path = f"/{alias}/_search?include_named_queries_score=true"
        bodies.append({"route": route.name, "method": "GET", "path": path, "body": body})
    return {
        "origin": format_instant(from_ms(plan.origin_ms)),
        "placement": plan.placement,
        "decay": None if plan.base_decay is None else plan.base_decay.model_dump(),
        "route_decay": {
            route.name: route.decay.model_dump() if route.decay else None for route in plan.routes
        },
        "fusion": plan.fusion.model_dump(exclude_none=True),
        "window": plan.window,
        "stages": {
            name: value
            for name, value in plan.search.model_dump(mode="json", include=set(STAGES)).items()
            if value not in (None, False)
        },
        "requests": bodies,
        **({"note": "the key's own filter is left out of these bodies"} if plan.forced else {}),
    }


HIT_FIELDS = (
    *fields.KEYWORDS,
    fields.UPDATED_AT,
    fields.LAST_ACCESSED_AT,
    fields.START_DATE,
    fields.END_DATE,
    fields.EXPIRES_AT,
    fields.SALIENCE,
)


def _hit(run: Run, item: Placed, outcome: _Outcome) -> Hit:
    plan, search = run.plan, run.plan.search
    document = outcome.documents[item.key]
    source = document.get("_source", {})
    passage = passage_of(item, document, plan)
    wanted = None if search.fields is None else set(search.fields)

    def chosen(name: str) -> bool:
        return wanted is None or name in wanted

    text, start, end = passage["text"], passage["start"], passage["end"]
    if search.neighbours and passage["number"] is not None:
        text, start, end = _with_neighbours(source, passage, search.neighbours)
    others = {name: source[name] for name in HIT_FIELDS if name in source and chosen(name)}
    return Hit(
        id=item.id,
        score=item.score,
        fused_score=item.fused_score,
        title=source.get(fields.TITLE) if chosen(fields.TITLE) else None,
        text=text if chosen(fields.TEXT) else None,
        creation_time=None if item.created_ms is None else from_ms(item.created_ms),
        metadata=source.get(fields.METADATA, {}) if chosen(fields.METADATA) else None,
        fields=others,
        age_days=plan.age_days(item.aged_ms),
        relevance=passage["relevance"],
        decay=item.factor,
        evergreen=item.evergreen,
        routes=_with_explanations(
            {**item.routes, **outcome.missed.get(item.key, {})}, outcome.explained.get(item.id, {})
        ),
        chunk=None if start is None else {"number": passage["number"], "start": start, "end": end},
        highlights=document.get("highlight"),
        embedding=passage["embedding"] if search.include_embedding else None,
        rerank_score=item.rerank_score,
        superseded_by=item.superseded_by,
        supersedes=item.supersedes,
        recency=item.recency or (run.recency.told() if search.explain and run.recency is not None else None),
        near_duplicates=item.near_duplicates,
        additive=item.additive,
        feedback=item.feedback,
    )


def _with_explanations(
    routes: dict[str, RouteHit], explained: Mapping[str, dict[str, Any]]
) -> dict[str, RouteHit]:
    return {
        name: part.model_copy(update={"explanation": explained[name]}) if name in explained else part
        for name, part in routes.items()
    }


def _with_neighbours(
    source: Mapping[str, Any], passage: Mapping[str, Any], reach: int
) -> tuple[str, int, int]:
    chunks = source.get(fields.CHUNKS, [])
    number = int(passage["number"])
    around = chunks[max(0, number - reach) : number + reach + 1]
    start = min(chunk["start"] for chunk in around)
    end = max(chunk["end"] for chunk in around)
    return source.get(fields.TEXT, "")[start:end], start, end


def _packed(request: dict[str, Any]) -> dict[str, Any]:
    """Return the request with its vector's numbers, all of their bits, in base64: a cursor is made for each answer."""
    vector = request.get("query_vector")
    if vector is None:
        return request
    numbers = np.asarray(vector, dtype="<f8").tobytes()
    return {**request, "query_vector": base64.b64encode(numbers).decode("ascii")}


def request_of(payload: cursors.CursorPayload) -> Search:
    """Return the search that a cursor goes on with. Raises CursorInvalid if it is none that this release knows."""
    try:
        return Search.model_validate(_unpacked(payload.request), context=SETTLED)
    except ValidationError as cause:
        raise CursorInvalid(
            "this cursor is of another release of this service", field="cursor", remedy="search again"
        ) from cause


def _unpacked(request: Mapping[str, Any]) -> dict[str, Any]:
    vector = request.get("query_vector")
    if not isinstance(vector, str):
        return dict(request)
    return {**request, "query_vector": np.frombuffer(base64.b64decode(vector), dtype="<f8").tolist()}


def _end(run: Run, outcome: _Outcome) -> str | None:
    """Return why no more hits follow these, where the routes match more than the caller asked to see."""
    search = run.plan.search
    if outcome.reranked_of is not None and search.rerank is not None:
        rerank = search.rerank
        if rerank.top_n is not None and rerank.top_n < rerank.candidates:
            return None
        if not (search.paging or len(outcome.page) < search.top_k):
            return None
        if outcome.reranked_of > rerank.candidates:
            return (
                f"reranking ends at its {rerank.candidates} candidates, and {outcome.reranked_of} were found: raise "
                "`rerank.candidates` (up to 1000) for more hits"
            )
    elif not search.paging:
        return None
    # A page longer than the window has longer lists behind it, the last of which holds the others. What is reranked is
    # of the window alone.
    tails = run.plan.tails if outcome.reranked_of is None else ()
    width = tails[-1] if tails else run.plan.window
    longest = {**run.answers, **run.tails.get(width, {})}
    counted_up_to = {route.name: not route.needs_vector for route in run.plan.routes}
    truncated = any(
        answer.total is not None
        and (
            answer.total.value > len(longest[name].candidates)
            # Words are counted up to 10,000 only; of a kNN route "gte" says no more than that it was full.
            or (counted_up_to[name] and answer.total.relation == "gte")
        )
        for name, answer in run.answers.items()
    )
    if not truncated:
        return None
    return (
        f"these are the last hits of the fused window of {width}, and the routes match more: raise `fusion.window` "
        "to page further"
    )


def _next_cursor(run: Run, outcome: _Outcome, *, doors: Doors, caller: Caller, now_ms: int) -> str | None:
    """Return the cursor of the next page; None where there is nothing more, or nothing that fits this page.

    Where the window or the reranker's candidates are used up but the routes match more, a warning says so: a loop over
    pages ends, and knows why.
    """
    reached = run.offset + len(outcome.page)
    if reached >= len(outcome.order):
        if outcome.page and (told := _end(run, outcome)) is not None:
            run.warnings.append(told)
        return None
    if run.pit is None:
        return None
    if run.reordered:
        run.warnings.append(
            "no cursor: what failed here may answer again, and a next page of that order would repeat hits or leave some out; "
            "search again to page"
        )
        return None
    payload = cursors.CursorPayload(
        kind="search",
        origin_ms=run.plan.origin_ms,
        pit_id=run.pit,
        offset=reached,
        request=_packed(run.plan.resolved_request()),
        wordings={text: list(others) for text, others in run.plan.wordings.items()},
        rewrites=list(run.plan.rewrites),
        profile=None if run.plan.ranked is None else run.plan.ranked.model_dump(mode="json"),
        collection=run.plan.collection.name,
        caller=caller.tag,
        expires_ms=now_ms + int(PIT_KEEP_ALIVE_S * 1000),
    )
    try:
        return cursors.seal(payload, secrets=doors.cursor_secrets)
    except InvalidRequest as error:
        # The answer itself is whole; only its request is too long for a cursor to carry.
        run.warnings.append(f"no cursor: {error.detail}")
        return None
