"""LoadedKernels: loads a compiled image on one device and launches its kernels.

Only this file calls the CUDA driver. torch makes the device's context and owns the streams.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda.bindings import driver

from sglang_pat._launch_params import NUM_LAUNCH_FACTS
from sglang_pat.executors.jit import SHIPPED, KernelBuildError, KernelConfig, build

logger = logging.getLogger(__name__)


class LaunchFacts(NamedTuple):
    """Tells how kernels must be launched. It has the fields of kernels/contract/launch_facts.h."""

    decode_threads: int
    decode_shared_bytes: int
    merge_threads: int
    merge_ctas_per_sm: int
    merge_slices: int
    gather_threads: int
    fill_threads: int
    write_threads: int


class _LaunchConfig(threading.local):
    """The driver's launch configuration. Each thread has one, because each launch changes it."""

    def __init__(self, num_threads: int, shared_bytes: int, overlap: bool) -> None:
        """Set up the configuration of a thread, at the thread's first launch."""
        config = self.record = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.gridDimZ = 1
        config.sharedMemBytes = shared_bytes
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1


class Launcher:
    """One kernel on one device. Any thread may launch it.

    Parameters
    ----------
    function : driver.CUfunction
    num_threads : int
        Threads of a CTA.
    shared_bytes : int
        Dynamic shared memory of a CTA.
    overlap : bool
        Whether the kernel may start before the previous kernel in the stream has ended
        (programmatic dependent launch). Its code must then wait before it uses what the previous
        kernel writes.
    """

    def __init__(
        self, function: Any, num_threads: int, shared_bytes: int = 0, *, overlap: bool
    ) -> None:
        self._function = function
        self._config = _LaunchConfig(num_threads, shared_bytes, overlap)

    def __call__(self, argument: int, stream: int, grid: tuple[int, int]) -> None:
        """Launch the kernel.

        Parameters
        ----------
        argument : int
            Address of an array that holds the addresses of the kernel's arguments.
        stream : int
            Handle of the stream.
        grid : (int, int)
            CTAs along x and y.

        Raises
        ------
        RuntimeError
            The driver refuses the launch, or reports an error of an earlier launch.
        """
        config = self._config.record
        config.gridDimX, config.gridDimY = grid
        config.hStream = driver.CUstream(stream)
        check(driver.cuLaunchKernelEx(config, self._function, argument, 0), "a launch")


class LoadedKernels:
    """The kernels of a compiled image in the current context, where they stay loaded.

    Attributes
    ----------
    config : KernelConfig
    facts : LaunchFacts
    num_sms : int
        Number of SMs of the device.
    num_ctas : int
        Number of CTAs in the grid of pack_decode: as many as the device can run at the same time.
    pack_decode : tuple of Launcher
        The kernels without and with a soft-cap. Latent attention has only the one without.
    merge_partials : tuple of Launcher
        The kernels without and with sinks.
    gather_slots : Launcher
    fill_rows : Launcher
    write_kv : Launcher
    """

    def __init__(self, image: bytes, config: KernelConfig) -> None:
        self.config = config
        device = torch.cuda.current_device()
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        library = check(
            driver.cuLibraryLoadData(image, [], [], 0, [], [], 0), f"loading {config.name}"
        )
        self.facts = facts = _read_facts(library)
        overlap = config.arch >= (9, 0)
        names = ["pack_decode_kernel", "pack_decode_soft_cap_kernel"]
        functions = [_function(library, name) for name in names[: 1 if config.is_latent else 2]]
        for function in functions:
            check(
                driver.cuFuncSetAttribute(
                    function,
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    facts.decode_shared_bytes,
                ),
                f"asking for {facts.decode_shared_bytes} bytes of shared memory",
            )
        # Both pack_decode kernels run the same number of CTAs per SM.
        ctas_per_sm = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                functions[0], facts.decode_threads, facts.decode_shared_bytes
            ),
            "counting the CTAs of pack_decode",
        )
        self.num_ctas: int = ctas_per_sm * self.num_sms
        self.pack_decode = tuple(
            Launcher(function, facts.decode_threads, facts.decode_shared_bytes, overlap=overlap)
            for function in functions
        )
        self.merge_partials = tuple(
            Launcher(_function(library, name), facts.merge_threads, overlap=overlap)
            for name in ("merge_partials_kernel", "merge_partials_sinks_kernel")
        )
        self.gather_slots = Launcher(
            _function(library, "gather_slots_kernel"), facts.gather_threads, overlap=False
        )
        self.fill_rows = Launcher(
            _function(library, "fill_rows_kernel"), facts.fill_threads, overlap=False
        )
        self.write_kv = Launcher(
            _function(library, "write_kv_kernel"), facts.write_threads, overlap=overlap
        )


