"""Own what is known of a local stack from outside: where it keeps its data, whether it runs, how it is, how it ends.

The stack itself is one supervising process (`scripts.supervisor`) with the nodes, the embedding server and the API
below it. This module starts and ends that process and reads what it wrote down in `<data>/stack.json`. It holds no
process itself, and never signals one that it can't prove to be ours.
"""

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from scripts.distribution import LocalStackError, said

DEFAULT_DATA = Path(".halflife")
DATA_VARIABLE = "HALFLIFE_DATA"
DEFAULT_PORT = 8080

STACK_LOG = "stack.log"
_STATE = "stack.json"
_LOCK = "stack.lock"
# A node may take 90 s to start, the embedder builds its graph on the first start, and everything is installed then.
_START_TIMEOUT_S = 900.0
# The API drains for 15 s and as long as HALFLIFE_DRAIN_S says, 60 at most; a node closes in 25 s.
_STOP_TIMEOUT_S = 120.0
_POLL_S = 0.1
_TRIES = 3

# What each line of the stack's log begins with, and who waits for a start need not read.
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")

Report = Callable[[str], None]


class StackFailed(LocalStackError):
    """The stack could not be started, or ended while it was being used."""


class RunsAlready(StackFailed):
    """Another supervisor holds the folder."""


# What a supervisor that found its folder held ends with.
RUNS_ALREADY = 75


class NothingRuns(LocalStackError):
    """No stack runs on the folder that was named, or the part of it that is needed has no address yet."""


def data_folder(chosen: Path | None) -> Path:
    """Return the folder given, else `$HALFLIFE_DATA`, else `.halflife` where we stand; always absolute."""
    return (chosen or Path(os.environ.get(DATA_VARIABLE) or DEFAULT_DATA)).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller asks of `up`. A port that is None is the one used before, else chosen freely; nodes likewise."""

    data: Path
    port: int | None = None
    elasticsearch_port: int | None = None
    embedder_port: int | None = None
    nodes: int | None = None
    heap_mb: int | None = None
    # Whether an idle stack may spend half a minute, once, on making later starts faster.
    quicken: bool = True

    def arguments(self) -> list[str]:
        """Return the command line of `python -m scripts.supervisor` that asks for the same."""
        line = ["--data", str(self.data)]
        for name in ("port", "elasticsearch_port", "embedder_port", "nodes", "heap_mb"):
            if (value := getattr(self, name)) is not None:
                line += [f"--{name.replace('_', '-')}", str(value)]
        return line if self.quicken else [*line, "--no-quicken"]


# ---- processes ------------------------------------------------------------------------------------------------------


def birth_of(pid: int) -> str | None:
    """Return what tells a living process apart from a later one with the same id, or None if it doesn't live.

    It is the boot's id with the start time in clock ticks where there is a `/proc`, else the start time as `ps` has it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    else:
        # The name in parentheses may hold anything, so count from its end: state first, start time as the 20th.
        rest = stat.rpartition(")")[2].split()
        if len(rest) < 20 or rest[0] in "ZX":
            return None
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return f"{boot}:{rest[19]}"
        return rest[19]
    return birth_by_ps(pid)


