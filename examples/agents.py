"""Agents: one long system prompt, several conversations that grow turn by turn.

    python examples/agents.py [--url URL] [--agents N] [--turns N]

All agents share the KV of the system prompt, and each turn shares that of the turns before it.
Agents join and leave while others decode. Start the server as README or the guide says, with and
without pat.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from openai import APIError, OpenAI

TOOLS = "".join(
    f"Tool {name}: call it as {name}(path). It returns the {what} of a file.\n"
    for name, what in (("read", "text"), ("size", "bytes"), ("owner", "user"), ("lint", "errors"))
)
SYSTEM = "You repair programs. Call one tool in each turn and wait for its result.\n" + 8 * TOOLS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    if min(args.agents, args.turns) < 1:
        parser.error(f"--agents {args.agents} --turns {args.turns}; allowed: at least 1 each")
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none")
    model = client.models.list().data[0].id

    def work(agent: int) -> str:
        """Return what one agent says at the end."""
        messages = [{"role": "system", "content": SYSTEM}]
        for turn in range(args.turns):
            result = f"module_{agent}.py, line {10 * turn + agent}: undefined name"
            messages.append({"role": "user", "content": result})
            answer = client.chat.completions.create(
                model=model, messages=messages, max_tokens=24 + 8 * (agent % 3), temperature=0
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return messages[-1]["content"]

    begin = time.perf_counter()
    with ThreadPoolExecutor(args.agents) as threads:
        said = list(threads.map(work, range(args.agents)))
    seconds = time.perf_counter() - begin
    print(f"{args.agents} agents, {args.turns} turns each, in {seconds:.1f} s")
    print(f"the first one says at the end:\n{said[0]}")


if __name__ == "__main__":
    try:
        main()
    except APIError as error:  # no server at --url, or one that refuses the job
        sys.exit(f"{error.request.url}: {error}")