@functools.cache
def load_kernels(config: KernelConfig, device_index: int) -> LoadedKernels:
    """Return the kernels of `config` on the current device, loaded once per device index.

    Raises
    ------
    KernelBuildError
        The kernels cannot be compiled (`jit.py`), or the driver cannot load them.
    """
    path = build(config)
    torch.cuda.current_stream(device_index).synchronize()  # makes the context if there is none
    try:
        return LoadedKernels(path.read_bytes(), config)
    except RuntimeError as error:
        problem = f"{path} cannot be loaded ({error})"
    if SHIPPED not in path.parts:
        raise KernelBuildError(
            f"{problem}: it was compiled for another GPU, or is damaged; compile it again: "
            f"sglang-pat build --force {config.build_options}"
        )
    # The wheel's image may come from a compiler that is newer than this driver. The compiler that
    # is installed with torch is not newer.
    logger.warning("%s; the kernels are compiled here instead", problem)
    return LoadedKernels(build(config, force=True).read_bytes(), config)


@functools.lru_cache(maxsize=1024)
def _tensor_map(address: int, num_slots: int, row_bytes: int, slot_bytes: int) -> Any:
    """Return a KV cache's tensor map with boxes of 32 slots by 128 bytes; None if impossible."""
    if row_bytes % 128 or num_slots < 32:
        return None
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    kinds = driver.CUtensorMapDataType, driver.CUtensorMapInterleave, driver.CUtensorMapSwizzle
    answer = driver.cuTensorMapEncodeTiled(
        kinds[0].CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [u64(row_bytes), u64(num_slots)],
        [u64(slot_bytes)],
        [u32(128), u32(32)],
        [u32(1), u32(1)],
        kinds[1].CU_TENSOR_MAP_INTERLEAVE_NONE,
        kinds[2].CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    try:
        return check(answer, "describing a KV cache")
    except RuntimeError as error:
        # Some versions of cuda-bindings pass a map that does not have the documented alignment. The
        # driver refuses such a map.
        _warn_once(f"{error}: slots that follow one another are copied one by one, which is slower")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def kv_map(address: int, shape: torch.Size, element_bytes: int, slot_bytes: int) -> int:
    """Return the address of a tensor map of keys or values with this `shape`.

    shape: `[num_slots, num_kv_heads, head_dim]`. The address is valid while `_tensor_map` still
    caches the map. 0 means that there is no map.
    """
    row_bytes = shape[1] * shape[2] * element_bytes
    found = _tensor_map(address, shape[0], row_bytes, slot_bytes)
    return 0 if found is None else int(found.getPtr())


def capture_id(stream: int) -> int:
    """Return the id of the capture that a stream is in."""
    _, number, *_ = check(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)), "a capture")
    return int(number)


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the results of a driver call without its error code: one value, or a tuple of several.

    Raises
    ------
    RuntimeError
        The call failed. The message has `what` and the driver's error.
    """
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA error: {_describe(error)} ({what})")
    return values[0] if len(values) == 1 else tuple(values)


def _describe(error: Any) -> str:
    _, text = driver.cuGetErrorString(error)
    return f"{error.name}, {text.decode()}" if text else str(error.name)


def _function(library: Any, name: str) -> Any:
    kernel = check(driver.cuLibraryGetKernel(library, name.encode()), f"looking for {name}")
    # Loads the function now. Otherwise the driver would load it at the first launch, perhaps during
    # a capture.
    return check(driver.cuKernelGetFunction(kernel), f"loading {name}")


def _read_facts(library: Any) -> LaunchFacts:
    address, size = check(
        driver.cuLibraryGetGlobal(library, b"launch_facts"), "looking for launch_facts"
    )
    facts = np.zeros(NUM_LAUNCH_FACTS, dtype=np.int32)
    if size != facts.nbytes:
        raise RuntimeError(f"launch_facts have {size} bytes, not {facts.nbytes}")
    check(driver.cuMemcpyDtoH(facts.ctypes.data, address, size), "reading launch_facts")
    return LaunchFacts(*facts.tolist())
