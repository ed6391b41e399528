"""The limits of `sglang-pat check`: when pat is as close to a model as another backend.

The distance of a token is the difference between its log-probability in decode and in a prefill by
a reference backend. pat and the other backend answer the same requests. Both have distances,
because each rounds in another order than the reference. pat is as close if its distances are no
larger than the other backend's. For each of five measures, pat's value has a limit: the other
backend's value times a factor.

- mean distance and 99th percentile: 1.1; mean KL divergence: 1.21, since it grows with the square
  of a distance. These measures find errors that affect many tokens. An excess counts only if it
  appears in 99.5% of 1000 samples of the prompts, drawn with replacement. So it is not due to
  chance.
- worst answer, by its mean distance: 2. This measure finds an error of one request, such as a wrong
  slot or a stale path. The means of answers have a light tail, so two correct backends have similar
  largest means.
- worst token: 3. This measure finds an error of a single step. The distances of tokens have a heavy
  tail, so the largest distances of two correct backends may well differ by a factor of two.

If a third backend is the reference, it treats both sides equally. If the other backend itself is
the reference, its decode and prefill share roundings, so a correct pat has larger distances. In
bfloat16 on a CPU, they were 1.3 to 1.6 times as large on average, although both backends were
equally far from float32. The factors for distances are then multiplied by 1.8.

No limit is below the rounding of the model's dtype, because a ratio of two roundings says nothing.
The rounding is 2^-8 for bfloat16 and 2^-11 for float16: half a unit in the last place of a
log-probability of 1. For float32 it is 2^-16, which is 256 such units, to allow sums in another
order.

Greedy answers must agree with the other backend's up to a near tie. In a near tie, the
log-probabilities of two tokens differ by at most twice the other backend's largest distance,
because each of the two may have moved by this distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_pat.bench.answers import Agreement, Parting, agreement
from sglang_pat.bench.check_requests import Asked
from sglang_pat.bench.prefill_scores import Distances, Reply

RATIO = 1.1
ANSWER_RATIO = 2.0
WORST_RATIO = 3.0
SHARED_ROUNDING = 1.8  # factor of the limits if the other backend is the reference
TIE_RATIO = 2.0
ROUNDING = {"float32": 2.0**-16, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_KL = 1e-6  # precision of float32 log-probabilities
RESAMPLES = 1000
CERTAIN = 0.995  # an excess counts if it appears in this share of the resamples
_NOT_A_NUMBER = 1e6  # distance if a log-probability is NaN


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of both backends.

    Attributes
    ----------
    name : str
    pat, other : float
        Values of the measure, in natural log-probability.
    limit : float
        The largest value of `pat` that counts as close.
    certainty : float
        The share of resamples in which pat is beyond the limit. The worst answer and the worst
        token have no resamples: 1 if `pat` is beyond the limit, else 0.
    """

    name: str
    pat: float
    other: float
    limit: float
    certainty: float

    @property
    def is_close(self) -> bool:
        """True if pat is within the limit, or if it may be beyond the limit only by chance."""
        return self.pat <= self.limit or self.certainty < CERTAIN


