"""Own `halflife load --source NAME --prune`: which documents a source has that a load did not bring, and their deletion.

What the source has is listed, with versions, before anything is sent. What somebody else writes afterwards is not on
the list or is another version by then, and is left alone, whatever any clock says. Refuses to delete anything unless
all was read and stored, and more than half of a source unless told to.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from app.drafts import completed
from app.filters import shown
from scripts.client import ApiProblem, Client, Json, items_of, persist
from scripts.loading import DEFAULT_BATCH, PATIENCE_S, Failure, Sleep, Tally
from scripts.sources import Names, Passed, Read, ids_passed

T = TypeVar("T")
# How often a document is looked at again that searches keep touching.
_TRIES = 3


@dataclass(slots=True)
class Pruned:
    """What became of a source's documents that a load did not bring."""

    source: str
    had: int
    """Documents that the source had when the load began."""
    gone: list[str] = field(default_factory=list)
    """Ids that the load did not bring, in order: all those to be deleted."""
    kept: list[str] = field(default_factory=list)
    """Ids that it did not bring either, whose files are there and were passed over."""
    deleted: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """Ids out of `gone` that somebody has written since the load began; they stay."""
    failures: list[Failure] = field(default_factory=list)
    refused: str | None = None
    """Why nothing was deleted."""
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        return self.refused is None and not self.failures

    def to_json(self) -> Json:
        """Return it as `--json` prints it."""
        return {
            "source": self.source,
            "had": self.had,
            "gone": self.gone,
            "deleted": len(self.deleted),
            "changed": self.changed,
            "kept": self.kept,
            "failures": [failure.to_json() for failure in self.failures],
            "refused": self.refused,
            "remedy": self.remedy,
        }


def said(item: Read, part: Mapping[str, Any]) -> Read:
    """Return what was read with what is said of all documents, where it says nothing itself."""
    if item.document is None or not part:
        return item
    document = dict(item.document)
    dated = item.by_file_time and part.get("creation_time") is not None
    if dated:
        # Not its own: the file's time is taken only where nothing else is said.
        del document["creation_time"]
    return replace(item, document=completed(document, part), by_file_time=item.by_file_time and not dated)


def sourced(item: Read, source: str | None, *, alone: bool = False) -> Read:
    """Return what was read with this source, if any; its own goes before it, and `alone` makes another one a fault."""
    if item.document is None or source is None:
        return item
    own = item.document.get("source")
    if own is None:
        return replace(item, document={**item.document, "source": source})
    if alone and own != source:
        return replace(
            item,
            document=None,
            fault=f"its own `source` is '{shown(str(own))}' and not '{source}', which --prune goes by: leave it out, or load "
            "such documents on their own",
        )
    return item


