"""SGLang's attention kit without a GPU: pat over torch_native. tests/gpu has the other backends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import cpu_kernels, speculation
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    make_dense_cases,
    make_swa_no_prefix_input_config_cases,
    make_swa_prefix_input_config_cases,
    run_dense_attention_case,
)
from sglang_attention_kit import (
    VERIFIED,
    KitTestCase,
    draft_case,
    drafting_by_pat,
    extend_case,
    extending_by_pat,
    is_decoded_by_pat,
    pat_over,
    verify_by_pat,
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


@pytest.fixture
def without_kernels(server_context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kit's runners of drafts be imported: they name kernels of other layers."""
    for name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
        monkeypatch.setattr(torch.ops.sgl_kernel, name, None, raising=False)


@pytest.fixture
def drafting(without_kernels: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch_native draft, and the kit go without a GPU and without compiling."""
    for name in ("forward_decode", "forward_extend"):
        monkeypatch.setattr(TorchNativeAttnBackend, name, getattr(cpu_kernels, name))
    for name, make in speculation.DRAFT_BACKENDS.items():
        monkeypatch.setattr(DraftBackendFactory, name, make)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(("kind", "topk"), VERIFIED)
@pytest.mark.parametrize(
    ("page_size", "in_graph"),
    [(1, False), (16, True)],
    ids=["eager", "around a graph"],
)
def test_verification(
    kind: str,
    topk: int,
    page_size: int,
    in_graph: bool,
    without_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch_native has no graphs, and nothing to prepare for them: pat decodes all layers.
    monkeypatch.setattr(TorchNativeAttnBackend, "init_cuda_graph_state", lambda *_: None)
    fill = "get_cuda_graph_seq_len_fill_value"
    monkeypatch.setattr(TorchNativeAttnBackend, fill, lambda self: 1, raising=False)
    # The kit's masks are those of a GPU, over all that a request has.
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    case = verify_case(BACKEND, page_size)
    with torch.no_grad():
        verify_by_pat(case, kind, topk, dtype=torch.float32, device="cpu", in_graph=in_graph)


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_rounds_of_a_draft_model(
    topk: int, drafting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, where SGLang's runner has a graph; against torch_native."""
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as runner

    def without_graph(worker: Any, backend: Any, settings: Any) -> Any:
        return SimpleNamespace(
            can_run_graph=lambda batch: True,
            execute=lambda batch: runner._run_eagle_draft_eager(worker, batch, settings=settings),
        )

    monkeypatch.setattr(runner, "_capture_eagle_draft_graph_runner", without_graph)
    with torch.no_grad(), drafting_by_pat(head_dim=64, eager=False) as decoded:
        runner.run_dense_eagle_draft_cuda_graph_runner_case(
            KitTestCase(),
            draft_case(BACKEND),
            topk=topk,
            speculative_num_steps=4,
            speculative_num_draft_tokens=5,
            head_dim=64,
            dtype=torch.float32,
            device="cpu",
        )
    assert decoded.layers == 3


@pytest.mark.parametrize("topk", [1, 2])
def test_what_a_draft_model_reads_of_a_verify_step(
    topk: int, drafting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, where SGLang's runner has a graph; against torch_native."""
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner as runner,
    )

    def without_graph(worker: Any, backend: Any, settings: Any) -> Any:
        def execute(batch: Any, index: Any = ...) -> Any:  # none is given in 0.5.17
            found = runner._run_eagle_draft_extend_eager(worker, batch, settings)
            return SimpleNamespace(
                next_token_logits=found.next_token_logits[index],
                hidden_states=found.hidden_states[index],
            )

        return SimpleNamespace(can_run_graph=lambda batch: True, execute=execute)

    monkeypatch.setattr(runner, "_capture_eagle_draft_extend_graph_runner", without_graph)
    with (
        torch.no_grad(),
        extending_by_pat(head_dim=64, drafts=3, requests=4, eager=False) as decoded,
    ):
        runner.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case(
            KitTestCase(),
            extend_case(BACKEND),
            topk=topk,
            head_dim=64,
            dtype=torch.float32,
            device="cpu",
        )
    assert decoded.layers == 1
