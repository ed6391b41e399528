"""Kernel time of sampled steps on a GPU: pat, FlashInfer and FA3 on the same paths and lengths.

Beside the replay, with `--device cuda`. One layer's K and V are made up; every tree node and every
private tail gets slots of its own, contiguous as after a prefill.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_pat.attention import PackAttention
from sglang_pat.batch import DecodeBatch
from sglang_pat.bench import peers, timing
from sglang_pat.bench.token_table import token_table
from sglang_pat.replay.options import TimeModel
from sglang_pat.replay.result import StepRow
from sglang_pat.workload.models import ModelShape

_ROUNDS = 10
_SPARE_SLOTS = 1 << 16  # private copies of a prompt that is being joined with the tree


class KernelTimes:
    """Measures steps of one model. Allocates K and V of one layer for `kv_tokens`.

    A contender that is not installed is left out from the beginning. RuntimeError without a GPU.
    """

    def __init__(self, model: ModelShape, kv_tokens: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("--device cuda needs an NVIDIA GPU and a torch that sees it")
        self._model = model
        shape = (kv_tokens + _SPARE_SLOTS, model.num_kv_heads, model.head_dim)
        self._k_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self._v_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self._workspace = torch.empty(peers.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._attention = PackAttention(
            model.num_qo_heads,
            model.num_kv_heads,
            model.head_dim,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self._contenders = self._installed()

    def __call__(self, batch: DecodeBatch) -> dict[str, float]:
        """Milliseconds of one layer, by contender, with a cold L2."""
        table = token_table(batch.read_paths(), batch.seq_lens)
        num_requests = len(batch.seq_lens)
        step = peers.DecodeTensors(
            q=torch.randn(
                num_requests,
                self._model.num_qo_heads,
                self._model.head_dim,
                dtype=torch.bfloat16,
                device="cuda",
            ),
            num_kv_heads=self._model.num_kv_heads,
            req_to_token=torch.from_numpy(table).cuda(),
            seq_lens=torch.from_numpy(batch.seq_lens.astype(np.int64)).cuda(),
        )
        rows = torch.arange(num_requests, device="cuda")
        self._attention.plan(
            batch, req_to_token=step.req_to_token, req_pool_indices=rows, seq_lens=step.seq_lens
        )
        out = torch.empty_like(step.q)
        layers: dict[str, Callable[[], object]] = {
            "pat": lambda: self._attention.run(step.q, self._k_cache, self._v_cache, out=out)
        }
        for name, prepare in self._contenders.items():
            layers[name] = self._bound(prepare(step))
        graphs = {name: timing.capture(layer).replay for name, layer in layers.items()}
        measured = timing.interleaved_us(graphs, rounds=_ROUNDS)
        return {name: round(us / 1000, 5) for name, us in measured.items()}

    def _bound(self, layer: peers.Layer) -> Callable[[], object]:
        return lambda: layer(self._k_cache, self._v_cache)

    def _installed(self) -> dict[str, Callable[[peers.DecodeTensors], peers.Layer]]:
        found: dict[str, Callable[[peers.DecodeTensors], peers.Layer]] = {}
        try:
            import flashinfer  # noqa: F401

            found["flashinfer"] = lambda step: peers.flashinfer(step, self._workspace)
        except ImportError:
            pass
        try:
            from sgl_kernel import flash_attn  # noqa: F401

            if torch.cuda.get_device_capability()[0] == 9:
                found["fa3"] = peers.fa3
        except ImportError:
            pass
        return found


def mean_times(
    rows: list[StepRow], model: ModelShape, time: TimeModel
) -> dict[str, dict[str, float]]:
    """Over the sampled steps, by contender: `attention_ms`, all layers; `tpot_ms`, estimated: that
    and the weights read once."""
    samples = [row["gpu"] for row in rows if "gpu" in row]
    if not samples:
        return {}
    weights_ms = 1000 * model.weight_bytes / time.bytes_per_second
    result = {}
    for name in samples[0]:
        attention = float(np.mean([sample[name] for sample in samples])) * model.num_layers
        result[name] = {
            "attention_ms": round(attention, 4),
            "tpot_ms": round(attention + weights_ms, 4),
        }
    return result
