"""Own who calls the service in a chaos run: service processes, callers that write, readers, and what each was told.

The services are `halflife serve`, the callers HTTP clients that repeat what they got no answer to, as a caller would,
at the other service if need be. Whatever is about to be asked for is logged before it is sent, and what was
acknowledged after it was heard: `scripts.chaos` judges the cluster by those logs.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from scripts.stack import end_process, python_command
from scripts.supervisor import free_port

Json = dict[str, Any]
Note = Callable[..., None]

HOST: Final = "127.0.0.1"
COLLECTION: Final = "chaos"
DIMS: Final = {"hash-8": 8, "hash-12": 12}
"""The embedding models, and the length of their vectors; a collection begins with the first."""
PINNED: Final = 60
"""Documents `p…`, rewritten and never deleted: readers must always find all of them."""
FREE: Final = 240
"""Documents `d…`, written, patched and deleted."""
TIMED: Final = 30
"""Documents `r…`, written under revisions that are times, and deleted."""
REVISED: Final = 12
"""Documents `v…`, written under small revisions that arrive in any order, and deleted."""
COUNTERS: Final = 6
"""Documents `c…`: each holds a number that is raised by one under `if_version`, so that a lost update shows."""
DONE: Final = ("created", "updated", "deleted", "unchanged")
NOT_DONE: Final = ("conflict", "not_found")
ATTEMPTS: Final = 4
REQUEST_S: Final = 12.0
"""How long a caller waits for an answer; less than the service tries, so that late answers and repeats meet."""
READ_S: Final = 40.0
"""How long a reader does: an error is what the service tells, not that a busy machine is slow."""


def pinned_ids() -> list[str]:
    """Return the documents that always exist."""
    return [f"p{number}" for number in range(PINNED)]


def item(id_: str, text: str, who: str, serial: int, **more: Any) -> Json:
    """Return a document as every writer of a run sends it."""
    group = "pinned" if id_.startswith("p") else "free"
    return {"id": id_, "text": text, "metadata": {"n": serial, "who": who, "group": group}, **more}


def said(who: str, serial: int, id_: str) -> str:
    """Return the text that nobody else ever writes."""
    return f"{who} wrote {serial} of the pinned {id_}"


# ---- the service ------------------------------------------------------------------------------------------------------


class Service:
    """One `halflife serve` on a port of its own."""

    def __init__(self, folder: Path, number: int, environment: Mapping[str, str]) -> None:
        self.name = f"service-{number}"
        self.port = free_port()
        self._log = folder / f"{self.name}.log"
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it and don't wait."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                halflife("serve", "--port", str(self.port)), stdin=subprocess.PIPE, stdout=log, stderr=log,
                env=self._environment, start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait(10)
        self.stop()

    def stop(self) -> None:
        """End it in order, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            end_process(process, 20.0)

    async def ready(self, client: httpx2.AsyncClient, within_s: float = 90.0) -> None:
        """Wait until it is ready; TimeoutError where it does not come, RuntimeError where it has ended."""
        deadline = time.monotonic() + within_s
        while True:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended by itself: see {self._log}")
            with contextlib.suppress(httpx2.HTTPError, ValueError):
                answer = await client.get(f"{self.url}/readyz", timeout=3.0)
                if answer.status_code == 200 and answer.json().get("status") == "ready":
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} was not ready within {within_s:g} s: see {self._log}")
            await asyncio.sleep(0.2)


def halflife(*arguments: str) -> list[str]:
    """Return the command line that runs `halflife` so that it ends when its standard input closes."""
    return python_command("scripts.chaos", "--role", "halflife", "--arguments", json.dumps(arguments))


# ---- writers ----------------------------------------------------------------------------------------------------------


