"""SGLang's own test of deterministic inference, on a server without a tokenizer.

Its prompts are sent as bytes, a token each. An answer's text is its tokens; with log-probabilities
those belong to it, so that one other bit makes another answer.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import requests
from sglang.test import test_deterministic as sglang_test

from common.tiny_model import NUM_SPECIAL_TOKENS

# Mode -> how many prompts it has.
MODES = {"single": 1, "prefix": 4, "mixed": 3}
_MOST_LONG = 10  # prompts of a mixed batch
_LONG_TOKENS = 6000  # of the test's long text: what the served models have room for
_FLUSH_SECONDS = 30


def different_answers(
    url: str, mode: str, *, trials: int, new_tokens: int, logprobs: bool
) -> list[int]:
    """For each prompt of a mode, how many different answers it had: 1, if all is well.

    Parameters
    ----------
    url
        Of the server.
    mode
        single: one prompt, in batches of itself. prefix: four beginnings of a long text. mixed: two
        short prompts and a long one, as SGLang's test had it until it gave the mode up.
    trials
        Batches, each one request larger than the one before.
    new_tokens
        Of an answer.
    logprobs
        Whether equal answers must have equal log-probabilities.

    Raises
    ------
    RuntimeError
        The server refuses something.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    arguments = sglang_test.BenchArgs(
        host=host,
        port=int(port),
        test_mode=mode,
        n_start=4,  # a batch of fewer may lack one of the four prompts
        n_trials=trials,
        max_new_tokens=new_tokens,
    )
    with _posting(logprobs), contextlib.redirect_stdout(io.StringIO()):
        if mode == "mixed":
            return _mixed(arguments)
        found: list[int] = sglang_test.test_deterministic(arguments)
    return found


def _mixed(arguments: Any) -> list[int]:
    prompts = (
        sglang_test.PROMPT_1,
        sglang_test.PROMPT_2,
        sglang_test.LONG_PROMPT[:_LONG_TOKENS],
    )
    answers: list[set[str]] = [set() for _ in prompts]
    source = random.Random(0)
    for batch in range(arguments.n_start, arguments.n_start + arguments.n_trials):
        long = source.randint(1, min(_MOST_LONG, batch - 2))
        first = source.randint(1, batch - long - 1)
        order = [0] * first + [1] * (batch - long - first) + [2] * long
        found = sglang_test.send_single(
            arguments,
            prompt=[prompts[index] for index in order],
            return_full_response=True,
            pick_first_result=False,
        )
        for index, answer in zip(order, found, strict=True):
            answers[index].add(answer["text"])
    return [len(each) for each in answers]


@contextlib.contextmanager
def _posting(logprobs: bool) -> Iterator[None]:
    """SGLang's test sends its requests by `_post` while the block runs."""

    def post(url: str, json: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return _post(url, dict(json or {}), logprobs, **kwargs)

    with mock.patch.object(sglang_test, "requests", SimpleNamespace(post=post)):
        yield


def _post(url: str, body: dict[str, Any], logprobs: bool, **kwargs: Any) -> Any:
    """requests.post, with tokens for texts."""
    if not url.endswith("/generate"):
        return _flush(lambda: requests.post(url, json=body, timeout=_FLUSH_SECONDS))
    body["input_ids"] = [_tokens(each) for each in body.pop("text")]
    body["sampling_params"]["ignore_eos"] = True
    if logprobs:
        body["return_logprob"] = True
    response = requests.post(url, json=body, **{"timeout": 300} | kwargs)
    if not response.ok:
        raise RuntimeError(f"{url}: {response.status_code} {response.text}")
    answers = [each | {"text": _text(each, logprobs)} for each in response.json()]
    return SimpleNamespace(status_code=200, json=lambda: answers)


def _flush(post: Callable[[], requests.Response]) -> requests.Response:
    """The server refuses while it still deals with the last step."""
    end = time.monotonic() + _FLUSH_SECONDS
    while not (response := post()).ok:
        if time.monotonic() > end:
            raise RuntimeError(f"{response.url}: {response.status_code} {response.text}")
        time.sleep(0.01)
    return response


def _tokens(text: str) -> list[int]:
    return [NUM_SPECIAL_TOKENS + byte for byte in text.encode()]


def _text(answer: dict[str, Any], logprobs: bool) -> str:
    if not logprobs:
        return str(answer["output_ids"])
    pairs = [each[:2] for each in answer["meta_info"]["output_token_logprobs"]]
    if [token for _, token in pairs] != answer["output_ids"]:
        raise RuntimeError("the log-probabilities are not those of the answer")
    return repr(pairs)
