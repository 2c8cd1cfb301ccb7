"""The endpoints that search, account for a place in a result, and take votes."""

from collections.abc import Iterator, Mapping, Sequence

from fastapi import Request, Response

from app import cursor as cursors
from app import observing
from app import search as searching
from app import why as whys
from app.answers import FeedbackResult, SearchResult, WhyResult
from app.api import (
    JSON,
    answer,
    caller_of,
    collection_of,
    condition_of,
    key_id_of,
    key_of,
    log,
    make_router,
    needs,
    read_json,
    request_id_of,
    require,
    service_of,
    tag_of,
    to_json,
)
from app.asking import Feedback, NextPage, Search, SearchBatch, Why
from app.collection import Collection
from app.errors import Forbidden, HalflifeError, InvalidRequest
from app.refusals import parse
from app.searchlog import Asked
from app.times import to_ms

router = make_router()


@router.post(
    "/v1/search",
    tags=["search"],
    summary="Search one collection",
    response_model=SearchResult,
    dependencies=[needs("read")],
)
async def post_search(request: Request) -> Response:
    """Run one search, a batch of `queries`, or the next page of a `cursor`."""
    body = await read_json(request)
    if isinstance(body, dict) and "cursor" in body:
        return await _page(request, parse(NextPage, body))
    if isinstance(body, dict) and "queries" in body:
        return await _batch(request, parse(SearchBatch, body))
    search = service_of(request).limits.check_search(parse(Search, body))
    _check_allowed(request, search)
    [result] = await _search(request, [search], await collection_of(request, search.collection))
    if isinstance(result, HalflifeError):
        raise result
    return answer(result)


async def _page(request: Request, page: NextPage) -> Response:
    service = service_of(request)
    now_ms = to_ms(service.now())
    held = cursors.unseal(
        page.cursor,
        secrets=service.doors.cursor_secrets,
        now_ms=now_ms,
        kind="search",
        caller=tag_of(request),
    )
    asked = searching.request_of(held)
    _check_allowed(request, asked)
    collection = await collection_of(request, held.collection)
    with observing.spending() as spent:
        result = await searching.next_page(
            page.cursor,
            collection=collection,
            doors=service.doors,
            caller=caller_of(request, collection),
            now_ms=now_ms,
        )
    if asked.touch:
        result = _touched(request, collection, result)
    [noted] = _noted(request, [asked], [result], collection, spent=spent, first_rank=held.offset + 1)
    return answer(result if isinstance(noted, HalflifeError) else noted)


def _check_allowed(request: Request, search: Search) -> None:
    """Raise Forbidden where a search would write and its key may not, or would be told of more than the key may see."""
    key = key_of(request)
    if search.touch:
        require(key, "write")
    if search.explain == "cluster" and key is not None and key.filter is not None:
        raise Forbidden(
            "`explain`: 'cluster' counts in how many documents a word stands, those outside the key's filter too",
            field="explain",
            remedy="ask for `explain`: true, or use a key without a filter",
        )


def _touched(request: Request, collection: Collection, result: SearchResult) -> SearchResult:
    """Have the returned documents touched; return the answer that tells of how many."""
    taken = service_of(request).touches.add(
        collection,
        dict.fromkeys(hit.id for hit in result.hits),
        result.origin,
        tag=tag_of(request),
        within=condition_of(request, collection),
    )
    return result.model_copy(update={"touched": taken})


_READ_ONCE = {"filter", "routes"}
"""What the queries of a batch share and may be long: one object for all, so that it is read once."""


