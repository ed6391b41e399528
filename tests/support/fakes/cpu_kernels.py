"""SGLang's GPU functions for models, written in torch for tests on the CPU.

Without a driver SGLang has neither its own CPU kernels (`sgl_kernel`) nor Triton, and its backend
`torch_native` has no sinks, soft-caps or chunks. `install()` adds what the families of
`model_families` need, for every backend alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fakes.speculation import is_draft_step


def install() -> None:
    """Install all functions; must run before the models are imported."""
    _define_sgl_kernel_ops()
    import sgl_kernel.mamba

    torch.get_device_module = lambda device=None: torch.cpu  # this build of torch would return CUDA

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for module in (
            "sglang.kernels.ops.mamba.causal_conv1d_triton",
            "sglang.srt.layers.attention.mamba.causal_conv1d",
            "sglang.srt.layers.attention.mamba.mamba",
        ):
            _replace(module, name, globals()[name])
        _replace("sglang.srt.layers.attention.mamba.mamba", f"{name}_triton", globals()[name])
        setattr(sgl_kernel.mamba, f"{name}_cpu", globals()[name])
    sgl_kernel.mamba.chunk_gated_delta_rule_cpu = chunk_gated_delta_rule
    kda = "sglang.srt.layers.attention.linear.kernels.kda_triton"
    _replace(kda, "chunk_kda", chunk_kda)
    _replace(kda, "fused_sigmoid_gating_delta_rule_update", kda_update)
    _replace("sglang.srt.layers.attention.linear.lightning_backend", "seg_la_fwd", seg_la)
    _replace("sglang.kernels.ops.attention.fla.layernorm_gated", "layernorm_fn", layernorm)
    for module in (
        "sglang.kernels.ops.mamba.triton_ops",
        "sglang.srt.layers.attention.mamba.ops",
        "sglang.srt.layers.attention.mamba.mamba",
    ):
        _replace(module, "mamba_chunk_scan_combined", mamba_chunk_scan_combined)
        _replace(module, "selective_state_update", selective_state_update)

    for module, name in (("layernorm_gated", "RMSNorm"), ("fused_norm_gate", "FusedRMSNormGated")):
        for package in ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla"):
            with contextlib.suppress(ImportError):  # another version's
                found = importlib.import_module(f"{package}.{module}")
                getattr(found, name).forward = gated_norm
    rope = "sglang.srt.layers.rotary_embedding.factory"
    with contextlib.suppress(ImportError, AttributeError):
        _replace(rope, "get_rope_cpu", rope_on_cpu(importlib.import_module(rope)))
    if not torch.cuda.is_available():
        torch.cuda.Stream = lambda *_, **__: None
        from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

        RotaryEmbedding.forward_cuda = RotaryEmbedding.forward_native
    elementwise = "sglang.kernels.ops.elementwise.elementwise"
    _replace(elementwise, "fused_gate_sigmoid_mul", gated_expert)
    _replace(elementwise, "fused_gate_sigmoid_mul_add", add_gated_expert)

    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native

    original = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        """Run the experts. With one expert per token, its weight may scale its input (Llama 4)."""
        if config.apply_router_weight_on_input:
            weights = topk_output.topk_weights
            x = x * weights.to(x.dtype)
            topk_output = topk_output._replace(topk_weights=torch.ones_like(weights))
            config = dataclasses.replace(config, apply_router_weight_on_input=False)
        return original(layer, x, topk_output, config)

    fused_moe_native.moe_forward_native = moe_forward_native
    TorchNativeAttnBackend.forward_extend = forward_extend
    TorchNativeAttnBackend.forward_decode = forward_decode
    _attend_within_chunks(TorchNativeAttnBackend)
    _allow_fp8_pools()


def _attend_within_chunks(backend: Any) -> None:
    """Let a backend attend within chunks, and tell pat. In SGLang only FA3 does."""
    from sglang_pat.sglang.start import layer_rules

    original = backend.__init__

    def init(self: Any, model_runner: Any, *arguments: Any, **more: Any) -> None:
        original(self, model_runner, *arguments, **more)
        self.attention_chunk_size = model_runner.attention_chunk_size

    backend.__init__ = init
    layer_rules._WITHIN_CHUNKS = ("fa3", "torch_native")


def _allow_fp8_pools() -> None:
    """Allow fp8 pools as on a GPU: on a CPU 0.5.23 has them only for `intel_amx`."""
    from sglang.srt.mem_cache import kv_cache_configurator

    class NoCpu:
        def __getattr__(self, name: str) -> Any:
            return getattr(platform, name)

        def is_cpu(self) -> bool:
            return False

    platform = getattr(kv_cache_configurator, "current_platform", None)  # not in 0.5.17
    if platform is not None:
        kv_cache_configurator.current_platform = NoCpu()


def _replace(module: str, name: str, value: Callable[..., Any]) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError:  # another version's
        return
    setattr(found, name, value)


# --- attention: torch_native with sinks, soft-caps, chunks and any head sizes ---


def forward_extend(
    self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """`TorchNativeAttnBackend.forward_extend`."""
    starts, counts = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
    if forward_batch.forward_mode.is_target_verify():  # drafts follow the stored tokens
        starts = forward_batch.seq_lens
        counts = torch.full_like(starts, forward_batch.spec_info.draft_token_num)
    return _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks, starts, counts, more)


def forward_decode(
    self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """`TorchNativeAttnBackend.forward_decode`."""
    q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim) if not more else q
    starts = forward_batch.seq_lens - 1
    if getattr(self, "branches", None) is not None:
        return _forward_branches(self, q, k, v, layer, forward_batch, save_kv_cache, sinks)
    if is_draft_step(self):  # the steps of a round have the same lengths
        starts = forward_batch.positions
    counts = torch.ones_like(starts)
    return _forward(self, q, k, v, layer, forward_batch, save_kv_cache, sinks, starts, counts, more)


def _forward_branches(
    self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool, sinks: Any
) -> torch.Tensor:
    """Attend from each row to its request's KV and to the slots of its branch."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = self.token_to_kv_pool
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    out = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
    table = self.req_to_token_pool.req_to_token
    requests, topk, _ = self.branches.shape
    for i in range(requests):
        before = table[batch.req_pool_indices[i], : int(batch.seq_lens[i])].long()
        for t in range(topk):
            row = i * topk + t
            slots = torch.cat([before, self.branches[i, t].long()])
            seen = torch.ones(1, len(slots), dtype=torch.bool)
            position = batch.positions[row : row + 1][:, None]
            own = (each[slots].to(q.dtype) for each in (keys, values))
            out[row : row + 1] = _attend(queries[row : row + 1], *own, seen, layer, sinks, position)
    return out.view(len(q), -1)


