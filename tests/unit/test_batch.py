"""PrefixPaths.from_lists flattens valid lists, and names the wrong value of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_pat import DecodeBatch, PathNode, PrefixPaths


def test_paths_are_flattened() -> None:
    last = (1 << 31) - 1
    paths = PrefixPaths.from_lists(
        [[PathNode(5, 0, 10), ((1 << 63) - 1, 10, last)], [], [(np.int64(5), np.int32(0), 10)]]
    )
    assert paths.path_begin.tolist() == [0, 2, 2, 3]
    assert paths.node_id.tolist() == [5, (1 << 63) - 1, 5]
    assert paths.kv_begin.tolist() == [0, 10, 0]
    assert paths.kv_end.tolist() == [10, last, 10]
    assert paths.node_id.dtype == np.int64
    assert paths.path_begin.dtype == paths.kv_begin.dtype == paths.kv_end.dtype == np.int32
    assert len(PrefixPaths.from_lists([])) == 0
    assert len(PrefixPaths.from_lists([[], []])) == 2


@pytest.mark.parametrize(
    "node",
    [
        (1, 0, (1 << 32) + 5),
        (1, 0, 1 << 31),
        (1, -(1 << 31) - 1, 5),
        (1 << 63, 0, 5),
        (1, 0, 5.0),
        (1, 0, np.float32(5)),
        (1, 0, "5"),
        (1, 0, None),
        (1, False, 5),
        (np.True_, 0, 5),
        (1, 0),
        (1, 0, 5, 6),
        7,
    ],
    ids=repr,
)
def test_nodes_that_are_not_three_integers_are_refused(node: Any) -> None:
    good = [(1, 0, 5)]
    for paths in ([[node]], [good, [*good, node], good], [[], [node, *good]]):
        request = next(i for i, path in enumerate(paths) if any(n is node for n in path))
        with pytest.raises(ValueError, match="a path node must be three integers") as error:
            PrefixPaths.from_lists(paths)
        assert str(error.value).endswith(f"got {node!r} on the path of request {request}")


def test_a_node_may_be_an_array_of_any_integers() -> None:
    node = np.array([1, 0, 4], dtype=np.int32)
    assert PrefixPaths.from_lists([[node]]).kv_end.tolist() == [4]  # type: ignore[list-item]


def test_all_nodes_of_a_wrong_length_are_not_regrouped() -> None:
    """Three pairs have as many numbers as two triples."""
    with pytest.raises(ValueError, match=r"got \(1, 0\) on the path of request 0"):
        PrefixPaths.from_lists([[(1, 0), (5, 2), (5, 9)]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"got \[0, .* on the path of request 0") as raised:
        PrefixPaths.from_lists([[[*range(10**6)]]])  # type: ignore[list-item]
    assert len(str(raised.value)) < 300


def test_a_path_that_is_no_list_is_named() -> None:
    with pytest.raises(TypeError, match="the path of request 1 must be a list of nodes, got None"):
        PrefixPaths.from_lists([[], None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="paths must be a list of nodes per request, got None"):
        PrefixPaths.from_lists(None)  # type: ignore[arg-type]


def test_private_paths_of_fewer_than_no_requests_are_refused() -> None:
    assert len(PrefixPaths.private(0)) == 0
    for number in (True, 2.5, "3", None):
        with pytest.raises(TypeError, match=f"num_requests must be an integer, got {number!r}"):
            PrefixPaths.private(number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_requests must not be negative, got -1"):
        PrefixPaths.private(-1)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("path_begin", [0, 0], "list"),
        ("path_begin", np.zeros(2, np.int64), "1-D int64"),
        ("path_begin", np.zeros((2, 1), np.int32), "2-D int32"),
        ("node_id", np.zeros(0, np.int32), "1-D int32"),
        ("kv_begin", None, "NoneType"),
        ("kv_end", np.zeros(4, np.int32)[::2], r"strides \(8,\)"),
    ],
)
def test_arrays_of_another_kind_are_named(name: str, value: Any, found: str) -> None:
    arrays = {each: getattr(PrefixPaths.private(1), each) for each in PrefixPaths.__slots__}
    dtype = "int64" if name == "node_id" else "int32"
    message = f"{name} must be a contiguous 1-D {dtype} NumPy array, got {found}$"
    with pytest.raises(TypeError, match=message):
        PrefixPaths(**arrays | {name: value})


def test_other_paths_are_refused() -> None:
    batch = DecodeBatch(np.zeros(1, np.int32), lambda: PrefixPaths.private(1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"batch.paths must be PrefixPaths, got function"):
        batch.read_paths()
