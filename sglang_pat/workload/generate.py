"""Generates traces from a seed: the workloads of papers.

A workload yields bursts, which are requests that arrive together. `generate` adds arrival times.
The same name, seed and options give the same trace on every machine and in every version of Python.
Lengths are in tokens. The docstrings say which numbers come from a paper and which are our choice.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple, TypeVar

from sglang_pat.workload.trace import Segment, Trace, TraceErrors, TraceRequest

T = TypeVar("T")

_NORMAL = NormalDist()

# Mean lengths of all prompts and answers in BurstGPT. The distribution of lengths, log-normal with
# this sigma, is our choice.
_PROMPT_MEAN, _ANSWER_MEAN = 621, 126
_CHAT_SIGMA = 1.0
_LONGEST_PROMPT, _LONGEST_ANSWER = 8192, 2048

# FastTree, section 6.2: Meta AI's system prompt, batches of 128 requests, 256 new tokens each.
_FASTTREE_SYSTEM, _FASTTREE_ANSWER = 3193, 256
_FASTTREE_BATCH = 128
# Lengths of questions, which stand for the questions of GSM8K. The numbers are our choice.
_QUESTION_MEAN, _QUESTION_SIGMA, _LONGEST_QUESTION = 60, 0.4, 256


class _Draft(NamedTuple):
    """A request without its arrival time."""

    prompt: tuple[Segment, ...]
    output_length: int


_Burst = list[_Draft]


class Workload(NamedTuple):
    """A named generator. rate: default number of requests a second."""

    bursts: Callable[[Draws], Iterator[_Burst]]
    rate: float
    description: str


def generate(name: str, *, requests: int, seed: int = 0, rate: float | None = None) -> Trace:
    """Return a trace of `requests` requests of a workload. name: a key of `WORKLOADS`.

    rate: mean number of requests a second. inf: all requests arrive at once. None: the workload's
    own rate. Bursts arrive as a Poisson process. Arrivals are whole milliseconds, and the first is
    0. If an argument is not allowed, a ValueError names it.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r}; allowed: {', '.join(WORKLOADS)}")
    if requests < 1:
        raise ValueError(f"requests={requests}; at least 1 is needed")
    workload = WORKLOADS[name]
    rate = workload.rate if rate is None else rate
    if not rate > 0:
        raise ValueError(f"rate={rate}; a number above 0, or inf, is allowed")
    stream = _timed(workload, requests, Draws(seed), rate)
    return Trace(name, "generated", stream, TraceErrors(), requests)


def _timed(workload: Workload, requests: int, draws: Draws, rate: float) -> Iterator[TraceRequest]:
    arrival = 0.0
    left = requests
    for burst in workload.bursts(draws):
        milliseconds = round(arrival * 1000)
        for draft in burst[:left]:
            yield TraceRequest(milliseconds / 1000, draft.prompt, draft.output_length)
        left -= len(burst)
        if left <= 0:
            return
        arrival += draws.exponential(len(burst) / rate)


def conversation(
    draws: Draws,
    levels: tuple[int, int, int] = (46, 348, 2123),
    countries: int = 8,
    languages: int = 4,
) -> Iterator[_Burst]:
    """Yield chats after a system prompt of three levels (PAT, section 8.2).

    All requests share the first level. Requests of the same country share the second level, and
    those of the same country and language the third. The lengths of the levels were counted by the
    tokenizer of Llama 3. All countries are equally frequent, and so are all languages; how many
    there are is our choice. A private message follows the system prompt. Messages and answers have
    the lengths of BurstGPT.
    """
    everybody, by_country, by_language = levels
    while True:
        country, language = draws.below(countries), draws.below(languages)
        system = (
            Segment(_content("conversation", 1), everybody),
            Segment(_content("conversation", 2, country), by_country),
            Segment(_content("conversation", 3, country, language), by_language),
        )
        yield [_Draft((*system, _message(draws)), _answer(draws))]


def toolagent(
    draws: Draws, tasks: int = 48, system_mean: int = 5120, shared: float = 0.61
) -> Iterator[_Burst]:
    """Yield requests of agents, whose system prompt depends on the task (PAT, section 8.2).

    The requests imitate Mooncake's toolagent trace. If there are a thousand requests or more, an
    unlimited cache already has 59% of their prompt tokens. `shared`, the system prompt's fraction
    of a prompt's tokens, is a bit higher, because the first prompt of a task is never cached. The
    frequencies of tasks follow Zipf's law. All numbers but the 59% are our choice.
    """
    system_lengths = [draws.length(system_mean, 0.5, 4 * system_mean) for _ in range(tasks)]
    frequencies = zipf(tasks)
    while True:
        task = draws.ranked(frequencies)
        system = Segment(_content("toolagent", task), system_lengths[task])
        private_mean = system.length * (1 - shared) / shared
        private = _private(draws, draws.length(private_mean, 0.5, 8 * system_mean))
        yield [_Draft((system, private), draws.length(180, 1.0, _LONGEST_ANSWER))]


def few_shot(
    draws: Draws, combinations: int = 8, examples: int = 20, questions: int = 16
) -> Iterator[_Burst]:
    """Yield prompts that consist of a system prompt, examples and a question (FastTree, 6.2, B).

    A batch of the paper has 128 requests: 16 questions for each of 8 combinations of 20 examples.
    Here these requests arrive in a random order, and every batch has new combinations. An example
    has 150 tokens, which is our choice.
    """
    batch = 0
    while True:
        for combination in draws.shuffled([*range(combinations)] * questions):
            prompt = (
                Segment(_content("fasttree"), _FASTTREE_SYSTEM),
                Segment(_content("few-shot", batch, combination), examples * 150),
                _question(draws),
            )
            yield [_Draft(prompt, _FASTTREE_ANSWER)]
        batch += 1


