"""Judging rankings: figures against written-out arithmetic, the forms of judged sets, profiles, and a whole run."""

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scripts import cli, evaluating, judged, metrics, quality, tune
from scripts.client import ApiProblem
from scripts.judged import Question, UnreadableSet, read_set
from tests.fakes import EmbeddingServer, openai_error
from tests.service import Running, serving, settings_for

pytest.importorskip("pytrec_eval", reason="judging rankings needs pytrec-eval-terrier")

# ---- figures --------------------------------------------------------------------------------------------------------

GRADED = Question("q", "?", {"a": 2, "b": 1, "c": 0})


def figures(question: Question, *ids: str, top_k: int = 10) -> metrics.Figures:
    return metrics.judge([question], {question.id: ids}, top_k=top_k, depth=100)[question.id]


def test_the_figures_are_those_of_arithmetic() -> None:
    found = figures(GRADED, "x", "b", "c", "a")
    ideal = 2 / math.log2(2) + 1 / math.log2(3)
    assert found == pytest.approx(
        {
            "ndcg@10": (1 / math.log2(3) + 2 / math.log2(5)) / ideal,
            "map": (1 / 2 + 2 / 4) / 2,
            "mrr@10": 1 / 2,
            "recall@10": 1.0,
            "recall@100": 1.0,
        }
    )


def test_what_lies_behind_the_cutoff_counts_for_nothing() -> None:
    found = figures(GRADED, "x", "b", "c", "a", top_k=2)
    assert found["ndcg@2"] == pytest.approx((1 / math.log2(3)) / (2 + 1 / math.log2(3)))
    assert found["recall@2"] == 0.5
    assert figures(GRADED, "x", "y", "a", top_k=2)["mrr@2"] == 0.0
    assert figures(GRADED, "x", "y", "a", top_k=3)["mrr@3"] == pytest.approx(1 / 3)


def test_a_question_without_hits_scores_nothing_and_is_counted() -> None:
    other = Question("r", "?", {"a": 1})
    found = metrics.judge([GRADED, other], {"q": [], "r": ["a"]}, top_k=10, depth=100)
    assert set(found["q"].values()) == {0.0}
    assert metrics.mean(found)["mrr@10"] == 0.5


@pytest.mark.parametrize("ids", [("b", "a"), ("a", "b")])
def test_the_order_is_the_one_given_whatever_the_names(ids: tuple[str, ...]) -> None:
    one = Question("q", "?", {"a": 1})
    assert figures(one, *ids)["mrr@10"] == 1 / (1 + ids.index("a"))


PAIRED = Question("q", "?", {"new": 1}, current=("new", "newer"), superseded=("old", "older"))
TIMES = {
    "the current one is first": (("new", "old"), 1.0, 0.0),
    "any current one before the best superseded one": (("x", "newer", "old", "new"), 1.0, 0.0),
    "the superseded one is first": (("old", "new"), 0.0, 1.0),
    "the superseded one is above, but not first": (("x", "older", "new"), 0.0, 0.0),
    "the superseded one is absent": (("x", "new"), 1.0, 0.0),
    "the current one is absent": (("x", "old"), 0.0, 0.0),
    "neither is there": (("x",), 0.0, 0.0),
}


@pytest.mark.parametrize("ids, currency, stale", TIMES.values(), ids=TIMES.keys())
def test_currency_and_staleness(ids: tuple[str, ...], currency: float, stale: float) -> None:
    found = figures(PAIRED, *ids)
    assert (found["currency"], found["stale@1"]) == (currency, stale)


def test_currency_is_a_mean_over_the_questions_that_have_pairs() -> None:
    found = metrics.judge(
        [PAIRED, Question("r", "?", {"a": 1})], {"q": ["new"], "r": ["a"]}, top_k=10, depth=100
    )
    assert "currency" not in found["r"]
    assert metrics.mean(found)["currency"] == 1.0


