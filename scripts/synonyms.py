"""Own `halflife synonyms`: what synonyms a collection has, how they are set from a file, and deleted.

A client of the API, which reads and judges the rules.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.client import ApiError, ApiProblem, Client, find_url
from scripts.options import CollectionArgument, DataOption, JsonOption, KeyOption, UrlOption

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Show, set and delete a collection's synonyms. Searches use them at once, nothing is reindexed.

    \b
    Examples:
      halflife synonyms show handbook
      halflife synonyms set handbook synonyms.txt
      halflife synonyms delete handbook""",
)


def register(command: Register, root: typer.Typer) -> None:
    """Make the commands known, as a group of the one command line."""
    for name, function in (("show", show), ("set", replace), ("delete", delete)):
        command(None, into=app, name=name)(function)
    root.add_typer(app, name="synonyms", rich_help_panel="Documents")


def show(
    name: CollectionArgument,
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Print the rules, one a line, as `halflife synonyms set` reads them.

    \b
    Example:
      halflife synonyms show handbook > synonyms.txt
    """
    with Client(find_url(url, data), key=key) as client:
        found = client.synonyms(name)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return 0
    for rule in found["synonyms_set"]:
        typer.echo(rule["synonyms"])
    return 0


def replace(
    name: CollectionArgument,
    file: Annotated[
        str,
        typer.Argument(
            metavar="[FILE]",
            help="One rule a line, # begins a comment; or JSON as the API takes it. Default: standard input.",
            show_default=False,
        ),
    ] = "-",
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Put the file's rules in the place of those there are.

    `car, automobile` are equivalent, `k8s => kubernetes` goes one way. Case, width, accents and the English plural make no
    difference; Chinese, Japanese and Korean terms are found inside longer text.

    \b
    Examples:
      halflife synonyms set handbook synonyms.txt
      echo '电脑, 计算机, computer' | halflife synonyms set handbook

    Exit codes: 0 set; 1 refused, nothing is changed; 3 nobody answers.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise typer.BadParameter("the file is not UTF-8 text", param_hint="FILE") from cause
    rules, lines = rules_in(text)
    with Client(find_url(url, data), key=key) as client:
        try:
            stored = client.put_synonyms(name, rules)
        except ApiProblem as problem:
            raise _by_line(problem, "standard input" if file == "-" else file, lines) from problem
    count = len(stored["synonyms_set"])
    typer.echo(json.dumps(stored, ensure_ascii=False) if as_json else f"'{name}' has {count} rules now.")
    return 0


def delete(
    name: CollectionArgument, url: UrlOption = None, data: DataOption = None, key: KeyOption = None
) -> int:
    r"""Delete all rules of a collection.

    \b
    Example:
      halflife synonyms delete handbook
    """
    with Client(find_url(url, data), key=key) as client:
        client.delete_synonyms(name)
    typer.echo(f"'{name}' has no synonyms now.")
    return 0


def rules_in(text: str) -> tuple[list[Any], list[int]]:
    """Return the rules of a file and their line numbers: of JSON those it lists, whose lines nobody knows.

    Else one for each line that is neither blank nor a comment.
    """
    if text.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(text)
        except ValueError as cause:
            raise typer.BadParameter(f"not JSON: {cause}", param_hint="FILE") from cause
        rules = value.get("synonyms_set") if isinstance(value, dict) else value
        if not isinstance(rules, list):
            raise typer.BadParameter("the JSON holds no list `synonyms_set`", param_hint="FILE")
        return rules, []
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    kept = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    return [line for _, line in kept], [number for number, _ in kept]


def _by_line(problem: ApiProblem, file: str, lines: Sequence[int]) -> ApiError:
    """Return the problem with the file's line in the place of the rule's number, where a rule is what is wrong."""
    faults = [item for item in problem.problem.get("errors", []) if isinstance(item, dict)]
    told = []
    for fault in faults or [problem.problem]:
        named = re.match(r"synonyms_set[.\[](\d+)", str(fault.get("field") or ""))
        if named is None or int(named[1]) >= len(lines):
            return problem
        told.append(f"{file}:{lines[int(named[1])]}: {fault.get('detail')}")
    return ApiError("\n  also ".join(told), remedy=problem.remedy)
