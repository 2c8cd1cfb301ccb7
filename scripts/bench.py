"""Measures the service beside what it is made of, in one run, so that only ratios matter: `./scripts/bench`.

Calls alternate between the two sides, so that a busy machine slows both alike. Talks to loopback only, bounded in
count. Nothing asserts on what it prints.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from app.asking import Search
from app.collection import Collection
from app.encoding import pack_vector
from app.planning import fetch_body, make_plan
from scripts import stack

QUERIES = (
    "How many days of unused annual leave may I carry over?",
    "出差住宿费报销上限是每晚多少元？",
    "Who approves a purchase?",
    "latest firmware release",
    "password rules",
    "远程办公每周几天",
)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 when every measurement was taken."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--data", type=Path, help="the running stack's data folder")
    parser.add_argument("--collection", default="handbook")
    parser.add_argument("--rounds", type=int, default=150, help="calls of each kind (at most 2000)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    state = stack.running(stack.data_folder(options.data))
    if state is None or state.api is None or state.elasticsearch is None or not state.embedding_base_url:
        print("error: no stack runs. Remedy: halflife up --detach, and load something", file=sys.stderr)
        return 3
    rounds = min(options.rounds, 2000)
    with httpx2.Client(base_url=state.api, timeout=60) as api, httpx2.Client(timeout=60) as raw:
        figures = measure(api, raw, state.elasticsearch, state.embedding_base_url, options.collection, rounds)
    with (
        a_reranker() as reranker,
        a_service(state.elasticsearch, state.embedding_base_url, reranker) as url,
        httpx2.Client(base_url=url, timeout=60) as api,
    ):
        figures |= measure_rerank(api, options.collection, max(10, rounds // 3))
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, figure in figures.items():
            print(
                f"{name:52} p50 {figure['p50_ms']:7.2f} ms   p95 {figure['p95_ms']:7.2f} ms   × {figure['ratio']:.2f}"
            )
        print("× : p50 over that of the line it is compared with")
    return 0


def measure(
    api: httpx2.Client, raw: httpx2.Client, elasticsearch: str, embedder: str, collection: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Return name -> p50_ms, p95_ms, ratio for each kind of call."""
    vectors = [_vector(raw, embedder, text) for text in QUERIES]
    requests = [
        {
            "collection": collection,
            "query": text,
            "query_vector": vector,
            "decay": {"half_life": "365d"},
            "top_k": 10,
        }
        for text, vector in zip(QUERIES, vectors, strict=True)
    ]
    bodies = []
    for request in requests:
        told = _ok(api.post("/v1/search", json={**request, "explain": True}))["explain"]["requests"]
        lines = [part for ask in told for part in ({"index": ask["path"].split("/")[1]}, ask["body"])]
        bodies.append("\n".join(json.dumps(line) for line in lines) + "\n")
    path = f"{elasticsearch}/_msearch?include_named_queries_score=true"
    kind = {"Content-Type": "application/x-ndjson"}
    pages = _page_bodies(api, collection, requests)
    answered: dict[str, Any] = {}

    def bare(at: int) -> None:
        _ok(raw.post(path, content=bodies[at], headers=kind))

    def bare_page(at: int) -> None:
        bare(at)
        _ok(raw.post(path, content=pages[at], headers=kind))

    def bare_pinned(at: int) -> None:
        index = json.loads(bodies[at].split("\n", 1)[0])["index"]
        pit = _ok(raw.post(f"{elasticsearch}/{index}/_pit?keep_alive=10s"))["id"]
        bare_page(at)
        _ok(raw.request("DELETE", f"{elasticsearch}/_pit", json={"id": pit}))

    def plain(at: int) -> None:
        answered.update(_ok(api.post("/v1/search", json=requests[at])))

    def unpaged(at: int) -> None:
        _ok(api.post("/v1/search", json={**requests[at], "paging": False}))

    def embedding(at: int) -> None:
        # A text that no cache has seen.
        text = f"{QUERIES[at]} {time.monotonic_ns()}"
        _ok(api.post("/v1/search", json={**requests[at], "query": text, "query_vector": None}))

    def explained(at: int) -> None:
        _ok(api.post("/v1/search", json={**requests[at], "explain": True}))

    def highlighted(at: int) -> None:
        _ok(api.post("/v1/search", json={**requests[at], "highlight": True}))

    def deduplicated(at: int) -> None:
        _ok(api.post("/v1/search", json={**requests[at], "dedup": {}}))

    def diverse(at: int) -> None:
        _ok(api.post("/v1/search", json={**requests[at], "mmr": {}}))

    def page(at: int) -> None:
        _ok(api.post("/v1/search", json={"cursor": answered["cursor"]}))

    def asked_why(at: int) -> None:
        _ok(api.post("/v1/why", json={**requests[at], "id": answered["hits"][-1]["id"]}))

    def sixteen(at: int) -> None:
        queries = [
            {"query": QUERIES[i % len(QUERIES)], "query_vector": vectors[i % len(QUERIES)]} for i in range(16)
        ]
        shared = {"collection": collection, "decay": {"half_life": "365d"}, "top_k": 10}
        _ok(api.post("/v1/search", json={**shared, "queries": queries}))

    def one_by_one(at: int) -> None:
        for i in range(16):
            _ok(api.post("/v1/search", json=requests[i % len(QUERIES)]))

    figures: dict[str, dict[str, float]] = {}
    _compare(figures, rounds, ("two bodies raw in one _msearch", bare), [
        ("/v1/search, vector given", plain), ("/v1/search, vector given, paging false", unpaged),
        ("/v1/search, query embedded", embedding),
        ("those two, then the page's documents, raw", bare_page),
        ("the same, a point in time opened and closed, raw", bare_pinned),
    ])  # fmt: skip
    _compare(figures, max(10, rounds // 3), ("/v1/search, again", plain), [
        ("next page", page), ("explain", explained), ("highlights", highlighted), ("dedup", deduplicated), ("mmr", diverse), ("/v1/why", asked_why),
    ])  # fmt: skip
    _compare(figures, max(5, rounds // 10), ("16 single searches", one_by_one), [("a batch of 16", sixteen)])
    return figures


def measure_rerank(api: httpx2.Client, collection: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return name -> figures of a search and the same reranked, at a service whose reranker answers at once."""

    def plain(at: int) -> None:
        _ok(api.post("/v1/search", json={"collection": collection, "query": QUERIES[at]}))

    def reranked(at: int) -> None:
        _ok(api.post("/v1/search", json={"collection": collection, "query": QUERIES[at], "rerank": {}}))

    figures: dict[str, dict[str, float]] = {}
    _compare(figures, rounds, ("/v1/search beside a reranker", plain), [("rerank, 50 candidates", reranked)])
    return figures


def _page_bodies(api: httpx2.Client, collection: str, requests: list[dict[str, Any]]) -> list[str]:
    """Return for each request the lines of `_msearch` that bring its page's documents, as the service asks for them."""
    told = _ok(api.get(f"/v1/collections/{collection}"))
    known = Collection.model_validate({name: told[name] for name in Collection.model_fields if name in told})
    pages = []
    for request in requests:
        ids = [hit["id"] for hit in _ok(api.post("/v1/search", json=request))["hits"]]
        plan = make_plan(Search.model_validate(request), collection=known, now_ms=time.time_ns() // 1_000_000)
        vector = pack_vector(np.asarray(request["query_vector"]))
        body = fetch_body(plan, vector, ids=ids, with_embedding=False)
        pages.append(
            "\n".join(json.dumps(line) for line in ({"index": f"halflife-{collection}"}, body)) + "\n"
        )
    return pages


class _Scores(BaseHTTPRequestHandler):
    """Answers as a reranker does: the share of the query's words that stand in each text."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = set(asked["query"].lower().split())
        results = [
            {"index": at, "relevance_score": len(words & set(text.lower().split())) / len(words)}
            for at, text in enumerate(asked["documents"])
        ]
        body = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the figures are the output."""


@contextlib.contextmanager
def a_reranker() -> Iterator[str]:
    """Serve `_Scores` on a free port of loopback; yield its address."""
    _Scores.wbufsize = -1  # head and body in one packet
    with ThreadingHTTPServer(("127.0.0.1", 0), _Scores) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rerank"
        server.shutdown()


@contextlib.contextmanager
def a_service(elasticsearch: str, embedder: str, reranker: str) -> Iterator[str]:
    """Serve the API in a process of its own beside the running stack, with this reranker; yield its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Scores) as held:
        port = held.server_port
    environment = {
        **os.environ,
        "HALFLIFE_ELASTICSEARCH_URL": elasticsearch,
        "HALFLIFE_EMBEDDING_BASE_URL": embedder,
        "HALFLIFE_RERANK_URL": reranker,
    }
    command = [sys.executable, "-m", "scripts.serving", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_ready(url, process)
            yield url
        finally:
            process.terminate()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx2.TransportError):
            if httpx2.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit("error: the API beside a reranker did not start; `halflife serve` tells why")


def _compare(
    figures: dict[str, dict[str, float]],
    rounds: int,
    base: tuple[str, Callable[[int], None]],
    others: list[tuple[str, Callable[[int], None]]],
) -> None:
    sides = [base, *others]
    taken: dict[str, list[float]] = {name: [] for name, _ in sides}
    for turn in range(rounds + 5):
        for name, call in sides:
            begun = time.perf_counter()
            call(turn % len(QUERIES))
            if turn >= 5:  # the first ones warm caches and the JVM
                taken[name].append((time.perf_counter() - begun) * 1000)
    reference = statistics.median(taken[base[0]])
    for name, _ in sides:
        ordered = sorted(taken[name])
        p50 = statistics.median(ordered)
        figures[name] = {
            "p50_ms": p50, "p95_ms": ordered[int(len(ordered) * 0.95)], "ratio": p50 / reference,
        }  # fmt: skip


def _vector(raw: httpx2.Client, embedder: str, text: str) -> list[float]:
    model = _ok(raw.get(f"{embedder}/models"))["data"][0]["id"]
    answer = _ok(raw.post(f"{embedder}/embeddings", json={"model": model, "input": f"query: {text}"}))
    vector: list[float] = answer["data"][0]["embedding"]
    return vector


def _ok(answer: httpx2.Response) -> Any:
    if answer.status_code != 200:
        raise SystemExit(f"error: {answer.request.url} answered {answer.status_code}: {answer.text[:500]}")
    return answer.json()


if __name__ == "__main__":
    sys.exit(main())
