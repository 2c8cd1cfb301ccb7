"""Fixtures of many tests: one real Elasticsearch for the whole session, one connection per test, what is made with it.

`HALFLIFE_TEST_ELASTICSEARCH_URL` names a node to use; without it a local one is started in a temporary folder.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from app import catalog, names
from app.collection import Collection
from app.elastic import Cluster

if TYPE_CHECKING:
    from tests.fakes import EmbeddingServer

T = TypeVar("T")


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
    from scripts.node import KEEPS_DISK_BLOCKS, LocalNode, ensure_installed

    data: Path = tmp_path_factory.mktemp("elasticsearch")
    with LocalNode(
        ensure_installed(report=print),
        data,
        cluster_name=f"halflife-test-{uuid.uuid4().hex[:8]}",
        settings=KEEPS_DISK_BLOCKS,
    ) as node:
        yield node.url


def run_once(node_url: str, work: Callable[[Cluster], Awaitable[T]]) -> T:
    """Do some work with a connection and an event loop of its own, where no test's are."""

    async def run() -> T:
        connection = Cluster.connect(urls=[node_url], request_timeout_s=60)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


class StandsBefore:
    """Stands before a cluster in its place: whatever a subclass does not do otherwise, the cluster does."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)


async def written(cluster: Cluster, name: str) -> catalog.WriteTarget:
    """The alias by which a collection is written now."""
    target = (await catalog.get(cluster, name)).target
    assert target is not None
    return target


@pytest.fixture
async def cluster(node_url: str) -> AsyncIterator[Cluster]:
    """A connection to the shared node, closed after the test."""
    connection = Cluster.connect(urls=[node_url], request_timeout_s=30, pool_wait_s=60)
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


@pytest.fixture
def server() -> Iterator["EmbeddingServer"]:
    """An embedding server of the usual number of dims, which is `DIMS` where tests name it."""
    from tests.fakes import EmbeddingServer

    with EmbeddingServer() as running:
        yield running


@pytest.fixture
async def made(cluster: Cluster) -> AsyncIterator[Callable[..., Any]]:
    """Make small collections with an asker each, and drop them after the test."""
    from tests.searching import Asker, StandIn, drop_collection, make_collection

    collections: list[Collection] = []

    async def make(
        documents: Sequence[Mapping[str, Any]],
        vectors: Mapping[str, Sequence[float]] | None = None,
        *,
        dims: int = 3,
        reranker: Any = None,
        **options: Any,
    ) -> Asker:
        collections.append(await make_collection(cluster, documents, dims=dims, **options))
        return Asker(cluster, collections[-1], StandIn(dims=dims, vectors=vectors), reranker=reranker)

    yield make
    for collection in collections:
        await drop_collection(cluster, collection)