class Notes:
    """A log of what was asked for and what was heard; the kernel has each line when `note` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def open(self) -> Iterator[Note]:
        """Yield what writes a line."""
        with self._path.open("a", encoding="utf-8") as log:

            def note(**entry: Any) -> None:
                log.write(json.dumps(entry) + "\n")
                log.flush()

            yield note


@dataclass
class Heard:
    """What all callers of a run know together."""

    versions: dict[str, int] = field(default_factory=dict)
    """The highest version that was acknowledged of each document."""
    statuses: Counter[str] = field(default_factory=Counter)
    """What became of items, and of requests that failed as a whole."""
    revisions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    slowest_s: float = 0.0

    def raise_to(self, id_: str, version: int) -> None:
        """Note an acknowledged version."""
        self.versions[id_] = max(version, self.versions.get(id_, 0))


class Caller:
    """One HTTP client that writes; several run at once."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        urls: Sequence[str],
        note: Note,
        heard: Heard,
        *,
        name: str,
        seed: int,
    ) -> None:
        self._client = client
        self._urls = urls
        self._note = note
        self._heard = heard
        self._rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
        self._name = name
        self._serial = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Write until told to stop."""
        kinds = ["upsert", "revise", "count", "delete", "patch"]
        while not stop.is_set():
            kind = self._rng.choices(kinds, [38, 14, 12, 24, 12])[0]
            if kind == "count":
                await self._count(f"c{self._rng.randrange(COUNTERS)}")
            else:
                await self._write(kind)
            await asyncio.sleep(self._rng.uniform(0, 0.15))

    async def _write(self, kind: str) -> None:
        pool = [f"v{n}" for n in range(REVISED)] if kind == "revise" else [f"d{n}" for n in range(FREE)]
        if kind in ("upsert", "patch"):
            pool += pinned_ids()
        elif kind == "delete":
            pool += [f"v{n}" for n in range(REVISED)]
        ids = self._rng.sample(pool, self._rng.randint(1, 6))
        revision = None
        if kind == "revise":
            # Others draw and send theirs meanwhile.
            revision = next(self._heard.revisions)
            await asyncio.sleep(self._rng.uniform(0, 0.3))
        self._serial += 1
        first = self._serial
        for attempt in range(ATTEMPTS):
            # Each attempt may arrive, also late: each is one that was asked for.
            serial = first if attempt == 0 else self._next()
            texts = {id_: None if kind == "delete" else said(self._name, first, id_) for id_ in ids}
            self._note(t="try", kind=kind, who=self._name, n=serial, texts=texts, rev=revision)
            answer = await self._send(*self._request(kind, ids, texts, first, revision))
            if answer is None:
                await asyncio.sleep(self._rng.uniform(0.1, 0.5) * (attempt + 1))
                continue
            left = []
            for told in answer:
                self._heard.statuses[told["status"]] += 1
                if told["status"] in DONE:
                    self._acknowledged(kind, serial, told, revision)
                elif told["status"] in NOT_DONE:
                    self._note(t="not", kind=kind, who=self._name, n=serial, id=told["id"])
                else:
                    self._failed(serial, told["status"], told.get("error", {}).get("detail", ""))
                    left.append(told["id"])
            if not left:
                return
            ids = left
            await asyncio.sleep(self._rng.uniform(0.1, 0.5) * (attempt + 1))

    def _next(self) -> int:
        self._serial += 1
        return self._serial

    def _request(
        self,
        kind: str,
        ids: Sequence[str],
        texts: Mapping[str, str | None],
        serial: int,
        revision: int | None,
    ) -> tuple[str, str, Json]:
        path = f"/v1/collections/{COLLECTION}/documents"
        if kind == "delete":
            return "POST", f"{path}/delete", {"ids": list(ids)}
        if kind == "patch":
            return "PATCH", path, {"documents": [{"id": id_, "author": self._name} for id_ in ids]}
        more = {} if revision is None else {"revision": revision}
        items = [item(id_, texts[id_] or "", self._name, serial, **more) for id_ in ids]
        return "POST", path, {"documents": items}

    async def _count(self, id_: str) -> None:
        """Raise a counter by one, if it is still what was read."""
        found = await self._ask("GET", f"/v1/collections/{COLLECTION}/documents/{id_}")
        if found is None or found.status_code != 200:
            self._failed(self._next(), "unread", "" if found is None else found.text[:200])
            return
        stored = found.json()
        count, serial = stored["metadata"]["n"] + 1, self._next()
        text = said(self._name, serial, id_)
        self._note(t="try", kind="count", who=self._name, n=serial, texts={id_: text}, rev=None)
        body = item(id_, text, self._name, count, if_version=stored["version"])
        answer = await self._send("POST", f"/v1/collections/{COLLECTION}/documents", {"documents": [body]})
        for told in answer or ():
            self._heard.statuses[told["status"]] += 1
            if told["status"] in DONE:
                self._acknowledged("count", serial, told, None, count=count)
            elif told["status"] in NOT_DONE:
                self._note(t="not", kind="count", who=self._name, n=serial, id=told["id"])
            else:
                self._failed(serial, told["status"], told.get("error", {}).get("detail", ""))

    async def _send(self, method: str, path: str, body: Json) -> list[Json] | None:
        """Return what became of each item; None where no answer told."""
        answer = await self._ask(method, path, body)
        if answer is None:
            self._failed(self._serial, "no answer", "the connection broke, or nothing came in time")
            return None
        told: Json = answer.json()
        items = told.get("items")
        if answer.status_code == 200 and items is not None:
            return list(items)
        # A bulk of which nothing could be stored, or one that was refused before it began.
        self._heard.statuses[f"http {answer.status_code}"] += 1
        self._failed(self._serial, f"http {answer.status_code}", str(told.get("detail", ""))[:200])
        return None

    async def _ask(self, method: str, path: str, body: Json | None = None) -> httpx2.Response | None:
        begun = time.monotonic()
        try:
            return await self._client.request(method, self._rng.choice(self._urls) + path, json=body)
        except httpx2.HTTPError:
            self._heard.statuses["no answer"] += 1
            return None
        finally:
            self._heard.slowest_s = max(self._heard.slowest_s, time.monotonic() - begun)

    def _acknowledged(
        self, kind: str, serial: int, told: Json, revision: int | None, count: int | None = None
    ) -> None:
        self._note(
            t="ack", kind=kind, who=self._name, n=serial, id=told["id"], v=told["version"], rev=revision, count=count
        )  # fmt: skip
        self._heard.raise_to(told["id"], told["version"])

    def _failed(self, serial: int, code: str, detail: str) -> None:
        self._note(
            t="error", who=self._name, n=serial, code=code, at=time.time(), detail=f"{code}: {detail[:200]}"
        )


# ---- readers ----------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the readers met. Outside of a fault's own window all lists must stay empty."""

    reads: int = 0
    fewest: int = PINNED
    """The fewest of the pinned documents that a whole answer held."""
    short: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    """Reads by id of an older version than had been acknowledged before they were sent."""
    stale_in_faults: int = 0
    errors: list[str] = field(default_factory=list)
    errors_in_faults: int = 0
    longest_pause_s: float = 0.0


