"""Gives the decode attention of pat to a model that verifies drafts, and to its draft model.

A draft model has an attention backend for each step of a draft round, a container that prepares
these backends together, and a backend for draft extend and prompts. SGLang builds all of them after
the backend of the target model. Hooks attach pat when SGLang has built them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_pat.sglang.backend import BackendState, PatMixin, mix_in
from sglang_pat.sglang.compat import draft_backend, resolved
from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.report.layer_report import report_draft_support, report_layer_support
from sglang_pat.sglang.speculative.backends import (
    DraftStepsState,
    DraftStepState,
    PatDraftStep,
    PatDraftSteps,
    PatSpeculativeMixin,
)
from sglang_pat.sglang.speculative.draft_requests import (
    BLOCK_WORKERS,
    block_hook,
    step_of_extend,
    watch_draft_batches,
)
from sglang_pat.sglang.speculative.planners import SpeculativePlanner, VerifyPlanner
from sglang_pat.sglang.speculative.rows import RowShape
from sglang_pat.sglang.speculative.steps import (
    BlockDraftStep,
    DraftChainSteps,
    DraftTreeSteps,
    TargetVerifyStep,
)
from sglang_pat.sglang.speculative.tree_attention import choose_masks
from sglang_pat.sglang.start.argument_rewrite import is_asked_for, named_draft_backend
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.hooks import AFTER, Hook, install_hooks
from sglang_pat.sglang.start.layer_rules import layers_of_runner
from sglang_pat.sglang.start.layer_support import LayerSupport
from sglang_pat.sglang.start.server_options import (
    BLOCKS,
    TREES,
    attention_backends,
    branches_of,
    drafts_now,
    drafts_of,
)
from sglang_pat.sglang.step.step_type import DecodeStep
from sglang_pat.sglang.tree.request_tracker import TRACKER_HOOKS, note_requests
from sglang_pat.sglang.tree.self_test import check_version
from sglang_pat.support import Unsupported


class _TargetModel:
    """The target model of this process and its planner, if pat decodes its verify steps."""

    planner: VerifyPlanner | None = None
    model_runner: Any = None

    @classmethod
    def planner_of(cls, model_runner: Any) -> VerifyPlanner | None:
        """Return the model's planner if one was made for an earlier backend (adaptive drafts)."""
        if cls.model_runner is not model_runner:
            return None
        return cls.planner if resolved(model_runner.server_args, "speculative_adaptive") else None


def attach_verification(
    default: Any, model_runner: Any, environment: Environment, layer_support: LayerSupport
) -> None:
    """Make a target model verify drafts with pat, if pat can.

    Changes the class of `default`, the model's backend. SGLang builds the draft model later, so
    this function also prepares to attach pat to it.
    """
    arguments = model_runner.server_args
    planner: VerifyPlanner | None = None

    def new_state() -> BackendState:
        nonlocal planner
        planner = _TargetModel.planner_of(model_runner) or _new_planner(
            model_runner, environment, layer_support
        )
        return BackendState(
            planner,
            model_runner,
            layer_support,
            [DecodeStep(), planner.verifies[drafts_now(arguments)]],
            report=report_layer_support,
            is_strict=environment.strict,
        )

    parts = [(default, PatSpeculativeMixin, new_state)]
    mix_in(parts, layer_support, is_strict=environment.strict)
    if planner is not None and resolved(arguments, "speculative_algorithm") in TREES:
        # SGLang's watermark expects full masks from the n-gram worker.
        others_read = layer_support.fallback or resolved(arguments, "enable_watermark")
        choose_masks(square=model_runner.device == "cuda" and not others_read)
    await_draft_model(planner, model_runner)


def _new_planner(
    model_runner: Any, environment: Environment, layer_support: LayerSupport
) -> VerifyPlanner:
    install_hooks(TRACKER_HOOKS)
    watch_draft_batches()
    check_version()
    return VerifyPlanner(model_runner, environment, layer_support, verify_steps(model_runner))


def verify_steps(model_runner: Any) -> dict[int, TargetVerifyStep]:
    """Return the verify steps of a model: number of draft tokens per request -> type of step."""
    drafts = drafts_of(model_runner.server_args)
    if drafts is None:
        return {}
    device = model_runner.req_to_token_pool.req_to_token.device
    return {
        count: TargetVerifyStep(
            RowShape.of_drafts(count, are_chains=drafts.are_chains),
            device,
            lengths_are_bounds=drafts.lengths_are_bounds,
        )
        for count in drafts.counts
    }


