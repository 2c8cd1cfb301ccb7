"""Wiring: opens every client in the lifespan, checks that cluster and service fit, hands them to the routes.

`create_app(settings)` is the factory; `halflife serve` runs it.
"""

import asyncio
import hmac
import logging
import random
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI
from pydantic import SecretStr

from app import api_collections, api_documents, api_search, catalog, indexing, observing, openapi, watching
from app.api import Service, health, install_handlers
from app.chunking import Chunking
from app.collection import Collection
from app.dialling import check_key, parse_url
from app.edge import HELD_BODIES, OPEN_PATHS, Edge, Guard
from app.elastic import Cluster
from app.embedding import Embedder
from app.errors import ClusterUnavailable, EmbedderUnavailable, HalflifeError, InvalidRequest
from app.extracted import Limits
from app.feedback import Votes
from app.keyfile import KeyFile, warn_of_none
from app.keys import Keyring, parse_keys
from app.limits import Buckets
from app.limits import Limits as RequestLimits
from app.metering import Metering
from app.reranking import Reranker
from app.rewriting import Rewriter
from app.sandbox import Bounds, Line, Sandbox
from app.search import Doors
from app.searchlog import SearchLog
from app.settings import UNREAD_REMEDY, Settings
from app.targets import CatalogTargets, OtherModel
from app.touches import TouchQueue
from app.watching import Watch
from app.writes import DocumentEmbedder, Patience, Stamper, Targets

Result = TypeVar("Result")
log = logging.getLogger("halflife")
VERSION = "0.1.0"
CLOSE_WITHIN_S = 0.7
"""Touches that can't be written by then are given up: a service that stops must not hang on a dead cluster."""

SMALL_FILE_SHARE = 1 / 6
"""Of the longest reading, for a small file and for each MiB: 10 s and 10 s a MiB of 60 s, which 5 MiB have whole."""


