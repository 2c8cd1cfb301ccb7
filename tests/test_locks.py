"""The locks as they lie there, and the rules by which one that is out of date is found."""

import re
import shutil
from pathlib import Path

import pytest
from packaging import tags

from scripts import locks
from scripts.bootstrap import lock_path

ROOT = Path(__file__).resolve().parent.parent
ALL = ("bootstrap", *locks.LOCKS)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the locks are judged by."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    return tmp_path


@pytest.mark.parametrize("name", ALL)
def test_every_package_is_pinned_with_digests_and_without_a_place(name: str) -> None:
    text = lock_path(ROOT, name).read_text(encoding="utf-8")
    assert "://" not in text
    for block in re.split(r"\n(?=[A-Za-z0-9])", text)[1:]:
        assert re.match(r"[A-Za-z0-9._-]+==\S+", block), block.splitlines()[0]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block.splitlines()[0]


def test_all_locks_agree_on_versions() -> None:
    pinned = {
        name: {
            str(each) for each in locks.read_requirements(lock_path(ROOT, name).read_text(encoding="utf-8"))
        }
        for name in locks.LOCKS
    }
    # The image sends traces, which the local stack doesn't.
    assert pinned["image"] < pinned["dev"]
    assert pinned["local"] < pinned["dev"]


def test_the_installer_that_builds_is_the_one_that_installs() -> None:
    version = locks.UV.partition("==")[2]
    assert f'requires = ["uv_build>={version},<' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_untouched_locks_have_no_faults(project: Path) -> None:
    assert locks.faults(project) == []


def test_comments_in_pyproject_make_no_fault(project: Path) -> None:
    with (project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n# a remark\n")
    assert locks.faults(project) == []


@pytest.mark.parametrize(
    "old, new",
    [
        ('"rich>=14"', '"rich>=14.1"'),
        ('"jgo>=3.2,<4"', '"jgo>=3.3,<4"'),
        ('"pytest>=9"', '"pytest>=9.1"'),
        ('requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
    ],
    ids=["dependency", "extra", "development", "python"],
)
def test_other_dependencies_are_a_fault(project: Path, old: str, new: str) -> None:
    text = (project / "pyproject.toml").read_text(encoding="utf-8")
    assert old in text
    (project / "pyproject.toml").write_text(text.replace(old, new), encoding="utf-8")
    found = locks.faults(project)
    assert [fault.partition(" ")[0] for fault in found] == [f"locks/{name}.lock" for name in ALL]


def test_an_edit_by_hand_is_a_fault(project: Path) -> None:
    path = lock_path(project, "local")
    path.write_text(path.read_text(encoding="utf-8").replace("==", "==9", 1), encoding="utf-8")
    assert locks.faults(project) == ["locks/local.lock was changed by hand"]


def test_a_missing_lock_is_a_fault(project: Path) -> None:
    lock_path(project, "image").unlink()
    assert locks.faults(project) == ["locks/image.lock is missing"]


def test_the_best_fitting_wheel_is_measured() -> None:
    supported = list(tags.cpython_tags((3, 12), platforms=["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"]))
    supported += list(tags.compatible_tags((3, 12), platforms=["manylinux_2_17_x86_64"]))
    files = [
        {"url": "pack-1-py3-none-any.whl", "size": 1},
        {"url": "pack-1-cp312-cp312-manylinux_2_17_x86_64.whl", "size": 20},
        {"url": "pack-1-cp312-cp312-manylinux_2_28_x86_64.whl", "size": 300},
        {"url": "pack-1-cp312-cp312-macosx_11_0_arm64.whl", "size": 4000},
    ]
    assert locks.wheel_bytes(files, supported) == 300
    assert locks.wheel_bytes(files[:1], supported) == 1
    assert locks.wheel_bytes(files[3:], supported) is None
