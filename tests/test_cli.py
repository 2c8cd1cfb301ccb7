"""The command line: its help, its exit codes, what it sends, and how it tells answers and failures."""

import ast
import asyncio
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from app.asking import Search, Why
from app.catalog import absent
from app.errors import ClusterRejected, HalflifeError, InvalidRequest, NotFound, Unauthorized
from app.settings import Settings
from scripts import cli, client, doctor, reindexing, stack, table
from scripts.client import ApiProblem, Client, find_url
from scripts.loading import Failure
from scripts.stack import Process, State
from tests.conftest import ROOT
from tests.fakes import FarEnd, Reply, RerankServer

COMMANDS = (
    "up",
    "down",
    "status",
    "serve",
    "load",
    "collections",
    "synonyms",
    "search",
    "why",
    "evaluate",
    "judgements",
    "kibana",
    "doctor",
    "tour",
    "reindex",
    "export",
    "import",
    "purge",
)


def run(*arguments: str, columns: int = 140) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="halflife", env={"COLUMNS": str(columns)})


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str) -> None:
    told = run(command, "--help")
    assert told.exit_code == 0
    assert command == "tour" or f"halflife {command}" in told.stdout
    assert "\b" not in told.stdout
    assert "\x1b" not in told.stdout


def test_the_first_help_tells_the_exit_codes_and_a_first_walk() -> None:
    told = run("--help").stdout
    assert "3 nothing runs or nobody answers" in told
    assert "halflife up --detach" in told
    for command in COMMANDS:
        assert f"  {command} " in told


def test_help_and_status_load_nothing_heavy() -> None:
    heavy = ["httpx2", "pydantic", "fastapi", "elasticsearch", "openai", "numpy", "uvicorn", "onnxruntime"]
    code = f"import sys, scripts.cli, scripts.stack; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- what is sent ---------------------------------------------------------------------------------------------------

DECAYS = {
    "half-life": ("180d", {"half_life": "180d"}),
    "ISO 8601": ("P14D", {"half_life": "P14D"}),
    "off": ("off", "off"),
    "an object": ('{"rate": 0.01, "floor": 0.3}', {"rate": 0.01, "floor": 0.3}),
}


@pytest.mark.parametrize("text, decay", DECAYS.values(), ids=DECAYS.keys())
def test_a_decay_is_sent_as_requests_have_it(text: str, decay: Any) -> None:
    request = cli.search_request(
        "q", collection="c", top_k=3, decay=text, only='{"lang": "en"}', as_of="2026-01-31"
    )
    assert request == {
        "query": "q",
        "collection": "c",
        "top_k": 3,
        "decay": decay,
        "filter": {"lang": "en"},
        "as_of": "2026-01-31",
    }
    Search.model_validate(request)
    Why.model_validate({**request, "id": "x"})


def test_without_a_decay_none_is_sent() -> None:
    kept = cli.search_request("q", collection="c", body='{"dedup": {}, "top_k": 9}')
    assert kept == {"dedup": {}, "query": "q", "collection": "c", "top_k": 9}
    assert cli.search_request("q", collection="c") == {"query": "q", "collection": "c"}
    assert cli.search_request("q", collection="c", top_k=3, body='{"dedup": {}, "top_k": 9}') == {
        "query": "q",
        "collection": "c",
        "top_k": 3,
        "dedup": {},
    }


WRONG_USE = {
    "a number without a unit": (("search", "q", "--decay", "180"), "no unit"),
    "a decay that is no JSON": (("search", "q", "--decay", "{half_life: 1d}"), "not JSON"),
    "a filter that is no JSON": (("search", "q", "--filter", "lang=en"), "not JSON"),
    "a filter that is a list": (("why", "q", "x", "--filter", "[1]"), "object is needed"),
    "no hits": (("search", "q", "--top-k", "0"), "top-k"),
    "no such command": (("serch",), "serch"),
    "no such option": (("load", "x", "--colection", "c"), "colection"),
    "too many nodes": (("up", "--nodes", "4"), "nodes"),
    "no such port": (("up", "--port", "99999"), "port"),
}


