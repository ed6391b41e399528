"""PatAttnBackend: decode attention of SGLang through PackAttention.

Above it SGLang's model runner: metadata once per step, forward once per layer. Everything that is
not decode stays with SGLang's own backend, beside it in a HybridAttnBackend.
"""

from __future__ import annotations

import logging
import time
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
from sglang_pat.sglang.debug import DebugChecks
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import CHANNEL, StepRequests, install_hooks
from sglang_pat.sglang.microbatches import Microbatches
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
from sglang_pat.support import BACKEND

logger = logging.getLogger(__name__)

# Of SGLang's default backends, those that want certain pages.
_PAGE_SIZES = {"trtllm_mha": (16, 32, 64, 128), "fa4": (128,)}


def create_pat_backend(model_runner: Any) -> AttentionBackend:
    """What SGLang gets for `pat`: a PatAttnBackend, for all modes composed with SGLang's default.

    ValueError if the configuration is not supported, RuntimeError if SGLang cannot be hooked.
    """
    prefill, decode = _chosen_backends(model_runner)
    if decode != BACKEND:
        raise ValueError(
            f"pat only decodes, but the backend for decode is {decode!r}, for prefill {prefill!r}; "
            f"use --attention-backend {BACKEND} or --decode-attention-backend {BACKEND}"
        )
    backend = PatAttnBackend(model_runner)
    if prefill != BACKEND:
        return backend  # SGLang itself puts it beside the prefill backend
    default = _default_backend(model_runner)
    logger.info("pat decodes, %s does everything else", default)
    return HybridAttnBackend(
        model_runner=model_runner,
        prefill_backend=ATTENTION_BACKENDS[default](model_runner),
        decode_backend=backend,
    )


