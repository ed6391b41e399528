"""Hybrid models on a GPU: logits with pat differ no more than between SGLang's own backends.

The test runs the small models of tests/engine/test_families.py in bfloat16 with CUDA graphs, and
the requests and limits of benchmarks/check logits. All servers of a family start at once; with `-n
4`, those of all families.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import sglang
import torch
from model_families import FAMILIES, VOCAB_SIZE, Family

from check.logits import (
    COMMON,
    REQUESTS,
    Run,
    Setup,
    answer_all,
    judge,
    problems_of_decoding,
    prompts,
)
from common import random_weights
from common.tiny_model import TinyModel
from sglang_pat.bench.server import Server, Start, contender, running_servers, sampling_of

# pat is measured against fa3, SGLang's default on Hopper, which also prefills for pat.
BACKENDS = ["pat", "triton", "fa3"]
NAMES = ("gpt-oss", "gemma-3", "qwen3-next", "llama-4")
# Limit on the mean difference of logits. Triton omits one token of a window, which changes logits
# by 0.09 on average, so the limit is wide for windows. Rounding, which can also switch experts,
# changes them by 0.004.
MOST_MEAN = 0.02
SETUP = Setup(
    TinyModel(vocab_size=VOCAB_SIZE),
    {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "cuda_graph_backend_prefill": "disabled",
        "context_length": 4096,
        "max_total_tokens": 1 << 15,
    },
    BACKENDS,
    192,  # multiples of the chunks of recurrent layers
    64,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("fa3, the yardstick, needs Hopper")
    family = FAMILIES[name]
    config = family.config | {"torch_dtype": "bfloat16"}
    if name == "llama-4":  # only fa3 supports chunks; here one chunk holds every request
        config["attention_chunk_size"] = SETUP.arguments["context_length"]
    family = dataclasses.replace(family, config=config)
    environment = _environment(family, random_weights.install(tmp_path))
    arguments = COMMON | SETUP.arguments | family.arguments
    if "max_mamba_cache_size" in arguments:
        arguments["max_mamba_cache_size"] = 8 * REQUESTS
    model = family.write(tmp_path / "model")
    starts = {each: Start(contender(each), model, arguments, environment) for each in BACKENDS}
    with running_servers(starts, tmp_path) as servers:
        runs = {each: _answered(server) for each, server in servers.items()}
        stats, info = servers["pat"].stats(), servers["pat"].info()
    assert info["pat"]["pat_layers"] == len(family.pat)
    assert sum(info["pat"]["default_layers"].values()) == sum(map(len, family.default.values()))
    # Layers of the default backend may give other bits in another run.
    verdict = judge({each: (run, run) for each, run in runs.items()}, problems_of_decoding(stats))
    print({each: verdict[each] for each in ("backends", "limit", "spread_of_logits")})
    assert verdict["passed"], verdict
    assert verdict["backends"]["pat"]["mean"] < MOST_MEAN


def _answered(server: Server) -> Run:
    """Send the prefixes first: with recurrent layers, SGLang caches only ends of prompts."""
    shared = SETUP.system + SETUP.document
    server.generate([prompt[:shared] for prompt in prompts(SETUP)[:4]], sampling_of(1))
    return answer_all(server, SETUP, flush=False)


def _environment(family: Family, variables: dict[str, str]) -> dict[str, str]:
    """Return the variables, and one that keeps SGLang from importing other models."""
    models = Path(next(iter(sglang.__path__)), "srt", "models")
    others: list[Any] = [
        each.name for each in pkgutil.iter_modules([str(models)]) if each.name not in family.modules
    ]
    return variables | {"SGLANG_DISABLED_MODEL_ARCHS": ",".join(others), "SGLANG_PAT_DEBUG": "1"}
