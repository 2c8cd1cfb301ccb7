"""HTTP: parse, call, return. The one place where failures become answers; no search logic.

Bodies are read as strict JSON (no NaN, no duplicate keys, well-formed Unicode), so that what is refused is refused
here, with the field's name and a remedy, in RFC 9457 form. Nothing of a body is echoed unescaped or at length.
"""

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jiter
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from pydantic import BaseModel
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app import catalog, files, indexing, observing, watching
from app import cursor as cursors
from app import search as searching
from app import why as whys
from app.drafts import Names
from app.embedding import Embedder
from app.errors import Forbidden, HalflifeError, InvalidRequest, NotFound, SchemaMismatch
from app.feedback import Votes
from app.filters import AllOf, compile_filter
from app.keys import SCOPES, Fence, Key, Scope, fence
from app.limits import Limits
from app.models import (
    BrokenCollection,
    BulkResult,
    Collection,
    CollectionDetails,
    CollectionOptions,
    DeleteDocuments,
    Deletion,
    DocumentPage,
    Feedback,
    FeedbackResult,
    FileForm,
    FilesResult,
    ItemError,
    NextPage,
    PatchDocuments,
    Refresh,
    Search,
    SearchBatch,
    SearchResult,
    StoredDocument,
    StoredSynonyms,
    SynonymRule,
    SynonymSet,
    Upsert,
    Why,
    WhyResult,
    check_collection,
)
from app.refusals import explained, parse, path_of
from app.sandbox import Sandbox
from app.searchlog import Asked, SearchLog
from app.times import to_ms

log = logging.getLogger("halflife")
JSON = "application/json"
PROBLEM = "application/problem+json"
LIST_KEEP_ALIVE_S = 120.0


def _check_parameters(request: Request) -> None:
    """Raise InvalidRequest for query parameters that the route does not know, or that are given twice.

    As unknown fields of a body: a misspelt filter or `refresh` would else be as if it were not there.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.path.startswith("/v1/"):
        return
    known = [each.alias for each in route.dependant.query_params]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        shown = name.encode("ascii", "backslashreplace").decode()[:60]
        if name not in known:
            close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
            told = f"there are {', '.join(known)}" if known else "drop it; what this takes stands in its body"
            raise InvalidRequest(
                f"there is no query parameter `{shown}` here",
                field=shown,
                remedy=f"did you mean `{close[0]}`?" if close else told,
            )
        if given.count(name) > 1:
            raise InvalidRequest(
                f"the query parameter `{shown}` is given twice", field=shown, remedy="give it once"
            )


router = APIRouter(dependencies=[Depends(_check_parameters)])


@dataclass(slots=True)
class Service:
    """What the routes call: opened in the lifespan, reached through `service_of`."""

    doors: searching.Doors
    catalog: catalog.Catalog
    indexer: indexing.Indexer
    sandbox: Sandbox
    touches: indexing.TouchQueue
    now: Callable[[], datetime]
    auto_create: bool
    dims: int
    model: str
    searchlog: SearchLog
    votes: Votes
    watch: watching.Watch
    log_queries: bool = False
    ready: bool = False
    keyed: bool = False
    """Whether keys are configured: then what needs none tells no names."""
    limits: Limits = field(default_factory=Limits)
    embedder_named: Callable[[str], Embedder | None] = lambda name: None
    """The embedder of one of the further models that are configured."""
    key_fault: Callable[[], str | None] = lambda: None
    """Why the file of keys, as it is now, is not in force; None where it is."""


def service_of(request: Request) -> Service:
    """Return the running service. Raises RuntimeError outside the lifespan: a fault in the wiring."""
    service = getattr(request.app.state, "service", None)
    if not isinstance(service, Service):
        raise RuntimeError("the service is not started")
    return service


# --- keys ------------------------------------------------------------------------------------------------------------


class _Bearer(SecurityBase):
    """Ask the request's key for a scope; the edge has found the key, or that there are none to ask for."""

    def __init__(self) -> None:
        self.scheme_name = "bearer"
        self.model = HTTPBearer(
            description="A key made with `halflife keys create`. Each operation names the scope it needs. A service "
            "without keys serves its own machine only, and asks for none."
        )

    async def __call__(self, request: Request, wanted: SecurityScopes) -> None:
        key = key_of(request)
        scopes: list[Scope] = [scope for scope in SCOPES if scope in wanted.scopes]
        # Work that changes nothing may be dropped when the caller hangs up or the time is over.
        request.state.abandonable = scopes == ["read"]
        for scope in scopes:
            require(key, scope)


