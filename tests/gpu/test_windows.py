"""WindowAttention on a GPU, in eager steps and in a graph that is replayed while windows move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from window_scenes import DIM, HEADS, KV_HEADS, Scene

from sglang_pat.window import WindowAttention

DTYPE = torch.bfloat16


def on_gpu(scene: Scene) -> Scene:
    scene.caches = [each.to("cuda", DTYPE) for each in scene.caches]
    return scene


def step(scene: Scene, grown: int) -> tuple[Any, dict[str, torch.Tensor]]:
    batch, tensors = scene.step(grown)
    return batch, {name: each.cuda() for name, each in tensors.items()}


def check(scene: Scene, out: torch.Tensor, q: torch.Tensor, grown: int, window: int) -> None:
    count = len(scene.lens)
    cpu = Scene.__new__(Scene)
    cpu.__dict__.update(scene.__dict__, caches=[each.cpu() for each in scene.caches])
    expected, _ = cpu.dense(q[:count].cpu(), grown, window)
    torch.testing.assert_close(out[:count].cpu().double(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [32, 128, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_windows_move_on_in_a_graph(window: int, seed: int, chunked: bool) -> None:
    scene = on_gpu(Scene(seed, has_map=seed % 2 == 1, chunked=chunked))
    scene.table = scene.table[:, : int(scene.lens.max()) + 59]
    slot_map = None if scene.map is None else scene.map.cuda()
    rows = len(scene.lens) + scene.padding
    options: dict[str, Any] = {"dtype": DTYPE, "device": "cuda", "window": window}
    options |= {"slot_map": slot_map, "chunked": chunked}
    eager = WindowAttention(HEADS, KV_HEADS, DIM, **options)
    captured = WindowAttention(HEADS, KV_HEADS, DIM, max_requests=rows, **options)
    q = scene.queries().to("cuda", DTYPE)
    out = torch.empty_like(q)
    batch, tensors = step(scene, 0)
    captured.plan(batch, **tensors)
    graph = torch.cuda.CUDAGraph()
    captured.run(q, *scene.caches, out=out)
    with torch.cuda.graph(graph):
        captured.refill()
        captured.run(q, *scene.caches, out=out)
    left = 0
    for grown in range(60):
        batch, now = step(scene, grown)
        eager.plan(batch, **now)
        read = [Counter(row.tolist()) for row in eager.slots()[: len(scene.lens)]]
        assert read == scene.windows(grown, window)
        check(scene, eager.run(q, *scene.caches), q, grown, window)
        tensors["seq_lens"].copy_(now["seq_lens"])  # the tensor that the graph reads
        if left == 0:
            captured.plan(batch, **tensors)
            left = captured.steps_left()
        else:
            left -= 1
        graph.replay()
        check(scene, out, q, grown, window)
    tensors["seq_lens"].add_(3)  # beyond the table's end
    captured.refill()
    read = [Counter(row.tolist()) for row in captured.slots()[: len(scene.lens)]]
    assert read == scene.windows(59 + 3, window)
