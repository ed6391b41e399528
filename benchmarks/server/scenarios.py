"""The scenarios of `compare`: the model, servers and batches of each.

The first server of a scenario runs pat. If a batch has a least value, the ratio of every other
server's time per output token to the first's must reach it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from common.models import TINY
from server.jobs import JOBS, Job
from sglang_pat.bench.cases import FIRST_TOKEN, Case
from sglang_pat.bench.server import Contender

PAGE = 64
# Tokens of an answer. With 104, all requests run in a dozen slices. Long prompts need longer
# answers, because they are prefilled while the first requests are already answered.
_TOKENS, _PROMPTS_PER_TOKEN = 104, 12_000
_FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend: its name here, and the arguments for SGLang."""

    name: str
    backend: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def contender(self) -> Contender:
        return Contender(self.name, self.backend)


_PAGES, _FA3_PREFILL = {"page_size": PAGE}, {"prefill_attention_backend": "fa3"}
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("pat", "pat"),
        Backend("pat-64", "pat", _PAGES),
        Backend("pat-fp8", "pat", _FP8),
        Backend("default"),
        Backend("fa3", "fa3"),
        Backend(
            "xqa",
            None,
            {
                "prefill_attention_backend": "fa3",
                "decode_attention_backend": "trtllm_mha",
                **_PAGES,
            },
        ),
        Backend(
            "flashmla",
            None,
            {"prefill_attention_backend": "fa3", "decode_attention_backend": "flashmla", **_PAGES},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that start together. least: lower limit of every other server's time / pat's."""

    name: str
    case: Case
    least: float | None = None

    def smaller(self) -> Batch:
        """Return a smaller batch, for a toy model."""
        case = self.case
        small = Case(
            min(case.batch, 4),
            min(case.prefix, 256),
            min(case.private, PAGE),
            48,
            min(case.groups, 2),
        )
        return replace(self, case=small)


class Chat(Case):
    """Requests like those of a chat service, with lognormal lengths and a median of 300 tokens."""

    def lengths(self) -> list[int]:
        source = random.Random(0)
        drawn = (round(source.lognormvariate(5.7, 0.8)) for _ in range(self.batch))
        return [min(self.private, max(16, length)) for length in drawn]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        source = random.Random(0)
        words = range(FIRST_TOKEN, vocab_size - FIRST_TOKEN)
        return [source.choices(words, k=length) for length in self.lengths()]

    @property
    def pool_tokens(self) -> int:
        return sum(self.lengths()) + self.batch * self.generated


def shared(
    batch: int,
    prefix: int,
    private: int,
    least: float | None = None,
    *,
    groups: int = 1,
    tokens: int | None = None,
) -> Batch:
    """Return a batch with one prefix, or one per group. tokens: tokens of an answer."""
    if tokens is None:
        tokens = _TOKENS + batch * (prefix + private) // _PROMPTS_PER_TOKEN
    several = f"{groups} x " if groups > 1 else ""
    common = f"({several}{prefix:,} shared) + " if prefix else ""
    name = f"{batch} x {common}{private:,}"
    return Batch(name, Case(batch, prefix, private, tokens, groups), least)


def alone(batch: int, tokens: int, least: float | None = None) -> Batch:
    """Return a batch that shares nothing."""
    return shared(batch, 0, tokens, least)


def chat(batch: int, least: float | None = None) -> Batch:
    """Return a batch of requests of different lengths, up to 3,000 tokens."""
    return Batch(f"{batch} ragged", Chat(batch, 0, 3000, _TOKENS), least)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Servers of one model, and their batches, the most important first.

    arguments: arguments of all servers.
    """

    shape: str
    backends: tuple[str, ...]
    asked: tuple[Batch | Job, ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> list[Batch]:
        return [each for each in self.asked if isinstance(each, Batch)]

    @property
    def jobs(self) -> list[Job]:
        return [each for each in self.asked if isinstance(each, Job)]

    @property
    def dp_groups(self) -> int:
        """Return the number of groups of ranks that share the requests, each with its own cache."""
        groups: int = self.arguments.get("dp_size", 1)
        return groups

    @property
    def gpus(self) -> int:
        count: int = self.arguments.get("tp_size", 1)
        return count


# SGLang's recommendation for DeepSeek-V3: three draft steps, four tokens to verify.
_MTP = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


# Lengths are multiples of 64, for models with recurrent states or pages.
_HYBRID = (shared(64, 8192, 256, 1.0), alone(64, 1024, 0.98))
_LATENT = (shared(64, 16_384, 512, 1.2), alone(128, 512, 0.98))
# The first has the shortest prompts, so that a server that is slow to prefill is timed, too.
_LONG_LATENT = (alone(64, 1024, 0.98), shared(64, 16_384, 512), shared(24, 60_032, 1024))
_SHORT = (alone(1, 500, 0.99), alone(4, 700, 0.99), chat(200, 0.99))
_CONTEXT = 1024  # tokens of the requests in "sharing"
SCENARIOS = {
    "long-8b": Scenario(
        "llama-3-8b",
        ("pat", "fa3"),
        (
            shared(24, 32_768, 1024, 3.0),
            shared(16, 65_536, 2048, 3.0),
            alone(64, 1024, 0.99),
            shared(64, 32_768, 1024, 3.0),
            shared(16, 131_072, 6016),
            alone(8, 16_000, 0.99),
            alone(1, 500, 0.99),
        ),
    ),
    # The pool holds each batch. It is so small that both servers fit on a GPU of 80 GB.
    "8b": Scenario(
        "llama-3-8b-whole",
        ("pat", "fa3"),
        (
            shared(64, 32_768, 1024, 3.0),
            shared(128, 8192, 256, 2.0),
            alone(96, 1024, 0.99),
            shared(256, 1024, 0, 1.0, groups=32),
            alone(1, 500, 0.99),
            shared(24, 32_768, 1024, 3.0),
            shared(16, 65_536, 2048, 3.0),
            shared(64, 2048, 128, 1.0),
            alone(4, 700, 0.99),
            chat(200, 0.99),
            shared(256, 1024, 64, 1.0),
            alone(8, 16_000, 0.99),
            alone(1, 100_000, 0.99),
        ),
        {"max_total_tokens": 136_000},
    ),
    "70b-rank": Scenario(
        "llama-3-70b-rank",
        ("pat", "fa3"),
        (
            shared(24, 64_000, 2048, 2.0),
            shared(64, 32_768, 1024, 2.0),
            alone(128, 1024, 0.99),
            shared(128, 8192, 256, 1.0),
            *_SHORT,
            shared(16, 131_072, 6016),
            alone(8, 16_000, 0.99),
            alone(1, 100_000, 0.99),
        ),
    ),
    # Shows when pat pays, by batch size and shared fraction of the KV.
    "sharing": Scenario(
        "llama-3-8b",
        ("pat", "fa3"),
        tuple(
            shared(batch, prefix, _CONTEXT - prefix)
            for batch in (128, 16)
            for prefix in (0, _CONTEXT // 2, round(0.9 * _CONTEXT))
        ),
    ),
    **{
        name: Scenario(
            name,
            ("pat", "default"),
            (shared(40, 58_944, 6528, 2.0), *_HYBRID, shared(16, 131_072, 6016)),
        )
        for name in ("qwen3-next", "qwen3.6")
    },
    "glm-4.6": Scenario(
        "glm-4.6",
        ("pat", "default"),
        (shared(24, 60_032, 2048, 1.5), alone(64, 1024, 0.99), shared(64, 32_768, 1024, 1.5)),
    ),
    "gpt-oss": Scenario(
        "gpt-oss-20b",
        ("pat", "default"),
        (shared(40, 32_768, 2048, 1.5), *_HYBRID, alone(1, 500, 0.98)),
    ),
    "gemma-3": Scenario("gemma-3-12b", ("pat", "default"), (shared(128, 8192, 256, 1.5), *_HYBRID)),
    "gemma-4": Scenario(
        "gemma-4-26b", ("pat", "default"), (shared(64, 16_384, 300, 2.0), alone(64, 1024, 1.0))
    ),
    "olmo-3": Scenario("olmo-3-32b", ("pat", "default"), (shared(128, 8192, 960, 1.3), *_HYBRID)),
    "k2-rank": Scenario(
        "k2-rank",
        ("pat", "fa3", "flashmla"),
        (
            shared(32, 60_032, 1024, 2.0),
            alone(64, 1024, 0.98),
            shared(64, 16_384, 512, 1.3),
            shared(16, 131_072, 6016),
        ),
    ),
    "v3-rank": Scenario(
        "v3-rank",
        ("pat", "fa3", "flashmla"),
        (shared(24, 60_032, 1024, 1.6), alone(64, 1024, 0.98), *_LATENT),
    ),
    "kimi-linear": Scenario(
        "kimi-linear",
        ("pat", "default"),
        (shared(64, 16_384, 512, 1.15), alone(64, 1024, 0.98), shared(24, 60_032, 1024)),
    ),
    # With random weights, hardly any draft is accepted, so a token takes a verify step. 8 heads
    # with 4 draft tokens fill half of a tile. With V3's 16 heads, a model with 16-bit KV falls
    # back.
    "k2-mtp": Scenario(
        "k2-rank",
        ("pat", "fa3"),
        (shared(64, 16_384, 512, 1.2), alone(64, 1024, 0.99), shared(24, 60_032, 1024, 1.2)),
        _MTP,
    ),
    # With fp8 KV, FA3 converts the whole pool in every layer, so that pat pays even with full
    # tiles.
    "v3-mtp-fp8": Scenario(
        "v3-rank",
        ("pat", "fa3"),
        (shared(64, 16_384, 512, 1.2), alone(64, 1024, 0.99), shared(24, 60_032, 1024, 1.2)),
        {"max_total_tokens": 1_200_000} | _FP8 | _MTP,
    ),
    "v2-lite": Scenario("deepseek-v2-lite", ("pat", "fa3", "flashmla"), _LATENT),
    "glm-4.7-flash": Scenario("glm-4.7-flash", ("pat", "fa3", "flashmla"), _LATENT),
    "page-64": Scenario(
        "llama-3-8b",
        ("pat-64", "xqa"),
        (
            shared(128, 8192, 256, 1.0),
            alone(120, 640, 0.99),
            shared(24, 32_768, 1024, 1.0),
            alone(1, 512, 0.99),
            alone(4, 704, 0.99),
        ),
    ),
    "fp8-8b": Scenario(
        "llama-3-8b",
        ("pat", "fa3", "xqa"),
        (
            shared(128, 8192, 256, 1.0),
            alone(128, 1024, 0.98),
            shared(24, 32_768, 1024, 1.0),
            alone(6, 14_016, 0.98),
            alone(1, 512, 0.98),
        ),
        _FP8,
    ),
    # Both servers run pat, to show the gain of one-byte KV over two bytes.
    "fp8-gain": Scenario(
        "llama-3-8b",
        ("pat-fp8", "pat"),
        (shared(128, 8192, 256, 1.1), alone(128, 1024, 1.1)),
    ),
    "fp8-v2-lite": Scenario(
        "deepseek-v2-lite",
        ("pat", "fa3", "flashmla"),
        (shared(64, 16_384, 512, 1.3), alone(128, 512, 0.98), shared(32, 60_032, 1024)),
        _FP8,
    ),
    # FA3 must not split a request's KV in this mode.
    "deterministic": Scenario(
        "llama-3-8b",
        ("pat", "fa3"),
        (shared(128, 8192, 256, 1.5), alone(128, 1024, 0.99), alone(4, 20_000, 1.3)),
        {"enable_deterministic_inference": True},
    ),
    "jobs": Scenario("llama-3-8b-whole", ("pat", "default"), JOBS),
    # Steps are so slow that all requests arrive within few steps.
    **{
        f"70b-tp{ranks}": Scenario(
            "llama-3-70b",
            ("pat", "fa3"),
            (
                shared(128, 8192, 256, least_at_8k, tokens=_TOKENS),
                shared(24, 64_000, 2048, least_at_64k, tokens=_TOKENS),
                alone(1, 500, 0.995),
                alone(128, 1024, 1.0),
            ),
            {"tp_size": ranks},
        )
        for ranks, least_at_8k, least_at_64k in ((4, 1.45, 2.3), (8, 1.3, 1.8))
    },
    **{
        f"{name}-tp{ranks}": Scenario(name, ("pat", "fa3"), _LONG_LATENT, {"tp_size": ranks})
        for name in ("v3", "k2")
        for ranks in (4, 8)
    },
    # Two groups of ranks, each with half of the requests and all heads.
    **{
        f"k2-dp2-tp{ranks}": Scenario(
            "k2",
            ("pat", "fa3"),
            _LONG_LATENT,
            {"tp_size": ranks, "dp_size": 2, "enable_dp_attention": True},
        )
        for ranks in (4, 8)
    },
    # As in "k2-mtp", draft tokens fill half of a tile: two with the 16 heads of TP 4, four with 8.
    "k2-mtp-tp4": Scenario(
        "k2",
        ("pat", "fa3"),
        _LONG_LATENT,
        {"tp_size": 4} | _MTP | {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2},
    ),
    "k2-mtp-tp8": Scenario("k2", ("pat", "fa3"), _LONG_LATENT, {"tp_size": 8} | _MTP),
}


def on_cpu(scenario: Scenario) -> Scenario:
    """Return the scenario for a toy model: the same servers, and similar batches."""
    asked = [each.smaller() for each in scenario.asked]
    return Scenario(TINY, scenario.backends, tuple(asked))
