"""Runs DFLASH on a CPU for tests: SGLang refuses it there, although most of it is in torch.

No draft of an untrained model would be accepted. So where `answers` are known, a draft token is
replaced by the answer's token if the model's choice is even (roughly). Which drafts are accepted
then still depends on what the model computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Each prompt followed by its answer.
answers: list[list[int]] = []


def install() -> None:
    """Install the functions; must run after `speculation.install()`."""
    from sglang.srt import server_args
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.speculative import draft_worker_common
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    speculative_hook._handle_dflash = _resolve
    for module, name in (
        (server_args, "DRAFT_ATTENTION_BACKEND_CHOICES"),
        (draft_worker_common, "DRAFT_ATTENTION_BACKEND_CHOICES"),
        (draft_worker_common, "_SUPPORTED_DRAFT_BACKENDS"),  # 0.5.17
    ):
        if hasattr(module, name):
            setattr(module, name, [*getattr(module, name), "torch_native"])
    memory_pool._set_kv_buffer_prefix_valid_impl = _store_committed
    forward = DFlashDraftModel.forward

    def forward_in_float32(self: Any, *args: Any, input_embeds: torch.Tensor, **more: Any) -> Any:
        """Run the draft model on float32 embeddings, which SGLang rounds to bfloat16."""
        return forward(self, *args, input_embeds=input_embeds.to(self.fc.weight.dtype), **more)

    DFlashDraftModel.forward = forward_in_float32
    generate = DFlashWorkerV2.forward_batch_generation
    sample = DFlashWorkerV2._greedy_sample_from_vocab_parallel_head

    def generate_and_note(self: Any, batch: Any, *args: Any, **more: Any) -> Any:
        self.batch_of_test = batch
        return generate(self, batch, *args, **more)

    def sample_what_is_right(self: Any, **arguments: Any) -> torch.Tensor:
        chosen = sample(self, **arguments)
        batch = self.batch_of_test
        right = [
            _rest_of_answer(req.origin_input_ids, length, self.block_size - 1)
            for req, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]
        known = torch.tensor(right).view_as(chosen)
        return torch.where((known >= 0) & (chosen % 4 > 0), known, chosen)

    DFlashWorkerV2.forward_batch_generation = generate_and_note
    DFlashWorkerV2._greedy_sample_from_vocab_parallel_head = sample_what_is_right


def _rest_of_answer(prompt: Sequence[int], length: int, count: int) -> list[int]:
    """Return `count` tokens of a request after its cached tokens and the next one; -1: unknown."""
    prompt = list(prompt)
    for each in answers:
        if each[: len(prompt)] == prompt:
            found = each[length + 1 : length + 1 + count]
            return found + [-1] * (count - len(found))
    return [-1] * count


def _resolve(server_args: Any) -> None:
    """Replaces `speculative_hook._handle_dflash`, which allows GPUs only."""
    resolved = {
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
        "speculative_draft_attention_backend": "torch_native",
    }
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:  # 0.5.17
        for name, value in resolved.items():
            setattr(server_args, name, value)
    else:
        declare_resolution(server_args, "_handle_dflash", **resolved)


def _store_committed(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    loc_2d: torch.Tensor, commit_lens: torch.Tensor, *sizes: Any,
) -> None:  # fmt: skip
    """Replaces a Triton kernel: store the KV of each block's committed tokens."""
    committed = torch.arange(loc_2d.shape[1]) < commit_lens[:, None]
    slots = loc_2d[committed].long()
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[slots] = new.view(-1, *cache.shape[1:])[committed.flatten()].to(cache.dtype)
