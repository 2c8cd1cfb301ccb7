"""Writes and checks `locks/`: every package at one version, with the digests of its files, for all platforms.

    ./scripts/lock                     after a change in pyproject.toml: resolves what changed, keeps the rest
    ./scripts/lock --upgrade           takes the newest allowed version of everything
    ./scripts/lock --upgrade-package X the same for one package
    ./scripts/lock --check             only says whether the locks still match pyproject.toml; needs no network

A lock names no package index: where packages come from is the user's own configuration of pip and uv.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from scripts.bootstrap import lock_note, lock_path

ROOT = Path(__file__).resolve().parent.parent
# The uv that installs everything else. Raising it is a change to this line and `build-system` in pyproject.toml.
UV = "uv==0.13.9"

# Name of the lock, what it is for, and what of pyproject.toml goes into it. `dev` first: the others take its versions.
LOCKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dev": ("all that ./scripts/check needs", ("--extra", "local", "--extra", "tracing", "--group", "dev")),
    "local": ("all that ./scripts/quickstart and `halflife up` need", ("--extra", "local")),
    "image": (
        "what the container image holds: the API and the embedder",
        ("--extra", "embedder", "--extra", "files", "--extra", "tracing"),
    ),
}

# Where a download size is told for, with the environment in which markers are read.
PLATFORMS = {
    "linux-x86_64": (
        "linux",
        "x86_64",
        "Linux",
        [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)],
    ),
    "macos-arm64": ("darwin", "arm64", "Darwin", list(tags.mac_platforms((14, 0), "arm64"))),
}
SIZED_PYTHON = (3, 12)
# The versions that the commands accept without a warning: each must find a build of every package.
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))


@dataclass(frozen=True)
class Sizes:
    """Bytes to download for one lock, per platform, and what has no build there for which Python."""

    total: dict[str, int]
    missing: dict[str, list[str]]


def dependency_digest(root: Path) -> str:
    """Digest of every table of pyproject.toml that decides what a lock holds; formatting and comments don't count."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    decisive = {
        "requires-python": project["project"]["requires-python"],
        "dependencies": project["project"]["dependencies"],
        "optional-dependencies": project["project"].get("optional-dependencies", {}),
        "dependency-groups": project.get("dependency-groups", {}),
        "constraints": project.get("tool", {}).get("uv", {}).get("constraint-dependencies", []),
        "uv": UV,
        "locks": {name: options for name, (_, options) in LOCKS.items()},
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def body_digest(text: str) -> str:
    """Digest of a lock without its head, by which an edit by hand or a bad merge shows."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def faults(root: Path) -> list[str]:
    """Say what is wrong with the locks as they lie there; an empty list when nothing is."""
    found = []
    expected = dependency_digest(root)
    for name in ("bootstrap", *LOCKS):
        path = lock_path(root, name)
        if not path.is_file():
            found.append(f"{path.relative_to(root)} is missing")
        elif lock_note(path, "dependencies") != expected:
            found.append(
                f"{path.relative_to(root)} was made from other dependencies than pyproject.toml names now"
            )
        elif lock_note(path, "body") != body_digest(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(root)} was changed by hand")
    return found


def compile_lock(requirements: Path, output: Path, options: Sequence[str]) -> None:
    """Resolve into a lock; versions that stand in `output` already are kept where they still fit."""
    command = [
        *(str(Path(sys.executable).with_name("uv")), "pip", "compile", str(requirements), *options),
        *("--output-file", str(output), "--universal", "--python-version", "3.11", "--generate-hashes"),
        *("--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--quiet"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def read_requirements(text: str) -> list[Requirement]:
    """The pinned requirements of a lock, without digests."""
    lines = re.findall(r"^[A-Za-z0-9][^\\#\n]*", text, flags=re.MULTILINE)
    return [Requirement(line.strip()) for line in lines]


def wheel_bytes(files: Sequence[dict[str, Any]], supported: Sequence[tags.Tag]) -> int | None:
    """Size of the file that an installer takes on a platform: the best match wins. None where nothing fits."""
    ranks = {tag: rank for rank, tag in enumerate(supported)}
    fitting = []
    for file in files:
        name = file["url"].rsplit("/", 1)[-1]
        matches = [ranks[tag] for tag in parse_wheel_filename(name)[3] if tag in ranks]
        if matches:
            fitting.append((min(matches), int(file.get("size", 0))))
    return min(fitting)[1] if fitting else None


def choose_wheels(
    text: str, wheels: dict[tuple[str, str], list[dict[str, Any]]], platform: str, python: tuple[int, int]
) -> dict[str, int | None]:
    """The size of each file that a lock installs on one platform and Python; None where there is no build."""
    system, machine, system_name, names = PLATFORMS[platform]
    supported = [*tags.cpython_tags(python, platforms=names), *tags.compatible_tags(python, platforms=names)]
    version = f"{python[0]}.{python[1]}"
    environment = {
        "sys_platform": system,
        "platform_machine": machine,
        "platform_system": system_name,
        "python_version": version,
        "python_full_version": f"{version}.0",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    chosen = {}
    for each in read_requirements(text):
        if each.marker is None or each.marker.evaluate(environment):
            key = (canonicalize_name(each.name), str(each.specifier).removeprefix("=="))
            chosen[each.name] = wheel_bytes(wheels[key], supported)
    return chosen


def measure(locks: dict[str, str]) -> dict[str, Sizes]:
    """Ask the index, through uv, how large the files of each lock are on each platform."""
    everything = {str(each): None for text in locks.values() for each in read_requirements(text)}
    with tempfile.TemporaryDirectory() as folder:
        pinned = {"project": {"name": "sizes", "version": "0", "requires-python": ">=3.11"}}
        lines = [f"{key} = {json.dumps(value)}" for key, value in pinned["project"].items()]
        lines.append(f"dependencies = {json.dumps(list(everything))}")
        Path(folder, "pyproject.toml").write_text("[project]\n" + "\n".join(lines) + "\n", encoding="utf-8")
        uv = str(Path(sys.executable).with_name("uv"))
        environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
        subprocess.run([uv, "lock", "--quiet"], check=True, cwd=folder, env=environment)
        resolved = tomllib.loads(Path(folder, "uv.lock").read_text(encoding="utf-8"))
    wheels = {(each["name"], each.get("version")): each.get("wheels", []) for each in resolved["package"]}
    measured = {}
    for lock, text in locks.items():
        sizes = Sizes({}, {})
        for platform in PLATFORMS:
            sizes.missing[platform] = []
            for python in PYTHONS:
                chosen = choose_wheels(text, wheels, platform, python)
                absent = [name for name, size in chosen.items() if size is None]
                sizes.missing[platform] += [f"{name} ({python[0]}.{python[1]})" for name in absent]
                if python == SIZED_PYTHON:
                    sizes.total[platform] = sum(size or 0 for size in chosen.values())
        measured[lock] = sizes
    return measured


def write(upgrade: Sequence[str]) -> None:
    """Make every lock anew. A lock is replaced only once all of them could be made."""
    with tempfile.TemporaryDirectory() as folder:
        drafts = {name: Path(folder, f"{name}.lock") for name in ("bootstrap", *LOCKS)}
        for name, draft in drafts.items():
            if lock_path(ROOT, name).is_file():
                draft.write_text(lock_path(ROOT, name).read_text(encoding="utf-8"), encoding="utf-8")
        tool = Path(folder, "uv.in")
        tool.write_text(UV + "\n", encoding="utf-8")
        compile_lock(tool, drafts["bootstrap"], ())
        for name, (_, options) in LOCKS.items():
            versions = ("--constraint", str(drafts["dev"])) if name != "dev" else tuple(upgrade)
            if name != "dev":
                drafts[name].unlink(missing_ok=True)
            compile_lock(ROOT / "pyproject.toml", drafts[name], (*options, *versions))
        texts = {name: draft.read_text(encoding="utf-8") for name, draft in drafts.items()}
    sizes = measure(texts)
    purposes = {"bootstrap": "uv, which installs the rest", **{name: why for name, (why, _) in LOCKS.items()}}
    for name, text in texts.items():
        if re.search(r"://", text):
            raise SystemExit(
                f"error: locks/{name}.lock would name a place to download from; remove it at its source."
            )
        told = ", ".join(f"{platform} {size / 1e6:.0f} MB" for platform, size in sizes[name].total.items())
        head = [
            f"# Made by ./scripts/lock: {purposes[name]}. Do not edit.",
            f"# dependencies: {dependency_digest(ROOT)}",
            f"# body: {body_digest(text)}",
            f"# download: {told}",
        ]
        lock_path(ROOT, name).parent.mkdir(exist_ok=True)
        lock_path(ROOT, name).write_text("\n".join(head) + "\n" + text, encoding="utf-8")
        print(f"locks/{name}.lock: {len(read_requirements(text))} packages; {told}")
        for platform, names in sizes[name].missing.items():
            if names:
                print(f"  without a build for {platform}: {', '.join(names)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see the module's own text."""
    parser = argparse.ArgumentParser(
        prog="./scripts/lock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a lock is out of date"
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest allowed version of everything"
    )
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME")
    options = parser.parse_args(arguments)
    if options.check:
        found = faults(ROOT)
        for fault in found:
            print(f"{fault}.")
        print("Remedy: run ./scripts/lock and commit locks/." if found else "The locks match pyproject.toml.")
        return 1 if found else 0
    upgrade = ["--upgrade"] if options.upgrade else []
    upgrade += [part for name in options.upgrade_package for part in ("--upgrade-package", name)]
    try:
        write(upgrade)
    except subprocess.CalledProcessError as error:
        print("error: no lock was changed; what uv said stands above.", file=sys.stderr)
        return int(error.returncode)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
