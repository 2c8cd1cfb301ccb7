"""What Elasticsearch's answers mean: its error objects as ours, a bulk's items as fates, both as a word on its health."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from app.breaker import Outcome
from app.errors import (
    ClusterRejected,
    ClusterUnavailable,
    Conflict,
    CursorExpired,
    HalflifeError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    StorageFull,
)

Json = dict[str, Any]
OLDEST_VERSION = (9, 0)
"""The client speaks to this major version; what a minor version lacks is seen to where it is spoken to."""
OLDEST = ".".join(map(str, OLDEST_VERSION))


Fate = Literal["applied", "superseded", "fenced", "full", "retry", "refused"]


@dataclass(frozen=True, slots=True)
class BulkOutcome:
    """What became of one action."""

    status: int
    result: str | None = None
    version: int | None = None
    error_type: str | None = None
    reason: str | None = None
    current_version: int | None = None
    """The stored version that a conflict names."""
    seq_no: int | None = None
    primary_term: int | None = None
    shards_failed: int = 0
    """Copies that did not take an applied write; the cluster replaces them itself."""

    @property
    def fate(self) -> Fate:
        """Say what a writer has to do about it.

        applied: acknowledged. superseded: an equal or higher version is stored. fenced: the alias is gone or blocks
        writes, so read the aliases again and send the whole write again. full: no disk space. retry: overload or a
        shard on the move, the same write may work soon. refused: it never will.
        """
        if self.error_type is None:
            return "applied" if 200 <= self.status < 300 else "retry"
        if self.error_type == "version_conflict_engine_exception":
            return "superseded"
        if self.error_type in _ABSENT:
            return "fenced"
        if self.error_type == "cluster_block_exception":
            return _fate_of_block(self.reason or "")
        if self.error_type in _BUSY or (
            self.status in (429, 502, 503, 504) and self.error_type not in _CONFLICTS
        ):
            return "retry"
        return "refused"

    def error(self, doing: str) -> HalflifeError | None:
        """Return the failure as one of ours, None for an applied write."""
        if self.fate == "applied":
            return None
        return translate_error({"type": self.error_type, "reason": self.reason}, self.status, doing)


def judge_bulk(answer: Json, *, sent_bytes: int) -> Outcome:
    """A bulk of which the cluster took nothing, for being busy, is a refusal."""
    items = [next(iter(item.values())) for item in answer.get("items", ())] if answer.get("errors") else []
    outcomes = [outcome_of(item) for item in items]
    if len(outcomes) == 1 and hopeless(outcomes[0], sent_bytes):
        return "ok"
    return "refused" if outcomes and all(outcome.fate == "retry" for outcome in outcomes) else "ok"


def hopeless(outcome: BulkOutcome, sent_bytes: int) -> bool:
    """Tell whether the only document of a bulk is too large for the cluster's memory."""
    return outcome.error_type == _REJECTED and _never_fits(outcome.reason or "", sent_bytes=sent_bytes)


def judge_msearch(answer: Json) -> Outcome:
    """Several searches that all failed since the cluster was busy are a refusal."""
    responses = answer.get("responses", ())
    failed = [item for item in responses if "error" in item]
    if not failed or len(failed) < len(responses):
        return "ok"
    told = (translate_error(item["error"], item.get("status", 500), "searching") for item in failed)
    return "refused" if all(isinstance(error, ClusterUnavailable) for error in told) else "ok"


_ABSENT = frozenset({"index_not_found_exception", "alias_not_found_exception"})
_NOT_FOUND = _ABSENT | {
    "aliases_not_found_exception",
    "resource_not_found_exception",
    "index_template_missing_exception",
}
_REJECTED = "es_rejected_execution_exception"
_BUSY = frozenset({
    _REJECTED,
    "circuit_breaking_exception",
    "unavailable_shards_exception",
    "no_shard_available_action_exception",
    "process_cluster_event_timeout_exception",
    "failed_to_commit_cluster_state_exception",
    "master_not_discovered_exception",
    "not_master_exception",
    "node_closed_exception",
    "node_not_connected_exception",
    "node_disconnected_exception",
    "connect_transport_exception",
    "receive_timeout_transport_exception",
    "shard_not_in_primary_mode_exception",
    "retry_on_primary_exception",
    "retry_on_replica_exception",
    "illegal_index_shard_state_exception",
    "index_shard_not_started_exception",
    "index_shard_recovering_exception",
    "shard_not_found_exception",
    "already_closed_exception",
    "alias_conflict_exception",
    "task_cancelled_exception",
    "search_timeout_exception",
    "timeout_exception",
    "coordination_state_rejected_exception",
    "snapshot_in_progress_exception",
})  # fmt: skip
AWAY = frozenset({
    "no_shard_available_action_exception",
    "unavailable_shards_exception",
    "shard_not_found_exception",
    "illegal_index_shard_state_exception",
    "index_shard_not_started_exception",
    "index_shard_recovering_exception",
    "node_closed_exception",
    "node_not_connected_exception",
    "node_disconnected_exception",
    "connect_transport_exception",
    "receive_timeout_transport_exception",
})  # fmt: skip
"""What names nodes and shards that are on their way, which a try a little later finds."""
_CONFLICTS = frozenset({"version_conflict_engine_exception", "resource_already_exists_exception"})
_TOO_MANY_TERMS = frozenset({"too_many_nested_clauses", "too_many_clauses"})
_SEARCH_FAILED = "search_phase_execution_exception"
_WRAPPERS = frozenset({_SEARCH_FAILED, "query_shard_exception", "remote_transport_exception"})
_DISK_BLOCK = 12
_WRITE_BLOCK = 8
_BLOCK_ID = re.compile(r"/(\d+)/")
_VERSIONS = re.compile(r"current version \[(-?\d+)\] is higher or equal to the one provided \[-?\d+\]\s*$")
BUSY_RETRY_S = 1.0
_PIT_GONE = ("no_shard_available_action_exception", "index_not_found_exception")
"""What a search in a point in time fails with, beside a missing context, once its index is deleted."""


