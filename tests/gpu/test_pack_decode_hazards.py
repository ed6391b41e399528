"""Wrong uses of the kernels are noticed: other plans, streams, graphs, lengths or slots."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from pack_decode_cases import (
    MIXED,
    Heads,
    Tensors,
    captured,
    check,
    config_of,
    planned,
    planned_step,
    run,
)
from sample_forests import make_case

from sglang_pat.attention import PackAttention, default_workers
from sglang_pat.executors.loaded_kernels import load_kernels

HEADS = Heads(8, 2)
CASES = [
    make_case([(-1, 900)], [(0, 50 + 9 * i) for i in range(12)], seed=1),
    make_case([(-1, 70), (0, 300)], [(0, 800)] * 5 + [(1, 3)] * 7, seed=2),
]
# A trap in a kernel destroys the CUDA context of its process, so these tests run in processes of
# their own.
PRELUDE = """
    import torch
    from sample_forests import make_case
    from pack_decode_cases import Heads, Tensors, captured, planned

    heads = Heads(8, 2)
"""


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=False
    )


def assert_stopped(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.splitlines() == ["prepared"], done.stderr[-2000:]
    assert done.returncode != 0
    assert re.search(r"CUDA error: (unspecified launch failure|an illegal instr)", done.stderr)


@pytest.mark.parametrize("num_requests", [5, 7])
def test_a_graph_stops_at_the_plan_of_another_batch(num_requests: int) -> None:
    assert_stopped(
        run_apart(f"""
            case, other = (make_case([(-1, 300)], [(0, 40)] * n) for n in (6, {num_requests}))
            tensors, step = planned(case, heads)
            graph, *outputs = captured(step, tensors)
            graph.replay()
            torch.cuda.synchronize()
            print("prepared", flush=True)
            step.write(other.batch(), **Tensors.make(other, heads).index)
            graph.replay()
            torch.cuda.synchronize()
            print("not stopped")
        """)
    )


def test_graphs_that_run_at_once_on_the_same_buffers_stop() -> None:
    assert_stopped(
        run_apart("""
            case = make_case([(-1, 3000)], [(0, 2000)] * 64)
            tensors, step = planned(case, heads)
            graphs = [captured(step, tensors, layers=50) for _ in range(2)]
            streams = [torch.cuda.Stream() for _ in graphs]
            for graph, *_ in graphs:  # one after the other, all is well
                graph.replay()
            torch.cuda.synchronize()
            print("prepared", flush=True)
            for _ in range(20):
                for (graph, *_), stream in zip(graphs, streams):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize()
            print("not stopped")
        """)
    )


def test_the_first_launch_of_a_process_may_be_in_a_capture() -> None:
    done = run_apart("""
        case = make_case([], [(-1, 90)] * 5)  # nothing to gather before it
        tensors, step = planned(case, heads, num_workers=8)
        graph, out, _ = captured(step, tensors)
        graph.replay()
        torch.cuda.synchronize()
        print(bool(out.isfinite().all()))
    """)
    assert done.stdout.split() == ["True"], done.stderr[-2000:]


def test_each_graph_has_a_ticket_counter() -> None:
    """A graph that stops half-way, or runs beside another, leaves the other's counter alone."""
    tensors, step = planned(CASES[0], HEADS)
    graphs = [captured(step, tensors) for _ in range(2)]
    owners = []
    for graph, *_ in graphs:
        graph.replay()
        owners.append(int(step.executor.buffers.counters[0, 0]))
    run(step, tensors)
    owners.append(int(step.executor.buffers.counters[0, 0]))
    assert len(set(owners)) == 3
    assert owners[-1] == 1


class TwoPlans:
    """A step, two streams, and the plans of two batches of equal size."""

    def __init__(self) -> None:
        self.tensors = [Tensors.make(case, HEADS) for case in CASES]
        self.step = planned_step(HEADS)
        self.streams = [torch.cuda.Stream() for _ in CASES]
        self.write(0)
        torch.cuda.synchronize()

    def write(self, index: int) -> None:
        case, each = CASES[index], self.tensors[index]
        self.step.write(case.batch(), **each.index)


def test_a_run_waits_for_the_plan_of_another_stream() -> None:
    plans = TwoPlans()
    with torch.cuda.stream(plans.streams[0]):
        torch.cuda._sleep(200_000_000)  # clock cycles
        plans.write(1)
    with torch.cuda.stream(plans.streams[1]):
        result = run(plans.step, plans.tensors[1])
    torch.cuda.synchronize()
    check(*result, plans.tensors[1])


def test_a_plan_waits_for_the_run_on_another_stream() -> None:
    plans = TwoPlans()
    with torch.cuda.stream(plans.streams[0]):
        torch.cuda._sleep(200_000_000)  # clock cycles
        result = run(plans.step, plans.tensors[0])
    with torch.cuda.stream(plans.streams[1]):
        plans.write(1)
    torch.cuda.synchronize()
    check(*result, plans.tensors[0])


def test_lengths_beyond_the_table_end_with_it() -> None:
    case = make_case([(-1, 100)], [(0, 60)] * 3 + [(-1, 160)] * 2)
    tensors, step = Tensors.make(case, HEADS), planned_step(HEADS)
    tensors.req_to_token = tensors.req_to_token[:, :160]  # dropped: slots outside the pool
    step.write(case.batch(), **tensors.index)
    expected = run(step, tensors)
    tensors.seq_lens += 3
    out, lse = run(step, tensors)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_buffers_grow_on_another_stream() -> None:
    heads = (HEADS.num_qo_heads, HEADS.num_kv_heads, HEADS.head_dim)
    attention = PackAttention(*heads, dtype=HEADS.dtype, device="cuda")
    small = make_case([(-1, 300)], [(0, 40)] * 2)
    for case in (small, MIXED):  # the second needs larger buffers
        tensors = Tensors.make(case, HEADS)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            attention.plan(case.batch(), **tensors.index)
            out, lse = attention.run(tensors.q, tensors.k_cache, tensors.v_cache, return_lse=True)
            torch.cuda.synchronize()
        check(out, lse, tensors)


def test_workers_are_the_ctas_that_the_device_holds() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kernels = load_kernels(config_of(HEADS), device.index)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    ctas_per_sm = 1 if torch.cuda.get_device_capability() in ((8, 6), (8, 9), (12, 0)) else 2
    assert kernels.num_ctas == ctas_per_sm * num_sms
    assert default_workers(kernels, 8) == ctas_per_sm * num_sms // 8


@pytest.mark.parametrize(
    ("slot", "kv_dtype"), [(-1, "float8_e4m3fn"), (9, "float8_e4m3fn"), (9, "bfloat16")]
)
def test_a_write_stops_at_a_slot_that_is_not_there(slot: int, kv_dtype: str) -> None:
    assert_stopped(
        run_apart(f"""
            from sglang_pat.executors.jit import KernelConfig
            from sglang_pat.executors.kv_writer import KvWriter

            device = torch.device("cuda", 0)
            kv_dtype = torch.{kv_dtype}
            config = KernelConfig.for_device(torch.bfloat16, 128, device, 0, kv_dtype)
            k = torch.zeros(2, 1, 128, device=device, dtype=torch.bfloat16)
            caches = [torch.zeros(9, 1, 128, device=device).to(kv_dtype) for _ in range(2)]
            writer, slots = KvWriter(config, device), torch.tensor([1, {slot}], device=device)
            print("prepared", flush=True)
            writer.write(k, k, slots, *caches)
            torch.cuda.synchronize()
        """)
    )
