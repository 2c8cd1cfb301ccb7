"""Feedback: votes on the hits of logged searches, stored, read into ratings, and exported as judgements.

A vote is one verdict of one voter on one document of one search, however often it is sent. Ratings are read in the
background and kept in memory, so that a search that lets them count waits for them once at most.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from app import catalog, names
from app.answers import FeedbackResult, ItemResult
from app.asking import Feedback, FeedbackItem
from app.collection import Collection
from app.elastic import Cluster
from app.errors import HalflifeError, NotFound
from app.ratings import POSITIVE, Ratings, Vote, passed_over, rate
from app.searchlog import ALIAS as SEARCHES
from app.searchlog import Logged, SearchLog, make_index, query_hash, sweep
from app.times import format_instant, from_ms, parse_instant, to_ms
from app.values import ItemError

PURPOSE: Final = "feedback"
ALIAS: Final = names.own_index(PURPOSE)
MOST_VOTES: Final = 20_000
"""Votes of a collection that count: the newest of each key, which all have the same share as far as they have votes."""
MOST_PER_VOTER: Final = 2_000
"""Of one voter, so that a flood by one doesn't push out everybody else's of its key."""
MOST_KEYS: Final = 10_000
MOST_READ: Final = 5
"""How many times as many votes are read as may count: those of a voter who has too many are passed over."""
MOST_COLLECTIONS: Final = 64
TABLES_KEPT: Final = 16
"""Tables of a collection's ratings, as of an instant each. Those by one key's votes count by the votes in them."""
MOST_TABLES: Final = 256
MOST_MAKING: Final = 4
"""Tables of a collection that are made or wait for it. Who wants a further one is ranked without votes, or by older
ones: else searches as of ever other instants would queue for the whole service's time."""
THREADS: Final = 2
"""Collections for which a table is made at once: 20,000 votes take a tenth of a second of the interpreter and more."""
EPOCH_MS: Final = 60_000
"""Ratings are as of a whole minute, so that the processes of a service and the pages of a search agree on them."""
SETTLED_MS: Final = 5_000
"""A vote may be searched for after that long; ratings are as of a minute that is as far back."""
LONGEST_WAIT_S: Final = 0.5
"""Longest wait of a search for its ratings, in all."""
PAGE: Final = 1_000
SWEEP_EVERY_S: Final = 6 * 3600.0
ANYONE: Final = "anyone"