@pytest.mark.parametrize("arguments, told", WRONG_USE.values(), ids=WRONG_USE.keys())
def test_wrong_use_ends_with_2_and_says_why(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output


# ---- what is told ---------------------------------------------------------------------------------------------------

HIT = {
    "id": "leave-2026",
    "score": 0.0325,
    "fused_score": 0.0325,
    "title": "Leave \x1b[31mred",
    "text": "Unused leave\nmoves " + "on " * 200,
    "creation_time": "2026-01-02T00:00:00.000Z",
    "metadata": {},
    "age_days": 29.0,
    "relevance": 0.91,
    "decay": 0.93,
    "evergreen": False,
    "routes": {
        "text": {"rank": 1, "score": 7.31, "decay": 0.92, "decayed_score": 6.73, "contribution": 0.0164},
        "vector": {"rank": None, "score": 0.8812, "decay": 0.99, "decayed_score": 0.87, "contribution": 0.0},
    },
}
ANSWER = {
    "origin": "2026-01-31T00:00:00.000Z",
    "took_ms": 14,
    "degraded": True,
    "warnings": ["the scale is long against these ages"],
    "cursor": None,
    "routes": {
        "text": {"status": "ok", "took_ms": 5, "total": {"value": 31, "relation": "eq"}},
        "vector": {"status": "failed", "took_ms": None, "total": None, "reason": "the embedder is down"},
    },
    "hits": [
        HIT,
        {**HIT, "id": "old", "title": None, "creation_time": None, "age_days": None, "evergreen": True},
    ],
}


def test_a_search_is_told_as_a_table_that_says_what_it_lacks() -> None:
    with FarEnd(lambda _: Reply(body=ANSWER)) as api:
        done = run("search", "leave?", "-c", "handbook", "--decay", "180d", "--url", api.url)
    assert done.exit_code == cli.DEGRADED
    assert [(seen.method, seen.path) for seen in api.requests] == [("POST", "/v1/search")]
    assert api.requests[0].body["decay"] == {"half_life": "180d"}
    for told in (
        "degraded: vector failed: the embedder is down",
        "the scale is long",
        "leave-2026",
        "0.0325",
        "2026-01-02",
        "29 d",
        "1.  7.31 × 0.92",
        "–  0.8812 × 0.99",
        "undated",
        "evergreen",
        "text: 31 match, 5 ms; vector: failed",
    ):
        assert told in done.stdout, done.stdout
    assert "\x1b" not in done.stdout


def test_a_narrow_terminal_shows_the_same_figures() -> None:
    with FarEnd(lambda _: Reply(body=ANSWER)) as api:
        done = run("search", "leave?", "--url", api.url, columns=80)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for told in (
        "leave-2026",
        "2026-01-02, 29 d, factor 0.93",
        "7.31 × 0.92",
        "0.8812 × 0.99",
        "undated, –, evergreen",
    ):
        assert told in done.stdout, done.stdout


def test_a_search_as_json_is_the_apis_answer() -> None:
    with FarEnd(lambda _: Reply(body={**ANSWER, "degraded": False})) as api:
        done = run("search", "休假", "--json", "--url", api.url)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {**ANSWER, "degraded": False}
    assert api.requests[0].body["query"] == "休假"


REASON = "newest first among hits that say the same thing"
GROUPED = "one of 2 that say the same thing (names alike), newest first"
BY_TIME = {
    **ANSWER,
    "degraded": False,
    "warnings": [],
    "recency": {"mode": "equals", "reason": REASON},
    "profile": {"name": "recent", "experiment": "decay-1", "arm": "b"},
    "hits": [
        {
            **HIT,
            "supersedes": ["old", "older"],
            "recency": f"auto → equals, {REASON}; {GROUPED}: from 2 to 1",
        },
        {
            **HIT,
            "id": "old",
            "superseded_by": "leave-2026",
            "recency": f"auto → equals, {REASON}; {GROUPED}: from 1 to 2",
        },
        {**HIT, "id": "other", "recency": f"auto → equals, {REASON}"},
    ],
}


def test_what_was_decided_about_time_is_told_above_the_table_and_at_each_hit() -> None:
    with FarEnd(lambda _: Reply(body=BY_TIME)) as api:
        done = run("search", "q", "--profile", "recent", "--url", api.url, columns=300)
    assert done.exit_code == 0, done.output
    assert api.requests[0].body["profile"] == "recent"
    for told in (
        f"time: equals, {REASON}; 1 newest of their kind; 1 superseded\n",
        f"↑ supersedes old, older (not shown): {GROUPED}: from 2 to 1",
        f"↓ superseded by leave-2026: {GROUPED}: from 1 to 2",
        "profile 'recent' (b of experiment decay-1)",
    ):
        assert told in done.stdout, done.stdout
    assert done.stdout.count("auto →") == 0
    assert "◷" not in done.stdout


def test_a_factor_by_a_time_that_the_query_names_is_told_at_the_hit() -> None:
    decision = {"mode": "around", "reason": "the query names 'March 2020'"}
    hit = {**HIT, "recency": "auto → around, the query names 'March 2020': factor 0.95"}
    with FarEnd(lambda _: Reply(body={**ANSWER, "recency": decision, "hits": [hit]})) as api:
        done = run("search", "q in March 2020", "--url", api.url)
    assert "time: around, the query names 'March 2020'\n" in done.stdout
    assert "◷ factor 0.95" in done.stdout


def test_no_hits_are_said_to_be_none() -> None:
    with FarEnd(lambda _: Reply(body={**ANSWER, "hits": [], "degraded": False})) as api:
        done = run("search", "q", "--url", api.url)
    assert done.exit_code == 0
    assert "No hit." in done.stdout


def test_the_clusters_own_account_is_asked_for_and_printed() -> None:
    account = {
        "value": 7.5,
        "description": "sum of:",
        "details": [{"value": 2.25, "description": "weight(text:leave in 3)", "details": []}],
    }
    hits = json.loads(json.dumps(ANSWER))["hits"]
    name = next(iter(hits[0]["routes"]))
    hits[0]["routes"][name]["explanation"] = account
    with FarEnd(lambda _: Reply(body={**ANSWER, "degraded": False, "hits": hits})) as api:
        done = run("search", "q", "--explain-cluster", "--url", api.url)
        assert api.requests[0].body["explain"] == "cluster"
    assert done.exit_code == 0, done.output
    assert f"# 1 {hits[0]['id']}, route {name}\n7.5  sum of:\n  2.25  weight(text:leave in 3)" in done.output


async def test_the_doctor_asks_the_reranker_and_the_rewriter_where_there_are_any() -> None:
    assert await doctor.check_helpers(Settings(rerank_url="", rewrite_url="")) == []
    with RerankServer() as reranker:
        settings = Settings(
            rerank_url=f"{reranker.url}/rerank", rewrite_url="http://127.0.0.1:9/v1", rewrite_model="chat"
        )
        ranked, rewriting = await doctor.check_helpers(settings)
        assert len(reranker.requests) == 1
    assert (ranked.name, ranked.verdict) == ("reranker", "ok")
    assert (rewriting.name, rewriting.verdict) == ("rewriter", "failed")
    assert "HALFLIFE_REWRITE_URL" in (rewriting.remedy or "")
    [nameless] = await doctor.check_helpers(Settings(rewrite_url="http://127.0.0.1:9/v1"))
    assert "HALFLIFE_REWRITE_MODEL" in nameless.detail


def test_explain_prints_the_requests_for_kibana() -> None:
    request = {
        "route": "text",
        "method": "GET",
        "path": "/halflife-c/_search",
        "body": {"query": {"match_all": {}}},
    }
    with FarEnd(lambda _: Reply(body={**ANSWER, "explain": {"requests": [request]}})) as api:
        done = run("search", "q", "--explain", "--url", api.url)
    assert api.requests[0].body["explain"] is True
    assert 'GET /halflife-c/_search\n{"query": {"match_all": {}}}' in done.stdout


WHY = {
    "id": "old",
    "origin": "2026-01-31T00:00:00.000Z",
    "exists": True,
    "excluded_by": [],
    "title": "Leave",
    "creation_time": "2021-01-04T00:00:00.000Z",
    "age_days": 1853.0,
    "evergreen": False,
    "relevance": 0.9,
    "decay": 0.51,
    "routes": {
        "text": {
            "matches": True,
            "rank": 12,
            "rank_relation": "gte",
            "in_window": False,
            "score": 9.0,
            "decay": 0.51,
            "decayed_score": 4.59,
            "contribution": 0.0,
            "rank_if_current": 2,
            "note": None,
        },
        "vector": {
            "matches": False,
            "rank": None,
            "rank_relation": "eq",
            "in_window": False,
            "score": None,
            "decay": None,
            "decayed_score": None,
            "contribution": 0.0,
            "rank_if_current": None,
            "note": "has no vector",
        },
    },
    "fused_rank": None,
    "fused_score": 0.01,
    "top_k": 10,
    "page_score": 0.02,
    "on_page": False,
    "what_it_takes": ["rank 5 in route text"],
    "warnings": [],
}


def test_why_tells_the_account_of_one_document() -> None:
    with FarEnd(lambda _: Reply(body=WHY)) as api:
        done = run("why", "leave?", "old", "-c", "handbook", "--url", api.url)
    assert done.exit_code == 0
    assert api.requests[0].path == "/v1/why"
    assert api.requests[0].body["id"] == "old"
    for told in (
        "'Leave' is in no route's window",
        "≥ 12 (outside)",
        "no match",
        "has no vector",
        "→ rank 5",
        "5.1 y",
    ):
        assert told in done.stdout, done.stdout


def test_why_ends_with_1_for_a_document_that_is_not_there() -> None:
    gone = {**WHY, "exists": False, "title": None, "routes": {}, "what_it_takes": []}
    with FarEnd(lambda _: Reply(body=gone)) as api:
        told = run("why", "leave?", "nosuch.md", "--profile", "recent", "--url", api.url)
        as_json = run("why", "leave?", "nosuch.md", "--json", "--url", api.url)
    assert (told.exit_code, as_json.exit_code) == (cli.FAILED, cli.FAILED)
    assert "There is no document" in told.stdout
    assert json.loads(as_json.stdout)["exists"] is False
    assert api.requests[0].body["profile"] == "recent"


def test_a_comparison_shows_what_moved_and_what_fell() -> None:
    def hit(name: str) -> dict[str, Any]:
        return {**HIT, "id": name, "title": name}

    before = [hit("old"), hit("same"), hit("new")]
    after = [hit("new"), hit("same"), hit("old")]
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - recorded, not written
    console.print(table.comparison(before, after, shown=2, routes=["text", "vector"]))
    console.file.close()
    rows = [line.split() for line in console.export_text().splitlines() if "7.31" in line]
    assert [row[:3] for row in rows] == [["3", "▲", "1"], ["2", "2", "same"], ["1", "▼", "3"]]


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_problem_of_the_api_is_told_with_its_remedy() -> None:
    problem = {
        "type": "urn:halflife:problem:invalid-request",
        "title": "The request is not valid",
        "status": 422,
        "detail": "a rate is a number per day",
        "field": "decay.rate",
        "remedy": "write 0.02/h",
        "errors": [{"field": "decay.rate", "detail": "a"}, {"field": "top_k", "detail": "too many"}],
    }
    with FarEnd(lambda _: Reply(422, problem)) as api:
        done = run("search", "q", "--url", api.url)
    assert done.exit_code == cli.FAILED
    assert done.stderr == (
        "error: The request is not valid: a rate is a number per day (--decay, field `decay.rate`)\n"
        "  also top_k: too many\nremedy: write 0.02/h\n"
    )


IN_COMMANDS = {
    "no collection": (
        NotFound("there is no collection `nope`", remedy="create it with PUT /v1/collections/nope"),
        "`halflife load PATH… -c nope` or `halflife collections create nope`",
    ),
    "no key": (
        Unauthorized(
            "no bearer key came with the request",
            remedy="send a key as `Authorization: Bearer …`; who runs the service makes one with `halflife keys create`",
        ),
        "give a key as HALFLIFE_KEY or --key; who runs the service makes one with `halflife keys create`",
    ),
    "no words": (
        InvalidRequest(
            "`query` is blank: write words, or list documents with GET /v1/collections/{collection}/documents",
            field="query",
        ),
        "`query` is blank: write words\n",
    ),
}


def test_an_error_of_a_command_that_works_on_the_cluster_is_told_in_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        raise NotFound("there is no collection `nope`", remedy="create it with PUT /v1/collections/nope")

    assert cli.guarded(work) == cli.FAILED
    assert "remedy: make it with `halflife load PATH… -c nope`" in capsys.readouterr().err


@pytest.mark.parametrize("error, remedy", IN_COMMANDS.values(), ids=IN_COMMANDS.keys())
def test_a_remedy_by_http_is_told_in_commands(error: HalflifeError, remedy: str) -> None:
    with FarEnd(lambda _: Reply(error.status, error.problem())) as api:
        done = run("search", "q", "-c", "nope", "--url", api.url)
    assert done.exit_code == cli.FAILED
    assert remedy in done.stderr
    assert "/v1/" not in done.stderr
    assert "Authorization" not in done.stderr


def test_the_remedies_that_are_told_in_commands_are_the_services_own() -> None:
    told = "".join(path.read_text("utf-8") for path in sorted((ROOT / "app").glob("*.py")))
    assert "list documents with GET /v1/" in told
    assert "create it with PUT /v1/collections/{name}" in told
    assert "send a key as `Authorization: Bearer …`" in told


def test_nobody_there_ends_with_3_and_the_remedy() -> None:
    with FarEnd() as gone:
        url = gone.url
    done = run("search", "q", "--url", url)
    assert done.exit_code == cli.UNREACHABLE
    assert "does not answer" in done.stderr
    assert "remedy: start it with `halflife up`" in done.stderr


def test_an_answer_that_is_not_ours_is_told_as_such() -> None:
    with FarEnd(lambda _: Reply(body=b"<html>")) as api:
        assert "not Halflife's" in run("search", "q", "--url", api.url).stderr
        assert "not Halflife's" in run("collections", "list", "--url", api.url).stderr
        api.answer = lambda _: Reply(502, b"<html>")
        assert "HTTP 502" in run("search", "q", "--url", api.url).stderr
        # As Elasticsearch itself answers.
        api.answer = lambda _: Reply(400, {"error": "no handler found for uri", "status": 400})
        for command in (("search", "q"), ("collections", "show", "c"), ("collections", "list")):
            told = run(*command, "--url", api.url)
            assert told.exit_code == cli.FAILED
            assert f"error: HTTP 400 from {api.url}, and the answer is not Halflife's\n" in told.stderr
            assert "remedy: check that --url" in told.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("collections", "show"),
        ("collections", "delete", "--yes"),
        ("synonyms", "show"),
        ("synonyms", "delete"),
    ],
)
def test_a_missing_collection_is_looked_up_and_not_made(command: tuple[str, ...]) -> None:
    problem = {
        "type": "urn:halflife:problem:not-found", "title": "Not found", "detail": "there is no collection `nope`",
        "remedy": "create it with PUT /v1/collections/nope",
    }  # fmt: skip
    with FarEnd(lambda _: Reply(404, problem)) as api:
        told = run(*command, "nope", "--url", api.url)
    assert told.exit_code == cli.FAILED
    assert "remedy: `halflife collections list` lists those that there are\n" in told.stderr
    assert "make it" not in told.stderr


