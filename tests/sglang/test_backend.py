"""The default backend with pat, without an engine: who decodes a layer, and its results."""

from __future__ import annotations

from typing import Any

import inspect_backend as inside
import pytest
import torch
from fakes.backends import (
    HEAD_DIM,
    KV_HEADS,
    QO_HEADS,
    SLOTS,
    DefaultBackend,
    decode_batch,
    dense,
    layers,
    pat_backend,
    queries_of_runs,
    replay_view,
    runner,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_pat.executors.reference import dense_attention
from sglang_pat.plan import DecodePlan, PlanOverflowError
from sglang_pat.reasons import StepReason
from sglang_pat.sglang.attach import with_pat
from sglang_pat.sglang.backend import PatMixin

pytestmark = pytest.mark.usefixtures("server_context")

# --- the subclass ---


def test_the_default_backend_is_extended() -> None:
    default = DefaultBackend()
    backend = with_pat(default, "triton", runner())
    assert backend is default
    assert isinstance(backend, DefaultBackend)
    assert type(backend).__name__ == "PatDefaultBackend"
    assert type(DefaultBackend()) is DefaultBackend
    assert backend.needs_cpu_seq_lens


class Closed(DefaultBackend):
    """A class with slots, whose objects cannot change to a subclass."""

    __slots__ = ()

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return Closed

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise TypeError("__class__ assignment: object layout differs")


def test_a_class_that_cannot_be_extended_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        backend = with_pat(Closed(), "triton", runner())
    assert not isinstance(backend, PatMixin)
    assert caplog.messages == [
        "pat decodes nothing, triton decodes all 2 layers: Closed, which is closed"
    ]


# --- two kinds of layers ---


@pytest.fixture
def mixed_runner() -> Any:
    """Return a runner whose layer 0 pat decodes; layer 1 has a window and falls back."""
    return runner(model=layers(sliding_window_size=16))


def begun(model_runner: Any) -> tuple[Any, Any]:
    """Return a backend, and the eager step of one request of two tokens that it has prepared."""
    backend, batch = pat_backend(model_runner), decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    return backend, batch


def forward(backend: Any, model_runner: Any, layer_id: int, batch: Any, **kwargs: Any) -> Any:
    rows = batch.batch_size
    q, kv = torch.randn(rows, QO_HEADS, HEAD_DIM), torch.randn(rows, KV_HEADS, HEAD_DIM)
    return backend.forward(q, kv, kv, model_runner.model[layer_id], batch, **kwargs)


def test_layers_go_where_they_are_routed(mixed_runner: Any) -> None:
    backend, batch = begun(mixed_runner)
    assert backend.calls == ["out_graph", "in_graph"]  # by the default of init_forward_metadata
    assert forward(backend, mixed_runner, 0, batch).isfinite().all()
    assert backend.calls == ["out_graph", "in_graph"]
    assert forward(backend, mixed_runner, 1, batch, sinks=None).isinf().all()
    assert backend.calls[2:] == ["decode layer 1 sinks"]
    assert inside.planner(backend).counters()["plans_built"] == 1


def test_a_default_backend_without_layers_is_not_prepared() -> None:
    model_runner = runner()
    backend, batch = begun(model_runner)
    forward(backend, model_runner, 1, batch)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.calls == []


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
def test_other_modes_are_the_default_backends(mode: ForwardMode) -> None:
    model_runner = runner()
    backend, batch = pat_backend(model_runner), decode_batch([1], [2], [9])
    batch.forward_mode = mode
    backend.init_forward_metadata(batch)
    assert backend.calls == ["out_graph", "in_graph"]
    forward(backend, model_runner, 0, batch)
    assert backend.calls[2:] == ([] if mode is ForwardMode.IDLE else ["extend"])
    assert inside.planner(backend).counters()["plans_built"] == 0


@pytest.mark.parametrize("delegates", [False, True])
def test_a_graph_is_prepared_for_both(
    delegates: bool, mixed_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Call the backend as SGLang's graph runner does: before and in a capture, and before a replay.
    model_runner = mixed_runner if delegates else runner()
    backend = pat_backend(model_runner)
    order = backend.calls
    plan = inside.planner(backend).plan_captured

    def planned(kind: Any, view: Any, in_capture: bool) -> None:
        plan(kind, view, in_capture)
        order.append("plan in capture" if in_capture else "plan")

    monkeypatch.setattr(inside.planner(backend), "plan_captured", planned)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    view = decode_batch([0, 0], [1, 1], [0, 0])
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    backend.init_forward_metadata_in_graph(view)
    view = replay_view([1], [2], [9], 2)
    backend.init_forward_metadata_out_graph(view)
    of_default = ["graphs of 2 rows", "out_graph in capture", "in_graph", "out_graph"]
    assert [each for each in order if each in of_default] == (of_default if delegates else [])
    assert [each for each in order if each not in of_default] == ["plan in capture", "plan"]
    if delegates:  # the plan comes last
        assert order.index("plan") == len(order) - 1
    out = forward(backend, model_runner, 0, view, save_kv_cache=False)
    assert out.isfinite().all()


def test_graphs_are_reserved_for_the_largest_and_for_all_of_the_pool() -> None:
    backend = pat_backend(runner())
    for max_bs in (4, 2):  # a weight update captures again
        backend.init_cuda_graph_state(max_bs=max_bs, max_num_tokens=max_bs)
        # A child's shared range may repeat a slot.
        expected = {"max_requests": 4, "max_shared_slots": 2 * SLOTS}
        assert inside.reservation(backend) == expected


def test_layers_of_two_shapes_have_two_plans() -> None:
    wide = layers(tp_q_head_num=8)
    model_runner = runner(model=wide)
    model_runner.req_to_token_pool.req_to_token[1, :2] = torch.tensor([3, 9])
    backend, batch = begun(model_runner)
    for layer_id, heads in ((0, QO_HEADS), (1, 8)):
        q = torch.randn(1, heads, HEAD_DIM)
        out = backend.forward(q, None, None, wide[layer_id], batch).view(heads, HEAD_DIM)
        pool = model_runner.token_to_kv_pool
        exact = dense(q[0], pool, layer_id, torch.tensor([3, 9]))
        torch.testing.assert_close(out.double(), exact, atol=2e-6, rtol=2e-6)
    assert inside.planner(backend).counters()["plans_built"] == 1  # planned steps


def test_arguments_that_pat_does_not_know_delegate_the_layer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_runner = runner()
    backend, batch = begun(model_runner)
    forward(backend, model_runner, 0, batch, q_rope=None)
    assert backend.calls == []
    with caplog.at_level("INFO"):
        forward(backend, model_runner, 1, batch, score_mod=max)
    # The default backend was not prepared for this step, so pat prepares it late.
    assert backend.calls == ["out_graph", "in_graph", "decode layer 1 score_mod"]
    assert caplog.messages == [
        "pat decodes 1 of 2 layers; 1 on triton: the argument score_mod; prefill on triton"
    ]
    backend.calls.clear()
    backend.init_forward_metadata(batch)
    forward(backend, model_runner, 1, batch)
    assert backend.calls == ["out_graph", "in_graph", "decode layer 1"]


def test_a_layer_that_was_not_found_in_the_model_is_the_default_backends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The default backend prepares no decode step while it decodes nothing."""
    model_runner = runner()
    backend, batch = pat_backend(model_runner), decode_batch([1], [2], [9])
    model_runner.model = layers(3)
    backend.init_forward_metadata(batch)
    with caplog.at_level("INFO"):
        forward(backend, model_runner, 2, batch)
        forward(backend, model_runner, 2, batch)
    assert backend.calls == ["out_graph", "in_graph", "decode layer 2", "decode layer 2"]
    assert caplog.messages == [
        "pat decodes 2 of 3 layers; 1 on triton: a layer that was not found in the model; "
        "prefill on triton"
    ]


def test_such_arguments_in_the_warm_up_of_a_graph() -> None:
    model_runner = runner()
    backend, view = pat_backend(model_runner), decode_batch([0], [1], [0])
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    backend.init_forward_metadata_in_graph(view)
    assert backend.calls == []
    for layer_id in (0, 1):
        forward(backend, model_runner, layer_id, view, score_mod=max)
    assert backend.calls == [
        "graphs of 2 rows",
        "out_graph in capture",
        "in_graph",
        "decode layer 0 score_mod",
        "decode layer 1 score_mod",
    ]
    planned = inside.planner(backend).counters()["plans_built"]
    backend.init_forward_metadata_out_graph(view, in_capture=True)
    assert inside.planner(backend).counters()["plans_built"] == planned  # pat has no layer left


def test_each_graph_is_prepared_for_the_layers_that_it_was_captured_with() -> None:
    """SGLang captures large graphs first, and a layer may fall back in the warm-up of a small one.

    FlashInfer and FA3 raise KeyError at a replay if they did not prepare the graph's capture.
    """
    model_runner = runner()
    backend = pat_backend(model_runner)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    large, small = decode_batch([0, 0], [1, 1], [0, 0]), decode_batch([0], [1], [0])
    backend.init_forward_metadata_out_graph(large, in_capture=True)
    backend.init_forward_metadata_out_graph(small, in_capture=True)
    forward(backend, model_runner, 1, small, score_mod=max)
    assert set(inside.layer_support(backend).shapes) == {0}
    for count, calls in ((2, []), (1, ["out_graph"])):
        backend.calls.clear()
        rows = [*range(1, count + 1)]
        view = replay_view(rows, [3] * count, [10, 11][:count], count)
        backend.init_forward_metadata_out_graph(view)
        assert backend.calls == calls
        assert inside.plans(backend).main.seq_lens.tolist() == [3] * count
    # With LoRA there are two graphs of a size, and pat has no layer in the second one.
    backend.init_forward_metadata_out_graph(small, in_capture=True)
    forward(backend, model_runner, 0, small, score_mod=max)
    assert not inside.layer_support(backend).shapes
    backend.init_forward_metadata_out_graph(replay_view([1], [4], [10], 1))
    assert inside.plans(backend).main.seq_lens.tolist() == [4]
    # pat decodes no layer in the new graphs.
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    planned = inside.planner(backend).counters()["plans_built"]
    backend.init_forward_metadata_out_graph(small, in_capture=True)
    backend.init_forward_metadata_out_graph(replay_view([1], [4], [10], 1))
    assert inside.planner(backend).counters()["plans_built"] == planned


def test_such_arguments_are_refused_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    model_runner = runner()
    backend, batch = begun(model_runner)
    with pytest.raises(ValueError, match=r"attention = the argument a, b \(layer 0\); supported"):
        forward(backend, model_runner, 0, batch, b=1, sinks=torch.ones(4), a=2, c=None)


@pytest.mark.skipif(
    not hasattr(AttentionBackend, "shared_read_ends"), reason="this SGLang does not ask"
)
def test_reads_end_where_those_of_the_later_backend_do(mixed_runner: Any) -> None:
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    alone, backend = pat_backend(runner()), pat_backend(mixed_runner)
    assert alone.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    backend.ends = SharedReadEnds.PRE_REPLAY
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    backend.ends = SharedReadEnds.POST_REPLAY
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY


# --- decoding ---


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_decode_stores_the_new_token_and_attends(flat: bool, cap: float) -> None:
    model_runner = runner(model=layers(logit_cap=cap))
    pool, req_to_token = model_runner.token_to_kv_pool, model_runner.req_to_token_pool.req_to_token
    req_to_token[1, :5] = torch.tensor([3, 4, 5, 6, 7])
    req_to_token[2, :3] = torch.tensor([3, 4, 30])
    backend = pat_backend(model_runner)
    batch = decode_batch([1, 2], [5, 3], [7, 30])
    backend.init_forward_metadata(batch)
    layer = model_runner.model[1]
    q = torch.randn(2, QO_HEADS, HEAD_DIM)
    k, v = torch.randn(2, KV_HEADS, HEAD_DIM), torch.randn(2, KV_HEADS, HEAD_DIM)
    out = backend.forward(q.flatten(1) if flat else q, k, v, layer, batch)
    assert torch.equal(pool.keys[1][[7, 30]], k)
    assert torch.equal(pool.values[1][[7, 30]], v)
    assert out.shape == (2, QO_HEADS * HEAD_DIM)
    for row, length in ((0, 5), (1, 3)):
        slots = req_to_token[row + 1, :length].long()
        ours = out[row].view(QO_HEADS, HEAD_DIM).double()
        exact = dense(q[row], pool, 1, slots, cap)
        torch.testing.assert_close(ours, exact, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    "q",
    [
        torch.randn(QO_HEADS, 2, HEAD_DIM).transpose(0, 1),
        torch.randn(2, QO_HEADS, 2 * HEAD_DIM)[..., :HEAD_DIM],
        torch.randn(2, QO_HEADS * HEAD_DIM + 1)[:, 1:],  # a slice of a wider projection
    ],
    ids=["heads first", "a part of each head", "rows at odd addresses"],
)
def test_queries_that_the_kernels_cannot_read_are_copied(
    q: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = queries_of_runs(monkeypatch)
    model_runner = runner()
    backend, batch = pat_backend(model_runner), decode_batch([1, 2], [5, 3], [7, 30])
    backend.init_forward_metadata(batch)
    backend.forward(q, None, None, model_runner.model[1], batch)
    assert torch.equal(given[0].flatten(1), q.reshape(2, -1))
    assert given[0].is_contiguous()


def test_scales_of_the_kv_cache_do_not_apply_to_the_models_own_type() -> None:
    # A checkpoint with scales for an fp8 cache may be served with a 16-bit cache.
    layer, pool = (
        layers()[1],
        MHATokenToKVPool(SLOTS, 1, torch.float32, KV_HEADS, HEAD_DIM, 2, "cpu", False),
    )
    layer.k_scale = layer.v_scale = torch.tensor(0.5)
    layer.k_scale_float = layer.v_scale_float = 0.5
    k, v = torch.randn(1, KV_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    where = KVWriteLoc(torch.tensor([9]))
    pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)
    assert torch.equal(pool.get_key_buffer(1)[9], k[0])  # SGLang stores it unscaled, too
    assert torch.equal(pool.get_value_buffer(1)[9], v[0])

    model_runner = runner(model=layers(k_scale=layer.k_scale, v_scale=layer.v_scale))
    backend, batch = pat_backend(model_runner), decode_batch([1], [1], [9])
    model_runner.req_to_token_pool.req_to_token[1, 0] = 9
    backend.init_forward_metadata(batch)
    q = torch.randn(1, QO_HEADS, HEAD_DIM)
    out = backend.forward(q, k, v, model_runner.model[1], batch)
    group = QO_HEADS // KV_HEADS  # the output over one token is its V
    torch.testing.assert_close(out.view(QO_HEADS, HEAD_DIM), v[0].repeat_interleave(group, dim=0))


@pytest.mark.parametrize("default", ["triton", "torch_native"])
def test_an_fp8_pool_is_stored_and_read_with_the_scales_of_the_default_backend(
    default: str,
) -> None:
    dtype = torch.float8_e4m3fn
    pool = MHATokenToKVPool(SLOTS, 1, dtype, KV_HEADS, HEAD_DIM, 2, "cpu", False)
    scales = {
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(4.0),
        "k_scale_float": 0.5,
        "v_scale_float": 4.0,
    }
    model_runner = runner(
        model=layers(**scales),
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="fp8_e4m3",
        token_to_kv_pool=pool,
    )
    backend, batch = pat_backend(model_runner, default), decode_batch([1], [1], [9])
    model_runner.req_to_token_pool.req_to_token[1, 0] = 9
    backend.init_forward_metadata(batch)
    q = torch.randn(1, QO_HEADS, HEAD_DIM)
    k, v = torch.randn(1, KV_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    k_scale, v_scale = (0.5, 4.0) if default == "triton" else (1.0, 1.0)
    stored = (k / k_scale).to(dtype), (v / v_scale).to(dtype)
    out = backend.forward(q, k.clone(), v.clone(), model_runner.model[1], batch)
    assert torch.equal(pool.get_key_buffer(1)[9].float(), stored[0][0].float())
    assert torch.equal(pool.get_value_buffer(1)[9].float(), stored[1][0].float())
    expected = (stored[1][0].float() * v_scale).repeat_interleave(QO_HEADS // KV_HEADS, dim=0)
    torch.testing.assert_close(out.view(QO_HEADS, HEAD_DIM), expected)

    # With two tokens, the scale of K changes their weights.
    model_runner.req_to_token_pool.req_to_token[1, 1] = 10
    batch = decode_batch([1], [2], [10])
    backend.init_forward_metadata(batch)
    out = backend.forward(q, 2 * k, -v, model_runner.model[1], batch)
    caches = (
        pool.get_key_buffer(1).double() * k_scale,
        pool.get_value_buffer(1).double() * v_scale,
    )
    table = model_runner.req_to_token_pool.req_to_token
    exact, _ = dense_attention(q, *caches, table, torch.tensor([1]), torch.tensor([2]))
    torch.testing.assert_close(
        out.view(1, QO_HEADS, HEAD_DIM).double(), exact, atol=2e-6, rtol=2e-6
    )


def test_nothing_is_stored_where_the_model_stores_itself() -> None:
    model_runner = runner()
    backend, before = pat_backend(model_runner), model_runner.token_to_kv_pool.keys[0].clone()
    batch = decode_batch([1], [2], [9])
    backend.init_forward_metadata(batch)
    q, kv = torch.randn(1, QO_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    layer = model_runner.model[0]
    backend.forward(q, kv, kv, layer, batch, save_kv_cache=False)
    backend.forward(q, None, None, layer, batch)
    assert torch.equal(model_runner.token_to_kv_pool.keys[0], before)


def test_a_plan_that_does_not_fit_a_graph_shares_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = pat_backend(runner())
    planned = []
    (attention,) = inside.attentions(inside.microbatch(backend).eager)
    original = attention._update_plan

    def update_plan(batch: Any, *arguments: Any) -> DecodePlan:
        planned.append(batch.read_paths())
        if len(planned) == 1:
            raise PlanOverflowError("too large")
        return original(batch, *arguments)

    monkeypatch.setattr(attention, "_update_plan", update_plan)
    backend.init_forward_metadata(decode_batch([1], [2], [9]))
    assert len(planned) == 2
    assert planned[1].path_begin.tolist() == [0, 0]
    assert inside.microbatch(backend).builder.steps_without_sharing[StepReason.OVERFLOW] == 1
    assert StepReason.OVERFLOW in caplog.text
