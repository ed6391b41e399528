"""The folder of compiled kernels: permissions, owners of loaded files, and locking."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_pat.executors import kernel_cache
from sglang_pat.executors.kernel_cache import (
    CACHE_VARIABLE,
    IMAGE,
    KernelCacheError,
    add,
    default_cache,
    find,
    versions,
)

OTHER_USER = 12345  # neither root nor the user who runs the tests

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def fill(work: Path) -> None:
    (work / IMAGE).write_text("a image")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- where ---


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache({}) == Path("/xdg/sglang-pat")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert default_cache({}) == Path("/home/somebody/.cache/sglang-pat")
    assert default_cache({CACHE_VARIABLE: "/kernels"}) == Path("/kernels")
    monkeypatch.setenv(CACHE_VARIABLE, "/of/this/process")
    assert default_cache() == Path("/of/this/process")


@pytest.mark.parametrize("value", ["", "kernels", "~/kernels"])
def test_the_variable_holds_an_absolute_path(value: str) -> None:
    with pytest.raises(ValueError, match=rf"{CACHE_VARIABLE}='{value}'; allowed: an absolute path"):
        default_cache({CACHE_VARIABLE: value})


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "user_cache_path", lambda name: Path("~/.cache") / name)
    with pytest.raises(ValueError, match=rf"no home folder .* set {CACHE_VARIABLE}"):
        default_cache({})


# --- entries ---


def test_an_entry_is_made_once_and_found(cache: Path) -> None:
    assert find(cache, "key") is None
    image = add(cache, "key", fill)
    assert image == cache / "key" / IMAGE
    assert find(cache, "key") == image
    assert add(cache, "key", lambda work: pytest.fail("filled again")) == image
    assert find(cache, "other") is None


def test_an_entry_is_replaced_on_demand(cache: Path) -> None:
    add(cache, "key", fill)
    image = add(cache, "key", lambda work: fill(work) or (work / "new").touch(), replace=True)
    assert (image.parent / "new").exists()
    assert {path.name for path in cache.iterdir()} == {"key", "key.lock"}


def test_every_user_can_read_an_entry(cache: Path) -> None:
    """root builds an image; another user runs it."""
    before = os.umask(0o077)
    try:
        image = add(cache, "key", fill)
    finally:
        os.umask(before)
    assert mode(cache) == mode(image.parent) == 0o755
    assert mode(image) == 0o644


@as_root
def test_an_entry_of_root_is_loaded_by_another_user() -> None:
    """The test loads it as another user, in a process that cannot write to the cache."""
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is private
        Path(folder).chmod(0o755)
        cache = Path(folder, "cache")
        image = add(cache, "key", fill)
        process = multiprocessing.get_context("fork").Process(
            target=_as_other_user, args=(cache, answers := multiprocessing.SimpleQueue())
        )
        process.start()
        process.join(timeout=60)
        assert process.exitcode == 0
        assert answers.get() == image
        refused = answers.get()
        assert f"the kernel cache {cache} cannot be written ({cache} is not writable)" in refused
        assert CACHE_VARIABLE in refused


def _as_other_user(cache: Path, answers: Any) -> None:
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    answers.put(find(cache, "key"))
    try:
        add(cache, "another key", fill)
    except KernelCacheError as error:
        answers.put(str(error))


def test_versions_of_an_entry_are_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions(cache, "key") == []
    for age, name in enumerate(
        ("key-1f", "key-0", "key-x", "key-", "key", "other-1", "key-2.lock")
    ):
        add(cache, name, fill)
        os.utime(cache / name, (1e9 + age, 1e9 + age))
    assert versions(cache, "key") == ["key-0", "key-1f"]
    assert versions(cache / "key" / IMAGE, "key") == []

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)  # root may read everything
    with pytest.raises(KernelCacheError, match=rf"{cache} cannot be read .*chmod a\+rX"):
        versions(cache, "key")


def test_an_entry_that_cannot_be_read_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = add(cache, "key", fill)

    def access(path: Path, mode: int) -> bool:
        return Path(path) != image

    monkeypatch.setattr(os, "access", access)  # root may read everything
    with pytest.raises(KernelCacheError, match=rf"{image} cannot be read .*chmod a\+rX"):
        find(cache, "key")
    real_stat = Path.stat

    def no_stat(path: Path, **options: bool) -> os.stat_result:
        if path == image:
            raise PermissionError(13, "Permission denied")
        return real_stat(path, **options)

    monkeypatch.setattr(Path, "stat", no_stat)
    with pytest.raises(KernelCacheError, match=rf"{image} cannot be read .*Permission denied"):
        find(cache, "key")


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(KernelCacheError, match=rf"{cache} cannot be written.*{CACHE_VARIABLE}"):
            add(cache, "key", fill)

    def fill_a_disk(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(KernelCacheError, match=r"cannot be written \(No space left on device\): "):
        add(tmp_path / "cache", "key", fill_a_disk)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["key.lock"]
    sizes = [0, 0, 0]  # as some FUSE file systems answer
    monkeypatch.setattr(shutil, "disk_usage", lambda _: sizes)
    add(tmp_path / "cache", "key", fill)
    sizes[:] = 5_000_000, 1_000_001, 3_999_999
    with pytest.raises(KernelCacheError, match=r"its disk has 4\.0 MB left, and kernels need 4"):
        add(tmp_path / "cache", "key", fill)


# --- whose files are loaded ---


@as_root
@pytest.mark.parametrize("planted", ["cache", "cache/key", f"cache/key/{IMAGE}"])
def test_files_of_another_user_are_refused(cache: Path, planted: str) -> None:
    add(cache, "key", fill)
    path = cache.parent / planted
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(KernelCacheError, match=rf"{path} belongs to user {OTHER_USER}"):
        find(cache, "key")


@as_root
def test_nothing_is_built_in_a_folder_of_another_user(cache: Path) -> None:
    cache.mkdir()
    os.chown(cache, OTHER_USER, OTHER_USER)
    with pytest.raises(KernelCacheError, match=rf"{cache} belongs to user {OTHER_USER}"):
        add(cache, "key", fill)
    assert not list(cache.iterdir())


@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("path", ["cache", "cache/key", f"cache/key/{IMAGE}"])
def test_files_that_others_can_write_are_refused(cache: Path, path: str, bit: int) -> None:
    add(cache, "key", fill)
    open_path = cache.parent / path
    open_path.chmod(mode(open_path) | bit)
    with pytest.raises(KernelCacheError, match=rf"{open_path} can be written.*chmod go-w"):
        find(cache, "key")


def test_a_folder_above_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "grandparent" / "parent" / "cache"
    add(cache, "key", fill)
    for above in cache.parents[:2]:
        above.chmod(0o1777)  # like /tmp: users cannot replace others' files
        assert find(cache, "key") is not None
        above.chmod(0o777)
        with pytest.raises(KernelCacheError, match=rf"{above} can be written by other users"):
            find(cache, "key")
        above.chmod(0o755)


def test_links_lead_to_files_that_are_checked(cache: Path, tmp_path: Path) -> None:
    add(cache, "key", fill)
    (tmp_path / "link").symlink_to(cache)
    assert find(tmp_path / "link", "key") == tmp_path / "link" / "key" / IMAGE
    cache.chmod(0o777)
    with pytest.raises(KernelCacheError, match="can be written by other users"):
        find(tmp_path / "link", "key")


# --- the lock ---


def test_a_link_in_place_of_the_lock_is_not_followed(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("not to be truncated")
    (cache / "key.lock").symlink_to(precious)
    with pytest.raises(KernelCacheError, match=r"key\.lock cannot be written"):
        add(cache, "key", fill)
    assert precious.read_text() == "not to be truncated"


@pytest.fixture
def slow_build(cache: Path) -> threading.Event:
    """Start another builder of "key", which runs until the event is set."""
    begun, end = threading.Event(), threading.Event()

    def fill_slowly(work: Path) -> None:
        begun.set()
        end.wait(timeout=30)
        fill(work)

    threading.Thread(target=add, args=(cache, "key", fill_slowly), daemon=True).start()
    assert begun.wait(timeout=30)
    return end


def test_whoever_waits_says_for_whom(
    cache: Path,
    slow_build: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernel_cache, "_SILENT_WAIT_S", 0.2)
    threading.Timer(1.0, slow_build.set).start()
    assert add(cache, "key", lambda work: pytest.fail("filled again")).exists()
    assert f"waiting for process {os.getpid()} on " in capsys.readouterr().err


def test_waiting_ends(cache: Path, slow_build: threading.Event) -> None:
    start = time.monotonic()
    with pytest.raises(KernelCacheError, match=rf"key\.lock has been held .*process {os.getpid()}"):
        add(cache, "key", fill, timeout_s=0.3)
    assert time.monotonic() - start < 5
    slow_build.set()


def test_different_entries_do_not_wait_for_each_other(
    cache: Path, slow_build: threading.Event
) -> None:
    assert add(cache, "another key", fill, timeout_s=1).exists()
    slow_build.set()


def test_many_processes_fill_once(cache: Path) -> None:
    def work() -> None:
        add(cache, "key", lambda folder: (fill(folder), (cache / f"{os.getpid()}.filled").touch()))

    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(list(cache.glob("*.filled"))) == 1
