"""SGLang's GPU functions for speculative decoding, written in torch for tests on the CPU.

Without its `sgl_kernel` wheel SGLang has none of these functions, and its backend `torch_native`
has no draft steps. `install()` adds them for every backend alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch


def define_kernels() -> None:
    """Define the kernels; must run before SGLang is imported."""
    import sgl_kernel
    import sgl_kernel.speculative

    for function in (
        assign_draft_cache_locs_contiguous_cpu,
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        build_tree_kernel_efficient_cpu,
        copy_all_layer_kv_cache_cpu,
        fill_accept_out_cache_loc_cpu,
        fill_bonus_tokens_cpu,
        rotate_input_ids_cpu,
        verify_tree_greedy_cpu,
    ):
        setattr(sgl_kernel, function.__name__, function)
    sgl_kernel.speculative.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask


def install() -> None:
    """Install the functions; must run after `cpu_kernels.install()`, which adds verify steps."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    # Overlap rounds as on a GPU: the next round starts before the host knows the results of the
    # last one, and no backend reads lengths on the host.
    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    TorchNativeAttnBackend.needs_cpu_seq_lens = False
    TorchNativeAttnBackend.max_context_len = 4096  # needed for the mask of a step without drafts
    TorchNativeAttnBackend.update_verify_buffers_to_fill_after_draft = lambda *arguments: None
    if hasattr(speculative_hook, "resolved_view"):  # not in 0.5.17
        speculative_hook.resolved_view = _view_with_triton(speculative_hook.resolved_view)
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]

    _allow_several_heads()
    DraftBackendFactory.create_decode_backend = _decode_backend
    DraftBackendFactory.create_draft_extend_backend = lambda factory: _torch_native(
        factory.draft_model_runner
    )


def mend_streaming_sessions() -> None:
    """Let a turn compute the KV of the last token of the turn before, unless a step has.

    SGLang assumes that this KV exists. It does not if the turn ended with a token that was no
    accepted draft; later turns are then wrong with any backend.
    """
    from sglang.srt.session.streaming_session import StreamingSession

    finish = StreamingSession.try_cache_finished_req

    def finish_as_computed(self: Any, req: Any, **more: Any) -> bool:
        computed = _record(req).kv_committed_len
        is_kept: bool = finish(self, req, **more)
        if is_kept:
            kept = _record(self.slots[req.session.session_id])
            kept.kv_committed_len = min(kept.kv_committed_len, computed)
        return is_kept

    StreamingSession.try_cache_finished_req = finish_as_computed


def _record(holder: Any) -> Any:
    """Return the object that records the KV of a request or session."""
    return holder.kv if hasattr(holder.kv, "kv_committed_len") else holder


def _allow_several_heads() -> None:
    """Let an EAGLE head of a Llama accept the index that SGLang passes to each draft layer."""
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle

    init = LlamaForCausalLMEagle.__init__

    def init_without_number(self: Any, *args: Any, draft_model_idx: int = 0, **more: Any) -> None:
        init(self, *args, **more)

    LlamaForCausalLMEagle.__init__ = init_without_number


def _view_with_triton(view: Callable[[Any], Any]) -> type:
    """Let SGLang allow trees with pages, which it decides by the backend's name."""

    class View:
        def __init__(self, arguments: Any) -> None:
            self._view = view(arguments)

        def __getattr__(self, name: str) -> Any:
            return "triton" if name == "attention_backend" else getattr(self._view, name)

    return View


def _decode_backend(factory: Any) -> Any:
    # SGLang's rule: a round of one step consists of the draft-extend step only.
    if factory.speculative_num_steps <= 1:
        return None
    return DraftSteps(factory.draft_model_runner, factory.speculative_num_steps, factory.topk)


