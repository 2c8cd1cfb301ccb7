"""Own `halflife load`: documents from files to the API in batches, a few under way at once, each item's fate counted.

Order is kept where it matters: a later document of the same id is never sent while an earlier one is under way. What
memory it takes does not grow with the input, but for one number for each document of a load of several files, by which
an id that two of them bring is noticed; only the first failures are kept, all are counted.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from app.encoding import encode
from app.sandbox import Sandbox
from scripts.client import ApiProblem, Json, items_of, persist
from scripts.sources import LIMITS, Names, Read, Source, read

DEFAULT_BATCH = 64
IN_FLIGHT = 2
# About this much text is embedded in a few seconds by a small model on two cores, so that progress is seen to move.
BATCH_BYTES = 256 * 1024
KEPT_FAILURES = 1000
PATIENCE_S = 120.0
# Item errors that a later attempt may not meet again.
_TRANSIENT = frozenset({"unavailable", "elasticsearch-unavailable", "embedder-unavailable"})
_ITEM_ATTEMPTS = 4

Sleep = Callable[[float], None]


class Api(Protocol):
    """What loading needs of the API."""

    def upsert(self, collection: str, documents: Sequence[Json], *, refresh: str = "false") -> Json:
        """Store documents and return the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Failure:
    """One document that was not stored, and why."""

    where: str
    id: str | None
    reason: str
    remedy: str | None = None

    @classmethod
    def of(cls, where: str, name: str | None, reason: str, remedy: str | None = None) -> Self:
        """Return one whose texts every output takes; `name` is the document's id."""
        return cls(_printable(where), None if name is None else _printable(name), _printable(reason), remedy)

    def to_json(self) -> Json:
        """Return it as `--json` and `--failures` print it."""
        return {"where": self.where, "id": self.id, "reason": self.reason, "remedy": self.remedy}


