"""LayerInputs: what an executor gets for one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

# If a scale is a tensor, each run reads its current value, so captured graphs see an update, too.
Scale = float | torch.Tensor


class LayerInputs(NamedTuple):
    """The inputs of one layer of a decode step, in addition to the plan and the step.

    Attributes
    ----------
    q : `[num_requests, num_qo_heads, head_dim]`. In latent attention, it may also be
        `[num_requests, num_qo_heads, v_head_dim]`; then `q_rope` has the other columns.
    k_cache : `[num_slots, num_kv_heads, head_dim]`.
    v_cache : `[num_slots, num_kv_heads, v_head_dim]`. In latent attention, a view of `k_cache`.
    out : `[num_requests, num_qo_heads, v_head_dim]`; written.
    lse : float32 `[num_requests, num_qo_heads]`, natural log; written if given.
    sm_scale : softmax scale.
    logit_cap : the cap if logits become `cap * tanh(logit / cap)`. 0: they are not capped.
    sinks : `[num_qo_heads]`, float32, bfloat16 or float16: one more logit per head, without a
        value. This logit is neither scaled nor capped.
    k_scale, v_scale : factors for the numbers in the caches. A tensor must be float32 with one
        element, and is allowed only if the caches have one-byte numbers.
    q_rope : `[num_requests, num_qo_heads, head_dim - v_head_dim]`: the columns of the queries that
        `q` does not have. Only for latent attention.
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
