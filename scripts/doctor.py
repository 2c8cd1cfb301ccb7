"""Own `halflife doctor`: whether cluster, templates, collections, clocks, disks and embedding server fit this service.

Looks through the doors of `app` and changes nothing that lasts: one small index of its own is made and removed, to try
what searches need. Every check says what is wrong and the remedy; a check that can't be made says so.
"""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app import catalog, fields, names
from app.asking import RewriteOptions
from app.elastic import Cluster
from app.encoding import pack_vector
from app.errors import ClusterRejected, HalflifeError, InvalidRequest, NotFound, RerankerFailed
from app.main import open_cluster, open_embedder, open_reranker, open_rewriter
from app.settings import UNREAD_REMEDY, Settings
from scripts import stack
from scripts.client import URL_VARIABLE, find_url
from scripts.distribution import said
from scripts.serving import read_settings, secrets_without_effect, variables_without_effect

# Ages are told in days and decays in weeks; but documents a few seconds "in the future" are hidden by `as_of`.
MOST_SKEW_MS = 2_000
# Each node's figure is up to a second old.
_CLOCK_GRAIN_MS = 1_000
_TIMEOUT_S = 10.0
_FLOOD_BLOCK = "index.blocks.read_only_allow_delete"
_FORBIDDEN = ("security_exception", "403")

Verdict = Literal["ok", "warning", "failed", "skipped"]
_MARKS: dict[Verdict, str] = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "–"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: what it is, how it is, and what to do if it isn't well."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        return self.verdict != "failed"

    def line(self) -> str:
        """Return it as it is printed, the remedy on a line of its own."""
        told = f"{_MARKS[self.verdict]} {self.name}: {self.detail}"
        return f"{told}\n    remedy: {self.remedy}" if self.remedy else told

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {"check": self.name, "verdict": self.verdict, "detail": self.detail, "remedy": self.remedy}


def examine(data: Path | None) -> list[Check]:
    """Make all checks, in order, of the local stack on a folder that is given, else of what the environment names, else
    of the local stack that is found without one given.
    """
    try:
        settings, whose = _settings(data)
        api_url = _api_url(data)
    except InvalidRequest as error:
        return [_failed("settings", error)]
    except stack.NothingRuns as error:
        # Of another stack or cluster than the one that is meant nothing is to be told.
        return [Check("settings", "failed", str(error))]
    checks = [whose]
    checks += [
        Check("settings", "warning", line, "correct its name, or take it out of the environment")
        for line in variables_without_effect(os.environ)
    ]
    checks += [
        Check("settings", "warning", line, "correct its name, or take it out of the folder of secrets")
        for line in secrets_without_effect(os.environ)
    ]
    checks += asyncio.run(_examine(settings))
    if (api := _check_api(api_url)) is not None:
        checks.append(api)
    return checks


def _settings(data: Path | None) -> tuple[Settings, Check]:
    settings = read_settings()
    found = stack.addresses(data)
    folder = stack.data_folder(data)
    if found:
        whose = Check("settings", "ok", f"the local stack on {folder}")
    elif said("HALFLIFE_ELASTICSEARCH_URL"):
        whose = Check("settings", "ok", "the environment and the defaults")
    else:
        whose = Check(
            "settings",
            "warning",
            f"no local stack runs on {folder} and no cluster is named: looking at {settings.elasticsearch_url}",
            "start a stack with `halflife up`, or set HALFLIFE_ELASTICSEARCH_URL and HALFLIFE_EMBEDDING_BASE_URL",
        )
    return settings.model_copy(update=found), whose


