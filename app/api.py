"""HTTP: what every endpoint shares, and whether the service lives. The one place where failures become answers.

Bodies are read as strict JSON (no NaN, no duplicate keys, well-formed Unicode), so that what is refused is refused
here, with the field's name and a remedy, in RFC 9457 form. Nothing of a body is echoed unescaped or at length.
"""

import codecs
import difflib
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jiter
from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.models import HTTPBearer
from fastapi.routing import APIRoute
from fastapi.security import SecurityScopes
from fastapi.security.base import SecurityBase
from pydantic import BaseModel
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope as ConnectionScope

from app import catalog, indexing, observing, watching
from app import search as searching
from app.answers import BulkResult
from app.collection import Collection
from app.embedding import Embedder
from app.errors import Forbidden, HalflifeError, InvalidRequest, NotFound
from app.feedback import Votes
from app.filters import AllOf
from app.keys import SCOPES, Fence, Key, Scope, fence
from app.limits import Limits
from app.refusals import explained, path_of
from app.sandbox import Sandbox
from app.searchlog import SearchLog
from app.touches import TouchQueue
from app.values import check_collection

log = logging.getLogger("halflife")
JSON = "application/json"
PROBLEM = "application/problem+json"


def check_parameters(request: Request) -> None:
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


class _Id(PathConvertor):
    regex = "(?s:.*)"


register_url_convertor("id", _Id())
"""`{document_id:id}` in a route takes line feeds too, which the framework's `path` does not."""


class WholePath(APIRoute):
    """A route that takes a path whole or not at all: the framework's patterns pass over a line feed at its end."""

    def matches(self, scope: ConnectionScope) -> tuple[Match, ConnectionScope]:
        """Match as the framework does, but only a path that is the same when its parameters are put back in."""
        match, found = super().matches(scope)
        if match is not Match.NONE:
            path: str = scope["path"]
            if not path.endswith(self.path_format.format(**found["path_params"])):
                return Match.NONE, {}
        return match, found


def make_router() -> APIRouter:
    """Return a router whose routes take whole paths, and the query parameters they know."""
    return APIRouter(route_class=WholePath, dependencies=[Depends(check_parameters)])


health = make_router()


@dataclass(slots=True)
class Service:
    """What the routes call: opened in the lifespan, reached through `service_of`."""

    doors: searching.Doors
    catalog: catalog.Catalog
    indexer: indexing.Indexer
    sandbox: Sandbox
    touches: TouchQueue
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


async def read_json(request: Request) -> Any:
    """Return the body as JSON. Raises InvalidRequest as `parse_json` does."""
    return parse_json(await request.body(), field="body", what="the body")


def parse_json(given: bytes, *, field: str, what: str, example: str | None = None) -> Any:
    """Return what the JSON says, a byte order mark before it left out.

    Raises InvalidRequest, with what to do about it, for what is not JSON by the letter of RFC 8259, for a key given
    twice, and for what no reader here takes: more than 200 levels, or a whole number of more than 4,300 digits.
    """
    try:
        return jiter.from_json(
            given.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False, catch_duplicate_keys=True
        )
    except ValueError as cause:
        told = str(cause)[:200]
        remedy = next((remedy for part, remedy in _JSON_REMEDIES.items() if part in told), None)
        if given.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            remedy = "send UTF-8, not UTF-16"
        elif not given.strip():
            told, remedy = "it is empty", "send a JSON object"
        raise InvalidRequest(
            f"{what} is not valid JSON: {told}",
            field=field,
            remedy=(remedy or "send UTF-8 JSON: names and text in double quotes, no NaN or Infinity")
            + (f"; such as {example}" if example else ""),
        ) from cause


_JSON_REMEDIES = {
    "recursion limit": "nest lists and objects in each other at most 200 levels deep",
    "number out of range": "write a number of fewer digits, or put it in quotes as text",
    "duplicate key": "give each key of an object once",
    "unicode": "send well-formed UTF-8",
    "hex escape": "write characters beyond U+FFFF as two escapes, a high and a low surrogate, or as UTF-8",
    "control character": "escape control characters in text: a line feed is \\n",
    "EOF": "send it whole: it ends before its last bracket or quote",
    "trailing comma": "drop the comma before the closing bracket",
    "trailing characters": "send one JSON value, and nothing after it",
}


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


def caller_of(request: Request, collection: Collection) -> searching.Caller:
    """Return who asks, as searches of this collection take it."""
    kept = fence_of(request, collection)
    return searching.Caller(
        forced=() if kept is None else kept.clauses,
        tag=tag_of(request),
        request_id=request.state.request_id,
        deadline=request.state.deadline,
        key_id=key_id_of(request),
        forced_in=lambda other: () if (there := fence_of(request, other)) is None else there.clauses,
    )


