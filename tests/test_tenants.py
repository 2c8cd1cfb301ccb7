"""Two tenants of one collection try every way into each other's data, over real sockets and a real node.

The keys `a` and `b` carry the forced filter {"tenant": "a"} and {"tenant": "b"}. What the one sees must be the same to
the byte whether or not the other's documents are there.
"""

import http.client
import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx2
import pytest

from app import indexing
from app.elastic import Cluster
from app.keys import hash_of
from app.reindex import Changes, Reindexer
from tests.fakes import EmbeddingServer
from tests.nodes import run_once
from tests.service import Running, serving, settings_for, until

pytestmark = pytest.mark.node
DIMS = 16
TOKENS = {
    name: f"hlf_token-of-{name}"
    for name in ("root", "a", "b", "other", "reader", "writer", "misfit", "public", "shown", "5", "6")
}
READ_WRITE = ["read", "write"]


def keys(shared: str, elsewhere: str) -> list[dict[str, Any]]:
    def key(name: str, scopes: list[str], collections: list[str], **more: Any) -> dict[str, Any]:
        return {
            "id": name,
            "hash": hash_of(TOKENS[name]),
            "scopes": scopes,
            "collections": collections,
            **more,
        }

    return [
        key("root", ["read", "write", "admin"], ["*"]),
        key("a", READ_WRITE, [shared], filter={"tenant": "a"}),
        key("b", READ_WRITE, [shared], filter={"tenant": "b"}),
        key("other", READ_WRITE, [elsewhere]),
        key("reader", ["read"], [shared]),
        key("writer", ["write"], [shared]),
        key("misfit", READ_WRITE, [shared], filter={"level": {"gte": 3}}),
        key("public", READ_WRITE, [f"{shared}_moved"], filter={"not": {"visibility": "private"}}),
        *(key(name, READ_WRITE, [f"{shared}_typed"], filter={"tenant": name}) for name in "56"),
        key("shown", READ_WRITE, [f"{shared}_moved"], filter={"visibility": "open"}),
    ]


@pytest.fixture(scope="module")
def shared() -> str:
    return f"shared_{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def elsewhere() -> str:
    return f"elsewhere_{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def service(node_url: str, shared: str, elsewhere: str) -> Iterator[Running]:
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(
            node_url,
            embedding.base_url,
            dims=DIMS,
            keys=json.dumps(keys(shared, elsewhere)),
        )
        with serving(settings) as running:
            root = as_key(running, "root")
            for name in (shared, elsewhere):
                assert (
                    root.put(f"/v1/collections/{name}", json={"declared": {"rank": "long"}}).status_code
                    == 200
                )
            yield running
            for name in (shared, elsewhere):
                root.delete(f"/v1/collections/{name}", params={"confirm": name})
            for client in CLIENTS.values():
                client.close()


CLIENTS: dict[tuple[str, str], httpx2.Client] = {}


def as_key(running: Running, name: str) -> httpx2.Client:
    """Return a client that sends this key; kept until the service ends."""
    if (running.url, name) not in CLIENTS:
        headers = {"Authorization": f"Bearer {TOKENS[name]}"}
        CLIENTS[running.url, name] = httpx2.Client(base_url=running.url, timeout=60, headers=headers)
    return CLIENTS[running.url, name]


@pytest.fixture
def root(service: Running) -> httpx2.Client:
    return as_key(service, "root")


@pytest.fixture
def a(service: Running) -> httpx2.Client:
    return as_key(service, "a")


@pytest.fixture
def b(service: Running) -> httpx2.Client:
    return as_key(service, "b")


def document(id_: str, tenant: Any, text: str = "quarterly figures", **more: Any) -> dict[str, Any]:
    return {"id": id_, "text": text, "metadata": {"tenant": tenant, "rank": 1}, **more}


INTACT: set[str] = set()
"""Collections whose documents are as `documents` made them: only tests that ask for `root` may change any."""


@pytest.fixture(autouse=True)
def documents(request: pytest.FixtureRequest) -> None:
    """Three documents of each tenant, one of nobody, one of both; the same again for every test that needs them."""
    if "a" not in request.fixturenames:
        return
    running, name = request.getfixturevalue("service"), request.getfixturevalue("shared")
    if name not in INTACT:
        restore(as_key(running, "root"), f"/v1/collections/{name}/documents")
        INTACT.add(name)
    if "root" in request.fixturenames:
        INTACT.discard(name)


def restore(root: httpx2.Client, path: str) -> None:
    cleared = root.post(f"{path}/delete", json={"delete_all": True, "refresh": "true"})
    assert cleared.status_code == 200, cleared.text
    stored = [
        document(f"{tenant}{at}", tenant, f"quarterly figures {at}") for tenant in "ab" for at in range(3)
    ]
    stored += [document("nobody", None), document("both", ["a", "b"])]
    answer = root.post(path, json={"documents": stored, "refresh": "true"})
    assert answer.json()["failed"] == 0, answer.text


