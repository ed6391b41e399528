"""sglang-pat: decode attention for SGLang that reads each shared KV prefix once per step."""

from importlib.metadata import version

from sglang_pat.decode_batch import DecodeBatch, PathNode, PrefixPaths
from sglang_pat.decode_plan import DecodePlan, KvTokens
from sglang_pat.pack_attention import PackAttention, PlanStats
from sglang_pat.support import support_matrix

__version__ = version("sglang-pat")

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