def test_a_difference_is_told_with_its_chance() -> None:
    first = {name: {"map": 0.5} for name in "abcd"}
    second = {"a": {"map": 0.6}, "b": {"map": 0.7}, "c": {"map": 0.8}}
    [found] = metrics.compare(first, second, ["map", "currency"])
    assert (found.figure, found.better, found.worse, found.same) == ("map", 3, 0, 0)
    assert found.mean == pytest.approx(0.2)
    # With two degrees of freedom Student's distribution has a closed form: p = 1 - t / sqrt(2 + t^2).
    t = 0.2 / (0.1 / math.sqrt(3))
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_where_nothing_differs_there_is_no_chance_to_tell() -> None:
    [found] = metrics.compare(
        {"a": {"map": 1.0}, "b": {"map": 0.0}}, {"a": {"map": 1.0}, "b": {"map": 0.0}}, ["map"]
    )
    assert (found.mean, found.same, found.p) == (0.0, 2, None)


@pytest.mark.parametrize("gap", [1.0, -0.25])
def test_where_all_questions_differ_by_the_same_their_signs_tell(gap: float) -> None:
    first = {f"q{n}": {"currency": 0.0, "stale@1": 1.0} for n in range(30)}
    second = {name: {"currency": gap, "stale@1": 0.0} for name in first}
    found = metrics.compare(first, second, ["currency", "stale@1"])
    assert [each.p for each in found] == [2**-29, 2**-29]
    [one] = metrics.compare({"a": first["q0"]}, {"a": second["q0"]}, ["currency"])
    assert one.p is None


def test_every_figure_gets_its_star() -> None:
    questions = tuple(
        Question(f"q{n}", f"text {n}", {"new": 1}, current=("new",), superseded=("old",)) for n in range(9)
    )
    found = judged_as(questions, {"first": ["old"], "second": ["new"], "third": ["x"]})
    [row] = [line for line in rendered(quality._figures(found)).splitlines() if line.startswith("second")]
    # nDCG, MAP, MRR, recall at 10 and 100, currency, stale@1: all go from worst to best.
    assert row.count("*") == 7
    [row] = [line for line in rendered(quality._figures(found)).splitlines() if line.startswith("third")]
    assert row.count("*") == 1
    assert row.split()[-1] == "0.000*"


def judged_as(questions: tuple[Question, ...], ranked: Mapping[str, list[str]]) -> evaluating.Evaluation:
    """An evaluation in which each profile ranked all questions alike."""
    results = []
    for name, ids in ranked.items():
        rankings = {question.id: ids for question in questions}
        figures = metrics.judge(questions, rankings, top_k=10, depth=100)
        results.append(evaluating.Judged(evaluating.Profile(name, {}), rankings, figures))
    told = metrics.names(10, 100)
    return evaluating.Evaluation(
        judged.JudgedSet("set", questions, None, Path("qrels.tsv")), "c", 10, None, results,
        {each.profile.name: metrics.compare(results[0].figures, each.figures, told) for each in results[1:]},
    )  # fmt: skip


def rendered(shown: Any) -> str:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as told:
        console.print(shown)
    return told.get()


# ---- sets -----------------------------------------------------------------------------------------------------------