def multi_chain(draws: Draws, chains: int = 4) -> Iterator[_Burst]:
    """Yield, for each question, four chains of reasoning that arrive together (FastTree, 6.2, C).

    A prompt is a system prompt, the question, and 24 tokens that start the chain. The number 24 is
    our choice.
    """
    while True:
        prefix = (Segment(_content("fasttree"), _FASTTREE_SYSTEM), _question(draws))
        yield [_Draft((*prefix, _private(draws, 24)), _FASTTREE_ANSWER) for _ in range(chains)]


def multi_document(
    draws: Draws, documents: int = 6, in_prompt: int = 3, length: int = 2048
) -> Iterator[_Burst]:
    """Yield questions on parts of a report. There is no system prompt (FastTree, 6.2, D).

    A prompt has `in_prompt` of the parts in the order of the report, so prompts share prefixes of
    one, two or three parts. The number and length of the parts are our choice. There are 128
    requests per report, the size of a batch in the paper.
    """
    count = 0
    while True:
        report = count // _FASTTREE_BATCH
        chosen = sorted(draws.shuffled(range(documents))[:in_prompt])
        parts = (Segment(_content("multi-document", report, part), length) for part in chosen)
        yield [_Draft((*parts, _question(draws)), _FASTTREE_ANSWER)]
        count += 1


def rl_rollout(
    draws: Draws, samples: int = 16, template: int = 64, prompt_mean: int = 200
) -> Iterator[_Burst]:
    """Yield rollouts of reinforcement learning: a group of samples for each prompt, as in GRPO.

    The requests of a group arrive together and have the same prompt. All prompts begin with the
    same template. Samples differ in length. All numbers are our choice.
    """
    while True:
        question = _private(draws, draws.length(prompt_mean, 0.6, 2048))
        prompt = (Segment(_content("rl-rollout"), template), question)
        yield [_Draft(prompt, draws.length(1024, 0.7, 8192)) for _ in range(samples)]


def no_sharing(draws: Draws, system: int = 2517) -> Iterator[_Burst]:
    """Yield requests that share no token, but are as long as those of `conversation`."""
    while True:
        message = _message(draws)
        prompt = (Segment(message.content, system + message.length),)
        yield [_Draft(prompt, _answer(draws))]


WORKLOADS: dict[str, Workload] = {
    "conversation": Workload(conversation, 5.0, "chat after a three-level system prompt"),
    "toolagent": Workload(toolagent, 8.0, "task-specific system prompts, 59% found in the cache"),
    "few-shot": Workload(few_shot, 16.0, "a system prompt and one of 8 sets of 20 examples"),
    "multi-chain": Workload(multi_chain, 16.0, "4 chains of reasoning for each question"),
    "multi-document": Workload(multi_document, 16.0, "3 of 6 parts of a report in every prompt"),
    "rl-rollout": Workload(rl_rollout, 16.0, "16 samples of each prompt, at once"),
    "no-sharing": Workload(no_sharing, 5.0, "private prompts, as long as those of conversation"),
}


def _message(draws: Draws) -> Segment:
    return _private(draws, draws.length(_PROMPT_MEAN, _CHAT_SIGMA, _LONGEST_PROMPT))


def _answer(draws: Draws) -> int:
    return draws.length(_ANSWER_MEAN, _CHAT_SIGMA, _LONGEST_ANSWER)


def _question(draws: Draws) -> Segment:
    return _private(draws, draws.length(_QUESTION_MEAN, _QUESTION_SIGMA, _LONGEST_QUESTION))


def _private(draws: Draws, length: int) -> Segment:
    """Return a text that is used only once. Its content id is a random number of 62 bits."""
    return Segment(draws.below(1 << 31) << 31 | draws.below(1 << 31), length)


def _content(*names: str | int) -> int:
    """Return the content id of a shared text: 62 bits of a hash of its name."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class Draws:
    """A stream of independent draws. ValueError if the seed is negative.

    Python promises only that `random()`, and its seeding with an integer, will not change between
    versions. So everything else is computed from `random()` here.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed {seed}; 0 or more is allowed")
        self._uniform = random.Random(seed).random

    def below(self, end: int) -> int:
        """Draw an integer from 0 to end - 1, all equally probable."""
        return int(self._uniform() * end)

    def exponential(self, mean: float) -> float:
        return -mean * math.log(1.0 - self._uniform())

    def length(self, mean: float, sigma: float, longest: int) -> int:
        """Draw a log-normal length of about this mean, then limit it to 1..longest.

        sigma: the standard deviation of the length's logarithm. The median of the lengths is
        mean / exp(sigma^2 / 2).
        """
        # inv_cdf() does not accept 0, which random() may return.
        normal = _NORMAL.inv_cdf(max(self._uniform(), 1e-12))
        exponent = sigma * normal - sigma * sigma / 2
        return min(max(round(mean * math.exp(exponent)), 1), longest)

    def ranked(self, cumulated: Sequence[float]) -> int:
        """Draw an index. cumulated: the cumulated weights of all indices, as `zipf` returns."""
        wanted = self._uniform() * cumulated[-1]
        return next(i for i, weight in enumerate(cumulated) if wanted < weight)

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """Return the values in a random order."""
        order = list(values)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


def zipf(count: int) -> list[float]:
    """Return the cumulated weights of `count` ranks. The weight of rank k is 1 / k."""
    cumulated = [0.0]
    for rank in range(1, count + 1):
        cumulated.append(cumulated[-1] + 1.0 / rank)
    return cumulated[1:]
