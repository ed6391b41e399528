"""Errors of a result beside those of torch: what tests and benchmarks of the kernels assert."""

from __future__ import annotations

import pytest
import torch

from kernel.numerics import compare


@pytest.mark.parametrize("shape", [(6,), (3, 2), (3, 1, 2)])
def test_results_of_any_shape(shape: tuple[int, ...]) -> None:
    """A selection of elements is a vector: tests of isolation compare such."""
    exact = torch.tensor([1.0, 1.0, 2.0, 2.0, 4.0, 4.0], dtype=torch.float64).view(shape)
    result = (exact + 0.25).bfloat16()
    report = compare(result, exact.bfloat16(), exact)
    assert not report.acceptable
    assert report.mean_error == 0.25
    assert report.relative_error == pytest.approx(1.5 / 14 if len(shape) == 1 else 0.25)


def test_a_nan_that_is_not_exact_is_an_infinite_error() -> None:
    exact = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert compare(exact.bfloat16(), exact.bfloat16(), exact).max_error == 0
    missing = torch.tensor([float("nan"), 1.0]).bfloat16()
    assert compare(missing, exact.bfloat16(), exact).max_error == float("inf")
