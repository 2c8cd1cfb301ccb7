"""Options that several commands take, each declared once."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.stack import DEFAULT_DATA


def named_collection(name: str | None) -> str | None:
    """Return the name if a collection can have it: told before anything else is done, as wrong usage."""
    if name is not None:
        from app.values import check_collection

        try:
            check_collection(name)
        except ValueError as cause:
            raise typer.BadParameter(str(cause)) from cause
    return name


def named_source(name: str | None) -> str | None:
    """Return the name if it can be a document's `source`."""
    if name is not None:
        from app.values import MAX_KEYWORD_CHARS, clean_text

        try:
            clean_text(name)
        except ValueError as cause:
            raise typer.BadParameter(str(cause)) from cause
        if not name.strip() or len(name) > MAX_KEYWORD_CHARS:
            raise typer.BadParameter(f"a name is 1 to {MAX_KEYWORD_CHARS} characters, not all of them blank")
    return name


def said_of_all(pairs: list[str] | None) -> dict[str, Any]:
    """Return the part of a document that KEY=VALUE pairs make. A key that comes twice is wrong usage."""
    from app.drafts import for_all

    cells = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().removeprefix("metadata.") or not value.strip():
            raise typer.BadParameter(f"'{pair}' is no KEY=VALUE, such as lang=en or team=search")
        if key.strip() == "source":
            raise typer.BadParameter("a source is given by --source NAME")
        if key.strip() in cells:
            raise typer.BadParameter(f"`{key.strip()}` is given twice: give it one value")
        cells[key.strip()] = value.strip()
    try:
        return for_all(cells)
    except ValueError as cause:
        raise typer.BadParameter(str(cause)) from cause


def writable_file(path: Path | None) -> Path | None:
    """Return the path if a file can be written there: told before what is to be written takes its time."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder: name a file")
        if not path.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}: make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise typer.BadParameter(f"{path} can't be written: its permissions forbid it")
    return path


def write_file(path: Path, text: str) -> None:
    """Write a file that was asked for. Raises ApiError where that fails, as on a full disk."""
    from scripts.client import ApiError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise ApiError(f"{path} can't be written: {cause.strerror or cause}") from cause


DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help=f"The stack's folder: indices, logs, ports, state. "
        f"Default: $HALFLIFE_DATA, else ./{DEFAULT_DATA}.",
        show_default=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The API's address. Default: the stack's on --data, else $HALFLIFE_URL, "
        "else the local stack's, else http://127.0.0.1:8080.",
        show_default=False,
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="TOKEN",
        help="The API's key. Better in $HALFLIFE_KEY: other programs can see what a command line says.",
        show_default=False,
    ),
]
CollectionOption = Annotated[
    str,
    typer.Option(
        "--collection",
        "-c",
        metavar="NAME",
        envvar="HALFLIFE_COLLECTION",
        help="The collection.",
        callback=named_collection,
    ),
]
CollectionArgument = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTION", help="The collection.", show_default=False, callback=named_collection
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
