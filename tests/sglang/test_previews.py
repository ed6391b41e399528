"""What has been tested on the CPU alone is done on a GPU only if it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_fakes import KVPool, layers, runner, server_arguments

from sglang_pat.sglang.options import server_reason
from sglang_pat.sglang.routes import attention_layers, layer_reason

pytestmark = pytest.mark.usefixtures("server_context")

CHAINS = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 4}


def reason_on_gpu(**options: Any) -> str | None:
    reason = server_reason(server_arguments(device="cuda", **options))
    return None if reason is None else str(reason)


def test_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_on_gpu(**CHAINS) == "on a GPU without SGLANG_PAT_PREVIEW=speculation"
    monkeypatch.setenv("SGLANG_PAT_PREVIEW", "")
    assert reason_on_gpu(**CHAINS) is not None
    monkeypatch.setenv("SGLANG_PAT_PREVIEW", "speculation")
    assert reason_on_gpu(**CHAINS) is None
    monkeypatch.delenv("SGLANG_PAT_PREVIEW")
    assert server_reason(server_arguments(device="cpu", **CHAINS)) is None


def test_deterministic_inference_is_no_preview() -> None:
    assert reason_on_gpu(enable_deterministic_inference=True) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fp8_pools_are_no_preview(device: str) -> None:
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
