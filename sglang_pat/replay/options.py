"""Options of a replay: the simulated server, what is counted, and presets of published experiments.

Every stage of the replay reads `ReplayOptions`. `cli/replay.py` makes them of a command line.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from sglang_pat.support import POLICIES
from sglang_pat.workload.models import (
    DEFAULT_GPU,
    DEFAULT_MODEL,
    GPUS,
    Gpu,
    ModelShape,
    model_shape,
)

DEFAULT_POLICIES = ("memory", "paper", "compute", "per-node")
FIGURE_10 = "pat-figure-10"

# The parts of their peaks that kernels reached on an H100: 2.8 TB/s and 450 TFLOP/s.
_BANDWIDTH_REACHED = 2.8 / 3.35
_FLOPS_REACHED = 450 / 989


@dataclass(frozen=True, slots=True)
class TimeModel:
    """The simulated clock: a decode step reads weights and KV once, a prefill computes its tokens.

    Communication between GPUs is not modelled.
    """

    bytes_per_second: float
    flops_per_second: float
    overhead_seconds: float = 0.002  # of every step

    @classmethod
    def of(cls, gpu: Gpu) -> TimeModel:
        return cls(
            bytes_per_second=round(gpu.bytes_per_second * _BANDWIDTH_REACHED),
            flops_per_second=round(gpu.flops_per_second * _FLOPS_REACHED),
        )

    def decode_seconds(self, model: ModelShape) -> tuple[float, float]:
        """(of a step without KV, more per KV token)."""
        return (
            self.overhead_seconds + model.weight_bytes / self.bytes_per_second,
            model.kv_bytes_per_token / self.bytes_per_second,
        )

    def prefill_seconds(self, model: ModelShape) -> tuple[float, float]:
        """(of a prefill, more per new token)."""
        parameters = model.weight_bytes / model.dtype_bytes
        return self.overhead_seconds, 2 * parameters / self.flops_per_second


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Everything that decides what a replay does. ValueError names a value that is not allowed.

    Attributes
    ----------
    model
        The part of the model on one GPU.
    gpu, tp
        The GPU type, and how many of them share the model.
    kv_tokens
        Tokens that the KV pool of one GPU holds.
    max_batch
        Requests that are decoded together at most.
    prefill_tokens
        New tokens of one prefill. The request that exceeds them is the last one admitted.
    policies
        Packing policies. The first one decides when a plan is built; its planning is timed.
    sample, max_rows
        A row of the result every `sample` steps, thinned out beyond `max_rows`. 0 rows: none.
    time_scale
        Requests arrive this many times as fast as the trace says.
    limit
        Requests that are replayed at most. None: all.
    forest_step
        The step whose prefix forest is kept. None: the step that shares most.
    """

    model: ModelShape = field(default_factory=lambda: model_shape(DEFAULT_MODEL))
    gpu: Gpu = GPUS[DEFAULT_GPU]
    tp: int = 1
    kv_tokens: int = 400_000
    page_size: int = 1
    max_batch: int = 128
    prefill_tokens: int = 8192
    policies: tuple[str, ...] = DEFAULT_POLICIES
    sample: int = 1
    max_rows: int = 2048
    time_scale: float = 1.0
    limit: int | None = None
    seed: int = 0
    forest_step: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size", "max_batch", "prefill_tokens", "sample", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_tokens < 2 * self.page_size:
            raise ValueError(
                f"kv_tokens must be at least two pages of {self.page_size} tokens, "
                f"got {self.kv_tokens}"
            )
        if self.max_rows < 0 or self.max_rows == 1:
            raise ValueError(f"max_rows must be 0 or at least 2, got {self.max_rows}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if self.forest_step is not None and self.forest_step < 0:
            raise ValueError(f"forest_step must be at least 0, got {self.forest_step}")
        if not (self.time_scale > 0 and math.isfinite(self.time_scale)):
            raise ValueError(f"time_scale must be a finite number above 0, got {self.time_scale}")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies must be named once each, got {', '.join(self.policies)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"a policy is one of {', '.join(POLICIES)}, got {policy!r}")

    @property
    def workers(self) -> int:
        """CTAs that share the work of one KV head."""
        return self.gpu.workers(self.model.num_kv_heads)

    @property
    def time(self) -> TimeModel:
        """How long the steps of this model take on this GPU."""
        return TimeModel.of(self.gpu)

    def as_dict(self) -> dict[str, Any]:
        """For the result: every option, and what follows from them."""
        return {**asdict(self), "workers": self.workers, "time": asdict(self.time)}


class Preset(NamedTuple):
    """A published experiment. options: by their names on the command line, with underscores."""

    description: str
    options: dict[str, Any]


PRESETS = {
    "pat-figure-12": Preset(
        "PAT's ablation: its shared synthetic trees with the heads of Llama 3 8B, by policy",
        {
            "generate": FIGURE_10,
            "policies": "memory,paper,compute,per-node",
            "kv_tokens": 4_000_000,
            "max_batch": 1024,
            "prefill_tokens": 1 << 30,
            "max_rows": 0,
            "forest_step": 0,
        },
    ),
    "pat-figure-14": Preset(
        "PAT's scheduling overhead: conversation at 5 requests/s, or --generate toolagent at 8",
        {
            "generate": "conversation",
            "limit": 3000,
            "policies": "memory",
            "max_batch": 256,
            "max_rows": 0,
        },
    ),
}