def create_app(settings: Settings) -> FastAPI:
    """Return the service; its clients are opened when it starts and closed when it ends.

    Start-up waits for the cluster and the embedder, installs the templates, and stops with the remedy where a
    template, an index or the embedder's dims do not fit. Raises InvalidRequest for keys that can't be used.
    """
    keys = open_keys(settings)
    tracing = _open_tracing(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            if tracing is not None:
                opened.callback(tracing.close)
            cluster = open_cluster(settings)
            opened.push_async_callback(cluster.close)
            embedder = open_embedder(settings)
            opened.push_async_callback(embedder.close)
            embedders = Embedders(settings, embedder)
            opened.push_async_callback(embedders.close)
            reranker = open_reranker(settings)
            if reranker is not None:
                opened.push_async_callback(reranker.close)
            rewriter = open_rewriter(settings)
            if rewriter is not None:
                opened.push_async_callback(rewriter.close)
            sandbox = _sandbox(settings)
            opened.callback(sandbox.close)
            deadline = time.monotonic() + settings.startup_wait_s
            service = await _start(
                settings,
                deadline=deadline,
                cluster=cluster,
                embedder=embedder,
                embedders=embedders,
                reranker=reranker,
                rewriter=rewriter,
                sandbox=sandbox,
            )
            service.keyed = keys is not None
            if keys is not None:
                warn_of_none(keys() if isinstance(keys, KeyFile) else keys, time.time_ns() // 1_000_000)
            if isinstance(keys, KeyFile):
                service.key_fault = keys.look
            elif keys is None:
                log.warning(
                    "no keys are configured: every program on this machine may read and write everything"
                )
            await service.touches.start()
            opened.push_async_callback(_within, CLOSE_WITHIN_S, service.touches.close)
            service.watch.start()
            opened.push_async_callback(service.watch.close)
            opened.push_async_callback(_within, CLOSE_WITHIN_S, service.searchlog.close)
            opened.push_async_callback(_within, CLOSE_WITHIN_S, service.votes.close)
            if settings.search_log_rate > 0:
                for install in (service.searchlog.start, service.votes.start):
                    await _patiently(install, ClusterUnavailable, deadline, "Elasticsearch")
            app.state.service = service
            service.ready = True
            log.info("ready: %s, model %s with %d dims", ", ".join(cluster.urls), service.model, service.dims)
            yield
            service.ready = False

    app = FastAPI(
        title="Halflife",
        version=VERSION,
        summary="Hybrid search on Elasticsearch that knows how old a passage is, and says why each hit stands where it stands.",
        lifespan=lifespan,
        docs_url="/docs" if settings.docs else None,
        redoc_url=None,
        # A redirect would take its host from the request.
        redirect_slashes=False,
        openapi_url="/openapi.json" if settings.docs else None,
        # Its own spans of each request, where a provider of traces is set up; metrics and logs are ours.
        telemetry={
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "exclude": lambda scope: scope.get("path") in observing.TRACED_PATHS_LEFT_OUT,
        },
    )
    for router in (api_search.router, api_documents.router, api_collections.router, health):
        app.include_router(router)
    install_handlers(app)
    openapi.install(app)
    # Set by who serves, when what is under way can't be waited for any longer.
    app.state.ending = asyncio.Event()
    app.add_middleware(
        Edge,
        max_body_bytes=settings.max_body_bytes,
        max_concurrent=settings.max_concurrent_requests,
        new_id=lambda: uuid.uuid4().hex,
        guard=_guard(settings, keys),
        budget_s=_budget_s(settings),
        most_pause_s=settings.max_body_pause_s,
        max_held_bytes=settings.max_held_bytes,
        ending=app.state.ending,
    )
    app.add_middleware(Metering)
    return app


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn settings that can't work together into an error with its remedy; `_check` names single ones."""
    try:
        yield
    except ValueError as cause:
        variables = f"HALFLIFE_{what}_…"
        raise InvalidRequest(f"{variables}: {cause}", remedy=f"correct the settings {variables}") from cause


def _check(variable: str, *, address: str | None = None, key: str | None = None) -> None:
    """Raise InvalidRequest that names the variable where the address or key that it gives can't be one."""
    try:
        if address is not None:
            parse_url(address, what="the address")
        check_key(key, what="the key")
    except ValueError as cause:
        raise InvalidRequest(
            f"{variable}: {cause}", remedy=f"correct {variable.partition(':')[0]}"
        ) from cause


async def check_doors(settings: Settings) -> None:
    """Open and close what a service with these settings would open; nothing is sent. Raises as opening does."""
    open_keys(settings)
    _check_tracing(settings)
    async with AsyncExitStack() as opened:
        opened.push_async_callback(open_cluster(settings).close)
        for name in (None, *settings.embedding_models):
            opened.push_async_callback(open_embedder(settings.with_model(name)).close)
        for door in (open_reranker(settings), open_rewriter(settings)):
            if door is not None:
                opened.push_async_callback(door.close)


def _check_tracing(settings: Settings) -> None:
    if settings.traces_endpoint is not None:
        _check("HALFLIFE_TRACES_ENDPOINT", address=settings.traces_endpoint)
        observing.check_tracing()


def _open_tracing(settings: Settings) -> observing.Tracing | None:
    if settings.traces_endpoint is None:
        return None
    _check_tracing(settings)
    return observing.trace_to(settings.traces_endpoint, service="halflife", version=VERSION)


def open_keys(settings: Settings) -> KeyFile | Keyring | None:
    """Return the configured keys, None where none are configured. Raises InvalidRequest for such as can't be used."""
    if settings.keys_file:
        return KeyFile(Path(settings.keys_file))
    return Keyring(parse_keys(settings.keys, where="HALFLIFE_KEYS")) if settings.keys else None


def _guard(settings: Settings, keys: KeyFile | Keyring | None) -> Guard:
    docs = {"/docs", "/docs/oauth2-redirect", "/openapi.json"} if settings.docs else set()
    metrics = {"/metrics"} if settings.metrics_open else set()
    buckets = (
        Buckets(rate_per_s=settings.rate_per_s, burst=settings.rate_burst) if settings.rate_per_s else None
    )
    return Guard(
        keys=keys if isinstance(keys, KeyFile) else lambda: keys,
        now_ms=lambda: time.time_ns() // 1_000_000,
        open_paths=OPEN_PATHS | docs | metrics,
        scoped_paths={"/metrics": "metrics"},
        buckets=buckets,
    )


def _budget_s(settings: Settings) -> float:
    return settings.request_timeout_s or settings.elasticsearch_timeout_s


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


@_explained("ELASTICSEARCH")
def open_cluster(settings: Settings) -> Cluster:
    """Return a connection to the configured cluster; nothing is sent yet. Raises InvalidRequest for settings that can't work."""
    api_key, username = _plain(settings.elasticsearch_api_key), settings.elasticsearch_username
    password = _plain(settings.elasticsearch_password)
    _check("HALFLIFE_ELASTICSEARCH_API_KEY", key=api_key)
    for name, value in (("USERNAME", username), ("PASSWORD", password)):
        if not f"{value}".isascii():
            raise InvalidRequest(
                f"HALFLIFE_ELASTICSEARCH_{name}: it holds characters that are not ASCII, which can't be sent",
                remedy="use an API key, or a user and a password of ASCII characters",
            )
    if settings.elasticsearch_ca and not Path(settings.elasticsearch_ca).is_file():
        raise InvalidRequest(
            f"HALFLIFE_ELASTICSEARCH_CA: there is no file {settings.elasticsearch_ca}",
            remedy="give a CA file that exists, in PEM form",
        )
    return Cluster.connect(
        urls=settings.elasticsearch_urls,
        api_key=api_key,
        username=username,
        password=password,
        ca_certs=settings.elasticsearch_ca,
        verify_certs=settings.elasticsearch_verify_certs,
        request_timeout_s=settings.elasticsearch_timeout_s,
        connections=settings.elasticsearch_connections,
        pool_wait_s=settings.elasticsearch_pool_wait_s,
    )


@_explained("EMBEDDING")
def open_embedder(settings: Settings, *, dependency: str = "embedder") -> Embedder:
    """Return the configured embedder; nothing is sent yet. Raises InvalidRequest for settings that can't work.

    `dependency` is what metrics and readiness call it.
    """
    further = settings.embedding_models.get(settings.embedding_model)
    if further is not None and further.url == settings.embedding_base_url:
        of_models = f"HALFLIFE_EMBEDDING_MODELS: {settings.embedding_model}"
        variables = (f"{of_models}: url", f"{of_models}: api_key")
    else:
        variables = ("HALFLIFE_EMBEDDING_BASE_URL", "HALFLIFE_EMBEDDING_API_KEY")
    _check(variables[0], address=settings.embedding_base_url)
    _check(variables[1], key=_plain(settings.embedding_api_key))
    return Embedder.connect(
        base_url=settings.embedding_base_url,
        api_key=_plain(settings.embedding_api_key),
        model=settings.embedding_model,
        dims=settings.embedding_dims,
        query_prefix=settings.embedding_query_prefix,
        document_prefix=settings.embedding_document_prefix,
        send_dimensions=settings.embedding_send_dimensions,
        max_batch=settings.embedding_max_batch,
        max_batch_tokens=settings.embedding_max_batch_tokens,
        max_input_tokens=settings.embedding_max_input_tokens,
        concurrency=settings.embedding_concurrency,
        timeout_s=settings.embedding_timeout_s,
        cache_size=settings.embedding_cache_size,
        called=None if further is None else further.model,
        dependency=dependency,
    )


class Embedders:
    """The embedders of the configured models, each opened when a collection first needs it."""

    def __init__(self, settings: Settings, first: Embedder) -> None:
        self._settings = settings
        self.first = first
        self._opened: dict[str, Embedder] = {}

    def of(self, collection: Collection) -> Embedder | None:
        """Return the one whose vectors the collection's are; None if its model is not configured."""
        return self.first if collection.model is None else self.named(collection.model)

    def named(self, name: str) -> Embedder | None:
        """Return the embedder of a model; None if it is not configured."""
        if name == self.first.model:
            return self.first
        if name not in self._settings.embedding_models and name != self._settings.embedding_model:
            return None
        if name not in self._opened:
            self._opened[name] = open_embedder(
                self._settings.with_model(name), dependency=watching.embedder_name(name)
            )
        return self._opened[name]

    @property
    def others(self) -> list[str]:
        """The names of the configured models beside the first."""
        return [name for name in self._settings.embedding_models if name != self.first.model]

    async def close(self) -> None:
        """Close all but the first, which its opener closes."""
        for embedder in self._opened.values():
            await embedder.close()


@_explained("REWRITE")
def open_rewriter(settings: Settings) -> Rewriter | None:
    """Return the configured rewriter, None where there is none; raises InvalidRequest for settings that can't work."""
    if not settings.rewrite_url:
        return None
    _check("HALFLIFE_REWRITE_URL", address=settings.rewrite_url)
    _check("HALFLIFE_REWRITE_KEY", key=_plain(settings.rewrite_key))
    if not settings.rewrite_model:
        raise InvalidRequest(
            "HALFLIFE_REWRITE_URL is set and HALFLIFE_REWRITE_MODEL is not",
            remedy="name the model in HALFLIFE_REWRITE_MODEL",
        )
    return Rewriter.connect(
        url=settings.rewrite_url,
        model=settings.rewrite_model,
        api_key=_plain(settings.rewrite_key),
        timeout_s=settings.rewrite_timeout_s,
    )


@_explained("RERANK")
def open_reranker(settings: Settings) -> Reranker | None:
    """Return the configured reranker, None where there is none; raises InvalidRequest for settings that can't work."""
    if not settings.rerank_url:
        return None
    _check("HALFLIFE_RERANK_URL", address=settings.rerank_url)
    _check("HALFLIFE_RERANK_API_KEY", key=_plain(settings.rerank_api_key))
    return Reranker.connect(
        url=settings.rerank_url,
        model=settings.rerank_model,
        api_key=_plain(settings.rerank_api_key),
        form=settings.rerank_form,
        scale=settings.rerank_scores,
        timeout_s=settings.rerank_timeout_s,
    )


def _sandbox(settings: Settings) -> Sandbox:
    return Sandbox(
        workers=settings.file_workers,
        bounds=Bounds(
            timeout_s=settings.file_timeout_s,
            memory_bytes=settings.file_memory_bytes,
            small_share=SMALL_FILE_SHARE,
        ),
        # The other half is left to bodies that arrive, and to writes of documents.
        line=Line(
            uploads=settings.file_queue,
            most_bytes=(settings.max_held_bytes or HELD_BODIES * settings.max_body_bytes) // 2,
            wait_s=settings.file_wait_s,
        ),
        limits=Limits(
            max_bytes=settings.file_max_bytes,
            max_unpacked_bytes=settings.file_max_unpacked_bytes,
            max_pages=settings.file_max_pages,
            max_rows=settings.file_max_rows,
        ),
    )


def _indexer(
    settings: Settings, *, cluster: Cluster, embedders: Embedders, known: catalog.Catalog
) -> indexing.Indexer:
    def embedder_of(collection: Collection) -> DocumentEmbedder:
        return embedders.of(collection) or OtherModel(collection, settings.embedding_model)

    def targets(name: str) -> Targets:
        return CatalogTargets(name, cluster=cluster, catalog=known, embedder=embedder_of)

    return indexing.Indexer(
        cluster=cluster,
        targets=targets,
        # Two processes that stamp in the same microsecond are told apart by this number.
        stamper=Stamper(secrets.randbelow(64), lambda: time.time_ns() // 1000),
        now=_now,
        patience=Patience(
            request_timeout_s=settings.elasticsearch_timeout_s, embedder_stall_s=settings.embedder_stall_s
        ),
        chunks=Chunking(max_tokens=settings.chunk_tokens, overlap_tokens=settings.chunk_overlap_tokens),
    )


def _now() -> datetime:
    return datetime.now(UTC)


async def _start(
    settings: Settings,
    *,
    deadline: float,
    cluster: Cluster,
    embedder: Embedder,
    embedders: Embedders,
    reranker: Reranker | None,
    rewriter: Rewriter | None,
    sandbox: Sandbox,
) -> Service:
    """Return the service, everything it needs having answered and fitting together by that time of the clock."""
    await _patiently(cluster.check_version, ClusterUnavailable, deadline, "Elasticsearch")
    dims = await _patiently(embedder.check, EmbedderUnavailable, deadline, "the embedding server")
    for told in settings.unread_chunks:
        log.warning("%s; %s", told, UNREAD_REMEDY)
    await _patiently(
        lambda: catalog.install_templates(cluster, dims=dims), ClusterUnavailable, deadline, "Elasticsearch"
    )
    await _patiently(
        lambda: catalog.verify(cluster, dims=dims, model=settings.embedding_model),
        ClusterUnavailable,
        deadline,
        "Elasticsearch",
    )
    known = catalog.Catalog(cluster)
    indexer = _indexer(settings, cluster=cluster, embedders=embedders, known=known)
    secret = _plain(settings.cursor_secret)
    searchlog, votes = _searchlog(settings, cluster)
    doors = Doors(
        cluster=cluster,
        embedder=embedder,
        embedder_of=lambda collection: embedders.of(collection) or embedder,
        reranker=reranker,
        rewriter=rewriter,
        cursor_secrets=[secret.encode() if secret else secrets.token_bytes(32)],
        timeout_s=_budget_s(settings),
        embed_within_s=settings.embedding_query_timeout_s,
        touch_ahead_s=settings.touch_ahead_s,
        votes=votes.ratings,
    )
    touches = TouchQueue(
        lambda instants, collection, within: indexer.touch(instants, collection=collection, within=within)
    )
    return Service(
        doors=doors,
        catalog=known,
        indexer=indexer,
        sandbox=sandbox,
        touches=touches,
        watch=Watch(
            cluster=cluster,
            embedder=embedder,
            others={name: partial(embedders.named, name) for name in embedders.others},
            reranker=reranker,
            rewriter=rewriter,
            touches_waiting=lambda: touches.waiting,
        ),
        log_queries=settings.log_queries,
        now=_now,
        auto_create=settings.auto_create_collections,
        dims=dims,
        model=settings.embedding_model,
        embedder_named=embedders.named,
        searchlog=searchlog,
        votes=votes,
        limits=RequestLimits(
            query_chars=settings.max_query_chars,
            top_k=settings.max_top_k,
            window=settings.max_window,
            filter_depth=settings.max_filter_depth,
            filter_values=settings.max_filter_values,
            queries=settings.max_queries,
            documents=settings.max_documents,
        ),
    )


def _searchlog(settings: Settings, cluster: Cluster) -> tuple[SearchLog, Votes]:
    """Return the search log and the votes on it, started where searches are logged."""
    given = _plain(settings.cursor_secret)
    if settings.search_log_rate > 0 and not given:
        log.warning(
            "searches are logged without HALFLIFE_CURSOR_SECRET: the hashes of queries and users change with each start"
        )
    # A key of their own: who may compare hashes need not be able to sign cursors.
    base = given.encode() if given else secrets.token_bytes(32)
    secret = hmac.digest(base, b"halflife search log", "sha256")
    searchlog = SearchLog(
        cluster,
        rate=settings.search_log_rate,
        with_text=settings.search_log_texts,
        keep_days=settings.search_log_days,
        secret=secret,
        now=_now,
        chance=random.random,
        new_id=lambda: secrets.token_hex(12),
    )
    votes = Votes(cluster, searchlog, secret=secret, now=_now, keep_days=settings.feedback_days)
    return searchlog, votes


async def _within(seconds: float, close: Callable[[], Awaitable[None]]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await close()


async def _patiently(
    work: Callable[[], Awaitable[Result]], waits_for: type[HalflifeError], deadline: float, what: str
) -> Result:
    """Return what the work gives, trying again while its dependency is not up yet; then let its error end the start."""
    pause_s = 0.2
    told = False
    while True:
        try:
            return await work()
        except waits_for as error:
            if time.monotonic() + pause_s > deadline:
                raise
            if not told:
                log.warning("waiting for %s: %s", what, error.detail)
                told = True
        await asyncio.sleep(pause_s)
        pause_s = min(2.0, pause_s * 1.5)