def tag_of(request: Request) -> str:
    """Return what binds cursors and points in time to the request's key; empty where no keys are configured."""
    key = key_of(request)
    return "" if key is None else key.tag


def fence_of(request: Request, collection: Collection) -> Fence | None:
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


def condition_of(request: Request, collection: Collection) -> AllOf | None:
    """Return what a document must meet for the request's key to see or change it; None where that is any."""
    kept = fence_of(request, collection)
    return None if kept is None else kept.condition


async def collection_of(request: Request, name: str) -> Collection:
    """Return the collection of this name, as it was known within the last seconds. Raises NotFound, also out of reach."""
    return (await known_of(request, name)).collection


async def known_of(request: Request, name: str, *, fresh: bool = False) -> catalog.Known:
    """Return what is known of the collection, asked for anew if `fresh`. Raises NotFound, also out of reach."""
    checked = reached(request, name)
    try:
        return await service_of(request).catalog.get(checked, fresh=fresh)
    except NotFound as cause:
        raise _absent(request, checked) from cause


def reached(request: Request, name: str) -> str:
    """Return the collection's name. Raises NotFound for one out of the key's reach, as for one that is not there."""
    key = key_of(request)
    checked = _checked(name)
    if key is not None and not key.reaches(checked):
        raise _absent(request, checked)
    return checked


def _absent(request: Request, name: str) -> NotFound:
    """Return what is told of a collection that is not there: a key that can't make one is not told to."""
    error = catalog.absent(name)
    key = key_of(request)
    if key is not None and not key.allows("admin"):
        error.remedy = "check its name; to make it needs a key with the scope admin, which this one has not"
    return error


def _checked(name: str) -> str:
    try:
        return check_collection(name)
    except Exception as cause:
        told, _, remedy = str(cause).partition(": ")
        raise InvalidRequest(told, field="collection", remedy=remedy) from cause


@health.head("/livez", include_in_schema=False)
@health.get("/livez", tags=["health"], summary="Is the process alive")
async def livez() -> Response:
    """Answer at once, asking nobody."""
    return Response(b'{"status":"alive"}', media_type=JSON)


@health.head("/readyz", include_in_schema=False)
@health.get("/readyz", tags=["health"], summary="Can it serve")
async def readyz(request: Request) -> Response:
    """Ask each dependency, once a second at most: ready, degraded (no embedder: words alone are searched; no writes), or 503."""
    service = service_of(request)
    ready, body = await service.watch.readiness(
        serving=service.ready, keys_usable=service.key_fault() is None
    )
    if service.keyed and "blocked" in (told := body["checks"]["elasticsearch"]):
        told["blocked"] = len(told["blocked"])
    return Response(to_json(body), status_code=200 if ready else 503, media_type=JSON)


@health.get("/metrics", tags=["health"], summary="Prometheus metrics", dependencies=[needs("metrics")])
async def metrics(request: Request) -> Response:
    """Return what this process has measured, in Prometheus' text form; asks nobody."""
    body, content_type = service_of(request).watch.exposition()
    return Response(body, media_type=content_type)


class _Framework(HalflifeError):
    """What the framework itself refused, in our form."""


def install_handlers(app: FastAPI) -> None:
    """Turn every failure, the framework's included, into problem details; what is no path of ours is one, to the letter."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HalflifeError)
        return problem(error, request_id=request_id_of(request))

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        made = _Framework(str(error.detail), remedy=_FRAMEWORK_REMEDIES.get(error.status_code))
        body = {
            **made.problem(),
            "type": "about:blank",
            "title": str(error.detail),
            "status": error.status_code,
        }
        body["request_id"] = request_id_of(request)
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
        return problem(made, request_id=request_id_of(request))

    async def gone(request: Request, error: Exception) -> Response:
        # Nobody reads it; the line of the access log is all that is to be said.
        return Response(status_code=499)

    async def unforeseen(request: Request, error: Exception) -> Response:
        made = HalflifeError("something went wrong on our side", remedy="report it with this request_id")
        return problem(made, request_id=request_id_of(request))

    for route in app.routes:
        # The framework's own, of the documentation.
        if type(route) is Route:
            route.path_regex = re.compile(f"{route.path_regex.pattern.removesuffix('$')}\\Z")
    app.add_exception_handler(HalflifeError, ours)
    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(RequestValidationError, parameters)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unforeseen)


_FRAMEWORK_REMEDIES = {404: "see /docs for what there is", 405: "see /docs for the methods of this path"}


def key_id_of(request: Request) -> str | None:
    """Return the id of the request's key; None where no keys are configured."""
    key = key_of(request)
    return None if key is None else key.id


def request_id_of(request: Request) -> str | None:
    """Return the request's id; None before one was given."""
    return getattr(request.state, "request_id", None)
