"""A plug-in of SGLang for tests: prefill servers send KV to decode servers as files.

SGLang's fake transfer moves no data. Subclasses of it here do, in place of NIXL's classes. A decode
server writes how much of a prompt it has (`ROOM.asked`); the prefill server then writes the rest of
the KV and the answer's first token (`ROOM.sent`). Both servers must have the same layers and page
size.
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
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVManager, FakeKVReceiver, FakeKVSender

from fakes.plugins import install_plugin

ARGUMENTS = {"disaggregation_transfer_backend": "nixl"}  # for both servers
_FOLDER = "TEST_KV_FOLDER"  # pat refuses unknown SGLANG_PAT_* variables


def transfer_by_files(folder: Path, environment: pytest.MonkeyPatch) -> None:
    """Install the plug-in for engines that start later. Files go to `folder`."""
    install_plugin(folder, "fakes.kv_files")
    environment.syspath_prepend(folder)  # inherited by the engine's processes
    environment.setenv(_FOLDER, str(folder))


def tokens_kept(folder: Path, room: int) -> int:
    """Return how many tokens of a prompt the decode server had before the transfer."""
    return int((folder / f"{room}.asked").read_text())


def _views(addresses: Any, sizes: Any, item_sizes: Any) -> list[npt.NDArray[np.uint8]]:
    """Return the memory at some addresses, each as `[item, byte]`."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).reshape(-1, item_size)
        for address, size, item_size in zip(addresses, sizes, item_sizes, strict=True)
    ]


class Manager(FakeKVManager):  # type: ignore[misc]
    """Views of a server's KV and of its other data to send: first tokens and their records."""

    def __init__(self, args: Any, *rest: Any) -> None:
        super().__init__(args, *rest)
        self.prefill_info_table: dict[str, Any] = {}
        self.kv = _views(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
        self.records = _views(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)

    def try_ensure_parallel_info(self, address: str) -> bool:
        self.prefill_info_table[address] = SimpleNamespace(dp_size=1)
        return True


class _OfRoom:
    """A request on one of the servers. aux_index: index of its record."""

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, **_: Any) -> None:
        super().__init__(mgr, bootstrap_addr, bootstrap_room)  # type: ignore[call-arg]
        self._path = Path(os.environ[_FOLDER]) / str(bootstrap_room)
        self.asked, self.sent = (self._path.with_suffix(each) for each in (".asked", ".sent"))


class Sender(_OfRoom, FakeKVSender):  # type: ignore[misc]
    """Sends a prompt's KV from the prefill server."""

    def poll(self) -> KVPoll:
        is_waited_for = self.conclude_state is None and not self.asked.exists()
        return KVPoll.Bootstrapping if is_waited_for else super().poll()

    def pop_decode_prefix_len(self) -> int:
        return int(self.asked.read_text())

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        self._left, self._record = num_kv_indices, aux_index
        self._chunks: list[list[npt.NDArray[np.uint8]]] = []

    def send(self, kv_indices: npt.NDArray[np.int32], *_: object, **__: object) -> None:
        self._chunks.append([layer[kv_indices] for layer in self.kv_mgr.kv])
        self._left -= len(kv_indices)
        if self._left == 0:
            layers = map(np.concatenate, zip(*self._chunks, strict=True))
            content = {f"kv{i}": layer for i, layer in enumerate(layers)}
            records = enumerate(self.kv_mgr.records)
            content |= {f"aux{i}": each[self._record] for i, each in records}
            being_written = self._path.with_suffix(".npz")
            np.savez(being_written, **content)
            being_written.rename(self.sent)
            super().send(kv_indices)


class Receiver(_OfRoom, FakeKVReceiver):  # type: ignore[misc]
    """Receives a request's KV on the decode server."""

    def send_metadata(
        self,
        kv_indices: npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
    ) -> None:
        super().send_metadata(kv_indices, aux_index)
        self._pages, self._record = kv_indices, aux_index
        being_written = self._path.with_suffix(".asking")
        being_written.write_text(str(decode_prefix_len or 0))
        being_written.rename(self.asked)

    def poll(self) -> KVPoll:
        if self.has_sent_metadata and self.conclude_state is None:
            if not self.sent.exists():
                return KVPoll.Transferring
            with np.load(self.sent) as content:
                for i, layer in enumerate(self.kv_mgr.kv):
                    layer[self._pages] = content[f"kv{i}"]
                for i, record in enumerate(self.kv_mgr.records):
                    record[self._record] = content[f"aux{i}"]
        return super().poll()


def register() -> None:
    """The plug-in's entry point, in every process of the engine."""
    nixl = ModuleType("sglang.srt.disaggregation.nixl")
    vars(nixl).update(
        NixlKVManager=Manager,
        NixlKVSender=Sender,
        NixlKVReceiver=Receiver,
        NixlKVBootstrapServer=lambda host, port: None,  # both servers know the folder
    )
    sys.modules[nixl.__name__] = nixl
