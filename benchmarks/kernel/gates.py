"""Summaries and gates of the kernel benchmark, by suite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Case = Mapping[str, Any]

# Lower limits of the best peer's time / pat's if nothing is shared, by kind of case.
UNSHARED_LIMITS = {"uniform": 0.99, "ragged": 0.97, "long": 0.97}
# Lower limit of the best peer's time / pat's in any case, with a dirty L2.
DIRTY_LIMIT = 0.97
RANK_CASE, RANK_US = "1,10_4096,416 8/1", 12.0


@dataclass(frozen=True, slots=True)
class Gate:
    """A limit on a suite's cases. passed: None if there are no cases to judge."""

    suite: str
    rule: str
    found: str
    passed: bool | None

    def __str__(self) -> str:
        word = {True: "passed", False: "FAILED", None: "not measured"}[self.passed]
        return f"{word:13}{self.suite:20}{self.rule}: {self.found}"


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def over_floor(case: Case, name: str = "pat") -> float:
    return float(case["us"][name] / case["floor_us"])


def is_peer(name: str) -> bool:
    return not name.startswith("pat")


def versus_best(case: Case, times: str = "us") -> float | None:
    """Return the best peer's time / pat's, which is below 1 if pat is slower, or None."""
    us = case.get(times, {})
    peers = [time for name, time in us.items() if is_peer(name)]
    return min(peers) / us["pat"] if peers and "pat" in us else None


def summary(cases: Sequence[Case], names: Sequence[str]) -> list[str]:
    """Return a line for each suite, with shared and unshared cases."""
    lines = []
    for suite in dict.fromkeys(case["suite"] for case in cases):
        for title, shared in (("shared", True), ("unshared", False)):
            rows = [c for c in cases if c["suite"] == suite and c["shared"] is shared]
            if not rows:
                continue
            cells = []
            for name in names:
                ratios = [over_floor(case, name) for case in rows if name in case["us"]]
                partly = "" if len(ratios) == len(rows) else f" ({len(ratios)} of {len(rows)})"
                cells.append(f"{name} {geomean(ratios):.2f}{partly}")
            versus = [ratio for case in rows if (ratio := versus_best(case)) is not None]
            line = f"{suite}, {title}, {len(rows)} cases: time/floor {', '.join(cells)}"
            if versus:
                losses = sum(ratio < 1 for ratio in versus)
                line += f"; best peer/pat {geomean(versus):.2f}, least {min(versus):.3f}"
                line += f", {losses} losses"
            lines.append(line)
    return lines


def gates(cases: Sequence[Case]) -> list[Gate]:
    """Return all gates. A case in which pat failed fails the gates of its suite."""

    def of(suite: str, *, shared: bool = True) -> list[Case]:
        return [case for case in cases if case["suite"] == suite and case["shared"] is shared]

    wide = [case for case in cases if not case["suite"].endswith("fp8")]
    nothing_shared = [case for case in wide if not case["shared"]]
    return [
        _floor("pat-20 shared", of("pat-20"), 1.40),
        _geomean("pat-20 shared", of("pat-20"), 1.5, digits=2),
        _no_loss("shared, all", [case for case in wide if case["shared"]]),
        *(
            _least(
                f"unshared, {kind}",
                [case for case in nothing_shared if case["kind"] == kind],
                limit,
            )
            for kind, limit in UNSHARED_LIMITS.items()
        ),
        _geomean("unshared, all", nothing_shared, 1.0),
        _floor("long-prefix", of("long-prefix"), 1.60),
        _at_most("rank", RANK_CASE, of("rank"), RANK_US),
        _floor("random", of("random"), 1.50),
        *_fp8([case for case in cases if case["suite"].endswith("fp8")]),
        *_dirty(cases),
        _bitwise(cases),
    ]


# Limits for latent attention: microseconds of a layer, by case.
LATENT_US = {
    "1,128_8192,256 h16": 85.0,
    "1,128_8192,256 h8": 55.0,
    "1,32_16384,512 h16": 50.0,
    "1,64_2048,128 h16": 22.0,
}


def latent_gates(cases: Sequence[Case]) -> list[Gate]:
    """Return the gates of latent attention (MLA)."""
    gained = [
        case
        for case in cases
        if case["sharing"] >= 16 and case["prefix"] >= 4096 and case["heads_q"] <= 20
    ]
    alone = [case for case in cases if not case["shared"]]
    title = "16 sharers, 4k, 20 heads"
    return [
        *(_at_most("mla", name, cases, limit) for name, limit in LATENT_US.items()),
        _geomean(title, gained, 2.2, digits=2),
        _least(title, gained, 1.3),
        _floor(title, gained, 1.9),
        _least("unshared, all", alone, 0.97),
        _geomean("unshared, all", alone, 1.0),
        _geomean("unshared, all", alone, 1.05, "fa3"),
        _bitwise(cases),
    ]


def fp8_latent_gates(cases: Sequence[Case]) -> list[Gate]:
    """Return the gates with an fp8 latent cache, which FA3 and FlashInfer convert first."""
    shared = [case for case in cases if case["shared"]]
    alone = [case for case in cases if not case["shared"]]
    return [
        _geomean("shared, 16 heads", [c for c in shared if c["heads_q"] == 16], 1.3, digits=2),
        _least("shared", shared, 1.0),
        _least("unshared, all", alone, 0.98),
        _bitwise(cases),
    ]


