"""Own the table of figures in docs/relevance.md: `python -m scripts.figures SETS`, against a running service.

Asks each judged set in a folder under the default, with recency off, and by either route alone; what `halflife
evaluate --json` prints of a set is kept in a folder, so that a run that was stopped goes on where it was. What was kept
by other options or other code is refused: one table holds one state of the service. Computes no figure itself.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from scripts import evaluating, judged, readme
from scripts.client import Client, find_url

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENT: Final = ROOT / "docs" / "relevance.md"
PART: Final = "figures"
STRICT: Final = "qrels_strict.tsv"
SEED: Final = 7
MADE_BY: Final = "made_by"
"""Where a kept file tells what its figures were made by."""
PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "off": {"decay": "off"},
    "text": {"routes": [{"kind": "text"}], "decay": "off"},
    "vector": {"routes": [{"kind": "vector"}], "decay": "off"},
}
ASKED: Final[Mapping[str, str]] = {
    "rfc_en": "2024-03-07",
    "rust_blog_en": "2026-08-23",
    "rustsec_en": "2026-08-23",
    "tidb_releases_zh": "2026-08-01",
}
"""When the questions of a set are asked that say nothing of it: the days that the sets suggest. Of others: now."""

Json = Mapping[str, Any]
Report = Callable[[str], None]


def measure(client: Client, folder: Path, *, queries: int | None, report: Report) -> Json | None:
    """Return a set's figures as `halflife evaluate --json` prints them; None for a folder without questions."""
    try:
        strict = Path(STRICT) if (folder / STRICT).is_file() else None
        judged_set = judged.read_set(folder, qrels=strict).sample(queries, seed=SEED)
    except judged.UnreadableSet as fault:
        report(f"{folder.name} is left out: {fault}")
        return None
    name = evaluating.collection_name(judged_set)
    loaded = evaluating.ensure_loaded(client, name, judged_set.corpus, keep=False, report=report)
    if loaded is not None and loaded.lost:
        report(f"{name}: {loaded.told}")
    profiles = [evaluating.Profile(label, options) for label, options in PROFILES.items()]
    found = evaluating.evaluate(
        client, judged_set, profiles, collection=name, as_of=ASKED.get(folder.name), report=report
    )
    return evaluating.to_json(found)


def made_by(name: str, *, queries: int | None) -> Json:
    """Return all that a set's figures depend on but the set itself: options, the release, and a digest of its code."""
    code = hashlib.sha256()
    for path in sorted((ROOT / "app").rglob("*.py")):
        code.update(path.read_bytes())
    return {
        "queries": queries,
        "seed": SEED,
        "as_of": ASKED.get(name),
        "profiles": PROFILES,
        "release": version("halflife"),
        "code": code.hexdigest()[:12],
    }


def mismatch(path: Path, *, queries: int | None) -> str | None:
    """Return what keeps a kept file out of this table: what differs, and what to do; None if nothing does."""
    now = made_by(path.stem, queries=queries)
    then = json.loads(path.read_text("utf-8")).get(MADE_BY, {})
    differs = [f"`{key}` {then.get(key)!r}, now {now[key]!r}" for key in now if then.get(key) != now[key]]
    if not differs:
        return None
    return f"{path} was made otherwise: {'; '.join(differs)}. Delete it, or keep these figures in another folder with --kept"


def table(measured: Sequence[Json]) -> str:
    """Return the table in Markdown: one row a set, in the order of their names."""
    rows = [
        "| set | questions | words | vectors | both, recency off | **default** | p | currency: off, **default** |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for told in sorted(measured, key=lambda each: str(each["set"])):
        profiles = told["profiles"]
        ndcg = {label: _short(profiles[label]["ndcg@10"]) for label in PROFILES}
        differs = told.get("comparisons", {}).get("off", {}).get("ndcg@10", {})
        rows.append(
            f"| {told['set']}{' strict' if told['qrels'] == STRICT else ''} | {told['queries']} | {ndcg['text']} "
            f"| {ndcg['vector']} | {ndcg['off']} | **{ndcg['default']}** | {_chance(differs.get('p'))} "
            f"| {_currency(profiles)} |"
        )
    return "\n".join(rows)


def _currency(profiles: Mapping[str, Json]) -> str:
    off, default = profiles["off"], profiles["default"]
    if "currency" not in default:
        return ""
    told = [f"{_short(off['currency'], 2)}, **{_short(default['currency'], 2)}**"]
    for kind, figures in default.get("kinds", {}).items():
        if "currency" in figures:
            before = off["kinds"][kind]["currency"]
            told.append(f"{kind} {_short(before, 2)}, **{_short(figures['currency'], 2)}**")
    return "; ".join(told)


def _short(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def _chance(p: float | None) -> str:
    if p is None:
        return "–"
    return "< .001" if p < 0.001 else _short(p, 3 if p < 0.1 else 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the sets that are not measured yet, and write the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.figures", description=__doc__)
    parser.add_argument("sets", type=Path, help="a folder of judged sets")
    parser.add_argument(
        "--kept", type=Path, default=Path("figures"), help="where each set's figures are kept"
    )
    parser.add_argument("--queries", type=int, help="questions of each set at most, drawn by one seed")
    parser.add_argument("--only", nargs="*", help="names of sets; default: all")
    parser.add_argument("--url", help="the API's address; default: that of the running stack")
    parser.add_argument("--write", type=Path, default=DOCUMENT, help="the document whose table is replaced")
    chosen = parser.parse_args(arguments)
    if not chosen.sets.is_dir():
        parser.error(f"there is no folder {chosen.sets}")

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    chosen.kept.mkdir(parents=True, exist_ok=True)
    for path in sorted(chosen.kept.glob("*.json")):
        if (fault := mismatch(path, queries=chosen.queries)) is not None:
            parser.error(fault)
    with Client(find_url(chosen.url, None)) as client:
        for folder in sorted(path for path in chosen.sets.iterdir() if path.is_dir()):
            kept = chosen.kept / f"{folder.name}.json"
            if kept.is_file() or (chosen.only and folder.name not in chosen.only):
                continue
            made = made_by(folder.name, queries=chosen.queries)
            measured_set = measure(client, folder, queries=chosen.queries, report=report)
            if measured_set is not None:
                told = {**measured_set, MADE_BY: made}
                kept.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
                report(table([told]).splitlines()[-1])
    measured = [json.loads(path.read_text("utf-8")) for path in sorted(chosen.kept.glob("*.json"))]
    written = readme.with_part(chosen.write.read_text("utf-8"), PART, table(measured))
    chosen.write.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
