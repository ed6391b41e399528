"""Model and tokenizer for SGLang's own test kits, without any download.

The kits are mixins of `unittest.TestCase` that ask a running server by HTTP, in English.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_engines import LAUNCH_SERVER, Server, Stats, running_server
from transformers import PreTrainedTokenizerFast

from common.tiny_model import TinyModel
from sglang_pat.sglang.cpu import cuda_driver_is_present

VOCAB_SIZE = 32000  # some kits ask with any of the tokens below
CONTEXT_LENGTH = 131072  # some ask for answers of 100,000 tokens, and end them
_END_OF_TEXT = 2

# In place of sglang_engines.COMMON_ARGUMENTS. Decode steps run as CUDA graphs.
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cuda",
    "disable_cuda_graph": False,
    "cuda_graph_backend_prefill": "disabled",
    "mem_fraction_static": 0.5,
    "sampling_backend": "pytorch",  # FlashInfer's is compiled by nvcc at the first use
}


def write_model(folder: Path, *, gain_of_end: float = 0.0) -> Path:
    """The tiny model with a large vocabulary, in `folder`.

    gain_of_end: above 0 the model ends its answers by itself, sooner the larger it is.
    """
    TinyModel(vocab_size=VOCAB_SIZE, max_context_len=CONTEXT_LENGTH).write(folder)
    if gain_of_end:
        weights = load_file(folder / "model.safetensors")
        head = weights["lm_head.weight"]
        generator = torch.Generator().manual_seed(1)
        row = torch.randn(head.shape[1], generator=generator) / head.shape[1] ** 0.5
        head[_END_OF_TEXT] = gain_of_end * row
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class KitServer:
    """A running server that decodes with pat, and what it has counted."""

    server: Server
    model: Path
    stats: Stats

    def lend(self, case: type[Any]) -> None:
        """Give a kit what its tests ask for."""
        case.base_url = self.server.url
        case.process = self.server.process
        case.model = str(self.model)
        case.tokenizer = PreTrainedTokenizerFast.from_pretrained(self.model)


@contextlib.contextmanager
def running_kit_server(
    model: Path,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[KitServer]:
    """A server with pat that checks every step, and SGLang's own bookkeeping of its memory.

    Parameters
    ----------
    model : Path
        Of `write_model`.
    folder : Path
        For the log and the counters.
    variables : Mapping or None
        Of the server's environment.
    **arguments
        Of sglang.Engine.
    """
    stats = Stats(folder / "stats.json")
    variables = {
        "SGLANG_PAT_DEBUG": "1",
        "SGLANG_PAT_STATS_FILE": str(stats.path),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        **(variables or {}),
    }
    arguments = {
        "attention_backend": "pat",
        "skip_tokenizer_init": False,
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        **(ON_GPU if cuda_driver_is_present() else {}),
        **arguments,
    }
    with pytest.MonkeyPatch.context() as environment:
        for name, value in variables.items():
            environment.setenv(name, value)
        with running_server(LAUNCH_SERVER, model, folder / "log", **arguments) as server:
            yield KitServer(server, model, stats)


@contextlib.contextmanager
def decodes_with_pat(running: KitServer, case: type[Any]) -> Iterator[None]:
    """Lets a kit ask the server. Fails if pat has decoded nothing meanwhile."""
    running.stats.new()
    running.lend(case)
    yield
    counted = running.stats.new()
    assert counted["plans_built"] + counted["plans_reused"] > 0
