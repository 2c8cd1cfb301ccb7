"""The known bug cases of this field, each with the tests that hold its right outcome, and those that had no other place."""

import ast
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner, Result

from app.errors import Unavailable
from app.reranking import Reranker
from scripts import cli
from tests.fakes import EmbeddingServer, FarEnd, Reply, Seen
from tests.searching import Asker, ids
from tests.service import serving, settings_for

HERE = Path(__file__).resolve().parent
TEXT, NEAR = {"kind": "text"}, {"kind": "vector"}

COVERED: dict[str, list[str]] = {
    "BC-01": ["test_decay_node::test_decay_math_bc01", "test_decay::test_decay_math_bc01_the_closed_formula"],
    "BC-03": ["test_decay_node::test_decay_math_bc03_decay_multiplies", "test_requests::test_decay_math_bc03_an_unknown_mode_is_refused"],
    "BC-04": [
        "test_requests::test_decay_params_bc04_bad_decay", "test_requests::test_decay_params_bc04_bad_scale",
        "test_requests::test_decay_params_bc04_bad_offset", "test_requests::test_decay_params_bc04_bad_origin",
        "test_decay_node::test_decay_params_bc04_minutes_are_minutes_in_the_cluster",
    ],
    "BC-05": ["test_decay_node::test_decay_date_bc05_undated_documents", "test_requests::test_decay_date_bc05_null_is_absent_and_blank_is_refused"],
    "BC-07": ["test_decay_node::test_decay_date_bc07_the_future"],
    "BC-08": ["test_decay_node::test_decay_pipeline_bc08_bc10_cosines_decay_before_the_cut"],
    "BC-10": [
        "test_decay_node::test_decay_pipeline_bc08_bc10_cosines_decay_before_the_cut",
        "test_decay_node::test_decay_pipeline_bc10_an_undated_document_takes_its_factor",
    ],
    "BC-12": ["test_search_node::test_rrf_bc12_sums_ties_and_weights", "test_requests::test_rrf_bc12_bad_rank_constants_are_refused"],
    "BC-14": ["test_search_node::test_dedup_bc14_equal_texts_once_each_with_its_own_metadata"],
    "BC-16": ["test_bugcases::test_pagination_bc16_limits_are_told_and_a_list_has_no_limit"],
    "BC-17": [
        "test_search_node::test_threshold_bc17_cosine_keeps_x_only",
        "test_search_node::test_threshold_bc17_bc18_the_same_cosine_for_every_measure",
        "test_requests::test_threshold_bc17_a_cut_on_the_fused_score_does_not_exist",
    ],
    "BC-18": [
        "test_search_node::test_mmr_bc18", "test_search_node::test_threshold_bc18_a_weight_of_zero_adds_nothing",
        "test_requests::test_mmr_bc18_lambda_outside_0_to_1_is_refused",
    ],
    "BC-20": ["test_bugcases::test_rerank_bc20", "test_reranking::TestRerank"],
    "BC-21": [
        "test_api::test_embedding_bc21_blank_texts_fail_alone_and_are_never_sent",
        "test_embedding::test_blank_texts_fail_alone_and_are_never_sent",
    ],
    "BC-23": [
        "test_embedding::test_2100_texts_stay_in_order_within_the_batch_limit",
        "test_embedding::test_40_texts_of_8000_tokens_stay_within_the_token_limit",
        "test_embedding::test_a_text_that_is_too_long_is_cut_and_told",
        "test_embedding::test_a_429_is_waited_out_and_only_its_batch_is_sent_again",
        "test_embedding::test_a_final_failure_lists_exactly_what_failed",
    ],
    "BC-24": [
        "test_bugcases::test_embedding_client_bc24_the_providers_bytes_reach_the_index_as_numbers",
        "test_embedding::test_what_is_neither_list_nor_base64_is_refused",
    ],
    "BC-25": ["test_indexing::BC-25", "test_embedding::test_a_bad_vector_fails_alone_with_its_reason"],
    "BC-27": ["test_search_node::test_knn_params_bc27_the_pool_is_as_large_as_the_page", "test_requests::test_knn_params_bc27_top_k_out_of_range_is_refused"],
    "BC-28": ["test_search_node::test_knn_params_bc28_a_hit_of_score_zero_under_a_filter"],
    "BC-29": ["test_times::test_datetime_bc29_ambiguous_numbers_are_refused", "test_decay_node::test_datetime_bc29_a_numeric_origin", "test_indexing::BC-29"],
    "BC-30": ["test_decay_node::test_datetime_bc30_spellings_and_day_bounds", "test_indexing::BC-30"],
    "BC-32": ["test_api::test_http_validation_bc32", "test_reranking::test_a_score_that_is_no_finite_number_is_a_failure"],
    "BC-34": ["test_search_node::test_query_text_bc34_no_text_is_syntax"],
    "BC-35": ["test_search_node::test_query_text_bc35_long_queries_never_fail"],
    "BC-36": ["test_bugcases::test_tokenization_bc36", "test_templates::test_tokenization_finds_words_of_each_script"],
    "BC-38": ["test_api::test_ids_bc38_every_id_round_trips_and_deletes_itself"],
    "BC-39": ["test_api::test_ids_bc39_a_long_id_fails_alone", "test_indexing::BC-39"],
    "BC-41": ["test_indexing::BC-41", "test_templates::test_metadata_mapping_has_limits_that_hit_one_document_alone"],
    "BC-42": ["test_indexing::BC-42", "test_templates::test_metadata_mapping_takes_any_order_of_any_types_and_never_grows"],
    "BC-44": ["test_bugcases::test_metadata_filter_bc44", "test_indexing::test_a_filter_deletes_exactly_what_it_matches"],
    "BC-45": ["test_api::test_bulk_bc45_bad_items_are_told_and_the_others_stored", "test_indexing::BC-45"],
    "BC-47": [
        "test_indexing::BC-47", "test_bugcases::test_refresh_bc47_over_http",
        "test_loading::test_batches_are_bounded_by_count_and_bytes_and_the_last_one_refreshes",
    ],
    "BC-49": [
        "test_bugcases::test_reindex_bc49_all_thirty_are_found_whatever_was_done_to_them",
        "test_reindex::test_knn_still_finds_all_thirty", "test_reindex::test_lost_vectors_forbid_the_swap",
    ],
    "BC-51": [
        "test_catalog::test_startup_of_many_services_on_an_empty_cluster_makes_one_index",
        "test_catalog::test_startup_twenty_creators_at_once",
        "test_catalog::test_startup_first_upsert_without_templates_still_makes_the_proper_index",
        "test_catalog::test_startup_search_right_after_creation_finds_nothing_and_fails_not",
    ],
    "BC-53": [
        "test_bugcases::test_reindex_bc53_each_case_ends_with_a_code_and_leaves_the_old_index_live",
        "test_reindex::test_documents_that_do_not_fit_are_named_and_nothing_is_swapped",
        "test_reindex::test_a_trial_tells_what_would_not_fit_and_moves_nothing",
        "test_reindex::test_an_index_of_the_new_ones_name_is_left_alone",
        "test_reindex::test_a_killed_reindex_is_resumed_wherever_it_was",
        "test_reindex::test_a_stopped_reindex_goes_on_where_it_was",
        "test_reindex::test_a_second_process_is_refused_and_may_ask_for_a_pause",
    ],
    "BC-54": ["test_search_node::test_memory_decay_bc54_additive", "test_requests::test_memory_decay_bc54_a_loss_outside_0_to_1_is_refused"],
    "BC-55": [
        "test_touch::test_memory_decay_bc55_exactly_what_was_returned_is_touched_and_nothing_else_of_it_changes",
        "test_touch::test_memory_decay_bc55_filters_and_pages_touch_what_they_return",
    ],
    "BC-57": [
        "test_touch::test_memory_decay_bc57_forty_parallel_readers_leave_the_latest",
        "test_touch::test_memory_decay_bc57_a_deleted_document_stays_deleted_under_touches",
    ],
}  # fmt: skip
"""Case -> its tests: `module::function`, `module::Class`, or `module::case` where a docstring names the case."""


