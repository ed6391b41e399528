"""`sglang-pat doctor`: check whether pat has what it needs, and say how to repair what is wrong.

A check does not raise, but reports what is wrong. Since torch or SGLang may be missing or broken,
only the checks import them, not this module.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from sglang_pat import support
from sglang_pat.bench.stand_ins import find_stand_ins
from sglang_pat.cli.arguments import bounded
from sglang_pat.cli.gpus import Gpu, find_gpus
from sglang_pat.cli.progress import sign_of_life
from sglang_pat.cli.served_model import add_model_options, loadable, server_words
from sglang_pat.offline.installed_sglang import (
    TOUCHPOINTS,
    missing_registrations,
    missing_touchpoints,
    unwrapped_backends,
)
from sglang_pat.offline.launch_flags import PLUGIN_GROUP
from sglang_pat.output_file import output_or_stdout, write_output

DESCRIPTION = "check the GPU, the compilers, SGLang and the plug-in, and say what to do"

Status = Literal["ok", "warning", "failed"]

NO_GPU = "no NVIDIA GPU: torch executes the plans (tests only)"
_INSTALL = "pip install '.[sglang]' in a clone of sglang-pat"
_INSTALL_TORCH = "install torch, in a CUDA build where there is a GPU (pytorch.org)"
_SHOWN_PLACES = 5  # a check names at most this many places or packages
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the report. advice: what to do; empty if there is nothing to do."""

    topic: str
    status: Status
    found: str
    advice: str = ""


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`, and register `run` as the function to call."""
    parser.add_argument(
        "--json",
        type=output_or_stdout,
        metavar="FILE",
        help="also write the checks as JSON; -: to stdout, and all else to stderr",
    )
    add_model_options(parser, "instead, print which layers of this model pat decodes here")
    parser.add_argument(
        "--support-table",
        action="store_true",
        help="instead, print what is supported, as a Markdown table",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check everything and print a table. Return the exit status: 1 if a check failed, else 0."""
    if arguments.support_table:
        print(support.markdown_table())
        return 0
    try:
        words = server_words(arguments)
    except ValueError as error:
        return _refuse(error)
    if arguments.model is not None:
        return _print_routes(arguments, words)
    with _no_warnings(), sign_of_life("checking; SGLang takes a few seconds to import"):
        checks = all_checks()
    _print(checks)
    status = worst(checks)
    if arguments.json is not None:
        report = {"status": status, "checks": [asdict(check) for check in checks]}
        write_output("--json", arguments.json, json.dumps(report, indent=2) + "\n")
    return 1 if status == "failed" else 0


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hide what SGLang and torch log on every import. Errors are still shown."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _print(checks: list[Check]) -> None:
    """Print a table to a terminal, else a line per check, in which paths are not broken."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        for check in checks:
            advice = f" -> {check.advice}" if check.advice else ""
            print(f"{check.status:8} {check.topic}: {check.found}{advice}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for check in checks:
        # Text objects, because brackets in strings would be markup.
        rest = map(Text, (check.topic, check.found, check.advice))
        table.add_row(Text(check.status, style=_STYLES[check.status]), *rest)
    Console().print(table)


# --- a model ---

_ASSUMED = "Assumed: one GPU and default options of the server; give yours by --tp, --server-args."
_WITHOUT_GPU = "No GPU here: the answer is for an H100."
_NOT_KNOWN = (
    "Not considered, since only a running server shows it: its KV pool, and arguments that the "
    "model passes in its first step."
)
_AS_A_DRAFT_MODEL = (
    "As a draft model of speculative decoding, {} decodes the same layers{}, and pat reads in them "
    "what was verified; {} reads its prompts."
)
_DRAFT_WINDOW = "--speculative-draft-window-size"
_APPLY_IT = ("triton", "flashinfer")  # to a draft model without a window of its own
_DRAFTS = "Drafts: pat verifies those of {}. Otherwise {}."


def _print_routes(arguments: argparse.Namespace, words: list[str]) -> int:
    """Print which backend decodes each layer of a model. words: the server's arguments.

    Returns the exit status: 1 if SGLang cannot build the model here, 2 for wrong input.
    """
    model, report = arguments.model, arguments.json
    with tempfile.TemporaryDirectory(prefix="sglang-pat-doctor-") as folder:
        try:
            source = loadable(arguments, Path(folder))
        except (ValueError, OSError) as error:
            return _refuse(error)
        try:
            with _no_warnings(), sign_of_life("building the model without weights"):
                from sglang_pat.sglang.cpu import enable_cpu_engine

                enable_cpu_engine()  # before SGLang is imported
                from sglang_pat.offline.model_support import layer_table, layers_of_config

                routes = layers_of_config(source, words)
        except Exception as error:  # SGLang may raise anything
            under = f" with {shlex.join(words)}" if words else ""
            told = f"SGLang cannot build {model}{under} in this process: {_describe(error)}"
            print(bounded(told), file=sys.stderr)
            return 1
    print(routes)
    for layers, route, reason in layer_table(routes):
        print(f"  {layers:>9}  {route:12}  {reason}".rstrip())
    print(bounded(f"With {shlex.join(words)}, on one of its GPUs.") if words else _ASSUMED)
    if not find_gpus():
        print(_WITHOUT_GPU)
    print(_NOT_KNOWN)
    if routes.shapes:
        print(as_a_draft_model(routes.default, words, has_windows=bool(routes.windows)))
        drafts = support.row_of("speculative decoding")
        print(_DRAFTS.format(drafts.supported, drafts.everything_else))
    if report is not None:
        found = routes.as_json() | {"server_args": words}
        write_output("--json", report, json.dumps(found, indent=2) + "\n")
    return 0


def as_a_draft_model(default: str, words: Sequence[str], *, has_windows: bool = False) -> str:
    """Say which backend would do what, if the model drafted. default: SGLang's backend."""
    is_limited = default in _APPLY_IT and any(word.startswith(_DRAFT_WINDOW) for word in words)
    but = " without windows" * has_windows
    return _AS_A_DRAFT_MODEL.format(default if is_limited else support.BACKEND, but, default)


def _refuse(error: Exception) -> int:
    print(f"sglang-pat doctor: {bounded(error)}", file=sys.stderr)
    return 2


# --- the checks ---


def all_checks() -> list[Check]:
    """Run all checks, in the order in which failures should be fixed."""
    gpus, sglang = find_gpus(), check_sglang()
    checks = [check_packages(), check_scheduler(), check_gpu(gpus), check_torch(gpus)]
    checks += [*check_kernels(gpus), *check_calibration(gpus)]
    checks += [check_environment(), sglang, check_stand_ins(), check_entry_point()]
    checks.append(check_white_list())
    if sglang.status != "failed":
        checks += _checks_by_sglang()
    return checks


def worst(checks: Sequence[Check]) -> Status:
    """Return the worst status of the checks, which is the status of the report."""
    found = {check.status for check in checks}
    return "failed" if "failed" in found else "warning" if "warning" in found else "ok"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {bounded(error)}"


def _checks_by_sglang() -> list[Check]:
    from sglang_pat.sglang.cpu import enable_cpu_engine

    enable_cpu_engine()  # needed to import SGLang without a driver
    try:
        checks = [check_registration()]
    except Exception as error:
        return [import_failed(error)]
    checks.append(check_touchpoints())
    try:
        import sglang_pat.sglang.tree.request_tracker  # noqa: F401
    except Exception as error:
        return [*checks, import_failed(error)]
    return [*checks, check_hooks(), check_self_test()]


def check_registration() -> Check:
    """Check that `pat` is an attention backend after SGLang has loaded its plug-ins."""
    missing = missing_registrations()
    if missing:
        return Check(
            "registration",
            "failed",
            f"{support.BACKEND} is missing from {' and '.join(missing)}",
            "look for 'Failed to execute general plugin: pat' in SGLang's log, and report it",
        )
    if unwrapped := unwrapped_backends():
        return Check(
            "registration",
            "warning",
            f"where SGLang's default backend is one of {', '.join(unwrapped)}, pat decodes nothing",
            "another plug-in registers it after pat: let SGLANG_PLUGINS name only those you need",
        )
    return Check("registration", "ok", f"{support.BACKEND} can be chosen by --attention-backend")


def check_hooks() -> Check:
    """Check that SGLang has the targets of all hooks."""
    from sglang_pat.sglang.start.hooks import install_hooks
    from sglang_pat.sglang.tree.request_tracker import TRACKER_HOOKS

    try:
        install_hooks(TRACKER_HOOKS)
    except Exception as error:  # imports by SGLang may raise anything
        advice = "use a supported version of SGLang"
        return Check("hooks", "failed", _describe(error), advice)
    return Check("hooks", "ok", "applied to SGLang in this process")


def check_self_test() -> Check:
    """Check that pat reads the paths of a small SGLang tree correctly."""
    from sglang_pat.sglang.tree.self_test import self_test

    try:
        caches = self_test()
    except RuntimeError as error:
        return Check("self-test", "failed", str(error), "use a supported version of SGLang")
    return Check("self-test", "ok", f"paths are read right from {', '.join(caches)}")


def import_failed(error: Exception) -> Check:
    """Return the check that replaces those that need SGLang if SGLang cannot be imported."""
    return Check(
        "import of SGLang",
        "failed",
        _describe(error),
        "repair the installation until python -c 'import sglang.srt.server_args' works",
    )


# --- this package ---


def check_packages() -> Check:
    """Check sglang-pat itself and the packages that it needs."""
    try:
        found = f"sglang-pat {version('sglang-pat')}"
        names = [re.split(r"[^\w.-]", each)[0] for each in requires("sglang-pat") or ()]
        optional = ["extra ==" in each for each in requires("sglang-pat") or ()]
    except PackageNotFoundError:
        return Check("packages", "failed", "sglang-pat is not installed", _INSTALL)
    missing = []
    for name, is_optional in zip(names, optional, strict=True):
        try:
            version(name)
        except PackageNotFoundError:
            if not is_optional:
                missing.append(name)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Check("packages", "failed", f"{found}, without {', '.join(missing)}", advice)
    return Check("packages", "ok", found)


def check_scheduler() -> Check:
    """Check that the compiled scheduler can be imported."""
    try:
        from sglang_pat._scheduler import TILE_TABLE
    except ImportError as error:
        advice = "reinstall sglang-pat with this Python: pip install --force-reinstall ."
        return Check("C++ scheduler", "failed", str(error), advice)
    return Check("C++ scheduler", "ok", f"{len(TILE_TABLE)} tiles")


def check_environment() -> Check:
    """Check the SGLANG_PAT_* variables of this shell."""
    try:
        from sglang_pat.sglang.start.environment import Environment

        environment = Environment.read()
    except ImportError as error:
        advice = "mend the checks above first"
        return Check("variables", "failed", f"not checked: {_describe(error)}", advice)
    except ValueError as error:
        return Check("variables", "failed", str(error), "unset it, or give it an allowed value")
    values = (f"{field.name} {getattr(environment, field.name)}" for field in fields(environment))
    return Check("variables", "ok", ", ".join(values))


# --- GPU, torch, compilers ---


def check_gpu(gpus: Sequence[Gpu]) -> Check:
    """Check that there are kernels for every GPU of this machine."""
    if not gpus:
        return Check("GPU", "warning", NO_GPU, "nothing, for tests; else install NVIDIA's driver")
    found = ", ".join(f"{gpu.name} (compute capability {gpu.arch})" for gpu in gpus)
    found += f"; driver {gpus[0].driver}"
    if any(gpu.capability < support.OLDEST_CAPABILITY for gpu in gpus):
        advice = "hide the older ones by CUDA_VISIBLE_DEVICES; pat needs 8.0 (Ampere) or newer"
        return Check("GPU", "failed", found, advice)
    return Check("GPU", "ok", found)


def check_torch(gpus: Sequence[Gpu]) -> Check:
    """Check that torch can be imported and can use the GPUs."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything
        return Check("torch", "failed", f"cannot be imported: {_describe(error)}", _INSTALL_TORCH)
    cuda = torch.version.cuda
    found = f"torch {torch.__version__}, {'no CUDA' if cuda is None else f'CUDA {cuda}'}"
    if not gpus:
        return Check("torch", "ok", found)
    if cuda is None:
        return Check("torch", "failed", found, "install a CUDA build of torch (pytorch.org)")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        advice = (
            f"CUDA_VISIBLE_DEVICES={visible!r} shows torch no GPU; unset it"
            if visible is not None
            else f"driver {gpus[0].driver} may be too old for CUDA {cuda}: update it, or install a "
            "torch for an older CUDA"
        )
        return Check("torch", "failed", found + ", which finds no GPU", advice)
    return Check("torch", "ok", found)


def check_kernels(gpus: Sequence[Gpu], cache: Path | None = None) -> list[Check]:
    """Check the kernels' compiler, and list which kernels are compiled for these GPUs.

    Parameters
    ----------
    gpus
        The GPUs of this machine.
    cache
        The folder of compiled kernels. None: the one that a server would use.

    Returns
    -------
    list[Check]
        A check of the compiler and one of the cache. If there is no GPU or the cache has kernels, a
        missing compiler is only a warning.
    """
    try:
        from sglang_pat.executors.jit import Compiler, KernelBuildError
    except Exception as error:  # torch or another package is missing or broken
        advice = "mend the checks above first"
        return [Check("kernels", "failed", f"not checked: {_describe(error)}", advice)]

    cache_check, has_kernels = _check_cache(gpus, cache)
    try:
        newest = max((gpu.capability for gpu in gpus), default=None)
        compiler = Compiler.find(newest)
    except KernelBuildError as error:
        # Without a GPU, or with kernels in the cache, no compiler is needed.
        status: Status = "failed" if gpus and not has_kernels else "warning"
        return [Check("compiler", status, *_found_and_advice(error)), cache_check]
    return [Check("compiler", "ok", f"{compiler.name}, {compiler.cuda_headers}"), cache_check]


def check_calibration(gpus: Sequence[Gpu], cache: Path | None = None) -> list[Check]:
    """Check each GPU type's cost model of plain layers, and its models of latent layers, if any.

    Parameters
    ----------
    gpus
        The GPUs of this machine.
    cache
        The folder of compiled kernels. None: the one that a server would use.
    """
    try:
        from sglang_pat.executors import calibration, jit, kernel_cache
    except Exception:  # torch is missing or broken, which another check reports
        return []
    checks = []
    for name, kind in itertools.product(sorted({gpu.name for gpu in gpus}), calibration.KINDS):
        machine = calibration.Machine(name, calibration.driver_version(), jit.source_hash())
        try:
            found = calibration.load(machine, cache, kind=kind)
        except (ValueError, kernel_cache.KernelCacheError) as error:
            checks.append(Check("calibration", "failed", *_found_and_advice(error)))
            continue
        if found is None and kind != calibration.PLAIN:
            continue  # estimates are used, about which there is nothing to report
        if found is None:
            _, origin = calibration.shipped_costs(name)
            text = f"{name}: not measured, the costs of planning are {origin}"
            checks.append(Check("calibration", "ok", f"{text} (`sglang-pat calibrate` measures)"))
        else:
            costs = ", ".join(f"{each} {value:g}" for each, value in found.costs.items())
            layers = "" if kind == calibration.PLAIN else f", {kind} layers"
            text = f"{name}{layers}: measured, off by {found.error:.1%}; in tokens: {costs}"
            checks.append(Check("calibration", "ok", text))
    return checks


def _found_and_advice(error: Exception) -> tuple[str, str]:
    found, _, advice = str(error).partition(": ")
    return found, advice


def _check_cache(gpus: Sequence[Gpu], given: Path | None) -> tuple[Check, bool]:
    """Return the check of the cache, and whether it has kernels for a GPU of this machine."""
    from sglang_pat.executors import kernel_cache

    topic = "kernel cache"
    try:
        cache = kernel_cache.default_cache() if given is None else given
        compiled = _compiled_kernels(gpus, cache)
        if cache.is_dir():
            kernel_cache.check_owners(cache)
    except (ValueError, OSError, kernel_cache.KernelCacheError) as error:
        return Check(topic, "failed", *_found_and_advice(error)), False
    found = f"{cache}, {_size(cache) / 1e6:.1f} MB"
    if compiled:
        return Check(topic, "ok", f"{found}; compiled: {', '.join(compiled)}"), True
    problem = kernel_cache.problem_with_writing(cache)
    if problem is not None:
        advice = f"correct this, or set {kernel_cache.CACHE_VARIABLE} to another folder"
        return Check(topic, "failed", f"{cache} cannot be written: {problem}", advice), False
    if not gpus:
        return Check(topic, "ok", found), False
    advice = (
        "nothing: the first start compiles them, in some seconds; or do it now: sglang-pat build"
    )
    return Check(topic, "warning", f"{found}; none compiled for this GPU", advice), False


def _compiled_kernels(gpus: Sequence[Gpu], cache: Path) -> list[str]:
    """Return `NAME (COMPILER)` of each kernel variant that is compiled for these GPUs."""
    import torch

    from sglang_pat.executors import jit

    found = []
    for capability in sorted({gpu.capability for gpu in gpus}):
        if capability < support.OLDEST_CAPABILITY:
            continue
        for dtype, kv_dtype, (head_dim, v_head_dim) in itertools.product(
            support.KERNEL_DTYPES, (None, *support.CONVERTED_KV_DTYPES), support.HEAD_DIMS
        ):
            if not support.has_kernels(
                head_dim, v_head_dim, capability, one_byte=kv_dtype is not None
            ):
                continue
            config = jit.KernelConfig(
                getattr(torch, dtype),
                head_dim,
                capability,
                v_head_dim,
                None if kv_dtype is None else getattr(torch, kv_dtype),
            )
            image = jit.find_image(config, cache)
            if image is not None:
                found.append(f"{config.name} ({jit.compiler_of(image)})")
    return found


def _size(folder: Path) -> int:
    """Return the size of all files below `folder` together, in bytes."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may remove the file
            size += path.stat().st_size if path.is_file() else 0
    return size


# --- SGLang: checks that do not import it ---


def check_sglang() -> Check:
    """Check the version of SGLang."""
    supported = ", ".join(support.SGLANG_VERSIONS)
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return Check("SGLang", "failed", "not installed", _INSTALL)
    if found not in support.SGLANG_VERSIONS:
        return Check(
            "SGLang",
            "warning",
            f"{found}, which pat was not tested with",
            f"if the checks below are ok pat starts, with a warning; tested: {supported}",
        )
    return Check("SGLang", "ok", found)


def check_stand_ins() -> Check:
    """Check that no package which SGLang imports is a stand-in (`bench/stand_ins.py`)."""
    found = find_stand_ins()
    if not found:
        return Check("stand-ins", "ok", "none among the packages that SGLang imports")
    wrong = "; ".join(f"{name}: {what}" for name, what in list(found.items())[:_SHOWN_PLACES])
    return Check(
        "stand-ins", "failed", wrong, "install the package, or take what stands in its place away"
    )


def check_touchpoints() -> Check:
    """Check that SGLang has every class, method and field that pat changes or reads."""
    try:
        missing = missing_touchpoints()
    except (OSError, SyntaxError) as error:
        return Check("touchpoints", "failed", _describe(error), "reinstall SGLang")
    if missing:
        first = "; ".join(
            f"{each.target}{f' = {each.name}' if each.name else ''} ({each.why})"
            for each in missing[:_SHOWN_PLACES]
        )
        more = len(missing) - _SHOWN_PLACES
        found = f"SGLang has no {first}" + (f"; and {more} more" if more > 0 else "")
        return Check("touchpoints", "failed", found, "use a supported version of SGLang")
    return Check("touchpoints", "ok", f"all {len(TOUCHPOINTS)} places that pat touches are there")


def check_entry_point() -> Check:
    """Check that the plug-in's entry point is installed."""
    names = [point.value for point in entry_points(group=PLUGIN_GROUP, name=support.BACKEND)]
    if len(names) != 1:
        found = "none" if not names else f"several: {', '.join(names)}"
        advice = "install sglang-pat, once, into the Python that runs SGLang: " + _INSTALL
        return Check("entry point", "failed", found, advice)
    return Check("entry point", "ok", names[0])


def check_white_list() -> Check:
    """Check that SGLANG_PLUGINS allows SGLang to load the plug-in."""
    given = os.environ.get("SGLANG_PLUGINS", "")
    allowed = [name.strip() for name in given.split(",") if name.strip()]
    if allowed and support.BACKEND not in allowed:
        advice = f"add {support.BACKEND}: SGLANG_PLUGINS={','.join([*allowed, support.BACKEND])}"
        return Check("SGLANG_PLUGINS", "failed", given, advice)
    return Check("SGLANG_PLUGINS", "ok", given or "not set: every plug-in is loaded")
