"""Own the command line of `halflife tune`: its options, its help, and how a search's end looks in a terminal.

`register` hands it to the one command line there is. Reads sets and the profile to start from, asks `tuning`, prints.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scripts.client import ApiError, Client, find_url
from scripts.collecting import lean
from scripts.options import (
    DataOption,
    JsonOption,
    KeyOption,
    UrlOption,
    named_collection,
    writable_file,
    write_file,
)
from scripts.stack import data_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scripts.evaluating import Profile
    from scripts.judged import JudgedSet
    from scripts.tuning import Outcome, SetResult, Task, Trial

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]

_FIGURES = ("ndcg", "map", "mrr", "recall", "currency")


def register(command: Register) -> None:
    """Make the command known; `command` is what registers one under a heading."""
    command("Quality")(tune)


def tune(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...", help="Judged sets to gain on.", show_default=False, exists=True, file_okay=False
        ),
    ],
    guard: Annotated[
        list[Path] | None,
        typer.Option(
            "--guard", "-g", metavar="FOLDER", help="A judged set not to lose on; again for each further one.",
            show_default=False, exists=True, file_okay=False,
        ),
    ] = None,
    max_loss: Annotated[
        float, typer.Option("--max-loss", min=0, max=1, metavar="X", help="What each guard may lose, on average.")
    ] = 0.005,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help=f"What to gain in: {', '.join(_FIGURES)}.")
    ] = "ndcg",
    profile: Annotated[
        str,
        typer.Option(
            "--profile", "-p", metavar="NAME|FILE|JSON", help="Where the search starts, and what it must beat."
        ),
    ] = "default",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PART", show_default=False,
            help="Search only fusion, routes (weights), decay or fresh (date windows); again for each. Default: all.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", min=1, metavar="N", help="Trials in all, those of earlier runs included.")
    ] = 60,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1, metavar="S", help="Begin no trial after so long.", show_default=False),
    ] = None,
    queries: Annotated[
        int | None,
        typer.Option("--queries", min=4, metavar="N", help="Questions of each set, drawn by --seed. Default: all.", show_default=False),
    ] = None,
    held_out: Annotated[
        float, typer.Option("--held-out", min=0.1, max=0.9, metavar="X", help="Share of the questions kept from the search.")
    ] = 0.4,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="What all is drawn by.")] = 7,
    qrels: Annotated[
        str | None,
        typer.Option("--qrels", metavar="FILE", help="Judgements to take in the folders that hold such a file.", show_default=False),
    ] = None,
    collection: Annotated[
        str | None,
        typer.Option("--collection", "-c", callback=named_collection, metavar="NAME", show_default=False, help="A collection that holds the first folder's documents. Default: one of the set's own."),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option("--as-of", metavar="DATE", help="The origin of questions that name none. Default: now.", show_default=False),
    ] = None,
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, max=50, metavar="N", help="Hits that the metric looks at.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=writable_file, metavar="FILE", help="Write the profile there, JSON, if it gains.", show_default=False),
    ] = None,
    report_to: Annotated[
        Path | None, typer.Option("--report", callback=writable_file, metavar="FILE", help="Write the report there, HTML with plots.", show_default=False)
    ] = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="NAME", help="Store the profile under this name with the collection, if it gains.", show_default=False),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", callback=named_collection, metavar="COLLECTION", help="Where --store stores it. Default: --collection.", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the trials of earlier runs.")] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:  # fmt: skip
    r"""Search for a ranking profile that suits judged sets, and say whether it is better than what you have.

    Folders are judged sets, as `halflife evaluate` takes them. Those named first are to gain; each --guard is a set that
    may lose --max-loss at most: put there what must not suffer, such as questions about the past when you tune recency.

    Each set's questions are split by --seed. On the training part, trial after trial is ranked by the running service, so
    what is measured is what callers get; an optimiser (Optuna's TPE) chooses the next by what the last ones gave. Trial 0
    is the profile you have. Then the best within the guards' bound is judged once, on the held-out part that no trial saw:
    where it gains nothing there, or a guard loses too much, the answer is to keep what you have.

    \b
    What is searched (--only):
      fusion   the method; rank_constant; window
      routes   how much vectors weigh against words, and titles against texts
      decay    off, in each route or after fusion; kind, half-life, floors of text and vector routes
      fresh    further routes within a date window: which, how far back, their weight

    With --collection, what --profile leaves open is the collection's default profile's, as in a search, and is written out:
    so what is measured is what --store and --out give. A profile named by NAME stands by itself. With --metric currency, a
    guard without pairs of current and superseded documents on either side of the split is judged by nDCG.

    A trial costs one search for each training question: --queries 100 on two sets are 120 searches, a few seconds when
    nothing else runs; the questions are embedded once. --trials and --seconds bound it; Ctrl-C ends the search and judges
    the best so far. The same command goes on where an earlier run stopped (a file in the stack's folder remembers); raise
    --trials to go further.

    \b
    How to read the end:
      gain       mean over the sets to gain on, with a 95 % interval (questions drawn again) and p (signs flipped)
      p > 0.05   may be chance, "Undecided": ask more questions before you rely on it
      few        with less than 25 held-out questions (of currency: with pairs), chance moves nDCG by 0.1 either way:
                 too few to tell, "Undecided"
      --report   plots: each trial's gain, gain against loss, gain against half-life and floors, each set; how sure
                 each parameter is

    \b
    Examples:
      halflife tune sets/rfc --guard sets/news_past --queries 150 --trials 40 --report tune.html
      halflife tune sets/faq -c faq --only decay --metric currency --store recent --out recent.json
      halflife search "…" -c faq --profile recent

    Exit codes: 0 judged, whatever the answer; 1 failed, or some documents could not be stored; 2 wrong usage; 3 nobody answers; 130 interrupted before a trial.
    """
    from scripts import evaluating, tuning
    from scripts.cli import say
    from scripts.judged import UnreadableSet
    from scripts.metrics import LibraryMissing

    groups = _groups(only)
    named = _metric(metric, top_k)
    if store is not None and (into or collection) is None:
        raise typer.BadParameter("say which collection: --into COLLECTION", param_hint="--store")
    if collection is not None and len(folders) + len(guard or ()) > 1:
        say(
            f"'{collection}' holds the documents of {folders[0]}; the other sets get collections of their own."
        )
    folder = data_folder(data)
    try:
        sets = _read([*folders, *(guard or ())], qrels=qrels, queries=queries, seed=seed)
        with Client(find_url(url, data), key=key) as client:
            start = _start(client, profile, collection)
            if store is not None:
                tuning.storable(start.options)
            parts, lost = [], 0
            for at, (name, judged_set) in enumerate(sets):
                own = collection if at == 0 and collection else evaluating.collection_name(judged_set)
                loaded = evaluating.ensure_loaded(
                    client, own, judged_set.corpus, keep=own == collection, report=say
                )
                if loaded is not None and loaded.lost:
                    lost += loaded.lost
                    say(f"'{own}': {loaded.told}")
                if own != collection:
                    _check_own(client, own)
                training, rest = tuning.split(judged_set.questions, held_out=held_out, seed=seed)
                parts.append(tuning.Part(name, judged_set, own, at >= len(folders), training, rest))
            task = tuning.Task(
                parts=tuple(parts), start=start, metric=named, max_loss=max_loss, groups=groups, top_k=top_k,
                as_of=as_of, seed=seed,
            )  # fmt: skip
            _check(task)
            target = str(into or collection)
            if store is not None:
                _held_profiles(client, target)
            journal = folder / "tune" / f"{task.digest()}.journal"
            with tuning.Tuner(client, task, journal, fresh=fresh, report=say) as tuner:
                with _watching(trials, hidden=as_json) as told:
                    interrupted = tuner.search(trials=trials, seconds=seconds, told=told)
                if interrupted:
                    say(
                        "Interrupted: judging the best so far on the held-out questions; again Ctrl-C to leave."
                    )
                found = tuner.conclude(interrupted=interrupted)
            # Whatever happens to what is written: it is told first, since it took long.
            _tell(found, as_json=as_json)
            if found.take and store is not None:
                _store(client, target, store, found.best.options)
    except evaluating.BadProfile as fault:
        raise typer.BadParameter(str(fault), param_hint="--profile") from fault
    except (UnreadableSet, LibraryMissing, evaluating.EvaluationFailed, tuning.CannotTune) as fault:
        raise ApiError(str(fault)) from fault
    written = [f"stored as '{store}' in '{target}'"] if found.take and store is not None else []
    if out is not None and found.take:
        write_file(out, json.dumps(dict(found.best.options), indent=1) + "\n")
        written.append(f"profile {out}")
    if report_to is not None:
        from scripts.tuning_page import page

        write_file(report_to, page(found))
        written.append(f"report {report_to}")
    if not found.take and (out is not None or store is not None):
        places = [str(out)] if out is not None else []
        places += [f"'{target}'"] if store is not None else []
        say(f"Nothing is written to {' or '.join(places)}: what you have is to be kept.")
    if written:
        say("; ".join(written))
    if lost:
        say(
            f"{lost} document{'s' if lost != 1 else ''} could not be stored: the figures are those of the rest."
        )
        return 1
    return 0


def _tell(found: "Outcome", *, as_json: bool) -> None:
    from scripts import table, tuning

    if as_json:
        typer.echo(json.dumps(tuning.to_json(found), ensure_ascii=False))
    else:
        table.console().print(summary(found))


def _groups(only: Sequence[str] | None) -> tuple[str, ...]:
    from scripts.tuning import GROUPS

    chosen = [word.strip() for given in only or () for word in given.split(",") if word.strip()]
    unknown = [word for word in chosen if word not in GROUPS]
    if unknown:
        raise typer.BadParameter(f"'{unknown[0]}' is none of {', '.join(GROUPS)}", param_hint="--only")
    return tuple(group for group in GROUPS if not chosen or group in chosen)


def _metric(given: str, top_k: int) -> str:
    name = given.partition("@")[0].lower()
    if name not in _FIGURES:
        raise typer.BadParameter(f"'{given}' is none of {', '.join(_FIGURES)}", param_hint="--metric")
    return name if name in ("map", "currency") else f"{name}@{top_k}"


def _read(
    folders: Sequence[Path], *, qrels: str | None, queries: int | None, seed: int
) -> "list[tuple[str, JudgedSet]]":
    from scripts.judged import read_set

    if qrels is not None and not any((folder / qrels).is_file() for folder in folders):
        raise typer.BadParameter(f"no folder holds a file {qrels}", param_hint="--qrels")
    found: list[tuple[str, JudgedSet]] = []
    for folder in folders:
        own = folder / qrels if qrels is not None and (folder / qrels).is_file() else None
        judged_set = read_set(folder, qrels=own).sample(queries, seed=seed)
        name, number = judged_set.name, 2
        while name in {taken for taken, _ in found}:
            name, number = f"{judged_set.name} {number}", number + 1
        found.append((name, judged_set))
    return found


def _start(client: Client, given: str, collection: str | None) -> "Profile":
    """Return the profile to start from, with all that the collection's profiles give it written out.

    A name stands for that profile alone; all else lies over the collection's default one, as a search's options do.
    """
    from scripts.client import ApiProblem
    from scripts.evaluating import BadProfile, Profile, read_profile
    from scripts.tuning import settled

    profile = read_profile(given)
    options = dict(profile.options)
    named = options.pop("profile", None)
    held: Mapping[str, Any] = {}
    if collection is not None:
        try:
            held = client.collection(collection)
        except ApiProblem as problem:
            if problem.status != 404:
                raise
    _check_experiment(collection, held)
    stored, default = held.get("profiles") or {}, held.get("default_profile")
    for name in (named, default):
        if name is not None and (fault := (held.get("unreadable") or {}).get(f"profiles.{name}")):
            raise BadProfile(f"the profile '{name}' of the collection '{collection}' can't be read: {fault}")
        if name is not None and name not in stored:
            known = f"the collection '{collection}' holds {', '.join(sorted(stored)) or 'none'}"
            missing = "no --collection is named that could hold it"
            raise BadProfile(f"there is no profile '{name}': {known if collection else missing}")
    chosen = named or default
    filling = lean(stored[chosen]) if chosen is not None else {}
    other = lean(stored[default]) if default not in (None, chosen) else None
    return Profile(
        chosen if chosen is not None and not options else profile.name,
        settled(options, base=filling, default=other),
    )


def _check_experiment(collection: str | None, held: Mapping[str, Any]) -> None:
    """Raise CannotTune where an experiment would deal the trials' searches to its arms."""
    from scripts.tuning import CannotTune

    experiment = held.get("experiment")
    # By subject it deals to searches that name one: trials don't.
    if experiment is not None and experiment.get("by") != "subject":
        raise CannotTune(
            f"the experiment '{experiment.get('name')}' would give the trials on '{collection}' profiles of its arms: end it, "
            f"halflife collections update {collection} --body '{{\"experiment\": null}}'"
        )


def _check_own(client: Client, collection: str) -> None:
    """Raise CannotTune where a set's own collection would fill what its trials leave out."""
    from scripts.tuning import CannotTune

    held = client.collection(collection)
    _check_experiment(collection, held)
    if held.get("default_profile") is not None:
        raise CannotTune(
            f"the default profile of '{collection}' would fill what trials leave out: take it off, "
            f"halflife collections update {collection} --body '{{\"default_profile\": null}}'"
        )


def _check(task: "Task") -> None:
    from scripts.metrics import CURRENCY
    from scripts.tuning import CannotTune, has_pairs

    if task.metric != CURRENCY:
        return
    for part in task.targets:
        if not (has_pairs(part.training) and has_pairs(part.held_out)):
            raise CannotTune(
                f"'{part.name}' has no pairs of current and superseded documents to judge currency by: "
                "take another --metric, or ask more of its questions"
            )


_ATTEMPTS = 5


def _store(client: Client, collection: str, name: str, options: Mapping[str, Any]) -> None:
    """Put the profile beside those that the collection holds, whoever changes them meanwhile."""
    from scripts.client import ApiProblem
    from scripts.tuning import storable

    made = storable(options).model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for attempt in range(_ATTEMPTS):
        held, revision = _held_profiles(client, collection)
        try:
            client.put_collection(collection, {"profiles": {**held, name: made}, "if_revision": revision})
        except ApiProblem as problem:
            if problem.status != 409 or attempt == _ATTEMPTS - 1:
                raise
        else:
            return


def _held_profiles(client: Client, collection: str) -> tuple[dict[str, Any], int]:
    """Return the profiles that a collection holds, and its revision. Raises CannotTune where one can't be read.

    Profiles are written all at once: one that is not known would be lost.
    """
    from scripts.tuning import CannotTune

    held = client.collection(collection)
    for option, fault in (held.get("unreadable") or {}).items():
        if option.startswith("profiles."):
            raise CannotTune(
                f"the profile '{option.removeprefix('profiles.')}' of '{collection}' can't be read ({fault}) and would be lost: "
                "write the collection's profiles anew first, or leave --store out"
            )
    return {each: lean(profile) for each, profile in (held.get("profiles") or {}).items()}, held["revision"]


# ---- while it runs, and its end ---------------------------------------------------------------------------------------


@contextmanager
def _watching(trials: int, *, hidden: bool) -> "Iterator[Callable[[Trial, int], None]]":
    """Yield what tells of each trial: a line, on standard error."""
    from scripts.cli import say

    def told(trial: "Trial", done: int) -> None:
        losses = "".join(f", {name} {0.0 - loss:+.4f}" for name, loss in trial.losses.items())
        say(f"trial {trial.number} ({done} of {trials}): {trial.gain:+.4f}{losses}   {trial.seconds:.0f} s")

    yield (lambda trial, done: None) if hidden else told


def _counted(result: "SetResult") -> str:
    """Return how many questions stand behind the figure, and of how many, where not all have it."""
    return (
        str(result.questions)
        if result.judged == result.questions
        else f"{result.judged} of {result.questions}"
    )


def summary(found: "Outcome") -> "RenderableType":
    """Return the search's end as tables and words."""
    from rich.console import Group
    from rich.text import Text

    from scripts.quality import _new_table
    from scripts.tuning import metric_of

    task = found.task
    sets = _new_table(("set", "questions", "metric", "start", "best", "difference", "p"))
    for what, results in (("training", found.training), ("held out", found.held_out)):
        for result in results:
            metric = metric_of(task, result.part)
            paired = {difference.figure: difference for difference in result.differences}.get(metric)
            sets.add_row(
                f"{result.part.name}{' (guard)' if result.part.guard else ''}",
                f"{_counted(result)} {what}",
                metric,
                f"{result.start.get(metric, 0.0):.4f}",
                f"{result.best.get(metric, 0.0):.4f}",
                "" if paired is None else f"{paired.mean:+.4f}",
                "" if paired is None or paired.p is None else f"{paired.p:.3f}",
            )
    sure = _new_table(("parameter", "best", "wins with it", "winners between", "importance"))
    for name, told in sorted(found.confidence.items(), key=lambda item: -found.importance.get(item[0], 0.0)):
        value = told["value"] if isinstance(told["value"], str) else f"{told['value']:.4g}"
        between = f"{told['low']:.3g} to {told['high']:.3g}" if "low" in told else ""
        weight = f"{found.importance[name] * 100:.0f} %" if name in found.importance else ""
        sure.add_row(name, value, f"{told['share'] * 100:.0f} %", between, weight)
    head = Text.assemble(
        (found.advice, "bold green" if found.advice == "Take it" else "bold yellow"),
        f": {found.reason}.",
    )
    shown = Text(json.dumps(dict(found.best.options), ensure_ascii=False), style="" if found.take else "dim")
    parts: list[RenderableType] = [Text(f"{len(found.trials)} trials"), sets]
    if found.best.number:
        parts += [sure, Text("The best that was tried:" if not found.take else "The profile:"), shown]
    return Group(*parts, head)
