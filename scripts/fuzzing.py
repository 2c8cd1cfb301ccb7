"""Looks for filters that break the filter compiler: coverage-guided by atheris where it is installed.

    ./scripts/fuzz --minutes 3             bytes become filters and documents; prints how many, and what broke
    ./scripts/fuzz --engine hypothesis     the same properties under Hypothesis, which needs nothing further

What must hold, whatever is sent: the compiler answers with clauses or with InvalidRequest, nothing else; clauses are
JSON within the bounds of a request; and a reader of the clauses that shares no code with the compiler keeps a document
exactly where `app.filters` says that it matches, so that no hit escapes a filter that a key forces.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from app.collection import DeclaredType
from app.errors import InvalidRequest
from app.filters import MAX_CONDITIONS, compile_filter, matches
from app.times import parse_instant, to_ms

DECLARED: dict[str, DeclaredType] = {
    "year": "long",
    "price": "double",
    "due": "date",
    "code": "keyword",
    "open": "boolean",
}
FORCED = {"lang": "en"}
"""The filter of a key: what it leaves out must stay out, beside any filter of a request."""

DOCUMENTS: list[dict[str, Any]] = [
    {"document_id": "a", "lang": "en", "title": "One", "creation_time": "2026-01-01T00:00:00.000Z", "metadata": {}},
    {"document_id": "b", "lang": "zh", "tags": ["x", "y"], "evergreen": True, "metadata": {"lang": "en", "n": 2.0}},
    {"document_id": "c", "metadata": {"a": {"b": [1, "1", True]}, "lang": ["de", "en"]}, "salience": -0.0},
    {"document_id": "d", "lang": "de", "declared": {"year": [1999, 2026], "price": 0.0, "open": True, "code": "k"},
     "metadata": {"year": [1999, 2026], "price": 0.0, "open": True, "code": "k"}},
    {"document_id": "e", "declared": {"due": "2025-06-30T12:00:00.000Z"}, "metadata": {"due": "2025-06-30T12:00:00Z"}},
]  # fmt: skip

Clause = Mapping[str, Any]


# --- a second reader of the clauses -----------------------------------------------------------------------------------


def keeps(clause: Clause, document: Mapping[str, Any]) -> bool:
    """Tell whether Elasticsearch would keep the document, reading the clause alone. Raises ValueError for others."""
    [(kind, body)] = clause.items()
    if kind == "match_all":
        return True
    if kind == "match_none":
        return False
    if kind == "bool":
        strange = set(body) - {"filter", "must_not", "should", "minimum_should_match"}
        if strange:
            raise ValueError(f"bool with {strange}")
        return (
            all(keeps(part, document) for part in body.get("filter", ()))
            and not any(keeps(part, document) for part in body.get("must_not", ()))
            and ("should" not in body or any(keeps(part, document) for part in body["should"]))
        )
    if kind == "exists":
        return bool(_indexed(body["field"], document))
    [(name, wanted)] = body.items()
    values = _indexed(name, document)
    if kind == "prefix":
        return bool(values)
    if kind == "term":
        return any(_same(value, wanted) for value in values)
    if kind == "terms":
        return any(_same(value, each) for value in values for each in wanted)
    if kind == "range":
        return any(_inside(value, wanted) for value in values)
    raise ValueError(f"a clause {kind}")


def _indexed(name: str, document: Mapping[str, Any]) -> list[Any]:
    """Return what the index holds under a field's name."""
    if name.startswith("metadata."):
        found: list[Any] = []
        _flatten(document.get("metadata", {}), "metadata", name, found)
        return found
    if name.startswith("declared."):
        value = document.get("declared", {}).get(name.removeprefix("declared."))
    else:
        value = document.get("title" if name == "title.raw" else name)
    return [] if value is None else value if isinstance(value, list) else [value]


def _flatten(value: Any, path: str, wanted: str, found: list[Any]) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _flatten(child, f"{path}.{key}", wanted, found)
    elif isinstance(value, list):
        for child in value:
            _flatten(child, path, wanted, found)
    elif value is not None and path == wanted:
        found.append(value if isinstance(value, str) else json.dumps(value))


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and (type(value) is type(wanted) or _numbers(value, wanted))


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _inside(value: Any, bounds: Mapping[str, Any]) -> bool:
    if bounds.get("format") == "epoch_millis" and isinstance(value, str):
        value = to_ms(parse_instant(value))
    tests = {
        "gt": lambda bound: value > bound,
        "gte": lambda bound: value >= bound,
        "lt": lambda bound: value < bound,
        "lte": lambda bound: value <= bound,
    }
    return all(tests[name](bound) for name, bound in bounds.items() if name != "format")


# --- the properties ---------------------------------------------------------------------------------------------------


def check(value: Any) -> bool:
    """Hold the compiler to its promises for one filter; tell whether it was taken. Raises AssertionError."""
    try:
        clauses = compile_filter(value, declared=DECLARED)
    except InvalidRequest as refused:
        json.dumps(refused.problem(), allow_nan=False).encode("ascii")
        if not refused.field:
            raise AssertionError("the field at fault is not named") from refused
        return False
    text = json.dumps(clauses, ensure_ascii=False, allow_nan=False)
    text.encode()
    assert _leaves(clauses) <= 2 * MAX_CONDITIONS, "more clauses than a query may have"
    forced = compile_filter(FORCED, declared=DECLARED, path="key.filter")
    for document in DOCUMENTS:
        kept = all(keeps(clause, document) for clause in clauses)
        assert kept == matches(document, value, declared=DECLARED), (document["document_id"], text)
        if all(keeps(clause, document) for clause in [*forced, *clauses]):
            assert "en" in (*_indexed("lang", document), *_indexed("metadata.lang", document)), text
    return True