BEARER = _Bearer()


def needs(scope: Scope) -> Any:
    """Return the dependency that admits keys of this scope; every route but the open ones has one."""
    return Security(BEARER, scopes=[scope])


def require(key: Key | None, scope: Scope) -> None:
    """Raise Forbidden unless the key has the scope; no key at all means that none are configured."""
    if key is not None and not key.allows(scope):
        raise Forbidden(
            f"this needs the scope '{scope}', and the key has {', '.join(key.scopes)}",
            remedy=f"use a key that has the scope '{scope}'",
        )


def key_of(request: Request) -> Key | None:
    """Return the request's key; None where no keys are configured. Fails where no edge has asked for one."""
    key: Key | None = request.state.key
    return key


# --- reading ---------------------------------------------------------------------------------------------------------


async def read_json(request: Request) -> Any:
    """Return the body as JSON. Raises InvalidRequest for what is not JSON by the letter of RFC 8259."""
    body = await request.body()
    try:
        return jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as cause:
        raise InvalidRequest(
            f"the body is not valid JSON: {str(cause)[:200]}",
            field="body",
            remedy="send UTF-8 JSON without NaN or Infinity and without a key twice",
        ) from cause


def answer(model: BaseModel, *, status: int = 200) -> Response:
    """Return the model as JSON. Serialised once, by pydantic; never as FastAPI would, twice."""
    if isinstance(model, BulkResult):
        for item in model.items:
            observing.ITEMS.labels(item.status).inc()
    return Response(model.model_dump_json(by_alias=True), status_code=status, media_type=JSON)


def problem(error: HalflifeError, *, request_id: str | None = None) -> Response:
    """Return the failure in RFC 9457 form. It always encodes, whatever was in the request."""
    body = error.problem()
    if request_id is not None:
        body["request_id"] = request_id
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return Response(to_json(body), status_code=error.status, media_type=PROBLEM, headers=headers)


def to_json(body: Mapping[str, Any]) -> bytes:
    """Return JSON that any client can decode: ASCII, no NaN."""
    return json.dumps(body, ensure_ascii=True, allow_nan=False, default=str).encode()


# --- search ------------------------------------------------------------------------------------------------------------


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
    search = parse(Search, body)
    service_of(request).limits.check_search(search)
    _check_allowed(request, search)
    [result] = await _search(request, [search], await _collection(request, search.collection))
    if isinstance(result, HalflifeError):
        raise result
    return answer(result)


