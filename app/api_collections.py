"""The endpoints that make, change, tell of and delete collections and their synonyms."""

from collections.abc import Sequence

from fastapi import Query, Request, Response

from app import catalog
from app.api import (
    JSON,
    answer,
    fence_of,
    key_of,
    known_of,
    make_router,
    needs,
    reached,
    read_json,
    service_of,
)
from app.collection import (
    BrokenCollection,
    Collection,
    CollectionDetails,
    CollectionOptions,
    StoredSynonyms,
    SynonymRule,
    SynonymSet,
)
from app.errors import InvalidRequest, SchemaMismatch
from app.refusals import parse
from app.values import ItemError

router = make_router()


@router.get(
    "/v1/collections",
    tags=["collections"],
    summary="List collections",
    response_model=list[Collection | BrokenCollection],
    dependencies=[needs("read")],
)
async def list_collections(request: Request) -> Response:
    """Return every collection of this cluster that the key reaches.

    One whose index or aliases are not as they should be stands there with its `error` alone.
    """
    key = key_of(request)
    broken: dict[str, SchemaMismatch] = {}
    found: list[Collection | BrokenCollection] = [
        *await catalog.list_collections(
            service_of(request).doors.cluster,
            only=lambda name: key is None or key.reaches(name),
            broken=broken,
        )
    ]
    for name, fault in broken.items():
        error = ItemError(type=fault.code, detail=fault.detail, field=fault.field, remedy=fault.remedy)
        found.append(BrokenCollection(name=name, error=error))
    found.sort(key=lambda item: item.name)
    return Response(
        b"[" + b",".join(item.model_dump_json().encode() for item in found) + b"]", media_type=JSON
    )


@router.put(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Create or change a collection",
    response_model=Collection,
    dependencies=[needs("admin")],
)
async def create_collection(request: Request, collection: str) -> Response:
    """Create a collection, or change one that is there: replicas, refresh interval, ranking profiles, new declared keys.

    What is left out stays. Where an option needs another index (dims, similarity, shards, the type of a declared key),
    nothing is changed: 409, with the `halflife reindex` command that does it.
    """
    body = await request.body()
    options = parse(CollectionOptions, await read_json(request) if body.strip() else {})
    service = service_of(request)
    for profile_name, profile in options.profiles.items():
        service.limits.check_profile(profile, path=f"profiles.{profile_name}")
    name = reached(request, collection)
    dims, model = service.dims, service.model
    if options.model is not None and options.model != model:
        embedder = service.embedder_named(options.model)
        if embedder is None:
            raise InvalidRequest(
                "this service knows no embedding model of that name",
                field="model",
                remedy="name it in HALFLIFE_EMBEDDING_MODELS, or leave `model` out",
            )
        dims, model = await embedder.check(), options.model
    try:
        made = await catalog.create(
            service.doors.cluster, name, options, dims=dims, model=model, moment=service.now()
        )
    finally:
        # A change that failed may have been taken all the same.
        service.catalog.forget(name)
    return answer(made)


@router.get(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Describe a collection",
    response_model=CollectionDetails,
    dependencies=[needs("read")],
)
async def get_collection(request: Request, collection: str) -> Response:
    """Return what a collection is and holds: documents, chunks, size, ages, options, profiles."""
    # Who asks this wants to know what is, not what was a moment ago.
    target = (await known_of(request, collection, fresh=True)).collection
    kept = fence_of(request, target)
    within = None if kept is None else kept.clauses
    return answer(await catalog.describe(service_of(request).doors.cluster, target, within=within))


SYNONYMS = "/v1/collections/{collection}/synonyms"


@router.put(
    SYNONYMS,
    tags=["collections"],
    summary="Set a collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("admin")],
)
async def put_synonyms(request: Request, collection: str) -> Response:
    """Store the synonyms that queries are widened with, in the place of those there are. Nothing is reindexed or closed.

    This process uses them at once, others that serve the same cluster within five seconds.
    """
    given = parse(SynonymSet, await read_json(request))
    return await _put_synonyms(request, collection, given.synonyms_set, if_revision=given.if_revision)


@router.get(
    SYNONYMS,
    tags=["collections"],
    summary="A collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("read")],
)
async def get_synonyms(request: Request, collection: str) -> Response:
    """Return the rules as they are stored; an empty list where there are none."""
    found = (await known_of(request, collection, fresh=True)).collection
    return answer(StoredSynonyms(collection=found.name, synonyms_set=found.synonyms, revision=found.revision))


@router.delete(
    SYNONYMS,
    tags=["collections"],
    summary="Delete a collection's synonyms",
    response_model=StoredSynonyms,
    dependencies=[needs("admin")],
)
async def delete_synonyms(request: Request, collection: str) -> Response:
    """Delete all rules; fine where there are none."""
    return await _put_synonyms(request, collection, [])


async def _put_synonyms(
    request: Request, collection: str, rules: Sequence[SynonymRule], *, if_revision: int | None = None
) -> Response:
    service = service_of(request)
    target = (await known_of(request, collection, fresh=True)).collection
    try:
        stored = await catalog.put_synonyms(service.doors.cluster, target, rules, if_revision=if_revision)
    finally:
        service.catalog.forget(target.name)
    return answer(
        StoredSynonyms(collection=target.name, synonyms_set=stored.synonyms, revision=stored.revision)
    )


@router.delete(
    "/v1/collections/{collection}",
    tags=["collections"],
    summary="Delete a collection",
    status_code=204,
    dependencies=[needs("admin")],
)
async def delete_collection(
    request: Request,
    collection: str,
    confirm: str | None = Query(None, description="The collection's name again: this can't be undone."),
) -> Response:
    """Delete a collection with all its documents."""
    name = reached(request, collection)
    if confirm != name:
        raise InvalidRequest(
            "deleting a collection deletes all its documents", field="confirm", remedy=f"add ?confirm={name}"
        )
    await service_of(request).catalog.delete(name)
    return Response(status_code=204)
