"""Reads SGLang's request dumps, which are pickles of the requests that a server has answered.

This is one of the formats of `formats.py`. After `POST /configure_logging` has set
`dump_requests_folder`, a server writes a dump each time `dump_requests_threshold` requests have
finished. With `--crash-dump-folder`, a server also writes a dump when it crashes. SGLang 0.5.17 and
0.5.23 both write a dict whose `requests` are tuples
`(GenerateReqInput, answer, seconds of arrival, seconds of completion)`.

Plain unpickling would run code that the file names. Here, an object of any class becomes an inert
record of its attributes, and no module is imported.
"""

from __future__ import annotations

import pickle
from array import _array_reconstructor, array  # type: ignore[attr-defined]
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sglang_pat.messages import quoted
from sglang_pat.workload.request_log import requests_of
from sglang_pat.workload.request_prompts import LoggedRequest
from sglang_pat.workload.times import seconds
from sglang_pat.workload.trace import NotReplayed, TraceErrors

# SGLang may keep token ids in an array. These two functions run no code of the file.
_ALLOWED = {("array", "array"): array, ("array", "_array_reconstructor"): _array_reconstructor}


def read_dump(
    binary: BinaryIO, file: str, errors: TraceErrors
) -> Iterator[tuple[int, LoggedRequest]]:
    """Yield (number, request) of every record. Numbers begin at 1. A dump must fit into memory.

    The answer of an unfinished request (in a crash dump) has the tokens generated so far.
    ValueError if the file is not a request dump.
    """
    try:
        dump = _InertUnpickler(binary).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{file}: not a pickle that can be read: {error}") from error
    records = dump.get("requests") if isinstance(dump, dict) else None
    if not isinstance(records, list):
        raise ValueError(f"{file}: not a request dump of SGLang: it has no list 'requests'")
    for number, record in enumerate(records, start=1):
        try:
            request = _parse_record(record, errors)
        except NotReplayed as what:
            errors.leave_out(str(what))
        except ValueError as error:
            errors.add(file, number, str(error))
        else:
            errors.used += 1
            yield number, request


class _Inert:
    """Stands for an object of the file. Keeps the object's attributes and does nothing."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        # If a class has __slots__, the state is a pair: __dict__ or None, a dict of the slots.
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __call__(self, *_arguments: object, **_keywords: object) -> _Inert:
        return self

    # pickle calls these methods to fill subclasses of list, dict and set.
    def append(self, _value: object) -> None:
        pass

    def extend(self, _values: object) -> None:
        pass

    def add(self, _value: object) -> None:
        pass

    def __setitem__(self, _key: object, _value: object) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        return _ALLOWED.get((module_name, global_name), _Inert)


def _parse_record(record: object, errors: TraceErrors) -> LoggedRequest:
    if not (isinstance(record, tuple) and len(record) == 4):
        raise ValueError("not a tuple of request, answer, arrival and completion")
    asked, answer, arrival, _ = record
    if not (isinstance(asked, _Inert) and isinstance(answer, dict)):
        raise ValueError("no GenerateReqInput with an answer")
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)):
        raise ValueError(f"it arrived at {quoted(arrival)}; a number of seconds is needed")
    # If a request asks for `n` answers, the dump already has n records, one per answer.
    (found,) = requests_of(vars(asked), answer, seconds(arrival), errors, expands=False)
    return found


def dump_files(folder: Path) -> list[Path]:
    """Return the dumps in a folder and its direct subfolders, sorted by name, and so by time.

    SGLang makes a subfolder per host. Deeper folders are not searched, because that could take
    long. ValueError if there are no dumps.
    """
    files = sorted([*folder.glob("*.pkl"), *folder.glob("*/*.pkl")])
    if not files:
        raise ValueError(f"{folder}: no request dump (*.pkl) in this folder or one below it")
    return files
