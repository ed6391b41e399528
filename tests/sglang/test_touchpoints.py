"""`sglang_pat/sglang/touchpoints.txt` lists exactly what the code changes or reads in SGLang."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat import sglang as adapter
from sglang_pat.offline import installed_sglang
from sglang_pat.offline.installed_sglang import TOUCHPOINTS, Touchpoint
from sglang_pat.sglang.backend import DecodeMixin, PatMixin
from sglang_pat.sglang.speculative.backends import PatSpeculativeMixin
from sglang_pat.sglang.speculative.draft_requests import BLOCK_WORKERS
from sglang_pat.sglang.tree import radix_paths
from sglang_pat.stats import PlanStats

FOLDER = Path(adapter.__file__).parent
Place = tuple[str, str]  # a module of the adapter, and the name in SGLang


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the adapter's modules that run in a server."""
    for path in sorted(FOLDER.rglob("*.py")):
        name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        if path.stem != "__init__" and not name.startswith("cpu."):
            yield name, ast.parse(path.read_text())


def listed(kind: str) -> set[Place]:
    chosen = [each for each in TOUCHPOINTS if each.kind == kind]
    return {(each.module, each.name or each.target) for each in chosen}


def value_of(node: ast.expr, module: Any) -> set[str]:
    """Return the possible values of an expression. Local variables are block-draft workers."""
    text, names = ast.unparse(node), vars(module)
    try:
        return {eval(text, names)}
    except NameError:
        return {eval(text, names | {"worker": worker}) for worker in BLOCK_WORKERS.values()}


def test_each_row_of_the_table_is_read() -> None:
    assert (
        len(TOUCHPOINTS)
        == len(re.findall(r"^ {11}\S+: ", installed_sglang._TEXT, re.M))
        == len(set(TOUCHPOINTS))
    )
    kinds = {"name", "hook", "wrapper", "override", "class", "attribute", "value", "field"}
    assert {each.kind for each in TOUCHPOINTS} == kinds


def test_hooks_are_those_of_the_list() -> None:
    found = {
        (name, f"sglang.srt.{target}")
        for name, tree in modules()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Hook"
        for module in [importlib.import_module(f"{adapter.__name__}.{name}")]
        for target in value_of(call.args[0], module)
    }
    # plugin.py registers this hook itself, since there is no backend yet.
    resolution = ("plugin", "sglang.srt.server_args:ServerArgs.resolve_once|__post_init__")
    assert found | {resolution} == listed("hook")


def test_methods_that_are_overridden_are_those_of_the_list() -> None:
    overrides = {target.rpartition(".")[2] for _, target in listed("override")}
    # Names that the oldest SGLang lacks.
    later = {each.target.rpartition(".")[2] for each in TOUCHPOINTS if each.not_in}
    sglangs = {*dir(AttentionBackend), *later}
    mixins = (DecodeMixin, PatMixin, PatSpeculativeMixin)
    own = {name for mixin in mixins for name in vars(mixin) if name[0] != "_"}
    assert own & sglangs == overrides


def test_wrapped_methods_of_a_cache_are_those_of_the_list() -> None:
    wrapped = {target.rpartition(".")[2] for name, target in listed("wrapper") if "radix" in name}
    assert wrapped == {"|".join(methods) for methods in radix_paths._METHODS.values()}


def test_attributes_are_those_of_the_list() -> None:
    found = {
        (name, node.value)
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("_sglang_pat_")
    }
    assert found | {("backend", "_pat")} == listed("attribute")


def test_objects_of_sglang_are_written_where_the_list_says() -> None:
    """Attributes that no class of the adapter declares belong to SGLang's objects."""
    trees = list(modules())
    ours = {*PlanStats.__dataclass_fields__, "rid", "stats"}  # of beam rows and PackAttention
    ours |= {
        node.target.id
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    written: set[Place] = set()
    for name, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if ast.unparse(node.value) in ("self", "cls"):
                    ours.add(node.attr)
                else:
                    written.add((name, node.attr))
    written = {place for place in written if place[1] not in ours}
    # Arguments are set with setattr().
    values = [place for place in listed("value") if place[0] != "start.argument_rewrite"]
    expected = {(name, target.rpartition(":")[2].rpartition(".")[2]) for name, target in values}
    expected |= {(name, "__class__") for name, _ in listed("class")}
    expected |= {("speculative.attach", "execute")}  # the wrapper of an object's method
    assert written == expected


# hasattr() calls that do not distinguish versions: about models, pools and marked objects.
NOT_OF_VERSIONS = {
    ("plugin", "hasattr(factory, WRAPPED)"),
    ("start.hooks", "(AttributeError, ImportError)"),
    ("start.layer_rules", "hasattr(getattr(module, 'kv_b_proj', None), 'set_lora')"),
    ("start.layer_rules", "hasattr(pool, 'full_kv_pool')"),
    ("start.layer_rules", "hasattr(text_config, 'wrap_attention_backend')"),
    ("tree.radix_paths", "hasattr(last_node, 'parent')"),
    ("tree.self_test", "(ImportError, AttributeError)"),
}


def test_fields_of_a_batch_that_are_read_are_those_of_the_list() -> None:
    read = {
        node.attr
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "forward_batch"
    }
    assert read == {name for _, name in listed("field")}


def test_only_one_file_asks_what_a_version_of_sglang_has() -> None:
    asks = {
        (name, ast.unparse(node if isinstance(node, ast.Call) else node.type))
        for name, tree in modules()
        if name != "compat"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr")
        or (isinstance(node, ast.ExceptHandler) and "ImportError" in ast.unparse(node))
    }
    assert asks == NOT_OF_VERSIONS


def test_the_installed_sglang_has_all_of_them() -> None:
    assert installed_sglang.missing_touchpoints() == []


@pytest.mark.parametrize(
    "target",
    [
        "sglang.srt.no_such_module:ServerArgs",
        "sglang.srt.server_args:NoSuchClass",
        "sglang.srt.server_args:ServerArgs.no_such_method|nor_this",
        "sglang.srt.server_args:NoSuchClass.resolve_once",
    ],
)
def test_a_place_that_is_gone_is_named(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Touchpoint("hook", target, None, None, "plugin", "")
    field = Touchpoint("value", "sglang.srt.server_args:ServerArgs", "gone", None, "plugin", "")
    read = field._replace(kind="field")
    lacking = field._replace(not_in=installed_sglang.version("sglang"))
    monkeypatch.setattr(installed_sglang, "TOUCHPOINTS", (gone, field, read, lacking))
    assert installed_sglang.missing_touchpoints() == [gone, field, read]
