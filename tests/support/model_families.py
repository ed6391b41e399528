"""A small model of every architecture family, as a `config.json` for SGLang's class.

The weights are random (`benchmarks/common/random_weights.py`). `data/model_families.yaml` has the
shapes, which are as small as the class allows but keep the features of the family: windows, sinks,
heads, recurrent states and experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import yaml

_DATA = yaml.safe_load((Path(__file__).parent / "data/model_families.yaml").read_text())
_SMALL: dict[str, Any] = _DATA["small"]
VOCAB_SIZE: int = _SMALL["vocab_size"]


@dataclass(frozen=True)
class Family:
    """A family, and the backends of its layers.

    modules: modules of `sglang.srt.models` that the class needs. config: keys of `config.json`
    beside the common small shapes. models: names of real models of the family. pat: layers that pat
    decodes, and whether they have attention sinks. default: reason -> layers that fall back.
    arguments: server arguments without which SGLang does not run the family on a CPU. refused:
    version of SGLang -> its error on a CPU.
    """

    name: str
    architecture: str
    modules: tuple[str, ...]
    config: dict[str, Any]
    _: KW_ONLY
    models: str
    pat: tuple[int, ...]
    default: dict[str, tuple[int, ...]] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    pat_has_sinks: bool = False
    nightly: bool = True

    def __post_init__(self) -> None:
        for name in ("modules", "pat"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        default = {reason: tuple(layers) for reason, layers in self.default.items()}
        object.__setattr__(self, "default", default)

    @property
    def small_config(self) -> dict[str, Any]:
        """Return what `config.json` holds."""
        return _SMALL | {"architectures": [self.architecture]} | self.config

    def write(self, folder: Path) -> Path:
        """Write `config.json`, the only file that SGLang's dummy loader needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.small_config, indent=2) + "\n")
        return folder


FAMILIES = {name: Family(name, **entry) for name, entry in _DATA["families"].items()}


@dataclass(frozen=True)
class RecordedRun:
    """The date on which families passed with a version of SGLang."""

    sglang: str
    date: str
    families: tuple[str, ...]


def _names(entries: list[Any]) -> Iterator[str]:
    """Flatten nested lists, which YAML anchors create."""
    for entry in entries:
        yield from [entry] if isinstance(entry, str) else _names(entry)


CPU_RUNS, GPU_RUNS = (
    tuple(
        RecordedRun(run["sglang"], run["date"], tuple(_names(run["families"])))
        for run in _DATA["runs"][place]
    )
    for place in ("cpu", "gpu")
)
