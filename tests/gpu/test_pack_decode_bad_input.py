"""Bad input to the CUDA kernels: an error that names the value, before any launch."""

from __future__ import annotations

import pytest
import torch
from pack_decode_cases import MIXED, Heads, Tensors, needs_gpu

from sglang_pat import PackAttention

pytestmark = needs_gpu

HEADS = Heads(8, 2)
STEP = ("req_to_token", "req_pool_indices", "seq_lens")


def decode(**changes) -> None:
    tensors = Tensors.make(MIXED, HEADS)
    layer = {
        "q": tensors.q,
        "k_cache": tensors.k_cache,
        "v_cache": tensors.v_cache,
        "out": torch.zeros_like(tensors.q),
    }
    step = {name: getattr(tensors, name) for name in STEP}
    for name, change in changes.items():
        of = step if name in step else layer
        of[name] = change(of[name])
    attention = PackAttention(8, 2, HEADS.head_dim, dtype=HEADS.dtype, device="cuda")
    attention.plan(MIXED.batch(), **step)
    attention.run(**layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q.half()}, "q must be torch.bfloat16, got torch.float16"),
        ({"q": lambda q: q[:, :7]}, r"q must have shape \[\d+, 8, 128\], got \[\d+, 7, 128\]"),
        ({"q": lambda q: q.mT.contiguous().mT}, "q must have dense heads"),
        ({"k_cache": lambda k: k.cpu()}, "k_cache must be on cuda:0, got cpu"),
        ({"k_cache": lambda k: k[:, :, ::2]}, r"shape \[num_slots, 2, 128\]"),
        (
            {"v_cache": lambda v: v.flatten()[1 : 1 - 256].view(-1, 2, 128)},
            "k_cache and v_cache must have as many slots",
        ),
        (
            {
                "k_cache": lambda k: k[1:],
                "v_cache": lambda v: v.flatten()[1 : 1 - 256].view(-1, 2, 128),
            },
            "v_cache must be aligned to 16 bytes",
        ),
        ({"out": lambda out: out[1:]}, r"out must have shape \[\d+, 8, 128\]"),
        ({"out": lambda out: out.repeat(1, 2, 1)[:, :8]}, "out must be contiguous"),
        ({"seq_lens": lambda lens: lens.float()}, "seq_lens must be 1-D torch.int64 or torch.int3"),
        ({"seq_lens": lambda lens: lens[:3]}, "seq_lens must have one entry per request"),
        ({"seq_lens": lambda lens: lens.repeat(2)[::2]}, "seq_lens must be contiguous"),
        ({"req_to_token": lambda table: table.long()}, "req_to_token must be 2-D torch.int32"),
        ({"req_to_token": lambda table: table.mT.contiguous().mT}, "must have dense rows"),
    ],
)
def test_is_refused(changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(**changes)
