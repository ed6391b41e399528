"""CudaExecutor's use of its buffers, without a GPU: kernels and pinned memory are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sample_forests import ForestCase, make_case, make_scheduler, plan_case

from sglang_pat.attention import default_workers
from sglang_pat.batch import IntArray, Step
from sglang_pat.executors import cuda
from sglang_pat.executors.cuda import CudaExecutor, PlanOverflowError
from sglang_pat.plan import BufferSizes, PlanHeader, copy_plan

HEADS, HEAD_DIM = 8, 64
SMALL = make_case([(-1, 100)], [(0, 10)] * 2)
LARGE = make_case([(-1, 3000), (0, 200)], [(1, 70), (0, 400)] * 20)
NO_STEP = Step(torch.zeros(0, 1), *[torch.zeros(0)] * 2, np.zeros(0, dtype=np.int32))


class Staging:
    """Like StagingBuffer, of a device that is done only when it is waited for."""

    sent: ClassVar[list[Staging]]  # in this order

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = np.zeros(size, dtype=np.int32)
        self.is_busy = False

    @property
    def array(self) -> IntArray:
        """Asked for where a plan is written."""
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


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Staging]:
    """Buffers sent to the device."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(cuda, "StagingBuffer", Staging)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(Staging, "sent", [], raising=False)
    return Staging.sent


def make_executor(reservation: BufferSizes | None) -> CudaExecutor:
    kernels: Any = SimpleNamespace(
        config=SimpleNamespace(partial_dtype=torch.bfloat16, head_dim=192, v_head_dim=HEAD_DIM),
        num_sms=132,
        gather_slots=lambda *args: None,
    )
    return CudaExecutor(kernels, HEADS, torch.device("cpu"), reservation)


def planned(case: ForestCase) -> Any:
    scheduler = make_scheduler(by_time=False)
    plan_case(scheduler, case)
    return scheduler


def test_a_plan_that_exceeds_the_reservation_is_refused(sent: list[Staging]) -> None:
    reservation = BufferSizes.for_requests(2, 1000, num_workers=33, group_size=4)
    executor = make_executor(reservation)
    buffers = executor.buffers
    with pytest.raises(PlanOverflowError, match=r"3200 shared_slots; reserved are .* 1000 shared"):
        executor.load_plan(planned(LARGE), NO_STEP)
    assert sent == []
    executor.load_plan(planned(SMALL), NO_STEP)
    assert executor.buffers is buffers, "captured graphs have their addresses"


def test_without_a_reservation_buffers_grow_and_stay(sent: list[Staging]) -> None:
    executor = make_executor(None)
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


def test_slots_are_gathered_again_where_they_may_have_moved(sent: list[Staging]) -> None:
    executor = make_executor(None)
    executor.load_plan(planned(SMALL), NO_STEP)
    executor.reuse_plan(NO_STEP)
    assert len(sent) == 1
    executor.reuse_plan(NO_STEP, gather=True)
    assert len(sent) == 2
    executor.load_plan(planned(make_case([], [(-1, 10)])), NO_STEP)
    executor.reuse_plan(NO_STEP, gather=True)
    assert len(sent) == 3, "nothing is shared"


def test_pinned_memory_is_written_again_only_after_it_was_copied(sent: list[Staging]) -> None:
    reservation = BufferSizes.for_requests(8, 1000, num_workers=33, group_size=4)
    executor = make_executor(reservation)
    for _ in range(7):
        executor.load_plan(planned(SMALL), NO_STEP)
    used = [id(staging) for staging in sent]
    assert len(set(used)) == 3
    assert used[:3] * 2 == used[:6]


def test_siblings_send_their_plan_again_when_the_other_was_there(sent: list[Staging]) -> None:
    first = make_executor(BufferSizes.for_requests(64, 4000, num_workers=33, group_size=4))
    second = first.sharing_buffers()
    assert second.buffers is first.buffers
    first.load_plan(planned(SMALL), NO_STEP)
    second.load_plan(planned(LARGE), NO_STEP)
    of_first, of_second = sent
    assert of_first is not of_second
    written = of_first.memory.copy()
    second.reuse_plan(NO_STEP)
    assert len(sent) == 2, "its plan is in the buffers"
    for _ in range(2):
        first.reuse_plan(NO_STEP)
    assert sent[2:] == [of_first]
    assert np.array_equal(of_first.memory, written)
    second.reuse_plan(NO_STEP)
    assert sent[-1] is of_second


def test_a_run_sends_its_plan_again_when_a_siblings_is_there(
    sent: list[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_executor(BufferSizes.for_requests(64, 4000, num_workers=33, group_size=4))
    second = first.sharing_buffers()
    first.load_plan(planned(SMALL), NO_STEP)
    second.load_plan(planned(LARGE), NO_STEP)
    of_first = sent[0]

    class SetsLayerError(Exception):
        """So far goes the run: nothing is launched."""

    def stop(*_: object) -> None:
        raise SetsLayerError

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(CudaExecutor, "_set_layer", stop)
    layer: Any = None
    for _ in range(2):
        with pytest.raises(SetsLayerError):
            first.run(layer)
        assert first.buffers.staging is of_first
    assert sent[2:] == [of_first]


def test_buffers_that_may_move_are_not_shared(sent: list[Staging]) -> None:
    with pytest.raises(ValueError, match="pass max_requests"):
        make_executor(None).sharing_buffers()


def test_memory_is_pinned_in_the_context_of_the_executors_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anywhere else it would create a context on the current device, some 500 MB."""
    current: list[torch.device] = []
    pinned_on: list[torch.device] = []

    @contextmanager
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
    cuda.StagingBuffer(16, device)
    assert pinned_on == [device]


@pytest.mark.parametrize(
    ("num_ctas", "num_kv_heads", "workers"), [(264, 8, 33), (84, 8, 10), (30, 32, 1)]
)
def test_workers_are_the_ctas_that_fit(num_ctas: int, num_kv_heads: int, workers: int) -> None:
    kernels: Any = SimpleNamespace(num_ctas=num_ctas)
    assert default_workers(kernels, num_kv_heads) == workers