def many_rows_gates(cases: Sequence[Case]) -> list[Gate]:
    """Return the gates for latent requests that fill a tile: results must be right."""
    return [_bitwise(cases)]


def _at_most(suite: str, name: str, cases: Iterable[Case], limit: float) -> Gate:
    rule = f"{name} at most {limit:g} us"
    case = next((case for case in cases if case["name"] == name), None)
    if case is None:
        return Gate(suite, rule, "no such case", None)
    us = case["us"].get("pat", math.inf)
    return _judged(suite, rule, [case], f"{us:.1f} us", us <= limit)


def _geomean(
    suite: str,
    cases: Sequence[Case],
    limit: float,
    peer: str | None = None,
    *,
    digits: int = 3,
) -> Gate:
    """Return a gate on a peer's time / pat's. peer: None for the best peer of each case."""
    rule = f"geomean {peer or 'best peer'}/pat >= {limit:.2f}"
    ratios = list(versus_by_name(cases).values())
    if peer:
        ratios = [c["us"][peer] / c["us"]["pat"] for c in cases if {peer, "pat"} <= c["us"].keys()]
    if not ratios:
        return Gate(suite, rule, f"no {peer or 'peers'}", None)
    ratio = geomean(ratios)
    return _judged(suite, rule, cases, f"{ratio:.{digits}f} over {len(ratios)}", ratio >= limit)


def _fp8(cases: Sequence[Case]) -> Iterable[Gate]:
    if not cases:
        return
    shared = [case for case in cases if case["shared"]]
    yield _floor("fp8 shared", shared, 1.70)
    yield _no_loss("fp8 shared", shared)
    yield _least("unshared, fp8", [case for case in cases if not case["shared"]], 0.97)
    yield _error("largest", "error", cases)
    yield _error("mean", "mean_error", cases)


def _dirty(cases: Sequence[Case]) -> Iterable[Gate]:
    timed = [case for case in cases if "us_dirty_l2" in case]
    if timed:
        yield _least("all, dirty L2", timed, DIRTY_LIMIT, "us_dirty_l2")


def as_json(found: Iterable[Gate]) -> list[dict[str, Any]]:
    return [asdict(gate) for gate in found]


def _failed(cases: Sequence[Case]) -> str | None:
    names = [case["name"] for case in cases if "pat" not in case["us"]]
    return f"pat failed in {', '.join(names)}" if names else None


def _judged(suite: str, rule: str, cases: Sequence[Case], found: str, passed: bool) -> Gate:
    failed = _failed(cases)
    return Gate(suite, rule, failed or found, passed and failed is None)


def _floor(suite: str, cases: Sequence[Case], limit: float) -> Gate:
    rule = f"geomean time/floor <= {limit:.2f}"
    if not cases:
        return Gate(suite, rule, "no cases", None)
    ratio = geomean(over_floor(case) for case in cases if "pat" in case["us"])
    return _judged(suite, rule, cases, f"{ratio:.3f} over {len(cases)}", ratio <= limit)


def versus_by_name(cases: Sequence[Case], times: str = "us") -> dict[str, float]:
    """Return the best peer's time / pat's by case, with the worse one for repeated cases."""
    found: dict[str, float] = {}
    for case in cases:
        if (ratio := versus_best(case, times)) is not None:
            found[case["name"]] = min(ratio, found.get(case["name"], math.inf))
    return found


def _no_loss(suite: str, cases: Sequence[Case]) -> Gate:
    rule = "pat is the fastest in all cases"
    versus = versus_by_name(cases)
    if not versus:
        return Gate(suite, rule, "no peers", None)
    losses = {name: ratio for name, ratio in versus.items() if ratio < 1}
    text = f"in {len(versus) - len(losses)} of {len(versus)}"
    if losses:
        text += "; not in " + ", ".join(f"{name} ({r:.3f}x)" for name, r in losses.items())
    return _judged(suite, rule, cases, text, not losses)


def _least(suite: str, cases: Sequence[Case], limit: float, times: str = "us") -> Gate:
    rule = f"best peer/pat >= {limit:.3g} in all cases"
    versus = versus_by_name(cases, times)
    if not versus:
        return Gate(suite, rule, "no peers", None)
    worst = min(versus, key=lambda name: versus[name])
    below = sum(ratio < limit for ratio in versus.values())
    text = f"least {versus[worst]:.3f} ({worst}), {below} of {len(versus)} below"
    return _judged(suite, rule, cases, text, not below)


def _error(kind: str, key: str, cases: Sequence[Case]) -> Gate:
    rule = f"{kind} error at most that of the best peer"
    ratios = {}
    for case in cases:
        peers = [error for name, error in case[key].items() if is_peer(name)]
        if peers and "pat" in case[key]:
            ratios[case["name"]] = case[key]["pat"] / min(peers)
    if not ratios:
        return Gate("fp8", rule, "no peers", None)
    worst = max(ratios, key=lambda name: ratios[name])
    text = f"at most {ratios[worst]:.3f} of it ({worst})"
    return _judged("fp8", rule, cases, text, ratios[worst] <= 1)


def _bitwise(cases: Sequence[Case]) -> Gate:
    rule = "same plan, same bits; graph = eager; error at most twice torch's"
    names = [case["name"] for case in cases if "pat" in case["failed"]]
    found = f"not in {', '.join(names)}" if names else f"in all {len(cases)} cases"
    return Gate("all", rule, found, not names if cases else None)
