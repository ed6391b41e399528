"""Registration, and the name `pat` while SGLang resolves its arguments."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_pat.offline.installed_sglang import unwrapped_backends
from sglang_pat.sglang import plugin
from sglang_pat.sglang.compat import resolved
from sglang_pat.sglang.start.argument_rewrite import around_resolution, is_asked_for
from sglang_pat.sglang.start.environment import Environment
from sglang_pat.sglang.start.server_options import batch_invariant

NATIVE = ("torch_native", "torch_native")


def test_registration_makes_pat_a_choice_and_imports_nothing_heavy() -> None:
    code = """
import argparse, gc, sys
gc.disable()  # imports make objects that stay
import sglang.srt.server_args as server_args
from sglang_pat.sglang.plugin import register
before = set(sys.modules)
register()
added = set(sys.modules) - before
assert not [name for name in added if name.startswith("sglang_pat.")], added
heavy = [name for name in added if name.startswith("sglang.srt.model_executor.")]
# The registry of 0.5.21 imports these by itself.
assert not [name for name in heavy if ".runner_backend_utils" not in name], added
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
assert "pat" in ATTENTION_BACKENDS
parser = argparse.ArgumentParser()
server_args.ServerArgs.add_cli_args(parser)
for flag in ("--attention-backend", "--decode-attention-backend"):
    parser.parse_args(["--model-path", "x", flag, "pat"])
print("registered")
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout.strip().endswith("registered"), child.stderr