def cursor_expired(error: HalflifeError, *, remedy: str) -> CursorExpired | None:
    """Return what a cursor's caller is told where a search in its point in time failed since that is gone; else None."""
    if error.members.get("elasticsearch", {}).get("type") not in _PIT_GONE:
        return None
    return CursorExpired(
        "the point in time of this cursor is gone: its index was deleted or its shards are not there",
        field="cursor",
        remedy=remedy,
    )


def translate_error(error: Any, status: int, doing: str) -> HalflifeError:
    """Return one of our errors for an `error` object of an answer, a search or a bulk item.

    It goes by the types of the error and of its causes; the status decides only where no type is known.
    """
    types = types_of(error)
    kind = types[0] if types else None
    reason = _reason(error)
    told = ": ".join(part for part in (doing, kind or f"status {status}", reason) if part)
    more: Json = {"elasticsearch": {"type": kind, "status": status}}
    if "cluster_block_exception" in types:
        return _from_block(told, _all_reasons(error), more)
    if "search_context_missing_exception" in types:
        return CursorExpired(
            f"{doing}: the point in time is gone", remedy="start again from the first page", **more
        )
    if not _TOO_MANY_TERMS.isdisjoint(types):
        return InvalidRequest(
            f"{doing}: more words than the cluster allows in one query",
            field="query",
            remedy="send a shorter query",
            **more,
        )
    if kind in _CONFLICTS:
        return Conflict(told, **more)
    # A search, or a point in time, that no shard was there for has no cause but itself.
    if kind in AWAY or (kind == _SEARCH_FAILED and status == 503):
        # Its reason names nodes, their addresses and indices, which are no caller's business.
        return ClusterUnavailable(
            f"{doing}: a part of the index is not there for the moment",
            remedy="try again: so it is while a collection is made, moved or deleted; if it stays so, look at the "
            "cluster's health",
            retry_after_s=BUSY_RETRY_S,
            **more,
        )
    if kind == "index_not_found_exception":
        return NotFound(f"{doing}: there is no such index, or it is just being made or deleted", **more)
    if kind in _NOT_FOUND:
        return NotFound(told, **more)
    if kind == _REJECTED and _never_fits(reason):
        return too_large(doing, reason, kind)
    if not _BUSY.isdisjoint(types):
        remedy = "try again later; if it stays so, the cluster is too small for its load"
        return ClusterUnavailable(told, remedy=remedy, retry_after_s=BUSY_RETRY_S, **more)
    if status == 401:
        return ClusterRejected(
            told, remedy="check HALFLIFE_ELASTICSEARCH_API_KEY, or the user and password", **more
        )
    if kind == "security_exception" or status == 403:
        return ClusterRejected(
            told,
            remedy="give the key or user the privileges it lacks: read, write and manage on the indices halflife-* and "
            "halflife_*, monitor and manage_index_templates on the cluster",
            **more,
        )
    if kind == "media_type_header_exception":
        return ClusterRejected(told, remedy=f"upgrade the cluster: Halflife needs {OLDEST} or newer", **more)
    if status == 413:
        remedy = "send fewer or smaller documents at a time: http.max_content_length limits one request"
        return ClusterRejected(told, remedy=remedy, **more)
    # A status without a type is a proxy's or a load balancer's word, and its 500 no more than "not now".
    if status in (408, 429, 502, 503, 504) or (status == 500 and not types):
        return ClusterUnavailable(told, retry_after_s=BUSY_RETRY_S, **more)
    return ClusterRejected(told, **more)


