"""What a replay is told: the server that is simulated, and what is counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_pat.replay.models import ModelShape, model_shape
from sglang_pat.support import POLICIES

DEFAULT_POLICIES = ("memory", "paper", "compute", "per-node")
# CTAs per KV head of an H100: two per SM over 8 KV heads.
DEFAULT_WORKERS = 33


@dataclass(frozen=True, slots=True)
class TimeModel:
    """How long steps take: what the simulated clock runs by.

    A decode step reads the weights and the KV of its requests once each; a prefill computes its new
    tokens.
    """

    bytes_per_second: float = 2.8e12  # of an H100, as far as kernels reach it
    flops_per_second: float = 4.5e14
    overhead_seconds: float = 0.002  # of a step, whatever it does

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
    """Everything that decides what a replay does. ValueError for values that are not allowed.

    kv_tokens: of the KV pool. max_batch: requests decoded together at most. prefill_tokens: new
    tokens that one prefill takes on; the request that exceeds them is the last. policies: the first
    one decides when a plan is built, and is the one whose planning is timed. sample: a row of the
    result every so many steps; max_rows: of those, at most. time_scale: requests arrive this many
    times as fast as the trace says. forest_step: step whose forest is kept, None: the one that
    shares most. workers: CTAs per KV head.
    """

    model: ModelShape = field(default_factory=lambda: model_shape("llama-3-8b"))
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
    workers: int = DEFAULT_WORKERS
    time: TimeModel = TimeModel()

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "page_size", "max_batch", "prefill_tokens", "sample", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_tokens < 2 * self.page_size:
            raise ValueError(f"kv_tokens must be two pages at least, got {self.kv_tokens}")
        if self.max_rows < 0 or self.max_rows == 1:
            raise ValueError(f"max_rows must be 0 or at least 2, got {self.max_rows}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")
        if not self.time_scale > 0:
            raise ValueError(f"time_scale must be positive, got {self.time_scale}")
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError(f"policies must be named once each, got {', '.join(self.policies)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"a policy is one of {', '.join(POLICIES)}, got {policy}")

    def as_dict(self) -> dict[str, Any]:
        """For the result."""
        return asdict(self)
