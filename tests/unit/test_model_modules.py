"""Finds the modules of SGLang's models that need not be imported to build a class."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_pat.offline import model_modules
from sglang_pat.offline.model_modules import check_known, modules_without


def test_modules_that_do_not_define_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "srt/models"
    folder.mkdir(parents=True)
    (folder / "llama.py").write_text("class LlamaForCausalLM(nn.Module):\n    pass\n")
    (folder / "qwen2.py").write_text("from x import LlamaForCausalLM\nclass Qwen2ForCausalLM: ...")
    (folder / "phi3.py").write_text("class Phi3ForCausalLM(LlamaForCausalLM): ...")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(model_modules, "find_spec", lambda name: package)
    assert modules_without({"LlamaForCausalLM"}) == ["phi3", "qwen2"]
    assert modules_without({"LlamaForCausalLM", "Phi3ForCausalLM"}) == ["qwen2"]
    # If no module has a class of this name, all modules are imported.
    assert modules_without({"Llama"}) == []
    assert modules_without(()) == []
    monkeypatch.setattr(model_modules, "find_spec", lambda name: None)
    assert modules_without({"LlamaForCausalLM"}) == []


def test_a_class_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LlamaForCausalLM", "BloomForCausalLM"):  # SGLang's, transformers'
        check_known(name, {})
    for name in ("LlamaForCausal", "x" * 500):
        with pytest.raises(
            ValueError, match=r"neither the installed SGLang nor transformers .*"
        ) as error:
            check_known(name, {})
        assert len(str(error.value)) < 200
    check_known("Cheese", {"auto_map": {"AutoModelForCausalLM": "modeling.Cheese"}})
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "more_models")
    check_known("Cheese", {})
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE")
    monkeypatch.setattr(model_modules, "find_spec", lambda name: None)
    check_known("Cheese", {})