def test_every_case_has_a_test_that_is_there() -> None:
    known: dict[str, tuple[set[str], str]] = {}
    for path in HERE.glob("test_*.py"):
        functions, names = [], set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
        told = " ".join(ast.get_docstring(each) or "" for each in functions if each.name.startswith("test_"))
        known[path.stem] = (names, told)
    for case, tests in COVERED.items():
        assert tests, case
        for test in tests:
            module, _, name = test.partition("::")
            defined, told = known[module]
            assert name in told if name.startswith("BC-") else name in defined, f"{case}: there is no {test}"


@pytest.mark.shared
def test_every_known_case_is_in_the_table() -> None:
    listed = HERE.parent.parent / "shared" / "bugcases.json"
    if not listed.exists():
        pytest.skip("the list of bug cases is not here")
    assert {case["id"] for case in json.loads(listed.read_text(encoding="utf-8"))} == set(COVERED)


# --- cases that had no test of their own ---------------------------------------------------------------------------------


@pytest.fixture
def service(node_url: str) -> Iterator[httpx2.Client]:
    with (
        EmbeddingServer(dims=4) as server,
        serving(settings_for(node_url, server.base_url, dims=4)) as running,
    ):
        yield running.client


@pytest.mark.node
@pytest.mark.slow
def test_pagination_bc16_limits_are_told_and_a_list_has_no_limit(service: httpx2.Client) -> None:
    name = f"pages_{uuid.uuid4().hex[:10]}"
    documents = f"/v1/collections/{name}/documents"
    try:
        for start in (0, 6_000):
            items = [
                {"id": f"{at:05d}", "text": "word", "embedding": None} for at in range(start, start + 6_000)
            ]
            answer = service.post(documents, json={"documents": items, "refresh": "true"})
            assert answer.json()["failed"] == 0
        request = {"collection": name, "query": "word", "routes": [TEXT]}
        refusals: list[tuple[dict[str, Any], str, str]] = [
            ({"top_k": 10_001}, "top_k", "10000"), ({"fusion": {"window": 10_001}}, "fusion.window", "10000"),
            ({"top_k": 0}, "top_k", "1"), ({"top_k": -1}, "top_k", "1"), ({"from": 9_991}, "from", "no such field"),
        ]  # fmt: skip
        for wrong, field, told in refusals:
            refused = service.post("/v1/search", json={**request, **wrong})
            assert (refused.status_code, refused.json()["field"]) == (422, field)
            assert told in refused.json()["detail"]
        # The last page of the deepest window: 200, and no cursor leads out of it.
        deepest = {**request, "top_k": 5_000, "fusion": {"window": 10_000}, "fields": ["tags"]}
        first = service.post("/v1/search", json=deepest).json()
        last = service.post("/v1/search", json={"cursor": first["cursor"]}).json()
        assert [hit["id"] for hit in [*first["hits"], *last["hits"]]] == [f"{at:05d}" for at in range(10_000)]
        assert last["cursor"] is None
        assert any("window of 10000" in warning for warning in last["warnings"])
        listed: list[str] = []
        cursor: str | None = None
        while True:
            page = service.get(
                documents, params={"size": 1000, **({"cursor": cursor} if cursor else {})}
            ).json()
            listed += [document["id"] for document in page["documents"]]
            cursor = page["cursor"]
            if cursor is None:
                break
        assert listed == [f"{at:05d}" for at in range(12_000)]
        for size in (0, -1, 1_001):
            assert service.get(documents, params={"size": size}).status_code == 422
    finally:
        service.delete(f"/v1/collections/{name}", params={"confirm": name})


