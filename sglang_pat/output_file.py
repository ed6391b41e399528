"""Checks the files that a command will write, before the work starts.

`output_file` and `output_or_stdout` are argparse types, which check one option. `check_outputs`
checks all options of a command together. `write_output` writes a file at the end. `replace_file` is
for files that another process may be reading.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

STDOUT = Path("-")  # stands for standard output
_LONGEST_SUFFIX = 20  # such as .gz, which decides the format
_stdout: TextIO | None = None  # the real stdout while prints go to stderr


def output_file(text: str) -> Path:
    """Return the path of a file to write: an argparse type.

    Raises
    ------
    argparse.ArgumentTypeError
        No file can be written at this path. The message names the path and the reason.
    """
    path = Path(text)
    if path == STDOUT:
        raise argparse.ArgumentTypeError(f"{text!r}: it does not write to stdout; name a file")
    problem = problem_with(path)
    if problem is not None:
        raise argparse.ArgumentTypeError(f"{text!r}: {problem}")
    return path


def output_or_stdout(text: str) -> Path:
    """Return a path as `output_file` does, or `STDOUT` for `-`: an argparse type."""
    return STDOUT if text == str(STDOUT) else output_file(text)


@contextlib.contextmanager
def nothing_else_on_stdout() -> Iterator[None]:
    """Redirect prints to stderr in this context. Only output to `STDOUT` goes to stdout."""
    global _stdout
    _stdout = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout = None


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Check that all files of a command are writable and that none replaces another.

    Two paths are the same file if they lead to the same inode, also through links, or resolve to
    the same path. Devices and pipes (`/dev/null`, `/dev/stdout`) may be named twice.

    Parameters
    ----------
    outputs
        The path by option (`"--json"`). None: the option is not given.
    inputs
        The files that the command reads. They need not exist.

    Raises
    ------
    ValueError
        A file cannot be written, is an input, or is named by two options. The message names the
        option and the path.
    """
    given = {
        option: path for option, path in outputs.items() if path is not None and path != STDOUT
    }
    for option, path in given.items():
        problem = problem_with(path)
        if problem is not None:
            raise ValueError(f"{option} {path}: {problem}")
    files = {option: path for option, path in given.items() if _keeps_one_content(path)}
    read = tuple(inputs)
    seen: dict[str, Path] = {}
    for option, path in files.items():
        for source in read:
            if _is_same_file(path, source):
                raise ValueError(
                    f"{option} {path} would overwrite the input {source}; name another file"
                )
        for other, written in seen.items():
            if _is_same_file(path, written):
                raise ValueError(
                    f"{other} {written} and {option} {path} are the same file; name two files"
                )
        seen[option] = path


def problem_with(path: Path) -> str | None:
    """Return why no file can be written at `path`, or None if one can."""
    try:
        target = path.resolve()
        if target.is_dir():
            return "it is a folder; name a file"
        if target.exists():
            return None if os.access(target, os.W_OK) else "it is not writable"
        if not target.parent.exists():
            return f"its folder {target.parent} does not exist"
        if not target.parent.is_dir():
            return f"{target.parent} is not a folder"
        if not os.access(target.parent, os.W_OK | os.X_OK):
            return f"its folder {target.parent} is not writable"
        # os.stat() raises OSError for a name that is too long, and for a loop of links. resolve()
        # and exists() accept both.
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)
        # In /proc, no file can be made, although the permissions allow it.
        with tempfile.TemporaryFile(dir=target.parent):
            return None
    except (OSError, RuntimeError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


class OutputError(Exception):
    """A file that passed the checks cannot be written any more. The message is one line."""


class StdoutError(OutputError):
    """Standard output cannot be written. The message is one line."""


class CheckedStdout:
    """Standard output that raises StdoutError, or BrokenPipeError if the reader has closed it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream."""
        with _told():
            return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write to the stream."""
        with _told():
            self._stream.writelines(lines)

    def flush(self) -> None:
        """Flush the stream."""
        with _told():
            self._stream.flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as error:
        raise StdoutError(
            f"standard output has the encoding {error.encoding}, which has no "
            f"{error.object[error.start]!a}: set PYTHONIOENCODING=utf-8"
        ) from None
    except OSError as error:
        raise StdoutError(f"standard output: {error.strerror}") from None


def write_output(option: str, path: Path, text: str) -> None:
    """Write the file that `option` names, or `STDOUT`. Raises OutputError."""
    if path == STDOUT:
        (_stdout or sys.stdout).write(text)
        return
    with written(option, path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def written(option: str, path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces the file of `option` when it is complete.

    If the folder is not writable, or the path is a device, the draft is the file itself. If writing
    fails, the draft is removed, unless it is a file that existed before. Raises OutputError, for
    example if the disk is full.
    """
    target = path.resolve()
    is_new = not path.exists()
    draft = path
    if _keeps_one_content(path) and os.access(target.parent, os.W_OK | os.X_OK):
        suffix = target.suffix if len(target.suffix) < _LONGEST_SUFFIX else ""
        draft = target.with_name(f".sglang-pat-{os.getpid()}{suffix}")
    try:
        yield draft
        if draft != path:
            if not is_new:
                shutil.copymode(target, draft)
            os.replace(draft, target)
    except BaseException as error:
        if draft != path or is_new:
            draft.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OutputError(f"{option} {path}: {error.strerror or error}") from None
        raise


def replace_file(path: Path, text: str) -> None:
    """Replace the contents of a file atomically. OSError if it cannot be written."""
    # mkstemp() makes a name that nobody can predict, so nobody can put a link there in advance.
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _keeps_one_content(path: Path) -> bool:
    """True if a second write to `path` replaces the first, as in a file but not a pipe."""
    return path.is_file() or not path.exists()


def _is_same_file(left: Path, right: Path) -> bool:
    try:
        return left.samefile(right)
    except OSError:  # one of them does not exist
        return left.resolve() == right.resolve()
