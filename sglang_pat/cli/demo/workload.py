"""The demo's workload: requests that share a three-level prefix tree, and join and leave over time.

The texts are docstrings of sglang-pat, which the model can continue. The workload depends only on
the version of sglang-pat, the number of requests and `SEED`, so both runs serve the same requests.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from sglang_pat.cli.tiny_model import TRAINED

SEED = 7
NUM_SYSTEM_PROMPTS = 2
DOCUMENTS_PER_SYSTEM_PROMPT = 3
# With these lengths, a prompt and its answer are shorter than a training text (1,024 tokens).
SYSTEM_PROMPT_TOKENS = (400, 512)
DOCUMENT_TOKENS = (256, 384)
NEW_TOKENS = (16, 64)
MEAN_GAP_S = 0.05
BEGIN, END = "<s>", "</s>"  # mark where a docstring begins and ends

_PACKAGE = Path(__file__).resolve().parents[2]
_LEAST_CHARACTERS = 200  # shorter docstrings are not used
# A user's text is the first sentence of a docstring, made of these words. The model continues it.
_RESULTS = (
    "mean",
    "median",
    "sum",
    "largest value",
    "variance",
    "rank",
    "number of elements",
    "norm",
)
_OPERANDS = ("an array", "a matrix", "a tensor", "a graph", "a sparse matrix", "a tree")
_PLACES = ("along an axis", "over a window", "for each row", "in place", "without copying it")


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A request: prompt, number of tokens to generate, and arrival in seconds from the start.

    question: the end of the prompt, as text.
    """

    prompt: list[int]
    num_new_tokens: int
    arrival_s: float
    question: str


class Words:
    """Converts texts to tokens, and tokens to texts. model: the folder of the model."""

    def __init__(self, model: Path = TRAINED) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def answer(self, tokens: list[int]) -> str:
        """Return the text of an answer, up to the end of its docstring."""
        end = self._tokenizer.token_to_id(END)
        text: str = self._tokenizer.decode(tokens[: (*tokens, end).index(end)])
        return text


def docstrings() -> Iterator[str]:
    """Yield the docstrings of sglang-pat in a fixed order."""
    for file in sorted(_PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if len(text) >= _LEAST_CHARACTERS:
                    yield text


def make_requests(num_requests: int, model: Path = TRAINED) -> list[DemoRequest]:
    """Return requests of system prompt + document + user's own text, in order of arrival."""
    rng, words, texts = random.Random(SEED), Words(model), [*docstrings()]

    def text(length_range: tuple[int, int]) -> list[int]:
        length, found = rng.randint(*length_range), list[int]()
        while len(found) < length:
            found += words.tokens(f"{BEGIN}{rng.choice(texts)}{END}")
        return found[:length]

    contexts = [
        system_prompt + text(DOCUMENT_TOKENS)
        for system_prompt in (text(SYSTEM_PROMPT_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS))
        for _ in range(DOCUMENTS_PER_SYSTEM_PROMPT)
    ]
    requests, now = [], 0.0
    for _ in range(num_requests):
        result, operand, place = map(rng.choice, (_RESULTS, _OPERANDS, _PLACES))
        question = f"Return the {result} of {operand} {place}."
        prompt = rng.choice(contexts) + words.tokens(f"{END}{BEGIN}{question}")
        requests.append(DemoRequest(prompt, rng.randint(*NEW_TOKENS), now, question))
        now += rng.expovariate(1 / MEAN_GAP_S)
    return requests
