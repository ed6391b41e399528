"""Gives the steps of a draft model the decode attention of pat.

SGLang has an attention backend for each step of a round, and a container that prepares them all
together. As in `backend.py`, each becomes an instance of a subclass of its own class. So does the
backend with which a draft model reads verified drafts, and its prompts: these fall back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins.hook_registry import HookType

from sglang_pat.sglang.decoder import Decoder, ServedDecoder
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import Hook, install_hooks
from sglang_pat.sglang.kinds import DraftRound
from sglang_pat.sglang.layer_attention import LayerAttention
from sglang_pat.sglang.microbatches import StepPlans
from sglang_pat.sglang.mixins import can_become, with_mixin
from sglang_pat.sglang.options import Reason, attention_backends, resolved
from sglang_pat.sglang.pat_mixin import PatMixin
from sglang_pat.sglang.route_reports import report_draft_routes, report_extend_routes
from sglang_pat.sglang.routes import Routes
from sglang_pat.sglang.substitution import is_asked_for

_NAMED = "speculative_draft_attention_backend"


class _Served:
    """The decoder of the model that this process serves, if pat verifies drafts of another one."""

    decoder: ServedDecoder | None = None


def await_draft_model(decoder: ServedDecoder | None) -> None:
    """Let the draft model that SGLang builds next decode by pat where it can.

    decoder: of the model that is served. None: pat does not decode it, and no draft model either.
    """
    _Served.decoder = decoder
    if decoder is not None:
        install_hooks(_HOOKS)


def _after_create_decode_backend(steps: Any, factory: Any) -> Any:
    """AFTER DraftBackendFactory.create_decode_backend."""
    runner, decoder = factory.draft_model_runner, _Served.decoder
    if steps is not None and decoder is not None and is_asked_for(runner.server_args):
        with_pat_drafts(steps, runner, decoder)
    return steps


def _after_create_extend_backend(backend: Any, factory: Any) -> Any:
    """AFTER DraftBackendFactory.create_draft_extend_backend."""
    runner, decoder = factory.draft_model_runner, _Served.decoder
    if backend is not None and decoder is not None and is_asked_for(runner.server_args):
        with_pat_extend(backend, runner, decoder)
    return backend


def _after_capture(result: Any, worker: Any) -> None:
    """AFTER EagleDraftWorker._capture_cuda_graphs, which captures what a draft model reads of a
    verify step over some default backends alone (in 0.5.17 not over FA3). Over pat it can be
    captured where no layer is the default backend's."""
    backend = getattr(worker, "draft_extend_attn_backend", None)
    if not isinstance(backend, PatMixin):
        return
    runner = worker.cuda_graph_runner_for_draft_extend
    if runner is None and worker.device == "cuda" and _captures_extends():
        runner = worker.cuda_graph_runner_for_draft_extend = _captured_extends(worker, backend)
    if runner is not None and worker.speculative_algorithm.is_standalone():
        runner.execute = partial(_without_hidden_states, runner.execute)


def _captured_extends(worker: Any, backend: PatMixin) -> Any:
    """SGLang's graphs of what the draft model reads; None if the default backend has a layer."""
    if backend.needs_default:
        return None
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    captured = EAGLEDraftExtendCudaGraphRunner(worker)
    return None if backend.needs_default else captured  # the warm-up may have shown one