async def _page(request: Request, page: NextPage) -> Response:
    service = service_of(request)
    now_ms = to_ms(service.now())
    held = cursors.unseal(
        page.cursor, secrets=service.doors.cursor_secrets, now_ms=now_ms, kind="search", caller=_tag(request)
    )
    asked = searching.request_of(held)
    _check_allowed(request, asked)
    collection = await _collection(request, held.collection)
    with observing.spending() as spent:
        result = await searching.next_page(
            page.cursor,
            collection=collection,
            doors=service.doors,
            caller=_caller(request, collection),
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
        tag=_tag(request),
        within=_within(request, collection),
    )
    return result.model_copy(update={"touched": taken})


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
            limits.check_search(search)
            _check_allowed(request, search)
            parsed.append(search)
        except (InvalidRequest, Forbidden) as error:
            error.members["query"] = position
            parsed.append(error)
    searches = [item for item in parsed if isinstance(item, Search)]
    results: Iterator[SearchResult | HalflifeError] = iter(())
    if searches:
        collection = await _collection(request, searches[0].collection)
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
                caller=_caller(request, collection),
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
        asked = Asked(search, collection, _request_id(request), _key_id(request), first_rank, spent)
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
        given, key_id=_key_id(request), allowed=lambda name: key is None or key.reaches(name)
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
    asked = parse(Why, await read_json(request))
    service = service_of(request)
    service.limits.check_search(asked)
    _check_allowed(request, asked)
    collection = await _collection(request, asked.collection)
    result = await whys.why(
        asked,
        collection=collection,
        doors=service.doors,
        caller=_caller(request, collection),
        now_ms=to_ms(service.now()),
    )
    return answer(result)


def _caller(request: Request, collection: Collection) -> searching.Caller:
    kept = _fence(request, collection)
    return searching.Caller(
        forced=() if kept is None else kept.clauses,
        tag=_tag(request),
        request_id=request.state.request_id,
        deadline=request.state.deadline,
        key_id=_key_id(request),
        forced_in=lambda other: () if (there := _fence(request, other)) is None else there.clauses,
    )


def _tag(request: Request) -> str:
    key = key_of(request)
    return "" if key is None else key.tag


def _fence(request: Request, collection: Collection) -> Fence | None:
    """Return what keeps the request's key inside its part of the collection; None where nothing does.

    Raises Forbidden where the key's filter can't be read as the collection is: rather nothing than too much.
    """
    key = key_of(request)
    if key is None:
        return None
    try:
        return fence(key, collection)
    except InvalidRequest as cause:
        log.error(
            "the filter of key %s does not fit collection %s: %s", key.id, collection.name, cause.detail
        )
        raise Forbidden(
            f"the key's filter does not fit the collection `{collection.name}`, so the key reaches nothing in it",
            remedy="who made the key should see the service's log, and correct the filter or what is declared",
        ) from cause


def _within(request: Request, collection: Collection) -> AllOf | None:
    kept = _fence(request, collection)
    return None if kept is None else kept.condition


async def _collection(request: Request, name: str) -> Collection:
    service = service_of(request)
    return (await service.catalog.get(_reached(request, name))).collection


def _reached(request: Request, name: str) -> str:
    """Return the collection's name. Raises NotFound for one out of the key's reach, as for one that is not there."""
    key = key_of(request)
    checked = _checked(name)
    if key is not None and not key.reaches(checked):
        raise catalog.absent(checked)
    return checked


def _checked(name: str) -> str:
    try:
        return check_collection(name)
    except Exception as cause:
        told, _, remedy = str(cause).partition(": ")
        raise InvalidRequest(told, field="collection", remedy=remedy) from cause


# --- documents -----------------------------------------------------------------------------------------------------------

DOCUMENTS = "/v1/collections/{collection}/documents"


@router.post(
    DOCUMENTS,
    tags=["documents"],
    summary="Upsert documents",
    response_model=BulkResult,
    dependencies=[needs("write")],
)
async def upsert(request: Request, collection: str) -> Response:
    """Store documents, each on its own: the answer tells what became of every item, in the order sent."""
    bulk = parse(Upsert, await read_json(request))
    return answer(await _upsert(request, collection, bulk.documents, bulk.refresh))


async def _upsert(request: Request, collection: str, items: Sequence[Any], refresh: Refresh) -> BulkResult:
    """Store the items; a collection that is not there yet is made if one of them is valid."""
    service = service_of(request)
    service.limits.check_items(items)
    name = _reached(request, collection)
    key = key_of(request)
    try:
        known = await service.catalog.get(name)
    except NotFound:
        if not service.auto_create or not (key is None or key.allows("admin")):
            raise
        indexing.check_first(items, collection=name, dims=service.dims)
        known = await service.catalog.ensure(
            name, CollectionOptions(), dims=service.dims, model=service.model, moment=service.now()
        )
    return await service.indexer.upsert(
        items, collection=known.collection, refresh=refresh, within=_within(request, known.collection)
    )


