"""The virtual environment, made from nothing: an interpreter, hash-locked packages, the project itself.

Runs under any CPython 3.11+ before anything is installed, so it imports the standard library only and nothing of
this project. A venv cannot be moved into place when it is finished; so a stamp inside it, written last, says that
it is whole. One without the stamp is a leftover, and is removed and made anew. One that is only out of date is never
removed, since a service may run from it: a failed update leaves it as it was, or is finished by the next run.

    python bootstrap.py local|dev MODULE ARGUMENTS…    makes it, then becomes `.venv/bin/python -m MODULE ARGUMENTS…`
    python bootstrap.py local|dev                      only makes it
    python bootstrap.py --apart local|dev …            changes no environment that is there, since a service may run from
                                                       it: makes another beside it, such as `.venv-dev`
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

STAMP = "halflife-stamp.json"
# Lies in an environment from before its first file until its stamp: tells a leftover of ours from somebody's folder.
UNFINISHED = "halflife-unfinished"
# Each level contains the ones before it, so that the two commands share one environment and neither undoes the other.
LEVELS = ("local", "dev")
# Raise it when a whole environment of an older bootstrap is no longer good enough.
STAMP_FORMAT = 1
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class BootstrapError(Exception):
    """The environment cannot be made; the message says what to do about it."""


def say(text: str) -> None:
    """Print a line of progress on standard error: standard output belongs to the command that follows."""
    print(text, file=sys.stderr, flush=True)


def lock_path(root: Path, level: str) -> Path:
    """Where a level's lock lies."""
    return root / "locks" / f"{level}.lock"


