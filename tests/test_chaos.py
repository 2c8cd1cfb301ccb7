"""Writers, readers and a reindex while things are killed, one short seed; and the proof that the oracle sees losses.

More seeds and three nodes: `./scripts/chaos --seeds 10 --nodes 3`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import chaos
from scripts.node import LocalCluster

pytestmark = [pytest.mark.node, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A node of its own: it is going to be killed."""
    if os.environ.get("HALFLIFE_TEST_SKIP_CHAOS"):
        pytest.skip("HALFLIFE_TEST_SKIP_CHAOS is set")
    with chaos.start_cluster(tmp_path_factory.mktemp("chaos"), nodes=1, say=print) as running:
        yield running


async def test_nothing_acknowledged_is_lost_by_a_reindex_under_faults(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    # This seed kills the reindex, then the node, while another model embeds everything anew, and rolls back at the end.
    verdict = await chaos.run_seed(cluster, tmp_path, seed=125, say=print, rounds=1, faults=2, rate=120)
    print(verdict.line(), verdict.figures())
    assert verdict.acknowledged > 200
    assert verdict.faults == {"kill mover": 1, "kill node": 1}
    assert verdict.moves["run"] == 1
    assert (verdict.lost, verdict.resurrected, verdict.changed, verdict.invisible) == ([], [], [], [])
    assert (verdict.seen.short, verdict.seen.errors) == ([], [])


async def test_the_oracle_sees_what_copy_then_swap_loses(cluster: LocalCluster, tmp_path: Path) -> None:
    verdict = await chaos.run_seed(cluster, tmp_path, seed=1, say=print, rounds=1, broken=True)
    print(verdict.line())
    assert verdict.lost
    assert not verdict.sound
