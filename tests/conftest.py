"""What every test shares: a clean environment, and the way to the judged data sets.

No clients and no nodes are made here; the tests that need them bring their own fixtures.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import app
from app import catalog, moves

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# Settings of the caller's shell would decide what tests see. Those meant for the tests carry this prefix and stay.
_KEPT_PREFIX = "HALFLIFE_TEST_"
_removed: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let golden rankings be written anew."""
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write tests/golden/*.json from what is ranked now"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another tree than this one, and take the caller's settings out of the environment."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts its background jobs so. Tests interrupt programs, which would inherit the deafness.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tested = Path(app.__file__).resolve().parent
    if tested != ROOT / "app":
        raise pytest.UsageError(
            f"These tests would test {tested}, not {ROOT / 'app'}. "
            "Remedy: run them with this folder's own .venv/bin/python, which ./scripts/check makes."
        )
    if sys.version_info < (3, 11):  # noqa: UP036 - says it plainly where somebody's pytest is older
        raise pytest.UsageError("These tests need Python 3.11 or newer. Remedy: ./scripts/check finds one.")
    for name in sorted(os.environ):
        if name.startswith("HALFLIFE_") and not name.startswith(_KEPT_PREFIX):
            del os.environ[name]
            _removed.append(name)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell what the environment gave and what it lacks."""
    lines = [f"shared data: {SHARED if SHARED.is_dir() else 'absent, the tests that read it skip'}"]
    if _removed:
        lines.append(f"left out of the environment: {', '.join(_removed)}")
    return lines


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of judged data sets beside the project; the test skips where it is absent."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"needs the judged data sets in {SHARED / 'data'}, which are not there")
    return SHARED / "data"


pytest_plugins = ["tests.nodes"]


@pytest.fixture
def patient_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets writers be kept out for as long as a busy machine needs to declare a key."""
    monkeypatch.setattr(catalog, "IN_FENCE_S", 10.0)
    monkeypatch.setattr(moves, "FENCE_TIMEOUT_S", 30.0)


@pytest.fixture
async def forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Puts the event loop's clock forward, so that no test waits for time to pass or hopes that little of it does."""
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, 0.0

    def put_forward(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    monkeypatch.setattr(loop, "time", lambda: real() + ahead)
    return put_forward
