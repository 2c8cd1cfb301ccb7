"""Own the command lines that judge rankings: their options, their help, and how figures look in a terminal.

`register` hands them to the one command line there is. Reads sets and profiles, asks `evaluating`, prints.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scripts.client import ApiError, Client, find_url
from scripts.options import (
    DataOption,
    JsonOption,
    KeyOption,
    UrlOption,
    named_collection,
    writable_file,
    write_file,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from scripts.evaluating import Evaluation, Failure, Profile
    from scripts.judged import JudgedSet
    from scripts.loading import Tally

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]

_LIMIT = 0.05


def register(command: Register) -> None:
    """Make the commands known; `command` is what registers one under a heading."""
    command("Quality")(evaluate)


def evaluate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The judged set.", show_default=False, exists=True, file_okay=False
        ),
    ],
    qrels: Annotated[
        Path | None,
        typer.Option(
            "--qrels",
            metavar="FILE",
            help="Other judgements: a path, or a file of the folder.",
            show_default=False,
        ),
    ] = None,
    collection: Annotated[
        str | None,
        typer.Option(
            "--collection",
            "-c",
            callback=named_collection,
            metavar="NAME",
            show_default=False,
            help="A collection that holds the documents, or shall. Default: one of the set's own.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME|FILE|JSON",
            show_default=False,
            help="A way to rank, NAME= before it if you like; again for each further one. Default: default.",
        ),
    ] = None,
    decay: Annotated[
        str | None,
        typer.Option(
            "--decay",
            metavar="180d|JSON|auto|off",
            help="The decay of profiles that name none.",
            show_default=False,
        ),
    ] = None,
    as_of: Annotated[
        str | None,
        typer.Option(
            "--as-of",
            metavar="DATE",
            help="The origin of questions that name none. Default: now.",
            show_default=False,
        ),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", "-k", min=1, max=100, metavar="N", help="Hits that nDCG, MRR and recall look at."
        ),
    ] = 10,
    queries: Annotated[
        int | None,
        typer.Option(
            "--queries", min=1, metavar="N", help="Ask only so many, drawn by --seed.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="What --queries draws by.")] = 7,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Compare with each route alone (without decay), linear fusion and no decay."
        ),
    ] = False,
    explained: Annotated[
        int,
        typer.Option(
            "--failures", min=0, max=100, metavar="N", help="Account for so many of the worst questions."
        ),
    ] = 3,
    per_query: Annotated[
        Path | None,
        typer.Option(
            "--per-query",
            callback=writable_file,
            metavar="FILE",
            help="Write each question's figures there, JSON Lines or (.tsv) a table.",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Judge rankings by a set of questions whose answers are known.

    The folder holds corpus.jsonl, queries.jsonl and qrels.tsv (`query<TAB>document<TAB>grade`), or the same in BEIR's or
    TREC's form. The documents are loaded into a collection of their own, once: later runs embed none of them again. A
    question's `as_of` is the origin of its search, its `filter` is applied; `current` and `superseded` list documents of
    which the former should stand above the latter.

    \b
    Figures, all from 0 to 1, means over the questions:
      ndcg@10, map, mrr@10, recall@10, recall@100   as trec_eval computes them
      currency   the best current document stands above the best superseded one (the one that is missing is below)
      stale@1    the first hit is superseded; here less is better

    Several profiles stand side by side; * marks a difference from the first, of any figure, that chance explains in less
    than 5 % of cases (paired t-test; signs flipped where all questions differ by the same). The worst questions of the first profile are accounted for, as `halflife why` does.

    \b
    Examples:
      halflife evaluate sets/rfc --qrels qrels_strict.tsv --as-of 2024-03-07 --decay 1825d --compare
      halflife evaluate sets/faq -p default -p 'mine={"fusion": {"method": "linear"}}' --json
      halflife evaluate sets/faq --queries 200 --per-query figures.tsv

    Exit codes: 0 judged; 1 failed, or some documents could not be stored; 2 wrong usage; 3 nobody answers.
    """
    from scripts import evaluating
    from scripts.cli import parse_decay, say
    from scripts.judged import UnreadableSet, read_set
    from scripts.metrics import LibraryMissing

    chosen = None if decay is None else parse_decay(decay)
    try:
        profiles = _profiles(profile or ["default"], compare=compare, decay=chosen)
        judged_set = read_set(folder, qrels=qrels).sample(queries, seed=seed)
        with Client(find_url(url, data), key=key) as client:
            name = collection or evaluating.collection_name(judged_set)
            with _loading(judged_set, hidden=as_json) as progress:
                loaded = evaluating.ensure_loaded(
                    client,
                    name,
                    judged_set.corpus,
                    keep=collection is not None,
                    report=say,
                    progress=progress,
                )
            with _asking(len(judged_set.questions) * len(profiles), hidden=as_json) as asked:
                found = evaluating.evaluate(
                    client, judged_set, profiles,
                    collection=name, top_k=top_k, as_of=as_of, explained=explained, progress=asked, report=say,
                )  # fmt: skip
    except evaluating.BadProfile as fault:
        raise typer.BadParameter(str(fault), param_hint="--profile") from fault
    except (UnreadableSet, LibraryMissing, evaluating.EvaluationFailed) as fault:
        raise ApiError(str(fault)) from fault
    if as_json:
        typer.echo(json.dumps(evaluating.to_json(found), ensure_ascii=False))
    else:
        from scripts import table

        table.console().print(report(found))
    if per_query is not None:
        _write(per_query, list(evaluating.per_query(found)))
    if loaded is not None and loaded.lost:
        say(loaded.told)
        return 1
    return 0


