"""The side channel: from the scheduler's requests to a DecodeBatch, without an engine."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_trees import Tree, request

from sglang_pat import sglang_batch
from sglang_pat.decode_batch import DecodeBatch
from sglang_pat.sglang_batch import BEAMS, CUT, NO_REQUESTS, BatchReader, running_step

RUNNER = SimpleNamespace(is_draft_worker=False)


def batch_of(lens: list[int], **more: Any) -> Any:
    """Like SGLang's batch, as far as it is read."""
    seq_lens = torch.tensor(lens, dtype=torch.int64)
    fields = {
        "batch_size": len(lens),
        "seq_lens": seq_lens,
        "seq_lens_cpu": seq_lens,
        "forward_mode": ForwardMode.DECODE,
    }
    return SimpleNamespace(**(fields | more))


def read(
    reader: BatchReader, reqs: list[Any], tree: Any, view: Any, **schedule_batch: Any
) -> DecodeBatch:
    """What the reader makes of `view` while SGLang runs a batch of `reqs`."""
    launched = batch_of([1] * len(reqs))
    scheduled = SimpleNamespace(reqs=reqs, tree_cache=tree, **schedule_batch)
    sglang_batch._note_requests(launched, object, scheduled)
    result: DecodeBatch = sglang_batch._publish_requests(
        lambda runner, forward_batch: reader.read(view), RUNNER, launched
    )
    return result


@pytest.fixture
def tree() -> Tree:
    tree = Tree("unified")
    tree.insert([1, 2, 3, 4], range(4))
    return tree


@pytest.fixture
def reqs(tree: Tree) -> list[Any]:
    return [tree.request("a", [1, 2, 3, 4], 4, row=1), tree.request("b", [1, 2], 2, row=2)]


def test_an_eager_step(tree: Tree, reqs: list[Any]) -> None:
    reader = BatchReader()
    batch = read(reader, reqs, tree.cache, batch_of([6, 5]))
    assert batch.seq_lens.tolist() == [6, 5]
    paths = batch.read_paths()
    assert paths.kv_end.tolist() == [2, 4, 2]
    assert batch.key is not None
    assert reader.last_shared is not None
    assert reader.last_shared.reqs == reqs
    assert not reader.private_steps


def test_a_graph_replay_shows_a_namespace_with_padding(tree: Tree, reqs: list[Any]) -> None:
    # A replay is shown padded buffers, and neither names nor requests.
    view = batch_of([6, 5, 1, 1], num_padding=2, actual_forward_mode=ForwardMode.DECODE)
    batch = read(BatchReader(), reqs, tree.cache, view)
    assert batch.seq_lens.tolist() == [6, 5, 0, 0]
    assert batch.read_paths().path_begin.tolist() == [0, 2, 3, 3, 3]


def test_data_parallel_padding_is_not_announced(tree: Tree, reqs: list[Any]) -> None:
    batch = read(BatchReader(), reqs, tree.cache, batch_of([6, 5, 1]))
    assert batch.seq_lens.tolist() == [6, 5, 0]


def test_an_idle_rank_replays_a_graph_of_padding() -> None:
    batch = BatchReader().read(batch_of([1, 1], num_padding=2))
    assert batch.seq_lens.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"beam_tail": object()}, BEAMS), ({"beam_tail": None}, None)],
)
def test_beam_search(
    tree: Tree, reqs: list[Any], change: dict[str, Any], reason: str | None
) -> None:
    reader = BatchReader()
    batch = read(reader, reqs, tree.cache, batch_of([6, 5, 6]), **change)
    assert list(reader.private_steps) == ([reason] if reason else [])
    # Rows behind the requests are beams, and decode; or else padding.
    assert batch.seq_lens.tolist() == ([6, 5, 6] if reason else [6, 5, 0])


def test_part_of_a_batch_is_private(tree: Tree, reqs: list[Any]) -> None:
    reader = BatchReader()
    batch = read(reader, reqs, tree.cache, batch_of([6]))
    assert reader.private_steps == {CUT: 1}
    assert batch.seq_lens.tolist() == [6]
    assert batch.read_paths().path_begin.tolist() == [0, 0]