def _torch_native(model_runner: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(model_runner)


def is_draft_step(backend: Any) -> bool:
    """True if a backend is one of `DraftSteps`."""
    return getattr(backend, "is_draft_step", False)


class DraftSteps:
    """Replaces a default backend's class for the decode steps of a draft model."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, num_steps: int, topk: int = 1) -> None:
        self._topk = topk
        self.attn_backends = [_torch_native(model_runner) for _ in range(num_steps - 1)]
        for backend in self.attn_backends:
            backend.is_draft_step = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for step, backend in enumerate(self.attn_backends):
            if self._topk > 1:
                slots = forward_batch.out_cache_loc.view(
                    len(forward_batch.seq_lens), self._topk, -1
                )
                backend.branches = slots[..., : step + 1]
            backend.init_forward_metadata(forward_batch)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor, pool_len: int, topk: int, num_steps: int,
) -> None:  # fmt: skip
    ends = seq_lens + topk * num_steps
    _copy_slots(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
    end_offset: torch.Tensor, out_cache_loc: torch.Tensor, pool_len: int,
) -> None:  # fmt: skip
    _copy_slots(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
    end_offset: torch.Tensor, out_cache_loc: torch.Tensor, pool_len: int,
) -> None:  # fmt: skip
    first = 0
    for row, begin, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[row, begin:end] = out_cache_loc[first : first + end - begin]
        first += end - begin


def _copy_slots(
    rows: torch.Tensor, table: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    spans = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
    slots = torch.cat([table[row, begin:end] for row, begin, end in spans])
    out[: len(slots)] = slots.to(out.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots


def rotate_input_ids_cpu(
    input_ids: torch.Tensor, extend_start_loc: torch.Tensor, extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor, select_index: torch.Tensor | None,
) -> None:  # fmt: skip
    """Shift each request's tokens by one, and append the new token."""
    spans = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for i, (begin, count) in enumerate(spans):
        input_ids[begin : begin + count - 1] = input_ids[begin + 1 : begin + count].clone()
        last = begin + count - 1 if select_index is None else int(select_index[i])
        input_ids[last] = topk_index.flatten()[i]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy slots between buffers, which are given by address and bytes per slot."""
    for begin, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(begin + source * size, size) for source in sources.tolist()]
        for target, slot in zip(targets.tolist(), slots, strict=True):
            ctypes.memmove(begin + target * size, slot, size)


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor, selected_index: torch.Tensor, seq_lens: torch.Tensor,
    tree_mask: torch.Tensor, positions: torch.Tensor, retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor, retrieve_next_sibling: torch.Tensor, topk: int, depth: int,
    num_drafts: int, tree_mask_mode: int,
) -> None:  # fmt: skip
    """Build chains, and trees of the tokens that `organize_draft_results` chose."""
    if topk > 1:
        assert int(tree_mask_mode) == 1
        trees = torch.zeros(len(seq_lens), num_drafts, num_drafts, dtype=torch.bool)
        retrieve_index.copy_(torch.arange(len(seq_lens) * num_drafts).view(retrieve_index.shape))
        for b, (chosen, parents) in enumerate(
            zip(selected_index.tolist(), parent_list.tolist(), strict=True)
        ):
            above = [-1]
            trees[b, 0, 0] = True
            for i in range(1, num_drafts):
                group = chosen[i - 1] // topk
                above.append(0 if group == 0 else chosen.index(parents[group]) + 1)
                trees[b, i] = trees[b, above[i]]
                trees[b, i, i] = True
            for i in reversed(range(1, num_drafts)):
                retrieve_next_sibling[b, i] = retrieve_next_token[b, above[i]]
                retrieve_next_token[b, above[i]] = i
        depths = trees.sum(-1) - 1
        positions.copy_((seq_lens[:, None] + depths).flatten())
        tree_mask.view(-1)[: trees.numel()] = trees.flatten()
        return
    assert int(tree_mask_mode) == 1  # a mask of the draft tokens only
    chain = torch.ones(num_drafts, num_drafts, dtype=torch.bool).tril()
    tree_mask.view(-1)[: len(seq_lens) * num_drafts**2] = chain.flatten().repeat(len(seq_lens))
    _write_chains(seq_lens, num_drafts, positions, retrieve_index, retrieve_next_token)
    retrieve_next_sibling.fill_(-1)


def _write_chains(
    seq_lens: torch.Tensor, num_drafts: int, positions: torch.Tensor, index: torch.Tensor,
    next_token: torch.Tensor,
) -> None:  # fmt: skip
    offsets = torch.arange(num_drafts)
    positions.copy_((seq_lens[:, None] + offsets).flatten())
    index.copy_(torch.arange(len(seq_lens) * num_drafts).view(index.shape))
    next_token.copy_(torch.where(offsets < num_drafts - 1, offsets + 1, -1).expand_as(next_token))


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor, seq_lens: torch.Tensor, positions: torch.Tensor,
    retrieve_index: torch.Tensor, retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor, batch_size: int, num_drafts: int,
) -> None:  # fmt: skip
    trees = tree_mask.view(batch_size, num_drafts, num_drafts).bool()
    retrieve_index.copy_(torch.arange(batch_size * num_drafts).view(retrieve_index.shape))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for i, tree in enumerate(trees.tolist()):
        latest_child: dict[int, int] = {}
        parents = [
            max((j for j in range(node) if tree[node][j]), default=-1) for node in range(num_drafts)
        ]
        for node in reversed(range(num_drafts)):
            positions[i * num_drafts + node] = seq_lens[i] + sum(tree[node][:node])
            retrieve_next_token[i, node] = latest_child.get(node, -1)
            if parents[node] >= 0:
                retrieve_next_sibling[i, node] = latest_child.get(parents[node], -1)
                latest_child[parents[node]] = node


def verify_tree_greedy_cpu(
    *, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor,
    candidates: torch.Tensor, retrive_index: torch.Tensor, retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor, target_predict: torch.Tensor,
) -> None:  # fmt: skip
    """Follow the path of the model's answers in each tree."""
    for i, tokens in enumerate(candidates.tolist()):
        answers = target_predict[i].tolist()
        index = retrive_index[i].tolist()
        children, siblings = retrive_next_token[i].tolist(), retrive_next_sibling[i].tolist()
        node, accepted = 0, 0
        accept_index[i, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            child = children[node]
            while child != -1 and tokens[child] != answers[node]:
                child = siblings[child]
            if child == -1:
                break
            predicts[index[node]] = answers[node]
            accepted += 1
            accept_index[i, accepted] = index[child]
            node = child
        accept_token_num[i] = accepted
        predicts[index[node]] = answers[node]
