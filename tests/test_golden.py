"""Rankings of three judged sets as they were: the first ten ids of each question, nDCG@10 and MRR@10, decay off and on.

Real documents, the packaged model and a real node. A change of ranking shows here as a diff to review:
`pytest tests/test_golden.py --rewrite-golden` writes what is ranked now.
"""

import importlib.util
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app.settings import Settings
from scripts import e5, judged, metrics, sources
from scripts.client import Client
from tests.service import Running, serving

pytest.importorskip("pytrec_eval", reason="judging rankings needs pytrec-eval-terrier")
if importlib.util.find_spec(e5.WEIGHTS_PACKAGE) is None:
    pytest.skip("the packaged weights are not installed here", allow_module_level=True)

pytestmark = [pytest.mark.node, pytest.mark.shared, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"
TOP_K = 10
NOISE = 1e-5
"""Scores nearer than this are one: a cosine changes in its last digit when the node compiles its vector loop."""


@dataclass(frozen=True)
class Golden:
    """A judged set in small: the documents judged for a few questions, and others of the set beside them."""

    name: str
    qrels: str
    questions: int
    documents: int
    decay: Mapping[str, Any]
    as_of: str | None = None


SETS = {
    "English": Golden("cacm", "qrels.tsv", 8, 140, {"half_life": "1825d"}, "1980-01-01"),
    "Chinese": Golden("chronoqa_zh", "qrels.tsv", 20, 120, {"half_life": "365d"}),
    "dated": Golden("rfc_en", "qrels_strict.tsv", 25, 250, {"half_life": "1825d"}, "2024-03-07"),
}


@pytest.fixture(scope="module")
def embedder() -> Iterator[tuple[str, str]]:
    """The address of the packaged model's server, and the kernel it runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.embedder", "--port", "0", "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        told = process.stdout.readline()
        url = next(word for word in told.split() if word.startswith("http://"))
        health = httpx2.get(url.removesuffix("/v1") + "/health", timeout=30).json()
        yield url, health["kernel"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def service(node_url: str, embedder: tuple[str, str]) -> Iterator[Running]:
    settings = Settings(
        elasticsearch_url=node_url,
        elasticsearch_timeout_s=60,
        embedding_base_url=embedder[0],
        embedding_timeout_s=300,
        embedding_query_timeout_s=60,
    )
    with serving(settings) as running:
        yield running


def documents_of(found: judged.JudgedSet, count: int) -> list[dict[str, Any]]:
    """The judged documents of the questions, and the first others of the set up to `count`."""
    corpus = found.corpus
    assert corpus is not None
    wanted = {name for question in found.questions for name in question.grades}
    source = sources.Source(corpus.path, corpus.path.name, corpus.path.stat().st_size, lines=True)
    usable = [item.document for item in sources.read(source, corpus.names) if item.document is not None]
    usable = [document for document in usable if document["id"] in corpus.ids]
    chosen = [document for document in usable if document["id"] in wanted]
    others = [document for document in usable if document["id"] not in wanted]
    # Spread over the set, so that they differ in date and subject.
    step = max(1, len(others) // max(1, count - len(chosen)))
    return [*chosen, *others[::step]][: max(count, len(chosen))]


def ranked(service: Running, node_url: str, golden: Golden, folder: Path) -> dict[str, Any]:
    """What is ranked now, as the golden file holds it, with each hit's score beside the ids."""
    found = judged.read_set(folder, qrels=Path(golden.qrels)).sample(golden.questions, seed=7)
    name = f"golden_{uuid.uuid4().hex[:10]}"
    try:
        documents = documents_of(found, golden.documents)
        answer = service.client.post(
            f"/v1/collections/{name}/documents", json={"documents": documents, "refresh": "true"}, timeout=600
        )
        assert answer.json()["failed"] == 0, answer.text
        # Quantised vectors depend on the segment they lie in, and segments on when a refresh came by.
        httpx2.post(
            f"{node_url}/halflife-{name}/_forcemerge?max_num_segments=1", timeout=120
        ).raise_for_status()
        told: dict[str, Any] = {}
        for label, decay in (("decay off", "off"), ("decay on", dict(golden.decay))):
            hits = ask(service, name, found.questions, decay, golden.as_of)
            rankings = {question: [hit["id"] for hit in page] for question, page in hits.items()}
            figures = metrics.mean(metrics.judge(found.questions, rankings, top_k=TOP_K, depth=TOP_K))
            told[label] = {
                **{figure: round(figures[figure], 4) for figure in (f"ndcg@{TOP_K}", f"mrr@{TOP_K}")},
                "rankings": rankings,
                "scores": {question: [hit["score"] for hit in page] for question, page in hits.items()},
            }
        return told
    finally:
        service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


def ask(
    service: Running, name: str, questions: Sequence[judged.Question], decay: Any, as_of: str | None
) -> dict[str, list[dict[str, Any]]]:
    asked = [{"query": question.text, "as_of": question.as_of or as_of} for question in questions]
    body = {
        "collection": name, "queries": asked, "decay": decay, "top_k": TOP_K,
        "paging": False, "strict": True, "timeout_ms": 60_000, "fields": [],
    }  # fmt: skip
    with Client(service.url) as client:
        answers = client.search(body)["results"]
    return {question.id: answer["hits"] for question, answer in zip(questions, answers, strict=True)}


def untied(ids: Sequence[str], scores: Sequence[float]) -> list[set[str]]:
    """The ranking as groups of equal scores (within `NOISE`), in order: within one, any order is right. The last may be cut by the page."""
    groups: list[set[str]] = []
    for place, name in enumerate(ids):
        if place and abs(scores[place] - scores[place - 1]) < NOISE:
            groups[-1].add(name)
        else:
            groups.append({name})
    return groups


@pytest.mark.parametrize("golden", SETS.values(), ids=SETS.keys())
def test_rankings_are_what_they_were(
    golden: Golden,
    service: Running,
    embedder: tuple[str, str],
    node_url: str,
    shared_data: Path,
    request: pytest.FixtureRequest,
) -> None:
    path = GOLDEN / f"{golden.name}.json"
    found = ranked(service, node_url, golden, shared_data / golden.name)
    if request.config.getoption("--rewrite-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(written(golden, found, embedder[1]), encoding="utf-8")
        return
    held = json.loads(path.read_text(encoding="utf-8"))
    for label in ("decay off", "decay on"):
        now, was = found[label], held[label]
        told = {figure: now[figure] for figure in ("ndcg@10", "mrr@10")}
        if held["kernel"] != embedder[1]:
            # Vectors of the other kernel differ a little, so neighbours may change places.
            assert told == pytest.approx({figure: was[figure] for figure in told}, abs=0.05), label
            continue
        moved = {
            question: (was["rankings"].get(question), ids)
            for question, ids in now["rankings"].items()
            if not same(was["rankings"].get(question, []), ids, now["scores"][question])
        }
        assert moved == {}, f"{label}: question -> (as it was, as it is); review it, then --rewrite-golden"
        assert told == pytest.approx({figure: was[figure] for figure in told}, abs=0.0005), label


def same(was: Sequence[str], now: Sequence[str], scores: Sequence[float]) -> bool:
    """Tell whether two rankings are one, documents of equal score in any order."""
    place = 0
    for group in untied(now, scores):
        held = set(was[place : place + len(group)])
        last = place + len(group) == len(now)
        if held != group and not (last and len(group) > 1 and len(held) == len(group)):
            return False
        place += len(group)
    return place == len(was)


def written(golden: Golden, found: Mapping[str, Any], kernel: str) -> str:
    """The golden file: one line for each question, so that a diff shows which ones changed."""
    head = {
        "set": golden.name,
        "qrels": golden.qrels,
        "as_of": golden.as_of or "each question's own",
        "decay": dict(golden.decay),
        "kernel": kernel,
    }
    lines = [
        f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}," for name, value in head.items()
    ]
    for label in ("decay off", "decay on"):
        part = found[label]
        lines.append(f'  "{label}": {{')
        lines += [f'    "{figure}": {part[figure]},' for figure in ("ndcg@10", "mrr@10")]
        lines.append('    "rankings": {')
        rows = [
            f"      {json.dumps(question)}: {json.dumps(ids)}" for question, ids in part["rankings"].items()
        ]
        lines += [f"{row}," for row in rows[:-1]] + rows[-1:]
        lines += ["    }", "  }," if label == "decay off" else "  }"]
    return "\n".join(["{", *lines, "}"]) + "\n"


def test_same_knows_ties_from_changes() -> None:
    assert same(["a", "b", "c"], ["a", "c", "b"], [3, 2, 2])
    assert not same(["a", "b", "c"], ["b", "a", "c"], [3, 2, 2])
    assert not same(["a", "b", "c"], ["a", "b", "x"], [3, 2, 1])
    assert not same(["a", "b"], ["a", "b", "c"], [3, 2, 1])
