"""Few-shot evaluation: the same solved examples before each question.

    python examples/few_shot.py [--url URL] [--questions N] [--shots N]

All questions share the KV of the examples. Send them together: what decodes at the same time is
read once per step. Start the server as README or the guide says, with and without pat.
"""

import argparse
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import APIError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--shots", type=int, default=40)
    args = parser.parse_args()
    if min(args.questions, args.shots) < 1:
        parser.error(f"--questions {args.questions} --shots {args.shots}; allowed: at least 1 each")
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    source = random.Random(1)
    numbers = [
        (source.randrange(100), source.randrange(100)) for _ in range(args.shots + args.questions)
    ]
    problems = [(f"Q: {a} + {b} = ?\nA:", str(a + b)) for a, b in numbers]
    examples = "".join(f"{question} {answer}\n\n" for question, answer in problems[: args.shots])
    asked = problems[args.shots :]

    def is_right(problem: tuple[str, str]) -> bool:
        question, expected = problem
        answer = client.completions.create(
            model=model, prompt=examples + question, max_tokens=16, temperature=0
        )
        words = answer.choices[0].text.split()
        return bool(words) and words[0] == expected

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(asked)) as threads:
        right = sum(threads.map(is_right, asked))
    seconds = time.perf_counter() - begin
    print(f"{len(asked)} questions after {args.shots} examples in {seconds:.1f} s")
    print(f"right: {right} of {len(asked)}")


if __name__ == "__main__":
    try:
        main()
    except APIError as error:  # no server at --url, or one that refuses the job
        sys.exit(f"{error.request.url}: {error}")
