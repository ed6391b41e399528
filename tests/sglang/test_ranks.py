"""In debug mode, all ranks notice if one plans differently."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_pat import DecodeBatch, PackAttention, PrefixPaths
from sglang_pat.plan import DecodePlan
from sglang_pat.sglang.step.debug_checks import RankChecker, digest, own_group
from sglang_pat.stats import bound_of


def make_plan(seq_lens: list[int]) -> DecodePlan:
    """Return a plan for requests that share 64 tokens."""
    attention = PackAttention(8, 2, 64, dtype=torch.float32)
    batch = DecodeBatch(
        np.array(seq_lens, dtype=np.int32), PrefixPaths.from_lists([[(1, 0, 64)]] * len(seq_lens))
    )
    return attention.plan(
        batch,
        req_to_token=torch.zeros(len(seq_lens), 4096, dtype=torch.int32),
        req_pool_indices=torch.arange(len(seq_lens)),
        seq_lens=torch.tensor(seq_lens),
    )


def check_as_rank(rank: int, ranks: int, folder: str) -> None:
    """Run a rank whose plans are first equal to the others', then different."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    checker = RankChecker(dist.group.WORLD)
    alike, last = make_plan([70, 90]), rank == ranks - 1
    checker.check([alike], [], None)  # a capture, whose time does not count
    for _ in range(3):  # each new plan follows two steps that reused the last
        checker.check([alike, alike], [500, 500], 9000 + 2000 * last)
    checker.check([alike], [400 + 300 * last], None)
    none, some, most = (str(bound_of(ns)) for ns in (0, 300, 2000))
    assert checker.checked == {"steps": 5}
    assert checker.apart_ns == {none: 6, some: 1, most: 3}
    assert checker.planned_apart_ns == {most: 3}
    with pytest.raises(RuntimeError, match="ranks planned the step differently"):
        checker.check([alike, make_plan([70, 90 + 2000 * last])], [], 9000)
    with pytest.raises(RuntimeError, match="ranks repeated the last plan differently: steps"):
        checker.check([alike], [500] * (1 + last), 9000)
    assert checker.checked["steps"] == 5
    group = own_group(range(ranks), seconds=2)
    if last:
        with pytest.raises(RuntimeError, match="this rank planned a step that another rank did no"):
            RankChecker(group).check([alike], [], 9000)
    dist.barrier()  # the others go on meanwhile
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_plan_differently_are_noticed(ranks: int, tmp_path: Path) -> None:
    mp.start_processes(check_as_rank, (ranks, str(tmp_path)), nprocs=ranks, start_method="fork")


def test_the_digest_is_of_the_plan_and_of_nothing_else() -> None:
    RankChecker(None).check([make_plan([70, 90])], [], 9000)  # has nobody to ask
    assert digest(make_plan([70, 90])) == digest(make_plan([70, 90]))
    assert digest(make_plan([70, 90])) != digest(make_plan([70, 2090]))
