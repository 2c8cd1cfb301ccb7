"""The search log: what was asked, how it went and what was shown, in daily indices that go after a while.

Off unless configured. Entries wait in a bounded queue and are written in the background: a search never waits for its
entry and never fails by it; what finds the queue full is dropped and counted. A query's text is logged only where that
is allowed; a keyed hash always says which queries are the same.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from app import catalog, decay, experiments, names, observing
from app.answers import SearchResult
from app.asking import Search
from app.collection import Collection
from app.elastic import Cluster
from app.encoding import encode
from app.errors import ClusterRejected, Conflict, HalflifeError, NotFound
from app.ranking import Decay, Fusion
from app.times import DAY_MS, format_instant, parse_instant
from app.values import DEFAULT_WINDOW

PURPOSE: Final = "searches"
ALIAS: Final = names.own_index(PURPOSE)
MOST_HITS: Final = 100
"""Hits of one search that are logged, and so can be voted on."""
MOST_AT_ONCE: Final = 500
MOST_ATTEMPTS: Final = 5
SWEEP_EVERY_S: Final = 3600.0
UNSEEN: Final = 0
"""`first_rank` of a search that failed: nothing was shown."""

Json = dict[str, Any]
log = logging.getLogger("halflife")


# --- one entry -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """One search as it came in: what the log tells of it beside its answer."""

    search: Search
    collection: Collection
    request_id: str | None = None
    key_id: str | None = None
    """Which key asked: its id, never the key."""
    first_rank: int = 1
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, of the request as a whole: the queries of a batch share them."""


STAGES: Final = {
    "rewrite": "rewrite_ms",
    "embed query": "embed_ms",
    "recall": "recall_ms",
    "fetch": "fetch_ms",
    "after fusion": "rerank_ms",
}
"""Stages as they are measured -> as they are logged; the recall includes the embedding."""


def query_hash(query: str, secret: bytes) -> str:
    """Return the keyed hash of a query, blind to case and to runs of white space: 24 hex digits."""
    words = " ".join(query.casefold().split())
    return hmac.new(secret, b"halflife query\0" + words.encode(), hashlib.sha256).hexdigest()[:24]


def entry(
    asked: Asked,
    outcome: SearchResult | HalflifeError,
    *,
    search_id: str,
    moment: datetime,
    secret: bytes,
    with_text: bool,
) -> Json:
    """Return the log entry of one search, answered or failed, without what does not apply to it."""
    search, collection = asked.search, asked.collection
    ranked = outcome.profile if isinstance(outcome, SearchResult) else None
    if ranked is None:
        ranked = experiments.ranked(search, collection, key_id=asked.key_id, request_id=asked.request_id)
    name = None if ranked is None else ranked.name
    profile = collection.profiles.get(name) if name is not None else None
    chosen = search.decay or (profile.decay if profile is not None else None)
    fusion = search.fusion or (profile.fusion if profile is not None else None)
    body: Json = {
        "@timestamp": format_instant(moment),
        "search_id": search_id,
        "request_id": asked.request_id,
        "collection": collection.name,
        "collection_uid": collection.uid,
        "key_id": asked.key_id,
        "query_hash": query_hash(search.query, secret),
        "query": search.query if with_text else None,
        "query_chars": len(search.query),
        "top_k": search.top_k,
        "profile": name,
        "experiment": None if ranked is None else ranked.experiment,
        "arm": None if ranked is None else ranked.arm,
        "fusion": (fusion or Fusion()).method,
        "window": (None if fusion is None else fusion.window) or DEFAULT_WINDOW,
        "decay": _decay_of(chosen)
        if isinstance(chosen, Decay)
        else None
        if (word := _decay_word(chosen, outcome)) is None
        else {"kind": word},
        "stages": {
            told: round(asked.spent[name] * 1000, 2) for name, told in STAGES.items() if name in asked.spent
        }
        or None,
    }
    if isinstance(outcome, HalflifeError):
        body |= {
            "status": "failed", "error": outcome.code, "degraded": False, "results": 0, "first_rank": UNSEEN,
            "reasons": _reasons([outcome.detail], search.query, with_text=with_text),
        }  # fmt: skip
    else:
        body |= _answered(asked, outcome, window=body["window"], with_text=with_text)
    return {key: value for key, value in body.items() if value is not None}


