"""Makes the default SGLang backend of the target model decode with pat.

After SGLang has built the backend, this module decides which layers pat decodes, makes the planner
of decode steps, and reports the decision. If pat decodes no layer, the backend stays as it is.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat.sglang.backend import BackendState, PatMixin, mix_in
from sglang_pat.sglang.compat import resolved
from sglang_pat.sglang.report.layer_report import report_layer_support
from sglang_pat.sglang.speculative.attach import attach_verification, await_draft_model
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.hooks import install_hooks
from sglang_pat.sglang.start.layer_rules import layers_of_runner
from sglang_pat.sglang.start.server_options import attention_backends, batch_invariant, drafts_of
from sglang_pat.sglang.step.planner import TargetPlanner
from sglang_pat.sglang.step.step_type import DecodeStep
from sglang_pat.sglang.tree.request_tracker import TRACKER_HOOKS
from sglang_pat.sglang.tree.self_test import check_version

logger = logging.getLogger(__name__)


def with_pat(default: AttentionBackend, name: str, model_runner: Any) -> AttentionBackend:
    """Make the backend `default` decode with pat in all layers that pat supports, and return it.

    name: the backend's name in SGLang. Raises ValueError with the reason if strict mode is on and
    pat does not decode all layers. Raises RuntimeError if a hook cannot be installed in SGLang.
    """
    environment = Environment.read()
    arguments = model_runner.server_args
    layer_support = layers_of_runner(model_runner, name)
    layer_support.prefill, _ = attention_backends(arguments)
    layer_support.batch_invariant = batch_invariant(arguments, environment)

    def new_state() -> BackendState:
        install_hooks(TRACKER_HOOKS)
        check_version()
        return BackendState(
            TargetPlanner(model_runner, environment, layer_support),
            model_runner,
            layer_support,
            [DecodeStep()],
            report=report_layer_support,
            is_strict=environment.strict,
        )

    if layer_support.shapes and drafts_of(arguments) is not None:
        attach_verification(default, model_runner, environment, layer_support)
    else:
        parts = [(default, PatMixin, new_state)]
        mix_in(parts, layer_support, is_strict=environment.strict)
        if layer_support.shapes:
            default.needs_cpu_seq_lens = True  # makes SGLang pass lengths on the host
        await_draft_model(None, model_runner)  # drops the state of an earlier model
    report_layer_support(layer_support, model_runner)
    if layer_support.shapes and resolved(arguments, "rl_on_policy_target") is not None:
        logger.warning(
            "--rl-on-policy-target: with pat, decode gives the same bits in any batch, but not the "
            "bits of the trainer's forward pass; for those, leave out --attention-backend pat"
        )
    return default
