"""Own `halflife collections`: what collections there are and hold, how one is made, changed in place and deleted.

A client of the API; draws no conclusion of its own about what can change: the API says so, with the command that helps.
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from scripts.client import ApiError, Client, find_url
from scripts.options import CollectionArgument, DataOption, JsonOption, KeyOption, UrlOption

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]
Json = dict[str, Any]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""List, describe, create, change and delete collections.

    \b
    Examples:
      halflife collections list
      halflife collections show handbook
      halflife collections create handbook --declare price=double --replicas 1
      halflife collections update handbook --refresh-interval 30s
      halflife collections delete handbook""",
)

DeclareOption = Annotated[
    list[str] | None,
    typer.Option(
        "--declare",
        metavar="KEY=TYPE",
        help="Type a metadata key: long, double, date, keyword, boolean. Repeatable.",
        show_default=False,
    ),
]
ReplicasOption = Annotated[
    int | None, typer.Option(min=0, max=5, metavar="N", help="Copies of each shard.", show_default=False)
]
RefreshOption = Annotated[
    str | None,
    typer.Option(metavar="1s", help="How often new documents become visible.", show_default=False),
]
BodyOption = Annotated[
    str | None,
    typer.Option(
        "--body",
        metavar="JSON",
        help="""Any other option, such as '{"profiles": {"news": {"decay": {"half_life": "7d"}}}, "default_profile": "news"}'.""",
        show_default=False,
    ),
]


def register(command: Register, root: typer.Typer) -> None:
    """Make the commands known, as a group of the one command line."""
    for function in (show_all, show, create, update, delete):
        name = "list" if function is show_all else function.__name__
        command(None, into=app, name=name)(function)
    root.add_typer(app, name="collections", rich_help_panel="Documents")


def show_all(
    url: UrlOption = None, data: DataOption = None, key: KeyOption = None, as_json: JsonOption = False
) -> int:
    r"""List the collections.

    \b
    Example:
      halflife collections list --json
    """
    with Client(find_url(url, data), key=key) as client:
        found = client.collections()
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return 0
    if not found:
        typer.echo("There is none yet: the first upsert makes one, or `halflife collections create`.")
    width = max((len(item["name"]) for item in found), default=0)
    for item in found:
        if "error" in item:
            typer.echo(f"{item['name']:<{width}}  {item['error']['detail']}")
            continue
        model = item.get("model") or "vectors of the callers"
        declared = ", ".join(f"{key}: {kind}" for key, kind in item["declared"].items())
        typer.echo(
            f"{item['name']:<{width}}  {item['dims']} dims, {model}{'; ' + declared if declared else ''}"
        )
    return 0


