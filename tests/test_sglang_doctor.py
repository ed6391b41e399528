"""The doctor's checks that ask SGLang."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention import attention_registry

from sglang_pat import sglang_batch, sglang_doctor


def test_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_doctor.check_registration().status == "ok"
    monkeypatch.delitem(attention_registry.ATTENTION_BACKENDS, "pat")
    check = sglang_doctor.check_registration()
    assert check.status == "failed"
    assert check.found == "pat is missing from the attention registry"
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", [])
    assert "--attention-backend" in sglang_doctor.check_registration().found


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sglang_doctor.check_hooks().status == "ok"
    nothing = SimpleNamespace(register=lambda *args: None, apply_hooks=lambda: None)
    monkeypatch.setattr(sglang_batch, "HookRegistry", nothing)
    monkeypatch.setattr(sglang_batch, "_is_hooked", lambda *args: False)
    check = sglang_doctor.check_hooks()
    assert check.status == "failed"
    assert "pat could not hook sglang.srt.model_executor.forward_batch_info" in check.found
