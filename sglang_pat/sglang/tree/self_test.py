"""A self-test for versions of SGLang with which pat was not tested.

The test builds a small tree in SGLang's cache, matches prompts with the tree, and reads the paths.
It takes milliseconds, on the CPU.
"""

from __future__ import annotations

import logging
import pkgutil
from array import array
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch

from sglang_pat import support
from sglang_pat.sglang.report import reports
from sglang_pat.sglang.tree.radix_paths import CacheEventMonitor, path_reader

logger = logging.getLogger(__name__)

# The caches of models with full attention in all layers. A version of SGLang may lack one of them.
_CACHES = (
    "sglang.srt.mem_cache.radix_cache:RadixCache",
    "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache",
)

_COMMON, _FIRST, _SECOND = [*range(8)], [*range(10, 13)], [*range(20, 25)]
_NEXT_TOKEN = 99  # a prompt's last token is never matched
_SPANS = [[(0, 8), (8, 11)], [(0, 8), (8, 13)]]
# Tokens and slots of two prompts. The second prompt finds the KV of the common tokens in the cache.
_PROMPTS = (
    (_COMMON + _FIRST, [*range(100, 111)]),
    (_COMMON + _SECOND, [*range(100, 108), *range(200, 205)]),
)


def check_version() -> None:
    """If SGLang's version is not in the support table, run the self-test and log a warning.

    Raises RuntimeError that says what failed in the self-test.
    """
    installed = version("sglang")
    if installed in support.SGLANG_VERSIONS:
        return
    self_test()
    if reports.rank_speaks():
        logger.warning(
            "pat was not tested with SGLang %s: its hooks and its self-test are right, so it "
            "starts; tested: %s",
            installed,
            ", ".join(support.SGLANG_VERSIONS),
        )


def self_test() -> list[str]:
    """Test each prefix cache that this SGLang has, and return the caches' names.

    Raises RuntimeError that says what failed, if pat misreads a tree or there is no cache.
    """
    tested = []
    for place in _CACHES:
        name = place.rpartition(":")[2]
        try:
            kind = pkgutil.resolve_name(place)
        except (ImportError, AttributeError):
            continue
        try:
            _test(kind)
        except Exception as error:  # an unknown SGLang may raise anything
            raise RuntimeError(_failed(name, f"{type(error).__name__}: {error}")) from error
        tested.append(name)
    if not tested:
        raise RuntimeError(_failed("prefix caches", f"none of {', '.join(_CACHES)}"))
    return tested


def _failed(where: str, what: str) -> str:
    return (
        f"pat's self-test failed with SGLang {version('sglang')}: {where}: {what}; "
        f"{support.SUPPORTED_SGLANG}"
    )


def _test(kind: type[Any]) -> None:
    """Raise an exception that says what is wrong, if pat misreads this class of cache."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    cache = _new_cache(kind)
    events = CacheEventMonitor.watching(cache, lambda req: None, lambda: None)
    for tokens, slots in _PROMPTS:
        cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=torch.tensor(slots)))
    reqs = [_request(f"request {i}", tokens, cache) for i, (tokens, _) in enumerate(_PROMPTS)]
    for req in reqs:
        cache.inc_lock_ref(req.last_node)
    reader = path_reader(cache)
    if reader is None:
        raise RuntimeError("its paths cannot be read")
    paths = reader.read(reqs)
    _expect("paths", [[(node[2], node[3]) for node in path] for path in paths], _SPANS)
    _expect("nodes of the common prefix", len({path[0][0] for path in paths}), 1)
    _expect("nodes of both paths", len({node[0] for path in paths for node in path}), 3)
    slots = [reader.shared_slots(req).tolist() for req in reqs]
    _expect("KV slots", slots, [slots for _, slots in _PROMPTS])
    expected = {"insert": 2, "lock": 2} | ({} if events.unobservable else {"split": 1})
    _expect("events", {name: events.counts[name] for name in expected}, expected)


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: found {found}, expected {expected}")


def _new_cache(kind: type[Any]) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    allocator = SimpleNamespace(
        device=torch.device("cpu"),
        # When the second prompt is inserted, the tree keeps the slots that it has for the common
        # tokens, and frees those that it is given.
        free=lambda *args, **kwargs: None,
        free_segment=lambda *args, **kwargs: None,
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        tree_components=(ComponentType.FULL,),
    )
    return kind(params)


def _request(name: str, prompt: list[int], cache: Any) -> Any:
    """Return a request as it is after SGLang has matched its prompt with the cache."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokens = array("q", [*prompt, _NEXT_TOKEN])
    req = Req(name, "", tokens, SamplingParams(max_new_tokens=1))
    req.init_next_round_input(cache)
    return req