def _answered(asked: Asked, result: SearchResult, *, window: int, with_text: bool) -> Json:
    routes: list[Json] = []
    slowest: dict[str, int] = {}
    for name, status in result.routes.items():
        kind = status.kind
        if status.took_ms is not None and kind is not None:
            slowest[kind] = max(slowest.get(kind, 0), status.took_ms)
        told = {
            "name": name,
            "kind": kind,
            "status": status.status,
            "took_ms": status.took_ms,
            "total": None if status.total is None else status.total.value,
            "returned": status.returned,
            "window": window,
        }
        routes.append({key: value for key, value in told.items() if value is not None})
    recency: Any = getattr(result, "recency", None)
    shown = result.hits[:MOST_HITS]
    ages = [hit.age_days for hit in shown if hit.age_days is not None]
    return {
        "origin": format_instant(result.origin),
        "status": "degraded" if result.degraded else "ok",
        "degraded": result.degraded,
        "reasons": _reasons(result.warnings, asked.search.query, with_text=with_text) if result.degraded else None,
        "took_ms": result.took_ms,
        "routes": routes,
        "route_took_ms": slowest or None,
        "recency": None if recency is None else recency.mode,
        "recency_reason": None if recency is None or not with_text else recency.reason,
        "results": len(result.hits),
        "first_rank": asked.first_rank,
        "hits": [_hit(hit, rank) for rank, hit in enumerate(shown, start=asked.first_rank)],
        "hit_ages_days": ages or None,
        "hit_decays": [hit.decay for hit in shown if hit.decay is not None] or None,
        # Of the best hit there is: a later page's first one is not that.
        "first_age_days": shown[0].age_days if shown and asked.first_rank == 1 else None,
        "median_age_days": statistics.median(ages) if ages else None,
    }  # fmt: skip


def _hit(hit: Any, rank: int) -> Json:
    told = {
        "id": hit.id,
        "rank": rank,
        "score": hit.score,
        "age_days": hit.age_days,
        "decay": hit.decay,
        "relevance": hit.relevance,
        "feedback": None if hit.feedback is None else hit.feedback.factor,
    }
    return {key: value for key, value in told.items() if value is not None}


def _decay_word(chosen: str | None, outcome: SearchResult | HalflifeError) -> str | None:
    """Return "auto" where that decided, given or left out: a first page and the next ones are logged alike."""
    auto = isinstance(outcome, SearchResult) and outcome.recency is not None
    return "auto" if auto else chosen


def _decay_of(given: Decay) -> Json:
    resolved = decay.resolve(given, default_floor=decay.DEFAULT_FLOOR)
    half: float | None = None
    if resolved.shape == "exp":
        half = resolved.scale_ms * math.log(0.5) / math.log(resolved.decay)
    elif resolved.shape == "gauss":
        half = resolved.scale_ms * math.sqrt(math.log(0.5) / math.log(resolved.decay))
    elif resolved.shape == "linear":
        half = resolved.scale_ms * 0.5 / (1 - resolved.decay)
    return {
        "kind": resolved.shape,
        "floor": resolved.floor,
        "field": resolved.field,
        "placement": given.placement,
        **({} if half is None else {"half_life_days": half / DAY_MS}),
    }


def _reasons(texts: Sequence[str], query: str, *, with_text: bool) -> list[str]:
    """Return what went wrong, shortened; a query that an error quotes is cut out where texts are not to be kept."""
    cut = texts if with_text else [text.replace(query, "…") for text in texts]
    return [text[:200] for text in cut[:10]]


# --- the log ------------------------------------------------------------------------------------------------------------


def _count(result: str, number: int = 1) -> None:
    observing.SEARCH_LOG.labels(result).inc(number)


@dataclass(slots=True)
class Figures:
    """What became of the entries so far."""

    written: int = 0
    dropped: int = 0
    """Found the queue full, or the service ended first."""
    failed: int = 0
    """The cluster refused them, or did not take them in time."""


@dataclass(slots=True)
class _Waiting:
    index: str
    id: str
    source: bytes
    attempts: int = 0