@router.post(
    "/v1/collections/{collection}/files",
    tags=["documents"],
    summary="Upload files",
    response_model=FilesResult,
    dependencies=[needs("write")],
)
async def upload_files(request: Request, collection: str) -> Response:
    """Read text, Markdown, HTML, PDF, Word, EPUB, CSV and JSON Lines files, and store what they say.

    A file makes one document, a table or line file one for each row. The id is the file's name unless given; the
    creation time the caller's, else the document's own, else the time of the upload, with a warning. A file that can't
    be read is one item's error.
    """
    service = service_of(request)
    name = _reached(request, collection)
    key = key_of(request)
    if not service.auto_create or not (key is None or key.allows("admin")):
        await service.catalog.get(name)
    form, sent = await _read_form(request)
    uploads = [
        files.Upload(file, data, content_type, form.given(number, file, len(sent)))
        for number, (file, data, content_type) in enumerate(sent)
    ]
    # Nothing is stored yet: it waits without a write's place, and ends if the caller hangs up.
    state = request.state
    readings = await state.aside(files.read(uploads, sandbox=service.sandbox, caller=state.caller))
    return answer(
        await files.store(
            uploads,
            readings,
            names=Names(
                form.names.id, form.names.title, form.names.text, form.names.creation_time or form.names.time
            ),
            upsert=lambda items: _upsert(request, name, items, form.refresh),
            now=service.now(),
        )
    )


MOST_FILES = 100


