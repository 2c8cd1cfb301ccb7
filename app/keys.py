"""Bearer keys: what a list of them says, which one a token is, what it allows.

Pure: text in, keys out. A key is stored as the SHA-256 of its token; a token is 256 random bits, so no slow hash is
needed. Refuses to know where keys are kept (`keyfile`, `settings`) and how they travel (`edge`).
"""

import fnmatch
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationError, model_validator

from app.collection import Collection
from app.errors import InvalidRequest
from app.filters import AllOf, clauses, names_metadata, only_in, parse_filter
from app.refusals import invalid
from app.times import Instant, to_ms
from app.values import Filter, Value

Scope = Literal["read", "write", "admin", "metrics"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
MAX_TOKEN_BYTES: Final = 512
MAX_KEYS: Final = 10_000
KEY_ID: Final = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
"""What a key may be called, as a pattern of the whole id."""
TOKEN_PREFIX: Final = "hlf_"  # noqa: S105 - what all tokens share
"""What our tokens begin with, so that scanners for leaked secrets can tell them."""

_GLOB = re.compile(r"[a-z0-9_*?-]{1,100}")


def _check_glob(value: str) -> str:
    if not _GLOB.fullmatch(value):
        raise invalid(
            "is neither a collection's name nor a pattern of them",
            "write small letters, digits, '_' and '-', with `*` for any characters and `?` for one, such as 'team-a-*'",
        )
    return value


class Key(Value):
    """One key: the hash of its token, and what it allows. A filter holds for everything it reads and writes."""

    id: Annotated[str, Field(pattern=f"^{KEY_ID}$")]
    hash: Annotated[str, Field(pattern=r"^(sha256:)?[0-9a-f]{64}$")]
    scopes: Annotated[list[Scope], Field(min_length=1)]
    collections: Annotated[
        list[Annotated[str, AfterValidator(_check_glob)]], Field(min_length=1, max_length=1_000)
    ]
    filter: Filter | None = None
    rate_per_s: Annotated[float, Field(gt=0, le=100_000)] | None = None
    created: Instant | None = None
    expires: Instant | None = None

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.filter is None:
            return self
        if not self.filter:
            raise invalid("`filter` is empty and would allow everything", "leave it out for that")
        if "admin" in self.scopes:
            raise invalid(
                "`scopes` holds 'admin' beside a `filter`, and deleting a collection would reach past the filter",
                "drop one of them",
            )
        try:
            parse_filter(self.filter, declared={}, ranges_anywhere=True)
        except InvalidRequest as cause:
            raise invalid(cause.detail, cause.remedy or "write it as /docs says of filters") from cause
        return self

    @property
    def digest(self) -> bytes:
        """SHA-256 of the token."""
        return bytes.fromhex(self.hash.removeprefix("sha256:"))

    @property
    def tag(self) -> str:
        """What binds cursors to this very key: another token under the same id has another tag."""
        return f"{self.id}:{self.hash.removeprefix('sha256:')[:16]}"

    def expired(self, now_ms: int) -> bool:
        """Tell whether its time was over at that time, in milliseconds since 1970."""
        return self.expires is not None and now_ms >= to_ms(self.expires)

    def allows(self, scope: Scope) -> bool:
        """Tell whether the key has the scope; who administers may also see the figures."""
        return scope in self.scopes or (scope == "metrics" and "admin" in self.scopes)

    def reaches(self, collection: str) -> bool:
        """Tell whether the collection is one of the key's."""
        return any(fnmatch.fnmatchcase(collection, pattern) for pattern in self.collections)


class Keyring:
    """The keys in force."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = tuple(keys)
        self._digests = tuple((key.digest, key) for key in self.keys)

    def known(self, token: bytes) -> Key | None:
        """Return the key whose token this is, expired or not; None for none.

        Every stored hash is compared, as bytes and in constant time: how long it takes tells nothing of the keys.
        """
        given = hashlib.sha256(token).digest()
        found: Key | None = None
        for digest, key in self._digests:
            if hmac.compare_digest(given, digest):
                found = key
        return None if len(token) > MAX_TOKEN_BYTES else found

    def find(self, token: bytes, *, now_ms: int) -> Key | None:
        """Return the key in force whose token this is; None for none and for one that has expired."""
        found = self.known(token)
        return None if found is None or found.expired(now_ms) else found

    def in_force(self, now_ms: int) -> int:
        """Return how many of the keys have not expired."""
        return sum(not key.expired(now_ms) for key in self.keys)


@dataclass(frozen=True, slots=True)
class Fence:
    """A key's filter as one index of a collection takes it: the condition for single documents, the clauses for the cluster.

    Clauses that look at metadata match nothing in any other index, however a request comes to it.
    """

    condition: AllOf
    clauses: tuple[dict[str, Any], ...]


def fence(key: Key, collection: Collection) -> Fence | None:
    """Return what keeps the key inside its part of the collection; None for a key without a filter.

    Raises InvalidRequest where the filter does not fit what the collection declares.
    """
    if key.filter is None:
        return None
    condition = parse_filter(key.filter, declared=collection.declared, path="the key's filter")
    made = clauses(condition)
    if names_metadata(made):
        # Read for what this index declares: in one that declares other keys "not" would hold for everything.
        made.append(only_in(collection.index))
    return Fence(condition, tuple(made))


def parse_keys(text: str, *, where: str) -> list[Key]:
    """Return the keys of a JSON list, or of an object with the list under `keys`.

    Raises InvalidRequest that names the entry and the field, and never repeats a hash or what else was written.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        place = f" (line {cause.lineno})" if isinstance(cause, json.JSONDecodeError) else ""
        raise InvalidRequest(f"{where} is not JSON{place}", remedy=_REMEDY) from cause
    entries = value.get("keys") if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise InvalidRequest(f"{where} holds no list of keys", remedy=_REMEDY)
    if len(entries) > MAX_KEYS:
        raise InvalidRequest(f"{where} holds more than {MAX_KEYS} keys", remedy="remove those of no use")
    keys = [_parse(entry, f"{where}, key {at}") for at, entry in enumerate(entries, start=1)]
    for what, values in (("id", [key.id for key in keys]), ("hash", [key.digest for key in keys])):
        if len(values) != len(set(values)):
            raise InvalidRequest(f"{where}: two keys have the same {what}", field=what, remedy="remove one")
    return keys


_REMEDY = "make it with `halflife keys create`"


def _parse(entry: Any, where: str) -> Key:
    try:
        return Key.model_validate(entry)
    except ValidationError as cause:
        fault = cause.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part)[:60] for part in fault["loc"])
        told = fault["msg"].removeprefix("Value error, ")
        raise InvalidRequest(
            f"{where}: {f'`{field}`: ' if field else ''}{told}".encode("utf-8", "replace").decode(),
            field=field or None,
            remedy="correct the entry, or make it with `halflife keys create`",
        ) from cause


def entry_of(key: Key) -> dict[str, Any]:
    """Return the key as lists of keys hold it."""
    return key.model_dump(mode="json", exclude_none=True)


def text_of(keys: Sequence[Key]) -> str:
    """Return a list of keys as their file holds it."""
    return json.dumps({"keys": [entry_of(key) for key in keys]}, ensure_ascii=False, indent=2) + "\n"


def hash_of(token: str) -> str:
    """Return what is stored of a token."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


def bearer(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return the token of the one Authorization header, as the bytes that came; None for none, two, or another scheme."""
    given = [value for name, value in headers if name.lower() == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, token = given[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and token else None
