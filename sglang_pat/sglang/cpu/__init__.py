"""Run SGLang's engine on a machine without a CUDA driver.

`python -m sglang_pat.sglang.cpu` starts a server there. The demo and the engine tests call
`enable_cpu_engine()` before they import SGLang.

Many modules of SGLang import the wheel `sgl_kernel`, which needs `libcuda.so.1`. Stubs replace the
wheel in this process and in every process that this one starts. A stub also replaces FlashInfer,
which is slow to import and useless without a driver. With a driver, nothing is replaced.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# Tokens in the KV pool of a server whose arguments do not set the size.
KV_POOL_TOKENS = 32_768
STUB_DIR = Path(__file__).resolve().parent / "stubs"


def cuda_driver_is_present() -> bool:
    """Return True if the CUDA driver's library, which `sgl_kernel` needs, can be loaded.

    Devices are not counted, because that would initialise the driver, and this process may fork
    later.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def new_engine(**arguments: Any) -> Any:
    """Return `sglang.Engine(**arguments)`. It runs on the CPU if there is no CUDA driver."""
    enable_cpu_engine()
    import sglang

    return sglang.Engine(**arguments)


def enable_cpu_engine() -> bool:
    """Make SGLang run on the CPU if there is no CUDA driver. Return True if it will.

    Child processes inherit the setting through the environment. Raises RuntimeError if SGLang has
    already been imported, because SGLang chooses its platform when it is imported.
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
    # SGLang 0.5.17 assumes that an unknown backend uses Triton, even on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"
    # With more threads than free cores, a tiny model takes ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(STUB_DIR))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in inherited if folder and folder != str(STUB_DIR)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB_DIR), *others])
    return True


def bound_kv_pool(arguments: list[str]) -> list[str]:
    """Return the arguments of a server, with a size for its KV pool added.

    Without a size, SGLang would use most of the machine's memory. If `arguments` already have a
    size, that one comes later and takes effect. With `--config` nothing is added, because the
    added size would override a size in the file.
    """
    if "--config" in arguments:
        return arguments
    return ["--max-total-tokens", str(KV_POOL_TOKENS), *arguments]