def await_draft_model(planner: VerifyPlanner | None, model_runner: Any) -> None:
    """Make the draft model that SGLang builds next decode with pat, if pat can.

    planner, model_runner: of the target model. Without a planner, pat decodes no draft model.
    """
    _TargetModel.planner, _TargetModel.model_runner = planner, model_runner
    algorithm = resolved(model_runner.server_args, "speculative_algorithm")
    if planner is None:
        if algorithm in TREES:  # an earlier model may have chosen square masks
            choose_masks(square=False)
        return
    if algorithm in BLOCKS:
        worker = BLOCK_WORKERS[algorithm]
        after = Hook(f"{worker}.init_attention_backends", _after_block_backend, AFTER)
        install_hooks((after, block_hook(worker)))
    else:
        install_hooks(_HOOKS)
    if resolved(model_runner.server_args, "enable_multi_layer_eagle"):
        install_hooks((_LAYERS_HOOK,))


def _attach_to_draft(built: Any, draft_runner: Any, attach_part: Callable[..., None]) -> Any:
    """Attach pat to what SGLang built for a draft model, if pat decodes the verify steps.

    Returns `built`.
    """
    planner = _TargetModel.planner
    if None not in (built, draft_runner, planner) and is_asked_for(draft_runner.server_args):
        attach_part(built, draft_runner, planner)
    return built


def _after_create_decode_backend(steps: Any, factory: Any) -> Any:
    """Hook AFTER DraftBackendFactory.create_decode_backend."""
    return _attach_to_draft(steps, factory.draft_model_runner, attach_draft_steps)


def _after_create_extend_backend(backend: Any, factory: Any) -> Any:
    """Hook AFTER DraftBackendFactory.create_draft_extend_backend."""
    return _attach_to_draft(backend, factory.draft_model_runner, attach_draft_extend)


def _after_block_backend(result: Any, worker: Any) -> None:
    """Hook AFTER init_attention_backends of a worker whose draft model drafts blocks."""
    _attach_to_draft(worker, getattr(worker, "draft_model_runner", None), attach_block_drafts)


def _after_graphs(result: Any, worker: Any) -> None:
    """Hook AFTER EagleDraftWorker._capture_cuda_graphs, which captures draft extend.

    SGLang itself captures draft extend only with some default backends, in 0.5.17 not with FA3. If
    no layer falls back, this hook captures draft extend with the other default backends too.
    """
    backend = getattr(worker, "draft_extend_attn_backend", None)
    if not isinstance(backend, PatMixin):
        return
    runner = worker.cuda_graph_runner_for_draft_extend
    if runner is None and worker.device == "cuda" and _captures_extends():
        runner = worker.cuda_graph_runner_for_draft_extend = _captured_extends(worker, backend)
    if runner is not None and worker.speculative_algorithm.is_standalone():
        runner.execute = partial(_without_hidden_states, runner.execute)


def _captured_extends(worker: Any, backend: PatMixin) -> Any:
    """Capture draft extend in SGLang's graphs. Return None if a layer falls back."""
    if backend.needs_default:
        return None
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import (
        EAGLEDraftExtendCudaGraphRunner,
    )

    captured = EAGLEDraftExtendCudaGraphRunner(worker)
    return None if backend.needs_default else captured  # None: a layer fell back meanwhile


