"""Compares the two servers, and decides whether pat pays, given the error of the estimates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_pat.model_layers import FULL, LATENT, STATE, Layer
from sglang_pat.support import is_wide
from sglang_pat.workload.cost import StepTime
from sglang_pat.workload.run import DEFAULT, PAT, WorkloadAnswer
from sglang_pat.workload.weights import WeightBytes

PAYS, MAY_PAY, DOES_NOT_PAY = "pays", "may pay", "does not pay"

TPOT, RATE = "tpot_ms", "requests_per_second"
# Relative errors of the estimates. `ERRORS` were found by comparison with recorded runs, and tests
# repeat the comparison. `_UNCHECKED` are guesses, for servers unlike the recorded ones.
ERRORS = {name: {TPOT: 0.10, RATE: 0.15} for name in ("H100", "H200")}
_UNCHECKED = {TPOT: 0.25, RATE: 0.25}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to whether pat pays.

    Attributes
    ----------
    tpot_ms
        Milliseconds per output token if requests arrive at the trace's rate, by backend.
    requests_per_second
        The highest rate at which the server answers requests, by backend.
    error
        The relative error that each of these two estimates may have, by the estimate's name.
    says
        `pays`: pat gains more than the error in at least one of the two estimates, and loses in
        neither. `may pay`: pat gains in at least one, but not as clearly. `does not pay`: pat gains
        in neither.
    sentence, basis, why
        The answer in words, the server for which the answer is valid, and the reasons.
    """

    tpot_ms: dict[str, float]
    requests_per_second: dict[str, float]
    error: dict[str, float]
    says: str
    sentence: str
    basis: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return asdict(self)


def unchecked(time: StepTime) -> list[str]:
    """Return the properties of the server for which no recorded run has checked the estimates."""
    kinds = {layer.kind for layer in time.layers}
    reasons = {
        f"{time.gpu.name} is scaled by its data sheet": time.gpu.name not in ERRORS,
        f"communication between {time.tp} GPUs": time.tp > 1,
        "data-parallel attention": time.dp > 1,
        "mixtures of experts": time.weights.experts > 0,
        "quantised weights": bool(time.quantisation),
        f"weights of {time.quantisation}, counted as 2 bytes each": bool(time.quantisation)
        and time.bytes_of_weights == WeightBytes(),
        "latent attention": LATENT in kinds,
        "layers with a state": STATE in kinds,
        "layers of several kinds": bool(kinds - {FULL, LATENT, STATE}),
        "head_dim 512, which SGLang runs by Triton, slower than estimated": any(
            map(_runs_by_triton, time.layers)
        ),
    }
    return [reason for reason, holds in reasons.items() if holds]


def _runs_by_triton(layer: Layer) -> bool:
    """Return True for wide rows, except in sparse attention, which has its own backends."""
    is_sparse = layer.refusal is not None and layer.refusal.topic == "attention"
    return is_wide(layer.head_dim, layer.v_head_dim) and not is_sparse


def verdict(found: WorkloadAnswer, model: str, workload: str) -> Verdict:
    """Compare the servers.

    Parameters
    ----------
    model, workload
        Names to show in the answer.
    """
    time, default, pat = found.setup.time, found.default, found.pat
    tpot = {DEFAULT: default.tpot_ms, PAT: pat.tpot_ms}
    rate = dict(found.most)
    not_recorded = unchecked(time)
    error = dict(_UNCHECKED if not_recorded else ERRORS[time.gpu.name])
    accelerated = sum(layer.is_accelerated for layer in time.layers)
    nothing = ""
    if not accelerated:
        nothing = f"it accelerates no layer of {model}, so the server runs as it does today"
    elif not default.steps:
        nothing = "no answer has a second token, so nothing is decoded"
    says = DOES_NOT_PAY if nothing else _says(tpot, rate, error)
    return Verdict(
        tpot_ms={name: round(value, 4) for name, value in tpot.items()},
        requests_per_second={name: round(value, 5) for name, value in rate.items()},
        error=error,
        says=says,
        sentence=f"pat {says}: {nothing}." if nothing else _sentence(says, tpot, rate),
        basis=_basis(found, model, workload, error, not_recorded),
        why=_why(found, accelerated),
    )


def _gains(tpot: dict[str, float], rate: dict[str, float]) -> dict[str, float]:
    """Return the relative gains of pat in time per token and in requests per second."""
    return {
        TPOT: round(1 - tpot[PAT] / tpot[DEFAULT], 2) if tpot[DEFAULT] else 0.0,
        RATE: round(rate[PAT] / rate[DEFAULT] - 1, 2),
    }


def _says(tpot: dict[str, float], rate: dict[str, float], error: dict[str, float]) -> str:
    gains = _gains(tpot, rate)
    if max(gains.values()) <= 0:
        return DOES_NOT_PAY
    is_sure = any(gain > error[name] for name, gain in gains.items())
    return PAYS if is_sure and min(gains.values()) >= 0 else MAY_PAY


def _sentence(says: str, tpot: dict[str, float], rate: dict[str, float]) -> str:
    gains = _gains(tpot, rate)
    ours, other = (f"{tpot[name]:.1f}" for name in (PAT, DEFAULT))
    if ours == other:
        ours, other = (f"{tpot[name]:.2f}" for name in (PAT, DEFAULT))
    per_token = (
        f"{ours} instead of {other} ms per output token ({-gains[TPOT]:+.0%})"
        if gains[TPOT]
        else f"the same {tpot[DEFAULT]:.1f} ms per output token"
    )
    before, after = (f"{rate[name]:.3g}" for name in (DEFAULT, PAT))
    if gains[RATE] == 0:
        return f"pat {says}: {per_token}, and the same {after} requests per second at most."
    times = rate[PAT] / rate[DEFAULT]
    return (
        f"pat {says}: {per_token}, and {times:.2f}x the requests per second at most "
        f"({after} instead of {before})."
    )


def _basis(
    found: WorkloadAnswer,
    model: str,
    workload: str,
    error: dict[str, float],
    not_recorded: list[str],
) -> str:
    time = found.setup.time
    gpus = time.gpu.name if time.tp == 1 else f"{time.tp} x {time.gpu.name}"
    gpus += f" in {time.dp} groups" * (time.dp > 1)
    guess = f", a guess (not recorded: {'; '.join(not_recorded)})" if not_recorded else ""
    return (
        f"{model} on {gpus}, {workload}: {time.gpu.default_backend} against pat. "
        f"Error: time per token {error[TPOT]:.0%}, requests per second {error[RATE]:.0%}{guess}."
    )


def _why(found: WorkloadAnswer, accelerated: int) -> str:
    default, time = found.default, found.setup.time
    decoding = [
        f"{default.repeats:.0%} of the KV reads repeat what another request of the step has read",
        f"attention is {default.attention:.0%} of a step of {time.gpu.default_backend}",
    ]
    reasons = [
        *(decoding if default.steps else ()),
        f"prefill takes {default.prefill:.0%} of the time",
        f"{accelerated} of {len(time.layers)} layers accelerated",
    ]
    if default.overloaded:
        reasons.append("the server is overloaded: requests wait longer than they are served")
    return f"{'; '.join(reasons)}."
