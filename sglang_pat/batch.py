"""The input of one decode step: a DecodeBatch on the host and a Step on the device.

An adapter makes the batch: `sglang/tree/batch_builder.py`, or a user's own code.
`PackAttention.plan` gets the batch, and passes the step to its executor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from sglang_pat._scheduler import PrefixForest
from sglang_pat.messages import quoted

if TYPE_CHECKING:  # `sglang-pat advise` runs without torch
    import torch

IntArray = npt.NDArray[np.int32]
_BOOLS = {bool, np.bool_}


class PathNode(NamedTuple):
    """A radix-tree node on a request's path, with the KV positions `[kv_begin, kv_end)`.

    Two requests share the KV of a node if and only if both paths have the same `node_id`, a
    non-negative integer that is unique within a batch.
    """

    node_id: int
    kv_begin: int
    kv_end: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefixPaths:
    """The root-to-leaf paths of a batch in flat arrays (CSR).

    The path of request `i` is the slice `[path_begin[i]:path_begin[i + 1]]` of the three node
    arrays. The first node begins at position 0, and every other node where the previous one ends. A
    request without shared KV has an empty path. KV after the path is private to the request.

    `path_begin` is int32 `[num_requests + 1]`. `node_id` (int64), `kv_begin` and `kv_end` (int32)
    are `[num_path_nodes]`. Other dtypes or shapes raise TypeError. The C++ scheduler checks the
    contents, and its errors name the first request that is wrong.
    """

    path_begin: IntArray
    node_id: npt.NDArray[np.int64]
    kv_begin: IntArray
    kv_end: IntArray

    def __post_init__(self) -> None:
        _check_array("path_begin", self.path_begin, np.int32)
        _check_array("node_id", self.node_id, np.int64)
        _check_array("kv_begin", self.kv_begin, np.int32)
        _check_array("kv_end", self.kv_end, np.int32)

    @classmethod
    def from_lists(cls, paths: Iterable[Sequence[PathNode | tuple[int, int, int]]]) -> PrefixPaths:
        """Make the arrays from one list of nodes per request.

        Raises
        ------
        TypeError
            `paths` is not a list, or a path is not. The message names the request.
        ValueError
            A node is not three integers, its id does not fit into int64, or a position does not fit
            into int32. The message names the node and its request.
        """
        path_begin = [0]
        flat: list[PathNode | tuple[int, int, int]] = []
        if not isinstance(paths, Iterable):
            raise TypeError(f"paths must be a list of nodes per request, got {quoted(paths)}")
        for path in paths:
            try:
                flat.extend(path)
            except TypeError:
                request = len(path_begin) - 1
                message = f"the path of request {request} must be a list of nodes, got "
                raise TypeError(message + quoted(path)) from None
            path_begin.append(len(flat))
        nodes = _checked_nodes(flat, path_begin)
        return cls(
            path_begin=np.array(path_begin, dtype=np.int32),
            node_id=np.ascontiguousarray(nodes[:, 0]),
            kv_begin=np.ascontiguousarray(nodes[:, 1], dtype=np.int32),
            kv_end=np.ascontiguousarray(nodes[:, 2], dtype=np.int32),
        )

    @classmethod
    def private(cls, num_requests: int) -> PrefixPaths:
        """Return an empty path for each of `num_requests` requests, so that they share nothing.

        Raises TypeError if `num_requests` is not an integer, and ValueError if it is negative.
        """
        check_integers(num_requests=num_requests)
        if num_requests < 0:
            raise ValueError(f"num_requests must not be negative, got {num_requests}")
        nothing = np.zeros(0, dtype=np.int32)
        return cls(
            path_begin=np.zeros(num_requests + 1, dtype=np.int32),
            node_id=np.zeros(0, dtype=np.int64),
            kv_begin=nothing,
            kv_end=nothing,
        )

    def __len__(self) -> int:
        return len(self.path_begin) - 1


class DecodeBatch(NamedTuple):
    """A decode step as host data, in batch order.

    seq_lens: int32 `[num_requests]`, the KV length of every request, including this step's token. 0
        marks a padding row, whose output is 0 and whose LSE is -inf.
    paths: the batch's paths, or a forest that has these paths until its next update(). Rows after
        the forest's last request have no path.
    key: hashable. Batches with equal keys must have the same paths, the same rows in the same
        order, and shared KV in the same slots. A plan may then be reused while `seq_lens` grow. If
        the key is None, plan() compares the paths themselves, and reads the slots of shared KV
        again in each step.
    begun_ns: `time.perf_counter_ns()` at the time from which the step's planning time counts. 0:
        it counts from the call of plan().
    """

    seq_lens: IntArray
    paths: PrefixPaths | PrefixForest
    key: Hashable = None
    begun_ns: int = 0

    def read_paths(self) -> PrefixPaths:
        """Return the paths as arrays. TypeError if they are neither PrefixPaths nor a forest."""
        if isinstance(self.paths, PrefixForest):
            padding = len(self.seq_lens) - len(self.paths)
            return PrefixPaths.from_lists([*self.paths.paths(), *[()] * padding])
        if not isinstance(self.paths, PrefixPaths):
            raise TypeError(
                f"batch.paths must be PrefixPaths, got {type(self.paths).__name__}; "
                "PrefixPaths.from_lists() makes them of lists"
            )
        return self.paths


class Step(NamedTuple):
    """The tensors that an executor reads besides the plan. The caller of plan() owns them."""

    req_to_token: torch.Tensor  # int32 [num_rows, max_context_len]
    req_pool_indices: torch.Tensor  # int64 or int32 [num_requests]
    seq_lens: torch.Tensor  # int64 or int32 [num_requests]
    # Lengths on the host: equal to `seq_lens`, a few tokens less, or one token more.
    host_seq_lens: IntArray


def check_integers(**values: int) -> None:
    """Raise TypeError for a value that is not an integer, ValueError for one beyond int32."""
    for name, value in values.items():
        if not is_integer(value):
            raise TypeError(f"{name} must be an integer, got {quoted(value)}")
        if not -1 << 31 <= value < 1 << 31:
            raise ValueError(f"{name} must fit into int32, got {value}")


def is_integer(value: object) -> TypeGuard[int]:
    """Return True for an integer of Python or NumPy, but not for a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_array(name: str, array: object, dtype: type[np.generic]) -> None:
    """Raise TypeError unless `array` is a contiguous 1-D array of `dtype`."""
    if not isinstance(array, np.ndarray):
        found = type(array).__name__
    elif array.dtype != dtype or array.ndim != 1:
        found = f"{array.ndim}-D {array.dtype}"
    elif not array.flags.c_contiguous:
        found = f"strides {array.strides}"
    else:
        return
    raise TypeError(f"{name} must be a contiguous 1-D {dtype.__name__} NumPy array, got {found}")


