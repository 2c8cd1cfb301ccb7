"""Own `halflife tune`: the space of ranking profiles, the search through it, and whether its best is worth taking.

Every trial is ranked by the running service, on the training questions, by the same code as `halflife evaluate`; what
is proposed is judged once more on questions that the search never saw. The optimiser is Optuna's. Prints nothing.
"""

import fcntl
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self, get_args

import numpy as np
from pydantic import ValidationError

from app.asking import Search
from app.queries import DEFAULT_FRESH_MS, TITLE_BOOST
from app.ranking import Decay, Fusion, Profile, Route
from app.times import DAY_MS
from scripts import evaluating, metrics
from scripts.client import Client
from scripts.judged import JudgedSet, Question

if TYPE_CHECKING:
    import optuna

GROUPS: Final = ("fusion", "routes", "decay", "fresh")
"""What can be searched: how lists become one; the routes' weights and the title's; age; routes within a date window."""
STARTUP: Final = 10
"""Trials drawn at random before the optimiser learns from them."""
RESAMPLES: Final = 2000
CHANCE: Final = 0.05
"""Chance of such a gain by luck from which it is called one that may be."""
LEAST_QUESTIONS: Final = 4
FEW_QUESTIONS: Final = 25
"""Held-out questions below which nothing is sure: with a spread of .25 of nDCG among questions, chance alone moves the mean
of 25 by 1.96 · .25 / √25 = .1 either way."""
_CAN_BE_OFF: Final = ("min_relevance", "rerank", "dedup", "mmr")
"""Stages that a search takes off by 'off' or null, where a profile would give them."""
_SPACE: Final = 3
"""Raised whenever the space changes, so that no search goes on from figures of another."""

Json = dict[str, Any]
Values = Mapping[str, float]


class CannotTune(Exception):
    """The search can't run as asked; the message says why and what to do."""


# ---- the space ------------------------------------------------------------------------------------------------------


def _accepts(decay: Any) -> bool:
    try:
        Search(collection="x", query="x", decay=decay)
    except ValidationError:
        return False
    return True


def fusions() -> tuple[str, ...]:
    """Return the fusion methods to choose from, the linear one once for each normaliser."""
    known = get_args(Fusion.model_fields["method"].annotation)
    found: list[str] = []
    for method in known:
        if method == "linear":
            found += ["linear zscore", "linear minmax"]
        elif method != "additive":
            # That one is an agent's memory's: it needs salience, which judged sets lack.
            found.append(method)
    return tuple(found)


