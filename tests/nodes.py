"""Fixtures that need a real Elasticsearch: one node for the whole test session, one connection per test.

`HALFLIFE_TEST_ELASTICSEARCH_URL` names a node to use; without it a local one is started in a temporary folder.
"""

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from app import names
from app.elastic import Cluster


def pytest_configure(config: pytest.Config) -> None:
    """Let bodies over 1 MB through: aiohttp warns of them, and copying one takes it about a millisecond."""
    config.addinivalue_line("filterwarnings", "ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture(scope="session")
def node_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real node that all tests of the session share."""
    given = os.environ.get("HALFLIFE_TEST_ELASTICSEARCH_URL")
    if given:
        yield given
        return
    from scripts.node import LocalNode, ensure_installed

    data: Path = tmp_path_factory.mktemp("elasticsearch")
    with LocalNode(
        ensure_installed(report=print), data, cluster_name=f"halflife-test-{uuid.uuid4().hex[:8]}"
    ) as node:
        yield node.url


@pytest.fixture
async def cluster(node_url: str) -> AsyncIterator[Cluster]:
    """A connection to the shared node, closed after the test."""
    connection = Cluster.connect(urls=[node_url], request_timeout_s=30)
    yield connection
    await connection.close()


@pytest.fixture
async def unique(cluster: Cluster) -> AsyncIterator[Callable[[str], str]]:
    """Make collection names that no other test uses; what was made under them is deleted after the test."""
    made: list[str] = []

    def name(word: str = "test") -> str:
        made.append(f"{word}_{uuid.uuid4().hex[:10]}")
        return made[-1]

    yield name
    for collection in made:
        aliases = await cluster.resolve_index(names.read_alias(collection))
        indices = await cluster.resolve_index(names.index_pattern(collection))
        await cluster.delete_indices(sorted({*aliases, *indices}))
