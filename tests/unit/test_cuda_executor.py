"""CudaExecutor on a fake device: what it copies, checks and launches."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from launch_parameters import read
from sample_forests import ForestCase, make_case, make_scheduler, plan_case

from sglang_pat._scheduler import PlanCapacity
from sglang_pat.attention import default_workers
from sglang_pat.batch import IntArray, Step
from sglang_pat.executors import cuda, plan_buffers
from sglang_pat.executors.cuda import CudaExecutor
from sglang_pat.executors.jit import KernelConfig
from sglang_pat.executors.layer import LayerInputs
from sglang_pat.executors.window_rows import Window
from sglang_pat.plan import BufferSizes, PlanHeader, PlanOverflowError, copy_plan

CASE = make_case([(-1, 3000)], [(0, 200)] * 4)
SMALL = make_case([(-1, 100)], [(0, 10)] * 2)
LARGE = make_case([(-1, 3000), (0, 200)], [(1, 70), (0, 400)] * 20)
NO_STEP = Step(torch.zeros(0, 1), *[torch.zeros(0)] * 2, np.zeros(0, dtype=np.int32))
HEADS, HEAD_DIM, SMS, CTAS = 8, 128, 132, 264
CONFIG = KernelConfig(torch.bfloat16, 192, (9, 0), HEAD_DIM)


class Staging:
    """Stands in for StagingBuffer. The device finishes only when the host waits for it."""

    sent: ClassVar[list[Staging]]  # in the order of the copies

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = np.zeros(size, dtype=np.int32)
        self.is_busy = False

    @property
    def array(self) -> IntArray:
        """The buffer into which a plan is written."""
        assert not self.is_busy, "the memory is written while it is being copied"
        return self.memory

    @property
    def header(self) -> PlanHeader:
        return PlanHeader(*self.memory[: len(PlanHeader._fields)].tolist())

    def wait(self) -> None:
        self.is_busy = False

    def copy_to(self, plan: torch.Tensor, stream: Any) -> None:
        assert len(self.memory) == len(plan)
        self.is_busy = True
        self.sent.append(self)


class Device:
    """Records launches, checks and copies. CPU tensors count as device tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[str, tuple[int, int]]] = []
        self.checks: list[str] = []
        self.sent: list[Staging] = []
        check_contiguous = plan_buffers.check_contiguous

        def note(tensor: torch.Tensor, name: str) -> None:
            self.checks.append(name)
            check_contiguous(tensor, name)

        stream = SimpleNamespace(cuda_stream=0)
        for owner, name, fake in (
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "current_stream", lambda: stream),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (cuda, "check_contiguous", note),
            (plan_buffers, "check_contiguous", note),
            (cuda, "StagingBuffer", Staging),
        ):
            monkeypatch.setattr(owner, name, fake)
        monkeypatch.setattr(Staging, "sent", self.sent, raising=False)

    def kernels(self, config: KernelConfig) -> Any:
        """Return a stand-in for LoadedKernels."""
        return SimpleNamespace(
            config=config,
            num_sms=SMS,
            num_ctas=CTAS,
            facts=SimpleNamespace(merge_ctas_per_sm=2, merge_slices=1),
            gather_slots=self._launcher("gather"),
            pack_decode=(self._launcher("pack_decode"), self._launcher("with soft-cap")),
            merge_partials=(self._launcher("merge"), self._launcher("with sinks")),
        )

    def _launcher(self, name: str) -> Any:
        return lambda argument, stream, grid: self.launches.append((name, grid))

    def without_plan(
        self, reservation: BufferSizes | None, config: KernelConfig = CONFIG, heads: int = HEADS
    ) -> CudaExecutor:
        return CudaExecutor(self.kernels(config), heads, torch.device("cpu"), reservation)

    def executor(
        self,
        arch: tuple[int, int] = (9, 0),
        *,
        heads: int = HEADS,
        head_dims: tuple[int, int] = (HEAD_DIM, HEAD_DIM),
    ) -> CudaExecutor:
        """Return an executor that has loaded a plan."""
        scheduler = make_scheduler()
        plan_case(scheduler, CASE)
        config = KernelConfig(torch.bfloat16, head_dims[0], arch, head_dims[1])
        executor = self.without_plan(None, config, heads)
        count = len(CASE.seq_lens)
        table = torch.zeros(count, 4000, dtype=torch.int32)
        lens = torch.from_numpy(CASE.seq_lens)
        plan = executor.load_plan(scheduler, Step(table, torch.arange(count), lens, CASE.seq_lens))
        assert plan.header.num_merges == count
        return executor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def layer(**change: Any) -> LayerInputs:
    q = torch.zeros(len(CASE.seq_lens), HEADS, HEAD_DIM, dtype=torch.bfloat16)
    cache = torch.zeros(10, HEADS // 4, HEAD_DIM, dtype=torch.bfloat16)
    inputs = LayerInputs(q, cache, cache, torch.empty_like(q), None, 0.1, 0.0, None)
    return inputs._replace(**change)


def test_a_step_is_checked_once(device: Device) -> None:
    executor = device.executor()
    for _ in range(3):
        executor.run(layer())
    assert device.checks == ["req_pool_indices", "seq_lens", *["out"] * 3]
    merge = ("merge", (len(CASE.seq_lens) * HEADS, 1))
    assert device.launches == [("gather", (SMS, 8)), *[("pack_decode", (CTAS, 1)), merge] * 3]


def test_buffers_are_freed_with_their_executor(device: Device) -> None:
    """Buffers must be freed at once: Python's cycle collector would run too late."""
    executor = device.executor()
    executor.run(layer())
    plan = weakref.ref(executor.buffers.plan)
    gc.disable()
    try:
        del executor
        assert plan() is None
    finally:
        gc.enable()


def passed(executor: CudaExecutor, layer: LayerInputs) -> dict[str, Any]:
    """Run a layer; return the parameters of pack_decode."""
    executor.run(layer)
    assert executor.step is not None
    found = vars(executor.buffers) | executor.step._asdict() | layer._asdict()
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    return read(executor.buffers.decode.address, "DecodeParams", tensors)


def test_each_tensor_and_number_is_passed_in_its_place(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = device.executor((8, 0), head_dims=(192, 128))
    keys, values = (torch.zeros(9, 2, dim, dtype=torch.bfloat16) for dim in (192, 128))
    whole = layer(
        q=rows(HEADS, columns=192),
        k_cache=keys,
        v_cache=values,
        out=rows(HEADS),
        lse=torch.zeros(4, HEADS),
        sm_scale=0.25,
        logit_cap=0.0,
        sinks=torch.zeros(HEADS, dtype=torch.bfloat16),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    expected = {
        "plan": "plan",
        "q": ("q", HEADS * 192 * 2 // 16, 192 * 2 // 16),
        "q_rope": (None, 0, 0),
        "num_requests": 4,
        "k_cache": "k_cache",
        "v_cache": "v_cache",
        "k_slot_bytes": 2 * 192 * 2,
        "v_slot_bytes": 2 * 128 * 2,
        "shared_slots": "shared_slots",
        "req_to_token": "req_to_token",
        "req_to_token_stride": 4000,
        "table_width": 4000,
        "launch_tag": 1,
        "req_pool_indices": ("req_pool_indices", True),
        "seq_lens": ("seq_lens", False),
        "out": "out",
        "out_lse": "lse",
        "partial_out": "partial_out",
        "partial_lse": "partial_lse",
        "tickets": "counters+8",
        "partials_owner": "counters",
        "max_tickets": executor.buffers.sizes.plan.entries()["num_tickets"],
        "max_merges": 4,
        "num_q_heads": HEADS,
        "num_kv_heads": 2,
        "rows": (4, 16384),
        "logit_scale": (1.0, pytest.approx(0.25 * math.log2(math.e))),
        "v_scale": 1.0,
        "sinks": ("sinks", 1),
        "has_kv_maps": False,
        "k_scale_on_device": "k_scale",
        "v_scale_on_device": "v_scale",
    }
    assert passed(executor, whole) == expected
    gathered = {name: expected[name] for name in ("plan", "req_to_token", "shared_slots")}
    gathered |= {name: expected[name] for name in ("req_to_token_stride", "req_pool_indices")}
    assert executor.step is not None
    tensors = vars(executor.buffers) | executor.step._asdict()
    tensors = {name: tensors[name] for name in gathered if name != "req_to_token_stride"}
    assert read(executor.buffers.gather.address, "GatherParams", tensors) == gathered

    numbers = whole._replace(lse=None, sinks=None, logit_cap=5.0, k_scale=0.5, v_scale=0.75)
    expected |= {
        "out_lse": None,
        "logit_scale": (pytest.approx(0.25 * 0.5 / 5), pytest.approx(5 * math.log2(math.e))),
        "v_scale": 0.75,
        "sinks": (None, 0),
        "k_scale_on_device": None,
        "v_scale_on_device": None,
    }
    assert passed(executor, numbers) == expected

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda, "capture_id", lambda stream: 254 + 7)
    expected |= {"launch_tag": 9, "tickets": "counters+72"}  # the graph's own counter
    assert passed(executor, numbers) == expected


@pytest.mark.parametrize("slot_map", [None, torch.arange(50), torch.arange(50).int()])
def test_what_the_rows_of_windows_are_written_from(slot_map: torch.Tensor | None) -> None:
    sizes = BufferSizes(num_cuts=6)
    window = Window(64, slack=8, ahead=0, chunked=True, slot_map=slot_map)
    buffers = plan_buffers.PlanBuffers(sizes, HEADS, CONFIG, torch.device("cpu"), window)
    table = torch.zeros(9, 500, dtype=torch.int32)[:, :400]  # rows have a larger stride
    step = Step(table, torch.arange(4), torch.ones(4).int(), np.ones(4, dtype=np.int32))
    buffers.bind(step)
    rows = buffers.window_rows
    assert rows is not None
    tensors = {name: each for name, each in step._asdict().items() if name != "host_seq_lens"}
    tensors |= {"plan": buffers.plan, "rows": rows.slots, "row_lens": rows.seq_lens}
    tensors |= {} if slot_map is None else {"slot_map": slot_map}
    assert read(buffers.fill.address, "FillParams", tensors) == {
        "cuts": "plan+" + str(4 * sizes.plan.layout()["size"]),
        "req_to_token": "req_to_token",
        "req_to_token_stride": 500,
        "table_width": 400,
        "req_pool_indices": ("req_pool_indices", True),
        "seq_lens": ("seq_lens", False),
        "slot_map": ("slot_map", slot_map.dtype == torch.int64)
        if slot_map is not None
        else (None, False),
        "num_requests": 4,
        "window": 64,
        "chunked": True,
        "rows": "rows",
        "row_lens": "row_lens",
    }


@pytest.mark.parametrize(("reserved", "merged"), [(8, 4), (3, 3), (0, 0)])
def test_a_graph_merges_what_any_plan_may_need(
    reserved: int, merged: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured plan may need no merges, but replayed plans as many as fit."""
    executor = device.executor()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(cuda, "capture_id", lambda stream: 0)
    buffers = executor.buffers
    buffers.loaded = buffers.loaded._replace(num_merges=0)
    entries = buffers.sizes.plan.entries() | {"num_merges": reserved}
    buffers.sizes = buffers.sizes._replace(plan=PlanCapacity(**entries))
    assert passed(executor, layer(out=rows(HEADS)))["max_merges"] == merged


def test_buffers_wait_and_stay_for_the_stream_that_takes_them_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: kept.append((id(tensor), stream))
    )
    config = KernelConfig(torch.bfloat16, HEAD_DIM, (9, 0), HEAD_DIM)
    buffers: Any = plan_buffers.PlanBuffers(BufferSizes(), HEADS, config, torch.device("cpu"))
    waits: list[Any] = []
    first, second = SimpleNamespace(), SimpleNamespace(wait_stream=waits.append)
    for stream in (first, first, second, second):
        buffers.take_over(stream)
    assert waits == [first]
    tensors = [each for each in vars(buffers).values() if isinstance(each, torch.Tensor)]
    assert kept == [(id(each), second) for each in tensors]


def test_soft_cap_and_sinks_have_kernels_of_their_own(device: Device) -> None:
    device.executor().run(layer(logit_cap=30.0, sinks=torch.zeros(HEADS)))
    assert [name for name, _ in device.launches] == ["gather", "with soft-cap", "with sinks"]


@pytest.mark.parametrize(("arch", "num_maps"), [((9, 0), 2), ((8, 0), 0), ((10, 0), 0)])
def test_keys_and_values_of_a_layer_have_a_map_on_hopper(
    arch: tuple[int, int], num_maps: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def note(*cache: Any) -> int:
        asked.append(cache)
        return 0

    monkeypatch.setattr(cuda, "kv_map", note)
    keys, values = (torch.zeros(40, 4, HEAD_DIM, dtype=torch.bfloat16)[:, 1:3] for _ in range(2))
    device.executor(arch).run(layer(k_cache=keys, v_cache=values))
    slot_bytes = 4 * HEAD_DIM * 2
    both = [(cache.data_ptr(), cache.shape, 2, slot_bytes) for cache in (keys, values)]
    assert asked == both[:num_maps]


def test_values_may_be_a_part_of_the_keys_of_one_head(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention has one buffer, whose first columns are also V."""
    executor = device.executor(heads=4, head_dims=(192, 128))
    kv = torch.zeros(40, 1, 192, dtype=torch.bfloat16)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cuda, "kv_map", lambda *cache: asked.append(cache) or 0)
    q, out = rows(4, columns=192), rows(4, columns=128)
    executor.run(layer(q=q, out=out, k_cache=kv, v_cache=kv[..., :128]))
    assert [name for name, _ in device.launches] == ["gather", "pack_decode", "merge"]
    assert asked == [(kv.data_ptr(), (40, 1, dim), 2, 384) for dim in (192, 128)]
    both = torch.zeros(40, 2, 192, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="v_cache must have dense heads"):
        executor.run(layer(q=rows(8, columns=192), out=out, k_cache=both, v_cache=both[..., :128]))


APART = torch.zeros(2 * len(CASE.seq_lens), dtype=torch.int64)[::2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": APART}, r"seq_lens must be contiguous, got shape \[4\] and strides \(2,\)"),
        ({"req_pool_indices": APART}, "req_pool_indices must be contiguous"),
        (
            {"req_to_token": torch.zeros(4, 8000, dtype=torch.int32)[:, ::2]},
            r"req_to_token must have dense rows, got strides \(8000, 2\)",
        ),
    ],
)
def test_another_step_is_checked_before_a_launch(
    change: dict[str, torch.Tensor], message: str, device: Device
) -> None:
    executor = device.executor()
    device.launches.clear()
    assert executor.step is not None
    executor.reuse_plan(executor.step._replace(**change))
    for _ in range(2):  # a refused tensor is checked again
        with pytest.raises(ValueError, match=message):
            executor.run(layer())
    assert device.launches == []


def rows(heads: int, *, shift: int = 0, row: int = 0, columns: int = HEAD_DIM) -> torch.Tensor:
    """Return bfloat16 `[4, heads, columns]` at offset `shift`, with a row stride of `row`."""
    count, row = len(CASE.seq_lens), row or heads * columns
    flat = torch.zeros(count * row + shift, dtype=torch.bfloat16)[shift:]
    return flat.as_strided((count, heads, columns), (row, columns, 1), shift)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": rows(HEADS, shift=1)}, r"q must be aligned to 16 bytes, got address \d+ and row"),
        ({"q": rows(HEADS, row=1028)}, "q must be aligned to 16 bytes, .* row stride 2056 bytes"),
        ({"q": rows(2 * HEADS)[:, ::2]}, r"q must have dense heads, got strides \(2048, 256, 1\)"),
        ({"q": rows(HEADS)[:1].expand(4, -1, -1)}, "q must have a row stride of 1 to .*, got 0"),
        ({"q": rows(HEADS)[1:]}, "the plan, 4 and 4, got 3 and 4"),
        ({"k_cache": rows(2, columns=256)[..., ::2]}, "k_cache must have dense heads"),
        ({"v_cache": rows(2, shift=1)}, "v_cache must be aligned to 16 bytes"),
        (
            {"k_cache": torch.empty(2**27 + 1, 2, 128, dtype=torch.bfloat16, device="meta")},
            r"k_cache must span at most 4294967295 times 16 bytes, got shape \[134217729, 2, 128\]",
        ),
        ({"out": rows(2 * HEADS)[:, :HEADS]}, "out must be contiguous"),
        ({"out": rows(HEADS, shift=1)}, "out must be aligned to 16 bytes"),
        ({"sinks": torch.zeros(2 * HEADS)[::2]}, "sinks must be contiguous"),
    ],
)
def test_tensors_that_the_kernels_cannot_read_are_refused(
    change: dict[str, torch.Tensor], message: str, device: Device
) -> None:
    executor = device.executor()
    device.launches.clear()
    with pytest.raises(ValueError, match=message):
        executor.run(layer(**change))
    assert device.launches == []


