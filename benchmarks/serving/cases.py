"""What is served: batches of requests that start together, and the requests of SGLang's client."""

from __future__ import annotations

from dataclasses import dataclass

from serving.models import BANDWIDTH, TINY, ModelShape
from sglang_pat.bench.cases import Case


def floor_ms(case: Case, model: ModelShape) -> float:
    """Time of a decode step that moves each weight and each KV token once, in the middle of the
    generated tokens."""
    tokens = case.groups * case.prefix + case.batch * (case.private + case.generated / 2)
    return 1000 * (model.weight_bytes + tokens * model.kv_bytes_per_token) / BANDWIDTH


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of SGLang's client: `groups` system prompts, a question each, arriving at random for
    `seconds` at each of the `rates` (requests per second)."""

    groups: int
    system_prompt: int
    question: int
    answer: int
    seconds: float
    rates: tuple[float, ...]

    def per_group(self, rate: float) -> int:
        """Requests of each group at `rate`; at least one."""
        return max(1, round(rate * self.seconds / self.groups))


_CASES = (
    Case(128, 8192, 256, 128),
    Case(64, 2048, 128, 128),
    Case(128, 0, 1024, 128),
    Case(256, 1024, 64, 128),
    # A rollout of reinforcement learning: 8 samples of each of 32 prompts.
    Case(256, 1024, 0, 512, groups=32, temperature=1.0),
)
_TINY_CASES = (Case(6, 100, 10, 48), Case(6, 60, 0, 48, groups=3, temperature=1.0))


def cases_of(model: ModelShape) -> tuple[Case, ...]:
    return _TINY_CASES if model.name == TINY else _CASES


def traffic_of(model: ModelShape) -> Traffic:
    if model.name == TINY:
        return Traffic(2, 64, 8, 8, seconds=3, rates=(1.0, 2.0))
    return Traffic(8, 4096, 128, 256, seconds=20, rates=(4.0, 8.0, 16.0, 32.0))
