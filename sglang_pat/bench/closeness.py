"""The law of `sglang-pat check`: whether pat decodes as close to a model as another backend does.

The distance of a token is the difference between its log-probability in decode and in a prefill
under a reference backend. Both backends answer the same requests, and both have distances: each
rounds otherwise than the reference. pat is as close if its distances are no larger than the
other's. Five measures of them have a limit, a multiple of the same measure of the other backend:

- mean distance, 99th percentile of the distance: 1.1; mean KL divergence: 1.21, since it grows with
  the square of a distance. They find errors of many tokens. They count where the excess is no
  accident of these requests: it must show in 99.5% of 1000 samples with replacement of the prompts.
- worst answer, by its mean distance: 2. It finds an error of one request: a wrong slot, a stale
  path. A mean over an answer has a light tail, so that two largest ones are alike.
- worst token: 3. It finds an error of single steps. Two largest values of one heavy tail may well
  be a factor of two apart.

A reference that is a third backend is fair to both. Where it is the other backend itself, its
decode and its prefill share roundings, and a correct pat is further from that prefill: in bfloat16
on a CPU 1.3 to 1.6 times in the mean, while both are equally far from float32. All limits are then
those of distances 1.8 times as large.

No limit is below the rounding of the model's type: distances below it are rounding, whatever their
ratio is. It is 2^-8 for bfloat16 and 2^-11 for float16, half a unit of the last place of a
log-probability of 1, and 2^-16 for float32, which is 256 of these units, for sums in another order.

Greedy answers must agree with the other backend's up to a near tie: two tokens whose
log-probabilities are no further apart than twice the largest distance of the other backend.
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
SHARED_ROUNDING = 1.8  # where the other backend's own prefill is the reference
TIE_RATIO = 2.0
ROUNDING = {"float32": 2.0**-16, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_KL = 1e-6  # log-probabilities are float32
RESAMPLES = 1000
CERTAIN = 0.995  # of the resamples
LEAST_PROMPTS = 8
_NOT_A_NUMBER = 1e6  # the distance of a log-probability that is no number

FloatArray = npt.NDArray[np.float64]
_Weights = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure of both backends.

    Attributes
    ----------
    name : str
    pat, other : float
        In natural units of log-probability.
    limit : float
        pat's largest value that is as close.
    certainty : float
        The share of resamples in which pat is beyond the limit; 1 or 0 where none are drawn.
    """

    name: str
    pat: float
    other: float
    limit: float
    certainty: float

    @property
    def is_close(self) -> bool:
        """Whether pat is within the limit, or beyond it by accident."""
        return self.pat <= self.limit or self.certainty < CERTAIN


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found.

    Attributes
    ----------
    measures : list of Measure
    greedy : Agreement
        pat's greedy answers and the other backend's.
    tie : float
        Two tokens tie if they are no further apart, in log-probability.
    tokens : dict of str to int
        Tokens compared, of `pat` and of `other`.
    """

    measures: list[Measure]
    greedy: Agreement
    tie: float
    tokens: dict[str, int]

    @property
    def is_close(self) -> bool:
        """Whether pat is as close to the model as the other backend."""
        return not self.excesses()

    @property
    def first_parting(self) -> Parting | None:
        """The earliest position at which greedy answers part: an error, or else a tie."""
        partings = self.greedy.errors or self.greedy.partings
        return min(partings, key=lambda each: each.position, default=None)

    def excesses(self) -> list[str]:
        """Return what is beyond its limit, in words."""
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
        """Return all of it, ready for JSON."""
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
) -> Verdict:
    """Compare pat with another backend.

    Parameters
    ----------
    asked : sequence of Asked
        The requests of both.
    replies, distances : tuple
        pat's, and the other backend's.
    dtype : str
        The model's, a key of `ROUNDING`.
    own_prefill : bool
        Whether the distances are those from the other backend's own prefill.

    Raises
    ------
    ValueError
        The type is another one, or too little was answered to compare.
    RuntimeError
        A log-probability of the other backend is no number.
    """
    if dtype not in ROUNDING:
        raise ValueError(f"dtype {dtype!r}; allowed: {', '.join(ROUNDING)}")
    prompts = {tuple(each.prompt) for each in asked}
    if len(prompts) < LEAST_PROMPTS:
        raise ValueError(f"{len(prompts)} different prompts; allowed: at least {LEAST_PROMPTS}")
    if not all(np.isfinite(each.distance).all() for each in distances[1]):
        raise RuntimeError("the other backend gives log-probabilities that are no numbers")
    floor = ROUNDING[dtype]
    number = {prompt: index for index, prompt in enumerate(sorted(prompts))}
    prompt_of = [number[tuple(each.prompt)] for each in asked]
    groups = [_Sample(each, prompt_of, len(prompts)) for each in distances]
    shared = SHARED_ROUNDING if own_prefill else 1.0
    answers, tokens = (
        [getattr(group, name) for group in groups] for name in ("worst_answer", "worst_token")
    )
    measures = [
        *_of_many(groups, RATIO * shared, floor),
        _of_worst("worst answer", answers, ANSWER_RATIO * shared, floor),
        _of_worst("worst token", tokens, WORST_RATIO * shared, floor),
    ]
    tie = TIE_RATIO * max(groups[1].worst_token, floor)
    greedy = [
        [reply.answer for reply in each if not asked[reply.request].samples] for each in replies
    ]
    return Verdict(
        measures,
        agreement(greedy[0], greedy[1], tie),
        tie,
        {name: group.count for name, group in zip(("pat", "other"), groups, strict=True)},
    )


class _Sample:
    """The distances of one backend: all tokens, and the prompt of each."""

    def __init__(
        self, distances: Sequence[Distances], prompt_of: Sequence[int], num_prompts: int
    ) -> None:
        finite = [
            each._replace(
                distance=np.minimum(each.distance, _NOT_A_NUMBER),
                kl=np.minimum(each.kl, _NOT_A_NUMBER),
            )
            for each in distances
            if len(each.distance)
        ]
        if not finite:
            raise ValueError("no answer has two tokens; allowed: at least one that has")
        self.distance = np.concatenate([each.distance for each in finite])
        kl = np.concatenate([each.kl for each in finite])
        prompt = np.repeat(
            [prompt_of[each.request] for each in finite], [len(each.distance) for each in finite]
        )
        self.count = len(self.distance)
        self.worst_token = float(self.distance.max())
        self.worst_answer = max(float(each.distance.mean()) for each in finite)
        self._order = np.argsort(self.distance)
        self._sorted, self._sorted_prompt = self.distance[self._order], prompt[self._order]
        self._tokens = np.bincount(prompt, minlength=num_prompts)
        self._sums = {
            "mean": np.bincount(prompt, self.distance, minlength=num_prompts),
            "kl": np.bincount(prompt, kl, minlength=num_prompts),
        }

    def mean(self, weights: _Weights) -> float:
        """Mean distance, each prompt counted `weights` times."""
        return self._mean("mean", weights)

    def mean_kl(self, weights: _Weights) -> float:
        """Mean KL divergence, each prompt counted `weights` times."""
        return self._mean("kl", weights)

    def p99(self, weights: _Weights) -> float:
        """99th percentile of the distance, each prompt counted `weights` times."""
        reached = np.cumsum(weights[self._sorted_prompt])
        index = int(np.searchsorted(reached, 0.99 * reached[-1]))
        return float(self._sorted[min(index, self.count - 1)])

    def _mean(self, name: str, weights: _Weights) -> float:
        total = float(weights @ self._tokens)
        return float(weights @ self._sums[name]) / total if total else 0.0


def _of_many(groups: Sequence[_Sample], ratio: float, floor: float) -> list[Measure]:
    """Measures of all tokens, each with its certainty."""
    num_prompts = len(groups[0]._tokens)
    rng = np.random.default_rng(0)
    once = np.ones(num_prompts, dtype=np.int64)
    drawn = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), RESAMPLES)
    measures = []
    for name, take, times, least in (
        ("mean distance", _Sample.mean, ratio, floor),
        ("p99 distance", _Sample.p99, ratio, floor),
        ("mean KL", _Sample.mean_kl, ratio**2, max(LEAST_KL, floor**2 / 2)),
    ):
        pat, other = (take(group, once) for group in groups)
        beyond = sum(
            take(groups[0], weights) > max(times * take(groups[1], weights), least)
            for weights in drawn
        )
        limit = max(times * other, least)
        measures.append(Measure(name, pat, other, limit, beyond / RESAMPLES))
    return measures


def _of_worst(name: str, values: Sequence[float], ratio: float, floor: float) -> Measure:
    """A measure of the largest ones, which no resampling makes more certain."""
    pat, other = values
    limit = max(ratio * other, floor)
    return Measure(name, pat, other, limit, float(pat > limit))