def _without_hidden_states(execute: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Run a captured step of a STANDALONE draft model. Its result has no hidden states.

    When SGLang retracts a request, it concatenates hidden states and indexes them by request.
    Steps of prompts return no hidden states, so the states would be fewer than the requests.
    """
    out = execute(*arguments, **keywords)
    out.hidden_states = None
    return out


def _captures_extends() -> bool:
    """Return True if SGLang's options allow it to capture draft extend and decode steps."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    is_off = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    return not is_off and not envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get()


def _after_prepare(result: Any, graphs: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    """Hook AFTER prepare() of the graphs of several draft layers.

    The graphs have their own spec_info, so this hook notes the requests on it.
    """
    step = step_of_extend(forward_batch)
    if step is not None:
        note_requests(graphs._replay_spec_info, step)


_FACTORY = "speculative.draft_utils:DraftBackendFactory"
_HOOKS = (
    Hook(f"{_FACTORY}.create_decode_backend", _after_create_decode_backend, AFTER),
    Hook(f"{_FACTORY}.create_draft_extend_backend", _after_create_extend_backend, AFTER),
    Hook("speculative.eagle_worker_v2:EagleDraftWorker._capture_cuda_graphs", _after_graphs, AFTER),
)
_LAYERS_HOOK = Hook(
    "speculative.multi_layer_eagle_draft_extend_cuda_graph_runner:"
    "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare",
    _after_prepare,
    AFTER,
)


def attach_draft_steps(steps: Any, model_runner: Any, target: VerifyPlanner) -> None:
    """Make the decode steps of a draft model attend with pat, if pat can.

    Changes the class of `steps` (SGLang's container) and the classes of its backends. `target`, the
    planner of the target model, also reports the counters of these steps.
    """
    layer_support = _draft_layer_support(model_runner)
    backends = list(getattr(steps, "attn_backends", ()))

    def new_state() -> DraftStepsState:
        device = model_runner.req_to_token_pool.req_to_token.device
        topk = branches_of(model_runner.server_args)
        drafting = (
            DraftChainSteps(len(backends), device)
            if topk == 1
            else DraftTreeSteps(len(backends), topk, device)
        )
        planner = SpeculativePlanner(model_runner, Environment.read(), layer_support, (drafting,))
        target.report(planner)
        layers = LayerAttention(model_runner, layer_support)
        return DraftStepsState(planner, drafting, layers, layer_support)

    of_steps: list[Any] = [
        (backend, PatDraftStep, partial(DraftStepState, steps, step))
        for step, backend in enumerate(backends)
    ]
    closed = Unsupported("default backend", f"{type(steps).__name__}, which is closed")
    reason = None if backends else closed
    window = getattr(steps, "draft_window_size", 0)  # not in 0.5.17
    if window and layer_support.default != "trtllm_mha":  # which inherits it from FlashInfer
        reason = _window_reason(window)
    mix_in([*of_steps, (steps, PatDraftSteps, new_state)], layer_support, reason=reason)
    report_draft_support(layer_support)


def _window_reason(size: int) -> Unsupported:
    return Unsupported("speculative decoding", f"--speculative-draft-window-size {size}")


def attach_block_drafts(worker: Any, model_runner: Any, target: VerifyPlanner) -> None:
    """Let pat do the attention of a draft model, one that drafts whole blocks, if pat can.

    Changes the class of the draft model's backend. `target`, the planner of the target model, also
    reports the counters of the draft model's steps.
    """
    backend, arguments = model_runner.attn_backend, model_runner.server_args
    types = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    name = draft_backend(model_runner) or attention_backends(arguments)[1]
    layer_support = layers_of_runner(model_runner, name, types)

    def new_state() -> BackendState:
        device = model_runner.req_to_token_pool.req_to_token.device
        drafting = BlockDraftStep(worker._draft_block_spec_info.draft_token_num, device)
        planner = SpeculativePlanner(model_runner, Environment.read(), layer_support, (drafting,))
        target.report(planner)
        return BackendState(
            planner, model_runner, layer_support, [drafting], report=report_draft_support
        )

    parts = [(backend, PatSpeculativeMixin, new_state)]
    mix_in(parts, layer_support, reason=_block_reason(worker, arguments))
    report_draft_support(layer_support)


def _block_reason(worker: Any, arguments: Any) -> Unsupported | None:
    """Return why a draft model that drafts blocks falls back, or None."""
    named = named_draft_backend(arguments)
    if named is not None:
        return _names(named)
    if getattr(worker, "use_compact_draft_cache", False):  # this cache has its own table of slots
        return _window_reason(resolved(arguments, "speculative_draft_window_size"))
    return None


def attach_draft_extend(backend: Any, model_runner: Any, target: VerifyPlanner) -> None:
    """Make a draft model attend with pat in draft extend, if pat can.

    Its layers use the plans of the target model. Changes the class of `backend`, which is also the
    draft model's backend for prompts.
    """
    layer_support = _draft_layer_support(model_runner)
    report = partial(report_draft_support, key="draft_extend")

    def new_state() -> BackendState:
        extend = target.new_extend(layer_support, drafts_now(model_runner.server_args))
        return BackendState(target, model_runner, layer_support, [extend], report=report)

    parts = [(backend, PatSpeculativeMixin, new_state)]
    mix_in(parts, layer_support, reason=_extend_reason(model_runner, target))
    report(layer_support)


def _extend_reason(model_runner: Any, target: VerifyPlanner) -> Unsupported | None:
    """Return why a draft model cannot use the plans of the target model, or None."""
    has_layers = resolved(model_runner.server_args, "enable_multi_layer_eagle")
    if has_layers and isinstance(model_runner.req_to_token_pool, HybridReqToTokenPool):
        # With such a pool, draft models may read more tokens than were verified.
        return Unsupported("speculative decoding", "--enable-multi-layer-eagle with states")
    types = (model_runner.dtype, model_runner.kv_cache_dtype)
    if types != target.dtypes:
        return Unsupported("dtype of queries and KV cache", f"{types[0]} and {types[1]}")
    return None


def _draft_layer_support(model_runner: Any) -> LayerSupport:
    arguments = model_runner.server_args
    named = draft_backend(model_runner)
    layer_support = layers_of_runner(model_runner, named or attention_backends(arguments)[1])
    if named is not None:
        layer_support.fall_back_all(_names(named))
    return layer_support


def _names(backend: str) -> Unsupported:
    flag = "--speculative-draft-attention-backend"
    return Unsupported("speculative decoding", f"{flag} {backend}")