async def _examine(settings: Settings) -> list[Check]:
    checks = [Check("chunks", "warning", line, UNREAD_REMEDY) for line in settings.unread_chunks]
    dims: int | None = None
    embedder_check, dims = await _check_embedder(settings)
    others: dict[str, int | None] = {}
    other_checks: list[Check] = []
    for name in settings.embedding_models:
        check, others[name] = await _check_embedder(settings.with_model(name))
        other_checks.append(replace(check, name=f"embedder {name}"))
    try:
        async with _cluster(settings) as cluster:
            reached = await _check_cluster(cluster)
            checks.append(reached)
            if reached.ok:
                checks.append(await _told("health", _check_health(cluster)))
                checks.append(await _told("features", _check_features(cluster)))
                checks += await _check_templates(cluster, dims=dims or settings.embedding_dims)
                checks += await _check_collections(
                    cluster,
                    dims=dims or settings.embedding_dims,
                    model=settings.embedding_model,
                    others=others,
                )
                checks.append(await _told("clocks", _check_clocks(cluster)))
                checks.append(await _told("disks", _check_disks(cluster)))
    except HalflifeError as error:
        checks.append(_failed("cluster", error))
    return [*checks, embedder_check, *other_checks, *await check_helpers(settings)]


async def _told(name: str, check: Any) -> Check:
    """Return the check, or its failure; one that this user may not make is no failure."""
    try:
        made = await check
        assert isinstance(made, Check)
        return made
    except HalflifeError as error:
        return _unless_forbidden(name, error)


def _failed(name: str, error: HalflifeError) -> Check:
    return Check(name, "failed", error.detail, error.remedy)


def _unless_forbidden(name: str, error: HalflifeError) -> Check:
    if forbidden(error):
        return Check(name, "skipped", f"this user may not look ({error.detail})")
    return _failed(name, error)


def forbidden(error: HalflifeError) -> bool:
    """Tell whether the cluster refused for want of rights."""
    told = f"{error.detail} {error.members}".lower()
    return isinstance(error, ClusterRejected) and any(word in told for word in _FORBIDDEN)


# ---- the cluster ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _cluster(settings: Settings) -> AsyncIterator[Cluster]:
    quick = min(_TIMEOUT_S, settings.elasticsearch_timeout_s)
    cluster = open_cluster(settings.model_copy(update={"elasticsearch_timeout_s": quick}))
    try:
        yield cluster
    finally:
        await cluster.close()


async def _check_cluster(cluster: Cluster) -> Check:
    try:
        info = await cluster.check_version()
    except HalflifeError as error:
        return replace(
            _failed("cluster", error),
            remedy=error.remedy
            or "start one with `halflife up`, or set HALFLIFE_ELASTICSEARCH_URL to one that runs",
        )
    return Check("cluster", "ok", f"Elasticsearch {info.version} '{info.name}' at {', '.join(cluster.urls)}")


async def _check_health(cluster: Cluster) -> Check:
    health = await cluster.health(timeout_s=5.0)
    counted = (
        f"{health['status']}, {health['number_of_nodes']} node{'s' if health['number_of_nodes'] > 1 else ''}"
    )
    if health["status"] == "red":
        return Check(
            "health",
            "failed",
            f"{counted}, {health['unassigned_shards']} shards unassigned: some data can't be reached",
            "see GET /_cluster/allocation/explain",
        )
    return Check("health", "ok", counted)


async def _check_features(cluster: Cluster) -> Check:
    """Try what every search needs, in one request on an index of our own; on the collections where that is forbidden."""
    index = names.own_index(f"doctor_{secrets.token_hex(6)}")
    mapping = {
        "dynamic": "strict",
        "properties": {
            "moment": {"type": "date"},
            "words": {"type": "text", "analyzer": "cjk"},
            "chunks": {
                "type": "nested",
                "properties": {"vector": {"type": "dense_vector", "dims": 3, "similarity": "cosine"}},
            },
        },
    }
    settings = {"number_of_shards": 1, "number_of_replicas": 0}
    try:
        await cluster.create_index(index, {"settings": settings, "mappings": mapping})
    except HalflifeError as error:
        if not forbidden(error):
            raise
        return await _check_features_read_only(cluster)
    try:
        document = {"moment": 0, "words": "halflife", "chunks": [{"vector": [1.0, 0.0, 0.0]}]}
        await cluster.put_document(index, "1", document, refresh="true")
        fault = await _try_searches(
            cluster,
            index,
            moment="moment",
            words="words",
            path="chunks",
            vector="chunks.vector",
            dims=3,
            expect=1,
        )
    finally:
        await cluster.delete_indices([index])
    return _features(fault, "tried on an index of its own, which is removed again")


