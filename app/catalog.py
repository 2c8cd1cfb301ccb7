"""Collections: their templates, how they are made, found, checked and deleted.

Owns the shape of a collection's index and which aliases lead to it. Writes no document and runs no search. That a
collection has one index is the cluster's own guarantee, not a check of ours: its read alias is a write index, and
the master refuses an index that would be a second one.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final, cast, get_args

from pydantic import ValidationError

from app import fields, moves, names, synonyms, turns
from app.collection import (
    MOST_DECLARED,
    Ages,
    Collection,
    CollectionDetails,
    CollectionOptions,
    DeclaredType,
    Similarity,
    SynonymRule,
)
from app.elastic import Cluster
from app.errors import (
    ClusterRejected,
    ClusterUnavailable,
    Conflict,
    HalflifeError,
    InvalidRequest,
    NotFound,
    SchemaMismatch,
    Unavailable,
)
from app.ranking import Experiment, Profile, stored_profiles
from app.refusals import explained
from app.times import from_ms
from app.turns import Turn

Json = dict[str, Any]

COMPONENTS = ("halflife-settings", "halflife-mappings")
MAPPINGS = "halflife-mappings"
INDEX_TEMPLATE = "halflife-collections"
SEARCHES_TEMPLATE = "halflife-searches"
FEEDBACK_TEMPLATE = "halflife-feedback"
OWN_TEMPLATES = (SEARCHES_TEMPLATE, FEEDBACK_TEMPLATE)
"""Of the search log and of feedback: installed only where these are on."""
TOMBSTONES_HIDDEN: Json = {"bool": {"must_not": [{"term": {fields.DELETED: True}}]}}
"""The read alias' filter; every route, kNN included, sees the collection through it."""

_DECLARED: dict[DeclaredType, Json] = {
    "long": {"type": "long"},
    "double": {"type": "double"},
    "boolean": {"type": "boolean"},
    "date": {"type": "date", "format": "strict_date_optional_time||epoch_millis"},
    # 8191 characters of four bytes are the longest that Lucene takes as one term.
    "keyword": {"type": "keyword", "ignore_above": 8191},
}
FENCES: Final = 4
"""How often writers are kept out again where others let them in before keys are declared."""
IN_FENCE_S: Final = 3.0
"""Longest wait for one change of an index while writers are kept out of it."""
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
_REINDEX = "reindex the collection into a new index (`halflife reindex`)"


@dataclass(frozen=True, slots=True)
class WriteTarget:
    """The alias that every write of the current generation goes to, and the index behind it."""

    alias: str
    index: str
    generation: int
    slot: names.Slot


@dataclass(frozen=True, slots=True)
class Known:
    """A collection and where it is written to: nowhere for the moment of a reindex' fence, then `fence` says so."""

    collection: Collection
    target: WriteTarget | None
    fence: WriteTarget | None = None
    """A generation with a `b` and no `a`: writers wait, see `moves`."""


# --- templates -----------------------------------------------------------------------------------------------------


def shipped(name: str) -> Json:
    """Return a template as the file in `es_mappings/` has it."""
    return cast(Json, json.loads(files("es_mappings").joinpath(f"{name}.json").read_text("utf-8")))


def templates(*, dims: int, similarity: Similarity = "cosine") -> dict[str, Json]:
    """Return name -> body of all templates, components first, with the vectors' dims and similarity laid over."""
    bodies = {name: shipped(name) for name in (*COMPONENTS, INDEX_TEMPLATE)}
    _embedding(bodies[MAPPINGS]["template"]["mappings"]).update(dims=dims, similarity=similarity)
    for body in bodies.values():
        body["_meta"]["halflife"]["digest"] = _digest(body)
    return bodies


async def install_templates(cluster: Cluster, *, dims: int, similarity: Similarity = "cosine") -> list[str]:
    """Create or upgrade the templates and return the names of those written; none when all are as wanted.

    Any number of services may do so at once. What an operator wants otherwise goes into a component template named
    `halflife@custom`, which ours never touch. Raises SchemaMismatch, and writes nothing, if a newer Halflife
    installed any of them.
    """
    return await _install(cluster, templates(dims=dims, similarity=similarity))


async def install_own_templates(cluster: Cluster, *wanted: str) -> list[str]:
    """Create or upgrade index templates of the service's own indices (`OWN_TEMPLATES`); return those written."""
    bodies = {name: shipped(name) for name in wanted}
    for body in bodies.values():
        body["_meta"]["halflife"]["digest"] = _digest(body)
    return await _install(cluster, bodies)


async def _install(cluster: Cluster, wanted: Mapping[str, Json]) -> list[str]:
    stale: list[str] = []
    for name, body in wanted.items():
        found = await (
            cluster.get_component_template(name) if name in COMPONENTS else cluster.get_index_template(name)
        )
        version = (found or {}).get("version")
        if isinstance(version, int) and version > body["version"]:
            raise SchemaMismatch(
                f"the template {name} in the cluster has version {version}, this service brings {body['version']}",
                remedy="a newer Halflife uses this cluster: upgrade this service, or give it a cluster of its own",
            )
        meta = (found or {}).get("_meta", {}).get("halflife", {})
        if (
            found is None
            or version != body["version"]
            or meta.get("digest") != body["_meta"]["halflife"]["digest"]
        ):
            stale.append(name)
    for name in stale:
        if name in COMPONENTS:
            await cluster.put_component_template(name, wanted[name])
        else:
            await _put_index_template(cluster, name, wanted[name])
    return stale


