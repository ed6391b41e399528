"""A loop of reinforcement learning: roll-outs by SGLang, a policy-gradient step, weights back.

    python examples/rl_rollouts.py MODEL [--backend NAME] [--iterations N] [--prompt-tokens N]

Each iteration compares the log-probabilities of the roll-out with the trainer's of the same tokens
and weights. Their mean distance is the mismatch; run it with another --backend to compare. The
reward is the share of even tokens. MODEL is a folder: `sglang-pat demo --write-model tiny` writes
one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sglang_pat.sglang.cpu import cuda_driver_is_present, new_engine

PROMPTS, SAMPLES, TOKENS = 4, 8, 24


def logprobs(model: torch.nn.Module, prompt: list[int], answers: list[list[int]]) -> torch.Tensor:
    """Log-probabilities `[samples, TOKENS]` by the trainer."""
    tokens = torch.tensor([prompt + answer for answer in answers], device=model.device)
    every = model(tokens).logits[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    return every.gather(-1, tokens[:, len(prompt) :, None]).squeeze(-1)


def sync(engine: Any, model: torch.nn.Module) -> None:
    """Give the server the trainer's weights, which empties its cache. RuntimeError if refused."""
    weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
    steps = [lambda: engine.update_weights_from_tensor(weights)]
    if hasattr(engine, "begin_weight_update"):  # later versions of SGLang want a session
        steps = [engine.begin_weight_update, *steps, engine.end_weight_update]
    for step in steps:
        success, message = step()
        if not success:
            raise RuntimeError(f"the server has kept its weights: {message}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--backend", default="pat")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-3, help="1e-3 is for a tiny model")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="which samples share")
    args = parser.parse_args()
    if not Path(args.model, "config.json").is_file():
        parser.error(f"MODEL {args.model}: no config.json there; allowed: the folder of a model")
    on_gpu = cuda_driver_is_present()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    size = (
        {"mem_fraction_static": 0.4, "enable_memory_saver": True}
        if on_gpu
        else {"max_total_tokens": 16384, "sleep_on_idle": True}
    )
    engine = new_engine(
        model_path=args.model, attention_backend=args.backend, device=device, dtype=dtype,
        skip_tokenizer_init=True, log_level="error", disable_cuda_graph=not on_gpu, **size,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    torch.manual_seed(1)
    words = torch.randint(3, model.config.vocab_size, (PROMPTS, args.prompt_tokens))
    sampling = {"n": SAMPLES, "temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    for iteration in range(args.iterations):
        prompts = words.tolist()
        said = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        loss, mismatch, rewards = torch.zeros((), device=device), [], []
        for i, prompt in enumerate(prompts):
            group = said[i * SAMPLES : (i + 1) * SAMPLES]
            answers = [each["output_ids"] for each in group]
            rolled = [[e[0] for e in each["meta_info"]["output_token_logprobs"]] for each in group]
            trained = logprobs(model, prompt, answers)
            mismatch.append((trained.detach().cpu() - torch.tensor(rolled)).abs().mean().item())
            reward = (torch.tensor(answers) % 2 == 0).float().mean(1)
            advantage = (reward - reward.mean()).to(device)
            loss = loss - (advantage[:, None] * trained).mean()
            rewards.append(reward.mean().item())
        if on_gpu:  # the trainer has the memory for a while
            engine.release_memory_occupation(["kv_cache", "weights"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if on_gpu:
            engine.resume_memory_occupation(["weights"])
        sync(engine, model)
        if on_gpu:
            engine.resume_memory_occupation(["kv_cache"])
        reward, off = sum(rewards) / PROMPTS, sum(mismatch) / PROMPTS
        print(f"iteration {iteration}: reward {reward:.3f}, mismatch {off:.2e}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
