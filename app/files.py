"""What an upload of files does, in order: each file read in a process of its own, its documents stored, every fate told.

Owns the joining of readings and results. What a file says is `extracting`'s, what becomes of it `drafts`', how it is
stored `indexing`'s.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app import bulks
from app.answers import BulkResult, FileItemResult, FilesResult
from app.drafts import Draft, Names, drafts_of
from app.errors import HalflifeError, InvalidRequest, UnreadableFile
from app.extracted import Extracted
from app.sandbox import Batch, Sandbox
from app.times import format_instant
from app.values import ItemError

UPLOAD_TIME = "it carries no date of its own and none was given: its creation time is the time of the upload"


@dataclass(frozen=True, slots=True)
class Upload:
    """One file as sent: `given` is what the caller says about its document."""

    name: str
    data: bytes
    content_type: str | None
    given: Mapping[str, Any]


Reading = Extracted | UnreadableFile


async def read(uploads: Sequence[Upload], *, sandbox: Sandbox, caller: str) -> list[Reading]:
    """Return what each file says, or why it can't be read; nothing is stored. Cancelled, it ends the reading.

    `caller` is whom the waiting is counted under. Raises Overloaded where the files can't be read soon.
    """
    with sandbox.batch(caller, sum(len(upload.data) for upload in uploads)) as batch:
        waiting = asyncio.get_running_loop().call_later(sandbox.line.wait_s, batch.give_up)
        try:
            return await asyncio.gather(*(_read(upload, batch) for upload in uploads))
        finally:
            waiting.cancel()


async def store(
    uploads: Sequence[Upload],
    readings: Sequence[Reading],
    *,
    names: Names,
    upsert: Callable[[Sequence[Any]], Awaitable[BulkResult]],
    now: datetime,
) -> FilesResult:
    """Store what the files say; one result for each document, and for each file that gave none.

    `upsert` stores documents as an upsert does. Raises InvalidRequest if not one document is valid, with `items` and
    `failed`, and whatever kept all of them out at once.
    """
    results: list[FileItemResult | None] = []
    sent: list[tuple[int, Upload, Draft]] = []
    called: set[str] = set()
    for upload, found in zip(uploads, readings, strict=True):
        if isinstance(found, UnreadableFile):
            results.append(_failed(upload, None, found))
            continue
        drafts = drafts_of(
            found,
            name=upload.name,
            given=upload.given,
            names=names,
            fallback_time=format_instant(now),
            fallback_told=UPLOAD_TIME,
        )
        if not drafts:
            results.append(
                _failed(upload, None, InvalidRequest("the file has no rows", remedy="send one that has some"))
            )
        for draft in drafts:
            id_ = None if draft.document is None else str(draft.document.get("id"))
            if draft.document is None:
                error = InvalidRequest(draft.fault or "can't be read", remedy=draft.remedy)
                results.append(_failed(upload, draft.row, error))
            elif draft.row is None and id_ in called:
                # Not the later one in the place of the earlier, as in an upsert: files of one name are an oversight.
                error = InvalidRequest(
                    "an earlier file of this upload has the same id",
                    field="id",
                    remedy="give each its own id in `each`",
                )
                results.append(_failed(upload, None, error))
            else:
                called.add(id_ or "")
                sent.append((len(results), upload, draft))
                results.append(None)
    if sent:
        try:
            stored = await upsert([draft.document for _, _, draft in sent])
        except InvalidRequest as error:
            if "items" not in error.members:
                raise  # nothing was looked at: there are too many for one request
            stored = BulkResult.model_validate({key: error.members[key] for key in ("items", "failed")})
        for (position, upload, draft), item in zip(sent, stored.items, strict=True):
            results[position] = FileItemResult(
                **{name: getattr(item, name) for name in type(item).model_fields},
                file=upload.name,
                row=draft.row,
                warnings=list(draft.warnings) or None,
            )
    return _result([item for item in results if item is not None])


async def _read(upload: Upload, batch: Batch) -> Reading:
    try:
        return await asyncio.wrap_future(
            batch.submit(upload.data, name=upload.name, content_type=upload.content_type)
        )
    except UnreadableFile as error:
        return error


def _failed(upload: Upload, row: int | None, error: HalflifeError) -> FileItemResult:
    item = bulks.failed(None, error)
    return FileItemResult(id=None, status=item.status, error=item.error, file=upload.name, row=row)


def _result(items: list[FileItemResult]) -> FilesResult:
    failed = sum(item.status in ("conflict", "invalid", "failed") for item in items)
    if items and all(item.status == "invalid" for item in items):
        first = items[0].error or ItemError(type="invalid-request", detail="nothing is valid")
        raise InvalidRequest(
            first.detail
            if len(items) == 1
            else f"nothing of the {len(items)} is valid; the first: {first.detail}",
            field="file",
            remedy=first.remedy,
            items=[item.model_dump(mode="json") for item in items],
            failed=failed,
        )
    return FilesResult(items=items, failed=failed)