@dataclass(slots=True)
class Tally:
    """What became of everything so far."""

    collection: str
    created: int = 0
    updated: int = 0
    unchanged: int = 0
    failed: int = 0
    empty: int = 0
    empty_files: list[str] = field(default_factory=list)
    chunks: int = 0
    truncated: int = 0
    doubtful: int = 0
    """Rows that may hold others."""
    dated_by_file: int = 0
    """Stored documents whose creation time is their file's time."""
    read_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    failures: list[Failure] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Documents that are in the collection now because of this run, or were already as sent."""
        return self.created + self.updated + self.unchanged

    @property
    def per_second(self) -> float:
        return self.stored / self.seconds if self.seconds > 0 else 0.0

    def fail(self, failure: Failure) -> None:
        """Count a failure, and keep it unless very many are kept already."""
        self.failed += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(failure)

    def line(self) -> str:
        """Return the summary in one line."""
        parts = [
            f"{self.created} new",
            f"{self.updated} updated",
            f"{self.unchanged} unchanged",
            f"{self.failed} failed",
        ]
        if self.empty:
            parts.append(f"{self.empty} empty")
        told = f"{self.stored} documents in collection '{self.collection}': {', '.join(parts)}"
        return f"{told}; {self.seconds:.1f} s, {self.per_second:.1f} documents/s"

    def to_json(self) -> Json:
        """Return the summary as `--json` prints it."""
        return {
            "collection": self.collection,
            "stored": self.stored,
            "created": self.created,
            "updated": self.updated,
            "unchanged": self.unchanged,
            "failed": self.failed,
            "empty": self.empty,
            "empty_files": self.empty_files,
            "chunks": self.chunks,
            "truncated": self.truncated,
            "dated_by_file": self.dated_by_file,
            "seconds": round(self.seconds, 2),
            "documents_per_second": round(self.per_second, 2),
            "interrupted": self.interrupted,
            "failures": [failure.to_json() for failure in self.failures],
        }


class Loader:
    """Sends what sources hold to one collection. `progress` is called with the tally after everything that changes it."""

    def __init__(
        self,
        api: Api,
        collection: str,
        *,
        batch: int = DEFAULT_BATCH,
        batch_bytes: int = BATCH_BYTES,
        in_flight: int = IN_FLIGHT,
        patience_s: float = PATIENCE_S,
        progress: Callable[[Tally], None] = lambda tally: None,
        report: Callable[[str], None] = lambda line: None,
        on_failure: Callable[[Failure], None] = lambda failure: None,
        sleep: Sleep = time.sleep,
        file_times: bool = True,
        prepare: Callable[[Read], Read] = lambda item: item,
    ) -> None:
        """`prepare` gets everything that is read, in order, and returns what is sent or told instead."""
        self._file_times, self._prepare = file_times, prepare
        self._api, self._batch, self._batch_bytes, self._in_flight = api, batch, batch_bytes, in_flight
        self._patience_s, self._progress, self._report, self._sleep = patience_s, progress, report, sleep
        self._on_failure = on_failure
        self.tally = Tally(collection)
        self._answered: deque[tuple[Read, Json]] = deque()
        self.abandoned = False
        """Whether requests are under way still, whose documents' fate nobody will learn."""

    def load(self, sources: Sequence[Source], names: Names) -> Tally:
        """Send everything and return what became of it.

        Raises ApiError when the API can't be reached or refuses whole requests; the tally then tells how far it got.
        An interrupt waits for the requests under way (a second one abandons them), is noted in the tally and raised.
        """
        begun = time.monotonic()
        under_way: dict[Future[None], list[Read]] = {}
        pool = ThreadPoolExecutor(self._in_flight, thread_name_prefix="load")
        sandbox = Sandbox(workers=1, limits=LIMITS)
        try:
            batches = self._batches(self._read(sources, names, sandbox))
            last: list[Read] | None = None
            for batch in batches:
                # One batch is held back, so that the last of all can be sent when the others are done and searches
                # see everything once it is answered.
                if last is not None:
                    self._make_room(under_way, {_id(item) for item in last})
                    under_way[pool.submit(self._send, last, "false")] = last
                last = batch
            while under_way:
                self._settle(under_way)
            if last is not None:
                under_way[pool.submit(self._send, last, "true")] = last
                self._settle(under_way)
        except KeyboardInterrupt:
            self.tally.interrupted = True
            self._report("Waiting for the requests under way; Ctrl-C again ends at once.")
            self.abandoned = True
            while under_way:
                self._settle(under_way)
            self.abandoned = False
            raise
        finally:
            sandbox.close()
            pool.shutdown(wait=not self.abandoned, cancel_futures=True)
            self._drain()
            self.tally.seconds = time.monotonic() - begun
        return self.tally

    def rehearse(self, sources: Sequence[Source], names: Names) -> int:
        """Read everything and send nothing; return how many documents would have been sent. The tally has the faults."""
        begun = time.monotonic()
        with Sandbox(workers=1, limits=LIMITS) as sandbox:
            count = sum(len(batch) for batch in self._batches(self._read(sources, names, sandbox)))
        self.tally.seconds = time.monotonic() - begun
        return count

    def _read(self, sources: Sequence[Source], names: Names, sandbox: Sandbox) -> Iterator[Read]:
        paths = [source.path.resolve() for source in sources]
        several = len(set(paths)) > 1
        first: dict[int, int] = {}
        """Hash of an id -> the first file that brought it, so that no id is kept."""
        for number, source in enumerate(sources):
            for found in read(source, names, sandbox=sandbox, file_times=self._file_times):
                item = self._prepare(found)
                if several and item.document is not None:
                    other = first.setdefault(hash(_id(item)), number)
                    if paths[other] != paths[number]:
                        item = _brought_before(item, sources[other])
                yield item

    def _batches(self, items: Iterator[Read]) -> Iterator[list[Read]]:
        batch: list[Read] = []
        ids: set[str] = set()
        size = 0
        for item in items:
            self.tally.read_bytes += item.size
            self.tally.doubtful += item.doubtful
            for warning in item.warnings:
                self._report(f"{item.where}: {warning}")
            if item.document is None:
                self._note(item)
                continue
            if (failure := _unsendable(item, item.document)) is not None:
                # Found by the request instead, it would take its whole batch with it.
                self._fail(failure)
                self._progress(self.tally)
                continue
            length = sum(_chars(item.document.get(name)) for name in ("text", "title"))
            if batch and (len(batch) >= self._batch or size + length > self._batch_bytes or _id(item) in ids):
                yield batch
                batch, ids, size = [], set(), 0
            batch.append(item)
            ids.add(_id(item))
            size += length
        if batch:
            yield batch

    def _note(self, item: Read) -> None:
        if item.empty:
            self.tally.empty += 1
            self.tally.empty_files.append(item.where)
        else:
            self._fail(Failure.of(item.where, item.id, item.fault or "can't be read", item.remedy))
        self._progress(self.tally)

    def _fail(self, failure: Failure) -> None:
        self.tally.fail(failure)
        self._on_failure(failure)

    def _make_room(self, under_way: dict[Future[None], list[Read]], ids: set[str]) -> None:
        """Wait until fewer requests than allowed are under way and none of them carries one of these ids."""
        while len(under_way) >= self._in_flight or any(
            _id(item) in ids for batch in under_way.values() for item in batch
        ):
            self._settle(under_way)

    def _settle(self, under_way: dict[Future[None], list[Read]]) -> None:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            del under_way[future]
            future.result()
        self._drain()

    def _drain(self) -> None:
        """Count what was answered. An interrupt may hide a future, so the answers come by a way of their own."""
        while self._answered:
            item, fate = self._answered.popleft()
            self._count(item, fate)
        self._progress(self.tally)

    def _count(self, item: Read, fate: Json) -> None:
        status = fate.get("status")
        if status in {"created", "updated", "unchanged"}:
            setattr(self.tally, status, getattr(self.tally, status) + 1)
            self.tally.chunks += fate.get("chunks") or 0
            self.tally.truncated += bool(fate.get("truncated"))
            self.tally.dated_by_file += item.by_file_time
            return
        error = fate.get("error") or {}
        reason = str(error.get("detail") or status)
        field_name = error.get("field")
        if field_name and str(field_name) not in reason:
            reason = f"{field_name}: {reason}"
        self._fail(Failure.of(item.where, _id(item), reason, error.get("remedy")))

    # -- in the threads

    def _send(self, batch: list[Read], refresh: str) -> None:
        """Send a batch and hand each item's fate on, having tried again those that failed for a passing reason."""
        fates: list[Json] = [{}] * len(batch)
        left = list(range(len(batch)))
        pause = 0.5
        for attempt in range(_ITEM_ATTEMPTS):
            sent = self._post([_document(batch[index]) for index in left], refresh)
            for index, fate in zip(left, sent, strict=True):
                fates[index] = fate
            left = [index for index in left if (fates[index].get("error") or {}).get("type") in _TRANSIENT]
            if not left or attempt == _ITEM_ATTEMPTS - 1:
                break
            self._report(f"{len(left)} documents could not be stored for now; trying again in {pause:.1f} s")
            self._sleep(pause)
            pause *= 3
        self._answered.extend(zip(batch, fates, strict=True))

    def _post(self, documents: list[Json], refresh: str) -> list[Json]:
        try:
            answer = persist(
                lambda: self._api.upsert(self.tally.collection, documents, refresh=refresh),
                within_s=self._patience_s,
                sleep=self._sleep,
                told=self._report,
            )
        except ApiProblem as problem:
            items = problem.problem.get("items")
            if problem.status == 422 and isinstance(items, list) and len(items) == len(documents):
                # None of them is valid, each for its own reason: the next ones may be.
                return items
            if problem.status != 413:
                raise
            if len(documents) == 1:
                error = {"type": problem.code, "detail": problem.detail, "remedy": "split the document"}
                return [{"id": documents[0]["id"], "status": "failed", "error": error}]
            middle = len(documents) // 2
            return [*self._post(documents[:middle], refresh), *self._post(documents[middle:], refresh)]
        return items_of(answer, len(documents))


