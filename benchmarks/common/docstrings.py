"""Text that a machine has: the docstrings of installed packages."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "scipy", "torch", "pandas", "networkx", "matplotlib", "transformers")


def docstrings(packages: Path) -> Iterator[str]:
    """Docstrings of `PACKAGES`, each once; none of tests, none of less than 200 characters."""
    seen = set()
    for package in PACKAGES:
        for file in sorted((packages / package).rglob("*.py")):
            if "tests" in file.parts:
                continue
            with warnings.catch_warnings(action="ignore"):
                try:
                    tree = ast.parse(file.read_text(errors="replace"))
                except SyntaxError:  # templates, and what another Python reads
                    continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 200 and text not in seen:
                        seen.add(text)
                        yield text