def birth_by_ps(pid: int) -> str | None:
    """Return a process's start time as `ps` has it, or None if it doesn't live."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        # It would be written in the caller's language and zone, and another caller's differ.
        env={**os.environ, "LC_ALL": "C", "TZ": "UTC"},
    ).stdout.split()
    return " ".join(listed[1:]) if listed and not listed[0].startswith("Z") else None


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the stack, as written down: the birth guards against signalling a foreigner."""

    name: str
    pid: int
    birth: str
    log: str

    @classmethod
    def of(cls, name: str, pid: int, *, log: Path) -> Self | None:
        """Return the living process `pid`, or None if it ended meanwhile."""
        birth = birth_of(pid)
        return None if birth is None else cls(name, pid, birth, str(log))

    @property
    def alive(self) -> bool:
        return birth_of(self.pid) == self.birth

    def signal(self, number: int) -> None:
        """Send a signal if it still is the very process that was written down."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class State:
    """What the supervisor wrote down. URLs have no slash at the end and no password; `nodes` are the local ones.

    `phase` is starting, running or stopping. `restarts` counts the parts that had to be started again. `embedder` is
    for people to read; requests go to `embedding_base_url`, which has the path that `/embeddings` is appended to.
    """

    phase: str
    supervisor: Process
    data: str
    api: str | None = None
    elasticsearch: str | None = None
    elasticsearch_nodes: list[str] = field(default_factory=list)
    embedder: str | None = None
    embedding_base_url: str | None = None
    nodes: int = 0
    processes: list[Process] = field(default_factory=list)
    restarts: int = 0
    detached: bool = False

    def write(self) -> None:
        """Write it down where `read_state` finds it, in one step."""
        path = Path(self.data) / _STATE
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        aside.replace(path)

    def forget(self) -> None:
        """Remove what was written down: nothing of it runs any more."""
        (Path(self.data) / _STATE).unlink(missing_ok=True)

    def address(self, of: str, url: str | None) -> str:
        """Return a part's address. Raises NothingRuns where it has none yet, or the stack is being ended."""
        if url and self.phase != "stopping":
            return url
        if self.phase == "stopping":
            raise NothingRuns(
                f"The stack on {self.data} is being ended.", remedy="Start it again with `halflife up`."
            )
        raise NothingRuns(
            f"The stack on {self.data} is still starting: its {of} has no address yet.",
            remedy="Wait until `halflife status` says ok, then try again.",
        )

    @property
    def urls(self) -> dict[str, Any]:
        """The four facts that `halflife status --json` promises."""
        return {
            "api": self.api,
            "elasticsearch": self.elasticsearch,
            "embedder": self.embedder,
            "nodes": self.nodes,
        }


def read_state(data: Path) -> State | None:
    """Return what was written down last, or None. The processes in it may be long gone."""
    try:
        raw = json.loads((data / _STATE).read_text(encoding="utf-8"))
        raw["supervisor"] = Process(**raw["supervisor"])
        raw["processes"] = [Process(**process) for process in raw["processes"]]
        if "embedding_base_url" not in raw and (embedder := raw.get("embedder")):
            # Written by an earlier version, whose own embedder had no path here and any other one its whole.
            raw["embedding_base_url"] = embedder if urlsplit(embedder).path else f"{embedder}/v1"
        return State(**raw)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def running(data: Path) -> State | None:
    """Return the state of the stack that runs on this data folder, or None if none does."""
    state = read_state(data)
    return state if state is not None and state.supervisor.alive else None


def asked_for(chosen: Path | None) -> State | None:
    """Return the stack on the folder that was given, else that on the folder found without, None where none runs there.

    Raises NothingRuns for a folder that was given: what was meant for its stack must not reach another.
    """
    folder = data_folder(chosen)
    state = running(folder)
    if state is None and chosen is not None:
        raise NothingRuns(
            f"No stack runs on {folder}.",
            remedy=f"Start one with `halflife up --data {folder}`, or leave --data out.",
        )
    return state


def addresses(chosen: Path | None) -> dict[str, str]:
    """Return the settings by which a service reaches what the stack asked for uses, as `app.settings` names them.

    A stack on a folder that was given goes before what the environment names; but where both mean the same server, the
    environment's address stays, which may carry a password. Raises NothingRuns as `asked_for` does, and for a stack that
    has no such address yet: what was meant for it must not reach the default's.
    """
    if (state := asked_for(chosen)) is None:
        return {}
    found: dict[str, str] = {}
    for setting, of, url in (
        ("elasticsearch_url", "Elasticsearch", ",".join(state.elasticsearch_nodes) or state.elasticsearch),
        ("embedding_base_url", "embedder", state.embedding_base_url),
    ):
        named = said(f"HALFLIFE_{setting.upper()}")
        if not named or (chosen is not None and without_password(named.split(",")[0]) != url):
            found[setting] = state.address(of, url)
    return found


def without_password(url: str) -> str:
    """Return a URL fit for printing."""
    parts = urlsplit(url.strip())
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


