"""What can be seen of the service from outside: its metrics, its spans, and the id of the request under way.

The only importer of `prometheus_client` and OpenTelemetry. Every metric is named here and set where things happen.
Labels are few and from closed lists (route templates, stages, dependencies), except for collections, of which the
first `MOST_COLLECTIONS` are told, and for the ids of configured keys, the first `MOST_KEYS`. No text of a query or
document, no document's id and no token ever becomes a label or attribute.
"""

import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from opentelemetry import trace
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from app.breaker import State
from app.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")

MOST_COLLECTIONS: Final = 200
MOST_KEYS: Final = 1000
TRACED_PATHS_LEFT_OUT: Final = frozenset({"/livez", "/readyz", "/metrics"})

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request under way; what is sent to Elasticsearch carries it as X-Opaque-Id."""

_spent: ContextVar[dict[str, float] | None] = ContextVar("spent", default=None)
"""Where the stages of the request under way are added up, if anybody wants to know: seconds by stage."""

_FAST = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

REQUESTS = Histogram(
    "halflife_request_seconds",
    "Time to answer an HTTP request, by route template, method and status.",
    ["route", "method", "status"],
    buckets=_FAST,
)
STAGES = Histogram(
    "halflife_stage_seconds", "Time of one stage of a search or write.", ["stage"], buckets=_FAST
)
ROUTES = Histogram(
    "halflife_recall_route_seconds",
    "Time that Elasticsearch took for one recall route, by the route's kind.",
    ["kind"],
    buckets=_FAST,
)
FUSED = Histogram(
    "halflife_fused_candidates",
    "Candidates in the fused order of one search.",
    buckets=(0, 1, 5, 10, 25, 50, 100, 200, 500, 1000, 5000, 10_000),
)
SEARCHES = Counter(
    "halflife_searches_total", "Searches answered: whole, degraded, or without a hit (empty).", ["answer"]
)
DEGRADED = Counter("halflife_degraded_total", "Answers that lacked something, by what failed.", ["cause"])
ITEMS = Counter("halflife_items_total", "Items of writes, by what became of them.", ["status"])
CACHE = Counter(
    "halflife_embedding_cache_total",
    "Query texts to embed: cached, shared with a call under way, or sent.",
    ["result"],
)
REFUSED = Counter(
    "halflife_refused_requests_total",
    "Requests refused before any work: shed, limited, too large, too slow, unauthorized, forbidden, invalid; and the problem's type.",
    ["cause", "reason"],
)
KEY_REFUSALS = Counter(
    "halflife_key_refused_requests_total",
    "Requests refused that came with a configured key, by its id and the status; ids past the first 1000 are `others`.",
    ["key", "status"],
)
UNDER_WAY = Gauge("halflife_requests_under_way", "Requests being answered.")

ROOM = Gauge("halflife_requests_room", "Requests that may be answered at once; fewer while answers are slow.")

CALLS = Histogram(
    "halflife_dependency_seconds",
    "Time of one call to a dependency, by how it ended (ok, refused, failed, unknown).",
    ["dependency", "outcome"],
    buckets=_FAST,
)
RETRIES = Counter(
    "halflife_dependency_retries_total", "Calls to a dependency that repeated one.", ["dependency"]
)
TURNED_AWAY = Counter(
    "halflife_dependency_turned_away_total",
    "Calls not sent: the pool was full for too long, the breaker open, or as many retries waiting as may.",
    ["dependency", "cause"],
)
POOL_SIZE = Gauge(
    "halflife_pool_size", "Calls to a dependency that may be under way at once.", ["dependency"]
)
POOL_USED = Gauge("halflife_pool_used", "Calls to a dependency under way.", ["dependency"])
POOL_WAITING = Gauge("halflife_pool_waiting", "Calls that wait for a place in the pool.", ["dependency"])
BREAKER = Gauge("halflife_breaker_state", "0 closed, 1 half-open, 2 open.", ["dependency"])
OPENED = Counter("halflife_breaker_opened_total", "How often a breaker has opened.", ["dependency"])

DOCUMENTS = Gauge("halflife_documents", "Documents of a collection.", ["collection"])
REINDEX = Gauge(
    "halflife_reindex_progress", "Share of the documents copied by the collection's reindex, 0 to 1.", ["collection"])  # fmt: skip
CENSUS_AGE = Gauge(
    "halflife_census_timestamp_seconds",
    "When documents and reindexes were counted last, in seconds since 1970.",
)
LOOP_LAG = Gauge("halflife_event_loop_lag_seconds", "How late the event loop was at its last tick.")
SEARCH_LOG = Counter(
    "halflife_search_log_entries_total", "Entries of the search log, by what became of them.", ["result"]
)
TOUCHES = Gauge("halflife_touches_waiting", "Documents whose last access waits to be written.")

_STATES: Final[dict[State, int]] = {"closed": 0, "half-open": 1, "open": 2}
_keys_told: set[str] = set()
_tracer = trace.get_tracer("halflife")


def breaker_state(dependency: str, state: State) -> None:
    """Show the state of a dependency's breaker."""
    BREAKER.labels(dependency).set(_STATES[state])


