"""SGLang's own test kits as tests of `pat`: what they are asked with, and nothing else.

The CPU and the GPU tests import the classes, and start the servers. Where a kit's numbers are made
for a trained model on a large GPU, here are ones for the tiny model; they are otherwise SGLang's.
"""

from __future__ import annotations

import contextlib
import json
import random
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from sglang.test import kl_test_utils
from sglang.test.kits import radix_cache_server_kit
from sglang.test.kits.abort_timeout_kit import (
    AbortAllMixin,
    RunningTimeoutTwoWaveMixin,
    WaitingTimeoutMixin,
)
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
from sglang.test.kits.cache_hit_kit import run_multiturn_cache_hit_test
from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang_kits import (
    VOCAB_SIZE,
    KitServer,
    decodes_with_pat,
    running_kit_server,
    write_model,
)

from sglang_pat.sglang.cpu import cuda_driver_is_present

ON_GPU = cuda_driver_is_present()
# One of 1,000 tokens ends the answer, and none of the first few. On a GPU the last bits decide, so
# it is one of 2,000, which is never among the first, and an answer that must end has longer.
GAIN_OF_END, PATIENCE_FOR_END = (1.25, 16) if ON_GPU else (1.6, 1)
# Between decode by pat and prefill by SGLang. Float32 on a CPU moves by 1e-11; what is right on a
# GPU is far from what wrong attention gives, which is above 1.
LARGEST_DIVERGENCE = 1e-2 if ON_GPU else 1e-8


def random_prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    source = random.Random(7)
    tokens = range(300, VOCAB_SIZE)
    return [source.choices(tokens, k=source.randint(shortest, longest)) for _ in range(count)]


@pytest.fixture
def prompts_without_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kits about log-probabilities would download LongBench."""
    prompts = random_prompts(48, 150, 450)
    monkeypatch.setattr(kl_test_utils, "get_input_ids", lambda **_: prompts)


# --- servers ---

ARGUMENTS: dict[str, Any] = {
    "enable_streaming_session": True,
    "chunked_prefill_size": 512,
    # Requests that are aborted half a second later must not have ended by themselves, as one of a
    # few has in so many tokens. What is asked by OpenAI's interface says itself where it ends.
    "preferred_sampling_params": json.dumps({"ignore_eos": True}),
}


@pytest.fixture(scope="module")
def kit_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("kit-model"), gain_of_end=GAIN_OF_END)


@pytest.fixture(scope="module")
def running_server(
    kit_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KitServer]:
    with running_kit_server(kit_model, tmp_path_factory.mktemp("kits"), **ARGUMENTS) as running:
        yield running


@pytest.fixture(scope="class")
def kit_server(request: pytest.FixtureRequest, running_server: KitServer) -> Iterator[None]:
    with decodes_with_pat(running_server, request.cls):
        yield


@pytest.fixture(scope="class")
def server_of_small_context(
    request: pytest.FixtureRequest, kit_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("small-context")
    arguments = {"context_length": 512, "page_size": 256, "chunked_prefill_size": 4096}
    with (
        running_kit_server(kit_model, folder, enable_streaming_session=True, **arguments) as server,
        decodes_with_pat(server, request.cls),
    ):
        yield


@pytest.fixture(scope="class")
def server_of_waiting_timeout(
    request: pytest.FixtureRequest, kit_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("waiting")
    variables = {"SGLANG_REQ_WAITING_TIMEOUT": "0.001"}
    with (
        running_kit_server(kit_model, folder, variables, max_running_requests=1) as server,
        decodes_with_pat(server, request.cls),
    ):
        yield


@pytest.fixture(scope="class")
def server_of_running_timeout(
    request: pytest.FixtureRequest, kit_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("running")
    variables = {"SGLANG_REQ_RUNNING_TIMEOUT": "3"}
    # The first request compiles. It may take longer than that, which a server takes for a fault.
    with running_kit_server(kit_model, folder, variables, skip_server_warmup=True) as server:
        _ask_until_answered(server)
        with decodes_with_pat(server, request.cls):
            yield


def _ask_until_answered(server: KitServer) -> None:
    """RuntimeError if none of ten requests is answered."""
    asked = {"text": "a", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    for _ in range(10):
        if requests.post(f"{server.server.url}/generate", json=asked, timeout=120).ok:
            return
    raise RuntimeError(f"no answer\n{server.server.tail()}")


# --- on a server with streaming sessions and prefill in chunks ---


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
    test_gsm8k = None  # downloads its questions, and asks a trained model
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


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestAPIContract(BasicAPIContractMixin, unittest.TestCase):
    pass


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestSchedulerStress(BasicSchedulerStressMixin, unittest.TestCase):
    # They look for the names of capitals, which a trained model knows.
    test_streaming_response = None
    test_concurrent_requests = None
    if not ON_GPU:
        test_long_prompt = None  # 36,000 tokens, which take a CPU minutes


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestDecodeCorrectness(BasicDecodeCorrectnessMixin, unittest.TestCase):
    # They look for answers that a trained model gives.
    test_capital_france = None
    test_basic_math = None
    test_color_completion = None
    if ON_GPU:

        def test_determinism_temp_zero(self) -> None:
            # Asked for the first time, the prompt is not in the cache: bfloat16 in another order.
            with contextlib.suppress(AssertionError):
                super().test_determinism_temp_zero()
            super().test_determinism_temp_zero()


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestRadixCacheServer(unittest.TestCase):
    base_url: str

    @pytest.fixture(autouse=True)
    def _small_tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        grow = radix_cache_server_kit.gen_radix_tree
        random.seed(3)
        if not ON_GPU:
            monkeypatch.setattr(
                radix_cache_server_kit, "gen_radix_tree", lambda: grow(num_nodes=60, chunk_len=64)
            )

    def test_radix_attention(self) -> None:
        run_radix_attention_test(self.base_url)


@pytest.mark.nightly
@pytest.mark.usefixtures("kit_server")
class TestCacheHit(unittest.TestCase):
    base_url: str
    model: str

    @pytest.fixture(autouse=True)
    def _conversations(self, tmp_path: Path) -> None:
        """In place of ShareGPT, which would be downloaded."""
        source = random.Random(2)
        questions = ("".join(source.choices("abcdefgh ", k=300)) for _ in range(64))
        talks = [{"conversations": [{"value": q}, {"value": "yes " * 20}]} for q in questions]
        self.dataset = tmp_path / "conversations.json"
        self.dataset.write_text(json.dumps(talks))

    def test_multiturn_cache_hit(self) -> None:
        measured = run_multiturn_cache_hit_test(
            self.base_url, self.model, dataset_path=str(self.dataset)
        )
        assert measured["overall"]["cache_hit_rate"] > 0.5


# --- on servers of their own ---


@pytest.mark.nightly
@pytest.mark.usefixtures("server_of_small_context")
class TestAbortLeak(AbortLeakReproKitMixin, unittest.TestCase):
    pass


@pytest.mark.nightly
@pytest.mark.usefixtures("server_of_waiting_timeout")
class TestWaitingTimeout(WaitingTimeoutMixin, unittest.TestCase):
    pass


@pytest.mark.nightly
@pytest.mark.usefixtures("server_of_running_timeout")
class TestRunningTimeout(RunningTimeoutTwoWaveMixin, unittest.TestCase):
    running_timeout_sleep = 1.5
