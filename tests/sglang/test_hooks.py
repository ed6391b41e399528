"""The request tracker's hooks are installed, also beside other plug-ins' hooks."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_pat.sglang.start import hooks
from sglang_pat.sglang.start.hooks import AFTER, Hook


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a class to hook in a new module, with an empty hook registry."""

    class Owner:
        @classmethod
        def make(cls) -> str:
            return "made"

        def run(self) -> str:
            return "ran"

    module = ModuleType("module_to_hook")
    module.Owner = Owner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.module_to_hook", module)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return Owner


def hooks_on(*methods: str) -> tuple[list[Hook], list[str]]:
    """Return hooks on these methods of `owner`, and a list of the called names."""
    called: list[str] = []

    def hook_for(name: str) -> Callable[..., None]:
        return lambda result, *args: called.append(name)

    made = [Hook(f"module_to_hook:Owner.{name}", hook_for(name), AFTER) for name in methods]
    return made, called


def test_hooks_are_installed_once(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, called = hooks_on("make", "run")
    for _ in range(2):
        hooks.install_hooks(made)
    assert owner.make() == "made"
    assert owner().run() == "ran"
    assert called == ["make", "run"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("gone", r"sglang\.srt\.module_to_hook:Owner\.gone"),
        ("not applied", r"sglang\.srt\.module_to_hook:Owner\.run"),
        ("replaced", r"sglang\.srt\.module_to_hook:Owner\.run"),  # another plug-in replaced it
        ("no module", r"sglang\.srt\.gone:Owner\.run; supported"),
    ],
)
def test_a_hook_that_is_not_in_place_is_an_error(
    wrong: str, named: str, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = hooks_on(*(("run", "gone") if wrong == "gone" else ("run",)))
    if wrong == "no module":
        made = [made[0]._replace(target="gone:Owner.run")]
    elif wrong == "not applied":
        monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    elif wrong == "replaced":
        hooks.install_hooks(made)
        owner.run = lambda self: "something else"
    check = hooks.install_hooks if wrong in ("gone", "not applied") else hooks.check_hooks
    with pytest.raises(RuntimeError, match=f"could not hook {named}"):
        check(made)


def test_hooks_of_other_plug_ins_on_the_same_method_stay(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, called = hooks_on("run")
    HookRegistry.register(
        "sglang.srt.module_to_hook.Owner.run", lambda *args: called.append("theirs"), AFTER
    )
    HookRegistry.apply_hooks()
    hooks.install_hooks(made)
    owner().run()
    assert called == ["theirs", "run"]