async def _check_features_read_only(cluster: Cluster) -> Check:
    try:
        known = await catalog.list_collections(cluster)
    except HalflifeError as error:
        return _unless_forbidden("features", error)
    if not known:
        return Check(
            "features",
            "skipped",
            "this user may not make an index to try them on, and there is no collection",
        )
    fault = await _try_searches(
        cluster,
        names.read_alias(known[0].name),
        moment=fields.CREATION_TIME,
        words=fields.TEXT,
        path=fields.CHUNKS,
        vector=fields.EMBEDDING,
        dims=known[0].dims,
        expect=None,
    )
    return _features(fault, f"tried by reading the collection '{known[0].name}'")


def _features(fault: str | None, how: str) -> Check:
    told = "function_score decay, kNN in nested fields, named scores, msearch, point in time"
    if fault is None:
        return Check("features", "ok", f"{told} ({how})")
    return Check(
        "features",
        "failed",
        fault,
        "Halflife needs these of the free licence: is this a stock Elasticsearch?",
    )


async def _try_searches(
    cluster: Cluster,
    index: str,
    *,
    moment: str,
    words: str,
    path: str,
    vector: str,
    dims: int,
    expect: int | None,
) -> str | None:
    """Return what doesn't work, or None. `expect` hits of each search, where that is known."""
    direction = np.zeros(dims, dtype=np.float32)
    direction[0] = 1.0
    near = {"field": vector, "query_vector": pack_vector(direction), "k": 1, "num_candidates": 1}
    nested = {"nested": {"path": path, "score_mode": "max", "_name": "raw", "query": {"knn": near}}}
    decay = {"exp": {moment: {"origin": 0, "scale": "1d", "decay": 0.5}}}
    pit = await cluster.open_pit(index, keep_alive_s=30, timeout_s=_TIMEOUT_S)
    try:
        bodies: list[dict[str, Any]] = [
            {
                "pit": {"id": pit},
                "size": 1,
                "query": {"function_score": {"query": query, "functions": [decay], "boost_mode": "multiply"}},
            }
            for query in ({"match": {words: {"query": "halflife", "_name": "raw"}}}, nested)
        ]
        answers = await cluster.msearch([({}, body) for body in bodies], timeout_s=_TIMEOUT_S)
    finally:
        await cluster.close_pit(pit)
    for what, answer in zip(("text search under decay", "kNN under decay"), answers, strict=True):
        if isinstance(answer, HalflifeError):
            return f"{what}: {answer.detail}"
        found = answer["hits"]["hits"]
        if expect is not None and len(found) != expect:
            return f"{what} found {len(found)} documents where {expect} was to be found"
        if found and not isinstance(found[0].get("matched_queries"), dict):
            return f"{what}: the scores of named queries are not told"
    return None


# ---- templates and collections --------------------------------------------------------------------------------------


async def _check_templates(cluster: Cluster, *, dims: int | None) -> list[Check]:
    shipped = catalog.templates(dims=dims or 1)
    checks = []
    for name, body in shipped.items():
        try:
            found = await (
                cluster.get_index_template(name)
                if name == catalog.INDEX_TEMPLATE
                else cluster.get_component_template(name)
            )
        except HalflifeError as error:
            checks.append(_unless_forbidden(f"template {name}", error))
            continue
        checks.append(_template(name, body, found, sure_of_dims=dims is not None))
    try:
        await catalog.verify(cluster, dims=dims or 1)
    except HalflifeError as error:
        # Collections are looked at one by one below; here it is about what a new one would get.
        if "index templates" in error.detail:
            checks.append(_unless_forbidden("template in effect", error))
    return checks


def _template(
    name: str, wanted: dict[str, Any], found: dict[str, Any] | None, *, sure_of_dims: bool
) -> Check:
    label = f"template {name}"
    if found is None:
        return Check(
            label, "failed", "not installed", "start the API once (`halflife serve`): it installs them"
        )
    version = found.get("version")
    if version != wanted["version"]:
        newer = isinstance(version, int) and version > wanted["version"]
        remedy = "upgrade this Halflife" if newer else "restart the API: it upgrades them"
        return Check(label, "failed", f"version {version}, this Halflife brings {wanted['version']}", remedy)
    digest = found.get("_meta", {}).get("halflife", {}).get("digest")
    if sure_of_dims and digest != wanted["_meta"]["halflife"]["digest"]:
        return Check(
            label,
            "warning",
            f"version {version}, but not as this Halflife would write it (other dims, or changed by hand)",
            "restart the API to write it anew; put changes of your own into `halflife@custom`",
        )
    return Check(label, "ok", f"version {version}")


