"""When to leave a dependency alone: a circuit breaker and a budget for retries, as plain values.

Pure. The clock is a function that comes in, in seconds and never going back; nothing here waits or calls anyone.
"""

from collections.abc import Callable
from typing import Final, Literal

Outcome = Literal["ok", "refused", "failed", "unknown"]
"""How a call ended, as far as it tells of the dependency's health.

ok: it answered, an error that the request itself deserves included. refused: it answered that it can't serve now
(429, 503). failed: no answer, or an unusable one. unknown: the caller left before anything could be told.
"""
State = Literal["closed", "half-open", "open"]

FAILED_WEIGHT: Final = 4
REFUSED_WEIGHT: Final = 1
STREAK: Final = 20
"""The breaker opens on a streak of this weight: 5 failures or 20 refusals without an answer between them.

At 30 % random refusals a streak of 20 has a chance of 3e-11 a call, so a storm that lets most calls through is
ridden out; a dependency that is gone is left alone after 5 calls.
"""


class Breaker:
    """Admits calls while a dependency answers, and single probes while it does not.

    closed: all calls. open: none, for `first_open_s` after the streak, twice as long after each probe that failed
    too, up to `longest_open_s`. half-open: one call at a time, the probe; the first that is answered closes it. A call
    carries a pass of the state that admitted it, and moves no later one.
    """

    def __init__(
        self, clock: Callable[[], float], *, first_open_s: float = 1.0, longest_open_s: float = 2.0
    ) -> None:
        self._clock = clock
        self._first_open_s = first_open_s
        self._longest_open_s = longest_open_s
        self._streak = 0
        self._open_s = 0.0
        self._until: float | None = None
        self._probing = False
        self._epoch = 1
        self.opened = 0
        """How often it has opened."""

    @property
    def state(self) -> State:
        """The state now; from open it becomes half-open by the clock alone."""
        if self._until is None:
            return "closed"
        return "half-open" if self._probing or self._clock() >= self._until else "open"

    @property
    def wait_s(self) -> float:
        """How long from now no call is admitted, ≥ 0; while a probe is under way, about as long as one takes."""
        if self._until is None:
            return 0.0
        left = max(0.0, self._until - self._clock())
        return max(left, 0.1) if self._probing else left

    def admit(self) -> int | None:
        """Return the pass of a call that may go now, None for one that may not.

        Who has a pass must `settle` it once, however the call ends.
        """
        if self._until is None:
            return self._epoch
        if self._probing or self._clock() < self._until:
            return None
        self._probing = True
        self._epoch += 1
        return self._epoch

    def settle(self, admitted: int, outcome: Outcome) -> None:
        """Note how the call with this pass ended.

        Only what was admitted in the present state counts: calls from before it opened end in failures too, which is
        no news, an answer to one of them says nothing of a call sent now, and none of them is the probe.
        """
        if admitted != self._epoch:
            return
        if self._until is not None:  # this is the probe: nothing else is admitted then
            if outcome == "ok":
                self._turn(open_s=0.0, until=None)
            elif outcome == "unknown":
                self._turn(open_s=self._open_s, until=self._until)
            else:
                self._open(min(self._longest_open_s, self._open_s * 2))
        elif outcome == "ok":
            self._streak = 0
        elif outcome != "unknown":
            self._streak += FAILED_WEIGHT if outcome == "failed" else REFUSED_WEIGHT
            if self._streak >= STREAK:
                self._open(self._first_open_s)

    def _open(self, seconds: float) -> None:
        self.opened += 1
        self._turn(open_s=seconds, until=self._clock() + seconds)

    def _turn(self, *, open_s: float, until: float | None) -> None:
        """Begin a state: passes of the one before are void."""
        self._epoch += 1
        self._open_s, self._until = open_s, until
        self._probing = False
        self._streak = 0


class RetryBudget:
    """Bounds retries to a share of the calls, so that refusals are not answered with more calls.

    A first call adds `share` of a retry, a second of the clock `per_s`; up to `most` are saved. With the defaults,
    n calls within t seconds bring at most 0.1 n + 0.1 t + 8 retries, whatever part of them is refused: below a fifth
    from some hundred calls on. 8 are what a bulk of 200 needs of which each time half is refused.
    """

    def __init__(
        self, clock: Callable[[], float], *, share: float = 0.1, per_s: float = 0.1, most: float = 8.0
    ) -> None:
        self._clock = clock
        self._share = share
        self._per_s = per_s
        self._most = most
        self._saved = most
        self._since = clock()

    def offer(self) -> None:
        """Note a first call."""
        self._save(self._share)

    def grant(self, retries: int) -> None:
        """Allow so many retries at once, beyond what is saved: the dependency is back, and they wait for it."""
        self._saved = max(self._saved, min(self._saved, self._most) + retries)

    def take(self) -> bool:
        """Take one retry, if there is one."""
        now = self._clock()
        self._save((now - self._since) * self._per_s)
        self._since = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True

    def _save(self, retries: float) -> None:
        # What was granted beyond `most` stays until it is used.
        self._saved = max(self._saved, min(self._most, self._saved + retries))


class Concurrency:
    """How many requests may be answered at once, fitted to what the machine and the cluster can do now.

    Falls by three tenths when answers take longer than `slow_s`, at most once in that time and not below `least`; rises by
    one for as many quick answers as there are places. So under overload those who are let in are still answered in
    time, and the others are told at once. (Additive increase, multiplicative decrease, as TCP's windows.)
    """

    def __init__(
        self, clock: Callable[[], float], *, most: int, slow_s: float, least: int = 8, cut: float = 0.7
    ) -> None:
        self._clock = clock
        self._most = most
        self._least = min(least, most)
        self._slow_s = slow_s
        self._cut = cut
        self._limit = float(most)
        self._cut_at = clock() - slow_s

    @property
    def limit(self) -> int:
        """The number now."""
        return int(self._limit)

    def note(self, took_s: float, *, under_way: int) -> None:
        """Take an answer into account that came after so long, while so many were under way, it included."""
        if took_s <= self._slow_s:
            self._limit = min(self._most, self._limit + 1 / self._limit)
        elif under_way * 2 >= self._limit and self._clock() - self._cut_at >= self._slow_s:
            # Slow alone is a large request; slow among many is too many.
            self._limit = max(self._least, self._limit * self._cut)
            self._cut_at = self._clock()