async def _read_form(request: Request) -> tuple[FileForm, list[tuple[str, bytes, str | None]]]:
    """Return what a multipart body says and its files: (name, content, declared type), in the order sent."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest(
            "files are sent as multipart/form-data",
            field="body",
            remedy="curl -F file=@report.pdf …/files, or POST JSON to …/documents",
        )
    fields: dict[str, Any] = {}
    sent: list[tuple[str, bytes, str | None]] = []
    async with request.form(max_files=MOST_FILES, max_fields=8, max_part_size=2**20) as form:
        for key, value in form.multi_items():
            if isinstance(value, UploadFile):
                if key not in ("file", "files"):
                    raise InvalidRequest(
                        "a file stands in a field of another name", field=key[:60], remedy="call it `file`"
                    )
                called = (value.filename or "").replace("\\", "/").lstrip("/").removeprefix("./")
                called = called.encode("utf-8", "replace").decode()
                sent.append((called or f"file-{len(sent) + 1}", await value.read(), value.content_type))
            elif key == "refresh":
                fields[key] = value
            else:
                fields[key[:60]] = _form_json(key[:60], value)
    if not sent:
        raise InvalidRequest("no file was sent", field="file", remedy="send at least one part called `file`")
    parsed = parse(FileForm, fields)
    if isinstance(parsed.each, list) and len(parsed.each) != len(sent):
        raise InvalidRequest(
            f"`each` has {len(parsed.each)} entries for {len(sent)} files",
            field="each",
            remedy="give one for each file, in their order, or an object by file name",
        )
    if isinstance(parsed.each, dict) and (strange := set(parsed.each) - {file for file, _, _ in sent}):
        raise InvalidRequest(
            f"`each` names '{min(strange)[:60]}', and no file is called so",
            field="each",
            remedy="name the files as they are sent",
        )
    return parsed, sent


def _form_json(key: str, text: str) -> Any:
    try:
        return jiter.from_json(
            text.encode("utf-8", "replace"), allow_inf_nan=False, catch_duplicate_keys=True
        )
    except ValueError as cause:
        raise InvalidRequest(
            f"`{key}` is not JSON: {str(cause)[:200]}",
            field=key,
            remedy='send a JSON object, such as {"lang": "en"}',
        ) from cause


@router.patch(
    DOCUMENTS,
    tags=["documents"],
    summary="Change fields without embedding",
    response_model=BulkResult,
    dependencies=[needs("write")],
)
async def patch(request: Request, collection: str) -> Response:
    """Change the named fields of stored documents; text and vectors stay as they are."""
    changes = parse(PatchDocuments, await read_json(request))
    service = service_of(request)
    service.limits.check_items(changes.documents)
    target = await _collection(request, collection)
    result = await service.indexer.patch(
        changes.documents, collection=target, refresh=changes.refresh, within=_within(request, target)
    )
    # A change that found nothing to change is lost: it counts as failed, unlike a delete that found nothing.
    missed = sum(item.status == "not_found" for item in result.items)
    return answer(BulkResult(items=result.items, failed=result.failed + missed))


@router.post(
    DOCUMENTS + "/delete",
    tags=["documents"],
    summary="Delete by ids or filter",
    response_model=Deletion,
    dependencies=[needs("write")],
)
async def delete_many(request: Request, collection: str) -> Response:
    """Delete the named documents, those that a filter matches, or all of them."""
    wanted = parse(DeleteDocuments, await read_json(request))
    service = service_of(request)
    if wanted.ids is not None:
        service.limits.check_items(wanted.ids, field="ids")
    if wanted.filter:
        service.limits.check_filter(wanted.filter)
    # What a filter matches is deleted for good, so it is compiled for what the collection declares now.
    target = (await service.catalog.get(_reached(request, collection), fresh=wanted.ids is None)).collection
    kept = _fence(request, target)
    within = None if kept is None else kept.condition
    if wanted.ids is not None:
        result = await service.indexer.delete_ids(
            wanted.ids, collection=target, refresh=wanted.refresh, within=within
        )
        return answer(_deletion(result))
    clauses = [
        *(() if kept is None else kept.clauses),
        *(compile_filter(wanted.filter, declared=target.declared) if wanted.filter else ()),
    ]
    gone = await service.indexer.delete_matching(
        clauses, collection=target, refresh=wanted.refresh, within=within
    )
    return answer(Deletion(deleted=gone.deleted, items=gone.failures, failed=len(gone.failures)))


def _deletion(result: BulkResult) -> Deletion:
    deleted = sum(item.status == "deleted" for item in result.items)
    return Deletion(deleted=deleted, items=result.items, failed=result.failed)


@router.get(
    DOCUMENTS,
    tags=["documents"],
    summary="List documents by id",
    response_model=DocumentPage,
    dependencies=[needs("read")],
)
async def list_documents(
    request: Request,
    collection: str,
    size: int = Query(100, ge=1, le=1000, description="Documents on one page."),
    where: str | None = Query(
        None, alias="filter", description="A filter as JSON, as in a search.", max_length=20_000
    ),
    cursor: str | None = Query(
        None, description="The cursor of the page before.", max_length=65_536, pattern=r"^[A-Za-z0-9_-]+$"
    ),
) -> Response:
    """List stored documents in the order of their ids, from one point in time over all pages."""
    service = service_of(request)
    asked = None if where is None else _filter(where)
    if asked:
        service.limits.check_filter(asked)
    target = await _collection(request, collection)
    now_ms = to_ms(service.now())
    after: str | None = None
    pit: str | None = None
    if cursor is not None:
        if where is not None:
            raise InvalidRequest("a cursor carries its filter", field="filter", remedy="give `cursor` alone")
        held = cursors.unseal(
            cursor,
            secrets=service.doors.cursor_secrets,
            now_ms=now_ms,
            kind="list",
            caller=_tag(request),
            collection=target.name,
        )
        wanted = held.request.get("filter")
        if "size" in request.query_params and size != held.top_k:
            raise InvalidRequest(
                f"a cursor carries its size, which is {held.top_k}",
                field="size",
                remedy="give `cursor` alone",
            )
        size, after, pit = held.top_k, (held.after or [None])[0], held.pit_id
    else:
        wanted = asked
    kept = _fence(request, target)
    clauses = [
        *(() if kept is None else kept.clauses),
        *(compile_filter(wanted, declared=target.declared) if wanted else ()),
    ]
    page = await service.indexer.list_documents(
        clauses,
        collection=target,
        size=size,
        after=after,
        pit=pit,
        keep_alive_s=LIST_KEEP_ALIVE_S,
        owner=_tag(request),
    )
    following = None
    if page.after is not None:
        following = cursors.seal(
            cursors.CursorPayload(
                kind="list", collection=target.name, caller=_tag(request), origin_ms=now_ms, pit_id=page.pit, top_k=size,
                after=[page.after], request={"filter": wanted}, issued_ms=now_ms,
                expires_ms=now_ms + int(LIST_KEEP_ALIVE_S * 1000),
            ),
            secrets=service.doors.cursor_secrets,
        )  # fmt: skip
    return answer(DocumentPage(documents=page.documents, total=page.total, cursor=following))


def _filter(text: str) -> dict[str, Any]:
    try:
        value = jiter.from_json(
            text.encode("utf-8", "replace"), allow_inf_nan=False, catch_duplicate_keys=True
        )
    except ValueError as cause:
        raise InvalidRequest(
            f"the filter is not JSON: {str(cause)[:200]}", field="filter", remedy='such as {"lang": "en"}'
        ) from cause
    if not isinstance(value, dict):
        raise InvalidRequest("a filter is an object", field="filter", remedy='such as {"lang": "en"}')
    return value


@router.get(
    DOCUMENTS + "/{document_id:path}",
    tags=["documents"],
    summary="Get a document",
    response_model=StoredDocument,
    dependencies=[needs("read")],
)
async def get_document(request: Request, collection: str, document_id: str) -> Response:
    """Return one document as stored, in real time: also before searches see it."""
    target = await _collection(request, collection)
    if not document_id:
        raise NotFound(
            "an id is missing after the last slash", field="id", remedy="name it, or drop the slash to list"
        )
    [found] = await service_of(request).indexer.get(
        [document_id], collection=target, within=_within(request, target)
    )
    if found is None:
        raise NotFound(f"there is no document with this id in '{target.name}'", field="id")
    return answer(found)


@router.delete(
    DOCUMENTS + "/{document_id:path}",
    tags=["documents"],
    summary="Delete a document",
    response_model=Deletion,
    dependencies=[needs("write")],
)
async def delete_document(
    request: Request,
    collection: str,
    document_id: str,
    refresh: str = Query("false", pattern="^(false|true|wait_for)$"),
) -> Response:
    """Delete one document; 404 if there is none."""
    target = await _collection(request, collection)
    asked = parse(DeleteDocuments, {"ids": [document_id], "refresh": refresh})
    result = await service_of(request).indexer.delete_ids(
        asked.ids or [], collection=target, refresh=asked.refresh, within=_within(request, target)
    )
    [item] = result.items
    if item.status == "not_found":
        raise NotFound(f"there is no document with this id in '{target.name}'", field="id")
    if item.error is not None and item.error.type == Forbidden.code:
        raise Forbidden(item.error.detail, remedy=item.error.remedy)
    return answer(_deletion(result))


# --- collections -----------------------------------------------------------------------------------------------------------


@router.get(
    "/v1/collections",
    tags=["collections"],
    summary="List collections",
    response_model=list[Collection | BrokenCollection],
    dependencies=[needs("read")],
)
async def list_collections(request: Request) -> Response:
    """Return every collection of this cluster that the key reaches.

    One whose index or aliases are not as they should be stands there with its `error` alone.
    """
    key = key_of(request)
    broken: dict[str, SchemaMismatch] = {}
    found: list[Collection | BrokenCollection] = [
        *await catalog.list_collections(
            service_of(request).doors.cluster,
            only=lambda name: key is None or key.reaches(name),
            broken=broken,
        )
    ]
    for name, fault in broken.items():
        error = ItemError(type=fault.code, detail=fault.detail, field=fault.field, remedy=fault.remedy)
        found.append(BrokenCollection(name=name, error=error))
    found.sort(key=lambda item: item.name)
    return Response(
        b"[" + b",".join(item.model_dump_json().encode() for item in found) + b"]", media_type=JSON
    )


@router.put(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Create or change a collection",
    response_model=Collection,
    dependencies=[needs("admin")],
)
async def create_collection(request: Request, collection: str) -> Response:
    """Create a collection, or change one that is there: replicas, refresh interval, ranking profiles, new declared keys.

    What is left out stays. Where an option needs another index (dims, similarity, shards, the type of a declared key),
    nothing is changed: 409, with the `halflife reindex` command that does it.
    """
    body = await request.body()
    options = parse(CollectionOptions, await read_json(request) if body.strip() else {})
    service = service_of(request)
    for profile_name, profile in options.profiles.items():
        service.limits.check_profile(profile, path=f"profiles.{profile_name}")
    name = _reached(request, collection)
    dims, model = service.dims, service.model
    if options.model is not None and options.model != model:
        embedder = service.embedder_named(options.model)
        if embedder is None:
            raise InvalidRequest(
                "this service knows no embedding model of that name",
                field="model",
                remedy="name it in HALFLIFE_EMBEDDING_MODELS, or leave `model` out",
            )
        dims, model = await embedder.check(), options.model
    try:
        made = await catalog.create(
            service.doors.cluster, name, options, dims=dims, model=model, moment=service.now()
        )
    finally:
        # A change that failed may have been taken all the same.
        service.catalog.forget(name)
    return answer(made)


@router.get(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Describe a collection",
    response_model=CollectionDetails,
    dependencies=[needs("read")],
)
async def get_collection(request: Request, collection: str) -> Response:
    """Return what a collection is and holds: documents, chunks, size, ages, options, profiles."""
    # Who asks this wants to know what is, not what was a moment ago.
    target = (await service_of(request).catalog.get(_reached(request, collection), fresh=True)).collection
    kept = _fence(request, target)
    within = None if kept is None else kept.clauses
    return answer(await catalog.describe(service_of(request).doors.cluster, target, within=within))


SYNONYMS = "/v1/collections/{collection}/synonyms"


@router.put(
    SYNONYMS,
    tags=["collections"],
    summary="Set a collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("admin")],
)
async def put_synonyms(request: Request, collection: str) -> Response:
    """Store the synonyms that queries are widened with, in the place of those there are. Nothing is reindexed or closed.

    This process uses them at once, others that serve the same cluster within five seconds.
    """
    given = parse(SynonymSet, await read_json(request))
    return await _put_synonyms(request, collection, given.synonyms_set, if_revision=given.if_revision)


@router.get(
    SYNONYMS,
    tags=["collections"],
    summary="A collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("read")],
)
async def get_synonyms(request: Request, collection: str) -> Response:
    """Return the rules as they are stored; an empty list where there are none."""
    name = _reached(request, collection)
    found = (await service_of(request).catalog.get(name, fresh=True)).collection
    return answer(StoredSynonyms(collection=name, synonyms_set=found.synonyms, revision=found.revision))


@router.delete(
    SYNONYMS,
    tags=["collections"],
    summary="Delete a collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("admin")],
)
async def delete_synonyms(request: Request, collection: str) -> Response:
    """Delete all rules; fine where there are none."""
    return await _put_synonyms(request, collection, [])


async def _put_synonyms(
    request: Request, collection: str, rules: Sequence[SynonymRule], *, if_revision: int | None = None
) -> Response:
    service = service_of(request)
    name = _reached(request, collection)
    target = (await service.catalog.get(name, fresh=True)).collection
    try:
        stored = await catalog.put_synonyms(service.doors.cluster, target, rules, if_revision=if_revision)
    finally:
        service.catalog.forget(name)
    return answer(StoredSynonyms(collection=name, synonyms_set=stored.synonyms, revision=stored.revision))


@router.delete(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Delete a collection",
    status_code=204,
    dependencies=[needs("admin")],
)
async def delete_collection(
    request: Request,
    collection: str,
    confirm: str | None = Query(None, description="The collection's name again: this can't be undone."),
) -> Response:
    """Delete a collection with all its documents."""
    name = _reached(request, collection)
    if confirm != name:
        raise InvalidRequest(
            "deleting a collection deletes all its documents", field="confirm", remedy=f"add ?confirm={name}"
        )
    await service_of(request).catalog.delete(name)
    return Response(status_code=204)


# --- health --------------------------------------------------------------------------------------------------------------


@router.head("/livez", include_in_schema=False)
@router.get("/livez", tags=["health"], summary="Is the process alive")
async def livez() -> Response:
    """Answer at once, asking nobody."""
    return Response(b'{"status":"alive"}', media_type=JSON)


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", tags=["health"], summary="Can it serve")
async def readyz(request: Request) -> Response:
    """Ask each dependency: ready, degraded (no embedder: words alone are searched; no writes), or 503."""
    service = service_of(request)
    ready, body = await service.watch.readiness(
        serving=service.ready, keys_usable=service.key_fault() is None
    )
    if service.keyed and "blocked" in (told := body["checks"]["elasticsearch"]):
        told["blocked"] = len(told["blocked"])
    return Response(to_json(body), status_code=200 if ready else 503, media_type=JSON)


@router.get("/metrics", tags=["health"], summary="Prometheus metrics", dependencies=[needs("metrics")])
async def metrics(request: Request) -> Response:
    """Return what this process has measured, in Prometheus' text form; asks nobody."""
    body, content_type = service_of(request).watch.exposition()
    return Response(body, media_type=content_type)


