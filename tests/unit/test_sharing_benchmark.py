"""When it pays: the cells of the curve, what is estimated from kernels, and the picture."""

from __future__ import annotations

from pathlib import Path

import bench_sharing
import pytest
from bench_sharing import BATCHES, SHARES, Cell, cells, estimated
from request_forests import Forest
from serving.models import MODELS

LLAMA = MODELS["llama-3-8b"]


def test_cells_have_one_context_and_all_shares() -> None:
    found = cells(2048)
    assert len(found) == 1 + (len(BATCHES) - 1) * len(SHARES)
    for cell in found:
        forest = Forest.of_tree(cell.tree)
        assert set(forest.seq_lens) == {2048}
        assert forest.num_requests == cell.batch
        assert forest.is_shared == (cell.share > 0)
        assert (cell.case.prefix, cell.case.private) == (cell.prefix, cell.private)


def test_a_token_is_attention_and_the_rest_of_a_step() -> None:
    cell = Cell(32, 0.5, 2048)
    free = estimated(cell, LLAMA, {"pat": 0.0, "fa3": 0.0, "flashinfer": 1.0})
    assert free["gain"] == 1
    assert 4 < free["tpot_ms"]["pat"] < 9  # 16 GB of weights
    slow = estimated(cell, LLAMA, {"pat": 10.0, "fa3": 110.0, "flashinfer": 120.0})
    assert slow["other"] == "fa3"
    assert slow["tpot_ms"]["other"] - slow["tpot_ms"]["pat"] == pytest.approx(32 * 0.1)


def test_the_curve_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    import plot_sharing

    found = [estimated(cell, LLAMA, {"pat": 10.0, "fa3": 20.0}) for cell in cells(1024)]
    bench_sharing.show(found, "kernels")
    assert "97% shared" in capsys.readouterr().out
    meta = {"model": "llama-3-8b", "context": 1024, "gpu": "H100", "by": "kernels"}
    plot_sharing.draw({"meta": meta, "cells": found}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
