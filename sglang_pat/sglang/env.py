"""Every SGLANG_PAT_* environment variable: what it means, its type, its default.

Beside the pipeline: read once, when SGLang builds the backend, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_pat import support
from sglang_pat.attention import GROWTH_TOKENS
from sglang_pat.output_file import problem_with

PREFIX = "SGLANG_PAT_"
_MAX_GROWTH_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Environment:
    """The variables' values.

    policy: SGLANG_PAT_POLICY. How packs are formed, one of `support.POLICIES`.
    debug: SGLANG_PAT_DEBUG, 0 or 1. Check every decode step, planned or reused, against freshly
        read paths and the tree's own KV slots, and raise on a mismatch. Slow: it synchronises the
        device.
    stats_file: SGLANG_PAT_STATS_FILE. Where the counters are written as JSON, within 0.1 s of a
        decode step. `{pid}` in it stands for the id of the scheduler process: one per replica.
    growth_tokens: SGLANG_PAT_GROWTH_TOKENS, 1 to 65536. A plan is made anew when a request has
        grown by more tokens than this. 1 plans at every other step: to measure what planning costs.
    """

    policy: str = "memory"
    debug: bool = False
    stats_file: Path | None = None
    growth_tokens: int = GROWTH_TOKENS

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Parse the variables of this process, or those given.

        ValueError names an unknown SGLANG_PAT_ variable, or a value that is not allowed.
        """
        given = dict(os.environ if variables is None else variables)
        ours = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        policy = ours.pop(PREFIX + "POLICY", "memory")
        debug = ours.pop(PREFIX + "DEBUG", "0")
        stats_file = ours.pop(PREFIX + "STATS_FILE", None)
        growth_tokens = ours.pop(PREFIX + "GROWTH_TOKENS", str(GROWTH_TOKENS))
        if ours:
            names = ("POLICY", "DEBUG", "STATS_FILE", "GROWTH_TOKENS")
            allowed = ", ".join(PREFIX + name for name in names)
            raise ValueError(f"unknown variable {sorted(ours)[0]}; allowed: {allowed}")
        if policy not in support.POLICIES:
            raise _bad_value("POLICY", policy, ", ".join(support.POLICIES))
        if debug not in ("0", "1"):
            raise _bad_value("DEBUG", debug, "0, 1")
        if stats_file is not None and problem_with(Path(stats_file)) is not None:
            raise _bad_value("STATS_FILE", stats_file, "a file's path in a folder that exists")
        if not growth_tokens.isdecimal() or not 1 <= int(growth_tokens) <= _MAX_GROWTH_TOKENS:
            raise _bad_value("GROWTH_TOKENS", growth_tokens, f"1 to {_MAX_GROWTH_TOKENS}")
        path = None if stats_file is None else Path(stats_file.replace("{pid}", str(os.getpid())))
        return cls(policy, debug == "1", path, int(growth_tokens))


def _bad_value(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"{PREFIX}{name}={value!r}; allowed: {allowed}")