def counted_from(voted_ms: int) -> int:
    """Return the millisecond from which on ratings hold a vote of then: the next whole minute, and the time to settle."""
    return -(-voted_ms // EPOCH_MS) * EPOCH_MS + SETTLED_MS


Json = dict[str, Any]
T = TypeVar("T")
log = logging.getLogger("halflife")


@dataclass(slots=True)
class _Known:
    """The votes of one collection as read so far."""

    votes: dict[str, Vote] = field(default_factory=dict)
    read_until_ms: int = -1
    tables: OrderedDict[tuple[int, str | None], tuple[Ratings, int]] = field(default_factory=OrderedDict)
    """As of when, by which key -> the ratings, and of how many votes they are."""
    making: dict[tuple[int, str | None], asyncio.Task[Ratings]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    one_table: asyncio.Lock = field(default_factory=asyncio.Lock)

    def table(self, as_of_ms: int, only_key: str | None) -> Ratings | None:
        """Return the ratings as of an instant where they are kept."""
        kept = self.tables.get((as_of_ms, only_key))
        if kept is None:
            return None
        self.tables.move_to_end((as_of_ms, only_key))
        return kept[0]

    def latest(self, only_key: str | None) -> Ratings | None:
        """Return the newest ratings by a key's votes that are kept."""
        of_key = [ratings for (_, key), (ratings, _) in self.tables.items() if key == only_key]
        return max(of_key, key=lambda ratings: ratings.as_of_ms, default=None)

    def keep(self, which: tuple[int, str | None], made: Ratings, votes: int) -> None:
        """Keep ratings; the ones unused for longest go where they are too many, or of too many votes together."""
        self.tables[which] = (made, votes)
        everybodys = [each for each in self.tables if each[1] is None]
        for each in everybodys[: max(0, len(everybodys) - TABLES_KEPT)]:
            del self.tables[each]
        held = sum(votes for _, votes in self.tables.values())
        while len(self.tables) > MOST_TABLES or (held > TABLES_KEPT * MOST_VOTES and len(self.tables) > 1):
            _, (_, votes) = self.tables.popitem(last=False)
            held -= votes


class Votes:
    """Stores votes and keeps the ratings that they give."""

    def __init__(
        self,
        cluster: Cluster,
        searches: SearchLog,
        *,
        secret: bytes,
        now: Callable[[], datetime],
        keep_days: int,
        rating: Callable[..., Ratings] = rate,
    ) -> None:
        """`secret` keys the hashes of users: the same in every process; `rating` makes a table, as `rate` does."""
        self._cluster = cluster
        self._searches = searches
        self._secret = secret
        self._now = now
        self._keep_days = keep_days
        self._known: OrderedDict[tuple[str, str | None], _Known] = OrderedDict()
        self._rating = rating
        self._threads = asyncio.Semaphore(THREADS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._made: set[str] = set()

    async def start(self) -> None:
        """Install the template and delete what is too old from now on. Raises what the template meets."""
        await catalog.install_own_templates(self._cluster, catalog.FEEDBACK_TEMPLATE)
        self._spawn(self._sweep_on())

    async def close(self) -> None:
        """Stop reading and sweeping."""
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # --- voting

    async def store(
        self, given: Feedback, *, key_id: str | None, allowed: Callable[[str], bool]
    ) -> FeedbackResult:
        """Store the votes, each on its own, and note them in the log; items in the order sent.

        `allowed` tells whether the caller may see a collection. Raises NotFound for a search that is not logged, or is
        another key's: the two look alike.
        """
        found = await self._searches.find(given.search_id, patience_s=2.0)
        if found is None or found.source.get("key_id") != key_id or not allowed(found.source["collection"]):
            raise NotFound(
                "there is no logged search with this `search_id`",
                field="search_id",
                remedy="send the `search_id` of a search's answer; it has one where the search is logged, for as long "
                "as the log is kept",
            )
        items: list[ItemResult] = []
        votes: dict[str, tuple[int, Json]] = {}
        ranks = found.ranks
        taken: set[str] = set()
        for position, raw in enumerate(given.items):
            item = _item(raw, ranks, taken)
            if isinstance(item, ItemResult):
                items.append(item)
                continue
            taken.add(item.id)
            source = self._vote(item, found, given, key_id=key_id)
            votes[source["vote"]] = (position, source)
            items.append(ItemResult(id=item.id, status="failed"))
        await self._write(found, votes, items)
        failed = sum(item.status in ("invalid", "not_found", "failed") for item in items)
        stored = any(item.status in ("created", "updated") for item in items)
        return FeedbackResult(
            items=items,
            failed=failed,
            counts_from=from_ms(counted_from(to_ms(self._now()))) if stored else None,
        )

    def _vote(self, item: FeedbackItem, found: Logged, given: Feedback, *, key_id: str | None) -> Json:
        key = key_id or ANYONE
        voter = key
        if given.user is not None:
            voter = hmac.new(
                self._secret, b"halflife voter\0" + given.user.encode(), hashlib.sha256
            ).hexdigest()[:24]
        identity = "\0".join((key, voter, given.search_id, item.id))
        uid = found.source.get("collection_uid")
        return {
            "@timestamp": format_instant(self._now()),
            "searched_at": found.source["@timestamp"],
            "vote": hashlib.sha256(identity.encode()).hexdigest()[:32],
            "collection": found.source["collection"],
            **({} if uid is None else {"collection_uid": uid}),
            "search_id": given.search_id,
            "query_hash": found.source["query_hash"],
            "document_id": item.id,
            "rank": found.ranks[item.id],
            "verdict": item.verdict,
            "voter": voter,
            "key_id": key,
        }

    async def _write(
        self, found: Logged, votes: Mapping[str, tuple[int, Json]], items: list[ItemResult]
    ) -> None:
        """Write the votes that are new or changed, and tell each item its fate."""
        if not votes:
            return
        index = names.own_dated_index(PURPOSE, found.moment, monthly=True)
        if index not in self._made:
            await make_index(self._cluster, index, template=catalog.FEEDBACK_TEMPLATE)
            self._made.add(index)
        try:
            stored = await self._cluster.mget(
                index, list(votes), source=["verdict"], timeout_s=self._cluster.request_timeout_s
            )
        except NotFound:
            stored = [{"found": False}] * len(votes)
        before = {
            vote: entry["_source"]["verdict"]
            for vote, entry in zip(votes, stored, strict=True)
            if entry.get("found")
        }
        fresh = {vote: source for vote, (_, source) in votes.items() if before.get(vote) != source["verdict"]}
        outcomes = await self._cluster.record([(index, vote, source) for vote, source in fresh.items()])
        fates = dict(zip(fresh, outcomes, strict=True))
        counted: dict[str, str] = {}
        for vote, (position, source) in votes.items():
            outcome = fates.get(vote)
            id_ = source["document_id"]
            if outcome is None:
                items[position] = ItemResult(id=id_, status="unchanged")
                continue
            error = outcome.error("storing a vote")
            if error is not None:
                told = ItemError(type=error.code, detail=error.detail, remedy=error.remedy)
                items[position] = ItemResult(id=id_, status="failed", error=told)
            else:
                items[position] = ItemResult(id=id_, status="updated" if vote in before else "created")
                counted[id_] = source["verdict"]
        if counted:
            # The votes are stored; that the log shows them too is a convenience.
            try:
                await self._searches.mark(found.source["search_id"], counted)
            except HalflifeError as error:
                log.warning("a vote is stored, but not noted in the search log: %s", error.detail)

    # --- ratings

    async def ratings(
        self, collection: Collection, query: str, as_of: datetime | None, only_key: str | None = None
    ) -> Ratings | None:
        """Return the ratings under a query as of an instant (None: about now); None while they can't be had.

        The instant is taken down to a whole minute. `only_key`: by the votes of that key alone. Waits for
        `LONGEST_WAIT_S` at most, and where any instant will do, takes older ratings rather than none. Never raises.
        """
        known = self._known_of(collection)
        try:
            async with asyncio.timeout(LONGEST_WAIT_S):
                found = await self._ratings(collection, known, as_of, only_key)
        except TimeoutError:
            found = None
        if found is None and as_of is None:
            found = known.latest(only_key)
        return None if found is None else found.under(query_hash(query, self._secret))

    def _known_of(self, collection: Collection) -> _Known:
        # One that is made again under its name begins without votes.
        which = (collection.name, collection.uid)
        known = self._known.get(which)
        if known is None:
            known = self._known[which] = _Known()
            while len(self._known) > MOST_COLLECTIONS:
                self._known.popitem(last=False)
        self._known.move_to_end(which)
        return known

    async def _ratings(
        self, collection: Collection, known: _Known, as_of: datetime | None, only_key: str | None
    ) -> Ratings | None:
        settled_ms = _whole_minute(to_ms(self._now()) - SETTLED_MS)
        wanted_ms = settled_ms if as_of is None else min(_whole_minute(to_ms(as_of)), settled_ms)
        if (made := known.table(wanted_ms, only_key)) is not None:
            return made
        if known.read_until_ms < wanted_ms:
            if known.reading is None or known.reading.done():
                known.reading = self._spawn(self._read(collection, known, until_ms=settled_ms))
            if as_of is None and known.read_until_ms >= 0:
                # What the minute before gave, rather than a wait.
                return await self._table(known, known.read_until_ms, only_key)
            await asyncio.shield(known.reading)
            if known.read_until_ms < wanted_ms:
                return None
        return await self._table(known, wanted_ms, only_key)

    async def _table(self, known: _Known, as_of_ms: int, only_key: str | None) -> Ratings | None:
        """Return the ratings as of an instant, made once for all who want them; None where too many others are wanted.

        A search that leaves does not take them away from the others, nor from those that come after it.
        """
        which = (as_of_ms, only_key)
        if (made := known.table(as_of_ms, only_key)) is not None:
            return made
        if which not in known.making:
            if len(known.making) >= MOST_MAKING:
                return None
            known.making[which] = self._spawn(self._make(known, which))
        return await asyncio.shield(known.making[which])

    async def _make(self, known: _Known, which: tuple[int, str | None]) -> Ratings:
        """Make a table in a thread, one of a collection at a time."""
        as_of_ms, only_key = which
        try:
            async with known.one_table, self._threads:
                votes = [vote for vote in known.votes.values() if only_key is None or vote.key == only_key]
                made = await asyncio.to_thread(self._rating, votes, as_of_ms=as_of_ms)
            known.keep(which, made, len(votes))
            return made
        finally:
            del known.making[which]

    async def _read(self, collection: Collection, known: _Known, *, until_ms: int) -> None:
        """Read the votes since the last time; some twice, which their ids make harmless."""
        async with known.lock:
            since_ms = known.read_until_ms - SETTLED_MS if known.votes else None
            try:
                fresh = [vote async for vote in _votes(self._cluster, collection, since_ms=since_ms)]
            except HalflifeError as error:
                log.warning("the ratings of `%s` are not read: %s", collection.name, error.detail)
                return
            known.votes = _newest({**known.votes, **dict(fresh)})
            # Computed here rather than by the search that wants it next.
            await self._table(known, until_ms, None)
            known.read_until_ms = until_ms

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep_on(self) -> None:
        while True:
            try:
                await sweep(self._cluster, PURPOSE, keep_days=self._keep_days, now=self._now())
            except HalflifeError as error:
                log.warning("old votes are not deleted: %s", error.detail)
            except Exception:
                log.exception("old votes are not deleted")
            await asyncio.sleep(SWEEP_EVERY_S)


def _whole_minute(ms: int) -> int:
    return ms // EPOCH_MS * EPOCH_MS


def _item(raw: Any, ranks: Mapping[str, int], taken: set[str]) -> FeedbackItem | ItemResult:
    """Return the item, or its fate where it can't be a vote."""
    id_ = raw.get("id") if isinstance(raw, dict) and isinstance(raw.get("id"), str) else None
    try:
        item = FeedbackItem.model_validate(raw)
    except ValidationError as cause:
        first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:64]
        error = ItemError(
            type="invalid-request",
            detail=first["msg"].removeprefix("Value error, "),
            field=where or None,
            remedy="send {'id': …, 'verdict': 'clicked' | 'ignored' | 'helpful' | 'unhelpful'}",
        )
        shown = None if id_ is None else id_.encode(errors="replace").decode()[:512]
        return ItemResult(id=shown, status="invalid", error=error)
    if item.id in taken:
        error = ItemError(type="invalid-request", detail="this id stands twice in `items`", field="id",
                          remedy="send one verdict for each document")  # fmt: skip
        return ItemResult(id=item.id, status="invalid", error=error)
    if item.id not in ranks:
        error = ItemError(type="not-found", detail="the search did not return this document", field="id",
                          remedy="send ids of the hits of this very search (of its first 100)")  # fmt: skip
        return ItemResult(id=item.id, status="not_found", error=error)
    return item


# --- reading votes -----------------------------------------------------------------------------------------------------


async def _votes(
    cluster: Cluster, collection: Collection, *, since_ms: int | None
) -> AsyncIterator[tuple[str, Vote]]:
    """Yield (id, vote), of each key the newest first, of one voter at most `MOST_PER_VOTER`.

    Where there are more than `MOST_VOTES`, each key gives at most its share: who makes up voters pushes out nobody else's.
    """
    query = _of(collection, since_ms)
    counts = await _counts(cluster, query)
    if sum(counts.values()) <= MOST_VOTES:
        async for found in _newest_votes(cluster, query, most=MOST_VOTES):
            yield found
        return
    share = _share(counts.values(), most=MOST_VOTES)
    many = [key for key, count in counts.items() if count > share]
    of_others = {"bool": {"filter": [query], "must_not": [{"terms": {"key_id": many}}]}}
    parts = [({"bool": {"filter": [query, {"term": {"key_id": key}}]}}, share) for key in many]
    for part, most in [(of_others, MOST_VOTES), *parts]:
        async for found in _newest_votes(cluster, part, most=most):
            yield found


async def _counts(cluster: Cluster, query: Json) -> dict[str, int]:
    """Return key -> number of votes."""
    body = {
        "size": 0,
        "query": query,
        "track_total_hits": False,
        "aggs": {"keys": {"terms": {"field": "key_id", "size": MOST_KEYS}}},
    }
    try:
        answer = await cluster.search(
            ALIAS, body, timeout_s=cluster.request_timeout_s, doing=f"counting {ALIAS}"
        )
    except NotFound:
        return {}
    buckets = answer.get("aggregations", {}).get("keys", {}).get("buckets", [])
    return {bucket["key"]: bucket["doc_count"] for bucket in buckets}


async def _newest_votes(cluster: Cluster, query: Json, *, most: int) -> AsyncIterator[tuple[str, Vote]]:
    by_voter: dict[tuple[str, str], int] = {}
    given = 0
    read = 0
    async for source in pages(cluster, ALIAS, query, sort=[{"@timestamp": "desc"}, {"vote": "asc"}]):
        read += 1
        vote = Vote(
            document=source["document_id"],
            voter=source["voter"],
            key=source["key_id"],
            verdict=source["verdict"],
            rank=source["rank"],
            at_ms=to_ms(parse_instant(source["@timestamp"])),
            question=source["query_hash"],
        )
        voter = (vote.key, vote.voter)
        by_voter[voter] = by_voter.get(voter, 0) + 1
        if by_voter[voter] <= MOST_PER_VOTER:
            yield source["vote"], vote
            given += 1
        if given >= most or read >= MOST_READ * most:
            return


def _share(counts: Iterable[int], *, most: int) -> int:
    """Return how many each may have so that all together have at most `most`, and none that has fewer loses any; at least 1."""
    left = most
    waiting = sorted(counts)
    for at, count in enumerate(waiting):
        share = left // (len(waiting) - at)
        if count > share:
            return max(1, share)
        left -= count
    return most


def _newest(votes: Mapping[str, Vote]) -> dict[str, Vote]:
    """Return the votes that count: of each voter, then of each key the newest."""
    ordered = sorted(votes.items(), key=lambda item: (-item[1].at_ms, item[0]))
    by_voter: dict[tuple[str, str], int] = {}
    by_key: dict[str, list[tuple[str, Vote]]] = {}
    for id_, vote in ordered:
        voter = (vote.key, vote.voter)
        by_voter[voter] = by_voter.get(voter, 0) + 1
        if by_voter[voter] <= MOST_PER_VOTER:
            by_key.setdefault(vote.key, []).append((id_, vote))
    share = _share(map(len, by_key.values()), most=MOST_VOTES)
    return dict(chain.from_iterable(of_key[:share] for of_key in by_key.values()))


def _of(collection: Collection, since_ms: int | None = None) -> Json:
    clauses = _belonging(collection)
    if since_ms is not None:
        clauses.append({"range": {"@timestamp": {"gte": since_ms, "format": "epoch_millis"}}})
    return {"bool": {"filter": clauses}}


def _belonging(collection: Collection) -> list[Json]:
    """Return what tells the collection's votes and logged searches from those of an earlier one of its name."""
    uid: Json = (
        {"bool": {"must_not": [{"exists": {"field": "collection_uid"}}]}}
        if collection.uid is None
        else {"term": {"collection_uid": collection.uid}}
    )
    return [{"term": {"collection": collection.name}}, uid]


async def pages(
    cluster: Cluster, alias: str, query: Json, *, sort: list[Json], fields: list[str] | None = None
) -> AsyncIterator[Json]:
    """Yield the sources of all documents that match, page by page; none where the alias is not there."""
    after: list[Any] | None = None
    while True:
        body: Json = {"size": PAGE, "query": query, "sort": sort, "track_total_hits": False}
        if fields is not None:
            body["_source"] = fields
        if after is not None:
            body["search_after"] = after
        try:
            answer = await cluster.search(
                alias, body, timeout_s=cluster.request_timeout_s, doing=f"reading {alias}"
            )
        except NotFound:
            return
        hits = answer["hits"]["hits"]
        for hit in hits:
            yield hit["_source"]
        if len(hits) < PAGE:
            return
        after = hits[-1]["sort"]


# --- judgements -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JudgedQuery:
    """A question of the log and what its hits got: document id -> grade (0 not relevant, 1 relevant, 2 very)."""

    hash: str
    text: str
    as_of: datetime
    """The origin of the search that was voted on last."""
    grades: Mapping[str, int]


GRADED_FROM: Final = 1.0
"""Least weight of votes that makes a judgement."""


async def judgements(cluster: Cluster, collection: Collection) -> AsyncIterator[JudgedQuery]:
    """Yield the logged questions whose hits were voted on, with a grade for each document whose votes say enough.

    Questions that are the same up to case and white space are one. A document is graded by the share of votes for it
    among those that looked at it (a hit passed over low in the list counts little): 2 from 0.5 on where somebody called
    it helpful, 1 from 0.5 on, else 0. Questions logged without their text are left out.
    """
    weights: dict[str, dict[str, dict[tuple[str, str], list[float]]]] = {}
    praised: dict[str, set[str]] = {}
    async for vote in pages(cluster, ALIAS, _of(collection), sort=[{"@timestamp": "asc"}, {"vote": "asc"}]):
        question, document = vote["query_hash"], vote["document_id"]
        by_voter = weights.setdefault(question, {}).setdefault(document, {})
        mass = by_voter.setdefault((vote["key_id"], vote["voter"]), [0.0, 0.0])
        if vote["verdict"] in POSITIVE:
            mass[0] += 1
        else:
            mass[1] += passed_over(vote["rank"]) if vote["verdict"] == "ignored" else 1
        if vote["verdict"] == "helpful":
            praised.setdefault(question, set()).add(document)
    texts: dict[str, tuple[str, datetime]] = {}
    wanted = {"bool": {"filter": [*_belonging(collection), {"exists": {"field": "votes"}}]}}
    order: list[Json] = [{"@timestamp": "asc"}, {"search_id": "asc"}]
    shown = ["query_hash", "query", "@timestamp", "origin"]
    async for search in pages(cluster, SEARCHES, wanted, sort=order, fields=shown):
        if search.get("query") and search["query_hash"] in weights:
            origin = parse_instant(search.get("origin", search["@timestamp"]))
            texts[search["query_hash"]] = (search["query"], origin)
    for question, (text, origin) in sorted(texts.items()):
        grades: dict[str, int] = {}
        for document, by_voter in sorted(weights[question].items()):
            shares = [(mass[0], mass[1], 1 / max(1.0, mass[0] + mass[1])) for mass in by_voter.values()]
            positive = sum(a * share for a, _, share in shares)
            negative = sum(b * share for _, b, share in shares)
            if positive + negative < GRADED_FROM:
                continue
            good = positive / (positive + negative) >= 0.5
            grades[document] = (2 if document in praised.get(question, ()) else 1) if good else 0
        if grades:
            yield JudgedQuery(question, text, origin, grades)
