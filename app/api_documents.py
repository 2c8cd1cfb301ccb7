"""The endpoints that store, change, list and delete documents and files."""

from collections.abc import Sequence
from typing import Any

from fastapi import Query, Request, Response
from starlette.datastructures import UploadFile

from app import cursor as cursors
from app import files, indexing
from app.answers import BulkResult, Deletion, DocumentPage, FilesResult, StoredDocument
from app.api import (
    answer,
    collection_of,
    condition_of,
    fence_of,
    key_of,
    known_of,
    make_router,
    needs,
    parse_json,
    reached,
    read_json,
    service_of,
    tag_of,
)
from app.collection import Collection, CollectionOptions
from app.drafts import Names
from app.errors import Forbidden, InvalidRequest, NotFound
from app.filters import compile_filter
from app.refusals import parse
from app.times import to_ms
from app.writing import DeleteDocuments, FileForm, PatchDocuments, Refresh, Upsert

router = make_router()


LIST_KEEP_ALIVE_S = 120.0


DOCUMENTS = "/v1/collections/{collection}/documents"


@router.post(
    DOCUMENTS,
    tags=["documents"],
    summary="Upsert documents",
    response_model=BulkResult,
    dependencies=[needs("write")],
)
async def upsert(request: Request, collection: str) -> Response:
    """Store documents, each on its own: the answer tells what became of every item, in the order sent."""
    bulk = parse(Upsert, await read_json(request))
    return answer(await _upsert(request, collection, bulk.documents, bulk.refresh))


async def _upsert(request: Request, collection: str, items: Sequence[Any], refresh: Refresh) -> BulkResult:
    """Store the items; a collection that is not there yet is made if one of them is valid."""
    service = service_of(request)
    service.limits.check_items(items)
    name = reached(request, collection)
    key = key_of(request)
    try:
        known = await known_of(request, name)
    except NotFound:
        if not service.auto_create or not (key is None or key.allows("admin")):
            raise
        indexing.check_first(items, collection=name, dims=service.dims)
        known = await service.catalog.ensure(
            name, CollectionOptions(), dims=service.dims, model=service.model, moment=service.now()
        )
    return await service.indexer.upsert(
        items, collection=known.collection, refresh=refresh, within=condition_of(request, known.collection)
    )


@router.post(
    "/v1/collections/{collection}/files",
    tags=["documents"],
    summary="Upload files",
    response_model=FilesResult,
    dependencies=[needs("write")],
)
async def upload_files(request: Request, collection: str) -> Response:
    """Read text, Markdown, HTML, PDF, Word, EPUB, CSV and JSON Lines files, and store what they say.

    A file makes one document, a table or line file one for each row. The id is the file's name unless given; the
    creation time the caller's, else the document's own, else the time of the upload, with a warning. A file that can't
    be read is one item's error.
    """
    service = service_of(request)
    name = reached(request, collection)
    key = key_of(request)
    if not service.auto_create or not (key is None or key.allows("admin")):
        await known_of(request, name)
    form, sent = await _read_form(request)
    uploads = [
        files.Upload(file, data, content_type, form.given(number, file, len(sent)))
        for number, (file, data, content_type) in enumerate(sent)
    ]
    # Nothing is stored yet: it waits without a write's place, and ends if the caller hangs up.
    state = request.state
    readings = await state.aside(files.read(uploads, sandbox=service.sandbox, caller=state.caller))
    return answer(
        await files.store(
            uploads,
            readings,
            names=Names(
                form.names.id, form.names.title, form.names.text, form.names.creation_time or form.names.time
            ),
            upsert=lambda items: _upsert(request, name, items, form.refresh),
            now=service.now(),
        )
    )


MOST_FILES = 100


