"""`sglang-pat calibrate`: fit the planner's cost model to the GPU of this machine.

The command takes less than a minute. Every server that is started later with the same GPU, driver
and kernels uses the result. Each kind of layer has its own costs: `plain`, `latent` (MLA) and
`latent-fp8`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_pat.cli.arguments import bounded
from sglang_pat.cli.gpus import find_gpus
from sglang_pat.output_file import output_file
from sglang_pat.support import LATENT_HEAD_DIMS, has_kernels

if TYPE_CHECKING:
    from sglang_pat.bench.calibration import Measurement
    from sglang_pat.executors.calibration import Machine

KINDS = ("plain", "latent", "latent-fp8")  # copied: executors/calibration.py would import torch
DESCRIPTION = "measure on this GPU what planning weighs; servers started later use it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
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
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        help=f"of layers: {', '.join(KINDS)} (default: all that have kernels for this GPU)",
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
        from sglang_pat.executors.calibration import PLAIN, Machine
        from sglang_pat.executors.jit import KernelBuildError
        from sglang_pat.executors.kernel_cache import KernelCacheError
    except Exception as error:  # a broken installation may raise anything
        return _fail(1, f"torch cannot be imported ({error}): install it: pip install torch")
    if not torch.cuda.is_available():
        return _fail(2, "torch sees no GPU; `sglang-pat doctor` says more")
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        machine = Machine.of_device(device)
        print(f"{machine.gpu}, driver {machine.driver}, kernels {machine.kernels}")
    except (KernelBuildError, KernelCacheError) as error:
        return _fail(1, str(error))
    kinds = dict.fromkeys(arguments.kinds or KINDS)
    if not has_kernels(*LATENT_HEAD_DIMS, torch.cuda.get_device_capability(device)):
        if arguments.kinds is not None and set(kinds) != {PLAIN}:
            return _fail(1, f"latent attention has no kernels for the {machine.gpu}")
        kinds = {PLAIN: None}
    measured: dict[str, Sequence[Measurement]] = {}
    statuses = []
    for kind in kinds:  # saves each kind before it measures the next one
        try:
            report = print if arguments.verbose else lambda _: None
            measured[kind] = calibration.measure(report, kind)
            if arguments.samples is not None:  # before the fit, which may fail
                arguments.samples.write_text(calibration.samples_json(machine, measured))
        except calibration.CalibrationError as error:
            statuses.append(_fail(1, f"{kind}: {error} Its file was not changed."))
        except (KernelBuildError, KernelCacheError) as error:
            statuses.append(_fail(1, f"{kind}: {error}"))
        except OSError as error:
            return _fail(1, f"the samples cannot be written: {error}")
        else:
            statuses.append(_keep(machine, kind, measured[kind], arguments.dry_run))
    print(f"measured in {time.perf_counter() - begin:.0f} s")
    return max(statuses)


def _keep(machine: Machine, kind: str, measured: Sequence[Measurement], dry_run: bool) -> int:
    """Fit the costs of a kind of layer, print them, and write them. Returns the exit status."""
    from sglang_pat.bench import calibration

    try:
        found = calibration.calibrate(machine, measured, kind)
    except calibration.CalibrationError as error:
        return _fail(1, f"{kind}: {error} Its file was not changed.")
    print(f"{kind} layers:")
    for name, us in found.microseconds.items():
        print(f"{name:14}{us:12.6f}" + (" of a token" if name.startswith("body") else " us"))
    costs = ", ".join(f"{name} {value:g}" for name, value in found.costs.items())
    print(f"in tokens: {costs}")
    print(f"fitted to {found.num_plans} plans, off by {found.error:.1%}, at most {found.worst:.1%}")
    if dry_run:
        return 0
    try:
        print(found.save())
    except (OSError, ValueError) as error:
        return _fail(1, f"the result cannot be kept: {error}")
    return 0


def _fail(status: int, message: str) -> int:
    print(f"sglang-pat calibrate: {bounded(message)}", file=sys.stderr)
    return status
