"""PatAttnBackend: decode attention of SGLang through PackAttention.

Above it SGLang's model runner: metadata once per step, forward once per layer. Everything that is
not decode stays with SGLang's own backend, beside it in a HybridAttnBackend.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_pat.attention import PackAttention
from sglang_pat.executors.cuda import PlanOverflowError
from sglang_pat.sglang.debug import RankChecker, StepChecker, check_growth
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import install_hooks
from sglang_pat.sglang.plugin import NAME
from sglang_pat.sglang.reader import OVERFLOW, BatchReader
from sglang_pat.sglang.refusals import (
    attention_layers,
    check_argument_names,
    check_kv_pool,
    check_server,
)
from sglang_pat.sglang.repeats import RepeatedSteps
from sglang_pat.sglang.reports import StepReports
from sglang_pat.stats import Counters, read_counters

logger = logging.getLogger(__name__)

# Of SGLang's default backends, those that want certain pages.
_PAGE_SIZES = {"trtllm_mha": (16, 32, 64, 128), "fa4": (128,)}


def create_pat_backend(model_runner: Any) -> AttentionBackend:
    """What SGLang gets for `pat`: a PatAttnBackend, for all modes composed with SGLang's default.

    ValueError if the configuration is not supported, RuntimeError if SGLang cannot be hooked.
    """
    prefill, decode = _chosen_backends(model_runner)
    if decode != NAME:
        raise ValueError(
            f"pat only decodes, but the backend for decode is {decode!r}, for prefill {prefill!r}; "
            f"use --attention-backend {NAME} or --decode-attention-backend {NAME}"
        )
    backend = PatAttnBackend(model_runner)
    if prefill != NAME:
        return backend  # SGLang itself puts it beside the prefill backend
    default = _default_backend(model_runner)
    logger.info("pat decodes, %s does everything else", default)
    return HybridAttnBackend(
        model_runner=model_runner,
        prefill_backend=ATTENTION_BACKENDS[default](model_runner),
        decode_backend=backend,
    )


class PatAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """Decode only. Plans in init_forward_metadata*, runs the plan in forward_decode.

    Eager steps and CUDA graphs have a PackAttention each: a graph needs buffers that never move.
    The replay of a graph for the requests of the last step is not planned at all.
    """

    # Plans are made on the host, from the lengths there.
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        environment = Environment.read()
        check_server(model_runner)
        layer = attention_layers(model_runner.model)[0]
        check_kv_pool(model_runner, layer)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._new_attention = partial(
            PackAttention,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            dtype=model_runner.dtype,
            device=model_runner.req_to_token_pool.req_to_token.device,
            policy=environment.policy,
            growth_tokens=environment.growth_tokens,
        )
        self._eager = self._new_attention()
        self._captured: PackAttention | None = None
        self._attention = self._eager  # the one that has the plan of this step
        install_hooks()
        self._reader = BatchReader()
        self._debug = environment.debug
        self._checkers: dict[PackAttention, StepChecker] = defaultdict(StepChecker)
        self._ranks = RankChecker.of_sglang() if environment.debug else None
        self._reports = StepReports(environment, model_runner, self._counters)
        self._repeats = RepeatedSteps(self._reports.add_repeated, self._reports.on_step)
        self._reports.start()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager decode. The requests are taken from the step that is being run."""
        self._plan(self._eager, forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before the first capture, and each time that all graphs are captured anew (after an
        update of the weights). max_bs: rows of the largest graph."""
        if self._eager.executor != "cuda":
            raise ValueError(
                "pat cannot be captured in a CUDA graph where torch executes its plans: start "
                "SGLang with --disable-cuda-graph (or --cuda-graph-backend-decode disabled)"
            )
        layer_id = self.token_to_kv_pool.start_layer
        num_slots = len(self.token_to_kv_pool.get_key_buffer(layer_id))
        # A slot may be in several shared ranges, where packs read their parents' ranges themselves.
        before = self._captured
        self._captured = self._new_attention(max_requests=max_bs, max_shared_slots=2 * num_slots)
        if before is not None:
            self._captured.stats = before.stats

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a CUDA graph is captured or replayed: writes the plan that the graph reads."""
        begun_ns = time.perf_counter_ns()
        if (
            not in_capture
            and self._reader.is_unchanged()
            and self._repeats.add(forward_batch.batch_size, begun_ns)
        ):
            return  # what the graph reads is in place
        assert self._captured is not None
        self._plan(self._captured, forward_batch, is_step=not in_capture)
        if not in_capture:
            self._expect_repeats(self._captured, forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer: store the new token's KV, then attend.

        q: `[rows, heads * head_dim]` or `[rows, heads, head_dim]`. Returns the former shape.
        """
        if kwargs:
            check_argument_names(layer, kwargs)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            # Without layer.k_scale and v_scale, which checkpoints made for an fp8 cache have: for
            # SGLang's pools they mean nothing unless the cache's type is not the model's, and that
            # is refused at start-up.
            pool.set_kv_buffer(layer, _write_location(forward_batch), k, v)
        # Asked for in every layer: a hierarchical cache waits here until the layer has been loaded.
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._attention.run(
            q, keys, values, sm_scale=layer.scaling, logit_cap=layer.logit_cap
        )
        assert isinstance(out, torch.Tensor)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _plan(self, attention: PackAttention, forward_batch: Any, *, is_step: bool = True) -> None:
        if forward_batch.batch_size == 0:  # an idle rank under data parallelism
            return
        num_repeated = self._repeats.end()
        grows = self._debug and attention is self._attention and self._reader.is_unchanged()
        before = attention.seq_lens
        self._attention = attention
        batch = self._reader.read(forward_batch)
        req_to_token = self.req_to_token_pool.req_to_token
        rows = forward_batch.req_pool_indices
        lens = forward_batch.seq_lens
        try:
            planned = attention.plan(
                batch, req_to_token=req_to_token, req_pool_indices=rows, seq_lens=lens
            )
        except PlanOverflowError:
            batch = self._reader.without_sharing(batch, OVERFLOW)
            planned = attention.plan(
                batch, req_to_token=req_to_token, req_pool_indices=rows, seq_lens=lens
            )
        planning = attention.stats.planning_ns.last
        assert planning is not None
        if self._ranks is not None:
            self._ranks.check(planned)
        if grows and len(before) == len(attention.seq_lens):  # graphs differ in padding
            check_growth(before, attention.seq_lens)
        if self._debug and (shared := self._reader.last_shared) is not None:
            plan_is_new = planning.kind != "unchanged"
            self._checkers[attention].check(*shared, req_to_token, rows, plan_is_new=plan_is_new)
        if is_step:
            self._reports.add_step(planning, num_repeated)

    def _expect_repeats(self, attention: PackAttention, forward_batch: Any) -> None:
        """Let the next steps do without a plan(), unless every step is to be checked or counted."""
        shared = self._reader.last_shared
        if self._debug or shared is None:
            return
        steps = min(attention.steps_left(), self._reports.steps_left)
        self._repeats.begin(
            forward_batch.batch_size, steps, attention.step_tokens, len(shared.reqs)
        )

    def _counters(self) -> Counters:
        stats = [each.stats for each in (self._eager, self._captured) if each is not None]
        stats.append(self._repeats.stats())
        more = {} if self._ranks is None else {"ranks_alike": self._ranks.checked}
        events = self._reader.events  # None until a step has shown the tree
        return read_counters(
            stats,
            private_steps=self._reader.private_steps,
            tree_events={} if events is None else events.counts,
            batch_changes=self._reader.changes,
            **more,
        )


def _write_location(forward_batch: Any) -> KVWriteLoc:
    """Where the new token goes."""
    if hasattr(KVWriteLoc, "for_batch"):  # marks the slots as physical, which the pool asks for
        return KVWriteLoc.for_batch(forward_batch)
    return KVWriteLoc(forward_batch.out_cache_loc)


def _chosen_backends(model_runner: Any) -> tuple[str, str]:
    """The names of the prefill and the decode backend."""
    arguments = model_runner.server_args
    if hasattr(arguments, "get_attention_backends"):  # 0.5.17
        prefill, decode = arguments.get_attention_backends()
        return prefill, decode
    return model_runner.prefill_attention_backend_str, model_runner.decode_attention_backend_str


def _default_backend(model_runner: Any) -> str:
    """The backend that SGLang would have taken, had none been asked for."""
    arguments, config = model_runner.server_args, model_runner.model_config
    if model_runner.device == "cpu":
        from sglang.srt.utils import cpu_has_amx_support

        return "intel_amx" if cpu_has_amx_support() else "torch_native"
    if hasattr(arguments, "_get_default_attn_backend"):  # 0.5.17
        default: str = arguments._get_default_attn_backend(model_runner.use_mla_backend, config)
    else:
        from sglang.srt.arg_groups.overrides import get_default_attn_backend

        default = get_default_attn_backend(arguments, model_runner.use_mla_backend, config)
    # SGLang adapts the page size to the backend it chooses, but here it has adapted it to `pat`.
    page_sizes = _PAGE_SIZES.get(default)
    if page_sizes is not None and arguments.page_size not in page_sizes:
        raise ValueError(
            f"SGLang's default backend here is {default}, which needs --page-size "
            f"{' or '.join(map(str, page_sizes))}, not {arguments.page_size}; pass it, or select "
            f"pat by --decode-attention-backend {NAME}"
        )
    return default
