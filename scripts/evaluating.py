"""Own `halflife evaluate`: a judged set asked of the running service, under one ranking profile or several.

Everything goes over HTTP, so that what is judged is what callers get. A set's documents are loaded into a collection
of their own, named after their content, and once only. Reads no settings and prints nothing.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from app.asking import Search
from app.values import DEFAULT_WINDOW, check_collection
from scripts import metrics, sources
from scripts.client import ApiProblem, Client, persist
from scripts.judged import Corpus, JudgedSet, Question
from scripts.loading import Failure as LoadFailure
from scripts.loading import Loader, Tally

DEPTH: Final = 100
"""Hits of each question that are read: recall and average precision look this far."""
BATCH: Final = 16
PATIENCE_S: Final = 120.0
_TIMEOUT_MS: Final = 60_000
_GIVEN: Final = (
    "collection",
    "query",
    "queries",
    "query_vector",
    "top_k",
    "as_of",
    "cursor",
    "fields",
    "paging",
)

Json = dict[str, Any]
Report = Callable[[str], None]

BUILT_IN: Final[Mapping[str, Json]] = {
    "default": {},
    "off": {"decay": "off"},
    # What a route finds by itself, as the field's tables mean it: by words or by vectors, and not by time.
    "text": {"routes": [{"kind": "text"}], "decay": "off"},
    "vector": {"routes": [{"kind": "vector"}], "decay": "off"},
    "linear": {"fusion": {"method": "linear"}},
}
"""Profiles that need no file."""


class BadProfile(Exception):
    """A profile can't be read or is no search; the message names the field."""


class EvaluationFailed(Exception):
    """A question could not be answered, so that there is nothing to judge."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A named way to rank: the fields of a search request, without the question."""

    name: str
    options: Mapping[str, Any]

    @property
    def depth(self) -> int:
        """The hits that one page under this profile can hold, at most `DEPTH`."""
        fusion = self.options.get("fusion") or {}
        return min(DEPTH, fusion.get("window") or DEFAULT_WINDOW)


@dataclass(frozen=True, slots=True)
class Judged:
    """What one profile made of a set: each question's ranking (ids, best first) and its figures."""

    profile: Profile
    rankings: Mapping[str, Sequence[str]]
    figures: Mapping[str, metrics.Figures]

    def mean(self, questions: Sequence[Question] | None = None) -> metrics.Figures:
        """Return the mean figures, of these questions or of all."""
        if questions is None:
            return metrics.mean(self.figures)
        return metrics.mean({question.id: self.figures[question.id] for question in questions})


@dataclass(frozen=True, slots=True)
class Failure:
    """A question that went badly: the best document that its page lacks, and the service's account of why."""

    question: Question
    figure: float
    missing: str
    first: str | None
    account: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation, whole. `comparisons` holds each further profile's differences from the first."""

    judged_set: JudgedSet
    collection: str
    top_k: int
    as_of: str | None
    results: Sequence[Judged]
    comparisons: Mapping[str, Sequence[metrics.Difference]] = field(default_factory=dict)
    failures: Sequence[Failure] = ()

    @property
    def kinds(self) -> Mapping[str, Sequence[Question]]:
        """The questions of each kind, where the set has kinds."""
        found: dict[str, list[Question]] = {}
        for question in self.judged_set.questions:
            if question.kind is not None:
                found.setdefault(question.kind, []).append(question)
        return found if len(found) > 1 else {}


# ---- profiles -------------------------------------------------------------------------------------------------------


def read_profile(given: str, *, decay: Any = None) -> Profile:
    """Return the profile that a text names: NAME, FILE.json, JSON, or NAME=FILE.json and NAME=JSON.

    A name is one of `BUILT_IN`, else one of the collection's own profiles.

    `decay` is the decay of a profile that says nothing of decay. Raises BadProfile.
    """
    name, options = _options(given.strip())
    if not isinstance(options, dict):
        raise BadProfile(
            f"the profile {name} is no JSON object, such as {{'decay': {{'half_life': '180d'}}}}"
        )
    for field_name in _GIVEN:
        if field_name in options:
            raise BadProfile(
                f"the profile {name} holds `{field_name}`, which the evaluation sets: a profile is how to rank, "
                "such as `routes`, `fusion`, `decay`, `rerank`, `dedup`, `mmr`"
            )
    if decay is not None:
        options = {"decay": decay, **options}
    try:
        Search(collection="x", query="x", **options)
    except ValidationError as cause:
        fault = cause.errors()[0]
        where = ".".join(str(part) for part in fault["loc"] if not str(part).startswith("_"))
        raise BadProfile(f"the profile {name} is no search: {where or 'it'}: {fault['msg']}") from cause
    return Profile(name, options)


