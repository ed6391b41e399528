"""Assigns KV slots to a batch, for measurements without a KV pool."""

from __future__ import annotations

import numpy as np

from sglang_pat.batch import IntArray, PrefixPaths


def token_table(paths: PrefixPaths, seq_lens: IntArray) -> IntArray:
    """Return `req_to_token` for paths: int32 `[num_requests, longest length]`."""
    table = np.zeros((len(seq_lens), int(seq_lens.max(initial=1))), dtype=np.int32)
    first_slot: dict[int, int] = {}
    next_slot = 1
    for request, seq_len in enumerate(seq_lens.tolist()):
        end = 0
        for index in range(int(paths.path_begin[request]), int(paths.path_begin[request + 1])):
            node, begin = int(paths.node_id[index]), int(paths.kv_begin[index])
            end = int(paths.kv_end[index])
            if node not in first_slot:
                first_slot[node] = next_slot
                next_slot += end - begin
            table[request, begin:end] = np.arange(end - begin) + first_slot[node]
        table[request, end:seq_len] = np.arange(seq_len - end) + next_slot
        next_slot += seq_len - end
    return table
