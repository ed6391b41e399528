"""Predictions that benchmarks compare: of whole jobs, and of a token by its attention."""

from __future__ import annotations

from typing import Any

import pytest

from common.metadata import known_gpu
from common.models import MODELS
from kernel import sharing
from server.jobs import Job, JobRun, gates, run_job
from sglang_pat.workload.models import GPUS


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


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H2000", None),
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


def test_a_token_is_attention_and_the_rest_of_a_step() -> None:
    """As `kernel sharing` estimates it."""

    def estimated(us: dict[str, float]) -> dict[str, Any]:
        measured = {"us": us, "failed": {"pat": "wrong"}}
        cell = sharing.Cell(32, 0.5, 2048)
        return sharing.estimated(cell, MODELS["llama-3-8b"], GPUS["H100"], measured)

    free = estimated({"pat": 0.0, "fa3": 0.0, "flashinfer": 1.0})
    assert free["gain"] == 1
    assert 4 < free["tpot_ms"]["pat"] < 9  # 16 GB of weights
    slow = estimated({"pat": 10.0, "fa3": 110.0, "flashinfer": 120.0})
    assert slow["other"] == "fa3"
    assert slow["tpot_ms"]["other"] - slow["tpot_ms"]["pat"] == pytest.approx(32 * 0.1)
    with pytest.raises(RuntimeError, match="wrong"):
        estimated({"fa3": 1.0})
