"""The results of pack_decode do not depend on which of its warps are slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "support" / "slow_warps.py"


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


CONVERTERS = ["converters", "one converter"]
OTHERS = ["one consumer", "producer of keys", "producer of values"]
WIDE = ["first half at the end", "second half", "a warp of both halves"]
LATENT = [
    *("first warpgroup", "second warpgroup"),
    *("first warpgroup at the end", "second warpgroup at the end", "one warp"),
    *("queries", "first tokens", "second tokens"),
]
LATENT_MMA = [
    *("quarter that writes", "quarter that reads", "quarter that reads sums"),
    *("quarter at the end", "unit at the end", "first panels", "last panels"),
]


@pytest.mark.parametrize(
    ("who", "kv_dtype"),
    [
        *((who, "e4m3") for who in CONVERTERS + OTHERS),
        *(pytest.param(who, "as queries", marks=pytest.mark.nightly) for who in OTHERS),
        *((who, "wide") for who in WIDE + OTHERS),
        *((who, "latent") for who in LATENT),
        *((who, "latent mma") for who in LATENT_MMA),
    ],
)
def test_slow_warps(who: str, kv_dtype: str, tmp_path: Path) -> None:
    if (who in CONVERTERS + LATENT or kv_dtype == "wide") and not is_hopper():
        pytest.skip("these warps are Hopper's")
    # In a process of its own: without a barrier, the kernel may not end.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, SCRIPT, who, kv_dtype, tmp_path / "kernels"],
        capture_output=True, text=True, env=environment, check=False, timeout=90,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "the same bits\n"), done.stderr[-2000:]