def decays(options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return where age may act: nowhere, where the service decides, in each route, after fusion.

    Under a profile of additive fusion, which adds recency, it must act.
    """
    fusion = (options or {}).get("fusion") or {}
    if fusion.get("method") == "additive":
        return ("route", "fused")
    return ("off", *(["auto"] if _accepts("auto") else []), "route", "fused")


def suggest(trial: "optuna.Trial", start: Mapping[str, Any], groups: Sequence[str]) -> Json:
    """Return the options of a profile, drawn by the trial where a group is searched, the start's elsewhere.

    Parameters: `fusion`, `rank_constant` 5 to 200, `window`; `vector_share` of the two weights, 0.05 to 0.95, and
    `title_boost` 0 to 4, a word's weight in the title against one in the text; `decay`,
    `kind`, `half_life_days` 7 to 3650, `text_floor` and `fused_floor` 0 to 0.95, `vector_loss` (1 - the vector routes'
    floor) 0.002 to 0.5; `fresh`, `fresh_days` 7 to 730, `fresh_weight` 0.1 to 1. Parameters that stand for nothing in a
    profile are not drawn for it. Routes within a date window belong to `fresh` alone, weights and all. What only 'auto'
    can do (`fold_superseded`) is left out where another decay is drawn.
    """
    options: Json = json.loads(json.dumps(dict(start)))
    if "fusion" in groups:
        options["fusion"] = _suggest_fusion(trial)
    routes: list[Json] = options.get("routes") or _default_routes()
    if "fresh" in groups:
        routes = [route for route in routes if not _is_fresh(route)] or _default_routes()
    if "routes" in groups:
        share = trial.suggest_float("vector_share", 0.05, 0.95, step=0.05)
        boost = round(trial.suggest_float("title_boost", 0.0, 4.0, step=0.25), 2)
        for route in routes:
            if _is_fresh(route):
                continue
            vector = route["kind"].endswith("vector")
            route["weight"] = round(2 * (share if vector else 1 - share), 2)
            if not vector:
                route["title_boost"] = boost
    if "fresh" in groups:
        routes += _suggest_fresh(trial)
    if "decay" in groups:
        options["decay"] = _suggest_decay(trial, routes, decays(options))
        if options["decay"] != "auto":
            options.pop("fold_superseded", None)
    if "routes" in options or routes != _default_routes():
        options["routes"] = routes
    return options


def _default_routes() -> list[Json]:
    return [{"kind": "text"}, {"kind": "vector"}]


def _is_fresh(route: Mapping[str, Any]) -> bool:
    return str(route["kind"]).startswith("fresh_")


def _suggest_fusion(trial: "optuna.Trial") -> Json:
    method, _, normalizer = trial.suggest_categorical("fusion", fusions()).partition(" ")
    fusion: Json = {"method": method}
    if normalizer:
        fusion["normalizer"] = normalizer
    if method == "rrf":
        fusion["rank_constant"] = trial.suggest_int("rank_constant", 5, 200, log=True)
    fusion["window"] = trial.suggest_categorical("window", (50, 100, 200))
    return fusion


def _suggest_fresh(trial: "optuna.Trial") -> list[Json]:
    chosen = trial.suggest_categorical("fresh", ("none", "text", "vector", "both"))
    if chosen == "none":
        return []
    days = trial.suggest_int("fresh_days", 7, 730, log=True)
    weight = trial.suggest_float("fresh_weight", 0.1, 1.0, step=0.1)
    kinds = ("text", "vector") if chosen == "both" else (chosen,)
    return [{"kind": f"fresh_{kind}", "window": f"{days}d", "weight": round(weight, 2)} for kind in kinds]


def _suggest_decay(trial: "optuna.Trial", routes: list[Json], placements: Sequence[str]) -> Json | str:
    placement = trial.suggest_categorical("decay", placements)
    for route in routes:
        route.pop("decay", None)
    if placement not in ("route", "fused"):
        return placement
    decay: Json = {
        "kind": trial.suggest_categorical("kind", ("exp", "gauss", "linear")),
        "half_life": f"{trial.suggest_int('half_life_days', 7, 3650, log=True)}d",
        "placement": placement,
    }
    floor = trial.suggest_float("fused_floor" if placement == "fused" else "text_floor", 0.0, 0.95, step=0.05)
    decay["floor"] = round(floor, 2)
    if placement == "route":
        # Cosines crowd into a narrow band, so what matters there is how little of them age may take.
        loss = trial.suggest_float("vector_loss", 0.002, 0.5, log=True)
        for route in routes:
            if route["kind"].endswith("vector"):
                route["decay"] = {"floor": round(1 - loss, 3)}
    return decay


def parameters_of(options: Mapping[str, Any], groups: Sequence[str]) -> Json:
    """Return the parameters that stand for a profile, or for what is nearest to it in the space."""
    found: Json = {}
    routes = options.get("routes") or _default_routes()
    if "fusion" in groups:
        fusion = Fusion.model_validate(options.get("fusion") or {})
        named = f"linear {fusion.normalizer or 'zscore'}" if fusion.method == "linear" else fusion.method
        if named in fusions():
            found["fusion"] = named
        if fusion.method == "rrf":
            found["rank_constant"] = int(min(200, max(5, fusion.rank_constant)))
        found["window"] = min((50, 100, 200), key=lambda size: abs(size - (fusion.window or 100)))
    if "routes" in groups:
        weights = {"text": 0.0, "vector": 0.0}
        for route in routes:
            if route["kind"] in weights:
                weights[route["kind"]] += route.get("weight", 1.0)
        share = weights["vector"] / (sum(weights.values()) or 1.0)
        found["vector_share"] = min(0.95, max(0.05, round(share * 20) / 20))
        boosts = [route.get("title_boost") for route in routes if route["kind"] == "text"]
        boost = next((each for each in boosts if each is not None), TITLE_BOOST)
        found["title_boost"] = min(4.0, max(0.0, round(boost * 4) / 4))
    if "fresh" in groups:
        fresh = [route for route in routes if _is_fresh(route)]
        kinds = {route["kind"].removeprefix("fresh_") for route in fresh}
        found["fresh"] = "both" if len(kinds) == 2 else next(iter(kinds), "none")
        if fresh:
            days = (Route.model_validate(fresh[0]).window or DEFAULT_FRESH_MS) / DAY_MS
            found["fresh_days"] = min(730, max(7, round(days)))
            found["fresh_weight"] = min(1.0, max(0.1, round(fresh[0].get("weight", 1.0), 1)))
    if "decay" in groups:
        found |= _decay_parameters(options.get("decay"), routes)
    return found


def _decay_parameters(given: Any, routes: Sequence[Mapping[str, Any]]) -> Json:
    if not isinstance(given, dict):
        return {"decay": given or ("auto" if "auto" in decays() else "off")}
    decay = Decay.model_validate(given)
    found: Json = {"decay": decay.placement, "kind": decay.kind or "exp"}
    if decay.half_life is not None:
        found["half_life_days"] = min(3650, max(7, round(decay.half_life / DAY_MS)))
    floor = 0.5 if decay.floor is None else decay.floor
    found["fused_floor" if decay.placement == "fused" else "text_floor"] = min(
        0.95, max(0.0, round(floor * 20) / 20)
    )
    if decay.placement == "route":
        own = [(route.get("decay") or {}) for route in routes if route["kind"].endswith("vector")]
        floors = [each["floor"] for each in own if isinstance(each, dict) and "floor" in each]
        held = floors[0] if floors else 0.98 if decay.floor is None else decay.floor
        found["vector_loss"] = min(0.5, max(0.002, 1 - held))
    return found


def storable(options: Mapping[str, Any]) -> Profile:
    """Return the profile as a collection stores it. Raises CannotTune for what only a request can hold."""
    more = sorted(set(options) - set(Profile.model_fields))
    if more:
        raise CannotTune(
            f"a stored profile can't hold `{more[0]}`: drop it from the profile that the search starts from"
        )
    try:
        return Profile.model_validate(dict(options))
    except ValidationError as cause:
        fault = cause.errors()[0]
        where = ".".join(str(part) for part in fault["loc"] if not str(part).startswith("_"))
        raise CannotTune(f"the profile can't be stored: {where or 'it'}: {fault['msg']}") from cause


def settled(
    given: Mapping[str, Any], *, base: Mapping[str, Any], default: Mapping[str, Any] | None = None
) -> Json:
    """Return the options with what they leave open written out, so that they rank alike wherever they are asked or stored.

    `base` is the profile that fills them, as the service does it; `default` the collection's default profile where that is
    another: it fills each trial, which names no profile, and so is ruled out. Raises CannotTune where that can't be said.
    """
    given = {
        name: None if value == "off" and name in _CAN_BE_OFF else value
        for name, value in given.items()
        if value is not None or name in _CAN_BE_OFF
    }
    options: Json = {**base, **given}
    if given.get("rerank") is not None or given.get("mmr") is not None:
        # One of them orders the head: the one that was given.
        options = {name: options[name] for name in options if name not in ("rerank", "mmr") or name in given}
    routes = options.get("routes") or ()
    if "decay" in given and isinstance(given["decay"], str) and "routes" not in given and routes:
        options["routes"] = [
            {name: value for name, value in route.items() if name != "decay"} for route in routes
        ]
    elif "decay" not in given and isinstance(options.get("decay"), str) and _decays_by_itself(routes):
        del options["decay"]
    if options.get("fold_superseded") and options.get("decay") not in (None, "auto"):
        del options["fold_superseded"]
    for name in default or ():
        if name not in options:
            options |= _ruled_out(name, options, default or {})
    return options


def _decays_by_itself(routes: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(route.get("decay"), Mapping) for route in routes)


def _ruled_out(name: str, options: Mapping[str, Any], default: Mapping[str, Any]) -> Json:
    """Return what says of an option that a collection's default profile shall not give it."""
    if name == "routes":
        return {name: _default_routes()}
    if name == "fusion":
        return {name: {}}
    if name == "feedback":
        return {name: "off"}
    if name == "fold_superseded":
        return {name: False}
    if name != "decay":
        return {name: None}
    additive = (options.get("fusion") or {}).get("method") == "additive"
    if not additive and not _decays_by_itself(options.get("routes") or ()):
        return {name: "auto"}
    if isinstance(default[name], str) and not additive:
        # Routes that decay by themselves overrule a mere word.
        return {}
    raise CannotTune(
        "the collection's default profile has a decay, which would fill the one that the profile leaves out: give it `decay`"
    )


# ---- the sets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A judged set in its role: to gain on, or (guard) not to lose on. The two lists of questions share none."""

    name: str
    judged_set: JudgedSet
    collection: str
    guard: bool
    training: tuple[Question, ...]
    held_out: tuple[Question, ...]


def split(
    questions: Sequence[Question], *, held_out: float, seed: int
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Return training and held-out questions, drawn by the seed, in their order; equal texts stay on one side.

    Raises CannotTune where there are too few.
    """
    texts = sorted({_text(question) for question in questions})
    if len(texts) < LEAST_QUESTIONS:
        raise CannotTune(
            f"{len(texts)} different questions are too few to hold some out: {LEAST_QUESTIONS} are needed at least"
        )
    count = min(len(texts) - 2, max(2, round(len(texts) * held_out)))
    kept = set(random.Random(seed).sample(texts, count))  # noqa: S311 - a fixed draw is wanted
    training = tuple(question for question in questions if _text(question) not in kept)
    return training, tuple(question for question in questions if _text(question) in kept)


def _text(question: Question) -> str:
    return " ".join(question.text.casefold().split())


# ---- one search -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched: from where, on which sets, for which figure, within which bound on what guards may lose."""

    parts: tuple[Part, ...]
    start: evaluating.Profile
    metric: str
    max_loss: float
    groups: tuple[str, ...] = GROUPS
    top_k: int = 10
    as_of: str | None = None
    seed: int = 7

    @property
    def targets(self) -> tuple[Part, ...]:
        """The sets to gain on."""
        return tuple(part for part in self.parts if not part.guard)

    @property
    def guards(self) -> tuple[Part, ...]:
        """The sets not to lose on."""
        return tuple(part for part in self.parts if part.guard)

    def digest(self) -> str:
        """Return what names the search: equal tasks go on from each other's trials.

        A question counts with all that is known of it: figures of other judgements can't be compared.
        """
        told = [
            _SPACE,
            [
                [part.name, part.collection, part.guard, [asdict(question) for question in part.training],
                 [asdict(question) for question in part.held_out]]
                for part in self.parts
            ],
            dict(self.start.options), self.metric, self.max_loss, list(self.groups), self.top_k, self.as_of, self.seed,
            list(fusions()), list(decays()),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Trial:
    """One profile and what it came to on the training questions, against the start.

    `gain` is the mean over the targets of the metric's mean difference; `losses` are each guard's mean loss (negative:
    a gain). `values` holds each set's metric, question by question in the order of `Part.training`.
    """

    number: int
    options: Mapping[str, Any]
    parameters: Mapping[str, Any]
    gain: float
    losses: Mapping[str, float]
    values: Mapping[str, Sequence[float]]
    seconds: float

    def within(self, max_loss: float) -> bool:
        """Tell whether no guard loses more."""
        return all(loss <= max_loss + 1e-9 for loss in self.losses.values())


@dataclass(frozen=True, slots=True)
class Gain:
    """A mean difference over sets of questions: its 95 % interval by resampling questions, and the chance of one at
    least as far from 0 if the two were alike (sign-flip test); None where no question differs.
    """

    mean: float
    low: float
    high: float
    p: float | None


@dataclass(frozen=True, slots=True)
class SetResult:
    """What start and best came to on one set and one list of questions, and their paired differences.

    `judged` of the `questions` have the metric that counts on the set: of currency, those with pairs.
    """

    part: Part
    questions: int
    judged: int
    start: metrics.Figures
    best: metrics.Figures
    differences: Sequence[metrics.Difference]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A search's end: the best trial on the training questions, how it did on the others, and whether to take it."""

    task: Task
    trials: Sequence[Trial]
    best: Trial
    training: Sequence[SetResult]
    held_out: Sequence[SetResult]
    gain: Gain
    take: bool
    reason: str
    confidence: Mapping[str, Any] = field(default_factory=dict)
    importance: Mapping[str, float] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def advice(self) -> str:
        """What to do, in two or three words. A gain that chance explains is no reason to change anything yet."""
        if not self.take:
            return "Keep what you have"
        sure = self.gain.p is not None and self.gain.p < CHANCE
        return "Take it" if sure and judged_of(self.held_out) >= FEW_QUESTIONS else "Undecided"


class Tuner:
    """Runs one task's trials on the service and remembers them in a file, so that a search can be stopped and resumed."""

    def __init__(
        self,
        client: Client,
        task: Task,
        journal: Path,
        *,
        fresh: bool = False,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Open or begin the search; `fresh` forgets what earlier runs left. Close it, or use `with`.

        Raises CannotTune where Optuna is missing or another process runs the same search.
        """
        try:
            import optuna
        except ModuleNotFoundError as cause:
            raise CannotTune("tuning needs the package optuna: install `halflife[evaluate]`") from cause
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.client, self.task, self.report = client, task, report
        journal.parent.mkdir(parents=True, exist_ok=True)
        self._held = _hold(journal.with_suffix(".running"))
        try:
            if fresh:
                journal.unlink(missing_ok=True)
            self._open(journal)
        except BaseException:
            self.close()
            raise
        self._start: dict[str, dict[str, metrics.Figures]] = {}
        self._seen: dict[str, Json] = {}
        self._pairs: dict[str, tuple[list[float], list[float]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process run the search."""
        self._held.close()

    def _open(self, journal: Path) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        task = self.task
        # Links need a file system that has them; this lock works on all, and one that was left behind expires.
        lock = JournalFileOpenLock(str(journal))
        storage = JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))
        known = optuna.get_all_study_names(storage)
        name = task.digest()
        done = len(optuna.load_study(study_name=name, storage=storage).trials) if name in known else 0
        self.study = optuna.create_study(
            study_name=name,
            storage=storage,
            direction="maximize",
            load_if_exists=True,
            # Another seed for each beginning: a search that goes on must not draw its first trials again.
            sampler=optuna.samplers.TPESampler(
                seed=task.seed + done, n_startup_trials=STARTUP, multivariate=False
            ),
        )
        for trial in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            # An earlier run's, which was killed: nobody else runs this search now.
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    # -- trials

    def trials(self) -> list[Trial]:
        """Return the finished trials, in their order."""
        import optuna

        return [
            Trial(
                number=found.number,
                options=found.user_attrs["options"],
                parameters=dict(found.params),
                gain=float(found.value or 0.0),
                losses=found.user_attrs["losses"],
                values=found.user_attrs["values"],
                seconds=found.user_attrs["seconds"],
            )
            for found in self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        ]

    def search(
        self,
        *,
        trials: int,
        seconds: float | None = None,
        told: Callable[[Trial, int], None] = lambda trial, done: None,
    ) -> bool:
        """Run trials until there are so many in all, or time is up; return whether it was interrupted.

        The first is the start itself; one that is begun is finished, unless interrupted.
        """
        import optuna

        begun = time.monotonic()
        held = self.trials()
        if not held:
            self.study.enqueue_trial(parameters_of(self.task.start.options, self.task.groups))
        try:
            self._measure_start(held)
            for trial in held:
                self._seen[_key(trial.options)] = {"losses": trial.losses, "values": trial.values}
            done = len(held)
            while done < trials and (seconds is None or time.monotonic() - begun < seconds):
                asked = self.study.ask()
                try:
                    value = self._try(asked, first=done == 0)
                except BaseException:
                    self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
                    if done == 0:
                        self.study.enqueue_trial(parameters_of(self.task.start.options, self.task.groups))
                    raise
                self.study.tell(asked, value)
                done += 1
                told(self.trials()[-1], done)
        except KeyboardInterrupt:
            if not self.trials():
                raise
            return True
        return False

    def _measure_start(self, held: Sequence[Trial]) -> None:
        for part in self.task.parts:
            self._start[part.name] = self._figures(part, self.task.start, part.training)
        if held:
            before, now = (
                held[0].values,
                {name: self._values(name, each) for name, each in self._start.items()},
            )
            for name, values in now.items():
                # Scores of an approximate vector search may differ by a hit; a ranking that changed, by more.
                if abs(_mean(values) - _mean(before[name])) > 0.002:
                    raise CannotTune(
                        f"the service ranks '{name}' differently than when this search began ({_mean(before[name]):.4f} "
                        f"then, {_mean(values):.4f} now), so its trials can't be compared: begin anew with --fresh"
                    )

    def _try(self, asked: "optuna.Trial", *, first: bool) -> float:
        begun = time.monotonic()
        task = self.task
        options = suggest(asked, task.start.options, task.groups)
        if first:
            options = dict(task.start.options)
        values: dict[str, Sequence[float]] = {}
        known = self._seen.get(_key(options))
        if known is not None:
            values = dict(known["values"])
        else:
            profile = evaluating.Profile(f"trial {asked.number}", options)
            for part in task.parts:
                figures = self._start[part.name] if first else self._figures(part, profile, part.training)
                values[part.name] = self._values(part.name, figures)
        start = {name: self._values(name, figures) for name, figures in self._start.items()}
        losses = {part.name: _mean(start[part.name]) - _mean(values[part.name]) for part in task.guards}
        gains = [_mean(values[part.name]) - _mean(start[part.name]) for part in task.targets]
        for name, loss in losses.items():
            asked.set_constraint(name, loss - task.max_loss)
        asked.set_user_attr("options", options)
        asked.set_user_attr("losses", losses)
        asked.set_user_attr("values", values)
        asked.set_user_attr("seconds", round(time.monotonic() - begun, 2))
        self._seen[_key(options)] = {"losses": losses, "values": values}
        return _mean(gains)

    def _figures(
        self, part: Part, profile: evaluating.Profile, questions: Sequence[Question]
    ) -> dict[str, metrics.Figures]:
        rankings = evaluating.rank(
            self.client, part.collection, profile, questions, as_of=self.task.as_of, report=self.report
        )
        return metrics.judge(questions, rankings, top_k=self.task.top_k, depth=evaluating.DEPTH)

    def _values(self, name: str, figures: Mapping[str, metrics.Figures]) -> list[float]:
        part = next(part for part in self.task.parts if part.name == name)
        metric = metric_of(self.task, part)
        return [
            round(figures[question.id][metric], 6)
            for question in part.training
            if metric in figures[question.id]
        ]

    # -- the end

    def conclude(self, *, interrupted: bool = False) -> Outcome:
        """Judge the best trial on the held-out questions, and say whether it is to be taken."""
        task, trials = self.task, self.trials()
        best = best_of(trials, max_loss=task.max_loss)
        profile = evaluating.Profile("best", best.options)
        training = [self._compare(part, profile, part.training) for part in task.parts]
        held_out = [self._compare(part, profile, part.held_out) for part in task.parts]
        gaps = [
            [after - before for before, after in zip(*pairs, strict=True)]
            for part in task.targets
            if (pairs := self._pairs[part.name])[0]
        ]
        gain = gain_of(gaps, seed=task.seed)
        take, reason = verdict(task, best, gain, held_out)
        return Outcome(
            task=task, trials=trials, best=best, training=training, held_out=held_out, gain=gain, take=take,
            reason=reason, confidence=confidence(task, trials), importance=self._importance(),
            interrupted=interrupted,
        )  # fmt: skip

    def _compare(self, part: Part, profile: evaluating.Profile, questions: Sequence[Question]) -> SetResult:
        training = questions is part.training
        start = self._start[part.name] if training else self._figures(part, self.task.start, questions)
        same = dict(profile.options) == dict(self.task.start.options)
        best = start if same else self._figures(part, profile, questions)
        metric = metric_of(self.task, part)
        ids = [question.id for question in questions if metric in start[question.id]]
        if not training:
            self._pairs[part.name] = (
                [start[name][metric] for name in ids],
                [best[name][metric] for name in ids],
            )
        told = metrics.names(self.task.top_k, evaluating.DEPTH)
        return SetResult(
            part=part,
            questions=len(questions),
            judged=len(ids),
            start=metrics.mean(start),
            best=metrics.mean(best),
            differences=metrics.compare(start, best, told),
        )

    def _importance(self) -> Mapping[str, float]:
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        if len(self.trials()) < STARTUP:
            return {}
        with _quiet():
            try:
                return get_param_importances(self.study, evaluator=PedAnovaImportanceEvaluator())
            except (RuntimeError, ValueError):
                # All trials alike: nothing to tell.
                return {}


def _hold(path: Path) -> IO[str]:
    """Return the file, locked until it is closed or the process ends. Raises CannotTune where another holds it."""
    held = path.open("a", encoding="ascii")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise CannotTune(
            "another `halflife tune` runs this very search: wait for its end, or give another --seed"
        ) from None
    return held


@contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def metric_of(task: Task, part: Part) -> str:
    """Return the figure that counts on a set: the task's, or nDCG on a guard that lacks it on either side of the split."""
    if task.metric == metrics.CURRENCY and not all(map(has_pairs, (part.training, part.held_out))):
        return f"{metrics.NDCG}@{task.top_k}"
    return task.metric


def has_pairs(questions: Sequence[Question]) -> bool:
    """Tell whether any of the questions has current and superseded documents, by which currency is judged."""
    return any(question.current and question.superseded for question in questions)


def best_of(trials: Sequence[Trial], *, max_loss: float) -> Trial:
    """Return the trial of the greatest gain among those within the guards' bound; the first of equals."""
    return max(
        (trial for trial in trials if trial.within(max_loss)), key=lambda trial: (trial.gain, -trial.number)
    )


def verdict(task: Task, best: Trial, gain: Gain, held_out: Sequence[SetResult]) -> tuple[bool, str]:
    """Return whether the best is to be taken, and why (not); where the held-out questions are few, that they are."""
    take, reason = _verdict(task, best, gain, held_out)
    judged = judged_of(held_out)
    if judged < FEW_QUESTIONS:
        with_pairs = " with pairs" if task.metric == metrics.CURRENCY else ""
        reason += f"; {judged} held-out questions{with_pairs} are too few to tell"
    return take, reason


def judged_of(held_out: Sequence[SetResult]) -> int:
    """Return how many held-out questions of the sets to gain on have the metric, and so stand behind the gain."""
    return sum(result.judged for result in held_out if not result.part.guard)


def _verdict(task: Task, best: Trial, gain: Gain, held_out: Sequence[SetResult]) -> tuple[bool, str]:
    if best.number == 0 or best.gain <= 0:
        return False, "nothing that was tried gains on the training questions within the guards' bound"
    lost = []
    for result in held_out:
        if result.part.guard:
            metric = metric_of(task, result.part)
            loss = result.start[metric] - result.best[metric]
            if loss > task.max_loss + 1e-9:
                lost.append(f"{result.part.name} loses {loss:.4f}")
    if lost:
        return False, f"on the held-out questions {', '.join(lost)}, more than the {task.max_loss:g} allowed"
    if gain.mean <= 0:
        return False, f"on the held-out questions it gains nothing ({gain.mean:+.4f})"
    chance = "no question differs" if gain.p is None else f"p = {gain.p:.3f}"
    sure = gain.p is not None and gain.p < CHANCE
    told = (
        f"it gains {gain.mean:+.4f} on the held-out questions ({gain.low:+.4f} to {gain.high:+.4f}, {chance})"
    )
    return (
        True,
        told if sure else f"{told}; that may be chance: judge it on more questions before you rely on it",
    )


def gain_of(gaps: Sequence[Sequence[float]], *, seed: int) -> Gain:
    """Return the mean over sets of their mean differences, with interval and chance; each set counts alike.

    The interval resamples questions within each set; the chance flips the differences' signs.
    """
    lists = [np.asarray(each, dtype=float) for each in gaps]
    mean = _mean([float(each.mean()) for each in lists])
    draw = np.random.default_rng(seed)
    resampled = np.mean(
        [each[draw.integers(0, len(each), (RESAMPLES, len(each)))].mean(axis=1) for each in lists], axis=0
    )
    low, high = (float(value) for value in np.percentile(resampled, [2.5, 97.5]))
    if all(np.abs(each).max() < 1e-12 for each in lists):
        return Gain(mean, low, high, None)
    flipped = np.mean(
        [(each * draw.choice([-1.0, 1.0], (RESAMPLES, len(each)))).mean(axis=1) for each in lists], axis=0
    )
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    return Gain(mean, low, high, (extreme + 1) / (RESAMPLES + 1))


def confidence(task: Task, trials: Sequence[Trial]) -> Json:
    """Return, for each parameter of the best trial, how sure its value is: which trials win where questions are redrawn.

    `share` is how often the winner has the same value, `low` and `high` (numbers) the 10th and 90th percentile of the
    winners' values, `has` how often the winner has the parameter at all.
    """
    best = best_of(trials, max_loss=task.max_loss)
    draw = np.random.default_rng(task.seed)
    gains = np.zeros((len(trials), RESAMPLES))
    allowed = np.ones((len(trials), RESAMPLES), dtype=bool)
    for part in task.parts:
        values = np.asarray([trial.values[part.name] for trial in trials], dtype=float)
        count = values.shape[1]
        if not count:
            continue
        weights = draw.multinomial(count, np.full(count, 1 / count), RESAMPLES).T / count
        difference = (values - values[0]) @ weights
        if part.guard:
            allowed &= -difference <= task.max_loss + 1e-9
        else:
            gains += difference
    winners = np.where(allowed, gains, -np.inf).argmax(axis=0)
    told: Json = {}
    for name, value in best.parameters.items():
        held = [trials[at].parameters[name] for at in winners if name in trials[at].parameters]
        found: Json = {
            "value": value,
            "has": round(len(held) / len(winners), 3),
            "share": round(sum(each == value for each in held) / len(winners), 3),
        }
        if held and not isinstance(value, str):
            found |= {"low": float(np.percentile(held, 10)), "high": float(np.percentile(held, 90))}
        told[name] = found
    return told


def to_json(outcome: Outcome) -> Json:
    """Return the search as `--json` prints it."""
    task = outcome.task
    return {
        "take": outcome.take,
        "reason": outcome.reason,
        "profile": dict(outcome.best.options) if outcome.take else None,
        "best": {
            "trial": outcome.best.number,
            "options": dict(outcome.best.options),
            "training_gain": round(outcome.best.gain, 6),
            "guard_losses": {name: round(loss, 6) for name, loss in outcome.best.losses.items()},
        },
        "held_out_gain": {
            "mean": round(outcome.gain.mean, 6),
            "low": round(outcome.gain.low, 6),
            "high": round(outcome.gain.high, 6),
            "p": outcome.gain.p,
        },
        "metric": task.metric,
        "max_loss": task.max_loss,
        "start": dict(task.start.options),
        "trials": len(outcome.trials),
        "interrupted": outcome.interrupted,
        "sets": {
            result.part.name: {
                "guard": result.part.guard,
                "training": _result(training),
                "held_out": _result(result),
            }
            for training, result in zip(outcome.training, outcome.held_out, strict=True)
        },
        "parameters": dict(outcome.confidence),
        "importance": {name: round(value, 4) for name, value in outcome.importance.items()},
    }


def _result(result: SetResult) -> Json:
    return {
        "queries": result.questions,
        "judged": result.judged,
        "start": {name: round(value, 6) for name, value in result.start.items()},
        "best": {name: round(value, 6) for name, value in result.best.items()},
        "differences": {
            difference.figure: {"difference": round(difference.mean, 6), "p": difference.p}
            for difference in result.differences
        },
    }


def _key(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