def results(*pairs: tuple[int, float]) -> Reply:
    return Reply(body={"results": [{"index": index, "relevance_score": score} for index, score in pairs]})


@pytest.mark.node
@pytest.mark.parametrize(
    "reply, options, wanted, failed",
    [
        (results((2, 0.9), (0, 0.4)), {}, [("d2", 0.9), ("d0", 0.4), ("d1", None)], False),
        (results((0, 0.119), (1, 0.029), (2, 0.032)), {"top_n": 1}, [("d0", 0.119)], False),
        (results((7, 0.5)), {}, [("d0", None), ("d1", None), ("d2", None)], True),
        (Reply(400), {}, [("d0", None), ("d1", None), ("d2", None)], True),
        (results(), {}, [("d0", None), ("d1", None), ("d2", None)], True),
    ],
    ids=["two of three", "more than asked for", "bad index", "400", "no results"],
)
async def test_rerank_bc20(
    made: Any, reply: Reply, options: dict[str, Any], wanted: list[tuple[str, float | None]], failed: bool
) -> None:
    documents = [{"id": f"d{at}", "text": f"text {at}", "embedding": [1, at / 10, 0]} for at in range(3)]
    with FarEnd(lambda _: reply) as server:
        reranker = Reranker.connect(url=f"{server.url}/v1/rerank", timeout_s=30)
        try:
            asker: Asker = await made(documents, {"q": [1, 0, 0]}, reranker=reranker)
            answer = await asker.ask("q", routes=[NEAR], rerank=options)
            assert [(hit.id, hit.rerank_score) for hit in answer.hits] == wanted
            assert answer.degraded is failed
            assert bool([warning for warning in answer.warnings if "not reranked" in warning]) is failed
            asked = len(server.requests)
            assert asked == 1
            none = await asker.ask("q", routes=[NEAR], rerank=options, filter={"id": "other"})
            assert (none.hits, none.degraded, len(server.requests)) == ([], False, asked), "nothing to rerank"
            if failed:
                with pytest.raises(Unavailable, match="strict"):
                    await asker.ask("q", routes=[NEAR], rerank=options, strict=True)
        finally:
            await reranker.close()