def _options(given: str) -> tuple[str, Any]:
    if given.startswith("{"):
        return _compact(given), _parse(given, given[:40])
    name, equals, rest = given.partition("=")
    name, rest = name.strip(), rest.strip()
    if equals:
        return name, _parse(rest, name) if rest.startswith("{") else _from_file(Path(rest))
    if given in BUILT_IN:
        return given, dict(BUILT_IN[given])
    path = Path(given)
    if path.suffix == ".json" or path.is_file():
        return path.stem, _from_file(path)
    # What else is a name is one that the collection itself holds; the service says if it does not.
    return given, {"profile": given}


def _from_file(path: Path) -> Any:
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as cause:
        raise BadProfile(f"{path} can't be read: {cause}") from cause


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise BadProfile(f"the profile {name} is not JSON: {cause}") from cause


def _compact(text: str) -> str:
    return re.sub(r"[\s\"{}]", "", text)[:40] or "default"


def distinct(profiles: Sequence[Profile]) -> list[Profile]:
    """Return the profiles with names that differ, numbered from the second of a name on."""
    taken: set[str] = set()
    named = []
    for profile in profiles:
        name, number = profile.name, 2
        while name in taken:
            name, number = f"{profile.name} {number}", number + 1
        taken.add(name)
        named.append(Profile(name, profile.options))
    return named


# ---- the collection -------------------------------------------------------------------------------------------------


