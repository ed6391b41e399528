"""Places the KV of a batch in scattered slots, in runs, or in both."""

from __future__ import annotations

import dataclasses

import numpy as np
from sample_forests import ForestCase

PLACEMENTS = ("scattered", "ranges", "mixed", "descending", "swapped")
STAGE_TOKENS = 32  # tokens that pack_decode copies at once


def place(case: ForestCase, placement: str, seed: int = 0) -> np.ndarray:
    """Return slot of the case -> slot in a pool, or -1 for unused slots.

    The pool ends with the last used slot.

    Parameters
    ----------
    placement
        - scattered: anywhere.
        - ranges: each shared node and each tail in adjacent slots.
        - mixed: the same in runs of 1 to 100 slots.
        - descending: as ranges, backwards.
        - swapped: as ranges, but two of every other 32 tokens are swapped.
    """
    rng = np.random.default_rng(seed)
    ordered, begins = _reading_order(case)
    places = np.full(case.num_slots, -1, dtype=np.int64)
    if placement == "scattered":
        slots = rng.permutation(2 * len(ordered))[: len(ordered)]
        places[ordered] = slots + (2 * len(ordered) - 1 - slots.max(initial=0))
        return places
    if placement == "mixed":
        begins = np.cumsum(rng.integers(1, 101, len(ordered)))
    runs = [run for run in np.split(ordered, begins) if len(run)]
    # Fill the pool from its first slot; slots between two runs are unused.
    next_slot = 0
    for index in rng.permutation(len(runs)):
        run = runs[index]
        slots = next_slot + np.arange(len(run))
        if placement == "descending":
            slots = slots[::-1]
        elif placement == "swapped":
            slots = _with_swaps(slots, rng)
        places[run] = slots
        next_slot += len(run) + int(rng.integers(1, 4))
    return places


def move(case: ForestCase, places: np.ndarray) -> ForestCase:
    """Return the case with its KV at these places."""
    tokens = np.zeros_like(case.tokens)
    for row, length in enumerate(case.seq_lens):
        tokens[row, :length] = places[case.tokens[row, :length]]
    return dataclasses.replace(case, tokens=tokens)


def _reading_order(case: ForestCase) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots in the order of their first read, and the starts of ranges among them."""
    slots, rows, positions = [], [], []
    for row, length in enumerate(case.seq_lens):
        slots.append(case.tokens[row, :length])
        rows.append(np.full(length, row))
        positions.append(np.arange(length))
    _, first = np.unique(np.concatenate(slots), return_index=True)
    first = np.sort(first)
    row, position = np.concatenate(rows)[first], np.concatenate(positions)[first]
    starts = [{0, *(n.kv_begin for n in path), *(n.kv_end for n in path)} for path in case.paths]
    begins = [i for i, (r, p) in enumerate(zip(row, position, strict=True)) if p in starts[r]]
    return np.concatenate(slots)[first], np.array(begins, dtype=np.int64)


def _with_swaps(slots: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    swapped = slots.copy()
    for begin in range(0, len(slots) - STAGE_TOKENS + 1, 2 * STAGE_TOKENS):
        one, other = begin + rng.permutation(STAGE_TOKENS)[:2]
        swapped[[one, other]] = swapped[[other, one]]
    return swapped
