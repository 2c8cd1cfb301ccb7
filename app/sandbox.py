"""Strangers' files read in processes of their own: a parser that hangs, swells or crashes costs one file, not the service.

Owns the processes, their bounds (time, memory), the pipe to them and the line before them: bounded, and fair to each
caller. They get no environment, so no secret; each is replaced after a while, and at once after a failure. What is read
in them is `extracting`'s.
"""

import contextlib
import json
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any, Final, Self

from app import extracting
from app.errors import Overloaded, UnreadableFile
from app.extracted import Extracted, Limits

_FILES_PER_PROCESS: Final = 200
_LENGTH: Final = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one file may cost: seconds, and bytes of address space (where the system can bound them)."""

    timeout_s: float = 60.0
    memory_bytes: int = 2 * 2**30
    small_share: float = 1.0
    """How much of the time a file of no size has; each MiB of it adds as much, up to the whole."""

    def seconds(self, size: int) -> float:
        """Return how long a file of so many bytes may be read."""
        return self.timeout_s * min(1.0, self.small_share * (1 + size / 2**20))


@dataclass(frozen=True, slots=True)
class Line:
    """How much may wait for a process: uploads and bytes of all callers. One caller may have half of each."""

    uploads: int = 64
    most_bytes: int = 64 * 2**20
    wait_s: float = 20.0
    """How long an upload waits for the first of its files to be begun before it is turned away."""


class Sandbox:
    """A few processes that read files, started when they are needed. Close it, or use `with`. Any thread may call.

    One process more than `workers` is kept for callers of whom no file is being read: whoever has files that take long
    does not make the others wait.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        bounds: Bounds | None = None,
        limits: Limits | None = None,
        line: Line | None = None,
    ) -> None:
        self._bounds = bounds or Bounds()
        self._limits = limits or Limits()
        self.line = line or Line()
        self._workers = workers
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._batches: list[Batch] = []
        self._callers: dict[str, _Caller] = {}
        self._running = 0
        self._turn = 0
        self._threads = ThreadPoolExecutor(workers + 1, thread_name_prefix="extract")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def load(self) -> tuple[int, int]:
        """Files that are being read, and files that wait."""
        with self._lock:
            return self._running, sum(len(batch.waiting) for batch in self._batches)

    def batch(self, caller: str, size: int) -> "Batch":
        """Put an upload of so many bytes in line; leave its `with` block to leave the line, whatever is still under way.

        Raises Overloaded where the line is full, or the caller's half of it.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            mine = self._callers.get(caller) or _Caller()
            held = sum(batch.size for batch in self._batches)
            if len(self._batches) >= self.line.uploads or (held and held + size > self.line.most_bytes):
                raise _overloaded(f"{len(self._batches)} uploads wait for their files to be read already")
            most = max(1, self.line.uploads // 2)
            if mine.uploads >= most or (mine.bytes and mine.bytes + size > self.line.most_bytes // 2):
                raise _overloaded(f"{mine.uploads} of your uploads wait for their files to be read already")
            self._callers[caller] = mine
            mine.uploads += 1
            mine.bytes += size
            made = Batch(self, caller, size)
            self._batches.append(made)
            return made

    def extract(self, data: bytes, *, name: str, content_type: str | None = None) -> Extracted:
        """Return what a file says, read at once, whoever waits in line.

        Raises UnreadableFile, also where reading took too long or ended its process.
        """
        return self._extract(_Reading(data, name, content_type))

    def _extract(self, reading: "_Reading") -> Extracted:
        process = self._take()
        request = {
            "name": reading.name,
            "content_type": reading.content_type,
            "limits": asdict(self._limits),
        }
        seconds = self._bounds.seconds(len(reading.data))
        try:
            answer = process.ask(request, reading.data, seconds) if reading.begin(process) else None
        except BaseException:
            self._end(process)
            raise
        finally:
            dropped = reading.end()
        if dropped:
            self._end(process)
            raise UnreadableFile("nobody waits for the file any more")
        if answer is None:
            slow = process.slow
            self._end(process)
            if slow:
                raise UnreadableFile(
                    f"reading the file took longer than {seconds:.3g} s",
                    remedy="split it, or raise HALFLIFE_FILE_TIMEOUT_S",
                )
            raise UnreadableFile(
                "reading the file ended the process that read it: it is broken, or needs too much memory",
                remedy="save it anew or split it, or raise HALFLIFE_FILE_MEMORY_BYTES",
            )
        if answer.pop("ends", False) or process.asked >= _FILES_PER_PROCESS:
            self._end(process)
        else:
            self._put_back(process)
        if "detail" in answer:
            raise UnreadableFile(answer["detail"], remedy=answer["remedy"])
        return Extracted.from_json(answer)

    # --- the line

    def _enter(self, batch: "Batch", reading: "_Reading") -> None:
        with self._lock:
            if self._closed or batch not in self._batches:
                raise RuntimeError("the upload has left the line")
            batch.waiting.append(reading)
            self._begin_next()

    def _leave(self, batch: "Batch") -> None:
        """Take an upload out of the line: what waits is never begun, what is being read is ended."""
        with self._lock:
            if batch not in self._batches:
                return
            self._batches.remove(batch)
            mine = self._callers[batch.caller]
            mine.uploads -= 1
            mine.bytes -= batch.size
            self._forget(batch.caller)
            waiting, reading = [*batch.waiting], [*batch.reading]
            batch.waiting.clear()
        for one in waiting:
            one.future.cancel()
        for one in reading:
            one.drop()

    def _give_up(self, batch: "Batch") -> None:
        with self._lock:
            waiting = [] if batch.begun else [*batch.waiting]
            if waiting:
                batch.waiting.clear()
        for one in waiting:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(
                    _overloaded(f"no file of the upload could be read within {self.line.wait_s:g} s")
                )

    def _begin_next(self) -> None:
        """Begin what may begin now; the lock is held."""
        while not self._closed and (batch := self._next()) is not None:
            reading = batch.waiting.popleft()
            if not reading.future.set_running_or_notify_cancel():
                continue
            mine = self._callers[batch.caller]
            self._turn += 1
            mine.turn = batch.turn = self._turn
            mine.running += 1
            self._running += 1
            batch.begun = True
            batch.reading.add(reading)
            self._threads.submit(self._run, batch, reading)

    def _next(self) -> "Batch | None":
        """Return the upload whose turn it is: of the caller with the fewest files being read, and longest not served."""
        if self._running > self._workers:
            return None
        ready = [batch for batch in self._batches if batch.waiting]
        if self._running == self._workers:
            ready = [batch for batch in ready if not self._callers[batch.caller].running]
        return min(
            ready,
            key=lambda batch: (
                self._callers[batch.caller].running, self._callers[batch.caller].turn, batch.turn,
            ),
            default=None,
        )  # fmt: skip

    def _run(self, batch: "Batch", reading: "_Reading") -> None:
        found: Extracted | None = None
        failure: BaseException | None = None
        try:
            found = self._extract(reading)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the file is told
            failure = error
        with self._lock:
            batch.reading.discard(reading)
            self._running -= 1
            self._callers[batch.caller].running -= 1
            self._forget(batch.caller)
            self._begin_next()
        if failure is not None:
            reading.future.set_exception(failure)
        else:
            assert found is not None
            reading.future.set_result(found)

    def _forget(self, caller: str) -> None:
        mine = self._callers[caller]
        if not mine.uploads and not mine.running:
            del self._callers[caller]

    # --- the processes

    def close(self) -> None:
        """End all processes; what is under way fails."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
            waiting = [one for batch in self._batches for one in batch.waiting]
        for one in waiting:
            one.future.cancel()
        for process in processes:
            self._end(process)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> "_Process":
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    return process
                self._all.discard(process)
                process.end()
            process = _Process(self._bounds)
            self._all.add(process)
            return process

    def _put_back(self, process: "_Process") -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)

    def _end(self, process: "_Process") -> None:
        with self._lock:
            self._all.discard(process)
        process.end()


