"""Prints the resolved server arguments of model families with pat and without, on a faked platform.

    python resolved_arguments.py PLATFORM FOLDER FAMILY...

FOLDER has a subfolder with the config.json of each family. The output has a line of JSON per family
and set of options: `{"family", "asked", "default", "page_size", "different", "error"}`. Nothing is
computed, so it is enough to fake what torch and the GPU packages report.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from sglang_pat.sglang.cpu import enable_cpu_engine

CAPABILITIES = {"hopper": (9, 0), "sm100": (10, 0)}
MEMORY = 80 << 30
ASKED: tuple[dict[str, str], ...] = (
    {"attention_backend": "pat"},
    {"decode_attention_backend": "pat"},
)


class _FakeModule(types.ModuleType):
    """A module in which every name exists."""

    __path__: list[str] = []  # noqa: RUF012  # a package
    __version__ = "0.6.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _FakeFlashInfer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a fake in place of FlashInfer, which cannot be imported without a driver."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "flashinfer":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _FakeModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def fake_gpu(capability: tuple[int, int]) -> None:
    """Let torch report a GPU; must run before SGLang is imported."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "0"
    sys.meta_path.insert(0, _FakeFlashInfer())
    properties = SimpleNamespace(
        name="a GPU",
        major=capability[0],
        minor=capability[1],
        total_memory=MEMORY,
        multi_processor_count=132,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "mem_get_info": (MEMORY, MEMORY),
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)


def resolve(model: Path, **arguments: Any) -> dict[str, Any]:
    """Return all resolved arguments, or the error."""
    from sglang.srt.server_args import ServerArgs

    try:
        server_args = ServerArgs(model_path=str(model), random_seed=0, **arguments)
        if not hasattr(server_args, "resolve_once"):  # 0.5.17 resolves in the constructor
            return dataclasses.asdict(server_args)
        server_args.resolve_once()
        resolved: dict[str, Any] = server_args.resolved_dict()
        return resolved
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def compare(model: Path) -> list[dict[str, Any]]:
    """Return the differences for each set of options."""
    without = resolve(model)
    found = []
    for asked in ASKED:
        with_pat = resolve(model, **asked)
        different = {
            name: [repr(each.get(name)) for each in (without, with_pat)]
            for name in sorted(without.keys() | with_pat.keys())
            if without.get(name) != with_pat.get(name)
        }
        found.append(
            {
                "family": model.name,
                "asked": next(iter(asked)),
                "default": without.get("attention_backend"),
                "page_size": without.get("page_size"),
                "different": different,
                "error": without.get("error"),
            }
        )
    return found


def main(platform: str, folder: str, *families: str) -> None:
    gc.disable()  # imported objects are never freed
    enable_cpu_engine()
    if platform in CAPABILITIES:
        fake_gpu(CAPABILITIES[platform])
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for family in families:
        for result in compare(Path(folder) / family):
            print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
