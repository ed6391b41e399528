"""Compares log-probabilities of pat, FA3 and a trainer in a reinforcement learning loop.

    python benchmarks/experiments rl [--model FOLDER] [--iterations N] [--keep-memory] [--json FILE]

In every iteration, the servers draw samples of the same prompts, with bfloat16 KV and with scaled
e4m3 KV. They free weights and KV pool. The trainer, in torch, computes the log-probabilities of all
samples with the same weights, and makes a policy-gradient step. The servers allocate memory again,
then get the new weights by `update_weights_from_tensor`, and with e4m3 KV also new scales. The
mismatch is the difference between the trainer's and the server's log-probability of a token.

pat's mean mismatch may not be above that of SGLang's default, FA3. Because either of two equal
backends is above the other in half of all runs, two standard errors of the ratio are allowed, which
are estimated by resampling groups of samples.

A step changes log-probabilities by less than rounding does. So the direction of the change shows
whether a server has the new weights: the trainer computes in float32 how the last step changed each
token, and fits to the mismatch the fraction of that change which the server lacks. In each
iteration, the fraction is 0 with the new weights, and 1 with the old ones.

The model is the tiny trained one of sglang-pat, or another Llama (`--model`). `--keep-memory` is
for machines without `torch_memory_saver`. On a CPU, pat and torch_native are compared in float32
and keep their memory, to test that everything works.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from safetensors.torch import load_file, save_file

from common.counters import difference, read_ratio
from common.fleet import ON_CPU, SHARED_GPU, Member, fleet, report_starts, wait, watched
from common.metadata import metadata
from common.results import at_least, at_most, write
from common.suites import add_option
from common.terminal import console, table_of
from sglang_pat.bench.server import Server, Start, contender, sampling_of
from sglang_pat.cli.arguments import real_number, whole_number
from sglang_pat.cli.demo.workload import make_requests
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import cuda_driver_is_present

ON_GPU = cuda_driver_is_present()
DEVICE, DTYPE = ("cuda", "bfloat16") if ON_GPU else ("cpu", "float32")
PEER = "fa3" if ON_GPU else "torch_native"
CACHES = {"bfloat16": {}, "fp8": {"kv_cache_dtype": "fp8_e4m3"}} if ON_GPU else {"float32": {}}
PROMPTS, SAMPLES, TOKENS = (8, 8, 32) if ON_GPU else (2, 4, 8)  # per iteration; tokens of an answer
POOL_TOKENS = 1 << 17 if ON_GPU else 1 << 13
RUNNING = PROMPTS * SAMPLES
E4M3_MAX, MARGIN = 448.0, 1.5  # rotation may enlarge a number sqrt(2) times
RESAMPLES, STANDARD_ERRORS = 1000, 2.0
OLD_SHARE, READ_RATIO, FREED_SHARE = 0.5, 0.9, 0.9


class Trainer:
    """The model in the servers' dtype, with float32 weights for the optimizer."""

    def __init__(self, folder: Path, rate: float) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        dtype = getattr(torch, DTYPE)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE)
        self._weights = [*self.model.parameters()]
        self._exact = [each.detach().float().clone() for each in self._weights]
        # The current weights, and the weights before the last step.
        self._now, self._before = (copy.deepcopy(self.model).float() for _ in range(2))
        self._optimizer = torch.optim.Adam(self._exact, rate)

    def logprobs(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the log-probabilities `[samples, tokens]` of answers to a prompt."""
        return _logprobs(self.model, prompt, answers)

    def change(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return by how much the last step changed `logprobs`, computed in float32."""
        with torch.no_grad():
            return _logprobs(self._now, prompt, answers) - _logprobs(self._before, prompt, answers)

    def step(self) -> None:
        """Change the weights by the accumulated gradients."""
        for exact, weight in zip(self._exact, self._weights, strict=True):
            exact.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for exact, weight in zip(self._exact, self._weights, strict=True):
                weight.copy_(exact)
            self._now, self._before = self._before, self._now
            for copied, weight in zip(self._now.parameters(), self._weights, strict=True):
                copied.copy_(weight)

    def scales(self, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the scales by which each layer's keys and values fit e4m3."""
        found: dict[str, torch.Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: Any, given: Any, out: torch.Tensor) -> None:
                found[name] = out.detach().abs().max().float() * (MARGIN / E4M3_MAX)

            return hook

        hooks = [
            module.register_forward_hook(note(name.replace(f"{kind}_proj", f"{kind}_scale")))
            for name, module in self.model.named_modules()
            for kind in "kv"
            if name.endswith(f".self_attn.{kind}_proj")
        ]
        with torch.no_grad():
            self.model(torch.tensor([[*prompt]], device=DEVICE), logits_to_keep=1)
        for each in hooks:
            each.remove()
        return found

    def named(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters()}


def _logprobs(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *answer] for answer in answers], device=DEVICE)
    logits = model(tokens, logits_to_keep=len(answers[0]) + 1).logits[:, :-1]
    every = logits.float().log_softmax(-1)
    return every.gather(-1, tokens[:, len(prompt) :, None]).squeeze(-1)