@contextlib.contextmanager
def exclusive(data: Path) -> Iterator[None]:
    """Hold the data folder for one supervisor; the lock ends with the process, however that ends."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / _LOCK).open("a") as handle:
        for left in range(_TRIES, 0, -1):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left == 1:
                    raise _runs_already(data) from None
            # Whoever only looks whether it is held holds it for less than this.
            time.sleep(_POLL_S)
        yield


def _runs_already(data: Path) -> RunsAlready:
    return RunsAlready(
        f"A stack runs on {data} already.",
        remedy="See `halflife status`; end it with `halflife down`, or take another --data folder.",
    )


def _held(data: Path) -> bool:
    """Tell whether a supervisor holds the data folder: from before it writes its state until after it is forgotten."""
    if not (data / _LOCK).exists():
        return False
    with (data / _LOCK).open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def end_with_stdin(force_after_s: float | None = None) -> None:
    """End this process by SIGTERM once standard input closes, as it does when the process at its other end dies.

    It is ended by force if it still lives `force_after_s` later.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        if force_after_s is not None:
            time.sleep(force_after_s)
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# ---- start and end --------------------------------------------------------------------------------------------------


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours with this interpreter, wherever the caller stands."""
    return [sys.executable, "-P", "-m", module, *arguments]


def log_folder(data: Path) -> Path:
    """Return where the logs lie, made if need be."""
    folder = data / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def launch(
    options: Options, report: Report, *, tied: bool = False
) -> tuple[State, "subprocess.Popen[bytes]"]:
    """Start a stack in the background and return when it answers.

    `tied` ends it with the calling process (keep the Popen: closing its `stdin` is what ends the stack); otherwise it
    stays. Raises StackFailed with the reason; then nothing of it is left running. Raises RunsAlready where another start
    was quicker; `wait_until_healthy` waits for that one.
    """
    # Of several starts at once one gets the folder, and with it this log's final name; it must not read the others'.
    log = log_folder(options.data) / f"stack-{os.getpid()}-{time.monotonic_ns()}.log"
    kept = log.with_name(STACK_LOG)
    arguments = [*options.arguments(), "--log", str(log), "--end-with-stdin" if tied else "--detached"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            python_command("scripts.supervisor", *arguments),
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    told = 0
    deadline = time.monotonic() + _START_TIMEOUT_S
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            pending = ""
            while True:
                ended = process.poll() is not None
                pending += lines.read()
                *whole, pending = pending.split("\n")
                for line in (_TIME.sub("", line) for line in whole):
                    # The last line of a failed start is told by the error below, in one piece.
                    if not line.startswith("error: "):
                        report(line)
                        told += 1
                    else:
                        pending = line
                if ended:
                    why = pending.removeprefix("error: ").strip() or "The stack ended while it was starting."
                    if process.returncode == RUNS_ALREADY:
                        log.unlink(missing_ok=True)
                        raise _runs_already(options.data)
                    # A part's own log says more than the stack's.
                    why, _, named = why.partition(" Its log is ")
                    raise StackFailed(
                        why, remedy=f"Its log is {named or f'{log if log.exists() else kept}.'}"
                    )
                state = running(options.data)
                if state is not None and state.supervisor.pid == process.pid and state.phase == "running":
                    return state, process
                if time.monotonic() > deadline:
                    raise StackFailed(
                        f"The stack was not ready after {_START_TIMEOUT_S:.0f} s.",
                        remedy=f"Its log is {kept}.",
                    )
                time.sleep(_POLL_S)
    except BaseException:
        end_process(process)
        raise


def obtain(
    options: Options, report: Report, *, tied: bool = False
) -> tuple[State, "subprocess.Popen[bytes] | None", "Health | None"]:
    """Return the stack that runs on the folder, with how it is, or start one, with its process (see `launch`).

    One that another command starts in the same moment is waited for.
    """
    found = running(options.data) is not None
    for _ in range(_TRIES):
        if found:
            health = wait_until_healthy(options.data, report)
            if health.state is not None:
                return health.state, None, health
            # It ended while we waited: start it anew.
        try:
            return *launch(options, report, tied=tied), None
        except RunsAlready:
            found = True
    raise RunsAlready(
        f"Another stack begins and ends on {options.data} again and again.",
        remedy=f"See {log_folder(options.data) / STACK_LOG}.",
    )


def end_process(process: "subprocess.Popen[bytes]", timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """End a supervisor of ours in order; by force if that takes too long or the caller is interrupted meanwhile."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(timeout_s)
        except BaseException as why:
            process.kill()
            process.wait(5)
            if not isinstance(why, subprocess.TimeoutExpired):
                raise
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def wait_until_healthy(data: Path, report: Report, timeout_s: float = 180.0) -> "Health":
    """Wait for a stack that another command started, or whose parts are being started again; return how it is at last."""
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        health = check(data)
        # One that begins or ends holds the folder and has no state yet, or none any more.
        done = health.status == "ok" or (health.status == "stopped" and not _held(data))
        if done or time.monotonic() > deadline:
            return health
        if not told:
            report(f"A stack runs on {data} already; waiting until all of it answers.")
            told = True
        time.sleep(0.5)