def _checked_nodes(
    flat: list[PathNode | tuple[int, int, int]], path_begin: list[int]
) -> npt.NDArray[np.int64]:
    """Return the nodes as int64 `[num_path_nodes, 3]`."""
    if not flat:
        return np.zeros((0, 3), dtype=np.int64)
    try:
        nodes = np.array(flat)
    except (ValueError, OverflowError):  # not all nodes have the same length
        nodes = np.zeros(0)
    if nodes.dtype == np.int64 and nodes.ndim == 2 and nodes.shape[1] == 3:
        positions = nodes[:, 1:]
        fit = positions.min() >= -1 << 31 and positions.max() < 1 << 31
        # The second check is for bools, which NumPy turns into integers.
        if fit and _BOOLS.isdisjoint(map(type, chain.from_iterable(flat))):
            return nodes
    for index, node in enumerate(flat):
        if not _is_node(node):
            request = int(np.searchsorted(path_begin, index, side="right")) - 1
            raise ValueError(
                "a path node must be three integers (node_id, kv_begin, kv_end), positions within "
                f"int32, got {quoted(node)} on the path of request {request}"
            )
    return np.array(flat, dtype=np.int64)  # the nodes have other integer types


def _is_node(node: object) -> bool:
    if not isinstance(node, (Sequence, np.ndarray)) or len(node) != 3:
        return False
    return all(
        is_integer(value) and -1 << bits <= value < 1 << bits
        for value, bits in zip(node, (63, 31, 31), strict=True)
    )
