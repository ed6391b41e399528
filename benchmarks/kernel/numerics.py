"""Compares errors of results with those of plain torch in the same dtype, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Errors of a result and of plain torch in the same dtype, both against float64."""

    max_error: float
    max_torch_error: float
    mean_error: float
    mean_torch_error: float
    worst: tuple[int, ...]  # index of the largest error
    max_beyond_rounding: float  # largest error minus one eps of the exact value
    # Mean error / mean size of the exact values, for the worst first index, or for all of a vector.
    relative_error: float

    @property
    def acceptable(self) -> bool:
        """True if the error is at most twice the error of torch.

        With few elements, torch may be lucky. So an error of one eps of the value is always
        accepted, which rounding of the probabilities and of the result may cause.
        """
        return (
            self.max_beyond_rounding <= 2 * self.max_torch_error + 1e-5
            and self.mean_error <= 2 * self.mean_torch_error + 1e-6
        )

    def __str__(self) -> str:
        return (
            f"max error {self.max_error:.3g} (torch {self.max_torch_error:.3g}) at {self.worst}, "
            f"mean {self.mean_error:.3g} (torch {self.mean_torch_error:.3g}), "
            f"relative {self.relative_error:.3g}"
        )


def compare(result: torch.Tensor, torch_result: torch.Tensor, exact: torch.Tensor) -> ErrorReport:
    """All of one shape; `exact` in float64. A NaN or a stray infinity counts as infinite error."""
    error = (result.double() - exact).abs()
    error[(result == exact) | (torch.isnan(result) & torch.isnan(exact))] = 0
    error = error.nan_to_num(nan=float("inf"))
    torch_error = (torch_result.double() - exact).abs().nan_to_num(nan=0.0, posinf=0.0)
    rounding = torch.finfo(result.dtype).eps * exact.abs()
    worst = torch.unravel_index(error.argmax(), error.shape)

    def means(of: torch.Tensor) -> torch.Tensor:
        return of.reshape(len(of) if of.dim() > 1 else 1, -1).mean(1)

    return ErrorReport(
        float(error.max()),
        float(torch_error.max()),
        float(error.mean()),
        float(torch_error.mean()),
        tuple(int(i) for i in worst),
        float(torch.where(error > rounding, error, 0.0).max()),
        float((means(error) / means(exact.abs())).max()),
    )
