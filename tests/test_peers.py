"""Peers side by side: LangChain's and ranx's fusion, LangChain's time-weighted memory. Same numbers where they are right.

The peers run as installed; where they go wrong a test shows it, so that nobody takes the difference for a fault of ours.
Imported inside the tests: they are for development only, and slow to load.
"""

import importlib.util
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from app import decay, fusion
from app.collection import Collection
from app.elastic import Cluster
from app.fusion import RankedHit, RankedRoute
from app.ranking import Decay, Fusion
from tests.searching import DAY, NOW_MS, Asker, StandIn, drop_collection, make_collection

Lists = dict[str, list[str]]


def ours(
    lists: Lists, *, weights: dict[str, float] | None = None, rank_constant: float = 60
) -> dict[str, float]:
    """Return key -> fused score, in our order."""
    routes = [
        RankedRoute(name, (weights or {}).get(name, 1.0), [RankedHit(key, 1.0 / at) for at, key in enumerate(keys, 1)])
        for name, keys in lists.items()
    ]  # fmt: skip
    fused = fusion.fuse(routes, fusion=Fusion(rank_constant=rank_constant), window=1000)
    return {hit.key: hit.score for hit in fused}


def random_lists(seed: int, routes: int) -> Lists:
    rng = random.Random(seed)
    return {
        f"r{at}": rng.sample([f"d{n:02d}" for n in range(30)], rng.randint(2, 30)) for at in range(routes)
    }


# --- LangChain's EnsembleRetriever -----------------------------------------------------------------------------------


def langchains(
    lists: Sequence[Sequence[Any]],
    *,
    weights: Sequence[float] | None = None,
    c: int = 60,
    id_key: str | None = None,
) -> list[Any]:
    """Return the documents in the order of LangChain's weighted reciprocal rank."""
    from langchain_classic.retrievers import EnsembleRetriever

    chosen = list(weights or [1.0] * len(lists))
    retriever = EnsembleRetriever.model_construct(retrievers=[], weights=chosen, c=c, id_key=id_key)
    return retriever.weighted_reciprocal_rank([list(each) for each in lists])


def documents_of(keys: Sequence[str], **metadata: Any) -> list[Any]:
    from langchain_core.documents import Document

    return [Document(page_content=f"text of {key}", metadata={"id": key, **metadata}) for key in keys]


@pytest.mark.parametrize("seed", range(5))
def test_langchains_rrf_orders_as_ours_where_scores_differ(seed: int) -> None:
    lists = random_lists(seed, 3)
    weights = {"r0": 0.5, "r1": 0.3, "r2": 0.2}
    scores = ours(lists, weights=weights)
    theirs = langchains(
        [documents_of(keys) for keys in lists.values()], weights=list(weights.values()), id_key="id"
    )
    # They don't tell the scores: but their order has to be one of falling scores as we compute them, and complete.
    told = [scores[document.metadata["id"]] for document in theirs]
    assert {document.metadata["id"] for document in theirs} == set(scores)
    assert all(one >= other - 1e-15 for one, other in itertools.pairwise(told))


def test_langchains_ties_depend_on_the_order_of_its_retrievers() -> None:
    lists: Lists = {"one": ["a", "x"], "two": ["b", "x"]}
    forward = langchains([documents_of(keys) for keys in lists.values()], id_key="id")
    backward = langchains([documents_of(keys) for keys in reversed(lists.values())], id_key="id")
    assert [d.metadata["id"] for d in forward] == ["x", "a", "b"]
    assert [d.metadata["id"] for d in backward] == ["x", "b", "a"]
    assert list(ours(lists)) == list(ours(dict(reversed(lists.items())))) == ["x", "a", "b"]


def test_langchain_takes_two_documents_of_one_text_for_one() -> None:
    from langchain_core.documents import Document

    def same(id_: str) -> Any:
        return Document(page_content="Refund within 30 days", metadata={"id": id_})

    other = Document(page_content="Terms", metadata={"id": "c"})
    by_text = langchains([[same("a"), other], [same("b"), other]])
    assert [document.metadata["id"] for document in by_text] == ["a", "c"], "document b is lost"
    by_id = langchains([[same("a"), other], [same("b"), other]], id_key="id")
    assert [document.metadata["id"] for document in by_id] == ["c", "a", "b"]
    assert list(ours({"one": ["a", "c"], "two": ["b", "c"]})) == ["c", "a", "b"]


def test_langchain_counts_a_duplicate_inside_a_list_twice() -> None:
    chunks = ["b", "a", "a", "a"]
    theirs = langchains([documents_of(chunks)], id_key="id")
    assert [document.metadata["id"] for document in theirs] == ["a", "b"], "3 chunks of a beat the best hit"
    assert 1 / 62 + 1 / 63 + 1 / 64 > 1 / 61
    assert ours({"one": chunks}) == {"b": 1 / 61, "a": 1 / 62}


# --- LangChain's time-weighted memory ------------------------------------------------------------------------------------


