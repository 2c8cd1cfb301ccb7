"""Measures loading beside Elasticsearch's own bulk helper, in one run: `python -m scripts.bench_load`.

The same documents with ready vectors go in turns through the service and through `parallel_bulk` into an index of the
same mapping, so that a busy machine slows both alike; then more and more documents are loaded while the memory of the
service is read. Talks to loopback only, bounded in count. Nothing asserts on what it prints.
"""

import argparse
import json
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from elasticsearch import Elasticsearch
from elasticsearch.helpers import parallel_bulk

from scripts import stack

DIMS = 384
BATCH = 500
THREADS = 2
WORDS = [
    "annual",
    "leave",
    "policy",
    "carry",
    "over",
    "unused",
    "days",
    "approval",
    "manager",
    "expense",
    "travel",
    "hotel",
    "limit",
    "firmware",
    "release",
    "notes",
    "password",
    "rule",
    "remote",
    "work",
    "office",
    "security",
    "review",
    "purchase",
    "order",
    "contract",
    "supplier",
    "invoice",
    "payment",
    "term",
    "notice",
]
Json = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 when every measurement was taken."""
    parser = argparse.ArgumentParser(prog="bench_load", description=__doc__)
    parser.add_argument("--data", type=Path, help="the running stack's data folder")
    parser.add_argument("--documents", type=int, default=20_000, help="documents through each side; 0: none")
    parser.add_argument("--rounds", type=int, default=4, help="turns that they are divided into")
    parser.add_argument(
        "--memory", type=int, default=200_000, help="documents after which memory is read; 0: don't"
    )
    options = parser.parse_args(argv)
    state = stack.running(stack.data_folder(options.data))
    if state is None or state.api is None or state.elasticsearch is None:
        print("error: no stack runs. Remedy: halflife up --detach", file=sys.stderr)
        return 3
    name = f"bench_{uuid.uuid4().hex[:8]}"
    figures: Json = {}
    with (
        httpx2.Client(base_url=state.api, timeout=300) as api,
        Elasticsearch(state.elasticsearch, request_timeout=300) as raw,
    ):
        try:
            options_ = {"dims": DIMS, "replicas": 0}
            made = _ok(api.put(f"/v1/collections/{name}", json=options_))
            index = _copy_of(raw, made["index"], name)
            try:
                if options.documents:
                    most = min(options.documents, 500_000)
                    figures |= throughput(api, raw, name, index, most, options.rounds)
            finally:
                raw.indices.delete(index=index)
            if options.memory:
                # The cluster's merges are not what is looked at here.
                _ok(api.put(f"/v1/collections/{name}", json={"refresh_interval": "-1"}))
                [pid] = [process.pid for process in state.processes if process.name == "api"]
                figures["memory"] = memory(api, name, pid, min(options.memory, 1_000_000))
        finally:
            api.delete(f"/v1/collections/{name}", params={"confirm": name})
    print(json.dumps(figures, indent=2))
    return 0


def throughput(
    api: httpx2.Client, raw: Elasticsearch, name: str, index: str, count: int, rounds: int
) -> Json:
    """Return documents a second of both sides, and the service's over the helper's."""
    seconds = {"service": 0.0, "parallel_bulk": 0.0}
    step = count // rounds
    for number in range(rounds):
        documents = list(made_up(number * step, step, words=60))
        sides: list[tuple[str, Callable[[], None]]] = [
            ("service", partial(_through_service, api, name, documents)),
            ("parallel_bulk", partial(_through_helper, raw, index, documents)),
        ]
        for side, load in sides if number % 2 else reversed(sides):
            begun = time.monotonic()
            load()
            seconds[side] += time.monotonic() - begun
    rate = {side: round(rounds * step / took, 1) for side, took in seconds.items()}
    return {
        "documents": rounds * step,
        "documents_per_second": rate,
        "ratio": round(rate["service"] / rate["parallel_bulk"], 3),
        "load_average": os.getloadavg()[0],
    }


def memory(api: httpx2.Client, name: str, pid: int, most: int) -> list[Json]:
    """Return the resident memory of the service after 10,000 documents and on to `most`, in one stream."""
    marks = [mark for mark in (10_000, 50_000, 100_000, 150_000, 200_000, 500_000, 1_000_000) if mark <= most]
    found: list[Json] = []
    first = 10_000_000
    loaded = 0
    for mark in marks:
        begun = time.monotonic()
        _through_service(api, name, made_up(first + loaded, mark - loaded, words=12))
        took = time.monotonic() - begun
        found.append(
            {
                "documents": mark,
                "rss_mib": round(_resident(pid) / 2**20, 1),
                "documents_per_second": round((mark - loaded) / took, 1),
            }
        )
        print(json.dumps(found[-1]), file=sys.stderr)
        loaded = mark
    return found


def made_up(first: int, count: int, *, words: int) -> Iterator[Json]:
    """Yield documents with random words and vectors, the same for the same numbers."""
    chance = np.random.default_rng(first)
    for number in range(first, first + count):
        vector = chance.standard_normal(DIMS).astype(np.float32)
        yield {
            "id": f"d{number}",
            "title": f"Document {number}",
            "text": " ".join(WORDS[n] for n in chance.integers(0, len(WORDS), words)),
            "creation_time": "2026-01-02T00:00:00.000Z",
            "metadata": {"number": number},
            "embedding": (vector / np.linalg.norm(vector)).tolist(),
        }


def _through_service(api: httpx2.Client, name: str, documents: "Iterator[Json] | list[Json]") -> None:
    def send(batch: list[Json]) -> None:
        answer = _ok(api.post(f"/v1/collections/{name}/documents", json={"documents": batch}))
        if answer["failed"]:
            raise SystemExit(f"error: {answer['failed']} documents were not stored: {answer['items'][0]}")

    with ThreadPoolExecutor(THREADS) as pool:
        under_way: deque[Any] = deque()
        batch: list[Json] = []
        for document in documents:
            batch.append(document)
            if len(batch) == BATCH:
                under_way.append(pool.submit(send, batch))
                batch = []
                if len(under_way) > THREADS:
                    under_way.popleft().result()
        if batch:
            under_way.append(pool.submit(send, batch))
        for waiting in under_way:
            waiting.result()


def _through_helper(raw: Elasticsearch, index: str, documents: list[Json]) -> None:
    actions = (
        {
            "_index": index,
            "_id": document["id"],
            "_source": {
                "document_id": document["id"],
                "title": document["title"],
                "text": document["text"],
                "chunks": [
                    {
                        "text": document["text"],
                        "start": 0,
                        "end": len(document["text"]),
                        "embedding": document["embedding"],
                    }
                ],
                "creation_time": document["creation_time"],
                "metadata": document["metadata"],
                "indexed_at": document["creation_time"],
            },
        }
        for document in documents
    )
    for stored, told in parallel_bulk(raw, actions, thread_count=THREADS, chunk_size=BATCH):
        if not stored:
            raise SystemExit(f"error: {told}")


def _copy_of(raw: Elasticsearch, index: str, name: str) -> str:
    """Make an index of the same mapping and settings."""
    made = raw.indices.get(index=index)[index]
    own = ("uuid", "version", "creation_date", "provided_name", "routing")
    settings = {key: value for key, value in made["settings"]["index"].items() if key not in own}
    raw.indices.create(index=f"raw_{name}", settings=settings, mappings=made["mappings"])
    return f"raw_{name}"


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ok(response: httpx2.Response) -> Json:
    response.raise_for_status()
    return dict(response.json())


if __name__ == "__main__":
    raise SystemExit(main())
