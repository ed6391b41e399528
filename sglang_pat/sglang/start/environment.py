"""All SGLANG_PAT_* environment variables, with their meaning, type and default.

They are read twice: while SGLang resolves its arguments, so that mistakes show before the model is
loaded, and when SGLang builds the backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sglang_pat import support
from sglang_pat.executors.kernel_cache import CACHE_VARIABLE, default_cache
from sglang_pat.messages import listed, quoted
from sglang_pat.output_file import problem_with

PREFIX = "SGLANG_PAT_"
_MAX_GROWTH_TOKENS = 1 << 16
# The values that are allowed, the default first.
_CHOICES = {"DEBUG": ("0", "1", "ranks"), "STRICT": ("0", "1"), "BATCH_INVARIANT": ("0", "1")}


@dataclass(frozen=True, slots=True)
class Environment:
    """The variables' values.

    Attributes
    ----------
    policy
        SGLANG_PAT_POLICY. How requests are divided into packs: one of `support.POLICIES`.
    debug
        SGLANG_PAT_DEBUG, 0, 1 or ranks. 1: check every decode step, planned or reused, against
        freshly read paths and the tree's own KV slots, and raise on a mismatch. Slow: each check
        synchronises the device. 1 or ranks: compare each new plan with the plans of the ranks that
        have the same requests, and raise if the plans differ.
    strict
        SGLANG_PAT_STRICT, 0 or 1. Refuse to start if the model, or one of its layers, would fall
        back to SGLang's default backend.
    stats_file
        SGLANG_PAT_STATS_FILE. The path of a JSON file with the counters, written within 0.1 s of a
        decode step. `{pid}` in the path stands for the id of the scheduler process. Each replica
        writes a file. With data-parallel attention, only the first rank writes one.
    growth_tokens
        SGLANG_PAT_GROWTH_TOKENS, 1 to 65536. A new plan is made when a request has grown by more
        tokens than this, or earlier (`PackAttention`). With 1, every other step is planned, which
        serves to measure the cost of planning.
    kernel_cache
        SGLANG_PAT_KERNEL_CACHE. The folder of compiled kernels (`executors/kernel_cache.py`).
    batch_invariant
        SGLANG_PAT_BATCH_INVARIANT, 0 or 1. Make a request's attention bitwise the same in any
        batch. `--enable-deterministic-inference` turns it on too.
    """

    policy: str = "memory"
    debug: str = "0"
    strict: bool = False
    stats_file: Path | None = None
    growth_tokens: int = support.GROWTH_TOKENS
    kernel_cache: Path = field(default_factory=lambda: default_cache({}))
    batch_invariant: bool = False

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Parse and check the variables of an environment, by default this process's.

        Raises ValueError that names the variable if a SGLANG_PAT_ variable is unknown, or has a
        value that is not allowed (such as a stats file that cannot be written).
        """
        given = os.environ if variables is None else variables
        ours = {name: value for name, value in given.items() if name.startswith(PREFIX)}
        policy = ours.pop(PREFIX + "POLICY", "memory")
        chosen = {name: ours.pop(PREFIX + name, values[0]) for name, values in _CHOICES.items()}
        stats_file = ours.pop(PREFIX + "STATS_FILE", None)
        growth_tokens = ours.pop(PREFIX + "GROWTH_TOKENS", str(support.GROWTH_TOKENS))
        ours.pop(CACHE_VARIABLE, None)
        if ours:
            names = ("POLICY", *_CHOICES, "STATS_FILE", "GROWTH_TOKENS", "KERNEL_CACHE")
            allowed = ", ".join(PREFIX + name for name in names)
            raise ValueError(f"unknown variable {listed(sorted(ours)[:1])}; allowed: {allowed}")
        if policy not in support.POLICIES:
            raise _bad_value("POLICY", policy, ", ".join(support.POLICIES))
        for name, value in chosen.items():
            if value not in _CHOICES[name]:
                raise _bad_value(name, value, ", ".join(_CHOICES[name]))
        if not growth_tokens.isdecimal() or not 1 <= int(growth_tokens) <= _MAX_GROWTH_TOKENS:
            raise _bad_value("GROWTH_TOKENS", growth_tokens, f"1 to {_MAX_GROWTH_TOKENS}")
        path = None if stats_file is None else _stats_file(stats_file)
        return cls(
            policy=policy,
            stats_file=path,
            growth_tokens=int(growth_tokens),
            kernel_cache=default_cache(given),
            debug=chosen["DEBUG"],
            strict=chosen["STRICT"] == "1",
            batch_invariant=chosen["BATCH_INVARIANT"] == "1",
        )


def _stats_file(text: str) -> Path:
    path = Path(text.replace("{pid}", str(os.getpid())))
    problem = problem_with(path)
    # Writing replaces the file, so it would also replace a device or a pipe.
    if problem is None and path.exists() and not path.is_file():
        problem = "it is not a regular file"
    if problem is not None:
        raise _bad_value("STATS_FILE", text, f"the path of a file that can be written ({problem})")
    return path


def _bad_value(name: str, value: str, allowed: str) -> ValueError:
    return ValueError(f"{PREFIX}{name}={quoted(value)}; allowed: {allowed}")
