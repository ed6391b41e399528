"""Bad input to the CUDA kernels: an error that names the value, before any launch."""

from __future__ import annotations

import pytest
import torch
from pack_decode_cases import MIXED, Heads, Tensors, needs_gpu, planned_step

from sglang_pat.batch import Step

pytestmark = needs_gpu

HEADS = Heads(8, 2)


def decode(**changes) -> None:
    tensors = Tensors.make(MIXED, HEADS)
    step = planned_step(HEADS)
    step.write(MIXED.batch(), tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens)
    arguments = {
        "q": tensors.q,
        "k_cache": tensors.k_cache,
        "v_cache": tensors.v_cache,
        "out": torch.zeros_like(tensors.q),
    }
    executor = step.executor
    for name, change in changes.items():
        if name in arguments:
            arguments[name] = change(arguments[name])
        elif name in Step._fields:
            executor.step = executor.step._replace(**{name: change(executor.step)})
        else:
            executor.buffers = executor.buffers._replace(**{name: change(executor.buffers)})
    step.decode(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q.half()}, "q must be 3-D bfloat16, got 3-D float16"),
        ({"q": lambda q: q[:, :7]}, "7 and 2"),
        ({"k_cache": lambda k: k.cpu()}, "k_cache must be on cuda:0 like the plan, got cpu"),
        ({"k_cache": lambda k: k[:, :, ::2]}, r"shape \[n, 2, 128\]"),
        (
            {"v_cache": lambda v: v.flatten()[1 : 1 + 256 * 9].view(9, 2, 128)},
            "v_cache must be aligned to 16 bytes",
        ),
        ({"out": lambda out: out[1:]}, r"out must have shape \[\d+, 8, 128\]"),
        ({"partial_out": lambda s: s.partial_out.half()}, "partial_out must be 3-D bfloat16"),
        ({"plan": lambda s: s.plan[:64]}, "plan must hold"),
        ({"seq_lens": lambda s: s.seq_lens.float()}, "seq_lens must be 1-D int32 or int64"),
        ({"seq_lens": lambda s: s.seq_lens[:3]}, "entry for each"),
        ({"req_to_token": lambda s: s.req_to_token.long()}, "req_to_token must be 2-D int32"),
    ],
)
def test_is_refused(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(**changes)
