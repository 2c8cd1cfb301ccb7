"""Runs every check of the project in order, and sums up: what `./scripts/check` and CI call.

Each step runs in a session of its own, so that ending a step ends all that it started. The process exits with the
code of the first step that failed. The last line counts the tests: `N passed, N failed, N skipped`.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = "tests/test_architecture.py"
# How long a step may take to end itself after an interrupt: a test session stops its nodes in that time.
GRACE_S = 30.0
NO_TESTS = 5


@dataclass(frozen=True)
class Step:
    """One check: its heading, its command line, and whether pytest runs it."""

    title: str
    command: tuple[str, ...]
    tests: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a step ended. `code` is None for one that did not run."""

    step: Step
    code: int | None
    seconds: float = 0.0


@dataclass
class Counts:
    """Tests by result. An error in a fixture counts as a failure, an expected failure as skipped."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add_report(self, report: Path) -> None:
        """Add what a JUnit report tells; one that is missing or cut short adds nothing."""
        try:
            suites = ET.parse(report).getroot().iter("testsuite")  # noqa: S314  # our own pytest wrote it  # nosec B314
        except (OSError, ET.ParseError):
            return
        for suite in suites:
            total, failures, errors, skipped = (
                int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
            )
            self.failed += failures + errors
            self.skipped += skipped
            self.passed += max(0, total - failures - errors - skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def steps(*, fast: bool, pytest_arguments: Sequence[str]) -> list[Step]:
    """The checks in order: quick and cheap ones first."""
    python = (sys.executable, "-P", "-m")
    tests = (*python, "pytest")
    chosen = [
        Step("locks match pyproject.toml", (*python, "scripts.locks", "--check")),
        Step(
            "format: ruff format --check",
            (*python, "ruff", "format", "--check", "--output-format=concise", "."),
        ),
        Step("lint: ruff check", (*python, "ruff", "check", ".")),
        # What it calls low, ruff's S rules judge line by line already.
        Step(
            "security lint: bandit",
            (*python, "bandit", "-q", "-ll", "-r", "app", "scripts", "es_mappings"),
        ),
        Step("types: mypy --strict", (*python, "mypy")),
        Step("architecture: the rooms and the doors", (*tests, ARCHITECTURE, "-q"), tests=True),
        Step(
            "unit tests: pytest -m 'not node'",
            (*tests, "-m", "not node", f"--ignore={ARCHITECTURE}", *pytest_arguments),
            tests=True,
        ),
    ]
    if not fast:
        nodes = (*tests, "-m", "node", f"--ignore={ARCHITECTURE}", *pytest_arguments)
        chosen.append(Step("node tests: pytest -m node", nodes, tests=True))
    return chosen


class Runner:
    """Runs steps one at a time and ends the one that runs when this process is told to end."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.child: subprocess.Popen[bytes] | None = None
        self.ended_by: int | None = None

    def heed_signals(self) -> None:
        """End the running step on an interrupt; a second one ends it at once."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.end)

    def end(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on to the running step's whole group."""
        again = self.ended_by is not None
        self.ended_by = number
        print(f"\n{signal.Signals(number).name}: ending the running step.", file=sys.stderr, flush=True)
        if self.child is not None:
            self.signal_group(self.child, signal.SIGKILL if again else signal.SIGINT)

    @staticmethod
    def signal_group(child: subprocess.Popen[bytes], number: int) -> None:
        """Signal all processes of a step; those that are gone already are no fault."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)

    def run(self, step: Step, report: Path) -> int:
        """Run one step to its end and return its exit code. Nothing that it started in its group stays behind."""
        command = [*step.command, f"--junitxml={report}"] if step.tests else [*step.command]
        child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        self.child = child
        try:
            if self.ended_by is not None:  # a signal came between the check and the start
                self.signal_group(child, signal.SIGINT)
            return self.wait(child)
        finally:
            self.signal_group(child, signal.SIGTERM)
            self.child = None

    def wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for a step; after an interrupt or the time limit, only as long as the grace lasts."""
        asked_at: float | None = None
        while True:
            try:
                return child.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                if asked_at is None and self.ended_by is not None:
                    asked_at = now
                elif asked_at is None and self.deadline is not None and now > self.deadline:
                    print("\nThe time limit is over: ending the running step.", file=sys.stderr, flush=True)
                    self.ended_by = signal.SIGALRM
                    asked_at = now
                    self.signal_group(child, signal.SIGINT)
                elif asked_at is not None and now - asked_at > GRACE_S:
                    self.signal_group(child, signal.SIGKILL)


def heading(text: str) -> None:
    """Print a step's heading so that it stands out in a long log."""
    print(f"\n── {text} {'─' * max(3, 100 - len(text))}", flush=True)


def summarise(outcomes: Sequence[Outcome], counts: Counts, seconds: float) -> int:
    """Print one line per step and the counts; return the exit code of the first step that failed."""
    heading("summary")
    for outcome in outcomes:
        verdict = (
            "not run" if outcome.code is None else "ok" if outcome.code == 0 else f"FAILED ({outcome.code})"
        )
        print(f"{verdict:>12}  {outcome.seconds:7.1f} s  {outcome.step.title}")
    failed = [outcome for outcome in outcomes if outcome.code]
    print(f"{'FAILED' if failed else 'ok':>12}  {seconds:7.1f} s  in all\n")
    print(counts, flush=True)
    return failed[0].code or 0 if failed else 0


def exit_code(code: int) -> int:
    """The code to exit with for a step's: a step ended by a signal reads like a shell's 128 + number."""
    return 128 - code if code < 0 else code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; see --help."""
    parser = argparse.ArgumentParser(
        prog="./scripts/check",
        description="Runs format check, lint, strict types, the architecture test, unit tests and node tests.",
        epilog="What follows -- goes to pytest:  ./scripts/check --fast -- -k decay -x",
    )
    parser.add_argument(
        "--fast", action="store_true", help="leave out the tests on a real Elasticsearch node"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="run the later steps too after one has failed"
    )
    parser.add_argument(
        "--limit-minutes",
        type=float,
        metavar="M",
        help="end the running step and sum up after so many minutes",
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    pytest_arguments = given[cut + 1 :]

    started = time.monotonic()
    runner = Runner(None if options.limit_minutes is None else started + options.limit_minutes * 60)
    runner.heed_signals()
    planned = steps(fast=options.fast, pytest_arguments=pytest_arguments)
    outcomes: list[Outcome] = []
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="halflife-check-") as folder:
        for number, step in enumerate(planned, start=1):
            over = runner.ended_by is not None
            if over or (not options.keep_going and any(outcome.code for outcome in outcomes)):
                outcomes.append(Outcome(step, None))
                continue
            heading(f"{number}/{len(planned)} {step.title}")
            begun = time.monotonic()
            report = Path(folder, f"{number}.xml")
            code = exit_code(runner.run(step, report))
            if code == NO_TESTS and step.tests and pytest_arguments:
                code = (
                    0  # a selection by the caller may leave a step without tests; otherwise that is a fault
                )
            if runner.ended_by is not None and code == 0:
                code = 128 + runner.ended_by
            outcomes.append(Outcome(step, code, time.monotonic() - begun))
            counts.add_report(report)
            print(
                f"   {'ok' if code == 0 else f'FAILED with exit code {code}'}, {outcomes[-1].seconds:.1f} s",
                flush=True,
            )
    code = summarise(outcomes, counts, time.monotonic() - started)
    return 128 + runner.ended_by if runner.ended_by is not None else code


if __name__ == "__main__":
    raise SystemExit(main())
