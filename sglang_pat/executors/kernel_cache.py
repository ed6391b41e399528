"""The folder of compiled kernels: its path, its ownership checks, and its locks.

An entry is a folder with a compiled image. `jit.py` names and fills entries. The last step of
making an entry is to rename a filled folder, so an entry that exists is complete.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

CACHE_VARIABLE = "SGLANG_PAT_KERNEL_CACHE"
ANOTHER_FOLDER = f"set {CACHE_VARIABLE} to another folder"  # the end of every error message
IMAGE = "kernels.cubin"

LOCK_TIMEOUT_S = 900.0  # several times as long as a build takes on one slow core
LEAST_FREE = 4_000_000  # bytes, several times as much as a variant of the kernels takes
_SILENT_WAIT_S = 5.0
_BUILD = ".build-"  # a folder KEY.build-PID@HOST-RANDOM is an entry that is being filled


class KernelCacheError(RuntimeError):
    """The cache cannot be used. The message names the path and what to do."""


def default_cache(variables: Mapping[str, str] | None = None) -> Path:
    """Return SGLANG_PAT_KERNEL_CACHE if it is set, else `sglang-pat` in the user's cache folder.

    The user's cache folder is XDG_CACHE_HOME or ~/.cache.

    Parameters
    ----------
    variables
        The environment variables. None: those of this process.

    Raises
    ------
    ValueError
        The variable is not an absolute path, or it is not set and this user has no home folder.
    """
    given = (os.environ if variables is None else variables).get(CACHE_VARIABLE)
    if given is not None:
        if not Path(given).is_absolute():
            raise ValueError(f"{CACHE_VARIABLE}={given!r}; allowed: an absolute path of a folder")
        return Path(given)
    folder = user_cache_path("sglang-pat")
    if not folder.is_absolute():
        raise ValueError(
            f"user {os.geteuid()} has no home folder for compiled kernels: set {CACHE_VARIABLE}"
        )
    return folder


def versions(cache: Path, key: str) -> list[str]:
    """Return the names of all cache entries `KEY-DIGITS`, where KEY is `key`, newest first.

    Raises
    ------
    KernelCacheError
        This user cannot read the folder.
    """
    try:
        pattern = re.compile(re.escape(key) + "-[0-9a-f]+")
        found = [name for name in os.listdir(cache) if pattern.fullmatch(name)]
        return sorted(found, key=lambda name: (cache / name).stat().st_mtime, reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(cache, error.strerror) from error


def find(cache: Path, key: str) -> Path | None:
    """Return the image of entry `key`, or None if the cache does not have it. Write nothing.

    Raises
    ------
    KernelCacheError
        The entry exists, but this user cannot read it, or another user can write to it.
    """
    image = cache / key / IMAGE
    try:
        image.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(image, error.strerror) from error
    if not os.access(image, os.R_OK):
        raise _unreadable(image, "Permission denied")
    check_owners(image.parents[1], image.parent, image)
    return image


def add(
    cache: Path,
    key: str,
    fill: Callable[[Path], None],
    *,
    replace: bool = False,
    timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """Make entry `key` if it does not exist, and return its image.

    Any number of processes may call this at the same time. One fills the entry, and the others
    wait. A process that is killed does not block the next one. Every user may read the entry.

    Parameters
    ----------
    cache
        The folder of all entries. It is made if it does not exist.
    key
        The entry's name: a file name.
    fill
        Called with a folder. Writes IMAGE and all other files of the entry into it.
    replace
        Fill the entry even if it exists.
    timeout_s
        Longest time to wait for another process, in seconds.

    Raises
    ------
    KernelCacheError
        The cache cannot be written, another user can write to it, or the lock is still held after
        `timeout_s`.
    """
    make_folder(cache)
    check_owners(cache)
    with _locked(cache, key, timeout_s):
        if not replace:
            image = find(cache, key)
            if image is not None:
                return image
        for abandoned in cache.glob(f"{key}{_BUILD}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        prefix = f"{key}{_BUILD}{os.getpid()}@{socket.gethostname()}-"
        try:
            work = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
            try:
                fill(work)
                _publish(work, cache / key)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:  # for example a full disk
            raise _unwritable(cache, error) from error
    return cache / key / IMAGE


def check_owners(*paths: Path) -> None:
    """Refuse files and folders that another user could have written: their code would be run.

    Each path must belong to this user or to root, and nobody else may have write permission. A
    folder above a path must not be writable by everybody, unless the folder is sticky, as /tmp is.

    Raises
    ------
    KernelCacheError
        A path is refused. The message has its owner and its mode.
    """
    above = set()
    for path in paths:
        real = path.resolve()
        above |= set(real.parents)
        status = real.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise KernelCacheError(
                f"{path} belongs to user {_user(status.st_uid)}, who could have planted it: only "
                f"kernels of {_user(os.geteuid())} and of root are loaded. Remove it, or "
                f"{ANOTHER_FOLDER}"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _writable_by_others(path, status.st_mode)
    for folder in sorted(above):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise _writable_by_others(folder, mode)


def problem_with_writing(cache: Path) -> str | None:
    """Return why no kernel can be added to `cache`, or None if kernels can be added."""
    # Inside a folder without permissions, os.path.exists() does not raise, but returns False.
    folder = next(path for path in (cache, *cache.parents) if os.path.exists(path))
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    total, _, free = shutil.disk_usage(folder)
    if total > 0 and free < LEAST_FREE:  # total 0: a file system that does not know its size
        return f"its disk has {free / 1e6:.1f} MB left, and kernels need {LEAST_FREE / 1e6:.0f}"
    return None


@contextlib.contextmanager
def _locked(cache: Path, key: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock of an entry. The system releases the lock however the process ends."""
    path = cache / f"{key}.lock"
    lock = FileLock(path, mode=0o644)  # opens with O_NOFOLLOW
    silent = min(_SILENT_WAIT_S, timeout_s)
    try:
        try:
            lock.acquire(timeout=silent)
        except Timeout:
            print(
                f"sglang-pat: waiting for {_builder(cache, key)}, which compiles the same kernels",
                file=sys.stderr,
                flush=True,
            )
            lock.acquire(timeout=timeout_s - silent)
    except Timeout:
        raise KernelCacheError(
            f"{path} has been held for {timeout_s:.0f} s by {_builder(cache, key)}: end that "
            f"process, or {ANOTHER_FOLDER}"
        ) from None
    except OSError as error:  # ELOOP: the lock's path is a link
        raise _unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


