"""`sglang-pat calibrate`: measure what planning weighs, on the GPU of this machine.

Takes less than a minute. Every server that is started later with the same GPU, driver and kernels
reads the result.
"""

from __future__ import annotations

import argparse
import sys
import time

from sglang_pat.cli.gpus import find_gpus
from sglang_pat.output_file import output_file

DESCRIPTION = "measure on this GPU what planning weighs; servers started later use it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and the command itself as the default `run`."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print every measured plan")
    parser.add_argument(
        "--dry-run", action="store_true", help="measure and print, but do not keep the result"
    )
    parser.add_argument(
        "--samples",
        type=output_file,
        metavar="FILE",
        help="also write every measured plan, as JSON",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, fit, write.

    Returns the exit status: 0, 1 if the fit is bad or nothing can be measured, 2 without a GPU.
    """
    if not find_gpus():
        return _fail(2, "no NVIDIA GPU that the driver reports; `sglang-pat doctor` says more")
    begin = time.perf_counter()
    try:
        import torch

        from sglang_pat.bench import calibration
        from sglang_pat.executors.calibration import Machine
        from sglang_pat.executors.jit import KernelBuildError
        from sglang_pat.executors.kernel_cache import KernelCacheError
    except Exception as error:  # a broken installation may raise anything
        return _fail(1, f"torch cannot be imported ({error}): install it: pip install torch")
    if not torch.cuda.is_available():
        return _fail(2, "torch sees no GPU; `sglang-pat doctor` says more")
    try:
        machine = Machine.of(torch.device("cuda", torch.cuda.current_device()))
        print(f"{machine.gpu}, driver {machine.driver}, kernels {machine.kernels}")
        measured = calibration.measure(print if arguments.verbose else lambda _: None)
        if arguments.samples is not None:  # before the fit: a bad one is when they are wanted
            arguments.samples.write_text(calibration.samples_json(machine, measured))
        found = calibration.calibrate(machine, measured)
    except calibration.CalibrationError as error:
        return _fail(1, f"{error} Nothing was changed.")
    except (KernelBuildError, KernelCacheError) as error:
        return _fail(1, str(error))
    except OSError as error:
        return _fail(1, f"the samples cannot be written: {error}")
    for name, us in found.microseconds.items():
        print(f"{name:14}{us:12.6f}" + (" of a token" if name.startswith("body") else " us"))
    costs = ", ".join(f"{name} {value:g}" for name, value in found.costs.items())
    print(f"in tokens: {costs}")
    print(
        f"fitted to {found.num_plans} plans, off by {found.error:.1%}, at most {found.worst:.1%}; "
        f"{time.perf_counter() - begin:.0f} s"
    )
    if arguments.dry_run:
        return 0
    try:
        print(found.save())
    except (OSError, ValueError) as error:
        return _fail(1, f"the result cannot be kept: {error}")
    return 0


def _fail(status: int, message: str) -> int:
    print(f"sglang-pat calibrate: {message}", file=sys.stderr)
    return status