def _from_block(told: str, reasons: str, more: Json) -> HalflifeError:
    match _fate_of_block(reasons):
        case "full":
            remedy = "free disk space or add a node: the cluster lifts the block by itself once there is room"
            return StorageFull(told, remedy=remedy, **more)
        case "fenced":
            remedy = "writes are paused for a moment; try again"
        case "retry":
            remedy = "wait until the cluster has a master and has read its state"
        case _:
            return ClusterRejected(
                told, remedy="remove the block that an operator put on the index or cluster", **more
            )
    return ClusterUnavailable(told, remedy=remedy, retry_after_s=BUSY_RETRY_S, **more)


def _fate_of_block(reasons: str) -> Fate:
    """Read the ids of the blocks: 12 is the flood stage, 8 a write block (our fence), 1 and 2 a cluster without state or master."""
    blocks = {int(number) for number in _BLOCK_ID.findall(reasons)}
    if _DISK_BLOCK in blocks:
        return "full"
    if _WRITE_BLOCK in blocks:
        return "fenced"
    return "retry" if blocks & {1, 2, 14} else "refused"


def types_of(error: Any) -> list[str]:
    """Return the error types from the most telling on: a search's own type comes after those of its shards."""
    found: list[str] = []

    def visit(node: Any) -> None:
        if not isinstance(node, dict):
            return
        kind = node.get("type")
        if kind and kind not in _WRAPPERS:
            found.append(str(kind))
        for cause in node.get("root_cause") or ():
            visit(cause)
        for shard in node.get("failed_shards") or ():
            visit(shard.get("reason") if isinstance(shard, dict) else None)
        visit(node.get("caused_by"))
        if kind in _WRAPPERS:
            found.append(str(kind))

    visit(error)
    return found


_PRESSURE = re.compile(r"\b(all_bytes|\w+_operation_bytes|max_\w+_bytes)=(\d+)")


def _never_fits(reason: str, *, sent_bytes: int = 0) -> bool:
    """Tell from a rejection by the memory for indexing whether it would be rejected by an idle cluster too.

    `sent_bytes`: of the request with this operation alone, which counts beside it where its primary has received it; more
    than that is others' share, which may be gone next time.
    """
    figures = dict(_PRESSURE.findall(reason))
    own = next((int(value) for name, value in figures.items() if name.endswith("_operation_bytes")), None)
    most = next((int(value) for name, value in figures.items() if name.startswith("max_")), None)
    if own is None or most is None:
        return False
    beside = int(figures.get("all_bytes", 0))
    return own > most or (0 < beside <= sent_bytes and own + beside > most)


def too_large(doing: str, reason: str, kind: str | None) -> LimitExceeded:
    """Return what the writer of a document is told that the cluster has no memory for."""
    most = next((int(value) for name, value in _PRESSURE.findall(reason) if name.startswith("max_")), 0)
    return LimitExceeded(
        f"{doing}: too large for this cluster's heap, which leaves {most} bytes to indexing at a time",
        field="text",
        remedy="split the document, or give the nodes more memory",
        # As an answer 413 has it: fewer documents at a time may fit.
        elasticsearch={"type": kind, "status": 413},
    )


def _reason(error: Any) -> str:
    if isinstance(error, str):
        return error[:500]
    if not isinstance(error, dict):
        return ""
    reason = str(error.get("reason") or "")
    if error.get("type") == _SEARCH_FAILED:
        for cause in error.get("root_cause") or ():
            if isinstance(cause, dict) and cause.get("reason"):
                reason = str(cause["reason"])
                break
    deeper = error.get("caused_by")
    while isinstance(deeper, dict):
        if deeper.get("reason") and str(deeper["reason"]) not in reason:
            reason = f"{reason}: {deeper['reason']}" if reason else str(deeper["reason"])
        deeper = deeper.get("caused_by")
    return reason[:500]


def _all_reasons(error: Any) -> str:
    if isinstance(error, dict):
        return " ".join(_all_reasons(value) for value in error.values())
    if isinstance(error, list):
        return " ".join(_all_reasons(value) for value in error)
    return error if isinstance(error, str) else ""


def outcome_of(item: Json) -> BulkOutcome:
    error = item.get("error")
    if error is None:
        return BulkOutcome(
            status=int(item["status"]),
            result=item.get("result"),
            version=item.get("_version"),
            seq_no=item.get("_seq_no"),
            primary_term=item.get("_primary_term"),
            shards_failed=int(item.get("_shards", {}).get("failed", 0)),
        )
    kind = str(error.get("type")) if isinstance(error, dict) else "unknown"
    reason = _reason(error)
    current = _VERSIONS.search(str(error.get("reason", ""))) if isinstance(error, dict) else None
    return BulkOutcome(
        status=int(item["status"]),
        error_type=kind,
        reason=reason,
        current_version=int(current[1]) if current else None,
    )
