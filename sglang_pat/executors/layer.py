"""LayerInputs: what an executor is given for one layer."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LayerInputs(NamedTuple):
    """One layer of a decode step, besides the plan and the step.

    Attributes
    ----------
    q, out : `[num_requests, num_qo_heads, head_dim]`. `out` is written.
    k_cache, v_cache : `[num_slots, num_kv_heads, head_dim]`.
    lse : float32 `[num_requests, num_qo_heads]`, natural log; written if given.
    sm_scale : softmax scale.
    logit_cap : `cap * tanh(logit / cap)` if positive, off if 0.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    sm_scale: float
    logit_cap: float
