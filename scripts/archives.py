"""Own files of JSON Lines, plain or compressed, that can be written and read on after a stop.

A file is made under `<name>.part` and gets its name when it is whole. What is written up to a checkpoint is a valid
file of its own (compressed forms may be strung together), so going on means cutting off what came after it.
"""

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import zstandard

_LEVEL = 3


class ArchiveWriter:
    """Writes lines to `path`; with `.zst` or `.gz` at its end, compressed. Use with `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._sidecar = path.with_name(path.name + ".part.json")
        self._file: IO[bytes] | None = None

    def left_off(self) -> dict[str, Any] | None:
        """Return what the last checkpoint noted, or None if there is nothing to go on with."""
        with contextlib.suppress(OSError, ValueError):
            noted: dict[str, Any] = json.loads(self._sidecar.read_text("utf-8"))
            if self._part.stat().st_size >= noted["bytes"]:
                return noted
        return None

    def open(self, *, at: int | None = None) -> Self:
        """Open it anew, or `at` a checkpoint's number of bytes; what was open is closed."""
        self.__exit__()
        if at is None:
            self._sidecar.unlink(missing_ok=True)
            self._file = self._part.open("wb")
        else:
            self._file = self._part.open("r+b")
            self._file.truncate(at)
            self._file.seek(at)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, lines: Sequence[bytes], **noted: Any) -> None:
        """Write lines and a checkpoint with what is noted; they are on disk when this returns."""
        assert self._file is not None
        self._file.write(_compress(self.path, b"".join(line + b"\n" for line in lines)))
        self._file.flush()
        os.fsync(self._file.fileno())
        write_json(self._sidecar, {"bytes": self._file.tell(), **noted})

    def finish(self) -> None:
        """Give the file its name."""
        assert self._file is not None
        self._file.close()
        self._file = None
        self._part.replace(self.path)
        self._sidecar.unlink(missing_ok=True)


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; how it is compressed is seen from its first bytes.

    Raises ValueError if it is damaged or cut off.
    """
    with path.open("rb") as raw:
        head = raw.read(4)
        raw.seek(0)
        try:
            with _decompressed(raw, head) as lines:
                yield from (line.rstrip(b"\n") for line in lines)
        except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as cause:
            raise ValueError(f"{path} is damaged or cut off: {cause}") from cause


def _decompressed(raw: IO[bytes], head: bytes) -> IO[bytes]:
    if head == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    if head[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))
    return io.BufferedReader(raw)  # type: ignore[type-var]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small file in one step, so that it is never half there."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def _compress(path: Path, block: bytes) -> bytes:
    match path.suffix:
        case ".zst":
            return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(block)
        case ".gz":
            return gzip.compress(block, mtime=0)
        case _:
            return block