async def read(
    client: httpx2.AsyncClient,
    urls: Sequence[str],
    seen: Seen,
    heard: Heard,
    in_fault: Callable[[float], bool],
    stop: asyncio.Event,
    *,
    seed: int,
) -> None:
    """Search for the pinned documents, by words and by vectors, and read them by id, over and over.

    `in_fault` tells whether a request that began then may have met a fault.
    """
    rng = random.Random(seed)  # noqa: S311 - repeatable, no secret
    last = time.monotonic()
    for serial in itertools.count():
        if stop.is_set():
            return
        url, begun = rng.choice(urls), time.monotonic()
        try:
            if serial % 3 == 2:
                wrong = await _read_one(client, url, rng.choice(pinned_ids()), heard)
                if wrong is not None and in_fault(begun):
                    seen.stale_in_faults += 1
                elif wrong is not None:
                    seen.stale.append(wrong)
            else:
                routes = ["text"] if serial % 3 == 0 else ["text", "vector"]
                found = await _search(client, url, f"pinned {serial}", routes)
                seen.fewest = min(seen.fewest, found)
                if found != PINNED:
                    seen.short.append(f"{found} of {PINNED} found by {' and '.join(routes)}")
        except (httpx2.HTTPError, _NotWhole) as error:
            if in_fault(begun):
                seen.errors_in_faults += 1
            else:
                seen.errors.append(
                    f"after {time.monotonic() - begun:.1f} s: {type(error).__name__} {error}"[:300]
                )
        else:
            seen.reads += 1
            seen.longest_pause_s = max(seen.longest_pause_s, time.monotonic() - last)
            last = time.monotonic()
        await asyncio.sleep(0.05)


class _NotWhole(Exception):
    """An answer that is an error, or says itself that it lacks something."""


async def _search(client: httpx2.AsyncClient, url: str, query: str, routes: Sequence[str]) -> int:
    body = {
        "collection": COLLECTION, "query": query, "top_k": 100, "filter": {"group": "pinned"},
        "routes": [{"kind": route} for route in routes], "fields": ["metadata"],
    }  # fmt: skip
    answer = await client.post(f"{url}/v1/search", json=body, timeout=READ_S)
    told = answer.json()
    if answer.status_code != 200 or told["degraded"]:
        raise _NotWhole(f"{answer.status_code} {told.get('detail') or told.get('warnings')}")
    return len({hit["id"] for hit in told["hits"]})


async def _read_one(client: httpx2.AsyncClient, url: str, id_: str, heard: Heard) -> str | None:
    """Read a document; say so if it is older than what had been acknowledged."""
    least = heard.versions.get(id_, 0)
    answer = await client.get(f"{url}/v1/collections/{COLLECTION}/documents/{id_}", timeout=READ_S)
    if answer.status_code == 404:
        return f"{id_}: not there, version {least} was acknowledged"
    if answer.status_code != 200:
        raise _NotWhole(f"{answer.status_code} {answer.text[:200]}")
    version = answer.json()["version"]
    return None if version >= least else f"{id_}: version {version} read, {least} had been acknowledged"
