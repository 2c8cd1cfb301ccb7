"""How the service's log lines look: plain text, or one JSON object a line, each with the id of its request.

What may stand in a line is decided where it is written: never a key or the text of a document, the text of a query
only if the operator allowed it.
"""

import logging
from typing import Final, Literal

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from app import observing

Format = Literal["text", "json"]

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_QUIET: Final = ("httpx2", "httpcore2", "elastic_transport", "opentelemetry")
"""Libraries whose line for every request would be ours told twice."""


def _first_failure(record: logging.LogRecord) -> bool:
    """Let through of a node's failures the first in a row alone: where it stays away, each look at it would be a line."""
    return not (isinstance(record.args, tuple) and len(record.args) == 3 and record.args[1] != 1)


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        request_id = observing.request_id.get()
        if request_id is not None and not hasattr(record, "request_id"):
            record.request_id = request_id
        return True


def handler(form: Format) -> logging.Handler:
    """Return a handler that writes to standard error in that form.

    JSON lines have `timestamp` (RFC 3339, UTC), `level`, `logger`, `message`, `request_id` within a request, what the
    line adds of its own, and `exc_info` with a stack trace.
    """
    made = logging.StreamHandler()
    made.addFilter(_RequestId())
    if form == "json":
        made.setFormatter(
            JsonFormatter(
                "%(levelname)s %(name)s %(message)s",
                rename_fields={"levelname": "level", "name": "logger"},
                timestamp=True,
                reserved_attrs=[*RESERVED_ATTRS, "color_message"],
                json_ensure_ascii=True,
            )
        )
    else:
        made.setFormatter(logging.Formatter(TEXT))
    return made


def configure(form: Format, level: str, *, requests: bool) -> None:
    """Send the whole process's log to standard error in that form, from that level on.

    `requests`: with a line for each request, not only for those that failed on our side.
    """
    logging.basicConfig(level=level.upper(), handlers=[handler(form)], force=True)
    for name in (*_QUIET, *(() if requests else ("halflife.access",))):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("elastic_transport.node_pool").addFilter(_first_failure)