def show(
    name: CollectionArgument,
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Describe a collection: documents, chunks, size, ages, options, ranking profiles, the experiment that runs.

    \b
    Example:
      halflife collections show handbook
    """
    with Client(find_url(url, data), key=key) as client:
        found = client.collection(name)
    typer.echo(json.dumps(found, ensure_ascii=False) if as_json else "\n".join(described(found)))
    return 0


def create(
    name: CollectionArgument,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One of the service's embedding models.", show_default=False),
    ] = None,
    dims: Annotated[
        int | None,
        typer.Option(min=1, max=4096, metavar="N", help="Default: the embedder's.", show_default=False),
    ] = None,
    similarity: Annotated[
        str | None,
        typer.Option(metavar="cosine|dot_product|l2_norm|max_inner_product", show_default=False),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="N", help="Primary shards.", show_default=False)
    ] = None,
    declare: DeclareOption = None,
    replicas: ReplicasOption = None,
    refresh_interval: RefreshOption = None,
    body: BodyOption = None,
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Create a collection with options. One that is there as wanted is left as it is.

    \b
    Examples:
      halflife collections create handbook
      halflife collections create shop --declare price=double --declare due=date --shards 3

    Exit codes: 0 it is there as wanted; 1 refused, since it is there with other options (the remedy says which command
    moves it); 3 nobody answers.
    """
    options = _options(body, declare, replicas, refresh_interval)
    more = {"model": model, "dims": dims, "similarity": similarity, "shards": shards}
    options |= {key: value for key, value in more.items() if value is not None}
    with Client(find_url(url, data), key=key) as client:
        made = client.put_collection(name, options)
    typer.echo(
        json.dumps(made, ensure_ascii=False) if as_json else f"The collection '{made['name']}' is there."
    )
    return 0


def update(
    name: CollectionArgument,
    declare: DeclareOption = None,
    replicas: ReplicasOption = None,
    refresh_interval: RefreshOption = None,
    body: BodyOption = None,
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> int:
    r"""Change what can change in place: replicas, refresh interval, ranking profiles, new declared keys.

    For all else (dims, similarity, shards, the type of a key) there is `halflife reindex`; the refusal names the command.
    Profiles given with --body take the place of all that there are.

    \b
    Examples:
      halflife collections update handbook --replicas 2 --refresh-interval 30s
      halflife collections update handbook --declare price=double
      halflife collections update handbook --body '{"default_profile": "news"}'

    Exit codes: 0 changed; 1 refused, nothing is changed; 3 nobody answers.
    """
    options = _options(body, declare, replicas, refresh_interval)
    if not options:
        raise typer.BadParameter("name an option to change, such as --replicas 1")
    with Client(find_url(url, data), key=key) as client:
        found = client.collection(name)
        if declare:
            options["declared"] = {**found["declared"], **options["declared"]}
        changed = client.put_collection(name, options)
    typer.echo(json.dumps(changed, ensure_ascii=False) if as_json else f"Changed '{name}'.")
    return 0


def delete(
    name: CollectionArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    url: UrlOption = None,
    data: DataOption = None,
    key: KeyOption = None,
) -> int:
    r"""Delete a collection with all its documents. It can't be undone, so the name is asked for again.

    \b
    Examples:
      halflife collections delete handbook
      halflife collections delete handbook --yes
    """
    with Client(find_url(url, data), key=key) as client:
        found = client.collection(name)
        if not yes:
            if not sys.stdin.isatty():
                raise ApiError(f"'{name}' holds {found['documents']} documents", remedy="confirm with --yes")
            again = typer.prompt(
                f"This deletes {found['documents']} documents for good. Type the collection's name to confirm",
                default="",
                show_default=False,
            )
            if again.strip() != name:
                raise ApiError("That is another name: nothing is deleted.")
        client.delete_collection(name)
    typer.echo(f"Deleted '{name}' with {found['documents']} documents.")
    return 0


def described(found: Mapping[str, Any]) -> list[str]:
    """Return lines that tell what a collection is and holds."""
    ages = found["ages"]
    dates = "no dates" if ages["oldest"] is None else f"{ages['oldest'][:10]} to {ages['newest'][:10]}"
    size = "" if found["size_bytes"] is None else f", {found['size_bytes'] / 2**20:.1f} MiB"
    lines = [
        f"{found['name']}: {found['documents']} documents in {found['chunks']} chunks{size}",
        f"  dates      {dates}; {ages['undated']} undated, {ages['evergreen']} evergreen",
        f"  vectors    {found['dims']} dims, {found['similarity']}, {found.get('model') or 'from callers'}",
        f"  index      {found['index']}: {found['shards']} shards, {found['replicas']} replicas",
        f"  refreshed  every {found['refresh_interval']}",
    ]
    if found["deleted"]:
        lines.append(f"  deleted    {found['deleted']} tombstones; `halflife purge` removes old ones")
    if found["declared"]:
        lines.append("  declared   " + ", ".join(f"{key}: {kind}" for key, kind in found["declared"].items()))
    for name, profile in found["profiles"].items():
        mark = " (default)" if name == found["default_profile"] else ""
        lines.append(f"  profile    {name}{mark}: {json.dumps(lean(profile), ensure_ascii=False)}")
    for option, fault in found.get("unreadable", {}).items():
        lines.append(f"  unreadable {option}: {fault}")
    if experiment := found.get("experiment"):
        arms = ", ".join(
            f"{arm['percent']:g} % {arm['profile']}"
            + (f" (as {arm['name']})" if arm.get("name") not in (None, arm["profile"]) else "")
            for arm in experiment["arms"]
        )
        lines.append(f"  experiment {experiment['name']}, dealt by {experiment['by']}: {arms}")
    return lines


def lean(value: Any) -> Any:
    """Return a stored value without what it leaves open, as a request would say it."""
    if isinstance(value, dict):
        return {name: lean(each) for name, each in value.items() if each is not None}
    return [lean(each) for each in value] if isinstance(value, list) else value


def _options(
    body: str | None, declare: list[str] | None, replicas: int | None, refresh_interval: str | None
) -> Json:
    options: Json = {}
    if body is not None:
        try:
            options = json.loads(body)
        except ValueError as cause:
            raise typer.BadParameter(f"not JSON: {cause}", param_hint="--body") from cause
        if not isinstance(options, dict):
            raise typer.BadParameter("a JSON object is needed", param_hint="--body")
    declared = {}
    for given in declare or ():
        key, equals, kind = given.partition("=")
        if not equals:
            raise typer.BadParameter(f"'{given}' has no type: write KEY=TYPE", param_hint="--declare")
        declared[key] = kind
    if declared:
        options["declared"] = declared
    if replicas is not None:
        options["replicas"] = replicas
    if refresh_interval is not None:
        options["refresh_interval"] = refresh_interval
    return options
