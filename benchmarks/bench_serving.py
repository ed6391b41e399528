"""Time per output token in SGLang's engine with decode CUDA graphs: pat against SGLang's backends.

    python benchmarks/bench_serving.py [--backends pat fa3] [--json FILE]

A Llama-3-8B shape with random weights, written on the spot; one engine after another, each in a
process of its own. A case is a batch of requests that start together: shared prefix, private
tokens, generated tokens. All prompts are in the radix tree before the clock starts, so that what is
timed is decoding: the time for all tokens less the time for the first, per token. Answers are
compared token by token with those of the first backend that is not pat.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from metadata import gpu_state, metadata
from rich.console import Console
from rich.table import Table

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
REPEATS = 2


class Case(NamedTuple):
    """All in tokens, but for the number of requests."""

    requests: int
    shared: int
    private: int
    generated: int

    def prompts(self) -> list[list[int]]:
        source = random.Random(0)

        def tokens(count: int) -> list[int]:
            return [source.randrange(LLAMA_3_8B["vocab_size"] - 256) for _ in range(count)]

        prefix = tokens(self.shared)
        return [prefix + tokens(self.private) for _ in range(self.requests)]


CASES = (
    Case(64, 2048, 128, 128),
    Case(128, 8192, 256, 128),
    Case(128, 0, 1024, 128),
    Case(256, 1024, 64, 128),
)


def serve_all(backend: str) -> list[dict[str, Any]]:
    """Every case through one engine: time per output token in ms, and the answers."""
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_3_8B))
        engine = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend=backend,
            dtype="bfloat16",
            context_length=16384,
            max_running_requests=max(case.requests for case in CASES),
            cuda_graph_backend_prefill="disabled",
            mem_fraction_static=0.85,
            random_seed=1,
            log_level="warning",
        )
        try:
            return [serve(engine, case) for case in CASES]
        finally:
            engine.shutdown()


def serve(engine: Any, case: Case) -> dict[str, Any]:
    engine.flush_cache()
    prompts = case.prompts()

    def seconds(num_tokens: int) -> tuple[float, list[list[int]]]:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        begin = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - begin, [answer["output_ids"] for answer in answers]

    if case.shared:  # first alone, so that the prompts find it in the tree
        engine.generate(
            input_ids=prompts[0][: case.shared],
            sampling_params={"temperature": 0, "max_new_tokens": 1},
        )
    seconds(4)
    first = min(seconds(1)[0] for _ in range(REPEATS))
    runs = [seconds(case.generated) for _ in range(REPEATS)]
    per_token = (min(run[0] for run in runs) - first) / (case.generated - 1)
    return {"ms_per_token": 1000 * per_token, "tokens": runs[0][1]}


def compare(results: dict[str, list[dict[str, Any]]]) -> None:
    """Replace the answers by the share of tokens that equal those of the first other backend."""
    own = next((name for name in results if name != "pat"), None)
    for index in range(len(CASES)):
        answers = {name: cases[index].pop("tokens") for name, cases in results.items()}
        if own is not None and "pat" in results:
            pairs = [
                token == expected
                for left, right in zip(answers["pat"], answers[own], strict=True)
                for token, expected in zip(left, right, strict=True)
            ]
            results["pat"][index]["tokens_identical"] = sum(pairs) / len(pairs)


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title="ms per output token")
    for column in ("requests", "shared", "private", *results, "best other / pat", "identical"):
        table.add_column(column, justify="right")
    for index, case in enumerate(CASES):
        times = {name: cases[index]["ms_per_token"] for name, cases in results.items()}
        others = [ms for name, ms in times.items() if name != "pat"]
        ratio = f"{min(others) / times['pat']:.2f}" if others and "pat" in times else ""
        identical = results.get("pat", [{}] * len(CASES))[index].get("tokens_identical")
        table.add_row(
            *(f"{n:,}" for n in case[:3]),
            *(f"{ms:.2f}" for ms in times.values()),
            ratio,
            "" if identical is None else f"{identical:.2%}",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["pat", "fa3"], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE")
    parser.add_argument("--serve", nargs=2, metavar=("BACKEND", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        backend, file = args.serve
        Path(file).write_text(json.dumps(serve_all(backend)))
        return
    before = gpu_state()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in args.backends:
            file = Path(folder, f"{backend}.json")
            command = [sys.executable, __file__, "--serve", backend, str(file)]
            subprocess.run(command, check=True)
            results[backend] = json.loads(file.read_text())
    compare(results)
    show(results)
    if args.json:
        meta = metadata() | {"gpu_before": before, "gpu_after": gpu_state(), "model": LLAMA_3_8B}
        cases = [
            case._asdict() | {name: cases[index] for name, cases in results.items()}
            for index, case in enumerate(CASES)
        ]
        args.json.write_text(json.dumps({"meta": meta, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
