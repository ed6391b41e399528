"""Tests on a CPU that hold on a GPU too: pat needs no option for its device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes.backends import KVPool, layers, runner, server_arguments

from sglang_pat.sglang.start.layer_rules import attention_layers, layer_reason
from sglang_pat.sglang.start.server_options import server_reason

pytestmark = [
    pytest.mark.usefixtures("server_context"),
    pytest.mark.parametrize("device", ["cpu", "cuda"]),
]

CHAINS = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}


@pytest.mark.parametrize(
    "options", [CHAINS, {"enable_deterministic_inference": True}], ids=["speculation", "invariance"]
)
def test_options_under_which_pat_decodes(device: str, options: dict[str, Any]) -> None:
    assert server_reason(server_arguments(device=device, **options)) is None


def test_fp8_pools(device: str) -> None:
    dtype = torch.float8_e4m3fn
    model = layers()
    of_fp8 = runner(
        model=model,
        device=device,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="fp8_e4m3",
        token_to_kv_pool=KVPool(dtype),
    )
    assert layer_reason(attention_layers(model)[0], of_fp8, "triton") is None