def test_a_file_that_is_not_there_comes_with_a_remedy(tmp_path: Path) -> None:
    told = run("synonyms", "set", "docs", str(tmp_path / "nofile"), "--url", "http://127.0.0.1:9")
    assert told.exit_code == cli.FAILED
    assert f"error: {tmp_path}/nofile: No such file or directory\nremedy: check the path" in told.stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://[::1", "http://x:port"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    done = run("search", "q", "--url", url)
    assert done.exit_code in {cli.FAILED, cli.UNREACHABLE}
    assert "error: " in done.stderr
    assert "Traceback" not in done.output


def test_settings_that_do_not_fit_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFLIFE_PORT", "many")
    monkeypatch.setenv("HALFLIFE_CHUNK_TOKENS", "1")
    done = run("serve", "--port", "0")
    assert done.exit_code == cli.FAILED
    assert "HALFLIFE_PORT" in done.stderr
    assert "HALFLIFE_CHUNK_TOKENS" in done.stderr
    assert "Traceback" not in done.output


def test_loading_tells_each_failure_and_ends_with_1(tmp_path: Path) -> None:
    def answer(seen: Any) -> Reply:
        if seen.path == "/livez":
            return Reply(body={"status": "alive"})
        refused = {
            "type": "invalid-request",
            "detail": "`text` and `title` are blank",
            "remedy": "leave it out",
        }
        items = [
            {"id": document["id"], "status": "invalid", "error": refused}
            if document["id"] == "blank"
            else {"id": document["id"], "status": "created", "chunks": 2}
            for document in seen.body["documents"]
        ]
        return Reply(body={"items": items, "failed": 1})

    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "a", "text": "x"}\noops\n{"id": "blank", "text": " "}\n', encoding="utf-8")
    report = tmp_path / "failures.jsonl"
    with FarEnd(answer) as api:
        done = run("load", str(path), "-c", "c", "--failures", str(report), "--url", api.url)
        as_json = run("load", str(path), "-c", "c", "--json", "--url", api.url)
    assert done.exit_code == as_json.exit_code == cli.FAILED
    assert f"✗ {path}:2: not JSON" in done.stderr
    assert f"✗ {path}:3 (blank): `text` and `title` are blank\n    leave it out" in done.stderr
    assert done.stdout.startswith("1 documents in collection 'c': 1 new, 0 updated, 0 unchanged, 2 failed; ")
    assert [json.loads(line)["id"] for line in report.read_text("utf-8").splitlines()] == [None, "blank"]
    told = json.loads(as_json.stdout)
    assert (told["created"], told["failed"], told["chunks"], len(told["failures"])) == (1, 2, 2, 2)
    assert as_json.stderr == ""


