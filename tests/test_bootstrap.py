"""The two commands' first half: which Python is taken, and that an environment is either whole or not there."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import bootstrap

ROOT = Path(__file__).resolve().parent.parent

# Stand-ins for interpreters: the real one, made to believe that it is another.
INTERPRETERS = {
    "good": "",
    "old": "sys.version_info = (3, 9, 18); ",
    "future": "sys.version_info = (3, 15, 0); ",
    "debian": "sys.modules['ensurepip'] = None; ",
    "pypy": "sys.implementation.name = 'pypy'; ",
    "broken": "raise SystemExit(1); ",
}


def find_python(
    folder: Path, interpreters: dict[str, str], asked: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run find_python.sh where PATH holds nothing but these interpreters."""
    (folder / "cat").symlink_to(shutil.which("cat") or "/bin/cat")
    for name, kind in interpreters.items():
        program = folder / name
        code = f"import sys; {INTERPRETERS[kind]}exec(sys.argv[3])"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    environment = {"PATH": str(folder)} | ({"PYTHON": asked} if asked else {})
    script = f'set -eu; . "{ROOT}/scripts/find_python.sh"; find_python; echo "$PYTHON"'
    return subprocess.run(
        ["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "interpreters, asked, taken",
    [
        ({"python3": "good"}, None, "python3"),
        ({"python3": "old", "python3.12": "good"}, None, "python3.12"),
        ({"python3": "debian", "python3.11": "good"}, None, "python3.11"),
        ({"python3": "future", "python3.13": "good"}, None, "python3.13"),
        ({"python3": "broken", "python": "good"}, None, "python"),
        ({"python3": "good", "mine": "good"}, "mine", "mine"),
        ({"python3": "future"}, None, "python3"),
    ],
    ids=["first", "newer beside an old one", "whole one", "tested one", "plain name", "named", "untested"],
)
def test_a_python_is_found(
    tmp_path: Path, interpreters: dict[str, str], asked: str | None, taken: str
) -> None:
    ended = find_python(tmp_path, interpreters, asked)
    assert (ended.returncode, ended.stdout) == (0, f"{tmp_path / taken}\n")
    assert ("newer than the Python versions tested" in ended.stderr) == (interpreters[taken] == "future")


@pytest.mark.parametrize(
    "interpreters, asked, told",
    [
        ({}, None, "found none on PATH"),
        ({"python3": "old"}, None, "is Python 3.9.18, too old"),
        ({"python3": "debian"}, None, "without the module ensurepip"),
        ({"python3": "pypy"}, None, "is pypy"),
        ({"python3": "broken"}, None, "does not start"),
        ({"python3": "good", "mine": "old"}, "mine", "PYTHON=mine does not name a usable Python"),
    ],
    ids=["none", "old", "no ensurepip", "pypy", "broken", "a named one is not replaced"],
)
def test_no_python_is_told_with_the_remedy(
    tmp_path: Path, interpreters: dict[str, str], asked: str | None, told: str
) -> None:
    ended = find_python(tmp_path, interpreters, asked)
    assert (ended.returncode, ended.stdout) == (69, "")
    assert told in ended.stderr
    assert "Remedy:" in ended.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what bootstrap reads: itself, pyproject.toml and locks that nothing can be installed from."""
    root = tmp_path / "project"
    (root / "scripts").mkdir(parents=True)
    (root / "locks").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.py", root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    for name in ("bootstrap", *bootstrap.LEVELS):
        lock = (
            f"# download: linux-x86_64 7 MB, macos-arm64 6 MB\nabsent==1 \\\n    --hash=sha256:{'0' * 64}\n"
        )
        bootstrap.lock_path(root, name).write_text(lock, encoding="utf-8")
    return root


def stamp(root: Path, changed: dict[str, str] | None = None) -> Path:
    """Lay an environment that counts as whole: this interpreter and a stamp."""
    venv = root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "pyvenv.cfg").touch()
    key = bootstrap.environment_key(root, "dev", "3.11.7")
    content = {"level": "dev", "python": "3.11.7", "root": str(root), "key": key} | (changed or {})
    (venv / bootstrap.STAMP).write_text(json.dumps(content), encoding="utf-8")
    return venv


def test_an_environment_that_a_service_may_run_from_is_left_alone(project: Path) -> None:
    key = bootstrap.environment_key(project, "local", "3.11.7")
    venv = stamp(project, {"level": "local", "key": key})
    before = sorted(path.name for path in venv.rglob("*")), (venv / bootstrap.STAMP).read_text()
    ended = start(project, "--apart", "dev", "json.tool")
    _, told = ended.communicate(timeout=120)
    # Nothing can be installed here; what matters is where it was tried.
    assert ended.returncode == 1
    assert "Making .venv-dev with Python" in told
    assert (sorted(path.name for path in venv.rglob("*")), (venv / bootstrap.STAMP).read_text()) == before
    assert not (project / ".venv-dev").exists()


def test_an_environment_that_suffices_is_used_as_it_is(project: Path) -> None:
    venv = stamp(project)
    assert (
        bootstrap.ensure(project, "local", apart=True) == bootstrap.ensure(project, "dev", apart=True) == venv
    )


def start(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", str(root / "scripts" / "bootstrap.py"), *arguments]
    # No index: nothing here may reach a network, whatever the machine's configuration is.
    given = {**os.environ, "PIP_NO_INDEX": "1", "UV_OFFLINE": "1", **environment}
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_whole_environment_is_current(project: Path) -> None:
    venv = stamp(project)
    assert bootstrap.stamped_level(project, venv) == ("dev", True)


@pytest.mark.parametrize(
    "changed",
    [{"level": "other"}, {"root": "/elsewhere"}],
    ids=["unknown level", "moved folder"],
)
def test_a_stamp_of_something_else_counts_as_none(project: Path, changed: dict[str, str]) -> None:
    assert bootstrap.stamped_level(project, stamp(project, changed)) is None


def test_an_unreadable_stamp_counts_as_none(project: Path) -> None:
    venv = stamp(project)
    (venv / bootstrap.STAMP).write_text('{"level":', encoding="utf-8")
    assert bootstrap.stamped_level(project, venv) is None


def test_an_environment_whose_interpreter_left_counts_as_none(project: Path) -> None:
    venv = stamp(project)
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(project / "gone")
    assert bootstrap.stamped_level(project, venv) is None


@pytest.mark.parametrize("name", ["locks/dev.lock", "locks/bootstrap.lock", "pyproject.toml"])
def test_a_change_makes_it_stale(project: Path, name: str) -> None:
    venv = stamp(project)
    changed = (
        (project / name)
        .read_text(encoding="utf-8")
        .replace("absent==1", "absent==2")
        .replace("0.1.0", "0.2.0")
    )
    (project / name).write_text(changed, encoding="utf-8")
    assert bootstrap.stamped_level(project, venv) == ("dev", False)


def test_tool_settings_do_not_make_it_stale(project: Path) -> None:
    venv = stamp(project)
    with (project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n[tool.something]\nvalue = 1\n")
    assert bootstrap.stamped_level(project, venv) == ("dev", True)


@pytest.mark.parametrize(
    "asked, present, wanted",
    [("local", None, "local"), ("dev", None, "dev"), ("local", "dev", "dev"), ("dev", "local", "dev")],
)
def test_the_larger_level_stays(asked: str, present: str | None, wanted: str) -> None:
    assert bootstrap.wanted_level(asked, present) == wanted


def test_a_whole_environment_runs_the_module_at_once(project: Path) -> None:
    stamp(project)
    running = start(project, "local", "json.tool", "--compact", str(project / ".venv" / bootstrap.STAMP))
    out, told = running.communicate(timeout=60)
    assert (running.returncode, told) == (0, "")
    assert json.loads(out)["level"] == "dev"


def test_the_module_decides_the_exit_code(project: Path) -> None:
    stamp(project)
    running = start(project, "dev", "json.tool", "--no-such-option")
    running.communicate(timeout=60)
    assert running.returncode == 2


def test_a_folder_of_somebody_else_is_left_alone(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv" / "thesis.txt").touch()
    running = start(project, "local")
    _, told = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "is not a virtual environment. Remedy: move it away" in told
    assert (project / ".venv" / "thesis.txt").exists()


def test_a_linked_environment_loses_its_link_only(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (project / ".venv").symlink_to(target)
    bootstrap.remove(project / ".venv")
    assert target.is_dir()
    assert not (project / ".venv").is_symlink()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_half_made(project: Path, ending: signal.Signals) -> None:
    running = start(project, "local")
    until = time.monotonic() + 30
    while not (project / ".venv" / bootstrap.UNFINISHED).exists():
        assert time.monotonic() < until, "it never began"
        time.sleep(0.01)
    running.send_signal(ending)
    _, told = running.communicate(timeout=60)
    assert running.returncode == 128 + ending
    assert "nothing half-made is left" in told
    assert sorted(path.name for path in project.iterdir()) == [
        ".venv.lock",
        "locks",
        "pyproject.toml",
        "scripts",
    ]


def stand_in(venv: Path, *, pip: int = 0, uv: int = 0) -> None:
    """Put programs in place of an environment's own that install nothing and end with these codes."""
    for name, code in (("python", pip), ("uv", uv)):
        (venv / "bin" / name).unlink(missing_ok=True)
        (venv / "bin" / name).write_text(f"#!/bin/sh\necho 3.11.7\nexit {code}\n")
        (venv / "bin" / name).chmod(0o755)


def test_an_update_that_installs_nothing_leaves_the_environment_as_it_was(project: Path) -> None:
    venv = stamp(project, {"key": "of other locks"})
    stand_in(venv, pip=1)
    before = {path: path.read_bytes() for path in venv.rglob("*") if path.is_file()}
    running = start(project, "dev")
    _, told = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "Installing uv failed" in told
    assert ".venv stays; it is as it was." in told
    assert {path: path.read_bytes() for path in venv.rglob("*") if path.is_file()} == before


def test_a_half_updated_environment_stays_and_is_finished_by_the_next_run(project: Path) -> None:
    venv = stamp(project, {"key": "of other locks"})
    stand_in(venv, uv=1)
    running = start(project, "dev")
    _, told = running.communicate(timeout=60)
    assert running.returncode == 1
    assert ".venv stays; it may be half updated" in told
    # Whole for no locks, the ones of before included.
    assert bootstrap.stamped_level(project, venv) == ("dev", False)
    assert bootstrap.half_updated(venv)
    stand_in(venv)
    running = start(project, "local")
    _, told = running.communicate(timeout=60)
    assert running.returncode == 0, told
    assert bootstrap.stamped_level(project, venv) == ("dev", True)


@pytest.mark.slow
def test_a_failed_install_leaves_nothing_and_says_what_to_do(project: Path) -> None:
    ruin = project / ".venv"
    ruin.mkdir()
    (ruin / bootstrap.UNFINISHED).touch()  # as a killed run leaves it
    running = start(project, "local")
    _, told = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "Removing .venv: it was left half-made" in told
    assert "1 packages, about 7 MB to download" in told or "1 packages, about 6 MB to download" in told
    assert "Installing uv failed" in told
    assert "Remedy: if the network needs a proxy or a mirror" in told
    assert not ruin.exists()


def test_pips_settings_reach_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "SSL_CERT_FILE", "UV_HTTP_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    listing = (
        "global.cert='/etc/ca.pem'\nglobal.index-url='https://mirror.invalid/simple'\n"
        ":env:.default-timeout='180'\ninstall.index-url='https://inner.invalid/simple'\nfreeze.all='1'\n"
    )
    told = bootstrap.child_environment(bootstrap.parse_pip_settings(listing))
    assert told["UV_DEFAULT_INDEX"] == "https://inner.invalid/simple"
    assert told["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert told["UV_HTTP_TIMEOUT"] == "180"


def test_uvs_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://chosen.invalid/simple")
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "7")
    told = bootstrap.child_environment({"index-url": "https://mirror.invalid/simple", "timeout": "180"})
    assert (told["UV_DEFAULT_INDEX"], told["UV_HTTP_TIMEOUT"]) == ("https://chosen.invalid/simple", "7")
