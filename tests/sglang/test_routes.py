"""Layers that fall back to the default backend, and why; strict mode refuses them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import inspect_backend as inside
import pytest
import sglang
import torch
from fakes.backends import (
    HEAD_DIM,
    KV_HEADS,
    SLOTS,
    DefaultBackend,
    KVPool,
    config,
    layers,
    pat_backend,
    runner,
    server_arguments,
)
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.server_args import ServerArgs

from sglang_pat import support
from sglang_pat.offline.model_support import layer_table
from sglang_pat.plan import LayerKind
from sglang_pat.sglang.report import layer_report
from sglang_pat.sglang.start.layer_rules import attention_layers, layers_of_runner, window_reason
from sglang_pat.sglang.start.layer_support import read_scales
from sglang_pat.sglang.start.server_options import (
    BLOCKS,
    CHAINS,
    DELEGATED_ARGUMENTS,
    GLUE_GRAPH,
    PLAN_STREAM,
    RAGGED_VERIFY,
    TREES,
    early_reason,
)

pytestmark = pytest.mark.usefixtures("server_context")


def fp8_runner(**change: Any) -> Any:
    """Return a runner with an fp8 pool, whose layers all have scales."""
    dtype = torch.float8_e4m3fn
    fields = {
        "kv_cache_dtype": dtype,
        "kv_cache_dtype_str": "fp8_e4m3",
        "token_to_kv_pool": KVPool(dtype),
    }
    return runner(**(fields | change))


def scaled_layers(**change: Any) -> Any:
    """Return layers, the last of which has scales."""
    scales = {
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(3.0),
        "k_scale_float": 0.5,
        "v_scale_float": 3.0,
    }
    return layers(**(scales | change))


# Unsupported properties of the last layer: topic and value of the refusal, and a runner.
OF_A_LAYER: dict[tuple[str, str], Callable[[], Any]] = {
    ("KV pool", "KVPool of torch.bfloat16 [2, 64]"): lambda: runner(
        token_to_kv_pool=KVPool(of_last=torch.bfloat16)
    ),
    ("attention", "cross attention"): lambda: runner(model=layers(is_cross_attention=True)),
    ("sliding window", "128 on triton"): lambda: runner(model=layers(sliding_window_size=128)),
    ("sliding window", "128 over latent attention"): lambda: runner(
        model=layers(sliding_window_size=128, tp_k_head_num=1, qk_head_dim=576, v_head_dim=512)
    ),
    ("KV pool", "WindowPools with windows"): lambda: runner(
        model=layers(sliding_window_size=128),
        sliding_window_size=128,
        token_to_kv_pool=WindowPools(),
    ),
    ("attention", "attention within chunks of 8192 on triton"): lambda: runner(
        attention_chunk_size=8192, model=layers(use_irope=True)
    ),
    ("attention", "attention of type encoder_only"): lambda: runner(
        model=layers(attn_type=AttentionType.ENCODER_ONLY)
    ),
    ("head_dim", "64/32"): lambda: runner(model=layers(v_head_dim=32)),
    ("attention", "a temperature by position"): lambda: runner(model=layers(xai_temperature_len=8)),
    ("attention", "ALIBI positions"): lambda: runner(model=layers(pos_encoding_mode="ALIBI")),
    ("attention", "a soft-cap by other"): lambda: runner(
        model=layers(logit_cap=30.0, logit_capping_method="other")
    ),
    ("head_dim", "288/256"): lambda: runner(model=layers(qk_head_dim=288, v_head_dim=256)),
    ("head_dim", "512 over an fp8 KV cache"): lambda: fp8_runner(
        model=scaled_layers(qk_head_dim=512, v_head_dim=512)
    ),
    ("query heads per KV head", "5/2"): lambda: runner(model=layers(tp_q_head_num=5)),
    ("query heads per KV head", "32"): lambda: runner(model=layers(tp_q_head_num=64)),
    ("KV pool", "scaled by 2 numbers of torch.float32"): lambda: fp8_runner(
        model=scaled_layers(v_scale=torch.ones(2))
    ),
    ("KV pool", "scaled by 1 numbers of torch.float64"): lambda: fp8_runner(
        model=scaled_layers(v_scale=torch.ones((), dtype=torch.float64))
    ),
    ("KV pool", "scaled by a number on meta"): lambda: fp8_runner(
        model=scaled_layers(v_scale=torch.ones((), device="meta"))
    ),
    ("KV pool", "scaled by 0.0"): lambda: fp8_runner(
        model=scaled_layers(k_scale=torch.tensor(0.0))
    ),
    ("KV pool", "scaled by nan"): lambda: fp8_runner(model=scaled_layers(v_scale=float("nan"))),
    ("KV pool", "KVPool of torch.float32 [2, 64]"): lambda: runner(token_to_kv_pool=strided_pool()),
}
# Unsupported properties of the whole model.
OF_THE_MODEL: dict[tuple[str, str], Callable[[], Any]] = {
    ("attention", "sparse attention (DeepseekV32ForCausalLM)"): lambda: runner(
        model_config=config(hf_config=deepseek_v32())
    ),
    ("attention", "a bias by distance (InklingForConditionalGeneration)"): lambda: runner(
        model_config=config(hf_config=architecture("InklingForConditionalGeneration"))
    ),
    ("attention", "an encoder-decoder model (LlamaForCausalLM)"): lambda: runner(
        model_config=config(is_encoder_decoder=True)
    ),
    ("attention", "sparse attention (MiniMaxM3SparseForCausalLM)"): lambda: runner(
        model_config=config(hf_config=architecture("MiniMaxM3SparseForCausalLM"))
    ),
    ("attention", "sparse attention (LlamaForCausalLM)"): lambda: runner(
        model_config=config(hf_text_config=wrapping_config())
    ),
    ("sliding window", "only after the prompt"): lambda: runner(model=windowed_model()),
    ("server options", "--dcp-size 2"): lambda: runner(server_args=server_arguments(dcp_size=2)),
    ("speculative decoding", "--speculative-algorithm UNO"): lambda: runner(
        server_args=server_arguments(speculative_algorithm="UNO")
    ),
    ("speculative decoding", "in batch-invariant mode"): lambda: runner(
        server_args=server_arguments(
            speculative_algorithm="DFLASH", enable_deterministic_inference=True
        )
    ),
    (
        "speculative decoding",
        "--speculative-attention-mode prefill with flashinfer",
    ): lambda: runner(
        server_args=server_arguments(
            speculative_algorithm="EAGLE", prefill_attention_backend="flashinfer"
        )
    ),
    **{
        ("server options", flag): lambda name=name: runner(
            server_args=server_arguments(**{name: True})
        )
        for name, flag in DELEGATED_ARGUMENTS.items()
    },
    ("dtype of queries and KV cache", "torch.float32 and torch.bfloat16"): lambda: runner(
        kv_cache_dtype=torch.bfloat16
    ),
    ("dtype of queries and KV cache", "mxfp8"): lambda: fp8_runner(kv_cache_dtype_str="mxfp8"),
    ("dtype of queries and KV cache", "torch.float64"): lambda: runner(
        dtype=torch.float64, kv_cache_dtype=torch.float64, token_to_kv_pool=KVPool(torch.float64)
    ),
    ("KV pool", "with virtual slots"): lambda: runner(
        kv_index_translator=SimpleNamespace(is_translating=True)
    ),
    ("device", "npu"): lambda: runner(device="npu"),
    ("attention", "no attention layer (RadixAttention) in Linear"): lambda: runner(
        model=torch.nn.Linear(2, 2)
    ),
}


def architecture(name: str) -> SimpleNamespace:
    return SimpleNamespace(architectures=[name])


def deepseek_v32() -> SimpleNamespace:
    return SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=2048)


def wrapping_config() -> SimpleNamespace:
    """Return a model's config that wraps SGLang's backend in its own (Dots3)."""
    return SimpleNamespace(wrap_attention_backend=lambda runner, backend: backend)


class WindowPools(KVPool):
    """A pool of several pools, with rules that pat does not know."""

    full_kv_pool = None


def windowed_model() -> torch.nn.Module:
    """Return a model with windows that its layers do not declare (Unlimited-OCR)."""
    model = layers()
    model.is_prefill_aware_swa = lambda: True
    return model


def strided_pool() -> KVPool:
    """Return a pool that interleaves K and V in layer 1: right shapes, other strides."""
    pool = KVPool()
    both = torch.zeros(SLOTS, 2 * KV_HEADS, HEAD_DIM)
    pool.keys[1], pool.values[1] = both[:, :KV_HEADS], both[:, KV_HEADS:]
    return pool


def our_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return pat's messages, without SGLang's about its first hook."""
    return [each.getMessage() for each in caplog.records if each.name.startswith("sglang_pat.")]


