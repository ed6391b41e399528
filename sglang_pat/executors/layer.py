"""LayerInputs: what an executor gets for one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

# If a scale is a tensor, each run reads its current value, so captured graphs see an update, too.
Scale = float | torch.Tensor


class LayerInputs(NamedTuple):
    """The arguments of `PackAttention.run`, which checks them and says what they are.

    `out` is written, and so is `lse`, float32 `[num_requests, num_qo_heads]`, if it is given.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    logit_cap: float
    sinks: torch.Tensor | None = None
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    q_rope: torch.Tensor | None = None

    def whole_q(self) -> torch.Tensor:
        """All columns of the queries, `[num_requests, num_qo_heads, head_dim]`."""
        return self.q if self.q_rope is None else torch.cat((self.q, self.q_rope), dim=-1)