@dataclass(slots=True)
class SearchLog:
    """Writes entries in the background, finds one again, and deletes the days that are too old.

    `rate` of the searches are logged, each drawn by itself: `chance` gives numbers in [0, 1). `secret` keys the hashes:
    the same in every process, or their hashes differ.
    """

    cluster: Cluster
    rate: float
    with_text: bool
    keep_days: int
    secret: bytes
    now: Callable[[], datetime]
    chance: Callable[[], float]
    new_id: Callable[[], str]
    most_waiting: int = 2000
    interval_s: float = 1.0
    figures: Figures = field(default_factory=Figures)
    _queue: list[_Waiting] = field(default_factory=list)
    _writing: list[_Waiting] = field(default_factory=list)
    _made: set[str] = field(default_factory=set)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(self, asked: Asked, outcome: SearchResult | HalflifeError) -> str | None:
        """Put the search into the queue if it is drawn; return its id, None where it is not logged. Never waits."""
        if self.rate < 1 and self.chance() >= self.rate:
            return None
        moment = self.now()
        if len(self._queue) + len(self._writing) >= self.most_waiting:
            self.figures.dropped += 1
            _count("dropped")
            return None
        search_id = f"{moment.astimezone(UTC):%Y%m%d}-{self.new_id()}"
        try:
            source = encode(
                entry(
                    asked,
                    outcome,
                    search_id=search_id,
                    moment=moment,
                    secret=self.secret,
                    with_text=self.with_text,
                )
            )
        except (ValueError, HalflifeError):
            # What can't be told, such as a number that JSON has no word for, must not fail the search.
            self.figures.failed += 1
            _count("failed")
            return None
        self._queue.append(_Waiting(names.own_dated_index(PURPOSE, moment), search_id, source))
        return search_id

    async def start(self) -> None:
        """Install the template, and write and sweep from now on. Raises what the template meets."""
        await catalog.install_own_templates(self.cluster, catalog.SEARCHES_TEMPLATE)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._write_on(), name="search log"),
            loop.create_task(self._sweep_on(), name="search log retention"),
        ]

    async def close(self, *, within_s: float = 3.0) -> None:
        """Stop, after one more attempt to write what is waiting; what is left then is dropped."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        with contextlib.suppress(TimeoutError, HalflifeError):
            async with asyncio.timeout(within_s):
                await self.flush()
        left = len(self._queue) + len(self._writing)
        self.figures.dropped += left
        _count("dropped", left)
        self._queue, self._writing = [], []

    async def flush(self) -> None:
        """Write what is waiting as this begins; what comes meanwhile is for the next time.

        Raises the cluster's error where it took nothing; the entries wait on.
        """
        async with self._lock:
            left = len(self._queue) + len(self._writing)
            while left > 0:
                if not self._writing:
                    most = min(MOST_AT_ONCE, left)
                    self._writing, self._queue = self._queue[:most], self._queue[most:]
                for index in sorted({each.index for each in self._writing} - self._made):
                    await self._make(index)
                outcomes = await self.cluster.record(
                    [(each.index, each.id, each.source) for each in self._writing], create=True
                )
                batch, self._writing = self._writing, []
                left -= len(batch)
                again: list[_Waiting] = []
                for each, outcome in zip(batch, outcomes, strict=True):
                    if outcome.fate in ("applied", "superseded"):
                        self.figures.written += 1
                        _count("written")
                    elif outcome.fate in ("retry", "fenced") and each.attempts + 1 < MOST_ATTEMPTS:
                        each.attempts += 1
                        again.append(each)
                    else:
                        self.figures.failed += 1
                        _count("failed")
                if again:
                    self._queue = again + self._queue
                    return

    async def _make(self, index: str) -> None:
        await make_index(self.cluster, index, template=catalog.SEARCHES_TEMPLATE)
        self._made.add(index)

    async def _write_on(self) -> None:
        pause_s = self.interval_s
        told = False
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.flush()
            except HalflifeError as error:
                pause_s = min(30.0, pause_s * 2)
                for each in self._writing:
                    each.attempts += 1
                given_up = sum(each.attempts >= MOST_ATTEMPTS for each in self._writing)
                if given_up:
                    self._writing = [each for each in self._writing if each.attempts < MOST_ATTEMPTS]
                    self.figures.failed += given_up
                    _count("failed", given_up)
                if not told:
                    log.warning("the search log is not written: %s", error.detail)
                    told = True
            except Exception:
                # A fault of ours in one entry ends neither the task nor the log.
                log.exception("entries of the search log are given up")
                _count("failed", len(self._writing))
                self.figures.failed += len(self._writing)
                self._writing = []
            else:
                pause_s, told = self.interval_s, False

    # --- reading it

    async def find(self, search_id: str, *, patience_s: float = 0.0) -> "Logged | None":
        """Return a logged search as stored, or None; `patience_s`: how long one may take that is being written."""
        index = index_of(search_id)
        if index is None:
            return None
        if any(each.id == search_id for each in (*self._queue, *self._writing)):
            await self.flush()
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                [found] = await self.cluster.mget(
                    index, [search_id], timeout_s=self.cluster.request_timeout_s
                )
            except NotFound:
                found = {}
            if found.get("found"):
                return Logged(index, found["_source"], (found["_seq_no"], found["_primary_term"]))
            if asyncio.get_running_loop().time() >= deadline:
                return None
            # Another process may hold it in its queue still.
            await asyncio.sleep(0.5)

    async def mark(self, search_id: str, verdicts: Mapping[str, str]) -> None:
        """Note in a logged search which hits got which verdict (document id -> verdict).

        Raises Conflict where others keep changing it.
        """
        for attempt in range(MOST_ATTEMPTS):
            found = await self.find(search_id)
            if found is None:
                return
            source = marked(found.source, verdicts)
            try:
                await self.cluster.put_document(found.index, search_id, source, if_match=found.place)
            except Conflict:
                if attempt + 1 == MOST_ATTEMPTS:
                    raise
            else:
                return

    # --- retention

    async def sweep(self) -> list[str]:
        """Delete the days that are older than `keep_days`; return their names."""
        return await sweep(self.cluster, PURPOSE, keep_days=self.keep_days, now=self.now())

    async def _sweep_on(self) -> None:
        while True:
            try:
                gone = await self.sweep()
                if gone:
                    log.info("the search log of %s is past its %d days and deleted", gone, self.keep_days)
            except HalflifeError as error:
                log.warning("old days of the search log are not deleted: %s", error.detail)
            except Exception:
                log.exception("old days of the search log are not deleted")
            await asyncio.sleep(SWEEP_EVERY_S)


@dataclass(frozen=True, slots=True)
class Logged:
    """A search as the log has it, and its (seq_no, primary_term)."""

    index: str
    source: Json
    place: tuple[int, int]

    @property
    def ranks(self) -> dict[str, int]:
        """Document id -> the rank at which it was shown first."""
        found: dict[str, int] = {}
        for hit in self.source.get("hits", ()):
            found.setdefault(hit["id"], hit["rank"])
        return found

    @property
    def moment(self) -> datetime:
        """When it was asked."""
        return parse_instant(self.source["@timestamp"])


def index_of(search_id: str) -> str | None:
    """Return the index that holds a search, or None for what is no id of ours."""
    day = search_id[:8]
    if not (len(search_id) <= 64 and search_id.isascii() and day.isdigit() and search_id[8:9] == "-"):
        return None
    try:
        moment = datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC)
    except ValueError:
        return None
    return names.own_dated_index(PURPOSE, moment)


VERDICTS: Final = ("clicked", "ignored", "helpful", "unhelpful")


def marked(source: Json, verdicts: Mapping[str, str]) -> Json:
    """Return the entry with the verdicts noted: `clicked` and so on hold ids; a hit clicked by anyone stays clicked."""
    body = dict(source)
    for verdict in VERDICTS:
        ids = {*body.get(verdict, ()), *(id_ for id_, told in verdicts.items() if told == verdict)}
        if ids:
            body[verdict] = sorted(ids)
    body["votes"] = len({id_ for verdict in VERDICTS for id_ in body.get(verdict, ())})
    clicked = {*body.get("clicked", ()), *body.get("helpful", ())}
    ranks = [hit["rank"] for hit in body.get("hits", ()) if hit["id"] in clicked]
    if ranks:
        body["first_clicked_rank"] = min(ranks)
    return body


async def make_index(cluster: Cluster, index: str, *, template: str) -> None:
    """Make a dated index, or give the one that is there the fields that this release added to its template."""
    # Without its template the index would be made by guesses.
    await catalog.install_own_templates(cluster, template)
    try:
        await cluster.create_index(index, {})
    except Conflict:
        await cluster.put_mapping(index, catalog.shipped(template)["template"]["mappings"])


async def sweep(cluster: Cluster, purpose: str, *, keep_days: int, now: datetime) -> list[str]:
    """Delete the dated indices of one purpose that ended more than `keep_days` ago; return their names."""
    gone = []
    for index in sorted(await cluster.resolve_index(f"{names.own_index(purpose)}-*")):
        parsed = names.parse_own_dated_index(index)
        if parsed is None or parsed[0] != purpose:
            continue
        monthly = index.count(".") == 1
        ends = parsed[1] + timedelta(days=31 if monthly else 1)
        if ends + timedelta(days=keep_days) <= now:
            # Another process may have been first: then it is gone, which is what was wanted.
            with contextlib.suppress(NotFound, ClusterRejected):
                await cluster.delete_indices([index])
                gone.append(index)
    return gone
