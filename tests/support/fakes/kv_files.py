"""KV by files: a plug-in of SGLang for tests, with which prefill servers give decode servers KV.

SGLang's own fake transfer moves nothing. This one stands in for NIXL. A decode server writes how
much of a prompt it has (`ROOM.asked`); the prefill server then writes the rest, with the first
token of the answer (`ROOM.sent`). Both must hold the same layers and have pages of the same size.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)

from fakes.plugins import install_plugin

ARGUMENTS = {"disaggregation_transfer_backend": "nixl"}  # of both servers
_FOLDER = "TEST_KV_FOLDER"  # not SGLANG_PAT_*: pat refuses such a variable that it does not know


def transfer_by_files(folder: Path, environment: pytest.MonkeyPatch) -> None:
    """Let engines that are started from now on use the plug-in; files go to `folder`."""
    install_plugin(folder, "fakes.kv_files")
    environment.syspath_prepend(folder)  # which the engine's processes inherit
    environment.setenv(_FOLDER, str(folder))


def tokens_kept(folder: Path, room: int) -> int:
    """Return how many tokens of a prompt the decode server had before the transfer."""
    return int((folder / f"{room}.asked").read_text())


class Manager(BaseKVManager):
    """The KV of a server."""

    def __init__(self, args: Any, *_: object) -> None:
        self.kv_args = args
        self.prefill_info_table: dict[str, Any] = {}

    def register_to_bootstrap(self) -> None:
        pass

    def try_ensure_parallel_info(self, address: str) -> bool:
        self.prefill_info_table[address] = SimpleNamespace(dp_size=1)
        return True

    def pages(self, indices: npt.NDArray[np.int32]) -> list[npt.NDArray[np.uint8]]:
        """Return copies of these pages, for each buffer."""
        args = self.kv_args
        buffers = zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
        return [_items(*buffer)[indices] for buffer in buffers]

    def write_pages(self, indices: npt.NDArray[np.int32], pages: list[Any]) -> None:
        args = self.kv_args
        buffers = zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens, strict=True)
        for buffer, these in zip(buffers, pages, strict=True):
            _items(*buffer)[indices] = these

    def records(self) -> list[npt.NDArray[np.uint8]]:
        """Return views of what else is sent: first tokens, and what belongs to them."""
        args = self.kv_args
        buffers = zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)
        return [_items(*buffer) for buffer in buffers]


def _items(address: int, num_bytes: int, item_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a view of memory: [item, byte]."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(-1, item_bytes)


class Sender(BaseKVSender):
    """A prompt of the prefill server."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, **_: object) -> None:
        self._manager = mgr
        self._path = Path(os.environ[_FOLDER]) / str(bootstrap_room)
        self._left = self._record = 0
        self._chunks: list[list[npt.NDArray[np.uint8]]] = []
        self._state = KVPoll.Bootstrapping

    def poll(self) -> int:
        if self._state == KVPoll.Bootstrapping and self._path.with_suffix(".asked").exists():
            self._state = KVPoll.WaitingForInput
        return self._state

    def pop_decode_prefix_len(self) -> int:
        return int(self._path.with_suffix(".asked").read_text())

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        assert aux_index is not None
        self._left, self._record = num_kv_indices, aux_index

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk  # the first token goes even where all KV is there

    def send(self, kv_indices: npt.NDArray[np.int32], *_: object, **__: object) -> None:
        self._chunks.append(self._manager.pages(kv_indices))
        self._left -= len(kv_indices)
        if self._left == 0:
            content = {
                f"kv{i}": np.concatenate(chunks)
                for i, chunks in enumerate(zip(*self._chunks, strict=True))
            }
            records = self._manager.records()
            content |= {f"aux{i}": each[self._record] for i, each in enumerate(records)}
            being_written = self._path.with_suffix(".npz")
            np.savez(being_written, **content)
            being_written.rename(self._path.with_suffix(".sent"))
            self._state = KVPoll.Success

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()

    def failure_exception(self) -> None:
        raise RuntimeError(f"{self._path}: not sent")

    def abort(self) -> None:
        self._state = KVPoll.Failed


class Receiver(BaseKVReceiver):
    """A request of the decode server."""

    require_staging = False
    abort_notified = False

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int) -> None:
        self.kv_mgr = mgr
        self._path = Path(os.environ[_FOLDER]) / str(bootstrap_room)
        self._pages: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._record = 0
        self._state = KVPoll.Bootstrapping

    def init(self, prefill_dp_rank: int) -> None:
        self._state = KVPoll.WaitingForInput

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        assert aux_index is not None
        self._pages, self._record = kv_indices, aux_index
        being_written = self._path.with_suffix(".asking")
        being_written.write_text(str(decode_prefix_len or 0))
        being_written.rename(self._path.with_suffix(".asked"))
        self._state = KVPoll.Transferring

    def poll(self) -> int:
        sent = self._path.with_suffix(".sent")
        if self._state == KVPoll.Transferring and sent.exists():
            with np.load(sent) as content:
                num_kv = sum(name.startswith("kv") for name in content)
                self.kv_mgr.write_pages(self._pages, [content[f"kv{i}"] for i in range(num_kv)])
                for i, record in enumerate(self.kv_mgr.records()):
                    record[self._record] = content[f"aux{i}"]
            self._state = KVPoll.Success
        return self._state

    def failure_exception(self) -> None:
        raise RuntimeError(f"{self._path}: not received")

    def abort(self) -> None:
        self._state = KVPoll.Failed


class BootstrapServer:
    """Nothing: the folder is known to both."""

    def __init__(self, host: str, port: int) -> None:
        pass


def register() -> None:
    """The plug-in's entry point, in every process of the engine."""
    nixl = ModuleType("sglang.srt.disaggregation.nixl")
    vars(nixl).update(
        NixlKVManager=Manager,
        NixlKVSender=Sender,
        NixlKVReceiver=Receiver,
        NixlKVBootstrapServer=BootstrapServer,
    )
    sys.modules[nixl.__name__] = nixl
