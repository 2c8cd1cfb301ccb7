"""The table of figures: what of an evaluation it shows, and that only its own part of the document changes."""

import json
from pathlib import Path
from typing import Any

import pytest

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
    made = figures.made_by("a", queries=None)
    (kept / "a.json").write_text(json.dumps({**told("a"), figures.MADE_BY: made}))
    document.write_text("before\n<!-- figures:start -->\nold\n<!-- figures:end -->\nafter\n")
    # Nobody listens at that address: nothing is asked.
    url = "http://127.0.0.1:9"
    assert figures.main([str(sets), "--kept", str(kept), "--write", str(document), "--url", url]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- figures:start -->\n| set |")
    assert "| a | 300 |" in text
    assert "old" not in text
    assert text.endswith("|\n<!-- figures:end -->\nafter\n")


@pytest.mark.parametrize(
    "made, options, differs",
    [
        ({}, ["--queries", "300"], "`queries` None, now 300"),
        ({"release": "0.0.9"}, [], "`release` '0.0.9', now"),
        ({"code": "0"}, [], "`code` '0', now"),
        ({"as_of": "2020-01-01"}, [], "`as_of` '2020-01-01', now None"),
        (None, [], "`queries` None, now 5"),
    ],
    ids=str,
)
def test_what_was_kept_by_other_options_or_code_is_refused(
    made: dict[str, Any] | None,
    options: list[str],
    differs: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets, kept, document = tmp_path / "sets", tmp_path / "kept", tmp_path / "page.md"
    for folder in (sets, kept):
        folder.mkdir()
    document.write_text("as it was")
    by = {} if made is None else {figures.MADE_BY: {**figures.made_by("a", queries=None), **made}}
    (kept / "a.json").write_text(json.dumps({**told("a"), **by}))
    given = [str(sets), "--kept", str(kept), "--write", str(document), "--url", "http://127.0.0.1:9"]
    with pytest.raises(SystemExit):
        figures.main([*given, *(["--queries", "5"] if made is None else options)])
    said = capsys.readouterr().err
    assert differs in said
    assert "Delete it, or keep these figures in another folder with --kept" in said
    assert document.read_text() == "as it was"


def test_the_document_has_the_tables_place() -> None:
    text = figures.DOCUMENT.read_text("utf-8")
    assert text.count("<!-- figures:start -->") == text.count("<!-- figures:end -->") == 1
