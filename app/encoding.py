"""How documents and vectors are written for Elasticsearch, and vectors read back."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def encode(value: Mapping[str, Any]) -> bytes:
    """Return compact JSON in UTF-8 on one line. Raises ValueError for NaN, infinities and lone surrogates."""
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def pack_vector(vector: np.ndarray) -> str:
    """Return base64 of the numbers as big-endian 32-bit floats, as dense_vector takes them in documents and queries."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype=">f4").tobytes()).decode("ascii")


def packed(vector: str | Sequence[float]) -> str:
    """Return a stored vector packed, from either form in which it is read.

    Numbers come out of the index, and what was sent where a document is read out of the translog, before a refresh.
    """
    return vector if isinstance(vector, str) else pack_vector(np.asarray(vector, dtype=np.float32))


def unpack_vector(packed: str) -> np.ndarray:
    """Return the float32 numbers behind `pack_vector`."""
    return np.frombuffer(base64.b64decode(packed), dtype=">f4").astype(np.float32)
