"""The fuzzer's own parts: its properties hold on filters drawn by chance, and fail where the compiler is broken."""

import random

import pytest

from scripts import fuzzing


def test_filters_drawn_by_chance_keep_the_promises():
    chance = random.Random(6)
    tally = fuzzing.Tally(60)
    for _ in range(1_000):
        tally.one(chance.randbytes(chance.randrange(120)))
    assert tally.tried == 1_000
    assert tally.taken > 50


def test_a_compiler_that_loses_a_clause_is_found(monkeypatch):
    monkeypatch.setattr(fuzzing, "compile_filter", lambda value, **_: [])
    with pytest.raises(AssertionError):
        fuzzing.check({"lang": "zh"})