def _brought_before(item: Read, other: Source) -> Read:
    """Return a fault in the place of a document whose id another file brought: stored, it would end that one's text."""
    return replace(
        item,
        document=None,
        fault=f"{other.where} brought the same id in this load",
        id=_id(item),
        remedy="give each an id of its own (--id-prefix for files, --id-field for lines and rows); if it is a newer "
        "version, load it afterwards, in a load of its own",
    )


def _unsendable(item: Read, document: Json) -> Failure | None:
    """Return why a document can't be written as JSON, naming the field; None if it can."""
    try:
        encode(document)
    except (ValueError, RecursionError):
        pass
    else:
        return None
    metadata = document.get("metadata")
    inside = (
        {f"metadata.{key}": value for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    )
    for name, value in {**document, **inside}.items():
        if name == "metadata" and inside:
            continue
        try:
            encode({name: value})
        except UnicodeEncodeError:
            reason, remedy = "holds half of a surrogate pair", "send well-formed Unicode"
        except RecursionError:
            reason, remedy = "is nested too deeply", "store it flatter"
        except ValueError:
            reason, remedy = "holds a number that is not finite", "send finite numbers, or null"
        else:
            continue
        return Failure.of(item.where, _id(item), f"{name}: {reason}", remedy)
    return Failure.of(item.where, _id(item), "can't be written as JSON", "store it flatter")


def _chars(value: object) -> int:
    """Return how long a field is; what is no text is for the API to refuse, with its reason."""
    return len(value) if isinstance(value, str) else 0


def _printable(text: str) -> str:
    """Return a text that any output in UTF-8 takes: half a surrogate pair is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _document(item: Read) -> Json:
    assert item.document is not None
    return item.document


def _id(item: Read) -> str:
    return str(_document(item)["id"])