def _leaves(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_leaves, value))
    if isinstance(value, dict) and "bool" in value:
        return sum(_leaves(part) for part in value["bool"].values() if isinstance(part, list))
    return 1


# --- bytes to filters -------------------------------------------------------------------------------------------------

NAMES = (
    "lang", "creation_time", "evergreen", "salience", "tags", "title", "id", "year", "price", "due", "code", "open",
    "metadata", "metadata.lang", "a.b", "n", "metadata.*", "and", "or", "not", "chunks.text", "deleted", "_id", "",
)  # fmt: skip
OPERATORS = ("gt", "gte", "lt", "lte", "in", "ne", "exists", "script", "query")
SCALARS: tuple[Any, ...] = (
    "en", "x", "2026-01-01", "2026-01-01T00:00:00Z", "", "*", "\ud800", "\0", 0, -0.0, 1, 2.0, 1e308, 2**63, 2**20_000,
    float("nan"), float("inf"), 1_767_225_600, True, False, None, "k", 1999,
)  # fmt: skip


class Bytes:
    """Reads choices out of bytes, so that a small change of them is a small change of the filter."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        """Return the next byte; zeros once there are no more."""
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def choose(self, options: Sequence[Any]) -> Any:
        """Return one of the options."""
        return options[self.byte() % len(options)]

    def name(self) -> str:
        """Return a field's name: a known one, or what the bytes spell."""
        if self.byte() % 8:
            return str(self.choose(NAMES))
        return bytes(self.byte() for _ in range(self.byte() % 12)).decode("utf-8", "surrogateescape")

    def scalar(self) -> Any:
        """Return a value: a known one, a number or what the bytes spell."""
        form = self.byte() % 8
        if form == 0:
            return self.name()
        if form == 1:
            return (self.byte() - 128) * 10.0 ** (self.byte() % 40 - 20)
        return self.choose(SCALARS)

    def value(self, depth: int) -> Any:
        """Return what may stand behind a name."""
        form = self.byte() % 8
        if form < 3 or depth > 12:
            return self.scalar()
        if form == 3:
            return [self.scalar() for _ in range(self.byte() % 6)]
        if form < 6:
            return {self.choose(OPERATORS): self.value(depth + 1) for _ in range(self.byte() % 4)}
        return (
            self.filter(depth + 1) if form == 6 else [self.filter(depth + 1) for _ in range(self.byte() % 4)]
        )

    def filter(self, depth: int = 0) -> dict[str, Any]:
        """Return a filter, or what pretends to be one."""
        made: dict[str, Any] = {}
        for _ in range(1 + self.byte() % 3):
            name = self.name()
            if name in ("and", "or"):
                made[name] = [self.filter(depth + 1) for _ in range(self.byte() % 4)] if depth < 12 else []
            elif name == "not" and depth < 12:
                made[name] = self.filter(depth + 1)
            else:
                made[name] = self.value(depth)
        return made


# --- engines ----------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # a number with more digits than Python prints
        return f"bytes that spell a huge number: {sys.exc_info()[1]}"


class Tally:
    """Counts what was tried until the time is over."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.until = self.started + seconds
        self.tried = 0
        self.taken = 0

    def one(self, data: bytes) -> None:
        """Try the filter that the bytes spell. Raises AssertionError, or what the compiler must not raise."""
        value = Bytes(data).filter()
        self.tried += 1
        if self.tried % 10_000 == 0:
            # libFuzzer ends the process without a word from us.
            print(self, flush=True)
        try:
            self.taken += check(value)
        except BaseException:
            print(f"This filter breaks it: {_shown(value)}", file=sys.stderr, flush=True)
            raise

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started
        return f"{self.tried} filters in {seconds:.0f} s, {self.taken} compiled, the others refused; none broke a promise"


def with_hypothesis(tally: Tally) -> None:
    """Draw bytes until the time is over."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    @settings(max_examples=2_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=256))
    def run(data: bytes) -> None:
        tally.one(data)

    while time.monotonic() < tally.until:
        run()


def with_atheris(tally: Tally, seconds: float) -> None:
    """Let libFuzzer search by coverage of the compiler; it ends the process by itself."""
    import importlib

    import atheris

    import app.filters
    import app.times

    with atheris.instrument_imports(include=["app.filters", "app.times"]):
        importlib.reload(app.times)
        importlib.reload(app.filters)
    globals()["compile_filter"], globals()["matches"] = app.filters.compile_filter, app.filters.matches
    limits = [
        f"-max_total_time={max(1, int(seconds))}",
        "-max_len=256",
        "-verbosity=0",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *limits], tally.one)
    atheris.Fuzz()


def main() -> int:
    """Fuzz for as long as asked; 0 if nothing broke."""
    parser = argparse.ArgumentParser(
        prog="./scripts/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="how long (default 3)")
    parser.add_argument("--engine", choices=("atheris", "hypothesis"), help="atheris where it is installed")
    chosen = parser.parse_args()
    tally = Tally(chosen.minutes * 60)
    engine = chosen.engine
    if engine != "hypothesis":
        try:
            import atheris  # noqa: F401
        except ImportError:
            told = (
                "atheris is not installed here. It has builds for Linux on x86_64: put it into this environment with "
                "`.venv/bin/python -m pip install atheris`."
            )
            if engine == "atheris":
                print(f"error: {told}", file=sys.stderr)
                return 1
            print(f"{told} Hypothesis draws the filters instead, without coverage to guide it.", flush=True)
            engine = "hypothesis"
        else:
            engine = "atheris"
    if engine == "atheris":
        with_atheris(tally, chosen.minutes * 60)
    else:
        with_hypothesis(tally)
        print(tally)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