class Pruner:
    """Prunes one source of one collection around one load: `note` before it, `see` all of it, then `judge` and `prune`."""

    def __init__(
        self,
        api: Client,
        collection: str,
        source: str,
        *,
        passed: Sequence[Passed] = (),
        names: Names | None = None,
        most: bool = False,
        batch: int = DEFAULT_BATCH,
        patience_s: float = PATIENCE_S,
        report: Callable[[str], None] = lambda line: None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """`passed` was found and is not read: its documents stay, those of its rows being known by `names`.

        `most` allows to delete more than half, and what rows may hold.
        """
        self._passed, self._names = passed, names or Names()
        self._api, self._collection, self._source = api, collection, source
        self._files = frozenset(each.name for each in passed if not each.name.endswith("/"))
        self._folders = tuple(each.name for each in passed if each.name.endswith("/"))
        self._most, self._batch = most, batch
        self._patience_s, self._report, self._sleep = patience_s, report, sleep
        # What is listed and has not been seen in this load: version, and when it was written.
        self._listed: dict[str, tuple[int, str | None]] = {}
        self.result = Pruned(source, 0)

    def note(self) -> None:
        """List what the source has, before anything is sent. Raises ApiError."""
        cursor: str | None = None
        while True:
            try:
                page = self._persist(partial(self._page, cursor))
            except ApiProblem as problem:
                if problem.status == 404 and cursor is None:
                    # There is no collection yet.
                    return
                raise
            for document in page["documents"]:
                # The filter also finds those whose metadata has a key `source`; they are not the source's.
                if document.get("source") == self._source:
                    self._listed[document["id"]] = document["version"], document.get("indexed_at")
            cursor = page["cursor"]
            if cursor is None:
                self.result.had = len(self._listed)
                return

    def see(self, item: Read) -> Read:
        """Note that an item was brought, and return it with its source."""
        item = sourced(item, self._source, alone=True)
        if item.document is not None:
            self._listed.pop(str(item.document["id"]), None)
        return item

    def judge(self, tally: Tally, *, brought: int) -> Pruned:
        """Return what shall be deleted, and why it shall not, after a load that brought so many documents."""
        found = self.result
        if tally.interrupted:
            found.refused = "the load was interrupted"
            found.remedy = "load again: what is stored already is not stored twice"
            return found
        if tally.failed:
            found.refused = (
                f"{tally.failed} of what is there could not be read or stored, and must not be taken for gone"
            )
            found.remedy = "mend what failed and load again: what is stored already is not stored twice"
            return found
        # Read only if there is something to prune.
        inside, unread = set[str](), list[str]()
        if self._listed:
            inside, unread = ids_passed(self._passed, self._names, among=self._listed)
        for id_ in sorted(self._listed):
            (found.kept if id_ in inside or self._is_passed(id_) else found.gone).append(id_)
        if found.gone and unread:
            found.refused = (
                f"{unread[0]} is passed over and can't be read, so that its rows may be among those"
            )
            found.remedy = "make it readable, or remove it, and load again"
            return found
        if found.gone and not brought:
            found.refused = "the load brought no document at all"
            found.remedy = (
                "check the paths; all that a source has can be deleted by a filter on `source` "
                "(POST /v1/collections/{collection}/documents/delete)"
            )
        elif found.gone and tally.doubtful and not self._most:
            found.refused = (
                f"{tally.doubtful} rows hold lines that look like rows of their own, which may be those"
            )
            found.remedy = "look at their quotes; if those are gone indeed, load again with --prune-most"
        elif len(found.gone) * 2 > found.had and not self._most:
            found.refused = (
                f"{len(found.gone)} of the {found.had} documents that source '{self._source}' had were not loaded, "
                "which is more than half"
            )
            found.remedy = "check the paths; if those are gone indeed, load again with --prune-most"
        return found

    def prune(self) -> Pruned:
        """Delete what was judged to be gone, unless refused. Raises ApiError; `result` then tells how far it got."""
        found = self.result
        if found.refused is not None:
            return found
        for first in range(0, len(found.gone), self._batch):
            wanted = {id_: self._listed[id_][0] for id_ in found.gone[first : first + self._batch]}
            # One refresh, with the last, lets searches see it.
            refresh = "true" if first + self._batch >= len(found.gone) else "false"
            for _ in range(_TRIES):
                wanted = self._touched(self._delete(wanted, refresh))
                if not wanted:
                    break
            found.changed += wanted
        return found

    def _delete(self, versions: Mapping[str, int], refresh: str) -> list[str]:
        """Delete documents of these versions, count them, and return the ids of those that have another by now."""
        documents = [{"id": id_, "if_version": version} for id_, version in versions.items()]
        answer = self._persist(partial(self._api.delete, self._collection, documents, refresh=refresh))
        others = []
        for id_, item in zip(versions, items_of(answer, len(documents)), strict=True):
            status = item.get("status")
            if status in {"deleted", "not_found"}:
                # Not there: somebody else, or an earlier try whose answer was lost, has deleted it.
                self.result.deleted.append(id_)
            elif status == "conflict":
                others.append(id_)
            else:
                error = item.get("error") or {}
                reason = str(error.get("detail") or status)
                self.result.failures.append(Failure("prune", id_, reason, error.get("remedy")))
        return others

    def _touched(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the versions of those that were only read since (`touch` makes a version too); note the others."""
        found = {}
        for id_ in ids:
            now = self._persist(partial(self._api.document, self._collection, id_))
            if now is None:
                self.result.deleted.append(id_)
            elif now.get("indexed_at") == self._listed[id_][1] and now.get("source") == self._source:
                found[id_] = now["version"]
            else:
                self.result.changed.append(id_)
        return found

    def _is_passed(self, id_: str) -> bool:
        # A row without an id of its own is called FILE#ROW.
        return id_ in self._files or id_.rpartition("#")[0] in self._files or id_.startswith(self._folders)

    def _page(self, cursor: str | None) -> Json:
        if cursor is not None:
            return self._api.page(self._collection, cursor=cursor)
        return self._api.page(self._collection, only={"source": self._source})

    def _persist(self, do: Callable[[], T]) -> T:
        return persist(do, within_s=self._patience_s, sleep=self._sleep, told=self._report)