@pytest.mark.node
def test_embedding_client_bc24_the_providers_bytes_reach_the_index_as_numbers(node_url: str) -> None:
    little_endian = "mpkZP83MTD/NzMw9"  # [0.6, 0.8, 0.1]; read as big-endian it is [-6.3e-23, -4.3e8, -4.3e8]

    def embed(seen: Seen) -> Reply:
        data = [{"index": at, "embedding": little_endian} for at in range(len(seen.body["input"]))]
        return Reply(body={"object": "list", "data": data, "model": "far-end"})

    with FarEnd(embed) as server, serving(settings_for(node_url, f"{server.url}/v1", dims=3)) as running:
        name = f"bytes_{uuid.uuid4().hex[:10]}"
        try:
            stored = running.client.post(
                f"/v1/collections/{name}/documents",
                json={"documents": [{"id": "a", "text": "x"}], "refresh": "true"},
            )
            assert stored.json()["items"][0]["status"] == "created", stored.text
            body = {"collection": name, "query": "y", "routes": [NEAR], "include_embedding": True}
            [hit] = running.client.post("/v1/search", json=body).json()["hits"]
            assert hit["embedding"] == pytest.approx([0.6, 0.8, 0.1], abs=1e-6)
            assert hit["relevance"] == pytest.approx(1, abs=1e-3)
            assert hit["routes"]["vector"]["score"] == pytest.approx(1, abs=1e-3)
        finally:
            running.client.delete(f"/v1/collections/{name}", params={"confirm": name})


@pytest.mark.node
async def test_tokenization_bc36(made: Any) -> None:
    asker: Asker = await made(
        [
            {"id": "jd", "text": "京东商城发货"},
            {"id": "tokyo", "text": "东京大学"},
            {"id": "thai", "text": "ปรับการปฏิบัติงานโดยรวม"},
        ],
        {},
    )
    for query, first in (
        ("京东", "jd"),
        ("东京", "tokyo"),
        ("大", "tokyo"),
        ("โดยรวม", "thai"),
        ("ปรับ", "thai"),
    ):
        answer = await asker.ask(query, routes=[TEXT])
        assert ids(answer)[:1] == [first], query
        scores = [hit.routes["text"].score or 0 for hit in answer.hits]
        assert all(scores[0] > other for other in scores[1:]), query


