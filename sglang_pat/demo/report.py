"""The demo's result: what was compared and counted, as a table, as JSON, and as an exit status.

Beside the pipeline, last step of the demo.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from sglang_pat.demo.engine import Served

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the runs disagree. None in place of a token: that output had ended."""

    request: int
    position: int
    pat: int | None
    own: int | None

    def describe(self, own_backend: str) -> str:
        """One line for a person."""
        return (
            f"request {self.request}, new token {self.position}: pat gave {self.pat}, "
            f"{own_backend} gave {self.own}"
        )


def first_difference(
    pat: Sequence[Sequence[int]], own: Sequence[Sequence[int]]
) -> Difference | None:
    """The first request, and in it the first position, whose tokens differ; None if none does."""
    for request, (left, right) in enumerate(zip(pat, own, strict=True)):
        for position in range(max(len(left), len(right))):
            token = left[position] if position < len(left) else None
            expected = right[position] if position < len(right) else None
            if token != expected:
                return Difference(request, position, token, expected)
    return None


@dataclass(frozen=True)
class Report:
    """Both runs, and the counters that the backend `pat` wrote.

    stats: the fields of `PlanStats`, summed over the decode steps of the run.
    """

    own_backend: str
    pat: Served
    own: Served
    stats: dict[str, Any]

    @cached_property
    def difference(self) -> Difference | None:
        """Where the runs disagree first."""
        return first_difference(self.pat.tokens, self.own.tokens)

    @property
    def decode_steps(self) -> int:
        """Each step either builds a plan or reuses the last one."""
        steps: int = self.stats["plans_built"] + self.stats["plans_reused"]
        return steps

    def print(self) -> None:
        """The table, and below it the first difference if there is one."""
        num_tokens = sum(map(len, self.own.tokens))
        identical = sum(
            token == expected
            for pair in zip(self.pat.tokens, self.own.tokens, strict=True)
            for token, expected in zip(*pair, strict=False)
        )
        causes = self.stats["causes"]
        built = ", ".join(f"{name.replace('_', ' ')}: {causes[name]:,}" for name in sorted(causes))
        query_centric, planned, lower_bound = (
            self.stats[f"kv_tokens_{name}"] for name in ("query_centric", "planned", "lower_bound")
        )
        table = Table(title=f"pat against {self.own_backend}, the same requests")
        table.add_column("")
        table.add_column("count", justify="right")
        table.add_column("", style="dim")
        table.add_row("tokens identical", f"{identical:,}/{num_tokens:,}", "")
        table.add_row("decode steps", f"{self.decode_steps:,}", "")
        table.add_row("plans built", f"{self.stats['plans_built']:,}", built)
        table.add_row("plans reused", f"{self.stats['plans_reused']:,}", "")
        table.add_section()
        table.add_row(
            "KV tokens, query-centric", f"{query_centric:,}", "each request reads its own"
        )
        table.add_row(
            "KV tokens, pat", f"{planned:,}", f"{query_centric / planned:.2f} times fewer"
        )
        table.add_row(
            "KV tokens, lower bound",
            f"{lower_bound:,}",
            f"each node once: {query_centric / lower_bound:.2f} times fewer",
        )
        console.print(table)
        if self.difference is not None:
            console.print(f"[bold red]MISMATCH[/] {self.difference.describe(self.own_backend)}")

    def as_dict(self) -> dict[str, Any]:
        """The result and where it was obtained, ready for JSON."""
        return {
            "meta": {
                "python": platform.python_version(),
                "machine": platform.machine(),
                **{name: version(name) for name in ("sglang-pat", "sglang", "torch")},
            },
            "requests": len(self.own.tokens),
            "tokens": sum(map(len, self.own.tokens)),
            "first_difference": asdict(self.difference) if self.difference else None,
            "decode_steps": self.decode_steps,
            "stats": self.stats,
            "seconds": {"pat": self.pat.seconds, self.own_backend: self.own.seconds},
        }
