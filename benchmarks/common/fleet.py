"""Starts servers that share a GPU. One at a time works while the others sleep.

A server takes half a minute or more to start, mostly on the CPU. So as many of the compared servers
as fit into the memory start at once. If one fails, the others go on.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from common.models import MODELS, TINY
from common.terminal import console, show_failure
from sglang_pat.bench.cases import Case
from sglang_pat.bench.decoding import DecodeRun, ask_again_if_held_up, decode_run, held_up_ms, tpot
from sglang_pat.bench.server import Server, Start, running_servers, sampling_of

# Arguments of servers that share a GPU.
SHARED_GPU = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,  # limits the memory of each server
    "mem_fraction_static": 0.95,  # of free memory; max_total_tokens limits the pool
    "cuda_graph_backend_prefill": "disabled",
    "skip_tokenizer_init": True,
    "sleep_on_idle": True,  # does not disturb the measured server
    "enable_cache_report": True,
}
# Arguments for a CPU, to test that a suite works.
ON_CPU = MODELS[TINY].arguments | {"skip_tokenizer_init": True}
TAIL_LINES = 30  # of a failed server's log
MOST_AT_ONCE = 8  # servers that start together, each on a core or more
_POLL_SECONDS = 0.3
_ERROR = re.compile(r"(?:\[.*?\] )?([\w.]*(?:Error|Exception|Refused\w*): .*)")
_IGNORED = "Ignore import error"  # SGLang logs modules that it can do without
_OF_ANOTHER = "died during initialization"  # message of a process about another, failed rank

Prompts = Sequence[Sequence[int]]
Name = TypeVar("Name", bound=Hashable)


class Member:
    """A server. start_seconds: time until it was ready. failure: why it is no longer used."""

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.server = server
        self.start_seconds: float | None = None
        self.failure: str | None = None

    def fail(self, why: str) -> None:
        """Mark the server as failed, with the first error in its log, or the log's end."""
        if self.failure is not None:
            return
        lines = self.server.process.log.read_text(errors="replace").splitlines()
        end, self.failure = len(lines), why
        errors = [
            (number, found[1])
            for number, line in enumerate(lines)
            if (found := _ERROR.fullmatch(line)) and _OF_ANOTHER not in line
        ]
        if errors:
            # After an ignored error, the one that ended the server is the last.
            number, error = errors[-1 if any(_IGNORED in line for line in lines) else 0]
            end, self.failure = number + 1, f"{why}: {error[:300]}"
        show_failure(f"{self.name}: {self.failure}")
        shown = (line[:400] for line in lines[max(0, end - TAIL_LINES) : end])
        print("--- log", *shown, "---", sep="\n", flush=True)

    def look(self, begun: float) -> None:
        """Check whether the server is ready or has failed."""
        try:
            if self.server.process.is_ready():
                self.start_seconds = time.monotonic() - begun
        except RuntimeError:
            self.fail("ended while it started")

    def about(self) -> dict[str, Any]:
        """Return the server's backends, and which layers pat decodes."""
        info = self.server.info()
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        chosen = {
            name: info.get(name)
            for name in (*names, "page_size", "max_total_num_tokens", "kv_cache_dtype")
        }
        found = chosen | {name: value for name, value in info.items() if name.startswith("pat")}
        return found | {"start_seconds": self.start_seconds}


def groups_that_fit(needs: Mapping[Name, tuple[int, float]], memory: float) -> list[list[Name]]:
    """Divide measurements into groups whose servers start together.

    needs: number of servers and their GPU memory, by name, in the order of measurement. memory:
    free GPU memory, in the same unit. A name that does not fit gets its own group.
    """
    groups: list[list[Name]] = []
    for name, (count, need) in needs.items():
        last = [needs[each] for each in groups[-1]] if groups else []
        servers = sum(servers for servers, _ in last) + count
        if last and servers <= MOST_AT_ONCE and sum(used for _, used in last) + need <= memory:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


@contextlib.contextmanager
def fleet(starts: Mapping[str, Start], folder: Path) -> Iterator[dict[str, Member]]:
    """Start servers and run them until the block ends. folder: for logs and pat's counters."""
    with running_servers(starts, folder, wait=False) as servers:
        yield {name: Member(name, server) for name, server in servers.items()}


