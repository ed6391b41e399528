"""SGLang's attention kit on a GPU: pat over each of SGLang's backends for this device.

    python -m pytest -m cuda tests/gpu/test_attention_kit.py

The kit runs eager steps, captures and padded replays of CUDA graphs (and checks the metadata
afterwards), chunked prefill, verify steps, and the rounds and extend steps of a draft model.

FlashInfer compiles with nvcc the kernels that its packages lack. Without nvcc the cases that need
such a kernel are skipped, and name it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
import torch
from sglang.test.kits.attention_unittest.attention_methods.dense_attention import (
    DenseAttentionCase,
    run_dense_attention_case,
)
from sglang_attention_kit import (
    VERIFIED,
    KitTestCase,
    cases_of,
    comparing_scores,
    draft_case,
    drafting_by_pat,
    extend_case,
    extending_by_pat,
    is_decoded_by_pat,
    pat_over,
    verify_by_pat,
    verify_case,
)

pytestmark = pytest.mark.usefixtures("server_context")

# fa3 needs Hopper; the others run on any GPU.
HEAD_DIMS = (64, 128, 256)
BACKENDS = ["triton", "flashinfer", "fa3"]
DTYPE = torch.bfloat16  # as in servers; the kit's default is float16
REPLAYED = 4  # requests in the graph; the cases have fewer

ALL = [case for backend in BACKENDS for case in cases_of(backend)]
DECODE = [case for case in ALL if case.forward_mode.is_decode()]
EXTEND = [case for case in ALL if not case.forward_mode.is_decode()]


def name_of(case: DenseAttentionCase) -> str:
    return f"{case.backend}-{case.name}"


@pytest.fixture(autouse=True)
def _only_on_its_device(request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.params["case"]
    if case.backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 needs Hopper")


@pytest.fixture(autouse=True)
def _without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("nvcc") is None:
        monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")


@contextlib.contextmanager
def kernels_of_default() -> Iterator[None]:
    """Skip a case that needs a kernel which cannot be compiled here."""
    from flashinfer.jit import MissingJITCacheError  # cannot be imported without a GPU

    try:
        yield
    except MissingJITCacheError as missing:
        name = missing.spec.name if missing.spec else "a kernel"
        pytest.skip(f"FlashInfer's package lacks {name}, and there is no nvcc")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_eager(case: DenseAttentionCase, head_dim: int) -> None:
    with kernels_of_default(), pat_over(case.backend, head_dim=head_dim) as decoded:
        run_dense_attention_case(KitTestCase(), case, head_dim=head_dim, dtype=DTYPE)
    assert decoded.layers == is_decoded_by_pat(case)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", DECODE, ids=name_of)
def test_around_a_cuda_graph(case: DenseAttentionCase, head_dim: int) -> None:
    from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
        run_dense_cuda_graph_decode_case,
    )

    if case.backend == "flashinfer" and not is_decoded_by_pat(case):
        pytest.skip("SGLang's FlashInfer, without pat too: in 0.5.17 a padded row is not attention")
    with kernels_of_default(), pat_over(case.backend, head_dim=head_dim) as decoded:
        run_dense_cuda_graph_decode_case(
            KitTestCase(),
            case,
            head_dim=head_dim,
            dtype=DTYPE,
            cuda_graph_capture_batch_size=REPLAYED,
        )
    # One call each in an eager step, the capture and the replay.
    assert decoded.layers == 3 * is_decoded_by_pat(case)


@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("case", EXTEND, ids=name_of)
def test_prefill_in_pieces(case: DenseAttentionCase, breakable: bool) -> None:
    from sglang.test.kits.attention_unittest.runner_modes.split_op_runner import (
        run_dense_split_op_extend_case,
    )

    with kernels_of_default(), pat_over(case.backend, head_dim=64) as decoded:
        run_dense_split_op_extend_case(
            KitTestCase(), case, breakable=breakable, head_dim=64, dtype=DTYPE
        )
    assert decoded.layers == 0


@pytest.mark.parametrize(("kind", "topk"), VERIFIED)
@pytest.mark.parametrize(("page_size", "in_graph"), [(1, False), (16, False), (16, True)])
@pytest.mark.parametrize("case", [verify_case(name) for name in BACKENDS], ids=name_of)
def test_verification_of_drafts(
    case: DenseAttentionCase, page_size: int, in_graph: bool, kind: str, topk: int
) -> None:
    with kernels_of_default():
        case = verify_case(case.backend, page_size)
        verify_by_pat(case, kind, topk, dtype=DTYPE, in_graph=in_graph)


@pytest.mark.parametrize("eager", [False, True], ids=["against the default", "against itself"])
@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (1, 16), (2, 1), (4, 1)])
@pytest.mark.parametrize("case", [draft_case(name) for name in BACKENDS], ids=name_of)
def test_rounds_of_a_draft_model(
    case: DenseAttentionCase, topk: int, page_size: int, eager: bool
) -> None:
    """SGLang's runner captures all steps of a round in one graph, and replays it padded."""
    if case.backend == "fa3" and page_size > 1 and not eager:
        pytest.skip("the kit puts drafts outside of their prefixes' pages; fa3 reads pages")
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as runner

    # The eager and the replayed round of pat must have the same tokens.
    compared = contextlib.nullcontext() if eager else comparing_scores()
    with kernels_of_default(), compared, drafting_by_pat(head_dim=64, eager=eager) as decoded:
        runner.run_dense_eagle_draft_cuda_graph_runner_case(
            KitTestCase(),
            draft_case(case.backend, page_size),
            topk=topk,
            speculative_num_steps=4,
            speculative_num_draft_tokens=5,
            cuda_graph_capture_batch_size=REPLAYED,
            head_dim=64,
            dtype=torch.float16,  # draft tokens tie more often in bfloat16
        )
    # A round has three steps; a captured one also calls the layers in its warm-ups.
    assert decoded.layers >= 3 * (2 if eager else 1)


@pytest.mark.parametrize("eager", [False, True], ids=["against the default", "against itself"])
@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (1, 16), (2, 1), (2, 16)])
@pytest.mark.parametrize("case", [extend_case(name) for name in BACKENDS], ids=name_of)
def test_what_a_draft_model_reads_of_a_verify_step(
    case: DenseAttentionCase, topk: int, page_size: int, eager: bool
) -> None:
    """SGLang's runner captures the step, and replays it padded."""
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner as runner,
    )

    with (
        kernels_of_default(),
        extending_by_pat(head_dim=64, drafts=3, requests=REPLAYED, eager=eager) as decoded,
    ):
        runner.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case(
            KitTestCase(),
            extend_case(case.backend, page_size),
            topk=topk,
            cuda_graph_capture_batch_size=REPLAYED,
            head_dim=64,
            dtype=DTYPE,
        )
    assert decoded.layers >= (2 if eager else 1)
