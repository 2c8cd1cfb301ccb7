"""Own the HTTP conversation of the command lines with the API: where it is, what it answers, what its errors say.

Returns plain JSON as the API sent it and prints nothing. Retries only what its caller asks to have retried.
"""

import json
import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlencode

from scripts.distribution import said
from scripts.stack import DEFAULT_PORT, asked_for

if TYPE_CHECKING:
    # Imported where it is used: commands that only look at processes would wait for it in vain.
    import httpx2

URL_VARIABLE = "HALFLIFE_URL"
KEY_VARIABLE = "HALFLIFE_KEY"
# A batch of long documents is embedded while the request waits.
_WRITE_TIMEOUT_S = 600.0
_READ_TIMEOUT_S = 90.0
_LONGEST_PAUSE_S = 30.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

# What fields of a request are called on the command line.
_OPTIONS = {
    "as_of": "--as-of", "collection": "--collection", "decay": "--decay", "declared": "--declare", "filter": "--filter",
    "profile": "--profile", "refresh_interval": "--refresh-interval", "top_k": "--top-k",
}  # fmt: skip
_IN_COMMANDS = (
    (
        re.compile(r"create it with PUT /v1/collections/(\S+)"),
        r"make it with `halflife load PATH… -c \1` or `halflife collections create \1`; `halflife collections list` lists all",
    ),
    (
        re.compile(r"with PUT /v1/collections/(\S+)"),
        r"with `halflife collections update \1 --body …`",
    ),
    (re.compile(r", or list documents with GET \S+"), ""),
    (re.compile(r"send a key as `Authorization: Bearer …`"), f"give a key as {KEY_VARIABLE} or --key"),
)

_WHOSE = "check that --url (or HALFLIFE_URL) leads to Halflife's API: `halflife status` tells the local stack's address"

Json = dict[str, Any]
T = TypeVar("T")