def without_id(answer: httpx2.Response) -> tuple[int, dict[str, Any]]:
    """What an answer tells, but for its own number."""
    body = answer.json()
    body.pop("request_id", None)
    return answer.status_code, body


def ids(answer: httpx2.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return {hit["id"] for hit in answer.json()["hits"]}


MINE = {"a0", "a1", "a2", "both"}


# --- reading ---------------------------------------------------------------------------------------------------------

SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asking for the other": {"filter": {"tenant": "b"}},
    "either": {"filter": {"or": [{"tenant": "a"}, {"tenant": "b"}]}},
    "not mine": {"filter": {"not": {"tenant": "a"}}},
    "by id": {"filter": {"id": ["b0", "b1", "nobody"]}},
    "without": {"filter": {"tenant": {"exists": False}}},
    "as metadata": {"filter": {"metadata.tenant": "b"}},
    "in a route": {"routes": [{"kind": "text", "filter": {"tenant": "b"}}, {"kind": "vector"}]},
    "vector alone": {"routes": [{"kind": "vector"}]},
    "fresh": {"routes": [{"kind": "fresh_text"}, {"kind": "fresh_vector"}]},
    "threshold": {"min_relevance": 0.0},
    "decayed": {"decay": {"half_life": "1d"}},
    "fused decay": {"decay": {"half_life": "1d", "placement": "fused"}},
    "additive": {"decay": {"half_life": "1d"}, "fusion": {"method": "additive"}},
    "linear": {"fusion": {"method": "linear"}},
    "chunks": {"collapse": False},
    "near duplicates": {"dedup": {"threshold": 0.1}},
    "mmr": {"mmr": {"lambda": 0.1}},
    "long page": {"top_k": 500},
    "no point in time": {"paging": False},
    "explained": {"explain": True},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_what_is_the_keys_and_counts_nothing_else(a, shared, name):
    answer = a.post(
        "/v1/search", json={"collection": shared, "query": "quarterly figures", "top_k": 50, **SEARCHES[name]}
    )
    assert ids(answer) <= MINE, answer.text
    body = answer.json()
    for told in body["routes"].values():
        assert (told["total"] or {"value": 0})["value"] <= len(MINE)
    assert not any(f'"{id_}"' in json.dumps(body["hits"]) for id_ in ("b0", "b1", "b2", "nobody"))
    assert {hit["id"] for hit in body["hits"] if hit.get("near_duplicates")} <= MINE


def test_a_batch_too(a, shared):
    answer = a.post("/v1/search", json={
        "collection": shared, "top_k": 50,
        "queries": ["quarterly figures", {"query": "figures", "filter": {"tenant": "b"}}, {"query": "b0"}],
    })  # fmt: skip
    for result in answer.json()["results"]:
        assert {hit["id"] for hit in result["hits"]} <= MINE


def test_explanations_do_not_show_the_keys_filter(a, shared):
    answer = a.post("/v1/search", json={
        "collection": shared, "query": "quarterly figures", "explain": True, "filter": {"source": "x"},
    })  # fmt: skip
    shown = json.dumps(answer.json()["explain"])
    assert '"source"' in shown
    assert "tenant" not in shown


def test_the_clusters_own_account_is_not_for_a_key_with_a_filter(service, a, root, shared):
    request = {"collection": shared, "query": "quarterly figures", "explain": "cluster", "top_k": 2}
    assert root.post("/v1/search", json=request).status_code == 200
    refused = a.post("/v1/search", json=request)
    assert (refused.status_code, refused.json()["type"]) == (403, FORBIDDEN)
    batch = a.post(
        "/v1/search", json={"collection": shared, "queries": [{"query": "x", "explain": "cluster"}, "x"]}
    )
    assert [result.get("status") for result in batch.json()["results"]] == [403, None]
    why = {"collection": shared, "query": "x", "id": "a0"}
    assert a.post("/v1/why", json=why | {"explain": "cluster"}).status_code == 403
    assert as_key(service, "reader").post("/v1/why", json=why | {"touch": True}).status_code == 403


def test_a_collection_is_described_by_the_keys_own(a, shared):
    told = a.get(f"/v1/collections/{shared}").json()
    assert (told["documents"], told["chunks"]) == (len(MINE), len(MINE))
    assert told.get("size_bytes") is None
    assert told.get("deleted") is None


@pytest.mark.parametrize("id_", ["b0", "nobody", "never-there"])
def test_a_foreign_document_is_accounted_for_as_missing(a, shared, id_):
    told = a.post("/v1/why", json={"collection": shared, "query": "quarterly figures", "id": id_})
    missing = a.post("/v1/why", json={"collection": shared, "query": "quarterly figures", "id": "zzz"})
    one, other = without_id(told)[1], without_id(missing)[1]
    for body in (one, other):
        body.pop("origin")
        body.pop("id")
    assert one == other
    assert not one["exists"]


def test_ranks_are_told_among_the_keys_own(a, shared):
    told = a.post("/v1/why", json={"collection": shared, "query": "quarterly figures 2", "id": "a0"}).json()
    assert all(route["rank"] <= len(MINE) for route in told["routes"].values())


@pytest.mark.parametrize("id_", ["b0", "nobody"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_foreign_document_is_got_and_deleted_as_missing(a, b, root, shared, method, id_):
    path = f"/v1/collections/{shared}/documents/"
    foreign, missing = a.request(method, path + id_), a.request(method, path + "zzz")
    assert foreign.status_code == 404
    assert without_id(foreign) == without_id(missing)
    assert {name: len(value) for name, value in foreign.headers.items() if name != "ratelimit"} == {
        name: len(value) for name, value in missing.headers.items() if name != "ratelimit"
    }
    assert root.get(path + id_).status_code == 200


@pytest.mark.parametrize("id_", ["a0%0A", "%0Ab0", "b0%0A", "b0%0Ab0"])
def test_a_line_feed_in_an_id_reaches_no_other_document(a, root, shared, id_):
    path = f"/v1/collections/{shared}/documents/"
    stored = {"documents": [document(unquote(id_), "b")], "refresh": "true"}
    assert root.post(path.rstrip("/"), json=stored).json()["failed"] == 0
    for method in ("GET", "DELETE"):
        assert without_id(a.request(method, path + id_)) == without_id(a.request(method, path + "zzz"))
    for kept in ("a0", "b0", id_):
        assert root.get(path + kept).json()["id"] == unquote(kept)


def test_a_list_holds_and_counts_the_keys_own(a, shared):
    path = f"/v1/collections/{shared}/documents"
    for given in (
        None,
        {"tenant": "b"},
        {"or": [{"tenant": "a"}, {"tenant": "b"}]},
        {"not": {"tenant": "a"}},
    ):
        params = {} if given is None else {"filter": json.dumps(given)}
        body = a.get(path, params=params).json()
        assert {found["id"] for found in body["documents"]} <= MINE
        assert body["total"] == len(body["documents"])


def test_cursors_are_their_keys(a, b, root, shared):
    request = {"collection": shared, "query": "quarterly figures", "top_k": 1}
    listing = f"/v1/collections/{shared}/documents"
    for owner in (a, root):
        page = owner.post("/v1/search", json=request).json()["cursor"]
        listed = owner.get(listing, params={"size": 1}).json()["cursor"]
        assert page
        assert listed
        for other in (b, a, root):
            if other is owner:
                continue
            refused = other.post("/v1/search", json={"cursor": page})
            assert (refused.status_code, refused.json()["type"]) == (
                422,
                "urn:halflife:problem:cursor-invalid",
            )
            refused = other.get(listing, params={"cursor": listed})
            assert (refused.status_code, refused.json()["type"]) == (
                422,
                "urn:halflife:problem:cursor-invalid",
            )
        assert owner.post("/v1/search", json={"cursor": page}).status_code == 200
        assert owner.get(listing, params={"cursor": listed}).status_code == 200


def test_pages_stay_inside(a, shared):
    seen: set[str] = set()
    body = a.post("/v1/search", json={"collection": shared, "query": "quarterly figures", "top_k": 1}).json()
    while body["hits"]:
        seen |= {hit["id"] for hit in body["hits"]}
        if body["cursor"] is None:
            break
        body = a.post("/v1/search", json={"cursor": body["cursor"]}).json()
    assert seen == MINE


# --- writing ---------------------------------------------------------------------------------------------------------

FORBIDDEN = "urn:halflife:problem:forbidden"


def test_a_document_outside_the_filter_is_refused_by_item(a, root, shared):
    path = f"/v1/collections/{shared}/documents"
    answer = a.post(path, json={"documents": [
        document("new1", "a"), document("new2", "b"), document("new3", ["a", "b"]), document("new4", None),
        {"id": "new5", "text": "without"}, document("new6", ["a", "a"]),
    ]})  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert [item["status"] for item in answer.json()["items"]] == [
        "created", "failed", "failed", "failed", "failed", "created",
    ]  # fmt: skip
    assert {item["error"]["type"] for item in answer.json()["items"] if "error" in item} == {"forbidden"}
    assert [root.get(f"{path}/new{at}").status_code for at in range(1, 7)] == [200, 404, 404, 404, 404, 200]


def test_files_are_held_to_the_filter_too(a, root, shared):
    path = f"/v1/collections/{shared}/files"
    foreign = root.get(f"/v1/collections/{shared}/documents/b0").json()
    for metadata, name, stored in (
        ({"tenant": "a"}, "mine.txt", True), ({"tenant": "b"}, "other.txt", False), (None, "bare.txt", False),
        ({"tenant": "a"}, "b0", False),
    ):  # fmt: skip
        form = {} if metadata is None else {"fields": json.dumps({"metadata": metadata})}
        answer = a.post(path, files={"file": (name, b"the words of a file", "text/plain")}, data=form)
        found = root.get(f"/v1/collections/{shared}/documents/{name}")
        assert (found.status_code == 200 and found.json() != foreign) == stored, answer.text
        assert ("forbidden" in answer.text) != stored
    assert root.get(f"/v1/collections/{shared}/documents/b0").json() == foreign


@pytest.mark.parametrize("id_", ["b0", "nobody", "both"])
@pytest.mark.parametrize("guard", [{}, {"revision": 5}, {"if_version": 1}, {"if_version": "current"}])
def test_no_upsert_takes_a_foreign_document_over(a, root, shared, id_, guard):
    path = f"/v1/collections/{shared}/documents"
    before = root.get(f"{path}/{id_}").json()
    if guard.get("if_version") == "current":
        guard = {"if_version": before["version"]}
    [item] = a.post(path, json={"documents": [document(id_, "a", "taken", **guard)]}).json()["items"]
    assert item["status"] in ("failed", "conflict")
    assert not {"version", "chunks"} & item.keys()
    if "if_version" in guard and id_ != "both":
        [missing] = a.post(path, json={"documents": [document("zzz", "a", **guard)]}).json()["items"]
        assert {**missing, "id": id_} == item
    assert root.get(f"{path}/{id_}").json() == before


@pytest.mark.parametrize("by", ["id", "filter"])
def test_the_id_of_a_foreign_tombstone_is_taken_and_nothing_else_is_told(a, b, root, shared, by):
    path, id_ = f"/v1/collections/{shared}/documents", f"b-late-{by}"
    b.post(path, json={"documents": [document(id_, "b", revision=77)], "refresh": "true"})
    given: dict[str, Any] = {"ids": [id_]} if by == "id" else {"filter": {"id": id_}}
    assert b.post(f"{path}/delete", json=given).json()["deleted"] == 1
    [living] = a.post(path, json={"documents": [document("b0", "a")]}).json()["items"]
    guards: list[dict[str, Any]] = [{}, {"revision": 1}, {"revision": 76}, {"revision": 77}, {"revision": 78}]
    for guard in guards:
        [item] = a.post(path, json={"documents": [document(id_, "a", **guard)]}).json()["items"]
        assert item == {**living, "id": id_}
    # To its owner it is as it was: a late repeat is refused, a new revision is not.
    for revision, status in ((77, "conflict"), (78, "created")):
        [item] = b.post(path, json={"documents": [document(id_, "b", revision=revision)]}).json()["items"]
        assert item["status"] == status
    assert root.get(f"{path}/{id_}").json()["metadata"]["tenant"] == "b"


def test_a_tombstone_that_a_key_without_a_filter_made_tells_no_number(a, b, root, shared):
    path = f"/v1/collections/{shared}/documents"
    b.post(path, json={"documents": [document("b-late", "b", revision=7)]})
    assert root.delete(f"{path}/b-late").status_code == 200
    [item] = a.post(path, json={"documents": [document("b-late", "a", revision=3)]}).json()["items"]
    assert item["status"] == "conflict"
    assert "version" not in item
    assert "7" not in json.dumps(item)
    [item] = a.post(path, json={"documents": [document("b-late", "a")]}).json()["items"]
    assert item["status"] == "created"
    assert b.get(f"{path}/b-late").status_code == 404


def test_a_key_with_a_filter_writes_its_own_as_others_do(a, root, shared):
    path = f"/v1/collections/{shared}/documents"

    texts = iter(range(100))

    def put(**guard: Any) -> dict[str, Any]:
        sent = document("mine", "a", f"figures {next(texts)}", **guard)
        [item] = a.post(path, json={"documents": [sent]}).json()["items"]
        return item

    first = put()
    assert first["status"] == "created"
    second = put()
    assert (second["status"], second["version"] > first["version"]) == ("updated", True)
    assert put(if_version=first["version"])["status"] == "conflict"
    assert put(if_version=second["version"])["status"] == "updated"
    assert put(revision=4)["status"] == "updated"
    assert put(revision=4)["status"] == "unchanged"
    assert put(revision=3)["status"] == "conflict"
    assert a.delete(f"{path}/mine").status_code == 200
    assert put(revision=4)["status"] == "conflict"
    assert put(revision=5)["status"] == "created"
    several = a.post(path, json={"documents": [document("mine", "a", str(at)) for at in range(4)]}).json()
    assert [item["status"] for item in several["items"]] == ["updated"] * 4
    assert a.get(f"{path}/mine").json()["text"] == "3"


def test_of_two_tenants_who_want_one_id_at_once_one_has_it(a, b, root, shared):
    path = f"/v1/collections/{shared}/documents"
    wanted = [f"race-{at}" for at in range(40)]

    def upsert(client: httpx2.Client, tenant: str) -> dict[str, str]:
        told: dict[str, str] = {}
        for first in range(0, len(wanted), 4):
            part = [document(id_, tenant, f"of {tenant}") for id_ in wanted[first : first + 4]]
            items = client.post(path, json={"documents": part}).json()["items"]
            told |= {item["id"]: item["status"] for item in items}
        return told

    with ThreadPoolExecutor(2) as threads:
        by_a, by_b = threads.map(upsert, (a, b), ("a", "b"))
    for id_ in wanted:
        assert sorted((by_a[id_], by_b[id_])) == ["created", "failed"], id_
        owner = "a" if by_a[id_] == "created" else "b"
        assert root.get(f"{path}/{id_}").json()["metadata"]["tenant"] == owner


PATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "foreign": ({"id": "b0", "lang": "en"}, "not_found"),
    "nobody's": ({"id": "nobody", "metadata": {"tenant": "a"}}, "not_found"),
    "missing": ({"id": "zzz", "lang": "en"}, "not_found"),
    "given away": ({"id": "a0", "metadata": {"tenant": "b"}}, "failed"),
    "shared out": ({"id": "a0", "metadata": {"tenant": ["a", "b"]}}, "failed"),
    "set free": ({"id": "a0", "metadata": None}, "failed"),
    "both's": ({"id": "both", "lang": "en"}, "failed"),
    "mine": ({"id": "a0", "lang": "en", "metadata": {"tenant": "a", "more": 1}}, "updated"),
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_stays_inside(a, root, shared, name):
    change, status = PATCHES[name]
    path = f"/v1/collections/{shared}/documents"
    before = root.get(f"{path}/{change['id']}").json()
    [item] = a.patch(path, json={"documents": [change]}).json()["items"]
    assert item["status"] == status
    after = root.get(f"{path}/{change['id']}").json()
    before.pop("request_id", None)
    after.pop("request_id", None)
    assert (after == before) == (status != "updated")


@pytest.mark.parametrize("body, deleted, left", [
    ({"ids": ["a0", "b0", "nobody", "zzz"]}, 1, {"a1", "a2"}),
    ({"documents": [{"id": "a0"}, {"id": "b0"}, {"id": "nobody", "if_version": 1}, {"id": "zzz", "if_version": 1}]}, 1, {"a1", "a2"}),
    ({"filter": {"tenant": "b"}}, 0, {"a0", "a1", "a2"}),
    ({"filter": {"id": ["a0", "b0", "b1"]}}, 1, {"a1", "a2"}),
    ({"filter": {"not": {"tenant": "a"}}}, 0, {"a0", "a1", "a2"}),
    ({"filter": {"or": [{"tenant": "b"}, {"rank": {"gte": 0}}]}}, 3, set()),
    ({"delete_all": True}, 3, set()),
])  # fmt: skip
def test_deletes_stay_inside(a, root, shared, body, deleted, left):
    path = f"/v1/collections/{shared}/documents"
    answer = a.post(f"{path}/delete", json={**body, "refresh": "true"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["deleted"] == deleted
    statuses = {item["id"]: item["status"] for item in answer.json()["items"]}
    assert not {"b0", "b1", "b2", "nobody"} & statuses.keys() or {"ids", "documents"} & body.keys()
    if {"ids", "documents"} & body.keys():
        assert statuses == {"a0": "deleted", "b0": "not_found", "nobody": "not_found", "zzz": "not_found"}
    there = {found["id"] for found in root.get(path).json()["documents"]}
    assert there == left | {"b0", "b1", "b2", "nobody", "both"}


def test_a_shared_document_is_seen_and_not_deleted(a, root, shared):
    path = f"/v1/collections/{shared}/documents/both"
    assert a.get(path).status_code == 200
    refused = a.delete(path)
    assert (refused.status_code, refused.json()["type"]) == (403, FORBIDDEN)
    assert root.get(path).status_code == 200


def test_of_many_shared_documents_some_are_told_and_all_are_counted(a, root, shared, monkeypatch):
    monkeypatch.setattr(indexing, "TOLD_FAILURES", 3)
    path = f"/v1/collections/{shared}/documents"
    more = [document(f"both{at}", ["a", "b"], embedding=None) for at in range(6)]
    assert root.post(path, json={"documents": more, "refresh": "true"}).json()["failed"] == 0
    told = a.post(f"{path}/delete", json={"delete_all": True, "refresh": "true"}).json()
    assert (told["deleted"], told["failed"]) == (3, 7)
    assert [item["id"] for item in told["items"]] == ["both", "both0", "both1"]
    assert {item["error"]["type"] for item in told["items"]} == {"forbidden"}
    assert len(root.get(path).json()["documents"]) == 7 + 4


def test_touches_stay_inside(a, root, shared):
    found = a.post(
        "/v1/search", json={"collection": shared, "query": "quarterly figures", "top_k": 50, "touch": True}
    )
    assert ids(found) == MINE
    path = f"/v1/collections/{shared}/documents"
    until = time.monotonic() + 30
    touched: set[str] = set()
    while touched < MINE and time.monotonic() < until:
        time.sleep(0.2)
        listed = root.get(path).json()["documents"]
        touched = {each["id"] for each in listed if each["last_accessed_at"]}
    assert touched == MINE


# --- collections and scopes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, path, body", [
    ("POST", "/v1/search", {"collection": "NAME", "query": "x"}),
    ("POST", "/v1/search", {"collection": "NAME", "queries": ["x"]}),
    ("POST", "/v1/why", {"collection": "NAME", "query": "x", "id": "y"}),
    ("GET", "/v1/collections/NAME", None),
    ("GET", "/v1/collections/NAME/documents", None),
    ("GET", "/v1/collections/NAME/documents/x", None),
    ("DELETE", "/v1/collections/NAME/documents/x", None),
    ("POST", "/v1/collections/NAME/documents", {"documents": [{"id": "x", "text": "x"}]}),
    ("PATCH", "/v1/collections/NAME/documents", {"documents": [{"id": "x", "lang": "en"}]}),
    ("POST", "/v1/collections/NAME/documents/delete", {"ids": ["x"]}),
    ("POST", "/v1/collections/NAME/documents/delete", {"documents": [{"id": "x", "if_version": 1}]}),
    ("POST", "/v1/collections/NAME/documents/delete", {"filter": {"lang": "en"}}),
    ("POST", "/v1/collections/NAME/documents/delete", {"delete_all": True}),
])  # fmt: skip
def test_a_foreign_collection_looks_like_none(a, shared, elsewhere, method, path, body):
    told = []
    for name in (elsewhere, f"absent_{elsewhere[10:]}"):
        answer = a.request(method, path.replace("NAME", name), content=json.dumps(body).replace("NAME", name))
        assert answer.status_code == 404
        text = json.dumps(without_id(answer))
        told.append(text.replace(name, "NAME"))
    assert told[0] == told[1]


def test_a_listing_names_the_keys_collections(a, root, shared, elsewhere):
    assert [found["name"] for found in a.get("/v1/collections").json()] == [shared]
    assert {shared, elsewhere} <= {found["name"] for found in root.get("/v1/collections").json()}


SCOPED: list[tuple[str, str, Any, str]] = [
    ("POST", "/v1/search", {"collection": "NAME", "query": "x"}, "read"),
    ("POST", "/v1/why", {"collection": "NAME", "query": "x", "id": "y"}, "read"),
    ("GET", "/v1/collections", None, "read"),
    ("GET", "/v1/collections/NAME", None, "read"),
    ("GET", "/v1/collections/NAME/documents", None, "read"),
    ("GET", "/v1/collections/NAME/documents/x", None, "read"),
    ("POST", "/v1/search", {"collection": "NAME", "query": "x", "touch": True}, "write"),
    ("POST", "/v1/collections/NAME/documents", {"documents": [{"id": "x", "text": "x"}]}, "write"),
    ("PATCH", "/v1/collections/NAME/documents", {"documents": [{"id": "x", "lang": "en"}]}, "write"),
    ("POST", "/v1/collections/NAME/documents/delete", {"ids": ["x"]}, "write"),
    ("DELETE", "/v1/collections/NAME/documents/x", None, "write"),
    ("PUT", "/v1/collections/NAME", None, "admin"),
    ("DELETE", "/v1/collections/NAME?confirm=NAME", None, "admin"),
]


@pytest.mark.parametrize("method, path, body, scope", SCOPED)
def test_each_operation_asks_for_its_scope(service, shared, method, path, body, scope):
    for name, scopes in (("reader", {"read"}), ("writer", {"write"})):
        if scope in scopes or (scope == "write" and path == "/v1/search" and name == "writer"):
            continue
        content = None if body is None else json.dumps(body).replace("NAME", shared)
        refused = as_key(service, name).request(method, path.replace("NAME", shared), content=content)
        assert (refused.status_code, refused.json()["type"]) == (403, FORBIDDEN), (name, refused.text)


def test_every_route_of_ours_asks_for_a_scope(root):
    document = root.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if path in ("/livez", "/readyz"):
                assert "security" not in operation
            elif path != "/metrics":
                [needed] = operation["security"]
                assert len(needed["bearer"]) == 1, (method, path)


def test_only_an_admin_makes_a_collection_by_an_upsert(service, root):
    name = f"born_{uuid.uuid4().hex[:8]}"
    body = {"documents": [{"id": "x", "text": "x"}]}
    path = f"/v1/collections/{name}/documents"
    refused = as_key(service, "writer").post(path, json=body)
    assert refused.status_code == 404
    assert "a key with the scope admin" in refused.json()["remedy"]
    assert root.get(f"/v1/collections/{name}").status_code == 404
    assert root.post(path, json=body).status_code == 200
    root.delete(f"/v1/collections/{name}", params={"confirm": name})


def test_a_filter_that_does_not_fit_the_collection_opens_nothing(service, shared):
    client = as_key(service, "misfit")
    for answer in (
        client.post("/v1/search", json={"collection": shared, "query": "x"}),
        client.post("/v1/why", json={"collection": shared, "query": "x", "id": "a0"}),
        client.get(f"/v1/collections/{shared}/documents"),
        client.get(f"/v1/collections/{shared}/documents/a0"),
        client.delete(f"/v1/collections/{shared}/documents/a0"),
        client.post(f"/v1/collections/{shared}/documents", json={"documents": [document("x", "a")]}),
        client.patch(f"/v1/collections/{shared}/documents", json={"documents": [{"id": "a0", "lang": "en"}]}),
        client.post(f"/v1/collections/{shared}/documents/delete", json={"delete_all": True}),
    ):
        assert (answer.status_code, answer.json()["type"]) == (403, FORBIDDEN)
        assert "level" not in answer.text


# --- tokens --------------------------------------------------------------------------------------------------------------

BAD_HEADERS: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "empty": [(b"authorization", b"Bearer ")],
    "another scheme": [(b"authorization", b"Basic " + TOKENS["root"].encode())],
    "another token": [(b"authorization", b"Bearer hlf_wrong")],
    "the hash": [(b"authorization", b"Bearer " + hash_of(TOKENS["root"]).encode())],
    "not ascii": [(b"authorization", "Bearer schlüssel-日本語".encode())],
    "latin": [(b"authorization", b"Bearer \xff\xfe")],
    "huge": [(b"authorization", b"Bearer " + b"x" * 40_000)],
    "longer": [(b"authorization", b"Bearer " + TOKENS["root"].encode() + b"x")],
    "shorter": [(b"authorization", b"Bearer " + TOKENS["root"].encode()[:-1])],
    "twice": [(b"authorization", b"Bearer " + TOKENS["root"].encode())] * 2,
}


@pytest.mark.parametrize("name", BAD_HEADERS)
@pytest.mark.parametrize("path", ["/v1/collections", "/nowhere", "/metrics"])
def test_without_a_known_key_there_is_nothing(service, path, name):
    # By hand: clients refuse to send some of these.
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=30)
    try:
        connection.putrequest("GET", path)
        for header, value in BAD_HEADERS[name]:
            connection.putheader(header, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read().decode()
    finally:
        connection.close()
    assert answer.status == 401, body
    assert answer.getheader("www-authenticate", "").startswith("Bearer")
    assert json.loads(body)["type"] == "urn:halflife:problem:unauthorized"
    assert "token-of" not in body


def test_health_and_documents_of_the_api_ask_for_no_key(service):
    for path in ("/livez", "/docs", "/openapi.json"):
        assert httpx2.get(service.url + path, timeout=60).status_code == 200
    until(lambda: httpx2.get(f"{service.url}/readyz", timeout=60).status_code == 200)


def test_figures_need_a_scope(service):
    assert as_key(service, "reader").get("/metrics").status_code == 403
    assert as_key(service, "root").get("/metrics").status_code != 403


def test_a_file_of_keys_is_read_again_while_the_service_runs(node_url: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def write(*names: str) -> None:
        held = [key for key in keys("any_shared", "any_elsewhere") if key["id"] in names]
        new = tmp_path / "new.json"
        new.write_text(json.dumps({"keys": held}))
        new.replace(path)

    write("root", "reader")
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(node_url, embedding.base_url, dims=DIMS, keys_file=str(path), docs=False)
        with serving(settings) as running:

            def status(name: str) -> int:
                return running.client.get(
                    "/v1/collections", headers={"Authorization": f"Bearer {TOKENS[name]}"}
                ).status_code

            def readiness(status: str, *checks: str) -> httpx2.Response:
                """Wait until it says so: each of its checks is given up after some seconds."""
                told: list[httpx2.Response] = []

                def comes() -> bool:
                    told.append(running.client.get("/readyz"))
                    body = told[-1].json()
                    return body["status"] == status and set(checks) <= set(body["checks"])

                until(comes)
                return told[-1]

            assert (status("root"), status("reader"), status("other")) == (200, 200, 401)
            assert running.client.get("/docs").status_code == 401
            write("root", "other")
            until(lambda: status("reader") == 401)
            assert (status("root"), status("other")) == (200, 200)
            path.write_text(
                json.dumps(
                    {"keys": [{**keys("any_shared", "any_elsewhere")[0], "filter": {"ward": {"$gt": 3}}}]}
                )
            )
            told = readiness("degraded", "keys")
            assert told.status_code == 200
            assert "see the log" in told.json()["checks"]["keys"]["reason"]
            assert "ward" not in told.text
            assert (status("root"), status("other"), status("reader")) == (200, 200, 401)
            write("reader")
            until(lambda: status("reader") == 200)
            assert (status("root"), status("other")) == (401, 401)
            assert readiness("ready").status_code == 200


@pytest.mark.parametrize("by", ["id", "filter"])
def test_an_id_stays_its_owners_where_the_value_that_tells_it_was_a_number(service, shared, by):
    name, root = f"{shared}_typed", as_key(service, "root")
    assert root.put(f"/v1/collections/{name}", json={"declared": {"tenant": "keyword"}}).status_code == 200
    try:
        path, owner, other = f"/v1/collections/{name}/documents", as_key(service, "5"), as_key(service, "6")
        mine = {"documents": [document("x", 5)], "refresh": "true"}
        assert owner.post(path, json=mine).json()["items"][0]["status"] == "created"
        assert owner.get(f"{path}/x").status_code == 200
        given: dict[str, Any] = {"ids": ["x"]} if by == "id" else {"filter": {"id": "x"}}
        assert owner.post(f"{path}/delete", json=given).json()["deleted"] == 1
        [taken] = other.post(path, json={"documents": [document("x", 6)]}).json()["items"]
        assert taken["status"] == "failed"
        assert owner.post(path, json=mine).json()["items"][0]["status"] == "created"
    finally:
        root.delete(f"/v1/collections/{name}", params={"confirm": name})


# --- while a collection moves to an index that declares other keys ---------------------------------------------------


@pytest.fixture
def moved(service: Running, shared: str) -> Iterator[str]:
    """A collection of public and private documents, nothing declared."""
    name, root = f"{shared}_moved", as_key(service, "root")
    assert root.put(f"/v1/collections/{name}", json={}).status_code == 200
    given = [
        {"id": f"{level}{at}", "text": f"quarterly figures {level}", "metadata": {"visibility": level}}
        for level in ("open", "private")
        for at in range(3)
    ]
    path = f"/v1/collections/{name}/documents"
    assert root.post(path, json={"documents": given, "refresh": "true"}).json()["failed"] == 0
    yield name
    root.delete(f"/v1/collections/{name}", params={"confirm": name})


def reindex(node_url: str, name: str, changes: Changes | None) -> None:
    """Move the collection (back, for None) as an operator does, from a process of their own; the service's memory of it stays."""

    async def move(cluster: Cluster) -> None:
        mover = Reindexer(cluster, name, embedder=never, now=lambda: datetime.now(UTC))
        await (mover.roll_back() if changes is None else mover.run(changes))

    def never(collection: Any) -> Any:
        return None  # nothing is embedded anew

    run_once(node_url, move)


OPEN = ["open0", "open1", "open2"]


@pytest.mark.parametrize("name", ["public", "shown"])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_list_that_outlives_a_reindex_shows_the_keys_own(service, node_url, moved, name, remembered):
    """The cursor leads to the index of its first page, which declares other keys than the collection does now."""
    tenant, path = as_key(service, name), f"/v1/collections/{moved}/documents"
    first = tenant.get(path, params={"size": 1}).json()
    reindex(node_url, moved, Changes(declare={"visibility": "keyword"}))
    if not remembered:
        as_key(service, "root").get(f"/v1/collections/{moved}")  # looks at the cluster
    listed, cursor = [each["id"] for each in first["documents"]], first["cursor"]
    while cursor is not None:
        answer = tenant.get(path, params={"cursor": cursor})
        assert answer.status_code == 200, answer.text
        assert answer.json()["total"] == 3
        listed += [each["id"] for each in answer.json()["documents"]]
        cursor = answer.json()["cursor"]
    assert listed == OPEN
    assert [each["id"] for each in tenant.get(path).json()["documents"]] == OPEN


@pytest.mark.parametrize("name", ["public", "shown"])
def test_a_stale_memory_of_what_is_declared_shows_the_keys_own(service, node_url, moved, name):
    tenant, path = as_key(service, name), f"/v1/collections/{moved}/documents"
    reindex(node_url, moved, Changes(declare={"visibility": "keyword"}))
    as_key(service, "root").get(f"/v1/collections/{moved}")
    question = {"collection": moved, "query": "quarterly figures", "routes": [{"kind": "text"}]}
    assert len(ids(tenant.post("/v1/search", json=question))) == 3
    reindex(node_url, moved, None)
    assert [each["id"] for each in tenant.get(path).json()["documents"]] == OPEN
    assert ids(tenant.post("/v1/search", json=question)) == set(OPEN)
    told = tenant.post("/v1/why", json={**question, "query": "nothing of the kind", "id": "private0"}).json()
    assert (told["exists"], told["title"]) == (False, None)
    assert told["excluded_by"] == ["no such document in this collection"]
    # Asked again, as of the index that answers.
    told = tenant.post("/v1/why", json={**question, "query": "nothing of the kind", "id": "open0"}).json()
    assert told["exists"] is True
    asked = {**question, "query": "privato", "suggest": True}
    assert "private" not in json.dumps(tenant.post("/v1/search", json=asked).json().get("suggestions"))


@pytest.mark.parametrize("where", [{"visibility": "open"}, {"not": {"visibility": "private"}}])
def test_a_search_that_finds_nothing_by_a_stale_filter_asks_again(service, node_url, moved, where):
    root = as_key(service, "root")
    reindex(node_url, moved, Changes(declare={"visibility": "keyword"}))
    root.get(f"/v1/collections/{moved}")
    question = {"collection": moved, "query": "quarterly figures", "filter": where}
    assert ids(root.post("/v1/search", json=question)) == set(OPEN)
    reindex(node_url, moved, None)
    assert ids(root.post("/v1/search", json=question)) == set(OPEN)
