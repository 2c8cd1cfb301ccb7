"""What one request may cost, and how often one caller may ask: checked before anything is sent anywhere.

Pure: the clock's reading comes in. The models bound what is possible at all; these bounds are the operator's.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from app.asking import Search
from app.errors import LimitExceeded
from app.filters import parse_filter
from app.ranking import Profile
from app.values import (
    MAX_FILTER_DEPTH,
    MAX_FILTER_TERMS,
    MAX_ITEMS,
    MAX_QUERIES,
    MAX_QUERY_CHARS,
    MAX_TOP_K,
    MAX_WINDOW,
)

Asked = TypeVar("Asked", bound=Search)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one request may ask for."""

    query_chars: int = MAX_QUERY_CHARS
    top_k: int = MAX_TOP_K
    window: int = MAX_WINDOW
    filter_depth: int = MAX_FILTER_DEPTH
    filter_values: int = MAX_FILTER_TERMS
    queries: int = MAX_QUERIES
    documents: int = MAX_ITEMS

    def check_search(self, search: Asked, *, checked: Search | None = None) -> Asked:
        """Return the search, with a page that this service gives where the caller left its length open.

        Raises LimitExceeded naming the field, or InvalidRequest for a filter that no collection could read. So what
        tries to smuggle a query into a filter is refused before the cluster hears of the request. `checked` is a search
        that passed: a filter or routes that are the same objects are not read again.
        """
        self._check("query", len(search.query), self.query_chars, "characters", "shorten it")
        if "top_k" in search.model_fields_set:
            self._check("top_k", search.top_k, self.top_k, "hits on a page", "ask for pages with `cursor`")
        elif search.top_k > self.top_k:
            search = search.model_copy(update={"top_k": self.top_k})
        if search.filter and (checked is None or search.filter is not checked.filter):
            self.check_filter(search.filter)
        self._check_ranking(search, read=checked is not None and search.routes is checked.routes)
        return search

    def check_profile(self, profile: Profile, *, path: str) -> None:
        """Raise as `check_search` does for what searches would take from the profile."""
        self._check_ranking(profile, path=f"{path}.")

    def _check_ranking(self, ranking: Search | Profile, *, path: str = "", read: bool = False) -> None:
        window = ranking.fusion.window if ranking.fusion else None
        if window is not None:
            self._check(f"{path}fusion.window", window, self.window, "ranks", "narrow it")
        for at, route in enumerate(() if read else ranking.routes or ()):
            here = f"{path}routes[{at}]"
            if route.query:
                self._check(f"{here}.query", len(route.query), self.query_chars, "characters", "shorten it")
            if route.filter:
                self.check_filter(route.filter, path=f"{here}.filter")

    def check_filter(self, value: Mapping[str, Any], *, path: str = "filter") -> None:
        """Raise LimitExceeded, or InvalidRequest for what is no filter, whatever the collection declares."""
        parse_filter(
            value,
            declared={},
            path=path,
            ranges_anywhere=True,
            max_depth=self.filter_depth,
            max_values=self.filter_values,
        )

    def check_queries(self, queries: Sequence[Any]) -> None:
        """Raise LimitExceeded if a batch holds too many queries."""
        self._check("queries", len(queries), self.queries, "queries at once", "send them in several requests")

    def check_items(self, items: Sequence[Any], *, field: str = "documents") -> None:
        """Raise LimitExceeded if a bulk holds too many items."""
        self._check(field, len(items), self.documents, "items at once", "send them in several requests")

    @staticmethod
    def _check(field: str, size: int, most: int, unit: str, remedy: str) -> None:
        if size > most:
            raise LimitExceeded(
                f"`{field}`: {size} {unit}, and this service takes {most} at most",
                field=field,
                remedy=remedy,
                limit=most,
            )


@dataclass(frozen=True, slots=True)
class Taken:
    """What a caller has left: whole requests at once, seconds until all of them are back, and until the next one."""

    allowed: bool
    quota: int
    remaining: int
    window_s: int
    full_in_s: int
    retry_after_s: float


class Buckets:
    """A token bucket for each caller: `burst` requests at once, refilled with `rate_per_s`.

    Callers beyond `most` are forgotten, those who asked longest ago first; they begin with a full bucket again.
    """

    def __init__(self, *, rate_per_s: float, burst: int, most: int = 10_000) -> None:
        if rate_per_s <= 0 or burst < 1:
            raise ValueError("a bucket needs a rate above 0 and room for one request")
        self._rate = rate_per_s
        self._burst = burst
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now_s: float, *, rate_per_s: float | None = None) -> Taken:
        """Take one request out of the caller's bucket if there is one; `rate_per_s` is the caller's own rate.

        A caller with a rate of its own has a burst in proportion.
        """
        rate = rate_per_s or self._rate
        burst = self._burst if rate_per_s is None else max(1, round(self._burst * rate / self._rate))
        level, since = self._levels.get(caller, (float(burst), now_s))
        level = min(float(burst), level + max(0.0, now_s - since) * rate)
        # Sums of many small refills fall a hair short of the whole.
        allowed = level >= 1 - 1e-9
        if allowed:
            level = max(0.0, level - 1)
        self._levels[caller] = (level, now_s)
        self._levels.move_to_end(caller)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return Taken(
            allowed=allowed,
            quota=burst,
            remaining=int(level + 1e-9),
            window_s=max(1, math.ceil(burst / rate)),
            full_in_s=math.ceil((burst - level) / rate),
            retry_after_s=0.0 if allowed else (1 - level) / rate,
        )
