"""Servers that start at once and share a GPU: one at a time is asked while the others sleep.

A server takes half a minute or more to start, most of it on the CPU; so all that are to be compared
start at once, as far as the memory goes. One that fails leaves the others as they are.
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

# Arguments of a server that is not alone on its GPU.
SHARED_GPU = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "chunked_prefill_size": 2048,  # the memory that it takes is not to be had several times
    "mem_fraction_static": 0.95,  # of what is free; max_total_tokens is the limit
    "cuda_graph_backend_prefill": "disabled",
    "skip_tokenizer_init": True,
    "sleep_on_idle": True,  # another server is being measured
    "enable_cache_report": True,
}
# The same on a CPU, to see that a suite works.
ON_CPU = MODELS[TINY].arguments | {"skip_tokenizer_init": True}
TAIL_LINES = 30  # of the log of a server that failed
MOST_AT_ONCE = 8  # servers that start together: each takes a core and more
_POLL_SECONDS = 0.3
_ERROR = re.compile(r"(?:\[.*?\] )?([\w.]*(?:Error|Exception|Refused\w*): .*)")
_OF_ANOTHER = "died during initialization"  # what a process says of a rank that failed

Prompts = Sequence[Sequence[int]]
Name = TypeVar("Name", bound=Hashable)


class Member:
    """A server. start_seconds: until it was ready, if it is. failure: why it is asked no more."""

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.server = server
        self.start_seconds: float | None = None
        self.failure: str | None = None

    def fail(self, why: str) -> None:
        """With the first error of its log, and the lines before it; without one, the log's end."""
        if self.failure is not None:
            return
        lines = self.server.process.log.read_text(errors="replace").splitlines()
        end, self.failure = len(lines), why
        for number, line in enumerate(lines):
            if (error := _ERROR.fullmatch(line)) and _OF_ANOTHER not in line:
                end, self.failure = number + 1, f"{why}: {error[1][:300]}"
                break
        show_failure(f"{self.name}: {self.failure}")
        shown = (line[:400] for line in lines[max(0, end - TAIL_LINES) : end])
        print("--- log", *shown, "---", sep="\n", flush=True)

    def look(self, begun: float) -> None:
        """See if it is ready by now."""
        try:
            if self.server.process.is_ready():
                self.start_seconds = time.monotonic() - begun
        except RuntimeError:
            self.fail("ended while it started")

    def about(self) -> dict[str, Any]:
        """The backends that were chosen, and which layers pat decodes."""
        info = self.server.info()
        names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
        chosen = {
            name: info.get(name)
            for name in (*names, "page_size", "max_total_num_tokens", "kv_cache_dtype")
        }
        found = chosen | {name: value for name, value in info.items() if name.startswith("pat")}
        return found | {"start_seconds": self.start_seconds}


def groups_that_fit(needs: Mapping[Name, tuple[int, float]], memory: float) -> list[list[Name]]:
    """Divide what is to be measured into groups whose servers start together.

    needs: servers, and the memory that they take on the GPU, by name, in the order of measurement.
    memory: free on the GPU, in the same unit. A name that fits nowhere has a group of its own.
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
    """Start servers, until the block ends. folder: for logs and pat's counters."""
    with running_servers(starts, folder, wait=False) as servers:
        yield {name: Member(name, server) for name, server in servers.items()}


def wait(members: Iterable[Member], seconds: float) -> None:
    """Until each is ready or has failed; one that takes longer has."""
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
    """Show an error of the block, and yield a list for failures of members that stopped answering.

    If all members answer, only the work of the block is lost.
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


def fill_all(members: Sequence[Member], prompts: Prompts, *before: Prompts) -> None:
    """Empty the caches of all, fill them with the prompts, and compile what first use compiles.

    before: is asked first, one after the other, so that prompts find it.
    """
    if members:
        with ThreadPoolExecutor(len(members)) as pool:
            list(pool.map(lambda member: _fill(member, prompts, before), members))


def _fill(member: Member, prompts: Prompts, before: Sequence[Prompts]) -> None:
    with watched([member], f"{member.name}, filling the cache"):
        member.server.flush()
        for asked in filter(None, before):
            member.server.generate(asked, sampling_of(1))
        member.server.generate(prompts, sampling_of(4))


def heads_of(case: Case, prompts: Prompts) -> list[Sequence[int]]:
    """The prefixes of a case, each once."""
    if not case.prefix:
        return []
    return [prompt[: case.prefix] for prompt in prompts[:: case.batch // case.groups]]


def ask_in_turn(
    members: Sequence[Member], prompts: Prompts, num_tokens: int, rounds: int
) -> dict[str, list[DecodeRun]]:
    """So many passes of each, by name. In every round each is asked once."""
    runs: dict[str, list[DecodeRun]] = {member.name: [] for member in members}
    for _ in range(rounds):
        for member in members:
            runs[member.name].append(decode_run(member.server, prompts, num_tokens))
    for member in members:
        ask = partial(decode_run, member.server, prompts, num_tokens)
        ask_again_if_held_up(runs[member.name], ask, partial(console.print, f"{member.name}:"))
    return runs


def times_of(runs: Mapping[str, Sequence[DecodeRun]]) -> dict[str, Any]:
    """Times per token and what they rest on, by name, for a result."""
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
