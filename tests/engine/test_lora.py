"""Requests of two LoRA adapters and of the base model share KV only with their own kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.driver import go_without_driver
from safetensors.torch import save_file
from sglang_engines import (
    TINY,
    Request,
    Workload,
    generate,
    running_engine,
    running_pat_engine,
    tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

RANK = 8


def write_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter of the attention projections that is strong enough to change answers."""
    model = TINY
    q_size, kv_size = model.num_qo_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes = {
        "q_proj": (q_size, model.hidden_size),
        "k_proj": (kv_size, model.hidden_size),
        "v_proj": (kv_size, model.hidden_size),
        "o_proj": (model.hidden_size, q_size),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(model.num_layers):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            into = torch.randn(RANK, columns, generator=generator) / columns**0.5
            out_of = torch.randn(rows, RANK, generator=generator) / RANK**0.5
            weights |= {f"{prefix}.lora_A.weight": into, f"{prefix}.lora_B.weight": out_of}
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(shapes),
        "bias": "none",
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_two_adapters_and_the_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: Workload
) -> None:
    go_without_driver(tmp_path, monkeypatch)
    first, second = (write_adapter(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2)))
    arguments = {
        "enable_lora": True,
        "lora_paths": [f"first={first}", f"second={second}"],
        "max_loras_per_batch": 3,
        "lora_backend": "torch_native",
        "max_total_tokens": 16384,
        "max_running_requests": 16,
    }
    names = [None, "first", "second"]
    # Each adapter gets the same prompts.
    asked = [request for request in workload.crowd for _ in names]
    lora_path = names * len(workload.crowd)

    def answers(engine: Any) -> list[list[int]]:
        return tokens(generate(engine, asked, lora_path=lora_path))

    with running_engine(tiny_model, "torch_native", **arguments) as engine:
        expected = answers(engine)
        plain = tokens(generate(engine, workload.crowd))
    by_name = [expected[i :: len(names)] for i in range(len(names))]
    assert by_name[0] == plain
    for i in range(len(workload.crowd)):
        assert len({tuple(of_name[i]) for of_name in by_name}) == len(names), "adapters differ"

    with running_pat_engine(tiny_model, tmp_path, **arguments) as (engine, stats):
        for _ in range(2):  # fills the tree, then finds everything there
            stats.new()
            assert answers(engine) == expected
        counted = stats.new()
        assert counted["kv_tokens_planned"] < 0.7 * counted["kv_tokens_query_centric"]
        assert counted["steps_without_sharing"] == {}

        # One prompt for three models: no KV is shared.
        one = [Request(workload.identical[0].prompt, 20)] * len(names)
        for _ in range(2):
            stats.new()
            generate(engine, one, lora_path=names)
        counted = stats.new()
        assert counted["kv_tokens_planned"] == counted["kv_tokens_query_centric"] > 0
