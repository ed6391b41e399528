"""Gives the steps of a draft model the decode attention of pat.

SGLang has an attention backend for each step of a round, and a container that prepares them all
together. As in `backend.py`, each becomes an instance of a subclass of its own class. So does the
backend with which a draft model reads what was accepted (`draft_extend.py`), and its prompts, which
stay the default backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins.hook_registry import HookType

from sglang_pat.sglang.decoder import PatDecoder
from sglang_pat.sglang.draft_decoder import DraftDecoder
from sglang_pat.sglang.draft_extend import DraftExtend
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.hooks import Hook, install_hooks
from sglang_pat.sglang.mixins import can_become, with_mixin
from sglang_pat.sglang.options import Reason, attention_backends, resolved
from sglang_pat.sglang.pat_mixin import PatMixin
from sglang_pat.sglang.route_reports import report_draft_routes, report_extend_routes
from sglang_pat.sglang.routes import Routes
from sglang_pat.sglang.substitution import is_asked_for

_NAMED = "speculative_draft_attention_backend"


class _Served:
    """The decoder of the model that this process serves, if pat verifies drafts of another one."""

    decoder: PatDecoder | None = None


def await_draft_model(decoder: PatDecoder | None) -> None:
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


def with_pat_drafts(steps: Any, model_runner: Any, decoder: PatDecoder) -> None:
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
        drafting = DraftDecoder(model_runner, Environment.read(), routes, len(backends))
        for step, (backend, kind) in enumerate(kinds[:-1]):
            backend.__class__ = kind
            backend.take(drafting, step)
        steps.__class__ = kinds[-1][1]
        steps.take(drafting)
        decoder.report_drafting(drafting)
    report_draft_routes(routes)


def with_pat_extend(backend: Any, model_runner: Any, decoder: PatDecoder) -> None:
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
        extend = DraftExtend(model_runner, routes, decoder)
        backend.__class__ = kind
        backend.take(extend, strict=False)
        decoder.report_extend(extend)
    report_extend_routes(routes)


def _extend_reason(model_runner: Any, decoder: PatDecoder) -> Reason | None:
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

    _drafting: DraftDecoder

    def take(self, drafting: DraftDecoder) -> None:
        """Decode with it from now on."""
        self._drafting = drafting

    def _takes_default(self) -> bool:
        """Whether the default backend is prepared for the next round too."""
        self._drafting.has_default = self._drafting.needs_default
        return self._drafting.has_default

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a round without a graph."""
        if self._takes_default():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        self._drafting.plan_eager(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before the CUDA graph of a round is captured or replayed."""
        if self._takes_default():
            super().init_forward_metadata_out_graph(  # type: ignore[misc]
                forward_batch, in_capture=in_capture
            )
        self._drafting.plan_captured(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What the graph does before its layers."""
        if self._takes_default():
            super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        self._drafting.record_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Before the first capture."""
        super().init_cuda_graph_state(max_bs, max_num_tokens)  # type: ignore[misc]
        self._drafting.reserve(max_bs)


class PatDraftStep(AttentionBackend):  # type: ignore[misc]  # SGLang has no types
    """What the backend of one step does otherwise with pat."""

    _drafting: DraftDecoder
    _step: int

    def take(self, drafting: DraftDecoder, step: int) -> None:
        """Decode with it from now on. step: counted from 0."""
        self._drafting = drafting
        self._step = step

    def get_fused_kv_write_buffers(self, layer: RadixAttention, forward_batch: Any) -> Any:
        """Where a model may store a layer's KV itself; None: nowhere. Not asked for in 0.5.17."""
        if layer.layer_id in self._drafting.routes.shapes:
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
        """By pat or by the default backend. Of the arguments in `kwargs` pat knows `sinks`."""
        drafting, layer_id = self._drafting, layer.layer_id
        reason = drafting.routes.reason_to_leave(layer_id, kwargs)
        if reason is not None:
            self._leave(layer_id, reason)
        if layer_id not in drafting.routes.shapes:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        drafting.go_to(self._step, layer)
        sinks = kwargs.get("sinks")
        return drafting.attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def _leave(self, layer_id: int, reason: Reason) -> None:
        """Leave a layer to the default backend, which is prepared for the round in which each layer
        runs first."""
        if not self._drafting.has_default:
            raise RuntimeError(
                f"layer {layer_id} of the draft model came too late: {reason}; use "
                "--speculative-draft-attention-backend to leave the draft model to another backend"
            )
        self._drafting.routes.delegate(layer_id, reason)
        report_draft_routes(self._drafting.routes)