def stop(data: Path, report: Report, timeout_s: float = _STOP_TIMEOUT_S) -> bool:
    """End the stack that runs on this data folder; False if none did. Signals only processes proved to be its own.

    First in order, by its supervisor; what is left after `timeout_s` is killed.
    """
    state = read_state(data)
    if state is None:
        return False
    everyone = [state.supervisor, *state.processes]
    if not any(process.alive for process in everyone):
        state.forget()
        return False
    state.supervisor.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while state.supervisor.alive and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        # Parts that were started again meanwhile are known only from a newer state.
        latest = read_state(data)
        everyone += [process for process in (latest.processes if latest else ()) if process not in everyone]
    # Parts end by themselves when their supervisor does; give them the moment that this takes.
    patience = time.monotonic() + (10.0 if not state.supervisor.alive else 0.0)
    while any(process.alive for process in everyone) and time.monotonic() < patience:
        time.sleep(_POLL_S)
    for process in everyone:
        if process.alive:
            report(f"{process.name} (process {process.pid}) did not end in time and is killed.")
            process.signal(signal.SIGKILL)
    gone = time.monotonic() + 10.0
    while any(process.alive for process in everyone) and time.monotonic() < gone:
        time.sleep(_POLL_S)
    state.forget()
    return True


# ---- health ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Health:
    """How a stack is: `status` is ok, degraded, starting, stopping or stopped; `parts` say why, in words."""

    status: str
    state: State | None = None
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 all is well, 3 nothing runs, 4 something is amiss."""
        return {"ok": 0, "stopped": 3}.get(self.status, 4)

    def to_json(self) -> dict[str, Any]:
        """Return what `halflife status --json` prints."""
        facts: dict[str, Any] = {"api": None, "elasticsearch": None, "embedder": None, "nodes": 0}
        if self.state is not None:
            facts = {**self.state.urls, "elasticsearch_nodes": self.state.elasticsearch_nodes}
            facts["data"] = self.state.data
            facts["pids"] = {process.name: process.pid for process in self.state.processes}
            facts["restarts"] = self.state.restarts
        return {**facts, "status": self.status, "parts": self.parts}


def check(data: Path, timeout_s: float = 5.0) -> Health:
    """Ask every part of the stack on this data folder how it is."""
    state = running(data)
    if state is None:
        return Health("stopped")
    if state.phase != "running":
        return Health(state.phase, state)
    parts = {process.name: "not running" for process in state.processes if not process.alive}
    if state.api is not None:
        status, answer = get_json(f"{state.api}/readyz", timeout_s)
        for name, told in _checks(answer).items():
            if name not in parts and told.get("status") != "ok":
                parts[name] = str(told.get("reason") or "does not answer")
        if status != 200 and not parts:
            parts["api"] = "does not answer" if status is None else f"not ready (HTTP {status})"
    if state.elasticsearch_nodes:
        parts.update(_missing_nodes(state, timeout_s))
    return Health("degraded" if parts else "ok", state, parts)


def _checks(answer: Any) -> Mapping[str, Mapping[str, Any]]:
    checks = answer.get("checks") if isinstance(answer, dict) else None
    return checks if isinstance(checks, dict) else {}


def _missing_nodes(state: State, timeout_s: float) -> dict[str, str]:
    for url in state.elasticsearch_nodes:
        _, answer = get_json(f"{url}/_cluster/health?timeout=1s", timeout_s)
        if isinstance(answer, dict) and "number_of_nodes" in answer:
            if answer["number_of_nodes"] < state.nodes:
                return {
                    "elasticsearch": f"{answer['number_of_nodes']} of {state.nodes} nodes are in the cluster"
                }
            if answer.get("status") == "red":
                return {"elasticsearch": "its health is red: some data can't be reached"}
            return {}
    return {"elasticsearch": "no node answers"}


def get_json(url: str, timeout_s: float) -> tuple[int | None, Any]:
    """GET from this machine, past any proxy: the status (None where nobody answers) and the JSON (None where none)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}")
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None, None
    finally:
        connection.close()
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None