async def _read_form(request: Request) -> tuple[FileForm, list[tuple[str, bytes, str | None]]]:
    """Return what a multipart body says and its files: (name, content, declared type), in the order sent."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest(
            "files are sent as multipart/form-data",
            field="body",
            remedy="curl -F file=@report.pdf …/files, or POST JSON to …/documents",
        )
    fields: dict[str, Any] = {}
    sent: list[tuple[str, bytes, str | None]] = []
    async with request.form(max_files=MOST_FILES, max_fields=8, max_part_size=2**20) as form:
        for key, value in form.multi_items():
            if isinstance(value, UploadFile):
                if key not in ("file", "files"):
                    raise InvalidRequest(
                        "a file stands in a field of another name", field=key[:60], remedy="call it `file`"
                    )
                called = (value.filename or "").replace("\\", "/").lstrip("/").removeprefix("./")
                called = called.encode("utf-8", "replace").decode()
                sent.append((called or f"file-{len(sent) + 1}", await value.read(), value.content_type))
            elif key == "refresh":
                fields[key] = value
            else:
                fields[key[:60]] = _form_json(key[:60], value)
    if not sent:
        raise InvalidRequest("no file was sent", field="file", remedy="send at least one part called `file`")
    parsed = parse(FileForm, fields)
    if isinstance(parsed.each, list) and len(parsed.each) != len(sent):
        raise InvalidRequest(
            f"`each` has {len(parsed.each)} entries for {len(sent)} files",
            field="each",
            remedy="give one for each file, in their order, or an object by file name",
        )
    if isinstance(parsed.each, dict) and (strange := set(parsed.each) - {file for file, _, _ in sent}):
        raise InvalidRequest(
            f"`each` names '{min(strange)[:60]}', and no file is called so",
            field="each",
            remedy="name the files as they are sent",
        )
    return parsed, sent


def _form_json(key: str, text: str) -> Any:
    return parse_json(text.encode("utf-8", "replace"), field=key, what=f"`{key}`", example='{"lang": "en"}')


@router.patch(
    DOCUMENTS,
    tags=["documents"],
    summary="Change fields without embedding",
    response_model=BulkResult,
    dependencies=[needs("write")],
)
async def patch(request: Request, collection: str) -> Response:
    """Change the named fields of stored documents; text and vectors stay as they are."""
    changes = parse(PatchDocuments, await read_json(request))
    service = service_of(request)
    service.limits.check_items(changes.documents)
    target = await collection_of(request, collection)
    result = await service.indexer.patch(
        changes.documents, collection=target, refresh=changes.refresh, within=condition_of(request, target)
    )
    # A change that found nothing to change is lost: it counts as failed, unlike a delete that found nothing.
    missed = sum(item.status == "not_found" for item in result.items)
    return answer(BulkResult(items=result.items, failed=result.failed + missed))


@router.post(
    DOCUMENTS + "/delete",
    tags=["documents"],
    summary="Delete by ids or filter",
    response_model=Deletion,
    dependencies=[needs("write")],
)
async def delete_many(request: Request, collection: str) -> Response:
    """Delete the named documents, those that a filter matches, or all of them."""
    wanted = parse(DeleteDocuments, await read_json(request))
    service = service_of(request)
    ids, versions = wanted.ids, None
    if ids is not None:
        service.limits.check_items(ids, field="ids")
    elif wanted.documents is not None:
        service.limits.check_items(wanted.documents)
        ids = [each.id for each in wanted.documents]
        versions = [each.if_version for each in wanted.documents]
    if wanted.filter:
        service.limits.check_filter(wanted.filter)
    # What a filter matches is deleted for good, so it is compiled for what the collection declares now.
    target = (await known_of(request, collection, fresh=ids is None)).collection
    kept = fence_of(request, target)
    within = None if kept is None else kept.condition
    if ids is not None:
        result = await service.indexer.delete_ids(
            ids, if_versions=versions, collection=target, refresh=wanted.refresh, within=within
        )
        return answer(_deletion(result))
    clauses = [
        *(() if kept is None else kept.clauses),
        *(compile_filter(wanted.filter, declared=target.declared) if wanted.filter else ()),
    ]
    gone = await service.indexer.delete_matching(
        clauses, collection=target, refresh=wanted.refresh, within=within
    )
    return answer(Deletion(deleted=gone.deleted, items=gone.failures, failed=gone.failed))


def _deletion(result: BulkResult) -> Deletion:
    deleted = sum(item.status == "deleted" for item in result.items)
    return Deletion(deleted=deleted, items=result.items, failed=result.failed)


@router.get(
    DOCUMENTS,
    tags=["documents"],
    summary="List documents by id",
    response_model=DocumentPage,
    dependencies=[needs("read")],
)
async def list_documents(
    request: Request,
    collection: str,
    size: int = Query(100, ge=1, le=1000, description="Documents on one page."),
    where: str | None = Query(
        None, alias="filter", description="A filter as JSON, as in a search.", max_length=20_000
    ),
    cursor: str | None = Query(
        None, description="The cursor of the page before.", max_length=65_536, pattern=r"^[A-Za-z0-9_-]+$"
    ),
) -> Response:
    """List stored documents in the order of their ids, from one point in time over all pages."""
    service = service_of(request)
    asked = None if where is None else _filter(where)
    if asked:
        service.limits.check_filter(asked)
    target = await collection_of(request, collection)
    now_ms = to_ms(service.now())
    after: str | None = None
    pit: str | None = None
    if cursor is not None:
        if where is not None:
            raise InvalidRequest("a cursor carries its filter", field="filter", remedy="give `cursor` alone")
        held = cursors.unseal(
            cursor,
            secrets=service.doors.cursor_secrets,
            now_ms=now_ms,
            kind="list",
            caller=tag_of(request),
            collection=target.name,
        )
        wanted = held.request.get("filter")
        if "size" in request.query_params and size != held.top_k:
            raise InvalidRequest(
                f"a cursor carries its size, which is {held.top_k}",
                field="size",
                remedy="give `cursor` alone",
            )
        size, after, pit = held.top_k, (held.after or [None])[0], held.pit_id
    else:
        wanted = asked

    def clauses_in(there: Collection) -> list[dict[str, Any]]:
        kept = fence_of(request, there)
        return [
            *(() if kept is None else kept.clauses),
            *(compile_filter(wanted, declared=there.declared) if wanted else ()),
        ]

    page = await service.indexer.list_documents(
        clauses_in(target),
        collection=target,
        clauses_in=clauses_in,
        size=size,
        after=after,
        pit=pit,
        keep_alive_s=LIST_KEEP_ALIVE_S,
        owner=tag_of(request),
    )
    following = None
    if page.after is not None:
        following = cursors.seal(
            cursors.CursorPayload(
                kind="list", collection=target.name, caller=tag_of(request), origin_ms=now_ms, pit_id=page.pit, top_k=size,
                after=[page.after], request={"filter": wanted}, expires_ms=now_ms + int(LIST_KEEP_ALIVE_S * 1000),
            ),
            secrets=service.doors.cursor_secrets,
        )  # fmt: skip
    return answer(DocumentPage(documents=page.documents, total=page.total, cursor=following))


def _filter(text: str) -> dict[str, Any]:
    value = parse_json(
        text.encode("utf-8", "replace"), field="filter", what="the filter", example='{"lang": "en"}'
    )
    if not isinstance(value, dict):
        raise InvalidRequest("a filter is an object", field="filter", remedy='such as {"lang": "en"}')
    return value


@router.get(
    DOCUMENTS + "/{document_id:id}",
    tags=["documents"],
    summary="Get a document",
    response_model=StoredDocument,
    dependencies=[needs("read")],
)
async def get_document(request: Request, collection: str, document_id: str) -> Response:
    """Return one document as stored, in real time: also before searches see it."""
    target = await collection_of(request, collection)
    if not document_id:
        raise NotFound(
            "an id is missing after the last slash", field="id", remedy="name it, or drop the slash to list"
        )
    [found] = await service_of(request).indexer.get(
        [document_id], collection=target, within=condition_of(request, target)
    )
    if found is None:
        raise NotFound(f"there is no document with this id in '{target.name}'", field="id")
    return answer(found)


@router.delete(
    DOCUMENTS + "/{document_id:id}",
    tags=["documents"],
    summary="Delete a document",
    response_model=Deletion,
    dependencies=[needs("write")],
)
async def delete_document(
    request: Request,
    collection: str,
    document_id: str,
    refresh: str = Query("false", pattern="^(false|true|wait_for)$"),
) -> Response:
    """Delete one document; 404 if there is none."""
    target = await collection_of(request, collection)
    asked = parse(DeleteDocuments, {"ids": [document_id], "refresh": refresh})
    result = await service_of(request).indexer.delete_ids(
        asked.ids or [], collection=target, refresh=asked.refresh, within=condition_of(request, target)
    )
    [item] = result.items
    if item.status == "not_found":
        raise NotFound(f"there is no document with this id in '{target.name}'", field="id")
    if item.error is not None and item.error.type == Forbidden.code:
        raise Forbidden(item.error.detail, remedy=item.error.remedy)
    return answer(_deletion(result))