@pytest.mark.nightly
def test_a_scheduler_imports_pat_in_a_fraction_of_a_second() -> None:
    """The second import is measured, as the first may write bytecode; `verify_mask` is small."""
    code = """
import sys, time
import sglang.srt.managers.scheduler, sglang.srt.layers.attention.base_attn_backend
before, begun = {*sys.modules, "sglang.srt.layers.attention.verify_mask"}, time.perf_counter()
import sglang_pat.sglang.start.argument_rewrite, sglang_pat.sglang.attach
seconds = time.perf_counter() - begun
print(seconds, *sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    for _ in range(2):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        seconds, *packages = child.stdout.splitlines()[-1].split()
        assert set(packages) <= {"sglang_pat", "platformdirs"}
    assert float(seconds) < 0.5  # 0.02 s on a Xeon


# --- substitution ---


def start(model: Path, **arguments: Any) -> ServerArgs:
    """Do the first steps of a launch in the launching process."""
    load_plugins()
    server_args = ServerArgs(model_path=str(model), device="cpu", **arguments)
    if hasattr(server_args, "resolve_once"):  # 0.5.17 resolves in the constructor
        server_args.resolve_once()
    return server_args


def backends(server_args: ServerArgs) -> tuple[str, str]:
    """Return the resolved backends for prefill and decode."""
    names = ("prefill_attention_backend", "decode_attention_backend")
    prefill, decode = (
        resolved(server_args, name) or resolved(server_args, "attention_backend") for name in names
    )
    return prefill, decode


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"attention_backend": "pat"}, NATIVE),
        ({"decode_attention_backend": "pat"}, NATIVE),
        ({"attention_backend": "triton", "decode_attention_backend": "pat"}, ("triton", "triton")),
        (
            {"attention_backend": "pat", "prefill_attention_backend": "triton"},
            ("triton", "torch_native"),
        ),
        ({"prefill_attention_backend": "pat", "decode_attention_backend": "pat"}, NATIVE),
    ],
)
def test_the_default_backend_stands_for_pat(
    chosen: dict[str, str], expected: tuple[str, str], tiny_model: Path
) -> None:
    server_args = start(tiny_model, **chosen)
    assert backends(server_args) == expected
    for each in (server_args, copy.deepcopy(server_args), pickle.loads(pickle.dumps(server_args))):
        assert is_asked_for(each)
        if hasattr(each, "resolve_once"):
            each.resolve_once()  # as in the scheduler's process
        assert backends(each) == expected


def test_an_actor_of_ray_has_the_plug_in(tiny_model: Path) -> None:
    """It gets the arguments pickled, and SGLang loads no plug-ins there."""
    arguments = pickle.dumps(start(tiny_model, attention_backend="pat", use_ray=True))
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); "
    code += "from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES as a; print('pat' in a)"
    child = subprocess.run([sys.executable, "-c", code], input=arguments, capture_output=True)
    assert child.stdout.endswith(b"True\n"), child.stderr


def test_others_are_not_touched(tiny_model: Path) -> None:
    server_args = start(tiny_model, attention_backend="triton")
    assert not is_asked_for(server_args)
    assert backends(server_args) == ("triton", "triton")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"prefill_attention_backend": "pat"},
            "the backend for decode is not given, for prefill pat; use --attention-backend pat or "
            "--decode-attention-backend pat",
        ),
        (
            {"attention_backend": "pat", "decode_attention_backend": "triton"},
            "pat only decodes, but the backend for decode is triton, for prefill pat",
        ),
        (
            {"attention_backend": "pat", "speculative_draft_attention_backend": "pat"},
            "--speculative-draft-attention-backend pat: leave the option out: pat decodes draft ",
        ),
    ],
)
def test_modes_that_pat_does_not_serve_are_refused(
    chosen: dict[str, str], message: str, tiny_model: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        start(tiny_model, **chosen)


@pytest.mark.parametrize("option", ["attention_backend", "decode_attention_backend"])
def test_a_bad_variable_stops_sglang_before_the_model_is_loaded(
    option: str, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    monkeypatch.setenv("SGLANG_PAT_STATS_FILE", "/no/such/folder/f")
    with pytest.raises(ValueError, match=r"SGLANG_PAT_STATS_FILE='/no/such/folder/f'; allowed"):
        start(tiny_model, **{option: "pat"})
    start(tiny_model, **{option: "torch_native"})  # allowed if pat is not used
    monkeypatch.delenv("SGLANG_PAT_STATS_FILE")
    start(tiny_model, **{option: "pat"})


def test_in_strict_mode_options_are_refused_before_a_model_is_loaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "attention_backend": "triton",
        "speculative_algorithm": "NGRAM",
        "prefill_attention_backend": "torch_native",
    }
    start(tiny_model, decode_attention_backend="pat", **options)
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    start(tiny_model, **options)
    message = "speculative decoding = --speculative-attention-mode prefill with torch_native; supp"
    with pytest.raises(ValueError, match=message):
        start(tiny_model, decode_attention_backend="pat", **options)


@pytest.mark.parametrize(
    "option", [{"enable_deterministic_inference": True}, {"rl_on_policy_target": "fsdp"}]
)
def test_deterministic_inference_is_served_with_a_prefix_cache(
    option: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice for a GPU is faked, as SGLang chooses no backend on a CPU."""
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    options = {"attention_backend": "triton", "decode_attention_backend": "pat"} | option
    arguments = start(tiny_model, **options)
    assert is_asked_for(arguments)
    assert batch_invariant(arguments, Environment())
    assert not resolved(arguments, "disable_radix_cache")
    assert "pat" in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "pat" in server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_in_strict_mode_other_options_are_not(
    dtype: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PAT_STRICT", "1")
    assert is_asked_for(start(tiny_model, attention_backend="pat", kv_cache_dtype=dtype))


def test_a_sglang_that_chooses_pat_all_the_same_is_an_error(tiny_model: Path) -> None:
    arguments = SimpleNamespace(
        attention_backend="pat",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_draft_attention_backend=None,
    )

    def resolve(arguments: Any) -> None:
        arguments.attention_backend = "pat"
        arguments._resolved_overrides = []

    with pytest.raises(RuntimeError, match=r"not substituted .* attention_backend is still 'pat'"):
        around_resolution(resolve, arguments)


def test_the_factory_of_pat_says_that_it_was_not_substituted() -> None:
    load_plugins()
    with pytest.raises(RuntimeError, match=r"name 'pat'; supp.*; .*\.load_plugins\(\) before"):
        ATTENTION_BACKENDS["pat"](None)


# --- factories ---


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Record the backends that pat was added to, and their names."""
    from sglang_pat.sglang import attach

    given: list[tuple[Any, str]] = []

    def with_pat(default: Any, name: str, model_runner: Any) -> str:
        given.append((default, name))
        return "with pat"

    monkeypatch.setattr(attach, "with_pat", with_pat)
    return given


def model_runner(*, asks: bool = True, decode: str = "fa3", draft: bool = False) -> Any:
    arguments = SimpleNamespace(_sglang_pat_decodes=asks)
    if not hasattr(ServerArgs, "resolve_once"):  # 0.5.17
        arguments.get_attention_backends = lambda: ("triton", decode)
    return SimpleNamespace(
        server_args=arguments, is_draft_worker=draft, decode_attention_backend_str=decode
    )


def test_the_backend_that_decodes_is_given_to_pat(built: list[tuple[Any, str]]) -> None:
    build = plugin._wrapped("fa3", lambda runner: "default")
    assert build(model_runner()) == "with pat"
    plugin._after_backends(None, SimpleNamespace(**vars(model_runner()), attn_backend="other"))
    assert built == [("default", "fa3"), ("other", "str")]  # of no factory


@pytest.mark.parametrize(
    "other",
    [{"asks": False}, {"decode": "triton"}, {"draft": True}],
    ids=lambda each: next(iter(each)),
)
def test_other_backends_are_not(built: list[tuple[Any, str]], other: dict[str, Any]) -> None:
    build = plugin._wrapped("fa3", lambda runner: "default")
    assert build(model_runner(**other)) == "default"
    assert built == []


def test_all_factories_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugins()
    assert unwrapped_backends() == []
    before = dict(ATTENTION_BACKENDS)
    plugin.register()
    assert before == ATTENTION_BACKENDS
    monkeypatch.setitem(ATTENTION_BACKENDS, "late", lambda runner: None)
    assert unwrapped_backends() == ["late"]