@pytest.mark.node
async def test_metadata_filter_bc44(made: Any) -> None:
    asker: Asker = await made(
        [
            {"id": "a1", "text": "x", "embedding": [1, 0, 0], "metadata": {"author": "Alice Wonderland", "ref": "doc-1"}},
            {"id": "a2", "text": "x", "embedding": [1, 0, 0], "metadata": {"author": "Alice Cooper", "ref": "doc-2"}},
        ],
        {},
    )  # fmt: skip
    for given, wanted in (
        ({"author": "Alice Wonderland"}, ["a1"]),
        ({"author": "alice wonderland"}, []),
        ({"ref": "doc-1"}, ["a1"]),
        ({"author": ["Alice Wonderland", "Bob"]}, ["a1"]),
    ):
        for routes in ([TEXT], [NEAR], [TEXT, NEAR]):
            assert ids(await asker.ask("x", filter=given, routes=routes)) == wanted, given


def refreshed(service: httpx2.Client, name: str, refresh: str, **document: Any) -> httpx2.Response:
    return service.post(
        f"/v1/collections/{name}/documents", json={"documents": [document], "refresh": refresh}
    )


@pytest.mark.node
def test_refresh_bc47_over_http(service: httpx2.Client) -> None:
    name = f"shown_{uuid.uuid4().hex[:10]}"
    documents = f"/v1/collections/{name}/documents"

    def found() -> set[str]:
        body = {"collection": name, "query": "word", "routes": [TEXT, NEAR], "dedup": {}, "explain": True}
        answer = service.post("/v1/search", json=body)
        assert answer.status_code == 200, answer.text
        return {hit["id"] for hit in answer.json()["hits"]}

    try:
        assert refreshed(service, name, "false", id="v", text="word").json()["failed"] == 0
        assert found() <= {"v"}
        assert service.get(f"{documents}/v").status_code == 200
        deadline = time.monotonic() + 60
        while not found() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert refreshed(service, name, "wait_for", id="v2", text="word too").json()["failed"] == 0
        assert found() == {"v", "v2"}
        assert service.delete(f"{documents}/v").status_code == 200
        # It may be listed still; fetching what a search has found must not fail for that.
        assert {"v2"} <= found() <= {"v", "v2"}
        assert service.get(f"{documents}/v").status_code == 404
        gone = service.post(f"{documents}/delete", json={"ids": ["v2"], "refresh": "wait_for"})
        assert gone.json()["deleted"] == 1
        assert found() == set()
        for wrong in ("yes", "True", "", "none"):
            refused = refreshed(service, name, wrong, id="v", text="word")
            assert (refused.status_code, refused.json()["field"]) == (422, "refresh"), wrong
    finally:
        service.delete(f"/v1/collections/{name}", params={"confirm": name})


def command(node_url: str, embedding: FarEnd, *arguments: str) -> Result:
    """Run `halflife` as an operator would, with the settings of the service."""
    environment = {
        "HALFLIFE_ELASTICSEARCH_URL": node_url, "HALFLIFE_ELASTICSEARCH_TIMEOUT_S": "60",
        "HALFLIFE_EMBEDDING_BASE_URL": f"{embedding.url}/v1", "HALFLIFE_EMBEDDING_MODEL": "far-end",
        "HALFLIFE_EMBEDDING_DIMS": "4", "HALFLIFE_EMBEDDING_QUERY_PREFIX": "", "HALFLIFE_EMBEDDING_DOCUMENT_PREFIX": "",
    }  # fmt: skip
    return CliRunner().invoke(cli.app, list(arguments), prog_name="halflife", env=environment)


