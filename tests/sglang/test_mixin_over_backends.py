"""pat over SGLang's own backends for GPUs, without a GPU.

The tests build SGLang's backend classes and run decode steps, captures and replays. If pat decodes
all layers, the default backends' kernels are never called.

SGLang's attention kit makes the model runner of one layer, and computes its expected output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit
from sglang_attention_kit import KitTestCase, pat_over

from sglang_pat.executors.reference import ReferenceExecutor

HEAD_DIM, GRAPH_ROWS = 64, 4
LENGTHS = (7, 12)  # without the new token
DECODE_METHODS = ("init_cuda_graph_state", "init_forward_metadata_in_graph", "forward_decode")
# name -> the module and the class of SGLang's backend
BACKENDS = {
    "fa3": ("flashattention_backend", "FlashAttentionBackend"),
    "fa4": ("flashattention_backend", "FlashAttentionBackend"),
    "triton": ("triton_backend", "TritonAttnBackend"),
    "flashinfer": ("flashinfer_backend", "FlashInferAttnBackend"),
}
_FLASHINFER_WRAPPERS = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)


class Kernels(ModuleType):
    """Stands in for a kernel library, which cannot be loaded without a GPU."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch, server_context: SimpleNamespace) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_attention_kit.py is for GPUs")
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", Kernels("sgl_kernel.flash_attn"))
    flashinfer = module_of("flashinfer")
    for name in _FLASHINFER_WRAPPERS:
        monkeypatch.setattr(flashinfer, name, lambda *args, **kwargs: None, raising=False)
    # 0.5.17 reads these from a distributed group and a device.
    monkeypatch.setattr(flashinfer, "get_cuda_graph_max_batch_size", lambda *_: 4, raising=False)
    monkeypatch.setattr(module_of("fa4"), "get_device_capability", lambda: (9, 0))
    # SGLang's factory requires Hopper.
    monkeypatch.setitem(ATTENTION_BACKENDS, "fa3", lambda runner: class_of("fa3")(runner))
    # Let the torch executor count as one that graphs can capture.
    monkeypatch.setattr(ReferenceExecutor, "name", "cuda")


def module_of(name: str) -> Any:
    return import_module(f"sglang.srt.layers.attention.{BACKENDS[name][0]}")


def class_of(name: str) -> type:
    kind: type = getattr(module_of(name), BACKENDS[name][1])
    return kind


