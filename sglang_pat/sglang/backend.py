"""Gives SGLang's default backend the decode attention of pat.

The backend that SGLang has built becomes an instance of a subclass of its own class. Prefill,
layers that pat does not decode and everything else that SGLang asks of a backend stay what they
were; where pat decodes nothing, so does the backend.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat.sglang.decoder import ServedDecoder
from sglang_pat.sglang.draft_backend import await_draft_model
from sglang_pat.sglang.draft_trees import choose_masks
from sglang_pat.sglang.env import Environment
from sglang_pat.sglang.layer_attention import LayerAttention
from sglang_pat.sglang.mixins import can_become, with_mixin
from sglang_pat.sglang.options import Reason, attention_backends, batch_invariant, resolved
from sglang_pat.sglang.pat_mixin import PatMixin
from sglang_pat.sglang.route_reports import report_routes
from sglang_pat.sglang.routes import Routes

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
    routes = Routes.of_runner(model_runner, name)
    arguments = model_runner.server_args
    routes.prefill, _ = attention_backends(arguments)
    routes.batch_invariant = batch_invariant(arguments, environment)
    pat_class = with_mixin(PatMixin, type(default))
    if routes.shapes and not can_become(default, pat_class):
        routes.delegate_all(Reason("default backend", f"{type(default).__name__}, which is closed"))
    if environment.strict:
        routes.check_strict()
    decoder = None
    if routes.shapes:
        decoder = ServedDecoder(model_runner, environment, routes)
        layers = LayerAttention(model_runner, routes)
        default.__class__ = pat_class
        default.take(
            decoder, layers, decoder.kinds, report=report_routes, strict=environment.strict
        )
        if decoder.needs_lengths:  # of the object: some classes set it
            default.needs_cpu_seq_lens = True
    if decoder is not None and decoder.verifies_trees:
        choose_masks(square=model_runner.device == "cuda" and not routes.delegated)
    await_draft_model(decoder if decoder is not None and decoder.verify is not None else None)
    report_routes(routes, model_runner)
    if routes.shapes and resolved(arguments, "rl_on_policy_target") is not None:
        logger.warning(
            "--rl-on-policy-target: decode by pat gives the same bits in any batch, but not the "
            "bits of the trainer's forward pass; for those, leave out --attention-backend pat"
        )
    return default
