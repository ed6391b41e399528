"""SGLang's own test kits as tests of `pat`, with their servers and parameters.

The kits are mixins of `unittest.TestCase` that send English prompts to a running server over HTTP.
The CPU and the GPU tests import these classes. Nothing is downloaded. A kit's numbers are SGLang's,
except those that assume a trained model on a large GPU.
"""

from __future__ import annotations

import json
import random
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from sglang.test import kl_test_utils
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang_engines import LAUNCH_SERVER, Server, Stats, running_server
from transformers import PreTrainedTokenizerFast

from common.tiny_model import TinyModel
from sglang_pat.sglang.cpu import cuda_driver_is_present

ON_GPU = cuda_driver_is_present()
VOCAB_SIZE = 32000  # some kits send any token below it
CONTEXT_LENGTH = 131072  # some kits request 100,000 tokens, then abort
END_OF_TEXT = 2
# One of 1,000 tokens ends an answer, but none of the first few. On a GPU rounding changes the
# answers, so one of 2,000 does, which is never among the first, and kits wait longer for an answer
# to end.
GAIN_OF_END, PATIENCE_FOR_END = (1.25, 16) if ON_GPU else (1.6, 1)
# Limit between decode by pat and prefill by SGLang. Float32 on a CPU diverges by 1e-11; wrong
# attention by more than 1.
LARGEST_DIVERGENCE = 1e-2 if ON_GPU else 1e-8


def random_prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    source = random.Random(7)
    tokens = range(300, VOCAB_SIZE)
    return [source.choices(tokens, k=source.randint(shortest, longest)) for _ in range(count)]


