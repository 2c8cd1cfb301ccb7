"""Which points in time are open, for whom and how long: the bounds that Elasticsearch does not set."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any


class PointsInTime:
    """Which points in time are open for whom, so that a caller who reads first pages only can't hold any number of them.

    Elasticsearch bounds scrolls (500 in all), but not these. Of the last uses known here: other processes have their own.
    """

    def __init__(self, *, most: int = 4_000, most_each: int = 1_000) -> None:
        self._most = most
        self._most_each = most_each
        self._held: dict[str, dict[str, float]] = {}
        """Owner -> id -> until when it is kept, the longest unused first."""
        self._owners: dict[str, str] = {}

    def add(self, owner: str, pit_id: str, *, keep_alive_s: float, now: float) -> list[str]:
        """Note one more and return those that are to be closed for it."""
        full = len(self._owners) >= self._most
        for of in list(self._held.values()) if full else [self._held.get(owner, {})]:
            for gone in [id_ for id_, _ in takewhile(lambda entry: entry[1] <= now, of.items())]:
                self.drop(gone)
        held = self._held.setdefault(owner, {})
        held[pit_id] = now + keep_alive_s
        self._owners[pit_id] = owner
        surplus = []
        while len(held) > self._most_each or len(self._owners) > self._most:
            # Whoever holds the most gives way.
            fullest = held if len(held) > self._most_each else max(self._held.values(), key=len)
            surplus.append(next(iter(fullest)))
            self.drop(surplus[-1])
        return surplus

    def use(self, body: Mapping[str, Any], *, now: float) -> None:
        """Note that a search reads one, which keeps it as long as the search says from now on."""
        pit = body.get("pit") or {}
        owner = self._owners.get(pit.get("id", ""))
        if owner is not None:
            held = self._held[owner]
            until = held.pop(pit["id"])
            held[pit["id"]] = max(until, now + _seconds(pit.get("keep_alive", "0ms")))

    def drop(self, pit_id: str) -> None:
        """Forget one that is closed."""
        owner = self._owners.pop(pit_id, None)
        if owner is not None:
            del self._held[owner][pit_id]
            if not self._held[owner]:
                del self._held[owner]


def _seconds(text: str) -> float:
    """Return the seconds of `120s` or `1500ms`."""
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text[:-1])