def test_failures_of_one_cause_are_told_a_few_times_and_counted() -> None:
    failures = [
        Failure(f"x.jsonl:{n}", None, f"its own `source` is 's{n}'", "leave it out") for n in range(750)
    ]
    failures.insert(1, Failure("x.jsonl:0", "a", "not JSON"))
    assert cli.told_of(failures) == [
        "✗ x.jsonl:0: its own `source` is 's0'", "✗ x.jsonl:1: its own `source` is 's1'",
        "✗ x.jsonl:2: its own `source` is 's2'",
        "  and 747 more such, to x.jsonl:749; --failures FILE writes them all", "    leave it out",
        "✗ x.jsonl:0 (a): not JSON",
    ]  # fmt: skip


def test_loading_a_folder_tells_file_times_and_what_it_left_out(tmp_path: Path) -> None:
    for name, text in {
        "a.md": "---\ndate: 2024-01-02\n---\nwords", "b.md": "words", "c.md": "words", "empty.md": "", "x.png": "no"
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text, encoding="utf-8")
    sent: list[list[Any]] = []

    def answer(seen: Any) -> Reply:
        if seen.path == "/livez":
            return Reply(body={"status": "alive"})
        sent.append(seen.body["documents"])
        return Reply(
            body={"items": [{"id": each["id"], "status": "created", "chunks": 1} for each in sent[-1]]}
        )

    with FarEnd(answer) as api:
        told = run("load", str(tmp_path), "-c", "c", "--url", api.url)
        undated = run("load", str(tmp_path), "-c", "c", "--undated", "--json", "--url", api.url)
        counted = run("load", str(tmp_path), "-c", "c", "--json", "--url", api.url)
    assert told.exit_code == 0, told.output
    assert "2 documents are dated by their file's time" in told.stderr
    assert "--undated" in told.stderr
    assert f"1 other files in the folders are passed over: {tmp_path}/x.png\n" in told.stderr
    assert f"1 files hold nothing: {tmp_path}/empty.md\n" in told.stderr
    assert ["creation_time" in each for each in sent[0]] == [True, True, True]
    assert ["creation_time" in each for each in sent[1]] == [True, False, False]
    facts = [json.loads(done.stdout) for done in (undated, counted)]
    assert [fact["dated_by_file"] for fact in facts] == [0, 2]
    assert facts[0]["passed_over"] == [f"{tmp_path}/x.png"]
    assert facts[0]["empty_files"] == [f"{tmp_path}/empty.md"]


