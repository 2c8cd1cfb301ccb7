"""Tuning: the space, the split, what is taken and what is not, and whole runs on the real node with few trials."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from app.asking import Search
from app.collection import Collection
from app.planning import make_plan
from app.ranking import Profile
from scripts import cli, evaluating, tuning
from scripts import tune as tune_command
from scripts.client import Client
from scripts.collecting import lean
from scripts.judged import JudgedSet, Question, read_set
from scripts.tuning import CannotTune, Gain, Part, SetResult, Task, Trial
from tests.fakes import EmbeddingServer
from tests.service import Running, serving, settings_for
from tests.test_evaluating import rendered

optuna = pytest.importorskip("optuna", reason="tuning needs optuna")
pytest.importorskip("pytrec_eval", reason="judging rankings needs pytrec-eval-terrier")

# ---- the space ------------------------------------------------------------------------------------------------------


def drawn(start: Mapping[str, Any], groups: Sequence[str], count: int = 150) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    return [tuning.suggest(study.ask(), start, groups) for _ in range(count)]


def test_all_that_is_drawn_is_a_search_and_can_be_stored() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = drawn({}, tuning.GROUPS)
    for options in found:
        Search(collection="c", query="q", **options)
        tuning.storable(options)
    placements = {
        each["decay"]["placement"] if isinstance(each["decay"], dict) else each["decay"] for each in found
    }
    assert placements == set(tuning.decays())
    assert {each["fusion"]["method"] for each in found} >= {"rrf", "linear"}
    assert {route["kind"] for each in found for route in each.get("routes", ())} == {
        "text", "vector", "fresh_text", "fresh_vector",
    }  # fmt: skip


def test_what_is_not_searched_stays_as_it_is() -> None:
    start = {"fusion": {"method": "linear"}, "routes": [{"kind": "text", "weight": 3.0}], "rerank": {}}
    for options in drawn(start, ["decay"], 20):
        assert (options["fusion"], options["rerank"]) == ({"method": "linear"}, {})
        assert options["routes"] == [{"kind": "text", "weight": 3.0}]
    assert tuning.storable(start).rerank is not None
    with pytest.raises(CannotTune, match="can't hold `top_k`"):
        tuning.storable({**start, "top_k": 5})


FRESH = [{"kind": "text"}, {"kind": "vector"}, {"kind": "fresh_vector", "window": "30d", "weight": 0.3}]


def test_no_fresh_route_is_tried_too_where_the_start_has_one() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    kinds: dict[str, set[tuple[str, ...]]] = {}
    for _ in range(40):
        trial = study.ask()
        options = tuning.suggest(trial, {"routes": FRESH}, ["fresh"])
        found = tuple(route["kind"] for route in options["routes"])
        kinds.setdefault(trial.params["fresh"], set()).add(found)
    assert kinds == {
        "none": {("text", "vector")},
        "text": {("text", "vector", "fresh_text")},
        "vector": {("text", "vector", "fresh_vector")},
        "both": {("text", "vector", "fresh_text", "fresh_vector")},
    }
    # Further routes are further to something: where all of them are within a window, to the two that there are by default.
    for options in drawn({"routes": FRESH[2:]}, ["fresh"], 20):
        assert [route["kind"] for route in options["routes"][:2]] == ["text", "vector"]


def test_the_weights_of_fresh_routes_are_not_those_of_the_others() -> None:
    titled = {"kind": "fresh_text", "window": "7d", "weight": 0.2, "title_boost": 3.0}
    start = {"routes": [*FRESH, titled]}
    for options in drawn(start, ["routes"], 20):
        text, vector, *fresh = options["routes"]
        assert fresh == [FRESH[2], titled]
        assert text["weight"] + vector["weight"] == pytest.approx(2)
        assert "title_boost" in text
    assert tuning.parameters_of(start, ["routes"])["title_boost"] == 1.5


@pytest.mark.parametrize("groups", [("decay",), tuning.GROUPS, ("fresh", "routes")])
@pytest.mark.parametrize(
    "start",
    [
        {"fold_superseded": True},
        {"fold_superseded": True, "decay": "auto", "routes": FRESH},
        {"fusion": {"method": "additive"}, "decay": {"hourly_loss": 0.01, "floor": 0}},
        {"routes": [{"kind": "vector", "decay": {"half_life": "30d"}}], "mmr": {}},
        {"routes": [{"kind": "vector", "decay": "off"}], "decay": {"rate": 0.1}, "rerank": {}},
    ],
)  # fmt: skip
def test_whatever_the_start_holds_each_trial_is_a_search(
    start: dict[str, Any], groups: Sequence[str]
) -> None:
    found = drawn(start, groups, 60)
    for options in found:
        search = Search(collection="c", query="q", **options)
        make_plan(search, collection=COLLECTION, now_ms=0)
        tuning.storable(options)
        if "fold_superseded" in start:
            assert search.fold_superseded is (options.get("decay") in (None, "auto"))


COLLECTION = Collection(
    name="c", index="halflife-c-1", dims=8, similarity="cosine", declared={}, template_version=1
)

STARTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "rrf": {"fusion": {"method": "rrf", "rank_constant": 20, "window": 200}},
    "weights and decay": {
        "routes": [
            {"kind": "text", "weight": 0.5},
            {"kind": "vector", "weight": 1.5, "decay": {"floor": 0.9}},
            {"kind": "fresh_vector", "window": "30d", "weight": 0.5},
        ],
        "decay": {"kind": "gauss", "half_life": "180d", "floor": 0.5, "placement": "route"},
    },
    "after fusion": {"decay": {"kind": "exp", "half_life": "30d", "floor": 0.2, "placement": "fused"}},
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
def test_a_start_has_its_place_in_the_space(start: dict[str, Any]) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    given = tuning.parameters_of(start, tuning.GROUPS)
    study.enqueue_trial(given)
    trial = study.ask()
    options = tuning.suggest(trial, start, tuning.GROUPS)
    assert {name: trial.params[name] for name in given} == given
    for name in ("decay", "fusion"):
        if name in start:
            assert {**options[name], **start[name]} == options[name]


# ---- the split ------------------------------------------------------------------------------------------------------


def questions(count: int) -> list[Question]:
    return [Question(f"q{n}", f"text {n // 2}", {"a": 1}) for n in range(count)]


def test_a_question_is_on_one_side_and_so_is_its_twin() -> None:
    training, held = tuning.split(questions(40), held_out=0.4, seed=1)
    assert len(held) == 16
    assert {q.text for q in training} & {q.text for q in held} == set()
    assert {q.id for q in training} | {q.id for q in held} == {q.id for q in questions(40)}
    assert (training, held) == tuning.split(questions(40), held_out=0.4, seed=1)
    assert held != tuning.split(questions(40), held_out=0.4, seed=2)[1]
    with pytest.raises(CannotTune, match="3 different questions are too few"):
        tuning.split(questions(6), held_out=0.4, seed=1)


# ---- what is taken --------------------------------------------------------------------------------------------------


def part(name: str, *, guard: bool = False) -> Part:
    return Part(name, JudgedSet(name, (), None, Path("qrels.tsv")), name, guard, (), ())


TASK = Task(
    parts=(part("news"), part("past", guard=True)),
    start=evaluating.Profile("default", {}),
    metric="ndcg@10",
    max_loss=0.01,
)


def trial(number: int, gain: float, loss: float, values: Sequence[float] = (), **parameters: Any) -> Trial:
    return Trial(
        number, {}, parameters, gain, {"past": loss}, {"news": values, "past": [0.5] * len(values)}, 1.0
    )


def test_the_best_is_the_greatest_gain_within_the_bound() -> None:
    trials = [trial(0, 0, 0), trial(1, 0.3, 0.02), trial(2, 0.2, 0.01), trial(3, 0.2, 0.0)]
    assert tuning.best_of(trials, max_loss=0.01).number == 2
    assert tuning.best_of(trials, max_loss=0.001).number == 3
    assert tuning.best_of(trials[:2], max_loss=0.01).number == 0


def result(name: str, start: float, best: float, *, guard: bool = False, judged: int = 25) -> SetResult:
    return SetResult(part(name, guard=guard), 60, judged, {"ndcg@10": start}, {"ndcg@10": best}, ())


SURE, UNSURE, WORSE = Gain(0.1, 0.05, 0.15, 0.001), Gain(0.1, -0.05, 0.2, 0.3), Gain(-0.01, -0.1, 0.1, 0.8)
VERDICTS = {
    "better": (trial(1, 0.2, 0), SURE, 0.9, True, "gains +0.1000"),
    "better, perhaps": (trial(1, 0.2, 0), UNSURE, 0.9, True, "may be chance"),
    "not better there": (trial(1, 0.2, 0), WORSE, 0.9, False, "gains nothing"),
    "the guard loses there": (trial(1, 0.2, 0), SURE, 0.88, False, "past loses 0.0200"),
    "nothing found": (trial(0, 0, 0), SURE, 0.9, False, "nothing that was tried"),
}


@pytest.mark.parametrize("best, gain, guarded, take, said", VERDICTS.values(), ids=VERDICTS.keys())
def test_the_verdict(best: Trial, gain: Gain, guarded: float, take: bool, said: str) -> None:
    held = [result("news", 0.5, 0.6), result("past", 0.9, guarded, guard=True)]
    taken, reason = tuning.verdict(TASK, best, gain, held)
    assert (taken, said in reason) == (take, True), reason
    advice = "Keep what you have" if not take else "Take it" if gain is SURE else "Undecided"
    assert tuning.Outcome(TASK, (), best, (), held, gain, taken, reason).advice == advice


def test_few_questions_are_said_to_be_too_few() -> None:
    # Of 60 that were asked: what counts is how many have the metric. A guard's have no part in the gain.
    few = [result("news", 0.5, 0.6, judged=10), result("past", 0.9, 0.9, guard=True, judged=60)]
    many = [result("news", 0.5, 0.6, judged=25)]
    for best, gain in ((trial(1, 0.2, 0), SURE), (trial(0, 0, 0), SURE), (trial(1, 0.2, 0), WORSE)):
        assert tuning.verdict(TASK, best, gain, few)[1].endswith("10 held-out questions are too few to tell")
        assert "too few" not in tuning.verdict(TASK, best, gain, many)[1]
    assert tuning.Outcome(TASK, (), trial(1, 0.2, 0), (), few, SURE, True, "").advice == "Undecided"
    assert tuning.Outcome(TASK, (), trial(1, 0.2, 0), (), many, SURE, True, "").advice == "Take it"
    assert tune_command._counted(few[0]) == "10 of 60"
    assert tune_command._counted(result("news", 0.5, 0.6, judged=60)) == "60"


PAIRS: Any = {"current": ("new",), "superseded": ("old",)}


def test_a_guard_is_judged_by_currency_only_where_both_sides_have_pairs() -> None:
    paired, plain = Question("q1", "one", {"new": 1}, **PAIRS), Question("q2", "two", {"new": 1})
    by_currency = replace(TASK, metric="currency")

    def counts(training: Sequence[Question], held_out: Sequence[Question]) -> str:
        whole = replace(part("past").judged_set, questions=(*training, *held_out))
        guard = Part("past", whole, "past", True, tuple(training), tuple(held_out))
        return tuning.metric_of(by_currency, guard)

    assert counts([paired], [plain]) == "ndcg@10"
    assert counts([plain], [paired]) == "ndcg@10"
    assert counts([paired, plain], [plain, paired]) == "currency"


def test_other_judgements_are_another_search() -> None:
    def digest(**changed: Any) -> str:
        question = replace(Question("q1", "one", {"a": 1}), **changed)
        named = replace(TASK.parts[0], training=(question,), held_out=(Question("q2", "two", {"a": 1}),))
        return replace(TASK, parts=(named,)).digest()

    changes: list[dict[str, Any]] = [
        {}, {"text": "uno"}, {"grades": {"a": 2}}, {"grades": {"a": 1, "b": 0}}, {"as_of": "2026-01-01"},
        {"filter": {"lang": "en"}}, PAIRS,
    ]  # fmt: skip
    assert len({digest(**changed) for changed in changes}) == len(changes)
    assert digest() == digest()


class Ranks:
    """Answers as a service would that finds what the decay of the request is fit for."""

    def search(self, body: Mapping[str, Any]) -> Any:
        ids = ["old", "new"] if body.get("decay") == "off" else ["new", "old"]
        return {"results": [{"hits": [{"id": name} for name in ids]} for _ in body["queries"]]}


def searched(tmp_path: Path, **more: Any) -> tuning.Tuner:
    questions = [Question(f"q{n}", f"text {n}", {"new": 1}, **PAIRS) for n in range(8)]
    whole = JudgedSet("news", tuple(questions), None, Path("qrels.tsv"))
    news = Part("news", whole, "news", False, tuple(questions[:4]), tuple(questions[4:]))
    plain = [Question(f"p{n}", f"text {n}", {"old": 1, "new": 1}) for n in range(4)]
    # All the pairs that the guard has are among what is searched on.
    guarded = [*questions[:1], *plain[:1]]
    past = Part(
        "past",
        replace(whole, questions=(*guarded, *plain[2:])),
        "past",
        True,
        tuple(guarded),
        tuple(plain[2:]),
    )
    start = evaluating.Profile("off", {"decay": "off"})
    task = Task(parts=(news, past), start=start, metric="currency", max_loss=0.01, groups=("decay",))
    ranks: Any = Ranks()
    return tuning.Tuner(ranks, task, tmp_path / "a.journal", **more)


def test_a_search_by_currency_ends_whatever_a_guard_has(tmp_path: Path) -> None:
    with searched(tmp_path) as tuner:
        tuner.search(trials=6)
        found = tuner.conclude()
    told = {one.part.name: (one.questions, one.judged) for one in found.held_out}
    assert told == {"news": (4, 4), "past": (2, 2)}
    assert (found.take, found.advice) == (True, "Undecided")
    assert found.reason.endswith("4 held-out questions with pairs are too few to tell")
    assert "4 held out" in rendered(tune_command.summary(found))
    assert tuning.to_json(found)["sets"]["past"]["held_out"]["judged"] == 2


def test_one_search_is_run_by_one_process_at_once(tmp_path: Path) -> None:
    with searched(tmp_path) as first:
        first.search(trials=2)
        under_way = first.study.ask()
        for fresh in (False, True):
            with pytest.raises(CannotTune, match="runs this very search"):
                searched(tmp_path, fresh=fresh)
        # Nobody called it off or forgot it: it ends as it began.
        first.study.tell(under_way, 0.0)
    with searched(tmp_path) as second:
        assert len(second.study.trials) == 3
    with searched(tmp_path, fresh=True) as third:
        assert third.study.trials == []


# ---- where it starts --------------------------------------------------------------------------------------------------

RANKING: dict[str, Any] = {
    "routes": [{"kind": "text", "weight": 2.0}, {"kind": "vector", "decay": {"floor": 0.9}}],
    "decay": {"half_life": "30d"},
    "rerank": {},
    "min_relevance": 0.2,
}
FOLDED = {"fold_superseded": True, "decay": "auto", "feedback": {"strength": 0.1}, "dedup": {}}
OVER: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "nothing over the default": ({}, RANKING, None),
    "a word over routes that decay": ({"decay": "off"}, RANKING, None),
    "a stage taken off": ({"rerank": "off", "min_relevance": None}, RANKING, None),
    "another stage at the head": ({"mmr": {}}, RANKING, None),
    "routes that decay over a word": ({"routes": [{"kind": "vector", "decay": {"rate": 0.1}}]}, FOLDED, None),
    "a decay over what only auto does": ({"decay": {"half_life": "9d"}}, FOLDED, None),
    "folding over a decay": ({"fold_superseded": True}, RANKING, None),
    "one profile beside the default": ({}, FOLDED, RANKING),
    "another profile beside the default": ({"fusion": {"method": "rrf"}}, RANKING, FOLDED),
    "an empty profile beside the default": ({}, {}, {**FOLDED, "fusion": {"method": "linear"}, "mmr": {}}),
    "routes that decay beside a default's word": ({}, {"routes": [{"kind": "text", "decay": {"rate": 0.1}}]}, FOLDED),
}  # fmt: skip


@pytest.mark.parametrize("given, base, default", OVER.values(), ids=OVER.keys())
def test_what_is_asked_is_what_would_be_stored(
    given: dict[str, Any], base: dict[str, Any], default: dict[str, Any] | None
) -> None:
    """Three ways to one plan: as a caller asks it, as a trial does, and by the profile once it is stored."""
    default_profile = base if default is None else default
    profiles = {
        name: Profile.model_validate(each) for name, each in (("base", base), ("default", default_profile))
    }
    held = COLLECTION.model_copy(update={"profiles": profiles, "default_profile": "default"})
    options = tuning.settled(given, base=base, default=default)

    def planned(**asked: Any) -> dict[str, Any]:
        search = Search.model_validate({"collection": "c", "query": "q", **asked})
        request = make_plan(search, collection=held, now_ms=0).resolved_request()
        # What takes a stage off is left out once there is none.
        told: dict[str, Any] = lean({name: value for name, value in request.items() if value is not False})
        return told

    wanted = planned(profile="base", **given)
    assert planned(**options) == wanted
    held.profiles["stored"] = tuning.storable(options)
    assert planned(profile="stored") == wanted


def test_a_decay_that_only_the_default_has_cannot_be_left_out() -> None:
    with pytest.raises(CannotTune, match="give it `decay`"):
        tuning.settled({}, base={"routes": [{"kind": "text", "decay": {"rate": 0.1}}]}, default=RANKING)


def test_a_gain_has_an_interval_and_a_chance() -> None:
    found = tuning.gain_of([[0.1] * 12, [0.3] * 12], seed=1)
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.2, 0.2))
    # All signs of both sets alike, one way or the other: about one in 2^23.
    assert found.p is not None
    assert found.p < 0.01
    assert tuning.gain_of([[0.0] * 5], seed=1).p is None
    even = tuning.gain_of([[0.2, -0.2, 0.1, -0.1]], seed=1)
    assert even.mean == pytest.approx(0)
    assert even.p == 1.0
    assert even.low < 0 < even.high


def test_a_parameter_that_always_wins_is_sure_and_a_tie_is_not() -> None:
    sure = [trial(0, 0, 0, [0.1] * 20, kind="exp"), trial(1, 0.5, 0, [0.6] * 20, kind="gauss", days=30)]
    told = tuning.confidence(TASK, sure)
    assert told["kind"] == {"value": "gauss", "has": 1.0, "share": 1.0}
    assert told["days"] == {"value": 30, "has": 1.0, "share": 1.0, "low": 30.0, "high": 30.0}
    half = [0.0, 1.0] * 10
    unsure = [
        trial(0, 0, 0, [0.0] * 20, kind="exp"),
        trial(1, 0.5, 0, half, kind="gauss"),
        trial(2, 0.5, 0, half[::-1], kind="linear"),
    ]
    assert 0.3 < tuning.confidence(TASK, unsure)["kind"]["share"] < 0.8


# ---- whole runs -----------------------------------------------------------------------------------------------------

DIMS = 16
TOPICS = ("leave", "travel", "kettle", "parking", "badges", "laptops", "lunch", "visitors")


def lines(*entries: Mapping[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture(scope="module")
def service(node_url: str) -> Iterator[Running]:
    with EmbeddingServer(dims=DIMS) as embedding:
        settings = settings_for(
            node_url,
            embedding.base_url,
            dims=DIMS,
            embedding_document_prefix="passage: ",
        )
        with serving(settings) as running:
            yield running


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, service: Running) -> Iterator[tuple[Path, Path]]:
    """Two sets of the same documents: one wants the newer of two, whose words fit less, the other the older."""
    root = tmp_path_factory.mktemp("sets")
    corpus = [
        {
            "id": f"{topic}-{age}",
            "text": f"{topic} {topic} rules" if age == "old" else f"{topic} rules of this year, number {n}",
            "created_at": "2016-01-01" if age == "old" else "2026-01-01",
        }
        for n, topic in enumerate(TOPICS)
        for age in ("old", "new")
    ]
    made = []
    for name, wanted in (("news", "new"), ("past", "old")):
        folder = root / name
        folder.mkdir()
        own = {"id": "own", "text": f"{root} {name}", "created_at": "2035-01-01"}
        (folder / "corpus.jsonl").write_text(lines(*corpus, own))
        (folder / "queries.jsonl").write_text(
            lines(*({"id": topic, "text": f"{topic} rules", "as_of": "2026-01-31"} for topic in TOPICS))
        )
        (folder / "qrels.tsv").write_text("".join(f"{topic}\t{topic}-{wanted}\t1\n" for topic in TOPICS))
        made.append(folder)
    yield made[0], made[1]
    for folder in made:
        name = evaluating.collection_name(read_set(folder))
        service.client.delete(f"/v1/collections/{name}", params={"confirm": name})


TEXT = json.dumps({"routes": [{"kind": "text"}], "decay": "off"})


def tune(service: Running, tmp_path: Path, *given: str) -> Any:
    common = ("--url", service.url, "--data", str(tmp_path / "data"), "-p", TEXT, "--only", "decay")
    return CliRunner().invoke(
        cli.app, ["tune", *given, *common], prog_name="halflife", env={"COLUMNS": "160"}
    )


@pytest.mark.node
def test_a_profile_is_found_stored_and_reported(
    service: Running, sets: tuple[Path, Path], tmp_path: Path
) -> None:
    news, _ = sets
    own = evaluating.collection_name(read_set(news))
    out, page = tmp_path / "best.json", tmp_path / "report.html"
    options = ("--out", str(out), "--report", str(page), "--store", "recent", "--into", own, "--trials", "12")
    told = tune(service, tmp_path, str(news), *options)
    assert told.exit_code == 0, told.output
    assert re.search("(Take it|Undecided): it gains", told.output)
    assert "held out" in told.output
    profile = json.loads(out.read_text())
    assert profile["decay"] != "off"
    html = page.read_text()
    assert html.count("<svg") >= 3
    assert "http" not in html.replace("http://127", "")
    stored = service.client.get(f"/v1/collections/{own}").json()["profiles"]["recent"]
    assert stored["decay"] not in (None, "off")
    body = {
        "collection": own,
        "query": "kettle rules",
        "as_of": "2026-01-31",
        "top_k": 1,
        "profile": "recent",
    }
    assert service.client.post("/v1/search", json=body).json()["profile"] == {"name": "recent"}
    # The same command goes on: all trials are there already, and the first is the start.
    again = json.loads(tune(service, tmp_path, str(news), "--trials", "12", "--json").stdout)
    assert (again["trials"], again["profile"]) == (12, profile)
    assert again["sets"]["news"]["training"]["queries"] + again["sets"]["news"]["held_out"]["queries"] == 8


@pytest.mark.node
def test_what_is_measured_on_a_collection_is_what_is_stored(
    service: Running, sets: tuple[Path, Path], tmp_path: Path, node_url: str
) -> None:
    own, path = "tuned-mine", "/v1/collections/tuned-mine"

    def tuned(*given: str) -> Any:
        options = ("-c", own, "--only", "decay", "--trials", "6", "--json", "--url", service.url)
        line = ["tune", str(sets[0]), *options, "--data", str(tmp_path / "data"), *given]
        return CliRunner().invoke(cli.app, line, prog_name="halflife", env={"COLUMNS": "300"})

    def put(body: Mapping[str, Any]) -> None:
        assert service.client.put(path, json=body).status_code == 200

    try:
        assert tuned("--trials", "1").exit_code == 0
        routes = [{"kind": "text", "weight": 0.5}]
        mine = {"routes": routes, "dedup": {"threshold": 0.99, "keep": "higher"}}
        put({"profiles": {"mine": mine, "plain": {"decay": "off"}}, "default_profile": "mine"})
        told = tuned("-p", "off", "--store", "recent")
        assert told.exit_code == 0, told.output
        found = json.loads(told.stdout)
        assert found["start"] == {**mine, "decay": "off"}
        assert found["take"]
        stored = service.client.get(path).json()["profiles"]
        assert set(stored) == {"mine", "plain", "recent"}
        assert lean(stored["recent"]) == found["profile"]
        assert found["profile"].items() >= mine.items()
        # By its name a profile stands alone: nothing of the default one is measured with it.
        [text, vector] = json.loads(tuned("-p", "plain").stdout)["start"]["routes"]
        assert (text, vector) == ({"kind": "text"}, {"kind": "vector"})
        # An experiment would deal the trials to its arms, but one by subject, whom no trial names.
        arms = [{"profile": "mine", "percent": 50}, {"profile": "plain", "percent": 50}]
        put({"experiment": {"name": "dealt", "by": "request", "arms": arms}})
        told = tuned("-p", "off")
        assert (told.exit_code, "the experiment 'dealt' would give the trials" in told.output) == (1, True)
        put({"experiment": {"name": "dealt", "by": "subject", "arms": arms}})
        assert tuned("-p", "off").exit_code == 0
        # Profiles are written all at once, so one that can't be read would be lost.
        index = f"{node_url}/halflife-{own}"
        [held] = httpx2.get(f"{index}/_mapping").json().values()
        meta = held["mappings"]["_meta"]
        meta["halflife"]["profiles"]["later"] = {"decay": {"kind": "unheard of"}}
        assert httpx2.put(f"{index}/_mapping", json={"_meta": meta}).status_code == 200
        told = tuned("-p", "off", "--store", "recent", "--fresh")
        assert (told.exit_code, "the profile 'later' of 'tuned-mine' can't be read" in told.output) == (
            1,
            True,
        )
    finally:
        service.client.delete(path, params={"confirm": own})


@pytest.mark.node
def test_a_profile_is_stored_beside_those_that_others_add_meanwhile(service: Running) -> None:
    path = "/v1/collections/tuned-shared"

    class Overtaken(Client):
        """Another client is quicker, once."""

        times = 0

        def put_collection(self, name: str, options: Mapping[str, Any]) -> Any:
            self.times += 1
            if self.times == 1:
                added = {"profiles": {"first": {"decay": "off"}, "theirs": {"decay": "auto"}}}
                assert service.client.put(path, json=added).status_code == 200
            return super().put_collection(name, options)

    service.client.put(path, json={"profiles": {"first": {"decay": "off"}}})
    try:
        with Overtaken(service.url) as client:
            tune_command._store(client, "tuned-shared", "mine", {"fusion": {"method": "rrf"}})
            assert client.times == 2
        assert set(service.client.get(path).json()["profiles"]) == {"first", "theirs", "mine"}
    finally:
        service.client.delete(path, params={"confirm": "tuned-shared"})


@pytest.mark.node
def test_what_a_guard_would_pay_for_is_not_proposed(
    service: Running, sets: tuple[Path, Path], tmp_path: Path
) -> None:
    news, past = sets
    out = tmp_path / "best.json"
    told = tune(
        service, tmp_path, str(news), "--guard", str(past), "--trials", "6", "--json", "--out", str(out)
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    # Each gain on the one is a loss on the other.
    assert (found["take"], found["profile"], found["best"]["training_gain"]) == (False, None, 0.0)
    assert not out.exists()
    # The same trials again, as people read them.
    told = tune(service, tmp_path, str(news), "--guard", str(past), "--trials", "6", "--out", str(out))
    assert f"Nothing is written to {out}: what you have is to be kept." in told.stderr


@pytest.mark.node
def test_ctrl_c_keeps_what_was_found(
    service: Running, sets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, _ = sets
    real, asked = evaluating.rank, []

    def rank(*given: Any, **more: Any) -> Any:
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(evaluating, "rank", rank)
    told = tune(service, tmp_path, str(news), "--trials", "30", "--json")
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)
    assert (found["interrupted"], 1 <= found["trials"] < 30) == (True, True)


def test_wrong_use_is_told(tmp_path: Path) -> None:
    run = CliRunner()
    for options, said in (
        (["--only", "windows"], "'windows' is none of"),
        (["--metric", "speed"], "'speed' is none of"),
        (["--store", "x"], "--into COLLECTION"),
    ):
        told = run.invoke(cli.app, ["tune", str(tmp_path), *options], env={"COLUMNS": "200"})
        assert (told.exit_code, said in told.output) == (2, True), told.output