async def _batch(request: Request, batch: SearchBatch) -> Response:
    limits = service_of(request).limits
    limits.check_queries(batch.queries)
    shared = dict(batch.model_extra or {})
    for name in ("query", "query_vector"):
        if name in shared:
            raise InvalidRequest(
                f"`{name}` and `queries` are both given",
                field=name,
                remedy=f"put `{name}` into each of `queries`",
            )
    parsed: list[Search | HalflifeError] = []
    first: Search | None = None
    for position, given in enumerate(batch.queries):
        item = given if isinstance(given, dict) else {"query": given}
        try:
            if "collection" in item and item["collection"] != shared.get("collection"):
                raise InvalidRequest(
                    "the queries of a batch share one collection",
                    field=f"queries[{position}].collection",
                    remedy="give `collection` once, beside `queries`",
                )
            search = parse(Search, {**shared, **item})
            own = _READ_ONCE & item.keys()
            if first is not None:
                search = search.model_copy(
                    update={name: getattr(first, name) for name in (_READ_ONCE & shared.keys()) - own}
                )
            search = limits.check_search(search, checked=first)
            if not own:
                first = first or search
            _check_allowed(request, search)
            parsed.append(search)
        except (InvalidRequest, Forbidden) as error:
            error.members["query"] = position
            parsed.append(error)
    searches = [item for item in parsed if isinstance(item, Search)]
    results: Iterator[SearchResult | HalflifeError] = iter(())
    if searches:
        collection = await collection_of(request, searches[0].collection)
        results = iter(await _search(request, searches, collection))
    elif isinstance(parsed[0], HalflifeError):
        # Nothing could be run: the fault lies in what they share, or in each of them.
        limits.check_search(parse(Search, {**shared, "query": "x"}))
    entries = []
    for entry in parsed:
        outcome: SearchResult | HalflifeError = entry if isinstance(entry, HalflifeError) else next(results)
        if isinstance(outcome, HalflifeError):
            entries.append(to_json(outcome.problem()))
        else:
            entries.append(outcome.model_dump_json(by_alias=True).encode())
    return Response(b'{"results":[' + b",".join(entries) + b"]}", media_type=JSON)


async def _search(
    request: Request, searches: Sequence[Search], collection: Collection
) -> list[SearchResult | HalflifeError]:
    service = service_of(request)
    if service.log_queries:
        for search in searches:
            log.info("query in %s: %s", collection.name, search.query, extra={"query": search.query})
    with observing.spending() as spent:
        try:
            results = await searching.search(
                searches,
                collection=collection,
                doors=service.doors,
                caller=caller_of(request, collection),
                now_ms=to_ms(service.now()),
            )
        except HalflifeError as error:
            _noted(request, searches, [error] * len(searches), collection, spent=spent)
            raise
    results = [
        _touched(request, collection, result)
        if search.touch and not isinstance(result, HalflifeError)
        else result
        for search, result in zip(searches, results, strict=True)
    ]
    return _noted(request, searches, results, collection, spent=spent)


def _noted(
    request: Request,
    searches: Sequence[Search],
    results: Sequence[SearchResult | HalflifeError],
    collection: Collection,
    *,
    spent: Mapping[str, float],
    first_rank: int = 1,
) -> list[SearchResult | HalflifeError]:
    """Put the searches into the search log, and tell those that are drawn for it their `search_id`."""
    noted: list[SearchResult | HalflifeError] = []
    for search, result in zip(searches, results, strict=True):
        asked = Asked(search, collection, request_id_of(request), key_id_of(request), first_rank, spent)
        refused = isinstance(result, HalflifeError) and result.status < 500
        search_id = None if refused else service_of(request).searchlog.note(asked, result)
        if search_id is not None and isinstance(result, SearchResult):
            noted.append(result.model_copy(update={"search_id": search_id}))
        else:
            noted.append(result)
    return noted


@router.post(
    "/v1/feedback",
    tags=["search"],
    summary="Tell what became of a search's hits",
    response_model=FeedbackResult,
    dependencies=[needs("read")],
)
async def post_feedback(request: Request) -> Response:
    """Store verdicts on hits of a logged search, each on its own; sending one again changes nothing.

    Votes are read once a minute: `counts_from` in the answer tells from when on they count.
    """
    # Who may search may vote on what it found; yet a vote is a write, and is finished once it has begun.
    request.state.abandonable = False
    given = parse(Feedback, await read_json(request))
    key = key_of(request)
    stored = await service_of(request).votes.store(
        given, key_id=key_id_of(request), allowed=lambda name: key is None or key.reaches(name)
    )
    return answer(stored)


@router.post(
    "/v1/why",
    tags=["search"],
    summary="Why a document is (not) in a result",
    response_model=WhyResult,
    dependencies=[needs("read")],
)
async def post_why(request: Request) -> Response:
    """Account for one document in a search: rank and factor in each route, what the stages after fusion did with it (they
    run, the reranker too), and what would bring it onto the page.
    """
    service = service_of(request)
    asked = service.limits.check_search(parse(Why, await read_json(request)))
    _check_allowed(request, asked)
    collection = await collection_of(request, asked.collection)
    result = await whys.why(
        asked,
        collection=collection,
        doors=service.doors,
        caller=caller_of(request, collection),
        now_ms=to_ms(service.now()),
    )
    return answer(result)
