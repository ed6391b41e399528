"""Replaces SGLang's `sgl_kernel` wheel where no CUDA driver is present (`sglang_pat.sglang.cpu`).

Every name in this package and its submodules can be imported, but is a stub, which raises
NotImplementedError when called. `scalar_type` is plain Python and comes from the installed wheel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_pat.sglang.cpu import cuda_driver_is_present

if cuda_driver_is_present():
    raise ImportError(
        f"the sgl_kernel stubs in {Path(__file__).parent} were imported on a machine with a CUDA "
        "driver; remove their folder from PYTHONPATH"
    )


def _stub(qualified_name: str) -> type:
    """Return a stub: a class, because SGLang uses some names in annotations or isinstance()."""

    def refuse(cls: type, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            f"{qualified_name} was called, but without a CUDA driver there is only a stub of it"
        )

    return type(qualified_name.rpartition(".")[2], (), {"__new__": refuse})


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        stub = _stub(f"{self.__name__}.{name}")
        setattr(self, name, stub)
        return stub


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every `sgl_kernel.x`: the wheel's own file if it is plain Python, else a stub."""

    FROM_THE_WHEEL = ("scalar_type",)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__ or not name:
            return None
        if name in self.FROM_THE_WHEEL:
            return importlib.machinery.PathFinder.find_spec(fullname, _wheel_folders())
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _wheel_folders() -> list[str]:
    """Return the folders of the installed wheel, which `sys.path` lists after these stubs."""
    here = Path(__file__).resolve().parent.parent
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, elsewhere)
    return list(spec.submodule_search_locations or ()) if spec else []


sys.meta_path.insert(0, _SubmoduleFinder())
sys.modules[__name__].__class__ = _StubModule
