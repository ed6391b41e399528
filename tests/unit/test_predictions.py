"""What benchmarks know of GPUs, and predict of a token by its attention."""

from __future__ import annotations

from typing import Any

import pytest

from common.metadata import known_gpu
from common.models import MODELS
from kernel import sharing
from sglang_pat.workload.models import GPUS


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