def lines(*entries: Mapping[str, Any]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


def make(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
    return folder


PLAIN = {
    "corpus.jsonl": lines({"id": "a", "text": "x"}, {"id": "b", "title": "y", "created_at": None}),
    "queries.jsonl": lines({"id": "q1", "text": "one"}, {"id": "q2", "text": "two\u2028more"}),
    "qrels.tsv": "q1\ta\t2\nq1\tb\t1\nq2\tb\t1\n",
}
FORMS = {
    "plain": PLAIN,
    "gzipped": {f"{name}.gz" if name.endswith("jsonl") else name: text for name, text in PLAIN.items()},
    "BEIR": {
        "corpus.jsonl": lines(
            {"_id": "a", "title": "", "text": "x", "metadata": {}}, {"_id": "b", "title": "y", "text": ""}
        ),
        "queries.jsonl": lines(
            {"_id": "q1", "text": "one"},
            {"_id": "q2", "text": "two\u2028more"},
            {"_id": "q3", "text": "not judged"},
        ),
        "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\ta\t2\nq1\tb\t1\nq2\tb\t1\n",
    },
    "TREC": {
        "corpus.jsonl": PLAIN["corpus.jsonl"],
        "topics.tsv": "q1\tone\nq2\ttwo\u2028more\n",
        "qrels.txt": "q1 0 a 2\nq1 Q0 b 1\nq2 0 b 1\nq2 0 a -1\n",
    },
}


@pytest.mark.parametrize("files", FORMS.values(), ids=FORMS.keys())
def test_each_form_reads_alike(tmp_path: Path, files: Mapping[str, str]) -> None:
    found = read_set(make(tmp_path / "set", files))
    assert [(question.id, question.text) for question in found.questions] == [
        ("q1", "one"),
        ("q2", "two\u2028more"),
    ]
    assert [
        {name: grade for name, grade in question.grades.items() if grade} for question in found.questions
    ] == [{"a": 2, "b": 1}, {"b": 1}]
    assert found.corpus is not None
    assert found.corpus.ids == {"a", "b"}
    assert (found.name, found.notes) == ("set", ())


def test_a_strict_variant_tells_what_is_superseded(tmp_path: Path) -> None:
    files = {**PLAIN, "qrels_strict.tsv": "q1\ta\t2\nq1\tb\t0\nq2\tb\t2\n"}
    found = read_set(make(tmp_path, files), qrels=Path("qrels_strict.tsv"))
    assert [(question.current, question.superseded) for question in found.questions] == [
        (("a",), ("b",)),
        ((), ()),
    ]
    assert found.questions[0].grades == {"a": 2, "b": 0}


def test_lists_of_the_question_come_before_grades(tmp_path: Path) -> None:
    files = {
        **PLAIN,
        "queries.jsonl": lines(
            {
                "id": "q1",
                "text": "one",
                "current": ["b"],
                "superseded": ["a"],
                "as_of": "2024-01-01",
                "kind": "k",
                "filter": {"lang": "en"},
            }
        ),
        "qrels_strict.tsv": "q1\ta\t2\nq1\tb\t0\n",
    }
    [question] = read_set(make(tmp_path, files)).questions
    assert (question.current, question.superseded) == (("b",), ("a",))
    assert (question.as_of, question.kind, question.filter) == ("2024-01-01", "k", {"lang": "en"})


def test_what_is_odd_is_noted(tmp_path: Path) -> None:
    files = {
        "corpus.jsonl": PLAIN["corpus.jsonl"]
        + lines({"id": "empty", "text": " "}, {"id": "a", "text": "again"}),
        "queries.jsonl": PLAIN["queries.jsonl"] + lines({"id": "q3", "text": "nothing fits"}),
        "qrels.tsv": PLAIN["qrels.tsv"] + "q2\tgone\t1\nq3\ta\t0\nq9\ta\t1\n",
    }
    found = read_set(make(tmp_path, files))
    assert [question.id for question in found.questions] == ["q1", "q2"]
    assert found.notes == (
        "1 judged questions are not in queries.jsonl",
        "1 questions have no relevant document and are left out",
        "1 relevant documents are not in corpus.jsonl",
        "2 lines of corpus.jsonl are empty, repeated or unreadable",
    )


BROKEN: dict[str, tuple[dict[str, str], str]] = {
    "no questions": ({"queries.jsonl": ""}, "No question of"),
    "a question without text": ({"queries.jsonl": lines({"id": "q1"})}, "queries.jsonl:1: a question needs"),
    "a question that is no JSON": ({"queries.jsonl": "{\n"}, "queries.jsonl:1: not JSON"),
    "a question twice": ({"queries.jsonl": lines(*[{"id": "q1", "text": "x"}] * 2)}, "queries.jsonl:2: the question 'q1'"),
    "two columns": ({"qrels.tsv": "q1\ta\n"}, "qrels.tsv:1: 2 columns"),
    "a grade in words": ({"qrels.tsv": "q1\ta\t1\nq1\tb\tgood\n"}, "qrels.tsv:2: the grade 'good'"),
    "no judgement": ({"qrels.tsv": "query\tdocument\tgrade\n"}, "holds no judgement"),
    "other ids": ({"qrels.tsv": "x\ta\t1\n"}, "their ids differ"),
    "nothing relevant": ({"qrels.tsv": "q1\ta\t0\n"}, "has a relevant document"),
    "no document": ({"corpus.jsonl": lines({"id": "a", "text": ""})}, "holds no document"),
}  # fmt: skip


@pytest.mark.parametrize("files, told", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_set_says_where(tmp_path: Path, files: Mapping[str, str], told: str) -> None:
    make(tmp_path, {**PLAIN, **files})
    with pytest.raises(UnreadableSet, match=told):
        read_set(tmp_path)


def test_damaged_questions_are_told(tmp_path: Path) -> None:
    make(tmp_path, {name: text for name, text in PLAIN.items() if name != "queries.jsonl"})
    whole = gzip.compress(PLAIN["queries.jsonl"].encode())
    for damaged in (whole[:-9], whole[:12] + b"\xff\xff\xff" + whole[15:]):
        (tmp_path / "queries.jsonl.gz").write_bytes(damaged)
        with pytest.raises(UnreadableSet, match="can't be read as UTF-8"):
            read_set(tmp_path)


def test_an_empty_folder_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSet, match="holds no questions"):
        read_set(tmp_path)
    with pytest.raises(UnreadableSet, match="There is no file other"):
        read_set(make(tmp_path, PLAIN), qrels=Path("other.tsv"))


def test_a_sample_depends_on_its_seed_alone() -> None:
    questions = tuple(Question(str(number), "?", {"a": 1}) for number in range(50))
    whole = judged.JudgedSet("s", questions, None, Path("qrels.tsv"))
    drawn = [question.id for question in whole.sample(10, seed=7).questions]
    assert drawn == [question.id for question in whole.sample(10, seed=7).questions]
    assert drawn != [question.id for question in whole.sample(10, seed=8).questions]
    assert drawn == sorted(drawn, key=int)
    assert whole.sample(50, seed=7) is whole


@pytest.mark.shared
@pytest.mark.parametrize("name", ["rfc_en", "tidb_releases_zh", "rust_blog_en", "chronoqa_zh", "cacm"])
def test_the_judged_sets_can_be_read(shared_data: Path, name: str) -> None:
    folder = shared_data / name
    stats = json.loads((folder / "stats.json").read_text(encoding="utf-8"))
    found = read_set(folder)
    assert len(found.questions) == stats["judged_queries"]
    assert found.corpus is not None
    assert len(found.corpus.ids) == stats["docs"]
    paired = sum(bool(question.current) for question in found.questions)
    assert paired > 0 if "qrels_strict.tsv" in stats["qrels"] else paired == 0


# ---- profiles -------------------------------------------------------------------------------------------------------


def test_profiles_are_named_read_and_written_inline(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"fusion": {"window": 50}}')
    found = [
        evaluating.read_profile(text)
        for text in (
            "text",
            str(path),
            f"x={path}",
            'y={"decay": {"half_life": "5d"}}',
            '{"decay": "off"}',
            "own",
        )
    ]
    assert [profile.name for profile in found] == ["text", "mine", "x", "y", "decay:off", "own"]
    assert found[5].options == {"profile": "own"}
    assert found[1].options == found[2].options == {"fusion": {"window": 50}}
    assert [profile.depth for profile in found] == [100, 50, 50, 100, 100, 100]


def test_the_common_decay_is_for_profiles_that_name_none() -> None:
    shared = {"half_life": "180d"}
    assert evaluating.read_profile("default", decay=shared).options == {"decay": shared}
    assert evaluating.read_profile("off", decay=shared).options == {"decay": "off"}


WRONG_PROFILES = {
    "a name that can't be one": ("no such", "profile"),
    "no such file": ("x=/no/such.json", "can't be read"),
    "no JSON": ("{x}", "is not JSON"),
    "neither file nor object": ("x=[1]", "can't be read"),
    "a question": ('{"query": "x"}', "holds `query`"),
    "an unknown field": ('{"decai": {}}', "decai"),
    "a wrong value": ('{"decay": {"half_life": "5 parsecs"}}', "decay.half_life"),
}


@pytest.mark.parametrize("given, told", WRONG_PROFILES.values(), ids=WRONG_PROFILES.keys())
def test_a_wrong_profile_says_what_is_wrong(given: str, told: str) -> None:
    with pytest.raises(evaluating.BadProfile, match=told):
        evaluating.read_profile(given)


def test_a_comparison_has_a_row_without_decay_unless_all_are_without() -> None:
    names = [profile.name for profile in quality._profiles(["default"], compare=True, decay=None)]
    assert names == ["default", "text", "vector", "linear", "off"]
    assert "off" not in [
        profile.name for profile in quality._profiles(["default"], compare=True, decay="off")
    ]


def test_a_route_alone_is_compared_without_decay_whatever_the_others_have() -> None:
    for decay in (None, "auto", {"half_life": "180d"}):
        found = quality._profiles(["default"], compare=True, decay=decay)
        alone = {profile.name: profile.options.get("decay") for profile in found}
        assert (alone["text"], alone["vector"]) == ("off", "off")


PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "as fused": ({"rank": 3, "fused_rank": 3}, "stands at rank 3; first is x"),
    "moved since": ({"rank": 14, "fused_rank": 3}, "stands at rank 14, fused at rank 3; first is x"),
    "left out since": (
        {"rank": None, "fused_rank": 3},
        "was fused at rank 3 and left out after that; first is x",
    ),
    "nowhere": ({"rank": None, "fused_rank": None}, "is in no route's window; first is x"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_failure_tells_the_place_in_the_answer(name: str) -> None:
    account, told = PLACES[name]
    question = Question("q1", "how?", {"a": 1}, None)
    failure = evaluating.Failure(question, 0.3, "a", "x", account)
    lines = [str(part) for part in quality._account(failure, 10)]
    assert any(line.endswith(f"(a) {told}") for line in lines), lines


def test_names_of_profiles_differ() -> None:
    same = [evaluating.read_profile("text")] * 3
    assert [profile.name for profile in evaluating.distinct(same)] == ["text", "text 2", "text 3"]


LACKING = {
    "none of the best is shown": (("b",), "a"),
    "the best is not first": (("b", "a"), "a"),
    "a lesser one is absent": (("a", "x"), "b"),
    "all is well": (("a", "b"), None),
    "nothing was found": ((), "a"),
}


@pytest.mark.parametrize("page, missing", LACKING.values(), ids=LACKING.keys())
def test_what_a_page_lacks(page: tuple[str, ...], missing: str | None) -> None:
    assert evaluating.lacking(GRADED, page) == missing


class Refusing:
    """Stores what it is sent but for two ids; a client, and the API behind it."""

    def __init__(self) -> None:
        self.stored = set[str]()

    def count(self, collection: str) -> int | None:
        return len(self.stored) or None

    def upsert(self, collection: str, documents: Any, *, refresh: str = "false") -> Any:
        items = []
        for document in documents:
            name = document["id"]
            refused = name in ("no", "nor") or not document["text"].strip()
            error = {
                "type": "invalid",
                "detail": "holds what is refused" if document["text"].strip() else "is empty",
            }
            status = "failed" if refused else "updated" if name in self.stored else "created"
            self.stored |= set() if refused else {name}
            items.append({"id": name, "status": status, "chunks": 1, **({"error": error} if refused else {})})
        return {"items": items}


def test_documents_that_are_refused_are_counted_apart_from_odd_lines(tmp_path: Path) -> None:
    corpus = lines(
        {"id": "a", "text": "x"}, {"id": "no", "text": "x"}, {"id": "a", "text": "y"}, {"id": "nor", "text": "x"},
        {"id": "b", "text": "x"}, {"id": "b", "text": "y"}, {"id": "b", "text": "z"}, {"id": "void", "text": " "},
        {"id": "a", "text": ""},
    )  # fmt: skip
    folder = make(tmp_path / "set", {**PLAIN, "corpus.jsonl": corpus + "{broken\n"})
    known = read_set(folder).corpus
    assert known is not None
    assert (len(known.unusable), known.repeated, set(known.ids)) == (3, 3, {"a", "b", "no", "nor"})
    refusing: Any = Refusing()
    loaded = evaluating.ensure_loaded(refusing, "c", known, keep=False)
    assert loaded is not None
    assert (loaded.lost, loaded.tally.failed) == (2, 5)
    assert loaded.told == f"2 documents could not be stored: {folder}/corpus.jsonl:2: holds what is refused"


def test_a_bare_name_of_judgements_is_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = make(tmp_path / "here", {**PLAIN, "mine.tsv": "q1\ta\t2\n"})
    there = make(tmp_path / "there", {**PLAIN, "mine.tsv": "q2\tb\t1\n"})
    only_here = make(tmp_path / "else", PLAIN)
    monkeypatch.chdir(here)
    assert [question.id for question in read_set(there, qrels=Path("mine.tsv")).questions] == ["q2"]
    assert [question.id for question in read_set(only_here, qrels=Path("mine.tsv")).questions] == ["q1"]
    assert [question.id for question in read_set(there, qrels=here / "mine.tsv").questions] == ["q1"]
    # The same where it lies deeper.
    for folder, line in ((here, "q1\ta\t2\n"), (there, "q2\tb\t1\n")):
        make(folder, {"other/deep.tsv": line})
    for name in ("mine.tsv", "other/deep.tsv"):
        found = tune._read([Path(), there, only_here], qrels=name, queries=None, seed=7)
        asked = [[question.id for question in judged_set.questions] for _, judged_set in found]
        assert asked == [["q1"], ["q2"], ["q1", "q2"]]


@pytest.mark.parametrize("option", ["evaluate --per-query", "tune --out", "tune --report"])
def test_where_nothing_can_be_written_is_told_before_anything_is_asked(tmp_path: Path, option: str) -> None:
    command, name = option.split()
    make(tmp_path, PLAIN)
    for place, said in ((tmp_path / "no" / "f.json", "there is no folder"), (tmp_path, "is a folder")):
        told = CliRunner().invoke(
            cli.app, [command, str(tmp_path), name, str(place), "--url", "http://127.0.0.1:9"],
            prog_name="halflife", env={"COLUMNS": "300"},
        )  # fmt: skip
        assert (told.exit_code, said in told.output) == (2, True), told.output


# ---- a whole run ----------------------------------------------------------------------------------------------------

DIMS = 16
CORPUS = lines(
    {"id": "old", "text": "carry over five days of leave", "created_at": "2020-01-01", "lang": "en"},
    {"id": "new", "text": "carry over eight days of leave now", "created_at": "2025-01-01", "lang": "en"},
    {"id": "later", "text": "carry over ten days of leave", "created_at": "2030-01-01", "lang": "en"},
    {"id": "tea", "text": "the kettle in the kitchen is descaled", "created_at": "2024-01-01", "lang": "de"},
)
QUERIES = lines(
    {
        "id": "q1",
        "text": "carry over days of leave",
        "as_of": "2026-01-01",
        "current": ["new"],
        "superseded": ["old"],
        "kind": "leave",
    },
    {"id": "q2", "text": "kettle kitchen", "filter": {"lang": "de"}, "kind": "tea"},
    {"id": "q3", "text": "carry over days of leave", "as_of": "2021-01-01", "kind": "leave"},
)


@pytest.fixture(scope="module")
def embedding() -> Iterator[EmbeddingServer]:
    with EmbeddingServer(dims=DIMS) as server:
        yield server


@pytest.fixture(scope="module")
def service(node_url: str, embedding: EmbeddingServer) -> Iterator[Running]:
    settings = settings_for(
        node_url,
        embedding.base_url,
        dims=DIMS,
        embedding_document_prefix="passage: ",
    )
    with serving(settings) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, service: Running) -> Iterator[Path]:
    # Its own content, since a collection is found by that; dated so that no question sees it.
    corpus = CORPUS + lines({"id": "own", "text": str(tmp_path), "created_at": "2035-01-01"})
    made = make(tmp_path / "small Set", {"corpus.jsonl": corpus, "queries.jsonl": QUERIES, "qrels.tsv": "q1\tnew\t2\nq1\told\t1\nq2\ttea\t1\nq3\told\t1\n"})  # fmt: skip
    yield made
    # A test may change the set, which gives it another collection: a service with other vectors would not start beside it.
    for told in service.client.get("/v1/collections").json():
        if (name := told["name"]).startswith("eval-small_set-"):
            service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


def evaluate(service: Running, folder: Path, *options: str) -> Any:
    return CliRunner().invoke(
        cli.app,
        ["evaluate", str(folder), "--url", service.url, *options],
        prog_name="halflife",
        env={"COLUMNS": "160"},
    )


def passages(server: EmbeddingServer) -> int:
    return sum(
        text.startswith("passage: ")
        for seen in server.requests
        for text in (seen.body or {}).get("input", ())
    )


@pytest.mark.node
def test_a_set_is_loaded_once_and_judged(service: Running, folder: Path, embedding: EmbeddingServer) -> None:
    before = passages(embedding)
    first = evaluate(service, folder, "--json", "--decay", "365d")
    assert first.exit_code == 0, first.output
    loaded = passages(embedding)
    assert loaded == before + 5
    found = json.loads(first.stdout)
    # q3 sees the world of 2021, where only the old page exists; q1 that of 2026, without the page from the future.
    assert {name: found[name] for name in ("ndcg@10", "map", "mrr@10", "recall@10", "currency", "stale@1")} == {
        "ndcg@10": 1.0, "map": 1.0, "mrr@10": 1.0, "recall@10": 1.0, "currency": 1.0, "stale@1": 0.0,
    }  # fmt: skip
    assert (found["set"], found["queries"], found["pairs"], found["qrels"]) == (
        "small Set",
        3,
        1,
        "qrels.tsv",
    )
    assert found["collection"].startswith("eval-small_set-")
    assert found["profiles"]["default"]["kinds"]["leave"]["queries"] == 2
    again = evaluate(service, folder, "--json", "--decay", "365d")
    assert json.loads(again.stdout) == found
    assert passages(embedding) == loaded


@pytest.mark.node
def test_profiles_stand_side_by_side(service: Running, folder: Path, tmp_path: Path) -> None:
    table, rows = tmp_path / "figures.tsv", tmp_path / "figures.jsonl"
    options: tuple[str, ...] = ("-p", "decayed", "-p", "off", "-p", 'old={"filter": {"id": "old"}}')
    wrong = evaluate(service, folder, *options)
    assert (wrong.exit_code, "has no profile 'decayed'" in wrong.output) == (1, True)
    options = ("-p", 'decayed={"decay": {"half_life": "365d"}}', *options[2:4])
    told = evaluate(service, folder, *options, "--per-query", str(table))
    assert told.exit_code == 0, told.output
    for word in ("small Set", "decayed", "off", "currency", "stale@1", "leave", "tea"):
        assert word in told.stdout
    assert len(table.read_text().splitlines()) == 1 + 2 * 3
    found = json.loads(evaluate(service, folder, *options, "--json", "--per-query", str(rows)).stdout)
    assert list(found["profiles"]) == ["decayed", "off"]
    assert set(found["comparisons"]["off"]["ndcg@10"]) == {"difference", "better", "worse", "same", "p"}
    first = json.loads(rows.read_text().splitlines()[0])
    assert (first["profile"], first["id"], first["first"], first["rank_of_best"]) == (
        "decayed",
        "q1",
        "new",
        1,
    )


@pytest.mark.node
def test_failures_are_accounted_for(service: Running, folder: Path) -> None:
    (folder / "mine.tsv").write_text("q1\ttea\t1\nq2\ttea\t1\nq3\tlater\t1\n")
    found = json.loads(evaluate(service, folder, "--json", "--qrels", "mine.tsv", "--failures", "5").stdout)
    missing = {failure["id"]: failure for failure in found["failures"]}
    assert set(missing) == {"q1", "q3"}
    assert missing["q3"]["missing"] == "later"
    assert missing["q3"]["why"]["excluded_by"]
    told = evaluate(service, folder, "--qrels", "mine.tsv", "--failures", "5").stdout
    assert "(later) is in no route's window" in told


@pytest.mark.node
def test_an_incomplete_collection_is_completed(
    service: Running, folder: Path, embedding: EmbeddingServer
) -> None:
    assert evaluate(service, folder, "--json").exit_code == 0
    name = evaluating.collection_name(read_set(folder))
    gone = service.client.post(
        f"/v1/collections/{name}/documents/delete", json={"ids": ["tea"], "refresh": "wait_for"}
    )
    assert gone.status_code == 200, gone.text
    before = passages(embedding)
    assert evaluate(service, folder, "--json").exit_code == 0
    assert passages(embedding) == before + 1


@pytest.mark.node
def test_documents_that_the_service_refuses_are_told(service: Running, folder: Path, tmp_path: Path) -> None:
    corpus = folder / "corpus.jsonl"
    repeated = [{"id": "tea", "text": f"the kettle in the kitchen, {n}", "lang": "de"} for n in range(2)]
    refused = [{"id": "x" * 2000, "text": "x"}, {"id": "y" * 2000, "text": "x"}]
    corpus.write_text(corpus.read_text() + lines(*repeated, {"id": "void", "text": " "}, *refused))
    [*_, first, _] = enumerate(corpus.read_text().splitlines(), 1)
    told = evaluate(service, folder)
    assert told.exit_code == 1
    assert f"2 documents could not be stored: {corpus}:{first[0]}: " in told.stderr.replace("\n", " ")
    more = lines(*({"id": f"more{n}", "text": f"kettle {n}"} for n in range(4)))
    (folder / "queries.jsonl").write_text(QUERIES + more)
    with (folder / "qrels.tsv").open("a") as judgements:
        judgements.write("".join(f"more{n}\ttea\t1\n" for n in range(4)))
    told = CliRunner().invoke(
        cli.app,
        [
            "tune", str(folder), "--url", service.url, "--trials", "1", "--only", "fusion",
            "--held-out", "0.5", "--data", str(tmp_path / "data"),
        ],
        prog_name="halflife", env={"COLUMNS": "300"},
    )  # fmt: skip
    assert (told.exit_code, told.stderr.count("2 documents could not be stored")) == (1, 2), told.output
    (folder / "corpus.jsonl").write_text(CORPUS + lines(*repeated, {"id": "own", "text": str(tmp_path)}))
    told = evaluate(service, folder)
    assert told.exit_code == 0, told.output


@pytest.mark.node
def test_a_named_collection_is_taken_as_it_is(service: Running, folder: Path) -> None:
    name = evaluating.collection_name(read_set(folder)) + "-mine"
    try:
        assert evaluate(service, folder, "--json", "-c", name).exit_code == 0
        service.client.post(
            f"/v1/collections/{name}/documents/delete", json={"ids": ["tea"], "refresh": "wait_for"}
        )
        found = json.loads(evaluate(service, folder, "--json", "-c", name).stdout)
        assert found["recall@10"] == pytest.approx(2 / 3)
    finally:
        service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


@pytest.mark.node
def test_a_degraded_answer_is_not_judged(
    service: Running, folder: Path, embedding: EmbeddingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate(service, folder, "--json").exit_code == 0
    monkeypatch.setattr(evaluating, "PATIENCE_S", 0.0)
    (folder / "queries.jsonl").write_text(lines({"id": "q1", "text": "words that nobody embedded before"}))
    embedding.poison = {"words that nobody embedded before": openai_error(400, "no")}
    try:
        told = evaluate(service, folder, "--json")
    finally:
        embedding.poison = {}
    assert told.exit_code == 1
    assert told.stdout == ""


class SlowClient:
    """Answers at most so many questions in one request's time budget."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, list[int]()

    def search(self, body: Mapping[str, Any]) -> Any:
        asked = body["queries"]
        self.asked.append(len(asked))
        if len(asked) > self.most:
            problem = {"status": 504, "title": "The time budget is used up"}
            return {"results": [problem for _ in asked]}
        return {"results": [{"hits": [{"id": each["query"]}]} for each in asked]}


def test_what_exceeds_a_time_budget_is_asked_in_smaller_batches() -> None:
    questions = [Question(f"q{number}", f"text {number}", {"a": 1}) for number in range(30)]
    client: Any = SlowClient(most=5)
    told: list[str] = []
    found = evaluating.rank(client, "c", evaluating.read_profile("default"), questions, report=told.append)
    assert found == {question.id: [question.text] for question in questions}
    assert client.asked == [16, 8, *[4] * 7, 2]
    assert told[-1] == "The time budget is used up; going on with 4 questions at once"


def test_one_question_beyond_the_time_budget_is_an_error() -> None:
    client: Any = SlowClient(most=0)
    profile = evaluating.read_profile("default")
    with pytest.raises(ApiProblem):
        evaluating.rank(client, "c", profile, [Question("q", "text", {"a": 1})])


def test_a_folder_that_is_no_set_is_told_in_words(tmp_path: Path) -> None:
    told = CliRunner().invoke(cli.app, ["evaluate", str(tmp_path)], prog_name="halflife")
    assert told.exit_code == 1
    assert "holds no questions" in told.output