async def _put_index_template(cluster: Cluster, name: str, body: Json) -> None:
    try:
        await cluster.put_index_template(name, body)
    except ClusterRejected as error:
        if "same priority" in error.detail:
            raise SchemaMismatch(
                error.detail,
                remedy=f"another index template claims {', '.join(body['index_patterns'])} with priority "
                f"{body['priority']}: delete it or give it another priority",
            ) from error
        raise


async def verify(cluster: Cluster, *, dims: int, model: str | None = None) -> list[Collection]:
    """Check what a new collection would get and every collection there is; return the collections, by name.

    Raises SchemaMismatch with the remedy at the first that does not fit: a template that another one shadows, an
    index with a field missing or of another type, vectors of the configured model with other dims.
    """
    probe = f"{names.PREFIX}verify-00000000000000000"
    template = await cluster.simulate_index(probe)
    check_mapping(
        template.get("mappings", {}), where="what the index templates give a new collection", of_template=True
    )
    known = await list_collections(cluster)
    for collection in known:
        if collection.model is not None and collection.model == model:
            check_compatible(collection, dims=dims)
    return known


# --- collections ---------------------------------------------------------------------------------------------------


def index_body(
    name: str,
    options: CollectionOptions,
    *,
    dims: int,
    model: str | None,
    slot_aliases: Mapping[str, Json],
    uid: str | None = None,
    rules: Sequence[SynonymRule] = (),
) -> Json:
    """Return the create-index body of a collection: what it adds to the templates, and its aliases.

    `uid` is a new collection's first index, and what the index before says where this one takes its place.
    """
    settings: Json = {}
    if "shards" in options.model_fields_set:
        settings["number_of_shards"] = options.shards
    settings |= _changeable(options)
    embedding = copy.deepcopy(_embedding(shipped(MAPPINGS)["template"]["mappings"]))
    embedding.update(dims=dims, similarity=options.similarity)
    declared = {key: _DECLARED[kind] for key, kind in sorted(options.declared.items())}
    meta = {
        "template_version": shipped(MAPPINGS)["version"],
        "collection": name,
        "uid": uid,
        "dims": dims,
        "similarity": options.similarity,
        "model": model,
        "declared": dict(sorted(options.declared.items())),
        **_ranking(options),
    }
    if rules:
        meta["synonyms"] = [rule.model_dump(mode="json") for rule in rules]
    mappings: Json = {
        "_meta": {"halflife": meta},
        "properties": {
            fields.CHUNKS: {
                "type": "nested",
                "dynamic": "strict",
                "properties": {_leaf(fields.EMBEDDING): embedding},
            },
            fields.DECLARED: {"type": "object", "dynamic": "strict", "properties": declared},
        },
    }
    body: Json = {"mappings": mappings, "aliases": dict(slot_aliases)}
    if settings:
        body["settings"] = {"index": settings}
    return body


def _changeable(options: CollectionOptions) -> Json:
    """Return the index settings of the options that can change in place, of those that are named."""
    settings: Json = {}
    if options.replicas is not None:
        settings.update(number_of_replicas=options.replicas, auto_expand_replicas="false")
    elif "replicas" in options.model_fields_set:
        settings.update(auto_expand_replicas="0-1")
    if options.refresh_interval is not None:
        settings.update(refresh_interval=options.refresh_interval)
    return settings


def _ranking(options: CollectionOptions) -> Json:
    """Return what of the options can change in place: how searches rank."""
    return {
        "profiles": {
            name: profile.model_dump(mode="json", exclude_none=True)
            for name, profile in sorted(options.profiles.items())
        },
        "default_profile": options.default_profile,
        "experiment": _dumped(options.experiment),
    }


def _dumped(experiment: Experiment | None) -> Json | None:
    return None if experiment is None else experiment.model_dump(mode="json", exclude_none=True)


def first_aliases(name: str, moment: datetime) -> dict[str, Json]:
    """Return the aliases that the first index of a collection made at `moment` is born with."""
    writing = names.write_alias(name, names.first_generation(moment))
    return {names.read_alias(name): read_alias_properties(), writing: {}}


def read_alias_properties() -> Json:
    """Return the read alias' properties, as create-index and `_aliases` take them.

    `is_write_index` is what keeps two creators from making two indices; a swap must carry it over.
    """
    return {"filter": copy.deepcopy(TOMBSTONES_HIDDEN), "is_write_index": True}


