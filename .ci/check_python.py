"""Prints in one line why this Python, or this machine's compiler, cannot build sglang-pat.

The Makefile runs it first, before anything is downloaded. With `--compiler` it looks for the C++
compiler too, as CMake does. It also runs on Pythons that are too old for the package.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

COMPILERS = ("c++", "g++", "clang++")
# C++20 that the scheduler uses.
PROGRAM = """
#include <span>
#include <utility>
int main() { return std::in_range<int>(0L) ? 0 : 1; }
"""


def problem() -> str:
    """Fault of the running Python; empty if it will do."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        version = ".".join(str(part) for part in sys.version_info[:3])
        return (
            f"sglang-pat needs Python 3.11 or 3.12, but {sys.executable} is {version}. "
            "Name another: make PYTHON=/path/to/python3.12"
        )
    if importlib.util.find_spec("pip") is None:
        return f"{sys.executable} has no pip (Debian, Ubuntu: apt install python3-pip)"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        return f"{header}, needed to build, is missing (Debian, Ubuntu: apt install python3-dev)"
    return ""


def compiler_problem() -> str:
    """Fault of the C++ compiler that CMake would take; empty if it compiles C++20."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [name for name in COMPILERS if shutil.which(name)][:1]
    if not found:
        return (
            "no C++ compiler (c++, g++ or clang++), needed to build the scheduler "
            "(Debian, Ubuntu: apt install g++)"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "program.cpp")
        with open(source, "w") as file:
            file.write(PROGRAM)
        output = os.path.join(folder, "program")
        try:
            result = subprocess.run(
                [*found, "-std=c++20", source, "-o", output], stderr=subprocess.PIPE
            )
        except OSError as error:
            return f"CXX={found[0]} cannot be run ({error.strerror})"
    if result.returncode == 0:
        return ""
    words = result.stderr.decode(errors="replace").split("\n")
    first = next((line for line in words if "error" in line), words[0]).strip()[:150]
    return (
        f"{' '.join(found)} compiles no C++20, needed to build the scheduler: {first} "
        "(g++ 11 and clang++ 14 do; name one: CXX=g++-12 make)"
    )


if __name__ == "__main__":
    found = problem()
    if not found and "--compiler" in sys.argv[1:]:
        found = compiler_problem()
    sys.exit(found or 0)
