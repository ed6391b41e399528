"""The documentation's tables of model families and of SGLang's features, from the tests' data.

`python .ci/pages/model_families_page.py` writes them into `docs/model-families.md`; a test
compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests/support"))

from model_families import CPU_RUNS, FAMILIES, GPU_RUNS
from published_shapes import PublishedShape, by_rules, read_shapes

PAGE = Path(__file__).parents[2] / "docs/model-families.md"
FAMILY_TESTS = "tests/engine/test_families.py::test_tokens_and_routes"


@dataclass(frozen=True)
class Feature:
    """A column of SGLang's own table of attention backends.

    Attributes
    ----------
    name : str
        As SGLang calls it.
    mark : str
        "yes", "by layer" or "delegated".
    meaning : str
        What pat does.
    tests : tuple of str
        As pytest calls them.
    """

    name: str
    mark: str
    meaning: str
    tests: tuple[str, ...]


FEATURES = (
    Feature(
        "Page size > 1 (native)",
        "yes",
        "any page size; plans are made of slots",
        ("tests/engine/test_engine.py::TestPageSize64",),
    ),
    Feature(
        "FP8 KV cache",
        "yes",
        "e4m3 and e5m2, with the scales of each layer; queries stay in the model's dtype",
        ("tests/engine/test_families.py::test_tokens_over_an_fp8_pool",),
    ),
    Feature(
        "FP4 KV cache",
        "delegated",
        "all layers run on the default backend, as with any other type than that of the queries",
        (),
    ),
    Feature(
        "Spec topk=1",
        "yes",
        "verify steps, NGRAM's trees included; decode steps of draft models; draft extend",
        ("tests/engine/test_families.py::test_speculation",),
    ),
    Feature(
        "Spec topk>1",
        "yes",
        "verify steps, decode steps of draft models, draft extend",
        ("tests/engine/test_families.py::test_speculation",),
    ),
    Feature(
        "Sliding window",
        "by layer",
        "layers with and without windows by pat, chunks beside FA3; windows with drafts that "
        "branch, and chunks with any drafts, on the default backend",
        (FAMILY_TESTS,),
    ),
    Feature(
        "Multi-modal",
        "by layer",
        "the layers of the language model; image and audio encoders decode nothing (run with text)",
        (FAMILY_TESTS,),
    ),
    Feature(
        "Deterministic",
        "yes",
        "decode gives a request the same bits in any batch, prefixes shared or not",
        ("tests/sglang/test_batch_invariance.py::test_a_row_is_the_same_in_any_batch_and_graph",),
    ),
)


def published_table() -> str:
    """One row for published models of a class that fare alike."""
    head = ("Models", "SGLang's class", "pat decodes on 1 GPU", "on 8 GPUs", "Why not the others")
    groups: dict[tuple[str, ...], list[PublishedShape]] = {}
    for shape in read_shapes().values():
        fare = (shape.architecture, *(_fare(shape, tp)[0] for tp in (1, 8)))
        groups.setdefault((*fare, _fare(shape, 1)[2]), []).append(shape)
    return _table(head, [_published_row(shapes) for shapes in groups.values()])


def _published_row(shapes: Sequence[PublishedShape]) -> tuple[str, ...]:
    names = ", ".join(shape.name.partition("/")[2] or shape.name for shape in shapes)
    counts = []
    for tp in (1, 8):
        each = dict.fromkeys(_fare(shape, tp)[1] for shape in shapes)
        word = _fare(shapes[0], tp)[0]
        counts.append(word if word in ("all", "none", "-") else "; ".join(each))
    reasons = dict.fromkeys(_fare(shape, 1)[2] for shape in shapes)
    return (names, f"`{shapes[0].architecture}`", *counts, "; ".join(filter(None, reasons)))


def _fare(shape: PublishedShape, tp: int) -> tuple[str, str, str]:
    """("all", "some", "none", or "-" where `tp` GPUs do not divide the heads), counts, reasons."""
    if any(heads % tp for _, heads, *_ in shape.layers):
        return "-", "-", ""
    layers = by_rules(shape.config, tp)
    decoded = sum(count for count, *_, reason in layers if reason is None)
    of = sum(count for count, *_ in layers)
    word = "all" if decoded == of else "some" if decoded else "none"
    reasons = {re.sub(r" \(\w+\)$", "", str(reason)) for *_, reason in layers if reason}
    return word, f"{decoded} of {of}", "; ".join(sorted(reasons))


def runs() -> str:
    """Recorded runs of each place and version: the families that passed, and the dates."""
    lines = []
    for place, recorded in (("CPU", CPU_RUNS), ("GPU", GPU_RUNS)):
        for version in dict.fromkeys(run.sglang for run in recorded):
            of_version = [run for run in recorded if run.sglang == version]
            passed = {name for run in of_version for name in run.families}
            missing = [family.models for name, family in FAMILIES.items() if name not in passed]
            shown = [family.models for name, family in FAMILIES.items() if name in passed]
            named = "; ".join(shown) if len(shown) <= len(missing) else "all"
            if named == "all" and missing:
                named += f" except {'; '.join(missing)}"
            dates = ", ".join(dict.fromkeys(run.date for run in of_version))
            lines.append(f"- {place}, SGLang {version} ({dates}): {named}.")
    often = [family.models for family in FAMILIES.values() if not family.nightly]
    lines.append(f"- On every change: {'; '.join(often)}.")
    return "\n".join(lines)


def refusals() -> str:
    """SGLang's own errors for families that it does not run on a CPU."""
    lines = [
        f'- {family.models}, SGLang {version}: "{message}"'
        for family in FAMILIES.values()
        for version, message in family.refused.items()
    ]
    return "\n".join(lines)


def features_table() -> str:
    """One row per column of SGLang's table."""
    rows = [
        (
            feature.name,
            feature.mark,
            feature.meaning,
            ", ".join(map(_code, feature.tests)) or "no test",
        )
        for feature in FEATURES
    ]
    return _table(("Feature", "pat", "What it means", "Tests"), rows)


def _code(test: str) -> str:
    return f"`{test}`"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


SECTIONS = {
    "published": published_table,
    "runs": runs,
    "refusals": refusals,
    "features": features_table,
}


def updated(page: str) -> str:
    """The page with all generated sections as the data have them."""
    for name, generate in SECTIONS.items():
        begin, end = f"<!-- generated: {name} -->\n", f"\n<!-- end: {name} -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the page has no section {name!r}")
        page = head + begin + generate() + end + tail
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
