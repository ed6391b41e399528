"""`sglang-pat check` without a server: its criterion, requests, input and exit status."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat.bench import check_requests, server
from sglang_pat.bench.answers import Answer, Candidate
from sglang_pat.bench.check_requests import Asked
from sglang_pat.bench.closeness import ROUNDING, LogprobVerdict, judge
from sglang_pat.bench.prefill_scores import Distances, Reply, divergence
from sglang_pat.cli import server_options
from sglang_pat.cli.gpus import Gpu

PROMPTS, TOKENS = 64, 80
ASKED = [Asked([index], TOKENS) for index in range(PROMPTS)]
NOISE = 0.02  # of bfloat16


# --- the law ---


def noise(seed: int, scale: float = NOISE) -> list[np.ndarray]:
    """Return distances with a heavy tail, like a model's: larger for some prompts and tokens."""
    rng = np.random.default_rng(seed)
    of_prompt = np.exp(0.4 * rng.standard_normal((PROMPTS, 1)))
    return [*(scale * of_prompt * np.abs(rng.standard_t(5, (PROMPTS, TOKENS - 1))))]


def replies(token: int = 7, gap: float = 5.0) -> list[Reply]:
    candidates = [[Candidate(-0.1, 7), Candidate(-0.1 - gap, 9)]] * TOKENS
    return [Reply(i, Answer([token] * TOKENS, candidates), [-0.1] * TOKENS) for i in range(PROMPTS)]


def judged(
    pat: list[np.ndarray],
    other: list[np.ndarray],
    *,
    dtype: str = "bfloat16",
    of_pat: list[Reply] | None = None,
    of_other: list[Reply] | None = None,
    own_prefill: bool = False,
) -> LogprobVerdict:
    sides = [
        [Distances(i, distance, distance**2) for i, distance in enumerate(side)]
        for side in (pat, other)
    ]
    said = (of_pat or replies(), of_other or replies())
    return judge(ASKED, said, (sides[0], sides[1]), dtype, own_prefill=own_prefill)


def names(verdict: LogprobVerdict) -> set[str]:
    return {each.name for each in verdict.measures if not each.is_close}


def test_equal_noise_is_as_close() -> None:
    for seed in range(20):
        verdict = judged(noise(2 * seed), noise(2 * seed + 1))
        assert verdict.excesses() == []
        assert verdict.is_close
    assert verdict.sentence("fa3").startswith("pat is as close to this model as fa3 is: mean ")


def test_a_backends_own_prefill_shares_its_rounding() -> None:
    pat, other = [1.6 * distance for distance in noise(0)], noise(1)
    assert {"mean distance", "p99 distance", "mean KL"} <= names(judged(pat, other))
    assert judged(pat, other, own_prefill=True).is_close
    twice = [2.5 * distance for distance in noise(0)]
    assert "mean distance" in names(judged(twice, other, own_prefill=True))


def of_all(pat: list[np.ndarray]) -> None:
    pat[:] = [np.hypot(distance, 2 * NOISE) for distance in pat]


def of_one_in_fifty(pat: list[np.ndarray]) -> None:
    for distance in pat:
        distance[::50] += 20 * NOISE


def of_one_answer(pat: list[np.ndarray]) -> None:
    pat[17][20:] += 12 * NOISE


def of_one_token(pat: list[np.ndarray]) -> None:
    pat[3][5] = 4 * max(map(np.max, noise(1)))


@pytest.mark.parametrize(
    ("error", "exceeded", "is_all"),
    [
        (of_all, {"mean distance", "mean KL"}, False),
        (of_one_in_fifty, {"p99 distance"}, False),
        (of_one_answer, {"worst answer"}, True),
        (of_one_token, {"worst token"}, True),
    ],
)
def test_an_error_is_found_however_few_tokens_have_it(
    error: Callable[[list[np.ndarray]], None], exceeded: set[str], is_all: bool
) -> None:
    pat = noise(0)
    error(pat)
    verdict = judged(pat, noise(1))
    assert exceeded == names(verdict) if is_all else exceeded <= names(verdict)
    assert verdict.sentence("fa3").startswith("pat is not as close to this model as fa3 is: ")


