"""Some fast rows of the fault table, on a real node; and what the table is made with.

All rows: `./scripts/faults`.
"""

import asyncio
import gc
import json
import warnings
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from scripts import faults
from scripts.faults import Finding
from scripts.faulty import Embeddings, Proxy, answer, misbehaving
from scripts.node import LocalNode
from scripts.rig import Rig, percentile

FAST = ("disk-full", "half-bad-bulks", "big-bodies", "hostile-input", "filter-injection")


class SharedNode(LocalNode):
    """The session's node, which other tests use too: never stopped here."""

    def __init__(self, url: str) -> None:
        self.http_port = urlsplit(url).port


@pytest.mark.node
@pytest.mark.slow
async def test_fast_rows_meet_their_targets(node_url: str, tmp_path: Path) -> None:
    if urlsplit(node_url).hostname not in ("127.0.0.1", "localhost"):
        pytest.skip("needs a node on loopback, without keys")
    async with Rig(tmp_path, seed=1, say=print, node=SharedNode(node_url)) as rig:
        found = await faults.run(rig, FAST, say=print)
    assert {finding.row.partition(" ")[0] for finding in found} == set(FAST)
    assert [finding for finding in found if not finding.ok] == []


def test_rows_are_chosen_by_how_they_begin() -> None:
    assert faults.chosen_rows([]) == list(faults.ROWS)
    assert faults.chosen_rows(["node-", "disk"]) == ["node-killed", "node-stopped", "disk-full"]
    with pytest.raises(ValueError, match="there is no row 'moon'"):
        faults.chosen_rows(["moon"])


def test_the_table_shows_a_failure_and_keeps_its_cells() -> None:
    table = faults.table(
        [Finding("a", "b", "c", "d | e", ok=True), Finding("f", "g", "h", "i", ok=False)]
    ).splitlines()
    assert table[2:] == [r"| a | b | c | d \| e | ok |", "| f | g | h | i | **FAIL** |"]


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert percentile([1.0] * 19 + [9.0], 0.95) == 1.0
    assert percentile([1.0] * 18 + [9.0, 9.0], 0.95) == 9.0


async def test_a_proxy_refuses_the_share_that_it_is_told_and_every_second_item() -> None:
    async with (
        Embeddings(dims=4) as far,
        Proxy(("127.0.0.1", far.port), seed=5) as proxy,
        httpx2.AsyncClient(base_url=proxy.url, trust_env=False) as client,
    ):
        body = {"input": ["a b"], "model": "m", "encoding_format": "float"}
        honest = await client.post("/v1/embeddings", json=body)
        assert len(honest.json()["data"][0]["embedding"]) == 4
        proxy.refuse = 0.3
        statuses = [(await client.post("/v1/embeddings", json=body)).status_code for _ in range(200)]
    assert set(statuses) == {200, 429}
    assert 40 <= statuses.count(429) <= 80
    assert proxy.refused == statuses.count(429)
    assert far.total == 201 - proxy.refused


async def test_a_proxy_lets_go_of_a_node_that_hung_up_between_two_requests() -> None:
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(200, b"{}"))
        await writer.drain()
        writer.close()

    with warnings.catch_warnings():
        # A writer that is collected while it is open warns.
        warnings.simplefilter("error")
        async with await asyncio.start_server(once, "127.0.0.1", 0) as node:
            port = node.sockets[0].getsockname()[1]
            async with (
                Proxy(("127.0.0.1", port)) as proxy,
                httpx2.AsyncClient(base_url=proxy.url, trust_env=False) as client,
            ):
                for _ in range(3):
                    assert (await client.get("/")).json() == {}
                    # The end of file arrives with the loop's next turns.
                    await asyncio.sleep(0.05)
        gc.collect()
    assert connections == 3


async def test_a_far_end_misbehaves_for_a_block() -> None:
    async with Embeddings(dims=4) as far, httpx2.AsyncClient(base_url=far.url, trust_env=False) as client:
        body = {"input": ["a", "b"], "model": "m"}
        async with misbehaving(far, mode="wrong count"):
            assert len((await client.post("/", json=body)).json()["data"]) == 1
        async with misbehaving(far, mode="garbage"):
            with pytest.raises(json.JSONDecodeError):
                (await client.post("/", json=body)).json()
        async with misbehaving(far, poison={"b"}):
            assert (await client.post("/", json=body)).status_code == 400
        assert len((await client.post("/", json=body)).json()["data"]) == 2
