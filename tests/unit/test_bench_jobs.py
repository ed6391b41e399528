"""Whole jobs: what is sent, what is predicted, what has to hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from common.models import MODELS
from server.jobs import JOBS, Job, JobRun, gates, known_gpu, predicted, run_job
from sglang_pat.workload.trace import prompt_length


@pytest.mark.parametrize("job", [Job("a", 6, 5, 30, 4, 7), JOBS[2].smaller()])
def test_a_job_is_sent_in_a_random_order_that_is_the_same_every_time(job: Job) -> None:
    found = job.requests(2000, seed=3)
    groups = [group for group, _ in found]
    assert Counter(groups) == dict.fromkeys(range(job.groups), job.size)
    assert groups != sorted(groups) or job.groups == 1
    again = job.requests(2000, seed=3)
    for (_, one), (_, other) in zip(found, again, strict=True):
        assert one.prompt.tokens.tolist() == other.prompt.tokens.tolist()
        assert prompt_length(one.prompt) == job.shared + job.private
    first: dict[int, list[int]] = {}
    for group, request in found:
        shared = request.prompt.tokens[: job.shared].tolist()
        assert first.setdefault(group, shared) == shared
    assert len({tuple(each) for each in first.values()}) == job.groups


def entry(name: str, measured: float, expected: float) -> dict[str, Any]:
    return {
        "job": name,
        "measured": {"pat": [{"seconds": measured}]},
        "predicted_seconds": {"pat": expected, "default": 1.0},
    }


def test_gates_hold_predictions_to_their_limits() -> None:
    found = gates([entry("chat", 10, 11.6), entry("rollouts", 10, 11.6), entry("agents", 10, 8.6)])
    assert {name.partition(",")[0]: gate["met"] for name, gate in found.items()} == {
        "chat": False,
        "rollouts": True,
        "agents": True,
    }
    assert len(found) == 3  # what was not measured is no gate


def test_a_job_is_predicted_for_its_gpu() -> None:
    requests = [request for _, request in Job("a", 3, 4, 200, 10, 5).requests(128_256, 0)]
    config = MODELS["llama-3-8b"].config
    for gpu in ("H100", "H200"):
        found = predicted(requests, config, gpu)
        assert set(found) == {"pat", "default"}
        assert 0 < found["pat"].seconds < 1


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("GeForce 9", None),
        (None, None),
    ],
)
def test_gpus_are_known_by_their_drivers_names(name: str | None, known: str | None) -> None:
    assert known_gpu(name) == known


class Server:
    """Answers each prompt in two chunks."""

    def __init__(self, missing: int = 0) -> None:
        self.calls: list[str] = []
        self.missing = missing

    def flush(self) -> None:
        self.calls.append("flush")

    def stream(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> Any:
        self.calls.append("stream")
        for number in (1, 2):
            for index, each in enumerate(sampling):
                tokens = 1 if number == 1 else each["max_new_tokens"] - self.missing
                about = {"completion_tokens": tokens, "cached_tokens": index}
                yield {"index": index, "meta_info": about}


def test_a_job_begins_with_an_empty_cache_and_in_one_call() -> None:
    requests = [request for _, request in Job("a", 2, 2, 10, 5, 6).requests(2000, 0)]
    server = Server()
    run = run_job(server, requests)  # type: ignore[arg-type]
    assert server.calls == ["flush", "stream"]
    assert isinstance(run, JobRun)
    assert 0 < run.ttft_mean <= run.ttft_last <= run.seconds
    assert run.cached == (0 + 1 + 2 + 3) / 60
    with pytest.raises(RuntimeError, match="request 0: 5 of 6 tokens"):
        run_job(Server(missing=1), requests)  # type: ignore[arg-type]
