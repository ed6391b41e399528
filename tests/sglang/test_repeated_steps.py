"""Steps that reuse a plan are counted like planned steps."""

from __future__ import annotations

import threading
import time

from sglang_pat.plan import KvTokens
from sglang_pat.sglang.step.repeated_steps import RepeatedSteps
from sglang_pat.stats import PlanningTime

TOKENS = KvTokens(100, 60, 50)


def add(steps: RepeatedSteps, count: int = 1) -> None:
    for _ in range(count):
        steps.add(time.perf_counter_ns())


def test_each_step_is_counted_once_with_the_tokens_it_has() -> None:
    times: list[PlanningTime] = []
    marks: list[None] = []
    steps = RepeatedSteps(times.append, lambda: marks.append(None))
    steps.begin(TOKENS, 3)
    add(steps, 2)
    for _ in range(2):  # a second call changes nothing
        stats = steps.stats()
        assert (stats.plans_built, stats.plans_reused) == (0, 2)
        assert stats.kv_tokens_query_centric == 103 + 106
        assert stats.kv_tokens_planned == 63 + 66
        assert stats.kv_tokens_lower_bound == 53 + 56
        assert stats.planning_ns["unchanged"].total() == len(times) == 2
    add(steps)
    assert (len(steps.end()), steps.end()) == (3, [])
    steps.begin(KvTokens(10, 10, 10), 1)
    add(steps)
    after = steps.stats()
    assert after.plans_reused == len(times) == len(marks) == 4
    assert after.kv_tokens_query_centric == 103 + 106 + 109 + 11
    assert stats.plans_reused == 2  # a copy


def test_other_threads_may_ask_at_any_time() -> None:
    steps = RepeatedSteps(lambda planning: None)
    done = threading.Event()
    seen = [0]

    def ask() -> None:
        while not done.is_set():
            seen.append(steps.stats().plans_reused)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    tokens = 0
    for batch in range(200):
        steps.begin(KvTokens(batch, batch, batch), 1)
        tokens += sum(batch + i + 1 for i in range(5))
        add(steps, 5)
    done.set()
    for thread in threads:
        thread.join()
    stats = steps.stats()
    assert (stats.plans_reused, stats.kv_tokens_planned) == (1000, tokens)
    assert max(seen) <= 1000


def test_counting_is_never_interrupted_by_the_next_step() -> None:
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    times: list[PlanningTime] = []

    def count(planning: PlanningTime) -> None:
        times.append(planning)
        entered.set()
        assert go_on.wait(10)

    steps = RepeatedSteps(count)
    steps.begin(TOKENS, 1)
    add(steps, 3)
    asking = threading.Thread(target=steps.stats)
    asking.start()
    assert entered.wait(10)
    ending = threading.Thread(target=lambda: (steps.end(), ended.set()))
    ending.start()
    assert not ended.wait(0.2), "end() must wait for the one that counts"
    go_on.set()
    asking.join()
    ending.join()
    assert len(times) == steps.stats().plans_reused == 3
