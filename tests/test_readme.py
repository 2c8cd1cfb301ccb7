"""The README tells the truth of today: its settings table, its arithmetic, the commands it names."""

import re
from pathlib import Path

import pytest

from scripts import readme

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_the_settings_table_is_the_settings():
    assert readme.with_part(TEXT, "settings", readme.settings_table()) == TEXT, (
        "run: python -m scripts.readme"
    )


def test_the_arithmetic_by_hand_is_right():
    assert "2^(-179/365) = 0.712" in TEXT
    assert pytest.approx(0.712, abs=5e-4) == 2 ** (-179 / 365)
    assert "0.5 + 0.5 × 0.712 = 0.856" in TEXT
    assert pytest.approx(0.856, abs=5e-4) == 0.5 + 0.5 * 2 ** (-179 / 365)


def test_every_script_it_names_is_there():
    for name in re.findall(r"\./scripts/([a-z_]+)", TEXT):
        assert (ROOT / "scripts" / name).is_file(), name