async def create(
    cluster: Cluster,
    name: str,
    options: CollectionOptions,
    *,
    dims: int,
    model: str | None,
    moment: datetime,
    rules: Sequence[SynonymRule] = (),
) -> Collection:
    """Make the collection, or change what can change in place, and return it.

    `dims` are the embedder's; `options.dims` outranks them. `moment` names the index; `rules` are the synonyms of a new
    one. However many creators run at
    once, one index is made and all return it. Raises Conflict, with nothing changed, where the collection exists and an
    option asks for another index (the remedy is the command that makes it), InvalidRequest for a default profile that is
    none, SchemaMismatch if something else has its name or the templates are missing.
    """
    embedder_dims = dims
    dims = options.dims or dims
    if options.model is not None and dims != embedder_dims:
        raise InvalidRequest(
            f"the model {options.model} makes vectors of {embedder_dims} dims, not {dims}",
            field="dims",
            remedy="leave `dims` out, or `model`",
        )
    if options.dims is not None and options.dims != embedder_dims:
        model = None  # its vectors come from callers, so no embedder is bound to fit it
    if options.if_revision is not None:
        await get(cluster, name)  # there must be something that has a revision
    wanted = {options.default_profile, *_arms(options.experiment)} - {None}
    if wanted and "profiles" not in options.model_fields_set:
        # One of the stored profiles is meant: there must be a collection that has it.
        try:
            await get(cluster, name)
        except NotFound:
            _check_named(options.default_profile, options.experiment, {})
    index = names.index_name(name, moment)
    aliases = first_aliases(name, moment)
    body = index_body(name, options, dims=dims, model=model, slot_aliases=aliases, uid=index, rules=rules)
    try:
        found = await _create_once(cluster, name, index, body)
    except SchemaMismatch:
        # Most likely someone deleted the templates while this service ran.
        if not await install_templates(cluster, dims=dims, similarity=options.similarity):
            raise
        found = await _create_once(cluster, name, index, body)
    if found.collection.index == index:
        return found.collection
    return await change(cluster, found.collection, options, dims=dims)


async def change(
    cluster: Cluster, collection: Collection, options: CollectionOptions, *, dims: int
) -> Collection:
    """Change a collection in place to what the options name, and return it; what they leave out stays.

    Raises Conflict, with nothing changed, where something needs another index.
    """
    _check_same(collection, options, dims=dims)
    named = options.model_fields_set
    wanted = _changeable(options)
    if "shards" in named:
        found = (await cluster.get_settings(collection.index))[collection.index]
        if int(found["index.number_of_shards"]) != options.shards:
            raise _needs_reindex(
                collection.name,
                "shards",
                found["index.number_of_shards"],
                options.shards,
                f"--shards {options.shards}",
            )
    added = {key: kind for key, kind in options.declared.items() if key not in collection.declared}
    if added and len(collection.declared) + len(added) > MOST_DECLARED:
        raise InvalidRequest(
            f"a collection declares at most {MOST_DECLARED} keys, and `{collection.name}` has {len(collection.declared)}",
            field="declared",
            remedy=f"leave keys undeclared, or drop some: halflife reindex {collection.name} --undeclare KEY",
        )
    if added:
        await _check_declarable(cluster, collection, added)

    def revised(meta: Json) -> Json:
        given = {key: value for key, value in _ranking(options).items() if key in named}
        made = {**meta, **given}
        if added:
            declared = meta.get("declared", {})
            # Another may have declared one of them since, as another type.
            since = {key: kind for key, kind in declared.items() if key in added}
            _check_same(collection.model_copy(update={"declared": since}), options, dims=dims)
            made["declared"] = dict(sorted({**declared, **added}.items()))
        if given:
            _check_named(made.get("default_profile"), _read_experiment(made, {}), made.get("profiles", {}))
        return made

    return await _revise(
        cluster, collection, revised, declares=added, settings=wanted, if_revision=options.if_revision
    )


def _arms(experiment: Experiment | None) -> list[str]:
    return [] if experiment is None else [arm.profile for arm in experiment.arms]