class Batch:
    """The files of one upload in line. Use `with`: leaving it drops what is not read yet."""

    def __init__(self, sandbox: Sandbox, caller: str, size: int) -> None:
        self._sandbox = sandbox
        self.caller = caller
        self.size = size
        self.waiting: deque[_Reading] = deque()
        self.reading: set[_Reading] = set()
        self.begun = False
        self.turn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sandbox._leave(self)

    def submit(self, data: bytes, *, name: str, content_type: str | None = None) -> "Future[Extracted]":
        """Begin to read a file when it is the upload's turn; the future raises as `extract` does."""
        reading = _Reading(data, name, content_type)
        self._sandbox._enter(self, reading)
        return reading.future

    def give_up(self) -> None:
        """Fail what waits with Overloaded, unless a file of the upload has been begun."""
        self._sandbox._give_up(self)


@dataclass(slots=True)
class _Caller:
    """What is in line of one caller, and when one of its files was last begun."""

    uploads: int = 0
    bytes: int = 0
    running: int = 0
    turn: int = 0


class _Reading:
    """One file, and the process that reads it."""

    def __init__(self, data: bytes, name: str, content_type: str | None) -> None:
        self.data = data
        self.name = name
        self.content_type = content_type
        self.future: Future[Extracted] = Future()
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._dropped = False

    def begin(self, process: "_Process") -> bool:
        """Note the process; tell whether anybody still waits."""
        with self._lock:
            self._process = process
            return not self._dropped

    def end(self) -> bool:
        """Forget the process, which may read another file next; tell whether this one was dropped."""
        with self._lock:
            self._process = None
            return self._dropped

    def drop(self) -> None:
        """End the reading: nobody waits for it any more."""
        with self._lock:
            self._dropped = True
            if self._process is not None:
                self._process.kill()