def collection_name(judged_set: JudgedSet) -> str:
    """Return the name of the set's own collection: the same documents get the same, others another."""
    if judged_set.corpus is None:
        raise EvaluationFailed(
            f"the set {judged_set.name} has no corpus.jsonl: name the collection that holds its documents"
        )
    word = re.sub(r"[^a-z0-9]+", "_", judged_set.name.lower()).strip("_")[:60] or "set"
    return check_collection(f"eval-{word}-{judged_set.corpus.digest[:10]}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a set's documents. `lost` counts those that could not be stored though they can be read."""

    tally: Tally
    lost: int = 0
    first: LoadFailure | None = None

    @property
    def told(self) -> str:
        """How many documents are lost, and why the first one is."""
        reason = "" if self.first is None else f": {self.first.where}: {self.first.reason}"
        return f"{self.lost} document{'s' if self.lost != 1 else ''} could not be stored{reason}"


def ensure_loaded(
    client: Client,
    collection: str,
    corpus: Corpus | None,
    *,
    keep: bool,
    progress: Callable[[Tally], None] = lambda tally: None,
    report: Report = lambda line: None,
) -> Loaded | None:
    """Load the documents unless they are there, and return what became of them; None where nothing was to do.

    Complete is a collection that holds as many documents as the corpus has usable ones. An incomplete one is loaded
    again: the service embeds nothing that it holds already. `keep` says that the collection is the caller's own and
    is taken as it is if it exists.
    """
    held = client.count(collection)
    if held is not None and (keep or corpus is None or held == len(corpus.ids)):
        return None
    if corpus is None:
        raise EvaluationFailed(f"there is no collection '{collection}' and no corpus.jsonl to load into it")
    report(f"Loading {len(corpus.ids)} documents into '{collection}'.")
    lost: list[LoadFailure] = []

    def count(failure: LoadFailure) -> None:
        # What is empty or unreadable was no document before either.
        if failure.where not in corpus.unusable:
            lost.append(failure)

    loader = Loader(client, collection, progress=progress, report=report, on_failure=count)
    source = sources.Source(corpus.path, corpus.path.name, corpus.path.stat().st_size, lines=True)
    tally = loader.load([source], corpus.names)
    if not tally.stored:
        first = tally.failures[0].reason if tally.failures else "no document was read"
        raise EvaluationFailed(f"no document could be stored: {first}")
    return Loaded(tally, len(lost), lost[0] if lost else None)


# ---- asking ---------------------------------------------------------------------------------------------------------


def rank(
    client: Client,
    collection: str,
    profile: Profile,
    questions: Sequence[Question],
    *,
    as_of: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
    report: Report = lambda line: None,
) -> dict[str, list[str]]:
    """Return the ids that each question finds, best first. `as_of` is the origin of those that name none.

    Raises EvaluationFailed if one can't be answered whole: a degraded answer would be judged as a bad ranking.
    """
    found: dict[str, list[str]] = {}
    size, start = BATCH, 0
    while start < len(questions):
        batch = questions[start : start + size]
        body = {**_shared(collection, profile), "queries": [_asked(question, as_of) for question in batch]}
        try:
            answers = _whole(client, body, report)
        except ApiProblem as problem:
            if problem.status != HTTPStatus.GATEWAY_TIMEOUT or size == 1:
                raise
            # One request has one time budget, however many questions it asks.
            size //= 2
            report(f"{problem.detail.splitlines()[0]}; going on with {size} questions at once")
            continue
        start += len(batch)
        for question, answer in zip(batch, answers, strict=True):
            if "hits" not in answer:
                raise EvaluationFailed(f"question {question.id}: {answer.get('detail', 'no answer')}")
            if answer.get("degraded"):
                raise EvaluationFailed(f"question {question.id} got a degraded answer: {answer['warnings']}")
            found[question.id] = list(dict.fromkeys(hit["id"] for hit in answer["hits"]))
        progress(len(found))
    return found


def _whole(client: Client, body: Json, report: Report) -> list[Json]:
    def ask() -> list[Json]:
        answers: list[Json] = client.search(body)["results"]
        for answer in answers:
            # A part that is overloaded for a moment spoils single answers of a batch.
            if "hits" not in answer and answer.get("status") in {429, 503, HTTPStatus.GATEWAY_TIMEOUT}:
                raise ApiProblem(answer["status"], answer, None)
        return answers

    return persist(ask, within_s=PATIENCE_S, told=report)


def _shared(collection: str, profile: Profile) -> Json:
    fixed = {"collection": collection, "top_k": profile.depth, "paging": False, "fields": []}
    return {"strict": True, "timeout_ms": _TIMEOUT_MS, **profile.options, **fixed}


def _asked(question: Question, as_of: str | None) -> Json:
    asked: Json = {"query": question.text}
    if moment := question.as_of or as_of:
        asked["as_of"] = moment
    if question.filter:
        asked["filter"] = dict(question.filter)
    return asked


# ---- judging --------------------------------------------------------------------------------------------------------


def evaluate(
    client: Client,
    judged_set: JudgedSet,
    profiles: Sequence[Profile],
    *,
    collection: str,
    top_k: int = 10,
    as_of: str | None = None,
    explained: int = 0,
    progress: Callable[[str, int], None] = lambda name, done: None,
    report: Report = lambda line: None,
) -> Evaluation:
    """Return the figures of each profile over the set's questions, the first compared with the others.

    `explained` so many of the first profile's worst questions are accounted for by the service.
    """
    results = []
    for profile in profiles:
        if profile.depth < top_k:
            raise BadProfile(
                f"the profile {profile.name} has a window of {profile.depth}, less than {top_k} hits"
            )
        rankings = rank(
            client, collection, profile, judged_set.questions, as_of=as_of, report=report,
            progress=lambda done, name=profile.name: progress(name, done),  # type: ignore[misc]
        )  # fmt: skip
        figures = metrics.judge(judged_set.questions, rankings, top_k=top_k, depth=DEPTH)
        results.append(Judged(profile, rankings, figures))
    told = metrics.names(top_k, DEPTH)
    return Evaluation(
        judged_set=judged_set,
        collection=collection,
        top_k=top_k,
        as_of=as_of,
        results=results,
        comparisons={
            other.profile.name: metrics.compare(results[0].figures, other.figures, told)
            for other in results[1:]
        },
        failures=_failures(client, judged_set, results[0], collection, top_k, as_of, explained, report),
    )


def _failures(
    client: Client,
    judged_set: JudgedSet,
    judged: Judged,
    collection: str,
    top_k: int,
    as_of: str | None,
    count: int,
    report: Report,
) -> list[Failure]:
    figure = f"{metrics.NDCG}@{top_k}"
    found: list[Failure] = []
    worst = sorted(judged_set.questions, key=lambda question: judged.figures[question.id][figure])
    for question in worst:
        if len(found) == count:
            break
        page = list(judged.rankings[question.id][:top_k])
        missing = lacking(question, page)
        if missing is None:
            continue
        request = {
            **judged.profile.options, **_asked(question, as_of),
            "collection": collection, "top_k": top_k, "timeout_ms": _TIMEOUT_MS, "id": missing,
        }  # fmt: skip
        account = persist(lambda request=request: client.why(request), within_s=PATIENCE_S, told=report)  # type: ignore[misc]
        found.append(
            Failure(
                question, judged.figures[question.id][figure], missing, page[0] if page else None, account
            )
        )
    return found


def lacking(question: Question, page: Sequence[str]) -> str | None:
    """Return the judged document that should stand higher: of the best that none is shown, else that none is first.

    Where the first hit is of the best, one that the page lacks altogether; None where the page lacks nothing.
    """
    ranked = sorted(
        (name for name, grade in question.grades.items() if grade), key=lambda name: -question.grades[name]
    )
    best = [name for name in ranked if question.grades[name] == question.grades[ranked[0]]]
    shown = [name for name in page if name in best]
    if not shown:
        return best[0]
    if page[0] != shown[0]:
        return shown[0]
    return next((name for name in ranked if name not in page), None)


# ---- telling --------------------------------------------------------------------------------------------------------


def to_json(evaluation: Evaluation) -> Json:
    """Return the evaluation as `--json` prints it: the first profile's figures on top, all profiles' below."""
    judged_set, results = evaluation.judged_set, evaluation.results
    told: Json = {
        **_rounded(results[0].mean()),
        "set": judged_set.name,
        "collection": evaluation.collection,
        "qrels": judged_set.qrels.name,
        "queries": len(judged_set.questions),
        "pairs": sum(bool(question.current) for question in judged_set.questions),
        "as_of": evaluation.as_of,
        "profiles": {result.profile.name: _profile_json(evaluation, result) for result in results},
        "notes": list(judged_set.notes),
    }
    if evaluation.comparisons:
        told["comparisons"] = {
            name: {
                difference.figure: {
                    "difference": round(difference.mean, 6),
                    "better": difference.better,
                    "worse": difference.worse,
                    "same": difference.same,
                    "p": difference.p,
                }
                for difference in differences
            }
            for name, differences in evaluation.comparisons.items()
        }
    if evaluation.failures:
        told["failures"] = [
            {
                "id": failure.question.id,
                "query": failure.question.text,
                f"{metrics.NDCG}@{evaluation.top_k}": round(failure.figure, 6),
                "missing": failure.missing,
                "first": failure.first,
                "why": failure.account,
            }
            for failure in evaluation.failures
        ]
    return told


def _profile_json(evaluation: Evaluation, result: Judged) -> Json:
    told: Json = {**_rounded(result.mean()), "options": dict(result.profile.options)}
    if evaluation.kinds:
        told["kinds"] = {
            kind: {**_rounded(result.mean(questions)), "queries": len(questions)}
            for kind, questions in evaluation.kinds.items()
        }
    return told


def _rounded(figures: Mapping[str, float]) -> Json:
    return {name: round(value, 6) for name, value in figures.items()}


def per_query(evaluation: Evaluation) -> Iterator[Json]:
    """Yield one object for each profile and question: its figures, what stood first, where the best document stood."""
    for result in evaluation.results:
        for question in evaluation.judged_set.questions:
            ids = result.rankings[question.id]
            best = max(question.grades.values())
            place = next((at for at, name in enumerate(ids, 1) if question.grades.get(name) == best), None)
            yield {
                "profile": result.profile.name,
                "id": question.id,
                "kind": question.kind,
                "query": question.text,
                **_rounded(result.figures[question.id]),
                "rank_of_best": place,
                "first": ids[0] if ids else None,
            }
