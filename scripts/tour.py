"""Own the tour that `./scripts/quickstart` shows: a running stack, real documents, and what decay does to their order.

Uses the service as anyone would, over HTTP, and prints; a second run finds everything in place and is quick.
"""

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.decay import DEFAULT_VECTOR_FLOOR
from scripts import sources, stack, table
from scripts.cli import data_argument, guarded, say
from scripts.client import ApiProblem, Client, Json
from scripts.loading import Loader
from scripts.stack import Options, StackFailed

COLLECTION = "handbook"
SAMPLE = Path(__file__).resolve().parent / "sample"
HALF_LIFE = "180d"
VECTOR_FLOOR = 0.95
"""Lower than the default (0.98): of a handbook the current page is wanted, of most collections the likest one."""
SHOWN = 3
# So many ranks are compared that a page which fell is still found.
_COMPARED = 20


def show(*, data: Path, port: int | None = None, once: bool = False, quicken: bool = True) -> int:
    """Show the tour and return the exit code; unless `once`, the stack runs on until it is interrupted.

    A stack that ran before is used and left running.
    """
    begun = time.monotonic()
    if stack.running(data) is None:
        say(f"Starting the stack; its data lies in {data}.")
    options = Options(data=data, port=port, quicken=quicken and not once)
    state, process, health = stack.obtain(options, lambda line: say(f"  {line}"), tied=True)
    if health is not None:
        if health.status != "ok":
            raise StackFailed(
                f"The stack on {data} is {health.status}: {health.parts or 'see its log'}.",
                remedy=f"End it with `halflife down{data_argument(data)}` and try again.",
            )
        say(f"Using the stack that runs on {data}.")
    try:
        assert state.api is not None
        with _interrupting(), Client(state.api) as client:
            say(load_sample(client))
            _ask_all(client)
            say(f"\nThat took {time.monotonic() - begun:.1f} s.")
            runs_on = process is None or not once
            table.console().print(
                "\n".join(next_steps(state.api, data, runs_on=runs_on)), markup=False, soft_wrap=True
            )
            if process is not None and not once:
                say("\nThe stack runs until you press Ctrl-C.")
                _wait(process, data)
    finally:
        if process is not None:
            stack.end_process(process)
    if process is not None and once and quicken:
        _prepare_next_start()
    return 0


def _ask_all(client: Client) -> None:
    out = table.console()
    asked = questions()
    out.print(
        f"\n{len(asked)} questions, each asked twice as of {asked[0]['as_of'][:10]}: without decay, and with a half-life of "
        f"{HALF_LIFE}.\nA route's column gives a hit's rank in that route and its score times the factor of its age; `factor` "
        "is the request's own.\nThe vector route's factor stays near 1 (its floor here is "
        f"{VECTOR_FLOOR:g}, {DEFAULT_VECTOR_FLOOR:g} unless asked for), because its scores lie close together.",
        markup=False,
        soft_wrap=True,
    )
    for question in asked:
        out.print()
        out.print(present(client, question, width=out.width))
    out.print()


