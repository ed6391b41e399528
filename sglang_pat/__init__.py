"""sglang-pat: decode attention for SGLang that reads each shared KV prefix once per step.

The names below are imported on first use, because SGLang loads the package in each of its
processes, and the command line must show its help without importing torch or the scheduler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_pat.attention import PackAttention
    from sglang_pat.batch import DecodeBatch, PathNode, PrefixPaths
    from sglang_pat.plan import DecodePlan, KvTokens
    from sglang_pat.stats import PlanStats
    from sglang_pat.support import support_matrix
    from sglang_pat.window import WindowAttention

    __version__: str

__all__ = [
    "DecodeBatch",
    "DecodePlan",
    "KvTokens",
    "PackAttention",
    "PathNode",
    "PlanStats",
    "PrefixPaths",
    "WindowAttention",
    "support_matrix",
]

_MODULES = {
    "DecodeBatch": "batch",
    "DecodePlan": "plan",
    "KvTokens": "plan",
    "PackAttention": "attention",
    "PathNode": "batch",
    "PlanStats": "stats",
    "PrefixPaths": "batch",
    "WindowAttention": "window",
    "support_matrix": "support",
}


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from importlib.metadata import version

        value = version("sglang-pat")
    elif name in _MODULES:
        value = getattr(_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next access does not call this function
    return value


def _module(name: str) -> object:
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = f"sglang_pat.{name} needs torch: pip install '.[torch]' in a clone"
        raise ModuleNotFoundError(message, name="torch") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
