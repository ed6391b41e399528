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
from sglang_attention_kit import KitTestCase, is_decoded_by_pat, pat_over, windowed_decode_case

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
