"""The items of one bulk: in which order they may be done, what became of each, and the one answer to the caller.

Pure. A bulk answers per item; only where one cause kept every item out is it one error, which carries the items.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from app import documents
from app.answers import BulkResult, ItemResult
from app.documents import InvalidItem
from app.errors import (
    ClusterRejected,
    ClusterUnavailable,
    Conflict,
    EmbedderUnavailable,
    HalflifeError,
    InvalidRequest,
    NotFound,
    StorageFull,
)
from app.values import MAX_ITEMS_OF_ONE_ID

# What is checked, chunked, embedded and written in one go; bounds the memory of a bulk of any size.
SLICE_ITEMS: Final = 256
SLICE_CHARS: Final = 2_000_000


class Report:
    """The items' results as they become known."""

    def __init__(self, size: int, *, named: str = "documents") -> None:
        """`named` is what the request calls the list of items."""
        self._named = named
        self._results: list[ItemResult | None] = [None] * size
        self._errors: dict[int, HalflifeError] = {}
        self._shared: dict[int, HalflifeError] = {}

    @property
    def stored(self) -> bool:
        """Tell whether anything was written."""
        return any(r is not None and r.status in ("created", "updated", "deleted") for r in self._results)

    @property
    def unchanged(self) -> bool:
        """Tell whether anything was found stored already as sent."""
        return any(r is not None and r.status == "unchanged" for r in self._results)

    @property
    def missing(self) -> bool:
        """Tell whether anything was not there."""
        return any(r is not None and r.status == "not_found" for r in self._results)

    def put(self, position: int, result: ItemResult) -> None:
        self._results[position] = result

    def fail(self, position: int, id_: str | None, error: HalflifeError) -> None:
        self._errors[position] = error
        if isinstance(error, NotFound):
            self._shared[position] = error  # the collection: a document's absence is a status
        self._results[position] = failed(id_, error)

    def fail_all(self, items: Mapping[int, str | None], error: HalflifeError) -> None:
        """Note one failure of several items, position -> id, of those about which nothing else is known.

        It is the whole answer if nothing came of any item.
        """
        for position, id_ in items.items():
            if self._results[position] is None:
                self.fail(position, id_, error)
                self._shared[position] = error

    def members(self) -> dict[str, Any]:
        """Return `items` and `failed` as an error carries them."""
        result = self._whole()
        return {"items": [item.model_dump(mode="json") for item in result.items], "failed": result.failed}

    def result(self) -> BulkResult:
        """Return all results; raise where one cause kept every item out."""
        result = self._whole()
        if len(self._errors) < len(result.items) or not result.items:
            return result
        if all(item.status == "invalid" for item in result.items):
            first = next(iter(sorted(self._errors)))
            error = self._errors[first]
            count = len(result.items)
            raise InvalidRequest(
                error.detail
                if count == 1
                else f"none of the {count} items is valid; the first: {error.detail}",
                field=f"{self._named}[{first}]"
                + (f".{error.field}" if error.field not in (None, "") else ""),
                remedy=error.remedy,
                **self.members(),
            )
        for kind in (EmbedderUnavailable, ClusterUnavailable, StorageFull):
            causes = [error for error in self._errors.values() if isinstance(error, kind)]
            if causes and all(isinstance(e, kind | InvalidItem) for e in self._errors.values()):
                raise kind(
                    f"no item was acknowledged: {causes[0].detail}",
                    remedy=causes[0].remedy,
                    retry_after_s=causes[0].retry_after_s,
                    **self.members(),
                )
        if self._shared and self._shared.keys() | self._invalid() == self._errors.keys():
            _, error = min(self._shared.items())
            error.members |= self.members()
            raise error
        return result

    def _invalid(self) -> set[int]:
        return {position for position, error in self._errors.items() if isinstance(error, InvalidItem)}

    def _whole(self) -> BulkResult:
        assert all(result is not None for result in self._results), "an item was forgotten"
        items = [result for result in self._results if result is not None]
        return BulkResult(
            items=items, failed=sum(item.status in ("conflict", "invalid", "failed") for item in items)
        )


def conflict(id_: str, what: str, version: int | None) -> ItemResult:
    error = Conflict(f"the document was not written: {what}", remedy="read it again and decide anew")
    return ItemResult(id=id_, status="conflict", version=version, error=documents.item_error(error))


def contended() -> HalflifeError:
    return Conflict("other writers kept changing the document first", remedy="send it again")


def failed(id_: str | None, error: HalflifeError) -> ItemResult:
    """Return the result of an item that is not stored; what Elasticsearch refused for its content is invalid too."""
    refused = (
        isinstance(error, ClusterRejected) and error.members.get("elasticsearch", {}).get("status") == 400
    )
    return ItemResult(
        id=id_,
        status="invalid" if isinstance(error, InvalidRequest) or refused else "failed",
        error=documents.item_error(error),
    )


def in_waves(items: Sequence[Any], report: Report) -> list[list[int]]:
    """Return positions in groups to be done one after the other, so that items of one id keep their order.

    An id that has too many of them keeps all of its items out, since half of them would leave it at none that was meant.
    """
    waves: list[list[int]] = []
    seen: dict[str, int] = {}
    ids = [item.get("id") if isinstance(item, Mapping) else item for item in items]
    times = Counter(given for given in ids if isinstance(given, str))
    for position, given in enumerate(ids):
        number = 0
        if isinstance(given, str):
            if times[given] > MAX_ITEMS_OF_ONE_ID:
                report.fail(position, documents.id_of(given), _crowded(times[given]))
                continue
            number = seen.get(given, 0)
            seen[given] = number + 1
        if number == len(waves):
            waves.append([])
        waves[number].append(position)
    return waves


def _crowded(times: int) -> InvalidItem:
    return InvalidItem(
        f"{times} items of this request have this id, and it may have {MAX_ITEMS_OF_ONE_ID}",
        field="id",
        remedy="send the last state alone, or several requests",
    )


def in_slices(items: Sequence[Any], positions: Sequence[int]) -> list[list[int]]:
    """Cut into groups of bounded count and text."""
    slices: list[list[int]] = []
    chars = 0
    for position in positions:
        item = items[position]
        text = item.get("text") if isinstance(item, Mapping) else None
        size = len(text) if isinstance(text, str) else 0
        if not slices or len(slices[-1]) >= SLICE_ITEMS or chars + size > SLICE_CHARS:
            slices.append([])
            chars = 0
        slices[-1].append(position)
        chars += size
    return slices