def test_a_path_that_is_not_there_is_told() -> None:
    done = run("load", "/no/such/place")
    assert (done.exit_code, done.stderr) == (
        cli.FAILED,
        "error: There is no file or folder /no/such/place.\n",
    )


# ---- where the API is -----------------------------------------------------------------------------------------------


def test_the_address_given_wins_over_the_environment_and_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path))
    assert find_url(None, None) == "http://127.0.0.1:8080"
    monkeypatch.setenv(client.URL_VARIABLE, "http://elsewhere:1/")
    assert find_url(None, None) == "http://elsewhere:1"
    assert find_url("here:2", None) == "http://here:2"


def test_a_folder_that_is_named_must_have_a_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFLIFE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HALFLIFE_ELASTICSEARCH_URL", "http://127.0.0.1:9")
    for given in (
        ("export", "shared", str(tmp_path / "x.jsonl")),
        ("import", str(tmp_path / "x.jsonl")),
        ("reindex", "shared", "--status"),
        ("purge", "shared", "--yes"),
        ("judgements", "shared", str(tmp_path)),
        ("collections", "delete", "shared", "--yes"),
        ("search", "x"),
    ):
        done = run(*given, "--data", str(tmp_path / "nope"))
        assert done.exit_code == cli.UNREACHABLE, given
        assert f"No stack runs on {tmp_path / 'nope'}." in done.output
    assert find_url("here:2", tmp_path) == "http://here:2"