def _profiles(given: Sequence[str], *, compare: bool, decay: Any) -> "list[Profile]":
    from scripts import evaluating

    profiles = [evaluating.read_profile(text, decay=decay) for text in given]
    if compare:
        others = ["text", "vector", "linear", *(["off"] if decay != "off" else [])]
        profiles += [evaluating.read_profile(name, decay=decay) for name in others if name not in given]
    return evaluating.distinct(profiles)


def _write(path: Path, rows: "Sequence[Mapping[str, Any]]") -> None:
    if path.suffix != ".tsv":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    else:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        lines = ["\t".join(columns)]
        lines += ["\t".join(_cell(row.get(name)) for name in columns) for row in rows]
    write_file(path, "\n".join(lines) + "\n")


def _cell(value: Any) -> str:
    return "" if value is None else " ".join(str(value).split())


# ---- while it runs --------------------------------------------------------------------------------------------------


@contextmanager
def _loading(judged_set: "JudgedSet", *, hidden: bool) -> "Iterator[Callable[[Tally], None]]":
    total = len(judged_set.corpus.ids) if judged_set.corpus else 0
    with _bar("loading", total, hidden=hidden) as show:
        yield lambda tally: show(tally.stored)


@contextmanager
def _asking(total: int, *, hidden: bool) -> Iterator[Callable[[str, int], None]]:
    done: dict[str, int] = {}

    with _bar("asking", total, hidden=hidden) as show:

        def count(name: str, number: int) -> None:
            done[name] = number
            show(sum(done.values()))

        yield count


@contextmanager
def _bar(what: str, total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Yield what shows how many are done; a bar on a terminal, nothing elsewhere."""
    import sys

    if hidden or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from scripts import table

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=table.console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total or None)
        yield lambda done: progress.update(task, completed=done)


# ---- the report -----------------------------------------------------------------------------------------------------


def report(found: "Evaluation") -> "RenderableType":
    """Return the evaluation as tables and words."""
    from rich.console import Group
    from rich.text import Text

    judged_set = found.judged_set
    origin = f", as of {found.as_of}" if found.as_of else ""
    head = Text.assemble(
        (judged_set.name, "bold"),
        f"   {len(judged_set.questions)} questions by {judged_set.qrels.name} in '{found.collection}'{origin}",
    )
    parts: list[RenderableType] = [head, *(Text(f"! {note}", style="yellow") for note in judged_set.notes)]
    parts.append(_figures(found))
    if found.kinds:
        parts.append(_by_kind(found))
    parts += [item for failure in found.failures for item in _account(failure, found.top_k)]
    return Group(*parts)


def _figures(found: "Evaluation") -> "Table":
    first = found.results[0]
    names = list(first.mean())
    told = _new_table(("profile", *names))
    for result in found.results:
        mean = result.mean()
        marks = {
            difference.figure: difference.p for difference in found.comparisons.get(result.profile.name, ())
        }
        told.add_row(result.profile.name, *(f"{mean[name]:.3f}{_mark(marks.get(name))}" for name in names))
    return told


def _mark(p: float | None) -> str:
    return "*" if p is not None and p < _LIMIT else " "


def _by_kind(found: "Evaluation") -> "Table":
    figure = next(iter(found.results[0].mean()))
    told = _new_table(("kind", "questions", *(f"{result.profile.name}" for result in found.results)))
    for kind, questions in found.kinds.items():
        cells = []
        for result in found.results:
            mean = result.mean(questions)
            currency = f" / {mean['currency']:.2f}" if "currency" in mean else ""
            cells.append(f"{mean[figure]:.3f}{currency}")
        told.add_row(kind, str(len(questions)), *cells)
    told.caption = f"{figure}, and currency behind it"
    told.caption_justify = "left"
    return told


def _new_table(columns: Sequence[str]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, name in enumerate(columns):
        made.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    return made


def _account(failure: "Failure", top_k: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    from scripts.table import clean, snippet

    account = failure.account
    question = snippet(clean(failure.question.text), 100)
    yield Text.assemble(
        "\n", (f"✗ {question}", "bold"), f"   ({failure.question.id}, nDCG@{top_k} {failure.figure:.3f})"
    )
    rank, fused = account.get("rank"), account.get("fused_rank")
    if rank:
        place = f"stands at rank {rank}" + (f", fused at rank {fused}" if fused not in (None, rank) else "")
    else:
        place = f"was fused at rank {fused} and left out after that" if fused else "is in no route's window"
    yield Text(
        f"  '{clean(account.get('title') or failure.missing)}' ({failure.missing}) {place}; first is {failure.first or 'nothing'}"
    )
    routes = [
        f"{name} {route['rank'] if route.get('rank') else 'no match'}"
        for name, route in account.get("routes", {}).items()
    ]
    if routes:
        yield Text(f"  ranks: {', '.join(routes)}", style="dim")
    for step in (*account.get("excluded_by", []), *account.get("what_it_takes", [])):
        yield Text(f"  → {step}", style="dim")
