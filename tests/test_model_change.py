"""A collection changes its embedding model, with other dims, while a running service reads and writes it."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from app.settings import EmbeddingModel, Settings
from tests.conftest import ROOT
from tests.fakes import EmbeddingServer
from tests.service import Running, serving

pytestmark = pytest.mark.node
OLD_DIMS, NEW_DIMS = 8, 12


@pytest.fixture
def servers() -> Iterator[tuple[EmbeddingServer, EmbeddingServer]]:
    with EmbeddingServer(dims=OLD_DIMS) as old, EmbeddingServer(dims=NEW_DIMS) as new:
        yield old, new


@pytest.fixture
def service(node_url: str, servers: tuple[EmbeddingServer, EmbeddingServer]) -> Iterator[Running]:
    old, new = servers
    settings = Settings(
        elasticsearch_url=node_url,
        elasticsearch_timeout_s=60,
        embedding_base_url=old.base_url,
        embedding_model="old",
        embedding_query_prefix="",
        embedding_document_prefix="",
        embedding_query_timeout_s=20,
        embedding_models={"new": EmbeddingModel(url=new.base_url, model="served-so")},
    )
    with serving(settings) as running:
        yield running


def test_a_collection_is_made_with_any_of_the_models(service):
    client, name = service.client, f"models_{uuid.uuid4().hex[:10]}"
    try:
        made = client.put(f"/v1/collections/{name}", json={"model": "new"}).json()
        assert (made["model"], made["dims"]) == ("new", NEW_DIMS)
        stored = client.post(
            f"/v1/collections/{name}/documents",
            json={"documents": [{"id": "a", "text": "words"}], "refresh": "wait_for"},
        )
        assert stored.json()["items"][0]["status"] == "created", stored.text
        asked = {"collection": name, "query": "words", "routes": [{"kind": "vector"}]}
        found = client.post("/v1/search", json=asked).json()
        assert [hit["relevance"] for hit in found["hits"]] == [pytest.approx(1, abs=1e-3)]
        assert not found["degraded"]
        other = client.put(f"/v1/collections/{name}", json={"model": "old"})
        assert other.status_code == 409
        assert other.json()["command"] == f"halflife reindex {name} --embedding-model old"
        unknown = client.put(f"/v1/collections/{name}x", json={"model": "none"})
        assert (unknown.status_code, unknown.json()["field"]) == (422, "model")
        wrong = client.put(f"/v1/collections/{name}x", json={"model": "new", "dims": 3})
        assert (wrong.status_code, wrong.json()["field"]) == (422, "dims")
    finally:
        client.delete(f"/v1/collections/{name}", params={"confirm": name})


def halflife(node_url: str, old: EmbeddingServer, new: EmbeddingServer, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HALFLIFE_")}
    environment |= {
        "HALFLIFE_ELASTICSEARCH_URL": node_url,
        "HALFLIFE_EMBEDDING_BASE_URL": old.base_url,
        "HALFLIFE_EMBEDDING_MODEL": "old",
        "HALFLIFE_EMBEDDING_QUERY_PREFIX": "",
        "HALFLIFE_EMBEDDING_DOCUMENT_PREFIX": "",
        "HALFLIFE_EMBEDDING_MODELS": json.dumps({"new": {"url": new.base_url, "model": "served-so"}}),
    }
    done = subprocess.run(
        [sys.executable, "-m", "scripts.cli", *arguments],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Traffic:
    """One reader, one writer and one that turns pages, until they are told to stop; what went wrong is kept."""

    def __init__(self, client: httpx2.Client, collection: str) -> None:
        self._client, self._collection = client, collection
        self._stop = threading.Event()
        self.faults: list[Any] = []
        self.written = 0
        self.read = 0
        self._threads = [threading.Thread(target=work) for work in (self._reads, self._writes, self._pages)]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _search(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post("/v1/search", json=body)
        told = answer.json()
        if answer.status_code != 200 or told["degraded"] or told["warnings"]:
            self.faults.append(told)
        return dict(told)

    def _reads(self) -> None:
        while not self._stop.is_set():
            told = self._search(
                {"collection": self._collection, "query": "words number 5", "routes": [{"kind": "vector"}]}
            )
            if told.get("hits", [{}])[0].get("id") != "d5":
                self.faults.append(told)
            self.read += 1
            time.sleep(0.02)

    def _pages(self) -> None:
        while not self._stop.is_set():
            told = self._search({"collection": self._collection, "query": "words number 7", "top_k": 3})
            for _ in range(3):
                time.sleep(0.3)
                if not told.get("cursor"):
                    break
                told = self._search({"cursor": told["cursor"]})

    def _writes(self) -> None:
        while not self._stop.is_set():
            document = {"id": f"w{self.written}", "text": f"written later {self.written}"}
            answer = self._client.post(
                f"/v1/collections/{self._collection}/documents", json={"documents": [document]}
            )
            if answer.status_code != 200 or answer.json()["items"][0]["status"] != "created":
                self.faults.append(answer.json())
            self.written += 1
            time.sleep(0.05)


def test_reads_and_writes_go_on_through_a_change_of_model_and_back(node_url, service, servers):
    old, new = servers
    name = f"models_{uuid.uuid4().hex[:10]}"
    client = service.client
    try:
        documents = [{"id": f"d{n}", "text": f"words number {n}"} for n in range(40)]
        stored = client.post(
            f"/v1/collections/{name}/documents", json={"documents": documents, "refresh": "wait_for"}
        )
        assert stored.json()["failed"] == 0
        assert client.get(f"/v1/collections/{name}").json()["model"] == "old"
        with Traffic(client, name) as traffic:
            halflife(node_url, old, new, "reindex", name, "--embedding-model", "new", "--yes")
            moved = traffic.written
            while traffic.written < moved + 20:
                time.sleep(0.1)
        assert traffic.faults == []
        time.sleep(5.1)  # what is remembered of a collection
        found = client.get(f"/v1/collections/{name}").json()
        assert (found["model"], found["dims"]) == ("new", NEW_DIMS)
        client.post(
            f"/v1/collections/{name}/documents",
            json={"documents": [{"id": "last", "text": "z"}], "refresh": "wait_for"},
        )
        assert client.get(f"/v1/collections/{name}").json()["documents"] == 41 + traffic.written
        assert {seen.body["model"] for seen in new.requests} == {"served-so"}
        with Traffic(client, name) as traffic:
            halflife(node_url, old, new, "reindex", name, "--rollback", "--yes")
            moved = traffic.written
            while traffic.written < moved + 20:
                time.sleep(0.1)
        # The writer counts from 0 again: what is there already is updated or unchanged, which is no fault here.
        faults = [fault for fault in traffic.faults if "items" not in fault or fault["failed"]]
        # A rollback drops the index that it leaves, and with it the pages that were being turned there.
        assert [fault for fault in faults if not fault.get("type", "").endswith("cursor-expired")] == []
        found = client.get(f"/v1/collections/{name}").json()
        assert (found["model"], found["dims"]) == ("old", OLD_DIMS)
    finally:
        client.delete(f"/v1/collections/{name}", params={"confirm": name})