def test_a_plan_that_was_not_wholly_sent_is_not_run(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = device.executor()
    step = executor.step
    assert step is not None

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(executor.kernels, "gather_slots", fail)
        with pytest.raises(RuntimeError, match="CUDA error"):
            executor.reuse_plan(step, gather=True)
    device.launches.clear()
    with pytest.raises(ValueError, match="of the plan, -1 and -1, got 4 and 4"):
        executor.run(layer())
    assert device.launches == []
    executor.reuse_plan(step)  # copies it once more
    executor.run(layer())
    assert [name for name, _ in device.launches] == ["gather", "pack_decode", "merge"]


# --- buffers ---


def planned(case: ForestCase) -> Any:
    scheduler = make_scheduler(by_time=False)
    plan_case(scheduler, case)
    return scheduler


def test_a_plan_that_exceeds_the_reservation_is_refused(device: Device) -> None:
    reservation = BufferSizes.for_requests(2, 1000, num_workers=33, group_size=4)
    executor = device.without_plan(reservation)
    buffers = executor.buffers
    with pytest.raises(PlanOverflowError, match=r"3200 shared_slots; reserved are .* 1000 shared"):
        executor.load_plan(planned(LARGE), NO_STEP)
    assert device.sent == []
    executor.load_plan(planned(SMALL), NO_STEP)
    assert executor.buffers is buffers, "captured graphs have their addresses"


def test_without_a_reservation_buffers_grow_and_stay(device: Device) -> None:
    executor = device.without_plan(None)
    large = planned(LARGE)
    plan = executor.load_plan(large, NO_STEP)
    assert plan.describe() == copy_plan(large).describe()
    buffers = executor.buffers
    assert len(buffers.shared_slots) == 2 * 3200
    assert buffers.partial_out.shape == (len(buffers.partial_lse), HEADS, HEAD_DIM)
    assert buffers.partial_out.dtype == torch.bfloat16
    assert buffers.partial_lse.dtype == torch.float32
    assert len(buffers.partial_lse) >= large.num_partials > 0
    executor.load_plan(planned(SMALL), NO_STEP)
    assert executor.buffers is buffers


def test_slots_are_gathered_again_where_they_may_have_moved(device: Device) -> None:
    executor = device.without_plan(None)
    executor.load_plan(planned(SMALL), NO_STEP)
    executor.reuse_plan(NO_STEP)
    assert len(device.sent) == 1
    executor.reuse_plan(NO_STEP, gather=True)
    assert len(device.sent) == 2
    executor.load_plan(planned(make_case([], [(-1, 10)])), NO_STEP)
    executor.reuse_plan(NO_STEP, gather=True)
    assert len(device.sent) == 3, "nothing is shared"


def test_pinned_memory_is_written_again_only_after_it_was_copied(device: Device) -> None:
    reservation = BufferSizes.for_requests(8, 1000, num_workers=33, group_size=4)
    executor = device.without_plan(reservation)
    for _ in range(7):
        executor.load_plan(planned(SMALL), NO_STEP)
    used = [id(staging) for staging in device.sent]
    assert len(set(used)) == 3
    assert used[:3] * 2 == used[:6]


@pytest.mark.parametrize("by", ["plan", "run"])
def test_siblings_send_their_plan_again_when_the_other_was_there(by: str, device: Device) -> None:
    first = device.without_plan(BufferSizes.for_requests(64, 4000, num_workers=33, group_size=4))
    second = first.sharing_buffers()
    assert second.buffers is first.buffers
    first.load_plan(planned(SMALL), NO_STEP)
    second.load_plan(planned(LARGE), NO_STEP)
    of_first, of_second = device.sent
    assert of_first is not of_second
    written = of_first.memory.copy()
    second.reuse_plan(NO_STEP)
    assert len(device.sent) == 2, "its plan is in the buffers"
    layer: Any = None
    for _ in range(2):
        if by == "plan":
            first.reuse_plan(NO_STEP)
        else:
            with pytest.raises(AttributeError):  # no layer was executed
                first.run(layer)
    assert device.sent[2:] == [of_first]
    assert np.array_equal(of_first.memory, written)
    second.reuse_plan(NO_STEP)
    assert device.sent[-1] is of_second


def test_memory_is_pinned_in_the_context_of_the_executors_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinning memory on any other device would create a CUDA context of 500 MB there."""
    current: list[torch.device] = []
    pinned_on: list[torch.device] = []

    @contextlib.contextmanager
    def device_guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def zeros(size: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        pinned_on.extend(current)
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device", device_guard)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch, "zeros", zeros)
    device = torch.device("cuda", 3)
    plan_buffers.StagingBuffer(16, device)
    assert pinned_on == [device]


@pytest.mark.parametrize(
    ("num_ctas", "num_kv_heads", "workers"), [(264, 8, 33), (84, 8, 10), (30, 32, 1)]
)
def test_workers_are_the_ctas_that_fit(num_ctas: int, num_kv_heads: int, workers: int) -> None:
    kernels: Any = SimpleNamespace(num_ctas=num_ctas)
    assert default_workers(kernels, num_kv_heads) == workers