def _check_named(name: str | None, experiment: Experiment | None, profiles: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a default or an arm that is none of the profiles."""
    if name is not None and name not in profiles:
        raise InvalidRequest(
            f"`default_profile` '{name}' is not among the profiles",
            field="default_profile",
            remedy="give it in `profiles`, or name one of those",
        )
    for at, arm in enumerate(_arms(experiment)):
        if arm not in profiles:
            raise InvalidRequest(
                f"the experiment's profile '{arm}' is not among the profiles",
                field=f"experiment.arms[{at}].profile",
                remedy="give it in `profiles`, or end the experiment with `experiment`: null",
            )


async def _check_declarable(
    cluster: Cluster, collection: Collection, added: Mapping[str, DeclaredType]
) -> None:
    """Raise Conflict where stored documents would lack the typed copy, so that a range would not find them."""
    every = await cluster.resolve_index(names.index_pattern(collection.name))
    if [index for index in every if names.collection_of(index) == collection.name] != [collection.index]:
        raise Conflict(
            f"the collection `{collection.name}` has a second index: a reindex is under way or not finished",
            field="declared",
            remedy=f"halflife reindex {collection.name} --status, then --finish or --abort; after that try again",
        )
    await cluster.refresh(collection.index)
    for key, kind in sorted(added.items()):
        # Not tombstones, which may tell by it whose document they were.
        carrying = {
            "filter": [{"exists": {"field": f"{fields.METADATA}.{key}"}}],
            "must_not": [{"term": {fields.DELETED: True}}],
        }
        carry = await cluster.count(collection.index, {"bool": carrying})
        if carry:
            raise Conflict(
                f"{carry} documents of `{collection.name}` have the metadata key `{key}` already, without its type",
                field=f"declared.{key}",
                remedy=f"type them too: halflife reindex {collection.name} --declare {key}={kind}",
            )


async def _revise(
    cluster: Cluster,
    collection: Collection,
    revised: Callable[[Json], Json],
    *,
    declares: Mapping[str, DeclaredType] | None = None,
    settings: Mapping[str, Any] | None = None,
    if_revision: int | None = None,
) -> Collection:
    """Change what a collection's `_meta` says to what `revised` makes of it, in turn with all others who do so.

    `declares`: keys that are new, of the collection's index and no other. `settings`: the index is to have them, for
    which there are no revisions. Raises Conflict, with nothing changed, where the collection is not at `if_revision`,
    or documents have a key already.
    """
    mapping = (await cluster.get_mapping(collection.index))[collection.index]
    if (
        if_revision is None
        and revised(mapping["_meta"]["halflife"]) == mapping["_meta"]["halflife"]
        and not await _unlike(cluster, collection.index, settings or {})
    ):
        return read_collection(collection.name, collection.index, mapping)
    async with turns.turn(cluster, collection.name) as turn:
        # As it is now: a reindex may have given the collection another index.
        index = (await get(cluster, collection.name)).collection.index
        mapping = (await cluster.get_mapping(index))[index]
        meta = mapping["_meta"]["halflife"]
        revision = meta.get("revision", 0)
        if if_revision not in (None, revision):
            raise Conflict(
                f"the options of `{collection.name}` are at revision {revision}, not {if_revision}",
                field="if_revision",
                remedy="read them again, make your change to what they are now, and send their `revision`",
                revision=revision,
            )
        if declares and index != collection.index:
            raise ClusterUnavailable(
                f"`{collection.name}` has got another index meanwhile",
                remedy="send it again",
                retry_after_s=1,
            )
        made = revised(meta)
        before = meta.get("declared", {})
        new = {key: kind for key, kind in (declares or {}).items() if key not in before}

        def call_s() -> float:
            return min(turn.call_s(), IN_FENCE_S) if new else turn.call_s()

        async def put(wanted: Json, *, typed: Mapping[str, DeclaredType]) -> None:
            body: Json = {"_meta": {**mapping["_meta"], "halflife": wanted}}
            if typed:
                properties = {key: _DECLARED[kind] for key, kind in sorted(typed.items())}
                body["properties"] = {
                    fields.DECLARED: {"type": "object", "dynamic": "strict", "properties": properties}
                }
            await cluster.put_mapping(index, body, timeout_s=call_s())

        async def apply() -> None:
            # First what has no revision: where it fails, the same request can be sent again.
            if changed := await _unlike(cluster, index, settings or {}):
                await cluster.put_settings(index, {"index": changed}, timeout_s=call_s())
            if made == meta:
                return
            made["revision"] = revision + 1
            lost: HalflifeError | None = None
            try:
                await put(made, typed=new)
            except Unavailable as error:
                lost = error
            # Whether it is in force: its answer may have been lost, or another's change have come late.
            now = (await cluster.get_mapping(index))[index]["_meta"]["halflife"]
            if now.get("revision", 0) <= revision or revised(now) != now:
                raise lost or ClusterUnavailable(
                    f"changing the options of `{collection.name}`: another change undid it",
                    remedy="read them again, and send it again where it is missing",
                    retry_after_s=1,
                )

        async def undo() -> None:
            await put({**meta, "revision": revision + 2}, typed={})

        if new:
            await _declare(cluster, collection, new, apply=apply, undo=undo)
        else:
            await apply()
        return await read_index(cluster, collection.name, index)


async def _declare(
    cluster: Cluster,
    collection: Collection,
    new: Mapping[str, DeclaredType],
    *,
    apply: Callable[[], Awaitable[None]],
    undo: Callable[[], Awaitable[None]],
) -> None:
    """Do `apply`, which declares keys, where no document has one of them, and let in no write that doesn't know of it.

    Processes remember for seconds what is declared, and a write may wait for its embedding for longer: what they write
    would lack the typed copies. So writers are kept out behind a fence, the documents counted and the keys declared;
    whoever comes with the write alias of before is turned away, and reads again what is declared.
    """
    name, index = collection.name, collection.index
    applied = False
    for _ in range(FENCES):
        standing = await moves.standing(cluster, name)
        if standing.fenced == index:
            # Of a process that was killed, or of a reindex, which then makes another.
            await moves.lift(cluster, name, index=index, generation=standing.generation)
            continue
        if standing.written != index or standing.live != index:
            break
        untouched = fenced = False
        try:
            async with asyncio.timeout(moves.FENCE_TIMEOUT_S - IN_FENCE_S):
                try:
                    fenced = True
                    await moves.fence(cluster, name, index=index, generation=standing.generation)
                except NotFound:
                    fenced = False
                    continue
                try:
                    await _check_declarable(cluster, collection, new)
                except Conflict:
                    if applied:
                        await undo()
                    raise
            if not applied:
                await apply()
                applied = True
        except TimeoutError as error:
            raise _not_declared(name) from error
        finally:
            if fenced:
                lifting = moves.lift(cluster, name, index=index, generation=standing.generation + 1)
                untouched = await asyncio.shield(asyncio.ensure_future(lifting))
        if untouched:
            return
        # Somebody has let writers in meanwhile, perhaps before the keys were declared: count again.
    raise _not_declared(name)


def _not_declared(name: str) -> ClusterUnavailable:
    return ClusterUnavailable(
        f"declaring keys of `{name}`: writers could not be kept out for as long as it takes",
        remedy="send it again",
        retry_after_s=1,
    )


async def _unlike(cluster: Cluster, index: str, settings: Mapping[str, Any]) -> Json:
    """Return those of the settings that an index doesn't have yet."""
    if not settings:
        return {}
    found = (await cluster.get_settings(index))[index]
    return {key: value for key, value in settings.items() if str(value) != str(found.get(f"index.{key}"))}


async def describe(
    cluster: Cluster, collection: Collection, *, within: Sequence[Json] | None = None
) -> CollectionDetails:
    """Return what a collection is and holds now: of the documents `within` these clauses, where some are given."""
    body: Json = {
        "size": 0,
        "track_total_hits": True,
        "query": {"bool": {"filter": list(within or ())}},
        "aggs": {
            "chunks": {"nested": {"path": fields.CHUNKS}},
            "oldest": {"min": {"field": fields.CREATION_TIME}},
            "newest": {"max": {"field": fields.CREATION_TIME}},
            "undated": {"missing": {"field": fields.CREATION_TIME}},
            "evergreen": {"filter": {"term": {fields.EVERGREEN: True}}},
        },
    }
    answer = await cluster.search(
        names.read_alias(collection.name),
        body,
        timeout_s=cluster.request_timeout_s,
        doing="describing a collection",
    )
    # Tombstones carry no field to filter by, and bytes are of all documents.
    deleted = size = None
    if within is None:
        deleted = await cluster.count(collection.index, {"term": {fields.DELETED: True}})
        stats = await cluster.index_stats(collection.index)
        size = stats["_all"]["total"]["store"]["size_in_bytes"]
    settings = (await cluster.get_settings(collection.index))[collection.index]
    found = answer["aggregations"]

    def instant(name: str) -> datetime | None:
        value = found[name].get("value")
        return None if value is None else from_ms(int(value))

    return CollectionDetails(
        **{name: getattr(collection, name) for name in Collection.model_fields},
        documents=answer["hits"]["total"]["value"],
        deleted=deleted,
        chunks=found["chunks"]["doc_count"],
        size_bytes=size,
        shards=int(settings["index.number_of_shards"]),
        replicas=int(settings["index.number_of_replicas"]),
        refresh_interval=str(settings.get("index.refresh_interval", "1s")),
        ages=Ages(
            oldest=instant("oldest"),
            newest=instant("newest"),
            undated=found["undated"]["doc_count"],
            evergreen=found["evergreen"]["doc_count"],
        ),
    )


async def put_synonyms(
    cluster: Cluster,
    collection: Collection,
    rules: Sequence[SynonymRule],
    *,
    if_revision: int | None = None,
) -> Collection:
    """Store the rules with the collection, in the place of those it has, and return it.

    Searches read them with the collection, so no index is closed and none is read anew. Raises InvalidRequest, and
    Conflict where the collection is not at `if_revision`.
    """
    synonyms.check(rules)
    given = [rule.model_dump(mode="json") for rule in rules]
    return await _revise(
        cluster, collection, lambda meta: {**meta, "synonyms": given}, if_revision=if_revision
    )


async def carry_options(cluster: Cluster, turn: Turn, *, source: str, target: str) -> None:
    """Give the index `target` what the collection's index `source` says of how searches rank: profiles, experiment, synonyms.

    Where they differ in declared keys, that counts as a change. To be called in a turn that lasts until the two are
    exchanged: else a change to the one in between is lost.
    """
    kept = ("profiles", "default_profile", "experiment", "synonyms", "revision")
    told = (await cluster.get_mapping(source))[source].get("_meta", {}).get("halflife", {})
    mapping = (await cluster.get_mapping(target))[target]
    before = mapping["_meta"]["halflife"]
    meta = {**before, **{name: told[name] for name in kept if name in told}}
    if meta.get("declared", {}) != told.get("declared", {}):
        meta["revision"] = told.get("revision", 0) + 1
    if meta != before:
        body = {"_meta": {**mapping["_meta"], "halflife": meta}}
        await cluster.put_mapping(target, body, timeout_s=turn.call_s())


async def _create_once(cluster: Cluster, name: str, index: str, body: Json) -> Known:
    """Create the index, or find the one that is there; an index of ours that came out wrong is deleted again."""
    try:
        await cluster.create_index(index, body)
    except (ClusterRejected, ClusterUnavailable, Conflict) as error:
        # Someone else was first, or the answer got lost on its way: what stands in the cluster decides.
        return await _found(cluster, name, instead_of=error)
    try:
        return await get(cluster, name)
    except SchemaMismatch:
        await cluster.delete_indices([index])
        raise


async def _found(cluster: Cluster, name: str, *, instead_of: HalflifeError) -> Known:
    try:
        return await get(cluster, name)
    except NotFound:
        raise instead_of from None


async def get(cluster: Cluster, name: str) -> Known:
    """Return the collection and its write target, checked. Raises NotFound or SchemaMismatch."""
    read = names.read_alias(name)
    aliases = await cluster.resolve_aliases(read, names.index_pattern(name))
    if read not in aliases:
        if read in await cluster.resolve_index(read):
            raise SchemaMismatch(
                f"`{read}` is an index; Halflife needs that name for the alias of the collection `{name}`",
                remedy=f"copy what you need out of the index and delete it (DELETE {read}), or choose another collection",
            )
        raise absent(name)
    if len(aliases[read]) != 1:
        raise SchemaMismatch(
            f"the alias `{read}` leads to {len(aliases[read])} indices: {', '.join(sorted(aliases[read]))}",
            remedy="remove it from all but the current one with POST /_aliases",
        )
    [(index, properties)] = aliases[read].items()
    if "filter" not in properties:
        raise SchemaMismatch(
            f"the alias `{read}` has no filter, so deleted documents would be found",
            remedy=f"add it again with POST /_aliases and {json.dumps({'filter': TOMBSTONES_HIDDEN})}",
        )
    mapping = (await cluster.get_mapping(index))[index]
    target = _target(name, aliases, index)
    collection = read_collection(name, index, mapping)
    if target.slot == "b":
        return Known(collection, None, fence=target)
    return Known(collection, target)


def absent(name: str) -> NotFound:
    """Return what is told of a collection that is not there, and of one that the caller may not know of."""
    return NotFound(f"there is no collection `{name}`", remedy=f"create it with PUT /v1/collections/{name}")


def _target(name: str, aliases: Mapping[str, Mapping[str, Json]], index: str) -> WriteTarget:
    """Return the write alias of the newest generation: its `a`, or the `b` that stands alone behind a fence.

    `index` is the one that is read.
    """
    targets: list[WriteTarget] = []
    for alias, indices in aliases.items():
        parsed = names.parse_write_alias(alias)
        if parsed is None or parsed[0] != name:
            continue
        if len(indices) != 1:
            raise SchemaMismatch(
                f"the write alias `{alias}` leads to {len(indices)} indices: {', '.join(sorted(indices))}",
                remedy="remove it from all but one with POST /_aliases",
            )
        targets.append(WriteTarget(alias, next(iter(indices)), parsed[1], parsed[2]))
    if not targets:
        moment = names.made_at(index) if names.collection_of(index) == name else _LONG_AGO
        raise SchemaMismatch(
            f"the collection `{name}` has no write alias",
            remedy=f"add `{names.write_alias(name, names.first_generation(moment))}` to its index with POST /_aliases",
        )
    return min(targets, key=lambda target: (-target.generation, target.slot))


async def list_collections(
    cluster: Cluster,
    *,
    only: Callable[[str], bool] = lambda name: True,
    broken: dict[str, SchemaMismatch] | None = None,
) -> list[Collection]:
    """Return all collections by name, or those whose names `only` takes, checked.

    One that is not as it should be is put into `broken`; where that is left out, SchemaMismatch is raised at the first.
    """
    aliases = await cluster.resolve_aliases(f"{names.PREFIX}*")
    found = sorted(
        name for alias in aliases if (name := names.parse_read_alias(alias)) is not None and only(name)
    )
    collections: list[Collection] = []
    for name in found:
        try:
            collections.append((await get(cluster, name)).collection)
        except NotFound:  # deleted since
            continue
        except SchemaMismatch as fault:
            if broken is None:
                raise
            broken[name] = fault
    return collections


async def delete(cluster: Cluster, name: str) -> list[str]:
    """Delete the collection with every index it has, in one step, and return their names. Raises NotFound."""
    aliases = await cluster.resolve_aliases(names.read_alias(name), names.index_pattern(name))
    concrete = set(await cluster.resolve_index(names.index_pattern(name)))
    doomed = sorted(index for index in concrete if names.collection_of(index) == name)
    if names.read_alias(name) not in aliases and not doomed:
        raise absent(name)
    await cluster.delete_indices(doomed)
    with contextlib.suppress(HalflifeError):
        await turns.forget(cluster, name)
    return doomed


# --- checks --------------------------------------------------------------------------------------------------------


async def read_index(cluster: Cluster, name: str, index: str) -> Collection:
    """Return what the mapping of one of a collection's indices says. Raises NotFound, and as `read_collection` does."""
    return read_collection(name, index, (await cluster.get_mapping(index))[index])


def read_collection(name: str, index: str, mapping: Mapping[str, Any]) -> Collection:
    """Return what a collection's mapping says about it; raise SchemaMismatch if it is not one of ours or lacks a field.

    Ranking options that can't be read are left out and named in `unreadable`, so that they can be written anew.
    """
    check_mapping(mapping, where=f"the index {index}")
    meta = mapping["_meta"]["halflife"]
    embedding = _embedding(mapping)
    unreadable: dict[str, str] = {}
    profiles, experiment = _read_profiles(meta, unreadable), _read_experiment(meta, unreadable)
    return Collection(
        name=name,
        index=index,
        uid=meta.get("uid"),
        dims=embedding["dims"],
        similarity=embedding.get("similarity", "cosine"),
        declared=meta.get("declared", {}),
        model=meta.get("model"),
        template_version=meta["template_version"],
        profiles=profiles,
        default_profile=meta.get("default_profile"),
        synonyms=_read_synonyms(meta, unreadable),
        revision=meta.get("revision", 0),
        experiment=experiment,
        unreadable=unreadable,
    )


def _read_profiles(meta: Mapping[str, Any], unreadable: dict[str, str]) -> dict[str, Profile]:
    """Return the ranking profiles of a collection's `_meta`; those that can't be read are put into `unreadable`."""
    profiles: dict[str, Profile] = {}
    for name, told in stored_profiles(meta.get("profiles") or {}).items():
        try:
            profiles[name] = Profile.model_validate(told)
        except ValidationError as error:
            unreadable[f"profiles.{name}"] = _fault(error)
    return profiles


def _read_experiment(meta: Mapping[str, Any], unreadable: dict[str, str]) -> Experiment | None:
    """Return the experiment of a collection's `_meta`; None where there is none, or none that can be read."""
    told = meta.get("experiment")
    try:
        return None if told is None else Experiment.model_validate(told)
    except ValidationError as error:
        unreadable["experiment"] = _fault(error)
        return None


def _read_synonyms(meta: Mapping[str, Any], unreadable: dict[str, str]) -> list[SynonymRule]:
    """Return the synonym rules of a collection's `_meta`; those that can't be read are put into `unreadable`."""
    rules: list[SynonymRule] = []
    for at, told in enumerate(meta.get("synonyms") or []):
        try:
            rule = SynonymRule.model_validate(told)
            synonyms.check([rule])
        except ValidationError as error:
            unreadable[f"synonyms.{at}"] = _fault(error)
        except InvalidRequest as error:
            unreadable[f"synonyms.{at}"] = error.detail
        else:
            rules.append(rule)
    return rules


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return ": ".join(filter(None, (path, *explained(first))))


def check_mapping(mapping: Mapping[str, Any], *, where: str, of_template: bool = False) -> None:
    """Raise SchemaMismatch, naming the field, unless the mapping has all that this service reads and writes."""
    remedy = (
        "another index template may shadow ours: see GET /_index_template, and give ours the highest priority"
        if of_template
        else f"{_REINDEX}, or delete the collection if it holds nothing you need"
    )
    wanted = shipped(MAPPINGS)["template"]["mappings"]
    version = mapping.get("_meta", {}).get("halflife", {}).get("template_version")
    if not isinstance(version, int):
        raise SchemaMismatch(f"{where} was not made by Halflife: `_meta.halflife` is missing", remedy=remedy)
    if version > wanted["_meta"]["halflife"]["template_version"]:
        raise SchemaMismatch(
            f"{where} was made by a newer Halflife (template version {version})",
            remedy="upgrade this service",
        )
    if str(mapping.get("dynamic")) != "strict":
        raise SchemaMismatch(
            f"{where}: `dynamic` is {mapping.get('dynamic', 'true')!r}, not 'strict'",
            field="dynamic",
            remedy=remedy if of_template else 'set it with PUT <index>/_mapping {"dynamic": "strict"}',
        )
    _check_fields(wanted["properties"], mapping.get("properties", {}), "", where, remedy)
    embedding = _embedding(mapping)
    dims = mapping["_meta"]["halflife"].get("dims", embedding.get("dims"))
    if embedding.get("dims") != dims:
        raise SchemaMismatch(
            f"{where}: `{fields.EMBEDDING}` has {embedding.get('dims')} dims, its `_meta` says {dims}",
            field=fields.EMBEDDING,
            remedy=remedy,
        )
    declared = mapping["_meta"]["halflife"].get("declared", {})
    typed = mapping.get("properties", {}).get(fields.DECLARED, {}).get("properties", {})
    for key, kind in declared.items():
        if typed.get(key, {}).get("type") != kind:
            raise SchemaMismatch(
                f"{where}: the declared field `{key}` is {typed.get(key, {}).get('type', 'not mapped')}, not {kind}",
                field=f"{fields.DECLARED}.{key}",
                remedy=remedy,
            )


def _check_fields(
    wanted: Mapping[str, Any], found: Mapping[str, Any], path: str, where: str, remedy: str
) -> None:
    for name, body in wanted.items():
        full = f"{path}{name}"
        has = found.get(name)
        if has is None:
            raise SchemaMismatch(f"{where}: the field `{full}` is missing", field=full, remedy=remedy)
        for key in ("type", "analyzer", "search_analyzer", "dynamic"):
            expected, actual = body.get(key), has.get(key)
            # An object field carries no `type` when Elasticsearch shows it.
            if key == "type" and expected == "object":
                continue
            if expected is not None and str(actual) != str(expected):
                raise SchemaMismatch(
                    f"{where}: the field `{full}` has {key} {actual!r}, not {expected!r}",
                    field=full,
                    remedy=remedy,
                )
        if body.get("type") == "dense_vector" and has.get("index") is False:
            raise SchemaMismatch(f"{where}: the field `{full}` is not indexed", field=full, remedy=remedy)
        _check_fields(body.get("properties", {}), has.get("properties", {}), f"{full}.", where, remedy)
        _check_fields(body.get("fields", {}), has.get("fields", {}), f"{full}.", where, remedy)


def check_compatible(collection: Collection, *, dims: int, model: str | None = None) -> str | None:
    """Raise SchemaMismatch if vectors of `dims` don't fit the collection; return a warning if another model made its own."""
    if collection.dims != dims:
        raise SchemaMismatch(
            f"the collection `{collection.name}` holds vectors of {collection.dims} dims, the embedder makes {dims}",
            field=fields.EMBEDDING,
            remedy=f"configure the model it was made with ({collection.model or 'unknown'}), or {_REINDEX} with the new one",
        )
    if model is not None and collection.model is not None and collection.model != model:
        return (
            f"the collection `{collection.name}` was embedded with {collection.model}, the embedder is {model}: "
            "unless these are two names of one model, vectors are compared that have nothing in common"
        )
    return None


def _check_same(collection: Collection, options: CollectionOptions, *, dims: int) -> None:
    """Raise Conflict unless the collection is as the options want it; what they leave open fits."""
    named = options.model_fields_set
    name = collection.name
    if options.model is not None and options.model != collection.model:
        raise _needs_reindex(
            name, "model", collection.model, options.model, f"--embedding-model {options.model}"
        )
    if "dims" in named and dims != collection.dims:
        raise _needs_reindex(
            name, "dims", collection.dims, dims, "--reembed", with_="a model of that many dims configured"
        )
    if "similarity" in named and options.similarity != collection.similarity:
        raise _needs_reindex(
            name,
            "similarity",
            collection.similarity,
            options.similarity,
            f"--similarity {options.similarity}",
        )
    if "declared" in named:
        # Keys that are left out stay, as all else does.
        changes = [
            f"--declare {key}={kind}"
            for key, kind in sorted(options.declared.items())
            if key in collection.declared and kind != collection.declared[key]
        ]
        if changes:
            raise _needs_reindex(
                name, "declared", collection.declared, dict(options.declared), " ".join(changes)
            )


def _needs_reindex(
    name: str, field: str, found: Any, wanted: Any, options: str, *, with_: str | None = None
) -> Conflict:
    command = f"halflife reindex {name} {options}"
    return Conflict(
        f"the collection `{name}` exists with {field} {found!r}, not {wanted!r}, and that can't change in place",
        field=field,
        remedy=f"leave `{field}` as it is, or move the collection: {command}{f' (with {with_})' if with_ else ''}",
        command=command,
    )


# --- a memory of it ------------------------------------------------------------------------------------------------


class Catalog:
    """Collections by name, remembered for a few seconds so that a request doesn't pay two round trips for them.

    A stale entry is harmless: readers go through the alias, and a writer of an old generation is turned away by the
    cluster and asks again with `fresh=True`. Each collection has generations of its own, a later one of the same name
    too, and a new one begins with each key that is declared.
    """

    def __init__(
        self, cluster: Cluster, *, ttl_s: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: dict[str, tuple[float, Known]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, name: str, *, fresh: bool = False) -> Known:
        """Return the collection and its write target. Raises NotFound or SchemaMismatch."""
        asked = self._clock()
        if not fresh and (known := self._remembered(name, asked - self._ttl_s)):
            return known
        # Of those who ask at the same time one looks, the others take what it found.
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                if known := self._remembered(name, asked if fresh else asked - self._ttl_s):
                    return known
                began = self._clock()
                known = await get(self._cluster, name)
                self._known[name] = (began, known)
                return known
        except HalflifeError:
            self.forget(name)
            raise
        finally:
            if not lock.locked() and name not in self._known:
                # Names that callers made up must not pile up.
                self._locks.pop(name, None)

    async def ensure(
        self,
        name: str,
        options: CollectionOptions,
        *,
        dims: int,
        model: str | None,
        moment: datetime,
        rules: Sequence[SynonymRule] = (),
    ) -> Known:
        """Return the collection, making it first if it is not there."""
        try:
            return await self.get(name)
        except NotFound:
            await create(self._cluster, name, options, dims=dims, model=model, moment=moment, rules=rules)
            return await self.get(name, fresh=True)

    async def delete(self, name: str) -> list[str]:
        """Delete the collection and return the names of its indices. Raises NotFound."""
        try:
            return await delete(self._cluster, name)
        finally:
            self.forget(name)

    def forget(self, name: str) -> None:
        """Look at the cluster the next time."""
        self._known.pop(name, None)

    def _remembered(self, name: str, since: float) -> Known | None:
        entry = self._known.get(name)
        return entry[1] if entry is not None and entry[0] >= since else None


# --- small change --------------------------------------------------------------------------------------------------


def _embedding(mapping: Mapping[str, Any]) -> Json:
    """Return the vector field's part of a mapping."""
    chunks, leaf = fields.EMBEDDING.split(".")
    return cast(Json, mapping["properties"][chunks]["properties"][leaf])


def _leaf(path: str) -> str:
    return path.rsplit(".", 1)[-1]


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


assert set(_DECLARED) == set(get_args(DeclaredType))
