"""Attention to the draft tokens that rows read in addition to the plan.

The plan covers the KV that a request had before the step, and the first draft token, which is the
root of the request's tree. A draft token also reads the drafts before it on its branch. This module
computes that attention from the KV that the layer has just stored, and merges it with the plan's
result by LSE. On a GPU, one kernel does both.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat.executors.layer import Scale
from sglang_pat.sglang.step.step_type import ExecutionMode


class DraftKv:
    """Draft tokens that rows read in addition to the plan: a kind of `layer.attention.ExtraKv`."""

    def reserve(self, max_requests: int) -> None:
        """Allocate the memory that graphs of up to `max_requests` requests read."""

    def update(self, forward_batch: Any, num_known: int, execution: ExecutionMode) -> None:
        """Prepare for the next step, whose requests after the first `num_known` are padding."""

    def keys(self, forward_batch: Any, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arguments `slots` and `biases` of `merge_drafts` for `num_rows` rows."""
        raise NotImplementedError

    def merge(
        self,
        forward_batch: Any,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        layer: RadixAttention,
        planned: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[Scale, Scale],
    ) -> torch.Tensor:
        """Attend to the draft tokens, and merge the result with the plan's."""
        slots, biases = self.keys(forward_batch, len(q))
        return merge_drafts(q, caches, slots, biases, layer, planned, scales)