def test_no_number_is_no_agreement() -> None:
    pat, other = noise(0), noise(1)
    pat[3][5] = math.inf
    assert "worst token" in names(judged(pat, other))
    with pytest.raises(RuntimeError, match="the other backend gives log-probabilities that are no"):
        judged(other, pat)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rounding_of_the_type_is_no_distance(dtype: str) -> None:
    floor = ROUNDING[dtype]
    small, smaller = ([np.full(TOKENS - 1, x * floor)] * PROMPTS for x in (0.9, 0.01))
    large = [np.full(TOKENS - 1, 1.1 * floor)] * PROMPTS
    kl = max(1e-6, floor**2 / 2)
    limits = {each.name: each.limit for each in judged(small, smaller, dtype=dtype).measures}
    assert limits == dict.fromkeys(limits, floor) | {"mean KL": kl}
    verdict = judged(large, smaller, dtype=dtype)
    assert {"mean distance", "p99 distance", "worst answer", "worst token"} <= names(verdict)


def test_greedy_answers_part_at_near_ties_only() -> None:
    worst = max(map(np.max, noise(1)))
    tie, parted = replies(gap=1.9 * worst), replies(9)
    verdict = judged(noise(0), noise(1), of_pat=parted, of_other=tie)
    assert verdict.is_close
    assert verdict.first_parting is not None
    assert verdict.first_parting.is_tie
    far = replies(gap=2.1 * worst)
    far[5] = Reply(5, replies(9)[5].answer, [-0.1] * TOKENS)
    verdict = judged(noise(0), noise(1), of_pat=far, of_other=replies(gap=2.1 * worst))
    assert verdict.excesses() == ["1 greedy answers part without a near tie"]
    assert verdict.as_dict()["first_divergence"]["request"] == 5


def test_answers_that_part_within_the_rounding_of_the_type_tie() -> None:
    """The other backend may have no noise, but bfloat16 still rounds."""
    floor = ROUNDING["bfloat16"]
    exact = [np.full(TOKENS - 1, floor / 1000)] * PROMPTS
    for gap, is_tie in ((1.9 * floor, True), (2.1 * floor, False)):
        verdict = judged(exact, exact, of_pat=replies(9, gap), of_other=replies(gap=gap))
        assert verdict.is_close == is_tie


def test_an_answer_of_one_token_hides_no_worse_one() -> None:
    """An answer of one token has no distance; the mean of none is NaN, which exceeds no limit."""
    pat = noise(0)
    pat[0] = np.zeros(0)
    pat[17][20:] += 12 * NOISE
    verdict = judged(pat, noise(1))
    assert names(verdict) == {"worst answer"}
    assert all(math.isfinite(each.pat) for each in verdict.measures)


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="dtype 'float64'; allowed: float32, float16, bfloat16"):
        judged(noise(0), noise(1), dtype="float64")
    nothing: tuple[list[Any], list[Any]] = ([], [])
    with pytest.raises(ValueError, match="no answer has two tokens"):
        judge(ASKED, nothing, nothing, "float16", own_prefill=False)


def test_divergence() -> None:
    def named(**logprobs: float) -> list[Candidate]:
        return [Candidate(math.log(p), int(token[1:])) for token, p in logprobs.items()]

    reference = named(t1=0.5, t2=0.25)
    assert divergence(reference, reference) == 0
    # One token is not among the other backend's, so both count it as the rest.
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert divergence(reference, named(t1=0.25, t3=0.25)) == pytest.approx(expected)


# --- the requests ---


def generated(seed: int = 1, samples: int = 3) -> list[Asked]:
    return check_requests.generate(
        48, prefix=400, tokens=60, samples=samples, chunk=256, vocab_size=2000, seed=seed
    )


def test_generated_requests_share_split_and_outgrow() -> None:
    asked = generated()
    assert asked == generated()
    assert asked != generated(seed=2)
    greedy = [each for each in asked if not each.samples]
    assert len(greedy) == 48
    assert [each.samples for each in asked if each.samples] == [3] * 12
    assert all(not each.samples for each in generated(samples=0))
    assert {token for each in asked for token in each.prompt} <= set(range(256, 2000 - 256))
    assert len({each.tokens for each in greedy}) > 10  # they leave one by one
    assert max(len(each.prompt) for each in greedy) > 2 * 256  # cut into chunks

    def common(left: Asked, right: Asked) -> int:
        pairs = zip(left.prompt, right.prompt, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(left.prompt))

    depths = {common(each, other) for i, each in enumerate(greedy) for other in greedy[:i]}
    assert len(depths) > 12  # levels of sharing, and nodes that are split
    assert 0 in depths
    prompts = [tuple(each.prompt) for each in greedy]
    assert len(set(prompts)) < len(prompts)
    pool = check_requests.pool_tokens(asked, 24)
    assert max(len(each.prompt) + each.tokens for each in asked) < pool
    assert pool < sum(len(each.prompt) + each.tokens for each in greedy[:24])


