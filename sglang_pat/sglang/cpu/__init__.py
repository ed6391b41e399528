"""Run SGLang's engine on a machine without a CUDA driver.

`python -m sglang_pat.sglang.cpu` starts a server there. The demo and the engine tests call
`enable_cpu_engine()` before they import SGLang.

SGLang imports its `sgl_kernel` wheel everywhere, and that wheel needs `libcuda.so.1`. Stubs replace
it in this process and in every process that this one starts. They also hide FlashInfer, which is
slow to import and useless without a driver. With a driver nothing is replaced.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# Tokens in the KV pool of a server whose arguments give no size.
KV_POOL_TOKENS = 32_768
STUB_DIR = Path(__file__).resolve().parent / "stubs"


def cuda_driver_is_present() -> bool:
    """Return True if the CUDA driver library can be loaded, which the `sgl_kernel` wheel needs.

    Counting devices would initialise the driver, which a process that forks later must not do.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def new_engine(**arguments: Any) -> Any:
    """Return `sglang.Engine(**arguments)`, which runs on the CPU if there is no CUDA driver."""
    enable_cpu_engine()
    import sglang

    return sglang.Engine(**arguments)


def enable_cpu_engine() -> bool:
    """Make SGLang run on the CPU if there is no CUDA driver, and return whether it does.

    Child processes inherit this through the environment. RuntimeError if SGLang has already been
    imported and has chosen its platform.
    """
    if cuda_driver_is_present():
        return False
    active = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and str(STUB_DIR) in sys.path
    if active:
        return True
    if "sglang.srt" in sys.modules:
        raise RuntimeError(
            "enable_cpu_engine() was called after SGLang had been imported and had chosen its "
            "platform; call it first"
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang 0.5.17 assumes that a backend it does not know uses Triton, even on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    # With more threads than free cores a tiny model takes ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(STUB_DIR))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in inherited if folder and folder != str(STUB_DIR)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB_DIR), *others])
    return True


def bound_kv_pool(arguments: list[str]) -> list[str]:
    """Return the arguments of a server with a size for its KV pool.

    SGLang would size the pool by the free memory: most of the machine. A size among `arguments`
    wins, because it comes later. With `--config` nothing is added: a size here would
    win over one in the file.
    """
    if "--config" in arguments:
        return arguments
    return ["--max-total-tokens", str(KV_POOL_TOKENS), *arguments]