def running_stack(folder: Path, **facts: Any) -> None:
    """Write down a stack whose supervisor is this very process."""
    me = Process.of("supervisor", os.getpid(), log=folder)
    assert me is not None
    State(**{"phase": "running", "supervisor": me, "data": str(folder), **facts}).write()


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
@pytest.mark.parametrize("phase", ["starting", "stopping"])
def test_what_is_meant_for_a_stack_without_an_address_reaches_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, named: bool
) -> None:
    running_stack(tmp_path, phase=phase)
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path))
    for name in ("HALFLIFE_URL", "HALFLIFE_ELASTICSEARCH_URL", "HALFLIFE_EMBEDDING_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    told = "still starting" if phase == "starting" else "being ended"
    for given in (("load", __file__), ("purge", "c", "--yes"), ("search", "x"), ("reindex", "c", "--status")):
        done = run(*given, *(("--data", str(tmp_path)) if named else ()))
        assert done.exit_code == cli.UNREACHABLE, done.output
        assert told in done.output
    assert find_url("here:2", tmp_path) == "http://here:2"


@pytest.mark.parametrize("given", [True, False], ids=["named", "found"])
def test_a_stack_whose_parts_run_elsewhere_is_reached_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    for name in ("HALFLIFE_ELASTICSEARCH_URL", "HALFLIFE_EMBEDDING_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path))
    running_stack(
        tmp_path,
        elasticsearch="https://search.example:9200",
        embedder="https://models.example/openai",
        embedding_base_url="https://models.example/openai",
    )
    settings, whose = reindexing.read_settings(tmp_path if given else None)
    assert settings.elasticsearch_url == "https://search.example:9200"
    assert settings.embedding_base_url == "https://models.example/openai"
    assert str(tmp_path) in whose
    assert doctor._settings(tmp_path if given else None)[0] == settings


def test_of_a_named_stack_the_environment_adds_passwords_and_no_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_stack(tmp_path, elasticsearch="https://search.example:9200", embedding_base_url="http://e:1/v1")
    monkeypatch.setenv("HALFLIFE_ELASTICSEARCH_URL", "https://me:secret@search.example:9200/")
    monkeypatch.setenv("HALFLIFE_EMBEDDING_BASE_URL", "http://other:1/v1")
    settings, _ = reindexing.read_settings(tmp_path)
    assert settings.elasticsearch_url == "https://me:secret@search.example:9200/"
    assert settings.embedding_base_url == "http://e:1/v1"


@pytest.mark.parametrize(
    "given",
    [
        ("import", "x.jsonl", "-c"),
        ("export",),
        ("reindex", "--status"),
        ("purge",),
        ("collections", "show"),
        ("search", "x", "-c"),
    ],
    ids=" ".join,
)
def test_a_name_that_no_collection_can_have_is_wrong_usage(given: tuple[str, ...]) -> None:
    more = ("x.jsonl",) if given == ("export",) else ()
    done = run(*given, "BAD/../x", *more)
    assert done.exit_code == cli.USAGE, done.output
    assert "a collection's name is" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("action", ["--finish", "--rollback", "--abort", "--pause", "--status"])
@pytest.mark.parametrize("beside", ["--dry-run", "--rate 5", "--allow-missing 1"])
def test_an_option_that_an_action_would_not_heed_is_wrong_usage(
    action: str, beside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all `--finish --dry-run --yes`, which must not delete."""
    monkeypatch.setattr(reindexing, "read_settings", Mock(side_effect=AssertionError("it goes on")))
    done = run("reindex", "shared", action, *beside.split(), "--yes")
    assert done.exit_code == cli.USAGE, done.output
    told = " ".join(done.output.replace("│", " ").split())
    assert (
        f"Invalid value for {beside.split(maxsplit=1)[0]}: has no meaning beside {action}: leave it out"
        in told
    )
    # Alone it is taken.
    assert isinstance(run("reindex", "shared", action, "--yes").exception, AssertionError)


def test_a_rate_is_not_taken_where_it_would_not_be_kept() -> None:
    done = run("reindex", "shared", "--from-index", "wiki", "--rate", "5", "--dry-run")
    assert done.exit_code == cli.USAGE, done.output
    assert "--from-index" in done.output


def test_what_is_interrupted_before_it_began_is_closed() -> None:
    async def work() -> int:
        return 0

    begun = work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "run", Mock(side_effect=KeyboardInterrupt))
        assert reindexing._run(begun) == cli.INTERRUPTED
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED


def test_nothing_running_is_said_and_ends_with_3(tmp_path: Path) -> None:
    done = run("status", "--data", str(tmp_path), "--json")
    assert done.exit_code == cli.UNREACHABLE
    assert json.loads(done.stdout) == {
        "api": None,
        "elasticsearch": None,
        "embedder": None,
        "nodes": 0,
        "status": "stopped",
        "parts": {},
    }
    assert "halflife up" in run("status", "--data", str(tmp_path)).stdout
    assert run("down", "--data", str(tmp_path)).exit_code == 0


def test_a_collection_that_is_not_there_counts_as_none() -> None:
    with (
        FarEnd(lambda _: Reply(404, {"title": "Not found", "detail": "no"})) as api,
        Client(api.url) as asking,
    ):
        assert asking.count("c") is None
        api.answer = lambda _: Reply(500, {"title": "Internal error"})
        with pytest.raises(ApiProblem):
            asking.count("c")


# ---- the doctor's arithmetic ----------------------------------------------------------------------------------------

SKEWS = {
    "read between the two looks": (1_500, 1_000, 2_000, 0),
    "as old as a node's figure may be": (200, 1_000, 2_000, 0),
    "behind": (-3_000, 1_000, 2_000, -3_000),
    "ahead": (7_000, 1_000, 2_000, 5_000),
}


@pytest.mark.parametrize("clock, before, after, skew", SKEWS.values(), ids=SKEWS.keys())
def test_a_clock_is_off_by_what_it_is_off_at_the_least(
    clock: int, before: int, after: int, skew: int
) -> None:
    assert doctor.skew_ms(clock, before, after) == skew


def test_want_of_rights_is_told_from_other_refusals() -> None:
    assert doctor.forbidden(ClusterRejected("asking: security_exception: action [x] is unauthorized"))
    assert not doctor.forbidden(ClusterRejected("asking: unable to authenticate user (HTTP 401)"))
    assert not doctor.forbidden(ClusterRejected("asking: parsing_exception: unknown key"))


def test_the_doctor_says_what_does_not_answer_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FarEnd() as gone:
        url = gone.url
    monkeypatch.setenv("HALFLIFE_ELASTICSEARCH_URL", url)
    monkeypatch.setenv("HALFLIFE_EMBEDDING_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path))
    monkeypatch.setenv("HALFLIFE_CHUNK_TOKENS", "5000")
    done = run("doctor", "--json")
    assert done.exit_code == cli.FAILED
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["cluster"]["verdict"] == checks["embedder"]["verdict"] == "failed"
    assert checks["cluster"]["remedy"]
    assert checks["embedder"]["remedy"]
    assert checks["chunks"]["verdict"] == "warning"
    assert "HALFLIFE_CHUNK_TOKENS" in checks["chunks"]["remedy"]


DETAILS: dict[str, Any] = {
    "name": "shop", "index": "halflife-shop-1", "dims": 3, "similarity": "cosine", "declared": {"pages": "long"},
    "model": "e5", "profiles": {"news": {"decay": {"half_life": "7d", "floor": None}, "routes": None}}, "default_profile": "news",
    "experiment": {"name": "decay-1", "by": "key", "arms": [{"profile": "news", "percent": 100.0, "name": None}]}, "documents": 2,
    "deleted": 1, "chunks": 5, "size_bytes": 2**20, "shards": 1, "replicas": 0, "refresh_interval": "1s",
    "ages": {"oldest": "2020-01-02T00:00:00.000Z", "newest": "2024-01-02T00:00:00.000Z", "undated": 1, "evergreen": 0},
}  # fmt: skip


def test_collections_are_listed_and_described() -> None:
    with FarEnd(lambda seen: Reply(body=DETAILS if seen.path.endswith("shop") else [DETAILS])) as api:
        listed = run("collections", "list", "--url", api.url)
        shown = run("collections", "show", "shop", "--url", api.url)
    assert listed.stdout == "shop  3 dims, e5; pages: long\n"
    for told in (
        "2 documents in 5 chunks, 1.0 MiB",
        "2020-01-02 to 2024-01-02; 1 undated",
        "1 tombstones",
        'news (default): {"decay": {"half_life": "7d"}}\n',
        "experiment decay-1, dealt by key: 100 % news",
    ):
        assert told in shown.stdout


def test_a_collection_is_changed_by_what_is_named_and_keeps_its_declared_keys() -> None:
    with FarEnd(lambda _: Reply(body=DETAILS)) as api:
        told = run(
            "collections", "update", "shop", "--declare", "price=double", "--refresh-interval", "30s", "--url", api.url
        )  # fmt: skip
        assert run("collections", "update", "shop", "--url", api.url).exit_code == 2
    assert told.exit_code == 0, told.output
    assert [seen.method for seen in api.requests] == ["GET", "PUT"]
    assert api.requests[1].body == {
        "declared": {"pages": "long", "price": "double"},
        "refresh_interval": "30s",
    }


def test_a_collection_is_deleted_only_when_its_name_is_given_again() -> None:
    with FarEnd(lambda seen: Reply(204) if seen.method == "DELETE" else Reply(body=DETAILS)) as api:
        unsure = run("collections", "delete", "shop", "--url", api.url)
        assert unsure.exit_code == 1
        assert "--yes" in unsure.output
        sure = run("collections", "delete", "shop", "--yes", "--url", api.url)
    assert sure.exit_code == 0, sure.output
    assert [(seen.method, seen.path) for seen in api.requests] == [
        ("GET", "/v1/collections/shop"),
        ("GET", "/v1/collections/shop"),
        ("DELETE", "/v1/collections/shop?confirm=shop"),
    ]


def test_a_search_asks_for_spellings_and_rewriting_and_tells_them() -> None:
    answer = {
        "origin": "2026-01-31T00:00:00.000Z", "took_ms": 1, "degraded": False, "warnings": [], "cursor": None,
        "routes": {}, "hits": [],
        "rewrites": [{"source": "model", "kind": "query", "of": "leeve", "texts": ["vacation"], "routes": ["rewrite_text"]}],
        "suggestions": [{"text": "leave", "score": 0.8}],
    }  # fmt: skip
    with FarEnd(lambda _: Reply(body=answer)) as api:
        told = run("search", "leeve", "-c", "shop", "--suggest", "--rewrite", "--url", api.url)
    assert told.exit_code == 0, told.output
    assert "did you mean: leave" in told.stdout
    assert "query: leeve → vacation" in told.stdout
    assert api.requests[0].body["suggest"] is True
    assert api.requests[0].body["rewrite"] == {"keywords": True, "expansion": True, "queries": 2}


SYNONYMS = {
    "collection": "shop",
    "synonyms_set": [{"synonyms": "car, auto"}, {"id": "k", "synonyms": "k8s => kubernetes"}],
}


def test_synonyms_are_printed_as_they_are_set_again(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.txt"
    with FarEnd(lambda _: Reply(body=SYNONYMS)) as api:
        shown = run("synonyms", "show", "shop", "--url", api.url)
        path.write_text(f"# ours\n\n{shown.stdout}", "utf-8")
        told = run("synonyms", "set", "shop", str(path), "--url", api.url)
        path.write_text(json.dumps(SYNONYMS), "utf-8")
        again = run("synonyms", "set", "shop", str(path), "--url", api.url, "--json")
        gone = run("synonyms", "delete", "shop", "--url", api.url)
    assert shown.stdout == "car, auto\nk8s => kubernetes\n"
    assert told.stdout == "'shop' has 2 rules now.\n"
    assert (again.exit_code, gone.exit_code) == (0, 0), again.output
    assert [(seen.method, seen.path) for seen in api.requests] == [
        ("GET", "/v1/collections/shop/synonyms"),
        ("PUT", "/v1/collections/shop/synonyms"),
        ("PUT", "/v1/collections/shop/synonyms"),
        ("DELETE", "/v1/collections/shop/synonyms"),
    ]
    assert api.requests[1].body == {"synonyms_set": ["car, auto", "k8s => kubernetes"]}
    assert api.requests[2].body == {"synonyms_set": SYNONYMS["synonyms_set"]}


def test_a_rule_that_is_refused_is_told_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.txt"
    path.write_text("# ours\n\ncar, auto\nalone\n", "utf-8")
    problem = InvalidRequest(
        "one term alone has no synonym", field="synonyms_set[1].synonyms", remedy="write at least two"
    ).problem()
    with FarEnd(lambda _: Reply(422, problem)) as api:
        told = run("synonyms", "set", "shop", str(path), "--url", api.url)
    assert told.exit_code == 1
    assert told.stderr == f"error: {path}:4: one term alone has no synonym\nremedy: write at least two\n"


@pytest.mark.parametrize("text", ["{nonsense", '{"rules": []}'])
def test_a_file_of_synonyms_that_is_neither_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "synonyms.json"
    path.write_text(text, "utf-8")
    with FarEnd() as api:
        told = run("synonyms", "set", "shop", str(path), "--url", api.url)
    assert told.exit_code == 2
    assert api.requests == []


def test_loading_says_at_once_that_nobody_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("words")
    with FarEnd() as gone:
        url = gone.url
    told = run("load", str(path), "--url", url)
    assert told.exit_code == 3
    assert "halflife up" in told.output
    assert "trying again" not in told.output


@pytest.mark.parametrize("given, said, taken", [
    ((), "tcp://1.2.3.4:80", None),
    ((), " ", None),
    ((), "9123", 9123),
    ((), "0", None),
    (("--port", "9124"), "9123", 9124),
])  # fmt: skip
def test_the_port_of_the_environment_is_read_as_serve_reads_it(
    given: tuple[str, ...], said: str, taken: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def obtain(options: stack.Options, _: Any) -> None:
        asked.append(options)
        raise cli.CommandFailed("seen")

    monkeypatch.setattr(stack, "obtain", obtain)
    monkeypatch.setenv("HALFLIFE_PORT", said)
    done = run("up", "--detach", "--data", str(tmp_path / "stack"), *given)
    assert [options.port for options in asked] == [taken], done.output


@pytest.mark.parametrize("variable, value, told", [
    ("HALFLIFE_MAX_TOP_K", "x", "HALFLIFE_MAX_TOP_K: Input should be a valid integer"),
    ("HALFLIFE_KEYS", "{", "HALFLIFE_KEYS is not JSON"),
    ("HALFLIFE_KEYS_FILE", "/no/such/file", "the file of keys can't be read"),
    ("HALFLIFE_HOST", "0.0.0.0", "no keys are configured"),  # noqa: S104 - refused
    ("HALFLIFE_HOST", "10.1.2.3", "can't listen on 10.1.2.3 "),
    ("HALFLIFE_ELASTICSEARCH_URL", "foo", "HALFLIFE_ELASTICSEARCH_URL: 'foo' is not an address"),
    ("HALFLIFE_EMBEDDING_BASE_URL", "foo", "HALFLIFE_EMBEDDING_BASE_URL: the address must start"),
    ("HALFLIFE_RERANK_URL", "foo", "HALFLIFE_RERANK_URL: the address must start"),
    ("HALFLIFE_REWRITE_URL", "http://127.0.0.1:1", "HALFLIFE_REWRITE_MODEL is not"),
    ("HALFLIFE_ELASTICSEARCH_CA", "/no/such/file", "HALFLIFE_ELASTICSEARCH_CA: there is no file /no/such/file"),
])  # fmt: skip
def test_what_the_api_would_not_start_with_is_told_before_anything_is_started(
    variable: str, value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    done = run("up", "--detach", "--data", str(tmp_path / "stack"))
    assert done.exit_code == 1
    assert told in done.stderr
    assert not (tmp_path / "stack").exists()


def test_the_doctor_without_a_stack_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HALFLIFE_ELASTICSEARCH_URL", "HALFLIFE_EMBEDDING_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path))
    _, whose = doctor._settings(None)
    assert whose.verdict == "warning"
    assert "halflife up" in (whose.remedy or "")
    monkeypatch.setenv("HALFLIFE_ELASTICSEARCH_URL", "http://127.0.0.1:1")
    assert doctor._settings(None)[1].verdict == "ok"


def test_the_doctor_of_a_folder_without_a_stack_looks_at_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_ELASTICSEARCH_URL", "http://127.0.0.1:1")
    [only] = doctor.examine(tmp_path)
    assert (only.name, only.verdict) == ("settings", "failed")
    assert f"No stack runs on {tmp_path}." in only.detail


def test_the_doctor_finds_the_api_as_every_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFLIFE_DATA", str(tmp_path / "nothing"))
    assert doctor._api_url(None) is None
    monkeypatch.setenv("HALFLIFE_URL", "localhost:8090/")
    assert doctor._api_url(None) == "http://localhost:8090"
    running_stack(tmp_path, api="http://127.0.0.1:7", elasticsearch="http://127.0.0.1:8")
    assert doctor._api_url(tmp_path) == "http://127.0.0.1:7"


def remedies() -> list[str]:
    """What the service's errors advise, as its source has it, values written as `x`."""
    found = []
    for path in sorted((ROOT / "app").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                given = [keyword.value for keyword in call.keywords if keyword.arg == "remedy"]
                if isinstance(call.func, ast.Name) and call.func.id == "invalid":
                    given += call.args[1:]
                found += ["".join(parts) for value in given if (parts := _texts(value))]
    return found


def _texts(value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.JoinedStr):
        return [text for part in value.values for text in _texts(part)]
    return ["x"] if isinstance(value, ast.FormattedValue) else []


def test_remedies_that_speak_of_http_are_told_as_commands() -> None:
    told = remedies()
    assert len(told) > 200
    for pattern, _ in client._IN_COMMANDS:
        assert any(pattern.search(remedy) for remedy in told), f"no error says {pattern.pattern} any more"
    for remedy in told:
        shown = client.as_commands(remedy)
        assert "/v1/" not in shown, remedy
        assert "Bearer" not in shown, remedy
    assert "halflife collections create books" in client.as_commands(str(absent("books").remedy))


@pytest.mark.parametrize(
    "named, told",
    [
        pytest.param("scripts/sample", True, id="the folder"),
        pytest.param("scripts/sample/corpus.jsonl", False, id="its documents"),
    ],
)
def test_a_judged_set_that_is_loaded_as_a_folder_is_told(named: str, told: bool) -> None:
    path = Path(__file__).parents[1] / named
    result = run("load", str(path), "-c", "handbook", "--url", "http://127.0.0.1:1")
    assert ("is a judged set" in result.output) is told
    assert (f"name {path / 'corpus.jsonl'}" in result.output) is told