def _overloaded(what: str) -> Overloaded:
    return Overloaded(what, remedy="try again after the pause", retry_after_s=5)


class _Process:
    """One process and the pipe to it."""

    def __init__(self, bounds: Bounds) -> None:
        self.asked = 0
        self.slow = False
        self._lock = threading.Lock()
        self._watched: int | None = None
        """Which asking is under way; the clock of an earlier one ends nothing."""
        # -I keeps the caller's environment and folder out; the modules come from where this process has them.
        start = f"import sys; sys.path[:] = {sys.path!r}; from app.sandbox import serve; serve({bounds.memory_bytes})"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        )

    @property
    def alive(self) -> bool:
        """Tell whether the process runs; the system may have ended an idle one."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], data: bytes, seconds: float) -> dict[str, Any] | None:
        """Return the answer; None if the process ended instead, `slow` telling whether for want of time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.asked += 1
        self._watched = self.asked
        watch = threading.Timer(seconds, self.too_slow, [self.asked])
        watch.daemon = True
        watch.start()
        try:
            _send(self._process.stdin, request, data)
            answer, _ = _receive(self._process.stdout)
        except (OSError, EOFError, ValueError):
            return None
        finally:
            watch.cancel()
            # A clock that has run out already, and waits for its thread's turn, comes too late from here on.
            with self._lock:
                self._watched = None
        # Or it came first, and the process is gone: then there is no answer, and this is why.
        return None if self.slow else answer

    def too_slow(self, asked: int) -> None:
        """End the process if that asking is still under way."""
        with self._lock:
            if self._watched == asked:
                self.slow = True
                self._process.kill()

    def kill(self) -> None:
        """End what the process does; whoever asked it gets no answer."""
        self._process.kill()

    def end(self) -> None:
        """End the process by force: it holds nothing that anybody needs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _send(stream: IO[bytes], head: object, data: bytes = b"") -> None:
    encoded = json.dumps(head).encode()
    stream.write(_LENGTH.pack(len(encoded), len(data)))
    stream.write(encoded)
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    lengths = stream.read(_LENGTH.size)
    if len(lengths) < _LENGTH.size:
        raise EOFError
    head_size, data_size = _LENGTH.unpack(lengths)
    head, data = stream.read(head_size), stream.read(data_size)
    if len(head) < head_size or len(data) < data_size:
        raise EOFError
    value = json.loads(head)
    assert isinstance(value, dict)
    return value, data


# --- in the process --------------------------------------------------------------------------------------------------


def serve(memory_bytes: int, *, extract: Callable[..., Extracted] = extracting.extract) -> None:
    """Read files from standard input and answer on standard output until it ends."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # A parser that prints must not write into the answers.
    sys.stdout = sys.stderr
    while True:
        try:
            request, data = _receive(source)
        except EOFError:
            return
        answer: dict[str, Any]
        try:
            limits = Limits(**request.pop("limits"))
            answer = extract(data, **request, limits=limits).to_json()
        except UnreadableFile as error:
            answer = {"detail": error.detail, "remedy": error.remedy}
        except MemoryError:
            answer = {
                "detail": "reading the file takes too much memory",
                "remedy": "split it, or raise HALFLIFE_FILE_MEMORY_BYTES",
                "ends": True,
            }
        except Exception as error:  # noqa: BLE001 - whatever a parser raises on a broken file is that file's fault
            answer = {
                "detail": f"the file is broken ({type(error).__name__}: {str(error)[:200]})",
                "remedy": "save it anew",
                "ends": True,
            }
        _send(sink, answer)
