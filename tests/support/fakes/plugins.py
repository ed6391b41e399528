"""Installs SGLang plug-ins of the tests in the processes of an engine."""

from __future__ import annotations

from pathlib import Path


def install_plugin(folder: Path, module: str) -> None:
    """Write the package metadata with which SGLang finds `register()` of a module.

    Parameters
    ----------
    folder : Path
        Must be on `sys.path` of the processes of the engine. Each plug-in makes a folder of its own
        there.
    module : str
        A module in tests/support, which is also on the path.
    """
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{module} = {module}:register\n"
    )