def wait(members: Iterable[Member], seconds: float) -> None:
    """Wait until each server is ready or has failed. A server that takes longer has failed."""
    begun = time.monotonic()
    waiting = list(members)
    while waiting and time.monotonic() - begun < seconds:
        for member in waiting:
            member.look(begun)
        waiting = [each for each in waiting if each.start_seconds is None and not each.failure]
        time.sleep(_POLL_SECONDS)
    for member in waiting:
        member.fail(f"not ready after {seconds:.0f} s")


@contextlib.contextmanager
def watched(members: Sequence[Member], what: str) -> Iterator[list[str]]:
    """Print an error of the block, and yield a list that gets failures of dead members.

    If all members still answer, only the block's work is lost.
    """
    failures: list[str] = []
    try:
        yield failures
    except Exception as error:
        message = f"{what}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        failures.append(message)
        show_failure(message)
        for member in members:
            with contextlib.suppress(RuntimeError):
                if member.server.process.is_ready():
                    continue
            member.fail(message)


def fill_all(
    members: Sequence[Member], prompts: Prompts, *before: Prompts, in_turn: bool = False
) -> dict[str, float]:
    """Empty all caches, fill them with the prompts, and compile what first use compiles.

    before: prompts that are sent first, one after the other, so that `prompts` find their KV.
    in_turn: whether a server begins after the last one has ended. Servers on the same GPUs take
    turns on each GPU alone, so that a collective waits until its server has its turn on all GPUs.
    Returns the seconds that each server took, by name.
    """
    with ThreadPoolExecutor(1 if in_turn else MOST_AT_ONCE) as pool:
        seconds = pool.map(lambda member: _fill(member, prompts, before), members)
        return {member.name: took for member, took in zip(members, seconds, strict=True)}


def _fill(member: Member, prompts: Prompts, before: Sequence[Prompts]) -> float:
    begun = time.monotonic()
    took = 0.0
    with watched([member], f"{member.name}, filling the cache"):
        member.server.flush()
        for asked in filter(None, (*before, prompts)):
            member.server.generate(asked, sampling_of(4 if asked is prompts else 1))
            took = time.monotonic() - begun
            # If a server hangs, the last line names the other one, or the prompts before.
            console.print(f"{member.name}: {len(asked)} prompts prefilled after {took:.1f} s")
    return took


def heads_of(case: Case, prompts: Prompts) -> list[Sequence[int]]:
    """Return the distinct prefixes of a case."""
    if not case.prefix:
        return []
    return [prompt[: case.prefix] for prompt in prompts[:: case.batch // case.groups]]


def ask_in_turn(
    members: Sequence[Member], prompts: Prompts, num_tokens: int, rounds: int
) -> dict[str, list[DecodeRun]]:
    """Return the passes of each server, by name. Each server runs once in every round."""
    runs: dict[str, list[DecodeRun]] = {member.name: [] for member in members}
    for _ in range(rounds):
        for member in members:
            runs[member.name].append(decode_run(member.server, prompts, num_tokens))
    for member in members:
        ask = partial(decode_run, member.server, prompts, num_tokens)
        ask_again_if_held_up(runs[member.name], ask, partial(console.print, f"{member.name}:"))
    return runs


def times_of(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Return times per token and their data, by name, for a result."""
    spreads = {name: tpot(passes) for name, passes in runs.items()}
    return {
        "tpot_ms": {name: spread.median for name, spread in spreads.items()},
        "tpot_spread_ms": {name: spread.as_dict() for name, spread in spreads.items()},
        "rounds_ms": {name: [run.tpot_ms for run in passes] for name, passes in runs.items()},
        "first_ms": {name: [run.first_ms for run in passes] for name, passes in runs.items()},
        "held_up_ms": {name: held_up_ms(passes) for name, passes in runs.items()},
        "share_of_prompts_cached": {
            name: min(run.cached for run in passes) for name, passes in runs.items()
        },
    }


def report_starts(members: Iterable[Member]) -> None:
    times = [
        f"{member.name} {'failed' if took is None else f'{took:.0f} s'}"
        for member in members
        for took in [member.start_seconds]
    ]
    console.print(f"ready after: {', '.join(times)}")
