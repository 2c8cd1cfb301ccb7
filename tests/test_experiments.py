"""Experiments: who is dealt which arm, and that answers, pages, `why` and the search log tell it; on the real node."""

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from pydantic import SecretStr, ValidationError

from app.asking import Search
from app.collection import Collection, CollectionOptions
from app.elastic import Cluster
from app.errors import NotFound
from app.experiments import arm_of, assigned, ranked
from app.keys import hash_of
from app.ranking import Experiment, Ranked
from app.searchlog import index_of
from tests.fakes import EmbeddingServer
from tests.service import Running, serving, settings_for

DIMS = 16
TOKEN = "hlf_shop"
PROFILES = {
    "plain": {"decay": "off", "routes": [{"kind": "text"}]},
    "recent": {"decay": {"half_life": "30d", "floor": 0}, "routes": [{"kind": "text"}]},
}


def experiment(*percents: float, name: str = "decay-1", by: str = "subject") -> dict[str, Any]:
    arms = [
        {"profile": profile, "percent": percent} for profile, percent in zip(PROFILES, percents, strict=False)
    ]
    return {"name": name, "arms": arms, "by": by}


def of(given: dict[str, Any]) -> Experiment:
    return Experiment.model_validate(given)


# --- who is dealt what


def test_arms_get_their_share_and_each_subject_the_same_again() -> None:
    dealt = {f"user {n}": arm_of(of(experiment(20, 80)), f"user {n}").profile for n in range(5000)}
    # Five standard deviations of 5000 draws at 0.2.
    assert abs(Counter(dealt.values())["plain"] / 5000 - 0.2) < 5 * (0.2 * 0.8 / 5000) ** 0.5
    assert all(arm_of(of(experiment(20, 80)), user).profile == profile for user, profile in dealt.items())


def test_where_a_subject_stands_is_written_down() -> None:
    # What a subject was dealt must outlive a release.
    assert [arm_of(of(experiment(50, 50)), user).profile for user in ("ada", "bob", "eve", "joe")] == DEALT


DEALT = ["recent", "recent", "plain", "plain"]


def test_shifting_percentages_moves_only_who_stands_between() -> None:
    users = [f"user {n}" for n in range(500)]
    before = {user: arm_of(of(experiment(30, 70)), user).profile for user in users}
    after = {user: arm_of(of(experiment(50, 50)), user).profile for user in users}
    assert all(after[user] == "plain" for user in users if before[user] == "plain")
    anew = {user: arm_of(of(experiment(30, 70, name="decay-2")), user).profile for user in users}
    assert anew != before


@pytest.mark.parametrize("percents, all_of", [((0, 100), "recent"), ((100, 0), "plain"), ((100,), "plain")])
def test_an_arm_of_nothing_gets_nobody(percents: tuple[float, ...], all_of: str) -> None:
    given = of(experiment(*percents))
    assert {arm_of(given, f"user {n}").profile for n in range(300)} == {all_of}


def collection(**more: Any) -> Collection:
    return Collection.model_validate(
        {
            "name": "c", "index": "i", "dims": 2, "similarity": "cosine", "declared": {}, "template_version": 1,
            "profiles": PROFILES, **more,
        }
    )  # fmt: skip


UNITS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Ranked | None]] = {
    "by subject": ("subject", {"subject": "ada"}, {}, Ranked(name="plain", experiment="decay-1", arm="plain")),
    "no subject": ("subject", {}, {"key_id": "k"}, None),
    "by key": ("key", {"subject": "ada"}, {"key_id": "k"}, Ranked(name="plain", experiment="decay-1", arm="plain")),
    "no key": ("key", {"subject": "ada"}, {}, None),
    "by request": ("request", {}, {"request_id": "r"}, Ranked(name="plain", experiment="decay-1", arm="plain")),
    "a profile is named": ("subject", {"subject": "ada", "profile": "recent"}, {}, Ranked(name="recent")),
}  # fmt: skip


@pytest.mark.parametrize("by, asked, caller, expected", UNITS.values(), ids=UNITS.keys())
def test_what_is_dealt_an_arm(
    by: str, asked: dict[str, Any], caller: dict[str, Any], expected: Ranked | None
) -> None:
    search = Search(collection="c", query="q", **asked)
    told = ranked(search, collection(experiment=experiment(100, 0, by=by)), **caller)
    assert told == expected
    wanted = asked.get("profile") or (None if expected is None else "plain")
    assert assigned(search, told).profile == wanted


def test_outside_an_experiment_the_default_profile_is_told() -> None:
    search = Search(collection="c", query="q")
    assert ranked(search, collection(default_profile="recent")) == Ranked(name="recent")
    assert ranked(search, collection()) is None


WRONG = {
    "not all": (experiment(50, 40), "add up to 90"),
    "twice": ({"name": "x", "arms": [{"profile": "plain", "percent": 50}] * 2}, "same name"),
    "none of the profiles": ({"name": "x", "arms": [{"profile": "absent", "percent": 100}]}, "not among"),
}