def _without_hidden_states(execute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a captured step of a STANDALONE draft model, whose prompts return no hidden states.

    SGLang merges the hidden states of both and indexes the sum by request when it retracts one:
    those of captured steps alone are too few.
    """
    out = execute(*arguments, **keywords)
    out.hidden_states = None
    return out


def _captures_extends() -> bool:
    """Whether SGLang's options let it capture such steps, and its decode steps."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    is_off = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    return not is_off and not envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get()


_FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
_HOOKS = (
    Hook(_FACTORY, "create_decode_backend", _after_create_decode_backend, HookType.AFTER),
    Hook(_FACTORY, "create_draft_extend_backend", _after_create_extend_backend, HookType.AFTER),
    Hook(
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker",
        "_capture_cuda_graphs",
        _after_capture,
        HookType.AFTER,
    ),
)


def with_pat_drafts(steps: Any, model_runner: Any, decoder: ServedDecoder) -> None:
    """Let the steps of a draft model attend by pat where it can.

    Parameters
    ----------
    steps
        SGLang's container of the backends of all steps. Its class is changed, and theirs.
    model_runner
        SGLang's, of the draft model.
    decoder
        Of the model that is served, which reports what is counted here.
    """
    routes = _routes(model_runner)
    backends = list(getattr(steps, "attn_backends", ()))
    kinds = [(each, with_mixin(PatDraftStep, type(each))) for each in backends]
    kinds.append((steps, with_mixin(PatDraftSteps, type(steps))))
    closed = [type(each).__name__ for each, kind in kinds if not can_become(each, kind)]
    if routes.shapes and (closed or not backends):
        name = closed[0] if closed else type(steps).__name__
        routes.delegate_all(Reason("default backend", f"{name}, which is closed"))
    if routes.shapes:
        device = model_runner.req_to_token_pool.req_to_token.device
        drafting = DraftRound(len(backends), device)
        planner = Decoder(model_runner, Environment.read(), routes, (drafting,))
        layers = LayerAttention(model_runner, routes)
        for step, (backend, kind) in enumerate(kinds[:-1]):
            backend.__class__ = kind
            backend.take(steps, step)
        steps.__class__ = kinds[-1][1]
        steps.take(planner, drafting, layers)
        decoder.report(planner)
    report_draft_routes(routes)


def with_pat_extend(backend: Any, model_runner: Any, decoder: ServedDecoder) -> None:
    """Let a draft model attend by pat where it can, when it reads what was accepted.

    Parameters
    ----------
    backend
        SGLang's, of these steps and of prompts. Its class is changed.
    model_runner
        SGLang's, of the draft model.
    decoder
        Of the model that is served, whose plans are used.
    """
    routes = _routes(model_runner)
    kind = with_mixin(PatMixin, type(backend))
    reason = _extend_reason(model_runner, decoder)
    if reason is None and not can_become(backend, kind):
        reason = Reason("default backend", f"{type(backend).__name__}, which is closed")
    if routes.shapes and reason is not None:
        routes.delegate_all(reason)
    if routes.shapes:
        backend.__class__ = kind
        backend.take(
            decoder,
            LayerAttention(model_runner, routes),
            [decoder.new_extend(routes)],
            report=report_extend_routes,
            strict=False,
        )
    report_extend_routes(routes)


def _extend_reason(model_runner: Any, decoder: ServedDecoder) -> Reason | None:
    """Why the plans of the model that is served do not serve a draft model."""
    if decoder.verifies_trees:
        return Reason("speculative decoding", "drafts that branch")
    if resolved(model_runner.server_args, "enable_multi_layer_eagle"):
        return Reason("speculative decoding", "--enable-multi-layer-eagle")
    types = (model_runner.dtype, model_runner.kv_cache_dtype)
    if types != decoder.dtypes:
        return Reason("dtype of queries and KV cache", f"{types[0]} and {types[1]}")
    return None


def _routes(model_runner: Any) -> Routes:
    arguments = model_runner.server_args
    named = getattr(model_runner, "draft_attention_backend", None) or resolved(arguments, _NAMED)
    routes = Routes.of_runner(model_runner, named or attention_backends(arguments)[1])
    if named is not None:
        flag = _NAMED.replace("_", "-")
        routes.delegate_all(Reason("speculative decoding", f"--{flag} {named}"))
    return routes


class PatDraftSteps:
    """What the container of all steps does otherwise with pat. Before its class in the order of
    methods.

    Where pat attends in all layers, the default backend is not prepared for the steps.
    """

    _pat: Decoder
    _pat_round: DraftRound
    _pat_layers: LayerAttention
    _pat_plans: StepPlans | None  # of the last round
    _pat_seen: set[int]  # layers that have run
    _pat_has_default: bool  # whether the default backend has been prepared for this round

    def take(self, decoder: Decoder, kind: DraftRound, layers: LayerAttention) -> None:
        """Decode by pat from now on.

        Parameters
        ----------
        decoder
            Plans the rounds.
        kind
            The rounds.
        layers
            The draft model's.
        """
        self._pat = decoder
        self._pat_round = kind
        self._pat_layers = layers
        self._pat_plans = None
        self._pat_seen = set()
        self._pat_has_default = False

    def _takes_default(self) -> bool:
        """Return True if the default backend is prepared for the next round too: for its layers,
        and as long as a layer may turn out to be one of them."""
        routes = self._pat_layers.routes
        self._pat_has_default = bool(routes.delegated) or not self._pat_seen >= routes.shapes.keys()
        return self._pat_has_default

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a round without a graph."""
        if self._takes_default():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        if self._pat_layers.routes.shapes:
            self._pat_plans = self._pat.plan_eager(self._pat_round, forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a round whose CUDA graph is captured or replayed next."""
        if self._takes_default():
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture=in_capture
            )
        if self._pat_layers.routes.shapes:
            self._pat_plans = self._pat.plan_captured(self._pat_round, forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record what the graph does before its layers."""
        if self._takes_default():
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        self._pat_round.record_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs capture, before the first one."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        self._pat.reserve(max_bs)

    def attends(self, layer_id: int, arguments: dict[str, Any]) -> bool:
        """Return True if pat attends in a layer.

        A layer that it cannot decode goes to the default backend, which is prepared for the round
        in which each layer runs first.
        """
        routes = self._pat_layers.routes
        reason = routes.reason_to_leave(layer_id, arguments)
        if reason is not None:
            if not self._pat_has_default:
                raise RuntimeError(
                    f"layer {layer_id} of the draft model came too late: {reason}; use "
                    "--speculative-draft-attention-backend to leave the draft model to another "
                    "backend"
                )
            routes.delegate(layer_id, reason)
            report_draft_routes(routes)
        return layer_id in routes.shapes

    def attend(
        self, step: int, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, *rest: Any
    ) -> torch.Tensor:
        """Attend in a step of the round. See `LayerAttention.attend`."""
        self._pat_seen.add(layer.layer_id)
        if self._pat_plans is not None:
            self._pat_round.go_to(step, self._pat_plans)
        return self._pat_layers.attend(self._pat_plans, q, k, v, layer, *rest)


class PatDraftStep(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """What the backend of one step does otherwise with pat."""

    _pat_steps: PatDraftSteps
    _pat_step: int

    def take(self, steps: PatDraftSteps, step: int) -> None:
        """Decode by pat from now on. step: counted from 0."""
        self._pat_steps = steps
        self._pat_step = step

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Return where a model may store a layer's KV itself; None: nowhere. Not asked for in
        0.5.17."""
        if layer.layer_id in self._pat_steps._pat_layers.routes.shapes:
            return None
        return super().get_fused_kv_write_buffers(layer, forward_batch)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attend by pat or by the default backend. Of the arguments in `kwargs` pat knows
        `sinks`."""
        steps = self._pat_steps
        if not steps.attends(layer.layer_id, kwargs):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        sinks = kwargs.get("sinks")
        return steps.attend(self._pat_step, q, k, v, layer, forward_batch, save_kv_cache, sinks)