def environment_key(root: Path, level: str, version: str) -> str:
    """Digest of all that an environment depends on: the locks, the project's own tables, its place, the interpreter.

    The place counts because the console scripts of a venv carry absolute paths.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    tables = {name: project.get(name) for name in ("project", "dependency-groups", "build-system")}
    tables["uv"] = project.get("tool", {}).get("uv")
    digest = hashlib.sha256()
    for part in (
        str(STAMP_FORMAT),
        level,
        version,
        str(root),
        json.dumps(tables, sort_keys=True),
        lock_path(root, "bootstrap").read_text(encoding="utf-8"),
        lock_path(root, level).read_text(encoding="utf-8"),
    ):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def stamped_level(root: Path, venv: Path) -> tuple[str, bool] | None:
    """The level that a whole environment was made for, and whether it is still current; None for a leftover."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
        level, version, key, place = (stamp[name] for name in ("level", "python", "key", "root"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if level not in LEVELS or place != str(root) or not os.access(venv / "bin" / "python", os.X_OK):
        return None
    return level, key == environment_key(root, level, version)


def write_stamp(root: Path, venv: Path, *, level: str, version: str, key: str) -> None:
    """Write in one step what an environment is; an empty key is never current."""
    stamp = {"level": level, "python": version, "root": str(root), "key": key}
    draft = venv / f"{STAMP}.new"
    draft.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    draft.replace(venv / STAMP)


def half_updated(venv: Path) -> bool:
    """Whether an update of an environment was begun and not finished."""
    try:
        return bool(json.loads((venv / STAMP).read_text(encoding="utf-8"))["key"] == "")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def wanted_level(asked: str, present: str | None) -> str:
    """The larger of the two levels: what a developer installed stays when a smaller command runs."""
    if present is None:
        return asked
    return max(asked, present, key=LEVELS.index)


def lock_note(path: Path, name: str) -> str | None:
    """The value of a `# name: value` line in a lock's head."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return None
        found = re.fullmatch(rf"# {re.escape(name)}: (.*)", line)
        if found:
            return found[1]
    return None


def download_size(path: Path) -> str:
    """What the lock's head tells of its download on a machine like this one, to print in a sentence."""
    system = {"darwin": "macos-arm64"}.get(sys.platform, "linux-x86_64")
    for part in (lock_note(path, "download") or "").split(", "):
        name, _, size = part.partition(" ")
        if name == system:
            return f"about {size}"
    return "an unknown amount"


@contextlib.contextmanager
def exclusive(root: Path) -> Iterator[int]:
    """Hold the project's bootstrap lock; yields its descriptor, which children inherit.

    With the children holding it too, a killed bootstrap whose installer still writes keeps the next one waiting.
    """
    descriptor = os.open(root / ".venv.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another command is making .venv just now; waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def child_environment(pip_settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for pip and uv, with uv told what the user told pip: index, certificates, patience."""
    environment = dict(os.environ)
    # Another interpreter's module path would be searched by pip before the new environment's.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
        environment.pop(name, None)
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    if not any(name in environment for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX")):
        if "index-url" in pip_settings:
            environment["UV_DEFAULT_INDEX"] = pip_settings["index-url"]
        if "extra-index-url" in pip_settings:
            environment.setdefault("UV_EXTRA_INDEX_URL", pip_settings["extra-index-url"])
    if "cert" in pip_settings:
        environment.setdefault("SSL_CERT_FILE", pip_settings["cert"])
    for name in ("default-timeout", "timeout"):
        if name in pip_settings:
            environment.setdefault("UV_HTTP_TIMEOUT", pip_settings[name])
    return environment


def parse_pip_settings(listing: str) -> dict[str, str]:
    """Read the output of `pip config list`; the environment outranks a command's section, that one the global one."""
    ranks = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        section, _, option = name.partition(".")
        if separator and section in ranks and ranks[section] >= found.get(option, (0, ""))[0]:
            found[option] = (ranks[section], " ".join(value.strip().strip("'\"").replace("\\n", " ").split()))
    return {option: value for option, (_, value) in found.items()}


def end_group(child: subprocess.Popen[str]) -> None:
    """End an installer with all that it started, so that nothing writes any more when this returns."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 2.0)):
        until = time.monotonic() + patience_s
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
            while time.monotonic() < until:
                child.poll()  # reaps it: an unreaped leader would keep the group alive
                os.killpg(child.pid, 0)
                time.sleep(0.02)


def run(command: Sequence[str], *, doing: str, environment: Mapping[str, str], lock: int, root: Path) -> None:
    """Run one installer and pass on what it tells, without its list of every package.

    Raises BootstrapError when it fails. Ends it when this process is told to end.
    """
    with subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
        cwd=root,
        process_group=0,
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if not line.startswith((" + ", " - ", " ~ ")) and line.strip():
                    say(f"    {line.rstrip()}")
        except BaseException:
            end_group(child)
            raise
    if child.returncode != 0:
        raise BootstrapError(
            f"{doing} failed (exit code {child.returncode}); what the installer said stands above.\n"
            "Remedy: if the network needs a proxy or a mirror, set HTTPS_PROXY, PIP_INDEX_URL or UV_DEFAULT_INDEX,\n"
            "make sure that the disk has 2 GB free, and run this again."
        )


def remove(venv: Path, *, why: str | None = None) -> None:
    """Remove an environment. Refuses a folder that is none."""
    # Moved aside in one step first: a removal that is cut short leaves no ruin where the next start looks.
    aside = venv.with_name(f"{venv.name}.old")
    if aside.exists():
        shutil.rmtree(aside)
    if venv.is_symlink():
        venv.unlink()
        return
    if not venv.exists():
        return
    ours = any((venv / name).exists() for name in ("pyvenv.cfg", UNFINISHED))
    if not ours and any(venv.iterdir()):
        raise BootstrapError(
            f"{venv} is not a virtual environment. Remedy: move it away, then run this again."
        )
    if why:
        say(why)
    venv.rename(aside)
    shutil.rmtree(aside)


def install(root: Path, venv: Path, level: str, lock: int) -> None:
    """Bring an environment to a level, making it where it is missing, and stamp it."""
    python = str(venv / "bin" / "python")
    started = time.monotonic()
    fresh = not venv.exists()
    bootstrap, packages = lock_path(root, "bootstrap"), lock_path(root, level)
    environment = child_environment({})
    count = sum(
        1
        for line in packages.read_text(encoding="utf-8").splitlines()
        if re.match(r"[a-z0-9]", line, re.IGNORECASE)
    )
    if fresh:
        version = ".".join(map(str, sys.version_info[:3]))
        say(
            f"Making {venv.name} with Python {version}: {count} packages, {download_size(packages)} to download, "
            f"and uv to install them, {download_size(bootstrap)}. This happens once."
        )
        venv.mkdir()
        (venv / UNFINISHED).touch()
        # Its own process, so that an interrupt ends it like every other step.
        make = [sys.executable, "-I", "-m", "venv", str(venv)]
        run(make, doing=f"Making {venv.name}", environment=environment, lock=lock, root=root)
    else:
        say(
            f"Bringing {venv.name} to {packages.relative_to(root)} ({count} packages); only what changed is downloaded."
        )

    listing = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, env=environment, check=False
    ).stdout
    environment = child_environment(parse_pip_settings(listing))
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
    hashed = ["--require-hashes", "--no-deps", "--only-binary", ":all:"]
    say("  uv, by pip, checked against locks/bootstrap.lock")
    command = [python, "-m", "pip", "install", *quiet, *hashed, "-r", str(bootstrap)]
    run(command, doing="Installing uv", environment=environment, lock=lock, root=root)

    say(f"  packages, by uv, checked against {packages.relative_to(root)}")
    if not fresh:
        # Whatever happens from here on, what its stamp said of it holds no more: not for other locks either.
        write_stamp(root, venv, level=level, version="", key="")
    uv = [str(venv / "bin" / "uv"), "pip"]
    command = [
        *uv,
        "sync",
        "--python",
        python,
        "--require-hashes",
        "--no-build",
        str(bootstrap),
        str(packages),
    ]
    run(command, doing="Installing the packages", environment=environment, lock=lock, root=root)

    say("  halflife itself, from this folder")
    command = [
        *uv,
        "install",
        "--quiet",
        "--python",
        python,
        "--no-deps",
        "--offline",
        "--editable",
        str(root),
    ]
    run(command, doing="Installing halflife", environment=environment, lock=lock, root=root)

    version = subprocess.run(
        [python, "-I", "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    write_stamp(root, venv, level=level, version=version, key=environment_key(root, level, version))
    (venv / UNFINISHED).unlink(missing_ok=True)
    size = sum(path.lstat().st_size for path in venv.rglob("*") if path.is_file() and not path.is_symlink())
    say(f"Ready in {time.monotonic() - started:.1f} s; {venv.name} holds {size / 1e6:.0f} MB.")


def end_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    """Turn a signal into an exception, so that half-made things are removed on the way out."""
    raise SystemExit(128 + number)


def ensure(root: Path, asked: str, *, apart: bool = False) -> Path:
    """Make the environment whole for at least the level asked for, and return it. Fast when it is.

    `apart`: one that is there and would have to change is left as it is, and one beside it made.
    """
    venv = root / ".venv"
    present = stamped_level(root, venv)
    if present is not None and present[1] and wanted_level(asked, present[0]) == present[0]:
        return venv
    if apart and venv.exists():
        venv = root / f".venv-{asked}"
        present = stamped_level(root, venv)
        if present == (asked, True):
            return venv
    with exclusive(root) as lock:
        # Another command may have made it while this one waited.
        present = stamped_level(root, venv)
        level = wanted_level(asked, present[0] if present else None)
        if present == (level, True):
            return venv
        try:
            if present is None:
                remove(
                    venv,
                    why=f"Removing {venv.name}: it was left half-made, made by something else, or moved here.",
                )
            install(root, venv, level, lock)
        except BaseException as error:
            for number in ENDING:
                signal.signal(number, signal.SIG_IGN)
            if (venv / UNFINISHED).exists() and not (venv / STAMP).exists():
                remove(venv, why=f"Removing the half-made {venv.name}.")
            elif present is not None:
                left = (
                    "may be half updated, which the next run mends" if half_updated(venv) else "is as it was"
                )
                say(f"{venv.name} stays; it {left}. Should it not work, remove it and run this again.")
            if isinstance(error, subprocess.CalledProcessError | OSError):
                raise BootstrapError(f"Making {venv.name} failed: {error}") from error
            raise
    return venv


def main(arguments: Sequence[str]) -> int:
    """Make the environment, then become the module named, or return an exit code."""
    apart = bool(arguments) and arguments[0] == "--apart"
    arguments = arguments[apart:]
    if not arguments or arguments[0] not in LEVELS:
        say(f"usage: bootstrap.py [--apart] {'|'.join(LEVELS)} [MODULE ARGUMENTS…]")
        return 64
    root = Path(__file__).resolve().parent.parent
    # A signal that is ignored here (nohup, a background job) stays so.
    heeded = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, end_on_signal)
    try:
        venv = ensure(root, arguments[0], apart=apart)
    except BootstrapError as error:
        say(f"error: {error}")
        return 1
    except SystemExit as ended:
        begun = any(half_updated(folder) for folder in root.glob(".venv*"))
        say(f"Interrupted; {'running this again finishes it' if begun else 'nothing half-made is left'}.")
        return int(ended.code or 0)
    if len(arguments) == 1:
        return 0
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)
    python = str(venv / "bin" / "python")
    # -P: a folder named `scripts` where the caller stands must not be taken for ours.
    return os.execv(python, [python, "-P", "-m", *arguments[1:]])  # noqa: S606 - our own module, no shell


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