@pytest.mark.parametrize("given, said", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_experiment_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        CollectionOptions.model_validate({"profiles": PROFILES, "experiment": given})


# --- on the node


@pytest.fixture(scope="module")
def service(node_url: str) -> Iterator[Running]:
    key = {"id": "shop", "hash": hash_of(TOKEN), "scopes": ["admin", "write", "read"], "collections": ["*"]}
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(
            node_url,
            embedding.base_url,
            dims=DIMS,
            cursor_secret=SecretStr("a secret that outlives a restart"),
            search_log_rate=1.0,
            keys=json.dumps([key]),
        )
        with serving(settings) as running:
            running.client.headers["Authorization"] = f"Bearer {TOKEN}"
            yield running


@pytest.fixture
def client(service: Running) -> httpx2.Client:
    return service.client


DOCUMENTS = [
    {"id": "old", "text": "leave leave leave carry over", "creation_time": "2020-01-01"},
    {
        "id": "new",
        "text": "leave may be taken within the year, says the handbook",
        "creation_time": "2026-01-01",
    },
]


@pytest.fixture
def made(client: httpx2.Client) -> Iterator[str]:
    name = f"arms_{uuid.uuid4().hex[:10]}"
    put(client, name, profiles=PROFILES, default_profile="plain", experiment=experiment(50, 50))
    stored = client.post(
        f"/v1/collections/{name}/documents", json={"documents": DOCUMENTS, "refresh": "wait_for"}
    )
    assert stored.json()["failed"] == 0, stored.text
    yield name
    client.delete(f"/v1/collections/{name}", params={"confirm": name})


def put(client: httpx2.Client, name: str, **options: Any) -> dict[str, Any]:
    answer = client.put(f"/v1/collections/{name}", json=options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(client: httpx2.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/search", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.node
def test_an_arm_ranks_its_subjects_and_says_so(client: httpx2.Client, made: str) -> None:
    first = {"plain": "old", "recent": "new"}
    asked = {"collection": made, "query": "leave", "as_of": "2026-01-31", "top_k": 1}
    dealt = set()
    for subject, arm in zip(("ada", "bob", "eve", "joe"), DEALT, strict=True):
        told = ask(client, **asked, subject=subject)
        assert told["profile"] == {"name": arm, "experiment": "decay-1", "arm": arm}
        assert told["hits"][0]["id"] == first[arm]
        # The next page goes on under the same arm, also where the experiment has changed meanwhile.
        page = ask(client, cursor=told["cursor"])
        assert (page["profile"], page["hits"][0]["id"]) == (
            told["profile"],
            first["recent" if arm == "plain" else "plain"],
        )
        why = client.post("/v1/why", json={**asked, "subject": subject, "id": "old"}).json()
        assert (why["profile"], why["rank"]) == (told["profile"], 1 if arm == "plain" else 2)
        dealt.add(arm)
    assert dealt == {"plain", "recent"}
    assert ask(client, **asked)["profile"] == {"name": "plain"}
    assert ask(client, **asked, subject="ada", profile="recent")["profile"] == {"name": "recent"}
    batch = ask(
        client, collection=made, queries=[{"query": "leave", "subject": user} for user in ("ada", "bob")]
    )
    assert [each["profile"]["arm"] for each in batch["results"]] == DEALT[:2]


@pytest.mark.node
def test_a_page_stays_with_its_arm_when_the_experiment_ends(client: httpx2.Client, made: str) -> None:
    subject = ("ada", "bob", "eve", "joe")[DEALT.index("recent")]
    told = ask(client, collection=made, query="leave", as_of="2026-01-31", top_k=1, subject=subject)
    ended = put(client, made, experiment=None)
    assert (ended["experiment"], ended["default_profile"]) == (None, "plain")
    page = ask(client, cursor=told["cursor"])
    assert page["profile"] == told["profile"]
    assert [told["hits"][0]["id"], page["hits"][0]["id"]] == ["new", "old"]


async def logged(cluster: Cluster, search_id: str) -> dict[str, Any]:
    index = index_of(search_id)
    assert index is not None
    for _ in range(240):
        try:
            [found] = await cluster.mget(index, [search_id], timeout_s=30)
        except NotFound:  # the day's index is made with its first entry
            found = {}
        if found.get("found"):
            return found["_source"]
        await asyncio.sleep(0.25)
    raise AssertionError(f"{search_id} was not logged")


@pytest.mark.node
async def test_a_key_is_dealt_an_arm_and_the_log_tells_it(
    client: httpx2.Client, made: str, cluster: Cluster
) -> None:
    put(client, made, experiment=experiment(0, 100, by="key"))
    told = ask(client, collection=made, query="leave", subject="nobody asks")
    assert told["profile"] == {"name": "recent", "experiment": "decay-1", "arm": "recent"}
    entry = await logged(cluster, told["search_id"])
    assert (entry["profile"], entry["experiment"], entry["arm"]) == ("recent", "decay-1", "recent")
    assert "nobody asks" not in json.dumps(entry)


@pytest.mark.node
def test_an_experiment_keeps_its_profiles(client: httpx2.Client, made: str) -> None:
    gone = client.put(f"/v1/collections/{made}", json={"profiles": {"plain": {}}, "default_profile": "plain"})
    assert (gone.status_code, gone.json()["field"]) == (422, "experiment.arms[1].profile")
    kept = client.get(f"/v1/collections/{made}").json()
    assert (set(kept["profiles"]), kept["experiment"]["name"]) == (set(PROFILES), "decay-1")
