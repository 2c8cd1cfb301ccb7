"""Owns the choice among hits that resemble each other: near-duplicate removal and maximal marginal relevance.

Works on stored vectors, so nothing is embedded again. Both read the whole candidate list: give them the same
candidates whatever the page's size, and the page's order won't depend on it. No clock, no network.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Vectors: TypeAlias = Sequence[npt.NDArray[np.floating] | None]

STORED_PRECISION = 1e-6
"""Vectors are stored as 32-bit floats: a cosine of exactly the threshold may come out this much lower."""

_BLOCK = 256
"""Hits compared at once: one matrix product for a block takes a tenth of the time of a product for each hit."""


def drop_near_duplicates(
    keys: Sequence[str],
    vectors: Vectors,
    *,
    threshold: float,
    keep: Literal["higher", "newer"] = "higher",
    created_ms: Sequence[int | None] | None = None,
    texts: Sequence[str | None] | None = None,
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the keys that stay, in order, and for each of them that dropped others, which (in the input's order).

    `keys` come best first; the other sequences run beside them. Two hits are duplicates if the cosine of their vectors
    is at least `threshold` (0 where a vector is missing or zero) or if their `texts` (any digest of them, None:
    unknown) are equal. Each hit is compared with those kept so far only, and dropped for the one most like it: in a
    chain a~b~c whose ends differ, b goes with a and c stays.

    `higher` keeps the better placed of two. `newer` keeps the later created (undated ones are oldest, ties go to the
    better placed) and gives it the best place among itself and those dropped for it.
    """
    count = len(keys)
    for name, given in (("vectors", vectors), ("created_ms", created_ms), ("texts", texts)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} members for {count} keys")
    if len(set(keys)) != count:
        raise ValueError("keys must differ")
    if keep == "newer" and created_ms is None:
        raise ValueError("keep 'newer' needs created_ms")
    units = _unit_vectors(vectors)
    by_choice = list(range(count))
    if keep == "newer":
        dates = list(created_ms or [])
        by_choice.sort(key=lambda at: (dates[at] is None, -(dates[at] or 0), at))
    kept: list[int] = []
    kept_units = np.zeros_like(units)
    kept_by_text: dict[str, int] = {}
    dropped: dict[int, list[int]] = {}
    for start in range(0, count, _BLOCK):
        block = by_choice[start : start + _BLOCK]
        before = len(kept)
        # Rounded, so that equal vectors tie wherever they stand in the matrix.
        with_kept = np.round(units[block] @ kept_units[:before].T, 12)
        with_block = np.round(units[block] @ units[block].T, 12)
        columns: list[int] = []
        for row, at in enumerate(block):
            text = texts[at] if texts is not None else None
            twin = kept_by_text.get(text) if text is not None else None
            if twin is None and kept:
                cosines = np.concatenate([with_kept[row], with_block[row, columns]])
                nearest = int(np.argmax(cosines))
                alike = cosines[nearest] > 0 and cosines[nearest] >= threshold - STORED_PRECISION
                twin = kept[nearest] if alike else None
            if twin is not None:
                dropped.setdefault(twin, []).append(at)
                continue
            kept_units[len(kept)] = units[at]
            kept.append(at)
            columns.append(row)
            if text is not None:
                kept_by_text[text] = at
    kept.sort(key=lambda at: min([at, *dropped.get(at, [])]))
    return [keys[at] for at in kept], {
        keys[at]: [keys[other] for other in sorted(dropped[at])] for at in kept if at in dropped
    }


def cosine(one: npt.NDArray[np.floating] | None, other: npt.NDArray[np.floating] | None) -> float:
    """Return the cosine of two vectors; 0 where one is missing or zero."""
    units = _unit_vectors([one, other])
    return float(np.round(units[0] @ units[1], 12)) if units.size else 0.0


def mmr(relevance: Sequence[float], vectors: Vectors, *, lambda_: float, k: int) -> list[int]:
    """Return up to `k` positions in the order chosen by maximal marginal relevance (Carbonell and Goldstein, 1998).

    The first is the most relevant; each further one has the greatest lambda * relevance - (1 - lambda) * (greatest
    cosine with one chosen before). lambda 1 is relevance alone, 0 is difference alone; ties go to the earlier input.
    A missing or zero vector has cosine 0 with everything. Cosines below 0 count as they are.
    """
    if not 0 <= lambda_ <= 1:
        raise ValueError(f"lambda lies in [0, 1], not {lambda_}")
    if len(vectors) != len(relevance):
        raise ValueError(f"vectors has {len(vectors)} members for {len(relevance)} relevances")
    if not len(relevance) or k < 1:
        return []
    units = _unit_vectors(vectors)
    worth = np.asarray(relevance, dtype=np.float64)
    nearest = np.full(len(worth), -np.inf)
    open_ = np.ones(len(worth), dtype=bool)
    chosen = [int(np.argmax(worth))]
    while len(chosen) < min(k, len(worth)):
        last = chosen[-1]
        open_[last] = False
        # Rounded, so that equal vectors tie wherever they stand in the matrix.
        nearest = np.maximum(nearest, np.round(units @ units[last], 12))
        marginal = lambda_ * worth - (1 - lambda_) * nearest
        chosen.append(int(np.argmax(np.where(open_, marginal, -np.inf))))
    return chosen


def _unit_vectors(vectors: Vectors) -> npt.NDArray[np.float64]:
    """Return one row of length 1 for each vector; zeros where there is none. Raises ValueError on differing lengths."""
    sizes = {len(vector) for vector in vectors if vector is not None}
    if len(sizes) > 1:
        raise ValueError(f"vectors of one collection have one length, these have {sorted(sizes)}")
    rows = np.zeros((len(vectors), sizes.pop() if sizes else 0))
    for at, vector in enumerate(vectors):
        if vector is not None:
            row = np.asarray(vector, dtype=np.float64)
            length = np.sqrt(row @ row)
            if length > 0:
                rows[at] = row / length
    return rows
