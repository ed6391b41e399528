"""The doctor's checks that ask SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention import attention_registry

from sglang_pat.cli import doctor
from sglang_pat.sglang import hooks


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_registration().status == "ok"
    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "pat")
    check = doctor.check_registration()
    assert check.status == "failed"
    assert check.found == "pat is missing from the attention registry"
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", [])
    assert "--attention-backend" in doctor.check_registration().found


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_hooks().status == "ok"
    nothing = SimpleNamespace(register=lambda *args: None, apply_hooks=lambda: None)
    monkeypatch.setattr(hooks, "HookRegistry", nothing)
    monkeypatch.setattr(hooks, "_is_hooked", lambda *args: False)
    check = doctor.check_hooks()
    assert check.status == "failed"
    assert "pat could not hook sglang.srt.model_executor.forward_batch_info" in check.found


def test_the_whole_command_with_sglang(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "sglang-pat"
    report = tmp_path / "report.json"
    child = subprocess.run(
        [script, "doctor", "--json", report], capture_output=True, text=True, timeout=120
    )
    checks = {each["topic"]: each for each in json.loads(report.read_text())["checks"]}
    assert child.returncode == (1 if "failed" in {c["status"] for c in checks.values()} else 0)
    for topic in ("C++ scheduler", "SGLang", "entry point", "registration", "hooks"):
        assert checks[topic]["status"] == "ok", child.stdout
    assert child.stderr == ""
