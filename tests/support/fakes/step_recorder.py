"""A plug-in of SGLang for tests that records every decode step of a real engine.

It reads the requests of a batch when SGLang makes the batch, and their paths with pat's PathReader.
It also delays the first step until all requests of the test have arrived, so that the schedule does
not depend on their timing.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Sequence
from typing import Any

# pat refuses unknown SGLANG_PAT_* variables, so these have another prefix.
FILE, WAIT_FOR = "TEST_STEPS_FILE", "TEST_WAIT_FOR"


def register() -> None:
    """The plug-in's entry point, in every process of the engine."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if FILE not in os.environ:
        return
    HookRegistry.register(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        _record,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw", _wait, HookType.AROUND
    )


def described(
    reqs: Sequence[Any], seq_lens: Sequence[int], tokens: Sequence[array[int]], reader: Any
) -> list[dict[str, Any]]:
    """Return a decode step: the length of each request and the nodes of its path.

    A node is given by its KV positions and by a digest of all tokens from the root to its end, so
    equal nodes of two trees compare equal.
    """
    step = []
    for req, seq_len, known, nodes in zip(reqs, seq_lens, tokens, reader.read(reqs), strict=True):
        path = [[begin, end, _digest(known[:end])] for _, _, begin, end, *_ in nodes]
        prompt = _digest(array("q", req.origin_input_ids))
        step.append({"prompt": prompt, "seq_len": int(seq_len), "path": path})
    return step


def _digest(tokens: array[int]) -> str:
    return hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()


def _record(result: Any, cls: type, batch: Any, *args: object, **kwargs: object) -> None:
    """Hook after ForwardBatch.init_new: record the batch."""
    from sglang_pat.sglang.tree.radix_paths import path_reader

    if not result.forward_mode.is_decode():
        return
    tokens = [array("q", [*req.origin_input_ids, *req.output_ids]) for req in batch.reqs]
    lens = result.seq_lens_cpu.tolist()
    tree = batch.tree_cache
    line = {
        "requests": described(batch.reqs, lens, tokens, path_reader(tree)),
        "free_tokens": int(batch.token_to_kv_pool_allocator.available_size()),
        "evictable_tokens": int(tree.evictable_size()),
    }
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


def _wait(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around Scheduler._get_new_batch_prefill_raw: no prefill until all requests are here."""
    if len(scheduler.waiting_queue) >= int(os.environ[WAIT_FOR]):
        os.environ[WAIT_FOR] = "0"
    if int(os.environ[WAIT_FOR]) == 0:
        return original(scheduler, *args, **kwargs)
    return None, args[-1] if args else kwargs["running_batch"]