def test_answers_are_asked_for_with_the_models_own_probabilities() -> None:
    greedy, sampled = Asked([5], 9).body(), Asked([5], 9, 4).body()
    assert greedy["sampling_params"]["temperature"] == 0
    assert (
        sampled["sampling_params"] | {"temperature": 1.0, "top_p": 1.0, "n": 4}
        == (sampled["sampling_params"])
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2: not JSON"),
        ("[1]", 'line 2: \'[1]\'; allowed: {"prompt": TEXT} or {"input_ids": [TOKEN, ...]} with'),
        ('{"input_ids": []}', "[]}'; allowed"),
        ('{"input_ids": [1, 99]}', "tokens from 0 to 98"),
        ('{"input_ids": [true]}', "[true]}'; allowed"),
        ('{"input_ids": [1, 2, 3, 4, 5, 6]}', "line 2: 6 tokens; allowed: at most 5"),
        ('{"prompt": "text"}', "tokenizer.json: there is no such file; allowed without it: lines "),
    ],
)
def test_wrong_prompts(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"input_ids": [1, 2]}\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        check_requests.read_prompts(file, tmp_path, vocab_size=99, most=5)
    file.write_text('\ufeff{"input_ids": [1, 2]}\n\n{"input_ids": [3], "note": "\u2028"}\n')
    assert check_requests.read_prompts(file, tmp_path, vocab_size=99, most=5) == [[1, 2], [3]]
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="prompts: no text in UTF-8"):
        check_requests.read_prompts(file, tmp_path, vocab_size=99, most=5)


# --- the command ---


class FakeServer:
    """A model whose logits are a hash of the tokens before, with noise in decode steps."""

    def __init__(self, backend: str) -> None:
        self.backend, self.noise = backend, 0.02
        self.routes: dict[str, Any] = {"pat_layers": 4}
        self.plans = 5
        self.is_broken = False  # its log-probabilities are NaN

    def info(self) -> dict[str, Any]:
        return {"attention_backend": self.backend, "dtype": "auto", "pat": self.routes}

    def flush(self) -> None:
        pass

    def stats(self) -> dict[str, Any]:
        counted = {"kv_tokens_planned": 10, "kv_tokens_query_centric": 30, "plans_reused": 2}
        return {"plans_built": self.plans, **counted}

    def top(self, before: list[int]) -> list[tuple[float, int, None]]:
        return self._top(tuple(before[-9:]))

    @staticmethod
    @functools.cache
    def _top(before: tuple[int, ...]) -> list[tuple[float, int, None]]:
        chooser = random.Random(hash(before))
        return [(logprob, chooser.randrange(300, 600), None) for logprob in (-0.1, -2.5, -4.0)]

    def answer(self, prompt: list[int], sampling: Any, **more: Any) -> Any:
        rng = random.Random(repr((prompt, sampling)))
        tokens = list(prompt)
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if "logprob_start_len" in more:
            begin = more["logprob_start_len"] + 1
            best = [self.top(tokens[:end]) for end in range(begin, len(tokens))]
            meta["input_token_logprobs"] = [(None, 0, None)] + [
                (of[0][0], token, None) for of, token in zip(best, tokens[begin:], strict=True)
            ]
            return {"meta_info": meta | {"input_top_logprobs": [None, *best]}}
        best = []
        for _ in range(sampling["max_new_tokens"]):
            off = rng.gauss(0, self.noise)
            best.append(
                [
                    (None if self.is_broken else logprob + off, *rest)
                    for logprob, *rest in self.top(tokens)
                ]
            )
            tokens.append(best[-1][0][1])
        meta["output_top_logprobs"] = best
        meta["output_token_logprobs"] = [of[0] for of in best]
        answer = {"output_ids": tokens[len(prompt) :], "meta_info": meta}
        return [answer] * sampling["n"] if "n" in sampling else answer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "max_position_embeddings": 9000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> dict[str | None, FakeServer]:
    """Replace real servers, by backend; None is SGLang's default. Each starts only once."""
    fakes: dict[str | None, FakeServer] = {
        name: FakeServer(name or "fa3") for name in ("pat", None, "triton")
    }

    @contextlib.contextmanager
    def running_server(of: Any, path: Path, folder: Path, **arguments: Any) -> Iterator[FakeServer]:
        assert arguments["flags"] == []
        assert arguments["max_total_tokens"] > 1000
        if of.backend not in fakes:
            raise RuntimeError("the server ended")
        yield fakes[of.backend]

    monkeypatch.setattr(server, "running_server", running_server)
    monkeypatch.setattr(server_options, "find_gpus", lambda: [Gpu("H100", (9, 0), "1")])
    monkeypatch.setattr(server_options, "attention_backends", lambda: {"fa3", "triton"})
    monkeypatch.setattr(server_options, "launch_flags", frozenset)
    monkeypatch.setattr(server_options.importlib.util, "find_spec", lambda _: object())
    return fakes


