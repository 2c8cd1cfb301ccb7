"""A service, callers and a reindex while things are killed, one short seed; and the proof that the oracle sees losses.

More seeds, on one node and on three: `./scripts/chaos --seeds 10`.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts import chaos
from scripts.chaos import Run, Verdict
from scripts.node import LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A node of its own: it is going to be killed."""
    if os.environ.get("HALFLIFE_TEST_SKIP_CHAOS"):
        pytest.skip("HALFLIFE_TEST_SKIP_CHAOS is set")
    with chaos.start_cluster(tmp_path_factory.mktemp("chaos"), nodes=1, say=print) as running:
        yield running


@pytest.mark.node
@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_by_a_reindex_under_faults(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    script = ("refuse items", "kill service", "kill reindex", "kill node")
    verdict = await chaos.run_seed(
        cluster, tmp_path, seed=1, say=print, rounds=1, rate=150, script=script,
        change={"--embedding-model": "hash-12"}, ending="rollback",
    )  # fmt: skip
    print(verdict.line(), *verdict.figures(), sep="\n")
    assert verdict.acknowledged > 200
    assert set(verdict.kinds) == {"upsert", "revise", "count", "delete", "patch"}
    assert verdict.faults == dict.fromkeys(script, 1)
    assert (verdict.moves["run"], verdict.moves["rollback"]) == (1, 1)
    assert (verdict.lost, verdict.resurrected, verdict.changed, verdict.invisible) == ([], [], [], [])
    assert (verdict.seen.short, verdict.seen.stale, verdict.seen.errors) == ([], [], [])


@pytest.mark.node
@pytest.mark.slow
async def test_the_oracle_sees_what_copy_then_swap_loses(cluster: LocalCluster, tmp_path: Path) -> None:
    verdict = await chaos.run_seed(cluster, tmp_path, seed=1, say=print, rounds=1, broken=True)
    print(verdict.line())
    assert verdict.lost
    assert not verdict.sound


# --- the oracle itself, on logs and documents made up ------------------------------------------------------------------


def judged(
    id_: str, log: Sequence[tuple[str, str | None, int | None]], stored: tuple[int, str | None], **more: Any
) -> Verdict:
    """Judge one document. `log`: (kind, text, version acknowledged or None where nobody heard)."""
    asked = chaos.Asked()
    for kind, text, version in log:
        if kind == "patch":
            asked.patches += version is None
        else:
            asked.tries[text] += 1
            asked.heard[text] += version is not None
        if version is not None:
            count = more.get("counts", {}).get(version)
            revision = more.get("revisions", {}).get(version)
            asked.acknowledged.append(chaos.Ack(version, kind, text, "me", revision, count))
    version, text = stored
    source = {"text": text, "author": more.get("author", "me"), **more.get("source", {})}
    run = Run.__new__(Run)
    run.verdict = Verdict()
    run.judge_one(id_, asked, {"found": True, "_version": version, "_source": source}, text is not None)
    return run.verdict


@pytest.mark.parametrize(
    "log, stored, found",
    [
        ([("upsert", "a", 1)], (1, "a"), ""),
        ([("upsert", "a", 2)], (1, "a"), "lost"),
        ([("upsert", "a", 1), ("upsert", "b", 2)], (2, "a"), "changed"),
        ([("upsert", "a", 1), ("upsert", "b", 2)], (3, "a"), "changed"),
        ([("upsert", "a", 1), ("upsert", "b", None)], (2, "b"), ""),
        ([("upsert", "a", 1), ("upsert", "b", None)], (1, "b"), "changed"),
        ([("upsert", "a", 1)], (2, "z"), "changed"),
        ([("upsert", "a", 1), ("delete", None, 2)], (3, "a"), "resurrected"),
        ([("upsert", "a", 1), ("delete", None, 2)], (2, None), ""),
        ([("upsert", "a", 1), ("delete", None, None)], (2, None), ""),
        ([("upsert", "a", 1), ("delete", None, 2), ("upsert", "b", 3)], (4, None), "changed"),
        ([("upsert", "a", 1), ("patch", "", 2)], (2, "a"), ""),
        ([("upsert", "a", 1), ("patch", "", None)], (2, "a"), ""),
        ([("upsert", "a", 1), ("upsert", "b", 2), ("patch", "", 3)], (3, "a"), "changed"),
    ],
)  # fmt: skip
def test_the_oracle_tells_what_became_of_a_document(
    log: Sequence[tuple[str, str | None, int | None]], stored: tuple[int, str | None], found: str
) -> None:
    verdict = judged("d1", log, stored)
    told = [name for name in ("lost", "resurrected", "changed", "invisible") if getattr(verdict, name)]
    assert told == ([found] if found else [])


def test_the_oracle_sees_a_lost_patch_a_lost_revision_and_a_lost_step() -> None:
    log = [("upsert", "a", 1), ("patch", "", 2)]
    assert judged("d1", log, (2, "a"), author="another").changed
    revised = [("revise", "a", 7)]
    assert judged("v1", revised, (7, "a"), revisions={7: 7}, source={"revision": 6}).lost
    assert not judged("v1", revised, (7, "a"), revisions={7: 7}, source={"revision": 7}).lost
    steps = [("count", "a", 2), ("count", "b", 3)]
    assert judged("c1", steps, (3, "b"), counts={2: 1, 3: 1}, source={"metadata": {"n": 1}}).lost
    assert not judged("c1", steps, (3, "b"), counts={2: 1, 3: 2}, source={"metadata": {"n": 2}}).lost


def test_the_last_line_is_the_count() -> None:
    verdict = Verdict(acknowledged=12, lost=["a"], changed=["b", "c"])
    assert verdict.line() == "acknowledged=12 lost=1 resurrected=0 changed=2"
    assert not verdict.sound
