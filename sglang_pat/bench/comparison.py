"""Compares pat with another attention backend in SGLang's server, on this machine's GPUs.

`sglang-pat bench` uses this module. One server after the other serves the same batches. Both are
timed in the steps in which all requests decode (`decoding.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.bench.cases import FIRST_TOKEN, Case
from sglang_pat.bench.decoding import (
    DecodeRun,
    Spread,
    ask_again_if_held_up,
    decode_run,
    ratio,
    tpot,
)
from sglang_pat.bench.server import Server, contender, running_server, sampling_of
from sglang_pat.model_config import check_served, decoder_config, positive

PAT = "pat"
ROUNDS = 3
POOL_SHARE = 0.8  # part of the KV pool for a batch; the rest holds answers of earlier rounds
MOST_NOISE = 0.10  # a gain whose interquartile range / median is larger is not judged
Tell = Callable[[str], None]


class ComparedModel(NamedTuple):
    """The model that both servers serve. path: its folder. The sizes are those of its decoder."""

    path: Path
    vocab_size: int
    context_len: int

    @classmethod
    def of(cls, config: Mapping[str, Any], path: Path) -> ComparedModel:
        """Return the model in folder `path`. config: the contents of its config.json.

        Raises ValueError, with a message that says what is wrong with `config`.
        """
        check_served(config)
        decoder = decoder_config(config)
        vocab_size = positive(decoder, "vocab_size")
        if vocab_size <= 2 * FIRST_TOKEN:
            raise ValueError(f"vocab_size={vocab_size}; allowed: more than {2 * FIRST_TOKEN}")
        return cls(path, vocab_size, positive(decoder, "max_position_embeddings", 1 << 20))


@dataclass(slots=True)
class Measured:
    """Holds what has been measured of a server so far.

    start_seconds: how long the server took to start; None until it answers. cases, runs: by the
    name of the case, in the order in which cases are served.
    """

    start_seconds: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)
    runs: dict[str, list[DecodeRun]] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a case: ms per token of both servers, and the `gain`, other / pat."""

    name: str
    case: Case
    pat: Spread
    other: Spread
    gain: Spread

    @property
    def too_noisy(self) -> bool:
        return self.gain.noise > MOST_NOISE

    def as_dict(self, other: str) -> dict[str, Any]:
        case = self.case
        return {
            "name": self.name,
            "requests": case.batch,
            "prefix": case.prefix,
            "private": case.private,
            "tokens": case.generated,
            "tpot_ms": {PAT: self.pat.as_dict(), other: self.other.as_dict()},
            "tokens_per_second": {
                PAT: 1000 * case.batch / self.pat.median,
                other: 1000 * case.batch / self.other.median,
            },
            "gain": self.gain.as_dict(),
            "too_noisy": self.too_noisy,
        }


def measure(
    backend: str,
    model: ComparedModel,
    cases: Mapping[str, Case],
    folder: Path,
    *,
    arguments: Mapping[str, Any],
    flags: Sequence[str],
    report: Tell,
    into: Measured,
    exactly: bool = False,
    rounds: int = ROUNDS,
) -> None:
    """Start a server and time all cases.

    Parameters
    ----------
    backend
        SGLang's name of a backend, or `default` for SGLang's choice.
    model
        The model to serve.
    cases
        Cases by name. They are made smaller if the server's KV pool or context is too small for
        them, unless `exactly`.
    folder
        The folder for the log and pat's counters.
    arguments, flags
        Arguments of the server: keywords of sglang.Engine, and command-line flags.
    report
        Called with a line for each event.
    into
        Each result is stored here as soon as it is known, so that it is kept if the rest fails.
    exactly
        Whether the cases must not be made smaller, because another server has served them.
    rounds
        Number of passes of each case.

    Raises
    ------
    RuntimeError, TimeoutError
        The server does not start or does not answer, or a case does not fit.
    """
    report(f"{backend}: SGLang's server starts, which takes a minute or two")
    begin = time.perf_counter()
    with running_server(contender(backend), model.path, folder, flags=flags, **arguments) as server:
        into.info = server.info()
        into.start_seconds = time.perf_counter() - begin
        report(f"{backend}: ready after {into.start_seconds:.0f} s")
        for name, case in cases.items():
            into.cases[name] = fit(case, model, into.info, share=1.0 if exactly else POOL_SHARE)
            if exactly and into.cases[name] != case:
                raise RuntimeError(
                    f"{case.title}: {backend} holds less than the server before it; ask for fewer "
                    "requests or tokens"
                )
        for name, case in into.cases.items():
            about = f"{backend}, {case.title}"
            into.runs[name] = _runs(server, case, model.vocab_size, rounds, about, report)
            spread = tpot(into.runs[name])
            report(f"{about}: {spread.median:.3f} ms per token")
        into.stats = server.stats()


def fit(
    case: Case, model: ComparedModel, info: Mapping[str, Any], share: float = POOL_SHARE
) -> Case:
    """Return the case, or a smaller one that fits into the context and `share` of the KV pool.

    RuntimeError if no case fits.
    """
    context = min(int(info.get("context_length") or model.context_len), model.context_len)
    most = context - case.private - case.generated - 1
    if most < 0:
        raise RuntimeError(
            f"{case.title} with {case.generated} tokens answered: the context ends at {context}"
        )
    pool = int(share * int(info["max_total_num_tokens"]))
    case = replace(case, prefix=min(case.prefix, most))
    while case.batch > 1 and case.pool_tokens > pool:
        case = replace(case, batch=case.batch // 2)
    if case.pool_tokens > pool:
        raise RuntimeError(f"{case.title}: takes {case.pool_tokens} of {pool} tokens of KV")
    return case


def _runs(
    server: Server, case: Case, vocab_size: int, rounds: int, about: str, report: Tell
) -> list[DecodeRun]:
    prompts = case.prompts(vocab_size)
    server.flush()
    if case.prefix:  # caches the prefix before the prompts are sent
        server.generate([prompts[0][: case.prefix]], sampling_of(1))
    server.generate(prompts, sampling_of(4))  # warm-up, because kernels are compiled at first use

    def ask() -> DecodeRun:
        return decode_run(server, prompts, case.generated)

    runs = [ask() for _ in range(rounds)]
    ask_again_if_held_up(runs, ask, lambda told: report(f"{about}: {told}"))
    return runs


def compare(pat: Measured, other: Measured) -> list[Compared]:
    """Compare all cases for which both servers have been timed.

    RuntimeError if the two servers' runs of a case have no slices that can be compared.
    """
    return [
        Compared(
            name,
            case,
            tpot(pat.runs[name]),
            tpot(other.runs[name]),
            ratio(other.runs[name], pat.runs[name]),
        )
        for name, case in pat.cases.items()
        if name in pat.runs and name in other.runs
    ]


def verdict(compared: Sequence[Compared], other: str) -> str:
    """Return the result in one sentence."""
    parts = [f"{_words(each)} {each.name} ({each.gain.median:.2f}x)" for each in compared]
    return f"pat is {', '.join(parts)}, against {other}."


def _words(compared: Compared) -> str:
    gain = compared.gain
    if compared.too_noisy:
        return "too noisy to judge"
    if gain.median - 2 * gain.error > 1:
        return "faster"
    return "slower" if gain.median + 2 * gain.error < 1 else "as fast"
