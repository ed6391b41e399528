"""Runs pack_decode twice: unchanged, and with warps that sleep before others wait for them.

Usage: slow_warps.py WHO KV_DTYPE FOLDER: KV_DTYPE is e4m3, `as queries`, `wide` for head_dim 512,
`latent` for latent attention, or `latent mma` for its body on mma.sync; the folder is for changed
sources of the kernels.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import torch
from pack_decode_cases import Heads, Tensors, config_of, planned_step, run
from sample_forests import ForestCase, make_case

from sglang_pat.executors import jit
from sglang_pat.executors.loaded_kernels import load_kernels
from sglang_pat.support import LATENT_HEAD_DIMS

# Name -> file, line, and the code to insert after it.
DELAYS = {
    "converters": ("converter.cuh", "if (record.is_end()) return;", "__nanosleep(20000);"),
    "one converter": (
        "converter.cuh",
        "if (record.is_end()) return;",
        "if (warp_ == 1) __nanosleep(20000);",
    ),
    "one consumer": (
        "consumer.cuh",
        "position.advance(units);",
        "if (warp == 2) __nanosleep(40000);",
    ),
    "producer of keys": (
        "kv_stages.cuh",
        "int stage = ring_.stage;",
        "if (kIsKey) __nanosleep(9000);",
    ),
    "producer of values": (
        "kv_stages.cuh",
        "int stage = ring_.stage;",
        "if (!kIsKey) __nanosleep(9000);",
    ),
}
# Delays in the body for wide rows, which two warpgroups share.
WIDE_DELAYS = {
    "first half at the end": (
        "consumer.cuh",
        "position.advance(units);",
        "if (warp < 4) __nanosleep(40000);",
    ),
    "second half": (
        "wgmma_body.cuh",
        "consumer.release_following_keys();",
        "if (consumer.warp >= 4) __nanosleep(9000);",
    ),
    "a warp of both halves": (
        "wgmma_body.cuh",
        "consumer.release_following_keys();",
        "if (consumer.unit() == 1) __nanosleep(9000);",
    ),
}
# Delays in the body for latent attention on wgmma.
LATENT_DELAYS = {
    "first warpgroup": (
        "latent_body.cuh",
        "const StageRecord record = stage_record(first);",
        "__nanosleep(9000);",
    ),
    "second warpgroup": (
        "latent_body.cuh",
        "const StageRecord record = stage_record(second);",
        "__nanosleep(9000);",
    ),
    "first warpgroup at the end": (
        "latent_body.cuh",
        "exchange_sums(total, part);",
        "if (kGroup == 0) __nanosleep(40000);",
    ),
    "second warpgroup at the end": (
        "latent_body.cuh",
        "exchange_sums(total, part);",
        "if (kGroup == 1) __nanosleep(40000);",
    ),
    "one warp": (
        "latent_body.cuh",
        "exchange_sums(total, part);",
        "if (unit == 2) __nanosleep(40000);",
    ),
    "queries": ("latent_producer.cuh", "const int tile = item.tile;", "__nanosleep(20000);"),
    "first tokens": (
        "latent_producer.cuh",
        "const int stage = ring_.stage;",
        "if (kIsKey) __nanosleep(3000);",
    ),
    "second tokens": (
        "latent_producer.cuh",
        "const int stage = ring_.stage;",
        "if (!kIsKey) __nanosleep(3000);",
    ),
}
# Delays in the body for latent attention on mma.sync.
LATENT_MMA_DELAYS = {
    "quarter that writes": (
        "latent_mma_body.cuh",
        "auto& parts = storage.exchange[pass_unit];",
        "if (share.part == 2) __nanosleep(9000);",
    ),
    "quarter that reads": (
        "latent_mma_body.cuh",
        "float (&sum)[4] = scores[tile];",
        "if (share.part == 1) __nanosleep(9000);",
    ),
    "quarter that reads sums": (
        "latent_mma_body.cuh",
        "const float4 sum = parts[tile][tile][lane];",
        "if (share.part == 1 && tile == 0) __nanosleep(9000);",
    ),
    "unit at the end": (
        "latent_mma_body.cuh",
        "part.finish();",
        "if (pass_unit == 0) __nanosleep(40000);",
    ),
    "quarter at the end": (
        "latent_mma_body.cuh",
        "part.finish();",
        "if (share.part == 3) __nanosleep(40000);",
    ),
    "first panels": (
        "latent_mma_stages.cuh",
        "ring_.parity ^ 1);",
        "if (kIsKey) __nanosleep(3000);",
    ),
    "last panels": (
        "latent_mma_stages.cuh",
        "ring_.parity ^ 1);",
        "if (!kIsKey) __nanosleep(3000);",
    ),
}
DELAYS |= WIDE_DELAYS | LATENT_DELAYS | LATENT_MMA_DELAYS
HEAD_DIMS = (128, 64)
# Each CTA alternates large and small tiles; some have more stages than the ring.
CASE = make_case(
    [(-1, 40 + 17 * (7 * i % 40)) for i in range(120)],
    [(i % 120, 1 + 13 * (11 * i % 53)) for i in range(720)],
)


def results(case: ForestCase, kv_name: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    kv_dtype = torch.float8_e4m3fn if kv_name == "e4m3" else None
    kinds = [Heads(8, 2, head_dim, kv_dtype=kv_dtype) for head_dim in HEAD_DIMS]
    if kv_name == "wide":
        kinds = [Heads(8, 2, 512)]
    if kv_name.startswith("latent"):
        kinds = [Heads(16, 1, LATENT_HEAD_DIMS[0], v_head_dim=LATENT_HEAD_DIMS[1])]
    jit.build_all([config_of(heads) for heads in kinds])
    for heads in kinds:
        tensors = Tensors.make(case, heads)
        if kv_dtype is not None:
            caches = {name: getattr(tensors, name).to(kv_dtype) for name in ("k_cache", "v_cache")}
            tensors = dataclasses.replace(tensors, **caches)
        step = planned_step(heads, num_workers=2000, min_item_tokens=64)
        step.write(case.batch(), **tensors.index)
        found += run(step, tensors)
        torch.cuda.synchronize()
    return found


def delay(who: str, folder: Path) -> None:
    """Let later builds compile sources in which these warps are slow."""
    name, line, delay = DELAYS[who]
    shutil.copytree(jit.source_folder(), folder)
    path = folder / "pack_decode" / name
    source = path.read_text()
    assert source.count(line) == 1, f"{line} in {name}"
    path.write_text(source.replace(line, f"{line} {delay}"))
    jit.source_folder = lambda: folder
    load_kernels.cache_clear()


def main() -> int:
    who, kv_name, folder = sys.argv[1:]
    if kv_name == "latent mma":
        native = jit.KernelConfig.for_device
        force = torch.cuda.get_device_capability() == (9, 0)
        jit.KernelConfig.for_device = lambda *args: dataclasses.replace(
            native(*args), force_mma_sync=force
        )
    expected = results(CASE, kv_name)
    delay(who, Path(folder))
    found = results(CASE, kv_name)
    if all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
        print("the same bits")
        return 0
    print("other bits")
    return 1


if __name__ == "__main__":
    sys.exit(main())
