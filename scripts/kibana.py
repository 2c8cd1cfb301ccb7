"""The command line `halflife kibana`: loads our data views, Discover sessions and dashboards into a running Kibana.

Speaks Kibana's saved objects import API and nothing else of it. What is loaded is `es_mappings/kibana/halflife.ndjson`.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from scripts.client import ApiError, ApiUnreachable
from scripts.options import JsonOption

if TYPE_CHECKING:
    import httpx2

Register = Callable[..., Callable[[Callable[..., int]], Callable[..., int]]]
FAILED = 1
_TIMEOUT_S = 120.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Kibana:
    """Where Kibana is and who logs in: by an API key, or as a user."""

    url: str
    space: str | None = None
    api_key: str | None = None
    username: str | None = None
    password: str | None = None
    ca: str | None = None

    def client(self, transport: "httpx2.BaseTransport | None" = None) -> "httpx2.Client":
        """Return a connection; nothing is sent yet. Raises ApiError for settings that contradict each other."""
        import ssl

        import httpx2

        if bool(self.username) != bool(self.password):
            raise ApiError("a user of Kibana needs its password, and the other way round")
        if self.api_key and self.username:
            raise ApiError("both an API key and a user are given for Kibana", remedy="keep one of the two")
        headers = {"kbn-xsrf": "halflife"}
        if self.api_key:
            headers["Authorization"] = f"ApiKey {self.api_key}"
        try:
            context = ssl.create_default_context(cafile=self.ca) if self.ca else ssl.create_default_context()
            return httpx2.Client(
                base_url=self.url.rstrip("/"),
                headers=headers,
                auth=(self.username, self.password) if self.username and self.password else None,
                verify=context,
                transport=transport,
                timeout=httpx2.Timeout(_TIMEOUT_S, connect=5.0),
            )
        except (OSError, ValueError, httpx2.InvalidURL) as cause:
            raise ApiError(f"the settings of Kibana can't be used: {cause}") from cause

    @property
    def prefix(self) -> str:
        """The path of the space, before that of the API."""
        return f"/s/{quote(self.space, safe='')}" if self.space else ""


@dataclass(frozen=True)
class Loaded:
    """How an import went: how many objects are in, and what kept the others out."""

    count: int
    errors: tuple[str, ...]


def saved_objects() -> bytes:
    """Return the file that is loaded, as it is shipped."""
    return files("es_mappings").joinpath("kibana", "halflife.ndjson").read_bytes()


def load(kibana: Kibana, *, wait_s: float = 0.0, transport: "httpx2.BaseTransport | None" = None) -> Loaded:
    """Import the saved objects, ours of an earlier time replaced; wait for a Kibana that is still starting.

    Raises ApiUnreachable where nobody answers in time, ApiError for what Kibana refuses as a whole.
    """
    import httpx2

    deadline = time.monotonic() + wait_s
    pause_s = _FIRST_PAUSE_S
    with kibana.client(transport) as client:
        while True:
            try:
                answer = client.post(
                    f"{kibana.prefix}/api/saved_objects/_import",
                    params={"overwrite": "true"},
                    files={"file": ("halflife.ndjson", saved_objects(), "application/ndjson")},
                )
            except httpx2.TransportError as cause:
                fault: ApiError = ApiUnreachable(
                    f"Kibana at {kibana.url} does not answer: {cause}", remedy="check --url, or raise --wait"
                )
            else:
                if answer.status_code not in (502, 503, 504):
                    return _told(answer)
                fault = ApiUnreachable(f"Kibana at {kibana.url} is not ready", remedy="raise --wait")
            if time.monotonic() + pause_s > deadline:
                raise fault
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)


def _told(answer: "httpx2.Response") -> Loaded:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict) or "successCount" not in body:
        told = body.get("message") if isinstance(body, dict) else None
        raise ApiError(
            f"Kibana refused the import: HTTP {answer.status_code}{f', {told}' if told else ''}",
            remedy=_REMEDIES.get(
                answer.status_code, "check that --url is Kibana's own address, without a path such as /app"
            ),
        )
    errors = [_error(each) for each in body.get("errors", ())]
    if not body.get("success") and not errors:
        errors = ["Kibana says that the import failed, and not why"]
    return Loaded(int(body["successCount"]), tuple(errors))


_REMEDIES = {
    401: "give an API key (HALFLIFE_KIBANA_API_KEY) or a user with its password",
    403: "the key or user needs the Kibana privilege to manage saved objects in this space",
    404: "check the address, and the name of the space",
}


def _error(entry: Any) -> str:
    cause = entry.get("error", {})
    missing = ", ".join(f"{each.get('type')} {each.get('id')}" for each in cause.get("references", ()))
    told = cause.get("message") or cause.get("type") or "unknown"
    return f"{entry.get('type')} {entry.get('id')}: {told}{f' ({missing})' if missing else ''}"


# ---- the command --------------------------------------------------------------------------------------------------------


def register(command: Register) -> None:
    """Make the command known; `command` is what registers one under a heading."""
    command("Operations")(kibana)


def kibana(
    action: Annotated[str, typer.Argument(metavar="load|show", help="Load them, or print the file.")],
    url: Annotated[
        str,
        typer.Option("--url", metavar="URL", envvar="HALFLIFE_KIBANA_URL", help="Kibana's address."),
    ] = "http://127.0.0.1:5601",
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="HALFLIFE_KIBANA_SPACE",
            help="A space other than the default.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="HALFLIFE_KIBANA_CA",
            help="The CA of Kibana's certificate.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for a Kibana that starts.")
    ] = 0.0,
    as_json: JsonOption = False,
) -> int:
    r"""Load data views, Discover sessions and dashboards into Kibana.

    Who logs in is told by the environment, not by options, which others on this machine could read:
    HALFLIFE_KIBANA_API_KEY, or HALFLIFE_KIBANA_USERNAME with HALFLIFE_KIBANA_PASSWORD. Objects of ours that are there
    already are replaced; nothing else is touched. `show` prints the file, for the import page of Kibana itself
    (Stack Management, Saved Objects).

    \b
    Examples:
      HALFLIFE_KIBANA_API_KEY=… halflife kibana load --url https://kibana.example
      halflife kibana load --space search --wait 120
      halflife kibana show > halflife.ndjson

    Exit codes: 0 loaded; 1 refused, or some objects failed; 2 wrong usage; 3 nobody answers.
    """
    if action == "show":
        typer.echo(saved_objects().decode(), nl=False)
        return 0
    if action != "load":
        raise typer.BadParameter("choose load or show", param_hint="ACTION")
    login = {
        name: os.environ.get(f"HALFLIFE_KIBANA_{name.upper()}")
        for name in ("api_key", "username", "password")
    }
    done = load(Kibana(url, space=space, ca=ca, **login), wait_s=wait)
    if as_json:
        typer.echo(json.dumps({"loaded": done.count, "errors": list(done.errors)}))
    else:
        for error in done.errors:
            typer.echo(f"✗ {error}", err=True)
        typer.echo(f"{done.count} objects loaded into {url}.")
    return FAILED if done.errors else 0
