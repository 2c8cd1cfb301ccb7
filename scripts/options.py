"""Options that several command groups take, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

UrlOption = Annotated[
    str | None, typer.Option("--url", metavar="URL", help="The API's address.", show_default=False)
]
DataOption = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="The stack's folder.", show_default=False)
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="TOKEN", help="The API's key. Better in $HALFLIFE_KEY.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")]