class PatAttnBackend(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """Decode only. Plans a step in init_forward_metadata*, runs the plan in forward_decode.

    Eager steps and CUDA graphs have a PackAttention each: a graph needs buffers that never move.
    A graph that is replayed for the requests of the last step is not planned at all.
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
        self._layer_id = layer.layer_id
        new_attention = partial(
            PackAttention,
            layer.tp_q_head_num,
            layer.tp_k_head_num,
            layer.qk_head_dim,
            dtype=model_runner.dtype,
            device=model_runner.req_to_token_pool.req_to_token.device,
            policy=environment.policy,
            growth_tokens=environment.growth_tokens,
        )
        install_hooks()
        self._microbatches = Microbatches(
            _num_microbatches(model_runner.server_args), new_attention, strict=environment.debug
        )
        self._attention = self._microbatches.current.eager  # the one that has this step's plan
        self._checks = DebugChecks.of_sglang() if environment.debug else None
        self._reports = StepReports(environment, model_runner, self._counters)
        self._repeats = RepeatedSteps(self._reports.add_repeated, self._reports.on_step)
        self._reports.start()

    # --- once per step ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager decode. The requests are taken from the step that is being run."""
        if forward_batch.batch_size == 0:  # an idle rank under data parallelism
            return
        num_repeated = self._repeats.end()
        step = CHANNEL.acknowledge()
        microbatch = self._microbatches.of(step)
        self._plan(microbatch.reader, microbatch.eager, step, forward_batch)
        self._reports.add_step(microbatch.eager.step_time, num_repeated)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a CUDA graph is captured or replayed: writes the plan that the graph reads."""
        begun_ns = time.perf_counter_ns()
        step = CHANNEL.acknowledge()
        microbatch = self._microbatches.of(step)
        if (
            not in_capture
            and microbatch.reader.is_unchanged(step)
            and self._repeats.add(forward_batch.batch_size, begun_ns)
        ):
            return  # what the graph reads is in place
        if forward_batch.batch_size == 0:
            return
        num_repeated = self._repeats.end()
        attention = microbatch.captured
        assert attention is not None
        self._plan(microbatch.reader, attention, step, forward_batch)
        if not in_capture:
            self._reports.add_step(attention.step_time, num_repeated)
            self._expect_repeats(microbatch.reader, attention, forward_batch)

    def _plan(
        self,
        reader: BatchReader,
        attention: PackAttention,
        step: StepRequests | None,
        forward_batch: Any,
    ) -> None:
        """Read the step's paths, and plan it with `attention`."""
        self._attention = attention
        batch = reader.read(step, forward_batch)
        tensors = {
            "req_to_token": self.req_to_token_pool.req_to_token,
            "req_pool_indices": forward_batch.req_pool_indices,
            "seq_lens": forward_batch.seq_lens,
        }
        try:
            plan = attention.plan(batch, **tensors)
        except PlanOverflowError:
            plan = attention.plan(reader.without_sharing(batch, OVERFLOW), **tensors)
        if self._checks is not None:
            self._checks.check(
                attention, plan, reader, tensors["req_to_token"], tensors["req_pool_indices"]
            )

    def _expect_repeats(
        self, reader: BatchReader, attention: PackAttention, forward_batch: Any
    ) -> None:
        """Let the next steps do without a plan(), unless every step is to be checked or counted."""
        shared = reader.last_shared
        if self._checks is not None or shared is None:
            return
        steps = min(attention.steps_left(), self._reports.steps_left)
        self._repeats.begin(
            forward_batch.batch_size, steps, attention.step_tokens, len(shared.reqs)
        )

    # --- CUDA graphs ---

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before the first capture, and each time that all graphs are captured anew (after an
        update of the weights). max_bs: rows of the largest graph."""
        if self._attention.executor != "cuda":
            raise ValueError(
                "pat cannot be captured in a CUDA graph where torch executes its plans: start "
                "SGLang with --disable-cuda-graph (or --cuda-graph-backend-decode disabled)"
            )
        num_slots = len(self.token_to_kv_pool.get_key_buffer(self._layer_id))
        # A slot may be in several shared ranges, where packs read their parents' ranges themselves.
        self._microbatches.reserve(max_requests=max_bs, max_shared_slots=2 * num_slots)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    # --- once per layer ---

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
        """Store the new token's KV, then attend.

        Parameters
        ----------
        q : torch.Tensor
            `[rows, heads * head_dim]` or `[rows, heads, head_dim]`.
        k, v : torch.Tensor or None
            The new token's keys and values. None: they are in the pool already.
        layer : RadixAttention
        forward_batch : ForwardBatch
        save_kv_cache : bool
            Whether to write `k` and `v` to the pool.

        Returns
        -------
        torch.Tensor
            `[rows, heads * head_dim]`.

        Raises
        ------
        ValueError
            If the model passes an argument that would be ignored.
        """
        if kwargs:
            check_argument_names(layer, kwargs)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            # Without layer.k_scale and v_scale, which checkpoints made for an fp8 cache have:
            # SGLang's pools use them only if the cache's dtype is not the model's, which pat
            # refuses at start-up.
            pool.set_kv_buffer(layer, _write_location(forward_batch), k, v)
        # Asked for in every layer: a hierarchical cache waits here until the layer has been loaded.
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._attention.run(
            q, keys, values, sm_scale=layer.scaling, logit_cap=layer.logit_cap
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    # --- statistics ---

    def _counters(self) -> Counters:
        microbatches = list(self._microbatches)
        stats = [attention.stats for each in microbatches for attention in each.attentions()]
        stats.append(self._repeats.stats())
        readers = [each.reader for each in microbatches]
        more = {} if self._checks is None else {"ranks_alike": [self._checks.ranks_alike]}
        # One tree, whose events all readers see. None until a step has shown it.
        events = [each.events.counts for each in readers if each.events is not None][:1]
        return read_counters(
            stats,
            private_steps=[each.private_steps for each in readers],
            tree_events=events,
            batch_changes=[each.changes for each in readers],
            **more,
        )


def _write_location(forward_batch: Any) -> KVWriteLoc:
    """Where the new token goes."""
    if hasattr(KVWriteLoc, "for_batch"):  # marks the slots as physical, which the pool asks for
        return KVWriteLoc.for_batch(forward_batch)
    return KVWriteLoc(forward_batch.out_cache_loc)


def _num_microbatches(server_args: Any) -> int:
    """How many batches take turns: pipeline parallelism runs several at once."""
    return int(server_args.pp_size) + int(server_args.pp_async_batch_depth)


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
            f"pat by --decode-attention-backend {BACKEND}"
        )
    return default
