"""SGLang's attention kit without a GPU: pat over torch_native. tests/gpu has the other backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    make_dense_cases,
    make_swa_no_prefix_input_config_cases,
    make_swa_prefix_input_config_cases,
    run_dense_attention_case,
)
from sglang_attention_kit import (
    KitTestCase,
    is_decoded_by_pat,
    pat_over,
    verify_case,
    windowed_decode_case,
)

BACKEND = "torch_native"
CASES = (
    *make_dense_cases(BACKEND),
    *make_swa_no_prefix_input_config_cases(BACKEND),
    *make_swa_prefix_input_config_cases(BACKEND),
    windowed_decode_case(BACKEND),
)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager(case: DenseAttentionCase, head_dim: int, server_context: SimpleNamespace) -> None:
    # The KV writes of the CPU take no weights with gradients, as the kit has them.
    with torch.no_grad(), pat_over(BACKEND, head_dim=head_dim) as decoded:
        run_dense_attention_case(
            KitTestCase(), case, head_dim=head_dim, dtype=torch.float32, device="cpu"
        )
    assert decoded.layers == is_decoded_by_pat(case)


@pytest.mark.parametrize(
    ("kind", "topk"), [("eagle", 1), ("dflash", 1), ("eagle", 2), ("ngram", 2)]
)
def test_verification(
    kind: str, topk: int, server_context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify a chain and trees. The kit's module imports kernels of other layers."""
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        monkeypatch.setattr(torch.ops.sgl_kernel, name, None, raising=False)
    # Its masks are those of a GPU, over all that a request has.
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_target_verify_runner as runner,
    )

    case = verify_case(BACKEND)
    drafts = (case.extend_lens[0], topk == 1)
    with torch.no_grad(), pat_over(BACKEND, head_dim=64, drafts=drafts) as decoded:
        runner.run_dense_spec_verify_case(
            KitTestCase(),
            case,
            topk=topk,
            spec_kind=kind,
            head_dim=64,
            dtype=torch.float32,
            device="cpu",
        )
    assert decoded.layers > 0
