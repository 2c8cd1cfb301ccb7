"""The table of figures: what of an evaluation it shows, and that only its own part of the document changes."""

import json
from pathlib import Path
from typing import Any

from scripts import figures


def told(name: str, *, qrels: str = "qrels.tsv", p: float | None = None, **more: Any) -> dict[str, Any]:
    profiles: dict[str, Any] = {
        label: {"ndcg@10": value}
        for label, value in zip(figures.PROFILES, (0.7617, 0.65, 0.6, 1.0), strict=True)
    }
    for label, extra in more.items():
        profiles[label] |= extra
    return {
        "set": name, "qrels": qrels, "queries": 300, "profiles": profiles,
        "comparisons": {"off": {"ndcg@10": {"p": p}}},
    }  # fmt: skip


def test_a_row_shows_each_profile_and_the_chance() -> None:
    rows = figures.table([told("b"), told("a", p=0.0421)]).splitlines()[2:]
    assert rows == [
        "| a | 300 | .600 | 1.000 | .650 | **.762** | .042 |  |",
        "| b | 300 | .600 | 1.000 | .650 | **.762** | – |  |",
    ]


def test_currency_is_shown_whole_and_by_kind() -> None:
    one = told(
        "rfc", qrels="qrels_strict.tsv", p=1e-9,
        off={"currency": 0.4, "kinds": {"same": {"currency": 0.8}, "item": {}}},
        default={"currency": 0.75, "kinds": {"same": {"currency": 0.99}, "item": {}}},
    )  # fmt: skip
    assert figures.table([one]).splitlines()[-1] == (
        "| rfc strict | 300 | .600 | 1.000 | .650 | **.762** | < .001 | .40, **.75**; same .80, **.99** |"
    )


def test_what_is_kept_is_not_asked_again_and_the_rest_of_the_document_stays(tmp_path: Path) -> None:
    sets, kept, document = tmp_path / "sets", tmp_path / "kept", tmp_path / "page.md"
    for folder in (sets / "a", kept):
        folder.mkdir(parents=True)
    (kept / "a.json").write_text(json.dumps(told("a")))
    document.write_text("before\n<!-- figures:start -->\nold\n<!-- figures:end -->\nafter\n")
    # Nobody listens at that address: nothing is asked.
    url = "http://127.0.0.1:9"
    assert figures.main([str(sets), "--kept", str(kept), "--write", str(document), "--url", url]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- figures:start -->\n| set |")
    assert "| a | 300 |" in text
    assert "old" not in text
    assert text.endswith("|\n<!-- figures:end -->\nafter\n")


def test_the_document_has_the_tables_place() -> None:
    text = figures.DOCUMENT.read_text("utf-8")
    assert text.count("<!-- figures:start -->") == text.count("<!-- figures:end -->") == 1