class TreeKv(DraftKv):
    """The draft tokens of trees. Each row reads the drafts on its own branch.

    Attributes
    ----------
    masks
        The buffer for SGLang's masks, which say which drafts each draft reads. It has the size of
        the largest graph: bool `[requests, draft tokens, draft tokens]`. None before `reserve`.
    """

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self._num_drafts = num_drafts
        self._chain = torch.ones(num_drafts, num_drafts, device=device).tril().log()
        self._chain[:, 0] = -torch.inf  # the plan covers the root
        self._reserved: torch.Tensor | None = None
        self.masks: torch.Tensor | None = None
        # [requests, draft tokens, draft tokens]: 0 at [r, i, j] if draft i reads j, else -inf.
        self._biases = self._in_graphs = self._chain.expand(0, -1, -1)

    def reserve(self, max_requests: int) -> None:
        if self._reserved is None or len(self._reserved) != max_requests:
            self._reserved = self._chain.expand(max_requests, -1, -1).clone()
            self._in_graphs = self._reserved[:0]
            self.masks = torch.zeros_like(self._reserved, dtype=torch.bool)

    def update(self, forward_batch: Any, num_known: int, execution: ExecutionMode) -> None:
        num_requests: int = forward_batch.batch_size
        if execution is ExecutionMode.EAGER or self._reserved is None:
            self._biases = self._chain.expand(num_requests, -1, -1).clone()
        else:
            if len(self._in_graphs) != num_requests:
                self._in_graphs = self._reserved[:num_requests]
            self._biases = self._in_graphs
        if execution is ExecutionMode.CAPTURE or num_known == 0:
            return
        seq_lens = forward_batch.seq_lens[:num_known]
        mask = forward_batch.spec_info.custom_mask
        masks = square_masks(mask, seq_lens, self._num_drafts, self.masks)
        torch.log(masks, out=self._biases[:num_known])
        self._biases[:num_known, :, 0] = -torch.inf

    def keys(self, forward_batch: Any, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return forward_batch.out_cache_loc[:num_rows], self._biases


class BlockKv(DraftKv):
    """Draft tokens of chains or blocks. Each reads the drafts up to itself, or the whole block.

    The plan covers the first draft token. In draft extend, drafts of trees are chains too, because
    SGLang has moved the accepted path of each tree to the front.
    """

    def __init__(self, num_drafts: int, device: torch.device, *, are_chains: bool = True) -> None:
        self._num_drafts = num_drafts
        reads = torch.ones(num_drafts, num_drafts, device=device)
        self._block = (reads.tril() if are_chains else reads).log()
        self._block[:, 0] = -torch.inf
        self._biases = self._block[None]

    def reserve(self, max_requests: int) -> None:
        if len(self._biases) != max_requests:
            self._biases = self._block.expand(max_requests, -1, -1).contiguous()

    def keys(self, forward_batch: Any, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        groups = num_rows // self._num_drafts
        biases = self._biases[:groups]
        if len(biases) < groups:
            biases = self._block.expand(groups, -1, -1).contiguous()
        slots = forward_batch.out_cache_loc[:num_rows]
        if len(slots) < num_rows:  # the verify step had more padding
            slots = torch.cat((slots, slots.new_zeros(num_rows - len(slots))))
        return slots, biases


class BranchKv(DraftKv):
    """The draft tokens of a draft model that branches. Each row reads its own branch.

    SGLang does not move draft tokens when a branch continues from another branch's tokens: row `i`
    always reads the slots of row `i`.
    """

    def __init__(self, num_steps: int, topk: int, device: torch.device) -> None:
        self._num_steps, self._topk = num_steps, topk
        self._reserved = torch.zeros(0, device=device)  # rows read all keys, so biases are 0
        self._biases = self._reserved
        self._slots = torch.zeros(0, num_steps, dtype=torch.int64, device=device)
        self._num_read = 0

    def reserve(self, max_requests: int) -> None:
        size = max_requests * self._topk * self._num_steps
        if len(self._reserved) != size:
            self._reserved = self._reserved.new_zeros(size)

    def update(self, forward_batch: Any, num_known: int, execution: ExecutionMode) -> None:
        if execution is not ExecutionMode.REPLAY:  # in a replay the graph reads SGLang's buffer
            self.set_slots(forward_batch.out_cache_loc, forward_batch.batch_size * self._topk)

    def set_slots(self, out_cache_loc: torch.Tensor, num_rows: int) -> None:
        """Set the slots of the rows' drafts, `[rows * drafts]`. No row reads its last draft."""
        self._slots = out_cache_loc.view(num_rows, -1)
        size = num_rows * self._num_steps
        fits = size <= len(self._reserved)
        self._biases = self._reserved if fits else self._reserved.new_zeros(size)

    def go_to(self, step: int) -> None:
        """Make rows read the drafts up to step `step`, counted from 0."""
        self._num_read = step + 1

    def keys(self, forward_batch: Any, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = self._num_read
        slots = self._slots[:num_rows, :count].reshape(-1)
        return slots, self._biases[: num_rows * count].view(num_rows, 1, count)


def merge_drafts(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    biases: torch.Tensor,
    layer: RadixAttention,
    before: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[Scale, Scale] = (1.0, 1.0),
) -> torch.Tensor:
    """Return the attention of each row to its KV in the plan and to the keys of its group.

    A group is the rows of one request, or one row of a draft model that branches.

    Parameters
    ----------
    q
        Queries of the rows, group by group: `[rows, heads, head_dim]`.
    caches
        Keys and values, with those of the draft tokens: `[slots, KV heads, ...]`.
    slots
        Slots of the keys of each group: `[groups * keys]`.
    biases
        0 for a key that a row reads, else -inf: float32 `[groups, rows of a group, keys of a
        group]`, contiguous.
    layer
        The layer, which has the scale and the soft-cap.
    before
        The plan's output and LSE: `[rows, heads, v_head_dim]` and `[rows, heads]`. Both include the
        attention sink, if any. The output may be overwritten.
    scales
        Factors by which the keys and the values in the caches are multiplied.
    """
    scaling, logit_cap = layer.scaling, layer.logit_cap or 0.0
    if q.is_cuda:
        from sglang_pat.executors import draft_attention  # imported here, because it needs Triton

        if draft_attention.reads(caches[0].dtype, q.device):
            # With one draft per branch, the slots still have a stride after reshape().
            slots = slots.contiguous()
            return draft_attention.merge_drafts(
                q, caches, slots, biases, before, scaling, logit_cap, scales
            )
    k, v = (cache[slots].float().mul_(scale) for cache, scale in zip(caches, scales, strict=True))
    return _merge_in_torch(q, k, v, biases, before, scaling, logit_cap)


def _merge_in_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    biases: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor],
    scaling: float,
    logit_cap: float,
) -> torch.Tensor:
    """Compute `merge_drafts` in torch. k, v: the groups' keys and values, in float32."""
    out, lse = before
    (count, rows, num_keys), kv_heads = biases.shape, k.shape[1]
    group = q.shape[1] // kv_heads
    # Shape for bmm(): [groups * KV heads, rows * query heads of a KV head, head_dim].
    queries = q.float().view(count, rows, kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    keys, values = (x.view(count, num_keys, kv_heads, -1).transpose(1, 2) for x in (k, v))
    queries, keys, values = (each.flatten(0, 1) for each in (queries, keys, values))
    logits = torch.bmm(queries, keys.mT).view(count, kv_heads, rows, group, num_keys) * scaling
    if logit_cap:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    logits += biases[:, None, :, None, :]
    # The plan's result counts as one more key, whose logit is the plan's LSE.
    rest = lse.view(count, rows, kv_heads, group, 1).transpose(1, 2)
    weights = torch.softmax(torch.cat((rest, logits), dim=-1), dim=-1)
    weights = weights.nan_to_num_(nan=0.0)  # NaN: a padding row reads no key
    tree = torch.bmm(weights[..., 1:].reshape(count * kv_heads, -1, num_keys), values)
    before_tree = out.view(count, rows, kv_heads, group, -1).transpose(1, 2)
    tree = tree.view(before_tree.shape).addcmul_(weights[..., :1], before_tree)
    return tree.transpose(1, 2).to(out.dtype).reshape(out.shape).contiguous()


def square_masks(
    mask: torch.Tensor, seq_lens: torch.Tensor, num_drafts: int, buffer: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which drafts each draft reads: bool `[requests, draft tokens, draft tokens]`.

    SGLang's mask lists the rows request by request. In a full mask, a row covers the tokens that
    the request had before the step (`seq_lens`) and its draft tokens. In a square mask, a row
    covers only the draft tokens. A mask is square if it is on a CPU, if it is in `buffer`
    (`TreeKv.masks`), or after `choose_masks(square=True)`.
    """
    count = len(seq_lens)
    size = count * num_drafts**2
    if mask.numel() == size:  # nearly always
        return mask.view(count, num_drafts, num_drafts).bool()
    if mask.is_cpu or _is_same(mask, buffer):
        return mask[:size].view(count, num_drafts, num_drafts).bool()
    places, _ = _square_places(seq_lens, num_drafts)
    return mask[places].bool()


def _is_same(mask: torch.Tensor, buffer: torch.Tensor | None) -> bool:
    return buffer is not None and mask.data_ptr() == buffer.data_ptr()


def full_masks(squares: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Return SGLang's full masks, given the square masks."""
    places, size = _square_places(seq_lens, squares.shape[-1])
    mask = torch.ones(int(size), dtype=torch.bool, device=squares.device)
    mask[places] = squares
    return mask


def _square_places(seq_lens: torch.Tensor, num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the square masks' elements in full masks, and the full masks' size."""
    widths = seq_lens.long() + num_drafts
    ends = torch.cumsum(widths, 0) * num_drafts
    offsets = torch.arange(num_drafts, device=seq_lens.device)
    rows = (ends - widths * num_drafts + seq_lens)[:, None] + offsets * widths[:, None]
    return rows[:, :, None] + offsets, ends[-1]


def choose_masks(*, square: bool) -> None:
    """Set which masks SGLang's n-gram worker makes.

    square: whether masks cover only the draft tokens. Backends other than pat need full masks. To
    make full masks, the worker makes about five torch calls per request, while the GPU waits.
    """
    from sglang.srt.speculative import ngram_worker

    ngram_worker.USE_FULL_MASK = not square


def undo_square_masks(forward_batch: Any | None, buffer: torch.Tensor | None = None) -> None:
    """Switch SGLang's n-gram worker to full masks from now on.

    forward_batch: None, or a verify step that already has a mask, which becomes a full mask.
    """
    from sglang.srt.speculative import ngram_worker

    are_square = not ngram_worker.USE_FULL_MASK
    choose_masks(square=False)
    if forward_batch is None:
        return
    drafts, count = forward_batch.spec_info, forward_batch.spec_info.draft_token_num
    # A batch larger than all graphs has its own mask, square or full.
    is_square = drafts.custom_mask.numel() == forward_batch.batch_size * count**2
    if are_square or is_square or _is_same(drafts.custom_mask, buffer):
        squares = drafts.custom_mask.view(-1, count, count)[: forward_batch.batch_size]
        drafts.custom_mask = full_masks(squares, forward_batch.seq_lens[: len(squares)])
