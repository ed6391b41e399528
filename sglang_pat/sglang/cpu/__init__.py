"""Run SGLang's engine on a machine without a CUDA driver.

Beside the pipeline: the demo and the engine tests call `enable_cpu_engine()` before they import
SGLang. SGLang imports its `sgl_kernel` wheel everywhere, and that wheel cannot be loaded without
`libcuda.so.1`. Here a package of stubs takes its place, in this process and in every process
started from it, and FlashInfer is hidden, which is slow to import and of no use then. Where a
driver is present nothing of this is ever active.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

STUB_DIR = Path(__file__).resolve().parent / "stubs"


def cuda_driver_is_present() -> bool:
    """Whether the CUDA driver library can be loaded: what the `sgl_kernel` wheel needs.

    Devices are not counted: that would initialise the driver, which a process that forks must not
    do.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def new_engine(**arguments: Any) -> Any:
    """`sglang.Engine(**arguments)`, on the CPU where no CUDA driver is present."""
    enable_cpu_engine()
    import sglang

    return sglang.Engine(**arguments)


def enable_cpu_engine() -> bool:
    """Make SGLang run on the CPU if, and only if, no CUDA driver is present. Idempotent.

    Call it before anything of SGLang is imported. Child processes inherit it through the
    environment. Returns whether the CPU engine is active; False means that nothing was changed.
    """
    if cuda_driver_is_present():
        return False
    active = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and str(STUB_DIR) in sys.path
    if active:
        return True
    if "sglang.srt" in sys.modules:
        raise RuntimeError(
            "enable_cpu_engine() was called after SGLang had been imported, which has chosen its "
            "platform by then; call it first"
        )
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # SGLang 0.5.17 takes a backend that it does not know by name for one that uses Triton, on the
    # CPU too.
    os.environ["TRITON_INTERPRET"] = "1"
    # More threads than free cores wait for each other: a tiny model then takes ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(STUB_DIR))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(STUB_DIR), *([inherited] if inherited else [])])
    return True
