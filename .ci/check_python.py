"""Prints in one line why this Python cannot build sglang-pat.

The Makefile runs it first. It also runs on Pythons that are too old for the package.
"""

import importlib.util
import os
import sys
import sysconfig


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


if __name__ == "__main__":
    sys.exit(problem() or 0)
