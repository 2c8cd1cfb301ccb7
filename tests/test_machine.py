"""The API against a model of it: Hypothesis writes, changes, deletes and reads in any order on a real node.

The model knows what is stored, under which version; each answer must agree with it. `HALFLIFE_TEST_CASES` multiplies the
number of runs.
"""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from app.settings import Settings
from tests.fakes import EmbeddingServer
from tests.service import serving

pytestmark = pytest.mark.node
TIMES = int(os.environ.get("HALFLIFE_TEST_CASES", "1"))
IDS = st.sampled_from(["a", "b", "c", "d/e"])
LANGS = st.sampled_from(["en", "zh"])
BORN = {"2024-01-01": 0, "2025-01-01": 1, "2026-01-01": 2}


@pytest.fixture(scope="module")
def client(node_url: str) -> Iterator[httpx2.Client]:
    with EmbeddingServer(dims=16) as embedding:
        chosen = Settings(
            elasticsearch_url=node_url,
            elasticsearch_timeout_s=60,
            embedding_base_url=embedding.base_url,
            embedding_model="far-end",
            embedding_dims=16,
        )
        with serving(chosen) as running:
            yield running.client


def test_the_api_agrees_with_its_model(client: httpx2.Client):
    collection = f"machine_{uuid.uuid4().hex[:8]}"
    url = f"/v1/collections/{collection}"
    documents = f"{url}/documents"

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            assert client.put(url).status_code == 200
            gone = client.post(f"{documents}/delete", json={"delete_all": True, "refresh": "true"})
            assert gone.status_code == 200, gone.text
            self.stored: dict[str, dict[str, Any]] = {}

        def items(self, method: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
            answer = client.request(method, path, json={**body, "refresh": "true"})
            assert answer.status_code == 200, answer.text
            return answer.json()["items"]

        @rule(name=IDS, lang=LANGS, born=st.sampled_from(sorted(BORN)), evergreen=st.booleans())
        def upsert(self, name: str, lang: str, born: str, evergreen: bool) -> None:
            given = {"text": f"leave {name}", "lang": lang, "creation_time": born, "evergreen": evergreen}
            [item] = self.items("POST", documents, {"documents": [{"id": name, **given}]})
            before = self.stored.get(name)
            same = before is not None and before["given"] == given
            assert item["status"] == ("created" if before is None else "unchanged" if same else "updated")
            if before is not None:
                assert item["version"] == before["version"] if same else item["version"] > before["version"]
            self.stored[name] = {"given": given, "version": item["version"]}

        @rule(name=IDS, lang=LANGS)
        def patch(self, name: str, lang: str) -> None:
            [item] = self.items("PATCH", documents, {"documents": [{"id": name, "lang": lang}]})
            before = self.stored.get(name)
            if before is None:
                assert item["status"] == "not_found"
                return
            assert item["status"] in ("updated", "unchanged")
            assert item["version"] >= before["version"]
            self.stored[name] = {"given": {**before["given"], "lang": lang}, "version": item["version"]}

        @rule(name=IDS)
        def delete(self, name: str) -> None:
            [item] = self.items("POST", f"{documents}/delete", {"ids": [name]})
            assert item["status"] == ("deleted" if self.stored.pop(name, None) else "not_found")

        @rule(lang=LANGS)
        def delete_by_filter(self, lang: str) -> None:
            answer = client.post(f"{documents}/delete", json={"filter": {"lang": lang}, "refresh": "true"})
            gone = [name for name, each in self.stored.items() if each["given"]["lang"] == lang]
            assert answer.json()["deleted"] == len(gone), answer.text
            for name in gone:
                del self.stored[name]

        @rule(name=IDS)
        def get(self, name: str) -> None:
            answer = client.get(f"{documents}/{name}")
            assert answer.status_code == (200 if name in self.stored else 404), answer.text
            if name in self.stored:
                told, known = answer.json(), self.stored[name]
                assert (told["version"], told["lang"]) == (known["version"], known["given"]["lang"])

        @rule(size=st.integers(1, 3))
        def list_all(self, size: int) -> None:
            found: list[str] = []
            page = client.get(documents, params={"size": size}).json()
            while True:
                found += [each["id"] for each in page["documents"]]
                if page["cursor"] is None:
                    break
                page = client.get(documents, params={"cursor": page["cursor"]}).json()
            assert found == sorted(self.stored)

        @rule(lang=LANGS, until=st.sampled_from(sorted(BORN)))
        def search(self, lang: str, until: str) -> None:
            body = {
                "collection": collection, "query": "leave", "filter": {"lang": lang}, "as_of": f"{until}T12:00:00Z",
                "routes": [{"kind": "text"}], "decay": "off",
            }  # fmt: skip
            answer = client.post("/v1/search", json=body)
            assert answer.status_code == 200, answer.text
            assert {hit["id"] for hit in answer.json()["hits"]} == {
                name
                for name, each in self.stored.items()
                if each["given"]["lang"] == lang and each["given"]["creation_time"] <= until
            }

    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=12 * TIMES, stateful_step_count=15, derandomize=True, database=None, deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    finally:
        client.delete(url, params={"confirm": collection})
