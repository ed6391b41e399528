"""Stand-ins for objects that SGLang passes to attention backends, with what pat reads of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch.nn.utils.rnn import pad_sequence

from sglang_pat import PackAttention
from sglang_pat.sglang.attach import with_pat
from sglang_pat.sglang.start.server_options import DELEGATED_ARGUMENTS

QO_HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 64, 50


class DefaultBackend(AttentionBackend):
    """Stands in for SGLang's default backend, and records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.needs_cpu_seq_lens = False
        self.ends: Any = None  # None: those of the base class

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.calls.append("out_graph in capture" if in_capture else "out_graph")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.calls.append("in_graph")

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(f"graphs of {max_bs} rows")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, mode: ForwardMode) -> Any:
        return self.ends or super().shared_read_ends(mode)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        self.calls.append(f"decode layer {layer.layer_id}" + "".join(f" {each}" for each in kwargs))
        return torch.full((len(q), layer.tp_q_head_num * layer.v_head_dim), math.inf)

    def forward_extend(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append("extend")
        return q


def pat_backend(model_runner: Any, name: str = "triton") -> Any:
    """Build the default backend of the runner's model with pat."""
    return with_pat(DefaultBackend(), name, model_runner)


class KVPool:
    """Stands in for MHATokenToKVPool. Layers without attention have no KV."""

    def __init__(
        self, dtype: torch.dtype = torch.float32, of_last: torch.dtype | None = None
    ) -> None:
        shape = (SLOTS, KV_HEADS, HEAD_DIM)
        generator = torch.Generator().manual_seed(0)
        self.keys = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        self.values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
        if of_last is not None:
            self.keys[1], self.values[1] = self.keys[1].to(of_last), self.values[1].to(of_last)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]

    def set_kv_buffer(self, layer: Any, location: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[layer.layer_id][location.loc] = k
        self.values[layer.layer_id][location.loc] = v


def layers(count: int = 2, **change: Any) -> torch.nn.ModuleList:
    """Return attention layers of a plain Llama; `change` applies to the last one."""
    made = [
        RadixAttention(QO_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=i)
        for i in range(count)
    ]
    for name, value in change.items():
        setattr(made[-1], name, value)
    return torch.nn.ModuleList(made)


def server_arguments(**change: Any) -> Any:
    defaults = dict.fromkeys(DELEGATED_ARGUMENTS) | {
        "enable_deterministic_inference": False,
        "rl_on_policy_target": None,
        "dcp_size": 1,
        "device": "cpu",
        "page_size": 1,
        "pp_size": 1,
        "pp_async_batch_depth": 0,
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": None,
        "speculative_adaptive": False,
        "enable_multi_layer_eagle": False,
        "speculative_draft_attention_backend": None,
        "speculative_attention_mode": "prefill",
    }
    return SimpleNamespace(**(defaults | change))


def runner(**change: Any) -> Any:
    """Return a stand-in for SGLang's model runner of a plain Llama."""
    req_to_token = torch.zeros(4, 32, dtype=torch.int32)
    model_config = SimpleNamespace(
        is_encoder_decoder=False,
        has_attention_sinks=False,
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
    )
    fields = {
        "model": layers(),
        "model_config": model_config,
        "server_args": server_arguments(),
        "is_hybrid_swa": False,
        "sliding_window_size": None,
        "attention_chunk_size": None,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "kv_cache_dtype_str": "auto",
        "token_to_kv_pool": KVPool(),
        "req_to_token_pool": SimpleNamespace(req_to_token=req_to_token, size=len(req_to_token)),
        "device": "cpu",
    }
    return SimpleNamespace(**(fields | change))


def config(**change: Any) -> Any:
    return SimpleNamespace(**(vars(runner().model_config) | change))


def decode_batch(rows: list[int], lens: list[int], out: list[int], **more: Any) -> Any:
    seq_lens = torch.tensor(lens)
    return SimpleNamespace(
        batch_size=len(rows),
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor(rows),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        out_cache_loc=torch.tensor(out),
        out_cache_loc_is_physical=True,
        **more,
    )


def queries_of_runs(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list that collects the queries of all later calls of `PackAttention.run`."""
    given: list[torch.Tensor] = []
    run = PackAttention.run

    def noted(attention: PackAttention, q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(q)
        return run(attention, q, *args, **kwargs)

    patch.setattr(PackAttention, "run", noted)
    return given


def replay_view(rows: list[int], lens: list[int], out: list[int], size: int, **more: Any) -> Any:
    """SGLang's view before it replays the graph of `size` rows.

    It has the fields that both versions set and a backend may read, but no requests or their ids.

    Padding rows have row 0 and the fill length; out_cache_loc is not padded.
    """
    num_padding = size - len(rows)
    seq_lens = torch.tensor(lens + [1] * num_padding)
    fields = {
        "batch_size": size,
        "forward_mode": ForwardMode.DECODE,
        "actual_forward_mode": ForwardMode.DECODE if rows else ForwardMode.IDLE,
        "req_pool_indices": torch.tensor(rows + [0] * num_padding),
        "seq_lens": seq_lens,
        "seq_lens_sum": int(seq_lens.sum()),
        "seq_lens_cpu": seq_lens.clone(),
        "num_padding": num_padding,
        "encoder_lens": None,
        "out_cache_loc": torch.tensor(out, dtype=torch.int64),
        "spec_info": None,
    }
    return SimpleNamespace(**(fields | more))


def drafts_to_verify(per_request: int, mask: torch.Tensor | None = None) -> Any:
    """Return SGLang's description of the draft tokens of a verify step."""
    return SimpleNamespace(
        custom_mask=mask,
        draft_token_num=per_request,
        num_tokens_per_req=per_request,
        is_draft_input=lambda: False,
    )


def mlp_padded(view: Any, backend: Any, num_tokens: int, per_request: int = 1) -> ForwardBatch:
    """Return a batch whose tokens MLP synchronisation has padded to `num_tokens`.

    SGLang's function pads them, with as many requests as `ForwardBatch.prepare_mlp_sync_batch`
    counts.
    """
    tokens = torch.zeros(len(view.out_cache_loc), dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=view.forward_mode,
        batch_size=num_tokens // per_request,
        input_ids=tokens,
        positions=tokens,
        req_pool_indices=view.req_pool_indices.long(),
        seq_lens=view.seq_lens.long(),
        seq_lens_cpu=None if view.seq_lens_cpu is None else view.seq_lens_cpu.long(),
        seq_lens_sum=None,
        out_cache_loc=view.out_cache_loc.long(),
        spec_info=getattr(view, "spec_info", None),
    )
    batch.out_cache_loc_is_physical = True  # not in 0.5.17
    batch._pad_inputs_to_size(SimpleNamespace(attn_backend=backend), num_tokens, batch.batch_size)
    return batch


def num_rows(view: Any, per_request: int = 1) -> int:
    """Return the number of rows in a batch's forward."""
    given: torch.Tensor | None = getattr(view, "input_ids", None)
    return view.batch_size * per_request if given is None else len(given)


def dense(
    q: torch.Tensor, pool: KVPool, layer_id: int, slots: torch.Tensor, cap: float = 0.0
) -> torch.Tensor:
    """Return float64 attention of one query row over these slots: `[heads, head_dim]`."""
    return dense_rows(q[None], pool, layer_id, [slots], cap)[0]


def dense_rows(
    q: torch.Tensor, pool: KVPool, layer_id: int, slots: Sequence[torch.Tensor], cap: float = 0.0
) -> torch.Tensor:
    """Return float64 attention of each row over its slots: `[rows, heads, head_dim]`."""
    padded = pad_sequence(list(slots), batch_first=True).long()
    lens = torch.tensor([len(each) for each in slots])
    is_read = torch.arange(padded.shape[1]) < lens[:, None]
    group = q.shape[1] // KV_HEADS
    keys, values = (
        cache[layer_id][padded].double().repeat_interleave(group, dim=2)
        for cache in (pool.keys, pool.values)
    )
    logits = torch.einsum("rhd,rkhd->rhk", q.double(), keys) / math.sqrt(HEAD_DIM)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~is_read[:, None], -math.inf)
    return torch.einsum("rhk,rkhd->rhd", logits.softmax(-1), values)
