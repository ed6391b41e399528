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
"""(block_q, block_kv, num_warps) of every tile, ascending in block_q."""
LATENT_TILE_TABLE: tuple[tuple[int, int, int], ...]
"""The tiles of latent attention, as in TILE_TABLE."""
MAX_PACKS_PER_REQUEST: int
"""A request of a batch is in at most this many packs on average."""
PLAN_SECTIONS: tuple[tuple[str, str, int, int], ...]
"""Every section of a plan after the header, in order: (name, header field that counts its entries,
number of entries beyond that count, int32 values per entry)."""

class _StageTimes(TypedDict):
    forest: int
    packing: int
    split: int
    assembly: int

class PlanCapacity:
    """Number of entries that each section of a plan buffer can hold."""

    def __init__(self, **entries: int) -> None:
        """Set the counts of PLAN_SECTIONS. Counts that are not given are 0.

        Raises TypeError for an unknown name, and ValueError for a count beyond int32.
        """
    def entries(self) -> dict[str, int]:
        """Every count, in the order of the sections."""
    def layout(self) -> dict[str, int]:
        """Offset of `header` and of every section, and `size` of the buffer, in int32 units."""

def plan_bounds(
    max_requests: int, num_workers: int, group_size: int, max_block_q: int, *, latent: bool = False
) -> tuple[PlanCapacity, int]:
    """Return upper bounds on the plan of any batch of up to `max_requests` requests.

    The bounds are the capacity of the plan buffer and the number of partials. Shared slots have no
    such bound. ValueError if an argument is out of range.
    """

def invariant_plan_bounds(max_requests: int, max_seq_len: int) -> tuple[PlanCapacity, int]:
    """Return bounds like those of plan_bounds(), but for batch-invariant plans.

    A request has up to `max_seq_len` tokens.
    """

def num_chunks(length: int) -> int:
    """Number of chunks into which batch-invariant plans cut the KV of a request of this length."""

class CostModel:
    """Cost model (scheduler/cost_model.h), in tokens. The defaults are an H100's.

    reread_token, partial_row and packed_item are costs of packing. Their unit is the time in which
    the whole GPU reads a KV token. item, query_row, shortest, and token_<rows> for each tile of the
    tile table, are costs of splitting. Their unit is the time in which one CTA reads a KV token.
    """

    def __init__(self, **costs: float) -> None:
        """Set the given costs, rounded to 1/64. The others have their defaults.

        Raises TypeError for an unknown name, and ValueError for a cost that is negative, above
        16384, or not a number.
        """
    def values(self) -> dict[str, float]:
        """Every cost by its name."""
    def __eq__(self, other: object) -> bool: ...

SHIPPED_COSTS: tuple[tuple[str, bool, CostModel], ...]
"""(part of the GPU's name, whether the costs were measured on this GPU, the costs) for every GPU
that has costs of its own."""
SHIPPED_LATENT_COSTS: tuple[tuple[str, bool, CostModel], ...]
"""Like SHIPPED_COSTS, for latent attention. Other GPUs use the costs of the first entry."""

def row_lengths(lengths: _Int32 | _Int64, num_requests: int, num_rows: int) -> _Int32:
    """Copy the first `num_requests` lengths from `lengths`, which may be shorter.

    Returns int32 `[num_rows]`, with 0 after the copied lengths. ValueError if a length does not fit
    into int32, or if `num_requests` or `num_rows` is negative.
    """

def growth_of(lengths: _Int32 | _Int64, least: _Int32, room: _Int32) -> int | None:
    """Return by how many tokens all requests together have grown since their lengths were `least`.

    Returns None if a request has grown by more than its entry in `room`, has shrunk, or is missing.
    `lengths` may end with padding. ValueError if `least` and `room` differ in size.
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
        """Replace the batch by the next one. Requests are compared by identity.

        Parameters
        ----------
        before
            The batch whose paths the forest has.
        now
            The next batch.
        moved
            id() of requests whose path may have changed.
        read
            Returns the paths of the requests that it gets. update() calls it first with the
            requests that joined or moved. Then it may call it with requests whose nodes the tree
            has split, or may have split, since their paths were read. A node of a path is a tuple
            of six integers: id, parent's id, first position, end, number of tokens, number of
            children in the tree.

        Returns
        -------
        tuple or None
            How many requests joined, left, moved, and were read again because of splits. None if
            the batches are equal and no request moved.

        Raises
        ------
        ValueError, TypeError
            A path is not valid. Exceptions of read() pass through. After any exception, the next
            update() must have an empty `before`.
        """
    def paths(self) -> list[list[tuple[int, int, int]]]:
        """(node id, first position, end) of each node of each request's path. For checks."""
    @property
    def num_kept(self) -> int:
        """Number of requests whose path the last update() kept."""
    def __len__(self) -> int:
        """Number of requests of the batch."""

class PackScheduler:
    """Makes plans from paths and lengths, and keeps the last plan. Not thread-safe."""

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
        """Build a plan. `seq_lens` may have more rows than the forest; the extra rows have no path.

        With a window, the plan is for the rows of a WindowCut (scheduler/window_cut.h). ValueError
        on bad input, or if the plan is too large for its format. The last plan is then kept.
        """
    def check_lengths(self, seq_lens: _Int32) -> tuple[bool, int, int]:
        """Check the last plan against the same batch with these lengths.

        Returns (served, total, longest). served: whether the plan is correct and balanced for the
        lengths. total: number of tokens to which all requests together attend; without a window,
        the sum of the lengths. longest: the greatest length.
        """
    def steps_left(self, seq_lens: _Int32, longest: int) -> int:
        """Return by how many tokens every request may grow from `seq_lens`.

        Up to this growth, the last plan stays usable and no request exceeds `longest`. Padding
        (length 0) does not grow. ValueError if a length is negative, or if there are more or fewer
        lengths than requests in the plan.
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

        With a window, the cuts of all requests follow the plan in `out`. Returns None, and writes
        nothing, if the plan needs a larger capacity, more partials, more shared slots or more cuts
        than given. ValueError if `out` is too short.
        """
    @property
    def num_partials(self) -> int: ...
    @property
    def num_shared_slots(self) -> int: ...
    @property
    def num_cuts(self) -> int:
        """Number of requests of the last plan, or 0 without a window."""
    @property
    def tile_table(self) -> tuple[tuple[int, int, int], ...]:
        """TILE_TABLE, or LATENT_TILE_TABLE if the scheduler is for latent attention."""
    @property
    def kv_tokens(self) -> tuple[int, int, int]:
        """(query_centric, planned, lower_bound) of the last plan, per KV head."""
    @property
    def stage_times_ns(self) -> _StageTimes: ...
