"""The hooks of the side channel: whether they take hold, beside those of other plug-ins."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat.sglang import hooks


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A class to hook, in a module of its own; with SGLang's registry empty."""

    class Owner:
        @classmethod
        def make(cls) -> str:
            return "made"

        def run(self) -> str:
            return "ran"

    module = ModuleType("module_to_hook")
    module.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "module_to_hook", module)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return Owner


def use_hooks(monkeypatch: pytest.MonkeyPatch, *methods: str) -> list[str]:
    """Let the side channel hook these methods of `owner`; the names of those called."""
    called: list[str] = []

    def hook_for(name: str) -> Callable[..., None]:
        return lambda result, *args: called.append(name)

    made = [("module_to_hook:Owner", name, hook_for(name), HookType.AFTER) for name in methods]
    monkeypatch.setattr(hooks, "_HOOKS", tuple(made))
    return called


def test_hooks_are_installed_once(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = use_hooks(monkeypatch, "make", "run")
    for _ in range(2):
        hooks.install_hooks()
    assert owner.make() == "made"
    assert owner().run() == "ran"
    assert called == ["make", "run"]


def test_a_hook_that_finds_no_target_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run", "gone")
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.gone"):
        hooks.install_hooks()


def test_a_hook_that_was_not_applied_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run")
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.run"):
        hooks.install_hooks()


def test_a_hook_that_another_plug_in_replaced_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run")
    hooks.install_hooks()
    owner.run = lambda self: "something else"
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.run"):
        hooks.check_hooks()


def test_hooks_of_other_plug_ins_on_the_same_method_stay(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = use_hooks(monkeypatch, "run")
    HookRegistry.register(
        "module_to_hook.Owner.run", lambda result, *args: called.append("theirs"), HookType.AFTER
    )
    HookRegistry.apply_hooks()
    hooks.install_hooks()
    owner().run()
    assert called == ["theirs", "run"]


def test_the_hooks_take_hold_in_this_sglang() -> None:
    hooks.install_hooks()
    hooks.check_hooks()
    hooked = {f"{owner}.{method}": hook for owner, method, hook, _ in hooks._HOOKS}
    assert hooked == {
        "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new": hooks._after_init_new,
        "sglang.srt.model_executor.model_runner:ModelRunner._forward_raw": hooks._around_forward,
        "sglang.srt.managers.schedule_batch:Req.reset_for_retract": hooks._after_retraction,
    }
    for owner, method, hook, _ in hooks._HOOKS:
        assert hooks._is_hooked(owner, method, hook)
        assert not hooks._is_hooked(owner, method, lambda: None)
