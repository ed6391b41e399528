"""The doctor's checks that query SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_families import FAMILIES
from sglang.srt import runtime_context, server_args
from sglang.srt.layers.attention import attention_registry

from sglang_pat import support
from sglang_pat.cli import doctor
from sglang_pat.offline import installed_sglang
from sglang_pat.offline.installed_sglang import TOUCHPOINTS
from sglang_pat.offline.model_support import undivided
from sglang_pat.sglang.start import hooks


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_registration().status == "ok"
    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "pat")
    check = doctor.check_registration()
    assert check.status == "failed"
    assert check.found == "pat is missing from the attention registry"
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", [])
    assert "--attention-backend" in doctor.check_registration().found


def test_backends_of_plug_ins_that_load_later_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_registration().status == "ok"
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "late", lambda runner: None)
    check = doctor.check_registration()
    assert check.status == "warning"
    assert "one of late, pat decodes nothing" in check.found


def run_doctor(model: Path, *options: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / "sglang-pat"
    command = [script, "doctor", "--model", model, *options]
    # Engine tests in the same process disable all models but two.
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_DISABLED_MODEL_ARCHS"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.nightly
def test_routes_of_a_model_without_its_weights(tmp_path: Path) -> None:
    model, report = FAMILIES["gemma-3"].write(tmp_path / "model"), tmp_path / "report.json"
    child = run_doctor(model, "--json", str(report))
    assert child.returncode == 0, child.stderr
    head, *rows, assumed, h100, _, as_a_draft_model, drafts = child.stdout.splitlines()
    assert h100 == "No GPU here: the answer is for an H100."
    assert assumed.startswith("Assumed: one GPU and default options")
    assert f"those of {support.row_of('speculative decoding').supported}. Otherwise" in drafts
    assert "pat decodes the same layers without windows, and pat reads in them" in as_a_draft_model
    assert as_a_draft_model.endswith("fa3 reads its prompts.")
    assert head == ("pat decodes 4 of 4 layers, 2 of them with sliding windows; prefill on fa3")
    assert [row.split(maxsplit=2) for row in rows] == [["0-3", "pat"]]
    assert json.loads(report.read_text())["default_layers"] == {}


@pytest.mark.nightly
@pytest.mark.skipif(
    not hasattr(runtime_context, "override_platform"), reason="0.5.17 resolves for this machine"
)
@pytest.mark.parametrize(
    ("architecture", "more", "backend"),
    [
        ("Gemma4ForConditionalGeneration", FAMILIES["gemma-4"].config, "triton"),
        (
            "Exaone4ForCausalLM",
            {
                "model_type": "exaone4",
                "hidden_size": 256,
                "layer_types": 3 * ["sliding_attention"] + ["full_attention"],
                "sliding_window": 32,
                "sliding_window_pattern": "LLLG",
            },
            "fa3",
        ),
    ],
)
def test_classes_with_backends_of_their_own_as_on_a_gpu(
    architecture: str, more: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    """SGLang chooses a backend for Gemma 4, and refuses CPU backends for EXAONE 4."""
    model = FAMILIES["llama"].write(tmp_path / "model") / "config.json"
    config = json.loads(model.read_text()) | {"architectures": [architecture]} | more
    model.write_text(json.dumps(config))
    child = run_doctor(model.parent)
    assert child.returncode == 0, child.stderr
    head = child.stdout.splitlines()[0]
    assert head.startswith("pat decodes 4 of 4 layers"), head
    assert head.endswith(f"; prefill on {backend}")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "told"),
    [
        (28, 4, (1, 8), "28 query heads on 8 GPUs; allowed: a divisor of 28"),
        (48, 12, (8, 8), "12 KV heads on 8 GPUs; allowed: a divisor or multiple of 12"),
        (48, 12, (4, 8), "12 KV heads on 8 GPUs; allowed: a divisor or multiple of 12"),
        (64, 4, (8, 8), None),
        (32, 2, (1, 4), None),
    ],
)
def test_heads_that_ranks_cannot_divide_are_named(
    heads: int, kv_heads: int, ranks: tuple[int, ...], told: str | None
) -> None:
    assert undivided(heads, kv_heads, ranks) == told


@pytest.mark.nightly
def test_a_large_fp8_pool_beside_fa3_is_assumed(tmp_path: Path) -> None:
    model = FAMILIES["deepseek-v3"].write(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"num_attention_heads": 64}
    (model / "config.json").write_text(json.dumps(config))
    full = run_doctor(model)
    assert "64 heads fill a tile" in full.stdout.splitlines()[0]
    fp8 = run_doctor(model, "--server-args", "--kv-cache-dtype fp8_e4m3")
    assert "pat decodes nothing" not in fp8.stdout
    assert fp8.stdout.splitlines()[0].endswith("prefill on fa3")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "flags", "expected"),
    [
        ("gpt-oss", "", "('bfloat16', (None,), ((64, 64),))"),
        ("gemma-3", "--kv-cache-dtype fp8_e5m2", "('bfloat16', ('float8_e5m2',), ((256, 256),))"),
        ("llama", "--kv-cache-dtype bf16 --dtype float16", "('float16', ('bfloat16',), ())"),
    ],
)
def test_kernels_that_a_server_needs(
    family: str, flags: str, expected: str, tmp_path: Path
) -> None:
    model = FAMILIES[family].write(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("torch_dtype", None)
        part["dtype"] = "bfloat16"
    (model / "config.json").write_text(json.dumps(config))
    code = f"""