def _forward(
    self: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any,
    batch: Any, save_kv_cache: bool, sinks: torch.Tensor | None, starts: torch.Tensor,
    counts: torch.Tensor, more: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if more.get("q_rope") is not None:  # latent attention passes two parts
        q = torch.cat([q, more["q_rope"]], dim=-1)
        k = k if more.get("k_rope") is None else torch.cat([k, more["k_rope"]], dim=-1)
    pool, is_cross = self.token_to_kv_pool, layer.is_cross_attention
    loc = batch.encoder_out_cache_loc if is_cross else batch.out_cache_loc
    if save_kv_cache and k is not None:
        if more.get("k_rope") is not None:
            size = more["k_rope"].shape[-1]
            pool.set_mla_kv_buffer(layer, loc, k[..., :-size], k[..., -size:])
        else:
            pool.set_kv_buffer(layer, KVWriteLoc(loc, self.swa_out_cache_loc), k, v)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    in_window_pool = isinstance(pool, SWAKVPool) and pool.layers_mapping[layer.layer_id][1]
    queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    is_in_place = k is not None and not save_kv_cache and layer.qk_head_dim != keys.shape[-1]
    out = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
    chunk = self.attention_chunk_size
    begin = 0
    for i, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        length = start + count
        encoder = int(batch.encoder_lens[i]) if batch.encoder_lens is not None else 0
        first, last = (0, encoder) if is_cross else (encoder, encoder + length)
        slots = self.req_to_token_pool.req_to_token[batch.req_pool_indices[i], first:last].long()
        if in_window_pool:  # slots outside the window are read, then masked
            slots = pool.translate_loc_from_full_to_swa(slots)
        position = torch.arange(start, start + count)[:, None]
        key = torch.arange(last - first)[None]
        seen = torch.ones(count, last - first, dtype=torch.bool)
        if not is_cross and layer.attn_type.value != "encoder_only":
            seen &= key <= position
            is_verified = batch.forward_mode.is_target_verify()
            if is_verified and batch.spec_info.custom_mask is not None:  # a tree
                tree = batch.spec_info.custom_mask.view(-1, count, count)[i]
                seen[:, start:] = tree
            if (layer.sliding_window_size or -1) > -1:
                seen &= key >= position - layer.sliding_window_size
            if getattr(layer, "use_irope", False) and chunk:
                seen &= key >= position // chunk * chunk
        end = begin + count
        if is_in_place:  # latent attention without a prefix reads no cache
            assert start == 0
            heads = layer.tp_k_head_num
            own = (each[begin:end].reshape(count, heads, -1).to(q.dtype) for each in (k, v))
        else:
            own = (each[slots].to(q.dtype) for each in (keys, values))
        out[begin:end] = _attend(queries[begin:end], *own, seen, layer, sinks, position)
        begin = end
    out = out.to(v.dtype if v is not None else q.dtype)
    # torch_native returns a prefill in the shape of the queries, on which some classes rely.
    return out.view(q.shape if q.dim() > 2 and out.numel() == q.numel() else (len(q), -1))


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, layer: Any,
    sinks: torch.Tensor | None, position: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attend for one request: `[rows, heads, dim]` to `[tokens, KV heads, dim]`."""
    values = values[..., : layer.v_head_dim]
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", queries, keys) * layer.scaling
    if layer.logit_cap:
        logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
    if layer.xai_temperature_len > 0:
        scale = torch.log2(position.float().clamp(min=1)) / torch.log2(
            torch.tensor(float(layer.xai_temperature_len))
        )
        logits = logits * torch.where(position > layer.xai_temperature_len, scale, 1.0)
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(-1, len(queries), 1)
        weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


# --- short convolutions ---


def causal_conv1d_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
    query_start_loc: Any = None, cache_indices: Any = None, has_initial_state: Any = None,
    conv_states: Any = None, activation: str | None = "silu", **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Convolve rows `[channels, tokens]` of several requests, and replace their states."""
    width = weight.shape[-1]
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = conv_states[cache_indices[i]]
        before = state[:, -(width - 1) :] if bool(has_initial_state[i]) else 0 * state
        before = before[:, -(width - 1) :].to(x.dtype)
        whole = torch.cat([before, x[:, begin:end]], dim=1)
        found = F.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, begin:end] = F.silu(found) if activation in ("silu", "swish", True) else found
        state[:, -(width - 1) :] = whole[:, -(width - 1) :].to(state.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None,
    cache_seqlens: Any = None, conv_state_indices: Any = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Convolve one token of each request: `[requests, channels]`."""
    width = weight.shape[-1]
    indices = conv_state_indices.long()
    whole = torch.cat([conv_state[indices][..., -(width - 1) :].to(x.dtype), x[..., None]], dim=-1)
    out = (whole * weight).sum(-1)
    if bias is not None:
        out = out + bias
    states = conv_state[indices]
    states[..., -(width - 1) :] = whole[..., 1:].to(states.dtype)
    conv_state[indices] = states
    return F.silu(out) if activation in ("silu", "swish", True) else out


# --- gated delta rule (Qwen3-Next, Qwen3.5) ---


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, cu_seqlens: torch.Tensor, initial_state_indices: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:  # fmt: skip
    """Apply the rule to a prefill; update `initial_state` `[slots, heads, value dim, key dim]`."""
    decay = g.view(-1, v.shape[-2], 1)
    state = (initial_state, initial_state_indices)
    return _delta_rule(q, k, v, decay, beta, *state, cu_seqlens), initial_state, None


def _delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Apply the rule. decay: logarithms `[tokens, heads, key dim]`, or `[tokens, heads, 1]`."""
    heads = v.shape[-2]
    q, k = (F.normalize(each.float(), dim=-1, eps=1e-6)[0] for each in (q, k))
    q, k = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    out = torch.empty_like(v)
    g, beta, values = decay.float().exp(), beta.view(-1, heads).float(), v[0].float()
    bounds = cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        slot = int(initial_state_indices[i])
        state = initial_state[slot].float()
        for t in range(begin, end):
            state = state * g[t, :, None, :]
            delta = (values[t] - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t, :, None]
            state = state + delta[..., None] * k[t, :, None]
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out


def fused_gdn_gating(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log decay and the step of every token."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update(
    A_log: torch.Tensor, dt_bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    a: torch.Tensor, b: torch.Tensor, initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Apply the same rule to a decode step."""
    decay, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    state = {"initial_state": initial_state_source, "initial_state_indices": initial_state_indices}
    return chunk_gated_delta_rule(q, k, v, decay, beta, cu_seqlens=cu_seqlens, **state)[0]


# --- gated delta rule with a decay of each key column (Kimi-Linear, Kimi K3, Ling 3) ---


def chunk_kda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    initial_state: torch.Tensor, initial_state_indices: torch.Tensor, cu_seqlens: torch.Tensor,
    A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None = None,
    beta_is_raw: bool = False, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Apply the rule to a prefill. `g` is the gate before its activation."""
    heads, columns = v.shape[-2], k.shape[-1]
    gate = g.reshape(-1, heads, columns).float() + dt_bias.view(heads, columns).float()
    rate = A_log.float().exp().view(heads, 1)
    decay = -rate * F.softplus(gate)
    if lower_bound is not None:
        decay = lower_bound * (rate * gate).sigmoid()
    beta = beta.float().sigmoid() if beta_is_raw else beta
    return _delta_rule(
        q, k, v, decay, beta, initial_state, initial_state_indices, cu_seqlens
    )  # fmt: skip


def kda_update(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    initial_state_source: torch.Tensor, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Apply the same rule to a decode step."""
    return chunk_kda(q, k, v, a, b, initial_state_source, beta_is_raw=True, **rest)


# --- lightning attention (Ling 2.5, 2.6) ---


def seg_la(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, decay_scales: torch.Tensor,
    meta: Any, softmax_scale: float | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Attend token by token; update `s` `[slots, heads, key dim, value dim]`."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, decay = torch.empty_like(v), (-decay_scales.float()).exp().view(-1, 1, 1)
    for i, (begin, end) in enumerate(itertools.pairwise(meta.q_offsets.tolist())):
        slot = int(meta.s_offsets[i])
        state = s[slot].float() * bool(meta.s_scales[i])
        for t in range(begin, end):
            state = state * decay + k[t, :, :, None].float() * v[t, :, None].float()
            out[t] = scale * torch.einsum("hkv,hk->hv", state, q[t].float()).to(out.dtype)
        s[slot] = state.to(s.dtype)
    return out


# --- state space models (Mamba 2: Nemotron-H, Falcon-H1) ---


def _scan_step(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Update a Mamba state by one token.

    `state` is `[..., heads, head dim, states]`, `x` `[..., heads, head dim]`, `dt` and `a` `[...,
    heads]`, `b` and `c` `[..., heads, states]`.
    """
    decay = (dt * a).exp()[..., None, None]
    state = state * decay + (dt[..., None] * x)[..., None] * b[..., None, :]
    return state, (state * c[..., None, :]).sum(-1)


def mamba_chunk_scan_combined(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None, initial_states: Any = None,
    cu_seqlens: Any = None, dt_softplus: bool = False, out: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """Scan token by token. Returns what SGLang's kernel of this version returns."""
    heads = x.shape[2]
    dt = dt[0].float() + (dt_bias.float() if dt_bias is not None else 0)
    dt = F.softplus(dt) if dt_softplus else dt
    b, c = (each[0].float().repeat_interleave(heads // each.shape[2], dim=1) for each in (B, C))
    states = []
    bounds = cu_seqlens.tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = x.new_zeros(heads, x.shape[3], b.shape[-1], dtype=torch.float32)
        if initial_states is not None:
            state = initial_states[i].float()
        for t in range(begin, end):
            row = x[0, t].float()
            state, y = _scan_step(state, row, dt[t], A.float(), b[t], c[t])
            out[0, t] = (y + (D[:, None] * row if D is not None else 0)).to(out.dtype)
        states.append(state)
    varlen = torch.stack(states).to(rest.get("state_dtype") or torch.float32)
    return (None, varlen, None) if "return_track_states" in rest else (None, varlen)


def selective_state_update(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, D: Any = None, z: Any = None, dt_bias: Any = None, dt_softplus: bool = False,
    state_batch_indices: Any = None, out: Any = None, **rest: Any,
) -> None:  # fmt: skip
    """Update the states by one token of each request: `x` is `[requests, heads, head dim]`."""
    heads = x.shape[1]
    step = dt[..., 0].float() + (dt_bias[..., 0].float() if dt_bias is not None else 0)
    step = F.softplus(step) if dt_softplus else step
    b, c = (each.float().repeat_interleave(heads // each.shape[1], dim=1) for each in (B, C))
    indices = state_batch_indices.long()
    after, y = _scan_step(state[indices].float(), x.float(), step, A[:, 0, 0].float(), b, c)
    state[indices] = after.to(state.dtype)
    out.copy_((y + (D * x.float() if D is not None else 0)).to(out.dtype))


def rope_on_cpu(factory: Any) -> Callable[..., Any]:
    """Let the factory also return an unscaled rope on a CPU, where SGLang has no such module."""
    scaled = factory.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        is_scaled = (arguments[5] or {}).get("rope_type") == "deepseek_yarn"
        return scaled(*arguments) if is_scaled else factory.get_rope(*arguments[:8])

    return get_rope_cpu


# --- other operators of `torch.ops.sgl_kernel` that the models call on a CPU ---


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply an RMS norm with the factor 1 + weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype)


def layernorm(
    x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float = 1e-6,
    group_size: int | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Apply an RMS norm to all columns, or to each group of columns."""
    wide = x.float().unflatten(-1, (-1, group_size or x.shape[-1]))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * weight).to(x.dtype)


def gated_norm(self: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a norm, then multiply by the gate if there is one."""
    normed = layernorm(x, self.weight, None, self.eps, getattr(self, "group_size", None))
    if gate is None:
        return normed
    is_sigmoid = self.activation == "sigmoid"
    return (normed * (gate.sigmoid() if is_sigmoid else F.silu(gate))).to(x.dtype)


def fused_qk_gemma_rmsnorm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Apply the norms of Q and K to each head."""
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return gemma_norm(q, q_weight, eps), gemma_norm(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate(
    q_gate: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
    eps: float, head_dim: int, num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Apply them if each head's query is followed by its gate."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2 * head_dim).chunk(2, dim=-1)
    normed = fused_qk_gemma_rmsnorm(q, k, q_weight, k_weight, eps, head_dim)
    return *normed, gate.reshape(-1, head_dim).contiguous()


def fused_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor, inplace: bool = True) -> torch.Tensor:
    """Multiply in place, as the models require."""
    return x.mul_(gate.reshape(x.shape).sigmoid())


def gated_expert(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Return the output of a shared expert, gated by the layer's input."""
    return shared * (hidden @ gate).sigmoid()[:, None]


def add_gated_expert(
    hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a gated shared expert to the other experts' output."""
    out.add_(gated_expert(hidden, gate, shared))


def fused_qkvzba_split(
    qkvz: torch.Tensor, ba: torch.Tensor, num_k_heads: int, num_v_heads: int, k_dim: int,
    v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Split fused columns into q, k, v, z, b and a; q, k and v stay in one tensor."""
    qkv_size = 2 * num_k_heads * k_dim + num_v_heads * v_dim
    qkv, z = qkvz[:, :qkv_size], qkvz[:, qkv_size:]
    b, a = ba.chunk(2, dim=-1)
    z = z.reshape(len(z), num_v_heads, v_dim)
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def _define_sgl_kernel_ops() -> None:
    """Fill `torch.ops.sgl_kernel`, a namespace of C++ operators, with Python functions."""
    for name, function in {
        "fused_gdn_gating_cpu": fused_gdn_gating,
        "fused_sigmoid_gating_delta_rule_update_cpu": fused_sigmoid_gating_delta_rule_update,
        "fused_qk_gemma_rmsnorm_cpu": fused_qk_gemma_rmsnorm,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": fused_qk_gemma_rmsnorm_with_gate,
        "fused_sigmoid_mul_cpu": fused_sigmoid_mul,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": fused_qkvzba_split,
    }.items():
        setattr(torch.ops.sgl_kernel, name, function)
