"""Where the keys in force come from: a file that is read again when it changes, without a restart.

A new file that can't be used changes nothing: the keys before it stay in force, and the fault is told in the log and
by /readyz. What a key is and how one is checked is `keys`.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from app.errors import InvalidRequest
from app.keys import Keyring, parse_keys

LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 16 * 2**20

log = logging.getLogger("halflife")


def warn_of_none(ring: Keyring, now_ms: int) -> None:
    """Say in the log where keys are configured and none is in force: everybody is refused, which may be meant."""
    if not ring.in_force(now_ms):
        log.warning(
            "nobody can use the service: %s; make a key with `halflife keys create`",
            f"each of the {len(ring.keys)} keys has expired" if ring.keys else "the list of keys is empty",
        )


class KeyFile:
    """The keys of a file, as of at most a second ago."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """Read the file. Raises InvalidRequest with the remedy if it can't be used: at the start nothing else is in force."""
        self._path = path
        self._clock = clock
        self._now_ms = now_ms
        self._looked = clock()
        self._seen = self._stat()
        self._ring = self._read()
        self.fault: str | None = None
        """Why the file as it is now is not in force; None where it is."""

    def __call__(self) -> Keyring:
        """Return the keys in force."""
        now = self._clock()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            self._look()
        return self._ring

    def look(self) -> str | None:
        """Return why the file as it is now is not in force, None where it is; also where no request made us look."""
        self()
        return self.fault

    def _look(self) -> None:
        try:
            seen = self._stat()
            if seen == self._seen:
                return
            self._seen = seen
            self._ring = self._read()
        except InvalidRequest as error:
            if self.fault != error.detail:
                self.fault = error.detail
                log.error("the keys stay as they were: %s", error.detail)
            return
        self.fault = None
        log.info("keys read again: %d in force", self._ring.in_force(self._now_ms()))
        warn_of_none(self._ring, self._now_ms())

    def _stat(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        # The time of change too: a mended permission leaves everything else as it was.
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _read(self) -> Keyring:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as cause:
            raise InvalidRequest(
                f"the file of keys can't be read ({cause.strerror or cause})",
                field="HALFLIFE_KEYS_FILE",
                remedy="make it with `halflife keys create`, readable for the user that the service runs as",
            ) from cause
        if len(raw) > MAX_FILE_BYTES:
            raise InvalidRequest("the file of keys is too large", remedy="remove keys of no use")
        try:
            text = raw.decode()
        except UnicodeDecodeError as cause:
            raise InvalidRequest("the file of keys is not UTF-8", field="HALFLIFE_KEYS_FILE") from cause
        return Keyring(parse_keys(text, where="the file of keys"))