from sglang_pat.sglang.cpu import enable_cpu_engine
enable_cpu_engine()
from sglang_pat.offline.model_support import kernels_of_model
print(tuple(kernels_of_model({str(model)!r}, {flags.split()!r})[0]))
"""
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_DISABLED_MODEL_ARCHS"}
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
    )
    assert child.stdout.splitlines()[-1:] == [expected], child.stderr


@pytest.mark.nightly
def test_a_model_that_sglang_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing", "architectures": ["No"]}')
    child = run_doctor(tmp_path)
    assert child.returncode == 1
    assert f"SGLang cannot build {tmp_path} in this process: " in child.stderr


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_hooks().status == "ok"
    nothing = SimpleNamespace(register=lambda *args: None, apply_hooks=lambda: None)
    monkeypatch.setattr(hooks, "HookRegistry", nothing)
    monkeypatch.setattr(hooks, "_is_hooked", lambda *args: False)
    check = doctor.check_hooks()
    assert check.status == "failed"
    assert "pat could not hook sglang.srt.model_executor.forward_batch_info" in check.found


def test_all_that_pat_touches_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that only serve a report count, too: without them no server starts."""
    assert doctor.check_touchpoints().status == "ok"
    (place,) = (each for each in TOUCHPOINTS if each.target.endswith("Scheduler.get_init_info"))
    gone = [place._replace(target=f"{place.target}{i}") for i in range(7)]
    monkeypatch.setattr(installed_sglang, "TOUCHPOINTS", (*TOUCHPOINTS, *gone))
    check = doctor.check_touchpoints()
    assert check.status == "failed"
    assert check.found.startswith(f"SGLang has no {gone[0].target} ({place.why}); ")
    assert check.found.endswith(f"{gone[4].target} ({place.why}); and 2 more")


def test_the_whole_command_with_sglang(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "sglang-pat"
    report = tmp_path / "report.json"
    child = subprocess.run(
        [script, "doctor", "--json", report], capture_output=True, text=True, timeout=120
    )
    checks = {each["topic"]: each for each in json.loads(report.read_text())["checks"]}
    assert child.returncode == (1 if "failed" in {c["status"] for c in checks.values()} else 0)
    for topic in (
        "C++ scheduler",
        "entry point",
        "touchpoints",
        "registration",
        "hooks",
        "self-test",
    ):
        assert checks[topic]["status"] == "ok", child.stdout
    is_tested = version("sglang") in support.SGLANG_VERSIONS
    assert checks["SGLang"]["status"] == ("ok" if is_tested else "warning")
    said = [line for line in child.stderr.splitlines() if not line.startswith("checking; SGLang")]
    assert said == []  # apart from progress lines on a busy machine
