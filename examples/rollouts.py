"""Roll-outs: several samples of each prompt, as a trainer draws them.

    python examples/rollouts.py [--url URL] [--prompts N] [--samples N] [--tokens N]

Samples of one prompt share its KV. Ask for them in one request with `n`, so that they decode
together on one server. Start the server as README or the guide says, with and without pat.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import APIError, OpenAI

RULES = "You solve problems of arithmetic. Think step by step. End with the number alone.\n" * 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    if min(args.prompts, args.samples, args.tokens) < 1:
        given = f"--prompts {args.prompts} --samples {args.samples} --tokens {args.tokens}"
        parser.error(f"{given}; allowed: at least 1 each")
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def samples_of(prompt: str) -> list[tuple[str, float]]:
        """Return each sample and the log-probability of its tokens, which a trainer needs."""
        answer = client.completions.create(
            model=model,
            prompt=prompt,
            n=args.samples,
            max_tokens=args.tokens,
            temperature=1.0,
            logprobs=1,
        )
        return [(each.text, sum(each.logprobs.token_logprobs)) for each in answer.choices]

    prompts = [f"{RULES}What is {17 * i + 23} + {29 * i + 5}?\n" for i in range(args.prompts)]
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        groups = list(threads.map(samples_of, prompts))
    seconds = time.perf_counter() - begin
    count = sum(map(len, groups))
    mean = sum(logprob for group in groups for _, logprob in group) / count
    print(f"{count} samples of {len(groups)} prompts in {seconds:.1f} s")
    print(f"mean log-probability of a sample: {mean:.1f}; the first one:\n{groups[0][0][0]}")


if __name__ == "__main__":
    try:
        main()
    except APIError as error:  # no server at --url, or one that refuses the job
        sys.exit(f"{error.request.url}: {error}")
