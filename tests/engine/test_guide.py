"""The guide's commands for a server without a GPU work as written, in 4 GB of memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from sglang_engines import START_SECONDS
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_pat.bench.http_server import HttpServer
from sglang_pat.cli.demo.report import TIE_LOGPROB
from sglang_pat.cli.tiny_model import TRAINED
from sglang_pat.sglang.cpu import cuda_driver_is_present

pytestmark = [
    pytest.mark.engine,
    pytest.mark.xdist_group("servers"),
    pytest.mark.skipif(cuda_driver_is_present(), reason="there is a CUDA driver"),
]

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/guide.md"
EXAMPLES = {
    "rollouts": ("--prompts 3 --samples 4 --tokens 8", "12 samples of 3 prompts in "),
    "few_shot": ("--questions 6 --shots 8", "6 questions after 8 examples in "),
    "agents": ("--agents 3 --turns 2", "3 agents, 2 turns each, in "),
}
PORT = "30000"  # SGLang's default, which may be in use on this machine
ASK_SECONDS = 60


class Terminal:
    """Runs the commands of a page in an empty folder, with a free port in place of `PORT`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = str(free.getsockname()[1])
        # The commands must work without the variables that this process has set for SGLang on a
        # CPU.
        prepared = ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "OMP_NUM_THREADS")
        self.environment = {k: v for k, v in os.environ.items() if k not in prepared}
        programs = Path(sys.executable).parent
        self.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def start(self, commands: str) -> HttpServer:
        """Run commands; the last one starts a server."""
        log = self.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-ec", f"{commands.rstrip()} --port {self.port}"],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return HttpServer(process, f"http://127.0.0.1:{self.port}", log)

    def ask(self, *command: str) -> str:
        """Return the output of a command."""
        child = subprocess.run(
            [word.replace(PORT, self.port) for word in command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
        assert child.returncode == 0, child.stderr
        return child.stdout


def answer_of_transformers(model: Path, question: str) -> str:
    """Return the greedy answer of transformers; assert that no two tokens tie."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = tokenizer(f"<s>{question}", return_tensors="pt").input_ids
    options = {"max_new_tokens": 16, "do_sample": False, "output_scores": True}
    found = AutoModelForCausalLM.from_pretrained(model).generate(
        asked, **options, return_dict_in_generate=True
    )
    best = torch.stack(found.scores).log_softmax(-1).topk(2).values
    assert (best[..., 0] - best[..., 1]).min() > TIE_LOGPROB
    text: str = tokenizer.decode(found.sequences[0, asked.shape[1] :], skip_special_tokens=True)
    return text


def test_the_guide_works_as_typed(tmp_path: Path) -> None:
    section = GUIDE.read_text().partition("## A server without a GPU\n")[2].partition("\n## ")[0]
    commands, logged, curl, client = re.findall(r"```\w*\n(.*?)```", section, re.DOTALL)
    (question,) = set(re.findall(r'"content": "(.*?)"', section))
    terminal = Terminal(tmp_path)
    server = terminal.start(commands)
    try:
        expected = answer_of_transformers(TRAINED, question)  # meanwhile
        server.wait_until_ready(START_SECONDS)
        answer = json.loads(terminal.ask("bash", "-ec", curl))["choices"][0]["message"]["content"]
        assert answer == expected
        assert terminal.ask("python", "-c", client) == f"{answer}\n"
        for name, (sizes, printed) in EXAMPLES.items():
            script = str(ROOT / f"examples/{name}.py")
            url = f"http://127.0.0.1:{PORT}"
            assert printed in terminal.ask("python", script, "--url", url, *sizes.split())
        log = server.log.read_text()
        for line in logged.splitlines():
            assert re.search(rf"^\[[^]]*\] {re.escape(line)}$", log, re.MULTILINE), log
        memory = sum(psutil.Process(each).memory_info().rss for each in server.processes())
        assert memory < int(re.findall(r"(\d+) GB of memory", section)[0]) * 1e9
    finally:
        server.kill()
