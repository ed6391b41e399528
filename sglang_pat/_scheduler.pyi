"""Typed stub of scheduler/bindings.cpp."""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, overload

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Request = Any
_Path = Sequence[tuple[int, int, int, int, int, int]]

PLAN_MAGIC: int
PLAN_VERSION: int
OPEN_END: int
READ_ONCE: int
SHARED_KV: int
DIRECT_STORE: int
MAX_GROUP_SIZE: int
MAX_LATENT_GROUP_SIZE: int
TILE_TABLE: tuple[tuple[int, int, int], ...]
"""(block_q, block_kv, num_warps) of every tile body, ascending in block_q."""
LATENT_TILE_TABLE: tuple[tuple[int, int, int], ...]
"""The bodies of latent attention."""
MAX_PACKS_PER_REQUEST: int
"""The packs of a batch have at most this many requests for each request of the batch."""
PLAN_SECTIONS: tuple[tuple[str, str, int, int], ...]
"""Every section of a plan after the header, in order: (name, the field of the header with its
count, entries beyond that count, int32 values per entry)."""

class _StageTimes(TypedDict):
    forest: int
    packing: int
    split: int
    assembly: int

class PlanCapacity:
    """Entries that each section of a plan buffer can hold, by the header's counts."""

    def __init__(self, **entries: int) -> None:
        """Take the counts of PLAN_SECTIONS; those that are not given are 0.

        TypeError names an unknown count, ValueError one that does not fit into int32.
        """
    def entries(self) -> dict[str, int]:
        """Every count, in the order of the sections."""
    def layout(self) -> dict[str, int]:
        """Offset of `header` and of every section, and `size` of the buffer, in int32 units."""

def plan_bounds(
    max_requests: int,
    num_workers: int,
    group_size: int,
    max_block_q: int,
    *,
    latent: bool = False,
) -> tuple[PlanCapacity, int]:
    """Give what the plan of any batch of up to `max_requests` requests needs.

    Returns the capacity of the plan buffer and the number of partials. Shared slots have no such
    bound. ValueError if an argument is out of range.
    """

def invariant_plan_bounds(max_requests: int, max_seq_len: int) -> tuple[PlanCapacity, int]:
    """Give the same as plan_bounds() for batch-invariant plans.

    Requests have up to `max_seq_len` tokens.
    """

def num_chunks(length: int) -> int:
    """Number of chunks into which a batch-invariant plan cuts the KV of a request."""

class CostModel:
    """Cost model (scheduler/cost_model.h), in tokens. The defaults are an H100's.

    Packing counts in KV tokens that the whole GPU reads: reread_token, partial_row, packed_item.
    Splitting counts in KV tokens that one CTA takes: item, query_row, shortest, and a token_<rows>
    for each body of the tile table.
    """

    def __init__(self, **costs: float) -> None:
        """Take the costs that are given, rounded to 1/64; the others keep their defaults.

        TypeError names an unknown cost, ValueError one that is negative, above 16384, or not a
        number.
        """
    def values(self) -> dict[str, float]:
        """Every cost by its name."""
    def __eq__(self, other: object) -> bool: ...

SHIPPED_COSTS: tuple[tuple[str, bool, CostModel], ...]
"""(part of the GPU's name, whether the costs were measured there, the costs) of every GPU that has
costs of its own."""
SHIPPED_LATENT_COSTS: tuple[tuple[str, bool, CostModel], ...]
"""As SHIPPED_COSTS, for latent attention. Any other GPU uses the costs of the first entry."""

def row_lengths(lengths: _Int32 | _Int64, num_requests: int, num_rows: int) -> _Int32:
    """Copy the lengths of the first `num_requests` rows, as far as `lengths` has them.

    Returns int32 `[num_rows]`, 0 after the copied lengths. ValueError if a length does not fit into
    int32, or a number of rows is negative.
    """

def growth_of(lengths: _Int32 | _Int64, least: _Int32, room: _Int32) -> int | None:
    """Return by how many tokens all requests together have grown from the lengths `least`.

    None if a request has grown by more than its `room`, has shrunk, or is missing. `lengths` may
    end with padding. ValueError if `least` and `room` differ in size.
    """

def same_objects(a: list[object], b: list[object]) -> bool:
    """True if two lists hold the same objects in the same order, by identity."""

