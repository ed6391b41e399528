"""DecodeKernels without a GPU: what is checked and launched. Driver and streams are fakes."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forests import make_case, make_scheduler, plan_case

from sglang_pat.batch import Step
from sglang_pat.executors import kernels
from sglang_pat.executors.cuda import CudaExecutor
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.kernels import DecodeKernels, StagingBuffer
from sglang_pat.executors.layer import LayerInputs

CASE = make_case([(-1, 3000)], [(0, 200)] * 4)
HEADS, HEAD_DIM, SMS, CTAS = 8, 128, 132, 264


class Device:
    """Notes launches and checks. CPU tensors count as its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, tuple[int, int]]] = []
        self.checks: list[str] = []
        loaded = SimpleNamespace(
            num_sms=SMS,
            num_ctas=CTAS,
            facts=SimpleNamespace(merge_ctas_per_sm=2),
            gather_slots=self._launcher("gather"),
            pack_decode=(self._launcher("pack_decode"), self._launcher("with soft-cap")),
            merge_partials=(self._launcher("merge"), self._launcher("with sinks")),
        )
        check_step = kernels._check_step

        def note_step(step: Step, plan: torch.Tensor) -> None:
            self.checks.append("step")
            check_step(step, plan)

        def pin(staging: Any, size: int, device: torch.device) -> None:
            staging.tensor = torch.zeros(size, dtype=torch.int32)
            staging.array = staging.tensor.numpy()
            staging._copied = SimpleNamespace(query=lambda: True, record=lambda stream: None)

        stream = SimpleNamespace(cuda_stream=0)
        for owner, name, fake in (
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "current_stream", lambda: stream),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (kernels, "load_kernels", lambda config, index: loaded),
            (kernels, "_take_over", lambda *args: None),
            (kernels, "_check_step", note_step),
            (DecodeKernels, "_check_buffers", lambda *args: self.checks.append("buffers")),
            (StagingBuffer, "__init__", pin),
        ):
            monkeypatch.setattr(owner, name, fake)

    def _launcher(self, name: str) -> Any:
        return lambda argument, stream, grid: self.launches.append((name, grid))


def layer(**change: Any) -> LayerInputs:
    q = torch.zeros(len(CASE.seq_lens), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    cache = torch.zeros(10, HEADS // 4, HEAD_DIM, dtype=torch.bfloat16)
    inputs = LayerInputs(q, cache, cache, torch.empty_like(q), None, 0.1, 0.0, None)
    return inputs._replace(**change)


def loaded_executor(arch: tuple[int, int] = (9, 0)) -> CudaExecutor:
    scheduler = make_scheduler()
    plan_case(scheduler, CASE)
    config = KernelConfig(torch.bfloat16, HEAD_DIM, arch)
    executor = CudaExecutor(DecodeKernels(config), HEADS, torch.device("cpu"), None)
    count = len(CASE.seq_lens)
    table = torch.zeros(count, 4000, dtype=torch.int32)
    lens = torch.from_numpy(CASE.seq_lens)
    plan = executor.load_plan(scheduler, Step(table, torch.arange(count), lens, CASE.seq_lens))
    assert plan.header.num_merges == count
    return executor


def test_buffers_and_step_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    executor = loaded_executor()
    for _ in range(3):
        executor.run(layer())
    assert device.checks == ["buffers", "step"]
    merge = ("merge", (len(CASE.seq_lens) * HEADS, 1))
    assert device.launches == [("gather", (SMS, 8)), *[("pack_decode", (CTAS, 1)), merge] * 3]


def test_soft_cap_and_sinks_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    loaded_executor().run(layer(logit_cap=30.0, sinks=torch.zeros(HEADS)))
    assert [name for name, _ in device.launches] == ["gather", "with soft-cap", "with sinks"]


@pytest.mark.parametrize(("arch", "num_maps"), [((9, 0), 2), ((8, 0), 0), ((10, 0), 0)])
def test_keys_and_values_of_a_layer_have_a_map_on_hopper(
    arch: tuple[int, int], num_maps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch)
    asked: list[tuple[Any, ...]] = []

    def note(*cache: Any) -> int:
        asked.append(cache)
        return 0

    monkeypatch.setattr(kernels, "kv_map", note)
    keys, values = (torch.zeros(40, 4, HEAD_DIM, dtype=torch.bfloat16)[:, 1:3] for _ in range(2))
    loaded_executor(arch).run(layer(k_cache=keys, v_cache=values))
    slot_bytes = 4 * HEAD_DIM * 2
    both = [(cache.data_ptr(), cache.shape, 2, slot_bytes) for cache in (keys, values)]
    assert asked == both[:num_maps]


def test_another_step_is_checked_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    executor = loaded_executor()
    device.launches.clear()
    assert executor.step is not None
    executor.step = executor.step._replace(seq_lens=executor.step.seq_lens.float())
    for _ in range(2):  # what was refused is not remembered as checked
        with pytest.raises(ValueError, match="seq_lens must be 1-D int32 or int64, got 1-D float"):
            executor.run(layer())
    assert device.launches == []
