"""When it pays: the cells of the curve, what is estimated from kernels, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.models import MODELS
from kernel import sharing
from kernel.request_forests import Forest
from kernel.sharing import BATCHES, SHARES, Cell, cells, gpu_named
from sglang_pat.workload.models import GPUS

LLAMA = MODELS["llama-3-8b"]


def estimated(cell: Cell, us: dict[str, float]) -> dict[str, Any]:
    return sharing.estimated(cell, LLAMA, GPUS["H100"], {"us": us, "failed": {}})


def test_cells_have_one_context_and_all_shares() -> None:
    found = cells(2048)
    assert len(found) == 1 + (len(BATCHES) - 1) * len(SHARES)
    for cell in found:
        forest = Forest.of_tree(cell.tree)
        assert set(forest.seq_lens) == {2048}
        assert forest.num_requests == cell.batch
        assert forest.is_shared == (cell.share > 0)
        assert cell.prefix + cell.private == 2048


def test_a_token_is_attention_and_the_rest_of_a_step() -> None:
    cell = Cell(32, 0.5, 2048)
    free = estimated(cell, {"pat": 0.0, "fa3": 0.0, "flashinfer": 1.0})
    assert free["gain"] == 1
    assert 4 < free["tpot_ms"]["pat"] < 9  # 16 GB of weights
    slow = estimated(cell, {"pat": 10.0, "fa3": 110.0, "flashinfer": 120.0})
    assert slow["other"] == "fa3"
    assert slow["tpot_ms"]["other"] - slow["tpot_ms"]["pat"] == pytest.approx(32 * 0.1)


def test_the_curve_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    from plot import sharing as plot_sharing

    found = [estimated(cell, {"pat": 10.0, "fa3": 20.0}) for cell in cells(1024)]
    sharing.show(found, "kernels")
    assert "97% shared" in capsys.readouterr().out
    meta = {"model": "llama-3-8b", "context": 1024, "gpu": "H100", "by": "kernels"}
    plot_sharing.draw({"meta": meta, "cells": found}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_that_failed_is_named() -> None:
    measured = {"us": {"fa3": 1.0}, "failed": {"pat": "wrong"}}
    with pytest.raises(RuntimeError, match="wrong"):
        sharing.estimated(Cell(32, 0.5, 2048), LLAMA, GPUS["H100"], measured)


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100")],
)
def test_the_time_model_is_that_of_the_gpu(device: str, name: str) -> None:
    assert gpu_named(device) is GPUS[name]


@pytest.mark.parametrize("device", [None, "NVIDIA H2000"])
def test_an_unknown_gpu_has_no_time_model(device: str | None) -> None:
    with pytest.raises(ValueError, match=f"does not know {device}; it knows H100, H200"):
        gpu_named(device)