def _wait(process: "subprocess.Popen[bytes]", data: Path) -> None:
    """Return when the caller wants to end, or ended the stack elsewhere; raise StackFailed if it fails before."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        say("\nStopping.")
        return
    if code == 0:
        say("\nThe stack was ended in order, as `halflife down` does.")
        return
    raise StackFailed(
        f"The stack ended by itself (exit code {code}).",
        remedy=f"Its log is {stack.log_folder(data) / 'stack.log'}.",
    )


@contextlib.contextmanager
def _interrupting() -> Iterator[None]:
    """Take a request to end, or a closed terminal, as Ctrl-C is taken: the stack is ended in order."""
    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _prepare_next_start() -> None:
    """Make later starts faster, once per machine: the answers are on the screen, so nobody waits for this."""
    from scripts.node import ensure_installed, quicken

    quicken(ensure_installed(), lambda line: say(f"{line[:1].upper()}{line[1:]}."))


# ---- documents and questions ----------------------------------------------------------------------------------------


def sample_lines(name: str) -> list[Json]:
    """Return the objects of one of the sample's JSON Lines files."""
    with (SAMPLE / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def load_sample(client: Client) -> str:
    """Load the sample corpus unless all of it is there already, and say which.

    Raises StackFailed where the collection holds documents and none of the sample's: they are the user's own.
    """
    path = SAMPLE / "corpus.jsonl"
    wanted = [str(line["id"]) for line in sample_lines(path.name)]
    if found := client.count(COLLECTION):
        there = sum(client.document(COLLECTION, name) is not None for name in wanted)
        if there == len(wanted):
            return f"Collection '{COLLECTION}' holds {found} documents already."
        if not there:
            raise StackFailed(
                f"The collection '{COLLECTION}', which the tour loads its sample into, holds {found} documents of yours.",
                remedy="Take another --data folder for the tour: nothing was changed.",
            )
    say(f"Loading {len(wanted)} dated pages of an invented company into collection '{COLLECTION}'.")
    source = sources.Source(path, path.name, path.stat().st_size, lines=True)
    tally = Loader(client, COLLECTION, batch=16, report=say).load([source], sources.Names())
    if tally.failed:
        raise StackFailed(
            f"{tally.failed} of the sample documents could not be stored: {tally.failures[0].reason}",
            remedy=f"If '{COLLECTION}' is a collection of your own, take another --data folder for the tour.",
        )
    return tally.line()


def questions() -> list[Json]:
    """Return the sample's questions that are marked for the tour."""
    return [question for question in sample_lines("queries.jsonl") if question.get("show")]


def request_of(question: Mapping[str, Any], decay: Json | str) -> Json:
    """Return the search that asks a question, with a decay or 'off'."""
    request = {
        "collection": COLLECTION,
        "query": question["text"],
        "as_of": question["as_of"],
        "top_k": _COMPARED,
        "decay": decay,
        "paging": False,
    }
    if decay != "off":
        request["routes"] = [{"kind": "text"}, {"kind": "vector", "decay": {"floor": VECTOR_FLOOR}}]
    if "filter" in question:
        request["filter"] = question["filter"]
    return request


def present(client: Client, question: Mapping[str, Any], *, width: int) -> Any:
    """Ask a question without and with decay, and return both orders side by side, with what to look at."""
    from rich.console import Group
    from rich.text import Text

    try:
        before = client.search(request_of(question, "off"))
        after = client.search(request_of(question, {"kind": "exp", "half_life": HALF_LIFE}))
    except ApiProblem as problem:
        if problem.status == 404:
            raise StackFailed(
                f"The collection '{COLLECTION}' is gone.", remedy="Something deleted it meanwhile: try again."
            ) from problem
        raise
    head = Text.assemble(("? ", "bold cyan"), (question["text"], "bold"))
    if "filter" in question:
        head.append(f"   filter {json.dumps(question['filter'])}", style="dim")
    drawn = table.comparison(
        before["hits"], after["hits"], shown=SHOWN, routes=list(after["routes"]), width=width
    )
    look = Text.assemble(("Look: ", "bold"), question.get("why", ""))
    return Group(head, drawn, look)


# ---- where to go next -----------------------------------------------------------------------------------------------


def next_steps(api: str, data: Path, *, runs_on: bool) -> list[str]:
    """Return lines that tell where to go next; commands in them work when pasted."""
    command = program()
    extra = f" --url {api}" if data_argument(data) else ""
    request = {
        "collection": COLLECTION,
        "query": "how many days of leave may I carry over?",
        "top_k": 3,
        "as_of": "2026-06-30",
        "decay": {"half_life": HALF_LIFE},
    }
    lines = ["Where to go next"]
    if not runs_on:
        lines.append(f"  {command} up --detach{data_argument(data)}          # the same stack again, to stay")
    lines += [
        f"  {api}/docs          # every request, with examples that run",
        f"  curl -s {api}/v1/search -H 'content-type: application/json' -d {shlex.quote(json.dumps(request))}",
        f"  {command} search 'meal limit per day on a business trip' -c {COLLECTION} --decay {HALF_LIFE} --as-of 2026-06-30{extra}",
        f"  {command} why 'meal limit per day on a business trip' expenses-2020 -c {COLLECTION} --decay {HALF_LIFE} --as-of 2026-06-30{extra}",
        f"  {command} load ANY.jsonl-OR-FOLDER -c mine{extra}          # your own documents",
        f"  {command} doctor{data_argument(data)}          # what is wrong, should something be",
    ]
    return lines


def program() -> str:
    """Return how to call `halflife` from where the caller stands."""
    ours = Path(sys.executable).parent / "halflife"
    found = shutil.which("halflife")
    if found and Path(found).resolve() == ours.resolve():
        return "halflife"
    try:
        return shlex.quote(str(ours.relative_to(Path.cwd())))
    except ValueError:
        return shlex.quote(str(ours))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tour from the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description="Start Elasticsearch, an embedding server and Halflife's API on this machine, load a small corpus and "
        "show what time decay does to five questions. The stack runs on until Ctrl-C.",
        epilog="Exit codes: 0 done; 1 failed; 2 wrong usage; 130 interrupted. Data stays in the data folder; the second "
        "run is quick. Settings are environment variables HALFLIFE_…, as for `halflife up`.",
    )
    parser.add_argument("--once", action="store_true", help="end after the searches")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="the stack's folder (default: $HALFLIFE_DATA, else ./.halflife)",
    )
    parser.add_argument("--port", type=int, metavar="N", help="the API's port (default: 8080, or a free one)")
    parser.add_argument(
        "--no-prepare",
        action="store_true",
        help="don't spend half a minute, once, on making later starts faster",
    )
    chosen = parser.parse_args(arguments)
    if chosen.port is not None and not 1 <= chosen.port <= 65535:
        parser.error("--port lies between 1 and 65535")
    return guarded(
        lambda: show(
            data=stack.data_folder(chosen.data),
            port=chosen.port,
            once=chosen.once,
            quicken=not chosen.no_prepare,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
