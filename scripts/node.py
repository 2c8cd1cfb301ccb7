"""Own the life of local Elasticsearch nodes: start, wait, stop, and the rough handling that fault tests need.

Nodes listen on the loopback interface only and have no passwords: this is for one person's machine, never for a
network. Installing is `scripts.distribution`; nothing here talks to Elasticsearch beyond its health.
"""

import contextlib
import errno
import fcntl
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from scripts.distribution import (
    JAVA_FOLDER,
    VECTOR_MODULE,
    DigestMismatch,
    Distribution,
    InstallFailed,
    JavaMissing,
    JavaRuntime,
    LocalStackError,
    NoDiskSpace,
    Report,
    default_cache,
    ensure_installed,
    find_java,
    write_lock,
)

__all__ = [
    "KEEPS_DISK_BLOCKS", "DataInUse", "DataTooNew", "DigestMismatch", "Distribution", "InstallFailed", "JavaMissing", "JavaRuntime",
    "LocalCluster", "LocalNode", "LocalStackError", "NoDiskSpace", "NodeDied", "NotEnoughMemory", "PortTaken",
    "StartTimeout", "default_cache", "ensure_installed", "find_java", "quicken",
]  # fmt: skip

HOST = "127.0.0.1"
SINGLE_HEAP_MB = 512
CLUSTER_HEAP_MB = 384
MOST_NODES = 3
# Settings of a node on which the block of a full disk is set by hand: every 30 seconds Elasticsearch looks at the disk,
# and takes away such a block where there is room.
KEEPS_DISK_BLOCKS = {"cluster.info.update.interval": "1h"}

_START_TIMEOUT_S = 90.0
_STOP_GRACE_S = 25.0
_POLL_S = 0.1
_LEAST_FREE_BYTES = 500 * 2**20
# A node of 512 MB heap is at about 360 MB when it has started; at most heap, as much again as direct memory, code.
_BEYOND_HEAP_MB = 200
_PORT_ATTEMPTS = 3
# Below what Linux (32768) and macOS (49152) give to outgoing connections.
_FIRST_PORT, _PORTS, _PORT_TRIES = 20_000, 12_000, 200
_ARCHIVE_S = 300

# What stock Elasticsearch runs with, less what makes no sense at this size.
_JVM_FLAGS = (
    "-XX:+UseG1GC", "-XX:G1ReservePercent=15", "-XX:+ExitOnOutOfMemoryError", "-XX:-OmitStackTraceInFastThrow", "-Xss1m",
    "-Djava.awt.headless=true", "-Dfile.encoding=UTF-8", "-Des.networkaddress.cache.ttl=60",
    "-Dio.netty.noUnsafe=true", "-Dio.netty.noKeySetOptimization=true", "-Dio.netty.recycler.maxCapacityPerThread=0",
    "-Dlog4j.shutdownHookEnabled=false", "-Dlog4j2.disable.jmx=true", "-Dlog4j2.formatMsgNoLookups=true",
    "--enable-native-access=ALL-UNNAMED",
)  # fmt: skip


class PortTaken(LocalStackError):
    """Another program listens on a port that this node was to have."""


class NotEnoughMemory(LocalStackError):
    """The machine hasn't the memory for the heap that was asked for."""


class DataInUse(LocalStackError):
    """Another running node holds the data folder."""


class DataTooNew(LocalStackError):
    """The data folder was written by a newer Elasticsearch."""


class NodeDied(LocalStackError):
    """The node's process ended while it was starting, for a reason that has no class of its own."""


class StartTimeout(LocalStackError):
    """The node, or the cluster, wasn't ready in time."""