def test_the_status_says_whether_pat_is_as_close(
    model: Path, tmp_path: Path, servers: dict[str | None, FakeServer], cli: Any
) -> None:
    out = tmp_path / "out.json"
    command = ["check", "--model", model, "--tokens", "40", "--json", out]
    status, said, _ = cli(*command)
    assert status == 0
    assert "3.00 times fewer KV tokens" in said
    assert said.splitlines()[-1].startswith("pat is as close to this model as fa3 (SGLang's ")
    result = json.loads(out.read_text())
    assert result["is_close"]
    assert result["verdict"] == said.splitlines()[-1]
    assert result["meta"]["dtype"] == "bfloat16"
    assert (result["meta"]["against"], result["meta"]["reference"]) == (
        *("fa3 (SGLang's default)", "triton"),
    )
    assert result["tokens"]["pat"] > 1000
    assert [each["name"] for each in result["measures"]] == [
        *("mean distance", "p99 distance", "mean KL", "worst answer", "worst token")
    ]

    servers["pat"].noise = 0.04
    told = cli(*command)
    assert told.status == 1
    assert "pat is not as close" in told.out.splitlines()[-1]
    assert not json.loads(out.read_text())["is_close"]


def test_log_probabilities_that_are_no_numbers(
    model: Path, tmp_path: Path, servers: dict[str | None, FakeServer], cli: Any
) -> None:
    command = ["check", "--model", model, "--tokens", "8"]
    servers["pat"].is_broken = True
    told = cli(*command, "--json", tmp_path / "out.json")
    assert told.status == 1
    assert "mean distance 1e+06" in told.out.splitlines()[-1]
    text = (tmp_path / "out.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    servers[None].is_broken = True
    told = cli(*command)
    assert told.status == 2
    assert "the other backend gives log-probabilities that are no" in told.err


def test_a_backend_scores_its_own_answers_where_no_third_one_serves(
    model: Path, tmp_path: Path, servers: dict[str | None, FakeServer], cli: Any
) -> None:
    out = tmp_path / "out.json"
    command = ["check", "--model", model, "--tokens", "40", "--json", out]
    servers["pat"].noise = 0.032
    assert cli(*command).status == 1
    assert cli(*command, "--reference", "fa3").status == 0
    del servers["triton"]
    told = cli(*command)
    assert told.status == 0
    assert "triton does not serve this model; fa3 scores its own" in told.out
    assert json.loads(out.read_text())["meta"]["reference"] == "fa3"
    told = cli(*command, "--reference", "triton")
    assert told.status == 2
    assert "the server ended" in told.err
    servers["pat"].noise = 0.05
    assert cli(*command).status == 1


def test_a_model_that_pat_does_not_decode_is_not_judged(
    model: Path, servers: dict[str | None, FakeServer], cli: Any
) -> None:
    servers["pat"].plans = 0
    told = cli("check", "--model", model, "--tokens", 8)._replace(out="")
    told.check_refusal("sglang-pat check: pat has decoded no step of this model")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "/nowhere"], "--model '/nowhere': no config.json there; allowed: the folder"),
        (["--reference", "pat"], "--reference pat; allowed: another backend of SGLang, or"),
        (["--reference", "nosuch"], "--reference 'nosuch'; allowed: default, fa3, triton"),
        (["--tokens", "4096"], "--tokens 4096: the context of 5000 tokens leaves 903 for prompts"),
        (["--json", "{folder}/config.json"], "would overwrite the input"),
        (["--prompts", "{folder}/prompts"], "prompts: 1 different prompts; allowed: at least 8"),
        ([], "no NVIDIA GPU that the driver reports"),
    ],
)
def test_wrong_input_is_one_line(
    flags: list[str],
    message: str,
    model: Path,
    servers: dict[str | None, FakeServer],
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_options, "find_gpus", list)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 5000}
    (model / "config.json").write_text(json.dumps(config))
    (model / "prompts").write_text('{"input_ids": [4]}\n{"input_ids": [4]}\n')
    flags = [flag.format(folder=model) for flag in flags]
    given = [] if "--model" in flags else ["--model", model]
    cli("check", *given, *flags).check_refusal(message)
