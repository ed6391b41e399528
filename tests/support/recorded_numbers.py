"""Check that numbers in prose follow the recorded runs.

A page ends with comments of this form. Each number must occur in the text of the page, and must
equal the result of its JMESPath query on the file, rounded to the shown digits:

    <!-- recorded in benchmarks/results/h100/kernels.json:
    9.5 30.1 = cases[?name=='shared'].[ms.pat, ms.fa3]
    4.3 = geomean(cases[?shared].over_best)
    2.2 <= min(cases[].over_best)
    18% >= max(cases[].error)
    -->

With `<=` or `>=` the number is a bound of the results ("at least 2.2x"). Queries may also call
`geomean(numbers)`, `divide(a, b)`, and `best_over_pat(us)`, the time of the fastest other kernel
divided by pat's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jmespath
from jmespath.functions import Functions, signature

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- recorded in (\S+):\n(.*?)-->", re.DOTALL)
LINE = re.compile(r"(?P<shown>[\d.,]+%?(?: [\d.,]+%?)*) (?P<relation>=|<=|>=) (?P<query>.+)")


class _Functions(Functions):  # type: ignore[misc]
    @signature({"types": ["array-number"]})
    def _func_geomean(self, numbers: list[float]) -> float:
        return geometric_mean(numbers)

    @signature({"types": ["number"]}, {"types": ["number"]})
    def _func_divide(self, a: float, b: float) -> float:
        return a / b

    @signature({"types": ["object"]})
    def _func_best_over_pat(self, us: dict[str, float]) -> float:
        return min(time for name, time in us.items() if not name.startswith("pat")) / us["pat"]


_OPTIONS = jmespath.Options(custom_functions=_Functions())


def shown_numbers(text: str) -> set[str]:
    """Return the numbers of a page that its comments trace to a record."""
    lines = [line for _, body in BLOCK.findall(text) for line in body.splitlines()]
    found = [match["shown"] for line in lines if (match := LINE.fullmatch(line))]
    return {number for each in found for number in each.split()}


def wrong_numbers(text: str, root: Path = ROOT) -> list[str]:
    """Return one line for each traced number that the page lacks or the record contradicts."""
    prose = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    wrong = []
    for name, body in BLOCK.findall(text):
        record = json.loads((root / name).read_text())
        for line in body.splitlines():
            found = LINE.fullmatch(line)
            if found is None:
                wrong.append(f"{line!r}: expected NUMBER = QUERY")
                continue
            numbers, values = found["shown"].split(), _values(record, found["query"])
            for number in numbers:
                if not re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d%]|[.,]\d)", prose):
                    wrong.append(f"{line}: the text does not show {number}")
            if len(values) != len(numbers):
                wrong.append(f"{line}: {len(numbers)} numbers, but {name} has {values}")
                continue
            for number, value in zip(numbers, values, strict=True):
                if not _holds(number, found["relation"], value):
                    wrong.append(f"{line}: {name} has {value:.6g}")
    return wrong


def _values(record: dict[str, Any], query: str) -> list[float]:
    """Return the numbers that a query finds, nested lists flattened."""

    def flat(value: Any) -> list[float]:
        if isinstance(value, list):
            return [number for each in value for number in flat(each)]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return [value] if is_number else []

    return flat(jmespath.search(query, record, _OPTIONS))


def _holds(shown: str, relation: str, value: float) -> bool:
    digits = shown.removesuffix("%").replace(",", "")
    number, places = float(digits), len(digits.partition(".")[2])
    value *= 100 if shown.endswith("%") else 1
    if relation == "=":
        return f"{value:.{places}f}" == f"{number:.{places}f}"
    return number <= value if relation == "<=" else number >= value
