"""Owns the opaque text of a cursor: sealing what the next page needs, and refusing whatever we did not seal.

Signed, not encrypted: its holder can read it, so it carries the caller's own request and never a key's forced filter
or a secret. No clock, no network: the time comes in as an argument.
"""

import base64
import binascii
import hashlib
import hmac
import json
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from app.answers import Rewrite
from app.asking import Wording
from app.errors import CursorExpired, CursorInvalid, InvalidRequest
from app.values import Value

VERSION = 1
MAX_CURSOR_CHARS = 64 * 1024
"""A cursor travels in a JSON body; a search with a vector of 4096 numbers takes about 50 KB."""

MAX_PAYLOAD_BYTES = 1024 * 1024
_DOMAIN = b"halflife cursor\0"
_MAC_BYTES = hashlib.sha256().digest_size
_START_AGAIN = "start again without a cursor"

_Count = Annotated[int, Field(ge=0, strict=True)]


class CursorPayload(Value):
    """What the next page needs. Times are milliseconds since 1970; `offset` is the first hit of the next page."""

    kind: Literal["search", "list"]
    collection: str
    caller: str = Field(description="Who was given it: a tag of the key, not the key.")
    origin_ms: Annotated[int, Field(strict=True)]
    pit_id: str | None = None
    offset: _Count = 0
    top_k: _Count = Field(0, description="list only: documents on a page; a search's request has its own.")
    after: list[Any] | None = Field(None, description="list only: the sort values to go on from.")
    request: dict[str, Any] = Field(default_factory=dict, description="The whole request, as JSON.")
    wordings: dict[str, list[Wording]] = Field(
        default_factory=dict,
        description="search only: what synonyms made of its texts, so that a changed set can't change later pages.",
    )
    rewrites: list[Rewrite] = Field(
        default_factory=list, description="search only: what the answer tells of them."
    )
    profile: dict[str, Any] | None = Field(
        None, description="Which profile ranked the first page, as its answer told it."
    )
    expires_ms: Annotated[int, Field(strict=True)]


def seal(payload: CursorPayload, *, secrets: Sequence[bytes]) -> str:
    """Return the cursor's text: URL-safe base64 of version, HMAC-SHA256 and compressed JSON, signed by the first secret.

    Raises InvalidRequest if the request in it is too large for a cursor.
    """
    _check_secrets(secrets)
    plain = _canonical(payload.model_dump(mode="json"))
    packed = zlib.compress(plain, 3)  # a vector, most of it, gets no shorter by 6, which takes twice as long
    text = (
        base64.urlsafe_b64encode(bytes([VERSION]) + _mac(secrets[0], packed) + packed).rstrip(b"=").decode()
    )
    if len(text) > MAX_CURSOR_CHARS or len(plain) > MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"this request is too large for a cursor: {len(text)} of at most {MAX_CURSOR_CHARS} characters, "
            f"{len(plain)} of at most {MAX_PAYLOAD_BYTES} bytes unpacked",
            field="paging",
            remedy="ask with `paging`: false, or shorten the filter's lists",
        )
    return text


def unseal(
    text: str,
    *,
    secrets: Sequence[bytes],
    now_ms: int,
    kind: Literal["search", "list"],
    caller: str,
    collection: str | None = None,
) -> CursorPayload:
    """Return what was sealed, by any of the secrets.

    Raises CursorInvalid if it was altered, is not ours, or was given to another caller or for another use or (where
    named) collection; CursorExpired from `expires_ms` on. Nothing is decompressed before its signature holds.
    """
    _check_secrets(secrets)
    payload = _payload(_packed(text, secrets))
    if payload.kind != kind:
        raise CursorInvalid(
            f"this cursor continues a {payload.kind}, not a {kind}",
            field="cursor",
            remedy=f"use it to {payload.kind}",
        )
    if not hmac.compare_digest(payload.caller.encode(), caller.encode()):
        raise CursorInvalid("this cursor was given to another key", field="cursor", remedy=_START_AGAIN)
    if collection is not None and payload.collection != collection:
        raise CursorInvalid("this cursor belongs to another collection", field="cursor", remedy=_START_AGAIN)
    if now_ms >= payload.expires_ms:
        raise CursorExpired(
            "this cursor's point in time is no longer kept", field="cursor", remedy=_START_AGAIN
        )
    return payload


def _packed(text: str, secrets: Sequence[bytes]) -> bytes:
    """Return the compressed payload of a text whose signature holds."""
    foreign = CursorInvalid(
        "this cursor was not issued here, or was altered on its way",
        field="cursor",
        remedy=f"send it unchanged, or {_START_AGAIN}",
    )
    if len(text) > MAX_CURSOR_CHARS:
        raise foreign
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as cause:
        raise foreign from cause
    # One text for one cursor: decoders ignore spare bits and padding.
    if (
        base64.urlsafe_b64encode(raw).rstrip(b"=").decode() != text
        or len(raw) <= 1 + _MAC_BYTES
        or raw[0] != VERSION
    ):
        raise foreign
    mac, packed = raw[1 : 1 + _MAC_BYTES], raw[1 + _MAC_BYTES :]
    if not any(hmac.compare_digest(mac, _mac(secret, packed)) for secret in secrets):
        raise foreign
    return packed


def _payload(packed: bytes) -> CursorPayload:
    """Return the payload; signed by us, so only another release's form can fail here."""
    other = CursorInvalid(
        "this cursor is of another release of this service", field="cursor", remedy=_START_AGAIN
    )
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, MAX_PAYLOAD_BYTES + 1)
        if len(plain) > MAX_PAYLOAD_BYTES or not unpacking.eof:
            raise other
        return CursorPayload.model_validate(json.loads(plain))
    except (zlib.error, ValueError, RecursionError, ValidationError) as cause:
        raise other from cause


def _mac(secret: bytes, packed: bytes) -> bytes:
    return hmac.digest(secret, _DOMAIN + bytes([VERSION]) + packed, "sha256")


def _canonical(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_secrets(secrets: Sequence[bytes]) -> None:
    if not secrets or not all(secrets):
        raise ValueError("cursors need at least one secret, none of them empty")
