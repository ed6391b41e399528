"""Finds stand-ins: modules that take the place of a package, but do not do the package's work.

If an empty module stands in for a missing package, a server may start, but compute nothing where
the package should. The answers and the speed of such a server mean nothing.

Packages that SGLang imports are checked, but not their submodules. A package is a stand-in if no
installed distribution owns the place from which it is imported. A package is also a stand-in if it
is empty, or if it returns something for every attribute name, as a mock does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from sglang_pat.sglang.cpu import STUB_DIR, cuda_driver_is_present

_IMPORT = re.compile(
    rb"^[ \t]*(?:import|from(?=[\w. \t]* import\b))[ \t]+([A-Za-z_]\w*)", re.MULTILINE
)
_TOP_LEVEL = re.compile(r'^"?([^/.,\n]+)', re.MULTILINE)  # first part of a path in RECORD
_TINY = 4096  # packages with at most this many bytes of Python files are imported and tested
_NO_NAME = "no_package_has_this_name"
_COMPILED = (".so", ".pyd", ".dll")


def find_stand_ins() -> dict[str, str]:
    """Check all packages that the installed SGLang's server imports.

    Returns
    -------
    dict of str to str
        Name of a stand-in -> what is wrong with it. Empty without SGLang.
    """
    sglang = find_spec("sglang")
    if sglang is None or not sglang.submodule_search_locations:
        return {}
    names = _imported(Path(sglang.submodule_search_locations[0], "srt"))
    owned = _owned()
    found = {name: _wrong(name, owned) for name in sorted(names)}
    return {name: wrong for name, wrong in found.items() if wrong is not None}


def refuse_stand_ins() -> None:
    """If there is a stand-in, raise ValueError. The message names the first one."""
    for name, wrong in find_stand_ins().items():
        raise ValueError(f"{name}, a package that SGLang imports, is only a stand-in: {wrong}")


@cache
def _imported(folder: Path) -> set[str]:
    """Return the top-level names that the files of a folder import. Skip folders of tests."""
    found: set[bytes] = set()
    for path in folder.rglob("*.py"):
        if "test" not in path.relative_to(folder).parts:
            found.update(_IMPORT.findall(path.read_bytes()))
    return {name.decode() for name in found} - sys.stdlib_module_names - {"sglang", "sglang_pat"}


def _owned() -> dict[Path, set[str] | None]:
    """Return, for each folder of packages, which names in it belong to installed distributions.

    A name is that of a file or a folder. None: the whole folder belongs to an editable
    distribution.
    """
    owned: dict[Path, set[str] | None] = {}
    for distribution in metadata.distributions():
        listed = distribution.read_text("top_level.txt") or ""  # system packages have this file
        files = _TOP_LEVEL.findall(distribution.read_text("RECORD") or "")
        names = owned.setdefault(Path(str(distribution.locate_file(""))).resolve(), set())
        if names is not None:
            names.update(files, listed.split())
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            owned[Path(unquote(urlsplit(origin["url"]).path)).resolve()] = None
    return owned


def _is_owned(place: Path, owned: Mapping[Path, set[str] | None]) -> bool:
    return any(
        names is None or str(place.relative_to(folder)).split("/")[0].split(".")[0] in names
        for folder, names in owned.items()
        if place.is_relative_to(folder)
    )


def _places(name: str) -> list[Path] | None:
    """Return from where a package is imported: a file, or the folders of a namespace package.

    None: there is no such package. An empty list: the package is a module without a file.
    """
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # the module has no spec
        return []
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return [Path(spec.origin).resolve()]
    folders = [Path(each).resolve() for each in spec.submodule_search_locations or ()]
    # A folder next to the script or in the working directory may have the name only by accident.
    anybody = {Path(sys.path[0]).resolve(), Path.cwd()}
    return [each for each in folders if each.parent not in anybody] or (None if folders else [])


def _wrong(name: str, owned: Mapping[Path, set[str] | None]) -> str | None:
    """Return what is wrong with a package, or None if it is right or missing."""
    places = _places(name)
    if places is None:
        return None
    if not places:
        return "a module without a file"
    if all(each.is_relative_to(STUB_DIR) for each in places) and not cuda_driver_is_present():
        return None  # sglang-pat's stubs, used on machines on which no kernel can run
    if not any(_is_owned(each, owned) for each in places):
        return f"{places[0]} belongs to no installed distribution"
    module = sys.modules.get(name)
    if module is None and _is_tiny(places[0]):
        try:
            module = import_module(name)
        except Exception:  # SGLang will report the error
            return None
    return None if module is None else _hollow(module, places[0])


def _is_tiny(place: Path) -> bool:
    if place.suffix != ".py":
        return False
    files = place.parent.rglob("*") if place.name == "__init__.py" else iter([place])
    size = 0
    for file in files:
        size += file.stat().st_size if file.suffix == ".py" else 0
        if size > _TINY or file.suffix in _COMPILED:
            return False
    return True


def _hollow(module: ModuleType, place: Path) -> str | None:
    """Return what is wrong with a module: it is empty, or returns something for every name."""
    try:
        getattr(module, _NO_NAME)
    except Exception:
        pass
    else:
        return f"{place} answers any name"
    is_alone = place.name != "__init__.py" or len([*place.parent.glob("*.py")]) == 1
    names = {name for name in vars(module) if not name.startswith("__")}
    if place.suffix == ".py" and is_alone and not names and _is_tiny(place):
        return f"{place} is empty"
    return None