def pickled(tensors: Mapping[str, torch.Tensor]) -> str:
    """Pickle tensors for a process that shares their memory. Keep them until it has read them."""
    return base64.b64encode(bytes(ForkingPickler.dumps([*tensors.items()]))).decode()


def write_scaled(model: Path, folder: Path, scales: Mapping[str, torch.Tensor]) -> Path:
    """Write a copy of a model with KV cache scales in the checkpoint, as in fp8 models."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    linear = [name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")]
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": linear,  # all layers; only KV is fp8
    }
    (folder / "config.json").write_text(json.dumps(config))
    scaled = {name: scale.cpu() for name, scale in scales.items()}
    save_file(weights | scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def starts(model: Path, scaled: Path, *, saves_memory: bool) -> dict[str, Start]:
    """Return the servers, by name: backend and dtype of the KV cache."""
    common = {
        **(SHARED_GPU | {"load_format": "auto"} if ON_GPU else ON_CPU),
        "max_running_requests": RUNNING,
        "max_total_tokens": POOL_TOKENS,
        "context_length": 2048,
        "enable_memory_saver": saves_memory,
    }
    if ON_GPU:
        common["cuda_graph_max_bs_decode"] = RUNNING
    return {
        f"{name} {cache}": Start(
            contender(name),
            scaled if cache == "fp8" else model,
            common | more,
            {"SGLANG_PAT_STRICT": "1"} if name == "pat" else {},
        )
        for cache, more in CACHES.items()
        for name in ("pat", PEER)
    }


@dataclass
class Followed:
    """The results of a server in all iterations.

    distances: mismatches of the tokens, one array per group of samples. old_shares: see
    old_share(), one for each iteration from the second on.
    """

    distances: list[Any] = field(default_factory=list)
    old_shares: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    iterations: int = 0

    def summary(self) -> dict[str, Any]:
        every = np.concatenate(self.distances)
        per = len(self.distances) // self.iterations
        rounds = [np.abs(np.concatenate(self.distances[i : i + per])) for i in self._begins(per)]
        return {
            "iterations": self.iterations,
            "tokens": len(every),
            "mean": float(np.abs(every).mean()),
            "p99": float(np.quantile(np.abs(every), 0.99)),
            "worst": float(np.abs(every).max()),
            "kl": float((np.exp(every) - 1 - every).mean()),  # trainer from server
            "old_share_by_iteration": self.old_shares,
            "mean_by_iteration": [float(each.mean()) for each in rounds],
            "reward_by_iteration": self.rewards,
        }

    def _begins(self, per: int) -> range:
        return range(0, len(self.distances), per)


def ratio_of(pat: Followed, other: Followed) -> tuple[float, float]:
    """Return the ratio of pat's mean mismatch to the other's, and its standard error."""
    sums = [
        np.array([(np.abs(group).sum(), len(group)) for group in each.distances])
        for each in (pat, other)
    ]
    number = len(sums[0])
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(number, np.full(number, 1 / number), RESAMPLES)
    weights = np.vstack([np.ones(number, dtype=np.int64), drawn])
    means = [(weights @ each)[:, 0] / (weights @ each)[:, 1] for each in sums]
    ratios = means[0] / means[1]
    return float(ratios[0]), float(ratios[1:].std())


def old_share(distances: Sequence[Any], changes: Sequence[Any]) -> float:
    """Return the fraction of a step's change that a server lacks: 0 with new weights, 1 with old.

    It is the least-squares fit of the change to the mismatch.
    """
    apart, change = np.concatenate(distances), np.concatenate(changes)
    return float(apart @ change / (change @ change))


class Loop:
    """The servers, the trainer, and the results of each server."""

    def __init__(self, members: Mapping[str, Member], trainer: Trainer, *, saves: bool) -> None:
        self.members = members
        self.trainer = trainer
        self.found = {name: Followed() for name in members}
        self.freed: list[int] = []  # freed bytes by iteration
        self._saves = saves
        self._pool = ThreadPoolExecutor(len(members))

    @property
    def alive(self) -> dict[str, Member]:
        return {name: each for name, each in self.members.items() if each.failure is None}

    def each(self, what: str, work: Callable[[str, Server], Any]) -> dict[str, Any]:
        """Run `work` on all servers at once. A server that fails is no longer used."""

        def one(item: tuple[str, Member]) -> Any:
            name, member = item
            with watched([member], f"{name}, {what}") as failures:
                return work(name, member.server)
            member.fail(failures[0])
            return None

        alive = self.alive
        found = dict(zip(alive, self._pool.map(one, alive.items()), strict=True))
        return {name: each for name, each in found.items() if name in self.alive}

    def iterate(self, prompts: Sequence[Sequence[int]]) -> None:
        sampling = sampling_of(TOKENS, 1.0, top_p=1.0, top_k=-1, min_p=0.0, n=SAMPLES)
        said = self.each("samples", lambda _, s: s.generate(prompts, sampling, return_logprob=True))
        if self._saves:
            before = _free_memory()
            self.each("release of memory", lambda _, server: server.release_memory())
            self.freed.append(_free_memory() - before)
        for name, each in said.items():
            self._learn(name, prompts, each)
        self.trainer.step()
        self._sync(prompts[0])

    def _learn(self, name: str, prompts: Sequence[Sequence[int]], said: Any) -> None:
        """Compare a server's samples, and add the gradient of their rewards."""
        found = self.found[name]
        rewards, distances, changes = [], [], []
        for i, prompt in enumerate(prompts):
            some = said[i * SAMPLES : (i + 1) * SAMPLES]
            answers = [each["output_ids"] for each in some]
            entries = [each["meta_info"]["output_token_logprobs"] for each in some]
            rolled = torch.tensor([[entry[0] for entry in each] for each in entries])
            trained = self.trainer.logprobs(prompt, answers)
            distances.append((trained.detach().cpu() - rolled).flatten().double().numpy())
            if found.iterations:
                change = self.trainer.change(prompt, answers)
                changes.append(change.cpu().flatten().double().numpy())
            reward = (torch.tensor(answers) % 2 == 0).float().mean(1)
            rewards.append(float(reward.mean()))
            advantage = (reward - reward.mean()).to(DEVICE)
            loss = -(advantage[:, None] * trained).mean() / len(self.alive)
            loss.backward()  # type: ignore[no-untyped-call]
        found.distances += distances
        found.rewards.append(float(np.mean(rewards)))
        if found.iterations:
            found.old_shares.append(old_share(distances, changes))
        found.iterations += 1

    def _sync(self, prompt: Sequence[int]) -> None:
        weights, scales = self.trainer.named(), self.trainer.scales(prompt)

        def give(name: str, server: Server) -> None:
            if self._saves:
                server.resume_memory("weights")
            server.update_weights(pickled(weights | (scales if name.endswith("fp8") else {})))
            if self._saves:
                server.resume_memory("kv_cache")

        self.each("weights", give)


