"""Backup as docs/running.md has it: a snapshot of a collection, its deletion, and its return with every name it had."""

import uuid
from pathlib import Path
from typing import Any

import httpx2
import pytest

from app import catalog, names
from app.errors import NotFound
from tests.searching import make_collection

pytestmark = pytest.mark.node


async def test_a_restored_collection_is_what_it_was(cluster, node_url, unique, tmp_path: Path):
    async with httpx2.AsyncClient(base_url=node_url, timeout=60) as client:
        settings = (await client.get("/_nodes/settings?filter_path=nodes.*.settings.path.repo")).json()
        repos = [each["settings"]["path"]["repo"] for each in settings["nodes"].values()]
        folder = repos[0][0] if isinstance(repos[0], list) else repos[0]
        repository = f"backup-{uuid.uuid4().hex[:8]}"
        made = await client.put(
            f"/_snapshot/{repository}",
            json={"type": "fs", "settings": {"location": f"{folder}/{repository}"}},
        )
        assert made.status_code == 200, made.text
        name = unique("backup")
        given: list[dict[str, Any]] = [
            {"id": "a", "text": "kept", "embedding": [1, 0, 0]},
            {"id": "b", "text": "gone", "raw": {"deleted": True}},
        ]
        collection = await make_collection(cluster, given, dims=3, name=name)
        before = await cluster.resolve_aliases(names.read_alias(name), names.index_pattern(name))
        try:
            taken = await client.put(
                f"/_snapshot/{repository}/one?wait_for_completion=true",
                json={"indices": [f"halflife-{name}-*"], "include_global_state": False},
            )
            assert taken.json()["snapshot"]["state"] == "SUCCESS", taken.text
            await catalog.delete(cluster, name)
            with pytest.raises(NotFound):
                await catalog.get(cluster, name)
            restored = await client.post(
                f"/_snapshot/{repository}/one/_restore?wait_for_completion=true",
                json={
                    "indices": f"halflife-{name}-*",
                    "include_aliases": True,
                    "include_global_state": False,
                },
            )
            assert restored.status_code == 200, restored.text
            assert (await catalog.get(cluster, name)).collection == collection
            # The read alias' filter with them: a tombstone stays hidden.
            assert await cluster.resolve_aliases(names.read_alias(name), names.index_pattern(name)) == before
            assert await cluster.count(names.read_alias(name)) == 1
        finally:
            await client.delete(f"/_snapshot/{repository}/one")
            await client.delete(f"/_snapshot/{repository}")