class PrefixForest:
    """The paths of a batch, kept from one batch to the next. Not thread-safe."""

    def __init__(self) -> None: ...
    def update(
        self,
        before: list[_Request],
        now: list[_Request],
        moved: set[int],
        read: Callable[[list[_Request]], Sequence[_Path]],
    ) -> tuple[int, int, int, int] | None:
        """Go from one batch to the next. Requests are told apart by identity.

        Parameters
        ----------
        before
            The batch whose paths the forest has.
        now
            The next batch.
        moved
            id() of requests whose path may have changed.
        read
            Gives the paths of requests. update() calls read() with the requests that joined or
            moved, and then with those whose path the tree has, or may have, split since read() last
            gave it. A node of a
            path is a tuple of six integers: id, its parent's id, first position, end, tokens,
            children that it has in the tree.

        Returns
        -------
        tuple or None
            How many requests joined, left, moved, and were read again. None if the batches are
            alike and nothing moved.

        Raises
        ------
        ValueError, TypeError
            Bad paths. An exception of read() passes through unchanged. After any exception, the
            next update() must start from an empty batch.
        """
    def paths(self) -> list[list[tuple[int, int, int]]]:
        """(node id, first position, end) of the nodes of each request. For checks."""
    @property
    def num_kept(self) -> int:
        """Requests whose path the last update() kept."""
    def __len__(self) -> int:
        """Requests of the batch."""

class PackScheduler:
    """Paths and lengths in, plan out. Holds the last plan; not thread-safe."""

    def __init__(
        self,
        *,
        group_size: int,
        num_workers: int,
        max_block_q: int,
        policy: str,
        min_item_tokens: int,
        growth_tokens: int,
        cost: CostModel = ...,
        batch_invariant: bool = ...,
        one_tile: bool = ...,
        by_time: bool = ...,
        latent: bool = ...,
        window: int = ...,
        slack: int = ...,
        ahead: int = ...,
        chunked: bool = ...,
    ) -> None: ...
    @overload
    def plan(self, forest: PrefixForest, seq_lens: _Int32) -> None: ...
    @overload
    def plan(
        self,
        path_begin: _Int32,
        node_id: _Int64,
        kv_begin: _Int32,
        kv_end: _Int32,
        seq_lens: _Int32,
    ) -> None:
        """Build a plan. Rows after the last request of a forest have no path.

        With a window, it is a plan of the rows of a WindowCut (scheduler/window_cut.h).
        ValueError on bad input, or if the plan is too large for its format. The last plan then
        stays in force.
        """
    def check_lengths(self, seq_lens: _Int32) -> tuple[bool, int, int]:
        """Check the last plan against the same batch with these lengths.

        Returns whether the plan is right and balanced for them, the sum of the lengths, and the
        longest length. The sum counts each length up to the window.
        """
    def steps_left(self, seq_lens: _Int32, longest: int) -> int:
        """Tokens that every request except padding (length 0) may grow from `seq_lens`.

        The last plan then still serves the batch, and no request exceeds `longest`. ValueError for
        negative lengths, or if their number differs from the plan's requests.
        """
    def required_capacity(self) -> PlanCapacity: ...
    def write(
        self,
        capacity: PlanCapacity,
        num_partials: int,
        num_shared_slots: int,
        num_cuts: int,
        out: _Int32,
    ) -> tuple[int, int, int] | None:
        """Write the last plan into `out`, laid out for `capacity`, and return kv_tokens.

        With a window, the cut of each request follows the layout. Returns None, and writes nothing,
        if the plan needs more than the capacity, more partials, a longer slot buffer or more cuts
        than given. ValueError if `out` is shorter than the layout and `num_cuts`.
        """
    @property
    def num_partials(self) -> int: ...
    @property
    def num_shared_slots(self) -> int: ...
    @property
    def num_cuts(self) -> int:
        """Requests of the last plan, or 0 without a window."""
    @property
    def tile_table(self) -> tuple[tuple[int, int, int], ...]:
        """TILE_TABLE, or LATENT_TILE_TABLE if latent."""
    @property
    def kv_tokens(self) -> tuple[int, int, int]:
        """(query_centric, planned, lower_bound) of the last plan, per KV head."""
    @property
    def stage_times_ns(self) -> _StageTimes: ...
