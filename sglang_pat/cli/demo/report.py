"""The demo's result, as a table and as JSON."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_pat.bench.answers import Candidate
from sglang_pat.cli.demo.workload import DemoRequest, Words

# Two tokens tie if their log-probabilities differ by at most this. In float16, the error of the gap
# between the best two tokens has a median of 0.005 and a maximum of 0.05 (1,280 tokens of the demo,
# compared with float32).
TIE_LOGPROB = 0.05
SHOWN_ANSWERS = 3

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Served:
    """The result of one run.

    Attributes
    ----------
    tokens
        The new tokens of every request, in the order of the workload.
    seconds
        Time of the run, without the start of the engine.
    candidates
        The two most probable tokens at every position of every request, best first. None if the run
        is exact.
    stats
        The counters of pat. Empty for other backends.
    """

    tokens: list[list[int]]
    seconds: float
    candidates: list[list[list[Candidate]]] | None = None
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where the answers to a request differ.

    pat, own: the token that each run has there, or None if its answer has ended before.
    """

    request: int
    position: int
    pat: int | None
    own: int | None

    def describe(self, own_backend: str) -> str:
        """Return the difference as a line of text."""
        return (
            f"request {self.request}, new token {self.position}: pat gave {self.pat}, "
            f"{own_backend} gave {self.own}"
        )


def differences(pat: Sequence[Sequence[int]], own: Sequence[Sequence[int]]) -> list[Difference]:
    """Return the first difference of every request whose tokens differ."""
    found = []
    for request, (left, right) in enumerate(zip(pat, own, strict=True)):
        for position, (token, expected) in enumerate(zip_longest(left, right)):
            if token != expected:
                found.append(Difference(request, position, token, expected))
                break
    return found


def is_tie(difference: Difference, pat: Served, own: Served) -> bool:
    """Return True if the two tokens tie in both runs, within the rounding of float16.

    After a tie, the two runs continue with different texts, so later tokens cannot be compared.
    """
    tokens = {difference.pat, difference.own}
    for served in (pat, own):
        if served.candidates is None:
            return False
        best, second = served.candidates[difference.request][difference.position]
        if {best.token, second.token} != tokens or best.logprob - second.logprob > TIE_LOGPROB:
            return False
    return True


@dataclass(frozen=True)
class DemoReport:
    """Both runs of the demo, and pat's counters.

    stats: the fields of `PlanStats`, summed over the decode steps of the run.
    """

    own_backend: str
    pat: Served
    own: Served
    stats: dict[str, Any]

    @cached_property
    def ties(self) -> list[Difference]:
        """The differences that are ties. Empty in an exact run."""
        return [each for each in self._differences if is_tie(each, self.pat, self.own)]

    @cached_property
    def difference(self) -> Difference | None:
        """The first difference that is not a tie, or None."""
        return next((each for each in self._differences if each not in self.ties), None)

    @cached_property
    def _differences(self) -> list[Difference]:
        return differences(self.pat.tokens, self.own.tokens)

    @property
    def decode_steps(self) -> int:
        """Number of decode steps. Each step builds a plan or reuses the last one."""
        steps: int = self.stats["plans_built"] + self.stats["plans_reused"]
        return steps

    def print(self) -> None:
        """Print the table."""
        compared = list(zip(self.pat.tokens, self.own.tokens, strict=True))
        for tie in self.ties:
            left, right = compared[tie.request]
            compared[tie.request] = left[: tie.position], right[: tie.position]
        num_tokens = sum(len(expected) for _, expected in compared)
        identical = sum(
            token == expected for pair in compared for token, expected in zip(*pair, strict=False)
        )
        tied = f"{len(self.ties)} requests compared up to a tie" if self.ties else ""
        causes = self.stats["causes"]
        built = ", ".join(f"{name.replace('_', ' ')}: {causes[name]:,}" for name in sorted(causes))
        query_centric, planned, lower_bound = (
            self.stats[f"kv_tokens_{name}"] for name in ("query_centric", "planned", "lower_bound")
        )
        table = Table(
            title=f"pat against {self.own_backend}, the same requests",
            caption="Tokens are the same in every run. Steps, plans and KV tokens depend on when "
            "the requests arrive, and vary a little.",
        )
        table.add_column("")
        table.add_column("count", justify="right")
        table.add_column("", style="dim")
        table.add_row("tokens identical", f"{identical:,}/{num_tokens:,}", tied)
        table.add_row("decode steps", f"{self.decode_steps:,}", "")
        table.add_row("plans built", f"{self.stats['plans_built']:,}", built)
        table.add_row("plans reused", f"{self.stats['plans_reused']:,}", "")
        table.add_section()
        table.add_row(
            "KV tokens read by SGLang", f"{query_centric:,}", "each request reads its whole prompt"
        )
        table.add_row(
            "KV tokens read by pat", f"{planned:,}", f"{query_centric / planned:.2f} times fewer"
        )
        table.add_row(
            "KV tokens that are different",
            f"{lower_bound:,}",
            f"reading each once: {query_centric / lower_bound:.2f} times fewer",
        )
        console.print(table)

    def verdict(self) -> str:
        """Return a sentence: whether all tokens are equal, and how much less KV was read."""
        if self.difference is not None:
            return f"Tokens differ: {self.difference.describe(self.own_backend)}. Please report it."
        tokens = f"All {sum(map(len, self.own.tokens)):,} tokens are equal"
        if self.ties:
            tokens += f" ({len(self.ties)} requests compared up to a tie of two tokens)"
        ratio = self.stats["kv_tokens_query_centric"] / self.stats["kv_tokens_planned"]
        return f"{tokens}, and pat read {ratio:.1f} times less KV than {self.own_backend}."

    def as_dict(self) -> dict[str, Any]:
        """Return the result and the machine's description, ready for JSON."""
        return {
            "meta": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                **{name: version(name) for name in ("sglang-pat", "sglang", "torch")},
            },
            "requests": len(self.own.tokens),
            "tokens": sum(map(len, self.own.tokens)),
            "first_difference": asdict(self.difference) if self.difference else None,
            "ties": [asdict(tie) for tie in self.ties],
            "verdict": self.verdict(),
            "decode_steps": self.decode_steps,
            "stats": self.stats,
            "seconds": {"pat": self.pat.seconds, self.own_backend: self.own.seconds},
        }


def show_answers(requests: Sequence[DemoRequest], tokens: Sequence[Sequence[int]]) -> None:
    """Print the question that ends a prompt, and pat's answer, for each of the first requests."""
    words = Words()
    table = Table(title="what the model answered", show_lines=True)
    table.add_column("end of the prompt")
    table.add_column("answer by pat")
    for request, answer in [*zip(requests, tokens, strict=True)][:SHOWN_ANSWERS]:
        table.add_row(Text(request.question), Text(words.answer([*answer]).strip()))
    console.print(table)
