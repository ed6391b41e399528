"""Gives SGLang's default backends the decode attention of pat.

A backend that SGLang has built becomes an instance of a subclass of its own class (`backend.py`).
Prefill, layers that pat does not decode and everything else that SGLang asks of a backend stay what
they were. A backend stays as it is if pat decodes nothing.

A draft model has an attention backend for each step of a round, a container that prepares them all
together, and one with which it reads verified drafts, and its prompts: these fall back.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat.sglang.backend import PatMixin, can_become, with_mixin
from sglang_pat.sglang.compat import resolved
from sglang_pat.sglang.layer.attention import LayerAttention
from sglang_pat.sglang.report.layer_report import report_routes
from sglang_pat.sglang.speculative.attach import _Served, await_draft_model
from sglang_pat.sglang.speculative.tree_attention import choose_masks
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.layer_rules import layers_of_runner
from sglang_pat.sglang.start.server_options import (
    TREES,
    attention_backends,
    batch_invariant,
    drafts_now,
)
from sglang_pat.sglang.step.planner import ServedDecoder
from sglang_pat.sglang.step.step_type import StepKind
from sglang_pat.support import Unsupported

logger = logging.getLogger(__name__)


def with_pat(default: AttentionBackend, name: str, model_runner: Any) -> AttentionBackend:
    """The backend `default`, which from now on decodes by pat where it can.

    Parameters
    ----------
    default
        SGLang's backend. Its class is changed.
    name
        Its name in SGLang.
    model_runner
        SGLang's, with the model and the KV pool.

    Returns
    -------
    AttentionBackend
        `default` itself.

    Raises
    ------
    ValueError
        In strict mode, if pat does not decode all layers. Names the reason.
    RuntimeError
        If SGLang cannot be hooked.
    """
    environment = Environment.read()
    routes = layers_of_runner(model_runner, name)
    arguments = model_runner.server_args
    routes.prefill, _ = attention_backends(arguments)
    routes.batch_invariant = batch_invariant(arguments, environment)
    pat_class = with_mixin(PatMixin, type(default))
    if routes.shapes and not can_become(default, pat_class):
        routes.delegate_all(
            Unsupported("default backend", f"{type(default).__name__}, which is closed")
        )
    if environment.strict:
        routes.check_strict()
    decoder = None
    if routes.shapes:
        decoder = _Served.of(model_runner) or ServedDecoder(model_runner, environment, routes)
        layers = LayerAttention(model_runner, routes)
        kinds: list[StepKind] = [decoder.decode]
        if decoder.verifies:
            kinds.append(decoder.verifies[drafts_now(arguments)])
        default.__class__ = pat_class
        default.take(decoder, layers, kinds, report=report_routes, strict=environment.strict)
        if not decoder.verifies:
            # On the object: some classes set it. Not in speculative decoding: a step would wait for
            # the verify step before; plans do with the lengths that the host knows anyway.
            default.needs_cpu_seq_lens = True
    if decoder is not None and resolved(arguments, "speculative_algorithm") in TREES:
        # SGLang's watermark reads the n-gram worker's masks as full ones.
        others_read = routes.delegated or resolved(arguments, "enable_watermark")
        choose_masks(square=model_runner.device == "cuda" and not others_read)
    await_draft_model(decoder if decoder is not None and decoder.verifies else None, model_runner)
    report_routes(routes, model_runner)
    if routes.shapes and resolved(arguments, "rl_on_policy_target") is not None:
        logger.warning(
            "--rl-on-policy-target: decode by pat gives the same bits in any batch, but not the "
            "bits of the trainer's forward pass; for those, leave out --attention-backend pat"
        )
    return default