async def _check_collections(
    cluster: Cluster, *, dims: int | None, model: str, others: Mapping[str, int | None]
) -> list[Check]:
    try:
        aliases = await cluster.resolve_aliases(f"{names.PREFIX}*")
    except HalflifeError as error:
        return [_unless_forbidden("collections", error)]
    known = sorted(name for alias in aliases if (name := names.parse_read_alias(alias)) is not None)
    if not known:
        return [Check("collections", "ok", "none yet")]
    return [await _check_collection(cluster, name, dims=dims, model=model, others=others) for name in known]


async def _check_collection(
    cluster: Cluster, name: str, *, dims: int | None, model: str, others: Mapping[str, int | None]
) -> Check:
    label = f"collection {name}"
    try:
        collection = (await catalog.get(cluster, name)).collection
        own = collection.model
        if own is not None and own != model and own in others:
            # Each collection is read and written with its own model.
            model, dims = own, others[own]
        warning = catalog.check_compatible(collection, dims=dims, model=model) if dims is not None else None
    except NotFound:
        return Check(label, "ok", "deleted meanwhile")
    except HalflifeError as error:
        return _unless_forbidden(label, error)
    if warning is not None:
        return Check(label, "warning", warning, "set HALFLIFE_EMBEDDING_MODEL to the model it was made with")
    unsure = "" if dims is not None else "; whether the embedder's fit is unknown"
    return Check(
        label,
        "ok",
        f"mapping as expected, {collection.dims} dims, {collection.similarity}, {collection.model}{unsure}",
    )


# ---- clocks and disks -----------------------------------------------------------------------------------------------


async def _check_clocks(cluster: Cluster) -> Check:
    before = time.time_ns() // 1_000_000
    clocks = await cluster.clocks()
    after = time.time_ns() // 1_000_000
    skews = {node: skew_ms(clock, before, after) for node, clock in clocks.items()}
    wrong = {node: skew for node, skew in skews.items() if abs(skew) > MOST_SKEW_MS}
    if wrong:
        told = ", ".join(
            f"{node} {abs(skew) / 1000:.1f} s {'ahead' if skew > 0 else 'behind'}"
            for node, skew in wrong.items()
        )
        return Check(
            "clocks", "failed", f"against this machine's: {told}", "keep both in time with NTP (chrony)"
        )
    most = max((abs(skew) for skew in skews.values()), default=0)
    return Check("clocks", "ok", f"{len(skews)} within {max(most, 1) / 1000:.3f} s of this machine's")


def skew_ms(clock: int, before: int, after: int) -> int:
    """Return how far a node's clock is off, at the least: 0 where it may have been right when it was read."""
    if clock > after:
        return clock - after
    if clock < before - _CLOCK_GRAIN_MS:
        return clock - (before - _CLOCK_GRAIN_MS)
    return 0


async def _check_disks(cluster: Cluster) -> Check:
    stats = await cluster.node_stats("fs")
    told: list[str] = []
    full: list[str] = []
    tight: list[str] = []
    for node in stats["nodes"].values():
        for disk in node.get("fs", {}).get("data", []):
            free = disk.get("available_in_bytes")
            if free is None:
                continue
            words = f"{node['name']} {free / 1e9:.1f} GB free"
            told.append(words)
            if free <= disk.get("flood_stage_free_space_in_bytes", 0):
                full.append(words)
            elif free <= disk.get("high_watermark_free_space_in_bytes", 0):
                tight.append(words)
    blocked = [
        index
        for index in await cluster.resolve_index(f"{names.PREFIX}*")
        if str((await cluster.get_settings(index))[index].get(_FLOOD_BLOCK, "false")) == "true"
    ]
    remedy = "free some space, or add a disk or a node; Elasticsearch lifts its block by itself then"
    if blocked or full:
        stage = f"writes to {', '.join(blocked)} are blocked" if blocked else "past the flood stage"
        return Check("disks", "failed", f"{stage}: {', '.join(full or told)}", remedy)
    if tight:
        return Check("disks", "warning", f"past the high watermark: {', '.join(tight)}", remedy)
    return Check("disks", "ok", f"{', '.join(told)}, below the watermarks")


