"""Own the commands `halflife keys …`: making, listing and revoking the bearer keys that a file holds.

A token is shown once, when it is made; the file has its hash. The file is replaced in one step, its owner and group being
kept, readable for others neither before nor after; two commands at once wait for each other. A running service reads it
again by itself.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from scripts.client import ApiError
from scripts.options import JsonOption

FILE_VARIABLE = "HALFLIFE_KEYS_FILE"
MODE = 0o600
_MOST_DAYS = 36_500
_NEW = "the new key"
PANEL = "The API's keys"


def _finite(number: float | None) -> float | None:
    """Return it unless it is "nan", which every comparison lets pass, or "inf"."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter("a finite number is needed")
    return number


FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        envvar=FILE_VARIABLE,
        help="The file of keys.",
        show_default=False,
    ),
]


def create(
    name: Annotated[str, typer.Argument(metavar="ID", help="What to call the key.", show_default=False)],
    collections: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="The collections it reaches: names or patterns such as 'team-a-*', with commas between.",
            show_default=False,
        ),
    ],
    scopes: Annotated[
        str, typer.Option(metavar="LIST", help="Out of read, write, admin, metrics, with commas between.")
    ] = "read",
    only: Annotated[
        str | None,
        typer.Option(
            "--filter",
            metavar="JSON",
            help="""A filter on everything it reads and writes, such as '{"tenant": "a"}'.""",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        float | None,
        typer.Option(
            "--days",
            min=0.001,
            max=_MOST_DAYS,
            metavar="N",
            help=f"Days until it expires, at most {_MOST_DAYS}.",
            show_default=False,
            callback=_finite,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0.001,
            metavar="N",
            help="Requests a second, instead of HALFLIFE_RATE_PER_S.",
            show_default=False,
            callback=_finite,
        ),
    ] = None,
    file: FileOption = None,
    entry: Annotated[
        bool, typer.Option("--entry", help="Edit no file: print the entry for HALFLIFE_KEYS.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    r"""Make a key and print its token, once.

    The token is not stored anywhere: who loses it makes another key. Send it as `Authorization: Bearer TOKEN`; our own
    commands take it from HALFLIFE_KEY.

    \b
    Examples:
      halflife keys create app --collections handbook --file keys.json
      halflife keys create team-a --scopes read,write --collections 'shared' --filter '{"tenant": "a"}' --file keys.json
      halflife keys create ops --scopes read,write,admin --collections '*' --entry

    \b
    Scopes: read (search, why, get, list), write (upsert, patch, delete, touch), admin (make and delete
    collections), metrics (/metrics, which admin may read too).
    """
    from app import keys
    from app.errors import InvalidRequest

    if file is None and not entry:
        raise _no_file()
    if not re.fullmatch(keys.KEY_ID, name):
        raise ApiError(
            f"'{name}' can't be a key's id",
            remedy="write 1 to 64 letters of English, digits, `.`, `_` and `-`, a letter or a digit first, such as team-a",
        )
    for option, text, such in (
        ("--collections", collections, "'team-a-*'"),
        ("--scopes", scopes, "read,write"),
    ):
        if not _listed(text):
            raise ApiError(f"{option} names nothing", remedy=f"give at least one, such as {option} {such}")
    token = keys.TOKEN_PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC).replace(microsecond=0)
    made: dict[str, Any] = {
        "id": name,
        "hash": keys.hash_of(token),
        "scopes": _listed(scopes),
        "collections": _listed(collections),
        "created": now.isoformat(),
    }
    if only is not None:
        try:
            made["filter"] = json.loads(only)
        except (ValueError, RecursionError) as cause:
            raise ApiError(f"--filter is not JSON: {cause}", remedy="quote it for the shell") from cause
    if days is not None:
        made["expires"] = (now + timedelta(days=days)).isoformat()
    if rate is not None:
        made["rate_per_s"] = rate
    try:
        [key] = keys.parse_keys(json.dumps([made]), where=_NEW)
        if file is not None and not entry:
            with _editing(file) as (held, write):
                if any(other.id == key.id for other in held):
                    raise ApiError(
                        f"there is a key '{name}' in {file} already",
                        remedy=f"choose another id, or end that one with `{_command('revoke', file, name)}`",
                    )
                write([*held, key])
    except InvalidRequest as cause:
        # A fault of the file is the file's; of the new key its own remedy would send the caller here again.
        new = cause.detail.startswith(_NEW)
        remedy = "correct the option; `halflife keys create --help` shows examples" if new else cause.remedy
        raise ApiError(cause.detail.replace(f"{_NEW}, key 1", _NEW, 1), remedy=remedy) from cause
    written = keys.entry_of(key)
    if as_json:
        typer.echo(json.dumps({"token": token, "key": written}, ensure_ascii=False))
        return 0
    where = "nowhere" if entry else f"in {file}"
    typer.echo(f"The token of '{name}', shown this once (its hash is kept {where}):", err=True)
    typer.echo(token)
    if entry:
        typer.echo("Its entry, for the list in HALFLIFE_KEYS:", err=True)
        typer.echo(json.dumps([written], ensure_ascii=False, separators=(",", ":")))
    return 0


def list_(file: FileOption = None, as_json: JsonOption = False) -> int:
    r"""List the keys of a file: what each allows, never a token.

    \b
    Example:
      halflife keys list --file keys.json
    """
    from app import keys

    if file is None:
        raise _no_file()
    held = _read(file)
    if as_json:
        shown = [{k: v for k, v in keys.entry_of(key).items() if k != "hash"} for key in held]
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return 0
    for key in held:
        parts = [key.id, ",".join(key.scopes), ",".join(key.collections)]
        if key.filter is not None:
            parts.append(f"filter {json.dumps(key.filter, ensure_ascii=False)}")
        if key.rate_per_s is not None:
            parts.append(f"{key.rate_per_s:g}/s")
        if key.expires is not None:
            over = key.expires <= datetime.now(UTC)
            parts.append(f"{'expired' if over else 'expires'} {key.expires:%Y-%m-%d %H:%M} UTC")
        typer.echo("  ".join(parts))
    if not held:
        typer.echo("There are no keys in it.", err=True)
    return 0


def revoke(
    name: Annotated[str, typer.Argument(metavar="ID", help="The key's id.", show_default=False)],
    file: FileOption = None,
) -> int:
    r"""Take a key out of the file: a running service refuses it from a second later on.

    The file stays its owner's and its group's, also under sudo; the group can read it if it could before.

    \b
    Example:
      halflife keys revoke app --file keys.json
    """
    if file is None:
        raise _no_file()
    with _editing(file) as (held, write):
        left = [key for key in held if key.id != name]
        if len(left) == len(held):
            raise ApiError(f"there is no key '{name}' in {file}", remedy=f"see `{_command('list', file)}`")
        write(left)
    typer.echo(f"'{name}' is revoked.", err=True)
    return 0


def register(app: typer.Typer, command: Callable[..., Any]) -> None:
    """Add `keys` and its commands to the command line."""
    group = typer.Typer(
        no_args_is_help=True,
        help="Make, list and revoke bearer keys.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, function in (("create", create), ("list", list_), ("revoke", revoke)):
        command(None, into=group, name=name)(function)
    app.add_typer(group, name="keys", rich_help_panel=PANEL)


# ---- the file -------------------------------------------------------------------------------------------------------


def _no_file() -> ApiError:
    return ApiError("no file of keys is named", remedy=f"give --file FILE, or set {FILE_VARIABLE}")


def _command(name: str, file: Path, *arguments: str) -> str:
    """Return a command of this group as it works when it is typed: with the file, unless the environment names it."""
    named = [] if os.environ.get(FILE_VARIABLE) == str(file) else ["--file", str(file)]
    return shlex.join(["halflife", "keys", name, *arguments, *named])


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read(file: Path) -> Sequence[Any]:
    from app import keys
    from app.errors import InvalidRequest

    try:
        return keys.parse_keys(file.read_text("utf-8"), where=str(file))
    except FileNotFoundError as cause:
        raise ApiError(
            f"there is no file {file}",
            remedy="check --file; `halflife keys create` makes one with its first key",
        ) from cause
    except InvalidRequest as cause:
        raise ApiError(cause.detail, remedy=cause.remedy) from cause
    except UnicodeDecodeError as cause:
        raise ApiError(f"{file} is not UTF-8") from cause


@contextlib.contextmanager
def _editing(file: Path) -> Iterator[tuple[Sequence[Any], Callable[[Sequence[Any]], None]]]:
    """Yield the file's keys, none where there is no file yet, and what replaces them; others wait meanwhile."""
    from app import keys

    def write(changed: Sequence[Any]) -> None:
        text = keys.text_of(changed)
        # What can't be read again must not replace what can.
        keys.parse_keys(text, where=str(file))
        _replace(file, text)

    # Through a link to what it leads to: replaced itself, the link would be gone.
    file = file.resolve()
    if not file.parent.is_dir():
        raise ApiError(f"there is no folder {file.parent}", remedy="make it first, or check --file")
    lock = file.with_name(f".{file.name}.lock")
    with lock.open("w") as held:
        # Made by root, the file's owner could not lock it any more.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            os.fchmod(held.fileno(), MODE)
            before = file.stat()
            os.fchown(held.fileno(), before.st_uid, before.st_gid)
        fcntl.flock(held, fcntl.LOCK_EX)
        yield _read(file) if file.exists() else [], write


def _replace(file: Path, text: str) -> None:
    """Write the file anew in one step: whoever reads it sees the old one or the new one, whole.

    It stays its owner's and its group's, who can read it if they could before. Raises ApiError where this user may not
    give it to them: the service that reads it would be shut out.
    """
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            os.fchmod(out.fileno(), MODE)
            if file.exists():
                _hand_over(out.fileno(), file)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _hand_over(handle: int, file: Path) -> None:
    """Give a new file the owner and the group of the one that it takes the place of, and what the group may read."""
    before, now = file.stat(), os.fstat(handle)
    grouped = bool(before.st_mode & stat.S_IRGRP)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        try:
            os.fchown(handle, before.st_uid, before.st_gid)
        except PermissionError as cause:
            if before.st_uid == now.st_uid and not grouped:
                return
            raise ApiError(
                f"{file} belongs to user {before.st_uid} and group {before.st_gid}, whom this user can't give it back to",
                remedy="run this as the file's owner or as root, so that the service can still read it",
            ) from cause
    if grouped:
        os.fchmod(handle, MODE | stat.S_IRGRP)