def _free_memory() -> int:
    return torch.cuda.mem_get_info()[0]


def pool_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of all servers' KV pools."""
    a_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    sizes = {"bfloat16": 2, "fp8": 1, "float32": 4}
    return sum(2 * a_token * POOL_TOKENS * sizes[cache] for cache in CACHES)


def judge(data: dict[str, Any], loop: Loop, stats: Mapping[str, Any]) -> None:
    """Fill `data` with the results so far."""
    done = {name: each for name, each in loop.found.items() if each.iterations}
    data["servers_found"] = {name: each.summary() for name, each in done.items()}
    gates = data["gates"] = {}
    wanted = data["iterations"]
    for cache in CACHES:
        pair = [done.get(f"{name} {cache}") for name in ("pat", PEER)]
        if None in pair or pair[0].iterations != pair[1].iterations:
            continue
        ratio, noise = ratio_of(*pair)
        gates[f"{cache}: mean mismatch over {PEER}'s"] = at_most(
            ratio, 1.0, noise=STANDARD_ERRORS * noise
        )
        gates[f"{cache}: iterations"] = at_least(pair[0].iterations, wanted)
        found = data["servers_found"][f"pat {cache}"]
        if found["old_share_by_iteration"]:
            gates[f"{cache}: share of the old weights in pat, in any iteration"] = at_most(
                max(found["old_share_by_iteration"]), OLD_SHARE
            )
        if f"pat {cache}" in stats:
            gates[f"{cache}: KV that pat read, over query by query"] = at_most(
                stats[f"pat {cache}"], READ_RATIO
            )
    if data["saves_memory"] and loop.freed and len(loop.alive) == len(loop.members):
        share = float(np.median(loop.freed)) / pool_bytes(data["model"])
        gates["memory given back, over the KV pools"] = at_least(share, FREED_SHARE)
        data["freed_bytes"] = loop.freed
    data["failures"] = {n: m.failure for n, m in loop.members.items() if m.failure is not None}


