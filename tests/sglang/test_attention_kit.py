"""SGLang's attention kit without a GPU: pat over torch_native. tests/gpu has the other backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    run_dense_attention_case,
)
from sglang_attention_kit import (
    VERIFIED,
    KitTestCase,
    cases_of,
    is_decoded_by_pat,
    pat_over,
    verify_by_pat,
    verify_case,
)

BACKEND = "torch_native"


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("case", cases_of(BACKEND), ids=lambda case: case.name)
def test_eager(case: DenseAttentionCase, head_dim: int, server_context: SimpleNamespace) -> None:
    # KV writes on the CPU do not accept the kit's weights with gradients.
    with torch.no_grad(), pat_over(BACKEND, head_dim=head_dim) as decoded:
        run_dense_attention_case(
            KitTestCase(), case, head_dim=head_dim, dtype=torch.float32, device="cpu"
        )
    assert decoded.layers == is_decoded_by_pat(case)


@pytest.fixture
def without_kernels(server_context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kit's draft runners be imported, which import kernels of other layers."""
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        monkeypatch.setattr(torch.ops.sgl_kernel, name, None, raising=False)


@pytest.mark.parametrize(("kind", "topk"), VERIFIED)
@pytest.mark.parametrize(
    ("page_size", "in_graph"), [(1, False), (16, True)], ids=["eager", "around a graph"]
)
def test_verification(
    kind: str,
    topk: int,
    page_size: int,
    in_graph: bool,
    without_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch_native has no graphs and prepares nothing, since pat decodes all layers.
    monkeypatch.setattr(TorchNativeAttnBackend, "init_cuda_graph_state", lambda *_: None)
    fill = "get_cuda_graph_seq_len_fill_value"
    monkeypatch.setattr(TorchNativeAttnBackend, fill, lambda self: 1, raising=False)
    # Let SGLang make the masks of a GPU, over all tokens of a request.
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    case = verify_case(BACKEND, page_size)
    with torch.no_grad():
        verify_by_pat(case, kind, topk, dtype=torch.float32, device="cpu", in_graph=in_graph)