class ApiError(Exception):
    """What went wrong, in words; `remedy` says what to do about it, where that is known."""

    def __init__(self, detail: str, *, remedy: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy


class ApiUnreachable(ApiError):
    """Nobody answers at the API's address, or the connection broke."""


class ApiProblem(ApiError):
    """The API answered with problem details. `status` is HTTP's, `retry_after_s` what it asked us to wait."""

    def __init__(self, status: int, problem: Mapping[str, Any], retry_after_s: float | None) -> None:
        self.status = status
        self.problem = dict(problem)
        self.code = str(problem.get("type", "")).rpartition(":")[2]
        self.retry_after_s = retry_after_s
        title, detail = str(problem.get("title") or f"HTTP {status}"), str(problem.get("detail") or "")
        field = problem.get("field")
        told = f"{title}: {detail}" if detail and detail != title else title
        if field and f"`{field}" not in told and not detail.startswith(str(field)):
            option = _OPTIONS.get(str(field).partition(".")[0])
            told += f" ({f'{option}, ' if option else ''}field `{field}`)"
        # An answer to invalid input may list more faults than the first.
        more = [item for item in problem.get("errors", [])[1:] if isinstance(item, dict)]
        told += "".join(f"\n  also {item.get('field')}: {item.get('detail')}" for item in more)
        remedy = problem.get("remedy")
        super().__init__(as_commands(told), remedy=None if remedy is None else as_commands(str(remedy)))


def as_commands(told: str) -> str:
    """Return what the service tells, which speaks of HTTP, with the commands and options that do the same."""
    for request, command in _IN_COMMANDS:
        told = request.sub(command, told)
    return told


def find_url(chosen: str | None, data: Path | None) -> str:
    """Return the API's address: the one given, else that of the stack on the folder given, else `$HALFLIFE_URL`, else the
    running local stack's, else port 8080, where no stack runs on the folder that is found without one given.

    Raises NothingRuns for a folder given without an address and without a stack, and for a stack whose API has no
    address yet: another may have port 8080.
    """
    if url := chosen or (None if data else said(URL_VARIABLE)):
        return url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    if (state := asked_for(data)) is not None:
        return state.address("API", state.api)
    return f"http://127.0.0.1:{DEFAULT_PORT}"


class Client:
    """A connection to the API at one address; may be used from several threads. Close it, or use `with`."""

    def __init__(
        self, url: str, *, key: str | None = None, transport: "httpx2.BaseTransport | None" = None
    ) -> None:
        """Open nothing yet; `key` is `$HALFLIFE_KEY` if left out. Raises ApiError for what can't be an address or a key."""
        import httpx2

        self.url = url
        try:
            parsed = httpx2.URL(url)
        except (httpx2.InvalidURL, ValueError) as cause:
            raise ApiError(
                f"'{url}' is not an address: {cause}", remedy="give one such as http://127.0.0.1:8080"
            ) from cause
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise ApiError(f"'{url}' is not an address", remedy="give one such as http://127.0.0.1:8080")
        self._http = httpx2.Client(
            base_url=url,
            transport=transport,
            headers=_authorization(key),
            timeout=httpx2.Timeout(_READ_TIMEOUT_S, connect=5.0),
            # A proxy from the environment can't reach this machine's own loopback.
            trust_env=parsed.host not in _LOOPBACK,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # -- the API

    def search(self, body: Mapping[str, Any]) -> Json:
        """POST /v1/search."""
        return self._object("POST", "/v1/search", body)

    def why(self, body: Mapping[str, Any]) -> Json:
        """POST /v1/why."""
        return self._object("POST", "/v1/why", body)

    def upsert(
        self, collection: str, documents: Sequence[Mapping[str, Any]], *, refresh: str = "false"
    ) -> Json:
        """Store documents; `items` of the answer are in the order sent."""
        return self._object(
            "POST",
            f"{_collection(collection)}/documents",
            {"documents": documents, "refresh": refresh},
            timeout_s=_WRITE_TIMEOUT_S,
        )

    def page(
        self, collection: str, *, only: Mapping[str, Any] | None = None, cursor: str | None = None
    ) -> Json:
        """Return a page of the documents that a filter matches, in id order; `cursor` of one leads to the next."""
        asked = {"cursor": cursor} if cursor else {"filter": json.dumps(only, ensure_ascii=False)}
        return self._object("GET", f"{_collection(collection)}/documents?{urlencode(asked)}")

    def document(self, collection: str, id_: str) -> Json | None:
        """Return one document as it is now, None if it is not there."""
        try:
            return self._object("GET", f"{_collection(collection)}/documents/{quote(id_, safe='')}")
        except ApiProblem as problem:
            if problem.status == 404:
                return None
            raise

    def delete(
        self, collection: str, documents: Sequence[Mapping[str, Any]], *, refresh: str = "false"
    ) -> Json:
        """Delete documents, given as objects of `id` and, if it must be that one, `if_version`."""
        return self._object(
            "POST",
            f"{_collection(collection)}/documents/delete",
            {"documents": documents, "refresh": refresh},
        )

    def count(self, collection: str) -> int | None:
        """Return how many documents a collection holds, or None if there is no such collection."""
        try:
            page = self._object("GET", f"{_collection(collection)}/documents?size=1")
        except ApiProblem as problem:
            if problem.status == 404:
                return None
            raise
        return int(page["total"])

    def collections(self) -> list[Json]:
        """Return what collections there are."""
        found = self._request("GET", "/v1/collections", None, _READ_TIMEOUT_S)
        if not isinstance(found, list):
            raise self._foreign()
        return [item for item in found if isinstance(item, dict)]

    def check(self) -> None:
        """Raise ApiUnreachable unless somebody answers at the address."""
        self._request("GET", "/livez", None, 5.0)

    def collection(self, name: str) -> Json:
        """Return what a collection is and holds."""
        return self._own(self._of_existing("GET", _collection(name)))

    def put_collection(self, name: str, options: Mapping[str, Any]) -> Json:
        """Create a collection, or change one in place."""
        return self._object("PUT", _collection(name), options)

    def delete_collection(self, name: str) -> None:
        """Delete a collection with all its documents."""
        self._of_existing("DELETE", f"{_collection(name)}?confirm={quote(name, safe='')}")

    def synonyms(self, name: str) -> Json:
        """Return a collection's synonyms."""
        return self._own(self._of_existing("GET", f"{_collection(name)}/synonyms"))

    def put_synonyms(self, name: str, rules: Sequence[Any]) -> Json:
        """Set a collection's synonyms."""
        return self._object("PUT", f"{_collection(name)}/synonyms", {"synonyms_set": list(rules)})

    def delete_synonyms(self, name: str) -> None:
        """Delete a collection's synonyms."""
        self._of_existing("DELETE", f"{_collection(name)}/synonyms")

    # -- HTTP

    def _object(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = _READ_TIMEOUT_S,
    ) -> Json:
        return self._own(self._request(method, path, body, timeout_s))

    def _own(self, answer: Any) -> Json:
        """Return an answer if it is an object, as all of ours are."""
        if not isinstance(answer, dict):
            raise self._foreign()
        return answer

    def _foreign(self) -> ApiError:
        return ApiError(f"{self.url} answered something that is not Halflife's", remedy=_WHOSE)

    def _of_existing(self, method: str, path: str) -> Any:
        """Ask for what must be there: what is missing is to be looked up, and not to be made."""
        try:
            return self._request(method, path, None, _READ_TIMEOUT_S)
        except ApiProblem as problem:
            if problem.status == 404 and problem.code == "not-found":
                problem.remedy = "`halflife collections list` lists those that there are"
            raise

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        import httpx2

        try:
            response = self._http.request(
                method, path, json=body, timeout=httpx2.Timeout(timeout_s, connect=5.0)
            )
        except httpx2.TimeoutException as cause:
            raise ApiUnreachable(
                f"{self.url} did not answer in time", remedy="see `halflife status`, or try again"
            ) from cause
        except httpx2.RequestError as cause:
            raise ApiUnreachable(
                f"{self.url} does not answer ({str(cause) or type(cause).__name__})",
                remedy="start it with `halflife up`, or give its address with --url or HALFLIFE_URL",
            ) from cause
        except (ValueError, UnicodeEncodeError) as cause:
            raise ApiError(
                f"the request can't be written as JSON: {cause}",
                remedy="send finite numbers and well-formed Unicode",
            ) from cause
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.is_success:
            return answer
        if not isinstance(answer, dict) or not isinstance(answer.get("title"), str):
            # Another program's answer, or that of a proxy before ours.
            told = f"HTTP {response.status_code} from {self.url}, and the answer is not Halflife's"
            answer = {"title": told, "remedy": _WHOSE}
        raise ApiProblem(response.status_code, answer, _retry_after(response))


def _authorization(key: str | None) -> dict[str, str]:
    """Return the header that carries the key, if there is one."""
    token = (key or said(KEY_VARIABLE)).strip()
    if not token:
        return {}
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ApiError("the key is not one that Halflife makes", remedy=f"check --key and {KEY_VARIABLE}")
    return {"Authorization": f"Bearer {token}"}


def items_of(answer: Mapping[str, Any], count: int) -> list[Json]:
    """Return what the API says became of each of so many documents. Raises ApiError where it does not say so of all."""
    items = answer.get("items")
    if not isinstance(items, list) or len(items) != count:
        raise ApiError(
            "the API's answer does not list what became of each document",
            remedy="check that --url leads to Halflife",
        )
    return items


def persist(
    do: Callable[[], T],
    *,
    within_s: float,
    sleep: Callable[[float], None] = time.sleep,
    told: Callable[[str], None],
) -> T:
    """Return what `do` gives, trying again while the API is overloaded (429, 503) or away, for at most `within_s`.

    Waits what Retry-After says, else twice as long each time from half a second on. The last error is raised.
    """
    begun = time.monotonic()
    pause = 0.5
    while True:
        try:
            return do()
        except (ApiProblem, ApiUnreachable) as error:
            if isinstance(error, ApiProblem) and error.status not in {429, 503}:
                raise
            asked = error.retry_after_s if isinstance(error, ApiProblem) else None
            wait = min(_LONGEST_PAUSE_S, pause * (0.75 + random.random() / 2) if asked is None else asked)  # noqa: S311 - spreads the load
            if time.monotonic() + wait - begun > within_s:
                raise
            told(f"{error.detail.splitlines()[0]}; trying again in {wait:.1f} s")
            sleep(wait)
            pause = min(_LONGEST_PAUSE_S, pause * 2)


def _collection(name: str) -> str:
    return f"/v1/collections/{quote(name, safe='')}"


def _retry_after(response: "httpx2.Response") -> float | None:
    # A date is allowed there too, but no server of ours sends one.
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
