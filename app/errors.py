"""The failures this service tells its callers about, each with its HTTP status and a remedy.

Raised anywhere, turned into RFC 9457 problem details by one handler in `api`. Imports nothing of ours.
"""

from typing import Any, ClassVar


class HalflifeError(Exception):
    """Carry what was being done, what went wrong and what to do about it."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        detail: str,
        *,
        remedy: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        **members: Any,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy
        self.field = field
        self.retry_after_s = retry_after_s
        self.members = members

    def problem(self) -> dict[str, Any]:
        """Return the RFC 9457 members; extension members that are None are left out."""
        body: dict[str, Any] = {
            "type": f"urn:halflife:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
        }
        if self.field is not None:
            body["field"] = self.field
        if self.remedy is not None:
            body["remedy"] = self.remedy
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        body.update(self.members)
        return body


class InvalidRequest(HalflifeError):
    """The request contradicts itself or the contract; nothing was done."""

    status = 422
    code = "invalid-request"
    title = "The request is not valid"


class UnreadableFile(InvalidRequest):
    """A file is broken, encrypted, empty, too large or of a format that is not read."""

    code = "file-unreadable"
    title = "The file can't be read"


class NotFound(HalflifeError):
    """The collection or document is not there, or not for this caller."""

    status = 404
    code = "not-found"
    title = "Not found"


class Conflict(HalflifeError):
    """A newer version is stored, or the thing to be made exists already."""

    status = 409
    code = "conflict"
    title = "Conflict"


class CursorInvalid(HalflifeError):
    """The cursor was not issued by this service, or was altered."""

    status = 422
    code = "cursor-invalid"
    title = "The cursor is not one of ours"


class CursorExpired(HalflifeError):
    """The point in time behind the cursor is gone."""

    status = 410
    code = "cursor-expired"
    title = "The cursor has expired"


class PastWindow(HalflifeError):
    """The page asked for lies beyond the fused window."""

    status = 422
    code = "past-window"
    title = "Past the fused window"


class SchemaMismatch(HalflifeError):
    """An index or template does not match what this service was configured for."""

    status = 503
    code = "schema-mismatch"
    title = "The index does not match the configuration"


class Unavailable(HalflifeError):
    """Something that this request needs does not answer; trying later may help."""

    status = 503
    code = "unavailable"
    title = "Unavailable"


class Overloaded(HalflifeError):
    """As much is under way as may be, of all callers or of this one; nothing was done."""

    status = 503
    code = "overloaded"
    title = "Too many requests at once"


class Ending(Unavailable):
    """The service is told to end and could not finish the request before; what it stored of it stays stored."""

    code = "service-ending"
    title = "The service is ending"


class ClusterUnavailable(Unavailable):
    """Elasticsearch cannot be reached or answered that it can't serve now."""

    code = "elasticsearch-unavailable"
    title = "Elasticsearch does not answer"


class ClusterOutOfTime(ClusterUnavailable):
    """Elasticsearch had not answered when the little time was over that its caller had left: it says nothing of the cluster."""

    status = 504
    code = "deadline-exceeded"
    title = "The time budget is used up"


class ClusterRejected(HalflifeError):
    """Elasticsearch refused what we sent: a fault of ours or of the cluster's set-up."""

    status = 502
    code = "elasticsearch-rejected"
    title = "Elasticsearch refused the request"


class StorageFull(HalflifeError):
    """The cluster blocks writes because a disk is full (flood stage)."""

    status = 507
    code = "storage-full"
    title = "Elasticsearch has no disk space left"


class EmbedderUnavailable(Unavailable):
    """The embedding server cannot be reached, is overloaded or too slow."""

    code = "embedder-unavailable"
    title = "The embedding server does not answer"


class EmbedderRejected(HalflifeError):
    """The embedding server refused the input or answered something unusable."""

    status = 502
    code = "embedder-rejected"
    title = "The embedding server's answer can't be used"


class RerankerFailed(HalflifeError):
    """The reranker failed or answered something unusable."""

    status = 502
    code = "reranker-failed"
    title = "The reranker's answer can't be used"


class RewriterFailed(HalflifeError):
    """The chat model that rewrites queries failed or answered something unusable."""

    status = 502
    code = "rewriter-failed"
    title = "The rewriter's answer can't be used"


class Unauthorized(HalflifeError):
    """No key came with the request, or one that is not known."""

    status = 401
    code = "unauthorized"
    title = "A key is needed"


class Forbidden(HalflifeError):
    """The key is known and does not allow this; nothing was done."""

    status = 403
    code = "forbidden"
    title = "The key does not allow this"


class LimitExceeded(InvalidRequest):
    """The request asks for more than the service, or its settings, allow one request; nothing was done."""

    code = "limit-exceeded"
    title = "The request is over a limit"


class TooManyRequests(HalflifeError):
    """This caller sends more requests than it may; `retry_after_s` says when the next is taken."""

    status = 429
    code = "too-many-requests"
    title = "Too many requests"


class DeadlineExceeded(HalflifeError):
    """The request's time budget was used up before there was an answer."""

    status = 504
    code = "deadline-exceeded"
    title = "The time budget is used up"