class LocalNode:
    """One Elasticsearch process with a data folder, a name and two ports that stay the same across restarts.

    Unless `detached`, the process is tied to this one: it ends when this process does, even if that is killed. A
    signal that the terminal sends to the whole group (Ctrl-C) does not reach it; use `with`, or call `stop`.
    `data` holds everything the node writes: config, data, logs, snapshots (unless `snapshots` names another folder),
    `node.json` (its name and ports) and, while it runs, `node.pid`.
    """

    def __init__(
        self,
        distribution: Distribution,
        data: Path,
        *,
        name: str = "node-1",
        cluster_name: str = "halflife",
        http_port: int | None = None,
        transport_port: int | None = None,
        heap_mb: int = SINGLE_HEAP_MB,
        detached: bool = False,
        snapshots: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Take the ports given, else those in `node.json`, else free ones at start. `settings` override ours."""
        self.distribution = distribution
        self.data = data.absolute()
        self.name = name
        self.cluster_name = cluster_name
        self.heap_mb = heap_mb
        self.detached = detached
        self.snapshots = (snapshots or data / "snapshots").absolute()
        self.settings = dict(settings or {})
        remembered = _read_json(self.data / "node.json")
        self.http_port: int | None = http_port or remembered.get("http_port")
        self.transport_port: int | None = transport_port or remembered.get("transport_port")
        # Only a port that nobody asked for and nobody remembers may be exchanged for another one.
        self._ports_are_ours_to_choose = self.http_port is None and self.transport_port is None
        self._seeds: Sequence[LocalNode] = ()
        # Whether it may found a cluster, where its folder holds none: of several nodes one at most.
        self._founds = False
        self._archive_to_make: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    # -- facts

    @property
    def url(self) -> str:
        """The base URL of its HTTP interface, with no slash at the end."""
        if self.http_port is None:
            raise LocalStackError(f"{self.name} has no port yet.", remedy="Start it first.")
        return f"http://{HOST}:{self.http_port}"

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None. Found again from `node.pid` by a later program."""
        if self._process is not None:
            return self._process.pid if self._process.poll() is None else None
        return _running_pid(self.data)

    @property
    def log_path(self) -> Path:
        return self.data / "logs" / "node.log"

    @property
    def console_path(self) -> Path:
        """What the process wrote to its standard output and error since it was last started."""
        return self.data / "logs" / "console.log"

    @property
    def running(self) -> bool:
        return self.pid is not None

    @property
    def paused(self) -> bool:
        return self._paused

    def health(self, timeout_s: float = 2.0) -> dict[str, Any] | None:
        """Return `_cluster/health` as this node sees it, or None when it doesn't answer in time."""
        return self._get("/_cluster/health?timeout=1s", timeout_s)

    # -- life

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> Self:
        """Start the process and wait until the node is in a cluster that is at least yellow.

        Nothing if this object started it and it still runs; `DataInUse` if another one did (ask `running` first).
        Raises a `LocalStackError`; then no process of ours is left.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_PORT_ATTEMPTS):
            try:
                self.spawn()
                self.wait_until_ready(max(1.0, deadline - time.monotonic()))
                return self
            except PortTaken:
                self._abandon()
                if not self._ports_are_ours_to_choose or attempt == _PORT_ATTEMPTS - 1:
                    raise
                self.http_port = self.transport_port = None
            except BaseException:
                self._abandon()
                raise
        raise AssertionError("unreachable")

    def spawn(self) -> None:
        """Start the process and return at once; `wait_until_ready` tells how it went."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._end(0)  # it died: let go of what is left of it
        self._refuse_what_cannot_work()
        self._choose_ports()
        self._check_ports()
        self._write_config()
        command = self._command()
        with self.console_path.open("wb") as console:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if self.detached else subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                # A group of its own, so that Ctrl-C reaches the parent alone and the node ends in order.
                start_new_session=True,
                env=_clean_environment(),
                cwd=self.data,
            )
        self._paused = False
        self._pid_file.write_text(f"{self._process.pid}\n", encoding="ascii")

    def wait_until_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait for `GET /` and a cluster that is at least yellow.

        Raises `StartTimeout`, or what the end of the process means: `PortTaken`, `DataInUse`, `NodeDied`, ...
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.running:
                raise self._diagnose()
            health = self._get("/_cluster/health?wait_for_status=yellow&timeout=2s", 4.0)
            if (
                health is not None
                and health.get("status") in ("yellow", "green")
                and not health.get("timed_out")
            ):
                return
            time.sleep(_POLL_S)
        raise StartTimeout(
            f"{self.name} was not ready after {timeout_s:.0f} s; the last it logged: {self._last_log_line()}",
            remedy=f"See {self.log_path}; a slow machine may need a longer timeout.",
        )

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """End the node in order (SIGTERM), after `grace_s` by force. Nothing if it doesn't run."""
        self._end(grace_s)

    def kill(self) -> None:
        """End the process with SIGKILL, as a power cut would, and wait until it is gone."""
        self._end(0)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): its connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let a frozen process run on (SIGCONT)."""
        self._signal(signal.SIGCONT)
        self._paused = False

    def restart(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Stop it in order and start it again: same name, ports and data."""
        self.stop()
        self.start(timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- before the start

    def _refuse_what_cannot_work(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        if (holder := _running_pid(self.data)) is not None:
            raise DataInUse(
                f"{self.data} is in use by a node that runs as process {holder}.",
                remedy=f"Stop it (kill {holder}), or take another data folder.",
            )
        if _is_locked(self.data / "data" / "node.lock"):
            raise DataInUse(
                f"{self.data} is in use by another node.",
                remedy="Stop that node, or take another data folder.",
            )
        free = shutil.disk_usage(self.data).free
        if free < _LEAST_FREE_BYTES:
            raise NoDiskSpace(
                f"{self.data} has {free / 2**20:.0f} MB left; a node wants {_LEAST_FREE_BYTES / 2**20:.0f} MB.",
                remedy="Free some space, or take a data folder elsewhere.",
            )
        available = _available_memory_mb()
        if available is not None and available < self.heap_mb + _BEYOND_HEAP_MB:
            raise NotEnoughMemory(
                f"{available} MB of memory are available; {self.name} wants {self.heap_mb} MB of heap and about "
                f"{_BEYOND_HEAP_MB} MB beside it.",
                remedy="Close something, or ask for a smaller heap (256 MB is about the least) or fewer nodes.",
            )

    def _command(self) -> list[str]:
        java = self.distribution.java
        command = [
            str(java.binary), f"-Xms{self.heap_mb}m", f"-Xmx{self.heap_mb}m",
            f"-XX:MaxDirectMemorySize={self.heap_mb // 2}m", *_JVM_FLAGS, *self._archive_flags(),
            f"-Djava.io.tmpdir={self.data / 'tmp'}", f"-XX:ErrorFile={self.data / 'logs' / 'crash-%p.log'}",
        ]  # fmt: skip
        if java.vectors:
            command += ["--add-modules", VECTOR_MODULE]
        home, config = str(self.distribution.home), str(self.data / "config")
        command += [
            "-cp",
            self.distribution.class_path,
            "halflife.node.Main",
            home,
            config,
            str(self._pid_file),
        ]
        return command if self.detached else [*command, str(os.getpid())]

    def _archive_flags(self) -> list[str]:
        """Use the archive of loaded classes, or make it. The JVM ignores one that doesn't fit, and is to do so silently."""
        if (made := self._archive_to_make) is not None:
            option = "ArchiveClassesAtExit" if made.suffix == ".jsa" else "AOTCacheOutput"
            return [f"-XX:{option}={made}", f"-Dhalflife.close.seconds={_ARCHIVE_S}"]
        archive = self.distribution.archive
        if archive is None or not archive.exists():
            return []
        option = "SharedArchiveFile" if archive.suffix == ".jsa" else "AOTCache"
        return [f"-XX:{option}={archive}", "-Xlog:disable"]

    def _choose_ports(self, free: Iterator[int] | None = None) -> None:
        free = free or iter(free_ports(2))
        self.http_port = self.http_port or next(free)
        self.transport_port = self.transport_port or next(free)
        _write_json(
            self.data / "node.json",
            {
                "name": self.name,
                "cluster": self.cluster_name,
                "http_port": self.http_port,
                "transport_port": self.transport_port,
            },
        )

    def _check_ports(self) -> None:
        for port, what in ((self.http_port, "HTTP"), (self.transport_port, "transport")):
            assert port is not None
            if _listens(port):
                raise PortTaken(
                    f"Port {port} of {HOST}, which {self.name} needs for {what}, is taken by another program.",
                    remedy="Stop that program, or choose another port.",
                )

    def _write_config(self) -> None:
        for folder in ("config", "logs", "tmp"):
            (self.data / folder).mkdir(exist_ok=True)
        self.snapshots.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(JAVA_FOLDER / "log4j2.properties", self.data / "config" / "log4j2.properties")
        lines = [
            f"{name}: {json.dumps(value)}" for name, value in (self._own_settings() | self.settings).items()
        ]
        (self.data / "config" / "elasticsearch.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _own_settings(self) -> dict[str, object]:
        chosen: dict[str, object] = {
            "cluster.name": self.cluster_name,
            "node.name": self.name,
            "path.data": str(self.data / "data"),
            "path.logs": str(self.data / "logs"),
            "path.repo": [str(self.snapshots)],
            "network.host": HOST,
            "http.port": self.http_port,
            "transport.port": self.transport_port,
            # An index of ours without its template would map vectors as floats: better an error than that.
            "action.auto_create_index": "-halflife*,+*",
            # In bytes, not in percent: a developer's disk that is 95 % full has room enough for this, yet one that is
            # really full still makes indices read-only before it breaks them.
            "cluster.routing.allocation.disk.watermark.low": "400mb",
            "cluster.routing.allocation.disk.watermark.high": "300mb",
            "cluster.routing.allocation.disk.watermark.flood_stage": "200mb",
        }
        if self._seeds:
            chosen["discovery.seed_hosts"] = [f"{HOST}:{node.transport_port}" for node in self._seeds]
            if self._founds:
                chosen["cluster.initial_master_nodes"] = [self.name]
        else:
            chosen["discovery.type"] = "single-node"
        return chosen

    # -- after the end

    def _diagnose(self) -> LocalStackError:
        """Say what the end of the process during its start means."""
        console = _tail(self.console_path)
        fatal = [line.removeprefix("FATAL ") for line in console.splitlines() if line.startswith("FATAL ")]
        text = "\n".join(fatal) or console
        if (
            "BindHttpException" in text
            or "BindTransportException" in text
            or "Address already in use" in text
        ):
            return PortTaken(
                f"Port {self.http_port} or {self.transport_port} of {HOST} was taken by another program while {self.name} started.",
                remedy="Stop that program, or choose other ports.",
            )
        if "failed to obtain node locks" in text:
            return DataInUse(
                f"{self.data} is in use by another node.",
                remedy="Stop that node, or take another data folder.",
            )
        if "cannot downgrade a node" in text:
            written = re.search(r"version \[([\d.]+)\]", text)
            return DataTooNew(
                f"{self.data} was written by Elasticsearch {written[1] if written else 'of a newer version'}; "
                f"this is {self.distribution.version}.",
                remedy="Take another data folder, or run the newer version.",
            )
        if "No space left on device" in text:
            return NoDiskSpace(
                f"The disk that holds {self.data} is full.", remedy="Free some space and start again."
            )
        if re.search(
            r"OutOfMemoryError|insufficient memory|Could not reserve enough space|Cannot allocate memory",
            text,
        ):
            return NotEnoughMemory(
                f"{self.name} could not get {self.heap_mb} MB of heap.",
                remedy="Close something, or ask for a smaller heap.",
            )
        last = fatal[-1] if fatal else (console.strip().splitlines() or [self._last_log_line()])[-1]
        code = self._process.returncode if self._process is not None else None
        return NodeDied(
            f"{self.name} ended while it was starting (exit code {code}): {last}",
            remedy=f"See {self.log_path}.",
        )

    def _last_log_line(self) -> str:
        lines = [line for line in _tail(self.log_path).splitlines() if line.startswith("[")]
        return lines[-1] if lines else "nothing"

    # -- the process

    @property
    def _pid_file(self) -> Path:
        return self.data / "node.pid"

    def _signal(self, number: int) -> None:
        pid = self.pid
        if pid is None:
            raise LocalStackError(f"{self.name} is not running.", remedy="Start it first.")
        os.kill(pid, number)

    def _abandon(self) -> None:
        """Kill what we started; what somebody else runs in this folder isn't ours to end."""
        if self._process is not None:
            self._end(0)

    def _end(self, grace_s: float) -> None:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if grace_s > 0:
                    os.kill(pid, signal.SIGTERM)
                    # A frozen process takes no other signal before this one.
                    os.kill(pid, signal.SIGCONT)
                    self._wait_gone(pid, grace_s)
                if self._is_there(pid):
                    os.kill(pid, signal.SIGKILL)
                    self._wait_gone(pid, 10.0)
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process = None
        self._paused = False
        if not _running_pid(self.data):
            self._pid_file.unlink(missing_ok=True)

    def _is_there(self, pid: int) -> bool:
        return self._process.poll() is None if self._process is not None else _is_alive(pid)

    def _wait_gone(self, pid: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._is_there(pid) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _get(self, path: str, timeout_s: float) -> dict[str, Any] | None:
        if self.http_port is None:
            return None
        # Not through urllib: that would send a loopback request to a proxy that the environment names.
        connection = http.client.HTTPConnection(HOST, self.http_port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()
        return answer if isinstance(answer, dict) else None


class LocalCluster:
    """One to three nodes under one data folder (`node-1`, `node-2`, ...), sharing a snapshot folder."""

    def __init__(
        self,
        distribution: Distribution,
        data: Path,
        *,
        nodes: int = 1,
        http_ports: Sequence[int] = (),
        cluster_name: str = "halflife",
        heap_mb: int | None = None,
        detached: bool = False,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Prepare the nodes; `start` runs them. `http_ports` name the ports of the first ones, the rest get free ones.

        A folder that held one node may be opened with three, not the other way round: a lone node could never win an
        election that the other two take part in.
        """
        if not 1 <= nodes <= MOST_NODES:
            raise LocalStackError(f"{nodes} nodes were asked for.", remedy=f"Ask for 1 to {MOST_NODES}.")
        self.data = data.absolute()
        before = len(list(self.data.glob("node-*/data")))
        if before > nodes:
            raise LocalStackError(
                f"{self.data} holds a cluster of {before} nodes; {nodes} could not elect a master among themselves.",
                remedy=f"Start it with {before} nodes, or take another data folder.",
            )
        self.nodes = [
            LocalNode(
                distribution,
                self.data / f"node-{number}",
                name=f"node-{number}",
                cluster_name=cluster_name,
                http_port=http_ports[number - 1] if number <= len(http_ports) else None,
                heap_mb=heap_mb or (SINGLE_HEAP_MB if nodes == 1 else CLUSTER_HEAP_MB),
                detached=detached,
                snapshots=self.data / "snapshots",
                settings=settings,
            )
            for number in range(1, nodes + 1)
        ]
        if nodes > 1:
            for node in self.nodes:
                node._seeds = self.nodes
            # Two new ones beside a slow old one would be a majority of three: they would found a second cluster, which
            # the old one can never join. Once they have all found each other, none may found another ever again.
            self.nodes[0]._founds = not (before and self._formed.exists())

    @property
    def _formed(self) -> Path:
        """A file that says that the cluster in this folder was whole once."""
        return self.data / "formed"

    def _note_formed(self) -> None:
        self._formed.touch()
        self.nodes[0]._founds = False

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    @property
    def running(self) -> bool:
        """Whether every node's process runs."""
        return all(node.running for node in self.nodes)

    def start(self, timeout_s: float = _START_TIMEOUT_S) -> Self:
        """Start all nodes at once and wait until they have found each other. On an error none is left running."""
        if len(self.nodes) == 1:
            self.nodes[0].start(timeout_s)
            self._note_formed()
            return self
        deadline = time.monotonic() + timeout_s
        try:
            self._choose_ports()
            for node in self.nodes:
                node.spawn()
            for node in self.nodes:
                node.wait_until_ready(max(1.0, deadline - time.monotonic()))
            self.wait_for(nodes=len(self.nodes), timeout_s=max(1.0, deadline - time.monotonic()))
            self._note_formed()
        except BaseException:
            for node in self.nodes:
                node._abandon()
            raise
        return self

    def _choose_ports(self) -> None:
        """Choose all ports before the first node starts: each node is told all of them."""
        free = iter(free_ports(2 * len(self.nodes)))
        for node in self.nodes:
            node.data.mkdir(parents=True, exist_ok=True)
            node._choose_ports(free)

    def wait_for(
        self, *, status: str = "yellow", nodes: int | None = None, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """Wait until some node that answers sees that status (`yellow` or `green`) and that many nodes; return its health."""
        deadline = time.monotonic() + timeout_s
        wanted = ("green",) if status == "green" else ("yellow", "green")
        seen: dict[str, Any] | None = None
        while time.monotonic() < deadline:
            for node in self.nodes:
                if not node.running or node.paused:
                    continue
                seen = node.health() or seen
                if seen and seen.get("status") in wanted and nodes in (None, seen.get("number_of_nodes")):
                    return seen
            time.sleep(_POLL_S)
        raise StartTimeout(
            f"The cluster was not {status} with {nodes or 'its'} nodes after {timeout_s:.0f} s; last seen: {seen}",
            remedy=f"See the logs below {self.data}.",
        )

    def health(self) -> dict[str, Any] | None:
        """Return the cluster's health as seen by the first node that answers, or None."""
        for node in self.nodes:
            if node.running and not node.paused and (health := node.health()) is not None:
                return health
        return None

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Stop all nodes in order, all at once: one after the other, each would wait for the ones already gone."""
        for node in self.nodes:
            if node.running:
                with contextlib.suppress(ProcessLookupError, LocalStackError):
                    node._signal(signal.SIGTERM)
                    node._signal(signal.SIGCONT)
        for node in self.nodes:
            node.stop(grace_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def quicken(distribution: Distribution, report: Report = lambda line: None) -> None:
    """Make later starts two to four times faster: run a node once and keep an archive of the classes it loaded.

    Takes half a minute and 100 MB of disk, once per installation and Java runtime; nothing if it is there already.
    Starts work without it, so a failure is reported and not raised.
    """
    archive = distribution.archive
    if archive is None or archive.exists():
        return
    report("preparing faster starts, once")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="halflife-quicken-") as folder:
        node = LocalNode(distribution, Path(folder) / "node", name="quicken")
        node._archive_to_make = Path(folder) / archive.name
        try:
            node.start()
            for path in ("/", "/_search", "/_cat/indices", "/_cluster/state", "/_nodes/stats"):
                node._get(path, 10.0)
        except LocalStackError as failure:
            report(f"no faster starts: {failure}")
            return
        finally:
            node.stop(_ARCHIVE_S)
        if not node._archive_to_make.exists():
            report("no faster starts: this Java runtime made no archive")
            return
        # Renamed into place, so that no starting node ever sees half of it.
        aside = archive.with_name(f"{archive.name}-{os.getpid()}")
        shutil.move(node._archive_to_make, aside)
        aside.replace(archive)
    report(f"later starts are faster now; that took {time.monotonic() - started:.0f} s")


# ---- the machine ---------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Find free ports, all held at once so that they differ.

    Not the system's own choice: those come from the range that outgoing connections use, and while a program is down
    one of them may sit on its port, or its peers' attempts to reach it may meet themselves there.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(_PORT_TRIES):
            port = _FIRST_PORT + secrets.randbelow(_PORTS)
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise PortTaken(
        f"No free port was found between {_FIRST_PORT} and {_FIRST_PORT + _PORTS}.",
        remedy="Name the ports to use.",
    )


def _listens(port: int) -> bool:
    """Whether somebody listens there. A bind alone isn't enough: macOS lets it pass beside a wildcard listener."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((HOST, port)) == 0:
            return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as failure:
            return failure.errno == errno.EADDRINUSE
    return False


def _running_pid(data: Path) -> int | None:
    """Return the process id in `node.pid` if that process is a node of this very folder."""
    try:
        pid = int((data / "node.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    # The number alone proves nothing: after a crash or a reboot it may be somebody else's.
    return pid if str(data / "config") in _command_line(pid) else None


def _command_line(pid: int) -> str:
    """Return a living process's command line, or an empty string (also for one that ended but wasn't collected)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except FileNotFoundError:
        if Path("/proc/self/cmdline").exists():
            return ""
    except OSError:
        return ""
    listed = subprocess.run(
        ["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listed.stdout


def _is_alive(pid: int) -> bool:
    return bool(_command_line(pid).strip())


def _is_locked(lock: Path) -> bool:
    """Whether a process holds the lock that Elasticsearch keeps on its data folder."""
    try:
        with lock.open("r+b") as handle:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as failure:
        return failure.errno in (errno.EACCES, errno.EAGAIN)
    return False


def _available_memory_mb() -> int | None:
    """Return what a new process may have, in MB: within the container's limit where there is one, else None if unknown."""
    limits = []
    with contextlib.suppress(OSError):
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE):
            limits.append(int(found[1]) // 1024)
    # A container's limit; the word "max" there stands for none.
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(limit).read_text(encoding="ascii")) // 2**20)
    if not limits:
        with contextlib.suppress(OSError, ValueError):
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20)
    return min(limits) if limits else None


def _clean_environment() -> dict[str, str]:
    """Ours without the variables that would change a Java virtual machine or make it chatty."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS")
    }


def _tail(path: Path, size: int = 20_000) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - size))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


# ---- a small command line, for looking into things -----------------------------------------------------------------


def _main(arguments: Sequence[str]) -> int:
    import argparse

    parser = argparse.ArgumentParser(prog="python -m scripts.node", description="Run Elasticsearch alone.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="run nodes until Ctrl-C")
    up.add_argument("--data", type=Path, required=True)
    up.add_argument("--port", type=int, help="the first node's HTTP port")
    up.add_argument("--nodes", type=int, default=1)
    up.add_argument("--heap", type=int, help="heap per node in MB")
    commands.add_parser("install", help="fetch and compile")
    commands.add_parser("lock", help="pin the jars anew (for maintainers)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "lock":
            jars = write_lock(print)
            print(f"{len(jars)} jars, {sum(jar.size for jar in jars) / 1e6:.1f} MB")
            return 0
        distribution = ensure_installed(report=print)
        if chosen.command == "install":
            quicken(distribution, print)
        java = distribution.java
        print(
            f"Elasticsearch {distribution.version} on Java {java.version} ({java.home}), vector module: {java.vectors}"
        )
        if chosen.command == "up":
            ports = [chosen.port] if chosen.port else []
            with (
                _until_signal() as stopped,
                LocalCluster(
                    distribution, chosen.data, nodes=chosen.nodes, http_ports=ports, heap_mb=chosen.heap
                ) as cluster,
            ):
                print("\n".join(cluster.urls), flush=True)
                while not stopped and cluster.running:
                    time.sleep(0.2)
    except LocalStackError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _until_signal() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one acts as usual."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