def show(data: Mapping[str, Any]) -> None:
    columns = ("", "mean", "p99", "worst", "KL", "old", "reward: first", "last", "tokens")
    table = table_of("mismatch of roll-outs and trainer", columns, words=("",))
    for name, each in data["servers_found"].items():
        numbers = [f"{each[key]:.3g}" for key in ("mean", "p99", "worst", "kl")]
        numbers.append(f"{max(each['old_share_by_iteration'], default=0):.2f}")
        ends = [f"{each['reward_by_iteration'][i]:.3f}" for i in (0, -1)]
        table.add_row(name, *numbers, *ends, f"{each['tokens']:,}")
    console.print(table)
    for name, gate in data["gates"].items():
        met = "met" if gate["met"] else "MISSED"
        noise = f" (noise {gate['noise']:.2g})" if "noise" in gate else ""
        console.print(f"{name}: {gate['value']:.4g}, limit {gate['limit']:.4g}{noise}: {met}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=TRAINED, metavar="FOLDER")
    parser.add_argument("--iterations", type=whole_number(1, 1000), default=20, metavar="N")
    parser.add_argument(
        "--rate",
        type=real_number(1e-9, 1.0),
        default=3e-4,
        metavar="X",
        help="of learning (default: %(default)s, for the tiny model)",
    )
    parser.add_argument("--keep-memory", action="store_true")
    add_option(parser, "--start-seconds", default=150)
    add_option(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if not ON_GPU:
        torch.multiprocessing.set_sharing_strategy("file_system")  # to share with other processes
    saves = ON_GPU and not args.keep_memory
    data: dict[str, Any] = {
        "meta": metadata(),
        "model": json.loads((args.model / "config.json").read_text()),
        "iterations": args.iterations,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "tokens": TOKENS,
        "rate": args.rate,
        "saves_memory": saves,
        "gates": {},
        "failures": {},
    }
    requests = make_requests(PROMPTS * args.iterations, args.model)
    prompts = [request.prompt for request in requests]
    trainer = Trainer(args.model, args.rate)
    with tempfile.TemporaryDirectory(prefix="bench-rl-") as name:
        folder = Path(name)
        scaled = write_scaled(args.model, folder / "scaled", trainer.scales(prompts[0]))
        begun = time.monotonic()
        with fleet(starts(args.model, scaled, saves_memory=saves), folder) as members:
            wait(members.values(), args.start_seconds)
            report_starts(members.values())
            loop = Loop(members, trainer, saves=saves)
            data["servers"] = loop.each("info", lambda name, _: members[name].about())
            first = loop.each("counters", lambda _, server: server.stats())
            for i in range(args.iterations):
                loop.iterate(prompts[i * PROMPTS : (i + 1) * PROMPTS])
                judge(data, loop, {})
                write(args.json, data)
                if not loop.alive:
                    break
            counted = loop.each("counters", lambda _, server: server.stats())
            read = {
                name: read_ratio(difference(each, first[name])) or 1.0
                for name, each in counted.items()
                if each
            }
            judge(data, loop, read)
            data["kv_read_ratio"], data["seconds"] = read, time.monotonic() - begun
        shutil.rmtree(folder, ignore_errors=True)
    write(args.json, data)
    show(data)
    missed = [name for name, gate in data["gates"].items() if not gate["met"]]
    return 1 if missed or data["failures"] or not data["gates"] else 0