def remembering(vectors: dict[str, list[float]], **options: Any) -> tuple[Any, Any]:
    """Return LangChain's retriever over an in-memory store whose relevance is the cosine, and the store."""
    from langchain_classic.retrievers import TimeWeightedVectorStoreRetriever
    from langchain_core.embeddings import Embeddings
    from langchain_core.vectorstores import InMemoryVectorStore

    class Known(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [vectors[text] for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return vectors[text]

    class Store(InMemoryVectorStore):
        def _select_relevance_score_fn(self) -> Callable[[float], float]:
            return lambda cosine: cosine

    store = Store(Known())
    return TimeWeightedVectorStoreRetriever(vectorstore=store, **options), store


@pytest.mark.parametrize(
    "loss, hours, relevance",
    [(0.01, 24, 0.8), (0, 1000, 0.8), (1, 0, 0.8), (1, 5, 0.8), (1e-9, 8760, 0.5), (0.5, 3.5, 0)],
)
def test_memory_scores_are_langchains(loss: float, hours: float, relevance: float) -> None:
    from langchain_core.documents import Document

    retriever, _ = remembering({}, decay_rate=loss, other_score_keys=["importance"])
    # Naive, as LangChain takes it.
    now = datetime(2025, 1, 31)  # noqa: DTZ001
    document = Document(
        page_content="x", metadata={"last_accessed_at": now - timedelta(hours=hours), "importance": 0.3}
    )
    theirs = retriever._get_combined_score(document, relevance, now)
    resolved = decay.resolve(Decay(hourly_loss=loss, field="last_accessed_at"), default_floor=0)
    recency = decay.factor(
        resolved, origin_ms=NOW_MS, moment_ms=NOW_MS - round(hours * 3_600_000), evergreen=False
    )
    assert fusion.additive(relevance, 0.3, recency, {}).score == pytest.approx(theirs, rel=1e-12)


def test_langchains_recency_grows_without_bound_in_the_future_and_divides_by_zero() -> None:
    from langchain_core.documents import Document

    now = datetime(2025, 1, 31)  # noqa: DTZ001
    ahead = Document(page_content="x", metadata={"last_accessed_at": now + timedelta(hours=24)})
    retriever, _ = remembering({}, decay_rate=0.01)
    assert retriever._get_combined_score(ahead, 0.8, now) == pytest.approx(0.99**-24 + 0.8)
    retriever.decay_rate = 1.0
    with pytest.raises(ZeroDivisionError):
        retriever._get_combined_score(ahead, 0.8, now)
    for loss in (0.01, 1):
        resolved = decay.resolve(Decay(hourly_loss=loss), default_floor=0)
        assert decay.factor(resolved, origin_ms=NOW_MS, moment_ms=NOW_MS + DAY, evergreen=False) == 1.0


@pytest.mark.node
async def test_a_memory_that_somebody_else_filled_answers_here_and_not_in_langchain(cluster: Cluster) -> None:
    from langchain_core.documents import Document

    vectors = {"leave": [1.0, 0.0, 0.0], "carry over leave": [0.8, 0.6, 0.0], "parking": [0.0, 1.0, 0.0]}
    retriever, store = remembering(vectors, k=2)
    store.add_documents([Document(page_content=text) for text in vectors])
    assert len(store.similarity_search("leave", k=3)) == 3
    assert retriever.invoke("leave") == [], "its memory is a list in its own process"

    documents = [{"id": text, "text": text, "embedding": vector} for text, vector in vectors.items()]
    collection: Collection = await make_collection(cluster, documents, dims=3)
    try:
        asker = Asker(cluster, collection, StandIn(dims=3, vectors=vectors))
        memory: dict[str, Any] = {
            "decay": {"hourly_loss": 0.01, "field": "last_accessed_at"},
            "fusion": {"method": "additive"},
        }
        answer = await asker.ask("leave", top_k=2, **memory)
        assert [(hit.id, float(hit.score)) for hit in answer.hits] == [  # type: ignore[comparison-overlap]
            ("leave", pytest.approx(1.0)), ("carry over leave", pytest.approx(0.8)),
        ]  # fmt: skip
    finally:
        await drop_collection(cluster, collection)


# --- ranx --------------------------------------------------------------------------------------------------------------

RANX = """
import json, sys, warnings
warnings.simplefilter("ignore")
from ranx import Run, fuse

answers = []
for job in json.load(sys.stdin):
    runs = [Run({"q": scores}) for scores in job["runs"]]
    kind = {"norm": None, "method": "rrf", "params": {"k": job["k"]}} if "k" in job else {"norm": job["norm"], "method": "sum"}
    answers.append({key: float(score) for key, score in fuse(runs=runs, **kind)["q"].items()})
print(json.dumps(answers))
"""


def ranxs(jobs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return ranx's fused scores of each job, all out of one process.

    Its compiler is off: it would take a minute for what Python does at once.
    """
    if importlib.util.find_spec("ranx") is None:
        pytest.skip("ranx is not installed here: its numba has no wheel for this machine")
    done = subprocess.run(
        [sys.executable, "-c", RANX],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return answers


Scores = dict[str, float]


def linear(runs: list[Scores], normalizer: str) -> Scores:
    """Return our linear fusion of the same scores."""
    routes = [
        RankedRoute(f"r{at}", 1.0, [RankedHit(key, score) for key, score in sorted(run.items(), key=lambda kv: (-kv[1], kv[0]))])
        for at, run in enumerate(runs)
    ]  # fmt: skip
    how = Fusion.model_validate({"method": "linear", "normalizer": normalizer})
    return {hit.key: hit.score for hit in fusion.fuse(routes, fusion=how, window=1000)}


def random_runs(seed: int) -> list[Scores]:
    rng = random.Random(seed)
    return [{key: rng.uniform(-3, 30) for key in keys} for keys in random_lists(seed, 3).values()]


SHARED = [{"a": 3.0, "b": 2.0, "c": 1.0}, {"a": 0.2, "b": 0.9, "c": 0.4}]
UNEVEN = [{"good": 9.0, "poor": 1.0}, {"good": 5.0, "poor": 1.0, "stranger": 0.9}]
EQUAL = [{"a": 2.0, "b": 2.0}, {"a": 0.1, "b": 0.2}]
NARROW = [{"a": 2e-10, "b": 1e-10}] * 2
BC_12 = {"r1": ["X", "a", "Y"], "r2": ["b", "c", "Y"]}


@pytest.fixture(scope="module")
def told() -> dict[str, Scores]:
    """What ranx answers to every question of the tests below, asked at once."""
    jobs: dict[str, dict[str, Any]] = {
        f"rrf-{seed}-{k}": {"runs": [{key: 1.0 / at for at, key in enumerate(keys, 1)} for keys in random_lists(seed, 4).values()], "k": k}
        for seed in range(5) for k in (1, 60)
    }  # fmt: skip
    jobs["bc12"] = {
        "runs": [{key: 1 / at for at, key in enumerate(keys, 1)} for keys in BC_12.values()],
        "k": 60,
    }
    for name, runs in (("shared", SHARED), ("uneven", UNEVEN), ("equal", EQUAL), ("narrow", NARROW)):
        jobs |= {f"{name}-{norm}": {"runs": runs, "norm": norm} for norm in ("min-max", "zmuv")}
    jobs |= {f"min-max-{seed}": {"runs": random_runs(seed), "norm": "min-max"} for seed in range(5)}
    return dict(zip(jobs, ranxs(list(jobs.values())), strict=True))


def test_ranxs_rrf_has_our_numbers(told: dict[str, Scores]) -> None:
    for seed in range(5):
        for k in (1, 60):
            mine = ours(random_lists(seed, 4), rank_constant=k)
            assert told[f"rrf-{seed}-{k}"] == pytest.approx(mine, rel=1e-12)
    wanted = {"Y": 2 / 63, "X": 1 / 61, "b": 1 / 61, "a": 1 / 62, "c": 1 / 62}
    assert told["bc12"] == pytest.approx(wanted, rel=1e-12)
    assert ours(BC_12) == pytest.approx(wanted, rel=1e-12)


def test_ranxs_min_max_and_z_scores_have_our_numbers_where_lists_hold_the_same(
    told: dict[str, Scores],
) -> None:
    assert told["shared-min-max"] == pytest.approx(linear(SHARED, "minmax"), rel=1e-12)
    assert told["shared-zmuv"] == pytest.approx(linear(SHARED, "zscore"), rel=1e-9, abs=1e-12)
    for seed in range(5):
        assert told[f"min-max-{seed}"] == pytest.approx(
            linear(random_runs(seed), "minmax"), rel=1e-9, abs=1e-12
        )


def test_ranxs_z_scores_put_an_unfound_document_at_the_mean(told: dict[str, Scores]) -> None:
    # 'stranger' is the worst of the second list and not in the first at all; 'poor' beats it in both.
    theirs, mine = told["uneven-zmuv"], linear(UNEVEN, "zscore")
    assert theirs["stranger"] > theirs["poor"], "absent adds 0, which is the mean of z-scores"
    assert mine["poor"] > mine["stranger"], "absent counts as the least of the list"


def test_ranxs_norms_have_a_unit_of_their_own_for_narrow_scores(told: dict[str, Scores]) -> None:
    assert told["narrow-min-max"] == pytest.approx({"a": 0.2, "b": 0.0}), "a spread below 1e-9 counts as 1e-9"
    assert linear(NARROW, "minmax") == {"a": 2.0, "b": 0.0}
    assert told["narrow-zmuv"] == pytest.approx({"a": 0.1, "b": -0.1})
    assert linear(NARROW, "zscore") == pytest.approx({"a": 2.0, "b": -2.0})


def test_equal_scores_decide_nothing_in_either(told: dict[str, Scores]) -> None:
    # A flat list adds 0 to all there and 1 to all here (found or not), so the other list decides in both.
    assert told["equal-min-max"] == pytest.approx({"a": 0.0, "b": 1.0})
    assert linear(EQUAL, "minmax") == {"b": 2.0, "a": 1.0}