def key_refused(key_id: str, status: int) -> None:
    """Count a refused request of a configured key. Files of keys change: those past the first ones share a label."""
    if key_id not in _keys_told and len(_keys_told) < MOST_KEYS:
        _keys_told.add(key_id)
    KEY_REFUSALS.labels(key_id if key_id in _keys_told else "others", str(status)).inc()


def answered(*, candidates: int, degraded: bool, hits: int) -> None:
    """Count a search's answer: its fused candidates, and whether it is whole, degraded or empty."""
    FUSED.observe(candidates)
    SEARCHES.labels("degraded" if degraded else "whole" if hits else "empty").inc()


def _span(name: str, **options: Any) -> AbstractContextManager[Any]:
    """Return a span where traces are on; elsewhere one that leads nowhere would be most of what a stage costs."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return nullcontext()
    return _tracer.start_as_current_span(name, **options)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Measure a stage, and show it as a span where traces are on."""
    begun = time.perf_counter()
    with _span(name):
        try:
            yield
        finally:
            took_s = time.perf_counter() - begun
            STAGES.labels(name).observe(took_s)
            spent = _spent.get()
            if spent is not None:
                spent[name] = spent.get(name, 0.0) + took_s


@contextmanager
def spending() -> Iterator[dict[str, float]]:
    """Yield a dict that gathers what each stage takes within the block, in seconds, tasks started in it included."""
    spent: dict[str, float] = {}
    token = _spent.set(spent)
    try:
        yield spent
    finally:
        _spent.reset(token)


def staged(
    name: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Return a decorator that makes every call of a coroutine function a stage."""

    def decorate(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(work)
        async def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            with stage(name):
                return await work(*args, **kwargs)

        return measured

    return decorate


@contextmanager
def client_span(name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
    """Show a call to a dependency as a client's span, where traces are on."""
    with _span(name, kind=trace.SpanKind.CLIENT, attributes=dict(attributes)):
        yield


def exposition() -> tuple[bytes, str]:
    """Return all metrics of this process in Prometheus' text form, and its content type."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST


def check_tracing() -> None:
    """Raise InvalidRequest where the extra `tracing`, which sends spans, is not installed."""
    _span_exporter()


def _span_exporter() -> Callable[..., Any]:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as cause:
        raise InvalidRequest(
            "HALFLIFE_TRACES_ENDPOINT: what sends traces is not installed",
            remedy="install halflife[tracing], or leave HALFLIFE_TRACES_ENDPOINT out",
        ) from cause
    return OTLPSpanExporter


def trace_to(endpoint: str, *, service: str, version: str) -> "Tracing":
    """Send spans to an OTLP collector over HTTP from now on, for this process; close what is returned to flush them.

    `endpoint` is the collector's base, to which `/v1/traces` is appended. Raises InvalidRequest where the extra
    `tracing` is not installed.
    """
    return trace_with(
        _span_exporter()(endpoint=endpoint.rstrip("/") + "/v1/traces"), service=service, version=version
    )


def trace_with(exporter: Any, *, service: str, version: str) -> "Tracing":
    """Send spans to an exporter of OpenTelemetry's SDK, in batches, from now on.

    A process has one provider for good: a second call adds its exporter to the first.
    """
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": version})
        )
        trace.set_tracer_provider(provider)
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    return Tracing(processor)


class Tracing:
    """Spans on their way to an exporter."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def flush(self) -> None:
        """Send what waits to be sent; takes at most 3 s."""
        self._processor.force_flush(3000)

    def close(self) -> None:
        """Send what waits, and end, within a second: a collector that is away must not hold the process up."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(1.0)