@dataclass(frozen=True, slots=True)
class LogprobVerdict:
    """The result of a comparison.

    Attributes
    ----------
    measures : list of Measure
    greedy : Agreement
        How far pat's greedy answers agree with the other backend's.
    tie : float
        Two tokens tie if their log-probabilities differ by at most this.
    tokens : dict of str to int
        Number of tokens compared, for the keys `pat` and `other`.
    """

    measures: list[Measure]
    greedy: Agreement
    tie: float
    tokens: dict[str, int]

    @property
    def is_close(self) -> bool:
        """True if pat is as close to the model as the other backend."""
        return not self.excesses()

    @property
    def first_parting(self) -> Parting | None:
        """The earliest parting that is an error. If there is none, the earliest parting or None."""
        partings = self.greedy.errors or self.greedy.partings
        return min(partings, key=lambda each: each.position, default=None)

    def excesses(self) -> list[str]:
        """Return a description of each measure that is beyond its limit."""
        found = [
            f"{each.name} {each.pat:.3g} (limit {each.limit:.3g})"
            for each in self.measures
            if not each.is_close
        ]
        if self.greedy.errors:
            found.append(f"{len(self.greedy.errors)} greedy answers part without a near tie")
        return found

    def sentence(self, other: str) -> str:
        """Return the verdict in one line. other: the name of the other backend."""
        if not self.is_close:
            return f"pat is not as close to this model as {other} is: {', '.join(self.excesses())}."
        mean = self.measures[0]
        return (
            f"pat is as close to this model as {other} is: mean distance {mean.pat:.3g} and "
            f"{mean.other:.3g}, {self.tokens['pat']:,} tokens."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        parting = self.first_parting
        return {
            "is_close": self.is_close,
            "measures": [asdict(each) | {"is_close": each.is_close} for each in self.measures],
            "greedy": self.greedy.as_dict() | {"tie": self.tie},
            "first_divergence": None if parting is None else parting._asdict(),
            "tokens": self.tokens,
            "excesses": self.excesses(),
        }


def judge(
    asked: Sequence[Asked],
    replies: tuple[Sequence[Reply], Sequence[Reply]],
    distances: tuple[Sequence[Distances], Sequence[Distances]],
    dtype: str,
    *,
    own_prefill: bool,
) -> LogprobVerdict:
    """Compare pat with another backend.

    Parameters
    ----------
    asked : sequence of Asked
        The requests of both backends.
    replies, distances : tuple
        Two pairs: pat's sequence, then the other backend's.
    dtype : str
        The model's dtype, a key of `ROUNDING`.
    own_prefill : bool
        Whether the reference of the distances is the other backend's prefill.

    Raises
    ------
    ValueError
        `dtype` is not a key of `ROUNDING`, or no answer has two tokens.
    RuntimeError
        A log-probability of the other backend is not a number.
    """
    if dtype not in ROUNDING:
        raise ValueError(f"dtype {dtype!r}; allowed: {', '.join(ROUNDING)}")
    if not all(np.isfinite(each.distance).all() for each in distances[1]):
        raise RuntimeError("the other backend gives log-probabilities that are not numbers")
    floor, shared = ROUNDING[dtype], SHARED_ROUNDING if own_prefill else 1.0
    pat, other = (_Tokens(asked, each) for each in distances)
    tie = TIE_RATIO * max(other.worst_token, floor)
    greedy = [
        [reply.answer for reply in each if not asked[reply.request].samples] for each in replies
    ]
    return LogprobVerdict(
        [
            *_of_many(pat, other, RATIO * shared, floor),
            _of_worst(
                "worst answer", pat.worst_answer, other.worst_answer, ANSWER_RATIO * shared, floor
            ),
            _of_worst(
                "worst token", pat.worst_token, other.worst_token, WORST_RATIO * shared, floor
            ),
        ],
        agreement(greedy[0], greedy[1], tie),
        tie,
        {"pat": len(pat.distance), "other": len(other.distance)},
    )


class _Tokens:
    """The distances of all tokens of one backend, in ascending order, and the tokens' prompts."""

    def __init__(self, asked: Sequence[Asked], distances: Sequence[Distances]) -> None:
        answers = [each for each in distances if len(each.distance)]
        if not answers:
            raise ValueError("no answer has two tokens; allowed: at least one that has")
        index = {prompt: i for i, prompt in enumerate(sorted({tuple(a.prompt) for a in asked}))}
        distance, kl = (
            np.minimum(np.concatenate(parts), _NOT_A_NUMBER)
            for parts in ([each.distance for each in answers], [each.kl for each in answers])
        )
        prompt = np.repeat(
            [index[tuple(asked[each.request].prompt)] for each in answers],
            [len(each.distance) for each in answers],
        )
        order = np.argsort(distance)
        self.num_prompts = len(index)
        self.distance, self._kl, self._prompt = distance[order], kl[order], prompt[order]
        self.worst_token = float(self.distance[-1])
        self.worst_answer = max(
            float(np.minimum(each.distance, _NOT_A_NUMBER).mean()) for each in answers
        )

    def measures(self, weights: npt.NDArray[np.int64]) -> list[npt.NDArray[np.float64]]:
        """Return mean distance, 99th percentile and mean KL for each row of `weights`.

        weights: how often each prompt counts, int64 `[rows, prompts]`.
        """
        of_prompts = [
            np.bincount(self._prompt, values, minlength=self.num_prompts)
            for values in (np.ones_like(self.distance), self.distance, self._kl)
        ]
        tokens, distance, kl = (weights @ each for each in of_prompts)
        return [distance / tokens, np.array([self._p99(row) for row in weights]), kl / tokens]

    def _p99(self, weights: npt.NDArray[np.int64]) -> float:
        reached = np.cumsum(weights[self._prompt])
        return float(self.distance[np.searchsorted(reached, 0.99 * reached[-1])])


def _of_many(pat: _Tokens, other: _Tokens, ratio: float, floor: float) -> list[Measure]:
    """Return the measures that count all tokens, each with its certainty."""
    number = pat.num_prompts
    drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), RESAMPLES)
    # The first row counts each prompt once. The others are the resamples.
    weights = np.vstack([np.ones(number, dtype=np.int64), drawn])
    limits = (
        ("mean distance", ratio, floor),
        ("p99 distance", ratio, floor),
        ("mean KL", ratio**2, max(LEAST_KL, floor**2 / 2)),
    )
    measures = []
    for (name, times, least), of_pat, of_other in zip(
        limits, pat.measures(weights), other.measures(weights), strict=True
    ):
        limit = np.maximum(times * of_other, least)
        certainty = float((of_pat > limit)[1:].mean())
        measures.append(
            Measure(name, float(of_pat[0]), float(of_other[0]), float(limit[0]), certainty)
        )
    return measures


def _of_worst(name: str, pat: float, other: float, ratio: float, floor: float) -> Measure:
    limit = max(ratio * other, floor)
    return Measure(name, pat, other, limit, float(pat > limit))