@pytest.mark.parametrize("what", OF_A_LAYER, ids=": ".join)
def test_a_layer_is_left_to_the_default_backend(
    what: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = pat_backend(OF_A_LAYER[what]())
    reason = support.Unsupported(*what)
    messages = our_messages(caplog)
    assert messages == [f"pat decodes 1 of 2 layers; 1 on triton: {reason}; prefill on triton"]
    assert [*inside.planner(backend).layer_support.shapes] == [0]


@pytest.mark.parametrize("what", OF_THE_MODEL, ids=": ".join)
def test_a_model_is_left_to_the_default_backend(
    what: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        backend = pat_backend(OF_THE_MODEL[what]())
    assert type(backend) is DefaultBackend
    assert backend.needs_cpu_seq_lens is False
    (line,) = our_messages(caplog)
    assert line.startswith("pat decodes nothing, triton decodes all ")
    assert line.endswith(f" layers: {support.Unsupported(*what)}")


@pytest.mark.parametrize("what", [*OF_A_LAYER, *OF_THE_MODEL], ids=": ".join)
def test_in_strict_mode_it_is_refused(
    what: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    with pytest.raises(ValueError, match=r"^pat does not support ") as refused:
        pat_backend((OF_A_LAYER | OF_THE_MODEL)[what]())
    head, _, supported = str(refused.value).partition("; supported: ")
    assert re.sub(r" \(layer \d\)$", "", head) == f"pat does not support {' = '.join(what)}"
    assert supported == support.row_of(what[0]).supported
    assert (what in OF_A_LAYER) <= head.endswith(" (layer 1)")


def test_in_strict_mode_a_plain_model_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    assert type(pat_backend(runner())) is not DefaultBackend


@pytest.mark.parametrize("name", ["dual_chunk_flash_attn", "aiter", "nsa"])
def test_backends_that_attend_in_ways_of_their_own_stay_whole(name: str) -> None:
    backend = pat_backend(runner(), name)
    assert type(backend) is DefaultBackend
    assert type(pat_backend(runner(), "fa3")) is not DefaultBackend


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        ((7, 5), torch.float16, 64, "device compute capability 7.5"),
        ((8, 0), torch.float32, 64, "dtype of queries and KV cache torch.float32 on a GPU"),
        ((8, 0), torch.bfloat16, 64, None),
        ((9, 0), torch.bfloat16, 512, None),
        ((8, 0), torch.bfloat16, 512, "head_dim 512 on compute capability 8.0"),
    ],
)
def test_gpus_without_kernels(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 1 has the head_dim, layer 0 has 64. Only Hopper has kernels for 512."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    pool = KVPool(dtype)
    pool.keys[1], pool.values[1] = (
        torch.zeros(SLOTS, KV_HEADS, head_dim, dtype=dtype) for _ in "kv"
    )
    model_runner = runner(
        device="cuda",
        dtype=dtype,
        kv_cache_dtype=dtype,
        token_to_kv_pool=pool,
        model=layers(qk_head_dim=head_dim, v_head_dim=head_dim),
    )
    fallback = layers_of_runner(model_runner, "triton").fallback
    fallen = {} if reason is None else {1: reason} if head_dim == 512 else {0: reason, 1: reason}
    assert {layer: str(why) for layer, why in fallback.items()} == fallen


@pytest.mark.parametrize("container", [list, tuple, lambda found: dict(enumerate(found))])
def test_layers_that_no_module_registers_are_found(container: Callable[[Any], Any]) -> None:
    """A model of a transformers class keeps its attention layers in a dict."""
    model = torch.nn.Module()
    model.attention_instances = container([*layers()])
    assert [*layers_of_runner(runner(model=model), "triton").shapes] == [0, 1]
    model.registered = layers()
    model.attention_instances = container([*model.registered])
    assert attention_layers(model) == [*model.registered]


def test_layers_of_one_id_are_routed_together() -> None:
    # Some models have layers that read other layers' KV under those layers' ids.
    same = layers(3)
    same[1].layer_id = same[2].layer_id = 0
    same[2].sliding_window_size = 16
    layer_support = layers_of_runner(runner(model=same), "triton")
    assert layer_support.shapes == {}
    assert [*layer_support.fallback] == [0]
    same[1].layer_id = 1
    assert [*layers_of_runner(runner(model=same), "triton").shapes] == [1]


def test_layers_of_one_id_have_one_shape() -> None:
    same = layers(2, layer_id=0, tp_q_head_num=8)
    layer_support = layers_of_runner(runner(model=same), "triton")
    assert layer_support.shapes == {}
    assert str(layer_support.fallback[0]) == "layers of different shapes with the same id"


def test_a_table_joins_neighbours() -> None:
    five = layers(5)
    for each in five[1:3]:
        each.sliding_window_size = 16
    pool = KVPool()
    pool.keys, pool.values = [pool.keys[0]] * 5, [pool.values[0]] * 5
    layer_support = layers_of_runner(runner(model=five, token_to_kv_pool=pool), "intel_amx")
    reason = "sliding window 16 on intel_amx"
    assert [*layer_table(layer_support)] == [
        ("0", "pat", ""),
        ("1-2", "intel_amx", reason),
        ("3-4", "pat", ""),
    ]
    assert str(layer_support) == f"pat decodes 3 of 5 layers; 2 on intel_amx: {reason}"
    assert layer_support.as_json() == {
        "default_backend": "intel_amx",
        "pat_layers": 3,
        "default_layers": {reason: 2},
        "batch_invariant": False,
    }


def test_the_log_names_the_backend_that_prefills(caplog: pytest.LogCaptureFixture) -> None:
    arguments = server_arguments(prefill_attention_backend="fa3")
    with caplog.at_level(logging.INFO):
        pat_backend(runner(server_args=arguments))
    assert our_messages(caplog) == ["pat decodes 2 of 2 layers; prefill on fa3"]


@pytest.mark.parametrize("decodes", [True, False])
def test_the_server_info_names_pat_where_it_decodes(decodes: bool) -> None:
    # SGLang's arguments name the default backend; the scheduler's information has priority.
    pat_backend(runner() if decodes else runner(device="npu"))
    told = layer_report._after_get_init_info({"status": "ready"})
    assert told.pop("pat")["pat_layers"] == (2 if decodes else 0)
    backend = {"decode_attention_backend": "pat"} if decodes else {}
    assert told == {"status": "ready"} | backend


def test_the_window_of_a_model_is_asked_for_as_sglang_does() -> None:
    from sglang.srt.models.unlimited_ocr import UnlimitedOCRForCausalLM

    assert window_reason(UnlimitedOCRForCausalLM.__new__(UnlimitedOCRForCausalLM)) is not None


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias"])
def test_layers_with_sinks_are_named(name: str) -> None:
    modules = torch.nn.ModuleList()
    for layer in layers(3):
        modules.append(torch.nn.ModuleDict({"attn": layer}))
        has_sinks = layer.layer_id != 1  # layers without sinks pass None
        setattr(modules[-1], name, torch.nn.Parameter(torch.zeros(1)) if has_sinks else None)
        layer.sliding_window_size = 16 if layer.layer_id == 2 else -1
    pool = KVPool()
    pool.keys, pool.values = [pool.keys[0]] * 3, [pool.values[0]] * 3
    layer_support = layers_of_runner(runner(model=modules, token_to_kv_pool=pool), "fa3")
    assert str(layer_support) == (
        "pat decodes 3 of 3 layers, 2 of them with attention sinks, 1 of them with sliding windows"
    )


@pytest.mark.parametrize(
    ("default", "common", "tokens"),
    [
        ("fa3", None, 17),
        ("torch_native", None, 17),
        ("flashinfer", 20, 21),
        ("triton", 20, 20),
        ("flashinfer", None, None),
        ("triton", None, None),
        ("trtllm_mha", None, 17),
        ("intel_amx", 20, None),
    ],
)
def test_windows_are_as_long_as_those_of_the_default_backend(
    default: str, common: int | None, tokens: int | None
) -> None:
    """Test a layer of size 16 in a model whose common size differs."""
    model_runner = runner(model=layers(sliding_window_size=16), sliding_window_size=common)
    layer_support = layers_of_runner(model_runner, default)
    assert layer_support.windows == ({} if tokens is None else {1: tokens})
    assert layer_support.kinds() == {
        LayerKind(layer_support.shapes[0], window) for window in {0, tokens or 0}
    }


@pytest.mark.parametrize(
    ("changes", "default", "reason"),
    [
        ({"speculative_algorithm": "EAGLE"}, "fa3", None),
        ({"speculative_algorithm": "EAGLE"}, "triton", "with drafts on triton"),
        ({"speculative_algorithm": "NGRAM"}, "fa3", "with drafts in trees or blocks"),
        ({"speculative_algorithm": "DFLASH"}, "fa3", "with drafts in trees or blocks"),
        ({"enable_deterministic_inference": True}, "fa3", "in batch-invariant mode"),
    ],
)
def test_windows_with_drafts_and_in_batch_invariant_mode(
    changes: dict[str, Any], default: str, reason: str | None
) -> None:
    arguments = server_arguments(speculative_num_draft_tokens=4, **changes)
    model_runner = runner(
        model=layers(sliding_window_size=16), server_args=arguments, sliding_window_size=16
    )
    layer_support = layers_of_runner(model_runner, default)
    found = layer_support.fallback.get(1)
    assert found == (reason and support.Unsupported("sliding window", f"16 {reason}"))
    assert layer_support.drafts_ahead == (0 if reason else 8)
    model_runner.is_draft_worker = "speculative_algorithm" in changes
    of_draft_model = layers_of_runner(model_runner, default).fallback.get(1)
    assert not model_runner.is_draft_worker or str(of_draft_model) == (
        "sliding window 16 of a draft model"
    )


def test_windows_as_long_as_requests_and_beyond_the_limit() -> None:
    """The table of a window has a column for each of its tokens."""
    model_runner = runner(model=layers(sliding_window_size=1 << 18), sliding_window_size=1 << 18)
    layer_support = layers_of_runner(model_runner, "fa3")
    assert layer_support.shapes.keys() == {0, 1}
    assert layer_support.windows == {}
    model_runner.req_to_token_pool.req_to_token = torch.empty(1, 1 << 21, device="meta")
    for size, kept in ((2**20 - 1, {0, 1}), (2**20, {0})):
        model_runner.model[1].sliding_window_size = size
        layer_support = layers_of_runner(model_runner, "fa3")
        assert layer_support.shapes.keys() == kept
    assert str(layer_support.fallback[1]) == "sliding window 1048577 of more than 1048576 tokens"


def test_layers_of_one_id_have_one_window() -> None:
    same = layers(3)
    same[2].layer_id, same[2].sliding_window_size = 1, 16
    layer_support = layers_of_runner(runner(model=same), "fa3")
    assert [*layer_support.shapes] == [0]
    assert str(layer_support.fallback[1]) == "layers of different windows with the same id"


def test_arguments_that_delegate_exist_in_this_sglang() -> None:
    known = getattr(ServerArgs, "__dataclass_fields__", None) or ServerArgs.__struct_fields__
    missing = {*DELEGATED_ARGUMENTS, "dcp_size"} - {*known}
    assert missing <= {"enable_kv_cache_sharding", "enable_nvidia_megakernel"}  # not in 0.5.17
    flags = {*DELEGATED_ARGUMENTS.values(), "--dcp-size", GLUE_GRAPH}
    _, named = support.row_of("server options").supported.split("any except ")
    assert flags == {*named.split(", ")}


@pytest.mark.skipif(not hasattr(envs, GLUE_GRAPH), reason="this SGLang has no glue graphs")
def test_a_graph_in_place_of_planning_delegates(monkeypatch: pytest.MonkeyPatch) -> None:
    # Replays of a glue graph would read the plan of the captured step.
    monkeypatch.setenv(GLUE_GRAPH, "1")
    assert type(pat_backend(runner())) is DefaultBackend


def test_the_table_has_what_the_log_says_of_drafts() -> None:
    supported, excluded = support.row_of("speculative decoding").supported.split("; not ")
    assert all(name in supported for name in CHAINS + BLOCKS + TREES)
    for said in (
        "UNO",
        f"{RAGGED_VERIFY}=compact",
        "batch-invariant mode",
        "--speculative-attention-mode prefill",
        PLAN_STREAM,
    ):
        assert said in excluded


def test_as_many_drafts_as_pay_delegate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, server_context: Any
) -> None:
    """The requests of a step would have different numbers of rows."""
    caplog.set_level(logging.INFO, "sglang_pat")
    monkeypatch.setenv(RAGGED_VERIFY, "compact")
    arguments = {"speculative_num_draft_tokens": 4}
    for algorithm, reason in (
        ("DSPARK", f"{RAGGED_VERIFY}=compact in the environment"),
        ("DFLASH", None),
    ):
        named = server_arguments(speculative_algorithm=algorithm, **arguments)
        found = early_reason(named)
        assert (None if found is None else str(found)) == reason
        is_delegated = type(pat_backend(runner(server_args=named))) is DefaultBackend
        assert is_delegated == (reason is not None)
        assert reason is None or reason in caplog.text


@pytest.mark.parametrize("change", [{}, {"enable_multi_layer_eagle": True}])
def test_a_plan_stream_that_does_not_wait_delegates(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason applies to 0.5.17, and to several draft layers in both versions."""
    monkeypatch.setenv(PLAN_STREAM, "1")
    waits = sglang.__version__ != "0.5.17" and not change
    counts = {"speculative_num_draft_tokens": 4}
    drafting = server_arguments(speculative_algorithm="EAGLE", **counts, **change)
    reason = early_reason(drafting)
    assert str(reason) == ("None" if waits else f"{PLAN_STREAM}=1 in the environment")
    # These algorithms do not use the option in steps that pat plans.
    for algorithm in ("NGRAM", "DFLASH"):
        assert early_reason(server_arguments(speculative_algorithm=algorithm)) is None


@pytest.mark.parametrize("default", support.DEFAULT_BACKENDS)
def test_an_fp8_pool_is_pats(default: str) -> None:
    layer_support = layers_of_runner(fp8_runner(), default)
    assert [*layer_support.shapes] == [0, 1]
    assert layer_support.are_scaled == (default != "torch_native")


def test_scales_count_where_the_default_backend_stores_by_them() -> None:
    model_runner = fp8_runner(model=scaled_layers())
    assert [*layers_of_runner(model_runner, "fa3").shapes] == [0, 1]
    assert [*layers_of_runner(model_runner, "torch_native").shapes] == [0, 1]
    uncertain = layers_of_runner(model_runner, "intel_amx")
    assert str(uncertain.fallback[1]) == "KV pool scaled, under intel_amx"
    odd = fp8_runner(model=scaled_layers(k_scale=torch.ones(2)))
    assert [*layers_of_runner(odd, "torch_native").shapes] == [0, 1]


def test_scales_are_those_that_the_pool_divides_by() -> None:
    layer = scaled_layers()[-1]
    layer.k_scale_float = layer.v_scale_float = 1.0  # stale after a weight update
    assert read_scales(layer) == (0.5, 3.0)
    assert read_scales(layer)[0] is layer.k_scale
    layer.k_scale = layer.v_scale = None
    assert read_scales(layer) == (1.0, 1.0)
    layer.k_scale = layer.v_scale = 0.25  # from --quantization-param-path
    layer.k_scale_float = layer.v_scale_float = 1.0
    assert read_scales(layer) == (0.25, 0.25)


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4", "fp4_mx_block16"])
def test_other_types_of_the_kv_cache_are_known_before_there_is_a_model(dtype: str) -> None:
    reason = early_reason(server_arguments(kv_cache_dtype=dtype))
    assert str(reason) == f"dtype of queries and KV cache --kv-cache-dtype {dtype}"
