"""The breaker and the retry budget, by hand: the clock is a number."""

import random

import pytest

from app.breaker import Breaker, Concurrency, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, first_open_s=1.0, longest_open_s=5.0)


def admit(breaker: Breaker) -> int:
    admitted = breaker.admit()
    assert admitted is not None
    return admitted


def call(breaker: Breaker, outcome="ok") -> None:
    breaker.settle(admit(breaker), outcome)


def fail(breaker: Breaker, times: int, outcome="failed") -> None:
    for _ in range(times):
        call(breaker, outcome)


@pytest.mark.parametrize("outcome, streak", [("failed", 5), ("refused", 20)])
def test_it_opens_on_a_streak_and_an_answer_ends_the_streak(breaker, outcome, streak):
    fail(breaker, streak - 1, outcome)
    call(breaker)
    fail(breaker, streak - 1, outcome)
    assert breaker.state == "closed"
    fail(breaker, 1, outcome)
    assert breaker.state == "open"
    assert breaker.admit() is None
    assert breaker.wait_s == 1.0
    assert breaker.opened == 1


def test_one_probe_at_a_time_and_its_answer_closes(breaker, clock):
    fail(breaker, 5)
    clock.now += 1.0
    assert breaker.state == "half-open"
    probe = admit(breaker)
    assert breaker.admit() is None
    assert breaker.wait_s > 0
    breaker.settle(probe, "ok")
    assert breaker.state == "closed"
    call(breaker)


def test_failed_probes_double_the_pause_up_to_its_limit(breaker, clock):
    fail(breaker, 5)
    waits = []
    for _ in range(5):
        waits.append(breaker.wait_s)
        clock.now += breaker.wait_s
        call(breaker, "failed")
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    clock.now += 5.0
    call(breaker)
    fail(breaker, 5)
    assert breaker.wait_s == 1.0


def test_a_probe_whose_caller_left_frees_the_place(breaker, clock):
    fail(breaker, 5)
    clock.now += 1.0
    call(breaker, "unknown")
    assert breaker.state == "half-open"
    call(breaker)
    assert breaker.state == "closed"


def test_calls_under_way_when_it_opened_do_not_lengthen_it(breaker, clock):
    under_way = [admit(breaker) for _ in range(12)]
    for each in under_way:
        breaker.settle(each, "failed")
    assert breaker.wait_s == 1.0
    assert breaker.opened == 1


@pytest.mark.parametrize("late", ["unknown", "failed", "refused", "ok"])
def test_a_late_end_of_an_old_call_leaves_the_probe_and_the_pause_alone(breaker, clock, late):
    old = [admit(breaker) for _ in range(3)]
    fail(breaker, 5)
    clock.now += 1.0
    probe = admit(breaker)
    breaker.settle(old[0], late)
    assert breaker.state == "half-open"
    assert breaker.admit() is None  # the probe is still the only call
    assert breaker.opened == 1
    breaker.settle(probe, "failed")
    assert breaker.wait_s == 2.0  # doubled once, by the probe
    breaker.settle(old[1], late)
    clock.now += 2.0
    breaker.settle(admit(breaker), "ok")
    breaker.settle(old[2], late)
    assert breaker.state == "closed"


def test_failures_from_before_it_opened_are_no_streak_after_it_closed(breaker, clock):
    old = [admit(breaker) for _ in range(9)]
    fail(breaker, 5)
    clock.now += 1.0
    lost = admit(breaker)
    breaker.settle(lost, "unknown")
    call(breaker)
    for each in [*old, lost]:
        breaker.settle(each, "failed")
    assert breaker.state == "closed"
    assert breaker.opened == 1


def test_random_refusals_of_a_third_do_not_open_it(breaker):
    rng = random.Random(7)
    for _ in range(50_000):
        call(breaker, "refused" if rng.random() < 1 / 3 else "ok")
    assert breaker.opened == 0


def test_the_budget_is_a_share_of_the_calls_and_a_trickle(clock):
    budget = RetryBudget(clock, share=0.12, per_s=1.0, most=10.0)
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(25):
        budget.offer()
    assert [budget.take() for _ in range(4)] == [True] * 3 + [False]  # 25 × 0.12 = 3
    clock.now += 2.0
    assert [budget.take() for _ in range(3)] == [True] * 2 + [False]
    clock.now += 3600.0
    assert sum(budget.take() for _ in range(100)) == 10


def test_thirty_percent_refusals_stay_below_a_fifth_more_calls(clock):
    rng = random.Random(3)
    budget = RetryBudget(clock)
    offered = upstream = 0
    for _ in range(4_000):
        clock.now += 0.02  # 50 calls a second
        offered += 1
        budget.offer()
        upstream += 1
        while rng.random() < 0.3 and budget.take():
            upstream += 1
    assert 1.09 < upstream / offered <= 1.2


def test_a_grant_is_used_once(clock):
    budget = RetryBudget(clock, most=10.0)
    assert sum(budget.take() for _ in range(50)) == 10
    budget.grant(30)
    budget.offer()
    assert sum(budget.take() for _ in range(50)) == 30


def test_room_shrinks_while_answers_are_slow_and_grows_again(clock):
    room = Concurrency(clock, most=40, slow_s=2.0, least=8)
    for _ in range(40):
        room.note(9.0, under_way=40)
    assert room.limit == 28  # 40 × 0.7: once in two seconds, however many are slow
    for _ in range(50):
        clock.now += 2.0
        room.note(9.0, under_way=room.limit)
    assert room.limit == 8
    for _ in range(8 + 9 + 10):
        room.note(0.1, under_way=8)
    assert room.limit in (10, 11)
    for _ in range(5_000):
        room.note(0.1, under_way=8)
    assert room.limit == 40


def test_a_slow_answer_among_few_takes_no_room(clock):
    room = Concurrency(clock, most=40, slow_s=2.0)
    for _ in range(10):
        clock.now += 5.0
        room.note(9.0, under_way=19)
    assert room.limit == 40
