"""The API against a model of it: Hypothesis writes, changes, deletes and reads in any order on a real node.

The model knows what is stored, under which version and revision, and what searches may not see yet; each answer must
agree with it. `HALFLIFE_TEST_CASES` multiplies the number of runs, which are then others each time.
"""

import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
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
BORN = st.sampled_from(["2024-01-01", "2025-01-01", "2026-01-01", None])
STARTS = st.sampled_from([None, None, "2024-06-01"])
ENDS = st.sampled_from([None, None, "2025-06-01"])
MOMENTS = st.sampled_from([
    "2024-01-01", "2024-05-31T23:59:59.999Z", "2024-06-01", "2025-01-01", "2025-05-31T23:59:59.999Z", "2025-06-01",
    "2026-01-31",
])  # fmt: skip
"""Around the moments at which documents are made, begin to be true and end to be."""
REFRESH = st.sampled_from(["false", "true", "true", "wait_for"])
GUARDS = st.sampled_from([None, None, "if_version", "other_version", "newer", "same", "older"])
FIELDS = ("lang", "creation_time", "evergreen", "start_date", "end_date")
DAY = timedelta(days=1)
HALF_LIFE = 365 * DAY
FLOOR = 0.2


@dataclass
class Stored:
    """A document as it must be stored."""

    given: dict[str, Any]
    version: int
    revision: int | None = None
    last_accessed_at: str | None = None


@dataclass
class Model:
    """What one collection must hold."""

    stored: dict[str, Stored] = field(default_factory=dict)
    graves: dict[str, Stored] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)
    """Changed since the last refresh: searches may see them as they were."""

    def wrote(self, name: str, refresh: str) -> None:
        """Note an acknowledged write, or one that found what it wanted there already; one shard shows all at once."""
        if refresh == "false":
            self.unseen.add(name)
        else:
            self.unseen.clear()