class Life:
    """A layer, its backend with pat, and batches of it."""

    def __init__(self, name: str) -> None:
        self.case = kit.DenseAttentionCase(
            name="decode",
            backend=name,
            forward_mode=ForwardMode.DECODE,
            num_heads=4,
            num_kv_heads=2,
            page_size=1,
            prefix_lens=LENGTHS,
        )
        self.fixture = kit.build_dense_attention_fixture(
            KitTestCase(),
            self.case,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
            disable_cuda_graph=False,
            runner_batch_size=GRAPH_ROWS,
        )
        self.backend = self.fixture.backend
        self.layer = self.fixture.actual_module.attn

    def batch(self, prefix_lens: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
        """Return a decode batch with its own KV, and the inputs of the layer."""
        case = kit.make_dense_case_with_prefix_lens(self.case, "other", prefix_lens)
        inputs = kit.make_dense_random_inputs(case, self.fixture, dtype=torch.float32, device="cpu")
        width = self.fixture.runner.req_to_token_pool.req_to_token.shape[1]
        batch = kit._make_forward_batch(
            case, self.fixture.runner, max_context_len=width, device="cpu"
        )
        kit.prepare_dense_runner_inputs(self.fixture, case, batch, inputs, max_context_len=width)
        inputs["case"] = case
        return batch, inputs

    def check(self, batch: Any, inputs: dict[str, Any]) -> None:
        """Assert that the layer's output equals attention in torch."""
        with forward_context(ForwardContext(attn_backend=self.backend)):
            out = kit.run_dense_forward(self.fixture, batch, inputs)
        exact = kit.expected_dense_output_from_inputs(self.fixture, inputs["case"], inputs, None)
        torch.testing.assert_close(out, exact, atol=1e-5, rtol=1e-4)

    def capture(self) -> None:
        """Capture all graphs, from the largest, like SGLang's graph runner."""
        self.backend.init_cuda_graph_state(GRAPH_ROWS, GRAPH_ROWS)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        for rows in (GRAPH_ROWS, 1):
            batch, inputs = self.batch((fill - 1,) * rows)
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            self.backend.init_forward_metadata_in_graph(batch)
            self.check(batch, inputs)
            self.backend.on_after_cuda_graph_warmup()

    def replay(self) -> None:
        """Replay the graph of four rows with two requests."""
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        batch, inputs = self.batch(LENGTHS + (fill - 1,) * (GRAPH_ROWS - len(LENGTHS)))
        view = SimpleNamespace(**vars(batch))
        view.actual_forward_mode, view.num_padding = ForwardMode.DECODE, 0
        self.backend.init_forward_metadata_out_graph(view)
        self.check(batch, inputs)


@pytest.fixture(params=BACKENDS)
def life(request: pytest.FixtureRequest) -> Iterator[Life]:
    with torch.no_grad(), pat_over(request.param, head_dim=HEAD_DIM):
        yield Life(request.param)


@pytest.fixture
def asked(life: Life, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of SGLang's own class instead of executing them."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda self, *args, **kwargs: calls.append(name)

    kind = class_of(life.case.backend)
    for name in ("init_forward_metadata", "init_forward_metadata_out_graph", *DECODE_METHODS):
        monkeypatch.setattr(kind, name, noted(name), raising=False)
    return calls


def test_decode_steps_of_pat_ask_nothing_of_the_backend(life: Life, asked: list[str]) -> None:
    kind = class_of(life.case.backend)
    assert isinstance(life.backend, kind)
    assert type(life.backend) is not kind
    for _ in range(2):  # a weight update captures all graphs again
        batch, inputs = life.batch(LENGTHS)
        life.backend.init_forward_metadata(batch)
        life.check(batch, inputs)
        life.capture()
        life.replay()
        life.backend.forward_metadata = None  # as after an idle step of SGLang
        life.replay()
    assert asked == []


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
def test_other_steps_between_are_the_backends(
    life: Life, asked: list[str], mode: ForwardMode
) -> None:
    life.capture()
    batch, _ = life.batch(LENGTHS)
    batch.forward_mode = mode
    life.backend.init_forward_metadata(batch)
    life.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    life.backend.init_forward_metadata_in_graph(batch)
    assert asked == [
        "init_forward_metadata",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
    ]
    life.replay()
    assert len(asked) == 3


def test_an_idle_rank_replays_padding(life: Life, asked: list[str]) -> None:
    life.capture()
    batch, _ = life.batch((0,) * GRAPH_ROWS)
    view = SimpleNamespace(**vars(batch))
    view.actual_forward_mode, view.num_padding = ForwardMode.IDLE, GRAPH_ROWS
    life.backend.init_forward_metadata_out_graph(view)
    q = torch.randn(GRAPH_ROWS, 4 * HEAD_DIM)
    out = life.backend.forward_decode(q, None, None, life.layer, batch)
    assert torch.equal(out, torch.zeros_like(out))
    assert asked == []


@pytest.mark.parametrize("life", ["fa3"], indirect=True)
def test_a_model_that_stores_kv_itself_is_told_not_to(life: Life) -> None:
    batch, _ = life.batch(LENGTHS)
    life.backend.kv_cache_dtype = torch.bfloat16  # else it always falls back
    life.capture()
    assert life.backend.forward_metadata is None
    assert life.backend.get_fused_kv_write_buffers(life.layer, batch) is None


@pytest.mark.parametrize("life", ["fa3", "fa4"], indirect=True)
def test_a_layer_that_is_given_up_in_a_warm_up_finds_all_prepared(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fa3 makes its buffers only when the layer falls back."""
    module = module_of(life.case.backend)
    for name in dir(module):
        if name.endswith("decode_set_metadata"):
            monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    decoded: list[Any] = []
    monkeypatch.setattr(
        class_of(life.case.backend),
        "forward_decode",
        lambda self, *args, **kwargs: decoded.append(self.forward_metadata),
    )
    backend = life.backend
    backend.init_cuda_graph_state(GRAPH_ROWS, GRAPH_ROWS)
    assert backend.decode_cuda_graph_metadata == {}
    batch, _ = life.batch((0,) * GRAPH_ROWS)
    q = torch.randn(GRAPH_ROWS, 4 * HEAD_DIM)
    for _ in range(2):  # the capture that notices it, and the next one
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        backend.forward_decode(q, None, None, life.layer, batch, score_mod=max)
        assert decoded.pop() is backend.decode_cuda_graph_metadata[GRAPH_ROWS]
    assert inside.planner(backend).layer_support.shapes == {}