@pytest.mark.node
def test_reindex_bc49_all_thirty_are_found_whatever_was_done_to_them(node_url: str, tmp_path: Path) -> None:
    name = f"thirty_{uuid.uuid4().hex[:10]}"
    copy = f"{name}_copy"
    with (
        EmbeddingServer(dims=4) as server,
        serving(settings_for(node_url, server.base_url, dims=4)) as running,
    ):
        api = running.client

        def found(collection: str) -> int:
            body = {"collection": collection, "query": "word 1", "routes": [NEAR], "top_k": 30}
            answer = api.post("/v1/search", json=body)
            assert answer.status_code == 200, answer.text
            return len(answer.json()["hits"])

        try:
            items = [{"id": f"n{at}", "text": f"word {at}"} for at in range(30)]
            documents = f"/v1/collections/{name}/documents"
            api.post(documents, json={"documents": items, "refresh": "true"})
            assert found(name) == 30
            read = api.get(f"{documents}/n3").json()
            back = {key: read[key] for key in ("id", "text", "title", "metadata")}
            assert api.post(documents, json={"documents": [back], "refresh": "true"}).json()["failed"] == 0
            changes = {"documents": [{"id": "n4", "tags": ["t"]}], "refresh": "true"}
            assert api.patch(documents, json=changes).json()["failed"] == 0
            assert found(name) == 30
            moved = command(node_url, server, "reindex", name, "--shards", "2", "--yes")
            assert moved.exit_code == 0, moved.output
            assert found(name) == 30
            archive = str(tmp_path / "thirty.jsonl.zst")
            assert command(node_url, server, "export", name, archive).exit_code == 0
            assert command(node_url, server, "import", archive, "--collection", copy).exit_code == 0
            api.post(f"/v1/collections/{copy}/documents/delete", json={"ids": ["none"], "refresh": "true"})
            assert refreshed(api, copy, "true", id="n0", text="word 0").json()["failed"] == 0
            assert found(copy) == 30
        finally:
            for each in (name, copy):
                api.delete(f"/v1/collections/{each}", params={"confirm": each})


@pytest.mark.node
def test_reindex_bc53_each_case_ends_with_a_code_and_leaves_the_old_index_live(node_url: str) -> None:
    name = f"moved_{uuid.uuid4().hex[:10]}"
    with (
        EmbeddingServer(dims=4) as server,
        serving(settings_for(node_url, server.base_url, dims=4)) as running,
    ):
        api = running.client
        try:
            items = [{"id": f"n{at}", "text": f"word {at}", "metadata": {"n": at}} for at in range(20)]
            odd = [{"id": id_, "text": "word", "metadata": {"n": "seven"}} for id_ in ("bad1", "bad2")]
            documents = {"documents": [*items, *odd], "refresh": "true"}
            assert api.post(f"/v1/collections/{name}/documents", json=documents).json()["failed"] == 0
            live = api.get(f"/v1/collections/{name}").json()["index"]

            def reindex(*arguments: str, collection: str = name) -> Result:
                return command(node_url, server, "reindex", collection, *arguments)

            two_short = reindex("--declare", "n=long", "--yes")
            assert two_short.exit_code == 1
            assert "bad1" in two_short.stderr
            assert "bad2" in two_short.stderr
            assert reindex("--abort", "--yes").exit_code == 0
            trial = reindex("--declare", "n=long", "--limit", "10", "--yes")
            assert (trial.exit_code, "Nothing was moved" in trial.stdout) == (4, True)
            assert "bad1" in trial.stderr
            for wrong in (("--limit", "0"), ("--limit", "10", "--finish"), ("--limit", "10", "--dry-run")):
                assert reindex(*wrong, "--yes").exit_code == 2, wrong
            missing = reindex("--yes", collection=f"{name}_none")
            assert (missing.exit_code, "there is no collection" in missing.stderr) == (1, True)
            assert reindex("--from-index", f"{name}_none", "--yes").exit_code == 1
            assert api.get(f"/v1/collections/{name}").json()["index"] == live
            # By leave, and only then, two are left behind.
            assert reindex("--declare", "n=long", "--allow-missing", "2", "--yes").exit_code == 0
            assert api.get(f"/v1/collections/{name}").json()["index"] != live
        finally:
            api.delete(f"/v1/collections/{name}", params={"confirm": name})