@pytest.fixture
def prompts_without_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the prompts of the kits for log-probabilities, which would download LongBench."""
    prompts = random_prompts(48, 150, 450)
    monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda **_: prompts)


# --- servers ---

# Variables of every server: pat checks every step, and SGLang its memory accounting.
VARIABLES = {
    "SGLANG_PAT_DEBUG": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "pat",
    "skip_tokenizer_init": False,
    "max_total_tokens": 65536,
    "max_running_requests": 32,
}
if ON_GPU:  # decode steps are CUDA graphs
    ARGUMENTS |= {
        "dtype": "bfloat16",
        "device": "cuda",
        "disable_cuda_graph": False,
        "cuda_graph_backend_prefill": "disabled",
        "mem_fraction_static": 0.5,
        "sampling_backend": "pytorch",  # nvcc would compile FlashInfer's at its first use
    }
# Name of a server, as in a class's attribute `server` -> its variables and arguments.
SERVERS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "sessions": (
        {},
        {
            "enable_streaming_session": True,
            "chunked_prefill_size": 512,
            # A request must not end by itself in the half second before it is aborted. Requests of
            # OpenAI's API set their own end.
            "preferred_sampling_params": json.dumps({"ignore_eos": True}),
        },
    ),
    "small context": (
        {},
        {
            "enable_streaming_session": True,
            "context_length": 512,
            "page_size": 256,
            "chunked_prefill_size": 4096,
        },
    ),
    "waiting timeout": ({"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}, {"max_running_requests": 1}),
    # The first request compiles kernels, so it may exceed the timeout.
    "running timeout": ({"SGLANG_REQ_RUNNING_TIMEOUT": "3"}, {"skip_server_warmup": True}),
}


class KitServer(NamedTuple):
    """A running server that decodes with pat, and its statistics."""

    server: Server
    model: Path
    stats: Stats


def write_model(folder: Path) -> Path:
    """Write the tiny model with a large vocabulary, which ends its answers by itself."""
    TinyModel(vocab_size=VOCAB_SIZE, max_context_len=CONTEXT_LENGTH).write(folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(head.shape[1], generator=generator) / head.shape[1] ** 0.5
    head[END_OF_TEXT] = GAIN_OF_END * row
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def running_kit_server(name: str, model: Path, folder: Path) -> Iterator[KitServer]:
    """Run one of `SERVERS`, with its log and counters in `folder`."""
    variables, arguments = SERVERS[name]
    stats_file = folder / "stats.json"
    with pytest.MonkeyPatch.context() as environment:
        for variable, value in (VARIABLES | variables).items():
            environment.setenv(variable, value)
        environment.setenv("SGLANG_PAT_STATS_FILE", str(stats_file))
        given = ARGUMENTS | arguments
        with running_server(LAUNCH_SERVER, model, folder / "log", **given) as server:
            if "skip_server_warmup" in arguments:
                ask_until_answered(server)
            yield KitServer(server, model, Stats(stats_file, server.info))


def ask_until_answered(server: Server) -> None:
    """Send requests until one is answered. Raises RuntimeError after ten failures."""
    asked = {"text": "a", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    for _ in range(10):
        if requests.post(f"{server.url}/generate", json=asked, timeout=120).ok:
            return
    raise RuntimeError(f"no answer\n{server.tail()}")


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], KitServer]]:
    """Yield a function that returns a named server, which runs until another is requested."""
    model = write_model(tmp_path_factory.mktemp("kit-model"))
    running: dict[str, KitServer] = {}
    with ExitStack() as stack:

        def start(name: str) -> KitServer:
            if name not in running:
                stack.close()
                running.clear()
                server: AbstractContextManager[KitServer] = running_kit_server(
                    name, model, tmp_path_factory.mktemp("kits")
                )
                running[name] = stack.enter_context(server)
            return running[name]

        yield start


@pytest.fixture(scope="class")
def kit_server(
    request: pytest.FixtureRequest, start_server: Callable[[str], KitServer]
) -> Iterator[None]:
    """Give a kit the server that it names. Fails if pat has decoded nothing meanwhile."""
    kit: Any = request.cls
    server, model, stats = start_server(getattr(kit, "server", "sessions"))
    kit.base_url, kit.process, kit.model = server.url, server.process, str(model)
    kit.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    stats.new()
    yield
    counted = stats.new()
    assert counted["plans_built"] + counted["plans_reused"] > 0


# --- on a server with streaming sessions and chunked prefill ---


@pytest.mark.usefixtures("kit_server")
class TestStreamingSessions(StreamingSessionKitMixin, unittest.TestCase):
    test_leak_logprob_concurrent = pytest.mark.nightly(
        StreamingSessionKitMixin.test_leak_logprob_concurrent
    )
    test_stress_concurrent_sessions = pytest.mark.nightly(
        StreamingSessionKitMixin.test_stress_concurrent_sessions
    )


@pytest.mark.usefixtures("kit_server")
class TestAbortAll(AbortAllMixin, unittest.TestCase):
    abort_all_sleep = 1.0


@pytest.mark.usefixtures("kit_server")
class TestPause(PauseResumeInPlaceMixin, unittest.TestCase):
    pause_num_requests = 16
    pause_max_new_tokens = 2048 if ON_GPU else 96
    pause_duration = 1.0
    pause_ignore_eos = True


@pytest.mark.usefixtures("kit_server", "prompts_without_download")
class TestKLDivergence(KLDivergenceMixin, unittest.TestCase):
    kl_div_thres = LARGEST_DIVERGENCE
    kl_div_max_samples = 8
    kl_div_prefill_max_new_tokens = 32
    kl_div_decode_max_new_tokens = 32


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestUnifiedRadixTree(UnifiedRadixTreeTestMixin, unittest.TestCase):
    test_gsm8k = None  # needs downloads and a trained model
    test_mmlu = None  # in 0.5.17 too
    input_ids = random_prompts(4, 600, 700)
    kl_threshold = LARGEST_DIVERGENCE
    max_new_tokens = 32


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestMatchedStop(MatchedStopMixin, unittest.TestCase):
    patience = 1  # times the kit's tokens

    def test_finish_stop_eos(self) -> None:
        self.patience = PATIENCE_FOR_END
        super().test_finish_stop_eos()

    def _run_completions_generation(self, *, max_tokens: int, **asked: Any) -> None:
        super()._run_completions_generation(max_tokens=self.patience * max_tokens, **asked)

    def _run_chat_completions_generation(self, *, max_tokens: int, **asked: Any) -> None:
        super()._run_chat_completions_generation(max_tokens=self.patience * max_tokens, **asked)


# --- on servers of their own ---


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestAbortLeak(AbortLeakReproKitMixin, unittest.TestCase):
    server = "small context"


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestWaitingTimeout(WaitingTimeoutMixin, unittest.TestCase):
    server = "waiting timeout"


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestRunningTimeout(RunningTimeoutTwoWaveMixin, unittest.TestCase):
    server = "running timeout"
    running_timeout_sleep = 1.5