def test_a_warm_up_is_private(caplog: pytest.LogCaptureFixture) -> None:
    reader = BatchReader()
    batch = reader.read(batch_of([1, 1, 1]))
    assert batch.seq_lens.tolist() == [1, 1, 1]
    assert batch.key is None
    assert reader.private_steps == {NO_REQUESTS: 1}
    assert reader.last_shared is None
    assert not caplog.records


def test_an_unknown_cache_is_private_and_said_once(
    tree: Tree, reqs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    reader = BatchReader()
    for _ in range(3):
        batch = read(reader, reqs, SimpleNamespace(), batch_of([6, 5]))
    assert batch.read_paths().path_begin.tolist() == [0, 0, 0]
    assert list(reader.private_steps.values()) == [3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "SimpleNamespace" in caplog.text
    assert read(reader, reqs, tree.cache, batch_of([6, 5])).key is not None  # and back


def test_lengths_that_are_not_on_the_host(tree: Tree, reqs: list[Any]) -> None:
    view = batch_of([6, 5], seq_lens_cpu=None)
    assert read(BatchReader(), reqs, tree.cache, view).seq_lens.tolist() == [6, 5]


def test_requests_are_published_only_while_their_batch_runs(tree: Tree, reqs: list[Any]) -> None:
    launched = batch_of([6, 5])
    sglang_batch._note_requests(launched, object, SimpleNamespace(reqs=reqs, tree_cache=tree.cache))

    def fail(runner: Any, forward_batch: Any) -> None:
        assert running_step() is not None
        raise KeyError("from the model")

    with pytest.raises(KeyError, match="from the model"):
        sglang_batch._publish_requests(fail, RUNNER, launched)
    assert running_step() is None

    draft = SimpleNamespace(is_draft_worker=True)
    seen = sglang_batch._publish_requests(lambda *args: running_step(), draft, launched)
    assert seen is None


def test_extends_are_not_noted(reqs: list[Any]) -> None:
    launched = batch_of([6, 5], forward_mode=ForwardMode.EXTEND)
    sglang_batch._note_requests(launched, object, SimpleNamespace(reqs=reqs, tree_cache=None))
    assert not hasattr(launched, sglang_batch._NOTE)


# --- hooks ---


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

    hooks = [("module_to_hook:Owner", name, hook_for(name), HookType.AFTER) for name in methods]
    monkeypatch.setattr(sglang_batch, "_HOOKS", tuple(hooks))
    return called


def test_hooks_are_installed_once(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called = use_hooks(monkeypatch, "make", "run")
    for _ in range(2):
        sglang_batch.install_hooks()
    assert owner.make() == "made"
    assert owner().run() == "ran"
    assert called == ["make", "run"]


def test_a_hook_that_finds_no_target_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run", "gone")
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.gone"):
        sglang_batch.install_hooks()


def test_a_hook_that_was_not_applied_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run")
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.run"):
        sglang_batch.install_hooks()


def test_a_hook_that_another_plug_in_replaced_is_an_error(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hooks(monkeypatch, "run")
    sglang_batch.install_hooks()
    owner.run = lambda self: "something else"
    with pytest.raises(RuntimeError, match=r"could not hook module_to_hook:Owner\.run"):
        sglang_batch.check_hooks()


def test_hooks_of_other_plug_ins_on_the_same_method_stay(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = use_hooks(monkeypatch, "run")
    HookRegistry.register(
        "module_to_hook.Owner.run", lambda result, *args: called.append("theirs"), HookType.AFTER
    )
    HookRegistry.apply_hooks()
    sglang_batch.install_hooks()
    owner().run()
    assert called == ["theirs", "run"]


def test_the_hooks_take_hold_in_this_sglang() -> None:
    sglang_batch.install_hooks()
    sglang_batch.check_hooks()
    for owner, method, _, _ in sglang_batch._HOOKS:
        assert owner.startswith(
            ("sglang.srt.model_executor.", "sglang.srt.managers.schedule_batch")
        )
        assert method in {"init_new", "_forward_raw", "reset_for_retract"}


def test_session_requests_do_not_stop_their_neighbours_from_sharing(
    tree: Tree, reqs: list[Any]
) -> None:
    session = request("s", object(), protected=3, row=5)
    batch = read(BatchReader(), [reqs[0], session, reqs[1]], tree.cache, batch_of([6, 9, 5]))
    paths = batch.read_paths()
    assert paths.path_begin.tolist() == [0, 2, 2, 3]
    assert paths.node_id[0] == paths.node_id[2]