def instant(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def true_at(each: Stored, moment: str) -> bool:
    """Tell whether a search as of the moment may find the document."""
    given, at = each.given, instant(moment)
    born, start, end = (given[name] for name in ("creation_time", "start_date", "end_date"))
    return (
        (born is None or instant(born) <= at)
        and (start is None or instant(start) <= at)
        and (end is None or at < instant(end))
    )


def decay_factor(each: Stored, moment: str, by: str) -> float:
    """Return floor + (1 - floor) * 2^(-age / half_life); what was never read is as old as it is, the undated get the floor."""
    times = [each.last_accessed_at] if by == "last_accessed_at" else []
    told = next((value for value in (*times, each.given["creation_time"]) if value is not None), None)
    if each.given["evergreen"]:
        return 1.0
    if told is None:
        return FLOOR
    age = max(timedelta(0), instant(moment) - instant(told))
    return FLOOR + (1 - FLOOR) * 2 ** (-(age / HALF_LIFE))


@pytest.fixture(scope="module")
def client(node_url: str) -> Iterator[httpx2.Client]:
    with EmbeddingServer(dims=16) as embedding:
        chosen = Settings(
            elasticsearch_url=node_url,
            elasticsearch_timeout_s=60,
            embedding_base_url=embedding.base_url,
            embedding_query_timeout_s=60,
            embedding_model="far-end",
            embedding_dims=16,
            auto_create_collections=False,
        )
        with serving(chosen) as running:
            yield running.client


def test_the_api_agrees_with_its_model(client: httpx2.Client):
    collection = f"machine_{uuid.uuid4().hex[:8]}"
    url = f"/v1/collections/{collection}"
    documents = f"{url}/documents"
    options = {"refresh_interval": "200ms"}
    reads = iter(range(10**9))

    def answered(method: str, path: str, status: int = 200, **more: Any) -> Any:
        answer = client.request(method, path, **more)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            answered("PUT", url, json=options)
            answered("POST", f"{documents}/delete", json={"delete_all": True, "refresh": "true"})
            self.model = Model()
            # What was deleted before leaves tombstones, whose versions and revisions count: begin with other ids.
            self.run = uuid.uuid4().hex[:6]

        def id(self, name: str) -> str:
            return f"{self.run}-{name}"

        def item(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            [item] = answered(method, path, json=body)["items"]
            return item

        # --- writes

        @rule(
            name=IDS, lang=LANGS, born=BORN, evergreen=st.booleans(), start=STARTS, end=ENDS, guard=GUARDS, refresh=REFRESH
        )  # fmt: skip
        def upsert(
            self, name: str, lang: str, born: str | None, evergreen: bool, start: str | None, end: str | None,
            guard: str | None, refresh: str,
        ) -> None:  # fmt: skip
            values = dict(zip(FIELDS, (lang, born, evergreen, start, end), strict=True))
            before, grave = self.model.stored.get(name), self.model.graves.get(name)
            guards, revision, refused = {}, None, False
            if guard in ("if_version", "other_version"):
                version = before.version if before else grave.version if grave else 1
                guards = {"if_version": version + (guard == "other_version")}
                if before is None and guard == "if_version":
                    return  # whether a tombstone's version names a document is nobody's business
                refused = guard == "other_version"
            elif guard is not None:
                known = (before or grave or Stored({}, 0)).revision
                revision = max(1, (known or 5) + {"newer": 1, "same": 0, "older": -1}[guard])
                guards = {"revision": revision}
                refused = known is not None and (revision < known or (before is None and revision <= known))
            sent = {key: value for key, value in values.items() if value is not None}
            body = {"id": self.id(name), "text": "annual leave", **sent, **guards}
            item = self.item("POST", documents, {"documents": [body], "refresh": refresh})
            if refused:
                assert item["status"] == "conflict"
                return
            if before is not None and revision is not None and revision == before.revision:
                assert (item["status"], item["version"]) == ("unchanged", before.version)
                self.model.wrote(name, refresh if refresh != "false" or name in self.model.unseen else "none")
                return
            same = before is not None and before.given == values and before.last_accessed_at is None
            same = same and before is not None and before.revision == revision
            assert item["status"] == ("created" if before is None else "unchanged" if same else "updated")
            older = max(each.version for each in (before, grave, Stored({}, 0)) if each is not None)
            assert item["version"] == older if same else item["version"] > older
            if not same or refresh != "false":
                self.model.wrote(name, refresh)
            self.model.stored[name] = Stored(values, item["version"], revision)

        @rule(
            name=IDS,
            change=st.sampled_from([
                {"lang": "en"}, {"lang": "zh"}, {"evergreen": True}, {"evergreen": None}, {"creation_time": "2025-01-01"},
                {"end_date": "2025-06-01"}, {"end_date": None}, {"start_date": None, "creation_time": None},
            ]),
            guard=st.sampled_from([None, "if_version", "other_version"]),
            refresh=REFRESH,
        )  # fmt: skip
        def patch(self, name: str, change: dict[str, Any], guard: str | None, refresh: str) -> None:
            before = self.model.stored.get(name)
            guards = (
                {}
                if guard is None
                else {"if_version": (before.version if before else 1) + (guard != "if_version")}
            )
            body = {"id": self.id(name), **change, **guards}
            item = self.item("PATCH", documents, {"documents": [body], "refresh": refresh})
            if before is None:
                assert item["status"] == "not_found"
                return
            if guard == "other_version":
                assert item["status"] == "conflict"
                return
            assert item["status"] in ("updated", "unchanged")
            assert item["version"] >= before.version
            before.given = {
                **before.given,
                **change,
                "evergreen": bool({**before.given, **change}["evergreen"]),
            }
            before.version = item["version"]
            self.model.wrote(name, refresh)

        @rule(name=IDS, refresh=REFRESH)
        def delete(self, name: str, refresh: str) -> None:
            item = self.item("POST", f"{documents}/delete", {"ids": [self.id(name)], "refresh": refresh})
            gone = self.model.stored.pop(name, None)
            assert item["status"] == ("deleted" if gone else "not_found")
            if gone is not None:
                self.model.graves[name] = Stored({}, item["version"], gone.revision)
            if gone is not None or refresh != "false":
                self.model.wrote(name, refresh)

        @rule(lang=LANGS, refresh=REFRESH)
        def delete_by_filter(self, lang: str, refresh: str) -> None:
            told = answered(
                "POST", f"{documents}/delete", json={"filter": {"lang": lang}, "refresh": refresh}
            )
            gone = [name for name, each in self.model.stored.items() if each.given["lang"] == lang]
            assert (told["deleted"], told["failed"]) == (len(gone), 0)
            self.model.unseen.clear()
            for name in gone:
                each = self.model.stored.pop(name)
                self.model.graves[name] = Stored({}, each.version + 1, each.revision)
                self.model.wrote(name, refresh)

        @rule()
        def delete_and_make_anew(self) -> None:
            [page] = [answered("GET", documents, params={"size": 1})]
            answered("DELETE", url, 204, params={"confirm": collection})
            answered("DELETE", url, 404, params={"confirm": collection})
            answered("GET", url, 404)
            answered("GET", f"{documents}/{self.id('a')}", 404)
            answered("POST", "/v1/search", 404, json={"collection": collection, "query": "leave"})
            answered("POST", documents, 404, json={"documents": [{"id": self.id("a"), "text": "leave"}]})
            answered("PUT", url, json=options)
            if page["cursor"] is not None:
                late = client.get(documents, params={"cursor": page["cursor"]})
                assert late.status_code == 410, late.text
            self.model = Model()

        @rule()
        def make_what_is_there(self) -> None:
            answered("PUT", url, json={})
            answered("PUT", url, 409, json={"dims": 8})

        # --- reads

        @rule(name=IDS)
        def get(self, name: str) -> None:
            known = self.model.stored.get(name)
            if known is None:
                answered("GET", f"{documents}/{self.id(name)}", 404)
                return
            told = answered("GET", f"{documents}/{self.id(name)}")
            assert (told["version"], told["revision"]) == (known.version, known.revision)
            assert (told["lang"], told["evergreen"]) == (known.given["lang"], known.given["evergreen"])
            times = {each: known.given[each] for each in FIELDS if each not in ("lang", "evergreen")}
            for each, value in {**times, "last_accessed_at": known.last_accessed_at}.items():
                assert (told[each] and instant(told[each])) == (value and instant(value)), each

        @rule(size=st.integers(1, 3))
        def list_all(self, size: int) -> None:
            found: list[str] = []
            page = answered("GET", documents, params={"size": size})
            while True:
                found += [each["id"] for each in page["documents"]]
                if page["cursor"] is None:
                    break
                page = answered("GET", documents, params={"cursor": page["cursor"]})
            assert found == sorted(found)
            self.seen(found, set(self.model.stored))

        def seen(self, found: list[str], expected: set[str]) -> None:
            """Compare ids of an answer; what was not refreshed may be there or not."""
            named = {each.removeprefix(f"{self.run}-") for each in found}
            assert len(named) == len(found)
            assert named - self.model.unseen == expected - self.model.unseen

        @rule(lang=LANGS, moment=MOMENTS)
        def search(self, lang: str, moment: str) -> None:
            body = {
                "collection": collection, "query": "leave", "filter": {"lang": lang}, "as_of": moment,
                "routes": [{"kind": "text"}], "decay": "off",
            }  # fmt: skip
            found = [hit["id"] for hit in answered("POST", "/v1/search", json=body)["hits"]]
            current = {name for name, each in self.model.stored.items() if each.given["lang"] == lang}
            self.seen(found, {name for name in current if true_at(self.model.stored[name], moment)})
            everything = [
                hit["id"]
                for hit in answered("POST", "/v1/search", json={**body, "valid_time": "any"})["hits"]
            ]
            born = {
                name
                for name in current
                if true_at(
                    Stored({**self.model.stored[name].given, "start_date": None, "end_date": None}, 0), moment
                )
            }
            self.seen(everything, born)

        @rule(
            moment=st.sampled_from(["2026-01-31", "2026-11-01"]),
            by=st.sampled_from(["creation_time", "last_accessed_at"]),
            placement=st.sampled_from(["route", "fused"]),
            kinds=st.sampled_from([["text"], ["vector"], ["text", "vector"]]),
        )
        def newer_first(self, moment: str, by: str, placement: str, kinds: list[str]) -> None:
            """All texts are the same, so that the decay alone ranks: then the newer, then the lower id."""
            decay = {"kind": "exp", "half_life": "365d", "floor": FLOOR, "field": by, "placement": placement}
            told = answered("POST", "/v1/search", json={
                "collection": collection, "query": "annual leave", "as_of": moment, "decay": decay,
                "routes": [{"kind": kind} for kind in kinds], "fusion": {"method": "rrf"}, "valid_time": "any",
            })  # fmt: skip
            assert not told["degraded"], told["warnings"]
            ranked = [(hit["id"].removeprefix(f"{self.run}-"), hit) for hit in told["hits"]]
            keys: dict[str, tuple[float, float, str]] = {}
            for name, hit in ranked:
                if name in self.model.unseen:
                    continue
                each = self.model.stored[name]
                born, factor = each.given["creation_time"], decay_factor(each, moment, by)
                assert hit["decay"] == pytest.approx(factor, rel=1e-6), name
                keys[name] = (-factor, -instant(born).timestamp() if born else float("inf"), name)
            terms = {name: len(kinds) / (60 + rank) for rank, (name, _) in enumerate(ranked, 1)}
            if placement == "fused":
                # The routes rank without decay: the newer before the older, whatever their factors.
                undecayed = sorted(keys, key=lambda name: keys[name][1:])
                terms = {
                    name: -keys[name][0] * len(kinds) / (60 + rank) for rank, name in enumerate(undecayed, 1)
                }
                keys = {name: (-terms[name], *keys[name][1:]) for name in keys}
            if placement == "route" or not self.model.unseen:
                assert list(keys) == sorted(keys, key=lambda name: keys[name])
                assert [hit["score"] for _, hit in ranked] == pytest.approx(
                    [terms[name] for name, _ in ranked]
                )

        @rule(lang=LANGS)
        def touch(self, lang: str) -> None:
            """Each touch is later than all before it, so that it shows when it is written; an earlier one never does."""
            at = datetime(2026, 2, 1, tzinfo=UTC) + timedelta(minutes=next(reads))
            body = {
                "collection": collection, "query": "leave", "filter": {"lang": lang}, "touch": True, "decay": "off",
                "routes": [{"kind": "text"}], "valid_time": "any",
            }  # fmt: skip
            answered("POST", "/v1/search", json={**body, "as_of": (at - DAY).isoformat()})
            told = answered("POST", "/v1/search", json={**body, "as_of": at.isoformat()})
            for hit in told["hits"]:
                name = hit["id"].removeprefix(f"{self.run}-")
                if name not in self.model.stored:
                    continue  # deleted, and a search saw it as it was
                known, until = self.model.stored[name], time.monotonic() + 30
                while True:
                    stored = answered("GET", f"{documents}/{hit['id']}")
                    if stored["last_accessed_at"] is not None and instant(stored["last_accessed_at"]) == at:
                        break
                    assert time.monotonic() < until, stored
                    time.sleep(0.05)
                assert stored["version"] > known.version
                known.version, known.last_accessed_at = stored["version"], at.isoformat()
                self.model.unseen.add(name)

    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=20 * TIMES, stateful_step_count=20, derandomize=TIMES == 1, database=None, deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    finally:
        client.delete(url, params={"confirm": collection})