def _builder(cache: Path, key: str) -> str:
    """Return which process holds an entry's lock, by the id in the name of the folder it fills."""
    for folder in cache.glob(f"{key}{_BUILD}*"):
        pid, _, rest = folder.name.partition(_BUILD)[2].partition("@")
        with contextlib.suppress(OSError):  # the other process may have ended
            minutes = (time.time() - folder.stat().st_mtime) / 60
            host = rest.rpartition("-")[0]
            return f"process {pid} on {host} (its last file is {minutes:.0f} minutes old)"
    return "an unknown process"


def make_folder(cache: Path) -> None:
    """Make the folder if it does not exist. KernelCacheError if it cannot be made or written."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        try:
            cache.mkdir()
        except FileExistsError:
            if not cache.is_dir():
                raise
        else:
            cache.chmod(0o755)  # other users may read, despite the umask
    except OSError as error:
        raise _unwritable(cache, error) from error
    problem = problem_with_writing(cache)
    if problem is not None:
        raise KernelCacheError(_UNWRITABLE.format(path=cache, problem=problem))


def _publish(work: Path, entry: Path) -> None:
    """Make the files in `work` readable by every user, and rename the folder to `entry`."""
    for path in work.iterdir():
        path.chmod(0o644)
    work.chmod(0o755)
    if entry.exists():  # processes that have loaded the old image keep it in memory
        entry.rename(work.with_name(f"{work.name}-old"))
    work.rename(entry)
    shutil.rmtree(work.with_name(f"{work.name}-old"), ignore_errors=True)


_UNWRITABLE = (
    f"the kernel cache {{path}} cannot be written ({{problem}}): correct this, or {ANOTHER_FOLDER}"
)


def _unwritable(path: Path, error: OSError) -> KernelCacheError:
    return KernelCacheError(_UNWRITABLE.format(path=path, problem=error.strerror))


def _unreadable(path: Path, problem: str | None) -> KernelCacheError:
    return KernelCacheError(
        f"{path} cannot be read by user {_user(os.geteuid())} ({problem}): make it readable "
        f"(chmod a+rX), or {ANOTHER_FOLDER}"
    )


def _writable_by_others(path: Path, mode: int) -> KernelCacheError:
    return KernelCacheError(
        f"{path} can be written by other users (mode {stat.S_IMODE(mode):04o}), who could plant "
        f"kernels: run chmod go-w {path}, or {ANOTHER_FOLDER}"
    )


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:  # the user has no name, as in many containers
        return str(uid)
