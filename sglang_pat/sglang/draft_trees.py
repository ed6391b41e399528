"""Drafts that are trees: what a draft token reads of the draft tokens of its step.

A plan covers what a request had before the step. Its draft tokens are few, and each reads those
before it on its own branch: that attention is computed in torch, from the keys and values that the
layer has just been given, and merged with the plan's by LSE.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention


class DraftTrees:
    """The trees of a step: which draft tokens each one reads.

    A captured graph reads them where they lay when it was captured: `reserved` requests. Without,
    each step has its own.
    """

    def __init__(self, num_drafts: int, device: torch.device, reserved: int | None = None) -> None:
        self._num_drafts = num_drafts
        self._chain = torch.ones(num_drafts, num_drafts, dtype=torch.bool, device=device).tril()
        self._reserved = None
        if reserved is not None:
            self._reserved = self._chain.expand(reserved, -1, -1).clone()
        self._masks = self._chain[None]  # [requests, draft tokens, draft tokens that it reads]

    def take(self, forward_batch: Any, *, in_capture: bool) -> None:
        """Go to the next step. Rows of padding are chains."""
        num_requests: int = forward_batch.batch_size
        if self._reserved is None:
            self._masks = self._chain.expand(num_requests, -1, -1).clone()
        else:
            self._masks = self._reserved[:num_requests]
        num_known = num_requests - getattr(forward_batch, "num_padding", 0)
        if in_capture or num_known == 0:
            return
        masks = square_masks(
            forward_batch.spec_info.custom_mask,
            forward_batch.seq_lens[:num_known],
            self._num_drafts,
        )
        self._masks[:num_known].copy_(masks)
        self._masks[num_known:].copy_(self._chain)

    def merge(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        before: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Attention over all that each draft token reads.

        Parameters
        ----------
        q, k, v : torch.Tensor
            Of the draft tokens: `[rows, heads, head_dim]`, and `[rows, KV heads, ...]`.
        layer : RadixAttention
            Its scale and soft-cap.
        before : tuple of torch.Tensor
            Output `[rows, heads, v_head_dim]` and LSE `[rows, heads]` over what the requests had
            before the step. An attention sink has been counted there.

        Returns
        -------
        torch.Tensor
            As the output.
        """
        out, lse = before
        drafts = (len(self._masks), self._num_drafts)
        kv_heads = k.shape[1]
        queries = q.float().view(*drafts, kv_heads, -1, q.shape[-1])
        keys, values = (each.float().view(*drafts, kv_heads, -1) for each in (k, v))
        logits = torch.einsum("bihgd,bjhd->bihgj", queries, keys) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        logits = logits.masked_fill(~self._masks[:, :, None, None, :], float("-inf"))
        tree_lse = torch.logsumexp(logits, dim=-1)
        lse = lse.view(tree_lse.shape)
        total = torch.logaddexp(lse, tree_lse)
        weights = torch.exp(logits - total[..., None])
        merged = torch.einsum("bihgj,bjhd->bihgd", weights, values)
        merged += torch.exp(lse - total)[..., None] * out.view(merged.shape)
        return merged.reshape(out.shape).to(out.dtype)


def square_masks(mask: torch.Tensor, seq_lens: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Which draft tokens each one reads: bool `[requests, draft tokens, draft tokens]`.

    Parameters
    ----------
    mask : torch.Tensor
        SGLang's: for each request its rows one after the other, over all that it has before the
        step and the draft tokens; or over the draft tokens alone, as on a CPU and where
        `choose_masks()` has been told so.
    seq_lens : torch.Tensor
        What each request has before the step.
    num_drafts : int
        Draft tokens per request.
    """
    count = len(seq_lens)
    if mask.is_cpu or mask.numel() == count * num_drafts**2:
        return mask[: count * num_drafts**2].view(count, num_drafts, num_drafts).bool()
    widths = seq_lens.long() + num_drafts
    begins = (torch.cumsum(widths, 0) - widths) * num_drafts
    offsets = torch.arange(num_drafts, device=mask.device)
    rows = begins[:, None] + offsets * widths[:, None] + seq_lens[:, None]
    return mask[rows[:, :, None] + offsets].bool()


def choose_masks(*, square: bool) -> None:
    """Tell SGLang's n-gram worker which masks to make.

    square: over the draft tokens alone. Those over all that requests have it makes one request
    after the other, with some five calls of torch for each, while the GPU waits. A backend other
    than pat may need them.
    """
    from sglang.srt.speculative import ngram_worker

    ngram_worker.USE_FULL_MASK = not square