# --- failures ------------------------------------------------------------------------------------------------------------


class _Framework(HalflifeError):
    """What the framework itself refused, in our form."""


def install_handlers(app: FastAPI) -> None:
    """Turn every failure, the framework's included, into problem details."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HalflifeError)
        return problem(error, request_id=_request_id(request))

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        made = _Framework(str(error.detail), remedy=_FRAMEWORK_REMEDIES.get(error.status_code))
        body = {
            **made.problem(),
            "type": "about:blank",
            "title": str(error.detail),
            "status": error.status_code,
        }
        body["request_id"] = _request_id(request)
        return Response(
            to_json(body),
            status_code=error.status_code,
            media_type=PROBLEM,
            headers=dict(error.headers or {}),
        )

    async def parameters(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        item = error.errors()[0]
        name = path_of([part for part in item["loc"] if part not in ("query", "path")])
        detail, remedy = explained(item)
        if item["type"] == "missing":
            detail, remedy = "is missing", f"give `{name}`"
        made = InvalidRequest(f"{name}: {detail}", field=name, remedy=remedy)
        return problem(made, request_id=_request_id(request))

    async def gone(request: Request, error: Exception) -> Response:
        # Nobody reads it; the line of the access log is all that is to be said.
        return Response(status_code=499)

    async def unforeseen(request: Request, error: Exception) -> Response:
        made = HalflifeError("something went wrong on our side", remedy="report it with this request_id")
        return problem(made, request_id=_request_id(request))

    app.add_exception_handler(HalflifeError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unforeseen)


_FRAMEWORK_REMEDIES = {404: "see /docs for what there is", 405: "see /docs for the methods of this path"}


def _key_id(request: Request) -> str | None:
    key = key_of(request)
    return None if key is None else key.id


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)
