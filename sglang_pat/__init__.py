"""sglang-pat: decode attention for SGLang that reads each shared KV prefix once per step.

The names below are imported when they are first used: SGLang loads the package in each of its
processes, and the command line needs neither torch nor the scheduler to show its help.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_pat.decode_batch import DecodeBatch, PathNode, PrefixPaths
    from sglang_pat.decode_plan import DecodePlan, KvTokens
    from sglang_pat.pack_attention import PackAttention
    from sglang_pat.plan_stats import PlanStats
    from sglang_pat.support import support_matrix

    __version__: str

__all__ = [
    "DecodeBatch",
    "DecodePlan",
    "KvTokens",
    "PackAttention",
    "PathNode",
    "PlanStats",
    "PrefixPaths",
    "support_matrix",
]

_MODULES = {
    "DecodeBatch": "decode_batch",
    "DecodePlan": "decode_plan",
    "KvTokens": "decode_plan",
    "PackAttention": "pack_attention",
    "PathNode": "decode_batch",
    "PlanStats": "plan_stats",
    "PrefixPaths": "decode_batch",
    "support_matrix": "support",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("sglang-pat")
    elif name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # so that this function is asked once per name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
