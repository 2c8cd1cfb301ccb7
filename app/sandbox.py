"""Strangers' files read in processes of their own: a parser that hangs, swells or crashes costs one file, not the service.

Owns the processes, their bounds (time, memory) and the pipe to them. They get no environment, so no secret; each is
replaced after a while, and at once after a failure. What is read in them is `extracting`'s.
"""

import contextlib
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import IO, Any, Final, Self

from app import extracting
from app.errors import UnreadableFile
from app.extracting import Extracted, Limits

_FILES_PER_PROCESS: Final = 200
_LENGTH: Final = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one file may cost: seconds, and bytes of address space (where the system can bound them)."""

    timeout_s: float = 60.0
    memory_bytes: int = 2 * 2**30


class Sandbox:
    """A few processes that read files, started when they are needed. Close it, or use `with`. Any thread may call."""

    def __init__(
        self, *, workers: int = 2, bounds: Bounds | None = None, limits: Limits | None = None
    ) -> None:
        self._bounds = bounds or Bounds()
        self._limits = limits or Limits()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="extract")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, data: bytes, *, name: str, content_type: str | None = None) -> "Future[Extracted]":
        """Begin to read a file when a process is free; the future raises UnreadableFile as `extract` does."""
        return self._threads.submit(self.extract, data, name=name, content_type=content_type)

    def extract(self, data: bytes, *, name: str, content_type: str | None = None) -> Extracted:
        """Return what a file says. Raises UnreadableFile, also where reading took too long or ended its process."""
        process = self._take()
        request = {"name": name, "content_type": content_type, "limits": asdict(self._limits)}
        try:
            answer = process.ask(request, data)
        except BaseException:
            self._end(process)
            raise
        if answer is None:
            slow = process.slow
            self._end(process)
            if slow:
                raise UnreadableFile(
                    f"reading the file took longer than {self._bounds.timeout_s:g} s",
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

    def close(self) -> None:
        """End all processes; what is under way fails."""
        with self._lock:
            self._closed = True
            processes = list(self._all)
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


class _Process:
    """One process and the pipe to it."""

    def __init__(self, bounds: Bounds) -> None:
        self._timeout_s = bounds.timeout_s
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

    def ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any] | None:
        """Return the answer; None if the process ended instead, `slow` telling whether for want of time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.asked += 1
        self._watched = self.asked
        watch = threading.Timer(self._timeout_s, self.too_slow, [self.asked])
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
