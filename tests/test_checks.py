"""What `./scripts/check` does with its steps: exit codes, counts, and that nothing of a step stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import checks


def python(code: str) -> checks.Step:
    return checks.Step("a step", (sys.executable, "-c", code))


@pytest.mark.parametrize(
    "code, expected", [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)]
)
def test_a_step_keeps_its_exit_code(tmp_path: Path, code: str, expected: int) -> None:
    assert checks.exit_code(checks.Runner(None).run(python(code), tmp_path / "report.xml")) == expected


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    sleeper = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); open({str(note)!r}, 'w').write(str(child.pid))"
    assert checks.Runner(None).run(python(sleeper), tmp_path / "report.xml") == 0
    pid = int(note.read_text(encoding="utf-8"))
    until = time.monotonic() + 20
    while time.monotonic() < until:
        listed = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        if listed.stdout.strip() in {"", "Z"}:  # gone, or waiting to be reaped by what adopted it
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the step's child outlived it")


def test_the_time_limit_ends_a_step(tmp_path: Path) -> None:
    runner = checks.Runner(time.monotonic())
    assert (
        checks.exit_code(runner.run(python("import time; time.sleep(600)"), tmp_path / "report.xml")) == 130
    )
    assert runner.ended_by == signal.SIGALRM


def test_results_are_counted_from_pytests_own_report(tmp_path: Path) -> None:
    tests = tmp_path / "test_sample.py"
    tests.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_left_out(): pytest.skip('why')\n"
        "@pytest.mark.xfail\ndef test_known(): assert False\n"
        "@pytest.fixture\ndef broken(): raise RuntimeError\n"
        "def test_without_its_fixture(broken): pass\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    subprocess.run([*command, str(tests)], capture_output=True, check=False, cwd=tmp_path)
    counts = checks.Counts()
    counts.add_report(report)
    counts.add_report(tmp_path / "absent.xml")
    assert str(counts) == "1 passed, 2 failed, 2 skipped"


def test_the_summary_tells_the_first_failure(capsys: pytest.CaptureFixture[str]) -> None:
    step = python("pass")
    outcomes = [
        checks.Outcome(step, 0, 1.0),
        checks.Outcome(step, 4, 2.0),
        checks.Outcome(step, 1),
        checks.Outcome(step, None),
    ]
    assert checks.summarise(outcomes, checks.Counts(3, 1, 2), 9.0) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 passed, 1 failed, 2 skipped"
    assert [line.split()[0] for line in lines[2:6]] == ["ok", "FAILED", "FAILED", "not"]


def test_node_tests_can_be_left_out() -> None:
    def titles(fast: bool) -> list[str]:
        return [step.title for step in checks.steps(fast=fast, pytest_arguments=[])]

    assert titles(fast=False)[:-1] == titles(fast=True)
    assert "node" in titles(fast=False)[-1]