# ---- the embedding server and the API -------------------------------------------------------------------------------


async def _check_embedder(settings: Settings) -> tuple[Check, int | None]:
    quick = min(_TIMEOUT_S, settings.embedding_timeout_s)
    try:
        embedder = open_embedder(settings.model_copy(update={"embedding_timeout_s": quick}))
    except InvalidRequest as error:
        return _failed("embedder", error), None
    begun = time.monotonic()
    try:
        dims = await asyncio.wait_for(embedder.check(), _TIMEOUT_S)
    except TimeoutError:
        told = f"{settings.embedding_base_url} did not answer within {_TIMEOUT_S:g} s"
        return Check("embedder", "failed", told, "see whether it is overloaded"), None
    except HalflifeError as error:
        return _failed("embedder", error), None
    finally:
        await embedder.close()
    took = (time.monotonic() - begun) * 1000
    base = settings.embedding_base_url
    return Check("embedder", "ok", f"{settings.embedding_model} at {base}: {dims} dims, {took:.0f} ms"), dims


async def check_helpers(settings: Settings) -> list[Check]:
    """Ask the reranker and the rewriter for something small each, where they are configured."""
    checks: list[Check] = []
    for name, ask in (("reranker", _ask_reranker), ("rewriter", _ask_rewriter)):
        begun = time.monotonic()
        try:
            told = await ask(settings)
        except HalflifeError as error:
            checks.append(_failed(name, error))
            continue
        if told is not None:
            checks.append(Check(name, "ok", f"{told}, {(time.monotonic() - begun) * 1000:.0f} ms"))
    return checks


async def _ask_reranker(settings: Settings) -> str | None:
    reranker = open_reranker(settings)
    if reranker is None:
        return None
    try:
        scores = await reranker.rerank("how long is leave", ["thirty days of leave"], deadline_s=_TIMEOUT_S)
    finally:
        await reranker.close()
    if scores[0] is None:
        raise RerankerFailed(
            f"{settings.rerank_url} answered no score", remedy="see its log, and HALFLIFE_RERANK_MODEL"
        )
    return f"{settings.rerank_model or 'a reranker'} at {settings.rerank_url}: a score of {scores[0]:.3g}"


async def _ask_rewriter(settings: Settings) -> str | None:
    rewriter = open_rewriter(settings)
    if rewriter is None:
        return None
    try:
        await rewriter.rewrite(
            "how long is leave", RewriteOptions(keywords=True), deadline_s=settings.rewrite_timeout_s
        )
    finally:
        await rewriter.close()
    return f"{settings.rewrite_model} at {settings.rewrite_url}: rewrites within HALFLIFE_REWRITE_TIMEOUT_S"


def _api_url(data: Path | None) -> str | None:
    """Return the API's address as every command finds it; None where only the default port would be left."""
    if data is None and not said(URL_VARIABLE) and stack.asked_for(None) is None:
        return None
    return find_url(None, data)


def _check_api(url: str | None) -> Check | None:
    if not url or url.startswith("https:"):
        return None
    status, answer = stack.get_json(f"{url}/readyz", 10.0)
    if status == 200:
        return Check("api", "ok", f"ready at {url}")
    if status is None:
        return Check(
            "api", "failed", f"{url} does not answer", "start it with `halflife up` or `halflife serve`"
        )
    checks = answer.get("checks", {}) if isinstance(answer, dict) else {}
    reasons = [f"{name}: {told.get('reason')}" for name, told in checks.items() if told.get("status") != "ok"]
    return Check(
        "api", "failed", f"not ready: {'; '.join(reasons) or f'HTTP {status}'}", "see the failed checks above"
    )
